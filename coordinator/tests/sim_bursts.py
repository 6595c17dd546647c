"""A client of the simulation that commits transactions of a former epoch one after the other, and writes in between."""

from __future__ import annotations

import random

from coordinator.tests.sim_actors import Attempt, Client
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import Record, World
from rollbridge.commitlog.control import ControlKind
from rollbridge.stream.names import StreamName

BURST = 8
SPACING = 10
"""Between the numbers of two transactions: what is written plainly between their commits has one in between."""
PATIENCE_MS = 4_000
"""How long it waits for the stream to be scaled."""


class BurstingClient(Client):
    """Begins some transactions, waits for a scale, and commits them one after the other, each after the answer before.

    All of a burst write under one key, with numbers in the order of their commits. Between two commits there may be a
    plain record of that key, whose number is between theirs: a transaction that is put before what was written before
    its commit was asked for is out of order.
    """

    lease_ms = 60_000

    def __init__(self, name: str, world: World, streams: list[StreamName], rng: random.Random) -> None:
        super().__init__(name, world, streams, rng)
        self.burst: list[Attempt] = []
        self.bursts = 0
        self.waits_until_ms = 0
        self.number = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return super().idle and not self.burst

    def step(self, clock_ms: int, log: str) -> None:
        """Do one thing."""
        self.clock_ms = clock_ms
        if self.pending is not None:
            self._plain(*self.pending)
        elif self.current is not None:
            self._await(log)
        elif not self.burst:
            if not self.stopping:
                self._begin_burst()
        elif self.stopping or clock_ms > self.waits_until_ms or self._is_late():
            self.current = self.burst.pop(0)
            self._ask_for_commit(self.current)

    def _begin_burst(self) -> None:
        self.bursts, self.number = self.bursts + 1, 0
        self.waits_until_ms = self.clock_ms + PATIENCE_MS
        streams = self.streams if self.rng.random() < 0.2 else [self.rng.choice(self.streams)]
        self.heard.clear()
        for _ in range(self.rng.randint(4, BURST)):
            self.number += SPACING
            self._start_transaction_on(streams)
            assert self.current is not None
            for _ in range(len(streams)):
                self._write(self.current)
                self.number += 3
            self.burst.append(self.current)
            self.current = None

    def _start_transaction_on(self, streams: list[StreamName]) -> None:
        known, self.streams = self.streams, streams
        self._start_transaction()
        self.streams = known

    def _ask_for_commit(self, attempt: Attempt) -> None:
        if self.rng.random() < 0.9:  # few have conditions or offsets
            known, self.rng = self.rng, _Never(self.rng.random())
            super()._ask_for_commit(attempt)
            self.rng = known
        else:
            super()._ask_for_commit(attempt)

    def _await(self, log: str) -> None:
        assert self.current is not None
        attempt, known = self.current, self.rng
        self.rng = _Never(self.rng.random())
        super()._await(log)
        self.rng = known
        committed = attempt.outcome is not None and attempt.outcome.kind is ControlKind.COMMIT
        if committed and attempt.records and self.rng.random() < 0.15:
            stream, last = attempt.records[-1]
            count = int(last.value.split("=")[1]) + 1
            self.pending = stream, Record(last.key, f"{last.key}={count}")

    def _is_late(self) -> bool:
        epochs = self.burst[0].begin.streams
        return any(
            history_of(self.world, StreamName.parse(name)).active.reference_epoch != epoch
            for name, epoch in epochs.items()
        )

    def _next(self, stream: StreamName) -> Record:
        key = f"{self.name}-{self.bursts}"
        self.counts[stream, key] = self.number
        return Record(key, f"{key}={self.number}")


class _Never(random.Random):
    """Draws nothing that is done now and then."""

    def random(self) -> float:
        """The largest that there is."""
        return 0.999
