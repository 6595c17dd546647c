"""The records that stand in ZooKeeper, as values, with their plain JSON (schemas of the same names)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Final, Self

import rollbridge_schemas
from rollbridge.model.cooperative import JointWork, SharedSession
from rollbridge.model.epochs import EpochCause, EpochHistory, EpochRecord, Foundation, Segment
from rollbridge.model.errors import CorruptDataError, InvalidRequestError
from rollbridge.model.ids import Epoch, SegmentId, TransactionId, decode_streams, encode_streams
from rollbridge.model.keyspace import KeyRange
from rollbridge.model.names import GroupName, StreamName

# --------------------------------------------------------------------------------------------------------------------
# Operations on ZooKeeper nodes as values; several of them in one multi are carried out all or none.


@dataclass(frozen=True, slots=True)
class CheckNode:
    """Promise that a node exists and, unless -1 is given, has this version."""

    path: str
    version: int = -1


@dataclass(frozen=True, slots=True)
class CreateNode:
    """Create a persistent node; its parent must exist and it must not."""

    path: str
    value: bytes


@dataclass(frozen=True, slots=True)
class SetNode:
    """Replace a node's value."""

    path: str
    value: bytes
    version: int = -1


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Delete a node without children."""

    path: str
    version: int = -1


NodeOperation = CheckNode | CreateNode | SetNode | DeleteNode

ROOT_CHARACTERS_MAX: Final = 128
"""Longest path, with a chroot, below which everything may stand."""
OPERATION_BYTES: Final = ROOT_CHARACTERS_MAX + 72
"""What an operation takes in a multi beside its path and value: the root path, and its frame."""


def bytes_of(operation: NodeOperation) -> int:
    """Return how many bytes an operation takes in a multi at most. ZooKeeper takes 1 MiB for all of them together."""
    value = operation.value if isinstance(operation, CreateNode | SetNode) else b""
    return len(operation.path) + len(value) + OPERATION_BYTES


def leading(operations: Sequence[NodeOperation], bytes_max: int) -> int:
    """Return how many of the operations, from the first on, fit into one multi; one at least, if there are any."""
    sizes = accumulate(map(bytes_of, operations))
    return max(sum(size <= bytes_max for size in sizes), min(len(operations), 1))


# --------------------------------------------------------------------------------------------------------------------
# Reading what stands in a ZooKeeper node: whatever is wrong with it is corrupt data.


@contextmanager
def reading(schema: str, raw: bytes) -> Iterator[rollbridge_schemas.Datum]:
    """The datum in ``raw``; whatever its schema or the values built from it refuse is corrupt data."""
    try:
        yield rollbridge_schemas.codec(schema).from_json(raw)
    except (InvalidRequestError, ValueError) as fault:
        raise CorruptDataError(f"a ZooKeeper node does not hold a record of schema {schema}: {fault}") from fault


LAYOUT_FORMAT = 1
RECORD_BYTES_MAX_DEFAULT = 1_000_000
"""Default limit of a record with key and headers; its batch stays below Kafka's default of 1,048,588 bytes."""
FOREVER = -1
"""Retention without a limit."""
RETENTION_GROUPS_MAX = 100
RETENTION_GROUP_CHARACTERS_MAX = 255
_LONG_MAX = (1 << 63) - 1
_MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Cluster:
    """Which Kafka cluster a ZooKeeper path belongs to."""

    kafka_cluster_id: str
    created_ms: int
    format: int = LAYOUT_FORMAT

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("cluster").to_json(
            {"kafka_cluster_id": self.kafka_cluster_id, "format": self.format, "created_ms": self.created_ms}
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("cluster", raw) as datum:
            return cls(**datum)


class StreamState(StrEnum):
    """Whether a stream is in use."""

    ACTIVE = "ACTIVE"
    DELETING = "DELETING"


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the records of a stream are kept; what one of the limits allows is deleted; by default nothing.

    Attributes:
        ms: How long at least, by the time when they were written; FOREVER without a limit.
        bytes: How many bytes at least, newest first; FOREVER without a limit.
        groups: Consumer groups. Nothing is ever deleted that one of them has not read.
    """

    ms: int = FOREVER
    bytes: int = FOREVER
    groups: tuple[str, ...] = ()

    @property
    def is_limited(self) -> bool:
        """Whether records are deleted by time or size."""
        return self.ms != FOREVER or self.bytes != FOREVER

    def check(self) -> None:
        """Raise InvalidRequestError unless it makes sense."""
        for what, value in (("time", self.ms), ("size", self.bytes)):
            if value != FOREVER and not 0 < value <= _LONG_MAX:
                raise InvalidRequestError(f"a retention {what} is positive, or without limit, not {value}")
        if len(self.groups) > RETENTION_GROUPS_MAX:
            raise InvalidRequestError(f"a stream waits for at most {RETENTION_GROUPS_MAX} groups")
        if not all(0 < len(name) <= RETENTION_GROUP_CHARACTERS_MAX for name in self.groups):
            raise InvalidRequestError(
                f"the name of a consumer group has 1 to {RETENTION_GROUP_CHARACTERS_MAX} characters"
            )
        if len(set(self.groups)) < len(self.groups):
            raise InvalidRequestError("a consumer group is named twice")

    def datum(self) -> rollbridge_schemas.Datum:
        """What the schemas hold of it."""
        return {"ms": self.ms, "bytes": self.bytes, "groups": list(self.groups)}

    @classmethod
    def of_datum(cls, datum: rollbridge_schemas.Datum) -> Self:
        """The inverse of :meth:`datum`."""
        return cls(datum["ms"], datum["bytes"], tuple(datum["groups"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Configuration of a stream."""

    name: StreamName
    group: GroupName
    buffer_partitions: int = 1
    replication_factor: int = -1
    record_bytes_max: int = RECORD_BYTES_MAX_DEFAULT
    created_ms: int
    buffer_topic_id: str
    state: StreamState = StreamState.ACTIVE
    retention: Retention = Retention()
    first_epoch: int = 0
    """The epoch with which this life of the stream began; above all that former lives of its name have used."""
    deletion_requests: tuple[str, ...] = ()
    """While it is being deleted, the admin requests that are answered when it is gone."""
    revision: int = 0
    """How often its settings have been changed."""

    @property
    def buffer_topic(self) -> str:
        """The Kafka topic of the transaction buffer, which no other life of the stream has used."""
        return self.name.buffer_topic(self.first_epoch)

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("stream").to_json(
            {
                "name": str(self.name),
                "group": self.group.group,
                "buffer_partitions": self.buffer_partitions,
                "replication_factor": self.replication_factor,
                "record_bytes_max": self.record_bytes_max,
                "created_ms": self.created_ms,
                "buffer_topic_id": self.buffer_topic_id,
                "state": self.state.value,
                "retention": self.retention.datum(),
                "first_epoch": self.first_epoch,
                "deletion_requests": list(self.deletion_requests),
                "revision": self.revision,
            }
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("stream", raw) as datum:
            name = StreamName.parse(datum.pop("name"))
            group = GroupName(name.scope, datum.pop("group"))
            return cls(
                name=name,
                group=group,
                state=StreamState(datum.pop("state")),
                retention=Retention.of_datum(datum.pop("retention")),
                deletion_requests=tuple(datum.pop("deletion_requests")),
                **datum,
            )


EPOCH_BYTES: Final = 700
"""What an epoch record takes at most without its segments, with its path and a root path."""
SEGMENT_BYTES: Final = 95
END_BYTES: Final = 70
"""What a segment, and the end of one, take at most in an epoch record."""
SEGMENTS_MAX: Final = 3_000
"""Segments that are active at once in a stream: two epochs with so many, and their ends, fit into one write to
ZooKeeper, which takes 1 MiB."""


def bytes_of_epoch(segments: int, ends: int) -> int:
    """Return how many bytes an epoch record takes in a ZooKeeper multi at most."""
    return EPOCH_BYTES + segments * SEGMENT_BYTES + ends * END_BYTES


def check_segments(stream: object, wanted: int, present: int = 0) -> None:
    """Raise InvalidRequestError if a stream is to have more segments than it can, and more than it has."""
    if wanted > max(SEGMENTS_MAX, present):
        raise InvalidRequestError(
            f"stream {stream} would have {wanted} active segments, and {SEGMENTS_MAX} are possible: more do not fit "
            "into one write to ZooKeeper; nothing was changed; ask for fewer, or share the keys among several streams"
        )


def epoch_to_json(record: EpochRecord) -> bytes:
    """Plain JSON of an epoch record."""
    ends = record.sealed_ends
    return rollbridge_schemas.codec("epoch").to_json(
        {
            "epoch": record.epoch,
            "reference_epoch": record.reference_epoch,
            "cause": record.cause.value,
            "created_ms": record.created_ms,
            "segments": [
                {"segment": int(item.id), "low": item.range.low, "high": item.range.high} for item in record.segments
            ],
            "sealed_ends": None
            if ends is None
            else [{"segment": int(segment), "end_offset": end} for segment, end in sorted(ends.items())],
        }
    )


def epoch_from_json(raw: bytes) -> EpochRecord:
    """The inverse of :func:`epoch_to_json`; raises CorruptDataError."""
    with reading("epoch", raw) as datum:
        ends = datum["sealed_ends"]
        return EpochRecord(
            epoch=Epoch(datum["epoch"]),
            reference_epoch=Epoch(datum["reference_epoch"]),
            segments=tuple(
                Segment(SegmentId.from_int(item["segment"]), KeyRange(item["low"], item["high"]))
                for item in datum["segments"]
            ),
            cause=EpochCause(datum["cause"]),
            created_ms=datum["created_ms"],
            sealed_ends=None
            if ends is None
            else {SegmentId.from_int(item["segment"]): item["end_offset"] for item in ends},
        )


@dataclass(frozen=True, slots=True)
class Truncation:
    """What a stream has lost: segments that were removed, and epochs that were dropped.

    ``removing`` are the segments whose topics may still be there; ``foundation`` is what is kept of dropped epochs.
    """

    removed: frozenset[SegmentId] = frozenset()
    removing: frozenset[SegmentId] = frozenset()
    foundation: Foundation | None = None

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("truncation").to_json(
            {
                "removed": sorted(map(int, self.removed)),
                "removing": sorted(map(int, self.removing)),
                "foundation": None if self.foundation is None else self.foundation.datum(),
            }
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("truncation", raw) as datum:
            foundation = datum["foundation"]
            return cls(
                frozenset(map(SegmentId.from_int, datum["removed"])),
                frozenset(map(SegmentId.from_int, datum["removing"])),
                None if foundation is None else Foundation.of_datum(foundation),
            )

    def keeps(self, epoch: int) -> bool:
        """Whether an epoch has not been dropped."""
        return self.foundation is None or epoch >= self.foundation.first

    def history_of(self, records: Iterable[EpochRecord]) -> EpochHistory | None:
        """The history of a stream's epoch records, read before this was; None if all of them have been dropped since.

        Raises:
            InvalidRequestError: they are no history.
        """
        kept = tuple(record for record in records if self.keeps(record.epoch))
        if not kept:
            return None
        ended = frozenset(segment for record in kept[1:] for segment in record.sealed_ends or ())
        return EpochHistory(kept, self.removed & ended, self.foundation)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the active segments of a stream ended at some time; retention truncates at marks.

    ``written`` are the bytes that had been written to the stream until then, as far as they were counted.
    """

    ms: int
    written: int
    cut: Mapping[SegmentId, int]


def marks_to_json(marks: Iterable[Mark]) -> bytes:
    """Plain JSON of the marks of a stream, oldest first."""
    rows = [
        {"ms": item.ms, "written": item.written, "cut": [f"{int(key)}:{offset}" for key, offset in item.cut.items()]}
        for item in marks
    ]
    return rollbridge_schemas.codec("retention").to_json({"marks": rows})


def marks_from_json(raw: bytes) -> list[Mark]:
    """The inverse of :func:`marks_to_json`; raises CorruptDataError."""
    with reading("retention", raw) as datum:
        return [
            Mark(
                item["ms"],
                item["written"],
                {
                    SegmentId.from_int(int(segment)): int(offset)
                    for segment, offset in (place.split(":") for place in item["cut"])
                },
            )
            for item in datum["marks"]
        ]


@dataclass(frozen=True, slots=True)
class ControllerEpoch:
    """Who leads a group, and since which epoch."""

    epoch: int
    leader: str
    since_ms: int

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("controller_epoch").to_json(
            {"epoch": self.epoch, "leader": self.leader, "since_ms": self.since_ms}
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("controller_epoch", raw) as datum:
            return cls(**datum)


@dataclass(frozen=True, slots=True)
class Coordinator:
    """A coordinator that is alive, and those of its settings that others judge its work by.

    Attributes:
        snapshot_transactions_max, snapshot_interval_ms: When its snapshots are due.
        ready: The groups that it could lead with a short takeover.
        address: Where other coordinators hold a connection to it, ``HOST:PORT``; empty if there is none.
        life: What it says of itself there; another one after each start.
        lease_ms_max: The longest lease that it grants; 0 if it does not say.
    """

    snapshot_transactions_max: int
    snapshot_interval_ms: int
    ready: tuple[GroupName, ...] = ()
    address: str = ""
    life: str = ""
    lease_ms_max: int = 0

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("coordinator").to_json(
            {
                "snapshot_transactions_max": self.snapshot_transactions_max,
                "snapshot_interval_ms": self.snapshot_interval_ms,
                "ready": [str(name) for name in self.ready],
                "address": self.address,
                "life": self.life,
                "lease_ms_max": self.lease_ms_max,
            }
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("coordinator", raw) as datum:
            return cls(ready=tuple(GroupName.parse(name) for name in datum.pop("ready")), **datum)


@dataclass(frozen=True, slots=True)
class Group:
    """A transaction group; a topic's id is empty until the topic exists, or while it is not in use.

    The number is 0 until a coordinator has numbered it; see :mod:`rollbridge.model.ids`.
    """

    name: GroupName
    created_ms: int
    commit_log_topic_id: str = ""
    terminated_topic_id: str = ""
    number: int = 0
    former_numbers: tuple[int, ...] = ()
    counter_floor: int = 0
    counter_ceiling: int = 0

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("group").to_json(
            {
                "name": str(self.name),
                "commit_log_topic_id": self.commit_log_topic_id,
                "created_ms": self.created_ms,
                "terminated_topic_id": self.terminated_topic_id,
                "number": self.number,
                "former_numbers": list(self.former_numbers),
                "counter_floor": self.counter_floor,
                "counter_ceiling": self.counter_ceiling,
            }
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("group", raw) as datum:
            formers = tuple(datum.pop("former_numbers"))
            return cls(name=GroupName.parse(datum.pop("name")), former_numbers=formers, **datum)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionRecord:
    """An open transaction that outlived a moment."""

    id: TransactionId
    group: GroupName
    state: str
    client_name: str
    client_epoch: int = 0
    label: str | None = None
    begun_ms: int
    lease_ms: int
    streams: Mapping[str, int]
    controller_epoch: int

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("transaction").to_json(
            {
                "id": str(self.id),
                "group": str(self.group),
                "state": self.state,
                "client_name": self.client_name,
                "client_epoch": self.client_epoch,
                "label": self.label,
                "begun_ms": self.begun_ms,
                "lease_ms": self.lease_ms,
                "streams": encode_streams(self.streams),
                "controller_epoch": self.controller_epoch,
            }
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("transaction", raw) as datum:
            return cls(
                id=TransactionId.parse(datum.pop("id")),
                group=GroupName.parse(datum.pop("group")),
                streams=decode_streams(datum.pop("streams")),
                **datum,
            )


@dataclass(frozen=True, slots=True)
class ClientSession:
    """The newest session of a client name in a group; it refuses what older ones still send.

    ``shared`` is what the processes that share it agree on; None if none of the client's sessions was ever shared.
    """

    client_name: str
    epoch: int
    registered_ms: int
    shared: SharedSession | None = None

    @property
    def work(self) -> JointWork | None:
        """The client's latest joint transaction."""
        return None if self.shared is None else self.shared.work

    @property
    def holder(self) -> str:
        """What the processes that share it call it; empty if it is one process's own."""
        return "" if self.shared is None else self.shared.holder

    @property
    def has_series(self) -> bool:
        """Whether it tells of series that are over, such as labels of jobs, which must not be written again."""
        return self.shared is not None and bool(self.shared.series or self.shared.forgotten)

    def is_former(self, holder: str) -> bool:
        """Whether an earlier session had this holder."""
        return self.shared is not None and holder in self.shared.former

    def with_work(self, work: JointWork, now_ms: int) -> ClientSession:
        """The same session with another joint transaction."""
        shared = self.shared or SharedSession("")
        return replace(self, registered_ms=now_ms, shared=shared.with_work(work, now_ms))

    def to_json(self) -> bytes:
        """Plain JSON."""
        return rollbridge_schemas.codec("client_session").to_json(
            {
                "client_name": self.client_name,
                "epoch": self.epoch,
                "registered_ms": self.registered_ms,
                "shared": None if self.shared is None else self.shared.to_datum(),
            }
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """The inverse of :meth:`to_json`; raises CorruptDataError."""
        with reading("client_session", raw) as datum:
            shared = datum.pop("shared")
            return cls(**datum, shared=None if shared is None else SharedSession.of_datum(shared))


def next_session(before: ClientSession | None, client_name: str, holder: str, now_ms: int) -> ClientSession:
    """The session that follows one; an epoch is at least the minutes since 1970.

    So epochs rise also where the record of an old session has expired.
    """
    epoch = max(0 if before is None else before.epoch + 1, now_ms // _MINUTE_MS)
    known = None if before is None else before.shared
    shared = (known or SharedSession("")).taken_over(holder) if known or holder else None
    return ClientSession(client_name, epoch, now_ms, shared)
