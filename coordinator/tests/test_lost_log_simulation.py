"""Seeded simulation of a commit log that somebody deletes beneath its leader, and of repairs that are interrupted.

What must hold, beside what :mod:`coordinator.tests.test_unled_simulation` looks at:

- what was committed before is visible once, and has no other outcome afterwards;
- what begins after the repair is committed, on all streams of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from bridge.tests.refusals import raises_code
from coordinator.tests.sim_term import assert_noticed
from coordinator.tests.sim_unled import GROUP, STREAMS, Run
from coordinator.tests.sim_world import Topic
from rollbridge.base.effects import Steps
from rollbridge.base.errors import CorruptDataError
from rollbridge.base.ids import TransactionId
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.metadata import paths
from rollbridge.metadata.journal import RepairStep, begin_log, split
from rollbridge.metadata.records import ControllerEpoch, Group
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.history import commit_log, takeover

LOG = GROUP.commit_log_topic


class LogRun(Run):
    """One simulated history; ``repairing`` tells which steps of a repair are carried out."""

    def __init__(self, seed: int, repairing: Callable[[RepairStep], bool] = lambda _: True) -> None:
        self.repairing, self.repairs, self.is_log_lost = repairing, 0, False
        self.lost: list[Topic] = []
        super().__init__(seed)

    def step(self) -> None:
        super().step()
        if self.is_log_lost:
            self.recorded.clear()  # what ZooKeeper tells of them is dropped
            if self.rng.random() < 0.005:
                self._repair()

    def _begin(self) -> None:
        super()._begin()
        if self.is_log_lost:
            self.attempts[-1].is_harmed = True

    def _lose(self) -> None:
        self._harm()
        self.is_log_lost = True
        if self.rng.random() < 0.5:
            self.world.create(LOG)

    def _harm(self) -> None:
        """The log goes, and with it what is known of transactions; a round that is under way may still end."""
        if LOG in self.world.topics:
            self.lost.append(self.world.topics[LOG])
        for attempt in self.attempts:
            attempt.is_harmed = True
        self.world.lose(LOG)

    def _repair(self) -> None:
        topics = {name: log.id for name, log in self.world.topics.items() if "#" not in name}
        _, journal = split(self.world.latest(GROUP.terminated_topic))
        with suppress(CorruptDataError):  # of a stream that was never journaled, until its node is healed
            steps = begin_log(self.world.nodes, GROUP, journal, topics, self.clock_ms)
            self.repairs += 1
            done = len(steps) if self.rng.random() < 0.5 else self.rng.randrange(len(steps))
            for step in steps[:done]:
                if self.repairing(step):
                    self._carry_out(step)
            self.is_log_lost = done < len(steps)

    def _carry_out(self, step: RepairStep) -> None:
        for topic in step.topics:
            if topic == LOG:
                self._harm()
            else:
                self.world.lose(topic)
        for batch in step.batches:
            assert self.world.multi(batch), step.what
            for operation in batch:
                self.garbage.pop(operation.path, None)  # a node that could not be read is as the journal has it
        raised = self.world.nodes.get(paths.controller(GROUP))
        if raised is not None:
            self.world.controller_epoch = max(self.world.controller_epoch, ControllerEpoch.from_json(raised).epoch)

    def outcomes(self) -> dict[TransactionId, list[ControlRecord]]:
        found: dict[TransactionId, list[ControlRecord]] = {}
        for log in (*self.lost, self.world.topics.get(LOG)):
            for _, record in () if log is None else log.visible():
                if record.kind is not ControlKind.BEGIN:
                    found.setdefault(record.transaction, []).append(record)
        return found

    def _is_known(self) -> bool:
        group = Group.from_json(self.world.nodes[paths.group(GROUP)])
        return LOG in self.world.topics and group.commit_log_topic_id == self.world.topics[LOG].id

    def _is_over(self) -> bool:
        known = self.outcomes()
        return (
            not self.is_log_lost
            and self._is_known()
            and all(item.id in known for item in self.attempts if not item.is_harmed)
            and not self._records()
            and not any(paths.stream_fault(name) in self.world.nodes for name in STREAMS)
        )


class EmptiedRun(Run):
    """One simulated history in which somebody deletes all records of the commit log; often its leader dies then."""

    emptied_at = 0

    def _lose(self) -> None:
        self.emptied_at = self.world.topics[LOG].start = len(self.world.topics[LOG].entries)
        if self.rng.random() < 0.7:
            self.die()

    def _is_over(self) -> bool:
        known = self.outcomes()
        return all(item.id in known for item in self.attempts) and not self._records()


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_or_done_twice_without_the_records_of_a_commit_log(seed: int) -> None:
    run = EmptiedRun(seed)
    run.go()
    assert run.emptied_at


def _in_doubt(*_: object) -> None:
    return None


def _open(*_: object, **__: object) -> bool:
    return False


def _unseen(group: GroupState, *rest: Any) -> Steps[None]:
    yield from _read_logs(group, *rest)
    group.fold.ended = EndedIds(group.fold.ended.log_end) if group.fold.ended is not None else None


_read_logs = takeover._read_logs

EMPTIED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "nobody asks what is remembered": lambda patch: patch.setattr(commit_log, "_has_outcome", _in_doubt),
    "what is on record is open": lambda patch: patch.setattr(takeover, "may_have_ended", _open),
    "what a part of the log would tell is not missed": lambda patch: patch.setattr(takeover, "_read_logs", _unseen),
}


@pytest.mark.long_cases(
    "what is on record is open", "what a part of the log would tell is not missed", "nobody asks what is remembered"
)
@pytest.mark.parametrize("name", EMPTIED)
def test_the_simulation_finds_what_comes_of_an_emptied_log(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    EMPTIED[name](monkeypatch)
    assert_noticed(lambda seed: EmptiedRun(seed).go(), range(12))


@pytest.mark.parametrize("seed", range(8))
def test_a_group_goes_on_after_its_commit_log_was_deleted(seed: int) -> None:
    run = LogRun(seed)
    run.go()
    assert run.repairs


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_leader_that_commits_nothing_notices_that_its_log_is_gone(is_made_again: bool) -> None:
    run = Run(0)
    leader = run.leader
    run.world.lose(LOG)
    if is_made_again:
        run.world.create(LOG)
    run.until(lambda: run.leader is not leader, 1_000)
    with pytest.raises(CorruptDataError, match="repair --commit-log"):
        run.until(lambda: run.leader.step(run.clock_ms, run.rng), 1_000)


SKIPPED = {
    "buffers stay": "delete transaction buffer",
    "records of transactions stay": "drop records of transactions",
}


@pytest.mark.long_cases("buffers stay")
@pytest.mark.parametrize("name", SKIPPED)
def test_the_simulation_finds_a_repair_that_skips_a_step(name: str) -> None:
    assert_noticed(lambda seed: LogRun(seed, lambda step: not step.what.startswith(SKIPPED[name])).go(), range(12))


def test_a_zookeeper_from_before_a_log_was_begun_anew_is_refused() -> None:
    run = Run(0)
    path = paths.group(GROUP)
    known = Group.from_json(run.world.nodes[path])
    run.world.nodes[path] = replace(known, commit_log_topic_id="former").to_json()
    run.take_over()
    with raises_code("zookeeper-outdated", match="was created again"):
        run.until(lambda: run.leader.step(run.clock_ms, run.rng), 1_000)
