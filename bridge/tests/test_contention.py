"""How a writer behaves among others: it waits and looks after a loss, forgets it when alone, and is not shut out."""

from __future__ import annotations

from rollbridge.cas.queue import Contention


def test_a_writer_that_is_alone_neither_waits_nor_looks() -> None:
    contention = Contention()
    for _ in range(10):
        contention.won(0.001, met_others=False)
        assert contention.pause_s(1.0) == 0.0
        assert not contention.looks_first()


def test_losses_make_it_wait_longer_up_to_a_bound_and_solitude_makes_it_forget() -> None:
    contention = Contention()
    pauses = []
    for _ in range(10):
        contention.lost()
        assert contention.looks_first()
        pauses.append(contention.pause_s(1.0))
    assert pauses == sorted(pauses)
    assert pauses[0] > 0
    assert pauses[-1] == pauses[-2] < 0.1
    for _ in range(10):
        contention.won(0.001, met_others=False)
    assert contention.pause_s(1.0) == 0.0
    assert not contention.looks_first()


def test_who_is_refused_again_and_again_shows_itself_and_the_winner_makes_room() -> None:
    loser, winner = Contention(), Contention()
    loser.lost()
    looks = 0
    while loser.looks_first():
        loser.refused_by_look()
        looks += 1
    assert looks == 3
    winner.won(0.001, met_others=True)
    assert winner.pause_s(1.0) > 0.002
    loser.lost()
    assert loser.looks_first()
