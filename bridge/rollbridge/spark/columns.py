"""How records become the Arrow columns of ``format("rollbridge")``, in tasks.

Columns are made field by field, in C, and only those that were asked for. The bytes of a field of many records are
gathered by one ``take``: an Arrow array over the whole fetch, whose every second element is the field and every other
one the bytes in between, costs nothing to make::

    fetch    | .. |  field 0  | ...... |  field 1  | .. |  field 2  | ...
    bounds        ^           ^        ^           ^    ^           ^
    element       |     0     |   1    |     2     | 3  |     4     |        take 0, 2, 4, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa

from rollbridge.consumer.records import OWN_HEADERS
from rollbridge.consumer.writers import why_unknown
from rollbridge.errors import InvalidRequestError, TruncatedError
from rollbridge.model.ids import TransactionId
from rollbridge.model.names import show_partition
from rollbridge.spark.planning import SegmentPlace
from rollbridge.spark.source_records import Flags, Longs, Records, Slices, WrittenBy, equals, headers_of


def record_batch(
    records: Records, place: SegmentPlace, names: Sequence[str], schema: pa.Schema, *, fail: bool
) -> pa.RecordBatch:
    """Return the columns ``names`` of records, as ``schema`` calls them.

    Raises:
        CorruptDataError: headers do not parse.
        InvalidRequestError: the column ``timestamp`` cannot hold the time of a record.
        TruncatedError: what says who wrote a record was deleted, and ``fail`` is set; else that is null.
    """
    maker = _Maker(records, place, fail)
    return pa.RecordBatch.from_arrays([_MAKE[name](maker) for name in names], schema=schema)


TIMESTAMP_MS_MAX: Final = ((1 << 63) - 1) // 1_000
"""Latest time that Spark's ``timestamp`` holds, which counts microseconds since 1970 in 64 bits."""
_US_PER_MS: Final = 1_000


def timestamp_us(time_ms: int, record: str) -> int:
    """Return the time of a record, which ``record`` names, as Spark counts it, in microseconds since 1970.

    Raises:
        InvalidRequestError: Spark's type does not hold it; its own Kafka source fails, too (``long overflow``).
    """
    if abs(time_ms) > TIMESTAMP_MS_MAX:
        raise InvalidRequestError(
            f"{record} has the time {time_ms} ms since 1970, which Spark's type timestamp does not hold "
            f"({TIMESTAMP_MS_MAX} at most): its producer may count in other units. Read without the column: "
            '.schema("key binary, value binary")'
        )
    return time_ms * _US_PER_MS


class _Maker:
    """Maker of columns of some records; headers, which several columns need, are parsed once."""

    def __init__(self, records: Records, place: SegmentPlace, fail: bool) -> None:
        self.records = records
        self.place = place
        self.fail = fail

    def same(self, value: object, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), len(self.records))

    def timestamp(self) -> pa.Array:
        times = self.records.timestamp_ms
        far = (times > TIMESTAMP_MS_MAX) | (times < -TIMESTAMP_MS_MAX)
        if far.any():
            first = int(np.flatnonzero(far)[0])
            topic = show_partition((self.place.topic, self.place.partition))
            timestamp_us(int(times[first]), f"the record at offset {self.records.offset[first]} of topic {topic}")
        return pa.array(times * _US_PER_MS).cast(pa.timestamp("us", tz="UTC"))

    def sequence_id(self) -> pa.Array:
        base = self.place.sequence_base
        return pa.nulls(len(self.records), pa.int64()) if base is None else pa.array(self.records.offset + base)

    def commit_position(self) -> pa.Array:
        runs = self.place.runs
        if runs is None:
            return pa.nulls(len(self.records), pa.int64())
        found, missing = runs.positions(self.records.offset)
        return pa.array(found, mask=missing)

    def headers(self) -> pa.Array:
        """Return the writer's own headers; null for a record without any, as in Spark's Kafka source."""
        return _header_lists(self.records.buffer, self._users_headers, len(self.records))

    def transaction_id(self) -> pa.Array:
        known, ids, _, _ = self._writers
        # Records of one transaction are adjacent, so each id is formatted once for a run of them.
        begins: Flags = np.ones(len(ids), np.bool_)
        begins[1:] = (ids[1:] != ids[:-1]).any(axis=1) | ~known[:-1]
        begins &= known
        starts = np.flatnonzero(begins)
        texts = pa.array(
            [str(TransactionId.from_bytes(ids[start].tobytes())) for start in starts.tolist()], pa.string()
        )
        return texts.take(pa.array(np.maximum(np.cumsum(begins) - 1, 0), mask=~known))

    def local_sequence(self) -> pa.Array:
        return pa.array(self._writers.sequence, mask=~self._writers.known)

    @cached_property
    def _writers(self) -> WrittenBy:
        found = self.records.writers()
        if self.fail and found.doubtful.any():
            offset = int(self.records.offset[found.doubtful][0])
            why = why_unknown((self.place.topic, self.place.partition), offset)
            raise TruncatedError(f"{why}; with the option failOnDataLoss=false its transactionId is null")
        return found

    @cached_property
    def _users_headers(self) -> list[tuple[Longs, Slices, Slices]]:
        """Headers of users, the first ones of all records, then the second ones, and so on."""
        data = np.frombuffer(self.records.buffer, np.uint8)
        users: list[tuple[Longs, Slices, Slices]] = []
        for record, name, value in headers_of(self.records):
            kept: Flags = np.ones(len(record), np.bool_)
            for own in OWN_HEADERS:
                kept &= ~equals(data, name, own.encode())
            users.append(
                (record[kept], Slices(*(item[kept] for item in name)), Slices(*(item[kept] for item in value)))
            )
        return users


_MAKE: Final[Mapping[str, Callable[[_Maker], pa.Array]]] = {
    "key": lambda maker: gathered(maker.records.buffer, maker.records.key),
    "value": lambda maker: gathered(maker.records.buffer, maker.records.value),
    "topic": lambda maker: maker.same(maker.place.topic, pa.string()),
    "partition": lambda maker: maker.same(maker.place.partition, pa.int32()),
    "offset": lambda maker: pa.array(maker.records.offset),
    "timestamp": _Maker.timestamp,
    "timestampType": lambda maker: pa.array(maker.records.timestamp_type),
    "headers": _Maker.headers,
    "stream": lambda maker: maker.same(maker.place.stream, pa.string()),
    "segment": lambda maker: maker.same(maker.place.segment.number, pa.int64()),
    "epoch": lambda maker: maker.same(maker.place.segment.epoch, pa.int64()),
    "sequenceId": _Maker.sequence_id,
    "transactionId": _Maker.transaction_id,
    "localSequence": _Maker.local_sequence,
    "commitPosition": _Maker.commit_position,
    "committed": lambda maker: maker.same(True, pa.bool_()),
}


def gathered(buffer: bytes, field: Slices) -> pa.Array:
    """Return the bytes of a field of each record, null where it has none; fields must be in the order of the buffer."""
    count = len(field.start)
    if not count:
        return pa.array([], pa.binary())
    bounds: Longs = np.empty(2 * count, np.int32)
    bounds[0::2] = field.start
    bounds[1::2] = np.maximum(field.start, field.end)
    everything = pa.Array.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(bounds), pa.py_buffer(buffer)])
    missing = field.end < field.start
    wanted: Longs = np.arange(0, 2 * count, 2, dtype=np.int32)
    return everything.take(pa.array(wanted, mask=missing) if missing.any() else pa.array(wanted))


def _header_lists(buffer: bytes, walked: list[tuple[Longs, Slices, Slices]], count: int) -> pa.Array:
    record = np.concatenate([np.zeros(0, np.int64), *(item[0] for item in walked)])
    order = np.argsort(record, kind="stable")

    def sorted_field(which: int) -> Slices:
        parts = [item[which] for item in walked]
        return Slices(
            np.concatenate([np.zeros(0, np.int64), *(part.start for part in parts)])[order],
            np.concatenate([np.zeros(0, np.int64), *(part.end for part in parts)])[order],
        )

    pairs = pa.StructArray.from_arrays(
        [_texts(gathered(buffer, sorted_field(1))), gathered(buffer, sorted_field(2))], names=["key", "value"]
    )
    sizes = np.bincount(record, minlength=count) if count else np.zeros(0, np.int64)
    bounds: Longs = np.zeros(count + 1, np.int32)
    np.cumsum(sizes, out=bounds[1:])
    return pa.ListArray.from_arrays(pa.array(bounds), pairs, mask=pa.array(sizes == 0))


def _texts(found: pa.Array) -> pa.Array:
    """Decode bytes as UTF-8, replacing invalid ones as Kafka's clients do."""
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([item.decode(errors="replace") for item in found.to_pylist()], pa.string())
