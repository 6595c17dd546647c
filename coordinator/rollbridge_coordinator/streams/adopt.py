"""Adoption: streams over topics that exist. Nothing of a topic is changed, so it can be released at any time.

The partitions of an adopted topic, with their records, are the segments of the stream's first epoch. The stream has in
addition a buffer topic, nodes in ZooKeeper, and one node with the topic's name, so that no two streams adopt one topic.
Release is the deletion of these, step by step (:mod:`rollbridge_coordinator.streams.create`), so both are safe at any
point of a crash.

The topic still belongs to its owner, who may change it. Leaders check it at intervals:

=====================  ===============================================================================================
change                 answer
=====================  ===============================================================================================
settings were changed  the new limits are recorded, and writers honour them from then on
partitions were added  they are included: an epoch that has grown from the present one puts keys where the partitioner
                       puts them from then on, and open transactions continue in it
topic is deleted       the error state ``topic-deleted``: commits end as aborted, and the topic can be released
markers do not fit     the error state ``topic-closed``: ``max.message.bytes`` is below the size of Kafka's markers, so
                       commits wait until it is not
topic was recreated    the error state ``topic-recreated``, with the same consequences
=====================  ===============================================================================================

Each is known by the topic's id. A stream that has left its topic no longer watches it; before records are deleted
there, or copied from there, its id is checked. No action of its owner ends a leader's term, or delays another stream. A
topic that its owner closes is not left: that takes a scale with ``--leave-topic``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import EPOCH_MAX
from rollbridge.errors import ConflictError, InvalidNameError, InvalidRequestError, NewerFormatError, NotFoundError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import TOPIC_CLOSED, TOPIC_DELETED, TOPIC_RECREATED, WATCHED, StreamFault
from rollbridge.metadata.records import (
    INTERNAL_BUFFERS,
    SEGMENTS_MAX,
    CheckNode,
    Coordinator,
    CreateNode,
    DeleteNode,
    NodeOperation,
    SetNode,
    check_segments,
)
from rollbridge.metadata.requests import AdminRequest
from rollbridge.stream.config import FOREVER, RECORD_BYTES_MAX_DEFAULT, Retention, StreamConfig, TopicLimits
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import Partitioner, even_ranges
from rollbridge.stream.names import TOPIC_NAME_MAX, StreamName, check_adoptable
from rollbridge.stream.scaling import ScalingPolicy
from rollbridge_coordinator.commit.refusals import hide_fault, refuse_lost, show_fault, unsealed_fault
from rollbridge_coordinator.core.effects import (
    DescribeTopics,
    EffectRefusedError,
    EnsureNodes,
    ReadCounter,
    ReadNodes,
    SetTopicConfig,
    TopicIds,
    TopicState,
    Write,
    read_children,
    read_node,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import LedStream
from rollbridge_coordinator.core.waits import StaleStateError

MARKER_BYTES: Final = 78
"""Size of Kafka's own transaction markers. On a topic that takes none, no native transaction can end, and Kafka does
not retry when the limit is raised: commits wait before they touch it.
"""
LOST_CHECK_MS: Final = 1_000
logger = logging.getLogger(__name__)

NEEDED: Final = frozenset({"READ", "WRITE", "DESCRIBE"})
"""Operations that a leader needs on an adopted topic."""


def look_at_topic(topic: str) -> Steps[TopicState]:
    """Return the description of a topic that is to be adopted.

    Raises:
        InvalidNameError: it is an internal topic.
        NotFoundError, ConflictError, InvalidRequestError: it does not exist, is sealed, or this leader may not use it.
    """
    check_adoptable(topic)
    try:
        found = yield from DescribeTopics([topic])
    except EffectRefusedError as refused:
        raise _lacks(topic, f"may not describe it or its settings ({refused.code})") from refused
    state = None if found is None else found.get(topic)
    if state is None:
        raise NotFoundError(f"topic {topic} does not exist; nothing was written")
    if state.is_sealed:
        raise ConflictError(
            f"topic {topic} is sealed, so it takes no records; nothing was written; if that is not on purpose: "
            f"kafka-configs --alter --topic {topic} --delete-config max.message.bytes,compression.type"
        )
    missing = sorted(NEEDED - state.operations)
    if missing and state.operations:
        raise _lacks(topic, f"lacks {', '.join(missing)} on it")
    return state


def _lacks(topic: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"topic {topic} cannot be adopted: the coordinator {what}; nothing was written; `rollbridge access kafka-acls "
        "coordinator` prints the commands that grant its rights"
    )


def adopted_stream(
    config: StreamConfig, request: AdminRequest, state: TopicState, now_ms: int, base: int
) -> Steps[tuple[StreamConfig, EpochHistory]]:
    """Return settings and history of a stream over a topic as it is; ``base`` is where sequence ids begin.

    Partition numbers are those of Kafka, even if a former life of the stream has used them: they name the same
    partitions. The buffer has an internal name, unless a present coordinator would not lead the stream then.
    """
    check_segments(config.name, state.partitions)
    limits = TopicLimits.of(state.config)
    buffer = config.name.internal_buffer_topic(config.first_epoch)
    longest = len(config.name.internal_buffer_topic(EPOCH_MAX))  # all lives of the stream have names of one kind
    if longest > TOPIC_NAME_MAX or not (yield from _all_know(INTERNAL_BUFFERS)):
        buffer = ""
    return (
        replace(
            config,
            buffer=buffer,
            topic=request.topic,
            partitioner=str(Partitioner.parse(request.partitioner)),
            partitions=state.partitions,
            topic_id=state.topic_id,
            limits=limits,
            kept_ms=kept_ms(state.config),
            record_bytes_max=record_bytes_max(limits),
        ),
        EpochHistory.create(even_ranges(state.partitions), now_ms, config.first_epoch, base, 0),
    )


def _all_know(what: str) -> Steps[bool]:
    """Return True if all present coordinators support a feature, as those of newer releases do."""
    nodes = yield from ReadNodes([paths.coordinator(name) for name in (yield from read_children(paths.COORDINATORS))])
    for raw in nodes.values():
        with suppress(NewerFormatError):
            if raw is not None and (not raw or what not in Coordinator.from_json(raw).knows):
                return False
    return True


def kept_ms(config: Mapping[str, str]) -> int:
    """Return the time that a topic keeps records, ms: ``FOREVER`` if it deletes none by age."""
    if "delete" not in config["cleanup.policy"].split(","):
        return FOREVER
    return max(int(config.get("retention.ms", FOREVER)), FOREVER)


def check_topic_retention(topic: str, retention: Retention) -> None:
    """Raise InvalidRequestError for limits on an adopted topic's records; groups to wait for are valid."""
    if retention.is_limited:
        raise InvalidRequestError(
            f"what topic {topic} keeps is its owner's to say, by the settings retention.ms and retention.bytes of the "
            "topic itself: a stream on it takes no limits of its own, only groups for which a truncation waits; "
            "nothing was changed"
        )


def check_topic_scaling(topic: str, policy: ScalingPolicy | None) -> None:
    """Raise InvalidRequestError for a policy: a scale would leave the adopted topic, which takes a request."""
    if policy is not None and not policy.is_fixed:
        raise InvalidRequestError(
            f"the partitions of topic {topic} are its owner's, and a scale would seal it for everybody, so a stream on "
            "it is not scaled by its load; leave the topic first (stream scale --leave-topic), or create a stream; "
            "nothing was changed"
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
    found = yield from ReadCounter(path)
    if found is None:
        return [CreateNode(path, str(stream).encode())]
    raw, version = found
    other = yield from _owner(raw, topic)
    if other is not None and other != stream:
        raise ConflictError(f"topic {topic} has been adopted by stream {other} already; nothing was written")
    # Left by a ZooKeeper that was restored from a backup. Another group may find it at the same time.
    return [SetNode(path, str(stream).encode(), version)]


def _owner(raw: bytes, topic: str) -> Steps[StreamName | None]:
    """Return the stream that a topic's node names; None if it has not adopted the topic."""
    try:
        name = StreamName.parse(raw.decode(errors="replace"))
    except InvalidNameError:
        return None
    known = yield from read_node(paths.stream(name))
    return name if known is not None and StreamConfig.from_json(known).topic == topic else None


def unclaim(config: StreamConfig) -> Steps[list[NodeOperation]]:
    """Return the write that releases a topic; none if it is not, or no longer, the stream's."""
    if not config.topic:
        return []
    path = paths.adopted(config.topic)
    raw = yield from read_node(path)
    return [DeleteNode(path)] if raw == str(config.name).encode() else []


# Leaving a topic, and opening it again


def note_settings(group: GroupState, stream: LedStream, now_ms: int) -> Steps[StreamConfig]:
    """Return the stream's record with the settings that a seal of its topic changes; unchanged if that is sealed.

    Added partitions are included before, so that their records are not left behind.

    Raises:
        ConflictError: the topic was replaced.
        InvalidRequestError: it has more partitions than a stream can have segments.
    """
    config = stream.config
    found = yield from DescribeTopics([config.topic])
    state = (found or {}).get(config.topic)
    if state is None or state.topic_id != config.topic_id:
        raise ConflictError(
            f"topic {config.topic} is not what stream {config.name} has adopted: {_difference(config, state)}; nothing "
            "was written; release it and adopt it again"
        )
    check_segments(config.name, state.partitions)
    yield from _take_in(group, stream, state, now_ms)
    config = stream.config
    if state.is_sealed:
        return config
    return replace(config, settings=state.sealing, revision=config.revision + 1)


def left_topic(stream: LedStream) -> StreamConfig:
    """Return the record of a stream with the next epoch: its own topics have the limits of streams."""
    config = stream.config
    if not stream.is_on_topic:
        return config
    bytes_max = max(config.record_bytes_max, RECORD_BYTES_MAX_DEFAULT)
    return replace(config, limits=None, record_bytes_max=bytes_max, revision=config.revision + 1)


def open_again(config: StreamConfig) -> Steps[None]:
    """Restore the settings of an adopted topic, if it is sealed, and was not replaced.

    One that is open has settings by its owner, or an earlier leader has opened it.
    """
    if not config.settings:
        return
    found = yield from DescribeTopics([config.topic])
    state = (found or {}).get(config.topic)
    if state is not None and state.topic_id == config.topic_id and state.is_sealed:
        yield from SetTopicConfig(config.topic, config.settings)


def is_its_topic(config: StreamConfig) -> Steps[bool]:
    ids = yield from TopicIds([config.topic])
    return ids.get(config.topic) == config.topic_id


# Watching


def watch_topics(group: GroupState, now_ms: int) -> Steps[None]:
    """Check the adopted topics, at intervals, for changes by their owners."""
    adopted = [item for item in group.streams.values() if item.config.topic]
    if not adopted or not group.housekeeping.is_due("topics", now_ms, _interval_ms(group)):
        return
    on_topic = [item for item in adopted if item.is_on_topic]
    found = yield from _describe(sorted({item.config.topic for item in on_topic}))
    for stream in adopted:
        if not stream.is_on_topic:
            yield from _lift(group, stream)  # it has left the topic, so nothing waits for that
        elif stream.config.topic in found:
            state = found[stream.config.topic]
            yield from _judge(group, stream, state, now_ms)
            # What a sealed topic takes says nothing of what its owner wants.
            if state is not None and state.topic_id == stream.config.topic_id and not state.is_sealed:
                yield from _keep_limits(group, stream, state)
                yield from _take_in(group, stream, state, now_ms)
            yield from _keep_claim(stream)


def _describe(topics: Sequence[str]) -> Steps[dict[str, TopicState | None]]:
    """Return descriptions of topics, None for deleted ones; those that brokers do not report now are left out."""
    if not topics:
        return {}
    found = yield from DescribeTopics(topics, optional=True)
    if found is not None:
        return {topic: found.get(topic) for topic in topics}
    told: dict[str, TopicState | None] = {}
    for topic in topics if len(topics) > 1 else ():  # one that may not be described hides no other
        told |= yield from _describe([topic])
    return told


def _interval_ms(group: GroupState) -> int:
    """Return the interval of checks; shorter while a commit waits for a lost topic, as a check decides it."""
    most = group.settings.topic_check_ms
    if group.waits.faults and any(
        group.waits.faults.is_lost(group.waits_for(item) or "") for item in group.fold.decided.values()
    ):
        return min(LOST_CHECK_MS, most)
    return most


def _lift(group: GroupState, stream: LedStream) -> Steps[None]:
    """Lift the fault that an earlier check of a stream's topic had found."""
    name = str(stream.config.name)
    known = group.waits.faults.get(name)
    if known is None or known.code not in WATCHED or group.is_suspended(name):
        return
    group.waits.faults.lift(name)
    group.waits.faults.news.append(f"stream {name}: topic {stream.config.topic} delays nothing any more")
    if stream.history.unsealed():
        fault = unsealed_fault(known.since_ms)
        group.waits.faults.restore(name, fault)
        yield from show_fault(group, name, fault)
    else:
        yield from hide_fault(stream.config.name)


def _judge(group: GroupState, stream: LedStream, state: TopicState | None, now_ms: int) -> Steps[None]:
    name, config = str(stream.config.name), stream.config
    code = fault_code(config, state)
    known = group.waits.faults.get(name)
    if code is None:
        yield from _lift(group, stream)
        return
    if group.is_suspended(name):
        return  # it waits anyway, half way to topics of its own
    reason = f"topic {config.topic} {_difference(config, state)}; {_remedy(code)}"
    if known is None or known.code != code:
        fault = StreamFault(reason, code, config.topic, now_ms)
        group.waits.faults.restore(name, fault)
        group.waits.faults.news.append(f"stream {name}: {reason}")
        group.counts["stream_faults"] += 1
        yield from show_fault(group, name, fault)
    if group.waits.faults.is_lost(name):
        refuse_lost(group, name, reason, now_ms)


def fault_code(config: StreamConfig, state: TopicState | None) -> str | None:
    """Return the fault code of an adopted topic; None if it is unchanged."""
    if state is None:
        return TOPIC_DELETED
    if state.topic_id != config.topic_id:
        return TOPIC_RECREATED
    if _batch_bytes_max(state) < MARKER_BYTES:
        return TOPIC_CLOSED
    return None


def _batch_bytes_max(state: TopicState) -> int:
    try:
        return TopicLimits.of(state.config).batch_bytes_max
    except InvalidRequestError:
        return MARKER_BYTES  # it is not told


def _remedy(code: str) -> str:
    if code == TOPIC_CLOSED:
        return "set it to what records need; waiting commits then continue"
    return "release it and adopt it again"


def _difference(config: StreamConfig, state: TopicState | None) -> str:
    if state is None:
        return "was deleted"
    if state.topic_id != config.topic_id:
        return f"was deleted and created again (its id is {state.topic_id}, and was {config.topic_id})"
    room = _batch_bytes_max(state)
    return f"takes no transaction markers: max.message.bytes is {room}, and a marker has {MARKER_BYTES} bytes"


def _take_in(group: GroupState, stream: LedStream, state: TopicState, now_ms: int) -> Steps[None]:
    """Make an epoch with the partitions that the topic's owner has added; nothing is sealed, no work waits."""
    config = stream.config
    if state.partitions <= config.partitions or group.is_half_done(str(config.name)):
        return
    if state.partitions > SEGMENTS_MAX:
        logger.error(
            "stream.partitions-unread stream=%s topic=%s partitions=%d segments_max=%d",
            *(config.name, config.topic, state.partitions, SEGMENTS_MAX),
        )
        return
    record = stream.history.plan_growth(state.partitions, now_ms)
    grown = replace(config, partitions=state.partitions, revision=config.revision + 1)
    taken = yield from Write(
        [
            CreateNode(paths.epoch(config.name, record.epoch), record.to_json()),
            SetNode(paths.stream(config.name), grown.to_json()),
        ]
    )
    if not taken:
        raise StaleStateError(
            f"epoch {record.epoch} of {config.name} was made by another leader, or the stream is gone"
        )
    stream.history, stream.config = stream.history.with_records(record), grown
    group.counts["topic_changes"] += 1
    group.waits.faults.news.append(
        f"stream {config.name}: topic {config.topic} has {state.partitions} partitions, and had {config.partitions}: "
        f"all are its segments from epoch {record.epoch} on"
    )


def _keep_limits(group: GroupState, stream: LedStream, state: TopicState) -> Steps[None]:
    try:
        limits = TopicLimits.of(state.config)
    except InvalidRequestError as fault:
        logger.warning('stream.limits-unreadable stream=%s reason="%s"', stream.config.name, fault)
        return
    config = replace(
        stream.config, limits=limits, kept_ms=kept_ms(state.config), record_bytes_max=record_bytes_max(limits)
    )
    if config == stream.config:
        return
    config = replace(config, revision=config.revision + 1)
    if not (yield from Write([SetNode(paths.stream(config.name), config.to_json())])):
        raise StaleStateError(f"stream {config.name} is gone")
    stream.config = config
    group.counts["topic_changes"] += 1
    logger.info(
        'stream.limits-changed stream=%s topic=%s limits="%s" retention_ms=%d',
        config.name,
        config.topic,
        limits,
        config.kept_ms,
    )


def _keep_claim(stream: LedStream) -> Steps[None]:
    """Write again that the topic is the stream's; a ZooKeeper that was restored and repaired may lack it."""
    config = stream.config
    path, value = paths.adopted(config.topic), str(config.name).encode()
    found = yield from ReadCounter(path)
    if found is not None and found[0] == value:
        return
    if found is None:
        yield from EnsureNodes([paths.TOPICS])
        yield from Write([CheckNode(paths.stream(config.name)), CreateNode(path, value)])
    elif (yield from _owner(found[0], config.topic)) is None:
        yield from Write([CheckNode(paths.stream(config.name)), SetNode(path, value, found[1])])


def leaving(
    stream: LedStream, seal: Sequence[int], ranges: Sequence[tuple[float, float]]
) -> tuple[tuple[int, ...], tuple[tuple[float, float], ...]]:
    """Return what a scale that leaves the adopted topic seals, and its ranges: all of it, as Kafka closes it as a
    whole.

    Segments that were not requested are replaced by one of the same range each.
    """
    rest = [item for item in stream.history.active.segments if item.id.number not in seal]
    return (
        (*seal, *(int(item.id.number) for item in rest)),
        (*ranges, *((item.range.low, item.range.high) for item in rest)),
    )


def refuse_to_leave(stream: LedStream) -> InvalidRequestError:
    """Return the error of a scale that would leave an adopted topic without a request to."""
    config = stream.config
    return InvalidRequestError(
        f"a scale of {config.name} leaves the topic {config.topic} that it has adopted: the topic is sealed, so it "
        "takes no more records, and the stream continues in topics of its own, which native clients do not know; "
        "give "
        "--leave-topic (leave_topic=True) if that is what you want; nothing was changed"
    )
