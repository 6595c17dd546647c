"""Forecasts: what they say, when they say nothing, and what they learn."""

from __future__ import annotations

from rollbridge.buffer.frames import PieceKey
from rollbridge.buffer.state import FrameRef
from rollbridge_coordinator.core.state import BYTES_MAX, PATIENCE_MAX, OffsetPredictor


def frame(records: int, size: int = 100) -> FrameRef:
    return FrameRef(("buffer", 0), 0, PieceKey(0, 0, 0), 0, records, size, b"")


A, B = ("a", 0), ("b", 0)
ROUND = [(A, frame(3)), (B, frame(1)), (A, frame(2))]


def test_nothing_is_said_of_a_topic_that_was_never_written_to() -> None:
    predictor = OffsetPredictor(4)
    assert predictor.offsets(ROUND) is None
    predictor.note([(A, frame(1))], [0])
    assert predictor.offsets(ROUND) is None


def test_the_next_round_begins_behind_the_marker_of_the_last_one() -> None:
    predictor = OffsetPredictor(4)
    predictor.note(ROUND, [10, 20, 13])
    assert predictor.offsets(ROUND) == [16, 22, 19]
    predictor.note(ROUND, [16, 22, 19], [16, 22, 19])
    assert predictor.offsets([(B, frame(7))]) == [24]


def test_a_round_without_frames_and_a_large_one_go_the_long_way() -> None:
    predictor = OffsetPredictor(4)
    predictor.note(ROUND, [10, 20, 13])
    assert predictor.offsets([]) is None
    assert predictor.offsets([(A, frame(1, BYTES_MAX))]) == [16]
    assert predictor.offsets([(A, frame(1, BYTES_MAX)), (B, frame(1, 1))]) is None


def test_a_topic_where_others_write_rests_longer_each_time_and_alone() -> None:
    predictor = OffsetPredictor(2)
    predictor.note(ROUND, [10, 20, 13])
    rests = []
    for _ in range(12):
        expected = predictor.offsets([(A, frame(1))])
        assert expected is not None
        predictor.note([(A, frame(1))], [expected[0] + 1], expected)
        rounds = 0
        while predictor.offsets([(A, frame(1))]) is None:
            assert predictor.offsets([(B, frame(1))]) is not None
            rounds += 1
            predictor.note([(A, frame(1))], [1000])
        rests.append(rounds)
    assert rests[:4] == [2, 4, 8, 16]
    assert rests[-1] == PATIENCE_MAX


def test_patience_comes_back_with_forecasts_that_were_right() -> None:
    predictor = OffsetPredictor(1)
    one = [(A, frame(1))]
    predictor.note(one, [0])
    predictor.note(one, [5], [2])  # rests for one round, the next time for two
    predictor.note(one, [7])
    expected = predictor.offsets(one)
    assert expected == [9]
    predictor.note(one, expected, expected)
    predictor.note(one, [50], predictor.offsets(one))
    predictor.note(one, [52])
    assert predictor.offsets(one) == [54]
