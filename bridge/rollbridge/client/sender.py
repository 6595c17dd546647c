"""Sender of frames: one idempotent producer, a bounded queue, and a thread that receives delivery reports.

Frames of one buffer partition keep their order, also when they are sent again, because the producer is idempotent. A
delivery report without an offset leaves open whether, or where, the frame stands (librdkafka reports so what a broker
calls a duplicate): such a frame is sent once more, behind the others, which the fold of the buffer allows. The sender
never stops trying by itself: a frame is refused only for lasting causes (its topic is gone, it is too large, access is
denied), so no transaction fails because brokers are away for an hour. The queue is bounded: when it is full,
:meth:`Sender.send` waits for a bounded time, then raises.

Delivery callbacks run on the delivery thread and must never take a lock under which somebody may send: the thread that
sends may be waiting for just that delivery.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from rollbridge.calls import Deadline
from rollbridge.errors import BackpressureError, InvalidRequestError, RollbridgeError
from rollbridge.forks import hold
from rollbridge.kafka.clients import library_logger, producer_config
from rollbridge.kafka.errors import kafka_error, translate
from rollbridge.kafka.ratelimit import limited

logger = limited(logging.getLogger(__name__))

Delivered = Callable[[KafkaError | None, Message | None], None]
"""Takes the error of a delivery, or None, and the message; no message if it could not even be queued."""

BUFFER_BYTES_DEFAULT: Final = 64 * 1024 * 1024
BATCH_BYTES: Final = 1_000_000
_QUEUE_MESSAGES_MAX: Final = 1_000_000
_POLL_S: Final = 0.1


class Sender:
    """Sender of frames. Safe to use from several threads."""

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        security: Mapping[str, str] | None = None,
        client_id: str = "rollbridge",
        buffer_bytes: int = BUFFER_BYTES_DEFAULT,
        block_s: float = 60.0,
        linger_ms: float = 0.0,
    ) -> None:
        """Start the producer and its delivery thread.

        Args:
            bootstrap_servers: ``host:port``, several with commas between.
            security: As for confluent-kafka.
            client_id: Names this client in the brokers' logs and quotas.
            buffer_bytes: Maximum bytes that wait to be sent.
            block_s: Seconds that :meth:`send` waits while the buffer is full.
            linger_ms: Milliseconds for which the producer holds a frame back to send it together with others.
        """
        self._settings: dict[str, Any] = {
            **producer_config(bootstrap_servers, security=security, client_id=client_id),
            "linger.ms": linger_ms,
            # A frame that finds nothing in flight goes at once; later ones are collected meanwhile and go together.
            "max.in.flight.requests.per.connection": 1,
            "message.timeout.ms": 0,  # without end; whoever waits for the outcome has a time-out of its own
            "message.max.bytes": 1_000_000_000,  # the topic's limit decides, and frames respect it
            # Several frames go in one batch, for which a buffer topic's limit holds; none is set below this.
            "batch.size": BATCH_BYTES,
            "queue.buffering.max.kbytes": max(buffer_bytes // 1024, 1),
            "queue.buffering.max.messages": _QUEUE_MESSAGES_MAX,
            "delivery.report.only.error": False,  # acknowledgements are counted
            "error_cb": self._on_error,
        }
        self._buffer_bytes = buffer_bytes
        self._block_s = block_s
        self._progress = threading.Condition()
        self._deferred: deque[tuple[str, int, bytes, bytes, Delivered]] = deque()
        self._failed = False
        self._fatal: KafkaError | None = None
        self._stopping = threading.Event()
        self._producer = self._connect()
        hold(self, "_producer", "_progress")
        self._thread = threading.Thread(target=self._deliver, name="rollbridge-delivery", daemon=True)
        self._thread.start()

    def send(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        """Queue a frame; ``delivered`` is called with its delivery report.

        Raises:
            BackpressureError: the queue stayed full; the frame was not queued.
            InvalidRequestError: the sender is closed; the frame was not queued.
        """
        try:
            self._producer.produce(topic, value, key, partition, partial(self._report, delivered))
        except (BufferError, KafkaException, RuntimeError) as fault:
            self._send_patiently(topic, partition, key, value, delivered, fault)

    def send_soon(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        """Queue a frame from a delivery callback: never waits, and lets the delivery thread retry until it works."""
        self._deferred.append((topic, partition, key, value, delivered))

    def wait_until(self, reached: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until ``reached`` is true, re-evaluated after deliveries; return False if not in time."""
        with self._progress:
            return self._progress.wait_for(reached, timeout_s)

    @property
    def queued(self) -> int:
        """Number of frames without a delivery report."""
        return len(self._producer) + len(self._deferred)

    def cause_of(self, fault: KafkaError) -> KafkaError:
        """Return why a delivery failed; a producer that was replaced reports only that it was."""
        purged = fault.code() in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
        return self._fatal if purged and self._fatal is not None else fault

    def is_refusal(self, fault: KafkaError) -> bool:
        """Return True if a broker itself refused the frame, so that it is certainly not in the buffer."""
        if fault.code() == KafkaError._PURGE_QUEUE:
            # Without a right to write anywhere a producer gets no id, and sends nothing at all.
            return self.cause_of(fault).code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
        return fault.code() > 0

    def close(self, timeout_s: float) -> int:
        """Send what is queued and disconnect; return the number of frames not acknowledged in time.

        Of these nobody hears any more: whether they stand in the buffer is unknown.
        """
        self.wait_until(lambda: self.queued == 0, timeout_s)
        left = self.queued
        self._stopping.set()
        self._thread.join()
        if left:
            self._producer.purge()
        # Producer and sender refer to each other, so the connections would stay until garbage is collected.
        self._producer.close()
        return left

    def _connect(self) -> Producer:
        try:
            return Producer(self._settings, logger=library_logger)
        except (KafkaException, ValueError, TypeError) as fault:
            raise translate(fault, "start a producer") from fault

    def _send_patiently(
        self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered, fault: Exception
    ) -> None:
        """Retry while the queue is full or the producer is being replaced."""
        deadline = Deadline(self._block_s)
        while True:
            if self._stopping.is_set() and isinstance(fault, RuntimeError):
                raise InvalidRequestError("this connection is closed; connect again; nothing was written") from fault
            if not _is_passing(fault):
                raise translate(fault, f"send a frame to {topic}", topic) from fault
            if deadline.passed() or self._stopping.is_set():
                raise BackpressureError(
                    f"the buffer of {self._buffer_bytes} bytes stayed full for {self._block_s:g} s: the brokers take "
                    "nothing; this record was not written"
                ) from fault
            with self._progress:
                self._progress.wait(min(deadline.left(), _POLL_S))
            try:
                self._producer.produce(topic, value, key, partition, partial(self._report, delivered))
            except (BufferError, KafkaException, RuntimeError) as again:
                fault = again
            else:
                return

    def _deliver(self) -> None:
        """Serve delivery reports, deferred frames and the replacement of the producer; body of the delivery thread."""
        while not self._stopping.is_set():
            try:
                served = self._producer.poll(_POLL_S)
                while self._deferred and self._send_deferred(*self._deferred[0]):
                    self._deferred.popleft()
                if self._failed:
                    self._replace()
            except Exception as fault:  # all other transactions depend on this thread
                error = kafka_error(fault)
                if error is not None and error.fatal():
                    self._on_error(error)  # the library raises these instead of calling back
                else:
                    logger.exception("a delivery could not be dealt with")
                served = 1
            if served:
                with self._progress:
                    self._progress.notify_all()

    def _send_deferred(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> bool:
        """Try to send a deferred frame; return True if it needs no further attempt."""
        try:
            self._producer.produce(topic, value, key, partition, partial(self._report, delivered))
        except (BufferError, KafkaException) as fault:
            if _is_passing(fault):
                return False
            logger.warning("a frame for %s was refused: %s", topic, fault)
            delivered(kafka_error(fault) or KafkaError(KafkaError._FAIL, str(fault)), None)
        return True

    def _report(self, delivered: Delivered, fault: KafkaError | None, message: Message) -> None:
        """Pass on the delivery report of a frame, or send the frame again if the report has no offset."""
        if self._stopping.is_set():
            return  # purged
        if fault is None and message.offset() is None:
            topic, number = message.topic() or "", message.partition() or 0
            logger.info("a frame for %s[%d] was acknowledged without an offset; it is sent again", topic, number)
            self.send_soon(topic, number, message.key() or b"", message.value() or b"", delivered)
        else:
            delivered(fault, message)

    def _replace(self) -> None:
        """Replace the producer after a fatal error; the old one reports its frames as failed."""
        try:
            fresh = self._connect()
        except RollbridgeError as fault:
            logger.warning("%s; trying again", fault)
            return
        old, self._producer = self._producer, fresh
        self._failed = False
        old.purge()
        while len(old) and not self._stopping.is_set():
            old.poll(_POLL_S)
        with self._progress:
            self._progress.notify_all()

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            logger.error("the producer met a fatal error and is replaced: %s", error)
            self._fatal = error
            self._failed = True
        else:
            logger.info("the producer reports: %s", error)


def _is_passing(fault: Exception) -> bool:
    """Return True if the queue is full, or the producer about to be replaced."""
    inner = kafka_error(fault)
    return inner is None or inner.fatal() or inner.code() in (KafkaError._QUEUE_FULL, KafkaError._FATAL)
