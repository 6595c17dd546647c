"""The course of a key: the segments in which its records stand, one after the other, up to the active one.

Segments have several predecessors after a merge and several successors after a split, but a key is in one segment of
each epoch, so that "the last record before" has one meaning for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.errors import UnavailableError
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.sn import sequence_bases


@dataclass(frozen=True, slots=True)
class Stage:
    """One segment of a course; sequence ids in it begin at ``base``; ``end`` is its sealed end, None while active.

    All records of a ``removed`` one have been truncated, and its topic is gone.
    """

    segment: SegmentId
    base: int
    end: int | None
    removed: bool = False


class Course:
    """The segments of one position of the key space. Immutable; stages are worked out when they are asked for.

    Attributes:
        active: The active segment.
        active_base: Where its sequence ids begin.
        dropped_end: The sequence id after the last record that may have stood in epochs which the history has dropped;
            0 if there was none.
        born_sequence: The first sequence id of this life of the stream; those below it are of former ones.
    """

    def __init__(self, history: EpochHistory, position: float, bases: dict[SegmentId, int] | None = None) -> None:
        """``bases`` are the history's :func:`~rollbridge.model.sn.sequence_bases`, if they are known already.

        Raises:
            UnavailableError: The end of a predecessor is not known yet, while a scale or a rolling commit is under way.
        """
        self._history = history
        self._position = position
        self._bases = sequence_bases(history) if bases is None else bases
        self.active = history.active.segment_at(position).id
        base = self._bases.get(self.active)
        if base is None:
            raise UnavailableError(
                f"segment {self.active} continues one whose end is not known yet; try again; nothing was written"
            )
        self.active_base = base
        self.dropped_end = 0 if history.foundation is None else history.foundation.end_at(position)
        self.born_sequence = history.born_sequence

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Newest first: the active segment, then what it continues, as far as it is kept."""
        found: list[Stage] = []
        for record in reversed(self._history.records):
            segment = record.segment_at(self._position).id
            if not found or found[-1].segment != segment:
                end, removed = self._history.sealed_end(segment), segment in self._history.removed
                found.append(Stage(segment, self._bases[segment], end, removed))
        return tuple(found)

    def base(self, segment: SegmentId) -> int | None:
        """Where sequence ids begin in a segment of this course; None for any other segment."""
        if segment == self.active:
            return self.active_base
        return next((stage.base for stage in self.stages if stage.segment == segment), None)

    def is_dropped(self, segment: SegmentId) -> bool:
        """Whether a segment may have been one of this course, in an epoch that the history has dropped."""
        return self._history.is_dropped(segment)
