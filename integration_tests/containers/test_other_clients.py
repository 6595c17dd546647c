"""Programs that are not ours, and ours as a client, from their images, in the network of the servers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

import rollbridge
from integration_tests.backends.containers import ContainerCluster, Said
from integration_tests.images import COORDINATOR, KAFKA
from rollbridge.stream.names import StreamName, segment_topic_pattern

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = "/others"
TOOLS = "/opt/kafka/bin"

pytestmark = [pytest.mark.containers, pytest.mark.long]


@pytest.fixture(scope="module")
def client(ensemble: ContainerCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rollbridge.Bridge]:
    logs = tmp_path_factory.mktemp("logs")
    with (
        ensemble.coordinator(ROOT, "others", logs, {}),
        rollbridge.connect(ensemble.bootstrap_servers, zookeeper=ensemble.zookeeper, zookeeper_root=ROOT) as connected,
    ):
        yield connected


@pytest.fixture
def stream(client: rollbridge.Bridge, unique_name: Callable[[str], str]) -> str:
    """A stream that was scaled, with records of ended transactions and of one that is open."""
    name = f"{unique_name('others')}/s"
    client.admin.create_stream(name, segments=2)
    for number in range(3):
        if number == 1:
            client.admin.scale(name, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
        with client.transaction(name) as transaction:
            for key in range(10):
                transaction.write(name, key=b"%d" % key, value=b"%d-%d" % (number, key))
    for text in (b"aborted", b"open"):
        left = client.begin(name)
        left.write(name, key=b"k", value=text)
        left.flush()
        if text == b"aborted":
            left.abort()
    return name


EXPECTED = sorted(b"%d-%d" % (number, key) for number in range(3) for key in range(10))


def kafka_tool(cluster: ContainerCluster, tool: str, *arguments: str) -> Said:
    """A program of Kafka's image, against the brokers of its network."""
    command = ["--bootstrap-server", cluster.bootstrap_servers_inside, *arguments]
    return cluster.run(KAFKA, command, entrypoint=f"{TOOLS}/{tool}")


def test_kafkas_console_consumer_reads_what_is_committed(ensemble: ContainerCluster, stream: str) -> None:
    read = kafka_tool(
        ensemble,
        "kafka-console-consumer.sh",
        "--include",
        segment_topic_pattern(StreamName.parse(stream)),
        "--from-beginning",
        "--isolation-level",
        "read_committed",
        "--max-messages",
        str(len(EXPECTED)),
        "--timeout-ms",
        "60000",
    )
    assert sorted(read.out.splitlines()) == EXPECTED, read.err.decode()


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed (Debian: kcat)")
def test_kcat_reads_what_is_committed(ensemble: ContainerCluster, client: rollbridge.Bridge, stream: str) -> None:
    found: list[bytes] = []
    for segment in client.admin.history(stream).segments():
        topic = StreamName.parse(stream).segment_topic(segment)
        options = ["-C", "-t", topic, "-o", "beginning", "-e", "-q", "-X", "isolation.level=read_committed"]
        command = ["kcat", "-b", ensemble.bootstrap_servers, *options]
        found += subprocess.run(command, capture_output=True, timeout=180, check=True).stdout.splitlines()
    assert sorted(found) == EXPECTED


def test_spark_reads_what_is_committed(ensemble: ContainerCluster, stream: str, spark: SparkSession) -> None:
    where = {
        "kafka.bootstrap.servers": ensemble.bootstrap_servers,
        "subscribePattern": segment_topic_pattern(StreamName.parse(stream)),
        "kafka.isolation.level": "read_committed",
        "startingOffsets": "earliest",
    }
    rows = spark.read.format("kafka").options(**where).load().select("value").collect()
    assert sorted(bytes(row.value) for row in rows) == EXPECTED


def test_our_command_line_reads_what_is_committed(ensemble: ContainerCluster, stream: str) -> None:
    where = ensemble.connection_inside(ROOT)
    read = ensemble.run(COORDINATOR, ["consume", stream, "--format", "{value}"], environment=where)
    assert read.code == 0, read.err.decode()
    assert sorted(read.out.splitlines()) == EXPECTED
