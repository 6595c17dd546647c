"""Dispatch: what of the lanes goes to which broker, and what the answers mean for them. Under the engine's lock.

Up to five requests are under way to a broker. Each carries at most one batch for a segment, so the batches of a segment
are answered in the order in which they were sent.

Before the first batch of a segment the leader is asked where the log ends, over the same connection and for all such
segments at once: should an answer be lost at a seal, what is doubtful is looked for from there on, not from offset 0.
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

from rollbridge.errors import RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.batches import stamped_header
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.errors import ConnectionLostError, Meaning
from rollbridge.kafka.fetch import NO_EPOCH
from rollbridge.kafka.metadata import Cluster, Isolation, NodeId
from rollbridge.kafka.offsets import LATEST, offsets_request
from rollbridge.kafka.pipeline import PRODUCE_KEY, PRODUCE_VERSION, Verdict, produce_body, request_start, verdict
from rollbridge.writer import accumulator as faults
from rollbridge.writer.accumulator import Batch, Channel, WriterOptions
from rollbridge.writer.lanes import Lane, Phase

logger = logging.getLogger(__name__)

_REQUEST_BYTES: Final = 1 << 20
_REQUEST_BATCHES: Final = 500
BACKOFF_FIRST_S: Final = 0.005
BACKOFF_MAX_S: Final = 0.5
_HOLD_S: Final = 0.05


@dataclass(slots=True, eq=False)
class Request:
    """Batches that travel together, by topic."""

    items: dict[str, tuple[Lane[Batch], Batch]]


@dataclass(slots=True, eq=False)
class Inquiry:
    """Where the logs of lanes end that have sent nothing yet, by topic."""

    lanes: dict[str, Lane[Batch]]


@dataclass(slots=True, eq=False)
class Link:
    """A connection to one broker, and the requests that wait for their answers."""

    connection: Connection
    requests: deque[Request | Inquiry] = field(default_factory=deque)


class Dispatcher:
    """Sends batches and takes answers.

    Attributes:
        producer: Producer id and epoch.
        expired: Whether a broker does not accept the producer id any more.
        links: The connections in use.
        ready: Lanes that may have something to send.
        bytes: Of closed batches whose fate is not known.
        settled: Batches whose fate has become known, and whose watchers are to be told.
        retry_at: Before this (monotonic seconds) nothing is sent.
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
            cluster: Used by nobody else.
            producer: Producer id and epoch.
            options: Sizes, delays and limits.
            suspect: Is given a stream of which a segment refuses what it should take.
            settled: Called when the fate of a batch has become known.
        """
        self.producer = producer
        self.expired = False
        self.links: dict[NodeId, Link] = {}
        self.ready: dict[Lane[Batch], None] = {}
        self.bytes = 0
        self.settled: deque[Batch] = deque()
        self.retry_at = 0.0
        self._cluster = cluster
        self._options = options
        self._suspect = suspect
        self._notify = settled
        self._start = request_start(None, int(options.request_timeout_s * 500))
        self._held: dict[str, float] = {}
        self._backoff_s = 0.0
        self._unknown: dict[str, Lane[Batch]] = {}
        self._unreached: set[NodeId] = set()
        self._asked: set[Lane[Batch]] = set()

    @property
    def is_cut_off(self) -> bool:
        """Whether something waits for :meth:`reach`."""
        return bool(self._unknown or self._unreached)

    def reach(self, lock: threading.Lock) -> None:
        """Look up leaders, and connect to those that something waits for.

        Both may take as long as a broker is silent, so neither is done under the lock, which those who write hold; and
        only one thread does it.
        """
        with lock:
            if not self.is_cut_off or time.monotonic() < self.retry_at:
                return
            lanes, self._unknown = self._unknown, {}
            nodes, self._unreached = self._unreached, set()
        why: RollbridgeError | None = None
        missing: dict[str, ErrorCode] = {}
        try:
            missing = self._cluster.learn(lanes)
            with lock:
                led = {self._cluster.known_leader(topic, 0) for topic in lanes}
                nodes = {node for node in nodes | led if node is not None and self._is_unreached(node)}
            for node in sorted(nodes):
                self._cluster.connection(node).require(PRODUCE_KEY, PRODUCE_VERSION, "Produce")
        except RollbridgeError as fault:
            why = fault
        with lock:
            for topic, code in missing.items():
                self._missing(lanes[topic], code)
            if why is not None:
                logger.info("a broker can not be reached now: %s", why)
                for topic in lanes:
                    self._cluster.forget_leader(topic)
                for node in nodes:
                    self._forget(node)
                self.back_off()

    def _is_unreached(self, node: NodeId) -> bool:
        """Whether to connect to a broker: not while answers are awaited over the connection at hand."""
        link = self.links.get(node)
        return (link is None or not link.requests) and self._cluster.ready_connection(node) is None

    def _forget(self, node: NodeId) -> None:
        """The broker may not come back, and the others know who leads then."""
        for lane in self.ready:
            if self._cluster.known_leader(lane.topic, 0) == node:
                self._cluster.forget_leader(lane.topic)

    def _missing(self, lane: Lane[Batch], code: ErrorCode) -> None:
        logger.info("the leader of %s is not known: %s", lane.topic, codes.name(code))
        if verdict(code) is Verdict.DENIED:
            batch = next(iter(lane.held()), None)
            if batch is not None:
                self.fail(lane, batch, faults.denied(lane.topic, codes.name(code)))
        self._hold(lane)

    def pump(self) -> None:
        """Send whatever may be sent now over connections that are there; the rest waits for :meth:`reach`."""
        while self.ready and not self.expired and time.monotonic() >= self.retry_at:
            requests: dict[NodeId, Request] = {}
            inquiries: dict[NodeId, Inquiry] = {}
            sizes: dict[NodeId, int] = {}
            for lane in tuple(self.ready):
                if lane in self._asked or not lane.may_send():
                    del self.ready[lane]  # it comes back when something changes
                    continue
                node = self._leader(lane)
                if node is None:
                    continue
                link = self.links.get(node)
                if link is not None and link.requests and not self._has_room(link):
                    continue
                if not lane.placed:
                    inquiries.setdefault(node, Inquiry({})).lanes[lane.topic] = lane
                    continue
                request = requests.setdefault(node, Request({}))
                size = sizes.get(node, 0)
                if len(request.items) < _REQUEST_BATCHES and size < _REQUEST_BYTES:
                    batch = lane.take()
                    request.items[lane.topic] = (lane, batch)
                    sizes[node] = size + len(batch.data)
            if not requests and not inquiries:
                return
            for node, inquiry in inquiries.items():
                self._inquire(node, inquiry)
            for node, request in requests.items():
                self._send(node, request)

    def _has_room(self, link: Link) -> bool:
        return len(link.requests) < self._options.in_flight_max and not link.connection.expired()

    def _leader(self, lane: Lane[Batch]) -> NodeId | None:
        if self._held and time.monotonic() < self._held.get(lane.topic, 0.0):
            return None
        node = self._cluster.known_leader(lane.topic, 0)
        if node is None:
            self._unknown[lane.topic] = lane
            return None
        if self._is_unreached(node):
            self._unreached.add(node)  # another one, if that at hand has gone or is too old
            return None
        return node

    def _link(self, node: NodeId) -> Link | None:
        """The link to a broker; None if its connection has gone since a moment ago."""
        link = self.links.get(node)
        if link is None or not link.requests:
            connection = self._cluster.ready_connection(node)
            if connection is None:
                return None
            if link is None or link.connection is not connection:
                link = self.links[node] = Link(connection)
        return link

    def _inquire(self, node: NodeId, inquiry: Inquiry) -> None:
        """Ask where logs end; the lanes wait for the answer."""
        link = self._link(node)
        if link is None:
            return
        self._asked.update(inquiry.lanes.values())
        for lane in inquiry.lanes.values():
            self.ready.pop(lane, None)
        link.requests.append(inquiry)
        try:
            places = [(topic, 0) for topic in inquiry.lanes]
            link.connection.send(offsets_request(LATEST, Isolation.READ_UNCOMMITTED, places))
        except ConnectionLostError as fault:
            self.lost(node, fault)

    def _send(self, node: NodeId, request: Request) -> None:
        link = self._link(node)
        if link is None:
            self._return(request, doubtful=False)
            return
        items = [
            (
                (lane.topic, 0),
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

    def receive(self, node: NodeId, link: Link) -> None:
        """Take the answers that are there."""
        try:
            while link.requests and link.connection.has_answer():
                request = link.requests[0]
                if isinstance(request, Inquiry):
                    self._place(request, link.connection.receive(ListOffsetsResponse))
                    link.requests.popleft()
                    continue
                answer = link.connection.receive(ProduceResponse)
                link.requests.popleft()
                for topic in answer.responses:
                    for partition in topic.partition_responses:
                        lane, batch = request.items.pop(topic.name)
                        self._judge(lane, batch, partition)
                self._return(request, doubtful=True)  # a broker that leaves one out has lost it
        except ConnectionLostError as fault:
            self.lost(node, fault)

    def _place(self, inquiry: Inquiry, answer: ListOffsetsResponse) -> None:
        """Learn where logs end; if that can not be said, what becomes of the batches will say why."""
        for topic in answer.topics:
            lane = inquiry.lanes.get(str(topic.name))
            if lane is None or not topic.partitions:
                continue
            found = topic.partitions[0]
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

    def _end(self, inquiry: Inquiry) -> None:
        """Nothing is asked any more: its lanes go on, those without an answer to ask again."""
        for lane in inquiry.lanes.values():
            self._asked.discard(lane)
            if lane.may_send():
                self.ready[lane] = None

    def _judge(self, lane: Lane[Batch], batch: Batch, answer: PartitionProduceResponse) -> None:
        found = verdict(answer.error_code)
        if found is Verdict.WRITTEN and answer.base_offset < 0:
            found = (
                Verdict.DOUBTFUL
            )  # it says neither where the batch stands, nor so whether it does; sent again, it will
        if found is not Verdict.WRITTEN:
            logger.info("segment %s: a batch met %s", lane.topic, codes.name(answer.error_code))
        match found:
            case Verdict.WRITTEN:
                self._backoff_s = 0.0
                lane.acknowledge(batch, answer.base_offset + batch.count - 1)
                self.settle(batch, lambda: batch.written(lane, answer.base_offset))
            case Verdict.SEALED:
                lane.refuse(batch)
                self._suspect(batch.channel.stream)
            case Verdict.MISPLACED:
                is_lost = lane.is_next(batch)
                lane.misplace(batch)
                if is_lost:
                    # What is missing before it was acknowledged: the log has lost its end, and takes no number of
                    # ours any more. As Kafka's producer does (KIP-360), begin with another id.
                    self.expired = True
                    self.back_off()
            case Verdict.RETRY | Verdict.MOVED | Verdict.DOUBTFUL:
                if found is not Verdict.RETRY:
                    self._cluster.forget_leader(lane.topic)
                lane.give_back(batch, doubtful=found is Verdict.DOUBTFUL)
                self._hold(lane)
            case Verdict.EXPIRED:
                self.expired = True
                lane.give_back(batch, doubtful=False)
                self.back_off()
            case Verdict.DENIED:
                self.fail(lane, batch, faults.denied(lane.topic, codes.name(answer.error_code)))
            case Verdict.REFUSED:
                self._refused(lane, batch, answer)
            case Verdict.UNKNOWN:
                batch.doubtful = True
                self.fail(lane, batch, faults.unknown(lane.topic, codes.name(answer.error_code)))
        self.after(lane, batch.channel)

    def _refused(self, lane: Lane[Batch], batch: Batch, answer: PartitionProduceResponse) -> None:
        """Give up what the broker refuses; if it says which records, the others of the batch are written.

        Not if it may have been written before: whatever got other numbers would be written twice.
        """
        code = codes.name(answer.error_code)
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

    def after(self, lane: Lane[Batch], channel: Channel) -> None:
        """A lane has changed: something may be handed over, or sent."""
        if lane.phase is Phase.ENDED and channel.course.drain():
            self.scan(channel)
        elif lane.may_send():
            self.ready[lane] = None

    def scan(self, channel: Channel) -> None:
        """Find the lanes of a channel that may send."""
        for lane in channel.course.active:
            if lane.may_send():
                self.ready[lane] = None

    def settle(self, batch: Batch, how: Callable[[], None]) -> None:
        if batch.settled:
            return  # it was given up before its answer came
        self.bytes -= len(batch.data)
        batch.channel.unsettled.pop(batch, None)
        how()
        self.settled.append(batch)
        self._notify()

    def fail(self, lane: Lane[Batch], batch: Batch, fault: Callable[[], RollbridgeError]) -> None:
        """Give a batch up for good."""
        logger.warning("%d records of %s failed: %s", batch.count, batch.channel.stream, fault())
        lane.drop(batch)
        self.settle(batch, lambda: batch.failed(fault))

    def _return(self, request: Request, *, doubtful: bool) -> None:
        """Everything of a request has to be sent again."""
        for lane, batch in request.items.values():
            lane.give_back(batch, doubtful=doubtful)
            self.after(lane, batch.channel)
        request.items.clear()

    def lost(self, node: NodeId, fault: ConnectionLostError) -> None:
        """A connection is gone; nobody knows what became of the requests on it."""
        logger.info("%s; what was under way is sent again", fault)
        link = self.links.pop(node)
        link.connection.close()
        for request in link.requests:
            asked = request.lanes if isinstance(request, Inquiry) else request.items
            for topic in asked:
                self._cluster.forget_leader(topic)  # the broker may not come back, and the others know who leads then
            if isinstance(request, Inquiry):
                self._end(request)
            else:
                self._return(request, doubtful=True)
        self.back_off()

    def _hold(self, lane: Lane[Batch]) -> None:
        """Send nothing of a segment for a moment; the others go on."""
        now = time.monotonic()
        self._held = {topic: until for topic, until in self._held.items() if until > now}
        self._held[lane.topic] = now + _HOLD_S

    def back_off(self) -> None:
        self._backoff_s = min(BACKOFF_MAX_S, max(BACKOFF_FIRST_S, self._backoff_s * 2))
        self.retry_at = time.monotonic() + self._backoff_s
