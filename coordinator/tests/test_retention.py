"""Retention: when marks are made, at which of them a stream is truncated, and how bytes are counted."""

from __future__ import annotations

import pytest

from rollbridge.base.ids import SegmentId
from rollbridge.commitlog.outcomes import MARKS_PER_LIMIT
from rollbridge.errors import InvalidRequestError
from rollbridge.metadata.records import Mark, RetentionMarks
from rollbridge.stream.config import RETENTION_GROUPS_MAX, Retention
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges, ranges_of
from rollbridge_coordinator.core.bookkeeping import ByteCounter, Housekeeping, is_mark_due, place_to_truncate

A, B = SegmentId.of(0, 0), SegmentId.of(1, 1)
DAY_MS = 24 * 3600 * 1000


def test_a_month_of_marks_keeps_what_was_asked_for_and_stays_small() -> None:
    policy = Retention(7 * DAY_MS, 1_000_000)
    marks: list[Mark] = []
    step_ms = 30_000
    most = 0
    for tick in range(30 * DAY_MS // step_ms):
        now_ms, written = tick * step_ms, tick * 10
        cut = {A: tick}
        if is_mark_due(marks, now_ms, written, cut, policy):
            marks.append(Mark(now_ms, written, cut))
        place = place_to_truncate(marks, now_ms, written, policy)
        if place is not None:
            kept = marks[place]
            assert now_ms - kept.ms >= policy.ms or written - kept.written >= policy.bytes
            assert now_ms - kept.ms < policy.ms * 1.05 + step_ms
            del marks[:place]
        most = max(most, len(marks))
    assert most <= 2 * MARKS_PER_LIMIT + 2
    assert RetentionMarks.from_json(RetentionMarks(tuple(marks)).to_json()).marks == tuple(marks)


def test_an_idle_stream_gets_no_marks_and_still_grows_old() -> None:
    policy = Retention(ms=1_000)
    marks = [Mark(0, 0, {A: 5})]
    assert not is_mark_due(marks, 10_000, 0, {A: 5}, policy)
    assert is_mark_due(marks, 10_000, 0, {A: 6}, policy)
    assert place_to_truncate(marks, 999, 0, policy) is None
    assert place_to_truncate(marks, 1_000, 0, policy) == 0


def test_many_segments_make_few_marks() -> None:
    policy = Retention(ms=1_000)
    cut = {SegmentId.of(number, 0): 0 for number in range(5_000)}
    later = dict.fromkeys(cut, 1)
    assert not is_mark_due([Mark(0, 0, cut)], 999, 0, later, policy)
    assert is_mark_due([Mark(0, 0, cut)], 1_000, 0, later, policy)


def test_bytes_are_counted_across_scales_truncations_and_leaders() -> None:
    history = EpochHistory.create(even_ranges(1), 0)
    counter = ByteCounter()
    assert counter.wanted(history) == [A]
    assert counter.count(history, {A: 700}, []) == 700, "what was there before counts as written now"
    assert counter.count(history, {A: 900}, []) == 900
    record = history.plan_scale([0], ranges_of([(0.0, 1.0)]), 0)
    history = history.with_records(record).with_sealed_ends(1, {A: 9})
    assert counter.wanted(history) == [A, B]
    assert counter.count(history, {A: 950, B: 100}, []) == 1_050
    assert counter.wanted(history) == [B], "what is sealed does not grow"
    assert counter.count(history, {B: 40}, []) == 1_050, "files were deleted"
    assert counter.count(history, {B: 90}, []) == 1_100
    assert counter.count(history, {}, []) == 1_100, "no answer"
    assert counter.count(history, {B: 100}, []) == 1_110
    fresh = ByteCounter()
    assert fresh.count(history, {B: 200}, [Mark(0, 1_100, {B: 3})]) == 1_100, "a new leader goes on from the last mark"
    assert fresh.count(history, {B: 250}, []) == 1_150


@pytest.mark.parametrize(
    "policy",
    [
        Retention(ms=0),
        Retention(ms=-5),
        Retention(bytes=0),
        Retention(bytes=1 << 63),
        Retention(groups=("",)),
        Retention(groups=("g" * 256,)),
        Retention(groups=("a", "a")),
        Retention(groups=tuple(map(str, range(RETENTION_GROUPS_MAX + 1)))),
    ],
)
def test_retentions_that_make_no_sense_are_refused(policy: Retention) -> None:
    with pytest.raises(InvalidRequestError):
        policy.check()


def test_work_is_due_after_its_time_and_when_the_clock_was_set_back() -> None:
    work = Housekeeping()
    assert [work.is_due("w", now_ms, 100) for now_ms in (1_000, 1_099, 1_100, 500, 599, 600)] == [
        *(True, False, True, True, False, True),
    ]
    assert work.is_due("other", 600, 100)
    assert [work.is_due("later", now_ms, 100, at_once=False) for now_ms in (600, 699, 700)] == [False, False, True]
