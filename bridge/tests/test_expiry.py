"""Histories whose first epochs were dropped: they answer as the whole ones for everything that still lives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import histories
from rollbridge.base.ids import Epoch, SegmentId
from rollbridge.base.sn import ANY, DLSN, EMPTY, SN
from rollbridge.cli.stream import history_table
from rollbridge.errors import ConflictError, CorruptDataError, InvalidRequestError, TruncatedError
from rollbridge.kafka.queues import Lane
from rollbridge.metadata.records import Truncation
from rollbridge.stream.conditions import place_of
from rollbridge.stream.epochs import (
    EpochCause,
    EpochHistory,
    EpochRecord,
    TruncatedHistory,
    check_chain,
    without_epochs,
)
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.stream.picture import lineage_svg
from rollbridge.stream.reading import KeyLineage, ReadingPlan, Reset, decide, wanted
from rollbridge.stream.truncation import (
    EPOCHS_AT_ONCE,
    SEGMENTS_AT_ONCE,
    consistent,
    first_needed,
    floors_of,
    frontier,
    removable,
    step_towards,
)
from rollbridge.writer.segments import StreamQueues

LONG_AGO = 1_000_000
"""Later than every epoch of a drawn history, so that none is kept for what clients may not have heard."""


@st.composite
def truncated(draw: st.DrawFn) -> EpochHistory:
    """A whole history, truncated at the beginning of some epoch, mostly one of the last."""
    history = draw(histories(steps_max=9))
    epoch = max(history.active.epoch - draw(st.integers(0, 4)), 0)
    floors = floors_of(history, dict.fromkeys(history.record(epoch).segment_ids, 0))
    return history.with_removed(removable(history, floors))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[EpochHistory, EpochHistory]:
    """A whole history, and the same without what nobody needs."""
    whole = draw(truncated())
    return whole, without_epochs(whole, first_needed(whole, since_ms=LONG_AGO))


def positions(history: EpochHistory) -> list[float]:
    """One position out of each cell of the key space that no range divides."""
    return sorted({item.range.low for record in history.records for item in record.segments})


def last_on(stream_queues: KeyLineage, since: int | None) -> SN:
    """What a look for a key finds that was never written to what is left: EMPTY, or ANY if it may have been removed."""
    for stage in stream_queues.stages:
        end = stage.end or 0
        if stage.removed and (0 if since is None else min(max(since + 1 - stage.base, 0), end)) < end:
            return ANY
        if since is not None and since >= stage.base:
            return EMPTY
    return ANY if stream_queues.dropped_end > (0 if since is None else since + 1) else EMPTY


@given(pairs())
def test_what_lives_has_the_numbers_that_it_had(pair: tuple[EpochHistory, EpochHistory]) -> None:
    whole, kept = pair
    assert kept.records == whole.records[kept.first :]
    assert (kept.active, kept.reference, kept.next_epoch) == (whole.active, whole.reference, whole.next_epoch)
    assert kept.created_ms == whole.created_ms
    assert sorted(kept.stored()) == sorted(whole.stored()), "nothing that has records left is dropped"
    bases = whole.graph.sequence_bases
    assert kept.graph.sequence_bases == {item: bases[item] for item in kept.segments()}
    for segment in kept.segments():
        assert kept.sealed_end(segment) == whole.sealed_end(segment)
        assert kept.graph.successors(segment) == whole.graph.successors(segment)
        assert kept.is_removed(segment) == whole.is_removed(segment)
        assert not kept.is_dropped(segment)
    for segment in whole.segments().keys() - kept.segments().keys():
        assert kept.is_dropped(segment)
        assert kept.is_removed(segment)
        assert whole.is_removed(segment)
    assert check_chain(kept.records, kept.first) == []


@given(pairs())
def test_what_a_key_can_have_met_is_what_it_was(pair: tuple[EpochHistory, EpochHistory]) -> None:
    whole, kept = pair
    for position in positions(whole):
        before, after = KeyLineage(whole, position), KeyLineage(kept, position)
        assert after.stages == before.stages[: len(after.stages)]
        assert (after.active, after.active_base) == (before.active, before.active_base)
        assert [after.base(item) for item in kept.segments()] == [before.base(item) for item in kept.segments()]
        for since in (None, *range(-1, before.active_base + 2)):
            assert last_on(after, since) == last_on(before, since), (position, since)


@given(pairs(), st.data())
def test_a_record_that_was_dropped_is_still_known_by_its_sequence_id(
    pair: tuple[EpochHistory, EpochHistory], data: st.DataObject
) -> None:
    whole, kept = pair
    position = data.draw(st.sampled_from(positions(whole)))
    before, after = KeyLineage(whole, position), KeyLineage(kept, position)
    stage = data.draw(st.sampled_from(before.stages))
    sn = SN(DLSN.of(stage.segment, 1), None, stage.base + 1)
    assert place_of(sn, after) == place_of(sn, before)
    if kept.is_dropped(stage.segment):
        assert place_of(SN(sn.dlsn), after) is None


@given(pairs(), st.data())
def test_a_group_may_read_what_it_may_have_read(pair: tuple[EpochHistory, EpochHistory], data: st.DataObject) -> None:
    whole, kept = pair
    chosen = data.draw(st.sets(st.sampled_from(list(kept.segments()))))
    committed = {item: data.draw(st.integers(0, kept.sealed_end(item) or 3)) for item in sorted(chosen)}
    for reset in Reset:
        before, after = decide(whole, committed, reset), decide(kept, committed, reset)
        assert after == {item: before[item] for item in after}
        assert wanted(kept, committed, after) == wanted(whole, committed, before)


@given(pairs(), st.data())
def test_a_reader_goes_on_where_it_would_have(pair: tuple[EpochHistory, EpochHistory], data: st.DataObject) -> None:
    whole, kept = pair
    floor = {item: whole.sealed_end(item) or 0 for item in whole.removed}
    before = ReadingPlan(whole, floor=floor)
    after = ReadingPlan(kept, floor={item: floor[item] for item in kept.removed})
    assert after.readable() == before.readable()
    before.update(kept)
    assert before.readable() == after.readable()
    assert before.frontier() == after.frontier()
    start = after.frontier()
    assert ReadingPlan(kept, start=start).readable() == ReadingPlan(whole, start=start).readable()
    with pytest.raises(ConflictError):
        before.update(replace(whole, records=tuple(replace(item, created_ms=-1) for item in whole.records)))


@given(truncated())
def test_a_reader_whose_records_were_dropped_is_told(whole: EpochHistory) -> None:
    kept = without_epochs(whole, first_needed(whole, since_ms=LONG_AGO))
    plan = ReadingPlan(whole)
    unread = [item for item in plan.readable() if kept.is_dropped(item)]
    if unread:
        with pytest.raises(TruncatedError, match="its epoch dropped"):
            plan.update(kept)
    else:
        plan.update(kept)


@given(pairs(), st.data())
def test_truncation_goes_on(pair: tuple[EpochHistory, EpochHistory], data: st.DataObject) -> None:
    whole, kept = pair
    segment = data.draw(st.sampled_from(list(kept.segments())))
    offset = data.draw(st.integers(0, kept.sealed_end(segment) or 0))
    gone = data.draw(st.sampled_from(list(whole.segments())))
    cut = {segment: offset}
    before, after = (consistent(item, floors_of(item, cut)) for item in (whole, kept))
    # Those that nothing ties to each other may come in any order.
    assert sorted(removable(kept, after)) == sorted(removable(whole, before))
    assert frontier(kept, after) == frontier(whole, before)
    if kept.is_dropped(gone):
        assert floors_of(kept, {gone: 0}) == {}, "nothing is left there"
        assert floors_of(kept, {gone: 0, **cut}) == floors_of(kept, cut)
        with pytest.raises(InvalidRequestError, match="beyond its end"):
            floors_of(kept, {gone: -1})


@given(pairs())
def test_a_history_grows_as_the_whole_one_does(pair: tuple[EpochHistory, EpochHistory]) -> None:
    whole, kept = pair
    numbers = [item.id.number for item in whole.active.segments]
    assert kept.plan_scale(numbers, even_ranges(2), 99) == whole.plan_scale(numbers, even_ranges(2), 99)
    record = whole.plan_scale(numbers, even_ranges(2), 99)
    ends = {item.id: 1 for item in whole.active.segments}
    before, after = (item.with_records(record).with_sealed_ends(record.epoch, ends) for item in (whole, kept))
    assert after.records == before.records[kept.first :]
    assert after.before(record.epoch) == kept
    assert after.plan_rolling(whole.active.reference_epoch, 100) == before.plan_rolling(
        whole.active.reference_epoch, 100
    )
    assert after.is_later(kept)
    assert after.is_later(whole)
    assert not kept.is_later(after)
    everything = before.segments().keys() - before.active.segment_ids
    before, after = before.with_removed(everything), after.with_removed(everything)
    first = first_needed(after, since_ms=LONG_AGO)
    assert first == first_needed(before, since_ms=LONG_AGO) == record.epoch - 1 or record.epoch < 2
    assert without_epochs(after, first) == without_epochs(before, first), "in steps as at once"


@given(pairs())
def test_what_is_stored_is_what_was_meant(pair: tuple[EpochHistory, EpochHistory]) -> None:
    whole, kept = pair
    stored = Truncation.from_json(Truncation(kept.removed, frozenset(), kept.foundation).to_json())
    records = [EpochRecord.from_json(item.to_json()) for item in whole.records]
    assert stored.history_of(records) == kept, "also if the epochs were read before they were dropped"
    assert stored.history_of(records[kept.first :]) == kept
    known, left = whole.graph.partitions, kept.graph.partitions
    assert left == {segment: known[segment] for segment in left}, "partitions keep their numbers"
    if kept.first:
        assert stored.history_of(records[: kept.first]) is None
        with pytest.raises(InvalidRequestError):
            EpochHistory(kept.records, kept.removed)
        with pytest.raises(InvalidRequestError, match="which begins at"):
            kept.record(0)


@given(pairs())
def test_what_was_dropped_is_said_and_the_rest_is_shown(pair: tuple[EpochHistory, EpochHistory]) -> None:
    _, kept = pair
    picture, table = lineage_svg(kept, "orders"), history_table(kept)
    for segment in kept.segments():
        assert picture.count(f'id="segment-{segment.number}-{segment.epoch}"') == 1
        assert str(segment) in table
    assert ("dropped" in picture) == ("dropped" in table) == (kept.first > 0)


def grown(scales: int) -> EpochHistory:
    """Epochs 0 to ``scales`` of a stream with one segment and three records in each; one epoch in each millisecond."""
    history = EpochHistory.create([KeyRange(0.0, 1.0)], 0)
    for epoch in range(1, scales + 1):
        record = history.plan_scale([epoch - 1], [KeyRange(0.0, 1.0)], epoch)
        history = history.with_records(record).with_sealed_ends(epoch, {SegmentId.of(epoch - 1, epoch - 1): 3})
    return history


GROWN = grown(9)
REMOVED = GROWN.with_removed(SegmentId.of(item, item) for item in range(8))
"""Left are segments 8 and 9."""


def test_one_epoch_more_is_kept_than_has_anything_left() -> None:
    assert first_needed(REMOVED, since_ms=LONG_AGO) == 7
    assert first_needed(REMOVED, since_ms=LONG_AGO, topics_left=[SegmentId.of(0, 0)]) == 0
    kept = without_epochs(REMOVED, 7)
    assert kept.foundation == TruncatedHistory(Epoch(7), 0, (21,), (0.0,), (21,), partitions=(7,))
    assert kept.removed == {SegmentId.of(7, 7)}
    plan = ReadingPlan(kept, start={SegmentId.of(7, 7): 3})
    assert plan.readable() == {SegmentId.of(8, 8): 0}, "who stands at the end of the last one that is gone goes on"


@pytest.mark.parametrize(
    ("needs", "first"),
    [
        ({}, 7),
        ({"references": [8]}, 7),
        ({"references": [4, 6]}, 4),
        ({"references": [-3]}, 0),
        ({"named": [SegmentId.of(9, 9)]}, 7),
        ({"named": [SegmentId.of(5, 5), SegmentId.of(9, 9)]}, 5),
        ({"topics_left": [SegmentId.of(3, 3)]}, 2),
        ({"since_ms": 6}, 6),
        ({"since_ms": 2}, 2),
        ({"since_ms": -1}, 0),
        ({"since_ms": 2, "references": [4]}, 2),
    ],
)
def test_what_somebody_needs_is_kept(needs: dict[str, object], first: int) -> None:
    assert first_needed(REMOVED, **{"since_ms": LONG_AGO, **needs}) == first  # type: ignore[arg-type]
    kept = without_epochs(REMOVED, 1)
    assert first_needed(kept, **{"since_ms": LONG_AGO, **needs}) == max(first, 1)  # type: ignore[arg-type]


def test_the_reference_of_the_active_epoch_is_kept_however_many_rolling_commits_there_were() -> None:
    history = grown(2)
    for _ in range(5):
        duplicate, active = history.plan_rolling(1, 3)
        before = {item.id: 1 for item in history.active.segments}
        history = history.with_records(replace(duplicate, sealed_ends=before), active)
        history = history.with_sealed_ends(active.epoch, {item.id: 1 for item in duplicate.segments})
    history = history.with_removed(history.segments().keys() - history.active.segment_ids)
    assert history.active.cause is EpochCause.ROLLING_ACTIVE
    assert first_needed(history, since_ms=LONG_AGO) == 2
    kept = without_epochs(history, 2)
    assert kept.reference.epoch == 2
    assert kept.record(3).reference_epoch == 1, "a duplicate outlives the epoch to which it refers"
    assert check_chain(kept.records, 2) == []


def test_an_epoch_that_is_being_sealed_is_kept() -> None:
    pending = replace(REMOVED.records[4], sealed_ends=None)
    history = replace(REMOVED, records=(*REMOVED.records[:4], pending, *REMOVED.records[5:]))
    assert first_needed(history, since_ms=LONG_AGO) == 2


def test_segments_that_live_on_keep_their_base_and_hold_nothing_up() -> None:
    history = EpochHistory.create(even_ranges(2), 0)
    for epoch in range(1, 8):
        number = history.active.segment_at(0.9).id
        record = history.plan_scale([number.number], [KeyRange(0.5, 1.0)], epoch)
        history = history.with_records(record).with_sealed_ends(epoch, {number: 2})
    active = history.active.segment_ids
    kept = without_epochs(history.with_removed(history.segments().keys() - active), 6)
    assert SegmentId.of(0, 0) in kept.active.segment_ids
    assert kept.foundation == TruncatedHistory(Epoch(6), 0, (0, 12), (0.0, 0.5), (0, 12), partitions=(0, 7))
    assert kept.graph.predecessors(SegmentId.of(0, 0)) == {}
    assert kept.sealed_end(SegmentId.of(0, 0)) is None
    assert decide(kept, {}, Reset.ERROR)[SegmentId.of(0, 0)] == decide(history, {}, Reset.ERROR)[SegmentId.of(0, 0)]
    assert KeyLineage(kept, 0.1).dropped_end == 0, "where nothing was ever written, a first record can be expected"
    assert KeyLineage(kept, 0.9).dropped_end == 12


def test_a_plain_writer_goes_on_although_what_it_wrote_to_was_dropped() -> None:
    stream_queues: StreamQueues[Any] = StreamQueues(
        GROWN.before(4), lambda segment: (str(segment), 0), lambda _: Lane(), lambda batch, heirs: []
    )
    assert [item.id for item in stream_queues.active] == [SegmentId.of(3, 3)]
    stream_queues.adopt(without_epochs(REMOVED, 7))
    assert [item.id for item in stream_queues.queues()] == [SegmentId.of(9, 9)]


def test_steps_are_bounded() -> None:
    assert step_towards(REMOVED, 7) == 7
    many = grown(EPOCHS_AT_ONCE + 10)
    assert step_towards(many, EPOCHS_AT_ONCE + 5) == EPOCHS_AT_ONCE
    wide = EpochHistory.create(even_ranges(SEGMENTS_AT_ONCE // 2), 0)
    for epoch in range(1, 5):
        first = wide.active.segments[0]
        wide = wide.with_records(wide.plan_scale([first.id.number], [first.range], epoch))
        wide = wide.with_sealed_ends(epoch, {first.id: 1})
    assert step_towards(wide, 4) == 2


def test_a_foundation_that_makes_no_sense_is_refused() -> None:
    for arguments in (
        (0, 0, (1,)),
        (3, 0, (-1,)),
        (3, 0, (1,), (0.5,), (1,)),
        (3, 0, (1,), (0.0, 0.5), (1,)),
        (3, 0, (1,), (0.0, 0.5, 0.25), (1, 2, 3)),
        (3, 0, (1,), (0.0,), (-2,)),
        (3, 0, (1,), (0.0,), (0,), 0, 0, (-1,)),
        (3, 0, (1,), (0.0,), (0,), 0, 0, (4, 5)),
        (3, 0, (1, 1), (0.0,), (0,), 0, 0, (4, 4)),
    ):
        with pytest.raises(InvalidRequestError):
            TruncatedHistory(*arguments)
    with pytest.raises(InvalidRequestError, match="segment count does not match its predecessor"):
        EpochHistory(REMOVED.records[7:], foundation=TruncatedHistory(Epoch(7), 0, (1, 2)))
    with pytest.raises(CorruptDataError):
        Truncation.from_json(
            b'{"removed": [], "foundation": {"first_epoch": 0, "created_ms": 0, "bases": [], "lows": [], "ends": []}}'
        )
