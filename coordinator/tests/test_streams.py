"""Creation of streams whose topics are there already, or are written to at once, against the simulated world."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from coordinator.tests.makers import GROUP, Bench
from coordinator.tests.sim_world import Entry, World
from rollbridge.base.effects import AnyEffect, Steps, run
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import DLSN, EMPTY, SN
from rollbridge.errors import InvalidNameError, InvalidRequestError, StreamRecreatedError
from rollbridge.metadata import paths
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.conditions import Condition, Scope, holds
from rollbridge.stream.config import StreamConfig, StreamState
from rollbridge.stream.epochs import EpochHistory, check_chain, without_epochs
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import StreamName
from rollbridge.stream.positions import FORMER_MAX, UNSEEN_RECORDS, DeletedStream, former_among
from rollbridge.stream.reading import KeyLineage, ReadingPlan
from rollbridge.stream.truncation import floors_of
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core import stream_state
from rollbridge_coordinator.streams.create import create_stream, delete_further, delete_stream

ORDERS = StreamName.parse("sales/orders")
TOPICS = [ORDERS.buffer_topic(), *(ORDERS.segment_topic(SegmentId.of(number, 0)) for number in (0, 1))]
REQUEST = AdminRequest(
    kind=RequestKind.CREATE_STREAM, stream=str(ORDERS), segments=2, created_ms=0, buffer_partitions=1
)


@pytest.fixture
def world() -> World:
    """One without streams, and with a request to make one."""
    world = World()
    world.identity = world.controller_epoch = 1
    for path in (paths.GROUPS, paths.SCOPES, paths.answers(GROUP), f"{paths.requests(GROUP)}/1"):
        world.ensure(path)
    return world


def create(world: World, *, late_into: str = "", request: AdminRequest = REQUEST) -> bool:
    """Create the stream while a late writer waits for a topic; tells whether it exists afterwards."""

    def answer(effect: AnyEffect) -> Any:
        result = world.execute(effect, 1)
        if late_into and isinstance(effect, fx.CreateTopics):
            world.topics[late_into].entries.append(Entry("late"))
        return result

    run(create_stream(Bench({}).group, "1", request, 0), answer)
    return paths.stream(ORDERS) in world.nodes


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_arrives_late_in_a_new_topic_does_not_stop_it(world: World, number: int) -> None:
    assert create(world, late_into=TOPICS[number])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_topic_with_records_of_somebody_else_is_left_alone(world: World, number: int) -> None:
    world.create(TOPICS[number])
    world.topics[TOPICS[number]].entries.append(Entry("foreign"))
    with pytest.raises(InvalidNameError, match=f"topic {TOPICS[number]} exists already .* not created; delete"):
        create(world)
    assert paths.stream(ORDERS) not in world.nodes


def test_a_stream_by_whose_name_the_brokers_have_a_topic_is_refused_and_leaves_nothing(world: World) -> None:
    world.create(ORDERS.virtual_topic)
    with pytest.raises(InvalidNameError, match=r"brokers have topic sales\.orders, .* nothing was written; choose"):
        create(world)
    assert paths.stream(ORDERS) not in world.nodes
    assert set(world.topics) == {ORDERS.virtual_topic}


@pytest.mark.parametrize("replicas", [-(1 << 15) - 1, -2, 0, 1 << 15, (1 << 31) - 1])
def test_no_more_replicas_are_asked_for_than_a_request_to_kafka_can_say(world: World, replicas: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{replicas} replicas asked for; 1 to 32767 are possible"):
        create(world, request=replace(REQUEST, replication_factor=replicas))
    assert not world.topics


def test_topics_that_a_leader_made_before_it_crashed_are_used(world: World) -> None:
    steps, answer = create_stream(Bench({}).group, "1", REQUEST, 0), None
    while not isinstance(effect := steps.send(answer), fx.CreateTopics):
        answer = world.execute(effect, 1)
    made = world.execute(effect, 1)
    assert create(world)
    assert {name: topic.id for name, topic in world.topics.items()} == made


class Lives:
    """The stream, created and deleted again and again."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.world.create(GROUP.terminated_topic)
        self.bench = Bench({})
        self.made = 1

    def topics(self) -> set[str]:
        """The topics of streams."""
        return self.world.topics.keys() - {GROUP.terminated_topic}

    def create(self) -> stream_state.LedStream:
        """Create it, to the end."""
        self._run(create_stream(self.bench.group, self._request(), REQUEST, 0))
        return self.bench.group.streams[str(ORDERS)]

    def delete(self, *, stop_before: int | None = None) -> bool:
        """Delete it; or die before so many effects. Tells whether it is gone."""
        self._run(self._deletion(self._request()), stop_before)
        return paths.stream(ORDERS) not in self.world.nodes

    def take_over(self) -> None:
        """A new leader finishes what the one before left behind."""
        config = StreamConfig.from_json(self.world.nodes[paths.stream(ORDERS)])
        self.bench = Bench({})
        self.bench.group.doomed[str(ORDERS)] = stream_state.Doomed(config)
        self._run(self._deletion())

    def _deletion(self, request: str | None = None) -> Steps[None]:
        group = self.bench.group
        if request is not None:
            yield from delete_stream(group, request, group.streams[str(ORDERS)], 0)
        while group.doomed:
            yield from delete_further(group, 0)

    def _request(self) -> str:
        self.made += 1
        self.world.ensure(f"{paths.requests(GROUP)}/{self.made}")
        return str(self.made)

    def _run(self, steps: Steps[None], stop_before: int | None = None) -> None:
        answer: Any = None
        for number in itertools.count():
            try:
                effect: Any = steps.send(answer)
            except StopIteration:
                return
            if number == stop_before:
                return
            answer = self.world.execute(effect, 1)


@pytest.fixture
def lives(world: World) -> Lives:
    return Lives(world)


def test_another_life_of_a_stream_uses_no_name_and_no_number_of_the_one_before(lives: Lives) -> None:
    topics: set[str] = set()
    numbers: list[int] = []
    partitions: list[int] = []
    for life in range(4):
        stream = lives.create()
        assert stream.history.born == stream.config.first_epoch == life
        assert topics.isdisjoint(lives.topics())
        topics |= lives.topics()
        for segment in stream.history.active.segments:
            lives.world.topics[stream.place_of(segment.id)[0]].entries.extend(Entry("record") for _ in range(5))
            base = stream.history.graph.sequence_bases[segment.id]
            assert base > max(numbers, default=-1)
        partitions += stream.history.graph.partitions.values()
        assert partitions == list(range(len(partitions)))
        numbers += [base + 4 for base in stream.history.graph.sequence_bases.values()]
        assert not check_chain(stream.history.records, stream.history.first, stream.history.born)
        assert lives.delete()
        assert not lives.topics()
    assert len(lives.world.children(paths.deleted_streams(ORDERS.scope))) == 4


@pytest.mark.parametrize("place", range(20))
def test_a_deletion_that_stops_anywhere_and_is_finished_by_another_leader_keeps_the_numbers(
    lives: Lives, place: int
) -> None:
    first = lives.create()
    topics = lives.topics()
    for segment in first.history.active.segments:
        lives.world.topics[first.place_of(segment.id)[0]].entries.extend(Entry("record") for _ in range(5))
    if not lives.delete(stop_before=place):
        marked = StreamConfig.from_json(lives.world.nodes[paths.stream(ORDERS)]).state is StreamState.DELETING
        if not marked:
            return
        lives.take_over()
    second = lives.create()
    assert second.config.first_epoch == 1
    assert second.history.born_sequence >= 5
    assert topics.isdisjoint(lives.topics())


def test_a_stream_that_another_version_has_marked_and_whose_topics_are_gone_is_buried_with_room(lives: Lives) -> None:
    lives.create()
    assert not lives.delete(stop_before=1)
    for topic in lives.topics():
        del lives.world.topics[topic]
    lives.take_over()
    assert lives.create().history.born_sequence > UNSEEN_RECORDS


def test_what_is_kept_of_deleted_streams_is_bounded(world: World) -> None:
    world.ensure(paths.deleted_streams(ORDERS.scope))
    for number in range(FORMER_MAX):
        world.nodes[
            f"{paths.deleted_streams(ORDERS.scope)}/{DeletedStream(number + 1, 7 * number).node(f's-{number}')}"
        ] = b""
    lives = Lives(world)
    lives.create()
    assert lives.delete()
    kept = world.children(paths.deleted_streams(ORDERS.scope))
    assert len(kept) < FORMER_MAX
    for number in (0, 400, FORMER_MAX - 1):
        known = former_among(kept, StreamName(ORDERS.scope, f"s-{number}"))
        assert known.epoch > number
        assert known.sequence >= 7 * number
    floor = former_among(kept, StreamName(ORDERS.scope, "never-there"))
    assert lives.create().config.first_epoch >= floor.epoch > 1


def test_nothing_of_a_former_life_is_accepted() -> None:
    history = EpochHistory.create(even_ranges(2), 5, born=3, base=1_000)
    old = SegmentId.of(0, 1)
    assert not history.is_removed(old)
    for refused in (
        lambda: ReadingPlan(history, start={old: 4}),
        lambda: floors_of(history, {old: 4}),
        lambda: history.record(2),
        lambda: ReadingPlan(EpochHistory.create(even_ranges(2), 5)).update(history),
    ):
        with pytest.raises(StreamRecreatedError):
            refused()
    lineage = KeyLineage(history, 0.1)
    for expected in (SN(sequence_id=17), SN(DLSN(1, 0, 4)), SN(DLSN(1, 0, 4), None, 4)):
        for scope in Scope:
            with pytest.raises(InvalidRequestError, match="deleted"):
                holds(Condition(expected, scope, b"key"), EMPTY, 1_007, lineage)
    bases = without_epochs(scaled_twice(history), 5).graph.sequence_bases
    assert min(bases.values()) >= 1_000


def scaled_twice(history: EpochHistory) -> EpochHistory:
    """The same with two more epochs, each of which replaces all of the one before."""
    for _ in range(2):
        record = history.plan_scale([item.id.number for item in history.active.segments], even_ranges(2), 6)
        ends = {item.id: 10 for item in history.active.segments}
        history = history.with_records(replace(record, sealed_ends=ends))
    return history.with_removed(item for item in history.segments() if item.epoch < 5)
