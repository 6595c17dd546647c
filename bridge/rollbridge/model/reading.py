"""Reading order: which segments of a stream may be read now, and from where.

A segment may be read once all its predecessors have been read to their sealed ends, so the records of a key arrive in
the order in which they became visible, across scales and rolling commits. Segments that do not continue each other are
read side by side.

Source: Pravega's readers finish the segments of a transition before they go on, and PDP-24 relies on that; hanging on
empty segments and empty epochs (pravega#2679) is what an implementation has to watch for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.errors import InvalidRequestError, StreamRecreatedError, TruncatedError
from rollbridge.model.ids import SegmentId

_STEPS_OF_A_ROLL: Final = 2
"""Segments that a rolling commit adds behind one another; a scale adds one."""


class ReadingPlan:
    """How far a stream has been read. Not thread-safe.

    Ask it with :meth:`readable` what to read, and with :meth:`wanted` what of that to hand out; tell it with
    :meth:`reached` how far that has come, and of new epochs with :meth:`update`. It never leaves a segment before its
    end and never has a record handed out twice.

    Attributes:
        changes: Grows whenever other segments are to be read than before.
    """

    def __init__(
        self,
        history: EpochHistory,
        *,
        start: Mapping[SegmentId, int] | None = None,
        floor: Mapping[SegmentId, int] | None = None,
        goals: Mapping[SegmentId, int] | None = None,
    ) -> None:
        """Plan to read a stream.

        Args:
            history: Its epochs as of now.
            start: Offsets to begin at, by segment; what these segments continue counts as read. None: everything is
                read from the first epoch on.
            floor: Offsets below which there is nothing to be read; they say nothing of other segments.
            goals: Where to stop in each active segment; epochs that are added later are then left out. None: read on
                for ever.

        Raises:
            InvalidRequestError: ``start`` names a segment that the stream does not have, or two of which one continues
                the other.
            StreamRecreatedError: ``start`` is of a stream of the same name that was deleted.
        """
        history.check_life("of this name", start or ())
        self.changes = 0
        self._goals = goals
        self._next_epoch = history.next_epoch
        self._position = {**(floor or {}), **(start or {})}
        self._done: set[SegmentId] = set()
        self._adopt(history)
        for segment in start or ():
            if segment not in self._nodes:
                raise InvalidRequestError(f"there is no segment {segment} in the stream")
        continued = self._history.graph.ancestors(start or ())
        if both := continued.intersection(start or ()):
            raise InvalidRequestError(
                f"what continues segment {min(both)} is to be read from a place of its own, so it cannot be begun at"
            )
        self._done |= continued
        self._adopt(history)

    def update(self, history: EpochHistory) -> bool:
        """Take the stream's epochs as they are now: there may be more, and sealed ends may have become known.

        Returns False if more epochs were known than these; nothing is forgotten then.

        Raises:
            StreamRecreatedError: it is not the same stream any more.
            TruncatedError: epochs were dropped whose records had not all been read, as far as is known here.
        """
        if history.is_outdated(self._history):
            return False
        if not history.is_later(self._history):
            raise StreamRecreatedError("the stream was deleted and created again while it was being read; begin anew")
        lost = sorted(item for item in self._nodes if item not in self._done and history.is_dropped(item))
        if lost:
            raise TruncatedError(
                f"segment {lost[0]} was removed, and its epoch dropped, before it was known to have been read to its "
                "end; begin at 'earliest', or at a later position"
            )
        self._adopt(history)
        return True

    def readable(self) -> dict[SegmentId, int]:
        """Return the segments to read now and the offset at which each goes on."""
        return {segment: self._position.get(segment, 0) for segment in self._ready}

    def frontier(self) -> dict[SegmentId, int]:
        """Return the ``start`` of a plan that goes on from here: the next offset of each segment at the front.

        At the front is what is being read, and what has been read while nothing that continues it has been begun.
        """
        front = {
            segment: self._position.get(segment, 0)
            for segment in self._done & self._nodes.keys()
            if not any(after in self._ready or after in self._done for after in self._nodes[segment].successors)
        }
        return front | self.readable()

    def wanted(self, segment: SegmentId, end: int) -> range:
        """Return the offsets to hand out of a segment that was read up to ``end``; none if it is not being read.

        Left out are those handed out before, those beyond the goal, and those behind the end of a sealed segment: such
        records came late, and leaders write them to the successors.
        """
        start = self._position.get(segment, 0)
        if segment not in self._ready:
            return range(start, start)
        limit = self._limit(segment)
        return range(start, max(start, end if limit is None else min(end, limit)))

    def is_limit(self, segment: SegmentId, end: int) -> bool:
        """Return whether nothing of a segment is wanted from ``end`` on, as far as is known."""
        limit = self._limit(segment)
        return limit is not None and end >= limit

    def reached(self, segment: SegmentId, position: int) -> None:
        """Take note that nothing is left below ``position``; markers between and after records take offsets too."""
        if segment not in self._done:
            self._position[segment] = max(position, self._position.get(segment, 0))
            self._open([segment])

    def is_finished(self) -> bool:
        """Return True if everything up to the goals has been read; never without goals."""
        return self._goals is not None and self._done.issuperset(self._nodes)

    def waits_for_ends(self) -> bool:
        """Return True if a segment that is being read was replaced and its end is unknown: reload the history soon."""
        return any(self._nodes[segment].successors and self._limit(segment) is None for segment in self._ready)

    def is_at_front(self) -> bool:
        """Return True if nothing is being read but segments that have not been replaced."""
        return not any(self._nodes[segment].successors for segment in self._ready)

    def is_far_behind(self) -> bool:
        """Return True if more segments follow one that is being read than a scale or a rolling commit adds."""
        following: set[SegmentId] = set(self._ready)
        for _ in range(_STEPS_OF_A_ROLL + 1):
            following = {item for segment in following for item in self._nodes[segment].successors}
        return bool(following)

    def _adopt(self, history: EpochHistory) -> None:
        if self._goals is not None:
            history = history.before(self._next_epoch)
        self._history = history
        self._nodes = history.graph.nodes
        self._ready: dict[SegmentId, None] = {}
        self.changes += 1
        self._open(self._nodes)

    def _open(self, segments: Iterable[SegmentId]) -> None:
        """Make segments readable whose predecessors are done. What is read already, or empty, is done at once."""
        waiting = deque(segments)
        while waiting:
            segment = waiting.popleft()
            if segment in self._done or not self._done.issuperset(self._nodes[segment].predecessors):
                continue
            limit = self._limit(segment)
            if limit is not None and self._position.get(segment, 0) >= limit:
                self.changes += 1
                self._done.add(segment)
                self._ready.pop(segment, None)
                waiting.extend(self._nodes[segment].successors)
            else:
                self._ready[segment] = None

    def _limit(self, segment: SegmentId) -> int | None:
        """Return the end of a segment for this plan; None while that is open."""
        if self._goals is not None and segment in self._goals:
            return self._goals[segment]
        return self._nodes[segment].sealed_end
