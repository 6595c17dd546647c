"""Large transactions on real servers: merged beside the line, whoever dies meanwhile; nothing stays of failed tries.

One story for every point at which a coordinator is killed: a transaction above the bound is committed while others
write, commit and read the same segments. Afterwards each record is there once, in the order of the commit log.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client
from integration_tests.coordinators import Relay, coordinator, until
from integration_tests.crashing import STOP_AT
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import PATIENCE_S
from integration_tests.pauses import is_stopped
from integration_tests.troubles import WRITES, slowed
from rollbridge.base.ids import PREPARED_FIRST
from rollbridge.doctor.checks import orphans
from rollbridge.doctor.facts import gather
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.epochs import EpochHistory, check_chain
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.core.interpreter import BESIDE_CLIENT_ID
from rollbridge_devcluster.state import KAFKA

BESIDE = {"ROLLBRIDGE_COORDINATOR_MERGE_BESIDE_BYTES": "500000"}
VALUE = bytes(1_000)
LARGE = 3_000
"""Records of the large transaction: six times the bound."""
POINTS = [
    "prepare/Write:before",
    "prepare/Write:after",
    "prepare/Prepare:after",
    "follow_preparations/LookAtPrepared:after",
    "roll/Write:after",
    "roll/CreateTopics:after",
    "roll/Seal:after",
    "roll/Write:after:2",
    "roll/TakeUp:after",
    "roll/AppendControl:after",
    "roll/CommitRound:after",
    "roll/Seal:after:2",
    "roll/Write:after:3",
    "remove_leftovers/Write:before",
    "prepare/Prepare:after + remove_leftovers/DeleteTopics:after",
    "roll/TakeUp:after + finish_pending/Seal:after + prepare/Prepare:after",
]


TAKEN_UP = "roll/TakeUp:after"
"""Where all records stand in the native transaction that is committed, and the offsets of groups do not."""


def key(number: int) -> bytes:
    """One of some keys that everybody writes to."""
    return b"key-%d" % (number % 20)


class Story:
    """A large transaction among small ones."""

    def __init__(self, cluster: AnyCluster, root: str, scope: str) -> None:
        self.cluster = cluster
        self.root = root
        self.stream = StreamName(scope, "orders")
        self.group = GroupName(scope)
        self.values: list[bytes] = []
        """Everything that was committed or written, in the order of the answers."""
        self.history: EpochHistory | None = None

    def connect(self, name: str) -> rollbridge.Bridge:
        """Return a connection that waits for failovers."""
        return patient_client(self.cluster, self.root, name)

    def play(self) -> None:
        """Commit a large transaction while small ones go on."""
        name = str(self.stream)
        with self.connect("loader") as b, self.connect("teller") as other:
            b.admin.create_stream(name, segments=2)
            txn = b.begin(name, label="large")
            futures = [txn.write(name, key=key(number), value=b"large-%d:" % number + VALUE) for number in range(LARGE)]
            txn.flush()
            self._small(other, "before")
            done = threading.Event()
            small = threading.Thread(target=self._keep_on, args=(other, done))
            small.start()
            try:
                result = txn.commit()
            finally:
                done.set()
                small.join()
            assert result.records == LARGE
            self.places = {future.result(60): number for number, future in enumerate(futures)}
            assert (result.first, result.last) == (min(self.places), max(self.places))
            self._small(other, "after")
            with ZooKeeperSession(self.cluster.zookeeper, root=self.root) as session:
                until(
                    lambda: (
                        session.exists(paths.committing(self.group)) is None
                        and not session.children(paths.merging(self.group))
                        and not b.admin.transactions(str(self.group))
                    )
                )
                self.history = Metadata(session).history(self.stream)
            with b.reader(name, follow=False) as reader:
                found = list(reader)
            self.read = [record.value or b"" for record in found]
            large = {record.dlsn: record.value for record in found if record.transaction_id == txn.id}
            with b.transactions(self.stream.scope, follow=False) as transactions:
                [logged] = [list(item.records()) for item in transactions if item.id == txn.id]
            assert large == {place: b"large-%d:" % number + VALUE for place, number in self.places.items()}
            assert [record.dlsn for record in logged] == list(self.places)

    def _small(self, b: rollbridge.Bridge, word: str) -> None:
        with b.transaction(str(self.stream)) as txn:
            for number in range(20):
                txn.write(str(self.stream), key=key(number), value=b"%s-%d:" % (word.encode(), number))
        self.values += [b"%s-%d:" % (word.encode(), number) for number in range(20)]

    def _keep_on(self, b: rollbridge.Bridge, done: threading.Event) -> None:
        count = 0
        while not done.is_set():
            self._small(b, f"beside-{count}")
            count += 1

    def check(self) -> None:
        """Compare what is read with what was committed, and look for what was left behind."""
        history = self.history
        assert history is not None
        assert not check_chain(history.records)
        large = [b"large-%d:" % number + VALUE for number in range(LARGE)]
        assert sorted(self.read) == sorted([*self.values, *large])
        of_small = {value: place for place, value in enumerate(self.values)}
        for one in range(20):
            mine = [value for number, value in enumerate(large) if number % 20 == one]
            seen = [value for value in self.read if value in set(mine)]
            assert seen == mine, "the records of one transaction and key keep their order"
            small = [value for value in self.read if value in of_small and value.endswith(b"-%d:" % one)]
            assert small == sorted(small, key=of_small.__getitem__)
            first = self.read.index(mine[0])
            block = self.read[first : self.read.index(mine[-1]) + 1]
            assert not [value for value in block if value in set(small)], "nothing of a key stands among its records"
        admin = KafkaClient(self.cluster.bootstrap_servers).topics
        prefix = f"{self.stream.scope}.{self.stream.stream}.segment-"
        kept = {self.stream.segment_topic(segment) for segment in history.graph.nodes}
        until(lambda: not {item for item in admin.list_topics() if item.startswith(prefix)} - kept)


def test_others_commit_and_read_while_a_large_transaction_is_merged(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("large")
    story = Story(cluster, f"/{scope}", scope)
    name = str(story.stream)
    topics = KafkaClient(cluster.bootstrap_servers).topics
    with (
        Relay(cluster, f"/{scope}", tmp_path, environment=BESIDE),
        story.connect("loader") as b,
        story.connect("teller") as other,
    ):
        b.admin.create_stream(name, segments=2)
        txn = b.begin(name)
        txn.write_all(name, [(key(number), b"large-%d:" % number + VALUE) for number in range(LARGE)])
        with b.reader(name) as reader, b.writer(name) as writer, slowed(cluster, WRITES, BESIDE_CLIENT_ID, 1_000.0):
            answer = txn.commit_async()
            with ZooKeeperSession(cluster.zookeeper, root=story.root) as session:
                until(lambda: session.children(paths.merging(story.group)))
            prepared = f"{scope}.orders.segment-{PREPARED_FIRST}"
            until(lambda: any(item.startswith(prepared) for item in topics.list_topics()))
            facts = gather(b.settings, b._kafka)
            assert not [item for item in orphans(facts) if scope in item.what], "nobody deletes them"
            for round_ in range(3):
                with other.transaction(name) as small:
                    small.write(name, key=key(1), value=b"small-%d" % round_)
                writer.write(key(1), b"plain-%d" % round_).result(60)
            other.admin.scale(name, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
            with other.transaction(name) as small:
                small.write(name, key=key(1), value=b"small-3")
            read: list[bytes | None] = []
            while len(read) < 7:
                read += [item.value for item in reader.consume(10, 60)]
            assert read == [b"small-0", b"plain-0", b"small-1", b"plain-1", b"small-2", b"plain-2", b"small-3"]
            assert not answer.done(), "the large one is still being merged"
        assert answer.result(120).records == LARGE
        with b.reader(name, follow=False) as reader:
            found = [record.value or b"" for record in reader if record.key == key(1)]
        assert found[:7] == read
        assert found[7:] == [b"large-%d:" % number + VALUE for number in range(1, LARGE, 20)]


@pytest.mark.parametrize("points", POINTS)
def test_the_next_leader_begins_a_large_merge_anew_or_ends_it(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path, points: str
) -> None:
    scope = unique_name("large")
    story = Story(cluster, f"/{scope}", scope)
    chain = points.split(" + ")
    with Relay(cluster, f"/{scope}", tmp_path, chain, environment=BESIDE) as relay:
        story.play()
        assert relay.deaths == len(chain)
    story.check()


def test_offsets_without_an_answer_take_no_record_of_a_large_transaction_with_them(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    """The group's broker hangs when all records are in the native transaction that the offsets join."""
    scope = unique_name("large")
    stream, source, group = f"{scope}/orders", unique_name("source"), unique_name("group")
    create_topic(cluster.bootstrap_servers, source)
    values = [b"%d:" % number + VALUE for number in range(LARGE)]
    log = tmp_path / "first.log"
    with (
        closing(patient_client(cluster, f"/{scope}")) as b,
        coordinator(
            cluster, f"/{scope}", "first", tmp_path, arguments=["--session-timeout=60"], **{STOP_AT: TAKEN_UP}, **BESIDE
        ) as first,
    ):
        b.admin.create_stream(stream, segments=2)
        transaction = b.begin(stream)
        futures = [transaction.write(stream, key=key(place), value=value) for place, value in enumerate(values)]
        transaction.send_offsets({(source, 0): 7}, group)
        answer = transaction.commit_async()
        until(lambda: is_stopped(first))
        with cluster.node(KAFKA).paused():
            os.kill(first.pid, signal.SIGCONT)
            until(lambda: "offsets.retry" in log.read_text())
        assert answer.result(PATIENCE_S).records == LARGE
        with b.reader(stream, follow=False) as reader:
            places = {record.value: record.dlsn for record in reader}
        assert places == {value: future.result(1) for value, future in zip(values, futures, strict=True)}
        with KafkaClient(cluster.bootstrap_servers) as kafka:
            assert [(item.topic, item.offset) for item in kafka.group(group).read()] == [(source, 7)]
    assert "count=transactions_refused" not in log.read_text()
