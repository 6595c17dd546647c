"""Engine of plain writes: the channels of one connection, their shared state, and the thread that looks after them.

One engine serves all plain writers of a connection: it has one producer id, one connection to each broker, one lock and
one thread. A writing thread that fills a batch sends it, under the lock. The engine's thread, ``rollbridge-writer``,
processes answers and sends batches that have lingered. It never holds the lock while it waits for brokers, looks up
leaders, connects, or calls code of the user.

If an answer was lost and the segment is sealed, the segment's log is read to find out which possibly persisted batches
it holds. A broker may be silent for a whole request timeout, and a log may be long. So each :class:`Search` has a
thread and a connection of its own; ``_SEARCHES_MAX`` run at a time, and those that met no broker go last.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from rollbridge.calls import Backoff, Deadline, Errand
from rollbridge.errors import BackpressureError, KafkaUnavailableError, NotFoundError, RollbridgeError, UnavailableError
from rollbridge.kafka.errors import ConnectionLostError
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.pipeline import OwnBatches, new_producer_id
from rollbridge.model.routing import StreamView
from rollbridge.writer import accumulator as faults
from rollbridge.writer.accumulator import ProducerBatch, StreamAccumulator, WriterOptions
from rollbridge.writer.dispatch import BACKOFF_FIRST_S, BACKOFF_MAX_S, RequestDispatcher
from rollbridge.writer.lanes import PartitionQueue, SegmentPhase
from rollbridge.zookeeper.catalog import Catalog

# Searches of sealed logs for possibly persisted batches


logger = logging.getLogger(__name__)

_SEARCHES_MAX: Final = 8
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0


class Search:
    """Search for the possibly persisted batches of one lane; resumes where it stopped after a broker was away.

    Attributes:
        channel: Channel of the lane's stream.
        lane: Lane whose batches are searched.
        log: Batches found so far.
        not_before: Time before which it does not resume (``time.monotonic()``).
    """

    def __init__(
        self, channel: StreamAccumulator, lane: PartitionQueue[ProducerBatch], end: int, producer_id: int
    ) -> None:
        self.channel = channel
        self.lane = lane
        self.log = OwnBatches(lane.target, lane.last_offset + 1, end, producer_id, lane.epoch)
        self.not_before = 0.0
        self._backoff = Backoff(_PAUSE_FIRST_S, _PAUSE_MAX_S)
        self._errand: Errand[None] = Errand("rollbridge-writer-search")

    @property
    def under_way(self) -> bool:
        """True while its thread runs."""
        return self._errand.under_way

    def go_on(
        self, new_cluster: Callable[[], Cluster], is_wanted: Callable[[], bool], done: Callable[[], object]
    ) -> None:
        """Read to the end on a thread, or until it is not wanted any more; that thread calls ``done`` afterwards."""

        def read() -> None:
            with new_cluster() as cluster:
                while is_wanted() and not self.log.read_on(cluster):
                    self._backoff.reset()

        self._errand.begin(read, done)

    def has_ended(self) -> bool:
        """Return True once the log was read to the end; False also while a retry is due.

        Raises:
            RollbridgeError: The search cannot succeed.
        """
        if not self._errand.done:
            return False
        try:
            self._errand.take()
        except KafkaUnavailableError as fault:
            logger.info("segment %s must be read to go on, which is tried again: %s", self.lane.topic, fault)
            self.not_before = time.monotonic() + self._backoff.grow()
            return False
        return True


class Searches:
    """Searches of one connection; used by the engine's thread only."""

    def __init__(self, new_cluster: Callable[[], Cluster], done: Callable[[], object]) -> None:
        """Create without searches; ``done`` is called on a search's thread when that thread ends."""
        self._new_cluster = new_cluster
        self._done = done
        self._searches: dict[PartitionQueue[ProducerBatch], Search] = {}
        self._closed = False

    def turn(
        self, wanted: Iterable[tuple[StreamAccumulator, PartitionQueue[ProducerBatch]]], producer_id: int
    ) -> Iterator[tuple[Search, RollbridgeError | None]]:
        """Start wanted searches, forget unwanted ones; yield those that have ended, with the fault if there is one."""
        lanes = {lane: channel for channel, lane in wanted}
        for lane in [lane for lane in self._searches if lane not in lanes]:
            del self._searches[lane]
        for lane, channel in lanes.items():
            if lane not in self._searches and lane.sealed_end is not None:
                self._searches[lane] = Search(channel, lane, lane.sealed_end, producer_id)
        for lane, search in list(self._searches.items()):
            try:
                if not search.has_ended():
                    continue
                fault = None
            except RollbridgeError as why:
                fault = why
            del self._searches[lane]
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
        return self._searches.get(search.lane) is search


_LOOK_AGAIN_S: Final = 1.0
"""Interval of reading the epochs again while a broker reports a seal that they do not show."""
_CHECK_S: Final = 0.5
_POLL_MAX_S: Final = 0.5


class PlainSender:
    """Sender of the batches of all channels of one connection.

    Attributes:
        lock: Guards the engine, the dispatcher and the channels; held by each write.
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
        self.lock = threading.Lock()
        # Shares the lock, so a writer that waits for room lets the thread take answers. Notified when batches settle.
        self._room = threading.Condition(self.lock)
        self._catalog = catalog
        self._new_cluster: Callable[[], Cluster] = lambda: Cluster(
            bootstrap_servers,
            security=security,
            client_id=client_id,
            connect_timeout_s=min(10.0, options.request_timeout_s),
            request_timeout_s=options.request_timeout_s,
        )
        self._cluster = self._new_cluster()
        try:
            producer = new_producer_id(self._cluster)
        except BaseException:
            self._cluster.close()
            raise
        self._dispatch = RequestDispatcher(
            self._cluster,
            producer,
            options,
            suspect=catalog.suspect,
            settled=self._room.notify_all,
        )
        self.pump = self._dispatch.pump
        self._channels: dict[str, StreamAccumulator] = {}
        self._generation = -1
        self._looked_at = 0.0
        self._checked_at = 0.0
        self._wake = threading.Event()
        self._searches = Searches(self._new_cluster, self._wake.set)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rollbridge-writer", daemon=True)
        self._thread.start()

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

    def await_room(self) -> None:
        """Return once there is room for another batch. The caller holds the lock; waiting releases it.

        Raises:
            BackpressureError: There was no room within ``block_s``.
        """
        if self._dispatch.bytes < self.options.buffer_bytes:
            return
        self.pump()
        if not self._room.wait_for(self._has_room, self.options.block_s) or self._stopping:
            raise BackpressureError(
                f"the buffer of {self.options.buffer_bytes} bytes stayed full for {self.options.block_s:g} s: the "
                "brokers take nothing, or a segment's successors are awaited; this record was not written"
            )

    def opened(self, channel: StreamAccumulator) -> None:
        """Wake the thread, which closes the new batch once it has lingered."""
        if not self._wake.is_set():
            self._wake.set()

    def queued(self, lane: PartitionQueue[ProducerBatch], batch: ProducerBatch) -> None:
        """Send a batch that was closed and queued, if it may be sent now. The caller holds the lock."""
        self._dispatch.bytes += len(batch.data)
        self._dispatch.ready[lane] = None
        self.pump()
        if self._dispatch.ready:
            self._wake.set()

    def replaced(self, size: int, pieces: list[ProducerBatch]) -> None:
        """Correct the size of the buffer after a batch of ``size`` bytes was divided."""
        self._dispatch.bytes += sum(len(piece.data) for piece in pieces) - size

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
                    self._dispatch.scan(channel)
                    self.pump()
        self._wake.set()

    def close(self, timeout_s: float) -> int:
        """Send what is left within ``timeout_s`` and stop; return the number of records that were not acknowledged."""
        deadline = Deadline(timeout_s)
        with self.lock:
            for channel in self._channels.values():
                channel.cut_older(float("inf"))
            self.pump()
            self._room.wait_for(lambda: not self._unsettled(), deadline.left())
            left = self._unsettled()
            self._stopping = True
            self._room.notify_all()
        self._wake.set()
        # Not under the lock, which the thread needs to end. Afterwards nothing else uses the cluster.
        self._thread.join()
        self._searches.close()
        for channel in list(self._channels.values()):
            self._stop(channel, faults.closed)
            channel.failure = faults.closed_before
        self._tell()
        self._cluster.close()
        return left

    def _has_room(self) -> bool:
        return self._dispatch.bytes < self.options.buffer_bytes or self._stopping

    def _unsettled(self) -> int:
        return sum(channel.records for channel in self._channels.values())

    def _stop(self, channel: StreamAccumulator, fault: Callable[[], RollbridgeError]) -> None:
        """Fail all records of a stream, present and future, with ``fault``."""
        with self.lock:
            if channel.failure is None:
                for batch in channel.stop(fault):
                    self._dispatch.settle(batch, lambda batch=batch: batch.failed(fault))  # type: ignore[misc]
            for lane in tuple(self._dispatch.ready):
                if lane.course is channel.course:
                    del self._dispatch.ready[lane]
        self._wake.set()

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:  # all writers depend on this thread
                logger.exception("plain writes met a defect and go on")
                time.sleep(BACKOFF_MAX_S)
        with self.lock:
            for link in self._dispatch.links.values():
                link.connection.close()
            self._dispatch.links.clear()

    def _turn(self) -> None:
        """Wait for an answer or for a batch that has lingered, then do all work that is due."""
        self._wait()
        with self.lock:
            self._wake.clear()
            now = time.monotonic()
            for node, link in list(self._dispatch.links.items()):
                self._dispatch.receive(node, link)
            for channel in self._channels.values():
                if channel.opened:
                    channel.cut_older(now - self.options.linger_s)
            is_renewing = self._dispatch.expired and now >= self._dispatch.retry_at and self._let_go()
            if now - self._checked_at >= _CHECK_S:
                self._checked_at = now
                self._check(now)
            self.pump()
            is_cut_off = self._dispatch.is_cut_off
            doubtful = [(channel, lane) for channel in self._channels.values() for lane in channel.course.unresolved()]
        # Not under the lock: reaching brokers and a new producer id may wait, and watchers run code of the user.
        if is_cut_off:
            self._dispatch.reach(self.lock)
            with self.lock:
                self.pump()
        if is_renewing:
            self._renew_id()
        for search, fault in self._searches.turn(doubtful, self._dispatch.producer[0]):
            self._resolve(search, fault)
        self._tell()

    def _wait(self) -> None:
        with self.lock:
            links = [link.connection for link in self._dispatch.links.values() if link.requests]
            if any(connection.has_answer() for connection in links):
                return
            now = time.monotonic()
            until = now + _POLL_MAX_S
            for channel in self._channels.values():
                for lane in channel.opened:
                    if lane.open is not None:
                        until = min(until, lane.open.opened_s + self.options.linger_s)
            if self._dispatch.ready:
                until = min(until, max(self._dispatch.retry_at, now + BACKOFF_FIRST_S))
            if links:
                until = min(until, now + max(self.options.linger_s, BACKOFF_FIRST_S))
        timeout_s = max(until - now, 0.0)
        if links:
            poller = select.poll()
            for connection in links:
                poller.register(connection, select.POLLIN)
            poller.poll(timeout_s * 1000)
        else:
            self._wake.wait(timeout_s)

    def _lanes(self) -> list[PartitionQueue[ProducerBatch]]:
        return [lane for channel in self._channels.values() for lane in channel.course.lanes()]

    def _let_go(self) -> bool:
        """Fail batches that only the old producer id could identify; return False while any are in flight."""
        lanes = self._lanes()
        if any(lane.in_flight for lane in lanes):
            return False
        for lane in lanes:
            for batch in tuple(lane.held()):
                if batch.doubtful:
                    fault = faults.unknown(lane.topic, "the broker has forgotten this producer")
                    self._dispatch.fail(lane, batch, fault)
        return True

    def _renew_id(self) -> None:
        """Get a new producer id; nothing is sent before there is one.

        The broker is asked without the lock, because it may be silent for long and writing threads hold the lock.
        """
        try:
            # Ask once, without retries: this thread serves all writers, and comes back by itself.
            producer = new_producer_id(self._cluster, timeout_s=0.0)
        except RollbridgeError as fault:
            logger.info("a new producer id cannot be had now: %s", fault)
            with self.lock:
                self._dispatch.back_off()
            return
        with self.lock:
            self._dispatch.producer = producer
            self._dispatch.expired = False
            for lane in self._lanes():
                lane.restart()
                if lane.may_send():
                    self._dispatch.ready[lane] = None
            self.pump()

    def _check(self, now: float) -> None:
        """Handle timeouts: requests without an answer, records without an outcome, seals without successors."""
        for node, link in list(self._dispatch.links.items()):
            if link.requests and (link.connection.overdue() or not link.connection.in_flight):
                self._dispatch.lost(node, ConnectionLostError(f"{link.connection.address} does not answer in time"))
        awaiting = False
        for channel in [item for item in self._channels.values() if item.failure is None]:
            for lane in channel.course.lanes():
                if lane.phase is SegmentPhase.REFUSED and lane.waiting:
                    awaiting = True
                    if now - self._looked_at >= _LOOK_AGAIN_S:
                        self._catalog.suspect(channel.stream)
                        lane.retry()
                        self._dispatch.ready[lane] = None
                for batch in tuple(lane.held()):
                    if batch.opened_s + self.options.delivery_timeout_s < now and batch not in lane.in_flight:
                        self._dispatch.fail(
                            lane, batch, faults.late(lane.topic, self.options.delivery_timeout_s, batch.doubtful)
                        )
                        self._dispatch.after(lane, channel)
        if awaiting and now - self._looked_at >= _LOOK_AGAIN_S:
            self._looked_at = now

    def _resolve(self, search: Search, fault: RollbridgeError | None) -> None:
        """Apply the result of a search in a sealed segment, or the reason why there is none."""
        channel, lane, log = search.channel, search.lane, search.log
        with self.lock:
            if fault is None:
                found, unknown = channel.course.resolve(lane, log.found, log.gap)
                why = "part of the segment is deleted"
            else:
                found, unknown = [], [batch for batch in lane.held() if batch.doubtful]
                why = str(fault)
            for batch, offset in found:
                logger.info("%d records were in %s before it was sealed", batch.count, lane.topic)
                self._dispatch.settle(batch, lambda batch=batch, offset=offset: batch.written(lane, offset))  # type: ignore[misc]
            for batch in unknown:
                self._dispatch.fail(lane, batch, faults.unknown(lane.topic, why))
            self._dispatch.after(lane, channel)
            self._dispatch.scan(channel)
            self.pump()

    def _tell(self) -> None:
        """Notify the watchers of settled batches; called without the lock."""
        settled = self._dispatch.settled
        while settled:
            settled.popleft().tell()
