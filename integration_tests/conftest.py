"""What the integration tests share: one real broker and ZooKeeper for the whole run, and names of their own."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

import bridge
from bridge.embedded import EmbeddedCluster
from integration_tests.clients import Site
from integration_tests.spark_tools import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_run = uuid.uuid4().hex[:8]
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[EmbeddedCluster]:
    """A broker and a ZooKeeper for the whole run, without a coordinator.

    Tests share it, so each leaves it as it was: running, and without coordinators of its own. A test that breaks
    servers for good takes an ``EmbeddedCluster`` of its own.
    """
    with EmbeddedCluster() as shared:
        yield shared


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One Spark, and so one JVM, for the whole run; it finds the formats ``rollbridge`` by itself."""
    with spark_session(tmp_path_factory.mktemp("spark")) as session:
        yield session


@pytest.fixture
def unique_name() -> Callable[[str], str]:
    """Makes names that no other test and no earlier run has used; they fit topics, streams and znodes."""

    def make(stem: str) -> str:
        return f"{stem}-{_run}-{next(_numbers)}"

    return make


@pytest.fixture
def topic_prefix(request: pytest.FixtureRequest, unique_name: Callable[[str], str]) -> str:
    """A prefix for the topics of one test, which says whose they are."""
    return unique_name(re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)[:80])


@pytest.fixture(scope="module")
def site(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A rollbridge with a coordinator for the tests of one module, under a ZooKeeper path of its own."""
    with Site(cluster, f"/site-{_run}-{next(_numbers)}", tmp_path_factory.mktemp("coordinators")) as site:
        yield site


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[bridge.Bridge]:
    """A client named ``tester`` for the tests of one module."""
    with site.connect("tester") as client:
        yield client


@pytest.fixture
def scope(unique_name: Callable[[str], str]) -> str:
    """A scope for the streams of one test."""
    return unique_name("scope")


@pytest.fixture
def orders(client: bridge.Bridge, scope: str) -> str:
    """A stream of two segments."""
    name = f"{scope}/orders"
    client.admin.create_stream(name, segments=2)
    return name


@pytest.fixture
def ledger(client: bridge.Bridge, scope: str) -> str:
    """A stream of one segment."""
    name = f"{scope}/ledger"
    client.admin.create_stream(name)
    return name


@pytest.fixture
def payments(client: bridge.Bridge, scope: str) -> str:
    """A stream of three segments in the same group."""
    name = f"{scope}/payments"
    client.admin.create_stream(name, segments=3)
    return name
