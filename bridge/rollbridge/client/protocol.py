"""Protocol of an open transaction at its client: when its savepoints and its end are sent, and what answers mean. Pure.

Frames of one buffer are read in their order, and those of two buffers in any. So what names records in other buffers, a
savepoint or the commit, is *held* until the brokers have answered for all that was sent there before. Where a frame
could not be sent, there is an abort in place of the commit, or behind it: the first end that the leader reads decides.

:data:`ENDS` says for each state and each event what comes of it; a simulation plays all of it, see
``bridge/tests/test_protocol_simulation.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from operator import lt
from typing import Final, Generic, NamedTuple, TypeVar

F = TypeVar("F")


class EndState(Enum):
    """State of the end of a transaction, as its client knows it."""

    __hash__ = object.__hash__  # for each look at the table; that of Enum is ten times slower
    OPEN = "open"
    HELD = "held"
    """The commit was asked for, and waits for the answers of other buffers' brokers."""
    COMMITTING = "committing"
    ABORTING = "aborting"
    TAKEN_BACK = "taken-back"
    """The commit was asked for, and an abort was sent, as something could not be delivered."""
    GIVEN_UP = "given-up"
    """Something could not be delivered before an end was asked for, and an abort was sent."""
    ENDED = "ended"


class EndEvent(Enum):
    """Event in the life of a transaction."""

    __hash__ = object.__hash__
    COMMIT = "a commit is asked for"
    COMMIT_EARLY = "a commit is asked for before all other buffers' brokers have answered"
    COMMIT_BROKEN = "a commit is asked for after a frame could not be delivered"
    ABORT = "an abort is asked for"
    UNSENT = "the frame of the end was not taken, so nothing was asked for"
    ANSWERED = "all other buffers' brokers have answered"
    ANSWERED_BROKEN = "they have, and a frame could not be delivered"
    REFUSED = "the frame of the commit could not be delivered"
    MISSED = "the leader does not know of the end"
    SETTLED = "the outcome is known"


class EndAction(Enum):
    """Answer to an event."""

    NOTHING = "nothing"
    COMMIT = "send the commit"
    ABORT = "send an abort"
    FAIL = "send an abort, and end all waits for the outcome"


def _row(state: EndState, **changes: tuple[EndState, EndAction]) -> dict[tuple[EndState, EndEvent], _Step]:
    """Return what comes of each event in a state: nothing, unless it is said."""
    given = {EndEvent[name]: step for name, step in changes.items()}
    given.setdefault(EndEvent.SETTLED, (EndState.ENDED, EndAction.NOTHING))
    return {(state, event): given.get(event, (state, EndAction.NOTHING)) for event in EndEvent}


_Step = tuple[EndState, EndAction]
ENDS: Final[Mapping[tuple[EndState, EndEvent], _Step]] = {
    **_row(
        EndState.OPEN,
        COMMIT=(EndState.COMMITTING, EndAction.COMMIT),
        COMMIT_EARLY=(EndState.HELD, EndAction.NOTHING),
        COMMIT_BROKEN=(EndState.GIVEN_UP, EndAction.FAIL),
        ABORT=(EndState.ABORTING, EndAction.ABORT),
    ),
    **_row(
        EndState.HELD,
        ANSWERED=(EndState.COMMITTING, EndAction.COMMIT),
        ANSWERED_BROKEN=(EndState.TAKEN_BACK, EndAction.ABORT),
    ),
    **_row(
        EndState.COMMITTING,
        UNSENT=(EndState.OPEN, EndAction.NOTHING),
        # It may have arrived all the same: the first end that the leader reads decides.
        REFUSED=(EndState.TAKEN_BACK, EndAction.ABORT),
        MISSED=(EndState.COMMITTING, EndAction.COMMIT),
    ),
    **_row(
        EndState.ABORTING,
        UNSENT=(EndState.OPEN, EndAction.NOTHING),
        MISSED=(EndState.ABORTING, EndAction.ABORT),
    ),
    **_row(
        EndState.TAKEN_BACK,
        MISSED=(EndState.TAKEN_BACK, EndAction.ABORT),
    ),
    **_row(EndState.GIVEN_UP),
    **_row(EndState.ENDED),
}
"""Next state and action, for each event in each state."""


class Due(NamedTuple, Generic[F]):
    """Something that was held and is due.

    Attributes:
        savepoint: Savepoint that is due; None if it is the end.
        frame: Key and value of its frame; None if it is not to be sent any more, or an abort in its place.
    """

    savepoint: F | None
    frame: tuple[bytes, bytes] | None


class TransactionProtocol(Generic[F]):
    """Counts of frames, held savepoints and the end of one transaction. ``F`` is the type of a savepoint.

    Not thread-safe: ``sent`` is written by who sends, ``answered`` of the first buffer by the delivery thread, and the
    rest under a lock that is never held for long.

    Attributes:
        sent: Frames that were handed over to each buffer, by its place; held ones are among them.
        answered: Those that the brokers have answered.
        dropped: Held ones that are never sent.
        state: State of its end.
        asked: End that was asked for: COMMIT, ABORT, or None.
    """

    __slots__ = ("_commit", "_savepoints", "answered", "asked", "dropped", "sent", "state")

    def __init__(self, places: int) -> None:
        """Begin with nothing sent to so many buffers."""
        self.sent = [0] * places
        self.answered = [0] * places
        self.state = EndState.OPEN
        self.asked: EndEvent | None = None
        self.dropped = 0
        self._commit: tuple[bytes, bytes] | None = None
        self._savepoints: list[tuple[list[int], F, tuple[bytes, bytes]]] = []

    @property
    def holds(self) -> bool:
        """Return whether something is held."""
        return self.state is EndState.HELD or bool(self._savepoints)

    @property
    def answers(self) -> int:
        """Return how many frames need not be waited for any more."""
        return sum(self.answered) + self.dropped

    def is_answered(self, counts: list[int]) -> bool:
        """Return whether the brokers of all buffers but the first have answered for so many frames."""
        return not any(map(lt, self.answered[1:], counts[1:]))

    def add_place(self) -> None:
        """Count a further buffer, to which one frame goes."""
        self.sent.append(1)
        self.answered.append(0)

    def drop_places(self, first: int) -> None:
        """Forget the buffers from a place on, to which nothing went."""
        del self.sent[first:], self.answered[first:]

    def step(self, event: EndEvent) -> EndAction:
        """Take the step of the table."""
        self.state, action = ENDS[self.state, event]
        return action

    def commit(self, frame: tuple[bytes, bytes], *, failed: bool) -> EndAction:
        """Return what to do as a commit is asked for; one that is held is due later."""
        self.asked = EndEvent.COMMIT
        if failed:
            return self.step(EndEvent.COMMIT_BROKEN)
        if self.is_answered(self.sent):
            return self.step(EndEvent.COMMIT)
        self._commit = frame
        return self.step(EndEvent.COMMIT_EARLY)

    def abort(self) -> None:
        """Note that an abort is asked for."""
        self.asked = EndEvent.ABORT
        self.step(EndEvent.ABORT)

    def unsent(self) -> None:
        """Note that the frame of the end was not taken: it may be asked for again."""
        self.asked = None
        self.step(EndEvent.UNSENT)

    def hold(self, savepoint: F, frame: tuple[bytes, bytes]) -> None:
        """Hold a savepoint until the brokers have answered for all that was sent before it."""
        self._savepoints.append((self.sent.copy(), savepoint, frame))
        self.sent[0] += 1

    def due(self, *, failed: bool) -> Iterator[Due[F]]:
        """Yield what is due: savepoints in their order, and then the end.

        Args:
            failed: True if a frame could not be delivered.
        """
        while self._savepoints and self.is_answered(self._savepoints[0][0]):
            _, savepoint, frame = self._savepoints.pop(0)
            self.dropped += failed
            yield Due(savepoint, None if failed else frame)
        if self.state is EndState.HELD and self.is_answered(self.sent):
            action = self.step(EndEvent.ANSWERED_BROKEN if failed else EndEvent.ANSWERED)
            frame_, self._commit = self._commit, None
            yield Due(None, frame_ if action is EndAction.COMMIT else None)
