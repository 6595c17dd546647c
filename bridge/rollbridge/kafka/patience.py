"""How long to wait, and how long to pause: deadlines that are handed on, and pauses that grow."""

from __future__ import annotations

import random
import time
from typing import Final

BACKOFF_FIRST_S: Final = 0.01
BACKOFF_MAX_S: Final = 1.0


class Deadline:
    """A point in time up to which something may take; handed on to whatever is asked on the way there."""

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s`` from now on, in seconds."""
        self.timeout_s: Final = timeout_s
        self._at: Final = time.monotonic() + timeout_s

    def __repr__(self) -> str:
        return f"<Deadline of {self.timeout_s:g} s, {self.left():.3f} s left>"

    def left(self) -> float:
        """Seconds that are left; 0 if it has passed."""
        return max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() >= self._at


class Backoff:
    """Pauses that double from one failure to the next, each shortened at random by up to a half.

    The chance keeps many clients that were cut off at the same moment from coming back at the same moment.
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
        """Begin anew after a success."""
        self._next_s = self._first_s

    def sleep(self, deadline: Deadline) -> None:
        """Pause, but not beyond the deadline."""
        time.sleep(min(self.grow(), deadline.left()))
