"""Large transactions: which are merged beside the line, and into which segments. Pure.

A merge takes time in proportion to its bytes. While it is a part of a round, nobody else's commit can be, and plain
readers of its segments wait, since Kafka shows them nothing behind the first record of an open native transaction. So
a large transaction is merged by a native transaction of its own, into segments that nobody reads yet, while rounds of
others go on. Once it is all there, a rolling commit puts these segments into the history, which takes as long for 16
GiB as for a record.

There are few places for such merges, each with an open native transaction. A place is for appending, not for waiting:
a merge begins when nothing keeps its roll from being carried out. If its transaction has to wait later, for native
transactions of others or for a stream in an error state, it gives its place to one that need not, and begins again
afterwards. That is counted, logged and bounded, as is every other merge in vain.

The epoch in which such a segment will begin is not known when its topic is created: others may scale or roll its stream
meanwhile. So its id has a number of its own, counted up for ever for each stream, with the epoch that is active at that
time. Nobody else uses that name, not even for another try of the same transaction.

Source: PDP-24, "mergeSegments"; there a merge is metadata only, as segments of transactions are stored apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rollbridge.model.changes import Merging, PreparedStream, Roll
from rollbridge.model.ids import PREPARED_FIRST, SegmentId
from rollbridge.model.names import StreamName
from rollbridge.model.pieces import BufferedTransaction
from rollbridge.model.records import StreamConfig
from rollbridge.model.transaction import State
from rollbridge_coordinator.state.group import GroupState

SEGMENTS_MAX: Final = 256
"""Segments of a transaction up to which it is merged beside the line. Of more, each topic would take longer to create
than its records to append."""


def is_large(group: GroupState, transaction: BufferedTransaction) -> bool:
    """Return True if a transaction to be committed is merged beside the line.

    That takes a rolling commit, so none that writes to an adopted topic is: the topic would have to be left for it. Nor
    is one that writes to a stream which is gone, or not led.
    """
    bound = group.settings.merge_beside_bytes
    if not bound or transaction.bytes < bound or transaction.state is not State.COMMITTING:
        return False
    # All of its bytes may be of parts that its commit does not name: then it writes to no segment at all.
    written = transaction.written_segments()
    streams = [group.streams.get(name) for name in written]
    return 0 < sum(map(len, written.values())) <= SEGMENTS_MAX and not any(
        stream is None or stream.is_on_topic for stream in streams
    )


def plan_preparation(
    group: GroupState, transaction: BufferedTransaction, now_ms: int
) -> tuple[Merging, list[StreamConfig]]:
    """Return the segments into which a transaction is merged, and the streams with their new counts."""
    streams: list[PreparedStream] = []
    configs: list[StreamConfig] = []
    for name, numbers in sorted(transaction.written_segments().items()):
        stream = group.streams[name]
        first = stream.history.next_prepared(stream.config.prepared)
        epoch = stream.history.active.epoch
        segments = {number: SegmentId.of(first + place, epoch) for place, number in enumerate(sorted(numbers))}
        streams.append(PreparedStream(name, segments))
        configs.append(replace(stream.config, prepared=first + len(numbers) - PREPARED_FIRST))
    record = Merging(transaction.transaction_id, tuple(streams), now_ms, group.controller_epoch)
    return record, configs


def prepared_rolls(group: GroupState, transaction: BufferedTransaction, record: Merging) -> tuple[Roll, ...]:
    """Return the rolls that put prepared segments into the histories of their streams, as these are now."""
    rolls = []
    for item in record.streams:
        history = group.streams[item.stream].history
        fresh = history.next_epoch
        epoch = transaction.begin.streams[item.stream]
        rolls.append(Roll(item.stream, epoch, history.active.epoch, fresh, fresh + 1, prepared=item.segments))
    return tuple(rolls)


def is_ready(group: GroupState, transaction: BufferedTransaction, rolls: tuple[Roll, ...]) -> bool:
    """Return True if the segments that a rolling commit of a large transaction names hold its records."""
    found = group.preparations.get(transaction.id)
    if found is None or found.offsets is None:
        return False
    prepared = {item.stream: dict(item.segments) for item in found.record.streams}
    return prepared == {roll.stream: dict(roll.prepared) for roll in rolls}


def prepared_topics(group: GroupState, stream: StreamName) -> dict[str, list[str]]:
    """Return the topics of a stream that were prepared and have not been removed yet, by the node that names them."""
    return {
        node: [stream.segment_topic(segment) for segment in item.segments.values()]
        for node, record in group.leftovers.items()
        for item in record.streams
        if item.stream == str(stream)
    }


def segments_in_use(group: GroupState) -> set[tuple[str, SegmentId]]:
    """Return the prepared segments that changes in progress will put into the histories of their streams."""
    works = (item.work for item in group.suspended.values())
    rolls = [roll for work in works for roll in getattr(work, "rolls", ())]
    return {(roll.stream, segment) for roll in rolls for segment in roll.prepared.values()}
