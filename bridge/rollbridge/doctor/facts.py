"""What the doctor knows of a cluster, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from rollbridge.kafka.snapshots import BufferSnapshot, EndedSince
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.faults import StreamFault
from rollbridge.model.late import LateNotes
from rollbridge.model.names import GroupName
from rollbridge.model.records import Coordinator, Group, StreamConfig, TransactionRecord


class Severity(IntEnum):
    """How bad a finding is."""

    WARNING = 1
    """It works, but something is not as it should be."""
    PROBLEM = 2
    """Something does not work, or data is in danger."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        check: Stable name of the check.
        what: What was found.
        remedy: What to do.
    """

    severity: Severity
    check: str
    what: str
    remedy: str


def problem(check: str, what: str, remedy: str) -> Finding:
    """Something does not work."""
    return Finding(Severity.PROBLEM, check, what, remedy)


def warning(check: str, what: str, remedy: str) -> Finding:
    """Something is not as it should be."""
    return Finding(Severity.WARNING, check, what, remedy)


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """A broker; ``config`` are its settings, ``transaction_version`` is Kafka's feature level."""

    id: int
    transaction_version: int
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OpenNative:
    """A native transaction that is open on a topic."""

    topic: str
    producer_id: int
    start_offset: int
    age_s: float


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic of ours.

    Attributes:
        replicas: How many replicas its first partition should have.
        in_sync: How many of these are in sync.
        operations: What the doctor's principal may do with it; empty if the broker does not say.
    """

    name: str
    topic_id: str
    replicas: int
    in_sync: int
    config: Mapping[str, str]
    sealed: bool
    operations: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A transaction group.

    Attributes:
        committing_ms, scaling_ms: When what is under way was begun; None if nothing is.
        coordinator: What its leader says of itself.
        outcome_faults: What is wrong with records of terminated transactions.
        taking_over_ms: Since when its leader has been taking over; None if it serves.
        clock_ms: By how much its leader's clock was ahead of ZooKeeper's when it took over; below 0 if behind.
        outdated: What ZooKeeper has lost, as a leader has found; None if nothing.
    """

    record: Group
    leader: str | None
    committing_ms: int | None = None
    scaling_ms: int | None = None
    transactions: Sequence[TransactionRecord] = ()
    coordinator: Coordinator | None = None
    outcome_faults: Sequence[str] = ()
    taking_over_ms: int | None = None
    clock_ms: int = 0
    outdated: str | None = None

    @property
    def name(self) -> GroupName:
        """The group."""
        return self.record.name


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream; ``history`` is None if its epochs are gone or can not be read, and ``fault`` says why.

    ``late`` is what came in behind the ends of its sealed segments.
    ``error`` is what keeps its transactions from being merged, if it is in an error state.
    """

    config: StreamConfig
    history: EpochHistory | None
    fault: str = ""
    late: LateNotes = field(default_factory=LateNotes)
    error: StreamFault | None = None


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """The snapshot of a partition of a transaction buffer, and what came after it."""

    found: BufferSnapshot
    since: EndedSince


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Everything that was looked at.

    Attributes:
        kafka_cluster_id, recorded_cluster_id: What Kafka says, and what ZooKeeper has on record.
        topics: All topics whose names are ours, by name.
        operations: What the principal may do with the cluster.
        hidden: Topics that should be there, and that the principal may not look at.
        open_nodes: Nodes in ZooKeeper that everybody may change, although we have an identity there.
        now_ms: When it was looked at.
    """

    kafka_cluster_id: str
    recorded_cluster_id: str | None
    now_ms: int
    brokers: Sequence[BrokerFacts] = ()
    coordinators: Sequence[str] = ()
    groups: Sequence[GroupFacts] = ()
    streams: Sequence[StreamFacts] = ()
    topics: Mapping[str, TopicFacts] = field(default_factory=dict)
    open_natives: Sequence[OpenNative] = ()
    snapshots: Sequence[SnapshotFacts] = ()
    operations: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    open_nodes: Sequence[str] = ()
