"""How long segments linger and rolling commits wait, by how late commits have come, and what goes where meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tests.makers import Bench
from rollbridge.base.sn import EMPTY
from rollbridge.metadata.changes import CommittingTransactions, Roll
from rollbridge.stream.conditions import Condition, Scope, StreamCondition
from rollbridge_coordinator.commit.plan import (
    DirectRound,
    LateRound,
    RollingRound,
    ends_linger,
    lingering_of,
    plan_round,
)
from rollbridge_coordinator.core.waits import LOOK_MS, PATIENCE, TOTAL, LateCommits, Lingering

ORDERS, PAYMENTS = "sales/orders", "sales/payments"
MOST = 200
NOTHING = CommittingTransactions((), (Roll(ORDERS, 0, 1, 2, 3, (0,)),), 0, 1)


def made(since_ms: int = 0, until_ms: int = MOST) -> Lingering:
    return Lingering(NOTHING, {ORDERS: {0, 1}}, {ORDERS: {4, 5}, PAYMENTS: {7}}, (), since_ms, until_ms)


@pytest.mark.parametrize(
    ("gaps", "lingers"),
    [
        ([], [0]),
        ([50], [0, 50]),
        ([50, 120], [0, 50, 120]),
        ([199], [0, 199]),
        ([900], [0, MOST]),
        ([PATIENCE * MOST], [0, MOST]),
        ([PATIENCE * MOST + 1], [0, 0]),
        ([-1], [0, 0]),
        ([PATIENCE * MOST + 1, 30], [0, 0, 30]),
    ],
)
def test_segments_linger_as_long_as_the_last_late_commit_was_ago(gaps: list[int], lingers: list[int]) -> None:
    late = LateCommits(MOST, 0)
    now_ms, found = 10_000, [late.note([ORDERS], 9_900, 10_000, 1)]
    for gap in gaps:
        now_ms += gap
        found.append(late.note([ORDERS], now_ms, now_ms, 1))
    assert found == lingers


def test_of_several_streams_all_must_have_had_late_commits() -> None:
    late = LateCommits(MOST, 0)
    late.note([ORDERS], 0, 0, 1)
    assert late.note([ORDERS, PAYMENTS], 50, 50, 1) == 0
    assert late.note([ORDERS, PAYMENTS], 90, 90, 1) == 40


def test_after_a_linger_in_vain_the_next_must_come_sooner() -> None:
    late = LateCommits(MOST, 0)
    late.note([ORDERS], 0, 0, 1)
    late.was_in_vain([ORDERS, PAYMENTS])
    assert late.note([ORDERS], 500, 500, 1) == 0
    assert late.note([ORDERS], 1_000, 1_000, 1) == MOST, "and again like any"


@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 400), st.booleans())), st.sampled_from([0, 1, MOST]))
def test_no_linger_is_longer_than_its_bound_and_the_first_is_none(
    steps: list[tuple[int, int, bool]], most_ms: int
) -> None:
    late, now_ms = LateCommits(most_ms, most_ms), 0
    for place, (gap, took, in_vain) in enumerate(steps):
        now_ms += gap + took
        linger_ms = late.note([ORDERS], now_ms - took, now_ms, 2)
        assert 0 <= linger_ms <= min(most_ms, gap + took)
        assert linger_ms == 0 or place > 0
        assert 0 <= late.gather_ms([ORDERS], now_ms + gap) <= min(most_ms, took // 2)
        if in_vain:
            late.was_in_vain([ORDERS])


@pytest.mark.parametrize(
    ("lines", "took", "since", "expected"),
    [(1, 100, 10, 0), (2, 100, 10, 50), (2, 100, 100, 50), (2, 100, 101, 0), (2, 900, 10, 100), (2, 0, 0, 0)],
)
def test_a_roll_waits_for_more_where_the_last_one_took_commits_of_several(
    lines: int, took: int, since: int, expected: int
) -> None:
    late = LateCommits(MOST, 100)
    assert late.gather_ms([ORDERS], 0) == 0
    late.note([ORDERS], 1_000, 1_000 + took, lines)
    assert late.gather_ms([ORDERS], 1_000 + took + since) == expected
    assert late.gather_ms([ORDERS, PAYMENTS], 1_000 + took + since) == 0


def test_they_linger_within_bounds_however_many_commits_come() -> None:
    item = made(1_000, 1_100)
    assert [item.is_over(now) for now in (999, 1_000, 1_099, 1_100)] == [True, False, False, True]
    for now_ms in range(1_050, 5_000, 50):
        item.prolong(now_ms, MOST)
        assert item.until_ms == min(now_ms + MOST, 1_000 + TOTAL * MOST)
    assert item.is_used


@pytest.mark.parametrize(
    ("written", "takes", "before"),
    [
        ({}, False, False),
        ({ORDERS: {0}}, True, False),
        ({ORDERS: {0, 1}}, True, False),
        ({ORDERS: {0, 2}}, False, False),
        ({ORDERS: {4}}, False, True),
        ({PAYMENTS: {0}}, False, False),
        ({ORDERS: {0}, PAYMENTS: {7}}, False, True),
    ],
)
def test_which_segments_linger_and_which_continue_them(written: dict[str, set[int]], takes: bool, before: bool) -> None:
    assert (made().takes(written), made().is_before(written)) == (takes, before)


def late_bench(late: int = 3, *, epochs: int = 1) -> Bench:
    """Transactions that began before segment 0 of four was split; its first rolling commit lingers."""
    bench = Bench({ORDERS: 4, PAYMENTS: 1})
    for number in range(late):
        bench.begin(ORDERS, PAYMENTS, client=f"c{number}")
    bench.scale(ORDERS, [0], [(0.0, 0.125), (0.125, 0.25)])
    roll = Roll(ORDERS, 0, 1, 2, 3, (0,))
    stream = bench.group.streams[ORDERS]
    stream.history = stream.history.with_records(*stream.history.plan_rolling(0, 1, roll.numbers))
    committing = CommittingTransactions((), (roll,), 0, 1)
    bench.group.waits.lingering = lingering_of(bench.group, committing, 0, MOST)
    return bench


def test_a_late_commit_goes_into_what_lingers_and_any_other_is_planned_as_ever() -> None:
    bench = late_bench()
    first, second, third = (item.transaction_id for item in bench.group.fold.open.values())
    bench.data(first, ORDERS, 0)
    bench.data(first, PAYMENTS, 0)
    bench.data(second, ORDERS, 1)
    bench.data(third, ORDERS, 0)
    items = [
        bench.commit(first, {(0, 0): 1, (1, 0): 1}),
        bench.commit(second, {(0, 1): 1}),
        bench.commit(third, {(0, 0): 1}),
    ]
    assert plan_round(bench.group) == LateRound((items[0], items[2]))
    for item in (items[0], items[2]):
        bench.group.fold.settle(item.id)
    assert plan_round(bench.group) == DirectRound((items[1],))
    assert not ends_linger(bench.group, [items[1]]), "it is written to no segment behind"
    behind = bench.one(ORDERS, 4, client="d")
    assert ends_linger(bench.group, [items[1], behind])
    aborted = bench.abort(bench.begin(ORDERS))
    assert not ends_linger(bench.group, [aborted])


def test_a_late_commit_that_also_writes_behind_what_lingers_is_left_out() -> None:
    bench = Bench({ORDERS: 4, PAYMENTS: 1})
    rolls = tuple(Roll(name, 0, 1, 2, 3, (0,)) for name in (ORDERS, PAYMENTS))
    for roll, ranges in zip(rolls, ([(0.0, 0.125), (0.125, 0.25)], [(0.0, 0.5), (0.5, 1.0)]), strict=True):
        bench.scale(roll.stream, [0], ranges)
        stream = bench.group.streams[roll.stream]
        stream.history = stream.history.with_records(*stream.history.plan_rolling(0, 1, roll.numbers))
    bench.group.waits.lingering = lingering_of(bench.group, CommittingTransactions((), rolls, 0, 1), 0, MOST)
    both, late = bench.begin_against({ORDERS: 0, PAYMENTS: 1}, "b"), bench.begin_against({ORDERS: 0, PAYMENTS: 0}, "l")
    bench.data(both, ORDERS, 0)
    bench.data(both, PAYMENTS, 1)  # in what continues the segments of PAYMENTS that linger
    bench.data(late, ORDERS, 0)
    items = [bench.commit(both, {(0, 0): 1, (1, 1): 1}), bench.commit(late, {(0, 0): 1})]
    assert plan_round(bench.group) == LateRound((items[1],))
    bench.group.fold.settle(late.bytes)
    planned = plan_round(bench.group)
    assert isinstance(planned, RollingRound), "which ends the linger"
    assert planned.transactions == (items[0],)


def test_what_was_asked_for_before_goes_before() -> None:
    bench = late_bench()
    first, *_ = (item.transaction_id for item in bench.group.fold.open.values())
    behind = bench.one(ORDERS, 4, client="d")
    bench.data(first, ORDERS, 0)
    bench.commit(first, {(0, 0): 1})
    assert plan_round(bench.group) == DirectRound((behind,)), "which ends the linger"
    assert ends_linger(bench.group, [behind])


def test_a_line_keeps_its_order_and_conditions_ask_for_ends_of_segments() -> None:
    bench = late_bench()
    first, second, third = (item.transaction_id for item in bench.group.fold.open.values())
    for identifier in (first, second, third):
        bench.data(identifier, ORDERS, 0)
    expected = StreamCondition(0, Condition(EMPTY, Scope.KEY, b"k"))
    conditional = bench.commit(first, {(0, 0): 1}, [expected])
    other = bench.commit(second, {(0, 0): 1})
    bench.one(ORDERS, 5, client="c2")
    bench.commit(third, {(0, 0): 1})
    assert plan_round(bench.group) == LateRound((other,))
    bench.group.fold.settle(other.id)
    planned = plan_round(bench.group)
    assert isinstance(planned, RollingRound)
    assert planned.transactions == (conditional,)
    assert ends_linger(bench.group, [conditional])


def test_a_leader_looks_often_while_segments_linger_and_in_time_for_a_roll_that_waits() -> None:
    bench = Bench({ORDERS: 1})
    assert bench.group.pause_ms(0, 50) == 50
    bench.group.waits.lingering = made()
    assert bench.group.pause_ms(0, 50) == LOOK_MS
    assert bench.group.pause_ms(0, 3) == 3
