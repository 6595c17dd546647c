"""A poison corpus: what a broker refuses for good, by every way in; each stops its own transaction or stream only.

After each of them an innocent stream of the same group commits, in the same term of the same leader.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from confluent_kafka import KafkaError, Producer
from crc32c import crc32c

import bridge
from bridge.errors import RecordTooLargeError, TransactionAborted
from bridge.kafka.batches import BatchBuilder, Compression
from bridge.kafka.topics import TopicAdmin
from bridge.model import paths
from bridge.model.frames import FrameHeader, FrameKind, Manifest, PieceKey
from bridge.model.names import GroupName, StreamName
from bridge.model.records import ControllerEpoch
from bridge.zookeeper.session import ZooKeeperSession
from integration_tests.clients import Site, until
from integration_tests.command_line import run_cli

DAY_MS = 24 * 3600 * 1000
CRC_AT, ATTRIBUTES_AT, COUNT_AT, HEADER_BYTES = 17, 21, 57, 61
PATIENCE_S = 60


class Group:
    """The streams of a group: one that is poisoned, and one that has nothing to do with it."""

    def __init__(self, site: Site, client: bridge.Bridge, scope: str) -> None:
        self.site, self.client = site, client
        self.name = GroupName(scope)
        self.poisoned, self.innocent = f"{scope}/poisoned", f"{scope}/innocent"
        for stream in (self.poisoned, self.innocent):
            client.admin.create_stream(stream)
        self.admin = TopicAdmin(site.cluster.bootstrap_servers)
        self.topic = StreamName.parse(self.poisoned).segment_topic(
            client.admin.history(self.poisoned).active.segments[0].id
        )
        self.buffer = StreamName.parse(self.poisoned).buffer_topic(0)
        self._producer = Producer({"bootstrap.servers": site.cluster.bootstrap_servers, "message.max.bytes": 16 << 20})
        self.commit(self.innocent)
        self.term = self.epoch()

    def epoch(self) -> int:
        """The controller epoch: it is raised whenever a term begins."""
        with ZooKeeperSession(self.site.cluster.zookeeper, root=self.site.root) as session:
            node = session.get(paths.controller(self.name))
        assert node is not None
        return ControllerEpoch.from_json(node.value).epoch

    def commit(self, stream: str, value: bytes = b"v") -> None:
        """A transaction of a client that nothing else has to do with."""
        with self.site.connect() as b, b.transaction(stream) as txn:
            txn.write(stream, key=b"k", value=value)

    def inject_data(self, txn: bridge.Transaction, value: bytes, count: int) -> None:
        """Put a forged DATA frame of a transaction into the buffer."""
        self._inject(FrameHeader(FrameKind.DATA, txn.id.bytes, 0, 0, 1_000, count), value)

    def inject_commit(self, txn: bridge.Transaction, count: int) -> None:
        """Ask for the commit of a transaction with so many records, forged ones included."""
        self._inject(FrameHeader(FrameKind.COMMIT, txn.id.bytes, 0), Manifest({PieceKey(0, 0, 0): count}).encode())

    def _inject(self, header: FrameHeader, value: bytes) -> None:
        failures: list[KafkaError] = []
        self._producer.produce(
            self.buffer,
            value,
            key=header.pack(),
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
        assert self._producer.flush(30) == 0
        assert not failures

    def innocent_goes_on(self) -> None:
        """Others commit, and nobody had to take over."""
        self.commit(self.innocent)
        assert self.epoch() == self.term

    def fault(self) -> str | None:
        """What is said to be wrong with the poisoned stream."""
        fault = self.client.admin.describe(self.poisoned).fault
        return None if fault is None else fault.reason


@pytest.fixture
def group(site: Site, client: bridge.Bridge, scope: str) -> Iterator[Group]:
    group = Group(site, client, scope)
    with closing(group.admin):
        yield group
        group.innocent_goes_on()


TIMES: dict[str, Callable[[int], int]] = {
    "two hours ahead": lambda now_ms: now_ms + 2 * 3600 * 1000,
    "a century ahead": lambda now_ms: now_ms + 36_500 * DAY_MS,
    "the last there is": lambda _: 2**63 - 1,
    "1970": lambda _: 0,
    "a decade ago": lambda now_ms: now_ms - 3_650 * DAY_MS,
}


@pytest.mark.parametrize("when", TIMES)
def test_event_times_of_past_and_future_are_taken_by_every_way_in(group: Group, when: str) -> None:
    moment_ms = TIMES[when](int(time.time() * 1000))
    with group.client.transaction(group.poisoned) as txn:
        txn.write(group.poisoned, key=b"k", value=b"txn", timestamp_ms=moment_ms)
    with group.client.writer(group.poisoned) as writer:
        writer.write(key=b"k", value=b"plain", timestamp=moment_ms).result(PATIENCE_S)
    found = {message.value(): message.timestamp()[1] for message in group.site.committed(group.poisoned)}
    assert found == dict.fromkeys((b"txn", b"plain"), moment_ms)


def frame(*values: bytes, compression: Compression = Compression.NONE) -> bytearray:
    """A record batch as clients send it."""
    builder = BatchBuilder(1 << 22, compression)
    for value in values:
        builder.append(1, b"k", value)
    return bytearray(builder.build())


def sealed(batch: bytearray) -> bytes:
    """The batch with a right checksum."""
    struct.pack_into(">I", batch, CRC_AT, crc32c(bytes(batch[ATTRIBUTES_AT:])))
    return bytes(batch)


def wrong_checksum() -> bytes:
    batch = frame(b"x")
    batch[CRC_AT] ^= 1
    return bytes(batch)


def wrong_count() -> bytes:
    batch = frame(b"x", b"y")
    struct.pack_into(">i", batch, COUNT_AT, 1)
    return sealed(batch)


def broken_varint() -> bytes:
    batch = frame(b"x")
    batch[HEADER_BYTES] ^= 0x40
    return sealed(batch)


def cut_short() -> bytes:
    return bytes(frame(b"x" * 100)[:-20])


def with_attributes(bits: int, batch: bytearray | None = None) -> bytes:
    batch = batch or frame(b"x")
    struct.pack_into(">h", batch, ATTRIBUTES_AT, bits)
    return sealed(batch)


def magic_of(number: int) -> bytes:
    batch = frame(b"x")
    batch[16] = number
    return sealed(batch)


def garbage_inside() -> bytes:
    batch = frame(b"x" * 200)
    batch[HEADER_BYTES:] = b"\xff" * (len(batch) - HEADER_BYTES)
    return sealed(batch)


def garbage_after_a_large_record() -> bytes:
    """Large enough to be forwarded as it is, so that only the broker looks inside."""
    batch = frame(b"x" * 100_000, b"y" * 100)
    batch[-60:] = b"\xfe" * 60
    return sealed(batch)


def misnumbered() -> bytes:
    """Offset deltas inside that do not count up."""
    batch = frame(b"x" * 40_000, b"y")
    # length varint of the first record has three bytes; attributes and a zero timestamp delta follow
    batch[HEADER_BYTES + 5] = 2
    return sealed(batch)


MALFORMED: dict[str, Callable[[], bytes]] = {
    "wrong checksum": wrong_checksum,
    "wrong count": wrong_count,
    "broken varint": broken_varint,
    "cut short": cut_short,
    "gzip that is none": lambda: with_attributes(1),
    "snappy that is none": lambda: with_attributes(2, frame(b"x" * 50_000)),
    "lz4 that is none": lambda: with_attributes(3),
    "zstd that is none": lambda: with_attributes(4, frame(b"x" * 50_000)),
    "unknown compression": lambda: with_attributes(5),
    "transactional": lambda: with_attributes(0x10),
    "control": lambda: with_attributes(0x20),
    "both": lambda: with_attributes(0x30),
    "stamped by a broker": lambda: with_attributes(0x08),
    "magic 0": lambda: magic_of(0),
    "magic 1": lambda: magic_of(1),
    "magic 3": lambda: magic_of(3),
    "garbage inside": garbage_inside,
    "garbage after a large record": garbage_after_a_large_record,
    "empty": lambda: b"",
    "noise": lambda: bytes(range(256)),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_frame_ends_its_own_transaction_only(group: Group, kind: str) -> None:
    bad, good = group.client.begin(group.poisoned), group.client.begin(group.poisoned)
    lost, kept = (txn.write(group.poisoned, key=b"k", value=b"v") for txn in (bad, good))
    bad.flush()
    good.flush()
    count = 2 if "large" in kind else 1
    group.inject_data(bad, MALFORMED[kind](), count)
    group.inject_commit(bad, 1 + count)
    assert good.commit().records == 1
    assert kept.result(PATIENCE_S) is not None
    assert isinstance(lost.exception(PATIENCE_S), TransactionAborted)
    assert [message.value() for message in group.site.committed(group.poisoned)] == [b"v"]


def test_offsets_that_do_not_count_up_stop_nobody(group: Group) -> None:
    """Kafka takes an uncompressed batch like that of every producer, so there is nobody to refuse."""
    odd = group.client.begin(group.poisoned)
    odd.flush()
    group.inject_data(odd, misnumbered(), 2)
    group.inject_commit(odd, 2)
    group.commit(group.poisoned, b"behind it")  # in the same buffer, so decided after it
    assert group.site.committed(group.poisoned)[-1].value() == b"behind it"
    assert group.fault() is None


def test_a_frame_between_the_limits_of_buffer_and_segment_ends_its_transaction(group: Group) -> None:
    txn = group.client.begin(group.poisoned)
    lost = txn.write(group.poisoned, key=b"k", value=b"v")
    txn.flush()
    limits = group.admin.describe([group.topic, group.buffer])
    segment, buffer = (int(limits[name].config["max.message.bytes"]) for name in (group.topic, group.buffer))
    assert segment < buffer
    group.inject_data(txn, bytes(frame(bytes(segment - 60))), 1)
    group.inject_commit(txn, 2)
    assert isinstance(lost.exception(PATIENCE_S), TransactionAborted)
    assert group.fault() is None


def test_a_record_over_the_limit_is_refused_when_it_is_written(group: Group) -> None:
    limit = group.client.admin.describe(group.poisoned).config.record_bytes_max
    with pytest.raises(RecordTooLargeError), group.client.transaction(group.poisoned) as txn:
        txn.write(group.poisoned, value=bytes(limit + 1))


RECONFIGURED = {
    "smaller records": ({"max.message.bytes": "1000"}, bytes(5_000)),
    "compacted": ({"cleanup.policy": "compact"}, b"without a key"),
}


@pytest.mark.parametrize("how", RECONFIGURED)
def test_the_transactions_of_a_reconfigured_topic_wait_until_it_is_right_again(group: Group, how: str) -> None:
    settings, value = RECONFIGURED[how]
    right = group.admin.describe([group.topic])[group.topic].config
    group.admin.set_topic_config(group.topic, settings)
    refused_by_now(group)
    txn = group.client.begin(group.poisoned)
    txn.write(group.poisoned, value=value)
    future = txn.commit_async()
    until(lambda: group.fault() is not None, PATIENCE_S)
    group.innocent_goes_on()
    assert not future.done()
    group.admin.set_topic_config(group.topic, {name: right[name] for name in settings})
    assert future.result(PATIENCE_S).records == 1
    until(lambda: group.fault() is None, PATIENCE_S)
    assert [message.value() for message in group.site.committed(group.poisoned)] == [value]


def test_the_transactions_of_a_removed_topic_end_with_their_leases(group: Group) -> None:
    group.admin.delete_topics([group.topic])
    short = group.client.begin(group.poisoned, timeout=timedelta(seconds=3))
    short.write(group.poisoned, key=b"k", value=b"v")
    long = group.client.begin(group.poisoned)
    long.write(group.poisoned, key=b"k", value=b"v")
    futures = [short.commit_async(), long.commit_async()]
    until(lambda: group.fault() is not None, PATIENCE_S)
    group.innocent_goes_on()
    with pytest.raises(TransactionAborted, match="error state"):
        futures[0].result(PATIENCE_S)
    answer = run_cli(group.site.environment(), "stream", "describe", group.poisoned)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in answer.out
    assert "stream-error" in run_cli(group.site.environment(), "doctor").out
    until(lambda: str(long.id) in run_cli(group.site.environment(), "txn", "list").out, PATIENCE_S)
    answer = run_cli(group.site.environment(), "txn", "abort", str(long.id))
    assert answer.code == 0, answer
    with pytest.raises(TransactionAborted, match="error state"):
        futures[1].result(PATIENCE_S)


def refused_by_now(group: Group) -> None:
    """Brokers apply new settings a little later."""
    time.sleep(1)
