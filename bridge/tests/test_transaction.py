"""The transaction table: every pair of state and event, and what the proposals say of the outcomes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.errors import InvalidTransitionError
from rollbridge.model.transaction import TRANSITIONS, Event, Move, Reply, State, step

TERMINAL = (State.COMMITTED, State.ABORTED)

# One letter for each pair, written down from the proposals and not from the table: a capital letter is the state that
# is moved to (Open, comMitting = C, coMmitted = M, aborTing = T, aborTed = X); d done before, p in progress,
# c conflict, a accepted, l late, z zombie, - can not happen.
EXPECTED = """
              begin data commit abort expire refuse merged abort-logged
unknown       O     z    z      z     -      -      -      -
open          a     a    C      T     T      T      -      -
committing    a     a    p      c     c      T      M      -
committed     l     l    d      c     c      -      d      -
aborting      l     l    c      p     p      p      -      X
aborted       l     l    c      d     d      d      -      d
"""
MEANING: dict[str, Move | Reply] = {
    "O": Move(State.OPEN),
    "C": Move(State.COMMITTING),
    "M": Move(State.COMMITTED),
    "T": Move(State.ABORTING),
    "X": Move(State.ABORTED),
    "d": Reply.DONE,
    "p": Reply.IN_PROGRESS,
    "c": Reply.CONFLICT,
    "a": Reply.ACCEPTED,
    "l": Reply.LATE,
    "z": Reply.ZOMBIE,
    "-": Reply.INVALID,
}


def expected_rows() -> Iterable[tuple[State, Event, Move | Reply]]:
    head, *rows = (line.split() for line in EXPECTED.strip().splitlines())
    for state, *letters in rows:
        for event, letter in zip(head, letters, strict=True):
            yield State(state), Event(event), MEANING[letter]


def test_the_table_is_complete() -> None:
    assert set(TRANSITIONS) == set(product(State, Event))


@pytest.mark.parametrize(("state", "event", "row"), list(expected_rows()))
def test_every_pair_is_what_the_proposals_say(state: State, event: Event, row: Move | Reply) -> None:
    assert TRANSITIONS[state, event] == row


def test_the_expectation_is_complete_too() -> None:
    assert {(state, event) for state, event, _ in expected_rows()} == set(product(State, Event))


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_step_does_what_the_table_says(state: State, event: Event) -> None:
    row = TRANSITIONS[state, event]
    if row is Reply.INVALID:
        with pytest.raises(InvalidTransitionError, match="which must not happen; nothing was written") as caught:
            step(state, event, "t-1")
        assert (caught.value.transaction, caught.value.state, caught.value.request) == ("t-1", state, event)
    else:
        assert step(state, event) == (row.to if isinstance(row, Move) else state, row)


@pytest.mark.parametrize(("state", "event"), list(product(TERMINAL, Event)))
def test_terminal_states_never_change(state: State, event: Event) -> None:
    assert not isinstance(TRANSITIONS[state, event], Move)


@given(st.lists(st.sampled_from(Event)))
def test_whatever_happens_a_transaction_has_at_most_one_outcome(events: list[Event]) -> None:
    state, seen = State.UNKNOWN, [State.UNKNOWN]
    for event in events:
        if TRANSITIONS[state, event] is not Reply.INVALID:
            state, _ = step(state, event)
        if state != seen[-1]:
            seen.append(state)
    assert len(seen) == len(set(seen)), "no state is entered twice"
    assert not set(TERMINAL) <= set(seen)
    if State.COMMITTED in seen:
        assert State.ABORTING not in seen, "a commit is never visible after an abort was decided"
    path = [State.UNKNOWN, State.OPEN, State.COMMITTING, State.ABORTING, State.COMMITTED, State.ABORTED]
    assert seen == [item for item in path if item in seen]


@pytest.mark.parametrize(
    ("end", "decided", "logged", "outcome", "opposite"),
    [
        (Event.COMMIT, State.COMMITTING, Event.MERGED, State.COMMITTED, Event.ABORT),
        (Event.ABORT, State.ABORTING, Event.ABORT_LOGGED, State.ABORTED, Event.COMMIT),
    ],
)
def test_an_end_can_be_repeated_and_its_opposite_conflicts(
    end: Event, decided: State, logged: Event, outcome: State, opposite: Event
) -> None:
    assert step(State.OPEN, end)[0] is decided
    assert step(decided, end) == (decided, Reply.IN_PROGRESS)
    assert step(decided, opposite) == (decided, Reply.CONFLICT)
    assert step(decided, logged)[0] is outcome
    assert step(outcome, end) == (outcome, Reply.DONE)
    assert step(outcome, opposite) == (outcome, Reply.CONFLICT)


def test_the_lease_ends_with_the_request_to_commit() -> None:
    assert step(State.COMMITTING, Event.EXPIRE) == (State.COMMITTING, Reply.CONFLICT)


def test_every_reply_says_what_it_means() -> None:
    assert {row for row in TRANSITIONS.values() if isinstance(row, Reply)} == set(Reply)
    assert len({reply.value for reply in Reply}) == len(Reply)
