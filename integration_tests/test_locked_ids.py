"""A topic with too few in-sync replicas keeps Kafka from ending native transactions; only its stream waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.adapter_tools import batch_of
from integration_tests.clients import Site
from integration_tests.patience import eventually
from integration_tests.three_brokers import NODES, ThreeBrokers
from rollbridge.doctor.facts import gather
from rollbridge.errors import FencedError
from rollbridge.kafka.appender import AppenderState, TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import ID_LOCKED, AppendUnknownError
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.names import StreamName

COMMITS = 5
HEALED_S = 180.0


@pytest.fixture(scope="module")
def brokers() -> Iterator[ThreeBrokers]:
    with ThreeBrokers() as cluster:
        yield cluster


@pytest.fixture
def site(brokers: ThreeBrokers, unique_name: Callable[[str], str], tmp_path: Path) -> Iterator[Site]:
    with Site(brokers, f"/{unique_name('locked')}", tmp_path) as site:
        yield site


def demanding_topic(brokers: ThreeBrokers, name: str) -> int:
    """Create a topic that takes records only while all brokers are there; return a broker that does not lead it."""
    admin = KafkaClient(brokers.bootstrap_servers).topics
    admin.create_topics([TopicSpec(name=name, replication_factor=3, config={"min.insync.replicas": "3"})])
    with Cluster(brokers.bootstrap_servers) as cluster:
        leader = cluster.leader(name, 0)
    return next(node for node in NODES if node != leader)


def commit(client: rollbridge.Bridge, stream: str, count: int = COMMITS) -> None:
    for number in range(count):
        with client.begin(stream) as transaction:
            transaction.write(stream, key=b"k", value=b"%d" % number)


def in_sync(brokers: ThreeBrokers, topic: str) -> bool:
    return KafkaClient(brokers.bootstrap_servers).topics.look([topic])[topic].in_sync == len(NODES)


def test_a_stream_whose_topic_lacks_replicas_waits_through_takeovers_and_no_other_does(
    brokers: ThreeBrokers, site: Site, unique_name: Callable[[str], str]
) -> None:
    """The leader's transactional ids are locked, before the takeovers and during them."""
    scope, topic = unique_name("scope"), unique_name("orders")
    other = f"{scope}/other"
    victim = brokers.node(brokers.brokers[demanding_topic(brokers, topic) - 1])
    with site.connect() as client, site.connect() as innocent:
        client.admin.create_stream(other)
        client.admin.adopt_topic(topic, stream=f"{scope}/orders", partitioner="murmur2")
        transaction = client.begin(topic)
        transaction.write(topic, b"k", b"waits")
        transaction.flush()
        victim.kill()
        try:
            future = transaction.commit_async()
            commit(innocent, other)
            for _ in range(2):
                site.stop_coordinator()
                site.start_coordinator()
                commit(innocent, other)
            assert not future.done()
        finally:
            victim.restart()
        future.result(HEALED_S)
        commit(innocent, other)
        eventually(lambda: in_sync(brokers, topic), "the broker has caught up", HEALED_S)
        with client.reader(topic, follow=False) as reader:
            assert [record.value for record in reader] == [b"waits"]
        with client.reader(other, follow=False) as reader:
            assert len(list(reader)) == 4 * COMMITS


def test_no_other_stream_waits_for_the_scale_of_one_whose_topic_lacks_replicas(
    brokers: ThreeBrokers, site: Site, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    """It is not begun: what is sealed needs a marker, which the topic does not take."""
    scope = unique_name("scope")
    short, other = f"{scope}/short", f"{scope}/other"

    def waits() -> bool:
        return any("which has too few in-sync replicas" in log.read_text() for log in tmp_path.glob("*.log"))

    with site.connect() as client, site.connect() as innocent, ThreadPoolExecutor(1) as pool:
        for name, replicas in ((short, 2), (other, 3)):
            client.admin.create_stream(name, replication_factor=replicas)
            commit(client, name)
        segment = StreamName.parse(short).segment_topic(rollbridge.SegmentId.of(0, 0))
        with Cluster(brokers.bootstrap_servers) as cluster:
            follower = next(
                int(node)
                for topic in cluster.metadata([segment]).topics
                for node in topic.partitions[0].replica_nodes
                if node != topic.partitions[0].leader_id
            )
        victim = brokers.node(brokers.brokers[follower - 1])
        victim.kill()
        try:
            eventually(
                lambda: KafkaClient(brokers.bootstrap_servers).topics.look([segment])[segment].in_sync == 1, "missed"
            )
            scaled = pool.submit(client.admin.scale, short, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
            eventually(waits, "the leader says what it waits for")
            commit(innocent, other)
        finally:
            victim.restart()
        scaled.result(HEALED_S)
        commit(client, short)
        with client.reader(short, follow=False) as reader:
            assert len(list(reader)) == 2 * COMMITS


def test_the_doctor_waits_for_no_buffer_without_a_leader(
    brokers: ThreeBrokers, site: Site, unique_name: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    scope = unique_name("scope")
    with site.connect() as client:
        for name, replicas in (("lost", 1), ("other", 3)):
            client.admin.create_stream(f"{scope}/{name}", replication_factor=replicas)
            commit(client, f"{scope}/{name}", 1)
        buffer = client.admin.describe(f"{scope}/lost").config.buffer_topic
        with Cluster(brokers.bootstrap_servers) as cluster:
            victim = brokers.node(brokers.brokers[cluster.leader(buffer, 0) - 1])
        victim.kill()
        try:
            eventually(
                lambda: not KafkaClient(brokers.bootstrap_servers).topics.look([buffer])[buffer].is_led, "it is missed"
            )
            found = gather(client.settings, client._kafka)
        finally:
            victim.restart()
    assert "doctor.snapshots_unread" not in caplog.text
    assert {str(item.found.stream.name) for item in found.snapshots} == {f"{scope}/other"}


def test_an_id_is_locked_until_its_partitions_have_taken_markers(
    brokers: ThreeBrokers, unique_name: Callable[[str], str]
) -> None:
    topic, servers, name = unique_name("orders"), brokers.bootstrap_servers, unique_name("id")
    victim = brokers.node(brokers.brokers[demanding_topic(brokers, topic) - 1])
    other = unique_name("other")

    def appender() -> TransactionalAppender:
        return KafkaClient(servers).appender(name, topic_timeout_ms=lambda _: 1_000, locked_timeout_ms=1_000)

    batch = batch_of([b"value"])
    with appender() as first, appender() as second:
        first.init()
        victim.kill()
        try:
            eventually(lambda: not in_sync(brokers, topic), "the broker is missed")
            KafkaClient(servers).topics.create_topics([TopicSpec(name=other, replication_factor=2)])
            with pytest.raises(AppendUnknownError) as refused:
                first.append([(topic, batch)])
            assert refused.value.topic == topic
            first.init()
            assert first.is_locked()
            for _ in range(2):
                with raises_code(ID_LOCKED, match="nothing was sent"):
                    first.append([(other, batch)])
                assert first.state is AppenderState.READY
            with raises_code(ID_LOCKED):
                second.init()
            assert second.state is AppenderState.NEW
        finally:
            victim.restart()
        eventually(lambda: not first.is_locked(), "the partition has taken its marker", HEALED_S)
        second.init()
        with pytest.raises(FencedError):
            first.append([(other, batch)])
        second.append([(other, batch)])
        second.commit()
