"""Epoch histories: what any sequence of scales and rolling commits keeps true, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bridge.tests.refusals import raises_code
from bridge.tests.strategies import histories, partitions
from rollbridge.base.ids import Epoch, SegmentId
from rollbridge.errors import InvalidRequestError
from rollbridge.stream.epochs import EpochCause, EpochHistory, EpochRecord, check_chain
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.stream.segment_graph import Segment

positions = st.floats(0.0, 1.0, exclude_max=True)


@given(histories())
def test_a_sound_history_has_no_faults(history: EpochHistory) -> None:
    assert check_chain(history.records) == []


@given(histories(), positions)
def test_a_position_lies_in_exactly_one_segment_of_each_epoch(history: EpochHistory, position: float) -> None:
    for record in history.records:
        holders = [item for item in record.segments if position in item.range]
        assert holders == [record.segment_at(position)]


def connected(history: EpochHistory, epoch: int, numbers: set[int]) -> tuple[set[SegmentId], set[int]]:
    """What of the active epoch, and which numbers of another one, share keys with each other and with some segments."""
    former, active = set(numbers), set[SegmentId]()
    while True:
        known = len(former) + len(active)
        for one in history.record(epoch).segments:
            for other in history.active.segments:
                if one.range.overlaps(other.range) and (one.id.number in former or other.id in active):
                    former.add(one.id.number)
                    active.add(other.id)
        if len(former) + len(active) == known:
            return active, former


@given(histories(), st.data())
def test_a_roll_replaces_what_shares_keys_with_what_was_written_to_and_nothing_else(
    history: EpochHistory, data: st.DataObject
) -> None:
    roots = {record.reference_epoch for record in history.records} - {history.active.reference_epoch}
    assume(roots)
    epoch = data.draw(st.sampled_from(sorted(roots)))
    replaced = sorted(history.record(epoch).numbers - history.active.numbers)
    assume(replaced)  # all of an epoch may be active again
    numbers = data.draw(st.sets(st.sampled_from(replaced), min_size=1))
    first, second = history.plan_rolling(epoch, 1, numbers)
    grown = history.with_records(first, second)
    ended, former = connected(history, epoch, numbers)
    assert {item.id for item in grown.ended_with(first.epoch)} == ended
    assert {item.id for item in grown.began_with(first.epoch)} == {SegmentId.of(item, first.epoch) for item in former}
    assert grown.ended_with(second.epoch) == grown.began_with(first.epoch)
    assert {item.id for item in grown.began_with(second.epoch)} == {
        SegmentId.of(item.number, second.epoch) for item in ended
    }
    kept = [item for item in history.active.segments if item.id not in ended]
    for record in (first, second):
        assert set(kept) <= set(record.segments), "they go on under their own ids"
    assert check_chain(grown.records) == []
    for item in kept:
        assert grown.graph.node(item.id).is_active


@given(histories(), st.data())
def test_segments_that_are_active_need_no_roll(history: EpochHistory, data: st.DataObject) -> None:
    roots = sorted({record.reference_epoch for record in history.records})
    epoch = data.draw(st.sampled_from(roots))
    numbers = sorted(history.record(epoch).numbers & history.active.numbers)
    assume(numbers)
    with pytest.raises(InvalidRequestError, match="merge into the active epoch directly"):
        history.plan_rolling(epoch, 1, data.draw(st.lists(st.sampled_from(numbers), min_size=1)))


@given(histories(), st.data())
def test_filling_in_the_same_sealed_ends_again_changes_nothing(history: EpochHistory, data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(history.records))
    assert history.with_sealed_ends(record.epoch, dict(record.sealed_ends or {})) == history


@given(partitions())
def test_a_new_stream_numbers_its_segments_in_the_order_of_their_ranges(ranges: list[KeyRange]) -> None:
    history = EpochHistory.create(list(reversed(ranges)), 7)
    assert [(item.id, item.range) for item in history.active.segments] == [
        (SegmentId.of(number, 0), item) for number, item in enumerate(ranges)
    ]
    assert history.active.sealed_ends == {}
    assert history.active.created_ms == 7


FOUR = EpochHistory.create(even_ranges(4), 0)


@pytest.mark.parametrize(
    ("seal", "ranges", "words"),
    [
        ([], [(0.0, 1.0)], "no segment to seal was named"),
        ([4], [(0.0, 1.0)], r"not active: 4; active in epoch 0 are 0, 1, 2, 3"),
        ([0, 9, 7], [(0.0, 0.25)], r"not active: 7, 9;"),
        ([-1], [(0.0, 0.25)], r"not active: -1;"),
        ([0], [], "no key range was given"),
        ([0], [(0.0, 0.2)], r"cover \[0, 0.2\) but must cover exactly \[0, 0.25\)"),
        ([0], [(0.0, 0.5)], r"cover \[0, 0.5\) but must cover exactly \[0, 0.25\)"),
        ([0, 2], [(0.0, 0.25), (0.25, 0.5)], r"must cover exactly \[0, 0.25\) and \[0.5, 0.75\)"),
        ([0, 1], [(0.0, 0.3), (0.2, 0.5)], "overlap"),
    ],
)
def test_a_scale_that_can_not_be_is_refused(seal: list[int], ranges: list[tuple[float, float]], words: str) -> None:
    with raises_code("invalid-ranges", match=words):
        FOUR.plan_scale(seal, [KeyRange(low, high) for low, high in ranges], 1)


@pytest.mark.parametrize("epoch", [-1, 1, 65_536])
def test_an_epoch_that_never_was_is_refused(epoch: int) -> None:
    with pytest.raises(InvalidRequestError, match="is not in the history, which ends at 0"):
        FOUR.record(epoch)
    with pytest.raises(InvalidRequestError):
        FOUR.plan_rolling(epoch, 1)


def test_a_number_that_an_epoch_lacks_is_a_key_error() -> None:
    assert FOUR.active.segment_numbered(3).range == KeyRange(0.75, 1.0)
    with pytest.raises(KeyError):
        FOUR.active.segment_numbered(4)


def epoch_record(epoch: int, reference: int, numbers: list[int] | None = None) -> EpochRecord:
    chosen = [0] if numbers is None else numbers
    ranges = even_ranges(len(chosen))
    segments = [Segment(SegmentId.of(number, epoch), item) for number, item in zip(chosen, ranges, strict=True)]
    return EpochRecord(Epoch(epoch), Epoch(reference), tuple(segments), EpochCause.SCALE, 0)


def test_an_epoch_with_a_number_twice_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="epoch 3 holds a segment number twice"):
        epoch_record(3, 3, [1, 1])


def test_an_epoch_that_does_not_partition_the_key_space_is_refused() -> None:
    with raises_code("invalid-ranges"):
        replace(epoch_record(3, 3, [1, 2]), segments=epoch_record(3, 3, [1, 2]).segments[:1])


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "holds at least epoch 0"),
        ([(1, 1)], "epoch 1 is at index 0"),
        ([(0, 0), (2, 0)], "epoch 2 is at index 1"),
        ([(0, 1)], "epoch 0 refers to 1"),
        ([(0, -1)], "epoch 0 refers to -1"),
        ([(0, 0), (1, 2), (2, 2)], "epoch 1 refers to 2"),
        ([(0, 0), (1, 0), (2, 1)], "epoch 2 refers to 1, which is not a root epoch"),
    ],
)
def test_records_that_are_no_history_are_refused(records: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        EpochHistory(tuple(epoch_record(epoch, reference) for epoch, reference in records))


SOUND = FOUR.with_records(FOUR.plan_scale([0], [KeyRange(0.0, 0.25)], 1))
SOUND = SOUND.with_sealed_ends(1, {SegmentId.of(0, 0): 3})
SOUND = SOUND.with_records(*SOUND.plan_rolling(0, 2))


def changed(epoch: int, **changes: object) -> list[EpochRecord]:
    records = list(SOUND.records)
    records[epoch] = replace(records[epoch], **changes)  # type: ignore[arg-type]
    return records


def renamed(epoch: int, place: int, segment: SegmentId) -> list[EpochRecord]:
    segments = list(SOUND.record(epoch).segments)
    segments[place] = replace(segments[place], id=segment)
    return changed(epoch, segments=tuple(segments))


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([SOUND.records[0], SOUND.records[2]], "epoch 2 found in place of epoch 1"),
        ([SOUND.records[1]], "epoch 1 found in place of epoch 0"),
        (changed(1, cause=EpochCause.CREATE), "epoch 1 has the cause create"),
        (changed(0, cause=EpochCause.SCALE), "epoch 0 has the cause scale"),
        (changed(1, reference_epoch=0), "epoch 1 was made by scale but refers to epoch 0"),
        (changed(3, reference_epoch=2), "epoch 3 refers to 2, which is not an earlier root epoch"),
        (changed(2, reference_epoch=2), "epoch 2 refers to 2, which is not an earlier root epoch"),
        (changed(3, reference_epoch=3, segments=SOUND.record(0).segments), "epoch 3 is not a duplicate of epoch 1"),
        (changed(3, reference_epoch=9), "epoch 3 refers to 9, which is not an earlier root epoch"),
        (changed(3, reference_epoch=0), "epoch 3 is not a duplicate of epoch 0, to which it refers"),
        (renamed(1, 0, SegmentId.of(9, 0)), "segment 9.#epoch.0 begins in epoch 1"),
        (renamed(1, 0, SegmentId.of(9, 7)), "segment 9.#epoch.7 begins in epoch 1"),
        (renamed(2, 0, SegmentId.of(4, 2)), "epoch 2 is not a duplicate of epoch 0"),
        (
            changed(1, sealed_ends={SegmentId.of(1, 0): 3}),
            "epoch 1 notes ends of 1.#epoch.0, but 0.#epoch.0 ended with it",
        ),
        (changed(1, sealed_ends={}), "epoch 1 notes ends of none, but 0.#epoch.0 ended with it"),
    ],
)
def test_what_is_wrong_with_a_chain_is_named(records: list[EpochRecord], words: str) -> None:
    assert any(words in fault for fault in check_chain(records)), check_chain(records)


def test_a_number_that_changes_its_range_is_named() -> None:
    halves = EpochHistory.create(even_ranges(2), 0)
    moved = halves.plan_scale([0, 1], [KeyRange(0.0, 0.25), KeyRange(0.25, 1.0)], 1)
    segments = tuple(replace(item, id=SegmentId.of(place, 1)) for place, item in enumerate(moved.segments))
    faults = check_chain([*halves.records, replace(moved, segments=segments)])
    assert faults == [
        "segment 0.#epoch.1 of epoch 1 holds [0, 0.25), its number held [0, 0.5)",
        "segment 1.#epoch.1 of epoch 1 holds [0.25, 1), its number held [0.5, 1)",
    ]


def test_an_old_root_is_followed_by_the_next_epoch_that_is_active_again() -> None:
    history = SOUND.before(2)
    duplicate, again = history.plan_rolling(0, 1_001)
    assert history.renewed(again, 1_001) == again, "the root was made at 1"
    fresh = history.renewed(again, 1_000)
    assert fresh == replace(again, reference_epoch=Epoch(3))
    rolled = history.with_records(duplicate, fresh)
    assert check_chain(rolled.records) == []
    assert rolled.reference == fresh
    assert rolled.reference.numbers == history.reference.numbers, "who began against the old root is merged directly"
    with pytest.raises(InvalidRequestError, match="directly"):
        rolled.plan_rolling(1, 2_000)
