"""Writers behind a proxy that strikes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import rollbridge
from integration_tests.clients import Site
from integration_tests.faults import FaultProxy
from rollbridge.base.deadlines import Deadline
from rollbridge.errors import (
    KafkaUnavailableError,
)
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.metadata import Broker, Cluster
from rollbridge.writer import WriterOptions


@pytest.fixture
def exposed(site: Site, proxy: FaultProxy, unique_name: Callable[[str], str]) -> Iterator[rollbridge.Bridge]:
    """A client whose plain writes go through the proxy."""
    with site.connect(unique_name("exposed")) as client:
        yield client


ONE = WriterOptions(linger_s=0.0)


@contextmanager
def nobody_reached() -> Iterator[None]:
    """The exposed client can open no connection to a broker."""
    original = Cluster._connect

    def refuse(cluster: Cluster, broker: Broker, deadline: Deadline | None) -> Connection:
        if "exposed" in cluster._client_id:
            raise KafkaUnavailableError("no way through")
        return original(cluster, broker, deadline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "_connect", refuse)
        yield
