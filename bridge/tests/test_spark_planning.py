"""Planning of micro-batches: order, completeness, no overlap, progress, and limits, for any lineage."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import histories
from rollbridge.base.ids import SegmentId
from rollbridge.errors import CorruptDataError
from rollbridge.spark.planning import (
    CHAIN_MAX,
    OffsetRange,
    advance,
    between,
    chains,
    covered,
    share,
    split,
    unsealed,
    without_beyond,
    without_lost,
    without_unknown,
)
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange, even_ranges

Front = dict[SegmentId, int]


def beginning(history: EpochHistory) -> Front:
    return {segment: 0 for segment in history.segments() if not history.graph.predecessors(segment)}


def as_seen(history: EpochHistory, epochs: int, sealed: bool) -> EpochHistory:
    """The first ``epochs`` epochs, the ends of the last transition known or not."""
    records = list(history.records[:epochs])
    if not sealed and epochs > 1:
        records[-1] = replace(records[-1], sealed_ends=None)
    return EpochHistory(tuple(records))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[EpochHistory, dict[SegmentId, int]]:
    history = draw(histories())
    ends = {}
    for segment in history.segments():
        end = history.sealed_end(segment)
        ends[segment] = draw(st.integers(0, 4)) if end is None else end
    return history, ends


class Query:
    """Runs micro-batches and checks each against everything that was read before."""

    def __init__(self, history: EpochHistory, ends: dict[SegmentId, int]) -> None:
        self.history, self.ends = history, ends
        self.front = beginning(history)
        self.read: dict[SegmentId, int] = {}
        self.ancestors = {segment: history.graph.ancestors([segment]) for segment in history.segments()}

    def step(self, seen: EpochHistory, visible: dict[SegmentId, int], limit: int | None, chain_max: int | None) -> bool:
        end = advance(seen, self.front, visible, limit=limit, chain_max=chain_max)
        ranges = between(seen, self.front, end)
        assert ranges == between(self.history, self.front, end), "a batch that is run again later reads something else"
        tasks = chains(seen, self.front, ranges)
        assert Counter(item for task in tasks for item in task) == Counter(ranges)
        self._check_order(seen, tasks)
        total = sum(item.size for item in ranges)
        assert limit is None or total <= limit
        for item in ranges:
            assert item.start == self.read.get(item.segment, 0), "skipped, or read twice"
            self.read[item.segment] = item.end
        assert {k: v for k, v in covered(seen, end).items() if v} == {k: v for k, v in self.read.items() if v}
        self.front = end
        return total > 0

    def _check_order(self, seen: EpochHistory, tasks: list[list[OffsetRange]]) -> None:
        for task in tasks:
            done = dict(self.read)
            for item in task:
                for before in self.ancestors[item.segment]:
                    assert done.get(before, 0) == self.ends[before], f"{item.segment} is read before {before}"
                done[item.segment] = item.end


@given(worlds(), st.data())
def test_micro_batches_keep_order_leave_nothing_out_and_read_nothing_twice(
    world: tuple[EpochHistory, dict[SegmentId, int]], data: st.DataObject
) -> None:
    history, ends = world
    query = Query(history, ends)
    epochs, sealed = 1, True
    while (epochs, sealed) != (len(history.records), True):
        seen = as_seen(history, epochs, sealed)
        visible = {item: data.draw(st.integers(query.read.get(item, 0), ends[item])) for item in unsealed(seen)}
        query.step(seen, visible, data.draw(st.none() | st.integers(1, 5)), data.draw(st.none() | st.integers(0, 6)))
        if sealed:
            epochs, sealed = epochs + 1, data.draw(st.booleans())
        else:
            sealed = True
    limit, chain_max = data.draw(st.none() | st.integers(1, 5)), data.draw(st.none() | st.integers(0, 6))
    while query.step(history, ends, limit, chain_max):
        pass
    assert {k: v for k, v in query.read.items() if v} == {k: v for k, v in ends.items() if v}
    assert query.front.keys() == history.active.segment_ids
    assert advance(history, query.front, ends) == query.front


@given(worlds())
def test_without_bounds_one_plan_reads_everything(world: tuple[EpochHistory, dict[SegmentId, int]]) -> None:
    history, ends = world
    end = advance(history, beginning(history), ends, chain_max=None)
    assert {item.segment: item.end for item in between(history, beginning(history), end)} == {
        segment: size for segment, size in ends.items() if size
    }


@given(st.dictionaries(st.integers(0, 9).map(lambda n: SegmentId.of(n, 0)), st.integers(1, 99)), st.integers(1, 120))
def test_a_limit_is_used_up_exactly_and_every_segment_gets_something_while_it_lasts(
    backlog: dict[SegmentId, int], limit: int
) -> None:
    parts = share(backlog, limit)
    assert sum(parts.values()) == min(limit, sum(backlog.values()))
    assert all(1 <= size <= backlog[segment] for segment, size in parts.items())
    assert len(parts) == min(limit, len(backlog))
    assert share(backlog, None) == backlog


def sized(*sizes: int) -> list[OffsetRange]:
    return [OffsetRange(SegmentId.of(place, 0), 3, 3 + size) for place, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 12))
def test_pieces_of_a_chain_are_what_it_was_in_the_same_order(sizes: list[int], parts: int) -> None:
    chain = sized(*sizes)
    pieces = split(chain, parts)
    assert len(pieces) <= parts
    assert [(item.segment, offset) for piece in pieces for item in piece for offset in range(item.start, item.end)] == [
        (item.segment, offset) for item in chain for offset in range(item.start, item.end)
    ]
    step = -(-sum(sizes) // parts)
    assert all(sum(item.size for item in piece) == step for piece in pieces[:-1])


def scaled(first: int) -> EpochHistory:
    """One segment of so many offsets, then two."""
    history = EpochHistory.create(even_ranges(1), 0)
    record = history.plan_scale([0], [KeyRange(0.0, 0.5), KeyRange(0.5, 1.0)], 1)
    return history.with_records(record).with_sealed_ends(1, {SegmentId.of(0, 0): first})


A, B, C = SegmentId.of(0, 0), SegmentId.of(1, 1), SegmentId.of(2, 1)


def test_behind_a_split_large_successors_wait_for_the_next_micro_batch() -> None:
    history, ends = scaled(5), {B: CHAIN_MAX + 1, C: CHAIN_MAX + 2}
    first = advance(history, {A: 0}, ends)
    assert first == {B: 0, C: 0}
    assert advance(history, first, ends) == ends
    assert chains(history, first, between(history, first, ends)) == [
        [OffsetRange(B, 0, CHAIN_MAX + 1)],
        [OffsetRange(C, 0, CHAIN_MAX + 2)],
    ]


def test_behind_a_split_one_large_successor_does_not_wait() -> None:
    history, ends = scaled(CHAIN_MAX + 1), {B: CHAIN_MAX, C: 2 * CHAIN_MAX}
    assert advance(history, {A: 0}, ends) == ends
    ends[B] += 1
    assert advance(history, {A: 0}, ends) == {B: 0, C: 0}


def test_a_line_of_large_segments_is_read_in_one_micro_batch() -> None:
    history = EpochHistory.create(even_ranges(1), 0)
    first, second = SegmentId.of(0, 0), SegmentId.of(1, 1)
    history = history.with_records(history.plan_scale([0], [KeyRange(0.0, 1.0)], 1))
    history = history.with_sealed_ends(1, {first: 2 * CHAIN_MAX})
    ends = {second: 3 * CHAIN_MAX}
    assert advance(history, {first: 0}, ends) == ends
    assert chains(history, {first: 0}, between(history, {first: 0}, ends)) == [
        [OffsetRange(first, 0, 2 * CHAIN_MAX), OffsetRange(second, 0, 3 * CHAIN_MAX)]
    ]


def joined(first: int, second: int) -> tuple[EpochHistory, list[SegmentId]]:
    """Two segments of so many offsets, then one."""
    history = EpochHistory.create(even_ranges(2), 0)
    left, right = sorted(history.active.segment_ids)
    history = history.with_records(history.plan_scale([left.number, right.number], [KeyRange(0.0, 1.0)], 1))
    return history.with_sealed_ends(1, {left: first, right: second}), [left, right]


def test_behind_a_merge_a_successor_waits_while_it_would_take_the_parallel_reads_away() -> None:
    history, before = joined(CHAIN_MAX + 1, 2 * CHAIN_MAX)
    [after] = history.active.segment_ids
    start = dict.fromkeys(before, 0)
    assert advance(history, start, {after: 9}) == {after: 0}
    history, before = joined(CHAIN_MAX, 2 * CHAIN_MAX)
    assert advance(history, start, {after: 9}) == {after: 9}
    assert len(chains(history, start, between(history, start, {after: 9}))) == 1


def test_behind_a_split_one_task_reads_small_successors_as_well() -> None:
    history, ends = scaled(5), {B: 10, C: 10}
    assert advance(history, {A: 2}, ends) == ends
    assert chains(history, {A: 2}, between(history, {A: 2}, ends)) == [
        [OffsetRange(A, 2, 5), OffsetRange(B, 0, 10), OffsetRange(C, 0, 10)]
    ]


def test_a_segment_that_is_being_sealed_is_read_and_its_successors_are_not() -> None:
    history = scaled(5)
    history = EpochHistory((history.records[0], replace(history.records[1], sealed_ends=None)))
    assert set(unsealed(history)) == {A, B, C}
    assert advance(history, {A: 0}, {A: 4, B: 10, C: 10}) == {A: 4}
    with pytest.raises(CorruptDataError, match="its end is not known"):
        covered(history, {B: 0})


def test_what_was_deleted_is_told_and_the_rest_is_read() -> None:
    ranges = [OffsetRange(A, 2, 5), OffsetRange(B, 0, 10), OffsetRange(C, 0, 10)]
    left, lost = without_lost(ranges, {B: 4, C: 0}, [A], {B: 10, C: 7})
    assert left == [OffsetRange(B, 4, 10), OffsetRange(C, 0, 7)]
    assert lost == [
        f"offsets 2 to 4 of segment {A} have been deleted",
        f"offsets 0 to 3 of segment {B} have been deleted",
        f"segment {C} has become shorter: it ends at 7, and was read or to be read up to 10",
    ]


def test_a_front_behind_the_end_of_a_log_is_told_and_reading_goes_on_at_the_end() -> None:
    assert without_beyond({B: 3, C: 4}, {B: 3, C: 9}) == ({B: 3, C: 4}, [])
    assert without_beyond({B: 3, C: 4}, {}) == ({B: 3, C: 4}, [])
    front, lost = without_beyond({B: 3, C: 4}, {B: 3, C: 2})
    assert front == {B: 3, C: 2}
    assert lost == [f"segment {C} has become shorter: it ends at 2, and was read or to be read up to 4"]


def test_ends_of_other_epochs_are_no_plan_to_read_nothing() -> None:
    with pytest.raises(CorruptDataError, match=f"the end of segment {A} was not looked up"):
        advance(EpochHistory(scaled(5).records[:1]), {A: 0}, {B: 10, C: 10})


def test_behind_segments_that_nobody_knows_any_more_reading_goes_on_with_what_is_left() -> None:
    gone = SegmentId.of(7, 7)
    assert without_unknown(scaled(5), {B: 3, C: 4}) == ({B: 3, C: 4}, [])
    front, lost = without_unknown(scaled(5), {B: 3, gone: 4})
    assert front == {B: 3, C: 0}
    assert lost == [f"segments {gone} have been removed, with whatever was still to be read of them"]
