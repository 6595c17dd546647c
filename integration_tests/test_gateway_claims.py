"""What requests claim costs a gateway their bytes and no more."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from bridge.tests.batch_makers import record
from gateway.tests import claims
from gateway.tests.claims import batch, produce
from integration_tests.bystanders import Beside
from integration_tests.clients import Site
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.group_committers import Committer
from integration_tests.patience import eventually
from rollbridge_devcluster.state import free_port
from rollbridge_gateway.producer.table import Pair
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api

MEMORY_MAX: Final = 768 << 20
"""Decompressed batches of all writers, and the process."""


class Sender:
    """A transactional producer that sends whatever it is given."""

    def __init__(self, address: tuple[str, int], name: str) -> None:
        starter = Committer(address, name)
        starter.connection.close()
        self.pair = Pair(int(starter.started.producer_id), int(starter.started.producer_epoch))
        self._name = name
        self._socket = socket.create_connection(address, 60)
        self._answers = self._socket.makefile("rb")

    def _ask(self, data: bytes, api: Api, version: int) -> Any:
        self._socket.sendall(data)
        size = int.from_bytes(self._answers.read(4), "big")
        return wire.read_answer(self._answers.read(size), api, version)

    def send(self, data: bytes) -> str:
        """Send a Produce with its length; return the code in its answer."""
        [topic] = self._ask(data, Api.PRODUCE, 12).responses
        return str(topic.partition_responses[0].error_code.name)

    def begin(self, topic: str) -> None:
        """Begin a transaction with a record, which has sequence number 0."""
        first = produce(self._name, topic, batch(self.pair, record(0), 1, sequence=0))
        eventually(lambda: self.send(first) == "none", "the partition's leader is known")

    def commit(self) -> str:
        """Commit; return the code in the answer."""
        values = {"transactional_id": self._name, "producer_id": self.pair.producer_id, "committed": True}
        request = wire.write_request(Api.END_TXN, 5, 1, "claims", {**values, "producer_epoch": self.pair.epoch})
        return str(self._ask(wire.framed(request), Api.END_TXN, 5).error_code.name)

    def close(self) -> None:
        self._answers.close()
        self._socket.close()


@pytest.fixture
def strained(site: Site, tmp_path: Path, unique_name: Callable[[str], str]) -> Iterator[tuple[GatewayProcess, str]]:
    """A gateway, and where it says how it does."""
    servers, health = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root), free_port()
    metrics, soon = [f"--metrics=127.0.0.1:{health}"], {"CONSTANT_FIRST_S": "5", "CONSTANT_REQUEST_S": "5"}
    with GatewayProcess(servers, unique_name("gateway"), tmp_path, metrics, soon) as process:
        yield process, f"http://127.0.0.1:{health}/healthz"


@contextmanager
def watched(gateway: GatewayProcess, health: str) -> Iterator[list[str]]:
    """Ask a gateway all the time how it does; what was wrong, and how much memory it had."""
    wrong_ones: list[str] = []
    ended, process = threading.Event(), psutil.Process(gateway.pid)

    def look() -> None:
        while not ended.is_set():
            if process.memory_info().rss > MEMORY_MAX:
                wrong_ones.append(f"it has {process.memory_info().rss >> 20} MiB")
            try:
                urllib.request.urlopen(health, timeout=60).close()
            except urllib.error.HTTPError as fault:
                with fault:
                    wrong_ones.append(fault.read().decode())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield wrong_ones
    finally:
        ended.set()
        thread.join()


def test_claims_cost_their_bytes_and_no_more(
    strained: tuple[GatewayProcess, str], topic: str, ledger: str, unique_name: Callable[[str], str]
) -> None:
    """Of batches, and of lists in requests; a producer beside goes on, and the gateway is healthy all the time."""
    (gateway, health), name = strained, unique_name("claims")
    address = ("127.0.0.1", gateway.port + 1)
    with watched(gateway, health) as wrong_ones, Beside(gateway, ledger, unique_name("beside")) as beside:
        with closing(Sender(address, name)) as sender:
            sender.begin(topic)
            for made in claims.batches(sender.pair):
                assert sender.send(produce(name, topic, made)) not in ("none", "unknown_server_error")
        for request in claims.lists(topic):
            with socket.create_connection(address, 60) as connection, suppress(ConnectionError):
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass
        beside.await_more()
    assert wrong_ones == []
    assert "Traceback" not in gateway.log.read_text(errors="replace")


def memory_of(gateway: GatewayProcess) -> int:
    return int(psutil.Process(gateway.pid).memory_info().rss)


@pytest.mark.parametrize("sent", [1_000, (90 << 20) - 1], ids=["little", "all but a byte"])
def test_requests_that_do_not_come_whole_hold_nobody_up(
    site: Site, servers: Servers, ledger: str, tmp_path: Path, unique_name: Callable[[str], str], sent: int
) -> None:
    """More of them than there is room for: they stay as long as they may, and a producer beside goes on meanwhile."""
    head, held = (90 << 20).to_bytes(4, "big"), bytes(sent)
    with GatewayProcess(servers, unique_name("gateway"), tmp_path, environment={"CONSTANT_REQUEST_S": "60"}) as gateway:

        def hold(connection: socket.socket) -> None:
            with suppress(OSError):  # it is closed in the end
                connection.sendall(head + held)

        def told() -> bool:
            return "requests.wait" in gateway.log.read_text(errors="replace")

        with Beside(gateway, ledger, unique_name("beside")) as beside, ExitStack() as stack:
            connections = [
                stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port + 1), 60)) for _ in range(8)
            ]
            threads = [threading.Thread(target=hold, args=(connection,), daemon=True) for connection in connections]
            for thread in threads:
                thread.start()
            is_more = sent > 1 << 20
            eventually(lambda: not is_more or memory_of(gateway) > 128 << 20, "room is taken")
            eventually(lambda: is_more or not any(thread.is_alive() for thread in threads), "they wait")
            for _ in range(5):
                beside.await_more()
            for connection in connections:
                connection.setblocking(False)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)
            assert memory_of(gateway) < MEMORY_MAX
            eventually(lambda: told() or not is_more, "the log says that there is no room")
        for thread in threads:
            thread.join()
        assert told() == is_more
