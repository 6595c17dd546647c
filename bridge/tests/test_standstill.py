"""Which partitions a consumer gets nothing of, although there is something."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollbridge.kafka.standstill import Standstill

A, B = ("buffer", 0), ("buffer", 1)


def test_it_takes_two_looks_without_progress() -> None:
    standstill = Standstill(slack=0)
    assert standstill.observe({A: 5, B: 7}, {A: 9, B: 7}) == frozenset()
    assert standstill.observe({A: 5, B: 7}, {A: 9, B: 8}) == {A}
    assert standstill.observe({A: 5, B: 7}, {A: 9, B: 8}) == {B}


def test_progress_however_slow_is_no_standstill() -> None:
    standstill = Standstill(slack=0)
    assert not any(standstill.observe({A: position}, {A: 1_000}) for position in range(100))


def test_each_is_told_once_until_something_changes() -> None:
    standstill = Standstill(slack=0)
    told = [standstill.observe({A: 5}, {A: end}) for end in (6, 6, 6, 6, 7, 7)]
    assert told == [frozenset(), {A}, frozenset(), frozenset(), {A}, frozenset()]


def test_a_marker_is_not_waited_for() -> None:
    standstill = Standstill(slack=1)
    assert not any(standstill.observe({A: 5}, {A: 6}) for _ in range(3))
    assert [bool(standstill.observe({A: 5}, {A: 7})) for _ in range(2)] == [False, True]


def test_nothing_is_said_of_ends_that_nobody_knows() -> None:
    standstill = Standstill(slack=0)
    standstill.observe({A: 5}, {A: 9})
    assert standstill.observe({A: 5}, {}) == frozenset()
    assert standstill.observe({A: 5}, {A: 9}) == frozenset()
    assert standstill.observe({A: 5}, {A: 9}) == {A}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30), st.integers(0, 1))
def test_whoever_is_told_has_been_behind_at_one_place_twice(looks: list[tuple[int, int]], slack: int) -> None:
    standstill = Standstill(slack)
    before: tuple[int, int] | None = None
    for position, end in looks:
        if standstill.observe({A: position}, {A: end}):
            assert before is not None
            assert before[0] == position
            assert min(before[1], end) > position + slack
        before = (position, end)
