"""A client name that several processes share: they agree on the transactions that they write together, and end them.

Which transaction that is stands in the record of the client's session, see :mod:`bridge.model.joint`. It is only
changed if nobody else has changed it since it was read; whoever loses reads again, and joins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from bridge.client.catalog import Catalog
from bridge.client.counters import CounterSupply
from bridge.client.joint import JointEnding, JointPart, JointTicket, JointTransaction
from bridge.client.planner import Planner
from bridge.client.results import CommitResult, PartHandle
from bridge.client.runtime import Plan, Runtime
from bridge.client.sessions import ClientSessions
from bridge.client.writing import Part
from bridge.errors import (
    AlreadyCommitted,
    ConflictError,
    Fenced,
    OutcomeExpired,
    OutcomeUnknown,
    RollbridgeError,
    TransactionClosed,
    TransactionNotFound,
    TransactionPreserverClosed,
)
from bridge.model import paths
from bridge.model.frames import BeginFrame
from bridge.model.identifiers import TransactionId
from bridge.model.joint import JointState, JointWork, Step, decide_step, label_of
from bridge.model.names import GroupName
from bridge.model.records import ClientSession
from bridge.model.transaction import State
from bridge.resuming import Resumer
from bridge.timeouts import Timeout, as_seconds
from bridge.within import answers_within, patience_s
from bridge.zookeeper.errors import NodeMissing, NodeVersionMismatch, UnknownWriteError
from bridge.zookeeper.metadata import Metadata

logger = logging.getLogger(__name__)


class SharedClient:
    """A client name as several processes use it at once, in one session. Made by :meth:`bridge.Bridge.share`.

    Safe to use from several threads.
    """

    def __init__(
        self,
        client_name: str,
        metadata: Metadata,
        catalog: Catalog,
        runtime: Runtime,
        sessions: ClientSessions,
        planner: Planner,
        counters: CounterSupply,
        resumer: Resumer,
        connect_timeout_s: float,
    ) -> None:
        self._client_name = client_name
        self._metadata = metadata
        self._catalog = catalog
        self._runtime = runtime
        self._sessions = sessions
        self._planner = planner
        self._counters = counters
        self._resumer = resumer
        self._connect_timeout_s = connect_timeout_s

    def joint(
        self,
        *streams: str,
        series: str,
        number: int,
        lease: timedelta | None = None,
        retain: timedelta | None = None,
        timeout: Timeout = None,
    ) -> JointTransaction:
        """A transaction that processes of this session write together: whoever asks first begins it, the others join.

        All of them name the same streams, series and number. The numbers of a series never fall, and one that was
        committed is never written again: not by this session, and not by a later one, which is told that there is
        nothing left to do. What an earlier session has left open is aborted first, and written anew.

        Args:
            streams: ``scope/stream``, one or more of one transaction group.
            series: What the number counts in.
            number: Which transaction of the series.
            lease, retain: As ``timeout`` and ``retain`` of :meth:`bridge.Bridge.begin`.
            timeout: How long to wait for the leader, if an earlier session has left something behind.

        Raises:
            Fenced: a newer session of this client name has begun; nothing was written.
            TransactionClosed: this session has ended that number.
            ConflictError: a later number has been begun.
            OutcomeExpired: an earlier session has left that number behind so long ago that nobody knows its outcome.
            And as :meth:`bridge.Bridge.begin`.
        """
        timeout_s = as_seconds(timeout, self._runtime.commit_timeout_s)
        with answers_within(timeout_s):
            return self._begun(streams, series, number, lease, retain, time.monotonic() + timeout_s)

    def _begun(
        self,
        streams: tuple[str, ...],
        series: str,
        number: int,
        lease: timedelta | None,
        retain: timedelta | None,
        deadline: float,
    ) -> JointTransaction:
        plan = self._planner.plan(streams, lease, label_of(series, number), retain)
        epoch = plan.begin.client_epoch
        while True:
            session, version = self._session(plan.group)
            work = session.work
            match decide_step(work, epoch=epoch, series=series, number=number):
                case Step.BEGIN:
                    if work is not None and work.series != series:
                        before = self._committed_before(plan.group, label_of(series, number), deadline)
                        if before is not None:
                            done = replace(work, series=series, number=number, transaction=before)
                            return self._joint(plan, done, committed=True)
                    work = self._new_work(plan, series, number)
                    if self._record(plan.group, session, version, work):
                        return self._joint(plan, work)
                case Step.JOIN if work is not None:
                    return self._joint(self._plan_of(plan.group, work), work)
                case Step.SKIP if work is not None:
                    return self._joint(plan, work, committed=True)
                case Step.SETTLE if work is not None:
                    state = self._settle(plan.group, epoch, work, deadline)
                    self._record(plan.group, session, version, work.ended(state))
                case Step.OVER:
                    raise TransactionClosed(
                        f"{label_of(series, number)} is over in this session; nothing was written",
                        transaction="" if work is None else str(work.transaction),
                    )
                case Step.BEHIND:
                    raise ConflictError(
                        f"{label_of(series, number)} can not be written: number {work and work.number} of the series "
                        "has been begun already; nothing was written. A late task may be ignored; a Spark query whose "
                        "checkpoint was wound back goes on under a new checkpoint"
                    )

    def commit(self, ticket: JointTicket, parts: Sequence[PartHandle], timeout: Timeout = None) -> CommitResult:
        """Commit a joint transaction, in whichever process of the session; as :meth:`bridge.Transaction.commit`.

        Who has the result calls :meth:`note_committed`; otherwise a later session has to ask for the outcome.

        Raises:
            TransactionClosed: it is not the one on record for its number, or its end was asked for before.
            And as :meth:`bridge.Transaction.commit`.
        """
        with answers_within(as_seconds(timeout, self._runtime.commit_timeout_s)):
            ending = self._ending(ticket)
            try:
                return ending.commit(parts, timeout)
            except OutcomeUnknown:
                self._note(ticket, JointState.ENDING)
                raise
            except TransactionClosed:
                self._note(ticket, JointState.ABORTED)
                raise

    def note_committed(self, ticket: JointTicket, *, last: bool = False) -> None:
        """Put on record that a joint transaction is committed.

        ``last`` says that nobody will come back to this client name: its session is forgotten then.
        """
        self._end(ticket, JointState.COMMITTED, last=last)

    def abort(
        self, ticket: JointTicket, reason: str = "client", timeout: Timeout = None, *, last: bool = False
    ) -> bool:
        """Abort a joint transaction, unless it is committed or may be: False then, and nothing was asked for.

        Raises:
            As :meth:`bridge.Transaction.abort`, but for AlreadyCommitted.
        """
        timeout_s = as_seconds(timeout, self._runtime.commit_timeout_s)
        with answers_within(timeout_s):
            return self._abort(ticket, reason, timeout_s, last=last)

    def _abort(self, ticket: JointTicket, reason: str, timeout_s: float, *, last: bool) -> bool:
        self._sessions.epoch(ticket.group, timeout_s)
        session, _ = self._session(ticket.group)
        if session.work is not None and session.work.transaction == ticket.transaction:
            if session.work.state is JointState.ENDING:
                return False
            if session.work.state is JointState.ABORTED:
                return True
        try:
            state = self._resumer.outcome(ticket.transaction, None, self._client_name, ticket.group, timeout_s).state
            if state is State.OPEN:
                self._ending(ticket).abort(reason, patience_s(timeout_s))
        except AlreadyCommitted:
            state = State.COMMITTED
        except TransactionNotFound:
            state = State.ABORTED  # no part of it has arrived
        committed = state is State.COMMITTED
        self._end(ticket, JointState.COMMITTED if committed else JointState.ABORTED, last=last)
        return not committed

    def _joint(self, plan: Plan, work: JointWork, *, committed: bool = False) -> JointTransaction:
        return JointTransaction(plan.group, work, lambda: self._part(plan, work.transaction), committed=committed)

    def _part(self, plan: Plan, transaction: TransactionId) -> Part:
        """A part with a number of its own."""
        completion = self._runtime.outcomes.completion(transaction)
        number = self._metadata.claim_part(plan.group, transaction, joint_of=self._client_name)
        return JointPart(self._runtime, plan, completion, number)

    def _end(self, ticket: JointTicket, state: JointState, *, last: bool) -> None:
        """Put on record what became of a transaction, or forget the session."""
        if not last:
            self._note(ticket, state)
            return
        try:
            self._metadata.session.delete(paths.session(ticket.group, self._client_name))
        except RollbridgeError as fault:
            logger.warning("the session of client %s could not be forgotten: %s", self._client_name, fault)

    def _ending(self, ticket: JointTicket) -> JointEnding:
        """What ends the transaction of a ticket, if that is the one on record."""
        self._sessions.epoch(ticket.group, self._connect_timeout_s)
        self._metadata.session.sync()  # it may just have been put on record, by another process
        session, _ = self._session(ticket.group)
        work = session.work
        if work is None or work.transaction != ticket.transaction or work.state is not JointState.OPEN:
            known = "not the one on record" if work is None or work.transaction != ticket.transaction else work.state
            raise TransactionClosed(
                f"transaction {ticket.transaction} of {label_of(ticket.series, ticket.number)} is {known}; its end "
                "was not asked for: its outcome can be asked for by its id",
                transaction=str(ticket.transaction),
            )
        self._runtime.outcomes.follow(ticket.group, self._connect_timeout_s)
        return JointEnding(self._runtime, self._plan_of(ticket.group, work), ticket.transaction)

    def _session(self, group: GroupName) -> tuple[ClientSession, int]:
        """The record of the session and its version; raises Fenced if it is not ours any more."""
        node = self._metadata.session.get(paths.session(group, self._client_name))
        if node is None:
            raise Fenced(
                f"the session of client {self._client_name} is not on record in group {group} any more; nothing was "
                "written: begin anew with another client name"
            )
        session = ClientSession.from_json(node.value)
        if session.epoch > self._sessions.epoch(group, self._connect_timeout_s):
            self._sessions.fenced[group] = session.epoch
        self._sessions.check()
        return session, node.version

    def _record(self, group: GroupName, session: ClientSession, version: int, work: JointWork) -> bool:
        """Put a transaction on record unless somebody has changed it meanwhile; False if it has to be read again."""
        fresh = session.with_work(work, int(time.time() * 1000))
        try:
            self._metadata.session.set(paths.session(group, self._client_name), fresh.to_json(), version)
        except (NodeVersionMismatch, NodeMissing, UnknownWriteError):
            return False
        return True

    def _note(self, ticket: JointTicket, state: JointState) -> None:
        """Put on record what became of a transaction; who needs to know and does not find it asks the leader."""
        try:
            while True:
                session, version = self._session(ticket.group)
                work = session.work
                if work is None or work.transaction != ticket.transaction or work.state is state:
                    return
                if self._record(ticket.group, session, version, work.ended(state)):
                    return
        except RollbridgeError as fault:
            # Denied, say, or what is on record can not be read: none of that undoes what has become of it.
            logger.warning("that transaction %s is %s could not be put on record: %s", ticket.transaction, state, fault)

    def _committed_before(self, group: GroupName, label: str, deadline: float) -> TransactionId | None:
        """The committed transaction of a series that is not the latest one on record."""
        left = max(deadline - time.monotonic(), 0.0)
        try:
            outcome = self._resumer.outcome(None, label, self._client_name, group, left)
        except (TransactionNotFound, OutcomeExpired, TransactionPreserverClosed):
            return None
        return outcome.transaction if outcome.committed else None

    def look(self) -> None:
        """Let those go who wait for what a newer session keeps from being carried out; called now and then."""
        self._resumer.look_at_sessions()

    def _new_work(self, plan: Plan, series: str, number: int) -> JointWork:
        begin = plan.begin
        return JointWork(
            series=series,
            number=number,
            transaction=TransactionId(plan.id_prefix | self._counters.next()),
            epoch=begin.client_epoch,
            streams=begin.streams,
            lease_ms=begin.lease_ms,
            retain_ms=begin.retain_ms,
        )

    def _plan_of(self, group: GroupName, work: JointWork) -> Plan:
        """The plan as whoever began it had it, also if the streams have been scaled meanwhile."""
        return Plan(
            group=group,
            begin=BeginFrame(self._client_name, work.epoch, work.label, work.lease_ms, work.streams, work.retain_ms),
            routes=tuple(self._catalog.route(name, epoch) for name, epoch in work.streams.items()),
            generation=self._catalog.generation,
        )

    def _settle(self, group: GroupName, epoch: int, work: JointWork, deadline: float) -> JointState:
        """The outcome of what an earlier session has left behind; it is aborted if it is open.

        Raises:
            OutcomeExpired: it was left behind so long ago that nobody remembers.
            Fenced: a newer session has begun.
            UnavailableError: nobody answered in time.
        """
        fenced = False
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                outcome = self._resumer.outcome(work.transaction, None, self._client_name, group, left)
            except TransactionNotFound:
                if fenced:
                    return JointState.ABORTED  # it was never begun, and from now on it would be refused
                self._sessions.fence(group, epoch, left)
                fenced = True
                continue
            except OutcomeExpired as fault:
                raise OutcomeExpired(
                    f"whether {work.label} was committed as transaction {work.transaction} is not remembered any more "
                    f"({fault}); nothing was written: look for its records in {', '.join(work.streams)}, and go on "
                    "under a new client name, with or without them"
                ) from fault
            if outcome.state is State.COMMITTED:
                return JointState.COMMITTED
            if outcome.state is State.ABORTED:
                return JointState.ABORTED
            try:
                self._resumer.resume(work.transaction, left).abort("left open by an earlier session", left)
            except AlreadyCommitted:
                return JointState.COMMITTED
            except (Fenced, TransactionNotFound) as fault:
                self._sessions.check()  # unless it is that, another process of this session is at it, too
                logger.info("transaction %s is looked at again: %s", work.transaction, fault)
            else:
                return JointState.ABORTED
