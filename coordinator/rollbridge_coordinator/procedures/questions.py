"""Questions: what became of a transaction, which ones of a client are open, and fences for sessions that are over.

An answer is worth something only if it covers everything that was in the buffers when the question was put, so it
waits until all that has been folded. A transaction whose end is decided is answered once its outcome is durable.

Source: PIP-255 (an end that is asked for again gets the same answer); Kafka's ``InitProducerId``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rollbridge.errors import (
    InvalidRequestError,
    OutcomeExpired,
    RollbridgeError,
    TransactionNotFound,
    TransactionPreserverClosed,
)
from rollbridge.model import paths
from rollbridge.model.buffered import BufferedTransaction
from rollbridge.model.frames import PieceKey
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.known import KnownTransaction
from rollbridge.model.nodes import CreateNode, DeleteNode
from rollbridge.model.requests import Answer, Request, RequestKind, Story
from rollbridge.model.terminated import Terminated
from rollbridge.model.transaction import State
from rollbridge_coordinator.state.group import GroupState, Question
from rollbridge_coordinator.state.preserver import Absence, TransactionMetadataPreserver
from rollbridge_coordinator.state.steps import Steps, end_offsets, write

OPEN_SHOWN_MAX: Final = 500
"""Most open transactions in one answer, the oldest ones: a ZooKeeper node holds 1 MiB."""
ANSWER_BYTES_MAX: Final = 900_000


def put_question(group: GroupState, name: str, request: Request) -> Steps[None]:
    """Take a question; it is answered by :func:`answer_questions`."""
    ends = yield from end_offsets(sorted(group.partitions()))
    group.questions[name] = Question(request, ends)


def answer_questions(group: GroupState, now_ms: int) -> Steps[None]:
    """Answer what can be answered by now."""
    present = group.partitions()
    for name, question in list(group.questions.items()):
        if not group.is_folded({item: end for item, end in question.barrier.items() if item in present}):
            continue
        try:
            found = _answer(group, question.request)
        except RollbridgeError as refusal:
            answer = Answer(ok=False, answered_ms=now_ms, code=refusal.code, message=str(refusal))
        else:
            if found is None:
                continue
            answer = Answer(ok=True, answered_ms=now_ms, transactions=found)
        raw = answer.to_json()
        if len(raw) > ANSWER_BYTES_MAX:
            why = (
                f"the answer of {len(raw)} bytes does not fit into a ZooKeeper node; what was asked about is as it was"
            )
            raw = Answer(ok=False, answered_ms=now_ms, code=InvalidRequestError.code, message=why).to_json()
        del group.questions[name]
        yield from write(
            DeleteNode(f"{paths.requests(group.name)}/{name}"),
            CreateNode(f"{paths.answers(group.name)}/{name}", raw),
        )


def describe(group: GroupState, request: Request, now_ms: int) -> Answer:
    """Return what is known of a transaction at this moment, with its last events; what is under way is not waited for.

    Raises:
        TransactionNotFound, OutcomeExpired, TransactionPreserverClosed: it is not open, and nothing is known of it.
    """
    identifier = TransactionId.parse(request.transaction)
    events = group.fold.chronicle.story(identifier.bytes)
    item = group.fold.open.get(identifier.bytes)
    if item is not None:
        waits = item.reason or _waits(group, item)
        found = replace(_opened(item), state=item.state, reason=waits, streams={}, pieces={})
    else:
        try:
            known = _look_up(group, identifier, request.owner)
        except RollbridgeError:
            if not events:
                raise
            # Nobody remembers it, but frames of it were seen, or its end.
            last = events[-1]
            known = (KnownTransaction(id=identifier, state=last.after, client_name="", decided_ms=last.at_ms),)
        assert known is not None  # one that is not open is not waited for
        found = known[0]
    story = Story(events, group.serves_since_ms, group.controller_epoch)
    return Answer(ok=True, answered_ms=now_ms, transactions=(found,), story=story)


def _waits(group: GroupState, item: BufferedTransaction) -> str:
    """What an open transaction waits for, beside its owner; empty if for nothing."""
    stream = group.waits_for(item)
    if stream is not None:
        return f"waits for stream {stream}, which is in an error state"
    if item.state is State.COMMITTING and item.id not in group.fold.decided:
        return "waits for earlier commits of its connection"
    if item.id in group.barriers:
        return "its lease is over; the buffers are read to their ends"
    return ""


def _answer(group: GroupState, request: Request) -> tuple[KnownTransaction, ...] | None:
    """The answer; None while it has to wait."""
    if request.kind is RequestKind.FENCE:
        return _fence(group, request)
    if request.transaction:
        return _look_up(group, TransactionId.parse(request.transaction), request.owner)
    mine = [item for item in group.fold.open.values() if item.begin.client_name == request.owner]
    if request.label is not None:
        return _look_up_label(group, [item for item in mine if item.begin.label == request.label], request)
    if any(item.state is not State.OPEN for item in mine):
        return None
    # Who goes on with one of them asks for it by its id, and is then told everything.
    return tuple(replace(_opened(item), streams={}, pieces={}) for item in mine[:OPEN_SHOWN_MAX])


def _fence(group: GroupState, request: Request) -> tuple[KnownTransaction, ...] | None:
    """Hear no older session any more; what these had asked for before is carried out first."""
    group.fold.fences.raise_to(request.owner, request.owner_epoch)
    ended = (*group.fold.decided.values(), *group.fold.lines.held())
    waiting = any(item.begin.client_name == request.owner for item in ended)
    return None if waiting else ()


def _look_up(group: GroupState, transaction: TransactionId, owner: str) -> tuple[KnownTransaction, ...] | None:
    item = group.fold.open.get(transaction.bytes)
    if item is not None:
        return (_opened(item),) if item.state is State.OPEN else None
    found = _preserver(group).find(transaction, owner)
    if isinstance(found, Absence):
        raise _absent(found, f"transaction {transaction}", group)
    return (_terminated(*found),)


def _look_up_label(
    group: GroupState, unfinished: list[BufferedTransaction], request: Request
) -> tuple[KnownTransaction, ...] | None:
    """The client's latest transaction with a label: an open one, else the one that ended last."""
    if unfinished:
        latest = unfinished[-1]
        return (_opened(latest),) if latest.state is State.OPEN else None
    assert request.label is not None
    found = _preserver(group).labelled(request.owner, request.label)
    if isinstance(found, Absence):
        raise _absent(found, f"a transaction of client {request.owner} with label {request.label!r}", group)
    return (_terminated(request.owner, found),)


def _preserver(group: GroupState) -> TransactionMetadataPreserver:
    if group.preserver is None:
        raise TransactionPreserverClosed(
            f"group {group.name} does not remember terminated transactions (transaction_meta_persist_count is 0), and "
            "no open one fits; the commit log may tell: `rollbridge consume --transactions`"
        )
    return group.preserver


def _absent(absence: Absence, what: str, group: GroupState) -> RollbridgeError:
    if absence is Absence.FORGOTTEN:
        return OutcomeExpired(
            f"{what} is not open in group {group.name}; if it ever was, its outcome is past its retention and has been "
            "forgotten"
        )
    return TransactionNotFound(f"{what} is not open in group {group.name}, and it has no outcome there")


def _opened(item: BufferedTransaction) -> KnownTransaction:
    pieces: dict[PieceKey, int] = {}
    for frame in item.frames:
        if frame.piece.part in item.owners.parts:
            pieces[frame.piece] = pieces.get(frame.piece, 0) + frame.records
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
