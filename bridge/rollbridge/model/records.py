"""Records in ZooKeeper nodes as values, each with the schema that it is stored by, and operations on nodes.

A record is plain JSON of its schema (:class:`~rollbridge.model.mapper.NodeRecord`). What stands there may have been
written by anybody: a node that holds something else raises CorruptDataError, which names schema and field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import accumulate
from typing import Annotated, ClassVar, Final, Self

from rollbridge.model.cooperative import JointWork, SharedSession
from rollbridge.model.ended import LogMark
from rollbridge.model.epochs import ON_TOPIC, EpochHistory, EpochRecord, Foundation
from rollbridge.model.errors import InvalidRequestError
from rollbridge.model.ids import SegmentId, TransactionId
from rollbridge.model.mapper import NodeRecord, StoredAs
from rollbridge.model.names import GroupName, Partition, SegmentPlaces, StreamName
from rollbridge.model.partitioners import KeySpace, key_space
from rollbridge.model.scaling import ScalingPolicy

# Operations on nodes; a multi carries out all of its operations or none.


@dataclass(frozen=True, slots=True)
class CheckNode:
    """Promise that a node exists and, unless -1 is given, has this version."""

    path: str
    version: int = -1


@dataclass(frozen=True, slots=True)
class CreateNode:
    """Create a node; its parent must exist and it must not.

    Attributes:
        path: Where; of a sequential node, what its number is put behind.
        value: What it holds.
        ephemeral: Whether it goes with the ZooKeeper session.
        sequential: Whether a number is put behind its name.
    """

    path: str
    value: bytes
    ephemeral: bool = False
    sequential: bool = False


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


# The cluster and its streams


LAYOUT_FORMAT = 1
RECORD_BYTES_MAX_DEFAULT = 1_000_000
"""Default limit of a record with key and headers; its batch stays below Kafka's default of 1,048,588 bytes."""
FOREVER = -1
"""Retention without a limit."""
LOG_RETENTION_MS_DEFAULT: Final = 7 * 24 * 60 * 60 * 1000
"""How long a commit log is kept where neither its group nor a coordinator says otherwise."""
RETENTION_GROUPS_MAX = 100
RETENTION_GROUP_CHARACTERS_MAX = 255
_LONG_MAX = (1 << 63) - 1
MINUTE_MS = 60_000
_GROWTH_BYTES: Final = 256
_GROWTH_SHARE: Final = 256
"""By how much what cannot be compressed grows at most: so many bytes, and this part of it."""
BATCH_OF_ONE_BYTES: Final = 61 + 21
"""What a batch has beside its only record's key, value and headers: its header, the record's lengths and numbers."""
KEYLESS: Final = "a record without a key is not possible in a compacted topic"
"""Why it is refused; Kafka would refuse it, too."""


@dataclass(frozen=True, slots=True)
class ClusterIdentity(NodeRecord):
    """Which Kafka cluster a ZooKeeper path belongs to."""

    SCHEMA: ClassVar = "cluster"

    kafka_cluster_id: str
    created_ms: int
    format: int = LAYOUT_FORMAT


class StreamState(StrEnum):
    """Whether a stream is in use."""

    ACTIVE = "ACTIVE"
    DELETING = "DELETING"


class HeaderForm(StrEnum):
    """Which records of a transaction carry rollbridge's header; see :mod:`rollbridge.model.attribution`."""

    EACH = "each"
    """Each of them, so that readers other than rollbridge's see who wrote it."""
    FIRST = "first"
    """The first of each frame."""


class RecordTimes(StrEnum):
    """Whose times the records of a transaction have, by which Kafka's retention counts."""

    WRITER = "writer"
    """Those that its writers gave: the time of each write, if they gave none."""
    COMMIT = "commit"
    """That of the commit: the latest record of each batch gets it, and the others keep their distance from that one."""


def record_times(text: str) -> RecordTimes | None:
    """Return what a request asks for; None if it leaves that as it is.

    Raises:
        InvalidRequestError: there are no such times.
    """
    try:
        return RecordTimes(text) if text else None
    except ValueError:
        known = " and ".join(RecordTimes)
        raise InvalidRequestError(f"{text!r} says not whose times records have: {known} do") from None


def outlived(topic: str, kept_ms: int, begun_ms: int, at_ms: int) -> str | None:
    """Return what a transaction has written that a topic would delete at a time by its ``retention.ms``.

    None if it deletes nothing of it, or nothing by its age.
    """
    if kept_ms == FOREVER or at_ms - begun_ms <= kept_ms:
        return None
    until = datetime.fromtimestamp((at_ms - kept_ms) / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return (
        f"what it wrote to topic {topic} before {until} is older than the topic keeps records (retention.ms="
        f"{kept_ms}): brokers may delete it as soon as it is committed"
    )


def header_form(text: str) -> HeaderForm | None:
    """Return what a request asks for; None if it leaves that as it is.

    Raises:
        InvalidRequestError: there is no such form.
    """
    try:
        return HeaderForm(text) if text else None
    except ValueError:
        known = " and ".join(HeaderForm)
        raise InvalidRequestError(f"{text!r} says not which records carry a header: {known} do") from None


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


@dataclass(frozen=True, slots=True)
class TopicLimits:
    """What an adopted topic takes, as a leader has last seen it; its owner may change that at any time.

    Attributes:
        batch_bytes_max: Largest batch in bytes, ``max.message.bytes``.
        is_compacted: Whether brokers refuse records without a key.
        is_append_time: Whether brokers put their own time in place of a record's.
        before_ms: How far the time of a record may lie in the past when it is appended, that is, at the commit.
        after_ms: How far it may lie in the future.
    """

    batch_bytes_max: int
    is_compacted: bool = False
    is_append_time: bool = False
    before_ms: int = _LONG_MAX
    after_ms: int = _LONG_MAX

    @property
    def batch_room(self) -> int:
        """Largest batch before compression that brokers take, in bytes.

        Brokers compress batches anew where the topic names a codec, and what cannot be compressed grows by it.
        """
        return max(self.batch_bytes_max - _GROWTH_BYTES - self.batch_bytes_max // _GROWTH_SHARE, 0)

    @property
    def record_room(self) -> int:
        """Largest record, key, value and headers, of which a batch fits in; 1 at least, which is no record."""
        return max(self.batch_room - BATCH_OF_ONE_BYTES, 1)

    def fault_of(self, timestamp_ms: int, now_ms: int) -> str | None:
        """Return why brokers would refuse a record of this time now; None if they would not."""
        if self.is_append_time:
            return None
        if timestamp_ms < now_ms - self.before_ms:
            return (
                f"a timestamp of {timestamp_ms} ms lies {now_ms - timestamp_ms} ms in the past, and the topic takes "
                f"{self.before_ms} (message.timestamp.before.max.ms)"
            )
        if timestamp_ms > now_ms + self.after_ms:
            return (
                f"a timestamp of {timestamp_ms} ms lies {timestamp_ms - now_ms} ms in the future, and the topic takes "
                f"{self.after_ms} (message.timestamp.after.max.ms)"
            )
        return None

    @classmethod
    def of(cls, config: Mapping[str, str]) -> Self:
        """Return the limits that a topic's settings, defaults included, say.

        Raises:
            InvalidRequestError: they do not say them.
        """
        try:
            return cls(
                int(config["max.message.bytes"]),
                "compact" in config["cleanup.policy"].split(","),
                config["message.timestamp.type"] == "LogAppendTime",
                int(config.get("message.timestamp.before.max.ms", _LONG_MAX)),
                int(config.get("message.timestamp.after.max.ms", _LONG_MAX)),
            )
        except (KeyError, ValueError) as fault:
            raise InvalidRequestError(
                f"the settings of the topic cannot be told ({fault}); nothing was written"
            ) from fault


_GROUP_IN_SCOPE: Final = StoredAs(
    write=lambda stream: {"group": stream.group.group},
    read=lambda stream: GroupName(stream["name"].partition("/")[0], stream["group"]),
)
"""The scope of a stream's group is that of the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig(NodeRecord):
    """Configuration of a stream."""

    SCHEMA: ClassVar = "stream"

    name: StreamName
    group: Annotated[GroupName, _GROUP_IN_SCOPE]
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
    topic: str = ""
    """The adopted topic, whose partitions are the first segments; empty if the stream has adopted none."""
    partitioner: str = ""
    """By which rule the topic's producers choose the partition of a key; empty if the stream has adopted none."""
    partitions: int = 0
    """How many partitions of the topic are its segments, or were when it left it; 0 if the stream has adopted none."""
    topic_id: str = ""
    """Kafka's id of the adopted topic; another one under its name is another topic."""
    limits: TopicLimits | None = None
    """What the adopted topic takes; None if the stream has adopted none."""
    settings: Mapping[str, str | None] = field(default_factory=dict)
    """Settings that a seal of the adopted topic has changed, as they were before; None for those that it had not."""
    moves: int = 0
    """How often a version before 0.3.0 has moved it into another group; each time it got a new buffer."""
    moving_to: str = ""
    """The group into which such a version was moving it."""
    moving_request: str = ""
    """The admin request for that."""
    life_id: str = ""
    """Kafka's id of its first buffer; empty if that is the present one."""
    prepared: int = 0
    """How many segments have been prepared for large transactions, so that no two of them ever have the same name."""
    headers: HeaderForm = HeaderForm.EACH
    """Which records of its transactions carry rollbridge's header; streams of earlier versions do not say it."""
    scaling: ScalingPolicy | None = None
    """How leaders scale it by its load; None if they do not."""
    kept_ms: int = FOREVER
    """How long the adopted topic keeps records, by their own times: its ``retention.ms``."""
    timestamps: RecordTimes = RecordTimes.WRITER
    buffer: str = ""
    """The topic of its buffer, if that is an internal one; earlier versions refuse such a stream."""

    @property
    def identity(self) -> str:
        """What tells this life of the stream from others of its name."""
        return self.life_id or self.buffer_topic_id

    @property
    def buffer_topic(self) -> str:
        """The Kafka topic of the transaction buffer, which no other life of the stream has used."""
        return self.buffer or self.name.buffer_topic(self.first_epoch, self.moves)

    @property
    def renewal(self) -> str:
        """How people give it another buffer, when that is lost."""
        if self.topic:
            return f"rollbridge stream release {self.topic}, then adopt it again"
        return "copy what is needed, delete the stream and create it again"

    @property
    def was_moved(self) -> bool:
        """True if an earlier version has moved it into another group, or has begun to: it takes no transactions."""
        return self.moves > 0 or bool(self.moving_to)

    def is_on_topic(self, record: EpochRecord) -> bool:
        """Return whether the segments of an epoch are the partitions of the adopted topic."""
        return bool(self.topic) and record.cause in ON_TOPIC

    def limits_in(self, record: EpochRecord) -> TopicLimits | None:
        """Return what the adopted topic takes, if the segments of an epoch are its partitions."""
        return self.limits if self.is_on_topic(record) else None

    def as_of(self, history: EpochHistory) -> StreamConfig:
        """Return these settings with the partitions of a history that was read with them, and may be newer or older."""
        first = history.grown_from(history.first)
        count = len(first.segments)
        return replace(self, partitions=count) if self.is_on_topic(first) and count != self.partitions else self

    def kept_in(self, record: EpochRecord) -> int:
        """Return for how many ms Kafka keeps what a transaction of an epoch has written, from its writes on.

        That is ``FOREVER`` where it keeps all, and where it counts from the commit.
        """
        limits = self.limits_in(record)
        counts_from_commit = limits is None or limits.is_append_time or self.timestamps is RecordTimes.COMMIT
        return FOREVER if counts_from_commit else self.kept_ms

    @property
    def places(self) -> SegmentPlaces:
        """Where its segments lie in Kafka."""
        return SegmentPlaces(self.name, self.topic, self.first_epoch)

    @property
    def keys(self) -> KeySpace:
        """Where its keys lie in the key space."""
        return key_space(self.partitioner, self.partitions)

    def place(self, segment: SegmentId) -> Partition:
        """Return where a segment lies in Kafka."""
        return self.places.of(segment)


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


@dataclass(frozen=True, slots=True)
class Truncation(NodeRecord):
    """What a stream has lost: segments that were removed, and epochs that were dropped.

    ``removing`` are the segments whose topics may still be there; ``foundation`` is what is kept of dropped epochs.
    """

    SCHEMA: ClassVar = "truncation"

    removed: frozenset[SegmentId] = frozenset()
    removing: frozenset[SegmentId] = frozenset()
    foundation: Foundation | None = None

    def keeps(self, epoch: int) -> bool:
        """Return whether an epoch has not been dropped."""
        return self.foundation is None or epoch >= self.foundation.first

    def missing(self, other: Truncation) -> list[SegmentId]:
        """Return the segments that others of the same stream say were removed, and these do not."""
        return [item for item in other.removed if self.keeps(item.epoch) and item not in self.removed]

    def is_behind(self, other: Truncation) -> bool:
        """Return whether others of the same stream are newer: only more is removed and dropped."""
        dropped = [-1 if item.foundation is None else item.foundation.first for item in (self, other)]
        return dropped[0] < dropped[1] or bool(self.missing(other))

    def history_of(self, records: Iterable[EpochRecord]) -> EpochHistory | None:
        """Return the history of a stream's epoch records, read before this was; None if all have been dropped since.

        Raises:
            InvalidRequestError: they are no history.
        """
        kept = tuple(record for record in records if self.keeps(record.epoch))
        if not kept:
            return None
        ended = frozenset(segment for record in kept[1:] for segment in record.sealed_ends or ())
        return EpochHistory(kept, self.removed & ended, self.foundation)


def _cut_of(mark: Mapping[str, Iterable[str]]) -> dict[SegmentId, int]:
    places = (place.split(":") for place in mark["cut"])
    return {SegmentId.from_int(int(segment)): int(offset) for segment, offset in places}


_CUT: Final = StoredAs(
    write=lambda mark: {"cut": [f"{int(segment)}:{offset}" for segment, offset in mark.cut.items()]}, read=_cut_of
)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the active segments of a stream ended at some time; retention truncates at marks.

    ``written`` are the bytes that had been written to the stream until then, as far as they were counted.
    """

    ms: int
    written: int
    cut: Annotated[Mapping[SegmentId, int], _CUT]


@dataclass(frozen=True, slots=True)
class RetentionMarks(NodeRecord):
    """The marks of a stream, oldest first."""

    SCHEMA: ClassVar = "retention"

    marks: tuple[Mark, ...]


# Groups, their coordinators and their clients


@dataclass(frozen=True, slots=True)
class ControllerEpoch(NodeRecord):
    """Who leads a group, and since which epoch."""

    SCHEMA: ClassVar = "controller_epoch"

    epoch: int
    leader: str
    since_ms: int


SAVEPOINTS: Final = "savepoints"
"""What a coordinator knows that takes SAVEPOINT frames, hands them out, and lets owners go back to them."""
INTERNAL_BUFFERS: Final = "internal-buffers"
"""What a coordinator knows that leads streams whose records name the topic of their buffer."""


@dataclass(frozen=True, slots=True)
class Coordinator(NodeRecord):
    """A coordinator that is alive, and those of its settings that others judge its work by.

    Attributes:
        snapshot_transactions_max, snapshot_interval_ms: When its snapshots are due.
        ready: The groups that it could lead with a short takeover.
        address: Where other coordinators hold a connection to it, ``HOST:PORT``; empty if there is none.
        life: What it says of itself there; another one after each start.
        lease_ms_max: The longest lease that it grants; 0 if it does not say.
        release: The version of rollbridge that it runs; empty before 0.2.0.
        page: Where its live page is, a URL; empty if it has none, or none that others reach.
        knows: What others ask for before they use it: :data:`SAVEPOINTS`, :data:`INTERNAL_BUFFERS`.
        unreachable: Brokers of the cluster that it cannot reach, as people are told.
    """

    SCHEMA: ClassVar = "coordinator"

    snapshot_transactions_max: int
    snapshot_interval_ms: int
    ready: tuple[GroupName, ...] = ()
    address: str = ""
    life: str = ""
    lease_ms_max: int = 0
    release: str = ""
    page: str = ""
    knows: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group(NodeRecord):
    """A transaction group; a topic's id is empty until the topic exists, or while it is not in use.

    The number is 0 until a coordinator has numbered it; see :mod:`rollbridge.model.ids`.
    """

    SCHEMA: ClassVar = "group"

    name: GroupName
    created_ms: int
    commit_log_topic_id: str = ""
    terminated_topic_id: str = ""
    number: int = 0
    former_numbers: tuple[int, ...] = ()
    counter_floor: int = 0
    counter_ceiling: int = 0
    retention: Retention | None = None
    """How long records of its commit log are kept; None is as long as its coordinators say."""
    revision: int = 0
    """How often its settings have been changed."""


@dataclass(frozen=True, slots=True)
class LogMarks(NodeRecord):
    """The marks of a group's commit log, oldest first; see :mod:`rollbridge.model.ended`."""

    SCHEMA: ClassVar = "log_marks"

    marks: tuple[LogMark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionRecord(NodeRecord):
    """An open transaction that outlived a moment."""

    SCHEMA: ClassVar = "transaction"

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


@dataclass(frozen=True, slots=True)
class ClientSession(NodeRecord):
    """The newest session of a client name in a group; it refuses what older ones still send.

    ``shared`` is what the processes that share it agree on; None if none of the client's sessions was ever shared.
    ``renews`` says that who has the session looks at the record again before it begins anything after a long time, so
    that the record may be removed early. ``process`` is the host and the process that began it, for whom it fences.
    """

    SCHEMA: ClassVar = "client_session"

    client_name: str
    epoch: int
    registered_ms: int
    shared: SharedSession | None = None
    renews: bool = False
    process: str = ""

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
        """Return whether an earlier session had this holder."""
        return self.shared is not None and holder in self.shared.former

    def with_work(self, work: JointWork, now_ms: int) -> ClientSession:
        """Return the same session with another joint transaction."""
        shared = self.shared or SharedSession("")
        return replace(self, registered_ms=now_ms, shared=shared.with_work(work, now_ms))


def next_session(
    before: ClientSession | None, client_name: str, holder: str, now_ms: int, floor: int = 0, process: str = ""
) -> ClientSession:
    """Return the session that follows one; its epoch is above the floor, and at least the minutes since 1970.

    So epochs rise also where the record of an old session has been removed, whose epoch the floor is not below.
    Releases before 0.3.0 know the minutes only, so floors stay behind these.
    """
    epoch = max(0 if before is None else before.epoch + 1, floor + 1, now_ms // MINUTE_MS)
    known = None if before is None else before.shared
    shared = (known or SharedSession("")).taken_over(holder) if known or holder else None
    return ClientSession(client_name, epoch, now_ms, shared, renews=not holder, process=process)
