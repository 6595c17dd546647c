"""Session of one native transaction: its sequence numbers, its connections, and the sending of its batches.

The batches of a call are sent by the same dispatcher as those of idempotent producers, on the thread of the caller and
to its end: any answer that is not a passing one, and any lost connection, ends the call. When a request fails for a
moment, those behind it fail as well; all are sent again, in their order and with the same sequence numbers, by which a
broker recognises a batch that was persisted after all, and answers with its true offset.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.produce.v12.response import PartitionProduceResponse

from rollbridge.calls import Backoff
from rollbridge.errors import RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.batches import RawBatch, check_data
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.dispatch import BatchOwner, Dispatcher
from rollbridge.kafka.errors import ConnectionLostError, Meaning
from rollbridge.kafka.metadata import Cluster, NodeId
from rollbridge.kafka.produce import REQUEST_BYTES
from rollbridge.kafka.queues import Lane, PartitionQueue, QueuedBatch
from rollbridge.model.errors import PortableError
from rollbridge.model.names import Partition

_BACKOFF_FIRST_S: Final = 0.002
_BACKOFF_MAX_S: Final = 0.25
_POLL_MAX_S: Final = 0.5

Addressed = tuple[str, RawBatch] | tuple[str, int, RawBatch]


class ProducerFields(NamedTuple):
    """Producer fields of a native transaction."""

    transactional_id: str
    producer_id: int
    epoch: int


class PartitionRefusedError(PortableError):
    """Answer for one partition that ends a call."""

    def __init__(
        self, topic: str, code: ErrorCode, meaning: Meaning, detail: str | None, batch: int | None = None
    ) -> None:
        super().__init__(f"topic {topic}: {codes.name(code)}{f' ({detail})' if detail else ''}")
        self.topic: Final = topic
        self.batch: Final = batch
        self.error: Final = code
        self.meaning: Final = meaning


class AppendedBatch(QueuedBatch):
    """Ready-made batch; ``index`` is its place in the order given."""

    __slots__ = ("index",)

    def __init__(self, index: int, data: RawBatch, count: int) -> None:
        super().__init__()
        self.index = index
        self.data = data
        self.count = count


SessionQueue = PartitionQueue[AppendedBatch]


@dataclass(slots=True)
class ProduceSession:
    """State of one native transaction: its queues, and its connections, which must not be replaced.

    A connection lost in the middle of a transaction is an error: a leader that lost acknowledged records in a power
    failure would otherwise get the rest of the transaction, and its commit.
    """

    queues: dict[Partition, SessionQueue] = field(default_factory=dict)
    connections: dict[NodeId, Connection] = field(default_factory=dict)
    joined: bool = False

    def connection(self, cluster: Cluster, node: NodeId) -> Connection:
        """Return the connection to use; raise ConnectionLostError if the one that this transaction used was lost."""
        connection = self.present(node)
        if connection is None:
            self.connections[node] = connection = cluster.connection(node)
        connection.deadline = cluster.deadline
        return connection

    def present(self, node: NodeId) -> Connection | None:
        """Return the connection that this transaction uses, if any; raise ConnectionLostError if it was lost."""
        connection = self.connections.get(node)
        if connection is not None and not connection.alive():
            connection.close()
            raise ConnectionLostError(f"connection to Kafka at {connection.address} was lost during a transaction")
        return connection


class SessionSender(BatchOwner[AppendedBatch]):
    """Sender of the batches of one call. Used once, not thread-safe."""

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
        self._session = session
        self._max_in_flight = max_in_flight
        self._retry_timeout_s = cluster.bounded_s(retry_timeout_ms / 1000)
        self._unknown_topic_timeout_s = unknown_topic_timeout_ms / 1000
        self._topic_timeout_ms = topic_timeout_ms
        self._dispatch: Dispatcher[AppendedBatch] = Dispatcher(
            cluster,
            self,
            (producer.producer_id, producer.epoch),
            transactional_id=producer.transactional_id,
            request_timeout_s=request_timeout_ms / 1000,
            # Until the transaction has begun at its coordinator, which may wait for the markers of the previous one,
            # further requests would only be refused along with the first.
            in_flight_max=max_in_flight if session.joined else 1,
            dial=lambda node: session.connection(cluster, node),
            is_usable=lambda connection: connection.alive(),
        )
        self._offsets: list[int] = []
        self._outstanding = 0
        self._bytes = 0
        self._failing_since: dict[Partition, float] = {}
        self._backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S, at_once=True)
        self._paused_until = 0.0
        self._error: PartitionRefusedError | None = None

    def run(self, batches: Iterable[Addressed]) -> list[int]:
        """Append all batches and return their base offsets, in the order given, once every one is acknowledged.

        Raises:
            PartitionRefusedError: A broker refused a batch; carries its code and meaning.
            KafkaUnavailableError: A broker could not be reached or was lost.
            CorruptDataError: One of ``batches`` is not a batch of data.
            Exception: Any error raised by iterating ``batches``.
        """
        try:
            self._send_all(iter(batches))
        except ConnectionLostError:
            raise
        except Exception:
            self._settle()
            raise
        if self._error is not None:
            self._settle()
            raise self._error
        return self._offsets

    def _send_all(self, source: Iterator[Addressed]) -> None:
        """Send until all are acknowledged, or one is refused."""
        is_empty = False
        while True:
            taken = 0
            while not is_empty and taken < REQUEST_BYTES:
                item = next(source, None)
                if item is None:
                    is_empty = True
                else:
                    taken += self._enqueue(item)
            self._pump()
            is_full = is_empty or self._bytes > self._max_in_flight * REQUEST_BYTES
            if self._outstanding and is_full and not self._has_failed():
                self._await_answer()
            if self._has_failed() or (is_empty and not self._outstanding):
                return

    def _enqueue(self, addressed: Addressed) -> int:
        if len(addressed) == 2:
            target, data = (addressed[0], 0), addressed[1]
        else:
            target, data = (addressed[0], addressed[1]), addressed[2]
        batch = AppendedBatch(len(self._offsets), data, check_data(data).record_count)
        queue = self._session.queues.get(target)
        if queue is None:
            queue = self._session.queues[target] = PartitionQueue(target, Lane(), placed=True)
        if queue.waiting:
            self._await_turn(queue)
        queue.pending.append(batch)
        self._offsets.append(-1)
        self._outstanding += 1
        self._bytes += len(data)
        self._dispatch.ready[queue] = None
        return len(data)

    def _await_turn(self, queue: SessionQueue) -> None:
        """Return once nothing of a queue waits to be sent: a request takes one batch of each partition."""
        while True:
            self._pump()
            if self._has_failed() or not queue.waiting:
                return
            self._await_answer()

    def _pump(self) -> None:
        """Send what may be sent, and reach the brokers that this takes."""
        dispatch = self._dispatch
        dispatch.pump()
        while dispatch.is_cut_off and not self._has_failed():
            dispatch.reach(nullcontext())
            dispatch.pump()

    def _has_failed(self) -> bool:
        return self._error is not None

    def _await_answer(self) -> None:
        """Wait until a broker has answered, or a batch that is held back may be sent again; process what has come."""
        links = [(node, link) for node, link in self._dispatch.links.items() if link.requests]
        if not any(link.connection.has_answer() for _, link in links):
            poller = select.poll()
            for _, link in links:
                poller.register(link.connection, select.POLLIN)
            pause_s = min(self._dispatch.due() - time.monotonic(), _POLL_MAX_S)
            poller.poll(max(pause_s, 0.0) * 1000)
        for node, link in links:
            self._dispatch.receive(node, link)
            if link.requests and link.connection.overdue():
                self._dispatch.lost(node, ConnectionLostError(f"{link.connection.address} does not answer in time"))

    def _settle(self) -> None:
        """Await the answers still due after a failure, so that the connections can be used to abort."""
        self._dispatch.ready.clear()
        try:
            while any(link.requests for link in self._dispatch.links.values()):
                self._await_answer()
                self._dispatch.ready.clear()
        except ConnectionLostError:
            return  # closed now, and whoever needs it is told

    # Fate of batches --------------------------------------------------------------------------------------------------

    def written(self, queue: SessionQueue, batch: AppendedBatch, base_offset: int) -> None:
        """Note where a batch stands."""
        self._offsets[batch.index] = base_offset
        self._outstanding -= 1
        self._bytes -= len(batch.data)
        self._session.joined = True
        self._dispatch.in_flight_max = self._max_in_flight
        self._failing_since.pop(queue.target, None)
        self._backoff.reset()

    def too_large(self, queue: SessionQueue, batch: AppendedBatch, answer: PartitionProduceResponse) -> None:
        """End the call."""
        self.refused(queue, batch, answer)

    def refused(self, queue: SessionQueue, batch: AppendedBatch, answer: PartitionProduceResponse) -> None:
        """End the call."""
        self._fail(queue, batch, answer.error_code, answer.error_message)

    def denied(self, queue: SessionQueue, batch: AppendedBatch, code: ErrorCode) -> None:
        """End the call."""
        self._fail(queue, batch, code)

    def unclear(self, queue: SessionQueue, batch: AppendedBatch, code: ErrorCode) -> None:
        """End the call."""
        self._fail(queue, batch, code)

    def fenced(self, queue: SessionQueue, batch: AppendedBatch, code: ErrorCode) -> None:
        """End the call."""
        self._fail(queue, batch, code)

    def out_of_order(self, queue: SessionQueue, batch: AppendedBatch) -> None:
        """End the call: nothing before it has failed, so a retry cannot help."""
        self._fail(queue, batch, ErrorCode.out_of_order_sequence_number, meaning=Meaning.REFUSED)

    def delayed(self, queue: SessionQueue, code: ErrorCode) -> None:
        """Retry, for as long as this topic and this answer are given."""
        match codes.meaning(codes.PRODUCE, code):
            case Meaning.RETRY | Meaning.REFRESH:
                pass
            case Meaning.DONE:
                detail = "acknowledged without an offset, so nobody can tell whether it was written"
                self._fail(queue, next(queue.held(), None), code, detail, meaning=Meaning.UNKNOWN)
                return
            case _:
                self._fail(queue, next(queue.held(), None), code)
                return
        now = time.monotonic()
        failing_s = now - self._failing_since.setdefault(queue.target, now)
        is_unknown = code is ErrorCode.unknown_topic_or_partition
        limit_s = self._unknown_topic_timeout_s if is_unknown else self._retry_timeout_s
        if code in codes.AWAY:
            limit_s = min(limit_s, self._topic_timeout_ms(queue.topic) / 1000)
        if failing_s >= limit_s:
            meaning = Meaning.REFUSED if is_unknown else Meaning.UNKNOWN
            self._fail(queue, next(queue.held(), None), code, f"still so after {limit_s:g} s", meaning=meaning)

    def pause_s(self, code: ErrorCode) -> float:
        """Return the pause before a retry, one for all that fail together."""
        if code is ErrorCode.concurrent_transactions:
            return 0.0  # the broker delays this answer itself
        now = time.monotonic()
        if now >= self._paused_until:
            self._paused_until = now + self._backoff.grow()
        return self._paused_until - now

    def lost(self, fault: ConnectionLostError) -> None:
        """End the call."""
        raise fault

    def unreached(self, fault: RollbridgeError) -> None:
        """End the call."""
        raise fault

    def changed(self, queue: SessionQueue) -> None:
        """Mark a queue as ready, unless the call has ended."""
        if self._error is None:
            self._dispatch.note(queue)

    def _fail(
        self,
        queue: SessionQueue,
        batch: AppendedBatch | None,
        code: ErrorCode,
        detail: str | None = None,
        *,
        meaning: Meaning | None = None,
    ) -> None:
        meaning = codes.meaning(codes.PRODUCE, code) if meaning is None else meaning
        # Fencing outranks the failures that it causes on other partitions.
        if self._error is None or meaning is Meaning.FENCED:
            index = None if batch is None else batch.index
            self._error = PartitionRefusedError(queue.topic, code, meaning, detail, index)
        self._dispatch.ready.clear()
