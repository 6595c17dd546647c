"""When a connection is let go, with a clock that the test sets."""

from __future__ import annotations

import pytest

from rollbridge_gateway.pace import PIECE_BYTES, Closing, Limits, Pace, Traffic

LIMITS = Limits(idle_s=600, request_s=30)


def closing(*seen: tuple[float, Traffic], requests_wait: bool = False, answers_wait: bool = False) -> Closing | None:
    """What is said at the last look; nothing before."""
    pace = Pace(LIMITS, 0)
    said: Closing | None = None
    for now_s, traffic in seen:
        assert said is None
        said = pace.look(traffic, now_s, requests_wait=requests_wait, answers_wait=answers_wait)
    return said


def test_a_connection_that_asks_for_nothing_is_closed_in_the_end() -> None:
    asked = Traffic(requests=1, received=0)
    assert closing((9, Traffic())) is None
    assert closing((10, Traffic())) is Closing.MUTE
    assert closing((599, asked), (1198, asked)) is None
    assert closing((599, asked), (1199, asked)) is Closing.IDLE


def test_the_first_request_has_to_come_soon_unless_there_is_no_room_for_it() -> None:
    begun, coming = Traffic(requests=1, is_within=True), Traffic(requests=1, received=1, is_within=True)
    assert closing((9, begun), (10, begun)) is Closing.MUTE
    assert closing((9, begun), (10, coming), (39, coming)) is None, "a large one may take its time"
    assert closing((29, Traffic()), requests_wait=True) is None
    assert closing((30, Traffic()), requests_wait=True) is Closing.MUTE


def test_a_request_under_way_may_take_its_time_and_rest_begins_behind_it() -> None:
    waits = Traffic(requests=1, under_way=1)
    done = Traffic(requests=1)
    assert closing((1, waits), (5_000, waits), (5_599, done)) is None
    assert closing((1, waits), (5_000, waits), (5_600, done)) is Closing.IDLE


def test_the_rest_of_a_request_has_to_come_piece_by_piece() -> None:
    begun = Traffic(requests=2, is_within=True)
    more = Traffic(requests=2, received=1, is_within=True)
    assert closing((10, begun), (39, begun)) is None
    assert closing((10, begun), (40, begun)) is Closing.UNFINISHED
    assert closing((10, begun), (39, more), (68, more)) is None
    assert closing((10, begun), (39, more), (69, more)) is Closing.UNFINISHED


def test_requests_before_it_give_a_request_no_time() -> None:
    """A client that always has something under way does not hold up a half request beside it."""
    begun = Traffic(requests=2, is_within=True, under_way=1)
    assert closing((10, begun), (25, begun), (40, begun)) is Closing.UNFINISHED


def test_while_others_wait_a_whole_request_has_no_more_time_than_a_piece() -> None:
    looks = [(10 + 5 * at, Traffic(requests=2, received=at, is_within=True)) for at in range(7)]
    assert closing(*looks) is None
    assert closing(*looks, requests_wait=True) is Closing.UNFINISHED
    several = [(10 + 5 * at, Traffic(requests=at + 2, is_within=True)) for at in range(50)]
    assert closing(*several, requests_wait=True) is None


def test_answers_have_to_be_taken_piece_by_piece() -> None:
    full = Traffic(requests=1, under_way=1, unsent=PIECE_BYTES, held=PIECE_BYTES)
    drop = Traffic(requests=1, under_way=1, unsent=PIECE_BYTES - 5, taken=5, held=PIECE_BYTES)
    piece = Traffic(requests=1, under_way=1, unsent=7, taken=PIECE_BYTES, held=PIECE_BYTES)
    assert closing((599, full)) is None
    assert closing((599, full), (600, drop)) is Closing.UNTAKEN
    assert closing((599, full), (600, piece), (1199, piece)) is None
    assert closing((599, full), (600, piece), (1200, piece)) is Closing.UNTAKEN


def test_while_others_wait_for_their_room_answers_have_less_time() -> None:
    full = Traffic(requests=1, under_way=1, unsent=PIECE_BYTES, held=PIECE_BYTES)
    stuck = Traffic(requests=1, under_way=1, held=PIECE_BYTES)
    little = Traffic(requests=1, under_way=1, held=PIECE_BYTES - 1)
    for traffic in (full, stuck):
        assert closing((29, traffic), answers_wait=True) is None
        assert closing((29, traffic), (30, traffic), answers_wait=True) is Closing.UNTAKEN
    assert closing((29, stuck), (10_000, stuck)) is None
    assert closing((29, little), (10_000, little), answers_wait=True) is None


@pytest.mark.parametrize(
    "traffic", [Traffic(requests=2, is_stranger=True), Traffic(requests=9, under_way=1, is_stranger=True)]
)
def test_a_login_has_a_limit_whatever_the_client_does_meanwhile(traffic: Traffic) -> None:
    assert closing((29, traffic)) is None
    assert closing((29, traffic), (30, traffic)) is Closing.LOGIN
