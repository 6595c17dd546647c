"""Upkeep: expire leases and waiting commits, and keep the ZooKeeper records of transactions, answers and parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.errors import CorruptDataError, InvalidRequestError, NewerFormatError
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import ClientSession, CooperativeState
from rollbridge.metadata.records import CreateNode, DeleteNode, SetNode, TransactionRecord, leading
from rollbridge.metadata.requests import AdminAnswer
from rollbridge.stream.names import Partition, check_client_name
from rollbridge_coordinator.commit.merge import begin_record
from rollbridge_coordinator.commit.outcomes import log_end_after
from rollbridge_coordinator.commit.refusals import refuse_waiting
from rollbridge_coordinator.commit.waiting import waiting
from rollbridge_coordinator.core.effects import (
    AppendControl,
    CommitRound,
    DiskBytes,
    EndOffsets,
    ReadNodes,
    Write,
    read_children,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import StaleStateError
from rollbridge_coordinator.history.snapshots import drop_aborted

RECORDS_PER_WRITE = 500
INCOMPLETE: Final = (
    "incomplete: frames that the commit names are not in the buffers: they never arrived, or a stream that had joined "
    "was deleted"
)
"""Reason of an ABORT record."""


def expire_overdue(group: GroupState, now_ms: int) -> Steps[None]:
    """Decide on abort for transactions whose lease has run out, once their buffers have been read to the end.

    The end is determined after the deadline, so a commit that was requested in time is always seen first.
    """
    overdue = group.fold.ages.overdue(group.times.lease(now_ms))
    yield from _set_barriers(group, overdue)
    for transaction in overdue:
        if transaction.barrier is not None and group.is_folded(transaction.barrier):
            unled = group.unled_of(transaction) if group.unled else None
            if unled is not None:  # its commit may be there, too
                refuse_waiting(group, transaction, unled, now_ms)
            else:
                group.fold.expire(transaction.id, now_ms)
            group.counts["transactions_expired"] += 1


def measure_logs(group: GroupState, now_ms: int) -> Steps[None]:
    """Measure commit log and buffers on disk, at intervals; only metrics show it."""
    if group.housekeeping.is_due("sizes of logs", now_ms, group.settings.retention_check_ms, at_once=False):
        group.metrics.log_bytes = dict((yield from DiskBytes([(group.commit_log, 0), *sorted(group.partitions())])))


def record_extended(group: GroupState, _: int) -> Steps[None]:
    """Renew the ZooKeeper records of transactions that were extended, or whose commit waits since then."""
    extended = set(group.fold.extended)
    nodes = [
        SetNode(*_record_node(group, group.fold.open[item]))
        for item in sorted(extended & group.records.recorded & group.fold.open.keys())
    ]
    while nodes:
        count = leading(nodes[:RECORDS_PER_WRITE], group.settings.write_bytes_max)
        if not (yield from Write(nodes[:count])):
            raise StaleStateError(f"a transaction record of {group.name} is gone that this leader has not removed")
        del nodes[:count]
    group.fold.extended -= extended


def await_frames(group: GroupState, transactions: Sequence[BufferedTransaction], now_ms: int) -> Steps[None]:
    """Wait for the frames that commits name until all that was in the buffers has been read; then refuse the commits.

    A client requests a commit after all of its frames were acknowledged, so a frame still missing never comes.
    """
    yield from _set_barriers(group, transactions)
    for transaction in transactions:
        assert transaction.barrier is not None
        if group.is_folded(transaction.barrier) and not transaction.is_complete():
            group.fold.refuse(transaction.id, INCOMPLETE, now_ms)


def forsake_held(group: GroupState, now_ms: int) -> Steps[None]:
    """Refuse commits that wait for a missing earlier one of their connection, as :meth:`forsake` does.

    That is decided only after everything has been read that was in the buffers at their deadline: the earlier commit
    may be in another partition, however late the leader reads it.
    """
    patience_ms = group.settings.commit_order_patience_ms
    if group.fold.has_forsaken(now_ms, patience_ms):
        ends = yield from EndOffsets(sorted(group.partitions()))
        if group.is_folded(ends):
            group.counts["commits_forsaken"] += group.fold.forsake(now_ms, patience_ms)


def record_long(group: GroupState, now_ms: int) -> Steps[None]:
    """Write a BEGIN record and a ZooKeeper record for transactions that stay open for more than a moment.

    A transaction aborted long ago, whose BEGIN frame in another buffer arrives only now, is dropped instead.
    """
    # By the clock of their begin: by a slower one they would not reach the age, and no client could resume them.
    aged = group.fold.ages.come_of_age(group.times.lease(now_ms) - group.settings.record_after_ms)
    yield from drop_aborted(group, aged)
    aged = [item for item in aged if item.id in group.fold.open]
    is_held = any(item.wait.lasting for item in group.waits.held_rolls.values())
    if group.waits.faults or is_held or group.large.preparations or group.large.retries:
        aged += [item for item, _ in waiting(group)]  # recorded as well, so that they can be seen and aborted
    else:
        late_ms = group.times.lease(now_ms) - group.settings.record_after_ms
        aged += [item for item in group.fold.lines.held() if item.decided_ms < late_ms]
    # Include transactions whose records were refused the last time.
    wanted = {item.id: item for item in (*group.records.unrecorded, *aged) if item.id in group.fold.open}
    due = group.records.unrecorded = [item for item in wanted.values() if item.id not in group.records.recorded]
    group.records.shown &= group.records.recorded
    waits = {
        item.id for item in wanted.values() if item.state is State.COMMITTING and item.id in group.records.recorded
    }
    group.fold.extended |= waits - group.records.shown
    group.records.shown |= waits
    while due:
        nodes = [CreateNode(*_record_node(group, item)) for item in due[:RECORDS_PER_WRITE]]
        fitting = leading(nodes, group.settings.write_bytes_max)
        yield from _record(group, due[:fitting], nodes[:fitting], now_ms)
        del due[:fitting]


def _record(
    group: GroupState, due: Sequence[BufferedTransaction], nodes: Sequence[CreateNode], now_ms: int
) -> Steps[None]:
    unlogged = [item for item in due if item.id not in group.records.begun]
    if unlogged:
        positions = yield from AppendControl(group.commit_log, [begin_record(group, item, now_ms) for item in unlogged])
        yield from CommitRound()
        group.predictor.log_end = log_end_after(positions)
        group.records.begun.update(item.id for item in unlogged)
    if not (yield from Write(nodes)):
        raise StaleStateError(f"a transaction record of {group.name} exists that this leader has not written")
    group.records.recorded.update(item.id for item in due)


def remove_records(group: GroupState, _: int) -> Steps[None]:
    """Remove the ZooKeeper records, and part counters, of transactions that have ended."""
    todo = group.records.finished[:RECORDS_PER_WRITE]
    ended = [TransactionId.from_bytes(raw) for raw in todo]
    places = [(paths.transaction(group.name, item), paths.parts(group.name, item)) for item in ended]
    fitting = leading([DeleteNode(path) for pair in places for path in pair], group.settings.write_bytes_max)
    del places[max(fitting // 2, 1) :]
    counters = yield from ReadNodes([counter for _, counter in places])
    operations = [DeleteNode(record) for record, _ in places]
    operations += [DeleteNode(path) for path, value in counters.items() if value is not None]
    if not (yield from Write(operations)):
        raise StaleStateError(f"a transaction record of {group.name} is gone that this leader has not removed")
    del group.records.finished[: len(places)]


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
    """Record the present ends of the buffers of transactions without a barrier in them."""
    missing: list[tuple[BufferedTransaction, set[Partition]]] = []
    for item in transactions:
        # Those of all streams if one has joined it that is not known yet.
        streams = group.streams if item.names_beyond() else item.begin.streams
        buffers = set(group.buffers_of(item.transaction_id, streams))
        if item.barrier is None or not buffers <= item.barrier.keys():
            missing.append((item, buffers))
    if missing:
        ends = yield from EndOffsets(sorted(set().union(*(buffers for _, buffers in missing))))
        for item, buffers in missing:
            item.barrier = {partition: ends[partition] for partition in buffers}


# Expiry of answers and part counters


NODES_AT_ONCE: Final = 500
_NEVER_MS: Final = 1 << 63


def expire_bookkeeping(group: GroupState, now_ms: int) -> Steps[None]:
    """Remove unused answers, and part counters of ended transactions, at intervals."""
    settings = group.settings
    if group.housekeeping.is_due("bookkeeping", now_ms, settings.bookkeeping_ms):
        if not group.times.differ:
            yield from _expire_answers(group, group.times.earliest(now_ms) - settings.answers_keep_ms)
        yield from _expire_parts(group)


def _expire_answers(group: GroupState, before_ms: int) -> Steps[None]:
    """Remove old answers; clients remove their own, unless they died or timed out."""
    parent = paths.answers(group.name)
    names = yield from read_children(parent)
    # The names sort by age, so the oldest answers are read first.
    values = yield from ReadNodes([f"{parent}/{name}" for name in names[:NODES_AT_ONCE]])
    old = [path for path, raw in values.items() if raw is not None and _answered_ms(raw) <= before_ms]
    yield from _delete(group, "answers_expired", old)


def _expire_parts(group: GroupState) -> Steps[None]:
    """Remove part counters of ended transactions; a process that joins one as it ends may create its counter again.

    A transaction without a known state need not have ended: the parts of a cooperative one are numbered before its
    first frame, and a number given out twice would mix the writes of two tasks.
    """
    parent = paths.parts_of(group.name)
    names = yield from read_children(parent)
    unknown = list(islice((name for name in names if not _is_open(group, name)), NODES_AT_ONCE))
    if not unknown:
        return
    counters = yield from ReadNodes([f"{parent}/{name}" for name in unknown])
    clients = {path: _client(raw) for path, raw in counters.items() if raw is not None}
    sessions = yield from ReadNodes([paths.session(group.name, name) for name in sorted({*clients.values()} - {""})])
    ended = [
        path
        for path, client in clients.items()
        if not _is_cooperative(sessions.get(paths.session(group.name, client)), path.rpartition("/")[2])
    ]
    yield from _delete(group, "parts_expired", ended)


def _delete(group: GroupState, count: str, nodes: list[str]) -> Steps[None]:
    """Delete as many nodes as fit into one multi; none if a client has just removed one. The rest is left for later."""
    operations = [DeleteNode(path) for path in nodes]
    del operations[leading(operations, group.settings.write_bytes_max) :]
    if operations and (yield from Write(operations)):
        group.counts[count] += len(operations)


def _answered_ms(raw: bytes) -> int:
    try:
        return AdminAnswer.from_json(raw).answered_ms
    except NewerFormatError:
        return _NEVER_MS  # a newer client may wait for it; newer leaders remove it
    except CorruptDataError:
        return 0  # a damaged answer is of no use, so it counts as old


def _client(raw: bytes) -> str:
    """Return the client of the cooperative transaction of a counter; empty if there is none."""
    name = raw.decode(errors="replace")
    try:
        check_client_name(name)
    except InvalidRequestError:
        return ""
    return name


def _is_cooperative(session: bytes | None, name: str) -> bool:
    """Return True if a session names the transaction as its cooperative one; once it does not, it never will again."""
    if session is None:
        return False
    try:
        work = ClientSession.from_json(session).work
    except CorruptDataError:
        return True  # unknown, so keep the counter
    return (
        work is not None
        and str(work.transaction) == name
        and work.state in (CooperativeState.OPEN, CooperativeState.ENDING)
    )


def _is_open(group: GroupState, name: str) -> bool:
    try:
        identifier = TransactionId.parse(name).bytes
    except InvalidRequestError:
        return False
    return identifier in group.fold.open or identifier in group.records.finished
