"""The journal of a group: Kafka's copy of what ZooKeeper must still know, compared with it before a leader acts.

A leader that finds ZooKeeper set back, as by a restored backup, marks that in ZooKeeper, so that no leader tries again
before a repair: each attempt raises the controller epoch, and after some the set-back would no longer show.

Nodes of a stream deleted by others, in a ZooKeeper that was not set back, are restored from the journal.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import SHARED_MAX, parse_number
from rollbridge.errors import RollbridgeError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import BUFFER_LOST, BUFFER_UNREADABLE
from rollbridge.metadata.journal import Journal, batches, deleted_by_hand, key_of, lost, streams_of
from rollbridge.metadata.records import ControllerEpoch, CreateNode
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.core.effects import (
    AppendMessages,
    CommitRound,
    Messages,
    ReadNodes,
    Write,
    confirm_leadership,
    read_children,
    read_node,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import StaleStateError

logger = logging.getLogger(__name__)

RECORDS_PER_ROUND: Final = 1_000
NOTHING: Final[Mapping[str, bytes | None]] = MappingProxyType({})
OF_BUFFER: Final = frozenset({BUFFER_LOST, BUFFER_UNREADABLE})


def check_mark(group: GroupState) -> Steps[None]:
    """Check that no earlier leader has marked ZooKeeper as set back.

    Raises:
        RollbridgeError: one has.
    """
    found = yield from read_node(paths.outdated(group.name))
    if found is not None:
        raise _outdated(group, found.decode("utf-8", "replace"))


def check_journal(group: GroupState, next_epoch: int) -> Steps[None]:
    """Compare ZooKeeper with the journal; ``next_epoch`` is the least controller epoch, or the one it is raised to.

    Raises:
        RollbridgeError: ZooKeeper has lost something that it knew.
        StaleStateError: nodes of a stream had been deleted by others, and were restored.
    """
    faults, gone = yield from _compare(group, next_epoch)
    if faults or gone:
        yield from confirm_leadership()  # after a write, reads see everything that any server had acknowledged before
        faults, gone = yield from _compare(group, next_epoch)
    if faults:
        yield from refuse(group, faults)
    if gone:
        for batch in batches([CreateNode(path, value) for path, value in sorted(gone.items())]):
            yield from Write(batch)
        places = ", ".join(sorted(gone)[:5])
        logger.warning('nodes.restored group=%s nodes="%s": they were deleted from ZooKeeper', group.name, places)
        raise StaleStateError(f"deleted nodes of streams of group {group.name} were restored: {places}")


def check_birth(group: GroupState) -> Steps[None]:
    """Check that a group which is new to ZooKeeper was not led before, and lost when a backup was restored.

    Raises:
        RollbridgeError: the group was led before.
    """
    cluster = yield from read_node(paths.CLUSTER)
    if cluster and group.journal.nodes.get(paths.CLUSTER) == cluster:
        yield from refuse(group, [f"group {group.name} was led before, ZooKeeper does not know it"])


def open_journal(group: GroupState) -> Steps[None]:
    """Append to the journal that this leader has taken over, and what earlier leaders had left out."""
    known = yield from ReadNodes([paths.TRANSACTION_COUNTER, paths.CLUSTER, paths.group(group.name)])
    fresh: dict[str, bytes | None] = {path: value for path, value in known.items() if value}
    if parse_number(fresh.get(paths.TRANSACTION_COUNTER), SHARED_MAX) is None:
        fresh.pop(paths.TRANSACTION_COUNTER, None)
    fresh[paths.controller(group.name)] = ControllerEpoch(group.controller_epoch, "", 0).to_json()
    yield from keep_journal(group, fresh)


def keep_journal(group: GroupState, fresh: Mapping[str, bytes | None] = NOTHING) -> Steps[None]:
    """Append the changes of streams since the last entry, after other ``fresh`` ones."""
    faults = dict(group.waits.faults.items()) if group.waits.faults else {}
    changes = {**fresh, **group.journal.changes(group.streams, faults, group.unled)}
    if changes:
        yield from append_journal(group, changes)
        group.journal.saw(group.streams, faults)


def note_deletion(group: GroupState, stream: StreamName, former: str) -> Steps[None]:
    """Append that a stream is being deleted, before ZooKeeper forgets it: the journal must not know more.

    ``former`` is the name of the node that keeps the numbers which the stream has used.
    """
    yield from keep_journal(group)
    yield from append_journal(group, {paths.stream(stream): former.encode()})


def append_journal(group: GroupState, changes: Mapping[str, bytes | None]) -> Steps[None]:
    """Append changes of nodes to the journal and commit them; the round is empty before and after."""
    rows = [(key_of(path), value) for path, value in changes.items()]
    for first in range(0, len(rows), RECORDS_PER_ROUND):
        yield from AppendMessages(Messages(group.name.terminated_topic, rows[first : first + RECORDS_PER_ROUND]))
        yield from CommitRound()
    group.journal.adopt(changes)


def _compare(group: GroupState, next_epoch: int) -> Steps[tuple[list[str], dict[str, bytes]]]:
    """Describe what ZooKeeper has lost, and return the nodes that others have deleted there."""
    journal: Journal = group.journal.nodes
    # What ZooKeeper has of these cannot be read, and nothing is done with it. Of one whose buffer is not there it can:
    # an older ZooKeeper may name the buffer of a former life.
    found = ((item.config.name, group.waits.faults.get(own)) for own, item in group.unled.items())
    places = {paths.stream(name) for name, fault in found if fault is None or fault.code not in OF_BUFFER}
    if places:
        journal = {path: value for path, value in journal.items() if "/".join(path.split("/")[:5]) not in places}
    wanted = [paths.group(group.name)]
    for name in streams_of(journal):
        numbers = yield from read_children(paths.epochs(name))
        wanted += [paths.stream(name), paths.truncation(name), paths.late(name)]
        wanted += [f"{paths.epochs(name)}/{number}" for number in numbers[-1:]]
    nodes = yield from ReadNodes(wanted)
    there = {path: value for path, value in nodes.items() if value is not None}
    deleted_streams = yield from read_children(paths.deleted_streams(group.name.scope))
    gone = deleted_by_hand(journal, there, group.name, next_epoch)
    return lost(journal, there | gone, deleted_streams, group.name, next_epoch), gone


def refuse(group: GroupState, faults: list[str]) -> Steps[None]:
    """Mark in ZooKeeper that it was set back, with the evidence.

    Raises:
        RollbridgeError: always.
    """
    why = "; ".join(faults[:5])
    yield from Write([CreateNode(paths.outdated(group.name), why.encode())])
    raise _outdated(group, why)


def _outdated(group: GroupState, why: str) -> RollbridgeError:
    return RollbridgeError(
        f"ZooKeeper holds less of group {group.name} than it did, as after it was restored from a backup: {why}; "
        "nothing is led, and nothing was written to Kafka; run `rollbridge repair` (`rollbridge repair --dry-run` "
        "shows its plan)",
        code="zookeeper-outdated",
    )
