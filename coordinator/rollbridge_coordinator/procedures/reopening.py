"""Successors for segments that have been closed in vain.

A seal closes topics first, and may be refused, or come to nothing, after that; a change that began with it may then be
given up, or may not be on record any more because ZooKeeper was set back. Nobody can open a topic again without
breaking what others have inferred from its end. So a scale gives the same key ranges new segments, as soon as that is
possible; it waits among the group's ``suspended`` works until then, with its stream, and nobody else waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rollbridge.model import paths
from rollbridge.model.nodes import CreateNode
from rollbridge.model.under_way import Scaling
from rollbridge_coordinator.procedures.suspended import take_up
from rollbridge_coordinator.state.effects import Refused
from rollbridge_coordinator.state.errors import StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.steps import Steps, closed_of, write


def reopen(group: GroupState, streams: Collection[str], now_ms: int) -> Steps[None]:
    """Have the active segments of streams replaced that are closed, unless that is under way."""
    for name in streams:
        stream = group.streams.get(name)
        if stream is None or group.is_half_done(name):
            continue
        topics = {stream.topic_of(item.id): item for item in stream.history.active.segments}
        closed = yield from find_closed(list(topics))
        segments = [item for topic, item in topics.items() if topic in closed]
        if not segments:
            continue
        scaling = Scaling(
            stream.config.name,
            "",
            int(stream.history.next_epoch),
            tuple(int(item.id.number) for item in segments),
            tuple(item.range for item in segments),
            now_ms,
            group.controller_epoch,
        )
        node = f"{paths.suspended(group.name)}/{scaling.title}"
        if not (yield from write(CreateNode(node, scaling.to_json()))):
            raise StaleStateError(f"stream {name} is scaled by someone else")
        take_up(group, node, scaling)
        group.counts["segments_reopened"] += len(segments)


def find_closed(topics: Sequence[str]) -> Steps[frozenset[str]]:
    """Return which topics are closed; none if we are not told: what is appended is refused then."""
    try:
        return (yield from closed_of(topics))
    except Refused:
        return frozenset()
