"""Rules of calls: deadlines, futures that cannot be cancelled, and code of the application that rollbridge runs.

A call of the application opens a context with :func:`answers_within`; whatever is asked of ZooKeeper and Kafka in it,
on the same thread, ends with it, however many requests it takes.

Iterators and callbacks of the application may take long, raise anything and call rollbridge again. So none of them runs
under a lock of ours, and nothing that they raise ends a thread of ours, on which others depend.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import islice
from typing import Final, Generic, TypeVar

from rollbridge.errors import InvalidRequestError, RollbridgeError

GRACE_S: Final = 0.2
"""Seconds for a request sent when the time is over: enough for a healthy server, to withdraw a request or explain."""

_until: ContextVar[float | None] = ContextVar("rollbridge_until", default=None)


@contextmanager
def answers_within(timeout_s: float) -> Iterator[None]:
    """Bound the time that all requests of this context, on this thread, are waited for, taken together."""
    until = time.monotonic() + timeout_s
    before = _until.get()
    token = _until.set(until if before is None else min(before, until))
    try:
        yield
    finally:
        _until.reset(token)


def patience_s(most_s: float) -> float:
    """Return the seconds to wait for an answer now: ``most_s``, or less where a context says so."""
    until = _until.get()
    return most_s if until is None else min(most_s, max(until - time.monotonic(), GRACE_S))


# Time-outs as callers state them


Timeout = float | timedelta | None
"""Seconds, or a timedelta; None is the default of the callee, which its documentation names."""


def as_seconds(timeout: Timeout, default_s: float) -> float:
    """Return a time-out in seconds, or the default."""
    if timeout is None:
        return default_s
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def positive_seconds(what: str, timeout: float | timedelta) -> float:
    """Return a time-out in seconds.

    Raises:
        InvalidRequestError: not positive.
    """
    seconds = as_seconds(timeout, 0.0)
    if not seconds > 0:
        raise InvalidRequestError(f"{what} must be positive, not {seconds:g} s")
    return seconds


# Futures


T = TypeVar("T")


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
        """Return False."""
        return False


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
        logger.exception("a callback of %s failed", what)
