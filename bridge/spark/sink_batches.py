"""From Arrow columns to Kafka record batches, a whole column at a time.

A record of a batch is lengths and numbers as varints, with the key, the value and the headers between them. Arrow's
``binary_join_element_wise`` strings these together for all rows in compiled code, and the buffer behind its answer is
what stands in the batch; only the varints are made here, with NumPy. Nothing is done for each row in Python.

Source: Kafka documentation, "Record Batch" and "Record".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from crc32c import crc32c

from bridge.kafka.batches import HEADER_BYTES, Compression
from bridge.model.identifiers import local_sequence
from bridge.model.sequence import HEADER_VALUE_BYTES, RECORD_HEADER

Numbers = Any
"""A NumPy array of 64-bit integers; types are checked without NumPy and Arrow."""

_ENCODERS: Final = {
    Compression.GZIP: gzip_encode,
    Compression.SNAPPY: snappy_encode,
    Compression.LZ4: lz4_encode,
    Compression.ZSTD: zstd_encode,
}
_BEFORE_CRC: Final = struct.Struct(">qiibI")
_AFTER_CRC: Final = struct.Struct(">hiqqqhii")
_MAGIC: Final = 2
_BEHIND_LENGTH: Final = 12
"""The length of a batch counts from behind itself on."""
_NOT_SET: Final = -1
_NUMBERS_BYTES_MAX: Final = 5 + 1 + 5 + 10
"""What length, attributes, offset delta and timestamp delta of a record take at most."""


def varint_sizes(values: Numbers) -> Numbers:
    """How many bytes each number takes as a zigzag varint."""
    zigzag = _zigzag(values)
    sizes: Numbers = np.ones(len(values), np.int64)
    for shift in range(7, 64, 7):
        more = zigzag >> np.uint64(shift) != 0
        if not more.any():
            break
        sizes += more
    return sizes


@dataclass(frozen=True, slots=True)
class Rows:
    """Records as columns, all of the same length.

    Attributes:
        keys: Binary; null is no key.
        values: Binary; null is a tombstone.
        counts: Number of each record within its part, rising.
        timestamps: Milliseconds since 1970.
        headers: The user's headers of each record as they stand in a batch, without their number; None: there are none.
        header_counts: How many these are.
    """

    keys: pa.BinaryArray
    values: pa.BinaryArray
    counts: Numbers
    timestamps: Numbers
    headers: pa.BinaryArray | None = None
    header_counts: Numbers = None

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
            None if self.headers is None else self.headers.take(chosen),
            None if self.header_counts is None else self.header_counts[places],
        )

    def slice(self, start: int, stop: int) -> Rows:
        """The rows from ``start`` up to ``stop``; nothing is copied."""
        return Rows(
            self.keys[start:stop],
            self.values[start:stop],
            self.counts[start:stop],
            self.timestamps[start:stop],
            None if self.headers is None else self.headers[start:stop],
            None if self.header_counts is None else self.header_counts[start:stop],
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
            None if several[0].headers is None else pa.concat_arrays([rows.headers for rows in several]),
            None if several[0].headers is None else np.concatenate([rows.header_counts for rows in several]),
        )

    def sizes(self) -> Numbers:
        """Bytes of each record, as the limits of streams count them: key, value and headers, ours included."""
        total = _field_sizes(self.keys) + _field_sizes(self.values) + len(_OWN) + HEADER_VALUE_BYTES
        if self.headers is None:
            return total + 1
        return total + varint_sizes(self.header_counts + 1) + _lengths(self.headers)


def batch_sizes(sizes: Numbers) -> Numbers:
    """What records of these sizes take in a batch at most."""
    return sizes + _NUMBERS_BYTES_MAX


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
    base, count = int(rows.timestamps[0]), len(rows)
    head = _AFTER_CRC.pack(int(codec), count - 1, base, int(rows.timestamps.max()), _NOT_SET, _NOT_SET, _NOT_SET, count)
    crc = crc32c(body, crc32c(head))
    length = HEADER_BYTES - _BEHIND_LENGTH + len(body)
    return b"".join((_BEFORE_CRC.pack(0, length, _NOT_SET, _MAGIC, crc), head, body))


def encode_headers(rows: Sequence[Sequence[tuple[str, bytes | None]]]) -> tuple[pa.BinaryArray, Numbers]:
    """The headers of each record as they stand in a batch, and how many they are."""
    encoded = [b"".join(_encode_header(name, value) for name, value in headers) for headers in rows]
    return pa.array(encoded, pa.binary()), np.fromiter(map(len, rows), np.int64, len(rows))


def _records(rows: Rows, transaction: bytes, part: int) -> memoryview:
    """The records as they stand behind the header of a batch."""
    count = len(rows)
    offsets: Numbers = np.arange(count, dtype=np.int64)
    deltas = rows.timestamps - rows.timestamps[0]
    key_lengths, value_lengths = _lengths(rows.keys, null=-1), _lengths(rows.values, null=-1)
    lengths = 1 + varint_sizes(offsets) + varint_sizes(deltas) + rows.sizes()
    front = _varints(lengths, None, deltas, offsets, key_lengths)
    own: Numbers = np.empty((count, len(_OWN) + HEADER_VALUE_BYTES), np.uint8)
    own[:, : len(_OWN) + len(transaction)] = np.frombuffer(_OWN + transaction, np.uint8)
    local = (rows.counts + local_sequence(part, 0)).astype(">u8")
    own[:, len(_OWN) + len(transaction) :] = local.view(np.uint8).reshape(count, 8)
    if rows.headers is None:
        middle = _varints(value_lengths)
        back: Numbers = np.empty((count, own.shape[1] + 1), np.uint8)
        back[:, 0], back[:, 1:] = 2, own
        columns = [front, rows.keys, middle, rows.values, _fixed(back)]
    else:
        counts = _varints(rows.header_counts + 1)
        columns = [front, rows.keys, _varints(value_lengths), rows.values, counts, rows.headers, _fixed(own)]
    joined = pc.binary_join_element_wise(*columns, b"", null_handling="replace", null_replacement=b"")
    _, ends, data = joined.buffers()
    first, last = np.frombuffer(ends, np.int32, count + 1)[[0, -1]]
    return memoryview(data)[first:last]


def _varints(*columns: Numbers | None) -> pa.BinaryArray:
    """For each row its numbers as zigzag varints one after the other; None is a zero byte in every row."""
    parts: list[Numbers] = []
    masks: list[Numbers] = []
    whole = True
    count = next(len(column) for column in columns if column is not None)
    for column in columns:
        if column is None:
            parts.append(np.zeros((count, 1), np.uint8))
            masks.append(np.ones((count, 1), bool))
            continue
        zigzag, sizes = _zigzag(column), varint_sizes(column)
        width = int(sizes.max())
        places = np.arange(width)
        found = (zigzag[:, None] >> (places * 7).astype(np.uint64)).astype(np.uint8) & 0x7F
        found |= np.where(places < sizes[:, None] - 1, 0x80, 0).astype(np.uint8)
        parts.append(found)
        masks.append(places < sizes[:, None])
        whole = whole and int(sizes.min()) == width
    matrix = np.hstack(parts)
    if whole:
        return _fixed(matrix)
    mask = np.hstack(masks)
    ends: Numbers = np.zeros(count + 1, np.int32)
    np.cumsum(mask.sum(axis=1), out=ends[1:])
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(matrix[mask])])


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
    return varint_sizes(_lengths(column, null=-1)) + _lengths(column)


def _zigzag(values: Numbers) -> Numbers:
    return ((values << 1) ^ (values >> 63)).astype(np.uint64)


def _varint(value: int) -> bytes:
    left = value << 1 ^ value >> 63
    encoded = bytearray()
    while left > 0x7F:
        encoded.append(left & 0x7F | 0x80)
        left >>= 7
    encoded.append(left)
    return bytes(encoded)


def _encode_header(name: str, value: bytes | None) -> bytes:
    key = name.encode()
    return b"".join((_varint(len(key)), key, _varint(-1 if value is None else len(value)), value or b""))


_OWN: Final = _varint(len(RECORD_HEADER)) + RECORD_HEADER.encode() + _varint(HEADER_VALUE_BYTES)
"""What our header begins with, in each record."""
