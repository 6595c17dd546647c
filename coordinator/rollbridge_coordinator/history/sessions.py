"""Sessions of clients on record: leaders read them, and remove obsolete ones.

A client session registers before it begins its first transaction in a group, so that a leader that takes over knows
every session that an earlier leader may have heard of. Clients without a name of their own never register.

A record is removed if its client has nothing open, nothing is remembered of it, and it is old enough
(:mod:`rollbridge.metadata.client_sessions`). The order matters, since a leader may die between any two steps, and
clients register meanwhile:

1. the floor on record is raised to the highest epoch to remove: a session that registers from now on is above it;
2. all other records are read that this leader does not know yet: sessions registered before are among them;
3. once the buffers are read up to their ends at that time, this leader knows these, and ends all unknown ones not above
   the floor;
4. the records are deleted, each in the version read: a client that has written its record meanwhile keeps it. With them
   the floor is written again, on whose version all that clients write about their sessions depends.

A later leader reads the floor before the records, and does steps 2 and 3 with that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.errors import CorruptDataError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import CommittingTransactions
from rollbridge.metadata.client_sessions import (
    HOUR_MS,
    KEPT_MS,
    ClientSession,
    floor_of,
    highest_floor,
    is_damaged,
    may_go,
    read_session,
)
from rollbridge.metadata.records import DeleteNode, SetNode, leading
from rollbridge_coordinator.core.effects import (
    DatedNode,
    EndOffsets,
    Now,
    ReadCounter,
    ReadDated,
    ReadNodes,
    Write,
    read_children,
    read_node,
)
from rollbridge_coordinator.core.state import READ_AT_ONCE, GroupState, SearchStage

logger = logging.getLogger(__name__)

CHECK_MS: Final = HOUR_MS
"""Interval between searches for obsolete records."""


def load_sessions(group: GroupState) -> Steps[None]:
    """Raise the fences to the sessions on record, except for transactions that were begun, or decided on, before."""
    fences = group.fold.fences
    parent = paths.sessions(group.name)
    raw = (yield from read_node(parent)) or b""
    if is_damaged(raw):
        logger.warning("sessions.floor-damaged group=%s node=%s found=%r: highest number used", group.name, parent, raw)
        floor = highest_floor(group.times.earliest((yield from Now())), KEPT_MS)
    else:
        floor = floor_of(raw)
    names = yield from read_children(parent)
    for first in range(0, len(names), READ_AT_ONCE):
        part = names[first : first + READ_AT_ONCE]
        values = yield from ReadNodes([paths.session(group.name, name) for name in part])
        for name, value in zip(part, values.values(), strict=True):
            session = _session_of(group, name, value)
            if session is not None:
                fences.raise_to(name, session.epoch)
        del values, value  # they may take a tenth of a gigabyte, as may the next ones
    fences.raise_floor(floor)
    group.sessions.count = len(names)
    decided = [
        item.work for item in group.waits.pending_changes.values() if isinstance(item.work, CommittingTransactions)
    ]
    raw = (yield from read_node(paths.committing(group.name))) or b""
    if raw:
        decided.append(CommittingTransactions.from_json(raw))
    fences.decided_before = {key: part for item in decided for key, part in item.owner_parts().items()}
    fences.replaying = True


def forget_sessions(group: GroupState, now_ms: int) -> Steps[None]:
    """Do a part of the search for obsolete records, and remove some; such a client may register again.

    Records that name labels are kept, so that a job whose label was committed is recognized however late it is
    repeated.
    """
    search = group.sessions
    if group.times.differ or group.unled:  # what the buffer of a stream that is not led needs is not known
        search.rest()
        return
    now_ms = group.times.earliest(now_ms)
    match search.stage:
        case SearchStage.REST:
            if group.housekeeping.is_due("sessions", now_ms, CHECK_MS):
                names = yield from read_children(paths.sessions(group.name))
                search.begin(names, group.fold.fences.strangers(names), now_ms)
        case SearchStage.EXAMINE:
            yield from _examine(group)
        case SearchStage.LEARN:
            yield from _learn_others(group)
        case SearchStage.DELETE:
            yield from _delete(group)


def _examine(group: GroupState) -> Steps[None]:
    search, needed = group.sessions, _needed(group)
    found = yield from _read(group, search.take(lambda name: not _is_needed(group, name, needed)))
    for name, (session, node) in found.items():
        if may_go(session, node.written_ms, search.began_ms, KEPT_MS):
            search.find(name, session.epoch)
    if search.names:
        return
    if not search.due:
        group.fold.fences.forget_strangers(search.strangers, needed)
        search.rest()
        return
    parent = paths.sessions(group.name)
    known = yield from ReadCounter(parent)
    if known is None:
        return
    raw, version = known
    search.floor = max(floor_of(raw), group.fold.fences.floor, search.highest)
    raised = str(search.floor).encode()
    if raw != raised and not (yield from Write([SetNode(parent, raised, version)])):
        return
    search.names = yield from read_children(parent)
    search.stage = SearchStage.LEARN


def _learn_others(group: GroupState) -> Steps[None]:
    search, fences = group.sessions, group.fold.fences
    found = yield from _read(group, search.take(lambda name: not fences.knows(name)))
    search.learned.update((name, session.epoch) for name, (session, _) in found.items())
    if search.names:
        return
    # What an older session of these clients has begun before is in the buffers by now, and counts. So is what a client
    # began after it had looked at its record, which is long ago for those that go.
    if search.barrier is None:
        search.barrier = yield from EndOffsets(sorted(group.partitions()))
    if group.is_folded(search.barrier):
        for name, epoch in search.learned.items():
            fences.raise_to(name, epoch)
        fences.raise_floor(search.floor)
        search.stage = SearchStage.DELETE


def _delete(group: GroupState) -> Steps[None]:
    search, fences, needed = group.sessions, group.fold.fences, _needed(group)
    batch = search.due[-READ_AT_ONCE:]
    found = yield from _read(group, [name for name in batch if not _is_needed(group, name, needed)])
    going = {
        name: DeleteNode(paths.session(group.name, name), node.version)
        for name, (session, node) in found.items()
        if session.epoch <= fences.floor and may_go(session, node.written_ms, search.began_ms, KEPT_MS)
    }
    # The floor gets another version each time: a client that has read a removed record cannot write another one.
    mark = SetNode(paths.sessions(group.name), str(fences.floor).encode())
    fitting = leading([mark, *going.values()], group.settings.write_bytes_max) - 1
    names = list(going)[:fitting]
    if names and (yield from Write([mark, *(going[name] for name in names)])):
        for name in names:
            fences.forget(name)
        search.count -= len(names)
        group.counts["sessions_forgotten"] += len(names)
    # Records changed in between, and those that do not fit, are found again by the next search.
    del search.due[-READ_AT_ONCE:]
    if not search.due:
        fences.forget_strangers(search.strangers, needed)
        search.rest()


def _needed(group: GroupState) -> set[str]:
    found = {item.begin.client_name for item in group.fold.open.values()}
    return found | {item.owners.session[0] for item in group.fold.open.values()}


def _is_needed(group: GroupState, client: str, needed: set[str]) -> bool:
    return client in needed or (group.outcome_store is not None and group.outcome_store.remembers(client))


def _read(group: GroupState, names: Sequence[str]) -> Steps[dict[str, tuple[ClientSession, DatedNode]]]:
    found = {}
    for first in range(0, len(names), READ_AT_ONCE):
        part = names[first : first + READ_AT_ONCE]
        nodes = yield from ReadDated([paths.session(group.name, name) for name in part])
        for name, node in zip(part, nodes.values(), strict=True):
            session = _session_of(group, name, None if node is None else node.value)
            if session is not None and node is not None:
                found[name] = (session, node._replace(value=b""))
    return found


def _session_of(group: GroupState, name: str, raw: bytes | None) -> ClientSession | None:
    """Return the session on record under a name; None if it is damaged, or names another client."""
    path = paths.session(group.name, name)
    try:
        session = None if raw is None else read_session(raw)
    except CorruptDataError as fault:
        logger.warning('session.damaged group=%s node=%s reason="%s"', group.name, path, fault)
        return None
    if session is None:
        return None
    if session.client_name != name:
        logger.warning("session.ignored group=%s node=%s cause=other-client", group.name, path)
        return None
    return session
