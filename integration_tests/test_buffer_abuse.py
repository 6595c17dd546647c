"""What should not be in a buffer: foreign bytes, corrupt or missing frames, another topic; more than fits in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.coordinators import coordinator, until
from rollbridge.errors import CoordinatorUnavailableError, TransactionAbortedError, UnknownWriteError
from rollbridge.kafka.batches import BatchBuilder
from rollbridge.kafka.topics import TopicAdmin, TopicSpec
from rollbridge.model.frames import FrameHeader, FrameKind, Manifest, PieceKey
from rollbridge.model.ids import TransactionId
from rollbridge.model.names import StreamName


class Setting:
    """A stream with one segment, its coordinator's log, and a way to write anything into its buffer."""

    def __init__(self, cluster: AnyCluster, root: str, log: Path, b: rollbridge.Bridge, stream: StreamName) -> None:
        self.cluster, self.root, self.log, self.b, self.stream = cluster, root, log, b, stream
        self._producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})

    def inject(self, key: bytes | None, value: bytes | None) -> None:
        """Write a message into the buffer and wait until it is there."""
        failures: list[KafkaError] = []
        self._producer.produce(
            self.stream.buffer_topic(),
            value,
            key=key,
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
        assert self._producer.flush(120) == 0
        assert not failures

    def values(self) -> list[bytes]:
        """What a plain consumer sees in the segment."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.cluster.bootstrap_servers,
                "group.id": "check",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )
        segment = self.b.admin.history(str(self.stream)).active.segments[0].id
        found: list[bytes] = []
        try:
            consumer.assign([TopicPartition(self.stream.segment_topic(segment), 0, 0)])
            while True:
                message = consumer.poll(30)
                assert message is not None
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF
                    return found
                found.append(message.value() or b"")
        finally:
            consumer.close()


@pytest.fixture
def environment() -> dict[str, str]:
    """Settings of the coordinator on top of the defaults."""
    return {}


@pytest.fixture
def setting(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path, environment: dict[str, str]
) -> Iterator[Setting]:
    scope = unique_name("abuse")
    root = f"/{scope}"
    stream = StreamName(scope, "s")
    with (
        coordinator(cluster, root, "one", tmp_path, **environment),
        rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root) as b,
    ):
        b.admin.create_stream(str(stream))
        yield Setting(cluster, root, tmp_path / "one.log", b, stream)


def batch(*values: bytes) -> bytes:
    builder = BatchBuilder(1 << 20)
    for value in values:
        builder.append(1, None, value)
    return builder.build()


def test_foreign_bytes_are_skipped_and_logged_once(setting: Setting) -> None:
    name = str(setting.stream)
    rng = random.Random(1)
    txn = setting.b.begin(name)
    txn.write(name, key=b"k", value=b"first")
    txn.flush()
    for size in (0, 1, 43, 44, 45, 1000):
        setting.inject(rng.randbytes(size), rng.randbytes(size))
    setting.inject(None, b"value without a key")
    setting.inject(txn.id.bytes, None)
    stranger = TransactionId.of(0, 1 << 90).bytes
    for kind in FrameKind:
        setting.inject(FrameHeader(kind, stranger).pack(), rng.randbytes(40))
    txn.write(name, key=b"k", value=b"second")
    assert txn.commit().records == 2
    assert setting.values() == [b"first", b"second"]
    assert setting.log.read_text().count("no frames") == 1


def test_a_corrupt_frame_aborts_its_transaction_and_no_other(setting: Setting) -> None:
    name = str(setting.stream)
    bad, good = setting.b.begin(name), setting.b.begin(name)
    bad.write(name, key=b"k", value=b"bad")
    good.write(name, key=b"k", value=b"good")
    bad.flush()
    damaged = bytearray(batch(b"x"))
    damaged[-1] ^= 0xFF
    setting.inject(FrameHeader(FrameKind.DATA, bad.id.bytes, 0, 0, 1_000, 1).pack(), bytes(damaged))
    with pytest.raises(TransactionAbortedError, match="corrupt"):
        bad.commit()
    assert good.commit().records == 1
    assert setting.values() == [b"good"]


def test_frames_of_parts_that_the_commit_does_not_name_leave_nothing_behind(setting: Setting) -> None:
    name = str(setting.stream)
    txn = setting.b.begin(name)
    txn.write(name, key=b"k", value=b"mine")
    txn.flush()
    setting.inject(FrameHeader(FrameKind.DATA, txn.id.bytes, 9, 0, 0, 2).pack(), batch(b"zombie", b"zombie"))
    assert txn.commit().records == 1
    setting.inject(FrameHeader(FrameKind.DATA, txn.id.bytes, 0, 0, 50, 1).pack(), batch(b"too late"))
    with setting.b.transaction(name) as after:
        after.write(name, key=b"k", value=b"after")
    assert setting.values() == [b"mine", b"after"]


def test_a_commit_that_names_what_never_arrived_is_refused(setting: Setting) -> None:
    name = str(setting.stream)
    txn = setting.b.begin(name)
    txn.write(name, key=b"k", value=b"v")
    txn.flush()
    forged = Manifest({PieceKey(0, 0, 0): 1, PieceKey(3, 0, 0): 5}).encode()
    setting.inject(FrameHeader(FrameKind.COMMIT, txn.id.bytes).pack(), forged)
    with pytest.raises(TransactionAbortedError, match="incomplete"):
        txn.commit()
    assert setting.values() == []


@pytest.mark.parametrize(
    "environment",
    [
        {
            "ROLLBRIDGE_COORDINATOR_CACHE_BYTES_MAX": "100000",
            "ROLLBRIDGE_COORDINATOR_CACHE_BYTES_PER_TRANSACTION_MAX": "30000",
        }
    ],
)
def test_what_does_not_fit_into_memory_is_read_again_at_the_merge(setting: Setting) -> None:
    name = str(setting.stream)
    rng = random.Random(7)
    open_ones = [setting.b.begin(name) for _ in range(4)]
    written: dict[int, list[bytes]] = {number: [] for number in range(4)}
    for step in range(600):
        number = rng.randrange(4)
        value = b"%d-%d-" % (number, step) + rng.randbytes(rng.choice([10, 3_000]))
        open_ones[number].write(name, key=b"k", value=value)
        written[number].append(value)
        if step % 40 == 0:
            open_ones[number].flush()
    for number in (2, 0, 3, 1):
        assert open_ones[number].commit().records == len(written[number])
    assert setting.values() == [value for number in (2, 0, 3, 1) for value in written[number]]


@pytest.mark.parametrize("environment", [{"ROLLBRIDGE_COORDINATOR_TRANSACTION_BYTES_MAX": "50000"}])
def test_a_transaction_over_the_coordinators_limit_is_aborted(setting: Setting) -> None:
    name = str(setting.stream)
    txn = setting.b.begin(name)

    def write_and_commit() -> None:
        for _ in range(100):
            txn.write(name, key=b"k", value=bytes(2_000))
            txn.flush()
        txn.commit()

    with pytest.raises(TransactionAbortedError, match="exceeds 50000 bytes"):
        write_and_commit()
    assert setting.values() == []


@pytest.mark.long
def test_a_buffer_that_was_deleted_and_made_again_is_refused(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("remade")
    root, stream = f"/{scope}", StreamName(scope, "s")
    admin = TopicAdmin(cluster.bootstrap_servers)
    with (
        coordinator(cluster, root, "one", tmp_path),
        rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root) as b,
    ):
        b.admin.create_stream(str(stream))
    impatient = rollbridge.ClientOptions(admin_timeout_s=8)
    with rollbridge.connect(
        cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root, options=impatient
    ) as b:
        admin.delete_topics([stream.buffer_topic()])
        admin.create_topics([TopicSpec(name=stream.buffer_topic())])
        with coordinator(cluster, root, "two", tmp_path):
            log = tmp_path / "two.log"
            until(lambda: "deleted or made again behind our back" in log.read_text())
            with pytest.raises((CoordinatorUnavailableError, UnknownWriteError)):
                b.admin.scale(str(stream), seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
