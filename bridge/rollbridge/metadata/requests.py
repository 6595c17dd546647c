"""Compare the requested settings of a stream with those of an existing one.

Only given settings count: a program that runs again must not fail because the stream was scaled, moved or reconfigured
meanwhile, unless it asks for the very setting that was changed. Segments are compared with those that the stream began
with, for as long as that epoch is kept, since scaling is normal.

Source: ``CREATE TABLE IF NOT EXISTS`` does not report differences; Kubernetes' server-side apply compares stated fields
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final, NamedTuple

from rollbridge.base.ids import SegmentId
from rollbridge.base.mapper import NodeRecord
from rollbridge.buffer.savepoints import StoredSavepoint
from rollbridge.buffer.table import Arrived, KnownTransaction, TransactionEvent
from rollbridge.errors import InvalidRequestError, RollbridgeError, TransactionClosedError, class_of
from rollbridge.stream.config import FOREVER, HeaderForm, RecordTimes, Retention, StreamConfig
from rollbridge.stream.keyspace import KeyRange
from rollbridge.stream.names import DEFAULT_GROUP
from rollbridge.stream.scaling import FIXED, ScalingPolicy


def refusal(answer: AdminAnswer, transaction: str = "") -> RollbridgeError:
    """Return the error of an answer; its class is found by its code."""
    found = class_of(answer.code)
    if found is None:
        return InvalidRequestError(f"{answer.message} ({answer.code})")
    code = {} if found.code == answer.code else {"code": answer.code}
    if issubclass(found, TransactionClosedError):
        return found(answer.message, transaction=transaction, **code)
    try:
        return found(answer.message, **code)
    except TypeError:  # the class carries data that an answer does not have
        return InvalidRequestError(answer.message)


_NOTHING = Retention()
_RANGES_SHOWN_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedStream:
    """Settings that are asked for; None, or what :class:`.Retention` has by default, where nothing is said.

    Attributes:
        ranges: Key ranges of the segments that it begins with, in order.
        retention: Its limits; those that are not set are not compared.
    """

    group: str | None = None
    ranges: tuple[KeyRange, ...] | None = None
    buffer_partitions: int | None = None
    replication_factor: int | None = None
    record_bytes_max: int | None = None
    headers: HeaderForm | None = None
    retention: Retention = _NOTHING
    partitioner: str | None = None
    scaling: ScalingPolicy | None = None
    timestamps: RecordTimes | None = None

    def differences(self, known: StreamConfig, first: tuple[KeyRange, ...] | None) -> list[str]:
        """Return in what a stream is another one than was asked for, each as ``name: it is X, and Y was asked for``.

        Args:
            known: Its settings.
            first: Key ranges of the segments that it began with; None if these are forgotten.
        """
        pairs: list[tuple[str, object, object]] = [
            ("group", known.group.group, self.group),
            ("buffer partitions", known.buffer_partitions, self.buffer_partitions),
            ("replication factor", _replicas(known.replication_factor), _replicas(self.replication_factor)),
            ("largest record", known.record_bytes_max, self.record_bytes_max),
            ("headers", known.headers.value, None if self.headers is None else self.headers.value),
            ("partitioner", known.partitioner, self.partitioner),
            ("timestamps", known.timestamps.value, None if self.timestamps is None else self.timestamps.value),
            ("scaling", str(known.scaling or FIXED), None if self.scaling is None else str(self.scaling)),
        ]
        found = [
            f"{what}: it is {is_}, and {asked} was asked for" for what, is_, asked in pairs if asked not in (None, is_)
        ]
        if self.ranges is not None and first is not None and self.ranges != first:
            found.append(f"segments: it began with {_shown(first)}, and {_shown(self.ranges)} were asked for")
        return [*found, *self._kept_otherwise(known.retention)]

    def _kept_otherwise(self, known: Retention) -> Iterator[str]:
        if self.retention.ms not in (FOREVER, known.ms):
            yield f"retention time: it is {_limit(known.ms, 'ms')}, and {self.retention.ms} ms was asked for"
        if self.retention.bytes not in (FOREVER, known.bytes):
            asked = f"{self.retention.bytes} bytes"
            yield f"retention size: it is {_limit(known.bytes, 'bytes')}, and {asked} was asked for"
        if self.retention.groups and set(self.retention.groups) != set(known.groups):
            yield (
                f"retention groups: they are {', '.join(known.groups) or 'none'}, and "
                f"{', '.join(self.retention.groups)} was asked for"
            )


def _replicas(factor: int | None) -> object:
    return "the broker's default" if factor == -1 else factor


def _limit(value: int, unit: str) -> str:
    return "unlimited" if value == FOREVER else f"{value} {unit}"


def _shown(ranges: tuple[KeyRange, ...]) -> str:
    """Return a number of segments with their ranges, as far as these are few."""
    listed = ", ".join(f"[{item.low:g}, {item.high:g})" for item in ranges[:_RANGES_SHOWN_MAX])
    more = ", ..." if len(ranges) > _RANGES_SHOWN_MAX else ""
    return f"{len(ranges)} ({listed}{more})"


# Admin requests and their answers, as ZooKeeper carries them between clients and leaders.


REASON_CHARACTERS_MAX: Final = 10_000
"""Of the reason in an answer that refuses a request."""
CAUSE_CHARACTERS_MAX: Final = 1_000
"""Of the cause of an event, or a reason to wait, in an answer."""
NAMED_MAX: Final = 10
"""Streams of a transaction, and of a change, and obstacles of one, that are named."""


class RequestKind(StrEnum):
    """Kind of an admin request."""

    CREATE_STREAM = "create-stream"
    ADOPT_TOPIC = "adopt-topic"
    RELEASE_TOPIC = "release-topic"
    SCALE_STREAM = "scale-stream"
    DELETE_STREAM = "delete-stream"
    UPDATE_STREAM = "update-stream"
    UPDATE_GROUP = "update-group"
    TRUNCATE_STREAM = "truncate-stream"
    ABORT_TRANSACTION = "abort-transaction"
    LOOK_UP = "look-up-transactions"
    """Of a transaction, of the latest with a label, or of all open ones of a client."""
    DESCRIBE = "describe-transaction"
    """The leader's present view of one transaction, with its last events, or of what a stream waits for; answered at
    once."""
    FENCE = "fence-client"
    CLEAR_SNAPSHOTS = "clear-snapshots"
    REBUILD_SNAPSHOTS = "rebuild-snapshots"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminRequest(NodeRecord):
    """An admin request; fields that its kind does not use keep their defaults."""

    SCHEMA: ClassVar = "request"

    kind: RequestKind
    stream: str = ""
    transaction: str = ""
    segments: int = 0
    ranges: tuple[tuple[float, float], ...] = ()
    seal: tuple[int, ...] = ()
    group: str = DEFAULT_GROUP
    buffer_partitions: int = 1
    replication_factor: int = -1
    record_bytes_max: int = 0
    reason: str = ""
    client_name: str = ""
    created_ms: int
    owner: str = ""
    owner_epoch: int = 0
    label: str | None = None
    cut: Mapping[SegmentId, int] = field(default_factory=dict)
    retention: Retention | None = None
    abort_foreign: bool = False
    topic: str = ""
    partitioner: str = ""
    leave_topic: bool = False
    headers: str = ""
    """A :class:`.HeaderForm`; empty leaves it as it is, and is what clients of earlier versions say."""
    scaling: ScalingPolicy | None = None
    """None leaves it as it is, and is what clients of earlier versions say; without a rate it is switched off."""
    timestamps: str = ""
    """A :class:`.RecordTimes`; empty leaves it as it is, and is what clients of earlier versions say."""


@dataclass(frozen=True, slots=True)
class Story:
    """The last events of a transaction, oldest first, that the leader of ``controller_epoch`` saw since it took over.

    Attributes:
        serves_since_ms: When that was, ms since 1970.
    """

    events: tuple[TransactionEvent, ...]
    serves_since_ms: int
    controller_epoch: int


class WaitCause(StrEnum):
    """Why something waits; docs/troubleshooting.md has the rule of each."""

    OBSTACLES = "obstacles"
    HALF_DONE = "half-done"
    LATE_COMMITS = "late-commits"
    ERROR_STATE = "error-state"
    LARGE_MERGE = "large-merge"
    UNKNOWN_OUTCOME = "unknown-outcome"
    REQUEST = "request"
    SCALING = "scaling"
    LATE_RECORDS = "late-records"


class WaitKind(StrEnum):
    """Kind of a wait: the thing that waits."""

    SCALE = "scale"
    ROLLING_COMMIT = "rolling-commit"
    STREAM = "stream"
    TRANSACTION = "transaction"
    REQUEST = "request"


class WaitRow(NamedTuple):
    """Something that waits.

    Attributes:
        name: What it is: a transaction, a request or a stream; empty for changes, which have only streams.
        streams: Streams that wait with it.
        since_ms: Begin of the wait; 0 if it is not known.
        retry_ms: Time of the next try; 0 if it follows from something else.
        reasons: What it waits for, sorted.
    """

    cause: WaitCause
    kind: WaitKind
    name: str
    streams: tuple[str, ...]
    since_ms: int
    retry_ms: int
    reasons: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the row as JSON, with the first of its streams and reasons."""
        return {
            "cause": self.cause.value,
            "kind": self.kind.value,
            "name": self.name,
            "streams": list(self.streams[:NAMED_MAX]),
            "since_ms": self.since_ms or None,
            "retry_ms": self.retry_ms or None,
            "waits_for": list(self.reasons[:NAMED_MAX]),
        }

    @property
    def is_change(self) -> bool:
        """True for a scale or rolling commit that waits for others than clients of ours."""
        return self.cause in (WaitCause.OBSTACLES, WaitCause.HALF_DONE)


@dataclass(frozen=True, slots=True)
class AdminAnswer(NodeRecord):
    """Answer to an admin request; ``code`` is that of the error class that the client raises.

    ``story`` is that of the one transaction that was described, ``arrived`` and ``savepoint`` are those of an open one
    that was requested by its id, ``waits`` are those of the stream that was described.
    """

    SCHEMA: ClassVar = "answer"

    ok: bool
    answered_ms: int
    code: str = ""
    message: str = ""
    epoch: int = -1
    transactions: tuple[KnownTransaction, ...] = ()
    story: Story | None = None
    arrived: Arrived | None = None
    savepoint: StoredSavepoint | None = None
    waits: tuple[WaitRow, ...] | None = None


def refusing(code: str, why: str, now_ms: int) -> AdminAnswer:
    """Return the answer that refuses a request; a long reason is cut, because the answer has to fit into a node."""
    return AdminAnswer(ok=False, answered_ms=now_ms, code=code, message=why[:REASON_CHARACTERS_MAX])
