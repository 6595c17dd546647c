"""Counters: every number is given out once, whatever threads and refills do."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

import pytest

from rollbridge.client.futures import Completion
from rollbridge.client.identity import BLOCK_S, CounterSupply
from rollbridge.client.sessions import DOUBT_EVERY_S, TELL_AGAIN_S, TELL_EVERY_S, CommitNumbers, CommitsInFlight
from rollbridge.commitlog.commit_order import CommitOrder
from rollbridge.errors import ZooKeeperUnavailableError
from rollbridge.stream.names import GroupName


class Reserve:
    """Gives out blocks one after the other, with gaps between; says how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.fails = False

    def __call__(self, count: int) -> range:
        if self.fails:
            raise ZooKeeperUnavailableError("away")
        self.asked += 1
        return range(self.asked * 1_000, self.asked * 1_000 + count)


def test_blocks_follow_each_other() -> None:
    supply = CounterSupply(Reserve(), lambda: None, block=3)
    assert [supply.next() for _ in range(7)] == [1000, 1001, 1002, 2000, 2001, 2002, 3000]


def test_the_next_block_is_asked_for_half_way() -> None:
    reserve = Reserve()
    pokes: list[int] = []
    supply = CounterSupply(reserve, lambda: pokes.append(reserve.asked), block=4)
    supply.next()
    supply.next()
    assert pokes == []
    supply.next()
    assert pokes == [1]
    supply.refill()
    supply.refill()
    assert reserve.asked == 2, "one block in reserve is enough"
    assert [supply.next() for _ in range(3)] == [1003, 2000, 2001]
    assert reserve.asked == 2, "no round trip while there was one in reserve"


def test_a_refill_that_fails_is_made_up_for_when_needed() -> None:
    reserve = Reserve()
    supply = CounterSupply(reserve, lambda: None, block=2)
    supply.next()
    reserve.fails = True
    supply.refill()
    assert supply.next() == 1001
    with pytest.raises(ZooKeeperUnavailableError):
        supply.next()
    reserve.fails = False
    assert supply.next() == 2000


@pytest.mark.parametrize("refilled", [False, True])
def test_what_was_reserved_before_zookeeper_was_away_is_not_given_out_after(*, refilled: bool) -> None:
    reserve = Reserve()
    supply = CounterSupply(reserve, lambda: None, block=3)
    supply.next()
    if refilled:
        supply.refill()
    supply.drop()
    reserved = reserve.asked
    assert supply.next() == (reserved + 1) * 1_000
    supply.drop()
    supply.refill()
    assert supply.next() == (reserved + 2) * 1_000, "one that was reserved since is given out"


def test_threads_never_get_the_same_number() -> None:
    supply = CounterSupply(Reserve(), lambda: None, block=50)
    found: list[list[int]] = [[] for _ in range(4)]
    start = threading.Barrier(5)

    def take(into: list[int]) -> None:
        start.wait(10)
        for _ in range(2_000):
            into.append(supply.next())

    threads = [threading.Thread(target=take, args=(into,)) for into in found]
    for thread in threads:
        thread.start()
    start.wait(10)
    for _ in range(20):
        supply.refill()
    for thread in threads:
        thread.join(30)
    numbers = list(itertools.chain.from_iterable(found))
    assert len(numbers) == len(set(numbers)) == 8_000


def test_a_block_is_given_up_after_a_day_used_up_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1_000.0]
    monkeypatch.setattr("rollbridge.client.identity.uptime_s", lambda: now_s[0])
    reserve = Reserve()
    supply = CounterSupply(reserve, lambda: None, block=4)
    first = supply.next()
    supply.refill()
    now_s[0] += BLOCK_S
    assert supply.next() == first + 1, "until then it is used"
    now_s[0] += 1
    third = supply.next()
    assert third > first + 7, "the spare block was as old"
    assert supply.next() == third + 1


# Commit numbers: each client of a connection has lines of its own, and idle ones cost nothing.


GROUP, OTHER = GroupName("sales"), GroupName("stock")


@dataclass(eq=False)
class Pending:
    """A transaction whose commit was asked for."""

    completion: Completion = field(default_factory=lambda: Completion(bytes(16)))
    told: list[CommitOrder] = field(default_factory=list)
    stranded: bool = False
    doubts: int = 0

    def ask_again(self, order: CommitOrder) -> bool:
        self.told.append(order)
        return True

    def is_stranded(self) -> bool:
        return self.stranded

    def doubt(self) -> None:
        self.doubts += 1

    def abort_again(self) -> None:
        self.completion.is_missing = False
        self.doubts += 100


def clients(count: int, in_flight: CommitsInFlight) -> list[CommitNumbers]:
    counters = itertools.count(1)
    return [CommitNumbers(lambda _: next(counters), in_flight) for _ in range(count)]


def test_two_clients_with_sessions_of_the_same_epoch_do_not_share_a_line() -> None:
    one, two = clients(2, CommitsInFlight())
    orders = [client.of(GROUP, 7).ask(Pending()).order for client in (one, one, two, two)]
    assert [(item.number, item.behind) for item in orders] == [(1, 0), (2, 1), (1, 0), (2, 1)]
    assert orders[0].line == orders[1].line != orders[2].line == orders[3].line


def test_a_client_has_one_connection_number_in_a_group_and_another_line_for_each_session() -> None:
    [one] = clients(1, CommitsInFlight())
    lines = [one.of(group, epoch).ask(Pending()).order.line for group, epoch in ((GROUP, 7), (GROUP, 8), (OTHER, 7))]
    assert lines[0][0] == lines[1][0] != lines[2][0]
    assert len(set(lines)) == 3


def test_lines_of_sessions_that_are_over_are_forgotten() -> None:
    [one] = clients(1, CommitsInFlight())
    for epoch in range(100):
        one.of(GROUP, epoch).ask(Pending())
    assert len(one._lines) == 2
    assert one.of(GROUP, 99).ask(Pending()).order.number == 2


def test_only_lines_with_something_in_flight_are_looked_at() -> None:
    in_flight = CommitsInFlight()
    busy, *idle = clients(50, in_flight)
    over = [Pending() for _ in idle]
    for client, pending in zip(idle, over, strict=True):
        client.of(GROUP, 1).ask(pending)
    first, second = Pending(), Pending()
    busy.of(GROUP, 1).ask(first)
    asked = busy.of(GROUP, 1).ask(second)
    assert len(in_flight) == 50
    for pending in (*over, first):
        pending.completion.give_up("over")
    in_flight.look()
    assert len(in_flight) == 1
    asked.asked_s -= TELL_AGAIN_S + 1
    in_flight.look()
    assert [item.behind for item in second.told] == [0], "nothing before it is left to wait for"
    in_flight.look()
    assert len(second.told) == 1
    asked.told_s -= TELL_EVERY_S + 1
    in_flight.look()
    assert len(second.told) == 2, "somebody may have emptied the buffer"
    assert second.doubts == 0
    asked.doubted_s -= DOUBT_EVERY_S + 1
    in_flight.look()
    in_flight.look()
    assert second.doubts == 1, "somebody may have emptied the commit log"
    second.completion.give_up("over")
    in_flight.look()
    assert len(in_flight) == 0


def test_of_an_end_that_its_leader_does_not_know_it_is_told_again() -> None:
    in_flight = CommitsInFlight()
    [client] = clients(1, in_flight)
    commit, abort = Pending(), Pending()
    client.of(GROUP, 1).ask(commit).asked_s -= TELL_AGAIN_S + 1
    client.abort(abort)
    in_flight.look()
    assert (commit.told, abort.doubts) == ([], 0)
    commit.completion.is_missing = abort.completion.is_missing = True
    in_flight.look()
    assert (len(commit.told), abort.doubts) == (1, 100)
    for pending in (commit, abort):
        pending.completion.give_up("over")
    in_flight.look()
    assert len(in_flight) == 0


def test_no_later_commit_waits_for_one_whose_buffer_has_gone() -> None:
    in_flight = CommitsInFlight()
    [client] = clients(1, in_flight)
    line = client.of(GROUP, 1)
    lost, later = Pending(stranded=True), Pending()
    for pending in (lost, later):
        line.ask(pending).asked_s -= TELL_AGAIN_S + 1
    in_flight.look()  # gives up the first one
    in_flight.look()
    assert lost.told == []
    assert [order.behind for order in later.told] == [0]
    assert line.ask(Pending()).order.behind == 1
