"""The Docker engine, by Docker's own library: whether there is one, where its ports are, its images, what is ours.

Everything that an ephemeral cluster makes on an engine carries the session of the process that made it, and says who
owns it. A reaper removes the session when that process is gone; if the reaper died too (the machine was switched off),
:func:`remove_stale` does. Sessions that live, those of other machines, and what is not ours stay untouched.
"""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from rollbridge.errors import LocalEnvironmentError
from rollbridge.model.errors import PortableError
from rollbridge.version import what_brings
from rollbridge_devcluster import image_names as names
from rollbridge_devcluster.recipes import Tree

try:
    import docker
    import requests.exceptions
    from docker.errors import APIError, DockerException, ImageNotFound, NotFound
    from docker.models.containers import Container
    from docker.models.networks import Network
    from docker.models.volumes import Volume
except ImportError as fault:
    raise LocalEnvironmentError(
        f"Docker's library for Python is not installed; nothing was done; {what_brings('containers')}"
    ) from fault

SESSION: Final = uuid.uuid4().hex
"""Of this process: everything that it makes on the engine carries it."""
SESSION_LABEL: Final = "io.rollbridge.test.session"
OWNER_LABEL: Final = "io.rollbridge.test.owner"
CLUSTER_LABEL: Final = "io.rollbridge.test.cluster"
HOST_VARIABLE: Final = "TESTCONTAINERS_HOST_OVERRIDE"
"""Environment variable with the address at which published ports are reached, as testcontainers calls it."""

_LOOPBACK: Final = "127.0.0.1"
_CALL_S: Final = 120
"""Longest silence of the engine."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_REMOVE_S: Final = 60.0


# -- connection ---------------------------------------------------------------------------------------------


@cache
def engine() -> docker.DockerClient:
    """The engine; one connection pool for this process.

    Raises:
        LocalEnvironmentError: none answers.
    """
    return _connected(_CALL_S, "no container engine answers")


def _connected(silence_s: int, otherwise: str) -> docker.DockerClient:
    with warnings.catch_warnings():
        # The library forgets to close its socket when nobody answers.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return docker.from_env(timeout=silence_s)  # which asks it for its version
        except DockerException as exc:
            reason = _said(exc)
        gc.collect()
    raise LocalEnvironmentError(f"{otherwise}: {reason}")


@cache
def host() -> str:
    """Where published ports are reached from here.

    A file ``/.dockerenv`` alone says nothing: there are machines with one that are no containers.
    """
    if HOST_VARIABLE in os.environ:
        return os.environ[HOST_VARIABLE]
    if remote := urlsplit(os.environ.get("DOCKER_HOST", "")).hostname:
        return remote
    if engine().info().get("Name") == socket.gethostname() or not Path("/.dockerenv").exists():
        return _LOOPBACK
    # In a container beside those of the cluster: the machine's ports are at the gateway of the default network.
    return str(engine().networks.get("bridge").attrs["IPAM"]["Config"][0]["Gateway"])


def is_local() -> bool:
    """Whether the engine runs on this very machine, so that it finds the directories that it is told of."""
    remote = urlsplit(os.environ.get("DOCKER_HOST", "")).hostname
    return remote is None and engine().info().get("Name") == socket.gethostname()


def publishing_address() -> str:
    """On which address of the engine's machine to publish: servers without authentication stay local if they can."""
    return _LOOPBACK if host() == _LOOPBACK else "0.0.0.0"


# -- what is ours on it -------------------------------------------------------------------------------------


def labels(cluster: str) -> dict[str, str]:
    """For everything that this process makes."""
    return {SESSION_LABEL: SESSION, OWNER_LABEL: owner_of(os.getpid()), CLUSTER_LABEL: cluster}


def owner_of(pid: int) -> str:
    """A process, told apart from a later one with its number and from those of other machines."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{socket.gethostname()}/{boot}/{pid}/{started}"


def is_gone(owner: str) -> bool:
    """Whether an owner was a process of this machine, and is no more."""
    try:
        host, _, pid, _ = owner.split("/")
        return host == socket.gethostname() and owner != owner_of(int(pid))
    except ValueError:  # not written by us
        return False


def remove(label: str) -> int:
    """Remove the containers, networks and volumes with a label (``name=value``); returns how many there were.

    What is being made or removed at this moment by somebody else is looked for again, until nothing is left.
    """
    deadline, removed = time.monotonic() + _REMOVE_S, 0
    while found := _labelled(label):
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
    marks = [
        one.attrs.get("Labels") or one.attrs.get("Config", {}).get("Labels") or {} for one in _labelled(OWNER_LABEL)
    ]
    owned = {(mark.get(OWNER_LABEL, ""), mark.get(SESSION_LABEL, "")) for mark in marks}
    return sum(remove(f"{SESSION_LABEL}={session}") for owner, session in owned if is_gone(owner))


def _labelled(label: str) -> list[Container | Network | Volume]:
    """Containers first: networks and volumes cannot go before them."""
    wanted: dict[str, str | list[str] | bool] = {"label": label}
    return [
        *engine().containers.list(all=True, filters=wanted, ignore_removed=True),
        *engine().networks.list(filters=wanted),
        *engine().volumes.list(filters=wanted),
    ]


# -- images -------------------------------------------------------------------------------------------------

BUILD_S: Final = 600
"""Longest silence of the engine during a build."""
_LINES_SHOWN: Final = 30


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the engine has."""

    id: str
    labels: Mapping[str, str]
    size_bytes: int
    digests: frozenset[str] = frozenset()
    """Under which registries have it."""


class PullFailedError(PortableError):
    """An image cannot be pulled; the message says why."""

    def __init__(self, message: str, *, unreachable: bool) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        """Whether other images of the same registry need not be tried."""


class ContainerEngine:
    """A connection to the Docker engine for its images; to be closed."""

    def __init__(self) -> None:
        """Connect to the engine that ``DOCKER_HOST`` names, else to the one of this machine.

        Raises:
            LocalEnvironmentError: no engine answers.
        """
        self._client = _connected(BUILD_S, "no Docker engine answers")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def find(self, name: str) -> Image | None:
        """The image of this name, if the engine has one."""
        with _translated(f"the engine cannot look for {name}"):
            try:
                found = self._client.images.get(name)
            except ImageNotFound:
                return None
        digests = frozenset(str(item).partition("@")[2] for item in found.attrs.get("RepoDigests") or ())
        return Image(str(found.id), dict(found.labels or {}), int(found.attrs["Size"]), digests)

    def pull(self, name: str, digest: str, patience_s: float) -> None:
        """Fetch the image of this digest from its registry, which the engine checks, and give it the name.

        Args:
            name: With its tag, which the registry is not asked for.
            digest: ``sha256:...`` of its manifest or index.
            patience_s: Longest silence of the registry.

        Raises:
            PullFailedError: it could not be had.
        """
        repository = name.rpartition(":")[0]
        client = docker.from_env(timeout=patience_s)
        try:
            for event in client.api.pull(repository, digest, stream=True, decode=True):
                if "error" in event:
                    raise PullFailedError(str(event["error"]), unreachable=False)
            self.name(f"{repository}@{digest}", name)
        except NotFound as fault:
            raise PullFailedError(_said(fault), unreachable=False) from fault
        except (DockerException, requests.exceptions.RequestException) as fault:
            raise PullFailedError(_said(fault), unreachable=True) from fault
        finally:
            client.close()

    def build(self, context: Tree, arguments: Mapping[str, str], labels: Mapping[str, str]) -> str:
        """Build an image without a name, and without any network.

        Args:
            context: What the build sees; its ``Dockerfile`` says what is done.
            arguments: Of the build.
            labels: For the image.

        Returns:
            The image's id.

        Raises:
            LocalEnvironmentError: a step failed; the message has the end of what it said.
        """
        said: list[str] = []
        made = ""
        with tempfile.TemporaryFile() as packed, _translated("the image cannot be built"):
            context.pack(packed)
            packed.seek(0)
            for event in self._client.api.build(
                fileobj=packed,
                custom_context=True,
                decode=True,
                rm=True,
                forcerm=True,
                network_mode="none",
                buildargs=dict(arguments),
                labels=dict(labels),
            ):
                said += str(event.get("stream", "")).splitlines()
                if "error" in event:
                    shown = "\n".join(line for line in said if line.strip())
                    raise LocalEnvironmentError(
                        "the image cannot be built: "
                        + "\n".join([*shown.splitlines()[-_LINES_SHOWN:], str(event["error"])])
                    )
                made = _built(event) or made
        if not made:
            raise LocalEnvironmentError("the engine did not say which image it has built: " + "\n".join(said[-3:]))
        return made

    def name(self, image_id: str, name: str) -> None:
        """Let the image of this id, or other name, have this name, whichever had it before."""
        repository, _, tag = name.rpartition(":")
        with _translated(f"{name} cannot be named"):
            self._client.api.tag(image_id, repository, tag, force=True)

    def forget(self, image_id: str) -> None:
        """Remove an image that has no name any more, unless a container or another image needs it."""
        try:
            self._client.images.remove(image_id)
        except (ImageNotFound, APIError):
            return

    def forget_stages(self) -> None:
        """Remove what builds with several stages have left, unless something needs it."""
        with _translated("the engine cannot look for what builds have left"):
            left = self._client.images.list(filters={"dangling": True, "label": names.LABEL_STAGE})
        for image in left:
            self.forget(str(image.id))


def _built(event: Mapping[str, Any]) -> str:
    aux = event.get("aux")
    return str(aux.get("ID", "")) if isinstance(aux, dict) else ""


def _said(fault: Exception) -> str:
    """What the engine said, in one line."""
    return " ".join(str(getattr(fault, "explanation", None) or fault).split())


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (DockerException, requests.exceptions.RequestException) as fault:
        raise LocalEnvironmentError(f"{what}: {_said(fault)}") from fault
