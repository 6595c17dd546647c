"""Following buffers and reading frames again: whatever stands there, all that can be read comes once and in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from confluent_kafka import Producer

from integration_tests.bombs import bomb, misnumbered
from integration_tests.clients import Site
from integration_tests.kafka_tools import produce
from integration_tests.patience import eventually
from rollbridge.buffer.frames import PieceKey
from rollbridge.buffer.state import FrameRef
from rollbridge.errors import CorruptDataError
from rollbridge.kafka import follower
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.records import BatchBuilder, Compression
from rollbridge.kafka.topics import TopicSpec
from rollbridge_coordinator.core.frame_reader import AT_ONCE, FrameReader, Tail, TailMessage


@pytest.fixture
def servers(site: Site) -> str:
    return site.cluster.bootstrap_servers


@pytest.fixture
def topic(servers: str, topic_prefix: str) -> str:
    KafkaClient(servers).topics.create_topics([TopicSpec(name=topic_prefix, partitions=2)])
    return topic_prefix


@pytest.fixture
def tail(servers: str) -> Iterator[Tail]:
    with closing(Tail(KafkaClient(servers))) as tail:
        yield tail


def polled(tail: Tail, found: list[TailMessage], count: int) -> Callable[[], bool]:
    """Whether so many messages have come by now."""

    def poll() -> bool:
        found.extend(tail.poll(0.05))
        return len(found) >= count

    return poll


def small(value: bytes, compression: Compression = Compression.NONE) -> bytes:
    builder = BatchBuilder(1 << 20, compression)
    # Not of 1970: retention by time would delete it as soon as it looks.
    builder.append(round(time.time() * 1000), b"k", value, [("h", b"v")])
    return builder.build()


def append(servers: str, topic: str, name: str, *batches: bytes) -> list[int]:
    """Write batches as they are, in a native transaction, whose marker follows."""
    with KafkaClient(servers).appender(name) as appender:
        appender.init()
        offsets = appender.append((topic, batch) for batch in batches)
        appender.commit()
    return offsets


def test_partitions_are_read_from_their_offsets_on_as_they_come_and_go(servers: str, topic: str, tail: Tail) -> None:
    found: list[TailMessage] = []
    produce(servers, topic, [b"1", b"2"])
    tail.assign({(topic, 0): 0, (topic, 1): 0})
    eventually(polled(tail, found, 2), "what was there has been read")
    produce(servers, topic, [b"3", b"4"])
    eventually(polled(tail, found, 4), "what came later has been read")
    assert tail.ends() == {(topic, 0): 4, (topic, 1): 0}
    tail.assign({(topic, 1): 0})
    produce(servers, topic, [b"5"])
    tail.assign({(topic, 1): 0, (topic, 0): 3})
    eventually(polled(tail, found, 6), "it reads what is asked for again")
    assert [message.value for message in found] == [b"1", b"2", b"3", b"4", b"4", b"5"]
    assert [message.offset for message in found] == [0, 1, 2, 3, 3, 4]
    assert all(message.partition == (topic, 0) for message in found)


def test_what_has_arrived_of_a_partition_that_is_left_is_not_handed_out(servers: str, topic: str, tail: Tail) -> None:
    for partition in (0, 1):
        produce(servers, topic, [b"%d" % number for number in range(AT_ONCE + 100)], partition=partition)
    tail.assign({(topic, 0): 0, (topic, 1): 0})
    found: list[TailMessage] = []
    eventually(polled(tail, found, 1), "the first portion is read")
    opened = found[-1].partition
    other = (topic, 1 - opened[1])
    assert len(found) < 2 * AT_ONCE, "some of both has been fetched and not handed out"
    tail.assign({other: AT_ONCE + 98})
    tail.assign({opened: AT_ONCE + 98})
    tail.assign({opened: AT_ONCE + 98, other: AT_ONCE + 99})
    found = []
    eventually(polled(tail, found, 3), "the ends are read")
    assert sorted((message.partition, message.offset) for message in found) == sorted(
        [(opened, AT_ONCE + 98), (opened, AT_ONCE + 99), (other, AT_ONCE + 99)]
    )


def test_an_answer_that_has_waited_for_its_reader_for_long_is_read(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a leader's long merge: more than a socket's buffer holds has arrived, and its deadline has passed."""
    monkeypatch.setattr(follower, "_REQUEST_S", 1.0)
    values = [b"%d" % (number % 10) * 100_000 for number in range(30)]
    append(servers, topic, topic, *(small(value) for value in values))
    found: list[TailMessage] = []
    with closing(Tail(KafkaClient(servers))) as tail:
        tail.assign({(topic, 0): 0})

        def is_asked() -> bool:
            found.extend(tail.poll(0.0))
            return bool(tail._follower._asked)

        eventually(is_asked, "a request is in flight")
        (line,) = tail._follower._asked.values()
        eventually(line.connection.overdue, "its deadline has passed")
        eventually(polled(tail, found, 31), "all is read, and the marker")
        assert list(tail._follower._connections.values()) == [line], "by the same connection"
    assert [message.value for message in found if message.value] == values


def test_many_messages_come_in_portions_and_in_order(servers: str, topic: str, tail: Tail) -> None:
    producer = Producer(
        {"bootstrap.servers": servers, "enable.idempotence": True, "compression.type": "zstd", "linger.ms": 50}
    )
    for number in range(30_000):
        producer.produce(topic, b"%d" % number, partition=number % 2)
        if number % 1_000 == 0:
            producer.poll(0)
    assert producer.flush(120) == 0
    tail.assign({(topic, 0): 0, (topic, 1): 0})
    found: list[TailMessage] = []
    portions: list[int] = []

    def poll() -> bool:
        before = len(found)
        found.extend(tail.poll(0.05))
        portions.append(len(found) - before)
        return len(found) >= 30_000

    eventually(poll, "all have come")
    assert max(portions) == AT_ONCE
    for partition in (0, 1):
        mine = [message for message in found if message.partition[1] == partition]
        assert [message.offset for message in mine] == list(range(15_000))
        assert [message.value for message in mine] == [b"%d" % number for number in range(partition, 30_000, 2)]


@pytest.mark.parametrize("kind", ["gzip", "zstd", "records", "numbers"])
def test_a_batch_that_can_not_be_read_is_passed_as_one_message_that_is_none(
    servers: str, topic: str, tail: Tail, kind: str
) -> None:
    bad, records = (misnumbered(), 3) if kind == "numbers" else bomb(kind)
    offsets = append(servers, topic, topic, small(b"before"), bad, small(b"behind", Compression.ZSTD))
    assert offsets == [0, 1, 1 + records]
    tail.assign({(topic, 0): 0})
    found: list[TailMessage] = []

    def poll() -> bool:
        found.extend(message for message in tail.poll(0.05) if message.value is None or message.offset in offsets)
        return bool(found) and found[-1].offset >= offsets[2] + 1

    eventually(poll, "the marker behind it has been passed")
    assert [(message.offset, message.value) for message in found if message.value] == [
        (0, b"before"),
        (offsets[2], b"behind"),
    ]
    assert [message.offset for message in found if message.value is None] == [offsets[2] - 1, offsets[2] + 1]
    assert tail.skipped == 1
    reader = FrameReader(KafkaClient(servers).log())
    for offset, value in ((0, b"before"), (offsets[2], b"behind"), (0, b"before")):
        place = FrameRef((topic, 0), offset, PieceKey(0, 0, 0), 0, 1, 6, None)
        assert reader.read(place) == value
    with pytest.raises(CorruptDataError):
        reader.read(FrameRef((topic, 0), offsets[2] - 1, PieceKey(0, 0, 0), 0, 1, 6, None))


def test_what_was_truncated_before_it_was_read_is_an_error(servers: str, topic: str, tail: Tail) -> None:
    produce(servers, topic, [b"1", b"2", b"3"])
    KafkaClient(servers).topics.delete_records({(topic, 0): 2})
    tail.assign({(topic, 0): 1, (topic, 1): 0})

    def refused() -> bool:
        try:
            list(tail.poll(0.05))
        except CorruptDataError:
            return True
        return False

    eventually(refused, "it is said that something is gone")
    reader = FrameReader(KafkaClient(servers).log())
    with pytest.raises(CorruptDataError, match="truncated"):
        reader.read(FrameRef((topic, 0), 1, PieceKey(0, 0, 0), 0, 1, 1, None))


def test_frames_are_read_again_in_any_order(servers: str, topic: str) -> None:
    size = 300_000
    produce(servers, topic, [b"%d" % (number % 10) * size for number in range(20)])
    reader = FrameReader(KafkaClient(servers).log())
    for offset in (0, 1, 19, 3, 3, 2, 18):
        value = reader.read(FrameRef((topic, 0), offset, PieceKey(0, 0, 0), 0, 1, size, None))
        assert value == b"%d" % (offset % 10) * size
