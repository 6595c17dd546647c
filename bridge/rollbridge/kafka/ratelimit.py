"""Rate-limited logging: one line per cause, minute and client.

librdkafka logs up to 22 times a second that a broker cannot be reached, and every retry of ours would too. The first
line passes; the next one after a minute carries the number of those left out.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

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
