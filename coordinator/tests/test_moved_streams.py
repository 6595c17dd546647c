"""Streams that an earlier version has moved into another group: refused by name, while all others are led."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.tests.scenes import OTHER, Scene
from coordinator.tests.sim_actors import stream_config
from rollbridge.base.ids import SegmentId
from rollbridge.metadata import paths
from rollbridge.metadata.changes import STREAM_MOVED, StreamFault
from rollbridge.metadata.requests import RequestKind
from rollbridge.stream.names import StreamName

MOVED = StreamName("sales", "moved")


class MovedScene(Scene):
    """A group with a stream of a development build, taken over by this version."""

    def __init__(self, **left: Any) -> None:
        super().__init__()
        self.create(MOVED)
        config = replace(stream_config(self.world, MOVED), **left)
        if config.moves:
            del self.world.topics[MOVED.buffer_topic()]
            config = replace(config, buffer_topic_id=self.world.create(config.buffer_topic))
        self.buffer = config.buffer_topic
        self.world.nodes[paths.stream(MOVED)] = config.to_json()
        self.take_over()


@pytest.mark.parametrize("left", [{"moves": 2}, {"moving_to": "audit"}], ids=["moved", "in the middle"])
def test_a_stream_that_was_moved_is_refused_by_name_and_the_rest_is_led(left: dict[str, Any]) -> None:
    scene = MovedScene(**left)
    scene.others_go_on()
    fault = StreamFault.from_json(scene.world.nodes[paths.stream_fault(MOVED)])
    assert (fault.code, str(MOVED) in fault.reason) == (STREAM_MOVED, True)
    scene.take_over()
    scene.others_go_on()
    assert StreamFault.from_json(scene.world.nodes[paths.stream_fault(MOVED)]) == fault, "it is noted once"
    refused = scene.answer(RequestKind.SCALE_STREAM, MOVED, seal=(0,), ranges=((0.0, 1.0),))
    assert not refused.ok
    assert str(MOVED) in refused.message
    assert scene.answer(RequestKind.DELETE_STREAM, MOVED).ok
    assert not {scene.buffer, MOVED.segment_topic(SegmentId.of(0, 0))} & scene.world.topics.keys()
    assert paths.stream_fault(MOVED) not in scene.world.nodes
    scene.others_go_on()
    assert paths.stream_fault(OTHER) not in scene.world.nodes
