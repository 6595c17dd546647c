"""Ages: which open transactions have been so for a moment, and which have outlived their leases."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from typing import Final

from rollbridge.model.buffered import BufferedTransaction
from rollbridge.model.transaction import State

DEADLINES_MIN: Final = 1_000


class Ages:
    """When transactions began and when their leases run out; who is open is for the owner of ``known`` to say."""

    def __init__(self, known: Mapping[bytes, BufferedTransaction]) -> None:
        """Watch a dictionary of transactions; :meth:`add` has to be called for each new one."""
        self._known = known
        self._deadlines: list[tuple[int, bytes]] = []
        self._young: deque[BufferedTransaction] = deque()

    def add(self, item: BufferedTransaction) -> None:
        """A transaction has become open."""
        heapq.heappush(self._deadlines, (item.deadline_ms, item.id))
        self._young.append(item)

    def overdue(self, now_ms: int) -> list[BufferedTransaction]:
        """Open transactions whose lease has run out, oldest deadline first. Asking changes nothing."""
        found: list[BufferedTransaction] = []
        kept: list[tuple[int, bytes]] = []
        while self._deadlines and self._deadlines[0][0] < now_ms:
            entry = heapq.heappop(self._deadlines)
            item = self._known.get(entry[1])
            if item is not None and item.state is State.OPEN:
                found.append(item)
                kept.append(entry)
        for entry in kept:
            heapq.heappush(self._deadlines, entry)
        return found

    def come_of_age(self, begun_before_ms: int) -> list[BufferedTransaction]:
        """Transactions begun before a time that are still open; each is given once, oldest first."""
        young = self._young
        found = []
        while young and (young[0].state is not State.OPEN or young[0].begun_ms < begun_before_ms):
            item = young.popleft()
            if item.state is State.OPEN:
                found.append(item)
        return found

    def next_deadline_ms(self) -> int | None:
        """The earliest deadline that may still matter."""
        return self._deadlines[0][0] if self._deadlines else None

    def shed(self) -> None:
        """Drop the deadlines of transactions that are gone, once they are many.

        Most end long before their lease; without this their deadlines would stay until then.
        """
        if len(self._deadlines) > 2 * len(self._known) + DEADLINES_MIN:
            self._sort()

    def tidy(self) -> None:
        """Drop all that is about transactions that are gone; all others are young again."""
        self._sort()
        self._young = deque(self._known.values())

    def _sort(self) -> None:
        self._deadlines = [(item.deadline_ms, item.id) for item in self._known.values()]
        heapq.heapify(self._deadlines)
