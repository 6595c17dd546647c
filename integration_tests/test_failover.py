"""Several coordinators: groups move to their first choice, and leaders that are paused or cut off change nothing."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends import faults
from integration_tests.backends.choice import new_cluster
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client
from integration_tests.coordinators import controller_epoch, coordinator, has_lost_the_lead, until
from integration_tests.links import Link
from integration_tests.pauses import pause
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.daemon.succession import first_choice


@pytest.fixture
def session(cluster: AnyCluster, root: str) -> Iterator[ZooKeeperSession]:
    with ZooKeeperSession(cluster.zookeeper, root=root) as opened:
        yield opened


def leader(session: ZooKeeperSession, group: GroupName) -> str | None:
    node = session.get(paths.leader(group))
    return None if node is None else node.value.decode()


def commit_one(b: rollbridge.Bridge, stream: str, value: bytes) -> rollbridge.CommitResult:
    with b.transaction(stream) as txn:
        txn.write(stream, key=value, value=value)
    return txn.commit()


def fair_groups(scope: str) -> list[GroupName]:
    """Six groups, of which each of the two coordinators is the first choice for three."""
    found: dict[str | None, list[GroupName]] = {"one": [], "two": []}
    for number in itertools.count():
        group = GroupName(scope, f"g{number}")
        found[first_choice(group, ["one", "two"])].append(group)
        if min(len(groups) for groups in found.values()) >= 3:
            return [*found["one"][:3], *found["two"][:3]]
    raise AssertionError("unreachable")


def test_a_group_moves_to_its_first_choice_when_that_arrives(
    cluster: AnyCluster, root: str, session: ZooKeeperSession, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("moves")
    groups = fair_groups(scope)
    with coordinator(cluster, root, "one", tmp_path), patient_client(cluster, root) as b:
        for number, group in enumerate(groups):
            b.admin.create_stream(f"{scope}/s{number}", group=group.group)
        assert {leader(session, group) for group in groups} == {"one"}
        with coordinator(cluster, root, "two", tmp_path):
            until(lambda: {leader(session, group) for group in groups} == {"one", "two"})
            for number in range(len(groups)):
                assert commit_one(b, f"{scope}/s{number}", b"during").records == 1
        until(lambda: {leader(session, group) for group in groups} == {"one"})


def test_a_paused_leader_that_comes_back_changes_nothing(
    cluster: AnyCluster, root: str, session: ZooKeeperSession, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    stream = f"{unique_name('paused')}/s"
    group = GroupName(stream.split("/")[0])
    with coordinator(cluster, root, "old", tmp_path) as old, patient_client(cluster, root) as b:
        b.admin.create_stream(stream, segments=2)
        long = b.begin(stream)
        long.write(stream, key=b"long", value=b"long")
        results = [commit_one(b, stream, b"before")]
        pause(old)
        with coordinator(cluster, root, "new", tmp_path):
            results.append(commit_one(b, stream, b"meanwhile"))
            taken = controller_epoch(session, group)
            assert leader(session, group) == "new"
            os.kill(old.pid, signal.SIGCONT)
            until(lambda: has_lost_the_lead((tmp_path / "old.log").read_text()))
            results.append(commit_one(b, stream, b"after"))
            results.append(long.commit())
            assert controller_epoch(session, group) >= taken
        positions = [result.position for result in results]
        assert positions == sorted(set(positions))


def test_a_leader_that_is_cut_off_from_zookeeper_is_replaced_and_changes_nothing(
    cluster: AnyCluster, root: str, session: ZooKeeperSession, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    stream = f"{unique_name('apart')}/s"
    group = GroupName(stream.split("/")[0])
    with (
        Link(cluster.zookeeper) as link,
        coordinator(cluster, root, "old", tmp_path, zookeeper=link.address),
        patient_client(cluster, root) as b,
    ):
        b.admin.create_stream(stream, segments=2)
        long = b.begin(stream)
        long.write(stream, key=b"long", value=b"long")
        results = [commit_one(b, stream, b"before")]
        link.cut()
        with coordinator(cluster, root, "new", tmp_path):
            until(lambda: leader(session, group) == "new")
            results.append(commit_one(b, stream, b"meanwhile"))
            link.heal()
            until(lambda: (tmp_path / "old.log").read_text().count("session=old state=connected") == 2)
            results.append(commit_one(b, stream, b"after"))
            results.append(long.commit())
        positions = [result.position for result in results]
        assert positions == sorted(set(positions))


def test_a_leader_that_is_cut_off_from_kafka_gives_way_until_it_is_back(
    root: str, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    with new_cluster() as own, faults.linked(own) as link:
        scope = next(
            scope
            for scope in (unique_name("cut") for _ in range(99))
            if first_choice(GroupName(scope), ["one", "two"]) == "one"
        )
        stream, group = f"{scope}/s", GroupName(scope)
        with (
            coordinator(own, root, "one", tmp_path, kafka=link.address),
            coordinator(own, root, "two", tmp_path),
            patient_client(own, root) as b,
            ZooKeeperSession(own.zookeeper, root=root) as session,
        ):
            until(lambda: len(session.children(paths.COORDINATORS)) == 2)
            b.admin.create_stream(stream, segments=2)
            until(lambda: leader(session, group) == "one")
            results = [commit_one(b, stream, b"before")]
            link.cut()
            until(lambda: leader(session, group) == "two")
            results += [commit_one(b, stream, b"meanwhile %d" % number) for number in range(3)]
            assert leader(session, group) == "two", "it does not give way to one that Kafka does not answer"
            link.heal()
            until(lambda: leader(session, group) == "one")
            results.append(commit_one(b, stream, b"after"))
            positions = [result.position for result in results]
            assert positions == sorted(set(positions))
