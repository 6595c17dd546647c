"""A producer with confluent-kafka's names: the topic of a record is a stream, an adopted topic, or a plain one.

Outside of a transaction it is a plain writer. Within one, it writes a rolling transaction, which may stay open for days
and begins with the first record; streams join it as they are written to, unless ``transaction.streams`` names those it
takes. Records of a transaction have no offset before the commit, so their callbacks follow it. Plain topics, which
no stream has adopted, are written to as confluent-kafka does, and in no transaction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from rollbridge.calls import Deadline, answers_within, patience_s
from rollbridge.client.futures import WriteFuture
from rollbridge.client.transaction import Transaction
from rollbridge.connection import Bridge, connect
from rollbridge.consumer.listing import list_all
from rollbridge.consumer.settings import dotted
from rollbridge.errors import ConflictError, InvalidRequestError, NotFoundError, RollbridgeError
from rollbridge.forks import check, hold, is_gone
from rollbridge.kafka.clients import producer_config
from rollbridge.model.control import FENCED
from rollbridge.model.sn import SN
from rollbridge.producer.messages import HeaderList, OnDelivery, ProducedMessage, Reports, kafka_exceptions, wrong_state
from rollbridge.producer.natives import NativeProducer
from rollbridge.producer.settings import ProducerSettings
from rollbridge.writer.accumulator import PlainFuture
from rollbridge.writer.writer import StreamWriter

_ANY_PARTITION: Final = -1
_LOOK_S: Final = 0.05
_CLOSE_S: Final = 30.0
_FOREVER_S: Final = 10.0 * 365 * 24 * 3600


class _Phase(Enum):
    """State of a producer: the calls that it accepts next."""

    PLAIN = "not initialised for transactions"
    READY = "ready"
    IN_TRANSACTION = "in a transaction"


class Producer:
    """Producer to streams and topics with confluent-kafka's calls. Thread-safe."""

    def __init__(self, config: Mapping[str, Any] | None = None, /, **settings: Any) -> None:
        """Connect.

        Args:
            config: confluent-kafka's settings, and ``zookeeper`` with its servers; also ``zookeeper.root`` and
                ``transaction.streams``, a list or comma-separated names.
            settings: The same, with underscores for dots.

        Raises:
            KafkaException: A setting is not accepted, or no server answers.
        """
        with kafka_exceptions():
            self._settings = ProducerSettings.read({**(config or {}), **dotted(settings)})
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
        self._natives = NativeProducer(
            {
                **producer_config(
                    self._bridge.settings.bootstrap_servers,
                    security=self._bridge.settings.kafka,
                    client_id=self._bridge.client_name,
                ),
                **self._settings.native,
            },
            self._settings.log,
        )
        self._home: str | None = None  # stream with which the last transaction began
        self._reports = Reports(only_errors=self._settings.only_errors)
        self._closed = False
        hold(self, "_lock", "_bridge", "_writers", "_reports", "_natives")

    # Records --------------------------------------------------------------------------------------------------------

    def produce(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        partition: int = _ANY_PARTITION,
        callback: OnDelivery | None = None,
        on_delivery: OnDelivery | None = None,
        timestamp: int = 0,
        headers: Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]] | None = None,
    ) -> None:
        """Send a record; :meth:`poll` or :meth:`flush` reports its outcome to ``on_delivery``.

        Args:
            topic: The stream, ``scope/stream``; an adopted topic; or, outside of transactions, a plain one.
            value: Bytes, or text that is sent as UTF-8; None is a tombstone.
            key: Likewise. Decides the segment; records with the same key stay in order.
            partition: -1, any, or that in which the key belongs: the key decides, so that its records stay in order.
                In a plain topic any partition may be given.
            callback, on_delivery: Called as ``on_delivery(error, message)``.
            timestamp: Milliseconds since 1970; 0 is now.
            headers: Names and values.

        Raises:
            BufferError: The queue is full: poll, and produce again.
            KafkaException: The record was not written; the error says why.
        """
        raw_key, raw_value = _raw(key), _raw(value)
        listed = _headers(headers)
        report = on_delivery or callback or self._settings.on_delivery
        stamp = timestamp or int(time.time() * 1000)
        with kafka_exceptions():
            self._check_open()
            if self._phase is _Phase.IN_TRANSACTION:
                stream = self._stream_of(topic)
                if partition != _ANY_PARTITION:
                    self._check_partition(topic, raw_key, partition)
                future = self._transaction_for(stream).write(
                    stream, raw_key, raw_value, headers=listed or (), timestamp=stamp
                )
                if report is not None:
                    message = self._message(topic, raw_key, raw_value, listed, stamp)
                    self._report_commit(future, report, message)
                return
            plain = self._write_plainly(topic, raw_key, raw_value, partition, listed or (), stamp)
        if plain is None:
            self._produce_natively(topic, raw_value, raw_key, partition, report, timestamp, listed)
        elif report is not None:
            self._report_written(plain, report, self._message(topic, raw_key, raw_value, listed, stamp))

    def produce_batch(
        self,
        topic: str,
        messages: list[dict[str, Any]],
        partition: int = _ANY_PARTITION,
        callback: OnDelivery | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> int:
        """Send many records, each a dictionary with the arguments of :meth:`produce`; return how many were taken.

        The others have an entry ``_error`` then, with confluent-kafka's error.
        """
        taken = 0
        for message in messages:
            report = message.get("callback") or message.get("on_delivery") or on_delivery or callback
            try:
                self.produce(
                    topic,
                    message.get("value"),
                    message.get("key"),
                    message.get("partition", partition),
                    report,
                    timestamp=message.get("timestamp", 0),
                    headers=message.get("headers"),
                )
            except BufferError as fault:
                message["_error"] = KafkaError(KafkaError._QUEUE_FULL, str(fault))
            except KafkaException as fault:
                message["_error"] = fault.args[0]
            else:
                taken += 1
        return taken

    def poll(self, timeout: float | None = -1) -> int:
        """Call the callbacks that are due, waiting for the first one for up to ``timeout`` seconds.

        Returns:
            Number of callbacks called.
        """
        deadline = Deadline(_FOREVER_S if timeout is None or timeout < 0 else timeout)
        while True:
            served = self._natives.wait(deadline, self._reports.wait) + self._reports.serve()
            if served or deadline.passed():
                return served

    def flush(self, timeout: float | None = -1) -> int:
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
        native = self._natives.flush(deadline.left())
        transaction = self._transaction
        if transaction is not None and self._phase is _Phase.IN_TRANSACTION:
            try:
                transaction.flush(deadline.left())
            except RollbridgeError:
                return len(self)
        while True:
            self._reports.serve()
            left = sum(writer.unacknowledged for writer in list(self._writers.values()))
            # Records of an open transaction are reported after its end.
            waiting = 0 if self._phase is _Phase.IN_TRANSACTION else self._reports.pending
            if not (left or waiting or self._reports) or deadline.passed():
                return max(left, waiting) + len(self._reports) + native
            self._reports.wait(min(_LOOK_S, deadline.left()))

    def __len__(self) -> int:
        """Return the number of records without an outcome, or whose callback has not been called."""
        left = sum(writer.unacknowledged for writer in list(self._writers.values()))
        return max(left, self._reports.pending) + len(self._reports) + len(self._natives)

    def __bool__(self) -> bool:
        return True

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return confluent-kafka's ``ClusterMetadata``, with the streams beside the topics, or of one of these.

        Raises:
            KafkaException: The stream does not exist, or no server answers.
        """
        admin = self._bridge.admin
        with kafka_exceptions(), _within(timeout):
            self._check_open()
            return list_all(self._natives.client, topic, timeout, admin.list_streams, admin.history)

    def cluster_id(self, timeout: float = -1) -> str:
        """Return the id of the Kafka cluster."""
        with kafka_exceptions():
            self._check_open()
        return self._natives.client.cluster_id(timeout)

    def close(self) -> bool:
        """Write what is left, abort an open transaction, and disconnect; return True."""
        if is_gone(self._lock):
            return True
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        try:
            if self._transaction is not None and self._phase is _Phase.IN_TRANSACTION:
                self._transaction.abort_async("its producer was closed")
        finally:
            self._bridge.close()
            self._natives.close(_CLOSE_S)
        self._reports.serve()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        exc_traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Transactions ---------------------------------------------------------------------------------------------------

    def init_transactions(self, timeout: float | None = -1) -> None:
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
        self, positions: Iterable[TopicPartition], group_metadata: object, timeout: float | None = -1
    ) -> None:
        """Commit a consumer group's offsets with the transaction; see :meth:`rollbridge.Transaction.send_offsets`.

        Raises:
            KafkaException: No transaction is open, or the arguments are invalid.
        """
        with self._lock, kafka_exceptions(), _within(timeout):
            self._check_open()
            self._require_transaction()
            listed = [item for item in positions if item.offset != OFFSET_INVALID]  # of what was not begun
            if self._transaction is not None:
                self._transaction.send_offsets(listed, group_metadata)
            else:
                self._offsets.append((listed, group_metadata))

    def commit_transaction(self, timeout: float | None = -1) -> None:
        """Commit: make all records visible, or none.

        Raises:
            KafkaException: If ``retriable()``, call it again, also to learn the outcome. If ``txn_requires_abort()``,
                nothing of the transaction is or will be visible: abort it and begin another one.
        """
        with self._lock, kafka_exceptions(), _within(timeout):
            self._check_open()
            self._require_transaction()
            if self._transaction is None and any(positions for positions, _ in self._offsets):
                streams = self._named_streams() or ((self._home,) if self._home else ())
                if not streams:
                    raise InvalidRequestError(
                        "this transaction has offsets but no record, and no stream is known whose group could commit "
                        "them: set transaction.streams; nothing was written"
                    )
                self._begin(*streams)
            if self._transaction is not None:
                self._transaction.commit(timeout=_seconds(timeout))
            self._end()
        self.poll(0)

    def abort_transaction(self, timeout: float | None = -1) -> None:
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

    def _stream_of(self, topic: str) -> str:
        """Return the stream that a record of a transaction goes to.

        Raises:
            InvalidRequestError: The topic is a plain one.
        """
        stream = self._bridge.stream_of(topic) or self._bridge.stream_of(topic, reread=True)
        if stream is None:
            raise InvalidRequestError(
                f"topic {topic} is a plain one, so no rolling transaction can write to it: `rollbridge stream adopt "
                f"{topic}` makes it a stream, and changes nothing for others; nothing was written"
            )
        return stream

    def _transaction_for(self, stream: str) -> Transaction:
        """Return the transaction, begun with this stream if none is open; others join it as they are written to."""
        transaction = self._transaction
        if transaction is not None and stream in transaction.streams:
            return transaction
        with self._lock:
            named = self._named_streams()
            if named and stream not in named:
                raise InvalidRequestError(f"stream {stream} is not among transaction.streams; nothing was written")
            if self._transaction is None:
                self._begin(stream, *(name for name in named if name != stream))
            assert self._transaction is not None
            return self._transaction

    def _begin(self, *streams: str) -> None:
        self._transaction = self._bridge.begin(*streams)
        self._home = streams[0]
        for positions, metadata in self._offsets:
            self._transaction.send_offsets(positions, metadata)
        self._offsets.clear()

    def _named_streams(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self._stream_of, self._settings.streams)))

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

    def _write_plainly(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        partition: int,
        headers: Sequence[tuple[str, bytes | None]],
        timestamp_ms: int,
    ) -> PlainFuture | None:
        """Write a record to its stream without a transaction; None if the topic is a plain one."""
        writer = self._writer(topic)
        if writer is None:
            return None
        if partition != _ANY_PARTITION:
            self._check_partition(topic, key, partition)
        try:
            return writer.write(key, value, headers=headers, timestamp=timestamp_ms)
        except NotFoundError:
            self._writers.pop(topic, None)
            writer = self._writer(topic)  # None if its topic was released
            return None if writer is None else writer.write(key, value, headers=headers, timestamp=timestamp_ms)

    def _writer(self, topic: str) -> StreamWriter | None:
        writer = self._writers.get(topic)
        if writer is not None:
            return writer
        stream = self._bridge.stream_of(topic)
        if stream is None:
            return None
        writer = self._writers[topic] = self._bridge.writer(stream, options=self._settings.writer)
        return writer

    def _produce_natively(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        report: Callable[[KafkaError | None, Any], object] | None,
        timestamp_ms: int,
        headers: HeaderList | None,
    ) -> None:
        more: dict[str, Any] = {} if report is None else {"on_delivery": report}
        if headers:
            more["headers"] = headers
        self._natives.client.produce(topic, value, key, partition, timestamp=timestamp_ms, **more)

    def _check_partition(self, topic: str, key: bytes | None, partition: int) -> None:
        """Refuse a partition that is not that of the key: its records would not stay in order.

        Raises:
            InvalidRequestError: It is another one, or there is no key.
        """
        if key is None:
            raise InvalidRequestError(
                f"partition {partition} of {topic} was asked for without a key, but records without one go to any: "
                "give a key, or leave the partition out; nothing was written"
            )
        right = self._bridge.partition_for(topic, key)
        if partition != right:
            raise InvalidRequestError(
                f"key {key[:40]!r} belongs in partition {right} of {topic}, not in {partition}: all records of a key "
                "stay in one, in order; leave the partition out; nothing was written"
            )

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
