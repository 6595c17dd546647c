"""The checks of histories are themselves checked: a good history passes, and each way to spoil it is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from integration_tests.history.checks import find_faults
from integration_tests.history.events import (
    FOREIGN,
    Answer,
    Begun,
    Call,
    History,
    Kind,
    Listed,
    Operation,
    Passing,
    Row,
    Window,
    Write,
    read_begun,
    read_calls,
    read_listed,
    read_operations,
)
from integration_tests.history_makers import (
    ADOPTED,
    KEYS,
    ONLY,
    ORDERS,
    OWNED,
    PAYMENTS,
    TRIMMED,
    Bench,
    copied,
    drop,
    flipped,
    gone,
    handed,
    of_value,
    retold,
    swap,
    untold,
    with_rows,
)
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.base.sn import DLSN
from rollbridge.commitlog.control import EXPIRED
from rollbridge.stream.epochs import EpochHistory


def good() -> History:
    bench = Bench()
    low, high = KEYS
    for key in KEYS:
        bench.did(Kind.PLAIN, f"plain-{key}", bench.put(ORDERS, key, f"plain-{key}"))
    bench.transaction(1, (ORDERS, low, "1a"), (ORDERS, low, "1b"), (ORDERS, high, "1c"), (PAYMENTS, low, "1d"))
    bench.transaction(2, (ORDERS, low, "never"), wish="abort")
    bench.conditional("register", "r1")
    bench.conditional("register", "r2")
    bench.scale(ORDERS)
    bench.conditional("register", "r3")
    bench.transaction(3, (ORDERS, low, "3a"), (ORDERS, high, "3b"), (PAYMENTS, low, "3c"))
    bench.transaction(4, (ORDERS, low, "4a"), (PAYMENTS, low, "4b"))
    bench.did(Kind.PLAIN, "last", bench.put(ORDERS, low, "last"))
    for value in ("n1", "n2"):
        bench.did(Kind.NATIVE, value, bench.put(ADOPTED, "n", value))
    bench.did(Kind.NATIVE, "nt", bench.put(ADOPTED, "n", "nt1"), bench.put(ADOPTED, "o", "nt2"))
    bench.did(Kind.UNSEQUENCED, "u1", bench.put(ADOPTED, "u", "u1"))
    bench.did(Kind.NATIVE, "na", Write(ADOPTED, "n", "native never"), wish="abort")
    bench.transaction(5, (ADOPTED, "n", "5a"), (PAYMENTS, low, "5b"))
    return bench.done()


def test_a_good_history_has_no_faults() -> None:
    assert find_faults(good()) == []


def test_what_was_sent_without_sequence_numbers_may_stand_there_twice() -> None:
    assert find_faults(double(good(), "u1")) == []


def test_what_others_had_aborted_before_may_be_aborted_again() -> None:
    history = relogged(good(), [1, 0, 2, 3])
    assert {fault.kind for fault in find_faults(history)} == {"real-time order"}
    place, aborted = history.log[0]
    by_others = (place, aborted._replace(reason="a DATA frame is corrupt"))
    assert find_faults(replace(history, log=[by_others, *history.log[1:]])) == []


# Ways to spoil it ---------------------------------------------------------------------------------------------------


def double(history: History, value: str) -> History:
    stream, place = of_value(history, value)
    copy = lambda rows: [*rows, *(replace(row, offset=50) for row in rows if row.value == value)]  # noqa: E731
    return with_rows(history, stream, copy, place)


def copied_beside(history: History, value: str) -> History:
    """A record stands in another partition as well."""
    stream, place = of_value(history, value)
    (row,) = [row for rows in history.streams[stream].rows.values() for row in rows if row.value == value]
    others = len(history.streams[stream].rows)
    return with_rows(history, stream, lambda rows: [*rows, replace(row, offset=50)], (place + 1) % others)


def moved(history: History, value: str) -> History:
    """A record stands in another partition than that of its key."""
    stream, place = of_value(history, value)
    (row,) = [row for rows in history.streams[stream].rows.values() for row in rows if row.value == value]
    others = len(history.streams[stream].rows)
    return with_rows(drop(history, value), stream, lambda rows: [*rows, row], (place + 1) % others)


def foreign(history: History, value: str) -> History:
    stream, place = of_value(history, "plain-" + KEYS[0])
    return with_rows(history, stream, lambda rows: [*rows, Row(40, KEYS[0], value)], place)


def relogged(history: History, order: list[int]) -> History:
    """The commit log with its first records in another order, which nobody has listed."""
    whole = [*order, *range(len(order), len(history.log))]
    log = [(place, history.log[old][1]) for place, old in enumerate(whole)]
    return replace(history, log=log, listed=())


def grown(history: History) -> History:
    state = history.streams[ORDERS]
    segment = next(segment for segment in state.rows if state.history.sealed_end(segment) is not None)
    ends = {**state.ends, segment: state.ends[segment] + 1}
    return replace(history, streams={**history.streams, ORDERS: replace(state, ends=ends)})


def unsealed(history: History) -> History:
    state = history.streams[ORDERS]
    last = state.history.active
    broken = EpochHistory((*state.history.records[:-1], replace(last, sealed_ends={})))
    return replace(history, streams={**history.streams, ORDERS: replace(state, history=broken)})


def pipelined(history: History) -> History:
    """Nobody waited for an answer before the next thing was asked for, so only the order of asking counts."""
    late = 10**6
    return replace(history, operations=[replace(item, answered=late) for item in history.operations])


def expired(history: History) -> History:
    log = list(history.log)
    position, record = log[1]
    log[1] = (position, record._replace(reason=EXPIRED))
    return replace(history, log=log)


def lived(history: History, **changes: object) -> History:
    """The first plain write to a stream with several lives was another one."""
    return replace(history, passing=[changed(history.passing[0], 0, **changes), *history.passing[1:]])


def kept_by_owner(history: History, place: int, **changes: object) -> History:
    """One of the things that were done over a topic with an owner was another one."""
    return replace(history, passing=[history.passing[0], changed(history.passing[1], place, **changes)])


def changed(passing: Passing, place: int, **changes: object) -> Passing:
    operations = list(passing.operations)
    operations[place] = replace(operations[place], **changes)  # type: ignore[arg-type]
    return replace(passing, operations=operations)


def reread(history: History, change: Callable[[list[tuple[SegmentId, int, str]]], object]) -> History:
    rows = list(history.readings[0].rows)
    change(rows)
    return replace(history, readings=[replace(history.readings[0], rows=tuple(rows))])


def misplaced(history: History, value: str) -> History:
    (write,) = [write for item in history.operations for write in item.writes if write.value == value]
    return retold(history, value, writes=(replace(write, place="0-0:99:0"),))


def shrunken(history: History, value: str = "", **changes: object) -> History:
    """The stream that was truncated is another one, or what was done to write a value of it."""
    first, *others = history.shrunk
    if value:
        operations = [
            replace(item, **changes) if item.name == value else item  # type: ignore[arg-type]
            for item in first.operations
        ]
        changes = {"operations": operations}
    return replace(history, shrunk=[replace(first, **changes), *others])  # type: ignore[arg-type]


def left(history: History, change: Callable[[list[Row]], object], place: int = 0) -> History:
    """Other records are left of a stream that has lost some, and nobody has read them."""
    items = list(history.shrunk)
    rows = list(items[place].state.rows[ONLY])
    change(rows)
    items[place] = replace(items[place], state=replace(items[place].state, rows={ONLY: rows}), readings=())
    return replace(history, shrunk=items)


def followed(history: History, change: Callable[[list[tuple[SegmentId, int, str]]], object]) -> History:
    """The last reading of the stream that was truncated is another one."""
    first = history.shrunk[0]
    rows = list(first.readings[1].rows)
    change(rows)
    return shrunken(history, readings=[replace(first.readings[1], rows=tuple(rows))])


def kept(history: History, change: Callable[[list[str]], object], place: int = 0) -> History:
    """Something else stands in a state that is shared."""
    items = list(history.kept)
    state = list(items[place].state)
    change(state)
    items[place] = replace(items[place], state=state)
    return replace(history, kept=items)


def unread(history: History, value: str) -> History:
    """An update of the state was not handed to the group for which its stream waits."""
    first, *others = history.kept
    assert first.read is not None
    return replace(history, kept=[replace(first, read=[item for item in first.read if item != value]), *others])


def listed(history: History, change: Callable[[list[Listed]], object]) -> History:
    """A reader of whole transactions was given something else."""
    items = list(history.listed)
    change(items)
    return replace(history, listed=items)


def relisted(history: History, place: int, change: Callable[[list[str]], object]) -> History:
    """A reader of whole transactions was given other records."""
    values = list(history.listed[place].values or ())
    change(values)
    return listed(history, lambda items: items.__setitem__(place, replace(items[place], values=tuple(values))))


LOW, HIGH = KEYS
MUTANTS: dict[str, tuple[Callable[[History], History], str]] = {
    "a plain record is gone": (lambda h: drop(h, f"plain-{LOW}"), "lost"),
    "a record of a transaction is gone": (lambda h: drop(h, "1c"), "torn"),
    "a record stands twice": (lambda h: double(h, "1a"), "duplicated"),
    "a record of nobody": (lambda h: foreign(h, "whose?"), "phantom"),
    "a record of an aborted transaction": (lambda h: foreign(h, "never"), "aborted record visible"),
    "a record that was refused": (
        lambda h: retold(h, f"plain-{HIGH}", answer=Answer.FAILED),
        "aborted record visible",
    ),
    "a native record is gone": (lambda h: drop(h, "n1"), "lost"),
    "a native record stands twice": (lambda h: double(h, "n1"), "duplicated"),
    "an unsequenced record stands in two partitions": (lambda h: copied_beside(h, "u1"), "duplicated"),
    "an unsequenced record in another place than was told": (lambda h: misplaced(h, "u1"), "wrong place"),
    "two native records of a key swapped": (lambda h: swap(h, "n1", "n2"), "key order"),
    "a native record in another partition than its key's": (lambda h: moved(untold(h), "n1"), "misplaced"),
    "a native record in another place than was told": (lambda h: misplaced(h, "n1"), "wrong place"),
    "a record of an aborted native transaction": (lambda h: foreign(h, "native never"), "aborted record visible"),
    "a native transaction of which nobody knows is there in part": (
        lambda h: drop(retold(h, "nt1", answer=Answer.UNKNOWN), "nt1"),
        "torn",
    ),
    "a native record that a group is not handed": (
        lambda h: handed(h, lambda items: items.remove(next(item for item in items if item.value == "n2"))),
        "group missed",
    ),
    "two records of a key swapped": (lambda h: swap(h, "4a", "last"), "key order"),
    "two records of a transaction swapped": (lambda h: swap(h, "1a", "1b"), "local order"),
    "transactions in another order than logged": (lambda h: swap(h, "3a", "4a"), "commit order"),
    "a commit log in another order than asked": (lambda h: relogged(h, [1, 0, 2, 3]), "real-time order"),
    "a commit that became an abort": (lambda h: flipped(h, 0), "outcome flipped"),
    "an abort that became a commit": (lambda h: flipped(h, 1), "outcome flipped"),
    "two outcomes": (lambda h: replace(h, log=[*h.log, (9, h.log[0][1])]), "outcome flipped"),
    "no outcome": (lambda h: replace(h, log=h.log[1:]), "no outcome"),
    "another position than was told": (lambda h: retold(h, "1a", position=7), "outcome flipped"),
    "another place than was told": (lambda h: misplaced(h, f"plain-{LOW}"), "wrong place"),
    "a condition that did not hold": (lambda h: retold(h, "r3", expected=-1), "condition"),
    "two winners": (lambda h: retold(h, "r2", expected=-1), "two winners"),
    "a sealed segment that grew": (grown, "sealed segment grew"),
    "commits in another order than one session asked for them": (
        lambda h: pipelined(relogged(h, [0, 1, 3, 2])),
        "session order",
    ),
    "a transaction that expires at once": (expired, "expired early"),
    "a group that stands still beside somebody else's trouble": (
        lambda h: replace(h, windows=[Window("pause a client", 0, 60 * 10**9, 10.0)]),
        "stood still",
    ),
    "a call that takes longer than it was given": (
        lambda h: replace(h, calls=[Call("c", "poll", 0.5, 0, 20 * 10**9)]),
        "overran",
    ),
    "a group that is not handed a record": (lambda h: handed(h, lambda items: items.pop(3)), "group missed"),
    "a group that is handed records of a key in another order": (
        lambda h: handed(h, lambda items: items.append(replace(items.pop(0), at=10**6))),
        "group order",
    ),
    "a record that is not copied": (lambda h: copied(h, lambda values: values.pop()), "copies"),
    "a record that is copied twice": (lambda h: copied(h, lambda values: values.append(values[0])), "copies"),
    "a copy of nothing": (lambda h: copied(h, lambda values: values.append("what?")), "copies"),
    "a record of the last life that is lost": (
        lambda h: lived(h, writes=(Write(ORDERS, LOW, "unheard of", "0-0:0:0"),)),
        "lives",
    ),
    "a record of the last life that was refused": (lambda h: lived(h, answer=Answer.FAILED), "lives"),
    "a record that is gone with an earlier life of the stream over its topic": (lambda h: gone(h, "o1"), "lives"),
    "a record that is gone from an adopted topic, whose place nobody was told": (lambda h: gone(h, "o2"), "lives"),
    "a record that an earlier life of the stream was told elsewhere": (
        lambda h: kept_by_owner(h, 1, writes=(Write(OWNED, "k", "o1", str(DLSN.of(SegmentId.of(0, 3), 1, 0))),)),
        "lives",
    ),
    "a record that was aborted, and is in an adopted topic": (lambda h: kept_by_owner(h, 3, wish="abort"), "lives"),
    "a record of an adopted topic that was refused": (lambda h: kept_by_owner(h, 2, answer=Answer.FAILED), "lives"),
    "records of a key in an adopted topic in another order": (lambda h: kept_by_owner(h, 2, asked=50), "lives"),
    "a name that means two things": (lambda h: replace(h, clashes=["history.named: 3 of 30 keys"]), "name clash"),
    "a process that ends by itself": (lambda h: replace(h, deaths=["client c ended with -6"]), "died"),
    "a leader that trusts a ZooKeeper that was set back": (
        lambda h: replace(h, led_outdated=["coordinator-1 leads"]),
        "led outdated",
    ),
    "the second group is not handed a record": (lambda h: handed(h, lambda items: items.pop(-1)), "group missed"),
    "a record of a truncated stream that stands twice": (
        lambda h: left(h, lambda rows: rows.append(Row(8, "k", "t3"))),
        "doubled",
    ),
    "a record of a truncated stream of nobody": (
        lambda h: left(h, lambda rows: rows.append(Row(8, "k", "?"))),
        "invented",
    ),
    "a record of a log that lost its end of nobody": (
        lambda h: left(h, lambda rows: rows.append(Row(8, "k", "?")), 1),
        "invented",
    ),
    "a record of a truncated stream that was refused": (
        lambda h: shrunken(h, "t3", answer=Answer.FAILED),
        "invented",
    ),
    "a record of a truncated stream somewhere else": (
        lambda h: shrunken(h, "t3", writes=(Write(TRIMMED, "k", "t3", str(DLSN.of(ONLY, 2, 0))),)),
        "misplaced",
    ),
    "more is truncated than was to be": (lambda h: shrunken(h, starts={ONLY: 2}), "truncated too much"),
    "an update that was lost to a stranger": (lambda h: shrunken(h, "t5", expected=3), "lost update"),
    "an update that was lost before a truncation": (lambda h: shrunken(h, "t3", expected=0), "lost update"),
    "an update that was lost where a log became shorter": (
        lambda h: left(h, lambda rows: rows.__setitem__(slice(2, 3), [Row(5, "k", FOREIGN), Row(6, "k", "t5")]), 1),
        "lost update",
    ),
    "a follower that leaves something out": (lambda h: followed(h, lambda rows: rows.pop(2)), "skipped"),
    "a follower that rewinds": (lambda h: followed(h, lambda rows: rows.append(rows[0])), "skipped"),
    "a follower that is handed another record": (
        lambda h: followed(h, lambda rows: rows.__setitem__(0, (ONLY, 3, "t5"))),
        "skipped",
    ),
    "an update of a state that is lost": (lambda h: kept(h, lambda state: state.remove("a2")), "state"),
    "an update of a state that came twice": (lambda h: kept(h, lambda state: state.append("a1")), "state"),
    "an update of a state that was refused": (lambda h: kept(h, lambda state: state.append("refused")), "state"),
    "updates of a state in another order": (lambda h: kept(h, lambda state: state.reverse()), "state"),
    "an update that is invented where a log lost its end": (
        lambda h: kept(h, lambda state: state.append("?"), 1),
        "state",
    ),
    "updates in another order where a log lost its end": (lambda h: kept(h, lambda state: state.reverse(), 1), "state"),
    "an update that was truncated before a group had read it": (lambda h: unread(h, "b1"), "group missed"),
    "a transaction that is left out of a listing": (lambda h: listed(h, lambda items: items.pop(1)), "listing"),
    "a listing that ends too early": (lambda h: listed(h, lambda items: items.pop()), "listing"),
    "a transaction that is listed twice": (lambda h: listed(h, lambda items: items.insert(1, items[0])), "listing"),
    "transactions that are listed in another order": (
        lambda h: listed(h, lambda items: items.insert(0, items.pop(1))),
        "listing",
    ),
    "an aborted transaction that is listed": (
        lambda h: listed(h, lambda items: items.insert(1, Listed("l", 1, str(TransactionId.of(0, 2)), None))),
        "listing",
    ),
    "a record that is left out of a listing": (lambda h: relisted(h, 0, lambda values: values.pop()), "listing"),
    "a record of nobody in a listing": (lambda h: relisted(h, 2, lambda values: values.append("?")), "listing"),
    "records of a segment that are listed in another order": (
        lambda h: relisted(h, 0, lambda values: values.insert(0, values.pop(1))),
        "listing",
    ),
    "a segment whose end is not known": (unsealed, "epoch chain"),
    "a reader that skips": (lambda h: reread(h, lambda rows: rows.pop(0)), "skip or rewind"),
    "a reader that rewinds": (lambda h: reread(h, lambda rows: rows.append(rows[-1])), "skip or rewind"),
    "a reader that runs ahead": (lambda h: reread(h, lambda rows: rows.reverse()), "early successor"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_spoiled_history_is_found_out(name: str) -> None:
    spoil, kind = MUTANTS[name]
    assert kind in {fault.kind for fault in find_faults(spoil(good()))}


def test_a_pause_and_other_faults_excuse_what_they_must() -> None:
    whole = [Window("pause a client", 0, 60 * 10**9, None, "c"), Window("kill the broker", 0, 60 * 10**9)]
    excused = replace(good(), windows=whole, calls=[Call("c", "poll", 0.5, 0, 20 * 10**9)])
    assert find_faults(excused) == []
    assert {item.kind for item in find_faults(replace(excused, windows=whole[1:]))} == {"overran"}


def test_what_is_noted_of_open_transactions_is_what_an_heir_may_commit() -> None:
    writes = (Write("s/orders", "k", "v"), Write("s/orders", "k", "w"))
    asked = Operation("c", Kind.TRANSACTION, "two", "commit", writes, 1, 2, Answer.UNKNOWN)
    call = Call("c", "commit", 60.0, 1, 2)
    lines = [Begun("one", writes).to_line(), Begun("two", writes).to_line(), call.to_line(), asked.to_line()]
    assert read_begun(lines) == {"one": writes}
    assert list(read_operations(lines)) == [asked]
    assert list(read_calls(lines)) == [call]
    listing = [Listed("l", 7, "one", ("v", "w")), Listed("l", 9, "two", None)]
    assert list(read_listed(json.loads(json.dumps(item.to_line())) for item in listing)) == listing


def test_operations_survive_being_written_down() -> None:
    for item in good().operations:
        assert Operation.from_line(item.to_line()) == item
