"""The watcher that ends an ephemeral cluster when the process that uses it has died.

``python -m rollbridge.embedded reap HOME`` waits until its standard input ends, which it does when the last process
that holds the other end of the pipe is gone, SIGKILL included; then it kills what is left of the cluster and removes
its directory. Unlike PR_SET_PDEATHSIG this does not depend on the thread that started the servers, and it also cleans
up the files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from rollbridge.embedded import processes


class Reaper:
    """Watches over one cluster's directory for as long as this process lives and ``dismiss`` is not called."""

    def __init__(self, home: Path) -> None:
        # Not among the cluster's own processes: it must outlive them.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollbridge.embedded", "reap", str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the terminal is for the tests, not for it.
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Let it clean up now, and return when it has; the cluster is gone then."""
        self._process.communicate()


def reap_when_orphaned(home: Path) -> None:
    """Block until standard input ends, then end the cluster in ``home`` and remove its directory."""
    sys.stdin.buffer.read()
    for found in processes.find(home).values():
        processes.kill(found)
    shutil.rmtree(home, ignore_errors=True)
