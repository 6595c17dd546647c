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
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from enum import Enum, auto
from typing import Final, TypeVar

from kio.schema.describe_transactions.v0 import DescribeTransactionsRequest
from kio.schema.end_txn.v5 import EndTxnRequest, EndTxnResponse
from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v5 import InitProducerIdRequest, InitProducerIdResponse
from kio.schema.produce.v12 import ProduceResponse
from kio.schema.types import ProducerId, TransactionalId
from kio.static.primitive import i16, i32Timedelta

from rollbridge.calls import Backoff, Deadline, Patience
from rollbridge.errors import KafkaUnavailableError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.batches import HEADER_BYTES, BatchBuilder, stamped_header
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.describe import DescribeTransactionsResponse
from rollbridge.kafka.dispatch import LOOK_AGAIN_S
from rollbridge.kafka.errors import Meaning, NotAuthorizedError
from rollbridge.kafka.metadata import Cluster, CodeError, CoordinatorType
from rollbridge.kafka.produce import PRODUCE_KEY, PRODUCE_VERSION, produce_body, request_start
from rollbridge.kafka.session import ProducerFields, ProduceSession
from rollbridge.model.errors import PortableError
from rollbridge.model.names import Partition

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BACKOFF_FIRST_S: Final = 0.002
_BACKOFF_MAX_S: Final = 0.25
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
    """Error code that the coordinator gave as its final answer to one request."""

    def __init__(self, subject: str, code: ErrorCode, meaning: Meaning, detail: str | None = None) -> None:
        super().__init__(f"{subject}: {codes.name(code)}{f' ({detail})' if detail else ''}")
        self.error: Final = code
        self.meaning: Final = meaning


class Coordination:
    """Client of the coordinator of one transactional id. Not thread-safe.

    Raises, from every method:
        RequestRefusedError: The coordinator's error is final, or lasted for ``retry_timeout_s``.
        KafkaUnavailableError: The coordinator could not be reached, or was lost with the request in flight.
    """

    def __init__(
        self, cluster: Cluster, transactional_id: str, *, transaction_timeout_ms: int, retry_timeout_s: float
    ) -> None:
        self._cluster = cluster
        self._transactional_id = transactional_id
        self.timeout_ms: Final = transaction_timeout_ms
        self._transaction_timeout = i32Timedelta.parse(timedelta(milliseconds=transaction_timeout_ms))
        self._retry_timeout_s = retry_timeout_s
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

        def attempt(connection: Connection) -> tuple[ErrorCode, ProducerStanding]:
            request = DescribeTransactionsRequest(transactional_ids=(TransactionalId(self._transactional_id),))
            state = connection.call(request, DescribeTransactionsResponse).transaction_states[0]
            if state.producer_id != producer.producer_id:
                return state.error_code, ProducerStanding.TAKEN
            if state.producer_epoch == producer.epoch:
                return state.error_code, ProducerStanding.OURS
            aborted = state.transaction_state in ("PrepareAbort", "CompleteAbort")
            timed_out = aborted and state.producer_epoch == producer.epoch + 1
            return state.error_code, ProducerStanding.TIMED_OUT if timed_out else ProducerStanding.TAKEN

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

        return self._ask(f"init of {self._transactional_id}", codes.INIT, attempt, ProduceSession())

    def _recover(self, producer: ProducerFields) -> ProducerFields:
        try:
            try:
                recovered = self.end(ProduceSession(), producer, committed=False)
                logger.info("transactional id %s: nothing is open any more, not committed", self._transactional_id)
            except RequestRefusedError as exc:
                if exc.error != ErrorCode.invalid_txn_state:
                    raise
                # The transaction has ended the other way. A repeated commit is answered with the epoch that followed.
                recovered = self.end(ProduceSession(), producer, committed=True)
                logger.info("transactional id %s: the last commit had taken effect", self._transactional_id)
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
    fenced: Callable[[], bool] = lambda: True,
) -> T:
    """Find the coordinator of ``key`` and ask until its answer is final; retry FENCED while ``fenced()`` denies it.

    Raises:
        RequestRefusedError: The coordinator's error is final, or lasted for ``retry_timeout_s``.
        KafkaUnavailableError: The coordinator could not be reached, or was lost with the request in flight.
    """
    deadline = Deadline(cluster.bounded_s(retry_timeout_s))
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
            # A coordinator that is cut off from the other brokers goes on answering.
            logger.info("%s: still %s; looking up its coordinator again", subject, codes.name(code))
            cluster.forget_coordinator(kind, key)
            since = now
        if deadline.passed():
            raise RequestRefusedError(subject, code, Meaning.UNKNOWN, f"still so after {deadline.timeout_s:g} s")
        markers = code == ErrorCode.concurrent_transactions
        pause_s = backoff.grow()
        time.sleep(min(pause_s, _MARKERS_BACKOFF_MAX_S) if markers else pause_s)


# Barrier for appends: the marker of a native transaction that writes no records. A marker takes the lock of the
# partition's log as every append does, so an append that holds the lock, or waits in front, ends up below the marker.
# To get a marker where no record can be appended any more, the partition joins a transaction with a batch that has a
# wrong checksum: since transactions v2 a partition joins with its first Produce v12 request, before the batch is
# examined, and stays joined when the batch is refused (KIP-890). Then the transaction is aborted. A barrier can be
# raised at any point, any number of times, and leaves nothing but markers.

_TRANSACTION_TIMEOUT_MS: Final = 60_000
_BROKER_TIMEOUT_MS: Final = 5_000
_FIRST_OF_CHECKSUM: Final = 17
_VALUE: Final = bytes(78)


def corrupt_batch(producer: ProducerFields | None = None) -> bytes:
    """Return a batch that no broker accepts: its checksum is wrong, and it is larger than a marker."""
    builder = BatchBuilder(1 << 10)
    builder.append(0, None, _VALUE)
    batch = bytearray(builder.build())
    if producer is not None:
        header = stamped_header(batch, producer_id=producer.producer_id, producer_epoch=producer.epoch, base_sequence=0)
        batch[:HEADER_BYTES] = header
    batch[_FIRST_OF_CHECKSUM] ^= 0xFF
    return bytes(batch)


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

    def join(self, connection: Connection, partitions: Iterable[Partition]) -> dict[Partition, ErrorCode]:
        """Have partitions join; return for each the code with which its leader refused the joining batch.

        MESSAGE_TOO_LARGE and CORRUPT_MESSAGE mean that the partition has joined.

        Raises:
            KafkaUnavailableError: The connection was lost.
        """
        if self._producer is None:
            raise AssertionError("a barrier is joined only while it is open")
        connection.require(PRODUCE_KEY, PRODUCE_VERSION, "Produce")
        batch = corrupt_batch(self._producer)
        start = request_start(self._transactional_id, _BROKER_TIMEOUT_MS)
        items = [(item, batch[:HEADER_BYTES], batch) for item in partitions]
        connection.send_body(PRODUCE_KEY, PRODUCE_VERSION, produce_body(start, items))
        answer = connection.receive(ProduceResponse)
        return {
            (topic.name, item.index): item.error_code
            for topic in answer.responses
            for item in topic.partition_responses
        }

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
