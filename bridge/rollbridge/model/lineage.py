"""The lineage of a stream's segments: which was active when, over which keys, and what each one continues.

This is what a picture or a table of an epoch history needs, worked out in one pass over the epochs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rollbridge.model.epochs import EpochCause, EpochHistory, Segment
from rollbridge.model.errors import InvalidRequestError, StreamRecreated, TruncatedError, UnavailableError
from rollbridge.model.ids import SegmentId
from rollbridge.model.keyspace import KeyRange
from rollbridge.model.names import StreamName
from rollbridge.model.sn import sequence_bases


@dataclass(frozen=True, slots=True)
class Life:
    """One segment from its first epoch, of those that are kept, to its last, the newest one while it is active."""

    segment: Segment
    partition: int
    """What names it to clients of Kafka as long as the stream lives: segments are counted in the order of their first
    epochs and ranges. A segment's number is given to each duplicate that a rolling commit makes of it, this is not."""
    first: int
    last: int
    cause: EpochCause
    """Why the epoch was made in which it began."""
    active: bool
    sealed_end: int | None
    """Offset after its last record; None while it is active or being sealed."""


@dataclass(frozen=True, slots=True)
class Link:
    """``after`` continues ``before`` on the keys of ``range``, from epoch ``epoch`` on."""

    before: SegmentId
    after: SegmentId
    epoch: int
    range: KeyRange


@dataclass(frozen=True, slots=True)
class Lineage:
    """Lives in order of their first epoch and their range; links in order of their epoch and range."""

    lives: tuple[Life, ...]
    links: tuple[Link, ...]
    partitions: Mapping[SegmentId, int] = field(init=False, repr=False, compare=False)
    """The partition number of each segment; see :class:`Life`."""
    segments: Mapping[int, SegmentId] = field(init=False, repr=False, compare=False)
    """The segment of each partition number."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "partitions", {life.segment.id: life.partition for life in self.lives})
        object.__setattr__(self, "segments", {life.partition: life.segment.id for life in self.lives})


def lineage(history: EpochHistory) -> Lineage:
    """The lives of all segments of a history and the links between them.

    That of the last history is kept: whoever follows a stream asks again and again for the same one.
    """
    global _last
    known, found = _last
    if known is not history:
        found = _lineage(history)
        _last = history, found
    return found


_last: tuple[EpochHistory | None, Lineage] = None, Lineage((), ())


def topic_of_partition(
    stream: StreamName, partition: int, known: EpochHistory, reread: Callable[[], EpochHistory]
) -> str:
    """The topic of the segment that a partition number names.

    Args:
        stream: The stream.
        partition: The number.
        known: The stream's epochs as they were last seen.
        reread: Reads them again; called for a number that they do not have yet.

    Raises:
        InvalidRequestError: no segment has had it so far.
        TruncatedError: the segment was removed, and its epochs have been dropped since.
        StreamRecreated: it was one of a stream that was deleted before this one was created.
    """
    history = known if partition <= max(lineage(known).segments) else reread()
    segments = lineage(history).segments
    found = segments.get(partition)
    if found is not None:
        return stream.segment_topic(found)
    if not 0 <= partition <= max(segments):
        raise InvalidRequestError(f"{stream} has had no partition {partition} so far; the last one is {max(segments)}")
    if history.first == history.born:
        raise StreamRecreated(
            f"partition {partition} is of a stream {stream} that was deleted; the one that was created under its name "
            f"since begins with partition {min(segments)}"
        )
    raise TruncatedError(f"partition {partition} of {stream} was removed: all its records have been truncated")


def _lineage(history: EpochHistory) -> Lineage:
    newest = history.active.epoch
    kept = () if history.foundation is None else history.foundation.partitions
    counted = itertools.chain(kept, itertools.count(1 + max(kept, default=-1)))
    lives: dict[SegmentId, Life] = {}
    links: list[Link] = []
    for record in history.records:
        ended, began = history.ended_with(record.epoch), history.began_with(record.epoch)
        for item in ended:
            ends = record.sealed_ends
            end = None if ends is None else ends.get(item.id)
            lives[item.id] = replace(lives[item.id], last=record.epoch - 1, active=False, sealed_end=end)
        for item in began:
            lives[item.id] = Life(item, next(counted), record.epoch, newest, record.cause, True, None)
        links.extend(_links(record.epoch, ended, began))
    return Lineage(tuple(lives.values()), tuple(links))


def _links(epoch: int, before: Sequence[Segment], after: Sequence[Segment]) -> list[Link]:
    """What begins with an epoch, joined with what ended; both sorted by range, so one sweep finds every overlap."""
    found: list[Link] = []
    old = new = 0
    while old < len(before) and new < len(after):
        one, other = before[old], after[new]
        low, high = max(one.range.low, other.range.low), min(one.range.high, other.range.high)
        if low < high:
            found.append(Link(one.id, other.id, epoch, KeyRange(low, high)))
        if one.range.high <= other.range.high:
            old += 1
        if other.range.high <= one.range.high:
            new += 1
    return found


# --------------------------------------------------------------------------------------------------------------------
# The course of a key: the segments in which its records stand, one after the other, up to the active one.
# Segments have several predecessors after a merge and several successors after a split, but a key is in one segment
# of each epoch, so that "the last record before" has one meaning for it.


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
