"""The appender's states as two complete tables: what each state allows, and where each result leads."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class State(Enum):
    """Where an appender stands."""

    NEW = "new"
    """Not initialised yet: nothing was ever sent."""
    READY = "ready"
    """Initialised, no native transaction open."""
    IN_TRANSACTION = "in transaction"
    """Something was appended and not ended yet."""
    MUST_ABORT = "must abort"
    """The broker refused something: the open transaction can only be aborted."""
    UNKNOWN = "unknown"
    """An answer was lost: only the coordinator knows."""
    FENCED = "fenced"
    """A newer user has the transactional id."""
    CLOSED = "closed"


class Operation(Enum):
    """What a caller may ask for."""

    INIT = "init"
    APPEND = "append"
    SEND_OFFSETS = "send_offsets"
    COMMIT = "commit"
    ABORT = "abort"
    CLOSE = "close"


class Permission(Enum):
    """What a state says to an operation."""

    RUN = "run"
    NOTHING = "nothing to do"
    """Succeeds without a request: there is nothing to end, or to close."""
    REFUSE = "refuse"
    """InvalidStateError; nothing is sent."""
    FENCED = "fenced"
    """ProducerFencedError; nothing is sent."""


class Result(Enum):
    """How an operation that ran ended."""

    OK = "ok"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    FENCED = "fenced"


_RUN, _NOTHING, _REFUSE, _FENCED = Permission.RUN, Permission.NOTHING, Permission.REFUSE, Permission.FENCED

PERMISSIONS: Final[Mapping[tuple[State, Operation], Permission]] = {
    (State.NEW, Operation.INIT): _RUN,
    (State.NEW, Operation.APPEND): _REFUSE,
    (State.NEW, Operation.SEND_OFFSETS): _REFUSE,
    (State.NEW, Operation.COMMIT): _REFUSE,
    (State.NEW, Operation.ABORT): _REFUSE,
    (State.NEW, Operation.CLOSE): _RUN,
    (State.READY, Operation.INIT): _RUN,
    (State.READY, Operation.APPEND): _RUN,
    (State.READY, Operation.SEND_OFFSETS): _RUN,
    (State.READY, Operation.COMMIT): _NOTHING,
    (State.READY, Operation.ABORT): _NOTHING,
    (State.READY, Operation.CLOSE): _RUN,
    (State.IN_TRANSACTION, Operation.INIT): _RUN,
    (State.IN_TRANSACTION, Operation.APPEND): _RUN,
    (State.IN_TRANSACTION, Operation.SEND_OFFSETS): _RUN,
    (State.IN_TRANSACTION, Operation.COMMIT): _RUN,
    (State.IN_TRANSACTION, Operation.ABORT): _RUN,
    (State.IN_TRANSACTION, Operation.CLOSE): _RUN,
    (State.MUST_ABORT, Operation.INIT): _RUN,
    (State.MUST_ABORT, Operation.APPEND): _REFUSE,
    (State.MUST_ABORT, Operation.SEND_OFFSETS): _REFUSE,
    (State.MUST_ABORT, Operation.COMMIT): _REFUSE,
    (State.MUST_ABORT, Operation.ABORT): _RUN,
    (State.MUST_ABORT, Operation.CLOSE): _RUN,
    (State.UNKNOWN, Operation.INIT): _RUN,
    (State.UNKNOWN, Operation.APPEND): _REFUSE,
    (State.UNKNOWN, Operation.SEND_OFFSETS): _REFUSE,
    (State.UNKNOWN, Operation.COMMIT): _REFUSE,
    (State.UNKNOWN, Operation.ABORT): _REFUSE,
    (State.UNKNOWN, Operation.CLOSE): _RUN,
    (State.FENCED, Operation.INIT): _FENCED,
    (State.FENCED, Operation.APPEND): _FENCED,
    (State.FENCED, Operation.SEND_OFFSETS): _FENCED,
    (State.FENCED, Operation.COMMIT): _FENCED,
    (State.FENCED, Operation.ABORT): _FENCED,
    (State.FENCED, Operation.CLOSE): _RUN,
    (State.CLOSED, Operation.INIT): _REFUSE,
    (State.CLOSED, Operation.APPEND): _REFUSE,
    (State.CLOSED, Operation.SEND_OFFSETS): _REFUSE,
    (State.CLOSED, Operation.COMMIT): _REFUSE,
    (State.CLOSED, Operation.ABORT): _REFUSE,
    (State.CLOSED, Operation.CLOSE): _NOTHING,
}

AFTER: Final[Mapping[tuple[Operation, Result], State]] = {
    (Operation.INIT, Result.OK): State.READY,
    # Before the first init has succeeded once, the state stays NEW instead: there is no epoch to recover.
    (Operation.INIT, Result.REFUSED): State.UNKNOWN,
    (Operation.INIT, Result.UNKNOWN): State.UNKNOWN,
    (Operation.INIT, Result.FENCED): State.FENCED,
    # An append that sent nothing leaves the state as it was.
    (Operation.APPEND, Result.OK): State.IN_TRANSACTION,
    (Operation.APPEND, Result.REFUSED): State.MUST_ABORT,
    (Operation.APPEND, Result.UNKNOWN): State.UNKNOWN,
    (Operation.APPEND, Result.FENCED): State.FENCED,
    (Operation.SEND_OFFSETS, Result.OK): State.IN_TRANSACTION,
    (Operation.SEND_OFFSETS, Result.REFUSED): State.MUST_ABORT,
    (Operation.SEND_OFFSETS, Result.UNKNOWN): State.UNKNOWN,
    (Operation.SEND_OFFSETS, Result.FENCED): State.FENCED,
    (Operation.COMMIT, Result.OK): State.READY,
    (Operation.COMMIT, Result.REFUSED): State.MUST_ABORT,
    (Operation.COMMIT, Result.UNKNOWN): State.UNKNOWN,
    (Operation.COMMIT, Result.FENCED): State.FENCED,
    (Operation.ABORT, Result.OK): State.READY,
    (Operation.ABORT, Result.REFUSED): State.UNKNOWN,
    (Operation.ABORT, Result.UNKNOWN): State.UNKNOWN,
    (Operation.ABORT, Result.FENCED): State.FENCED,
    (Operation.CLOSE, Result.OK): State.CLOSED,
    (Operation.CLOSE, Result.REFUSED): State.CLOSED,
    (Operation.CLOSE, Result.UNKNOWN): State.CLOSED,
    (Operation.CLOSE, Result.FENCED): State.CLOSED,
}
