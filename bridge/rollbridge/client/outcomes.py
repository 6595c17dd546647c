"""Outcomes: one thread tails the commit logs of the groups in use and settles the transactions that wait for them.

Records of foreign transactions are recognised by their key and never decoded; without waiters, no record is read in
detail. A log is read from its end before the first transaction of its group began here. If it is truncated before it
was read, because this process stalled for longer than the log is kept, the leader is asked for missing outcomes.

:class:`OutcomeClient` asks leaders about transactions. An id does not tell the group of its transaction, so without a
group all leaders are asked at once. One that knows the transaction settles the matter; "not found" is certain only when
all have answered. A group without a leader delays no other group's answer: it is named in addition.

Tour of a commit, stop 8 of 8: see docs/tour.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from rollbridge.base.deadlines import Deadline, answers_within, patience_s, wall_ms
from rollbridge.base.forks import hold, refusal
from rollbridge.base.ids import TransactionId
from rollbridge.base.logs import limited, log_defect
from rollbridge.base.metrics import CommitAsked, TransactionCounts
from rollbridge.buffer.savepoints import HeldSavepoint
from rollbridge.buffer.table import Arrived, KnownTransaction, State, TransactionEvent
from rollbridge.client.futures import Completion
from rollbridge.client.results import Savepoint
from rollbridge.commitlog.control import ControlKind, peek_kind
from rollbridge.errors import (
    CorruptDataError,
    InvalidRequestError,
    KafkaUnavailableError,
    NotFoundError,
    OutcomeExpiredError,
    RollbridgeError,
    TransactionClosedError,
    TransactionNotFoundError,
    TransactionPreserverClosedError,
    UnavailableError,
    UnknownWriteError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.fetch_plan import Fetched, FetchError
from rollbridge.kafka.metadata import Isolation
from rollbridge.metadata.errors import ZooKeeperDeniedError
from rollbridge.metadata.records import SAVEPOINTS
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.metadata.requests import refusal as admin_refusal
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName

logger = limited(logging.getLogger(__name__))

_POLL_S: Final = 60.0
_RETRY_S: Final = 0.1
_END_S: Final = 2.0


class OutcomeTail:
    """Tail of the commit logs, and the transactions that wait for an outcome. Safe to use from several threads.

    Attributes:
        waiting: Transactions that began here, or are written here, and whose end is not known.
        missed: Those of them, by group, whose outcome may never come from the log: the leader is asked.
    """

    def __init__(
        self,
        kafka: KafkaClient,
        *,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Follow nothing yet; ``changed`` is called when something was missed."""
        self.waiting: dict[bytes, Completion] = {}
        self.missed: dict[GroupName, dict[bytes, Completion]] = {}
        self._changed = changed
        self._follower = kafka.follow(Isolation.READ_COMMITTED, name="rollbridge-outcomes-errand", check_epochs=True)
        self._offsets = kafka.offsets
        self._followed: set[GroupName] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        hold(self, "_follower", "_offsets", "_lock", then=_leave_all)

    def completion(self, transaction: TransactionId, epoch: int = 0) -> Completion:
        """Return the completion of a transaction, for a writer of a part of it here, in a session of this epoch."""
        return self.waiting.setdefault(transaction.bytes, Completion(transaction.bytes, epoch=epoch))

    def follow(self, group: GroupName, timeout_s: float) -> None:
        """Tail the commit log of a group from its present end on.

        Raises:
            KafkaUnavailableError: the log could not be found in time.
        """
        if group in self._followed:
            return
        with self._lock:
            if group in self._followed:
                return
            self._follower.follow((group.commit_log_topic, 0), self._end_of(group, patience_s(timeout_s)))
            self._followed.add(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._tail, name="rollbridge-outcomes", daemon=True)
                self._thread.start()

    def strand(self, group: GroupName, completion: Completion, why: str) -> None:
        """Have the leader asked about a transaction whose commit it cannot read; ends as aborted if it knows none."""
        completion.stranded = why
        self.doubt(group, completion)

    def doubt(self, group: GroupName, completion: Completion) -> None:
        """Have the leader asked about a transaction; what it does not decide any more is unknown."""
        self.missed.setdefault(group, {})[completion.key] = completion
        self._changed()

    def close(self) -> None:
        """Stop the thread; waiters are told that the outcome will not be learned here."""
        self._follower.stop()
        if self._thread is None:
            self._follower.close()
        else:
            self._thread.join(_END_S)  # waits for no broker, unless one has stopped within an answer
        for completion in list(self.waiting.values()):
            completion.give_up("this client was closed; ask with another one")
        self.waiting.clear()

    def _end_of(self, group: GroupName, timeout_s: float) -> int:
        deadline = Deadline(timeout_s)
        topic = group.commit_log_topic
        while True:
            try:
                return self._offsets.end([topic], Isolation.READ_UNCOMMITTED)[topic]
            except (NotFoundError, KafkaUnavailableError) as fault:
                if deadline.passed():
                    raise KafkaUnavailableError(
                        f"the commit log {topic} could not be read within {timeout_s:g} s: {fault}; nothing was written"
                    ) from fault
                time.sleep(_RETRY_S)

    def _tail(self) -> None:
        with closing(self._follower) as follower:
            while not follower.stopped:
                try:
                    for found in follower.poll(_POLL_S):
                        if isinstance(found, Fetched):
                            self._settle(found)
                        else:
                            self._judge(found)
                except Exception:  # all waiters for an outcome depend on this thread
                    log_defect(logger, "outcomes.tail_failed: retrying")
                    time.sleep(_RETRY_S)

    def _settle(self, fetched: Fetched) -> None:
        waiting = self.waiting
        if not waiting:
            return  # transactions are registered before their outcome can exist
        committed: list[CommitAsked | None] = []
        counts: TransactionCounts | None = None
        try:
            for offset, _, key, value, _ in fetched.records():
                completion = waiting.get(key or b"")
                if completion is None or value is None or peek_kind(value) is ControlKind.BEGIN:
                    continue
                if completion.is_of_another(value):
                    logger.warning("outcome.foreign txn=%s: it belongs to another client", completion.transaction)
                    continue
                waiting.pop(completion.key, None)  # a newer session may have replaced it meanwhile
                completion.settle(value, offset)
                if completion.counts is None:
                    continue
                if peek_kind(value) is ControlKind.COMMIT:
                    counts, completion.counts = completion.counts, None
                    committed.append(completion.asked)
                else:
                    completion.count_unfinished()
        except CorruptDataError as fault:
            logger.warning("outcomes.skipped topic=%s before=%d: %s", fetched.partition[0], fetched.end, fault)
        if counts is not None:
            counts.note_commits(committed, time.monotonic())

    def _judge(self, trouble: FetchError) -> None:
        """Resume where the log still has records; log any other fault, which is retried until it is gone."""
        (topic, _), offset, fault, resume = trouble
        if resume is None:
            logger.warning("outcomes.unavailable topic=%s: %s", topic, fault)
            return
        logger.warning(
            "outcomes.missed topic=%s offset=%d resume=%d: asking the leader for them: %s",
            topic,
            offset,
            resume,
            fault,
        )
        for group in [item for item in self._followed if item.commit_log_topic == topic]:
            self.missed[group] = {item.key: item for item in list(self.waiting.values()) if item.group == group}
        self._follower.follow(trouble.partition, resume)
        self._changed()


def _leave_all(tail: OutcomeTail) -> None:
    for completion in list(tail.waiting.values()):
        completion.leave(str(refusal()))


# Inquiries


_ASKED_AT_ONCE: Final = 16

Known = tuple[GroupName, KnownTransaction]
Ask = Callable[[GroupName], list[Known]]
"""Puts a question to one group."""


IsLast = Callable[[Known], bool]
"""Return True if nothing that another group knows could change the answer."""


def _is_any(known: Known) -> bool:
    return True


def _is_open(known: Known) -> bool:
    return known[1].state is State.OPEN


_EXPLAIN_S: Final = 0.3
"""Seconds that ZooKeeper may take to explain a fault when the time of a call is already over."""
_LOOK_AGAIN_S: Final = 0.05


class Explained(NamedTuple):
    """Why a transaction has no outcome yet.

    Attributes:
        why: Who does not answer, or what its leader waits for, in half a sentence; empty if for nothing.
        events: Its last events that its leader saw, one line each.
        is_read: True if the leader has read that its end was asked for.
    """

    why: str
    events: Sequence[str] = ()
    is_read: bool = False


def over(transaction: TransactionId) -> TransactionClosedError:
    """Return the error of an extension that comes too late."""
    return TransactionClosedError(
        f"transaction {transaction} has ended, so its lease cannot be extended; nothing was changed",
        transaction=str(transaction),
    )


class OutcomeClient:
    """Client that asks leaders about transactions. Safe to use from several threads."""

    def __init__(self, metadata: Metadata, client_name: str) -> None:
        self._metadata = metadata
        self._client_name = client_name
        self._knows_savepoints = False

    def groups(self, group: GroupName | None) -> list[GroupName]:
        """Return the group, or all of them.

        Raises:
            NotFoundError: there is no such group, or no coordinator has ever served the ZooKeeper path.
        """
        known = self._metadata.groups()
        if not known:
            self._metadata.require_layout()
        if group is not None and group not in known:
            raise NotFoundError(f"there is no transaction group {group}: no stream was ever created in it")
        return known if group is None else [group]

    def transaction(
        self, identifier: TransactionId, timeout_s: float, *, group: GroupName | None = None, client: str | None = None
    ) -> Known:
        """Return what is known of a transaction.

        Raises:
            TransactionNotFoundError: not open, and without an outcome.
            OutcomeExpiredError, TransactionPreserverClosedError: its outcome is not remembered, or it is not of the
                ``client`` given.
            CoordinatorUnavailableError, ZooKeeperUnavailableError: a leader who might know did not answer in time.
        """
        request = self._request(transaction=str(identifier), owner=client or "")
        return self._one(self._asking(request, timeout_s), f"transaction {identifier}", group)

    def standing(self, identifier: TransactionId, timeout_s: float, group: GroupName) -> Known:
        """Return what is known of a transaction at this moment, also of one whose end is under way.

        Raises as :meth:`transaction` does. Of one whose outcome is not remembered the client may have no name.
        """
        request = self._request(transaction=str(identifier), kind=RequestKind.DESCRIBE)
        return self._one(self._asking(request, timeout_s), f"transaction {identifier}", group)

    def arrived(
        self, identifier: TransactionId, timeout_s: float
    ) -> tuple[Known, Arrived | None, HeldSavepoint | None]:
        """Return what is known of a transaction, what has arrived of it (None if it is not open), its last savepoint.

        Raises:
            InvalidRequestError: a leader of an older version, which does not tell; nothing was changed.

        Raises also what :meth:`transaction` does.
        """
        (where, known), answer = self._looked_up(identifier, timeout_s, None, "")
        if known.state is State.OPEN and answer.arrived is None:
            raise InvalidRequestError(
                f"the leader of group {where} is of an older version, which does not tell what has arrived of "
                f"{identifier}; nothing was changed: update all coordinators first"
            )
        return (where, known), answer.arrived, None if answer.savepoint is None else answer.savepoint.held()

    def with_savepoint(
        self, identifier: TransactionId, timeout_s: float, *, group: GroupName | None = None, client: str | None = None
    ) -> tuple[Known, HeldSavepoint | None]:
        """Return what is known of a transaction, and the last savepoint of one that is open; None without any.

        Raises as :meth:`transaction` does, and CorruptDataError if the savepoint cannot be read.
        """
        known, answer = self._looked_up(identifier, timeout_s, group, client or "")
        return known, None if answer.savepoint is None else answer.savepoint.held()

    def _looked_up(
        self, identifier: TransactionId, timeout_s: float, group: GroupName | None, client: str
    ) -> tuple[Known, AdminAnswer]:
        request = self._request(transaction=str(identifier), owner=client)
        answers: dict[GroupName, AdminAnswer] = {}
        where, known = self._one(self._asking(request, timeout_s, answers), f"transaction {identifier}", group)
        return (where, known), answers[where]

    def lease_end(self, group: GroupName, transaction: TransactionId, timeout_s: float) -> datetime:
        """Return when the lease of a transaction ends, with all that was written before.

        Raises:
            TransactionClosedError: it has ended.
            UnavailableError: no answer in time.
        """
        try:
            _, known = self.transaction(transaction, timeout_s, group=group)
        except (NotFoundError, TransactionPreserverClosedError):
            raise over(transaction) from None  # it is not open, and its outcome is no longer remembered
        if known.state is not State.OPEN:
            raise over(transaction)
        return datetime.fromtimestamp((known.decided_ms + known.lease_ms) / 1000, UTC)

    def claim_part(self, group: GroupName, transaction: TransactionId, timeout_s: float) -> int:
        """Return an unused part number, with which the owner of a transaction continues.

        Raises:
            UnavailableError: no answer in time.
        """
        self.await_record(transaction, Deadline(timeout_s))
        return self._metadata.claim_part(group, transaction)

    def check_savepoints(self) -> None:
        """Check once that all coordinators know savepoints.

        Raises:
            InvalidRequestError: one does not; nothing was written.
            UnavailableError: no answer.
        """
        if self._knows_savepoints:
            return
        lacking = self._metadata.lacking(SAVEPOINTS)
        if lacking is not None:
            raise InvalidRequestError(
                f"coordinator {lacking}, does not know savepoints; nothing was written: upgrade all coordinators first"
            )
        self._knows_savepoints = True

    def await_record(self, identifier: TransactionId, deadline: Deadline) -> None:
        """Wait until the transaction is on record, or has ended.

        Other nodes of the transaction are removed with its record, so the record must exist before a part is claimed.
        """
        while self._metadata.find_transaction(identifier) is None and not deadline.passed():
            _, known = self.transaction(identifier, deadline.left())
            if known.state is not State.OPEN:
                return
            time.sleep(_LOOK_AGAIN_S)

    def explain(self, group: GroupName, transaction: TransactionId) -> Explained:
        """Return why a transaction has no outcome yet; bounded by ``_EXPLAIN_S``."""
        if not self._metadata.session.is_connected:
            return Explained("ZooKeeper cannot be reached either")
        try:
            with answers_within(_EXPLAIN_S):
                lead = self._metadata.lead(group)
                if lead is None or not lead.is_serving:
                    return Explained(self._metadata.who_leads(group))
        except RollbridgeError as fault:
            return Explained(str(fault))
        try:
            with answers_within(_EXPLAIN_S):
                story = self.story(transaction, _EXPLAIN_S, group=group)
        except (UnavailableError, UnknownWriteError):
            return Explained(lead.silence(group))
        except RollbridgeError as fault:  # its leader has read nothing of it, or does not remember
            logger.debug("outcome.unknown txn=%s: %s", transaction, fault)
            return Explained("")
        waits = story.reason if story.state in ("open", "committing") else ""
        events = [event.line() for event in story.events]
        return Explained(f"its leader says: {waits}" if waits else "", events, is_read=story.state != "open")

    def story(self, identifier: TransactionId, timeout_s: float, *, group: GroupName | None = None) -> TransactionStory:
        """Return what the leader of a transaction knows of it at this moment, with its last events.

        Raises:
            TransactionNotFoundError, OutcomeExpiredError, TransactionPreserverClosedError: nothing is known of it.
            CoordinatorUnavailableError, ZooKeeperUnavailableError: a leader who might know did not answer in time.
            CorruptDataError: a leader of an older version, which does not report events.
        """
        request = self._request(transaction=str(identifier), kind=RequestKind.DESCRIBE)
        answers: dict[GroupName, AdminAnswer] = {}
        asking = self._asking(request, timeout_s, answers)

        def ask(where: GroupName) -> list[Known]:
            found = asking(where)
            if answers[where].story is None or not found:
                raise CorruptDataError(f"the leader of group {where} does not tell what happened to {identifier}")
            return found

        where, known = self._one(ask, f"transaction {identifier}", group)
        story = answers[where].story
        assert story is not None
        return TransactionStory(
            **public_fields(where, known),
            events=tuple(event._replace(transaction=known.id.bytes) for event in story.events),
            events_since_ms=story.serves_since_ms,
            controller_epoch=story.controller_epoch,
        )

    def labelled(
        self, label: str, client: str, timeout_s: float, *, group: GroupName | None = None
    ) -> tuple[Known, dict[GroupName, RollbridgeError]]:
        """Return what is known of a client's latest transaction with a label, and the errors of groups without answer.

        If several groups know one, it is the open one, or the one that ended last. Raises as :meth:`transaction` does,
        if none knows one.
        """
        request = self._request(owner=client, label=label)
        what = f"a transaction of client {client} with label {label!r}"
        groups = self.groups(group)
        if group is None and len(groups) > 1:
            with suppress(ZooKeeperDeniedError):
                groups = self._metadata.groups_of(client, groups) or groups  # one that never registers has no sessions
        latest, silent = self._latest(self._asking(request, timeout_s), what, groups, _is_open)
        if silent:
            logger.warning("outcome.uncertain txn=%s: a later one may exist: %s", latest[1].id, named(silent))
        return latest, silent

    def unfinished(
        self, client: str, timeout_s: float, groups: Sequence[GroupName]
    ) -> tuple[list[Known], dict[GroupName, RollbridgeError]]:
        """Return a client's open transactions in some groups, oldest first, and the errors of groups without answer."""
        ask = self._asking(self._request(owner=client), timeout_s)
        found, faults = self._ask(ask, groups, lambda _: False)
        silent = silent_of(faults)
        for group, fault in faults.items():
            if group not in silent:
                raise fault
        return by_age(found), silent

    def _one(self, ask: Ask, what: str, group: GroupName | None, is_last: IsLast = _is_any) -> Known:
        return self._latest(ask, what, self.groups(group), is_last)[0]

    def _latest(
        self, ask: Ask, what: str, groups: Sequence[GroupName], is_last: IsLast
    ) -> tuple[Known, dict[GroupName, RollbridgeError]]:
        """Return what was ended last, or is open, and the errors of the groups that did not answer."""
        found, by_group = self._ask(ask, groups, is_last)
        faults = by_group.values()
        if found:
            latest = max(found, key=lambda item: (_is_open(item), item[1].decided_ms))
            return latest, {} if any(map(is_last, found)) else silent_of(by_group)
        for kind in (UnavailableError, UnknownWriteError, TransactionPreserverClosedError, OutcomeExpiredError):
            for fault in faults:
                if isinstance(fault, kind):
                    raise fault
        for fault in faults:
            if not isinstance(fault, NotFoundError):
                raise fault
        raise TransactionNotFoundError(f"{what} is not open in any transaction group, and it has no outcome there")

    def _ask(
        self, ask: Ask, groups: Sequence[GroupName], is_last: IsLast
    ) -> tuple[list[Known], dict[GroupName, RollbridgeError]]:
        """Return what the leaders of the groups know, and the errors of the others.

        Waiting ends once something is found that ``is_last``.
        """
        found: list[Known] = []
        faults: dict[GroupName, RollbridgeError] = {}
        if len(groups) == 1:  # needs no thread
            try:
                return ask(groups[0]), {}
            except RollbridgeError as fault:
                return [], {groups[0]: fault}
        pool = ThreadPoolExecutor(min(_ASKED_AT_ONCE, max(len(groups), 1)), "rollbridge-inquiry")
        try:
            asked = {pool.submit(ask, item): item for item in groups}
            for answered in as_completed(asked):
                try:
                    found += answered.result()
                except RollbridgeError as fault:
                    faults[asked[answered]] = fault
                if any(map(is_last, found)):
                    break
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        allowed = {item: fault for item, fault in faults.items() if not isinstance(fault, ZooKeeperDeniedError)}
        if len(faults) - len(allowed) < len(groups):  # groups of others hold nothing of ours
            return found, allowed
        return found, faults

    def _asking(
        self, request: AdminRequest, timeout_s: float, answers: dict[GroupName, AdminAnswer] | None = None
    ) -> Ask:
        """Return a function that puts a request to one group, and keeps the answer where that is wanted."""

        def ask(group: GroupName) -> list[Known]:
            answer = self._metadata.ask(group, request, timeout_s)
            if answers is not None:
                answers[group] = answer
            if not answer.ok:
                raise admin_refusal(answer, request.transaction)
            return [(group, of_client(item, request.owner)) for item in answer.transactions]

        return ask

    def _request(
        self,
        *,
        transaction: str = "",
        owner: str = "",
        label: str | None = None,
        kind: RequestKind = RequestKind.LOOK_UP,
    ) -> AdminRequest:
        return AdminRequest(
            kind=kind,
            transaction=transaction,
            owner=owner,
            label=label,
            client_name=self._client_name,
            created_ms=wall_ms(),
        )


def silent_of(faults: Mapping[GroupName, RollbridgeError]) -> dict[GroupName, RollbridgeError]:
    """Return the errors of groups that did not answer in time."""
    return {item: fault for item, fault in faults.items() if isinstance(fault, UnavailableError | UnknownWriteError)}


def named(unanswered: Mapping[GroupName, RollbridgeError]) -> str:
    """Return who did not answer, and why, for people."""
    return "; ".join(f"group {group} did not answer: {fault}" for group, fault in unanswered.items())


def by_age(found: Sequence[Known]) -> list[Known]:
    """Return transactions oldest first, if they are open, or in the order of their ends."""
    return sorted(found, key=lambda item: (item[1].decided_ms, item[1].id))


def of_client(known: KnownTransaction, client: str) -> KnownTransaction:
    """Return what is known if it is about a transaction of this client, or if no client is given.

    An id that was given out twice, because ZooKeeper was set back, names transactions of two clients.

    Raises:
        OutcomeExpiredError: it is another client's; whether anything was ever known of this client's cannot be said.
    """
    if client and known.client_name != client:
        raise OutcomeExpiredError(
            f"transaction {known.id} is one of client {known.client_name!r}; nothing is known of one of {client!r} "
            "that had this id, and nothing was changed"
        )
    return known


def outcome_of(known: Known, unanswered: Mapping[GroupName, RollbridgeError] | None = None) -> Outcome:
    """Return the public form of what is known, and of who did not answer."""
    return Outcome(**public_fields(*known), unanswered=unanswered or {})


def public_fields(group: GroupName, item: KnownTransaction) -> dict[str, Any]:
    """Return the fields of an outcome."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Known outcome of a transaction: that it is open, or how and where it ended.

    Attributes:
        transaction: Its id.
        group: Its transaction group.
        state: ``"open"``, ``"committed"`` or ``"aborted"``; the last two are final.
        client_name: Client that began it.
        label: Label given at its begin.
        position: Offset of its record on the commit log of the group; None while it is open. That of a commit is its
            place in the commit order.
        records: Number of records that became visible; of an open one, of those that have arrived so far.
        since_ms: Time of its end, or of its begin if it is open, ms since 1970.
        reason: Cause of an abort; of a commit, the part as which its owner had resumed it; empty otherwise.
        unanswered: Of the latest transaction with a label: groups whose leaders did not answer, where there may be a
            later one; with the error of each.
    """

    transaction: TransactionId
    group: GroupName
    state: State
    client_name: str
    label: str | None
    position: int | None
    records: int
    since_ms: int
    reason: str
    unanswered: Mapping[GroupName, RollbridgeError] = field(default_factory=dict, compare=False)

    @property
    def committed(self) -> bool:
        """True if it is committed."""
        return self.state is State.COMMITTED

    @property
    def aborted(self) -> bool:
        """True if it is aborted."""
        return self.state is State.ABORTED


class OpenTransactions(list[Outcome]):
    """Open transactions of a client, oldest first.

    ``unanswered`` names groups whose leaders did not answer, where more may be open; with the error of each.
    """

    def __init__(self, found: Iterable[Outcome], unanswered: Mapping[GroupName, RollbridgeError]) -> None:
        super().__init__(found)
        self.unanswered: Final = unanswered


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionStory(Outcome):
    """Transaction as the leader of its group knows it at this moment, with its last events.

    ``state`` may also be ``"unknown"`` (only stray frames of it were seen), ``"committing"`` or ``"aborting"``;
    ``reason`` tells what an open or committing transaction waits for.

    Attributes:
        events: Its last events, oldest first: those that the leader has seen, in memory, since it took over.
        events_since_ms: Time of the leader's takeover, ms since 1970; earlier events are in its log or that of the
            leader before.
        controller_epoch: Controller epoch of that leader.
    """

    events: tuple[TransactionEvent, ...]
    events_since_ms: int
    controller_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedTransaction(Outcome):
    """Records that have arrived in the buffers of a transaction: what another client's commit makes visible.

    Attributes:
        bytes: Bytes of its frames in the buffers.
        streams: Records by stream, also of those that nothing was written to; empty if it has ended.
        lease_ends_ms: When its lease ends, ms since 1970; 0 if it has ended.
        obstacle: Why only its owner can commit it; empty if any client may.
        savepoint: Its last savepoint, if it has any: with the offsets of consumer groups and the conditions that are
            committed with it.
    """

    bytes: int
    streams: Mapping[str, int]
    lease_ends_ms: int
    obstacle: str = ""
    savepoint: Savepoint | None = None
