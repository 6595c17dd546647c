"""Snapshots in the simulation: after each takeover, the state must be what a replay of everything gives."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from coordinator.tests.sim_world import Entry, World, shard
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.owners import Fences
from rollbridge.buffer.replay import OngoingTransactions, decode_ongoing
from rollbridge.buffer.snapshots import Snapshot, decode_segment, decode_snapshot
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.errors import CorruptDataError
from rollbridge.stream.names import Partition, snapshot_indexes_topic, snapshot_segments_topic, snapshot_topic
from rollbridge_coordinator.core.state import GroupState

SNAPSHOT_DEFECTS = ("hasty-snapshot", "lost-aborts", "lost-segments")
ONGOING_DEFECTS = ("hasty-ongoing", "lost-ongoing", "lost-frames")
"""A place in the commit log that is too far on is none for leaders, who read from where the list of ended transactions
ends; for previews it is, see "deaf" in :mod:`coordinator.tests.sim_preview`."""


def topics(scope: str) -> list[str]:
    """The topics of snapshots."""
    return [snapshot_indexes_topic(scope), snapshot_topic(scope), snapshot_segments_topic(scope)]


def spoil(value: bytes | None, faults: frozenset[str]) -> bytes | None:
    """A snapshot as a leader with a defect writes it: each is well-formed and says something that is not so."""
    if value is None or not faults.intersection((*SNAPSHOT_DEFECTS, *ONGOING_DEFECTS)):
        return value
    with suppress(CorruptDataError):
        return _spoil_ongoing(decode_ongoing(value), faults).encode()
    try:
        snapshot: Snapshot = decode_snapshot(value)
    except CorruptDataError:
        return value
    if "hasty-snapshot" in faults:
        snapshot = replace(snapshot, max_read_position=snapshot.position)
    if "lost-aborts" in faults:
        snapshot = replace(snapshot, aborts=())
    if "lost-segments" in faults:
        snapshot = replace(snapshot, indexes=())
    return snapshot.encode()


def _spoil_ongoing(record: OngoingTransactions, faults: frozenset[str]) -> OngoingTransactions:
    if "hasty-ongoing" in faults:
        record = replace(record, replay_position=record.position)
    if "lost-ongoing" in faults:
        record = replace(record, transactions=record.transactions[1:])
    if "lost-frames" in faults:
        record = replace(record, transactions=tuple(replace(i, frames=i.frames[1:]) for i in record.transactions))
    return record


def _is_gone(group: GroupState, transaction: BufferedTransaction | None) -> bool:
    """Return whether none of its streams, and so none of its buffers, is there any more."""
    return transaction is not None and transaction.begin.streams.keys().isdisjoint(group.partitions().values())


def restored_faults(world: World, group: GroupState, fences: Fences) -> list[str]:
    """What a leader that has just taken over knows otherwise than one that replays everything that is left.

    Both know the same sessions of clients, ``fences``, when they begin to read.
    """
    found: list[str] = []
    if group.commit_log not in world.topics:
        return found  # somebody has deleted it in this moment
    summary = world.summary(group.commit_log)
    limits = BufferLimits(cache_bytes_max=400, cache_bytes_per_transaction_max=200)
    whole = BufferFold(limits, lambda *_: None, summary.terminated)
    whole.late = {}
    whole.fences = fences
    for (topic, number), stream in group.partitions().items():
        end = group.fold.positions.get((topic, number), 0)
        log = world.topics.get(shard(topic, number))
        if log is None and world.lost_buffers:
            return found  # it was deleted while it was taken over, and nothing is left to replay
        assert log is not None
        for offset, entry in enumerate(log.entries[log.start : end], log.start):
            whole.fold(stream, (topic, number), offset, entry.appended_ms, *entry.item)
    for transaction in whole.open.keys() | group.fold.open.keys():
        expected, actual = whole.open.get(transaction), group.fold.open.get(transaction)
        if (expected is None or actual is None) and not group.counter.is_given(transaction):
            continue  # a forged id may be refused more than once
        is_lost = expected is None and actual is not None and actual.reason.startswith("lost")
        if is_lost and (world.lost_buffers or _is_gone(group, actual)):
            continue  # a record tells of it, and nothing else any more
        if expected is None or actual is None:
            found.append(f"{transaction.hex()} is open: {actual is not None}, by a full replay: {expected is not None}")
        elif actual.is_refused and (actual.state, expected.state) == (State.ABORTING, State.COMMITTING):
            continue  # refused in a rolling commit that was half done, and not logged yet
        elif _places(actual) != _places(expected):
            found.append(f"{actual} has other frames than by a full replay")
        elif _known(actual) != _known(expected):
            found.append(f"{actual} is otherwise than by a full replay: {_known(actual)}, not {_known(expected)}")
    for partition in group.partitions():
        known, is_whole = aborted_of(world, group, partition)
        missing = is_whole and {item for item, begun in whole.late.items() if partition in begun.first_offsets} & (
            summary.aborted - known
        )
        ended, first = group.fold.ended, world.topics[group.commit_log].start
        assert ended is not None
        # Snapshots lack what was truncated when one replaced a damaged one, and what is said again, or for the first
        # time, when it has ended and what stood there then is truncated; that it has ended is known all the same, by
        # the time of its begin if that list was damaged, too.
        entries, outcomes = world.topics[shard(*partition)].entries, world.topics[group.commit_log].entries
        missing = {
            item
            for item in missing or ()
            if group.counter.is_given(item)
            and not (
                (item in ended or ended.is_lost(item, entries[whole.late[item].first_offsets[partition]].appended_ms))
                and (
                    summary.terminated[item] < first
                    or item in world.said_again
                    or _came_late(
                        entries[whole.late[item].first_offsets[partition]], outcomes[summary.terminated[item]]
                    )
                )
            )
        }
        if missing:
            found.append(f"{len(missing)} aborted transactions of {partition[0]} are forgotten")
        if known - summary.aborted:
            found.append(f"{len(known - summary.aborted)} transactions of {partition[0]} are no aborted ones")
    return found


def _came_late(begin: Entry, outcome: Entry) -> bool:
    """Whether the first BEGIN frame that is left of a transaction came when it had ended."""
    return begin.appended_ms > outcome.appended_ms


def _places(transaction: BufferedTransaction) -> list[tuple[Partition, int]]:
    """Where its frames stand; the order depends on how the partitions were interleaved."""
    return sorted((item.partition, item.offset) for item in transaction.frames)


def _known(transaction: BufferedTransaction) -> list[object]:
    """What else is known of it; how much of what came after its end was decided depends on the order of partitions."""
    item = transaction
    if item.state is not State.OPEN:
        return [item.begin, item.state]
    streams = list(item.begin.streams)
    owners = [item.owners.of(stream) for stream in streams], item.owners.part, item.owners.session
    return [item.begin, item.state, item.begun_in, item.first_offsets, item.last_count, item.bytes, owners]


def aborted_of(world: World, group: GroupState, partition: Partition) -> tuple[set[bytes], bool]:
    """What a leader counts as aborted, and whether that is all; a damaged segment is noticed when it is read."""
    aborted = group.snapshots.partitions[partition].aborted
    known = set(aborted.unsealed)
    for index in aborted.indexes:
        try:
            row = world.topics[group.snapshots.segments_topic].entries[index.persistent_position].item
            known.update(decode_segment(row and row[1]).aborts)
        except CorruptDataError:
            return known, False
    return known, True
