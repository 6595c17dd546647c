"""From Arrow columns to Kafka record batches, a whole column at a time.

A record of a batch is lengths and numbers as varints, with the key, the value and the headers between them. Arrow's
``binary_join_element_wise`` strings these together for all rows in compiled code, and the buffer behind its answer is
what stands in the batch; only the varints are made here, with NumPy. Nothing is done for each row in Python.

Source: Kafka documentation, "Record Batch" and "Record".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode

from rollbridge.kafka.batches import Compression, framed
from rollbridge.model.avro import encode_long
from rollbridge.model.identifiers import local_sequence
from rollbridge.model.sequence import HEADER_VALUE_BYTES, RECORD_HEADER

Numbers = Any
"""A NumPy array of 64-bit integers; types are checked without NumPy and Arrow."""

_ENCODERS: Final = {
    Compression.GZIP: gzip_encode,
    Compression.SNAPPY: snappy_encode,
    Compression.LZ4: lz4_encode,
    Compression.ZSTD: zstd_encode,
}
_NUMBERS_BYTES_MAX: Final = 5 + 1 + 5 + 10
"""What length, attributes, offset delta and timestamp delta of a record take at most."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Records as columns, all of the same length; made by :meth:`of`.

    Attributes:
        keys: Binary; null is no key.
        values: Binary; null is a tombstone.
        counts: Number of each record within its part, rising.
        timestamps: Milliseconds since 1970.
        sizes: Bytes of each record, as the limits of streams count them: key, value and headers, ours included.
        headers: The user's headers of each record as they stand in a batch, without their number; None: there are none.
        header_counts: How many these are.
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
        """The rows with their sizes; ``headers`` are as :func:`encode_headers` makes them."""
        sizes = _field_sizes(keys) + _field_sizes(values) + (len(_OWN) + HEADER_VALUE_BYTES)
        if headers is None:
            return cls(keys, values, counts, timestamps, sizes + 1)
        sizes += _varint_sizes(headers[1] + 1) + _lengths(headers[0])
        return cls(keys, values, counts, timestamps, sizes, *headers)

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, places: Numbers) -> Rows:
        """Some of the rows, in the order of ``places``."""
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
        """The rows from ``start`` up to ``stop``; nothing is copied."""
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
        """One after the other; all of them have headers, or none has."""
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


def batch_bytes(rows: Rows) -> Numbers:
    """What each of the rows takes in a batch at most."""
    return rows.sizes + _NUMBERS_BYTES_MAX


def encode_batch(rows: Rows, transaction: bytes, part: int, codec: Compression) -> bytes:
    """The record batch of some rows, each with the header that says whose record it is.

    Args:
        rows: One or more.
        transaction: The 16 bytes of its id.
        part: The part of it that they belong to.
        codec: How the records are compressed.
    """
    records = _records(rows, transaction, part)
    encode = _ENCODERS.get(codec)
    body = records if encode is None else encode(bytes(records))
    base, latest = int(rows.timestamps[0]), int(rows.timestamps.max())
    return framed(body, codec=codec, count=len(rows), base_timestamp=base, max_timestamp=latest)


def encode_headers(rows: Sequence[Sequence[tuple[str, bytes | None]]]) -> tuple[pa.BinaryArray, Numbers]:
    """The headers of each record as they stand in a batch, and how many they are."""
    encoded = [b"".join(_encode_header(name, value) for name, value in headers) for headers in rows]
    return pa.array(encoded, pa.binary()), np.fromiter(map(len, rows), np.int64, len(rows))


def _records(rows: Rows, transaction: bytes, part: int) -> memoryview:
    """The records as they stand behind the header of a batch."""
    count = len(rows)
    offsets = _Varints.of(np.arange(count, dtype=np.int64))
    deltas = _Varints.of(rows.timestamps - rows.timestamps[0])
    lengths = _Varints.of(1 + offsets.sizes + deltas.sizes + rows.sizes)
    attributes = _Varints.of(np.zeros(count, np.int64))
    front = _side_by_side(lengths, attributes, deltas, offsets, _Varints.of(_lengths(rows.keys, null=-1)))
    middle = _side_by_side(_Varints.of(_lengths(rows.values, null=-1)))
    counts = np.ones(count, np.int64) if rows.headers is None else rows.header_counts + 1
    own: Numbers = np.empty((count, len(_OWN) + HEADER_VALUE_BYTES), np.uint8)
    own[:, : len(_OWN) + len(transaction)] = np.frombuffer(_OWN + transaction, np.uint8)
    local = (rows.counts + local_sequence(part, 0)).astype(">u8")
    own[:, len(_OWN) + len(transaction) :] = local.view(np.uint8).reshape(count, 8)
    if rows.headers is None:
        back = [_fixed(np.hstack((_Varints.of(counts).digits, own)))]
    else:
        back = [_side_by_side(_Varints.of(counts)), rows.headers, _fixed(own)]
    columns = [front, rows.keys, middle, rows.values, *back]
    joined = pc.binary_join_element_wise(*columns, b"", null_handling="replace", null_replacement=b"")
    _, ends, data = joined.buffers()
    first, last = np.frombuffer(ends, np.int32, count + 1)[[0, -1]]
    return memoryview(data)[first:last]


@dataclass(frozen=True, slots=True)
class _Varints:
    """A column of numbers as zigzag varints: their sizes, and a row of digits for each, of which so many count."""

    sizes: Numbers
    digits: Numbers
    even: bool
    """Whether all are of the same size."""

    @classmethod
    def of(cls, values: Numbers) -> _Varints:
        zigzag = _zigzag(values)
        highest = int(zigzag.max())
        if highest < 1 << 7:
            return cls(np.ones(len(values), np.int64), zigzag.astype(np.uint8)[:, None], even=True)
        sizes = _varint_sizes(values)
        width = int(sizes.max())
        if highest < 1 << 32:
            zigzag = zigzag.astype(np.uint32)
        digits: Numbers = np.empty((len(values), width), np.uint8)
        for place in range(width):
            digit = (zigzag >> zigzag.dtype.type(7 * place)).astype(np.uint8)
            digits[:, place] = digit & 0x7F | (sizes > place + 1).astype(np.uint8) << 7
        return cls(sizes, digits, even=bool(sizes.min() == width))


def _side_by_side(*columns: _Varints) -> pa.BinaryArray:
    """For each row its numbers one after the other."""
    matrix = columns[0].digits if len(columns) == 1 else np.hstack([column.digits for column in columns])
    if all(column.even for column in columns):
        return _fixed(matrix)
    mask = np.hstack([np.arange(column.digits.shape[1], dtype=np.int64) < column.sizes[:, None] for column in columns])
    ends: Numbers = np.zeros(len(matrix) + 1, np.int32)
    np.cumsum(sum(column.sizes for column in columns), out=ends[1:])
    return pa.Array.from_buffers(pa.binary(), len(matrix), [None, pa.py_buffer(ends), pa.py_buffer(matrix[mask])])


def _fixed(matrix: Numbers) -> pa.BinaryArray:
    """The rows of a matrix of bytes."""
    count, width = matrix.shape
    ends = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    data = pa.py_buffer(np.ascontiguousarray(matrix))
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), data])


def _lengths(column: pa.BinaryArray, *, null: int = 0) -> Numbers:
    """Bytes of each value."""
    return pc.binary_length(column).fill_null(null).to_numpy(zero_copy_only=False).astype(np.int64)


def _field_sizes(column: pa.BinaryArray) -> Numbers:
    """Bytes of each value together with its length."""
    lengths = _lengths(column, null=-1)
    return _varint_sizes(lengths) + np.maximum(lengths, 0)


def _varint_sizes(values: Numbers) -> Numbers:
    """How many bytes each number takes as a zigzag varint."""
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
"""What our header begins with, in each record."""
