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
        self._former: list[StreamAccumulator] = []
        """Channels of streams that are gone, while batches of theirs are in flight."""
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
            if known is not None and known.is_of(view):
                return known
            if known is not None:
                self._leave(known)
            made = self._channels[stream] = StreamAccumulator(self, view)
            return made

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
            try:
                view = self._catalog.view(stream)
            except NotFoundError:
                with self.lock:
                    self._leave(channel)
                continue
            except UnavailableError as fault:
                logger.info("stream %s cannot be read now: %s", stream, fault)
                self._generation = -1
                continue
            with self.lock:
                if not channel.is_of(view):
                    self._leave(channel)
                elif channel.is_outdated(view) and channel.failure is None:
                    channel.adopt(view)
                    self._scan(channel.course.active)
                    self.pump()
        self.wake()

    def close(self, timeout_s: float) -> int:
        """Send what is left within ``timeout_s`` and stop; return the number of records that were not acknowledged."""
        left = self.stop(timeout_s)
        self._searches.close()
        with self.lock:
            for channel in self._all():
                channel.stop(faults.closed_before)
                for batch in [batch for batch in channel.unsettled if batch.where is None]:
                    self._give_up(batch, faults.closed)
        self.tell()
        self.disconnect()
        return left

    def _leave(self, channel: StreamAccumulator) -> None:
        """End the channel of a stream that is gone, under the lock: of what is in flight the answers will tell."""
        if self._channels.get(channel.stream) is not channel or channel.failure is not None:
            return
        del self._channels[channel.stream]
        self._former.append(channel)
        self._generation = -1
        left = channel.stop(channel.gone)
        logger.info("stream %s is gone; %d batches for it are not sent", channel.stream, len(left))
        for batch in left:
            self._lose(batch)
        self.wake()

    def _lose(self, batch: ProducerBatch) -> None:
        """Fail a batch that is not in flight, and whose stream is gone."""
        self._give_up(batch, partial(batch.channel.gone, doubtful=batch.doubtful))

    def _give_up(self, batch: ProducerBatch, fault: Fault) -> None:
        self.counts.failed += 0 if batch.settled else batch.count
        self._settle_as(batch, lambda: batch.failed(fault))

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
        if segment.course.closed:
            for batch in segment.course.withdraw(segment):
                self._lose(batch)
        elif segment.phase is SegmentPhase.ENDED and segment.course.drain():
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
        self._give_up(batch, fault)

    def _forgotten(self, queue: PartitionQueue[ProducerBatch], batch: ProducerBatch) -> None:
        self._fail(queue, batch, faults.unknown(queue.topic, "the broker has forgotten this producer"))

    def _identify_denied(self, fault: NotAuthorizedError) -> None:
        """Go on asking: it was allowed when this sender was made."""

    # Turns of the thread ------------------------------------------------------------------------------------------

    def _queues(self) -> Iterable[SegmentQueue[ProducerBatch]]:
        return [queue for channel in self._all() for queue in channel.course.queues()]

    def _all(self) -> Iterable[StreamAccumulator]:
        return (*self._former, *self._channels.values())

    def _unsettled(self) -> int:
        return sum(channel.records for channel in self._all())

    def _cut(self, now: float) -> None:
        for channel in self._channels.values():
            if channel.opened:
                channel.cut_older(now - self.options.linger_s)

    def _due(self) -> float:
        opened = [queue.open.opened_s for item in self._channels.values() for queue in item.opened if queue.open]
        return min(opened, default=float("inf")) + self.options.linger_s

    def _check(self, now: float) -> None:
        """Handle timeouts: records without an outcome, seals without successors."""
        self._former = [item for item in self._former if item.unsettled]
        awaiting = False
        for channel in self._channels.values():
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
        self._scan(queue for queue in self._queues() if queue.waiting)  # the lane of one may have become free

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
