"""Admin requests: each is answered once, by the leader that carried it out or refused it."""

from __future__ import annotations

import logging

from rollbridge.errors import InvalidRequestError, RollbridgeError, StreamBusy, StreamNotFound, TransactionNotFound
from rollbridge.model import paths
from rollbridge.model.frames import REASON_CHARACTERS_MAX
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.nodes import CreateNode, DeleteNode
from rollbridge.model.requests import Answer, Request, RequestKind, refusing
from rollbridge_coordinator.procedures.deletion import delete_again, delete_stream
from rollbridge_coordinator.procedures.foreign import is_due
from rollbridge_coordinator.procedures.questions import describe, put_question
from rollbridge_coordinator.procedures.retention import truncate_stream, update_stream
from rollbridge_coordinator.procedures.scale import scale
from rollbridge_coordinator.procedures.snapshots import clear_snapshots, write_snapshots
from rollbridge_coordinator.procedures.streams import create_stream
from rollbridge_coordinator.procedures.suspended import hold_request, take_out
from rollbridge_coordinator.state.effects import Refused
from rollbridge_coordinator.state.errors import StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.planning import why_waits
from rollbridge_coordinator.state.preserver import Absence
from rollbridge_coordinator.state.steps import Steps, read_children, read_node, write
from rollbridge_coordinator.state.streams import StreamState

logger = logging.getLogger(__name__)


def handle_requests(group: GroupState, now_ms: int) -> Steps[bool]:
    """Handle the oldest waiting requests; False when none are left."""
    names = yield from read_children(paths.requests(group.name))
    waiting = {name for names_of in group.answers.values() for name in names_of} | group.questions.keys()
    waiting |= group.held.keys() | group.unanswered
    group.unanswered.intersection_update(names)
    todo = sorted(name for name in names if name not in waiting)
    for name in todo[: group.settings.requests_per_turn]:
        raw = yield from read_node(f"{paths.requests(group.name)}/{name}")
        if raw is not None:
            yield from _handle(group, name, raw, now_ms)
    return len(todo) > group.settings.requests_per_turn


def retry_held(group: GroupState, now_ms: int) -> Steps[None]:
    """Look again at scales that wait for native transactions of others."""
    due = [name for name, item in group.held.items() if is_due(item, now_ms)]
    for name in due:
        raw = yield from read_node(f"{paths.requests(group.name)}/{name}")
        if raw is None:
            group.held.pop(name, None)  # its client has withdrawn it
        else:
            yield from _handle(group, name, raw, now_ms)


def answer_waiting(group: GroupState, now_ms: int) -> Steps[None]:
    """Answer the requests whose transactions have ended."""
    for transaction in [item for item in group.answers if item not in group.fold.open]:
        for name in group.answers.pop(transaction):
            yield from _answer(group, name, Answer(ok=True, answered_ms=now_ms))


def _handle(group: GroupState, name: str, raw: bytes, now_ms: int) -> Steps[None]:
    try:
        request = Request.from_json(raw)
        match request.kind:
            case RequestKind.CREATE_STREAM:
                yield from create_stream(group, name, request, now_ms)
            case RequestKind.SCALE_STREAM:
                yield from scale(group, _stream(group, request), name, request, now_ms)
            case RequestKind.DELETE_STREAM:
                yield from _delete(group, name, request, now_ms)
            case RequestKind.UPDATE_STREAM:
                yield from update_stream(group, _stream(group, request), name, request, now_ms)
            case RequestKind.TRUNCATE_STREAM:
                yield from _truncate(group, name, _stream(group, request), request, now_ms)
            case RequestKind.ABORT_TRANSACTION:
                yield from _abort(group, name, request, now_ms)
            case RequestKind.DESCRIBE:
                yield from _answer(group, name, describe(group, request, now_ms))
            case RequestKind.LOOK_UP | RequestKind.FENCE:
                yield from put_question(group, name, request)
            case RequestKind.CLEAR_SNAPSHOTS:
                yield from _clear(group, name, _stream(group, request), now_ms)
            case RequestKind.REBUILD_SNAPSHOTS:
                yield from _rebuild(group, name, _stream(group, request), now_ms)
    except RollbridgeError as refusal:
        yield from _refuse(group, name, refusal.code, str(refusal), now_ms)
    except Refused as refused:
        yield from _refuse(group, name, refused.code, refused.reason, now_ms)


def _refuse(group: GroupState, name: str, code: str, why: str, now_ms: int) -> Steps[None]:
    group.counts["requests_refused"] += 1
    yield from _answer(group, name, refusing(code, why, now_ms))


def _delete(group: GroupState, name: str, request: Request, now_ms: int) -> Steps[None]:
    doomed = group.doomed.get(request.stream)
    if doomed is not None:
        yield from delete_again(group, name, doomed)
    else:
        yield from delete_stream(group, name, _stream(group, request), now_ms)


def _truncate(group: GroupState, name: str, stream: StreamState, request: Request, now_ms: int) -> Steps[None]:
    why = yield from hold_request(group, request.stream, abort_foreign=False)
    if why:
        raise StreamBusy(
            f"stream {request.stream} cannot be truncated now: {why}; nothing was deleted; ask again later"
        )
    yield from truncate_stream(group, stream, name, request, now_ms)


def _abort(group: GroupState, name: str, request: Request, now_ms: int) -> Steps[None]:
    """Decide on abort; the answer waits for the round that logs it, which may be that of an earlier leader.

    A transaction whose commit was asked for can still be aborted while it waits for what may take long: whoever asked
    has got no answer yet, and nothing of it is visible.
    """
    identifier = TransactionId.parse(request.transaction)
    if identifier.bytes not in group.fold.open:
        _check_was_aborted(group, identifier, request)
        yield from _answer(group, name, Answer(ok=True, answered_ms=now_ms))
        return
    transaction = group.fold.open[identifier.bytes]
    waited = why_waits(group, transaction)
    if waited is not None:
        yield from take_out(group, transaction)
        why = f"{request.reason or 'admin'}; {waited}"
        group.fold.refuse(identifier.bytes, why[:REASON_CHARACTERS_MAX], now_ms)
    elif not group.fold.request_abort(identifier.bytes, (request.reason or "admin")[:REASON_CHARACTERS_MAX], now_ms):
        raise InvalidRequestError(f"the commit of transaction {identifier} is decided already; nothing was written")
    group.answers.setdefault(identifier.bytes, []).append(name)


def _check_was_aborted(group: GroupState, identifier: TransactionId, request: Request) -> None:
    """Return if what has ended was aborted as the request asks, by a leader that has not come to answer it.

    Raises:
        TransactionNotFound: It was not, or nobody remembers; the request has done nothing.
        InvalidRequestError: It is committed.
    """
    absent = f"transaction {identifier} is not open in group {group.name}"
    found = None if group.preserver is None else group.preserver.find(identifier)
    if found is None or found is Absence.FORGOTTEN:
        raise TransactionNotFound(f"{absent}, and how it has ended is not remembered; nothing was written now")
    if isinstance(found, Absence):
        raise TransactionNotFound(f"{absent}; nothing was written")
    _, ended = found
    if ended.committed:
        raise InvalidRequestError(f"transaction {identifier} is committed; nothing was written")
    if not ended.reason.startswith((request.reason or "admin")[:REASON_CHARACTERS_MAX]):
        raise TransactionNotFound(f"{absent}: it was aborted before ({ended.reason}); nothing was written")


def _clear(group: GroupState, name: str, stream: StreamState, now_ms: int) -> Steps[None]:
    """Delete a stream's snapshots, and begin anew: what is in sealed segments is in no leader's memory."""
    yield from clear_snapshots(group, stream.partitions())
    yield from _answer(group, name, Answer(ok=True, answered_ms=now_ms))
    raise StaleStateError(f"the snapshots of {stream.config.name} were deleted as asked; the buffer is read again")


def _rebuild(group: GroupState, name: str, stream: StreamState, now_ms: int) -> Steps[None]:
    """Make a stream's snapshots anew: delete them, begin anew, and answer when the buffer has been read again."""
    partitions = list(stream.partitions())
    known = [group.snapshots.of(item, stream.config.buffer_topic_id) for item in partitions]
    if any(item.is_restored or item.generation for item in known):
        yield from clear_snapshots(group, partitions)
        raise StaleStateError(f"the snapshots of {stream.config.name} are made anew as asked: the buffer is read again")
    yield from write_snapshots(group, partitions, now_ms)
    yield from _answer(group, name, Answer(ok=True, answered_ms=now_ms))


def _answer(group: GroupState, name: str, answer: Answer) -> Steps[None]:
    """Answer a request, unless its client has withdrawn it, or ZooKeeper takes neither the answer nor the removal."""
    asked = DeleteNode(f"{paths.requests(group.name)}/{name}")
    for operations in ((asked, CreateNode(f"{paths.answers(group.name)}/{name}", answer.to_json())), (asked,)):
        try:
            if (yield from write(*operations)):
                return
        except Refused as refused:
            logger.warning("%s: request %s cannot be answered: %s", group.name, name, refused)
    group.unanswered.add(name)


def _stream(group: GroupState, request: Request) -> StreamState:
    stream = group.streams.get(request.stream)
    if request.stream in group.doomed:
        raise StreamNotFound(f"stream {request.stream} is being deleted; nothing was written")
    if stream is None:
        raise StreamNotFound(f"stream {request.stream} does not exist in group {group.name}; nothing was written")
    return stream
