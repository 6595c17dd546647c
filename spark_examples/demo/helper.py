"""Helper processes of the demo: each does one thing over and over, answers questions, and ends with its parent.

Everyone in the demo's story is a process of its own, as in real life, and so that none of them waits for another one's
Python interpreter when waits are measured.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rollbridge.errors import RollbridgeError

ANSWER_SECONDS: Final = 90.0
"""Longest that a helper may take for an answer; the longest of its steps is a commit that waits for a takeover."""
_END_SECONDS: Final = 10.0
_LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(processName)s %(name)s: %(message)s"


class HelperFailedError(RollbridgeError):
    """A helper process of the demo ended early or did not answer."""

    code = "demo-helper-failed"


class Helper:
    """The parent's side of one helper process."""

    def __init__(self, name: str, log: Path, main: Callable[..., None], *arguments: object) -> None:
        """Start ``main(connection, *arguments)`` in a process of its own, which logs to the end of a file."""
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(name, log, main, theirs, arguments), name=name, daemon=True)
        with _interrupts_ignored():
            self._process.start()
        theirs.close()

    def ask(self, question: str, *arguments: object, timeout_s: float = ANSWER_SECONDS) -> Any:
        """Ask, and wait for the answer.

        Raises:
            HelperFailedError: it has ended, or does not answer in time.
        """
        try:
            self._connection.send((question, arguments))
            if not self._connection.poll(timeout_s):
                raise HelperFailedError(f"the {self._name} did not answer within {timeout_s:g} s")
            outcome, value = self._connection.recv()
        except (EOFError, OSError) as exc:
            raise HelperFailedError(f"the {self._name} has ended early") from exc
        if outcome == "failed":
            raise HelperFailedError(f"the {self._name} failed: {value}")
        return value

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def stop(self) -> None:
        """End it, gently if it listens; return when it is gone."""
        self._connection.close()
        self._process.join(_END_SECONDS)
        if self.is_alive:
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve(
    connection: Connection, answers: dict[str, Callable[..., object]], step: Callable[[], object] | None = None
) -> None:
    """Do a step after another, answering questions in between, until the parent hangs up.

    Args:
        connection: To the parent.
        answers: What to call for each question.
        step: What to do meanwhile; it must not take long. None: only answer.
    """
    while True:
        try:
            asked = connection.recv() if connection.poll(None if step is None else 0) else None
        except (EOFError, ConnectionError):
            return
        if asked is not None:
            question, arguments = asked
            answer = answers[question](*arguments)
            try:
                connection.send(("answered", answer))
            except ConnectionError:
                return
        elif step is not None:
            step()


def log_to(file: Path) -> None:
    """Let this process log to the end of a file, which several may do at once."""
    logging.basicConfig(filename=file, level=logging.INFO, format=_LOG_FORMAT)


def _run(
    name: str, log: Path, main: Callable[..., None], connection: Connection, arguments: tuple[object, ...]
) -> None:
    log_to(log)
    try:
        main(connection, *arguments)
    except Exception as exc:
        try:
            connection.send(("failed", f"{type(exc).__name__}: {exc}"))
        except OSError:
            # The parent is gone, so nobody wants to know; this one goes, too.
            sys.exit(f"{name}: {exc}")


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A process started inside ignores Ctrl-C; its parent ends it in good order instead."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
