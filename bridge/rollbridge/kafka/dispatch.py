"""Dispatcher: sending of batches to their brokers, and the consequences of the answers. Runs under its sender's lock.

Up to five requests are in flight to a broker. Each carries at most one batch per partition, so batches of a partition
are answered in the order in which they were sent.

Where the log may have to be searched for possibly persisted batches, its leader is asked for its end before the first
batch, over the same connection and for all such partitions at once: the search begins there, not at offset 0.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Generic, assert_never

from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v5 import InitProducerIdRequest, InitProducerIdResponse
from kio.schema.list_offsets.v7 import ListOffsetsResponse
from kio.schema.produce.v12 import ProduceResponse
from kio.schema.produce.v12.response import PartitionProduceResponse
from kio.schema.types import ProducerId
from kio.static.primitive import i16, i32Timedelta

from rollbridge.base.avro import encode_unsigned
from rollbridge.base.deadlines import Backoff, Deadline
from rollbridge.base.logs import limited
from rollbridge.errors import KafkaUnavailableError, RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.connection import Buffer, Connection
from rollbridge.kafka.errors import ConnectionLostError, Meaning, NotAuthorizedError
from rollbridge.kafka.metadata import LATEST, Cluster, Isolation, NodeId, offsets_request
from rollbridge.kafka.queues import P, PartitionQueue
from rollbridge.kafka.records import HEADER_BYTES, RawBatch, stamped_header
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.names import Partition

# Build Produce requests around ready-made batches, with their producer ids.  Source: KIP-98 (idempotent producer),
# KIP-890 (a partition joins a transaction with its first Produce v12 request). A producer without a transactional id
# gets a new producer id with each request for one.


PRODUCE_KEY: Final = 0
PRODUCE_VERSION: Final = 12
# Brokers remember the last five batches of a producer per partition: with more in flight, a retry of the oldest would
# no longer be recognised.
IN_FLIGHT_MAX: Final = 5
# Size at which a request is sent rather than extended by the next batch: large requests gain from an early start.
REQUEST_BYTES: Final = 1 << 20
REQUEST_BATCHES: Final = 500
_ACKS_ALL: Final = -1
_PAUSE_S: Final = 0.05


def request_start(transactional_id: str | None, broker_timeout_ms: int) -> bytes:
    """Encode the first fields of Produce v12: transactional id, acks=all, and the time-out for the replicas.

    ``transactional_id`` is None for a producer without transactions.
    """
    name = b"" if transactional_id is None else transactional_id.encode()
    length = 0 if transactional_id is None else len(name) + 1
    return encode_unsigned(length) + name + struct.pack(">hi", _ACKS_ALL, broker_timeout_ms)


def produce_body(start: bytes, items: Iterable[tuple[Partition, bytes, RawBatch]]) -> list[Buffer]:
    """Return the body of Produce v12: ``start``, then the batches, given as partition, new header and whole batch."""
    topics: dict[str, list[tuple[int, bytes, RawBatch]]] = {}
    for (topic, partition), header, batch in items:
        topics.setdefault(topic, []).append((partition, header, batch))
    parts: list[Buffer] = []
    glue = bytearray(start + encode_unsigned(len(topics) + 1))
    for topic, batches in topics.items():
        name = topic.encode()
        glue += encode_unsigned(len(name) + 1) + name + encode_unsigned(len(batches) + 1)
        for partition, header, batch in batches:
            glue += struct.pack(">i", partition) + encode_unsigned(len(batch) + 1) + header
            parts += (bytes(glue), memoryview(batch)[HEADER_BYTES:])
            glue = bytearray(b"\0")
        glue += b"\0"
    glue += b"\0"
    parts.append(bytes(glue))
    return parts


def new_producer_id(cluster: Cluster, timeout_s: float = 30.0) -> tuple[int, int]:
    """Allocate a producer id; return it and its epoch.

    Retries while a broker that has just started has no ids to allocate.

    Raises:
        KafkaUnavailableError: No broker gave one within ``timeout_s``; ask again.
        NotAuthorizedError: The principal may write to no topic.
    """
    request = InitProducerIdRequest(
        transactional_id=None,
        transaction_timeout=i32Timedelta.parse(timedelta(milliseconds=0)),
        producer_id=ProducerId(-1),
        producer_epoch=i16(-1),
    )
    deadline = Deadline(timeout_s)
    while True:
        answer = cluster.ask_any(request, InitProducerIdResponse)
        if answer.error_code == ErrorCode.none:
            return answer.producer_id, answer.producer_epoch
        meaning = codes.meaning(codes.INIT, answer.error_code)
        if meaning is Meaning.DENIED:
            raise NotAuthorizedError(
                f"not allowed to write idempotently: {codes.name(answer.error_code)}", resource="cluster"
            )
        if meaning not in (Meaning.RETRY, Meaning.REFRESH) or deadline.passed():
            raise KafkaUnavailableError(f"no broker gave a producer id: {codes.name(answer.error_code)}")
        time.sleep(_PAUSE_S)


logger = logging.getLogger(__name__)
_retries = limited(logger.getChild("retries"))
"""For what is tried again many times a second."""

BACKOFF_FIRST_S: Final = 0.005
BACKOFF_MAX_S: Final = 0.5
LOOK_AGAIN_S: Final = 1.0
"""Time for which a broker may repeat a retriable error before metadata is refreshed."""


@dataclass(slots=True, eq=False)
class BatchRequest(Generic[P]):
    """Produce request in flight: queue and batch by partition."""

    items: dict[Partition, tuple[PartitionQueue[P], P]]
    sent_at: float = 0.0


@dataclass(slots=True, eq=False)
class EndInquiry(Generic[P]):
    """ListOffsets request in flight, for the log ends of queues that have sent nothing yet, by partition."""

    queues: dict[Partition, PartitionQueue[P]]


@dataclass(slots=True, eq=False)
class BrokerLink(Generic[P]):
    """Connection to one broker, and its requests in flight. Only the dispatcher closes it."""

    connection: Connection
    requests: deque[BatchRequest[P] | EndInquiry[P]] = field(default_factory=deque)


class BatchOwner(ABC, Generic[P]):
    """Owner of queues: decides what becomes of the batches that brokers have answered for. Called under the lock."""

    @abstractmethod
    def written(self, queue: PartitionQueue[P], batch: P, base_offset: int) -> None:
        """Settle a batch that was written at ``base_offset``; it is in the queue no more."""

    @abstractmethod
    def too_large(self, queue: PartitionQueue[P], batch: P, answer: PartitionProduceResponse) -> None:
        """Deal with a batch in flight that is larger than the topic takes: it is sealed, or its limit was lowered."""

    @abstractmethod
    def refused(self, queue: PartitionQueue[P], batch: P, answer: PartitionProduceResponse) -> None:
        """Deal with a batch in flight that the broker rejects, as it always will."""

    @abstractmethod
    def denied(self, queue: PartitionQueue[P], batch: P, code: ErrorCode) -> None:
        """Deal with a batch that the principal may not write."""

    @abstractmethod
    def unclear(self, queue: PartitionQueue[P], batch: P, code: ErrorCode) -> None:
        """Deal with a batch in flight of which the answer does not tell whether it was written."""

    @abstractmethod
    def fenced(self, queue: PartitionQueue[P], batch: P, code: ErrorCode) -> None:
        """Deal with a batch in flight that was not written: the broker does not accept the producer any more."""

    @abstractmethod
    def out_of_order(self, queue: PartitionQueue[P], batch: P) -> None:
        """Deal with a batch that was out of order and needs another epoch; it is in the queue again."""

    @abstractmethod
    def delayed(self, queue: PartitionQueue[P], code: ErrorCode) -> None:
        """Take note of why a queue cannot be written now; it is tried again."""

    @abstractmethod
    def pause_s(self, code: ErrorCode) -> float:
        """Return for how long such a queue is left alone."""

    @abstractmethod
    def lost(self, fault: ConnectionLostError) -> None:
        """Take note of a lost connection; what was in flight on it is in its queues again, possibly persisted."""

    @abstractmethod
    def unreached(self, fault: RollbridgeError) -> None:
        """Take note of a broker that could not be reached; it is tried again."""

    @abstractmethod
    def changed(self, queue: PartitionQueue[P]) -> None:
        """React to a queue from which a batch has gone, or to which one came back."""


class Dispatcher(Generic[P]):
    """Sender of batches and receiver of answers.

    Attributes:
        producer: Producer id and epoch.
        expired: True if a new producer id is needed.
        links: Open connections; only :meth:`reach` adds one.
        ready: Queues that may have something to send.
        retry_at: End of the back-off after a fault of the cluster (monotonic seconds); nothing is sent before.
        in_flight_max: Most requests in flight to one broker.
    """

    def __init__(
        self,
        cluster: Cluster,
        owner: BatchOwner[P],
        producer: tuple[int, int] | None,
        *,
        in_flight_max: int,
        transactional_id: str | None = None,
        dial: Callable[[NodeId], Connection] | None = None,
        is_usable: Callable[[Connection], bool] = lambda connection: connection.usable(),
    ) -> None:
        """Start with nothing to send.

        Args:
            cluster: Cluster for exclusive use; brokers wait for replicas half as long as it waits for their answers.
            owner: Owner of the queues.
            producer: Producer id and epoch; None if one is to be got.
            in_flight_max: Most requests in flight to one broker.
            transactional_id: Makes the batches part of a native transaction.
            dial: Returns a connection to a broker, by default a new one; the dispatcher owns it from then on.
            is_usable: Returns whether a connection with nothing in flight may be used again.
        """
        self.producer = producer or (-1, -1)
        self.expired = producer is None
        self.links: dict[NodeId, BrokerLink[P]] = {}
        self.ready: dict[PartitionQueue[P], None] = {}
        self.retry_at = 0.0
        self.retries = 0
        self._cluster = cluster
        self._owner = owner
        self.in_flight_max = in_flight_max
        self._is_transactional = transactional_id is not None
        self._dial = dial or (lambda node: cluster.dial(cluster.broker(node)))
        self._is_usable = is_usable
        # The broker gives up waiting for its replicas before we give up waiting for the broker.
        self._start = request_start(transactional_id, int(cluster.request_timeout_s * 500))
        self._held: dict[Partition, float] = {}
        self._backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
        self._backoffs: dict[NodeId, Backoff] = {}
        """Of brokers that have failed since they last answered."""
        self._failing: dict[Partition, tuple[ErrorCode, float]] = {}
        """Last answer for partitions that refuse for the moment, and since when it has been the same."""
        self._unknown: dict[Partition, PartitionQueue[P]] = {}
        self._unreached: set[NodeId] = set()
        self._asked: set[PartitionQueue[P]] = set()
        self._is_closed = False

    @property
    def is_cut_off(self) -> bool:
        """True if :meth:`reach` has work: leaders to look up or brokers to connect to."""
        return bool(self._unknown or self._unreached)

    def reach(self, lock: AbstractContextManager[object]) -> None:
        """Look up unknown leaders, and connect to brokers for which batches wait.

        Both may take as long as a broker is silent, so neither is done under the lock, which writing threads hold, and
        a broker that cannot be reached keeps none of the others waiting. One thread at a time may call this.
        """
        with lock:
            if not self.is_cut_off or time.monotonic() < self.retry_at:
                return
            queues, self._unknown = self._unknown, {}
            nodes, self._unreached = self._unreached, set()
            for target in queues:
                if self._cluster.known_leader(*target) is None:
                    self._cluster.forget_leader(*target)
        try:
            missing = self._cluster.learn(topic for topic, _ in queues)
        except RollbridgeError as fault:
            logger.info("leaders.unavailable reason=%s", fault)
            with lock:
                self.back_off()
                self._owner.unreached(fault)
            return
        with lock:
            for target, queue in queues.items():
                node = self._cluster.known_leader(*target)
                if node is None:
                    self._missing(queue, missing.get(target[0], ErrorCode.leader_not_available))
                else:
                    nodes.add(node)
            nodes = {node for node in nodes if self._is_unreached(node)}
            for node in nodes:
                self._close(node)  # it is gone, or too old
        for node in sorted(nodes, key=lambda node: (node in self._backoffs, node)):  # those that failed come last
            if not self._is_closed:
                self._open(node, lock)

    def _open(self, node: NodeId, lock: AbstractContextManager[object]) -> None:
        """Connect to a broker; if that fails, its queues are left alone for a moment."""
        try:
            connection = self._dial(node)
            try:
                connection.require(PRODUCE_KEY, PRODUCE_VERSION, "Produce")
            except RollbridgeError:
                connection.close()
                raise
        except RollbridgeError as fault:
            logger.info("broker.unreachable broker=%d reason=%s", node, fault)
            with lock:
                led = [queue for queue in self.ready if self._cluster.known_leader(*queue.target) == node]
                self._put_off(node, led)
                self._owner.unreached(fault)
            return
        with lock:
            if self._is_closed:
                connection.close()
            else:
                self.links[node] = BrokerLink(connection)

    def _is_unreached(self, node: NodeId) -> bool:
        """Return True if a broker needs a new connection: not while answers are awaited on the present one."""
        link = self.links.get(node)
        return link is None or not (link.requests or self._is_usable(link.connection))

    def _put_off(self, node: NodeId, queues: Iterable[PartitionQueue[P]]) -> None:
        """Leave queues of a broker that failed alone, for longer each time, and look up who leads them then.

        It may stay away, and other brokers know its successor.
        """
        until = time.monotonic() + self._backoffs.setdefault(node, Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)).grow()
        for queue in queues:
            self._cluster.forget_leader(*queue.target)
            self._held[queue.target] = max(until, self._held.get(queue.target, 0.0))

    def _close(self, node: NodeId) -> None:
        link = self.links.pop(node, None)
        if link is not None:
            link.connection.close()

    def close(self) -> None:
        """Close all connections, for good."""
        self._is_closed = True
        for node in tuple(self.links):
            self._close(node)

    def reset(self, queues: Iterable[PartitionQueue[P]]) -> None:
        """Give up all connections, after a defect; what was in flight in these queues is sent again."""
        for node in tuple(self.links):
            self._close(node)
        self._asked.clear()
        self.back_off()
        for queue in queues:
            for batch in tuple(queue.in_flight):
                queue.give_back(batch, doubtful=True)
            self._owner.changed(queue)

    def _missing(self, queue: PartitionQueue[P], code: ErrorCode) -> None:
        _retries.info("leader.unknown topic=%s error=%s", queue.topic, codes.name(code))
        batch = next(iter(queue.held()), None)
        if codes.meaning(codes.PRODUCE, code) is Meaning.DENIED and batch is not None:
            self._owner.denied(queue, batch, code)
        else:
            self._owner.delayed(queue, code)
        self._hold(queue, code)

    def note(self, queue: PartitionQueue[P]) -> None:
        """Take note of a queue that has changed, if it has something that may be sent."""
        if queue.may_send():
            self.ready[queue] = None

    def pump(self) -> None:
        """Send what may be sent now over existing connections; the rest waits for :meth:`reach`."""
        while self.ready and not self.expired and time.monotonic() >= self.retry_at:
            requests: dict[NodeId, BatchRequest[P]] = {}
            inquiries: dict[NodeId, EndInquiry[P]] = {}
            sizes: dict[NodeId, int] = {}
            for queue in tuple(self.ready):
                if queue in self._asked or not queue.may_send():
                    del self.ready[queue]  # put back when its state changes
                    continue
                node = self._leader(queue)
                if node is None:
                    continue
                link = self.links.get(node)
                if link is not None and link.requests and not self._has_room(link):
                    continue
                if not queue.placed:
                    inquiries.setdefault(node, EndInquiry({})).queues[queue.target] = queue
                    continue
                request = requests.setdefault(node, BatchRequest({}))
                size = sizes.get(node, 0)
                if len(request.items) < REQUEST_BATCHES and size < REQUEST_BYTES:
                    batch = queue.take()
                    self.retries += batch.is_sent
                    batch.is_sent = True
                    request.items[queue.target] = (queue, batch)
                    sizes[node] = size + len(batch.data)
            if not requests and not inquiries:
                return
            for node, inquiry in inquiries.items():
                self._inquire(node, inquiry)
            for node, request in requests.items():
                self._send(node, request)

    def is_free(self, queue: PartitionQueue[P]) -> bool:
        """Return True if the broker of a queue is connected and has nothing in flight."""
        node = self._cluster.known_leader(*queue.target)
        link = None if node is None else self.links.get(node)
        return link is not None and not link.requests

    def drop_closed(self, readable: set[int]) -> None:
        """Drop connections that brokers have closed: readable ones on which no answer is awaited."""
        for node, link in list(self.links.items()):
            if not link.requests and link.connection.fileno() in readable and not link.connection.alive():
                self._close(node)

    def _has_room(self, link: BrokerLink[P]) -> bool:
        return len(link.requests) < self.in_flight_max and not link.connection.expired()

    def _leader(self, queue: PartitionQueue[P]) -> NodeId | None:
        if self._held and time.monotonic() < self._held.get(queue.target, 0.0):
            return None
        node = self._cluster.known_leader(*queue.target)
        if node is None:
            self._unknown[queue.target] = queue
            return None
        if self._is_unreached(node):
            self._unreached.add(node)  # a new connection, as the present one is gone or too old
            return None
        return node

    def _link(self, node: NodeId) -> BrokerLink[P] | None:
        return None if self._is_unreached(node) else self.links[node]

    def _inquire(self, node: NodeId, inquiry: EndInquiry[P]) -> None:
        """Ask for the ends of logs; their queues send nothing until the answer."""
        link = self._link(node)
        if link is None:
            return
        self._asked.update(inquiry.queues.values())
        for queue in inquiry.queues.values():
            self.ready.pop(queue, None)
        link.requests.append(inquiry)
        try:
            link.connection.send(offsets_request(LATEST, Isolation.READ_UNCOMMITTED, inquiry.queues))
        except ConnectionLostError as fault:
            self.lost(node, fault)

    def _send(self, node: NodeId, request: BatchRequest[P]) -> None:
        link = self._link(node)
        if link is None:
            self._return(request, doubtful=False)
            return
        items = [
            _item(queue, batch, self.producer, transactional=self._is_transactional)
            for queue, batch in request.items.values()
        ]
        link.requests.append(request)
        request.sent_at = time.monotonic()
        try:
            link.connection.send_body(PRODUCE_KEY, PRODUCE_VERSION, produce_body(self._start, items))
        except ConnectionLostError as fault:
            self.lost(node, fault)

    def receive(self, node: NodeId, link: BrokerLink[P]) -> None:
        """Process the answers that have arrived."""
        try:
            while link.requests and link.connection.has_answer():
                request = link.requests[0]
                if isinstance(request, EndInquiry):
                    self._place(request, link.connection.receive(ListOffsetsResponse))
                    link.requests.popleft()
                    continue
                answer = link.connection.receive(ProduceResponse)
                link.requests.popleft()
                self._backoffs.pop(node, None)
                for topic in answer.responses:
                    for partition in topic.partition_responses:
                        queue, batch = request.items.pop((topic.name, partition.index))
                        self._judge(queue, batch, partition, request.sent_at)
                self._return(request, doubtful=True)  # a batch left out of the answer counts as lost
        except ConnectionLostError as fault:
            self.lost(node, fault)

    def _place(self, inquiry: EndInquiry[P], answer: ListOffsetsResponse) -> None:
        """Record the ends of logs. Errors that would persist are left to the batches, whose answers tell the reason."""
        for name, found in ((topic.name, found) for topic in answer.topics for found in topic.partitions):
            queue = inquiry.queues.get((name, found.partition_index))
            if queue is None:
                continue
            meaning = codes.meaning(codes.READ, found.error_code)
            if meaning is Meaning.DONE:
                queue.place(int(found.offset), int(found.leader_epoch))
            elif meaning in (Meaning.RETRY, Meaning.REFRESH):
                logger.info("log_end.unavailable topic=%s error=%s", queue.topic, codes.name(found.error_code))
                if meaning is Meaning.REFRESH or self._keeps_failing(queue, found.error_code, time.monotonic()):
                    self._cluster.forget_leader(*queue.target)
                self._hold(queue, found.error_code)
            else:
                queue.place(0, NO_EPOCH)
        self._end(inquiry)

    def _end(self, inquiry: EndInquiry[P]) -> None:
        """Release the queues of an answered or lost request; those without an answer will ask again."""
        for queue in inquiry.queues.values():
            self._asked.discard(queue)
            self.note(queue)

    def _keeps_failing(self, queue: PartitionQueue[P], code: ErrorCode, asked_at: float) -> bool:
        """Return True if a queue got the same error for so long that its leader must be asked for again.

        A broker that is cut off from the others remains leader in its own view, and its view of the cluster is old. Its
        first answer may be late, too.
        """
        now = time.monotonic()
        before, since = self._failing.get(queue.target, (code, asked_at))
        if before is not code:
            since = asked_at
        is_over = now - since >= LOOK_AGAIN_S
        self._failing[queue.target] = code, now if is_over else since
        return is_over

    def _judge(self, queue: PartitionQueue[P], batch: P, answer: PartitionProduceResponse, sent_at: float) -> None:
        code = answer.error_code
        meaning = codes.meaning(codes.PRODUCE, code)
        if meaning is not Meaning.DONE:
            _retries.info("batch.retried topic=%s error=%s", queue.topic, codes.name(code))
        match meaning:
            case Meaning.DONE if answer.base_offset >= 0:
                self._backoff.reset()
                self._failing.pop(queue.target, None)
                queue.acknowledge(batch, answer.base_offset + batch.count - 1)
                self._owner.written(queue, batch, answer.base_offset)
            case Meaning.DONE | Meaning.RETRY | Meaning.REFRESH:
                # An acknowledgement without an offset does not prove that the batch was written; sending it again will
                # tell, with the offset.
                is_doubtful = meaning is Meaning.DONE or code in codes.POSSIBLY_PERSISTED
                if is_doubtful or meaning is Meaning.REFRESH or self._keeps_failing(queue, code, sent_at):
                    self._cluster.forget_leader(*queue.target)
                queue.give_back(batch, doubtful=is_doubtful)
                self._hold(queue, code)
                self._owner.delayed(queue, code)
            case Meaning.FOLLOW_UP:
                if queue.misplace(batch):
                    self._owner.out_of_order(queue, batch)
            case Meaning.REFUSED if code in codes.TOO_LARGE:
                self._owner.too_large(queue, batch, answer)
            case Meaning.REFUSED if code is not ErrorCode.unknown_producer_id:
                self._owner.refused(queue, batch, answer)
            case Meaning.REFUSED | Meaning.FENCED | Meaning.EXPIRED:
                self._owner.fenced(queue, batch, code)
            case Meaning.DENIED:
                self._owner.denied(queue, batch, code)
            case Meaning.UNKNOWN:
                self._owner.unclear(queue, batch, code)
            case never:
                assert_never(never)
        self._owner.changed(queue)

    def _return(self, request: BatchRequest[P], *, doubtful: bool) -> None:
        """Give all batches of a request back to their queues, to be sent again."""
        for queue, batch in request.items.values():
            queue.give_back(batch, doubtful=doubtful)
            self._owner.changed(queue)
        request.items.clear()

    def lost(self, node: NodeId, fault: ConnectionLostError) -> None:
        """Drop a connection; the outcome of its requests is unknown."""
        logger.info("requests.resent reason=%s", fault)
        link = self.links[node]
        self._close(node)
        queues: list[PartitionQueue[P]] = []
        for request in link.requests:
            if isinstance(request, EndInquiry):
                queues += request.queues.values()
                self._end(request)
            else:
                queues += [queue for queue, _ in request.items.values()]
                self._return(request, doubtful=True)
        self._put_off(node, queues)
        self._owner.lost(fault)

    def due(self) -> float:
        """Return the time at which a queue that is left alone may be tried again; infinite if there is none."""
        return min((self._held.get(queue.target, math.inf) for queue in self.ready), default=math.inf)

    def next_attempt_s(self, now: float) -> float:
        """Return the time at which something is tried again; infinite if only answers are awaited."""
        if not self.ready and not self.is_cut_off:
            return math.inf
        soon = max(self.retry_at, now + BACKOFF_FIRST_S)
        if self.is_cut_off:
            return soon
        return max(soon, min(self._held.get(queue.target, 0.0) for queue in self.ready))

    def _hold(self, queue: PartitionQueue[P], code: ErrorCode) -> None:
        """Pause a queue briefly; others are not affected."""
        now = time.monotonic()
        self._held = {target: until for target, until in self._held.items() if until > now}
        pause_s = self._owner.pause_s(code)
        if pause_s > 0:
            self._held[queue.target] = now + pause_s

    def back_off(self) -> None:
        self.retry_at = time.monotonic() + self._backoff.grow()


def _item(
    queue: PartitionQueue[P], batch: P, producer: tuple[int, int], *, transactional: bool
) -> tuple[Partition, bytes, RawBatch]:
    """Return a batch as it is sent: its partition, its header and its data."""
    producer_id, epoch = producer
    header = stamped_header(
        batch.data,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=batch.sequence,
        transactional=transactional,
    )
    return queue.target, header, batch.data
