"""Which transactions go into a round, and where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.tests.makers import Bench, varied
from rollbridge.base.ids import SegmentId
from rollbridge.buffer.table import State
from rollbridge.metadata.changes import Roll
from rollbridge.stream.conditions import Leaderless
from rollbridge_coordinator.commit.plan import (
    DirectRound,
    Incomplete,
    Refusal,
    RollingRound,
    plan_round,
    replaced_by,
    rolls_of,
    targets,
)
from rollbridge_coordinator.commit.waiting import why_waits
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.waits import PendingRoll, Wait

ORDERS, PAYMENTS = "sales/orders", "sales/payments"
SPLIT = [(0.0, 0.25), (0.25, 0.5)]


def test_nothing_decided_plans_nothing() -> None:
    bench = Bench({ORDERS: 2})
    bench.begin(ORDERS)
    assert plan_round(bench.group) is None


def test_all_waiting_transactions_of_the_active_epoch_go_together_in_decision_order() -> None:
    bench = Bench({ORDERS: 2})
    first, second = bench.begin(ORDERS), bench.begin(ORDERS)
    bench.data(first, ORDERS, 0)
    bench.data(second, ORDERS, 1)
    late = bench.commit(second, {(0, 1): 1})
    early = bench.abort(bench.begin(ORDERS))
    last = bench.commit(first, {(0, 0): 1})
    assert plan_round(bench.group) == DirectRound((late, early, last))


def test_a_round_is_bounded_in_bytes_but_takes_one_transaction_of_any_size() -> None:
    bench = Bench({ORDERS: 1}, varied(LeaderSettings(), round_bytes_max=1_000))
    big = bench.begin(ORDERS)
    bench.data(big, ORDERS, 0, size=5_000)
    item = bench.commit(big, {(0, 0): 1})
    small = bench.one(ORDERS, 0)
    assert plan_round(bench.group) == DirectRound((item,))
    bench.group.fold.settle(item.id)
    assert plan_round(bench.group) == DirectRound((small,))


def test_a_round_is_bounded_in_transactions() -> None:
    bench = Bench({ORDERS: 1}, varied(LeaderSettings(), round_transactions_max=3))
    items = [bench.one(ORDERS, 0) for _ in range(5)]
    assert plan_round(bench.group) == DirectRound(tuple(items[:3]))


@pytest.mark.parametrize("waiting", [1, 100, 101, 250])
def test_a_rolling_commit_gathers_every_waiting_transaction_of_its_epoch(waiting: int) -> None:
    bench = Bench({ORDERS: 2})
    begun = [bench.begin(ORDERS, client=f"c{number}") for number in range(waiting)]
    bench.scale(ORDERS, [0], SPLIT)
    active = bench.one(ORDERS, 2)
    items = []
    for identifier in begun:
        bench.data(identifier, ORDERS, 0)
        items.append(bench.commit(identifier, {(0, 0): 1}))
    assert plan_round(bench.group) == DirectRound((active,))
    bench.group.fold.settle(active.id)
    assert plan_round(bench.group) == RollingRound(tuple(items), (Roll(ORDERS, 0, 1, 2, 3, (0,)),))


def test_transactions_of_the_active_epoch_wait_for_a_rolling_commit_that_was_decided_before() -> None:
    bench = Bench({ORDERS: 2})
    old = bench.begin(ORDERS, client="a")
    bench.scale(ORDERS, [0], SPLIT)
    bench.data(old, ORDERS, 0)
    rolled = bench.commit(old, {(0, 0): 1})
    bench.one(ORDERS, 2, client="b")
    assert plan_round(bench.group) == RollingRound((rolled,), (Roll(ORDERS, 0, 1, 2, 3, (0,)),))


def test_what_an_old_transaction_wrote_to_segments_that_are_still_active_is_merged_directly() -> None:
    bench = Bench({ORDERS: 4})
    old, duplicated = bench.begin(ORDERS, client="a"), bench.begin(ORDERS, client="b")
    bench.scale(ORDERS, [0], [(0.0, 0.125), (0.125, 0.25)])
    stream = bench.group.streams[ORDERS]
    stream.history = stream.history.with_records(*stream.history.plan_rolling(0, 1))  # of the whole stream
    bench.data(old, ORDERS, 3)
    bench.data(duplicated, ORDERS, 1)
    first, second = bench.commit(old, {(0, 3): 1}), bench.commit(duplicated, {(0, 1): 1})
    assert plan_round(bench.group) == DirectRound((first, second))
    assert targets(bench.group).places[ORDERS, 3] == ("sales.orders.segment-3.epoch-3", 0)


def test_a_roll_names_what_its_transactions_wrote_to_and_is_not_active() -> None:
    bench = Bench({ORDERS: 4})
    begun = [bench.begin(ORDERS, client=f"c{number}") for number in range(4)]
    bench.scale(ORDERS, [0], [(0.0, 0.125), (0.125, 0.25)])
    bench.scale(ORDERS, [2], [(0.5, 0.625), (0.625, 0.75)])
    items = []
    for identifier, numbers in zip(begun, [(0, 1), (1,), (2, 3), (0,)], strict=True):
        for number in numbers:
            bench.data(identifier, ORDERS, number)
        items.append(bench.commit(identifier, {(0, number): 1 for number in numbers}))
    assert plan_round(bench.group) == RollingRound((items[0], items[2], items[3]), (Roll(ORDERS, 0, 2, 3, 4, (0, 2)),))


def test_one_clients_commits_keep_their_order_around_a_rolling_commit() -> None:
    bench = Bench({ORDERS: 2})
    first, third, other = bench.begin(ORDERS), bench.begin(ORDERS), bench.begin(ORDERS, client="other")
    bench.scale(ORDERS, [0], SPLIT)
    for identifier in (first, third, other):
        bench.data(identifier, ORDERS, 0)
    rolled = bench.commit(first, {(0, 0): 1})
    bench.one(ORDERS, 2)  # the same client's second commit, into the active epoch
    bench.commit(third, {(0, 0): 1})
    sibling = bench.commit(other, {(0, 0): 1})
    planned = plan_round(bench.group)
    assert isinstance(planned, RollingRound)
    assert planned.transactions == (rolled, sibling)


def test_several_streams_roll_together_and_only_where_something_was_written() -> None:
    bench = Bench({ORDERS: 1, PAYMENTS: 1})
    both, orders_only = bench.begin(ORDERS, PAYMENTS, client="a"), bench.begin(ORDERS, PAYMENTS, client="b")
    bench.scale(ORDERS, [0], [(0.0, 0.5), (0.5, 1.0)])
    bench.scale(PAYMENTS, [0], [(0.0, 0.5), (0.5, 1.0)])
    for identifier in (both, orders_only):
        bench.data(identifier, ORDERS, 0)
    bench.data(both, PAYMENTS, 0)
    whole = bench.commit(both, {(0, 0): 1, (1, 0): 1})
    part = bench.commit(orders_only, {(0, 0): 1})
    assert rolls_of(bench.group, part) == {ORDERS: 0}
    planned = plan_round(bench.group)
    assert isinstance(planned, RollingRound)
    assert planned.transactions == (whole, part)
    assert planned.rolls == (Roll(ORDERS, 0, 1, 2, 3, (0,)), Roll(PAYMENTS, 0, 1, 2, 3, (0,)))


def test_a_transaction_that_would_merge_directly_into_a_stream_being_rolled_waits() -> None:
    bench = Bench({ORDERS: 1, PAYMENTS: 1})
    old_both = bench.begin(ORDERS, PAYMENTS, client="a")
    bench.scale(PAYMENTS, [0], [(0.0, 0.5), (0.5, 1.0)])
    mixed = bench.begin(ORDERS, PAYMENTS, client="b")  # old in orders after the next scale, active in payments
    bench.scale(ORDERS, [0], [(0.0, 0.5), (0.5, 1.0)])
    for identifier, segment in ((old_both, 0), (mixed, 1)):
        bench.data(identifier, ORDERS, 0)
        bench.data(identifier, PAYMENTS, segment)
    first = bench.commit(old_both, {(0, 0): 1, (1, 0): 1})
    second = bench.commit(mixed, {(0, 0): 1, (1, 1): 1})
    planned = plan_round(bench.group)
    assert isinstance(planned, RollingRound)
    assert planned.transactions == (first,)
    assert rolls_of(bench.group, second) == {ORDERS: 0}


def test_an_empty_transaction_of_an_old_epoch_needs_no_roll() -> None:
    bench = Bench({ORDERS: 1})
    old = bench.begin(ORDERS)
    bench.scale(ORDERS, [0], [(0.0, 0.5), (0.5, 1.0)])
    item = bench.commit(old, {})
    assert plan_round(bench.group) == DirectRound((item,))


def test_a_commit_whose_frames_have_not_arrived_holds_what_follows() -> None:
    bench = Bench({ORDERS: 1})
    missing = bench.begin(ORDERS)
    item = bench.commit(missing, {(0, 0): 1})
    bench.one(ORDERS, 0)
    assert plan_round(bench.group) == Incomplete((item,))


@pytest.mark.parametrize(
    ("pieces", "words"),
    [({(0, 5): 1}, "no segment 5"), ({(3, 0): 1}, "streams"), ({(0, 0): 1}, "holds 2 records")],
)
def test_a_commit_that_can_never_be_merged_is_refused(pieces: dict[tuple[int, int], int], words: str) -> None:
    bench = Bench({ORDERS: 1})
    identifier = bench.begin(ORDERS)
    for place, segment in pieces:
        bench.data(identifier, ORDERS, segment, records=2 if pieces == {(0, 0): 1} else 1)
        assert place in (0, 3)
    item = bench.commit(identifier, pieces)
    planned = plan_round(bench.group)
    if isinstance(planned, Incomplete):
        assert words == "streams"  # nothing can arrive for a stream that the transaction does not have
        return
    assert isinstance(planned, Refusal)
    assert planned.transaction is item
    assert words in planned.reason


def test_a_reference_epoch_that_is_none_is_refused() -> None:
    bench = Bench({ORDERS: 1})
    bench.scale(ORDERS, [0], [(0.0, 0.5), (0.5, 1.0)])
    stream = bench.group.streams[ORDERS]
    stream.history = stream.history.with_records(*stream.history.plan_rolling(0, 1))
    identifier = bench.begin(ORDERS)
    item = bench.group.fold.open[identifier.bytes]
    object.__setattr__(item.begin, "streams", {ORDERS: 3})
    bench.data(identifier, ORDERS, 1)
    item = bench.commit(identifier, {(0, 1): 1})
    planned = plan_round(bench.group)
    assert isinstance(planned, Refusal)
    assert "not a reference epoch" in planned.reason
    assert item.state is State.COMMITTING


def test_targets_are_the_active_segments_and_the_duplicates_of_a_roll() -> None:
    bench = Bench({ORDERS: 2, PAYMENTS: 1})
    bench.scale(ORDERS, [0], SPLIT)
    active = {
        (ORDERS, 1): ("sales.orders.segment-1.epoch-0", 0),
        (ORDERS, 2): ("sales.orders.segment-2.epoch-1", 0),
        (ORDERS, 3): ("sales.orders.segment-3.epoch-1", 0),
        (PAYMENTS, 0): ("sales.payments.segment-0.epoch-0", 0),
    }
    assert targets(bench.group).places == active
    found = targets(bench.group, (Roll(ORDERS, 0, 1, 2, 3, (0,)),))
    assert found.places == active | {(ORDERS, 0): ("sales.orders.segment-0.epoch-2", 0)}
    assert found.segments["sales.orders.segment-0.epoch-2", 0] == (ORDERS, SegmentId.of(0, 2))
    whole = targets(bench.group, (Roll(ORDERS, 0, 1, 2, 3),))
    assert whole.places[ORDERS, 1] == ("sales.orders.segment-1.epoch-2", 0)


def test_targets_of_a_roll_are_the_same_once_its_epochs_are_published() -> None:
    bench = Bench({ORDERS: 4})
    bench.scale(ORDERS, [0, 1], [(0.0, 0.3), (0.3, 0.5)])
    roll = Roll(ORDERS, 0, 1, 2, 3, (1,))
    stream = bench.group.streams[ORDERS]
    planned = targets(bench.group, (roll,)).places
    assert [str(item.id) for item in replaced_by(stream.history, roll)] == ["4.#epoch.1", "5.#epoch.1"]
    stream.history = stream.history.with_records(*stream.history.plan_rolling(0, 1, roll.numbers))
    published = targets(bench.group, (roll,)).places
    assert {key: published[key] for key in [(ORDERS, 0), (ORDERS, 1), (ORDERS, 2)]} == {
        key: planned[key] for key in [(ORDERS, 0), (ORDERS, 1), (ORDERS, 2)]
    }
    assert published[ORDERS, 4] == ("sales.orders.segment-4.epoch-3", 0)
    assert not replaced_by(stream.history, roll)


def test_targets_of_a_stream_that_has_adopted_a_topic_are_its_partitions() -> None:
    bench = Bench({ORDERS: 2})
    stream = bench.group.streams[ORDERS]
    stream.config = replace(stream.config, topic="orders")
    found = targets(bench.group)
    assert found.places == {(ORDERS, 0): ("orders", 0), (ORDERS, 1): ("orders", 1)}
    assert found.segments == {("orders", number): (ORDERS, SegmentId.of(number, 0)) for number in (0, 1)}
    assert bench.group.stream_of("orders") == ORDERS


def test_a_rolling_commit_of_more_segments_than_zookeeper_takes_is_refused_before_anything_is_sealed() -> None:
    bench = Bench({ORDERS: 6_000})
    transaction = bench.one(ORDERS, 0)
    bench.scale(ORDERS, [0, 1], [(0.0, 2 / 6_000)])
    planned = plan_round(bench.group)
    assert isinstance(planned, Refusal)
    assert planned.transaction is transaction
    assert "too many segments" in planned.reason


def test_what_waits_for_others_to_let_go_of_a_segment_holds_up_its_own_line_only() -> None:
    bench = Bench({ORDERS: 2, PAYMENTS: 1})
    old, same, apart = (bench.begin(ORDERS, client=name) for name in ("a", "b", "c"))
    bench.scale(ORDERS, [0], SPLIT)
    for identifier in (old, same):
        bench.data(identifier, ORDERS, 0)
    first = bench.commit(old, {(0, 0): 1})
    bench.one(PAYMENTS, 0, client="a")
    second = bench.commit(same, {(0, 0): 1})
    direct, active = bench.one(PAYMENTS, 0, client="d"), bench.one(ORDERS, 2, client="e")
    empty = bench.abort(apart)
    away = Leaderless("shop.orders.segment-0.epoch-0")
    bench.group.waits.held_rolls[ORDERS,] = held = PendingRoll(Wait(0, 0, frozenset({away})))
    assert plan_round(bench.group) == DirectRound((direct, active, empty))
    assert why_waits(bench.group, first) == f"{away}, before a rolling commit of {ORDERS}"
    held.is_due = True
    for item in (direct, active, empty):
        bench.group.fold.settle(item.id)
    assert plan_round(bench.group) == RollingRound((first, second), (Roll(ORDERS, 0, 1, 2, 3, (0,)),))
