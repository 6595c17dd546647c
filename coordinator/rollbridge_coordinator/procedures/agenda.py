"""The agenda of a leader: which procedure comes next. Pure; commits and scales of a group run on this one line.

Source: PDP-24, "Linearize scale and commit transactions on a single processing channel".
"""

from __future__ import annotations

from rollbridge.model.under_way import Committing, Scaling
from rollbridge_coordinator.procedures.bookkeeping import expire_bookkeeping
from rollbridge_coordinator.procedures.chores import undertake
from rollbridge_coordinator.procedures.counters import check_given, keep_counter
from rollbridge_coordinator.procedures.deletion import delete_further
from rollbridge_coordinator.procedures.epochs import drop_epochs
from rollbridge_coordinator.procedures.foreign import is_due, must_wait, release_due
from rollbridge_coordinator.procedures.journal import keep_journal
from rollbridge_coordinator.procedures.late import look_behind
from rollbridge_coordinator.procedures.mending import mend_active
from rollbridge_coordinator.procedures.merge import merge_direct
from rollbridge_coordinator.procedures.outcomes import forget_expired
from rollbridge_coordinator.procedures.questions import answer_questions
from rollbridge_coordinator.procedures.refusals import give_up_waiting, try_again
from rollbridge_coordinator.procedures.reopening import reopen
from rollbridge_coordinator.procedures.requests import answer_waiting, handle_requests, retry_held
from rollbridge_coordinator.procedures.retention import retain_streams
from rollbridge_coordinator.procedures.rolling import go_on_with_roll, roll
from rollbridge_coordinator.procedures.scale import go_on_with_scale
from rollbridge_coordinator.procedures.sessions import forget_sessions
from rollbridge_coordinator.procedures.snapshots import take_snapshots
from rollbridge_coordinator.procedures.truncation import truncate_buffers
from rollbridge_coordinator.procedures.upkeep import (
    await_frames,
    expire_overdue,
    forsake_held,
    record_long,
    remove_records,
)
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.housekeeping import REST_MAX_MS
from rollbridge_coordinator.state.planning import DirectRound, Incomplete, Refusal, RollingRound, plan_round
from rollbridge_coordinator.state.steps import Steps


def work(group: GroupState, now_ms: int, *, requests: bool) -> Steps[bool]:
    """Do what is to be done now; True if there is more of what admin requests ask for.

    What is stamped gets the latest time that it may be; what is judged by its age the earliest, see
    :mod:`rollbridge_coordinator.state.times`.

    Args:
        group: State of the group; changed by what is done.
        now_ms: Clock of the leader, ms since 1970.
        requests: Whether admin requests may be waiting.
    """
    if group.fold.lines:
        yield from forsake_held(group, group.times.lease(now_ms))
    if group.faults:
        stuck = yield from try_again(group, now_ms)
        yield from reopen(group, stuck, group.times.stamp(now_ms))
    stamp_ms = group.times.stamp(now_ms)
    if group.fold.fresh:
        fresh, group.fold.fresh = group.fold.fresh, []
        yield from check_given(group, fresh, stamp_ms)
    if group.held_rolls:
        release_due(group, stamp_ms)
    if group.suspended:
        yield from go_on(group, stamp_ms)
    yield from drain(group, stamp_ms)
    left = False
    if requests:
        left = yield from handle_requests(group, stamp_ms)
    if group.held:
        yield from retry_held(group, stamp_ms)
    yield from keep_journal(group)
    deadline = group.fold.ages.next_deadline_ms()
    if deadline is not None and deadline < group.times.lease(now_ms):
        yield from expire_overdue(group, now_ms)
    give_up_waiting(group, group.times.lease(now_ms))
    yield from drain(group, stamp_ms)
    if group.answers:
        yield from answer_waiting(group, stamp_ms)
    if group.questions:
        yield from answer_questions(group, stamp_ms)
    yield from undertake(group, "records of long transactions", record_long, now_ms)
    if group.finished:
        yield from undertake(group, "records of ended transactions", remove_records, now_ms)
    yield from undertake(group, "late records", look_behind, now_ms)
    yield from undertake(group, "truncation of buffers", truncate_buffers, now_ms)
    if group.doomed:
        left = (yield from delete_further(group, now_ms)) or left
    yield from undertake(group, "retention", retain_streams, now_ms)
    yield from undertake(group, "expiry of epochs", drop_epochs, now_ms)
    yield from keep_journal(group)
    yield from undertake(group, "counters", keep_counter, now_ms)
    yield from undertake(group, "expiry of bookkeeping", expire_bookkeeping, now_ms)
    yield from undertake(group, "expiry of outcomes", forget_expired, now_ms)
    yield from undertake(group, "expiry of sessions", forget_sessions, now_ms)
    yield from undertake(group, "snapshots", take_snapshots, now_ms)
    yield from undertake(group, "active segments", mend_active, now_ms)
    return left


def go_on(group: GroupState, now_ms: int) -> Steps[None]:
    """Finish the scales and rolling commits that were left half done, as far as they need not wait any more."""
    for node, item in list(group.suspended.items()):
        if not is_due(item.wait, now_ms, REST_MAX_MS):
            continue
        match item.work:
            case Scaling():
                yield from go_on_with_scale(group, node, item.work, now_ms)
            case Committing():
                yield from go_on_with_roll(group, node, item.work, now_ms)


def drain(group: GroupState, now_ms: int) -> Steps[None]:
    """Carry out every decided transaction that can be carried out with what has been folded."""
    while True:
        planned = plan_round(group)
        match planned:
            case None:
                return
            case DirectRound(transactions):
                yield from merge_direct(group, transactions, now_ms)
            case RollingRound(transactions, rolls):
                if not (yield from must_wait(group, rolls, now_ms)):
                    yield from roll(group, transactions, rolls, now_ms)
            case Refusal(transaction, reason):
                group.fold.refuse(transaction.id, reason, now_ms)
            case Incomplete(transactions):
                yield from await_frames(group, transactions, now_ms)
                if all(item.id in group.barriers for item in transactions):
                    return
