"""Producers whom hostile clients must not disturb."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Self

import pytest

from integration_tests.clients import Site
from integration_tests.gateway_clients import producer_of, topic_of
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.patience import PATIENCE_S, eventually

HOSTILE = "gateway-hostile"


@pytest.fixture(scope="module")
def gateway(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway for the tests of this module, which gives up soon on who does not go on."""
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    folder, soon = tmp_path_factory.mktemp("gateways"), {"CONSTANT_FIRST_S": "1", "CONSTANT_REQUEST_S": "1"}
    with GatewayProcess(servers, HOSTILE, folder, environment=soon) as process:
        yield process


class Beside:
    """A producer that minds its own business meanwhile, and commits one transaction after the other."""

    def __init__(self, gateway: GatewayProcess, stream: str, transactional_id: str) -> None:
        self._producer = producer_of(gateway, transactional_id)
        self._stream = stream
        self._ending = threading.Event()
        self._fault: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.committed = 0

    def __enter__(self) -> Self:
        self._producer.init_transactions(60)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert not self._fault, self._fault

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._producer.begin_transaction()
                self._producer.produce(topic_of(self._stream), key="k", value=f"{self.committed}")
                self._producer.commit_transaction(60)
                self.committed += 1
        except BaseException as fault:
            self._fault.append(fault)

    def await_more(self) -> None:
        """Wait until it has committed two more, the second of which was begun since."""
        wanted = self.committed + 2
        eventually(lambda: self.committed >= wanted or self._fault, "the producer beside goes on")
