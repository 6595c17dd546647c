"""The numbers of a connection's commits, so that they are carried out in the order in which they were asked for.

Each group has a count of its own, and so has each session, if the connection has several. What a number waits for are
the commits before it that may be under way: those whose outcome is not known here. See
:mod:`rollbridge.model.commit_order`, which is the other side.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from rollbridge.client.futures import Completion
from rollbridge.model.commit_order import BEHIND_MAX, CONNECTION_MAX, CommitOrder
from rollbridge.model.names import GroupName

TELL_AGAIN_S: Final = 1.0
"""For how long the first of the commits under way has had no answer when its frame is sent once more."""


class Committing(Protocol):
    """A transaction whose commit was asked for, as far as the order of commits needs to know it."""

    @property
    def completion(self) -> Completion:
        """Its outcome, once that is known here."""
        ...

    def ask_again(self, order: CommitOrder) -> bool:
        """Send its COMMIT frame once more, with this order; returns whether that was possible."""
        ...


class AskedCommit:
    """A commit that was asked for.

    Attributes:
        order: What its frame says.
        is_void: Whether it is certain that nothing more of it comes to the buffer.
        is_told: Whether the leader knows that there is nothing to wait for before it, as far as that is so.
    """

    __slots__ = ("_transaction", "asked_s", "is_told", "is_void", "order")

    def __init__(self, transaction: Committing, order: CommitOrder) -> None:
        self._transaction: Committing | None = transaction
        self.order = order
        self.is_void = False
        self.is_told = not order.behind
        self.asked_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether nobody needs to wait for it."""
        return self.is_void or self._transaction is None or self._transaction.completion.settled

    def tell(self) -> None:
        """Let the leader know that there is nothing to wait for before it; tried again if that is not possible now."""
        transaction = self._transaction
        self.is_told = transaction is None or transaction.ask_again(self.order._replace(behind=0))

    def let_go(self) -> None:
        """It is over. Without this, both objects would be garbage in a cycle."""
        self._transaction = None


class CommitLine:
    """The numbers of one session in one group. Safe to use from several threads."""

    def __init__(self, connection: int, epoch: int) -> None:
        self._connection = connection
        self._epoch = epoch
        self._lock = threading.Lock()
        self._last = 0
        self._asked: deque[AskedCommit] = deque()
        """Those that may be under way, in their order; behind the first there may be some that are over."""
        self._tidy_at = 1_000

    def ask(self, transaction: Committing) -> AskedCommit:
        """The next number, for a commit that is asked for now."""
        with self._lock:
            asked = self._asked
            while asked and asked[0].is_over:
                asked.popleft().let_go()
            if len(asked) >= self._tidy_at:
                for item in asked:
                    if item.is_over:
                        item.let_go()
                asked = self._asked = deque(item for item in asked if not item.is_over)
                self._tidy_at = max(2 * len(asked), 1_000)
            number = self._last = self._last + 1
            behind = number - asked[0].order.number if asked else 0
            fresh = AskedCommit(
                transaction, CommitOrder(self._connection, self._epoch, number, min(behind, BEHIND_MAX))
            )
            asked.append(fresh)
            return fresh

    def look(self, now_s: float) -> None:
        """Tell the leader what is over where it may be waiting for that; ``now_s`` is monotonic."""
        with self._lock:
            asked = self._asked
            while asked and asked[0].is_over:
                asked.popleft().let_go()
            first = asked[0] if asked else None
        if first is not None and not first.is_told and now_s - first.asked_s > TELL_AGAIN_S:
            first.tell()


class CommitLines:
    """The numbers of one connection. Safe to use from several threads."""

    def __init__(self, next_counter: Callable[[GroupName], int]) -> None:
        """``next_counter`` gives transaction counters of a group, of which one names this connection there."""
        self._next_counter = next_counter
        self._connections: dict[GroupName, int] = {}
        self._lines: dict[tuple[GroupName, int], CommitLine] = {}
        self._lock = threading.Lock()

    def of(self, group: GroupName, epoch: int) -> CommitLine:
        """The numbers of a session in a group.

        Raises:
            ZooKeeperUnavailable, UnknownWriteError: this connection could not be given a number; nothing was asked for.
        """
        line = self._lines.get((group, epoch))
        if line is not None:
            return line
        with self._lock:
            connection = self._connections.get(group)
            if connection is None:
                connection = self._connections[group] = self._next_counter(group) & CONNECTION_MAX
            return self._lines.setdefault((group, epoch), CommitLine(connection, epoch))

    def look(self) -> None:
        """See :meth:`CommitLine.look`."""
        now_s = time.monotonic()
        for line in list(self._lines.values()):
            line.look(now_s)
