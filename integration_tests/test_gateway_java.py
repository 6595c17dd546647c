"""Kafka's own Java producer, 4.2, at a gateway: transactions v2, a commit as Flink recovers, and several gateways."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import rollbridge
from integration_tests.clients import Site, adopt, read_committed
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import eventually
from integration_tests.test_gateway_librdkafka import keys_in_order, topic_of, values
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java
from rollbridge_devcluster.programs import program_command

SOURCE = Path(__file__).parent / "java" / "TransactionalProducer.java"
WAIT_S = 300


class Java:
    """Programs on Kafka's jars."""

    def __init__(self) -> None:
        self._jars = JarCache.default().ensure("kafka", "tools", quiet=True)

    def start(self, log: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start ``TransactionalProducer``, which writes to a file."""
        with log.open("w") as output:
            command = [*program_command(SOURCE, self._jars), *arguments]
            return subprocess.Popen(command, stdout=output, stderr=output, text=True)

    def run(self, program: str, *arguments: str) -> str:
        """Run a program to its end, and return what it printed."""
        if program == SOURCE.stem:
            command = program_command(SOURCE, self._jars)
        else:
            command = [find_java().executable, "-Xmx256m", "-cp", os.pathsep.join(map(str, self._jars)), program]
        done = subprocess.run(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT_S
        )
        return done.stdout


@pytest.fixture(scope="module")
def java() -> Java:
    """The programs of this module."""
    return Java()


@pytest.fixture(scope="module")
def servers(site: Site) -> Servers:
    """The servers of this module."""
    return Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)


@pytest.fixture(scope="module")
def gateway(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway for the tests of this module."""
    with GatewayProcess(servers, "gateway-java", tmp_path_factory.mktemp("gateways")) as process:
        yield process


def pairs(output: str) -> list[tuple[int, int]]:
    """Producer ids and epochs in what the program printed."""
    return [(int(pid), int(epoch)) for pid, epoch in re.findall(r"producerId=(\d+), epoch=(\d+)", output)]


def test_each_transaction_has_an_epoch_of_its_own(site: Site, gateway: GatewayProcess, java: Java, orders: str) -> None:
    said = java.run("TransactionalProducer", gateway.address, topic_of(orders), "java v2", "500", "commit", "3", "lz4")
    assert said.count("ended") == 3, said
    seen = pairs(said)
    assert len({pid for pid, _ in seen}) == 1
    assert [epoch for _, epoch in seen] == [0, 1, 1, 2, 2, 3], "each end was answered with the next pair"
    said = java.run("TransactionalProducer", gateway.address, topic_of(orders), "java v2", "500", "abort", "2")
    assert said.count("ended") == 2, said
    found = site.committed(orders)
    assert values(found) == Counter(f"java v2-{number}-{i}".encode() for number in range(3) for i in range(500))


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_its_partitions_hold_on_an_adopted_topic(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, java: Java, topic_prefix: str, codec: str
) -> None:
    topic = f"{topic_prefix[:100]}.adopted"
    create_topic(site.cluster.bootstrap_servers, topic, 3)
    adopt(client, topic)
    said = java.run("TransactionalProducer", gateway.address, topic, f"id-{topic}", "2000", "commit", "1", codec)
    assert said.count("ended") == 1, said
    found = read_committed(site.cluster.bootstrap_servers, [topic], partitions=3)
    assert values(found) == Counter(f"id-{topic}-0-{i}".encode() for i in range(2_000))
    assert keys_in_order(found)
    places = {message.key(): message.partition() for message in found}
    assert all(places[message.key()] == message.partition() for message in found)


def test_a_commit_as_flink_recovers(
    site: Site, servers: Servers, java: Java, tmp_path: Path, orders: str, unique_name: Callable[[str], str]
) -> None:
    """The producer is gone and so is its gateway; another process commits by producer id and epoch, twice."""
    name = unique_name("flink")
    with GatewayProcess(servers, unique_name("gateway"), tmp_path) as first:
        said = java.run("TransactionalProducer", first.address, topic_of(orders), name, "1000", "halt")
        assert "flushed" in said, said
        first.kill()
    (pid, epoch) = pairs(said)[0]
    assert site.committed(orders) == []
    with GatewayProcess(servers, unique_name("gateway"), tmp_path) as second:
        for _ in range(2):
            how = f"resume:{pid}:{epoch}"
            said = java.run("TransactionalProducer", second.address, topic_of(orders), name, "0", how)
            assert "committed" in said, said
    assert values(site.committed(orders)) == Counter(f"{name}-0-{i}".encode() for i in range(1_000))


def test_a_producer_goes_on_through_another_gateway(
    site: Site, servers: Servers, java: Java, tmp_path: Path, orders: str, unique_name: Callable[[str], str]
) -> None:
    """Whichever of two gateways serves it is killed in the middle; the counts are exact."""
    name = unique_name("moved")
    with (
        GatewayProcess(servers, unique_name("gateway"), tmp_path) as one,
        GatewayProcess(servers, unique_name("gateway"), tmp_path) as other,
    ):
        log = tmp_path / "producer.log"
        both = f"{one.address},{other.address}"
        producer = java.start(log, both, topic_of(orders), name, "40000", "commit")
        try:
            eventually(lambda: "sent 9999" in log.read_text(), "the producer is at work")
            serving: list[GatewayProcess] = []

            def is_served() -> bool:
                serving[:] = [item for item in (one, other) if serves(item, producer.pid)]
                return len(serving) == 1

            eventually(is_served, "one of them serves it")
            serving[0].kill()
            assert producer.wait(WAIT_S) == 0, log.read_text()
        finally:
            producer.kill()
            producer.wait()
    assert log.read_text().count("ended") == 1, log.read_text()
    found = site.committed(orders)
    assert values(found) == Counter(f"{name}-0-{i}".encode() for i in range(40_000))
    assert keys_in_order(found)


def serves(gateway: GatewayProcess, pid: int) -> bool:
    """Return whether a process has a connection to the port of a gateway that stands for the broker."""
    return any(
        found.status == psutil.CONN_ESTABLISHED and found.raddr.port == gateway.port + 1
        for found in psutil.Process(pid).net_connections()
    )


def test_kafkas_own_tools(
    site: Site, gateway: GatewayProcess, java: Java, orders: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    """The perf test writes transactions, and ``kafka-transactions.sh`` lists and describes what is left open."""
    said = java.run(
        "org.apache.kafka.tools.ProducerPerformance",
        "--topic", topic_of(orders), "--num-records", "3000", "--record-size", "100", "--throughput", "-1",
        "--transactional-id", unique_name("perf"), "--transaction-duration-ms", "200",
        "--producer-props", f"bootstrap.servers={gateway.address}",
    )  # fmt: skip
    assert "3000 records sent" in said, said
    assert len(site.committed(orders)) == 3_000
    name = unique_name("left open")
    said = java.run("TransactionalProducer", gateway.address, topic_of(orders), name, "10", "halt")
    (pid, epoch) = pairs(said)[0]
    tool = ("org.apache.kafka.tools.TransactionsCommand", "--bootstrap-server", gateway.address)

    def is_listed() -> bool:
        return re.search(rf"{name}\s+\d+\s+{pid}\s+Ongoing", java.run(*tool, "list")) is not None

    eventually(is_listed, "the open transaction is listed")
    said = java.run(*tool, "describe", "--transactional-id", name)
    assert re.search(rf"{pid}\s+{epoch}\s+Ongoing", said), said
    said = java.run(*tool, "describe-producers", "--topic", topic_of(orders), "--partition", "0")
    assert str(pid) in said, said
