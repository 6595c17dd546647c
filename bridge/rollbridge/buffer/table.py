"""The states of a transaction as one table, which decides the effect of each frame and each act of the leader.

The fold of the buffers (:mod:`rollbridge.buffer.fold`) makes an event of each frame, with its place and sender, and of
each act of the leader. It finds the event in the row of the transaction's state, in :data:`DECISIONS`, and obeys:

- a :class:`Move` changes the state;
- a :class:`Stay` leaves it as it is: the frame belongs to the transaction, or there is nothing to do;
- a :class:`Rejection` is the reason for which a frame changes nothing, and under which it is counted.

A pair that is missing cannot happen, and :func:`decide` raises. A test drives a fold through every row. States are
those of the proposals; ENDED is either COMMITTED or ABORTED: of a transaction whose outcome is on the commit log the
fold keeps only the id.

The *chronicle* collects the changes of state with their causes as values; the fold's caller logs them:

- Ordinary changes are collected only while they are read (:attr:`Chronicle.is_tracing`): a transaction has several.
- Unusual ones are always collected, within bounds: a transaction that expired, was refused, was aborted by another
  client than its owner, or was committed by a rolling commit; frames without an origin or of a former owner.
- A leader that serves (:attr:`Chronicle.is_live`) also keeps the last events of each transaction in memory, for
  ``rollbridge txn describe``. They are lost with each change of leader, so answers say since when they are kept.

Source: PDP-24 (commit is first marked, then carried out), DistributedLog transactions (begin, commit and abort control
records), PIP-255 (a repeated end gives the same answer); for the chronicle dask's stories of tasks, each transition
with its stimulus, and Kafka's transaction coordinator, which logs each transition with the transactional id.

Tour of a commit, stop 3 of 8: see docs/tour.md.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, StrEnum
from typing import Any, Final, NamedTuple

from rollbridge.base.errors import INVALID_TRANSITION, ConflictError
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import PieceKey
from rollbridge.commitlog.outcomes import RETAIN_DEFAULT


class State(StrEnum):
    """State of a transaction."""

    UNKNOWN = "unknown"
    """There is no record of it."""
    OPEN = "open"
    """It takes frames, and its lease runs."""
    COMMITTING = "committing"
    """Its commit was asked for, and it waits for its merge."""
    COMMITTED = "committed"
    """Its records are visible, and its COMMIT record is on the commit log."""
    ABORTING = "aborting"
    """Its abort is decided, and it waits for its ABORT record."""
    ABORTED = "aborted"
    """Its ABORT record is on the commit log; nothing of it is or will be visible."""
    ENDED = "ended"
    """It has an outcome, and all that the fold keeps of it is its id."""


class Event(StrEnum):
    """Events of a transaction: frames by kind, place and sender; then acts of the leader."""

    BEGIN = "begin"
    """Its owner's BEGIN frame; there is one in the buffer of each of its streams."""
    RESUME = "resume"
    """The BEGIN frame of a new owner, likewise."""
    CROWDED = "crowded"
    """A BEGIN frame, and the group has no room for the transaction, nor to log that it is refused."""
    DATA = "data"
    """A DATA frame with records that have not come before."""
    DATA_AGAIN = "data-again"
    """A DATA frame whose records have come before."""
    DATA_OF_FORMER = "data-of-former-owner"
    """A DATA frame of an owner after a later one has resumed it."""
    COMMIT = "commit"
    """The COMMIT frame, in the buffer of its first stream."""
    ABORT = "abort"
    """The ABORT frame, in the buffer of its first stream, or an admin request."""
    SAVEPOINT = "savepoint"
    """A SAVEPOINT frame, in the buffer of its first stream."""
    SAVEPOINT_AGAIN = "savepoint-again"
    """A SAVEPOINT frame whose owner has made a later one, or this one."""
    EXTEND = "extend"
    """An EXTEND frame, in the buffer of its first stream."""
    END_OF_FORMER = "end-of-former-owner"
    """A COMMIT, ABORT or EXTEND frame of a former owner, or of a session that a newer one has fenced; or a SAVEPOINT
    frame of a former owner."""
    RESUME_OF_FORMER = "resume-of-former-owner"
    """A BEGIN frame with which an owner continues as another part, after a later owner has resumed it."""
    ASTRAY = "astray"
    """A frame in the buffer of a stream that is not one of its own, or an end that is not in that of the first."""
    CORRUPT = "corrupt"
    """A frame that does not parse; if the transaction still lacks it, it is then refused."""
    EXPIRE = "expire"
    """Its lease has run out, and the buffers have been read to their ends."""
    REFUSE = "refuse"
    """The leader found that it cannot be merged: incomplete, corrupt or over a limit."""
    MERGED = "merged"
    """The native transaction that holds its records and its COMMIT record is committed."""
    ABORT_LOGGED = "abort-logged"
    """The native transaction that holds its ABORT record is committed."""
    OUTCOME_KNOWN = "outcome-known"
    """The commit log turns out to hold its outcome already, so its frames had been read again."""


@dataclass(frozen=True, slots=True)
class Move:
    """A change of state."""

    to: State


class Stay(Enum):
    """No change of state, and nothing is dropped."""

    TAKEN = "it belongs to the transaction, which takes it"
    IGNORED = "there is nothing to do any more"


class Rejection(StrEnum):
    """Why something changes nothing; each is a name under which :attr:`BufferFold.rejected` counts."""

    LATE = "late"
    """It came after the end was decided."""
    ZOMBIE = "zombie"
    """No such transaction is open."""
    FENCED = "fenced"
    """Its sender does not own the transaction any more."""
    DUPLICATE = "duplicate"
    """It had been written before."""
    FOREIGN = "foreign"
    """It is in the wrong place."""
    CROWDED = "crowded"
    """There is no room for it."""
    CORRUPT = "corrupt"
    """It does not parse."""
    NEWER = "newer"
    """Only a newer release can read it; its transaction, if it is open, is refused."""
    REPEATED = "repeated"
    """The whole message has been folded before; its transaction is not checked."""


class AbortCause(StrEnum):
    """Why a transaction has ended as aborted, among few causes; its ABORT record says it in words."""

    CLIENT = "client"
    """Its client asked for it."""
    OPERATOR = "operator"
    """An operator asked for it."""
    EXPIRED = "expired"
    """Its lease has run out."""
    FENCED = "fenced"
    """A newer session of its client has begun."""
    ORDER = "order"
    """An earlier commit of its connection never arrived, or a later one had been asked for."""
    CONDITION = "condition"
    """An expectation about a segment does not hold, or could not be decided."""
    OFFSETS = "offsets"
    """The offsets of a consumer group that it was to commit were refused."""
    LIMIT = "limit"
    """It exceeds a limit, or its group had no room for it."""
    REFUSED = "refused"
    """Kafka refused its records, or what its commit needs."""
    OTHER = "other"
    """Its frames contradict each other, are missing or of a newer version; it has an unknown id; or its stream was
    deleted."""


Row = Move | Stay | Rejection

_S, _E, _D = State, Event, Rejection

DECISIONS: Final[Mapping[State, Mapping[Event, Row]]] = {
    _S.UNKNOWN: {
        _E.BEGIN: Move(_S.OPEN),
        _E.RESUME: _D.FOREIGN,  # only a begun transaction can be resumed
        _E.CROWDED: _D.CROWDED,
        _E.DATA: _D.ZOMBIE,
        _E.COMMIT: _D.ZOMBIE,
        _E.ABORT: _D.ZOMBIE,
        _E.SAVEPOINT: _D.ZOMBIE,
        _E.EXTEND: _D.ZOMBIE,
        _E.ASTRAY: _D.FOREIGN,
        _E.CORRUPT: _D.CORRUPT,
    },
    _S.OPEN: {
        _E.BEGIN: Stay.TAKEN,
        _E.RESUME: Stay.TAKEN,
        _E.DATA: Stay.TAKEN,
        _E.DATA_AGAIN: _D.DUPLICATE,
        _E.DATA_OF_FORMER: _D.FENCED,
        _E.COMMIT: Move(_S.COMMITTING),
        _E.ABORT: Move(_S.ABORTING),
        _E.SAVEPOINT: Stay.TAKEN,
        _E.SAVEPOINT_AGAIN: _D.DUPLICATE,
        _E.EXTEND: Stay.TAKEN,
        _E.END_OF_FORMER: _D.FENCED,
        _E.RESUME_OF_FORMER: _D.FENCED,
        _E.ASTRAY: _D.FOREIGN,
        _E.CORRUPT: _D.CORRUPT,
        _E.EXPIRE: Move(_S.ABORTING),
        _E.REFUSE: Move(_S.ABORTING),
        _E.OUTCOME_KNOWN: _D.LATE,
    },
    _S.COMMITTING: {
        _E.BEGIN: Stay.TAKEN,  # the buffers of several streams are read in no common order
        _E.RESUME: Stay.TAKEN,
        _E.DATA: Stay.TAKEN,
        _E.DATA_AGAIN: _D.DUPLICATE,
        _E.DATA_OF_FORMER: _D.FENCED,
        _E.COMMIT: _D.LATE,
        _E.ABORT: _D.LATE,
        _E.SAVEPOINT: _D.LATE,
        _E.EXTEND: _D.LATE,
        _E.END_OF_FORMER: _D.FENCED,
        _E.RESUME_OF_FORMER: _D.FENCED,
        _E.ASTRAY: _D.FOREIGN,
        _E.CORRUPT: _D.CORRUPT,
        _E.EXPIRE: Stay.IGNORED,  # the lease ends with the request to commit
        _E.REFUSE: Move(_S.ABORTING),
        _E.MERGED: Move(_S.COMMITTED),
        _E.OUTCOME_KNOWN: _D.LATE,
    },
    _S.ABORTING: {
        _E.BEGIN: Stay.TAKEN,  # whose it is, and from where on buffers are kept, is known until its end is logged
        _E.RESUME: Stay.TAKEN,
        _E.DATA: _D.LATE,  # what had come is forgotten: it cannot be told whether it comes again
        _E.DATA_OF_FORMER: _D.LATE,
        _E.COMMIT: _D.LATE,
        _E.ABORT: _D.LATE,
        _E.SAVEPOINT: _D.LATE,
        _E.EXTEND: _D.LATE,
        _E.END_OF_FORMER: _D.FENCED,
        _E.RESUME_OF_FORMER: _D.FENCED,
        _E.ASTRAY: _D.FOREIGN,
        _E.CORRUPT: _D.CORRUPT,
        _E.EXPIRE: Stay.IGNORED,
        _E.REFUSE: Stay.IGNORED,
        _E.ABORT_LOGGED: Move(_S.ABORTED),
        _E.OUTCOME_KNOWN: _D.LATE,
    },
    _S.ENDED: {
        _E.BEGIN: _D.LATE,  # from another stream's buffer, or doubled: it must not open the transaction again
        _E.RESUME: _D.LATE,
        _E.DATA: _D.ZOMBIE,
        _E.COMMIT: _D.ZOMBIE,
        _E.ABORT: _D.ZOMBIE,
        _E.SAVEPOINT: _D.ZOMBIE,
        _E.EXTEND: _D.ZOMBIE,
        _E.CORRUPT: _D.CORRUPT,
    },
}


def decide(state: State, event: Event, transaction: object = "?") -> Row:
    """Return what an event does to a transaction in a state.

    ``transaction`` is turned into text for the error only.

    Raises:
        ConflictError: the pair can only come from a defect of the caller.
    """
    row = DECISIONS.get(state, {}).get(event)
    if row is None:
        raise ConflictError(
            f"transaction {transaction} is {state} and got {event}, which must not happen; nothing was written",
            transaction=str(transaction),
            state=state,
            request=event,
            code=INVALID_TRANSITION,
        )
    return row


# What a leader answers about one transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTransaction:
    """Tell of one transaction.

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


@dataclass(frozen=True, slots=True)
class Arrived:
    """Arrivals of an open transaction apart from its owners' records.

    Attributes:
        bytes: Bytes of the frames of its owners.
        others: Records of parts that other processes wrote, which only the commit of its owner can name.
    """

    bytes: int
    others: int


# The chronicle

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
        """Return the change as text, without the name of the transaction."""
        about = f"{self.event}: {self.cause}" if self.cause else self.event
        change = f"{self.before} -> {self.after}" if self.before is not self.after else f"stays {self.before}"
        return f"{change} ({about}), round {self.round}"

    def line(self) -> str:
        """Return the text after its time (UTC)."""
        at = datetime.fromtimestamp(self.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
        return f"{at.removesuffix('+00:00')}Z {self.change()}"

    def __str__(self) -> str:
        return f"transaction {TransactionId.from_bytes(self.transaction)} {self.change()}"


_FIELDS: Final = len(TransactionEvent._fields) - 1


class Chronicle:
    """Events of the transactions of one fold; not thread-safe.

    Attributes:
        is_tracing: True to give ordinary changes to logs, too.
        is_live: True to record dropped frames and keep events; False while old logs are read again, where most frames
            are dropped and nothing new happens.
        at_ms: The time recorded with present events.
        round: The number of the leader's round of commits, from 1 on in each term.
        lost: Number of events dropped because they were not taken.
    """

    def __init__(self) -> None:
        self.is_tracing = False
        self.is_live = False
        self.at_ms = 0
        self.round = 0
        self.lost = 0
        self._notes: deque[TransactionEvent] = deque(maxlen=UNREAD_MAX)
        self._forgotten: set[bytes] = set()
        self._drops: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        # The events of each, one behind the other, each without the transaction: a list of its own for each event would
        # cost a leader as much again as making it, and throwing it away when many others have ended.
        self._open: dict[bytes, list[Any]] = {}
        self._ended: OrderedDict[bytes, list[Any]] = OrderedDict()

    @property
    def is_noting(self) -> bool:
        """Return whether ordinary changes are wanted: callers check it before they make up a cause."""
        return self.is_live or self.is_tracing

    def changed(
        self, transaction: bytes, before: State, after: State, event: str, cause: str = "", *, is_unusual: bool = False
    ) -> None:
        """Record a change of state."""
        if is_unusual or self.is_tracing:
            self._tell(TransactionEvent(self.at_ms, before, after, event, cause, self.round, transaction, is_unusual))
        if self.is_live:
            self._add(transaction, (self.at_ms, before, after, event, cause, self.round, is_unusual))
        if after in _ENDED:
            self._end(transaction)

    def rejected(self, transaction: bytes, state: State, cause: str) -> None:
        """Record frames that change nothing, once for each transaction and cause."""
        if not self.is_live or (transaction, cause) in self._drops:
            return
        self._drops[transaction, cause] = None
        if len(self._drops) > DROPS_MAX:
            self._drops.popitem(last=False)
        event = TransactionEvent(self.at_ms, state, state, "frames dropped", cause, self.round, transaction, True)
        self._tell(event)
        self._add(transaction, (event.at_ms, state, state, event.event, cause, event.round, True))
        if state is State.UNKNOWN:
            self._end(transaction)

    def take(self) -> Iterator[TransactionEvent]:
        """Yield what was noted for logs since the last time, oldest first."""
        self._sweep()
        while self._notes:
            yield self._notes.popleft()

    def story(self, transaction: bytes) -> tuple[TransactionEvent, ...]:
        """Return the events of a transaction that are kept, oldest first."""
        found = [*self._ended.get(transaction, ()), *self._open.get(transaction, ())]
        made = []
        for first in range(0, len(found), _FIELDS):
            at_ms, before, after, event, cause, number, is_unusual = found[first : first + _FIELDS]
            made.append(TransactionEvent(at_ms, before, after, event, cause, number, transaction, is_unusual))
        return tuple(made)

    def forget(self, transaction: bytes) -> None:
        """Let the events of one go that turns out to have ended before: its frames were only read again.

        Read in another order than the first time, they may have given another decision, which never counted.
        """
        self._open.pop(transaction, None)
        if self._notes:
            self._forgotten.add(transaction)
            if len(self._forgotten) > UNREAD_MAX:  # a standby's are never taken
                self._sweep()

    def _sweep(self) -> None:
        if self._forgotten:
            left = (note for note in self._notes if note.transaction not in self._forgotten)
            self._notes = deque(left, maxlen=UNREAD_MAX)
            self._forgotten.clear()

    def _tell(self, event: TransactionEvent) -> None:
        self.lost += len(self._notes) == UNREAD_MAX
        self._notes.append(event)

    def _add(self, transaction: bytes, event: tuple[int, State, State, str, str, int, bool]) -> None:
        story = self._open.get(transaction)
        if story is None:
            self._open[transaction] = [*event]
            return
        story += event
        if len(story) > EVENTS_MAX * _FIELDS:
            del story[_FIELDS : 2 * _FIELDS]

    def _end(self, transaction: bytes) -> None:
        """Keep the events of one that is not open among those of a limited number of others."""
        story = self._open.pop(transaction, None)
        if story is None:
            return
        before = self._ended.pop(transaction, None)
        self._ended[transaction] = story if before is None else [*before, *story][-EVENTS_MAX * _FIELDS :]
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)


_ENDED: Final = (State.COMMITTED, State.ABORTED)
