"""Changes in progress: scales, rolling commits and faults of streams, as recorded in ZooKeeper.

A leader records a change before its first step, so the next leader finishes exactly this one. Pure.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Final, Self

from rollbridge.base.errors import NewerFormatError
from rollbridge.base.ids import OWNER_PART, SegmentId, TransactionId
from rollbridge.base.mapper import NodeRecord, StoredAs
from rollbridge.metadata import paths
from rollbridge.stream.keyspace import KeyRange
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_schemas import Datum

_SCALE: Final = "scale-"
NODE_BYTES: Final = 1_000
"""Upper bound on a ``committing`` node without rolls and ids, with its path and a root path."""
ROLL_BYTES: Final = 170
"""Upper bound on a roll in it, without the name of its stream."""
ID_BYTES: Final = 52
"""Upper bound on a transaction in it: its id and the part of its owner."""
NARROWED_BYTES: Final = 60
"""Upper bound on what says which segments of a stream a roll is about, without these and the name of the stream."""
NUMBER_BYTES: Final = 12
"""Upper bound on the number of a segment in a roll."""
PREPARED_BYTES: Final = 60
"""Upper bound on a prepared segment in a roll."""


@dataclass(frozen=True, slots=True)
class Roll:
    """The two epochs that a rolling commit gives one stream.

    Attributes:
        numbers: Inactive segments of the transactions' epoch that are written to; without any the whole stream is
            rolled, as by leaders of earlier versions.
        prepared: Segments that hold the records already, by number of the segment that each replaces.
    """

    stream: str
    transaction_epoch: int
    active_epoch: int
    duplicate_epoch: int
    new_active_epoch: int
    numbers: tuple[int, ...] = ()
    prepared: Mapping[int, SegmentId] = field(default_factory=dict)

    @property
    def node_bytes(self) -> int:
        """Upper bound on what it takes in a ``committing`` node."""
        own = ROLL_BYTES + len(self.stream)
        if not self.numbers and not self.prepared:
            return own
        narrowed = NARROWED_BYTES + len(self.stream)
        return own + narrowed + NUMBER_BYTES * len(self.numbers) + PREPARED_BYTES * len(self.prepared)


def _write_rolls(committing: CommittingTransactions) -> Datum:
    """Return the fields of a record that hold rolls: what earlier versions know of each, and what is new."""
    return {
        "rolls": [
            {
                "stream": roll.stream,
                "transaction_epoch": roll.transaction_epoch,
                "active_epoch": roll.active_epoch,
                "duplicate_epoch": roll.duplicate_epoch,
                "new_active_epoch": roll.new_active_epoch,
            }
            for roll in committing.rolls
        ],
        "narrowed": [
            {
                "stream": roll.stream,
                "numbers": list(roll.numbers),
                "prepared": [{"number": number, "segment": int(item)} for number, item in roll.prepared.items()],
            }
            for roll in committing.rolls
            if roll.numbers or roll.prepared
        ],
    }


def _read_rolls(datum: Datum) -> tuple[Roll, ...]:
    """Return the rolls in a record. The inverse."""
    narrowed = {item["stream"]: item for item in datum["narrowed"]}
    nothing: Datum = {"numbers": (), "prepared": ()}
    return tuple(
        Roll(
            **item,
            numbers=tuple(own["numbers"]),
            prepared={one["number"]: SegmentId.from_int(one["segment"]) for one in own["prepared"]},
        )
        for item in datum["rolls"]
        for own in [narrowed.get(item["stream"], nothing)]
    )


@dataclass(frozen=True, slots=True)
class CommittingTransactions(NodeRecord):
    """A rolling commit that is being carried out; ids in commit order, and the part of each one's owner."""

    SCHEMA: ClassVar = "committing"

    transactions: tuple[TransactionId, ...]
    rolls: Annotated[tuple[Roll, ...], StoredAs(write=_write_rolls, read=_read_rolls)]
    created_ms: int
    controller_epoch: int
    owners: tuple[int, ...] = ()

    @property
    def is_prepared(self) -> bool:
        """Return whether it merges a large transaction, whose records are in prepared segments."""
        return any(roll.prepared for roll in self.rolls)

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(roll.stream for roll in self.rolls)

    @property
    def title(self) -> str:
        """A name that no other work of its group has: epochs are never used again."""
        first = self.rolls[0]
        return f"roll-{StreamName.parse(first.stream).stream}-{first.duplicate_epoch}"

    def with_only(self, kept: Container[bytes]) -> Self:
        """Return the same with only those transactions whose 16 bytes of an id are among ``kept``."""
        owners = self.owner_parts()
        left = tuple(item for item in self.transactions if item.bytes in kept)
        return replace(self, transactions=left, owners=tuple(owners[item.bytes] for item in left))

    def without(self, streams: Container[str]) -> Self:
        """Return the same without some of its streams."""
        return replace(self, rolls=tuple(roll for roll in self.rolls if roll.stream not in streams))

    def owner_parts(self) -> dict[bytes, int]:
        """Return the part of the owner whose commit was decided on, by the 16 bytes of the id."""
        owners = self.owners or (OWNER_PART,) * len(self.transactions)
        return {item.bytes: part for item, part in zip(self.transactions, owners, strict=False)}


@dataclass(frozen=True, slots=True)
class EpochTransition(NodeRecord):
    """A scale that is being carried out; its ``request`` is empty once that has been answered."""

    SCHEMA: ClassVar = "scaling"

    stream: StreamName
    request: str
    epoch: int
    seal: tuple[int, ...]
    ranges: tuple[KeyRange, ...]
    created_ms: int
    controller_epoch: int
    abort_foreign: bool = False
    reason: str = ""
    """Why a leader scales the stream by its load; empty if it was asked to."""

    @property
    def streams(self) -> tuple[str, ...]:
        return (str(self.stream),)

    @property
    def title(self) -> str:
        """A name that no other work of its group has: epochs are never used again."""
        return f"{_SCALE}{self.stream.stream}-{self.epoch}"


StreamChange = EpochTransition | CommittingTransactions
"""Change that may have to wait, half done, for native transactions of other producers."""


def work_from_json(title: str, raw: bytes) -> StreamChange:
    """Parse a node of that title; raise CorruptDataError."""
    return EpochTransition.from_json(raw) if title.startswith(_SCALE) else CommittingTransactions.from_json(raw)


def works_of(nodes: Mapping[str, bytes], group: GroupName) -> Iterator[tuple[str, StreamChange]]:
    """Return what is under way in a group, and what waits half done, of these nodes; raises CorruptDataError."""
    if paths.scaling(group) in nodes:
        yield paths.scaling(group), EpochTransition.from_json(nodes[paths.scaling(group)])
    if paths.committing(group) in nodes:
        yield paths.committing(group), CommittingTransactions.from_json(nodes[paths.committing(group)])
    prefix = f"{paths.pending_changes(group)}/"
    for path in sorted(path for path in nodes if path.startswith(prefix)):
        yield path, work_from_json(path.removeprefix(prefix), nodes[path])


# Large transactions.


@dataclass(frozen=True, slots=True)
class PreparedStream:
    """Prepared segments of one stream, by number of the segment that each replaces."""

    stream: str
    segments: Mapping[int, SegmentId]


@dataclass(frozen=True, slots=True)
class Merging(NodeRecord):
    """A large transaction that is being merged into segments which are not read yet."""

    SCHEMA: ClassVar = "merging"

    transaction: TransactionId
    streams: tuple[PreparedStream, ...]
    created_ms: int
    controller_epoch: int


# Error state of a stream.

TOPIC_DELETED: Final = "topic-deleted"
TOPIC_RECREATED: Final = "topic-recreated"
TOPIC_CLOSED: Final = "topic-closed"
"""The adopted topic was changed by its owner."""
WATCHED: Final = frozenset({TOPIC_DELETED, TOPIC_RECREATED, TOPIC_CLOSED, "topic-grown"})
"""Faults of streams that come and go with what a look at the adopted topic says; nothing else is tried. The last one is
of releases that took in no partitions, and goes with the first look."""
STREAM_MOVED: Final = "stream-moved"
"""Code of a stream that an earlier version has moved into another group; nothing lifts it but the stream's deletion."""
BUFFER_LOST: Final = "buffer-lost"
"""Code of a stream whose transaction buffer was deleted, or has another topic in its place."""
BUFFER_UNREADABLE: Final = "buffer-unreadable"
"""Code of a stream whose transaction buffer cannot be read: a right, a partition leader or a valid batch is missing."""
METADATA_UNREADABLE: Final = "metadata-unreadable"
"""Code of a stream of which a ZooKeeper node cannot be read: it holds something else, or a right is missing."""
FORMAT_NEWER: Final = NewerFormatError.code
"""Code of a stream of which a ZooKeeper node was written by a newer release."""
UNLED: Final = frozenset({BUFFER_LOST, BUFFER_UNREADABLE, METADATA_UNREADABLE, FORMAT_NEWER, STREAM_MOVED})
"""Faults with which a stream is not led, while the rest of its group is; it can be deleted."""
LOST: Final = frozenset({TOPIC_DELETED, TOPIC_RECREATED})
"""Faults of streams whose adopted topic is not there any more: what is committed ends as aborted, and never waits."""
SUSPENDED: Final = "native-transaction-open"
"""Code of a stream whose segments are closed and wait for the native transactions that are open on them to end."""


@dataclass(frozen=True, slots=True)
class StreamFault(NodeRecord):
    """Fault that keeps the transactions of one stream from being merged, while all others proceed.

    Everything that tells people of a fault words it by :attr:`effect`, so that none says the opposite of another.

    Attributes:
        reason: Sentence for people.
        code: Kafka's name of the error, such as ``TOPIC_AUTHORIZATION_FAILED``.
        topic: Refused topic; empty if the fault concerns no single one.
        since_ms: Time of the first failure, ms since 1970.
    """

    SCHEMA: ClassVar = "stream_fault"

    reason: str
    code: str
    topic: str
    since_ms: int

    @property
    def is_lost(self) -> bool:
        """Return True if the adopted topic was deleted or replaced."""
        return self.code in LOST

    @property
    def effect(self) -> str:
        """Return what becomes of the stream's transactions, for people; the reason follows."""
        if self.is_lost:
            return "its commits end as aborted"
        return "it is not led" if self.code in UNLED else "its transactions wait"


def moved_fault(stream: StreamName, since_ms: int = 0) -> StreamFault:
    """Return the error state of a stream that an earlier version has moved into another group, or has begun to."""
    reason = (
        f"stream {stream} was moved into another transaction group, which this version does not know: its records can "
        "be read, and it takes no transactions; copy what is needed, and delete it"
    )
    return StreamFault(reason, STREAM_MOVED, "", since_ms)
