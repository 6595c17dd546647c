"""What a cut takes away: along the lineage of keys, never beyond what is sealed, read or given."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import SegmentId
from rollbridge.errors import InvalidRequestError, UnavailableError
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges, ranges_of
from rollbridge.stream.reading import KeyLineage, Reset, SegmentStanding, decide, wanted
from rollbridge.stream.truncation import consistent, floors_of, frontier, lower, read_by_group, removable

END = 10
A, B = SegmentId.of(0, 0), SegmentId.of(1, 0)
C, D = SegmentId.of(2, 1), SegmentId.of(3, 1)
E = SegmentId.of(4, 2)


def sealed(history: EpochHistory, end: int = END) -> EpochHistory:
    """The history with the ends of what ended with its newest epoch."""
    epoch = history.active.epoch
    return history.with_sealed_ends(epoch, {item.id: end for item in history.ended_with(epoch)})


def scaled(history: EpochHistory, seal: list[int], ranges: list[tuple[float, float]], end: int = END) -> EpochHistory:
    return sealed(history.with_records(history.plan_scale(seal, ranges_of(ranges), 0)), end)


HISTORY = scaled(scaled(EpochHistory.create(even_ranges(2), 0), [0], [(0.0, 0.25), (0.25, 0.5)]), [1, 3], [(0.25, 1.0)])
"""A splits into C and D; B and D become E. Active are C and E."""


def grown(seed: int) -> EpochHistory:
    """A random history of scales and rolling commits."""
    rng = random.Random(seed)
    history = EpochHistory.create(even_ranges(rng.randint(1, 3)), 0)
    for _ in range(rng.randint(0, 6)):
        roots = [
            item.epoch
            for item in history.records
            if item.reference_epoch == item.epoch != history.active.reference_epoch
        ]
        if roots and rng.random() < 0.4:
            before, after = history.plan_rolling(rng.choice(roots), 0)
            history = sealed(history.with_records(before), rng.randint(0, END))
            history = sealed(history.with_records(after), rng.randint(0, END))
            continue
        segments = history.active.segments
        place = rng.randrange(len(segments))
        chosen = segments[place : place + rng.randint(1, 2)]
        low, high = chosen[0].range.low, chosen[-1].range.high
        ranges = [(low, high)] if rng.random() < 0.5 else [(low, (low + high) / 2), ((low + high) / 2, high)]
        history = scaled(history, [item.id.number for item in chosen], ranges, rng.randint(0, END))
    return history


def test_a_cut_takes_what_its_segments_continue() -> None:
    assert floors_of(HISTORY, {E: 3}) == {E: 3, A: END, B: END, D: END}
    assert floors_of(HISTORY, {C: 0}) == {C: 0, A: END}
    assert floors_of(HISTORY, {A: 4, B: 5}) == {A: 4, B: 5}
    assert removable(HISTORY, floors_of(HISTORY, {E: 3})) == [A, B, D]
    assert removable(HISTORY, {D: END}) == [], "what comes before is still there"
    assert removable(HISTORY.with_removed([A]), {D: END}) == [D]
    assert consistent(HISTORY, {A: END, C: 3, D: END, E: 4}) == {A: END, C: 3, D: END}, "B keeps what comes before E"
    assert consistent(HISTORY.with_removed([A]), {C: 3}) == {A: END, C: 3}
    assert HISTORY.graph.ancestors([E]) == {A, B, D}
    assert HISTORY.graph.descendants([A]) == {C, D, E}
    assert frontier(HISTORY, {}) == {A: 0, B: 0}
    assert frontier(HISTORY, floors_of(HISTORY, {E: 3})) == {C: 0, E: 3}


@pytest.mark.parametrize(
    ("cut", "what"),
    [
        ({}, "one segment at least"),
        ({SegmentId.of(9, 0): 0}, "no segment"),
        ({A: -1}, "beyond its end"),
        ({A: END + 1}, "beyond its end"),
        ({A: 1, E: 1}, "a place of its own"),
    ],
)
def test_cuts_that_mean_nothing_are_refused(cut: dict[SegmentId, int], what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        floors_of(HISTORY, cut)


def test_a_cut_waits_for_ends_that_are_not_known() -> None:
    record = replace(HISTORY.active, sealed_ends=None)
    history = replace(HISTORY, records=(*HISTORY.records[:-1], record))
    with pytest.raises(UnavailableError):
        floors_of(history, {E: 3})


@given(st.integers(0, 1 << 32), st.integers(0, 1 << 32))
def test_floors_are_made_consistent_and_nothing_else_is_deleted(shape: int, seed: int) -> None:
    history, rng = grown(shape), random.Random(seed)
    given_floors = {item: rng.randint(0, END) for item in history.segments() if rng.random() < 0.8}
    floors = consistent(history, given_floors)
    assert consistent(history, floors) == floors
    doomed = set(removable(history, floors))
    for segment, floor in floors.items():
        assert floor <= given_floors[segment] or history.sealed_end(segment) == floor
        assert all(item in doomed for item in history.graph.predecessors(segment))
    assert all(history.graph.ancestors([segment]) <= doomed for segment in doomed)
    left = frontier(history, floors)
    assert consistent(history, floors_of(history, left)) == floors, "a cut and its floors say the same"
    assert removable(history.with_removed(doomed), floors) == []
    other = {item: rng.randint(0, END) for item in history.segments()}
    both = consistent(history, lower(floors, other))
    assert all(floor <= min(floors[item], other[item]) or item in doomed for item, floor in both.items())


@given(st.integers(0, 1 << 32), st.integers(0, 1 << 32))
def test_a_group_loses_nothing_that_it_has_not_read_and_goes_on_where_it_was(shape: int, seed: int) -> None:
    history, rng = grown(shape), random.Random(seed)
    committed: dict[SegmentId, int] = {}
    for _ in range(rng.randint(0, 12)):
        verdicts = decide(history, committed, Reset.EARLIEST)
        readable = [item for item, verdict in verdicts.items() if verdict.standing is SegmentStanding.READ]
        if not readable:
            break
        segment = rng.choice(readable)
        end = history.sealed_end(segment)
        committed[segment] = rng.randint(verdicts[segment].offset, END if end is None else end)
    floors = consistent(history, read_by_group(history, committed))
    before = decide(history, committed, Reset.EARLIEST)
    for segment, floor in floors.items():
        assert before[segment].standing is SegmentStanding.DONE or before[segment].offset >= floor
    doomed = removable(history, floors)
    truncated = history.with_removed(doomed)
    left = {item: offset for item, offset in committed.items() if item not in doomed}  # Kafka drops these commits
    for reset in (Reset.EARLIEST, Reset.LATEST):
        assert {item: verdict for item, verdict in decide(history, committed, reset).items() if item not in doomed} == {
            item: verdict for item, verdict in decide(truncated, left, reset).items() if item not in doomed
        }
    assert not wanted(truncated, left, decide(truncated, left, Reset.EARLIEST)) & set(doomed)


def test_a_group_that_has_committed_nothing_keeps_everything() -> None:
    assert read_by_group(HISTORY, {}) == {}
    assert read_by_group(HISTORY, {A: END})[A] == END - 1, "its last commit is kept until there is one behind it"
    assert read_by_group(HISTORY, {A: END, C: 0, D: 0})[A] == END


def test_a_removed_segment_is_done_for_every_group_and_a_stage_without_records() -> None:
    history = HISTORY.with_removed([A])
    verdicts = decide(history, {}, Reset.EARLIEST)
    assert verdicts[A].standing is SegmentStanding.DONE
    assert [verdicts[item].standing for item in (C, D)] == [SegmentStanding.READ, SegmentStanding.READ]
    assert history.stored() == [B, C, D, E]
    stages = KeyLineage(history, 0.1).stages
    assert [(stage.segment, stage.base, stage.end, stage.removed) for stage in stages] == [
        (C, END, None, False),
        (A, 0, END, True),
    ]
