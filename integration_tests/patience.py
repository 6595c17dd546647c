"""How long tests wait for what must happen, and how they end processes: nothing hangs without saying where.

Tests wait for events and not for times. A limit is only there so that a run comes to an end when the event never comes,
so it is many times what the slowest machine takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from rollbridge.errors import UnavailableError

T = TypeVar("T")

PATIENCE_S: Final = 180.0
"""Limit of one wait, in seconds."""
_LOOK_S: Final = 0.01
_TAIL: Final = 12_000


def eventually(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Return as soon as ``condition`` holds; raise AssertionError if it does not within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(_LOOK_S)


def once_available(make: Callable[[], T]) -> T:
    """Return what ``make`` gives once servers answer, however long they are away."""
    while True:
        try:
            return make()
        except UnavailableError:
            time.sleep(0.2)


def end(process: subprocess.Popen[Any], log: Path | None = None, timeout_s: float = PATIENCE_S) -> int:
    """Ask a process to end (SIGTERM, waking it first if it is stopped), and return its exit code.

    Raises:
        AssertionError: It did not end in time. It is gone then, and the stacks of all its threads are in the message,
            as far as it is a Python program whose standard error is ``log``.
    """
    if process.poll() is None:
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
    return await_exit(process, log, timeout_s)


def await_exit(process: subprocess.Popen[Any], log: Path | None = None, timeout_s: float = PATIENCE_S) -> int:
    """Return the exit code of a process once it has ended.

    Raises:
        AssertionError: As :func:`end`.
    """
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        # Tests start Python programs with PYTHONFAULTHANDLER=1, so this prints the stacks of all threads.
        process.send_signal(signal.SIGABRT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        said = log.read_text(errors="replace")[-_TAIL:] if log is not None else "(it has no log)"
        raise AssertionError(f"{process.args!r} had not ended after {timeout_s:g} s; it said:\n{said}") from None
