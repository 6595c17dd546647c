"""The ``read_committed`` view of a stretch of log, and which transactions wrote its records. No I/O.

A broker answers a fetch with whole batches, markers included, up to the last stable offset, and with a list of the
aborted transactions among them; the client filters these out.

A header begins a run of records of one transaction, which ends with its batch; see :mod:`rollbridge.base.attribution`.

Source: KIP-98, "Consumer: Reading transactional messages", as in Kafka's ``Fetcher``.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Final, NamedTuple

from rollbridge.base.attribution import (
    HEADER_VALUE,
    HEADER_VALUE_BYTES,
    RECORD_HEADER,
    Attribution,
    own_header,
    unpack_run,
)
from rollbridge.base.sn import OPERATION_HEADER
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.kafka.records import (
    BatchHeader,
    FetchedBatches,
    LogRecord,
    RawBatch,
    read_chunks,
    read_parsed,
    read_records,
)

# Who wrote the records of a batch.


def attributed(records: Iterable[LogRecord]) -> Iterator[LogRecord]:
    """Yield the records of a batch, from its first one on, each with a header of its own if it belongs to a run.

    A header that does not parse begins no run, and ends one: a plain writer used the name for something else. See
    :mod:`rollbridge.base.attribution`.
    """
    begin, sequences, transaction = 0, _NOTHING, b""
    for record in records:
        value = own_header(record.headers) if record.headers else None
        if value is None:
            place = record.offset - begin  # by offset: compaction leaves gaps
            if place < len(sequences):
                own = HEADER_VALUE.pack(transaction, sequences[place])
                yield record._replace(headers=[*record.headers, (RECORD_HEADER, own)])
            else:
                yield record
            continue
        try:
            run = unpack_run(value)
        except InvalidRequestError:
            sequences = _NOTHING
            yield record
            continue
        begin, sequences, transaction = record.offset, run.sequences(), run.transaction
        yield record if run.records == 1 else _shortened(record, value)


_NOTHING: Final[Sequence[int]] = ()


def _shortened(record: LogRecord, value: bytes) -> LogRecord:
    """Shorten the header of a run to that of its first record."""
    own = RECORD_HEADER, value
    short = RECORD_HEADER, value[:HEADER_VALUE_BYTES]
    return record._replace(headers=[short if item == own else item for item in record.headers])


@dataclass(frozen=True, slots=True)
class FetchedHeads:
    """Records of a partition of which all are known, fetched from a broker.

    Attributes:
        offsets: Where they lie.
        heads: Offset and header of each head, and the end of its batch, where its run ends at the latest.
        doubtful: Records of which compaction may have taken the head.
    """

    offsets: range
    heads: Sequence[tuple[int, bytes, int]]
    doubtful: frozenset[int] = frozenset()


def seen_in(raw: bytes | memoryview, offset: int) -> FetchedHeads:
    """Return what a broker's answer for an offset tells.

    In a batch of a native transaction, as leaders write them, a record behind a gap may be one whose head is gone. A
    leader's batch begins with a head, so one that begins with another record is none.
    """
    heads: list[tuple[int, bytes, int]] = []
    doubtful: set[int] = set()
    begin: int | None = None
    end = offset
    for header, batch in FetchedBatches(raw):
        begin = header.base_offset if begin is None else begin
        end = header.base_offset + header.last_offset_delta + 1
        if header.is_control:
            continue
        next_offset = run_end = header.base_offset
        may_be_leaders, has_gap = may_lack_heads(header), False
        for record in read_parsed(batch, header):
            has_gap |= record.offset != next_offset
            next_offset = record.offset + 1
            value = own_header(record.headers)
            if value is not None:
                heads.append((record.offset, value, end))
                run_end = record.offset
                with suppress(InvalidRequestError):
                    run_end += unpack_run(value).records
            elif record.offset == header.base_offset:
                may_be_leaders = False
            elif has_gap and may_be_leaders and record.offset >= run_end:
                doubtful.add(record.offset)
    return FetchedHeads(range(offset if begin is None else begin, end), heads, frozenset(doubtful))


def may_lack_heads(header: BatchHeader) -> bool:
    """Return whether compaction may have taken heads out of a batch, and left records of their runs."""
    return header.is_transactional and header.is_compacted


class SignedRun(NamedTuple):
    """Consecutive records of a segment that name one part of a transaction.

    ``first`` and ``last`` are the local sequence numbers of the first and the last of them.
    """

    base: int
    records: int
    transaction: bytes
    first: int
    last: int

    @classmethod
    def of(cls, base: int, run: Attribution, records: int) -> SignedRun:
        """Return the first records of a run."""
        if records == run.records:
            last = run.first + (sum(run.steps) if run.steps else records - 1)
        else:
            last = run.sequences()[records - 1]
        return cls(base, records, run.transaction, run.first, last)


_headers = attrgetter("headers")


@dataclass(slots=True)
class SignedBatch:
    """Records of a batch: those that name a transaction, in order, and the number of others."""

    pieces: list[SignedRun] = field(default_factory=list)
    plain: int = 0
    conditional: int = 0


def signed_batch(header: BatchHeader, batch: RawBatch) -> SignedBatch:
    """Attribute a complete batch's records to transactions by run headers; a gap ends a run.

    Raises:
        CorruptDataError: The batch or a record is not what it claims to be.
    """
    found = SignedBatch()
    run: Attribution | None = None
    begin = taken = unsigned = 0
    for chunk in read_chunks(batch, header):
        first, count = chunk[0].offset, len(chunk)
        if not any(map(_headers, chunk)) and chunk[-1].offset - first == count - 1:
            more = min(count, run.records - taken) if run is not None and first == begin + taken else 0
            taken += more
            unsigned += count - more
            continue
        for record in chunk:
            value, is_conditional = None, False
            for name, content in record.headers:
                if name == RECORD_HEADER and content is not None:
                    value = content
                    break
                is_conditional |= name == OPERATION_HEADER
            if value is None:
                if run is not None and record.offset == begin + taken and taken < run.records:
                    taken += 1
                else:
                    unsigned += 1
                    found.conditional += is_conditional
                continue
            if run is not None:
                found.pieces.append(SignedRun.of(begin, run, taken))
            try:
                begin, run, taken = record.offset, unpack_run(value), 1
            except InvalidRequestError:  # a plain writer used the name for something else
                run = None
                unsigned += 1
    if run is not None:
        found.pieces.append(SignedRun.of(begin, run, taken))
    found.plain = unsigned - found.conditional
    return found


# What was committed.


_CONTROL_KEY: Final = struct.Struct(">hh")
_ABORT: Final = 0


class AbortedSpan(NamedTuple):
    """Aborted native transaction as a broker lists it: its producer id and its first offset."""

    producer_id: int
    first_offset: int


class CommittedRecords(NamedTuple):
    """Committed records of a stretch of log.

    Attributes:
        records: The records, in order.
        end: Offset behind the last batch examined.
        aborted: Number of batches with aborted records in the stretch.
        epoch: Leader epoch of its last batch; -1 if there is none.
    """

    records: list[LogRecord]
    end: int
    aborted: int
    epoch: int


def committed_records(raw: bytes, start: int, aborted: Iterable[AbortedSpan]) -> CommittedRecords:
    """Return the committed records from ``start`` on, each with the header that tells who wrote it.

    Args:
        raw: Consecutive batches; a last one that is cut short is left out.
        start: First offset wanted; the first batch may begin earlier.
        aborted: Aborted transactions that reach into the stretch.

    Raises:
        CorruptDataError: ``raw`` is not a sequence of batches, or a record does not parse.
    """
    records: list[LogRecord] = []
    end, aborted_batches, epoch = start, 0, -1
    for header, batch, standing in judge(FetchedBatches(raw), aborted):
        if standing is BatchStanding.COMMITTED:
            found = attributed(read_records(batch, header))
            records.extend(record for record in found if record.offset >= start)
        aborted_batches += standing is BatchStanding.ABORTED
        end = max(end, header.base_offset + header.last_offset_delta + 1)
        epoch = header.partition_leader_epoch
    return CommittedRecords(records, end, aborted_batches, epoch)


class BatchStanding(Enum):
    """Standing of a batch with a ``read_committed`` reader."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    MARKER = "marker"


def judge(
    batches: Iterable[tuple[BatchHeader, memoryview]], aborted: Iterable[AbortedSpan]
) -> Iterator[tuple[BatchHeader, memoryview, BatchStanding]]:
    """Iterate over batches of a stretch of log, in order, with the standing of each.

    Args:
        batches: Such as :class:`FetchedBatches`.
        aborted: Aborted transactions that reach into the stretch.

    Raises:
        CorruptDataError: While iterating: a batch or a marker is not what it claims to be.
    """
    spans = deque(sorted(aborted, key=lambda span: span.first_offset))
    gone: set[int] = set()
    for header, batch in batches:
        while spans and spans[0].first_offset <= header.base_offset + header.last_offset_delta:
            gone.add(spans.popleft().producer_id)
        if header.is_control:
            if _is_abort(header, batch):
                gone.discard(header.producer_id)
            yield header, batch, BatchStanding.MARKER
        else:
            is_gone = gone and header.is_transactional and header.producer_id in gone
            yield header, batch, BatchStanding.ABORTED if is_gone else BatchStanding.COMMITTED


def _is_abort(header: BatchHeader, batch: memoryview) -> bool:
    for record in read_parsed(batch, header):
        if record.key is None or len(record.key) < _CONTROL_KEY.size:
            raise CorruptDataError("a control batch holds a record without a control key")
        return bool(_CONTROL_KEY.unpack_from(record.key)[1] == _ABORT)
    return False
