"""Common base of a transaction and its parts: records go in, frames go out, deliveries are counted.

Callers hold ``_lock``, also while :meth:`~rollbridge.client.sender.FrameSender.send` waits for room. Delivery callbacks
run on the sender's thread and must not take it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from functools import partial

from rollbridge.arguments import NOT_BYTES, as_bytes, as_timestamp, checked, from_fault_on, not_text
from rollbridge.calls import Timeout, as_seconds, in_chunks
from rollbridge.client.frame_writer import HOLD_S, Join, Outbox, PartWriter, check_parts
from rollbridge.client.futures import Completion, Headers, PartStream, WriteFuture
from rollbridge.client.results import PartHandle
from rollbridge.client.runtime import BeginPlan, Runtime
from rollbridge.client.sender import Delivered, Undelivered
from rollbridge.errors import IncompleteError, TransactionClosedError, UnavailableError
from rollbridge.forks import GONE
from rollbridge.kafka.batches import Compression
from rollbridge.model.ids import TransactionId

logger = logging.getLogger(__name__)


@checked(but=("write", "put_batch", "lane", "is_prompt", "cut_older", "leave", "release"))
class Writing:
    """Writer of the records of one transaction. Safe to use from several threads."""

    __slots__ = (
        "_acked",
        "_acked_at",
        "_acked_elsewhere",
        "_buffers",
        "_completion",
        "_finished",
        "_lock",
        "_looked_at",
        "_outbox",
        "_plan",
        "_runtime",
        "_sent",
        "_sent_at",
        "_sent_elsewhere",
        "_writer",
    )

    def __init__(self, runtime: Runtime, plan: BeginPlan, completion: Completion, counter: int, part: int) -> None:
        self._runtime = runtime
        self._plan = plan
        self._completion = completion
        self._finished = False
        self._looked_at = -1  # generation of the catalog
        self._lock = threading.Lock()
        self._buffers = [(topic, counter % partitions) for topic, partitions in plan.buffers]
        # With several streams the commit waits for acknowledgements, so nothing is gained by holding frames back.
        self._outbox = Outbox() if len(self._buffers) == 1 else None
        # Each of these counters is only ever written by one side: senders hold the lock, deliveries have one thread.
        self._sent = 0
        self._sent_elsewhere = 0
        self._acked = 0
        self._acked_elsewhere = 0
        # The same of each buffer but the first, at its place.
        self._sent_at = [0] * len(self._buffers)
        self._acked_at = [0] * len(self._buffers)
        self._writer = PartWriter(
            completion,
            part,
            plan.routes,
            runtime.limits,
            self._emit,
            sticky=counter,
            client_epoch=plan.begin.client_epoch,
            join=self._joining(),
        )
        completion.group = plan.group
        completion.writers = (*completion.writers, self)

    def _joining(self) -> Join | None:
        """Return what has another stream join the transaction; None if that is not for this writer to do."""
        return None

    @property
    def id(self) -> TransactionId:
        """Id of the transaction; pass it to ``join`` in another process."""
        return self._completion.transaction

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams that the transaction was begun for, and that had joined it as far as is known here."""
        return tuple(self._plan.begin.streams)

    @property
    def completion(self) -> Completion:
        """Outcome that this writer shares with its futures."""
        return self._completion

    @property
    def records(self) -> int:
        """Number of records written through this object."""
        return self._writer.count

    @property
    def number(self) -> int:
        """Number of the part of the transaction that this object writes; 0 for whoever has begun it."""
        return self._writer.part

    def write(
        self,
        stream: str,
        key: bytes | None = None,
        value: bytes | None = None,
        *,
        headers: Headers = (),
        timestamp: int | None = None,
    ) -> WriteFuture:
        """Write a record; the commit makes it visible at the place that the future then returns.

        Args:
            stream: ``scope/stream``, or an adopted topic. One that the transaction was not begun for joins it if it is
                of the same group, and this is the owner.
            key: Decides the segment; records with the same key stay in order. None: any segment.
            value: None is a tombstone.
            headers: Kept in their order; the name ``rollbridge`` is taken.
            timestamp: Milliseconds since 1970; None is now.

        Raises:
            RecordTooLargeError, TransactionTooLargeError, BackpressureError, InvalidRequestError: this record was not
                written, and the transaction stays usable.
            InvalidNameError, ScopeNotFoundError, StreamNotFoundError, GroupMismatchError: likewise; the stream cannot
                join the transaction.
            ZooKeeperUnavailableError: likewise; a stream that is to join could not be looked up.
            TransactionClosedError: its end was asked for, or it has ended: aborted, expired or committed.
        """
        if key.__class__ is not bytes and key is not None:
            key = as_bytes("key", key)
        if value.__class__ is not bytes and value is not None:
            value = as_bytes("value", value)
        if timestamp is not None:
            timestamp = as_timestamp(timestamp)
        self._lock.acquire()  # written out, since a `with` here is a tenth of what writing a record costs
        try:
            if self._finished or self._completion.closed:
                raise self._refusal()
            return self._writer.write(stream, key, value, headers, timestamp)
        except (TypeError, AttributeError):
            if not isinstance(stream, str):
                raise not_text("stream", stream) from None
            raise
        finally:
            self._lock.release()

    def write_all(self, stream: str, records: Iterable[tuple[bytes | None, bytes | None]]) -> int:
        """Write many records, given as key and value, and return their number; faster than one by one.

        Some hundreds of them are taken at a time; an iterator may take as long over them as it likes, and use this
        transaction and its connection.

        Raises:
            As :meth:`write`; the records before the one at fault were written. What the iterator raises; what it gave
                before was written.
        """

        def write(some: list[tuple[bytes | None, bytes | None]]) -> None:
            with self._lock:
                if self._finished or self._completion.closed:
                    raise self._refusal()
                before = self._writer.count
                try:
                    self._writer.write_some(stream, some)
                except NOT_BYTES as fault:
                    for key, value in from_fault_on(some[self._writer.count - before :], fault):
                        self._writer.write(stream, key, value, (), None)

        return in_chunks(records, write)

    @property
    def compression(self) -> Compression:
        """Codec of its frames."""
        return Compression(self._runtime.limits.compression)

    def lane(self, stream: str) -> PartStream:
        """Return a stream as this writer writes to it, with its segments and limits; for :meth:`put_batch`.

        Raises as :meth:`write` does for a stream that is none of the transaction's.
        """
        with self._lock:
            if self._finished or self._completion.closed:
                raise self._refusal()
            self._grow()
            return self._writer.lane_of(stream)

    def _grow(self) -> None:
        """Write to partitions that were added to adopted topics since the begin, as far as they are known here."""
        generation = self._runtime.catalog.generation
        if generation == self._looked_at:
            return
        self._looked_at = generation
        for lane in self._writer.lanes.values():
            route = self._runtime.catalog.grown(lane.route)
            if route is not lane.route:
                lane.grow(route)

    def is_prompt(self, stream: str | None = None) -> bool:
        """Return True if a savepoint, and a batch for a stream, are handed over without asking anybody else.

        So it is where everything goes to one buffer partition, and the stream has joined, unless another thread, which
        may wait for room, is writing. A prompt thread may hand them over then, see :mod:`rollbridge.client.sender`.
        """
        if self._outbox is None or self._lock.locked():
            return False
        return stream is None or stream in self._writer.lanes

    def put_batch(self, stream: str, at: int, batch: bytes, first: int, last: int, records: int) -> None:
        """Write a ready-made record batch; see ``PartWriter.put_batch``.

        Raises:
            TransactionTooLargeError, BackpressureError: these records were not written.
            TransactionClosedError: the transaction has ended, or the part is finished.
        """
        with self._lock:
            if self._finished or self._completion.closed:
                raise self._refusal()
            self._writer.put_batch(stream, at, batch, first, last, records)

    def flush(self, timeout: Timeout = None) -> None:
        """Wait until the brokers have acknowledged everything written so far.

        Raises:
            IncompleteError: they refused something; the transaction can only be aborted.
            UnavailableError: not acknowledged in time; it is still being sent.
        """
        with self._lock:
            if not self._completion.closed:
                self._writer.cut_all()
                self._send_outbox()
            sent = self._sent + self._sent_elsewhere
        timeout_s = self._seconds(timeout)
        if not self._runtime.sender.wait_until(lambda: self._answered() >= sent, timeout_s):
            raise UnavailableError(
                f"the brokers have not acknowledged everything of transaction {self.id} within {timeout_s:g} s; "
                "it is still being sent"
            )
        self._check_deliveries()

    def _answered(self) -> int:
        """Return how many messages have been answered."""
        return self._acked + self._acked_elsewhere

    def leave(self) -> None:
        """Refuse everything from now on: the transaction belongs to the process that forked this one."""
        self._lock = GONE

    def cut_older(self, than_s: float) -> None:
        """Send the batches started before ``than_s`` (monotonic seconds), unless another thread is writing now.

        Frames that have waited in the outbox for a moment go, too. Called on the housekeeping thread, which must not
        wait for a writer's lock.
        """
        if self._lock.acquire(blocking=False):
            try:
                if not self._completion.closed:
                    self._grow()
                    self._writer.cut_older(than_s)
                    if self._outbox and self._outbox.since_s <= time.monotonic() - HOLD_S:
                        self._send_outbox()
            finally:
                self._lock.release()

    def release(self) -> None:
        """Release what only an open transaction needs; without it each would be garbage in a cycle."""
        self._writer.release()

    def _seconds(self, timeout: Timeout) -> float:
        return as_seconds(timeout, self._runtime.commit_timeout_s)

    def _refusal(self) -> Exception:
        if self._finished and not self._completion.settled:
            return TransactionClosedError(
                f"part {self._writer.part} of transaction {self.id} is finished; this record was not written",
                transaction=str(self.id),
            )
        return self._completion.refusal()

    def _check_deliveries(self) -> None:
        fault = self._completion.failure
        if fault is not None:
            raise IncompleteError(
                f"a record of transaction {self.id} could not be sent ({fault}); the transaction can only be aborted"
            ) from fault

    def _emit(self, place: int, key: bytes, value: bytes) -> None:
        """Take a finished frame; if this raises, it was not taken."""
        topic, partition = self._buffers[place]
        outbox = self._outbox
        if place:
            delivered = partial(self._delivered_elsewhere, place)
            self._runtime.sender.send(topic, partition, key, value, delivered)
            self._sent_elsewhere += 1
            self._sent_at[place] += 1
        elif outbox is None:
            self._runtime.sender.send(topic, partition, key, value, self._delivered)
            self._sent += 1
        else:
            if not outbox.has_room(value):
                self._send_outbox()
            if outbox.has_room(value):
                outbox.add(key, value)
            else:
                self._runtime.sender.send(topic, partition, key, value, self._delivered)
                self._sent += 1

    def _send_outbox(self) -> None:
        """Send what waits in the outbox; if this raises, it still waits there."""
        if self._outbox:
            delivered = self._delivered if self._sent else self._first_delivered
            self._runtime.sender.send(*self._buffers[0], *self._outbox.packed(), delivered)
            self._sent += 1
            self._outbox.clear()

    def _send_with_outbox(self, key: bytes, value: bytes, delivered: Delivered, *, data: bool = True) -> None:
        """Send what waits in the outbox and a frame that ends the transaction; if this raises, nothing has changed."""
        assert self._outbox is not None
        whole = self._outbox.packed((key, value), data=data)
        self._runtime.sender.send(*self._buffers[0], *whole, delivered)
        self._outbox.clear()

    # On the delivery thread: these take no lock, see rollbridge.client.sender.

    def _delivered(self, fault: Undelivered | None) -> None:
        if fault is not None:
            self._fail(fault)
        self._acked += 1

    def _first_delivered(self, fault: Undelivered | None) -> None:
        self._delivered(fault)

    def _delivered_elsewhere(self, place: int, fault: Undelivered | None) -> None:
        if fault is not None:
            self._fail(fault)
        self._acked_at[place] += 1
        self._acked_elsewhere += 1

    def _fail(self, fault: Undelivered) -> None:
        if self._completion.failure is None:
            logger.warning("a frame of transaction %s was not delivered: %s", self.id, fault)
            what = f" ({fault.closed})" if fault.closed else ""
            self._completion.failure = fault.error(f"send a frame{what}")


@checked()
class Part(Writing):
    """Part of a transaction that another process began. Made by :meth:`rollbridge.Bridge.join`.

    Nothing of a part counts unless the commit names its handle, so a process that dies or is retried leaves nothing
    behind.
    """

    __slots__ = ("_handle",)

    def __init__(self, runtime: Runtime, plan: BeginPlan, completion: Completion, part: int) -> None:
        super().__init__(runtime, plan, completion, completion.transaction.counter, part)
        self._handle: PartHandle | None = None

    def check_parts(self, parts: int, each: int | None = None) -> None:
        """Refuse a number of parts, this one included, if each writes to all segments, or to ``each`` at most.

        Raises:
            TransactionTooLargeError: they could not be committed together.
        """
        lanes = self._writer.lanes.values()
        segments = [(lane.place, number) for lane in lanes for number in lane.route.numbers]
        check_parts(parts, segments, each, self._writer.room.limit)

    def finish(self, timeout: Timeout = None) -> PartHandle:
        """Wait until the brokers have everything; return the handle that the owner passes to ``commit(parts=[...])``.

        Nothing can be written afterwards. Asking again gives the same handle, or waits on.

        Raises:
            IncompleteError: the brokers refused something; let another part do the work again.
            UnavailableError: not acknowledged in time; finish again to wait on.
            TransactionClosedError: the transaction has ended meanwhile.
        """
        with self._lock:
            if not self._finished and self._completion.closed:
                raise self._completion.refusal()
            self._finished = True
        self.flush(timeout)
        if self._handle is None:
            self._handle = PartHandle(self.id, self.number, tuple(self._writer.pieces()), self._writer.frames)
        return self._handle
