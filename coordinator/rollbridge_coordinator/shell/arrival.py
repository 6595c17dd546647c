"""Waiting at the start for servers that do not answer yet.

Whoever starts everything at once, after a power failure say, starts coordinators before their servers answer. One that
left then would be started again and again, ever later, and be the last to come. So it waits, as other daemons of Kafka
do, and says for what: in the log at once and then each minute, and at ``/healthz``. What waiting cannot mend ends it at
once: wrong credentials, another cluster, a setting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from rollbridge.calls import Backoff
from rollbridge.errors import UnavailableError, UnknownWriteError
from rollbridge.zookeeper.errors import UntrustedZooKeeperError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FOR_EVER: Final = -1.0
ATTEMPT_S: Final = 10.0
"""Longest time of one attempt to reach a server."""
PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 5.0
"""Pauses between two attempts: a server that has come back is not kept waiting for long."""
TOLD_S: Final = 60.0
"""How often it is said again that it waits."""


class StoppedWaitingError(Exception):
    """This process was asked to end while it waited; nothing was written."""


class Arrival:
    """Attempts to reach servers, repeated until they answer, the time is up, or the process is to end.

    Attributes:
        waits_for: What it waits for, in half a sentence; empty if for nothing. May be read from any thread.
    """

    def __init__(self, wait_s: float, stopping: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        """Wait for at most ``wait_s`` seconds from now, for ever if it is negative, unless ``stopping`` is set."""
        self._clock = clock
        self._began_s = clock()
        self._wait_s = wait_s
        self._stopping = stopping
        self.waits_for = ""

    def until(self, what: str, attempt: Callable[[], T]) -> T:
        """Return what ``attempt`` gives once it succeeds.

        Args:
            what: The servers, and where they are looked for.
            attempt: Tries to reach them, within :data:`ATTEMPT_S`, and may be repeated.

        Raises:
            UnavailableError, UnknownWriteError: that of the last attempt, once the time is up.
            StoppedWaitingError: this process is to end.

        Raises also what ``attempt`` does, if that is another error.
        """
        backoff, told_s = Backoff(PAUSE_FIRST_S, PAUSE_MAX_S), -TOLD_S
        begun_s = self._clock()
        while True:
            try:
                found = attempt()
            except UntrustedZooKeeperError:
                raise
            except (UnavailableError, UnknownWriteError) as fault:
                now_s = self._clock()
                if 0 <= self._wait_s <= now_s - self._began_s:
                    raise
                self.waits_for = f"waits for {what} since {now_s - begun_s:.0f} s: {fault}"
                if now_s - begun_s - told_s >= TOLD_S:
                    told_s = now_s - begun_s
                    logger.warning("%s; it goes on when they answer (wait_at_start_s bounds that)", self.waits_for)
            else:
                if self.waits_for:
                    logger.warning("%s: they answer, after %.0f s", what, self._clock() - begun_s)
                self.waits_for = ""
                return found
            if self._stopping.wait(backoff.grow()):
                raise StoppedWaitingError(f"asked to end while it waited for {what}")
