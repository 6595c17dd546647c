"""How many connections to brokers a process holds: as many as it uses at once, not as many as it has groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from integration_tests.clients import Site
from integration_tests.patience import eventually
from integration_tests.three_brokers import ThreeBrokers

GROUPS = 20
ROUNDS = 5
SOCKETS_MAX = 20


def sockets_of(process: psutil.Process, zookeeper: str) -> list[str]:
    """Addresses to which a process has connections, but for ZooKeeper's."""
    others = {int(address.rpartition(":")[2]) for address in zookeeper.partition("/")[0].split(",")}
    ends = [item.raddr for item in process.net_connections("tcp") if item.status == psutil.CONN_ESTABLISHED]
    return [f"{end.ip}:{end.port}" for end in ends if end.port not in others]


def test_a_leader_of_many_groups_holds_few_connections(unique_name: Callable[[str], str], tmp_path: Path) -> None:
    with ThreeBrokers() as brokers, Site(brokers, f"/{unique_name('sockets')}", tmp_path) as site:
        children = psutil.Process().children()
        [coordinator] = [item for item in children if "rollbridge_coordinator" in " ".join(item.cmdline())]
        with site.connect() as b:
            streams = [f"sockets/of-{number}" for number in range(GROUPS)]
            for number, stream in enumerate(streams):
                b.admin.create_stream(stream, segments=3, group=f"g{number}")
            for _ in range(ROUNDS):
                for stream in streams:
                    with b.transaction(stream) as txn:
                        for key in range(9):
                            txn.write(stream, key=b"%d" % key, value=b"v")
            found: list[str] = []

            def are_few() -> bool:
                found[:] = sockets_of(coordinator, brokers.zookeeper)
                return len(found) <= GROUPS + SOCKETS_MAX  # one follows the buffer of each group

            eventually(are_few, "it keeps what it uses")
