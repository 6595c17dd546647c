"""Dispatcher: sending of batches to their brokers, and the consequences of the answers. Runs under the engine's lock.

Up to five requests are in flight to a broker. Each carries at most one batch per segment, so batches of a segment are
answered in the order in which they were sent.

Before the first batch of a segment, its leader is asked for the end of the log, over the same connection and for all
such segments at once: if an answer is lost at a seal, possibly persisted batches are searched from that offset on, not
from offset 0.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v7 import ListOffsetsResponse
from kio.schema.produce.v12 import ProduceResponse
from kio.schema.produce.v12.response import PartitionProduceResponse

from rollbridge.calls import Backoff
from rollbridge.errors import RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.batches import stamped_header
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.errors import ConnectionLostError, Meaning
from rollbridge.kafka.fetch import NO_EPOCH
from rollbridge.kafka.metadata import Cluster, Isolation, NodeId
from rollbridge.kafka.offsets import LATEST, offsets_request
from rollbridge.kafka.pipeline import PRODUCE_KEY, PRODUCE_VERSION, ProduceVerdict, produce_body, request_start, verdict
from rollbridge.model.names import Partition
from rollbridge.writer import accumulator as faults
from rollbridge.writer.accumulator import ProducerBatch, StreamAccumulator, WriterOptions
from rollbridge.writer.lanes import PartitionQueue, SegmentPhase

logger = logging.getLogger(__name__)

_REQUEST_BYTES: Final = 1 << 20
_REQUEST_BATCHES: Final = 500
BACKOFF_FIRST_S: Final = 0.005
BACKOFF_MAX_S: Final = 0.5
_HOLD_S: Final = 0.05


@dataclass(slots=True, eq=False)
class BatchRequest:
    """Produce request in flight: lane and batch by partition."""

    items: dict[Partition, tuple[PartitionQueue[ProducerBatch], ProducerBatch]]


@dataclass(slots=True, eq=False)
class EndInquiry:
    """ListOffsets request in flight, for the log ends of lanes that have sent nothing yet, by partition."""

    lanes: dict[Partition, PartitionQueue[ProducerBatch]]


@dataclass(slots=True, eq=False)
class BrokerLink:
    """Connection to one broker, and its requests in flight."""

    connection: Connection
    requests: deque[BatchRequest | EndInquiry] = field(default_factory=deque)


class RequestDispatcher:
    """Sender of batches and receiver of answers.

    Attributes:
        producer: Producer id and epoch.
        expired: True if a new producer id is needed.
        links: Connections in use.
        ready: Lanes that may have something to send.
        bytes: Size of the closed batches that are not settled.
        settled: Settled batches whose watchers have not been notified.
        retry_at: End of the back-off (monotonic seconds); nothing is sent before.
    """

    def __init__(
        self,
        cluster: Cluster,
        producer: tuple[int, int],
        options: WriterOptions,
        *,
        suspect: Callable[[str], None],
        settled: Callable[[], None],
    ) -> None:
        """Start with nothing to send.

        Args:
            cluster: Cluster for exclusive use.
            producer: Producer id and epoch.
            options: Sizes, delays and limits.
            suspect: Called with a stream of which a segment refused a batch as sealed.
            settled: Called when a batch was settled.
        """
        self.producer = producer
        self.expired = False
        self.links: dict[NodeId, BrokerLink] = {}
        self.ready: dict[PartitionQueue[ProducerBatch], None] = {}
        self.bytes = 0
        self.settled: deque[ProducerBatch] = deque()
        self.retry_at = 0.0
        self._cluster = cluster
        self._options = options
        self._suspect = suspect
        self._notify = settled
        self._start = request_start(None, int(options.request_timeout_s * 500))
        self._held: dict[Partition, float] = {}
        self._backoff = Backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
        self._unknown: dict[Partition, PartitionQueue[ProducerBatch]] = {}
        self._unreached: set[NodeId] = set()
        self._asked: set[PartitionQueue[ProducerBatch]] = set()

    @property
    def is_cut_off(self) -> bool:
        """True if :meth:`reach` has work: leaders to look up or brokers to connect to."""
        return bool(self._unknown or self._unreached)

    def reach(self, lock: threading.Lock) -> None:
        """Look up unknown leaders, and connect to brokers for which batches wait.

        Both may take as long as a broker is silent, so neither is done under the lock, which writing threads hold. Only
        the engine's thread calls this.
        """
        with lock:
            if not self.is_cut_off or time.monotonic() < self.retry_at:
                return
            lanes, self._unknown = self._unknown, {}
            nodes, self._unreached = self._unreached, set()
        why: RollbridgeError | None = None
        missing: dict[str, ErrorCode] = {}
        try:
            missing = self._cluster.learn(topic for topic, _ in lanes)
            with lock:
                led = {self._cluster.known_leader(*target) for target in lanes}
                nodes = {node for node in nodes | led if node is not None and self._is_unreached(node)}
            for node in sorted(nodes):
                self._cluster.connection(node).require(PRODUCE_KEY, PRODUCE_VERSION, "Produce")
        except RollbridgeError as fault:
            why = fault
        with lock:
            for (topic, number), lane in lanes.items():
                if topic in missing:
                    self._missing(lane, missing[topic])
                elif why is None and self._cluster.known_leader(topic, number) is None:
                    self._cluster.forget_leader(topic)  # other partitions have one: look again for this one
                    self._missing(lane, ErrorCode.leader_not_available)
            if why is not None:
                logger.info("a broker cannot be reached now: %s", why)
                for topic, _ in lanes:
                    self._cluster.forget_leader(topic)
                for node in nodes:
                    self._forget(node)
                self.back_off()

    def _is_unreached(self, node: NodeId) -> bool:
        """Return True if a broker needs a new connection: not while answers are awaited on the present one."""
        link = self.links.get(node)
        return (link is None or not link.requests) and self._cluster.ready_connection(node) is None

    def _forget(self, node: NodeId) -> None:
        """Forget a broker as leader of ready lanes: it may stay away, and other brokers know its successor."""
        for lane in self.ready:
            if self._cluster.known_leader(*lane.target) == node:
                self._cluster.forget_leader(lane.topic)

    def _missing(self, lane: PartitionQueue[ProducerBatch], code: ErrorCode) -> None:
        logger.info("the leader of %s is not known: %s", lane.topic, codes.name(code))
        if verdict(code) is ProduceVerdict.DENIED:
            batch = next(iter(lane.held()), None)
            if batch is not None:
                self.fail(lane, batch, faults.denied(lane.topic, codes.name(code)))
        self._hold(lane)

    def pump(self) -> None:
        """Send what may be sent now over existing connections; the rest waits for :meth:`reach`."""
        while self.ready and not self.expired and time.monotonic() >= self.retry_at:
            requests: dict[NodeId, BatchRequest] = {}
            inquiries: dict[NodeId, EndInquiry] = {}
            sizes: dict[NodeId, int] = {}
            for lane in tuple(self.ready):
                if lane in self._asked or not lane.may_send():
                    del self.ready[lane]  # put back when its state changes
                    continue
                node = self._leader(lane)
                if node is None:
                    continue
                link = self.links.get(node)
                if link is not None and link.requests and not self._has_room(link):
                    continue
                if not lane.placed:
                    inquiries.setdefault(node, EndInquiry({})).lanes[lane.target] = lane
                    continue
                request = requests.setdefault(node, BatchRequest({}))
                size = sizes.get(node, 0)
                if len(request.items) < _REQUEST_BATCHES and size < _REQUEST_BYTES:
                    batch = lane.take()
                    request.items[lane.target] = (lane, batch)
                    sizes[node] = size + len(batch.data)
            if not requests and not inquiries:
                return
            for node, inquiry in inquiries.items():
                self._inquire(node, inquiry)
            for node, request in requests.items():
                self._send(node, request)

    def _has_room(self, link: BrokerLink) -> bool:
        return len(link.requests) < self._options.in_flight_max and not link.connection.expired()

    def _leader(self, lane: PartitionQueue[ProducerBatch]) -> NodeId | None:
        if self._held and time.monotonic() < self._held.get(lane.target, 0.0):
            return None
        node = self._cluster.known_leader(*lane.target)
        if node is None:
            self._unknown[lane.target] = lane
            return None
        if self._is_unreached(node):
            self._unreached.add(node)  # a new connection, as the present one is gone or too old
            return None
        return node

    def _link(self, node: NodeId) -> BrokerLink | None:
        """Return the link to a broker; None if its connection was lost a moment ago."""
        link = self.links.get(node)
        if link is None or not link.requests:
            connection = self._cluster.ready_connection(node)
            if connection is None:
                return None
            if link is None or link.connection is not connection:
                link = self.links[node] = BrokerLink(connection)
        return link

    def _inquire(self, node: NodeId, inquiry: EndInquiry) -> None:
        """Ask for the ends of logs; their lanes send nothing until the answer."""
        link = self._link(node)
        if link is None:
            return
        self._asked.update(inquiry.lanes.values())
        for lane in inquiry.lanes.values():
            self.ready.pop(lane, None)
        link.requests.append(inquiry)
        try:
            link.connection.send(offsets_request(LATEST, Isolation.READ_UNCOMMITTED, inquiry.lanes))
        except ConnectionLostError as fault:
            self.lost(node, fault)

    def _send(self, node: NodeId, request: BatchRequest) -> None:
        link = self._link(node)
        if link is None:
            self._return(request, doubtful=False)
            return
        items = [
            (
                lane.target,
                stamped_header(
                    batch.data,
                    producer_id=self.producer[0],
                    producer_epoch=self.producer[1],
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
            self.lost(node, fault)

    def receive(self, node: NodeId, link: BrokerLink) -> None:
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
                for topic in answer.responses:
                    for partition in topic.partition_responses:
                        lane, batch = request.items.pop((topic.name, partition.index))
                        self._judge(lane, batch, partition)
                self._return(request, doubtful=True)  # a batch left out of the answer counts as lost
        except ConnectionLostError as fault:
            self.lost(node, fault)

    def _place(self, inquiry: EndInquiry, answer: ListOffsetsResponse) -> None:
        """Record the ends of logs. Errors that would persist are left to the batches, whose answers tell the reason."""
        for name, found in ((topic.name, found) for topic in answer.topics for found in topic.partitions):
            lane = inquiry.lanes.get((name, found.partition_index))
            if lane is None:
                continue
            meaning = codes.meaning(codes.READ, found.error_code)
            if meaning is Meaning.DONE:
                lane.place(int(found.offset), int(found.leader_epoch))
            elif meaning in (Meaning.RETRY, Meaning.REFRESH):
                logger.info("segment %s: its end is not told: %s", lane.topic, codes.name(found.error_code))
                if meaning is Meaning.REFRESH:
                    self._cluster.forget_leader(lane.topic)
                self._hold(lane)
            else:
                lane.place(0, NO_EPOCH)
        self._end(inquiry)

    def _end(self, inquiry: EndInquiry) -> None:
        """Release the lanes of an answered or lost request; those without an answer will ask again."""
        for lane in inquiry.lanes.values():
            self._asked.discard(lane)
            if lane.may_send():
                self.ready[lane] = None

    def _judge(
        self, lane: PartitionQueue[ProducerBatch], batch: ProducerBatch, answer: PartitionProduceResponse
    ) -> None:
        found = verdict(answer.error_code)
        if found is ProduceVerdict.WRITTEN and answer.base_offset < 0:
            # The answer does not prove that the batch was written; sending it again will tell, with the offset.
            found = ProduceVerdict.DOUBTFUL
        if found is not ProduceVerdict.WRITTEN:
            logger.info("segment %s: a batch met %s", lane.topic, codes.name(answer.error_code))
        match found:
            case ProduceVerdict.WRITTEN:
                self._backoff.reset()
                lane.acknowledge(batch, answer.base_offset + batch.count - 1)
                self.settle(batch, lambda: batch.written(lane, answer.base_offset))
            case ProduceVerdict.SEALED if batch.channel.is_too_large(batch) and not batch.doubtful:
                self._divide(lane, batch)
            case ProduceVerdict.SEALED:
                # Or it is too large for an adopted topic whose limit was lowered; the stream's record will tell.
                lane.refuse(batch)
                self._suspect(batch.channel.stream)
            case ProduceVerdict.MISPLACED:
                is_lost = lane.is_next(batch)
                lane.misplace(batch)
                if is_lost:
                    # A predecessor was acknowledged but is missing: the log has lost its end, and accepts no sequence
                    # number of this producer any more. Begin with a new producer id, as Kafka's producer does
                    # (KIP-360).
                    self.expired = True
                    self.back_off()
            case ProduceVerdict.RETRY | ProduceVerdict.MOVED | ProduceVerdict.DOUBTFUL:
                if found is not ProduceVerdict.RETRY:
                    self._cluster.forget_leader(lane.topic)
                lane.give_back(batch, doubtful=found is ProduceVerdict.DOUBTFUL)
                self._hold(lane)
            case ProduceVerdict.EXPIRED:
                self.expired = True
                lane.give_back(batch, doubtful=False)
                self.back_off()
            case ProduceVerdict.DENIED:
                self.fail(lane, batch, faults.denied(lane.topic, codes.name(answer.error_code)))
            case ProduceVerdict.REFUSED:
                self._refused(lane, batch, answer)
            case ProduceVerdict.UNKNOWN:
                batch.doubtful = True
                self.fail(lane, batch, faults.unknown(lane.topic, codes.name(answer.error_code)))
        self.after(lane, batch.channel)

    def _refused(
        self, lane: PartitionQueue[ProducerBatch], batch: ProducerBatch, answer: PartitionProduceResponse
    ) -> None:
        """Fail the records that the broker rejects; if it says which, the others of the batch are sent again.

        A possibly persisted batch fails as a whole: its other records would get new sequence numbers and be written
        twice.
        """
        code = codes.name(answer.error_code)
        if batch.channel.limits is not None:
            self._suspect(batch.channel.stream)  # the topic's limits may have been changed
        why = {
            int(item.batch_index): item.batch_index_error_message or answer.error_message
            for item in answer.record_errors
            if 0 <= item.batch_index < batch.count
        }
        if not why or len(why) == batch.count or batch.doubtful:
            self.fail(lane, batch, faults.refused(lane.topic, code, answer.error_message))
            return
        rest, out = batch.channel.take_out(batch, why)
        lane.exchange(batch, rest)
        for piece, (_, message) in zip(out, sorted(why.items()), strict=True):
            self.fail(lane, piece, faults.refused(lane.topic, code, message))

    def _divide(self, lane: PartitionQueue[ProducerBatch], batch: ProducerBatch) -> None:
        """Divide a batch that is too large for an adopted topic by now; a record that is too large alone fails."""
        if batch.count > 1:
            lane.exchange(batch, batch.channel.divide(batch))
        else:
            self.fail(lane, batch, batch.channel.too_large(len(batch.data)))

    def after(self, lane: PartitionQueue[ProducerBatch], channel: StreamAccumulator) -> None:
        """React to a changed lane: drain it if it has ended, or mark it as ready."""
        if lane.phase is SegmentPhase.ENDED and channel.course.drain():
            self.scan(channel)
        elif lane.may_send():
            self.ready[lane] = None

    def scan(self, channel: StreamAccumulator) -> None:
        """Mark the lanes of a channel that may send as ready."""
        for lane in channel.course.active:
            if lane.may_send():
                self.ready[lane] = None

    def settle(self, batch: ProducerBatch, how: Callable[[], None]) -> None:
        if batch.settled:
            return  # given up before its answer came
        self.bytes -= len(batch.data)
        batch.channel.unsettled.pop(batch, None)
        how()
        self.settled.append(batch)
        self._notify()

    def fail(
        self, lane: PartitionQueue[ProducerBatch], batch: ProducerBatch, fault: Callable[[], RollbridgeError]
    ) -> None:
        """Give a batch up; its records fail."""
        logger.warning("%d records of %s failed: %s", batch.count, batch.channel.stream, fault())
        lane.drop(batch)
        self.settle(batch, lambda: batch.failed(fault))

    def _return(self, request: BatchRequest, *, doubtful: bool) -> None:
        """Give all batches of a request back to their lanes, to be sent again."""
        for lane, batch in request.items.values():
            lane.give_back(batch, doubtful=doubtful)
            self.after(lane, batch.channel)
        request.items.clear()

    def lost(self, node: NodeId, fault: ConnectionLostError) -> None:
        """Drop a connection; the outcome of its requests is unknown."""
        logger.info("%s; what was under way is sent again", fault)
        link = self.links.pop(node)
        link.connection.close()
        for request in link.requests:
            asked = request.lanes if isinstance(request, EndInquiry) else request.items
            for topic, _ in asked:
                self._cluster.forget_leader(topic)  # the broker may stay away, and others know the new leader
            if isinstance(request, EndInquiry):
                self._end(request)
            else:
                self._return(request, doubtful=True)
        self.back_off()

    def _hold(self, lane: PartitionQueue[ProducerBatch]) -> None:
        """Send nothing of a segment for ``_HOLD_S``; others go on."""
        now = time.monotonic()
        self._held = {target: until for target, until in self._held.items() if until > now}
        self._held[lane.target] = now + _HOLD_S

    def back_off(self) -> None:
        self.retry_at = time.monotonic() + self._backoff.grow()
