"""Rules of calls: deadlines, back-off, background calls, futures, and code of the application that rollbridge runs.

A call of the application opens a context with :func:`answers_within`; whatever is asked of ZooKeeper and Kafka in it,
on the same thread, ends with it, however many requests it takes.

Iterators and callbacks of the application may take long, raise anything and call rollbridge again. So none of them runs
under a lock of ours, and nothing that they raise ends a thread of ours, on which others depend.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import islice
from math import isnan
from typing import Final, Generic, Self, TypeVar

from rollbridge.errors import InvalidRequestError, RollbridgeError

GRACE_S: Final = 0.2
"""Seconds for a request sent when the time is over: enough for a healthy server, to withdraw a request or explain."""
TELL_S: Final = 2.0
"""Seconds for which something is waited for without a word."""
_BACKOFF_FIRST_S: Final = 0.01
_BACKOFF_MAX_S: Final = 1.0


# Deadlines and back-off


def wall_ms() -> int:
    """Return milliseconds since 1970, by the clock of this machine."""
    return int(time.time() * 1000)


class Deadline:
    """Point in time by which an operation has to finish; passed on to every call on the way."""

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        """Set the deadline ``timeout_s`` seconds from now."""
        self.timeout_s: Final = timeout_s
        self._at: Final = time.monotonic() + timeout_s

    def __repr__(self) -> str:
        return f"<Deadline of {self.timeout_s:g} s, {self.left():.3f} s left>"

    def left(self) -> float:
        """Return the seconds left; 0 once the deadline has passed."""
        return max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() >= self._at


class Backoff:
    """Exponential back-off: pauses double with each failure, each shortened at random by up to a half.

    The jitter keeps clients that were disconnected at the same moment from coming back at the same moment.
    """

    __slots__ = ("_begin_s", "_first_s", "_max_s", "_next_s")

    def __init__(
        self, first_s: float = _BACKOFF_FIRST_S, max_s: float = _BACKOFF_MAX_S, *, at_once: bool = False
    ) -> None:
        """Begin with ``first_s`` seconds; with ``at_once``, with one retry without a pause."""
        self._first_s: Final = first_s
        self._max_s: Final = max_s
        self._begin_s: Final = 0.0 if at_once else first_s
        self._next_s = self._begin_s

    def grow(self) -> float:
        """Return the pause after one more failure, in seconds."""
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._max_s, max(self._first_s, self._next_s * 2))
        return pause_s

    def reset(self) -> None:
        """Return to the first pause after a success."""
        self._next_s = self._begin_s

    def sleep(self, deadline: Deadline) -> None:
        """Sleep for the next pause, but not beyond the deadline."""
        time.sleep(min(self.grow(), deadline.left()))


class Patience:
    """Log line about what is tried again: after 2 s, and each time that it has taken twice as long."""

    __slots__ = ("_began_s", "_logger", "_tell_s")

    def __init__(self, logger: logging.Logger) -> None:
        self._logger: Final = logger
        self._began_s: Final = time.monotonic()
        self._tell_s = TELL_S

    def tell(self, doing: str, why: object) -> None:
        """Log that something is tried again, and why, if that is due."""
        waited_s = time.monotonic() - self._began_s
        if waited_s >= self._tell_s:
            self._tell_s = waited_s * 2
            self._logger.info("retry.waiting action=%r waited_s=%.0f reason=%s", doing, waited_s, why)


_until: ContextVar[Deadline | None] = ContextVar("rollbridge_until", default=None)


@contextmanager
def answers_within(timeout_s: float) -> Iterator[None]:
    """Bound the time that all requests of this context, on this thread, are waited for, taken together."""
    before = _until.get()
    token = _until.set(Deadline(timeout_s if before is None else min(timeout_s, before.left())))
    try:
        yield
    finally:
        _until.reset(token)


def patience_s(most_s: float) -> float:
    """Return the seconds to wait for an answer now: ``most_s``, or less where a context says so."""
    until = _until.get()
    return most_s if until is None else min(most_s, max(until.left(), GRACE_S))


# Time-outs as callers state them


Timeout = float | timedelta | None
"""Seconds, or a timedelta; None is the default of the callee, which its documentation names."""


def as_seconds(timeout: Timeout, default_s: float) -> float:
    """Return a time-out in seconds, or the default.

    Raises:
        InvalidRequestError: It is no number.
    """
    if timeout is None:
        return default_s
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isnan(timeout):
        raise InvalidRequestError("a time-out must be positive or 0, not nan; nothing was done")
    return float(timeout)


Duration = float | timedelta
"""Seconds, or a timedelta."""


def as_timedelta(duration: Duration) -> timedelta:
    """Return a duration as a timedelta, the longest one for more seconds than that."""
    if isinstance(duration, timedelta):
        return duration
    limit_s = timedelta.max.total_seconds()
    return timedelta(seconds=duration) if abs(duration) < limit_s else timedelta.max


def positive_seconds(what: str, timeout: float | timedelta) -> float:
    """Return a time-out in seconds.

    Raises:
        InvalidRequestError: not positive.
    """
    seconds = as_seconds(timeout, 0.0)
    if not seconds > 0:
        raise InvalidRequestError(f"{what} must be positive, not {seconds:g} s")
    return seconds


# Background calls


T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Runner of one function at a time on a daemon thread; keeps the result until it is taken.

    Used by one thread. A function still running when the process ends, or never asked about again, is abandoned.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._outcome: tuple[T | None, Exception | None] | None = None

    @property
    def under_way(self) -> bool:
        """True while a function has begun and its result was not taken."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """True once the result can be taken."""
        return self._outcome is not None

    def begin(self, run: Callable[[], T], then: Callable[[], object] = lambda: None) -> None:
        """Run a function; the previous result must have been taken. ``then`` is called on its thread at the end."""
        if self._thread is not None:
            raise RuntimeError(f"{self._name}: the errand before has not been taken")
        self._outcome = None
        thread = threading.Thread(target=self._run, args=(run, then), name=self._name, daemon=True)
        thread.start()  # there may be no thread to be had
        self._thread = thread

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for the function; return whether it is done."""
        if self._thread is not None and self._outcome is None:
            self._thread.join(timeout_s)
        return self._outcome is not None

    def take(self) -> T | None:
        """Return the function's result, or None if it is not done; raise what it raised."""
        if self._outcome is None:
            return None
        (value, fault), self._outcome, self._thread = self._outcome, None, None
        if fault is not None:
            raise fault
        return value

    def _run(self, run: Callable[[], T], then: Callable[[], object]) -> None:
        try:
            self._outcome = run(), None
        except Exception as fault:
            self._outcome = None, fault
        then()


# Futures


class LightFuture(ABC, Generic[T]):
    """Subset of ``concurrent.futures.Future`` that makes sense for a shared result, which cannot be cancelled.

    Subclasses implement :meth:`result` and :meth:`done`.
    """

    __slots__ = ()

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Wait at most ``timeout`` seconds, or without end; return the result or raise the error."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if :meth:`result` would not wait."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, then return what :meth:`result` would raise; None if it would not.

        Raises:
            TimeoutError: not known in time.
        """
        try:
            self.result(timeout)
        except RollbridgeError as error:
            return error
        return None

    def running(self) -> bool:
        """Return True if :meth:`result` would wait."""
        return not self.done()

    def cancel(self) -> bool:
        """Return False: what was asked for or written cannot be taken back."""
        return False

    def cancelled(self) -> bool:
        return False


class Closable(ABC):
    """Object for a ``with`` block, whose end closes it."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Close it; closing again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Code of the application


CHUNK: Final = 512
"""Number of records taken from an iterator at a time."""


def in_chunks(items: Iterable[T], take: Callable[[list[T]], object]) -> int:
    """Pass the items of an iterator to ``take`` in chunks, at the end an empty one; return their number.

    Raises:
        Exception: what ``take`` raises; or what the iterator raises, once everything before that was taken.
    """
    iterator, taken = iter(items), 0
    while True:
        chunk, fault = next_chunk(iterator)
        take(chunk)
        taken += len(chunk)
        if fault is not None:
            raise fault
        if not chunk:
            return taken


def next_chunk(items: Iterator[T]) -> tuple[list[T], BaseException | None]:
    """Return the next items, and what the iterator raised behind them, if anything; neither at its end."""
    found: list[T] = []
    try:
        found.extend(islice(items, CHUNK))  # keeps what came before an exception
    except BaseException as fault:
        return found, fault
    return found, None


def call_back(callback: Callable[[], object], logger: logging.Logger, what: str) -> None:
    """Call ``callback``, and log whatever it raises as a failed callback of ``what``.

    Only Ctrl-C on the main thread, for which it is meant, is raised.
    """
    try:
        callback()
    except BaseException as fault:
        if isinstance(fault, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        logger.exception("callback.failed callback=%r", what)
