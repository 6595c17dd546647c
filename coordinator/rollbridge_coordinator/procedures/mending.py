"""Settings of active segments: a new leader looks through them once, some at a time, beside its other work.

Event times of any past and future are valid on every stream. Kafka's own limit, an hour ahead, stands on segments that
were made before that was set; plain and conditional writers, which may not change settings, would be refused there. So
these get the limits that this version gives to new segments.

One that is closed although nothing is under way with it was closed for a change that is not on record any more: its
leader died when it had just given that up, or ZooKeeper was set back since. It gets a successor.
"""

from __future__ import annotations

import logging
from typing import Final

from rollbridge.model.names import parse_segment_topic
from rollbridge_coordinator.procedures.reopening import reopen
from rollbridge_coordinator.state.effects import Refused, TopicSpec
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.steps import Steps, try_to_mend_topics
from rollbridge_coordinator.state.topics import segment_topic_spec

logger = logging.getLogger(__name__)

TOPICS_AT_ONCE: Final = 50
EVERY_MS: Final = 1_000
"""How often so many topics are looked at: brokers take a few milliseconds for them, in which transactions wait."""


def mend_active(group: GroupState, now_ms: int) -> Steps[None]:
    """Look at the next of the segments that have not been looked at in this term."""
    if group.unmended is None:
        group.unmended = [
            (name, item.id) for name, stream in group.streams.items() for item in stream.history.active.segments
        ]
    if not group.unmended or not group.housekeeping.is_due("active segments", now_ms, EVERY_MS):
        return
    chosen = group.unmended[-TOPICS_AT_ONCE:]
    specs = [
        segment_topic_spec(group.streams[name].config, segment)
        for name, segment in chosen
        if name in group.streams and segment in group.streams[name].history.active.segment_ids
    ]
    wrong = (yield from _mend(group, specs)) if specs else []
    if wrong is None:
        return
    del group.unmended[-TOPICS_AT_ONCE:]
    yield from reopen(group, sorted({str(parse_segment_topic(topic)[0]) for topic in wrong}), now_ms)


def _mend(group: GroupState, specs: list[TopicSpec]) -> Steps[list[str] | None]:
    """Mend topics, but for those of which that is refused; gives those that are not as they should be.

    Gives None if it is to be tried again.
    """
    try:
        found = yield from try_to_mend_topics(specs)
    except Refused as refused:
        if len(specs) == 1:
            logger.warning("%s: %s stays as it is: %s", group.name, specs[0].name, refused.reason)
            return []
    else:
        return None if found is None else list(found)
    wrong: list[str] = []
    for spec in specs:
        more = yield from _mend(group, [spec])
        if more is None:
            return None
        wrong += more
    return wrong
