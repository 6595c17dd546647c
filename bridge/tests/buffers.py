"""Buffers for tests: frame histories as an adversary would write them, with the truth about each transaction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import strategies as st

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import (
    BeginFrame,
    FrameHeader,
    FrameKind,
    Manifest,
    PieceKey,
    buffer_partition,
    encode_abort,
)
from rollbridge.stream.names import Partition, StreamName

STREAMS = ("s/a", "s/b", "s/c")


def buffer_of(stream: str, number: int = 0) -> Partition:
    """A partition of a stream's buffer."""
    return StreamName.parse(stream).buffer_topic(), number


class Message(NamedTuple):
    """One message of a buffer topic."""

    stream: str
    partition: Partition
    offset: int
    appended_ms: int
    key: bytes | None
    value: bytes | None


def check_batch(value: bytes, records: int) -> str | None:
    """A batch here is ``b"<records>|..."``; anything else is corrupt."""
    return None if value.startswith(b"%d|" % records) else "not the batch that it claims to be"


def new_fold(limits: BufferLimits | None = None, terminated: Iterable[bytes] = ()) -> BufferFold:
    return BufferFold(limits or BufferLimits(), check_batch, frozenset(terminated))


def fold_all(fold: BufferFold, messages: Iterable[Message]) -> BufferFold:
    for message in messages:
        fold.fold(*message)
    return fold


def begin_frame(*streams: str, lease_ms: int = 1000, client: str = "client") -> BeginFrame:
    return BeginFrame(client, 0, None, lease_ms, dict.fromkeys(streams or STREAMS[:1], 0))


class Buffer:
    """Writes frames to the only partition of each stream's buffer and folds them at once."""

    def __init__(self, limits: BufferLimits | None = None, terminated: Iterable[bytes] = ()) -> None:
        self.limits = limits
        self.fold = new_fold(limits, terminated)
        self.now_ms = 0
        self.log: list[Message] = []

    def raw(self, key: bytes | None, value: bytes | None, stream: str = STREAMS[0]) -> None:
        partition = buffer_of(stream)
        offset = sum(message.partition == partition for message in self.log)
        message = Message(stream, partition, offset, self.now_ms, key, value)
        self.log.append(message)
        self.fold.fold(*message)

    def begin(
        self, counter: int, *streams: str, lease_ms: int = 1000, into: str | None = None, client: str = "client"
    ) -> bytes:
        identifier = TransactionId.of(0, counter).bytes
        frame = begin_frame(*streams, lease_ms=lease_ms, client=client)
        self.raw(FrameHeader(FrameKind.BEGIN, identifier).pack(), frame.encode(), into or frame.home)
        return identifier

    def data(
        self,
        identifier: bytes,
        first_count: int,
        records: int,
        *,
        part: int = 0,
        segment: int = 0,
        size: int = 10,
        value: bytes | None = None,
        stream: str = STREAMS[0],
    ) -> None:
        header = FrameHeader(FrameKind.DATA, identifier, part, segment, first_count, records)
        self.raw(header.pack(), (b"%d|" % records).ljust(size, b".") if value is None else value, stream)

    def commit(self, identifier: bytes, pieces: dict[tuple[int, int, int], int], stream: str = STREAMS[0]) -> None:
        manifest = Manifest({PieceKey(*key): count for key, count in pieces.items()})
        self.raw(FrameHeader(FrameKind.COMMIT, identifier).pack(), manifest.encode(), stream)

    def abort(self, identifier: bytes, reason: str = "client", stream: str = STREAMS[0]) -> None:
        self.raw(FrameHeader(FrameKind.ABORT, identifier).pack(), encode_abort(reason), stream)


def snapshot(fold: BufferFold) -> dict[str, Any]:
    """Everything that a fold knows, as plain values; repeats of old offsets are not knowledge."""
    return {
        "open": {
            item.id: {
                "state": item.state,
                "reason": item.reason,
                "begin": item.begin,
                "begun_ms": item.begun_ms,
                "manifest": item.manifest,
                "decided_ms": item.decided_ms,
                "frames": [
                    (ref.partition, ref.offset, ref.piece, ref.first_count, ref.records, ref.size, ref.batch)
                    for ref in item.frames
                ],
                "bytes": item.bytes,
                "cached_bytes": item.cached_bytes,
                "begun_in": item.begun_in,
                "first_offsets": item.first_offsets,
            }
            for item in fold.open.values()
        },
        "decided": list(fold.decided),
        "positions": dict(fold.positions),
        "dropped": {reason: count for reason, count in fold.rejected.items() if reason != "repeated"},
        "cached_bytes": fold.cached_bytes,
        "low_water": fold.low_water(),
        "next_deadline_ms": fold.ages.next_deadline_ms(),
    }


@dataclass
class Truth:
    """What the writers of a transaction did."""

    id: bytes
    streams: tuple[str, ...]
    end: str = "none"
    """commit, abort or none."""
    corrupt: bool = False
    named: dict[PieceKey, list[int]] = field(default_factory=dict)
    """First counts of the frames of each piece that the manifest names."""
    complete: bool = True


@dataclass
class World:
    """Logs of all partitions, each in order of offset."""

    logs: dict[Partition, list[Message]]
    truths: list[Truth]

    def interleaved(self, draw: st.DrawFn | Any) -> list[Message]:
        """All messages in an order that keeps each partition's."""
        left = {partition: list(log) for partition, log in self.logs.items() if log}
        order: list[Message] = []
        while left:
            partition = draw(st.sampled_from(sorted(left)))
            order.append(left[partition].pop(0))
            if not left[partition]:
                del left[partition]
        return order


Frame = tuple[str, FrameHeader | None, bytes | None]
"""Stream, header and value; without a header, the value is foreign."""


def _data_frames(draw: st.DrawFn, truth: Truth, *, corrupt: bool) -> list[Frame]:
    """Frames of up to three parts; each piece's counts rise, with duplicates and restarts in between."""
    frames: list[Frame] = []
    counts: dict[int, int] = {}
    written: dict[PieceKey, list[tuple[int, int]]] = {}
    for _ in range(draw(st.integers(0, 6))):
        piece = PieceKey(draw(st.integers(0, 2)), draw(st.integers(0, len(truth.streams) - 1)), draw(st.integers(0, 1)))
        records = draw(st.integers(1, 3))
        first = counts.get(piece.part, 0)
        counts[piece.part] = first + records
        header = FrameHeader(FrameKind.DATA, truth.id, piece.part, piece.segment, first, records)
        value = b"%d|%d" % (records, first)
        if corrupt and draw(st.integers(0, 9)) == 0:
            value, truth.corrupt = b"corrupt", True
        frames.extend([(truth.streams[piece.stream], header, value)] * draw(st.sampled_from([1, 1, 1, 2])))
        written.setdefault(piece, []).append((first, records))
    parts = draw(st.sets(st.sampled_from([0, 1, 2]), min_size=1))
    truth.named = {piece: [first for first, _ in batches] for piece, batches in written.items() if piece.part in parts}
    manifest = {piece: sum(count for _, count in batches) for piece, batches in written.items() if piece.part in parts}
    end = draw(st.sampled_from(["commit", "commit", "abort", "none"]))
    truth.end = end
    if end == "commit":
        if draw(st.integers(0, 9)) == 0:
            manifest[PieceKey(7, 0, 0)] = 1
            truth.complete = False
        value = Manifest(manifest).encode()
        frames.append((truth.streams[0], FrameHeader(FrameKind.COMMIT, truth.id), value))
    elif end == "abort":
        frames.append((truth.streams[0], FrameHeader(FrameKind.ABORT, truth.id), encode_abort("client")))
    return frames


def _noise(draw: st.DrawFn, truth: Truth, after: bool) -> list[Frame]:
    """Foreign bytes anywhere; after the end also late frames, a second end and an end in the wrong buffer."""
    stream = draw(st.sampled_from(STREAMS))
    other = TransactionId.of(9, draw(st.integers(0, 1 << 40))).bytes
    kinds: list[Frame] = [
        (stream, None, draw(st.binary(max_size=8))),
        (stream, FrameHeader(FrameKind.DATA, other, 0, 0, 0, 1), b"1|zombie"),
        (stream, FrameHeader(FrameKind.COMMIT, other), Manifest({}).encode()),
        (stream, FrameHeader(FrameKind.ABORT, other), encode_abort("nobody")),
    ]
    if after:
        kinds += [
            (truth.streams[0], FrameHeader(FrameKind.DATA, truth.id, 6, 0, 99, 1), b"1|late"),
            (truth.streams[0], FrameHeader(FrameKind.COMMIT, truth.id), Manifest({}).encode()),
            (truth.streams[0], FrameHeader(FrameKind.ABORT, truth.id), encode_abort("too late")),
        ]
    if len(truth.streams) > 1:
        kinds.append((truth.streams[1], FrameHeader(FrameKind.ABORT, truth.id), encode_abort("wrong buffer")))
    return [kinds[draw(st.integers(0, len(kinds) - 1))] for _ in range(draw(st.integers(0, 2)))]


@st.composite
def worlds(draw: st.DrawFn, *, corrupt: bool = True, transactions_max: int = 4) -> World:
    """Buffers of up to three streams with up to two partitions, written by interleaved transactions."""
    partitions = {stream: draw(st.integers(1, 2)) for stream in STREAMS}
    world = World({buffer_of(stream, number): [] for stream in STREAMS for number in range(partitions[stream])}, [])
    scripts: list[list[Frame]] = []
    for counter in range(draw(st.integers(1, transactions_max))):
        streams = tuple(draw(st.permutations(STREAMS)))[: draw(st.integers(1, 3))]
        truth = Truth(TransactionId.of(0, counter).bytes, streams)
        begin = begin_frame(*streams, lease_ms=draw(st.integers(1, 50)))
        script: list[Frame] = [(stream, FrameHeader(FrameKind.BEGIN, truth.id), begin.encode()) for stream in streams]
        script += _data_frames(draw, truth, corrupt=corrupt)
        ended = truth.end != "none"
        script = [*script, *_noise(draw, truth, ended)] if ended else script
        for frame in _noise(draw, truth, False):
            # An abort in the wrong buffer must stand behind the BEGIN frame of that buffer to be anything at all.
            script.insert(draw(st.integers(len(streams), len(script))), frame)
        world.truths.append(truth)
        scripts.append(script)
    now = 0
    while any(scripts):
        place = draw(st.sampled_from([place for place, script in enumerate(scripts) if script]))
        stream, header, value = scripts[place].pop(0)
        number = buffer_partition(TransactionId.from_bytes(world.truths[place].id), partitions[stream])
        partition = buffer_of(stream, number)
        key = value if header is None else header.pack()
        log = world.logs[partition]
        log.append(Message(stream, partition, len(log), now, key, value))
        now += draw(st.integers(0, 3))
    return world
