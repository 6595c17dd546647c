"""One line for each cause, minute and client: what is said again and again while a server is away is counted.

librdkafka says up to 22 times a second that a broker cannot be reached, and so does whoever tries again. The first line
is what one wants to read; of those like it within a minute the next one that is let through tells the number.
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
# Numbers that differ from line to line: offsets, durations, counts. Those that follow a letter or a sign belong to a
# name: a topic, an address, a client of the library ("rdkafka#consumer-2").
_FIGURES: Final = re.compile(r"(?:(?<=[\s(=])|^)\d+(?:\.\d+)?")
_HISTORY: Final = re.compile(r"\(after .*\)")


@dataclass(slots=True)
class _Cause:
    since: float
    left_out: int = 0


class Limiter(logging.Filter):
    """Lets one line in ``interval_s`` seconds through for each cause; safe to use from several threads."""

    def __init__(self, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._causes: dict[tuple[str, int, str], _Cause] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to let a line through, with the number of those before it that were left out."""
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
        """Drop what was not said lately, or everything if there is no end to the causes."""
        self._causes = {key: item for key, item in self._causes.items() if now - item.since < self._interval_s}
        if len(self._causes) >= _CAUSES_MAX:
            self._causes.clear()


LIMITER: Final = Limiter()


def limited(logger: logging.Logger) -> logging.Logger:
    """The same logger, whose lines are limited from now on."""
    logger.addFilter(LIMITER)  # adding it again changes nothing
    return logger


def limited_child(logger: logging.Logger) -> logging.Logger:
    """A logger for the library below one that is not ours to change."""
    return limited(logger.getChild("librdkafka"))
