"""Adoption, leaving and release of topics, and the watch of leaders over them, against the simulated world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from coordinator.tests.makers import Bench
from coordinator.tests.sim_actors import stream_config
from coordinator.tests.sim_term import LedWorld
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import SEALED, TOPIC_SETTINGS, Record, World, shard
from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.base.sn import EMPTY
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey, buffer_partition
from rollbridge.commitlog.control import ControlKind
from rollbridge.errors import ConflictError, CoordinatorUnavailableError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import (
    BUFFER_LOST,
    SUSPENDED,
    TOPIC_CLOSED,
    TOPIC_DELETED,
    TOPIC_RECREATED,
    StreamFault,
)
from rollbridge.metadata.records import SEGMENTS_MAX, CreateNode, DeleteNode, NodeOperation, SetNode
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.stream.conditions import Condition, Scope, StreamCondition
from rollbridge.stream.config import FOREVER, RecordTimes, Retention, StreamConfig, StreamState, TopicLimits
from rollbridge.stream.epochs import check_chain
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.requests import RACES_MAX
from rollbridge_coordinator.core.waits import LEADERLESS, UNREPLICATED, LostRaceError
from rollbridge_coordinator.streams.create import create_stream

GROUP = GroupName("topics")
ORDERS, OTHER = StreamName("topics", "orders"), StreamName("topics", "other")
TOPIC, PARTITIONS = "orders", 3


class Scene(LedWorld):
    """A topic with records, a group that has adopted it, and another stream of that group."""

    def __init__(self) -> None:
        super().__init__(GROUP)
        self.world.create(TOPIC, PARTITIONS)
        self.before = [Record("k", f"k={number}") for number in range(6)]
        for number, record in enumerate(self.before):
            self.world.produce(shard(TOPIC, number % PARTITIONS), record)
        assert self.answer(RequestKind.CREATE_STREAM, OTHER, segments=1).ok
        assert self.adopt().ok

    def adopt(self, stream: StreamName = ORDERS) -> AdminAnswer:
        return self.answer(RequestKind.ADOPT_TOPIC, stream, topic=TOPIC, partitioner="murmur2")

    def release(self) -> AdminAnswer:
        return self.answer(RequestKind.RELEASE_TOPIC, ORDERS, topic=TOPIC)

    def leave(self, high: tuple[float] = (1 / PARTITIONS,)) -> str:
        return self.ask(RequestKind.SCALE_STREAM, ORDERS, seal=(0,), ranges=((0.0, *high),), leave_topic=True)

    def commit(
        self, stream: StreamName = ORDERS, segment: int = 0, conditions: Sequence[StreamCondition] = ()
    ) -> TransactionId:
        """Ask for the commit of a transaction with one record."""
        return self.end(self.open(stream, conditions), {segment: 1}, conditions)

    def open(
        self, stream: StreamName = ORDERS, conditions: Sequence[StreamCondition] = ()
    ) -> tuple[str, TransactionId]:
        """Begin a transaction; return the stream that it writes to, and its id."""
        self.counter += 1
        epochs = {str(name): int(history_of(self.world, name).active.reference_epoch) for name in {stream, ORDERS}}
        epochs = {str(stream): epochs[str(stream)], **(epochs if conditions else {})}
        identifier = TransactionId.of(epochs[str(stream)], self.counter)
        begin = BeginFrame(f"c{self.counter}", 0, None, 10_000_000, epochs).encode()
        for name in epochs:
            self._send(identifier, name, FrameHeader(FrameKind.BEGIN, identifier.bytes), begin)
        return next(iter(epochs)), identifier

    def end(
        self, began: tuple[str, TransactionId], pieces: Mapping[int, int], conditions: Sequence[StreamCondition] = ()
    ) -> TransactionId:
        """Write a record to each segment, and ask for the commit."""
        place, identifier = began
        for count, segment in enumerate(pieces):
            row = f'[["t", "{identifier}", "{identifier}", {count}]]'.encode()
            self._send(identifier, place, FrameHeader(FrameKind.DATA, identifier.bytes, 0, segment, count, 1), row)
        keys = {PieceKey(0, 0, segment): count for segment, count in pieces.items()}
        manifest = Manifest(keys, (), tuple(conditions)).encode()
        self._send(identifier, place, FrameHeader(FrameKind.COMMIT, identifier.bytes), manifest)
        return identifier

    def _send(self, identifier: TransactionId, stream: str, header: FrameHeader, value: bytes) -> None:
        buffer = stream_config(self.world, StreamName.parse(stream)).buffer_topic
        self.world.produce(shard(buffer, buffer_partition(identifier, 1)), (header.pack(), value))

    def committed(self, transaction: TransactionId) -> bool:
        found = self.outcome(transaction)
        assert found is None or found.kind is ControlKind.COMMIT, found
        return found is not None

    def committed_soon(self, transaction: TransactionId) -> bool:
        return self.ended(transaction).kind is ControlKind.COMMIT

    def fault(self, stream: StreamName = ORDERS) -> str:
        raw = self.world.nodes.get(paths.stream_fault(stream))
        return "" if raw is None else StreamFault.from_json(raw).code

    @property
    def config(self) -> StreamConfig:
        return StreamConfig.from_json(self.world.nodes[paths.stream(ORDERS)])

    def assert_plain(self) -> None:
        """Nothing of ours is left but records."""
        world = self.world
        assert not [path for path in world.nodes if path.startswith((f"{paths.stream(ORDERS)}/", paths.adopted(TOPIC)))]
        assert paths.stream(ORDERS) not in world.nodes
        assert not [topic for topic in world.topics if topic.startswith("topics.orders.")]
        if TOPIC in world.topics:
            assert not world.topics[TOPIC].sealed


@pytest.fixture
def scene() -> Scene:
    return Scene()


def in_topic(world: World) -> list[str]:
    """The values in all partitions of the topic."""
    return [row.value for part in range(world.count(TOPIC)) for _, row in world.topics[shard(TOPIC, part)].visible()]


# Claims


def run(world: World, steps: Steps[None], *, stop_at: type[AnyEffect] | None = None) -> Steps[None]:
    """Carry out a procedure, up to an effect of a kind; gives what is left of it."""
    answer: Any = None
    while True:
        try:
            effect = steps.send(answer)
        except StopIteration:
            return steps
        if stop_at is not None and isinstance(effect, stop_at):
            return again(effect, steps)
        answer = world.execute(effect, world.controller_epoch)


def again(effect: AnyEffect, steps: Steps[None]) -> Steps[None]:
    """The rest of a procedure, with the effect that it has just asked for."""
    answer = yield effect
    while True:
        try:
            effect = steps.send(answer)
        except StopIteration:
            return
        answer = yield effect


@pytest.mark.parametrize("left", [None, b"gone/stream", b"not a stream"])
def test_of_two_groups_that_adopt_a_topic_at_once_one_gets_it(left: bytes | None) -> None:
    world = World()
    world.identity = world.controller_epoch = 1
    world.create(TOPIC, PARTITIONS)
    groups = [GroupName("one"), GroupName("two")]
    for path in (paths.GROUPS, paths.SCOPES, paths.TOPICS, *(paths.answers(group) for group in groups)):
        world.ensure(path)
    if left is not None:
        world.nodes[paths.adopted(TOPIC)] = left  # of a ZooKeeper that was restored
    halves: list[Steps[None]] = []
    for group in groups:
        world.ensure(f"{paths.requests(group)}/1")
        bench = Bench({}).group
        bench.name = group
        request = AdminRequest(
            kind=RequestKind.ADOPT_TOPIC, stream=f"{group.scope}/orders", topic=TOPIC, partitioner="murmur2",
            created_ms=0, buffer_partitions=1,
        )  # fmt: skip
        halves.append(run(world, create_stream(bench, "1", request, 0), stop_at=fx.Write))
    run(world, halves[0])
    with pytest.raises(LostRaceError):
        run(world, halves[1])
    made, lost = (stream_config(world, StreamName(group.scope, "orders")) for group in groups)
    assert (made.state, lost.state) == (StreamState.ACTIVE, StreamState.DELETING)
    assert world.nodes[paths.adopted(TOPIC)] == b"one/orders"


class Race(Scene):
    """Another group's leader writes a node at the moment at which this one is to carry out a request."""

    def __init__(self) -> None:
        self.rival: tuple[str, str, bytes] | None = None
        super().__init__()

    def befall(self) -> None:
        effect = self.leader.effect
        if self.rival is None or not isinstance(effect, fx.Write):
            return
        wanted, path, value = self.rival
        if any(
            isinstance(item, CreateNode | DeleteNode) and item.path.startswith(wanted) for item in effect.operations
        ):
            self.world.ensure(path)
            self.world.nodes[path] = value
            self.rival = None


def test_who_loses_the_race_for_a_topic_is_answered_at_once_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Race()
    ends, done = list[Any](), scene.leader._done

    def note(value: Any) -> None:
        ends.append(value)
        done(value)

    monkeypatch.setattr(scene.leader, "_done", note)
    scene.world.create("fresh", 2)
    winner = StreamName("others", "t")
    config = replace(stream_config(scene.world, ORDERS), name=winner, group=GroupName("others"), topic="fresh")
    scene.world.ensure(paths.stream(winner))
    scene.world.nodes[paths.stream(winner)] = config.to_json()
    before = set(scene.world.topics), set(scene.world.nodes)
    scene.rival = paths.adopted("fresh"), paths.adopted("fresh"), str(winner).encode()
    asked = scene.ask(RequestKind.ADOPT_TOPIC, StreamName("topics", "t"), topic="fresh", partitioner="murmur2")
    scene.until(lambda: scene.rival is None)
    scene.until(lambda: asked in scene.world.nodes, 200)
    assert ends.count(True) == 1, "a leader that is told nothing does not look for requests"
    answer = AdminAnswer.from_json(scene.world.nodes[asked])
    assert (answer.code, "adopted by stream others/t already" in answer.message) == (ConflictError.code, True)
    scene.until(lambda: set(scene.world.topics) == before[0])
    scene.until(lambda: paths.stream(StreamName("topics", "t")) not in scene.world.nodes)
    assert scene.terms_ended == 0


def test_the_buffer_of_a_stream_of_the_same_name_stays_when_a_race_is_lost() -> None:
    scene = Race()
    scene.world.create("fresh", 2)
    mine = StreamName("topics", "t")
    config = replace(stream_config(scene.world, ORDERS), name=mine, group=GroupName("others"), topic="elsewhere")
    scene.rival = paths.stream(mine), paths.stream(mine), config.to_json()
    answer = scene.answer(RequestKind.ADOPT_TOPIC, mine, topic="fresh", partitioner="murmur2")
    assert answer.code == "stream-exists"
    assert vars(scene)["rival"] is None
    scene.steps(200)
    assert scene.world.nodes[paths.stream(mine)] == config.to_json()
    assert mine.internal_buffer_topic(0) in scene.world.topics


@pytest.mark.parametrize("kind", [RequestKind.UPDATE_STREAM, RequestKind.UPDATE_GROUP, RequestKind.DELETE_STREAM])
def test_a_request_whose_write_never_applies_is_refused_and_holds_up_nothing(scene: Scene, kind: RequestKind) -> None:
    write, lost = scene.world.write, list[int]()

    def contradicted(operations: Sequence[NodeOperation], leader: int) -> bool:
        carries_out = any(isinstance(item, SetNode) and b"revision" in item.value for item in operations)
        if carries_out and any(isinstance(item, DeleteNode) and "/requests/" in item.path for item in operations):
            lost.append(leader)
            return False
        return write(operations, leader)

    scene.world.write = contradicted  # type: ignore[method-assign]
    more = {"retention": Retention(ms=1)} if kind is RequestKind.UPDATE_GROUP else {}
    asked = scene.ask(kind, None if more else OTHER, **more)
    scene.until(lambda: asked in scene.world.nodes, 1_000)
    assert AdminAnswer.from_json(scene.world.nodes[asked]).code == CoordinatorUnavailableError.code
    assert len(lost) == RACES_MAX
    scene.steps(200)
    assert (len(lost), scene.terms_ended) == (RACES_MAX, 0)
    assert scene.committed_soon(scene.commit())


def test_a_topic_has_one_stream(scene: Scene) -> None:
    answer = scene.adopt(StreamName("topics", "second"))
    assert answer.code == ConflictError.code
    assert paths.stream(StreamName("topics", "second")) not in scene.world.nodes


@pytest.mark.parametrize("found", [None, b"gone/stream", b"topics/other"])
def test_what_a_restored_zookeeper_says_of_a_topic_is_put_right(scene: Scene, found: bytes | None) -> None:
    path = paths.adopted(TOPIC)
    del scene.world.nodes[path]
    if found is None:
        del scene.world.nodes[paths.TOPICS]
    else:
        scene.world.nodes[path] = found
    scene.until(lambda: scene.world.nodes.get(path) == b"topics/orders")


# The watch


def test_added_partitions_are_taken_in_and_what_is_open_goes_on_in_all_of_them(scene: Scene) -> None:
    before = scene.open()
    scene.world.grow(TOPIC)
    scene.world.produce(shard(TOPIC, PARTITIONS), Record("n", "n=1"))
    scene.until(lambda: scene.config.partitions == PARTITIONS + 1)
    history = history_of(scene.world, ORDERS)
    assert [(record.cause, len(record.segments)) for record in history.records] == [("create", 3), ("grown", 4)]
    assert check_chain(history.records) == []
    assert [history.graph.predecessors(item.id) for item in history.active.segments] == [{}] * 4, "nothing was sealed"
    assert scene.committed_soon(scene.end(before, {1: 1, PARTITIONS: 1}))
    assert scene.committed_soon(scene.commit(segment=PARTITIONS))
    added = [row.value for _, row in scene.world.topics[shard(TOPIC, PARTITIONS)].visible()]
    assert len(added) == 3
    assert added[0] == "n=1"
    assert not scene.fault()
    assert scene.release().ok
    scene.assert_plain()
    assert not scene.terms_ended


def test_a_transaction_may_not_name_a_partition_that_there_is_not_yet(scene: Scene) -> None:
    began = scene.open()
    outcome = scene.ended(scene.end(began, {PARTITIONS: 1}))
    assert outcome.kind is ControlKind.ABORT
    assert f"has no segment {PARTITIONS}" in outcome.reason


def test_a_topic_grows_again_and_again_and_can_be_left(scene: Scene) -> None:
    began = scene.open()
    for count in (PARTITIONS + 1, PARTITIONS + 2):
        scene.world.grow(TOPIC)
        scene.until(lambda: scene.config.partitions == count)  # noqa: B023
        scene.take_over()
    scene.world.grow(TOPIC)  # nobody has seen that when the stream leaves
    answer = scene.answered(scene.leave((1 / (PARTITIONS + 3),)))
    assert answer.ok, answer.message
    history = history_of(scene.world, ORDERS)
    assert check_chain(history.records) == []
    assert len(history.ended_with(history.active.epoch)) == PARTITIONS + 3, "the one that was added last is left, too"
    # What was begun before all of that is rolled, into duplicates of the epoch that the topic has grown to.
    assert scene.committed_soon(scene.end(began, {0: 1, PARTITIONS + 1: 1}))
    history = history_of(scene.world, ORDERS)
    assert check_chain(history.records) == []
    assert not scene.terms_ended


def test_a_leave_with_segments_from_before_partitions_were_added_says_what_to_do(scene: Scene) -> None:
    scene.world.grow(TOPIC)  # nobody has seen that
    answer = scene.answered(scene.leave((1 / PARTITIONS,)))
    assert answer.code == "invalid-ranges"
    assert f"partitions were added to topic {TOPIC}" in answer.message
    assert f"{PARTITIONS + 1} segments now" in answer.message
    assert "nothing was sealed" in answer.message
    assert scene.answered(scene.leave((1 / (PARTITIONS + 1),))).ok
    assert not scene.terms_ended


def test_a_topic_with_more_partitions_than_a_stream_can_have_goes_on_with_those_that_it_had(scene: Scene) -> None:
    real = scene.world.state_of
    scene.world.state_of = lambda name: replace(real(name), partitions=SEGMENTS_MAX + 1)  # type: ignore[method-assign]
    scene.steps()
    assert scene.config.partitions == PARTITIONS
    assert scene.committed_soon(scene.commit())
    assert scene.answered(scene.leave()).code == "invalid-request"
    assert not scene.terms_ended


def test_a_topic_that_is_made_anew_with_more_partitions_is_another_one(scene: Scene) -> None:
    scene.world.lose(TOPIC)
    scene.world.create(TOPIC, PARTITIONS + 1)
    scene.until(lambda: scene.fault() == TOPIC_RECREATED)
    assert scene.config.partitions == PARTITIONS


def test_the_fault_of_an_earlier_release_goes_and_the_partitions_are_taken_in(scene: Scene) -> None:
    left = StreamFault("topic orders has 4 partitions, and had 3", "topic-grown", TOPIC, 0)
    scene.world.nodes[paths.stream_fault(ORDERS)] = left.to_json()
    scene.world.grow(TOPIC)
    scene.take_over()
    assert scene.committed_soon(scene.commit())
    assert not scene.fault()
    assert scene.config.partitions == PARTITIONS + 1


def test_a_refusal_of_a_topic_that_has_grown_holds_up_nobody_else(scene: Scene) -> None:
    scene.world.grow(TOPIC)
    scene.until(lambda: scene.config.partitions == PARTITIONS + 1)
    scene.world.refuses = lambda effect, _: (
        fx.EffectRefusedError(effect, "no", code="TOPIC_AUTHORIZATION_FAILED", topic=TOPIC)
        if isinstance(effect, fx.MergeFrames | fx.AppendTogether) and TOPIC in {item[0][0] for item in effect.items}
        else None
    )
    waiting, beside = scene.commit(), scene.commit(OTHER)
    scene.until(lambda: scene.committed(beside))
    scene.steps()
    assert scene.fault() == "TOPIC_AUTHORIZATION_FAILED"
    assert scene.outcome(waiting) is None
    scene.world.refuses = lambda *_: None
    scene.until(lambda: scene.committed(waiting))
    assert not scene.terms_ended


@pytest.mark.parametrize("lacks", [LEADERLESS, UNREPLICATED])
def test_nothing_is_sent_to_a_partition_that_has_no_leader_until_it_has_one(scene: Scene, lacks: str) -> None:
    """All other work of the group would wait for each try, or each would lock a transactional id."""
    sent: list[AnyEffect] = []

    def refuse(effect: AnyEffect, _: int) -> fx.EffectRefusedError | None:
        if isinstance(effect, fx.AppendMessages) and effect.messages.topic == TOPIC:
            sent.append(effect)
        if isinstance(effect, fx.MergeFrames | fx.AppendTogether) and TOPIC in {item[0][0] for item in effect.items}:
            sent.append(effect)
            return fx.EffectRefusedError(effect, "still so after 3 s", code=lacks, topic=TOPIC)
        return None

    looks = scene.world.unreadable if lacks == LEADERLESS else scene.world.unreplicated
    looks[TOPIC] = lacks
    scene.world.refuses = refuse
    waiting = scene.commit()
    scene.until(lambda: scene.fault() == lacks)
    tries = len(sent)
    scene.steps(3_000)
    assert scene.committed_soon(scene.commit(OTHER))
    assert len(sent) == tries
    assert scene.outcome(waiting) is None
    del looks[TOPIC]
    scene.world.refuses = lambda *_: None
    scene.until(lambda: scene.committed(waiting))
    assert not scene.terms_ended


@pytest.mark.parametrize("is_new", [False, True])
def test_nothing_is_committed_to_a_topic_that_is_gone_or_another_one(scene: Scene, is_new: bool) -> None:
    scene.world.lose(TOPIC)
    if is_new:
        scene.world.create(TOPIC, PARTITIONS)
    scene.until(lambda: scene.fault() == (TOPIC_RECREATED if is_new else TOPIC_DELETED))
    condition = StreamCondition(1, Condition(EMPTY, Scope.SEGMENT, b"k"))
    waiting, beside, expecting = scene.commit(), scene.commit(OTHER), scene.commit(OTHER, conditions=(condition,))
    scene.until(lambda: scene.committed(beside))
    # What is expected of a topic is judged by another one as little.
    for transaction in (waiting, expecting):
        ended = scene.ended(transaction)
        assert ended.kind is ControlKind.ABORT
        assert f"topic {TOPIC} was deleted" in ended.reason
    assert not is_new or not in_topic(scene.world)
    assert scene.release().ok
    scene.assert_plain()
    assert not scene.terms_ended
    if is_new:
        assert scene.adopt().ok
        assert scene.committed_soon(scene.commit())


@pytest.mark.parametrize("is_new", [False, True])
def test_what_is_open_does_not_keep_a_topic_that_is_gone_from_being_released(scene: Scene, is_new: bool) -> None:
    """Producers that begin one transaction after the other would never let it be."""

    def is_open(transaction: TransactionId) -> bool:
        return scene.leader.group is not None and transaction.bytes in scene.leader.group.fold.open

    began = scene.open()
    scene.until(lambda: is_open(began[1]))
    assert scene.release().code == "stream-busy"
    scene.world.lose(TOPIC)
    if is_new:
        scene.world.create(TOPIC, PARTITIONS)
    scene.until(lambda: scene.fault() == (TOPIC_RECREATED if is_new else TOPIC_DELETED))
    late = scene.open()
    scene.until(lambda: is_open(late[1]))
    assert scene.release().ok
    for transaction in (began, late):
        ended = scene.ended(transaction[1])
        assert ended.kind is ControlKind.ABORT
        assert f"topic {TOPIC} was deleted" in ended.reason
    scene.assert_plain()
    assert not scene.terms_ended
    if is_new:
        assert scene.adopt().ok
        assert scene.committed_soon(scene.commit())


def test_a_buffer_that_the_coordinator_may_not_make_is_named(scene: Scene) -> None:
    scene.world.create("second", 1)
    second = StreamName("topics", "second")
    buffer = second.internal_buffer_topic()
    scene.world.refuses = lambda effect, _: (
        fx.EffectRefusedError(effect, "no", code="TOPIC_AUTHORIZATION_FAILED")
        if isinstance(effect, fx.TopicIds) and buffer in effect.topics
        else None
    )
    answer = scene.answer(RequestKind.ADOPT_TOPIC, second, topic="second", partitioner="murmur2")
    assert not answer.ok
    assert f"may not describe {buffer} (TOPIC_AUTHORIZATION_FAILED)" in answer.message
    assert paths.stream(second) not in scene.world.nodes
    assert not scene.terms_ended


def test_a_stream_whose_buffer_is_gone_says_that_its_topic_is_to_be_released_and_adopted_again(scene: Scene) -> None:
    scene.world.lose(scene.config.buffer_topic)
    scene.take_over()
    scene.until(lambda: scene.fault() == BUFFER_LOST)
    reason = StreamFault.from_json(scene.world.nodes[paths.stream_fault(ORDERS)]).reason
    assert f"rollbridge stream release {TOPIC}, then adopt it again" in reason
    assert scene.release().ok
    assert scene.adopt().ok
    assert scene.committed_soon(scene.commit())


def test_a_topic_that_may_not_be_described_hides_no_other(scene: Scene) -> None:
    scene.world.create("second", 1)
    assert scene.answer(
        RequestKind.ADOPT_TOPIC, StreamName("topics", "second"), topic="second", partitioner="murmur2"
    ).ok
    real = scene.world.execute

    def execute(effect: AnyEffect, leader: int) -> Any:
        return None if isinstance(effect, fx.DescribeTopics) and "second" in effect.topics else real(effect, leader)

    scene.world.execute = execute  # type: ignore[method-assign]
    scene.world.grow(TOPIC)
    scene.until(lambda: scene.config.partitions == PARTITIONS + 1)


def test_how_long_the_topic_keeps_records_is_followed_and_times_are_whose_was_asked_for(scene: Scene) -> None:
    def stamped() -> set[str]:
        merged: set[str] = set()

        def look(effect: Any, _: object) -> None:
            if isinstance(effect, fx.MergeFrames | fx.AppendTogether) and effect.items:
                merged.update(effect.stamped)

        scene.world.refuses = look
        for name in (ORDERS, OTHER):
            assert scene.committed_soon(scene.commit(name))
        return merged

    epoch = history_of(scene.world, ORDERS).active
    assert (scene.config.kept_ms, scene.config.kept_in(epoch)) == (FOREVER, FOREVER)
    scene.world.configure(TOPIC, {"retention.ms": "60000"})
    scene.until(lambda: scene.config.kept_ms == 60_000)
    assert scene.config.kept_in(epoch) == 60_000
    assert stamped() == set()
    assert scene.answer(RequestKind.UPDATE_STREAM, ORDERS, retention=Retention(), timestamps="commit").ok
    assert scene.config.timestamps is RecordTimes.COMMIT
    assert scene.config.kept_in(epoch) == FOREVER, "it counts from the commit"
    assert stamped() == {TOPIC}
    assert not scene.answer(RequestKind.UPDATE_STREAM, ORDERS, retention=Retention(), timestamps="now").ok
    assert scene.answer(RequestKind.UPDATE_STREAM, ORDERS, retention=Retention()).ok
    assert scene.config.timestamps is RecordTimes.COMMIT, "earlier clients say nothing of it"
    scene.world.configure(TOPIC, {"retention.ms": "60000", "cleanup.policy": "compact"})
    scene.until(lambda: scene.config.kept_ms == FOREVER)


def test_limits_follow_the_settings_of_the_topic(scene: Scene) -> None:
    assert scene.config.limits is not None
    scene.world.configure(TOPIC, {"max.message.bytes": "200000"})
    scene.until(lambda: scene.config.limits == TopicLimits(200_000))
    assert scene.config.record_bytes_max < 200_000
    assert scene.committed_soon(scene.commit())


def test_commits_wait_while_a_topic_takes_no_markers_and_others_go_on(scene: Scene) -> None:
    scene.world.configure(TOPIC, {"max.message.bytes": "77"})
    scene.until(lambda: scene.fault() == TOPIC_CLOSED)
    waiting, beside = scene.commit(), scene.commit(OTHER)
    scene.until(lambda: scene.committed(beside))
    scene.take_over()
    scene.steps()
    assert scene.outcome(waiting) is None
    scene.world.configure(TOPIC, {"max.message.bytes": "1048588"})
    scene.until(lambda: scene.committed(waiting))
    assert scene.fault() == ""
    assert not scene.terms_ended


# Leaving


def test_a_topic_that_is_created_again_while_the_stream_leaves_it_is_not_closed(scene: Scene) -> None:
    path = scene.leave()
    scene.until(lambda: isinstance(scene.leader.effect, fx.Seal))
    scene.world.lose(TOPIC)
    scene.world.create(TOPIC, PARTITIONS)
    assert scene.answered(path).code == "conflict"
    assert not scene.world.topics[TOPIC].sealed
    scene.until(lambda: scene.fault() == TOPIC_RECREATED)
    assert not scene.terms_ended


def test_a_seal_that_waits_does_not_make_the_seal_a_limit_of_the_stream(scene: Scene) -> None:
    was = scene.config
    path = suspended_leave(scene)
    scene.steps()
    assert scene.config.limits == was.limits
    assert scene.config.record_bytes_max == was.record_bytes_max
    scene.world.end_foreign(-1)
    assert scene.answered(path).ok
    assert scene.config.limits is None, "its own topics take what streams take"
    scene.until(lambda: not scene.fault())
    assert scene.committed_soon(scene.commit(segment=PARTITIONS))


def suspended_leave(scene: Scene) -> str:
    """A scale that waits, half done, for a native transaction that has begun right before the seal."""
    path = scene.leave()
    scene.until(lambda: isinstance(scene.leader.effect, fx.Seal))
    assert scene.world.append_foreign(shard(TOPIC, 1), -1, Record("n", "n=1"))
    scene.until(lambda: scene.fault() == SUSPENDED)
    return path


def test_an_earlier_fault_does_not_end_the_suspension_of_a_leaving(scene: Scene) -> None:
    suspended_leave(scene)
    left = StreamFault("of an earlier leader", TOPIC_CLOSED, TOPIC, 0)
    scene.world.nodes[paths.stream_fault(ORDERS)] = left.to_json()
    scene.take_over()
    waiting = scene.commit()
    scene.steps()
    assert scene.outcome(waiting) is None
    assert not scene.terms_ended
    scene.world.end_foreign(-1)
    scene.until(lambda: scene.committed(waiting))


def test_a_suspended_leaving_is_given_up_by_a_release_that_leaves_nothing(scene: Scene) -> None:
    path = suspended_leave(scene)
    scene.take_over()
    assert scene.release().ok
    assert scene.answered(path).code == "stream-not-found"
    scene.world.end_foreign(-1)
    scene.assert_plain()
    assert scene.world.settings_of(TOPIC) == TOPIC_SETTINGS
    assert scene.adopt().ok
    assert scene.committed_soon(scene.commit())


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_topic_that_is_made_anew_while_the_stream_leaves_it_stays_open(scene: Scene, is_suspended: bool) -> None:
    if is_suspended:
        path = suspended_leave(scene)
    else:
        path = scene.leave()
        scene.until(lambda: isinstance(scene.leader.effect, fx.CreateTopics))
    scene.world.lose(TOPIC)
    scene.world.create(TOPIC, PARTITIONS)
    scene.take_over()
    assert scene.answered(path).code == ConflictError.code
    scene.until(lambda: scene.fault() == TOPIC_RECREATED)
    assert not scene.world.topics[TOPIC].sealed
    assert scene.release().ok
    scene.assert_plain()


def test_a_closed_topic_that_has_grown_can_be_released(scene: Scene) -> None:
    suspended_leave(scene)
    scene.world.grow(TOPIC)
    scene.world.end_foreign(-1)
    waiting = scene.commit()
    scene.steps()
    assert scene.outcome(waiting) is None
    assert scene.answered(scene.ask(RequestKind.ABORT_TRANSACTION, transaction=str(waiting))).ok
    assert scene.release().ok
    scene.assert_plain()


def test_what_was_made_for_a_refused_leaving_goes_with_the_stream(scene: Scene) -> None:
    scene.world.refuses = lambda effect, _: (
        fx.EffectRefusedError(effect, "no", code="not-authorized", topic=TOPIC) if isinstance(effect, fx.Seal) else None
    )
    assert scene.answered(scene.leave()).code == "not-authorized"
    scene.world.refuses = lambda *_: None
    assert [topic for topic in scene.world.topics if topic.startswith("topics.orders.segment")]
    assert scene.release().ok
    scene.assert_plain()


def test_settings_that_an_owner_has_changed_since_a_leaving_was_refused_are_kept(scene: Scene) -> None:
    scene.world.refuses = lambda effect, _: (
        fx.EffectRefusedError(effect, "no", code="not-authorized", topic=TOPIC) if isinstance(effect, fx.Seal) else None
    )
    assert not scene.answered(scene.leave()).ok
    scene.world.refuses = lambda *_: None
    scene.world.configure(TOPIC, {"max.message.bytes": "5000000"})
    assert scene.release().ok
    assert scene.world.settings_of(TOPIC)["max.message.bytes"] == "5000000"


@pytest.mark.parametrize("what", ["nothing", "deleted", "new", "opened"])
def test_a_stream_that_has_left_gives_the_topic_back(scene: Scene, what: str) -> None:
    assert scene.answered(scene.leave()).ok
    assert scene.world.topics[TOPIC].sealed
    assert scene.committed_soon(scene.commit(segment=PARTITIONS))
    match what:
        case "deleted":
            scene.world.lose(TOPIC)
        case "new":
            scene.world.lose(TOPIC)
            scene.world.create(TOPIC, 1)
            scene.world.configure(TOPIC, {"compression.type": "lz4"})
        case "opened":
            scene.world.configure(TOPIC, {"compression.type": "lz4"})
    assert scene.release().code == "invalid-request"
    assert scene.answer(RequestKind.DELETE_STREAM, ORDERS).ok
    scene.assert_plain()
    assert scene.world.settings_of(TOPIC)["compression.type"] == ("lz4" if what in ("new", "opened") else "zstd")
    assert not scene.terms_ended


def test_a_fault_of_a_topic_ends_when_the_stream_has_left_it(scene: Scene) -> None:
    assert scene.answered(scene.leave()).ok
    fault = StreamFault("of an earlier leader, which brokers have told that the topic is gone", TOPIC_DELETED, TOPIC, 0)
    scene.world.nodes[paths.stream_fault(ORDERS)] = fault.to_json()
    scene.take_over()
    scene.until(lambda: not scene.fault())
    assert scene.committed_soon(scene.commit(segment=PARTITIONS))


def test_a_topic_that_its_owner_closes_is_not_left(scene: Scene) -> None:
    scene.world.configure(TOPIC, SEALED)
    scene.world.close([TOPIC])
    scene.world.refuses = lambda effect, _: (
        fx.EffectRefusedError(effect, "no", code="MESSAGE_TOO_LARGE", topic=TOPIC)
        if (isinstance(effect, fx.MergeFrames | fx.AppendTogether) and TOPIC in {item[0][0] for item in effect.items})
        or (isinstance(effect, fx.AppendMessages) and effect.messages.topic == TOPIC)
        else None
    )
    waiting = scene.commit()
    scene.until(lambda: scene.fault() == "MESSAGE_TOO_LARGE")
    scene.steps(2_000)
    assert history_of(scene.world, ORDERS).active.epoch == 0
    assert scene.outcome(waiting) is None
    scene.world.refuses = lambda *_: None
    scene.world.configure(TOPIC, TOPIC_SETTINGS)
    scene.until(lambda: scene.committed(waiting))


# Records of a topic that has the name, and is another one


def test_records_of_a_new_topic_are_neither_deleted_nor_copied(scene: Scene) -> None:
    """The stream has left the topic, whose owner makes a new one of its name."""
    assert scene.answered(scene.leave()).ok
    scene.world.lose(TOPIC)
    scene.world.create(TOPIC, PARTITIONS)
    theirs = [Record("n", f"n={number}") for number in range(30)]
    for number, record in enumerate(theirs):
        scene.world.produce(shard(TOPIC, number % PARTITIONS), record)
    scene.steps()
    own = [row for name, log in scene.world.topics.items() if ".segment-" in name for _, row in log.visible()]
    assert not [row for row in own if row.key == "n"], "records of the new topic were taken for late ones"
    cut = {SegmentId.of(number, 0): 2 for number in range(PARTITIONS)}
    assert scene.answer(RequestKind.TRUNCATE_STREAM, ORDERS, cut=cut).ok
    assert [scene.world.topics[shard(TOPIC, number)].start for number in range(PARTITIONS)] == [0] * PARTITIONS
    assert not scene.terms_ended


def test_a_new_topic_is_not_truncated_by_the_stream_of_the_old_one(scene: Scene) -> None:
    scene.world.lose(TOPIC)
    scene.world.create(TOPIC, PARTITIONS)
    for _ in range(5):
        scene.world.produce(TOPIC, Record("n", "n=1"))
    answer = scene.answer(RequestKind.TRUNCATE_STREAM, ORDERS, cut={SegmentId.of(0, 0): 2})
    assert answer.code == ConflictError.code
    assert scene.world.topics[TOPIC].start == 0


# Faults


def test_what_a_topic_keeps_is_its_owners_to_say_until_the_stream_leaves_it(scene: Scene) -> None:
    for limits in (Retention(ms=1_000), Retention(bytes=1_000), Retention(bytes=1_000, groups=("billing",))):
        answer = scene.answer(RequestKind.UPDATE_STREAM, ORDERS, retention=limits)
        assert answer.code == "invalid-request"
        assert "nothing was changed" in answer.message
        assert scene.config.retention == Retention()
    groups = Retention(groups=("billing",))
    assert scene.answer(RequestKind.UPDATE_STREAM, ORDERS, retention=groups).ok
    assert scene.config.retention == groups
    assert scene.answer(RequestKind.UPDATE_STREAM, ORDERS, retention=Retention()).ok
    assert scene.answered(scene.leave()).ok
    assert scene.answer(RequestKind.UPDATE_STREAM, ORDERS, retention=Retention(ms=10**9)).ok
    assert scene.config.retention == Retention(ms=10**9)


def test_no_topic_is_adopted_with_limits_of_what_it_keeps(scene: Scene) -> None:
    assert scene.release().ok
    limits = Retention(ms=1_000)
    kept = {"topic": TOPIC, "partitioner": "murmur2", "retention": limits}
    assert scene.answer(RequestKind.ADOPT_TOPIC, ORDERS, **kept).code == "invalid-request"
    scene.assert_plain()


def test_a_topic_with_the_name_of_a_stream_is_not_adopted_unless_by_that_stream() -> None:
    scene = Scene()
    name = StreamName("topics", "named")
    assert scene.answer(RequestKind.CREATE_STREAM, name, segments=1).ok
    scene.world.create(name.virtual_topic, PARTITIONS)  # its owner does not ask us
    refused = scene.answer(
        RequestKind.ADOPT_TOPIC, StreamName("topics", "elsewhere"), topic=name.virtual_topic, partitioner="murmur2"
    )
    assert refused.code == "invalid-name"
    assert "topics/named by that name" in refused.message
    assert paths.adopted(name.virtual_topic) not in scene.world.nodes
    assert scene.answer(RequestKind.DELETE_STREAM, name).ok
    assert scene.answer(RequestKind.ADOPT_TOPIC, name, topic=name.virtual_topic, partitioner="murmur2").ok
