"""Gateways as operators see them: by ``status``, ``doctor``, ``ids``, metrics and live page, against real ones."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client.parser import text_string_to_metric_families

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.command_line import Cli
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.pages import paged_coordinator, read_page
from integration_tests.patience import eventually
from rollbridge.cli.common import ExitCode
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.version import __version__
from rollbridge_devcluster.state import LOOPBACK, free_port
from rollbridge_gateway.server.metrics import FAMILIES

HOSTILE = "<script>alert(1)</script>/7"
"""A transactional id."""
HOUR_MS = 3_600_000


class Place:
    """A root path of its own, with a coordinator and its page; gateways come and go."""

    def __init__(self, cluster: AnyCluster, root: str, page: str, scope: str, logs: Path, stack: ExitStack) -> None:
        self.cluster = cluster
        self.root = root
        self.page = page
        self.stream = f"{scope}/orders"
        self.cli = Cli(cluster, root)
        self._logs = logs
        self._stack = stack

    @property
    def topic(self) -> str:
        """What producers call the stream."""
        return self.stream.replace("/", ".")

    def gateway(self, name: str, *arguments: str) -> GatewayProcess:
        """One more gateway, which serves."""
        servers = Servers(self.cluster.bootstrap_servers, self.cluster.zookeeper, self.root)
        return self._stack.enter_context(GatewayProcess(servers, name, self._logs, arguments))

    def findings(self) -> dict[str, dict[str, Any]]:
        """What the doctor says of gateways, by check; others share the brokers."""
        answer = self.cli("doctor", "--json")
        assert answer.code in (ExitCode.OK, ExitCode.FINDINGS), answer
        found = json.loads(answer.out)["findings"]
        return {item["check"]: item for item in found if "gateway" in item["check"]}

    def transactions(self) -> list[dict[str, Any]]:
        """The oldest open transactions of the group, as the page shows them."""
        listed = read_page(self.page, f"groups/{self.stream.partition('/')[0]}/default")["transactions"]["oldest"]
        assert isinstance(listed, list)
        return listed

    def session(self) -> ZooKeeperSession:
        """A session of an operator."""
        return ZooKeeperSession(self.cluster.zookeeper, root=self.root)


@pytest.fixture
def place(cluster: AnyCluster, unique_name: Callable[[str], str], scope: str, tmp_path: Path) -> Iterator[Place]:
    root = f"/{unique_name('seen')}"
    with ExitStack() as stack:
        page, _ = stack.enter_context(paged_coordinator(cluster, root, "one", tmp_path))
        place = Place(cluster, root, page, scope, tmp_path, stack)
        eventually(lambda: read_page(page, "overview")["coordinator"]["healthy"], "it is there")
        b = stack.enter_context(
            rollbridge.connect(
                cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root, client_name="operator"
            )
        )
        b.admin.create_stream(place.stream)
        yield place


def producer(gateway: GatewayProcess, transactional_id: str, timeout_ms: int = HOUR_MS) -> Producer:
    """A transactional producer, which has begun."""
    found = Producer(
        {
            "bootstrap.servers": gateway.address,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            "socket.timeout.ms": 60_000,
            "linger.ms": 5,
        }
    )
    found.init_transactions(60)
    return found


def scraped(address: str) -> dict[tuple[str, ...], float]:
    """What a gateway serves: values by the names of samples and the values of their labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert {family.name for family in FAMILIES} <= set(heads)
    return {
        (sample.name.removeprefix("rollbridge_gateway_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_gateway_and_its_producers_are_seen(place: Place) -> None:
    assert place.findings() == {}, "no gateway, no finding"
    assert read_page(place.page, "overview")["gateways"] == []
    metrics = f"{LOOPBACK}:{free_port()}"
    gateway = place.gateway("gw-1", f"--metrics={metrics}")
    eventually(lambda: place.findings() == {}, "it is well")

    # Where it is.
    answer = place.cli("status")
    assert answer.code == ExitCode.OK
    [line] = [line for line in answer.out.splitlines() if line.startswith("gateway gw-1")]
    assert line.split()[2:] == ["running", gateway.address]
    parts = {item["part"]: item for item in json.loads(place.cli("status", "--json").out)["parts"]}
    assert (parts["gateway gw-1"]["state"], parts["gateway gw-1"]["address"]) == ("running", gateway.address)
    assert json.loads(place.cli("doctor", "--json").out)["looked_at"]["gateways"] == 1
    eventually(lambda: read_page(place.page, "overview")["gateways"], "the page lists it")
    [listed] = read_page(place.page, "overview")["gateways"]
    assert {key: listed[key] for key in ("name", "address", "release", "lacking_rights", "encrypted")} == {
        "name": "gw-1",
        "address": gateway.address,
        "release": __version__,
        "lacking_rights": 0,
        "encrypted": False,
    }
    assert listed["brokers"] > 0

    # What its producers have open.
    first = producer(gateway, HOSTILE)
    first.begin_transaction()
    first.produce(place.topic, b"v" * 1_000, b"k")
    assert first.flush(60) == 0

    def of_producer() -> list[dict[str, Any]]:
        return [item for item in place.transactions() if item["transactional_id"] == HOSTILE]

    eventually(of_producer, "the page names the producer")
    [shown] = of_producer()
    assert (shown["through_gateway"], shown["gateway"]) == (True, "gw-1")
    answer = place.cli("ids", "list", "--json")
    [item] = json.loads(answer.out)["ids"]
    assert (item["transactional_id"], item["gateway"], item["begun_at"]) == (HOSTILE, "gw-1", "gw-1")
    assert item["timeout_ms"] == HOUR_MS
    assert place.cli("ids", "list", "--gateway", "gw-2").out.strip() == "There are none."
    [line] = [line for line in place.cli("ids", "list").out.splitlines() if HOSTILE in line]
    assert "gw-1" in line

    # What it counts.
    now = scraped(metrics)
    assert now["healthy",] == 1
    assert now["info", "gw-1", __version__] == 1
    assert (now["transactional_ids",], now["open_transactions",]) == (1, 1)
    assert now["records_total",] == 1
    assert now["received_bytes_total",] > now["bytes_total",] > 1_000
    assert now["sent_bytes_total",] > 0
    assert now["connections",] > 0
    assert now["request_seconds_count", "INIT_PRODUCER_ID"] >= 1
    assert now["savepoint_seconds_count",] >= 1
    assert (now["savepoint_failures_total",], now["relay_errors_total",], now["lacking_rights",]) == (0, 0, 0)
    assert now["known_gateways",] == 1
    assert now["known_brokers",] == listed["brokers"]
    assert now["lease_age_seconds",] > 0
    assert now["lease_unwritten_seconds",] < 60
    eventually(lambda: scraped(metrics)["loop_lag_seconds_count",] > 0, "it looks at its event loop")
    first.commit_transaction(60)
    eventually(lambda: scraped(metrics)["ended_transactions_total", "committed"] == 1, "the commit is counted")
    eventually(lambda: scraped(metrics)["open_transactions",] == 0, "none is open")

    # What it refuses.
    plain, admin = f"{place.topic}-plain", AdminClient({"bootstrap.servers": place.cluster.bootstrap_servers})
    admin.create_topics([NewTopic(plain, 1, 1)])[plain].result(120)
    first.begin_transaction()
    first.produce(plain, b"v")
    with pytest.raises(KafkaException):
        first.commit_transaction(60)

    def codes() -> set[str]:
        return {key[2] for key, value in scraped(metrics).items() if key[0] == "errors_total" and value}

    eventually(lambda: codes() == {"INVALID_TOPIC_EXCEPTION"}, "the refusal is counted")


def test_a_gateway_that_hangs_and_one_that_nobody_reaches_are_found_and_told_apart(place: Place) -> None:
    stuck = place.gateway("gw-stuck", "--session-timeout=40")  # others would take it for dead sooner
    stuck.pause()
    try:
        found = place.findings()
        assert found.keys() == {"gateway-hangs"}
        assert "gw-stuck" in found["gateway-hangs"]["what"]
        assert "end the process of gateway gw-stuck with kill -9" in found["gateway-hangs"]["remedy"]
        answer = place.cli("status", "--json")
        assert answer.code == ExitCode.UNAVAILABLE
        parts = {item["part"]: item["state"] for item in json.loads(answer.out)["parts"]}
        assert parts["gateway gw-stuck"] == "not answering"
    finally:
        os.kill(stuck.pid, signal.SIGCONT)
    eventually(lambda: not place.findings(), "it goes on")
    place.gateway("gw-lost", "--advertise=rollbridge.invalid")
    found = place.findings()
    assert "gw-lost is registered at rollbridge.invalid:" in found["gateway-unreachable"]["what"]
    assert found["gateway-unreachable"]["alerts"] == ["RollbridgeGatewayDown"]
    assert "gw-stuck advertises 127.0.0.1:" in found["gateway-address"]["what"]


def test_ids_that_nobody_uses_are_forgotten_and_no_others(place: Place) -> None:
    gateway = place.gateway("gw-1")
    served = producer(gateway, "served")
    served.begin_transaction()
    served.produce(place.topic, b"v", b"k")
    assert served.flush(60) == 0
    with place.session() as session:
        record = {"pair": [1 << 62, 0], "timeout_ms": 60_000, "written_ms": 5, "gateway": "gw-0"}
        for name in ("old-1", "old-2"):
            session.create(paths.gateway_id(name), json.dumps({**record, "id": name}).encode(), parents=True)
        session.create(paths.gateway_id("broken"), b"{", parents=True)
    assert json.loads(place.cli("ids", "forget", "--idle", "1d", "--dry-run", "--json").out) == {
        "done": False,
        "count": 2,
        "ids": ["old-1", "old-2"],
        "kept": 0,
    }
    answer = place.cli("ids", "forget", "--idle", "1d")
    assert answer.out.startswith("Forgot 2 transactional ids: old-1, old-2; 0 as old are in use.")
    # Of whatever age: it is served.
    done = json.loads(place.cli("ids", "forget", "--idle", "0s", "--json").out)
    assert (done["ids"], done["kept"]) == ([], 1)
    gateway.revive()
    eventually(
        lambda: not json.loads(place.cli("ids", "list", "--gateway", "gw-1", "--json").out)["count"], "nobody serves it"
    )
    # A transaction of it is open, which it may go on with, or commit.
    done = json.loads(place.cli("ids", "forget", "--idle", "0s", "--json").out)
    assert (done["ids"], done["kept"]) == ([], 1)
    served.commit_transaction(60)
    [item] = json.loads(place.cli("ids", "list", "--json").out)["ids"]
    assert item["transactional_id"] == "served"
    with place.session() as session:  # one whose bucket no gateway has made yet
        known = set(session.children(paths.GATEWAY_HOLDERS))
        name = next(f"odd-{n}" for n in range(10_000) if paths.gateway_bucket(f"odd-{n}") not in known)
        session.create(paths.gateway_id(name), json.dumps({**record, "id": name}).encode(), parents=True)
        assert json.loads(place.cli("ids", "forget", "--idle", "1d", "--json").out)["ids"] == [name]
        assert set(session.children(paths.GATEWAY_HOLDERS)) == known, "no node is left that gateways may not write to"
    # A new producer of a forgotten id begins like the first.
    again = producer(gateway, "old-1")
    again.begin_transaction()
    again.produce(place.topic, b"v", b"k")
    again.commit_transaction(60)
