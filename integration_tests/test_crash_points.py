"""Coordinators die by SIGKILL at each named point of the protocol; the next one finishes, and nothing is lost.

One story for every point: a transaction is begun, small ones commit, the stream is scaled, the old transaction is
rolled in, another is aborted. After it, what plain ``read_committed`` consumers see is compared with what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Message

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import header_of, patient_client, read_committed
from integration_tests.coordinators import Relay, until
from integration_tests.crashing import CRASH_AT, STOP_AT, CrashPoint
from rollbridge.commitlog.control import ControlKind, ControlRecord, decode_control
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.epochs import EpochCause, EpochHistory, check_chain
from rollbridge.stream.names import GroupName, StreamName

POINTS = [
    "take_over/TakeIdentity:after",
    "take_over/CreateTopics:after",
    "take_over/ReadCommitLog:after",
    "create_stream/CreateTopics:before",
    "create_stream/CreateTopics:after",
    "create_stream/Write:after",
    "merge_direct/MergeFrames:before",
    "merge_direct/MergeFrames:after",
    "merge_direct/AppendControl:after",
    "merge_direct/AppendTogether:before",
    "merge_direct/AppendTogether:after",
    "merge_direct/CommitRound:after",
    "record_long/AppendControl:after",
    "record_long/CommitRound:after",
    "record_long/Write:after",
    "scale/Write:before",
    "scale/Write:after",
    "scale/CreateTopics:after",
    "scale/Seal:after",
    "scale/Write:after:2",
    "roll/Write:before",
    "roll/Write:after",
    "roll/CreateTopics:after",
    "roll/MergeFrames:after",
    "roll/AppendControl:after",
    "roll/Seal:after",
    "roll/Write:after:2",
    "roll/CommitRound:after",
    "roll/Seal:after:2",
    "roll/Write:after:3",
    "remove_records/Write:after",
    "scale/CreateTopics:after + take_over/Seal:after",
    "roll/Write:after + finish_pending/MergeFrames:after + finish_pending/Seal:after",
    "roll/Seal:after + finish_pending/Write:after:2",
    "roll/CommitRound:after + finish_pending/Seal:after",
]
LATE_POINTS = [
    "roll/Seal:after",
    "roll/CommitRound:after",
    "roll/CommitRound:after:2",
    "merge_late/EndOffsets:after",
    "merge_late/AppendTogether:after",
    "merge_late/CommitRound:before",
    "merge_late/CommitRound:after",
    "end_linger/Seal:before",
    "end_linger/Seal:after",
    "end_linger/Write:after",
    "end_linger/Write:after:2",
    "merge_late/CommitRound:after + finish_pending/Seal:after",
]
"""Of the story of late commits that follow each other."""
SOME_LATE = ["merge_late/CommitRound:before"]
SOME = ["roll/CommitRound:after"]
"""Those that `make test` tries, too."""


class Story:
    """What was written, and what became of it."""

    def __init__(self, cluster: AnyCluster, root: str, scope: str) -> None:
        self.cluster = cluster
        self.root = root
        self.stream = StreamName(scope, "orders")
        self.group = GroupName(scope)
        self.committed: list[tuple[rollbridge.TransactionId, list[str]]] = []
        self.aborted: list[rollbridge.TransactionId] = []

    def play(self) -> None:
        """Run the story; every call waits as long as a failover takes."""
        name = str(self.stream)
        with patient_client(self.cluster, self.root, "teller") as b:
            b.admin.create_stream(name, segments=2)
            old = b.begin(name, label="old")
            old_values = [f"old-{number}" for number in range(40)]
            for value in old_values:
                old.write(name, key=f"key-{value}".encode(), value=value.encode())
            old.flush()
            self._small(b, "before")
            self._await_record(b)
            b.admin.scale(name, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
            self._small(b, "between")
            result = old.commit()
            assert result.records == 40
            self.committed.append((old.id, old_values))
            self._small(b, "after")
            gone = b.begin(name)
            gone.write(name, key=b"k", value=b"aborted")
            gone.abort()
            self.aborted.append(gone.id)
            self._await_rest(b)
            assert b.outcome(old.id).position == result.position == b.resume(old.id).commit().position
            assert b.outcome(gone.id).aborted

    def _small(self, b: rollbridge.Bridge, word: str) -> None:
        for number in range(3):
            txn = b.begin(str(self.stream))
            values = [f"{word}-{number}-{item}" for item in range(4)]
            for value in values:
                txn.write(str(self.stream), key=value.encode(), value=value.encode())
            txn.commit()
            self.committed.append((txn.id, values))

    def _await_record(self, b: rollbridge.Bridge) -> None:
        """Wait until the old transaction is registered, so that its record takes part in the story."""
        until(lambda: any(item.label == "old" for item in b.admin.transactions(str(self.group))))

    def _await_rest(self, b: rollbridge.Bridge) -> None:
        """Wait until nothing is under way any more."""
        with ZooKeeperSession(self.cluster.zookeeper, root=self.root) as session:
            until(
                lambda: (
                    session.exists(paths.committing(self.group)) is None
                    and session.exists(paths.scaling(self.group)) is None
                    and not b.admin.transactions(str(self.group))
                )
            )

    def check(self) -> None:
        """Compare what stands in Kafka and ZooKeeper with what was asked for."""
        with ZooKeeperSession(self.cluster.zookeeper, root=self.root) as session:
            history = Metadata(session).history(self.stream)
        assert history is not None
        assert [record.cause.value for record in history.records] == [
            "create",
            "scale",
            "rolling-transactions",
            "rolling-active",
        ]
        assert [record.reference_epoch for record in history.records] == [0, 1, 0, 1]
        assert not check_chain(history.records)
        segments = [self.stream.segment_topic(segment) for segment in history.segments()]
        messages = self._messages([self.group.commit_log_topic, *segments])
        log = [decode_control(item.key(), item.value()) for item in messages[self.group.commit_log_topic]]
        outcomes = [record for record in log if record.kind is not ControlKind.BEGIN]
        assert [item.transaction for item in outcomes if item.kind is ControlKind.COMMIT] == [
            identifier for identifier, _ in self.committed
        ]
        assert [item.transaction for item in outcomes if item.kind is ControlKind.ABORT] == self.aborted
        self._check_segments(history, outcomes, messages)

    def _messages(self, topics: list[str]) -> dict[str, list[Message]]:
        """What a plain ``read_committed`` consumer sees of each topic."""
        found: dict[str, list[Message]] = {topic: [] for topic in topics}
        for message in read_committed(self.cluster.bootstrap_servers, topics):
            found[message.topic() or ""].append(message)
        return found

    def _check_segments(
        self, history: EpochHistory, outcomes: list[ControlRecord], messages: dict[str, list[Message]]
    ) -> None:
        order = {item.transaction: place for place, item in enumerate(outcomes)}
        listed = {
            (segment, run.base_offset + step): item.transaction
            for item in outcomes
            for _, segment, runs in item.segments()
            for run in runs
            for step in range(run.count)
        }
        seen: list[str] = []
        ends = KafkaClient(self.cluster.bootstrap_servers).offsets.end(
            [self.stream.segment_topic(segment) for segment in history.segments()]
        )
        for segment in history.segments():
            topic = self.stream.segment_topic(segment)
            sealed = history.sealed_end(segment)
            assert sealed is None or ends[topic] >= sealed  # markers may follow
            assert (sealed is None) == (segment in history.active.segment_ids)
            last = -1
            for message in messages[topic]:
                identifier, _ = header_of(message)
                assert listed.pop((segment, message.offset() or 0)) == identifier
                assert order[identifier] >= last
                last = order[identifier]
                seen.append((message.value() or b"").decode())
        assert not listed, "the commit log lists records that are not there"
        assert sorted(seen) == sorted(value for _, values in self.committed for value in values)


LATE = 6
"""Late commits in a story."""


class LateStory(Story):
    """Transactions that began before a scale commit one after the other; the stream has segments that it left alone."""

    def play(self) -> None:
        """Run the story; every call waits as long as a failover takes."""
        name = str(self.stream)
        with patient_client(self.cluster, self.root, "teller") as b:
            b.admin.create_stream(name, segments=4)
            begun = []
            for number in range(LATE):
                values = [f"late-{number}-{item}" for item in range(20)]
                txn = b.begin(name)
                for value in values:
                    txn.write(name, key=f"key-{value}".encode(), value=value.encode())
                txn.flush()
                begun.append((txn, values))
            b.admin.scale(name, seal=[1], ranges=[(0.25, 0.375), (0.375, 0.5)])
            for txn, values in begun:
                assert txn.commit().records == 20
                self.committed.append((txn.id, values))
            self._small(b, "after")
            self._await_rest(b)

    def check(self) -> None:
        """Compare what stands in Kafka and ZooKeeper with what was asked for."""
        with ZooKeeperSession(self.cluster.zookeeper, root=self.root) as session:
            history = Metadata(session).history(self.stream)
        assert history is not None
        assert not check_chain(history.records)
        rolls = [item for item in history.records if item.cause is EpochCause.ROLLING_TRANSACTIONS]
        assert 1 <= len(rolls) < LATE, "some went into the segments of others"
        for record in rolls:
            assert [item.id.number for item in history.began_with(record.epoch)] == [1]
        segments = [self.stream.segment_topic(segment) for segment in history.segments()]
        messages = self._messages([self.group.commit_log_topic, *segments])
        log = [decode_control(item.key(), item.value()) for item in messages[self.group.commit_log_topic]]
        outcomes = [record for record in log if record.kind is not ControlKind.BEGIN]
        assert [(item.transaction, item.kind) for item in outcomes] == [
            (identifier, ControlKind.COMMIT) for identifier, _ in self.committed
        ]
        self._check_segments(history, outcomes, messages)


def test_a_crash_point_is_parsed_and_a_malformed_one_is_named() -> None:
    assert CrashPoint.named_in({CRASH_AT: "finish_roll/Seal:after:2"}) == CrashPoint("finish_roll", "Seal", "after", 2)
    with pytest.raises(ValueError, match="STOP_AT='somewhere'"):
        CrashPoint.named_in({STOP_AT: "somewhere"})
    assert CrashPoint.named_in({}) is None


@pytest.mark.parametrize(
    "points", [points if points in SOME else pytest.param(points, marks=pytest.mark.long) for points in POINTS]
)
def test_the_next_leader_finishes_what_a_killed_one_began(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path, points: str
) -> None:
    scope = unique_name("crash")
    root = f"/{scope}"
    story = Story(cluster, root, scope)
    chain = points.split(" + ")
    with Relay(cluster, root, tmp_path, chain) as relay:
        story.play()
        assert relay.deaths == len(chain)
    story.check()


@pytest.mark.parametrize(
    "points",
    [points if points in SOME_LATE else pytest.param(points, marks=pytest.mark.long) for points in LATE_POINTS],
)
def test_the_next_leader_finishes_late_commits_that_follow_each_other(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path, points: str
) -> None:
    scope = unique_name("late")
    root = f"/{scope}"
    story = LateStory(cluster, root, scope)
    chain = points.split(" + ")
    slowly = {"ROLLBRIDGE_COORDINATOR_LINGER_MS_MAX": "5000"}
    with Relay(cluster, root, tmp_path, chain, slowly) as relay:
        story.play()
        assert relay.deaths == len(chain)
    story.check()
