"""The checks of what producers write through gateways are themselves checked: each way to spoil a history is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from integration_tests.history.checks import find_faults
from integration_tests.history.events import (
    Answer,
    History,
    Kind,
    Operation,
    Reading,
    Refusal,
    Row,
    Window,
    Write,
    read_operations,
    read_refusals,
)
from integration_tests.history_makers import (
    ADOPTED,
    KEYS,
    ORDERS,
    PAYMENTS,
    Bench,
    drop,
    flipped,
    retold,
    swap,
    with_rows,
)
from rollbridge.base.ids import TransactionId
from rollbridge.commitlog.control import ControlKind, ControlRecord

LOW, HIGH = KEYS
S = 10**9


def passed(bench: Bench, number: int, *writes: tuple[str, str, str], offset: int | None = None) -> None:
    """A transaction through a gateway, of which its producer knows neither the id nor the places."""
    identifier = TransactionId.of(0, number)
    made = [
        replace(bench.put(stream, key, value, str(identifier), place), place=None)
        for place, (stream, key, value) in enumerate(writes)
    ]
    bench.log.append((len(bench.log), ControlRecord(identifier, ControlKind.COMMIT, "p", 0, 0, 1, records=len(made))))
    bench.did(Kind.GATEWAY, f"p:{number}", *made)
    bench.operations[-1] = replace(bench.operations[-1], producer="p", offset=offset)


def not_passed(bench: Bench, name: str, *, fenced: bool = False, wish: str = "commit") -> None:
    """One that was refused, or aborted."""
    bench.did(Kind.GATEWAY, name, Write(ORDERS, LOW, name), wish=wish)
    answer = Answer.FAILED if fenced or wish == "commit" else Answer.OK
    bench.operations[-1] = replace(bench.operations[-1], producer="p", offset=7, answer=answer, fenced=fenced)


def good() -> History:
    bench = Bench()
    passed(bench, 1, (ORDERS, LOW, "1a"), (ORDERS, LOW, "1b"), (ADOPTED, "n", "1c"), (ADOPTED, "n", "1d"), offset=3)
    passed(bench, 2, (ORDERS, HIGH, "2a"), offset=5)
    not_passed(bench, "zombie", fenced=True)
    not_passed(bench, "aborted", wish="abort")
    passed(bench, 3, (ORDERS, LOW, "3a"), (ORDERS, HIGH, "3b"))
    for second in range(1, 6):  # somebody commits all the time
        bench.clock = second * S
        bench.transaction(10 + second, (PAYMENTS, LOW, f"u{second}"))
    history = bench.done()
    times = tuple(S * number for number in range(6))
    segment = next(iter(history.streams[ORDERS].rows))
    rows = tuple((segment, row.offset, row.value) for row in history.streams[ORDERS].rows[segment])
    readings = [*history.readings, Reading("busy", ORDERS, rows, times)]
    windows = [Window("kill a gateway", 0, 6 * S, 3.0)]
    return replace(
        history,
        listed=(),
        readings=readings,
        windows=windows,
        offsets={"p": 5, "q": None},
        busy=(ORDERS,),
    )


def test_a_good_history_has_no_faults() -> None:
    assert find_faults(good()) == []


def joined(history: History) -> History:
    """The first two of a producer's transactions are one of ours."""
    first, second = TransactionId.of(0, 1), TransactionId.of(0, 2)

    def change(row: Row) -> Row:
        return replace(row, transaction=str(first)) if row.transaction == str(second) else row

    streams = {
        name: replace(state, rows={segment: [change(row) for row in rows] for segment, rows in state.rows.items()})
        for name, state in history.streams.items()
    }
    return replace(history, streams=streams)


def outside(history: History, value: str) -> History:
    """A record of a transaction is there without one."""
    for stream, state in history.streams.items():
        for place, rows in enumerate(state.rows.values()):
            if any(row.value == value for row in rows):
                change = lambda rows: [replace(row, transaction=None) if row.value == value else row for row in rows]  # noqa: E731
                return with_rows(history, stream, change, place)
    raise AssertionError(value)


def asked(history: History, name: str, at: int) -> History:
    return retold(history, name, asked=at)


MUTANTS: dict[str, tuple[Callable[[History], History], str]] = {
    "an acknowledged commit is not there": (lambda h: drop(drop(h, "3a"), "3b"), "lost"),
    "an acknowledged commit is there in part": (lambda h: drop(h, "1c"), "torn"),
    "a commit of which nobody knows is there in part": (
        lambda h: drop(retold(h, "3a", answer=Answer.UNKNOWN), "3a"),
        "torn",
    ),
    "a record of a fenced producer": (lambda h: foreign_at(h, "zombie"), "fenced"),
    "a fenced producer is told that it has committed": (lambda h: retold(h, "zombie", answer=Answer.OK), "fenced"),
    "a record of an aborted transaction": (lambda h: foreign_at(h, "aborted"), "aborted record visible"),
    "a record stands twice": (lambda h: foreign_at(h, "3b"), "duplicated"),
    "two records of a key are swapped": (lambda h: swap(h, "1a", "1b"), "local order"),
    "two records of a partition are swapped": (lambda h: swap(h, "1c", "1d"), "local order"),
    "a commit before an earlier one of its producer": (lambda h: asked(h, "3a", 1), "session order"),
    "two transactions are one": (joined, "joined"),
    "a record outside of transactions": (lambda h: outside(h, "2a"), "no outcome"),
    "a transaction of which the commit log says that it is aborted": (lambda h: flipped(h, 1), "no outcome"),
    "offsets that did not move with the commit": (lambda h: replace(h, offsets={"p": 3}), "offsets"),
    "offsets of what was aborted": (lambda h: replace(h, offsets={"p": 7}), "offsets"),
    "offsets of nobody": (lambda h: replace(h, offsets={"p": 5, "q": 1}), "offsets"),
    "a refusal without a rival": (
        lambda h: replace(h, refusals=[Refusal("p", "transaction", "INVALID_TXN_STATE", 1)]),
        "refused",
    ),
    "a reader that waits": (
        lambda h: replace(h, readings=[replace(item, times=item.times[:2]) for item in h.readings]),
        "reader waits",
    ),
}


def foreign_at(history: History, value: str) -> History:
    """A record with a value stands behind the others of the first segment."""
    state = history.streams[ORDERS]
    last = next(iter(state.rows.values()))[-1]
    row = replace(last, offset=40, value=value, transaction=None)
    return with_rows(history, ORDERS, lambda rows: [*rows, row])


@pytest.mark.parametrize("name", MUTANTS)
def test_a_spoiled_history_is_found_out(name: str) -> None:
    spoil, kind = MUTANTS[name]
    found = {fault.kind for fault in find_faults(spoil(good()))}
    assert kind in found


def test_what_producers_note_survives_being_written_down() -> None:
    for item in good().operations:
        assert Operation.from_line(item.to_line()) == item
    begun = Operation("p", Kind.GATEWAY, "p:1", "abort", (), 1, 9, Answer.UNKNOWN, producer="p", offset=4)
    ended = replace(begun, wish="commit", answer=Answer.OK)
    refusal = Refusal("p", "start", "PRODUCER_FENCED", 5)
    lines = [begun.to_line(), refusal.to_line(), ended.to_line()]
    assert list(read_operations(lines)) == [ended]
    assert list(read_refusals(lines)) == [refusal]
