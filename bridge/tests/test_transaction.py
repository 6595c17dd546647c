"""The table of decisions: what the proposals say of each pair of state and event, and that the fold obeys every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.buffers import STREAMS, Buffer, begin_frame
from rollbridge.errors import InvalidTransitionError
from rollbridge.model.buffer import BufferLimits
from rollbridge.model.frames import FrameHeader, FrameKind, Manifest, encode_abort, encode_extend
from rollbridge.model.ids import OWNER_PART, TransactionId
from rollbridge.model.savepoints import SavepointFrame
from rollbridge.model.transaction import DECISIONS, Drop, Event, Move, Row, State, Stay, decide

TERMINAL = (State.COMMITTED, State.ABORTED)
HELD = (State.OPEN, State.COMMITTING, State.ABORTING)

# One letter for each pair, written down from the proposals and not from the table: a capital letter is the state that
# is moved to (Open, comMitting = C, coMmitted = M, aborTing = T, aborTed = X); t taken, i ignored; of what is dropped
# l late, z zombie, e fenced, d duplicate, f foreign, w crowded, r corrupt; - cannot happen.
EXPECTED = """
                      unknown open committing aborting ended
begin                 O       t    t          t        l
resume                f       t    t          t        l
crowded               w       -    -          -        -
data                  z       t    t          l        z
data-again            -       d    d          -        -
data-of-former-owner  -       e    e          l        -
commit                z       C    l          l        z
abort                 z       T    l          l        z
savepoint             z       t    l          l        z
savepoint-again       -       d    -          -        -
extend                z       t    l          l        z
end-of-former-owner   -       e    e          e        -
resume-of-former-owner -      e    e          e        -
astray                f       f    f          f        -
corrupt               r       r    r          r        r
expire                -       T    i          i        -
refuse                -       T    T          i        -
merged                -       -    M          -        -
abort-logged          -       -    -          X        -
outcome-known         -       l    l          l        -
"""
MEANING: dict[str, Row | None] = {
    "O": Move(State.OPEN),
    "C": Move(State.COMMITTING),
    "M": Move(State.COMMITTED),
    "T": Move(State.ABORTING),
    "X": Move(State.ABORTED),
    "t": Stay.TAKEN,
    "i": Stay.IGNORED,
    "l": Drop.LATE,
    "z": Drop.ZOMBIE,
    "e": Drop.FENCED,
    "d": Drop.DUPLICATE,
    "f": Drop.FOREIGN,
    "w": Drop.CROWDED,
    "r": Drop.CORRUPT,
    "-": None,
}


def expected_rows() -> Iterable[tuple[State, Event, Row | None]]:
    head, *lines = (line.split() for line in EXPECTED.strip().splitlines())
    for event, *letters in lines:
        for state, letter in zip(head, letters, strict=True):
            yield State(state), Event(event), MEANING[letter]


ROWS: Final = [(state, event) for state, rows in DECISIONS.items() for event in rows]


@pytest.mark.parametrize(("state", "event", "row"), list(expected_rows()))
def test_every_pair_is_what_the_proposals_say(state: State, event: Event, row: Row | None) -> None:
    assert DECISIONS[state].get(event) == row


def test_the_expectation_is_complete() -> None:
    pairs = [(state, event) for state, event, _ in expected_rows()]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == set(product(DECISIONS, Event))
    assert set(DECISIONS) == set(State) - set(TERMINAL), "the fold keeps no more than the id of one that has an outcome"


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_what_is_not_in_the_table_is_a_defect_of_the_caller(state: State, event: Event) -> None:
    if (state, event) in ROWS:
        assert decide(state, event) is DECISIONS[state][event]
        return
    with pytest.raises(InvalidTransitionError, match="which must not happen; nothing was written") as caught:
        decide(state, event, "t-1")
    assert (caught.value.transaction, caught.value.state, caught.value.request) == ("t-1", state, event)


# --------------------------------------------------------------------------------------------------------------------
# The fold, driven through every row. A transaction of two streams was resumed once, so it has a former owner.

A, B, C = STREAMS
T: Final = TransactionId.of(0, 1).bytes
OWNER: Final = 5
"""Part number of who has resumed it and owns it now."""


def frame(buffer: Buffer, kind: FrameKind, part: int = OWNER, stream: str = A, value: bytes | None = None) -> None:
    if value is None:
        begin, end = begin_frame(A, B).encode(), encode_abort("client")
        commit, extend = Manifest({}).encode(), encode_extend(5)
        savepoint = SavepointFrame(3, True, Manifest({})).encode()
        kinds = (FrameKind.BEGIN, FrameKind.COMMIT, FrameKind.ABORT, FrameKind.EXTEND, FrameKind.SAVEPOINT)
        value = dict(zip(kinds, (begin, commit, end, extend, savepoint), strict=True))[kind]
    buffer.raw(FrameHeader(kind, T, part).pack(), value, stream)


def without_room(buffer: Buffer) -> None:
    buffer.fold.limits = BufferLimits(held_bytes_max=1)
    frame(buffer, FrameKind.BEGIN, OWNER_PART)


def astray(buffer: Buffer) -> None:
    if T in buffer.fold.open:
        frame(buffer, FrameKind.ABORT, stream=B)
    else:
        frame(buffer, FrameKind.BEGIN, OWNER_PART, C)


def savepoint(buffer: Buffer, number: int) -> None:
    """One with this number more than the one before; those that are made in a row never have the same."""
    known = buffer.fold.open[T].savepoint if T in buffer.fold.open else None
    number += 0 if known is None else known.frame.number - 2
    frame(buffer, FrameKind.SAVEPOINT, value=SavepointFrame(max(number, 1), True, Manifest({})).encode())


DRIVE: Final[dict[Event, Callable[[Buffer], object]]] = {
    Event.BEGIN: lambda buffer: frame(buffer, FrameKind.BEGIN, OWNER_PART),
    Event.RESUME: lambda buffer: frame(buffer, FrameKind.BEGIN, OWNER),
    Event.CROWDED: without_room,
    Event.DATA: lambda buffer: buffer.data(T, 10 * len(buffer.log), 1, part=OWNER),
    Event.DATA_AGAIN: lambda buffer: buffer.data(T, 0, 2, part=OWNER),
    Event.DATA_OF_FORMER: lambda buffer: buffer.data(T, 10, 1, part=OWNER_PART),
    Event.COMMIT: lambda buffer: frame(buffer, FrameKind.COMMIT),
    Event.ABORT: lambda buffer: frame(buffer, FrameKind.ABORT),
    Event.SAVEPOINT: lambda buffer: savepoint(buffer, 3),
    Event.SAVEPOINT_AGAIN: lambda buffer: savepoint(buffer, 2),
    Event.EXTEND: lambda buffer: frame(buffer, FrameKind.EXTEND),
    Event.END_OF_FORMER: lambda buffer: frame(buffer, FrameKind.ABORT, OWNER_PART),
    Event.RESUME_OF_FORMER: lambda buffer: buffer.raw(
        FrameHeader(FrameKind.BEGIN, T, OWNER + 1, first_count=OWNER_PART + 1).pack(), begin_frame(A, B).encode(), A
    ),
    Event.ASTRAY: astray,
    Event.CORRUPT: lambda buffer: frame(buffer, FrameKind.ABORT, value=b""),
    Event.EXPIRE: lambda buffer: buffer.fold.expire(T, 10**9),
    Event.REFUSE: lambda buffer: buffer.fold.refuse(T, "it cannot be merged", 0),
    Event.MERGED: lambda buffer: buffer.fold.settle(T),
    Event.ABORT_LOGGED: lambda buffer: buffer.fold.settle(T),
    Event.OUTCOME_KNOWN: lambda buffer: buffer.fold.discard(T),
}
OPENED: Final = (Event.BEGIN, Event.RESUME)
WAY: Final[dict[State, tuple[Event, ...]]] = {
    State.UNKNOWN: (),
    State.OPEN: OPENED,
    State.COMMITTING: (*OPENED, Event.COMMIT),
    State.ABORTING: (*OPENED, Event.ABORT),
    State.ENDED: (*OPENED, Event.ABORT, Event.ABORT_LOGGED),
}
"""How a transaction gets into each state."""


class Recorder(dict[Event, Row]):
    """A part of the table that notes what is looked up in it."""

    def __init__(self, state: State, seen: list[tuple[State, Event]]) -> None:
        super().__init__(DECISIONS[state])
        self.state, self.seen = state, seen

    def __getitem__(self, event: Event) -> Row:
        self.seen.append((self.state, event))
        return super().__getitem__(event)

    def get(self, event: Event, default: Any = None) -> Any:
        self.seen.append((self.state, event))
        return super().get(event, default)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[State, Event]]:
    """What the fold looks up in the table, in order."""
    seen: list[tuple[State, Event]] = []
    for state in DECISIONS:
        monkeypatch.setitem(cast("dict[State, object]", DECISIONS), state, Recorder(state, seen))
    return seen


def in_state(state: State) -> Buffer:
    buffer = Buffer()
    for event in WAY[state]:
        DRIVE[event](buffer)
        if event is Event.RESUME:
            buffer.data(T, 0, 2, part=OWNER)
            savepoint(buffer, 3)
    return buffer


@pytest.mark.parametrize(("state", "event"), ROWS)
def test_the_fold_looks_up_every_row_and_obeys(
    state: State, event: Event, looked_up: list[tuple[State, Event]]
) -> None:
    buffer = in_state(state)
    item = buffer.fold.open.get(T)
    assert (item.state if item is not None else state) is state
    dropped = Counter(buffer.fold.dropped)
    looked_up.clear()
    DRIVE[event](buffer)
    assert looked_up[:1] == [(state, event)], "it is looked up, and before anything else"
    assert looked_up[1:] == ([(state, Event.REFUSE)] if event is Event.CORRUPT and state in HELD else [])
    row = decide(state, event)
    assert buffer.fold.dropped - dropped == ({row.value: 1} if isinstance(row, Drop) else {})
    if isinstance(row, Move):
        item = item if item is not None else buffer.fold.open[T]
        assert item.state is row.to
        assert (T in buffer.fold.open) is (row.to not in TERMINAL)
    elif item is None:
        assert T not in buffer.fold.open
    elif event is Event.OUTCOME_KNOWN:
        assert T not in buffer.fold.open, "the whole transaction is dropped"
    elif event is not Event.CORRUPT:
        assert item.state is state


@given(st.lists(st.sampled_from(sorted(DRIVE.keys() - {Event.CROWDED}))))
def test_whatever_comes_in_whatever_order_the_table_has_a_row_for_it(events: list[Event]) -> None:
    buffer = Buffer()
    seen = [State.UNKNOWN]
    for event in events:
        item = buffer.fold.open.get(T)
        of_leader = event in (Event.REFUSE, Event.OUTCOME_KNOWN)
        if item is None and of_leader:
            continue
        if event in (Event.MERGED, Event.ABORT_LOGGED) and (item is None or item.state is State.OPEN):
            continue
        DRIVE[event](buffer)
        after = item if item is not None else buffer.fold.open.get(T)
        if after is not None and after.state is not seen[-1]:
            seen.append(after.state)
    assert len(seen) == len(set(seen)), "no state is entered twice"
    if State.COMMITTED in seen:
        assert State.ABORTING not in seen, "a commit is never visible after an abort was decided"
    path = [State.UNKNOWN, State.OPEN, State.COMMITTING, State.ABORTING, State.COMMITTED, State.ABORTED]
    assert seen == [item for item in path if item in seen]


# --------------------------------------------------------------------------------------------------------------------
# What the proposals say of outcomes.


@given(st.lists(st.sampled_from(Event)))
def test_whatever_happens_a_transaction_has_at_most_one_outcome(events: list[Event]) -> None:
    state, seen = State.UNKNOWN, [State.UNKNOWN]
    for event in events:
        row = DECISIONS.get(state, {}).get(event)
        if isinstance(row, Move):
            state = row.to
            seen.append(state)
    assert len(seen) == len(set(seen)), "no state is entered twice"
    assert not set(TERMINAL) <= set(seen)
    if State.COMMITTED in seen:
        assert State.ABORTING not in seen, "a commit is never visible after an abort was decided"
    path = [State.UNKNOWN, State.OPEN, State.COMMITTING, State.ABORTING, State.COMMITTED, State.ABORTED]
    assert seen == [item for item in path if item in seen]


@pytest.mark.parametrize("event", Event)
def test_what_has_ended_never_changes(event: Event) -> None:
    assert not isinstance(DECISIONS[State.ENDED].get(event), Move)
    assert all(state not in DECISIONS for state in TERMINAL)


@pytest.mark.parametrize(
    ("end", "decided", "logged", "outcome", "opposite"),
    [
        (Event.COMMIT, State.COMMITTING, Event.MERGED, State.COMMITTED, Event.ABORT),
        (Event.ABORT, State.ABORTING, Event.ABORT_LOGGED, State.ABORTED, Event.COMMIT),
    ],
)
def test_an_end_decides_and_neither_its_repetition_nor_its_opposite_changes_that(
    end: Event, decided: State, logged: Event, outcome: State, opposite: Event
) -> None:
    assert decide(State.OPEN, end) == Move(decided)
    assert decide(decided, end) is decide(decided, opposite) is Drop.LATE
    assert decide(decided, logged) == Move(outcome)
    assert decide(State.ENDED, end) is decide(State.ENDED, opposite) is Drop.ZOMBIE


def test_the_lease_ends_with_the_request_to_commit() -> None:
    assert decide(State.COMMITTING, Event.EXPIRE) is Stay.IGNORED


def test_every_reason_is_used_but_those_for_whole_messages() -> None:
    rows = {row for rows in DECISIONS.values() for row in rows.values()}
    assert {row for row in rows if isinstance(row, Drop)} == set(Drop) - {Drop.REPEATED, Drop.NEWER}
    assert {row for row in rows if isinstance(row, Stay)} == set(Stay)
