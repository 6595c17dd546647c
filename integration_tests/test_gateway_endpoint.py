"""Metrics and health of a gateway that runs: what producers do is counted, and that its lease has run out."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path

from integration_tests.clients import Site
from integration_tests.gateway_clients import producer_of, topic_of
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.links import Link
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.observe.healthcheck import VARIABLES, check
from rollbridge_devcluster.state import free_port


def test_what_producers_do_is_counted_and_health_is_told(
    site: Site, tmp_path: Path, orders: str, unique_name: Callable[[str], str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    environment = {VARIABLES["gateway"][1]: address}

    def metrics() -> str:
        connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert answer.status == 200
            return answer.read().decode()
        finally:
            connection.close()

    with Link(site.cluster.zookeeper.partition(",")[0]) as link:
        servers = Servers(site.cluster.bootstrap_servers, link.address, site.root)
        with GatewayProcess(servers, unique_name("gateway"), tmp_path, environment=environment) as gateway:
            assert check(environment, ["gateway"]) == (0, "ok")
            producer = producer_of(gateway, unique_name("counted"))
            producer.init_transactions(PATIENCE_S)
            producer.begin_transaction()
            for number in range(10):
                producer.produce(topic_of(orders), b"%d" % number)
            producer.commit_transaction(PATIENCE_S)
            told = metrics()
            assert "rollbridge_gateway_records_total 10.0\n" in told
            assert 'rollbridge_gateway_ended_transactions_total{outcome="committed"} 1.0\n' in told
            assert 'rollbridge_gateway_request_seconds_count{api="PRODUCE"}' in told
            assert "process_resident_memory_bytes" in told
            link.cut()
            over = (1, "its lease in ZooKeeper has run out")
            eventually(lambda: check(environment, ["gateway"]) == over, "its lease has run out")
            link.heal()
            eventually(lambda: check(environment, ["gateway"]) == (0, "ok"), "it has another one")
    assert check(environment, ["gateway"])[0] == 1
