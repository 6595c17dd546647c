"""What a client writes down: each thing when it is asked for and when it is answered, and calls that took too long."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any, Final

from integration_tests.histories import FOREVER
from integration_tests.history.events import Answer, Call, Kind, Line, Operation, Write
from rollbridge.errors import (
    CasWriteError,
    IncompleteError,
    InvalidRequestError,
    NotFoundError,
    RollbridgeError,
    TransactionAbortedError,
)

REFUSED: Final = (CasWriteError, TransactionAbortedError, IncompleteError, InvalidRequestError, NotFoundError)
"""Errors that say that nothing was written; all others leave it open."""
CALL_S: Final = 60.0
"""What a client gives the servers for one thing, in seconds."""
Done = Callable[..., None]


class Notebook:
    """Lines of JSON, one at a time, so that what was noted is there even if the client is killed right after."""

    def __init__(self, client: str, out: IO[str]) -> None:
        """``client`` is who notes; ``out`` is buffered by lines."""
        self.client: Final = client
        self.unclear = 0
        """How many things were asked for of which it is not known what became of them."""
        self.out: Final = out

    def note(self, line: Line) -> None:
        """Write a line."""
        self.out.write(json.dumps(line) + "\n")

    @contextmanager
    def noted(
        self, kind: Kind, name: str, writes: list[Write], wish: str = "commit", expected: int | None = None
    ) -> Iterator[Done]:
        """Note that the end of something is asked for, and what becomes of it.

        Gives a function that takes what is known of it afterwards, as attributes of :class:`Operation`.
        """
        with self.answered(self.asked(kind, name, writes, wish, expected)) as done:
            yield done

    def asked(
        self, kind: Kind, name: str, writes: list[Write], wish: str = "commit", expected: int | None = None
    ) -> Operation:
        """Note that the end of something is asked for."""
        now = time.monotonic_ns()
        operation = Operation(
            self.client, kind, name, wish, tuple(writes), now, FOREVER, Answer.UNKNOWN, expected=expected
        )
        self.note(operation.to_line())
        return operation

    @contextmanager
    def answered(self, asked: Operation) -> Iterator[Done]:
        """Note what becomes of it."""
        more: dict[str, Any] = {}
        with self.timed(f"{asked.wish} ({asked.kind})", CALL_S):
            try:
                yield lambda **found: more.update(found)
            except REFUSED:
                answer = Answer.FAILED
            except (RollbridgeError, TimeoutError):
                self.unclear += 1
                return
            else:
                answer = Answer.OK
        self.note(replace(asked, answer=answer, answered=time.monotonic_ns(), **more).to_line())

    @contextmanager
    def timed(self, name: str, timeout_s: float) -> Iterator[None]:
        """Note a call that takes longer than it was given."""
        began = time.monotonic_ns()
        try:
            yield
        finally:
            ended = time.monotonic_ns()
            if ended - began > (timeout_s + 1) * 1e9:
                self.note(Call(self.client, name, timeout_s, began, ended).to_line())
