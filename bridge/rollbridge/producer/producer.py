"""A producer with confluent-kafka's names, on streams: the topic of a record is its stream's name.

Outside of a transaction it is a plain writer. Within one, it writes a rolling transaction, which may stay open for days
and begins with the first record, over the streams that ``transaction.streams`` names, or all streams of that record's
group. Records of a transaction have no offset before the commit, so their callbacks follow it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from rollbridge.calls import Deadline, answers_within, patience_s
from rollbridge.client.futures import WriteFuture
from rollbridge.client.transaction import Transaction
from rollbridge.connection import Bridge, connect
from rollbridge.errors import ConflictError, InvalidRequestError, NotFoundError, RollbridgeError
from rollbridge.forks import check, hold, is_gone
from rollbridge.model.control import FENCED
from rollbridge.model.sn import SN
from rollbridge.producer.messages import HeaderList, OnDelivery, ProducedMessage, Reports, kafka_exceptions, wrong_state
from rollbridge.producer.settings import CALLBACKS, ProducerSettings, StreamsMetadata, describe_streams
from rollbridge.writer.accumulator import PlainFuture
from rollbridge.writer.writer import StreamWriter

STREAMS_UNASKED_MAX: Final = 32
"""Most streams of an implicit transaction: each costs a message to its buffer, so more have to be named."""
_ANY_PARTITION: Final = -1
_LOOK_S: Final = 0.05
_FOREVER_S: Final = 10.0 * 365 * 24 * 3600


class _Phase(Enum):
    """State of a producer: the calls that it accepts next."""

    PLAIN = "not initialised for transactions"
    READY = "ready"
    IN_TRANSACTION = "in a transaction"


class Producer:
    """Producer to streams with confluent-kafka's calls. Thread-safe."""

    def __init__(self, config: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """Connect.

        Args:
            config: confluent-kafka's settings, and ``zookeeper`` with its servers; also ``zookeeper.root`` and
                ``transaction.streams``, a list or comma-separated names.
            settings: The same, with underscores for dots.

        Raises:
            KafkaException: A setting is not accepted, or no server answers.
        """
        named = {key if key in CALLBACKS else key.replace("_", "."): value for key, value in settings.items()}
        whole = {**(config or {}), **named}
        with kafka_exceptions():
            self._settings = ProducerSettings.read(whole)
            self._bridge: Bridge = connect(
                self._settings.bootstrap_servers,
                zookeeper=self._settings.zookeeper,
                zookeeper_root=self._settings.zookeeper_root,
                client_name=self._settings.client_name,
                kafka=self._settings.security,
                zookeeper_security=self._settings.zookeeper_security,
                options=self._settings.client,
            )
        self._lock = threading.RLock()
        self._phase = _Phase.PLAIN
        self._transaction: Transaction | None = None
        self._offsets: list[tuple[list[TopicPartition], object]] = []
        self._writers: dict[str, StreamWriter] = {}
        self._streams: tuple[str, ...] = self._settings.streams
        self._reports = Reports(only_errors=self._settings.only_errors)
        self._closed = False
        hold(self, "_lock", "_bridge", "_writers", "_reports")

    # Records --------------------------------------------------------------------------------------------------------

    def produce(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        partition: int = _ANY_PARTITION,
        on_delivery: OnDelivery | None = None,
        timestamp: int = 0,
        headers: Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]] | None = None,
        *,
        callback: OnDelivery | None = None,
    ) -> None:
        """Send a record; :meth:`poll` or :meth:`flush` reports its outcome to ``on_delivery``.

        Args:
            topic: The stream, ``scope/stream``.
            value: Bytes, or text that is sent as UTF-8; None is a tombstone.
            key: Likewise. Decides the segment; records with the same key stay in order.
            partition: Only -1, any: segments hold key ranges and cannot be chosen by number.
            on_delivery, callback: Called as ``on_delivery(error, message)``.
            timestamp: Milliseconds since 1970; 0 is now.
            headers: Names and values.

        Raises:
            BufferError: The queue is full: poll, and produce again.
            KafkaException: The record was not written; the error says why.
        """
        if partition != _ANY_PARTITION:
            raise KafkaException(
                KafkaError(KafkaError._INVALID_ARG, "a segment is chosen by the key, not by its number: leave it out")
            )
        raw_key, raw_value = _raw(key), _raw(value)
        listed = _headers(headers)
        report = on_delivery or callback or self._settings.on_delivery
        stamp = timestamp or int(time.time() * 1000)
        with kafka_exceptions():
            self._check_open()
            if self._phase is _Phase.IN_TRANSACTION:
                future = self._transaction_for(topic).write(
                    topic, raw_key, raw_value, headers=listed or (), timestamp=stamp
                )
                if report is not None:
                    message = self._message(topic, raw_key, raw_value, listed, stamp)
                    self._report_commit(future, report, message)
                return
            plain = self._writer(topic).write(raw_key, raw_value, headers=listed or (), timestamp=stamp)
        if report is not None:
            self._report_written(plain, report, self._message(topic, raw_key, raw_value, listed, stamp))

    def poll(self, timeout: float | None = None) -> int:
        """Call the callbacks that are due, waiting for the first one for up to ``timeout`` seconds.

        Returns:
            Number of callbacks called.
        """
        self._reports.wait(_FOREVER_S if timeout is None or timeout < 0 else timeout)
        return self._reports.serve()

    def flush(self, timeout: float | None = None) -> int:
        """Wait until the brokers have everything, and call the callbacks that are due.

        Returns:
            Number of records that the brokers do not have yet, or whose callback was not called yet. Records of an open
            transaction are in its buffer then; they count as written, and their callbacks follow its end.
        """
        deadline = Deadline(_FOREVER_S if timeout is None or timeout < 0 else timeout)
        for writer in list(self._writers.values()):
            try:
                writer.flush(deadline.left())
            except RollbridgeError:
                continue  # reported by the callbacks; after a timeout also counted below
        transaction = self._transaction
        if transaction is not None and self._phase is _Phase.IN_TRANSACTION:
            try:
                transaction.flush(deadline.left())
            except RollbridgeError:
                return len(self)
        while True:
            self.poll(0)
            left = sum(writer.unacknowledged for writer in list(self._writers.values()))
            # Records of an open transaction are reported after its end.
            waiting = 0 if self._phase is _Phase.IN_TRANSACTION else self._reports.pending
            if not (left or waiting or self._reports) or deadline.passed():
                return max(left, waiting) + len(self._reports)
            self._reports.wait(min(_LOOK_S, deadline.left()))

    def __len__(self) -> int:
        """Return the number of records without an outcome, or whose callback has not been called."""
        left = sum(writer.unacknowledged for writer in list(self._writers.values()))
        return max(left, self._reports.pending) + len(self._reports)

    def __bool__(self) -> bool:
        return True

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> StreamsMetadata:
        """Return the streams, or one of them, in the shape of confluent-kafka's ``ClusterMetadata``.

        Raises:
            KafkaException: The stream does not exist, or no server answers.
        """
        with kafka_exceptions(), _within(timeout):
            self._check_open()
            return describe_streams(self._bridge.admin, topic)

    def close(self) -> None:
        """Write what is left, abort an open transaction, and disconnect; older confluent-kafka has no ``close``."""
        if is_gone(self._lock):
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._transaction is not None and self._phase is _Phase.IN_TRANSACTION:
                self._transaction.abort_async("its producer was closed")
        finally:
            self._bridge.close()
        self.poll(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Transactions ---------------------------------------------------------------------------------------------------

    def init_transactions(self, timeout: float | None = None) -> None:
        """Prepare for transactions: fence earlier processes of this transactional id, abort their open transactions.

        Commits that they had requested are complete when this returns.

        Raises:
            KafkaException: ``transactional.id`` is not set, or no server answers.
        """
        with self._lock, kafka_exceptions(), _within(timeout):
            self._check_open()
            if not self._settings.transactional:
                raise wrong_state("transactional.id is not set, so there can be no transactions")
            most_s = self._bridge.options.admin_timeout_s
            for left in self._bridge.unfinished(timeout=_seconds(timeout)):
                try:
                    self._bridge.admin.abort_transaction(
                        left.transaction, reason=FENCED, group=left.group, timeout_s=patience_s(most_s)
                    )
                except (ConflictError, InvalidRequestError, NotFoundError):
                    continue  # its lease has ended meanwhile
            self._phase = _Phase.READY

    def begin_transaction(self) -> None:
        """Begin a transaction: records produced from now on belong to it.

        Raises:
            KafkaException: A transaction is open, or :meth:`init_transactions` was not called.
        """
        with self._lock:
            self._check_open()
            if self._phase is not _Phase.READY:
                raise wrong_state(f"a transaction cannot be begun: this producer is {self._phase.value}")
            for writer in self._writers.values():
                with kafka_exceptions():
                    writer.flush()
            self._phase = _Phase.IN_TRANSACTION
            self._transaction = None
            self._offsets.clear()

    def send_offsets_to_transaction(
        self, positions: Iterable[TopicPartition], group_metadata: object, timeout: float | None = None
    ) -> None:
        """Commit a consumer group's offsets with the transaction; see :meth:`rollbridge.Transaction.send_offsets`.

        Raises:
            KafkaException: No transaction is open, or the arguments are invalid.
        """
        with self._lock, kafka_exceptions():
            self._check_open()
            self._require_transaction()
            listed = list(positions)
            if self._transaction is not None:
                self._transaction.send_offsets(listed, group_metadata)
            else:
                self._offsets.append((listed, group_metadata))

    def commit_transaction(self, timeout: float | None = None) -> None:
        """Commit: make all records visible, or none.

        Raises:
            KafkaException: If ``retriable()``, call it again, also to learn the outcome. If ``txn_requires_abort()``,
                nothing of the transaction is or will be visible: abort it and begin another one.
        """
        with self._lock, kafka_exceptions(), _within(timeout):
            self._check_open()
            self._require_transaction()
            if self._transaction is None and any(positions for positions, _ in self._offsets):
                if not self._streams:
                    raise InvalidRequestError(
                        "this transaction has offsets but no record, and no stream is known whose group could commit "
                        "them: set transaction.streams; nothing was written"
                    )
                self._begin(self._streams)
            if self._transaction is not None:
                self._transaction.commit(timeout=_seconds(timeout))
            self._end()
        self.poll(0)

    def abort_transaction(self, timeout: float | None = None) -> None:
        """Abort: ensure that nothing of the transaction ever becomes visible.

        Raises:
            KafkaException: The transaction is committed, or the answer did not come in time: call it again.
        """
        with self._lock, kafka_exceptions(), _within(timeout):
            self._check_open()
            self._require_transaction()
            if self._transaction is not None:
                self._transaction.abort("its producer asked for it", timeout=_seconds(timeout))
            self._end()
        self.poll(0)

    # Within ---------------------------------------------------------------------------------------------------------

    def _transaction_for(self, topic: str) -> Transaction:
        transaction = self._transaction
        if transaction is None:
            with self._lock:
                if self._transaction is None:
                    self._begin(self._streams_with(topic))
                transaction = self._transaction
        assert transaction is not None
        if topic not in transaction.streams and not self._settings.streams:
            with self._lock:
                self._streams = ()  # list the streams again at the next begin
            raise KafkaException(
                KafkaError(
                    KafkaError.INVALID_TXN_STATE,
                    f"stream {topic} is not one of this transaction's, begun over {', '.join(transaction.streams)}: "
                    "it is of another group, or was created since; abort, and begin again",
                    txn_requires_abort=True,
                )
            )
        return transaction

    def _begin(self, streams: tuple[str, ...]) -> None:
        self._transaction = self._bridge.begin(*streams)
        for positions, metadata in self._offsets:
            self._transaction.send_offsets(positions, metadata)
        self._offsets.clear()

    def _streams_with(self, topic: str) -> tuple[str, ...]:
        """Return the streams of a transaction whose first record goes to ``topic``, with ``topic`` first."""
        if topic not in self._streams:
            if self._settings.streams:
                raise InvalidRequestError(f"stream {topic} is not among transaction.streams; nothing was written")
            configs = self._bridge.admin.list_streams(topic.partition("/")[0])
            groups = {str(config.name): config.group for config in configs}
            mine = [name for name, group in groups.items() if group == groups.get(topic)]
            if len(mine) > STREAMS_UNASKED_MAX:
                raise InvalidRequestError(
                    f"the group of {topic} has {len(mine)} streams; a transaction over more than {STREAMS_UNASKED_MAX} "
                    "must be asked for: name those that it writes to in transaction.streams; nothing was written"
                )
            self._streams = tuple(mine) or (topic,)
        return (topic, *(name for name in self._streams if name != topic))

    def _end(self) -> None:
        self._transaction = None
        self._offsets.clear()
        self._phase = _Phase.READY

    def _require_transaction(self) -> None:
        if self._phase is not _Phase.IN_TRANSACTION:
            raise wrong_state(f"there is no transaction: this producer is {self._phase.value}")

    def _check_open(self) -> None:
        check(self._lock)
        if self._closed:
            raise wrong_state("this producer is closed")

    def _writer(self, topic: str) -> StreamWriter:
        writer = self._writers.get(topic)
        if writer is None:
            writer = self._writers[topic] = self._bridge.writer(topic, options=self._settings.writer)
        return writer

    def _message(
        self, topic: str, key: bytes | None, value: bytes | None, headers: HeaderList | None, timestamp_ms: int
    ) -> ProducedMessage:
        return ProducedMessage(topic, key, value, headers, timestamp_ms, self._bridge.partition_of)

    def _report_written(self, future: PlainFuture, report: OnDelivery, message: ProducedMessage) -> None:
        self._reports.expect()
        future.batch.watch(
            future.index,
            lambda batch, index: self._reports.tell(report, message, lambda: batch.locate(index)),
        )

    def _report_commit(self, future: WriteFuture, report: OnDelivery, message: ProducedMessage) -> None:
        self._reports.expect()
        future.add_done_callback(
            lambda ended: self._reports.tell(report, message, lambda: SN(dlsn=ended.result(0))),
        )


def _raw(value: bytes | str | None) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    if value is None or isinstance(value, bytes):
        return value
    raise TypeError(f"a key or value is bytes, text or None, not {type(value).__name__}")


def _headers(
    headers: Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]] | None,
) -> HeaderList | None:
    if not headers:
        return None
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [(name, _raw(value)) for name, value in pairs]


def _seconds(timeout: float | None) -> float | None:
    return None if timeout is None or timeout < 0 else timeout


def _within(timeout: float | None) -> AbstractContextManager[None]:
    """Bound all requests of this thread within the context by a call's timeout, if it has one."""
    seconds = _seconds(timeout)
    return nullcontext() if seconds is None else answers_within(seconds)
