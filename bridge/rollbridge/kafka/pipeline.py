"""The way of record batches to their leaders: grouped into requests, several requests under way, order kept.

Each partition's batches carry consecutive sequence numbers, so a broker refuses whatever would come out of order. When
one request of a pipeline fails, those behind it fail as well; then everything stops, all answers are awaited, and what
failed is sent again, oldest first, with the sequence numbers it had. A batch that was written after all is recognised
by them and answered with its true offset.

Source: KIP-98 (idempotent producer), KIP-890 (a partition joins the transaction with its first Produce v12 request).
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.produce.v12 import ProduceResponse

from rollbridge.kafka import codes
from rollbridge.kafka.batches import HEADER_BYTES, Batch, next_sequence, parse_header, stamped_header
from rollbridge.kafka.codes import Meaning
from rollbridge.kafka.errors import ConnectionLostError
from rollbridge.kafka.metadata import Cluster, CodeError, NodeId
from rollbridge.kafka.wire import Buffer, Connection

PRODUCE_KEY: Final = 0
PRODUCE_VERSION: Final = 12

# More than five requests under way to one partition and the broker no longer recognises the oldest when it is repeated.
IN_FLIGHT_MAX: Final = 5
# A request is closed when the next batch would take it beyond this: large ones profit from being sent early.
_REQUEST_BYTES: Final = 1 << 20
_REQUEST_BATCHES: Final = 500
_ACKS_ALL: Final = -1
_BACKOFF_FIRST_S: Final = 0.002
_BACKOFF_MAX_S: Final = 0.25

Addressed = tuple[str, Batch] | tuple[str, int, Batch]
TopicPartition = tuple[str, int]


class Producer(NamedTuple):
    """The producer fields of a native transaction."""

    transactional_id: str
    producer_id: int
    epoch: int


class PartitionRefused(Exception):
    """A broker's answer for one partition that ends the pipeline."""

    def __init__(
        self, topic: str, code: ErrorCode, meaning: Meaning, detail: str | None, batch: int | None = None
    ) -> None:
        super().__init__(f"topic {topic}: {codes.name(code)}{f' ({detail})' if detail else ''}")
        self.topic: Final = topic
        self.batch: Final = batch
        self.error: Final = code
        self.meaning: Final = meaning


@dataclass(slots=True)
class _Stamped:
    """A batch on its way; ``index`` is its place in the order given, ``header`` replaces its first 61 bytes."""

    index: int
    target: TopicPartition
    header: bytes
    batch: Batch

    @property
    def size(self) -> int:
        return len(self.batch)


@dataclass(slots=True)
class _Lane:
    """One leader: the request being filled, and those that wait for their answers."""

    connection: Connection
    filling: dict[TopicPartition, _Stamped] = field(default_factory=dict)
    filling_bytes: int = 0
    in_flight: deque[dict[TopicPartition, _Stamped]] = field(default_factory=deque)


@dataclass(slots=True)
class Session:
    """What one native transaction has touched so far: sequence numbers, and connections that must not be replaced.

    A connection that dies in the middle of a transaction is not silently replaced: a leader that lost acknowledged
    records with its power would otherwise get the rest of the transaction, and its commit.
    """

    sequences: dict[TopicPartition, int] = field(default_factory=dict)
    connections: dict[NodeId, Connection] = field(default_factory=dict)
    joined: bool = False

    def connection(self, cluster: Cluster, node: NodeId) -> Connection:
        """The connection to use; ConnectionLostError if this transaction has used another that is gone."""
        connection = self.connections.get(node)
        if connection is None:
            self.connections[node] = connection = cluster.connection(node)
        elif not connection.alive():
            connection.close()
            raise ConnectionLostError(f"connection to Kafka at {connection.address} was lost during a transaction")
        return connection


class Pipeline:
    """Appends the batches of one call; used once, not thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        session: Session,
        producer: Producer,
        *,
        max_in_flight: int,
        request_timeout_ms: int,
        retry_timeout_ms: int,
        unknown_topic_timeout_ms: int,
        topic_timeout_ms: Callable[[str], int],
    ) -> None:
        self._cluster = cluster
        self._session = session
        self._producer = producer
        self._max_in_flight = max_in_flight
        self._retry_timeout_s = retry_timeout_ms / 1000
        self._unknown_topic_timeout_s = unknown_topic_timeout_ms / 1000
        self._topic_timeout_ms = topic_timeout_ms
        self._lanes: dict[NodeId, _Lane] = {}
        self._offsets: list[int] = []
        self._again: deque[_Stamped] = deque()
        self._failed: dict[int, tuple[_Stamped, ErrorCode]] = {}
        self._failing_since: dict[TopicPartition, float] = {}
        self._catching_up = False
        self._backoff_s = 0.0
        # The broker gives up waiting for its replicas before we give up waiting for the broker.
        self._request_start = request_start(producer.transactional_id, request_timeout_ms // 2)

    def run(self, batches: Iterable[Addressed]) -> list[int]:
        """Append all batches and return their base offsets, in the order given, once every one is acknowledged.

        Raises:
            PartitionRefused: With the broker's code and what it means.
            KafkaUnavailable: A broker could not be reached or was lost.
            Exception: Whatever iterating ``batches`` raises, and CorruptDataError for one that is no batch.
        """
        source = self._stamped(batches)
        try:
            while True:
                if self._failed:
                    self._rewind()
                if self._again:
                    item: _Stamped | None = self._again.popleft()
                elif self._catching_up:
                    # What failed has to be through before more is taken on.
                    self._finish()
                    self._catching_up = bool(self._failed)
                    continue
                else:
                    item = next(source, None)
                if item is not None:
                    self._place(item)
                    continue
                self._finish()
                if not self._failed:
                    return self._offsets
        except ConnectionLostError:
            raise
        except Exception:
            self._settle()
            raise

    def _stamped(self, batches: Iterable[Addressed]) -> Iterator[_Stamped]:
        sequences = self._session.sequences
        for index, addressed in enumerate(batches):
            target: TopicPartition
            if len(addressed) == 2:
                target, batch = (addressed[0], 0), addressed[1]
            else:
                target, batch = (addressed[0], addressed[1]), addressed[2]
            sequence = sequences.get(target, 0)
            header = stamped_header(
                batch,
                producer_id=self._producer.producer_id,
                producer_epoch=self._producer.epoch,
                base_sequence=sequence,
            )
            sequences[target] = next_sequence(sequence, parse_header(batch).record_count)
            self._offsets.append(-1)
            yield _Stamped(index, target, header, batch)

    def _place(self, item: _Stamped) -> None:
        """Put a batch into its leader's next request, sending the one before if it is full."""
        try:
            node = self._cluster.leader(*item.target)
        except CodeError as exc:
            self._judge(item, exc.code, str(exc))
            return
        lane = self._lanes.get(node)
        if lane is None:
            self._lanes[node] = lane = _Lane(self._session.connection(self._cluster, node))
            lane.connection.require(PRODUCE_KEY, PRODUCE_VERSION, "Produce")
        full = lane.filling_bytes + item.size > _REQUEST_BYTES or len(lane.filling) >= _REQUEST_BATCHES
        if lane.filling and (full or item.target in lane.filling):
            self._send(lane)
            if self._failed:
                self._again.appendleft(item)
                return
        lane.filling[item.target] = item
        lane.filling_bytes += item.size

    def _send(self, lane: _Lane) -> None:
        """Send what a lane has collected, as soon as it has fewer requests under way than allowed."""
        # Until the transaction has begun at its coordinator, which may have to wait for the one before, more requests
        # would only be refused together with the first.
        while len(lane.in_flight) >= (self._max_in_flight if self._session.joined else 1) and not self._failed:
            self._receive(lane)
        if self._failed:
            # Nothing may overtake what failed: keep it back for the rewind.
            return
        request, lane.filling, lane.filling_bytes = lane.filling, {}, 0
        lane.in_flight.append(request)
        lane.connection.send_body(PRODUCE_KEY, PRODUCE_VERSION, self._body(request))

    def _body(self, request: dict[TopicPartition, _Stamped]) -> list[Buffer]:
        """Encode Produce v12 around the batches, which are not copied."""
        return produce_body(self._request_start, [(item.target, item.header, item.batch) for item in request.values()])

    def _receive(self, lane: _Lane) -> None:
        """Take one answer: note offsets, collect failures that can be repeated, raise those that cannot."""
        answer = lane.connection.receive(ProduceResponse)
        request = lane.in_flight.popleft()
        refused: PartitionRefused | None = None
        for topic in answer.responses:
            for partition in topic.partition_responses:
                item = request.pop((topic.name, partition.index), None)
                if item is None:
                    raise PartitionRefused(
                        topic.name, partition.error_code, Meaning.UNKNOWN, "an answer for a partition not asked about"
                    )
                if partition.error_code == ErrorCode.none and partition.base_offset < 0:
                    raise PartitionRefused(
                        topic.name, partition.error_code, Meaning.UNKNOWN, "an acknowledgement without an offset"
                    )
                if partition.error_code == ErrorCode.none:
                    self._offsets[item.index] = partition.base_offset
                    self._session.joined = True
                    self._failing_since.pop(item.target, None)
                    self._backoff_s = 0.0
                    continue
                try:
                    self._judge(item, partition.error_code, partition.error_message)
                except PartitionRefused as exc:
                    # A fencing outranks what it makes of the other partitions.
                    if refused is None or exc.meaning is Meaning.FENCED:
                        refused = exc
        if request:
            raise PartitionRefused(
                next(iter(request))[0], ErrorCode.unknown_server_error, Meaning.UNKNOWN, "no answer for this partition"
            )
        if refused is not None:
            raise refused

    def _judge(self, item: _Stamped, code: ErrorCode, detail: str | None) -> None:
        meaning = codes.meaning(codes.PRODUCE, code)
        if meaning is Meaning.FOLLOW_UP:
            behind = any(other.target == item.target for other, _ in self._failed.values())
            meaning = Meaning.RETRY if behind else Meaning.REFUSED
        if meaning is Meaning.REFRESH:
            self._cluster.forget_leader(item.target[0])
        elif meaning is not Meaning.RETRY:
            raise PartitionRefused(item.target[0], code, meaning, detail, item.index)
        now = time.monotonic()
        failing_s = now - self._failing_since.setdefault(item.target, now)
        unknown_topic = code == ErrorCode.unknown_topic_or_partition
        limit_s = self._unknown_topic_timeout_s if unknown_topic else self._retry_timeout_s
        if code in codes.AWAY:
            limit_s = min(limit_s, self._topic_timeout_ms(item.target[0]) / 1000)
        if failing_s >= limit_s:
            raise PartitionRefused(
                item.target[0],
                code,
                Meaning.REFUSED if unknown_topic else Meaning.UNKNOWN,
                f"still so after {limit_s:g} s",
            )
        self._failed[item.index] = (item, code)

    def _rewind(self) -> None:
        """Stop the world: await every answer, then queue what failed and what was not sent, oldest first."""
        for lane in self._lanes.values():
            while lane.in_flight:
                self._receive(lane)
        backlog = [item for item, _ in self._failed.values()] + list(self._again)
        at_once = all(code == ErrorCode.concurrent_transactions for _, code in self._failed.values())
        for lane in self._lanes.values():
            backlog.extend(lane.filling.values())
        # Lanes anew: a partition may have moved to another leader.
        self._lanes.clear()
        self._failed.clear()
        self._catching_up = True
        self._again = deque(sorted(backlog, key=lambda item: item.index))
        # The broker holds "concurrent transactions" back until it is worth asking again.
        time.sleep(0 if at_once else self._backoff_s)
        self._backoff_s = min(_BACKOFF_MAX_S, max(_BACKOFF_FIRST_S, self._backoff_s * 2))

    def _finish(self) -> None:
        for lane in self._lanes.values():
            if lane.filling:
                self._send(lane)
        for lane in self._lanes.values():
            while lane.in_flight:
                self._receive(lane)

    def _settle(self) -> None:
        """After a failure: await the answers still due, so that the connections can be used to abort."""
        for lane in self._lanes.values():
            try:
                while lane.connection.in_flight:
                    lane.connection.receive(ProduceResponse)
            except ConnectionLostError:
                continue  # it is closed now, which is just as well


def request_start(transactional_id: str | None, broker_timeout_ms: int) -> bytes:
    """The first fields of Produce v12: who writes, that all replicas in sync must have it, and how long they may take.

    ``transactional_id`` is None for a producer without transactions.
    """
    name = b"" if transactional_id is None else transactional_id.encode()
    length = 0 if transactional_id is None else len(name) + 1
    return _uvarint(length) + name + struct.pack(">hi", _ACKS_ALL, broker_timeout_ms)


def produce_body(start: bytes, items: Iterable[tuple[TopicPartition, bytes, Batch]]) -> list[Buffer]:
    """The body of Produce v12: ``start``, then the batches, each given as its partition, new header and old whole."""
    topics: dict[str, list[tuple[int, bytes, Batch]]] = {}
    for (topic, partition), header, batch in items:
        topics.setdefault(topic, []).append((partition, header, batch))
    parts: list[Buffer] = []
    glue = bytearray(start + _uvarint(len(topics) + 1))
    for topic, batches in topics.items():
        name = topic.encode()
        glue += _uvarint(len(name) + 1) + name + _uvarint(len(batches) + 1)
        for partition, header, batch in batches:
            glue += struct.pack(">i", partition) + _uvarint(len(batch) + 1) + header
            parts += (bytes(glue), memoryview(batch)[HEADER_BYTES:])
            glue = bytearray(b"\0")
        glue += b"\0"
    glue += b"\0"
    parts.append(bytes(glue))
    return parts


def _uvarint(value: int) -> bytes:
    """Encode an unsigned varint, as in Kafka's flexible requests."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
