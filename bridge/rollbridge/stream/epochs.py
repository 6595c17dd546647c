"""Epochs of a stream: records with reference epochs, and the history that scale and rolling commits extend.

An epoch is a list of segments that are active together and partition the key space. A scale makes an epoch that refers
to itself. A rolling commit makes two duplicates: one of the transactions' epoch, into which they are merged, and one of
the active epoch, which becomes active again. Segments are duplicated only where the two epochs differ and something is
to be merged; others continue under their own ids, as in a scale.

Partitions that are added to an adopted topic make an epoch that has *grown* from the one before: all segments continue
under their own ids, and new ones begin without predecessors. The partitioner distributes keys differently from then on,
so all ranges change. Transactions begun in the epoch before continue in this one.

A duplicate of the active epoch refers to the active epoch's root, or becomes a root itself if that one is old
(:meth:`EpochHistory.renewed`): otherwise the epochs of a stream that is rolled but never scaled could not be dropped.

A history drops its oldest epochs once their segments are removed and no open transaction refers to them. A *foundation*
keeps what later answers depend on:

- the *base* of each segment of the first epoch that is kept, since sequence ids grow along the lineage;
- the *end* of each part of the key space: the sequence id after its last possible record, for conditions;
- the partition numbers of that epoch's segments, since partitions are counted over the whole history;
- the stream's creation time, which tells it from a former stream of the same name.

A stream that was deleted and created again has a foundation from its first epoch on. Its epochs and sequence ids
continue above its predecessor's (:mod:`rollbridge.stream.positions`), so ``born``, its first epoch, is above 0.

Source: PDP-24, "Controller Metadata: Epochs", "CommitTransaction" and the worked example of the overview.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, ClassVar, Final, Self, assert_never

from rollbridge.base.errors import InvalidRequestError, StreamRecreatedError
from rollbridge.base.ids import PREPARED_FIRST, Epoch, SegmentId, SegmentNumber
from rollbridge.base.mapper import NodeRecord, StoredAs
from rollbridge.stream.keyspace import KeyRange, check_partition, even_ranges, wrong_ranges
from rollbridge.stream.segment_graph import Segment, SegmentGraph, Transition

# Foundations


@dataclass(frozen=True, slots=True)
class TruncatedHistory:
    """State that remains of dropped epochs.

    Attributes:
        first: The first epoch that is kept, 1 or more.
        created_ms: Time when the first epoch of this stream was planned.
        bases: First sequence ids of that epoch's segments, in order of their ranges.
        lows: Lower ends of the parts of the key space that differ in the dropped epochs; the first is 0.
        ends: For each part the sequence id after the last record that may have been dropped; 0 if there was none.
        born: The first epoch of this stream; those below it belong to a deleted stream of its name.
        born_sequence: Its first sequence id; likewise.
        partitions: The partition numbers of the segments of the first epoch that is kept, in order of their ranges;
            empty where they are counted from 0.

    Raises:
        InvalidRequestError: it is inconsistent.
    """

    first: Annotated[Epoch, StoredAs(fields=("first_epoch",))]
    created_ms: int
    bases: tuple[int, ...]
    lows: tuple[float, ...] = (0.0,)
    ends: tuple[int, ...] = (0,)
    born: int = 0
    born_sequence: int = 0
    partitions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sound = (
            0 <= self.born <= self.first
            and self.first > 0
            and self.lows[:1] == (0.0,)
            and all(low < high for low, high in pairwise(self.lows))
            and len(self.lows) == len(self.ends)
            and len(self.partitions) in (0, len(self.bases))
            and len(set(self.partitions)) == len(self.partitions)
            and min(self.partitions, default=0) >= 0
        )
        if not sound or min((*self.bases, *self.ends)) < 0:
            raise InvalidRequestError(f"the foundation of the epochs before {self.first} contradicts itself")

    def end_at(self, position: float) -> int:
        """Return the sequence id after the last record that may have been dropped at a position of the key space."""
        return self.ends[bisect_right(self.lows, position) - 1]


def overlaid(
    lows: tuple[float, ...], ends: tuple[int, ...], over: Mapping[KeyRange, int]
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return parts of the key space, as in a :class:`TruncatedHistory`, with other ends on ranges that do not
    overlap."""
    ranges = sorted(over)
    starts = [item.low for item in ranges]
    bounds = sorted({*lows, *starts, *(item.high for item in ranges if item.high < 1.0)})
    return _joined((low, _end_over(low, ranges, starts, over, lows, ends)) for low in bounds)


def _end_over(
    low: float,
    ranges: list[KeyRange],
    starts: list[float],
    over: Mapping[KeyRange, int],
    lows: tuple[float, ...],
    ends: tuple[int, ...],
) -> int:
    place = bisect_right(starts, low) - 1
    if place >= 0 and low in ranges[place]:
        return over[ranges[place]]
    return ends[bisect_right(lows, low) - 1]


def _joined(parts: Iterable[tuple[float, int]]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Join neighbours with the same end into one part."""
    kept: list[tuple[float, int]] = []
    for low, end in parts:
        if not kept or kept[-1][1] != end:
            kept.append((low, end))
    return tuple(low for low, _ in kept), tuple(end for _, end in kept)


class EpochCause(StrEnum):
    """Why an epoch was made."""

    CREATE = "create"
    SCALE = "scale"
    ROLLING_TRANSACTIONS = "rolling-transactions"
    """Duplicate of the epoch of rolled transactions; they are merged into it and it is sealed at once."""
    ROLLING_ACTIVE = "rolling-active"
    """Duplicate of the epoch that was active when the rolling commit began."""
    GROWN = "grown"
    """Partitions were added to the adopted topic: all segments continue, and new ones begin."""


ON_TOPIC: Final = frozenset({EpochCause.CREATE, EpochCause.GROWN})
"""Causes of the epochs of a stream that has adopted a topic whose segments are the topic's partitions."""


@dataclass(frozen=True, slots=True)
class EpochRecord(NodeRecord):
    """One epoch.

    ``segments`` are sorted by range and partition the key space. ``sealed_ends`` gives, for each segment that ended
    with the transition to this epoch, the offset after its last record; it is None while they are being sealed.
    """

    SCHEMA: ClassVar = "epoch"

    epoch: Epoch
    reference_epoch: Epoch
    segments: tuple[Segment, ...]
    cause: EpochCause
    created_ms: int
    sealed_ends: Annotated[Mapping[SegmentId, int] | None, StoredAs(ascending=True)] = field(default_factory=dict)
    reason: str = ""
    """Why a leader has scaled the stream by its load; empty if it was asked to, and after other causes."""
    segment_ids: frozenset[SegmentId] = field(init=False, repr=False, compare=False)
    """The ids of all segments."""
    numbers: frozenset[int] = field(init=False, repr=False, compare=False)
    """Their numbers."""

    def __post_init__(self) -> None:
        check_partition([segment.range for segment in self.segments])
        numbers = frozenset(segment.id.number for segment in self.segments)
        if len(numbers) != len(self.segments):
            raise InvalidRequestError(f"epoch {self.epoch} holds a segment number twice")
        object.__setattr__(self, "segment_ids", frozenset(segment.id for segment in self.segments))
        object.__setattr__(self, "numbers", numbers)

    def segment_at(self, position: float) -> Segment:
        """Return the segment that holds a position in [0, 1)."""
        return self.segments[bisect_right(self.segments, position, key=lambda item: item.range.low) - 1]

    def segment_numbered(self, number: int) -> Segment:
        """Return the segment with a number.

        Raises:
            KeyError: no segment of this epoch has it.
        """
        for segment in self.segments:
            if segment.id.number == number:
                return segment
        raise KeyError(number)


def common_parts(
    one: Sequence[Segment], other: Sequence[Segment]
) -> Iterator[tuple[tuple[Segment, ...], tuple[Segment, ...]]]:
    """Yield the smallest parts of the key space that are whole segments in both epochs, with the segments of each.

    Both are sorted and cover the key space, so a part ends where two of their segments end together.
    """
    begun = 0
    start = 0
    for place, item in enumerate(one):
        end = start
        while end < len(other) and other[end].range.high < item.range.high:
            end += 1
        if other[end].range.high == item.range.high:
            yield tuple(one[begun : place + 1]), tuple(other[start : end + 1])
            begun, start = place + 1, end + 1


def _numbers(segments: Iterable[Segment]) -> list[int]:
    return [item.id.number for item in segments]


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """The epochs of a stream, without gaps, from the one with which it was born, or from the first one that is kept.

    ``removed`` are the segments all of whose records have been truncated, and whose topics are deleted. They are
    sealed, and what they continue is removed as well; their ends stay known, because sequence ids are built on them.

    Epochs of which nothing is left are dropped, the oldest first (:mod:`rollbridge.stream.truncation`); ``foundation``
    is what is kept of them. A segment that lives on then begins with the first epoch that is kept, and continues
    nothing.
    """

    records: tuple[EpochRecord, ...]
    removed: frozenset[SegmentId] = frozenset()
    foundation: TruncatedHistory | None = None
    _graph: SegmentGraph | None = field(default=None, init=False, repr=False, compare=False)
    """Made when it is first asked for, then handed on to the histories that grow from this one."""

    def __post_init__(self) -> None:
        if not self.records:
            raise InvalidRequestError("an epoch history holds at least epoch 0, or the first one that is kept")
        first = self.first
        for place, record in enumerate(self.records):
            if record.epoch != first + place:
                raise InvalidRequestError(f"epoch {record.epoch} is at index {place} of a history from {first} on")
            reference = record.reference_epoch
            is_root = reference < first or (
                reference <= record.epoch and self.records[reference - first].reference_epoch == reference
            )
            if reference < 0 or not is_root:
                raise InvalidRequestError(f"epoch {record.epoch} refers to {reference}, which is not a root epoch")
        if self.foundation is not None and len(self.foundation.bases) != len(self.records[0].segments):
            raise InvalidRequestError(f"epoch {first}: segment count does not match its predecessor")

    @classmethod
    def create(
        cls, ranges: Sequence[KeyRange], created_ms: int, born: int = 0, base: int = 0, partition: int = 0
    ) -> Self:
        """Make the history of a new stream: one epoch with one segment for each range, numbered from 0.

        Args:
            ranges: They partition the key space.
            created_ms: Now, ms since 1970.
            born: The number of this epoch; above all that former lives of the stream have used.
            base: Where its sequence ids begin; likewise.
            partition: The first partition number; likewise.
        """
        epoch = Epoch(born)
        segments = tuple(Segment(SegmentId.of(number, born), item) for number, item in enumerate(sorted(ranges)))
        record = EpochRecord(epoch, epoch, segments, EpochCause.CREATE, created_ms)
        if not born:
            return cls((record,))
        numbers = tuple(range(partition, partition + len(segments)))
        bases = (base,) * len(segments)
        return cls(
            (record,),
            foundation=TruncatedHistory(epoch, created_ms, bases, born=born, born_sequence=base, partitions=numbers),
        )

    @property
    def first(self) -> int:
        """The first epoch that is kept."""
        return 0 if self.foundation is None else self.foundation.first

    @property
    def born(self) -> int:
        """The first epoch of this stream; those below it belong to deleted ones of its name."""
        return 0 if self.foundation is None else self.foundation.born

    @property
    def born_sequence(self) -> int:
        """The first sequence id of this stream; those below it belong to deleted ones of its name."""
        return 0 if self.foundation is None else self.foundation.born_sequence

    @property
    def created_ms(self) -> int:
        """Time when the first epoch of this stream was planned, ms since 1970."""
        return self.records[0].created_ms if self.foundation is None else self.foundation.created_ms

    @property
    def active(self) -> EpochRecord:
        """The newest epoch."""
        return self.records[-1]

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that comes after the active one; how many there have been."""
        return self.active.epoch + 1

    @property
    def reference(self) -> EpochRecord:
        """The root epoch of the active one; transactions are begun against it."""
        return self.record(self.active.reference_epoch)

    def record(self, epoch: int) -> EpochRecord:
        """Return the record of an epoch.

        Raises:
            InvalidRequestError: the history does not reach it, or has dropped it.
            StreamRecreatedError: it is of a former life of the stream.
        """
        if not 0 <= epoch < self.next_epoch:
            raise InvalidRequestError(f"epoch {epoch} is not in the history, which ends at {self.active.epoch}")
        if epoch < self.born:
            raise StreamRecreatedError(
                f"epoch {epoch} belongs to a stream that was deleted before this one was created"
            )
        if epoch < self.first:
            raise InvalidRequestError(
                f"epoch {epoch} is not in the history any more, which begins at {self.first}: all its records were "
                "truncated, and no open transaction referred to it"
            )
        return self.records[epoch - self.first]

    @property
    def graph(self) -> SegmentGraph:
        """The graph of its segments."""
        if self._graph is None:
            record, old = self.records[0], self.foundation
            numbers = range(len(record.segments)) if old is None or not old.partitions else old.partitions
            bases = (0,) * len(record.segments) if old is None else old.bases
            graph = SegmentGraph.of_epoch(record.epoch, record.segments, numbers, bases)
            return self._remember(graph.extended(self._transitions(self.first + 1)))
        return self._graph

    def _remember(self, graph: SegmentGraph) -> SegmentGraph:
        object.__setattr__(self, "_graph", graph)  # threads that ask at once make the same one
        return graph

    def _transitions(self, first: int) -> Iterator[Transition]:
        for epoch in range(first, self.next_epoch):
            record, began = self.record(epoch), self.began_with(epoch)
            moved = record.segments[: -len(began)] if record.cause is EpochCause.GROWN else ()
            yield Transition(epoch, self.ended_with(epoch), began, record.sealed_ends, moved)

    def grown_from(self, epoch: int) -> EpochRecord:
        """Return the record of the last epoch that has grown from one, whose segments it has and more, or of that one.

        Raises as :meth:`record` does.
        """
        record = self.record(epoch)
        for later in self.records[record.epoch + 1 - self.first :]:
            if later.cause is not EpochCause.GROWN:
                break
            record = later
        return record

    def with_records(self, *records: EpochRecord) -> EpochHistory:
        """Return this history with more epochs at its end."""
        grown = replace(self, records=(*self.records, *records))
        if self._graph is not None:
            grown._remember(self._graph.extended(grown._transitions(self.next_epoch)))
        return grown

    def before(self, epoch: int) -> EpochHistory:
        """Return this history as it was before ``epoch`` was added.

        Raises:
            InvalidRequestError: everything before it has been dropped.
        """
        return self if epoch >= self.next_epoch else replace(self, records=self.records[: max(epoch - self.first, 0)])

    def is_later(self, than: EpochHistory) -> bool:
        """Return True if this can have grown from another history: both agree, but for ends that became known."""
        known = than.records[max(self.first - than.first, 0) :]
        own = self.records[max(than.first - self.first, 0) :]
        return (
            (self.born, self.created_ms) == (than.born, than.created_ms)
            and self.next_epoch >= than.next_epoch
            and all(map(_is_same, known, own))
        )

    def is_outdated(self, by: EpochHistory) -> bool:
        """Return True if another has grown from this: it comes from a ZooKeeper that lags or was set back."""
        return self.next_epoch < by.next_epoch and by.is_later(self)

    def with_removed(self, segments: Iterable[SegmentId]) -> EpochHistory:
        """Return this history with more segments removed."""
        less = replace(self, removed=self.removed | frozenset(segments))
        if self._graph is not None:
            less._remember(self._graph)
        return less

    def with_sealed_ends(self, epoch: int, ends: Mapping[SegmentId, int]) -> EpochHistory:
        """Return this history with the sealed ends of ``epoch``; filling in the same again changes nothing."""
        record, place = replace(self.record(epoch), sealed_ends=dict(ends)), epoch - self.first
        sealed = replace(self, records=(*self.records[:place], record, *self.records[place + 1 :]))
        if self._graph is not None:
            sealed._remember(self._graph.with_sealed_ends(self.ended_with(epoch), ends))
        return sealed

    def unsealed(self) -> tuple[EpochRecord, ...]:
        """Return the epochs with which segments ended that are not known to be sealed."""
        return tuple(item for item in self.records if item.sealed_ends is None and self.ended_with(item.epoch))

    def plan_scale(
        self, seal: Iterable[int], ranges: Sequence[KeyRange], created_ms: int, reason: str = ""
    ) -> EpochRecord:
        """Return the epoch that replaces the active segments ``seal`` by new ones that hold ``ranges``.

        Segments that are not replaced stay in the new epoch under their own ids. New numbers follow the highest
        number ever used, so a number names one key range for good. The ``reason`` is that of a scale by load.

        Raises:
            InvalidRequestError: a number that is not active, or ranges that do not cover exactly what is sealed.
        """
        numbers = set(seal)
        if not numbers:
            raise wrong_ranges("no segment to seal was named; a scale replaces one or more; nothing was written")
        active = {item.id.number: item for item in self.active.segments}
        missing = sorted(number for number in numbers if number not in active)
        if missing:
            raise wrong_ranges(
                f"segments to seal that are not active: {', '.join(map(str, missing))}; active in epoch "
                f"{self.active.epoch} are {', '.join(map(str, sorted(active)))}; nothing was written"
            )
        ordered = sorted(ranges)
        check_partition(ordered, [active[SegmentNumber(number)].range for number in sorted(numbers)])
        epoch = self.next_epoch
        first = 1 + max(item.number for item in self.graph.nodes if not item.is_prepared)
        fresh = [Segment(SegmentId.of(first + place, epoch), item) for place, item in enumerate(ordered)]
        kept = [item for number, item in active.items() if number not in numbers]
        return EpochRecord(
            epoch=Epoch(epoch),
            reference_epoch=Epoch(epoch),
            segments=tuple(sorted(kept + fresh, key=lambda item: item.range)),
            cause=EpochCause.SCALE,
            created_ms=created_ms,
            sealed_ends=None,
            reason=reason,
        )

    def plan_growth(self, partitions: int, created_ms: int) -> EpochRecord:
        """Return the epoch in which the active segments, which are partitions of an adopted topic, are so many."""
        epoch, life = Epoch(self.next_epoch), self.active.segments[0].id.epoch
        segments = [Segment(SegmentId.of(number, life), item) for number, item in enumerate(even_ranges(partitions))]
        return EpochRecord(epoch, epoch, tuple(segments), EpochCause.GROWN, created_ms)

    def plan_rolling(
        self,
        transaction_epoch: int,
        created_ms: int,
        numbers: Collection[int] = (),
        prepared: Mapping[int, SegmentId] | None = None,
    ) -> tuple[EpochRecord, EpochRecord]:
        """Return the epochs of a rolling commit: one to take the transactions, one in which the stream continues.

        Only those parts of the key space are duplicated in which the transactions need segments of their own: in the
        first epoch as they were in the transactions' epoch, in the second as they are now. All other segments stay
        active, and are in both epochs.

        Args:
            transaction_epoch: Reference epoch of the transactions.
            created_ms: Now, ms since 1970.
            numbers: Its inactive segments to which they have written; without any, and without prepared ones, the whole
                stream is rolled, as in PDP-24.
            prepared: Segments that hold their records already, by number of the segment that each replaces.

        Raises:
            InvalidRequestError: no roll is needed, since the segments are active.
        """
        original, ready = self.grown_from(transaction_epoch), prepared or {}
        wanted = {*numbers, *ready}
        parts = [
            (former, active)
            for former, active in common_parts(original.segments, self.active.segments)
            if not wanted or any(item.id.number in wanted for item in former)
        ]
        if not ready and all(_numbers(former) == _numbers(active) for former, active in parts):
            raise InvalidRequestError(f"transactions of epoch {transaction_epoch} merge into the active epoch directly")
        epoch = self.next_epoch
        fresh = {
            item.id: replace(item, id=ready.get(item.id.number) or SegmentId.of(item.id.number, epoch))
            for former, _ in parts
            for item in former
        }
        again = {
            item.id: replace(item, id=SegmentId.of(item.id.number, epoch + 1)) for _, active in parts for item in active
        }
        kept = [item for item in self.active.segments if item.id not in again]
        return (
            self._duplicate(original, epoch, [*kept, *fresh.values()], EpochCause.ROLLING_TRANSACTIONS, created_ms),
            self._duplicate(self.active, epoch + 1, [*kept, *again.values()], EpochCause.ROLLING_ACTIVE, created_ms),
        )

    def renewed(self, again: EpochRecord, keep_ms: int) -> EpochRecord:
        """Return the second epoch of a planned rolling commit, as a root of its own if the present root is old.

        It has the root's numbers and ranges, so transactions begun in the old root are merged into the same segments.
        The old root is needed only while such a transaction may be open, or begin.

        Args:
            again: As :meth:`plan_rolling` gives it.
            keep_ms: Age from which a root is replaced, in ms.
        """
        root = max(self.active.reference_epoch, self.first)
        if again.created_ms - self.record(root).created_ms < keep_ms:
            return again
        return replace(again, reference_epoch=again.epoch)

    @staticmethod
    def _duplicate(
        original: EpochRecord, epoch: int, segments: Iterable[Segment], cause: EpochCause, created_ms: int
    ) -> EpochRecord:
        return EpochRecord(
            epoch=Epoch(epoch),
            reference_epoch=original.reference_epoch,
            segments=tuple(sorted(segments, key=lambda item: item.range)),
            cause=cause,
            created_ms=created_ms,
            sealed_ends=None,
        )

    def sealed_end(self, segment: SegmentId) -> int | None:
        """Return the offset after the last record of a sealed segment; None while it is active or being sealed.

        Raises:
            InvalidRequestError: no epoch that is kept has the segment.
        """
        return self.graph.node(segment).sealed_end

    def is_dropped(self, segment: SegmentId) -> bool:
        """Return True if a segment ended before the first epoch that is kept, judging by its number and epoch."""
        highest = max(item.id.number for item in self.active.segments)  # of those that scales have made
        return (
            self.born <= segment.epoch < self.first
            and segment not in self.graph.nodes
            and (segment.number <= highest or segment.is_prepared)
        )

    def next_prepared(self, known: int) -> int:
        """Return the number for the next segment to prepare, where ``known`` have been prepared so far, or more."""
        last = max((item.number for item in self.graph.nodes if item.is_prepared), default=0)
        return max(PREPARED_FIRST + known, last + 1)

    def is_former(self, segment: SegmentId) -> bool:
        """Return True if a segment, by its epoch, is of a former life of the stream."""
        return segment.epoch < self.born

    def check_life(self, stream: object, segments: Iterable[SegmentId]) -> None:
        """Refuse segments of a former life of the stream, whose name is given for the message.

        Raises:
            StreamRecreatedError: one of them is.
        """
        for segment in segments:
            if self.is_former(segment):
                raise StreamRecreatedError(
                    f"segment {segment} belongs to a deleted stream {stream}; the stream created since under its name "
                    f"begins with epoch {self.born} and has none of its records; start again with the new stream"
                )

    def is_removed(self, segment: SegmentId) -> bool:
        """Return True if a segment is truncated away, and its topic deleted or about to be."""
        return segment in self.removed or self.is_dropped(segment)

    def segments(self) -> dict[SegmentId, Segment]:
        """Return every segment of the epochs that are kept, in order of the epoch in which it began."""
        return {segment: node.segment for segment, node in self.graph.nodes.items()}

    def stored(self) -> list[SegmentId]:
        """Return those of them that have not been removed."""
        return [item for item in self.graph.nodes if item not in self.removed]

    def ended_with(self, epoch: int) -> tuple[Segment, ...]:
        """Return the segments of the epoch before ``epoch`` that are not in it; none for the first epoch."""
        if epoch == self.first:
            return ()
        kept = self.record(epoch).segment_ids
        return tuple(item for item in self.record(epoch - 1).segments if item.id not in kept)

    def ending_with(self, planned: EpochRecord) -> tuple[Segment, ...]:
        """Return the active segments that a planned next epoch replaces."""
        return tuple(item for item in self.active.segments if item.id not in planned.segment_ids)

    def began_with(self, epoch: int) -> tuple[Segment, ...]:
        """Return the segments of ``epoch`` that were not active in the epoch before; all for the first epoch."""
        before = frozenset[SegmentId]() if epoch == self.first else self.record(epoch - 1).segment_ids
        return tuple(item for item in self.record(epoch).segments if item.id not in before)


def check_chain(records: Sequence[EpochRecord], first: int = 0, born: int = 0) -> list[str]:
    """Return the faults of a chain of epoch records, one sentence each; empty if it is sound (for diagnosis).

    Looked for is what no single record can break: numbering, reference epochs, segments that begin in another epoch
    than their id says or under another range than their number had, and sealed ends of other segments than ended.
    Nothing is said of what epochs before ``first``, which have been dropped, would have to tell; ``born`` is the first
    epoch of this life of the stream.
    """
    faults: list[str] = []
    ranges: dict[int, KeyRange] = {}
    for before, record in zip([None, *records], records, strict=False):
        faults.extend(_reference_faults(before, record, records, first, born))
        old = before.segment_ids if before is not None else frozenset()
        goes_on = before is None and first > 0
        has_grown = record.cause is EpochCause.GROWN
        may_be_earlier = goes_on or has_grown or record.cause is EpochCause.ROLLING_TRANSACTIONS
        if has_grown:
            ranges.clear()
        for item in record.segments:
            is_earlier = item.id.epoch < record.epoch and may_be_earlier
            if item.id not in old and item.id.epoch != record.epoch and not is_earlier:
                faults.append(f"segment {item.id} begins in epoch {record.epoch}")
            if ranges.setdefault(item.id.number, item.range) != item.range:
                known = ranges[item.id.number]
                faults.append(f"segment {item.id} of epoch {record.epoch} holds {item.range}, its number held {known}")
        ended = old - record.segment_ids
        if has_grown and (ended or not record.segment_ids - old):
            faults.append(f"epoch {record.epoch} has not grown from the one before: {_names(ended)} ended")
        if record.sealed_ends is not None and record.sealed_ends.keys() != ended and not goes_on:
            faults.append(
                f"epoch {record.epoch} notes ends of {_names(record.sealed_ends)}, but {_names(ended)} ended with it"
            )
    return faults


def _reference_faults(
    before: EpochRecord | None, record: EpochRecord, records: Sequence[EpochRecord], first: int, born: int
) -> Iterator[str]:
    expected = first if before is None else before.epoch + 1
    if record.epoch != expected:
        yield f"epoch {record.epoch} found in place of epoch {expected}"
    match record.cause:
        case EpochCause.CREATE | EpochCause.SCALE | EpochCause.GROWN:
            if (record.cause is EpochCause.CREATE) != (before is None and first == born):
                yield f"epoch {record.epoch} has the cause {record.cause}"
            if record.reference_epoch != record.epoch:
                yield f"epoch {record.epoch} was made by {record.cause} but refers to epoch {record.reference_epoch}"
        case EpochCause.ROLLING_ACTIVE if record.reference_epoch == record.epoch:
            # The two epochs of a roll are published together; the one before them becomes active again.
            former = next((item for item in records if item.epoch == record.epoch - 2), None)
            if former is not None and _shapes(record) != _shapes(former):
                yield f"epoch {record.epoch} is not a duplicate of epoch {former.epoch}, which it makes active again"
        case EpochCause.ROLLING_TRANSACTIONS | EpochCause.ROLLING_ACTIVE:
            if 0 <= record.reference_epoch < first:
                return
            original = next((item for item in records if item.epoch == record.reference_epoch), None)
            if original is None or original.epoch >= record.epoch or original.reference_epoch != original.epoch:
                yield f"epoch {record.epoch} refers to {record.reference_epoch}, which is not an earlier root epoch"
            elif not _is_duplicate(record, original, before):
                yield f"epoch {record.epoch} is not a duplicate of epoch {record.reference_epoch}, to which it refers"
        case _:
            assert_never(record.cause)


def _is_duplicate(record: EpochRecord, original: EpochRecord, before: EpochRecord | None) -> bool:
    """Return True if a duplicate has all segments of the epoch to which it refers, by number and range.

    The epoch that takes transactions may differ in two ways: active segments continue, and segments prepared for a
    transaction have numbers of their own.
    """
    shapes = _shapes(original)
    if record.cause is EpochCause.ROLLING_ACTIVE:
        return shapes == _shapes(record)
    kept = frozenset[SegmentId]() if before is None else before.segment_ids
    began = [item for item in record.segments if item.id not in kept]
    ranges = {item.range for item in original.segments}
    return all(
        (item.id.number, item.range) in shapes if item.id.epoch == record.epoch else item.range in ranges
        for item in began
    )


def _shapes(record: EpochRecord) -> set[tuple[int, KeyRange]]:
    return {(item.id.number, item.range) for item in record.segments}


def _is_same(one: EpochRecord, other: EpochRecord) -> bool:
    return replace(one, sealed_ends=None) == replace(other, sealed_ends=None)


def _names(segments: Iterable[SegmentId]) -> str:
    return ", ".join(str(item) for item in sorted(segments)) or "none"


def without_epochs(history: EpochHistory, first: int) -> EpochHistory:
    """Return the history without the epochs before ``first``; all that is left keeps its numbers.

    Raises:
        InvalidRequestError: ``first`` is not in the history.
    """
    if first <= history.first:
        return history
    record = history.record(first)
    bases, numbers = history.graph.sequence_bases, history.graph.partitions
    old = history.foundation
    lows, ends = ((0.0,), (0,)) if old is None else (old.lows, old.ends)
    for epoch in range(history.first + 1, first + 1):
        over = {}
        for item in history.ended_with(epoch):
            if end := history.sealed_end(item.id):
                over[item.range] = bases[item.id] + end
        lows, ends = overlaid(lows, ends, over)
    foundation = TruncatedHistory(
        record.epoch,
        history.created_ms,
        tuple(bases[item.id] for item in record.segments),
        lows,
        ends,
        history.born,
        history.born_sequence,
        tuple(numbers[item.id] for item in record.segments),
    )
    kept = replace(history, records=history.records[first - history.first :], foundation=foundation)
    return replace(kept, removed=history.removed & kept.segments().keys())
