"""Leaders that stand still at an effect that Kafka fences nobody from, while everything goes on without them.

Each test stops a coordinator in the middle of a deletion or a scale, lets another one finish it, has the stream deleted
and created again where that is the worst that can happen, writes, and only then lets the first one go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from integration_tests.adapter_tools import await_settled
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client
from integration_tests.coordinators import controller_epoch, coordinator, has_lost_the_lead, until
from integration_tests.crashing import STOP_AT
from integration_tests.kafka_tools import produce
from integration_tests.patience import PATIENCE_S
from integration_tests.pauses import is_stopped
from rollbridge.base.ids import SegmentId
from rollbridge.doctor.checks import orphans
from rollbridge.doctor.facts import gather
from rollbridge.errors import ConflictError, RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.names import GroupName, StreamName


class Scene:
    """A stream, one coordinator that stops itself, and another that takes over."""

    def __init__(self, cluster: AnyCluster, root: str, stream: str, logs: Path) -> None:
        self.cluster, self.root, self.stream, self.logs = cluster, root, stream, logs
        self.b = patient_client(cluster, root)

    def commit(self, life: str, count: int) -> None:
        for number in range(count):
            with self.b.begin(self.stream) as transaction:
                transaction.write(self.stream, key=b"%d" % number, value=f"{life}-{number}".encode())

    def values(self) -> list[str]:
        with self.b.reader(self.stream, follow=False) as reader:
            return sorted((record.value or b"").decode() for record in reader)

    def log_of(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")


@contextmanager
def finished_by_another(
    scene: Scene, first: subprocess.Popen[bytes], ask: Callable[[], object], is_done: Callable[[], bool]
) -> Iterator[None]:
    """Ask for something at which the first coordinator stops; another one has done it when the block begins."""

    def ask_once() -> None:
        with suppress(RollbridgeError):  # who finishes it may find that it is done, or gone
            ask()

    asking = threading.Thread(target=ask_once)
    asking.start()
    until(lambda: is_stopped(first))
    with coordinator(scene.cluster, scene.root, "second", scene.logs):
        asking.join(60)
        until(is_done)
        yield


@pytest.fixture
def scene(cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path) -> Scene:
    return Scene(cluster, f"/{unique_name('paused')}", f"{unique_name('scope')}/orders", tmp_path)


def awaken(scene: Scene, process: subprocess.Popen[bytes]) -> None:
    """Let a stopped coordinator go on, and wait until it has noticed that it does not lead any more."""
    before = len(scene.log_of("first"))
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: has_lost_the_lead(scene.log_of("first")[before:]))


def test_a_merge_that_outlasts_its_native_transaction_is_done_again_by_the_same_leader(scene: Scene) -> None:
    """Kafka has aborted it, which is a definite answer: nobody gives up the lead for it, and nothing is there twice."""
    limits = {STOP_AT: "merge_direct/CommitRound:before", "ROLLBRIDGE_COORDINATOR_MERGE_TIMEOUT_S": "1"}
    with (
        scene.b,
        coordinator(
            scene.cluster, scene.root, "first", scene.logs, arguments=["--session-timeout=30"], **limits
        ) as first,
    ):
        scene.b.admin.create_stream(scene.stream, segments=1)
        group = GroupName(scene.stream.partition("/")[0])
        term = controller_epoch(scene.b._metadata.session, group)
        transaction = scene.b.begin(scene.stream)
        for number in range(100):
            transaction.write(scene.stream, key=b"k", value=b"%03d" % number)
        outcome = transaction.commit_async()
        until(lambda: is_stopped(first))
        segment = StreamName.parse(scene.stream).segment_topic(SegmentId.of(0, 0))
        assert KafkaClient(scene.cluster.bootstrap_servers).offsets.end([segment])[segment] > 0, "nothing was appended"
        await_settled(scene.cluster.bootstrap_servers, [(segment, 0)])
        assert not outcome.done()
        os.kill(first.pid, signal.SIGCONT)
        outcome.result(PATIENCE_S)
        scene.commit("next", 3)
        assert scene.values() == sorted([*(f"{number:03}" for number in range(100)), *(f"next-{n}" for n in range(3))])
        assert controller_epoch(scene.b._metadata.session, group) == term, "another term has begun"


@pytest.mark.parametrize("moment", ["before", "fenced"])
def test_a_leader_that_stood_still_in_a_deletion_deletes_nothing_of_the_next_life(scene: Scene, moment: str) -> None:
    point = f"delete_further/DeleteTopics:{moment}"
    with (
        scene.b,
        coordinator(scene.cluster, scene.root, "first", scene.logs, STOP_AT=point) as first,
    ):
        scene.b.admin.create_stream(scene.stream, segments=2)
        scene.commit("first", 3)
        with finished_by_another(
            scene,
            first,
            lambda: scene.b.admin.delete_stream(scene.stream),
            lambda: scene.stream not in [str(item.name) for item in scene.b.admin.list_streams()],
        ):
            scene.b.admin.create_stream(scene.stream, segments=2)
            scene.commit("second", 20)
            awaken(scene, first)
            assert scene.values() == sorted(f"second-{number}" for number in range(20))
            scene.commit("third", 5)
            assert len(scene.values()) == 25


@pytest.mark.parametrize(
    "point",
    [
        "scale/CreateTopics:fenced",
        "scale/Seal:before",
        "scale/Seal:fenced",
    ],
)
def test_a_leader_that_stood_still_in_a_scale_harms_no_other_life(scene: Scene, point: str) -> None:
    with (
        scene.b,
        coordinator(scene.cluster, scene.root, "first", scene.logs, STOP_AT=point) as first,
    ):
        scene.b.admin.create_stream(scene.stream, segments=2)
        scene.commit("first", 3)
        with finished_by_another(
            scene,
            first,
            lambda: scene.b.admin.scale(scene.stream, seal=[0, 1], ranges=[(0.0, 1.0)]),
            lambda: len(scene.b.admin.history(scene.stream).active.segments) == 1,
        ):
            scene.b.admin.delete_stream(scene.stream)
            scene.b.admin.create_stream(scene.stream, segments=2)
            scene.commit("second", 20)
            awaken(scene, first)
            scene.commit("third", 5)
            assert len(scene.values()) == 25
            # What a late request has made under an old name is nobody's, and is named.
            facts = gather(scene.b.settings, scene.b._kafka)
            found = [item for item in orphans(facts) if scene.stream.partition("/")[0] in str(item)]
            assert len(found) <= (1 if point.startswith("scale/CreateTopics") else 0), found


def left_by_another(scene: Scene, first: subprocess.Popen[bytes]) -> AbstractContextManager[None]:
    """The stream leaves the topic that it has adopted."""
    return finished_by_another(
        scene,
        first,
        lambda: scene.b.admin.scale(scene.stream, seal=[0], ranges=[(0.0, 0.5)], leave_topic=True),
        lambda: len(scene.b.admin.history(scene.stream).records) > 1,
    )


SETTINGS = {"compression.type": "zstd", "max.message.bytes": "1500000"}


@pytest.mark.parametrize("anew", [False, True], ids=["released", "anew"])
def test_a_leader_that_stood_still_before_it_closed_an_adopted_topic_opens_it_again(
    scene: Scene, unique_name: Callable[[str], str], anew: bool
) -> None:
    topic = unique_name("shop.orders")
    kafka = AdminClient({"bootstrap.servers": scene.cluster.bootstrap_servers})

    def create() -> None:
        kafka.create_topics([NewTopic(topic, 2, 1, config=SETTINGS)])[topic].result(60)

    create()
    with (
        scene.b,
        coordinator(scene.cluster, scene.root, "first", scene.logs, STOP_AT="scale/Seal:fenced") as first,
    ):
        scene.b.admin.adopt_topic(topic, stream=scene.stream, partitioner="murmur2")
        scene.commit("first", 3)
        with left_by_another(scene, first):
            scene.b.admin.delete_stream(scene.stream)
            if anew:
                kafka.delete_topics([topic])[topic].result(60)
                admin = KafkaClient(scene.cluster.bootstrap_servers).topics
                until(lambda: topic not in admin.list_topics())
                create()
            awaken(scene, first)
            assert "topic.reopened " in scene.log_of("first")
            described = KafkaClient(scene.cluster.bootstrap_servers).topics.describe([topic])[topic]
            assert {name: described.config[name] for name in described.own} == SETTINGS
            produce(scene.cluster.bootstrap_servers, topic, [b"a plain record"])
            scene.b.admin.adopt_topic(topic, stream=scene.stream, partitioner="murmur2")
            scene.commit("second", 3)
            assert sorted(set(scene.values()) - {f"first-{number}" for number in range(3)}) == [
                "a plain record",
                *(f"second-{number}" for number in range(3)),
            ]


def test_a_topic_that_is_created_again_right_before_it_is_closed_is_open(
    scene: Scene, unique_name: Callable[[str], str]
) -> None:
    """What is closed is found by its name, and may be another topic than the leader has looked at just before."""
    topic = unique_name("shop.orders")
    kafka = AdminClient({"bootstrap.servers": scene.cluster.bootstrap_servers})
    admin = KafkaClient(scene.cluster.bootstrap_servers).topics
    kafka.create_topics([NewTopic(topic, 2, 1, config=SETTINGS)])[topic].result(60)
    with (
        scene.b,
        coordinator(
            scene.cluster,
            scene.root,
            "first",
            scene.logs,
            arguments=["--session-timeout=30"],
            STOP_AT="scale/Seal:fenced",
        ) as first,
    ):
        scene.b.admin.adopt_topic(topic, stream=scene.stream, partitioner="murmur2")
        refused: list[RollbridgeError] = []

        def leave() -> None:
            try:
                scene.b.admin.scale(scene.stream, seal=[0], ranges=[(0.0, 0.5)], leave_topic=True)
            except RollbridgeError as fault:
                refused.append(fault)

        asking = threading.Thread(target=leave)
        asking.start()
        until(lambda: is_stopped(first))
        kafka.delete_topics([topic])[topic].result(60)
        until(lambda: topic not in admin.list_topics())
        kafka.create_topics([NewTopic(topic, 2, 1, config=SETTINGS)])[topic].result(60)
        os.kill(first.pid, signal.SIGCONT)
        asking.join(60)
        assert isinstance(refused[0], ConflictError)
        described = admin.describe([topic])[topic]
        assert {name: described.config[name] for name in described.own} == SETTINGS
        produce(scene.cluster.bootstrap_servers, topic, [b"a plain record"])


def test_a_leader_that_stood_still_before_it_closed_an_adopted_topic_leaves_it_closed_where_it_was_left(
    scene: Scene, unique_name: Callable[[str], str]
) -> None:
    topic = unique_name("shop.orders")
    kafka = AdminClient({"bootstrap.servers": scene.cluster.bootstrap_servers})
    kafka.create_topics([NewTopic(topic, 2, 1)])[topic].result(60)
    with (
        scene.b,
        coordinator(scene.cluster, scene.root, "first", scene.logs, STOP_AT="scale/Seal:fenced") as first,
    ):
        scene.b.admin.adopt_topic(topic, stream=scene.stream, partitioner="murmur2")
        with left_by_another(scene, first):
            awaken(scene, first)
            assert KafkaClient(scene.cluster.bootstrap_servers).topics.closed([topic]) == {topic}
            scene.commit("second", 3)
            assert scene.values() == [f"second-{number}" for number in range(3)]
