"""Client identity: the names of clients, and ids of transactions.

Transaction ids come from counters, in blocks reserved in ZooKeeper: one write per thousands.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from rollbridge.errors import RollbridgeError
from rollbridge.stream.names import GroupName


def own_name() -> str:
    """Return a client name for a process that has none: the host and the process id."""
    host = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in socket.gethostname())
    return f"{host[:100] or 'client'}-{os.getpid()}"


logger = logging.getLogger(__name__)


# Transaction id allocation


BLOCK: Final = 50_000
"""Counters reserved at once; the leader checks the counter once per block."""
BLOCK_S: Final = 24 * 3600.0
"""Longest time for which a block is used: leaders may count old counters as those of transactions that have ended."""


def uptime_s() -> float:
    """Return a time that includes the sleep of the machine, where the system has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class CounterSupply:
    """Allocator of numbers. Safe to use from several threads, without a lock while a block lasts."""

    def __init__(self, reserve: Callable[[int], range], poke: Callable[[], None], block: int = BLOCK) -> None:
        """Start without a block; ``poke`` is called when :meth:`refill` has something to do."""
        self._reserve = reserve
        self._poke = poke
        self._block = block
        self._current: Iterator[int] = iter(())
        self._low = 0
        self._spare: tuple[int, range, float] | None = None
        self._drops = 0
        self._until_s = 0.0
        self._lock = threading.Lock()

    def next(self) -> int:
        """Return a number that was never given out; costs a round trip only if no spare block is there in time."""
        while True:
            current = self._current
            # Advancing a range iterator is one step of the interpreter, so two threads never get the same number.
            number = next(current, None) if uptime_s() <= self._until_s else None
            if number is not None:
                if number == self._low:
                    self._poke()
                return number
            with self._lock:
                if self._current is current:
                    drops, block, until_s = self._spare or (-1, range(0), 0.0)
                    self._spare = None
                    now_s = uptime_s()
                    if drops != self._drops or now_s > until_s:
                        block, until_s = self._reserve(self._block), now_s + BLOCK_S
                    self._until_s = until_s
                    self._begin(block)

    def refill(self) -> None:
        """Reserve the next block unless there is a spare one."""
        with self._lock:
            now_s = uptime_s()
            if self._spare is not None and self._spare[0] == self._drops and now_s <= self._spare[2]:
                return
            drops = self._drops
            try:
                self._spare = drops, self._reserve(self._block), now_s + BLOCK_S
            except RollbridgeError as fault:
                logger.info("counters.reserve_failed: %s", fault)

    def drop(self) -> None:
        """Drop all numbers reserved until now, as ZooKeeper may not be what it was.

        A ZooKeeper that was set back while it was away reserves the same numbers for others. Called on its connection's
        thread, so nothing may be waited for, and no lock is taken.
        """
        self._drops += 1
        self._current = iter(())

    def _begin(self, block: range) -> None:
        self._low = block.start + len(block) // 2
        self._current = iter(block)


class GroupCounters:
    """Allocator of numbers of each group, as :class:`CounterSupply`."""

    def __init__(
        self, reserve: Callable[[GroupName, int], range], poke: Callable[[], None], block: int = BLOCK
    ) -> None:
        """Start without blocks; ``reserve`` reserves that many numbers of a group."""
        self._reserve = reserve
        self._poke = poke
        self._block = block
        self._supplies: dict[GroupName, CounterSupply] = {}

    def next(self, group: GroupName) -> int:
        """See :meth:`CounterSupply.next`."""
        supply = self._supplies.get(group)
        if supply is None:
            fresh = CounterSupply(partial(self._reserve, group), self._poke, self._block)
            supply = self._supplies.setdefault(group, fresh)
        return supply.next()

    def refill(self) -> None:
        """See :meth:`CounterSupply.refill`."""
        for supply in list(self._supplies.values()):
            supply.refill()

    def drop(self) -> None:
        """See :meth:`CounterSupply.drop`."""
        for supply in list(self._supplies.values()):
            supply.drop()
