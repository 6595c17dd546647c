"""Creation of streams whose topics are there already, or are written to at once, against the simulated world."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.errors import InvalidNameError
from bridge.model import paths
from bridge.model.identifiers import SegmentId
from bridge.model.names import StreamName
from bridge.model.requests import Request, RequestKind
from coordinator import effects as fx
from coordinator.procedures.streams import create_stream
from coordinator.tests.makers import GROUP, Bench
from coordinator.tests.sim_world import Entry, World

ORDERS = StreamName.parse("sales/orders")
TOPICS = [ORDERS.buffer_topic(), *(ORDERS.segment_topic(SegmentId.of(number, 0)) for number in (0, 1))]
REQUEST = Request(kind=RequestKind.CREATE_STREAM, stream=str(ORDERS), segments=2, created_ms=0, buffer_partitions=1)


@pytest.fixture
def world() -> World:
    """One without streams, and with a request to make one."""
    world = World()
    world.identity = world.controller_epoch = 1
    for path in (paths.GROUPS, paths.SCOPES, paths.answers(GROUP), f"{paths.requests(GROUP)}/1"):
        world.ensure(path)
    return world


def create(world: World, *, late_into: str = "") -> bool:
    """Create the stream while a late writer waits for a topic; tells whether it exists afterwards."""
    steps, answer = create_stream(Bench({}).group, "1", REQUEST, 0), None
    while True:
        try:
            effect: Any = steps.send(answer)
        except StopIteration:
            return paths.stream(ORDERS) in world.nodes
        answer = world.execute(effect, 1)
        if late_into and isinstance(effect, fx.CreateTopics):
            world.topics[late_into].entries.append(Entry("late"))


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


def test_topics_that_a_leader_made_before_it_crashed_are_used(world: World) -> None:
    steps, answer = create_stream(Bench({}).group, "1", REQUEST, 0), None
    while not isinstance(effect := steps.send(answer), fx.CreateTopics):
        answer = world.execute(effect, 1)
    made = world.execute(effect, 1)
    assert create(world)
    assert {name: topic.id for name, topic in world.topics.items()} == made
