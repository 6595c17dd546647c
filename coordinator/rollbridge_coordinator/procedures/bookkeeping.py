"""Expiry of bookkeeping in ZooKeeper: answers that nobody has taken, and part counters of transactions that ended."""

from __future__ import annotations

from itertools import islice
from typing import Final

from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.model import paths
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.joint import JointState
from rollbridge.model.names import check_client_name
from rollbridge.model.nodes import DeleteNode, leading
from rollbridge.model.records import ClientSession
from rollbridge.model.requests import Answer
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.steps import Steps, read_children, read_nodes, write

NODES_AT_ONCE: Final = 500


def expire_bookkeeping(group: GroupState, now_ms: int) -> Steps[None]:
    """Remove what is of no use to anybody any more, now and then."""
    settings = group.settings
    if group.housekeeping.is_due("bookkeeping", now_ms, settings.bookkeeping_ms):
        if not group.times.differ:
            yield from _expire_answers(group, group.times.earliest(now_ms) - settings.answers_keep_ms)
        yield from _expire_parts(group)


def _expire_answers(group: GroupState, before_ms: int) -> Steps[None]:
    """Answers are taken away by those who asked, unless these died or lost patience."""
    parent = paths.answers(group.name)
    names = yield from read_children(parent)
    # They sort by age, so the first that is to be kept is the last to be looked at.
    values = yield from read_nodes([f"{parent}/{name}" for name in names[:NODES_AT_ONCE]])
    old = [path for path, raw in values.items() if raw is not None and _answered_ms(raw) <= before_ms]
    yield from _delete(group, "answers_expired", old)


def _expire_parts(group: GroupState) -> Steps[None]:
    """A process may have joined a transaction in the moment of its end; its counter has been made anew then.

    That nothing of a transaction is known does not say that it has ended: the parts of a joint one are numbered before
    anything of it is written, and a number that is given out twice would mix what two tasks write.
    """
    parent = paths.parts_of(group.name)
    names = yield from read_children(parent)
    unknown = list(islice((name for name in names if not _is_open(group, name)), NODES_AT_ONCE))
    if not unknown:
        return
    counters = yield from read_nodes([f"{parent}/{name}" for name in unknown])
    clients = {path: _client(raw) for path, raw in counters.items() if raw is not None}
    sessions = yield from read_nodes([paths.session(group.name, name) for name in sorted({*clients.values()} - {""})])
    ended = [
        path
        for path, client in clients.items()
        if not _is_joint(sessions.get(paths.session(group.name, client)), path.rpartition("/")[2])
    ]
    yield from _delete(group, "parts_expired", ended)


def _delete(group: GroupState, count: str, nodes: list[str]) -> Steps[None]:
    """Delete as many nodes as go at once, unless somebody else has just taken one; what is left is looked at again."""
    operations = [DeleteNode(path) for path in nodes]
    del operations[leading(operations, group.settings.write_bytes_max) :]
    if operations and (yield from write(*operations)):
        group.counts[count] += len(operations)


def _answered_ms(raw: bytes) -> int:
    try:
        return Answer.from_json(raw).answered_ms
    except CorruptDataError:
        return 0  # nobody can make use of it


def _client(raw: bytes) -> str:
    """Whose joint transaction's parts are counted; empty if it is not a joint one's counter, or not one of ours."""
    name = raw.decode(errors="replace")
    try:
        check_client_name(name)
    except InvalidRequestError:
        return ""
    return name


def _is_joint(session: bytes | None, name: str) -> bool:
    """Whether it is the joint transaction that its client works at; once it is not, it never will be again."""
    if session is None:
        return False
    try:
        work = ClientSession.from_json(session).work
    except CorruptDataError:
        return True  # it may be
    return work is not None and str(work.transaction) == name and work.state in (JointState.OPEN, JointState.ENDING)


def _is_open(group: GroupState, name: str) -> bool:
    try:
        identifier = TransactionId.parse(name).bytes
    except InvalidRequestError:
        return False
    return identifier in group.fold.open or identifier in group.finished
