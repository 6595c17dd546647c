"""Rows of a data frame as columns of records, with the hashes of their keys and a digest of them all.

:class:`Columns` maps a data frame to records, as Spark's Kafka sink does: ``value`` is required; ``key``, ``headers``,
``timestamp``, ``topic`` and ``partition`` are optional. Other columns are left out.

:class:`PartitionReader` adds up a count and a digest of the rows, so that a replay can be compared with what was
committed. Each record has a hash, of its stream, key, value, headers and event time, and the sum of the hashes is the
digest: it does not depend on order, partitions and batches of the rows, and a row that comes twice counts twice. What
differs from run to run is left out: the part and the number of a record, and the time of a row that names none. The
digest of a micro-batch is compared with one that another version may have put on record, so it must never change.
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

from rollbridge.base.attribution import RECORD_HEADER
from rollbridge.base.deadlines import wall_ms
from rollbridge.errors import InvalidRequestError
from rollbridge.kafka.columns import Longs, Rows, encode_headers, ends_of
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
) -> Longs:
    """Return the hash of each value, by default its xxHash64, with the seed by which keys choose their segments."""
    count = len(column)
    if column.null_count == count:
        return np.full(count, NULL)
    present = column.fill_null(b"") if column.null_count else column
    found = _called(present, hash_of) if hash_of is not xxh64_intdigest else _hashed(present, worth)
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = NULL
    return found


def _hashed(column: pa.BinaryArray, worth: Callable[[int], int]) -> Longs:
    count = len(column)
    lengths = np.diff(ends_of(column))
    numbers = np.bincount(np.minimum(lengths, LENGTH_MAX + 1), minlength=LENGTH_MAX + 2)[: LENGTH_MAX + 1]
    together = [length for length in np.flatnonzero(numbers).tolist() if numbers[length] >= worth(length)]
    if len(together) == 1 and numbers[together[0]] == count:
        return _together(column, together[0])
    if not together:
        return _called(column, xxh64_intdigest)
    found: Longs = np.empty(count, np.uint64)
    rest: Longs = np.ones(count, np.bool_)
    for length in together:
        same = lengths == length
        found[same] = _together(column.filter(pa.array(same)), length)
        rest &= ~same
    if rest.any():
        found[rest] = _called(column.filter(pa.array(rest)), xxh64_intdigest)
    return found


def _called(column: pa.BinaryArray, hash_of: Callable[[bytes, int], int]) -> Longs:
    """Return the hashes as a function gives them, one by one."""
    found: Longs = np.empty(len(column), np.uint64)
    for start in range(0, len(column), _CALLED):
        values = column[start : start + _CALLED].to_numpy(zero_copy_only=False).tolist()
        found[start : start + _CALLED] = np.fromiter(map(hash_of, values, repeat(HASH_SEED)), np.uint64, len(values))
    return found


_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_SEED: Final = np.uint64(HASH_SEED)
_STRIPE: Final = 32


def _together(column: pa.BinaryArray, length: int) -> Longs:
    """Return the XXH64 of values that all have one length."""
    count, data, start = len(column), column.buffers()[2] or b"", int(ends_of(column)[0])
    spare: Longs = np.empty(count, np.uint64)
    word: Longs = np.empty(count, np.uint64)
    at = 0

    def load(kind: str, size: int) -> Longs:
        nonlocal at
        word[:] = np.ndarray((count,), kind, data, start + at, (length,))
        at += size
        return word

    def rotate(numbers: Longs, bits: int) -> None:
        np.right_shift(numbers, np.uint64(64 - bits), out=spare)
        np.left_shift(numbers, np.uint64(bits), out=numbers)
        np.bitwise_or(numbers, spare, out=numbers)

    def mix(numbers: Longs, bits: int) -> None:
        np.right_shift(numbers, np.uint64(bits), out=spare)
        np.bitwise_xor(numbers, spare, out=numbers)

    with np.errstate(over="ignore"):
        if length < _STRIPE:
            found: Longs = np.full(count, _SEED + _P5)
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


# Columns of a data frame


_TEXT: Final = ("string", "binary")
_HEADERS: Final = "array<struct<key:string,value:binary>>"
_US_PER_MS: Final = 1_000


ROW_REFUSED: Final = "row-refused"


def row_refused(why: str, *, row: int) -> InvalidRequestError:
    """Return the error for a row that cannot be written, ``row`` being its number in its partition, from 0."""
    return InvalidRequestError(why, code=ROW_REFUSED, row=row)


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
            InvalidRequestError: ``row-refused``: a row cannot be written.
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

    def stream_places(self, batch: pa.RecordBatch, streams: Sequence[str], first: int) -> Longs:
        """Return for each row the index of its stream among ``streams``.

        Raises:
            InvalidRequestError: ``row-refused``: a row names none, or another one.
        """
        assert self.stream is not None
        named = batch.column(self.stream)
        places = pc.index_in(named, pa.array(streams, named.type)).fill_null(-1).to_numpy(zero_copy_only=False)
        unknown = np.flatnonzero(places < 0)
        if len(unknown):
            name = named[int(unknown[0])].as_py()
            what = "null" if name is None else repr(name)
            raise row_refused(
                f"its topic is {what}, but one of {', '.join(streams)} is expected", row=first + int(unknown[0])
            )
        return places.astype(np.int64)

    def partitions(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Return the partition that each row names, null where it names none; None if no row does."""
        found = None if self.partition is None else batch.column(self.partition)
        return None if found is None or found.null_count == len(found) else found

    def named_times(self, batch: pa.RecordBatch) -> Longs | None:
        """Return the time that each row names, ms since 1970, -1 where it names none; None without such a column."""
        if self.timestamp is None:
            return None
        column = batch.column(self.timestamp).cast(pa.int64())
        found: Longs = column.fill_null(-1).to_numpy(zero_copy_only=False) // _US_PER_MS
        return found

    def _timestamps(self, batch: pa.RecordBatch, first: int, now_ms: int) -> Longs:
        if self.timestamp is None:
            return np.full(batch.num_rows, now_ms, np.int64)
        column = batch.column(self.timestamp).cast(pa.int64())
        found = column.fill_null(now_ms * _US_PER_MS).to_numpy(zero_copy_only=False) // _US_PER_MS
        early = np.flatnonzero(found < 0)
        if len(early):
            raise row_refused(f"its timestamp of {found[early[0]]} ms lies before 1970", row=first + int(early[0]))
        return found


def _binary(column: Any) -> pa.BinaryArray:
    """Return a column of text or bytes as bytes; Spark may hand out columns with 64-bit offsets."""
    if pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())


def _headers(column: Any, first: int) -> Iterator[list[tuple[str, bytes | None]]]:
    for row, headers in enumerate(column.to_pylist(), first):
        if None in (headers or ()):
            raise row_refused("one of its headers is null", row=row)
        found = [(header["key"], header["value"]) for header in headers or ()]
        for name, _ in found:
            if name is None:
                raise row_refused("one of its headers has no name", row=row)
            if name == RECORD_HEADER:
                raise row_refused(f"the header {RECORD_HEADER!r} is rollbridge's own; name it otherwise", row=row)
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

    def read(self, batch: pa.RecordBatch) -> tuple[Rows, Longs, Longs | None]:
        """Return the rows of a batch, the hashes of their keys, and the indices of their streams, None if only one.

        Raises:
            InvalidRequestError: ``row-refused``: a row cannot be written.
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


def _mixed(numbers: Longs) -> Longs:
    """Spread the bits of each number over all of it. Source: the finalizer of SplitMix64."""
    found = numbers + _STEP
    found ^= found >> np.uint64(30)
    found *= _FIRST
    found ^= found >> np.uint64(27)
    found *= _SECOND
    found ^= found >> np.uint64(31)
    return found
