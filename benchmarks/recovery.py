"""How long a new leader needs when millions of transactions were aborted before it, and what their snapshots cost.

The history is made directly in the logs: a BEGIN and an ABORT frame of each transaction in the buffer, and its outcome
on the commit log. One transaction that is older than all of them stays open. What is measured is what the leader itself
says: from raising the controller epoch to serving.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from confluent_kafka import Producer

import rollbridge
from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.memory import MIB, peak_bytes
from benchmarks.site import Site
from integration_tests.crashing import program
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, encode_abort, pack_bundle
from rollbridge.buffer.snapshot_topic import SnapshotReader
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.names import (
    GroupName,
    StreamName,
    snapshot_indexes_topic,
    snapshot_segments_topic,
    snapshot_topic,
)
from rollbridge_coordinator.core.frame_reader import control_batches
from rollbridge_coordinator.core.settings import SnapshotSettings
from rollbridge_coordinator.history.snapshot_plan import Marks, Snapshots

REPLAY: Final = "replay of the buffer"
SINGLE: Final = "single snapshot"
CLIENT: Final = "benchmark"
PATIENCE_S: Final = 600.0
_TOOK: Final = re.compile(r"took_s=([0-9.]+)")
_UPDATE: Final = 1_000
_AT_ONCE: Final = 20_000
_FIRST: Final = 1 << 32
"""The counter of the first one, beyond those of real transactions."""
_TAIL_MAX: Final = 50_000
_PART: Final = 500_000
"""So many are aborted between two snapshots of the largest history, which no leader reads in one go."""


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """A million aborted transactions (a twentieth if ``quick``)."""
    aborts = 50_000 if quick else 1_000_000
    history = History(site, aborts)
    return Experiment(
        name="recovery",
        rounds=rounds,
        warm_ups=0,
        sides={OURS: history.from_snapshot, REPLAY: history.from_buffer},
        rows=[
            Row(
                name="recovery-extra",
                title=f"a new leader after {aborts:,} aborted transactions, beside an older one that is still open, "
                "with snapshots: how much longer it needs than one with no history",
                metric="extra_s",
                unit="s",
                better=Better.LESS,
                bar=2.0,
            ),
            Row(
                name="recovery-replay",
                title="the same: how long it needs, compared with reading the whole buffer and commit log",
                metric="took_s",
                unit="s",
                better=Better.LESS,
                bar=1 / 20,
                peers=(REPLAY,),
            ),
        ],
    )


def many(site: Site, *, quick: bool) -> Experiment:
    """Ten million aborted transactions (a twentieth if ``quick``)."""
    aborts = 500_000 if quick else 10_000_000
    history = History(site, aborts)
    return Experiment(
        name="recovery-many",
        rounds=1,
        warm_ups=0,
        sides={OURS: history.from_snapshot},
        rows=[
            Row(
                name="recovery-many-memory",
                title=f"a new leader after {aborts:,} aborted transactions, with snapshots: its peak memory (VmHWM)",
                metric="peak_mib",
                unit="MiB",
                better=Better.LESS,
                bar=512.0,
            ),
            Row(
                name="recovery-many",
                title="the same: how long it needs",
                metric="took_s",
                unit="s",
                better=Better.LESS,
            ),
        ],
    )


def growth(*, quick: bool) -> Experiment:
    """What is written to the topics of snapshots for each abort, early and late."""
    late = 200_000 if quick else 1_000_000
    return Experiment(
        name="snapshot-growth",
        rounds=1,
        warm_ups=0,
        sides={
            OURS: lambda: _bytes_per_abort(late, segmented=True),
            SINGLE: lambda: _bytes_per_abort(late, segmented=False),
        },
        rows=[
            Row(
                name="snapshot-bytes",
                title="bytes written to the topics of snapshots for each abort when 10,000 are listed, over the life "
                "of a segment; an index every 1,000 transactions",
                metric="early",
                unit="B",
                better=Better.LESS,
                beside=(SINGLE,),
            ),
            Row(
                name="snapshot-bytes-late",
                title=f"the same when {late:,} are listed",
                metric="late",
                unit="B",
                better=Better.LESS,
                beside=(SINGLE,),
            ),
            Row(
                name="snapshot-growth",
                title="how many times as much that is",
                metric="growth",
                unit="x",
                better=Better.LESS,
                bar=1.1,
                beside=(SINGLE,),
            ),
        ],
    )


class History:
    """Two streams under ZooKeeper paths of their own: one with a history, one without."""

    def __init__(self, site: Site, aborts: int) -> None:
        self._site = site
        self._aborts = aborts
        self._logs = Path(tempfile.mkdtemp(prefix="recovery-", dir=site.cluster.home))
        self._is_made = False

    def from_snapshot(self) -> Measured:
        """Take over from a snapshot, and where there is nothing."""
        self._make()
        if not self._is_listed(self._aborts):
            self._replay(self._aborts)
        with self._coordinator("history") as (pid, seconds):
            peak_mib = peak_bytes(pid) / MIB
        with self._coordinator("empty") as (_, without_s):
            return {"took_s": seconds, "extra_s": seconds - without_s, "peak_mib": peak_mib}

    def from_buffer(self) -> Measured:
        """Take over without a snapshot."""
        self._make()
        scope = self._stream("history").scope
        topics = [snapshot_topic(scope), snapshot_indexes_topic(scope), snapshot_segments_topic(scope)]
        self._site.topics.delete_topics(self._site.topics.topic_ids(topics))
        return {"took_s": self._replay(self._aborts)}

    def _replay(self, aborts: int) -> float:
        """Take over, and wait until the snapshot lists so many; gives how long taking over has taken."""
        with self._coordinator("history") as (_, seconds):
            wait_for(lambda: self._is_listed(aborts), "a snapshot")
        return seconds

    def _make(self) -> None:
        if self._is_made:
            return
        for which in ("history", "empty"):
            name = self._stream(which)
            with self._connect(which) as b, self._running(which):
                b.admin.create_stream(str(name))
                if which == "history":
                    # Without it, the buffer would soon be truncated, and nothing would be left to read again.
                    oldest = b.begin(str(name))
                    oldest.write(str(name), key=b"key", value=b"value")
                    oldest.flush()
        for first in range(0, self._aborts, _PART):
            if first:
                self._replay(first)
            part = range(_FIRST + first, _FIRST + min(first + _PART, self._aborts))
            write_aborted(self._site.bootstrap_servers, self._stream("history"), part)
        self._is_made = True

    def _stream(self, which: str) -> StreamName:
        return StreamName(f"recovery-{which}-{self._aborts}", "orders")

    def _connect(self, which: str) -> rollbridge.Bridge:
        cluster = self._site.cluster
        return rollbridge.connect(
            cluster.bootstrap_servers,
            zookeeper=cluster.zookeeper,
            zookeeper_root=f"/recovery-{which}",
            client_name=CLIENT,
            options=rollbridge.ClientOptions(admin_timeout_s=60),
        )

    def _is_listed(self, aborts: int) -> bool:
        """Whether a snapshot lists so many, and the open transaction is written down."""
        name = self._stream("history")
        with self._connect("history") as b:
            config = b.admin.describe(str(name)).config
            found = SnapshotReader(KafkaClient.of(b.settings), name.scope).of(config)
            return all(item.aborted == aborts and item.tail < _TAIL_MAX for item in found)

    @contextmanager
    def _coordinator(self, which: str) -> Iterator[tuple[int, float]]:
        """A coordinator that has taken over: its process id, and the seconds that it has needed for that."""
        with self._running(which) as (process, log):
            yield process.pid, took_s(log)

    def _running(self, which: str) -> AbstractContextManager[tuple[subprocess.Popen[bytes], Path]]:
        return logged_coordinator(self._site, f"/recovery-{which}", self._logs)


@contextmanager
def logged_coordinator(
    site: Site, root: str, logs: Path, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A coordinator process below a ZooKeeper path, and its log."""
    handle, path = tempfile.mkstemp(suffix=".log", dir=logs)
    command = [sys.executable, *program(environment), f"--zookeeper-root={root}", "--session-timeout=2"]
    command += [f"--bootstrap-servers={site.bootstrap_servers}", f"--zookeeper={site.cluster.zookeeper}"]
    with os.fdopen(handle, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
    try:
        yield process, Path(path)
    finally:
        process.terminate()
        process.wait(60)


def took_s(log: Path) -> float:
    """Wait until the coordinator with this log has taken over; gives the seconds that it has needed for that."""
    wait_for(lambda: _TOOK.search(log.read_text()), "a new leader")
    found = _TOOK.search(log.read_text())
    assert found is not None
    return float(found[1])


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait for something that takes its time."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {PATIENCE_S:g} s")
        time.sleep(0.2)


def write_aborted(bootstrap_servers: str, stream: StreamName, numbers: range) -> None:
    """Write a history of aborted transactions straight into a stream's buffer and its group's commit log."""
    begin = BeginFrame(CLIENT, 0, None, 60_000, {str(stream): 0}).encode()
    lost: list[object] = []
    producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "linger.ms": 20})
    log = GroupName(stream.scope).commit_log_topic
    with KafkaClient(bootstrap_servers).appender(f"rollbridge.benchmark.{stream.scope}") as appender:
        appender.init()
        for first in range(0, len(numbers), _AT_ONCE):
            ids = [TransactionId.of(0, number) for number in numbers[first : first + _AT_ONCE]]
            for identifier in ids:
                header = FrameHeader(FrameKind.BEGIN, identifier.bytes)
                ending = header._replace(kind=FrameKind.ABORT)
                key, value = pack_bundle([(header.pack(), begin), (ending.pack(), encode_abort("client"))])
                producer.produce(
                    stream.buffer_topic(),
                    key=key,
                    value=value,
                    partition=0,
                    on_delivery=lambda error, _: lost.append(error) if error else None,
                )
            producer.flush()
            now_ms = int(time.time() * 1000)
            records = [
                ControlRecord(item, ControlKind.ABORT, CLIENT, now_ms, now_ms, 1, reason="client") for item in ids
            ]
            appender.append((log, batch) for batch in control_batches(records)[0])
            appender.commit()
    if lost:
        raise RuntimeError(f"{len(lost)} frames were not written: {lost[0]}")


def _bytes_per_abort(late: int, *, segmented: bool) -> Measured:
    early_bytes, late_bytes = (_bytes_at(count, segmented=segmented) for count in (10_000, late))
    return {"early": early_bytes, "late": late_bytes, "growth": late_bytes / early_bytes}


def _bytes_at(count: int, *, segmented: bool) -> float:
    """Bytes of all records that are written from ``count`` aborts on until one more segment has been sealed.

    A single snapshot knows no segments: there, of one update.
    """
    partition = ("bench.orders.transaction-buffer", 0)
    state = Snapshots("bench", SnapshotSettings(transaction_buffer_segmented_snapshot_enabled=segmented))
    known = state.of(partition, "5Yn1cXbfS9Gc8rVtJXf0lw")
    written = listed = 0
    sealed_at: list[int] = []
    sizes: list[int] = []
    while len(sealed_at) < 2 and (segmented or len(sizes) < 2):
        for _ in range(_UPDATE):
            listed += 1
            known.aborted.add(TransactionId.of(0, listed * 2).bytes, listed * 2, listed * 2 + 2)
        known.changes = _UPDATE
        if listed < count and not segmented:
            continue
        plan = state.plan(partition, Marks(listed * 2 + 2, listed * 2, listed, listed), 1, listed)
        if plan is None:
            raise RuntimeError("a single snapshot is too small for this")
        snapshot = plan.snapshot(range(len(plan.segments)))
        if listed >= count:
            written += sum(len(item.key) + len(item.encode()) for item in plan.segments)
            written += len(snapshot.key) + len(snapshot.encode(plan.ids))
            sizes.append(written)
            if plan.segments or not segmented:
                sealed_at.append(len(sizes))
        state.taken(plan, snapshot)
    if not segmented:
        return (sizes[1] - sizes[0]) / _UPDATE
    first, last = sealed_at
    return (sizes[last - 1] - sizes[first - 1]) / ((last - first) * _UPDATE)
