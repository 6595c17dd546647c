"""Deadlines and pauses."""

from __future__ import annotations

from rollbridge.base.deadlines import Backoff, Deadline


def test_a_deadline_that_has_passed_leaves_nothing() -> None:
    gone = Deadline(0.0)
    assert gone.passed()
    assert gone.left() == 0.0
    ahead = Deadline(3600.0)
    assert not ahead.passed()
    assert 3500 < ahead.left() <= 3600


def test_pauses_double_up_to_a_bound_and_begin_anew() -> None:
    backoff = Backoff(0.1, 1.0)
    pauses = [backoff.grow() for _ in range(8)]
    for pause, whole in zip(pauses, (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0), strict=True):
        assert whole / 2 <= pause <= whole
    backoff.reset()
    assert backoff.grow() <= 0.1


def test_the_first_retry_may_come_at_once() -> None:
    backoff = Backoff(0.1, 1.0, at_once=True)
    for _ in range(2):
        assert backoff.grow() == 0.0
        assert 0.05 <= backoff.grow() <= 0.1
        assert 0.1 <= backoff.grow() <= 0.2
        backoff.reset()


def test_two_clients_do_not_pause_alike() -> None:
    assert len({Backoff(0.1, 1.0).grow() for _ in range(20)}) > 1


def test_a_pause_ends_with_the_deadline() -> None:
    backoff = Backoff(3600.0, 3600.0)
    backoff.sleep(Deadline(0.0))
