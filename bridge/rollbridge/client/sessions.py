"""Sessions of a client name: each fences the one before, in each group in which the client begins transactions.

A session registers in ZooKeeper when it first begins, resumes or lists transactions in a group. If there was a session
before it, the group's leader is told. It answers once nothing that the older one asked for is in flight any more, with
the transactions left open. So once a transaction has begun, an older process of the same name can no longer change
anything. The record and the question to the leader are written in one step.

Connections without a given name skip all this, since their name is unique; their epoch is 0. Processes that name the
same holder share a session. The first one registers it; once another holder has registered, they are all fenced, also
those that begin only then.

A newer session is not announced. A connection watches the record of its own name. Of its other names
(:meth:`rollbridge.Bridge.client`) it reads the records of those with something open; the others cost nothing.

Commits are numbered per client name, group and session, so that the leader carries them out in the order in which they
were asked for; a number waits for earlier commits whose outcome is not known here. The names of one connection have
numbers of their own, so none waits for another's. :mod:`rollbridge.commitlog.commit_order` is the other side.

Source: Kafka's ``InitProducerId`` and producer epochs.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from socket import gethostname
from typing import Final, Protocol

from rollbridge.base.deadlines import Deadline, answers_within, wall_ms
from rollbridge.buffer.table import KnownTransaction
from rollbridge.client.futures import Completion
from rollbridge.client.identity import uptime_s
from rollbridge.commitlog.commit_order import BEHIND_MAX, CONNECTION_MAX, CommitOrder
from rollbridge.errors import (
    ClientFencedError,
    CoordinatorUnavailableError,
    RollbridgeError,
    UnavailableError,
    UnknownWriteError,
)
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import RENEW_MS, ClientSession, floor_of, next_session
from rollbridge.metadata.errors import NodeConflictError, NodeMissingError
from rollbridge.metadata.records import CheckNode, CreateNode, SetNode
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind, refusal
from rollbridge.metadata.session import Znode
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName

logger = logging.getLogger(__name__)

_RENEW_AGAIN_S: Final = 60.0
"""Seconds after which a record is read again that could not be read."""
_RENEW_WAIT_S: Final = 3.0
"""Seconds that this may take, as it is on the way of a begin."""
_WHO_S: Final = 0.3
"""Seconds that ZooKeeper may take to say who has fenced this session."""
_LEFT_S: Final = 5.0
"""Seconds for which a leader's list of what an older session has left open is not asked for again."""
_RACED: Final = (NodeConflictError, NodeMissingError)

Left = tuple[KnownTransaction, ...]


class ClientSessions:
    """Sessions of one client, one in each group. Safe to use from several threads.

    Attributes:
        fenced: Groups in which a newer session has begun, with its epoch.
        guard: Gives a node that must have a version for a session to begin; None where any may begin.
        changes: Rises when an epoch does.
        renew_at_s: From when on :meth:`renew` has something to do, as :func:`~rollbridge.client.identity.uptime_s`.
        gone: Groups in which the record was found removed; what the session waits for there, it waits for in vain.
        looked_s: When the records were last looked at because something is open, likewise.
        left: What older sessions have left open, by group, as the leader said at the fence, and when it did.
    """

    __slots__ = (
        "_changed",
        "_client_name",
        "_epochs",
        "_holder",
        "_lock",
        "_metadata",
        "_named",
        "_pending",
        "_suspect",
        "changes",
        "fenced",
        "gone",
        "guard",
        "left",
        "looked_s",
        "renew_at_s",
    )

    def __init__(
        self,
        metadata: Metadata,
        client_name: str,
        *,
        named: bool,
        changed: Callable[[], None] | None,
        holder: str = "",
    ) -> None:
        """Start without any session.

        Args:
            named: True if others may use the same name; otherwise nothing is registered.
            changed: Called when :meth:`look` has something to do; None if records are not watched.
            holder: Name of the session in all processes that share it; empty if it belongs to this one alone.
        """
        self._holder = holder
        self._metadata = metadata
        self._client_name = client_name
        self._named = named
        self._changed = changed
        self._epochs: dict[GroupName, int] = {}
        self._pending: dict[GroupName, int] = {}  # epochs on record of which the leader has not answered yet
        self._suspect: set[GroupName] | None = None
        self._lock = threading.RLock()
        self.fenced: dict[GroupName, int] = {}
        self.guard: Callable[[], CheckNode] | None = None
        self.gone: frozenset[GroupName] = frozenset()
        self.changes = 0
        self.renew_at_s = inf
        self.looked_s = 0.0
        self.left: dict[GroupName, tuple[float, Left]] = {}

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
        if uptime_s() > self.renew_at_s:
            self.renew()
            self.check()
        known = self._epochs.get(group)
        if known is not None:
            return known
        with self._lock:
            if group not in self._epochs:
                self._register(group, timeout_s)
            return self._epochs[group]

    @property
    def is_named(self) -> bool:
        """True if others may use the same name."""
        return self._named

    def places(self, groups: Sequence[GroupName]) -> list[GroupName]:
        """Return those of the groups in which this client may have something open, in older sessions too.

        A client of a name of its own has a session on record wherever it has.
        """
        if not self._named:
            return list(groups)
        known = set(self._epochs).union(self._metadata.groups_of(self._client_name, groups))
        return [group for group in groups if group in known]

    def take_over(
        self, groups: Iterable[GroupName], timeout_s: float
    ) -> tuple[dict[GroupName, Left], dict[GroupName, RollbridgeError]]:
        """Fence the older sessions in some groups that have one. Raises ClientFencedError as :meth:`epoch` does.

        Returns:
            What these have left open, by group, where the leader has said so just now; and the errors of the groups
            whose leaders have not answered. Groups without a leader come last, so that they take no time of others,
            and a leader that hangs takes no more than its share.
        """
        self.check()
        deadline, began_s = Deadline(timeout_s), uptime_s()
        wanted = [group for group in groups if self._named and group not in self._epochs]
        unanswered: dict[GroupName, RollbridgeError] = {}
        ordered = wanted if len(wanted) < 2 else sorted(wanted, key=self._is_leaderless)
        for number, group in enumerate(ordered):
            try:
                self.epoch(group, deadline.left() / (len(ordered) - number))
            except (CoordinatorUnavailableError, UnknownWriteError) as fault:
                unanswered[group] = fault
        left, self.left = self.left, {}
        # What was told meanwhile counts, however long others were waited for.
        return {group: items for group, (told_s, items) in left.items() if told_s > began_s - _LEFT_S}, unanswered

    def _is_leaderless(self, group: GroupName) -> bool:
        lead = self._metadata.lead(group)
        return lead is None or not lead.is_serving

    def begin_anew(self, group: GroupName, timeout_s: float) -> tuple[int, Left | None]:
        """Begin another session in a group, which fences all before it, this one included.

        Returns:
            Its epoch, and what the others have left open; None if the leader, of an older version, does not say.

        Raises:
            CoordinatorUnavailableError, UnknownWriteError: the older ones could not be fenced in time.
            ZooKeeperUnavailableError.
        """
        with self._lock:
            epoch = self._register(group, timeout_s, anew=True)
            self.fenced.pop(group, None)
            told = self.left.get(group)
            return epoch, None if told is None else told[1]

    def check(self) -> None:
        """Raise ClientFencedError if a newer session has begun in any group: this process must not continue."""
        for group, epoch in list(self.fenced.items()):
            if epoch <= self._epochs.get(group, -1):
                continue  # what was found is older than the session that has begun here meanwhile
            why = (
                f"a newer session of client {self._client_name} ({self._who(group, epoch)}) has begun in group {group}"
            )
            if group in self.gone:
                why = f"the session of client {self._client_name} in group {group} was forgotten while it stood still"
            raise ClientFencedError(
                f"{why}, so this one is over; nothing was written; what became of a transaction can be asked for by "
                "its id"
            )

    def _who(self, group: GroupName, epoch: int) -> str:
        """Return which session has begun, and where, as far as that can be told at once."""
        with suppress(RollbridgeError), answers_within(_WHO_S):
            node = self._metadata.session.get(paths.session(group, self._client_name))
            newest = None if node is None else ClientSession.from_json(node.value)
            if newest is not None and newest.process:
                since = datetime.fromtimestamp(newest.registered_ms / 1000, UTC)
                return f"epoch {newest.epoch}, of process {newest.process}, {since:%Y-%m-%d %H:%M:%SZ}"
        return f"epoch {epoch}"

    def look(self) -> None:
        """Find out whether a newer session has begun, if something has changed; retried after errors."""
        while self._suspect:
            group = self._suspect.pop()
            try:
                self._watch(group)
            except UnavailableError as fault:
                logger.info("session.check_failed group=%s: %s", group, fault)
                self._suspect.add(group)
                return

    def groups(self) -> list[GroupName]:
        """Return the groups in which there is a session whose record is not watched."""
        return list(self._epochs) if self._changed is None else []

    def note(self, group: GroupName, node: Znode | None) -> None:
        """Take what was read of the record of this client in a group."""
        pending = self._pending.get(group, -1)  # before what it becomes
        known = self._epochs.get(group)
        if node is None:
            self.gone |= {group}
            return
        newest = ClientSession.from_json(node.value).epoch
        if known is not None and newest > max(known, pending) and group not in self.fenced:
            logger.warning("session.fenced client=%s group=%s epoch=%d", self._client_name, group, newest)
            self.fenced[group] = newest

    def is_over(self, group: GroupName, epoch: int) -> None:
        """Note that the record was removed while something of this session, with this epoch, was under way.

        Leaders do not do that to a client that looks at its record in time; this one has stood still for long.
        """
        if self._epochs.get(group) == epoch and group not in self.fenced:
            logger.warning("session.forgotten client=%s group=%s", self._client_name, group)
            self.fenced[group] = epoch + 1

    def renew(self) -> None:
        """Read the records that are due, so that they are kept; register again if one is gone.

        Without an answer the session continues, and this is due again a minute later.
        """
        with self._lock:
            if uptime_s() <= self.renew_at_s:
                return
            self.renew_at_s = began_s = uptime_s()
            self.renew_at_s += _RENEW_AGAIN_S
            if not self._metadata.session.is_connected:
                return
            try:
                with answers_within(_RENEW_WAIT_S):
                    for group, epoch in list(self._epochs.items()):
                        self._renew(group, epoch)
            except RollbridgeError as fault:
                logger.info("session.renew_failed client=%s: %s", self._client_name, fault)
            else:
                self.renew_at_s = began_s + RENEW_MS / 1000

    def fence(self, group: GroupName, epoch: int, timeout_s: float) -> None:
        """Wait until nothing that sessions below an epoch have asked for is in flight. Raises as :meth:`epoch`."""
        self._metadata.ask(group, self._fence_request(epoch), timeout_s)

    def _fence_request(self, epoch: int) -> AdminRequest:
        return AdminRequest(
            kind=RequestKind.FENCE,
            owner=self._client_name,
            owner_epoch=epoch,
            client_name=self._client_name,
            created_ms=wall_ms(),
        )

    def _register(self, group: GroupName, timeout_s: float, *, anew: bool = False) -> int:
        """Put a session on record, and fence the one before; return its epoch."""
        deadline, began_s, tries = Deadline(timeout_s), uptime_s(), 0
        session, path, parent = self._metadata.session, paths.session(group, self._client_name), paths.sessions(group)
        while True:
            tries += 1
            if tries > 1 and deadline.passed():
                raise CoordinatorUnavailableError(
                    f"a session of client {self._client_name} could not be registered in group {group} within "
                    f"{timeout_s:g} s and {tries - 1} tries, as others write its record, too; nothing was begun"
                )
            # The floor first. It is written whenever records are removed, so if it is the same when this writes, the
            # record that was read is no other one with the same version by now, nor the only one that there ever was.
            guards = () if self.guard is None else (self.guard(),)
            above, node, *guarding = session.get_many([parent, path, *(item.path for item in guards)])
            if any(
                found is None or found.version != item.version for item, found in zip(guards, guarding, strict=True)
            ):
                raise ClientFencedError(
                    f"client {self._client_name} belongs to another process by now, so no session of it begins here; "
                    "nothing was written"
                )
            if above is None:
                session.ensure(parent)
                continue
            before = None if node is None else ClientSession.from_json(node.value)
            if before is not None and self._holder:
                if before.holder == self._holder:
                    return self._begun(group, before.epoch, began_s)
                if before.is_former(self._holder):
                    self.fenced[group] = before.epoch
                    self.check()
            now_ms = wall_ms()
            fresh = next_session(before, self._client_name, self._holder, now_ms, floor_of(above.value), _process())
            value = fresh.to_json()
            record = CreateNode(path, value) if node is None else SetNode(path, value, node.version)
            operations = (CheckNode(parent, above.version), record, *guards)
            request = self._fence_request(fresh.epoch)
            self._pending[group] = fresh.epoch  # a reader of the record meanwhile does not take it for another's
            try:
                try:
                    if before is None and not anew:
                        session.multi(operations)
                        return self._begun(group, fresh.epoch, began_s)
                    name = self._metadata.put_request(group, request, operations)
                except (*_RACED, UnknownWriteError):
                    continue  # another session was faster, or the write is unknown: skipping an epoch does no harm
                answer = self._metadata.answer_to(group, request, name, deadline.left())
                self._heard(group, fresh.epoch, answer)
                return self._begun(group, fresh.epoch, began_s)
            finally:
                self._pending.pop(group, None)

    def _heard(self, group: GroupName, epoch: int, answer: AdminAnswer) -> None:
        if not answer.ok:
            raise refusal(answer)
        if answer.epoch == epoch:  # leaders before 0.3.0 list nothing, and do not say so
            self.left[group] = (uptime_s(), answer.transactions)
        else:
            self.left.pop(group, None)

    def _begun(self, group: GroupName, epoch: int, began_s: float) -> int:
        self._epochs[group] = epoch
        self.changes += 1
        self.gone -= {group}
        if not self._holder:
            self.renew_at_s = min(self.renew_at_s, began_s + RENEW_MS / 1000)
        if self._changed is not None:
            self._watch(group)
        return epoch

    def _renew(self, group: GroupName, epoch: int) -> None:
        session, path, parent = self._metadata.session, paths.session(group, self._client_name), paths.sessions(group)
        while True:
            above, node = session.get_many([parent, path])
            if node is None or above is None:
                del self._epochs[group]
                self.changes += 1
                self.gone -= {group}
                return
            self.note(group, node)
            record = ClientSession.from_json(node.value)
            if record.epoch != epoch or not record.renews:
                return
            value = replace(record, registered_ms=wall_ms()).to_json()
            try:
                session.multi((CheckNode(parent, above.version), SetNode(path, value, node.version)))
            except _RACED:
                continue
            return

    def _watch(self, group: GroupName) -> None:
        node = self._metadata.session.get(paths.session(group, self._client_name), lambda: self._suspect_change(group))
        self.note(group, node)

    def _suspect_change(self, group: GroupName) -> None:
        if self._suspect is None:
            self._suspect = set()
        self._suspect.add(group)
        if self._changed is not None:
            self._changed()


def _process() -> str:
    return f"{gethostname()}:{os.getpid()}"


# Commit order


TELL_AGAIN_S: Final = 1.0
"""Seconds for which the first commit in flight has had no answer before its frame is sent once more."""
TELL_EVERY_S: Final = 60.0
"""Seconds after which it is sent yet again, in case the buffer was emptied by hand."""
ABORT_EVERY_S: Final = 5.0
"""Seconds after which an abort that was refused is sent again."""
DOUBT_EVERY_S: Final = 10.0
"""Seconds after which its leader is asked about it: an emptied commit log makes it forget the transaction."""


class PendingEnd(Protocol):
    """Transaction whose end was asked for, as the order of commits sees it."""

    @property
    def completion(self) -> Completion:
        """Outcome of the transaction."""
        ...

    def ask_again(self, order: CommitOrder) -> bool:
        """Send the frame of its end once more, a commit with this order; return False if that was not possible."""
        ...

    def abort_again(self) -> None:
        """Send its ABORT frame once more, unless its outcome is known."""
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

    def __init__(self, transaction: PendingEnd, order: CommitOrder) -> None:
        self._transaction: PendingEnd | None = transaction
        self.order = order
        self.is_void = False
        self.asked_s = self.doubted_s = time.monotonic()
        self.told_s = -math.inf if order.behind else self.asked_s

    @property
    def is_over(self) -> bool:
        """True if nothing needs to wait for it."""
        return self.is_void or self._transaction is None or self._transaction.completion.settled

    def look(self, now: float) -> None:
        """Tell the leader what is over before it, and ask what has become of it, at intervals.

        A commit whose frame no leader can read is given up.
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


class AskedAbort:
    """Abort that was asked for: its leader is asked about it now and then, as about a commit.

    One whose frame a broker has refused is sent again, at intervals: what forbids it may pass long before its lease.
    """

    __slots__ = ("_doubted_s", "_in_flight", "_told_s", "_transaction")

    def __init__(self, transaction: PendingEnd, in_flight: CommitsInFlight) -> None:
        self._transaction = transaction
        self._in_flight = in_flight
        self._doubted_s = time.monotonic()
        self._told_s = -math.inf

    def look(self, now: float) -> None:
        """See :meth:`AskedCommit.look`."""
        transaction = self._transaction
        if transaction.completion.is_missing:
            if now - self._told_s > ABORT_EVERY_S:
                self._told_s = now
                transaction.abort_again()
        elif transaction.completion.settled:
            self._in_flight.remove(transaction)
            return
        if now - self._doubted_s > DOUBT_EVERY_S:
            self._doubted_s = now
            transaction.doubt()


class CommitsInFlight:
    """Lines of commit numbers in which something may be in flight, and aborts, of all clients of one connection."""

    def __init__(self) -> None:
        self._lines: dict[SessionCommitNumbers | PendingEnd, SessionCommitNumbers | AskedAbort] = {}

    def add(self, line: SessionCommitNumbers) -> None:
        """Note that a commit was asked for; the line's lock is held."""
        self._lines[line] = line

    def abort(self, transaction: PendingEnd) -> None:
        """Look after an abort that was asked for, once."""
        if transaction not in self._lines:
            self._lines[transaction] = AskedAbort(transaction, self)

    def remove(self, line: SessionCommitNumbers | PendingEnd) -> None:
        """Note that nothing of it is in flight; a line's lock is held."""
        self._lines.pop(line, None)

    def __len__(self) -> int:
        """Return how many there are to look at."""
        return len(self._lines)

    def look(self) -> None:
        """Look at each; called on the housekeeping thread."""
        now = time.monotonic()
        for line in list(self._lines.values()):
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

    def ask(self, transaction: PendingEnd) -> AskedCommit:
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
        """Start without any; one counter of ``next_counter`` names this client's line in a group."""
        self._next_counter = next_counter
        self._in_flight = CommitsInFlight() if in_flight is None else in_flight
        self._connections: dict[GroupName, int] = {}
        self._lines: dict[tuple[GroupName, int], SessionCommitNumbers] = {}
        self._lock = threading.Lock()

    def abort(self, transaction: PendingEnd) -> None:
        """Look after an abort that was asked for."""
        self._in_flight.abort(transaction)

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
