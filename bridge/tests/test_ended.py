"""Ranges of ended transactions against a plain set of ids, their record, the horizon, and marks in the commit log."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.errors import CorruptDataError
from rollbridge.base.ids import ISSUED_MAX, TransactionId, counter_of
from rollbridge.commitlog import outcomes
from rollbridge.commitlog.outcomes import (
    EndedIds,
    EndedNumber,
    LogMark,
    counted_before,
    decode_ended,
    marks_to_keep,
    short_until_ms,
)
from rollbridge.stream.names import GroupName

GROUP = GroupName("sales")
HOUR_MS = 3_600_000


def id_of(count: int, number: int = 7, epoch: int = 0) -> bytes:
    return TransactionId.of(epoch, counter_of(number, count)).bytes


counts = st.integers(0, 60)
ids = st.builds(id_of, counts, st.sampled_from([0, 3, 7]))


@given(st.lists(ids, max_size=80), st.sets(ids, max_size=5))
def test_it_holds_what_was_added_and_nothing_else_also_when_read_again(added: list[bytes], living: set[bytes]) -> None:
    known = EndedIds()
    for item in added:
        known.add(item)
    everything = {id_of(count, number) for count in range(62) for number in (0, 3, 7)}
    assert {item for item in everything if item in known} == set(added)
    record = known.record(GROUP, "log", 4, 99, living)
    again = EndedIds.of(decode_ended(record.encode(), GROUP, "log", 99))
    assert {item for item in everything if item in again} == set(added) - living
    assert again.log_end == 99
    assert again.record(GROUP, "log", 4, 99, ()) == record


@given(st.lists(counts, max_size=60), st.integers(0, 61), st.sets(counts, max_size=5))
def test_below_the_horizon_everything_has_ended_but_what_is_open(
    added: list[int], horizon: int, living: set[int]
) -> None:
    known = EndedIds()
    for count in added:
        if count not in living:
            known.add(id_of(count))
    known.void(7, horizon, [id_of(count) for count in living])
    expected = {count for count in range(62) if (count in added or count < horizon) and count not in living}
    assert {count for count in range(62) if id_of(count) in known} == expected
    assert id_of(0, 8) not in known
    again = EndedIds.of(known.record(GROUP, "log", 4, 0, [id_of(count) for count in living]))
    assert {count for count in range(62) if id_of(count) in again} == expected
    for count in living:
        again.add(id_of(count))
    assert {count for count in range(62) if id_of(count) in again} == expected | living


def test_the_epoch_of_an_id_is_not_looked_at() -> None:
    known = EndedIds()
    known.add(id_of(5, epoch=1))
    assert id_of(5, epoch=2) in known


def test_a_year_of_transactions_is_one_range() -> None:
    known = EndedIds()
    for count in range(1, 100_000):
        known.add(id_of(count))
    assert len(known) == 1


def test_gaps_are_closed_only_where_there_are_many_and_not_beyond_an_open_transaction() -> None:
    known = EndedIds()
    for count in range(0, 20, 2):
        known.add(id_of(count))
    assert not known.close_gaps(7, 15, (), 10)
    known.add(id_of(30))
    assert known.close_gaps(7, 15, [id_of(9), id_of(31)], 10)
    assert id_of(7) in known
    assert id_of(9) not in known
    assert id_of(11) not in known
    assert known.close_gaps(7, 15, (), 10) is False, "few ranges are left"
    assert len(known) == 6


def test_too_many_young_ranges_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "RANGES_MAX", 3)
    known = EndedIds()
    for count in (0, 2, 4, 6, 8):
        known.add(id_of(count))
    assert len(known) == 3
    assert known.left_out == 2
    known.add(id_of(1))
    known.add(id_of(8))
    assert len(known) == 3
    assert id_of(8) in known


def test_an_id_that_no_counter_gives_out_is_not_kept() -> None:
    known = EndedIds()
    known.add(id_of(ISSUED_MAX + 1))
    assert len(known) == 0
    assert id_of(ISSUED_MAX + 1) not in known


@pytest.mark.parametrize(
    "number",
    [
        EndedNumber(7, 0, (5, 0), (1, 1)),
        EndedNumber(7, 0, (5, 1), (1, 1)),
        EndedNumber(7, 0, (5,), (0,)),
        EndedNumber(7, 0, (5,), (1, 1)),
        EndedNumber(7, -1, (), ()),
        EndedNumber(7, 0, (-5,), (1,)),
        EndedNumber(-7, 0, (5,), (1,)),
        EndedNumber(7, 0, (ISSUED_MAX,), (5,)),
    ],
)
def test_a_record_that_contradicts_itself_is_not_used(number: EndedNumber) -> None:
    record = replace(EndedIds().record(GROUP, "log", 4, 0, ()), numbers=(number,))
    with pytest.raises(CorruptDataError):
        EndedIds.of(record)


def test_a_record_of_another_log_is_not_used() -> None:
    value = EndedIds().record(GROUP, "log", 4, 9, ()).encode()
    assert decode_ended(value, GROUP, "log", 9).commit_log_end == 9
    for group, topic_id, end in ((GroupName("other"), "log", 9), (GROUP, "other", 9), (GROUP, "log", 8)):
        with pytest.raises(CorruptDataError):
            decode_ended(value, group, topic_id, end)
    with pytest.raises(CorruptDataError):
        decode_ended(value[:-1], GROUP, "log", 9)


def marks_of(*hours: int) -> list[LogMark]:
    return [LogMark(hour * HOUR_MS, 100 * hour, 10 * hour, 1_000 * hour) for hour in hours]


def test_of_the_marks_before_the_log_those_are_kept_that_tell_which_counters_are_old() -> None:
    marks = marks_of(*range(100))
    kept = marks_to_keep(marks, 90, 100 * HOUR_MS, 48 * HOUR_MS)
    assert kept == marks_of(*range(52, 100))
    assert marks_to_keep(marks, 0, 100 * HOUR_MS, 48 * HOUR_MS) == marks
    assert marks_to_keep(marks, 10, 100 * HOUR_MS, 48 * HOUR_MS) == marks_of(*range(10, 100))


def test_marks_of_a_short_retention_are_thinned_out() -> None:
    marks = [LogMark(second * 1_000, 0, second, second) for second in range(40_000)]
    kept = marks_to_keep(marks, 39_990, 40_000_000, 20_000_000)
    assert len(kept) < 70
    assert kept[-10:] == marks[-10:]
    assert kept[0].ms <= 20_000_000


def test_there_are_never_too_many_marks() -> None:
    kept: list[LogMark] = []
    for hour in range(5_000):
        kept = marks_to_keep([*kept, *marks_of(hour)], 0, hour * HOUR_MS, 48 * HOUR_MS)
        assert len(kept) <= outcomes.MARKS_MAX
    assert kept[-1] == marks_of(4_999)[0]


def test_what_was_not_given_out_is_not_kept_since_it_may_be_given_out_later() -> None:
    known, read = EndedIds(), EndedIds()
    for item in (id_of(3), id_of(9), id_of(10), id_of(11), id_of(1_000), id_of(3, 8), id_of(3, 6), id_of(3, 0)):
        read.add(item)
    known.merge(read)
    known.cut(7, 10, {6})
    kept = [item for item in (3, 9, 10, 11, 1_000) if id_of(item) in known]
    assert kept == [3, 9]
    assert [number for number in (0, 6, 8) if id_of(3, number) in known] == [0, 6]
    known.is_given = lambda item: item != id_of(12)
    known.add(id_of(12))
    known.add(id_of(5))
    assert id_of(12) not in known
    assert id_of(5) in known
    whole = EndedIds()
    whole.add(id_of(3))
    whole.cut(0, 0, ())
    assert id_of(3) in whole, "a group without a number takes all ids"


def test_what_was_spared_and_has_ended_since_has_ended() -> None:
    known, since = EndedIds(), EndedIds()
    known.void(7, 10, [id_of(3), id_of(4)])
    known.lose(1_000, [id_of(3), id_of(12)])
    since.add(id_of(3))
    since.add(id_of(12))
    known.merge(since)
    assert id_of(3) in known
    assert id_of(12) in known
    assert id_of(4) not in known, "it is open"


def test_a_count_of_an_earlier_number_of_the_group_says_nothing_of_the_present_one() -> None:
    marks = marks_of(*range(100))
    assert counted_before(marks, 100 * HOUR_MS, 48 * HOUR_MS, 99_500) == 52_000
    assert counted_before(marks, 100 * HOUR_MS, 48 * HOUR_MS, 98_999) is None, "the counter has begun anew"
    again = [LogMark(hour * HOUR_MS, 0, 10 * hour, 7 * hour) for hour in range(60, 100)]
    assert counted_before([*marks[:60], *again], 100 * HOUR_MS, 48 * HOUR_MS, 700) is None
    assert counted_before([*marks[:60], *again], 100 * HOUR_MS, 30 * HOUR_MS, 700) == 7 * 70
    assert counted_before([], 100 * HOUR_MS, 48 * HOUR_MS, 700) is None


def test_when_the_log_was_shorter_is_told_by_the_mark_behind() -> None:
    marks = marks_of(1, 2, 3)
    assert short_until_ms(marks, 10) == HOUR_MS
    assert short_until_ms(marks, 11) == 2 * HOUR_MS
    assert short_until_ms(marks, 31) is None


def test_what_was_begun_before_something_was_lost_has_ended_unless_it_is_known_to_be_open() -> None:
    known = EndedIds()
    known.lose(1_000, [id_of(5)])
    again = EndedIds.of(known.record(GROUP, "log", 4, 0, [id_of(5), id_of(9)]))
    for one in (known, again):
        assert one.is_lost(id_of(4), 1_000)
        assert not one.is_lost(id_of(4), 1_001)
        assert not one.is_lost(id_of(5), 1_000)
        assert id_of(4) not in one
    assert not again.is_lost(id_of(9), 1_000)
    assert not EndedIds().is_lost(id_of(4), 0)
    for one in (known, again):
        assert one.close_gaps(7, 4, (), 10), "what nobody uses any more has ended"
        assert id_of(3) in one
        assert id_of(4) not in one
        assert not one.close_gaps(7, 6, (), 10)
