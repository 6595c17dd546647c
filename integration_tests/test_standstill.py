"""Consumers of which the library forgets a partition, here because the test has it paused: another one takes over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import pytest
from confluent_kafka import Message, TopicPartition

import bridge
from bridge.client.outcomes import OutcomeTail
from bridge.kafka import standstill
from bridge.kafka.topics import TopicAdmin, TopicSpec
from bridge.model.buffered import FrameRef
from bridge.model.frames import PieceKey
from bridge.model.names import DEFAULT_GROUP, GroupName, StreamName
from coordinator.shell import consumers
from coordinator.shell.consumers import BufferTail, FrameReader
from integration_tests.clients import Site
from integration_tests.kafka_tools import produce
from integration_tests.patience import eventually

LOOK_S = 0.2


@pytest.fixture(autouse=True)
def looked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "LOOK_S", LOOK_S)
    monkeypatch.setattr(consumers, "PATIENCE_S", LOOK_S)


@pytest.fixture
def topic(site: Site, topic_prefix: str) -> str:
    TopicAdmin(site.cluster.bootstrap_servers).create_topics([TopicSpec(name=topic_prefix, partitions=2)])
    return topic_prefix


def polled(tail: BufferTail, found: list[bytes | None], count: int) -> Callable[[], bool]:
    """Whether so many messages have come by now."""

    def value_of(message: Message) -> bytes | None:
        return message.value()

    def poll() -> bool:
        found.extend(map(value_of, tail.poll(0.05)))
        return len(found) >= count

    return poll


def test_a_leader_reads_on_although_a_buffer_was_forgotten(site: Site, topic: str) -> None:
    servers, found = site.cluster.bootstrap_servers, list[bytes | None]()
    produce(servers, topic, [b"1", b"2"])
    with closing(BufferTail(servers, {})) as tail:
        tail.assign({(topic, 0): 0, (topic, 1): 0})
        eventually(polled(tail, found, 2), "what was there has been read")
        tail._consumer.pause([TopicPartition(topic, 0)])
        produce(servers, topic, [b"3", b"4"])
        eventually(polled(tail, found, 4), "what came later has been read")
        tail.assign({(topic, 1): 0})
        tail.assign({(topic, 1): 0, (topic, 0): 3})
        eventually(polled(tail, found, 5), "it still reads what is asked for")
    assert found == [b"1", b"2", b"3", b"4", b"4"]


def test_a_client_learns_outcomes_although_the_commit_log_was_forgotten(
    site: Site, client: bridge.Bridge, scope: str, orders: str
) -> None:
    group = GroupName(scope, DEFAULT_GROUP)
    with closing(OutcomeTail(site.cluster.bootstrap_servers)) as tail:
        tail.follow(group, 30)
        first = client.begin(orders)
        completion = tail.completion(first.id)
        first.commit()
        eventually(lambda: completion.settled, "the first outcome is known")
        tail._consumer.pause([TopicPartition(group.commit_log_topic, 0)])
        second = client.begin(orders, timeout=timedelta(minutes=1))
        completion = tail.completion(second.id)
        second.commit()
        eventually(lambda: completion.settled, "the second outcome is known")


def test_a_reader_goes_on_although_a_segment_was_forgotten(client: bridge.Bridge, orders: str) -> None:
    topic = StreamName.parse(orders).segment_topic(bridge.SegmentId.of(0, 0))
    keys = [b"%d" % number for number in range(8)]
    found: list[bytes | None] = []

    def has_read(count: int) -> bool:
        found.extend(record.value for record in reader.consume(100, 0.05))
        return len(found) >= count

    with client.writer(orders) as writer, client.reader(orders) as reader:
        for number in range(1, 4):
            writer.write_all((key, b"%d" % number) for key in keys)
            writer.flush(120)
            eventually(lambda number=number: has_read(number * len(keys)), "all segments were read")  # type: ignore[misc]
            reader._consumer.pause([TopicPartition(topic, 0)])
    assert found == sorted(found, key=lambda value: value or b"")


def test_frames_are_read_again_although_their_buffer_was_forgotten(site: Site, topic: str) -> None:
    size = 300_000
    produce(site.cluster.bootstrap_servers, topic, [b"%d" % number * size for number in range(3)])

    def read(offset: int) -> bytes:
        return reader.read(FrameRef((topic, 0), offset, PieceKey(0, 0, 0), 0, 1, size, None))

    with closing(FrameReader(site.cluster.bootstrap_servers, {})) as reader:
        assert read(0) == b"0" * size
        assert reader._consumer is not None
        reader._consumer.pause([TopicPartition(topic, 0)])
        reader._ahead.clear()
        assert read(1) == b"1" * size
