"""The aborted transactions of a buffer partition, in sealed segments and one unsealed snapshot.

A segment is cut off when the unsealed snapshot has outgrown it, and never changes again. Only the unsealed snapshot is
held in memory; sealed segments are loaded when they are asked about, and kept in a bounded cache.

Source: PIP-196; Pulsar's ``SnapshotSegmentAbortedTxnProcessorImpl``, which holds all ids in memory. Differs: a
transaction may write long before it is aborted, so the position of a frame gives a lower bound only; which segments can
know a transaction follows from the positions and the ids that each covers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from rollbridge.model.buffered import Partition
from rollbridge.model.snapshots import EncodedIds, SegmentIndex, Snapshot, shown_counter

ID_BYTES_IN_MEMORY: Final = 100
"""About what an id takes in a set."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Ids that become a sealed segment, with what they cover."""

    aborts: tuple[bytes, ...]
    first_position: int
    max_read_position: int


@dataclass(slots=True)
class AbortedTransactions:
    """What is known of the aborted transactions of one partition; it never shrinks but for :meth:`expire`.

    Attributes:
        indexes: Sealed segments by sequence id.
        sequence_id: Of the next segment.
        unsealed: Ids that are in no sealed segment, in order, with the first and last position of their frames.
    """

    indexes: list[SegmentIndex] = field(default_factory=list)
    sequence_id: int = 0
    unsealed: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    encoded: EncodedIds = field(default_factory=EncodedIds)
    """The ids of ``unsealed`` as they are written."""
    first_position: int = 0
    """No frame of their transactions stands at a lower offset."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> AbortedTransactions:
        """What a snapshot says."""
        found = cls(list(snapshot.indexes), snapshot.sequence_id)
        for transaction in snapshot.aborts:
            found.add(transaction, snapshot.first_position, snapshot.position)
        return found

    def __len__(self) -> int:
        return len(self.unsealed) + sum(item.aborts for item in self.indexes)

    def add(self, transaction: bytes, first_position: int, position: int) -> None:
        """Note an aborted transaction whose frames stand from ``first_position`` to below ``position``."""
        if transaction not in self.unsealed:
            self.first_position = min(self.first_position, first_position) if self.unsealed else first_position
            self.encoded.append(transaction)
            self.unsealed[transaction] = (first_position, position)

    def cuts(self, segment_bytes: int) -> list[Cut]:
        """What is to be sealed: full segments from the oldest id on, while more is left than fits into one."""
        if self.encoded.size <= segment_bytes:
            return []
        cuts: list[Cut] = []
        ids: list[bytes] = []
        taken = EncodedIds()
        for transaction in self.unsealed:
            taken.append(transaction)
            if ids and taken.size > segment_bytes:
                cuts.append(self._cut(ids))
                ids, taken = [], EncodedIds([transaction])
            ids.append(transaction)
        return cuts

    def seal_all(self, segment_bytes: int) -> list[Cut]:
        """The same for everything: how a single snapshot becomes the first segment, or segments."""
        cuts = self.cuts(segment_bytes)
        rest = list(self.unsealed)[sum(len(item.aborts) for item in cuts) :]
        return [*cuts, self._cut(rest)] if rest else cuts

    def without(self, cuts: Sequence[Cut], indexes: Sequence[SegmentIndex] = ()) -> AbortedTransactions:
        """What is left when the cuts, the oldest ids, have become the segments that the entries describe."""
        if not cuts:
            return self
        sequence_id = max([self.sequence_id, *(item.sequence_id + 1 for item in indexes)])
        left = AbortedTransactions([*self.indexes, *indexes], sequence_id)
        gone = sum(len(item.aborts) for item in cuts)
        for transaction, (first, last) in islice(self.unsealed.items(), gone, None):
            left.add(transaction, first, last)
        return left

    def expired(self, log_start: int) -> list[SegmentIndex]:
        """Sealed segments none of whose transactions has a frame left in a buffer that begins at ``log_start``.

        One whose last position is just ``log_start`` may still get a late BEGIN frame there, and stays.
        """
        return [item for item in self.indexes if item.max_read_position < log_start]

    def expire(self, gone: Iterable[SegmentIndex]) -> None:
        """Forget segments that have been deleted."""
        dead = set(gone)
        self.indexes = [item for item in self.indexes if item not in dead]

    def candidates(self, transaction: bytes, position: int | None = None) -> list[SegmentIndex]:
        """Sealed segments that can know a transaction, of which a frame stands at ``position`` if that is given."""
        counter = shown_counter(transaction)
        return [
            item
            for item in self.indexes
            if item.lowest_counter <= counter <= item.highest_counter
            and (position is None or item.first_position <= position)
        ]

    def _cut(self, ids: Sequence[bytes]) -> Cut:
        spans = [self.unsealed[item] for item in ids]
        return Cut(tuple(ids), min(first for first, _ in spans), max(last for _, last in spans))


class SegmentCache:
    """Sealed segments that were asked about lately, up to a bound of memory; shared by all partitions of a group."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._sets: OrderedDict[tuple[Partition, int], frozenset[bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, partition: Partition, sequence_id: int) -> frozenset[bytes] | None:
        """The ids of a segment if they are here."""
        found = self._sets.get((partition, sequence_id))
        if found is not None:
            self._sets.move_to_end((partition, sequence_id))
        return found

    def put(self, partition: Partition, sequence_id: int, aborts: Iterable[bytes]) -> frozenset[bytes]:
        """Keep the ids of a segment, and drop those that nobody has asked about for longest; gives them as a set."""
        ids = frozenset(aborts)
        self.drop(partition, sequence_id)
        self._sets[partition, sequence_id] = ids
        self._bytes += len(ids) * ID_BYTES_IN_MEMORY
        while self._bytes > self._bytes_max and len(self._sets) > 1:
            self.drop(*next(iter(self._sets)))
        return ids

    def drop(self, partition: Partition, sequence_id: int) -> None:
        """Forget a segment."""
        self._bytes -= len(self._sets.pop((partition, sequence_id), ())) * ID_BYTES_IN_MEMORY
