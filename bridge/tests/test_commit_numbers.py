"""Commit numbers: each client of a connection has lines of its own, and idle ones cost nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from rollbridge.client.futures import Completion
from rollbridge.client.identity import DOUBT_EVERY_S, TELL_AGAIN_S, TELL_EVERY_S, CommitNumbers, CommitsInFlight
from rollbridge.model.commit_order import CommitOrder
from rollbridge.model.names import GroupName

GROUP, OTHER = GroupName("sales"), GroupName("stock")


@dataclass
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
