"""Snapshots: take those that are due, delete them, and load them at a takeover.

They are written inside native transactions of the leader's own transactional ids. So a leader that was replaced can
not write one any more, whatever it believes; segments and the index that names them are there together or not at all;
and no record of an older leader can take the place of a newer one's under the same key when the topic is compacted.

Source: PIP-196.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from bridge.errors import CorruptDataError
from bridge.model.aborted import AbortedTransactions
from bridge.model.buffer import BufferedTransaction, LateBegin, Partition
from bridge.model.identifiers import TransactionId
from bridge.model.records import StreamState as Lifecycle
from bridge.model.snapshots import SegmentIndex, Snapshot, choose, index_keys, partition_name, segment_key, segment_of
from coordinator.effects import (
    LogSummary,
    Messages,
    Steps,
    append_messages,
    commit_round,
    create_topics,
    end_offsets,
    read_compacted,
    read_records,
    start_offsets,
    topic_ids,
)
from coordinator.errors import StaleStateError
from coordinator.group import GroupState
from coordinator.metrics import Op
from coordinator.snapshots import (
    SINGLE_BYTES_MAX,
    Marks,
    PartitionSnapshots,
    Plan,
)
from coordinator.topics import snapshot_topic_spec

SNAPSHOTS_PER_ROUND: Final = 32
"""Each may have a segment and an index of a quarter of a megabyte."""


def take_snapshots(group: GroupState, now_ms: int) -> Steps[None]:
    """Write the snapshots that are due, in one native transaction."""
    due = group.snapshots.due(now_ms)[:SNAPSHOTS_PER_ROUND]
    if due:
        yield from write_snapshots(group, due, now_ms)


def write_snapshots(group: GroupState, partitions: Iterable[Partition], now_ms: int) -> Steps[None]:
    """Write snapshots of partitions, in one native transaction."""
    state = group.snapshots
    yield from _ensure_topics(group)
    log_end = (yield from end_offsets([(group.commit_log, 0)]))[group.commit_log, 0]
    low, floor = group.fold.low_water(), group.fold.log_floor()
    plans: list[Plan] = []
    for partition in partitions:
        position = group.fold.positions.get(partition, state.partitions[partition].log_start)
        marks = Marks(position, low.get(partition, position), min(floor.get(partition, log_end), log_end), log_end)
        plan = state.plan(partition, marks, group.controller_epoch, now_ms)
        if plan is not None:
            plans.append(plan)
    if not plans:
        return
    written = yield from _append(group, plans)
    yield from commit_round()
    for plan, snapshot in zip(plans, written, strict=True):
        state.taken(plan, snapshot)
    # What is folded from here on has its outcome later in the commit log than this.
    group.fold.log_position = log_end


def clear_snapshots(group: GroupState, partitions: Iterable[Partition]) -> Steps[None]:
    """Delete all snapshots of partitions, in every format, found by their keys and not by an index."""
    wanted = list(partitions)
    state = group.snapshots
    known = yield from topic_ids([state.segments_topic, state.indexes_topic, state.single_topic])
    doomed: list[tuple[str, bytes]] = []
    for topic in sorted(known):
        keys = yield from read_compacted(topic)
        doomed += [(topic, key) for key in keys if any(state.is_of(key, item) for item in wanted)]
    if doomed:
        yield from _append_tombstones(group, doomed)
        yield from commit_round()
    state.forget(wanted)


def restore_snapshots(group: GroupState) -> Steps[int]:
    """Load what the snapshots say of the group's buffers, so that folding goes on where they end.

    Gives the offset from which the commit log must be read.
    """
    state = group.snapshots
    streams = [item for item in group.streams.values() if item.config.state is not Lifecycle.DELETING]
    ids = {partition: item.config.buffer_topic_id for item in streams for partition in item.partitions()}
    state.topics = set((yield from topic_ids([state.segments_topic, state.indexes_topic, state.single_topic])))
    found: dict[str, Mapping[bytes, bytes]] = {}
    for topic in (state.indexes_topic, state.single_topic):
        found[topic] = (yield from read_compacted(topic)) if topic in state.topics else {}
    ends = yield from end_offsets([*sorted(ids), (group.commit_log, 0)])
    starts = yield from start_offsets(sorted(ids))
    log_starts = [ends[group.commit_log, 0]]
    for partition, topic_id in ids.items():
        known = state.of(partition, topic_id)
        known.log_start = starts[partition]
        places = [(topic, key) for topic in found for key in index_keys(partition)]
        values = [found[topic].get(key) for topic, key in places]
        choice = choose(values, partition, topic_id, ends[partition], ends[group.commit_log, 0])
        state.metrics.index_ops[Op.READ] += sum(value is not None for value in values)
        for place, fault in choice.faults.items():
            name = partition_name(partition)
            state.warn(
                f"a snapshot of {name} is not usable: {fault}; an older one or the buffer itself is used instead"
            )
            known.remains += (places[place],)
            known.changes += 1
        if choice.snapshot is not None:
            yield from _adopt(group, partition, known, choice.snapshot, found)
            group.fold.positions[partition] = max(choice.snapshot.max_read_position, starts[partition])
            if ends[partition] > choice.snapshot.max_read_position:
                log_starts.append(choice.snapshot.commit_log_position)
        else:
            group.fold.positions[partition] = starts[partition]
            if ends[partition] > starts[partition]:
                log_starts.append(0)
    return max(min(log_starts) - group.settings.outcomes_again, 0)


def finish_restore(group: GroupState) -> Steps[None]:
    """Settle what folding the rest of the buffers has brought up; they have been folded up to the takeover's ends."""
    summary, group.snapshots.summary = group.snapshots.summary, LogSummary({}, frozenset())
    late = group.fold.late or {}
    for transaction, offset in summary.terminated.items():
        begun = late.get(transaction)
        if begun is not None:
            _note_late(group, transaction, begun, offset, is_aborted=transaction in summary.aborted)
    yield from _drop_aborted(group)
    group.fold.caught_up()
    group.fold.log_position = summary.end


def note_settled(group: GroupState, transaction: BufferedTransaction, *, is_aborted: bool) -> None:
    """A transaction has an outcome, which its partitions' next snapshots cover."""
    state = group.snapshots
    if is_aborted:
        for partition in partitions_of(group, transaction.transaction_id, transaction.begin.streams):
            position = group.fold.positions.get(partition, 0)
            first = transaction.first_offsets.get(partition, position)
            known = state.partitions.get(partition) or _begin_partition(group, partition)
            known.aborted.add(transaction.id, first, position)
            known.changes += 1
    else:
        for partition in transaction.first_offsets:
            known = state.partitions.get(partition) or _begin_partition(group, partition)
            known.changes += 1


def partitions_of(group: GroupState, transaction: TransactionId, streams: Iterable[str]) -> list[Partition]:
    """The buffer partitions in which a transaction's frames stand, or may still arrive."""
    return [group.streams[name].partition_for(transaction) for name in streams if name in group.streams]


def _begin_partition(group: GroupState, partition: Partition) -> PartitionSnapshots:
    """A partition of a stream that was created in this term."""
    configs = (item.config for item in group.streams.values())
    topic_id = next(item.buffer_topic_id for item in configs if item.name.buffer_topic == partition[0])
    return group.snapshots.of(partition, topic_id)


def _note_late(group: GroupState, transaction: bytes, begun: LateBegin, offset: int, *, is_aborted: bool) -> None:
    """An outcome from the commit log whose transaction was met again in the buffers."""
    identifier = TransactionId.from_bytes(transaction)
    for partition in partitions_of(group, identifier, begun.begin.streams):
        known = group.snapshots.partitions[partition]
        if offset >= known.log_end:
            known.changes += 1
            if is_aborted:
                position = group.fold.positions.get(partition, 0)
                known.aborted.add(transaction, begun.first_offsets.get(partition, position), position)


def _drop_aborted(group: GroupState) -> Steps[None]:
    """Forget transactions that seem open, but were aborted before their BEGIN frame was folded here.

    The commit log has been read from a position on that says nothing of them; the snapshots do.
    """
    state = group.snapshots
    needed: dict[Partition, dict[SegmentIndex, list[bytes]]] = {}
    for transaction in list(group.fold.open.values()):
        for partition, offset in transaction.first_offsets.items():
            aborted = state.partitions[partition].aborted
            if transaction.id in aborted.unsealed:
                group.fold.discard(transaction.id)
                break
            for index in aborted.candidates(transaction.id, offset):
                needed.setdefault(partition, {}).setdefault(index, []).append(transaction.id)
    for partition, wanted in needed.items():
        for index, asked in wanted.items():
            ids = yield from load_segment(group, partition, index)
            for item in asked:
                if item in ids and item in group.fold.open:
                    group.fold.discard(item)


def load_segment(group: GroupState, partition: Partition, index: SegmentIndex) -> Steps[frozenset[bytes]]:
    """The ids of a sealed segment, from the cache or from its topic.

    Raises:
        StaleStateError: it is damaged, missing or another one. All snapshots of the partition have been deleted, so
            the next takeover makes them anew from the buffer.
    """
    state = group.snapshots
    cached = state.cache.get(partition, index.sequence_id)
    if cached is not None:
        return cached
    values: Mapping[int, bytes | None] = {}
    if state.segments_topic in state.topics:
        values = yield from read_records(state.segments_topic, [index.persistent_position])
    state.metrics.segment_ops[Op.READ] += 1
    try:
        segment = segment_of(
            index, partition, state.partitions[partition].topic_id, values.get(index.persistent_position)
        )
    except CorruptDataError as fault:
        text = f"segment {index.sequence_id} of the snapshot of {partition_name(partition)} is not usable: {fault}"
        state.warn(text)
        yield from clear_snapshots(group, [partition])
        raise StaleStateError(f"{text}; it is made anew from the buffer") from fault
    return state.cache.put(partition, index.sequence_id, segment.aborts)


def _adopt(
    group: GroupState,
    partition: Partition,
    known: PartitionSnapshots,
    snapshot: Snapshot,
    found: Mapping[str, Mapping[bytes, bytes]],
) -> Steps[None]:
    """Take over what a snapshot says; one in the other format is replaced by the next that is taken."""
    state = group.snapshots
    known.aborted = AbortedTransactions.of(snapshot)
    known.generation = snapshot.generation
    known.log_end = snapshot.commit_log_end
    known.is_restored = True
    other = state.single_topic if state.segmented else state.indexes_topic
    remains = [(other, key) for key in index_keys(partition) if key in found[other]]
    if not state.segmented and snapshot.indexes:
        aborted = AbortedTransactions()
        for index in snapshot.indexes:
            for transaction in sorted((yield from load_segment(group, partition, index))):
                aborted.add(transaction, index.first_position, index.max_read_position)
        for transaction, (first, last) in known.aborted.unsealed.items():
            aborted.add(transaction, first, last)
        aborted.sequence_id = snapshot.sequence_id
        if aborted.encoded.size <= SINGLE_BYTES_MAX:
            known.aborted = aborted
            keys = [segment_key(partition, index.sequence_id) for index in snapshot.indexes]
            remains += [(state.segments_topic, key) for key in keys]
        else:
            state.warn(f"the single snapshot of {partition_name(partition)} would be too large: its segments are kept")
    known.remains += tuple(remains)
    known.changes += len(remains)
    known.is_other_format = bool(remains)


def _append(group: GroupState, plans: list[Plan]) -> Steps[list[Snapshot]]:
    """Append segments, indexes and tombstones; nothing is visible before the round is committed."""
    state = group.snapshots
    segments = [item for plan in plans for item in plan.segments]
    doomed = [
        (state.segments_topic, segment_key(plan.partition, item.sequence_id)) for plan in plans for item in plan.expired
    ]
    doomed += [item for plan in plans for item in state.partitions[plan.partition].remains]
    if doomed:
        yield from _append_tombstones(group, doomed)
    offsets: list[int] = []
    if segments:
        offsets = list(
            (yield from append_messages(Messages(state.segments_topic, [(i.key, i.encode()) for i in segments])))
        )
    state.metrics.segment_ops[Op.ADD] += len(segments)
    snapshots: list[Snapshot] = []
    for plan in plans:
        own, offsets = offsets[: len(plan.segments)], offsets[len(plan.segments) :]
        snapshots.append(plan.snapshot(own))
    records = [(item.key, item.encode(plan.ids)) for item, plan in zip(snapshots, plans, strict=True)]
    yield from append_messages(Messages(state.index_topic, records))
    for _, value in records:
        state.metrics.note_entry(len(value))
    return snapshots


def _append_tombstones(group: GroupState, doomed: Iterable[tuple[str, bytes]]) -> Steps[None]:
    state = group.snapshots
    by_topic: dict[str, list[tuple[bytes, bytes | None]]] = {}
    for topic, key in doomed:
        by_topic.setdefault(topic, []).append((key, None))
    for topic in sorted(by_topic, key=lambda name: name != state.segments_topic):  # segments first, then their index
        yield from append_messages(Messages(topic, by_topic[topic]))
        operations = state.metrics.segment_ops if topic == state.segments_topic else state.metrics.index_ops
        operations[Op.DEL] += len(by_topic[topic])


def _ensure_topics(group: GroupState) -> Steps[None]:
    state = group.snapshots
    wanted = {state.segments_topic, state.indexes_topic} if state.segmented else {state.single_topic}
    missing = sorted(wanted - state.topics)
    if missing:
        yield from create_topics([snapshot_topic_spec(name, state.replication_factor) for name in missing])
        state.topics.update(missing)
