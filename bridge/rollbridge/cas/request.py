"""Conditional write in flight: its records, its condition, and the future that gets its answer.

:class:`CasFuture` is lighter than ``concurrent.futures.Future``, since thousands are made a second: nearly all are
settled before anybody waits, so the event and the callback list are made only on demand, under one module lock.
"""

from __future__ import annotations

import itertools
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from rollbridge.base.arguments import checked
from rollbridge.base.deadlines import Deadline, LightFuture, call_back
from rollbridge.base.forks import module_lock
from rollbridge.base.sn import SN, Token
from rollbridge.errors import CasWriteError, OutcomeUnknownError, UnavailableError
from rollbridge.stream.conditions import Condition, ConditionalWrite, Scope
from rollbridge.stream.reading import KeyLineage

logger = logging.getLogger(__name__)

_lock: Final = module_lock()
"""Lock of all answers, held for a few instructions when one is settled or waited for; one for all is enough."""


@checked(but=("settle",))
class CasFuture(LightFuture[SN]):
    """Future of an asynchronous conditional write; may be what the next write expects. Safe to use from any thread."""

    __slots__ = ("_answer", "_callbacks", "_event")

    def __init__(self) -> None:
        self._answer: Sequence[SN] | BaseException | None = None
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[CasFuture], object]] | None = None

    @property
    @abstractmethod
    def token(self) -> Token:
        """Token of the write."""

    def done(self) -> bool:
        """Return True once the write is settled."""
        return self._answer is not None

    def result(self, timeout: float | None = None) -> SN:
        """Return the SN of the record (the last one of a run); raise as :meth:`CasWriter.write` does.

        Raises:
            TimeoutError: no answer within ``timeout`` seconds; ask again.
        """
        return self.results(timeout)[-1]

    def results(self, timeout: float | None = None) -> list[SN]:
        """Return the SNs of all records of the write."""
        answer = self._await(timeout)
        if isinstance(answer, BaseException):
            raise answer
        return list(answer)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what :meth:`result` would raise, or None."""
        answer = self._await(timeout)
        return answer if isinstance(answer, BaseException) else None

    def add_done_callback(self, callback: Callable[[CasFuture], object]) -> None:
        """Call back once the write is settled, on the thread that settles it; at once if it already is."""
        with _lock:
            if self._answer is None:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        call_back(partial(callback, self), logger, "a conditional write")

    def settle(self, answer: Sequence[SN] | BaseException) -> None:
        """Give the answer: the SNs of the records, or the error."""
        with _lock:
            self._answer = answer
            event, callbacks = self._event, self._callbacks
        if event is not None:
            event.set()
        for callback in callbacks or ():
            call_back(partial(callback, self), logger, "a conditional write")

    def _await(self, timeout: float | None) -> Sequence[SN] | BaseException:
        if self._answer is None:
            with _lock:
                event = self._event = self._event or threading.Event()
                is_done = self.done()
            if not is_done and not event.wait(timeout):
                raise TimeoutError(f"the conditional write has no answer within {timeout} s; ask again")
        return self._answer or ()


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
class AppendRequest(CasFuture):
    """One write of one or more records, all or none, and the future of its answer.

    Attributes:
        owner: The writer; its writes keep their order.
        records: Adjacent records in one segment.
        expected: The expected SN, or the write whose last record is expected to be the last.
        operation: Identity of the write, in the headers of its records.
        lineage: Its segment and predecessors, as of its last routing.
        deadline: Nothing is begun after it.
        monotonic_ids: True if its transaction ids must not be lower than the last one before.
        repeatable: True if the same token may have been tried before, so that a refusal has to look for it.
        last_try: Reason why the last try came to nothing.
        size: Upper bound of its size in bytes.
        number: Rises with each write of this process.
    """

    owner: object
    records: Sequence[NewRecord]
    expected: SN | AppendRequest
    scope: Scope
    operation: bytes
    lineage: KeyLineage
    deadline: Deadline
    timestamp_ms: int
    monotonic_ids: bool = False
    repeatable: bool = False
    last_try: str = ""
    size: int = 0
    number: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        CasFuture.__init__(self)
        self.size = sum([record.size for record in self.records])

    @property
    def key(self) -> bytes | None:
        """Key of its first record."""
        return self.records[0].key

    @property
    def token(self) -> Token:
        """Token by which the outcome of this write can be asked for."""
        expected = self.expected
        return Token(self.operation, self.records[0].key, SN() if isinstance(expected, AppendRequest) else expected)

    def condition(self) -> Condition:
        """Return the condition on what is committed; of no use while this write still waits for another."""
        expected = self.expected
        if isinstance(expected, AppendRequest):
            expected = SN() if not expected.done() or expected.exception() else expected.result()
        return Condition(expected, self.scope, self.records[0].key)

    def entry(self, places: Mapping[AppendRequest, int]) -> ConditionalWrite:
        """Return this write as one entry of a round, after the writes of ``places``."""
        return ConditionalWrite(
            self.condition(),
            self.lineage,
            tuple([record.key for record in self.records]),
            tuple([record.transaction_id for record in self.records]),
            places.get(self.expected) if isinstance(self.expected, AppendRequest) else None,
            self.monotonic_ids,
        )

    def broken_chain(self) -> BaseException | None:
        """Return why this write cannot be tried because the write it expects has failed; None otherwise."""
        before = self.expected
        fault = before.exception() if isinstance(before, AppendRequest) and before.done() else None
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
        return None if not isinstance(before, AppendRequest) or before.done() or before in places else before
