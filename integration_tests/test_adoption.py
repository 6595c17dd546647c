"""Streams over topics that exist: adopted, used beside native clients, changed under us, and released."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

import rollbridge
from integration_tests.clients import Site, adopt, read_committed
from rollbridge.errors import (
    StreamNotFoundError,
)
from rollbridge.kafka.topics import TopicAdmin
from rollbridge.model import paths
from rollbridge.zookeeper.session import ZooKeeperSession

PARTITIONS = 4
KEYS = [b"key-%d" % number for number in range(40)]


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


def messages(site: Site, topic: str) -> list[Message]:
    """What a plain ``read_committed`` consumer finds in all partitions."""
    return read_committed(site.cluster.bootstrap_servers, [topic], partitions=PARTITIONS)


def found(site: Site, topic: str) -> list[bytes | None]:
    """The values of these."""
    return [message.value() for message in messages(site, topic)]


def test_a_topic_is_adopted_used_beside_native_producers_and_released(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    before = [b"before-%d" % number for number in range(200)]
    native(site, topic, before)
    admin = TopicAdmin(site.cluster.bootstrap_servers)
    was = admin.describe([topic])[topic]
    adoption = adopt(client, topic)
    assert adoption.config.partitioner == "murmur2"
    assert adoption.fit is not None
    assert adoption.fit.keys == len(KEYS)
    assert adoption.config.partitions == PARTITIONS
    with client.transaction(topic) as transaction:
        for key in KEYS:
            transaction.write(topic, key, b"ours-" + key)
        native(site, topic, [b"beside-%d" % number for number in range(40)])
        assert not [value for value in found(site, topic) if value and value.startswith(b"ours-")]
    with client.writer(topic) as writer:
        writer.write(KEYS[0], b"plain").result()
    cas = client.cas_writer(topic)
    cas.write(KEYS[1], b"conditional", expected=cas.tail(KEYS[1]))
    values = found(site, topic)
    expected = {*before, *(b"ours-" + key for key in KEYS), *(b"beside-%d" % number for number in range(40))}
    assert sorted(filter(None, values)) == sorted([*expected, b"plain", b"conditional"])
    # Each key is in one partition, whoever has written it.
    places: dict[bytes, set[int]] = {}
    for message in messages(site, topic):
        places.setdefault(message.key() or b"", set()).add(message.partition() or 0)
    assert {len(item) for item in places.values()} == {1}
    reader = client.reader(topic, follow=False)
    assert sorted(record.value or b"" for record in reader) == sorted(filter(None, values))
    client.admin.release_topic(topic)
    assert admin.describe([topic])[topic] == was
    assert found(site, topic) == values
    with pytest.raises(StreamNotFoundError):
        client.begin(topic)
    with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
        assert session.get(paths.adopted(topic)) is None
    again = adopt(client, topic)
    with client.transaction(topic) as transaction:
        transaction.write(topic, KEYS[0], b"second life")
    assert again.config.first_epoch > adoption.config.first_epoch
    assert b"second life" in found(site, topic)
