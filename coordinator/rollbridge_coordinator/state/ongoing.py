"""When a partition's open transactions are written down, and which of them: so that a takeover stays short. Pure.

A record costs as much as its transactions have frames, so one is only written when as much has come since; and as there
are at least so many messages between two records, what they cost together is in proportion to what was written.
"""

from __future__ import annotations

from typing import Final

from rollbridge.model.ongoing import FRAME_BYTES, TRANSACTION_BYTES, OngoingTransaction, OngoingTransactions
from rollbridge.model.transaction import State
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.snapshots import Needed, PartitionSnapshots, Plan

BYTES_MAX: Final = 8 * 1024 * 1024
"""Of one record: about half a million frames. What does not fit is read again, as everything after it."""


def plan_ongoing(group: GroupState, plan: Plan) -> OngoingTransactions | None:
    """The record to write with a snapshot; None if it is not worth it, or not now."""
    partition, draft = plan.partition, plan.draft
    known = group.snapshots.partitions[partition]
    lag = known.lag(draft.position, draft.commit_log_end)
    known.frames = 0
    if lag <= group.settings.snapshots.transaction_buffer_snapshot_replay_max:
        return None
    found = [item for item in group.fold.open.values() if partition in item.first_offsets]
    known.frames = sum(len(item.frames) for item in found)
    if lag <= known.frames:
        return None
    needed = needed_with(known, plan) or Needed(draft.max_read_position, draft.commit_log_position)
    found.sort(key=lambda item: item.first_offsets[partition])
    if any(item.state is not State.OPEN and item.first_offsets[partition] < needed.position for item in found):
        return None  # it is about to go
    known.tried = Needed(draft.position, draft.commit_log_end)
    stream = group.partitions()[partition]
    listed: list[OngoingTransaction] = []
    room = BYTES_MAX
    for item in found:
        room -= TRANSACTION_BYTES + FRAME_BYTES * len(item.frames)
        if item.state is not State.OPEN or item.id not in group.recorded or room < 0:
            break
        listed.append(OngoingTransaction.of(item, stream, partition))
    rest = found[len(listed) :]
    record = OngoingTransactions(
        partition=partition,
        topic_id=draft.topic_id,
        generation=draft.generation,
        controller_epoch=draft.controller_epoch,
        position=draft.position,
        replay_position=min([item.first_offsets[partition] for item in rest], default=draft.position),
        commit_log_position=min([item.log_position for item in rest], default=draft.commit_log_end),
        transactions=tuple(listed),
    )
    saved = record.replay_position - needed.position, record.commit_log_position - needed.log_position
    return record if listed and min(saved) >= 0 and max(saved) > 0 else None


def needed_with(known: PartitionSnapshots, plan: Plan) -> Needed | None:
    """What a new leader needs by the record that there is, once a snapshot has been taken; None if it is of no use."""
    spared = known.spared
    return spared if spared is not None and spared.position > plan.draft.max_read_position else None
