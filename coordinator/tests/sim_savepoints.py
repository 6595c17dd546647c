"""Clients of the simulation whose transactions meet streams as they write, and go back to savepoints."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from coordinator.tests.sim_actors import Attempt
from coordinator.tests.sim_sessions import RestartingClient
from coordinator.tests.sim_world import Record
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest
from rollbridge.buffer.savepoints import SavepointFrame
from rollbridge.buffer.table import State
from rollbridge.metadata.requests import AdminAnswer
from rollbridge.stream.names import StreamName


class Point(NamedTuple):
    """What counted when a savepoint was made."""

    frame: SavepointFrame
    """All that was in force."""
    records: list[tuple[StreamName, Record]]


class SavingClient(RestartingClient):
    """Begins with one stream, has others join, makes savepoints and goes back to them; and so do its successors.

    Attributes:
        joined, saved, rolled_back, resumed_at: How often it did that; the last one counts those that went on from a
            savepoint after they were killed.
        broken: What it was told wrongly.
    """

    joined = saved = rolled_back = resumed_at = 0

    def __init__(self, *arguments, **named) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*arguments, **named)
        self.broken: list[str] = []
        self._points: dict[TransactionId, list[Point]] = {}
        self._whole_due: set[TransactionId] = set()
        self._reads = random.Random(f"offsets of {self.name}")
        """Whether it has read on, drawn beside everything else."""

    @property
    def is_writing(self) -> bool:
        """Whether a transaction of it is open, and waits for nobody."""
        return self._asked is None and self.pending is None and self.current is not None and not self.current.ended

    def step(self, clock_ms: int, log: str) -> None:
        """Do one thing, or wait for an answer; it is killed less often than others, so that there is more to resume."""
        if self.is_writing and not self.stopping:
            self.clock_ms = clock_ms
            assert self.current is not None
            if self.rng.random() < 0.1:
                self._restart(self.current)
            else:
                self._go_on()
        else:
            super().step(clock_ms, log)

    def _start_transaction(self) -> None:
        stream = self.rng.choice(self.streams)
        epochs = {str(stream): self._reference(stream)}
        begin = BeginFrame(self.name, self.epoch, None, self.lease_ms, epochs)
        self.current = self._begin(TransactionId.of(epochs[str(stream)], self._counter()), begin)
        self._points[self.current.id] = []
        self._whole_due.add(self.current.id)

    def _go_on(self) -> None:
        attempt = self.current
        assert attempt is not None
        chance = self.rng.random()
        if chance < 0.2:
            self._join(attempt)
        elif chance < 0.4:
            if self._reads.random() < 0.4:
                self._read_on(attempt)
            self._save(attempt)
        elif chance < 0.52 and self._points[attempt.id]:
            self._roll_back(attempt, self.rng.choice(self._points[attempt.id]))
        elif attempt.commits_ms is not None or self.rng.random() < 0.5:
            super()._go_on()
        else:
            self._write(attempt)

    def _join(self, attempt: Attempt) -> None:
        left = [item for item in self.streams if str(item) not in attempt.begin.streams]
        if not left:
            return
        self.joined += 1
        # Nothing orders two buffers, so a leader may decide an abort before it reads of the stream: to it the frame is
        # one of a transaction that has ended.
        self.world.said_again.add(attempt.id.bytes)
        stream, known = self.rng.choice(left), len(attempt.begin.streams)
        streams = {**attempt.begin.streams, str(stream): self._reference(stream)}
        attempt.begin = replace(attempt.begin, streams=streams)
        header = FrameHeader(FrameKind.BEGIN, attempt.id.bytes, attempt.part, known)
        self._send(attempt, str(stream), header, self._begun(attempt))

    def _begun(self, attempt: Attempt) -> bytes:
        """The value of a BEGIN frame of this session, also if an earlier one began the transaction."""
        return replace(attempt.begin, client_epoch=self.epoch).encode()

    def _save(self, attempt: Attempt) -> None:
        self.saved += 1
        points = self._points[attempt.id]
        number = points[-1].frame.number + 1 if points else 1
        whole = SavepointFrame(number, True, Manifest(dict(attempt.pieces), attempt.offsets), {"n": b"%d" % number})
        frame = whole
        if attempt.id not in self._whole_due and points:
            before = points[-1].frame.manifest
            changed = {key: count for key, count in attempt.pieces.items() if before.pieces.get(key) != count}
            offsets = tuple(item for item in attempt.offsets if item not in before.offsets)
            frame = replace(whole, whole=False, manifest=Manifest(changed, offsets))
        self._whole_due.discard(attempt.id)
        points.append(Point(whole, list(attempt.records)))
        header = FrameHeader(FrameKind.SAVEPOINT, attempt.id.bytes, attempt.part)
        self._send(attempt, attempt.begin.home, header, frame.encode())

    def _read_on(self, attempt: Attempt) -> None:
        """Have it commit another offset, beside those that it has for other partitions and groups."""
        fresh = self._offsets_of(f"group-{self._reads.randint(0, 1)}")
        known = {item.group_id: item for item in attempt.offsets}
        known[fresh.group_id] = known[fresh.group_id].joined(fresh) if fresh.group_id in known else fresh
        attempt.offsets = tuple(known.values())

    def _roll_back(self, attempt: Attempt, point: Point) -> None:
        self.rolled_back += 1
        former, attempt.part = attempt.part, attempt.part + 8
        attempt.pieces, attempt.records = dict(point.frame.manifest.pieces), list(point.records)
        attempt.offsets = point.frame.manifest.offsets
        header = FrameHeader(FrameKind.BEGIN, attempt.id.bytes, attempt.part, 0, former + 1)
        for name in attempt.begin.streams:
            self._send(attempt, name, header, self._begun(attempt))
        self._whole_due.add(attempt.id)
        self._save(attempt)

    def _resume(self, attempt: Attempt, answer: AdminAnswer) -> None:
        points = self._points.get(attempt.id, [])
        known = answer.transactions[0] if answer.transactions else None
        if known is not None and known.state is State.OPEN:
            held = None if answer.savepoint is None else answer.savepoint.held().frame
            made = points[-1].frame if points else None
            if held != made:
                self.broken.append(f"{attempt.id}: the last savepoint was {made}, and a leader says {held}")
            if dict(known.pieces) != attempt.pieces:
                self.broken.append(f"{attempt.id}: {attempt.pieces} count, and a leader says {known.pieces}")
            if list(known.streams) != list(attempt.begin.streams):
                self.broken.append(f"{attempt.id}: its streams are {attempt.begin.streams}, and not {known.streams}")
        before = dict(attempt.pieces), list(attempt.records)
        super()._resume(attempt, answer)
        if known is None or known.state is not State.OPEN or attempt.ended == "silent":
            return
        attempt.records = before[1]
        self._whole_due.add(attempt.id)
        if points:  # what it would have committed is told by its last savepoint
            attempt.offsets = points[-1].frame.manifest.offsets
        if points and self.rng.random() < 0.8:
            self.resumed_at += 1
            attempt.pieces, attempt.records = dict(points[-1].frame.manifest.pieces), list(points[-1].records)
            self._save(attempt)
