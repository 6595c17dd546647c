"""Admin requests: each is answered once, by the leader that carried it out or refused it.

Questions are requests too: the outcome of a transaction, the open transactions of a client, and fences for old
sessions. An answer must cover everything that was in the buffers when the question was asked, so it waits until all
that has been folded. A transaction whose end is decided is answered once its outcome is durable.

Source: PIP-255 (an end that is asked for again gets the same answer); Kafka's ``InitProducerId``.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import islice
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import REASON_CHARACTERS_MAX
from rollbridge.buffer.savepoints import StoredSavepoint
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import AbortCause, Arrived, KnownTransaction, State
from rollbridge.commitlog.outcomes import Terminated
from rollbridge.errors import (
    ConflictError,
    CoordinatorUnavailableError,
    InvalidRequestError,
    OutcomeExpiredError,
    RollbridgeError,
    StreamNotFoundError,
    TransactionCommittedError,
    TransactionNotFoundError,
    TransactionPreserverClosedError,
)
from rollbridge.metadata import paths
from rollbridge.metadata.records import CreateNode, DeleteNode
from rollbridge.metadata.requests import (
    CAUSE_CHARACTERS_MAX,
    NAMED_MAX,
    AdminAnswer,
    AdminRequest,
    RequestKind,
    Story,
    WaitRow,
    refusing,
)
from rollbridge.stream.config import StreamConfig
from rollbridge_coordinator.commit.outcome_store import Absence, OutcomeStore
from rollbridge_coordinator.commit.roll import end_linger
from rollbridge_coordinator.commit.waiting import waits_of, why_waits
from rollbridge_coordinator.core.effects import EffectRefusedError, EndOffsets, Write, read_children, read_node
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import LedStream
from rollbridge_coordinator.core.waits import LostRaceError, StaleStateError, WaitingRequest
from rollbridge_coordinator.history.commit_log import update_group
from rollbridge_coordinator.history.snapshots import clear_snapshots, write_snapshots
from rollbridge_coordinator.streams.create import create_stream, delete_again, delete_stream, delete_unled
from rollbridge_coordinator.streams.pending_changes import hold_request, is_due, take_out
from rollbridge_coordinator.streams.retention import truncate_stream, update_stream
from rollbridge_coordinator.streams.scale import scale

# Questions


OPEN_SHOWN_MAX: Final = 500
"""Most open transactions in one answer, the oldest first: a ZooKeeper node holds 1 MiB."""
WAITS_SHOWN_MAX: Final = 50
"""Most waits in one answer, for the same reason."""
ANSWER_BYTES_MAX: Final = 900_000
RACES_MAX: Final = 5
"""Times that a request is handled whose write never applies."""
AFTER_READING: Final = frozenset({RequestKind.DELETE_STREAM, RequestKind.RELEASE_TOPIC, RequestKind.ABORT_TRANSACTION})
"""Requests, no questions, that may depend on everything in the buffers."""


def put_question(group: GroupState, name: str, request: AdminRequest) -> Steps[None]:
    """Queue a question, or a request that depends on everything in the buffers; :func:`answer_questions` continues."""
    ends = yield from EndOffsets(sorted(group.partitions()))
    group.waits.questions[name] = WaitingRequest(request, ends)


def answer_questions(group: GroupState, now_ms: int) -> Steps[None]:
    """Answer the questions whose buffers have been folded and whose transactions have ended; carry out what waited."""
    for name, question in list(group.waits.questions.items()):
        if not group.is_folded(question.barrier):
            continue
        if question.request.kind in AFTER_READING:
            yield from end_linger(group)
            yield from _carry_out(group, name, question.request, now_ms)
            continue
        try:
            found = _answer_question(group, question.request)
        except RollbridgeError as refusal:
            answer = AdminAnswer(ok=False, answered_ms=now_ms, code=refusal.code, message=str(refusal))
        else:
            if found is None:
                continue
            asked = question.request
            answer = AdminAnswer(
                ok=True,
                answered_ms=now_ms,
                # With its epoch, a session is told that it is listed what the others have left open.
                epoch=asked.owner_epoch if asked.kind is RequestKind.FENCE else -1,
                transactions=found,
                arrived=_arrived(group, asked),
                savepoint=_savepoint(group, asked),
            )
        size = len(answer.to_json())
        if size > ANSWER_BYTES_MAX:
            why = f"the answer of {size} bytes does not fit into a ZooKeeper node; nothing was changed"
            answer = AdminAnswer(ok=False, answered_ms=now_ms, code=InvalidRequestError.code, message=why)
        del group.waits.questions[name]
        yield from _answer(group, name, answer, question.request.kind)


def describe(group: GroupState, request: AdminRequest, now_ms: int) -> AdminAnswer:
    """Return the state of a transaction, with its last events, or what a stream waits for; both as of now.

    Raises:
        TransactionNotFoundError, OutcomeExpiredError, TransactionPreserverClosedError: it is neither open nor known.
    """
    if request.stream:
        return AdminAnswer(ok=True, answered_ms=now_ms, waits=_waits_of(group, request.stream))
    identifier = TransactionId.parse(request.transaction)
    events = group.fold.chronicle.story(identifier.bytes)
    item = group.fold.open.get(identifier.bytes)
    if item is not None:
        waits = item.reason or waits_for(group, item)
        found = replace(_opened(item), state=item.state, reason=waits, streams={}, pieces={})
    else:
        try:
            known = _look_up(group, identifier, request.owner)
        except RollbridgeError:
            if not events:
                raise
            # The outcome is not remembered, but frames of the transaction, or its end, were seen in this term.
            last = events[-1]
            known = (KnownTransaction(id=identifier, state=last.after, client_name="", decided_ms=last.at_ms),)
        assert known is not None  # the look-up waits only for open transactions
        found = known[0]
    told = tuple(event._replace(cause=event.cause[:CAUSE_CHARACTERS_MAX]) for event in events)
    story = Story(told, group.serves_since_ms, group.controller_epoch)
    return AdminAnswer(ok=True, answered_ms=now_ms, transactions=(found,), story=story)


def _waits_of(group: GroupState, stream: str) -> tuple[WaitRow, ...]:
    """Return what concerns a stream of all that waits, the longest wait first; the first of it if that is much."""
    rows = (row for row in waits_of(group) if stream in row.streams)
    return tuple(
        row._replace(
            streams=row.streams[:NAMED_MAX],
            reasons=tuple(reason[:CAUSE_CHARACTERS_MAX] for reason in row.reasons[:NAMED_MAX]),
        )
        for row in islice(rows, WAITS_SHOWN_MAX)
    )


def waits_for(group: GroupState, item: BufferedTransaction) -> str:
    """Return the reason why an open transaction waits, apart from its owner; empty if it does not."""
    why = why_waits(group, item)
    if why is not None:
        return f"waits for {why}"
    if item.barrier is not None:
        return "its lease is over; the buffers are read to their ends"
    return ""


def _answer_question(group: GroupState, request: AdminRequest) -> tuple[KnownTransaction, ...] | None:
    """Return the answer; None while it has to wait."""
    if request.kind is RequestKind.FENCE:
        return _fence(group, request)
    if request.transaction:
        return _look_up(group, TransactionId.parse(request.transaction), request.owner)
    if request.label is not None:
        mine = [item for item in _begun_by(group, request.owner) if item.begin.label == request.label]
        return _look_up_label(group, mine, request)
    return _unfinished(group, request.owner)


def _begun_by(group: GroupState, client: str) -> list[BufferedTransaction]:
    return [item for item in group.fold.open.values() if item.begin.client_name == client]


def _unfinished(group: GroupState, client: str) -> tuple[KnownTransaction, ...] | None:
    mine = _begun_by(group, client)
    if any(item.state is not State.OPEN for item in mine):
        return None
    # A client that resumes one of them asks for it by its id, and gets streams and pieces then.
    return tuple(replace(_opened(item), streams={}, pieces={}) for item in mine[:OPEN_SHOWN_MAX])


def _fence(group: GroupState, request: AdminRequest) -> tuple[KnownTransaction, ...] | None:
    """Fence older sessions of a client, and return the transactions that they left open.

    The answer waits for ends that they requested before, also of transactions begun by others.
    """
    group.fold.fences.raise_to(request.owner, request.owner_epoch)
    ended = (*group.fold.decided.values(), *group.fold.lines.held())
    if any(item.ended_by[0] == request.owner for item in ended):
        return None
    return _unfinished(group, request.owner)


def _look_up(group: GroupState, transaction: TransactionId, owner: str) -> tuple[KnownTransaction, ...] | None:
    item = group.fold.open.get(transaction.bytes)
    if item is not None:
        return (_opened(item),) if item.state is State.OPEN else None
    found = _outcome_store(group).find(transaction, owner)
    if isinstance(found, Absence):
        ended = group.fold.ended
        if not owner and ended is not None and transaction.bytes in ended:
            found = Absence.FORGOTTEN  # no horizon tells, as where the memory was lost
        _check_all_read(group, f"transaction {transaction}", transaction.bytes)
        raise _absent(found, f"transaction {transaction}", group)
    return (_terminated(*found),)


def _look_up_label(
    group: GroupState, unfinished: list[BufferedTransaction], request: AdminRequest
) -> tuple[KnownTransaction, ...] | None:
    """Return the client's latest transaction with a label: an open one, else the one that ended last."""
    if unfinished:
        latest = unfinished[-1]
        return (_opened(latest),) if latest.state is State.OPEN else None
    assert request.label is not None
    found = _outcome_store(group).labelled(request.owner, request.label)
    if isinstance(found, Absence):
        what = f"a transaction of client {request.owner} with label {request.label!r}"
        _check_all_read(group, what)
        raise _absent(found, what, group)
    return (_terminated(request.owner, found),)


def _outcome_store(group: GroupState) -> OutcomeStore:
    if group.outcome_store is None:
        raise TransactionPreserverClosedError(
            f"group {group.name} does not remember terminated transactions (transaction_meta_persist_count is 0), and "
            "no open one fits; the commit log may tell: `rollbridge consume --transactions`"
        )
    return group.outcome_store


def _check_all_read(group: GroupState, what: str, identifier: bytes | None = None) -> None:
    """Raise CoordinatorUnavailableError if a transaction may be open in a buffer that cannot be read now."""
    ended = group.fold.ended
    if identifier is not None and ended is not None and identifier in ended:
        return
    name = next((name for name, item in group.unled.items() if not item.is_lost), None)
    fault = None if name is None else group.waits.faults.get(name)
    if fault is not None:
        raise CoordinatorUnavailableError(
            f"whether {what} is open in group {group.name}, or has been committed, cannot be told while stream {name} "
            f"is not led ({fault.code}: {fault.reason}); nothing was changed; repeat the request when that is repaired"
        )


def _absent(absence: Absence, what: str, group: GroupState) -> RollbridgeError:
    if absence is Absence.FORGOTTEN:
        return OutcomeExpiredError(
            f"{what} is not open in group {group.name}; if it ever was, its outcome is past its retention and has been "
            "forgotten"
        )
    return TransactionNotFoundError(f"{what} is not open in group {group.name}, and it has no outcome there")


def _opened(item: BufferedTransaction) -> KnownTransaction:
    pieces = item.arrived()
    return KnownTransaction(
        id=item.transaction_id,
        state=State.OPEN,
        client_name=item.begin.client_name,
        label=item.begin.label,
        records=sum(pieces.values()),
        decided_ms=item.begun_ms,
        lease_ms=item.begin.lease_ms,
        retain_ms=item.begin.retain_ms,
        streams=item.begin.streams,
        pieces=pieces,
    )


def _arrived(group: GroupState, request: AdminRequest) -> Arrived | None:
    """Return what has arrived of the open transaction that a request looks up by its id; otherwise None."""
    item = _looked_up(group, request)
    if item is None:
        return None
    left = item.arrived()
    size = others = 0
    for frame in item.frames:
        if frame.piece.part not in item.owners.parts:
            others += frame.records
        elif left.get(frame.piece, 0) >= frame.records:
            left[frame.piece] -= frame.records
            size += frame.size
    return Arrived(size, others)


def _savepoint(group: GroupState, request: AdminRequest) -> StoredSavepoint | None:
    item = _looked_up(group, request)
    return None if item is None or item.savepoint is None else StoredSavepoint.of(item.savepoint)


def _looked_up(group: GroupState, request: AdminRequest) -> BufferedTransaction | None:
    if request.kind is not RequestKind.LOOK_UP or not request.transaction:
        return None
    return group.fold.open.get(TransactionId.parse(request.transaction).bytes)


def _terminated(client: str, item: Terminated) -> KnownTransaction:
    return KnownTransaction(
        id=item.transaction,
        state=State.COMMITTED if item.committed else State.ABORTED,
        client_name=client,
        label=item.label,
        position=item.position,
        records=item.records,
        decided_ms=item.decided_ms,
        reason=item.reason,
    )


logger = logging.getLogger(__name__)


def handle_requests(group: GroupState, now_ms: int) -> Steps[bool]:
    """Handle the oldest waiting requests; return False when none are left."""
    names = yield from read_children(paths.requests(group.name))
    group.waits.keep_requests(names)
    waiting = {name for names_of in group.waits.answers.values() for name in names_of} | group.waits.questions.keys()
    waiting |= group.waits.held.keys() | group.waits.unanswered
    todo = sorted(name for name in names if name not in waiting)
    for name in todo[: group.settings.requests_per_turn]:
        raw = yield from read_node(f"{paths.requests(group.name)}/{name}")
        if raw is not None:
            yield from _handle(group, name, raw, now_ms)
    return len(todo) > group.settings.requests_per_turn


def retry_held(group: GroupState, now_ms: int) -> Steps[None]:
    """Try the scales again that wait for native transactions of others and are due."""
    due = [name for name, item in group.waits.held.items() if is_due(item, now_ms)]
    for name in due:
        raw = yield from read_node(f"{paths.requests(group.name)}/{name}")
        if raw is None:
            group.waits.held.pop(name, None)  # the client has withdrawn the request
        else:
            yield from _handle(group, name, raw, now_ms)


def answer_waiting(group: GroupState, now_ms: int) -> Steps[None]:
    """Answer the abort requests whose transactions have ended."""
    for transaction in [item for item in group.waits.answers if item not in group.fold.open]:
        for name in group.waits.answers.pop(transaction):
            yield from _answer(group, name, AdminAnswer(ok=True, answered_ms=now_ms), RequestKind.ABORT_TRANSACTION)


def _handle(group: GroupState, name: str, raw: bytes, now_ms: int) -> Steps[None]:
    try:
        request = AdminRequest.from_json(raw)
    except RollbridgeError as refusal:
        yield from _refuse(group, name, None, refusal.code, str(refusal), now_ms)
    else:
        yield from _carry_out(group, name, request, now_ms)


def _carry_out(group: GroupState, name: str, request: AdminRequest, now_ms: int) -> Steps[None]:
    kind = request.kind
    try:
        match kind:
            case RequestKind.CREATE_STREAM | RequestKind.ADOPT_TOPIC:
                yield from create_stream(group, name, request, now_ms)
            case RequestKind.SCALE_STREAM:
                yield from scale(group, _stream(group, request), name, request, now_ms)
            case RequestKind.DELETE_STREAM | RequestKind.RELEASE_TOPIC:
                yield from _delete(group, name, request, now_ms)
            case RequestKind.UPDATE_STREAM:
                yield from update_stream(group, _stream(group, request), name, request, now_ms)
            case RequestKind.UPDATE_GROUP:
                yield from update_group(group, name, request, now_ms)
            case RequestKind.TRUNCATE_STREAM:
                yield from _truncate(group, name, _stream(group, request), request, now_ms)
            case RequestKind.ABORT_TRANSACTION:
                yield from _abort(group, name, request, now_ms)
            case RequestKind.DESCRIBE:
                yield from _answer(group, name, describe(group, request, now_ms), request.kind)
            case RequestKind.LOOK_UP | RequestKind.FENCE:
                yield from put_question(group, name, request)
            case RequestKind.CLEAR_SNAPSHOTS:
                yield from _clear(group, name, _stream(group, request), now_ms)
            case RequestKind.REBUILD_SNAPSHOTS:
                yield from _rebuild(group, name, _stream(group, request), now_ms)
    except RollbridgeError as refusal:
        yield from _refuse(group, name, kind, refusal.code, str(refusal), now_ms)
    except EffectRefusedError as refused:
        yield from _refuse(group, name, kind, refused.code, refused.reason, now_ms)
    except LostRaceError as race:
        yield from _note_lost_race(group, name, kind, race, now_ms)


def _note_lost_race(group: GroupState, name: str, kind: RequestKind, race: LostRaceError, now_ms: int) -> Steps[None]:
    """Have the next turn handle a request again at once; refuse one that never gets anywhere."""
    waits = group.waits
    waits.lost_races[name] += 1
    if waits.lost_races[name] < RACES_MAX:
        waits.is_race_lost = True
        return
    why = f"{race}: what ZooKeeper has changed {RACES_MAX} times meanwhile, or contradicts it; repeat the request later"
    yield from _refuse(group, name, kind, CoordinatorUnavailableError.code, why, now_ms)


def _refuse(group: GroupState, name: str, kind: RequestKind | None, code: str, why: str, now_ms: int) -> Steps[None]:
    group.counts["requests_refused"] += 1
    yield from _answer(group, name, refusing(code, why, now_ms), kind)


def _delete(group: GroupState, name: str, request: AdminRequest, now_ms: int) -> Steps[None]:
    """Delete or release a stream, once the buffers are folded: transactions may have joined it."""
    is_read = group.waits.questions.pop(name, None) is not None
    doomed = group.doomed.get(request.stream)
    unled = group.unled.get(request.stream)
    if doomed is not None:
        yield from delete_again(group, name, doomed)
    elif unled is not None:
        config = unled.config
        _check_what_goes(config, request, is_on_topic=bool(config.topic) and not config.settings)
        yield from delete_unled(group, name, unled, now_ms)
    else:
        stream = _stream(group, request)
        _check_what_goes(stream.config, request, is_on_topic=stream.is_on_topic)
        if is_read:
            yield from delete_stream(group, name, stream, now_ms)
        else:
            yield from put_question(group, name, request)


def _check_what_goes(config: StreamConfig, request: AdminRequest, *, is_on_topic: bool) -> None:
    """Raise InvalidRequestError if a release would delete records, or a deletion only release a topic."""
    topic = config.topic
    if request.kind is RequestKind.RELEASE_TOPIC:
        if not topic or (request.topic and request.topic != topic):
            raise InvalidRequestError(
                f"stream {request.stream} has not adopted topic {request.topic}; nothing was done"
            )
        if not is_on_topic:
            raise InvalidRequestError(
                f"stream {request.stream} has left topic {topic} and has topics of its own, which a release would "
                "delete: delete the stream if they are not needed, and the topic is a plain one again; nothing was done"
            )
    elif is_on_topic:
        raise InvalidRequestError(
            f"stream {request.stream} consists of topic {topic}, which is not deleted with it: release the topic "
            f"(`rollbridge stream release {topic}`), and delete it with Kafka's tools if it is not needed; nothing "
            "was done"
        )


def _truncate(group: GroupState, name: str, stream: LedStream, request: AdminRequest, now_ms: int) -> Steps[None]:
    why = yield from hold_request(group, request.stream, abort_foreign=False)
    if why:
        raise ConflictError(
            f"stream {request.stream} cannot be truncated now: {why}; nothing was deleted; repeat the request later",
            code="stream-busy",
        )
    yield from truncate_stream(group, stream, name, request, now_ms)


def _abort(group: GroupState, name: str, request: AdminRequest, now_ms: int) -> Steps[None]:
    """Decide on abort; the answer waits for the round that logs it. One that has ended is answered by its outcome.

    A transaction whose commit was requested can still be aborted while it waits for something that may take long: its
    owner has no answer yet, and nothing of it is visible.
    """
    identifier = TransactionId.parse(request.transaction)
    is_read = group.waits.questions.pop(name, None) is not None
    if identifier.bytes not in group.fold.open:
        if not is_read:
            yield from put_question(group, name, request)  # it may just have begun
            return
        ended = _look_up_aborted(group, identifier)
        yield from _answer(group, name, AdminAnswer(ok=True, answered_ms=now_ms, transactions=ended), request.kind)
        return
    transaction = group.fold.open[identifier.bytes]
    waited = why_waits(group, transaction)
    if waited is not None:
        yield from take_out(group, transaction)
        why = f"{request.reason or 'admin'}; it waited for {waited}"
        group.fold.refuse(identifier.bytes, why[:REASON_CHARACTERS_MAX], now_ms, AbortCause.OPERATOR)
    elif not group.fold.request_abort(identifier.bytes, (request.reason or "admin")[:REASON_CHARACTERS_MAX], now_ms):
        group.waits.questions[name] = WaitingRequest(request, {})  # its outcome is the answer
        return
    group.waits.answers.setdefault(identifier.bytes, []).append(name)


def _look_up_aborted(group: GroupState, transaction: TransactionId) -> tuple[KnownTransaction, ...]:
    """Return the outcome of an aborted transaction.

    Raises:
        TransactionCommittedError: it is committed.
        TransactionNotFoundError, OutcomeExpiredError, TransactionPreserverClosedError: see :func:`_look_up`.
        CoordinatorUnavailableError: it may be in a buffer that cannot be read.
    """
    found = _look_up(group, transaction, "")
    assert found is not None  # the look-up waits only for open transactions
    if found[0].state is State.COMMITTED:
        raise TransactionCommittedError(
            f"transaction {transaction} is committed; it was not aborted",
            transaction=str(transaction),
            reason="committed",
            code="already-committed",
        )
    return found


def _clear(group: GroupState, name: str, stream: LedStream, now_ms: int) -> Steps[None]:
    """Delete a stream's snapshots and end the term: no leader keeps in memory what only snapshot segments held.

    Raises:
        StaleStateError: always; the next term reads the buffer again.
    """
    yield from clear_snapshots(group, stream.partitions())
    yield from _answer(group, name, AdminAnswer(ok=True, answered_ms=now_ms), RequestKind.CLEAR_SNAPSHOTS)
    raise StaleStateError(f"the snapshots of {stream.config.name} were deleted as requested; the buffer is read again")


def _rebuild(group: GroupState, name: str, stream: LedStream, now_ms: int) -> Steps[None]:
    """Rebuild a stream's snapshots: delete them, end the term, and answer when the buffer has been read again.

    Raises:
        StaleStateError: snapshots were deleted; the next term reads the buffer, and gets the request again.
    """
    partitions = list(stream.partitions())
    known = [group.snapshots.of(item, stream.config.buffer_topic_id) for item in partitions]
    if any(item.is_restored or item.generation for item in known):
        yield from clear_snapshots(group, partitions)
        raise StaleStateError(f"the snapshots of {stream.config.name} are rebuilt: the buffer is read again")
    yield from write_snapshots(group, partitions, now_ms)
    yield from _answer(group, name, AdminAnswer(ok=True, answered_ms=now_ms), RequestKind.REBUILD_SNAPSHOTS)


def _answer(group: GroupState, name: str, answer: AdminAnswer, kind: RequestKind | None) -> Steps[None]:
    """Answer a request; if ZooKeeper refuses the answer, remove the request without one.

    A request that was withdrawn, or whose removal is refused as well, is not handled again in this term.
    """
    group.metrics.note_answer(kind, ok=answer.ok)
    asked = DeleteNode(f"{paths.requests(group.name)}/{name}")
    for operations in ((asked, CreateNode(f"{paths.answers(group.name)}/{name}", answer.to_json())), (asked,)):
        try:
            if (yield from Write(operations)):
                return
        except EffectRefusedError as refused:
            logger.warning('request.refused group=%s request=%s reason="%s"', group.name, name, refused)
    group.waits.unanswered.add(name)


def _stream(group: GroupState, request: AdminRequest) -> LedStream:
    stream = group.streams.get(request.stream)
    if request.stream in group.doomed:
        raise StreamNotFoundError(f"stream {request.stream} is being deleted; nothing was written")
    if request.stream in group.unled:
        fault = group.waits.faults.get(request.stream)
        why = "" if fault is None else f", {fault.code}: {fault.reason}"
        raise ConflictError(f"stream {request.stream} is in an error state{why}; nothing was written")
    if stream is None:
        raise StreamNotFoundError(f"stream {request.stream} does not exist in group {group.name}; nothing was written")
    return stream
