"""Sender of frames: several go in one batch, which is sent as soon as its broker has answered for the one before.

A frame that finds nothing in flight goes at once, on the thread that sends it; others are collected meanwhile and go
together. Frames of one buffer partition keep their order, also when they are sent again.

The thread of an event loop must not wait, since all of its connections would. For such a *prompt* thread, :meth:`send`
raises where it would wait for room, or for the lock while another thread writes to a blocked broker. It sends by itself
only where there is nothing else to be sent, which a socket without anything in flight takes at once.

The sender retries without end: a frame is refused only for lasting causes (its topic is gone or closed, access is
denied), so no transaction fails because brokers are away for an hour. A frame that may be in the buffer is sent again
with the same sequence number; where brokers have forgotten the producer, it may be there twice, which the fold of the
buffer allows. The queue is bounded: without room, :meth:`FrameSender.send` waits for a bounded time, then raises.

Delivery callbacks run on the sender's thread and must never take a lock that a sending thread may hold: that thread may
be waiting for just that delivery. They may send with :meth:`FrameSender.send_soon`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.produce.v12.response import PartitionProduceResponse

from rollbridge.base.deadlines import TELL_S, wall_ms
from rollbridge.base.forks import hold
from rollbridge.base.logs import limited, log_defect
from rollbridge.errors import BackpressureError, InvalidRequestError, NotAuthorizedError, RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import ConnectionLostError, Meaning, refusal
from rollbridge.kafka.queues import PartitionQueue, QueuedBatch
from rollbridge.kafka.records import RecordBuilder, batch_of_one, new_builder
from rollbridge.kafka.sender import Sender, SenderLimits
from rollbridge.stream.names import Partition

logger = limited(logging.getLogger(__name__))

BUFFER_BYTES_DEFAULT: Final = 64 * 1024 * 1024
BATCH_BYTES: Final = 1_000_000
"""Bytes of a batch of several frames, for which a buffer topic's limit holds; none is set below this."""
_LARGE_BYTES: Final = 16 * 1024
"""Size of a frame from which on it is a batch of its own."""
_ABSENT_S: Final = 30.0
"""Seconds for which brokers may not know a topic: of a new one, not all learn at once."""
_ATTEMPTS_MAX: Final = 5
"""Attempts at a batch for which brokers give answers that should pass, but leave no reason to wait."""
_PROMPT_S: Final = 0.01
"""Seconds for which a prompt thread tries to get the lock."""
_JAMMED_S: Final = 0.2
"""Seconds for which it does not try again then."""
_NO_HEADERS: Final[list[tuple[str, bytes | None]]] = []
_CLOSED: Final = "it is closed: its stream was deleted, or its max.message.bytes lowered"
"""Frames are never too large for a buffer that is open."""
_GONE: Final = "it is gone: its stream was deleted, or the topic alone; `rollbridge stream describe` tells which"
_CLOSED_BY: Final[Mapping[ErrorCode, str]] = {
    ErrorCode.message_too_large: _CLOSED,
    ErrorCode.record_list_too_large: _CLOSED,
    ErrorCode.unknown_topic_or_partition: _GONE,
}


class Undelivered(NamedTuple):
    """Reason why a frame could not be delivered."""

    code: ErrorCode
    is_refusal: bool
    """True if a broker refused the frame, and it is certainly not in the buffer."""
    topic: str
    """Topic of the buffer."""

    @property
    def closed(self) -> str:
        """Why the buffer takes nothing any more; empty if it may."""
        return _CLOSED_BY.get(self.code, "")

    def error(self, doing: str) -> RollbridgeError:
        """Return the error to raise, a new one each time; it names the topic."""
        return refusal(self.code, f"{doing} to topic {self.topic}", f"topic {self.topic}")

    def __str__(self) -> str:
        return str(self.error("write it"))


Delivered = Callable[[Undelivered | None], None]
"""Takes the reason why a frame could not be delivered; None if it is in the buffer."""


class FrameBatch(QueuedBatch):
    """Frames of one buffer partition: being collected, waiting, or in flight.

    Attributes:
        delivered: Callback of each frame.
        attempts: Number of attempts that have ended with an answer of no known meaning.
        size: Bytes of the values while frames are collected.
        fault: Reason why it could not be delivered, once that is settled.
    """

    __slots__ = ("attempts", "builder", "delivered", "fault", "size")

    def __init__(self, opened_s: float) -> None:
        super().__init__(opened_s)
        self.builder: RecordBuilder | None = None
        self.delivered: list[Delivered] = []
        self.attempts = 0
        self.size = 0
        self.fault: Undelivered | None = None

    def append(self, key: bytes, value: bytes) -> bool:
        """Append a frame; return False if it does not fit."""
        if self.builder is None:
            self.builder = new_builder(BATCH_BYTES)
        if self.builder.append(self.count, None, key, value, _NO_HEADERS) is None:
            return False
        self.count += 1
        self.size += len(value)
        return True


FrameQueue = PartitionQueue[FrameBatch]


class FrameSender(Sender[FrameBatch]):
    """Sender of frames. Safe to use from several threads."""

    def __init__(
        self,
        kafka: KafkaClient,
        *,
        buffer_bytes: int = BUFFER_BYTES_DEFAULT,
        block_s: float = 60.0,
    ) -> None:
        """Start the thread; brokers are reached when there is something to send.

        Args:
            buffer_bytes: Maximum bytes that wait to be sent.
            block_s: Seconds that :meth:`send` waits while the buffer is full.
        """
        super().__init__(
            kafka.cluster, SenderLimits(buffer_bytes=buffer_bytes, block_s=block_s), name="rollbridge-delivery"
        )
        self._by_target: dict[Partition, FrameQueue] = {}
        self._opened: dict[FrameQueue, None] = {}
        self._absent: dict[FrameQueue, float] = {}
        self._waiters = 0
        self._prompt: int | None = None
        self._jammed_until = 0.0
        hold(self, "lock", "_progress", "_cluster", "_dispatch")
        self.start()

    def prompt(self, thread: int) -> None:
        """Take a thread, by its identifier, for one that does not wait."""
        self._prompt = thread

    def send(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        """Queue a frame; ``delivered`` is called once it is in the buffer, or cannot be delivered.

        Raises:
            BackpressureError: there was no room in time; the frame was not queued.
            InvalidRequestError: the sender is closed; the frame was not queued.
        """
        if threading.get_ident() == self._prompt:
            self._send_promptly((topic, partition), key, value, delivered)
            return
        with self.lock:
            if self.bytes + len(value) >= self._limits.buffer_bytes:
                self.await_room(len(value))
            self._add((topic, partition), key, value, delivered)

    def send_soon(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Delivered) -> None:
        """Queue a frame without waiting for room, as delivery callbacks have to.

        Raises:
            InvalidRequestError: the sender is closed; the frame was not queued.
        """
        with self.lock:
            self._add((topic, partition), key, value, delivered)

    def wait_until(self, reached: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until ``reached`` is true, re-evaluated after deliveries; return False if not in time."""
        with self._progress:
            self._waiters += 1
            try:
                return self._progress.wait_for(reached, timeout_s)
            finally:
                self._waiters -= 1

    def close(self, timeout_s: float) -> int:
        """Send what is queued and disconnect; return the number of frames not acknowledged in time.

        Whether these are in the buffer is unknown.
        """
        left = self.stop(timeout_s)
        self.tell()
        self.disconnect()
        return left

    def _send_promptly(self, target: Partition, key: bytes, value: bytes, delivered: Delivered) -> None:
        if time.monotonic() < self._jammed_until or not self.lock.acquire(timeout=_PROMPT_S):
            if time.monotonic() >= self._jammed_until:
                self._jammed_until = time.monotonic() + _JAMMED_S
            raise BackpressureError("a broker is slow to take what was written before; this was not queued")
        try:
            if self.bytes + len(value) >= self._limits.buffer_bytes:
                raise BackpressureError(f"the buffer of {self._limits.buffer_bytes} bytes is full; this was not queued")
            self._add(target, key, value, delivered, can_write_now=True)
        finally:
            self.lock.release()

    def _add(
        self, target: Partition, key: bytes, value: bytes, delivered: Delivered, *, can_write_now: bool = False
    ) -> None:
        if self._stopping:
            raise InvalidRequestError("this connection is closed; connect again; nothing was written")
        queue = self._by_target.get(target)
        if queue is None:
            queue = self._by_target[target] = PartitionQueue(target, self.lane(target), placed=True)
        batch = queue.open
        if len(value) >= _LARGE_BYTES:
            if batch is not None:
                self._close(queue, batch, may_send=not can_write_now)
            self._send_alone(queue, key, value, delivered)
            return
        if batch is None or not batch.append(key, value):
            if batch is not None:
                self._close(queue, batch, may_send=not can_write_now)
            batch = queue.open = FrameBatch(time.monotonic())
            batch.append(key, value)
            self._opened[queue] = None
        self.bytes += len(value)
        batch.delivered.append(delivered)
        if not queue.in_flight and not queue.waiting:
            if self._dispatch.is_free(queue) and not (can_write_now and self._dispatch.ready):
                self._close(queue, batch)
            elif batch.count == 1:
                self.wake()  # no other thread may be there to send it

    def _send_alone(self, queue: FrameQueue, key: bytes, value: bytes, delivered: Delivered) -> None:
        """Queue a frame as a batch of its own, since a large one would only be copied more often with others.

        The sender's thread sends it, while this one continues to write.
        """
        batch = FrameBatch(time.monotonic())
        batch.data = batch_of_one(wall_ms(), key, value)
        batch.count = 1
        batch.delivered.append(delivered)
        queue.pending.append(batch)
        self.bytes += len(batch.data)
        self._dispatch.ready[queue] = None
        self.wake()

    def _close(self, queue: FrameQueue, batch: FrameBatch, *, may_send: bool = True) -> None:
        assert batch.builder is not None  # it is open
        batch.data, batch.builder = batch.builder.build(), None
        self.bytes -= batch.size
        queue.open = None
        self._opened.pop(queue, None)
        queue.pending.append(batch)
        self.queued(queue, batch, may_send=may_send)

    # Fate of batches, under the lock ----------------------------------------------------------------------------------

    def written(self, queue: FrameQueue, batch: FrameBatch, base_offset: int) -> None:
        """Settle a batch that is in the buffer."""
        self._absent.pop(queue, None)
        self._count_written(batch)
        self._settle(batch)

    def too_large(self, queue: FrameQueue, batch: FrameBatch, answer: PartitionProduceResponse) -> None:
        """Give a batch up: its buffer was closed."""
        self._fail(queue, batch, answer.error_code)

    def refused(self, queue: FrameQueue, batch: FrameBatch, answer: PartitionProduceResponse) -> None:
        """Give a batch up; one that was damaged on its way is sent again."""
        batch.attempts += 1
        if answer.error_code is ErrorCode.corrupt_message and batch.attempts < _ATTEMPTS_MAX:
            queue.give_back(batch, doubtful=False)
        else:
            self._fail(queue, batch, answer.error_code)

    def denied(self, queue: FrameQueue, batch: FrameBatch, code: ErrorCode) -> None:
        """Give a batch up: the principal may not write to the buffer."""
        self._fail(queue, batch, code)

    def unclear(self, queue: FrameQueue, batch: FrameBatch, code: ErrorCode) -> None:
        """Send a batch again that may be in the buffer, with the same number; the broker recognises a duplicate."""
        batch.attempts += 1
        if code is ErrorCode.duplicate_sequence_number:
            queue.acknowledge(batch, queue.last_offset)
            self._count_written(batch)
            self._settle(batch)
        elif batch.attempts < _ATTEMPTS_MAX:
            queue.give_back(batch, doubtful=True)
        else:
            batch.doubtful = True
            self._fail(queue, batch, code)

    def delayed(self, queue: FrameQueue, code: ErrorCode) -> None:
        """Give up what is sent to a topic that does not exist; one that is new may not be known everywhere."""
        if codes.meaning(codes.PRODUCE, code) is Meaning.REFUSED:
            self._give_up(queue, code)
        elif code is not ErrorCode.unknown_topic_or_partition:
            self._absent.pop(queue, None)
        else:
            now = time.monotonic()
            absent_s = now - self._absent.setdefault(queue, now)
            if absent_s > _ABSENT_S and not queue.in_flight:
                self._give_up(queue, code)
            elif absent_s > TELL_S:
                logger.warning("frames.topic_unknown topic=%s: sending for %g s more", queue.topic, _ABSENT_S)

    def lost(self, fault: ConnectionLostError) -> None:
        """Send again what was in flight; restart the time for which a topic is not known."""
        self._absent.clear()

    def unreached(self, fault: RollbridgeError) -> None:
        """Try again; the time without brokers does not count."""
        self._absent.clear()

    def _give_up(self, queue: FrameQueue, code: ErrorCode) -> None:
        for batch in tuple(queue.held()):
            self._fail(queue, batch, code)

    def changed(self, queue: FrameQueue) -> None:
        """Mark a queue as ready."""
        self._dispatch.note(queue)

    def _fail(self, queue: FrameQueue, batch: FrameBatch, code: ErrorCode) -> None:
        batch.fault = Undelivered(code, not batch.doubtful, queue.topic)
        logger.info("frames.undelivered topic=%s frames=%d error=%s", queue.topic, batch.count, code.name)
        queue.drop(batch)
        self.counts.failed += batch.count
        self._settle(batch)

    def _forgotten(self, queue: FrameQueue, batch: FrameBatch) -> None:
        """Leave a possibly persisted batch where it is: it is sent again, and is in the buffer twice at worst."""

    def _identify_denied(self, fault: NotAuthorizedError) -> None:
        for queue in self._by_target.values():
            self._give_up(queue, ErrorCode.cluster_authorization_failed)

    # Turns of the thread ----------------------------------------------------------------------------------------------

    def _queues(self) -> Iterable[FrameQueue]:
        return self._by_target.values()

    def _unsettled(self) -> int:
        waiting = sum(batch.count for queue in self._by_target.values() for batch in queue.held())
        return waiting + sum(queue.open.count for queue in self._opened if queue.open is not None)

    def _cut(self, now: float) -> None:
        for queue in tuple(self._opened):
            batch = queue.open
            if batch is not None and not queue.in_flight and not queue.waiting:
                self._close(queue, batch)

    def _due(self) -> float:
        return float("inf")

    def _check(self, now: float) -> None:
        """Keep waiting: frames have no time-out of their own, only waiters for an outcome have."""

    def _tell(self, batch: FrameBatch) -> None:
        fault = batch.fault
        if fault is not None and self._stopping:
            return
        for delivered in batch.delivered:
            try:
                delivered(fault)
            except Exception as failed:  # all other transactions depend on this thread
                if self._stopping and isinstance(failed, InvalidRequestError):
                    continue  # nothing is sent any more; leases end what is open
                log_defect(logger, "delivery.failed: continuing")
        if self._waiters:
            with self.lock:
                self._progress.notify_all()
