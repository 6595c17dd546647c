"""Rolling commit: put transactions of an older epoch into segments between two incarnations of the active epoch.

The order of the effects, each of which may be the last before a crash:

1. ``committing`` fixes the ordered transactions and the new epoch numbers;
2. the topics of both new epochs are created;
3. frames and control records are appended, invisible, to the duplicates of the transactions' epoch;
4. the active segments are sealed;
5. both epoch records are published, with the ends of the sealed segments, of as many streams at once as fit;
6. the round is committed: records and outcomes become visible;
7. the duplicates are sealed;
8. their ends are published, of one stream after the other, and ``committing`` is removed.

A ZooKeeper multi holds 1 MiB, and a transaction may have a thousand streams, so it may take several to publish all. No
reader sees that: nothing is visible before step 6, and a leader that finds a part done does the rest.

PDP-24 merges and seals first and seals the active segments last. Here they are sealed before the commit becomes
visible, because a plain write after the commit's answer could otherwise land in a segment that readers take before the
merged one. Writers wait only during step 4, readers never: the long part, step 3, happens before.

A transaction with conditions is rolled alone, and steps 4 and 5 come before step 3: the segments of its conditions must
not change once they are read. If the conditions do not hold, the round has its outcome and no frames.

If a native transaction of another writer stays open on what is being sealed, the rolling commit is suspended
(:mod:`rollbridge_coordinator.streams.pending_changes`) and continues later: its appends are invisible, so they are
aborted and repeated.

Source: PDP-24, "CommitTransaction" and the temporary node of "Controller changes".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollbridge.base.effects import Steps
from rollbridge.base.ids import SegmentId
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.metadata import paths
from rollbridge.metadata.changes import CommittingTransactions, EpochTransition, Roll
from rollbridge.metadata.records import CreateNode, DeleteNode, SetNode, bytes_of
from rollbridge.stream.epochs import EpochHistory, EpochRecord
from rollbridge.stream.names import Partition
from rollbridge_coordinator.commit.large import give_up
from rollbridge_coordinator.commit.merge import (
    Before,
    Volumes,
    append_prepared,
    append_round,
    items_of,
    merge_direct,
    settle,
)
from rollbridge_coordinator.commit.plan import (
    ROLL_BYTES_MAX,
    conditions_of,
    is_ready,
    line_of,
    lingering_of,
    still_fitting,
    targets,
)
from rollbridge_coordinator.commit.refusals import absorb, note_fault, probe, refuse
from rollbridge_coordinator.core.effects import (
    ROUND,
    AbortRound,
    CommitRound,
    CreateTopics,
    EffectRefusedError,
    EndOffsets,
    Look,
    Now,
    Seal,
    Write,
)
from rollbridge_coordinator.core.metrics import CommitPath
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import LedStream, segment_topic_spec
from rollbridge_coordinator.core.waits import Lingering, StaleStateError
from rollbridge_coordinator.streams.pending_changes import (
    change,
    end_suspension,
    kept_of,
    open_of,
    plan_reopening,
    postpone,
    put_aside,
    still_held,
    suspend,
    take_up_scale,
)

_Plan = tuple[Roll, LedStream, EpochRecord, EpochRecord]
"""Plan of one stream: its new epochs are the duplicate of the transactions' epoch, and that of the active one."""


def roll(
    group: GroupState, transactions: Sequence[BufferedTransaction], rolls: tuple[Roll, ...], now_ms: int
) -> Steps[None]:
    """Commit transactions whose epochs are no longer active; the segments that take them may linger after that."""
    began_ms = group.times.stamp((yield from Now()))
    committing = CommittingTransactions(
        tuple(transaction.transaction_id for transaction in transactions),
        rolls,
        now_ms,
        group.controller_epoch,
        tuple(transaction.owners.part for transaction in transactions),
    )
    if not (yield from Write([CreateNode(paths.committing(group.name), committing.to_json())])):
        raise StaleStateError(f"a rolling commit of {group.name} is under way already")
    may_linger = None if committing.is_prepared else began_ms  # prepared segments have numbers that no writer uses
    yield from finish_roll(group, committing, transactions, paths.committing(group.name), may_linger)


def finish_roll(
    group: GroupState,
    committing: CommittingTransactions,
    transactions: Sequence[BufferedTransaction] | None,
    node: str,
    began_ms: int | None = None,
) -> Steps[None]:
    """Carry out the rest of a rolling commit, from any state of it.

    Args:
        transactions: Transactions in the decided order, empty if all have been taken out of it; None if their outcomes
            are in the commit log already.
    """
    plans = _plans(group, committing)
    if transactions is not None:
        while True:
            if transactions and committing.is_prepared and not is_ready(group, transactions[0], committing.rolls):
                # The prepared segments are lost, so they are prepared again. Published epochs stay.
                if len(_unpublished(plans)) == len(plans):
                    yield from _undo(group, committing, node, "its prepared segments are lost")
                    return
                transactions = []
            for transaction in transactions:
                doubt = group.waits.unknown_outcomes.fault_of(transaction)
                if doubt is not None and transaction.state is State.COMMITTING:
                    refuse(group, transaction, doubt, committing.created_ms)
            if any(group.waits.unknown_outcomes.is_suspect(item.id) for item in transactions):
                yield from probe(group, ())
            group.waits.unknown_outcomes.begin(
                [item for item in transactions if item.state is State.COMMITTING], together=True
            )
            try:
                volumes = yield from _append(group, committing, transactions, plans, node)
                if volumes is None:
                    group.waits.unknown_outcomes.end()
                    left = committing.with_only(() if committing.is_prepared else kept_of(transactions))
                    if committing.is_prepared and transactions:
                        # Its segments become part of the history without it, so it begins again.
                        yield from give_up(group, transactions[0].id)
                    yield from suspend(group, node, left, _active_places(plans))
                    return
                if transactions:
                    committed_ms = yield from CommitRound()
                    path = CommitPath.LARGE if committing.is_prepared else CommitPath.ROLLING
                    group.metrics.note_round(transactions, volumes, path, committed_ms)
                break
            except EffectRefusedError as refused:
                may_wait = not any(_is_published(roll, stream) for roll, stream, _, _ in plans)
                if not isinstance(refused.effect, (*ROUND, Look)):
                    if may_wait or node in group.waits.pending_changes:
                        yield from _leave(group, committing, refused, node)
                        return
                    yield from _give_up(group, transactions, refused, plans, committing.created_ms)
                    if not transactions:
                        break  # nothing is left to be logged: published epochs stay without the rest
                    continue
                items, ends = items_of(transactions, targets(group, committing.rolls))  # some may have been refused
                again = yield from absorb(
                    group, transactions, items, ends, refused, committing.created_ms, may_wait=may_wait
                )
                if not again:
                    yield from _undo(group, committing, node, refused.reason)
                    return
        lines = {line_of(item) for item in transactions if item.state is State.COMMITTING}
        settle(group, transactions, rolled=True)
        if began_ms is not None and lines and (yield from _linger(group, committing, began_ms, len(lines))):
            return
    yield from close_roll(group, committing, node)


def close_roll(group: GroupState, committing: CommittingTransactions, node: str) -> Steps[None]:
    """Seal the duplicates of a rolling commit that is visible, record their ends, and remove its record."""
    # All of them, unless it was given up.
    plans = [item for item in _plans(group, committing) if _is_published(item[0], item[1])]
    duplicates = _duplicate_places(plans)
    sealed, held = yield from _seal_duplicates(group, plans, committing.created_ms)
    if held:
        yield from suspend(group, node, committing, sorted(held))
        return
    group.predictor.forget(duplicates)
    for roll, stream, duplicate, _ in plans:
        places = _duplicates(stream, duplicate)
        if not sealed.keys() >= set(places.values()):
            continue
        closed = {item: sealed[place] for item, place in places.items()}
        stream.history = stream.history.with_sealed_ends(roll.new_active_epoch, closed)
        record = stream.history.record(roll.new_active_epoch)
        if not (yield from Write([SetNode(paths.epoch(stream.config.name, record.epoch), record.to_json())])):
            raise StaleStateError(f"epoch {record.epoch} of {stream.config.name} is gone")
    yield from _end(group, committing, node, reopens=len(plans) < len(committing.rolls))
    group.counts["rolling_commits"] += 1


def _end(group: GroupState, committing: CommittingTransactions, node: str, *, reopens: bool) -> Steps[None]:
    """Remove the record of a rolling commit; active segments that it has closed get successors if it ``reopens``."""
    planned: dict[str, EpochTransition] = {}
    if reopens:
        planned = yield from plan_reopening(group, committing.streams, committing.created_ms, node)
    begun = [CreateNode(path, scaling.to_json()) for path, scaling in planned.items()]
    if not (yield from Write([DeleteNode(node), *begun])):
        raise StaleStateError(f"the rolling commit of {group.name} was finished by another leader")
    yield from end_suspension(group, node)
    for path, scaling in planned.items():
        take_up_scale(group, path, scaling)


def _linger(group: GroupState, committing: CommittingTransactions, began_ms: int, lines: int) -> Steps[bool]:
    """Leave the duplicates of a rolling commit open for the next late commits, if these come in succession."""
    if not all(_is_published(roll, group.streams[roll.stream]) for roll in committing.rolls):
        return False
    now_ms = group.times.stamp((yield from Now()))
    linger_ms = group.waits.late_commits.note(committing.streams, began_ms, now_ms, lines)
    if linger_ms:
        group.waits.lingering = lingering_of(group, committing, now_ms, now_ms + linger_ms)
    return group.waits.lingering is not None


def go_on_with_roll(group: GroupState, node: str, committing: CommittingTransactions, now_ms: int) -> Steps[None]:
    """Finish a suspended rolling commit, unless it must wait longer.

    A transaction may no longer fit into it: another of its streams was scaled or deleted, or is in an error state. It
    is taken out, with later commits of its connection, and planned again.
    """
    plans = _plans(group, committing)
    unpublished = bool(_unpublished(plans))
    if unpublished and any(item.bytes not in group.fold.open for item in committing.transactions):
        # Nothing is committed yet, so these had been taken out, and ZooKeeper was set back to before that.
        committing = committing.with_only(group.fold.open)
        yield from change(group, node, committing)
    if not unpublished and (left := _still_named(group, committing)) != committing:
        committing = left
        yield from change(group, node, committing)
    transactions = open_of(group, committing)
    if unpublished or not transactions:
        places = _active_places(plans) if unpublished else _duplicate_places(plans)
        if (yield from still_held(group, node, places, now_ms)):
            return
        if unpublished and not (yield from _can_seal(places)):
            # Find that out before frames are appended, which would have to be aborted again.
            yield from suspend(group, node, committing, places)
            return
    if transactions and unpublished:
        fitting = still_fitting(group, transactions, committing.rolls)
        if len(fitting) < len(transactions):
            committing = committing.with_only({item.id for item in fitting})
            yield from change(group, node, committing)
            transactions = fitting
    yield from finish_roll(group, committing, transactions, node)


def resume_roll(group: GroupState, node: str, committing: CommittingTransactions) -> Steps[None]:
    """Finish a rolling commit that an earlier leader had begun; suspend what is left of an outdated record."""
    left = committing if committing.is_prepared else _still_named(group, committing)
    if left == committing:
        yield from finish_roll(group, committing, open_of(group, committing), node)
    else:
        yield from put_aside(group, node, left)


def _still_named(group: GroupState, committing: CommittingTransactions) -> CommittingTransactions:
    """Return the record of a rolling commit without transactions that were taken out, after ZooKeeper was set back.

    A record from before that may name transactions that have an outcome of their own since then, or that no longer fit,
    because another of their streams was scaled. Before all epochs are published the others can continue. After that
    they may have been taken out as well, and the segments for them may be closed, so they are planned again; nothing of
    them is visible.
    """
    named = [group.fold.open.get(item.bytes) for item in committing.transactions]
    left = [item for item in named if item is not None]
    if not left:
        return committing  # all were committed with it, or the record names none
    fitting = still_fitting(group, left, committing.rolls)
    kept = {item.id for item in fitting} | {item.id for item in left if item.state is State.ABORTING}
    if len(kept) == len(named):
        return committing
    return committing.with_only(kept if _unpublished(_plans(group, committing)) else ())


def _can_seal(places: Sequence[Partition]) -> Steps[bool]:
    """Seal partitions; return False if native transactions of others are open on some. The roll handles a refusal."""
    try:
        return len((yield from Seal(places))) == len(places)
    except EffectRefusedError:
        return True


def _seal_duplicates(
    group: GroupState, plans: Sequence[_Plan], now_ms: int
) -> Steps[tuple[Mapping[Partition, int], frozenset[Partition]]]:
    """Seal the duplicates; return their ends, and the partitions on which native transactions of others are open.

    A stream whose seal is refused is in neither: it gets an error state, in which the seal is retried; see
    :mod:`rollbridge_coordinator.commit.refusals`.
    """
    places = [list(_duplicates(stream, duplicate).values()) for _, stream, duplicate, _ in plans]
    everything = [place for own in places for place in own]
    try:
        sealed = yield from Seal(everything)
        return sealed, frozenset(everything) - sealed.keys()
    except EffectRefusedError:
        ends: dict[Partition, int] = {}
        held: set[Partition] = set()
    for (roll, *_), own in zip(plans, places, strict=True):
        try:
            sealed = yield from Seal(own)
        except EffectRefusedError as refused:
            reason = f"the segments of a rolling commit cannot be sealed, readers wait there: {refused.reason}"
            yield from note_fault(group, roll.stream, reason, refused, now_ms)
        else:
            ends.update(sealed)
            held.update(set(own) - sealed.keys())
    return ends, frozenset(held)


def _append(
    group: GroupState,
    committing: CommittingTransactions,
    transactions: Sequence[BufferedTransaction],
    plans: Sequence[_Plan],
    node: str,
) -> Steps[Volumes | None]:
    """Do all steps before the commit of the round; return what it commits, None if a seal has to wait.

    The round is empty then.
    """
    # Once one stream is published all topics had been created; if one is gone since, its transactions are refused.
    if not any(_is_published(roll, stream) for roll, stream, _, _ in plans):
        yield from CreateTopics(
            [
                segment_topic_spec(stream.config, item)
                for _, stream, duplicate, fresh in plans
                for item in sorted((duplicate.segment_ids | fresh.segment_ids) - stream.history.active.segment_ids)
            ]
        )
    aims = targets(group, committing.rolls)
    is_refused = bool(transactions) and not kept_of(transactions)
    # A suspended roll has closed segments, which need successors.
    if is_refused and node not in group.waits.pending_changes:
        return (yield from append_round(group, transactions, aims, committing.created_ms))
    # Conditions are about the final content of the active segments, so these are sealed before the look.
    # Also where the records are appended already: they are part of the round from the moment it is taken up.
    first_seal = committing.is_prepared or any(map(conditions_of, transactions))
    if (first_seal or not transactions) and not (yield from _publish_once(group, plans)):
        return None
    if not transactions:
        return {}
    rolled = {
        roll.stream: Before(stream.history.before(roll.duplicate_epoch), stream.history) for roll, stream, _, _ in plans
    }
    if committing.is_prepared:
        return (yield from append_prepared(group, transactions[0], aims, committing.created_ms, rolled))
    volumes = yield from append_round(group, transactions, aims, committing.created_ms, rolled)
    if first_seal or (yield from _publish_once(group, plans)):
        return volumes
    yield from AbortRound()
    group.forget_round()
    return None


def _give_up(
    group: GroupState,
    transactions: Sequence[BufferedTransaction],
    refused: EffectRefusedError,
    plans: Sequence[_Plan],
    now_ms: int,
) -> Steps[None]:
    """Refuse the transactions: one stream is refused while epochs of another are published already."""
    yield from AbortRound()
    group.forget_round()
    reason = f"its rolling commit is refused: {refused.reason}"
    for transaction in transactions:
        if transaction.state is State.COMMITTING:
            refuse(group, transaction, reason, now_ms)
    for roll, stream, _, _ in plans:
        if not _is_published(roll, stream):
            yield from note_fault(group, roll.stream, reason, refused, now_ms)


def _leave(
    group: GroupState, committing: CommittingTransactions, refused: EffectRefusedError, node: str
) -> Steps[None]:
    """Put the stream whose topic cannot be created or sealed into an error state, so that all others continue.

    If the refusal does not name a stream of the rolling commit, all of its streams wait.
    """
    yield from AbortRound()
    group.forget_round()
    reason = f"its transactions need a rolling commit, which is refused: {refused.reason}"
    guilty = (group.stream_of(refused.topic) if refused.topic else None) or ""
    for name in [guilty] if guilty in committing.streams else committing.streams:
        yield from note_fault(group, name, reason, refused, committing.created_ms)
    yield from _undo(group, committing, node, refused.reason)


def _undo(group: GroupState, committing: CommittingTransactions, node: str, reason: str) -> Steps[None]:
    """Give up a rolling commit of which nothing is visible yet; its transactions are planned again.

    Active segments that it has closed get successors all the same, or plain writers would search for these forever: a
    suspended roll continues without transactions, for others see :mod:`rollbridge_coordinator.streams.pending_changes`.
    """
    if node in group.waits.pending_changes:
        if committing.transactions:
            yield from change(group, node, committing.with_only(()))
        yield from postpone(group, node, reason)
        return
    yield from _end(group, committing, node, reopens=True)
    group.counts["rolling_commits_undone"] += 1


def _is_published(roll: Roll, stream: LedStream) -> bool:
    return stream.history.active.epoch >= roll.duplicate_epoch


def _unpublished(plans: Sequence[_Plan]) -> list[_Plan]:
    return [plan for plan in plans if not _is_published(plan[0], plan[1])]


def _plans(group: GroupState, committing: CommittingTransactions) -> list[_Plan]:
    return [
        (roll, group.streams[roll.stream], *_epochs(group, roll, committing.created_ms)) for roll in committing.rolls
    ]


def _active_places(plans: Sequence[_Plan]) -> list[Partition]:
    return [
        place
        for _, stream, duplicate, _ in _unpublished(plans)
        for place in stream.places_of(stream.history.ending_with(duplicate)).values()
    ]


def _duplicate_places(plans: Sequence[_Plan]) -> list[Partition]:
    return [place for _, stream, duplicate, _ in plans for place in _duplicates(stream, duplicate).values()]


def _duplicates(stream: LedStream, duplicate: EpochRecord) -> dict[SegmentId, Partition]:
    """Return the segments that a published epoch has made for transactions, and their partitions."""
    return stream.places_of(stream.history.began_with(duplicate.epoch))


def _publish_once(group: GroupState, plans: Sequence[_Plan]) -> Steps[bool]:
    """Seal the active segments and publish both epochs of every stream that lacks them.

    Returns:
        False, with nothing published now, if native transactions of others keep segments from being sealed.
    """
    left = _unpublished(plans)
    if not left:
        return True
    places = _active_places(plans)
    ends = yield from Seal(places)
    if len(ends) < len(places):
        return False
    operations: list[CreateNode] = []
    histories: list[tuple[LedStream, EpochHistory]] = []
    for _, stream, duplicate, fresh in left:
        name = stream.config.name
        replaced = stream.places_of(stream.history.ending_with(duplicate))
        closed = {item: ends[place] for item, place in replaced.items()}
        complete = replace(duplicate, sealed_ends=closed)
        own = [CreateNode(paths.epoch(name, item.epoch), item.to_json()) for item in (complete, fresh)]
        if operations and sum(map(bytes_of, (*operations, *own))) > ROLL_BYTES_MAX:
            yield from _publish(operations, histories)
            operations, histories = [], []
        operations += own
        histories.append((stream, stream.history.with_records(complete, fresh)))
    yield from _publish(operations, histories)
    group.predictor.forget(places)
    return True


def _publish(operations: Sequence[CreateNode], histories: Sequence[tuple[LedStream, EpochHistory]]) -> Steps[None]:
    if not (yield from Write(operations)):
        raise StaleStateError("an epoch of the rolling commit exists already")
    for stream, history in histories:
        stream.history = history


def _epochs(group: GroupState, roll: Roll, created_ms: int) -> tuple[EpochRecord, EpochRecord]:
    stream = group.streams[roll.stream]
    history = stream.history
    if history.active.epoch >= roll.new_active_epoch:
        return history.record(roll.duplicate_epoch), history.record(roll.new_active_epoch)
    duplicate, again = history.plan_rolling(roll.transaction_epoch, created_ms, roll.numbers, roll.prepared)
    if not any(map(stream.config.places.is_adopted, again.segment_ids)):  # the limits of a topic go by its root epoch
        again = history.renewed(again, group.settings.epochs_keep_ms)
    return duplicate, again


# Lingering: merge further late commits into the duplicates of a rolling commit, before these are sealed.
#
# :mod:`rollbridge_coordinator.core.state` says how long they stay open. Until they are sealed the record of the
# rolling commit is in ZooKeeper, so the next leader seals them at once. Everything else that needs their ends, or the
# one place of such records, ends it first: requests, conditions, another rolling commit, a stream in an error state.


def merge_late(group: GroupState, transactions: Sequence[BufferedTransaction], now_ms: int) -> Steps[None]:
    """Merge late commits into lingering duplicates; seal these instead if a segment that continues them has new
    records.

    The check comes after the commits were requested. So records written there later, or unseen, were concurrent with
    the commits, or came later, and may follow them.
    """
    lingering = group.waits.lingering
    if lingering is None or (yield from _is_written_behind(lingering)):
        yield from end_linger(group)
        return
    began_ms = group.times.stamp((yield from Now()))
    if not (yield from merge_direct(group, transactions, now_ms, lingering.committing.rolls)):
        return
    ended_ms = group.times.stamp((yield from Now()))
    group.waits.late_commits.note(
        lingering.committing.streams, began_ms, ended_ms, len(set(map(line_of, transactions)))
    )
    group.counts["late_commits_merged"] += len(transactions)
    lingering.prolong(ended_ms, group.settings.late_commit_window_ms)


def watch_linger(group: GroupState) -> Steps[None]:
    """Seal lingering duplicates if their time is over, or if readers have something to read behind them."""
    lingering = group.waits.lingering
    if lingering is None:
        return
    now_ms = group.times.stamp((yield from Now()))
    if lingering.is_over(now_ms) or (yield from _is_written_behind(lingering)):
        yield from end_linger(group)


def end_linger(group: GroupState) -> Steps[None]:
    """Seal lingering duplicates, if any; this ends their rolling commit."""
    lingering, group.waits.lingering = group.waits.lingering, None
    if lingering is None:
        return
    if not lingering.is_used:
        group.waits.late_commits.was_in_vain(lingering.committing.streams)
    yield from close_roll(group, lingering.committing, paths.committing(group.name))


def _is_written_behind(lingering: Lingering) -> Steps[bool]:
    return any((yield from EndOffsets(lingering.places)).values())
