"""Transactions whose owner is gone: what has arrived of them, and the commit that somebody else asks for in its place.

A commit names what it makes visible, and only the owner knows what that was to be. Somebody else can name what stands
in the buffers: of each segment everything up to where the owner's last message arrived, or what its last savepoint
names. What the owner had not sent yet is lost with it. Conditions and offsets of consumer groups, which it would have
sent with its commit, are those of its last savepoint; without one they are lost, too.

What cannot be told from the buffers is refused: records that other processes wrote as parts may come from attempts that
their owner would not have named, and a joint transaction is one of a series, in which whoever comes next has to find
exactly what was to be written.

Nothing is new in the buffers: whoever commits takes over the transaction as :meth:`rollbridge.Bridge.resume` does,
which keeps out the former owner, and then asks for its commit.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollbridge.client.outcomes import Known
from rollbridge.client.results import ArrivedTransaction, Savepoint
from rollbridge.errors import ConflictError
from rollbridge.model.names import GroupName
from rollbridge.model.records import ClientSession
from rollbridge.model.transaction import Arrived, KnownTransaction, State


def arrived_of(
    known: Known, arrived: Arrived | None, session: ClientSession | None, savepoint: Savepoint | None = None
) -> ArrivedTransaction:
    """Return what has arrived of a transaction; ``session`` is what is on record of its client's newest session."""
    group, item = known
    is_open = item.state is State.OPEN
    return ArrivedTransaction(
        transaction=item.id,
        group=group,
        state=item.state,
        client_name=item.client_name,
        label=item.label,
        position=None if item.position < 0 else item.position,
        records=item.records,
        since_ms=item.decided_ms,
        reason=item.reason,
        bytes=0 if arrived is None else arrived.bytes,
        streams=records_by_stream(item),
        lease_ends_ms=item.decided_ms + item.lease_ms if is_open else 0,
        obstacle=_obstacle(item, arrived, session) if is_open else "",
        savepoint=savepoint,
    )


def records_by_stream(known: KnownTransaction) -> Mapping[str, int]:
    """Return how many records of its owners have arrived in each stream."""
    names = list(known.streams)
    found = dict.fromkeys(names, 0)
    for key, records in known.pieces.items():
        found[names[key.stream]] += records
    return found


def _obstacle(known: KnownTransaction, arrived: Arrived | None, session: ClientSession | None) -> str:
    """Return why nobody but its owner can commit it; empty if somebody else may."""
    if arrived is not None and arrived.others:
        return (
            f"{arrived.others:,} records of it were written by other processes as parts, and which of these count is "
            "known to its owner alone"
        )
    work = None if session is None else session.work
    if work is not None and work.transaction == known.id:
        return (
            f"it is number {work.number} of the joint transactions {work.series!r}, and whoever writes the next one "
            "would take it for complete"
        )
    return ""


def check_commit(found: ArrivedTransaction, records: int | None, *, at_savepoint: bool = False) -> None:
    """Check that somebody else than its owner may commit a transaction.

    Args:
        found: The transaction, as it was just found.
        records: How many records whoever asks expects it to hold; None if any number will do.
        at_savepoint: Whether what came after its last savepoint is to be left out.

    Raises:
        ConflictError: it is open, and what its commit would have to name is not known, or it holds another number of
            records than was expected.
    """
    if found.state is not State.OPEN:
        return
    if found.obstacle:
        raise ConflictError(
            f"transaction {found.transaction} cannot be committed in its owner's place: {found.obstacle}; nothing was "
            "changed: run its program again if it goes on where it was, or abort it with `rollbridge txn abort`"
        )
    if at_savepoint and found.savepoint is None:
        raise ConflictError(
            f"transaction {found.transaction} has no savepoint; nothing was changed: commit all that has arrived of "
            "it, or abort it"
        )
    holds = found.records
    if at_savepoint and found.savepoint is not None:
        holds = sum(found.savepoint.records.values())
    check_records(found.transaction, found.group, holds, records)


def check_records(transaction: object, group: GroupName, records: int, expected: int | None) -> None:
    """Raise ConflictError if a transaction holds another number of records than was expected of it."""
    if expected is not None and records != expected:
        raise ConflictError(
            f"transaction {transaction} of {group} holds {records:,} records by now, and {expected:,} were to be "
            "committed: its owner is at work; nothing was changed"
        )
