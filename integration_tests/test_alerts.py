"""Alerts on a real cluster in trouble: a real Prometheus scrapes real coordinators, by the rules that are shipped."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.command_line import Cli
from integration_tests.coordinators import coordinator
from integration_tests.patience import PATIENCE_S, eventually
from integration_tests.prometheus_server import JOB, Prometheus, panels
from integration_tests.troubles import WRITES, slowed
from rollbridge.cli.common import ExitCode
from rollbridge.errors import RollbridgeError
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.monitoring.runbook import alerts, alerts_of
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_devcluster.state import LOOPBACK, free_port

PREFIX = "ROLLBRIDGE_COORDINATOR_"
LIMITS = {"> 12 * 3600": "> 1"}
"""A transaction is old after a second."""


class Fleet:
    """Coordinators ``one`` and ``two`` of a site of their own, with addresses for Prometheus from the beginning."""

    def __init__(self, cluster: AnyCluster, root: str, folder: Path) -> None:
        self._cluster = cluster
        self._root = root
        self._folder = folder
        first = free_port()
        self.addresses = {"one": f"{LOOPBACK}:{first}", "two": f"{LOOPBACK}:{free_port([first])}"}
        self._running: dict[str, ExitStack] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self.stop(name)

    def start(self, name: str) -> None:
        environment = {f"{PREFIX}METRICS_ADDRESS": self.addresses[name]}
        stack = self._running[name] = ExitStack()
        stack.enter_context(coordinator(self._cluster, self._root, name, self._folder, **environment))

    def stop(self, name: str) -> None:
        self._running.pop(name).close()


@pytest.mark.slow
def test_each_important_alert_fires_when_a_cluster_is_in_that_trouble(
    cluster: AnyCluster, root: str, scope: str, tmp_path: Path
) -> None:
    stream, group = StreamName(scope, "orders"), GroupName(scope)
    cli, site = Cli(cluster, root), Site(cluster, root, tmp_path)
    with Fleet(cluster, root, tmp_path) as fleet, ExitStack() as stack:
        prometheus = stack.enter_context(Prometheus(tmp_path / "prometheus", [*fleet.addresses.values()], LIMITS))

        # None has ever been there.
        prometheus.await_firing("NoCoordinator")

        # One, which nobody follows.
        fleet.start("one")
        b = stack.enter_context(site.connect("loader"))
        b.admin.create_stream(str(stream))
        prometheus.await_calm("NoCoordinator")
        said = prometheus.await_firing("NoStandby", job=JOB, group=str(group))
        assert said["summary"] == f"Group {group} has no standby"
        assert said["runbook_url"].endswith("/runbook.md#rollbridgenostandby")
        answer = cli("doctor")
        assert alerts()["RollbridgeNoStandby"].findings[0].do in answer.out
        assert "rollbridge doctor --explain no-standby" in answer.out

        fleet.start("two")
        prometheus.await_calm("NoStandby")

        # A transaction that does not end.
        txn = b.begin(str(stream), label="nightly")
        txn.write(str(stream), key=b"k", value=b"v")
        txn.flush()
        said = prometheus.await_firing("OldTransaction", job=JOB, group=str(group))
        assert f"The oldest open transaction is {txn.id} of client loader, labelled nightly." in said["description"]
        txn.commit()
        prometheus.await_calm("OldTransaction")

        # A program that does not look at what it is answered.
        for number in range(7):
            with pytest.raises(RollbridgeError):
                b.admin.create_stream(f"{scope}/refused-{number}", replication_factor=5)
        prometheus.await_firing("RequestsRefused", job=JOB, group=str(group), kind="create-stream")

        # A topic that somebody has deleted.
        topic = stream.segment_topic(b.admin.history(str(stream)).active.segments[0].id)
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
        admin.delete_topics([topic])[topic].result(120)
        lost = b.begin(str(stream))
        lost.write(str(stream), key=b"k", value=b"v")
        lost.commit_async()
        said = prometheus.await_firing("StreamInError", job=JOB, group=str(group), stream=str(stream))
        assert said["summary"].startswith(f"Stream {stream} is in an error state: ")
        answer = cli("doctor")
        assert answer.code == ExitCode.FINDINGS
        assert "rollbridge doctor --explain stream-error" in answer.out
        assert said["runbook_url"].endswith(f"#{alerts_of('stream-error')[-1].anchor}")

        # The first of two is gone, then the other.
        fleet.stop("one")
        prometheus.await_firing("CoordinatorDown", job=JOB, instance=fleet.addresses["one"])
        prometheus.await_firing("NoStandby", job=JOB, group=str(group))
        assert "NoCoordinator" not in prometheus.firing()
        fleet.stop("two")
        said = prometheus.await_firing("NoCoordinator", job=JOB)
        assert said["summary"] == f"No coordinator is running ({JOB})"
        answer = cli("doctor")
        assert alerts()["RollbridgeNoCoordinator"].findings[0].do in answer.out

        # They come back, and none of them can lead: what stands in ZooKeeper cannot be read.
        with ZooKeeperSession(cluster.zookeeper, root=root) as session:
            session.set(paths.controller(group), b"{")
        fleet.start("two")
        prometheus.await_firing("NoLeader", job=JOB)
        assert "NoCoordinator" not in prometheus.firing()


def test_a_leader_that_waits_for_one_answer_is_seen(cluster: AnyCluster, root: str, scope: str, tmp_path: Path) -> None:
    stream, group = StreamName(scope, "orders"), GroupName(scope)
    cli = Cli(cluster, root)
    with Fleet(cluster, root, tmp_path) as fleet:
        fleet.start("one")
        limits = {"readings_age_seconds) > 300": "readings_age_seconds) > 3"}
        with (
            Prometheus(tmp_path / "prometheus", [*fleet.addresses.values()], limits) as prometheus,
            Site(cluster, root, tmp_path).connect("loader") as b,
        ):
            b.admin.create_stream(str(stream))
            txn = b.begin(str(stream))
            for _ in range(100):
                txn.write(str(stream), key=b"k", value=os.urandom(10_000))
            with slowed(cluster, WRITES):
                waiting = txn.commit_async()
                said = prometheus.await_firing("LeaderStandsStill", job=JOB, group=str(group))
                assert said["summary"].startswith(f"Leader of group {group} has made no progress for ")
                assert "Kafka slows client id rollbridge down (producer_byte_rate=20000)" in cli("doctor").out
            waiting.result(PATIENCE_S)
            prometheus.await_calm("LeaderStandsStill")


def test_a_good_cluster_fires_nothing_and_its_board_is_green(
    cluster: AnyCluster, root: str, scope: str, tmp_path: Path
) -> None:
    stream = str(StreamName(scope, "orders"))
    with Fleet(cluster, root, tmp_path) as fleet:
        fleet.start("one")
        fleet.start("two")
        with (
            Prometheus(tmp_path / "prometheus", [*fleet.addresses.values()], {}) as prometheus,
            Site(cluster, root, tmp_path).connect("loader") as b,
        ):
            b.admin.create_stream(stream)

            def first_row() -> dict[str, float | None]:
                """What the numbers of the board's first row are, after one more commit."""
                with b.transaction(stream) as txn:
                    txn.write(stream, key=b"k", value=b"v")
                found = {}
                for panel in panels("stat"):
                    found[panel["title"]] = prometheus.shown(panel["title"])[0]
                return found

            def is_good() -> bool:
                found = first_row()
                zero = ("Groups without leader", "Unhealthy coordinators", "Streams in error", "Groups without standby")
                latency, oldest, lag = (found[title] for title in ("Commit p99", "Oldest transaction", "Fold lag"))
                return (
                    all(found[title] == 0 for title in zero)
                    and latency is not None
                    and oldest is not None
                    and lag is not None
                )

            eventually(is_good, "the board has all its numbers, and they are good")
            eventually(lambda: not prometheus.firing(), "nothing fires any more since both were there")

            # Nothing is asked of it from here on: its readings stay fresh, more than once.
            fresh = "count_over_time((min(rollbridge_readings_age_seconds) < 5)[10s:1s])"
            eventually(lambda: (prometheus.value(fresh) or 0.0) > 5, "an idle leader is seen to be at work")
