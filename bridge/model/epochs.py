"""Epochs of a stream: records with reference epochs, and the history that scale and rolling commits extend.

An epoch is a list of segments that are active together and partition the key space. A scale makes an epoch that refers
to itself; a rolling commit makes two duplicates: one of the transactions' epoch, into which they are merged, and one of
the active epoch, which becomes active again.

Source: PDP-24, "Controller Metadata: Epochs", "CommitTransaction" and the worked example of the overview.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self, assert_never

from bridge.errors import InvalidRangesError, InvalidRequestError
from bridge.model.identifiers import Epoch, SegmentId, SegmentNumber
from bridge.model.keyspace import KeyRange, check_partition


class EpochCause(StrEnum):
    """Why an epoch was made."""

    CREATE = "create"
    SCALE = "scale"
    ROLLING_TRANSACTIONS = "rolling-transactions"
    """Duplicate of the epoch of rolled transactions; they are merged into it and it is sealed at once."""
    ROLLING_ACTIVE = "rolling-active"
    """Duplicate of the epoch that was active when the rolling commit began."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment and the key range that it holds."""

    id: SegmentId
    range: KeyRange


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch.

    ``segments`` are sorted by range and partition the key space. ``sealed_ends`` gives, for each segment that ended
    with the transition to this epoch, the offset after its last record; it is None while they are being sealed.
    """

    epoch: Epoch
    reference_epoch: Epoch
    segments: tuple[Segment, ...]
    cause: EpochCause
    created_ms: int
    sealed_ends: Mapping[SegmentId, int] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_partition([segment.range for segment in self.segments])
        numbers = {segment.id.number for segment in self.segments}
        if len(numbers) != len(self.segments):
            raise InvalidRequestError(f"epoch {self.epoch} holds a segment number twice")

    def segment_at(self, position: float) -> Segment:
        """The segment that holds a position in [0, 1)."""
        low, high = 0, len(self.segments)
        while high - low > 1:
            middle = (low + high) // 2
            if self.segments[middle].range.low <= position:
                low = middle
            else:
                high = middle
        return self.segments[low]

    def segment_numbered(self, number: int) -> Segment:
        """The segment with a number.

        Raises:
            KeyError: no segment of this epoch has it.
        """
        for segment in self.segments:
            if segment.id.number == number:
                return segment
        raise KeyError(number)

    @property
    def segment_ids(self) -> frozenset[SegmentId]:
        """The ids of all segments."""
        return frozenset(segment.id for segment in self.segments)


def duplicate(original: EpochRecord, epoch: int, cause: EpochCause, created_ms: int) -> EpochRecord:
    """An epoch with the same segment numbers and ranges, whose reference is the original's reference."""
    return EpochRecord(
        epoch=Epoch(epoch),
        reference_epoch=original.reference_epoch,
        segments=tuple(replace(item, id=SegmentId(item.id.number, Epoch(epoch))) for item in original.segments),
        cause=cause,
        created_ms=created_ms,
        sealed_ends=None,
    )


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """All epochs of a stream, 0 first, without gaps.

    ``removed`` are the segments all of whose records have been truncated, and whose topics are deleted. They are
    sealed, and what they continue is removed as well; their ends stay known, because sequence ids are built on them.
    """

    records: tuple[EpochRecord, ...]
    removed: frozenset[SegmentId] = frozenset()

    def __post_init__(self) -> None:
        if not self.records:
            raise InvalidRequestError("an epoch history holds at least epoch 0")
        for place, record in enumerate(self.records):
            if record.epoch != place:
                raise InvalidRequestError(f"epoch {record.epoch} stands at place {place} of its history")
            reference = record.reference_epoch
            if not 0 <= reference <= record.epoch or self.records[reference].reference_epoch != reference:
                raise InvalidRequestError(f"epoch {record.epoch} refers to {reference}, which is no root epoch")

    @classmethod
    def create(cls, ranges: Sequence[KeyRange], created_ms: int) -> Self:
        """The history of a new stream: epoch 0 with one segment for each range, numbered from 0."""
        segments = tuple(Segment(SegmentId.of(number, 0), item) for number, item in enumerate(sorted(ranges)))
        return cls((EpochRecord(Epoch(0), Epoch(0), segments, EpochCause.CREATE, created_ms),))

    @property
    def active(self) -> EpochRecord:
        """The newest epoch."""
        return self.records[-1]

    @property
    def reference(self) -> EpochRecord:
        """The root epoch of the active one; transactions are begun against it."""
        return self.records[self.active.reference_epoch]

    def record(self, epoch: int) -> EpochRecord:
        """The record of an epoch.

        Raises:
            InvalidRequestError: the history does not reach it.
        """
        if not 0 <= epoch < len(self.records):
            raise InvalidRequestError(f"epoch {epoch} is not in the history, which ends at {len(self.records) - 1}")
        return self.records[epoch]

    def with_records(self, *records: EpochRecord) -> EpochHistory:
        """This history with more epochs at its end."""
        return replace(self, records=(*self.records, *records))

    def with_removed(self, segments: Iterable[SegmentId]) -> EpochHistory:
        """This history with more segments removed."""
        return replace(self, removed=self.removed | frozenset(segments))

    def with_sealed_ends(self, epoch: int, ends: Mapping[SegmentId, int]) -> EpochHistory:
        """This history with the sealed ends of ``epoch`` filled in; filling in the same again changes nothing."""
        record = replace(self.record(epoch), sealed_ends=dict(ends))
        return replace(self, records=(*self.records[:epoch], record, *self.records[epoch + 1 :]))

    def plan_scale(self, seal: Iterable[int], ranges: Sequence[KeyRange], created_ms: int) -> EpochRecord:
        """The epoch that replaces the active segments numbered ``seal`` by new ones that hold ``ranges``.

        Segments that are not replaced stay in the new epoch under their own ids. New numbers follow the highest
        number ever used, so a number names one key range for good.

        Raises:
            InvalidRangesError: a number that is not active, or ranges that do not cover exactly what is sealed.
        """
        numbers = set(seal)
        if not numbers:
            raise InvalidRangesError("no segment to seal was named; a scale replaces one or more; nothing was written")
        active = {item.id.number: item for item in self.active.segments}
        missing = sorted(number for number in numbers if number not in active)
        if missing:
            raise InvalidRangesError(
                f"segments to seal that are not active: {', '.join(map(str, missing))}; active in epoch "
                f"{self.active.epoch} are {', '.join(map(str, sorted(active)))}; nothing was written"
            )
        ordered = sorted(ranges)
        check_partition(ordered, [active[SegmentNumber(number)].range for number in sorted(numbers)])
        epoch = len(self.records)
        first = 1 + max(item.id.number for record in self.records for item in record.segments)
        fresh = [Segment(SegmentId.of(first + place, epoch), item) for place, item in enumerate(ordered)]
        kept = [item for number, item in active.items() if number not in numbers]
        return EpochRecord(
            epoch=Epoch(epoch),
            reference_epoch=Epoch(epoch),
            segments=tuple(sorted(kept + fresh, key=lambda item: item.range)),
            cause=EpochCause.SCALE,
            created_ms=created_ms,
            sealed_ends=None,
        )

    def plan_rolling(self, transaction_epoch: int, created_ms: int) -> tuple[EpochRecord, EpochRecord]:
        """The two epochs of a rolling commit: a duplicate of the transactions' epoch, then one of the active epoch.

        Raises:
            InvalidRequestError: the transactions' epoch shares its root with the active one, so no roll is needed.
        """
        original = self.record(transaction_epoch)
        if original.reference_epoch == self.active.reference_epoch:
            raise InvalidRequestError(f"transactions of epoch {transaction_epoch} merge into the active epoch directly")
        epoch = len(self.records)
        return (
            duplicate(original, epoch, EpochCause.ROLLING_TRANSACTIONS, created_ms),
            duplicate(self.active, epoch + 1, EpochCause.ROLLING_ACTIVE, created_ms),
        )

    def successors(self, segment: SegmentId) -> tuple[Segment, ...]:
        """The segments that continue a segment's range in the epoch after its last; empty while it is active.

        Raises:
            InvalidRequestError: the history never held the segment.
        """
        last = self._span(segment)[1]
        if last == len(self.records) - 1:
            return ()
        return self._overlapping(self.records[last], segment, self.records[last + 1])

    def predecessors(self, segment: SegmentId) -> tuple[Segment, ...]:
        """The segments that a segment continues, from the epoch before its first; empty in epoch 0.

        Raises:
            InvalidRequestError: the history never held the segment.
        """
        first = self._span(segment)[0]
        if first == 0:
            return ()
        return self._overlapping(self.records[first], segment, self.records[first - 1])

    def sealed_end(self, segment: SegmentId) -> int | None:
        """The offset after the last record of a sealed segment; None while it is active or being sealed."""
        last = self._span(segment)[1]
        if last == len(self.records) - 1:
            return None
        ends = self.records[last + 1].sealed_ends
        return None if ends is None else ends.get(segment)

    def segments(self) -> dict[SegmentId, Segment]:
        """Every segment that was ever active, in order of the epoch in which it began."""
        return {item.id: item for record in self.records for item in record.segments}

    def stored(self) -> list[SegmentId]:
        """Those of them that have not been removed."""
        return [item for item in self.segments() if item not in self.removed]

    def ended_with(self, epoch: int) -> tuple[Segment, ...]:
        """The segments that were active in the epoch before ``epoch`` and are not in it."""
        if epoch == 0:
            return ()
        kept = self.records[epoch].segment_ids
        return tuple(item for item in self.records[epoch - 1].segments if item.id not in kept)

    def began_with(self, epoch: int) -> tuple[Segment, ...]:
        """The segments of ``epoch`` that were not active in the epoch before."""
        before = self.records[epoch - 1].segment_ids if epoch else frozenset()
        return tuple(item for item in self.records[epoch].segments if item.id not in before)

    def _span(self, segment: SegmentId) -> tuple[int, int]:
        """The first and the last epoch in which a segment is active.

        A segment begins in the epoch that its id names and stays without interruption, see :func:`check_chain`.
        """
        last = segment.epoch - 1
        for record in self.records[segment.epoch :]:
            if all(item.id != segment for item in record.segments):
                break
            last = record.epoch
        if last < segment.epoch:
            raise InvalidRequestError(f"segment {segment} is not in the history")
        return segment.epoch, last

    @staticmethod
    def _overlapping(home: EpochRecord, segment: SegmentId, other: EpochRecord) -> tuple[Segment, ...]:
        own = home.segment_numbered(segment.number).range
        return tuple(item for item in other.segments if item.range.overlaps(own))


def check_chain(records: Sequence[EpochRecord]) -> list[str]:
    """What is wrong with a chain of epoch records, one sentence each; empty when it is sound (for diagnosis).

    Looked for is what no single record can break: numbering, reference epochs, segments that begin in another epoch
    than their id says or under another range than their number had, and sealed ends of other segments than ended.
    """
    faults: list[str] = []
    ranges: dict[int, KeyRange] = {}
    for before, record in zip([None, *records], records, strict=False):
        faults.extend(_reference_faults(before, record, records))
        old = before.segment_ids if before is not None else frozenset()
        for item in record.segments:
            if item.id not in old and item.id.epoch != record.epoch:
                faults.append(f"segment {item.id} begins in epoch {record.epoch}")
            if ranges.setdefault(item.id.number, item.range) != item.range:
                known = ranges[item.id.number]
                faults.append(f"segment {item.id} of epoch {record.epoch} holds {item.range}, its number held {known}")
        ended = old - record.segment_ids
        if record.sealed_ends is not None and record.sealed_ends.keys() != ended:
            faults.append(
                f"epoch {record.epoch} notes ends of {_names(record.sealed_ends)}, but {_names(ended)} ended with it"
            )
    return faults


def _reference_faults(before: EpochRecord | None, record: EpochRecord, records: Sequence[EpochRecord]) -> Iterator[str]:
    expected = 0 if before is None else before.epoch + 1
    if record.epoch != expected:
        yield f"epoch {record.epoch} stands where epoch {expected} should"
    match record.cause:
        case EpochCause.CREATE | EpochCause.SCALE:
            if (record.cause is EpochCause.CREATE) != (before is None):
                yield f"epoch {record.epoch} has the cause {record.cause}"
            if record.reference_epoch != record.epoch:
                yield f"epoch {record.epoch} was made by {record.cause} but refers to epoch {record.reference_epoch}"
        case EpochCause.ROLLING_TRANSACTIONS | EpochCause.ROLLING_ACTIVE:
            original = next((item for item in records if item.epoch == record.reference_epoch), None)
            if original is None or original.epoch >= record.epoch or original.reference_epoch != original.epoch:
                yield f"epoch {record.epoch} refers to {record.reference_epoch}, which is no earlier root epoch"
            elif [(item.id.number, item.range) for item in original.segments] != [
                (item.id.number, item.range) for item in record.segments
            ]:
                yield f"epoch {record.epoch} is no duplicate of epoch {record.reference_epoch}, to which it refers"
        case _:
            assert_never(record.cause)


def _names(segments: Iterable[SegmentId]) -> str:
    return ", ".join(str(item) for item in sorted(segments)) or "none"
