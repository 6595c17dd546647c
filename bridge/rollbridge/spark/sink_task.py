"""One partition of a data frame becomes one part of a transaction: rows to segments, and segments to frames."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from rollbridge.client.futures import Lane
from rollbridge.client.results import PartHandle
from rollbridge.client.runtime import ClientOptions
from rollbridge.client.writing import Part
from rollbridge.config import ConnectionSettings
from rollbridge.connection import Bridge
from rollbridge.errors import RowRefused
from rollbridge.kafka.batches import HEADER_BYTES
from rollbridge.spark.sink_records import Numbers, PartitionReader, Rows, batch_bytes, encode_batch


class PartitionWriter:
    """Writes record batches of a data frame as one part. Not for several threads."""

    def __init__(self, part: Part, reader: PartitionReader, streams: Sequence[str]) -> None:
        """Begin.

        Args:
            part: Takes what is written.
            reader: Reads the batches.
            streams: Where rows may go, as the reader knows them.
        """
        self._part = part
        self._reader = reader
        self._lanes = [_LaneRows(part, part.lane(stream)) for stream in streams]

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch.

        Raises:
            RowRefused: one of them can not be written.
            TransactionTooLargeError, BackpressureError, TransactionClosed: as :meth:`rollbridge.Part.write`.
        """
        rows, keys, places = self._reader.read(batch)
        if places is None:
            self._lanes[0].add(rows, keys)
            return
        for place, lane in enumerate(self._lanes):
            chosen = np.flatnonzero(places == place)
            if len(chosen):
                lane.add(rows.take(chosen), keys[chosen])

    def finish(self) -> PartHandle:
        """Send what is left, and return once the brokers have everything. Raises as :meth:`rollbridge.Part.finish`."""
        for lane in self._lanes:
            lane.send_all()
        return self._part.finish()


class _LaneRows:
    """Rows that wait for their frames, by segments of one stream."""

    def __init__(self, part: Part, lane: Lane) -> None:
        self._part = part
        self._lane = lane
        self._stream = lane.route.stream
        self._bounds = np.array(lane.bounds, np.uint64)
        self._sticky = lane.sticky
        self._waiting = [_Waiting() for _ in lane.route.numbers]

    def add(self, rows: Rows, keys: Numbers) -> None:
        worst = int(rows.sizes.argmax())
        if rows.sizes[worst] > self._lane.record_bytes_max:
            raise RowRefused(
                f"it takes {rows.sizes[worst]} bytes (key, value and headers, our own included), which exceeds the "
                f"limit of {self._lane.record_bytes_max} of stream {self._stream}",
                row=int(rows.counts[worst]),
            )
        if len(self._waiting) == 1:
            self._add(0, rows)
            return
        places = self._segments(rows.keys, keys)
        order = np.argsort(places, kind="stable")
        rows = rows.take(order)
        ends = np.cumsum(np.bincount(places, minlength=len(self._waiting)))
        start = 0
        for at, end in enumerate(ends.tolist()):
            if end > start:
                self._add(at, rows.slice(start, end))
            start = end

    def send_all(self) -> None:
        for at, waiting in enumerate(self._waiting):
            if waiting.rows:
                self._send(at, waiting.taken())

    def _add(self, at: int, rows: Rows) -> None:
        """Let rows wait for the frame of a segment, and send the frames that become full."""
        waiting, room = self._waiting[at], self._lane.frame_bytes - HEADER_BYTES
        waiting.add(rows)
        if waiting.bytes <= room:
            return
        together = waiting.taken()
        ends = np.cumsum(batch_bytes(together))
        start = sent = 0
        while ends[-1] - sent > room:
            stop = max(int(np.searchsorted(ends, sent + room, side="right")), start + 1)
            self._send(at, together.slice(start, stop))
            start, sent = stop, int(ends[stop - 1])
        waiting.add(together.slice(start, len(together)))

    def _send(self, at: int, rows: Rows) -> None:
        batch = encode_batch(rows, self._part.id.bytes, self._part.number, self._part.compression)
        self._part.put_batch(self._stream, at, batch, int(rows.counts[0]), int(rows.counts[-1]), len(rows))

    def _segments(self, keys: pa.BinaryArray, hashes: Numbers) -> Numbers:
        """The place of each row's segment; rows without a key stay together, and go on to the next one each time."""
        places: Numbers = np.searchsorted(self._bounds, hashes, side="right")
        if keys.null_count:
            places[keys.is_null().to_numpy(zero_copy_only=False)] = self._sticky
            self._sticky = (self._sticky + 1) % len(self._waiting)
        return places


class _Waiting:
    """The rows that wait for the next frame of a segment, and what they will take in it at most."""

    __slots__ = ("bytes", "rows")

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.bytes = 0

    def add(self, rows: Rows) -> None:
        """Let these wait behind the others."""
        if len(rows):
            self.rows.append(rows)
            self.bytes += int(batch_bytes(rows).sum())

    def taken(self) -> Rows:
        """All of them; none waits then."""
        together, self.rows, self.bytes = Rows.together(self.rows), [], 0
        return together


# --------------------------------------------------------------------------------------------------------------------
# Connections that outlive a task: Spark reuses its Python processes, and connecting costs more than a small batch.


KEPT_MAX: Final = 4
"""Connections of a process, to different clusters or as somebody else; the one used last goes last."""


class _Closable(Protocol):
    def close(self) -> None:
        """Disconnect."""


T = TypeVar("T", bound=_Closable)


class Kept(Generic[T]):
    """What is kept for the tasks to come, by who connects to what; nobody else is given it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, connect: Callable[[], T]) -> T:
        """What is kept under a key, or is made now; the one used least recently is closed if they are too many."""
        found = self._kept.pop(key, None) or connect()
        self._kept[key] = found
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)[1].close()
        return found

    def close(self) -> None:
        """Disconnect all."""
        while self._kept:
            self._kept.popitem()[1].close()


# --------------------------------------------------------------------------------------------------------------------
# The connection with which the tasks of a process write.


_kept: Final[Kept[Bridge]] = Kept()


def connection(settings: ConnectionSettings, options: ClientOptions) -> Bridge:
    """The connection of this process to a cluster.

    Raises:
        KafkaUnavailable, ZooKeeperUnavailable: nobody answered in time.
        WrongClusterError: the ZooKeeper path belongs to another Kafka cluster.
    """
    return _kept.get((settings.identity(), options), lambda: Bridge(settings, options))
