"""How long servers are waited for in a call that has a time-out of its own, however many questions it takes.

A call of the application opens a context; whatever ZooKeeper and Kafka are asked in it, on the same thread, ends with
it.
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
"""What a question gets that is asked when the time is over: enough for an answer of a server that is well, so that a
request can be taken back and a fault be explained."""

_until: ContextVar[float | None] = ContextVar("rollbridge_until", default=None)


@contextmanager
def answers_within(timeout_s: float) -> Iterator[None]:
    """Nothing that is asked in this context, on this thread, is waited for longer than this, taken together."""
    until = time.monotonic() + timeout_s
    before = _until.get()
    token = _until.set(until if before is None else min(before, until))
    try:
        yield
    finally:
        _until.reset(token)


def patience_s(most_s: float) -> float:
    """How long to wait for an answer now, in seconds: ``most_s`` where no context says less."""
    until = _until.get()
    return most_s if until is None else min(most_s, max(until - time.monotonic(), GRACE_S))


# --------------------------------------------------------------------------------------------------------------------
# How long to wait, as callers say it.


Timeout = float | timedelta | None
"""Seconds, or a timedelta; None is the default of whoever waits, which its documentation names."""


def as_seconds(timeout: Timeout, default_s: float) -> float:
    """The seconds of a time-out, or the default."""
    if timeout is None:
        return default_s
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def positive_seconds(what: str, timeout: float | timedelta) -> float:
    """Seconds.

    Raises:
        InvalidRequestError: not positive.
    """
    seconds = as_seconds(timeout, 0.0)
    if not seconds > 0:
        raise InvalidRequestError(f"{what} must be positive, not {seconds:g} s")
    return seconds


# --------------------------------------------------------------------------------------------------------------------
# What the futures of records and outcomes have in common.


T = TypeVar("T")


class LightFuture(ABC, Generic[T]):
    """The part of ``concurrent.futures.Future`` that makes sense for something that is shared; it can not be cancelled.

    What derives from it says :meth:`result` and :meth:`done`.
    """

    __slots__ = ()

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Wait, at most ``timeout`` seconds or without end, and give the result or raise what it met."""

    @abstractmethod
    def done(self) -> bool:
        """Whether :meth:`result` would not wait."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What :meth:`result` raises once it does not wait any more; None if it does not raise.

        Raises:
            TimeoutError: not known in time.
        """
        try:
            self.result(timeout)
        except RollbridgeError as error:
            return error
        return None

    def running(self) -> bool:
        """Whether :meth:`result` would wait."""
        return not self.done()

    def cancel(self) -> bool:
        """What was asked for or written can not be taken back: always False."""
        return False

    def cancelled(self) -> bool:
        """Always False."""
        return False


# --------------------------------------------------------------------------------------------------------------------
# Code of the application that we run: iterators that it gives and callbacks that it leaves.
# It may take long, raise whatever it likes and call us again. So none of it runs under a lock of ours, and nothing
# that it raises ends a thread of ours, on which others depend.


CHUNK: Final = 512
"""How many records are taken from an iterator at a time."""


def in_chunks(items: Iterable[T], take: Callable[[list[T]], object]) -> int:
    """Give ``take`` what an iterator gives, some at a time; returns how many. It is called at the end with none.

    Raises:
        Exception: What ``take`` raises; or the iterator, when what it gave before was taken.
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
    """The next items, and what the iterator raised behind them, if it did; it is at its end when there are neither."""
    found: list[T] = []
    try:
        found.extend(islice(items, CHUNK))  # keeps what came before an exception
    except BaseException as fault:
        return found, fault
    return found, None


def call_back(callback: Callable[[], object], logger: logging.Logger, what: str) -> None:
    """Call ``callback``; whatever it raises is logged as a failed callback of ``what``.

    Only Ctrl-C, which is meant for the main thread, goes through there.
    """
    try:
        callback()
    except BaseException as fault:
        if isinstance(fault, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        logger.exception("a callback of %s failed", what)
