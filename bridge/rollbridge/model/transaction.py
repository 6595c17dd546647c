"""The life of a transaction as one complete table: every pair of state and event, refusals and repeats included.

States are those of the proposals: OPEN, COMMITTING, COMMITTED, ABORTING, ABORTED, and UNKNOWN for an id that the
decider has no record of. Events are the frames that arrive in the buffer and what the decider itself does.

Source: PDP-24 (commit is first marked, then carried out), DistributedLog transactions (begin, commit and abort control
records), PIP-255 (a repeated end gives the same answer).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from rollbridge.model.errors import InvalidTransitionError
from rollbridge.model.frames import PieceKey
from rollbridge.model.ids import TransactionId
from rollbridge.model.outcomes import RETAIN_DEFAULT


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


# --------------------------------------------------------------------------------------------------------------------
# What a group's leader knows of one transaction, as it answers those who ask: open, or how and where it ended.


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTransaction:
    """One transaction.

    Attributes:
        id: Its id.
        state: OPEN, COMMITTED or ABORTED.
        client_name, label: Given at its begin.
        position: Offset of its record on the commit log; -1 while it is open.
        records: How many became visible, or arrived so far.
        decided_ms: When it ended, or when it began if it is open, ms since 1970.
        reason: Why it was aborted.
        lease_ms, retain_ms: How long it may stay open after that, and how long its outcome is remembered.
        streams: Of an open one: ``scope/stream`` to its reference epoch.
        pieces: Of an open one: how many records its owners have written, as far as the leader has them.
    """

    id: TransactionId
    state: State
    client_name: str
    label: str | None = None
    position: int = -1
    records: int = 0
    decided_ms: int = 0
    reason: str = ""
    lease_ms: int = 0
    retain_ms: int = RETAIN_DEFAULT
    streams: Mapping[str, int] = field(default_factory=dict)
    pieces: Mapping[PieceKey, int] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------------------------
# The chronicle of a fold: each change of a transaction's state, with what caused it, for the leader's log.
# The fold only notes values; whoever runs it writes them down. Ordinary changes are given to logs only while somebody
# wants to read them (:attr:`Chronicle.is_tracing`), since most leaders do not, and there are several of them for each
# transaction. What is not ordinary is always given, within bounds: an expired or refused transaction, one that was
# aborted by somebody else than its owner or committed by a rolling commit, frames that came from nowhere or from a
# former owner.
# A leader that serves (:attr:`Chronicle.is_live`) keeps besides, in memory, the last events of each transaction, so
# that whoever asks what became of one is told. They begin anew with each leader; whoever hands them out says since
# when.
# Source: dask's stories of tasks (each transition with its stimulus); Kafka's transaction coordinator, which logs
# each transition with the transactional id.


UNREAD_MAX: Final = 1_000
"""Notes that wait to be taken; of more, the oldest are dropped and counted."""
DROPS_MAX: Final = 1_000
"""Transactions whose dropped frames are remembered, so that each is noted once for each cause."""
EVENTS_MAX: Final = 20
"""Events kept of one transaction: the first one, and the last ones."""
ENDED_MAX: Final = 5_000
"""Transactions that are not open any more, or of which only stray frames were seen, whose events are kept."""


class TransactionEvent(NamedTuple):
    """One change of state, or frames that changed nothing.

    Attributes:
        at_ms: When, ms since 1970: of what a frame caused, when the broker took it; else by the leader's clock.
        before, after: Its state; the same twice if frames were dropped.
        event: What happened.
        cause: Why, in a few words; empty if the event says it.
        round: The leader's round of commits in which it happened, or after which.
        transaction: Its id, 16 bytes; empty in an answer, which is about one.
        is_unusual: Whether it is worth a line in every log.
    """

    at_ms: int
    before: State
    after: State
    event: str
    cause: str
    round: int
    transaction: bytes = b""
    is_unusual: bool = False

    def change(self) -> str:
        """What changed, without the name of the transaction."""
        about = f"{self.event}: {self.cause}" if self.cause else self.event
        change = f"{self.before} -> {self.after}" if self.before is not self.after else f"stays {self.before}"
        return f"{change} ({about}), round {self.round}"

    def line(self) -> str:
        """The same with the time (UTC) before it."""
        at = datetime.fromtimestamp(self.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
        return f"{at.removesuffix('+00:00')}Z {self.change()}"

    def __str__(self) -> str:
        return f"transaction {TransactionId.from_bytes(self.transaction)} {self.change()}"


class Chronicle:
    """Of one fold; not thread-safe.

    Attributes:
        is_tracing: Whether ordinary changes are given to logs, too.
        is_live: Whether dropped frames are noted and events are kept: not while old logs are read again, where most
            frames are of that kind, and where nothing happens that did not happen before.
        at_ms: The time that is noted with what happens now.
        round: The number of the leader's round of commits, from 1 on in each term.
        lost: How many notes were dropped because nobody took them.
    """

    def __init__(self) -> None:
        self.is_tracing = False
        self.is_live = False
        self.at_ms = 0
        self.round = 0
        self.lost = 0
        self._notes: deque[TransactionEvent] = deque(maxlen=UNREAD_MAX)
        self._drops: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        self._open: dict[bytes, list[TransactionEvent]] = {}
        self._ended: OrderedDict[bytes, list[TransactionEvent]] = OrderedDict()

    @property
    def is_noting(self) -> bool:
        """Whether anybody is interested in ordinary changes: whoever notes one asks this before making up a cause."""
        return self.is_live or self.is_tracing

    def changed(
        self, transaction: bytes, before: State, after: State, event: str, cause: str = "", *, is_unusual: bool = False
    ) -> None:
        """Note a change of state."""
        if is_unusual or self.is_live or self.is_tracing:
            self._add(TransactionEvent(self.at_ms, before, after, event, cause, self.round, transaction, is_unusual))
            if after in _ENDED:
                self._end(transaction)

    def dropped(self, transaction: bytes, state: State, cause: str) -> None:
        """Note frames that change nothing, once for each transaction and cause."""
        if not self.is_live or (transaction, cause) in self._drops:
            return
        self._drops[transaction, cause] = None
        if len(self._drops) > DROPS_MAX:
            self._drops.popitem(last=False)
        self._add(TransactionEvent(self.at_ms, state, state, "frames dropped", cause, self.round, transaction, True))
        if state is State.UNKNOWN:
            self._end(transaction)

    def take(self) -> Iterator[TransactionEvent]:
        """What was noted for logs since, oldest first."""
        while self._notes:
            yield self._notes.popleft()

    def story(self, transaction: bytes) -> tuple[TransactionEvent, ...]:
        """The events of a transaction that are kept, oldest first."""
        return tuple(self._ended.get(transaction, ())) + tuple(self._open.get(transaction, ()))

    def forget(self, transaction: bytes) -> None:
        """Let the events of one go that turns out never to have been open."""
        self._open.pop(transaction, None)

    def _add(self, event: TransactionEvent) -> None:
        if event.is_unusual or self.is_tracing:
            self.lost += len(self._notes) == UNREAD_MAX
            self._notes.append(event)
        if self.is_live:
            story = self._open.setdefault(event.transaction, [])
            story.append(event)
            if len(story) > EVENTS_MAX:
                del story[1]

    def _end(self, transaction: bytes) -> None:
        """The transaction is not open, so its events are kept among those of a limited number of others."""
        story = self._open.pop(transaction, None)
        if story is None:
            return
        before = self._ended.pop(transaction, [])
        self._ended[transaction] = [*before, *story][-EVENTS_MAX:]
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)


_ENDED: Final = (State.COMMITTED, State.ABORTED)
