"""The chronicle of a fold: which changes of state are noted, in which words, and how many at most."""

from __future__ import annotations

import tracemalloc

import pytest

from bridge.tests.buffers import Buffer
from rollbridge.base.ids import TransactionId
from rollbridge.buffer import table as chronicle_module
from rollbridge.buffer.table import Chronicle, State


def lines(buffer: Buffer) -> list[str]:
    return [str(note) for note in buffer.fold.chronicle.take()]


def name(counter: int) -> str:
    return str(TransactionId.of(0, counter))


def test_an_ordinary_transaction_is_noted_only_for_who_traces() -> None:
    for is_tracing in (False, True):
        buffer = Buffer()
        buffer.fold.chronicle.is_tracing = is_tracing
        t = buffer.begin(1)
        buffer.data(t, 0, 2)
        buffer.commit(t, {(0, 0, 0): 2})
        buffer.fold.chronicle.round += 1
        buffer.fold.settle(t)
        found = lines(buffer)
        if not is_tracing:
            assert found == []
            continue
        begin, commit, end = found
        assert begin.startswith(f"transaction {name(1)} unknown -> open (begin: client ")
        assert begin.endswith("), round 0")
        assert commit.startswith(f"transaction {name(1)} open -> committing (commit: a frame of ")
        assert end == f"transaction {name(1)} committing -> committed (merged), round 1"


def test_what_is_not_ordinary_is_noted_for_everybody() -> None:
    buffer = Buffer()
    expired, refused, asked, rolled = (buffer.begin(number) for number in range(1, 5))
    buffer.commit(rolled, {})
    buffer.fold.expire(expired, 9)
    buffer.fold.refuse(refused, "too large", 9)
    buffer.fold.request_abort(asked, "admin", 9)
    buffer.fold.settle(rolled, rolled=True)
    for item in (expired, refused, asked):
        buffer.fold.settle(item)
    found = list(buffer.fold.chronicle.take())
    assert all(note.is_unusual for note in found)
    assert [(note.before, note.after) for note in found] == [
        (State.OPEN, State.ABORTING),
        (State.OPEN, State.ABORTING),
        (State.OPEN, State.ABORTING),
        (State.COMMITTING, State.COMMITTED),
    ]
    assert "(refuse: too large)" in str(found[1])
    assert "(merged: by a rolling commit)" in str(found[3])


def test_an_abort_by_its_owner_is_ordinary() -> None:
    buffer = Buffer()
    t = buffer.begin(1)
    buffer.abort(t)
    assert lines(buffer) == []


def test_dropped_frames_are_noted_once_for_each_cause_and_not_while_old_logs_are_read() -> None:
    buffer = Buffer()
    gone = TransactionId.of(0, 77).bytes
    buffer.data(gone, 0, 1)
    assert lines(buffer) == []
    buffer.fold.chronicle.is_live = True
    for first in range(3):
        buffer.data(gone, first, 1)
    buffer.commit(gone, {})
    assert lines(buffer) == [
        f"transaction {name(77)} stays unknown (frames dropped: DATA of none that is open), round 0",
        f"transaction {name(77)} stays unknown (frames dropped: COMMIT of none that is open), round 0",
    ]


def test_what_nobody_takes_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chronicle_module, "DROPS_MAX", 10)
    chronicle = Chronicle()
    chronicle.is_live = True
    for number in range(chronicle_module.UNREAD_MAX + 5):
        chronicle.rejected(TransactionId.of(0, number + 1).bytes, State.UNKNOWN, "DATA of none that is open")
    assert chronicle.lost == 5
    assert len(list(chronicle.take())) == chronicle_module.UNREAD_MAX
    assert list(chronicle.take()) == []


def test_a_standby_whose_notes_nobody_takes_does_not_grow() -> None:
    chronicle = Chronicle()
    kept, ended = (TransactionId.of(0, number).bytes for number in (1, 2))
    for transaction in (kept, ended):
        chronicle.changed(transaction, State.OPEN, State.ABORTING, "expire", is_unusual=True)
    tracemalloc.start()
    chronicle.forget(ended)
    for number in range(50_000):
        chronicle.forget(TransactionId.of(0, number + 3).bytes)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 500_000, "of 16 bytes each, and what holds them"
    assert [note.transaction for note in chronicle.take()] == [kept]


def changes(chronicle: Chronicle, transaction: bytes) -> list[tuple[State, State]]:
    return [(event.before, event.after) for event in chronicle.story(transaction)]


def test_a_leader_that_serves_keeps_the_events_of_open_transactions_and_of_the_last_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chronicle_module, "ENDED_MAX", 2)
    buffer = Buffer()
    chronicle = buffer.fold.chronicle
    before = buffer.begin(1)
    chronicle.is_live = True
    ids = [buffer.begin(number) for number in range(2, 6)]
    for transaction in ids[:3]:
        buffer.abort(transaction)
        buffer.fold.settle(transaction)
    ended = [(State.UNKNOWN, State.OPEN), (State.OPEN, State.ABORTING), (State.ABORTING, State.ABORTED)]
    assert [changes(chronicle, item) for item in ids] == [[], ended, ended, ended[:1]]
    assert changes(chronicle, before) == [], "what was before it served is not kept"
    assert lines(buffer) == [], "and nothing of it is for the log"


def test_the_first_event_of_a_transaction_and_the_last_are_kept() -> None:
    chronicle = Chronicle()
    chronicle.is_live = True
    transaction = TransactionId.of(0, 1).bytes
    for number in range(3 * chronicle_module.EVENTS_MAX):
        chronicle.at_ms = number
        chronicle.changed(transaction, State.OPEN, State.OPEN, "data")
    found = [event.at_ms for event in chronicle.story(transaction)]
    assert len(found) == chronicle_module.EVENTS_MAX
    assert (found[0], found[-1]) == (0, 3 * chronicle_module.EVENTS_MAX - 1)


def test_frames_of_none_that_is_open_are_remembered_with_their_causes() -> None:
    buffer = Buffer()
    buffer.fold.chronicle.is_live = True
    gone = TransactionId.of(0, 77).bytes
    buffer.data(gone, 0, 1)
    buffer.commit(gone, {})
    causes = [event.cause for event in buffer.fold.chronicle.story(gone)]
    assert causes == ["DATA of none that is open", "COMMIT of none that is open"]
