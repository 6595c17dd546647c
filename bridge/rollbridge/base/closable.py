"""Base of objects that are closed at the end of their ``with`` block. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closable(ABC):
    """Object for a ``with`` block, whose end closes it."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Close it; closing again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
