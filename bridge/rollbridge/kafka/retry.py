"""Deadlines, back-off, rate-limited logging, and single background calls for threads that must not block."""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

BACKOFF_FIRST_S: Final = 0.01
BACKOFF_MAX_S: Final = 1.0


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
        """Return whether the deadline has passed."""
        return time.monotonic() >= self._at


class Backoff:
    """Exponential back-off: pauses double with each failure, each shortened at random by up to a half.

    The jitter keeps clients that were disconnected at the same moment from coming back at the same moment.
    """

    __slots__ = ("_first_s", "_max_s", "_next_s")

    def __init__(self, first_s: float = BACKOFF_FIRST_S, max_s: float = BACKOFF_MAX_S) -> None:
        self._first_s: Final = first_s
        self._max_s: Final = max_s
        self._next_s = first_s

    def grow(self) -> float:
        """Return the pause after one more failure, in seconds."""
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._max_s, self._next_s * 2)
        return pause_s

    def reset(self) -> None:
        """Return to the first pause after a success."""
        self._next_s = self._first_s

    def sleep(self, deadline: Deadline) -> None:
        """Sleep for the next pause, but not beyond the deadline."""
        time.sleep(min(self.grow(), deadline.left()))


# Rate-limited logging: one line per cause, minute and client. librdkafka logs up to 22 times a second that a broker
# cannot be reached, and every retry of ours would too. The first line passes; the next one after a minute carries the
# number of those left out.

INTERVAL_S: Final = 60.0
_CAUSES_MAX: Final = 1_000
# Numbers that differ from line to line: offsets, durations, counts. Numbers behind a letter or a sign belong to a name:
# a topic, an address, a client of the library ("rdkafka#consumer-2").
_FIGURES: Final = re.compile(r"(?:(?<=[\s(=])|^)\d+(?:\.\d+)?")
_HISTORY: Final = re.compile(r"\(after .*\)")


@dataclass(slots=True)
class _Cause:
    since: float
    left_out: int = 0


class Limiter(logging.Filter):
    """Logging filter that passes one line per cause and ``interval_s`` seconds. Thread-safe."""

    def __init__(self, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._causes: dict[tuple[str, int, str], _Cause] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to pass a line; append the number of those left out before it."""
        if record.levelno < logging.INFO:
            return True
        text = record.getMessage()
        cause = record.name, record.levelno, _FIGURES.sub("#", _HISTORY.sub("", text))
        now = self._clock()
        with self._lock:
            known = self._causes.get(cause)
            if known is not None and now - known.since < self._interval_s:
                known.left_out += 1
                return False
            if len(self._causes) >= _CAUSES_MAX:
                self._forget(now)
            self._causes[cause] = _Cause(now)
        if known is not None and known.left_out:
            record.msg = "%s (%d lines like this were left out in the last %.0f s)"
            record.args = (text, known.left_out, now - known.since)
        return True

    def _forget(self, now: float) -> None:
        """Drop the causes not logged lately, or all if they are still too many."""
        self._causes = {key: item for key, item in self._causes.items() if now - item.since < self._interval_s}
        if len(self._causes) >= _CAUSES_MAX:
            self._causes.clear()


LIMITER: Final = Limiter()


def limited(logger: logging.Logger) -> logging.Logger:
    """Rate-limit a logger and return it."""
    logger.addFilter(LIMITER)  # adding it again changes nothing
    return logger


def limited_child(logger: logging.Logger) -> logging.Logger:
    """Return a rate-limited child of a logger, for librdkafka, leaving the caller's logger unchanged."""
    return limited(logger.getChild("librdkafka"))


# Background calls.

T = TypeVar("T")


class Errand(Generic[T]):
    """Runner of one function at a time on a daemon thread; keeps the result until it is taken.

    Used by one thread. A function still running when the process ends, or never asked about again, is abandoned.
    """

    def __init__(self, name: str) -> None:
        """Set the ``name`` of the threads."""
        self._name = name
        self._thread: threading.Thread | None = None
        self._outcome: tuple[T | None, Exception | None] | None = None

    @property
    def under_way(self) -> bool:
        """True while a function was begun and its result not taken."""
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
        self._thread = threading.Thread(target=self._run, args=(run, then), name=self._name, daemon=True)
        self._thread.start()

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
