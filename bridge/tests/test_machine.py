"""Whose turn it is in a queue, and answers that are waited for in several ways."""

from __future__ import annotations

import math
import threading

import pytest

from rollbridge.base.deadlines import Deadline
from rollbridge.base.sn import ANY, EMPTY
from rollbridge.cas.dispatch import fail
from rollbridge.cas.machine import AppendQueue, Committed, ConditionalAppend, Contention
from rollbridge.cas.request import AppendRequest, CasFuture, NewRecord
from rollbridge.cas.writer import CasWriter
from rollbridge.errors import CasWriteError, KafkaUnavailableError, NotAuthorizedError
from rollbridge.stream.conditions import Refused, Scope
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange
from rollbridge.stream.reading import KeyLineage

COURSE = KeyLineage(EpochHistory.create([KeyRange(0.0, 1.0)], 0), 0.0)


def request(owner: object, expected: AppendRequest | None = None) -> AppendRequest:
    record = NewRecord(b"k", b"v", [], None, 1)
    return AppendRequest(owner, [record], expected or EMPTY, Scope.SEGMENT, b"", COURSE, Deadline(math.inf), 0)


def queue() -> AppendQueue:
    return AppendQueue("scope/stream", COURSE.active, lambda segment: ("topic", int(segment)))


def test_contenders_win_in_turn_whoever_is_back_first() -> None:
    lane = queue()
    owners: list[object] = [object.__new__(CasWriter) for _ in range(4)]
    winners = []
    for _ in range(12):
        for owner in owners:  # the same one is back first every time
            lane.put(request(owner))
        lane.take_turns()
        round_ = lane.take(1)
        assert isinstance(round_, ConditionalAppend)
        winners.append(owners.index(round_.requests[0].owner))
        round_.result = Committed([(EMPTY,)])
        round_.refuted = {waiting: Refused(EMPTY, EMPTY) for waiting in lane.waiting()}
        lane.settle(round_, 0.0)
        assert lane.contended
        assert not lane.queue
    assert winners == [0, 1, 2, 3] * 3


def test_a_write_stays_behind_the_one_that_it_expects() -> None:
    lane = queue()
    one, other = (object.__new__(CasWriter) for _ in range(2))
    lane.put(request(one))
    round_ = lane.take(1)
    assert isinstance(round_, ConditionalAppend)
    round_.result = Committed([(EMPTY,)])
    lane.put(refuted := request(other))
    round_.refuted = {refuted: Refused(EMPTY, EMPTY)}
    lane.settle(round_, 0.0)
    first = request(one)
    then = request(other, first)
    lane.put(first)
    lane.put(then)
    assert not lane.take_turns()
    assert list(lane.queue) == [first, then]


def test_an_answer_reaches_whoever_waits_and_whoever_asks_later() -> None:
    answer = request(None)
    told: list[CasFuture] = []
    answer.add_done_callback(told.append)
    with pytest.raises(TimeoutError):
        answer.result(0.001)
    waiter = threading.Thread(target=lambda: told.append(answer) if answer.results(60) == [EMPTY] else None)
    waiter.start()
    assert not answer.done()
    answer.settle([EMPTY])
    waiter.join(60)
    answer.add_done_callback(told.append)
    assert told == [answer] * 3
    assert answer.exception(0) is None


def test_an_answer_may_be_a_failure() -> None:
    answer = request(None)
    answer.settle(CasWriteError("525", expected=ANY, actual=EMPTY))
    assert isinstance(answer.exception(), CasWriteError)
    with pytest.raises(CasWriteError):
        answer.result()


def test_a_call_cut_off_at_the_end_of_a_write_hides_nothing_that_it_has_waited_for() -> None:
    lane = queue()
    late, patient, fresh = request(None), request(None), request(None)
    late.deadline = fresh.deadline = Deadline(0)
    late.last_try = patient.last_try = "an earlier native transaction is still open"
    cut_off = KafkaUnavailableError("cannot read topic t: NETWORK_EXCEPTION for 0 s")
    fail(lane, [late, patient, fresh], cut_off)
    assert str(late.exception()).endswith(
        "took too long: an earlier native transaction is still open; nothing was written"
    )
    assert patient.exception() is cut_off
    assert fresh.exception() is cut_off
    denied, denial = request(None), NotAuthorizedError("not allowed", resource="topic t")
    denied.deadline, denied.last_try = Deadline(0), "an earlier native transaction is still open"
    fail(lane, [denied], denial)
    assert denied.exception() is denial


# How a writer behaves among others: it waits and looks after a loss, forgets it when alone, and is not shut out.


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
