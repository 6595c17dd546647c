"""Streams that an earlier version has moved into another group: refused by name, while all others are led."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from coordinator.tests.sim_actors import stream_config
from coordinator.tests.test_refused_rolls import GROUP, OTHER, Scene
from rollbridge.model import paths
from rollbridge.model.changes import STREAM_MOVED, StreamFault
from rollbridge.model.ids import SegmentId
from rollbridge.model.names import StreamName
from rollbridge.model.requests import AdminRequest, RequestKind

MOVED = StreamName("sales", "moved")


class MovedScene(Scene):
    """A group with a stream of a development build, taken over by this version."""

    def __init__(self, **left: Any) -> None:
        super().__init__()
        self.ask(AdminRequest(kind=RequestKind.CREATE_STREAM, stream=str(MOVED), segments=1, created_ms=0))
        self.until(lambda: paths.stream(MOVED) in self.world.nodes)
        config = replace(stream_config(self.world, MOVED), **left)
        if config.moves:
            del self.world.topics[MOVED.buffer_topic()]
            config = replace(config, buffer_topic_id=self.world.create(config.buffer_topic))
        self.buffer = config.buffer_topic
        self.world.nodes[paths.stream(MOVED)] = config.to_json()
        self.take_over()

    def answer(self, kind: RequestKind) -> dict[str, Any]:
        """Return the answer to a request about the stream."""
        before = set(self.world.children(paths.answers(GROUP)))
        self.ask(AdminRequest(kind=kind, stream=str(MOVED), seal=(0,), ranges=((0.0, 1.0),), created_ms=0))
        self.until(lambda: len(set(self.world.children(paths.answers(GROUP))) - before) == 1)
        (name,) = set(self.world.children(paths.answers(GROUP))) - before
        found: dict[str, Any] = json.loads(self.world.nodes[f"{paths.answers(GROUP)}/{name}"])
        return found


@pytest.mark.parametrize("left", [{"moves": 2}, {"moving_to": "audit"}], ids=["moved", "in the middle"])
def test_a_stream_that_was_moved_is_refused_by_name_and_the_rest_is_led(left: dict[str, Any]) -> None:
    scene = MovedScene(**left)
    scene.others_go_on()
    fault = StreamFault.from_json(scene.world.nodes[paths.stream_fault(MOVED)])
    assert (fault.code, str(MOVED) in fault.reason) == (STREAM_MOVED, True)
    scene.take_over()
    scene.others_go_on()
    assert StreamFault.from_json(scene.world.nodes[paths.stream_fault(MOVED)]) == fault, "it is noted once"
    refused = scene.answer(RequestKind.SCALE_STREAM)
    assert not refused["ok"]
    assert str(MOVED) in refused["message"]
    assert scene.answer(RequestKind.DELETE_STREAM)["ok"]
    assert not {scene.buffer, MOVED.segment_topic(SegmentId.of(0, 0))} & scene.world.topics.keys()
    assert paths.stream_fault(MOVED) not in scene.world.nodes
    scene.others_go_on()
    assert paths.stream_fault(OTHER) not in scene.world.nodes
