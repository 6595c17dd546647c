"""What the poison corpus is made of: a group with an innocent stream, poisons, and every way in for each of them.

A poison is something that a broker refuses for good: a record, or what has become of its topic. Each way takes each of
them to a fresh stream of the group. The innocent stream must not notice: it commits, in the same term of the leader.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, Producer

import rollbridge
from integration_tests.clients import Site
from integration_tests.command_line import run_cli
from integration_tests.coordinators import controller_epoch
from integration_tests.patience import PATIENCE_S
from integration_tests.spark_tools import options_of
from rollbridge.buffer.frames import FrameHeader, FrameKind, Manifest, PieceKey
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.records import BatchBuilder
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName, StreamName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
GIVE_UP_S = 3.0
"""How long those wait who write themselves, where it is their patience that ends it."""


class Group:
    """The streams of a group: one that has nothing to do with it, and a fresh one to be poisoned, made on demand."""

    def __init__(self, site: Site, client: rollbridge.Bridge, scope: str) -> None:
        self.site, self.client, self.scope = site, client, scope
        # Somebody else: commits of one connection keep their order, so a poisoned one holds up those behind it.
        self.others = site.connect()
        self.spark: SparkSession | None = None
        self.name = GroupName(scope)
        self.innocent = f"{scope}/innocent"
        client.admin.create_stream(self.innocent)
        self.kafka = KafkaClient(site.cluster.bootstrap_servers)
        self._producer = Producer({"bootstrap.servers": site.cluster.bootstrap_servers, "message.max.bytes": 16 << 20})
        self.commit(self.innocent)
        self.fresh()

    def fresh(self) -> None:
        """Go on with a stream that nothing was done to, in the present term."""
        self.poisoned = f"{self.scope}/poisoned-{uuid.uuid4().hex[:8]}"
        self.client.admin.create_stream(self.poisoned)
        name = StreamName.parse(self.poisoned)
        self.topic = name.segment_topic(self.client.admin.history(self.poisoned).active.segments[0].id)
        self.buffer = name.buffer_topic(0)
        self.term = self.epoch()

    def close(self) -> None:
        """Drop the connections."""
        self.others.close()
        self.kafka.close()

    def epoch(self) -> int:
        """The controller epoch: it is raised whenever a term begins."""
        with ZooKeeperSession(self.site.cluster.zookeeper, root=self.site.root) as session:
            return controller_epoch(session, self.name)

    def commit(self, stream: str, value: bytes = b"v") -> None:
        """A transaction of somebody else."""
        with self.others.transaction(stream) as txn:
            txn.write(stream, key=b"k", value=value)

    def inject_data(self, txn: rollbridge.Transaction, value: bytes, count: int) -> None:
        """Put a forged DATA frame of a transaction into the buffer."""
        self._inject(FrameHeader(FrameKind.DATA, txn.id.bytes, 0, 0, 1_000, count), value)

    def inject_commit(self, txn: rollbridge.Transaction, count: int) -> None:
        """Ask for the commit of a transaction with so many records, forged ones included."""
        self._inject(FrameHeader(FrameKind.COMMIT, txn.id.bytes, 0), Manifest({PieceKey(0, 0, 0): count}).encode())

    def _inject(self, header: FrameHeader, value: bytes) -> None:
        failures: list[KafkaError] = []
        self._producer.produce(
            self.buffer,
            value,
            key=header.pack(),
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
        assert self._producer.flush(120) == 0
        assert not failures

    def innocent_goes_on(self) -> None:
        """Others commit, and nobody had to take over, unless for want of a session."""
        self.commit(self.innocent)
        has_led_on = self.epoch() == self.term or self.site.lost_its_session()
        assert has_led_on, f"the lead has changed: {self.site.said()[-6_000:]}"

    def fault(self) -> str | None:
        """What is said to be wrong with the poisoned stream."""
        fault = self.client.admin.describe(self.poisoned).fault
        return None if fault is None else fault.reason

    def values(self) -> list[bytes | None]:
        """What readers of the poisoned stream see."""
        return [message.value() for message in self.site.committed(self.poisoned)]


class Ending(Enum):
    """What becomes of a record."""

    TAKEN = auto()
    REFUSED = auto()
    """Whoever writes it is told so, and nothing of it is visible."""
    WAITS = auto()
    """Its stream is in an error state, and it is taken once the topic is as it should be again."""
    STUCK = auto()
    """As WAITS, but what is gone does not come back: it is refused when somebody aborts it."""
    STAYS = auto()
    """It stays with its writer, who tries again until it is taken; the group is not concerned."""


@dataclass(frozen=True)
class Poison:
    """A record, and what is done to the topic before it is written."""

    ending: Ending
    key: bytes | None = b"k"
    value: bytes = b"poison"
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: Callable[[], int] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    removes: bool = False
    otherwise: Mapping[str, Ending] = field(default_factory=dict)
    """By way, where it ends in another way."""

    def ending_by(self, way: str) -> Ending:
        """What becomes of it by a way in."""
        return self.otherwise.get(way, self.ending)


DIRECT = ("plain writer", "conditional writer")
"""They write to the segment themselves, and are answered by its broker."""


def _directly(ending: Ending) -> dict[str, Ending]:
    return dict.fromkeys(DIRECT, ending)


POISONS: dict[str, Poison] = {
    "time of two hours ahead": Poison(Ending.TAKEN, timestamp_ms=lambda: int(time.time() * 1000) + 2 * HOUR_MS),
    "time of a century ahead": Poison(Ending.TAKEN, timestamp_ms=lambda: int(time.time() * 1000) + 36_500 * DAY_MS),
    "time of 1970": Poison(Ending.TAKEN, timestamp_ms=lambda: 1),
    "time of a decade ago": Poison(Ending.TAKEN, timestamp_ms=lambda: int(time.time() * 1000) - 3_650 * DAY_MS),
    "record over the limit": Poison(Ending.REFUSED, value=bytes(1_100_000)),
    "headers over the limit": Poison(Ending.REFUSED, headers=tuple((f"h{i}", bytes(60_000)) for i in range(20))),
    "header with our name": Poison(Ending.REFUSED, headers=(("rollbridge", b"x"),)),
    "max.message.bytes": Poison(
        Ending.WAITS,
        value=bytes(5_000),
        settings={"max.message.bytes": "1000"},
        otherwise={"plain writer": Ending.STAYS, "conditional writer": Ending.REFUSED},
    ),
    "cleanup.policy without a key": Poison(
        Ending.WAITS, key=None, settings={"cleanup.policy": "compact"}, otherwise=_directly(Ending.REFUSED)
    ),
    "cleanup.policy with a key": Poison(Ending.TAKEN, settings={"cleanup.policy": "compact"}),
    "message.timestamp.type": Poison(Ending.TAKEN, settings={"message.timestamp.type": "LogAppendTime"}),
    "compression.type": Poison(Ending.TAKEN, settings={"compression.type": "zstd"}),
    "min.insync.replicas": Poison(Ending.TAKEN, settings={"min.insync.replicas": "2"}),
    "retention": Poison(Ending.TAKEN, settings={"retention.ms": "1", "retention.bytes": "1", "segment.ms": "60000"}),
    "removed topic": Poison(Ending.STUCK, removes=True, otherwise=_directly(Ending.REFUSED)),
}


class Refused(Exception):
    """The way says that the record was not written."""


Way = Callable[[Group, Poison], None]


def by_client(group: Group, poison: Poison) -> None:
    """A transaction of ``rollbridge.connect``."""
    with group.client.transaction(group.poisoned) as txn:
        txn.write(group.poisoned, **_record(poison), timestamp=_time(poison))


def by_cli(group: Group, poison: Poison) -> None:
    """``rollbridge produce``."""
    key = () if poison.key is None else ("--key-separator", ":")
    line = poison.value if poison.key is None else poison.key + b":" + poison.value
    headers = [f"--header={name}={value.decode()}" for name, value in poison.headers]
    arguments = ("produce", group.poisoned, *key, *headers)
    answer = run_cli(group.site.environment(), *arguments, stdin=line.replace(b"\0", b"0") + b"\n")
    if answer.code:
        raise Refused(answer.err)


def by_spark(group: Group, poison: Poison) -> None:
    """The sink of Spark."""
    assert group.spark is not None
    row = (poison.key, poison.value, _time(poison) or int(time.time() * 1000), list(poison.headers))
    schema = "key binary, value binary, time long, headers array<struct<key: string, value: binary>>"
    frame: Any = group.spark.createDataFrame([row], schema)
    frame = frame.selectExpr("key", "value", "timestamp_millis(time) AS timestamp", "headers")
    options = options_of(group.site, group.poisoned, includeHeaders="true")
    frame.write.format("rollbridge").options(**options).mode("append").save()


def by_plain_writer(group: Group, poison: Poison) -> None:
    """A writer without transactions."""
    with group.client.writer(group.poisoned) as writer:
        future = writer.write(**_record(poison), timestamp=_time(poison))
        future.result(GIVE_UP_S if poison.removes else PATIENCE_S)


def by_conditional_writer(group: Group, poison: Poison) -> None:
    """A conditional write."""
    with group.client.cas_writer(group.poisoned, timeout=GIVE_UP_S) as writer:
        writer.write(**_record(poison), expected=rollbridge.EMPTY)


def by_forged_frame(group: Group, poison: Poison) -> None:
    """A DATA frame that no client of ours has made, in a transaction with an ordinary record."""
    builder = BatchBuilder(1 << 22)
    when_ms = _time(poison)
    builder.append(int(time.time() * 1000) if when_ms is None else when_ms, poison.key, poison.value, poison.headers)
    inject(group, builder.build(), 1)


def inject(group: Group, frame: bytes, count: int) -> None:
    """Commit a transaction with an ordinary record and a forged frame, and wait for what becomes of it."""
    txn = group.client.begin(group.poisoned)
    own = txn.write(group.poisoned, key=b"k", value=b"own")
    txn.flush()
    group.inject_data(txn, frame, count)
    group.inject_commit(txn, 1 + count)
    own.result(PATIENCE_S)


def _record(poison: Poison) -> dict[str, Any]:
    return {"key": poison.key, "value": poison.value, "headers": list(poison.headers)}


def _time(poison: Poison) -> int | None:
    return None if poison.timestamp_ms is None else poison.timestamp_ms()


WAYS: dict[str, Way] = {
    "client": by_client,
    "CLI": by_cli,
    "Spark": by_spark,
    "plain writer": by_plain_writer,
    "conditional writer": by_conditional_writer,
    "forged frame": by_forged_frame,
}

_NO_TIME = "it takes no time from its user: records get the present one"
_UNDER_THE_LIMIT = (
    "whoever forges a frame is held to the limit of the buffer, see the test of frames between the limits"
)
IMPOSSIBLE: dict[tuple[str, str], str] = {
    **{(way, name): _NO_TIME for way in ("CLI", "conditional writer") for name in POISONS if name.startswith("time ")},
    ("CLI", "headers over the limit"): "a command line holds 128 KiB in one argument, the limit is 1 MB",
    ("forged frame", "record over the limit"): _UNDER_THE_LIMIT,
    ("forged frame", "headers over the limit"): _UNDER_THE_LIMIT,
    ("forged frame", "header with our name"): "a frame holds the header of rollbridge in every record of clients",
}
CELLS = [(way, name) for way in WAYS for name in POISONS if (way, name) not in IMPOSSIBLE]
"""What is run; the others are in IMPOSSIBLE, with the reason."""


def abort_all(group: Group) -> bool:
    """Abort what waits for the poisoned stream."""
    for item in group.client.admin.transactions():
        if group.poisoned in item.streams:
            run_cli(group.site.environment(), "txn", "abort", str(item.id))
    return True
