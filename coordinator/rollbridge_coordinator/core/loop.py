"""The loop of a leader: which procedure comes next. Commits and scales of a group run one after the other.

Chores are housekeeping that no transaction waits for. A broker or ZooKeeper may refuse one permanently: a right is
missing, a quota is exceeded, a topic of snapshots was reconfigured. Such a chore is postponed with a growing back-off,
and all other work continues.

Source: PDP-24, "Linearize scale and commit transactions on a single processing channel".
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rollbridge.base.effects import Steps
from rollbridge.errors import CorruptDataError
from rollbridge.metadata.changes import CommittingTransactions, EpochTransition
from rollbridge_coordinator.commit.expiry import (
    await_frames,
    expire_bookkeeping,
    expire_overdue,
    forsake_held,
    record_extended,
    record_long,
    remove_records,
)
from rollbridge_coordinator.commit.large import follow_preparations, plan_preparation, prepare, remove_leftovers
from rollbridge_coordinator.commit.merge import merge_direct
from rollbridge_coordinator.commit.outcomes import EXPIRY, forget_expired
from rollbridge_coordinator.commit.plan import (
    Beside,
    DirectRound,
    Incomplete,
    LateRound,
    Refusal,
    RollingRound,
    ends_linger,
    plan_round,
    prepared_rolls,
)
from rollbridge_coordinator.commit.refusals import clear_away, give_up_waiting, try_again
from rollbridge_coordinator.commit.roll import end_linger, go_on_with_roll, merge_late, roll, watch_linger
from rollbridge_coordinator.core.effects import EffectRefusedError
from rollbridge_coordinator.core.requests import answer_questions, answer_waiting, handle_requests, retry_held
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import REST_MAX_MS
from rollbridge_coordinator.history.commit_log import keep_ended, retain_log
from rollbridge_coordinator.history.counters import check_given, keep_counter
from rollbridge_coordinator.history.journal import keep_journal
from rollbridge_coordinator.history.sessions import forget_sessions
from rollbridge_coordinator.history.snapshots import take_snapshots
from rollbridge_coordinator.streams.adopt import watch_topics
from rollbridge_coordinator.streams.create import delete_further, drop_epochs
from rollbridge_coordinator.streams.late import look_behind
from rollbridge_coordinator.streams.pending_changes import (
    gather,
    halt,
    is_due,
    mend_active,
    must_wait,
    release_due,
    reopen,
    take_apart,
)
from rollbridge_coordinator.streams.retention import remove_emptied, remove_lost, retain_streams, truncate_buffers
from rollbridge_coordinator.streams.scale import follow_load, go_on_with_scale
from rollbridge_coordinator.streams.unled import look_at_streams

logger = logging.getLogger(__name__)

Chore = Callable[[GroupState, int], Steps[None]]


def undertake(group: GroupState, name: str, chore: Chore, now_ms: int) -> Steps[None]:
    """Do a chore unless it is postponed. A refused chore is postponed, and leaves nothing in the round."""
    if group.housekeeping.is_resting(name, now_ms):
        return
    try:
        yield from chore(group, now_ms)
    except EffectRefusedError as refused:
        yield from clear_away(group)
        pause_ms = group.housekeeping.rest(name, now_ms)
        logger.warning('housekeeping.refused group=%s task="%s" retry_ms=%d: %s', group.name, name, pause_ms, refused)
    else:
        group.housekeeping.rested(name)


def work(group: GroupState, now_ms: int, *, requests: bool) -> Steps[bool]:
    """Do the work that is due; return True if admin requests are left to handle.

    Records get the latest possible time; ages are judged by the earliest, see
    :mod:`rollbridge_coordinator.daemon.succession`.

    Args:
        group: State of the group; changed by this.
        requests: True if admin requests may be waiting.
    """
    if group.fold.lines:
        yield from forsake_held(group, group.times.lease(now_ms))
    if group.waits.lingering is not None and group.waits.faults.first_of(group.waits.lingering.committing.streams):
        yield from end_linger(group)
    if group.waits.faults:
        stuck = yield from try_again(group, now_ms)
        yield from reopen(group, stuck, group.times.stamp(now_ms))
    stamp_ms = group.times.stamp(now_ms)
    if group.fold.fresh:
        fresh, group.fold.fresh = group.fold.fresh, []
        yield from check_given(group, fresh, stamp_ms)
    if group.waits.held_rolls:
        release_due(group, stamp_ms)
    if group.waits.pending_changes:
        yield from go_on(group, stamp_ms)
    if group.large.preparations or group.large.retries:
        yield from follow_preparations(group, stamp_ms)
    yield from drain(group, stamp_ms)
    left = False
    if requests or any(is_due(item, stamp_ms) for item in group.waits.held.values()):
        yield from end_linger(group)
    if requests:
        left = yield from handle_requests(group, stamp_ms)
    if group.waits.held:
        yield from retry_held(group, stamp_ms)
    yield from keep_journal(group)
    if group.fold.extended:
        yield from undertake(group, "records of extended leases", record_extended, now_ms)
    deadline = group.fold.ages.next_deadline_ms()
    if deadline is not None and deadline < group.times.lease(now_ms):
        yield from expire_overdue(group, now_ms)
    give_up_waiting(group, group.times.lease(now_ms))
    yield from drain(group, stamp_ms)
    if group.waits.answers:
        yield from answer_waiting(group, stamp_ms)
    if group.waits.questions:
        yield from answer_questions(group, stamp_ms)
    left = group.waits.take_lost_race() or left
    yield from watch_linger(group)
    if group.waits.lingering is not None:
        return left  # housekeeping waits: for a moment, some ends of segments are unknown
    yield from undertake(group, "records of long transactions", record_long, now_ms)
    if group.records.finished:
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
    yield from undertake(group, "left topics", remove_lost, now_ms)
    yield from undertake(group, "expiry of epochs", drop_epochs, now_ms)
    yield from keep_journal(group)
    yield from undertake(group, "counters", keep_counter, now_ms)
    yield from undertake(group, "expiry of bookkeeping", expire_bookkeeping, now_ms)
    yield from undertake(group, EXPIRY, forget_expired, now_ms)
    yield from undertake(group, "expiry of sessions", forget_sessions, now_ms)
    yield from undertake(group, "snapshots", take_snapshots, now_ms)
    yield from undertake(group, "ended transactions", keep_ended, now_ms)
    yield from undertake(group, "retention of the commit log", retain_log, now_ms)
    yield from undertake(group, "active segments", mend_active, now_ms)
    return left


def go_on(group: GroupState, now_ms: int) -> Steps[None]:
    """Finish the suspended scales and rolling commits that are due."""
    for node, item in list(group.waits.pending_changes.items()):
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
                    continue  # a seal may have to wait, and the transactions with it: planned again
                yield from merge_direct(group, transactions, now_ms)
            case LateRound(transactions):
                yield from merge_late(group, transactions, now_ms)
            case RollingRound(transactions, rolls):
                if group.waits.lingering is not None:
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
