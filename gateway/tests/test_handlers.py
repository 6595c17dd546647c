"""How far a client has authenticated itself, through every order of what may come."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from rollbridge_gateway.server.handlers import Login, LoginPhase


def accept(login: Login) -> None:
    login.answered(accepted=True, lifetime_s=0, now_s=0)


def refuse(login: Login) -> None:
    login.answered(accepted=False, lifetime_s=0, now_s=0)


STEPS: tuple[Callable[[Login], None], ...] = (Login.begin, accept, refuse)


def test_nothing_is_known_of_a_client_from_the_begin_of_a_login_to_the_brokers_next_word() -> None:
    for steps in itertools.product(STEPS, repeat=4):
        login = Login(is_needed=True)
        login.begin()
        accept(login)
        login.confirmed()
        for step in steps:
            step(login)
            assert not login.is_confirmed
        assert login.is_accepted is (steps[-1] is accept)


def test_a_client_that_needs_no_login_is_confirmed() -> None:
    anybody = Login(is_needed=False)
    assert anybody.is_confirmed
    assert not anybody.is_over(1 << 40)
    stranger = Login(is_needed=True)
    assert (stranger.phase, stranger.is_accepted) == (LoginPhase.STRANGER, False)


def test_a_session_is_over_unless_another_login_has_begun() -> None:
    login = Login(is_needed=True)
    login.begin()
    login.answered(accepted=True, lifetime_s=5, now_s=100)
    assert not login.is_over(104)
    assert login.is_over(105)
    login.confirmed()
    assert login.is_over(105)
    login.begin()
    assert not login.is_over(105)
    assert login.again == 1
    login.answered(accepted=True, lifetime_s=5, now_s=105)
    assert not login.is_over(109)
    assert login.is_over(110)
    login.begin()
    accept(login)
    assert not login.is_over(1e12)
