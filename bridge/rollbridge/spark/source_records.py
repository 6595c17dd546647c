"""Kafka's records, found in the bytes of a fetch with numpy: where each begins, and where key, value and headers stand.

A record of a batch has no place of its own: it begins where the one before ends, and its fields are as long as the
varints in front of them say. So one loop in Python goes from length to length, a fifth of a microsecond for each
record unless many of the same length follow each other, and everything else is worked out for all records of a fetch at
once. Nothing is copied here.

Source: Kafka documentation, "Record Batch" and "Record".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from rollbridge.errors import CorruptDataError
from rollbridge.kafka.batches import HEADER_BYTES, BatchHeader, check_crc, uncompressed
from rollbridge.kafka.committed import AbortedSpan, Standing, judged_batches

# Types are checked without numpy, so what its arrays hold is said by names only.
Longs = Any
"""An array of 64-bit integers."""
Bytes = Any
"""An array of bytes; with two dimensions, one row for each record."""
Flags = Any
"""An array of booleans."""

CREATE_TIME: Final = 0
LOG_APPEND_TIME: Final = 1
_VARINT_BYTES_MAX: Final = 10
_LENGTH_BYTES_MAX: Final = 5
_ALIKE: Final = 16
"""After so many records of the same length the next ones are looked at all at once."""
_WARY: Final = 500
"""If hardly any of them were, it is not tried again before so many more."""


class Slices(NamedTuple):
    """A field of several records: bytes ``start..end-1`` of the buffer; a record without it has ``end < start``."""

    start: Longs
    end: Longs


@dataclass(frozen=True, slots=True)
class Records:
    """Records of one partition in order of offset, as places in ``buffer``; arrays have one entry for each record."""

    buffer: bytes
    offset: Longs
    timestamp_ms: Longs
    timestamp_type: Any
    key: Slices
    value: Slices
    headers: Longs
    """Where the number of headers stands."""
    end: Longs
    """Where the record ends."""

    def __len__(self) -> int:
        return len(self.offset)

    def where(self, chosen: Longs | Flags | slice) -> Records:
        """Some of the records: a mask, indices, or a slice."""
        return Records(
            self.buffer,
            self.offset[chosen],
            self.timestamp_ms[chosen],
            self.timestamp_type[chosen],
            Slices(self.key.start[chosen], self.key.end[chosen]),
            Slices(self.value.start[chosen], self.value.end[chosen]),
            self.headers[chosen],
            self.end[chosen],
        )


class Header(NamedTuple):
    """The next header of each record that has another one."""

    record: Longs
    """Index of the record."""
    name: Slices
    value: Slices


def committed_end(raw: bytes, start: int, aborted: Iterable[AbortedSpan]) -> tuple[Records, int]:
    """The committed records of a fetch from ``start`` on, and the offset up to which it has been looked at.

    Args:
        raw: Batches one after the other; the last may be cut short, and is left out then.
        start: Records before it are left out; the first batch may begin earlier.
        aborted: Transactions that were aborted and reach into the stretch.

    Raises:
        CorruptDataError: It is no sequence of batches, a checksum is wrong, or records do not parse.
    """
    chosen: list[tuple[BatchHeader, memoryview]] = []
    end = start
    for header, batch, standing in judged_batches(raw, aborted):
        if standing is Standing.COMMITTED:
            check_crc(header, batch)
            chosen.append((header, batch))
        end = max(end, header.base_offset + header.last_offset_delta + 1)
    records = parse(raw, chosen)
    if len(records) and records.offset[0] < start:
        records = records.where(records.offset >= start)
    return records, end


def parse(raw: bytes, batches: list[tuple[BatchHeader, memoryview]]) -> Records:
    """The records of some batches, which are parts of ``raw``.

    Raises:
        CorruptDataError: They do not parse.
    """
    if any(header.compression for header, _ in batches):
        bodies = [memoryview(uncompressed(header, batch))[HEADER_BYTES:] for header, batch in batches]
        buffer = b"".join(bodies)
        ends = np.cumsum([len(body) for body in bodies]).tolist()
        sections = list(zip([0, *ends[:-1]], ends, strict=True))
    else:
        # The batches are parts of the whole, so there is nothing to copy.
        buffer = raw
        whole = np.frombuffer(raw, np.uint8).ctypes.data
        begins = [np.frombuffer(batch, np.uint8).ctypes.data - whole + HEADER_BYTES for _, batch in batches]
        sections = [
            (begin, begin - HEADER_BYTES + len(batch)) for begin, (_, batch) in zip(begins, batches, strict=True)
        ]
    try:
        return _parse(buffer, [header for header, _ in batches], sections)
    except IndexError as exc:
        raise CorruptDataError("a record batch ends in the middle of a record") from exc


def _parse(buffer: bytes, headers: list[BatchHeader], sections: list[tuple[int, int]]) -> Records:
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
        raise CorruptDataError("a record stands outside of the offsets of its batch")
    timestamp += _repeated([header.base_timestamp for header in headers], counts)
    offset += _repeated([header.base_offset for header in headers], counts)
    kind = [LOG_APPEND_TIME if header.is_append_time else CREATE_TIME for header in headers]
    if LOG_APPEND_TIME in kind:
        appended = _repeated(kind, counts) == LOG_APPEND_TIME
        timestamp = np.where(appended, _repeated([header.max_timestamp for header in headers], counts), timestamp)
    kinds = _repeated(kind, counts).astype(np.int32)
    return Records(buffer, offset, timestamp, kinds, key, value, place, record_end)


def _find_starts(buffer: bytes, data: Bytes, begin: int, end: int, count: int, starts: list[int]) -> None:
    """Append where each record of a section begins, that is, where its length stands."""
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
    """How many records behind the first have its length, one behind the other; at most so many are looked at.

    Where a record ends the next one begins, so as long as the bytes of the length are the same at every stride, these
    are the records, and not something that looks like them.
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
    """The zigzag varints that stand at some places, and where each ends.

    Raises:
        IndexError: One goes beyond the data.
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


def headers_of(records: Records) -> Iterator[Header]:
    """The first headers of all records that have one, then the second ones, and so on.

    Raises:
        CorruptDataError: While iterating: they do not parse, or end elsewhere than their records.
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
            yield Header(chosen, name, value)
            chosen = chosen[left[chosen] > 0]
    except IndexError as exc:
        raise CorruptDataError("a header goes beyond the end of its batch") from exc
    if (place != records.end).any():
        raise CorruptDataError("the headers of a record end elsewhere than the record")


def _field(data: Bytes, place: Longs) -> tuple[Slices, Longs]:
    """Bytes with their length in front, -1 for none, and what stands behind them."""
    length, start = varints(data, place)
    return Slices(start, start + length), start + np.maximum(length, 0)


def _repeated(values: list[int], counts: list[int]) -> Longs:
    return np.repeat(np.array(values, np.int64), counts)


# --------------------------------------------------------------------------------------------------------------------
# Where records of transactions stand in a segment, and in the commit log.


@dataclass(frozen=True, slots=True)
class Runs:
    """Where records of transactions stand in a segment, in order: runs of offsets, and places in the commit log."""

    start: Longs
    end: Longs
    position: Longs

    def positions(self, offsets: Longs) -> tuple[Longs, Flags]:
        """The place in the commit log of each record, and which of them have none."""
        if not len(self.start):
            return np.zeros_like(offsets), np.ones(len(offsets), np.bool_)
        place = np.searchsorted(self.start, offsets, side="right") - 1
        missing = (place < 0) | (offsets >= self.end[place])
        return np.where(missing, 0, self.position[place]), missing
