"""Makers of client transactions without servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from kio.schema.errors import ErrorCode

from rollbridge.buffer.frames import (
    BeginFrame,
    FrameKind,
    unpack_bundle,
    unpack_header,
)
from rollbridge.client.futures import Completion, FrameLimits
from rollbridge.client.outcomes import Explained
from rollbridge.client.sender import Undelivered
from rollbridge.client.sessions import CommitNumbers
from rollbridge.client.transaction import Transaction
from rollbridge.client.writing import BeginPlan, OwnerWriting, TransactionContext
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.errors import (
    BackpressureError,
)
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.routing import Route

ORDERS, PAYMENTS = "sales/orders", "sales/payments"


GROUP = GroupName("sales")


BUFFER = "sales.orders.transaction-buffer"


REFUSED = Undelivered(ErrorCode.message_too_large, is_refusal=True, topic=BUFFER)


LEASE_END = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Sent:
    topic: str
    partition: int
    kinds: list[FrameKind]
    """The kinds of the frames in the message; several if it is a bundle."""
    value: bytes
    """The value of the last frame."""
    delivered: Callable[[Any], object]
    soon: bool


@dataclass
class RecordingSender:
    """Stands where the producer would; acknowledges when the test says so."""

    sent: list[Sent] = field(default_factory=list)
    full_after: int = 1_000_000
    acknowledged: int = 0
    asked: Callable[[], None] = lambda: None
    """Called before a frame is taken, while the transaction waits for it."""

    def send(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Any) -> None:
        self.asked()
        if len(self.sent) >= self.full_after:
            raise BackpressureError("full")
        self._note(topic, partition, key, value, delivered, soon=False)

    def send_soon(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Any) -> None:
        self._note(topic, partition, key, value, delivered, soon=True)

    def wait_until(self, reached: Callable[[], bool], timeout_s: float | None) -> bool:
        return reached()

    def _note(self, topic: str, partition: int, key: bytes, value: bytes, delivered: Any, *, soon: bool) -> None:
        header = unpack_header(key)
        assert header is not None
        frames = unpack_bundle(header, value) if header.kind is FrameKind.BUNDLE else [(header, 0, value)]
        assert {inner.transaction for inner, _, _ in frames} == {header.transaction}
        kinds = [inner.kind for inner, _, _ in frames]
        self.sent.append(Sent(topic, partition, kinds, frames[-1][2], delivered, soon))

    def kinds(self, stream: str) -> list[FrameKind]:
        topic = StreamName.parse(stream).buffer_topic()
        return [kind for item in self.sent if item.topic == topic for kind in item.kinds]

    def acknowledge(self, count: int | None = None, fault: Undelivered | None = None) -> None:
        """Report the fate of the oldest frames that have none yet."""
        end = len(self.sent) if count is None else self.acknowledged + count
        for item in self.sent[self.acknowledged : end]:
            self.acknowledged += 1
            item.delivered(fault)


@dataclass
class Waiting:
    waiting: dict[bytes, Completion] = field(default_factory=dict)
    doubted: list[bytes] = field(default_factory=list)

    def doubt(self, _: GroupName, completion: Completion) -> None:
        self.doubted.append(completion.key)


class Streams:
    """Streams of two segments whose first epoch is sealed."""

    config = StreamConfig(name=StreamName.parse(ORDERS), group=GROUP, created_ms=0, buffer_topic_id="")

    def __init__(self) -> None:
        first = EpochHistory.create(even_ranges(2), 0)
        second = replace(
            first.plan_scale([0, 1], even_ranges(2), 1), sealed_ends={item.id: 5 for item in first.active.segments}
        )
        self.history = first.with_records(second)
        self.generation = 1

    def grown(self, route: Route) -> Route:
        return route

    def view(self, stream: str) -> Streams:
        return self

    def has_lost(self, route: Route) -> bool:
        return False

    def find(self, name: str) -> str | None:
        return name if "/" in name else None

    read = view


@dataclass
class Leaders:
    """Stands where leaders would be asked."""

    explain: Callable[..., Explained] = lambda group, _: Explained(f"nobody leads {group}")

    def lease_end(self, *_: object) -> datetime:
        return LEASE_END

    def check_savepoints(self) -> None:
        """All coordinators know them."""

    def claim_part(self, *_: object) -> int:
        return 1


@dataclass
class Bench:
    """A client without a cluster."""

    sender: RecordingSender = field(default_factory=RecordingSender)
    catalog: Streams = field(default_factory=Streams)
    outcomes: Waiting = field(default_factory=Waiting)
    plan: BeginPlan = field(init=False)
    runtime: TransactionContext = field(init=False)
    leaders: Leaders = field(default_factory=Leaders)

    def __post_init__(self) -> None:
        self.use(ORDERS, PAYMENTS)
        self.runtime = TransactionContext(
            self.sender,  # type: ignore[arg-type]
            self.catalog,  # type: ignore[arg-type]
            self.outcomes,  # type: ignore[arg-type]
            FrameLimits(),
            0.01,
            CommitNumbers(lambda _: 25_000),
            timedelta(days=7),
            self.leaders,  # type: ignore[arg-type]
        )

    def use(self, *streams: str, partitions: int = 4, segments: int = 1) -> None:
        history = EpochHistory.create(even_ranges(segments), 0)
        routes = tuple(
            Route.of(
                StreamConfig(
                    name=StreamName.parse(stream),
                    group=GROUP,
                    buffer_partitions=partitions,
                    created_ms=0,
                    buffer_topic_id="",
                ),
                history.active,
            )
            for stream in streams
        )
        begin = BeginFrame("loader", 0, "a label", 1_000, dict.fromkeys(streams, 0))
        self.plan = BeginPlan(GROUP, begin, routes, 0)

    def begin(self, *streams: str, counter: int = 6) -> Transaction:
        """Begin a transaction of these streams, or of those that are used."""
        if streams:
            self.use(*streams)
        return Transaction(OwnerWriting.begun(self.runtime, self.plan, counter))

    def settle(self, transaction: Transaction, kind: ControlKind, reason: str = "", offset: int = 5) -> None:
        record = ControlRecord(transaction.id, kind, "loader", 0, 0, 1, reason=reason)
        self.outcomes.waiting.pop(transaction.id.bytes).settle(record.encode_value(), offset)
