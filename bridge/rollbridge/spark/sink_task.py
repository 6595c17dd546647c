"""Tasks of the sink: write one partition of a data frame as one part of a transaction.

Rows are routed to segments and collected into frames; each frame is one record batch of one segment. Connections
outlive a task, because Spark reuses its Python processes, and connecting costs more than a small batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollbridge.base.deadlines import wall_ms
from rollbridge.client.connection import Bridge
from rollbridge.client.futures import PartStream
from rollbridge.client.results import PartHandle
from rollbridge.client.transaction import Part, writing_of
from rollbridge.client.writing import Writing
from rollbridge.config import ClientOptions, ConnectionSettings
from rollbridge.kafka.columns import Longs, Rows, batch_bytes, encode_batch, record_bytes
from rollbridge.kafka.records import HEADER_BYTES, Compression
from rollbridge.spark.sink_records import PartitionReader, hashes_of, row_refused
from rollbridge.spark.worker import Kept
from rollbridge.stream.config import KEYLESS, TopicLimits


class PartitionWriter:
    """Writer of record batches of a data frame as one part; not for several threads."""

    def __init__(self, part: Part, reader: PartitionReader, streams: Sequence[str]) -> None:
        """Begin.

        Args:
            part: Part of the transaction to write.
            reader: Reader of the batches.
            streams: Streams that rows may go to, in the reader's order.
        """
        self._part = part
        self._reader = reader
        writing = writing_of(part)
        self._part_streams = [_LaneRows(writing, writing.part_stream(stream)) for stream in streams]

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch.

        Raises:
            InvalidRequestError: ``row-refused``: a row cannot be written.
            TransactionTooLargeError, BackpressureError, TransactionClosedError: as :meth:`rollbridge.Part.write`.
        """
        rows, keys, places = self._reader.read(batch)
        partitions = self._reader.partitions(batch)
        if places is None:
            self._part_streams[0].add(rows, keys, partitions)
            return
        for place, part_stream in enumerate(self._part_streams):
            chosen = np.flatnonzero(places == place)
            if len(chosen):
                named = None if partitions is None else partitions.take(pa.array(chosen))
                part_stream.add(rows.take(chosen), keys[chosen], named)

    def finish(self) -> PartHandle:
        """Send the remaining rows; return once the brokers have acknowledged everything.

        Raises:
            RollbridgeError: as :meth:`rollbridge.Part.finish`.
        """
        for part_stream in self._part_streams:
            part_stream.send_all()
        return self._part.finish()


_ANY_NUMBER: Final = 1 << 31


class _LaneRows:
    """Rows of one stream that wait for their frames, by segment."""

    def __init__(self, writing: Writing, part_stream: PartStream) -> None:
        self._writing = writing
        self._part_stream = part_stream
        self._stream = part_stream.route.stream
        self._bounds = np.array(part_stream.bounds, np.uint64)
        self._sticky = part_stream.sticky
        self._waiting = [_Waiting(each=part_stream.each) for _ in part_stream.route.numbers]

    def add(self, rows: Rows, keys: Longs, partitions: pa.Array | None) -> None:
        """Add rows with the hashes of their keys, and the partition that each of them names, if any does."""
        named = None if partitions is None else self._named(rows, partitions)
        sizes = record_bytes(rows)
        worst = int(sizes.argmax())
        if sizes[worst] > self._part_stream.layout.record_bytes_max:
            raise row_refused(
                f"it takes {sizes[worst]} bytes (key, value and headers, our own included), which exceeds the "
                f"limit of {self._part_stream.layout.record_bytes_max} of stream {self._stream}",
                row=int(rows.counts[worst]),
            )
        if self._part_stream.layout.adopted is not None:
            self._check_topic(rows, self._part_stream.layout.adopted)
        if len(self._waiting) == 1:
            self._add(0, rows)
            return
        places = self._segments(rows.keys, keys)
        if named is not None:
            places = np.where(named < 0, places, named)
        # A stable sort of 16-bit numbers is a radix sort, which takes a third of the time.
        order = np.argsort(places.astype(np.uint16) if len(self._waiting) <= 1 << 16 else places, kind="stable")
        rows = rows.take(order)
        ends = np.cumsum(np.bincount(places, minlength=len(self._waiting)))
        start = 0
        for at, end in enumerate(ends.tolist()):
            if end > start:
                self._add(at, rows.slice(start, end))
            start = end

    def _named(self, rows: Rows, partitions: pa.Array) -> Longs:
        """Return the index of the segment that each row names, -1 where it names none.

        Raises:
            InvalidRequestError: ``row-refused``: there is no such partition; or no topic is adopted, and keys
                alone choose the segment.
        """
        route = self._part_stream.route
        is_adopted = self._part_stream.layout.adopted is not None
        found = pc.index_in(partitions, pa.array(route.numbers if is_adopted else [], partitions.type))
        unknown = pc.and_(found.is_null(), partitions.is_valid()).index(True).as_py()
        if unknown >= 0:
            named = partitions[unknown].as_py()
            why = (
                f"topic {route.topic} has {len(route.numbers)}, from 0 on"
                if is_adopted
                else f"{self._stream} is not on an adopted topic, and keys choose its segments: drop('partition')"
            )
            raise row_refused(f"its partition is {named}, but {why}", row=int(rows.counts[unknown]))
        places: Longs = found.fill_null(-1).to_numpy(zero_copy_only=False)
        return places

    def _check_topic(self, rows: Rows, limits: TopicLimits) -> None:
        """Refuse what the topic that the stream has adopted does not take."""
        topic = self._part_stream.route.topic
        if limits.is_compacted and rows.keys.null_count:
            row = int(rows.counts[rows.keys.is_null().index(True).as_py()])
            raise row_refused(f"{KEYLESS} such as {topic}", row=row)
        now_ms = wall_ms()
        for place in (int(rows.timestamps.argmin()), int(rows.timestamps.argmax())):
            fault = limits.fault_of(int(rows.timestamps[place]), now_ms)
            if fault is not None:
                raise row_refused(f"{fault}: {topic}", row=int(rows.counts[place]))

    def send_all(self) -> None:
        for at, waiting in enumerate(self._waiting):
            if waiting.rows:
                self._send(at, waiting.taken())

    def _add(self, at: int, rows: Rows) -> None:
        """Queue rows for the frame of a segment, and send the frames that become full."""
        waiting, room = self._waiting[at], self._part_stream.layout.batch_bytes - HEADER_BYTES
        # Steps have their own room in a batch, for so many records.
        most = _ANY_NUMBER if self._part_stream.each else 2 * self._part_stream.layout.chunk
        waiting.add(rows)
        if waiting.bytes <= room and waiting.count <= most:
            return
        together = waiting.taken()
        ends = np.cumsum(batch_bytes(together, each=self._part_stream.each))
        start = sent = 0
        while ends[-1] - sent > room or len(together) - start > most:
            stop = max(int(np.searchsorted(ends, sent + room, side="right")), start + 1)
            stop = min(stop, start + most)
            self._send(at, together.slice(start, stop))
            start, sent = stop, int(ends[stop - 1])
        waiting.add(together.slice(start, len(together)))

    def _send(self, at: int, rows: Rows) -> None:
        writing = self._writing
        codec = Compression(writing.runtime.limits.compression)
        batch = encode_batch(rows, writing.completion.key, writing.writer.part, codec, each=self._part_stream.each)
        writing.put_batch(self._stream, at, batch, int(rows.counts[0]), int(rows.counts[-1]), len(rows))

    def _segments(self, keys: pa.BinaryArray, hashes: Longs) -> Longs:
        """Return the index of each row's segment.

        Rows without a key stay together, in the next segment with each batch (sticky partitioning).
        """
        if self._part_stream.route.keys.partitioner is not None:
            hashes = hashes_of(keys, self._part_stream.hash_of)
        places: Longs = np.searchsorted(self._bounds, hashes, side="right")
        if keys.null_count:
            places[keys.is_null().to_numpy(zero_copy_only=False)] = self._sticky
            self._sticky = (self._sticky + 1) % len(self._waiting)
        return places


class _Waiting:
    """Rows that wait for the next frame of a segment, with an upper bound of their bytes in it."""

    __slots__ = ("bytes", "count", "each", "rows")

    def __init__(self, *, each: bool) -> None:
        self.rows: list[Rows] = []
        self.bytes = self.count = 0
        self.each = each

    def add(self, rows: Rows) -> None:
        """Queue rows behind the others."""
        if len(rows):
            self.rows.append(rows)
            self.bytes += int(batch_bytes(rows, each=self.each).sum())
            self.count += len(rows)

    def taken(self) -> Rows:
        """Remove all rows and return them."""
        together, self.rows, self.bytes, self.count = Rows.together(self.rows), [], 0, 0
        return together


# Connections that outlive a task


_kept: Final[Kept[Bridge]] = Kept()


def connection(settings: ConnectionSettings, options: ClientOptions) -> Bridge:
    """Return the connection of this process to a cluster, for the tasks that write.

    Raises:
        KafkaUnavailableError, ZooKeeperUnavailableError: no server answered in time.
        InvalidRequestError: the ZooKeeper path belongs to another Kafka cluster.
    """
    return _kept.get((settings.identity(), options), lambda: Bridge(settings, options))
