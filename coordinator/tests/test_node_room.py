"""What leaders write to ZooKeeper fits into it, by construction: sizes are those of the codecs that write it."""

from __future__ import annotations

import uuid
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.tests.makers import Bench, varied
from rollbridge.base.ids import EPOCH_MAX, PART_MAX, SEGMENT_NUMBER_MAX, Epoch, SegmentId, TransactionId
from rollbridge.buffer.frames import STREAMS_MAX
from rollbridge.errors import InvalidRequestError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import ID_BYTES, NODE_BYTES, CommittingTransactions, EpochTransition, Roll
from rollbridge.metadata.records import (
    SEGMENTS_MAX,
    CreateNode,
    Mark,
    RetentionMarks,
    Truncation,
    bytes_of,
    bytes_of_epoch,
    check_segments,
)
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.epochs import EpochCause, EpochHistory, EpochRecord
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.stream.late import NOTED_MAX, LateNotes
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.segment_graph import Segment
from rollbridge_coordinator.commit.plan import ROLL_BYTES_MAX, RollingRound, plan_round
from rollbridge_coordinator.core.bookkeeping import marks_that_fit
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.streams.retention import REMOVED_BYTES

LONG_MAX = (1 << 63) - 1
ZOOKEEPER_BYTES = 1024 * 1024
"""``jute.maxbuffer``, and so a whole multi."""
NAME = StreamName("s" * 100, "t" * 100)
ORDERS = "sales/orders"
bounds = st.floats(0.0, 1.0, allow_subnormal=False) | st.just(0.12345678901234568) | st.just(2.2250738585072014e-300)


def largest_id(place: int) -> SegmentId:
    return SegmentId.of(SEGMENT_NUMBER_MAX - place, EPOCH_MAX)


@given(st.lists(bounds, max_size=30), st.integers(0, 30))
@settings(deadline=None, max_examples=50)
def test_an_epoch_record_is_not_larger_than_is_counted(lows: list[float], ends: int) -> None:
    edges = [*sorted({0.0, *lows} - {1.0}), 1.0]
    segments = tuple(Segment(largest_id(place), KeyRange(*item)) for place, item in enumerate(pairwise(edges)))
    closed = {largest_id(place): LONG_MAX for place in range(ends)}
    record = EpochRecord(
        Epoch(EPOCH_MAX), Epoch(EPOCH_MAX), segments, EpochCause.ROLLING_TRANSACTIONS, LONG_MAX, closed
    )
    written = bytes_of(CreateNode(paths.epoch(NAME, EPOCH_MAX), record.to_json()))
    assert written <= bytes_of_epoch(len(segments), ends)


def test_no_stream_that_can_be_made_has_more_segments_than_a_rolling_commit_can_publish() -> None:
    assert bytes_of_epoch(SEGMENTS_MAX, SEGMENTS_MAX) + bytes_of_epoch(SEGMENTS_MAX, 0) <= ROLL_BYTES_MAX
    ranges = tuple(KeyRange(place / SEGMENTS_MAX, (place + 1) / SEGMENTS_MAX) for place in range(SEGMENTS_MAX))
    numbers = tuple(SEGMENT_NUMBER_MAX - place for place in range(SEGMENTS_MAX))
    scaling = EpochTransition(NAME, "request-1234567890", EPOCH_MAX, numbers, ranges, LONG_MAX, EPOCH_MAX)
    assert len(scaling.to_json()) < ZOOKEEPER_BYTES / 2
    pairs = tuple((item.low, item.high) for item in ranges)
    request = AdminRequest(
        kind=RequestKind.SCALE_STREAM, stream=str(NAME), ranges=pairs, seal=numbers, created_ms=LONG_MAX
    )
    assert len(request.to_json()) < ZOOKEEPER_BYTES / 2


def test_more_segments_are_refused_unless_a_stream_has_them_already() -> None:
    check_segments(NAME, SEGMENTS_MAX)
    with pytest.raises(InvalidRequestError, match=f"3001 active segments, and {SEGMENTS_MAX} are possible"):
        check_segments(NAME, SEGMENTS_MAX + 1)
    check_segments(NAME, 4_000, 4_001)
    with pytest.raises(InvalidRequestError, match="nothing was changed; ask for fewer"):
        check_segments(NAME, 4_001, 4_000)


@given(st.lists(st.text("abc", min_size=3, max_size=240), max_size=STREAMS_MAX, unique=True), st.data())
@settings(deadline=None, max_examples=20)
def test_a_rolling_commit_names_as_many_transactions_as_a_node_takes(names: list[str], data: st.DataObject) -> None:
    bytes_max = data.draw(st.integers(0, 900_000))
    numbers = tuple(SEGMENT_NUMBER_MAX - place for place in range(data.draw(st.integers(0, 30))))
    prepared = {number: largest_id(number) for number in numbers[: data.draw(st.integers(0, 3))]}
    rolls = tuple(Roll(name, EPOCH_MAX, EPOCH_MAX, EPOCH_MAX, EPOCH_MAX, numbers, prepared) for name in names)
    count = max((bytes_max - NODE_BYTES - sum(roll.node_bytes for roll in rolls)) // ID_BYTES, 1)
    identifier = TransactionId.parse(str(uuid.UUID(int=(1 << 128) - 1)).replace("ffff-ffff-ffff", "0000-ffff-ffff", 1))
    node = CommittingTransactions((identifier,) * count, rolls, LONG_MAX, EPOCH_MAX, (PART_MAX,) * count)
    size = bytes_of(CreateNode(paths.committing(GroupName("s" * 100, "g" * 100)), node.to_json()))
    assert size <= bytes_max or count == 1
    most = Roll("s" * 249, EPOCH_MAX, EPOCH_MAX, EPOCH_MAX, EPOCH_MAX, (SEGMENT_NUMBER_MAX,)).node_bytes * STREAMS_MAX
    assert (LeaderSettings().write_bytes_max - most) // ID_BYTES > 2_000


def test_those_that_do_not_fit_beside_it_are_planned_with_the_next_rolling_commit() -> None:
    most = 3
    bench = Bench(
        {ORDERS: 1}, varied(LeaderSettings(), write_bytes_max=1_000 + 170 + 60 + 12 + 2 * len(ORDERS) + 52 * most)
    )
    found = [bench.begin(ORDERS, client=f"c{number}") for number in range(5)]
    bench.scale(ORDERS, [0], [(0.0, 0.5), (0.5, 1.0)])
    for identifier in found:
        bench.data(identifier, ORDERS, 0)
        bench.commit(identifier, {(0, 0): 1})
    planned = plan_round(bench.group)
    assert isinstance(planned, RollingRound)
    assert [item.transaction_id for item in planned.transactions] == found[:most]


def test_a_transaction_that_wrote_to_more_segments_than_a_node_names_rolls_the_whole_stream() -> None:
    bench = Bench(
        {ORDERS: 50}, varied(LeaderSettings(), write_bytes_max=1_000 + 170 + 2 * len(ORDERS) + 60 + 52 + 12 * 20)
    )
    few, many = bench.begin(ORDERS, client="a"), bench.begin(ORDERS, client="b")
    bench.scale(ORDERS, range(50), [(0.0, 1.0)])
    for identifier, numbers in ((few, range(20)), (many, range(20, 41))):
        for number in numbers:
            bench.data(identifier, ORDERS, number)
        bench.commit(identifier, {(0, number): 1 for number in numbers})
    planned = plan_round(bench.group)
    assert isinstance(planned, RollingRound)
    assert [item.transaction_id for item in planned.transactions] == [few]
    assert planned.rolls == (Roll(ORDERS, 0, 1, 2, 3, tuple(range(20))),)
    bench.group.fold.settle(few.bytes)
    assert plan_round(bench.group) == RollingRound((bench.group.fold.open[many.bytes],), (Roll(ORDERS, 0, 1, 2, 3),))


def test_a_truncation_node_grows_by_no_more_than_is_counted_for_each_segment() -> None:
    removed = frozenset(largest_id(place) for place in range(1_000))
    assert len(Truncation(removed, removed).to_json()) <= len(Truncation().to_json()) + 1_000 * REMOVED_BYTES


@given(st.integers(1, 60), st.integers(1, 40), st.integers(500, 50_000))
@settings(deadline=None, max_examples=30)
def test_marks_that_do_not_fit_are_thinned_out_and_nothing_is_deleted_sooner(
    count: int, segments: int, bytes_max: int
) -> None:
    marks = [Mark(ms, ms, {largest_id(place): LONG_MAX for place in range(segments)}) for ms in range(count)]
    kept = marks_that_fit(marks, bytes_max)
    assert set(map(id, kept)) <= set(map(id, marks))
    assert kept[-1] is marks[-1]
    assert len(RetentionMarks(tuple(kept)).to_json()) <= bytes_max or len(kept) == 1
    assert kept == marks or len(RetentionMarks(tuple(marks)).to_json()) > bytes_max
    assert RetentionMarks.from_json(RetentionMarks(tuple(kept)).to_json()).marks == tuple(kept)


def test_of_late_records_is_remembered_what_fits_the_newest_first() -> None:
    notes = LateNotes()
    for place in range(NOTED_MAX + 10):
        known = notes.settled(SegmentId.of(0, place), LONG_MAX, forwarded=1, reason="x" * 1_000)
        notes = replace(notes, segments=known.segments)
    history = EpochHistory.create(even_ranges(1), 0)
    kept = notes.without(history)
    assert len(kept.segments) == NOTED_MAX
    assert max(item.epoch for item in kept.segments) == NOTED_MAX + 9
    assert len(kept.to_json()) < ZOOKEEPER_BYTES
