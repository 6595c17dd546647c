"""Makers of group states for tests: streams with epochs, and transactions folded from real frames."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from prometheus_client.exposition import generate_latest

from rollbridge.base import effects
from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.base.ids import TransactionId
from rollbridge.base.metrics import Sample
from rollbridge.base.options import constants_of
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey, encode_abort
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.metrics import SampleCollector
from rollbridge.stream.conditions import StreamCondition
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.group_offsets import GroupOffsets
from rollbridge.stream.keyspace import even_ranges, ranges_of
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.core.effects import EndOffsets
from rollbridge_coordinator.core.metrics import LeaderView, survey
from rollbridge_coordinator.core.settings import LeaderSettings, ScalingSettings, SnapshotSettings
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import LedStream

GROUP = GroupName("sales")
S = TypeVar("S", bound=SnapshotSettings | ScalingSettings | LeaderSettings)


def varied(settings: S, **constants: int) -> S:
    """Return the settings with other values of constants."""
    kind = type(settings)
    made: type[S] = type(kind.__name__, (kind,), {"__slots__": (), **constants})
    assert constants.keys() <= constants_of(kind.__mro__[-2]).keys()
    return made(**{item.name: getattr(settings, item.name) for item in fields(settings)})


class Bench:
    """A group whose buffers are fed by hand."""

    def __init__(self, streams: Mapping[str, int], settings: LeaderSettings | None = None) -> None:
        fold = BufferFold(BufferLimits(), lambda *_: None)
        self.group = GroupState(GROUP, 1, fold, settings or LeaderSettings())
        self.clock_ms = 1_000
        self._counters = itertools.count(1)
        for name, segments in streams.items():
            config = StreamConfig(name=StreamName.parse(name), group=GROUP, created_ms=0, buffer_topic_id="x")
            history = EpochHistory.create(even_ranges(segments), 0)
            self.group.add_stream(LedStream(config, history))

    def scale(self, name: str, seal: Sequence[int], ranges: Sequence[tuple[float, float]]) -> None:
        """Add the epoch that a scale makes."""
        stream = self.group.streams[name]
        stream.history = stream.history.with_records(stream.history.plan_scale(seal, ranges_of(ranges), self.clock_ms))

    def begin(self, *names: str, client: str = "c", lease_ms: int = 60_000) -> TransactionId:
        """Begin a transaction against the present reference epochs."""
        epochs = {name: int(self.group.streams[name].history.active.reference_epoch) for name in names}
        return self.begin_against(epochs, client, lease_ms)

    def begin_against(self, epochs: Mapping[str, int], client: str = "c", lease_ms: int = 60_000) -> TransactionId:
        """Begin a transaction against other reference epochs."""
        identifier = TransactionId.of(next(iter(epochs.values())), next(self._counters))
        value = BeginFrame(client, 0, None, lease_ms, epochs).encode()
        for name in epochs:
            self.feed(name, FrameHeader(FrameKind.BEGIN, identifier.bytes), value)
        return identifier

    def data(self, identifier: TransactionId, name: str, segment: int, records: int = 1, size: int = 100) -> None:
        """Send one frame; every call continues the local sequence."""
        first = next(self._counters)
        header = FrameHeader(FrameKind.DATA, identifier.bytes, 0, segment, first, records)
        self.feed(name, header, b"x" * size)

    def commit(
        self,
        identifier: TransactionId,
        pieces: Mapping[tuple[int, int], int],
        conditions: Sequence[StreamCondition] = (),
        offsets: Sequence[GroupOffsets] = (),
    ) -> BufferedTransaction:
        """Ask for a commit of (place of stream, segment) → records; gives the transaction."""
        item = self.group.fold.open[identifier.bytes]
        named = {PieceKey(0, stream, segment): count for (stream, segment), count in pieces.items()}
        manifest = Manifest(named, tuple(offsets), tuple(conditions))
        self.feed(item.begin.home, FrameHeader(FrameKind.COMMIT, identifier.bytes), manifest.encode())
        return item

    def abort(self, identifier: TransactionId) -> BufferedTransaction:
        """Ask for an abort; gives the transaction."""
        item = self.group.fold.open[identifier.bytes]
        self.feed(item.begin.home, FrameHeader(FrameKind.ABORT, identifier.bytes), encode_abort("client"))
        return item

    def one(
        self,
        name: str,
        segment: int,
        client: str = "c",
        conditions: Sequence[StreamCondition] = (),
        offsets: Sequence[GroupOffsets] = (),
    ) -> BufferedTransaction:
        """A transaction with one record that waits for its commit."""
        identifier = self.begin(name, client=client)
        self.data(identifier, name, segment)
        return self.commit(identifier, {(0, segment): 1}, conditions, offsets)

    def feed(self, name: str, header: FrameHeader, value: bytes) -> None:
        """Fold one message."""
        partition = (StreamName.parse(name).buffer_topic(), 0)
        offset = self.group.fold.positions.get(partition, 0)
        self.group.fold.fold(name, partition, offset, self.clock_ms, header.pack(), value)


def run(bench: Bench, procedure: Steps[None], unread: int = 0) -> list[object]:
    """Carry out a procedure; buffers end ``unread`` messages behind what has been folded. Gives its effects."""
    seen: list[object] = []

    def answer(effect: AnyEffect) -> Any:
        seen.append(effect)
        if isinstance(effect, EndOffsets):
            return {item: bench.group.fold.positions.get(item, 0) + unread for item in effect.partitions}
        return True

    effects.run(procedure, answer)
    return seen


def view_of(group: GroupState, now_ms: int = 2_000, **what: Any) -> LeaderView:
    """What a leader's shell knows besides the state, at a moment."""
    positions = {partition: group.fold.positions.get(partition, 0) for partition in group.partitions()}
    return LeaderView(now_ms=now_ms, survey=survey(group.fold.open.values(), positions, now_ms), **what)


def values_of(samples: Iterable[Sample]) -> dict[tuple[str, ...], Any]:
    """The values of samples by the names of their families, without our prefix, and by their labels."""
    return {
        (item.family.name.removeprefix("rollbridge_"), *(str(label) for label in item.labels)): item.value
        for item in samples
    }


def text_of(samples: Iterable[Sample]) -> list[str]:
    """The lines that Prometheus reads."""
    kept = list(samples)
    return generate_latest(SampleCollector(lambda: kept)).decode().splitlines()
