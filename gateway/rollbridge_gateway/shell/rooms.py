"""Room for bytes that many connections share: who finds none waits for those before it."""

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
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_crowded(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    async def take(self, size: int, *, small_at_once: bool = False) -> None:
        """Wait until there is room for so many bytes; one always has room, however large."""
        if (not self._waiting and self._fits(size)) or (small_at_once and size <= SMALL_BYTES):
            self.taken += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        item = (size, turn)
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

    def give(self, size: int) -> None:
        """Give back what was taken."""
        self.taken -= size
        self._let_in()

    def _fits(self, size: int) -> bool:
        return not self.taken or self.taken + size <= self.limit

    def _let_in(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self.taken += size
                turn.set_result(None)
