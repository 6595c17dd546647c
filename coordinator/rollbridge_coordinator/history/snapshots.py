"""Snapshots: write those that are due, delete them, restore from them, and look up long aborted transactions in them.

:mod:`rollbridge_coordinator.history.takeover` says when they are restored.

Snapshots are written inside native transactions of the leader's own transactional ids. So a deposed leader is fenced
from writing one; segments and the index that names them become visible together or not at all; and no record of an
older leader can replace a newer one's under the same key when the topic is compacted.

Source: PIP-196, "check whether a transaction message is sent by an aborted transaction" for the look-up.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.buffer.replay import (
    BufferPlace,
    OngoingTransactions,
    choose_ongoing,
    is_ongoing,
    log_start,
    look_up,
    ongoing_keys,
)
from rollbridge.buffer.snapshots import (
    AbortedTransactions,
    SegmentIndex,
    Snapshot,
    choose,
    index_keys,
    partition_name,
    segment_key,
    segment_of,
)
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.commitlog.outcomes import ended_key
from rollbridge.errors import CorruptDataError
from rollbridge.stream.names import Partition
from rollbridge_coordinator.core.effects import (
    AppendMessages,
    CommitRound,
    CreateTopics,
    EndOffsets,
    Messages,
    ReadCompacted,
    ReadRecords,
    StartOffsets,
    TopicIds,
)
from rollbridge_coordinator.core.metrics import Op
from rollbridge_coordinator.core.state import GroupState, needed_with, plan_ongoing
from rollbridge_coordinator.core.stream_state import compacted_topic_spec
from rollbridge_coordinator.core.waits import StaleStateError
from rollbridge_coordinator.history.snapshot_plan import (
    SINGLE_BYTES_MAX,
    Marks,
    Needed,
    PartitionSnapshots,
    SnapshotPlan,
)

SNAPSHOTS_PER_ROUND: Final = 32
"""Most snapshots in one round; each may have a segment and an index of a quarter of a megabyte."""


def take_snapshots(group: GroupState, now_ms: int) -> Steps[None]:
    """Write the snapshots that are due, in one native transaction."""
    note_joined_late(group)
    due = group.snapshots.due(now_ms, group.fold.positions, group.fold.log_position)[:SNAPSHOTS_PER_ROUND]
    if due:
        yield from write_snapshots(group, due, now_ms)


def write_snapshots(group: GroupState, partitions: Iterable[Partition], now_ms: int) -> Steps[None]:
    """Write snapshots of partitions, in one native transaction."""
    note_joined_late(group)
    state = group.snapshots
    yield from ensure_topics(group)
    log_end = (yield from EndOffsets([(group.commit_log, 0)]))[group.commit_log, 0]
    low, floor = group.fold.low_water(), group.fold.log_floor()
    plans: list[SnapshotPlan] = []
    for partition in partitions:
        position = group.fold.positions.get(partition, state.partitions[partition].log_start)
        marks = Marks(position, low.get(partition, position), min(floor.get(partition, log_end), log_end), log_end)
        plan = state.plan(partition, marks, group.controller_epoch, now_ms)
        if plan is not None:
            plans.append(plan)
    if not plans:
        return
    ongoing = [plan_ongoing(group, plan) for plan in plans]
    written = yield from _append(group, plans, [item for item in ongoing if item is not None])
    yield from CommitRound()
    for plan, snapshot, record in zip(plans, written, ongoing, strict=True):
        known = state.partitions[plan.partition]
        known.spared = needed_with(known, plan)
        if record is not None:
            known.spared = Needed(record.replay_position, record.commit_log_position)
            known.ongoing_place = 1 - known.ongoing_place
        state.taken(plan, snapshot)
    # Transactions that are folded from here on have their outcomes later in the commit log than this.
    group.fold.log_position = log_end


def clear_snapshots(group: GroupState, partitions: Iterable[Partition]) -> Steps[None]:
    """Delete all snapshots of partitions in every format, found by their keys, so no index is needed."""
    wanted = list(partitions)
    state = group.snapshots
    known = yield from TopicIds([state.segments_topic, state.indexes_topic, state.single_topic])
    doomed: list[tuple[str, bytes]] = []
    for topic in sorted(known):
        keys = yield from ReadCompacted(topic)
        doomed += [(topic, key) for key in keys if any(state.is_of(key, item) for item in wanted)]
    if doomed:
        yield from _append_tombstones(group, doomed)
        yield from CommitRound()
    state.forget(wanted)


def note_settled(group: GroupState, transaction: BufferedTransaction, *, is_aborted: bool) -> None:
    """Note the outcome of a transaction, for the next snapshots of its partitions."""
    state = group.snapshots
    if is_aborted:
        for partition in group.buffers_of(transaction.transaction_id, transaction.begin.streams):
            position = group.fold.positions.get(partition, 0)
            first = transaction.first_offsets.get(partition, position)
            known = state.partitions[partition]
            known.aborted.add(transaction.id, first, position)
            known.changes += 1
    else:
        for partition in transaction.first_offsets:
            known = state.partitions[partition]
            known.changes += 1


def note_joined_late(group: GroupState) -> None:
    """Note, for the next snapshots, further buffers with frames of aborted transactions.

    They were not known to have joined when the transactions were aborted.
    """
    found, group.fold.joined_late = group.fold.joined_late, []
    for transaction, partition, offset in found:
        known = group.snapshots.partitions.get(partition)
        if known is not None:
            known.aborted.add(transaction, offset, group.fold.positions.get(partition, offset + 1))
            known.changes += 1


def _append(group: GroupState, plans: list[SnapshotPlan], ongoing: list[OngoingTransactions]) -> Steps[list[Snapshot]]:
    """Append segments, indexes and tombstones; nothing is visible before the round is committed."""
    state = group.snapshots
    segments = [item for plan in plans for item in plan.segments]
    doomed = [
        (state.segments_topic, segment_key(plan.partition, item.sequence_id)) for plan in plans for item in plan.expired
    ]
    for plan in plans:
        known = state.partitions[plan.partition]
        doomed += known.remains
        if known.spared is not None and needed_with(known, plan) is None:
            doomed += [(state.index_topic, key) for key in ongoing_keys(plan.partition)]
    if doomed:
        yield from _append_tombstones(group, doomed)
    offsets: list[int] = []
    if segments:
        offsets = list(
            (yield from AppendMessages(Messages(state.segments_topic, [(i.key, i.encode()) for i in segments])))
        )
    state.metrics.segment_ops[Op.ADD] += len(segments)
    snapshots: list[Snapshot] = []
    for plan in plans:
        own, offsets = offsets[: len(plan.segments)], offsets[len(plan.segments) :]
        snapshots.append(plan.snapshot(own))
    records = [(item.key, item.encode(plan.ids)) for item, plan in zip(snapshots, plans, strict=True)]
    beside = [
        (ongoing_keys(item.partition)[state.partitions[item.partition].ongoing_place], item.encode())
        for item in ongoing
    ]
    yield from AppendMessages(Messages(state.index_topic, records + beside))
    for _, value in records:
        state.metrics.note_entry(len(value))
    state.metrics.ongoing_ops[Op.ADD] += len(beside)
    return snapshots


def _append_tombstones(group: GroupState, doomed: Iterable[tuple[str, bytes]]) -> Steps[None]:
    state = group.snapshots
    by_topic: dict[str, list[tuple[bytes, bytes | None]]] = {}
    for topic, key in doomed:
        by_topic.setdefault(topic, []).append((key, None))
    for topic in sorted(by_topic, key=lambda name: name != state.segments_topic):  # segments first, then their index
        yield from AppendMessages(Messages(topic, by_topic[topic]))
        metrics = state.metrics
        for key, _ in by_topic[topic]:
            indexes = metrics.ongoing_ops if is_ongoing(key) else metrics.index_ops
            (metrics.segment_ops if topic == state.segments_topic else indexes)[Op.DEL] += 1


def ensure_topics(group: GroupState) -> Steps[None]:
    """Create the topics of snapshots in the present format, unless they exist."""
    state = group.snapshots
    wanted = {state.segments_topic, state.indexes_topic} if state.segmented else {state.single_topic}
    missing = sorted(wanted - state.topics)
    if missing:
        yield from CreateTopics([compacted_topic_spec(name, state.replication_factor) for name in missing])
        state.topics.update(missing)


# Look-up of aborted transactions


SEGMENTS_AT_ONCE: Final = 16


def drop_aborted(group: GroupState, transactions: Iterable[BufferedTransaction]) -> Steps[None]:
    """Drop open transactions that were aborted before their BEGIN frame was folded.

    A BEGIN frame in the buffer of another stream can come that late. The commit log is not read so far back, so the
    snapshots are used.
    """
    known = {partition: item.aborted for partition, item in group.snapshots.partitions.items()}
    found = look_up(known, transactions)
    for transaction_id in found.aborted:
        group.fold.discard(transaction_id)
    for partition, asked in found.segments.items():
        for indexes in in_batches(list(asked)):
            segments = yield from load_segments(group, partition, indexes)
            for index, ids in zip(indexes, segments, strict=True):
                for transaction_id in asked[index]:
                    if transaction_id in ids and transaction_id in group.fold.open:
                        group.fold.discard(transaction_id)


def in_batches(indexes: Sequence[SegmentIndex]) -> Iterator[Sequence[SegmentIndex]]:
    """Yield slices of :data:`SEGMENTS_AT_ONCE` segments, as many as are loaded at once."""
    return (indexes[first : first + SEGMENTS_AT_ONCE] for first in range(0, len(indexes), SEGMENTS_AT_ONCE))


def load_segments(
    group: GroupState, partition: Partition, indexes: Sequence[SegmentIndex]
) -> Steps[list[frozenset[bytes]]]:
    """Return the ids in sealed segments, from the cache or from their topic.

    Raises:
        StaleStateError: a segment is damaged, missing or another one. All snapshots of the partition have been deleted,
            so the next takeover rebuilds them from the buffer.
    """
    state = group.snapshots
    found = {index: state.cache.get(partition, index.sequence_id) for index in indexes}
    missing = [index for index, ids in found.items() if ids is None]
    values: Mapping[int, bytes | None] = {}
    if missing and state.segments_topic in state.topics:
        values = yield from ReadRecords(state.segments_topic, [index.persistent_position for index in missing])
    state.metrics.segment_ops[Op.READ] += len(missing)
    for index in missing:
        topic_id = state.partitions[partition].topic_id
        try:
            segment = segment_of(index, partition, topic_id, values.get(index.persistent_position))
        except CorruptDataError as fault:
            text = f"segment {index.sequence_id} of the snapshot of {partition_name(partition)} is not usable: {fault}"
            state.warn(text)
            yield from clear_snapshots(group, [partition])
            raise StaleStateError(f"{text}; it is rebuilt from the buffer") from fault
        found[index] = state.cache.put(partition, index.sequence_id, segment.aborts)
    return [ids for ids in found.values() if ids is not None]


def restore_snapshots(group: GroupState) -> Steps[tuple[int, Sequence[tuple[str, bytes]], int]]:
    """Load the snapshots of the group's buffers, so that folding continues from their ends.

    Returns:
        Offset from which the commit log holds every outcome that the snapshots do not cover; the records of ended
        transactions, with their topics; and the end of the commit log.
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
        if choice.record is not None:
            yield from _adopt(group, partition, known, choice.record, found)
            ongoing = _choose_ongoing(group, partition, known, choice.record, found[state.index_topic])
        place = BufferPlace(topic_id, str(config.name), choice.record, ongoing, starts[partition], ends[partition])
        if ongoing is not None:
            known.spared = Needed(ongoing.replay_position, place.log_floor(log_end))
        group.fold.positions[partition] = place.floor
        places[partition] = place
    first = group.housekeeping.starts[log_place] = starts[log_place]
    key = ended_key(group.name)
    lists = [(topic, rows[key]) for topic, rows in found.items() if key in rows]
    return max(log_start(places, log_end, 0), first), lists, log_end


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
                group.records.begun.add(item.id)  # only transactions with a BEGIN record are recorded as ongoing
    group.snapshots.metrics.ongoing_ops[Op.READ] += len(records)
    group.snapshots.ongoing.clear()


def _adopt(
    group: GroupState,
    partition: Partition,
    known: PartitionSnapshots,
    snapshot: Snapshot,
    found: Mapping[str, Mapping[bytes, bytes]],
) -> Steps[None]:
    """Adopt the content of a snapshot; the next snapshot replaces one in the other format."""
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
    """Return the record of ongoing transactions to continue from, None if that saves nothing."""
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
