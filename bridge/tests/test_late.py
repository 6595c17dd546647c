"""Late records: what is remembered of them, and where they go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import SegmentId
from rollbridge.errors import CorruptDataError
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange, KeySpace
from rollbridge.stream.late import Forwarding, LateNotes, LateSegment, heir_of, origin

S0 = SegmentId.of(0, 0)
ids = st.builds(SegmentId.of, st.integers(0, 99), st.integers(0, 99))
offsets = st.integers(0, 1 << 40)
notes = st.builds(
    LateNotes,
    st.dictionaries(ids, st.builds(LateSegment, offsets, offsets, offsets, st.text(max_size=9)), max_size=3),
    st.none() | st.builds(Forwarding, ids, offsets, offsets, st.dictionaries(ids, offsets, max_size=3)),
)


@given(notes)
def test_notes_round_trip(item: LateNotes) -> None:
    assert LateNotes.from_json(item.to_json()) == item


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"segments": [{}]}', b'{"segments": 1}'])
def test_what_is_no_note_is_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptDataError):
        LateNotes.from_json(raw)


def test_what_is_settled_is_counted_and_never_goes_back() -> None:
    begun = LateNotes({}, Forwarding(S0, 7, 9, {S0: 1}))
    once = begun.settled(S0, 9, forwarded=2)
    twice = once.settled(S0, 8, refused=1, reason="INVALID_TIMESTAMP")
    assert once.forwarding is None
    assert twice.segments == {S0: LateSegment(9, 2, 1, "INVALID_TIMESTAMP")}
    assert (twice.looked_to(S0, 5), twice.looked_to(S0, 12), begun.looked_to(S0, 5)) == (9, 12, 5)


@given(st.none() | st.binary(max_size=8))
def test_a_late_record_goes_to_the_active_segment_of_its_key(key: bytes | None) -> None:
    history = EpochHistory.create([KeyRange(0.0, 0.5), KeyRange(0.5, 1.0)], 0)
    for seal, ranges in (([0], [KeyRange(0.0, 0.25), KeyRange(0.25, 0.5)]), ([2], [KeyRange(0.0, 0.25)])):
        history = history.with_records(history.plan_scale(seal, ranges, 0))
    heir = heir_of(history, KeySpace(), S0, key)
    position = 0.0 if key is None else KeySpace().position(key)
    expected = history.active.segment_at(position if position < 0.5 else 0.0).id
    assert heir == expected
    assert heir in history.active.segment_ids


def test_a_copy_names_its_original_by_topic_and_by_partition_beyond_the_first() -> None:
    assert origin(("sales.orders.segment-0.epoch-0", 0), 7) == b"sales.orders.segment-0.epoch-0@7"
    assert origin(("orders", 3), 7) == b"orders:3@7"
