"""Takeover: fence the old leader, restore the state of the group, and finish what the old leader left.

The order matters: the controller epoch has been raised before, which every later ZooKeeper write checks; then the Kafka
transactional ids are taken, which fences the old leader in Kafka and aborts what it left open; only then the logs are
read, because no other leader can change them any more.

The state comes from the snapshots of the buffers, and from reading the buffers and the commit log on from there; or
from the warm tail of a standby.

Source: PDP-24 (the temporary node), PIP-196 (recovery; the format without segments is read where there is no index);
Kafka's controller epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import replace
from typing import Final

from rollbridge.errors import CorruptDataError
from rollbridge.model import paths
from rollbridge.model.buffer import BufferFold
from rollbridge.model.changes import EpochTransition
from rollbridge.model.ended import ended_key
from rollbridge.model.ids import TransactionId
from rollbridge.model.names import GroupName, Partition
from rollbridge.model.ongoing import OngoingTransactions, choose_ongoing, ongoing_keys
from rollbridge.model.pieces import LateBegin
from rollbridge.model.records import Group, SetNode
from rollbridge.model.replay import BufferPlace, log_start
from rollbridge.model.snapshots import AbortedTransactions, Snapshot, choose, index_keys, partition_name, segment_key
from rollbridge.model.transaction import State
from rollbridge_coordinator.procedures.commit_log import learn_ended, load_log, may_have_ended, restore_ended
from rollbridge_coordinator.procedures.counters import look_at_counter, look_at_shared, open_counter
from rollbridge_coordinator.procedures.journal import (
    check_birth,
    check_journal,
    check_mark,
    keep_journal,
    open_journal,
    refuse,
)
from rollbridge_coordinator.procedures.outcomes import open_preserver
from rollbridge_coordinator.procedures.preparing import load_merging
from rollbridge_coordinator.procedures.refusals import unsealed_fault
from rollbridge_coordinator.procedures.rolling import resume_roll
from rollbridge_coordinator.procedures.scale import finish_scale
from rollbridge_coordinator.procedures.sessions import load_sessions
from rollbridge_coordinator.procedures.snapshots import drop_aborted, in_batches, load_segments
from rollbridge_coordinator.procedures.suspended import halt, load_suspended, put_aside, read_change, take_up
from rollbridge_coordinator.procedures.unled import end_lost, ensure_slots, load_streams, show_unled
from rollbridge_coordinator.state.effects import (
    CreateTopics,
    EffectRefusedError,
    EndOffsets,
    EnsureNodes,
    LogSummary,
    Now,
    ReadChildren,
    ReadCommitLog,
    ReadCompacted,
    ReadEnded,
    ReadNodes,
    ReadOrders,
    StartOffsets,
    Steps,
    TakeIdentity,
    TopicIds,
    Write,
    confirm_leadership,
    read_children,
    read_node,
)
from rollbridge_coordinator.state.faults import StaleStateError
from rollbridge_coordinator.state.group import GroupState, LeaderSettings
from rollbridge_coordinator.state.metrics import Op
from rollbridge_coordinator.state.snapshots import SINGLE_BYTES_MAX, Needed, PartitionSnapshots
from rollbridge_coordinator.state.streams import commit_log_topic_spec
from rollbridge_coordinator.state.succession import Times
from rollbridge_coordinator.state.warm import WarmTail

# Restore


def restore_snapshots(group: GroupState) -> Steps[int]:
    """Load the snapshots of the group's buffers, so that folding goes on where they end.

    Returns:
        Offset from which the commit log holds every outcome that the snapshots do not cover.
    """
    state = group.snapshots
    configs = {partition: item.config for item in group.streams.values() for partition in item.partitions()}
    log_place = group.commit_log, 0
    state.topics = set((yield from TopicIds([state.segments_topic, state.indexes_topic, state.single_topic])))
    found: dict[str, Mapping[bytes, bytes]] = {}
    for topic in (state.indexes_topic, state.single_topic):
        found[topic] = (yield from ReadCompacted(topic)) if topic in state.topics else {}
    ends = yield from EndOffsets([*sorted(configs), log_place])
    starts = yield from StartOffsets([*sorted(configs), log_place])
    log_end = ends[log_place]
    places: dict[Partition, BufferPlace] = {}
    for partition, config in configs.items():
        topic_id = config.buffer_topic_id
        known = state.of(partition, topic_id)
        known.log_start = starts[partition]
        keys = [(topic, key) for topic in found for key in index_keys(partition)]
        values = [found[topic].get(key) for topic, key in keys]
        choice = choose(values, partition, topic_id, ends[partition], log_end)
        state.metrics.index_ops[Op.READ] += sum(value is not None for value in values)
        for at, fault in choice.faults.items():
            name = partition_name(partition)
            state.warn(
                f"a snapshot of {name} is not usable: {fault}; an older one or the buffer itself is used instead"
            )
            known.remains += (keys[at],)
            known.changes += 1
        ongoing = None
        if choice.snapshot is not None:
            yield from _adopt(group, partition, known, choice.snapshot, found)
            ongoing = _choose_ongoing(group, partition, known, choice.snapshot, found[state.index_topic])
        place = BufferPlace(topic_id, str(config.name), choice.snapshot, ongoing, starts[partition], ends[partition])
        if ongoing is not None:
            known.spared = Needed(ongoing.replay_position, place.log_floor(log_end))
        group.fold.positions[partition] = place.floor
        places[partition] = place
    first = group.housekeeping.starts[log_place] = starts[log_place]
    key = ended_key(group.name)
    lists = [(topic, rows[key]) for topic, rows in found.items() if key in rows]
    group.fold.ended = yield from restore_ended(group, lists, first, log_end)
    return max(log_start(places, log_end, 0), first)


def restore_ongoing(group: GroupState, terminated: Container[bytes], followed: Container[Partition]) -> None:
    """Restore the recorded ongoing transactions that have no outcome, except in ``followed`` partitions.

    No frame of the other partitions has been folded yet.
    """
    streams = group.partitions()
    records = [item for item in group.snapshots.ongoing if item.partition not in followed]
    for record in records:
        partition = record.partition
        for item in record.transactions:
            if item.id in terminated:
                group.fold.note_late(item.id, item.begin.streams, partition, item.first_position)
            else:
                group.fold.restore(streams[partition], partition, item)
                group.begun.add(item.id)  # only transactions with a BEGIN record are recorded as ongoing
    group.snapshots.metrics.ongoing_ops[Op.READ] += len(records)
    group.snapshots.ongoing.clear()


def finish_restore(group: GroupState) -> Steps[None]:
    """Settle transactions that turned up in the rest of the buffers, which are folded up to the takeover's ends."""
    summary, group.snapshots.summary = group.snapshots.summary, LogSummary({}, frozenset())
    late = group.fold.late or {}
    for transaction, offset in summary.terminated.items():
        begun = late.get(transaction)
        if begun is not None:
            _note_late(group, transaction, begun, offset, is_aborted=transaction in summary.aborted)
    _drop_ended(group)
    yield from drop_aborted(group, list(group.fold.open.values()))
    learn_ended(group, summary.terminated)
    group.fold.caught_up()
    group.fold.log_position = summary.end


def _drop_ended(group: GroupState) -> None:
    """Drop what seems open and has ended so long ago that the commit log was not read back to its outcome.

    Where somebody else has deleted that part of it, drop what may have ended: a transaction that is on record is open
    if nobody has asked for its end.
    """
    ended = group.fold.ended
    assert ended is not None
    for transaction in [
        item.id
        for item in group.fold.open.values()
        if item.id in ended
        or ended.is_lost(item.id, item.begun_ms, item.begin.client_name)
        or may_have_ended(group, item.id, item.begin.client_name, is_open=item.state is State.OPEN)
    ]:
        group.fold.discard(transaction)
        group.counts["transactions_ended_long_ago"] += 1


def _note_late(group: GroupState, transaction: bytes, begun: LateBegin, offset: int, *, is_aborted: bool) -> None:
    """Note an outcome from the commit log whose transaction was met again in the buffers."""
    identifier = TransactionId.from_bytes(transaction)
    for partition in group.buffers_of(identifier, begun.streams):
        known = group.snapshots.partitions[partition]
        if offset >= known.log_end:
            known.changes += 1
            if is_aborted:
                position = group.fold.positions.get(partition, 0)
                known.aborted.add(transaction, begun.first_offsets.get(partition, position), position)


def _adopt(
    group: GroupState,
    partition: Partition,
    known: PartitionSnapshots,
    snapshot: Snapshot,
    found: Mapping[str, Mapping[bytes, bytes]],
) -> Steps[None]:
    """Adopt the content of a snapshot; one in the other format is replaced by the next that is taken."""
    state = group.snapshots
    known.aborted = AbortedTransactions.of(snapshot)
    known.generation = snapshot.generation
    known.needed = Needed(snapshot.max_read_position, snapshot.commit_log_position)
    known.log_end = snapshot.commit_log_end
    known.is_restored = True
    other = state.single_topic if state.segmented else state.indexes_topic
    keys = (*index_keys(partition), *ongoing_keys(partition))
    remains = [(other, key) for key in keys if key in found[other]]
    if not state.segmented and snapshot.indexes:
        aborted = AbortedTransactions()
        for indexes in in_batches(snapshot.indexes):
            segments = yield from load_segments(group, partition, indexes)
            for index, ids in zip(indexes, segments, strict=True):
                for transaction in sorted(ids):
                    aborted.add(transaction, index.first_position, index.max_read_position)
        for transaction, (first, last) in known.aborted.unsealed.items():
            aborted.add(transaction, first, last)
        aborted.sequence_id = snapshot.sequence_id
        if aborted.encoded.size <= SINGLE_BYTES_MAX:
            known.aborted = aborted
            remains += [(state.segments_topic, segment_key(partition, index.sequence_id)) for index in snapshot.indexes]
        else:
            state.warn(f"the single snapshot of {partition_name(partition)} would be too large: its segments are kept")
    known.remains += tuple(remains)
    known.changes += len(remains)
    known.is_other_format = bool(remains)


def _choose_ongoing(
    group: GroupState,
    partition: Partition,
    known: PartitionSnapshots,
    snapshot: Snapshot,
    found: Mapping[bytes, bytes],
) -> OngoingTransactions | None:
    """Return the record of ongoing transactions to read on from, None if that saves nothing."""
    state = group.snapshots
    keys = ongoing_keys(partition)
    choice = choose_ongoing([found.get(key) for key in keys], snapshot)
    for place, fault in choice.faults.items():
        state.warn(
            f"a record of the ongoing transactions of {partition_name(partition)} is not usable: {fault}; more of the "
            "buffer is read instead"
        )
        known.remains += ((state.index_topic, keys[place]),)
        known.changes += 1
    if choice.record is not None:
        known.ongoing_place = 1 - choice.place
        state.ongoing.append(choice.record)
    return choice.record


ORDERS_READ: Final = 100_000
"""Outcomes at the end of the commit log that are read for commit numbers, if any commit waits for earlier ones."""

NOTHING_UNREADABLE: Final[Mapping[str, str]] = {}
MakeFold = Callable[[Collection[bytes]], BufferFold]
"""Factory of an empty fold that drops frames of the transactions in a collection, which may grow until it folds."""


def take_over(
    name: GroupName,
    controller_epoch: int,
    make_fold: MakeFold,
    settings: LeaderSettings,
    *,
    replication_factor: int = -1,
    tail: WarmTail | None = None,
    unreadable: Mapping[str, str] = NOTHING_UNREADABLE,
    times: Times | None = None,
) -> Steps[tuple[GroupState, dict[Partition, int]]]:
    """Become the leader of a group.

    Args:
        name: Group to lead.
        controller_epoch: Epoch that this leader has taken.
        make_fold: Factory of the fold of the buffers.
        settings: Settings of the leader.
        replication_factor: Replication factor of new topics; -1 is the brokers' default.
        tail: Tail that a standby has followed, used if it fits; the caller must not use it afterwards.
        unreadable: Buffers that earlier takeovers of this process could not read, with the reasons.
        times: How ZooKeeper's clock differs; not at all by default.

    Returns:
        State of the group, and the buffer offsets to fold before :func:`finish_pending`.

    Raises:
        CorruptDataError: an internal topic was deleted and created again.
        ZooKeeperOutdatedError: ZooKeeper was set back.
    """
    yield from TakeIdentity(name)
    yield from EnsureNodes(paths.group_skeleton(name))
    preserver, journal = yield from open_preserver(name, settings, replication_factor)
    terminated: dict[bytes, int] = {}
    group = GroupState(name, controller_epoch, make_fold(terminated), settings)
    group.times = times or Times()
    group.preserver = preserver
    group.journal.nodes = journal
    yield from _check_commit_log(group, replication_factor)
    yield from check_mark(group)
    yield from load_streams(group, unreadable)
    yield from check_journal(group, next_epoch=group.controller_epoch)
    yield from open_counter(group)
    yield from ensure_slots(group)
    yield from load_suspended(group)
    yield from load_merging(group)
    raw = yield from read_node(paths.scaling(name))
    yield from _load_records(group)
    yield from load_sessions(group)
    yield from confirm_leadership()
    yield from _read_logs(group, terminated, replication_factor, tail)
    if raw is not None:
        yield from _finish(group, paths.scaling(name), raw)
    ends = yield from EndOffsets(sorted(group.partitions()))
    return group, dict(ends)


def finish_pending(group: GroupState) -> Steps[None]:
    """Finish the rolling commit of an earlier leader, once the buffers are folded up to the takeover's offsets."""
    group.fold.fresh = list(group.fold.open)  # checked with the first work, after the pending rolling commit
    yield from finish_restore(group)
    if group.fold.lines:
        # Commits wait for earlier ones of their connections, which may have an outcome and not be read again.
        group.fold.learn_order((yield from ReadOrders(group.commit_log, ORDERS_READ)))
    raw = yield from read_node(paths.committing(group.name))
    yield from confirm_leadership()
    if raw is not None:
        yield from _finish(group, paths.committing(group.name), raw)
    waiting = yield from end_lost(group, group.times.stamp((yield from Now())))
    yield from show_unled(group)
    for name, stream in group.streams.items():
        if stream.history.unsealed() and group.faults.get(name) is None:
            group.faults.restore(name, unsealed_fault(0))
    group.fold.fences.caught_up()
    gone = [item for item in group.recorded if item not in group.fold.open and item not in waiting]
    group.finished.extend(gone)
    group.recorded.difference_update(gone)
    group.begun &= group.fold.open.keys()
    yield from open_journal(group)


def _finish(group: GroupState, node: str, raw: bytes) -> Steps[None]:
    """Finish a change that an earlier leader had begun; one that cannot be finished now is suspended."""
    work = yield from read_change(group, node, raw)
    if work is None:
        return
    if not group.unled.keys().isdisjoint(work.streams):
        take_up(group, (yield from put_aside(group, node, work)), work)
        return
    try:
        if isinstance(work, EpochTransition):
            yield from finish_scale(group, work, node)
        else:
            yield from resume_roll(group, node, work)
    except (EffectRefusedError, CorruptDataError) as fault:
        yield from halt(group, node, work, fault)


def check_again(group: GroupState) -> Steps[None]:
    """Compare ZooKeeper with the journal and the counters in the middle of a term, after the connection was away.

    A ZooKeeper that was set back meanwhile may still know the session.

    Raises:
        ZooKeeperOutdatedError: ZooKeeper has lost something that it knew.
        StaleStateError: ZooKeeper holds a change that this leader has finished, or lacks one that it has not.
    """
    yield from keep_journal(group)  # so that the journal holds all that this leader has written to ZooKeeper
    yield from check_journal(group, next_epoch=group.controller_epoch + 1)
    yield from look_at_counter(group)
    yield from look_at_shared(group)
    under_way = yield from ReadNodes([paths.committing(group.name), paths.scaling(group.name)])
    known = None if group.lingering is None else group.lingering.committing.to_json()
    parent = paths.suspended(group.name)
    halted = {f"{parent}/{title}" for title in (yield from read_children(parent))}
    expected = {paths.committing(group.name): known, paths.scaling(group.name): None}
    if under_way != expected or halted != group.suspended.keys():
        raise StaleStateError(f"ZooKeeper does not hold what the leader of {group.name} has under way")


def _read_logs(
    group: GroupState, terminated: dict[bytes, int], replication_factor: int, tail: WarmTail | None
) -> Steps[None]:
    """Load the snapshots of the buffers, and the part of the commit log that neither they nor the tail cover.

    Its outcomes are put into ``terminated``, by which the fold drops frames.

    Raises:
        StaleStateError: somebody has deleted the log, or records of it, meanwhile.
    """
    group.snapshots.replication_factor = replication_factor
    start = yield from restore_snapshots(group)
    ended, first = group.fold.ended, group.housekeeping.starts[group.commit_log, 0]
    assert ended is not None
    summary = yield from _go_on(group, start, tail)
    followed = tail.partitions if tail is not None and summary is not None else ()
    if summary is None:
        again = min(start - group.settings.outcomes_again, ended.log_end)
        summary = yield from ReadCommitLog(group.commit_log, max(again, first))
        terminated.update(summary.terminated)
        group.fold.late, group.fold.late_streams = {}, group.streams.keys()
    elif tail is not None and tail.log_start > ended.log_end:
        ended.merge((yield from ReadEnded(group.commit_log, ended.log_end, tail.log_start)))
    starts = yield from StartOffsets([(group.commit_log, 0)])
    ids = yield from TopicIds([group.commit_log])
    if starts[group.commit_log, 0] > first or ids.get(group.commit_log) != group.log.topic_id:
        raise StaleStateError(f"commit log {group.commit_log}, or records of it, were deleted while it was read")
    group.fold.ended = ended
    group.fold.log_position = start
    group.begun = set(summary.begun)
    restore_ongoing(group, summary.terminated, followed)
    group.snapshots.summary = summary


def _go_on(group: GroupState, start: int, tail: WarmTail | None) -> Steps[LogSummary | None]:
    """Go on from a tail that fits; return the summary of the commit log to its end, None without such a tail."""
    if tail is None:
        return None
    topic_ids = {
        partition: item.config.buffer_topic_id for item in group.streams.values() for partition in item.partitions()
    }
    first = group.housekeeping.starts[group.commit_log, 0]
    if tail.log_end >= first and tail.fits(topic_ids, group.fold.positions, start):
        tail.follow((yield from ReadCommitLog(group.commit_log, tail.log_end)))
        if len(tail.fold.open) <= group.fold.limits.open_transactions_max and not tail.contradicts(group.fold.fences):
            known = group.snapshots.partitions.values()
            # Begin where the recorded ongoing transactions began, which is before the start.
            since = min([start, *(item.needed.log_position for item in known if item.spared is not None)])
            summary = tail.hand_over(group.fold, since)
            group.fold, group.buffer_epochs = tail.fold, tail.epochs
            group.counts["takeovers_warm"] += 1
            return summary
    group.counts["takeovers_tail_unfit"] += 1
    return None


def _check_commit_log(group: GroupState, replication_factor: int) -> Steps[None]:
    """Create the commit log of a new group, or check that the known one is the same topic.

    Raises:
        CorruptDataError: the commit log was deleted and created again, or ZooKeeper does not know it.
        ZooKeeperOutdatedError: the group was led before, and ZooKeeper was set back.
    """
    name = group.name
    raw = yield from read_node(paths.group(name))
    if raw is None:
        raise StaleStateError(f"group {name} is gone")
    known = Group.from_json(raw)
    if not known.commit_log_topic_id:
        ids = yield from CreateTopics([commit_log_topic_spec(name, replication_factor)])
        ends = yield from EndOffsets([(name.commit_log_topic, 0)])
        if ends[name.commit_log_topic, 0] > 0:
            yield from check_birth(group)
            raise CorruptDataError(
                f"commit log {name.commit_log_topic} holds records, but ZooKeeper has no record of it: ZooKeeper was "
                "wiped, or another zookeeper_root is meant. Ids of transactions would be given out again, so nothing "
                "was written. Restore ZooKeeper from a backup; or, to begin anew without the data of scope "
                f"{name.scope}, delete its topics: kafka-topics.sh --delete --topic '{name.scope}[.].*'"
            )
        fresh = replace(known, commit_log_topic_id=ids[name.commit_log_topic])
        if not (yield from Write([SetNode(paths.group(name), fresh.to_json())])):
            raise StaleStateError(f"group {name} is gone")
        known = fresh
    else:
        topic, identity = name.commit_log_topic, known.commit_log_topic_id
        found = (yield from TopicIds([topic])).get(topic)
        if found != identity:
            journaled = group.journal.nodes.get(paths.group(name))
            if journaled is not None and Group.from_json(journaled).commit_log_topic_id == found:
                yield from refuse(group, [f"commit log {topic} was begun anew, ZooKeeper knows the one before"])
            is_what = "does not exist" if found is None else f"has id {found}, and {identity} is on record"
            raise CorruptDataError(
                f"commit log {topic} {is_what}: it was deleted, and with it what has become of transactions; nothing "
                f"was written; `rollbridge repair --commit-log {name}` begins it anew, without what is open"
            )
    yield from load_log(group, known)


def _load_records(group: GroupState) -> Steps[None]:
    buckets = [f"{paths.transactions(group.name)}/{number:02x}" for number in range(paths.BUCKETS)]
    names = yield from ReadChildren(buckets)
    group.recorded.update(TransactionId.parse(item).bytes for items in names.values() for item in items)
