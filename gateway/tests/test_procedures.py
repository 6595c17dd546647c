"""How a procedure is carried out: each effect once and in order, on the loop's thread while nothing may wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.errors import (
    BackpressureError,
    ClientFencedError,
    InvalidRequestError,
    RollbridgeError,
    UnavailableError,
)
from rollbridge_gateway.producer.procedures import (
    Carry,
    IdState,
    NothingWrittenError,
    RefusedError,
    Save,
    WriteEntry,
)
from rollbridge_gateway.producer.table import Entry, Pair, Step
from rollbridge_gateway.producer.writes import (
    PROMPT_BYTES,
    PROMPT_RECORDS,
    LeaderThreads,
    Producers,
    Serving,
    Settling,
    Ticket,
)
from rollbridge_gateway.protocol.batch_rewrite import ProducedBatch

STREAM, OTHER = "scope/stream", "scope/other"
LOOP, POOL = "loop", "pool"


class TransactionClient:
    """What :class:`~rollbridge_gateway.producer.transactions.TransactionClient` does, noted with the thread; faults are
    raised once.

    It takes a stream's batches promptly, and those of no other.
    """

    is_open = True
    is_half = False

    def __init__(self, faults: Mapping[str, Exception]) -> None:
        self.done: list[tuple[str, str]] = []
        self.is_dropped = self.is_closed = False
        self._faults = dict(faults)
        self._loop = threading.get_ident()

    def _do(self, what: str) -> None:
        where = LOOP if threading.get_ident() == self._loop else POOL
        fault = self._faults.pop(what, None)
        if fault is not None:
            self.is_half = isinstance(fault, BackpressureError)
            raise fault
        self.done.append((what, where))

    def can_write_now(self, stream: str | None = None) -> bool:
        return stream in (None, STREAM)

    def is_half_carried(self, produced: ProducedBatch) -> bool:
        return self.is_half

    def carry(self, produced: ProducedBatch) -> None:
        self._do(bytes(produced.batch[:5]).decode())

    def save(self, notes: Mapping[str, bytes]) -> str:
        self._do("save")
        return "future"

    def drop(self) -> None:
        self.is_dropped = True

    def close(self) -> None:
        self.is_closed = True


class Register:
    """An id is held, and for sure unless it is said otherwise."""

    def __init__(self) -> None:
        self.sure = True
        self.released: list[str] = []

    def is_sure(self, name: str) -> bool:
        return self.sure

    def confirm(self) -> None:
        self.sure = True

    def write(self, name: str, entry: Entry) -> None:
        pass

    def release(self, name: str) -> None:
        self.released.append(name)

    def entries(self, names: list[str]) -> list[Entry | None]:
        return [entry_of(name) for name in names]

    def hold(self, name: str, *, takes_over: bool) -> Entry | None:
        return entry_of(name)


def entry_of(name: str) -> Entry | None:
    """What is on record of an id, by its name: ``new``, or the stream that it has written to and a number."""
    stream, _, number = name.partition("-")
    return Entry(name, Pair(1, 1), 1_000, home=f"scope/{stream}") if number else None


class Bridge:
    def nonblocking_thread(self, thread: int) -> None:
        self.thread = thread

    def client(self, name: str) -> Any:
        return SimpleNamespace(only_while=lambda guard: None)


LEADERS = 2
PATIENCE_S = 60.0
"""How long what is served meanwhile may take."""


def leaders() -> LeaderThreads:
    """Two threads for each stream's leader: each is of a group of its own."""
    return LeaderThreads(LEADERS, lambda stream: stream)


def no_room() -> Exception:
    fault = NothingWrittenError("no room")
    fault.__cause__ = BackpressureError("no room")
    return fault


def produced(
    name: str, stream: str = STREAM, size: int = 10, records: int = 1, *, is_compressed: bool = False
) -> ProducedBatch:
    return ProducedBatch(stream, 0, name.encode().ljust(size, b"."), records, is_compressed)


def write(*effects: AnyEffect) -> Steps[Any]:
    """Effects one after another; what says that nothing was written is noted, as procedures do."""
    noted: list[Any] = []
    for effect in effects:
        try:
            noted.append((yield effect))
        except NothingWrittenError as fault:
            noted.append(fault)
    return noted


THREE = (Carry(produced("one..")), Carry(produced("two..")), Save({}))


def carried_out(
    effects: tuple[AnyEffect, ...],
    faults: Mapping[str, Exception] | None = None,
    *,
    writes: bool = True,
    before: Callable[[Serving, Register], None] = lambda serving, register: None,
) -> tuple[list[Any] | Exception, TransactionClient, Serving, Register]:
    """Carry a procedure out for an id that is held; return its answer or its error, and what was done."""

    async def body() -> tuple[list[Any] | Exception, TransactionClient, Serving, Register]:
        register, bridge, rolling = Register(), Bridge(), TransactionClient(faults or {})
        with ThreadPoolExecutor(1) as pool, closing(leaders()) as waiting:
            known: Any = Producers(bridge, register, pool, waiting, pool, 10, 1_000)  # type: ignore[arg-type]
            assert bridge.thread == threading.get_ident()
            serving = known._serving("id")
            serving.held, serving.rolling = IdState(Entry("id", Pair(1, 1), 1_000)), rolling
            before(serving, register)
            try:
                answer: Any = await known.run("id", lambda held: write(*effects), writes=writes)
            except Exception as fault:
                answer = fault
        return answer, rolling, serving, register

    return asyncio.run(body())


def test_small_batches_are_written_on_the_loops_own_thread() -> None:
    answer, rolling, serving, _ = carried_out(THREE)
    assert answer == [None, None, Ticket(serving, 0, "future")]  # type: ignore[arg-type]
    assert rolling.done == [("one..", LOOP), ("two..", LOOP), ("save", LOOP)]


@pytest.mark.parametrize("full", ["one..", "two..", "save"])
def test_where_there_is_no_room_a_thread_of_the_pool_goes_on(full: str) -> None:
    """With the same effect, of which nothing was done: each is done once, in order."""
    fault = BackpressureError("no room") if full == "save" else no_room()
    answer, rolling, serving, _ = carried_out(THREE, {full: fault})
    assert answer == [None, None, Ticket(serving, 0, "future")]  # type: ignore[arg-type]
    names = ["one..", "two..", "save"]
    assert rolling.done == [(name, LOOP if number < names.index(full) else POOL) for number, name in enumerate(names)]
    assert not rolling.is_dropped


@pytest.mark.parametrize(
    "waiting",
    [
        Carry(produced("two..", OTHER)),
        Carry(produced("two..", size=PROMPT_BYTES - 9)),
        Carry(produced("two..", is_compressed=True)),
        Carry(produced("two..", records=PROMPT_RECORDS)),
    ],
    ids=["a stream that has not joined", "many bytes in all", "a compressed batch", "many records in all"],
)
def test_what_may_take_long_is_done_by_the_pool(waiting: AnyEffect) -> None:
    effects = (Carry(produced("one..")), waiting, Carry(produced("three")), Save({}))
    _, rolling, _, _ = carried_out(effects)
    assert rolling.done == [("one..", LOOP), ("two..", POOL), ("three", POOL), ("save", POOL)]


def test_as_many_bytes_as_may_be_are_written_on_the_loops_own_thread() -> None:
    effects = (
        Carry(produced("one..", size=PROMPT_BYTES - 10, records=PROMPT_RECORDS - 1)),
        Carry(produced("two..")),
        Save({}),
    )
    _, rolling, _, _ = carried_out(effects)
    assert {where for _, where in rolling.done} == {LOOP}


def test_what_asks_zookeeper_is_done_by_the_pool() -> None:
    _, rolling, _, _ = carried_out((WriteEntry(Entry("id", Pair(1, 1), 1_000)), *THREE))
    assert {where for _, where in rolling.done} == {POOL}


def test_what_does_not_write_is_done_by_the_pool() -> None:
    _, rolling, _, _ = carried_out(THREE, writes=False)
    assert {where for _, where in rolling.done} == {POOL}


def as_it_is(serving: Serving, register: Register) -> None:
    """Leave all as it is."""


def unsure(serving: Serving, register: Register) -> None:
    register.sure = False


def test_an_id_that_is_not_held_for_sure_is_looked_up_by_the_pool() -> None:
    _, rolling, _, _ = carried_out(THREE, before=unsure)
    assert {where for _, where in rolling.done} == {POOL}


def test_a_batch_that_is_refused_leaves_the_others() -> None:
    refused = NothingWrittenError("too large")
    answer, rolling, serving, _ = carried_out(THREE, {"one..": refused})
    assert answer == [refused, None, Ticket(serving, 0, "future")]  # type: ignore[arg-type]
    assert rolling.done == [("two..", LOOP), ("save", LOOP)]
    assert not rolling.is_dropped


@pytest.mark.parametrize("where", [LOOP, POOL])
@pytest.mark.parametrize("at", ["one..", "two..", "save"])
def test_what_nobody_foresaw_drops_the_id(at: str, where: str) -> None:
    """Whoever serves it next goes on from its last savepoint; half of a batch may have been written."""
    fault = UnavailableError("away")
    answer, rolling, serving, register = carried_out(THREE, {at: fault}, before=unsure if where == POOL else as_it_is)
    assert answer is fault
    assert at not in [name for name, _ in rolling.done]
    assert rolling.is_dropped
    assert serving.held is None
    assert serving.life == 1
    assert not register.released


def test_half_of_a_batch_is_not_written_again() -> None:
    """There was no room in the middle of it: a thread of the pool goes on with the rest, which the client knows."""
    answer, rolling, serving, _ = carried_out(THREE, {"two..": BackpressureError("no room for the rest")})
    assert answer == [None, None, Ticket(serving, 0, "future")]  # type: ignore[arg-type]
    assert rolling.done == [("one..", LOOP), ("two..", POOL), ("save", POOL)]
    assert not rolling.is_dropped


def test_half_of_a_batch_for_which_there_is_no_room_drops_the_id() -> None:
    fault = BackpressureError("no room for the rest")
    answer, rolling, _, _ = carried_out(THREE, {"two..": fault}, before=unsure)
    assert answer is fault
    assert rolling.done == [("one..", POOL)]
    assert rolling.is_dropped


@pytest.mark.parametrize("before", [as_it_is, unsure], ids=[LOOP, POOL])
def test_what_was_written_without_a_savepoint_is_not_gone_on_with(
    before: Callable[[Serving, Register], None],
) -> None:
    """Sent again it would be a duplicate, and acknowledged, though no savepoint says so."""
    fault = InvalidRequestError("too many notes")
    answer, rolling, serving, _ = carried_out(THREE, {"save": fault}, before=before)
    assert answer is fault
    assert rolling.is_dropped
    assert serving.held is None


@pytest.mark.parametrize("where", [LOOP, POOL])
def test_who_is_fenced_lets_go_of_the_id(where: str) -> None:
    fault = ClientFencedError("another gateway has it")
    answer, rolling, serving, register = carried_out(
        THREE, {"two..": fault}, before=unsure if where == POOL else as_it_is
    )
    assert answer is fault
    assert rolling.is_closed
    assert serving.rolling is None
    assert register.released == [serving.name]


def test_an_answer_leaves_the_id_as_it_is() -> None:
    def refused(held: IdState) -> Steps[None]:
        yield from THREE[2]
        raise RefusedError(Step.STALE, "over")

    async def body() -> None:
        with ThreadPoolExecutor(1) as pool, closing(leaders()) as waiting:
            rolling = TransactionClient({})
            known: Any = Producers(Bridge(), Register(), pool, waiting, pool, 10, 1_000)  # type: ignore[arg-type]
            serving = known._serving("id")
            serving.held, serving.rolling = IdState(Entry("id", Pair(1, 1), 1_000)), rolling
            with pytest.raises(RefusedError):
                await known.run("id", refused, writes=True)
            assert not rolling.is_dropped
            assert serving.held is not None

    asyncio.run(body())


def test_a_leader_that_hangs_holds_up_the_ids_of_its_group_alone() -> None:
    """However many they are: those of other groups, new ones, and what waits for ZooKeeper are served meanwhile."""
    answers = threading.Event()

    def waits(held: IdState) -> Steps[str]:
        answers.wait(PATIENCE_S)
        yield from ()
        return "late"

    def answered(held: IdState) -> Steps[str]:
        yield from ()
        return "at once"

    async def body() -> None:
        with ThreadPoolExecutor(1) as pool, closing(leaders()) as waiting:
            known: Any = Producers(Bridge(), Register(), pool, waiting, pool, 10, 1_000)  # type: ignore[arg-type]
            stuck = [asyncio.create_task(known.run(f"stream-{number}", waits)) for number in range(2 * LEADERS)]
            try:
                async with asyncio.timeout(PATIENCE_S):
                    for name in ("other-1", "new", "other-2", "other-1"):
                        assert await known.run(name, answered) == "at once"
                    assert await asyncio.get_running_loop().run_in_executor(pool, lambda: True), "as Metadata is asked"
                assert not any(task.done() for task in stuck)
            finally:
                answers.set()
            assert set(await asyncio.gather(*stuck)) == {"late"}

    asyncio.run(body())


def test_a_savepoint_that_brokers_do_not_acknowledge_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, the later ones at their own time; one that was settled is not, and wakes who waits for it."""

    class Future:
        callback: Callable[[Any], object] | None = None
        fault: RollbridgeError | None = None

        def add_done_callback(self, callback: Callable[[Any], object]) -> None:
            self.callback = callback

        def result(self, timeout: float) -> None:
            if self.fault is not None:
                raise self.fault

    async def body() -> None:
        loop = asyncio.get_running_loop()
        clock, later = loop.time, [0.0]
        monkeypatch.setattr(loop, "time", lambda: clock() + later[0])
        settling: Any = Settling(3600.0)
        late, refused, done = Future(), Future(), Future()
        refused.fault = UnavailableError("refused")
        waits = [asyncio.create_task(settling.reached(future)) for future in (late, refused, done)]
        await asyncio.sleep(0)
        for future in (refused, done):
            assert future.callback is not None
            await asyncio.to_thread(future.callback, future)
        with pytest.raises(UnavailableError, match="refused"):
            await waits[1]
        await waits[2]
        later[0] += 3600.0
        with pytest.raises(UnavailableError, match="not acknowledged everything within 3600 s"):
            await waits[0]
        assert late.callback is not None
        late.callback(late)  # it comes after all
        await asyncio.sleep(0)
        other = Future()
        wait = asyncio.create_task(settling.reached(other))
        await asyncio.sleep(0)
        later[0] += 3600.0
        with pytest.raises(UnavailableError, match="not acknowledged"):
            await wait

    asyncio.run(body())
