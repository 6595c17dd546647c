"""What a connection does with transactions that it did not begin: ask for outcomes, find open ones, go on with them."""

from __future__ import annotations

import logging
import time
from typing import Final

from bridge.client.catalog import Catalog
from bridge.client.futures import Completion
from bridge.client.inquiry import Inquiry, outcome_of
from bridge.client.options import ClientOptions
from bridge.client.outcomes import OutcomeTail
from bridge.client.results import Outcome
from bridge.client.resumed import ResumedTransaction, settled
from bridge.client.runtime import Plan, Runtime
from bridge.client.sessions import ClientSessions
from bridge.errors import InvalidRequestError, NotFoundError, UnavailableError
from bridge.model.frames import BeginFrame
from bridge.model.identifiers import TransactionId
from bridge.model.known import KnownTransaction
from bridge.model.names import GroupName
from bridge.model.transaction import State
from bridge.timeouts import Timeout, as_seconds
from bridge.zookeeper.metadata import Metadata

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 0.05
_FENCED_ASK_S: Final = 5.0


class Resumer:
    """The part of a connection that knows of transactions begun elsewhere. Safe to use from several threads."""

    def __init__(
        self,
        client_name: str,
        options: ClientOptions,
        metadata: Metadata,
        catalog: Catalog,
        runtime: Runtime,
        sessions: ClientSessions,
    ) -> None:
        self._client_name = client_name
        self._options = options
        self._metadata = metadata
        self._catalog = catalog
        self._runtime = runtime
        self._sessions = sessions
        self._inquiry = Inquiry(metadata, client_name)

    def outcome(
        self,
        transaction: TransactionId | str | None,
        label: str | None,
        client: str | None,
        group: str | GroupName | None,
        timeout: Timeout,
    ) -> Outcome:
        """See :meth:`bridge.Bridge.outcome`."""
        if (transaction is None) == (label is None):
            raise InvalidRequestError("ask for the outcome of a transaction id or of a label, and not of both")
        timeout_s = as_seconds(timeout, self._options.commit_timeout_s)
        where = GroupName.parse(group) if isinstance(group, str) else group
        if label is not None:
            return outcome_of(self._inquiry.labelled(label, client or self._client_name, timeout_s, group=where))
        assert transaction is not None
        return outcome_of(self._inquiry.transaction(_parsed(transaction), timeout_s, group=where, client=client))

    def unfinished(self, group: str | GroupName | None, timeout: Timeout) -> list[Outcome]:
        """See :meth:`bridge.Bridge.unfinished`."""
        timeout_s = as_seconds(timeout, self._options.commit_timeout_s)
        where = GroupName.parse(group) if isinstance(group, str) else group
        self._sessions.take_over(self._inquiry.groups(where), timeout_s)
        return [outcome_of(item) for item in self._inquiry.unfinished(self._client_name, timeout_s, group=where)]

    def resume(self, transaction: TransactionId | str, timeout: Timeout) -> ResumedTransaction:
        """See :meth:`bridge.Bridge.resume`. What this connection held of the transaction before is fenced."""
        identifier = _parsed(transaction)
        deadline = time.monotonic() + as_seconds(timeout, self._options.commit_timeout_s)
        self._sessions.check()
        group, known = self._inquiry.transaction(identifier, _left(deadline))
        if known.state is State.OPEN:
            epoch = self._sessions.epoch(group, _left(deadline))
            self._runtime.outcomes.follow(group, self._options.connect_timeout_s)
            self._await_record(identifier, deadline)
            # Asked again now that no older session of this client is heard any more, and the outcome would be told.
            group, known = self._inquiry.transaction(identifier, _left(deadline), group=group)
            if known.state is State.OPEN:
                return self._take_over(group, known, epoch)
        plan = Plan(group, BeginFrame(self._client_name, 0, known.label, 0, {}), (), self._catalog.generation)
        return ResumedTransaction(self._runtime, plan, settled(known), 0, known)

    def look_at_sessions(self) -> None:
        """After a newer session has begun, let those go who wait for what will not be carried out any more."""
        self._sessions.look()
        outcomes: OutcomeTail = self._runtime.outcomes
        if not self._sessions.fenced or not outcomes.waiting:
            return
        for group in self._sessions.fenced:
            # The answer comes once nothing that was asked for in time is under way: these are not heard any more.
            try:
                left = self._inquiry.unfinished(self._client_name, _FENCED_ASK_S, group=group)
            except (UnavailableError, NotFoundError) as fault:
                logger.info("what a newer session of this client has taken over is not known yet: %s", fault)
                return
            for _, item in left:
                completion = outcomes.waiting.pop(item.id.bytes, None)
                if completion is not None:
                    completion.fence()

    def _take_over(self, group: GroupName, known: KnownTransaction, epoch: int) -> ResumedTransaction:
        plan = self._plan(group, known, epoch)
        part = self._metadata.claim_part(group, known.id)
        waiting = self._runtime.outcomes.waiting
        before = waiting.get(known.id.bytes)
        completion = waiting[known.id.bytes] = Completion(known.id.bytes)
        try:
            resumed = ResumedTransaction(self._runtime, plan, completion, part, known)
        except BaseException:
            waiting.pop(known.id.bytes, None)
            raise
        finally:
            if before is not None:
                before.fence()
        return resumed

    def _plan(self, group: GroupName, known: KnownTransaction, epoch: int) -> Plan:
        return Plan(
            group=group,
            begin=BeginFrame(self._client_name, epoch, known.label, known.lease_ms, known.streams, known.retain_ms),
            routes=tuple(self._catalog.route(name, number) for name, number in known.streams.items()),
            generation=self._catalog.generation,
        )

    def _await_record(self, identifier: TransactionId, deadline: float) -> None:
        """Wait until the transaction is on record, or has ended: with the record goes what else there is of it."""
        while self._metadata.find_transaction(identifier) is None and _left(deadline) > 0:
            _, known = self._inquiry.transaction(identifier, _left(deadline))
            if known.state is not State.OPEN:
                return
            time.sleep(_LOOK_AGAIN_S)


def _parsed(transaction: TransactionId | str) -> TransactionId:
    return TransactionId.parse(transaction) if isinstance(transaction, str) else transaction


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
