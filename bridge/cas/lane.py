"""A lane: the conditional writes of one connection that wait for one segment, and whose turn it is.

Whoever finds the lane free carries out rounds until its own write has its answer, then wakes the one whose write is
first. Writes keep the order in which each writer began them. Where several writers of the connection contend, the one
that has just won makes room: it is told of its success before the others are told of their failure, and would otherwise
be back before them every time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

from bridge.cas.contention import Contention
from bridge.cas.request import Request

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
        self._winner: object = None
        self._came = threading.Event()
        self._makes_room = False

    @property
    def contended(self) -> bool:
        """Whether the last round that was committed refused writes of others in this lane."""
        return self._winner is not None

    def put(self, request: Request) -> None:
        """Add a write at the end."""
        self.queue.append(request)
        if self._makes_room and request.owner is not self._winner:
            self._came.set()

    def waiting(self) -> list[Request]:
        """The writes that wait, oldest first, but not more than some."""
        # By index, since others may append meanwhile; nobody else removes.
        return [self.queue[place] for place in range(min(len(self.queue), WAITING_MAX))]

    def remove(self, requests: Iterable[Request]) -> None:
        """Take out writes that have their answer."""
        for request in requests:
            self.queue.remove(request)

    def won(self, owner: object, others_refused: bool) -> None:
        """A round was committed, and refused others here or not."""
        self._winner = owner if others_refused else None

    def take_turns(self) -> None:
        """See to it that another writer than the last winner is first, if there is contention among them."""
        if self._winner is None:
            return
        other = self._first_of_others()
        if other is None:
            self._makes_room = True
            self._came.clear()
            other = self._first_of_others()
            if other is None and self._came.wait(_ROOM_S):
                other = self._first_of_others()
            self._makes_room = False
        if other is None:
            self._winner = None
        else:
            self.queue.remove(other)
            self.queue.appendleft(other)

    def _first_of_others(self) -> Request | None:
        for request in self.waiting():
            # One that expects another that waits here, too, has to stay behind it.
            if request.owner is not self._winner and not request.awaited({}):
                return request
        return None
