"""A leader's memory is bounded, whatever stands in a buffer: it leads on, the next one takes over, others commit.

Frames are forged here as fast as a producer can: 150,000 tiny ones stand for the million that took a leader from 63 to
548 MB, with limits as much smaller.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.bombs import bomb, misnumbered
from integration_tests.clients import Site
from integration_tests.coordinators import coordinator, until
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind
from rollbridge.errors import TransactionAbortedError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.records import BatchBuilder
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName, StreamName

PREFIX = "ROLLBRIDGE_COORDINATOR_"
FRAMES = 150_000
LIMITS = {
    f"{PREFIX}CACHE_BYTES_MAX": "4000000",
    f"{PREFIX}HELD_BYTES_MAX": "16000000",
    f"{PREFIX}HELD_BYTES_PER_TRANSACTION_MAX": "4000000",
}
ROOM_KB = 60 * 1024
"""What a leader may take above one that has nothing to do: its limits, what is read ahead, and a round."""


class Leaders:
    """Coordinators one after the other, and what memory each takes."""

    def __init__(self, cluster: AnyCluster, scope: str, logs: Path, environment: Mapping[str, str]) -> None:
        self.cluster, self.root, self.logs, self.environment = cluster, f"/{scope}", logs, environment
        self.group = GroupName(scope)
        self.stack = ExitStack()
        self.process: subprocess.Popen[bytes] | None = None
        self.count = 0
        self.metadata = Metadata(self.stack.enter_context(ZooKeeperSession(cluster.zookeeper, root=self.root)))
        self.start()

    def start(self) -> None:
        self.count += 1
        self.process = self.stack.enter_context(
            coordinator(self.cluster, self.root, self.name, self.logs, **self.environment)
        )

    @property
    def name(self) -> str:
        return f"leader-{self.count}"

    def replace(self) -> None:
        """The leader dies without a word, and another one takes over."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.start()

    def leads(self) -> bool:
        return self.metadata.leader(self.group) == self.name

    def memory_kb(self, what: str) -> int:
        """``VmHWM``: most that it ever took; ``VmRSS``: what it takes."""
        assert self.process is not None
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(what):
                return int(line.split()[1])
        raise AssertionError(what)

    def log(self) -> str:
        return (self.logs / f"{self.name}.log").read_text()


@pytest.fixture
def scope(unique_name: Callable[[str], str]) -> str:
    return unique_name("memory")


@pytest.fixture
def leaders(cluster: AnyCluster, scope: str, tmp_path: Path) -> Iterator[Leaders]:
    leaders = Leaders(cluster, scope, tmp_path, LIMITS)
    with leaders.stack:
        yield leaders


@pytest.fixture
def client(cluster: AnyCluster, leaders: Leaders, tmp_path: Path) -> Iterator[rollbridge.Bridge]:
    with Site(cluster, leaders.root, tmp_path).connect("honest") as client:
        yield client


def one_record() -> bytes:
    builder = BatchBuilder(1_000)
    builder.append(1, b"k", b"v")
    return builder.build()


class Misuser:
    """Writes frames into a buffer that no client of ours would."""

    def __init__(self, cluster: AnyCluster, stream: StreamName) -> None:
        self._topic = stream.buffer_topic()
        self._producer = Producer(
            {
                "bootstrap.servers": cluster.bootstrap_servers,
                "compression.type": "zstd",
                "linger.ms": 100,
                "queue.buffering.max.messages": 1_000_000,
            }
        )

    def send(self, header: FrameHeader, value: bytes) -> None:
        self._producer.produce(self._topic, value, key=header.pack(), partition=0)

    def flush(self) -> None:
        assert self._producer.flush(300) == 0


@pytest.mark.parametrize("shape", ["one transaction", "pieces", "many transactions"])
def test_tiny_frames_neither_fill_a_leader_nor_end_transactions_of_others(
    leaders: Leaders, client: rollbridge.Bridge, cluster: AnyCluster, scope: str, shape: str
) -> None:
    stream = StreamName(scope, "orders")
    client.admin.create_stream(str(stream))
    until(leaders.leads)
    idle_kb = leaders.memory_kb("VmRSS")
    early, middle = client.begin(str(stream)), client.begin(str(stream))
    for txn in (early, middle):
        txn.write(str(stream), key=b"k", value=b"early")
        txn.flush()
    tiny, begin = one_record(), BeginFrame("misuser", 0, None, 3_600_000, {str(stream): 0}).encode()
    misuser = Misuser(cluster, stream)
    own = client.begin(str(stream))
    count = 1 if shape == "one transaction" else 20_000 if shape == "many transactions" else 3
    reserved = leaders.metadata.reserve_counters(GroupName(scope), count)
    ids = [TransactionId.of(0, counter).bytes for counter in reserved]
    for identifier in ids:
        misuser.send(FrameHeader(FrameKind.BEGIN, identifier), begin)
    for number in range(FRAMES):
        part, segment = (number % 1_000, number % 7) if shape == "pieces" else (0, 0)
        misuser.send(FrameHeader(FrameKind.DATA, ids[number % count], part, segment, number, 1), tiny)
    if shape == "one transaction":
        for number in range(FRAMES):
            misuser.send(FrameHeader(FrameKind.DATA, own.id.bytes, 0, 0, number, 1), tiny)
    misuser.flush()

    early.write(str(stream), key=b"k", value=b"late")
    assert early.commit().records == 2
    assert leaders.memory_kb("VmHWM") < idle_kb + ROOM_KB

    leaders.replace()
    assert middle.commit().records == 1
    assert leaders.memory_kb("VmHWM") < idle_kb + ROOM_KB
    if shape == "one transaction":
        with pytest.raises(TransactionAbortedError, match="held_bytes_per_transaction_max"):
            own.commit()
    after = client.begin(str(stream))
    after.write(str(stream), key=b"k", value=b"after")
    if shape == "many transactions":  # they are still open, so nothing begins before they end, or their leases
        with pytest.raises(TransactionAbortedError, match="held_bytes_max"):
            after.commit()
    else:
        assert after.commit().records == 1


@pytest.mark.parametrize("kind", ["gzip", "zstd", "records", "numbers"])
def test_a_batch_that_decompresses_to_a_thousand_times_its_size_stops_no_leader(
    leaders: Leaders, client: rollbridge.Bridge, cluster: AnyCluster, scope: str, kind: str
) -> None:
    stream = StreamName(scope, "orders")
    client.admin.create_stream(str(stream))
    until(leaders.leads)
    idle_kb = leaders.memory_kb("VmRSS")
    bad = misnumbered() if kind == "numbers" else bomb(kind)[0]
    early = client.begin(str(stream))
    early.write(str(stream), key=b"k", value=b"early")
    early.flush()
    with KafkaClient(cluster.bootstrap_servers).appender(scope) as appender:
        appender.init()
        appender.append([(stream.buffer_topic(), bad)])
        appender.commit()
    early.write(str(stream), key=b"k", value=b"late")
    assert early.commit().records == 2
    if kind != "records":  # its successor may begin to read behind it, from a snapshot
        assert "buffer.batch-skipped " in leaders.log()
    middle = client.begin(str(stream))
    middle.write(str(stream), key=b"k", value=b"middle")
    middle.flush()
    leaders.replace()
    assert middle.commit().records == 1
    # One batch is opened up to the bound of 64 MiB, twice for a moment where it says nothing of its size.
    assert leaders.memory_kb("VmHWM") < idle_kb + 200 * 1024
