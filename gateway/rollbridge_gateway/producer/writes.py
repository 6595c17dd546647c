"""Procedures of transactional ids, carried out on rollbridge's client: one at a time for each id.

Requests of an id are carried out in the order in which they come. The wait for brokers alone, for the savepoint behind
what was written, happens outside, so that several requests are under way.

A procedure that writes begins on the event loop's own thread, which spares most requests a change of threads: small
batches of an open transaction are handed over without a wait. At the first effect that may wait, or where the client
has no room at once, a thread of a pool continues it. All others are carried out on a thread of the transaction group
that the id wrote to last: a leader that hangs holds up the ids of its group, however many, and no others.

An id is dropped here, with its open :class:`~rollbridge.Transaction`, at each error that its procedure did not foresee,
and when another gateway wants it. Dropping equals a death of this gateway: nothing more is acknowledged, and the next
gateway that serves the id continues from the last savepoint.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from rollbridge.base.effects import AnyEffect, Steps, UnderWay
from rollbridge.base.metrics import LATENCY_BOUNDS_S, Histogram
from rollbridge.client.connection import Bridge
from rollbridge.client.savepoints import SavepointFuture
from rollbridge.commitlog.control import FENCED
from rollbridge.errors import (
    BackpressureError,
    ClientFencedError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    RollbridgeError,
    TransactionPreserverClosedError,
    UnavailableError,
    ZooKeeperUnavailableError,
)
from rollbridge_gateway.producer import procedures
from rollbridge_gateway.producer.ids import IS_ELSEWHERE, NOT_HELD, Register
from rollbridge_gateway.producer.procedures import (
    AbortLeft,
    AddOffsets,
    BeginTransaction,
    Carry,
    FenceOthers,
    FindLabel,
    Finish,
    IdState,
    NothingWrittenError,
    RefusedError,
    Resume,
    Save,
    WriteEntry,
)
from rollbridge_gateway.producer.table import ProducerPhase, client_name
from rollbridge_gateway.producer.transactions import TransactionClient

# Waits for brokers, in an event loop: settled by another thread, many at a time, each within the same time.
#
# Brokers acknowledge what many producers have written with one answer, so the thread that reads it settles many
# savepoints in a row. The loop is woken once for all of them; and one timer looks after all that waits, since the one
# that has waited longest is always the first of them.


class Settling:
    """Savepoints on their way to the brokers. Belongs to the event loop that made it."""

    def __init__(self, timeout_s: float) -> None:
        """Begin with none.

        Args:
            timeout_s: Longest wait for each.
        """
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._settled: deque[asyncio.Future[None]] = deque()  # appended to by other threads
        self._is_woken = False
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def reached(self, savepoint: SavepointFuture) -> None:
        """Wait until the brokers have a savepoint.

        Raises:
            UnavailableError: not in time.
            IncompleteError: they refused something before it.
        """
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self._loop.time() + self._timeout_s, waiter))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._expire)
        savepoint.add_done_callback(lambda _: self._settle(waiter))
        await waiter
        savepoint.result(0)

    def _settle(self, waiter: asyncio.Future[None]) -> None:
        """Have a waiter woken; called on any thread."""
        self._settled.append(waiter)
        if not self._is_woken:
            # Two threads may both come here, and then it is woken twice; what it finds is there before it is told.
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_woken = False  # before looking: what is settled from now on wakes again
        while self._settled:
            waiter = self._settled.popleft()
            if not waiter.done():
                waiter.set_result(None)
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()

    def _expire(self) -> None:
        now = self._loop.time()
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= now):
            _, waiter = self._waiting.popleft()
            if not waiter.done():
                late = f"the brokers have not acknowledged everything within {self._timeout_s:g} s"
                waiter.set_exception(UnavailableError(late))
        self._timer = self._loop.call_at(self._waiting[0][0], self._expire) if self._waiting else None


logger = logging.getLogger(__name__)

T = TypeVar("T")

END_S: Final = 20.0
"""Longest wait for a leader's answer; then the client asks again, for other requests wait behind it."""
SAVE_S: Final = 25.0
"""Longest wait for a savepoint to reach the brokers; clients wait 30 s for an answer."""
_WRITES: Final = (Carry, AddOffsets)
_AWAY: Final = (ClientFencedError.code, NOT_HELD, IS_ELSEWHERE)
_ANSWERS: Final = (RefusedError, InvalidRequestError, NotFoundError)
"""Errors that leave an id as it is: nothing was written."""


class LeaderThreads:
    """Threads that wait for leaders, as many for each transaction group. Belongs to one event loop."""

    def __init__(self, most: int, group_of: Callable[[str], str]) -> None:
        """Start without any.

        Args:
            most: Most threads of a group.
            group_of: Returns the group of a stream; empty if it is not known.
        """
        self._most = most
        self._group_of = group_of
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def of(self, stream: str) -> Executor:
        """Return those of a stream's group; those of ids that have written to none for an empty name."""
        group = self._group_of(stream)
        found = self._pools.get(group)
        if found is None:
            found = self._pools[group] = ThreadPoolExecutor(self._most, f"leader {group}")
        return found

    def close(self) -> None:
        """Begin nothing any more."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


class Ticket(NamedTuple):
    """A savepoint on its way, of one life of an id here."""

    serving: Serving
    life: int
    future: SavepointFuture


PROMPT_BYTES: Final = 64 << 10
"""Most bytes of batches that a procedure writes on the loop's own thread. None of them is compressed, since few bytes
may become many then."""
PROMPT_RECORDS: Final = 1_000
"""Most records of them: a record may take a microsecond, or seven bytes."""


class Progress(UnderWay[T]):
    """A procedure of a request.

    Attributes:
        bytes_left, records_left: What may still be written on the loop's own thread.
        is_unsaved: True if something was written behind which there is no savepoint.
    """

    __slots__ = ("bytes_left", "is_unsaved", "records_left")

    def __init__(self, procedure: Steps[T]) -> None:
        super().__init__(procedure)
        self.bytes_left, self.records_left = PROMPT_BYTES, PROMPT_RECORDS
        self.is_unsaved = False


class Serving:
    """A transactional id that is served here. Its lock is held by one request at a time, in their order."""

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.name = client_name(transactional_id)
        self.lock = asyncio.Lock()
        self.held: IdState | None = None
        self.rolling: TransactionClient | None = None
        self.is_wanted = False
        self.life = 0
        self.used_s = 0.0

    @property
    def is_ending(self) -> bool:
        """True if an end was asked for that is not answered: of a transaction that its label may not lead to."""
        producer = None if self.held is None else self.held.producer
        return producer is not None and producer.state in (ProducerPhase.COMMITTING, ProducerPhase.ABORTING)

    def drop(self) -> None:
        """Forget everything, as a death would."""
        self.life += 1
        self.held = None
        if self.rolling is not None:
            self.rolling.drop()


class Producers:
    """All transactional ids that are served here. Belongs to one event loop; work is done on threads of the pool."""

    def __init__(
        self,
        bridge: Bridge,
        register: Register,
        writers: Executor,
        leaders: LeaderThreads,
        others: Executor,
        ids_max: int,
        fresh_ms: int,
    ) -> None:
        """Start without any.

        Args:
            register: Register of held ids; its ``lost`` is :meth:`wanted`.
            writers: Threads for what writes and may not be written on the loop's own.
            leaders: Threads for what waits for leaders.
            others: Threads for what waits for ZooKeeper alone, and never for long.
            ids_max: Most ids that are served at once; those that are not in use make room.
            fresh_ms: Age of an entry from which on the use of its id shows in it.
        """
        self._bridge = bridge
        self._register = register
        self._writers = writers
        self._leaders = leaders
        self._pool = others
        self._ids_max = ids_max
        self._fresh_ms = fresh_ms
        self._known: OrderedDict[str, Serving] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling = Settling(SAVE_S)
        bridge.nonblocking_thread(threading.get_ident())
        self.users: Counter[str] = Counter()
        """By transactional id, how many connections have asked for more than an end."""
        self.takeovers = 0
        self.savepoints = Histogram(LATENCY_BOUNDS_S)
        self.savepoint_failures = 0
        self.ends = {"committed": 0, "aborted": 0}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def open(self) -> int:
        """Number of them with an open transaction."""
        return sum(item.rolling is not None and item.rolling.is_open for item in list(self._known.values()))

    async def run(
        self,
        transactional_id: str,
        make: Callable[[IdState], Steps[T]],
        *,
        writes: bool = False,
        takes_over: Callable[[], bool] = lambda: True,
    ) -> T:
        """Carry a procedure out, after those that were asked for before; return its answer.

        Args:
            make: Makes the procedure.
            writes: True if it mostly writes.
            takes_over: Tells whether another gateway that serves the id has to let go of it; asked only where the id
                is not served here yet, on a thread of the pool.

        Raises:
            RefusedError: nothing was changed.
            RollbridgeError: see its class. The id was dropped here.
        """
        serving = self._serving(transactional_id)
        async with serving.lock:
            serving.used_s = time.monotonic()
            try:
                if not writes or not self._is_at_hand(serving):
                    threads = await self._threads_of(serving)
                    return await self._loop.run_in_executor(threads, self._carry_out, serving, make, takes_over)
                assert serving.held is not None
                progress = Progress(make(serving.held))
                if not self._advance(serving, progress, may_wait=False):
                    await self._loop.run_in_executor(self._writers, partial(self._advance, serving, progress))
                return progress.result
            except _ANSWERS:
                raise
            except Exception as fault:
                if not (isinstance(fault, OutcomeUnknownError) and serving.is_ending):
                    serving.drop()
                if getattr(fault, "code", "") in _AWAY:
                    with suppress(RuntimeError):  # the gateway ends, and with it what it holds
                        await self._loop.run_in_executor(self._writers, self._close, serving)
                raise

    async def _threads_of(self, serving: Serving) -> Executor:
        """Return the threads for an id by its entry, which is read before another gateway is asked to let go of it.

        That one may be waiting for the same leader.
        """
        if serving.held is not None:
            entry = serving.held.entry
        else:
            (entry,) = await self._loop.run_in_executor(self._pool, self._register.entries, [serving.name])
        return self._leaders.of("" if entry is None else entry.home)

    def _is_at_hand(self, serving: Serving) -> bool:
        return serving.held is not None and not serving.is_wanted and self._register.is_sure(serving.name)

    async def settled(self, ticket: Ticket | None) -> None:
        """Wait until the brokers have a savepoint, and the id has been held all the time.

        Raises:
            ZooKeeperUnavailableError: ``NOT_HELD``: another gateway may have left it out; ask again.
            RollbridgeError: it did not reach the brokers.
        """
        if ticket is None:
            return
        began_s = time.monotonic()
        try:
            await self._settling.reached(ticket.future)
        except RollbridgeError:
            self.savepoint_failures += 1
            raise
        finally:
            self.savepoints.note(time.monotonic() - began_s)
        if (
            ticket.life != ticket.serving.life
            or ticket.serving.is_wanted
            or not self._register.is_sure(ticket.serving.name)
        ):
            raise ZooKeeperUnavailableError("this gateway does not serve the id any more; ask again", code=NOT_HELD)

    def wanted(self, name: str) -> None:
        """Let go of an id that another gateway wants, or that may be held by another one. Safe from any thread."""
        self._loop.call_soon_threadsafe(self._let_go_soon, name)

    async def let_go(self, name: str) -> None:
        """Let go of an id: nothing more of it is acknowledged here."""
        serving = self._known.get(name)
        if serving is None:
            await self._loop.run_in_executor(self._pool, self._register.release, name)
            return
        serving.is_wanted = True
        async with serving.lock:
            serving.drop()
            await self._loop.run_in_executor(self._pool, self._close, serving)
            if self._known.get(name) is serving:
                del self._known[name]

    async def let_go_unused(self, unused_s: float) -> None:
        """Let go of the ids that were unused for so long, and that have nothing open."""
        before_s = time.monotonic() - unused_s
        for serving in list(self._known.values()):
            if serving.used_s > before_s or serving.lock.locked() or serving.is_wanted:
                continue
            if serving.rolling is not None and serving.rolling.is_open:
                continue
            if serving.held is not None:
                try:
                    await self.run(serving.transactional_id, procedures.settle)
                except RollbridgeError as fault:
                    logger.info("id.settle_failed client=%s: %s", serving.name, fault)
            self._let_go_soon(serving.name)

    async def close(self) -> None:
        for name in list(self._known):
            await self.let_go(name)

    def _let_go_soon(self, name: str) -> None:
        serving = self._known.get(name)
        if serving is not None:
            serving.is_wanted = True  # at once: what is under way is not acknowledged any more
        task = self._loop.create_task(self.let_go(name), name=f"let go of {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _serving(self, transactional_id: str) -> Serving:
        name = client_name(transactional_id)
        found = self._known.get(name)
        if found is not None and not found.is_wanted:
            self._known.move_to_end(name)
            return found
        if found is not None:
            raise ZooKeeperUnavailableError("another gateway is taking this id over; ask again", code=NOT_HELD)
        if len(self._known) >= self._ids_max:
            self._make_room()
        found = self._known[name] = Serving(transactional_id)
        return found

    def _make_room(self) -> None:
        for name, serving in self._known.items():
            if not serving.lock.locked() and (serving.rolling is None or not serving.rolling.is_open):
                self._let_go_soon(name)
                return
        raise BackpressureError(f"this gateway serves {self._ids_max} transactional ids with transactions open")

    # On threads of the pools, or where it is said on the loop's own

    def _carry_out(self, serving: Serving, make: Callable[[IdState], Steps[T]], takes_over: Callable[[], bool]) -> T:
        if serving.is_wanted:
            raise ZooKeeperUnavailableError("another gateway is taking this id over; ask again", code=NOT_HELD)
        if serving.rolling is not None and not self._register.is_sure(serving.name):
            self._register.confirm()  # it may only have stalled for a moment, unnoticed
            if not self._register.is_sure(serving.name):
                raise ZooKeeperUnavailableError("this gateway does not hold the id any more; ask again", code=NOT_HELD)
        if serving.held is None:
            self._hold(serving, takes_over)
        assert serving.held is not None
        progress = Progress(make(serving.held))
        self._advance(serving, progress)
        return progress.result

    def _hold(self, serving: Serving, takes_over: Callable[[], bool]) -> None:
        if serving.rolling is None:
            entry = self._register.hold(serving.name, takes_over=takes_over())
            client, name = self._bridge.client(serving.name), serving.name
            client.only_while(lambda: self._register.guard(name))
            serving.rolling = TransactionClient(client)
        else:
            (entry,) = self._register.entries([serving.name])
        serving.held = IdState(entry, fresh_ms=self._fresh_ms)

    def _close(self, serving: Serving) -> None:
        """Let others hold the id; the next request here starts with a client of its own."""
        if serving.rolling is not None:
            with suppress(RollbridgeError):
                serving.rolling.close()
            serving.rolling = None
        self._register.release(serving.name)

    def _advance(self, serving: Serving, progress: Progress[Any], *, may_wait: bool = True) -> bool:
        """Carry a procedure out from where it has come to; return False if it came to what may wait, and must not."""
        try:
            while (effect := progress.look_ahead()) is not None:
                if not may_wait and not _is_prompt(serving, progress):
                    return False
                try:
                    progress.reply(self._effect(serving, effect))
                except Exception as fault:
                    if not may_wait and _has_no_room(serving, effect, fault):
                        return False
                    progress.refuse(fault)
                else:
                    progress.is_unsaved = isinstance(effect, _WRITES)
            return True
        except _ANSWERS:
            if progress.is_unsaved:
                serving.drop()  # or else what was written would be taken for acknowledged when it is sent again
            raise

    def _effect(self, serving: Serving, effect: AnyEffect) -> Any:
        rolling, bridge = serving.rolling, self._bridge
        assert rolling is not None
        match effect:
            case WriteEntry(entry):
                self._register.write(serving.name, entry)
            case FenceOthers():
                left = rolling.fence_others()
                if left:  # or else there may be transactions among them of a producer that another gateway has started
                    self._register.check(serving.name)
                return left
            case AbortLeft(transaction):
                # It has ended meanwhile.
                with suppress(ConflictError, NotFoundError, InvalidRequestError, TransactionPreserverClosedError):
                    bridge.admin.abort_transaction(transaction, reason=FENCED)
            case FindLabel(label):
                return rolling.find(label)
            case Resume(transaction):
                self.takeovers += 1
                return rolling.resume(transaction)
            case BeginTransaction(stream, label, timeout_ms):
                lease = bridge.options.lease_max if timeout_ms < 0 else timedelta(milliseconds=timeout_ms)
                rolling.begin(stream, label, lease)
            case Carry(batch):
                rolling.carry(batch)
            case AddOffsets(offsets):
                rolling.send_offsets(offsets)
            case Save(notes):
                return Ticket(serving, serving.life, rolling.save(notes))
            case Finish(commit, reason):
                rolling.finish(commit=commit, reason=reason, timeout_s=END_S)
                self.ends["committed" if commit else "aborted"] += 1
            case _:
                raise AssertionError(f"{effect} is not an effect")
        return None


def _is_prompt(serving: Serving, progress: Progress[Any]) -> bool:
    """Return whether the effect that a procedure has come to is carried out without a wait."""
    rolling = serving.rolling
    assert rolling is not None
    match progress.effect:
        case Carry(produced):
            progress.bytes_left -= len(produced.batch)
            progress.records_left -= produced.records
            if produced.is_compressed or progress.bytes_left < 0 or progress.records_left < 0:
                return False
            return rolling.can_write_now(produced.stream)
        case Save():
            return rolling.can_write_now()
        case _:
            return False


def _has_no_room(serving: Serving, effect: AnyEffect, fault: Exception) -> bool:
    """Return whether there was no room at once for an effect, of which nothing was done, or which is continued."""
    rolling = serving.rolling
    match effect:
        case Carry(produced) if isinstance(fault, NothingWrittenError):
            return isinstance(fault.__cause__, BackpressureError)
        case Carry(produced):
            return isinstance(fault, BackpressureError) and rolling is not None and rolling.is_half_carried(produced)
        case Save():
            return isinstance(fault, BackpressureError)
        case _:
            return False
