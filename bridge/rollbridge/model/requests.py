"""Admin requests and their answers, as ZooKeeper carries them between clients and leaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final

from rollbridge.model.ids import SegmentId
from rollbridge.model.mapper import NodeRecord
from rollbridge.model.names import DEFAULT_GROUP
from rollbridge.model.records import Retention
from rollbridge.model.savepoints import StoredSavepoint
from rollbridge.model.scaling import ScalingPolicy
from rollbridge.model.transaction import Arrived, KnownTransaction, TransactionEvent

REASON_CHARACTERS_MAX: Final = 10_000
"""Of the reason in an answer that refuses a request."""
CAUSE_CHARACTERS_MAX: Final = 1_000
"""Of the cause of an event in an answer."""


class RequestKind(StrEnum):
    """What an admin request asks for."""

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
    """What its leader knows of one now, with its last events; nothing is waited for."""
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


@dataclass(frozen=True, slots=True)
class AdminAnswer(NodeRecord):
    """The answer to an admin request; ``code`` is that of the error class that the client raises.

    ``story`` is that of the one transaction that was described, ``arrived`` and ``savepoint`` are those of an open one
    that was looked up by its id.
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


def refusing(code: str, why: str, now_ms: int) -> AdminAnswer:
    """Return the answer that refuses a request; a long reason is cut, because the answer has to fit into a node."""
    return AdminAnswer(ok=False, answered_ms=now_ms, code=code, message=why[:REASON_CHARACTERS_MAX])
