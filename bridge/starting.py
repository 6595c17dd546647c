"""Where a reader begins: a start, turned into offsets of segments by asking the brokers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from bridge.errors import InvalidRequestError, TruncatedError
from bridge.kafka.log_offsets import LogOffsets
from bridge.kafka.metadata import Isolation
from bridge.model.epochs import EpochHistory
from bridge.model.identifiers import SegmentId
from bridge.model.names import StreamName
from bridge.model.position import At, Earliest, Latest, Since, Start


@dataclass(frozen=True, slots=True)
class Begin:
    """What a :class:`~bridge.model.reading.ReadingPlan` is to begin with."""

    start: Mapping[SegmentId, int] | None = None
    floor: Mapping[SegmentId, int] = field(default_factory=dict)


def locate(offsets: LogOffsets, stream: StreamName, history: EpochHistory, start: Start) -> Begin:
    """Offsets to begin at.

    Raises:
        InvalidRequestError: a segment that the stream does not have, or an offset beyond its end.
        TruncatedError: records from there on have been deleted.
        KafkaUnavailable, NotFoundError.
    """
    topics = {stream.segment_topic(segment): segment for segment in history.segments()}
    match start:
        case Latest():
            return Begin(readable_ends(offsets, stream, history, Isolation.READ_COMMITTED))
        case Earliest():
            return Begin(floor=_by_segment(topics, offsets.first(topics)))
        case Since(ms):
            found = offsets.since(topics, ms)
            ends = offsets.end([topic for topic in topics if found[topic] is None], Isolation.READ_COMMITTED)
            return Begin(floor={segment: _either(found[topic], ends, topic) for topic, segment in topics.items()})
        case At(wanted):
            first = _by_segment(topics, offsets.first(topics))
            end = _by_segment(topics, offsets.end(topics, Isolation.READ_UNCOMMITTED))
            for segment, offset in wanted.items():
                _check(stream, segment, offset, first.get(segment), end.get(segment, 0))
            return Begin(wanted, first)
        case _:
            assert_never(start)


def readable_ends(
    offsets: LogOffsets, stream: StreamName, history: EpochHistory, isolation: Isolation
) -> dict[SegmentId, int]:
    """Where the active segments end."""
    topics = {stream.segment_topic(segment): segment for segment in history.active.segment_ids}
    return _by_segment(topics, offsets.end(topics, isolation))


def _by_segment(topics: Mapping[str, SegmentId], found: Mapping[str, int]) -> dict[SegmentId, int]:
    return {topics[topic]: offset for topic, offset in found.items()}


def _either(found: int | None, ends: Mapping[str, int], topic: str) -> int:
    return ends[topic] if found is None else found


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
