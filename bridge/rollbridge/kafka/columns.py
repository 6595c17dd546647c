"""Codec of record batches a column at a time: fields as NumPy arrays of positions, batches from Arrow columns.

:func:`committed_columns` finds the begin and the end of each key, value and list of headers in the bytes of a fetch. A
record has no fixed place: it begins where the one before ends, and varints give the lengths of its fields. So one loop
in Python goes from length to length, a fifth of a microsecond for each record unless many of the same length follow
each other. Everything else is computed for all records of a fetch at once, and nothing is copied. What is claimed is
checked as in :mod:`rollbridge.kafka.records`.

:func:`encode_batch` makes the varints of a batch with NumPy. Arrow's ``binary_join_element_wise`` joins them with keys,
values and headers for all rows in compiled code, and the buffer behind its result is the body of the batch. No Python
code runs per row::

    length, attributes, timestamp delta, offset delta, key length | key | value length | value | headers
    front                                                         | key | middle       | value | back
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollbridge.base.attribution import HEADER_VALUE_BYTES, ONE_BYTE, RECORD_HEADER, append_step, pack_run, unpack_run
from rollbridge.base.avro import encode_long
from rollbridge.base.ids import local_sequence
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.kafka.committed import AbortedSpan, BatchStanding, judge, may_lack_heads, seen_in
from rollbridge.kafka.records import (
    HEADER_BYTES,
    BatchHeader,
    Compression,
    FetchedBatches,
    RawBatch,
    check_crc,
    compressed,
    encode_field,
    encode_header,
    framed,
    uncompressed,
)

# Types are checked without NumPy, so only these names say what an array holds.
Longs = Any
"""An array of 64-bit integers."""
Bytes = Any
"""An array of bytes; with two dimensions, one row for each record."""
Flags = Any
"""An array of booleans."""

CREATE_TIME: Final = 0
LOG_APPEND_TIME: Final = 1
_OWN_NAME: Final = RECORD_HEADER.encode()
_ID_BYTES: Final = 16
_ID_ZEROS: Final = slice(2, 4)
"""Bytes of a transaction id that are always 0."""
_SHIFT_MAX: Final = 63
_TOO_LARGE: Final = "a number in a record has more than 64 bits"
_LENGTH_BYTES_MAX: Final = 5
_ALIKE: Final = 16
"""Records of the same length in a row after which the next ones are compared all at once."""
_WARY: Final = 500
"""Records until the next such attempt, after one that found fewer than :data:`_ALIKE`."""


class Slices(NamedTuple):
    """Field of several records: bytes ``start..end-1`` of the buffer; ``end < start`` where a record has none."""

    start: Longs
    end: Longs


@dataclass(frozen=True)
class Records:
    """Records of one partition in order of offset, as positions in ``buffer``; arrays have one entry per record."""

    buffer: bytes
    offset: Longs
    timestamp_ms: Longs
    timestamp_type: Any
    key: Slices
    value: Slices
    header_count: Longs
    headers: Longs
    """Position of the first header."""
    end: Longs
    """Position behind the record."""
    batch: Longs
    """Number of its batch."""
    whole: Records | None = None
    """All records of the fetch, if these are some of them."""
    index: Longs = None
    """Their places among all records."""
    compacted: Sequence[memoryview] = ()
    """Batches of the fetch in which heads of runs may be missing."""

    def __len__(self) -> int:
        return len(self.offset)

    def where(self, chosen: Longs | Flags | slice) -> Records:
        """Return some of the records, chosen by a mask, indices or a slice."""
        places = np.arange(len(self)) if self.index is None else self.index
        return Records(
            self.buffer,
            self.offset[chosen],
            self.timestamp_ms[chosen],
            self.timestamp_type[chosen],
            Slices(self.key.start[chosen], self.key.end[chosen]),
            Slices(self.value.start[chosen], self.value.end[chosen]),
            self.header_count[chosen],
            self.headers[chosen],
            self.end[chosen],
            self.batch[chosen],
            self if self.whole is None else self.whole,
            places[chosen],
        )

    def writers(self) -> WrittenBy:
        """Return the writers of the records. Their headers may lie before the first of them, in its batch.

        Raises:
            CorruptDataError: headers do not parse.
        """
        if self.whole is None:
            return self._writers
        found = self.whole._writers
        return WrittenBy(*(field[self.index] for field in found))

    @cached_property
    def _writers(self) -> WrittenBy:
        count = len(self)
        data = np.frombuffer(self.buffer, np.uint8)
        start: Longs = np.full(count, -1, np.int64)
        end: Longs = np.full(count, -1, np.int64)
        for record, name, value in headers_of(self):
            # Of several ``rollbridge`` headers the first one counts, as for the library's readers.
            chosen = equals(data, name, _OWN_NAME) & (value.end >= value.start) & (start[record] < 0)
            start[record[chosen]], end[record[chosen]] = value.start[chosen], value.end[chosen]
        heads = np.flatnonzero(start >= 0)
        known: Flags = np.zeros(count, np.bool_)
        transaction: Bytes = np.zeros((count, _ID_BYTES), np.uint8)
        sequence: Longs = np.zeros(count, np.int64)
        single = heads[end[heads] - start[heads] == HEADER_VALUE_BYTES]
        values = rows_at(data, start[single], HEADER_VALUE_BYTES)
        # As `unpack_run`, for all at once; else a plain writer used the name for something else.
        sound = (values[:, _ID_ZEROS] == 0).all(axis=1) & (values[:, _ID_BYTES] < 0x80)
        known[single] = sound
        transaction[single] = values[:, :_ID_BYTES]
        sequence[single] = np.ascontiguousarray(values[:, _ID_BYTES:]).view(">i8")[:, 0]
        following: Longs = np.append(heads[1:], count)
        longer = np.flatnonzero(end[heads] - start[heads] > HEADER_VALUE_BYTES)
        for head, until in zip(heads[longer].tolist(), following[longer].tolist(), strict=True):
            try:
                run = unpack_run(self.buffer[start[head] : end[head]])
            except InvalidRequestError:
                continue
            delta = self.offset[head:until] - self.offset[head]
            within = (delta < run.records) & (self.batch[head:until] == self.batch[head])
            members, delta = head + np.flatnonzero(within), delta[within]
            known[members] = True
            transaction[members] = np.frombuffer(run.transaction, np.uint8)
            steps = np.cumsum([0, *run.steps])[delta] if run.steps else delta
            sequence[members] = run.first + steps
        doubtful = [offset for batch in self.compacted for offset in seen_in(batch, 0).doubtful]
        return WrittenBy(known, transaction, sequence, np.isin(self.offset, np.array(doubtful, np.int64)))


class WrittenBy(NamedTuple):
    """Transactions that wrote records, an entry for each of them."""

    known: Flags
    """False for a record of no transaction."""
    transaction: Bytes
    """The 16 bytes of its id."""
    sequence: Longs
    """The local sequence number."""
    doubtful: Flags
    """True if that cannot be known any more: compaction may have taken the head of its run."""


class HeaderCursor(NamedTuple):
    """Next header of each record that has another one."""

    record: Longs
    """Index of the record."""
    name: Slices
    value: Slices


def committed_columns(raw: bytes, start: int, aborted: Iterable[AbortedSpan]) -> tuple[Records, int]:
    """Return the committed records of a fetch from ``start`` on, and the offset up to which the fetch was processed.

    Args:
        raw: Batches one after the other; the last may be cut short, and is left out then.
        start: First offset to return; the first batch may begin earlier.
        aborted: Aborted transactions with records in the fetch.

    Raises:
        CorruptDataError: ``raw`` is no sequence of batches, a checksum is wrong, or records are not what they claim.
    """
    chosen: list[tuple[BatchHeader, memoryview]] = []
    end = start
    for header, batch, standing in judge(FetchedBatches(raw), aborted):
        if standing is BatchStanding.COMMITTED:
            check_crc(header, batch)
            chosen.append((header, batch))
        end = max(end, header.base_offset + header.last_offset_delta + 1)
    records = parse(raw, chosen)
    if len(records) and records.offset[0] < start:
        records = records.where(records.offset >= start)
    return records, end


def parse(raw: bytes, batches: list[tuple[BatchHeader, memoryview]]) -> Records:
    """Parse the records of some batches, which are views of ``raw``.

    Raises:
        CorruptDataError: the records do not parse.
    """
    if any(header.compression for header, _ in batches):
        bodies = [memoryview(uncompressed(header, batch))[HEADER_BYTES:] for header, batch in batches]
        buffer = b"".join(bodies)
        ends = np.cumsum([len(body) for body in bodies]).tolist()
        sections = list(zip([0, *ends[:-1]], ends, strict=True))
    else:
        # The batches are views of ``raw``: find their positions in it instead of copying them.
        buffer = raw
        whole = np.frombuffer(raw, np.uint8).ctypes.data
        begins = [np.frombuffer(batch, np.uint8).ctypes.data - whole + HEADER_BYTES for _, batch in batches]
        sections = [
            (begin, begin - HEADER_BYTES + len(batch)) for begin, (_, batch) in zip(begins, batches, strict=True)
        ]
    try:
        compacted = [batch for header, batch in batches if may_lack_heads(header)]
        return _parse(buffer, [header for header, _ in batches], sections, compacted)
    except IndexError as exc:
        raise CorruptDataError("a record batch ends in the middle of a record") from exc


def _parse(
    buffer: bytes, headers: list[BatchHeader], sections: list[tuple[int, int]], compacted: list[memoryview]
) -> Records:
    data = np.frombuffer(buffer, np.uint8)
    starts: list[int] = []
    for header, (begin, end) in zip(headers, sections, strict=True):
        _find_starts(buffer, data, begin, end, header.record_count, starts)
    counts = [header.record_count for header in headers]
    batch = _repeated(list(range(len(headers))), counts)
    length, place = varints(data, np.array(starts, np.int64))
    record_end = place + length
    timestamp, place = varints(data, place + 1)
    offset, place = varints(data, place)
    key, place = _field(data, place)
    value, place = _field(data, place)
    if ((place > record_end) | (length < 0)).any():
        raise CorruptDataError("a field of a record is longer than the record")
    count, place = varints(data, place)
    # Each header takes two bytes at least.
    if ((count < 0) | (count > (record_end - place) >> 1) | ((count == 0) & (place != record_end))).any():
        raise CorruptDataError("a record claims more or fewer headers than it has")
    timestamp += _repeated([header.base_timestamp for header in headers], counts)
    offset += _repeated([header.base_offset for header in headers], counts)
    if any(header.is_compacted for header in headers):
        last = _repeated([header.base_offset + header.last_offset_delta for header in headers], counts)
        before: Longs = np.append(-1, np.where(batch[1:] == batch[:-1], offset[:-1], -1))
        is_sound = (offset > before) & (offset >= _repeated([header.base_offset for header in headers], counts))
        is_sound &= offset <= last
    else:
        first = np.array([header.base_offset for header in headers]) - np.cumsum([0, *counts[:-1]])
        is_sound = offset == np.arange(len(offset)) + np.repeat(first, counts)
    if not is_sound.all():
        raise CorruptDataError("a record is numbered outside of its batch, or not behind the one before")
    kind = [LOG_APPEND_TIME if header.is_append_time else CREATE_TIME for header in headers]
    if LOG_APPEND_TIME in kind:
        appended = _repeated(kind, counts) == LOG_APPEND_TIME
        timestamp = np.where(appended, _repeated([header.max_timestamp for header in headers], counts), timestamp)
    kinds = _repeated(kind, counts).astype(np.int32)
    return Records(buffer, offset, timestamp, kinds, key, value, count, place, record_end, batch, compacted=compacted)


def _find_starts(buffer: bytes, data: Bytes, begin: int, end: int, count: int, starts: list[int]) -> None:
    """Append the position of each record of a section, that is, of its length."""
    place = begin
    add = starts.append
    left = count
    before = alike = 0
    while left:
        add(place)
        left -= 1
        begun = place
        byte = buffer[place]
        place += 1
        if byte < 128:
            place += byte >> 1
        else:
            length, shift = byte & 127, 7
            while (byte := buffer[place]) >= 128:
                length |= (byte & 127) << shift
                shift += 7
                if shift > _SHIFT_MAX:
                    raise CorruptDataError(_TOO_LARGE)
                place += 1
            place += 1 + ((length | byte << shift) >> 1)
        stride = place - begun
        alike = alike + 1 if stride == before or alike < 0 else 0
        before = stride
        if alike == _ALIKE and left:
            more = _same_lengths(data, begun, stride, min(left, (end - place) // stride))
            starts.extend(range(place, place + more * stride, stride))
            place += more * stride
            left -= more
            alike = 0 if more >= _ALIKE else -_WARY
    if place != end:
        raise CorruptDataError(f"{count} records of a batch take {place - begin} bytes, its section has {end - begin}")


def _same_lengths(data: Bytes, first: int, stride: int, most: int) -> int:
    """Return how many records in a row behind the first have its length; at most ``most`` are compared.

    Where a record ends the next one begins. So as long as the bytes of the length are the same at every stride, these
    are record lengths, and not payload that looks like them.
    """
    same: Flags = np.ones(max(most, 0), np.bool_)
    for place in range(_LENGTH_BYTES_MAX):
        byte = data[first + place]
        column = data[first + stride + place : first + stride + place + most * stride : stride]
        same &= column[:most] == byte
        if byte < 128:
            break
    else:
        return 0
    return len(same) if same.all() else int(same.argmin())


_OF_ONE_BYTE: Final[Longs] = np.array([byte >> 1 ^ -(byte & 1) for byte in range(1 << 7)])


def varints(data: Bytes, place: Longs) -> tuple[Longs, Longs]:
    """Decode the zigzag varints at some positions; return the values, and the position behind each.

    Raises:
        CorruptDataError: one has more than 64 bits.
        IndexError: one goes beyond the data.
    """
    byte = data[place]
    ends = place + 1
    more = np.flatnonzero(byte >= 128)
    if not len(more):
        return _OF_ONE_BYTE[byte], ends
    found = byte.astype(np.int64) & 127
    shift = 7
    while len(more):
        byte = data[ends[more]].astype(np.int64)
        if shift == _SHIFT_MAX and (byte > 1).any():
            raise CorruptDataError(_TOO_LARGE)
        found[more] |= (byte & 127) << shift
        ends[more] += 1
        more = more[byte >= 128]
        shift += 7
    return (found >> 1) & 0x7FFFFFFFFFFFFFFF ^ -(found & 1), ends


def headers_of(records: Records) -> Iterator[HeaderCursor]:
    """Yield the first headers of all records that have one, then the second ones, and so on.

    Raises:
        CorruptDataError: headers do not parse, or end elsewhere than their records; raised while iterating.
    """
    data = np.frombuffer(records.buffer, np.uint8)
    try:
        left, place = records.header_count.copy(), records.headers.copy()
        chosen = np.flatnonzero(left > 0)
        while len(chosen):
            name, after = _field(data, place[chosen])
            if (name.end < name.start).any():
                raise CorruptDataError("a record has a header without a name")
            value, after = _field(data, after)
            place[chosen] = after
            left[chosen] -= 1
            yield HeaderCursor(chosen, name, value)
            chosen = chosen[left[chosen] > 0]
    except IndexError as exc:
        raise CorruptDataError("a header goes beyond the end of its batch") from exc
    if (place != records.end).any():
        raise CorruptDataError("the headers of a record end elsewhere than the record")


def _field(data: Bytes, place: Longs) -> tuple[Slices, Longs]:
    length, start = varints(data, place)
    return Slices(start, start + length), start + np.maximum(length, 0)


def equals(data: Bytes, field: Slices, text: bytes) -> Flags:
    """Return a mask of the fields that hold exactly this text."""
    found: Flags = field.end - field.start == len(text)
    candidates = np.flatnonzero(found)
    found[candidates] = (rows_at(data, field.start[candidates], len(text)) == np.frombuffer(text, np.uint8)).all(axis=1)
    return found


def rows_at(data: Bytes, start: Longs, size: int) -> Bytes:
    """Return ``size`` bytes from each place on, as rows.

    Raises:
        CorruptDataError: a row would go beyond the data.
    """
    if not len(start):
        return np.zeros((0, size), np.uint8)
    if int(start.max()) + size > len(data):
        raise CorruptDataError("a header goes beyond the end of its batch")
    rows: Bytes = np.lib.stride_tricks.sliding_window_view(data, size)[start]
    return rows


def _repeated(values: list[int], counts: list[int]) -> Longs:
    return np.repeat(np.array(values, np.int64), counts)


# Building batches.


_NUMBERS_BYTES_MAX: Final = 5 + 1 + 5 + 10 + 5
"""Maximum bytes of length, attributes, offset delta, timestamp delta and number of headers of a record."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Records as columns, all of the same length; made by :meth:`of`.

    Attributes:
        keys: Binary; null is no key.
        values: Binary; null is a tombstone.
        counts: Number of each record within its part, ascending.
        timestamps: Milliseconds since 1970.
        sizes: Bytes of key, value and the user's headers of each record, as they are encoded.
        headers: The user's headers of each record as encoded in a batch, without their number; None if there are none.
        header_counts: Number of the user's headers of each record.
    """

    keys: pa.BinaryArray
    values: pa.BinaryArray
    counts: Longs
    timestamps: Longs
    sizes: Longs
    headers: pa.BinaryArray | None = None
    header_counts: Longs = None

    @classmethod
    def of(
        cls,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        counts: Longs,
        timestamps: Longs,
        headers: tuple[pa.BinaryArray, Longs] | None = None,
    ) -> Rows:
        """Return the rows with their sizes; ``headers`` are as :func:`encode_headers` returns them."""
        sizes = _field_sizes(keys) + _field_sizes(values)
        if headers is None:
            return cls(keys, values, counts, timestamps, sizes)
        sizes += _lengths(headers[0])
        return cls(keys, values, counts, timestamps, sizes, *headers)

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, places: Longs) -> Rows:
        """Return some of the rows, in the order of ``places``."""
        chosen = pa.array(places)
        return Rows(
            self.keys.take(chosen),
            self.values.take(chosen),
            self.counts[places],
            self.timestamps[places],
            self.sizes[places],
            None if self.headers is None else self.headers.take(chosen),
            None if self.headers is None else self.header_counts[places],
        )

    def slice(self, start: int, stop: int) -> Rows:
        """Return the rows from ``start`` to before ``stop``, without a copy."""
        return Rows(
            self.keys[start:stop],
            self.values[start:stop],
            self.counts[start:stop],
            self.timestamps[start:stop],
            self.sizes[start:stop],
            None if self.headers is None else self.headers[start:stop],
            None if self.headers is None else self.header_counts[start:stop],
        )

    @classmethod
    def together(cls, several: Sequence[Rows]) -> Rows:
        """Concatenate rows; all of them must have headers, or none."""
        if len(several) == 1:
            return several[0]
        return cls(
            pa.concat_arrays([rows.keys for rows in several]),
            pa.concat_arrays([rows.values for rows in several]),
            np.concatenate([rows.counts for rows in several]),
            np.concatenate([rows.timestamps for rows in several]),
            np.concatenate([rows.sizes for rows in several]),
            None if several[0].headers is None else pa.concat_arrays([rows.headers for rows in several]),
            None if several[0].headers is None else np.concatenate([rows.header_counts for rows in several]),
        )


def record_bytes(rows: Rows) -> Longs:
    """Return the bytes of each record, as the limits of streams count them: key, value and headers, ours included."""
    return rows.sizes + _OWN_BYTES + (1 if rows.headers is None else _varint_sizes(rows.header_counts + 1))


def batch_bytes(rows: Rows, *, each: bool) -> Longs:
    """Return an upper bound of the bytes of each row in a batch, but for what the first header says of the others."""
    return rows.sizes + (_NUMBERS_BYTES_MAX + (_OWN_BYTES if each else 0))


def encode_batch(rows: Rows, transaction: bytes, part: int, codec: Compression, *, each: bool = False) -> bytes:
    """Return the record batch of some rows, with the header that names their transaction.

    Args:
        rows: One or more rows.
        transaction: Id of the transaction, 16 bytes.
        part: Number of the part that the rows belong to.
        codec: Compression codec.
        each: True if each record has the header, not only the first.
    """
    parts: list[RawBatch]
    if each or rows.headers is not None:
        parts = [_records_with_headers(rows, transaction, part, each=each)]
    else:
        parts = _records(rows, transaction, part)
    used: int = Compression.NONE
    if codec != Compression.NONE:
        body, used = compressed(b"".join(parts), codec)
        parts = [body]
    base, latest = int(rows.timestamps[0]), int(rows.timestamps.max())
    return framed(*parts, codec=used, count=len(rows), base_timestamp=base, max_timestamp=latest)


def encode_headers(rows: Sequence[Sequence[tuple[str, bytes | None]]]) -> tuple[pa.BinaryArray, Longs]:
    """Return the headers of each record as encoded in a batch, and their number."""
    encoded = [b"".join(encode_header(name, value) for name, value in headers) for headers in rows]
    return pa.array(encoded, pa.binary()), np.fromiter(map(len, rows), np.int64, len(rows))


def _records(rows: Rows, transaction: bytes, part: int) -> list[RawBatch]:
    """Return the records without users' headers, as encoded behind the header of a batch, in pieces.

    Each record ends with the number of its headers, 0 but for the first. That is put in front of the next record, so
    there are four columns to be joined, not six.
    """
    count = len(rows)
    header = _own_header(rows, transaction, part)
    key, value = encode_field(rows.keys[0].as_py()), encode_field(rows.values[0].as_py())
    first = b"".join((_NO_DELTAS, key, value, encode_long(1), header))
    first = encode_long(len(first)) + first
    if count == 1:
        return [first]
    keys, values, timestamps = rows.keys[1:], rows.values[1:], rows.timestamps
    key_lengths, deltas = _lengths(keys, null=-1), timestamps[1:] - timestamps[0]
    rest: Longs = 1 + _Varints.of(deltas).sizes + rows.sizes[1:] + 1
    fronts = [_front(here, deltas[here], rest[here], key_lengths[here]) for here in _offset_ranges(count)]
    front = _as_column(np.concatenate([data for data, _ in fronts]), np.concatenate([sizes for _, sizes in fronts]))
    middle = _as_column(*_side_by_side(_Varints.of(_lengths(values, null=-1))))
    joined = _joined(front, keys, middle, values)
    return [first, joined[1:], b"\0"]


_NO_DELTAS: Final = b"\0\0\0"
"""Attributes, timestamp delta and offset delta of a first record."""


def _joined(*columns: pa.BinaryArray | pa.BinaryScalar) -> memoryview:
    """Return the values of some columns side by side, row by row; nulls are empty."""
    joined = pc.binary_join_element_wise(*columns, b"", null_handling="replace", null_replacement=b"")
    _, ends, data = joined.buffers()
    first, last = np.frombuffer(ends, np.int32, len(joined) + 1)[[0, -1]]
    return memoryview(data)[first:last]


def _offset_ranges(count: int) -> Iterator[slice]:
    """Yield slices of the records behind the first of a batch whose offset deltas take equally many bytes."""
    start = 1
    for bits in range(6, 35, 7):
        stop = min(count, 1 << bits)
        if start < stop:
            yield slice(start - 1, stop - 1)
        start = stop


def _front(here: slice, deltas: Longs, rest: Longs, key_lengths: Longs) -> tuple[Longs, Longs]:
    """Return the bytes in front of the keys of some records, and their number for each record.

    Args:
        here: Places of the records behind the first.
        deltas, key_lengths: Timestamp deltas of the records, and lengths of their keys.
        rest: Their lengths without their offset deltas.
    """
    offsets = _Varints.of(np.arange(here.start + 1, here.stop + 1, dtype=np.int64))
    zero = _Varints.of(np.zeros(len(rest), np.int64))
    return _side_by_side(
        zero, _Varints.of(rest + offsets.sizes), zero, _Varints.of(deltas), offsets, _Varints.of(key_lengths)
    )


def _records_with_headers(rows: Rows, transaction: bytes, part: int, *, each: bool) -> memoryview:
    """Return the records as encoded behind the header of a batch."""
    count = len(rows)
    offsets = _Varints.of(np.arange(count, dtype=np.int64))
    deltas = _Varints.of(rows.timestamps - rows.timestamps[0])
    own = (_own_of_each if each else _own_of_first)(rows, transaction, part)
    counts = np.zeros(count, np.int64) if rows.headers is None else rows.header_counts.copy()
    counts[: count if each else 1] += 1
    numbers = _Varints.of(counts)
    lengths = _Varints.of(1 + offsets.sizes + deltas.sizes + rows.sizes + numbers.sizes + _lengths(own))
    attributes = _Varints.of(np.zeros(count, np.int64))
    front = _as_column(*_side_by_side(lengths, attributes, deltas, offsets, _Varints.of(_lengths(rows.keys, null=-1))))
    middle = _as_column(*_side_by_side(_Varints.of(_lengths(rows.values, null=-1))))
    users = [] if rows.headers is None else [rows.headers]
    columns = [front, rows.keys, middle, rows.values, _as_column(*_side_by_side(numbers)), *users, own]
    return _joined(*columns)


def _own_of_each(rows: Rows, transaction: bytes, part: int) -> pa.BinaryArray:
    """Return our header of each row, that of a run of one."""
    own: Longs = np.empty((len(rows), _OWN_BYTES), np.uint8)
    own[:, : len(_OWN) + len(transaction)] = np.frombuffer(_OWN + transaction, np.uint8)
    local = (rows.counts + local_sequence(part, 0)).astype(">u8")
    own[:, len(_OWN) + len(transaction) :] = local.view(np.uint8).reshape(len(rows), 8)
    return _as_column(own.reshape(-1), np.full(len(rows), _OWN_BYTES, np.int64))


def _own_of_first(rows: Rows, transaction: bytes, part: int) -> pa.BinaryArray:
    """Return our header of the first row, that of a run of all, and nothing for the others."""
    count = len(rows)
    header = _own_header(rows, transaction, part)
    ends: Longs = np.full(count + 1, len(header), np.int32)
    ends[0] = 0
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(header)])


def _own_header(rows: Rows, transaction: bytes, part: int) -> bytes:
    """Return our header of a run of all rows."""
    steps = _steps(np.diff(rows.counts))
    return encode_header(
        RECORD_HEADER, pack_run(transaction, local_sequence(part, int(rows.counts[0])), len(rows), steps)
    )


def _steps(differences: Longs) -> bytes | bytearray:
    """Return numbers from 1 on in LEB128, one behind the other."""
    if not len(differences) or int(differences.max()) < ONE_BYTE:
        found: bytes = differences.astype(np.uint8).tobytes()
        return found
    steps = bytearray()
    for step in differences.tolist():
        append_step(steps, step)
    return steps


def ends_of(column: pa.BinaryArray) -> Longs:
    """Return the offsets at which the values begin, and at which the last one ends."""
    return np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]


@dataclass(frozen=True, slots=True)
class _Varints:
    """Column of zigzag varints.

    Attributes:
        zigzag: The numbers, zigzag, in as few bits as hold them.
        sizes: Bytes of each number; one size for all if they are alike in this.
        width: Bytes of the largest number.
    """

    zigzag: Longs
    sizes: Longs
    width: int

    @classmethod
    def of(cls, values: Longs) -> _Varints:
        zigzag = _zigzag(values)
        highest = int(zigzag.max())
        width = max(1, -(-highest.bit_length() // 7))
        if width == 1 or int(zigzag.min()) >> 7 * (width - 1):
            return cls(_narrow(zigzag, highest), np.int64(width), width)
        return cls(_narrow(zigzag, highest), _varint_sizes(values), width)

    @property
    def even(self) -> bool:
        """True if all have the same size."""
        return not self.sizes.ndim

    def write(self, matrix: Longs, at: int) -> None:
        """Write the numbers into the rows of a matrix of bytes, from a column on."""
        for place in range(self.width):
            digits = self.zigzag if not place else self.zigzag >> self.zigzag.dtype.type(7 * place)
            if not self.even:
                digits = digits & 0x7F | (self.sizes > place + 1).astype(digits.dtype) << 7
            elif place + 1 < self.width:
                digits = digits & 0x7F | 0x80
            matrix[:, at + place] = digits


def _narrow(numbers: Longs, highest: int) -> Longs:
    return numbers.astype(np.uint8 if highest < 1 << 8 else np.uint16 if highest < 1 << 16 else np.uint64)


def _side_by_side(*columns: _Varints) -> tuple[Longs, Longs]:
    """Join the varints of several columns row by row; return the bytes of all rows, and the size of each."""
    count, width = len(columns[0].zigzag), sum(column.width for column in columns)
    matrix: Longs = np.empty((count, width), np.uint8)
    at = 0
    for column in columns:
        column.write(matrix, at)
        at += column.width
    if all(column.even for column in columns):
        return matrix.reshape(-1), np.full(count, width, np.int64)
    mask: Longs = np.ones((count, width), np.bool_)
    at = 0
    for column in columns:
        if not column.even:
            mask[:, at : at + column.width] = np.arange(column.width) < column.sizes[:, None]
        at += column.width
    return matrix[mask], np.full(count, sum(column.sizes for column in columns))


def _as_column(data: Longs, sizes: Longs) -> pa.BinaryArray:
    ends: Longs = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=ends[1:])
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(ends), pa.py_buffer(data)])


def _lengths(column: pa.BinaryArray, *, null: int = 0) -> Longs:
    """Return the bytes of each value, ``null`` where there is none."""
    lengths = np.diff(ends_of(column)).astype(np.int64)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = null
    return lengths


def _field_sizes(column: pa.BinaryArray) -> Longs:
    lengths = _lengths(column, null=-1)
    return _varint_sizes(lengths) + np.maximum(lengths, 0)


def _varint_sizes(values: Longs) -> Longs:
    """Return the bytes of each number as a zigzag varint."""
    zigzag = _zigzag(values)
    sizes: Longs = np.ones(len(values), np.int64)
    highest = int(zigzag.max()) if len(zigzag) else 0
    for shift in range(7, highest.bit_length(), 7):
        sizes += zigzag >= np.uint64(1 << shift)
    return sizes


def _zigzag(values: Longs) -> Longs:
    return ((values << 1) ^ (values >> 63)).astype(np.uint64)


_OWN: Final = encode_long(len(RECORD_HEADER)) + RECORD_HEADER.encode() + encode_long(HEADER_VALUE_BYTES)
"""Beginning of the header of a run of one: lengths and name."""
_OWN_BYTES: Final = len(_OWN) + HEADER_VALUE_BYTES
