"""Clients of the simulation that count transactions themselves."""

from __future__ import annotations

from coordinator.tests.sim_actors import Client, reserve
from coordinator.tests.sim_run import GROUP

COUNTERS = 4
"""How many counters of transactions a client takes at once."""


class CountingClient(Client):
    """Takes the counters of its transactions from ZooKeeper, as clients do."""

    _left: tuple[int, ...] = ()

    def drop(self) -> None:
        """Use nothing that was reserved until now: the connection to ZooKeeper was away."""
        self._left = ()

    def _start_transaction(self) -> None:
        if not self._left:
            found = reserve(self.world, GROUP, COUNTERS)
            if found is None:
                return  # it is damaged, and tried again
            self._left = tuple(found)
        super()._start_transaction()

    def _counter(self) -> int:
        counter, *left = self._left
        self._left = tuple(left)
        return counter
