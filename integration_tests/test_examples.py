"""The small programs, each twice on one cluster and each before and after every other one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.choice import new_cluster
from integration_tests.examples import FOLDER, PLAIN, run_all
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where a fresh cluster is: the programs use streams of the names that a newcomer gives them.

    The programs have the patience of a user. So what Kafka makes for the first transaction ever, fifty partitions of a
    topic of its own, is made before them, however long that takes a busy machine.
    """
    with new_cluster() as cluster:
        coordinator = cluster.start_coordinator()
        with ZooKeeperSession(cluster.zookeeper) as session:
            eventually(Metadata(session).coordinators, "a coordinator runs")
        options = rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S, commit_timeout_s=PATIENCE_S)
        with rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, options=options) as b:
            b.admin.create_stream("first/stream")
            with b.transaction("first/stream") as txn:
                txn.write("first/stream", value=b"first")
        servers = Servers(cluster.bootstrap_servers, cluster.zookeeper, "/rollbridge")
        with GatewayProcess(servers, "examples", tmp_path_factory.mktemp("gateway")) as gateway:
            yield {
                "ROLLBRIDGE_BOOTSTRAP_SERVERS": cluster.bootstrap_servers,
                "ROLLBRIDGE_ZOOKEEPER": cluster.zookeeper,
                "ROLLBRIDGE_GATEWAY": gateway.address,
            }
        cluster.stop_coordinator(coordinator)


def test_every_program_runs_twice_in_any_order(environment: dict[str, str], tmp_path: Path) -> None:
    first = run_all(PLAIN, environment, tmp_path)
    again = run_all(PLAIN[::-1], environment, tmp_path)
    for said in (first, again):
        print(*(f"-- {name}\n{text}" for name, text in said.items()), sep="\n")
        assert all(said.values())  # each has shown something
        assert "refused: " in said["conditional_write.py"]
        assert "committed 2 records" in said["resume_after_crash.py"]
        assert "\ncommitted with 2 records" in said["resume_after_crash.py"]
        assert "went on at line 3 and committed 4 records" in said["savepoints.py"]
        assert "[b'shipped']" in said["consume.py"]
        assert "invoices" in said["group_with_offsets.py"]
        assert "rolling-transactions" in said["rolling_transaction.py"]
        assert "checkout" in said["read_transactions.py"]
        assert said["moving_after.py"] == "billed\n"
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert f"```text\n{first['rolling_transaction.py']}```" in readme  # nobody else rolls this stream
    assert (first["shared_state.py"], again["shared_state.py"]) == ("{'max': 1}\n", "{'max': 2}\n")
