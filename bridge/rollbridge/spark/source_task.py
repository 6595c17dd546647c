"""How records become the Arrow columns of ``format("rollbridge")``, in tasks.

Columns are made field by field, in C, and only those that were asked for. The bytes of a field of many records are
gathered by one ``take``: an Arrow array over the whole fetch, whose every second element is the field and every other
one the bytes in between, costs nothing to make::

    fetch    | .. |  field 0  | ...... |  field 1  | .. |  field 2  | ...
    bounds        ^           ^        ^           ^    ^           ^
    element       |     0     |   1    |     2     | 3  |     4     |        take 0, 2, 4, ...
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.commitlog.control import ControlKind, decode_control, peek_kind
from rollbridge.config import ConnectionSettings
from rollbridge.consumer.preview import PreviewTail
from rollbridge.consumer.records import OWN_HEADERS, Preview, why_unknown
from rollbridge.errors import InvalidRequestError, NotFoundError, TruncatedError, UnavailableError
from rollbridge.kafka.columns import Flags, Longs, Records, Slices, WrittenBy, committed_columns, equals, headers_of
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.spark.planning import Portion, PreviewPortion, Runs, SegmentPlace, SegmentRange
from rollbridge.spark.worker import kafka_client
from rollbridge.stream.names import GroupName, StreamName, show_partition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


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
        found, missing = commit_positions(runs, self.records.offset)
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


# Tasks of the source: fetch offset ranges, and yield Arrow record batches.
#
# The next fetch is requested before the rows of the present one are yielded, so brokers and Spark work at the same
# time. Spark reuses its worker processes, and the connections kept here outlive a task.


logger = logging.getLogger(__name__)

_FETCH_BYTES: Final = 2 << 20
_ROWS_MAX: Final = 16_384
"""Maximum rows of an Arrow batch: larger ones exceed the processor's cache, smaller ones cost overhead."""
_WAIT_MS: Final = 500
_STALLED_S: Final = 60.0
_PREVIEW_WAIT_S: Final = 0.1


def read_portion(
    connection: ConnectionSettings, portion: Portion, names: Sequence[str], schema: StructType, *, fail: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the committed records of a portion.

    Args:
        connection: Settings of the connection to Kafka.
        portion: Ranges to read.
        names: Columns, in the order of ``schema``.
        schema: Schema that Spark expects.
        fail: True if deleted records are an error.

    Raises:
        TruncatedError: records have been deleted, or what says who wrote one, and ``fail`` is set.
        UnavailableError: nothing became readable for a minute.
        CorruptDataError: a batch or record does not parse.
        NotAuthorizedError, KafkaUnavailableError.
    """
    arrow = to_arrow_schema(schema, timezone="UTC")
    reader = kafka_client(connection).log()
    for piece in portion.pieces:
        try:
            for records in _records(reader, piece, fail=fail):
                for begin in range(0, len(records), _ROWS_MAX):
                    rows = records.where(slice(begin, begin + _ROWS_MAX))
                    yield record_batch(rows, piece.place, names, arrow, fail=fail)
        except TruncatedError:
            raise
        except NotFoundError as gone:
            _lost(piece, piece.start, piece.end, fail=fail, cause=gone)


def _records(reader: LogReader, piece: SegmentRange, *, fail: bool) -> Iterator[Records]:
    topic, number, offset = piece.place.topic, piece.place.partition, piece.start
    patience = ReadTimeout(show_partition((topic, number)))
    while offset < piece.end:
        found = reader.fetch_raw(topic, offset, wait_ms=_WAIT_MS, partition=number, max_bytes=_FETCH_BYTES)
        if found.start > offset:
            _lost(piece, offset, min(found.start, piece.end), fail=fail)
            offset = found.start
        records, reached = committed_columns(found.batches, offset, found.aborted)
        patience.moved(offset, reached)
        offset = reached
        if offset < piece.end:
            reader.ask(topic, offset, wait_ms=_WAIT_MS, partition=number, max_bytes=_FETCH_BYTES)
        if len(records) and records.offset[-1] >= piece.end:
            records = records.where(records.offset < piece.end)
        if len(records):
            yield records


def _lost(piece: SegmentRange, start: int, end: int, *, fail: bool, cause: Exception | None = None) -> None:
    topic = show_partition((piece.place.topic, piece.place.partition))
    what = f"offsets {start} to {end - 1} of topic {topic} have been deleted before they were read"
    if fail:
        raise TruncatedError(f"{what}; with the option failOnDataLoss=false they are left out") from cause
    logger.warning("source.left_out: %s", what)


class ReadTimeout:
    """Watchdog of a read that makes no progress."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._moved_at = time.monotonic()

    def moved(self, before: int, after: int) -> None:
        """Note the progress of one fetch.

        Raises:
            UnavailableError: no fetch has made any for a minute.
        """
        if after > before:
            self._moved_at = time.monotonic()
        elif time.monotonic() - self._moved_at > _STALLED_S:
            raise UnavailableError(
                f"offset {after} of topic {self._topic} is not readable for {_STALLED_S:g} s, although it was before: "
                "brokers have failed, and those that are left do not have it yet"
            )


def read_previews(
    connection: ConnectionSettings, portion: PreviewPortion, names: Sequence[str], schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Yield the records of the transactions that are open when this begins.

    Raises:
        KafkaUnavailableError, NotFoundError, NotAuthorizedError.
    """
    arrow = to_arrow_schema(schema, timezone="UTC")
    tail = PreviewTail(kafka_client(connection), portion.config)
    try:
        while not tail.is_caught_up:
            rows = [_preview_row(item) for item in tail.take(_PREVIEW_WAIT_S)]
            if rows:
                columns = [
                    pa.array([row.get(name) for row in rows], arrow.field(n).type) for n, name in enumerate(names)
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=arrow)
    finally:
        tail.close()


def _preview_row(item: Preview) -> dict[str, Any]:
    headers = [{"key": name, "value": value} for name, value in item.headers() if name not in OWN_HEADERS]
    return {
        "key": item.key(),
        "value": item.value(),
        "topic": item.topic(),
        "partition": item.partition(),
        "timestamp": timestamp_us(item.timestamp()[1], f"record {item.local_sequence} of {item.transaction_id}"),
        "timestampType": 0,
        "headers": headers or None,
        "stream": str(item.stream),
        "segment": item.segment.number,
        "epoch": item.segment.epoch,
        "transactionId": str(item.transaction_id),
        "localSequence": item.local_sequence,
        "committed": False,
    }


# Runs of offsets of transactions, as the commit log tells them: the source of ``commitPosition``.
#
# A COMMIT record names the runs of offsets of its
# transaction in each segment, and commits are in the same order in the log and in each segment. So the driver reads the
# log once, from the offset in the checkpoint, and gives each task the runs of its ranges. The records of a transaction
# and its COMMIT record are one native transaction: every record that can be read has its commit in the log.


def commit_positions(runs: Runs, offsets: Longs) -> tuple[Longs, Flags]:
    """Return the commit position of each record, and a mask of those without one."""
    if not len(runs.start):
        return np.zeros_like(offsets), np.ones(len(offsets), np.bool_)
    place = np.searchsorted(runs.start, offsets, side="right") - 1
    missing = (place < 0) | (offsets >= runs.end[place])
    return np.where(missing, 0, runs.position[place]), missing


class CommitRuns:
    """Runs of one stream that were found in its group's commit log; not for several threads."""

    def __init__(self, reader: LogReader, offsets: LogOffsets, stream: StreamName, group: GroupName) -> None:
        self._reader = reader
        self._offsets = offsets
        self._stream = str(stream)
        self._topic = group.commit_log_topic
        self._next: int | None = None
        self._runs: dict[SegmentId, tuple[list[int], list[int], list[int]]] = {}

    def read(self, start: int | None) -> None:
        """Read the commit log to its present end.

        Args:
            start: Offset at which to begin if nothing has been read yet; None for the beginning of the log.

        Raises:
            TopicNotFoundError, NotAuthorizedError, KafkaUnavailableError, CorruptDataError.
            UnavailableError: the log did not become readable for a minute.
            TruncatedError: the log ends before what was read of it.
        """
        if self._next is None:
            first = self._offsets.first([self._topic])[self._topic]
            self._next = first if start is None else max(start, first)
        # Up to the end, not the last stable offset: markers are written partition by partition.
        end = self._offsets.end([self._topic], Isolation.READ_UNCOMMITTED)[self._topic]
        if self._next > end:
            raise TruncatedError(
                f"the commit log {self._topic} has become shorter: it ends at {end}, and was read up to {self._next}; "
                "nothing was read: without commitPosition it is not needed"
            )
        patience = ReadTimeout(self._topic)
        while self._next < end:
            found = self._reader.fetch(self._topic, self._next, wait_ms=_WAIT_MS)
            for record in found.records:
                if peek_kind(record.value) is ControlKind.COMMIT:
                    self._take(record.offset, record.key, record.value)
            patience.moved(self._next, found.end)
            self._next = found.end

    def of(self, segment: SegmentId, start: int, end: int) -> Runs:
        """Return the runs in ``start..end-1`` of a segment."""
        starts, ends, positions = self._runs.get(segment, ([], [], []))
        low, high = bisect_right(ends, start), bisect_right(starts, end - 1)
        return Runs(*(np.array(column[low:high], np.int64) for column in (starts, ends, positions)))

    def forget(self, covered: Mapping[SegmentId, int]) -> None:
        """Drop the runs that have been read."""
        for segment, columns in list(self._runs.items()):
            read = bisect_right(columns[1], covered.get(segment, 0))
            for column in columns:
                del column[:read]
            if not columns[0]:
                del self._runs[segment]

    def begin_behind(self, covered: Mapping[SegmentId, int]) -> int:
        """Return the offset of the first commit with records that are not covered; see ``StreamOffset``."""
        found = self._next or 0
        for segment, (_, ends, positions) in self._runs.items():
            unread = bisect_right(ends, covered.get(segment, 0))
            if unread < len(ends):
                found = min(found, positions[unread])
        return found

    def _take(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        for segment, runs in decode_control(key, value).placement.get(self._stream, {}).items():
            starts, ends, positions = self._runs.setdefault(segment, ([], [], []))
            for run in runs:
                starts.append(run.base_offset)
                ends.append(run.base_offset + run.count)
                positions.append(offset)
