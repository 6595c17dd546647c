"""Results of commits and finished parts. All of them can be pickled and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rollbridge.base.ids import TransactionId, local_sequence
from rollbridge.base.sn import DLSN
from rollbridge.buffer.frames import PieceKey
from rollbridge.commitlog.control import ControlRecord
from rollbridge.stream.conditions import StreamCondition
from rollbridge.stream.group_offsets import GroupOffsets


class Piece(NamedTuple):
    """Records that one part wrote to one segment: their number, and the counts of the first and last within the part.

    ``stream`` is the stream's place in the transaction's BEGIN frame.
    """

    part: int
    stream: int
    segment: int
    records: int
    first_count: int
    last_count: int

    @property
    def key(self) -> PieceKey:
        """Key of the piece in the manifest."""
        return PieceKey(self.part, self.stream, self.segment)


@dataclass(frozen=True, slots=True)
class PartHandle:
    """Acknowledged writes of a part; pass it to ``commit(parts=[...])``."""

    transaction: TransactionId
    part: int
    pieces: tuple[Piece, ...]
    frames: int = field(default=0, compare=False)
    """Number of frames in which the records were sent; 0 if not known."""

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(piece.records for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Savepoint:
    """State of an open transaction to which it can be rolled back, by its owner or by who resumes it. Can be pickled.

    Attributes:
        transaction: Id of the transaction.
        number: Number within the transaction, from 1; later ones have higher numbers.
        notes: All notes in force: those given with this savepoint, and those of earlier ones that it did not replace.
        records: Records that count, by stream.
    """

    transaction: TransactionId
    number: int
    notes: Mapping[str, bytes] = field(hash=False)
    records: Mapping[str, int] = field(hash=False)
    pieces: tuple[Piece, ...] = field(default=(), repr=False, compare=False)
    """Pieces with those records; for other clients' records the counts of the first and the last are not known."""
    offsets: tuple[GroupOffsets, ...] = field(default=(), repr=False, compare=False)
    """Consumer group offsets that were to be committed."""
    conditions: tuple[StreamCondition, ...] = field(default=(), repr=False, compare=False)
    """Conditions that had to hold."""


Ends = tuple[DLSN | None, DLSN | None]
"""Lowest and highest DLSN of a transaction; None if it holds no record."""


class CommitResult:
    """Answer to a commit.

    Attributes:
        transaction: Its id.
        records: Number of records that became visible.
        position: Offset of the commit record on the commit log of the group: the place in the commit order.

    Source: DistributedLog transactions, ``Future<Pair<DLSN, DLSN>> result = txn.commit()``.
    """

    __slots__ = ("_ends", "_find_ends", "position", "records", "transaction")

    def __init__(self, transaction: TransactionId, records: int, position: int, find_ends: Callable[[], Ends]) -> None:
        """Use ``find_ends`` to find the first and the last DLSN on demand, which is rare."""
        self.transaction = transaction
        self.records = records
        self.position = position
        self._find_ends: Callable[[], Ends] | None = find_ends
        self._ends: Ends = (None, None)

    @property
    def first(self) -> DLSN | None:
        """Lowest DLSN of the transaction's records; None if there are none.

        Of a resumed transaction, the lowest of those written since: a DLSN holds a record's sequence number within the
        transaction, and neither the leader nor the commit log knows those of earlier owners. The commit record lists
        the offsets of all of them; ``b.transactions`` reads them.
        """
        return self._both()[0]

    @property
    def last(self) -> DLSN | None:
        """Highest DLSN of the transaction's records; None if there are none. See :attr:`first`."""
        return self._both()[1]

    def _both(self) -> Ends:
        if self._find_ends is not None:
            self._ends = self._find_ends()
            self._find_ends = None
        return self._ends

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CommitResult):
            return NotImplemented
        return self.transaction == other.transaction and self.position == other.position

    def __hash__(self) -> int:
        return hash((self.transaction, self.position))

    def __reduce__(self) -> tuple[Callable[..., CommitResult], tuple[object, ...]]:
        return _known_result, (self.transaction, self.records, self.position, *self._both())

    def __repr__(self) -> str:
        return (
            f"CommitResult(transaction={self.transaction}, records={self.records}, first={self.first}, "
            f"last={self.last}, position={self.position})"
        )


def _known_result(
    transaction: TransactionId, records: int, position: int, first: DLSN | None, last: DLSN | None
) -> CommitResult:
    return CommitResult(transaction, records, position, lambda: (first, last))


def find_ends(record: ControlRecord, streams: Mapping[str, int], pieces: Iterable[Piece]) -> Ends:
    """Return the lowest and the highest DLSN of a commit; ``streams`` gives places in the BEGIN frame."""
    known = {piece.key: piece for piece in pieces}
    ends: list[DLSN] = []
    for stream, segment, runs in record.segments():
        place = streams[stream]
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for run in runs:
            first.setdefault(run.part, run.base_offset)
            last[run.part] = run.base_offset + run.count - 1
        for part in first:
            piece = known.get(PieceKey(part, place, record.written_number(stream, segment)))
            if piece is None:
                continue  # written by an earlier owner
            ends.append(DLSN.of(segment, first[part], local_sequence(part, piece.first_count)))
            ends.append(DLSN.of(segment, last[part], local_sequence(part, piece.last_count)))
    return min(ends, default=None), max(ends, default=None)
