"""The life of a transaction as one complete table: every pair of state and event, refusals and repeats included.

States are those of the proposals: OPEN, COMMITTING, COMMITTED, ABORTING, ABORTED, and UNKNOWN for an id that the
decider has no record of. Events are the frames that arrive in the buffer and what the decider itself does.

Source: PDP-24 (commit is first marked, then carried out), DistributedLog transactions (begin, commit and abort control
records), PIP-255 (a repeated end gives the same answer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Final

from rollbridge.model.errors import InvalidTransitionError


class State(StrEnum):
    """Where a transaction stands."""

    UNKNOWN = "unknown"
    OPEN = "open"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"


class Event(StrEnum):
    """What can happen to a transaction."""

    BEGIN = "begin"
    DATA = "data"
    COMMIT = "commit"
    ABORT = "abort"
    EXPIRE = "expire"
    """The lease ran out and the buffer has been read to its end."""
    REFUSE = "refuse"
    """The decider found that the transaction can not be merged: incomplete, corrupt or over a limit."""
    MERGED = "merged"
    """The native transaction that holds its records and its commit record is committed."""
    ABORT_LOGGED = "abort-logged"
    """The native transaction that holds its abort record is committed."""


class Reply(Enum):
    """What an event that changes nothing means."""

    DONE = "the same was done before: same answer, nothing written"
    IN_PROGRESS = "the same wish is being carried out"
    CONFLICT = "the other outcome is decided"
    ACCEPTED = "belongs to the transaction"
    LATE = "arrived after the end was decided: dropped and counted"
    ZOMBIE = "no such transaction is open: dropped and counted"
    INVALID = "can not happen: a defect of the caller"


@dataclass(frozen=True, slots=True)
class Move:
    """A change of state."""

    to: State


Row = Move | Reply

_S, _E, _R = State, Event, Reply

TRANSITIONS: Final[Mapping[tuple[State, Event], Row]] = MappingProxyType(
    {
        (_S.UNKNOWN, _E.BEGIN): Move(_S.OPEN),
        (_S.UNKNOWN, _E.DATA): _R.ZOMBIE,
        (_S.UNKNOWN, _E.COMMIT): _R.ZOMBIE,
        (_S.UNKNOWN, _E.ABORT): _R.ZOMBIE,
        (_S.UNKNOWN, _E.EXPIRE): _R.INVALID,
        (_S.UNKNOWN, _E.REFUSE): _R.INVALID,
        (_S.UNKNOWN, _E.MERGED): _R.INVALID,
        (_S.UNKNOWN, _E.ABORT_LOGGED): _R.INVALID,
        (_S.OPEN, _E.BEGIN): _R.ACCEPTED,  # one BEGIN frame stands in the buffer of each of its streams
        (_S.OPEN, _E.DATA): _R.ACCEPTED,
        (_S.OPEN, _E.COMMIT): Move(_S.COMMITTING),
        (_S.OPEN, _E.ABORT): Move(_S.ABORTING),
        (_S.OPEN, _E.EXPIRE): Move(_S.ABORTING),
        (_S.OPEN, _E.REFUSE): Move(_S.ABORTING),
        (_S.OPEN, _E.MERGED): _R.INVALID,
        (_S.OPEN, _E.ABORT_LOGGED): _R.INVALID,
        (_S.COMMITTING, _E.BEGIN): _R.ACCEPTED,  # the buffers of several streams are read in no common order
        (_S.COMMITTING, _E.DATA): _R.ACCEPTED,
        (_S.COMMITTING, _E.COMMIT): _R.IN_PROGRESS,
        (_S.COMMITTING, _E.ABORT): _R.CONFLICT,
        (_S.COMMITTING, _E.EXPIRE): _R.CONFLICT,  # the lease ends with the request to commit
        (_S.COMMITTING, _E.REFUSE): Move(_S.ABORTING),
        (_S.COMMITTING, _E.MERGED): Move(_S.COMMITTED),
        (_S.COMMITTING, _E.ABORT_LOGGED): _R.INVALID,
        (_S.COMMITTED, _E.BEGIN): _R.LATE,
        (_S.COMMITTED, _E.DATA): _R.LATE,
        (_S.COMMITTED, _E.COMMIT): _R.DONE,
        (_S.COMMITTED, _E.ABORT): _R.CONFLICT,
        (_S.COMMITTED, _E.EXPIRE): _R.CONFLICT,
        (_S.COMMITTED, _E.REFUSE): _R.INVALID,
        (_S.COMMITTED, _E.MERGED): _R.DONE,
        (_S.COMMITTED, _E.ABORT_LOGGED): _R.INVALID,
        (_S.ABORTING, _E.BEGIN): _R.LATE,
        (_S.ABORTING, _E.DATA): _R.LATE,
        (_S.ABORTING, _E.COMMIT): _R.CONFLICT,
        (_S.ABORTING, _E.ABORT): _R.IN_PROGRESS,
        (_S.ABORTING, _E.EXPIRE): _R.IN_PROGRESS,
        (_S.ABORTING, _E.REFUSE): _R.IN_PROGRESS,
        (_S.ABORTING, _E.MERGED): _R.INVALID,
        (_S.ABORTING, _E.ABORT_LOGGED): Move(_S.ABORTED),
        (_S.ABORTED, _E.BEGIN): _R.LATE,
        (_S.ABORTED, _E.DATA): _R.LATE,
        (_S.ABORTED, _E.COMMIT): _R.CONFLICT,
        (_S.ABORTED, _E.ABORT): _R.DONE,
        (_S.ABORTED, _E.EXPIRE): _R.DONE,
        (_S.ABORTED, _E.REFUSE): _R.DONE,
        (_S.ABORTED, _E.MERGED): _R.INVALID,
        (_S.ABORTED, _E.ABORT_LOGGED): _R.DONE,
    }
)


def step(state: State, event: Event, transaction: object = "?") -> tuple[State, Row]:
    """The state after an event, and the row of the table that says so.

    ``transaction`` is turned into text for the error only.

    Raises:
        InvalidTransitionError: the pair can only come from a defect of the caller.
    """
    row = TRANSITIONS[state, event]
    match row:
        case Move(to):
            return to, row
        case Reply.INVALID:
            raise InvalidTransitionError(
                f"transaction {transaction} is {state} and got {event}, which must not happen; nothing was written",
                transaction=str(transaction),
                state=state,
                request=event,
            )
        case _:
            return state, row
