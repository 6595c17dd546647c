"""The pace of merges beside the line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge_coordinator.core.merge_pool import HURRY, OTHERS_S, REST_MAX_S, is_late, rest_s

TIMEOUT_S = 900.0
times = st.floats(0, 10_000)


@pytest.mark.parametrize(
    ("since_round_s", "since_begin_s", "expected"),
    [
        (0.0, 0.0, 0.2),
        (OTHERS_S, HURRY * TIMEOUT_S, 0.2),
        (OTHERS_S + 0.1, 0.0, 0.0),  # nobody else commits
        (0.0, HURRY * TIMEOUT_S + 1, 0.0),  # or its native transaction times out
    ],
)
def test_a_merge_rests_as_long_as_it_worked_while_others_commit(
    since_round_s: float, since_begin_s: float, expected: float
) -> None:
    assert rest_s(0.2, 1, since_round_s, since_begin_s, TIMEOUT_S) == expected


@given(st.floats(0.001, 0.1), st.integers(1, 4))
def test_several_merges_together_work_for_about_as_long_as_they_rest(worked_s: float, present: int) -> None:
    rest = rest_s(worked_s, present, 0.0, 0.0, TIMEOUT_S)
    assert present * worked_s / (worked_s + rest) <= 1.0


@given(times, st.integers(1, 4), times, times)
def test_no_rest_is_long(worked_s: float, present: int, since_round_s: float, since_begin_s: float) -> None:
    assert 0.0 <= rest_s(worked_s, present, since_round_s, since_begin_s, TIMEOUT_S) <= REST_MAX_S


@pytest.mark.parametrize(
    ("since_begin_s", "timeout_s", "expected"),
    [
        (885.0, 900.0, False),
        (886.0, 900.0, True),  # or the broker aborts it while it is taken up
        (10.0, 15.0, False),  # a short time-out leaves time for a merge, too
        (12.0, 15.0, True),
        (0.5, 1.0, False),
        (0.8, 1.0, True),
    ],
)
def test_a_merge_is_not_taken_up_when_its_native_transaction_is_about_to_time_out(
    since_begin_s: float, timeout_s: float, expected: bool
) -> None:
    assert is_late(since_begin_s, timeout_s) is expected
