"""Requests to the transaction coordinator, each retried as long as that is safe.

With transactions v2 every end of a transaction raises the producer epoch, and the coordinator recognises a repeated
EndTxn by the epoch it carries. EndTxn therefore also recovers from a lost answer: an abort with the epoch we had ends
our own transaction or reports that it was committed, and can never touch a newer user's. InitProducerId would abort a
newer user's open transaction before telling us that we are fenced, so only the first initialisation, whose purpose is
to take over, uses it.

:class:`Barrier` writes a marker behind every append that a partition has accepted, also to partitions that accept no
records any more.

Source: KIP-890; the rows of Kafka's TransactionCoordinator.endTransaction for transactions v2.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple, TypeVar, cast

from kio.schema.describe_transactions.v0 import DescribeTransactionsRequest
from kio.schema.end_txn.v5 import EndTxnRequest, EndTxnResponse
from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v5 import InitProducerIdRequest, InitProducerIdResponse
from kio.schema.produce.v12 import ProduceRequest, ProduceResponse
from kio.schema.produce.v12.request import PartitionProduceData, TopicProduceData
from kio.schema.produce.v12.response import PartitionProduceResponse
from kio.schema.types import ProducerId, TransactionalId
from kio.static.primitive import Records, i16, i32Timedelta
from kio.static.protocol import Payload

from rollbridge.base.deadlines import Backoff, Deadline, Patience
from rollbridge.base.errors import PortableError
from rollbridge.errors import KafkaUnavailableError, RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.describe import DescribeTransactionsResponse, TransactionState
from rollbridge.kafka.dispatch import (
    IN_FLIGHT_MAX,
    LOOK_AGAIN_S,
    REQUEST_BYTES,
    BatchOwner,
    Dispatcher,
)
from rollbridge.kafka.errors import ConnectionLostError, Meaning, NotAuthorizedError
from rollbridge.kafka.metadata import Cluster, CodeError, CoordinatorType, LeaderQuestion, NodeId, by_topic
from rollbridge.kafka.queues import Lane, PartitionQueue, QueuedBatch
from rollbridge.kafka.records import HEADER_BYTES, BatchBuilder, RawBatch, check_data, stamped_header
from rollbridge.stream.names import Partition

# Session of one native transaction: its sequence numbers, its connections, and the sending of its batches.
#
# The batches of a call are sent by the same dispatcher as those of idempotent producers, on the thread of the caller
# and to its end: any answer that is not a passing one, and any lost connection, ends the call. When a request fails for
# a moment, those behind it fail as well; all are sent again, in their order and with the same sequence numbers, by
# which a broker recognises a batch that was persisted after all, and answers with its true offset.


_BACKOFF_FIRST_S: Final = 0.002
_BACKOFF_MAX_S: Final = 0.25
_POLL_MAX_S: Final = 0.5

Addressed = tuple[str, RawBatch] | tuple[str, int, RawBatch]


class ProducerFields(NamedTuple):
    """Producer fields of a native transaction."""

    transactional_id: str
    producer_id: int
    epoch: int


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

    def check(self) -> None:
        """Raise ConnectionLostError if one of its connections was lost, even where another broker leads by now.

        To be called with nothing in flight.
        """
        for node in self.connections:
            self.present(node)

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
        retry_timeout_ms: int,
        unknown_topic_timeout_ms: int,
        topic_timeout_ms: Callable[[str], int],
        locked_timeout_s: float,
    ) -> None:
        self._session = session
        self._retry_timeout_s = cluster.bounded_s(retry_timeout_ms / 1000)
        self._unknown_topic_timeout_s = unknown_topic_timeout_ms / 1000
        self._topic_timeout_ms = topic_timeout_ms
        self._locked_timeout_s = locked_timeout_s
        self._dispatch: Dispatcher[AppendedBatch] = Dispatcher(
            cluster,
            self,
            (producer.producer_id, producer.epoch),
            transactional_id=producer.transactional_id,
            # Until the transaction has begun at its coordinator, which may wait for the markers of the previous one,
            # further requests would only be refused along with the first.
            in_flight_max=IN_FLIGHT_MAX if session.joined else 1,
            dial=lambda node: session.connection(cluster, node),
            is_usable=lambda connection: connection.alive(),
        )
        self._offsets: list[int] = []
        self._outstanding = 0
        self._bytes = 0
        self._failing_since: dict[Partition, float] = {}
        self._backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S, at_once=True)
        self._paused_until = 0.0
        self._error: RequestRefusedError | None = None

    def run(self, batches: Iterable[Addressed]) -> list[int]:
        """Append all batches and return their base offsets, in the order given, once every one is acknowledged.

        Raises:
            RequestRefusedError: A broker refused a batch; carries its code and meaning.
            KafkaUnavailableError: A broker could not be reached or was lost.
            CorruptDataError: One of ``batches`` is not a batch of data.
            Exception: Any error raised by iterating ``batches``.
        """
        self._session.check()
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
            is_full = is_empty or self._bytes > IN_FLIGHT_MAX * REQUEST_BYTES
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
            return  # closed now, and the next caller that needs it is told

    # Fate of batches --------------------------------------------------------------------------------------------------

    def written(self, queue: SessionQueue, batch: AppendedBatch, base_offset: int) -> None:
        """Record a batch's offset."""
        self._offsets[batch.index] = base_offset
        self._outstanding -= 1
        self._bytes -= len(batch.data)
        self._session.joined = True
        self._dispatch.in_flight_max = IN_FLIGHT_MAX
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
                detail = "acknowledged without an offset, so whether it was written is unknown"
                self._fail(queue, next(queue.held(), None), code, detail, meaning=Meaning.UNKNOWN)
                return
            case _:
                self._fail(queue, next(queue.held(), None), code)
                return
        now = time.monotonic()
        failing_s = now - self._failing_since.setdefault(queue.target, now)
        is_unknown = code is ErrorCode.unknown_topic_or_partition
        is_locked = (
            code is ErrorCode.concurrent_transactions
            and not self._session.joined
            and self._locked_timeout_s < self._retry_timeout_s
        )
        limit_s = self._unknown_topic_timeout_s if is_unknown else self._retry_timeout_s
        if code in codes.AWAY:
            limit_s = min(limit_s, self._topic_timeout_ms(queue.topic) / 1000)
        elif is_locked:
            limit_s = self._locked_timeout_s
        if failing_s >= limit_s:
            meaning = Meaning.REFUSED if is_unknown or is_locked else Meaning.UNKNOWN
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
            self._error = RequestRefusedError(
                f"topic {queue.topic}", code, meaning, detail, topic=queue.topic, batch=index
            )
        self._dispatch.ready.clear()


logger = logging.getLogger(__name__)

T = TypeVar("T")
# Markers take milliseconds, and a new leader waits for those of the old one.
_MARKERS_BACKOFF_MAX_S: Final = 0.01
_SILENCE_FIRST_S: Final = 5.0
"""Longest wait for the first answer about a transactional id that is taken over, twice as long for each further one.
A coordinator that is cut off from the other brokers cannot write what it is to answer, and another one has taken over.
"""


class ProducerStanding(Enum):
    """Standing of a producer id and epoch with the coordinator."""

    OURS = auto()
    """The epoch has not been raised."""
    TIMED_OUT = auto()
    """The coordinator aborted our transaction, because it was open too long; the id has no newer user."""
    TAKEN = auto()
    """A newer user has the id."""


class RequestRefusedError(PortableError):
    """Error code that a broker gave as its final answer to a request: a coordinator, or the leader of a ``topic``."""

    def __init__(
        self,
        subject: str,
        code: ErrorCode,
        meaning: Meaning,
        detail: str | None = None,
        *,
        topic: str | None = None,
        batch: int | None = None,
    ) -> None:
        super().__init__(f"{subject}: {codes.name(code)}{f' ({detail})' if detail else ''}")
        self.error: Final = code
        self.meaning: Final = meaning
        self.topic: Final = topic
        self.batch: Final = batch


class Coordination:
    """Client of the coordinator of one transactional id. Not thread-safe.

    Raises, from every method:
        RequestRefusedError: The coordinator's error is final, or lasted for ``retry_timeout_s``.
        KafkaUnavailableError: The coordinator could not be reached, or was lost with the request in flight.
    """

    def __init__(
        self,
        cluster: Cluster,
        transactional_id: str,
        *,
        transaction_timeout_ms: int,
        retry_timeout_s: float,
        locked_timeout_s: float = inf,
    ) -> None:
        self._cluster = cluster
        self._transactional_id = transactional_id
        self.timeout_ms: Final = transaction_timeout_ms
        self._transaction_timeout = i32Timedelta.parse(timedelta(milliseconds=transaction_timeout_ms))
        self._retry_timeout_s = retry_timeout_s
        self._locked_timeout_s = locked_timeout_s
        self._silence_s: float | None = None

    def take_over(self) -> ProducerFields:
        """Fence the previous user of the id; return once a transaction left open by it is aborted."""
        return self._patiently(lambda: self._init_producer_id(None))

    def recover(self, producer: ProducerFields) -> ProducerFields:
        """End the transaction that ``producer`` left open; leave a newer user alone and refuse with FENCED then."""
        return self._patiently(lambda: self._recover(producer))

    def end(self, session: ProduceSession, producer: ProducerFields, *, committed: bool) -> ProducerFields:
        """Commit or abort; return the producer fields for the next transaction.

        The decision is durable on return. The coordinator may still be writing markers, and the next transaction of
        this id has to wait for them.
        """

        def attempt(connection: Connection) -> tuple[ErrorCode, ProducerFields]:
            answer = connection.call(
                EndTxnRequest(
                    transactional_id=TransactionalId(self._transactional_id),
                    producer_id=ProducerId(producer.producer_id),
                    producer_epoch=i16(producer.epoch),
                    committed=committed,
                ),
                EndTxnResponse,
            )
            return answer.error_code, ProducerFields(self._transactional_id, answer.producer_id, answer.producer_epoch)

        subject = f"{'commit' if committed else 'abort'} of {self._transactional_id}"
        return self._ask(subject, codes.END, attempt, session, producer)

    def standing(self, producer: ProducerFields) -> ProducerStanding:
        """Return whether the id is still ours, changing nothing."""
        state = self._state()
        if state.producer_id != producer.producer_id:
            return ProducerStanding.TAKEN
        if state.producer_epoch == producer.epoch:
            return ProducerStanding.OURS
        aborted = state.transaction_state in ("PrepareAbort", "CompleteAbort")
        timed_out = aborted and state.producer_epoch == producer.epoch + 1
        return ProducerStanding.TIMED_OUT if timed_out else ProducerStanding.TAKEN

    def is_locked(self) -> bool:
        """Return True while the last transaction of the id, which is decided, still has markers to write."""
        return self._state().transaction_state in ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")

    def _state(self) -> TransactionState:
        def attempt(connection: Connection) -> tuple[ErrorCode, TransactionState]:
            request = DescribeTransactionsRequest(transactional_ids=(TransactionalId(self._transactional_id),))
            state = connection.call(request, DescribeTransactionsResponse).transaction_states[0]
            return state.error_code, state

        return self._ask(f"state of {self._transactional_id}", codes.INIT, attempt, ProduceSession())

    def _init_producer_id(self, known: ProducerFields | None) -> ProducerFields:
        def attempt(connection: Connection) -> tuple[ErrorCode, ProducerFields]:
            connection.require_transactions_v2()
            connection.require(EndTxnRequest.__api_key__, EndTxnRequest.__version__, "EndTxn")
            answer = connection.call(
                InitProducerIdRequest(
                    transactional_id=TransactionalId(self._transactional_id),
                    transaction_timeout=self._transaction_timeout,
                    producer_id=ProducerId(-1 if known is None else known.producer_id),
                    producer_epoch=i16(-1 if known is None else known.epoch),
                ),
                InitProducerIdResponse,
            )
            return answer.error_code, ProducerFields(self._transactional_id, answer.producer_id, answer.producer_epoch)

        subject = f"init of {self._transactional_id}"
        return self._ask(subject, codes.INIT, attempt, ProduceSession(), locked_timeout_s=self._locked_timeout_s)

    def _recover(self, producer: ProducerFields) -> ProducerFields:
        try:
            try:
                recovered = self.end(ProduceSession(), producer, committed=False)
                logger.info("transaction.not_committed transactional_id=%s", self._transactional_id)
            except RequestRefusedError as exc:
                if exc.error != ErrorCode.invalid_txn_state:
                    raise
                # The transaction has ended the other way. A repeated commit is answered with the epoch that followed.
                recovered = self.end(ProduceSession(), producer, committed=True)
                logger.info("transaction.committed_before transactional_id=%s", self._transactional_id)
            return recovered
        except RequestRefusedError as exc:
            if exc.meaning is not Meaning.EXPIRED:
                raise
            # The coordinator knows another producer id, or none. Given ours, it creates a new one only if the id has
            # no newer user.
            return self._init_producer_id(producer)

    def _ask(
        self,
        subject: str,
        table: Mapping[ErrorCode, Meaning],
        attempt: Callable[[Connection], tuple[ErrorCode, T]],
        session: ProduceSession,
        fencing_suspect: ProducerFields | None = None,
        *,
        locked_timeout_s: float = inf,
    ) -> T:
        def taken() -> bool:
            # While a transaction's markers are being written, the coordinator answers "fenced" to an end that carries
            # the next epoch, although the id has no newer user.
            return fencing_suspect is None or self.standing(fencing_suspect) is ProducerStanding.TAKEN

        def bounded(connection: Connection) -> tuple[ErrorCode, T]:
            if self._silence_s is not None:
                connection.deadline = Deadline(self._cluster.bounded_s(self._silence_s))
            return attempt(connection)

        return ask_coordinator(
            self._cluster,
            CoordinatorType.TRANSACTION,
            self._transactional_id,
            subject,
            table,
            bounded,
            session,
            retry_timeout_s=self._retry_timeout_s,
            locked_timeout_s=locked_timeout_s,
            fenced=taken,
        )

    def _patiently(self, attempt: Callable[[], ProducerFields]) -> ProducerFields:
        """Retry ``attempt``, which must be safe to repeat, over lost connections and restarting brokers."""
        deadline = Deadline(self._cluster.bounded_s(self._retry_timeout_s))
        backoff, patience = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S), Patience(logger)
        self._silence_s = _SILENCE_FIRST_S
        try:
            while True:
                try:
                    return attempt()
                except KafkaUnavailableError as exc:
                    self._cluster.forget()
                    if deadline.passed():
                        raise
                    patience.tell(f"use transactional id {self._transactional_id}", exc)
                self._silence_s *= 2
                time.sleep(backoff.grow())
        finally:
            self._silence_s = None


def ask_coordinator(
    cluster: Cluster,
    kind: CoordinatorType,
    key: str,
    subject: str,
    table: Mapping[ErrorCode, Meaning],
    attempt: Callable[[Connection], tuple[ErrorCode, T]],
    session: ProduceSession,
    *,
    retry_timeout_s: float,
    locked_timeout_s: float = inf,
    fenced: Callable[[], bool] = lambda: True,
) -> T:
    """Find the coordinator of ``key`` and ask until its answer is final; retry FENCED while ``fenced()`` denies it.

    Raises:
        RequestRefusedError: The coordinator's error is final, or lasted for ``retry_timeout_s``; with REFUSED and
            CONCURRENT_TRANSACTIONS, the transactional id was locked for ``locked_timeout_s``.
        KafkaUnavailableError: The coordinator could not be reached, or was lost with the request in flight.
    """
    deadline, locked = Deadline(cluster.bounded_s(retry_timeout_s)), Deadline(locked_timeout_s)
    backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
    before, since = ErrorCode.none, 0.0
    while True:
        asked_at = time.monotonic()
        try:
            node = cluster.coordinator(kind, key)
            code, result = attempt(session.connection(cluster, node))
        except CodeError as exc:
            code = exc.code
        else:
            if code == ErrorCode.none:
                return result
        meaning = codes.meaning(table, code)
        if meaning is Meaning.FENCED and not fenced():
            meaning = Meaning.RETRY
        if meaning is Meaning.REFRESH:
            cluster.forget_coordinator(kind, key)
        elif meaning is not Meaning.RETRY:
            raise RequestRefusedError(subject, code, meaning)
        now = time.monotonic()
        if code != before:
            before, since = code, asked_at
        if now - since >= LOOK_AGAIN_S:
            # A coordinator that is cut off from the other brokers keeps its old view.
            logger.info("coordinator.lookup subject=%r error=%s", subject, codes.name(code))
            cluster.forget_coordinator(kind, key)
            since = now
        markers = code == ErrorCode.concurrent_transactions
        if markers and locked.passed():
            raise RequestRefusedError(subject, code, Meaning.REFUSED, f"still so after {locked.timeout_s:g} s")
        if deadline.passed():
            raise RequestRefusedError(subject, code, Meaning.UNKNOWN, f"still so after {deadline.timeout_s:g} s")
        pause_s = backoff.grow()
        time.sleep(min(pause_s, _MARKERS_BACKOFF_MAX_S) if markers else pause_s)


# Barrier for appends: the marker of a native transaction that writes no records. A marker takes the lock of the
# partition's log as every append does, so an append that holds the lock, or waits in front, ends up below the marker.
# To get a marker where no record can be appended any more, the partition joins a transaction with a batch that has a
# wrong checksum: since transactions v2 a partition joins with its first Produce v12 request, before the batch is
# examined, and stays joined when the batch is refused (KIP-890). Then the transaction is aborted. A barrier can be
# raised at any point, any number of times, and leaves nothing but markers.

_TRANSACTION_TIMEOUT_MS: Final = 60_000
_BROKER_TIMEOUT: Final = timedelta(seconds=5)
_FIRST_OF_CHECKSUM: Final = 17
_VALUE: Final = bytes(78)


_EXPECTED: Final = frozenset({ErrorCode.none, ErrorCode.message_too_large, ErrorCode.corrupt_message})


def refused_batch(producer: ProducerFields | None = None) -> LeaderQuestion[ErrorCode]:
    """Return the question how partitions refuse a batch that no broker accepts.

    Its checksum is wrong, and it is larger than a marker, so the answer is CORRUPT_MESSAGE or MESSAGE_TOO_LARGE.
    """
    builder = BatchBuilder(1 << 10)
    builder.append(0, None, _VALUE)
    batch = bytearray(builder.build())
    if producer is not None:
        header = stamped_header(batch, producer_id=producer.producer_id, producer_epoch=producer.epoch, base_sequence=0)
        batch[:HEADER_BYTES] = header
    batch[_FIRST_OF_CHECKSUM] ^= 0xFF
    records = Records(bytes(batch))

    def request(places: list[Partition]) -> ProduceRequest:
        return ProduceRequest(
            transactional_id=None if producer is None else TransactionalId(producer.transactional_id),
            acks=i16(-1),
            timeout=i32Timedelta.parse(_BROKER_TIMEOUT),
            topic_data=tuple(
                TopicProduceData(
                    name=topic,
                    partition_data=tuple(PartitionProduceData(index=item, records=records) for item in items),
                )
                for topic, items in by_topic(places).items()
            ),
        )

    def answers(answer: Payload) -> Iterable[tuple[Partition, ErrorCode, ErrorCode]]:
        for topic in cast(ProduceResponse, answer).responses:
            for item in topic.partition_responses:
                code = item.error_code
                yield (str(topic.name), int(item.index)), ErrorCode.none if code in _EXPECTED else code, code

    return LeaderQuestion(request, ProduceResponse, answers)


class Barrier:
    """Writer of markers with one transactional id, whose earlier users it fences. Not thread-safe.

    Raises:
        KafkaUnavailableError: From :meth:`open` and :meth:`close`: markers may or may not have been written. Call
            :meth:`forget`, then join all partitions again.
        NotAuthorizedError: Use of the transactional id is not permitted.
    """

    def __init__(self, cluster: Cluster, transactional_id: str) -> None:
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._producer: ProducerFields | None = None

    @property
    def is_open(self) -> bool:
        """True while partitions can join."""
        return self._producer is not None

    def open(self, timeout_s: float) -> None:
        """Begin a transaction unless one is open."""
        if self._producer is None:
            self._producer = self._take_over(timeout_s)

    def joining(self) -> LeaderQuestion[ErrorCode]:
        """Return the question by which partitions join: MESSAGE_TOO_LARGE and CORRUPT_MESSAGE mean that they have."""
        if self._producer is None:
            raise AssertionError("a barrier is joined only while it is open")
        return refused_batch(self._producer)

    def close(self, timeout_s: float) -> None:
        """Abort the transaction; return when every joined partition has its marker.

        Taking the id over again does both: it aborts the open transaction and is answered when all markers are written.
        """
        self._producer = None
        self._producer = self._take_over(timeout_s)

    def forget(self) -> None:
        """Discard the transaction, to begin a new one next time: the id has a newer user, or an answer was lost."""
        self._producer = None

    def _take_over(self, timeout_s: float) -> ProducerFields:
        coordination = Coordination(
            self._cluster,
            self._transactional_id,
            transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS,
            retry_timeout_s=timeout_s,
        )
        try:
            return coordination.take_over()
        except RequestRefusedError as exc:
            if exc.meaning is Meaning.DENIED:
                resource = f"transactional id {self._transactional_id}"
                raise NotAuthorizedError(
                    f"not allowed to use {resource}, which sealing needs: {codes.name(exc.error)}", resource=resource
                ) from exc
            raise KafkaUnavailableError(f"no markers can be written with {self._transactional_id}: {exc}") from exc
