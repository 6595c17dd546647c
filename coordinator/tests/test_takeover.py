"""The warm tail: the state that a standby comes to, and when a takeover must not use it.

That a takeover from a tail of any age gives what a full replay gives is shown by the simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollbridge.base.ids import TransactionId
from rollbridge.base.metrics import Sample
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, encode_abort
from rollbridge.buffer.owners import Fences
from rollbridge.buffer.replay import BufferPlace, log_start
from rollbridge.buffer.snapshots import Snapshot
from rollbridge_coordinator.core.effects import LogSummary
from rollbridge_coordinator.core.metric_samples import STANDBY_HELD, STANDBY_LAG, standby_samples
from rollbridge_coordinator.history.takeover import WarmTail

STREAM = "sales/orders"
PARTITION = ("sales.orders.transaction-buffer", 0)
OTHER = ("sales.payments.transaction-buffer", 0)
IDS = [TransactionId.of(0, number).bytes for number in range(10)]
SNAPSHOT: dict[str, Any] = {
    "partition": PARTITION,
    "topic_id": "t",
    "generation": 1,
    "controller_epoch": 1,
    "taken_ms": 0,
    "sequence_id": 0,
    "indexes": (),
    "first_position": 0,
    "aborts": (),
}


def place(max_read: int = 10, log: int = 100, *, start: int = 0, end: int = 50, topic_id: str = "t") -> BufferPlace:
    snapshot = Snapshot(
        **SNAPSHOT, position=end, max_read_position=max_read, commit_log_position=log, commit_log_end=log
    )
    return BufferPlace(topic_id, STREAM, snapshot, None, start, end)


def new_fold(terminated: Mapping[bytes, int] | None = None, **limits: int) -> BufferFold:
    return BufferFold(BufferLimits(**limits), lambda *_: None, {} if terminated is None else terminated)


def tail_of(found: BufferPlace | None = None, start: int = 100) -> WarmTail:
    terminated: dict[bytes, int] = {}
    return WarmTail(new_fold(terminated, open_transactions_max=3), terminated, {PARTITION: found or place()}, start)


def feed(tail: WarmTail, kind: FrameKind, transaction: bytes, *, epoch: int = 0, lease_ms: int = 1_000) -> None:
    offset = tail.fold.positions[PARTITION]
    value = {
        FrameKind.BEGIN: BeginFrame("teller", epoch, None, lease_ms, {STREAM: 0}).encode(),
        FrameKind.COMMIT: Manifest({}).encode(),
        FrameKind.ABORT: encode_abort("client"),
    }[kind]
    tail.fold.fold(STREAM, PARTITION, offset, 5, FrameHeader(kind, transaction).pack(), value)


def aborted(*transactions: bytes, first: int = 100) -> LogSummary:
    ended = dict(zip(transactions, range(first, first + len(transactions)), strict=True))
    return LogSummary(ended, frozenset(), frozenset(transactions), first + len(transactions))


@pytest.mark.parametrize("outcome_first", [False, True])
def test_outcomes_count_whether_they_are_read_before_the_frames_or_after(outcome_first: bool) -> None:
    tail = tail_of()
    if outcome_first:
        tail.follow(aborted(IDS[0]))
    for transaction in IDS[:2]:
        feed(tail, FrameKind.BEGIN, transaction)
    feed(tail, FrameKind.ABORT, IDS[0])
    if not outcome_first:
        assert set(tail.fold.open) == set(IDS[:2])
        tail.follow(aborted(IDS[0]))
    feed(tail, FrameKind.BEGIN, IDS[0])  # doubled
    assert set(tail.fold.open) == {IDS[1]}
    assert not tail.fold.decided
    assert {item: begun.first_offsets for item, begun in (tail.fold.late or {}).items()} == {IDS[0]: {PARTITION: 10}}
    assert len(tail) == 2


def test_what_a_leader_goes_on_with() -> None:
    tail = tail_of()
    for transaction in IDS[:5]:
        feed(tail, FrameKind.BEGIN, transaction)
    assert not tail.fold.decided, "how many are open at a time is not judged before outcomes are known"
    tail.follow(LogSummary({IDS[0]: 101}, frozenset({IDS[1]}), frozenset({IDS[0]}), 102))
    cold = new_fold()
    cold.positions = {PARTITION: 12, OTHER: 7}
    cold.fences.raise_to("teller", 3)
    cold.fences.replaying = True
    assert tail.hand_over(cold, 90) == LogSummary({IDS[0]: 101}, frozenset({IDS[1]}), frozenset({IDS[0]}), 102)
    fold = tail.fold
    assert fold.limits == cold.limits
    assert fold.positions == {PARTITION: 15, OTHER: 7}
    assert fold.fences.epoch_of("teller") == 3
    assert {item.log_position for item in fold.open.values()} == {90}
    assert [item.id for item in fold.ages.overdue(10_000)] == list(IDS[1:5])
    assert [item.id for item in fold.ages.come_of_age(10_000)] == list(IDS[1:5])


FITTING: dict[str, tuple[Mapping[Any, str], Mapping[Any, int], int, bool]] = {
    "from where it began": ({PARTITION: "t"}, {PARTITION: 10}, 100, True),
    "from what it has read": ({PARTITION: "t"}, {PARTITION: 13}, 300, True),
    "behind what it has read": ({PARTITION: "t"}, {PARTITION: 14}, 100, False),
    "before it began": ({PARTITION: "t"}, {PARTITION: 9}, 100, False),
    "the buffer was made again": ({PARTITION: "u"}, {PARTITION: 10}, 100, False),
    "the stream is gone": ({}, {}, 100, False),
    "a new stream": ({PARTITION: "t", OTHER: "o"}, {PARTITION: 10, OTHER: 0}, 100, True),
    "a new stream with outcomes before": ({PARTITION: "t", OTHER: "o"}, {PARTITION: 10, OTHER: 0}, 99, False),
}


@pytest.mark.parametrize("case", FITTING)
def test_a_tail_is_used_only_where_it_holds_all_that_is_needed(case: str) -> None:
    tail = tail_of()
    for transaction in IDS[:3]:
        feed(tail, FrameKind.BEGIN, transaction)
    topic_ids, needed, start, fits = FITTING[case]
    assert tail.fits(topic_ids, needed, start) is fits


def test_an_end_that_a_newer_session_would_not_let_be_heard_contradicts() -> None:
    tail = tail_of()
    feed(tail, FrameKind.BEGIN, IDS[0], epoch=1)
    feed(tail, FrameKind.COMMIT, IDS[0])
    fences = Fences()
    fences.raise_to("teller", 1)
    assert not tail.contradicts(fences)
    fences.raise_to("teller", 2)
    assert tail.contradicts(fences)
    tail.follow(aborted(IDS[0]))
    assert not tail.contradicts(fences), "its outcome is known"
    fences.decided_before = {IDS[5]: 0}
    assert tail.contradicts(fences), "a rolling commit is under way"


def test_a_standby_gives_up_when_what_it_notes_of_ended_transactions_takes_too_much() -> None:
    terminated: dict[bytes, int] = {}
    tail = WarmTail(new_fold(terminated, held_bytes_max=16_000), terminated, {PARTITION: place()}, 100)
    streams = dict.fromkeys([STREAM, *(f"made/up-{number}" for number in range(50))], 0)
    value = BeginFrame("misuser", 0, None, 1_000, streams).encode()
    for number, transaction in enumerate(IDS[:3]):
        key = FrameHeader(FrameKind.BEGIN, transaction).pack()
        tail.fold.fold(STREAM, PARTITION, tail.fold.positions[PARTITION], 5, key, value)
        tail.follow(aborted(transaction, first=100 + number))
        assert not tail.fold.open
    before = tail.is_full
    tail.fold.fold(STREAM, PARTITION, 13, 5, FrameHeader(FrameKind.BEGIN, IDS[3]).pack(), value)
    tail.follow(aborted(IDS[3], first=103))
    after = tail.is_full
    assert tail.trim({PARTITION: place(14, 103)}, 103)
    assert (before, after, tail.is_full) == (False, True, False), "new snapshots let it forget"


def test_new_snapshots_let_it_forget() -> None:
    tail = tail_of()
    for transaction in IDS[:4]:
        feed(tail, FrameKind.BEGIN, transaction)
    tail.follow(aborted(*IDS[:3]))
    assert tail.trim({PARTITION: place(12, 102)}, 102)
    assert len(tail) == 2
    assert set(tail.fold.late or {}) == {IDS[2]}
    assert not tail.fits({PARTITION: "t"}, {PARTITION: 11}, 100)
    assert tail.fits({PARTITION: "t"}, {PARTITION: 12}, 102)
    for places, start in (
        ({PARTITION: place(12, 102), OTHER: place()}, 102),
        ({PARTITION: place(12, 102, topic_id="u")}, 102),
        ({PARTITION: place(11, 102)}, 102),
        ({PARTITION: place(15, 102)}, 102),
        ({PARTITION: place(12, 102)}, 101),
    ):
        assert not tail.trim(places, start), "a new one is needed"


def test_where_the_commit_log_has_to_be_read_from() -> None:
    assert log_start({PARTITION: place(10, 100), OTHER: place(10, 70)}, 500, 20) == 50
    assert log_start({PARTITION: place(10, 100), OTHER: place(50, 70)}, 500, 0) == 100, "nothing is left to read"
    assert log_start({PARTITION: BufferPlace("t", STREAM, None, None, 0, 5)}, 500, 20) == 0, "there is no snapshot"
    assert log_start({PARTITION: BufferPlace("t", STREAM, None, None, 5, 5)}, 500, 20) == 480
    assert log_start({}, 500, 20) == 480
    assert place(10, start=30).floor == 30


def test_metrics_say_how_far_a_standby_lags() -> None:
    label = ("s/g",)
    assert list(standby_samples("s/g", 7, 3)) == [Sample(STANDBY_LAG, label, 7), Sample(STANDBY_HELD, label, 3)]
    assert next(iter(standby_samples("s/g", None, 0))) == Sample(STANDBY_LAG, label, -1)
