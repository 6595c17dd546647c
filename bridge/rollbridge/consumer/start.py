"""Where a reader begins, or a stream is cut off: a start, turned into offsets of segments by asking the brokers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from rollbridge.errors import InvalidRequestError, TruncatedError
from rollbridge.kafka.log_offsets import LogOffsets
from rollbridge.kafka.metadata import Isolation
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.names import StreamName
from rollbridge.model.position import At, Earliest, Latest, ReadPosition, Since, Start
from rollbridge.model.truncation import consistent, descendants, frontier


@dataclass(frozen=True, slots=True)
class Begin:
    """What a :class:`~rollbridge.model.reading.ReadingPlan` is to begin with."""

    start: Mapping[SegmentId, int] | None = None
    floor: Mapping[SegmentId, int] = field(default_factory=dict)


def locate(offsets: LogOffsets, stream: StreamName, history: EpochHistory, start: Start) -> Begin:
    """Offsets to begin at.

    Raises:
        InvalidRequestError: a segment that the stream does not have, or an offset beyond its end.
        TruncatedError: records from there on have been deleted.
        StreamRecreated: what it names is of a stream of this name that was deleted.
        KafkaUnavailable, NotFoundError.
    """
    topics = {stream.segment_topic(segment): segment for segment in history.stored()}
    removed = {segment: history.sealed_end(segment) or 0 for segment in history.removed}
    match start:
        case Latest():
            return Begin(readable_ends(offsets, stream, history, Isolation.READ_COMMITTED))
        case Earliest():
            return Begin(floor=removed | _by_segment(topics, offsets.first(topics)))
        case Since(ms):
            return Begin(floor=removed | since(offsets, topics, ms))
        case At(wanted):
            history.check_life(stream, wanted)
            first = removed | _by_segment(topics, offsets.first(topics))
            end = removed | _by_segment(topics, offsets.end(topics, Isolation.READ_UNCOMMITTED))
            for segment, offset in wanted.items():
                if history.is_dropped(segment):
                    raise TruncatedError(
                        f"segment {segment} of {stream} was removed, and its epoch dropped: whatever it held from "
                        f"offset {offset} on has been deleted; begin at 'earliest', or at a later position"
                    )
                _check(stream, segment, offset, first.get(segment), end.get(segment, 0))
            for segment in sorted(descendants(history, wanted)):
                _check(stream, segment, 0, first.get(segment), end.get(segment, 0))
            return Begin(wanted, first)
        case _:
            assert_never(start)


def cut_before(offsets: LogOffsets, stream: StreamName, history: EpochHistory, start: Start) -> Mapping[SegmentId, int]:
    """The cut that takes away what a reader which begins there leaves out; see :mod:`rollbridge.model.truncation`.

    Raises:
        InvalidRequestError: that is nothing.
        StreamRecreated: what it names is of a stream of this name that was deleted.
        KafkaUnavailable, NotFoundError.
    """
    match start:
        case At(wanted):
            history.check_life(stream, wanted)
            return wanted
        case Since(ms):
            stored = {stream.segment_topic(segment): segment for segment in history.stored()}
            return frontier(history, consistent(history, since(offsets, stored, ms)))
        case Latest():
            return readable_ends(offsets, stream, history, Isolation.READ_COMMITTED)
        case Earliest():
            raise InvalidRequestError("there is nothing before the earliest record; nothing was deleted")
        case _:
            assert_never(start)


def beginning(offsets: LogOffsets, stream: StreamName, history: EpochHistory) -> ReadPosition:
    """The first offset that was not deleted of the first segments that are left.

    Raises:
        KafkaUnavailable, NotFoundError.
    """
    begin = locate(offsets, stream, history, Earliest())
    return ReadPosition(stream, frontier(history, consistent(history, begin.floor)))


def since(offsets: LogOffsets, topics: Mapping[str, SegmentId], ms: int) -> dict[SegmentId, int]:
    """The offset of the first record of a time or later in each segment; the end of those that have none.

    Raises:
        KafkaUnavailable, NotFoundError.
    """
    found = offsets.since_or_end(topics, ms)
    return {segment: found[topic] for topic, segment in topics.items()}


def readable_ends(
    offsets: LogOffsets, stream: StreamName, history: EpochHistory, isolation: Isolation
) -> dict[SegmentId, int]:
    """Where the active segments end."""
    topics = {stream.segment_topic(segment): segment for segment in history.active.segment_ids}
    return _by_segment(topics, offsets.end(topics, isolation))


def _by_segment(topics: Mapping[str, SegmentId], found: Mapping[str, int]) -> dict[SegmentId, int]:
    return {topics[topic]: offset for topic, offset in found.items()}


def _check(stream: StreamName, segment: SegmentId, offset: int, first: int | None, end: int) -> None:
    if first is None:
        raise InvalidRequestError(f"{stream} has no segment {segment}, so nothing can be begun there")
    if offset > end:
        raise InvalidRequestError(
            f"offset {offset} of segment {segment} of {stream} is beyond its end, which is at {end}"
        )
    if offset < first:
        raise TruncatedError(
            f"segment {segment} of {stream} begins at offset {first} now: the records from {offset} on have been "
            "deleted; begin at 'earliest', or at a later position"
        )
