"""The answer to a conditional write that goes on in the background."""

from __future__ import annotations

from collections.abc import Callable

from rollbridge.calls.futures import LightFuture
from rollbridge.cas.request import Request
from rollbridge.model.sn import SN
from rollbridge.model.token import Token


class CasFuture(LightFuture[SN]):
    """The answer to a conditional write. It may be what the next write expects."""

    __slots__ = ("request",)

    def __init__(self, request: Request) -> None:
        self.request = request

    @property
    def token(self) -> Token:
        """Names the write."""
        return self.request.token

    def done(self) -> bool:
        """Whether the answer is there."""
        return self.request.done.done()

    def result(self, timeout: float | None = None) -> SN:
        """The SN of the record (the last one of a run); raises as :meth:`CasWriter.write` does.

        Raises:
            TimeoutError: no answer within ``timeout`` seconds; ask again.
        """
        return self.results(timeout)[-1]

    def results(self, timeout: float | None = None) -> list[SN]:
        """The SNs of all records of the write."""
        return self.request.done.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What :meth:`result` would raise, or None."""
        return self.request.done.exception(timeout)

    def add_done_callback(self, callback: Callable[[CasFuture], object]) -> None:
        """Call back, on whichever thread gets the answer, once it is there; at once if it is."""
        self.request.done.add_done_callback(lambda _: callback(self))
