"""A standby on real servers: it follows the leader, and what it has read need not be read again when that is killed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.coordinators import coordinator, until
from rollbridge.model.names import GroupName, StreamName
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import ZooKeeperSession
from rollbridge_coordinator.state.succession import first_choice

COMMITS, ABORTS = 20, 300
PREFIX = "ROLLBRIDGE_COORDINATOR_"
RARE = {
    f"{PREFIX}TRANSACTION_BUFFER_SNAPSHOT_MIN_TIME_IN_MILLIS": "3600000",
    f"{PREFIX}TRANSACTION_BUFFER_SNAPSHOT_MAX_TRANSACTION_COUNT": "1000000",
}
"""Nothing but the standby keeps a takeover from reading all of it."""


def test_a_standby_takes_over_from_what_it_has_read(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("standby")
    stream, group = str(StreamName(scope, "orders")), GroupName(scope)
    root = f"/{scope}"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()

    def environment(name: str) -> dict[str, str]:
        return {**RARE, f"{PREFIX}METRICS_DIR": str(tmp_path / name)}

    # The first choice comes first, so that the lead stays where it is.
    leader = first_choice(group, ["one", "two"]) or ""
    standby = "two" if leader == "one" else "one"
    with (
        coordinator(cluster, root, leader, tmp_path, **environment(leader)) as leading,
        ZooKeeperSession(cluster.zookeeper, root=root) as session,
        Site(cluster, root, tmp_path).connect("teller") as b,
        coordinator(cluster, root, standby, tmp_path, **environment(standby)),
    ):
        metadata = Metadata(session)
        b.admin.create_stream(stream)
        until(lambda: len(metadata.coordinators()) == 2)
        until(lambda: metadata.leader(group) == leader)
        early = b.begin(stream)
        early.write(stream, key=b"k", value=b"early")
        early.flush()
        for number in range(COMMITS):
            with b.transaction(stream) as txn:
                txn.write(stream, key=b"k", value=b"%d" % number)
        gone = []
        for _ in range(ABORTS):
            txn = b.begin(stream)
            txn.write(stream, key=b"k", value=b"never seen")
            gone.append((txn, txn.abort_async()))
        for _, ended in gone:
            ended.result(60)
        metrics = tmp_path / standby / f"rollbridge-{scope}.default.standby.prom"
        until(
            lambda: metrics.exists() and _gauges(metrics) == {"lag_messages": 0, "transactions": COMMITS + ABORTS + 1}
        )
        leading.kill()

        early.write(stream, key=b"k", value=b"late")
        result = early.commit()
        assert result.records == 2
        assert b.outcome(gone[-1][0].id).aborted
        log = (tmp_path / f"{standby}.log").read_text()
        found = re.search(
            r"(\d+) open transactions, took over in [0-9.]+ s, read (\d+) messages behind a warm tail", log
        )
        assert found is not None, log
        assert found[1] == "1"
        assert int(found[2]) < 10
        assert not metrics.exists(), "it leads now"
        values = [item.value() for item in Site(cluster, root, tmp_path).committed(stream)]
        assert values == [*(b"%d" % number for number in range(COMMITS)), b"early", b"late"]


def _gauges(path: Path) -> dict[str, int]:
    return {
        name: int(float(value))
        for name, value in re.findall(r"^rollbridge_standby_(\w+)\{.*\} (\S+)$", path.read_text(), re.M)
    }
