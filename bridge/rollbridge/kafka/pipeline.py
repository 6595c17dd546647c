"""Produce pipeline: groups record batches into requests to their leaders, several in flight, and keeps their order.

Each partition's batches carry consecutive sequence numbers, so a broker refuses any that is out of order. When one
request fails, those behind it fail as well; the pipeline then stops, awaits every answer, and sends the failed batches
again, oldest first, with the same sequence numbers. By these a broker recognises a batch that was persisted after all,
and answers with its true offset. A pipeline serves one call on one thread and holds no lock.

The second half serves idempotent producers without transactions: producer ids, verdicts on answers, and the search for
their batches in a sealed log. A producer without a transactional id gets a new producer id with each request.

Source: KIP-98 (idempotent producer), KIP-890 (a partition joins the transaction with its first Produce v12 request).
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v5 import InitProducerIdRequest, InitProducerIdResponse
from kio.schema.produce.v12 import ProduceResponse
from kio.schema.types import ProducerId
from kio.static.primitive import i16, i32Timedelta

from rollbridge.calls import Backoff, Deadline
from rollbridge.errors import CorruptDataError, KafkaUnavailableError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.batches import (
    HEADER_BYTES,
    RawBatch,
    complete_batches,
    next_sequence,
    parse_header,
    stamped_header,
)
from rollbridge.kafka.connection import Buffer, Connection
from rollbridge.kafka.errors import ConnectionLostError, Meaning, NotAuthorizedError, TopicNotFoundError
from rollbridge.kafka.fetch import NO_EPOCH, Wanted, ask_batches
from rollbridge.kafka.metadata import Cluster, CodeError, Isolation, NodeId
from rollbridge.kafka.offsets import ask_first_offset
from rollbridge.model.names import Partition, show_partition

PRODUCE_KEY: Final = 0
PRODUCE_VERSION: Final = 12

# Brokers remember the last five batches of a producer per partition: with more in flight, a retry of the oldest would
# no longer be recognised.
IN_FLIGHT_MAX: Final = 5
# Size at which a request is sent rather than extended by the next batch: large requests gain from an early start.
_REQUEST_BYTES: Final = 1 << 20
_REQUEST_BATCHES: Final = 500
_ACKS_ALL: Final = -1
_BACKOFF_FIRST_S: Final = 0.002
_BACKOFF_MAX_S: Final = 0.25

Addressed = tuple[str, RawBatch] | tuple[str, int, RawBatch]


class ProducerFields(NamedTuple):
    """Producer fields of a native transaction."""

    transactional_id: str
    producer_id: int
    epoch: int


class PartitionRefusedError(Exception):
    """Answer for one partition that ends the pipeline."""

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
    """Stamped batch; ``index`` is its place in the order given, ``header`` replaces its first 61 bytes."""

    index: int
    target: Partition
    header: bytes
    batch: RawBatch

    @property
    def size(self) -> int:
        return len(self.batch)


@dataclass(slots=True)
class _Lane:
    """Queue of one leader: the request being filled and those in flight."""

    connection: Connection
    filling: dict[Partition, _Stamped] = field(default_factory=dict)
    filling_bytes: int = 0
    in_flight: deque[dict[Partition, _Stamped]] = field(default_factory=deque)


@dataclass(slots=True)
class ProduceSession:
    """State of one native transaction: its sequence numbers, and its connections, which must not be replaced.

    A connection lost in the middle of a transaction is an error: a leader that lost acknowledged records in a power
    failure would otherwise get the rest of the transaction, and its commit.
    """

    sequences: dict[Partition, int] = field(default_factory=dict)
    connections: dict[NodeId, Connection] = field(default_factory=dict)
    joined: bool = False

    def connection(self, cluster: Cluster, node: NodeId) -> Connection:
        """Return the connection to use; raise ConnectionLostError if the one that this transaction used was lost."""
        connection = self.connections.get(node)
        if connection is None:
            self.connections[node] = connection = cluster.connection(node)
        elif not connection.alive():
            connection.close()
            raise ConnectionLostError(f"connection to Kafka at {connection.address} was lost during a transaction")
        return connection


class Pipeline:
    """Pipeline for the batches of one call. Used once, not thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        session: ProduceSession,
        producer: ProducerFields,
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
        self._failing_since: dict[Partition, float] = {}
        self._catching_up = False
        self._backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S, at_once=True)
        # The broker gives up waiting for its replicas before we give up waiting for the broker.
        self._request_start = request_start(producer.transactional_id, request_timeout_ms // 2)

    def run(self, batches: Iterable[Addressed]) -> list[int]:
        """Append all batches and return their base offsets, in the order given, once every one is acknowledged.

        Raises:
            PartitionRefusedError: A broker refused a batch; carries its code and meaning.
            KafkaUnavailableError: A broker could not be reached or was lost.
            CorruptDataError: One of ``batches`` is not a batch of data.
            Exception: Any error raised by iterating ``batches``.
        """
        source = self._stamped(batches)
        try:
            while True:
                if self._failed:
                    self._rewind()
                if self._again:
                    item: _Stamped | None = self._again.popleft()
                elif self._catching_up:
                    # Failed batches have to be acknowledged before new ones are taken.
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
            target: Partition
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
        """Put a batch into its leader's next request; send that request first if it is full."""
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
        """Send a lane's request as soon as the lane has fewer in flight than allowed."""
        # Until the transaction has begun at its coordinator, which may wait for the markers of the previous one,
        # further requests would only be refused along with the first.
        while len(lane.in_flight) >= (self._max_in_flight if self._session.joined else 1) and not self._failed:
            self._receive(lane)
        if self._failed:
            # No batch may overtake a failed one: keep the request for the rewind.
            return
        request, lane.filling, lane.filling_bytes = lane.filling, {}, 0
        lane.in_flight.append(request)
        lane.connection.send_body(PRODUCE_KEY, PRODUCE_VERSION, self._body(request))

    def _body(self, request: dict[Partition, _Stamped]) -> list[Buffer]:
        """Encode Produce v12 around the batches, which are not copied."""
        return produce_body(self._request_start, [(item.target, item.header, item.batch) for item in request.values()])

    def _receive(self, lane: _Lane) -> None:
        """Receive one answer: note offsets, collect retriable failures, raise the others."""
        answer = lane.connection.receive(ProduceResponse)
        request = lane.in_flight.popleft()
        refused: PartitionRefusedError | None = None
        for topic in answer.responses:
            for partition in topic.partition_responses:
                item = request.pop((topic.name, partition.index), None)
                if item is None:
                    raise PartitionRefusedError(
                        topic.name, partition.error_code, Meaning.UNKNOWN, "an answer for a partition not asked about"
                    )
                if partition.error_code == ErrorCode.none and partition.base_offset < 0:
                    raise PartitionRefusedError(
                        topic.name, partition.error_code, Meaning.UNKNOWN, "an acknowledgement without an offset"
                    )
                if partition.error_code == ErrorCode.none:
                    self._offsets[item.index] = partition.base_offset
                    self._session.joined = True
                    self._failing_since.pop(item.target, None)
                    self._backoff.reset()
                    continue
                try:
                    self._judge(item, partition.error_code, partition.error_message)
                except PartitionRefusedError as exc:
                    # Fencing outranks the failures that it causes on other partitions.
                    if refused is None or exc.meaning is Meaning.FENCED:
                        refused = exc
        if request:
            raise PartitionRefusedError(
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
            raise PartitionRefusedError(item.target[0], code, meaning, detail, item.index)
        now = time.monotonic()
        failing_s = now - self._failing_since.setdefault(item.target, now)
        unknown_topic = code == ErrorCode.unknown_topic_or_partition
        limit_s = self._unknown_topic_timeout_s if unknown_topic else self._retry_timeout_s
        if code in codes.AWAY:
            limit_s = min(limit_s, self._topic_timeout_ms(item.target[0]) / 1000)
        if failing_s >= limit_s:
            raise PartitionRefusedError(
                item.target[0],
                code,
                Meaning.REFUSED if unknown_topic else Meaning.UNKNOWN,
                f"still so after {limit_s:g} s",
            )
        self._failed[item.index] = (item, code)

    def _rewind(self) -> None:
        """Await every answer, then queue the failed and the unsent batches, oldest first."""
        for lane in self._lanes.values():
            while lane.in_flight:
                self._receive(lane)
        backlog = [item for item, _ in self._failed.values()] + list(self._again)
        at_once = all(code == ErrorCode.concurrent_transactions for _, code in self._failed.values())
        for lane in self._lanes.values():
            backlog.extend(lane.filling.values())
        # Rebuild the lanes: a partition may have moved to another leader.
        self._lanes.clear()
        self._failed.clear()
        self._catching_up = True
        self._again = deque(sorted(backlog, key=lambda item: item.index))
        # The broker delays CONCURRENT_TRANSACTIONS itself, so no back-off is needed.
        pause_s = self._backoff.grow()
        time.sleep(0 if at_once else pause_s)

    def _finish(self) -> None:
        for lane in self._lanes.values():
            if lane.filling:
                self._send(lane)
        for lane in self._lanes.values():
            while lane.in_flight:
                self._receive(lane)

    def _settle(self) -> None:
        """Await the answers still due after a failure, so that the connections can be used to abort."""
        for lane in self._lanes.values():
            try:
                while lane.connection.in_flight:
                    lane.connection.receive(ProduceResponse)
            except ConnectionLostError:
                continue  # closed now, so no answer is due on it


def request_start(transactional_id: str | None, broker_timeout_ms: int) -> bytes:
    """Encode the first fields of Produce v12: transactional id, acks=all, and the time-out for the replicas.

    ``transactional_id`` is None for a producer without transactions.
    """
    name = b"" if transactional_id is None else transactional_id.encode()
    length = 0 if transactional_id is None else len(name) + 1
    return _uvarint(length) + name + struct.pack(">hi", _ACKS_ALL, broker_timeout_ms)


def produce_body(start: bytes, items: Iterable[tuple[Partition, bytes, RawBatch]]) -> list[Buffer]:
    """Return the body of Produce v12: ``start``, then the batches, given as partition, new header and whole batch."""
    topics: dict[str, list[tuple[int, bytes, RawBatch]]] = {}
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


# Idempotent producers without transactions (KIP-98).

_WAIT_MS: Final = 500


class ProduceVerdict(Enum):
    """Meaning of a Produce answer for one batch."""

    WRITTEN = auto()
    SEALED = auto()
    """Refused for its size: the segment is sealed, since no batch of ours exceeds the limit of an open one."""
    RETRY = auto()
    """Not written; send it again."""
    MOVED = auto()
    """Not written; look up the leader and send it again."""
    DOUBTFUL = auto()
    """Possibly persisted; send it again with the same sequence number."""
    MISPLACED = auto()
    """Not written: out of order, because an earlier batch was not written."""
    EXPIRED = auto()
    """Not written: the broker no longer accepts the producer id."""
    REFUSED = auto()
    """Not written, and a retry cannot help."""
    DENIED = auto()
    """Not written, for lack of a permission."""
    UNKNOWN = auto()
    """Outcome unknown."""


_MEANINGS: Final[Mapping[Meaning, ProduceVerdict]] = {
    Meaning.DONE: ProduceVerdict.WRITTEN,
    Meaning.RETRY: ProduceVerdict.RETRY,
    Meaning.REFRESH: ProduceVerdict.MOVED,
    Meaning.FOLLOW_UP: ProduceVerdict.MISPLACED,
    Meaning.REFUSED: ProduceVerdict.REFUSED,
    Meaning.DENIED: ProduceVerdict.DENIED,
    Meaning.FENCED: ProduceVerdict.EXPIRED,
    Meaning.EXPIRED: ProduceVerdict.EXPIRED,
    Meaning.UNKNOWN: ProduceVerdict.UNKNOWN,
}
_PAUSE_S: Final = 0.05
_OWN: Final[Mapping[ErrorCode, ProduceVerdict]] = {
    ErrorCode.message_too_large: ProduceVerdict.SEALED,
    ErrorCode.record_list_too_large: ProduceVerdict.SEALED,
    ErrorCode.unknown_producer_id: ProduceVerdict.EXPIRED,
    ErrorCode.request_timed_out: ProduceVerdict.DOUBTFUL,
    ErrorCode.not_enough_replicas_after_append: ProduceVerdict.DOUBTFUL,
    ErrorCode.network_exception: ProduceVerdict.DOUBTFUL,
    ErrorCode.kafka_storage_error: ProduceVerdict.DOUBTFUL,
}


def verdict(code: ErrorCode) -> ProduceVerdict:
    """Return the meaning of a Produce error code for a batch of a plain writer."""
    own = _OWN.get(code)
    return _MEANINGS[codes.meaning(codes.PRODUCE, code)] if own is None else own


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


class OwnBatches:
    """Search for the batches of one producer in a sealed log of one partition, part by part.

    The log may have lost its beginning, which leaves a gap, or its end: if it has diverged, the search resumes where it
    did.

    Attributes:
        found: Base offset by base sequence, as far as the log was read.
        gap: First deleted offset that was to be read, and the one behind the last; None if there are none. The
            batches that stood there are unknown.
    """

    def __init__(self, partition: Partition, start: int, end: int, producer_id: int, epoch: int = NO_EPOCH) -> None:
        """Prepare the search, reading nothing yet.

        Args:
            partition: Where they stand; nothing is appended below ``end`` any more.
            start: First offset to read.
            end: Offset before which to stop.
            producer_id: Producer of the wanted batches.
            epoch: Leader epoch of a record known to stand below ``start``.
        """
        self.found: dict[int, int] = {}
        self.gap: tuple[int, int] | None = None
        self._partition = partition
        self._next = start
        self._end = end
        self._producer_id = producer_id
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
        for batch in complete_batches(raw):
            header = parse_header(batch)
            after = max(after, header.base_offset + header.last_offset_delta + 1)
            if header.producer_id == self._producer_id and header.base_offset < self._end:
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
            # The log lost its end and has grown since: the wanted batches may stand in the new part.
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
