"""A stream's configuration: limits, retention, header form, record times. Pure.

Source: Kafka's topic settings (``max.message.bytes``, ``cleanup.policy``, ``message.timestamp.type``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, ClassVar, Final, Self, TypeVar

from rollbridge.base.errors import InvalidRequestError
from rollbridge.base.ids import SegmentId
from rollbridge.base.mapper import NodeRecord, StoredAs
from rollbridge.stream.epochs import ON_TOPIC, EpochHistory, EpochRecord
from rollbridge.stream.keyspace import KeySpace, key_space
from rollbridge.stream.names import GroupName, Partition, SegmentPlaces, StreamName
from rollbridge.stream.scaling import ScalingPolicy

RECORD_BYTES_MAX_DEFAULT = 1_000_000
"""Default limit of a record with key and headers; its batch stays below Kafka's default of 1,048,588 bytes."""
FOREVER = -1
"""Retention without a limit."""
LOG_RETENTION_MS_DEFAULT: Final = 7 * 24 * 60 * 60 * 1000
"""Retention of a commit log, unless its group or a coordinator overrides it."""
RETENTION_GROUPS_MAX = 100
RETENTION_GROUP_CHARACTERS_MAX = 255
_LONG_MAX = (1 << 63) - 1
MINUTE_MS = 60_000
Choice = TypeVar("Choice", bound=StrEnum)
_GROWTH_BYTES: Final = 256
_GROWTH_SHARE: Final = 256
"""By how much what cannot be compressed grows at most: so many bytes, and this part of it."""
BATCH_OF_ONE_BYTES: Final = 61 + 21
"""Overhead of a batch of one record, without key, value and headers: batch header, lengths and numbers."""
KEYLESS: Final = "a record without a key is not possible in a compacted topic"
"""Why it is refused; Kafka would refuse it, too."""


class StreamState(StrEnum):
    """State of a stream: in use or not."""

    ACTIVE = "ACTIVE"
    DELETING = "DELETING"


class HeaderForm(StrEnum):
    """Which records of a transaction carry rollbridge's header; see :mod:`rollbridge.base.attribution`."""

    EACH = "each"
    """Each of them, so that readers other than rollbridge's see who wrote it."""
    FIRST = "first"
    """The first of each frame."""


class RecordTimes(StrEnum):
    """Timestamps of a transaction's records, which Kafka's retention counts by."""

    WRITER = "writer"
    """Those that its writers gave: the time of each write, if they gave none."""
    COMMIT = "commit"
    """That of the commit: the latest record of each batch gets it, and the others keep their distance from that one."""


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
    """Return what a request asks for; None if it leaves that as it is. Raises InvalidRequestError for another text."""
    return _chosen(HeaderForm, text, "which records carry a header")


def record_times(text: str) -> RecordTimes | None:
    """Return what a request asks for; None if it leaves that as it is. Raises InvalidRequestError for another text."""
    return _chosen(RecordTimes, text, "whose times records have")


def _chosen(kind: type[Choice], text: str, what: str) -> Choice | None:
    try:
        return kind(text) if text else None
    except ValueError:
        raise InvalidRequestError(f"{text!r} says not {what}: {' and '.join(kind)} do") from None


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention of a stream: records beyond one of the limits may be deleted; by default none are.

    Attributes:
        ms: Shortest time to keep records, from when they were written; FOREVER without a limit.
        bytes: Fewest bytes to keep, newest first; FOREVER without a limit.
        groups: Consumer groups; records that one of them has not read are never deleted.
    """

    ms: int = FOREVER
    bytes: int = FOREVER
    groups: tuple[str, ...] = ()

    @property
    def is_limited(self) -> bool:
        """Return whether records are deleted by time or size."""
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
    """Limits of an adopted topic, as a leader last read them; its owner may change them at any time.

    Attributes:
        batch_bytes_max: Largest batch in bytes, ``max.message.bytes``.
        is_compacted: True if brokers refuse records without a key.
        is_append_time: True if brokers replace records' timestamps.
        before_ms: Largest age of a record's timestamp when it is appended, that is, at the commit.
        after_ms: Largest distance of a timestamp into the future.
    """

    batch_bytes_max: int
    is_compacted: bool = False
    is_append_time: bool = False
    before_ms: int = _LONG_MAX
    after_ms: int = _LONG_MAX

    @property
    def batch_room(self) -> int:
        """Return the largest batch before compression that brokers accept, in bytes.

        Brokers recompress batches where the topic names a codec, and incompressible data grows by it.
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
    """Number of changes to its settings."""
    topic: str = ""
    """The adopted topic, whose partitions are the first segments; empty if the stream has adopted none."""
    partitioner: str = ""
    """By which rule the topic's producers choose the partition of a key; empty if the stream has adopted none."""
    partitions: int = 0
    """Partitions of the adopted topic that are or were its segments; 0 if the stream has adopted none."""
    topic_id: str = ""
    """Kafka's id of the adopted topic; another one under its name is another topic."""
    limits: TopicLimits | None = None
    """Limits of the adopted topic; None if the stream has adopted none."""
    settings: Mapping[str, str | None] = field(default_factory=dict)
    """Settings that a seal of the adopted topic has changed, as they were before; None for those that it had not."""
    moves: int = 0
    """Number of moves to another group by versions before 0.3.0; each made a new buffer."""
    moving_to: str = ""
    """The group into which such a version was moving it."""
    moving_request: str = ""
    """The admin request for that."""
    life_id: str = ""
    """Kafka's id of its first buffer; empty if that is the present one."""
    prepared: int = 0
    """Number of segments prepared for large transactions, so that no two have the same name."""
    headers: HeaderForm = HeaderForm.EACH
    """Which records of its transactions carry rollbridge's header; streams of earlier versions do not say it."""
    scaling: ScalingPolicy | None = None
    """How leaders scale it by its load; None if they do not."""
    kept_ms: int = FOREVER
    """Retention of the adopted topic by records' own timestamps: its ``retention.ms``."""
    timestamps: RecordTimes = RecordTimes.WRITER
    buffer: str = ""
    """The topic of its buffer, if that is an internal one; earlier versions refuse such a stream."""

    @property
    def identity(self) -> str:
        """Return the values that tell this stream from deleted ones of its name."""
        return self.life_id or self.buffer_topic_id

    @property
    def buffer_topic(self) -> str:
        """The Kafka topic of the transaction buffer, which no deleted stream of its name has used."""
        return self.buffer or self.name.buffer_topic(self.first_epoch, self.moves)

    @property
    def renewal(self) -> str:
        """Instructions for replacing a lost buffer."""
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
        """Places of its segments in Kafka."""
        return SegmentPlaces(self.name, self.topic, self.first_epoch)

    @property
    def keys(self) -> KeySpace:
        """Places of its keys in the key space."""
        return key_space(self.partitioner, self.partitions)

    def place(self, segment: SegmentId) -> Partition:
        """Return where a segment lies in Kafka."""
        return self.places.of(segment)
