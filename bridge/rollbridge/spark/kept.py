"""Connections that outlive a task: Spark reuses its Python processes, and connecting costs more than a small batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, Protocol, TypeVar

KEPT_MAX: Final = 4
"""Connections of a process, to different clusters or as somebody else; the one used last goes last."""


class _Closable(Protocol):
    def close(self) -> None:
        """Disconnect."""


T = TypeVar("T", bound=_Closable)


class Kept(Generic[T]):
    """What is kept for the tasks to come, by who connects to what; nobody else is given it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, connect: Callable[[], T]) -> T:
        """What is kept under a key, or is made now; the one used least recently is closed if they are too many."""
        found = self._kept.pop(key, None) or connect()
        self._kept[key] = found
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)[1].close()
        return found

    def close(self) -> None:
        """Disconnect all."""
        while self._kept:
            self._kept.popitem()[1].close()
