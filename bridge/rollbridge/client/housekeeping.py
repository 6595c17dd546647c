"""Housekeeping: one thread that does what must not be done on the way of a record, now and then or when poked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rollbridge.errors import RollbridgeError

logger = logging.getLogger(__name__)


class Housekeeper:
    """Runs its chores every ``interval_s`` seconds, and soon after :meth:`poke`."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._chores: list[Callable[[], None]] = []
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollbridge-housekeeping", daemon=True)

    def start(self, *chores: Callable[[], None]) -> None:
        """Begin; a chore that raises is logged and tried again next time."""
        self._chores.extend(chores)
        self._thread.start()

    def poke(self) -> None:
        """Run the chores soon. May be called from anywhere."""
        self._wake.set()

    def close(self) -> None:
        """Stop after the chore that is running."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._interval_s)
            self._wake.clear()
            for chore in self._chores:
                if self._stopping.is_set():
                    return
                try:
                    chore()
                except RollbridgeError as fault:  # such as a node that holds garbage
                    logger.warning("housekeeping failed and will be tried again: %s", fault)
                except Exception:
                    logger.exception("housekeeping met a defect and will be tried again")
