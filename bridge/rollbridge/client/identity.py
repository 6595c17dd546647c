"""Client identity: the names of clients, ids of transactions, and the order of commits.

Transaction ids come from counters, in blocks reserved in ZooKeeper: one write per thousands. Commits are numbered per
client name, group and session, so that the leader carries them out in the order in which they were asked for; a number
waits for earlier commits whose outcome is not known here. The names of one connection have numbers of their own, so
none waits for another's. :mod:`rollbridge.model.commit_order` is the other side; sessions are in
:mod:`rollbridge.client.sessions`.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Final, Protocol

from rollbridge.client.futures import Completion
from rollbridge.config import ConnectionSettings
from rollbridge.errors import KafkaUnavailableError, RollbridgeError
from rollbridge.kafka.topics import TopicAdmin
from rollbridge.model.commit_order import BEHIND_MAX, CONNECTION_MAX, CommitOrder
from rollbridge.model.names import GroupName


def own_name() -> str:
    """Return a client name for a process that has none: the host and the process id."""
    host = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in socket.gethostname())
    return f"{host[:100] or 'client'}-{os.getpid()}"


def find_cluster_id(settings: ConnectionSettings, timeout_s: float) -> str:
    """Return Kafka's id of the cluster.

    Raises:
        KafkaUnavailableError: no broker answered in time, which is a second at least.
        UnsupportedBrokerError: the cluster has no transactions v2.
    """
    try:
        with closing(
            TopicAdmin(
                settings.bootstrap_servers,
                security=settings.kafka,
                client_id=settings.client_name,
                timeout_s=max(timeout_s, 1.0),
            )
        ) as admin:
            return admin.cluster_id()
    except KafkaUnavailableError as fault:
        raise KafkaUnavailableError(
            f"no Kafka broker answered at {settings.bootstrap_servers} within {timeout_s:.3g} s: is it running, and is "
            "the address right?"
        ) from fault


logger = logging.getLogger(__name__)


# Transaction id allocation


BLOCK: Final = 50_000
"""Counters reserved at once; the leader checks the counter once per block."""
BLOCK_S: Final = 24 * 3600.0
"""Longest time for which a block is used: leaders may count old counters as those of transactions that have ended."""


def uptime_s() -> float:
    """Return a time that goes on while the machine sleeps, where the system has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class CounterSupply:
    """Allocator of numbers. Safe to use from several threads, without a lock while a block lasts."""

    def __init__(self, reserve: Callable[[int], range], poke: Callable[[], None], block: int = BLOCK) -> None:
        """Start without a block.

        Args:
            reserve: Reserves that many numbers; costs a round trip.
            poke: Called when :meth:`refill` has something to do.
            block: Numbers to reserve at once.
        """
        self._reserve = reserve
        self._poke = poke
        self._block = block
        self._current: Iterator[int] = iter(())
        self._low = 0
        self._spare: tuple[int, range, float] | None = None
        self._drops = 0
        self._until_s = 0.0
        self._lock = threading.Lock()

    def next(self) -> int:
        """Return a number that was never given out; costs a round trip only if no spare block is there in time."""
        while True:
            current = self._current
            # Advancing a range iterator is one step of the interpreter, so two threads never get the same number.
            number = next(current, None) if uptime_s() <= self._until_s else None
            if number is not None:
                if number == self._low:
                    self._poke()
                return number
            with self._lock:
                if self._current is current:
                    drops, block, until_s = self._spare or (-1, range(0), 0.0)
                    self._spare = None
                    now_s = uptime_s()
                    if drops != self._drops or now_s > until_s:
                        block, until_s = self._reserve(self._block), now_s + BLOCK_S
                    self._until_s = until_s
                    self._begin(block)

    def refill(self) -> None:
        """Reserve the next block unless there is a spare one."""
        with self._lock:
            now_s = uptime_s()
            if self._spare is not None and self._spare[0] == self._drops and now_s <= self._spare[2]:
                return
            drops = self._drops
            try:
                self._spare = drops, self._reserve(self._block), now_s + BLOCK_S
            except RollbridgeError as fault:
                logger.info("no block of transaction counters could be reserved ahead: %s", fault)

    def drop(self) -> None:
        """Drop all numbers reserved until now, as ZooKeeper may not be what it was.

        A ZooKeeper that was set back while it was away reserves the same numbers for others. Called on its connection's
        thread, so nothing may be waited for, and no lock is taken.
        """
        self._drops += 1
        self._current = iter(())

    def _begin(self, block: range) -> None:
        self._low = block.start + len(block) // 2
        self._current = iter(block)


class GroupCounters:
    """Allocator of numbers of each group, as :class:`CounterSupply`."""

    def __init__(
        self, reserve: Callable[[GroupName, int], range], poke: Callable[[], None], block: int = BLOCK
    ) -> None:
        """Start without blocks; ``reserve`` reserves that many numbers of a group."""
        self._reserve = reserve
        self._poke = poke
        self._block = block
        self._supplies: dict[GroupName, CounterSupply] = {}

    def next(self, group: GroupName) -> int:
        """See :meth:`CounterSupply.next`."""
        supply = self._supplies.get(group)
        if supply is None:
            fresh = CounterSupply(partial(self._reserve, group), self._poke, self._block)
            supply = self._supplies.setdefault(group, fresh)
        return supply.next()

    def refill(self) -> None:
        """See :meth:`CounterSupply.refill`."""
        for supply in list(self._supplies.values()):
            supply.refill()

    def drop(self) -> None:
        """See :meth:`CounterSupply.drop`."""
        for supply in list(self._supplies.values()):
            supply.drop()


# Commit order


TELL_AGAIN_S: Final = 1.0
"""Seconds for which the first commit in flight has had no answer before its frame is sent once more."""
TELL_EVERY_S: Final = 60.0
"""Seconds after which it is sent yet again, as somebody may have emptied the buffer."""
DOUBT_EVERY_S: Final = 10.0
"""Seconds after which its leader is asked about it, who may not know it: somebody may have emptied the commit log."""


class PendingCommit(Protocol):
    """Transaction whose commit was asked for, as the order of commits sees it."""

    @property
    def completion(self) -> Completion:
        """Outcome of the transaction."""
        ...

    def ask_again(self, order: CommitOrder) -> bool:
        """Send its COMMIT frame once more, with this order; return False if that was not possible."""
        ...

    def is_stranded(self) -> bool:
        """Return True if the buffer with its COMMIT frame has gone with its stream; its leader is asked about it."""
        ...

    def doubt(self) -> None:
        """Have the leader asked about it."""
        ...


class AskedCommit:
    """Commit that was asked for.

    Attributes:
        order: Commit order in its frame.
        is_void: True if certainly nothing more of it comes to the buffer.
        told_s: When a frame went off that says that nothing before it is left to wait for, as far as that is so.
        doubted_s: When the leader was asked about it.
    """

    __slots__ = ("_transaction", "asked_s", "doubted_s", "is_void", "order", "told_s")

    def __init__(self, transaction: PendingCommit, order: CommitOrder) -> None:
        self._transaction: PendingCommit | None = transaction
        self.order = order
        self.is_void = False
        self.asked_s = self.doubted_s = time.monotonic()
        self.told_s = -math.inf if order.behind else self.asked_s

    @property
    def is_over(self) -> bool:
        """True if nobody needs to wait for it."""
        return self.is_void or self._transaction is None or self._transaction.completion.settled

    def look(self, now: float) -> None:
        """Tell the leader that nothing before it is left to wait for, and ask what has become of it, now and then.

        It is given up if nobody will ever read its frame.
        """
        transaction = self._transaction
        if transaction is not None and transaction.is_stranded():
            self.is_void = True
            return
        if transaction is not None and now - self.doubted_s > DOUBT_EVERY_S:
            self.doubted_s = now
            transaction.doubt()
        is_due = now - self.told_s > TELL_EVERY_S or (transaction is not None and transaction.completion.is_missing)
        if is_due and (transaction is None or transaction.ask_again(self.order._replace(behind=0))):
            self.told_s = now

    def let_go(self) -> None:
        """Drop the transaction of a commit that is over; otherwise both objects would be garbage in a cycle."""
        self._transaction = None


class PendingAbort(Protocol):
    """Transaction whose abort was asked for."""

    @property
    def completion(self) -> Completion:
        """Outcome of the transaction."""
        ...

    def abort_again(self) -> None:
        """Send its ABORT frame once more."""
        ...

    def doubt(self) -> None:
        """Have the leader asked about it."""
        ...


class AskedAbort:
    """Abort that was asked for: its leader is asked about it now and then, as about a commit."""

    __slots__ = ("_doubted_s", "_in_flight", "_transaction")

    def __init__(self, transaction: PendingAbort, in_flight: CommitsInFlight) -> None:
        self._transaction = transaction
        self._in_flight = in_flight
        self._doubted_s = time.monotonic()
        in_flight.add(self)

    def look(self, now: float) -> None:
        """See :meth:`AskedCommit.look`."""
        transaction = self._transaction
        if transaction.completion.settled:
            self._in_flight.remove(self)
            return
        if transaction.completion.is_missing:
            transaction.abort_again()
        if now - self._doubted_s > DOUBT_EVERY_S:
            self._doubted_s = now
            transaction.doubt()


class CommitsInFlight:
    """Lines of commit numbers in which something may be in flight, and aborts, of all clients of one connection."""

    def __init__(self) -> None:
        self._lines: dict[SessionCommitNumbers | AskedAbort, None] = {}

    def add(self, line: SessionCommitNumbers | AskedAbort) -> None:
        """Note that an end was asked for; a line's lock is held."""
        self._lines[line] = None

    def remove(self, line: SessionCommitNumbers | AskedAbort) -> None:
        """Note that nothing of it is in flight; a line's lock is held."""
        self._lines.pop(line, None)

    def __len__(self) -> int:
        """Return how many there are to look at."""
        return len(self._lines)

    def look(self) -> None:
        """Look at each; called on the housekeeping thread."""
        now = time.monotonic()
        for line in list(self._lines):
            line.look(now)


class SessionCommitNumbers:
    """Commit numbers of one session in one group. Safe to use from several threads."""

    def __init__(self, connection: int, epoch: int, in_flight: CommitsInFlight) -> None:
        self._connection = connection
        self._epoch = epoch
        self._in_flight = in_flight
        self._lock = threading.Lock()
        self._last = 0
        self._asked: deque[AskedCommit] = deque()
        """Commits that may be in flight, in their order; behind the first there may be some that are over."""
        self._tidy_at = 1_000

    def ask(self, transaction: PendingCommit) -> AskedCommit:
        """Return the next number, for a commit that is asked for now."""
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
            self._in_flight.add(self)
            return fresh

    def look(self, now: float) -> None:
        """Tell the leader what is over where it may be waiting for that; ``now`` is monotonic, in seconds."""
        with self._lock:
            asked = self._asked
            while asked and asked[0].is_over:
                asked.popleft().let_go()
            if not asked:
                self._in_flight.remove(self)
                return
            first = asked[0]
        if now - first.asked_s > TELL_AGAIN_S:
            first.look(now)


_SESSIONS_KEPT: Final = 2
"""Sessions of a client in one group whose commits are numbered: those before are fenced."""


class CommitNumbers:
    """Commit numbers of one client. Safe to use from several threads."""

    __slots__ = ("_connections", "_in_flight", "_lines", "_lock", "_next_counter")

    def __init__(self, next_counter: Callable[[GroupName], int], in_flight: CommitsInFlight | None = None) -> None:
        """Start without any.

        Args:
            next_counter: Gives transaction counters, one of which names this client's line in a group.
            in_flight: Of the connection; looks after the lines.
        """
        self._next_counter = next_counter
        self._in_flight = CommitsInFlight() if in_flight is None else in_flight
        self._connections: dict[GroupName, int] = {}
        self._lines: dict[tuple[GroupName, int], SessionCommitNumbers] = {}
        self._lock = threading.Lock()

    def abort(self, transaction: PendingAbort) -> None:
        """Look after an abort that was asked for."""
        AskedAbort(transaction, self._in_flight)

    def of(self, group: GroupName, epoch: int) -> SessionCommitNumbers:
        """Return the commit numbers of a session in a group.

        Raises:
            ZooKeeperUnavailableError, UnknownWriteError: this client could not be given a number; nothing was asked
                for.
        """
        line = self._lines.get((group, epoch))
        if line is not None:
            return line
        with self._lock:
            connection = self._connections.get(group)
            if connection is None:
                connection = self._connections[group] = self._next_counter(group) & CONNECTION_MAX
            fresh = SessionCommitNumbers(connection, epoch, self._in_flight)
            line = self._lines.setdefault((group, epoch), fresh)
            for over in sorted(of for where, of in self._lines if where == group)[:-_SESSIONS_KEPT]:
                del self._lines[group, over]
            return line
