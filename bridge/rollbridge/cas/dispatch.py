"""Shell of conditional writes: runs the rounds of each segment, one at a time, and settles the futures.

A round takes all waiting writes that fit together, so many share one native transaction. A thread that waits for its
write drives a free queue until that is settled, which saves a hop (docs/benchmarks.md gives its cost); otherwise one of
as many workers as there are transactional ids does. So a segment with a foreign open native transaction delays no other
segment.

All writers of one connection and stream with the same time-outs share a :class:`StreamAppender`: one lease of
transactional ids, and one queue for each segment. They therefore wait for each other here, and not for native
transactions that are aborted.

Locks: ``AppendQueue.lock`` is held by the thread that drives it, across network round trips;
``StreamAppender._queues_lock`` guards the creation of queues; ``StreamAppenders._lock`` guards the table of channels
and is held while a channel is made. A writer's callbacks run on the thread that settles its write, with
``AppendQueue.lock`` held.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from rollbridge.base.deadlines import Deadline
from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.base.ids import SegmentId
from rollbridge.base.logs import log_defect
from rollbridge.cas import machine
from rollbridge.cas.machine import AppendQueue, ConditionalAppend, Failed, RoundEvent, RoundState, Sealed
from rollbridge.cas.request import AppendRequest
from rollbridge.cas.router import ROUND_BYTES_MAX, SegmentRouter
from rollbridge.cas.session import IDS_PER_SLOT, SessionPool, TransactionalSession, take_slot
from rollbridge.errors import (
    CasOutcomeUnknownError,
    FencedError,
    KafkaUnavailableError,
    RecordTooLargeError,
    RollbridgeError,
    TruncatedError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import AppendRefusedError, AppendUnknownError, NotAuthorizedError, TopicNotFoundError
from rollbridge.kafka.records import BatchBuilder, Compression
from rollbridge.kafka.segment_tail import WAIT_MS, LineageTails, T, WaitedTooLongError, answer_of, ask
from rollbridge.metadata.catalog import Catalog
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.conditions import Refused
from rollbridge.stream.config import TopicLimits
from rollbridge.stream.names import StreamName

logger = logging.getLogger(__name__)

_SEALED: Final = "MESSAGE_TOO_LARGE"
# Errors after the coordinator's time-out has ended the native transaction: nothing of it is committed.
_TIMED_OUT: Final = frozenset(
    {"INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED", "INVALID_TXN_STATE", "TRANSACTION_ABORTABLE"}
)
_LOST: Final = frozenset({"UNKNOWN_TOPIC_OR_PARTITION", "UNKNOWN_TOPIC_ID"})
_DENIED: Final = frozenset({"TOPIC_AUTHORIZATION_FAILED", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"})
_ANSWER_TIMEOUT_S: Final = 20.0
_ELSEWHERE_S: Final = 0.05
"""Longest wait for a write in another queue before checking again."""
_TURN_S: Final = 0.001
"""Longest wait for the writer whose turn it is."""


class StreamAppender:
    """Executor of one connection's conditional writes to a stream. Safe to use from several threads.

    It holds a lease of transactional ids, and reads apart from rounds for those who ask. Made by
    :class:`StreamAppenders`.
    """

    def __init__(
        self,
        kafka: KafkaClient,
        client_name: str,
        catalog: Catalog,
        session: ZooKeeperSession,
        stream: StreamName,
        *,
        timeout_s: float,
        transaction_timeout_s: float,
    ) -> None:
        self.router: Final = SegmentRouter(catalog, session, stream)
        self._transaction_timeout_s = transaction_timeout_s
        self._answer_timeout_s = min(timeout_s, _ANSWER_TIMEOUT_S)
        self._pool = SessionPool(
            kafka,
            stream,
            lambda: take_slot(session, stream, client_name),
            transaction_timeout_ms=int(transaction_timeout_s * 1000),
            retry_timeout_ms=int(self._answer_timeout_s * 1000),
        )
        self._queues: dict[SegmentId, AppendQueue] = {}
        self._queues_lock = threading.Lock()
        self._workers = ThreadPoolExecutor(IDS_PER_SLOT, thread_name_prefix=f"rollbridge-cas-{stream}")
        # Reading the log for a caller must not wait for a round, nor a round for it: hence a second reader.
        self._reader = kafka.log()
        self.tails: Final = LineageTails(self.router.place)
        """Tails of the log apart from rounds; use them through :meth:`ask` only."""
        self._reading = threading.Lock()

    def carry_out(self, request: AppendRequest) -> None:
        """Carry out a write on the calling thread if its queue is free; wait until it is settled."""
        queue = self._queue(request.lineage.active)
        queue.put(request)
        if queue.lock.acquire(blocking=False):
            try:
                while queue.queue and not request.done():
                    self._step(queue)
            finally:
                queue.lock.release()
                self._schedule(queue)
        request.exception()

    def enqueue(self, request: AppendRequest, *, is_moved: bool = False) -> None:
        """Queue a write for a worker; ``is_moved`` if it has waited for a sealed segment before."""
        queue = self._queue(request.lineage.active)
        queue.put(request, is_moved=is_moved)
        self._schedule(queue)

    def ask(self, question: Steps[T], deadline: Deadline) -> T:
        """Answer a question about :attr:`tails`; one thread at a time."""
        if not self._reading.acquire(timeout=deadline.left()):
            raise KafkaUnavailableError(f"others who read {self.router.stream} have had no answer; nothing was written")
        try:
            with self._reader.within(deadline):
                return ask(question, self._reader, deadline)
        finally:
            self._reading.release()

    def close(self) -> None:
        """Carry out what waits, release the transactional ids, and disconnect."""
        try:
            self._workers.shutdown(wait=True)
            self._pool.close()
        finally:
            with self._reading:
                self._reader.close()

    def _queue(self, segment: SegmentId) -> AppendQueue:
        found = self._queues.get(segment)
        if found is None:
            with self._queues_lock:
                found = self._queues.setdefault(
                    segment, AppendQueue(str(self.router.stream), segment, self.router.place)
                )
        return found

    def _schedule(self, queue: AppendQueue) -> None:
        if queue.queue and not queue.scheduled:
            queue.scheduled = True
            self._workers.submit(self._work, queue)

    def _work(self, queue: AppendQueue) -> None:
        queue.scheduled = False
        try:
            with queue.lock:
                while queue.queue:
                    self._step(queue)
        except Exception:
            log_defect(logger, "cas_worker.failed stream=%s", self.router.stream)
        self._schedule(queue)

    def _step(self, queue: AppendQueue) -> None:
        """Carry out one round of what waits in a queue, whose lock is held."""
        if not queue.take_turns() and queue.came.wait(_TURN_S):
            queue.take_turns()
        try:
            taken, room = self.router.limits, self.router.round_bytes_max
        except RollbridgeError as fault:  # the stream was deleted, or its topic released
            fail(queue, queue.drain(), fault)
            return
        round_ = queue.take(room)
        if isinstance(round_, AppendRequest):
            with suppress(TimeoutError):  # it may also come here from a sealed segment meanwhile
                round_.exception(min(queue.queue[0].deadline.left(), _ELSEWHERE_S))
            return
        if round_ is None:
            return
        if pause_s := queue.contention.pause_s(random.random()):
            time.sleep(pause_s)
        try:
            with self._pool.session(max((item.deadline for item in round_.requests), key=Deadline.left)) as session:
                took_s = self._run(queue, round_, session)
        except RollbridgeError as fault:
            fail(queue, round_.requests, fault)
            return
        except BaseException:
            for request in round_.requests:
                fault_text = f"a conditional write to {self.router.stream} was interrupted; it may have been written"
                request.settle(CasOutcomeUnknownError(fault_text, token=request.token))
            raise
        if isinstance(round_.result, Sealed):
            self._reroute([*round_.requests, *queue.drain()], queue.segment, taken)
        elif isinstance(round_.result, Failed):
            self._give_up(queue, round_.requests, round_.result.fault)
        else:
            for request, verdict in queue.settle(round_, took_s):
                self._look_for(queue, request, verdict)

    def _run(self, queue: AppendQueue, round_: ConditionalAppend, session: TransactionalSession) -> float:
        """Carry out the effects of a round, until it has a result; return how long it took since it was appended."""
        # Half of the transaction's time-out is for earlier ones, the rest for ending it.
        left_s = min(item.deadline.left() for item in round_.requests)
        earlier = Deadline(min(self._transaction_timeout_s / 2, left_s))
        answer = Deadline(self._transaction_timeout_s + self._answer_timeout_s)
        started = time.monotonic()
        try:
            effect = round_.handle(machine.Began(looks=round_.hopeless or queue.contention.looks_first()))
            while effect is not None:
                if isinstance(effect, machine.Append):
                    started = time.monotonic()
                deadline = answer if round_.state is RoundState.SEARCHING else earlier
                effect = round_.handle(self._perform(effect, round_, session, deadline))
        except BaseException:
            session.rollback()
            raise
        finally:
            session.reader.unask()
        return time.monotonic() - started

    def _perform(
        self, effect: AnyEffect, round_: ConditionalAppend, session: TransactionalSession, deadline: Deadline
    ) -> RoundEvent:
        """Carry out one effect; return what came of it."""
        try:
            match effect:
                case machine.Append(ahead):
                    if ahead is not None:
                        topic, number = ahead.place
                        session.reader.ask(
                            topic, ahead.offset, wait_ms=WAIT_MS, partition=number, last_epoch=ahead.epoch
                        )
                    return machine.Appended(session.appender.append([(*round_.place, _batch(round_.requests))])[0])
                case machine.End(commits=True):
                    session.appender.commit()
                    return machine.Ended()
                case machine.End():
                    session.rollback()
                    return machine.Ended()
                case machine.Recover():
                    session.appender.init()
                    return machine.Ended()
                case machine.CheckActive():
                    first = round_.requests[0]
                    has_moved = self.router.has_moved(first.key, first.lineage.active)
                    return Sealed() if has_moved else machine.Replied(None)
                case need:
                    try:
                        return machine.Replied(answer_of(need, session.reader, deadline))
                    except RollbridgeError as fault:
                        return machine.Replied(fault)
        except WaitedTooLongError as fault:
            return machine.Stalled(f"an earlier native transaction is still open: {fault}")
        except AppendUnknownError as fault:
            return machine.Lost(fault.why)  # its text calls the outcome unknown, which the round finds out
        except FencedError as fault:
            return machine.Fenced(str(fault))
        except AppendRefusedError as fault:
            if fault.kafka_error == _SEALED:
                return Sealed()
            return machine.Lost(str(fault)) if fault.kafka_error in _TIMED_OUT else Failed(fault)
        except RollbridgeError as fault:
            return Failed(fault)

    def _look_for(self, queue: AppendQueue, request: AppendRequest, verdict: Refused) -> None:
        """Answer a write that is refused: the record that refuses it may be the same write, from an earlier attempt."""
        try:
            deadline = request.deadline
            with self._pool.session(deadline) as session:
                found = ask(queue.tails.find(request.lineage, request.token), session.reader, deadline)
        except TruncatedError as fault:
            why = f"{fault}; whether an earlier attempt was written is unknown, and cannot be determined"
            request.settle(CasOutcomeUnknownError(why, token=request.token))
        except (RollbridgeError, WaitedTooLongError) as fault:
            request.settle(CasOutcomeUnknownError(f"{fault}; ask again", token=request.token))
        else:
            request.settle(found or queue.refusal(request, verdict))

    def _reroute(self, requests: Sequence[AppendRequest], sealed: SegmentId, taken: TopicLimits | None = None) -> None:
        """Move the writes that wait for a sealed segment to its successors.

        Of an adopted topic that takes less than what was ``taken`` for its limits, those stay that it takes.
        """
        logger.info("segment.sealed stream=%s segment=%s", self.router.stream, sealed)
        for request in requests:
            try:
                lineage = self.router.await_lineage(request.key, request.deadline, sealed, taken)
                if lineage.active == sealed and request.size > self.router.round_bytes_max:
                    raise RecordTooLargeError(
                        f"a conditional write of up to {request.size} bytes exceeds {self.router.round_bytes_max}, "
                        f"which the topic of {self.router.stream} takes by now; nothing was written",
                        size_bytes=request.size,
                        limit_bytes=self.router.round_bytes_max,
                    )
                self.router.check_run([record.key for record in request.records])
            except RollbridgeError as fault:
                request.settle(fault)
                continue
            request.lineage = lineage
            self.enqueue(request, is_moved=True)

    def _give_up(self, queue: AppendQueue, requests: Sequence[AppendRequest], fault: RollbridgeError) -> None:
        """Fail the writes of a round; if the topic was deleted, follow the stream."""
        if isinstance(fault, TopicNotFoundError) or (
            isinstance(fault, AppendRefusedError) and fault.kafka_error in _LOST
        ):
            # The stream was deleted, or the segment sealed and truncated unnoticed.
            requests = [*requests, *queue.drain()]
            try:
                if self.router.has_moved(requests[0].key, queue.segment, is_lost=True):
                    self._reroute(requests, queue.segment, self.router.limits)
                    return
            except RollbridgeError as why:
                fault = why
        elif isinstance(fault, AppendRefusedError):
            self.router.suspect()  # the adopted topic may take something else by now
            if fault.kafka_error in _DENIED:
                topic = f"topic {fault.topic}"
                fault = NotAuthorizedError(f"not allowed to write to {topic}", resource=topic)
        fail(queue, requests, fault)


def _batch(requests: Sequence[AppendRequest]) -> bytes:
    builder = BatchBuilder(ROUND_BYTES_MAX * 2, Compression.NONE)
    for request in requests:
        for record in request.records:
            builder.append(request.timestamp_ms, record.key, record.value, record.headers)
    return builder.build()


def fail(queue: AppendQueue, requests: Sequence[AppendRequest], fault: RollbridgeError) -> None:
    """Fail writes with a reason."""
    for request in requests:
        # A call that the end of a write's time has cut off does not know what the write has waited for.
        cut_off = isinstance(fault, KafkaUnavailableError) and request.last_try
        request.settle((cut_off and queue.overdue(request)) or fault)


# Channels


_Key = tuple[StreamName, float, float]


class StreamAppenders:
    """Channels of one connection, by stream and time-outs. Safe to use from several threads."""

    def __init__(self, kafka: KafkaClient, client_name: str, catalog: Catalog, session: ZooKeeperSession) -> None:
        self._make = partial(StreamAppender, kafka, client_name, catalog, session)
        self._lock = threading.Lock()
        self._open: dict[_Key, tuple[StreamAppender, int]] = {}

    @contextmanager
    def channel(
        self, stream: StreamName, *, timeout_s: float, transaction_timeout_s: float
    ) -> Iterator[StreamAppender]:
        """Return the channel of a stream; it is closed when its last user leaves the context."""
        key = (stream, timeout_s, transaction_timeout_s)
        with self._lock:
            found, users = self._open.get(key, (None, 0))
            found = found or self._make(stream, timeout_s=timeout_s, transaction_timeout_s=transaction_timeout_s)
            self._open[key] = (found, users + 1)
        try:
            yield found
        finally:
            with self._lock:
                _, users = self._open.pop(key)
                if users > 1:
                    self._open[key] = (found, users - 1)
            if users == 1:
                found.close()
