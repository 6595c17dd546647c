"""Scenes of two streams and their leader, of which brokers refuse something."""

from __future__ import annotations

import json

from coordinator.tests.sim_term import LedWorld
from coordinator.tests.sim_truncation import history_of
from rollbridge.base.effects import AnyEffect
from rollbridge.base.ids import TransactionId
from rollbridge.base.sn import ANY
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey
from rollbridge.commitlog.control import ControlKind
from rollbridge.metadata import paths
from rollbridge.metadata.requests import RequestKind
from rollbridge.stream.conditions import Condition, Scope, StreamCondition
from rollbridge.stream.group_offsets import GroupOffsets
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.core import effects as fx

GROUP = GroupName("sales")


ORDERS, OTHER = StreamName("sales", "orders"), StreamName("sales", "other")


class Scene(LedWorld):
    """A transaction on a stream that has been scaled since, and another stream of the group."""

    def __init__(self) -> None:
        super().__init__(GROUP)
        for name in (ORDERS, OTHER):
            self.ask(RequestKind.CREATE_STREAM, name, segments=1)
        self.until(lambda: len(self.world.children(paths.streams("sales"))) == 2)
        self.old = self.begin(ORDERS)
        self.ask(RequestKind.SCALE_STREAM, ORDERS, seal=(0,), ranges=((0.0, 0.5), (0.5, 1.0)))
        self.until(lambda: history_of(self.world, ORDERS).active.epoch == 1)

    def create(self, stream: StreamName) -> None:
        """Create a stream of one segment."""
        self.ask(RequestKind.CREATE_STREAM, stream, segments=1)
        self.until(lambda: paths.stream(stream) in self.world.nodes)

    def begin(self, stream: StreamName, lease_ms: int = 10_000_000) -> TransactionId:
        """Begin a transaction, with one record."""
        self.counter += 1
        epoch = int(history_of(self.world, stream).active.reference_epoch)
        identifier = TransactionId.of(epoch, self.counter)
        self._send(
            stream,
            FrameHeader(FrameKind.BEGIN, identifier.bytes),
            BeginFrame(f"c{self.counter}", 0, None, lease_ms, {str(stream): epoch}).encode(),
        )
        batch = json.dumps([["k", f"v{self.counter}", str(identifier), 0]]).encode()
        header = FrameHeader(FrameKind.DATA, identifier.bytes, 0, self._segment(stream, epoch), 0, 1)
        self._send(stream, header, batch)
        return identifier

    def commit(self, stream: StreamName, identifier: TransactionId, *, how: str = "") -> None:
        """Ask for its commit."""
        offsets = (GroupOffsets("readers", {("t", 0): 1}, 0, "m"),) if how == "offsets" else ()
        condition = StreamCondition(0, Condition(ANY, Scope.SEGMENT, b"k"))
        segment = self._segment(stream, identifier.epoch)
        manifest = Manifest({PieceKey(0, 0, segment): 1}, offsets, (condition,) if how == "conditions" else ())
        self._send(stream, FrameHeader(FrameKind.COMMIT, identifier.bytes), manifest.encode())

    def _segment(self, stream: StreamName, epoch: int) -> int:
        """The number of the first segment of an epoch."""
        return int(history_of(self.world, stream).record(epoch).segments[0].id.number)

    def _send(self, stream: StreamName, header: FrameHeader, value: bytes) -> None:
        assert self.world.produce(stream.buffer_topic(), (header.pack(), value)) is not None

    def visible(self, identifier: TransactionId) -> int:
        """How many records of a transaction readers see."""
        logs = [log for name, log in self.world.topics.items() if ".segment-" in name]
        return sum(record.transaction == str(identifier) for log in logs for _, record in log.visible())

    def check(self) -> None:
        """Nothing is half visible."""
        outcome = self.outcome(self.old)
        committed = outcome is not None and outcome.kind is ControlKind.COMMIT
        assert self.visible(self.old) == int(committed)

    def commits(self, stream: StreamName) -> None:
        """A new transaction of a stream is committed."""
        mine = self.begin(stream)
        self.commit(stream, mine)
        self.until(lambda: self.visible(mine) == 1)

    def others_go_on(self) -> None:
        """A transaction of the other stream is committed."""
        mine = self.begin(OTHER)
        self.commit(OTHER, mine)
        self.until(lambda: self.outcome(mine) is not None, 600)
        assert self.visible(mine) == 1
        assert self.terms_ended == 0

    @property
    def fault(self) -> bytes | None:
        return self.world.nodes.get(paths.stream_fault(ORDERS))


def refused(
    effect: AnyEffect, topic: str | None = None, code: str = "TOPIC_AUTHORIZATION_FAILED"
) -> fx.EffectRefusedError:
    return fx.EffectRefusedError(effect, "no", code=code, topic=topic)


def offsets(effect: AnyEffect) -> fx.EffectRefusedError | None:
    return refused(effect, code="INVALID_TXN_STATE") if isinstance(effect, fx.SendOffsets) else None


def begin_both(scene: Scene) -> TransactionId:
    """A transaction of both streams, each of which has been scaled since, so that one rolling commit is about both."""
    both = write_both(scene)
    scale_other(scene)
    commit_both(scene, both)
    return both


def write_both(scene: Scene) -> TransactionId:
    both = TransactionId.of(0, 99)
    begin = BeginFrame("c99", 0, None, 10_000_000, {str(OTHER): 0, str(ORDERS): 0}).encode()
    for place, stream in enumerate((OTHER, ORDERS)):
        scene._send(stream, FrameHeader(FrameKind.BEGIN, both.bytes), begin)
        row = json.dumps([["k", f"x{place}", str(both), place]]).encode()
        scene._send(stream, FrameHeader(FrameKind.DATA, both.bytes, 0, 0, place, 1), row)
    return both


def scale_other(scene: Scene) -> None:
    split = ((0.0, 0.5), (0.5, 1.0))
    scene.ask(RequestKind.SCALE_STREAM, OTHER, seal=(0,), ranges=split)
    scene.until(lambda: history_of(scene.world, OTHER).active.epoch == 1)


def commit_both(scene: Scene, both: TransactionId) -> None:
    manifest = Manifest({PieceKey(0, 0, 0): 1, PieceKey(0, 1, 0): 1})
    scene._send(OTHER, FrameHeader(FrameKind.COMMIT, both.bytes), manifest.encode())
