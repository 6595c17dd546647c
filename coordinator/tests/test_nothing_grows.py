"""What a group leaves in Kafka and ZooKeeper does not grow over a week, over years, or with the epochs of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from coordinator.tests.makers import Bench, varied
from coordinator.tests.sim_actors import Client, Leader, scale_request
from coordinator.tests.sim_checks import faults
from coordinator.tests.sim_log import HISTORIAN, listed, read_log, say_again
from coordinator.tests.sim_run import GROUP, STREAMS, Run
from coordinator.tests.sim_truncation import audit, history_of
from coordinator.tests.sim_world import World
from rollbridge.base.effects import AnyEffect, run
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.metadata import paths
from rollbridge.metadata.changes import Roll
from rollbridge.metadata.client_sessions import ClientSession
from rollbridge.metadata.records import CreateNode, DeleteNode, LogMarks, SetNode, Truncation
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.config import Retention
from rollbridge.stream.epochs import EpochHistory, check_chain
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.commit.roll import _epochs
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.stream_state import LedStream
from rollbridge_coordinator.streams.create import drop_epochs
from rollbridge_coordinator.streams.retention import retain_streams

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
YEAR_DAYS = 365
SHIFTS_A_DAY = 6
STEPS = 80


class Week(Run):
    """Every four hours some work; leaders crash, and clients die without taking their answers."""

    shift_ms = 4 * HOUR_MS

    def keep_streams(self, kept_ms: int) -> None:
        """Keep the records of all streams for so long, and until the auditor has read them."""
        for stream in STREAMS:
            policy = AdminRequest(
                kind=RequestKind.UPDATE_STREAM,
                stream=str(stream),
                retention=Retention(kept_ms, -1, ("auditor",)),
                created_ms=0,
            )
            self.world.request(GROUP, policy.to_json())

    def live(self) -> dict[str, int]:
        """How much there is in Kafka and ZooKeeper, without the commit log, see docs/retention.md."""
        topics = {name: log for name, log in self.world.topics.items() if name != GROUP.commit_log_topic}
        data = [log for name, log in topics.items() if ".segment-" in name or ".transaction-buffer" in name]
        compacted = [name for name, log in topics.items() if log not in data]
        nodes = self.world.nodes
        lost = [Truncation.from_json(nodes[path]) for item in STREAMS if (path := paths.truncation(item)) in nodes]
        return {
            "records": sum(len(log.entries) - log.start for log in data),
            "keys": sum(len(self.world.latest(name)) for name in compacted),
            "topics": len(topics),
            "answers": len(self.world.children(paths.answers(GROUP))),
            "parts": len(self.world.children(f"{paths.group(GROUP)}/parts")),
            "epochs": sum(len(self.world.children(paths.epochs(item))) for item in STREAMS),
            "removed": sum(len(item.removed) for item in lost),
            "nodes": len(nodes),
            "bytes": sum(len(path) + len(value) for path, value in nodes.items()),
        }

    def shift(self, number: int) -> None:
        """A burst of work, rest, and the time until the next."""
        for client in self.clients:
            client.stopping = False
        if number % 2 == 0:
            body = scale_request(self.world, STREAMS[number // 2 % 2], self.rng, self.clock_ms)
            if body is not None:
                self.world.request(GROUP, body.to_json())
        orphan = TransactionId.of(0, 1 << 40 | number)
        self.world.ensure(paths.parts(GROUP, orphan))
        for _ in range(STEPS):
            self.clock_ms += self.rng.randint(1, 20)
            chance = self.rng.random()
            if chance < 0.01:
                self._crash()
            elif chance < 0.1:
                audit(self.world, self.rng.choice(STREAMS), self.rng)
            elif chance < 0.5:
                self.rng.choice(self.clients).step(self.clock_ms, GROUP.commit_log_topic)
            else:
                self._lead()
        for client in self.clients:
            client.stopping = True
        self._until(self._quiet)
        self.clock_ms += self.shift_ms
        for _ in range(20):  # in that time the auditor reads everything
            for stream in STREAMS:
                audit(self.world, stream, self.rng)


@pytest.mark.long
def test_a_week_leaves_bounded_state() -> None:
    run = Week(7)
    run.keep_streams(12 * HOUR_MS)
    seen = []
    for number in range(7 * SHIFTS_A_DAY):
        run.shift(number)
        seen.append(run.live())
    assert faults(run.world, GROUP, STREAMS, run.clients, run.refusals) == []
    assert len(run.world.removed) > 20
    assert min(history_of(run.world, item).first for item in STREAMS) > 5
    early, late = seen[SHIFTS_A_DAY : 3 * SHIFTS_A_DAY], seen[-2 * SHIFTS_A_DAY :]
    for what in seen[0]:
        # What waits for a crash to be mended, or for a segment before it, comes and goes; what leaks only comes.
        before, last = min(item[what] for item in early), min(item[what] for item in late)
        assert last <= 2 * before + 2, f"{what} grow: {before} on the second and third day, {last} on the last two"


SHIFTS_A_YEAR = 73


class CountingWorld(World):
    """Counts what a leader reads while it takes over."""

    read = 0

    def _execute(self, effect: AnyEffect, leader: int) -> object:
        match effect:
            case fx.ReadCommitLog(topic, start):
                self.read += len(self.topics[topic].entries) - start
            case fx.ReadEnded(_, start, end):
                self.read += end - start
            case fx.ReadCompacted(topic):
                self.read += len(self.latest(topic))
            case fx.ReadNodes(names):
                self.read += len(names)
            case fx.ReadChildren(names):
                self.read += sum(len(self.children(path)) for path in names)
        return super()._execute(effect, leader)


class Years(Week):
    """Every five days some work, by clients that stay and one that never comes back."""

    shift_ms = 5 * DAY_MS

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.world.__class__ = CountingWorld
        self.gone: list[Client] = []
        self.world.loses_lists = False

    def live(self) -> dict[str, int]:
        nodes, log = self.world.nodes, self.world.topics[GROUP.commit_log_topic]
        return {
            **super().live(),
            "outcomes": len(log.entries) - log.start,
            "ranges": len(listed(self.world, GROUP)),
            "marks": len(LogMarks.from_json(nodes[paths.log_marks(GROUP)]).marks),
            "sessions": len(self.world.children(paths.sessions(GROUP))),
            "read at a takeover": self.takeover(),
        }

    def takeover(self) -> int:
        """How many records and nodes the next leader reads before it serves."""
        assert isinstance(self.world, CountingWorld)
        self.leaders.clear()
        self.world.read = 0
        leader = Leader(self.world, GROUP)
        self.leaders.append(leader)
        while leader.group is None:
            leader.step(self.clock_ms, self.rng)
        folding = sum(end - leader.group.fold.positions.get(item, 0) for item, end in leader.barrier.items())
        self._until(self._quiet)
        return self.world.read + folding

    def visit(self, number: int) -> None:
        """A client that nobody will ever hear of again begins something, and may leave it open."""
        client = Client(f"c{100 + number}", self.world, STREAMS, self.rng)
        path = paths.session(GROUP, client.name)
        self.world.ensure(path)
        self.world.nodes[path] = ClientSession(client.name, 1, self.clock_ms, renews=True).to_json()
        self.clients.append(client)
        self.shift(number)
        self.clients.remove(client)
        self.gone.append(client)
        say_again(self.world, [*self.clients, *self.gone], self.log_rng)
        for _ in range(3):
            read_log(self.world, GROUP, self.log_rng)
        self.world.commits[HISTORIAN][GROUP.commit_log_topic] = len(self.world.topics[GROUP.commit_log_topic].entries)


def years(seed: int, shifts: int) -> tuple[Years, list[dict[str, int]]]:
    """Live for so many shifts, with a retention of streams and of the commit log of a week."""
    run = Years(seed)
    run.keep_streams(7 * DAY_MS)
    week = Retention(7 * DAY_MS, -1, (HISTORIAN,))
    run.world.request(GROUP, AdminRequest(kind=RequestKind.UPDATE_GROUP, retention=week, created_ms=0).to_json())
    seen = []
    for number in range(shifts):
        run.visit(number)
        seen.append(run.live())
    return run, seen


def growth(seen: list[dict[str, int]]) -> list[str]:
    """What there is more of in the last year than in the first quarters of a year."""
    early, late = seen[10 : SHIFTS_A_YEAR // 2], seen[-SHIFTS_A_YEAR // 2 :]
    found = []
    for what in seen[0]:
        before, last = max(item[what] for item in early), min(item[what] for item in late)
        if last > before + 2:
            found.append(f"{what} grow: {before} at most in the first months, {last} at least in the last ones")
    return found


@pytest.mark.long
def test_two_years_leave_what_six_months_do() -> None:
    run, seen = years(3, 2 * SHIFTS_A_YEAR)
    found = faults(run.world, GROUP, STREAMS, [*run.clients, *run.gone], run.refusals)
    assert [item for item in found if "is remembered" not in item] == []  # outcomes are forgotten after three days
    assert run.world.topics[GROUP.commit_log_topic].start > 1_000
    assert min(history_of(run.world, item).first for item in STREAMS) > 50
    assert growth(seen) == []


ORDERS = "sales/orders"
NAME = StreamName.parse(ORDERS)


@dataclass
class EpochYears:
    """A stream with four segments whose time flies: its leader's housekeeping is the real one."""

    bench: Bench = field(default_factory=lambda: Bench({ORDERS: 4}))
    rng: Random = field(default_factory=lambda: Random(17))
    now_ms: int = 0
    nodes: dict[str, bytes] = field(default_factory=dict)
    topics: set[SegmentId] = field(default_factory=set)
    ends: dict[SegmentId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream.config = replace(self.stream.config, retention=Retention(ms=7 * DAY_MS))
        self._published(self.history.first)

    @property
    def stream(self) -> LedStream:
        return self.bench.group.streams[ORDERS]

    @property
    def history(self) -> EpochHistory:
        return self.stream.history

    def roll(self) -> None:
        """Merge a large transaction: one segment's records are prepared, and the stream goes on behind them."""
        history = self.history
        number = self.rng.choice(sorted(history.active.numbers))
        prepared = SegmentId.of(history.next_prepared(0), history.active.epoch)
        roll = Roll(
            ORDERS, history.active.reference_epoch, history.active.epoch, history.next_epoch, history.next_epoch + 1,
            prepared={number: prepared},
        )  # fmt: skip
        self.ends[prepared] = 1_000
        self._extend(*_epochs(self.bench.group, roll, self.now_ms))

    def split(self) -> None:
        """Replace a segment by two, or two neighbours by one."""
        active = self.history.active.segments
        place = self.rng.randrange(len(active) - 1)
        if len(active) < 6:
            both, middle = active[place : place + 1], (active[place].range.low + active[place].range.high) / 2
            ranges = [(both[0].range.low, middle), (middle, both[0].range.high)]
        else:
            both = active[place : place + 2]
            ranges = [(both[0].range.low, both[1].range.high)]
        before = self.history.next_epoch
        self.bench.clock_ms = self.now_ms
        self.bench.scale(ORDERS, [item.id.number for item in both], ranges)
        self._settled(before)

    def write(self) -> None:
        """Write to some segments, and leave others empty."""
        for segment in self.history.active.segment_ids:
            self.ends[segment] = self.ends.get(segment, 0) + self.rng.choice((0, 0, 50))

    def housekeep(self) -> None:
        """Let the leader do what is due, and carry out what it asks for."""
        for procedure in (retain_streams, drop_epochs):
            run(procedure(self.bench.group, self.now_ms), self._carry_out)
        group = self.bench.group
        group.journal.adopt(group.journal.changes(group.streams, {}, ()))
        group.journal.saw(group.streams, {})

    def size(self) -> dict[str, int]:
        """How much there is of it now."""
        history = self.history
        return {
            "topics": len(self.topics),
            "epochs": len(history.records),
            "nodes": len(self.nodes),
            "bytes": sum(len(path) + len(value) for path, value in self.nodes.items()),
            "removed": len(history.removed),
            "marks": len(self.stream.marks),
            "parts": 0 if history.foundation is None else len(history.foundation.lows),
            "graph": len(history.graph.nodes),
            "journal": len(self.bench.group.journal.nodes),
        }

    def _extend(self, *records: Any) -> None:
        first = self.history.next_epoch
        self.stream.history = self.history.with_records(*records)
        self._settled(first)

    def _settled(self, first: int) -> None:
        for epoch in range(first, self.history.next_epoch):
            ends = {item.id: self.ends.get(item.id, 0) for item in self.history.ended_with(epoch)}
            self.stream.history = self.history.with_sealed_ends(epoch, ends)
        self._published(first)

    def _published(self, first: int) -> None:
        for record in self.history.records[first - self.history.first :]:
            self.nodes[paths.epoch(NAME, record.epoch)] = record.to_json()
            self.topics |= record.segment_ids

    def _carry_out(self, effect: AnyEffect) -> object:
        match effect:
            case fx.StableEnds(places):
                segments = {self.stream.place_of(item): item for item in self.topics}
                return {place: self.ends.get(segments[place], 0) for place in places}
            case fx.Now():
                return self.now_ms
            case fx.ReadNodes(names):
                return {path: self.nodes.get(path) for path in names}
            case fx.DeleteRecords():
                return frozenset()
            case fx.DeleteTopics(names):
                self.topics = {item for item in self.topics if self.stream.place_of(item)[0] not in names}
                return True
            case fx.Write(operations):
                for operation in operations:
                    if isinstance(operation, CreateNode | SetNode):
                        self.nodes[operation.path] = operation.value
                    elif isinstance(operation, DeleteNode):
                        del self.nodes[operation.path]
                return True
            case _:
                raise AssertionError(effect)


def life(days: int, *, scaled_every: int | None, settings: LeaderSettings | None = None) -> list[dict[str, int]]:
    """Let a stream live for so many days, with three large commits a day; gives what there was at the end of each."""
    stream = EpochYears()
    if settings is not None:
        stream.bench.group.settings = settings
    seen = []
    for day in range(days):
        for hour in (2, 10, 18):
            stream.now_ms = day * DAY_MS + hour * HOUR_MS
            stream.write()
            stream.roll()
            stream.housekeep()
        if scaled_every is not None and day % scaled_every == 0:
            stream.split()
        seen.append(stream.size())
    assert stream.history.active.epoch >= 6 * days
    assert check_chain(stream.history.records, stream.history.first, stream.history.born) == []
    return seen


def grown(seen: list[dict[str, int]]) -> dict[str, tuple[int, int]]:
    """What there is more of in the last month than there was in the second: most of it then and now."""
    early, late = seen[30:60], seen[-30:]
    most = {what: (max(item[what] for item in early), max(item[what] for item in late)) for what in seen[0]}
    return {what: both for what, both in most.items() if both[1] > 1.3 * both[0] + 5}


@pytest.mark.long
@pytest.mark.parametrize("scaled_every", [None, 1, 45])
def test_two_years_of_large_commits_leave_what_a_month_does(scaled_every: int | None) -> None:
    seen = life(2 * YEAR_DAYS, scaled_every=scaled_every)
    assert grown(seen) == {}
    assert max(item["topics"] for item in seen) < 150
    assert max(item["epochs"] for item in seen) < 100


def test_it_is_found_if_the_root_of_a_stream_that_is_never_scaled_stays_for_ever() -> None:
    settings = varied(LeaderSettings(), epochs_keep_ms=10 * YEAR_DAYS * DAY_MS)
    found = grown(life(120, scaled_every=None, settings=settings))
    assert {"epochs", "nodes", "bytes", "graph", "journal"} <= found.keys()
