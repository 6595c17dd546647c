"""Lanes: which batch may be written to which segment, while segments are sealed and succeeded. Pure, no I/O.

A lane is one segment as one producer writes it. Batches wait in it, are under way, and are answered in order. When the
broker refuses one because the segment is sealed, it and all behind it come back; when the history says by which
segments it is succeeded, they are handed over to these, ahead of what was written later. A successor is written only
when no lane that it continues holds anything any more, so the records of a key keep their order.

A batch whose answer was lost is *doubtful*: it may have been written. To the same segment it is sent again with the
same sequence number, by which the broker recognises it. A sealed segment refuses it without looking, so then its end
must be read before anything of the lane is handed over: see :meth:`Course.unresolved`.

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
from rollbridge.model.segment_graph import Segment

SEQUENCE_MAX: Final = (1 << 31) - 1
_UNNUMBERED: Final = -1


class Phase(Enum):
    """How far the life of a segment has got, as its writer knows it."""

    OPEN = "open"
    REFUSED = "refused"
    """The broker takes no more; the history does not say yet what comes next."""
    ENDED = "ended"
    """The history says that it is succeeded."""


class Event(Enum):
    """What a writer hears of a segment."""

    REFUSAL = "refusal"
    RETRY = "retry"
    """A while has passed since the refusal: perhaps it was none for good."""
    END = "end"


TRANSITIONS: Final[Mapping[tuple[Phase, Event], Phase]] = MappingProxyType(
    {
        (Phase.OPEN, Event.REFUSAL): Phase.REFUSED,
        (Phase.OPEN, Event.RETRY): Phase.OPEN,
        (Phase.OPEN, Event.END): Phase.ENDED,
        (Phase.REFUSED, Event.REFUSAL): Phase.REFUSED,
        (Phase.REFUSED, Event.RETRY): Phase.OPEN,
        (Phase.REFUSED, Event.END): Phase.ENDED,
        (Phase.ENDED, Event.REFUSAL): Phase.ENDED,
        (Phase.ENDED, Event.RETRY): Phase.ENDED,
        (Phase.ENDED, Event.END): Phase.ENDED,
    }
)


class Parcel:
    """A batch as far as lanes look at it.

    Attributes:
        count: Records in it, which is how many sequence numbers it takes.
        sequence: Its first sequence number in its lane; negative before it was sent.
        doubtful: Whether it may have been written although no answer says so.
    """

    __slots__ = ("count", "doubtful", "sequence")

    def __init__(self) -> None:
        self.count = 0
        self.sequence = _UNNUMBERED
        self.doubtful = False


P = TypeVar("P", bound=Parcel)


class Lane(Generic[P]):
    """One segment as one producer writes it. What may be done to it is up to its :class:`Course`.

    Attributes:
        course: The stream to which it belongs.
        segment: Id and key range.
        topic: The segment's topic.
        open: The batch that is being filled; it is in no queue yet.
        inherited: What was meant for segments that this one continues; goes first.
        queue: What was written to this one.
        in_flight: What was sent and is not answered, in order.
        sealed_end: Offset after the last record, once it has ended and that is known.
        last_offset: Where the last batch that was acknowledged ends, or the log did before the first one was sent:
            what is doubtful stands behind it, if it is there; -1 if not even that is known.
        epoch: Leader epoch under which the log had come so far; -1 if that is not known.
        placed: Whether where the log ends was asked for since the producer has its id, as it must be before it sends.
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
        "topic",
    )

    def __init__(self, course: Course[P], segment: Segment, topic: str) -> None:
        self.course = course
        self.segment = segment
        self.topic = topic
        self.phase = Phase.OPEN
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
    def id(self) -> SegmentId:
        """The segment's id."""
        return self.segment.id

    @property
    def waiting(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self.inherited or self.queue)

    def held(self) -> Iterator[P]:
        """Everything that is neither written nor given up, in order, except the open batch."""
        yield from self._returned
        yield from self.in_flight
        yield from self.inherited
        yield from self.queue

    def may_send(self) -> bool:
        """Whether :meth:`take` would give something.

        A broker that has nothing of a producer takes whatever sequence number comes, so the first batch goes alone:
        if it were refused for a moment, the second would be written before it. Doubtful ones go alone, too: a broker
        recognises the last five batches only, so nothing may be written behind one that is not answered.
        """
        if self.phase is not Phase.OPEN or self._returned or self._renumber or not self.waiting:
            return False
        if self.in_flight:
            fresh = self.inherited[0] if self.inherited else self.queue[0]
            if not self._known or fresh.doubtful or self.in_flight[-1].doubtful:
                return False
        return not self.course.closed and not self.course.is_blocked(self)

    def take(self) -> P:
        """The next batch to send, with its sequence number; it is under way from now on. Ask :meth:`may_send` first."""
        parcel = self.inherited.popleft() if self.inherited else self.queue.popleft()
        if parcel.sequence < 0:
            parcel.sequence = self._next
        self._next = _later(self._next, following(parcel.sequence, parcel.count))
        self.in_flight.append(parcel)
        return parcel

    def place(self, end: int, epoch: int) -> None:
        """Nothing of this producer stands before ``end``, where the log ended before anything was sent.

        Args:
            end: That offset; 0 if it can not be told.
            epoch: The leader epoch at that time; -1 if it can not be told.
        """
        self.last_offset, self.epoch, self.placed = end - 1, epoch, True

    def acknowledge(self, parcel: P, last_offset: int) -> None:
        """A batch under way was written; ``last_offset`` is that of its last record.

        That may be lower than what is known: the log has lost its end then, and what comes next stands behind this one.
        """
        self.in_flight.remove(parcel)
        parcel.doubtful = False
        self.last_offset = last_offset
        self._acked = _later(self._acked, following(parcel.sequence, parcel.count))
        self._known = True
        self._gather()

    def refuse(self, parcel: P) -> None:
        """A batch under way was refused because the segment is sealed."""
        self.phase = TRANSITIONS[self.phase, Event.REFUSAL]
        self.give_back(parcel, doubtful=False)

    def give_back(self, parcel: P, *, doubtful: bool) -> None:
        """A batch under way has to be sent again; ``doubtful`` if this time it may have been written."""
        self.in_flight.remove(parcel)
        parcel.doubtful |= doubtful
        self._returned.append(parcel)
        self._gather()

    def is_next(self, parcel: P) -> bool:
        """Whether everything before a batch was acknowledged."""
        return parcel.sequence == self._acked

    def misplace(self, parcel: P) -> None:
        """A batch under way was refused because one before it was: it is not written, and gets another number."""
        parcel.doubtful = False
        self._renumber = True
        self.give_back(parcel, doubtful=False)

    def exchange(self, parcel: P, others: Iterable[P]) -> None:
        """A batch under way was refused, and others take its place; none of it is written."""
        self.in_flight.remove(parcel)
        self._returned.extend(others)
        self._renumber = True
        self._gather()

    def drop(self, parcel: P) -> None:
        """A batch, under way or not, is given up.

        What comes after it must not leave a gap in the numbers. A doubtful one keeps its own: it may have been
        written, and whatever got the same numbers would be taken for it.
        """
        for place in (self.in_flight, self._returned, self.inherited, self.queue):
            if parcel in place:
                place.remove(parcel)
        self._renumber |= not parcel.doubtful
        self._gather()

    def retry(self) -> None:
        """Try again what was refused a while ago."""
        self.phase = TRANSITIONS[self.phase, Event.RETRY]

    def restart(self) -> None:
        """The producer has got a new id, whose sequence numbers begin at 0. Nothing is under way, nothing doubtful."""
        self._next = self._acked = 0
        self._known = False
        self.last_offset = self.epoch = -1
        self.placed = False  # it may have lost its end, which is why the id is new
        for parcel in self.held():
            parcel.sequence = _UNNUMBERED

    def _gather(self) -> None:
        """Once nothing is under way any more, put what came back in front."""
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


Split = Callable[[P, Sequence[Lane[P]]], Iterable[tuple[P, Lane[P]]]]
"""Takes a batch apart: each record goes to the first of the lanes that holds its key; in order, as new batches."""


class Course(Generic[P]):
    """The lanes of one stream, from epoch to epoch. Not thread-safe.

    Attributes:
        active: The lanes of the active epoch, in order of their key ranges.
        closed: Whether nothing will be sent or handed over any more.
    """

    def __init__(self, history: EpochHistory, topic_of: Callable[[SegmentId], str], split: Split[P]) -> None:
        """Start in the active epoch of a history."""
        self._topic_of = topic_of
        self._split = split
        self._ended: list[Lane[P]] = []
        self.closed = False
        self.active: list[Lane[P]] = []
        self.adopt(history)

    def adopt(self, history: EpochHistory) -> None:
        """Take the epochs as they are now. The open batches of lanes that end must have been closed before."""
        lanes = {lane.id: lane for lane in (*self._ended, *self.active)}
        current = history.active.segments
        wanted = {item.id for item in current}
        for lane in lanes.values():
            if lane.id not in wanted:
                if lane.phase is not Phase.ENDED:
                    self._ended.append(lane)
                lane.phase = TRANSITIONS[lane.phase, Event.END]
                # Of a dropped one the end is not known any more: nobody has answered for that long.
                if not history.is_dropped(lane.id):
                    lane.sealed_end = history.sealed_end(lane.id)
        self._ended.sort(key=lambda lane: lane.id.epoch)
        self.active = [lanes.get(item.id) or Lane(self, item, self._topic_of(item.id)) for item in current]
        self.drain()

    def close(self) -> None:
        """Forget what waits, and send nothing any more; what is under way may still be answered."""
        self.closed = True
        for lane in self.lanes():
            lane.inherited.clear()
            lane.queue.clear()

    def lanes(self) -> tuple[Lane[P], ...]:
        """All lanes that hold something or may be written, older ones first."""
        return (*self._ended, *self.active)

    def is_blocked(self, lane: Lane[P]) -> bool:
        """Whether a lane that this one continues still holds something."""
        return any(before.segment.precedes(lane.segment) for before in self._ended)

    def drain(self) -> bool:
        """Hand over what lanes that have ended hold, as far as it is known and in order; whether there was any."""
        moved = False
        for lane in () if self.closed else tuple(self._ended):
            if lane.in_flight or self.is_blocked(lane) or any(parcel.doubtful for parcel in lane.held()):
                continue
            self._ended.remove(lane)
            self._hand_over(lane)
            moved = True
        return moved

    def unresolved(self) -> list[Lane[P]]:
        """Lanes that have ended, of which the log must be read to know what of them was written."""
        if self.closed:
            return []
        return [
            lane
            for lane in self._ended
            if lane.sealed_end is not None and not lane.in_flight and any(parcel.doubtful for parcel in lane.held())
        ]

    def resolve(
        self, lane: Lane[P], written: Mapping[int, int], gap: tuple[int, int] | None = None
    ) -> tuple[list[tuple[P, int]], list[P]]:
        """Take note of what stands in a sealed log.

        Args:
            lane: One of :meth:`unresolved`.
            written: The offset of each batch of this producer after ``lane.last_offset``, by its sequence number.
            gap: The offsets there, from the first one to the last one and 1, of which nobody can tell what stood there.

        Returns:
            The batches that were written, with their offsets, and those of which it can not be told.
        """
        doubtful = [parcel for parcel in lane.held() if parcel.doubtful]
        places = [written.get(parcel.sequence) for parcel in doubtful]
        found, unknown = [], []
        for number, (parcel, offset) in enumerate(zip(doubtful, places, strict=True)):
            if offset is not None:
                found.append((parcel, offset))
            elif gap is not None:
                # Batches stand in the order of their numbers, so between those that are there.
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

    def _hand_over(self, lane: Lane[P]) -> None:
        """Give what a lane holds to those that come next in the lineage of each key.

        Not to the active ones at once: a lane between them that has ended may still hold, or get, what was written
        later for the same keys.
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
    """The sequence number after ``count`` records from ``sequence`` on: after 2^31-1 comes 0."""
    return (sequence + count) & SEQUENCE_MAX


def _later(one: int, other: int) -> int:
    """The later of two sequence numbers that are not far apart."""
    return other if (other - one) & SEQUENCE_MAX < SEQUENCE_MAX >> 1 else one
