"""Cooperative transactions: several processes share a client name, agree on a transaction, write it and end it.

The record of the client's session in ZooKeeper names that transaction, see :mod:`rollbridge.metadata.client_sessions`.
It is changed by compare-and-set on its version; the loser of a race reads again, and joins.

Each writer of a part sends the BEGIN frames first, so that it waits for no other process. The leader takes the first
ones, and drops those that come after the end of the transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from rollbridge.base.arguments import checked, warn_renamed
from rollbridge.base.deadlines import Deadline, Timeout, answers_within, as_seconds, patience_s, wall_ms
from rollbridge.base.ids import OWNER_PART, TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind
from rollbridge.buffer.table import State
from rollbridge.client.outcomes import Outcome
from rollbridge.client.recovery import ClientContext, Resumer
from rollbridge.client.results import CommitResult, PartHandle
from rollbridge.client.sessions import ClientSessions
from rollbridge.client.transaction import Part, Transaction
from rollbridge.client.writing import BeginPlan, OwnerWriting, Writing
from rollbridge.errors import (
    ClientFencedError,
    ConflictError,
    InvalidRequestError,
    OutcomeExpiredError,
    OutcomeUnknownError,
    RollbridgeError,
    TransactionClosedError,
    TransactionCommittedError,
    TransactionNotFoundError,
    TransactionPreserverClosedError,
    UnknownWriteError,
)
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import (
    SERIES_BYTES,
    SERIES_KEPT_MS,
    SESSION_BYTES_MAX,
    ClientSession,
    CooperativeContent,
    CooperativeState,
    CooperativeWork,
    SeriesStep,
    decide_again,
    decide_step,
    label_of,
)
from rollbridge.metadata.errors import NodeConflictError, NodeMissingError
from rollbridge.stream.names import GroupName


@dataclass(frozen=True, slots=True)
class CooperativeTicket:
    """Name of a cooperative transaction for other processes of the session; can be pickled."""

    group: GroupName
    series: str
    number: int
    transaction: TransactionId


@checked()
class CooperativeTransaction:
    """Transaction written by several processes; safe to use from several threads.

    Made by :meth:`rollbridge.SharedClient.cooperative`.

    Attributes:
        ticket: Names the transaction for the process that ends it.
        committed: True if an earlier session has committed it: then there is nothing left to do.
        content: Content of that commit; None if it was not recorded, as by older versions.
    """

    def __init__(
        self, group: GroupName, work: CooperativeWork, new_part: Callable[[], Part], *, committed: bool
    ) -> None:
        """See :meth:`rollbridge.SharedClient.cooperative`; ``new_part`` makes a part with a number of its own."""
        self._new_part = new_part
        self.ticket = CooperativeTicket(group, work.series, work.number, work.transaction)
        self.committed = committed
        self.content = work.content

    @property
    def id(self) -> TransactionId:
        """Id of the transaction."""
        return self.ticket.transaction

    def part(self) -> Part:
        """Open a part of the transaction; it counts if its handle is among those passed to the commit.

        Raises:
            TransactionClosedError: an earlier session has committed the transaction.
            ZooKeeperUnavailableError: the part could not be given a number.
        """
        if self.committed:
            raise TransactionClosedError(
                f"{label_of(self.ticket.series, self.ticket.number)} has been committed as transaction {self.id}; "
                "nothing was written",
                transaction=str(self.id),
            )
        return self._new_part()


logger = logging.getLogger(__name__)

_ANY_LEASE: Final = timedelta(milliseconds=1)
"""Lease of a plan from which nothing is begun."""
_KEPT_DAYS: Final = SERIES_KEPT_MS // (24 * 3_600_000)


@checked()
class SharedClient:
    """Client name as several processes use it at once, in one session. Made by :meth:`rollbridge.Bridge.share`.

    Safe to use from several threads.
    """

    def __init__(self, client_name: str, context: ClientContext, sessions: ClientSessions) -> None:
        self._client_name = client_name
        self._metadata = context.metadata
        self._runtime = runtime = context.runtime_of_client()
        self._catalog = runtime.catalog
        self._sessions = sessions
        self._planner = context.planner(client_name, sessions)
        self._counters = context.counters
        self._resumer = Resumer(client_name, context, sessions, runtime)
        self._connect_timeout_s = context.options.connect_timeout_s

    def cooperative(
        self,
        *streams: str,
        series: str,
        number: int,
        lease: Timeout = None,
        retain: Timeout = None,
        timeout: Timeout = None,
        once: bool = False,
    ) -> CooperativeTransaction:
        """Begin or join a transaction that processes of this session write together; the first caller begins it.

        All of them name the same streams, series and number. The numbers of a series never fall, and a committed number
        is never written again: neither by this session nor by a later one, whose caller gets ``committed``. Open
        transactions of an earlier session are aborted first, and written again; so are open ones of another series,
        since a client works on one at a time.

        Raises what :meth:`rollbridge.Bridge.begin` raises, too.

        Args:
            streams: ``scope/stream``, one or more of one transaction group.
            series: Name of what the number counts in.
            number: Number of the transaction in the series.
            lease, retain: As ``timeout`` and ``retain`` of :meth:`rollbridge.Bridge.begin`.
            timeout: How long to wait for the leader, if an earlier session has left something behind.
            once: True if this series is not asked for again, so that it need not be remembered.

        Raises:
            ClientFencedError: a newer session of this client name has begun; nothing was written.
            TransactionClosedError: this session has ended that number.
            ConflictError: a later number has been begun.
            OutcomeExpiredError: the outcome of that number of an earlier session, or of the series, is no longer
                remembered.
            InvalidRequestError: the client has written too many series within 30 days.
        """
        timeout_s = as_seconds(timeout, self._runtime.commit_timeout_s)
        with answers_within(timeout_s):
            plan = self._planner.plan(streams, lease, label_of(series, number), retain)
            found = self._agreed(plan, series, number, Deadline(timeout_s), begin=True, once=once)
        assert found is not None
        return found

    def joint(self, *streams: str, **arguments: Any) -> CooperativeTransaction:
        """Call :meth:`cooperative`, by its former name."""
        warn_renamed("SharedClient.joint()", "cooperative()")
        return self.cooperative(*streams, **arguments)

    def committed(
        self, *streams: str, series: str, number: int, timeout: Timeout = None
    ) -> CooperativeTransaction | None:
        """Return what :meth:`cooperative` would find committed by an earlier session, without beginning; None
        otherwise.

        A transaction that an earlier session has left open is ended first. Raises as :meth:`cooperative` does.
        """
        timeout_s = as_seconds(timeout, self._runtime.commit_timeout_s)
        with answers_within(timeout_s):
            group = self._catalog.view(streams[0]).config.group
            node = self._metadata.session.get(paths.session(group, self._client_name))
            work = None if node is None else ClientSession.from_json(node.value).work
            if work is None or (work.series == series and work.number < number):
                return None  # the usual case costs one read
            plan = self._planner.plan(streams, _ANY_LEASE, label_of(series, number), None)
            return self._agreed(plan, series, number, Deadline(timeout_s), begin=False, once=False)

    def _agreed(
        self, plan: BeginPlan, series: str, number: int, deadline: Deadline, *, begin: bool, once: bool
    ) -> CooperativeTransaction | None:
        """Return the transaction of a number; None if it is not committed, and none is to be begun."""
        epoch = plan.begin.client_epoch
        while True:
            session, version = self._session(plan.group)
            work = session.work
            step = decide_step(work, epoch=epoch, series=series, number=number)
            if step is SeriesStep.LOOK and work is not None:
                step, work = self._look_back(plan, session, work, series, number, deadline, once=once)
            match step:
                case SeriesStep.BEGIN:
                    if not begin:
                        return None
                    fresh = self._new_work(plan, series, number, once=once)
                    self._check_room(session, fresh)
                    if self._record(plan.group, session, version, fresh):
                        return self._cooperative(plan, fresh)
                case SeriesStep.JOIN if work is not None:
                    return self._cooperative(self._plan_of(plan.group, work), work) if begin else None
                case SeriesStep.SKIP if work is not None:
                    return self._cooperative(plan, work, committed=True)
                case SeriesStep.SETTLE if work is not None:
                    state = self._settle(plan.group, epoch, work, deadline)
                    self._record(plan.group, session, version, work.ended(state))
                case SeriesStep.OVER:
                    raise TransactionClosedError(
                        f"{label_of(series, number)} is over in this session; nothing was written",
                        transaction="" if work is None else str(work.transaction),
                    )
                case SeriesStep.BEHIND:
                    raise ConflictError(
                        f"{label_of(series, number)} cannot be written: number {work and work.number} of the series "
                        "has been begun already; nothing was written. A late task may be ignored; a Spark query whose "
                        "checkpoint was wound back needs a new checkpoint"
                    )

    def _look_back(
        self,
        plan: BeginPlan,
        session: ClientSession,
        work: CooperativeWork,
        series: str,
        number: int,
        deadline: Deadline,
        *,
        once: bool,
    ) -> tuple[SeriesStep, CooperativeWork]:
        """Decide about a series other than the one on record; return the step, and what is known of the series.

        Raises:
            OutcomeExpiredError: the series may have been written so long ago that it was forgotten.
        """
        shared = session.shared
        assert shared is not None
        former = shared.former_series(series)
        if former is not None:
            known = replace(work, series=series, number=former.number, transaction=former.transaction)
            return decide_again(former, number), replace(known, content=former.content)
        if once:
            return SeriesStep.BEGIN, work
        if shared.has_forgotten(series):
            raise _forgotten(self._client_name, series, f"it was written more than {_KEPT_DAYS} days ago")
        if not shared.complete:
            before = self._committed_before(plan.group, series, number, deadline)
            if before is not None:
                return SeriesStep.SKIP, replace(work, series=series, number=number, transaction=before, content=None)
        return SeriesStep.BEGIN, work

    def _check_room(self, session: ClientSession, fresh: CooperativeWork) -> None:
        """Refuse a series for which the session's record has no room."""
        if session.work is None or session.work.series == fresh.series or fresh.once:
            return
        size = len(session.with_work(fresh, wall_ms()).to_json()) + SERIES_BYTES
        if size > SESSION_BYTES_MAX:
            raise InvalidRequestError(
                f"{fresh.label} cannot be written: client {self._client_name} has written so many labels, or series, "
                f"within {_KEPT_DAYS} days that no other one could be remembered ({SESSION_BYTES_MAX} bytes); nothing "
                "was written: use several client names, or one label with numbers that rise"
            )

    def commit(
        self,
        ticket: CooperativeTicket,
        parts: Sequence[PartHandle],
        timeout: Timeout = None,
        *,
        content: CooperativeContent | None = None,
    ) -> CommitResult:
        """Commit a cooperative transaction, in any process of the session; as :meth:`rollbridge.Transaction.commit`.

        The receiver of the result calls :meth:`note_committed`; otherwise a later session has to ask for the outcome.
        ``content`` describes the parts' records. It is on record before the commit is asked for: wherever this process
        dies, a repetition of this number can be compared with it. Raises what
        :meth:`rollbridge.Transaction.commit` raises, too.

        Raises:
            TransactionClosedError: not the transaction on record for its number, or its end was asked for before.
        """
        with answers_within(as_seconds(timeout, self._runtime.commit_timeout_s)):
            ending = self._ending(ticket, content)
            try:
                return ending.commit(parts, timeout)
            except OutcomeUnknownError:
                self._note(ticket, CooperativeState.ENDING)
                raise
            except TransactionClosedError:
                self._note(ticket, CooperativeState.ABORTED)
                raise

    def note_committed(self, ticket: CooperativeTicket, *, last: bool = False) -> None:
        """Record that a cooperative transaction is committed.

        With ``last`` the client name is not used again, so its session is removed as well.
        """
        self._end(ticket, CooperativeState.COMMITTED, last=last)

    def abort(
        self, ticket: CooperativeTicket, reason: str = "client", timeout: Timeout = None, *, last: bool = False
    ) -> bool:
        """Abort a cooperative transaction; return False, asking for nothing, if it is committed or may be.

        Raises:
            As :meth:`rollbridge.Transaction.abort`, but for TransactionCommittedError.
        """
        timeout_s = as_seconds(timeout, self._runtime.commit_timeout_s)
        with answers_within(timeout_s):
            return self._abort(ticket, reason, timeout_s, last=last)

    def _abort(self, ticket: CooperativeTicket, reason: str, timeout_s: float, *, last: bool) -> bool:
        self._sessions.epoch(ticket.group, timeout_s)
        session, _ = self._session(ticket.group)
        if session.work is not None and session.work.transaction == ticket.transaction:
            if session.work.state is CooperativeState.ENDING:
                return False
            if session.work.state is CooperativeState.ABORTED:
                return True
        try:
            state = self._outcome(ticket.transaction, ticket.group, timeout_s).state
            if state is State.OPEN:
                self._ending(ticket).abort(reason, patience_s(timeout_s))
        except TransactionCommittedError:
            state = State.COMMITTED
        except TransactionNotFoundError:
            state = State.ABORTED  # no part of it has arrived
        committed = state is State.COMMITTED
        self._end(ticket, CooperativeState.COMMITTED if committed else CooperativeState.ABORTED, last=last)
        return not committed

    def _cooperative(
        self, plan: BeginPlan, work: CooperativeWork, *, committed: bool = False
    ) -> CooperativeTransaction:
        return CooperativeTransaction(plan.group, work, lambda: self._part(plan, work.transaction), committed=committed)

    def _part(self, plan: BeginPlan, transaction: TransactionId) -> Part:
        """Open a part with a number of its own, which sends the BEGIN frames itself, ahead of its records."""
        epoch = plan.begin.client_epoch
        completion = self._runtime.outcomes.completion(transaction, epoch)
        number = self._metadata.claim_part(plan.group, transaction, cooperative_of=self._client_name)
        writing = Writing(self._runtime, plan, completion, number)
        header = FrameHeader(FrameKind.BEGIN, completion.key, OWNER_PART, client_epoch=epoch).pack()
        with writing.lock:
            for place in range(len(writing.buffers)):
                writing.emit(place, header, plan.begin_value)
        return Part(writing)

    def _end(self, ticket: CooperativeTicket, state: CooperativeState, *, last: bool) -> None:
        """Record the outcome of a transaction, or forget the session."""
        if not last:
            self._note(ticket, state)
            return
        try:
            self._metadata.session.delete(paths.session(ticket.group, self._client_name))
        except RollbridgeError as fault:
            logger.warning("session.forget_failed client=%s: %s", self._client_name, fault)

    def _ending(self, ticket: CooperativeTicket, content: CooperativeContent | None = None) -> Transaction:
        """Return what ends a ticket's transaction, if that is on record; record its content if given.

        Parts have written all of it, its begin included. All processes of the session have agreed on its streams, so
        none joins it late.
        """
        self._sessions.epoch(ticket.group, self._connect_timeout_s)
        self._metadata.session.sync()  # another process may just have put it on record
        while True:
            session, version = self._session(ticket.group)
            work = session.work
            if work is None or work.transaction != ticket.transaction or work.state is not CooperativeState.OPEN:
                known = (
                    "not the one on record" if work is None or work.transaction != ticket.transaction else work.state
                )
                raise TransactionClosedError(
                    f"transaction {ticket.transaction} of {label_of(ticket.series, ticket.number)} is {known}; its end "
                    "was not asked for: its outcome can be asked for by its id",
                    transaction=str(ticket.transaction),
                )
            if content in (None, work.content):
                break
            self._record(ticket.group, session, version, replace(work, content=content))
        self._runtime.outcomes.follow(ticket.group, self._connect_timeout_s)
        plan = self._plan_of(ticket.group, work)
        completion = self._runtime.outcomes.completion(ticket.transaction, plan.begin.client_epoch)
        writing = OwnerWriting(self._runtime, plan, completion, OWNER_PART, joins=False)
        writing.protocol.sent[0] = writing.protocol.answered[0] = 1
        return Transaction(writing)

    def _session(self, group: GroupName) -> tuple[ClientSession, int]:
        """Return the record of the session and its version.

        Raises:
            ClientFencedError: the session is gone, or a newer one has replaced it.
        """
        node = self._metadata.session.get(paths.session(group, self._client_name))
        if node is None:
            raise ClientFencedError(
                f"the session of client {self._client_name} is not on record in group {group} any more; nothing was "
                "written: begin again with another client name"
            )
        session = ClientSession.from_json(node.value)
        if session.epoch > self._sessions.epoch(group, self._connect_timeout_s):
            self._sessions.fenced[group] = session.epoch
        self._sessions.check()
        return session, node.version

    def _record(self, group: GroupName, session: ClientSession, version: int, work: CooperativeWork) -> bool:
        """Put a transaction on record; return False if the record was changed meanwhile and has to be read again."""
        fresh = session.with_work(work, wall_ms())
        try:
            self._metadata.session.set(paths.session(group, self._client_name), fresh.to_json(), version)
        except (NodeConflictError, NodeMissingError, UnknownWriteError):
            return False
        return True

    def _note(self, ticket: CooperativeTicket, state: CooperativeState) -> None:
        """Record the outcome of a transaction as far as possible; a reader that does not find it asks the leader."""
        try:
            while True:
                session, version = self._session(ticket.group)
                work = session.work
                if work is None or work.transaction != ticket.transaction or work.state is state:
                    return
                if self._record(ticket.group, session, version, work.ended(state)):
                    return
        except RollbridgeError as fault:
            # Access is denied, say, or the record cannot be read: none of that undoes the outcome.
            logger.warning("cooperative.record_failed txn=%s state=%s: %s", ticket.transaction, state, fault)

    def _committed_before(self, group: GroupName, series: str, number: int, deadline: Deadline) -> TransactionId | None:
        """Return the committed transaction of a number written by an older version, if the leader remembers it."""
        try:
            outcome = self._resumer.outcome(label=label_of(series, number), group=group, timeout=deadline.left())
        except TransactionNotFoundError:
            return None
        except (OutcomeExpiredError, TransactionPreserverClosedError) as fault:
            raise _forgotten(self._client_name, series, str(fault)) from fault
        return outcome.transaction if outcome.committed else None

    def _outcome(self, transaction: TransactionId, group: GroupName, timeout_s: float) -> Outcome:
        return self._resumer.outcome(transaction, client=self._client_name, group=group, timeout=timeout_s)

    def look(self) -> None:
        """Release waiters whose requests a newer session has fenced; called on the housekeeping thread."""
        self._resumer._look_at_sessions()

    def _new_work(self, plan: BeginPlan, series: str, number: int, *, once: bool) -> CooperativeWork:
        begin = plan.begin
        return CooperativeWork(
            series=series,
            number=number,
            transaction=TransactionId(plan.id_prefix | self._counters.next(plan.group)),
            epoch=begin.client_epoch,
            streams=begin.streams,
            lease_ms=begin.lease_ms,
            retain_ms=begin.retain_ms,
            once=once,
        )

    def _plan_of(self, group: GroupName, work: CooperativeWork) -> BeginPlan:
        begin = BeginFrame(self._client_name, work.epoch, work.label, work.lease_ms, work.streams, work.retain_ms)
        return BeginPlan.of(group, begin, self._catalog)

    def _settle(self, group: GroupName, epoch: int, work: CooperativeWork, deadline: Deadline) -> CooperativeState:
        """Return the outcome of a transaction of an earlier session; abort it if it is open.

        Raises:
            OutcomeExpiredError: its outcome is no longer remembered.
            ClientFencedError: a newer session has begun.
            UnavailableError: no answer in time.
        """
        fenced = False
        while True:
            left_s = deadline.left()
            try:
                outcome = self._outcome(work.transaction, group, left_s)
            except TransactionNotFoundError:
                if fenced:
                    return CooperativeState.ABORTED  # never begun, and refused from now on
                self._sessions.fence(group, epoch, left_s)
                fenced = True
                continue
            except OutcomeExpiredError as fault:
                raise OutcomeExpiredError(
                    f"whether {work.label} was committed as transaction {work.transaction} is not remembered any more "
                    f"({fault}); nothing was written: look for its records in {', '.join(work.streams)}, and continue "
                    "under a new client name, with or without them"
                ) from fault
            if outcome.state is State.COMMITTED:
                return CooperativeState.COMMITTED
            if outcome.state is State.ABORTED:
                return CooperativeState.ABORTED
            try:
                self._resumer.resume(work.transaction, left_s).abort("left open by an earlier session", left_s)
            except TransactionCommittedError:
                return CooperativeState.COMMITTED
            except (ClientFencedError, TransactionNotFoundError) as fault:
                self._sessions.check()  # unless this session is fenced, another process of it does the same
                logger.info("cooperative.settle_retried txn=%s: %s", work.transaction, fault)
            else:
                return CooperativeState.ABORTED


def _forgotten(client: str, series: str, why: str) -> OutcomeExpiredError:
    return OutcomeExpiredError(
        f"whether {series} was committed before by client {client} is not remembered any more ({why}); nothing was "
        "written. If it was, there is nothing to do; if it was not, write it under another label or a new client name"
    )
