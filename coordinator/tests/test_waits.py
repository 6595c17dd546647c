"""Rounds without a known outcome: the transaction that provokes them is refused, exactly once, and all others go on.

Played in the simulated world with the real procedures. An effect that is doubtful ends the term, after its work was
done or not; the next leader takes the identity, which ends what was open, and reads the log.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from coordinator.tests.makers import Bench
from coordinator.tests.scenes import ORDERS, OTHER, Scene
from rollbridge.base.effects import AnyEffect
from rollbridge.base.ids import TransactionId
from rollbridge.commitlog.control import ControlKind
from rollbridge.stream.names import is_segment_topic
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import UNKNOWN_MAX, UnknownOutcomes


class Unknown(Exception):
    """Nobody knows what became of an effect."""


class Doubtful(Scene):
    """A scene in which effects may leave a doubt; the term ends then, as in the shell."""

    def __init__(self) -> None:
        self.unknown_outcomes = UnknownOutcomes()
        self.unknown = 0
        super().__init__()

    def step(self) -> None:
        group = self.leader.group
        if group is not None and group.waits.unknown_outcomes is not self.unknown_outcomes:
            group.waits.unknown_outcomes = self.unknown_outcomes
        try:
            super().step()
        except Unknown:
            self.unknown += 1
            self.unknown_outcomes.note_unknown()
            self.take_over()

    def holds(self, effect: AnyEffect, identifier: TransactionId) -> bool:
        """Whether a record of a transaction is among the frames of an effect."""
        return isinstance(effect, fx.MergeFrames | fx.AppendTogether) and any(
            json.loads(self.world.batch_of(frame))[0][2] == str(identifier) for _, frame in effect.items
        )

    def doubt(self, guilty: Callable[[AnyEffect], bool]) -> None:
        def judge(effect: AnyEffect, _: int) -> None:
            if guilty(effect):
                raise Unknown

        self.world.refuses = judge


def test_who_provokes_unknown_outcomes_is_refused_and_others_of_its_round_are_committed() -> None:
    scene = Doubtful()
    bad, *good = (scene.begin(OTHER) for _ in range(4))
    scene.doubt(lambda effect: scene.holds(effect, bad))
    for item in (good[0], bad, *good[1:]):
        scene.commit(OTHER, item)
    scene.until(lambda: all(scene.outcome(item) is not None for item in (bad, *good)))
    outcome = scene.outcome(bad)
    assert outcome is not None
    assert outcome.kind is ControlKind.ABORT
    assert f"no known outcome {UNKNOWN_MAX} times in a row" in outcome.reason
    assert [scene.visible(item) for item in (bad, *good)] == [0, 1, 1, 1]
    assert UNKNOWN_MAX <= scene.unknown <= UNKNOWN_MAX + 1
    assert not scene.unknown_outcomes
    scene.doubt(lambda _: False)
    scene.others_go_on()


def test_brokers_that_answer_nothing_to_anybody_end_no_transaction() -> None:
    """They fail the probe as well, before anybody is suspected."""
    scene = Doubtful()
    items = [scene.begin(OTHER) for _ in range(3)]

    def guilty(effect: AnyEffect) -> bool:
        probes = isinstance(effect, fx.AppendMessages) and is_segment_topic(effect.messages.topic)
        return probes or isinstance(effect, fx.MergeFrames | fx.AppendTogether)

    scene.doubt(guilty)
    for item in items:
        scene.commit(OTHER, item)
    scene.until(lambda: scene.unknown > 3 * UNKNOWN_MAX)
    scene.doubt(lambda _: False)
    scene.until(lambda: all(scene.outcome(item) is not None for item in items))
    assert [scene.visible(item) for item in items] == [1, 1, 1]
    assert not scene.unknown_outcomes


def test_a_commit_that_was_carried_out_without_an_answer_is_not_refused() -> None:
    scene = Doubtful()
    item = scene.begin(OTHER)
    execute = scene.world.execute
    rounds: list[bool] = []

    def silent(effect: AnyEffect, leader: int) -> object:
        result = execute(effect, leader)
        if isinstance(effect, fx.MergeFrames | fx.AppendTogether):
            rounds.append(scene.holds(effect, item))
        if isinstance(effect, fx.CommitRound) and any(rounds):
            rounds.clear()
            raise Unknown
        return result

    scene.world.execute = silent  # type: ignore[method-assign]
    scene.commit(OTHER, item)
    scene.until(lambda: scene.outcome(item) is not None)
    assert scene.visible(item) == 1
    scene.others_go_on()
    assert scene.visible(item) == 1


def test_one_that_provokes_them_in_a_rolling_commit_is_refused_and_the_roll_ends() -> None:
    scene = Doubtful()
    scene.doubt(lambda effect: scene.holds(effect, scene.old))
    scene.commit(ORDERS, scene.old)
    outcome = scene.ended(scene.old)
    assert outcome.kind is ControlKind.ABORT
    assert "no known outcome" in outcome.reason
    assert scene.visible(scene.old) == 0
    scene.others_go_on()


@pytest.mark.parametrize("together", [False, True])
def test_a_round_of_several_makes_all_suspects_and_counts_for_none_unless_it_can_not_be_parted(
    together: bool,
) -> None:
    bench = Bench({"sales/orders": 1})
    one, two = bench.one("sales/orders", 0), bench.one("sales/orders", 0)
    two.bytes += 1
    unknown_outcomes = UnknownOutcomes()
    for _ in range(UNKNOWN_MAX):
        unknown_outcomes.begin([one, two], together=together)
        unknown_outcomes.note_unknown()
    assert unknown_outcomes.is_suspect(one.id)
    assert unknown_outcomes.is_suspect(two.id)
    assert unknown_outcomes.fault_of(one) is None
    assert (unknown_outcomes.fault_of(two) is not None) is together
    unknown_outcomes.note_unknown()  # of no round
    unknown_outcomes.begin([one])
    unknown_outcomes.end()
    unknown_outcomes.note_unknown()
    assert unknown_outcomes.fault_of(one) is None
    unknown_outcomes.keep({one.id})
    assert not unknown_outcomes.is_suspect(two.id)
    unknown_outcomes.forget(one.id)
    assert not unknown_outcomes
