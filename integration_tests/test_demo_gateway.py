"""What ``make demo-gateway`` shows, with fewer records: who reads behind the gateway does not notice a dead job."""

from __future__ import annotations

from pathlib import Path

from integration_tests.backends.local import LocalCluster
from integration_tests.clients import Site
from integration_tests.gateways import GatewayProcess, Servers
from spark_examples.demo.gateway import BEHIND, STRAIGHT, play


def test_a_dead_job_behind_the_gateway_holds_nobody_up(tmp_path: Path) -> None:
    with LocalCluster() as cluster, Site(cluster, "/demo-gateway", tmp_path) as site, site.connect("demo") as b:
        gateway = GatewayProcess(Servers(cluster.bootstrap_servers, cluster.zookeeper, site.root), "demo", tmp_path)
        gateway.start()
        try:
            gateway.await_ready()
            told = play(b, gateway.address, tmp_path, records=4_000, dead_s=6.0)
        finally:
            gateway.stop()
    assert told.exact == {BEHIND: True, STRAIGHT: True}
    assert told.waits_s[BEHIND] < told.waits_s[STRAIGHT]
