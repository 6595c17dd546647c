"""Transaction counters: numbers that nobody else has, from blocks reserved in ZooKeeper, one write per thousands.

Each group has its own, see :mod:`rollbridge.model.counters`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from rollbridge.errors import RollbridgeError
from rollbridge.model.names import GroupName

logger = logging.getLogger(__name__)

BLOCK: Final = 50_000
"""How many are reserved at once; the leader looks at the counter once for each block."""


class CounterSupply:
    """Gives out numbers. Safe to use from several threads, without a lock while a block lasts."""

    def __init__(self, reserve: Callable[[int], range], poke: Callable[[], None], block: int = BLOCK) -> None:
        """Start without a block.

        Args:
            reserve: Reserves so many numbers; a round trip.
            poke: Called when :meth:`refill` has something to do.
            block: How many to reserve at once.
        """
        self._reserve = reserve
        self._poke = poke
        self._block = block
        self._current: Iterator[int] = iter(())
        self._low = 0
        self._spare: tuple[int, range] | None = None
        self._drops = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        """A number that was never given out; a round trip only if the block in reserve is not there in time."""
        while True:
            current = self._current
            # Advancing a range iterator is one step of the interpreter, so two threads never get the same number.
            number = next(current, None)
            if number is not None:
                if number == self._low:
                    self._poke()
                return number
            with self._lock:
                if self._current is current:
                    drops, block = self._spare or (-1, range(0))
                    self._spare = None
                    self._begin(block if drops == self._drops else self._reserve(self._block))

    def refill(self) -> None:
        """Reserve the next block, if it is not there."""
        with self._lock:
            if self._spare is not None and self._spare[0] == self._drops:
                return
            drops = self._drops
            try:
                self._spare = drops, self._reserve(self._block)
            except RollbridgeError as fault:
                logger.info("no block of transaction counters could be reserved ahead: %s", fault)

    def drop(self) -> None:
        """Give out no number any more that was reserved until now, as ZooKeeper may not be what it was.

        One that was set back while it was away reserves the same numbers for others. Called on its connection's thread,
        so nothing is waited for.
        """
        self._drops += 1
        self._current = iter(())

    def _begin(self, block: range) -> None:
        self._low = block.start + len(block) // 2
        self._current = iter(block)


class GroupCounters:
    """Gives out numbers of each group, as :class:`CounterSupply` does."""

    def __init__(
        self, reserve: Callable[[GroupName, int], range], poke: Callable[[], None], block: int = BLOCK
    ) -> None:
        """Start without blocks; ``reserve`` reserves so many numbers of a group."""
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
