"""Whose turn it is in a lane, and answers that are waited for in several ways."""

from __future__ import annotations

import threading

import pytest

from rollbridge.calls import Deadline
from rollbridge.cas.dispatch import AppendQueue
from rollbridge.cas.request import AppendFuture, AppendRequest
from rollbridge.cas.writer import CasWriter
from rollbridge.errors import CasWriteError
from rollbridge.model.cas import Scope
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.keyspace import KeyRange
from rollbridge.model.lineage import KeyLineage
from rollbridge.model.sn import ANY, EMPTY

COURSE = KeyLineage(EpochHistory.create([KeyRange(0.0, 1.0)], 0), 0.0)


def request(owner: object, expected: AppendRequest | None = None) -> AppendRequest:
    return AppendRequest(owner, (), expected or ANY, Scope.SEGMENT, b"", 0.0, COURSE, Deadline(0.0), 0)


def test_contenders_win_in_turn_whoever_is_back_first() -> None:
    lane = AppendQueue()
    owners: list[object] = [object.__new__(CasWriter) for _ in range(4)]
    winners = []
    for _ in range(12):
        for owner in owners:  # the same one is back first every time
            lane.put(request(owner))
        lane.take_turns()
        winner = lane.queue.popleft()
        winners.append(owners.index(winner.owner))
        lane.won(winner.owner)
        lane.take_out(list(lane.queue))
        assert lane.contended
        assert not lane.queue
    assert winners == [0, 1, 2, 3] * 3


def test_a_write_stays_behind_the_one_that_it_expects() -> None:
    lane = AppendQueue()
    one, other = (object.__new__(CasWriter) for _ in range(2))
    lane.put(request(other))
    lane.take_out(list(lane.queue))
    first = request(one)
    then = request(other, first)
    lane.put(first)
    lane.put(then)
    lane.take_turns()
    assert list(lane.queue) == [first, then]


def test_an_answer_reaches_whoever_waits_and_whoever_asks_later() -> None:
    answer = AppendFuture()
    told: list[AppendFuture] = []
    answer.add_done_callback(told.append)
    with pytest.raises(TimeoutError):
        answer.result(0.001)
    waiter = threading.Thread(target=lambda: told.append(answer) if answer.result(60) == [EMPTY] else None)
    waiter.start()
    answer.nudge()
    assert not answer.done()
    answer.set_result([EMPTY])
    waiter.join(60)
    answer.add_done_callback(told.append)
    assert told == [answer] * 3
    assert answer.exception(0) is None


def test_an_answer_may_be_a_failure() -> None:
    answer = AppendFuture()
    answer.set_exception(CasWriteError("525", expected=ANY, actual=EMPTY))
    assert isinstance(answer.exception(), CasWriteError)
    with pytest.raises(CasWriteError):
        answer.result()
