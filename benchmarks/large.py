"""What others notice of a large commit: readers, plain writers and small transactions of the same stream.

Each is a process of its own, as they would be in practice, so that they do not wait for each other's interpreter. The
clock is the machine's monotonic one, which all processes share. First they run by themselves for a while, then beside
the commit, from the request for it to its answer and a moment longer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import Final

import rollbridge
from benchmarks.failover import settled
from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.memory import peak_bytes
from benchmarks.site import Site, another_coordinator, records
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.fetch_plan import Fetched
from rollbridge.kafka.metadata import Isolation
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName, StreamName

GIB: Final = 1 << 30
MIB: Final = 1 << 20
SEGMENTS: Final = 4
_VALUE_BYTES: Final = 8_000
_EVERY_S: Final = 0.005
_CALM_S: Final = 10.0
_AFTER_S: Final = 1.0
_SMALL: Final = 10
"""Records of a small transaction."""
_PATIENCE_S: Final = 1_800.0
_COPIED_S: Final = 3.0
_LOOK_S: Final = 0.005
_ROOT: Final = "/large"


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Commits of 1 and of 10 GiB (64 MiB if ``quick``)."""
    sizes = [64 * MIB] if quick else [GIB, 10 * GIB]
    rows: list[Row] = []
    for size in sizes:
        name = f"{size / GIB:g} GiB" if size >= GIB else f"{size // MIB} MiB"
        told = f"while {name} are committed to the same {SEGMENTS} segments"
        rows += [
            Row(
                name=f"large-{size}-{what}",
                title=title,
                metric=f"{size}_{metric}",
                unit=unit,
                better=Better.LESS,
                bar=bar,
            )
            for what, title, metric, unit, bar in (
                (
                    "reader",
                    f"a plain reader's longest wait for a record of the active segments {told}",
                    "reader_ms",
                    "ms",
                    100.0,
                ),
                ("writer", f"a plain writer's longest wait for an acknowledgement {told}", "writer_ms", "ms", 150.0),
                ("small", f"p99 of transactions of {_SMALL} records {told}, to that without", "small_ratio", "x", 2.0),
                ("memory", f"the leader's peak memory {told}", "peak_mib", "MiB", 512.0),
                ("commit", f"the commit of {name} itself, from the request to the answer", "commit_s", "s", None),
            )
        ]
    rows.append(
        Row(
            name="large-takeover",
            title="the leader dies in the middle of the largest of these merges: wait of a small transaction",
            metric="takeover_s",
            unit="s",
            better=Better.LESS,
            bar=1.0,
        )
    )
    return Experiment(
        name="large",
        rounds=rounds,
        warm_ups=0,
        sides={OURS: lambda: _ours(site, sizes)},
        rows=rows,
    )


def _ours(site: Site, sizes: Sequence[int]) -> Measured:
    found: dict[str, float] = {}
    for size in sizes:
        found |= {f"{size}_{name}": value for name, value in _beside(site, size).items()}
    found["takeover_s"] = _takeover(site, sizes[-1])["takeover_s"]
    return found


@contextmanager
def _place(site: Site, size: int, *names: str) -> Iterator[_Place]:
    """Coordinators of their own, and a stream with a transaction of a size that is still open."""
    root = f"{_ROOT}-{time.monotonic_ns()}"
    with ExitStack() as stack:
        coordinators = {name: stack.enter_context(another_coordinator(site, root, name)) for name in names}
        client = stack.enter_context(
            rollbridge.connect(site.bootstrap_servers, zookeeper=site.cluster.zookeeper, zookeeper_root=root)
        )
        stream = f"large{time.monotonic_ns()}/orders"
        client.admin.create_stream(stream, segments=SEGMENTS)
        transaction = client.begin(stream)
        transaction.write_all(stream, records(size // _VALUE_BYTES, b"last", _VALUE_BYTES))
        transaction.flush()
        yield _Place(coordinators, client, transaction, root, stream)


@dataclass
class _Place:
    coordinators: dict[str, subprocess.Popen[bytes]]
    client: rollbridge.Bridge
    transaction: rollbridge.Transaction
    root: str
    stream: str


def _beside(site: Site, size: int) -> Measured:
    with _place(site, size, "one") as place:
        with ExitStack() as stack:
            writer, reader, small = (stack.enter_context(_helper(site, role, place)) for role in _ROLES)
            time.sleep(_CALM_S)
            asked = time.monotonic()
            place.transaction.commit(timeout=_PATIENCE_S)
            answered = time.monotonic()
            time.sleep(_AFTER_S)
            written, committed, read = writer.stop(), small.stop(), reader.stop()
        acknowledged = {int(number): done for number, _, done in written}
        waits = [(at, at - acknowledged[int(number)]) for number, at in read if int(number) in acknowledged]
        pauses = [(begun, done - begun) for _, begun, done in written]
        commits = [(begun, done - begun) for begun, done in committed]
        end = answered + _AFTER_S
        return {
            "reader_ms": 1000 * max(_between(waits, asked, end)),
            "writer_ms": 1000 * max(_between(pauses, asked, end)),
            "small_ratio": _p99(_between(commits, asked, end)) / _p99(_between(commits, asked - _CALM_S, asked)),
            "peak_mib": peak_bytes(place.coordinators["one"].pid) / MIB,
            "commit_s": answered - asked,
        }


def _takeover(site: Site, size: int) -> Measured:
    with (
        _place(site, size, "one", "two") as place,
        ZooKeeperSession(site.cluster.zookeeper, root=place.root) as session,
        # Later commits of the connection that has asked for the large one wait for it.
        rollbridge.connect(
            site.bootstrap_servers, zookeeper=site.cluster.zookeeper, zookeeper_root=place.root
        ) as other,
    ):
        with other.transaction(place.stream) as small:
            small.write(place.stream, key=b"key", value=b"value")
        group = GroupName(place.stream.partition("/")[0])
        leader = settled(Metadata(session), group)
        answer = place.transaction.commit_async()
        while not session.children(paths.merging(group)):
            time.sleep(0.01)
        time.sleep(_COPIED_S)  # so that it is in its middle
        place.coordinators[leader].kill()
        killed = time.monotonic()
        with other.transaction(place.stream) as small:
            small.write(place.stream, key=b"key", value=b"value")
        waited_s = time.monotonic() - killed
        if answer.done():
            raise AssertionError("the merge was over before its leader was killed")
        answer.result(_PATIENCE_S)
        return {"takeover_s": waited_s}


def _between(rows: Sequence[tuple[float, float]], low: float, high: float) -> list[float]:
    return [value for at, value in rows if low <= at <= high]


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


# Helpers: processes that note when what they do begins and ends, until their standard input is closed.


Notes = list[tuple[float, ...]]


@dataclass
class _Helper:
    process: subprocess.Popen[str]

    def stop(self) -> list[list[float]]:
        """End it, and return its notes."""
        out, _ = self.process.communicate(timeout=_PATIENCE_S)
        rows: list[list[float]] = json.loads(out.splitlines()[-1])
        return rows


@contextmanager
def _helper(site: Site, role: str, place: _Place) -> Iterator[_Helper]:
    command = [sys.executable, "-m", "benchmarks.large", role, site.bootstrap_servers, site.cluster.zookeeper]
    process = subprocess.Popen(
        [*command, place.root, place.stream], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # it is ready
    try:
        yield _Helper(process)
    finally:
        process.kill()
        process.wait(_PATIENCE_S)


def _write(b: rollbridge.Bridge, stream: str, ended: Event) -> Notes:
    notes: Notes = []
    with b.writer(stream) as writer:
        while not ended.is_set():
            number, begun = len(notes), time.monotonic()
            writer.write(b"key-%d" % (number % 64), b"plain %d" % number).result(_PATIENCE_S)
            notes.append((number, begun, time.monotonic()))
            ended.wait(_EVERY_S)
    return notes


def _read(b: rollbridge.Bridge, stream: str, ended: Event) -> Notes:
    """Read committed records of the active segments as they come, whatever is merged elsewhere meanwhile.

    librdkafka's consumer would do as well but for new segments, which it may take half a second to fetch from.
    """
    notes: Notes = []
    name = StreamName.parse(stream)
    follower = KafkaClient(b.settings.bootstrap_servers, client_id="benchmark").follow(
        Isolation.READ_COMMITTED, name="benchmark"
    )
    reading: set[str] = set()
    with closing(follower):
        while not ended.is_set():
            active = {name.segment_topic(item.id) for item in b.admin.history(stream).active.segments}
            for topic in active - reading:
                follower.follow((topic, 0), 0)
            reading |= active
            for item in follower.poll(_LOOK_S):
                at = time.monotonic()
                if isinstance(item, Fetched):
                    values = [record.value or b"" for record in item.records()]
                    notes += [(int(value[6:]), at) for value in values if value.startswith(b"plain ")]
    return notes


def _commit(b: rollbridge.Bridge, stream: str, ended: Event) -> Notes:
    notes: Notes = []
    while not ended.is_set():
        begun = time.monotonic()
        with b.transaction(stream) as transaction:
            for number in range(_SMALL):
                transaction.write(stream, key=b"key-%d" % number, value=b"small")
        notes.append((begun, time.monotonic()))
    return notes


_ROLES: Final = {"write": _write, "read": _read, "commit": _commit}


def main(role: str, bootstrap_servers: str, zookeeper: str, root: str, stream: str) -> None:
    """Be a helper."""
    ended = Event()

    def await_end() -> None:
        sys.stdin.read()
        ended.set()

    Thread(target=await_end, daemon=True).start()
    with rollbridge.connect(bootstrap_servers, zookeeper=zookeeper, zookeeper_root=root) as b:
        print("ready", flush=True)
        print(json.dumps(_ROLES[role](b, stream, ended)))


if __name__ == "__main__":
    main(*sys.argv[1:])
