"""Makers of histories, right and wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from integration_tests.history.events import (
    AT_RANDOM,
    FOREIGN,
    Answer,
    Handed,
    History,
    Kept,
    Kind,
    Listed,
    Operation,
    Passing,
    Reading,
    Row,
    Shrunk,
    StreamState,
    Write,
)
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.base.sn import DLSN
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeySpace, even_ranges, key_space

ORDERS, PAYMENTS = "s/orders", "s/payments"


ADOPTED = "s/adopted"
"""Three partitions of a topic, to which native producers write."""


SPACES = {ORDERS: KeySpace(), PAYMENTS: KeySpace(), ADOPTED: key_space("murmur2", 3)}


KEYS = [
    next(
        key for key in (f"{half}-{number}" for number in range(99)) if (KeySpace().position(key.encode()) < 0.5) == low
    )
    for half, low in (("low", True), ("high", False))
]


class Bench:
    """Puts a history together in which everything is right."""

    def __init__(self) -> None:
        self.histories = {
            name: EpochHistory.create(even_ranges(space.partitions or 2), 0) for name, space in SPACES.items()
        }
        self.rows: dict[str, dict[SegmentId, list[Row]]] = {name: {} for name in SPACES}
        self.ends: dict[tuple[str, SegmentId], int] = {}
        self.operations: list[Operation] = []
        self.log: list[tuple[int, ControlRecord]] = []
        self.clock = 0

    def put(self, stream: str, key: str, value: str, transaction: str | None = None, local: int = 0) -> Write:
        """A record becomes visible in the active segment."""
        segment = self.histories[stream].active.segment_at(SPACES[stream].position(key.encode())).id
        offset = self.ends.get((stream, segment), 0)
        self.ends[stream, segment] = offset + 1
        self.rows[stream].setdefault(segment, []).append(Row(offset, key, value, transaction, local))
        return Write(stream, key, value, str(DLSN.of(segment, offset, local)))

    def did(self, kind: Kind, name: str, *writes: Write, wish: str = "commit", expected: int | None = None) -> None:
        """A client did it, and was told so."""
        self.clock += 10
        answer = Operation("c", kind, name, wish, writes, self.clock, self.clock + 5, Answer.OK, None, expected)
        self.operations.append(answer)

    def transaction(self, number: int, *writes: tuple[str, str, str], wish: str = "commit") -> None:
        """A whole transaction, with its record on the commit log."""
        identifier = TransactionId.of(0, number)
        made = [
            self.put(stream, key, value, str(identifier), place) if wish == "commit" else Write(stream, key, value)
            for place, (stream, key, value) in enumerate(writes)
        ]
        kind = ControlKind.COMMIT if wish == "commit" else ControlKind.ABORT
        reason = "" if wish == "commit" else AT_RANDOM
        record = ControlRecord(identifier, kind, "c", 0, 0, 1, records=len(made), reason=reason)
        self.log.append((len(self.log), record))
        self.did(Kind.TRANSACTION, str(identifier), *made, wish=wish)

    def scale(self, stream: str) -> None:
        """Both segments are replaced by two others."""
        history = self.histories[stream]
        numbers = [item.id.number for item in history.active.segments]
        record = history.plan_scale(numbers, even_ranges(2), 0)
        ends = {item.id: self.ends.get((stream, item.id), 0) for item in history.active.segments}
        self.histories[stream] = history.with_records(replace(record, sealed_ends=ends))

    def conditional(self, key: str, value: str) -> None:
        """A conditional write that knew the last record of its key."""
        history = self.histories[ORDERS]
        bases = history.graph.sequence_bases
        before = [
            bases[segment] + row.offset
            for segment, rows in sorted(self.rows[ORDERS].items(), key=lambda item: item[0].epoch)
            for row in rows
            if row.key == key
        ]
        self.did(Kind.CONDITIONAL, value, self.put(ORDERS, key, value), expected=before[-1] if before else -1)

    def done(self) -> History:
        """What is known in the end, with a reader that has read everything."""
        streams = {
            name: StreamState(
                history,
                {segment: tuple(self.rows[name].get(segment, ())) for segment in history.segments()},
                {segment: self.ends.get((name, segment), 0) for segment in history.segments()},
                SPACES[name],
            )
            for name, history in self.histories.items()
        }
        readings = [
            Reading(
                f"reader of {name}",
                name,
                tuple(
                    (segment, row.offset, row.value)
                    for segment in sorted(state.rows, key=lambda item: item.epoch)
                    for row in state.rows[segment]
                ),
            )
            for name, state in streams.items()
        ]
        handed = [
            Handed(name, row.key, row.value, number)
            for name, state in streams.items()
            for number, row in enumerate(
                row for segment in sorted(state.rows, key=lambda item: item.epoch) for row in state.rows[segment]
            )
        ]
        copied = [row.value for rows in streams[ORDERS].rows.values() for row in rows]
        # What was done in an earlier life stands nowhere any more.
        gone = Operation("g", Kind.PLAIN, "gone", "commit", (Write(ORDERS, "k", "gone", "9-0:0:0"),), 1, 2, Answer.OK)
        passing = [Passing(ORDERS, [*self.operations, gone], streams[ORDERS]), owned()]
        return History(
            self.operations,
            streams,
            self.log,
            readings,
            handed=[*handed, *(replace(item, group="namers") for item in handed)],
            copied=(ORDERS, copied),
            passing=passing,
            shrunk=[trimmed(), replace(trimmed(), starts=None, readings=())],
            kept=[updates(), lossy_updates()],
            listed=[*self.listing("l"), *self.listing("m")],
        )

    def listing(self, reader: str) -> list[Listed]:
        """All that is committed, as a reader of whole transactions is given it; it has not asked for all records."""
        written = {item.name: tuple(write.value for write in item.writes) for item in self.operations}
        committed = [(at, str(record.transaction)) for at, record in self.log if record.kind is ControlKind.COMMIT]
        return [
            Listed(reader, at, name, None if number == 1 else written.get(name))
            for number, (at, name) in enumerate(committed)
        ]


OWNED = "s/owned"


def owned() -> Passing:
    """A stream over a topic that was made anew once, and then released and adopted again."""

    def did(value: str, place: str | None, asked: int) -> Operation:
        write = Write(OWNED, "k", value, place)
        return Operation("o", Kind.NATIVE, value, "commit", (write,), asked, asked + 1, Answer.OK)

    history = EpochHistory.create(even_ranges(1), 0, 7, 0, 0)
    (segment,) = history.segments()
    rows = [Row(0, "k", "o1"), Row(1, "k", "o2"), Row(2, "k", "o3")]
    operations = [
        did("o0", "0-0:0:0", 10),  # in the topic before this one
        did("o1", str(DLSN.of(SegmentId.of(0, 3), 0, 0)), 20),  # in an earlier life of the stream
        did("o2", None, 30),  # nobody was told where
        did("o3", str(DLSN.of(segment, 2, 0)), 40),
    ]
    return Passing(OWNED, operations, StreamState(history, {segment: rows}, {segment: 3}), since=15)


TRIMMED = "s/trimmed"


ONLY = SegmentId.of(0, 0)


def trimmed() -> Shrunk:
    """A stream whose first three records were truncated, and what was done to it before and after."""

    def did(value: str, offset: int, key: str = "k", expected: int | None = None) -> Operation:
        kind = Kind.PLAIN if expected is None else Kind.CONDITIONAL
        write = Write(TRIMMED, key, value, str(DLSN.of(ONLY, offset, 0)))
        return Operation("t", kind, value, "commit", (write,), offset, offset + 1, Answer.OK, expected=expected)

    operations = [
        did("t0", 0),
        did("t1", 1, expected=0),
        did("t2", 2, key="other"),
        did("t3", 3, expected=1),
        did("t5", 5, expected=4),
        did("t6", 6, key="other"),
    ]
    rows = [
        Row(3, "k", "t3"),
        Row(4, "k", FOREIGN + "x"),
        Row(5, "k", "t5"),
        Row(6, "other", "t6"),
        Row(7, "other", FOREIGN + "x"),
    ]
    read = tuple((ONLY, row.offset, row.value) for row in rows)
    readings = [
        Reading("f, run 0", TRIMMED, ((ONLY, 0, "t0"), (ONLY, 1, "t1"))),
        Reading("f, run 1", TRIMMED, read),
    ]
    state = StreamState(EpochHistory.create(even_ranges(1), 0), {ONLY: rows}, {ONLY: 8})
    return Shrunk(TRIMMED, operations, state, {ONLY: 3}, readings)


def update_of(client: str, value: str, asked: int, answer: Answer = Answer.OK) -> Operation:
    write = Write("s/state", "state", value)
    return Operation(client, Kind.UPDATE, value, "commit", (write,), asked, asked + 1, answer)


def updates() -> Kept:
    """A state that several clients share, what they did to it, and what a group has read of it."""
    operations = [
        update_of("a", "a1", 1),
        update_of("b", "b1", 2),
        update_of("a", "a2", 3),
        update_of("a", "refused", 4, Answer.FAILED),
        update_of("b", "b2", 5, Answer.UNKNOWN),
        update_of("b", "b3", 6, Answer.UNKNOWN),
    ]
    return Kept(["a1", "b1", "a2", "b2"], operations, read=["a1", "b1", "b1", "a2", "b2"])


def lossy_updates() -> Kept:
    """A state whose log lost its end between the third update and the fourth."""
    operations = [update_of("a", f"a{number}", number) for number in (1, 2, 3, 4)]
    return Kept(["a1", "a4"], operations, loses_end=True)


def with_rows(history: History, stream: str, change: Callable[[list[Row]], list[Row]], place: int = 0) -> History:
    """The same with other records in one segment of a stream, in the log and for its reader."""
    state = history.streams[stream]
    segment = list(state.rows)[place]
    rows = {**state.rows, segment: change(list(state.rows[segment]))}
    return replace(history, streams={**history.streams, stream: replace(state, rows=rows)}, readings=())


def of_value(history: History, value: str) -> tuple[str, int]:
    """Stream, and place of the segment among its segments, in which a value stands."""
    for stream, state in history.streams.items():
        for place, rows in enumerate(state.rows.values()):
            if any(row.value == value for row in rows):
                return stream, place
    raise AssertionError(value)


def drop(history: History, value: str) -> History:
    stream, place = of_value(history, value)
    return with_rows(history, stream, lambda rows: [row for row in rows if row.value != value], place)


def swap(history: History, one: str, other: str) -> History:
    """Two records of a segment change places, and nobody was told where they stand."""
    stream, place = of_value(history, one)

    def change(rows: list[Row]) -> list[Row]:
        where = {row.value: number for number, row in enumerate(rows)}
        first, second = rows[where[one]], rows[where[other]]
        rows[where[one]] = replace(second, offset=first.offset)
        rows[where[other]] = replace(first, offset=second.offset)
        return rows

    return untold(with_rows(history, stream, change, place))


def untold(history: History) -> History:
    return replace(
        history,
        operations=[
            replace(item, writes=tuple(replace(write, place=None) for write in item.writes))
            for item in history.operations
        ],
    )


def retold(history: History, value: str, **changes: object) -> History:
    """The operation that wrote a value ended differently for its client."""
    operations = [
        replace(item, **changes) if any(write.value == value for write in item.writes) else item  # type: ignore[arg-type]
        for item in history.operations
    ]
    return replace(history, operations=operations)


def flipped(history: History, place: int) -> History:
    log = list(history.log)
    position, record = log[place]
    kind = ControlKind.ABORT if record.kind is ControlKind.COMMIT else ControlKind.COMMIT
    log[place] = (position, record._replace(kind=kind))
    return replace(history, log=log)


def gone(history: History, value: str) -> History:
    """A record over a topic with an owner is not there."""
    passing = history.passing[1]
    rows = {segment: [row for row in found if row.value != value] for segment, found in passing.state.rows.items()}
    return replace(history, passing=[history.passing[0], replace(passing, state=replace(passing.state, rows=rows))])


def handed(history: History, change: Callable[[list[Handed]], object]) -> History:
    assert history.handed is not None
    items = list(history.handed)
    change(items)
    return replace(history, handed=items)


def copied(history: History, change: Callable[[list[str]], object]) -> History:
    assert history.copied is not None
    values = list(history.copied[1])
    change(values)
    return replace(history, copied=(ORDERS, values))
