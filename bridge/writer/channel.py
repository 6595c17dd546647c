"""One stream as a connection writes it: records are routed to lanes and collected in batches.

All writers of a stream on one connection share its channel, because the order of a segment is one. Everything here is
done under the engine's lock.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from aiokafka.record.default_records import DefaultRecordBatchBuilder
from xxhash import xxh64_intdigest

from bridge.client.routing import StreamView, hash_bounds
from bridge.errors import RecordTooLargeError, RollbridgeError, StreamNotFound
from bridge.kafka.batches import HEADER_BYTES
from bridge.model.identifiers import SegmentId
from bridge.model.keyspace import HASH_SEED
from bridge.model.sn import sequence_bases
from bridge.writer.batch import Batch
from bridge.writer.lanes import Course, Lane

if TYPE_CHECKING:
    from bridge.writer.engine import Engine

Headers = Sequence[tuple[str, bytes | None]]

_MAGIC: Final = 2
_SEGMENT_BYTES_SPARE: Final = 8 * 1024
"""How much smaller than a segment's message limit the batches are that are made when others are taken apart."""
_SEGMENT_BYTES: Final = 1_048_588


class Channel:
    """A stream that is being written.

    Attributes:
        course: Its lanes.
        bounds: The smallest hash of each active lane but the first.
        lanes: The active lanes.
        opened: The lanes with an open batch.
        unsettled: Batches whose fate is not known, oldest first.
        records: Records of these batches.
        failure: Why nothing more can be written; None while it can.
    """

    def __init__(self, engine: Engine, view: StreamView) -> None:
        self._engine = engine
        self.view = view
        self.stream = str(view.config.name)
        self.record_bytes_max = min(view.config.record_bytes_max, engine.options.buffer_bytes // 2)
        self.batch_bytes = min(engine.options.batch_bytes, max(self.record_bytes_max, HEADER_BYTES + 1))
        self.opened: dict[Lane[Batch], None] = {}
        self.unsettled: dict[Batch, None] = {}
        self.failure: Callable[[], RollbridgeError] | None = None
        self._sticky = 0
        self._bases: dict[SegmentId, int] = {}
        self._compression = int(engine.options.codec)
        self.course: Course[Batch] = Course(view.history, view.config.name.segment_topic, self._split)
        self._route()

    @property
    def records(self) -> int:
        """Records whose fate is not known."""
        return sum(batch.count for batch in self.unsettled)

    def lane_of(self, key: bytes | None) -> Lane[Batch]:
        """Where a record goes now; those without a key stay together for a batch."""
        if key is None:
            return self.lanes[self._sticky % len(self.lanes)]
        return self.lanes[bisect_right(self.bounds, xxh64_intdigest(key, HASH_SEED))] if self.bounds else self.lanes[0]

    def append(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int | None,
    ) -> Batch:
        """Append a record to a batch with room for it, or to a new one; the record is the batch's last.

        Raises:
            RecordTooLargeError, BackpressureError: it was not written; the writer stays usable.
            RollbridgeError: nothing more can be written.
        """
        size = DefaultRecordBatchBuilder.size_of(key, value, headers)
        if size > self.record_bytes_max:
            raise RecordTooLargeError(
                f"a record of {size} bytes (key, value and headers) exceeds the limit of {self.record_bytes_max} of "
                f"stream {self.stream}; it was not written, the writer is usable",
                size_bytes=size,
                limit_bytes=self.record_bytes_max,
            )
        self._engine.await_room()
        if self.failure is not None:
            raise self.failure()
        lane = self.lane_of(key)  # only now: while this waited, the segments may have changed
        batch = lane.open
        if batch is not None:
            if batch.append(batch.count, timestamp_ms, key, value, headers) is not None:
                batch.count += 1
                return batch
            self.cut(lane)
            if key is None:
                self._sticky += 1
                lane = self.lane_of(None)
                if lane.open is not None:
                    self.cut(lane)
        batch = self.new_batch(time.monotonic(), self.batch_bytes)
        if self.batch_bytes > self.record_bytes_max:
            batch.append = _checked(batch.append, self.record_bytes_max)
        batch.append(0, timestamp_ms, key, value, headers)
        batch.count = 1
        lane.open = batch
        self.opened[lane] = None
        self._engine.opened(self)
        return batch

    def new_batch(self, opened_s: float, limit_bytes: int) -> Batch:
        """An empty batch of this stream."""
        builder = DefaultRecordBatchBuilder(_MAGIC, self._compression, 0, -1, -1, -1, limit_bytes)
        batch = Batch(self, builder, opened_s)
        self.unsettled[batch] = None
        return batch

    def cut(self, lane: Lane[Batch]) -> None:
        """Close a lane's open batch and put it in line."""
        batch = lane.open
        if batch is not None:
            lane.open = None
            self.opened.pop(lane, None)
            batch.close()
            lane.queue.append(batch)
            self._engine.queued(lane, batch)

    def cut_older(self, than_s: float) -> None:
        """Close the open batches that were begun before ``than_s`` (monotonic seconds)."""
        for lane in [lane for lane in self.opened if lane.open is not None and lane.open.opened_s <= than_s]:
            self.cut(lane)

    def adopt(self, view: StreamView) -> None:
        """Take the epochs as they are now."""
        ids = view.history.active.segment_ids
        for lane in self.lanes:
            if lane.id not in ids:
                self.cut(lane)
        self.view = view
        self.course.adopt(view.history)
        self._route()

    def is_of(self, view: StreamView) -> bool:
        """Whether a view is of the same stream, not of one that was deleted and made again."""
        config = self.view.config
        return (config.created_ms, config.buffer_topic_id) == (view.config.created_ms, view.config.buffer_topic_id)

    def stop(self, fault: Callable[[], RollbridgeError]) -> list[Batch]:
        """Refuse all further records and give up on those whose fate is not known; gives their batches."""
        self.failure = fault
        for lane in tuple(self.opened):
            lane.open = None
        self.opened.clear()
        self.course.close()
        return [batch for batch in self.unsettled if batch.where is None]

    def gone(self) -> RollbridgeError:
        """The error of records of a stream that was deleted."""
        return StreamNotFound(
            f"stream {self.stream} was deleted; whatever was written of this record is gone with it, and nothing more "
            "can be written: if the stream was made again, open a new writer"
        )

    def sequence_base(self, segment: SegmentId) -> int | None:
        """Where the sequence ids of a segment begin; None if that is not known yet."""
        base = self._bases.get(segment)
        if base is None:
            self._bases = sequence_bases(self.view.history)
            base = self._bases.get(segment)
        if base is None:
            # The end of a segment between two incarnations of the active epoch is noted a moment after its successors.
            view = self._engine.read_again(self.stream)
            if view is not None and self.is_of(view):
                self._bases = sequence_bases(view.history)
                base = self._bases.get(segment)
        return base

    def _route(self) -> None:
        self.lanes = self.course.active
        self.bounds = hash_bounds([lane.segment.range.low for lane in self.lanes])

    def take_out(self, batch: Batch, faulty: Collection[int]) -> tuple[list[Batch], list[Batch]]:
        """Take a batch apart of which some records were refused, by their places: the others, and each of these."""
        size = len(batch.data)
        rest, out = batch.take_out(faulty, self._piece_bytes)
        self._engine.replaced(size, [*rest, *out])
        self.unsettled.pop(batch, None)
        return rest, out

    def _split(self, batch: Batch, heirs: Sequence[Lane[Batch]]) -> Iterable[tuple[Batch, Lane[Batch]]]:
        size = len(batch.data)
        made = list(batch.take_apart(heirs, self._piece_bytes))
        self._engine.replaced(size, [piece for piece, _ in made])
        self.unsettled.pop(batch, None)
        return made

    @property
    def _piece_bytes(self) -> int:
        return max(_SEGMENT_BYTES - _SEGMENT_BYTES_SPARE, self.batch_bytes)


def _checked(append: Callable[..., object], limit_bytes: int) -> Callable[..., object]:
    """``append`` for a stream whose records must be smaller than a batch: each of them is measured."""

    def measured(
        offset: int, timestamp: int | None, key: bytes | None, value: bytes | None, headers: Headers
    ) -> object:
        if DefaultRecordBatchBuilder.size_of(key, value, headers) > limit_bytes:
            return None  # as if it did not fit: what starts a batch says why it is refused
        return append(offset, timestamp, key, value, headers)

    return measured
