"""Adoption: streams over topics that exist. Nothing of a topic is changed, so it can be released at any time.

The partitions of an adopted topic, with the records that are there, are the segments of the stream's first epoch. What
a stream has beside them is its own: a buffer topic, nodes in ZooKeeper, and one node with the topic's name, so that no
two streams adopt one topic. Release is the deletion of these, step by step (``procedures.streams``), so both are safe
at any point of a crash.

The topic stays its owner's, who may change it under us. Leaders look at it at intervals:

=====================  ===============================================================================================
what has happened      answer
=====================  ===============================================================================================
settings were changed  the new limits are put on record, and writers honour them from then on
partitions were added  the stream is in the error state ``topic-grown``: what is open is committed, but keys of native
                       producers go elsewhere now, and readers say so; release the topic and adopt it again
topic is deleted       the error state ``topic-deleted``: commits wait, can be aborted, and the topic can be released
topic was made anew    the error state ``topic-recreated``, with the same consequences
=====================  ===============================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rollbridge.errors import ConflictError, InvalidRequestError, NotFoundError
from rollbridge.model import paths
from rollbridge.model.changes import TOPIC_DELETED, TOPIC_GROWN, TOPIC_RECREATED, WATCHED, StreamFault
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.keyspace import even_ranges
from rollbridge.model.names import StreamName, check_adoptable
from rollbridge.model.partitioners import Partitioner
from rollbridge.model.records import (
    RECORD_BYTES_MAX_DEFAULT,
    CheckNode,
    CreateNode,
    DeleteNode,
    NodeOperation,
    SetNode,
    StreamConfig,
    TopicLimits,
    check_segments,
)
from rollbridge.model.requests import AdminRequest
from rollbridge_coordinator.procedures.refusals import hide_fault, show_fault
from rollbridge_coordinator.state.effects import (
    DescribeTopics,
    EffectRefusedError,
    SetTopicConfig,
    Steps,
    TopicState,
    Write,
    read_node,
)
from rollbridge_coordinator.state.faults import StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.streams import LedStream

logger = logging.getLogger(__name__)

NEEDED: Final = frozenset({"READ", "WRITE", "DESCRIBE"})
"""What a leader must be allowed on an adopted topic."""


def look_at_topic(topic: str) -> Steps[TopicState]:
    """Return what a topic is that is to be adopted.

    Raises:
        InvalidNameError: it is an internal topic.
        NotFoundError, ConflictError, InvalidRequestError: it does not exist, is sealed, or this leader may not use
            it.
    """
    check_adoptable(topic)
    try:
        found = yield from DescribeTopics([topic])
    except EffectRefusedError as refused:
        raise _lacks(topic, f"may not look at it or at its settings ({refused.code})") from refused
    state = None if found is None else found.get(topic)
    if state is None:
        raise NotFoundError(f"topic {topic} does not exist; nothing was written")
    if state.is_sealed:
        raise ConflictError(f"topic {topic} is sealed, so it takes no records; nothing was written")
    missing = sorted(NEEDED - state.operations)
    if missing and state.operations:
        raise _lacks(topic, f"lacks {', '.join(missing)} on it")
    return state


def _lacks(topic: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"topic {topic} cannot be adopted: the coordinator {what}; nothing was written; `rollbridge access kafka-acls "
        "coordinator` prints what grants its rights"
    )


def adopted_stream(
    config: StreamConfig, request: AdminRequest, state: TopicState, now_ms: int, base: int
) -> tuple[StreamConfig, EpochHistory]:
    """Return settings and history of a stream over a topic as it is; ``base`` is where sequence ids begin.

    Partition numbers are those of Kafka, also where a former life of the stream has used them: they name the same
    partitions.
    """
    check_segments(config.name, state.partitions)
    limits = TopicLimits.of(state.config)
    return (
        replace(
            config,
            topic=request.topic,
            partitioner=str(Partitioner.parse(request.partitioner)),
            partitions=state.partitions,
            topic_id=state.topic_id,
            limits=limits,
            record_bytes_max=record_bytes_max(limits),
        ),
        EpochHistory.create(even_ranges(state.partitions), now_ms, config.first_epoch, base, 0),
    )


def record_bytes_max(limits: TopicLimits) -> int:
    """Return the largest record that a topic's limit leaves room for, or our default if that is less."""
    return min(limits.record_room, RECORD_BYTES_MAX_DEFAULT)


def claim(stream: StreamName, topic: str) -> Steps[list[NodeOperation]]:
    """Return the write that makes a topic a stream's.

    Raises:
        ConflictError: another stream has adopted it.
    """
    path = paths.adopted(topic)
    raw = yield from read_node(path)
    if raw is None:
        return [CreateNode(path, str(stream).encode())]
    other = StreamName.parse(raw.decode(errors="replace"))
    known = yield from read_node(paths.stream(other))
    if known is not None and StreamConfig.from_json(known).topic == topic and other != stream:
        raise ConflictError(f"topic {topic} has been adopted by stream {other} already; nothing was written")
    return [SetNode(path, str(stream).encode())]  # left by a ZooKeeper that was restored from a backup


def unclaim(config: StreamConfig) -> Steps[list[NodeOperation]]:
    """Return the write that gives a topic back; none if it is not, or no longer, the stream's."""
    if not config.topic:
        return []
    path = paths.adopted(config.topic)
    raw = yield from read_node(path)
    return [DeleteNode(path)] if raw == str(config.name).encode() else []


# Leaving a topic, and opening it again


def note_settings(stream: LedStream) -> Steps[StreamConfig]:
    """Return the stream's record with the settings that a seal of its topic changes; as it is if that is sealed.

    Raises:
        ConflictError: the topic is another one by now.
    """
    config = stream.config
    found = yield from DescribeTopics([config.topic])
    state = (found or {}).get(config.topic)
    if state is None or state.topic_id != config.topic_id or state.partitions != config.partitions:
        raise ConflictError(
            f"topic {config.topic} is not what stream {config.name} has adopted: {_difference(config, state)}; nothing "
            "was written; release it and adopt it again"
        )
    if state.is_sealed:
        return config
    return replace(config, settings=state.sealing, revision=config.revision + 1)


def open_again(config: StreamConfig) -> Steps[None]:
    """Give an adopted topic that was sealed its settings back, unless it is another one by now."""
    if not config.settings:
        return
    found = yield from DescribeTopics([config.topic])
    state = (found or {}).get(config.topic)
    if state is not None and state.topic_id == config.topic_id:
        yield from SetTopicConfig(config.topic, config.settings)


# Watching


def watch_topics(group: GroupState, now_ms: int) -> Steps[None]:
    """Look at the adopted topics, at intervals, for what their owners have changed."""
    adopted = [item for item in group.streams.values() if item.is_on_topic]
    if not adopted or not group.housekeeping.is_due("topics", now_ms, group.settings.topic_check_ms):
        return
    found = yield from DescribeTopics(sorted({item.config.topic for item in adopted}), optional=True)
    if found is None:
        return
    for stream in adopted:
        state = found.get(stream.config.topic)
        yield from _judge(group, stream, state, now_ms)
        if state is not None and state.topic_id == stream.config.topic_id:
            yield from _keep_limits(group, stream, state)
            yield from _keep_claim(stream)


def _judge(group: GroupState, stream: LedStream, state: TopicState | None, now_ms: int) -> Steps[None]:
    name, config = str(stream.config.name), stream.config
    code = fault_code(config, state)
    known = group.faults.get(name)
    if code is None:
        if known is not None and known.code in WATCHED:
            group.faults.resume(name)
            yield from hide_fault(config.name)
        return
    if known is not None and known.code == code:
        return
    if group.is_suspended(name):
        return  # it waits anyway, half way to topics of its own
    reason = f"topic {config.topic} {_difference(config, state)}; release it and adopt it again"
    fault = StreamFault(reason, code, config.topic, now_ms)
    group.faults.restore(name, fault)
    group.faults.news.append(f"stream {name}: {reason}")
    group.counts["stream_faults"] += 1
    yield from show_fault(group, name, fault)


def fault_code(config: StreamConfig, state: TopicState | None) -> str | None:
    """Return the code of what is wrong with an adopted topic; None if it is what was adopted."""
    if state is None:
        return TOPIC_DELETED
    if state.topic_id != config.topic_id:
        return TOPIC_RECREATED
    return TOPIC_GROWN if state.partitions != config.partitions else None


def _difference(config: StreamConfig, state: TopicState | None) -> str:
    if state is None:
        return "was deleted"
    if state.topic_id != config.topic_id:
        return f"was deleted and created again (its id is {state.topic_id}, and was {config.topic_id})"
    return (
        f"has {state.partitions} partitions, and had {config.partitions} when it was adopted; records in the others "
        "are not part of the stream"
    )


def _keep_limits(group: GroupState, stream: LedStream, state: TopicState) -> Steps[None]:
    try:
        limits = TopicLimits.of(state.config)
    except InvalidRequestError as fault:
        logger.warning("%s: %s", stream.config.name, fault)
        return
    if limits == stream.config.limits:
        return
    config = replace(
        stream.config, limits=limits, record_bytes_max=record_bytes_max(limits), revision=stream.config.revision + 1
    )
    if not (yield from Write([SetNode(paths.stream(config.name), config.to_json())])):
        raise StaleStateError(f"stream {config.name} is gone")
    stream.config = config
    group.counts["topic_changes"] += 1
    logger.info("%s: topic %s takes %s from now on", config.name, config.topic, limits)


def _keep_claim(stream: LedStream) -> Steps[None]:
    """Write down again that the topic is the stream's; a ZooKeeper that was restored and repaired may not know it."""
    config = stream.config
    path = paths.adopted(config.topic)
    if (yield from read_node(path)) is None:
        yield from Write([CheckNode(paths.stream(config.name)), CreateNode(path, str(config.name).encode())])


def leaving(
    stream: LedStream, seal: Sequence[int], ranges: Sequence[tuple[float, float]]
) -> tuple[tuple[int, ...], tuple[tuple[float, float], ...]]:
    """Return what a scale that leaves the adopted topic seals, and into what: all of it, as a seal closes all of it.

    Segments that were not asked for are replaced by one of the same range each.
    """
    rest = [item for item in stream.history.active.segments if item.id.number not in seal]
    return (
        (*seal, *(int(item.id.number) for item in rest)),
        (*ranges, *((item.range.low, item.range.high) for item in rest)),
    )


def refuse_to_leave(stream: LedStream) -> InvalidRequestError:
    """Return the error of a scale that would leave an adopted topic without being asked to."""
    config = stream.config
    return InvalidRequestError(
        f"a scale of {config.name} leaves the topic {config.topic} that it has adopted: the topic is sealed, so nobody "
        "can write to it any more, and the stream goes on in topics of its own, which native clients do not know; give "
        "--leave-topic (leave_topic=True) if that is what you want; nothing was changed"
    )
