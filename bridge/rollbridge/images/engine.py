"""The Docker engine: find, pull, build and name images. The only module that talks to it, by Docker's own library."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from rollbridge.errors import EnvironmentProblem
from rollbridge.images import names
from rollbridge.images.tree import Tree

try:
    import docker
    import docker.errors
    import requests.exceptions
except ImportError as fault:
    raise EnvironmentProblem(
        "Docker's library for Python is not installed; nothing was done; pip install 'rollbridge[containers]' brings it"
    ) from fault

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


class PullFailed(Exception):
    """An image can not be pulled; the message says why."""

    def __init__(self, message: str, *, unreachable: bool) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        """Whether other images of the same registry need not be tried."""


class Engine:
    """A connection to the Docker engine; to be closed."""

    def __init__(self) -> None:
        """Connect to the engine that ``DOCKER_HOST`` names, else to the one of this machine.

        Raises:
            EnvironmentProblem: no engine answers.
        """
        with _translated("no Docker engine answers"):
            self._client = docker.from_env(timeout=BUILD_S)
            self._client.ping()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def find(self, name: str) -> Image | None:
        """The image of this name, if the engine has one."""
        with _translated(f"the engine can not look for {name}"):
            try:
                found = self._client.images.get(name)
            except docker.errors.ImageNotFound:
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
            PullFailed: it could not be had.
        """
        repository = name.rpartition(":")[0]
        client = docker.from_env(timeout=patience_s)
        try:
            for event in client.api.pull(repository, digest, stream=True, decode=True):
                if "error" in event:
                    raise PullFailed(str(event["error"]), unreachable=False)
            self.name(f"{repository}@{digest}", name)
        except docker.errors.NotFound as fault:
            raise PullFailed(_said(fault), unreachable=False) from fault
        except (docker.errors.DockerException, requests.exceptions.RequestException) as fault:
            raise PullFailed(_said(fault), unreachable=True) from fault
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
            EnvironmentProblem: a step failed; the message has the end of what it said.
        """
        said: list[str] = []
        made = ""
        with tempfile.TemporaryFile() as packed, _translated("the image can not be built"):
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
                    raise EnvironmentProblem(
                        "the image can not be built: "
                        + "\n".join([*shown.splitlines()[-_LINES_SHOWN:], str(event["error"])])
                    )
                made = _built(event) or made
        if not made:
            raise EnvironmentProblem("the engine did not say which image it has built: " + "\n".join(said[-3:]))
        return made

    def name(self, image_id: str, name: str) -> None:
        """Let the image of this id, or other name, have this name, whichever had it before."""
        repository, _, tag = name.rpartition(":")
        with _translated(f"{name} can not be named"):
            self._client.api.tag(image_id, repository, tag, force=True)

    def forget(self, image_id: str) -> None:
        """Remove an image that has no name any more, unless a container or another image needs it."""
        try:
            self._client.images.remove(image_id)
        except (docker.errors.ImageNotFound, docker.errors.APIError):
            return

    def forget_stages(self) -> None:
        """Remove what builds with several stages have left, unless something needs it."""
        with _translated("the engine can not look for what builds have left"):
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
    except (docker.errors.DockerException, requests.exceptions.RequestException) as fault:
        raise EnvironmentProblem(f"{what}: {_said(fault)}") from fault
