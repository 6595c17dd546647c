"""The reaper: nothing stays behind of the process that uses an ephemeral cluster, however it ends.

``python -m rollbridge_devcluster reap home DIRECTORY`` (or ``reap session ID``, for what the container engine has)
waits until its standard input ends, which it does when the last process that holds the other end of the pipe is gone,
SIGKILL included; then it ends what is left and removes it. Unlike PR_SET_PDEATHSIG this does not depend on the thread
that started the servers, and it also cleans up files, networks and volumes.

If the reaper died too (the machine was switched off), processes are gone and directories are temporary; what an engine
keeps is swept by the next one (:func:`rollbridge_devcluster.engine.remove_stale`).
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

from rollbridge_devcluster import processes


class Reaper:
    """Watches over a directory or a session for as long as this process lives and ``dismiss`` is not called."""

    def __init__(self, kind: str, name: str) -> None:
        """Begin; ``kind`` is a key of :data:`REAPERS`."""
        assert kind in REAPERS
        # Not among the cluster's own processes: it must outlive them.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollbridge_devcluster", "reap", kind, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the terminal is for the tests, not for it.
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Let it clean up now, and return when it has; what it watches over is gone then."""
        self._process.communicate()


def reap_when_orphaned(kind: str, name: str) -> None:
    """Block until standard input ends, then remove everything of that name."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    REAPERS[kind](name)


def _end_home(directory: str) -> None:
    home = Path(directory)
    for found in processes.find(home).values():
        processes.kill(found)
    shutil.rmtree(home, ignore_errors=True)


def _end_session(session: str) -> None:
    engine = import_module("rollbridge_devcluster.engine")  # by name: Docker's library may not be installed
    mark = f"{engine.SESSION_LABEL}={session}"
    engine.remove(mark)
    # A request that the process had sent when it was killed may just be carried out.
    time.sleep(1)
    engine.remove(mark)


REAPERS: Final[Mapping[str, Callable[[str], None]]] = {"home": _end_home, "session": _end_session}
