"""What every backend promises, held against each of them: faults of single servers, data and addresses that stay."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import TopicPartition

import rollbridge
from integration_tests.backends import faults
from integration_tests.backends.interface import AnyCluster
from integration_tests.kafka_tools import produce, read_all
from integration_tests.patience import eventually
from rollbridge.doctor import probes
from rollbridge.errors import NotFoundError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge.metadata.session import ZooKeeperSession

QUICK = {"ROLLBRIDGE_COORDINATOR_SESSION_TIMEOUT_S": "1"}
"""Coordinators are missed soon."""


@pytest.fixture(params=["cluster", pytest.param("ensemble", marks=[pytest.mark.containers, pytest.mark.long])])
def servers(request: pytest.FixtureRequest) -> AnyCluster:
    """Those that all tests share, and three of each kind in containers."""
    found: AnyCluster = request.getfixturevalue(request.param)
    return found


def test_servers_are_who_they_say(servers: AnyCluster) -> None:
    assert len(servers.bootstrap_servers.split(",")) == len(servers.brokers)
    for address in servers.bootstrap_servers.split(","):
        assert probes.kafka_cluster_id(address) == servers.kafka_cluster_id
    modes = [probes.zookeeper_mode(address) for address in servers.zookeeper.split(",")]
    alone = ["standalone"] if len(servers.zookeepers) == 1 else ["follower", "follower", "leader"]
    assert sorted(map(str, modes)) == alone


@pytest.mark.long
@pytest.mark.parametrize("how", ["gracefully", "at once", "dead before"])
def test_a_broker_comes_back_with_its_data_under_its_address(servers: AnyCluster, topic_prefix: str, how: str) -> None:
    # As many replicas as there are brokers: the one that is away misses a record.
    KafkaClient(servers.bootstrap_servers).topics.create_topics([TopicSpec(name=topic_prefix)])
    produce(servers.bootstrap_servers, topic_prefix, [b"1", b"2"])
    addresses, part = servers.bootstrap_servers, servers.brokers[-1]
    if how == "dead before":
        servers.kill(part)
        with pytest.raises(NotFoundError, match=part):
            servers.kill(part)
    servers.restart(part, gracefully=how == "gracefully")
    assert servers.bootstrap_servers == addresses
    produce(addresses, topic_prefix, [b"3"])
    assert read_all(addresses.split(",")[-1], TopicPartition(topic_prefix, 0)) == [b"1", b"2", b"3"]


def test_zookeeper_comes_back_with_its_data(servers: AnyCluster, unique_name: Callable[[str], str]) -> None:
    with ZooKeeperSession(servers.zookeeper, root=f"/{unique_name('contract')}") as session:
        session.ensure("/kept", b"1")
        with faults.killed(servers, servers.zookeepers[-1]):
            assert probes.zookeeper_mode(servers.zookeeper.split(",")[-1]) is None
        node = session.get("/kept")
        assert node is not None
        assert node.value == b"1"


@pytest.mark.parametrize("how", ["paused", "stopped"])
def test_who_stands_still_keeps_its_connections_and_does_not_answer(servers: AnyCluster, how: str) -> None:
    address, part = servers.zookeeper.split(",")[0], servers.zookeepers[0]
    with servers.paused(part) if how == "paused" else faults.stopped(servers, part):
        assert probes.accepts(address)
        assert probes.zookeeper_mode(address) is None
    eventually(lambda: probes.zookeeper_mode(address) is not None, "it answers again")


def test_faults_for_a_part_that_does_not_run_are_refused(servers: AnyCluster) -> None:
    with pytest.raises(NotFoundError, match="coordinator-99 does not run"):
        servers.kill("coordinator-99")


def test_coordinators_come_and_go(servers: AnyCluster) -> None:
    first, second = servers.start_coordinator(env=QUICK), servers.start_coordinator(env=QUICK)
    try:
        assert first.name != second.name
        registered = probes.registered_coordinators(servers.zookeeper)
        assert registered is not None
        assert len(registered) >= 2
        servers.kill_coordinator(first)
        assert first.wait_exit(10) == -signal.SIGKILL
        assert [first.alive, second.alive] == [False, True]
        servers.kill_coordinator(first)
        servers.restart(first.name)
        servers.kill(first.name)
    finally:
        servers.stop_coordinator(second)
    assert not second.alive


@pytest.mark.long
def test_a_coordinator_ends_at_its_crash_point_and_another_one_goes_on(
    servers: AnyCluster, unique_name: Callable[[str], str]
) -> None:
    doomed = servers.start_coordinator(env=QUICK, crash_at="create_stream/CreateTopics:after")
    with (
        ThreadPoolExecutor(1) as asking,
        rollbridge.connect(servers.bootstrap_servers, zookeeper=servers.zookeeper) as client,
    ):
        stream = f"{unique_name('crash')}/s"
        asked = asking.submit(client.admin.create_stream, stream)
        assert doomed.wait_exit(60) == -signal.SIGKILL
        second = servers.start_coordinator(env=QUICK)
        asked.result(60)
        with client.transaction(stream) as transaction:
            transaction.write(stream, key=b"k", value=b"v")
        assert transaction.commit().records == 1
    servers.stop_coordinator(second)
