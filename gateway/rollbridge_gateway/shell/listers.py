"""Threads for what lists transactions: few, since a listing may read much, and not those of what producers do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LISTINGS_MAX: Final = 4
"""Listings under way."""


class ClientLeftError(ConnectionError):
    """The client has left, so what it has asked for is not done."""


class Listers:
    """Belongs to the event loop that made it."""

    def __init__(self, most: int = LISTINGS_MAX) -> None:
        """Start with nothing under way; ``most`` may be."""
        self._threads = ThreadPoolExecutor(most, "lister")
        self._places = asyncio.Semaphore(most)

    async def run(self, has_left: Callable[[], bool], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do some work on one of the threads, first come, first served, unless who has asked leaves while it waits.

        Who has closed its side of the connection may still read: it is answered where nobody has to wait.

        Raises:
            ClientLeftError: it has left; nothing was done.
        """
        waits = self._places.locked()
        async with self._places:
            if waits and has_left():
                raise ClientLeftError("the client has left before its listing was begun")
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))

    def close(self) -> None:
        """Begin nothing any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
