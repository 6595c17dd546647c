"""Sessions of clients: the newest one of each name, on record in ZooKeeper, for whoever leads the group next.

A session registers before it begins its first transaction in a group, so that a leader that takes over knows of every
session that an earlier leader may have been told of. Clients without a name of their own never register.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from rollbridge.errors import CorruptDataError
from rollbridge.model import paths
from rollbridge.model.nodes import DeleteNode
from rollbridge.model.records import ClientSession
from rollbridge.model.under_way import Committing
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.steps import Steps, read_children, read_node, read_nodes, write

logger = logging.getLogger(__name__)

KEPT_MS: Final = 30 * 24 * 3_600_000
"""How long a session is on record after it has registered: far longer than any lease, or memory of an outcome."""
WORK_KEPT_MS: Final = 365 * 24 * 3_600_000
"""The same for one that names a joint transaction, after it has begun that: without it, it would be written again."""
LOOK_MS: Final = 24 * 3_600_000
READ_AT_ONCE: Final = 100
"""Each takes up to 1 MiB, whatever its maker has put there."""


class _Seen(NamedTuple):
    """What is kept of a session's record: it may be large, and there may be many.

    Attributes:
        client_name: Whose it is.
        epoch: Of the session.
        forgotten_ms: When it may be removed, ms since 1970; None: never.
    """

    client_name: str
    epoch: int
    forgotten_ms: int | None


def load_sessions(group: GroupState) -> Steps[None]:
    """Know the sessions, and what they must not be held against: what may have been begun, or was decided, before."""
    for session in (yield from _read_sessions(group)):
        group.fold.fences.raise_to(session.client_name, session.epoch)
    decided = [item.work for item in group.suspended.values() if isinstance(item.work, Committing)]
    raw = yield from read_node(paths.committing(group.name))
    if raw is not None:
        decided.append(Committing.from_json(raw))
    group.fold.fences.decided_before = {key: part for item in decided for key, part in item.owner_parts().items()}
    group.fold.fences.replaying = True


def forget_sessions(group: GroupState, now_ms: int) -> Steps[None]:
    """Remove the records of sessions that registered long ago, once a day; such a client may register again.

    Those that tell of labels stay: who comes again with one of these must not find a client that has written nothing.
    """
    if group.times.differ or now_ms < group.sessions_checked_ms + LOOK_MS:
        return
    group.sessions_checked_ms = now_ms
    writing = {item.owners.session[0] for item in group.fold.open.values()}
    for session in (yield from _read_sessions(group)):
        if session.forgotten_ms is None:
            continue
        if session.forgotten_ms < now_ms and session.client_name not in writing:
            yield from write(DeleteNode(paths.session(group.name, session.client_name)))
            group.fold.fences.forget(session.client_name)
            group.counts["sessions_forgotten"] += 1


def _read_sessions(group: GroupState) -> Steps[list[_Seen]]:
    """The sessions on record; one that can not be read, or stands under another name than it says, counts for none."""
    names = yield from read_children(paths.sessions(group.name))
    found = []
    for first in range(0, len(names), READ_AT_ONCE):
        wanted = {paths.session(group.name, name): name for name in names[first : first + READ_AT_ONCE]}
        for path, raw in (yield from read_nodes(list(wanted))).items():
            try:
                session = None if raw is None else ClientSession.from_json(raw)
            except CorruptDataError as fault:
                logger.warning("%s: %s: %s", group.name, path, fault)
                continue
            if session is None:
                continue
            if session.client_name != wanted[path]:
                logger.warning("%s: %s: it is a session of another client, so it counts for none", group.name, path)
                continue
            kept_ms = KEPT_MS if session.work is None else WORK_KEPT_MS
            forgotten_ms = None if session.has_series else session.registered_ms + kept_ms
            found.append(_Seen(session.client_name, session.epoch, forgotten_ms))
    return found
