"""Coordinators that are started before their servers answer: they wait, say so, and go on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.coordinators import command, coordinator, until
from integration_tests.links import Link
from integration_tests.patience import PATIENCE_S, await_exit
from rollbridge.errors import InvalidRequestError, KafkaUnavailableError
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata

ENVIRONMENT = {"ROLLBRIDGE_COORDINATOR_METRICS_ADDRESS": "127.0.0.1:0"}
AT_ONCE = {**os.environ, "ROLLBRIDGE_COORDINATOR_WAIT_AT_START_S": "0"}


def nowhere() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def health(log: Path) -> tuple[int, str]:
    """Status and text of ``/healthz`` of the coordinator with this log; 0 as long as it serves none."""
    port = re.search(r"http\.listening at=(\d+): metrics and health", log.read_text())
    if port is None:
        return 0, ""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/healthz", timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_it_waits_for_zookeeper_then_for_kafka_and_then_serves(
    cluster: AnyCluster, root: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    scope = unique_name("early")
    log = tmp_path / "early.log"
    with Link(cluster.zookeeper) as zookeeper, Link(cluster.bootstrap_servers.split(",")[0]) as kafka:
        zookeeper.cut()
        kafka.cut()
        with coordinator(
            cluster, root, "early", tmp_path, kafka=kafka.address, zookeeper=zookeeper.address, **ENVIRONMENT
        ) as process:
            until(lambda: health(log)[1].startswith(f"waits for ZooKeeper at {zookeeper.address} since"))
            assert health(log)[0] == 503
            zookeeper.heal()
            until(lambda: health(log)[1].startswith(f"waits for Kafka at {kafka.address} since"))
            assert process.poll() is None
            kafka.heal()
            until(lambda: health(log) == (200, "ok\n"))
            with rollbridge.connect(
                cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root
            ) as client:
                client.admin.create_stream(f"{scope}/orders")
    text = log.read_text()
    assert len(re.findall("waits for ZooKeeper", text)) >= 1
    assert f'coordinator.connected to="Kafka at {kafka.address}" waited_s=' in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whoever_waits_ends_at_once_when_asked_to(
    cluster: AnyCluster, root: str, tmp_path: Path, number: signal.Signals
) -> None:
    with coordinator(cluster, root, "early", tmp_path, zookeeper=nowhere()) as process:
        until(lambda: "waits for ZooKeeper" in (tmp_path / "early.log").read_text())
        process.send_signal(number)
        assert await_exit(process) == 0


def ended(cluster: AnyCluster, root: str, **addresses: str) -> subprocess.CompletedProcess[str]:
    """A coordinator that waits for nobody, once it has ended."""
    line = command(cluster, root, "early", {}, **addresses)
    return subprocess.run(line, env=AT_ONCE, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_one_that_is_not_to_wait_ends_with_the_code_of_what_is_missing(cluster: AnyCluster, root: str) -> None:
    for missing in ({"zookeeper": nowhere()}, {"kafka": nowhere()}):
        found = ended(cluster, root, **missing)
        assert found.returncode == KafkaUnavailableError.exit_code, found
        [address] = missing.values()
        assert address in found.stderr


def test_what_waiting_cannot_mend_ends_it_at_once(cluster: AnyCluster, root: str, tmp_path: Path) -> None:
    with ZooKeeperSession(cluster.zookeeper, root=root) as session:
        Metadata(session).claim_cluster("another-cluster")
    line = command(cluster, root, "early", {})
    found = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (found.returncode, "belongs to Kafka cluster another-cluster" in found.stderr) == (
        InvalidRequestError.exit_code,
        True,
    ), found


def test_every_line_of_a_log_that_is_json_is_json(cluster: AnyCluster, root: str, tmp_path: Path) -> None:
    path = tmp_path / "lines" / "coordinator.log"
    path.parent.mkdir()
    arguments = ("--log-format=json", f"--log-file={path}")
    line = [*command(cluster, root, "early", {}, zookeeper=nowhere()), *arguments]
    found = subprocess.run(line, env=AT_ONCE, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (found.returncode, found.stderr) == (KafkaUnavailableError.exit_code, "")
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert lines[-1]["level"] == "ERROR"
    assert lines[-1]["message"].startswith("coordinator.stopped: no ZooKeeper server answered")


def test_a_log_that_is_moved_is_written_anew_and_sighup_ends_nothing(
    cluster: AnyCluster, root: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    scope = unique_name("moved")
    path = tmp_path / "coordinator.log"
    arguments = (f"--log-file={path}", "--log-format=json", "--log-level=DEBUG")
    with coordinator(cluster, root, "moved", tmp_path, arguments=arguments) as process:
        until(lambda: path.exists() and "coordinator.ready " in path.read_text())
        path.rename(tmp_path / "coordinator.log.1")
        process.send_signal(signal.SIGHUP)
        with rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root) as client:
            client.admin.create_stream(f"{scope}/orders")
        until(lambda: path.exists() and scope in path.read_text())
        assert process.poll() is None
    for text in path.read_text().splitlines():
        assert json.loads(text)["time"].endswith("Z")
