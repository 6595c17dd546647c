"""The loop of a leader: which procedure comes next. Commits and scales of a group run one after the other.

Chores are housekeeping that no transaction waits for. A broker or ZooKeeper may refuse one for ever: a right is
missing, a quota is exceeded, a topic of snapshots was reconfigured. Such a chore is postponed with a growing back-off,
and all other work goes on.

Source: PDP-24, "Linearize scale and commit transactions on a single processing channel".
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rollbridge.errors import CorruptDataError
from rollbridge.model.changes import CommittingTransactions, EpochTransition
from rollbridge_coordinator.procedures.adoption import watch_topics
from rollbridge_coordinator.procedures.commit_log import keep_ended, retain_log
from rollbridge_coordinator.procedures.counters import check_given, keep_counter
from rollbridge_coordinator.procedures.journal import keep_journal
from rollbridge_coordinator.procedures.late import look_behind
from rollbridge_coordinator.procedures.lingering import end_linger, merge_late, watch_linger
from rollbridge_coordinator.procedures.merge import merge_direct
from rollbridge_coordinator.procedures.outcomes import forget_expired
from rollbridge_coordinator.procedures.preparing import follow_preparations, prepare, remove_leftovers
from rollbridge_coordinator.procedures.refusals import give_up_waiting, try_again
from rollbridge_coordinator.procedures.requests import answer_questions, answer_waiting, handle_requests, retry_held
from rollbridge_coordinator.procedures.retention import remove_emptied, retain_streams, truncate_buffers
from rollbridge_coordinator.procedures.rolling import go_on_with_roll, roll
from rollbridge_coordinator.procedures.scale import go_on_with_scale
from rollbridge_coordinator.procedures.scaling import follow_load
from rollbridge_coordinator.procedures.sessions import forget_sessions
from rollbridge_coordinator.procedures.snapshots import take_snapshots
from rollbridge_coordinator.procedures.streams import delete_further, drop_epochs
from rollbridge_coordinator.procedures.suspended import (
    gather,
    halt,
    is_due,
    mend_active,
    must_wait,
    release_due,
    reopen,
    take_apart,
)
from rollbridge_coordinator.procedures.unled import look_at_streams
from rollbridge_coordinator.procedures.upkeep import (
    await_frames,
    expire_bookkeeping,
    expire_overdue,
    forsake_held,
    record_extended,
    record_long,
    remove_records,
)
from rollbridge_coordinator.state.effects import AbortRound, EffectRefusedError, Steps
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.planning import (
    Beside,
    DirectRound,
    Incomplete,
    LateRound,
    Refusal,
    RollingRound,
    ends_linger,
    plan_round,
)
from rollbridge_coordinator.state.preparing import plan_preparation, prepared_rolls
from rollbridge_coordinator.state.upkeep import REST_MAX_MS

logger = logging.getLogger(__name__)

Chore = Callable[[GroupState, int], Steps[None]]


def undertake(group: GroupState, name: str, chore: Chore, now_ms: int) -> Steps[None]:
    """Do a chore unless it is postponed. A refused chore is postponed, and leaves nothing in the round."""
    if group.housekeeping.is_resting(name, now_ms):
        return
    try:
        yield from chore(group, now_ms)
    except EffectRefusedError as refused:
        yield from AbortRound()
        group.log_end = group.draft = None
        group.counts["chores_refused"] += 1
        pause_ms = group.housekeeping.rest(name, now_ms)
        logger.warning(
            "%s: housekeeping (%s) is refused, everything else goes on; it is tried again in %.0f s: %s",
            group.name,
            name,
            pause_ms / 1000,
            refused,
        )
    else:
        group.housekeeping.rested(name)


def work(group: GroupState, now_ms: int, *, requests: bool) -> Steps[bool]:
    """Do the work that is due; return True if admin requests are left to handle.

    Records are stamped with the latest time that it may be now; ages are judged by the earliest, see
    :mod:`rollbridge_coordinator.state.succession`.

    Args:
        group: State of the group; changed by what is done.
        now_ms: Clock of the leader, ms since 1970.
        requests: True if admin requests may be waiting.
    """
    if group.fold.lines:
        yield from forsake_held(group, group.times.lease(now_ms))
    if group.lingering is not None and group.faults.first_of(group.lingering.committing.streams):
        yield from end_linger(group)
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
    if group.preparations or group.merge_retries:
        yield from follow_preparations(group, stamp_ms)
    yield from drain(group, stamp_ms)
    left = False
    if requests or any(is_due(item, stamp_ms) for item in group.held.values()):
        yield from end_linger(group)
    if requests:
        left = yield from handle_requests(group, stamp_ms)
    if group.held:
        yield from retry_held(group, stamp_ms)
    yield from keep_journal(group)
    if group.fold.extended:
        yield from undertake(group, "records of extended leases", record_extended, now_ms)
    deadline = group.fold.ages.next_deadline_ms()
    if deadline is not None and deadline < group.times.lease(now_ms):
        yield from expire_overdue(group, now_ms)
    give_up_waiting(group, group.times.lease(now_ms))
    yield from drain(group, stamp_ms)
    if group.answers:
        yield from answer_waiting(group, stamp_ms)
    if group.questions:
        yield from answer_questions(group, stamp_ms)
    yield from watch_linger(group)
    if group.lingering is not None:
        return left  # housekeeping waits: for a moment, some ends of segments are unknown
    yield from undertake(group, "records of long transactions", record_long, now_ms)
    if group.finished:
        yield from undertake(group, "records of ended transactions", remove_records, now_ms)
    yield from undertake(group, "late records", look_behind, now_ms)
    yield from undertake(group, "truncation of buffers", truncate_buffers, now_ms)
    yield from undertake(group, "leftovers of merges", remove_leftovers, now_ms)
    if group.doomed:
        left = (yield from delete_further(group, now_ms)) or left
    yield from undertake(group, "streams that are not led", look_at_streams, now_ms)
    yield from undertake(group, "adopted topics", watch_topics, now_ms)
    yield from undertake(group, "retention", retain_streams, now_ms)
    yield from undertake(group, "scaling by load", follow_load, now_ms)
    yield from undertake(group, "emptied segments", remove_emptied, now_ms)
    yield from undertake(group, "expiry of epochs", drop_epochs, now_ms)
    yield from keep_journal(group)
    yield from undertake(group, "counters", keep_counter, now_ms)
    yield from undertake(group, "expiry of bookkeeping", expire_bookkeeping, now_ms)
    yield from undertake(group, "expiry of outcomes", forget_expired, now_ms)
    yield from undertake(group, "expiry of sessions", forget_sessions, now_ms)
    yield from undertake(group, "snapshots", take_snapshots, now_ms)
    yield from undertake(group, "ended transactions", keep_ended, now_ms)
    yield from undertake(group, "retention of the commit log", retain_log, now_ms)
    yield from undertake(group, "active segments", mend_active, now_ms)
    return left


def go_on(group: GroupState, now_ms: int) -> Steps[None]:
    """Finish the suspended scales and rolling commits that are due."""
    for node, item in list(group.suspended.items()):
        if not is_due(item.wait, now_ms, REST_MAX_MS) or not (yield from take_apart(group, node)):
            continue
        try:
            match work := item.work:
                case EpochTransition():
                    yield from go_on_with_scale(group, node, work, now_ms)
                case CommittingTransactions():
                    yield from go_on_with_roll(group, node, work, now_ms)
        except (EffectRefusedError, CorruptDataError) as fault:
            yield from halt(group, node, item.work, fault)


def drain(group: GroupState, now_ms: int) -> Steps[None]:
    """Carry out every decided transaction that the frames folded so far allow."""
    while True:
        planned = plan_round(group)
        match planned:
            case None:
                return
            case DirectRound(transactions):
                if ends_linger(group, transactions):
                    yield from end_linger(group)
                    continue  # a seal may have to wait, and the transactions with it: planned anew
                yield from merge_direct(group, transactions, now_ms)
            case LateRound(transactions):
                yield from merge_late(group, transactions, now_ms)
            case RollingRound(transactions, rolls):
                if group.lingering is not None:
                    yield from end_linger(group)
                    continue  # likewise
                if not (yield from gather(group, rolls)) and not (yield from must_wait(group, rolls, now_ms)):
                    yield from roll(group, transactions, rolls, now_ms)
            case Beside(transaction, instead_of):
                plan = plan_preparation(group, transaction, now_ms)
                if not (yield from must_wait(group, prepared_rolls(group, transaction, plan[0]), now_ms)):
                    yield from prepare(group, transaction, *plan, instead_of, now_ms)
            case Refusal(transaction, reason):
                group.fold.refuse(transaction.id, reason, now_ms)
            case Incomplete(transactions):
                yield from await_frames(group, transactions, now_ms)
                if all(item.barrier is not None for item in transactions):
                    return
