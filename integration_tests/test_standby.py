"""A standby on real servers: it follows the leader, and what it has read need not be read again when that is killed."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.coordinators import coordinator, until
from integration_tests.patience import PATIENCE_S
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.daemon.succession import first_choice
from rollbridge_devcluster.state import free_port

COMMITS, ABORTS = 20, 300
PREFIX = "ROLLBRIDGE_COORDINATOR_"
RARE = {
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MIN_TIME_IN_MILLIS": "3600000",
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MAX_TRANSACTION_COUNT": "1000000",
}
"""Nothing but the standby keeps a takeover from reading all of it."""


def test_a_standby_takes_over_from_what_it_has_read(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("standby")
    stream, group = str(StreamName(scope, "orders")), GroupName(scope)
    root = f"/{scope}"
    port = free_port()

    # The first choice comes first, so that the lead stays where it is.
    leader = first_choice(group, ["one", "two"]) or ""
    standby = "two" if leader == "one" else "one"
    with (
        coordinator(cluster, root, leader, tmp_path, **RARE) as leading,
        ZooKeeperSession(cluster.zookeeper, root=root) as session,
        Site(cluster, root, tmp_path).connect("teller") as b,
        coordinator(cluster, root, standby, tmp_path, **RARE, **{f"{PREFIX}METRICS_ADDRESS": f"127.0.0.1:{port}"}),
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
        until(lambda: _gauges(port) == {"lag_messages": 0, "transactions": COMMITS + ABORTS + 1})
        leading.kill()

        early.write(stream, key=b"k", value=b"late")
        result = early.commit()
        assert result.records == 2
        assert b.outcome(gone[-1][0].id).aborted
        log = (tmp_path / f"{standby}.log").read_text()
        found = re.search(r"open_txns=(\d+) took_s=[0-9.]+ messages_read=(\d+) standby=warm", log)
        assert found is not None, log
        assert found[1] == "1"
        assert int(found[2]) < 10
        until(lambda: not _gauges(port))  # it leads now; consumers that it has as a standby are closed first
        values = [item.value() for item in Site(cluster, root, tmp_path).committed(stream)]
        assert values == [*(b"%d" % number for number in range(COMMITS)), b"early", b"late"]


def _gauges(port: int) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return {
        name: int(float(value)) for name, value in re.findall(r"^rollbridge_standby_(\w+)\{.*\} (\S+)$", text, re.M)
    }
