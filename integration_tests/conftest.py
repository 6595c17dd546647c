"""What the integration tests share: one real broker and ZooKeeper for the whole run, and names of their own."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Iterator

import pytest

from bridge.embedded import EmbeddedCluster

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
