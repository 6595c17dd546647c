"""Connections that outlive a task: Spark reuses its Python processes, and connecting costs more than a small batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, Protocol, TypeVar

KEPT_MAX: Final = 4
"""Maximum connections kept by a process, to different clusters or with different credentials; an LRU cache."""


class _Closable(Protocol):
    def close(self) -> None:
        """Disconnect."""


T = TypeVar("T", bound=_Closable)


class Kept(Generic[T]):
    """Cache of connections for later tasks, keyed by servers and credentials, so that none is given to another user."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, connect: Callable[[], T]) -> T:
        """Return the connection under a key, or make it; close the least recently used one beyond the limit."""
        found = self._kept.pop(key, None) or connect()
        self._kept[key] = found
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)[1].close()
        return found

    def close(self) -> None:
        """Disconnect all."""
        while self._kept:
            self._kept.popitem()[1].close()
