"""Seeded simulation of deletions and releases while frames are unread, and of transactions that such streams join.

What must hold: a stream is not taken away while a transaction is open of which its buffer had taken a frame before that
was asked for; each transaction whose commit a buffer has taken that stays gets one outcome, which is COMMIT unless a
stream of it went; each request is answered. ``run(seed)`` repeats a history exactly.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.tests.sim_actors import stream_config
from coordinator.tests.sim_term import LedWorld
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import shard
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey, encode_abort
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.metadata import paths
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.stream.config import StreamState
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.core import requests
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import WaitingRequest

GROUP = GroupName("sales")
ORDERS, LEDGER, BILLS = (StreamName("sales", name) for name in ("orders", "ledger", "bills"))
TOPIC = "bills"
GOING = {
    LEDGER: (RequestKind.CREATE_STREAM, RequestKind.DELETE_STREAM),
    BILLS: (RequestKind.ADOPT_TOPIC, RequestKind.RELEASE_TOPIC),
}
STEPS, DRAIN_STEPS, SEEDS = 2_500, 20_000, 12
MAY_FAIL = {"stream-busy", "stream-exists", "stream-not-found"}


@dataclass(eq=False)
class Attempt:
    """A transaction, and what brokers have acknowledged of it."""

    id: TransactionId
    streams: dict[str, int]
    buffers: dict[str, str]
    pieces: dict[PieceKey, int] = field(default_factory=dict)
    count: int = 0
    is_asked: bool = False
    is_aborted: bool = False
    """Whether somebody has asked for its abort."""
    is_lost: bool = False
    """Whether a buffer of it was gone when it wanted to write there."""
    outcome: ControlRecord | None = None

    @property
    def home(self) -> StreamName:
        """The stream that it was begun for."""
        return StreamName.parse(next(iter(self.streams)))


class Run(LedWorld):
    """One simulated history."""

    def __init__(self, seed: int) -> None:
        super().__init__(GROUP)
        self.rng = random.Random(seed)
        self.world.create(TOPIC, 2)
        self.current: list[Attempt | None] = [None, None, None]
        self.all: dict[TransactionId, Attempt] = {}
        self.asked: dict[str, tuple[RequestKind, StreamName | None]] = {}
        """Requests by the paths of their answers."""
        self.before: dict[StreamName, list[Attempt]] = {}
        """Open transactions in the buffers of a stream when it was asked to go."""
        self.gone: set[str] = set()
        """Buffers of streams that were taken away."""
        self.seen = 0
        self.broken: list[str] = []
        self.counts = dict.fromkeys(("taken away", "busy", "joined", "committed", "aborted with a stream"), 0)
        self._ask(RequestKind.CREATE_STREAM, ORDERS)
        self.until(lambda: self._is_there(ORDERS))

    def go(self) -> list[str]:
        """Run with crashes and lags, then let everything end; gives the broken promises."""
        for _ in range(STEPS):
            chance = self.rng.random()
            if chance < 0.004:
                self.leader.crash(self.rng.random())
                self.take_over()
            elif chance < 0.02:
                self._lag()
            elif chance < 0.05:
                self._administer()
            elif chance < 0.2:
                self._write(self.rng.randrange(len(self.current)))
            else:
                self.step()
            self._look()
        self.world.unread = set()
        for place in range(len(self.current)):
            self._commit(self.current[place])
        for _ in range(DRAIN_STEPS):
            self.step()
            self._look()
            if not self.asked and all(self._is_over(item) for item in self.all.values()):
                break
        else:
            self.broken.append("the system does not come to rest")
        if self.terms_ended:
            self.broken.append(f"{self.terms_ended} terms have ended")
        return self.broken

    def _is_over(self, item: Attempt) -> bool:
        return (
            item.outcome is not None or item.is_lost or not item.is_asked or item.buffers[str(item.home)] in self.gone
        )

    def _is_there(self, name: StreamName) -> bool:
        known = paths.stream(name) in self.world.nodes
        return known and stream_config(self.world, name).state is StreamState.ACTIVE

    def _lag(self) -> None:
        there = [name for name in (ORDERS, *GOING) if self._is_there(name)]
        chosen = self.rng.sample(there, self.rng.randint(0, len(there)))
        self.world.unread = {stream_config(self.world, name).buffer_topic for name in chosen}

    # Requests

    def _administer(self) -> None:
        name = self.rng.choice(list(GOING))
        make, end = GOING[name]
        if self.rng.random() < 0.2:
            self._ask(RequestKind.FENCE, None, owner="somebody", owner_epoch=1)
        elif self.rng.random() < 0.1 and self.all:
            chosen = self.rng.choice(list(self.all.values()))
            chosen.is_aborted = True
            self._ask(RequestKind.ABORT_TRANSACTION, None, transaction=str(chosen.id))
        elif any(name == asked for _, asked in self.asked.values()):
            return
        elif self._is_there(name):
            buffer = stream_config(self.world, name).buffer_topic
            open_ones = [item for item in self.all.values() if item.outcome is None and not item.is_aborted]
            self.before[name] = [item for item in open_ones if buffer in item.buffers.values()]
            self._ask(end, name)
        elif paths.stream(name) not in self.world.nodes:
            self._ask(make, name)

    def _ask(self, kind: RequestKind, name: StreamName | None, **more: Any) -> None:
        if name == BILLS:
            more |= {"topic": TOPIC, "partitioner": "murmur2"}
        body = AdminRequest(kind=kind, stream=str(name or ""), created_ms=0, buffer_partitions=1, **more)
        self.asked[self.world.request(GROUP, body.to_json())] = kind, name

    # Transactions

    def _write(self, place: int) -> None:
        item = self.current[place]
        chance = self.rng.random()
        if item is None or item.outcome is not None or (self._is_over(item) and item.is_asked):
            self.current[place] = self._begin(place)
        elif item.is_asked:
            return
        elif chance < (0.6 if self.asked else 0.3):
            self._join(item)
        elif chance < 0.7:
            self._data(item)
        elif chance < 0.95:
            self._commit(item)
        else:
            item.is_asked = item.is_aborted = True
            self._send(item, item.home, FrameHeader(FrameKind.ABORT, item.id.bytes), encode_abort("no"))

    def _begin(self, place: int) -> Attempt:
        home = self.rng.choice([name for name in (ORDERS, ORDERS, *GOING) if self._is_there(name)])
        self.counter += 1
        epoch = int(history_of(self.world, home).active.reference_epoch)
        item = Attempt(TransactionId.of(epoch, self.counter << 2 | place), {}, {})
        self.all[item.id] = item
        self._add(item, home)
        return item

    def _join(self, item: Attempt) -> None:
        left = [name for name in (ORDERS, *GOING) if str(name) not in item.streams and self._is_there(name)]
        if left:
            self.counts["joined"] += 1
            self.world.said_again.add(item.id.bytes)
            self._add(item, self.rng.choice(left))

    def _add(self, item: Attempt, name: StreamName) -> None:
        known = len(item.streams)
        item.streams[str(name)] = int(history_of(self.world, name).active.reference_epoch)
        item.buffers[str(name)] = stream_config(self.world, name).buffer_topic
        begin = BeginFrame(f"c{item.id.counter & 3}", 0, None, 10_000_000, dict(item.streams))
        self._send(item, name, FrameHeader(FrameKind.BEGIN, item.id.bytes, 0, known), begin.encode())

    def _data(self, item: Attempt) -> None:
        place = self.rng.randrange(len(item.streams))
        name, epoch = list(item.streams.items())[place]
        stream = StreamName.parse(name)
        if not self._is_there(stream) or stream_config(self.world, stream).buffer_topic != item.buffers[name]:
            item.is_lost = True
            return
        segment = int(history_of(self.world, stream).record(epoch).segments[0].id.number)
        batch = json.dumps([[f"k{item.id.counter}", f"v{item.count}", str(item.id), item.count]]).encode()
        header = FrameHeader(FrameKind.DATA, item.id.bytes, 0, segment, item.count, 1)
        if self._send(item, stream, header, batch):
            piece = PieceKey(0, place, segment)
            item.pieces[piece] = item.pieces.get(piece, 0) + 1
            item.count += 1

    def _commit(self, item: Attempt | None) -> None:
        if item is not None and not item.is_asked and not item.is_lost:
            item.is_asked = True
            header = FrameHeader(FrameKind.COMMIT, item.id.bytes)
            self._send(item, item.home, header, Manifest(dict(item.pieces)).encode())

    def _send(self, item: Attempt, name: StreamName, header: FrameHeader, value: bytes) -> bool:
        buffer = item.buffers[str(name)]
        is_taken = (
            buffer in self.world.topics and self.world.produce(shard(buffer, 0), (header.pack(), value)) is not None
        )
        item.is_lost |= not is_taken
        item.is_asked |= not is_taken
        return is_taken

    # Checks

    def _look(self) -> None:
        log = self.world.topics[GROUP.commit_log_topic]
        for _, record in log.visible(self.seen):
            if record.kind is not ControlKind.BEGIN:
                self._ended(self.all[record.transaction], record)
        self.seen = log.stable_end(self.seen)
        for stream in GOING:
            self._look_at(stream)
        for path, (kind, name) in list(self.asked.items()):
            raw = self.world.nodes.pop(path, None)
            if raw is not None:
                del self.asked[path]
                self._answered(kind, name, AdminAnswer.from_json(raw))

    def _ended(self, item: Attempt, record: ControlRecord) -> None:
        if item.outcome is not None:
            self.broken.append(f"{item.id} has two outcomes")
        item.outcome = record
        if record.kind is ControlKind.COMMIT:
            self.counts["committed"] += 1
            if record.records != sum(item.pieces.values()):
                self.broken.append(
                    f"{item.id} is committed with {record.records} records, and {item.pieces} were named"
                )
        elif self.gone & set(item.buffers.values()):
            self.counts["aborted with a stream"] += 1
        elif not item.is_aborted:
            self.broken.append(f"{item.id} is aborted, and none of its streams has gone: {record.reason}")

    def _look_at(self, name: StreamName) -> None:
        """What is true in the moment in which a stream is taken away."""
        if paths.stream(name) not in self.world.nodes:
            return
        config = stream_config(self.world, name)
        if config.state is StreamState.ACTIVE or config.buffer_topic in self.gone:
            return
        self.gone.add(config.buffer_topic)
        self.counts["taken away"] += 1
        for item in self.before.pop(name, ()):
            if item.outcome is None and not item.is_aborted:
                self.broken.append(f"{name} is taken away, and {item.id} is open that its buffer had taken before")

    def _answered(self, kind: RequestKind, name: StreamName | None, answer: AdminAnswer) -> None:
        self.counts["busy"] += answer.code == "stream-busy"
        if name is not None and not answer.ok and answer.code not in MAY_FAIL:
            self.broken.append(f"{kind} of {name} is answered {answer.code}: {answer.message}")


def run(seed: int) -> Run:
    """A history to its end."""
    history = Run(seed)
    history.go()
    return history


def test_nothing_open_goes_with_a_stream_and_every_commit_is_decided() -> None:
    counts: dict[str, int] = {}
    for seed in (*range(SEEDS), 41, 50, 98, 104):  # in the last ones several commits name what is taken away
        history = run(seed)
        assert not history.broken, f"seed {seed}: {history.broken[:5]}"
        counts = {name: counts.get(name, 0) + count for name, count in history.counts.items()}
    assert min(counts.values()) > 3, counts


@pytest.mark.long
def test_so_it_is_in_many_histories_of_deletions() -> None:
    for seed in range(100, 200):
        history = run(seed)
        assert not history.broken, f"seed {seed}: {history.broken[:5]}"


def deletes_unread(patch: pytest.MonkeyPatch) -> None:
    """Deletions look at what has been folded by chance."""

    def put(group: GroupState, name: str, request: AdminRequest) -> Any:
        if request.kind not in requests.AFTER_READING:
            return (yield from real(group, name, request))
        group.waits.questions[name] = WaitingRequest(request, {})
        return None

    real = requests.put_question
    patch.setattr(requests, "put_question", put)


def waits_for_what_is_gone(patch: pytest.MonkeyPatch) -> None:
    """A barrier counts buffers that the group does not read any more."""

    def is_folded(group: GroupState, barrier: Mapping[Any, int]) -> bool:
        return all(group.fold.positions.get(partition, 0) >= offset for partition, offset in barrier.items())

    patch.setattr(GroupState, "is_folded", is_folded)


@pytest.mark.parametrize("defect", [deletes_unread, waits_for_what_is_gone])
def test_the_checks_catch_a_defect(defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    assert any(run(seed).broken for seed in range(SEEDS))
