"""Forecasts: what they say, when they say nothing, and what they learn."""

from __future__ import annotations

from rollbridge.model.frames import PieceKey
from rollbridge.model.pieces import FrameRef
from rollbridge_coordinator.state.group import BYTES_MAX, PATIENCE_MAX, Forecast


def frame(records: int, size: int = 100) -> FrameRef:
    return FrameRef(("buffer", 0), 0, PieceKey(0, 0, 0), 0, records, size, b"")


A, B = ("a", 0), ("b", 0)
ROUND = [(A, frame(3)), (B, frame(1)), (A, frame(2))]


def test_nothing_is_said_of_a_topic_that_was_never_written_to() -> None:
    forecast = Forecast(4)
    assert forecast.offsets(ROUND) is None
    forecast.note([(A, frame(1))], [0])
    assert forecast.offsets(ROUND) is None


def test_the_next_round_begins_behind_the_marker_of_the_last_one() -> None:
    forecast = Forecast(4)
    forecast.note(ROUND, [10, 20, 13])
    assert forecast.offsets(ROUND) == [16, 22, 19]
    forecast.note(ROUND, [16, 22, 19], [16, 22, 19])
    assert forecast.offsets([(B, frame(7))]) == [24]


def test_a_round_without_frames_and_a_large_one_go_the_long_way() -> None:
    forecast = Forecast(4)
    forecast.note(ROUND, [10, 20, 13])
    assert forecast.offsets([]) is None
    assert forecast.offsets([(A, frame(1, BYTES_MAX))]) == [16]
    assert forecast.offsets([(A, frame(1, BYTES_MAX)), (B, frame(1, 1))]) is None


def test_a_topic_where_others_write_rests_longer_each_time_and_alone() -> None:
    forecast = Forecast(2)
    forecast.note(ROUND, [10, 20, 13])
    rests = []
    for _ in range(12):
        expected = forecast.offsets([(A, frame(1))])
        assert expected is not None
        forecast.note([(A, frame(1))], [expected[0] + 1], expected)
        rounds = 0
        while forecast.offsets([(A, frame(1))]) is None:
            assert forecast.offsets([(B, frame(1))]) is not None
            rounds += 1
            forecast.note([(A, frame(1))], [1000])
        rests.append(rounds)
    assert rests[:4] == [2, 4, 8, 16]
    assert rests[-1] == PATIENCE_MAX


def test_patience_comes_back_with_forecasts_that_were_right() -> None:
    forecast = Forecast(1)
    one = [(A, frame(1))]
    forecast.note(one, [0])
    forecast.note(one, [5], [2])  # rests for one round, the next time for two
    forecast.note(one, [7])
    expected = forecast.offsets(one)
    assert expected == [9]
    forecast.note(one, expected, expected)
    forecast.note(one, [50], forecast.offsets(one))
    forecast.note(one, [52])
    assert forecast.offsets(one) == [54]
