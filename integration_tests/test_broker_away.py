"""A broker or a ZooKeeper that is away: processes live on, groups go on, and calls keep their time-outs.

A broker that was stopped takes connections and answers nothing, which is the worst it can do to whoever waits.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, TopicPartition

import bridge
from bridge.errors import RollbridgeError
from integration_tests.backends.choice import new_cluster
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, until
from integration_tests.grown_streams import KEYS, write

MEMBERS = 3
AWAY_S = 5.0
"""Longer than the library's session with a broker survives being refused; what used to end its process."""
TIMEOUT_S = 1.5
SLOW_MACHINE_S = 5.0
"""What is promised is a second beyond the time-out; a machine that is busy with other tests gets more."""

MEMBER = """
import faulthandler, sys
import bridge
faulthandler.enable()
servers, zookeeper, root, group, stream = sys.argv[1:]
config = {"bootstrap.servers": servers, "zookeeper": zookeeper, "zookeeper.root": root, "group.id": group,
          "auto.offset.reset": "earliest", "auto.commit.interval.ms": 200}
with bridge.Consumer(config) as consumer:
    consumer.subscribe([stream])
    while True:
        for message in consumer.consume(100, 0.2):
            if message.error() is None:
                print(message.value().decode(), flush=True)
"""


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[AnyCluster]:
    """Servers that these tests may stop and kill."""
    with new_cluster() as cluster:
        yield cluster


@pytest.fixture
def own_site(own_cluster: AnyCluster, tmp_path: Path) -> Iterator[Site]:
    """A rollbridge on them."""
    with Site(own_cluster, f"/{tmp_path.name}", tmp_path) as site:
        yield site


@pytest.fixture
def stream(own_site: Site, unique_name: Callable[[str], str]) -> str:
    """A stream in which a transaction was committed already."""
    name = unique_name("scope") + "/orders"
    with own_site.connect() as client:
        client.admin.create_stream(name, segments=MEMBERS)
        write(client, name, b"before")
    return name


@dataclass
class Members:
    """Processes that poll, each a member of one group."""

    processes: list[subprocess.Popen[bytes]]
    notes: list[Path]

    def said(self, value: str) -> int:
        """How often a value has been handed out."""
        return sum(note.read_text().split().count(value) for note in self.notes)


@pytest.fixture
def members(own_site: Site, stream: str, tmp_path: Path, unique_name: Callable[[str], str]) -> Iterator[Members]:
    cluster, group = own_site.cluster, unique_name("group")
    found = Members([], [])
    with ExitStack() as files:
        try:
            for number in range(MEMBERS):
                note = tmp_path / f"member-{number}.out"
                out = files.enter_context(note.open("wb"))
                err = files.enter_context((tmp_path / f"member-{number}.err").open("wb"))
                arguments = [cluster.bootstrap_servers, cluster.zookeeper, own_site.root, group, stream]
                process = subprocess.Popen([sys.executable, "-c", MEMBER, *arguments], stdout=out, stderr=err)
                found.processes.append(process)
                found.notes.append(note)
            yield found
        finally:
            for process in found.processes:
                process.kill()
                process.wait()


def test_members_and_readers_survive_a_broker_that_is_killed_and_away_for_seconds(
    own_cluster: AnyCluster, own_site: Site, stream: str, members: Members
) -> None:
    with own_site.connect() as client, client.reader(stream) as reader:
        until(lambda: members.said("before") >= len(KEYS), 60)
        read: list[bytes | None] = []

        def has_read(value: bytes) -> bool:
            read.extend(record.value for record in reader.consume(100, 0.5))
            return read.count(value) >= len(KEYS)

        until(lambda: has_read(b"before"))
        for _ in range(2):
            own_cluster.kill("kafka")
            time.sleep(AWAY_S)  # how long it is away is what this test is about
            own_cluster.restart("kafka")
        write(client, stream, b"after")
        until(lambda: members.said("after") >= len(KEYS), 90)
        until(lambda: has_read(b"after"))
    assert [process.poll() for process in members.processes] == [None] * MEMBERS
    assert sorted(read, key=str) == [b"after"] * len(KEYS) + [b"before"] * len(KEYS)


def _seconds(call: Callable[[], object]) -> float:
    """How long a call took, whatever came of it."""
    began = time.monotonic()
    with suppress(RollbridgeError, KafkaException, TimeoutError):
        call()
    return time.monotonic() - began


@pytest.mark.parametrize("part", ["kafka", "zookeeper"])
def test_no_call_with_a_time_out_takes_much_longer_while_a_server_is_stopped(
    own_cluster: AnyCluster, own_site: Site, stream: str, part: str, unique_name: Callable[[str], str]
) -> None:
    group = unique_name("group")
    config = {
        "bootstrap.servers": own_cluster.bootstrap_servers,
        "zookeeper": own_cluster.zookeeper,
        "zookeeper.root": own_site.root,
        "group.id": group,
        "auto.offset.reset": "earliest",
    }
    options = bridge.ClientOptions(connect_timeout_s=TIMEOUT_S)
    with ExitStack() as stack:
        client = stack.enter_context(own_site.connect())
        reader = stack.enter_context(client.reader(stream))
        peeking = stack.enter_context(client.reader(stream, isolation="read_uncommitted"))
        consumer = stack.enter_context(bridge.Consumer(config))
        consumer.subscribe([stream])
        found: Counter[str] = Counter()

        def is_drained() -> bool:
            """What was there has been read: what is asked for later is waited for."""
            found["consumer"] += sum(message.error() is None for message in consumer.consume(100, 0.5))
            found["reader"] += len(reader.consume(100, 0.5))
            found["peeking"] += len(peeking.consume(100, 0.5))
            return min(found.values()) >= len(KEYS)

        until(is_drained)
        segment = consumer.assignment()[0].topic
        writer = client.writer(stream)
        writer.write(b"k", b"v").result(60)  # what is sent first waits for a producer id, and has no time-out
        until(lambda: bool(reader.consume(100, 0.5)) and bool(peeking.consume(100, 0.5)))
        until(lambda: consumer.poll(0.5) is not None)
        cas = client.cas_writer(stream, timeout=TIMEOUT_S)
        transaction = client.begin(stream)
        transaction.write(stream, key=b"k", value=b"v")
        transaction.flush()
        other = client.begin(stream)
        other.write(stream, key=b"k", value=b"v")
        other.flush()
        identifier = str(transaction.id)
        admin = client.admin

        def flush() -> None:
            transaction.write(stream, key=b"k", value=b"v")
            transaction.flush(timeout=TIMEOUT_S)

        def flush_plain() -> None:
            writer.write(b"k", b"v")
            writer.flush(timeout=TIMEOUT_S)

        calls: dict[str, Callable[[], object]] = {
            "Consumer.poll": lambda: consumer.poll(TIMEOUT_S),
            "Consumer.consume": lambda: consumer.consume(10, TIMEOUT_S),
            "Consumer.committed": lambda: consumer.committed([TopicPartition(segment, 0)], TIMEOUT_S),
            "Consumer.get_watermark_offsets": lambda: consumer.get_watermark_offsets(
                TopicPartition(segment, 0), TIMEOUT_S
            ),
            "Reader.poll": lambda: reader.poll(TIMEOUT_S),
            "Reader.consume": lambda: reader.consume(10, TIMEOUT_S),
            "Reader.poll of previews": lambda: peeking.poll(TIMEOUT_S),
            "Transaction.flush": flush,
            "StreamWriter.flush": flush_plain,
            "Bridge.outcome": lambda: client.outcome(identifier, timeout=TIMEOUT_S),
            "Bridge.unfinished": lambda: client.unfinished(timeout=TIMEOUT_S),
            "Bridge.resume": lambda: client.resume(identifier, timeout=TIMEOUT_S),
            "Bridge.join": lambda: client.join(identifier, timeout=TIMEOUT_S),
            "CasWriter.write": lambda: cas.write(b"k", b"v", expected=bridge.EMPTY),
            "admin.scale": lambda: admin.scale(stream, seal=[0], ranges=[(0.0, 1 / 3)], timeout_s=TIMEOUT_S),
            "admin.create_stream": lambda: admin.create_stream(f"{stream}-2", timeout_s=TIMEOUT_S),
            "admin.truncate": lambda: admin.truncate(stream, "earliest", timeout_s=TIMEOUT_S),
            "admin.delete_stream": lambda: admin.delete_stream(f"{stream}-3", timeout_s=TIMEOUT_S),
            "Transaction.commit": lambda: transaction.commit(timeout=TIMEOUT_S),
            "Transaction.abort": lambda: other.abort(timeout=TIMEOUT_S),
            "connect": lambda: own_site.connect(options=options).close(),
        }
        with own_cluster.paused(part):
            took = {name: _seconds(call) for name, call in calls.items()}
        # Everybody goes on.
        until(lambda: client.outcome(identifier, timeout=30).state != "open", 90)
    late = {name: round(seconds, 1) for name, seconds in took.items() if seconds > TIMEOUT_S + SLOW_MACHINE_S}
    assert not late, f"with {part} stopped; all: { {name: round(seconds, 1) for name, seconds in took.items()} }"
