"""Coordinators die by SIGKILL while a topic is adopted, left, given back and released; the next one finishes.

One story for every point: a topic with records and settings of its own is adopted; a transaction is begun, and native
producers write beside it; the stream leaves the topic, and the transaction is rolled in; the stream is deleted, which
makes the topic a plain one; it is adopted again, written to, and released. After it the topic has the settings it had,
and all records once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client, read_committed
from integration_tests.coordinators import Relay
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.seal import SEALED
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import StreamName

PARTITIONS = 3
SETTINGS = {"compression.type": "zstd", "max.message.bytes": "1500000"}
KEYS = [b"key-%d" % number for number in range(30)]
POINTS = [
    "create_stream/DescribeTopics:after",
    "create_stream/ReadCounter:after",
    "create_stream/CreateTopics:fenced",
    "create_stream/CreateTopics:after",
    "create_stream/Write:before",
    "create_stream/Write:after",
    "scale/DescribeTopics:after",
    "scale/Write:before",
    "scale/Write:after",
    "scale/CreateTopics:after",
    "scale/Seal:before",
    "scale/Seal:fenced",
    "scale/Seal:after",
    "scale/Write:after:2",
    "roll/Seal:after",
    "roll/CommitRound:after",
    "delete_stream/Write:before",
    "delete_stream/Write:after",
    "delete_further/DeleteTopics:after",
    "delete_further/DescribeTopics:after",
    "delete_further/SetTopicConfig:fenced",
    "delete_further/SetTopicConfig:after",
    "delete_further/Write:after:2",
    "delete_further/Write:after:3",
    "scale/Write:after + take_over/Seal:after + delete_further/SetTopicConfig:after",
    "scale/Seal:after + take_over/Write:before",
]


class Story:
    """What was written, and where it has to be in the end."""

    def __init__(self, cluster: AnyCluster, root: str, topic: str) -> None:
        self.cluster, self.root, self.topic = cluster, root, topic
        self.name = StreamName.of_topic(topic, topic.replace(".", "_"))  # its group has the scope to itself
        self.admin = KafkaClient(cluster.bootstrap_servers).topics
        self.expected: list[bytes] = []

    def native(self, word: str) -> None:
        """Write as a producer does that knows nothing of us."""
        producer = Producer({"bootstrap.servers": self.cluster.bootstrap_servers, "partitioner": "murmur2_random"})
        for number, key in enumerate(KEYS):
            self.expected.append(b"%s-%d" % (word.encode(), number))
            producer.produce(self.topic, self.expected[-1], key)
        assert producer.flush(30) == 0

    def commit(self, b: rollbridge.Bridge, word: str, *, kept: bool = True) -> None:
        """Commit a transaction; what is ``kept`` stands in the topic in the end."""
        with b.transaction(str(self.name)) as transaction:
            self.write(transaction, word, kept=kept)

    def write(self, transaction: rollbridge.Transaction, word: str, *, kept: bool = True) -> None:
        """Write a record of each key."""
        for key in KEYS:
            transaction.write(str(self.name), key, word.encode() + key)
            if kept:
                self.expected.append(word.encode() + key)

    def play(self) -> None:
        """Run the story; every call waits as long as a failover takes."""
        self.native("before")
        with patient_client(self.cluster, self.root, "teller") as b:
            first = b.admin.adopt_topic(self.topic, stream=str(self.name), partitioner="murmur2", exist_ok=True).config
            self.commit(b, "ours-")
            old = b.begin(str(self.name))
            self.write(old, "rolled-", kept=False)
            old.flush()
            self.native("beside")
            b.admin.scale(str(self.name), seal=[0], ranges=[(0.0, 0.1), (0.1, 1 / PARTITIONS)], leave_topic=True)
            assert dict(self.admin.describe([self.topic])[self.topic].config).items() >= dict(SEALED).items()
            assert old.commit().records == len(KEYS)
            self.commit(b, "elsewhere-", kept=False)
            values = [record.value for record in b.reader(str(self.name), follow=False)]
            away = [word + key for key in KEYS for word in (b"rolled-", b"elsewhere-")]
            assert sorted(filter(None, values)) == sorted([*self.expected, *away])
            b.admin.delete_stream(str(self.name), missing_ok=True)
            self.native("after")
            second = b.admin.adopt_topic(self.topic, stream=str(self.name), partitioner="murmur2", exist_ok=True).config
            assert second.first_epoch > first.first_epoch
            assert second.topic_id == first.topic_id
            self.commit(b, "again-")
            b.admin.release_topic(self.topic, missing_ok=True)
            self.native("plain")

    def check(self) -> None:
        """The topic is a plain one, with all records once, and nothing else is left."""
        found = read_committed(self.cluster.bootstrap_servers, [self.topic], partitions=PARTITIONS)
        assert sorted(message.value() or b"" for message in found) == sorted(self.expected)
        described = self.admin.describe([self.topic])[self.topic]
        assert {name: described.config[name] for name in described.own} == SETTINGS
        with ZooKeeperSession(self.cluster.zookeeper, root=self.root) as session:
            assert session.get(paths.adopted(self.topic)) is None
            assert session.get(paths.stream(self.name)) is None
        left = AdminClient({"bootstrap.servers": self.cluster.bootstrap_servers}).list_topics().topics
        assert not [name for name in left if name.startswith(f"{self.name.scope}.{self.name.stream}.")]


@pytest.mark.parametrize("points", POINTS)
def test_a_topic_is_left_and_released_whoever_dies_where(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path, points: str
) -> None:
    topic = unique_name("crash.orders")
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    for created in admin.create_topics([NewTopic(topic, PARTITIONS, 1, config=SETTINGS)]).values():
        created.result()
    root = f"/{topic}"
    story = Story(cluster, root, topic)
    chain = points.split(" + ")
    with Relay(cluster, root, tmp_path, chain) as relay:
        story.play()
        assert relay.deaths == len(chain)
    story.check()
