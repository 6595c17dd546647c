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
from typing import Final

from bridge.model.buffer import Partition
from bridge.model.snapshots import COUNTER_SHOWN_MAX, SegmentIndex, Snapshot, counter_of, id_bytes, ids_bytes, low_of

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
    _bytes: int = 0
    _low: int = 0

    @classmethod
    def of(cls, snapshot: Snapshot) -> AbortedTransactions:
        """What a snapshot says."""
        found = cls(list(snapshot.indexes), snapshot.sequence_id)
        for transaction in snapshot.aborts:
            found.add(transaction, snapshot.first_position, snapshot.position)
        return found

    def __len__(self) -> int:
        return len(self.unsealed) + sum(item.aborts for item in self.indexes)

    @property
    def unsealed_bytes(self) -> int:
        """What the ids of the unsealed snapshot take in a record."""
        return self._bytes

    def add(self, transaction: bytes, first_position: int, position: int) -> None:
        """Note an aborted transaction whose frames stand from ``first_position`` to below ``position``."""
        if transaction not in self.unsealed:
            self._bytes += id_bytes(transaction, self._low)
            self._low = low_of(transaction)
            self.unsealed[transaction] = (first_position, position)

    def cuts(self, segment_bytes: int) -> list[Cut]:
        """What is to be sealed: full segments from the oldest id on, while more is left than fits into one."""
        if self._bytes <= segment_bytes:
            return []
        cuts: list[Cut] = []
        ids = list(self.unsealed)
        begin = 0
        size = 0
        for place, more in enumerate(ids_bytes(ids)):
            if place > begin and size + more > segment_bytes:
                cuts.append(self._cut(ids[begin:place]))
                begin = place
                size = 0
            # The first id of a segment is written in full.
            size += id_bytes(ids[place], 0) if place == begin else more
        return cuts

    def seal_all(self, segment_bytes: int) -> list[Cut]:
        """The same for everything: how a single snapshot becomes the first segment, or segments."""
        cuts = self.cuts(segment_bytes)
        rest = list(self.unsealed)[sum(len(item.aborts) for item in cuts) :]
        return [*cuts, self._cut(rest)] if rest else cuts

    def sealed(self, indexes: Sequence[SegmentIndex], cuts: Sequence[Cut]) -> None:
        """The cuts have become durable as the segments that the entries describe."""
        self.indexes.extend(indexes)
        self.sequence_id = max([self.sequence_id, *(item.sequence_id + 1 for item in indexes)])
        for cut in cuts:
            for transaction in cut.aborts:
                del self.unsealed[transaction]
        rest, self.unsealed = self.unsealed, {}
        self._bytes = self._low = 0
        for transaction, (first, last) in rest.items():
            self.add(transaction, first, last)

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
        counter = min(counter_of(transaction), COUNTER_SHOWN_MAX)
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
