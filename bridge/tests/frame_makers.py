"""Makers of writers of frames."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import FrameHeader, unpack_header
from rollbridge.client.frame_writer import PartWriter
from rollbridge.client.futures import FRAME_BYTES_MIN, Completion, FrameLimits
from rollbridge.errors import BackpressureError
from rollbridge.kafka.committed import attributed
from rollbridge.kafka.records import LogRecord, read_records
from rollbridge.stream.config import RECORD_BYTES_MAX_DEFAULT, HeaderForm, StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.routing import Route

ID = TransactionId.of(3, 99)


ORDERS, PAYMENTS = "sales/orders", "sales/payments"


def history_of(segments: int) -> EpochHistory:
    return EpochHistory.create(even_ranges(segments), 0)


def route_to(
    stream: str,
    segments: int,
    record_bytes_max: int = RECORD_BYTES_MAX_DEFAULT,
    headers: HeaderForm = HeaderForm.FIRST,
) -> Route:
    config = StreamConfig(
        name=StreamName.parse(stream),
        group=GroupName("sales"),
        record_bytes_max=record_bytes_max,
        created_ms=0,
        buffer_topic_id="",
        headers=headers,
    )
    return Route.of(config, history_of(segments).active)


@dataclass
class Frames:
    """Takes frames, or refuses them while ``full`` says so."""

    taken: list[tuple[int, FrameHeader, bytes]] = field(default_factory=list)
    full: Callable[[], bool] = lambda: False

    def emit(self, place: int, key: bytes, value: bytes) -> None:
        if self.full():
            raise BackpressureError("full")
        header = unpack_header(key)
        assert header is not None
        self.taken.append((place, header, value))

    def records(self, place: int) -> dict[int, list[LogRecord]]:
        """What a stream's frames hold, by segment number."""
        found: dict[int, list[LogRecord]] = defaultdict(list)
        for at, header, value in self.taken:
            if at == place:
                found[header.segment].extend(attributed(read_records(value)))
        return dict(found)


def writer_for(
    frames: Frames, *routes: Route, part: int = 0, sticky: int = 0, limits: FrameLimits | None = None
) -> PartWriter:
    return PartWriter(
        Completion(ID.bytes),
        part,
        routes,
        limits or FrameLimits(frame_bytes=FRAME_BYTES_MIN),
        frames.emit,
        sticky=sticky,
    )
