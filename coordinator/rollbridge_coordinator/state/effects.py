"""Effects: everything that a leader can do to the world, as values.

A procedure yields an effect and is sent its result. Each effect says what it promises when its result arrives; a crash
may fall between any two of them. See ``steps`` for the results' types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollbridge.model.cas import Condition
from rollbridge.model.conditions import ForeignTransaction
from rollbridge.model.control import ControlRecord
from rollbridge.model.group_offsets import GroupOffsets
from rollbridge.model.late import LateRecord
from rollbridge.model.lineage import Course
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.pieces import FrameRef, Partition
from rollbridge.model.records import NodeOperation
from rollbridge.model.sn import SN


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic to create; ``config`` are Kafka topic settings."""

    name: str
    partitions: int = 1
    replication_factor: int = -1
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadNodes:
    """The values of ZooKeeper nodes, None for those that do not exist, as new as any write of this leader."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadCounter:
    """Value and version of a node, None if it does not exist, as new as any write of this leader."""

    path: str


@dataclass(frozen=True, slots=True)
class ReadChildren:
    """Names of the children of each node, sorted; empty for those that do not exist."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EnsureNodes:
    """Persistent nodes exist, their parents too."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """All operations are done in one multi, with a check that this leader's controller epoch is the newest.

    Gives True, or False if an operation did not apply to the state found (a node exists, is missing, or has another
    version); nothing was written then.
    """

    operations: tuple[NodeOperation, ...]


ON_ZOOKEEPER: Final = (ReadNodes, ReadCounter, ReadChildren, EnsureNodes, Write)
"""The effects that ZooKeeper carries out, or refuses; Kafka does all others."""


@dataclass(frozen=True, slots=True)
class CreateTopics:
    """All topics exist; gives their ids. Topics that exist already with the same settings are kept."""

    topics: tuple[TopicSpec, ...]


@dataclass(frozen=True, slots=True)
class MendTopics:
    """Tells what of each topic is not as specified, as text; those that are right, or missing, are left out.

    Limits of timestamps are put right, because only an older version can have left them; brokers apply that soon. If
    that is ``optional``, None is given where brokers do not answer in time.
    """

    topics: tuple[TopicSpec, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class DeleteTopics:
    """None of the topics exists. If that is ``optional``, False is given where brokers do not answer in time."""

    topics: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class TopicIds:
    """Kafka's ids of those of the topics that exist."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """No writer whatsoever can append to the topics any more; gives the end offset of each.

    Left out are topics on which native transactions of others have stayed open for some seconds: nothing new comes in
    there either, and it can be asked again for where they end.
    """

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LookForObstacles:
    """What keeps topics from being sealed while the round is empty: native transactions, and leaders that are away.

    Left out is what brokers do not tell us.
    """

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """Those of the topics that have been closed to writers, in the course of a seal."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EndForeign:
    """Native transactions of others are aborted; gives None, or why they could not be."""

    transactions: tuple[ForeignTransaction, ...]


@dataclass(frozen=True, slots=True)
class MergeFrames:
    """The frames are appended to their topics in order, inside the round; gives the offset of each one's first record.

    Nothing is visible before :class:`CommitRound`.
    """

    items: Sequence[tuple[str, FrameRef]]


@dataclass(frozen=True, slots=True)
class Messages:
    """Keys and values for a topic of one partition; None is a tombstone."""

    topic: str
    items: Sequence[tuple[bytes, bytes | None]]


@dataclass(frozen=True, slots=True)
class AppendControl:
    """The control records are appended to the group's commit log in order, inside the round; gives their offsets.

    What is to stand ``beside`` them is appended in the same request.
    """

    topic: str
    records: Sequence[ControlRecord]
    beside: Messages | None = None


@dataclass(frozen=True, slots=True)
class AppendTogether:
    """Frames and the control records that foretell where they stand are appended inside the round, in one request.

    Gives the offset of each frame's first record, and those of the control records. If the former are not the
    ``expected`` ones, the round has been aborted: nothing of it will ever be visible, and it can be done again.
    """

    items: Sequence[tuple[str, FrameRef]]
    expected: Sequence[int]
    topic: str
    records: Sequence[ControlRecord]
    beside: Messages | None = None


@dataclass(frozen=True, slots=True)
class AppendMessages:
    """Messages are appended inside the round, in order; gives their offsets."""

    messages: Messages


@dataclass(frozen=True, slots=True)
class SendOffsets:
    """The offsets of consumer groups are part of the round; gives None.

    If one of them is refused, gives its place and the reason, and the round is empty again: it can hold nothing of
    value yet, because offsets come first. So whoever reads in an expired generation spoils no other transaction.
    """

    items: tuple[GroupOffsets, ...]


@dataclass(frozen=True, slots=True)
class AbortRound:
    """Nothing that was appended since the last round will ever be visible."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive offsets, ``end`` not included."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Query:
    """What a condition is about.

    Attributes:
        stream: The stream.
        course: The segments of its key; the active one is where to look first.
        condition: What is expected. With scope ``key`` only records with its key count.
        since: Sequence id at and before which nothing has to be looked for; None: the whole course is of interest.
        end: Offset in the active segment below which to look; None: its end as of now.
        own: Where the round's own records stand there, in order.
    """

    stream: StreamName
    course: Course
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
class Look:
    """Wait until everything before is decided, then look; gives a :class:`Found` or :class:`Undecided` for each."""

    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True)
class CommitRound:
    """Everything appended since the last round is committed: visible to ``read_committed`` readers, for good."""


@dataclass(frozen=True, slots=True)
class EndOffsets:
    """The end offset of each buffer partition as of now."""

    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class StartOffsets:
    """The offset of the first message of each buffer partition that has not been truncated."""

    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class DeleteRecords:
    """What stands below the offsets is gone, for good; gives the partitions of which a broker refuses to delete it.

    An older leader can do this as well as the newest one: Kafka fences nobody here. So it is asked for only where
    everything below is settled for every leader that ever was and will be.
    """

    before: Mapping[Partition, int]


@dataclass(frozen=True, slots=True)
class StableEnds:
    """The last stable offset of each topic, below which everything is decided; left out where that is not told now."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadLate:
    """The committed records of a topic from ``start`` up to ``end``, which is decided; at most so many.

    Gives them, and the offset up to which everything has been looked at.
    """

    topic: str
    start: int
    end: int
    records_max: int


@dataclass(frozen=True, slots=True)
class AppendLate:
    """Copies of late records are appended to topics inside the round, in order, each with where it comes from.

    If one of them is refused, gives the reason, and the round is empty again.
    """

    source: str
    items: Sequence[tuple[str, LateRecord]]


@dataclass(frozen=True, slots=True)
class FindLate:
    """Whether a copy of the record at ``offset`` of a topic is committed in one of ``targets``, from offsets on.

    Gives None where that can not be told now, because a native transaction is open there.
    """

    source: str
    offset: int
    targets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Now:
    """The leader's clock, ms since 1970, after everything before; a procedure may have waited since it began."""


@dataclass(frozen=True, slots=True)
class DiskBytes:
    """How many bytes each topic has on the disk of its leader; those that can not be told now are left out."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupCommits:
    """What each consumer group has committed, by topic; those of which that can not be told now are left out."""

    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadCompacted:
    """The latest committed value of each key of a compacted topic of one partition; deleted keys are left out."""

    topic: str


@dataclass(frozen=True, slots=True)
class ReadRecords:
    """The committed values at offsets of a topic of one partition, None where there is none (any more)."""

    topic: str
    offsets: tuple[int, ...]


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
class TakeIdentity:
    """The group's Kafka transactional ids are ours: an older leader's are fenced, what it left open is aborted."""

    group: GroupName


@dataclass(frozen=True, slots=True)
class ReadCommitLog:
    """The commit log from ``start`` up to its end, committed records only; gives a :class:`LogSummary`."""

    topic: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class ReadOrders:
    """The highest number that the last ``records`` of a commit log commit, by connection and epoch of its session."""

    topic: str
    records: int


STUMBLED = "UNKNOWN_SERVER_ERROR"
"""Code of a refusal by a broker that stumbled over a batch: it may be malformed, or the broker may be ill."""


class Refused(Exception):
    """Thrown into a procedure in place of an effect's result: it was refused for good, and is of no use if repeated.

    Nothing of the effect will ever be visible. If it was part of a round, the round is empty again, and the procedure
    may begin it anew without what was refused. A procedure that does not catch it ends the term of its leader.

    An effect of which nobody knows whether it was carried out is something else: it ends the term, always.

    Attributes:
        effect: What was refused.
        reason: Why, as a sentence for people.
        code: Kafka's name of the error, such as ``MESSAGE_TOO_LARGE``, or a code of :mod:`rollbridge.errors`.
        topic: Topic that was refused; None if it was no single one.
        places: Of a :class:`MergeFrames` or :class:`AppendTogether`, places of the items one or more of which are at
            fault for what is in them; empty if their content is not the reason.
    """

    def __init__(
        self, effect: Effect, reason: str, *, code: str, topic: str | None = None, places: Sequence[int] = ()
    ) -> None:
        super().__init__(f"{type(effect).__name__} was refused: {reason}")
        self.effect = effect
        self.reason = reason
        self.code = code
        self.topic = topic
        self.places = tuple(places)

    @property
    def by(self) -> str:
        """Who has refused it, as messages say it."""
        return "ZooKeeper" if isinstance(self.effect, ON_ZOOKEEPER) else "Kafka"


Effect = (
    ReadNodes
    | ReadCounter
    | ReadChildren
    | EnsureNodes
    | Write
    | CreateTopics
    | MendTopics
    | DeleteTopics
    | TopicIds
    | Seal
    | LookForObstacles
    | Closed
    | EndForeign
    | MergeFrames
    | AppendControl
    | AppendTogether
    | SendOffsets
    | Look
    | AbortRound
    | AppendMessages
    | CommitRound
    | EndOffsets
    | StartOffsets
    | DeleteRecords
    | StableEnds
    | ReadLate
    | AppendLate
    | FindLate
    | Now
    | DiskBytes
    | GroupCommits
    | ReadCompacted
    | ReadRecords
    | TakeIdentity
    | ReadCommitLog
    | ReadOrders
)

ROUND = (MergeFrames, AppendControl, AppendTogether, AppendMessages, SendOffsets, CommitRound)
"""Effects that are part of a round; when one of them is refused, nothing of the round can be committed."""
