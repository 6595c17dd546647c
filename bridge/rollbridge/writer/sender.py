"""Sender of plain writes: the channels of one connection, and what becomes of batches that a segment did not take.

One sender serves all plain writers of a connection with the same options.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, cast

from kio.schema.errors import ErrorCode
from kio.schema.produce.v12.response import PartitionProduceResponse

from rollbridge.base.deadlines import BackgroundCall, Backoff
from rollbridge.config import WriterOptions
from rollbridge.errors import (
    CorruptDataError,
    KafkaUnavailableError,
    NotAuthorizedError,
    NotFoundError,
    RollbridgeError,
    UnavailableError,
)
from rollbridge.kafka import errors as codes
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.dispatch import new_producer_id
from rollbridge.kafka.errors import Meaning, TopicNotFoundError
from rollbridge.kafka.fetch import Wanted, ask_batches
from rollbridge.kafka.metadata import Cluster, CodeError, Isolation
from rollbridge.kafka.offsets import ask_first_offset
from rollbridge.kafka.queues import PartitionQueue
from rollbridge.kafka.records import FetchedBatches
from rollbridge.kafka.sender import Sender, SenderLimits
from rollbridge.metadata.catalog import Catalog
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.names import Partition, show_partition
from rollbridge.stream.routing import StreamView
from rollbridge.writer import accumulator as faults
from rollbridge.writer.accumulator import Fault, ProducerBatch, StreamAccumulator
from rollbridge.writer.segments import SegmentPhase, SegmentQueue

# Search of sealed logs for batches of which no answer says whether they were written.
#
# If an answer was lost and the segment is sealed, the segment's log is read to find out which possibly persisted
# batches it holds. A broker may be silent for a whole request timeout, and a log may be long. So each :class:`Search`
# has a thread and a connection of its own; ``_SEARCHES_MAX`` run at a time, and those that met no broker go last.


logger = logging.getLogger(__name__)

_WAIT_MS: Final = 500


class OwnBatches:
    """Search for the batches of one producer in a sealed log of one partition, part by part.

    The log may have lost its beginning, which leaves a gap, or its end: if it has diverged, the search resumes where it
    did.

    Attributes:
        found: Base offset by base sequence, as far as the log was read.
        gap: First deleted offset that was to be read, and the one behind the last; None if there are none. The
            batches that stood there are unknown.
    """

    def __init__(
        self, partition: Partition, start: int, end: int, producer: tuple[int, int], epoch: int = NO_EPOCH
    ) -> None:
        """Prepare the search, reading nothing yet.

        Args:
            partition: Partition to search; nothing is appended below ``end`` any more.
            start: First offset to read.
            end: Offset before which to stop.
            producer: Producer id and epoch of the wanted batches: in each epoch sequence numbers begin at 0.
            epoch: Leader epoch of a record known to be below ``start``.
        """
        self.found: dict[int, int] = {}
        self.gap: tuple[int, int] | None = None
        self._partition = partition
        self._next = start
        self._end = end
        self._producer = producer
        self._epoch = epoch

    def read_on(self, cluster: Cluster) -> bool:
        """Read one part, about a megabyte at most; return whether the end was reached. May be repeated after an error.

        Args:
            cluster: Cluster that no other thread uses meanwhile.

        Raises:
            KafkaUnavailableError: No answer, or none now; ask again.
            CorruptDataError: The log ends before ``end``.
            TopicNotFoundError, NotAuthorizedError
        """
        if self._next >= self._end:
            return True
        raw = self._fetch(cluster)
        if raw is None:
            return self._next >= self._end
        after = self._next
        for header, _ in FetchedBatches(raw):
            after = max(after, header.base_offset + header.last_offset_delta + 1)
            producer = header.producer_id, header.producer_epoch
            if producer == self._producer and header.base_offset < self._end:
                self.found[header.base_sequence] = header.base_offset
        if after == self._next:
            raise KafkaUnavailableError(f"offset {self._next} of {show_partition(self._partition)} could not be read")
        self._next = after
        return after >= self._end

    def _fetch(self, cluster: Cluster) -> bytes | None:
        """Fetch from the next offset; return None if that offset has changed instead."""
        (topic, number), start, epoch = self._partition, self._next, self._epoch
        try:
            try:
                answer = ask_batches(cluster, Wanted(topic, number, start, epoch), _WAIT_MS, Isolation.READ_UNCOMMITTED)
            except CodeError as exc:
                if exc.code is not ErrorCode.offset_out_of_range:
                    raise
                self._skip_to(ask_first_offset(cluster, topic, number))
                return None
        except CodeError as exc:
            cluster.forget_leader(topic)
            raise _read_error(topic, exc.code) from exc
        if answer.diverging_epoch.end_offset >= 0:
            # The log lost its end and has grown since: the wanted batches may be in the new part.
            self._next, self._epoch = min(start, answer.diverging_epoch.end_offset), NO_EPOCH
            return None
        self._epoch = NO_EPOCH
        return answer.records or b""

    def _skip_to(self, first: int) -> None:
        """Continue at the first offset of a log that lacks the next one, and note the gap."""
        if first > self._next:
            low, high = self.gap or (self._next, first)
            self.gap = min(low, self._next), max(high, first)
        elif self._epoch == NO_EPOCH:
            name = show_partition(self._partition)
            raise CorruptDataError(f"topic {name} ends before offset {self._next}, and was sealed at {self._end}")
        self._next, self._epoch = first, NO_EPOCH


def _read_error(topic: str, code: ErrorCode) -> Exception:
    if code in (ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id):
        return TopicNotFoundError(f"topic {topic} does not exist", topic=topic)
    if codes.meaning(codes.READ, code) is Meaning.DENIED:
        return NotAuthorizedError(f"not allowed to read topic {topic}: {codes.name(code)}", resource=f"topic {topic}")
    return KafkaUnavailableError(f"topic {topic} cannot be read now: {codes.name(code)}")


_SEARCHES_MAX: Final = 8
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0


class Search:
    """Search for the possibly persisted batches of one queue; resumes where it stopped after a broker was away.

    Attributes:
        channel: Channel of the queue's stream.
        queue: Lane whose batches are searched.
        log: Batches found so far.
        not_before: Time before which it does not resume (``time.monotonic()``).
    """

    def __init__(
        self, channel: StreamAccumulator, queue: SegmentQueue[ProducerBatch], end: int, producer: tuple[int, int]
    ) -> None:
        self.channel = channel
        self.queue = queue
        self.log = OwnBatches(queue.target, queue.last_offset + 1, end, producer, queue.epoch)
        self.not_before = 0.0
        self._backoff = Backoff(_PAUSE_FIRST_S, _PAUSE_MAX_S)
        self._background_call: BackgroundCall[None] = BackgroundCall("rollbridge-writer-search")

    @property
    def under_way(self) -> bool:
        """True while its thread runs."""
        return self._background_call.under_way

    def go_on(
        self, new_cluster: Callable[[], Cluster], is_wanted: Callable[[], bool], done: Callable[[], object]
    ) -> None:
        """Read to the end on a thread, or until it is not wanted any more; that thread calls ``done`` afterwards."""

        def read() -> None:
            with new_cluster() as cluster:
                while is_wanted() and not self.log.read_on(cluster):
                    self._backoff.reset()

        self._background_call.begin(read, done)

    def has_ended(self) -> bool:
        """Return True once the log was read to the end; False also while a retry is due.

        Raises:
            RollbridgeError: The search cannot succeed.
        """
        if not self._background_call.done:
            return False
        try:
            self._background_call.take()
        except KafkaUnavailableError as fault:
            logger.info("segment.read_retried topic=%s reason=%s", self.queue.topic, fault)
            self.not_before = time.monotonic() + self._backoff.grow()
            return False
        return True


class Searches:
    """Searches of one connection; used by the engine's thread only."""

    def __init__(self, new_cluster: Callable[[], Cluster], done: Callable[[], object]) -> None:
        """Create without searches; ``done`` is called on a search's thread when that thread ends."""
        self._new_cluster = new_cluster
        self._done = done
        self._searches: dict[SegmentQueue[ProducerBatch], Search] = {}
        self._closed = False

    def turn(
        self, wanted: Iterable[tuple[StreamAccumulator, SegmentQueue[ProducerBatch]]], producer: tuple[int, int]
    ) -> Iterator[tuple[Search, RollbridgeError | None]]:
        """Start wanted searches, forget unwanted ones; yield those that have ended, with the fault if there is one."""
        queues = {queue: channel for channel, queue in wanted}
        for queue in [queue for queue in self._searches if queue not in queues]:
            del self._searches[queue]
        for queue, channel in queues.items():
            if queue not in self._searches and queue.sealed_end is not None:
                self._searches[queue] = Search(channel, queue, queue.sealed_end, producer)
        for queue, search in list(self._searches.items()):
            try:
                if not search.has_ended():
                    continue
                fault = None
            except RollbridgeError as why:
                fault = why
            del self._searches[queue]
            yield search, fault
        self._begin()

    def close(self) -> None:
        """Stop all searches; their threads end when a broker has answered or timed out."""
        self._closed = True
        self._searches.clear()

    def _begin(self) -> None:
        now = time.monotonic()
        waiting = [item for item in self._searches.values() if not item.under_way and item.not_before <= now]
        room = _SEARCHES_MAX - sum(item.under_way for item in self._searches.values())
        for search in sorted(waiting, key=lambda item: item.not_before)[: max(room, 0)]:
            search.go_on(self._new_cluster, lambda search=search: self._is_wanted(search), self._done)  # type: ignore[misc]

    def _is_wanted(self, search: Search) -> bool:
        return self._searches.get(search.queue) is search


_LOOK_AGAIN_S: Final = 1.0
"""Interval of reading the epochs again while a broker reports a seal that they do not show."""


class PlainSender(Sender[ProducerBatch]):
    """Sender of the batches of all channels of one connection.

    Attributes:
        options: Sizes, delays and limits.
    """

    def __init__(
        self,
        kafka: KafkaClient,
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
        with kafka.cluster() as cluster:
            producer = new_producer_id(cluster)
        super().__init__(
            kafka.cluster,
            SenderLimits(buffer_bytes=options.buffer_bytes, block_s=options.block_s),
            name="rollbridge-writer",
            producer=producer,
        )
        self._channels: dict[str, StreamAccumulator] = {}
        self._former: list[StreamAccumulator] = []
        """Channels of streams that are gone, while batches of theirs are in flight."""
        self._generation = -1
        self._looked_at = 0.0
        self._searches = Searches(kafka.cluster, self.wake)
        self.start()

    # What writers do ----------------------------------------------------------------------------------------------

    def channel(self, stream: str) -> StreamAccumulator:
        """Return the channel of a stream; a new one unless there is one that can be written.

        Raises:
            InvalidNameError, StreamNotFoundError, ZooKeeperUnavailableError.
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
            logger.info("stream.reread_failed stream=%s reason=%s", stream, fault)
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
                logger.info("stream.read_failed stream=%s reason=%s", stream, fault)
                self._generation = -1
                continue
            with self.lock:
                if not channel.is_of(view):
                    self._leave(channel)
                elif channel.is_outdated(view) and channel.failure is None:
                    channel.adopt(view)
                    self._scan(channel.stream_queues.active)
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
        logger.info('batches.unsent stream=%s batches=%d reason="stream deleted"', channel.stream, len(left))
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
        """Fail a batch whose outcome is unknown."""
        batch.doubtful = True
        self._fail(queue, batch, faults.unknown(queue.topic, codes.name(code)))

    def delayed(self, queue: PartitionQueue[ProducerBatch], code: ErrorCode) -> None:
        """Wait: the stream's record tells whether it was deleted."""

    def changed(self, queue: PartitionQueue[ProducerBatch]) -> None:
        """Drain a queue whose segment has ended, or mark it as ready."""
        segment = _segment(queue)
        if segment.stream_queues.closed:
            for batch in segment.stream_queues.withdraw(segment):
                self._lose(batch)
        elif segment.phase is SegmentPhase.ENDED and segment.stream_queues.drain():
            self._scan(segment.stream_queues.active)
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
        logger.warning("records.failed stream=%s records=%d reason=%s", batch.channel.stream, batch.count, fault())
        queue.drop(batch)
        self._give_up(batch, fault)

    def _forgotten(self, queue: PartitionQueue[ProducerBatch], batch: ProducerBatch) -> None:
        self._fail(queue, batch, faults.unknown(queue.topic, "the broker has forgotten this producer"))

    def _identify_denied(self, fault: NotAuthorizedError) -> None:
        """Retry: it was allowed when this sender was made."""

    # Turns of the thread ------------------------------------------------------------------------------------------

    def _queues(self) -> Iterable[SegmentQueue[ProducerBatch]]:
        return [queue for channel in self._all() for queue in channel.stream_queues.queues()]

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
            for queue in channel.stream_queues.queues():
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

    def _background_calls(self) -> None:
        """Search the logs of sealed segments for possibly persisted batches."""
        with self.lock:
            wanted = [
                (channel, item) for channel in self._channels.values() for item in channel.stream_queues.unresolved()
            ]
        for search, fault in self._searches.turn(wanted, self._dispatch.producer):
            self._resolve(search, fault)

    def _resolve(self, search: Search, fault: RollbridgeError | None) -> None:
        """Apply the result of a search in a sealed segment, or the reason why there is none."""
        channel, queue, log = search.channel, search.queue, search.log
        with self.lock:
            if fault is None:
                found, unknown = channel.stream_queues.resolve(queue, log.found, log.gap)
                why = "part of the segment is deleted"
            else:
                found, unknown = [], [batch for batch in queue.held() if batch.doubtful]
                why = str(fault)
            for batch, offset in found:
                logger.info("records.found topic=%s records=%d", queue.topic, batch.count)
                self.written(queue, batch, offset)
            for batch in unknown:
                self._fail(queue, batch, faults.unknown(queue.topic, why))
            self.changed(queue)
            self._scan(channel.stream_queues.active)
            self.pump()

    def _tell(self, batch: ProducerBatch) -> None:
        batch.tell()


def _segment(queue: PartitionQueue[ProducerBatch]) -> SegmentQueue[ProducerBatch]:
    """Return a queue as what all queues of this sender are."""
    return cast("SegmentQueue[ProducerBatch]", queue)
