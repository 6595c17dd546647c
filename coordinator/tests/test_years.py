"""Two years of simulated life leave as much in Kafka and ZooKeeper, and for a new leader to read, as six months."""

from __future__ import annotations

import pytest

from coordinator.tests.sim_actors import Client, Leader
from coordinator.tests.sim_checks import faults
from coordinator.tests.sim_log import HISTORIAN, listed, read_log, say_again
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import World
from coordinator.tests.test_simulation import GROUP, STREAMS
from coordinator.tests.test_week import HOUR_MS, Week
from rollbridge.model import paths
from rollbridge.model.records import ClientSession, LogMarks, Retention
from rollbridge.model.requests import AdminRequest, RequestKind
from rollbridge_coordinator.state import effects as fx

DAY_MS = 24 * HOUR_MS
SHIFT_MS = 5 * DAY_MS
SHIFTS_A_YEAR = 73


class CountingWorld(World):
    """Counts what a leader reads while it takes over."""

    read = 0

    def _execute(self, effect: fx.AnyEffect, leader: int) -> object:
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

    shift_ms = SHIFT_MS

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
