"""A client of the simulation that asks for commits without waiting for answers, and what it is promised of their order.

Its frames wait for each buffer partition apart from the others, as in a producer, so they arrive in any order; now and
then a commit cannot be delivered, and now and then the connection dies with frames that nobody will ever see.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from coordinator.tests.sim_actors import LEASE_MS, Attempt, Client, commit_frame
from coordinator.tests.sim_world import World
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import FrameHeader, FrameKind, encode_abort, unpack_header
from rollbridge.commitlog.commit_order import CommitOrder
from rollbridge.commitlog.control import FORSAKEN, ControlKind, ControlRecord
from rollbridge.stream.names import StreamName

UNDER_WAY_MAX = 6
TELL_AGAIN_MS = 100

Frame = tuple[str, FrameHeader, bytes]


@dataclass
class Connection:
    """The commits of one connection.

    Attributes:
        asked: All that it asked for, in that order.
        open: Those that may be under way, with the time at which they were asked for, ms.
        lost: The number of the first one of which nobody will ever hear, because the connection is gone.
    """

    number: int
    asked: list[Attempt] = field(default_factory=list)
    open: list[tuple[Attempt, int]] = field(default_factory=list)
    last: int = 0
    lost: int | None = None


class PipeliningClient(Client):
    """Has several commits under way; dies now and then, and goes on with another connection.

    It writes in transactions only, and each connection has keys of its own, so the records of each key stand in the
    order of their commits.

    Attributes:
        connections: All that it ever had.
    """

    def __init__(self, name: str, world: World, streams: list[StreamName], rng: random.Random) -> None:
        super().__init__(name, world, streams, rng)
        self.connections = [Connection(1)]
        self._delivered: set[TransactionId] = set()
        self._waiting: dict[tuple[str, int], list[tuple[Attempt, Frame]]] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return super().idle and not self._waiting and not self.connections[-1].open

    def step(self, clock_ms: int, log: str) -> None:
        """Do one thing."""
        self.clock_ms = clock_ms
        chance = self.rng.random()
        connection = self.connections[-1]
        if self._waiting and chance < 0.45:
            self._deliver()
        elif connection.open and chance < 0.6:
            self._hear(connection, log)
        elif self.current is None:
            if not self.stopping and len(connection.open) < UNDER_WAY_MAX:
                self._start_transaction()
            elif self.stopping:
                self._deliver()
        elif self.stopping or chance < 0.8:
            self._commit(connection, self.current)
        elif chance < 0.81:
            self._die(connection)
        else:
            self._write(self.current)

    def _keys(self) -> str:
        return f"{self.name}-{self.connections[-1].number}"

    def _commit(self, connection: Connection, attempt: Attempt) -> None:
        connection.last += 1
        first = connection.open[0][0].order if connection.open else None
        behind = 0 if first is None else connection.last - first.number
        attempt.order = CommitOrder(connection.number, 0, connection.last, behind)
        attempt.ended = "commit"
        connection.asked.append(attempt)
        self.current = None
        if self.rng.random() < 0.05:
            self._fail(connection, attempt)
            return
        connection.open.append((attempt, self.clock_ms))
        self._send(attempt, attempt.begin.home, *commit_frame(attempt))

    def _fail(self, connection: Connection, attempt: Attempt) -> None:
        """The COMMIT frame cannot be delivered; nor can, perhaps, the ABORT frame that takes it back."""
        assert attempt.order is not None
        attempt.ended = "silent"
        if self.rng.random() < 0.5:
            attempt.ended = "abort"
            connection.open.append((attempt, self.clock_ms))
            header = FrameHeader(FrameKind.ABORT, attempt.id.bytes, 0, *attempt.order.fields())
            self._send(attempt, attempt.begin.home, header, encode_abort("no"))

    def _hear(self, connection: Connection, log: str) -> None:
        """Learn outcomes, and say what the first one under way does not wait for."""
        topic = self.world.topics[log]
        for _, record in topic.visible(self.log_position):
            if record.kind is not ControlKind.BEGIN:
                self.outcomes[record.transaction] = record
        self.log_position = topic.stable_end(self.log_position)
        for attempt, _ in connection.open:
            attempt.outcome = self.outcomes.get(attempt.id)
        connection.open = [item for item in connection.open if item[0].outcome is None]
        if connection.open:
            attempt, asked_ms = connection.open[0]
            assert attempt.order is not None
            if attempt.order.behind and attempt.ended == "commit" and self.clock_ms > asked_ms + TELL_AGAIN_MS:
                attempt.order = attempt.order._replace(behind=0)
                self._send(attempt, attempt.begin.home, *commit_frame(attempt))

    def _die(self, connection: Connection) -> None:
        """The connection is gone with all that has not been delivered."""
        lost = [item for queue in self._waiting.values() for item in queue]
        self._waiting.clear()
        gone = {attempt.id for attempt, (_, header, _) in lost if header.kind is FrameKind.BEGIN}
        for attempt, (_, header, _) in lost:
            if header.kind is FrameKind.COMMIT and attempt.order is not None and attempt.id not in self._delivered:
                attempt.ended = "silent"
                connection.lost = min(connection.lost or attempt.order.number, attempt.order.number)
        if self.current is not None:
            self.current.ended = "silent"
            self.current = None
        connection.open.clear()
        self.connections.append(Connection(connection.number + 1))
        # A transaction whose begin stands in no buffer is none; of these nobody ever hears.
        begun = {
            known.transaction
            for name, log in self.world.topics.items()
            if ".transaction-buffer" in name
            for entry in log.entries
            if (known := unpack_header(entry.item[0])) is not None
        }
        self.attempts = [item for item in self.attempts if item.id not in gone or item.id.bytes in begun]

    def _deliver(self) -> None:
        """Deliver some of what waits for one partition."""
        if self._waiting:
            key = self.rng.choice(sorted(self._waiting))
            queue = self._waiting[key]
            left = []
            for attempt, frame in queue[: self.rng.randint(1, 6)]:
                if frame[1].kind is FrameKind.COMMIT and self._waits_elsewhere(attempt, key):
                    left.append((attempt, frame))
                    continue
                super()._send(attempt, *frame)
                if frame[1].kind is FrameKind.COMMIT:
                    self._delivered.add(attempt.id)
                del queue[len(left)]
            if not queue:
                del self._waiting[key]

    def _waits_elsewhere(self, attempt: Attempt, here: tuple[str, int]) -> bool:
        """Whether frames of other buffers have to be acknowledged before the commit is asked for."""
        others = (queue for key, queue in self._waiting.items() if key != here)
        return any(attempt is item for queue in others for item, _ in queue)

    def _send(self, attempt: Attempt, stream: str, header: FrameHeader, value: bytes) -> None:
        key = stream, attempt.id.counter % 2
        self._waiting.setdefault(key, []).append((attempt, (stream, header, value)))


def order_faults(client: PipeliningClient, outcomes: dict[str, ControlRecord]) -> list[str]:
    """What is wrong with the order of a client's commits; ``outcomes`` are in the order of the commit log."""
    found: list[str] = []
    places = {name: place for place, (name, item) in enumerate(outcomes.items()) if item.kind is ControlKind.COMMIT}
    for connection in client.connections:
        committed = [item for item in connection.asked if str(item.id) in places]
        order = [places[str(item.id)] for item in committed]
        if order != sorted(order):
            found.append(f"commits of connection {connection.number} of {client.name} are out of order: {order}")
        numbers = [item.order.number for item in committed if item.order is not None]
        if connection.lost is not None and max(numbers, default=0) > connection.lost:
            found.append(f"{numbers} of {client.name} are committed, but {connection.lost} never arrived")
    return found


def may_be_forsaken(client: Client, attempt: Attempt, outcome: ControlRecord) -> bool:
    """Whether a commit may have been refused because one before it never came, or not before its lease ended."""
    if outcome.reason != FORSAKEN or not isinstance(client, PipeliningClient):
        return False
    if outcome.decided_ms > attempt.begun_ms + LEASE_MS:
        return True
    return any(attempt in connection.asked for connection in client.connections[:-1])
