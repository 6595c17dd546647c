"""Which backend tests run on: ``IT_BACKEND=auto|docker|local``, and what happens to those that it cannot serve.

``auto``
    Servers as processes of this machine, which start fastest, for all tests that do not ask for containers; those that
    do (``@pytest.mark.containers``) get them where a container engine answers, and are skipped elsewhere.
``docker``
    Containers for all tests.
``local``
    No containers: tests that need them are skipped.

With ``IT_REQUIRE=1`` a test that would be skipped because the backend lacks something fails; with
``IT_REQUIRE=containers`` one does that would be skipped because there is no engine, or no image.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, Final, NoReturn

import pytest

from integration_tests.backends.container_nodes import prepare
from integration_tests.backends.containers import ContainerCluster
from integration_tests.backends.interface import Ability, AnyCluster
from integration_tests.backends.local import LocalCluster
from integration_tests.images import look
from rollbridge.errors import RollbridgeError

BACKEND_VARIABLE: Final = "IT_BACKEND"
REQUIRE_VARIABLE: Final = "IT_REQUIRE"
CONTAINERS: Final = "containers"


class Backend(StrEnum):
    """Values of ``IT_BACKEND``."""

    AUTO = "auto"
    DOCKER = "docker"
    LOCAL = "local"


@cache
def chosen() -> Backend:
    """The backend that this run was asked for.

    Raises:
        pytest.UsageError: there is no such backend.
    """
    asked = os.environ.get(BACKEND_VARIABLE, "") or Backend.AUTO
    try:
        return Backend(asked)
    except ValueError:
        known = ", ".join(Backend)
        raise pytest.UsageError(f"{BACKEND_VARIABLE}={asked} is no backend; it is one of {known}") from None


def new_cluster(*, kafka_settings: Mapping[str, str] | None = None, stalling: bool = False) -> AnyCluster:
    """Servers of a test's own, one broker and one ZooKeeper, on the backend that was chosen; not started yet.

    If they are ``stalling``, the broker's disk can be made to stand still, where this machine can do that.
    """
    if chosen() is not Backend.DOCKER:
        return LocalCluster(kafka_settings=kafka_settings, stalling=stalling)
    if reason := why_no_containers():
        lacking(reason, containers=True)
    return ContainerCluster(kafka_settings=kafka_settings, stalling=stalling)


def each(asked: Backend) -> list[Any]:
    """Parameters of a fixture whose tests run on processes and on containers if nothing is asked for: backends.

    What runs on containers a second time is long.
    """
    if asked is Backend.DOCKER:
        return [pytest.param(Backend.DOCKER, marks=pytest.mark.containers, id="containers")]
    second = pytest.param(Backend.DOCKER, marks=[pytest.mark.containers, pytest.mark.long], id="containers")
    return [pytest.param(Backend.LOCAL, id="processes"), second]


@cache
def why_no_containers() -> str | None:
    """Why tests cannot have containers, ``None`` if they can. Looks once, and builds or fetches images if need be."""
    if chosen() is Backend.LOCAL:
        return f"{BACKEND_VARIABLE}=local: no containers were asked for"
    try:
        prepare()
    except RollbridgeError as exc:
        return str(exc)
    return None


def descriptions() -> Iterator[str]:
    """A line for each image: its name, its id, and whether it stands in for an official one.

    Raises:
        LocalEnvironmentError: no engine answers.
    """
    for name, image in look().items():
        yield f"{name}: missing" if image is None else str(image)


def lacking(reason: str, *, containers: bool = False) -> NoReturn:
    """End a test that this backend cannot serve, or has no containers for: skip it, or with ``IT_REQUIRE`` fail it."""
    required = os.environ.get(REQUIRE_VARIABLE)
    if required == "1" or (containers and required == CONTAINERS):
        pytest.fail(f"{reason} ({REQUIRE_VARIABLE}={required})", pytrace=False)
    pytest.skip(reason)


def demand(cluster: AnyCluster, needed: Iterable[Ability]) -> None:
    """End a test that needs what its servers cannot do."""
    missing = [ability for ability in needed if ability not in cluster.can]
    if missing:
        name = "local" if isinstance(cluster, LocalCluster) else "docker"
        lacking(f"the {name} backend cannot do this here: {', '.join(missing)}")
