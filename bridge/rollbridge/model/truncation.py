"""Truncation of streams: what a cut takes away, and how far it may go. Pure.

A *cut* names offsets in segments none of which continues another: a position of a reader. Truncating at it deletes
what is below these offsets, and everything that their segments continue. *Floors* say the same of every segment: the
offset below which nothing is left. A segment may have a floor only if everything that it continues is gone, so that
the records of a key are always deleted from the oldest on, and a reader never meets a gap.

Source: Pravega's stream cuts (``StreamTruncationRecord``) and its consumption based retention (PDP-47).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.errors import InvalidRequestError, UnavailableError
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.lineage import lineage
from rollbridge.model.sharing import Reset, Standing, decide

Floors = dict[SegmentId, int]


def ancestors(history: EpochHistory, segments: Iterable[SegmentId]) -> frozenset[SegmentId]:
    """Everything that the given segments continue, however far back."""
    return _reached(segments, _neighbours(history)[0])


def descendants(history: EpochHistory, segments: Iterable[SegmentId]) -> frozenset[SegmentId]:
    """Everything that continues the given segments."""
    return _reached(segments, _neighbours(history)[1])


def floors_of(history: EpochHistory, cut: Mapping[SegmentId, int]) -> Floors:
    """The floors that truncating at a cut gives, for the segments that it touches.

    Raises:
        InvalidRequestError: it names no segment, one that the stream does not have, an offset beyond a sealed end or
            below 0, or two segments of which one continues the other.
        StreamRecreated: it names a segment of a stream of the same name that was deleted.
        UnavailableError: the end of a segment is not known yet.
    """
    if not cut:
        raise InvalidRequestError("a stream is truncated at an offset in one segment at least; nothing was deleted")
    history.check_life("of this name", cut)
    known = history.segments()
    for segment, offset in cut.items():
        if segment not in known and not history.is_dropped(segment):
            raise InvalidRequestError(f"there is no segment {segment} in the stream; nothing was deleted")
        end = history.sealed_end(segment) if segment in known else None
        if not offset >= 0 or (end is not None and offset > end):
            raise InvalidRequestError(
                f"offset {offset} of segment {segment} is beyond its end, which is at {end}; nothing was deleted"
            )
    cut = {segment: offset for segment, offset in cut.items() if segment in known}  # of the others nothing is left
    before = ancestors(history, cut)
    if both := before & cut.keys():
        raise InvalidRequestError(
            f"what continues segment {min(both)} is to be truncated at a place of its own; nothing was deleted"
        )
    floors = dict(cut)
    for segment in before:
        end = history.sealed_end(segment)
        if end is None:
            raise UnavailableError(f"the end of segment {segment} is not known yet; nothing was deleted; try again")
        floors[segment] = end
    return floors


def consistent(history: EpochHistory, floors: Mapping[SegmentId, int]) -> Floors:
    """The largest floors, none above the given ones, that delete the records of every key from the oldest on."""
    before = _neighbours(history)[0]
    found: Floors = {}
    gone: set[SegmentId] = set()
    for segment in history.segments():  # predecessors come first
        if all(item in gone for item in before[segment]):
            end = history.sealed_end(segment)
            floor = floors.get(segment, 0)
            if segment in history.removed or (end is not None and floor >= end):
                gone.add(segment)
                floor = end or 0
            if floor:
                found[segment] = floor
    return found


def removable(history: EpochHistory, floors: Mapping[SegmentId, int]) -> list[SegmentId]:
    """Segments that are not removed yet and of which these floors, being consistent, leave nothing."""
    before = _neighbours(history)[0]
    gone = set(history.removed)
    found = []
    for segment in history.segments():
        end = history.sealed_end(segment)
        if (
            segment not in gone
            and end is not None
            and floors.get(segment, 0) >= end
            and gone.issuperset(before[segment])
        ):
            gone.add(segment)
            found.append(segment)
    return found


def lower(one: Mapping[SegmentId, int], other: Mapping[SegmentId, int]) -> Floors:
    """Floors that delete only what both of two delete; see :func:`consistent`."""
    return {segment: min(floor, other[segment]) for segment, floor in one.items() if segment in other}


def frontier(history: EpochHistory, floors: Mapping[SegmentId, int]) -> Floors:
    """The cut at which a stream with these consistent floors begins; the inverse of :func:`floors_of`.

    Of every key the first segment that is left; or the last one that is gone, if what continues it waits for others.
    """
    before, after = _neighbours(history)
    gone = history.removed | frozenset(removable(history, floors))
    begun = [segment for segment in history.segments() if gone.issuperset(before[segment])]
    return {
        segment: (history.sealed_end(segment) or 0) if segment in gone else floors.get(segment, 0)
        for segment in begun
        if segment not in gone or not gone.union(begun).intersection(after[segment])
    }


def read_by_group(history: EpochHistory, committed: Mapping[SegmentId, int]) -> Floors:
    """Floors that leave a consumer group all that it has not read, going by what it has committed.

    A segment that it has read to its end is kept, with its last offset, until the group has a commit in everything that
    continues it: Kafka drops the commits of a topic that is deleted, and the group would not know that it had begun.
    """
    if not committed:
        return {}
    verdicts = decide(history, committed, Reset.EARLIEST)
    unopened = [
        segment
        for segment, verdict in verdicts.items()
        if verdict.standing is not Standing.DONE and segment not in committed
    ]
    ways = {segment: [] if segment in committed else items for segment, items in _neighbours(history)[0].items()}
    needed = _reached(unopened, ways)
    floors: Floors = {}
    for segment, verdict in verdicts.items():
        end = history.sealed_end(segment)
        if verdict.standing is Standing.DONE and end is not None:
            floors[segment] = max(end - 1, 0) if segment in needed and segment in committed else end
        elif verdict.standing is Standing.READ:
            floors[segment] = verdict.offset
    return floors


def _neighbours(history: EpochHistory) -> tuple[dict[SegmentId, list[SegmentId]], dict[SegmentId, list[SegmentId]]]:
    """What each segment continues, and what continues it."""
    whole = lineage(history)
    before: dict[SegmentId, list[SegmentId]] = {life.segment.id: [] for life in whole.lives}
    after: dict[SegmentId, list[SegmentId]] = {life.segment.id: [] for life in whole.lives}
    for link in whole.links:
        before[link.after].append(link.before)
        after[link.before].append(link.after)
    return before, after


def _reached(segments: Iterable[SegmentId], ways: Mapping[SegmentId, list[SegmentId]]) -> frozenset[SegmentId]:
    found: set[SegmentId] = set()
    waiting = list(segments)
    while waiting:
        fresh = [item for item in ways[waiting.pop()] if item not in found]
        found.update(fresh)
        waiting.extend(fresh)
    return frozenset(found)
