"""Nothing stays behind of a test process, however it ends: what Ryuk does, where its image cannot be had.

Everything that tests make on an engine carries the session of the test process that made it and says who owns it. A
detached watcher holds the read end of a pipe whose write end only the test process has: it sees the end of the file
when that process is gone, SIGKILL included, and removes the session. If the watcher died too (the machine was switched
off), the next run sweeps: ``python -m integration_tests.backends.reaper --stale`` removes sessions whose test process
ran on this machine and is gone. Sessions that live, those of other machines, and what is not ours stay untouched.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import docker
from docker.errors import APIError
from docker.models.containers import Container
from docker.models.networks import Network
from docker.models.volumes import Volume

SESSION_LABEL: Final = "io.rollbridge.test.session"
OWNER_LABEL: Final = "io.rollbridge.test.owner"
CLUSTER_LABEL: Final = "io.rollbridge.test.cluster"

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_REMOVE_S: Final = 60.0
_watchers: dict[str, subprocess.Popen[bytes]] = {}


def labels(session: str, cluster: str) -> dict[str, str]:
    """For everything that this process makes."""
    return {SESSION_LABEL: session, OWNER_LABEL: owner_of(os.getpid()), CLUSTER_LABEL: cluster}


def owner_of(pid: int) -> str:
    """A process, told apart from a later one with its number and from those of other machines."""
    return f"{socket.gethostname()}/{_boot()}/{pid}/{_started(pid)}"


def watch(session: str) -> None:
    """From now on the session is removed when this process has ended, in whatever way; once for each session."""
    if session in _watchers:
        return
    _watchers[session] = watcher = subprocess.Popen(
        [sys.executable, "-m", "integration_tests.backends.reaper", "--watch", session],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        start_new_session=True,  # Ctrl-C in the terminal is for the tests, not for it
    )
    atexit.register(watcher.communicate)


def remove(label: str) -> int:
    """Remove the containers, networks and volumes with a label (``name=value``); returns how many there were.

    What is being made or removed at this moment by somebody else is looked for again, until nothing is left.
    """
    deadline, removed = time.monotonic() + _REMOVE_S, 0
    engine = docker.from_env()
    try:
        while found := _find(engine, label):
            for one in found:
                with suppress(APIError):  # somebody else has removed it, or a container still uses it
                    if isinstance(one, Container):
                        one.remove(force=True, v=True)
                    else:
                        one.remove()
                    removed += 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"these cannot be removed: {found}")
    finally:
        engine.close()
    return removed


def remove_stale() -> int:
    """Remove what test processes of this machine have left that are gone."""
    engine = docker.from_env()
    try:
        owned = {
            (marks.get(OWNER_LABEL, ""), marks.get(SESSION_LABEL, ""))
            for one in _find(engine, OWNER_LABEL)
            if (marks := _labels_of(one))
        }
    finally:
        engine.close()
    return sum(remove(f"{SESSION_LABEL}={session}") for owner, session in owned if is_gone(owner))


def is_gone(owner: str) -> bool:
    """Whether an owner was a process of this machine, and is no more."""
    try:
        host, _, pid, _ = owner.split("/")
        return host == socket.gethostname() and owner != owner_of(int(pid))
    except ValueError:  # not written by us
        return False


def _find(engine: docker.DockerClient, label: str) -> list[Container | Network | Volume]:
    """Containers first: networks and volumes cannot go before them."""
    wanted: dict[str, str | list[str] | bool] = {"label": label}
    return [
        *engine.containers.list(all=True, filters=wanted, ignore_removed=True),
        *engine.networks.list(filters=wanted),
        *engine.volumes.list(filters=wanted),
    ]


def _labels_of(one: Container | Network | Volume) -> dict[str, str]:
    return one.attrs.get("Labels") or one.attrs.get("Config", {}).get("Labels") or {}


def _boot() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "gone"


def _watch_and_remove(session: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    mark = f"{SESSION_LABEL}={session}"
    remove(mark)
    # A request that the test process had sent when it was killed may just be carried out.
    time.sleep(1)
    remove(mark)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--watch", session]:
            _watch_and_remove(session)
        case ["--stale"]:
            print(f"removed {remove_stale()} containers, networks and volumes of test processes that are gone")
        case _:
            sys.exit(__doc__)
