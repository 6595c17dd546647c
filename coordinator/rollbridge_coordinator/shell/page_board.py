"""The board of the live page: what leaders of this coordinator put up for its HTTP server, and whether somebody looks.

A leader's thread does next to nothing for it: every ten seconds it notes what it has counted, and once a second, only
while somebody looks, it puts up a value that does not change any more. Threads of the server wait here, never it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rollbridge.defects import log_defect
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.live import LiveGroup, live_group
from rollbridge_coordinator.state.metrics import LeaderView
from rollbridge_coordinator.state.recent import STEP_MS, Hour, Period, Tally, tally_of

logger = logging.getLogger(__name__)

WATCHED_S: Final = 15.0
"""For how long leaders go on after somebody has looked."""
INTERVAL_S: Final = 1.0
RATES_S: Final = 10.0
"""Rates of streams are those of so many seconds."""
FRESH_S: Final = 3.0
"""What is older is waited for."""


class Sheets(NamedTuple):
    """What a leader has put up: what it was some seconds ago, if that is known, and the latest."""

    earlier: LiveGroup | None
    latest: LiveGroup


class PageBoard:
    """What the leaders of one coordinator show; safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without a group, and without anybody who looks."""
        self._clock = clock
        self._changed = threading.Condition()
        self._led: set[str] = set()
        self._sheets: dict[str, deque[tuple[float, LiveGroup]]] = {}
        self._hours: dict[str, Hour] = {}
        self._watched_until_s = float("-inf")

    # For the server

    def look(self) -> None:
        """Note that somebody looks."""
        self._watched_until_s = self._clock() + WATCHED_S

    @property
    def is_watched(self) -> bool:
        """True while somebody looks."""
        return self._clock() < self._watched_until_s

    def sheets(self, group: str, timeout_s: float) -> Sheets | None:
        """Return what is shown of a group; None if it is not led here.

        Waits for at most ``timeout_s`` for what is fresh; a leader with much to do may have put up nothing lately, and
        then what it has put up before is returned, or None if that was nothing.
        """
        with self._changed:
            self._changed.wait_for(lambda: group not in self._led or self._is_fresh(group), timeout_s)
            known = self._sheets.get(group)
            if group not in self._led or not known:
                return None
            (_, first), (_, last) = known[0], known[-1]
            return Sheets(None if first is last else first, last)

    def led(self) -> set[str]:
        """Return the groups that are led here."""
        with self._changed:
            return set(self._led)

    def last_minute(self, group: str, now_ms: int) -> Period | None:
        """Return what a group did in the last minute; None if nothing is known."""
        with self._changed:
            hour = self._hours.get(group)
            return None if hour is None else hour.last_minute(now_ms)

    def last_hour(self, group: str, now_ms: int) -> Sequence[Period]:
        """Return what a group did in the last hour, while it was led here."""
        with self._changed:
            hour = self._hours.get(group)
            return () if hour is None else list(hour.periods(now_ms))

    def _is_fresh(self, group: str) -> bool:
        known = self._sheets.get(group)
        return bool(known) and known is not None and self._clock() - known[-1][0] < FRESH_S

    # For leaders

    def add_tally(self, group: str, tally: Tally) -> None:
        """Add what the leader of a group has counted."""
        with self._changed:
            self._hours.setdefault(group, Hour()).add(tally)
            self._led.add(group)

    def put(self, live: LiveGroup) -> None:
        """Put up what is shown of a group."""
        now_s = self._clock()
        with self._changed:
            known = self._sheets.setdefault(live.name, deque())
            known.append((now_s, live))
            while len(known) > 1 and now_s - known[0][0] > RATES_S:
                known.popleft()
            self._led.add(live.name)
            self._changed.notify_all()

    def drop(self, group: str) -> None:
        """Take down what is shown of a group; its last hour stays."""
        with self._changed:
            self._led.discard(group)
            self._sheets.pop(group, None)
            self._changed.notify_all()


class PageSheet:
    """The part of the board that is one leader's; used by its thread only."""

    def __init__(self, board: PageBoard | None, group: str) -> None:
        """Prepare; without a board nothing is done."""
        self._board = board
        self._group = group
        self._known: LiveGroup | None = None
        self._next_s = self._tally_s = 0.0
        self._is_broken = False

    def write(self, group: GroupState, view: Callable[[int], LeaderView], now_ms: int) -> None:
        """Put up what is due.

        Args:
            group: The leader's state.
            view: Returns what its shell knows besides, at a moment.
            now_ms: The leader's clock.
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
        except Exception:  # nobody's commit waits for a picture
            log_defect(logger, "%s: the live page does not show this term", self._group)
            self._is_broken = True
            board.drop(self._group)

    def remove(self) -> None:
        """Take it down: the group is no longer led here."""
        self._known = None
        self._next_s = self._tally_s = 0.0
        self._is_broken = False
        if self._board is not None:
            self._board.drop(self._group)
