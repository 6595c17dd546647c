"""Encode Arrow columns as Kafka record batches, a whole column at a time.

A record of a batch is lengths and numbers as varints, with the key, the value and the headers between them. Arrow's
``binary_join_element_wise`` joins these for all rows in compiled code, and the buffer behind its result is the body of
the batch; only the varints are made here, with NumPy. No Python code runs per row, except for users' headers::

    length, attributes, timestamp delta, offset delta, key length | key | value length | value | headers
    front                                                         | key | middle       | value | back

:class:`Columns` maps a data frame to records, as Spark's Kafka sink does: ``value`` is required; ``key``, ``headers``,
``timestamp``, ``topic`` and ``partition`` are optional. Other columns are left out.

:class:`PartitionReader` adds up a count and a digest of the rows, so that a replay can be compared with what was
committed. Each record has a hash, of its stream, key, value, headers and event time, and the sum of the hashes is the
digest: it does not depend on order, partitions and batches of the rows, and a row that comes twice counts twice. What
differs from run to run is left out: the part and the number of a record, and the time of a row that names none. The
digest of a micro-batch is compared with one that another version may have put on record, so it must never change.

Source: Kafka documentation, "Record Batch" and "Record".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh64_intdigest

from rollbridge.base.attribution import HEADER_VALUE_BYTES, ONE_BYTE, RECORD_HEADER, append_step, pack_run
from rollbridge.base.avro import encode_long
from rollbridge.base.deadlines import wall_ms
from rollbridge.base.ids import local_sequence
from rollbridge.errors import InvalidRequestError, RowRefusedError
from rollbridge.kafka.batches import Compression, RawBatch, compressed, framed_parts
from rollbridge.metadata.client_sessions import CooperativeContent
from rollbridge.stream.keyspace import HASH_SEED

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# XXH64 of whole Arrow columns: the hash by which keys choose their segments, and of which digests are made.
#
# Values of one length are hashed together, a step of the algorithm for all of them at a time, in NumPy: for keys of 11
# bytes a seventh of what calls of the library take, for values of 100 bytes two thirds. Each step costs a microsecond
# even for a single value, so lengths that few values have, and long values, are left to the library.
#
# Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, "XXH64 algorithm description".


Numbers = Any
"""NumPy array of 64-bit integers; types are checked without NumPy and Arrow."""

NULL: Final = np.uint64(0x6E75_6C6C_6E75_6C6C)
"""Hash of a null."""
LENGTH_MAX: Final = 160
"""Maximum length of values that are hashed together."""
_CALLED: Final = 1024
"""Values that the library is called for at a time: so many objects at once still find room in memory just freed."""


def worth(length: int) -> int:
    """Return from how many values of a length on it pays to hash them together."""
    return 200 + 25 * length


def hashes_of(
    column: pa.BinaryArray,
    hash_of: Callable[[bytes, int], int] = xxh64_intdigest,
    *,
    worth: Callable[[int], int] = worth,
) -> Numbers:
    """Return the hash of each value, by default its xxHash64, with the seed by which keys choose their segments."""
    count = len(column)
    if column.null_count == count:
        return np.full(count, NULL)
    present = column.fill_null(b"") if column.null_count else column
    found = _called(present, hash_of) if hash_of is not xxh64_intdigest else _hashed(present, worth)
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = NULL
    return found


def _hashed(column: pa.BinaryArray, worth: Callable[[int], int]) -> Numbers:
    count = len(column)
    lengths = np.diff(ends_of(column))
    numbers = np.bincount(np.minimum(lengths, LENGTH_MAX + 1), minlength=LENGTH_MAX + 2)[: LENGTH_MAX + 1]
    together = [length for length in np.flatnonzero(numbers).tolist() if numbers[length] >= worth(length)]
    if len(together) == 1 and numbers[together[0]] == count:
        return _together(column, together[0])
    if not together:
        return _called(column, xxh64_intdigest)
    found: Numbers = np.empty(count, np.uint64)
    rest: Numbers = np.ones(count, np.bool_)
    for length in together:
        same = lengths == length
        found[same] = _together(column.filter(pa.array(same)), length)
        rest &= ~same
    if rest.any():
        found[rest] = _called(column.filter(pa.array(rest)), xxh64_intdigest)
    return found


def _called(column: pa.BinaryArray, hash_of: Callable[[bytes, int], int]) -> Numbers:
    """Return the hashes as a function gives them, one by one."""
    found: Numbers = np.empty(len(column), np.uint64)
    for start in range(0, len(column), _CALLED):
        values = column[start : start + _CALLED].to_numpy(zero_copy_only=False).tolist()
        found[start : start + _CALLED] = np.fromiter(map(hash_of, values, repeat(HASH_SEED)), np.uint64, len(values))
    return found


def ends_of(column: pa.BinaryArray) -> Numbers:
    """Return the offsets at which the values begin, and at which the last one ends."""
    return np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]


_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_SEED: Final = np.uint64(HASH_SEED)
_STRIPE: Final = 32


def _together(column: pa.BinaryArray, length: int) -> Numbers:
    """Return the XXH64 of values that all have one length."""
    count, data, start = len(column), column.buffers()[2] or b"", int(ends_of(column)[0])
    spare: Numbers = np.empty(count, np.uint64)
    word: Numbers = np.empty(count, np.uint64)
    at = 0

    def load(kind: str, size: int) -> Numbers:
        nonlocal at
        word[:] = np.ndarray((count,), kind, data, start + at, (length,))
        at += size
        return word

    def rotate(numbers: Numbers, bits: int) -> None:
        np.right_shift(numbers, np.uint64(64 - bits), out=spare)
        np.left_shift(numbers, np.uint64(bits), out=numbers)
        np.bitwise_or(numbers, spare, out=numbers)

    def mix(numbers: Numbers, bits: int) -> None:
        np.right_shift(numbers, np.uint64(bits), out=spare)
        np.bitwise_xor(numbers, spare, out=numbers)

    with np.errstate(over="ignore"):
        if length < _STRIPE:
            found: Numbers = np.full(count, _SEED + _P5)
        else:
            part_streams = [np.full(count, first) for first in (_SEED + _P1 + _P2, _SEED + _P2, _SEED, _SEED - _P1)]
            while length - at >= _STRIPE:
                for part_stream in part_streams:
                    part_stream += np.multiply(load("<u8", 8), _P2, out=word)
                    rotate(part_stream, 31)
                    part_stream *= _P1
            found = np.zeros(count, np.uint64)
            for part_stream, bits in zip(part_streams, (1, 7, 12, 18), strict=True):
                word[:] = part_stream
                rotate(word, bits)
                found += word
            for part_stream in part_streams:
                part_stream *= _P2
                rotate(part_stream, 31)
                part_stream *= _P1
                found ^= part_stream
                found *= _P1
                found += _P4
        found += np.uint64(length)
        while length - at >= 8:
            np.multiply(load("<u8", 8), _P2, out=word)
            rotate(word, 31)
            word *= _P1
            found ^= word
            rotate(found, 27)
            found *= _P1
            found += _P4
        if length - at >= 4:
            found ^= np.multiply(load("<u4", 4), _P1, out=word)
            rotate(found, 23)
            found *= _P2
            found += _P3
        while at < length:
            found ^= np.multiply(load("u1", 1), _P5, out=word)
            rotate(found, 11)
            found *= _P1
        mix(found, 33)
        found *= _P2
        mix(found, 29)
        found *= _P3
        mix(found, 32)
    return found


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
    counts: Numbers
    timestamps: Numbers
    sizes: Numbers
    headers: pa.BinaryArray | None = None
    header_counts: Numbers = None

    @classmethod
    def of(
        cls,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        counts: Numbers,
        timestamps: Numbers,
        headers: tuple[pa.BinaryArray, Numbers] | None = None,
    ) -> Rows:
        """Return the rows with their sizes; ``headers`` are as :func:`encode_headers` returns them."""
        sizes = _field_sizes(keys) + _field_sizes(values)
        if headers is None:
            return cls(keys, values, counts, timestamps, sizes)
        sizes += _lengths(headers[0])
        return cls(keys, values, counts, timestamps, sizes, *headers)

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, places: Numbers) -> Rows:
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


def record_bytes(rows: Rows) -> Numbers:
    """Return the bytes of each record, as the limits of streams count them: key, value and headers, ours included."""
    return rows.sizes + _OWN_BYTES + (1 if rows.headers is None else _varint_sizes(rows.header_counts + 1))


def batch_bytes(rows: Rows, *, each: bool) -> Numbers:
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
    return framed_parts(parts, codec=used, count=len(rows), base_timestamp=base, max_timestamp=latest)


def encode_headers(rows: Sequence[Sequence[tuple[str, bytes | None]]]) -> tuple[pa.BinaryArray, Numbers]:
    """Return the headers of each record as encoded in a batch, and their number."""
    encoded = [b"".join(_encode_header(name, value) for name, value in headers) for headers in rows]
    return pa.array(encoded, pa.binary()), np.fromiter(map(len, rows), np.int64, len(rows))


def _records(rows: Rows, transaction: bytes, part: int) -> list[RawBatch]:
    """Return the records without users' headers, as encoded behind the header of a batch, in pieces.

    Each record ends with the number of its headers, 0 but for the first. That is put in front of the next record, so
    there are four columns to be joined, not six.
    """
    count = len(rows)
    header = _own_header(rows, transaction, part)
    key, value = _field(rows.keys[0].as_py()), _field(rows.values[0].as_py())
    first = b"".join((_NO_DELTAS, key, value, encode_long(1), header))
    first = encode_long(len(first)) + first
    if count == 1:
        return [first]
    keys, values, timestamps = rows.keys[1:], rows.values[1:], rows.timestamps
    key_lengths, deltas = _lengths(keys, null=-1), timestamps[1:] - timestamps[0]
    rest: Numbers = 1 + _Varints.of(deltas).sizes + rows.sizes[1:] + 1
    fronts = [_front(here, deltas[here], rest[here], key_lengths[here]) for here in _offset_ranges(count)]
    front = _as_column(np.concatenate([data for data, _ in fronts]), np.concatenate([sizes for _, sizes in fronts]))
    middle = _as_column(*_side_by_side(_Varints.of(_lengths(values, null=-1))))
    joined = _joined(front, keys, middle, values)
    return [first, joined[1:], b"\0"]


_NO_DELTAS: Final = b"\0\0\0"
"""Attributes, timestamp delta and offset delta of a first record."""


def _field(value: bytes | None) -> bytes:
    return encode_long(-1) if value is None else encode_long(len(value)) + value


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


def _front(here: slice, deltas: Numbers, rest: Numbers, key_lengths: Numbers) -> tuple[Numbers, Numbers]:
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
    own: Numbers = np.empty((len(rows), _OWN_BYTES), np.uint8)
    own[:, : len(_OWN) + len(transaction)] = np.frombuffer(_OWN + transaction, np.uint8)
    local = (rows.counts + local_sequence(part, 0)).astype(">u8")
    own[:, len(_OWN) + len(transaction) :] = local.view(np.uint8).reshape(len(rows), 8)
    return _fixed(own)


def _own_of_first(rows: Rows, transaction: bytes, part: int) -> pa.BinaryArray:
    """Return our header of the first row, that of a run of all, and nothing for the others."""
    count = len(rows)
    header = _own_header(rows, transaction, part)
    ends: Numbers = np.full(count + 1, len(header), np.int32)
    ends[0] = 0
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(header)])


def _own_header(rows: Rows, transaction: bytes, part: int) -> bytes:
    """Return our header of a run of all rows."""
    steps = _steps(np.diff(rows.counts))
    return _encode_header(
        RECORD_HEADER, pack_run(transaction, local_sequence(part, int(rows.counts[0])), len(rows), steps)
    )


def _steps(differences: Numbers) -> bytes | bytearray:
    """Return numbers from 1 on in LEB128, one behind the other."""
    if not len(differences) or int(differences.max()) < ONE_BYTE:
        found: bytes = differences.astype(np.uint8).tobytes()
        return found
    steps = bytearray()
    for step in differences.tolist():
        append_step(steps, step)
    return steps


@dataclass(frozen=True, slots=True)
class _Varints:
    """Column of zigzag varints.

    Attributes:
        zigzag: The numbers, zigzag, in as few bits as hold them.
        sizes: Bytes of each number; one size for all if they are alike in this.
        width: Bytes of the largest number.
    """

    zigzag: Numbers
    sizes: Numbers
    width: int

    @classmethod
    def of(cls, values: Numbers) -> _Varints:
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

    def write(self, matrix: Numbers, at: int) -> None:
        """Write the numbers into the rows of a matrix of bytes, from a column on."""
        for place in range(self.width):
            digits = self.zigzag if not place else self.zigzag >> self.zigzag.dtype.type(7 * place)
            if not self.even:
                digits = digits & 0x7F | (self.sizes > place + 1).astype(digits.dtype) << 7
            elif place + 1 < self.width:
                digits = digits & 0x7F | 0x80
            matrix[:, at + place] = digits


def _narrow(numbers: Numbers, highest: int) -> Numbers:
    return numbers.astype(np.uint8 if highest < 1 << 8 else np.uint16 if highest < 1 << 16 else np.uint64)


def _side_by_side(*columns: _Varints) -> tuple[Numbers, Numbers]:
    """Join the varints of several columns row by row; return the bytes of all rows, and the size of each."""
    count, width = len(columns[0].zigzag), sum(column.width for column in columns)
    matrix: Numbers = np.empty((count, width), np.uint8)
    at = 0
    for column in columns:
        column.write(matrix, at)
        at += column.width
    if all(column.even for column in columns):
        return matrix.reshape(-1), np.full(count, width, np.int64)
    mask: Numbers = np.ones((count, width), np.bool_)
    at = 0
    for column in columns:
        if not column.even:
            mask[:, at : at + column.width] = np.arange(column.width) < column.sizes[:, None]
        at += column.width
    return matrix[mask], np.full(count, sum(column.sizes for column in columns))


def _as_column(data: Numbers, sizes: Numbers) -> pa.BinaryArray:
    """Return consecutive values as an Arrow column."""
    ends: Numbers = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=ends[1:])
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(ends), pa.py_buffer(data)])


def _fixed(matrix: Numbers) -> pa.BinaryArray:
    count, width = matrix.shape
    return _as_column(np.ascontiguousarray(matrix).reshape(-1), np.full(count, width, np.int64))


def _lengths(column: pa.BinaryArray, *, null: int = 0) -> Numbers:
    """Return the bytes of each value, ``null`` where there is none."""
    lengths = np.diff(ends_of(column)).astype(np.int64)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = null
    return lengths


def _field_sizes(column: pa.BinaryArray) -> Numbers:
    lengths = _lengths(column, null=-1)
    return _varint_sizes(lengths) + np.maximum(lengths, 0)


def _varint_sizes(values: Numbers) -> Numbers:
    """Return the bytes of each number as a zigzag varint."""
    zigzag = _zigzag(values)
    sizes: Numbers = np.ones(len(values), np.int64)
    highest = int(zigzag.max()) if len(zigzag) else 0
    for shift in range(7, highest.bit_length(), 7):
        sizes += zigzag >= np.uint64(1 << shift)
    return sizes


def _zigzag(values: Numbers) -> Numbers:
    return ((values << 1) ^ (values >> 63)).astype(np.uint64)


def _encode_header(name: str, value: bytes | None) -> bytes:
    key = name.encode()
    return b"".join((encode_long(len(key)), key, encode_long(-1 if value is None else len(value)), value or b""))


_OWN: Final = encode_long(len(RECORD_HEADER)) + RECORD_HEADER.encode() + encode_long(HEADER_VALUE_BYTES)
"""Beginning of the header of a run of one: lengths and name."""
_OWN_BYTES: Final = len(_OWN) + HEADER_VALUE_BYTES


# Columns of a data frame


_TEXT: Final = ("string", "binary")
_HEADERS: Final = "array<struct<key:string,value:binary>>"
_US_PER_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Columns:
    """Indices of the columns in a record batch; None for a column that is missing."""

    value: int
    key: int | None
    headers: int | None
    timestamp: int | None
    stream: int | None
    """Column that names the stream of each row; None if all rows go to the same one."""
    partition: int | None = None
    """Column that names the partition of each row, on adopted topics."""

    @classmethod
    def of(cls, schema: StructType, streams: Sequence[str], *, include_headers: bool) -> Columns:
        """Find the columns.

        Args:
            schema: Schema of the data frame.
            streams: Streams that rows may go to; with several the column ``topic`` names one for each row.
            include_headers: True if the column ``headers`` is written.

        Raises:
            InvalidRequestError: a column is missing, there twice, or of another type; all of them are named.
        """
        faults: list[str] = []
        places: dict[str, int] = {}
        for place, field in enumerate(schema.fields):
            name = field.name.lower()
            if name in places:
                faults.append(f"column {name} is there twice")
            places[name] = place

        def find(name: str, *types: str) -> int | None:
            place = places.get(name)
            if place is not None:
                found = schema.fields[place].dataType.simpleString()
                if found.partition("(")[0] not in types and found not in types:
                    faults.append(f"column {name} is {found}, but {' or '.join(types)} is expected")
            return place

        if "value" not in places:
            faults.append(f"column value is missing; there are {', '.join(places) or 'none'}")
        found = cls(
            value=find("value", *_TEXT, "varchar", "char") or 0,
            key=find("key", *_TEXT, "varchar", "char"),
            headers=find("headers", _HEADERS) if include_headers else None,
            timestamp=find("timestamp", "timestamp"),
            stream=find("topic", "string", "varchar", "char") if len(streams) > 1 else None,
            partition=find("partition", "int"),
        )
        if len(streams) > 1 and "topic" not in places:
            faults.append(f"column topic is missing, which says for each row to which of {', '.join(streams)} it goes")
        if faults:
            raise InvalidRequestError(f"{'; '.join(faults)}; nothing was written")
        return found

    def rows(self, batch: pa.RecordBatch, first: int, now_ms: int) -> Rows:
        """Return the rows of a batch as records.

        Args:
            batch: Record batch of the data frame.
            first: Number of its first row in its partition.
            now_ms: Time of records that have none, ms since 1970.

        Raises:
            RowRefusedError: a row cannot be written.
        """
        size = batch.num_rows
        headers = None
        if self.headers is not None:
            headers = encode_headers(list(_headers(batch.column(self.headers), first)))
        return Rows.of(
            pa.nulls(size, pa.binary()) if self.key is None else _binary(batch.column(self.key)),
            _binary(batch.column(self.value)),
            np.arange(first, first + size, dtype=np.int64),
            self._timestamps(batch, first, now_ms),
            headers,
        )

    def stream_places(self, batch: pa.RecordBatch, streams: Sequence[str], first: int) -> Numbers:
        """Return for each row the index of its stream among ``streams``.

        Raises:
            RowRefusedError: a row names none, or another one.
        """
        assert self.stream is not None
        named = batch.column(self.stream)
        places = pc.index_in(named, pa.array(streams, named.type)).fill_null(-1).to_numpy(zero_copy_only=False)
        unknown = np.flatnonzero(places < 0)
        if len(unknown):
            name = named[int(unknown[0])].as_py()
            what = "null" if name is None else repr(name)
            raise RowRefusedError(
                f"its topic is {what}, but one of {', '.join(streams)} is expected", row=first + int(unknown[0])
            )
        return places.astype(np.int64)

    def partitions(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Return the partition that each row names, null where it names none; None if no row does."""
        found = None if self.partition is None else batch.column(self.partition)
        return None if found is None or found.null_count == len(found) else found

    def named_times(self, batch: pa.RecordBatch) -> Numbers | None:
        """Return the time that each row names, ms since 1970, -1 where it names none; None without such a column."""
        if self.timestamp is None:
            return None
        column = batch.column(self.timestamp).cast(pa.int64())
        found: Numbers = column.fill_null(-1).to_numpy(zero_copy_only=False) // _US_PER_MS
        return found

    def _timestamps(self, batch: pa.RecordBatch, first: int, now_ms: int) -> Numbers:
        if self.timestamp is None:
            return np.full(batch.num_rows, now_ms, np.int64)
        column = batch.column(self.timestamp).cast(pa.int64())
        found = column.fill_null(now_ms * _US_PER_MS).to_numpy(zero_copy_only=False) // _US_PER_MS
        early = np.flatnonzero(found < 0)
        if len(early):
            raise RowRefusedError(f"its timestamp of {found[early[0]]} ms lies before 1970", row=first + int(early[0]))
        return found


def _binary(column: Any) -> pa.BinaryArray:
    """Return a column of text or bytes as bytes; Spark may hand out columns with 64-bit offsets."""
    if pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())


def _headers(column: Any, first: int) -> Iterator[list[tuple[str, bytes | None]]]:
    for row, headers in enumerate(column.to_pylist(), first):
        if None in (headers or ()):
            raise RowRefusedError("one of its headers is null", row=row)
        found = [(header["key"], header["value"]) for header in headers or ()]
        for name, _ in found:
            if name is None:
                raise RowRefusedError("one of its headers has no name", row=row)
            if name == RECORD_HEADER:
                raise RowRefusedError(f"the header {RECORD_HEADER!r} is rollbridge's own; name it otherwise", row=row)
        yield found


# Digest of the rows


_FIRST, _SECOND, _STEP = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)


class PartitionReader:
    """Reader of the rows of a partition of a data frame, which adds up their count and digest.

    Attributes:
        content: Count and digest of all rows so far.
    """

    def __init__(self, columns: Columns, names: Sequence[str], streams: Sequence[str] = ()) -> None:
        """Begin.

        Args:
            columns: Indices of the columns.
            names: What rows call the streams that they may go to.
            streams: Names of these streams, where rows call them otherwise; the digest is the same by either name.
        """
        self.content = CooperativeContent()
        self._columns = columns
        self._names = names
        streams = streams or names
        self._hashes = np.array([xxh64_intdigest(stream.encode(), HASH_SEED) for stream in streams], np.uint64)

    def partitions(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Return the partition that each row names, null where it names none; None if no row does."""
        return self._columns.partitions(batch)

    def read(self, batch: pa.RecordBatch) -> tuple[Rows, Numbers, Numbers | None]:
        """Return the rows of a batch, the hashes of their keys, and the indices of their streams, None if only one.

        Raises:
            RowRefusedError: a row cannot be written.
        """
        first = self.content.records
        rows = self._columns.rows(batch, first, wall_ms())
        places = None if len(self._names) == 1 else self._columns.stream_places(batch, self._names, first)
        keys = hashes_of(rows.keys)
        found = _mixed(keys ^ (self._hashes[0] if places is None else self._hashes[places]))
        found = _mixed(found ^ hashes_of(rows.values))
        if rows.headers is not None:
            some = rows.header_counts > 0
            if some.any():
                found[some] = _mixed(found[some] ^ hashes_of(rows.headers)[some])
        times = self._columns.named_times(batch)
        if times is not None:
            found = _mixed(found ^ times.astype(np.uint64))
        self.content += CooperativeContent(len(rows), int(_mixed(found).sum(dtype=np.uint64)))
        return rows, keys, places


def _mixed(numbers: Numbers) -> Numbers:
    """Spread the bits of each number over all of it. Source: the finalizer of SplitMix64."""
    found = numbers + _STEP
    found ^= found >> np.uint64(30)
    found *= _FIRST
    found ^= found >> np.uint64(27)
    found *= _SECOND
    found ^= found >> np.uint64(31)
    return found
