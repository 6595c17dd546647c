"""What clients note down, as values and as lines of JSON, what was broken, and what stands there in the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from rollbridge.base.ids import SegmentId
from rollbridge.commitlog.control import ControlRecord
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeySpace
from rollbridge.stream.names import Partition

Line = dict[str, Any]


class Answer(StrEnum):
    """What a client was told."""

    OK = "ok"
    FAILED = "failed"
    """Nothing was written, and never will be."""
    UNKNOWN = "unknown"
    """Nobody can tell, or the client died before it was told."""


FOREIGN = "foreign:"
"""What the values of records begin with that no client of ours has written."""


class Kind(StrEnum):
    """How something was written."""

    TRANSACTION = "transaction"
    PLAIN = "plain"
    CONDITIONAL = "conditional"
    UPDATE = "update"
    """Of a state that several processes share."""
    NATIVE = "native"
    """By a producer that knows nothing of us, in a native transaction or, with sequence numbers, in none."""
    UNSEQUENCED = "unsequenced"
    """By a producer that knows nothing of us, without sequence numbers: Kafka may hold a record of it twice.

    A leader that loses its partition with an append that its followers have refuses it, and librdkafka, which takes
    that for not written (``rd_kafka_handle_Produce_error``), sends it again to the next one, whatever ``retries`` says.
    """
    GATEWAY = "gateway"
    """By a producer that knows nothing of us, in what it takes for a native transaction, through a gateway."""


@dataclass(frozen=True, slots=True)
class Write:
    """One record that a client wrote.

    Attributes:
        value: Unlike that of any other write.
        place: Where the client was told that it stands, as text of a DLSN.
    """

    stream: str
    key: str
    value: str
    place: str | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that a client did.

    Attributes:
        client: Its name; a client does one thing after the other.
        kind: How.
        name: Id of the transaction, or a name that is unlike any other.
        wish: ``commit`` or ``abort``; a client that dies leaves what it had not asked for yet as ``abort``.
        writes: In the order in which they were made.
        asked, answered: When the end was asked for and answered, in ns of one clock; ``FOREVER`` without an answer.
        answer: What the client was told.
        position: Of the commit record, if it was told.
        expected: For conditional writes: sequence id of the record that is expected to be the last of the key; -1 for
            none.
        producer: Through a gateway: the transactional id, which a client has from another one that was killed.
        offset: Through a gateway: what the producer's consumer group is to have committed with it; None for nothing.
        fenced: Whether a newer producer of its id had been started before the end was asked for.
    """

    client: str
    kind: Kind
    name: str
    wish: str
    writes: tuple[Write, ...]
    asked: int
    answered: int
    answer: Answer
    position: int | None = None
    expected: int | None = None
    producer: str = ""
    offset: int | None = None
    fenced: bool = False

    def to_line(self) -> Line:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_line(cls, line: Line) -> Operation:
        """The inverse of :meth:`to_line`."""
        writes = tuple(Write(**item) for item in line["writes"])
        return cls(**{**line, "kind": Kind(line["kind"]), "answer": Answer(line["answer"]), "writes": writes})


@dataclass(frozen=True, slots=True)
class Call:
    """A call with a time-out.

    Attributes:
        client: Who called.
        name: What was called.
        timeout_s: What it was given.
        began, ended: When it was called and when it returned or raised, in ns of the clock of operations.
    """

    client: str
    name: str
    timeout_s: float
    began: int
    ended: int

    def to_line(self) -> Line:
        """As JSON has it."""
        return {"call": asdict(self)}


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a producer without a rival was refused, whose transactions may stay open for longer than any history.

    Attributes:
        client: Who asked.
        what: What it asked for.
        code: Name of the error.
        at: When, in ns of the clock of operations.
    """

    client: str
    what: str
    code: str
    at: int

    def to_line(self) -> Line:
        """As JSON has it."""
        return {"refusal": asdict(self)}


def read_refusals(lines: Iterable[Line]) -> Iterator[Refusal]:
    """What one client was refused, in order."""
    return (Refusal(**line["refusal"]) for line in lines if "refusal" in line)


@dataclass(frozen=True, slots=True)
class Begun:
    """A transaction that stays open; what stands here was flushed, so a later session of the client may commit it."""

    transaction: str
    writes: tuple[Write, ...]

    def to_line(self) -> Line:
        """As JSON has it."""
        return {"begun": asdict(self)}


@dataclass(frozen=True, slots=True)
class Handed:
    """A record that a member of a consumer group was handed, at some time in ns of the clock of operations."""

    stream: str
    key: str
    value: str
    at: int
    group: str = "members"

    def to_line(self) -> Line:
        """As JSON has it."""
        return {"handed": asdict(self)}


@dataclass(frozen=True, slots=True)
class Listed:
    """A committed transaction that a reader of whole transactions was given.

    Attributes:
        reader: Who reads.
        at: Its offset on the commit log.
        transaction: Its id.
        values: Those of its records, in the order in which they were given; None if they were not asked for.
    """

    reader: str
    at: int
    transaction: str
    values: tuple[str, ...] | None

    def to_line(self) -> Line:
        """As JSON has it."""
        return {"listed": asdict(self)}


def read_listed(lines: Iterable[Line]) -> Iterator[Listed]:
    """What one reader of whole transactions was given, in order."""
    for item in (line["listed"] for line in lines if "listed" in line):
        values = None if item["values"] is None else tuple(item["values"])
        yield Listed(**{**item, "values": values})


def read_handed(lines: Iterable[Line]) -> Iterator[Handed]:
    """What one member was handed, in order."""
    return (Handed(**line["handed"]) for line in lines if "handed" in line)


def read_operations(lines: Iterable[Line]) -> Iterator[Operation]:
    """What one client did: each thing is noted when it is asked for, as unknown, and again when it is answered."""
    found: dict[str, Operation] = {}
    for line in lines:
        if "wish" in line:
            operation = Operation.from_line(line)
            found[operation.name] = operation
    yield from found.values()


def read_calls(lines: Iterable[Line]) -> Iterator[Call]:
    """The calls of one client that took longer than they were given."""
    return (Call(**line["call"]) for line in lines if "call" in line)


def read_begun(lines: Iterable[Line]) -> dict[str, tuple[Write, ...]]:
    """What one client had flushed of transactions of whose end it had not asked yet."""
    found: dict[str, tuple[Write, ...]] = {}
    for line in lines:
        if "begun" in line:
            found[line["begun"]["transaction"]] = tuple(Write(**item) for item in line["begun"]["writes"])
        elif "wish" in line:
            found.pop(line["name"], None)
    return found


AT_RANDOM: Final = "at random"
"""The reason with which clients abort what they have begun, as the commit log gives it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A committed record, as a plain ``read_committed`` consumer sees it."""

    offset: int
    key: str
    value: str
    transaction: str | None = None
    local_sequence: int = 0


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream in the end.

    Attributes:
        history: Its epochs.
        rows: By segment, in order of offset.
        ends: Offset behind the last record of each segment, committed or not; markers may follow, also in sealed ones.
        keys: Where its keys lie; where the partitions of the topic have them, if it has adopted one.
        places: Where its segments lie in Kafka; empty where nobody asks.
    """

    history: EpochHistory
    rows: Mapping[SegmentId, Sequence[Row]]
    ends: Mapping[SegmentId, int]
    keys: KeySpace = field(default_factory=KeySpace)
    places: Mapping[SegmentId, Partition] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one reader of a stream was handed out, in order."""

    reader: str
    stream: str
    rows: tuple[tuple[SegmentId, int, str], ...]
    """Segment, offset and value of each record."""
    times: tuple[int, ...] = ()
    """When each was handed out, in ns of the clock of operations, of a stream that is written to all the time."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A stream that has lost records: the oldest by truncation or retention, or the newest, as its logs became shorter.

    Attributes:
        stream: Its name.
        operations: All that was ever done to it, but for records of strangers, see ``FOREIGN``.
        state: What is left.
        starts: By segment that is left, the first offset that truncation has kept; None where logs became shorter, so
            that nobody knows what is lost.
        readings: What readers were handed; each began somewhere, and ended at the latest when it was told of a gap.
    """

    stream: str
    operations: Sequence[Operation]
    state: StreamState
    starts: Mapping[SegmentId, int] | None
    readings: Sequence[Reading] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A state that several processes share and compact.

    Attributes:
        state: What stands in it in the end, an update after the other.
        operations: What they did to it.
        read: What a consumer group was handed for which the stream waits; None without one.
        loses_end: Whether its log lost its end, so that updates may be gone.
    """

    state: Sequence[str]
    operations: Sequence[Operation]
    read: Sequence[str] | None = None
    loses_end: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which something was broken.

    Attributes:
        fault: What.
        began, ended: In ns of the clock of operations.
        bound_s: Within which time somebody's transaction must be committed again and again meanwhile; None where the
            fault stops everybody.
        paused: The client that stood still meanwhile, if that is what was broken.
    """

    fault: str
    began: int
    ended: int
    bound_s: float | None = None
    paused: str | None = None


@dataclass(frozen=True, slots=True)
class Passing:
    """A stream that was deleted and made anew under its name, as its last life is; and all that was ever done to it.

    Attributes:
        since: Of one that has adopted a topic, when the topic was made that it has now: what was asked for since then
            is there in whatever life of the stream. In ns of the clock of operations.
    """

    stream: str
    operations: Sequence[Operation]
    state: StreamState
    since: int | None = None


@dataclass(frozen=True, slots=True)
class History:
    """Everything that is known of a run.

    Attributes:
        operations: What clients did.
        readings: What readers saw.
        streams: What stands in the streams.
        log: The commit log: offset and record.
        windows: What was broken, and when.
        calls: Calls that took longer than they were given.
        deaths: Processes that ended by themselves, a sentence each.
        led_outdated: Leaders that did not notice that ZooKeeper had been set back, a sentence each.
        handed: What a consumer group of all streams was handed; None without one.
        copied: Values of the copies that a consumer group has made of one stream, in transactions with its offsets:
            the stream, and the values as they were before. None without one.
        passing: Streams with several lives.
        shrunk: Streams that have lost records.
        kept: States that several processes share.
        listed: What readers of whole transactions were given, from the beginning of the commit log.
        refusals: What producers at gateways were refused.
        offsets: By transactional id, what the consumer group of a producer at a gateway has committed; None for
            nothing.
        busy: Streams to which somebody commits all the time who is left alone, so that their readers never wait.
        clashes: Times at which the name of a topic meant something else at a gateway than at the brokers, a sentence
            each.
    """

    operations: Sequence[Operation]
    streams: Mapping[str, StreamState]
    log: Sequence[tuple[int, ControlRecord]]
    readings: Sequence[Reading] = field(default=())
    windows: Sequence[Window] = field(default=())
    calls: Sequence[Call] = field(default=())
    deaths: Sequence[str] = field(default=())
    led_outdated: Sequence[str] = field(default=())
    handed: Sequence[Handed] | None = None
    copied: tuple[str, Sequence[str]] | None = None
    passing: Sequence[Passing] = ()
    shrunk: Sequence[Shrunk] = ()
    kept: Sequence[Kept] = ()
    listed: Sequence[Listed] = ()
    refusals: Sequence[Refusal] = ()
    offsets: Mapping[str, int | None] = field(default_factory=dict)
    busy: Sequence[str] = ()
    clashes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """A promise that a history breaks."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
