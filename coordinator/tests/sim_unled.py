"""A run in which streams cannot be led."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field

from coordinator.tests.sim_actors import scale_request
from coordinator.tests.sim_term import LedWorld
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import Fenced, Gone
from rollbridge.base.errors import CorruptDataError
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.metadata import paths
from rollbridge.metadata.changes import BUFFER_LOST, StreamFault
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import StaleStateError

GROUP = GroupName("sales")


INNOCENT, HEALED, LOST = (StreamName("sales", name) for name in ("innocent", "healed", "lost"))


STREAMS = (INNOCENT, HEALED, LOST)


DEPTH = paths.transactions(GROUP).count("/") + 1
"""Of the buckets of records in ZooKeeper."""


UNSEEN_MS = 3_000
"""How long a broker may not know a topic: less than a leader waits before it takes that for the truth."""


STEPS = 2_500


REST_STEPS = 40_000


@dataclass
class Attempt:
    """A transaction: which streams it names, the epochs it began against, and what it has written."""

    id: TransactionId
    epochs: dict[StreamName, int]
    pieces: dict[PieceKey, int] = field(default_factory=dict)
    is_asked: bool = False
    is_harmed: bool = False
    """Whether some of its frames may be lost, or were never taken."""


class Run(LedWorld):
    """One simulated history."""

    def __init__(self, seed: int) -> None:
        super().__init__(GROUP)
        self.rng = random.Random(seed)
        self.attempts: list[Attempt] = []
        self.garbage: dict[str, bytes] = {}
        self.unseen_until_ms = 0
        self.faults: set[str] = set()
        self.recorded: set[TransactionId] = set()
        """Transactions of which ZooKeeper has had a record."""
        for name in STREAMS:
            body = AdminRequest(kind=RequestKind.CREATE_STREAM, stream=str(name), segments=2, created_ms=0)
            self.world.request(GROUP, body.to_json())
        self.until(lambda: len(self.world.children(paths.streams("sales"))) == len(STREAMS))
        self.lost_at = self.rng.randrange(STEPS // 4, STEPS)

    def go(self) -> None:
        for number in range(STEPS):
            self.step()
            if number == self.lost_at:
                self._lose()
            chance = self.rng.random()
            if chance < 0.05:
                self._begin()
            elif chance < 0.09:
                self._commit()
            elif chance < 0.096:
                self._spoil()
            elif chance < 0.105:
                self._heal()
            elif chance < 0.115:
                self.die()
            elif chance < 0.12:
                self._scale()
        while self.garbage or self.world.unreadable or self.world.unseen:
            self._heal()
        for attempt in self.attempts:
            if not attempt.is_asked:
                self._ask(attempt)
        self.until(self._is_over, REST_STEPS)
        self.check()

    def step(self) -> None:
        self.clock_ms += self.step_ms
        self.world.clock_ms = self.clock_ms
        if self.clock_ms > self.unseen_until_ms:
            self.world.unseen.clear()
        try:
            self.leader.step(self.clock_ms, self.rng)
        except (fx.EffectRefusedError, StaleStateError, CorruptDataError, Fenced, Gone):
            self.terms_ended += 1
            self.take_over()
        self.recorded.update(TransactionId.parse(path.rpartition("/")[2]) for path in self._records())
        if self.leader.group is not None:
            self.faults.update(fault.code for _, fault in self.leader.group.waits.faults.items())

    def _records(self) -> list[str]:
        parent = paths.transactions(GROUP)
        return [path for path in self.world.nodes if path.startswith(parent) and path.count("/") > DEPTH]

    def die(self) -> None:
        """The leader dies, perhaps in the middle of an effect, and has a successor."""
        self.leader.crash(self.rng.random())
        self.take_over()

    # What clients do.

    def _begin(self) -> None:
        chosen = self.rng.sample(STREAMS, self.rng.choice((1, 1, 2)))
        if any(self._is_spoilt(name) or name.buffer_topic() not in self.world.topics for name in chosen):
            return
        epochs = {name: int(history_of(self.world, name).active.reference_epoch) for name in chosen}
        self.counter += 1
        attempt = Attempt(TransactionId.of(next(iter(epochs.values())), self.counter), epochs)
        attempt.is_harmed = LOST in epochs and self.world.lost_buffers
        self.attempts.append(attempt)
        begin = BeginFrame(
            f"c{self.counter}", 0, None, 10_000_000, {str(name): epoch for name, epoch in epochs.items()}
        ).encode()
        size = 700 if self.rng.random() < 0.1 else 5
        for place, (name, epoch) in enumerate(epochs.items()):
            segment = int(self.rng.choice(history_of(self.world, name).record(epoch).segments).id.number)
            self._send(attempt, name, FrameHeader(FrameKind.BEGIN, attempt.id.bytes), begin)
            batch = json.dumps([["k", f"{attempt.id}-{place}" + "x" * size, str(attempt.id), place]]).encode()
            self._send(attempt, name, FrameHeader(FrameKind.DATA, attempt.id.bytes, 0, segment, place, 1), batch)
            attempt.pieces[PieceKey(0, place, segment)] = 1

    def _commit(self) -> None:
        left = [item for item in self.attempts if not item.is_asked]
        if left:
            self._ask(self.rng.choice(left))

    def _ask(self, attempt: Attempt) -> None:
        attempt.is_asked = True
        home = next(iter(attempt.epochs))
        header = FrameHeader(FrameKind.COMMIT, attempt.id.bytes)
        self._send(attempt, home, header, Manifest(attempt.pieces).encode())

    def _send(self, attempt: Attempt, name: StreamName, header: FrameHeader, value: bytes) -> None:
        taken = self.world.produce(name.buffer_topic(), (header.pack(), value))
        attempt.is_harmed = attempt.is_harmed or taken is None

    # What befalls the streams.

    def _is_spoilt(self, name: StreamName) -> bool:
        return any(path.startswith(paths.stream(name)) for path in self.garbage)

    def _scale(self) -> None:
        name = self.rng.choice(STREAMS)
        if not self._is_spoilt(name):
            body = scale_request(self.world, name, self.rng, self.clock_ms)
            if body is not None:
                self.world.request(GROUP, body.to_json())

    def _spoil(self) -> None:
        name = self.rng.choice((HEALED, LOST))
        kind = self.rng.randrange(4)
        if kind == 0:
            self.world.unreadable[name.buffer_topic()] = "TOPIC_AUTHORIZATION_FAILED"
        elif kind == 1:
            self.world.unseen.add(name.buffer_topic())
            self.unseen_until_ms = self.clock_ms + UNSEEN_MS
        else:
            epochs = [f"{paths.epochs(name)}/{item}" for item in self.world.children(paths.epochs(name))]
            path = self.rng.choice([paths.stream(name), *epochs])
            self.garbage.setdefault(path, self.world.nodes[path])
            self.world.nodes[path] = b"garbage"
        if self.rng.random() < 0.7:
            self.die()

    def _heal(self) -> None:
        for path, value in self.garbage.items():
            if self.world.nodes[path] == b"garbage":  # else a leader that had read it before has written it since
                self.world.nodes[path] = value
        self.garbage.clear()
        self.world.unreadable.clear()
        self.world.unseen.clear()

    def _lose(self) -> None:
        topic = LOST.buffer_topic()
        self.world.lost_buffers = True
        self.world.lose(topic)
        if self.rng.random() < 0.5:
            self.world.create(topic)
        for attempt in self.attempts:
            attempt.is_harmed = attempt.is_harmed or LOST in attempt.epochs

    # What must hold.

    def outcomes(self) -> dict[TransactionId, list[ControlRecord]]:
        found: dict[TransactionId, list[ControlRecord]] = {}
        for _, record in self.world.topics[GROUP.commit_log_topic].visible():
            if record.kind is not ControlKind.BEGIN:
                found.setdefault(record.transaction, []).append(record)
        return found

    def _is_over(self) -> bool:
        if self.clock_ms % 1_000 >= self.step_ms:
            return False
        known = self.outcomes()
        raw = self.world.nodes.get(paths.stream_fault(LOST))
        return (
            all(item.id in known for item in self.attempts if not item.is_harmed)
            and not self._records()
            and raw is not None
            and StreamFault.from_json(raw).code == BUFFER_LOST
            and paths.stream_fault(HEALED) not in self.world.nodes
        )

    def check(self) -> None:
        known = self.outcomes()
        seen: Counter[str] = Counter()
        for name, log in self.world.topics.items():
            if ".segment-" in name:
                seen.update(str(record.transaction) for _, record in log.visible() if record.transaction is not None)
        for attempt in self.attempts:
            records = known.get(attempt.id, [])
            assert len(records) <= 1, f"{attempt.id} has two outcomes"
            committed = bool(records) and records[0].kind is ControlKind.COMMIT
            assert seen[str(attempt.id)] == (len(attempt.pieces) if committed else 0), f"{attempt.id} is torn"
            if not attempt.is_harmed:
                assert committed, f"{attempt.id} of {list(map(str, attempt.epochs))} is lost: {records}"
        assert all(path in self.world.nodes for path in map(paths.stream, STREAMS))
        for attempt in self.attempts:
            assert attempt.id not in self.recorded or attempt.id in known, (
                f"nothing is said of {attempt.id}, which was recorded"
            )
