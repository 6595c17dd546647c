"""The ``read_committed`` view of a stretch of log: the records of batches that were not aborted. No I/O.

A broker answers a fetch with whole batches, markers included, up to the last stable offset, and with a list of the
aborted transactions among them; the client filters these out.

Any client may write header names that are not UTF-8. They are read, and written again, byte for byte: a text holds a
surrogate in place of each byte that does not decode (:pep:`383`), so such a name never equals one of ours. aiokafka's
reader and builder refuse these names; the code here is slower, and used for such batches only.

Source: KIP-98, "Consumer: Reading transactional messages", as in Kafka's ``Fetcher``; Kafka's documentation, "Record
Batch" and "Record".
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

from rollbridge.base.attribution import HEADER_VALUE, HEADER_VALUE_BYTES, RECORD_HEADER, own_header, unpack_run
from rollbridge.base.avro import decode_long, encode_long
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.kafka.batches import (
    DECOMPRESSED_BYTES_MAX,
    HEADER_BYTES,
    BatchHeader,
    Compression,
    Headers,
    LogRecord,
    RawBatch,
    complete_batches,
    framed,
    parse_header,
    read_records,
    uncompressed,
)

# Records with header names that are not UTF-8.

_HOW: Final = "surrogateescape"
_NONE: Final = -1


def iterate_any_records(batch: RawBatch, *, limit_bytes: int = DECOMPRESSED_BYTES_MAX) -> Iterator[LogRecord]:
    """Iterate over the records of a complete batch, of which a megabyte can hold millions.

    Raises:
        CorruptDataError: While iterating: a record does not parse, or the records exceed ``limit_bytes``.
    """
    given = 0
    try:
        for record in read_records(batch, limit_bytes=limit_bytes):
            yield record
            given += 1
        return
    except CorruptDataError as fault:
        if not isinstance(fault.__cause__, UnicodeDecodeError):
            raise
    yield from islice(_parse(batch, limit_bytes), given, None)


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


def is_plain(headers: Headers) -> bool:
    """Return whether all header names encode as UTF-8, as :class:`BatchBuilder` requires."""
    try:
        "".join(name for name, _ in headers).encode()
    except UnicodeEncodeError:
        return False
    return True


def batch_of_one(timestamp: int, key: bytes | None, value: bytes | None, headers: Headers) -> bytes:
    """Return an uncompressed batch of one record, whatever its header names; ``timestamp`` in ms since 1970."""
    parts = [b"\0\0\0", _sized(key), _sized(value), encode_long(len(headers))]  # attributes, both deltas
    for name, content in headers:
        parts += [_sized(name.encode("utf-8", _HOW)), _sized(content)]
    record = _sized(b"".join(parts))
    return framed(record, codec=Compression.NONE, count=1, base_timestamp=timestamp, max_timestamp=timestamp)


def _parse(batch: RawBatch, limit_bytes: int = DECOMPRESSED_BYTES_MAX) -> Iterator[LogRecord]:
    header = parse_header(batch)
    data = bytes(memoryview(uncompressed(header, batch, limit_bytes=limit_bytes))[HEADER_BYTES:])
    place = 0
    try:
        for _ in range(header.record_count):
            length, place = decode_long(data, place)
            end = place + length
            moment, place = decode_long(data, place + 1)  # behind the attributes
            delta, place = decode_long(data, place)
            key, place = _taken(data, place, end)
            value, place = _taken(data, place, end)
            count, place = decode_long(data, place)
            headers: list[tuple[str, bytes | None]] = []
            for _ in range(count):
                name, place = _taken(data, place, end)
                content, place = _taken(data, place, end)
                headers.append(((name or b"").decode("utf-8", _HOW), content))
            if place != end:
                raise CorruptDataError(f"a record of {length} bytes ends at byte {place - end + length}")
            timestamp = header.max_timestamp if header.is_append_time else header.base_timestamp + moment
            yield LogRecord(header.base_offset + delta, timestamp, key, value, headers)
    except IndexError:
        raise CorruptDataError(f"a batch of {header.record_count} records ends within one") from None
    except InvalidRequestError as fault:
        raise CorruptDataError(f"a record does not parse: {fault}") from None


def _taken(data: bytes, place: int, end: int) -> tuple[bytes | None, int]:
    """Read bytes behind their length; return them (None for -1) and the next place."""
    size, place = decode_long(data, place)
    if size == _NONE:
        return None, place
    if not 0 <= size <= end - place:
        raise CorruptDataError(f"a record holds {size} bytes where {end - place} are left")
    return data[place : place + size], place + size


def _sized(content: bytes | None) -> bytes:
    return encode_long(_NONE) if content is None else encode_long(len(content)) + content


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
    for header, batch, standing in judged_batches(raw, aborted):
        if standing is BatchStanding.COMMITTED:
            found = attributed(iterate_any_records(batch))
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


def judged_batches(
    raw: bytes | memoryview, aborted: Iterable[AbortedSpan]
) -> Iterator[tuple[BatchHeader, memoryview, BatchStanding]]:
    """Iterate over the batches of a stretch of log, in order, with the standing of each.

    Args:
        raw: Consecutive batches; a last one that is cut short is left out.
        aborted: Aborted transactions that reach into the stretch.

    Raises:
        CorruptDataError: While iterating: ``raw`` is not a sequence of batches.
    """
    return judge(((parse_header(batch), batch) for batch in complete_batches(raw)), aborted)


def judge(
    batches: Iterable[tuple[BatchHeader, memoryview]], aborted: Iterable[AbortedSpan]
) -> Iterator[tuple[BatchHeader, memoryview, BatchStanding]]:
    """Iterate over batches already split, with the standing of each; see :func:`judged_batches`."""
    spans = deque(sorted(aborted, key=lambda span: span.first_offset))
    gone: set[int] = set()
    for header, batch in batches:
        while spans and spans[0].first_offset <= header.base_offset + header.last_offset_delta:
            gone.add(spans.popleft().producer_id)
        if header.is_control:
            if _is_abort(batch):
                gone.discard(header.producer_id)
            yield header, batch, BatchStanding.MARKER
        else:
            yield header, batch, BatchStanding.ABORTED if _is_gone(header, gone) else BatchStanding.COMMITTED


def _is_gone(header: BatchHeader, gone: set[int]) -> bool:
    return header.is_transactional and header.producer_id in gone


def _is_abort(batch: memoryview) -> bool:
    for record in read_records(batch):
        if record.key is None or len(record.key) < _CONTROL_KEY.size:
            raise CorruptDataError("a control batch holds a record without a control key")
        return bool(_CONTROL_KEY.unpack_from(record.key)[1] == _ABORT)
    return False
