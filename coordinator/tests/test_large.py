"""Places for merges of large transactions: who gets one, who gives it to others, and how often one begins again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from coordinator.tests.makers import Bench, varied
from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.metadata.changes import SUSPENDED, StreamFault
from rollbridge.stream.conditions import Leaderless, Obstacle
from rollbridge_coordinator.commit.large import follow_preparations
from rollbridge_coordinator.commit.plan import Beside, DirectRound, RollingRound, plan_round
from rollbridge_coordinator.commit.waiting import why_waits
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.effects import PreparationProgress
from rollbridge_coordinator.core.loop import drain
from rollbridge_coordinator.core.requests import waits_for
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.waits import MERGES_MAX, PendingRoll, Wait

ORDERS, PAYMENTS, REFUNDS = "sales/orders", "sales/payments", "sales/refunds"
SETTINGS = varied(LeaderSettings(merge_beside_bytes=100), merges_beside_max=2)
AWAY = Leaderless("sales.orders.segment-0.epoch-0")
NOW_MS = 2_000


class Kafka:
    """What the effects of a large merge are answered with."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.progress: dict[str, PreparationProgress] = {}
        self.obstacles: set[Obstacle] = set()
        self.begun: list[str] = []
        self.given_up: list[str] = []

    def run(self, procedure: Steps[None]) -> None:
        """Carry out a procedure."""
        answer: Any = None
        for _ in range(100):
            try:
                effect = procedure.send(answer)
            except StopIteration:
                return
            answer = self._answer(effect)
        raise AssertionError("the same is planned again and again")

    def _answer(self, effect: AnyEffect) -> Any:
        match effect:
            case fx.Write():
                return True
            case fx.LookAtPrepared():
                return self.progress
            case fx.LookForObstacles(places):
                return [item for item in self.obstacles if (item.topic, 0) in places]
            case fx.Prepare(key):
                self.begun.append(key)
                self.progress[key] = PreparationProgress()
            case fx.GiveUp(key):
                self.given_up.append(key)
                self.progress.pop(key, None)
            case _:
                raise NotImplementedError(type(effect).__name__)
        return None

    def drain(self) -> None:
        """Carry out what is planned."""
        self.run(drain(self.bench.group, NOW_MS))

    def follow(self, now_ms: int = NOW_MS) -> None:
        """Look how far merges are."""
        self.run(follow_preparations(self.bench.group, now_ms))

    def append_all(self, transaction: BufferedTransaction) -> None:
        """Append everything of a transaction."""
        item = self.bench.group.large.preparations[transaction.id]
        self.progress[item.node] = PreparationProgress([0] * len(item.items))
        self.follow()


@pytest.fixture
def bench() -> Bench:
    return Bench({ORDERS: 1, PAYMENTS: 1, REFUNDS: 1}, SETTINGS)


@pytest.fixture
def kafka(bench: Bench) -> Kafka:
    return Kafka(bench)


def suspend(bench: Bench) -> None:
    """Suspend a change of a stream."""
    bench.group.waits.faults.suspend(ORDERS, StreamFault("half done", SUSPENDED, "", 0))


def hold_roll(bench: Bench) -> None:
    """Somebody's native transaction is open on what is to be sealed."""
    bench.group.waits.held_rolls[ORDERS,] = PendingRoll(Wait(0, NOW_MS, frozenset({AWAY}), frozenset({AWAY})))


WAITS: Mapping[str, tuple[Callable[[Bench], None], str]] = {
    "held": (hold_roll, f"waits for {AWAY}, before a rolling commit of {ORDERS}"),
    "in error": (suspend, f"waits for stream {ORDERS}, which is in an error state"),
}


def large(bench: Bench, *streams: str, client: str = "c") -> BufferedTransaction:
    """A transaction that is large enough, and whose commit was asked for."""
    identifier = bench.begin(*streams, client=client)
    for name in streams:
        bench.data(identifier, name, 0, size=100)
    return bench.commit(identifier, {(place, 0): 1 for place in range(len(streams))})


def test_a_merge_is_not_begun_while_something_keeps_its_roll_from_being_carried_out(bench: Bench, kafka: Kafka) -> None:
    kafka.obstacles = {AWAY}
    transaction, other = large(bench, ORDERS, client="a"), large(bench, PAYMENTS, client="b")
    kafka.drain()
    assert set(bench.group.large.preparations) == {other.id}, "only what can be ended takes a place"
    assert why_waits(bench.group, transaction) == f"{AWAY}, before a rolling commit of {ORDERS}"
    bench.group.waits.held_rolls[ORDERS,].is_due = True
    kafka.obstacles = set()
    kafka.drain()
    assert set(bench.group.large.preparations) == {other.id, transaction.id}


def test_a_large_transaction_is_not_planned_while_its_roll_is_held(bench: Bench, kafka: Kafka) -> None:
    transaction = large(bench, ORDERS)
    kafka.drain()
    kafka.append_all(transaction)
    assert isinstance(plan_round(bench.group), RollingRound)
    hold_roll(bench)
    assert plan_round(bench.group) is None
    bench.group.waits.held_rolls[ORDERS,].is_due = True
    assert isinstance(plan_round(bench.group), RollingRound)


@pytest.mark.parametrize("why", WAITS)
@pytest.mark.parametrize("appended", [False, True])
def test_who_waits_for_something_else_gives_its_place_to_others(
    bench: Bench, kafka: Kafka, why: str, appended: bool
) -> None:
    make, said = WAITS[why]
    held, at_work = large(bench, ORDERS, client="a"), large(bench, PAYMENTS, client="b")
    kafka.drain()
    if appended:
        kafka.append_all(held)
    make(bench)
    assert plan_round(bench.group) is None, "nobody else needs the place"
    other = large(bench, REFUNDS, client="d")
    assert plan_round(bench.group) == Beside(other, held.id)
    assert waits_for(bench.group, held) == said
    node = bench.group.large.preparations[held.id].node
    kafka.drain()
    assert set(bench.group.large.preparations) == {at_work.id, other.id}
    assert kafka.given_up == [node]
    assert bench.group.counts["merges_beside_lost"] == 1
    assert said.partition("waits for ")[2] in bench.group.large.retries[held.id].why


def test_nobody_gives_a_place_away_to_one_that_would_have_to_wait(bench: Bench, kafka: Kafka) -> None:
    held, at_work = large(bench, ORDERS, client="a"), large(bench, PAYMENTS, client="b")
    kafka.drain()
    hold_roll(bench)
    kafka.obstacles = {Leaderless("sales.refunds.segment-0.epoch-0")}
    large(bench, REFUNDS, client="d")
    kafka.drain()
    assert set(bench.group.large.preparations) == {held.id, at_work.id}


def test_who_waits_for_a_place_is_told_who_has_them_and_small_ones_go_on(bench: Bench, kafka: Kafka) -> None:
    first, second = large(bench, ORDERS, client="a"), large(bench, PAYMENTS, client="b")
    kafka.drain()
    third = large(bench, REFUNDS, client="d")
    assert plan_round(bench.group) is None
    named = f"{first.transaction_id}, {second.transaction_id}"
    expected = f"one of the places for merges of large transactions, which are taken by {named}"
    assert waits_for(bench.group, third) == f"waits for {expected}"
    small = bench.begin(REFUNDS, client="e")
    bench.data(small, REFUNDS, 0, size=10)
    item = bench.commit(small, {(0, 0): 1})
    assert plan_round(bench.group) == DirectRound((item,))


def test_a_merge_in_vain_leaves_its_place_rests_and_is_given_up_in_the_end(bench: Bench, kafka: Kafka) -> None:
    transaction = large(bench, ORDERS)
    now_ms, rests = NOW_MS, list[int]()
    kafka.drain()
    while True:
        item = bench.group.large.preparations[transaction.id]
        kafka.progress[item.node] = PreparationProgress(lost="a line was cut")
        kafka.follow(now_ms)
        assert not bench.group.large.preparations, "it has no place while it rests"
        if transaction.id not in bench.group.large.retries or len(rests) >= MERGES_MAX - 1:
            break
        assert plan_round(bench.group) is None
        assert "a line was cut" in waits_for(bench.group, transaction)
        rest = bench.group.large.retries[transaction.id].rest
        rests.append(rest.length_ms)
        now_ms = rest.until_ms
        kafka.follow(now_ms)
        kafka.drain()
    assert rests == sorted(rests)
    assert sum(rests) > 12 * 60_000
    assert transaction.state is State.ABORTING
    assert bench.group.counts["merges_beside_lost"] == MERGES_MAX == len(rests) + 1
    assert transaction.reason == f"its records were merged {MERGES_MAX} times, each time in vain: a line was cut"
    bench.group.fold.settle(transaction.id)
    kafka.follow(now_ms)
    assert not bench.group.large.retries


def test_a_merge_that_takes_as_long_as_its_native_transaction_may_is_refused(bench: Bench, kafka: Kafka) -> None:
    transaction = large(bench, ORDERS)
    for _ in range(2):
        kafka.drain()
        item = bench.group.large.preparations[transaction.id]
        refused = fx.EffectRefusedError(fx.Prepare(item.node, (), item.items), "it took 899 s", code="merge-too-slow")
        kafka.progress[item.node] = PreparationProgress(refused=refused)
        assert transaction.state is State.COMMITTING
        kafka.follow()
    assert transaction.state is State.ABORTING
    assert "its merge was refused 2 times" in transaction.reason
    assert "it took 899 s" in transaction.reason
