"""What a client name costs on a connection that serves many: memory, time of housekeeping, and of a new session.

Memory is measured in a process of its own that begins and commits a transaction under each name and then leaves them
all idle: what the process holds more than with the first thousand names, for each of the others. A turn of housekeeping
is timed with all of them idle, and once more when all but the first have been closed.

A new session is what a gateway answers InitProducerId with: ``new_session`` and ``unfinished`` of a name.

What records of sessions cost a leader is measured with its own procedures, in a ZooKeeper path of their own: what a
takeover reads, and how long the turns of a search take that removes them all.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import rollbridge
from benchmarks.harness import Better, Experiment, Measure, Measured, Row
from benchmarks.site import Site
from rollbridge.base.effects import Steps
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import DAY_MS, HOUR_MS, ClientSession
from rollbridge.metadata.records import CreateNode
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.config import MINUTE_MS
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.core.effects import DatedNode, ReadChildren, ReadCounter, ReadDated, ReadNodes, Write
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.state import GroupState, SearchStage
from rollbridge_coordinator.history.sessions import forget_sessions, load_sessions

IDLE, TRACED = "idle names", "idle names, traced"
SESSION: Final = "new sessions"
RECORDS: Final = "records"
_WARM: Final = 1_000
_THREADS: Final = 8
_SESSIONS: Final = 200
_AT_ONCE: Final = 1_000
_PATIENCE_S: Final = 3_600.0


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Fifty thousand names (two thousand if ``quick``)."""
    count = 3_000 if quick else 50_000
    return Experiment(
        name="client-names",
        rounds=rounds,
        warm_ups=0,
        sides={
            IDLE: _idle(site, count, traced=False),
            TRACED: _idle(site, min(count, 5_000), traced=True),
            SESSION: lambda: new_sessions(site),
            RECORDS: lambda: read_and_remove(site, 2 * count),
        },
        rows=[
            Row(
                name="client-names-memory",
                title=f"memory of an idle client name, {count:,} on one connection",
                metric="bytes",
                unit="bytes",
                better=Better.LESS,
                bar=20_000.0,
                ours=IDLE,
            ),
            Row(
                name="client-names-objects",
                title="of this Python objects, as tracemalloc counts them",
                metric="bytes",
                unit="bytes",
                better=Better.LESS,
                ours=TRACED,
            ),
            Row(
                name="client-names-turn",
                title=f"turn of a connection's housekeeping with {count:,} idle names",
                metric="turn_ms",
                unit="ms",
                better=Better.LESS,
                bar=5.0,
                ours=IDLE,
            ),
            Row(
                name="client-names-threads",
                title=f"threads that {count:,} names have begun",
                metric="threads",
                unit="",
                better=Better.LESS,
                bar=0.0,
                ours=IDLE,
            ),
            Row(
                name="client-names-session",
                title="new session of a name that had one, with its unfinished transactions (p50)",
                metric="again_ms",
                unit="ms",
                better=Better.LESS,
                ours=SESSION,
            ),
            Row(
                name="client-names-first-session",
                title="first session of a name, likewise (p50)",
                metric="first_ms",
                unit="ms",
                better=Better.LESS,
                ours=SESSION,
            ),
            Row(
                name="client-names-takeover",
                title=f"what a takeover takes to read {2 * count:,} names",
                metric="takeover_s",
                unit="s",
                better=Better.LESS,
                ours=RECORDS,
            ),
            Row(
                name="client-names-search",
                title=f"longest turn of a leader that removes {2 * count:,} names",
                metric="longest_ms",
                unit="ms",
                better=Better.LESS,
                ours=RECORDS,
            ),
            Row(
                name="client-names-removal",
                title="names that such a leader removes in a second, if it does nothing else",
                metric="removed",
                unit="/s",
                better=Better.MORE,
                ours=RECORDS,
            ),
        ],
    )


def _idle(site: Site, count: int, *, traced: bool) -> Measure:
    def measure() -> Measured:
        stream = site.make_stream(f"client-names-{count}-{traced}-{time.monotonic_ns()}")
        command = [sys.executable, "-m", "benchmarks.client_names", site.bootstrap_servers, site.cluster.zookeeper]
        done = subprocess.run(
            [*command, stream, str(count), "traced" if traced else "untraced"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=_PATIENCE_S,
        )
        site.bridge.admin.delete_stream(stream)
        found: dict[str, float] = json.loads(done.stdout)
        return found

    return measure


def new_sessions(site: Site) -> Measured:
    """Time sessions of a name one after the other, and first ones of other names."""
    stream = site.make_stream(f"new-sessions-{time.monotonic_ns()}")
    group = GroupName(stream.partition("/")[0])
    name = site.bridge.client("session-of-benchmark")
    with name.transaction(stream) as transaction:
        transaction.write(stream, value=b"x")

    def again(_: int) -> None:
        name.new_session(group)
        name.unfinished(group=group)

    def first(number: int) -> None:
        with site.bridge.client(f"{stream.partition('/')[2]}-{number}") as fresh:
            fresh.new_session(group)
            fresh.unfinished(group=group)

    found = {"again_ms": _median_ms(again), "first_ms": _median_ms(first)}
    name.close()
    site.bridge.admin.delete_stream(stream)
    return found


def read_and_remove(site: Site, count: int) -> Measured:
    """Put records of sessions under a path of their own, that are two days old, and do what leaders do with them."""
    name = GroupName("names")
    with ZooKeeperSession(site.cluster.zookeeper, root=f"/names-{time.monotonic_ns()}") as session:
        session.ensure(paths.sessions(name))
        old_ms = int(time.time() * 1000) - 2 * DAY_MS
        for first in range(0, count, _AT_ONCE):
            session.multi(
                [
                    CreateNode(
                        paths.session(name, f"flink-0-{number}"),
                        ClientSession(f"flink-0-{number}", old_ms // MINUTE_MS, old_ms, renews=True).to_json(),
                    )
                    for number in range(first, min(first + _AT_ONCE, count))
                ]
            )
        group = GroupState(name, 1, BufferFold(BufferLimits(), lambda *_: None), LeaderSettings())
        began_s = time.perf_counter()
        _carry_out(session, load_sessions(group))
        takeover_s = time.perf_counter() - began_s
        group.fold.fences.caught_up()
        turns: list[float] = []
        began_s = time.perf_counter()
        now_ms = int(time.time() * 1000) + DAY_MS + HOUR_MS  # ZooKeeper says that they were written now
        while not turns or group.sessions.stage is not SearchStage.REST:
            turn_s = time.perf_counter()
            _carry_out(session, forget_sessions(group, now_ms))
            turns.append(time.perf_counter() - turn_s)
        took_s = time.perf_counter() - began_s
        if session.children(paths.sessions(name)):
            raise AssertionError("records stay")
    return {"takeover_s": takeover_s, "longest_ms": max(turns) * 1000, "removed": count / took_s}


def _carry_out(session: ZooKeeperSession, steps: Steps[None]) -> None:
    answer: Any = None
    while True:
        try:
            effect: Any = steps.send(answer)
        except StopIteration:
            return
        match effect:
            case ReadNodes(names):
                nodes = session.get_many(names)
                answer = {path: node and node.value for path, node in zip(names, nodes, strict=True)}
            case ReadDated(names):
                nodes = session.get_many(names)
                answer = {
                    path: node and DatedNode(node.value, node.version, node.modified_ms)
                    for path, node in zip(names, nodes, strict=True)
                }
            case ReadCounter(path):
                node = session.get(path)
                answer = node and (node.value, node.version)
            case ReadChildren(names):
                answer = dict(zip(names, session.children_many(names), strict=True))
            case Write(operations):
                session.multi(operations)
                answer = True
            case _:
                answer = {}


def _median_ms(do: Callable[[int], None]) -> float:
    took = []
    for number in range(_SESSIONS):
        began_s = time.perf_counter()
        do(number)
        took.append(time.perf_counter() - began_s)
    return statistics.median(took) * 1000


def main(bootstrap_servers: str, zookeeper: str, stream: str, names: str, traced: str) -> None:
    """Use so many names once, and print what each has cost."""
    count = int(names)
    with rollbridge.connect(bootstrap_servers, zookeeper=zookeeper) as b:

        def use(numbers: range) -> None:
            with ThreadPoolExecutor(_THREADS) as pool:
                for future in list(pool.map(lambda number: _commit(b.client(f"name-{number}"), stream), numbers)):
                    future.result(_PATIENCE_S)

        use(range(_WARM))
        gc.collect()
        threads = threading.active_count()
        if traced == "traced":
            tracemalloc.start()
        before = _held(traced)
        use(range(_WARM, count))
        gc.collect()
        grown = _held(traced) - before
        took_ms = _turn_ms(b)
        print(
            json.dumps(
                {
                    "bytes": grown / (count - _WARM),
                    "threads": threading.active_count() - threads,
                    "turn_ms": took_ms,
                    "rss": _resident(),
                }
            )
        )


def _commit(client: rollbridge.Client, stream: str) -> rollbridge.CommitFuture:
    transaction = client.begin(stream, label=client.client_name)
    transaction.write(stream, value=b"x")
    return transaction.commit_async()


def _turn_ms(b: rollbridge.Bridge) -> float:
    def turn(_: int) -> None:
        for chore in b._housekeeper._chores:
            if getattr(chore, "__name__", "") not in ("refresh", "refill"):  # which ask ZooKeeper at intervals
                chore()

    return _median_ms(turn)


def _held(traced: str) -> int:
    return tracemalloc.get_traced_memory()[0] if traced == "traced" else _resident()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


if __name__ == "__main__":
    main(*sys.argv[1:])
