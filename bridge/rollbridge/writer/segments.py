"""Succession of segments: which batch may be written to which segment while segments are sealed. Pure, no I/O.

If the broker refuses a batch because the segment is sealed, that batch and all behind it come back. Once the history
names the successors of the segment, the batches are handed over to these, ahead of later writes (``inherited``). A
successor sends nothing while any of its predecessors' queues still holds a batch, so the records of a key keep their
order.

A sealed segment refuses a possibly persisted batch without looking, so its log must be read before anything of the
queue is handed over: see :meth:`StreamQueues.unresolved`.

Source: PDP-24 for the succession of segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic

from rollbridge.base.ids import SegmentId
from rollbridge.kafka.queues import UNNUMBERED, Lane, P, PartitionQueue
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition
from rollbridge.stream.segment_graph import Segment


class SegmentPhase(Enum):
    """State of a segment, as its writer knows it."""

    OPEN = "open"
    REFUSED = "refused"
    """The broker takes no more; the history does not name successors yet."""
    ENDED = "ended"
    """The history names its successors."""


class SegmentEvent(Enum):
    """Event that changes the state of a segment."""

    REFUSAL = "refusal"
    RETRY = "retry"
    """Time has passed since the refusal, which may not have been permanent."""
    END = "end"


TRANSITIONS: Final[Mapping[tuple[SegmentPhase, SegmentEvent], SegmentPhase]] = MappingProxyType(
    {
        (SegmentPhase.OPEN, SegmentEvent.REFUSAL): SegmentPhase.REFUSED,
        (SegmentPhase.OPEN, SegmentEvent.RETRY): SegmentPhase.OPEN,
        (SegmentPhase.OPEN, SegmentEvent.END): SegmentPhase.ENDED,
        (SegmentPhase.REFUSED, SegmentEvent.REFUSAL): SegmentPhase.REFUSED,
        (SegmentPhase.REFUSED, SegmentEvent.RETRY): SegmentPhase.OPEN,
        (SegmentPhase.REFUSED, SegmentEvent.END): SegmentPhase.ENDED,
        (SegmentPhase.ENDED, SegmentEvent.REFUSAL): SegmentPhase.ENDED,
        (SegmentPhase.ENDED, SegmentEvent.RETRY): SegmentPhase.ENDED,
        (SegmentPhase.ENDED, SegmentEvent.END): SegmentPhase.ENDED,
    }
)


class SegmentQueue(PartitionQueue[P]):
    """Queue of one segment; its :class:`StreamQueues` moves batches between the queues of a stream.

    Attributes:
        stream_queues: The queues of its stream.
        segment: The segment.
        phase: State of the segment, as far as it is known here.
        sealed_end: Offset behind the last record, once the segment has ended and that is known.
    """

    __slots__ = ("phase", "sealed_end", "segment", "stream_queues")

    def __init__(self, stream_queues: StreamQueues[P], segment: Segment, target: Partition, lane: Lane[P]) -> None:
        super().__init__(target, lane)
        self.stream_queues = stream_queues
        self.segment = segment
        self.phase = SegmentPhase.OPEN
        self.sealed_end: int | None = None

    @property
    def id(self) -> SegmentId:
        """Id of the segment."""
        return self.segment.id

    def may_send(self) -> bool:
        """Return True if :meth:`take` may be called: also the segment is open, and nothing comes before."""
        return (
            self.phase is SegmentPhase.OPEN
            and super().may_send()
            and not self.stream_queues.closed
            and not self.stream_queues.is_blocked(self)
        )

    def refuse(self, batch: P) -> None:
        """Take back a batch in flight that was refused because the segment is sealed."""
        self.phase = TRANSITIONS[self.phase, SegmentEvent.REFUSAL]
        self.give_back(batch, doubtful=False)

    def retry(self) -> None:
        """Try again after a refusal that may have been temporary."""
        self.phase = TRANSITIONS[self.phase, SegmentEvent.RETRY]


Split = Callable[[P, Sequence[SegmentQueue[P]]], Iterable[tuple[P, SegmentQueue[P]]]]
"""Divider of a batch: each record goes to the first queue whose range holds its key; in order, as new batches."""


class StreamQueues(Generic[P]):
    """Queues of one stream, from epoch to epoch. Not thread-safe.

    Attributes:
        active: Queues of the active epoch, in order of their key ranges.
        closed: True once nothing will be sent or handed over any more.
    """

    def __init__(
        self,
        history: EpochHistory,
        target_of: Callable[[SegmentId], Partition],
        lane_of: Callable[[Partition], Lane[P]],
        split: Split[P],
    ) -> None:
        """Start in the active epoch of a history."""
        self._target_of = target_of
        self._lane_of = lane_of
        self._split = split
        self._ended: list[SegmentQueue[P]] = []
        self.closed = False
        self.active: list[SegmentQueue[P]] = []
        self.adopt(history)

    def adopt(self, history: EpochHistory) -> None:
        """Adopt the current epochs. Open batches of queues that end must be closed first."""
        queues = {queue.id: queue for queue in (*self._ended, *self.active)}
        current = history.active.segments
        wanted = {item.id for item in current}
        for queue in queues.values():
            if queue.id not in wanted:
                if queue.phase is not SegmentPhase.ENDED:
                    self._ended.append(queue)
                queue.phase = TRANSITIONS[queue.phase, SegmentEvent.END]
                # The end of a dropped segment is no longer known: no broker has answered for that long.
                if not history.is_dropped(queue.id):
                    queue.sealed_end = history.sealed_end(queue.id)
        self._ended.sort(key=lambda queue: queue.id.epoch)
        self.active = [queues.get(item.id) or self._new_queue(item) for item in current]
        for queue, item in zip(self.active, current, strict=True):
            queue.segment = item  # it may hold other keys now
        self.drain()

    def close(self) -> list[P]:
        """Send nothing any more; return the batches that waited. Those in flight may still be answered."""
        self.closed = True
        return [batch for queue in self.queues() for batch in self.withdraw(queue)]

    def withdraw(self, queue: SegmentQueue[P]) -> list[P]:
        """Take out of a queue what waits there, and return it."""
        waiting = [batch for batch in queue.held() if batch not in queue.in_flight]
        for batch in waiting:
            queue.drop(batch)
        return waiting

    def queues(self) -> tuple[SegmentQueue[P], ...]:
        """Return all queues that hold batches or may be written, older ones first."""
        return (*self._ended, *self.active)

    def is_blocked(self, queue: SegmentQueue[P]) -> bool:
        """Return True if the queue of a predecessor still holds a batch."""
        return any(before.segment.precedes(queue.segment) for before in self._ended)

    def drain(self) -> bool:
        """Hand over the batches of ended queues whose outcomes are known; return True if any queue was drained."""
        moved = False
        for queue in () if self.closed else tuple(self._ended):
            if queue.in_flight or self.is_blocked(queue) or any(batch.doubtful for batch in queue.held()):
                continue
            self._ended.remove(queue)
            self._hand_over(queue)
            moved = True
        return moved

    def unresolved(self) -> list[SegmentQueue[P]]:
        """Return ended queues whose sealed log must be read to learn which of their batches were written."""
        if self.closed:
            return []
        return [
            queue
            for queue in self._ended
            if queue.sealed_end is not None and not queue.in_flight and any(batch.doubtful for batch in queue.held())
        ]

    def resolve(
        self, queue: SegmentQueue[P], written: Mapping[int, int], gap: tuple[int, int] | None = None
    ) -> tuple[list[tuple[P, int]], list[P]]:
        """Apply what was read from a sealed log.

        Args:
            queue: One of :meth:`unresolved`.
            written: Offset of each batch of this producer behind ``queue.last_offset``, by sequence number.
            gap: Range of offsets there, end exclusive, whose former content is unknown.

        Returns:
            The batches that were written, with their offsets, and those of which that is unknown.
        """
        doubtful = [batch for batch in queue.held() if batch.doubtful]
        places = [written.get(batch.sequence) for batch in doubtful]
        found, unknown = [], []
        for number, (batch, offset) in enumerate(zip(doubtful, places, strict=True)):
            if offset is not None:
                found.append((batch, offset))
            elif gap is not None:
                # Batches are in the order of their numbers, so an unknown one lies between its neighbours that were
                # found.
                low = max((place for place in places[:number] if place is not None), default=-1)
                high = min((place for place in places[number:] if place is not None), default=gap[1])
                if low < gap[1] and gap[0] < high:
                    unknown.append(batch)
        for batch, _ in found:
            batch.doubtful = False
            queue.drop(batch)
        for batch in unknown:
            queue.drop(batch)
        for batch in queue.held():
            batch.doubtful = False
        self.drain()
        return found, unknown

    def _new_queue(self, segment: Segment) -> SegmentQueue[P]:
        target = self._target_of(segment.id)
        return SegmentQueue(self, segment, target, self._lane_of(target))

    def _hand_over(self, queue: SegmentQueue[P]) -> None:
        """Hand the batches of a queue over to the next queues in the lineage of each key.

        Not directly to the active queues: an ended queue in between may still hold, or receive, later writes of the
        same keys.
        """
        later = [item for item in self.queues() if queue.segment.precedes(item.segment)]
        later.sort(key=lambda item: item.id.epoch)
        for batch in queue.held():
            if later[0].segment.range.holds(queue.segment.range):
                batch.sequence = UNNUMBERED
                later[0].inherited.append(batch)
            else:
                for piece, heir in self._split(batch, later):
                    heir.inherited.append(piece)
