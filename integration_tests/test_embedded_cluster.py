"""``ProcessCluster``: real servers that take faults, keep their data over restarts and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from integration_tests.backends.choice import Backend, chosen
from integration_tests.crashing import CRASH_AT
from integration_tests.patience import eventually
from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster import processes
from rollbridge_devcluster.ephemeral import ProcessCluster

HOLDER = """
import sys
from rollbridge_devcluster.ephemeral import ProcessCluster
cluster = ProcessCluster().start()
print(cluster.home, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def embedded(request: pytest.FixtureRequest) -> Iterator[ProcessCluster]:
    """The shared servers, if they are what these tests are about."""
    if chosen() is Backend.DOCKER:
        with ProcessCluster() as own:
            yield own
    else:
        shared = request.getfixturevalue("cluster")
        assert isinstance(shared, ProcessCluster)
        yield shared


def listening_addresses(pid: int) -> set[str]:
    return {
        connection.laddr.ip
        for connection in psutil.Process(pid).net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def pid_of(embedded: ProcessCluster, part: str) -> int:
    (process,) = processes.find(embedded.home)[part]
    return process.pid


def test_nobody_else_can_reach_them(embedded: ProcessCluster) -> None:
    for part in ("kafka", "zookeeper"):
        assert {ip.removeprefix("::ffff:") for ip in listening_addresses(pid_of(embedded, part))} == {"127.0.0.1"}


def test_a_coordinator_has_its_environment_after_a_restart_too(embedded: ProcessCluster) -> None:
    one = embedded.start_coordinator(env={"ROLLBRIDGE_TEST_MARK": "x"})
    assert CRASH_AT not in psutil.Process(one.pid).environ()
    before = psutil.Process(one.pid)
    embedded.restart(one.name)
    assert not before.is_running()
    assert psutil.Process(pid_of(embedded, one.name)).environ()["ROLLBRIDGE_TEST_MARK"] == "x"
    embedded.kill(one.name)


def test_a_cluster_leaves_nothing_behind() -> None:
    with ProcessCluster(kafka_settings={"log.retention.hours": "1"}) as own:
        home = own.home
        assert set(processes.find(home)) == {"kafka", "zookeeper"}
        assert "log.retention.hours=1\n" in (home / "kafka" / "server.properties").read_text()
    assert processes.find(home) == {}
    assert not home.exists()
    with pytest.raises(LocalEnvironmentError, match="not started"):
        own.bootstrap_servers  # noqa: B018 - reading it is the test
    own.stop()


def test_a_cluster_that_cannot_start_leaves_nothing_and_shows_its_logs() -> None:
    broken = ProcessCluster(kafka_settings={"num.io.threads": "none"})
    with pytest.raises(LocalEnvironmentError, match=r"kafka.*num\.io\.threads") as caught:
        broken.start()
    # That of the server which failed; the other one may have had no time to say anything.
    assert any(note.startswith("--- kafka") for note in caught.value.__notes__)
    (home,) = {Path(word) for word in str(caught.value).split() if "rollbridge-" in word}
    assert processes.find(home.parent) == {}
    assert not home.parent.exists()


def test_a_killed_test_run_takes_its_cluster_with_it() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder, holder.stdin, holder.stdout:
        home = Path(holder.stdout.readline().strip())
        assert set(processes.find(home)) == {"kafka", "zookeeper"}
        holder.kill()
    eventually(lambda: not processes.find(home) and not home.exists(), "the cluster is gone")
