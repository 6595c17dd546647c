"""The board of the live page: values that leaders of this coordinator publish for its HTTP server.

It costs a leader's thread almost nothing: every ten seconds it records its counters, and once a second, only while the
page is open in a browser, it publishes an immutable value. Threads of the server wait here, the leader never does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rollbridge.base.logs import log_defect
from rollbridge_coordinator.core.metrics import LeaderView
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.page.overview import (
    STEP_MS,
    CounterHistory,
    CounterSample,
    LiveGroup,
    Period,
    live_group,
    tally_of,
)

logger = logging.getLogger(__name__)

WATCHED_S: Final = 15.0
"""Time after a request for which leaders continue to publish."""
INTERVAL_S: Final = 1.0
RATES_S: Final = 10.0
"""Period of the rates of streams."""
FRESH_S: Final = 3.0
"""Age above which a value is waited for."""


class CachedPages(NamedTuple):
    """Values of a leader: from some seconds ago, if any, and the latest."""

    earlier: LiveGroup | None
    latest: LiveGroup


class PageCache:
    """Values that the leaders of one coordinator show; safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without a group and without viewers."""
        self._clock = clock
        self._changed = threading.Condition()
        self._led: set[str] = set()
        self._sheets: dict[str, deque[tuple[float, LiveGroup]]] = {}
        self._hours: dict[str, CounterHistory] = {}
        self._watched_until_s = float("-inf")

    # For the server

    def look(self) -> None:
        self._watched_until_s = self._clock() + WATCHED_S

    @property
    def is_watched(self) -> bool:
        return self._clock() < self._watched_until_s

    def sheets(self, group: str, timeout_s: float) -> CachedPages | None:
        """Return the values of a group; None if it is not led here.

        Waits for at most ``timeout_s`` for fresh ones; a busy leader may have published none lately, and then its
        earlier ones are returned, or None if there are none.
        """
        with self._changed:
            self._changed.wait_for(lambda: group not in self._led or self._is_fresh(group), timeout_s)
            known = self._sheets.get(group)
            if group not in self._led or not known:
                return None
            (_, first), (_, last) = known[0], known[-1]
            return CachedPages(None if first is last else first, last)

    def led(self) -> set[str]:
        with self._changed:
            return set(self._led)

    def last_minute(self, group: str, now_ms: int) -> Period | None:
        """Return a group's activity in the last minute; None if unknown."""
        with self._changed:
            hour = self._hours.get(group)
            return None if hour is None else hour.last_minute(now_ms)

    def last_hour(self, group: str, now_ms: int) -> Sequence[Period]:
        """Return a group's activity in the last hour, while it was led here."""
        with self._changed:
            hour = self._hours.get(group)
            return () if hour is None else list(hour.periods(now_ms))

    def _is_fresh(self, group: str) -> bool:
        known = self._sheets.get(group)
        return bool(known) and known is not None and self._clock() - known[-1][0] < FRESH_S

    # For leaders

    def add_tally(self, group: str, counter_sample: CounterSample) -> None:
        """Add the counters of a group's leader."""
        with self._changed:
            self._hours.setdefault(group, CounterHistory()).add(counter_sample)
            self._led.add(group)

    def put(self, live: LiveGroup) -> None:
        """Publish the values of a group."""
        now_s = self._clock()
        with self._changed:
            known = self._sheets.setdefault(live.name, deque())
            known.append((now_s, live))
            while len(known) > 1 and now_s - known[0][0] > RATES_S:
                known.popleft()
            self._led.add(live.name)
            self._changed.notify_all()

    def drop(self, group: str) -> None:
        """Remove the values of a group; its last hour is kept."""
        with self._changed:
            self._led.discard(group)
            self._sheets.pop(group, None)
            self._changed.notify_all()


class PageSheet:
    """Part of the board that belongs to one leader; used by its thread only."""

    def __init__(self, board: PageCache | None, group: str) -> None:
        """Prepare; without a board nothing is done."""
        self._board = board
        self._group = group
        self._known: LiveGroup | None = None
        self._next_s = self._tally_s = 0.0
        self._is_broken = False

    def write(self, group: GroupState, view: Callable[[int], LeaderView], now_ms: int) -> None:
        """Publish the values that are due.

        Args:
            view: Returns its shell's present view.
        """
        board = self._board
        if board is None or self._is_broken:
            return
        now_s = time.monotonic()
        try:
            if now_s >= self._tally_s:
                self._tally_s = now_s + STEP_MS / 1000
                board.add_tally(self._group, tally_of(group, now_ms))
            if now_s >= self._next_s and board.is_watched:
                self._next_s = now_s + INTERVAL_S
                self._known = live_group(group, view(now_ms), self._known)
                board.put(self._known)
        except Exception:  # no commit waits for a picture
            log_defect(logger, "page.term-hidden group=%s", self._group)
            self._is_broken = True
            board.drop(self._group)

    def remove(self) -> None:
        self._known = None
        self._next_s = self._tally_s = 0.0
        self._is_broken = False
        if self._board is not None:
            self._board.drop(self._group)
