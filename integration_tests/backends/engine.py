"""The container engine: whether there is one, where its published ports are, and the images that tests use."""

from __future__ import annotations

import gc
import os
import socket
import uuid
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import docker
from docker.errors import DockerException, ImageNotFound
from testcontainers.core.config import testcontainers_config

from integration_tests.backends import reaper
from integration_tests.backends.interface import Unsupported
from rollbridge.errors import RollbridgeError
from rollbridge.images.names import IN_USE, KAFKA, OFFICIAL, is_stand_in
from rollbridge.images.provide import look, provide

SESSION: Final = uuid.uuid4().hex
"""Of this test process: everything that it makes on the engine carries it."""
HOST_VARIABLE: Final = "TESTCONTAINERS_HOST_OVERRIDE"
"""Environment variable with the address at which published ports are reached."""

_LOOPBACK = "127.0.0.1"
_RYUK_VARIABLE = "TESTCONTAINERS_RYUK_DISABLED"


@cache
def engine() -> docker.DockerClient:
    """The engine; one connection pool for this process.

    Raises:
        Unsupported: none answers.
    """
    found = _connect()
    if isinstance(found, str):
        raise Unsupported(f"no container engine answers: {found}")
    return found


def _connect() -> docker.DockerClient | str:
    """The engine, or why there is none."""
    with warnings.catch_warnings():
        # The library forgets to close its socket when nobody answers.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return docker.from_env(timeout=120)  # which asks it for its version
        except DockerException as exc:
            reason = str(exc)
        gc.collect()
    return reason


@cache
def prepare() -> Mapping[str, str]:
    """Sweep what dead test processes have left, have the watcher stand by, and have current images; once.

    Returns:
        The ids of the images by name: what a name means may change while tests run.

    Raises:
        Unsupported: there is no engine, or an image can be neither had nor built.
    """
    engine()
    reaper.remove_stale()
    reaper.watch(SESSION)
    try:
        images = {image.name: image.id for image in provide(IN_USE)}
    except RollbridgeError as exc:
        raise Unsupported(f"the images cannot be had: {exc}") from exc
    testcontainers_config.ryuk_disabled = not _ryuk_can_be_had()
    return images


def _ryuk_can_be_had() -> bool:
    """Whether to have Ryuk watch too; asking a registry costs time, so only where Kafka's image came from one."""
    if _RYUK_VARIABLE in os.environ:
        return not testcontainers_config.ryuk_disabled
    name = testcontainers_config.ryuk_image
    try:
        engine().images.get(name)
    except ImageNotFound:
        if is_stand_in(KAFKA, engine().images.get(KAFKA).labels):
            return False
        try:
            engine().images.pull(name)
        except DockerException:
            return False
    return True


def descriptions() -> Iterator[str]:
    """A line for each image: its name, its id, and whether it stands in for an official one.

    Raises:
        Unsupported: no engine answers.
    """
    engine()
    for name, image in look(IN_USE).items():
        if image is None:
            yield f"{name}: missing"
        else:
            kind = "stand-in" if image.stand_in else "official" if name in OFFICIAL else "built here"
            yield f"{name}: {kind}, {image.id.removeprefix('sha256:')[:12]}"


@cache
def host() -> str:
    """Where published ports are reached from here.

    Not testcontainers' own guess, which takes every machine with a file ``/.dockerenv`` for a container.
    """
    if HOST_VARIABLE in os.environ:
        return os.environ[HOST_VARIABLE]
    if remote := urlsplit(os.environ.get("DOCKER_HOST", "")).hostname:
        return remote
    if engine().info().get("Name") == socket.gethostname() or not Path("/.dockerenv").exists():
        return _LOOPBACK
    # In a container beside those of the tests: the machine's ports are at the gateway of the default network.
    return str(engine().networks.get("bridge").attrs["IPAM"]["Config"][0]["Gateway"])


def is_local() -> bool:
    """Whether the engine runs on this very machine, so that it finds the directories that it is told of."""
    remote = urlsplit(os.environ.get("DOCKER_HOST", "")).hostname
    return remote is None and engine().info().get("Name") == socket.gethostname()


def publishing_address() -> str:
    """On which address of the engine's machine to publish: servers without authentication stay local if they can."""
    return _LOOPBACK if host() == _LOOPBACK else "0.0.0.0"
