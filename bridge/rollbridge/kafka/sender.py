"""Sender: one idempotent producer, one connection to each broker, one lock and one thread, as Kafka's Sender.

A thread of the application that fills a batch sends it, under the lock, if its broker may be sent something at once.
The sender's thread takes the answers, sends what has waited for them, and reaches brokers. It never holds the lock
while it waits for a broker, looks up leaders, connects, or calls code of the user.

Subclasses own the queues and decide what becomes of what a broker did not take; see
:class:`~rollbridge.kafka.dispatch.BatchOwner`, whose methods they have.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from kio.schema.errors import ErrorCode

from rollbridge.base.deadlines import TELL_S, BackgroundCall, Deadline
from rollbridge.base.logs import log_defect
from rollbridge.base.metrics import SenderCounts
from rollbridge.errors import BackpressureError, NotAuthorizedError, RollbridgeError
from rollbridge.kafka.dispatch import BACKOFF_MAX_S, IN_FLIGHT_MAX, BatchOwner, Dispatcher, new_producer_id
from rollbridge.kafka.errors import ConnectionLostError
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.queues import Lane, P, PartitionQueue
from rollbridge.stream.names import Partition

logger = logging.getLogger(__name__)

_CHECK_S: Final = 0.5
_POLL_MAX_S: Final = 0.5
_PAUSE_S: Final = 0.05
_ASKING_S: Final = 0.05
"""Seconds between turns that can do little, as a broker is being asked."""
EPOCH_MAX: Final = 2**15 - 1
"""Largest epoch of a producer id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderLimits:
    """Bounds of a sender."""

    buffer_bytes: int
    """Bytes of batches that may wait for the brokers; beyond that, writers block."""
    block_s: float
    """Seconds that a writer blocks for room before it gets a ``BackpressureError``."""


class Sender(BatchOwner[P]):
    """Sender of the batches of its queues.

    Attributes:
        lock: Guards the sender, its dispatcher, queues and batches.
        bytes: Size of what is not settled: closed batches, and what subclasses count of open ones.
        counts: What has been done so far.
    """

    def __init__(
        self,
        new_cluster: Callable[[], Cluster],
        limits: SenderLimits,
        *,
        name: str,
        producer: tuple[int, int] | None = None,
    ) -> None:
        """Prepare; :meth:`start` starts the thread.

        Args:
            new_cluster: Opens the connections.
            limits: Bounds.
            name: Name of the thread.
            producer: Producer id and epoch; None if one is to be got when something is sent.
        """
        self.lock = threading.Lock()
        self.bytes = 0
        self.counts = SenderCounts()
        self._limits = limits
        # Shares the lock, so a writer that waits for room lets the thread take answers. Notified when batches settle.
        self._progress = threading.Condition(self.lock)
        self._cluster = new_cluster()
        self._dispatch: Dispatcher[P] = Dispatcher(self._cluster, self, producer, in_flight_max=IN_FLIGHT_MAX)
        self._lanes: dict[Partition, Lane[P]] = {}
        self._asking: BackgroundCall[None] = BackgroundCall(f"{name}-reach")
        """Reaches brokers and gets producer ids: while one broker is silent, the others are served."""
        self._settled: deque[P] = deque()
        """Settled batches whose callbacks are pending, or under way."""
        self._is_awaited = False
        """True once :meth:`stop` waits for them."""
        self._is_forgotten = False
        """True if brokers do not know the producer id any more, in no epoch."""
        self._checked_at = 0.0
        self._woken = False
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._stopping = False
        self._turned_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def silence_s(self) -> float:
        """Seconds since the thread's last turn that succeeded: under one, unless a defect keeps it from sending."""
        return time.monotonic() - self._turned_at

    @property
    def retries(self) -> int:
        """Number of times that a batch was sent again."""
        return self._dispatch.retries

    def lane(self, target: Partition) -> Lane[P]:
        """Return the sequence numbers of a partition, which are the same for all of its queues.

        The caller holds the lock.
        """
        return self._lanes.setdefault(target, Lane())

    def wake(self) -> None:
        """Let the thread take a turn. May be called from anywhere."""
        if not self._woken:
            self._woken = True
            with suppress(OSError):  # full, which wakes it as well, or closed
                self._ring.send(b"\0")

    def await_room(self, size: int = 0) -> None:
        """Return once there is room for a batch, or for so many bytes of one.

        The caller holds the lock; waiting releases it.

        Raises:
            BackpressureError: There was no room within the time for that.
        """
        limits = self._limits
        if self._has_room(size):
            return
        self._dispatch.pump()
        began_s = time.monotonic()
        has_room = self._progress.wait_for(lambda: self._has_room(size), limits.block_s)
        self.counts.waits += 1
        self.counts.waited_s += time.monotonic() - began_s
        if not has_room or self._stopping:
            raise BackpressureError(
                f"the buffer of {limits.buffer_bytes} bytes stayed full for {limits.block_s:g} s: the brokers take "
                "nothing, or a segment's successors are awaited; this record was not written"
            )

    def queued(self, queue: PartitionQueue[P], batch: P, *, may_send: bool = True) -> None:
        """Send a batch that was closed and queued, if it may be sent now. The caller holds the lock.

        Without ``may_send`` the sender's thread sends it.
        """
        dispatch = self._dispatch
        self.bytes += len(batch.data)
        dispatch.ready[queue] = None
        if may_send:
            dispatch.pump()
        if dispatch.ready or dispatch.is_cut_off:
            self.wake()

    def stop(self, timeout_s: float) -> int:
        """Send what is left within ``timeout_s``, then end the thread; return what was not acknowledged.

        Afterwards nothing uses the cluster, which the caller closes with :meth:`disconnect`.
        """
        deadline = Deadline(timeout_s)
        with self.lock:
            self._cut(float("inf"))
            self._dispatch.pump()
            self.wake()
            # Callbacks, too: they may send what ends a transaction.
            self._is_awaited = True
            self._progress.wait_for(lambda: not self._unsettled() and not self._settled, deadline.left())
            left = self._unsettled()
            self._stopping = True
            self._progress.notify_all()
        self.wake()
        self._thread.join()  # not under the lock, which the thread needs to end
        return left

    def disconnect(self) -> None:
        """Close the connections, once the thread has ended."""
        self._cluster.close()
        self._bell.close()
        self._ring.close()

    # What is the same for all idempotent producers; subclasses decide the rest --------------------------------------

    def fenced(self, queue: PartitionQueue[P], batch: P, code: ErrorCode) -> None:
        """Send a batch again, with a new producer id: ours is not shared, so brokers have expired it."""
        queue.give_back(batch, doubtful=False)
        self._is_forgotten = True
        self._expire()

    def out_of_order(self, queue: PartitionQueue[P], batch: P) -> None:
        """Begin with the next epoch of the producer id, as Kafka's producer does (KIP-360).

        A predecessor was acknowledged but is missing: the log has lost its end, and accepts no sequence number of this
        epoch any more. Or it was given up and may still be on its way: once the log has a batch of the next epoch, it
        takes none of this one.
        """
        self._expire()

    def pause_s(self, code: ErrorCode) -> float:
        """Return for how long a queue is left alone that cannot be written now."""
        return _PAUSE_S

    def lost(self, fault: ConnectionLostError) -> None:
        """Send again what was in flight."""

    def unreached(self, fault: RollbridgeError) -> None:
        """Try again."""

    @abstractmethod
    def _queues(self) -> Iterable[PartitionQueue[P]]:
        """Return all queues. Called under the lock."""

    @abstractmethod
    def _unsettled(self) -> int:
        """Return the number of what waits for an acknowledgement, open batches included. Called under the lock."""

    @abstractmethod
    def _cut(self, now: float) -> None:
        """Close and queue the open batches that are due at this time. Called under the lock."""

    @abstractmethod
    def _due(self) -> float:
        """Return the time at which :meth:`_cut` will have work; infinite if at none. Called under the lock."""

    @abstractmethod
    def _check(self, now: float) -> None:
        """Check time-outs, twice a second. Called under the lock."""

    @abstractmethod
    def _forgotten(self, queue: PartitionQueue[P], batch: P) -> None:
        """Deal with a possibly persisted batch of a producer id that brokers do not accept any more; under the lock."""

    @abstractmethod
    def _identify_denied(self, fault: NotAuthorizedError) -> None:
        """Deal with the refusal of a producer id: the principal may write nowhere. Called under the lock."""

    @abstractmethod
    def _tell(self, batch: P) -> None:
        """Notify all that wait for a settled batch. Called without the lock: it runs code of the user."""

    def _background_calls(self) -> None:
        """Run requests that may wait for brokers, once in each turn. Called without the lock."""

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
                self._turned_at = time.monotonic()
            except Exception:  # all writers depend on this thread
                log_defect(logger, "sender.reconnecting thread=%r", self._thread.name)
                self._recover()
                time.sleep(BACKOFF_MAX_S)
        with self.lock:
            self._dispatch.close()  # what is being asked reaches no further broker
        if not self._asking.wait(TELL_S):
            logger.info('sender.ending thread=%r reason="awaits a response or its deadline"', self._thread.name)
            self._asking.wait(threading.TIMEOUT_MAX)  # it has the cluster until then

    def _recover(self) -> None:
        """Begin again without the connections: whatever a turn has met must not be met by all that follow."""
        try:
            with self.lock:
                self._dispatch.reset(self._queues())
        except Exception:
            log_defect(logger, "sender.reconnect_failed thread=%r", self._thread.name)

    def _turn(self) -> None:
        """Wait for an answer, or for what is due, then do all work that there is."""
        readable = self._wait()
        dispatch = self._dispatch
        with self.lock:
            if self._woken:
                with suppress(OSError):
                    self._bell.recv(1024)
                self._woken = False
            now = time.monotonic()
            for node, link in list(dispatch.links.items()):
                dispatch.receive(node, link)
            dispatch.drop_closed(readable)
            self._cut(now)
            may_ask = self._may_ask()
            is_renewing = (
                may_ask and dispatch.expired and bool(dispatch.ready) and now >= dispatch.retry_at and self._let_go()
            )
            if now - self._checked_at >= _CHECK_S:
                self._checked_at = now
                for node, link in list(dispatch.links.items()):
                    if link.requests and (link.connection.overdue() or not link.connection.in_flight):
                        dispatch.lost(node, ConnectionLostError(f"{link.connection.address} does not answer in time"))
                self._check(now)
            dispatch.pump()
            is_reaching = may_ask and dispatch.is_cut_off and now >= dispatch.retry_at
        if is_reaching or is_renewing:
            self._asking.begin(partial(self._ask, is_renewing=is_renewing), self.wake)
        # Not under the lock: callbacks are code of the user.
        self._background_calls()
        self.tell()

    def _may_ask(self) -> bool:
        """Return True if nothing is being asked; raise what ended the last time that it was."""
        if self._asking.done:
            self._asking.take()
        return not self._asking.under_way

    def _ask(self, *, is_renewing: bool) -> None:
        self._dispatch.reach(self.lock)
        if is_renewing:
            self._renew_id()

    def tell(self) -> None:
        """Notify all that wait for the batches settled meanwhile; called without the lock."""
        settled = self._settled
        while settled:
            try:
                self._tell(settled[0])
            finally:
                settled.popleft()
        if self._is_awaited:
            with self.lock:
                self._progress.notify_all()

    def _wait(self) -> set[int]:
        """Wait until there is something to do; return the connections that are readable."""
        dispatch = self._dispatch
        with self.lock:
            links = [link.connection for link in dispatch.links.values()]
            if self._settled or any(connection.has_answer() for connection in links):
                return set()
            now = time.monotonic()
            until = min(now + _POLL_MAX_S, self._due(), dispatch.next_attempt_s(now))
            if self._asking.under_way and not self._asking.done:
                until = max(until, min(now + _ASKING_S, self._due()))  # its end wakes us
            poller = select.poll()
            poller.register(self._bell, select.POLLIN)
            for connection in links:
                poller.register(connection, select.POLLIN)
        return {number for number, _ in poller.poll(max(until - now, 0.0) * 1000)}

    def _has_room(self, size: int) -> bool:
        """Return True if there is room for so many bytes more; for any number of them if nothing waits."""
        waiting = self.bytes
        return waiting + size < self._limits.buffer_bytes or not waiting or self._stopping

    def _settle(self, batch: P) -> None:
        """Count a batch as settled, and have it told. The caller holds the lock."""
        self.bytes -= len(batch.data)
        self._settled.append(batch)
        self._progress.notify_all()

    def _count_written(self, batch: P) -> None:
        """Count a batch that was written. The caller holds the lock."""
        counts = self.counts
        counts.batches += 1
        counts.messages += batch.count
        counts.bytes += len(batch.data)

    def _expire(self) -> None:
        """Send nothing before there is a new producer id."""
        self._dispatch.expired = True
        self._dispatch.back_off()

    def _let_go(self) -> bool:
        """Deal with batches that only the old producer id could identify; return False while any are in flight."""
        queues = list(self._queues())
        if any(queue.in_flight for queue in queues):
            return False
        for queue in queues:
            for batch in tuple(queue.held()):
                if batch.doubtful:
                    self._forgotten(queue, batch)
        return True

    def _renew_id(self) -> None:
        """Take the next epoch, or get a new producer id; nothing is sent before there is one.

        The broker is asked without the lock, because it may be silent for long and writing threads hold the lock.
        """
        dispatch = self._dispatch
        producer_id, epoch = dispatch.producer
        if 0 <= epoch < EPOCH_MAX and not self._is_forgotten:
            producer = producer_id, epoch + 1
        else:
            try:
                # Ask once, without retries: this thread serves all writers, and comes back by itself.
                producer = new_producer_id(self._cluster, timeout_s=0.0)
            except RollbridgeError as fault:
                logger.info("producer_id.unavailable reason=%s", fault)
                with self.lock:
                    dispatch.back_off()
                    if isinstance(fault, NotAuthorizedError):
                        self._identify_denied(fault)
                return
        with self.lock:
            dispatch.producer = producer
            dispatch.expired = self._is_forgotten = False
            queues = list(self._queues())
            for queue in queues:
                queue.restart()
            self._lanes = {queue.target: queue.lane for queue in queues}
            for queue in queues:
                dispatch.note(queue)
            dispatch.pump()
