"""The journal of a group: kept while leading, and compared with ZooKeeper before anything is done.

A leader that finds that ZooKeeper was set back writes that down there, so that nobody tries again until somebody has
repaired it: each attempt raises the controller epoch, and in the end it would not look set back any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rollbridge.errors import ZooKeeperOutdated
from rollbridge.model import paths
from rollbridge.model.ids import SHARED_MAX, parse_number
from rollbridge.model.journal import Journal, key_of, lost, streams_of
from rollbridge.model.names import StreamName
from rollbridge.model.records import ControllerEpoch, CreateNode
from rollbridge_coordinator.state.effects import (
    AppendMessages,
    CommitRound,
    Messages,
    ReadNodes,
    Steps,
    Write,
    confirm_leadership,
    read_children,
    read_node,
)
from rollbridge_coordinator.state.faults import StaleStateError
from rollbridge_coordinator.state.group import GroupState

RECORDS_PER_ROUND: Final = 1_000


def check_mark(group: GroupState) -> Steps[None]:
    """Raise ZooKeeperOutdated if an earlier leader has found that ZooKeeper was set back."""
    found = yield from read_node(paths.outdated(group.name))
    if found is not None:
        raise _outdated(group, found.decode("utf-8", "replace"))


def check_journal(group: GroupState) -> Steps[None]:
    """Compare ZooKeeper with the journal, and with the outcomes that are remembered.

    Raises:
        ZooKeeperOutdated: it has lost something that it knew.
    """
    yield from _check(group, group.controller_epoch)


def check_again(group: GroupState) -> Steps[None]:
    """Compare them in the middle of a term, after the connection to ZooKeeper was away: the session may outlive it.

    Raises:
        ZooKeeperOutdated: it has lost something that it knew.
        StaleStateError: it has something that this leader has finished, as a new leader would find it after a crash.
    """
    yield from keep_journal(group)  # all that this leader has written to ZooKeeper
    yield from _check(group, group.controller_epoch + 1)
    under_way = yield from ReadNodes([paths.committing(group.name), paths.scaling(group.name)])
    parent = paths.suspended(group.name)
    halted = {f"{parent}/{title}" for title in (yield from read_children(parent))}
    if any(value is not None for value in under_way.values()) or halted != group.suspended.keys():
        raise StaleStateError(f"ZooKeeper does not hold what the leader of {group.name} has under way")


def check_birth(group: GroupState) -> Steps[None]:
    """Find out whether a group that ZooKeeper holds for new is one that was made after a backup of it.

    Raises:
        ZooKeeperOutdated: It is.
    """
    cluster = yield from read_node(paths.CLUSTER)
    if cluster and group.journal.nodes.get(paths.CLUSTER) == cluster:
        yield from refuse(group, [f"group {group.name} was led before, ZooKeeper does not know it"])


def open_journal(group: GroupState) -> Steps[None]:
    """Write down that this leader has taken over, and what earlier ones have not come to write down."""
    known = yield from ReadNodes([paths.TRANSACTION_COUNTER, paths.CLUSTER, paths.group(group.name)])
    fresh: dict[str, bytes | None] = {path: value for path, value in known.items() if value}
    if parse_number(fresh.get(paths.TRANSACTION_COUNTER), SHARED_MAX) is None:
        fresh.pop(paths.TRANSACTION_COUNTER, None)
    fresh[paths.controller(group.name)] = ControllerEpoch(group.controller_epoch, "", 0).to_json()
    yield from append_journal(group, fresh | group.journal.changes(group.streams, dict(group.faults.items())))


def keep_journal(group: GroupState) -> Steps[None]:
    """Write down what has changed since."""
    changes = group.journal.changes(group.streams, dict(group.faults.items()) if group.faults else {})
    if changes:
        yield from append_journal(group, changes)


def note_deletion(group: GroupState, stream: StreamName, former: str) -> Steps[None]:
    """Write down that a stream is being deleted, before ZooKeeper forgets it: the journal must not know more.

    ``former`` is the name of the node that keeps the numbers which it has used.
    """
    yield from keep_journal(group)
    yield from append_journal(group, {paths.stream(stream): former.encode()})


def append_journal(group: GroupState, changes: Mapping[str, bytes | None]) -> Steps[None]:
    """Have changes of nodes stand in the journal; the round is empty before and after."""
    rows = [(key_of(path), value) for path, value in changes.items()]
    for first in range(0, len(rows), RECORDS_PER_ROUND):
        yield from AppendMessages(Messages(group.name.terminated_topic, rows[first : first + RECORDS_PER_ROUND]))
        yield from CommitRound()
    group.journal.adopt(changes, group.streams, dict(group.faults.items()))


def _check(group: GroupState, next_epoch: int) -> Steps[None]:
    faults = yield from _compare(group, next_epoch)
    if faults:
        yield from confirm_leadership()  # what any server has acknowledged is seen by reads that come after a write
        faults = yield from _compare(group, next_epoch)
    if faults:
        yield from refuse(group, faults)


def _compare(group: GroupState, next_epoch: int) -> Steps[list[str]]:
    journal: Journal = group.journal.nodes
    wanted = [paths.group(group.name)]
    for name in streams_of(journal):
        numbers = yield from read_children(paths.epochs(name))
        wanted += [paths.stream(name), paths.truncation(name), paths.late(name)]
        wanted += [f"{paths.epochs(name)}/{number}" for number in numbers[-1:]]
    nodes = yield from ReadNodes(wanted)
    there = {path: value for path, value in nodes.items() if value is not None}
    formers = yield from read_children(paths.formers(group.name.scope))
    return lost(journal, there, formers, group.name, next_epoch)


def refuse(group: GroupState, faults: list[str]) -> Steps[None]:
    """Write down that ZooKeeper was set back, and how that shows; raises ZooKeeperOutdated."""
    why = "; ".join(faults[:5])
    yield from Write([CreateNode(paths.outdated(group.name), why.encode())])
    raise _outdated(group, why)


def _outdated(group: GroupState, why: str) -> ZooKeeperOutdated:
    return ZooKeeperOutdated(
        f"ZooKeeper holds less of group {group.name} than it did, as after it was restored from a backup: {why}; "
        "nothing is led, and nothing was written to Kafka, until `rollbridge repair` has put it right "
        "(`rollbridge repair --dry-run` shows what it would do)"
    )
