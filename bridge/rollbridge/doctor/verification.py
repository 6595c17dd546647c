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

from rollbridge.base.attribution import RECORD_HEADER, Attribution, unpack_run
from rollbridge.base.avro import decode_long, encode_long
from rollbridge.base.ids import TransactionId, split_local_sequence
from rollbridge.base.sn import OPERATION_HEADER
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.kafka.batches import HEADER_BYTES, BatchHeader, RawBatch, uncompressed

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


class SignedRun(NamedTuple):
    """Consecutive records of a segment that name one part of a transaction.

    ``first`` and ``last`` are the local sequence numbers of the first and the last of them.
    """

    base: int
    records: int
    transaction: bytes
    first: int
    last: int


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
        """Number of discrepancies."""
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
        """Note the end of the segment."""
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


# Writers of the records of a batch, without parsing each record.
#
# Most batches of transactions are one run: their first record says whose all are (:mod:`rollbridge.base.attribution`).
# So only that one is parsed, and one search through the bytes tells that no other record carries such a header. Where
# there are several, the records in between are stepped over by their lengths.


_NAME: Final = RECORD_HEADER.encode()
_MARK: Final = encode_long(len(_NAME)) + _NAME
"""Beginning of rollbridge's header of a record."""
_CONDITIONAL_MARK: Final = encode_long(len(OPERATION_HEADER)) + OPERATION_HEADER.encode()


@dataclass(slots=True)
class SignedBatch:
    """Records of a batch: those that say whose they are, in order, and how many others there are."""

    pieces: list[SignedRun] = field(default_factory=list)
    plain: int = 0
    conditional: int = 0


def signed_batch(header: BatchHeader, batch: RawBatch) -> SignedBatch:
    """Attribute a complete batch's records to transactions by run headers.

    Raises:
        CorruptDataError: it does not decompress, or a record that has to be parsed does not parse.
    """
    data = bytes(memoryview(uncompressed(header, batch))[HEADER_BYTES:])
    marks = data.count(_MARK)
    if not marks:
        conditional = min(data.count(_CONDITIONAL_MARK), header.record_count)
        return SignedBatch(plain=header.record_count - conditional, conditional=conditional)
    try:
        if marks == 1:
            offset, run, _, _ = _record(data, 0)
            if run is not None and run.records == header.record_count:
                return SignedBatch([_piece(header.base_offset + offset, run, run.records)])
        return _by_each(header, data)
    except (IndexError, InvalidRequestError) as fault:
        raise CorruptDataError(f"a record of a batch of {header.record_count} does not parse: {fault}") from fault


def _by_each(header: BatchHeader, data: bytes) -> SignedBatch:
    """Parse each record for a header; runs end where another one begins, and with the batch."""
    found = SignedBatch()
    current: Attribution | None = None
    begin, taken, previous = 0, 0, -1

    def close() -> None:
        if current is not None and taken:
            found.pieces.append(_piece(begin, current, taken))

    for offset, run, is_conditional, is_signed in _records(header, data):
        if run is not None:
            close()
            begin, current, taken = offset, run, 1
        elif is_signed:  # a header that is none of ours begins no run, and ends one
            close()
            current, taken = None, 0
            found.plain += 1
        elif current is not None and offset - begin < current.records and offset == previous + 1:
            taken += 1
        else:
            found.conditional += is_conditional
            found.plain += not is_conditional
        previous = offset
    close()
    return found


def _records(header: BatchHeader, data: bytes) -> Iterator[tuple[int, Attribution | None, bool, bool]]:
    place = 0
    for _ in range(header.record_count):
        length, begin = decode_long(data, place)
        end = begin + length
        if length <= 0 or end > len(data):
            raise CorruptDataError(f"a record of {length} bytes, where {len(data) - begin} are left")
        delta, run, conditional, signed = _record(data, place, end)
        yield header.base_offset + delta, run, conditional, signed
        place = end


def _record(data: bytes, place: int, end: int | None = None) -> tuple[int, Attribution | None, bool, bool]:
    """Return the offset delta of the record at a place, the run that it begins, and which headers it has.

    Returns:
        Delta, run or None, whether a conditional writer has written it, whether it has a header of our name.
    """
    _, begin = decode_long(data, place)
    if end is not None and data.find(_NAME, begin, end) < 0:
        _, place = decode_long(data, begin + 1)
        delta, _ = decode_long(data, place)
        return delta, None, False, False
    _, place = decode_long(data, begin + 1)  # behind the attributes
    delta, place = decode_long(data, place)
    for _ in range(2):  # key and value
        size, place = decode_long(data, place)
        place += max(size, 0)
    count, place = decode_long(data, place)
    run, is_conditional, is_signed = None, False, False
    for _ in range(count):
        size, place = decode_long(data, place)
        name = data[place : place + size]
        place += size
        size, place = decode_long(data, place)
        if name == _NAME and size >= 0 and not is_signed:
            is_signed = True
            try:
                run = unpack_run(data[place : place + size])
            except InvalidRequestError:
                run = None
        is_conditional = is_conditional or name == OPERATION_HEADER.encode()
        place += max(size, 0)
    return delta, run, is_conditional, is_signed


def _piece(base: int, run: Attribution, records: int) -> SignedRun:
    if records == run.records:
        last = run.first + (sum(run.steps) if run.steps else records - 1)
    else:
        last = run.sequences()[records - 1]
    return SignedRun(base, records, run.transaction, run.first, last)
