"""The library of faults: each does what it says, and leaves everything as it was."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

import rollbridge
from integration_tests.backends import faults
from integration_tests.backends.container_nodes import INSIDE
from integration_tests.backends.containers import ContainerCluster
from integration_tests.backends.interface import Ability, Unsupported
from integration_tests.containers.partitions import PARTITIONS, address_of, in_sync, partitions_of, topic
from integration_tests.images import KAFKA
from integration_tests.kafka_tools import produce, read_all
from integration_tests.patience import eventually
from rollbridge.doctor import probes
from rollbridge.errors import KafkaUnavailableError, NotFoundError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.topics import TopicSpec

__all__ = ["topic"]

pytestmark = [pytest.mark.containers, pytest.mark.long]

TOPICS = "/opt/kafka/bin/kafka-topics.sh"
DAY_S = 86_400


def leaders(cluster: ContainerCluster, topic: str, asked: str) -> set[int]:
    """Who leads the partitions of a topic, as one broker says."""
    return {partition.leader for partition in partitions_of(cluster, topic, asked).values()}


@pytest.mark.needs(Ability.PARTITION)
def test_a_broker_that_is_cut_off_from_the_others_leads_nothing_until_it_is_back(
    ensemble: ContainerCluster, topic: str
) -> None:
    *others, cut = ensemble.brokers
    number = len(ensemble.brokers)
    with faults.partitioned(ensemble, cut, others):
        eventually(lambda: number not in leaders(ensemble, topic, others[0]), "the others lead everything")
        produce(",".join(address_of(ensemble, other) for other in others), topic, [b"meanwhile"])
    eventually(lambda: in_sync(ensemble, topic), "it has caught up")
    # Its first answers may be of before the cut: who asks it may be told of a leader that it no longer is.
    place = TopicPartition(topic, 0)
    eventually(lambda: read_all(address_of(ensemble, cut), place) == [b"meanwhile"], "it shows what it has missed")


@pytest.mark.needs(Ability.PARTITION)
def test_a_broker_that_clients_of_this_machine_can_not_reach_goes_on_for_the_others(
    ensemble: ContainerCluster, topic: str
) -> None:
    cut, *others = ensemble.brokers
    with faults.partitioned(ensemble, cut, faults.HOST):
        assert probes.kafka_cluster_id(address_of(ensemble, cut)) is None
        assert 1 in leaders(ensemble, topic, others[0])
        said = ensemble.run(KAFKA, ["--bootstrap-server", f"{cut}:{INSIDE}", "--list"], entrypoint=TOPICS)
        assert topic.encode() in said.out.splitlines(), said.err.decode()
    eventually(lambda: probes.kafka_cluster_id(address_of(ensemble, cut)) is not None, "it is reached again")


@pytest.mark.needs(Ability.PARTITION)
def test_what_is_cut_one_way_goes_the_other_way(ensemble: ContainerCluster, topic: str) -> None:
    mute, deaf, _ = ensemble.brokers
    with (
        faults.silenced(ensemble, mute, deaf),
        counted(ensemble, mute, sender=deaf) as arrives,
        counted(ensemble, deaf, sender=mute) as is_lost,
    ):
        # They follow each other's logs, so both send all the time.
        eventually(lambda: arrives() > 3, "the deaf one is heard")
        assert is_lost() == 0
    eventually(lambda: in_sync(ensemble, topic), "they have come together again")


@contextmanager
def counted(cluster: ContainerCluster, receiver: str, sender: str) -> Iterator[Callable[[], int]]:
    """How many packets of another one have arrived since the beginning of the block."""
    rule = f"INPUT -s {cluster.node(sender).address_inside()}"
    cluster.in_network_of(receiver, f"iptables -w -I {rule}")
    yield lambda: int(cluster.in_network_of(receiver, "iptables -w -v -n -x -L INPUT 1").split()[0])
    cluster.in_network_of(receiver, f"iptables -w -D {rule}")


def commit(client: rollbridge.Bridge, stream: str) -> int:
    """One small transaction; its position on the commit log."""
    with client.transaction(stream) as transaction:
        transaction.write(stream, key=b"k", value=b"v")
    return transaction.commit().position


@pytest.mark.needs(Ability.LOSS)
def test_packets_are_lost_and_nothing_else_is(ensemble: ContainerCluster, topic: str) -> None:
    victim = ensemble.brokers[partitions_of(ensemble, topic)[0].leader - 1]
    written: list[bytes] = []

    def some_lost() -> bool:
        values = [b"%d" % (len(written) + number) for number in range(200)]
        produce(ensemble.bootstrap_servers, topic, values)
        written.extend(values)
        return int(ensemble.in_network_of(victim, "iptables -w -v -n -x -L INPUT 1").split()[0]) > 0

    with faults.lossy(ensemble, victim, 0.2):
        eventually(some_lost, "packets are lost")
    assert read_all(ensemble.bootstrap_servers, TopicPartition(topic, 0)) == written
    assert "statistic" not in ensemble.in_network_of(victim, "iptables -w -n -L INPUT")


@pytest.mark.needs(Ability.BANDWIDTH)
def test_a_thin_pipe_makes_packets_wait(ensemble: ContainerCluster, topic: str) -> None:
    victim = ensemble.brokers[partitions_of(ensemble, topic)[0].leader - 1]
    with faults.narrowed(ensemble, victim, kbit_per_s=2000):
        produce(ensemble.bootstrap_servers, topic, [bytes(100_000)] * 3)
        assert len(read_all(ensemble.bootstrap_servers, TopicPartition(topic, 0))) == 3
        counted = ensemble.in_network_of(victim, "tc -s qdisc show dev eth0")
    found = re.search(r"overlimits (\d+)", counted)
    assert found is not None, counted
    assert int(found[1]) > 0, "nothing had to wait"
    assert "tbf" not in ensemble.in_network_of(victim, "tc qdisc show dev eth0")


@pytest.mark.needs(Ability.DISK_FULL)
def test_a_broker_whose_disk_is_full_is_missed_by_nobody_and_catches_up(ensemble: ContainerCluster, topic: str) -> None:
    part = ensemble.brokers[-1]
    others = ",".join(address_of(ensemble, broker) for broker in ensemble.brokers[:-1])
    acknowledged: list[bytes] = []

    def gone() -> bool:
        value = b"%d" % len(acknowledged)
        produce(others, topic, [value.ljust(100_000)])
        acknowledged.append(value)
        return ensemble.node(part).status_now() == "exited"

    with faults.full_disk(ensemble, part):
        eventually(gone, "the broker ends, as it cannot write")
    ensemble.restart(part)
    eventually(lambda: in_sync(ensemble, topic), "it has caught up")
    found = read_all(ensemble.bootstrap_servers, TopicPartition(topic, 0))
    assert [(value or b"").rstrip() for value in found] == acknowledged


def test_a_container_that_is_made_anew_has_its_data(ensemble: ContainerCluster, topic: str) -> None:
    produce(ensemble.bootstrap_servers, topic, [b"1"])
    node = ensemble.node(ensemble.brokers[0])
    before = node.container.id
    node.stop()
    node.anew()
    assert node.container.id != before
    eventually(lambda: in_sync(ensemble, topic), "all replicas are there")
    assert read_all(ensemble.bootstrap_servers, TopicPartition(topic, 0)) == [b"1"]


@pytest.mark.needs(Ability.CLOCK)
def test_the_clock_of_a_coordinator_is_set_and_ends_no_lease(
    ensemble: ContainerCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    root, stream = f"/{unique_name('clock')}", f"{unique_name('clock')}/s"
    name = unique_name("clocked")
    with (
        ensemble.clocked_coordinator(root, name, tmp_path) as clock,
        rollbridge.connect(ensemble.bootstrap_servers, zookeeper=ensemble.zookeeper, zookeeper_root=root) as client,
    ):
        client.admin.create_stream(stream)
        long = client.begin(stream)
        long.write(stream, key=b"k", value=b"long")
        long.flush()
        positions = []
        for jump_s in (400 * DAY_S, -400 * DAY_S, 0):
            clock.set(jump_s)
            positions.append(commit(client, stream))
        positions.append(long.commit().position)
    assert positions == sorted(set(positions))


@pytest.mark.needs(Ability.SERVER_CLOCK)
def test_a_broker_whose_clock_is_off_serves_as_before(ensemble: ContainerCluster, topic: str) -> None:
    victim, ahead_s = ensemble.brokers[0], 2 * DAY_S
    produce(ensemble.bootstrap_servers, topic, [b"before"])
    with faults.clock_off(ensemble, victim, ahead_s):
        told = ensemble.node(victim).container.exec_run(["date", "+%s"])
        assert abs(int(told.output) - time.time() - ahead_s) < DAY_S / 2
        eventually(lambda: in_sync(ensemble, topic), "all replicas are there")
        produce(address_of(ensemble, victim), topic, [b"meanwhile"])
    eventually(lambda: in_sync(ensemble, topic), "all replicas are there")
    assert read_all(ensemble.bootstrap_servers, TopicPartition(topic, 0)) == [b"before", b"meanwhile"]


def test_a_disk_without_a_limit_cannot_be_filled(ensemble: ContainerCluster) -> None:
    with pytest.raises(Unsupported, match="no limit"), faults.full_disk(ensemble, ensemble.brokers[0]):
        raise AssertionError("it was not refused")


def test_offsets_of_a_partition_whose_broker_is_away_are_waited_for(
    ensemble: ContainerCluster, unique_name: Callable[[str], str]
) -> None:
    broker = ensemble.brokers[-1]
    topic = unique_name("alone")
    admin = KafkaClient(ensemble.bootstrap_servers).topics
    admin.create_topics([TopicSpec(name=topic, partitions=PARTITIONS, replication_factor=1)])
    number = len(ensemble.brokers)
    alone = next(item for item, known in partitions_of(ensemble, topic).items() if known.leader == number)
    impatient, patient = (
        KafkaClient(ensemble.bootstrap_servers, timeout_s=timeout_s).offsets for timeout_s in (1, 120)
    )
    ensemble.node(broker).kill()
    with ThreadPoolExecutor() as pool:
        try:
            eventually(lambda: partitions_of(ensemble, topic)[alone].leader == -1, "its partition has no leader")
            with pytest.raises(KafkaUnavailableError, match=r"cannot read the end .*within 1 s"):
                impatient.end([(topic, alone)], Isolation.READ_UNCOMMITTED)
            waiting = pool.submit(lambda: patient.end([(topic, alone)], Isolation.READ_UNCOMMITTED))
        finally:
            ensemble.restart(broker)
        assert waiting.result(120) == {(topic, alone): 0}
    with pytest.raises(NotFoundError):
        patient.end([(topic, PARTITIONS)], Isolation.READ_UNCOMMITTED)
    with pytest.raises(NotFoundError):
        patient.end([f"{topic}-not"], Isolation.READ_UNCOMMITTED)
