"""Effects: everything that a leader can ask of Kafka and ZooKeeper, as values, each with the type of its result.

A procedure is a generator that yields effects and is sent their results; it does no I/O itself. Instead of ``yield`` it
says ``yield from``, which is the same and tells mypy what comes back, because an effect is a generator of one step
(:meth:`Effect.__iter__`)::

    ends = yield from Seal(partitions)  # Mapping[Partition, int]

Who runs a procedure carries out one effect after the other: the interpreter (``shell.interpreter``) on real servers,
the simulation of the tests in memory. A class here is an effect's only declaration: its fields are what is asked, the
argument of ``Effect`` is what is given, and its docstring says what has become true when that arrives. A crash may fall
between any two effects, and between doing one and telling its result.

An effect is as old as the moment in which it is yielded: its procedure does not change afterwards what it has handed
over, so sequences and mappings are not copied.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

from rollbridge.model.cas import Condition
from rollbridge.model.commit_order import LineKey
from rollbridge.model.conditions import ForeignTransaction, Obstacle
from rollbridge.model.control import ControlRecord
from rollbridge.model.ended import EndedIds
from rollbridge.model.errors import PortableError
from rollbridge.model.group_offsets import GroupOffsets
from rollbridge.model.late import LateRecord
from rollbridge.model.lineage import KeyLineage
from rollbridge.model.names import GroupName, Partition, SegmentPlaces
from rollbridge.model.pieces import FrameRef
from rollbridge.model.records import NodeOperation
from rollbridge.model.sn import SN

T = TypeVar("T")


class Effect(Generic[T]):
    """Something to be done, with a result of type ``T``; each subclass is one kind of effect."""

    __slots__ = ()

    def __iter__(self) -> Generator[AnyEffect, Any, T]:
        """Yield the effect itself and return what is sent for it, for ``yield from`` in a procedure."""
        result: T = yield self
        return result


AnyEffect = Effect[Any]

Steps = Generator[AnyEffect, Any, T]
"""A procedure that returns a ``T``."""

# ZooKeeper


@dataclass(frozen=True, slots=True)
class ReadNodes(Effect[Mapping[str, bytes | None]]):
    """Read the values of nodes, as new as any write of this leader; None for those that do not exist."""

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
    """Read value and version of a node, as new as any write of this leader; None if it does not exist."""

    path: str


@dataclass(frozen=True, slots=True)
class ReadChildren(Effect[Mapping[str, list[str]]]):
    """List the names of the children of each node, sorted; empty for those that do not exist."""

    paths: Sequence[str]


@dataclass(frozen=True, slots=True)
class EnsureNodes(Effect[None]):
    """Create those of the nodes that do not exist, persistent, and their parents."""

    paths: Sequence[str]


@dataclass(frozen=True, slots=True)
class Write(Effect[bool]):
    """Do all operations in one multi, with a check that this leader's controller epoch is the newest.

    Gives True, or False if an operation did not apply to the state found (a node exists, is missing, or has another
    version); nothing was written then.
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
    """Create those of the topics that do not exist, and give the ids of all.

    Topics that exist already with the same settings are kept.
    """

    topics: Sequence[TopicCreation]


@dataclass(frozen=True, slots=True)
class MendTopics(Effect[Mapping[str, str] | None]):
    """Tell what of each topic is not as specified, as text; those that are right, or missing, are left out.

    Limits of timestamps are put right, because only an older version can have left them; brokers apply that soon. Only
    if that is ``optional``, None is given where brokers do not answer in time.
    """

    topics: Sequence[TopicCreation]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class DeleteTopics(Effect[bool]):
    """Delete topics, by their ids; gives False where brokers do not answer in time, and it is to be asked for again."""

    topics: Sequence[str]


@dataclass(frozen=True, slots=True)
class TopicIds(Effect[Mapping[str, str]]):
    """Look up Kafka's ids of those of the topics that exist."""

    topics: Sequence[str]


class TopicLook(NamedTuple):
    """Kafka's id of a topic, empty if it does not exist; and Kafka's name of what keeps it from being read, if any."""

    topic_id: str
    refused: str = ""


@dataclass(frozen=True, slots=True)
class LookAtTopics(Effect[Mapping[str, TopicLook]]):
    """Tell which of the topics exist and can be read; ``is_patient`` waits a moment for partition leaders."""

    topics: Sequence[str]
    is_patient: bool = False


@dataclass(frozen=True, slots=True)
class TopicState:
    """What a topic is.

    Attributes:
        topic_id: Kafka's id.
        config: Its settings, defaults included.
        operations: What this leader may do with it, by Kafka's names; empty if that is not told.
        is_sealed: Whether it is closed to writers.
        sealing: The settings that a seal changes, as they are now; None for those that it has not of its own.
    """

    topic_id: str
    partitions: int
    config: Mapping[str, str]
    operations: frozenset[str] = frozenset()
    is_sealed: bool = False
    sealing: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DescribeTopics(Effect[Mapping[str, TopicState] | None]):
    """Describe those of the topics that exist.

    Only if that is ``optional``, None is given where brokers do not answer in time or refuse to tell.
    """

    topics: Sequence[str]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class SetTopicConfig(Effect[None]):
    """Give a topic settings of its own; None takes back one that it had, so that it has the broker's again."""

    topic: str
    config: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Seal(Effect[Mapping[Partition, int]]):
    """Close topics, so that no writer whatsoever can append to them any more; gives the end offset of each partition.

    A topic can be closed as a whole only, so all of its partitions are given. Left out of the answer are those on which
    native transactions of others have stayed open for some seconds: nothing new comes in there either, and it can be
    asked again for where they end.

    Of an adopted topic the id is given, and one that is gone, or another topic by now, is refused
    (:class:`~rollbridge.errors.ConflictError`): it is not the stream's to close.
    """

    partitions: Sequence[Partition]
    ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LookForObstacles(Effect[Sequence[Obstacle]]):
    """Find what keeps partitions from being sealed while the round is empty.

    That is native transactions of others, and leaders that are away. Left out is what brokers do not tell us.
    """

    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class Closed(Effect[frozenset[str]]):
    """Find those of the topics that have been closed to writers, in the course of a seal."""

    topics: Sequence[str]


@dataclass(frozen=True, slots=True)
class EndForeign(Effect[str | None]):
    """Abort native transactions of others; gives None, or why they could not be aborted."""

    transactions: Sequence[ForeignTransaction]


# The round: one native transaction; nothing of it is visible before CommitRound.


Items = Sequence[tuple[Partition, FrameRef]]
"""Frames of a round, each with the partition that takes it."""


@dataclass(frozen=True, slots=True)
class MergeFrames(Effect[Sequence[int]]):
    """Append frames to their partitions in order, inside the round; gives the offset of each one's first record.

    Small ones are joined, to batches of at most what ``rooms`` says of the topic, in bytes. In ``stamped`` topics they
    get the time of the append.
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

    What is to stand ``beside`` them is appended in the same request.
    """

    topic: str
    records: Sequence[ControlRecord]
    beside: Messages | None = None


@dataclass(frozen=True, slots=True)
class AppendTogether(Effect[tuple[Sequence[int], Sequence[int]]]):
    """Append frames, and the control records that foretell where they stand, inside the round in one request.

    Gives the offset of each frame's first record, and those of the control records. If the former are not the
    ``expected`` ones, the round has been aborted: nothing of it will ever be visible, and it can be done again.
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
    """Make the offsets of consumer groups part of the round; gives None.

    If one of them is refused, gives its place and the reason, and the round is empty again: it can hold nothing of
    value yet, because offsets come first. So whoever reads in an expired generation spoils no other transaction.
    """

    items: Sequence[GroupOffsets]


@dataclass(frozen=True, slots=True)
class AbortRound(Effect[None]):
    """Abort the round: nothing that was appended since the last one will ever be visible."""


@dataclass(frozen=True, slots=True)
class CommitRound(Effect[int]):
    """Commit the round: all that was appended since the last one is visible to ``read_committed``, for good.

    Gives the leader's clock after that, ms since 1970.
    """


# Large transactions: appended beside the rounds, each by a native transaction of its own, to topics that nobody reads.


@dataclass(frozen=True, slots=True)
class Prepare(Effect[None]):
    """Begin to create topics and to append frames to them, beside everything else, in a native transaction of its own.

    It is called ``key`` from then on. Nothing has been done when this returns; :class:`LookAtPrepared` tells.
    """

    key: str
    topics: Sequence[TopicCreation]
    items: Items
    stamped: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PreparationProgress:
    """How far a preparation is.

    Attributes:
        offsets: Of the first record of each frame, once all are appended.
        refused: Why it cannot be done; nothing of it will be visible.
        lost: Why its outcome is unknown, which means as much; it can be begun anew. Empty if it is known.
    """

    offsets: Sequence[int] | None = None
    refused: EffectRefusedError | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True)
class LookAtPrepared(Effect[Mapping[str, PreparationProgress]]):
    """Tell how far all preparations are; one that was given up is told until nothing more is done for it."""


@dataclass(frozen=True, slots=True)
class TakeUp(Effect[None]):
    """Make the native transaction of a preparation, which has appended everything, the round.

    What is appended next is part of it, and ``CommitRound`` makes all of it visible. The round was empty before.
    """

    key: str


@dataclass(frozen=True, slots=True)
class GiveUp(Effect[None]):
    """End a preparation, in whatever state it is: nothing of it will ever be visible."""

    key: str


# Conditions


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive offsets, ``end`` not included."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Query:
    """What a condition is about.

    Attributes:
        places: The stream, and where its segments lie.
        course: The segments of its key; the active one is where to look first.
        condition: What is expected. With scope ``key`` only records with its key count.
        since: Sequence id at and before which nothing has to be looked for; None: the whole course is of interest.
        end: Offset in the active segment below which to look; None: its end as of now.
        own: Where the round's own records stand there, in order.
    """

    places: SegmentPlaces
    course: KeyLineage
    condition: Condition
    since: int | None
    end: int | None
    own: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What stands there.

    Attributes:
        last: SN of the last committed record in the scope of the condition; EMPTY without any (after ``since``), ANY
            if it was truncated away.
        end: Offset in the active segment below which everything was looked at.
        disturbed: Whether somebody else's record in that scope stands between own ones.
    """

    last: SN
    end: int
    disturbed: bool = False


@dataclass(frozen=True, slots=True)
class Undecided:
    """An earlier native transaction of somebody else stays open."""

    why: str


@dataclass(frozen=True, slots=True)
class Look(Effect[Sequence[Found | Undecided]]):
    """Wait until everything before is decided, then answer each query."""

    queries: Sequence[Query]


# Offsets, truncation and retention


@dataclass(frozen=True, slots=True)
class EndOffsets(Effect[Mapping[Partition, int]]):
    """Look up the end offset of each partition as of now."""

    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class StartOffsets(Effect[Mapping[Partition, int]]):
    """Look up the offset of the first message of each partition that has not been truncated."""

    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class StableEnds(Effect[Mapping[Partition, int]]):
    """Look up the last stable offset of each partition, below which everything is decided.

    Left out are those of which brokers do not tell it now.
    """

    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class DeleteRecords(Effect[frozenset[Partition]]):
    """Delete what stands below the offsets, for good; gives the partitions of which a broker refuses to delete it.

    An older leader can do this as well as the newest one: Kafka fences nobody here. So it is asked for only where
    everything below is settled for every leader that ever was and will be.
    """

    before: Mapping[Partition, int]


@dataclass(frozen=True, slots=True)
class Now(Effect[int]):
    """Read the leader's clock, ms since 1970, after everything before; a procedure may have waited since it began."""


@dataclass(frozen=True, slots=True)
class DiskBytes(Effect[Mapping[Partition, int]]):
    """Measure how many bytes each partition has on the disk of its leader; what cannot be told now is left out."""

    partitions: Sequence[Partition]


@dataclass(frozen=True, slots=True)
class LogEnds(Effect[Mapping[Partition, int]]):
    """Look up the end of each partition, with what is open there; those of which it cannot be told now are left out."""

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
    """Look up what each consumer group has committed, by partition; what cannot be told now is left out."""

    groups: Sequence[str]


# Late records, which a broker accepted before a seal and appended after it


@dataclass(frozen=True, slots=True)
class ReadLate(Effect[tuple[Sequence[LateRecord], int]]):
    """Read the committed records of a partition from ``start`` to ``end``, which is decided; at most ``records_max``.

    Gives them, and the offset up to which everything has been looked at.
    """

    partition: Partition
    start: int
    end: int
    records_max: int


@dataclass(frozen=True, slots=True)
class AppendLate(Effect[str | None]):
    """Append copies of late records to partitions inside the round, in order, each with where it comes from.

    Gives None. If one of them is refused, gives the reason, and the round is empty again.
    """

    source: Partition
    items: Sequence[tuple[Partition, LateRecord]]


@dataclass(frozen=True, slots=True)
class FindLate(Effect[bool | None]):
    """Tell whether a copy of the record at ``offset`` of a partition is committed in a target, from its offset on.

    Gives None where that cannot be told now, because a native transaction is open there.
    """

    source: Partition
    offset: int
    targets: Mapping[Partition, int]


# Takeover


@dataclass(frozen=True, slots=True)
class TakeIdentity(Effect[None]):
    """Take the group's Kafka transactional ids: an older leader's are fenced, what it left open is aborted."""

    group: GroupName


@dataclass(frozen=True, slots=True)
class LogSummary:
    """What a commit log says of transactions from some offset on, by the 16 bytes of their ids.

    Attributes:
        terminated: Those with an outcome, with its offset, in order.
        aborted: Those of them that are aborted.
        begun: Those with a BEGIN record and no outcome.
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
    """Read which transactions have ended in a commit log from ``start`` up to ``end``, committed records only.

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
    """Read the committed values at offsets of a topic of one partition, None where there is none (any more)."""

    topic: str
    offsets: Sequence[int]


ROUND: Final = (MergeFrames, AppendControl, AppendTogether, AppendMessages, SendOffsets, CommitRound, TakeUp, Prepare)
"""Effects that are part of a round; when one of them is refused, nothing of the round can be committed."""

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
    """End the term if there is a newer leader; what was read before is then not a newer leader's work."""
    yield from Write(())


# Refusals

STUMBLED: Final = "UNKNOWN_SERVER_ERROR"
"""Code of a refusal by a broker that stumbled over a batch: it may be malformed, or the broker may be ill."""


class EffectRefusedError(PortableError):
    """Thrown into a procedure in place of an effect's result: it was refused for good, and is of no use if repeated.

    Nothing of the effect will ever be visible. If it was part of a round, the round is empty again, and the procedure
    may begin it anew without what was refused. A procedure that does not catch it ends the term of its leader.

    An effect of which nobody knows whether it was carried out is something else: it ends the term, always.

    Attributes:
        effect: What was refused.
        reason: Why, as a sentence for people.
        code: Kafka's name of the error, such as ``MESSAGE_TOO_LARGE``, or a code of :mod:`rollbridge.errors`.
        topic: Topic that was refused; None if it was no single one. What brokers refuse, they refuse for a topic as a
            whole, whichever of its partitions was met first.
        places: Of a :class:`MergeFrames` or :class:`AppendTogether`, places of the items one or more of which are at
            fault for what is in them; empty if their content is not the reason.
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
        """Name who has refused it, as messages say it."""
        return "ZooKeeper" if isinstance(self.effect, ON_ZOOKEEPER) else "Kafka"
