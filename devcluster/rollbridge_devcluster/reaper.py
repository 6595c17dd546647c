"""The reaper: nothing stays behind of the process that uses an ephemeral cluster, however it ends.

A process that waits until its standard input ends, which it does when the last process that holds the other end of the
pipe is gone, SIGKILL included; then it ends what is left and removes it: ``python -m rollbridge_devcluster reap
DIRECTORY``. Unlike PR_SET_PDEATHSIG this does not depend on the thread that started the servers, and it also cleans up
files. If the reaper died too (the machine was switched off), processes are gone and directories are temporary.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster import processes
from rollbridge_devcluster.state import Home


class Reaper:
    """Watches for as long as this process lives and ``dismiss`` is not called."""

    def __init__(self, module: str, *arguments: str, directory: Path | None = None) -> None:
        """Run a module that calls :func:`await_orphaned`, in a directory if it is not installed."""
        # Not among the cluster's own processes: it must outlive them.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            # Ctrl-C in the terminal is for the tests, not for it.
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Let it clean up now, and return when it has; what it watches over is gone then."""
        self._process.communicate()


def await_orphaned() -> None:
    """Block until standard input ends, whatever signals come."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()


def end_home(directory: str) -> None:
    """When orphaned, end the servers of a directory, and remove it.

    Raises:
        LocalEnvironmentError: It is not the home of a cluster.
    """
    await_orphaned()
    home = Home(Path(directory))
    for found in processes.find(home.path).values():
        processes.kill(found)
    is_ours = home.state_file.exists() or home.logs.is_dir()
    if not is_ours and home.path.exists() and any(home.path.iterdir()):
        raise LocalEnvironmentError(f"{directory} is not the home of a cluster; nothing was removed")
    shutil.rmtree(home.path, ignore_errors=True)
