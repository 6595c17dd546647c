"""Records of a fetch as NumPy arrays of positions in its bytes: begin and end of each key, value and list of headers.

A record of a batch has no fixed place: it begins where the one before ends, and varints give the lengths of its fields.
So one loop in Python goes from length to length, a fifth of a microsecond for each record unless many of the same
length follow each other. Everything else is computed for all records of a fetch at once, and nothing is copied::

    length  attributes  timestamp delta  offset delta  key length  key  value length  value  headers
    varint  1 byte      varint           varint        varint           varint               varint count, ...

Source: Kafka documentation, "Record Batch" and "Record".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from rollbridge.base.attribution import HEADER_VALUE_BYTES, RECORD_HEADER, unpack_run
from rollbridge.consumer.records import may_lack_heads, seen_in
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.kafka.batches import HEADER_BYTES, BatchHeader, check_crc, uncompressed
from rollbridge.kafka.committed import AbortedSpan, BatchStanding, judged_batches

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
_VARINT_BYTES_MAX: Final = 10
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
    headers: Longs
    """Position of the number of headers."""
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


def committed_end(raw: bytes, start: int, aborted: Iterable[AbortedSpan]) -> tuple[Records, int]:
    """Return the committed records of a fetch from ``start`` on, and the offset up to which the fetch was processed.

    Args:
        raw: Batches one after the other; the last may be cut short, and is left out then.
        start: First offset to return; the first batch may begin earlier.
        aborted: Aborted transactions with records in the fetch.

    Raises:
        CorruptDataError: ``raw`` is no sequence of batches, a checksum is wrong, or records do not parse.
    """
    chosen: list[tuple[BatchHeader, memoryview]] = []
    end = start
    for header, batch, standing in judged_batches(raw, aborted):
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
    length, place = varints(data, np.array(starts, np.int64))
    record_end = place + length
    timestamp, place = varints(data, place + 1)
    offset, place = varints(data, place)
    key, place = _field(data, place)
    value, place = _field(data, place)
    if ((place > record_end) | (length < 0)).any():
        raise CorruptDataError("a field of a record is longer than the record")
    if ((offset < 0) | (offset > _repeated([header.last_offset_delta for header in headers], counts))).any():
        raise CorruptDataError("a record lies outside of the offsets of its batch")
    timestamp += _repeated([header.base_timestamp for header in headers], counts)
    offset += _repeated([header.base_offset for header in headers], counts)
    kind = [LOG_APPEND_TIME if header.is_append_time else CREATE_TIME for header in headers]
    if LOG_APPEND_TIME in kind:
        appended = _repeated(kind, counts) == LOG_APPEND_TIME
        timestamp = np.where(appended, _repeated([header.max_timestamp for header in headers], counts), timestamp)
    kinds = _repeated(kind, counts).astype(np.int32)
    batch = _repeated(list(range(len(headers))), counts)
    return Records(buffer, offset, timestamp, kinds, key, value, place, record_end, batch, compacted=compacted)


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


def varints(data: Bytes, place: Longs) -> tuple[Longs, Longs]:
    """Decode the zigzag varints at some positions; return the values, and the position behind each.

    Raises:
        CorruptDataError: one has more than ten bytes.
        IndexError: one goes beyond the data.
    """
    byte = data[place].astype(np.int64)
    found = byte & 127
    ends = place + 1
    more = np.flatnonzero(byte >= 128)
    shift = 7
    while len(more):
        if shift >= 7 * _VARINT_BYTES_MAX:
            raise CorruptDataError("a number in a record has more than ten bytes")
        byte = data[ends[more]].astype(np.int64)
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
        left, place = varints(data, records.headers)
        chosen = np.flatnonzero(left > 0)
        while len(chosen):
            name, after = _field(data, place[chosen])
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


# Commit positions


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of offsets of transactions in a segment, in order, with the offsets of their commits in the commit log."""

    start: Longs
    end: Longs
    position: Longs

    def positions(self, offsets: Longs) -> tuple[Longs, Flags]:
        """Return the commit position of each record, and a mask of those without one."""
        if not len(self.start):
            return np.zeros_like(offsets), np.ones(len(offsets), np.bool_)
        place = np.searchsorted(self.start, offsets, side="right") - 1
        missing = (place < 0) | (offsets >= self.end[place])
        return np.where(missing, 0, self.position[place]), missing
