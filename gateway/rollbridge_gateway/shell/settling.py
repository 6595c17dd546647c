"""What waits for brokers, in an event loop: settled by another thread, many at a time, each within the same time.

Brokers acknowledge what many producers have written with one answer, so the thread that reads it settles many
savepoints in a row. The loop is woken once for all of them; and one timer looks after all that waits, since the one
that has waited longest is always the first of them.
"""

from __future__ import annotations

import asyncio
from collections import deque

from rollbridge.client.savepoints import SavepointFuture
from rollbridge.errors import UnavailableError


class Settling:
    """Savepoints on their way to the brokers. Belongs to the event loop that made it."""

    def __init__(self, timeout_s: float) -> None:
        """Begin with none.

        Args:
            timeout_s: Longest wait for each.
        """
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._settled: deque[asyncio.Future[None]] = deque()  # appended to by other threads
        self._is_woken = False
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def reached(self, savepoint: SavepointFuture) -> None:
        """Wait until the brokers have a savepoint.

        Raises:
            UnavailableError: not in time.
            IncompleteError: they refused something before it.
        """
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self._loop.time() + self._timeout_s, waiter))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._expire)
        savepoint.add_done_callback(lambda _: self._settle(waiter))
        await waiter
        savepoint.result(0)

    def _settle(self, waiter: asyncio.Future[None]) -> None:
        """Have a waiter woken; called on any thread."""
        self._settled.append(waiter)
        if not self._is_woken:
            # Two threads may both come here, and then it is woken twice; what it finds is there before it is told.
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_woken = False  # before looking: what is settled from now on wakes again
        while self._settled:
            waiter = self._settled.popleft()
            if not waiter.done():
                waiter.set_result(None)
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()

    def _expire(self) -> None:
        now = self._loop.time()
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= now):
            _, waiter = self._waiting.popleft()
            if not waiter.done():
                late = f"the brokers have not acknowledged everything within {self._timeout_s:g} s"
                waiter.set_exception(UnavailableError(late))
        self._timer = self._loop.call_at(self._waiting[0][0], self._expire) if self._waiting else None
