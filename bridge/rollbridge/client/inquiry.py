"""Inquiries: asking the leaders of transaction groups what they know of transactions.

An id does not say to which group its transaction belongs, so without a group all leaders are asked, at the same time.
One that knows the transaction settles the matter; that nobody knows it can only be said once all have answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final

from rollbridge.client.admin import refusal
from rollbridge.client.results import Outcome, TransactionStory
from rollbridge.errors import (
    CorruptDataError,
    NotFoundError,
    OutcomeExpired,
    RollbridgeError,
    TransactionNotFound,
    TransactionPreserverClosed,
    UnavailableError,
)
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.known import KnownTransaction
from rollbridge.model.names import GroupName
from rollbridge.model.requests import Request, RequestKind, Story
from rollbridge.zookeeper.errors import UnknownWriteError, ZooKeeperDenied
from rollbridge.zookeeper.metadata import Metadata

_ASKED_AT_ONCE: Final = 16

Known = tuple[GroupName, KnownTransaction]
Ask = Callable[[GroupName], list[Known]]
"""Puts a question to one group."""


class Inquiry:
    """Asks leaders. Safe to use from several threads."""

    def __init__(self, metadata: Metadata, client_name: str) -> None:
        self._metadata = metadata
        self._client_name = client_name

    def groups(self, group: GroupName | None) -> list[GroupName]:
        """The group, or all of them; raises NotFoundError if there is no such group."""
        known = self._metadata.groups()
        if group is not None and group not in known:
            raise NotFoundError(f"there is no transaction group {group}: no stream was ever created in it")
        return known if group is None else [group]

    def transaction(
        self, identifier: TransactionId, timeout_s: float, *, group: GroupName | None = None, client: str | None = None
    ) -> Known:
        """What is known of a transaction.

        Raises:
            TransactionNotFound: it is not open and has no outcome.
            OutcomeExpired, TransactionPreserverClosed: nobody remembers, or it is not of the ``client`` given.
            CoordinatorUnavailable, ZooKeeperUnavailable: somebody who might know did not answer in time.
        """
        request = self._request(transaction=str(identifier), owner=client or "")
        return self._one(self._asking(request, timeout_s), f"transaction {identifier}", group)

    def story(self, identifier: TransactionId, timeout_s: float, *, group: GroupName | None = None) -> TransactionStory:
        """What the leader of a transaction knows of it at this moment, with its last events.

        Raises:
            TransactionNotFound, OutcomeExpired, TransactionPreserverClosed: nobody knows anything of it.
            CoordinatorUnavailable, ZooKeeperUnavailable: somebody who might know did not answer in time.
            CorruptDataError: a leader of an older version, which does not tell events.
        """
        request = Request(
            kind=RequestKind.DESCRIBE,
            transaction=str(identifier),
            client_name=self._client_name,
            created_ms=int(time.time() * 1000),
        )
        stories: dict[GroupName, Story] = {}

        def ask(where: GroupName) -> list[Known]:
            answer = self._metadata.ask(where, request, timeout_s)
            if not answer.ok:
                raise refusal(answer, request.transaction)
            if answer.story is None:
                raise CorruptDataError(f"the leader of group {where} does not tell what happened to {identifier}")
            stories[where] = answer.story
            return [(where, item) for item in answer.transactions]

        where, known = self._one(ask, f"transaction {identifier}", group)
        return _story_of(where, known, stories[where])

    def labelled(self, label: str, client: str, timeout_s: float, *, group: GroupName | None = None) -> Known:
        """What is known of a client's latest transaction with a label. Raises as :meth:`transaction` does."""
        request = self._request(owner=client, label=label)
        what = f"a transaction of client {client} with label {label!r}"
        return self._one(self._asking(request, timeout_s), what, group)

    def unfinished(self, client: str, timeout_s: float, *, group: GroupName | None = None) -> list[Known]:
        """A client's open transactions in all groups, oldest first.

        Raises:
            CoordinatorUnavailable, ZooKeeperUnavailable: somebody who might know did not answer in time.
        """
        ask = self._asking(self._request(owner=client), timeout_s)
        found, faults = self._ask(ask, self.groups(group), first=False)
        for fault in faults:
            raise fault
        return sorted(found, key=lambda item: (item[1].decided_ms, item[1].id))

    def _one(self, ask: Ask, what: str, group: GroupName | None) -> Known:
        found, faults = self._ask(ask, self.groups(group), first=True)
        if found:
            return max(found, key=lambda item: item[1].decided_ms)
        for kind in (UnavailableError, UnknownWriteError, TransactionPreserverClosed, OutcomeExpired):
            for fault in faults:
                if isinstance(fault, kind):
                    raise fault
        for fault in faults:
            if not isinstance(fault, NotFoundError):
                raise fault
        raise TransactionNotFound(f"{what} is not open in any transaction group, and it has no outcome there")

    def _ask(self, ask: Ask, groups: Sequence[GroupName], *, first: bool) -> tuple[list[Known], list[RollbridgeError]]:
        """What the leaders of the groups know, and why some of them say nothing.

        ``first`` asks no further once one of them has found something.
        """
        found: list[Known] = []
        faults: list[RollbridgeError] = []
        pool = ThreadPoolExecutor(min(_ASKED_AT_ONCE, max(len(groups), 1)), "rollbridge-inquiry")
        try:
            for answered in as_completed([pool.submit(ask, item) for item in groups]):
                try:
                    found += answered.result()
                except RollbridgeError as fault:
                    faults.append(fault)
                if found and first:
                    break
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        denied = [fault for fault in faults if isinstance(fault, ZooKeeperDenied)]
        if len(denied) < len(groups):  # groups of others hold nothing of ours
            faults = [fault for fault in faults if fault not in denied]
        return found, faults

    def _asking(self, request: Request, timeout_s: float) -> Ask:
        """What puts a request to one group."""

        def ask(group: GroupName) -> list[Known]:
            answer = self._metadata.ask(group, request, timeout_s)
            if not answer.ok:
                raise refusal(answer, request.transaction)
            return [(group, of_client(item, request.owner)) for item in answer.transactions]

        return ask

    def _request(self, *, owner: str, transaction: str = "", label: str | None = None) -> Request:
        return Request(
            kind=RequestKind.LOOK_UP,
            transaction=transaction,
            owner=owner,
            label=label,
            client_name=self._client_name,
            created_ms=int(time.time() * 1000),
        )


def of_client(known: KnownTransaction, client: str) -> KnownTransaction:
    """Return what is known, if it is about a transaction of this client, or if no client is given.

    An id that was given out twice, because ZooKeeper was set back, names transactions of two clients.

    Raises:
        OutcomeExpired: it is another one's; that nothing was ever known of this client's cannot be said.
    """
    if client and known.client_name != client:
        raise OutcomeExpired(
            f"transaction {known.id} is one of client {known.client_name!r}; nothing is known of one of {client!r} "
            "that had this id, and nothing was changed"
        )
    return known


def outcome_of(known: Known) -> Outcome:
    """The public form of what is known."""
    return Outcome(**_public(*known))


def _story_of(group: GroupName, item: KnownTransaction, story: Story) -> TransactionStory:
    return TransactionStory(
        **_public(group, item),
        events=story.events,
        events_since_ms=story.serves_since_ms,
        controller_epoch=story.controller_epoch,
    )


def _public(group: GroupName, item: KnownTransaction) -> dict[str, Any]:
    return {
        "transaction": item.id,
        "group": group,
        "state": item.state,
        "client_name": item.client_name,
        "label": item.label,
        "position": None if item.position < 0 else item.position,
        "records": item.records,
        "since_ms": item.decided_ms,
        "reason": item.reason,
    }
