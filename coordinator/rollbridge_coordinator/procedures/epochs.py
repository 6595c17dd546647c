"""Expiry of epochs: records of epochs of which nothing is left are removed from ZooKeeper, the oldest first.

Nodes and what is kept of them go in one multi, so whoever reads the history finds the epochs or what they left. A scale
or a rolling commit names epochs as well, but neither is under way here: commits and scales of a group run on one line,
and streams of which one waits half done are left alone.
"""

from __future__ import annotations

import logging

from rollbridge.model import paths
from rollbridge.model.expiry import first_needed, step_towards, without_epochs
from rollbridge.model.nodes import DeleteNode, bytes_of
from rollbridge.model.records import StreamState as Lifecycle
from rollbridge.model.records import Truncation
from rollbridge_coordinator.procedures.retention import save
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.retention import marks_within
from rollbridge_coordinator.state.steps import Steps
from rollbridge_coordinator.state.streams import StreamState

logger = logging.getLogger(__name__)


def drop_epochs(group: GroupState, now_ms: int) -> Steps[None]:
    """Drop, now and then, the epochs that nobody needs any more."""
    settings = group.settings
    if group.times.differ or not group.housekeeping.is_due("epochs", now_ms, settings.bookkeeping_ms):
        return
    truncated = [item for item in group.streams.values() if item.history.removed]
    references = group.fold.references() if truncated else {}
    for stream in truncated:
        if stream.config.state is not Lifecycle.ACTIVE or group.is_half_done(str(stream.config.name)):
            continue
        reference, limited = references.get(str(stream.config.name)), stream.config.retention.is_limited
        first = first_needed(
            stream.history,
            topics_left=stream.removing,
            since_ms=group.times.earliest(now_ms) - settings.epochs_keep_ms,
            references=() if reference is None else (reference,),
            named=[segment for mark in stream.marks for segment in mark.cut] if limited else (),
        )
        while stream.history.first < first:
            if not (yield from _drop_before(group, stream, step_towards(stream.history, first))):
                break


def _drop_before(group: GroupState, stream: StreamState, first: int) -> Steps[bool]:
    """Drop the epochs before one, or some of them; False if what would be kept of them does not fit into a node."""
    name = stream.config.name
    while True:
        kept = without_epochs(stream.history, first)
        value = Truncation(kept.removed, stream.removing, kept.foundation).to_json()
        doomed = range(stream.history.first, first)
        gone = [DeleteNode(paths.epoch(name, item)) for item in doomed]
        room = group.settings.write_bytes_max - len(value)
        if sum(map(bytes_of, gone)) <= room:
            break
        first = stream.history.first + len(doomed) // 2
        if first == stream.history.first:
            logger.warning("epochs of stream %s are not dropped: what is kept of them would be too much", name)
            return False
    yield from save(stream, paths.truncation(name), value, *gone)
    stream.history = kept
    stream.marks = marks_within(kept, stream.marks)
    group.counts["epochs_dropped"] += len(doomed)
    return True
