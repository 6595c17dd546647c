"""A broker or a ZooKeeper that is away: processes live on, groups go on, and calls keep their time-outs.

For time-outs of calls see ``test_call_times``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, until
from integration_tests.grown_streams import KEYS, write
from rollbridge.consumer import commits

MEMBERS = 3
AWAY_S = 5.0
"""Longer than the library's session with a broker survives being refused; what used to end its process."""
TIMEOUT_S = 1.5
SLOW_MACHINE_S = 15.0
"""What is promised is a second beyond the time-out; a machine that is busy with other tests gets more."""

MEMBER = """
import faulthandler, sys
import rollbridge
faulthandler.enable()
servers, zookeeper, root, group, stream = sys.argv[1:]
config = {"bootstrap.servers": servers, "zookeeper": zookeeper, "zookeeper.root": root, "group.id": group,
          "auto.offset.reset": "earliest", "auto.commit.interval.ms": 200}
with rollbridge.Consumer(config) as consumer:
    consumer.subscribe([stream])
    while True:
        for message in consumer.consume(100, 0.2):
            if message.error() is None:
                print(message.value().decode(), flush=True)
"""


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


def test_a_commit_that_no_broker_answers_ends_in_time_and_can_be_asked_for_again(
    own_cluster: AnyCluster,
    own_site: Site,
    stream: str,
    unique_name: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commits, "COMMIT_TIMEOUT_S", TIMEOUT_S)
    config = {
        "bootstrap.servers": own_cluster.bootstrap_servers,
        "zookeeper": own_cluster.zookeeper,
        "zookeeper.root": own_site.root,
        "group.id": unique_name("group"),
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    with rollbridge.Consumer(config) as consumer:
        consumer.subscribe([stream])
        read: list[rollbridge.Message] = []

        def has_read() -> bool:
            read.extend(consumer.consume(100, 0.2))
            return len(read) >= len(KEYS)

        until(has_read, 60)
        with own_cluster.paused(own_cluster.brokers[0]):
            began = time.monotonic()
            with pytest.raises(KafkaException, match=r"not known whether it is carried out") as ended:
                consumer.commit(asynchronous=False)
            assert time.monotonic() - began < SLOW_MACHINE_S
            assert ended.value.args[0].code() == KafkaError._TIMED_OUT
        done: list[TopicPartition] = []

        def is_committed() -> bool:
            with suppress(KafkaException):
                done.extend(consumer.commit(asynchronous=False) or [])
            return bool(done)

        until(is_committed, 60)
        assert all(place.error is None for place in done)


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
