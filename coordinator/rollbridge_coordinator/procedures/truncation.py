"""Truncation of transaction buffers: what every leader has done with is deleted.

Below the low-water mark of a partition every transaction is decided and merged, and its outcome is on the commit log.
That stays so, whoever leads, so a leader that was left behind and truncates late does no harm.

Source: PIP-196, the max read position; DESIGN of the buffer in docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollbridge.model.buffered import Partition
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.steps import Steps, delete_records


def needed_from(group: GroupState) -> Mapping[Partition, int]:
    """Per buffer partition the offset below which nobody needs anything any more, neither this leader nor a later one.

    Whatever makes a new leader read from further back has to lower it here.
    """
    return group.fold.low_water()


def truncate_buffers(group: GroupState, now_ms: int) -> Steps[None]:
    """Delete what nobody needs from the buffers, now and then."""
    work = group.housekeeping
    if not work.is_due("truncate_buffers", now_ms, group.settings.truncate_buffers_ms, at_once=False):
        return
    present = group.partitions()
    before = {
        partition: offset
        for partition, offset in needed_from(group).items()
        if partition in present and offset > work.starts.get(partition, 0)
    }
    if not before:
        return
    refused = yield from delete_records(before)
    for partition, offset in before.items():
        if partition not in refused:
            work.starts[partition] = offset
            group.counts["buffer_truncations"] += 1
            known = group.snapshots.partitions.get(partition)
            if known is not None:
                known.log_start = offset  # snapshot segments about what was below are of no use any more
    group.counts["truncations_refused"] += len(refused)
