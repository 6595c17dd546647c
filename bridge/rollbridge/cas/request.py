"""Conditional write in flight: its records, its condition, and the future that gets its answer.

:class:`AppendFuture` is lighter than ``concurrent.futures.Future``, since thousands are made a second: nearly all are
settled before anybody waits, so the event and the callback list are made only on demand, under one module lock.

:class:`Contention` governs how a writer behaves on a segment on which others write, too. Whoever appends and loses has
made everybody after it wait for its abort. So after a loss a writer backs off for a random time and looks before it
appends: a refusal then costs one fetch, and no native transaction. The back-off grows with every loss after an append,
and shrinks with every round in which no other writer was met. A winner is a round trip ahead of those who must first
learn of its record, and would win for ever; therefore a writer that was refused by looking a few times in a row appends
all the same, and the winner, which meets that record, backs off as well.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from rollbridge.calls import Deadline, LightFuture, call_back
from rollbridge.errors import CasWriteError, OutcomeUnknownError, UnavailableError
from rollbridge.forks import module_lock
from rollbridge.model.cas import Condition, ConditionalWrite, Scope
from rollbridge.model.lineage import KeyLineage
from rollbridge.model.sn import SN, Token

# Answers


logger = logging.getLogger(__name__)

Callback = Callable[["AppendFuture"], object]

_lock: Final = module_lock()
"""Lock of all answers, held for a few instructions when one is settled or waited for; one for all is enough."""


class AppendFuture:
    """Future of a write: the SNs of its records or its error, set once. Safe to use from several threads."""

    __slots__ = ("_callbacks", "_event", "_fault", "_is_done", "_sns")

    def __init__(self) -> None:
        self._is_done = False
        self._sns: list[SN] = []
        self._fault: BaseException | None = None
        self._event: threading.Event | None = None
        self._callbacks: list[Callback] | None = None

    def done(self) -> bool:
        """Return True once the write is settled."""
        return self._is_done

    def result(self, timeout: float | None = None) -> list[SN]:
        """Wait for the write; return its SNs or raise its error.

        Raises:
            TimeoutError: no answer within ``timeout`` seconds.
        """
        fault = self.exception(timeout)
        if fault is not None:
            raise fault
        return self._sns

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the write; return its error, or None if it succeeded.

        Raises:
            TimeoutError: no answer within ``timeout`` seconds.
        """
        deadline = None if timeout is None else Deadline(timeout)
        while not self._is_done:
            if not self.wait(None if deadline is None else deadline.left()):
                raise TimeoutError(f"the conditional write has no answer within {timeout} s; ask again")
        return self._fault

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the write is settled or :meth:`nudge` is called; return False if neither happened in time."""
        with _lock:
            if self._is_done:
                return True
            event = self._event = self._event or threading.Event()
        if not event.wait(timeout):
            return False
        if not self._is_done:
            event.clear()
            # If the answer came between these two lines, its event must not stay cleared for other waiters.
            if self.done():
                event.set()
        return True

    def nudge(self) -> None:
        """Wake the waiters so that they look around, although the write is not settled."""
        with _lock:
            event = self._event = self._event or threading.Event()
        event.set()

    def set_result(self, sns: list[SN]) -> None:
        """Settle the write as written."""
        self._sns = sns
        self._settle()

    def set_exception(self, fault: BaseException) -> None:
        """Settle the write as failed."""
        self._fault = fault
        self._settle()

    def add_done_callback(self, callback: Callback) -> None:
        """Call back once the write is settled, on the thread that settles it; at once if it already is."""
        with _lock:
            if not self._is_done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        self._call(callback)

    def _settle(self) -> None:
        with _lock:
            self._is_done = True
            event, callbacks = self._event, self._callbacks
        if event is not None:
            event.set()
        for callback in callbacks or ():
            self._call(callback)

    def _call(self, callback: Callback) -> None:
        call_back(partial(callback, self), logger, "a conditional write")


RecordHeaders = Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class NewRecord:
    """Record to write; ``headers`` include rollbridge's own."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    transaction_id: int | None
    size: int


@dataclass(eq=False, slots=True)
class AppendRequest:
    """One write of one or more records, all or none.

    Attributes:
        owner: The writer; its writes keep their order.
        records: Records that stand side by side in one segment.
        expected: The expected SN, or the write whose last record is expected to be the last.
        operation: Identity of the write, in the headers of its records.
        rising_ids: True if its transaction ids must not be lower than the last one before.
        repeatable: True if the same token may have been tried before, so that a refusal has to look for it.
        position: Position of its first key in the key space.
        course: Its segment and predecessors, as of its last routing.
        deadline: Nothing is begun after it.
        attended: True if a thread waits for the write and can carry it out.
        last_try: Reason why the last try came to nothing.
        size: Upper bound of its size in bytes.
        done: Future of the SNs of its records.
    """

    owner: object
    records: Sequence[NewRecord]
    expected: SN | AppendRequest
    scope: Scope
    operation: bytes
    position: float
    course: KeyLineage
    deadline: Deadline
    timestamp_ms: int
    rising_ids: bool = False
    repeatable: bool = False
    attended: bool = False
    last_try: str = ""
    size: int = 0
    done: AppendFuture = field(default_factory=AppendFuture)

    def __post_init__(self) -> None:
        self.size = sum([record.size for record in self.records])

    @property
    def token(self) -> Token:
        """Token by which the outcome of this write can be asked for."""
        expected = self.expected
        return Token(self.operation, self.records[0].key, SN() if isinstance(expected, AppendRequest) else expected)

    def condition(self) -> Condition:
        """Return the condition on what is committed; of no use while this write still waits for another."""
        expected = self.expected
        if isinstance(expected, AppendRequest):
            expected = expected.done.result()[-1] if _succeeded(expected) else SN()
        return Condition(expected, self.scope, self.records[0].key)

    def entry(self, places: Mapping[AppendRequest, int]) -> ConditionalWrite:
        """Return this write as one entry of a round in which the writes of ``places`` stand before it."""
        after = places.get(self.expected) if isinstance(self.expected, AppendRequest) else None
        return ConditionalWrite(
            self.condition(),
            self.course,
            tuple([record.key for record in self.records]),
            tuple([record.transaction_id for record in self.records]),
            after,
            self.rising_ids,
        )

    def broken_chain(self) -> BaseException | None:
        """Return why this write cannot be tried because the write it expects has failed; None otherwise."""
        before = self.expected
        if not isinstance(before, AppendRequest) or not before.done.done():
            return None
        fault = before.done.exception()
        if isinstance(fault, CasWriteError):
            return CasWriteError(
                f"525: the write that this one expects was refused: {fault}",
                expected=fault.expected,
                actual=fault.actual,
            )
        if isinstance(fault, OutcomeUnknownError):
            return UnavailableError(
                f"the outcome of the write that this one expects is unknown; nothing was written: {fault}"
            )
        return fault

    def awaited(self, places: Mapping[AppendRequest, int]) -> AppendRequest | None:
        """Return the write that this one expects, unless that is settled or in the same round; None then."""
        before = self.expected
        return None if not isinstance(before, AppendRequest) or before.done.done() or before in places else before


def _succeeded(request: AppendRequest) -> bool:
    return request.done.done() and request.done.exception() is None


# Futures of asynchronous writes


class CasFuture(LightFuture[SN]):
    """Future of an asynchronous conditional write; may be what the next write expects."""

    __slots__ = ("request",)

    def __init__(self, request: AppendRequest) -> None:
        self.request = request

    @property
    def token(self) -> Token:
        """Token of the write."""
        return self.request.token

    def done(self) -> bool:
        """Return True once the write is settled."""
        return self.request.done.done()

    def result(self, timeout: float | None = None) -> SN:
        """Return the SN of the record (the last one of a run); raise as :meth:`CasWriter.write` does.

        Raises:
            TimeoutError: no answer within ``timeout`` seconds; ask again.
        """
        return self.results(timeout)[-1]

    def results(self, timeout: float | None = None) -> list[SN]:
        """Return the SNs of all records of the write."""
        return self.request.done.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what :meth:`result` would raise, or None."""
        return self.request.done.exception(timeout)

    def add_done_callback(self, callback: Callable[[CasFuture], object]) -> None:
        """Call back once the write is settled, on the thread that settles it; at once if it already is."""
        self.request.done.add_done_callback(lambda _: callback(self))


# Contention


_FIRST_S: Final = 0.001
_SHARE_OF_NEW: Final = 0.2
_ROUNDS_MAX: Final = 16.0
_ROUNDS_AFTER_MEETING: Final = 4.0
_ROUNDS_MIN: Final = 0.5
_LOOKS_IN_A_ROW_MAX: Final = 3


class Contention:
    """Back-off of a writer on one segment; times in seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._round_s = _FIRST_S
        self._rounds = 0.0
        self._refused_looks = 0

    def pause_s(self, chance: float) -> float:
        """Return the back-off before the next round; ``chance`` is a random number in [0, 1)."""
        return self._rounds * self._round_s * chance

    def looks_first(self) -> bool:
        """Return True if the next round should look before it appends."""
        return self._rounds > 0 and self._refused_looks < _LOOKS_IN_A_ROW_MAX

    def refused_by_look(self) -> None:
        """Record that another writer was faster and nothing was appended."""
        self._refused_looks += 1

    def lost(self) -> None:
        """Record that another writer was faster and what was appended is aborted."""
        self._refused_looks = 0
        self._rounds = min(max(self._rounds * 2, 1.0), _ROUNDS_MAX)

    def won(self, took_s: float, met_others: bool) -> None:
        """Record that a round was committed after ``took_s`` seconds."""
        self._refused_looks = 0
        self._round_s += (took_s - self._round_s) * _SHARE_OF_NEW
        if met_others:
            self._rounds = max(self._rounds, _ROUNDS_AFTER_MEETING)
        else:
            self._rounds = self._rounds / 2 if self._rounds > _ROUNDS_MIN else 0.0
