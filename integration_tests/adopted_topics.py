"""Adopted topics, their owners and native producers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, read_committed
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import eventually
from rollbridge.kafka.client import KafkaClient

PARTITIONS = 4


KEYS = [b"key-%d" % number for number in range(40)]


@pytest.fixture(scope="module")
def site(cluster: AnyCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One whose leader looks at adopted topics often, and waits shortly for what is open there."""
    logs = tmp_path_factory.mktemp("coordinators")
    settings = {"CONSTANT_TOPIC_CHECK_MS": "200", "CONSTANT_SCALE_WAIT_MS": "1500"}
    with Site(cluster, f"/{logs.name}-adoption", logs, **settings) as site:
        yield site


@pytest.fixture
def kafka(site: Site) -> AdminClient:
    return AdminClient({"bootstrap.servers": site.cluster.bootstrap_servers})


@pytest.fixture
def topic(kafka: AdminClient, unique_name: Callable[[str], str]) -> str:
    """A topic with keyed records of a Java-like producer."""
    name = unique_name("shop.orders")
    for created in kafka.create_topics([NewTopic(name, PARTITIONS, 1)]).values():
        created.result()
    return name


def native(site: Site, topic: str, values: list[bytes], partitioner: str = "murmur2_random", **settings: str) -> None:
    """Write as a native producer does, keys in turn."""
    producer = Producer({"bootstrap.servers": site.cluster.bootstrap_servers, "partitioner": partitioner, **settings})
    for number, value in enumerate(values):
        producer.produce(topic, value, KEYS[number % len(KEYS)])
    assert producer.flush(30) == 0


def messages(site: Site, topic: str, partitions: int = PARTITIONS) -> list[Message]:
    """What a plain ``read_committed`` consumer finds in all partitions."""
    return read_committed(site.cluster.bootstrap_servers, [topic], partitions=partitions)


def found(site: Site, topic: str, partitions: int = PARTITIONS) -> list[bytes | None]:
    """The values of these."""
    return [message.value() for message in messages(site, topic, partitions)]


def grow(kafka: AdminClient, topic: str) -> None:
    """Add a partition, as an owner does."""
    kafka.create_partitions([NewPartitions(topic, PARTITIONS + 1)])[topic].result(120)


def create_anew(site: Site, kafka: AdminClient, topic: str) -> None:
    """Delete the topic and create it again, with more records than it had."""
    kafka.delete_topics([topic])[topic].result(120)
    topics = KafkaClient(site.cluster.bootstrap_servers).topics
    eventually(lambda: topic not in topics.list_topics(), "the topic is gone")
    create_topic(site.cluster.bootstrap_servers, topic, PARTITIONS)
    native(site, topic, [b"other-%d" % number for number in range(400)])
