"""Whether transactions that seem open were aborted long ago: the lookup by position, segment and set.

Source: PIP-196, "check whether a transaction message is sent by an aborted transaction".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from rollbridge.errors import CorruptDataError
from rollbridge.model.buffered import BufferedTransaction, Partition
from rollbridge.model.snapshots import SegmentIndex, partition_name, segment_of
from rollbridge_coordinator.procedures.snapshots import clear_snapshots
from rollbridge_coordinator.state.errors import StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.metrics import Op
from rollbridge_coordinator.state.steps import Steps, read_records

SEGMENTS_AT_ONCE: Final = 16


def drop_aborted(group: GroupState, transactions: Iterable[BufferedTransaction]) -> Steps[None]:
    """Forget those of the open transactions that were aborted before their BEGIN frame was folded.

    One in the buffer of another stream can come that late. The commit log is not read so far back; snapshots say it.
    """
    needed: dict[Partition, dict[SegmentIndex, list[bytes]]] = {}
    for transaction in transactions:
        for partition, offset in transaction.first_offsets.items():
            known = group.snapshots.partitions.get(partition)
            if known is None:
                continue
            if transaction.id in known.aborted.unsealed:
                group.fold.discard(transaction.id)
                break
            for index in known.aborted.candidates(transaction.id, offset):
                needed.setdefault(partition, {}).setdefault(index, []).append(transaction.id)
    for partition, asked in needed.items():
        for indexes in in_batches(list(asked)):
            segments = yield from load_segments(group, partition, indexes)
            for index, ids in zip(indexes, segments, strict=True):
                for transaction_id in asked[index]:
                    if transaction_id in ids and transaction_id in group.fold.open:
                        group.fold.discard(transaction_id)


def in_batches(indexes: Sequence[SegmentIndex]) -> Iterator[Sequence[SegmentIndex]]:
    """As many segments at a time as are loaded at once."""
    return (indexes[first : first + SEGMENTS_AT_ONCE] for first in range(0, len(indexes), SEGMENTS_AT_ONCE))


def load_segments(
    group: GroupState, partition: Partition, indexes: Sequence[SegmentIndex]
) -> Steps[list[frozenset[bytes]]]:
    """The ids of sealed segments, from the cache or from their topic.

    Raises:
        StaleStateError: one is damaged, missing or another one. All snapshots of the partition have been deleted, so
            the next takeover makes them anew from the buffer.
    """
    state = group.snapshots
    found = {index: state.cache.get(partition, index.sequence_id) for index in indexes}
    missing = [index for index, ids in found.items() if ids is None]
    values: Mapping[int, bytes | None] = {}
    if missing and state.segments_topic in state.topics:
        values = yield from read_records(state.segments_topic, [index.persistent_position for index in missing])
    state.metrics.segment_ops[Op.READ] += len(missing)
    for index in missing:
        topic_id = state.partitions[partition].topic_id
        try:
            segment = segment_of(index, partition, topic_id, values.get(index.persistent_position))
        except CorruptDataError as fault:
            text = f"segment {index.sequence_id} of the snapshot of {partition_name(partition)} is not usable: {fault}"
            state.warn(text)
            yield from clear_snapshots(group, [partition])
            raise StaleStateError(f"{text}; it is made anew from the buffer") from fault
        found[index] = state.cache.put(partition, index.sequence_id, segment.aborts)
    return [ids for ids in found.values() if ids is not None]
