"""Client identity: its name and sessions, transaction ids, and the order of its commits.

Sessions: each session of a client name fences the one before, in each group in which it begins transactions. A session
registers in ZooKeeper when it first begins, resumes or lists transactions in a group. If there was a session before it,
the group's leader is told, and answers once nothing that the older one asked for is in flight any more. So once a
transaction has begun, an older process of the same name can no longer change anything. Connections without a name of
their own skip all this, since nobody else has their name; their epoch is 0. Several processes may share a session:
those that name the same holder. The first one registers it; once another holder has registered, they are all fenced,
also those that begin only then.

Transaction ids come from counters, in blocks reserved in ZooKeeper: one write per thousands. Commits are numbered per
group and session, so that the leader carries them out in the order in which they were asked for; a number waits for
earlier commits whose outcome is not known here. :mod:`rollbridge.model.commit_order` is the other side.

Source: Kafka's ``InitProducerId`` and producer epochs.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, Protocol

from rollbridge.client.futures import Completion
from rollbridge.config import ConnectionSettings
from rollbridge.errors import (
    ClientFencedError,
    KafkaUnavailableError,
    RollbridgeError,
    UnavailableError,
    UnknownWriteError,
)
from rollbridge.kafka.topics import TopicAdmin
from rollbridge.model import paths
from rollbridge.model.commit_order import BEHIND_MAX, CONNECTION_MAX, CommitOrder
from rollbridge.model.names import GroupName
from rollbridge.model.records import ClientSession, next_session
from rollbridge.model.requests import AdminRequest, RequestKind
from rollbridge.zookeeper.errors import NodeExistsError, NodeMissingError, NodeVersionMismatchError
from rollbridge.zookeeper.metadata import Metadata


def own_name() -> str:
    """Return a client name for a process that has none: the host and the process id."""
    host = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in socket.gethostname())
    return f"{host[:100] or 'client'}-{os.getpid()}"


def find_cluster_id(settings: ConnectionSettings, timeout_s: float) -> str:
    """Return Kafka's id of the cluster.

    Raises:
        KafkaUnavailableError: no broker answered in time, which is a second at least.
    """
    try:
        admin = TopicAdmin(
            settings.bootstrap_servers,
            security=settings.kafka,
            client_id=settings.client_name,
            timeout_s=max(timeout_s, 1.0),
        )
        return admin.cluster_id()
    except KafkaUnavailableError as fault:
        raise KafkaUnavailableError(
            f"no Kafka broker answered at {settings.bootstrap_servers} within {timeout_s:.3g} s: is it running, and is "
            "the address right?"
        ) from fault


# Sessions


logger = logging.getLogger(__name__)


class ClientSessions:
    """Sessions of one connection, one in each group. Safe to use from several threads."""

    def __init__(
        self, metadata: Metadata, client_name: str, *, named: bool, changed: Callable[[], None], holder: str = ""
    ) -> None:
        """Start without any session.

        Args:
            metadata: Where they are registered.
            client_name: Client name that owns them.
            named: True if others may use the same name; otherwise nothing is registered.
            changed: Called when :meth:`look` has something to do.
            holder: Name of the session in all processes that share it; empty if it belongs to this one alone.
        """
        self._holder = holder
        self._metadata = metadata
        self._client_name = client_name
        self._named = named
        self._changed = changed
        self._epochs: dict[GroupName, int] = {}
        self._suspect: set[GroupName] = set()
        self._lock = threading.Lock()
        self.fenced: dict[GroupName, int] = {}
        """Groups in which a newer session has begun, with its epoch."""

    def epoch(self, group: GroupName, timeout_s: float) -> int:
        """Return the epoch of this session in a group; register the session on first use.

        Raises:
            ClientFencedError: a newer session has begun.
            CoordinatorUnavailableError, UnknownWriteError: an older one could not be fenced in time; nothing was begun.
            ZooKeeperUnavailableError.
        """
        self.check()
        if not self._named:
            return 0
        known = self._epochs.get(group)
        if known is not None:
            return known
        with self._lock:
            if group not in self._epochs:
                self._epochs[group] = self._register(group, timeout_s)
            return self._epochs[group]

    def take_over(self, groups: Iterable[GroupName], timeout_s: float) -> None:
        """Fence the older sessions in all groups that have one. Raises as :meth:`epoch` does."""
        self.check()
        wanted = [group for group in groups if self._named and group not in self._epochs]
        nodes = self._metadata.session.get_many([paths.session(group, self._client_name) for group in wanted])
        for group, node in zip(wanted, nodes, strict=True):
            if node is not None:
                self.epoch(group, timeout_s)

    def check(self) -> None:
        """Raise ClientFencedError if a newer session has begun in any group: this process must not go on."""
        for group, epoch in self.fenced.items():
            raise ClientFencedError(
                f"a newer session of client {self._client_name} (epoch {epoch}) has begun in group {group}, so this "
                "one is over; nothing was written; what became of a transaction can be asked for by its id"
            )

    def look(self) -> None:
        """Find out whether a newer session has begun, if something has changed; retried after errors."""
        while self._suspect:
            group = self._suspect.pop()
            try:
                self._watch(group)
            except UnavailableError as fault:
                logger.info("whether a newer session has begun in group %s cannot be said now: %s", group, fault)
                self._suspect.add(group)
                return

    def _register(self, group: GroupName, timeout_s: float) -> int:
        session, path = self._metadata.session, paths.session(group, self._client_name)
        while True:
            node = session.get(path)
            before = None if node is None else ClientSession.from_json(node.value)
            if before is not None and self._holder:
                if before.holder == self._holder:
                    self._epochs[group] = before.epoch
                    break
                if before.is_former(self._holder):
                    self.fenced[group] = before.epoch
                    self.check()
            fresh = next_session(before, self._client_name, self._holder, int(time.time() * 1000))
            try:
                if node is None:
                    session.create(path, fresh.to_json(), parents=True)
                else:
                    session.set(path, fresh.to_json(), node.version)
            except (NodeExistsError, NodeMissingError, NodeVersionMismatchError, UnknownWriteError):
                continue  # another session was faster, or the write is unknown: skipping an epoch does no harm
            if before is not None:
                self.fence(group, fresh.epoch, timeout_s)
            self._epochs[group] = fresh.epoch
            break
        self._watch(group)
        return self._epochs[group]

    def fence(self, group: GroupName, epoch: int, timeout_s: float) -> None:
        """Wait until nothing that sessions below an epoch have asked for is in flight. Raises as :meth:`epoch`."""
        request = AdminRequest(
            kind=RequestKind.FENCE,
            owner=self._client_name,
            owner_epoch=epoch,
            client_name=self._client_name,
            created_ms=int(time.time() * 1000),
        )
        self._metadata.ask(group, request, timeout_s)

    def _watch(self, group: GroupName) -> None:
        node = self._metadata.session.get(paths.session(group, self._client_name), lambda: self._suspect_change(group))
        newest = 0 if node is None else ClientSession.from_json(node.value).epoch
        if newest > self._epochs[group] and group not in self.fenced:
            logger.warning("client %s is fenced in group %s by epoch %d", self._client_name, group, newest)
            self.fenced[group] = newest

    def _suspect_change(self, group: GroupName) -> None:
        self._suspect.add(group)
        self._changed()


# Transaction id allocation


BLOCK: Final = 50_000
"""Counters reserved at once; the leader checks the counter once per block."""
BLOCK_S: Final = 24 * 3600.0
"""Longest time for which a block is used: leaders may count old counters as those of transactions that have ended."""


def _now_s() -> float:
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
            number = next(current, None) if _now_s() <= self._until_s else None
            if number is not None:
                if number == self._low:
                    self._poke()
                return number
            with self._lock:
                if self._current is current:
                    drops, block, until_s = self._spare or (-1, range(0), 0.0)
                    self._spare = None
                    now_s = _now_s()
                    if drops != self._drops or now_s > until_s:
                        block, until_s = self._reserve(self._block), now_s + BLOCK_S
                    self._until_s = until_s
                    self._begin(block)

    def refill(self) -> None:
        """Reserve the next block unless there is a spare one."""
        with self._lock:
            now_s = _now_s()
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


class PendingCommit(Protocol):
    """Transaction whose commit was asked for, as the order of commits sees it."""

    @property
    def completion(self) -> Completion:
        """Outcome of the transaction."""
        ...

    def ask_again(self, order: CommitOrder) -> bool:
        """Send its COMMIT frame once more, with this order; return False if that was not possible."""
        ...


class AskedCommit:
    """Commit that was asked for.

    Attributes:
        order: Commit order in its frame.
        is_void: True if certainly nothing more of it comes to the buffer.
        is_told: True if the leader knows that nothing before it is left to wait for, as far as that is so.
    """

    __slots__ = ("_transaction", "asked_s", "is_told", "is_void", "order")

    def __init__(self, transaction: PendingCommit, order: CommitOrder) -> None:
        self._transaction: PendingCommit | None = transaction
        self.order = order
        self.is_void = False
        self.is_told = not order.behind
        self.asked_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if nobody needs to wait for it."""
        return self.is_void or self._transaction is None or self._transaction.completion.settled

    def tell(self) -> None:
        """Tell the leader that nothing before it is left to wait for; retried if that is not possible now."""
        transaction = self._transaction
        self.is_told = transaction is None or transaction.ask_again(self.order._replace(behind=0))

    def let_go(self) -> None:
        """Drop the transaction of a commit that is over; otherwise both objects would be garbage in a cycle."""
        self._transaction = None


class SessionCommitNumbers:
    """Commit numbers of one session in one group. Safe to use from several threads."""

    def __init__(self, connection: int, epoch: int) -> None:
        self._connection = connection
        self._epoch = epoch
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


class CommitNumbers:
    """Commit numbers of one connection. Safe to use from several threads."""

    def __init__(self, next_counter: Callable[[GroupName], int]) -> None:
        """Start without any; one of the transaction counters of ``next_counter`` names this connection in a group."""
        self._next_counter = next_counter
        self._connections: dict[GroupName, int] = {}
        self._lines: dict[tuple[GroupName, int], SessionCommitNumbers] = {}
        self._lock = threading.Lock()

    def of(self, group: GroupName, epoch: int) -> SessionCommitNumbers:
        """Return the commit numbers of a session in a group.

        Raises:
            ZooKeeperUnavailableError, UnknownWriteError: this connection could not be given a number; nothing was asked
                for.
        """
        line = self._lines.get((group, epoch))
        if line is not None:
            return line
        with self._lock:
            connection = self._connections.get(group)
            if connection is None:
                connection = self._connections[group] = self._next_counter(group) & CONNECTION_MAX
            return self._lines.setdefault((group, epoch), SessionCommitNumbers(connection, epoch))

    def look(self) -> None:
        """See :meth:`SessionCommitNumbers.look`; called on the housekeeping thread."""
        now_s = _now_s()
        for line in list(self._lines.values()):
            line.look(now_s)
