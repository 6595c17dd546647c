"""Late records: records appended to a segment behind its sealed end, and the notes on their forwarding.

A late record was acknowledged, but no reader goes beyond a sealed end. The leader of the stream's group writes a copy
to the segment that has taken over the key, with a header that names its origin; readers see only the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Final, Self

from rollbridge.base.ids import SegmentId
from rollbridge.base.mapper import NodeRecord, StoredAs
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import Partition

LATE_HEADER: Final = "rollbridge-late"
"""Header of a copy, which names the late record; see :func:`origin`."""

NOTED_MAX: Final = 2_000
"""Limit on segments whose late records are noted, newest first: a ZooKeeper node holds 1 MiB."""
REASON_CHARACTERS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class LateRecord:
    """A record behind the end of a sealed segment."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def origin(partition: Partition, offset: int) -> bytes:
    """Return the header value of a copy: ``TOPIC@OFFSET``, or ``TOPIC:PARTITION@OFFSET`` beyond the first partition."""
    topic, number = partition
    return f"{topic}:{number}@{offset}".encode() if number else f"{topic}@{offset}".encode()


@dataclass(frozen=True, slots=True)
class LateSegment:
    """Notes on the records behind the end of one segment.

    Attributes:
        looked_to: Offset up to which all records were forwarded or refused.
        forwarded: Number of records written to successors of this segment.
        refused: Number of records that the successors definitely refused; they stay where they are.
        reason: Reason of the refusals, with Kafka's code.
    """

    looked_to: int
    forwarded: int = 0
    refused: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Records that are being forwarded, all in one native transaction.

    Attributes:
        segment: Their segment.
        start: Offset of the first of them.
        end: Offset up to which the segment will have been checked.
        targets: The segments that take them, each with its end before.
    """

    segment: SegmentId
    start: int
    end: int
    targets: Annotated[Mapping[SegmentId, int], StoredAs(ascending=True)] = field(hash=False)


@dataclass(frozen=True, slots=True)
class LateNotes(NodeRecord):
    """Notes on a stream's late records; most streams have none.

    Attributes:
        segments: What was done behind the end of each segment.
        forwarding: What is being forwarded; None if nothing is.
        revision: How often the notes were changed.
    """

    SCHEMA: ClassVar = "late"

    segments: Annotated[Mapping[SegmentId, LateSegment], StoredAs(ascending=True)] = field(
        default_factory=dict, hash=False
    )
    forwarding: Forwarding | None = None
    revision: int = 0

    def is_behind(self, other: LateNotes) -> bool:
        """Return whether others of the same stream are newer. Those of earlier versions have no revision."""
        if self.revision or other.revision:
            return self.revision < other.revision
        full = (
            min(self.segments) if len(self.segments) >= NOTED_MAX else SegmentId.from_int(0)
        )  # the oldest are not kept
        return any(self.looked_to(item, 0) < known.looked_to for item, known in other.segments.items() if item >= full)

    def looked_to(self, segment: SegmentId, end: int) -> int:
        """Return up to where nothing is left to do behind the sealed ``end`` of a segment."""
        known = self.segments.get(segment)
        return end if known is None else max(end, known.looked_to)

    def settled(self, segment: SegmentId, end: int, *, forwarded: int = 0, refused: int = 0, reason: str = "") -> Self:
        """Return the same after everything up to ``end`` was forwarded or refused; nothing is under way then."""
        known = self.segments.get(segment, LateSegment(0))
        changed = LateSegment(
            max(end, known.looked_to),
            known.forwarded + forwarded,
            known.refused + refused,
            reason[:REASON_CHARACTERS_MAX] or known.reason,
        )
        return replace(self, segments={**self.segments, segment: changed}, forwarding=None)

    def without(self, history: EpochHistory) -> Self:
        """Return the same without segments that were removed, and of more than fit into a node without the oldest."""
        kept = {item: known for item, known in self.segments.items() if not history.is_removed(item)}
        return replace(self, segments=dict(sorted(kept.items())[-NOTED_MAX:]))


def heir_of(history: EpochHistory, keys: KeySpace, segment: SegmentId, key: bytes | None) -> SegmentId:
    """Return the active segment that takes a late record: that of its key.

    A record without a key, or with a key outside its segment's range, goes to the low end of that range; such records
    have no order to rely on.
    """
    home = history.segments()[segment].range
    position = home.low if key is None else keys.position(key)
    if not home.low <= position < home.high:
        position = home.low
    return history.active.segment_at(position).id
