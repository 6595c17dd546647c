"""Compare a segment with the commit log: is each committed record where the log says, once?

The log says of each commit where its records are, as runs of offsets. The records name their transactions in their
headers. Both are read once, in parallel, in order of offset, since the order of the commit log is that of each segment
(guarantee 4): so neither is held in memory, however many transactions there are.

Records that retention has deleted at either end cannot be checked, and are counted instead: runs before the segment's
first record, and records before the first run if the log itself has lost its beginning. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final, NamedTuple

from rollbridge.base.ids import TransactionId, split_local_sequence
from rollbridge.kafka.committed import SignedRun

FINDINGS_MAX: Final = 1_000
"""Discrepancies that are named; of more there is a number."""
_WRITERS_MAX: Final = 100_000
"""Parts of transactions whose last sequence number is remembered while a segment is read. The records of one are close
together: they were merged at once."""


class DiscrepancyKind(StrEnum):
    """Kind of discrepancy."""

    MISSING = "missing"
    """The log names records that are not there, or that say nothing of a transaction."""
    MISPLACED = "misplaced"
    """The log says that a record is one transaction's, and the record that it is another's."""
    FOREIGN = "foreign"
    """A record says that it is a transaction's, and no commit names it."""
    DOUBLED = "doubled"
    """A record of a transaction is twice in one segment, or a transaction twice on the log."""
    OVERLAP = "overlap"
    """The log says of one place that two commits have put records there, or names runs out of order."""
    GAP = "gap"
    """Offsets that are in no batch, though nothing compacts the topic."""
    CORRUPT = "corrupt"
    """A batch or a record of the log that does not parse, or whose checksum or sum is wrong."""
    UNKNOWN_SEGMENT = "unknown-segment"
    """The log names a segment that the stream does not have and never had."""
    NEVER_ARRIVED = "never-arrived"
    """The log names more records of a part than its frames in the buffer hold."""


class Discrepancy(NamedTuple):
    """Discrepancy and its place."""

    kind: DiscrepancyKind
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.text}"


class Placed(NamedTuple):
    """Run of a commit, as the log says it: ``records`` of a part from offset ``base`` on."""

    base: int
    records: int
    transaction: bytes
    part: int

    @property
    def end(self) -> int:
        """Offset behind its last record."""
        return self.base + self.records


@dataclass(slots=True)
class VerificationTally:
    """Number of records that were checked, and of those that could not be."""

    matched: int = 0
    """Are where the log says."""
    plain: int = 0
    """Of plain writers."""
    conditional: int = 0
    """Of conditional writers."""
    aborted_batches: int = 0
    """Batches of native transactions that were aborted."""
    deleted: int = 0
    """Named by the log, and deleted from the segment since."""
    forgotten: int = 0
    """In the segment, and their commits were deleted from the log, or are on that of a former group."""
    later: int = 0
    """Committed since the check has begun."""
    compacted: int = 0
    """Named by the log, and compacted away."""
    elsewhere: int = 0
    """Named by the log in segments that were removed, or in former lives of the stream."""

    def add(self, other: VerificationTally) -> None:
        """Add the counts of another check."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(slots=True)
class Discrepancies:
    """Discrepancies: the first ones by name, and a count for each kind."""

    named: list[Discrepancy] = field(default_factory=list)
    counts: dict[DiscrepancyKind, int] = field(default_factory=dict)

    def add(self, kind: DiscrepancyKind, where: str, text: str) -> None:
        """Note a finding."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.named) < FINDINGS_MAX:
            self.named.append(Discrepancy(kind, where, text))

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class SegmentCheck:
    """Check of one segment: give it the pieces in order of offset, then :meth:`finish` it.

    Args:
        name: The segment, for findings.
        placed: Runs of the log in it, in the log's order.
        first: First offset that the segment still has.
        end: Offset at which the check ends.
        is_whole: True if the log holds all commits of the stream, from the first on.
        is_compacted: True if the topic may have lost records in the middle.
    """

    def __init__(
        self,
        name: str,
        placed: Iterable[Placed],
        first: int,
        end: int,
        *,
        is_whole: bool,
        is_compacted: bool = False,
        findings: Discrepancies,
        tally: VerificationTally,
    ) -> None:
        self._name = name
        self._first = first
        self._end = end
        self._is_compacted = is_compacted
        self._findings = findings
        self._tally = tally
        self._knows_log = is_whole
        """True if records from here on must be named."""
        self._placed = self._in_order(placed)
        self._run = next(self._placed, None)
        self._reached = 0
        """Up to where the present run was found."""
        self._last: OrderedDict[tuple[bytes, int], int] = OrderedDict()

    def found(self, piece: SignedRun) -> None:
        """Take the next piece of the segment."""
        base, end = max(piece.base, self._first), min(piece.base + piece.records, self._end)
        self._look_for_doubles(piece)
        while base < end:
            run = self._run
            if run is None or end <= run.base:
                self._unnamed(piece, base, end)
                return
            if base >= run.end:
                self._leave(run)
            elif base < run.base:
                self._unnamed(piece, base, run.base)
                base = run.base
            else:
                self._miss(run, max(self._reached, run.base), base)
                until = min(end, run.end)
                self._match(piece, run, base, until)
                self._reached = base = until

    def deleted_below(self, first: int) -> None:
        """Take note that records are deleted while the segment is read: it begins at ``first`` by now."""
        self._first = max(self._first, first)

    def finish(self) -> None:
        while self._run is not None:
            self._leave(self._run)

    def _in_order(self, placed: Iterable[Placed]) -> Iterator[Placed]:
        """Yield the runs in part of the segment that can be checked, and note those that overlap."""
        reached = 0
        for run in placed:
            if run.base < reached:
                self._findings.add(
                    DiscrepancyKind.OVERLAP,
                    f"{self._name}@{run.base}",
                    f"transaction {_id(run.transaction)} is said to be at {run.base} to {run.end - 1}, and one "
                    f"before it on the log up to {reached - 1}",
                )
            base, end = max(run.base, reached, self._first), min(run.end, self._end)
            reached = max(reached, run.end)
            self._tally.deleted += max(min(run.end, self._first) - run.base, 0)
            self._tally.later += max(run.end - max(run.base, self._end), 0)
            if base < end:
                yield Placed(base, end - base, run.transaction, run.part)
            elif run.end <= self._first:
                self._knows_log = True

    def _leave(self, run: Placed) -> None:
        self._miss(run, max(self._reached, run.base), run.end)
        self._knows_log = True
        self._run = next(self._placed, None)

    def _miss(self, run: Placed, begin: int, end: int) -> None:
        self._tally.deleted += max(min(end, self._first) - begin, 0)
        begin = max(begin, self._first)
        if begin >= end:
            return
        if self._is_compacted:
            self._tally.compacted += end - begin
            return
        self._findings.add(
            DiscrepancyKind.MISSING,
            f"{self._name}@{begin}",
            f"{end - begin} records of part {run.part} of transaction {_id(run.transaction)}, which the log names at "
            f"{begin} to {end - 1}",
        )

    def _match(self, piece: SignedRun, run: Placed, base: int, end: int) -> None:
        part = split_local_sequence(piece.first)[0]
        if piece.transaction == run.transaction and part == run.part:
            self._tally.matched += end - base
            return
        self._findings.add(
            DiscrepancyKind.MISPLACED,
            f"{self._name}@{base}",
            f"the log says that {base} to {end - 1} are of part {run.part} of transaction {_id(run.transaction)}; the "
            f"records say of part {part} of {_id(piece.transaction)}",
        )

    def _unnamed(self, piece: SignedRun, base: int, end: int) -> None:
        if not self._knows_log:
            self._tally.forgotten += end - base
            return
        self._findings.add(
            DiscrepancyKind.FOREIGN,
            f"{self._name}@{base}",
            f"{end - base} records say that they are of transaction {_id(piece.transaction)}, and no commit names them "
            "there",
        )

    def _look_for_doubles(self, piece: SignedRun) -> None:
        part, _ = split_local_sequence(piece.first)
        writer = piece.transaction, part
        last = self._last.pop(writer, -1)
        if piece.first <= last:
            self._findings.add(
                DiscrepancyKind.DOUBLED,
                f"{self._name}@{piece.base}",
                f"record {split_local_sequence(piece.first)[1]} of part {part} of transaction {_id(piece.transaction)} "
                "is here, behind itself or a later one of the part",
            )
        self._last[writer] = max(last, piece.last)
        if len(self._last) > _WRITERS_MAX:
            self._last.popitem(last=False)


def _id(transaction: bytes) -> TransactionId:
    return TransactionId.from_bytes(transaction)
