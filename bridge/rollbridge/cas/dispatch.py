"""Dispatch of conditional writes: one lane per segment, and group commit by whichever thread gets there first.

A round takes everything that waits and goes together, so many writes share one native transaction. A thread that writes
one record at a time carries out its own round; asynchronous writes are carried out by the workers of the dispatcher.
Whoever finds a lane free carries out rounds until its own write has its answer, then wakes the thread whose write is
first. Writes keep the order in which each writer began them; where several writers of the connection contend, they win
in turn.

All writers of one connection and stream with the same time-outs share a :class:`StreamAppender`: one lease of
transactional ids and one dispatcher. They therefore wait for each other here, and not for native transactions that come
to nothing.

Locks: ``AppendQueue.lock`` is held by the thread that carries out rounds, across network round trips;
``AppendDispatcher._lanes_lock`` guards the creation of lanes; ``StreamAppenders._lock`` guards the table of channels
and is held while a channel is made. A writer's callbacks run on the thread that settles its write, with
``AppendQueue.lock`` held.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, assert_never
from weakref import WeakKeyDictionary

from rollbridge.calls import Deadline
from rollbridge.cas.append import (
    AppendCommitted,
    ConditionalAppend,
    Judged,
    NotWritten,
    RoundResult,
    Unclear,
    find_write,
)
from rollbridge.cas.append import patience as round_patience
from rollbridge.cas.request import AppendRequest, Contention
from rollbridge.cas.router import SegmentRouter
from rollbridge.cas.session import IDS_PER_SLOT, EnginePool, take_slot
from rollbridge.cas.tail import StreamLogs, WaitedTooLongError
from rollbridge.config import ConnectionSettings
from rollbridge.errors import (
    CasOutcomeUnknownError,
    CasWriteError,
    RecordTooLargeError,
    RollbridgeError,
    TransactionIdOutOfOrderError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.kafka.errors import AppendRefusedError, NotAuthorizedError, ProducerFencedError, TopicNotFoundError
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Cluster
from rollbridge.model.cas import Accepted, ConditionalWrite, Falling, Mates, Refused, Scope
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import StreamName
from rollbridge.model.records import TopicLimits
from rollbridge.model.sn import DLSN
from rollbridge.zookeeper.catalog import Catalog
from rollbridge.zookeeper.session import ZooKeeperSession

# Lanes


WAITING_MAX: Final = 64
"""Maximum number of writes behind a round that are considered when it is decided."""
_ROOM_S: Final = 0.001


class AppendQueue:
    """Queue of conditional writes to one segment. Any thread may call :meth:`put`; all else needs ``lock``."""

    def __init__(self) -> None:
        self.queue: deque[AppendRequest] = deque()
        self.lock = threading.Lock()
        self.contention = Contention()
        self.scheduled = False
        self._wins = itertools.count(1)
        self._last_win: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._due: object = None
        self._came = threading.Event()

    @property
    def contended(self) -> bool:
        """True if writers of this lane have just been refused because of each other."""
        return self._due is not None

    def put(self, request: AppendRequest) -> None:
        """Append a write to the queue."""
        self.queue.append(request)
        if request.owner is self._due:
            self._came.set()

    def waiting(self) -> list[AppendRequest]:
        """Return the waiting writes, oldest first, at most ``WAITING_MAX``."""
        # By index, since other threads may append meanwhile; only the holder of the lock removes.
        return [self.queue[place] for place in range(min(len(self.queue), WAITING_MAX))]

    def take_out(self, refused: Iterable[AppendRequest]) -> list[AppendRequest]:
        """Remove writes that are refused without a round of their own; the writer whose last win is oldest comes first.

        The next round also waits for that writer for a moment, since the winner, who has its answer at the same time,
        would otherwise be first again and again.
        """
        order = sorted(refused, key=self._longest_ago)
        for request in order:
            self.queue.remove(request)
        self._came.clear()
        self._due = order[0].owner if order else None
        return order

    def won(self, owner: object) -> None:
        """Record that a round of a writer was committed."""
        self._last_win[owner] = next(self._wins)

    def take_turns(self) -> None:
        """Move to the front a write of the contender whose last win is oldest."""
        if self._due is None:
            return
        turn = self._of_due()
        if turn is None and self._came.wait(_ROOM_S):
            turn = self._of_due()
        if turn is not None:
            self.queue.remove(turn)
            self.queue.appendleft(turn)

    def _longest_ago(self, request: AppendRequest) -> int:
        return self._last_win.get(request.owner, 0)

    def _of_due(self) -> AppendRequest | None:
        for request in self.waiting():
            # A write that expects another one waiting here has to stay behind it.
            if request.owner is self._due and not request.awaited({}):
                return request
        return None


logger = logging.getLogger(__name__)

_ROUND_WRITES_MAX: Final = 2_000
_SEALED: Final = "MESSAGE_TOO_LARGE"
# Errors after the coordinator's time-out has ended the native transaction: nothing of it is committed.
_TIMED_OUT: Final = frozenset(
    {"INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED", "INVALID_TXN_STATE", "TRANSACTION_ABORTABLE"}
)
_LOST: Final = frozenset({"UNKNOWN_TOPIC_OR_PARTITION", "UNKNOWN_TOPIC_ID"})
_DENIED: Final = frozenset({"TOPIC_AUTHORIZATION_FAILED", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"})


class Moved:
    """Result of a round whose segment was sealed; its successors take the writes."""


class AppendDispatcher:
    """Executor of one connection's conditional writes to a stream. Safe to use from several threads."""

    def __init__(
        self,
        pool: EnginePool,
        shape: SegmentRouter,
        *,
        transaction_timeout_s: float,
        answer_timeout_s: float,
        name: str,
    ) -> None:
        self._pool = pool
        self._shape = shape
        self._logs = StreamLogs(shape.place)
        self._transaction_timeout_s = transaction_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._lanes: dict[SegmentId, AppendQueue] = {}
        self._lanes_lock = threading.Lock()
        self._workers = ThreadPoolExecutor(IDS_PER_SLOT, thread_name_prefix=f"rollbridge-cas-{name}")

    def carry_out(self, request: AppendRequest) -> None:
        """Carry out a write on the calling thread; return when it is settled."""
        request.attended = True
        self._lane(request.course.active).put(request)
        while not request.done.done():
            lane = self._lane(request.course.active)
            if not lane.lock.acquire(blocking=False):
                request.done.wait()
                continue
            try:
                while lane.queue and not request.done.done():
                    self._step(lane)
            finally:
                lane.lock.release()
                self._hand_over(lane)

    def enqueue(self, request: AppendRequest) -> None:
        """Queue a write for a worker."""
        lane = self._lane(request.course.active)
        lane.put(request)
        self._schedule(lane)

    def close(self) -> None:
        """Carry out what waits, then stop the workers."""
        self._workers.shutdown(wait=True)

    def _lane(self, segment: SegmentId) -> AppendQueue:
        lane = self._lanes.get(segment)
        if lane is None:
            with self._lanes_lock:
                lane = self._lanes.setdefault(segment, AppendQueue())
        return lane

    def _hand_over(self, lane: AppendQueue) -> None:
        """Wake whoever carries out what waits in a lane that no thread holds any more."""
        try:
            first = lane.queue[0]
        except IndexError:
            return
        if first.attended:
            first.done.nudge()
        else:
            self._schedule(lane)

    def _schedule(self, lane: AppendQueue) -> None:
        if not lane.scheduled:
            lane.scheduled = True
            self._workers.submit(self._work, lane)

    def _work(self, lane: AppendQueue) -> None:
        lane.scheduled = False
        try:
            with lane.lock:
                while lane.queue:
                    self._step(lane)
        except Exception:
            logger.exception("a worker of conditional writes to %s failed", self._shape.stream)
        self._hand_over(lane)

    def _step(self, lane: AppendQueue) -> None:
        """Carry out one round of what waits in a lane, whose lock is held."""
        lane.take_turns()
        taken = self._shape.limits
        entries = self._collect(lane)
        if not entries:
            return
        batch = list(entries)
        if pause_s := lane.contention.pause_s(random.random()):
            time.sleep(pause_s)
        try:
            with self._pool.engine() as engine:
                round_ = ConditionalAppend(
                    engine, self._logs, batch, list(entries.values()), lane.waiting, alone=not lane.contended
                )
                result = self._run(lane.contention, round_, batch[0])
                refuted = round_.refuted
        except ProducerFencedError as fault:
            result, refuted = NotWritten(str(fault)), {}
        except AppendRefusedError as fault:
            if fault.kafka_error == _SEALED:
                self._reroute([*batch, *_drain(lane)], batch[0].course.active, taken)
                return
            if fault.kafka_error in _LOST:
                self._follow([*batch, *_drain(lane)], fault)
                return
            if fault.kafka_error not in _TIMED_OUT:
                self._shape.suspect()  # the adopted topic may take something else by now
                _fail(batch, self._refusal(fault))
                return
            result, refuted = NotWritten(str(fault)), {}
        except TopicNotFoundError as fault:
            self._follow([*batch, *_drain(lane)], fault)
            return
        except RollbridgeError as fault:
            _fail(batch, fault)
            return
        except BaseException:
            for request in batch:
                fault_text = f"a conditional write to {self._shape.stream} was interrupted; it may have been written"
                request.done.set_exception(CasOutcomeUnknownError(fault_text, token=request.token))
            raise
        if isinstance(result, Moved):
            self._reroute([*batch, *_drain(lane)], batch[0].course.active, taken)
            return
        if isinstance(result, AppendCommitted):
            lane.won(batch[-1].owner)
        for request in lane.take_out(refuted):
            self._refuse(request, refuted[request])
        lane.queue.extendleft(reversed(self._settle(batch, result)))

    def _run(self, contention: Contention, round_: ConditionalAppend, first: AppendRequest) -> RoundResult | Moved:
        """Carry out a round, reading before appending where other writers contend."""
        patience = round_patience(self._transaction_timeout_s, self._answer_timeout_s)
        hopeless = round_.is_refuted()
        if hopeless or contention.looks_first():
            try:
                verdicts = round_.look(patience.earlier)
            except WaitedTooLongError as fault:
                return NotWritten(f"an earlier native transaction is still open: {fault}")
            if not all(isinstance(verdict, Accepted) for verdict in verdicts):
                if not hopeless:
                    contention.refused_by_look()
                # Unlike an append, a look does not notice that the segment was sealed, and may rest on an old epoch.
                return Moved() if self._shape.has_moved(first.position, first.course.active) else Judged(verdicts)
        started = time.monotonic()
        result = round_.run(patience)
        if isinstance(result, AppendCommitted):
            contention.won(time.monotonic() - started, round_.met_others)
        elif isinstance(result, Judged):
            contention.lost()
        return result

    def _collect(self, lane: AppendQueue) -> dict[AppendRequest, ConditionalWrite]:
        """Take from a lane the writes that go together, oldest first."""
        places: dict[AppendRequest, int] = {}
        mates = Mates()
        entries = mates.entries
        size = 0
        while lane.queue and len(entries) < _ROUND_WRITES_MAX:
            request = lane.queue[0]
            fault = request.broken_chain() or self._overdue(request)
            if fault is not None:
                lane.queue.popleft()
                request.done.set_exception(fault)
                continue
            before = request.awaited(places)
            if before is not None:
                if entries:
                    break
                before.done.wait(request.deadline.left())
                continue
            entry = request.entry(places)
            if entries and (size + request.size > self._shape.round_bytes_max or not mates.fits(entry)):
                break
            lane.queue.popleft()
            places[request] = len(entries)
            mates.add(entry)
            size += request.size
        return dict(zip(places, entries, strict=True))

    def _overdue(self, request: AppendRequest) -> RollbridgeError | None:
        if not request.deadline.passed():
            return None
        why = f": {request.last_try}" if request.last_try else ""
        return UnavailableError(
            f"the conditional write to {self._shape.stream} took too long{why}; nothing was written"
        )

    def _settle(self, batch: Sequence[AppendRequest], result: RoundResult) -> list[AppendRequest]:
        """Answer the writes that are decided; return those to be tried again."""
        match result:
            case AppendCommitted():
                for request, sns in zip(batch, result.sns, strict=True):
                    request.done.set_result(list(sns))
                return []
            case NotWritten():
                logger.debug("a round of conditional writes to %s is repeated: %s", self._shape.stream, result.why)
                for request in batch:
                    request.last_try = result.why
                return list(batch)
            case Unclear():
                self._tell_unclear(batch, result)
                return []
            case Judged():
                again = []
                for request, verdict in zip(batch, result.verdicts, strict=True):
                    if isinstance(verdict, Accepted):
                        again.append(request)
                    elif isinstance(verdict, Refused):
                        self._refuse(request, verdict)
                    elif isinstance(verdict, Falling):
                        request.done.set_exception(self._falling(verdict))
                    else:
                        request.done.set_exception(verdict)
                return again
            case never:
                assert_never(never)

    def _tell_unclear(self, batch: Sequence[AppendRequest], result: Unclear) -> None:
        offset = result.offset
        for request in batch:
            token = replace(request.token, place=DLSN.of(request.course.active, offset))
            offset += len(request.records)
            request.done.set_exception(
                CasOutcomeUnknownError(
                    f"a conditional write to {self._shape.stream} may or may not be committed, and nobody answers: "
                    f"{result.why}; ask with outcome({str(token)!r})",
                    token=token,
                )
            )

    def _refuse(self, request: AppendRequest, verdict: Refused) -> None:
        if request.repeatable:
            # The record that refuses this write may be the same write, from an earlier attempt.
            try:
                with self._pool.engine() as engine:
                    deadline = Deadline(self._answer_timeout_s)
                    found = find_write(self._logs, request.course, engine.reader, request.token, deadline)
            except TruncatedError as fault:
                why = f"{fault}; it is not known whether an earlier attempt was written, and nobody will be able to say"
                request.done.set_exception(CasOutcomeUnknownError(why, token=request.token))
                return
            except (RollbridgeError, WaitedTooLongError) as fault:
                request.done.set_exception(CasOutcomeUnknownError(f"{fault}; ask again", token=request.token))
                return
            if found:
                request.done.set_result(found)
                return
        what = "the segment's last record" if request.scope is Scope.SEGMENT else "the last record with this key"
        request.done.set_exception(
            CasWriteError(
                f"525: expected {verdict.expected} in {self._shape.stream}, but {what} is {verdict.actual}; "
                "nothing was written",
                expected=verdict.expected,
                actual=verdict.actual,
            )
        )

    def _falling(self, verdict: Falling) -> TransactionIdOutOfOrderError:
        return TransactionIdOutOfOrderError(
            f"transaction id {verdict.transaction_id} is lower than {verdict.last}, the last one in its part of "
            f"{self._shape.stream}; nothing was written",
            transaction_id=verdict.transaction_id,
            last=verdict.last,
        )

    def _reroute(self, requests: Sequence[AppendRequest], sealed: SegmentId, taken: TopicLimits | None = None) -> None:
        """Move the writes that wait for a sealed segment to its successors.

        Of an adopted topic that takes less than what was ``taken`` for its limits, those stay that it takes.
        """
        logger.info("segment %s of %s is sealed; conditional writes go to its successors", sealed, self._shape.stream)
        for request in requests:
            try:
                course = self._shape.await_course(request.position, request.deadline, sealed, taken)
                if course.active == sealed and request.size > self._shape.round_bytes_max:
                    raise RecordTooLargeError(
                        f"a conditional write of up to {request.size} bytes exceeds {self._shape.round_bytes_max}, "
                        f"which the topic of {self._shape.stream} takes by now; nothing was written",
                        size_bytes=request.size,
                        limit_bytes=self._shape.round_bytes_max,
                    )
                self._shape.position_of_run([record.key for record in request.records])
            except RollbridgeError as fault:
                request.done.set_exception(fault)
                continue
            lane = self._lane(course.active)
            request.course = course
            lane.put(request)
            self._schedule(lane)

    def _follow(self, requests: Sequence[AppendRequest], fault: RollbridgeError) -> None:
        """Handle a missing topic: the stream was deleted, or the segment sealed and truncated unnoticed."""
        first = requests[0]
        try:
            has_moved = self._shape.has_moved(first.position, first.course.active, is_lost=True)
        except RollbridgeError as why:
            _fail(requests, why)
            return
        if has_moved:
            self._reroute(requests, first.course.active, self._shape.limits)
        else:
            _fail(requests, fault)

    def _refusal(self, fault: AppendRefusedError) -> RollbridgeError:
        if fault.kafka_error in _DENIED:
            return NotAuthorizedError(f"not allowed to write to topic {fault.topic}", resource=f"topic {fault.topic}")
        return fault


def _drain(lane: AppendQueue) -> list[AppendRequest]:
    waiting = list(lane.queue)
    lane.queue.clear()
    return waiting


def _fail(batch: Sequence[AppendRequest], fault: RollbridgeError) -> None:
    for request in batch:
        request.done.set_exception(fault)


# Channels


_ANSWER_TIMEOUT_S: Final = 20.0


class StreamAppender:
    """Shared state of one stream's conditional writers: lease of transactional ids, dispatcher and a reader of its own.

    Made by :class:`StreamAppenders`.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        catalog: Catalog,
        session: ZooKeeperSession,
        stream: StreamName,
        *,
        timeout_s: float,
        transaction_timeout_s: float,
    ) -> None:
        answer_timeout_s = min(timeout_s, _ANSWER_TIMEOUT_S)
        self.shape: Final = SegmentRouter(catalog, session, stream)
        self._pool = EnginePool(
            settings,
            stream,
            lambda: take_slot(session, stream, settings.client_name),
            transaction_timeout_ms=int(transaction_timeout_s * 1000),
            retry_timeout_ms=int(answer_timeout_s * 1000),
        )
        self.dispatcher: Final = AppendDispatcher(
            self._pool,
            self.shape,
            transaction_timeout_s=transaction_timeout_s,
            answer_timeout_s=answer_timeout_s,
            name=str(stream),
        )
        # Reading the log for a caller must not wait for a round, nor a round for it: hence a second reader.
        self._reader = LogReader(
            Cluster(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name)
        )
        self._logs = StreamLogs(self.shape.place)
        self._reading = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[tuple[StreamLogs, LogReader]]:
        """Yield what is known of the log apart from rounds, and the reader to read on with; one thread at a time."""
        with self._reading:
            yield self._logs, self._reader

    def close(self) -> None:
        """Carry out what waits, release the transactional ids, and disconnect."""
        try:
            self.dispatcher.close()
            self._pool.close()
        finally:
            with self._reading:
                self._reader.close()


_Key = tuple[StreamName, float, float]


class StreamAppenders:
    """Channels of one connection, by stream and time-outs. Safe to use from several threads."""

    def __init__(self, settings: ConnectionSettings, catalog: Catalog, session: ZooKeeperSession) -> None:
        self._settings = settings
        self._catalog = catalog
        self._session = session
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
            if found is None:
                found = StreamAppender(
                    self._settings,
                    self._catalog,
                    self._session,
                    stream,
                    timeout_s=timeout_s,
                    transaction_timeout_s=transaction_timeout_s,
                )
            self._open[key] = (found, users + 1)
        try:
            yield found
        finally:
            with self._lock:
                _, users = self._open[key]
                if users > 1:
                    self._open[key] = (found, users - 1)
                else:
                    del self._open[key]
            if users == 1:
                found.close()
