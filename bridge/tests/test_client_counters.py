"""Counters: every number is given out once, whatever threads and refills do."""

from __future__ import annotations

import itertools
import threading

import pytest

from rollbridge.client.identity import BLOCK_S, CounterSupply
from rollbridge.errors import ZooKeeperUnavailableError


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
