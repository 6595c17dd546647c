"""Restore: what the snapshots say of the buffers, and what reading on from there adds to it.

Source: PIP-196 (recovery; the format without segments is read where there is no index).
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from rollbridge.model.aborted import AbortedTransactions
from rollbridge.model.buffered import LateBegin, Partition
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.ongoing import OngoingTransactions, choose_ongoing, ongoing_keys
from rollbridge.model.snapshots import Snapshot, choose, index_keys, partition_name, segment_key
from rollbridge_coordinator.procedures.aborted import drop_aborted, in_batches, load_segments
from rollbridge_coordinator.procedures.snapshots import partitions_of
from rollbridge_coordinator.state.effects import LogSummary
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.metrics import Op
from rollbridge_coordinator.state.places import Place, log_start
from rollbridge_coordinator.state.snapshots import SINGLE_BYTES_MAX, Needed, PartitionSnapshots
from rollbridge_coordinator.state.steps import Steps, end_offsets, read_compacted, start_offsets, topic_ids


def restore_snapshots(group: GroupState) -> Steps[int]:
    """Load what the snapshots say of the group's buffers, so that folding goes on where they end.

    Gives the offset from which the commit log says everything that they do not.
    """
    state = group.snapshots
    configs = {partition: item.config for item in group.streams.values() for partition in item.partitions()}
    state.topics = set((yield from topic_ids([state.segments_topic, state.indexes_topic, state.single_topic])))
    found: dict[str, Mapping[bytes, bytes]] = {}
    for topic in (state.indexes_topic, state.single_topic):
        found[topic] = (yield from read_compacted(topic)) if topic in state.topics else {}
    ends = yield from end_offsets([*sorted(configs), (group.commit_log, 0)])
    starts = yield from start_offsets(sorted(configs))
    log_end = ends[group.commit_log, 0]
    places: dict[Partition, Place] = {}
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
        place = Place(topic_id, str(config.name), choice.snapshot, ongoing, starts[partition], ends[partition])
        if ongoing is not None:
            known.spared = Needed(ongoing.replay_position, place.log_floor(log_end))
        group.fold.positions[partition] = place.floor
        places[partition] = place
    return log_start(places, log_end, 0)


def restore_ongoing(group: GroupState, terminated: Container[bytes], followed: Container[Partition]) -> None:
    """Put back the open transactions that were written down and have no outcome, but for ``followed`` partitions.

    Nothing of the others has been folded yet.
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
                group.begun.add(item.id)  # only those are written down that have a BEGIN record
    group.snapshots.metrics.ongoing_ops[Op.READ] += len(records)
    group.snapshots.ongoing.clear()


def finish_restore(group: GroupState) -> Steps[None]:
    """Settle what folding the rest of the buffers has brought up; they have been folded up to the takeover's ends."""
    summary, group.snapshots.summary = group.snapshots.summary, LogSummary({}, frozenset())
    late = group.fold.late or {}
    for transaction, offset in summary.terminated.items():
        begun = late.get(transaction)
        if begun is not None:
            _note_late(group, transaction, begun, offset, is_aborted=transaction in summary.aborted)
    yield from drop_aborted(group, list(group.fold.open.values()))
    group.fold.caught_up()
    group.fold.log_position = summary.end


def _note_late(group: GroupState, transaction: bytes, begun: LateBegin, offset: int, *, is_aborted: bool) -> None:
    """An outcome from the commit log whose transaction was met again in the buffers."""
    identifier = TransactionId.from_bytes(transaction)
    for partition in partitions_of(group, identifier, begun.streams):
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
    """Take over what a snapshot says; one in the other format is replaced by the next that is taken."""
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
    """The record of ongoing transactions to read on from, if that spares something."""
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
