"""One question at a time in the background, for threads that must not wait for a broker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Errand(Generic[T]):
    """Runs one function at a time on a thread of its own and keeps what it gives until it is taken.

    Used by one thread. What is under way when the process ends, or when nobody asks any more, is left to itself.
    """

    def __init__(self, name: str) -> None:
        """``name`` of its threads, as seen in a debugger."""
        self._name = name
        self._thread: threading.Thread | None = None
        self._outcome: tuple[T | None, Exception | None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether something was begun and not taken yet."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether what was begun can be taken."""
        return self._outcome is not None

    def begin(self, run: Callable[[], T], then: Callable[[], object] = lambda: None) -> None:
        """Run a function; the one before must have been taken. ``then`` is called on its thread once it is done."""
        if self._thread is not None:
            raise RuntimeError(f"{self._name}: the errand before has not been taken")
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(run, then), name=self._name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the function is done, at most so long; whether it is."""
        if self._thread is not None and self._outcome is None:
            self._thread.join(timeout_s)
        return self._outcome is not None

    def take(self) -> T | None:
        """What the function gave, or None if it is not done; raises what it raised."""
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
