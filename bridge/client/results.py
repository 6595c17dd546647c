"""What a commit and a finished part give back. All of it can be pickled and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bridge.model.control import ControlRecord
from bridge.model.frames import PieceKey
from bridge.model.identifiers import TransactionId, local_sequence
from bridge.model.sequence import DLSN


class Piece(NamedTuple):
    """What one part wrote for one segment: how much, and the counts of its first and last record within the part.

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
        """How the manifest names it."""
        return PieceKey(self.part, self.stream, self.segment)


@dataclass(frozen=True, slots=True)
class PartHandle:
    """What a part has written and the brokers have acknowledged; hand it to ``commit(parts=[...])``."""

    transaction: TransactionId
    part: int
    pieces: tuple[Piece, ...]

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(piece.records for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The answer to a commit.

    Attributes:
        transaction: Its id.
        records: How many records became visible.
        first: The lowest DLSN of them; None if there are none.
        last: The highest DLSN of them; None if there are none.
        position: Offset of the commit record on the commit log of the group: the place in the commit order.

    Source: DistributedLog transactions, ``Future<Pair<DLSN, DLSN>> result = txn.commit()``.
    """

    transaction: TransactionId
    records: int
    first: DLSN | None
    last: DLSN | None
    position: int


def commit_result(
    record: ControlRecord, position: int, streams: Mapping[str, int], pieces: Iterable[Piece]
) -> CommitResult:
    """The answer that a commit record gives.

    Args:
        record: The commit record.
        position: Its offset.
        streams: Place of each stream in the BEGIN frame.
        pieces: What the transaction consists of.
    """
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
            piece = known[PieceKey(part, place, segment.number)]
            ends.append(DLSN.of(segment, first[part], local_sequence(part, piece.first_count)))
            ends.append(DLSN.of(segment, last[part], local_sequence(part, piece.last_count)))
    return CommitResult(record.transaction, record.records, min(ends, default=None), max(ends, default=None), position)
