"""What demonstrations and examples share: streams of their own, processes to kill, and an exit code that is checked.

Examples run against the cluster that ``make up`` has started, or the one that the environment names
(``ROLLBRIDGE_BOOTSTRAP_SERVERS`` and ``ROLLBRIDGE_ZOOKEEPER``).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from multiprocessing.process import BaseProcess
from typing import Final

import click

import rollbridge
from rollbridge.errors import RollbridgeError

TRANSACTION_TIMEOUT_S: Final = 2.0
"""After which brokers abort the write of a process that died in the middle, if nobody else does before."""
PATIENCE_S: Final = 90.0
_POLL_S: Final = 0.002


class StuckError(RollbridgeError):
    """Something that the example waits for did not happen, or one of its processes failed."""

    code = "example-stuck"


class Story:
    """Prints lines with the time since its beginning."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        click.echo(f"{time.monotonic() - self._began_s:6.1f} s  {text}")


def connect(name: str) -> rollbridge.Bridge:
    """Open a client whose death is noticed within a second, so that its place is free for its replacement."""
    return rollbridge.connect(client_name=name, options=rollbridge.ClientOptions(session_timeout_s=1.0))


def new_stream(b: rollbridge.Bridge, stem: str) -> str:
    """Create a stream of one segment with a name of its own, in the scope ``ROLLBRIDGE_EXAMPLES_SCOPE``."""
    stream = f"{os.environ.get('ROLLBRIDGE_EXAMPLES_SCOPE', 'examples')}/{stem}-{uuid.uuid4().hex[:8]}"
    b.admin.create_stream(stream)
    return stream


def start(main: Callable[..., None], *arguments: object) -> BaseProcess:
    """Run ``main(*arguments)`` in a process of its own, which ends with this one."""
    process = multiprocessing.get_context("spawn").Process(target=main, args=arguments, daemon=True)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    """SIGKILL a process; return when it is gone."""
    process.kill()
    process.join()


def until(
    condition: Callable[[], bool], what: str, running: Iterable[BaseProcess] = (), patience_s: float = PATIENCE_S
) -> None:
    """Return once a condition holds.

    Raises:
        StuckError: it does not in time, or a process that should bring it about has failed.
    """
    watched = list(running)
    deadline = time.monotonic() + patience_s
    while not condition():
        _check_well(watched, what)
        if time.monotonic() > deadline:
            raise StuckError(f"{what}: not within {patience_s:g} s")
        time.sleep(_POLL_S)


def finish(processes: Iterable[BaseProcess]) -> None:
    """Return once all have ended, well or killed; raises StuckError."""
    watched = list(processes)
    until(lambda: all(process.exitcode is not None for process in watched), "the processes end", watched)
    _check_well(watched, "the processes end")


def _check_well(processes: Iterable[BaseProcess], what: str) -> None:
    for process in processes:
        if process.exitcode not in (None, 0, -signal.SIGKILL):
            raise StuckError(f"{what}: a process ended with {process.exitcode}")


def longest_silence(times_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Return the longest time between two moments in which nothing came."""
    inside = [at for at in times_s if begin_s < at < end_s]
    return max(later - before for before, later in pairwise([begin_s, *inside, end_s]))


def check(what: str, holds: bool) -> bool:
    """Print and return whether something holds."""
    click.echo(f"  {'ok' if holds else 'WRONG'}: {what}")
    return holds


def play(example: Callable[[], bool]) -> None:
    """Run an example and end the program: with 0 if everything that it checks holds."""
    try:
        well = example()
    except RollbridgeError as fault:
        click.echo(f"{fault.code}: {fault}", err=True)
        sys.exit(fault.exit_code)
    sys.exit(0 if well else 1)
