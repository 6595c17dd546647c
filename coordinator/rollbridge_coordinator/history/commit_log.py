"""Retention of the commit log, and the record of ended transactions, which outlives it.

Deleted records are needed neither by leaders nor by clients. A leader has the record of ended transactions
(:mod:`rollbridge.commitlog.outcomes`), with the offset from which on the log has the rest; nothing is deleted from
there on, nor from where a takeover reads anyway. A client follows the log from before its first begin, and asks the
leader, which remembers outcomes elsewhere, for what it has missed. So records are kept for readers: of whole
transactions, of positions of commits, and for audits. Retention is a time, a size, or names of consumer groups.

Order of the effects: marks are written to ZooKeeper, and age; the record of ended transactions is written; records are
deleted; used marks are removed. Each effect may be repeated. A deposed leader may delete records late: its record of
ended transactions stays, so every later leader knows at least as much.

Source: Pravega's stream retention; Kafka's ``DeleteRecords``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import TransactionId
from rollbridge.commitlog.outcomes import (
    EndedIds,
    LogMark,
    counted_before,
    decode_ended,
    ended_key,
    marks_to_keep,
    short_until_ms,
)
from rollbridge.errors import CorruptDataError
from rollbridge.metadata import paths
from rollbridge.metadata.records import CheckNode, CreateNode, DeleteNode, Group, LogMarks, SetNode
from rollbridge.metadata.requests import AdminAnswer, AdminRequest
from rollbridge.stream.config import FOREVER, Retention
from rollbridge.stream.names import Partition
from rollbridge_coordinator.commit.outcome_store import Absence
from rollbridge_coordinator.core.bookkeeping import place_to_truncate
from rollbridge_coordinator.core.effects import (
    AppendMessages,
    CommitRound,
    DeleteRecords,
    DiskBytes,
    EndOffsets,
    GroupCommits,
    Messages,
    Now,
    ReadEnded,
    StartOffsets,
    Write,
    read_node,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import LostRaceError, StaleStateError
from rollbridge_coordinator.history.counters import look_at_counter
from rollbridge_coordinator.history.journal import append_journal
from rollbridge_coordinator.history.snapshots import ensure_topics

logger = logging.getLogger(__name__)

REBUILT_MAX: Final = 5_000_000
"""Offsets of a never truncated commit log up to which it is read once to learn which transactions have ended, if no
record says so: earlier versions wrote none. It takes some seconds.
"""


# What has ended


def restore_ended(group: GroupState, values: Sequence[tuple[str, bytes]], first: int, end: int) -> Steps[EndedIds]:
    """Return the ended transactions, from the record of an earlier leader, or from the rest of the log.

    Outcomes from the set's ``log_end`` on are not in it.

    Args:
        group: State with its counter, and the recorded transactions.
        values: Values of the record, in each topic of snapshots that has one.
    """
    known: list[EndedIds] = []
    group.log.listed_in = {topic for topic, _ in values}
    for _, value in values:
        try:
            known.append(EndedIds.of(decode_ended(value, group.name, group.log.topic_id, end)))
        except CorruptDataError as fault:
            group.snapshots.warn(f"the ended transactions of {group.name} are read from the commit log: {fault}")
    newest = max(known, key=lambda item: item.log_end, default=None)
    ended = EndedIds() if newest is None else newest
    ended.has_outcome = partial(_has_outcome, group)
    if newest is not None and newest.log_end >= first:
        if group.log.listed_in != {group.snapshots.index_topic}:  # snapshots have another format now
            newest.fresh = group.settings.outcomes_unlisted_max
        return newest
    if newest is not None or first:
        until = 0 if newest is None else newest.log_end
        group.snapshots.warn(
            f"the commit log of {group.name} begins at {first}, behind offset {until} up to which the record of "
            "ended transactions reaches: records of it were deleted by others; transactions that may have ended are "
            "dropped"
        )
    if first or end <= REBUILT_MAX:
        ended.merge((yield from ReadEnded(group.commit_log, first, end)))
    ended.written(end)
    ended.fresh = group.settings.outcomes_unlisted_max if end else 0  # so that it is written down soon
    if first:
        # What has its outcome before was begun before. Others that were begun then, and are open, have been recorded.
        until_ms = short_until_ms(group.log.marks, first)
        ended.lose(group.times.common((yield from Now())) if until_ms is None else until_ms, group.records.recorded)
        group.log.doubtful = frozenset(group.records.recorded)
    return ended


def _has_outcome(group: GroupState, transaction: bytes, client: str) -> bool | None:
    if group.outcome_store is None:
        return None
    found = group.outcome_store.find(TransactionId.from_bytes(transaction), client)
    return None if found is Absence.FORGOTTEN else found is not Absence.UNKNOWN


def may_have_ended(group: GroupState, transaction: bytes, client: str, *, is_open: bool) -> bool:
    """Return True if a transaction on record may have its outcome in a deleted part of the commit log.

    Its record is deleted a moment after its outcome. One that ``is_open`` has no request for its end.
    """
    if transaction not in group.log.doubtful:
        return False
    assert group.fold.ended is not None
    known = group.fold.ended.has_outcome(transaction, client)
    return not is_open if known is None else known


def learn_ended(group: GroupState, outcomes: Iterable[bytes]) -> None:
    """Add the outcomes read from the commit log, once the buffers are folded up to the takeover's ends."""
    ended, is_open = group.fold.ended, group.fold.open
    assert ended is not None
    counter = group.counter
    ended.is_given = counter.is_given
    ended.cut(counter.number, counter.note.value, counter.deleted_streams)
    # One of them may have the counter of an open one, with another epoch: writers of buffers may use any id.
    counters = {transaction[2:] for transaction in is_open}
    for transaction in outcomes:
        if transaction[2:] not in counters:
            ended.add(transaction)


def keep_ended(group: GroupState, _: int) -> Steps[None]:
    """Rewrite the record of ended transactions after many more have ended."""
    ended = group.fold.ended
    if ended is not None and ended.fresh >= group.settings.outcomes_unlisted_max:
        yield from write_ended(group)


def keep_emptied(group: GroupState) -> Steps[None]:
    """Rewrite the record of ended transactions if others have deleted the records of the commit log that it needs."""
    ended, place = group.fold.ended, (group.commit_log, 0)
    assert ended is not None
    start = (yield from StartOffsets([place]))[place]
    if start > ended.log_end:
        group.snapshots.warn(
            f"records of the commit log of {group.name}, up to offset {start}, were deleted by others; the record of "
            "ended transactions is written now"
        )
        yield from write_ended(group)


def write_ended(group: GroupState) -> Steps[None]:
    """Write the record of ended transactions."""
    ended, state = group.fold.ended, group.snapshots
    assert ended is not None
    yield from ensure_topics(group)
    ends = dict((yield from EndOffsets([*sorted(group.partitions()), (group.commit_log, 0)])))
    log_end = ends.pop((group.commit_log, 0))
    old = counted_long_ago(group)
    # A transaction with an id given out long ago is known to be open once all of this has been folded.
    if old is not None and not group.unled and group.is_folded(ends):
        ended.close_gaps(group.counter.number, old, group.fold.open, group.settings.ended_ranges_kept)
    record = ended.record(group.name, group.log.topic_id, group.controller_epoch, log_end, group.fold.open)
    yield from AppendMessages(Messages(state.index_topic, [(ended_key(group.name), record.encode())]))
    for topic in sorted(group.log.listed_in - {state.index_topic}):
        yield from AppendMessages(Messages(topic, [(ended_key(group.name), None)]))
    yield from CommitRound()
    group.log.listed_in = {state.index_topic}
    ended.written(log_end)
    group.counts["ended_written"] += 1


def counted_long_ago(group: GroupState) -> int | None:
    """Return the count below which all ids were given out so long ago that no client uses them."""
    if group.times.differ or not group.log.now_ms:
        return None
    return counted_before(group.log.marks, group.log.now_ms, group.settings.counters_keep_ms, group.counter.note.value)


# Retention


def policy_of(group: GroupState) -> Retention:
    """Return the retention of the commit log: the group's, else the coordinator's."""
    if group.log.retention is not None:
        return group.log.retention
    settings = group.settings
    return Retention(settings.commit_log_retention_ms or FOREVER, settings.commit_log_retention_bytes or FOREVER)


def load_log(group: GroupState, record: Group) -> Steps[None]:
    """Read the retention of the commit log, and its marks; damaged ones are reset, and more is kept for a while."""
    journaled = group.journal.nodes.get(paths.group(group.name))
    kept = record if journaled is None else Group.from_json(journaled)
    if kept.revision > record.revision:  # ZooKeeper was restored from a backup, and has an older setting
        record = replace(record, retention=kept.retention, revision=kept.revision)
        if not (yield from Write([SetNode(paths.group(group.name), record.to_json())])):
            raise StaleStateError(f"group {group.name} is gone")
        logger.warning("commit-log.retention-restored group=%s source=journal", group.name)
    group.log.topic_id, group.log.retention = record.commit_log_topic_id, record.retention
    raw = yield from read_node(paths.log_marks(group.name))
    if raw is not None:
        try:
            group.log.marks = list(LogMarks.from_json(raw).marks)
        except CorruptDataError as fault:
            logger.warning("log.marks-damaged group=%s node=%s: %s", group.name, paths.log_marks(group.name), fault)


def retain_log(group: GroupState, now_ms: int) -> Steps[None]:
    """Mark the end of the commit log, and delete expired records, at intervals."""
    log, policy = group.log, policy_of(group)
    log.now_ms = group.times.earliest(now_ms)
    if group.times.differ or not group.housekeeping.is_due("commit log", now_ms, group.settings.retention_check_ms):
        return
    place: Partition = group.commit_log, 0
    # A transaction with its outcome before this end has an id given out before the counter is read.
    end = (yield from EndOffsets([place]))[place]
    yield from look_at_counter(group)
    noted_ms = group.times.stamp(max(now_ms, (yield from Now())))
    written = log.written if log.written is not None else log.marks[-1].written if log.marks else 0
    if policy.bytes != FOREVER:
        found = yield from DiskBytes([place])
        written = log.count(found[place]) if place in found else written
    kept_ms = group.settings.counters_keep_ms
    mark = LogMark(noted_ms, written, end, group.counter.note.value)
    if log.is_mark_due(mark, policy, kept_ms):
        yield from _save_marks(group, marks_to_keep([*log.marks, mark], 0, log.now_ms, kept_ms))
    at = place_to_truncate(log.marks, log.now_ms, written, policy) if policy.is_limited else None
    if at is None:
        return
    floor = log.marks[at].offset
    for spared in (yield from _read_by(group, policy)):
        floor = min(floor, spared)
    if floor > group.housekeeping.starts.get(place, 0):
        floor = yield from _delete_below(group, floor)
    kept = marks_to_keep(log.marks, at, log.now_ms, kept_ms)
    if kept != log.marks:
        yield from _save_marks(group, kept)


def needed_of_log(group: GroupState) -> int:
    """Return the offset of the commit log below which neither this leader nor a later one needs anything.

    A takeover learns earlier ends from the record of ended transactions. It also reads from the offset that the
    snapshots name, if their partitions have anything to read; so that is kept as well.
    """
    assert group.fold.ended is not None
    needed = [group.fold.ended.log_end]
    for partition, known in group.snapshots.partitions.items():
        if group.fold.positions.get(partition, 0) > (known.spared or known.needed).position:
            needed.append((known.spared or known.needed).log_position)
    return min(needed)


def _delete_below(group: GroupState, floor: int) -> Steps[int]:
    """Delete the commit log below an offset, as far as it is not needed; return the offset reached."""
    place: Partition = group.commit_log, 0
    ended = group.fold.ended
    assert ended is not None
    if ended.log_end < floor:
        yield from write_ended(group)
    floor = min(floor, needed_of_log(group))
    if floor <= group.housekeeping.starts.get(place, 0):
        return floor
    refused = yield from DeleteRecords({place: floor})
    if place in refused:
        group.counts["truncations_refused"] += 1
    else:
        group.housekeeping.starts[place] = floor
        group.counts["commit_log_truncations"] += 1
    return floor


def _read_by(group: GroupState, policy: Retention) -> Steps[list[int]]:
    """Return the offset that each awaited group has read the log up to; 0 for a group without one, or unknown now."""
    if not policy.groups:
        return []
    found = yield from GroupCommits(policy.groups)
    return [found.get(name, {}).get((group.commit_log, 0), 0) for name in policy.groups]


def _save_marks(group: GroupState, marks: list[LogMark]) -> Steps[None]:
    path, value = paths.log_marks(group.name), LogMarks(tuple(marks)).to_json()
    known = yield from read_node(path)
    operation = CreateNode(path, value) if known is None else SetNode(path, value)
    if not (yield from Write([CheckNode(paths.group(group.name)), operation])):
        raise StaleStateError(f"{path} was written by another leader")
    group.log.marks = marks


def update_group(group: GroupState, name: str, request: AdminRequest, now_ms: int) -> Steps[None]:
    """Change the retention of the commit log; records expire at the next check.

    Raises:
        InvalidRequestError: the retention is invalid.
    """
    policy = request.retention
    if policy is not None:
        policy.check()
    raw = yield from read_node(paths.group(group.name))
    if raw is None:
        raise StaleStateError(f"group {group.name} is gone")
    known = Group.from_json(raw)
    value = replace(known, retention=policy, revision=known.revision + 1).to_json()
    written = yield from Write(
        [
            DeleteNode(f"{paths.requests(group.name)}/{name}"),
            SetNode(paths.group(group.name), value),
            CreateNode(f"{paths.answers(group.name)}/{name}", AdminAnswer(ok=True, answered_ms=now_ms).to_json()),
        ]
    )
    if not written:
        raise LostRaceError(f"group {group.name} is not updated")
    group.metrics.note_answer(request.kind, ok=True)
    group.log.retention = policy
    group.housekeeping.done_ms.pop("commit log", None)
    yield from append_journal(group, {paths.group(group.name): value})
