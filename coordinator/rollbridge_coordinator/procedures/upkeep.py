"""Upkeep: leases that ran out, commits that wait for frames, and the ZooKeeper records of long transactions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollbridge.model import paths
from rollbridge.model.buffered import BufferedTransaction, Partition
from rollbridge.model.identifiers import TransactionId
from rollbridge.model.nodes import CreateNode, DeleteNode, leading
from rollbridge.model.records import TransactionRecord
from rollbridge_coordinator.procedures.aborted import drop_aborted
from rollbridge_coordinator.procedures.merge import begin_record
from rollbridge_coordinator.procedures.outcomes import log_end_after
from rollbridge_coordinator.state.errors import StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.planning import waiting
from rollbridge_coordinator.state.steps import Steps, append_control, commit_round, end_offsets, read_nodes, write

RECORDS_PER_WRITE = 500


def expire_overdue(group: GroupState, now_ms: int) -> Steps[None]:
    """Decide on abort for transactions whose lease has run out, once the buffer has been read to its end.

    The end is asked for after the deadline, so a commit that was asked for in time is always seen first.
    """
    overdue = group.fold.ages.overdue(group.times.lease(now_ms))
    yield from _set_barriers(group, overdue)
    for transaction in overdue:
        barrier = group.barriers.get(transaction.id)
        if barrier is not None and group.is_folded(barrier):
            group.fold.expire(transaction.id, now_ms)
            group.counts["transactions_expired"] += 1


def await_frames(group: GroupState, transactions: Sequence[BufferedTransaction], now_ms: int) -> Steps[None]:
    """Wait for the frames that commits name until everything that was in the buffers has been read; then refuse them.

    Whoever asked for the commit had all frames acknowledged before, so what is not there then never comes.
    """
    yield from _set_barriers(group, transactions)
    for transaction in transactions:
        if group.is_folded(group.barriers[transaction.id]) and not transaction.is_complete():
            group.fold.refuse(transaction.id, "incomplete: frames that the commit names are not in the buffer", now_ms)
            group.barriers.pop(transaction.id)


def forsake_held(group: GroupState, now_ms: int) -> Steps[None]:
    """Refuse commits that wait for an earlier one of their connection which never comes, as :meth:`forsake` does.

    Only once everything has been read that stood in the buffers after their time was up: the earlier one may be there,
    in another partition, however long the leader has not come to read it.
    """
    patience_ms = group.settings.commit_order_patience_ms
    if group.fold.has_forsaken(now_ms, patience_ms):
        ends = yield from end_offsets(sorted(group.partitions()))
        if group.is_folded(ends):
            group.counts["commits_forsaken"] += group.fold.forsake(now_ms, patience_ms)


def record_long(group: GroupState, now_ms: int) -> Steps[None]:
    """Give transactions that outlive a moment a BEGIN record and a ZooKeeper record.

    One that was aborted long ago, and whose BEGIN frame in another buffer comes only now, is forgotten instead.
    """
    aged = group.fold.ages.come_of_age(now_ms - group.settings.record_after_ms)
    yield from drop_aborted(group, aged)
    aged = [item for item in aged if item.id in group.fold.open]
    if group.faults or any(item.wait.lasting for item in group.held_rolls.values()):
        aged += [item for item, _ in waiting(group)]  # they have not ended, and can be looked at and aborted
    # What was refused the last time is tried again.
    wanted = {item.id: item for item in (*group.unrecorded, *aged) if item.id in group.fold.open}
    due = group.unrecorded = [item for item in wanted.values() if item.id not in group.recorded]
    while due:
        nodes = [CreateNode(*_record_node(group, item)) for item in due[:RECORDS_PER_WRITE]]
        fitting = leading(nodes, group.settings.write_bytes_max)
        yield from _record(group, due[:fitting], nodes[:fitting], now_ms)
        del due[:fitting]


def _record(
    group: GroupState, due: Sequence[BufferedTransaction], nodes: Sequence[CreateNode], now_ms: int
) -> Steps[None]:
    unlogged = [item for item in due if item.id not in group.begun]
    if unlogged:
        positions = yield from append_control(
            group.commit_log, [begin_record(group, item, now_ms) for item in unlogged]
        )
        yield from commit_round()
        group.log_end = log_end_after(positions)
        group.begun.update(item.id for item in unlogged)
    if not (yield from write(*nodes)):
        raise StaleStateError(f"a transaction record of {group.name} exists that this leader has not written")
    group.recorded.update(item.id for item in due)


def remove_records(group: GroupState, _: int) -> Steps[None]:
    """Remove the ZooKeeper records, and part counters, of transactions that have ended."""
    todo = group.finished[:RECORDS_PER_WRITE]
    ended = [TransactionId.from_bytes(raw) for raw in todo]
    places = [(paths.transaction(group.name, item), paths.parts(group.name, item)) for item in ended]
    fitting = leading([DeleteNode(path) for pair in places for path in pair], group.settings.write_bytes_max)
    del places[max(fitting // 2, 1) :]
    counters = yield from read_nodes([counter for _, counter in places])
    operations = [DeleteNode(record) for record, _ in places]
    operations += [DeleteNode(path) for path, value in counters.items() if value is not None]
    if not (yield from write(*operations)):
        raise StaleStateError(f"a transaction record of {group.name} is gone that this leader has not removed")
    del group.finished[: len(places)]


def _record_node(group: GroupState, transaction: BufferedTransaction) -> tuple[str, bytes]:
    begin = transaction.begin
    record = TransactionRecord(
        id=transaction.transaction_id,
        group=group.name,
        state=transaction.state.value,
        client_name=begin.client_name,
        client_epoch=begin.client_epoch,
        label=begin.label,
        begun_ms=transaction.begun_ms,
        lease_ms=begin.lease_ms,
        streams=begin.streams,
        controller_epoch=group.controller_epoch,
    )
    return paths.transaction(group.name, transaction.transaction_id), record.to_json()


def _set_barriers(group: GroupState, transactions: Sequence[BufferedTransaction]) -> Steps[None]:
    """Note the present ends of the buffers of transactions that have no barrier yet."""
    missing = [item for item in transactions if item.id not in group.barriers]
    if missing:
        wanted = {partition for item in missing for partition in _buffers(group, item)}
        ends = yield from end_offsets(sorted(wanted))
        for item in missing:
            group.barriers[item.id] = {partition: ends[partition] for partition in _buffers(group, item)}


def _buffers(group: GroupState, transaction: BufferedTransaction) -> Iterable[Partition]:
    for name in transaction.begin.streams:
        if name in group.streams:
            yield group.streams[name].partition_of(transaction)
