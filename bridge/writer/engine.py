"""The engine of plain writes: requests under way to every broker, their answers, and what goes wrong with them.

One engine serves all plain writers of a connection: it has one producer id, one connection to each broker, one lock and
one thread. Whoever fills a batch sends it; the thread takes answers, sends what has lingered, and reads the logs of
sealed segments where an answer was lost. The thread waits for the brokers without the lock.

Up to five requests are under way to a broker. Each carries at most one batch for a segment, so the batches of a segment
are answered in the order in which they were sent.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kio.schema.produce.v12 import ProduceResponse
from kio.schema.produce.v12.response import PartitionProduceResponse

from bridge.client.catalog import Catalog
from bridge.client.routing import StreamView
from bridge.errors import (
    BackpressureError,
    InvalidRequestError,
    KafkaUnavailable,
    NotFoundError,
    OutcomeUnknown,
    RollbridgeError,
    UnavailableError,
)
from bridge.kafka import codes
from bridge.kafka.batches import stamped_header
from bridge.kafka.errors import ConnectionLostError, NotAuthorizedError
from bridge.kafka.idempotent import Verdict, new_producer_id, own_batches, verdict
from bridge.kafka.metadata import Cluster, CodeError, NodeId
from bridge.kafka.pipeline import PRODUCE_KEY, PRODUCE_VERSION, produce_body, request_start
from bridge.kafka.wire import Connection
from bridge.writer.batch import Batch
from bridge.writer.channel import Channel
from bridge.writer.lanes import Lane, Phase
from bridge.writer.options import WriterOptions

logger = logging.getLogger(__name__)

_REQUEST_BYTES: Final = 1 << 20
_REQUEST_BATCHES: Final = 500
_BACKOFF_FIRST_S: Final = 0.005
_BACKOFF_MAX_S: Final = 0.5
_HOLD_S: Final = 0.05
_LOOK_AGAIN_S: Final = 1.0
"""How often the epochs are read again while a broker says that a segment is sealed and they do not."""
_CHECK_S: Final = 0.5
_POLL_MAX_S: Final = 0.5


@dataclass(slots=True, eq=False)
class _Request:
    """Batches that travel together."""

    items: dict[str, tuple[Lane[Batch], Batch]]


@dataclass(slots=True, eq=False)
class _Link:
    """A connection to one broker, and the requests that wait for their answers."""

    connection: Connection
    requests: deque[_Request] = field(default_factory=deque)


class Engine:
    """Sends the batches of all channels of one connection.

    Attributes:
        lock: Guards everything here and in the channels.
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
            KafkaUnavailable: no broker answered.
        """
        self.options = options
        self.lock = threading.Lock()
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
        self._producer_id, self._producer_epoch = new_producer_id(self._cluster)
        self._renew = False
        self._start = request_start(None, int(options.request_timeout_s * 500))
        self._links: dict[NodeId, _Link] = {}
        self._channels: dict[str, Channel] = {}
        self._ready: dict[Lane[Batch], None] = {}
        self._settled: deque[Batch] = deque()
        self._generation = -1
        self._bytes = 0
        self._retry_at = 0.0
        self._held: dict[str, float] = {}
        self._backoff_s = 0.0
        self._looked_at = 0.0
        self._checked_at = 0.0
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rollbridge-writer", daemon=True)
        self._thread.start()

    # What writers do ----------------------------------------------------------------------------------------------

    def channel(self, stream: str) -> Channel:
        """The channel of a stream, a new one unless there is one that can be written.

        Raises:
            InvalidNameError, ScopeNotFound, StreamNotFound, ZooKeeperUnavailable.
        """
        view = self._catalog.view(stream)
        with self.lock:
            known = self._channels.get(stream)
            if known is None or known.failure is not None or not known.is_of(view):
                known = self._channels[stream] = Channel(self, view)
            return known

    def await_room(self) -> None:
        """Return once there is room for another batch; lets go of the lock, which is held, while it waits.

        Raises:
            BackpressureError: there was none in time.
        """
        if self._bytes < self.options.buffer_bytes:
            return
        self.pump()
        if not self._room.wait_for(self._has_room, self.options.block_s) or self._stopping:
            raise BackpressureError(
                f"the buffer of {self.options.buffer_bytes} bytes stayed full for {self.options.block_s:g} s: the "
                "brokers take nothing, or a segment's successors are awaited; this record was not written"
            )

    def opened(self, channel: Channel) -> None:
        """A batch was begun; the thread will close it when it has lingered."""
        if not self._wake.is_set():
            self._wake.set()

    def queued(self, lane: Lane[Batch], batch: Batch) -> None:
        """A batch was closed and put in line."""
        self._bytes += len(batch.data)
        self._ready[lane] = None
        self.pump()

    def replaced(self, batch: Batch, pieces: list[Batch]) -> None:
        """A batch was taken apart."""
        self._bytes += sum(len(piece.data) for piece in pieces)

    def read_again(self, stream: str) -> StreamView | None:
        """The stream as it is now; None if that can not be learned. Not under the lock."""
        try:
            return self._catalog.read(stream)
        except RollbridgeError as fault:
            logger.info("stream %s can not be read again: %s", stream, fault)
            return None

    def look(self) -> None:
        """Adopt what the catalog has learned; called by housekeeping after it has refreshed the catalog."""
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
                logger.info("stream %s can not be read now: %s", stream, fault)
                self._generation = -1
                continue
            if not channel.is_of(view):
                self._stop(channel, channel.gone)
            elif view.history != channel.view.history:
                with self.lock:
                    channel.adopt(view)
                    self._scan(channel)
                    self.pump()
        self._wake.set()

    def close(self, timeout_s: float) -> int:
        """Send what there is, for a limited time, and stop; gives how many records were not acknowledged."""
        deadline = time.monotonic() + timeout_s
        with self.lock:
            for channel in self._channels.values():
                channel.cut_older(float("inf"))
            self.pump()
            self._room.wait_for(lambda: not self._unsettled(), max(deadline - time.monotonic(), 0.0))
            left = self._unsettled()
            self._stopping = True
            self._room.notify_all()
        self._wake.set()
        self._thread.join()
        for channel in list(self._channels.values()):
            self._stop(channel, _closed)
            channel.failure = _closed_before
        self._tell()
        self._cluster.close()
        return left

    # Under the lock -------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send whatever may be sent now."""
        while self._ready and not self._renew and time.monotonic() >= self._retry_at:
            requests: dict[NodeId, _Request] = {}
            sizes: dict[NodeId, int] = {}
            for lane in tuple(self._ready):
                if not lane.may_send():
                    del self._ready[lane]  # it comes back when something changes
                    continue
                node = self._leader(lane)
                if node is None:
                    continue
                link = self._links.get(node)
                if link is not None and len(link.requests) >= self.options.in_flight_max:
                    continue
                request = requests.setdefault(node, _Request({}))
                size = sizes.get(node, 0)
                if len(request.items) < _REQUEST_BATCHES and size < _REQUEST_BYTES:
                    batch = lane.take()
                    request.items[lane.topic] = (lane, batch)
                    sizes[node] = size + len(batch.data)
            if not requests:
                return
            for node, request in requests.items():
                self._send(node, request)

    def _leader(self, lane: Lane[Batch]) -> NodeId | None:
        if self._held and time.monotonic() < self._held.get(lane.topic, 0.0):
            return None
        try:
            return self._cluster.leader(lane.topic, 0)
        except CodeError as exc:
            logger.info("the leader of %s is not known: %s", lane.topic, exc)
            if verdict(exc.code) is Verdict.DENIED:
                self._fail(lane, next(lane.held()), _denied(lane.topic, exc.code.name.upper()))
            self._hold(lane)
        except KafkaUnavailable as exc:
            logger.info("no broker can be asked now: %s", exc)
            self._back_off()
        return None

    def _send(self, node: NodeId, request: _Request) -> None:
        link = self._links.get(node)
        try:
            if link is None:
                connection = self._cluster.connection(node)
                connection.require(PRODUCE_KEY, PRODUCE_VERSION, "Produce")
                link = self._links[node] = _Link(connection)
        except RollbridgeError as fault:
            logger.info("a broker can not be reached now: %s", fault)
            for topic in request.items:
                self._cluster.forget_leader(topic)
            self._return(request, doubtful=False)
            self._back_off()
            return
        items = [
            (
                (lane.topic, 0),
                stamped_header(
                    batch.data,
                    producer_id=self._producer_id,
                    producer_epoch=self._producer_epoch,
                    base_sequence=batch.sequence,
                    transactional=False,
                ),
                batch.data,
            )
            for lane, batch in request.items.values()
        ]
        link.requests.append(request)
        try:
            link.connection.send_body(PRODUCE_KEY, PRODUCE_VERSION, produce_body(self._start, items))
        except ConnectionLostError as fault:
            self._lost(node, fault)

    def _receive(self, node: NodeId, link: _Link) -> None:
        """Take the answers that are there."""
        try:
            while link.requests and link.connection.has_answer():
                answer = link.connection.receive(ProduceResponse)
                request = link.requests.popleft()
                for topic in answer.responses:
                    for partition in topic.partition_responses:
                        lane, batch = request.items.pop(topic.name)
                        self._judge(lane, batch, partition)
                self._return(request, doubtful=True)  # a broker that leaves one out has lost it
        except ConnectionLostError as fault:
            self._lost(node, fault)

    def _judge(self, lane: Lane[Batch], batch: Batch, answer: PartitionProduceResponse) -> None:
        found = verdict(answer.error_code)
        if found is not Verdict.WRITTEN:
            logger.info("segment %s: a batch met %s", lane.topic, codes.name(answer.error_code))
        match found:
            case Verdict.WRITTEN:
                self._backoff_s = 0.0
                lane.acknowledge(batch, answer.base_offset + batch.count - 1)
                self._settle(batch, lambda: batch.written(lane, answer.base_offset))
            case Verdict.SEALED:
                lane.refuse(batch)
                self._catalog.suspect(batch.channel.stream)
            case Verdict.MISPLACED:
                lane.misplace(batch)
            case Verdict.RETRY | Verdict.MOVED | Verdict.DOUBTFUL:
                if found is not Verdict.RETRY:
                    self._cluster.forget_leader(lane.topic)
                lane.give_back(batch, doubtful=found is Verdict.DOUBTFUL)
                self._hold(lane)
            case Verdict.EXPIRED:
                self._renew = True
                lane.give_back(batch, doubtful=False)
            case Verdict.DENIED:
                self._fail(lane, batch, _denied(lane.topic, codes.name(answer.error_code)))
            case Verdict.REFUSED:
                self._fail(lane, batch, _refused(lane.topic, codes.name(answer.error_code), answer.error_message))
            case Verdict.UNKNOWN:
                batch.doubtful = True
                self._fail(lane, batch, _unknown(lane.topic, codes.name(answer.error_code)))
        self._after(lane, batch.channel)

    def _after(self, lane: Lane[Batch], channel: Channel) -> None:
        """A lane has changed: something may be handed over, or sent."""
        if lane.phase is Phase.ENDED and channel.course.drain():
            self._scan(channel)
        elif lane.may_send():
            self._ready[lane] = None

    def _scan(self, channel: Channel) -> None:
        """Find the lanes of a channel that may send."""
        for lane in channel.course.active:
            if lane.may_send():
                self._ready[lane] = None

    def _settle(self, batch: Batch, how: Callable[[], None]) -> None:
        if batch.settled:
            return  # it was given up before its answer came
        self._bytes -= len(batch.data)
        batch.channel.unsettled.pop(batch, None)
        how()
        self._settled.append(batch)
        self._room.notify_all()

    def _fail(self, lane: Lane[Batch], batch: Batch, fault: Callable[[], RollbridgeError]) -> None:
        """Give a batch up for good."""
        logger.warning("%d records of %s failed: %s", batch.count, batch.channel.stream, fault())
        lane.drop(batch)
        if batch.channel.refused is None:
            batch.channel.refused = fault
        self._settle(batch, lambda: batch.failed(fault))

    def _return(self, request: _Request, *, doubtful: bool) -> None:
        """Everything of a request has to be sent again."""
        for lane, batch in request.items.values():
            lane.give_back(batch, doubtful=doubtful)
            self._after(lane, batch.channel)
        request.items.clear()

    def _lost(self, node: NodeId, fault: ConnectionLostError) -> None:
        """A connection is gone; nobody knows what became of the requests on it."""
        logger.info("%s; what was under way is sent again", fault)
        link = self._links.pop(node)
        link.connection.close()
        for request in link.requests:
            for topic in request.items:
                self._cluster.forget_leader(topic)  # the broker may not come back, and the others know who leads then
            self._return(request, doubtful=True)
        self._back_off()

    def _hold(self, lane: Lane[Batch]) -> None:
        """Send nothing of a segment for a moment; the others go on."""
        now = time.monotonic()
        self._held = {topic: until for topic, until in self._held.items() if until > now}
        self._held[lane.topic] = now + _HOLD_S

    def _back_off(self) -> None:
        self._backoff_s = min(_BACKOFF_MAX_S, max(_BACKOFF_FIRST_S, self._backoff_s * 2))
        self._retry_at = time.monotonic() + self._backoff_s
        self._wake.set()

    def _has_room(self) -> bool:
        return self._bytes < self.options.buffer_bytes or self._stopping

    def _unsettled(self) -> int:
        return sum(channel.records for channel in self._channels.values())

    def _stop(self, channel: Channel, fault: Callable[[], RollbridgeError]) -> None:
        """Nothing more can be written to a stream."""
        with self.lock:
            if channel.failure is None:
                for batch in channel.stop(fault):
                    if channel.refused is None:
                        channel.refused = fault
                    self._settle(batch, lambda batch=batch: batch.failed(fault))  # type: ignore[misc]
            for lane in tuple(self._ready):
                if lane.course is channel.course:
                    del self._ready[lane]
        self._wake.set()

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:  # all writers depend on this thread
                logger.exception("plain writes met a defect and go on")
                time.sleep(_BACKOFF_MAX_S)
        with self.lock:
            for link in self._links.values():
                link.connection.close()
            self._links.clear()

    def _turn(self) -> None:
        """Wait for an answer, or for what has lingered, and do what is to be done then."""
        self._wait()
        with self.lock:
            self._wake.clear()
            now = time.monotonic()
            for node, link in list(self._links.items()):
                self._receive(node, link)
            for channel in self._channels.values():
                if channel.opened:
                    channel.cut_older(now - self.options.linger_s)
            if self._renew:
                self._renew_id()
            if now - self._checked_at >= _CHECK_S:
                self._checked_at = now
                self._check(now)
            self.pump()
            doubtful = [(channel, lane) for channel in self._channels.values() for lane in channel.course.unresolved()]
        for channel, lane in doubtful:
            self._resolve(channel, lane)
        self._tell()

    def _wait(self) -> None:
        with self.lock:
            links = [link.connection for link in self._links.values() if link.requests]
            if any(connection.has_answer() for connection in links):
                return
            now = time.monotonic()
            until = now + _POLL_MAX_S
            for channel in self._channels.values():
                for lane in channel.opened:
                    if lane.open is not None:
                        until = min(until, lane.open.opened_s + self.options.linger_s)
            if self._ready:
                until = min(until, max(self._retry_at, now + _BACKOFF_FIRST_S))
            if links:
                until = min(until, now + max(self.options.linger_s, _BACKOFF_FIRST_S))
        timeout_s = max(until - now, 0.0)
        if links:
            poller = select.poll()
            for connection in links:
                poller.register(connection, select.POLLIN)
            poller.poll(timeout_s * 1000)
        else:
            self._wake.wait(timeout_s)

    def _renew_id(self) -> None:
        """Take a new producer id, once nothing is under way or doubtful that the old one could recognise."""
        lanes = [lane for channel in self._channels.values() for lane in channel.course.lanes()]
        if any(lane.in_flight for lane in lanes):
            return
        for lane in lanes:
            for batch in tuple(lane.held()):
                if batch.doubtful:
                    self._fail(lane, batch, _unknown(lane.topic, "the broker has forgotten this producer"))
        try:
            self._producer_id, self._producer_epoch = new_producer_id(self._cluster)
        except RollbridgeError as fault:
            logger.info("a new producer id can not be had now: %s", fault)
            self._back_off()
            return
        self._renew = False
        for lane in lanes:
            lane.restart()
            if lane.may_send():
                self._ready[lane] = None

    def _check(self, now: float) -> None:
        """What takes too long: requests without an answer, records without a fate, seals without successors."""
        for node, link in list(self._links.items()):
            if link.requests and (link.connection.overdue() or not link.connection.in_flight):
                self._lost(node, ConnectionLostError(f"{link.connection.address} does not answer in time"))
        awaiting = False
        for channel in self._channels.values():
            for lane in channel.course.lanes():
                if lane.phase is Phase.REFUSED and lane.waiting:
                    awaiting = True
                    if now - self._looked_at >= _LOOK_AGAIN_S:
                        self._catalog.suspect(channel.stream)
                        lane.retry()
                        self._ready[lane] = None
                for batch in tuple(lane.held()):
                    if batch.opened_s + self.options.delivery_timeout_s < now and batch not in lane.in_flight:
                        self._fail(lane, batch, _late(lane.topic, self.options.delivery_timeout_s, batch.doubtful))
                        self._after(lane, channel)
        if awaiting and now - self._looked_at >= _LOOK_AGAIN_S:
            self._looked_at = now

    def _resolve(self, channel: Channel, lane: Lane[Batch]) -> None:
        """Read in a sealed segment what of a lane was written although no answer said so."""
        assert lane.sealed_end is not None
        cluster = self._new_cluster()
        try:
            written = own_batches(cluster, lane.topic, lane.last_offset + 1, lane.sealed_end, self._producer_id)
        except KafkaUnavailable as fault:
            logger.info("segment %s must be read to go on, which is tried again: %s", lane.topic, fault)
            time.sleep(_BACKOFF_FIRST_S)
            return
        except RollbridgeError as fault:
            why = str(fault)
            with self.lock:
                for batch in tuple(lane.held()):
                    if batch.doubtful:
                        self._fail(lane, batch, _unknown(lane.topic, why))
                self._after(lane, channel)
            return
        finally:
            cluster.close()
        with self.lock:
            for batch, offset in channel.course.resolve(lane, written):
                logger.info("%d records were in %s before it was sealed", batch.count, lane.topic)
                self._settle(batch, lambda batch=batch, offset=offset: batch.written(lane, offset))  # type: ignore[misc]
            self._scan(channel)
            self.pump()

    def _tell(self) -> None:
        """Tell the watchers of batches whose fate is known."""
        while self._settled:
            self._settled.popleft().tell()


def _denied(topic: str, code: str) -> Callable[[], RollbridgeError]:
    return lambda: NotAuthorizedError(
        f"not allowed to write to topic {topic} ({code}); the record was not written", resource=f"topic {topic}"
    )


def _refused(topic: str, code: str, detail: str | None) -> Callable[[], RollbridgeError]:
    why = f" ({detail})" if detail else ""
    return lambda: InvalidRequestError(f"topic {topic} refuses the record: {code}{why}; it was not written")


def _unknown(topic: str, why: str) -> Callable[[], RollbridgeError]:
    return lambda: OutcomeUnknown(
        f"the record may have been written to {topic} or not: {why}; read the segment to find out", transaction=""
    )


def _late(topic: str, timeout_s: float, doubtful: bool) -> Callable[[], RollbridgeError]:
    if doubtful:
        return _unknown(topic, f"no broker has answered for {timeout_s:g} s")
    return lambda: UnavailableError(
        f"the record could not be written to {topic} within {timeout_s:g} s; it was not written"
    )


def _closed_before() -> RollbridgeError:
    return InvalidRequestError("this connection is closed; connect again; the record was not written")


def _closed() -> RollbridgeError:
    return OutcomeUnknown("the connection was closed before the brokers had answered for this record", transaction="")
