"""Lanes: which batch may be written to which segment while segments are sealed and succeeded. Pure, no I/O.

A lane is the queue of one segment and one producer. Its batches wait, are in flight, and are answered in order::

    inherited ─┐
               ├─ take ──► in_flight ── acknowledge ──► written
    queue ─────┘              │
        ▲                     └─ give_back, refuse ──► back in front, once nothing is in flight
        └─ open (being filled)

If the broker refuses a batch because the segment is sealed, that batch and all behind it come back. Once the history
names the successors of the segment, the batches are handed over to these, ahead of later writes (``inherited``). A
successor sends nothing while any of its predecessors' lanes still holds a batch, so the records of a key keep their
order.

A batch whose answer was lost is *doubtful*, that is possibly persisted. While the segment is open, the batch is sent
again with the same sequence number, by which the broker recognises it. A sealed segment refuses it without looking, so
its log must be read before anything of the lane is handed over: see :meth:`StreamQueues.unresolved`.

Source: KIP-98 for sequence numbers; PDP-24 for the succession of segments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import Partition
from rollbridge.model.segment_graph import Segment

SEQUENCE_MAX: Final = (1 << 31) - 1
_UNNUMBERED: Final = -1


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


class Parcel:
    """Batch, as far as lanes look at it.

    Attributes:
        count: Number of its records, and so of the sequence numbers that it takes.
        sequence: Its first sequence number in its lane; negative before it was sent.
        doubtful: True if it may have been written although no answer says so (possibly persisted).
    """

    __slots__ = ("count", "doubtful", "sequence")

    def __init__(self) -> None:
        self.count = 0
        self.sequence = _UNNUMBERED
        self.doubtful = False


P = TypeVar("P", bound=Parcel)


class PartitionQueue(Generic[P]):
    """Queue of one segment and one producer; its :class:`StreamQueues` moves batches between lanes.

    Attributes:
        course: The lanes of its stream.
        target: Where the segment lies; its topic is :attr:`topic`.
        topic: Topic of the segment.
        open: Batch that is being filled; in no queue yet.
        inherited: Batches written to predecessors of this segment; sent first.
        queue: Batches written to this segment.
        in_flight: Batches sent and not answered, in order.
        sealed_end: Offset behind the last record, once the segment has ended and that is known.
        last_offset: Offset of the last record acknowledged, or at the end of the log before the first batch was sent:
            possibly persisted batches can only stand behind it. -1 if unknown.
        epoch: Leader epoch at which the log had that end; -1 if unknown.
        placed: True once the log end was asked for under the present producer id, which precedes any batch.
    """

    __slots__ = (
        "_acked",
        "_known",
        "_next",
        "_renumber",
        "_returned",
        "course",
        "epoch",
        "in_flight",
        "inherited",
        "last_offset",
        "open",
        "phase",
        "placed",
        "queue",
        "sealed_end",
        "segment",
        "target",
    )

    def __init__(self, course: StreamQueues[P], segment: Segment, target: Partition) -> None:
        self.course = course
        self.segment = segment
        self.target = target
        self.phase = SegmentPhase.OPEN
        self.open: P | None = None
        self.inherited: deque[P] = deque()
        self.queue: deque[P] = deque()
        self.in_flight: deque[P] = deque()
        self.sealed_end: int | None = None
        self.last_offset = self.epoch = -1
        self.placed = False
        self._returned: list[P] = []
        self._renumber = False
        self._known = False
        self._next = 0
        self._acked = 0

    def __repr__(self) -> str:
        return f"<Lane {self.segment.id} {self.phase.value}, {len(self.in_flight)} under way>"

    @property
    def topic(self) -> str:
        """Topic that is written to."""
        return self.target[0]

    @property
    def id(self) -> SegmentId:
        """Id of the segment."""
        return self.segment.id

    @property
    def waiting(self) -> bool:
        """True if a batch waits to be sent."""
        return bool(self.inherited or self.queue)

    def held(self) -> Iterator[P]:
        """Yield all batches that are neither written nor given up, in order, except the open one."""
        yield from self._returned
        yield from self.in_flight
        yield from self.inherited
        yield from self.queue

    def may_send(self) -> bool:
        """Return True if :meth:`take` may be called.

        A broker that has no state of a producer accepts any sequence number, so the first batch goes alone: were it
        rejected temporarily, the second would be written before it. Doubtful batches go alone as well: a broker
        recognises the last five batches only, so nothing may be written behind one without an answer.
        """
        if self.phase is not SegmentPhase.OPEN or self._returned or self._renumber or not self.waiting:
            return False
        if self.in_flight:
            fresh = self.inherited[0] if self.inherited else self.queue[0]
            if not self._known or fresh.doubtful or self.in_flight[-1].doubtful:
                return False
        return not self.course.closed and not self.course.is_blocked(self)

    def take(self) -> P:
        """Return the next batch to send, numbered and now in flight. Requires :meth:`may_send`."""
        parcel = self.inherited.popleft() if self.inherited else self.queue.popleft()
        if parcel.sequence < 0:
            parcel.sequence = self._next
        self._next = _later(self._next, following(parcel.sequence, parcel.count))
        self.in_flight.append(parcel)
        return parcel

    def place(self, end: int, epoch: int) -> None:
        """Record the end of the log before anything was sent: no batch of this producer stands before it.

        Args:
            end: Offset of that end; 0 if it is unknown.
            epoch: Leader epoch at that time; -1 if it is unknown.
        """
        self.last_offset, self.epoch, self.placed = end - 1, epoch, True

    def acknowledge(self, parcel: P, last_offset: int) -> None:
        """Remove a batch in flight that was written; ``last_offset`` is that of its last record.

        That offset may be lower than the last one known: then the log has lost its end, and later batches follow this
        one.
        """
        self.in_flight.remove(parcel)
        parcel.doubtful = False
        self.last_offset = last_offset
        self._acked = _later(self._acked, following(parcel.sequence, parcel.count))
        self._known = True
        self._gather()

    def refuse(self, parcel: P) -> None:
        """Take back a batch in flight that was refused because the segment is sealed."""
        self.phase = TRANSITIONS[self.phase, SegmentEvent.REFUSAL]
        self.give_back(parcel, doubtful=False)

    def give_back(self, parcel: P, *, doubtful: bool) -> None:
        """Take back a batch in flight, to be sent again; ``doubtful`` if this attempt may have written it."""
        self.in_flight.remove(parcel)
        parcel.doubtful |= doubtful
        self._returned.append(parcel)
        self._gather()

    def is_next(self, parcel: P) -> bool:
        """Return True if all batches before this one were acknowledged."""
        return parcel.sequence == self._acked

    def misplace(self, parcel: P) -> None:
        """Take back a batch in flight that was out of order, because one before it was refused.

        Such a batch is not written and gets another sequence number.
        """
        parcel.doubtful = False
        self._renumber = True
        self.give_back(parcel, doubtful=False)

    def exchange(self, parcel: P, others: Iterable[P]) -> None:
        """Replace a batch in flight that was refused, and so is not written, by others."""
        self.in_flight.remove(parcel)
        self._returned.extend(others)
        self._renumber = True
        self._gather()

    def drop(self, parcel: P) -> None:
        """Give up a batch, in flight or not.

        Later batches must not leave a gap in the sequence numbers, so they are numbered again. The numbers of a
        doubtful batch are not reused: it may have been written, and a batch with the same numbers would be taken for
        it.
        """
        for place in (self.in_flight, self._returned, self.inherited, self.queue):
            if parcel in place:
                place.remove(parcel)
        self._renumber |= not parcel.doubtful
        self._gather()

    def retry(self) -> None:
        """Try again after a refusal that may have been temporary."""
        self.phase = TRANSITIONS[self.phase, SegmentEvent.RETRY]

    def restart(self) -> None:
        """Start over with a new producer id, whose sequence numbers begin at 0.

        Requires that no batch is in flight or doubtful.
        """
        self._next = self._acked = 0
        self._known = False
        self.last_offset = self.epoch = -1
        self.placed = False  # the log may have lost its end, the reason for the new id
        for parcel in self.held():
            parcel.sequence = _UNNUMBERED

    def _gather(self) -> None:
        """Once nothing is in flight, put what came back in front of the queue."""
        if self.in_flight:
            return
        self.inherited.extendleft(reversed(self._returned))
        self._returned.clear()
        if self._renumber:
            self._renumber = False
            self._next = self._acked
            for parcel in self.held():
                if not parcel.doubtful:
                    parcel.sequence = _UNNUMBERED


Split = Callable[[P, Sequence[PartitionQueue[P]]], Iterable[tuple[P, PartitionQueue[P]]]]
"""Divider of a batch: each record goes to the first lane whose range holds its key; in order, as new batches."""


class StreamQueues(Generic[P]):
    """Lanes of one stream, from epoch to epoch. Not thread-safe.

    Attributes:
        active: Lanes of the active epoch, in order of their key ranges.
        closed: True once nothing will be sent or handed over any more.
    """

    def __init__(self, history: EpochHistory, target_of: Callable[[SegmentId], Partition], split: Split[P]) -> None:
        """Start in the active epoch of a history."""
        self._target_of = target_of
        self._split = split
        self._ended: list[PartitionQueue[P]] = []
        self.closed = False
        self.active: list[PartitionQueue[P]] = []
        self.adopt(history)

    def adopt(self, history: EpochHistory) -> None:
        """Adopt the current epochs. Open batches of lanes that end must be closed first."""
        lanes = {lane.id: lane for lane in (*self._ended, *self.active)}
        current = history.active.segments
        wanted = {item.id for item in current}
        for lane in lanes.values():
            if lane.id not in wanted:
                if lane.phase is not SegmentPhase.ENDED:
                    self._ended.append(lane)
                lane.phase = TRANSITIONS[lane.phase, SegmentEvent.END]
                # The end of a dropped segment is no longer known: no broker has answered for that long.
                if not history.is_dropped(lane.id):
                    lane.sealed_end = history.sealed_end(lane.id)
        self._ended.sort(key=lambda lane: lane.id.epoch)
        self.active = [lanes.get(item.id) or PartitionQueue(self, item, self._target_of(item.id)) for item in current]
        self.drain()

    def close(self) -> None:
        """Drop the batches that wait, and send nothing any more; batches in flight may still be answered."""
        self.closed = True
        for lane in self.lanes():
            lane.inherited.clear()
            lane.queue.clear()

    def lanes(self) -> tuple[PartitionQueue[P], ...]:
        """Return all lanes that hold batches or may be written, older ones first."""
        return (*self._ended, *self.active)

    def is_blocked(self, lane: PartitionQueue[P]) -> bool:
        """Return True if the lane of a predecessor still holds a batch."""
        return any(before.segment.precedes(lane.segment) for before in self._ended)

    def drain(self) -> bool:
        """Hand over the batches of ended lanes whose outcomes are known; return True if any lane was drained."""
        moved = False
        for lane in () if self.closed else tuple(self._ended):
            if lane.in_flight or self.is_blocked(lane) or any(parcel.doubtful for parcel in lane.held()):
                continue
            self._ended.remove(lane)
            self._hand_over(lane)
            moved = True
        return moved

    def unresolved(self) -> list[PartitionQueue[P]]:
        """Return ended lanes whose sealed log must be read to learn which of their batches were written."""
        if self.closed:
            return []
        return [
            lane
            for lane in self._ended
            if lane.sealed_end is not None and not lane.in_flight and any(parcel.doubtful for parcel in lane.held())
        ]

    def resolve(
        self, lane: PartitionQueue[P], written: Mapping[int, int], gap: tuple[int, int] | None = None
    ) -> tuple[list[tuple[P, int]], list[P]]:
        """Apply what was read from a sealed log.

        Args:
            lane: One of :meth:`unresolved`.
            written: Offset of each batch of this producer behind ``lane.last_offset``, by sequence number.
            gap: Range of offsets there, end exclusive, whose former content is unknown.

        Returns:
            The batches that were written, with their offsets, and those of which that is unknown.
        """
        doubtful = [parcel for parcel in lane.held() if parcel.doubtful]
        places = [written.get(parcel.sequence) for parcel in doubtful]
        found, unknown = [], []
        for number, (parcel, offset) in enumerate(zip(doubtful, places, strict=True)):
            if offset is not None:
                found.append((parcel, offset))
            elif gap is not None:
                # Batches stand in the order of their numbers, so an unknown one lies between its neighbours that were
                # found.
                low = max((place for place in places[:number] if place is not None), default=-1)
                high = min((place for place in places[number:] if place is not None), default=gap[1])
                if low < gap[1] and gap[0] < high:
                    unknown.append(parcel)
        for parcel, _ in found:
            parcel.doubtful = False
            lane.drop(parcel)
        for parcel in unknown:
            lane.drop(parcel)
        for parcel in lane.held():
            parcel.doubtful = False
        self.drain()
        return found, unknown

    def _hand_over(self, lane: PartitionQueue[P]) -> None:
        """Hand the batches of a lane over to the next lanes in the lineage of each key.

        Not directly to the active lanes: an ended lane in between may still hold, or receive, later writes of the same
        keys.
        """
        later = [item for item in self.lanes() if lane.segment.precedes(item.segment)]
        later.sort(key=lambda item: item.id.epoch)
        for parcel in lane.held():
            if later[0].segment.range.holds(lane.segment.range):
                parcel.sequence = _UNNUMBERED
                later[0].inherited.append(parcel)
            else:
                for piece, heir in self._split(parcel, later):
                    heir.inherited.append(piece)


def following(sequence: int, count: int) -> int:
    """Return the sequence number after ``count`` records from ``sequence`` on: 2^31-1 is followed by 0."""
    return (sequence + count) & SEQUENCE_MAX


def _later(one: int, other: int) -> int:
    """Return the later of two sequence numbers that are not far apart."""
    return other if (other - one) & SEQUENCE_MAX < SEQUENCE_MAX >> 1 else one
