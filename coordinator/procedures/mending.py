"""Limits of timestamps: segments that an older version made get those that this version gives to new ones.

Event times of any past and future are valid on every stream. Kafka's own limit, an hour ahead, stands on segments that
were made before that was set; plain and conditional writers, which may not change settings, would be refused there. So
a new leader looks through the active segments once, some at a time, beside its other work.
"""

from __future__ import annotations

import logging
from typing import Final

from coordinator.effects import Refused, TopicSpec
from coordinator.group import GroupState
from coordinator.steps import Steps, try_to_mend_topics
from coordinator.topics import segment_topic_spec

logger = logging.getLogger(__name__)

TOPICS_AT_ONCE: Final = 50
EVERY_MS: Final = 1_000
"""How often so many topics are looked at: brokers take a few milliseconds for them, in which transactions wait."""


def mend_timestamps(group: GroupState, now_ms: int) -> Steps[None]:
    """Look at the next of the segments that have not been looked at in this term."""
    if group.unmended is None:
        group.unmended = [
            (name, item.id) for name, stream in group.streams.items() for item in stream.history.active.segments
        ]
    if not group.unmended or not group.housekeeping.is_due("limits of timestamps", now_ms, EVERY_MS):
        return
    chosen = group.unmended[-TOPICS_AT_ONCE:]
    specs = [
        segment_topic_spec(group.streams[name].config, segment)
        for name, segment in chosen
        if name in group.streams and segment in group.streams[name].history.active.segment_ids
    ]
    if specs and not (yield from _mend(group, specs)):
        return
    del group.unmended[-TOPICS_AT_ONCE:]


def _mend(group: GroupState, specs: list[TopicSpec]) -> Steps[bool]:
    """Mend topics, but for those of which that is refused; False if it is to be tried again."""
    try:
        return (yield from try_to_mend_topics(specs)) is not None
    except Refused as refused:
        if len(specs) == 1:
            logger.warning("%s: the limits of timestamps of %s stay: %s", group.name, specs[0].name, refused.reason)
            return True
    for spec in specs:
        if not (yield from _mend(group, [spec])):
            return False
    return True
