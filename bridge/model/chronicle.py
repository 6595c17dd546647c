"""The chronicle of a fold: each change of a transaction's state, with what caused it, for the leader's log.

The fold only notes values; whoever runs it writes them down. Ordinary changes are noted only while somebody wants to
read them (:attr:`Chronicle.is_tracing`), since most leaders do not, and there are several of them for each transaction.
What is not ordinary is always noted, within bounds: an expired or refused transaction, one that was aborted by somebody
else than its owner or committed by a rolling commit, frames that came from nowhere or from a former owner.

Source: dask's stories of tasks (each transition with its stimulus); Kafka's transaction coordinator, which logs each
transition with the transactional id.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bridge.model.identifiers import TransactionId
from bridge.model.transaction import State

UNREAD_MAX: Final = 1_000
"""Notes that wait to be taken; of more, the oldest are dropped and counted."""
DROPS_MAX: Final = 1_000
"""Transactions whose dropped frames are remembered, so that each is noted once for each cause."""


@dataclass(frozen=True, slots=True)
class Note:
    """One change of state, or frames that changed nothing.

    Attributes:
        transaction: Its id, 16 bytes.
        before, after: Its state; the same twice if frames were dropped.
        event: What happened.
        cause: Why, in a few words; empty if the event says it.
        round: The leader's round of commits in which it happened, or after which.
        is_unusual: Whether it is worth a line in every log.
    """

    transaction: bytes
    before: State
    after: State
    event: str
    cause: str
    round: int
    is_unusual: bool

    def __str__(self) -> str:
        about = f"{self.event}: {self.cause}" if self.cause else self.event
        change = f"{self.before} -> {self.after}" if self.before is not self.after else f"stays {self.before}"
        return f"transaction {TransactionId.from_bytes(self.transaction)} {change} ({about}), round {self.round}"


class Chronicle:
    """Of one fold; not thread-safe.

    Attributes:
        is_tracing: Whether ordinary changes are noted, too.
        is_live: Whether dropped frames are noted: not while old logs are read again, where most are of that kind.
        round: The number of the leader's round of commits, from 1 on in each term.
        lost: How many notes were dropped because nobody took them.
    """

    def __init__(self) -> None:
        self.is_tracing = False
        self.is_live = False
        self.round = 0
        self.lost = 0
        self._notes: deque[Note] = deque(maxlen=UNREAD_MAX)
        self._drops: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def changed(
        self, transaction: bytes, before: State, after: State, event: str, cause: str = "", *, is_unusual: bool = False
    ) -> None:
        """Note a change of state. Callers of ordinary ones ask :attr:`is_tracing` before they make up a cause."""
        if is_unusual or self.is_tracing:
            self._add(Note(transaction, before, after, event, cause, self.round, is_unusual))

    def dropped(self, transaction: bytes, state: State, cause: str) -> None:
        """Note frames that change nothing, once for each transaction and cause."""
        if not self.is_live or (transaction, cause) in self._drops:
            return
        self._drops[transaction, cause] = None
        if len(self._drops) > DROPS_MAX:
            self._drops.popitem(last=False)
        self._add(Note(transaction, state, state, "frames dropped", cause, self.round, is_unusual=True))

    def take(self) -> Iterator[Note]:
        """What was noted since, oldest first."""
        while self._notes:
            yield self._notes.popleft()

    def _add(self, note: Note) -> None:
        self.lost += len(self._notes) == UNREAD_MAX
        self._notes.append(note)
