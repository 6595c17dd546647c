"""Whatever waits in a group is in the table of waits, once, with its cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from coordinator.tests.makers import Bench
from rollbridge.base.ids import SegmentId
from rollbridge.metadata.changes import SUSPENDED, CommittingTransactions, StreamFault
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind, WaitCause, WaitKind, WaitRow
from rollbridge.stream.conditions import Leaderless
from rollbridge.stream.late import Forwarding, LateNotes
from rollbridge.stream.names import StreamName
from rollbridge.stream.scaling import ScalingWait
from rollbridge_coordinator.commit.waiting import CAUSES, waits_of
from rollbridge_coordinator.core.requests import describe
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.waits import (
    Lingering,
    MergeRetry,
    PendingChange,
    PendingRoll,
    RetryAfter,
    Wait,
    WaitingRequest,
)

ORDERS, AUDIT = "sales/orders", "sales/audit"
AWAY = Leaderless("sales.orders.segment-0.epoch-0")
LOOKING = Wait(2_000, 2_200, frozenset({AWAY}), frozenset({AWAY}), streams=(ORDERS,))
DENIED = StreamFault("it may not be written", "TOPIC_AUTHORIZATION_FAILED", "t", 1_500)
ROLL = CommittingTransactions((), (), 1_000, 1)


def hold_scale(bench: Bench) -> None:
    bench.group.waits.held["request-1"] = LOOKING


def hold_roll(bench: Bench) -> None:
    bench.group.waits.held_rolls[ORDERS,] = PendingRoll(LOOKING)


def put_off_roll(bench: Bench) -> None:
    bench.group.waits.pending_changes["/node"] = PendingChange(ROLL, LOOKING)
    bench.group.waits.faults.suspend(ORDERS, StreamFault("half done", SUSPENDED, "", 2_000))


def refuse_change(bench: Bench) -> None:
    rest = RetryAfter.after(None, 3_000)
    bench.group.waits.pending_changes["/node"] = PendingChange(ROLL, LOOKING, rest, "no permission")


def gather(bench: Bench) -> None:
    bench.group.waits.held_rolls[ORDERS,] = PendingRoll(Wait(2_000, 2_050, frozenset()))


def linger(bench: Bench) -> None:
    bench.group.waits.lingering = Lingering(ROLL, {}, {}, (), 2_000, 2_100)


def refuse_stream(bench: Bench) -> None:
    bench.group.waits.faults.note(ORDERS, DENIED, 3_000)


def suspect(bench: Bench) -> None:
    item = bench.one(ORDERS, 0)
    bench.group.waits.unknown_outcomes.begin([item])
    bench.group.waits.unknown_outcomes.note_unknown()


def merge_in_vain(bench: Bench) -> None:
    item = bench.one(ORDERS, 0)
    bench.group.large.retries[item.id] = MergeRetry(RetryAfter.after(None, 3_000), "a line was cut")


def ask(bench: Bench) -> None:
    request = AdminRequest(kind=RequestKind.FENCE, stream=ORDERS, created_ms=2_500)
    bench.group.waits.questions["request-2"] = WaitingRequest(request, {})


def await_end(bench: Bench) -> None:
    bench.group.waits.answers[bench.begin(ORDERS).bytes] = ["request-3"]


def leave_unanswered(bench: Bench) -> None:
    bench.group.waits.unanswered.add("request-4")


def hold_policy(bench: Bench) -> None:
    bench.group.streams[ORDERS].scaling.wait = ScalingWait(StreamName.parse(ORDERS), "split 0: 12 are open", 2_600)


def copy_late_records(bench: Bench) -> None:
    segment = SegmentId.of(0, 0)
    bench.group.streams[ORDERS].late = LateNotes(forwarding=Forwarding(segment, 6, 10, {SegmentId.of(1, 1): 0}))


WAITS: Mapping[str, tuple[Callable[[Bench], None], WaitCause, WaitKind, int, int, str]] = {
    "scale": (hold_scale, WaitCause.OBSTACLES, WaitKind.SCALE, 2_000, 2_200, str(AWAY)),
    "roll": (hold_roll, WaitCause.OBSTACLES, WaitKind.ROLLING_COMMIT, 2_000, 2_200, str(AWAY)),
    "half done": (put_off_roll, WaitCause.HALF_DONE, WaitKind.ROLLING_COMMIT, 1_000, 2_200, str(AWAY)),
    "refused": (refuse_change, WaitCause.HALF_DONE, WaitKind.ROLLING_COMMIT, 1_000, 2_200, "no permission"),
    "gathering": (gather, WaitCause.LATE_COMMITS, WaitKind.ROLLING_COMMIT, 2_000, 2_050, ""),
    "lingering": (linger, WaitCause.LATE_COMMITS, WaitKind.ROLLING_COMMIT, 2_000, 2_100, ""),
    "error state": (refuse_stream, WaitCause.ERROR_STATE, WaitKind.STREAM, 1_500, 4_000, DENIED.reason),
    "unknown": (suspect, WaitCause.UNKNOWN_OUTCOME, WaitKind.TRANSACTION, 1_000, 0, "the outcome of its round"),
    "merge": (merge_in_vain, WaitCause.LARGE_MERGE, WaitKind.TRANSACTION, 1_000, 4_000, "a line was cut"),
    "question": (ask, WaitCause.REQUEST, WaitKind.REQUEST, 2_500, 0, "everything that was in the buffers"),
    "answer": (await_end, WaitCause.REQUEST, WaitKind.REQUEST, 0, 0, "the end of transaction"),
    "no answer": (leave_unanswered, WaitCause.REQUEST, WaitKind.REQUEST, 0, 0, "ZooKeeper, which refuses"),
    "policy": (hold_policy, WaitCause.SCALING, WaitKind.STREAM, 2_600, 0, "split 0: 12 are open"),
    "copies": (copy_late_records, WaitCause.LATE_RECORDS, WaitKind.STREAM, 0, 0, "copies of late records of segment 0"),
}


def bench_of() -> Bench:
    return Bench({ORDERS: 1, AUDIT: 1}, LeaderSettings(merge_beside_bytes=50))


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_in_the_table_once_with_its_cause(name: str) -> None:
    wait, cause, kind, since_ms, retry_ms, reason = WAITS[name]
    bench = bench_of()
    assert waits_of(bench.group) == []
    wait(bench)
    [row] = waits_of(bench.group)
    assert (row.cause, row.kind, row.since_ms, row.retry_ms) == (cause, kind, since_ms, retry_ms)
    assert reason in " ".join(row.reasons)
    assert row.is_change == (kind in (WaitKind.SCALE, WaitKind.ROLLING_COMMIT) and bool(reason))


def test_a_stream_is_described_by_the_waits_that_concern_it() -> None:
    bench = bench_of()
    for wait in (hold_scale, refuse_stream, leave_unanswered, gather):
        wait(bench)

    def told(stream: str) -> tuple[WaitRow, ...] | None:
        request = AdminRequest(kind=RequestKind.DESCRIBE, stream=stream, created_ms=0)
        return AdminAnswer.from_json(describe(bench.group, request, 0).to_json()).waits

    rows = waits_of(bench.group)
    assert told(ORDERS) == tuple(row for row in rows if ORDERS in row.streams)
    assert {row.cause for row in told(ORDERS) or ()} >= {WaitCause.OBSTACLES, WaitCause.LATE_COMMITS}
    assert told("sales/other") == ()


def test_each_cause_has_its_rule_and_a_wait() -> None:
    assert CAUSES.keys() == set(WaitCause) == {item[1] for item in WAITS.values()}


def test_the_longest_wait_comes_first_and_those_of_unknown_age_last() -> None:
    bench = bench_of()
    for wait in (leave_unanswered, hold_policy, hold_scale, refuse_stream):
        wait(bench)
    assert [row.since_ms for row in waits_of(bench.group)] == [1_500, 2_000, 2_600, 0]
