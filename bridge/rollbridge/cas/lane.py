"""A lane: the conditional writes of one connection that wait for one segment, and whose turn it is.

Whoever finds the lane free carries out rounds until its own write has its answer, then wakes the one whose write is
first. Writes keep the order in which each writer began them. Where several writers of the connection contend, they win
in turn.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final
from weakref import WeakKeyDictionary

from rollbridge.cas.contention import Contention
from rollbridge.cas.request import Request

WAITING_MAX: Final = 64
"""Most writes behind a round that are looked at when it is decided."""
_ROOM_S: Final = 0.001


class Lane:
    """What waits for one segment. Anybody may :meth:`put`; all else is for whoever holds ``lock``."""

    def __init__(self) -> None:
        self.queue: deque[Request] = deque()
        self.lock = threading.Lock()
        self.contention = Contention()
        self.scheduled = False
        self._wins = itertools.count(1)
        self._last_win: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._due: object = None
        self._came = threading.Event()

    @property
    def contended(self) -> bool:
        """Whether writers of this lane have just been refused because of each other."""
        return self._due is not None

    def put(self, request: Request) -> None:
        """Add a write at the end."""
        self.queue.append(request)
        if request.owner is self._due:
            self._came.set()

    def waiting(self) -> list[Request]:
        """The writes that wait, oldest first, but not more than some."""
        # By index, since others may append meanwhile; nobody else removes.
        return [self.queue[place] for place in range(min(len(self.queue), WAITING_MAX))]

    def take_out(self, refused: Iterable[Request]) -> list[Request]:
        """Remove writes that are refused without a round of their own; whoever won longest ago is first.

        That one is also waited for before the next round, since the winner, who has its answer at the same time, would
        be first again and again.
        """
        order = sorted(refused, key=self._longest_ago)
        for request in order:
            self.queue.remove(request)
        self._came.clear()
        self._due = order[0].owner if order else None
        return order

    def won(self, owner: object) -> None:
        """A round of a writer was committed."""
        self._last_win[owner] = next(self._wins)

    def take_turns(self) -> None:
        """Put first whoever won longest ago of those who contend here."""
        if self._due is None:
            return
        turn = self._of_due()
        if turn is None and self._came.wait(_ROOM_S):
            turn = self._of_due()
        if turn is not None:
            self.queue.remove(turn)
            self.queue.appendleft(turn)

    def _longest_ago(self, request: Request) -> int:
        return self._last_win.get(request.owner, 0)

    def _of_due(self) -> Request | None:
        for request in self.waiting():
            # One that expects another that waits here, too, has to stay behind it.
            if request.owner is self._due and not request.awaited({}):
                return request
        return None
