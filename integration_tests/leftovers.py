"""What one test leaves behind is that test's failure: processes that outlive the test that started them.

Processes that tests share are started by fixtures of modules and of the run, so they are there before a test begins, or
they are told of (:func:`share`). One that a test stops and starts again is known by its command line; a server is known
by the directory of its cluster, and a coordinator by its root in ZooKeeper, since successors have other names.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from typing import Final

import psutil

PATIENCE_S: Final = 20.0
"""How long a process that was told to end may take, in seconds: many times what a slow machine needs."""
_LOOK_S: Final = 0.05
_ROOT: Final = "--zookeeper-root="
_DIRECTORY: Final = re.compile(r"/(rollbridge-\w{8})\b")
_HELPERS: Final = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "rollbridge_devcluster reap",
    "integration_tests.backends.engine",
)
"""Processes that live as long as the one that they help."""

CommandLine = tuple[str, ...]


_shared: set[CommandLine] = set()


def share(commands: Collection[CommandLine]) -> None:
    """Note that whatever has these command lines belongs to the whole run."""
    _shared.update(map(_identity, commands))


def children() -> dict[int, CommandLine]:
    """Return the processes that this one has started and that run, with their command lines, by pid."""
    found = {}
    for child in psutil.Process().children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found[child.pid] = tuple(child.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


def left_behind(before: Mapping[int, CommandLine], patience_s: float = PATIENCE_S) -> dict[int, CommandLine]:
    """Return what was started since ``before`` and still runs, after some patience with what is about to end."""
    deadline = time.monotonic() + patience_s
    while (found := _new(before)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return found


def _new(before: Mapping[int, CommandLine]) -> dict[int, CommandLine]:
    known = _shared | {_identity(command) for command in before.values()}
    return {
        pid: command
        for pid, command in children().items()
        if pid not in before
        and _identity(command) not in known
        and not any(name in part for part in command for name in _HELPERS)
    }


def _identity(command: CommandLine) -> CommandLine:
    if root := tuple(part for part in command if part.startswith(_ROOT)):
        return root
    found = _DIRECTORY.search(" ".join(command))
    return (found[1],) if found else command
