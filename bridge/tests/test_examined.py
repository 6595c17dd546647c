"""What is known of a segment's end: against the log itself, however it was looked at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.kafka.segment_tail import Examined, Seen
from rollbridge.model.sn import DLSN, SN

KEYS = [b"a", b"b", b"c", b"d"]


def seen(log: list[bytes | None], start: int, end: int) -> list[Seen]:
    return [
        Seen(place, key, SN(DLSN(0, 0, place), 100 + place if key == b"a" else None, place))
        for place, key in enumerate(log[start:end], start)
        if key is not None
    ]


@given(st.lists(st.sampled_from([None, *KEYS]), max_size=20), st.integers(1, 4), st.data())
def test_it_knows_what_the_log_says(log: list[bytes | None], keys_max: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(log)))
    known = Examined(start, keys_max)
    while known.end < len(log):
        if known.last_from and data.draw(st.booleans()):
            earlier = data.draw(st.integers(0, known.last_from))
            known.prepend(earlier, seen(log, earlier, known.last_from))
        end = data.draw(st.integers(known.end + 1, len(log)))
        known.extend(known.end, end, seen(log, known.end, end))
        records = seen(log, known.last_from, known.end)
        assert known.last == (records[-1].sn if records else None)
        ids = [record.sn.transaction_id for record in records if record.sn.transaction_id is not None]
        assert known.last_id == (ids[-1] if ids else None)
        assert known.last_from <= known.keys_from <= known.end or known.keys_from == known.last_from
        for key in KEYS:
            of_key = [record.sn for record in seen(log, known.keys_from, known.end) if record.key == key]
            assert known.last_of(key) == (of_key[-1] if of_key else None)


@pytest.mark.parametrize("before", [[], [Seen(1, b"a", SN(DLSN(0, 0, 1), 101, 1))]])
def test_what_was_truncated_behind_the_window_begins_it_anew(before: list[Seen]) -> None:
    known = Examined(0)
    known.extend(0, 2, before)
    known.extend(7, 9, [])
    assert (known.last_from, known.keys_from, known.end) == (7, 7, 9)
    assert (known.last, known.last_id, known.last_of(b"a")) == (None, None, None)
