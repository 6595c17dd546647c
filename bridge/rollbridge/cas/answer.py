"""The answer to a request: lighter than ``concurrent.futures.Future``, since thousands are made a second.

Nearly all of them get their answer before anybody waits, so what it takes to wait is made only when somebody does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from rollbridge.calls.forks import module_lock
from rollbridge.calls.user_code import call_back
from rollbridge.model.sn import SN

logger = logging.getLogger(__name__)

Callback = Callable[["Answer"], object]

_lock: Final = module_lock()
"""Held for a few instructions, whenever an answer comes or somebody begins to wait: one for all answers is enough."""


class Answer:
    """Gets the SNs of a write's records, or what it failed with, once. Safe to use from several threads."""

    __slots__ = ("_callbacks", "_event", "_fault", "_is_done", "_sns")

    def __init__(self) -> None:
        self._is_done = False
        self._sns: list[SN] = []
        self._fault: BaseException | None = None
        self._event: threading.Event | None = None
        self._callbacks: list[Callback] | None = None

    def done(self) -> bool:
        """Whether it is there."""
        return self._is_done

    def result(self, timeout: float | None = None) -> list[SN]:
        """Wait for it; raises what the write failed with.

        Raises:
            TimeoutError: not there within ``timeout`` seconds.
        """
        fault = self.exception(timeout)
        if fault is not None:
            raise fault
        return self._sns

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for it; what the write failed with, None if it did not.

        Raises:
            TimeoutError: not there within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_done:
            if not self.wait(None if deadline is None else deadline - time.monotonic()):
                raise TimeoutError(f"the conditional write has no answer within {timeout} s; ask again")
        return self._fault

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is there, or until :meth:`nudge` is called; False if neither was so in time."""
        with _lock:
            if self._is_done:
                return True
            event = self._event = self._event or threading.Event()
        if not event.wait(timeout):
            return False
        if not self._is_done:
            event.clear()
            # If it came between these two lines, its event must not stay cleared for other waiters.
            if self.done():
                event.set()
        return True

    def nudge(self) -> None:
        """Have whoever waits look around, though it is not there yet."""
        with _lock:
            event = self._event = self._event or threading.Event()
        event.set()

    def set_result(self, sns: list[SN]) -> None:
        """It was written."""
        self._sns = sns
        self._settle()

    def set_exception(self, fault: BaseException) -> None:
        """It failed."""
        self._fault = fault
        self._settle()

    def add_done_callback(self, callback: Callback) -> None:
        """Call back once it is there, on the thread that brings it; at once if it is."""
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
