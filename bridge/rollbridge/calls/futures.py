"""What the futures of records and outcomes have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from rollbridge.errors import RollbridgeError

T = TypeVar("T")


class LightFuture(ABC, Generic[T]):
    """The part of ``concurrent.futures.Future`` that makes sense for something that is shared; it can not be cancelled.

    What derives from it says :meth:`result` and :meth:`done`.
    """

    __slots__ = ()

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Wait, at most ``timeout`` seconds or without end, and give the result or raise what it met."""

    @abstractmethod
    def done(self) -> bool:
        """Whether :meth:`result` would not wait."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What :meth:`result` raises once it does not wait any more; None if it does not raise.

        Raises:
            TimeoutError: not known in time.
        """
        try:
            self.result(timeout)
        except RollbridgeError as error:
            return error
        return None

    def running(self) -> bool:
        """Whether :meth:`result` would wait."""
        return not self.done()

    def cancel(self) -> bool:
        """What was asked for or written can not be taken back: always False."""
        return False

    def cancelled(self) -> bool:
        """Always False."""
        return False
