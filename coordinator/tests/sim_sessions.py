"""Clients of the simulation that ask for outcomes again, and that are replaced by newer sessions in the middle."""

from __future__ import annotations

import random
from collections.abc import Callable

from coordinator.tests.sim_actors import LEASE_MS, NEVER_MS, Attempt, Client, commit_frame
from coordinator.tests.sim_world import World
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind
from rollbridge.buffer.table import State
from rollbridge.errors import OutcomeExpiredError
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import RENEW_MS, ClientSession, floor_of
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.stream.names import GroupName, StreamName

Answered = Callable[[AdminAnswer], None]


class RestartingClient(Client):
    """Is killed now and then while a transaction is open or its commit under way, and goes on as a newer session.

    What was killed may only have been paused: it asks for its commit, or begins another transaction, after the newer
    session has been told that the older one is fenced.

    Attributes:
        answers: What was answered about transactions, in the order of the answers.
    """

    lease_ms = 5 * LEASE_MS
    """Fences and questions wait behind other requests and takeovers, and what is resumed has to live until then."""

    def __init__(
        self, name: str, world: World, group: GroupName, streams: list[StreamName], rng: random.Random
    ) -> None:
        super().__init__(name, world, streams, rng)
        self.group = group
        self.answers: list[tuple[TransactionId, AdminAnswer]] = []
        self.restarts = 0
        self._asked: tuple[str, Answered] | None = None
        self._looked_ms = 0
        self._register()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return super().idle and self._asked is None

    def step(self, clock_ms: int, log: str) -> None:
        """Do one thing, or wait for an answer."""
        if self.current is None and clock_ms - self._looked_ms > RENEW_MS:
            self._look_at_record()
        if self._asked is not None:
            path, answered = self._asked
            raw = self.world.nodes.pop(path, None)
            if raw is not None:
                self._asked = None
                answered(AdminAnswer.from_json(raw))
        elif self.pending is None and not self.stopping and self.rng.random() < 0.12:
            if self.current is not None and self.current.ended in ("", "commit") and self.rng.random() < 0.6:
                self._restart(self.current)
            elif self.attempts:
                asked = self.rng.choice(self.attempts[-8:])
                self._look_up(asked.id, lambda answer: self.answers.append((asked.id, answer)))
        else:
            super().step(clock_ms, log)

    def _register(self) -> None:
        floor = floor_of(self.world.nodes.get(paths.sessions(self.group), b""))
        self.epoch = max(self.epoch, floor) + 1
        self.world.ensure(paths.session(self.group, self.name))
        self._put_on_record()

    def _put_on_record(self) -> None:
        record = ClientSession(self.name, self.epoch, self.world.clock_ms, renews=True)
        self.world.nodes[paths.session(self.group, self.name)] = record.to_json()
        self._looked_ms = self.world.clock_ms

    def _look_at_record(self) -> None:
        """Keep the record for another day, or begin another session if it is gone."""
        if paths.session(self.group, self.name) in self.world.nodes:
            self._put_on_record()
        else:
            self._register()

    def _ask(self, answered: Answered, kind: RequestKind, **what: object) -> None:
        request = AdminRequest(kind=kind, owner=self.name, created_ms=0, **what)  # type: ignore[arg-type]
        self._asked = self.world.request(self.group, request.to_json()), answered

    def _look_up(self, transaction: TransactionId, answered: Answered) -> None:
        self._ask(answered, RequestKind.LOOK_UP, transaction=str(transaction))

    def _restart(self, attempt: Attempt) -> None:
        self.restarts += 1
        attempt.asked_ms = NEVER_MS  # by this session; what an older one has asked for need not be heard
        before = self.epoch
        self._register()
        self._ask(lambda _: self._fenced(attempt, before), RequestKind.FENCE, owner_epoch=self.epoch)

    def _fenced(self, attempt: Attempt, before: int) -> None:
        """The older session cannot change anything any more, try as it may."""
        self._look_up(attempt.id, lambda answer: self._resume(attempt, answer))
        if self.rng.random() < 0.5:
            self._send(attempt, attempt.begin.home, *commit_frame(attempt))
        if self.rng.random() < 0.6:
            begin = BeginFrame(self.name, before, None, self.lease_ms, attempt.begin.streams)
            zombie = self._begin(TransactionId.of(attempt.id.epoch, self._counter()), begin)
            zombie.ended = "fenced"
            self._send(zombie, begin.home, *commit_frame(zombie))

    def _resume(self, attempt: Attempt, answer: AdminAnswer) -> None:
        self.answers.append((attempt.id, answer))
        known = answer.transactions[0] if answer.transactions else None
        if known is None or known.state is not State.OPEN:
            return  # it ended before the fence; the log says how
        attempt.offsets, attempt.conditions = (), ()
        if self.rng.random() < 0.1:
            attempt.ended = "silent"
            return
        attempt.ended = ""
        attempt.part += 8  # 7 is that of a zombie part
        attempt.pieces = dict(known.pieces)
        attempt.records = [row for piece, count in known.pieces.items() for row in attempt.sent[piece][:count]]
        header = FrameHeader(FrameKind.BEGIN, attempt.id.bytes, attempt.part)
        begin = BeginFrame(self.name, self.epoch, None, self.lease_ms, attempt.begin.streams)
        for name in attempt.begin.streams:
            self._send(attempt, name, header, begin.encode())


def answer_faults(client: RestartingClient, log: dict[str, tuple[bool, int]]) -> list[str]:
    """What is wrong with what a client was told.

    Args:
        client: The client.
        log: For each transaction whether it is committed, and the position of its outcome.
    """
    found = []
    told: dict[TransactionId, bool] = {}
    for transaction, answer in client.answers:
        known = answer.transactions[0] if answer.transactions else None
        if known is None:
            if answer.code != OutcomeExpiredError.code:
                found.append(f"{transaction} was answered with {answer.code}: {answer.message}")
        elif known.state is State.OPEN:
            if told.get(transaction):
                found.append(f"{transaction} is open again, after it had ended")
        else:
            told[transaction] = True
            if (known.state is State.COMMITTED, known.position) != log.get(str(transaction)):
                found.append(
                    f"{transaction} was said to be {known.state} at {known.position}; {log.get(str(transaction))}"
                )
    return found
