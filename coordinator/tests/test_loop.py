"""Housekeeping that is refused for good rests, and nobody else notices."""

from __future__ import annotations

import random
from typing import Any

import pytest

from coordinator.tests.makers import GROUP, Bench
from coordinator.tests.scenes import ORDERS, OTHER, Scene
from rollbridge.base.effects import AnyEffect, Steps, run
from rollbridge.metadata import paths
from rollbridge.metadata.records import CreateNode
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.bookkeeping import Housekeeping
from rollbridge_coordinator.core.loop import undertake
from rollbridge_coordinator.core.requests import handle_requests
from rollbridge_coordinator.core.waits import REST_FIRST_MS, REST_MAX_MS
from rollbridge_coordinator.streams.pending_changes import TOPICS_AT_ONCE, mend_active


def test_what_was_refused_rests_ever_longer_until_it_is_done() -> None:
    house, now_ms, pauses = Housekeeping(), 0, []
    for _ in range(8):
        assert not house.is_resting("chore", now_ms)
        pauses.append(house.rest("chore", now_ms))
        assert house.is_resting("chore", now_ms + pauses[-1] - 1)
        now_ms += pauses[-1]
    assert pauses[:3] == [REST_FIRST_MS, 2 * REST_FIRST_MS, 4 * REST_FIRST_MS]
    assert pauses[-1] == REST_MAX_MS
    assert not house.is_resting("chore", now_ms - 2 * REST_MAX_MS), "nor if the clock was set back"
    house.rested("chore")
    assert house.rest("chore", now_ms) == REST_FIRST_MS


def test_a_chore_that_is_refused_leaves_nothing_in_the_round_and_is_counted() -> None:
    group, done = Bench({"sales/orders": 1}).group, []

    def chore(*_: Any) -> Steps[None]:
        done.append("begun")
        yield fx.Now()
        done.append("ended")

    def answer(effect: AnyEffect) -> Any:
        asked.append(type(effect))
        if isinstance(effect, fx.Now) and len(asked) == 1:
            raise fx.EffectRefusedError(effect, "no", code="POLICY_VIOLATION")

    asked: list[type] = []
    for now_ms in (0, 1, REST_FIRST_MS):
        run(undertake(group, "chore", chore, now_ms), answer)
    assert asked == [fx.Now, fx.AbortRound, fx.Now]
    assert done == ["begun", "begun", "ended"]
    assert group.counts["chores_refused"] == 1


REFUSED = {
    "snapshots": lambda effect: isinstance(effect, fx.AppendMessages) and "snapshot" in effect.messages.topic,
    "records of transactions": lambda effect: (
        isinstance(effect, fx.Write)
        and any(isinstance(item, CreateNode) and "/transactions/" in item.path for item in effect.operations)
    ),
    "looks at late records": lambda effect: isinstance(effect, fx.ReadLate | fx.EndOffsets) and "late" in str(effect),
    "active segments": lambda effect: isinstance(effect, fx.MendTopics),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_chore_that_is_refused_rests_and_everything_else_goes_on(what: str) -> None:
    scene = Scene()
    scene.world.refuses = lambda effect, _: (
        fx.EffectRefusedError(effect, "no", code="POLICY_VIOLATION") if REFUSED[what](effect) else None
    )
    scene.commit(ORDERS, scene.old)
    for _ in range(5):
        scene.others_go_on()
    scene.until(lambda: scene.outcome(scene.old) is not None)
    scene.check()
    assert scene.visible(scene.old) == 1
    lasting = scene.begin(OTHER)
    scene.steps(400)
    assert scene.terms_ended == 0
    scene.world.refuses = lambda *_: None
    bucket = paths.transaction(GROUP, lasting)
    scene.until(lambda: bucket in scene.world.nodes)


def test_a_request_whose_answer_is_refused_is_not_tried_for_ever() -> None:
    group = Bench({"sales/orders": 1}).group
    name = f"{paths.REQUEST_PREFIX}{1:010d}"

    def answer(effect: AnyEffect) -> Any:
        tried.append(effect)
        match effect:
            case fx.ReadChildren(asked):
                return {key: [name] for key in asked}
            case fx.ReadNodes(asked):
                return dict.fromkeys(asked, b"no request")
            case fx.Write():
                raise fx.EffectRefusedError(effect, "quota", code="zookeeper-refused")
        return None

    tried: list[AnyEffect] = []
    run(handle_requests(group, 0), answer)
    assert sum(isinstance(item, fx.Write) for item in tried) == 2, "with the answer, and without"
    tried.clear()
    run(handle_requests(group, 0), answer)
    assert not any(isinstance(item, fx.Write) for item in tried)


def test_all_active_segments_are_looked_at_once_some_at_a_time_and_one_that_is_refused_spoils_no_other() -> None:
    group = Bench({"sales/orders": 70, "sales/other": 3}).group
    refused = random.Random(1).choice([f"sales.orders.segment-{number}.epoch-0" for number in range(70)])

    def answer(effect: AnyEffect) -> Any:
        assert isinstance(effect, fx.MendTopics)
        assert effect.optional
        names = [item.name for item in effect.topics]
        assert len(names) <= TOPICS_AT_ONCE
        if refused in names:
            raise fx.EffectRefusedError(effect, "no", code="not-authorized")
        if away:
            return None
        seen.extend(names)
        return {}

    seen: list[str] = []
    away = True
    run(mend_active(group, 0), answer)
    assert not seen
    away = False
    for now_ms in range(1_000, 10_000, 1_000):
        run(mend_active(group, now_ms), answer)
    assert len(seen) == len(set(seen)) == 72
    assert not group.housekeeping.unmended
