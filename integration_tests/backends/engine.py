"""The container engine: where its ports are, what is ours on it, and that nothing of ours stays.

Everything that tests make on an engine carries the session of their process, as testcontainers calls it, and says who
owns it. Ryuk, or a watcher of ours where its image cannot be had, removes the session when the process is gone. What
even that has left, because the machine was switched off, the next process of this machine sweeps; by hand, ``python -m
integration_tests.backends.engine`` does. Sessions that live, those of other machines, and what is not ours stay.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import docker
from docker.errors import APIError, DockerException, ImageNotFound
from docker.models.containers import Container
from docker.models.networks import Network
from docker.models.volumes import Volume
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import Reaper as Ryuk
from testcontainers.core.docker_client import DockerClient, get_docker_host
from testcontainers.core.labels import LABEL_SESSION_ID, SESSION_ID, create_labels

from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster.reaper import Reaper, await_orphaned

OWNER_LABEL: Final = "io.rollbridge.test.owner"
CLUSTER_LABEL: Final = "io.rollbridge.test.cluster"

_LOOPBACK: Final = "127.0.0.1"
_CALL_S: Final = 120
"""Longest silence of the engine."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_REMOVE_S: Final = 60.0


def connect(silence_s: int) -> docker.DockerClient:
    """Connect to the engine that the environment or Docker's context names, else to the one of this machine.

    Raises:
        LocalEnvironmentError: none answers.
    """
    with warnings.catch_warnings():
        # The library forgets to close its socket when nobody answers.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return DockerClient(timeout=silence_s).client  # which asks it for its version
        except DockerException as exc:
            reason = " ".join(str(exc).split())
        gc.collect()
    raise LocalEnvironmentError(f"no container engine answers: {reason}")


@cache
def engine() -> docker.DockerClient:
    """Return the engine; one connection pool for this process."""
    return connect(_CALL_S)


def is_local() -> bool:
    """Return whether the engine runs on this very machine, so that it finds the directories that it is told of."""
    remote = urlsplit(get_docker_host() or "").hostname
    return remote is None and engine().info().get("Name") == socket.gethostname()


@cache
def host() -> str:
    """Return where published ports are reached from here."""
    if testcontainers_config.tc_host_override is None and is_local():
        # A file /.dockerenv, by which testcontainers tells, is also on machines that are no containers.
        testcontainers_config.tc_host_override = _LOOPBACK
    return DockerClient().host()


def publishing_address() -> str:
    """Return on which address of the engine's machine to publish: servers without authentication stay local."""
    return _LOOPBACK if host() == _LOOPBACK else "0.0.0.0"


# -- what is ours on it -------------------------------------------------------------------------------------


def marks(cluster: str) -> dict[str, str]:
    """Return the labels for what testcontainers makes, which adds the session."""
    return {OWNER_LABEL: owner_of(os.getpid()), CLUSTER_LABEL: cluster}


def labels(cluster: str) -> dict[str, str]:
    """Return the labels for everything else that this process makes."""
    return create_labels("", marks(cluster))


def owner_of(pid: int) -> str:
    """Name a process, told apart from a later one with its number and from those of other machines."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{socket.gethostname()}/{boot}/{pid}/{started}"


def is_gone(owner: str) -> bool:
    """Return whether an owner was a process of this machine, and is no more."""
    try:
        name, _, pid, _ = owner.split("/")
        return name == socket.gethostname() and owner != owner_of(int(pid))
    except ValueError:  # not written by us
        return False


def labelled(label: str) -> list[Container | Network | Volume]:
    """Return what has a label; containers first, as networks and volumes cannot be removed before them."""
    wanted: dict[str, str | list[str] | bool] = {"label": label}
    return [
        *engine().containers.list(all=True, filters=wanted, ignore_removed=True),
        *engine().networks.list(filters=wanted),
        *engine().volumes.list(filters=wanted),
    ]


def remove(label: str) -> int:
    """Remove the containers, networks and volumes with a label (``name=value``); returns how many there were.

    What is being made or removed at this moment by somebody else is looked for again, until nothing is left.
    """
    deadline, removed = time.monotonic() + _REMOVE_S, 0
    while found := labelled(label):
        for one in found:
            with suppress(APIError):  # somebody else has removed it, or a container still uses it
                if isinstance(one, Container):
                    one.remove(force=True, v=True)
                else:
                    one.remove()
                removed += 1
        if time.monotonic() > deadline:
            raise TimeoutError(f"these cannot be removed: {found}")
    return removed


def remove_stale() -> int:
    """Remove what processes of this machine have left that are gone; returns how many things there were."""
    found = [
        one.attrs.get("Labels") or one.attrs.get("Config", {}).get("Labels") or {} for one in labelled(OWNER_LABEL)
    ]
    owned = {(mark.get(OWNER_LABEL, ""), mark.get(LABEL_SESSION_ID, "")) for mark in found}
    return sum(remove(f"{LABEL_SESSION_ID}={session}") for owner, session in owned if is_gone(owner))


@cache
def watch() -> None:
    """Sweep what dead processes have left; from now on the session of this one is removed when it has ended."""
    remove_stale()
    host()
    try:
        engine().images.get(testcontainers_config.ryuk_image)
    except ImageNotFound:
        testcontainers_config.ryuk_disabled = True
    if not testcontainers_config.ryuk_disabled:
        Ryuk.get_instance()
        return
    watcher = Reaper(__name__, SESSION_ID, directory=Path(__file__).parents[2])
    atexit.register(watcher.dismiss)


def _end_session(session: str) -> None:
    await_orphaned()
    remove(f"{LABEL_SESSION_ID}={session}")
    # A request that the process had sent when it was killed may just be carried out.
    time.sleep(1)
    remove(f"{LABEL_SESSION_ID}={session}")


if __name__ == "__main__":
    if sys.argv[1:]:
        _end_session(sys.argv[1])
    else:
        print(f"removed {remove_stale()} containers, networks and volumes of processes that are gone")
