"""Truncation of streams: what a cut removes, how far it may go, and which epochs expire after it. Pure.

A *cut* names offsets in segments none of which continues another: a position of a reader. Truncating at it deletes
what is below these offsets, and everything that their segments continue. *Floors* say the same of every segment: the
offset below which nothing is left. A segment may have a floor only if everything that it continues is gone, so that
the records of a key are always deleted from the oldest on, and a reader never meets a gap.

An epoch expires when every segment that ended with it is removed, topic included, unless it is still needed:

- by a transaction that refers to it: one that is open or undecided, or one that a client begins before it hears of a
  newer epoch;
- by a retention mark that names one of its segments;
- by the epoch after it, whose first segments continue removed ones; a reader at their ends still has to find them. So
  one epoch more is kept than has anything left.

Source: Pravega's stream cuts (``StreamTruncationRecord``) and its consumption based retention (PDP-47). Differs:
Pravega drops epochs of its history only when it deletes the stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from rollbridge.base.errors import InvalidRequestError, UnavailableError
from rollbridge.base.ids import SegmentId
from rollbridge.stream.epochs import EpochCause, EpochHistory
from rollbridge.stream.reading import Reset, SegmentStanding, decide

Floors = dict[SegmentId, int]


def floors_of(history: EpochHistory, cut: Mapping[SegmentId, int]) -> Floors:
    """Return the floors that truncating at a cut gives, for the segments that it touches.

    Raises:
        InvalidRequestError: it names no segment, one that the stream does not have, an offset beyond a sealed end or
            below 0, or two segments of which one continues the other.
        StreamRecreatedError: it names a segment of a stream of the same name that was deleted.
        UnavailableError: the end of a segment is not known yet.
    """
    if not cut:
        raise InvalidRequestError("a stream is truncated at an offset in one segment at least; nothing was deleted")
    history.check_life("of this name", cut)
    graph = history.graph
    for segment, offset in cut.items():
        node = graph.nodes.get(segment)
        if node is None and not history.is_dropped(segment):
            raise InvalidRequestError(f"there is no segment {segment} in the stream; nothing was deleted")
        end = None if node is None else node.sealed_end
        if not offset >= 0 or (end is not None and offset > end):
            raise InvalidRequestError(
                f"offset {offset} of segment {segment} is beyond its end, which is at {end}; nothing was deleted"
            )
    cut = {
        segment: offset for segment, offset in cut.items() if segment in graph.nodes
    }  # of the others nothing is left
    before = graph.ancestors(cut)
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
    """Return the largest floors, none above the given ones, that delete each key's records from the oldest on."""
    found: Floors = {}
    gone: set[SegmentId] = set()
    for segment, node in history.graph.nodes.items():  # predecessors come first
        if gone.issuperset(node.predecessors):
            end = node.sealed_end
            floor = floors.get(segment, 0)
            if segment in history.removed or (end is not None and floor >= end):
                gone.add(segment)
                floor = end or 0
            if floor:
                found[segment] = floor
    return found


def removable(history: EpochHistory, floors: Mapping[SegmentId, int]) -> list[SegmentId]:
    """Return the segments that are not removed yet and of which these consistent floors leave nothing."""
    gone = set(history.removed)
    found = []
    for segment, node in history.graph.nodes.items():
        end = node.sealed_end
        if (
            segment not in gone
            and end is not None
            and floors.get(segment, 0) >= end
            and gone.issuperset(node.predecessors)
        ):
            gone.add(segment)
            found.append(segment)
    return found


def lower(one: Mapping[SegmentId, int], other: Mapping[SegmentId, int]) -> Floors:
    """Return the floors that delete only what both of two delete; see :func:`consistent`."""
    return {segment: min(floor, other[segment]) for segment, floor in one.items() if segment in other}


def frontier(history: EpochHistory, floors: Mapping[SegmentId, int]) -> Floors:
    """Return the cut at which a stream with these consistent floors begins; the inverse of :func:`floors_of`.

    Of every key the first segment that is left; or the last one that is gone, if what continues it waits for others.
    """
    gone = history.removed | frozenset(removable(history, floors))
    begun = {segment: node for segment, node in history.graph.nodes.items() if gone.issuperset(node.predecessors)}
    return {
        segment: (node.sealed_end or 0) if segment in gone else floors.get(segment, 0)
        for segment, node in begun.items()
        if segment not in gone or (gone.isdisjoint(node.successors) and begun.keys().isdisjoint(node.successors))
    }


def read_by_group(history: EpochHistory, committed: Mapping[SegmentId, int]) -> Floors:
    """Return the floors that leave a consumer group all that it has not read, going by its commits.

    A segment that it has read to its end is kept, with its last offset, until the group has a commit in everything that
    continues it: Kafka drops the commits of a topic that is deleted, and the group would not know that it had begun.
    """
    if not committed:
        return {}
    verdicts = decide(history, committed, Reset.EARLIEST)
    unopened = [
        segment
        for segment, verdict in verdicts.items()
        if verdict.standing is not SegmentStanding.DONE and segment not in committed
    ]
    needed = history.graph.ancestors(unopened, stop=committed.__contains__)
    floors: Floors = {}
    for segment, verdict in verdicts.items():
        end = history.sealed_end(segment)
        if verdict.standing is SegmentStanding.DONE and end is not None:
            floors[segment] = max(end - 1, 0) if segment in needed and segment in committed else end
        elif verdict.standing is SegmentStanding.READ:
            floors[segment] = verdict.offset
    return floors


# Expiry of epochs


SEGMENTS_AT_ONCE: Final = 20_000
"""Segments, counted in each epoch, of what is dropped in one step."""
EPOCHS_AT_ONCE: Final = 500
"""Epochs that are dropped in one step: each is one operation of a ZooKeeper multi."""


def first_needed(
    history: EpochHistory,
    *,
    topics_left: Collection[SegmentId] = (),
    since_ms: int,
    references: Iterable[int] = (),
    named: Iterable[SegmentId] = (),
) -> int:
    """Return the first epoch that is still needed.

    Args:
        history: The stream's epochs.
        topics_left: Removed segments whose topics may still exist.
        since_ms: Clients may still take an epoch for the active one if it was active at this time or later.
        references: Epochs to which open or undecided transactions refer.
        named: Segments that are named in requests or records.
    """
    gone = history.removed.difference(topics_left)
    grown = {record.epoch for record in history.records if record.cause is EpochCause.GROWN}
    duplicates = {
        item.id
        for record in history.records
        if record.cause is EpochCause.ROLLING_TRANSACTIONS and record.reference_epoch in grown
        for item in history.began_with(record.epoch)
    }
    last = history.first
    for record in history.records[1:]:
        if record.sealed_ends is None or any(item.id not in gone for item in history.ended_with(record.epoch)):
            break
        if record.cause is EpochCause.GROWN and not record.segment_ids | duplicates <= gone:
            break  # the epochs before it say where keys have lain
        last = record.epoch
    if last - 1 <= history.first:
        return history.first
    later = next((place for place, item in enumerate(history.records) if item.created_ms > since_ms), None)
    in_force = history.records[max((len(history.records) if later is None else later) - 1, 0) :]
    roots = [item.reference_epoch for item in in_force if item.cause is not EpochCause.ROLLING_TRANSACTIONS]
    nodes = [history.graph.nodes.get(item) for item in named]  # what is dropped is as good as in the first epoch
    ends = [history.first if node is None else (node.successor_epoch or history.next_epoch) - 1 for node in nodes]
    return max(min(last - 1, history.active.reference_epoch, *roots, *references, *ends), history.first)


def step_towards(history: EpochHistory, first: int) -> int:
    """Return the epoch to drop up to in one step, on the way to ``first``."""
    segments = 0
    for place, record in enumerate(history.records[:EPOCHS_AT_ONCE]):
        segments += len(record.segments)
        if record.epoch == first or (place and segments > SEGMENTS_AT_ONCE):
            return record.epoch
    return min(first, history.first + EPOCHS_AT_ONCE)
