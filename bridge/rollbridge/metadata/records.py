"""Records in ZooKeeper nodes as values, each with its schema, and operations on nodes.

A record is plain JSON of its schema (:class:`~rollbridge.base.mapper.NodeRecord`). Any client may have written a node:
one that holds something else raises CorruptDataError, which names schema and field.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, ClassVar, Final

from rollbridge.base.errors import InvalidRequestError
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.base.mapper import NodeRecord, StoredAs
from rollbridge.commitlog.outcomes import LogMark
from rollbridge.stream.config import Retention, StreamConfig
from rollbridge.stream.epochs import EpochHistory, EpochRecord, TruncatedHistory
from rollbridge.stream.names import GroupName

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
"""Longest root path, chroot included."""
OPERATION_BYTES: Final = ROOT_CHARACTERS_MAX + 72
"""Bytes of an operation in a multi without its path and value: the root path, and its frame."""


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


@dataclass(frozen=True, slots=True)
class ClusterIdentity(NodeRecord):
    """Which Kafka cluster a ZooKeeper path belongs to."""

    SCHEMA: ClassVar = "cluster"

    kafka_cluster_id: str
    created_ms: int
    format: int = LAYOUT_FORMAT


EPOCH_BYTES: Final = 700
"""Largest epoch record without its segments, with its path and a root path."""
SEGMENT_BYTES: Final = 95
END_BYTES: Final = 70
"""Largest size of a segment, and of an end, in an epoch record."""
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
    """Removed segments and dropped epochs of a stream.

    ``removing`` are the segments whose topics may still exist; ``foundation`` is the rest of dropped epochs.
    """

    SCHEMA: ClassVar = "truncation"

    removed: frozenset[SegmentId] = frozenset()
    removing: frozenset[SegmentId] = frozenset()
    foundation: TruncatedHistory | None = None

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
    """Leader of a group, and its first epoch."""

    SCHEMA: ClassVar = "controller_epoch"

    epoch: int
    leader: str
    since_ms: int


SAVEPOINTS: Final = "savepoints"
"""Feature of a coordinator that accepts SAVEPOINT frames, returns them, and lets owners roll back to them."""
INTERNAL_BUFFERS: Final = "internal-buffers"
"""Feature of a coordinator that leads streams whose records name the topic of their buffer."""


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

    The number is 0 until a coordinator has numbered it; see :mod:`rollbridge.base.ids`.
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
    """Retention of its commit log; None for its coordinators' setting."""
    revision: int = 0
    """Number of changes to its settings."""


@dataclass(frozen=True, slots=True)
class LogMarks(NodeRecord):
    """The marks of a group's commit log, oldest first; see :mod:`rollbridge.commitlog.outcomes`."""

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


# Map from topic names to streams: one rule, for coordinators, gateways and the doctor.
#
# A name means the first of these that exists:
#
# 1. the topic of that name that a stream has adopted: that stream;
# 2. any other topic of the brokers: no stream;
# 3. a stream without a topic: its virtual topic ``scope.stream``, by which producers at gateways know it.
#
# So the brokers' topic wins, and a stream whose name means something else is *in a clash*: producers at gateways do not
# reach it until the topic is deleted. Creating a stream that would be in a clash, or cause one, is refused; a topic
# that is created later is reported.


@dataclass(frozen=True, slots=True)
class TopicNames:
    """Streams by the names of topics.

    Attributes:
        streams: Stream that a name means; a name that is missing means none.
        clashes: Stream whose virtual topic a name would be, if the brokers had no topic of that name.
    """

    streams: Mapping[str, StreamConfig]
    clashes: Mapping[str, StreamConfig]

    @classmethod
    def of(cls, streams: Iterable[StreamConfig], at_brokers: Container[str]) -> TopicNames:
        """Return what names mean.

        Args:
            streams: All streams that there are.
            at_brokers: Names of the brokers' topics; others than names of virtual topics need not be among them.
        """
        known = list(streams)
        found = {config.topic: config for config in known if config.topic}
        clashes: dict[str, StreamConfig] = {}
        for config in known:
            name = config.name.virtual_topic
            if not config.topic:
                (clashes if name in found or name in at_brokers else found)[name] = config
        return cls(found, clashes)


@dataclass(frozen=True, slots=True)
class Lead:
    """Leadership of a group.

    Attributes:
        name: Coordinator that leads.
        since_ms: Since when it serves, or takes over, ms since 1970 by ZooKeeper's clock.
        is_serving: True once its takeover is over.
    """

    name: str
    since_ms: int
    is_serving: bool

    def silence(self, group: GroupName) -> str:
        """Return in half a sentence that it has not answered."""
        return f"coordinator {self.name} leads group {group} but did not answer"

    def age_s(self, now_s: float) -> float:
        """Return its duration so far in seconds; at least 0 where clocks differ."""
        return max(now_s - self.since_ms / 1000, 0.0)
