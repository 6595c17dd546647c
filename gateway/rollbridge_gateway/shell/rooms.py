"""Room for bytes that many connections share: who finds none waits for those before it.

Who takes piece by piece keeps what it has while it waits for more. So that not all wait for each other, one of those
may go beyond the limit, until it gives back what it has.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

SMALL_BYTES: Final = 16 << 10
"""What is no larger waits for nobody where that is asked for: it ends what others wait for."""


class Room:
    """Room for so many bytes. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        """Start empty."""
        self.limit = limit
        self.taken = 0
        self._beyond: object = None
        """Who may go beyond the limit."""
        self._waiting: deque[tuple[int, object, asyncio.Future[None]]] = deque()

    @property
    def is_crowded(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    async def take(self, size: int, *, small_at_once: bool = False, by: object = None) -> None:
        """Wait until there is room for so many bytes; one always has room, however large.

        Args:
            size: How many.
            small_at_once: Whether few bytes wait for nobody.
            by: Who takes piece by piece; it waits only for one other that does.
        """
        is_beyond = by is not None and by is self._beyond
        if is_beyond or (not self._waiting and self._fits(size, by)) or (small_at_once and size <= SMALL_BYTES):
            self.taken += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        item = (size, by, turn)
        self._waiting.append(item)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give(size)
            elif item in self._waiting:
                self._waiting.remove(item)
                self._let_in()
            raise

    def give(self, size: int, by: object = None) -> None:
        """Give back what was taken; who has taken piece by piece, all of it at once."""
        self.taken -= size
        if by is not None and by is self._beyond:
            self._beyond = None
        self._let_in()

    def _fits(self, size: int, by: object) -> bool:
        if not self.taken or self.taken + size <= self.limit:
            return True
        if by is None or self._beyond is not None:
            return False
        self._beyond = by
        return True

    def _let_in(self) -> None:
        while self._waiting and self._fits(*self._waiting[0][:2]):
            size, _, turn = self._waiting.popleft()
            if not turn.done():
                self.taken += size
                turn.set_result(None)
