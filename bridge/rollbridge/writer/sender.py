"""Sender of plain writes: the channels of one connection, and what becomes of batches that a segment did not take.

One sender serves all plain writers of a connection with the same options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, cast

from kio.schema.errors import ErrorCode
from kio.schema.produce.v12.response import PartitionProduceResponse

from rollbridge.errors import (
    NotAuthorizedError,
    NotFoundError,
    RollbridgeError,
    UnavailableError,
)
from rollbridge.kafka import errors as codes
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.produce import new_producer_id
from rollbridge.kafka.queues import PartitionQueue
from rollbridge.kafka.sender import Sender, SenderLimits
from rollbridge.model.routing import StreamView
from rollbridge.writer import accumulator as faults
from rollbridge.writer.accumulator import Fault, ProducerBatch, StreamAccumulator, WriterOptions
from rollbridge.writer.search import Search, Searches
from rollbridge.writer.segments import SegmentPhase, SegmentQueue
from rollbridge.zookeeper.catalog import Catalog

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 1.0
"""Interval of reading the epochs again while a broker reports a seal that they do not show."""


class PlainSender(Sender[ProducerBatch]):
    """Sender of the batches of all channels of one connection.

    Attributes:
        options: Sizes, delays and limits.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        security: Mapping[str, str] | None,
        client_id: str,
        options: WriterOptions,
        catalog: Catalog,
    ) -> None:
        """Get a producer id and start the thread.

        Raises:
            KafkaUnavailableError: No broker answered.
            NotAuthorizedError: The principal may write to no topic.
        """
        self.options = options
        self._catalog = catalog
        new_cluster = partial(
            Cluster,
            bootstrap_servers,
            security=security,
            client_id=client_id,
            request_timeout_s=options.request_timeout_s,
        )
        with new_cluster() as cluster:
            producer = new_producer_id(cluster)
        super().__init__(
            new_cluster,
            SenderLimits(
                buffer_bytes=options.buffer_bytes,
                block_s=options.block_s,
                request_timeout_s=options.request_timeout_s,
                in_flight_max=options.in_flight_max,
            ),
            name="rollbridge-writer",
            producer=producer,
        )
        self._channels: dict[str, StreamAccumulator] = {}
        self._generation = -1
        self._looked_at = 0.0
        self._searches = Searches(new_cluster, self.wake)
        self.start()

    # What writers do ----------------------------------------------------------------------------------------------

    def channel(self, stream: str) -> StreamAccumulator:
        """Return the channel of a stream; a new one unless there is one that can be written.

        Raises:
            InvalidNameError, ScopeNotFoundError, StreamNotFoundError, ZooKeeperUnavailableError.
        """
        view = self._catalog.view(stream)
        with self.lock:
            known = self._channels.get(stream)
            if known is None or known.failure is not None or not known.is_of(view):
                known = self._channels[stream] = StreamAccumulator(self, view)
            return known

    def pump(self) -> None:
        """Send what may be sent now. The caller holds the lock."""
        self._dispatch.pump()

    def opened(self, channel: StreamAccumulator) -> None:
        """Wake the thread, which closes the new batch once it has lingered."""
        self.wake()

    def replaced(self, size: int, pieces: list[ProducerBatch]) -> None:
        """Correct the size of the buffer after a batch of ``size`` bytes was divided."""
        self.bytes += sum(len(piece.data) for piece in pieces) - size

    def read_again(self, stream: str) -> StreamView | None:
        """Return the stream as it is now; None if it cannot be read. Not to be called under the lock."""
        try:
            return self._catalog.read(stream)
        except RollbridgeError as fault:
            logger.info("stream %s cannot be read again: %s", stream, fault)
            return None

    def look(self) -> None:
        """Adopt new epochs from the catalog; called by housekeeping after it has refreshed the catalog."""
        if self._catalog.generation == self._generation:
            return
        self._generation = self._catalog.generation
        for stream, channel in list(self._channels.items()):
            if channel.failure is not None:
                continue
            try:
                view = self._catalog.view(stream)
            except NotFoundError:
                self._stop(channel, channel.gone)
                continue
            except UnavailableError as fault:
                logger.info("stream %s cannot be read now: %s", stream, fault)
                self._generation = -1
                continue
            if not channel.is_of(view):
                self._stop(channel, channel.gone)
            elif channel.is_outdated(view):
                with self.lock:
                    channel.adopt(view)
                    self._scan(channel.course.active)
                    self.pump()
        self.wake()

    def close(self, timeout_s: float) -> int:
        """Send what is left within ``timeout_s`` and stop; return the number of records that were not acknowledged."""
        left = self.stop(timeout_s)
        self._searches.close()
        for channel in list(self._channels.values()):
            self._stop(channel, faults.closed)
            channel.failure = faults.closed_before
        self.tell()
        self.disconnect()
        return left

    def _stop(self, channel: StreamAccumulator, fault: Fault) -> None:
        """Fail all records of a stream, present and future, with ``fault``."""
        with self.lock:
            if channel.failure is None:
                for batch in channel.stop(fault):
                    self._settle_as(batch, lambda batch=batch: batch.failed(fault))  # type: ignore[misc]
            for queue in tuple(self._dispatch.ready):
                if _segment(queue).course is channel.course:
                    del self._dispatch.ready[queue]
        self.wake()

    # Fate of batches, under the lock ------------------------------------------------------------------------------

    def written(self, queue: PartitionQueue[ProducerBatch], batch: ProducerBatch, base_offset: int) -> None:
        """Settle a batch that was written."""
        if not batch.settled:
            self._count_written(batch)
        self._settle_as(batch, lambda: batch.written(_segment(queue), base_offset))

    def too_large(
        self, queue: PartitionQueue[ProducerBatch], batch: ProducerBatch, answer: PartitionProduceResponse
    ) -> None:
        """Await the successors of a sealed segment, or divide a batch of an adopted topic whose limit was lowered."""
        if not batch.channel.is_too_large(batch) or batch.doubtful:
            # Or it is too large for an adopted topic whose limit was lowered; the stream's record will tell.
            _segment(queue).refuse(batch)
            self._catalog.suspect(batch.channel.stream)
        elif batch.count > 1:
            queue.exchange(batch, batch.channel.divide(batch))
        else:
            self._fail(queue, batch, batch.channel.too_large(len(batch.data)))

    def refused(
        self, queue: PartitionQueue[ProducerBatch], batch: ProducerBatch, answer: PartitionProduceResponse
    ) -> None:
        """Fail the records that the broker rejects; if it says which, the others of the batch are sent again.

        A possibly persisted batch fails as a whole: its other records would get new sequence numbers and be written
        twice.
        """
        code = codes.name(answer.error_code)
        if batch.channel.limits.adopted is not None:
            self._catalog.suspect(batch.channel.stream)  # the topic's limits may have been changed
        why = {
            int(item.batch_index): item.batch_index_error_message or answer.error_message
            for item in answer.record_errors
            if 0 <= item.batch_index < batch.count
        }
        if not why or len(why) == batch.count or batch.doubtful:
            self._fail(queue, batch, faults.refused(queue.topic, code, answer.error_message))
            return
        rest, out = batch.channel.take_out(batch, why)
        queue.exchange(batch, rest)
        for piece, (_, message) in zip(out, sorted(why.items()), strict=True):
            self._fail(queue, piece, faults.refused(queue.topic, code, message))

    def denied(self, queue: PartitionQueue[ProducerBatch], batch: ProducerBatch, code: ErrorCode) -> None:
        """Fail a batch that the principal may not write."""
        self._fail(queue, batch, faults.denied(queue.topic, codes.name(code)))

    def unclear(self, queue: PartitionQueue[ProducerBatch], batch: ProducerBatch, code: ErrorCode) -> None:
        """Fail a batch of which nobody can tell whether it was written."""
        batch.doubtful = True
        self._fail(queue, batch, faults.unknown(queue.topic, codes.name(code)))

    def delayed(self, queue: PartitionQueue[ProducerBatch], code: ErrorCode) -> None:
        """Wait: the stream's record tells whether it was deleted."""

    def changed(self, queue: PartitionQueue[ProducerBatch]) -> None:
        """Drain a queue whose segment has ended, or mark it as ready."""
        segment = _segment(queue)
        if segment.phase is SegmentPhase.ENDED and segment.course.drain():
            self._scan(segment.course.active)
        else:
            self._dispatch.note(queue)

    def _scan(self, queues: Iterable[SegmentQueue[ProducerBatch]]) -> None:
        """Mark the queues that may send as ready."""
        for queue in queues:
            self._dispatch.note(queue)

    def _settle_as(self, batch: ProducerBatch, how: Callable[[], None]) -> None:
        if batch.settled:
            return  # given up before its answer came
        batch.channel.unsettled.pop(batch, None)
        self._settle(batch)
        how()

    def _fail(self, queue: PartitionQueue[ProducerBatch], batch: ProducerBatch, fault: Fault) -> None:
        """Give a batch up; its records fail."""
        logger.warning("%d records of %s failed: %s", batch.count, batch.channel.stream, fault())
        queue.drop(batch)
        self.counts.failed += 0 if batch.settled else batch.count
        self._settle_as(batch, lambda: batch.failed(fault))

    def _forgotten(self, queue: PartitionQueue[ProducerBatch], batch: ProducerBatch) -> None:
        self._fail(queue, batch, faults.unknown(queue.topic, "the broker has forgotten this producer"))

    def _identify_denied(self, fault: NotAuthorizedError) -> None:
        """Go on asking: it was allowed when this sender was made."""

    # Turns of the thread ------------------------------------------------------------------------------------------

    def _queues(self) -> Iterable[SegmentQueue[ProducerBatch]]:
        return [queue for channel in self._channels.values() for queue in channel.course.queues()]

    def _unsettled(self) -> int:
        return sum(channel.records for channel in self._channels.values())

    def _cut(self, now: float) -> None:
        for channel in self._channels.values():
            if channel.opened:
                channel.cut_older(now - self.options.linger_s)

    def _due(self) -> float:
        opened = [queue.open.opened_s for item in self._channels.values() for queue in item.opened if queue.open]
        return min(opened, default=float("inf")) + self.options.linger_s

    def _check(self, now: float) -> None:
        """Handle timeouts: records without an outcome, seals without successors."""
        awaiting = False
        for channel in [item for item in self._channels.values() if item.failure is None]:
            for queue in channel.course.queues():
                if queue.phase is SegmentPhase.REFUSED and queue.waiting:
                    awaiting = True
                    if now - self._looked_at >= _LOOK_AGAIN_S:
                        self._catalog.suspect(channel.stream)
                        queue.retry()
                        self._dispatch.ready[queue] = None
                for batch in tuple(queue.held()):
                    if batch.opened_s + self.options.delivery_timeout_s < now and batch not in queue.in_flight:
                        late = faults.late(queue.topic, self.options.delivery_timeout_s, batch.doubtful)
                        self._fail(queue, batch, late)
                        self.changed(queue)
        if awaiting and now - self._looked_at >= _LOOK_AGAIN_S:
            self._looked_at = now

    def _errands(self) -> None:
        """Search the logs of sealed segments for possibly persisted batches."""
        with self.lock:
            wanted = [(channel, item) for channel in self._channels.values() for item in channel.course.unresolved()]
        for search, fault in self._searches.turn(wanted, self._dispatch.producer):
            self._resolve(search, fault)

    def _resolve(self, search: Search, fault: RollbridgeError | None) -> None:
        """Apply the result of a search in a sealed segment, or the reason why there is none."""
        channel, queue, log = search.channel, search.queue, search.log
        with self.lock:
            if fault is None:
                found, unknown = channel.course.resolve(queue, log.found, log.gap)
                why = "part of the segment is deleted"
            else:
                found, unknown = [], [batch for batch in queue.held() if batch.doubtful]
                why = str(fault)
            for batch, offset in found:
                logger.info("%d records were in %s before it was sealed", batch.count, queue.topic)
                self.written(queue, batch, offset)
            for batch in unknown:
                self._fail(queue, batch, faults.unknown(queue.topic, why))
            self.changed(queue)
            self._scan(channel.course.active)
            self.pump()

    def _tell(self, batch: ProducerBatch) -> None:
        batch.tell()


def _segment(queue: PartitionQueue[ProducerBatch]) -> SegmentQueue[ProducerBatch]:
    """Return a queue as what all queues of this sender are."""
    return cast("SegmentQueue[ProducerBatch]", queue)
