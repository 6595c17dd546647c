"""Recovery of transactions begun elsewhere: outcomes, open transactions, and taking one over.

A resumed transaction was begun by another process, or by this one in an earlier life. Of earlier writes everything
counts that the leader had from the transaction's owners when it was asked, which is everything that they had flushed,
and may be more. New records are a part of their own; the commit's manifest names both. The new owner takes over with
BEGIN frames, which the brokers have acknowledged before the object is returned; from these frames on, former owners can
neither write nor end the transaction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from rollbridge.base.arguments import checked
from rollbridge.base.deadlines import Deadline, Duration, Timeout, answers_within, as_seconds, wall_ms
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import ANYBODY, BeginFrame, FrameHeader, FrameKind, buffer_partition, encode_extend
from rollbridge.buffer.savepoints import HeldSavepoint
from rollbridge.buffer.table import Arrived, KnownTransaction, State
from rollbridge.client.futures import Completion
from rollbridge.client.identity import GroupCounters
from rollbridge.client.outcomes import (
    ArrivedTransaction,
    Known,
    OpenTransactions,
    Outcome,
    OutcomeClient,
    OutcomeTail,
    TransactionStory,
    by_age,
    named,
    outcome_of,
    over,
    public_fields,
)
from rollbridge.client.results import CommitResult, Piece, Savepoint
from rollbridge.client.savepoints import SavepointLog, records_by_stream, savepoint_of
from rollbridge.client.sender import Undelivered
from rollbridge.client.sessions import ClientSessions, CommitNumbers, CommitsInFlight
from rollbridge.client.transaction import Transaction
from rollbridge.client.writing import BeginPlan, OwnerWriting, Planner, TransactionContext, extension_ms, room_of
from rollbridge.commitlog.control import FENCED, ControlKind, ControlRecord
from rollbridge.config import ClientOptions
from rollbridge.errors import (
    ConflictError,
    InvalidRequestError,
    OutcomeExpiredError,
    OutcomeUnknownError,
    TransactionNotFoundError,
    TransactionPreserverClosedError,
    UnavailableError,
    UnknownWriteError,
)
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import ClientSession
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName

# Transactions whose owner is gone: what has arrived of them, and a commit by another client.
#
# A commit names what it makes visible, and only the owner knows what that was to be. Another client can name the
# contents of the buffers: of each segment everything up to where the owner's last message arrived, or what its last
# savepoint names. What the owner had not sent yet is lost with it. Conditions and offsets of consumer groups, which it
# would have sent with its commit, are those of its last savepoint; without one they are lost, too.
#
# What the buffers do not tell is refused: records that other processes wrote as parts may come from attempts that their
# owner would not have named. A cooperative transaction is one of a series, whose next writer has to find exactly what
# was to be written.
#
# Nothing is new in the buffers: the new owner takes the transaction over as :meth:`rollbridge.Bridge.resume` does,
# which keeps out the former owner, and then asks for its commit.


def arrived_of(
    known: Known, arrived: Arrived | None, session: ClientSession | None, savepoint: Savepoint | None = None
) -> ArrivedTransaction:
    """Return what has arrived of a transaction; ``session`` is what is on record of its client's newest session."""
    group, item = known
    is_open = item.state is State.OPEN
    return ArrivedTransaction(
        **public_fields(group, item),
        bytes=0 if arrived is None else arrived.bytes,
        streams=records_by_stream(tuple(item.streams), _pieces_of(item)),
        lease_ends_ms=item.decided_ms + item.lease_ms if is_open else 0,
        obstacle=_obstacle(item, arrived, session) if is_open else "",
        savepoint=savepoint,
    )


def _pieces_of(known: KnownTransaction) -> list[Piece]:
    """Return what has arrived from the owners of a transaction."""
    return [Piece(*key, records, 0, 0) for key, records in known.pieces.items()]


def _obstacle(known: KnownTransaction, arrived: Arrived | None, session: ClientSession | None) -> str:
    """Return why only its owner can commit a transaction; empty if others may."""
    if arrived is not None and arrived.others:
        return (
            f"{arrived.others:,} records of it were written by other processes as parts, and which of these count is "
            "known to its owner alone"
        )
    work = None if session is None else session.work
    if work is not None and work.transaction == known.id:
        return (
            f"it is number {work.number} of the cooperative transactions {work.series!r}, and the writer of the next "
            "one would take it for complete"
        )
    return ""


def check_commit(found: ArrivedTransaction, records: int | None, *, at_savepoint: bool = False) -> None:
    """Check that a client other than its owner may commit a transaction.

    Args:
        found: The transaction, as it was just found.
        records: Number of records that the caller expects it to hold; None if any number will do.
        at_savepoint: True to leave out what came after its last savepoint.

    Raises:
        ConflictError: it is open, and what its commit would have to name is not known, or it holds another number of
            records than was expected.
    """
    if found.state is not State.OPEN:
        return
    if found.obstacle:
        raise ConflictError(
            f"transaction {found.transaction} cannot be committed by another client than its owner: {found.obstacle}; "
            "nothing was changed: restart its program if that resumes it, or abort it with `rollbridge txn abort`"
        )
    if at_savepoint and found.savepoint is None:
        raise ConflictError(
            f"transaction {found.transaction} has no savepoint; nothing was changed: commit all that has arrived of "
            "it, or abort it"
        )
    holds = found.records
    if at_savepoint and found.savepoint is not None:
        holds = sum(found.savepoint.records.values())
    check_records(found.transaction, found.group, holds, records)


def check_records(transaction: object, group: GroupName, records: int, expected: int | None) -> None:
    """Raise ConflictError if a transaction holds another number of records than was expected of it."""
    if expected is not None and records != expected:
        raise ConflictError(
            f"transaction {transaction} of {group} holds {records:,} records by now, and {expected:,} were to be "
            "committed: its owner is at work; nothing was changed"
        )


# The resumed transaction


_OF_A_FENCED_SESSION: Final = "its session was fenced by a newer one"
"""Reason shown to others; only the fenced session itself is told that it is fenced."""


class ResumedWriting(OwnerWriting):
    """Writing of a transaction that was resumed: what a :class:`ResumedTransaction` is inside."""

    __slots__ = ("_known", "last", "others")

    def __init__(
        self,
        runtime: TransactionContext,
        plan: BeginPlan,
        completion: Completion,
        part: int,
        known: KnownTransaction,
        savepoint: HeldSavepoint | None = None,
    ) -> None:
        """Take over a transaction as the leader knows it; return once the brokers have acknowledged that."""
        super().__init__(runtime, plan, completion, part)
        self._take(known, savepoint)
        if known.state is State.OPEN:
            self.send_begin()
            self.flush(runtime.commit_timeout_s)

    def look_again(self, known: KnownTransaction, savepoint: HeldSavepoint | None) -> None:
        """Take what the leader says once former owners cannot write any more; nothing has been written here."""
        if known.state is State.OPEN:
            self._take(known, savepoint)

    def _take(self, known: KnownTransaction, savepoint: HeldSavepoint | None) -> None:
        self._known = known
        self.before = _pieces_of(known)
        self.others = frozenset(piece.part for piece in self.before)
        self.last = None if savepoint is None else savepoint_of(known.id, tuple(known.streams), savepoint)
        self.writer.room.bytes = room_of(known.pieces, self.last)
        if self.last is not None:
            # Offsets and conditions are sent with the commit, so its former owner's are those of its last savepoint.
            self.savepoints = SavepointLog(self.last.number, self.last.notes)
            self.continue_from(self.last)
            self.others |= {piece.part for piece in self.last.pieces}

    def _is_mine(self) -> bool:
        return self._known.state is not State.OPEN or super()._is_mine()

    def _records_committed(self) -> int:
        return self._known.records if self._known.state is State.COMMITTED else super()._records_committed()

    def _merged_pieces(self) -> Sequence[Piece]:
        return [piece for piece in self.pieces if piece.part not in self.others]


@checked()
class ResumedTransaction(Transaction):
    """Transaction to continue, and to commit or abort. Made by :meth:`rollbridge.Bridge.resume`.

    If it has ended before, its commit and its abort give the same answer as the first time.
    """

    __slots__ = ()
    _writing: ResumedWriting

    @property
    def last_savepoint(self) -> Savepoint | None:
        """The last savepoint of its former owners, as its leader has it; None if they made none, or it has ended."""
        return self._writing.last

    @property
    def earlier_records(self) -> Mapping[str, int]:
        """Records of its earlier owners that count, by stream; empty if it had ended before."""
        writing = self._writing
        return records_by_stream(self.streams, [piece for piece in writing.before if piece.part in writing.others])


def settled(known: KnownTransaction) -> Completion:
    """Return the completion of a transaction that has ended, for a client that was not its owner then."""
    completion = Completion(known.id.bytes)
    reason = _OF_A_FENCED_SESSION if known.reason == FENCED else known.reason
    completion.settle(_record_of(known, reason).encode_value(), known.position)
    return completion


def _record_of(known: KnownTransaction, reason: str) -> ControlRecord:
    """Return the control record of a transaction, as far as its leader remembers it: without the places of records."""
    return ControlRecord(
        transaction=known.id,
        kind=ControlKind.COMMIT if known.state is State.COMMITTED else ControlKind.ABORT,
        client_name=known.client_name,
        begun_ms=known.decided_ms,
        decided_ms=known.decided_ms,
        controller_epoch=0,
        label=known.label,
        reason=reason,
        records=known.records,
    )


logger = logging.getLogger(__name__)

Check = Callable[[GroupName, KnownTransaction, HeldSavepoint | None], None]
"""Takes what a leader says of a transaction that is about to be taken over; raises to leave it as it is."""
_FENCED_ASK_S: Final = 5.0
_MISSED_AGAIN_S: Final = 15.0


@checked()
class Resumer:
    """Operations of a client on transactions that it did not begin. Safe to use from several threads."""

    __slots__ = ("_ask_again_s", "_client_context", "_inquiry", "_own_name", "_runtime", "_sessions")

    def __init__(
        self, client_name: str, client_context: ClientContext, sessions: ClientSessions, runtime: TransactionContext
    ) -> None:
        self._own_name = client_name
        self._client_context = client_context
        self._runtime = runtime
        self._sessions = sessions
        self._inquiry = OutcomeClient(client_context.metadata, client_name)
        self._ask_again_s = 0.0

    def _check_open(self) -> None:
        """Raise InvalidRequestError if the client or its connection is closed, or of a process that has forked."""

    def _seconds(self, timeout: Timeout) -> float:
        """Return a time-out in seconds; the connection's ``commit_timeout`` where none is given."""
        return as_seconds(timeout, self._client_context.options.commit_timeout_s)

    def outcome(
        self,
        transaction: TransactionId | str | None = None,
        *,
        label: str | None = None,
        client: str | None = None,
        group: str | GroupName | None = None,
        timeout: Timeout = None,
    ) -> Outcome:
        """Return the outcome of a transaction of any client, for as long as that is remembered.

        Waits for a commit that was asked for; so ``state`` is ``"open"`` only if no end was asked for that counts. The
        answer comes from the group's leader, and is asked for again until the time is up.

        Args:
            transaction: Its id.
            label: Instead of the id, the label of the latest transaction of a client with that label.
            client: Name of that client, this one's own by default. Optional with an id: it helps to tell a transaction
                that never began from a forgotten one, and one of another client is refused.
            group: ``scope/group`` of the transaction; by default all are asked, and for a label those in which the
                client has sessions. Those that do not answer in time are named in ``unanswered`` of what others know.
            timeout: How long to wait for the answer; the connection's ``commit_timeout`` by default.

        Raises:
            TransactionNotFoundError: not open, and it is certain that there is no outcome of it.
            OutcomeExpiredError: not open, and may have ended so long ago that it has been forgotten; or the id is that
                of another client than the one given.
            TransactionPreserverClosedError: outcomes are not remembered here.
            CoordinatorUnavailableError, ZooKeeperUnavailableError: no answer in time.
            InvalidRequestError: no id, and no label either; or both.
        """
        self._check_open()
        timeout_s, where = self._seconds(timeout), GroupName.of_any(group)
        if (transaction is None) == (label is None):
            raise InvalidRequestError("ask for the outcome of a transaction id or of a label, and not of both")
        with answers_within(timeout_s):
            if label is not None:
                client = client or self._own_name
                return outcome_of(*self._inquiry.labelled(label, client, timeout_s, group=where))
            assert transaction is not None
            identifier = TransactionId.of_any(transaction)
            return outcome_of(self._inquiry.transaction(identifier, timeout_s, group=where, client=client))

    def story(
        self, transaction: TransactionId | str, *, group: str | GroupName | None = None, timeout: Timeout = None
    ) -> TransactionStory:
        """Return what the leader knows of a transaction at this moment, with its last events.

        Unlike :meth:`outcome`, waits for nothing that is in flight, so it tells what a transaction that does not end is
        waiting for. Events are those since the leader took over.

        Args:
            transaction: Its id.
            group: ``scope/group`` of the transaction; all are asked by default.
            timeout: How long to wait for the answer; the connection's ``commit_timeout`` by default.

        Raises:
            TransactionNotFoundError, OutcomeExpiredError, TransactionPreserverClosedError: nothing is known of it.
            CoordinatorUnavailableError, ZooKeeperUnavailableError: no answer in time.
            CorruptDataError: the leader is of an older version, which does not report events.
        """
        self._check_open()
        timeout_s, where = self._seconds(timeout), GroupName.of_any(group)
        with answers_within(timeout_s):
            return self._inquiry.story(TransactionId.of_any(transaction), timeout_s, group=where)

    def unfinished(self, *, group: str | GroupName | None = None, timeout: Timeout = None) -> OpenTransactions:
        """Return the open transactions of this client name, oldest first, at most 500 per group.

        Earlier sessions of this name are fenced before: what they had asked for has been carried out, and nothing else
        of theirs ever will be. What is listed stays open until it is resumed or aborted, or its lease ends. Groups in
        which this client has no session are not asked. Groups that did not answer in time are in ``unanswered``.

        Args:
            group: ``scope/group``; all by default.
            timeout: How long to wait for the answer; the connection's ``commit_timeout`` by default.

        Raises:
            ClientFencedError: a newer session of this client name has begun.
            CoordinatorUnavailableError, ZooKeeperUnavailableError: no answer in time.
        """
        self._check_open()
        timeout_s = self._seconds(timeout)
        deadline = Deadline(timeout_s)
        with answers_within(timeout_s):
            groups = self._sessions.places(self._inquiry.groups(GroupName.of_any(group)))
            left, unanswered = self._sessions.take_over(groups, timeout_s)
            known = [(name, item) for name in groups for item in left.get(name, ())]
            unasked = [name for name in groups if name not in left and name not in unanswered]
            if unasked:
                found, silent = self._inquiry.unfinished(self._own_name, deadline.left(), unasked)
                known += found
                unanswered |= silent
            if unanswered:
                if len(unanswered) == len(groups):
                    raise next(iter(unanswered.values()))
                logger.warning("transactions.list_incomplete client=%s: %s", self._own_name, named(unanswered))
            return OpenTransactions((outcome_of(item) for item in by_age(known)), unanswered)

    def resume(
        self, transaction: TransactionId | str, timeout: Timeout = None, *, client: str | None = None
    ) -> ResumedTransaction:
        """Take over a transaction that another process began, to continue, commit or abort it.

        Earlier writes count as far as they have arrived, which is everything that was flushed. Former owners cannot
        write or end it any more. A transaction that has ended may be resumed, too: its commit and its abort give the
        same answers as before.

        Args:
            transaction: Its id.
            timeout: How long to wait for the answers of the leader; the connection's ``commit_timeout`` by default.
            client: Name of the client that began it; one of another client is refused, as by :meth:`outcome`.

        Raises:
            TransactionNotFoundError, OutcomeExpiredError, TransactionPreserverClosedError: as :meth:`outcome`.
            ClientFencedError: a newer session of this client name has begun.
            CoordinatorUnavailableError, KafkaUnavailableError, ZooKeeperUnavailableError: no answer in time.
        """
        self._check_open()
        with answers_within(self._seconds(timeout)):
            return self._resume(TransactionId.of_any(transaction), Deadline(self._seconds(timeout)), client)

    def arrived(self, transaction: TransactionId | str, timeout: Timeout = None) -> ArrivedTransaction:
        """Return what has arrived of a transaction of any client: what :meth:`commit_arrived` would make visible.

        Waits for a commit that was asked for, as :meth:`outcome` does, and changes nothing.

        Raises:
            TransactionNotFoundError, OutcomeExpiredError, TransactionPreserverClosedError: as :meth:`outcome`.
            CoordinatorUnavailableError, ZooKeeperUnavailableError: no answer in time.
            InvalidRequestError: its leader is of an older version, which does not tell.
        """
        self._check_open()
        timeout_s = self._seconds(timeout)
        with answers_within(timeout_s):
            (group, known), arrived, held = self._inquiry.arrived(TransactionId.of_any(transaction), timeout_s)
            node = self._client_context.metadata.session.get(paths.session(group, known.client_name))
            session = None if node is None else ClientSession.from_json(node.value)
            savepoint = None if held is None else savepoint_of(known.id, tuple(known.streams), held)
            return arrived_of((group, known), arrived, session, savepoint)

    def commit_arrived(
        self,
        transaction: TransactionId | str,
        *,
        records: int | None = None,
        at_savepoint: bool = False,
        timeout: Timeout = None,
    ) -> CommitResult:
        """Commit an open transaction in the place of its owner, which is gone, with all that has arrived of it.

        Of each segment that is everything up to where the owner's last message arrived. What it had not sent yet is
        lost. Conditions and offsets of consumer groups are those of its last savepoint; without one they are lost, too.
        An owner that comes back can neither write nor end it any more. Asking again gives the same answer.

        Args:
            transaction: Its id.
            records: How many records it is to hold, as :meth:`arrived` said; with any other number nothing is done.
            at_savepoint: Leave out what came after its last savepoint.
            timeout: How long to wait for the answer; the connection's ``commit_timeout`` by default.

        Raises:
            ConflictError: only its owner can commit it, as ``obstacle`` of :meth:`arrived` says, or it holds another
                number of records, or has no savepoint; nothing was changed.
            TransactionNotFoundError, OutcomeExpiredError, TransactionPreserverClosedError: as :meth:`outcome`.
            TransactionAbortedError: nothing of it is visible.
            OutcomeUnknownError: no answer in time; ask again.
        """
        self._check_open()
        identifier, deadline = TransactionId.of_any(transaction), Deadline(self._seconds(timeout))

        def check(group: GroupName, known: KnownTransaction, held: HeldSavepoint | None) -> None:
            holds = sum(held.pieces.values()) if at_savepoint and held is not None else known.records
            check_records(identifier, group, holds, records)

        with answers_within(deadline.left()):
            check_commit(self.arrived(identifier, deadline.left()), records, at_savepoint=at_savepoint)
            resumed = self._resume(identifier, deadline, check=check)
        if at_savepoint and resumed.last_savepoint is not None:
            resumed.rollback_to(resumed.last_savepoint, deadline.left())
        return resumed.commit(timeout=deadline.left())

    def extend(self, transaction: TransactionId | str, lease: Duration, timeout: Timeout = None) -> datetime:
        """Extend the lease of an open transaction of any client; see :meth:`rollbridge.Transaction.extend`.

        Its owner continues undisturbed.

        Args:
            transaction: Its id.
            lease: How long it may stay open from now on; at most the limit of the coordinators counts.
            timeout: How long to wait for the answers of the leader; the connection's ``commit_timeout`` by default.

        Returns:
            When its lease ends.

        Raises:
            InvalidRequestError: longer than ``lease_max``, or not positive; nothing was changed.
            TransactionNotFoundError, OutcomeExpiredError, TransactionPreserverClosedError: as :meth:`outcome`.
            TransactionClosedError: it has ended; nothing was changed.
            OutcomeUnknownError: no answer in time; ask again.
            CoordinatorUnavailableError, KafkaUnavailableError, ZooKeeperUnavailableError: likewise.
        """
        self._check_open()
        value = encode_extend(extension_ms(lease, self._client_context.options.lease_max))
        identifier, deadline = TransactionId.of_any(transaction), Deadline(self._seconds(timeout))
        with answers_within(deadline.left()):
            group, known = self._inquiry.transaction(identifier, deadline.left())
            if known.state is not State.OPEN:
                raise over(identifier)
            config = self._runtime.catalog.view(next(iter(known.streams))).config
            header = FrameHeader(FrameKind.EXTEND, identifier.bytes, ANYBODY).pack()
            place = config.buffer_topic, buffer_partition(identifier, config.buffer_partitions)
            answered = threading.Event()
            faults: list[Undelivered] = []

            def delivered(fault: Undelivered | None) -> None:
                if fault is not None:
                    faults.append(fault)
                answered.set()

            self._runtime.sender.send(*place, header, value, delivered)
            if not answered.wait(deadline.left()):
                raise OutcomeUnknownError(
                    f"whether the lease of transaction {identifier} was extended is not known: the brokers have not "
                    "answered in time; ask again",
                    transaction=str(identifier),
                )
            if faults:
                raise faults[0].error("write an extension")
            return self._inquiry.lease_end(group, identifier, deadline.left())

    def _resume(
        self, identifier: TransactionId, deadline: Deadline, client: str | None = None, check: Check | None = None
    ) -> ResumedTransaction:
        """See :meth:`resume`. Fences what this connection held of the transaction before.

        ``check`` may raise an error before anything is changed, having seen what is taken over.
        """
        self._sessions.check()
        self._sessions.left = {}
        group, known = self._inquiry.transaction(identifier, deadline.left(), client=client)
        if known.state is State.OPEN:
            epoch = self._sessions.epoch(group, deadline.left())
            self._runtime.outcomes.follow(group, min(self._client_context.options.connect_timeout_s, deadline.left()))
            self._inquiry.await_record(identifier, deadline)
            # Asked again now that no older session of this client is heard any more, and an outcome would be reported.
            (group, known), savepoint = self._inquiry.with_savepoint(
                identifier, deadline.left(), group=group, client=client
            )
            if known.state is State.OPEN:
                if check is not None:
                    check(group, known, savepoint)
                resumed = self._take_over(group, known, epoch, savepoint)
                if check is None:
                    # What former owners wrote until the BEGIN frames fenced them counts, too, and what they promised.
                    (_, known), savepoint = self._inquiry.with_savepoint(identifier, deadline.left(), group=group)
                    resumed.look_again(known, savepoint)
                return ResumedTransaction(resumed)
        plan = BeginPlan.of(group, BeginFrame(self._own_name, 0, known.label, 0, {}), self._runtime.catalog)
        return ResumedTransaction(ResumedWriting(self._runtime, plan, settled(known), 0, known))

    def _places(self, group: str | GroupName | None) -> list[GroupName]:
        """Return a group; or those, of all, in which there are sessions of this client.

        Raises:
            NotFoundError: there is no such group, or no coordinator has ever served the ZooKeeper path.
        """
        found = self._inquiry.groups(GroupName.of_any(group))
        return self._sessions.places(found) if group is None else found

    def _look_at_missed(self) -> None:
        """Ask for outcomes that are not in a commit log any more, or will never be.

        They were truncated before they were read here, a stream was deleted with what its leader had not read, or the
        log was emptied and its new leader does not know them. A transaction that is open then, or not known to its
        leader yet, gets its outcome from the log as ever.
        """
        outcomes: OutcomeTail = self._runtime.outcomes
        if not outcomes.missed or time.monotonic() < self._ask_again_s:
            return
        for group in list(outcomes.missed):
            left = outcomes.missed[group]
            while left:
                key, completion = next(iter(left.items()))
                try:
                    if not completion.settled:
                        self._settle_missed(group, completion)
                except (UnavailableError, UnknownWriteError) as fault:
                    logger.info("outcomes.missed_unknown group=%s: %s", group, fault)
                    self._ask_again_s = time.monotonic() + _MISSED_AGAIN_S  # others wait for this thread, too
                    break
                del left[key]
            else:
                outcomes.missed.pop(group, None)

    def _settle_missed(self, group: GroupName, completion: Completion) -> None:
        outcomes: OutcomeTail = self._runtime.outcomes
        try:
            _, known = self._inquiry.standing(completion.transaction, _FENCED_ASK_S, group)
            if not known.client_name:
                raise OutcomeExpiredError("its leader has met an end of it, and nothing before that")
        except TransactionNotFoundError:
            if completion.stranded and outcomes.waiting.pop(completion.key, None) is not None:
                known = KnownTransaction(
                    id=completion.transaction, state=State.ABORTED, client_name=completion.client_name or ""
                )
                completion.settle(_record_of(known, completion.stranded).encode_value(), -1)
                completion.count_unfinished()
            else:
                completion.is_missing = True  # it is told again, and by what it says then it has read that
            return
        except (OutcomeExpiredError, TransactionPreserverClosedError) as fault:
            if outcomes.waiting.pop(completion.key, None) is not None:
                completion.give_up(f"its commit log or transaction buffer was emptied by hand: {fault}")
            return
        if completion.client_name not in (None, known.client_name):
            return  # an id that was given out twice
        if known.state in (State.COMMITTED, State.ABORTED):
            if outcomes.waiting.pop(completion.key, None) is not None:
                completion.settle(_record_of(known, known.reason).encode_value(), known.position)
        elif known.state is State.OPEN and completion.stranded:
            abort = AdminRequest(
                kind=RequestKind.ABORT_TRANSACTION,
                transaction=str(completion.transaction),
                reason=completion.stranded,
                client_name=self._own_name,
                created_ms=wall_ms(),
            )
            self._client_context.metadata.ask(group, abort, _FENCED_ASK_S)

    def _look_at_sessions(self) -> None:
        """Fence the waiters whose requests will not be carried out any more because a newer session has begun."""
        sessions, waiting = self._sessions, self._runtime.outcomes.waiting
        sessions.look()
        if sessions.gone:
            for completion in list(waiting.values()):
                if completion.held_by == self._own_name and completion.group in sessions.gone:
                    sessions.is_over(completion.group, completion.epoch)
        if not sessions.fenced or not waiting:
            return
        for group, newest in list(self._sessions.fenced.items()):
            # The answer comes once nothing that was asked for in time is in flight: what is listed then is fenced.
            left, unanswered = self._inquiry.unfinished(self._own_name, _FENCED_ASK_S, [group])
            if unanswered:
                logger.info("session.takeover_unknown client=%s: %s", self._own_name, named(unanswered))
                return
            self._let_go([item for _, item in left], newest)

    def _begin_anew(self, group: GroupName, timeout_s: float) -> int:
        """Begin another session of this client in a group, and fence what earlier ones have open here, too."""
        deadline = Deadline(timeout_s)
        epoch, left = self._sessions.begin_anew(group, deadline.left())
        if self._runtime.outcomes.waiting:
            if left is None:
                found, unanswered = self._inquiry.unfinished(self._own_name, deadline.left(), [group])
                for fault in unanswered.values():
                    raise fault
                left = tuple(item for _, item in found)
            self._let_go(left, epoch)
        return epoch

    def _let_go(self, left: Sequence[KnownTransaction], newest: int) -> None:
        """Fence the waiters of transactions that stay open, and that sessions before the newest have written here.

        The newer session may be one of this connection, with transactions of its own; or another client here has
        resumed them.
        """
        waiting = self._runtime.outcomes.waiting
        for item in left:
            completion = waiting.get(item.id.bytes)
            if completion is None or completion.epoch >= newest or completion.held_by not in (None, self._own_name):
                continue
            waiting.pop(item.id.bytes, None)
            completion.fence()

    def _take_over(
        self, group: GroupName, known: KnownTransaction, epoch: int, savepoint: HeldSavepoint | None
    ) -> ResumedWriting:
        begin = BeginFrame(self._own_name, epoch, known.label, known.lease_ms, known.streams, known.retain_ms)
        plan = BeginPlan.of(group, begin, self._runtime.catalog)
        part = self._client_context.metadata.claim_part(group, known.id)
        waiting = self._runtime.outcomes.waiting
        before = waiting.get(known.id.bytes)
        completion = Completion(known.id.bytes, known.client_name, epoch, owner=self._own_name)
        waiting[known.id.bytes] = completion
        try:
            resumed = ResumedWriting(self._runtime, plan, completion, part, known, savepoint)
        except BaseException:
            waiting.pop(known.id.bytes, None)
            raise
        finally:
            if before is not None:
                before.fence()
        return resumed


@dataclass(frozen=True, slots=True)
class ClientContext:
    """Parts of a connection that all its clients use."""

    options: ClientOptions
    metadata: Metadata
    counters: GroupCounters
    runtime: TransactionContext
    in_flight: CommitsInFlight

    def sessions(self, name: str, changed: Callable[[], None] | None, holder: str = "") -> ClientSessions:
        """Return the sessions of a client name that was given; see :class:`ClientSessions`."""
        return ClientSessions(self.metadata, name, named=True, changed=changed, holder=holder)

    def runtime_of_client(self) -> TransactionContext:
        """Return the runtime of a client, whose commits have an order of their own."""
        return replace(self.runtime, commits=CommitNumbers(self.counters.next, self.in_flight))

    def planner(self, name: str, sessions: ClientSessions, *plans_max: int) -> Planner:
        """Return the maker of a client's plans."""
        runtime = self.runtime
        return Planner(
            name, self.options, runtime.catalog, runtime.outcomes, sessions, self.metadata.lease_limit, *plans_max
        )
