"""Programs that are not ours read and write the segments: kcat, and the command-line clients of Kafka itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import rollbridge
from integration_tests.clients import Site, adopt
from integration_tests.grown_streams import KEYS, grow, write
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.names import GroupName, StreamName, segment_topic_pattern
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java

CONSUMER = "org.apache.kafka.tools.consumer.ConsoleConsumer"
PRODUCER = "org.apache.kafka.tools.ConsoleProducer"
COMMITTED = ["-X", "isolation.level=read_committed"]
TRANSACTIONS = "org.apache.kafka.tools.TransactionsCommand"

needs_kcat = pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed (Debian: kcat)")


class Programs:
    """Runs the programs against one cluster."""

    def __init__(self, site: Site, scratch: Path) -> None:
        self._servers = site.cluster.bootstrap_servers
        self._scratch = scratch

    def kcat(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """kcat; its librdkafka is older than ours."""
        command = ["kcat", "-b", self._servers, *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, timeout=180, check=False)

    def create_topic(self, topic: str, partitions: int) -> None:
        """Create a plain topic with the brokers' settings."""
        KafkaClient(self._servers).topics.create_topics([TopicSpec(name=topic, partitions=partitions)])

    def kafka(self, main: str, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """A program of Apache Kafka."""
        classpath = os.pathsep.join(map(str, JarCache.default().ensure("kafka", "tools", quiet=True)))
        command = [find_java().executable, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-cp", classpath]
        return subprocess.run(
            [*command, main, "--bootstrap-server", self._servers, *arguments],
            input=stdin,
            capture_output=True,
            timeout=120,
            check=False,
            cwd=self._scratch,
        )


@pytest.fixture
def programs(site: Site, tmp_path: Path) -> Programs:
    return Programs(site, tmp_path)


def topic_of(stream: str, number: int, epoch: int = 0) -> str:
    return StreamName.parse(stream).segment_topic(rollbridge.SegmentId.of(number, epoch))


def seen(client: rollbridge.Bridge, stream: str) -> list[tuple[bytes | None, bytes | None]]:
    with client.reader(stream, follow=False) as reader:
        return [(record.key, record.value) for record in reader]


@needs_kcat
def test_kcat_reads_what_is_committed_and_nothing_else(
    client: rollbridge.Bridge, orders: str, programs: Programs
) -> None:
    expected = Counter(grow(client, orders) * len(KEYS))
    open_one = client.begin(orders)
    open_one.write(orders, key=b"k", value=b"open")
    open_one.flush()
    history = client.admin.history(orders)
    found: Counter[bytes] = Counter()
    for segment in history.segments():
        topic = StreamName.parse(orders).segment_topic(segment)
        read = programs.kcat("-C", "-t", topic, "-o", "beginning", "-e", "-q", "-X", "isolation.level=read_committed")
        assert read.returncode == 0, read.stderr
        found.update(read.stdout.splitlines())
    assert found == expected
    open_one.abort()


@needs_kcat
def test_what_kcat_writes_is_read_and_a_sealed_segment_refuses_it(
    client: rollbridge.Bridge, orders: str, programs: Programs
) -> None:
    assert programs.kcat("-P", "-t", topic_of(orders, 0), "-K:", stdin=b"a:1\na:2\n").returncode == 0
    write(client, orders, b"x")
    assert programs.kcat("-P", "-t", topic_of(orders, 0), "-K:", "-H", "h=v", stdin=b"a:3\n").returncode == 0
    assert [value for key, value in seen(client, orders) if key == b"a"] == [b"1", b"2", b"3"]
    with client.reader(orders, follow=False) as reader:
        plain = [record for record in reader if record.key == b"a"]
    assert [record.transaction_id for record in plain] == [None] * 3
    assert plain[2].headers == [("h", b"v")]
    assert [record.sn.sequence_id for record in plain if record.sn] == [record.offset for record in plain]
    client.admin.scale(orders, seal=[0], ranges=[(0.0, 0.5)])
    before = Counter(seen(client, orders))
    refused = programs.kcat("-P", "-t", topic_of(orders, 0), "-K:", stdin=b"a:4\n")
    assert refused.returncode != 0
    assert b"Message size too large" in refused.stderr
    assert programs.kcat("-P", "-t", topic_of(orders, 2, 1), "-K:", stdin=b"a:5\n").returncode == 0
    # Segments take turns as they come; the records of a key keep their order across scales.
    after = seen(client, orders)
    assert Counter(after) == before + Counter([(b"a", b"5")])
    assert [value for key, value in after if key == b"a"] == [b"1", b"2", b"3", b"5"]


def test_kafkas_own_consumer_reads_a_stream_by_pattern(
    client: rollbridge.Bridge, orders: str, programs: Programs
) -> None:
    expected = Counter(grow(client, orders) * len(KEYS))
    pattern = segment_topic_pattern(StreamName.parse(orders))
    options = ["--from-beginning", "--isolation-level", "read_committed", "--max-messages", str(expected.total())]
    read = programs.kafka(CONSUMER, "--include", pattern, *options, "--timeout-ms", "60000")
    assert Counter(read.stdout.splitlines()) == expected, read.stderr


@pytest.mark.long
def test_what_kafkas_own_producer_writes_is_read_and_a_sealed_segment_refuses_it(
    client: rollbridge.Bridge, orders: str, programs: Programs
) -> None:
    keyed = ["--reader-property", "parse.key=true", "--reader-property", "key.separator=:"]
    done = programs.kafka(PRODUCER, "--topic", topic_of(orders, 1), *keyed, stdin=b"a:1\nb:2\n")
    assert done.returncode == 0, done.stderr
    assert seen(client, orders) == [(b"a", b"1"), (b"b", b"2")]
    client.admin.scale(orders, seal=[1], ranges=[(0.5, 1.0)])
    refused = programs.kafka(PRODUCER, "--topic", topic_of(orders, 1), "--sync", *keyed, stdin=b"a:3\n")
    assert refused.returncode != 0
    assert re.search(rb"RecordTooLargeException|MESSAGE_TOO_LARGE|larger than", refused.stdout + refused.stderr)
    assert seen(client, orders) == [(b"a", b"1"), (b"b", b"2")]


@pytest.mark.long
def test_kafkas_own_command_sees_the_leaders_transactions_and_none_that_hangs(
    client: rollbridge.Bridge, orders: str, programs: Programs
) -> None:
    open_one = client.begin(orders)
    open_one.write(orders, key=b"k", value=b"open")
    open_one.flush()
    write(client, orders, b"x")
    group = GroupName(StreamName.parse(orders).scope)
    listed = programs.kafka(TRANSACTIONS, "list").stdout.decode()
    states = {line.split()[0]: line.split()[-1] for line in listed.splitlines() if line.startswith("rollbridge.")}
    own = {states[group.transactional_id(number)] for number in range(3)}
    assert own <= {"Empty", "CompleteCommit", "CompleteAbort", "PrepareCommit"}, listed
    hanging = programs.kafka(TRANSACTIONS, "find-hanging", "--topic", topic_of(orders, 0))
    assert hanging.returncode == 0, hanging.stderr
    assert len(hanging.stdout.splitlines()) <= 1, "only the heading is expected"
    producers = programs.kafka(TRANSACTIONS, "describe-producers", "--topic", topic_of(orders, 0), "--partition", "0")
    assert producers.returncode == 0, producers.stderr
    open_one.abort()


ADOPTED_PARTITIONS = 3
KEYED = ["--reader-property", "parse.key=true", "--reader-property", "key.separator=:"]


def lines_of(prefix: str, count: int = 60) -> bytes:
    """Lines for a producer: keys and values."""
    return b"".join(b"key-%d:%s-%d\n" % (number % 20, prefix.encode(), number) for number in range(count))


@pytest.mark.long
@needs_kcat
def test_kcat_and_kafkas_own_clients_use_a_topic_before_it_is_adopted_then_and_after_its_release(
    client: rollbridge.Bridge, unique_name: Callable[[str], str], programs: Programs
) -> None:
    topic = unique_name("orders")
    programs.create_topic(topic, ADOPTED_PARTITIONS)
    expected: Counter[tuple[bytes, bytes]] = Counter()

    def java(prefix: str) -> None:
        assert programs.kafka(PRODUCER, "--topic", topic, *KEYED, stdin=lines_of(prefix)).returncode == 0
        expected.update(pairs_of(lines_of(prefix)))

    def kcat(prefix: str) -> None:
        done = programs.kcat("-P", "-t", topic, "-K:", "-X", "partitioner=murmur2_random", stdin=lines_of(prefix))
        assert done.returncode == 0, done.stderr
        expected.update(pairs_of(lines_of(prefix)))

    def check() -> None:
        places: dict[bytes, set[bytes]] = {}
        read = programs.kcat("-C", "-t", topic, "-o", "beginning", "-e", "-q", "-f", "%p %k:%s\n", *COMMITTED)
        seen = [line.split(b" ", 1) for line in read.stdout.splitlines()]
        assert Counter(pairs_of(b"\n".join(line for _, line in seen))) == expected, read.stderr
        for partition, line in seen:
            places.setdefault(line.split(b":")[0], set()).add(partition)
        assert all(len(item) == 1 for item in places.values()), "a key is in one partition, whoever has written it"
        options = ["--from-beginning", "--isolation-level", "read_committed", "--max-messages", str(expected.total())]
        shown = ["--formatter-property", "print.key=true", "--formatter-property", "key.separator=:"]
        read = programs.kafka(CONSUMER, "--topic", topic, *options, *shown, "--timeout-ms", "60000")
        assert Counter(pairs_of(read.stdout)) == expected, read.stderr

    java("java")
    check()
    adoption = adopt(client, topic)
    assert adoption.config.partitioner == "murmur2", "as the keys that a Java producer has written show"
    with client.transaction(topic) as transaction:
        for key, value in pairs_of(lines_of("ours")):
            transaction.write(topic, key, value)
        transaction.flush()
        java("java-beside")
        kcat("kcat-beside")
        check()
    expected.update(pairs_of(lines_of("ours")))
    check()
    client.admin.release_topic(topic)
    kcat("kcat-after")
    check()


def pairs_of(lines: bytes) -> list[tuple[bytes, bytes]]:
    """Keys and values of lines."""
    return [(key, value) for key, _, value in (line.partition(b":") for line in lines.splitlines())]
