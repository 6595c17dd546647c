"""A leader whose process dies is replaced without waiting for its ZooKeeper session; one that stands still is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.coordinators import coordinator, has_lost_the_lead, until
from integration_tests.pauses import pause
from rollbridge.config import ConnectionSettings
from rollbridge.kafka.client import KafkaClient
from rollbridge.lease import Lease
from rollbridge.metadata import paths
from rollbridge.metadata.records import ControllerEpoch, DeleteNode
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.daemon.leadership import Leadership
from rollbridge_coordinator.daemon.succession import Candidates, first_choice

LONG_S = 40
"""ZooKeeper's longest session time-out by default. Nothing here waits for it."""
FORGOTTEN = "liveness.off coordinator="
SEEN = "groups_led=1"


@dataclass
class Place:
    """A root path of this test's own, with one stream in one group, and who leads that if both are there."""

    cluster: AnyCluster
    logs: Path
    scope: str

    @property
    def root(self) -> str:
        return f"/{self.scope}"

    @property
    def group(self) -> GroupName:
        return GroupName(self.scope)

    @property
    def stream(self) -> str:
        return str(StreamName(self.scope, "orders"))

    @property
    def names(self) -> tuple[str, str]:
        """Of the first choice, and of the other one."""
        first = first_choice(self.group, ["one", "two"])
        return ("one", "two") if first == "one" else ("two", "one")

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()

    def commit(self, b: rollbridge.Bridge, value: bytes) -> rollbridge.CommitResult:
        with b.transaction(self.stream) as txn:
            txn.write(self.stream, key=b"k", value=value)
        return txn.commit()


@pytest.fixture
def place(cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path) -> Place:
    return Place(cluster, tmp_path, unique_name("fast"))


@pytest.fixture
def metadata(place: Place) -> Iterator[Metadata]:
    with ZooKeeperSession(place.cluster.zookeeper, root=place.root) as session:
        yield Metadata(session)


@pytest.fixture
def b(place: Place) -> Iterator[rollbridge.Bridge]:
    with Site(place.cluster, place.root, place.logs).connect("teller") as connected:
        yield connected


def is_ready(metadata: Metadata, name: str, group: GroupName) -> bool:
    said = metadata.coordinator(name)
    return said is not None and group in said.ready


def test_a_killed_leader_is_replaced_before_its_session_ends(
    place: Place, metadata: Metadata, b: rollbridge.Bridge
) -> None:
    leader, standby = place.names
    long = (f"--session-timeout={LONG_S}",)
    with (
        coordinator(place.cluster, place.root, leader, place.logs, arguments=long) as process,
        coordinator(place.cluster, place.root, standby, place.logs, arguments=long),
    ):
        until(lambda: len(metadata.coordinators()) == 2)
        b.admin.create_stream(place.stream)
        until(lambda: is_ready(metadata, standby, place.group) and metadata.leader(place.group) == leader)
        before = place.commit(b, b"before")
        process.kill()
        after = place.commit(b, b"after")
        assert after.position > before.position
        assert metadata.leader(place.group) == standby
        # The nodes were still there for it to remove, so the session of the dead one had not ended.
        assert f"coordinator.removed coordinator={leader} {SEEN}" in place.log(standby)
        assert "standby=warm" in place.log(standby)
        assert metadata.coordinators() == [standby]
        # Whoever comes again under the same name need not wait for the session of its former life either.
        with coordinator(place.cluster, place.root, leader, place.logs, arguments=long):
            until(lambda: metadata.leader(place.group) == leader)
            assert place.commit(b, b"again").position > after.position


class Alone:
    """No other coordinator, and Kafka answers."""

    candidates = Candidates({"one": ()})
    is_fit = True

    def readiness_changed(self) -> None:
        """Tell nobody."""

    def doubt(self) -> None:
        """Know better."""


def test_a_node_that_could_not_be_given_up_keeps_its_own_coordinator_from_nothing(
    place: Place, metadata: Metadata
) -> None:
    """Its session lives on, so it would stay for ever, and everybody would take the group for led."""
    metadata.lay_out()
    metadata.ensure_group(place.group)
    left = Lease(metadata.session, paths.leader(place.group), paths.controller(place.group), makes_parents=False)
    assert left.take(b"one", lambda _: ControllerEpoch(4, "one", 0).to_json()) is None
    servers = place.cluster.bootstrap_servers
    connection = ConnectionSettings(bootstrap_servers=servers, zookeeper=place.cluster.zookeeper)
    settings = CoordinatorSettings(name="one", connection=connection, standby_transactions_max=0)
    leadership = Leadership(settings, KafkaClient(servers), place.group, metadata.session, Alone(), Alone())
    assert leadership._win() is not None
    node = metadata.session.get(paths.controller(place.group))
    assert node is not None
    assert ControllerEpoch.from_json(node.value).epoch == 5


@pytest.mark.long
def test_a_leader_that_stands_still_has_until_its_session_ends(
    place: Place, metadata: Metadata, b: rollbridge.Bridge
) -> None:
    leader, standby = place.names
    with (
        coordinator(place.cluster, place.root, leader, place.logs) as process,
        coordinator(place.cluster, place.root, standby, place.logs),
    ):
        until(lambda: len(metadata.coordinators()) == 2)
        b.admin.create_stream(place.stream)
        until(lambda: is_ready(metadata, standby, place.group) and metadata.leader(place.group) == leader)
        before = place.commit(b, b"before")
        pause(process)
        after = place.commit(b, b"after")
        assert after.position > before.position
        assert metadata.leader(place.group) == standby
        assert SEEN not in place.log(standby)
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: has_lost_the_lead(place.log(leader)))
        assert place.commit(b, b"more").position > after.position


def test_a_leader_that_is_taken_for_dead_gives_up_and_is_not_judged_by_a_connection_again(
    place: Place, metadata: Metadata, b: rollbridge.Bridge
) -> None:
    leader, standby = place.names
    long = (f"--session-timeout={LONG_S}",)
    with (
        coordinator(place.cluster, place.root, leader, place.logs, arguments=long),
        coordinator(place.cluster, place.root, standby, place.logs, arguments=long),
    ):
        until(lambda: len(metadata.coordinators()) == 2)
        b.admin.create_stream(place.stream)
        until(lambda: is_ready(metadata, standby, place.group) and metadata.leader(place.group) == leader)
        before = place.commit(b, b"before")
        said = metadata.coordinator(leader)
        assert said is not None
        assert said.address
        # As the other one would do behind a firewall that has begun to refuse.
        metadata.session.multi([DeleteNode(paths.coordinator(leader)), DeleteNode(paths.leader(place.group))])
        after = place.commit(b, b"after")
        assert after.position > before.position
        until(lambda: has_lost_the_lead(place.log(leader)))
        until(lambda: leader in metadata.coordinators())
        assert FORGOTTEN in place.log(leader)
        said = metadata.coordinator(leader)
        assert said is not None
        assert said.address == ""
        assert place.commit(b, b"more").position > after.position
