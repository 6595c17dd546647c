"""What brokers say of partitions and their replicas."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient, PartitionMetadata

from integration_tests.backends.containers import ContainerCluster
from integration_tests.patience import eventually
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec

PARTITIONS = 6
"""So that each broker leads some of them."""


@pytest.fixture
def topic(ensemble: ContainerCluster, topic_prefix: str) -> str:
    """A topic that each broker knows with its leaders: one that was just back hears of it later than the others."""
    KafkaClient(ensemble.bootstrap_servers).topics.create_topics([TopicSpec(name=topic_prefix, partitions=PARTITIONS)])
    eventually(lambda: all(led(ensemble, topic_prefix, broker) for broker in ensemble.brokers), "all brokers know it")
    return topic_prefix


def led(cluster: ContainerCluster, topic: str, asked: str) -> bool:
    """Whether one broker names a leader of each partition."""
    partitions = partitions_of(cluster, topic, asked)
    return len(partitions) == PARTITIONS and all(partition.leader > 0 for partition in partitions.values())


def in_sync(cluster: ContainerCluster, topic: str) -> bool:
    partitions = partitions_of(cluster, topic).values()
    return all(len(partition.isrs) == len(cluster.brokers) for partition in partitions)


def partitions_of(cluster: ContainerCluster, topic: str, asked: str | None = None) -> dict[int, PartitionMetadata]:
    """What one broker, or any, knows of a topic's partitions."""
    servers = cluster.bootstrap_servers if asked is None else address_of(cluster, asked)
    return AdminClient({"bootstrap.servers": servers}).list_topics(topic, timeout=120).topics[topic].partitions


def address_of(cluster: ContainerCluster, broker: str) -> str:
    return cluster.bootstrap_servers.split(",")[cluster.brokers.index(broker)]
