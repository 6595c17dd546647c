"""Effects: everything that a leader can ask of Kafka and ZooKeeper, as values, each with the type of its result.

Procedures are written as :mod:`rollbridge.base.effects` says. The interpreter (:mod:`.interpreter`) carries effects out
on real servers, the simulation of the tests in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rollbridge.base.effects import AnyEffect, Effect, Steps
from rollbridge.base.errors import PortableError
from rollbridge.base.sn import SN
from rollbridge.buffer.state import FrameRef
from rollbridge.commitlog.commit_order import LineKey
from rollbridge.commitlog.control import ControlRecord
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.metadata.records import NodeOperation
from rollbridge.stream.conditions import Condition, ForeignTransaction, Obstacle
from rollbridge.stream.group_offsets import GroupOffsets
from rollbridge.stream.late import LateRecord
from rollbridge.stream.names import GroupName, Partition, SegmentPlaces
from rollbridge.stream.reading import KeyLineage

# ZooKeeper


@dataclass(frozen=True, slots=True)
class ReadNodes(Effect[Mapping[str, bytes | None]]):
    """Read the values of nodes, at least as new as any write of this leader; None for missing nodes."""

    paths: Sequence[str]


class DatedNode(NamedTuple):
    """Value and version of a node, and when it was last written by ZooKeeper's clock, ms since 1970."""

    value: bytes
    version: int
    written_ms: int


@dataclass(frozen=True, slots=True)
class ReadDated(Effect[Mapping[str, DatedNode | None]]):
    """Read nodes with their versions and times, as :class:`ReadNodes` reads their values."""

    paths: Sequence[str]


@dataclass(frozen=True, slots=True)
class ReadCounter(Effect[tuple[bytes, int] | None]):
    """Read value and version of a node, at least as new as any write of this leader; None if it is missing."""

    path: str


@dataclass(frozen=True, slots=True)
class ReadChildren(Effect[Mapping[str, list[str]]]):
    """List the names of the children of each node, sorted; empty for those that do not exist."""

    paths: Sequence[str]


@dataclass(frozen=True, slots=True)
class EnsureNodes(Effect[None]):
    """Create missing nodes, persistent, and their parents."""

    paths: Sequence[str]


@dataclass(frozen=True, slots=True)
class Write(Effect[bool]):
    """Do all operations in one multi that checks that this leader's controller epoch is the newest.

    Gives True; or False, with nothing written, if an operation did not match the state found (a node exists, is
    missing, or has another version).
    """

    operations: Sequence[NodeOperation]


ON_ZOOKEEPER: Final = (ReadNodes, ReadDated, ReadCounter, ReadChildren, EnsureNodes, Write)
"""The effects that ZooKeeper carries out, or refuses; Kafka does all others."""

# Topics


@dataclass(frozen=True, slots=True)
class TopicCreation:
    """A topic to create; ``config`` are Kafka topic settings."""

    name: str
    partitions: int = 1
    replication_factor: int = -1
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CreateTopics(Effect[Mapping[str, str]]):
    """Create missing topics, and give the ids of all. Existing topics with the same settings are kept."""

    topics: Sequence[TopicCreation]


@dataclass(frozen=True, slots=True)
class MendTopics(Effect[Mapping[str, str] | None]):
    """Report how each topic differs from its specification, as text; correct and missing topics are left out.

    Limits of timestamps are corrected, because only an older version can have left them; brokers apply that soon. Only
    if ``optional``, None is given where brokers do not answer in time.
    """

    topics: Sequence[TopicCreation]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class DeleteTopics(Effect[bool]):
    """Delete topics by their ids; gives False, to be repeated, where brokers do not answer in time."""

    topics: Sequence[str]


@dataclass(frozen=True, slots=True)
class TopicIds(Effect[Mapping[str, str]]):
    """Look up Kafka's ids of those of the topics that exist."""

    topics: Sequence[str]


class TopicLook(NamedTuple):
    """Kafka's id of a topic, empty if it does not exist, and Kafka's names of its errors, if any.

    Attributes:
        refused: Error that prevents reading it.
        lacks: Error of its brokers that prevents writing: no leader, or too few in-sync replicas.
    """

    topic_id: str
    refused: str = ""
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class LookAtTopics(Effect[Mapping[str, TopicLook]]):
    """Check which topics exist and can be read; ``is_patient`` waits briefly for partition leaders."""

    topics: Sequence[str]
    is_patient: bool = False


@dataclass(frozen=True, slots=True)
class TopicState:
    """Description of a topic.

    Attributes:
        topic_id: Kafka's id.
        config: Its settings, defaults included.
        operations: Kafka's names of the operations that this leader may do with it; empty if unknown.
        is_sealed: True if it is closed to writers.
        sealing: Current values of the settings that a seal changes; None for those it inherits.
    """

    topic_id: str
    partitions: int
    config: Mapping[str, str]
    operations: frozenset[str] = frozenset()
    is_sealed: bool = False
    sealing: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DescribeTopics(Effect[Mapping[str, TopicState] | None]):
    """Describe existing topics. Only if ``optional``, None is given where brokers do not answer in time or refuse."""

    topics: Sequence[str]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class SetTopicConfig(Effect[None]):
    """Set topic settings; None resets one to the broker's default."""

    topic: str
    config: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Seal(Effect[Mapping[Partition, int]]):
    """Close topics, so that no writer can append to them; gives the end offset of each partition.

    Kafka closes a topic only as a whole, so all of its partitions are given. The answer omits partitions on which
    native transactions of others stayed open for some seconds: these take no new records either, and their ends can be
    asked for again.

    For an adopted topic the id is given. If the topic is missing or was replaced, the seal is refused
    (:class:`~rollbridge.errors.ConflictError`): it is not the stream's to close.
    """

    partitions: Sequence[Partition]
    ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LookForObstacles(Effect[Sequence[Obstacle]]):
    """Find what prevents sealing of partitions while the round is empty: native transactions of others, missing
    leaders.

    What brokers do not report is left out.
    """

    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class Closed(Effect[frozenset[str]]):
    """Find the topics that were closed to writers in the lineage of a seal."""

    topics: Sequence[str]


@dataclass(frozen=True, slots=True)
class EndForeign(Effect[str | None]):
    """Abort native transactions of others; gives None, or the reason of a failure."""

    transactions: Sequence[ForeignTransaction]


# The round: one native transaction; nothing of it is visible before CommitRound.


Items = Sequence[tuple[Partition, FrameRef]]
"""Frames of a round, each with the partition that takes it."""


@dataclass(frozen=True, slots=True)
class MergeFrames(Effect[Sequence[int]]):
    """Append frames to their partitions in order, inside the round; gives the offset of each one's first record.

    Small frames are joined into batches, of at most ``rooms`` bytes for the topics named there. In ``stamped`` topics
    they get the time of the append.
    """

    items: Items
    rooms: Mapping[str, int] = field(default_factory=dict)
    stamped: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Messages:
    """Keys and values for a partition, the first one of a topic unless said; None is a tombstone."""

    topic: str
    items: Sequence[tuple[bytes, bytes | None]]
    partition: int = 0


@dataclass(frozen=True, slots=True)
class AppendControl(Effect[Sequence[int]]):
    """Append control records to the group's commit log in order, inside the round; gives their offsets.

    The messages ``beside`` them are appended in the same request.
    """

    topic: str
    records: Sequence[ControlRecord]
    beside: Messages | None = None


@dataclass(frozen=True, slots=True)
class AppendTogether(Effect[tuple[Sequence[int], Sequence[int]]]):
    """Append frames, and control records that predict their offsets, inside the round in one request.

    Gives the offset of each frame's first record, and those of the control records. If the former are not the
    ``expected`` ones, the round has been aborted: nothing of it will ever be visible, and it can be repeated.
    """

    items: Items
    expected: Sequence[int]
    topic: str
    records: Sequence[ControlRecord]
    beside: Messages | None = None
    rooms: Mapping[str, int] = field(default_factory=dict)
    stamped: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AppendMessages(Effect[Sequence[int]]):
    """Append messages inside the round, in order; gives their offsets."""

    messages: Messages


@dataclass(frozen=True, slots=True)
class SendOffsets(Effect[tuple[int, str] | None]):
    """Add the offsets of consumer groups to the round; gives None.

    If a group is refused, gives its place and the reason, and the round is empty again. Of transactions that share a
    round it holds nothing yet, because offsets come first; so an expired generation spoils no other transaction. The
    frames of a preparation are in it already: without an answer the effect is refused, and they are appended again.
    """

    items: Sequence[GroupOffsets]


@dataclass(frozen=True, slots=True)
class AbortRound(Effect[None]):
    """Abort the round: nothing appended since the last one will ever be visible."""


@dataclass(frozen=True, slots=True)
class CommitRound(Effect[int]):
    """Commit the round: everything appended since the last one is visible to ``read_committed``, for good.

    Gives the leader's clock after that, ms since 1970.
    """


# Large transactions: appended in the background, each by a native transaction of its own, to topics not read yet.


@dataclass(frozen=True, slots=True)
class Prepare(Effect[None]):
    """Begin to create topics and to append frames to them, in the background, in a native transaction of its own.

    ``key`` names it from then on. Nothing has been done when this returns; :class:`LookAtPrepared` reports progress.
    """

    key: str
    topics: Sequence[TopicCreation]
    items: Items
    stamped: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PreparationProgress:
    """Progress of a preparation.

    Attributes:
        offsets: Offset of the first record of each frame, once all are appended.
        refused: Reason of a refusal; nothing of it will be visible.
        lost: Reason why its outcome is unknown; it can be repeated. Empty if the outcome is known.
    """

    offsets: Sequence[int] | None = None
    refused: EffectRefusedError | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True)
class LookAtPrepared(Effect[Mapping[str, PreparationProgress]]):
    """Report the progress of all preparations; one that was given up is included until its work has ended."""


@dataclass(frozen=True, slots=True)
class TakeUp(Effect[None]):
    """Make the native transaction of a preparation that has appended everything the round.

    Later appends join it, and ``CommitRound`` makes all of it visible. The round must be empty before.
    """

    key: str


@dataclass(frozen=True, slots=True)
class GiveUp(Effect[None]):
    """End a preparation in any state: nothing of it will ever be visible."""

    key: str


# Conditions


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive offsets, ``end`` not included."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Query:
    """Question about a condition.

    Attributes:
        places: The stream, and the partitions of its segments.
        lineage: The segments of its key; the active one is searched first.
        condition: The expectation. With scope ``key`` only records with its key count.
        since: Sequence id at and before which no search is needed; None: search the whole lineage.
        end: Offset in the active segment below which to search; None: its end as of now.
        own: Ranges of the round's own records there, in order.
    """

    places: SegmentPlaces
    lineage: KeyLineage
    condition: Condition
    since: int | None
    end: int | None
    own: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a query.

    Attributes:
        last: SN of the last committed record in the scope of the condition; EMPTY without any (after ``since``), ANY if
            it was truncated.
        end: Offset in the active segment below which the search is complete.
        disturbed: True if a record of another writer in that scope lies between own ones.
    """

    last: SN
    end: int
    disturbed: bool = False


@dataclass(frozen=True, slots=True)
class Undecided:
    """Answer if an earlier native transaction of another writer stays open."""

    why: str


@dataclass(frozen=True, slots=True)
class Look(Effect[Sequence[Found | Undecided]]):
    """Wait until all earlier records are decided, then answer each query."""

    queries: Sequence[Query]


# Offsets, truncation and retention


@dataclass(frozen=True, slots=True)
class EndOffsets(Effect[Mapping[Partition, int]]):
    """Look up the end offset of each partition as of now."""

    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class StartOffsets(Effect[Mapping[Partition, int]]):
    """Look up the start offset of each partition; unless ``is_patient``, without those that are not reported now."""

    partitions: Sequence[Partition]
    is_patient: bool = True


@dataclass(frozen=True, slots=True)
class StableEnds(Effect[Mapping[Partition, int]]):
    """Look up the last stable offset of each partition, below which everything is decided.

    Partitions of which brokers do not report it are left out.
    """

    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class DeleteRecords(Effect[frozenset[Partition]]):
    """Delete the records below the offsets, for good; gives the partitions of which a broker refuses this.

    Kafka does not fence this request: an older leader can send it as well. So it is used only where everything below
    the offset is settled for every leader, past and future.
    """

    before: Mapping[Partition, int]


@dataclass(frozen=True, slots=True)
class Now(Effect[int]):
    """Read the leader's clock, ms since 1970, after all earlier effects; a procedure may have waited since it began."""


@dataclass(frozen=True, slots=True)
class DiskBytes(Effect[Mapping[Partition, int]]):
    """Measure the bytes of each partition on the disk of its leader; unknown ones are left out."""

    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class LogEnds(Effect[Mapping[Partition, int]]):
    """Look up the end of each partition, open transactions included; unknown ones are left out."""

    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class SampleKeys(Effect[Sequence[tuple[bytes | None, int]]]):
    """Read some of the latest ``records`` of a partition, at most about ``bytes_max`` bytes, committed or not.

    Gives the key and the bytes of each; fewer, or none, where they cannot be read now.
    """

    partition: Partition
    records: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class GroupCommits(Effect[Mapping[str, Mapping[Partition, int]]]):
    """Look up the offsets that each consumer group has committed, by partition; unknown ones are left out."""

    groups: Sequence[str]


# Late records, which a broker accepted before a seal and appended after it


@dataclass(frozen=True, slots=True)
class ReadLate(Effect[tuple[Sequence[LateRecord], int]]):
    """Read the committed records of a partition from ``start`` to ``end``, all decided; at most ``records_max``.

    Gives them, and the offset up to which the partition was read.
    """

    partition: Partition
    start: int
    end: int
    records_max: int


@dataclass(frozen=True, slots=True)
class AppendLate(Effect[str | None]):
    """Append copies of late records to partitions inside the round, in order, each with its source.

    Gives None. If one of them is refused, gives the reason, and the round is empty again.
    """

    source: Partition
    items: Sequence[tuple[Partition, LateRecord]]


@dataclass(frozen=True, slots=True)
class FindLate(Effect[bool | None]):
    """Check for a committed copy of the record at ``offset`` of a partition in a target, from its offset on.

    Gives None if a native transaction that is open there leaves this undecided.
    """

    source: Partition
    offset: int
    targets: Mapping[Partition, int]


# Takeover


@dataclass(frozen=True, slots=True)
class TakeIdentity(Effect[None]):
    """Initialize the group's Kafka transactional ids: an older leader is fenced, its open transactions are aborted."""

    group: GroupName


@dataclass(frozen=True, slots=True)
class LogSummary:
    """Summary of a commit log from some offset on, by the 16 bytes of transaction ids.

    Attributes:
        terminated: Transactions with an outcome, with its offset, in order.
        aborted: The aborted ones of these.
        begun: Transactions with a BEGIN record and no outcome.
        end: Offset that follows the last record.
    """

    terminated: Mapping[bytes, int]
    begun: frozenset[bytes]
    aborted: frozenset[bytes] = frozenset()
    end: int = 0


@dataclass(frozen=True, slots=True)
class ReadCommitLog(Effect[LogSummary]):
    """Read the commit log from ``start`` up to its end, committed records only."""

    topic: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class ReadEnded(Effect[EndedIds]):
    """Read which transactions have ended in a commit log from ``start`` to ``end``, committed records only.

    There may be billions of them; unlike a summary, the set takes hardly any memory.
    """

    topic: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReadOrders(Effect[Mapping[LineKey, int]]):
    """Read the highest number among the last ``records`` of a commit log, by connection and epoch of its session."""

    topic: str
    records: int


@dataclass(frozen=True, slots=True)
class ReadCompacted(Effect[Mapping[bytes, bytes]]):
    """Read the latest committed value of each key of a compacted topic of one partition, in the order of offsets.

    Deleted keys are left out.
    """

    topic: str


@dataclass(frozen=True, slots=True)
class ReadRecords(Effect[Mapping[int, bytes | None]]):
    """Read the committed values at offsets of a topic of one partition, None where there is none."""

    topic: str
    offsets: Sequence[int]


ROUND: Final = (MergeFrames, AppendControl, AppendTogether, AppendMessages, SendOffsets, CommitRound, TakeUp, Prepare)
"""Effects that are part of a round; if one is refused, nothing of the round can be committed."""

# Steps: an effect and a check of its result


def read_node(path: str) -> Steps[bytes | None]:
    """Return the value of one node, None if it does not exist."""
    values = yield from ReadNodes((path,))
    return values[path]


def read_children(path: str) -> Steps[list[str]]:
    """Return the names of the children of one node, sorted; empty if it does not exist."""
    names = yield from ReadChildren((path,))
    return names[path]


def confirm_leadership() -> Steps[None]:
    """End the term if there is a newer leader; earlier reads are then not a newer leader's work."""
    yield from Write(())


# Refusals

STUMBLED: Final = "UNKNOWN_SERVER_ERROR"
"""Code of a refusal by a broker that failed on a batch: the batch may be malformed, or the broker faulty."""


class EffectRefusedError(PortableError):
    """Refusal thrown into a procedure in place of an effect's result: definite, and useless to repeat.

    Nothing of the effect will ever be visible. If it was part of a round, the round is empty again, and the procedure
    may repeat it without what was refused. A procedure that does not catch it ends the term of its leader.

    An effect whose outcome is unknown is not refused: it always ends the term.

    Attributes:
        reason: Reason, as a sentence for people.
        code: Kafka's name of the error, such as ``MESSAGE_TOO_LARGE``, or a code of :mod:`rollbridge.errors`.
        topic: Topic that was refused; None if it was no single one. Brokers refuse a topic as a whole, whichever
            partition was met first.
        places: Of a :class:`MergeFrames` or :class:`AppendTogether`, places of the items one or more of which have
            refused content; empty if content is not the reason.
    """

    def __init__(
        self, effect: AnyEffect, reason: str, *, code: str, topic: str | None = None, places: Sequence[int] = ()
    ) -> None:
        super().__init__(f"{type(effect).__name__} was refused: {reason}")
        self.effect = effect
        self.reason = reason
        self.code = code
        self.topic = topic
        self.places = tuple(places)

    @property
    def by(self) -> str:
        """Return the server that refused it, as messages name it."""
        return "ZooKeeper" if isinstance(self.effect, ON_ZOOKEEPER) else "Kafka"
