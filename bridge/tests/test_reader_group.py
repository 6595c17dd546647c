"""Groups of readers: decisions as tables, and a simulation of members that come, go, crash and commit when they like.

The simulation's world is a stream with numbered records of keys; its members follow the rules of
``bridge/rollbridge/consumer/group.py`` with nothing but :func:`decide` and the group's committed offsets to go by.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import histories
from rollbridge.base.ids import SegmentId
from rollbridge.errors import ConflictError
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.stream.reading import (
    Reset,
    SegmentStanding,
    SegmentVerdict,
    check_streams,
    decide,
    ignored,
    mark_of,
    wanted,
)

DONE, WAITS, READ, READ_NEW, NO_OFFSET = SegmentStanding

TWO = EpochHistory.create(even_ranges(2), 0)
SPLIT = TWO.with_records(TWO.plan_scale([0], [KeyRange(0.0, 0.25), KeyRange(0.25, 0.5)], 1))
SEALED = SPLIT.with_sealed_ends(1, {SegmentId.of(0, 0): 5})
MERGED = SEALED.with_records(SEALED.plan_scale([1, 3], [KeyRange(0.25, 1.0)], 2))
S0, S1, S2, S3, S4 = (SegmentId.of(number, epoch) for number, epoch in ((0, 0), (1, 0), (2, 1), (3, 1), (4, 2)))
MERGED = MERGED.with_sealed_ends(2, {S1: 3, S3: 0})


def standings(history: EpochHistory, committed: dict[SegmentId, int], reset: Reset) -> dict[SegmentId, SegmentStanding]:
    return {segment: verdict.standing for segment, verdict in decide(history, committed, reset).items()}


@pytest.mark.parametrize(
    ("history", "committed", "reset", "expected"),
    [
        (TWO, {}, Reset.EARLIEST, {S0: READ, S1: READ}),
        (TWO, {}, Reset.LATEST, {S0: READ_NEW, S1: READ_NEW}),
        (TWO, {}, Reset.ERROR, {S0: NO_OFFSET, S1: NO_OFFSET}),
        (TWO, {S0: 7}, Reset.LATEST, {S0: READ, S1: READ_NEW}),
        # The end of what was replaced is not known yet.
        (SPLIT, {S0: 7, S1: 0}, Reset.EARLIEST, {S0: READ, S1: READ, S2: WAITS, S3: WAITS}),
        (SEALED, {S0: 4, S1: 0}, Reset.EARLIEST, {S0: READ, S1: READ, S2: WAITS, S3: WAITS}),
        (SEALED, {S0: 5, S1: 0}, Reset.EARLIEST, {S0: DONE, S1: READ, S2: READ, S3: READ}),
        (SEALED, {S0: 5, S1: 0}, Reset.LATEST, {S0: DONE, S1: READ, S2: READ, S3: READ}),
        (SEALED, {S0: 5, S1: 0}, Reset.ERROR, {S0: DONE, S1: READ, S2: READ, S3: READ}),
        # The commit in what is done has been dropped by Kafka; those behind it still say so.
        (SEALED, {S2: 1, S1: 0}, Reset.EARLIEST, {S0: DONE, S1: READ, S2: READ, S3: READ}),
        # A group that begins at the latest records has nothing to do with what was sealed before.
        (SEALED, {}, Reset.LATEST, {S0: DONE, S1: READ_NEW, S2: READ_NEW, S3: READ_NEW}),
        # An empty segment is done once what it continues is; a merge waits for both sides.
        (MERGED, {S0: 4, S1: 3}, Reset.EARLIEST, {S0: READ, S1: DONE, S2: WAITS, S3: WAITS, S4: WAITS}),
        (MERGED, {S0: 5, S1: 2}, Reset.EARLIEST, {S0: DONE, S1: READ, S2: READ, S3: DONE, S4: WAITS}),
        (MERGED, {S0: 5, S1: 3}, Reset.EARLIEST, {S0: DONE, S1: DONE, S2: READ, S3: DONE, S4: READ}),
        (MERGED, {S0: 5}, Reset.LATEST, {S0: DONE, S1: DONE, S2: READ, S3: DONE, S4: READ}),
        (MERGED, {S4: 0}, Reset.EARLIEST, {S0: DONE, S1: DONE, S2: READ, S3: DONE, S4: READ}),
    ],
)
def test_standings(
    history: EpochHistory, committed: dict[SegmentId, int], reset: Reset, expected: dict[SegmentId, SegmentStanding]
) -> None:
    assert standings(history, committed, reset) == expected


def test_a_verdict_says_where_to_go_on_and_what_is_waited_for() -> None:
    verdicts = decide(MERGED, {S0: 4, S1: 2}, Reset.EARLIEST)
    assert verdicts[S0] == SegmentVerdict(READ, 4)
    assert verdicts[S4].standing is WAITS
    assert set(verdicts[S4].after) == {S1, S3}


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ({S0: 5, S1: 3, S2: 0, S4: 0}, {}),
        ({S0: 0, S1: 0}, {}),
        ({S0: 0, S1: 3, S2: 0}, {S0: 5}),
        ({S0: 0, S1: 0, S2: 0, S4: 0}, {S0: 5, S1: 3}),
    ],
)
def test_commits_that_count_for_nothing_are_known(
    committed: dict[SegmentId, int], expected: dict[SegmentId, int]
) -> None:
    assert ignored(MERGED, committed) == expected


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ({}, {S0, S1, S2, S3, S4}),
        ({S0: 5, S1: 3}, {S0, S1, S2, S4}),  # S0's commit is needed until there is one in S2
        ({S0: 5, S1: 3, S2: 0}, {S1, S2, S4} | {S0}),
        ({S0: 5, S1: 3, S2: 0, S4: 0}, {S2, S4}),
    ],
)
def test_what_a_member_subscribes_to(committed: dict[SegmentId, int], expected: set[SegmentId]) -> None:
    verdicts = decide(MERGED, committed, Reset.EARLIEST)
    found = wanted(MERGED, committed, verdicts)
    assert found <= expected
    assert {segment for segment, verdict in verdicts.items() if verdict.standing is not DONE} <= found
    left = {segment: offset for segment, offset in committed.items() if segment in found}
    assert standings(MERGED, left, Reset.EARLIEST) == {s: v.standing for s, v in verdicts.items()}


@given(histories(), st.data())
def test_commits_that_are_not_subscribed_to_are_not_needed(history: EpochHistory, data: st.DataObject) -> None:
    """Kafka drops them after a while: that changes nothing."""
    committed: dict[SegmentId, int] = {}
    for _ in range(data.draw(st.integers(0, 12))):
        verdicts = decide(history, committed, Reset.EARLIEST)
        ready = sorted(segment for segment, verdict in verdicts.items() if verdict.standing is READ)
        segment = data.draw(st.sampled_from(ready))
        end = history.sealed_end(segment)
        committed[segment] = data.draw(st.integers(verdicts[segment].offset, 9 if end is None else end))
    verdicts = decide(history, committed, Reset.EARLIEST)
    kept = wanted(history, committed, verdicts)
    left = {segment: offset for segment, offset in committed.items() if segment in kept}
    assert {s: v.standing for s, v in decide(history, left, Reset.EARLIEST).items()} == {
        s: v.standing for s, v in verdicts.items()
    }


@given(histories(), st.sampled_from(Reset))
def test_something_can_always_be_read_or_is_an_error(history: EpochHistory, reset: Reset) -> None:
    """Reading whatever is ready leads to the active segments, through empty segments and epochs."""
    committed: dict[SegmentId, int] = {}
    while True:
        verdicts = decide(history, committed, reset)
        if any(verdict.standing is NO_OFFSET for verdict in verdicts.values()):
            assert reset is Reset.ERROR
            return
        ready = [
            segment
            for segment, verdict in verdicts.items()
            if verdict.standing in (READ, READ_NEW) and segment not in committed
        ]
        if not ready:
            break
        for segment in ready:
            committed[segment] = history.sealed_end(segment) or 0
    active = history.active.segment_ids
    assert {segment for segment, verdict in verdicts.items() if verdict.standing is not DONE} == active


@given(histories())
def test_verdicts_do_not_depend_on_epochs_that_are_not_known_yet_to_be_cautious(history: EpochHistory) -> None:
    """A member that lags behind the history reads nothing that an up-to-date one would let wait."""
    committed = dict.fromkeys(history.records[0].segment_ids, 0)
    now = decide(history, committed, Reset.EARLIEST)
    for epochs in range(1, len(history.records)):
        seen = decide(EpochHistory(history.records[:epochs]), committed, Reset.EARLIEST)
        assert all(now[segment].standing is not WAITS for segment, verdict in seen.items() if verdict.standing is READ)


Decide = Callable[[EpochHistory, Mapping[SegmentId, int], Reset], dict[SegmentId, SegmentVerdict]]


# The simulation ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Member:
    """Has segments, and of each where it is and what it handed out without a commit."""

    name: int
    position: dict[SegmentId, int | None] = field(default_factory=dict)
    """None: assigned, not begun."""
    done: set[SegmentId] = field(default_factory=set)


class World:
    """A stream, a group, and what the application saw of each key."""

    def __init__(self, seed: int, decide: Decide = decide, *, watches_ends: bool = True) -> None:
        self.watches_ends = watches_ends
        self.random = Random(seed)
        self.decide = decide
        self.history = EpochHistory.create(even_ranges(self.random.randint(1, 3)), 0)
        self.log: dict[SegmentId, list[int | None]] = defaultdict(list)
        """Per segment and offset a key's sixteenth, or None for a marker."""
        self.committed: dict[SegmentId, int] = {}
        self.members: list[Member] = []
        self.names = 0
        self.seen: dict[tuple[SegmentId, int], bool] = {}
        self.order: dict[int, list[tuple[SegmentId, int]]] = defaultdict(list)
        """What was written for each key, in order."""

    def append(self) -> None:
        segment = self.random.choice(self.history.active.segments)
        if self.random.random() < 0.3:
            self.log[segment.id].append(None)
            return
        keys = [key for key in range(64) if segment.range.low <= key / 64 < segment.range.high]
        key = self.random.choice(keys) if keys else None
        if key is not None:
            self.order[key].append((segment.id, len(self.log[segment.id])))
        self.log[segment.id].append(key)

    def scale(self) -> None:
        if len(self.history.records) > 12:
            return
        active = list(self.history.active.segments)
        sealed = self.random.sample(active, self.random.randint(1, len(active)))
        cuts = [number / 16 for number in range(1, 16) if self.random.random() < 0.1]
        ranges: list[KeyRange] = []
        for item in sealed:
            inner = [item.range.low, *(cut for cut in cuts if item.range.low < cut < item.range.high), item.range.high]
            ranges += [KeyRange(low, high) for low, high in itertools.pairwise(inner)]
        if self.random.random() < 0.4:
            ranges = merged(ranges)
        record = self.history.plan_scale([item.id.number for item in sealed], ranges, 1)
        self.history = self.history.with_records(replace(record, sealed_ends=None))

    def note_ends(self) -> None:
        for record in self.history.records:
            if record.sealed_ends is None:
                ends = {item.id: len(self.log[item.id]) for item in self.history.ended_with(record.epoch)}
                self.history = self.history.with_sealed_ends(record.epoch, ends)

    def rebalance(self) -> None:
        """Members come, go with or without a last commit, and segments change hands; nothing that was read counts."""
        if not self.members or self.random.random() < 0.4:
            self.names += 1
            self.members.append(Member(self.names))
        elif len(self.members) > 1:
            self.members.remove(self.random.choice(self.members))
        for member in self.members:
            for segment in list(member.position):
                if self.random.random() < 0.5:
                    del member.position[segment]
                    member.done.discard(segment)
        owned = {segment for member in self.members for segment in member.position}
        verdicts = self.decide(self.history, self.committed, Reset.EARLIEST)
        for segment in wanted(self.history, self.committed, verdicts) - owned:
            self.random.choice(self.members).position[segment] = None

    def step(self, member: Member, decide_by: EpochHistory) -> None:
        """A member looks at the group's commits and reads a little."""
        verdicts = self.decide(decide_by, self.committed, Reset.EARLIEST)
        for segment, position in list(member.position.items()):
            if segment not in verdicts:
                continue
            verdict = verdicts[segment]
            if segment in member.done:
                end = decide_by.sealed_end(segment)
                if self.watches_ends and verdict.standing is READ and end is not None:
                    self.committed[segment] = end  # somebody took it back
                continue
            if position is None:
                if verdict.standing is READ:
                    self.committed.setdefault(segment, verdict.offset)
                    member.position[segment] = verdict.offset
                continue
            for _ in range(self.random.randint(0, 3)):
                if position < len(self.log[segment]):
                    if self.log[segment][position] is not None:
                        self.deliver(segment, position)
                    position += 1
            member.position[segment] = position
            if self.random.random() < 0.5:
                self.committed[segment] = position
            end = decide_by.sealed_end(segment)
            if end is not None and position >= end and self.committed[segment] >= position:
                member.done.add(segment)

    def commit_late(self) -> None:
        """Somebody commits once more what was committed before, as a transaction or a former owner may."""
        if self.committed:
            segment = self.random.choice(sorted(self.committed))
            self.committed[segment] = self.random.randint(0, self.committed[segment])

    def deliver(self, segment: SegmentId, offset: int) -> None:
        key = self.log[segment][offset]
        assert key is not None
        before = self.order[key][: self.order[key].index((segment, offset))]
        missing = [place for place in before if place not in self.seen]
        assert not missing, f"key {key}: {segment}:{offset} was handed out before {missing}"
        self.seen[segment, offset] = True

    def drain(self) -> None:
        """Without further disturbance, but for some late commits, everything is handed out."""
        self.note_ends()
        self.rebalance()
        for turn in range(2_000):
            for member in self.members:
                self.step(member, self.history)
                if turn < 50:
                    self.commit_late()
            if all(place in self.seen for places in self.order.values() for place in places):
                return
            self.rebalance_missing()
        raise AssertionError("something is never handed out")

    def rebalance_missing(self) -> None:
        owned = {segment for member in self.members for segment in member.position}
        for segment in self.history.segments():
            if segment not in owned:
                self.random.choice(self.members).position[segment] = None


def merged(ranges: list[KeyRange]) -> list[KeyRange]:
    found: list[KeyRange] = []
    for item in sorted(ranges):
        if found and found[-1].high == item.low:
            found[-1] = KeyRange(found[-1].low, item.high)
        else:
            found.append(item)
    return found


def run(world: World) -> None:
    """A few hundred things happen, then everything that is left is read."""
    world.rebalance()
    stale = world.history
    for _ in range(400):
        match world.random.random():
            case chance if chance < 0.4:
                world.append()
            case chance if chance < 0.45:
                world.note_ends()
                world.scale()
            case chance if chance < 0.5:
                world.note_ends()
            case chance if chance < 0.55:
                world.rebalance()
            case chance if chance < 0.6:
                stale = world.history
            case chance if chance < 0.65:
                world.commit_late()
            case _:
                seen = world.history if world.random.random() < 0.7 else stale
                world.step(world.random.choice(world.members), seen)
    world.drain()


@pytest.mark.parametrize("seed", range(60))
def test_per_key_order_and_no_loss_whatever_the_members_do(seed: int) -> None:
    run(World(seed))


def hasty(history: EpochHistory, committed: Mapping[SegmentId, int], reset: Reset) -> dict[SegmentId, SegmentVerdict]:
    """A mutant: waits for nothing."""
    found = decide(history, committed, reset)
    return {
        segment: SegmentVerdict(READ) if verdict.standing is WAITS else verdict for segment, verdict in found.items()
    }


def careless(
    history: EpochHistory, committed: Mapping[SegmentId, int], reset: Reset
) -> dict[SegmentId, SegmentVerdict]:
    """A mutant: takes a segment for read as soon as anything is committed in it and it was replaced."""
    ended = {segment for segment in history.segments() if history.graph.successors(segment)}
    return decide(history, {s: 10**9 if s in ended else offset for s, offset in committed.items()}, reset)


def stubborn(
    history: EpochHistory, committed: Mapping[SegmentId, int], reset: Reset
) -> dict[SegmentId, SegmentVerdict]:
    """A mutant: never takes a segment for read unless a commit says so, although it may be empty."""
    return {
        segment: SegmentVerdict(WAITS)
        if history.graph.predecessors(segment) and committed.get(segment) is None
        else verdict
        for segment, verdict in decide(history, committed, reset).items()
    }


def survives(world: World) -> bool:
    try:
        run(world)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("mutant", [hasty, careless, stubborn])
def test_the_simulation_notices_wrong_decisions(mutant: Decide) -> None:
    assert not all(survives(World(seed, mutant)) for seed in range(20))


def test_the_simulation_notices_owners_who_let_an_end_be_taken_back() -> None:
    assert not all(survives(World(seed, watches_ends=False)) for seed in range(20))


def test_a_group_with_other_streams_is_refused() -> None:
    own = "sales/orders"
    check_streams("g", ["sales/orders"], [(own, ""), (own, mark_of(["sales/orders"]))])
    with pytest.raises(ConflictError, match="consumer group g reads sales/orders, so it cannot read sales/payments"):
        check_streams("g", ["sales/payments"], [(own, "")])
    for streams in (["sales/orders", "sales/payments"], ["sales/payments"]):
        with pytest.raises(ConflictError, match="give each set of streams a group of its own"):
            check_streams("g", streams, [(own, mark_of(["sales/orders"]))])
