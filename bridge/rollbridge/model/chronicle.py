"""The chronicle of a fold: each change of a transaction's state, with what caused it, for the leader's log.

The fold only notes values; whoever runs it writes them down. Ordinary changes are given to logs only while somebody
wants to read them (:attr:`Chronicle.is_tracing`), since most leaders do not, and there are several of them for each
transaction. What is not ordinary is always given, within bounds: an expired or refused transaction, one that was
aborted by somebody else than its owner or committed by a rolling commit, frames that came from nowhere or from a former
owner.

A leader that serves (:attr:`Chronicle.is_live`) keeps besides, in memory, the last events of each transaction, so that
whoever asks what became of one is told. They begin anew with each leader; whoever hands them out says since when.

Source: dask's stories of tasks (each transition with its stimulus); Kafka's transaction coordinator, which logs each
transition with the transactional id.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

from rollbridge.model.identifiers import TransactionId
from rollbridge.model.transaction import State

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
        transaction: Its id, 16 bytes.
        before, after: Its state; the same twice if frames were dropped.
        event: What happened.
        cause: Why, in a few words; empty if the event says it.
        round: The leader's round of commits in which it happened, or after which.
        is_unusual: Whether it is worth a line in every log.
    """

    at_ms: int
    transaction: bytes
    before: State
    after: State
    event: str
    cause: str
    round: int
    is_unusual: bool

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
            self._add(TransactionEvent(self.at_ms, transaction, before, after, event, cause, self.round, is_unusual))
            if after in _ENDED:
                self._end(transaction)

    def dropped(self, transaction: bytes, state: State, cause: str) -> None:
        """Note frames that change nothing, once for each transaction and cause."""
        if not self.is_live or (transaction, cause) in self._drops:
            return
        self._drops[transaction, cause] = None
        if len(self._drops) > DROPS_MAX:
            self._drops.popitem(last=False)
        self._add(TransactionEvent(self.at_ms, transaction, state, state, "frames dropped", cause, self.round, True))
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
