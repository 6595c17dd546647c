"""Seeded simulation of the protocol: leaders crash, or are left behind and go on, between any two effects.

A failing run prints its seed; ``run(seed)`` repeats it exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

import pytest

from coordinator.tests import sim_snapshots as snapshots
from coordinator.tests.sim_actors import Attempt
from coordinator.tests.sim_admin import ADMIN_DEFECTS
from coordinator.tests.sim_expiry import whole_history_of
from coordinator.tests.sim_log import (
    LOG_DEFECTS,
)
from coordinator.tests.sim_refusals import REFUSAL_DEFECTS, is_poisoned
from coordinator.tests.sim_run import BY_LOAD, CALM_CRASHES, GROUP, MUST_CRASH_AT, POLICIES, STREAMS, Run
from coordinator.tests.sim_sessions import RestartingClient
from coordinator.tests.sim_standby import STANDBY_DEFECTS
from coordinator.tests.sim_truncation import (
    history_of,
)
from coordinator.tests.sim_world import World
from rollbridge.base.effects import Steps
from rollbridge.metadata.changes import Roll
from rollbridge.stream.epochs import EpochCause
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.commit import plan, roll
from rollbridge_coordinator.commit.plan import Targets
from rollbridge_coordinator.core import loop
from rollbridge_coordinator.core.state import GroupState


@pytest.mark.parametrize("block", range(2))
def test_no_promise_is_broken_whatever_crashes_where(block: int) -> None:
    for seed in range(block * 3, block * 3 + 3):
        broken = Run(seed).go()
        assert not broken, f"seed {seed}: {broken[:5]}"


@pytest.mark.long
@pytest.mark.parametrize("block", range(6))
def test_no_promise_is_broken_in_many_histories(block: int) -> None:
    for seed in range(6 + block * 10, 16 + block * 10):
        broken = Run(seed).go()
        assert not broken, f"seed {seed}: {broken[:5]}"


def calm_run(seed: int, points: Counter[str], done: Counter[str], unseen: AbstractSet[str] = frozenset()) -> None:
    """A run in which late commits follow each other breaks no promise; counts crashes, and what was done."""
    run = Run(seed, fragility=0.02, unseen=unseen, is_calm=True)
    broken = run.go()
    assert not broken, f"seed {seed}: {broken[:5]}"
    points.update(run.crash_points)
    done.update(run.world.done)
    for name in STREAMS:
        history = whole_history_of(run.world, name)
        rolls = [item for item in history.records if item.cause is EpochCause.ROLLING_TRANSACTIONS]
        done["rolls"] += len(rolls)
        done["narrow rolls"] += sum(len(history.began_with(item.epoch)) < len(item.segments) for item in rolls)


@pytest.mark.long
@pytest.mark.parametrize("block", range(2))
def test_no_promise_is_broken_where_late_commits_follow_each_other(block: int) -> None:
    points, done = Counter[str](), Counter[str]()
    for seed in range(block * 15, block * 15 + 15):
        calm_run(seed, points, done)
    assert done["narrow rolls"] > 30
    assert done["rolls"] > done["narrow rolls"], "some concern all segments"
    assert done["merge_late/CommitRound"] > 3
    assert done["watch_linger/LookForObstacles"] + done["end_linger/LookForObstacles"] > 0, "such a seal waits, too"


@pytest.mark.long
def test_leaders_crash_wherever_late_commits_can_be() -> None:
    points, done = Counter[str](), Counter[str]()
    for seed in range(1_000, 1_150):
        unseen = CALM_CRASHES - points.keys()
        if not unseen and done["merge_late/CommitRound"] > 50:
            return
        calm_run(seed, points, done, unseen)
    assert not CALM_CRASHES - points.keys()
    assert done["merge_late/CommitRound"] > 50


def seal_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A roll seals active segments that it does not replace."""
    monkeypatch.setattr(
        roll,
        "_active_places",
        lambda plans: [
            place
            for _, stream, _, _ in roll._unpublished(plans)
            for place in stream.places_of(stream.history.active.segments).values()
        ],
    )


def merge_into_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A roll merges into an active segment that holds a part of the keys."""
    right = plan.targets

    def wrong(group: GroupState, rolls: tuple[Roll, ...] = ()) -> Targets:
        found = right(group, rolls)
        for item in rolls:
            stream = group.streams[item.stream]
            for number in item.numbers:
                begun = stream.history.record(item.transaction_epoch).segment_numbered(number)
                other = next(one for one in stream.history.active.segments if one.range.overlaps(begun.range))
                found.add(stream.config, number, other.id)
        return found

    monkeypatch.setattr(roll, "targets", wrong)


def touch_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A roll leaves out one of the segments that were written to."""
    right = plan._planned

    def wrong(group: GroupState, rolls: Mapping[str, int], numbers: Mapping[str, set[int]]) -> tuple[Roll, ...]:
        return right(group, rolls, {name: sorted(own)[:1] for name, own in numbers.items()})

    monkeypatch.setattr(plan, "_planned", wrong)


def linger_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written behind lingering segments, they take more."""
    monkeypatch.setattr(roll, "_is_written_behind", lambda _: steps_to(False))
    monkeypatch.setattr(loop, "ends_linger", lambda *_: False)


def steps_to(value: bool) -> Steps[bool]:
    """A procedure without effects."""
    yield from ()
    return value


@pytest.mark.long_cases("linger_for_ever")
@pytest.mark.parametrize("spoil", [seal_too_much, merge_into_others, touch_too_little, linger_for_ever])
def test_the_checks_catch_a_wrong_roll(
    spoil: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    for seed in range(100):
        try:
            if Run(seed, is_calm=True).go():
                return
        except Exception:  # it may also surface as a crash of the leader itself
            return
    raise AssertionError("no run has noticed it")


COVERED = 100
"""For so many runs are the numbers of what has to happen."""


def load_run(seed: int, points: Counter[str], seen: Counter[str]) -> None:
    """A run in which streams are scaled by their load breaks no promise; counts crashes, and what was seen."""
    unseen = BY_LOAD - points.keys() - {"follow_load/LogEnds", "follow_load/DiskBytes"}  # each look has these
    run = Run(seed, fragility=0.01, unseen=unseen, is_calm=True, by_load=True)
    run.run_on()
    broken = run.go()
    assert not broken, f"seed {seed}: {broken[:5]}"
    points.update(run.crash_points)
    for name, policy in zip(STREAMS, POLICIES, strict=True):
        history = whole_history_of(run.world, name)
        for record in history.records:
            began, ended = len(history.began_with(record.epoch)), len(history.ended_with(record.epoch))
            if record.reason:
                seen["splits" if began > ended else "merges"] += 1
                assert policy.min_segments <= len(record.segments) <= policy.max_segments
                assert record.cause is EpochCause.SCALE
            elif record.cause is EpochCause.SCALE:
                seen["reopened"] += 1
                assert began == ended, "nobody has asked for it"


@pytest.mark.long_cases("0")
@pytest.mark.parametrize("block", range(2))
def test_no_promise_is_broken_while_streams_are_scaled_by_their_load(block: int) -> None:
    points, seen = Counter[str](), Counter[str]()
    for seed in range(block * 6, block * 6 + 6):
        load_run(seed, points, seen)
    assert seen["splits"] > 8, seen
    assert seen["merges"] > 4, seen


@pytest.mark.long
def test_leaders_crash_wherever_they_scale_by_load() -> None:
    points, seen = Counter[str](), Counter[str]()
    for seed in range(2_000, 2_030):
        if points.keys() >= BY_LOAD:
            return
        load_run(seed, points, seen)
    assert not BY_LOAD - points.keys()


class Coverage:
    """What has happened in runs, and what has to happen in 100 of them for them to be worth something."""

    wanted: Mapping[str, int] = {
        "cause rolling-transactions": 150,
        "large transactions": 20,
        "narrow rolls": 100,
        "old transactions in active segments": 50,
        "old transactions in both": 20,
        "cause scale": 500,
        "suspended scale": 25,
        "suspended roll": 25,
        "ongoing transactions from a snapshot": 100,
        "takeovers_warm": 250,
        "takeovers_tail_unfit": 250,
        "reason offsets refused": 3,
        "messages of buffers truncated": 1_000,
        "epochs dropped": 100,
        "records of the commit log truncated": 1_000,
        "offsets of groups": 350,
        "administered create-stream": 150,
        "administered delete-stream": 140,  # a stream of which something is open is not deleted
        "condition refused": 150,
        "condition COMMIT": 150,
        "ended commit": 200,
        "ended abort": 150,
        "ended silent": 200,
        "ended fenced": 25,
        "answered committed": 25,
        "answered aborted": 25,
        "resumed": 15,
        "poisoned, refused": 50,
        "streams of which a topic was refused": 50,
        "rounds refused": 50,
        "Seal TOPIC_AUTHORIZATION_FAILED": 50,
        "Seal seal-timeout": 2,
        "CreateTopics POLICY_VIOLATION": 50,
        "AppendLate TOPIC_AUTHORIZATION_FAILED": 6,
        "AppendControl TOPIC_AUTHORIZATION_FAILED": 2,
        "closed in vain": 25,
    }

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.points: Counter[str] = Counter()
        self.runs = 0

    def missing(self) -> list[str]:
        """What has not happened often enough, and where nobody has crashed."""
        least = {name: number * self.runs / COVERED for name, number in self.wanted.items()}
        rare = [f"{name}: {self.counts[name]}, not {number}" for name, number in least.items()]
        rare = [text for text, (name, number) in zip(rare, least.items(), strict=True) if self.counts[name] < number]
        return rare + sorted(MUST_CRASH_AT - self.points.keys())

    def add(self, run: Run) -> None:
        """Count what has happened in a run."""
        world, counts = run.world, self.counts
        self.runs += 1
        self.points.update(run.crash_points)
        counts.update(world.takeovers)
        counts["records of the commit log truncated"] += world.topics[GROUP.commit_log_topic].start
        counts["ongoing transactions from a snapshot"] += world.spared
        counts["streams of which a topic was refused"] += len(run.refusals.denied)
        counts["rounds refused"] += run.refusals.rounds
        counts.update(run.refusals.counts)
        counts["offsets of groups"] += len(world.group_offsets)
        counts.update(f"suspended {title.partition('-')[0]}" for title in run.pending_changes)
        for name in STREAMS:
            history = whole_history_of(world, name)
            counts.update(f"cause {record.cause.value}" for record in history.records)
            prepared = [item for item in history.graph.nodes if item.is_prepared]
            logs = [world.log(name.segment_topic(item)) for item in prepared]
            counts["large transactions"] += sum(bool(log.visible()) for log in logs)
            counts["narrow rolls"] += sum(
                record.cause is EpochCause.ROLLING_TRANSACTIONS
                and len(history.began_with(record.epoch)) < len(record.segments)
                for record in history.records
            )
            counts["epochs dropped"] += history_of(world, name).first
            counts["messages of buffers truncated"] += world.topics[name.buffer_topic()].start
        for administrator in run.administrators:
            counts.update(f"administered {kind.value}" for kind, _ in administrator.answered)
        for client in run.clients:
            for attempt in client.attempts:
                self._add_attempt(attempt)
                self._add_placement(world, attempt)
            if isinstance(client, RestartingClient):
                known = [item for _, answer in client.answers for item in answer.transactions]
                counts.update(f"answered {item.state.value}" for item in known)

    def _add_placement(self, world: World, attempt: Attempt) -> None:
        """Count where a transaction was put whose stream had been scaled before."""
        outcome = attempt.outcome
        if outcome is None:
            return
        for name, segments in outcome.placement.items():
            begun = attempt.begin.streams[name]
            records = whole_history_of(world, StreamName.parse(name)).records
            made = {item.epoch: item.created_ms for item in records if item.cause is EpochCause.SCALE}
            is_old = any(epoch > begun and made_ms < outcome.decided_ms for epoch, made_ms in made.items())
            kept = [item for item in segments if item.epoch <= begun]
            self.counts["old transactions in active segments"] += is_old and bool(kept)
            self.counts["old transactions in both"] += bool(kept) and len(kept) < len(segments)

    def _add_attempt(self, attempt: Attempt) -> None:
        self.counts[f"ended {attempt.ended}"] += 1
        self.counts["resumed"] += attempt.part > 0
        if attempt.outcome is not None:
            self.counts["poisoned, refused"] += is_poisoned(attempt) and "INVALID_RECORD" in attempt.outcome.reason
            self.counts[f"reason {attempt.outcome.reason}"] += 1
            if attempt.conditions:
                self.counts[f"condition {'refused' if attempt.outcome.refused else attempt.outcome.kind.value}"] += 1


@pytest.mark.long
def test_the_runs_cover_what_they_are_for() -> None:
    seeds = [*range(1_000, 1_034), 1_036, 1_039, 1_041, 1_042, 1_044, 1_035, 1_037, 1_038, 1_040, 1_043]
    coverage = covered([*seeds, *range(1_045, 1_050)])
    assert not coverage.missing(), coverage.counts


@pytest.mark.long
def test_many_runs_cover_what_they_are_for() -> None:
    coverage = covered([*range(1_034, 1_052), *range(1_080, 1_098)])
    assert not coverage.missing(), coverage.counts


def covered(seeds: Iterable[int]) -> Coverage:
    """What happens in runs, none of which breaks a promise."""
    coverage = Coverage()
    for seed in seeds:
        run = Run(seed, fragility=0.03, unseen=MUST_CRASH_AT - coverage.points.keys())
        broken = run.go()
        assert not broken, f"seed {seed}: {broken[:5]}"
        coverage.add(run)
    return coverage


FOUND_AS = {
    "deaf-refusal": "tried for ever",
    "broad-refusal": "in an error state",
    "stubborn-lease": "before its lease has ended",
    "hasty-expiry": "although its commit was asked for in time",
    "visible-before-sealed": "out of order",
}
"""What has to be said about some defects, which stumble over other things as well."""
FOUND_FIRST = {
    "blames-all": 19,
    "unwatched": 9,
    "no-fencing": 6,
    "stubborn-lease": 5,
    "waiting-roll": 5,
    "blind-forecast": 4,
    "waiting-seal": 3,
    "baseless-expiry": 2,
    "deaf-log": 2,
    "forgetful-expiry": 2,
    "gaps-in-session": 2,
    "greedy-expiry": 2,
    "lossy-multi": 2,
    "broad-refusal": 1,
    "careless-expiry": 1,
    "credulous-standby": 1,
    "denying-successor": 1,
    "early-list": 1,
    "forgotten-outcomes": 1,
    "hasty-ongoing": 1,
    "unordered-session": 1,
}
"""The runs that noticed rare defects when this was written; they are tried first."""


@pytest.mark.long_cases(
    "blames-all",
    "stubborn-lease",
    "greedy-log",
    "lossy-multi",
    "blind-reopening",
    "uncounted-preparations",
    "deaf-log",
    "baseless-expiry",
    "blind-forecast",
    "waiting-seal",
    "forgetful-expiry",
    "greedy-expiry",
    "unlisted-outcomes",
    "forgotten-sessions",
    "hasty-merge",
    "gaps-in-session",
)
@pytest.mark.parametrize(
    "defect",
    [
        "no-fencing",
        "torn-round",
        "lossy-multi",
        "open-seal",
        "forgetful",
        "blind-forecast",
        "blind-look",
        "bare-offsets",
        "unwatched",
        "greedy-truncation",
        "hasty-truncation",
        "deaf-retention",
        "greedy-expiry",
        "careless-expiry",
        "baseless-expiry",
        "forgetful-expiry",
        "untied-outcomes",
        "first-guess",
        "forgotten-sessions",
        "visible-before-sealed",
        "timed-seal",
        "waiting-seal",
        "waiting-roll",
        "boundless-seal",
        "forgotten-suspension",
        "forgotten-late",
        "unordered-session",
        "gaps-in-session",
        "trusts-its-clock",
        "hasty-expiry",
        "stubborn-lease",
        "hasty-merge",
        "uncounted-preparations",
        *snapshots.SNAPSHOT_DEFECTS,
        *snapshots.ONGOING_DEFECTS,
        *STANDBY_DEFECTS,
        *ADMIN_DEFECTS,
        *REFUSAL_DEFECTS,
        *LOG_DEFECTS,
    ],
)
def test_the_checks_catch_a_defect(defect: str) -> None:
    told = FOUND_AS.get(defect, "")
    for seed in (FOUND_FIRST.get(defect, 0), *range(150)):
        try:
            broken = Run(seed, frozenset({defect})).go()
        except Exception as fault:  # a defect may also surface as a crash of the leader itself
            broken = [str(fault)]
        if any(told in text for text in broken):
            return
    raise AssertionError(f"no run has noticed the defect {defect}")
