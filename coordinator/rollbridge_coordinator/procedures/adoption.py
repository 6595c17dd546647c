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
partitions were added  they are taken in: an epoch that has grown from the present one puts keys where the partitioner
                       puts them from then on, and what is open goes on in it
topic is deleted       the error state ``topic-deleted``: commits end as aborted, and the topic can be released
markers do not fit     the error state ``topic-closed``: ``max.message.bytes`` is below the size of Kafka's markers, so
                       commits wait until it is not
topic was made anew    the error state ``topic-recreated``, with the same consequences
=====================  ===============================================================================================

Each is known by the topic's id. A stream that has left its topic does not watch it any more; before records are
deleted there, or copied from there, it is asked for its id. What its owner does to it ends no leader's term, and holds
up no other stream. A topic that its owner closes is not left: that takes a scale with ``--leave-topic``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from rollbridge.errors import ConflictError, InvalidNameError, InvalidRequestError, NewerFormatError, NotFoundError
from rollbridge.model import paths
from rollbridge.model.changes import TOPIC_CLOSED, TOPIC_DELETED, TOPIC_RECREATED, WATCHED, StreamFault
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.ids import EPOCH_MAX
from rollbridge.model.keyspace import even_ranges
from rollbridge.model.names import TOPIC_NAME_MAX, StreamName, check_adoptable
from rollbridge.model.partitioners import Partitioner
from rollbridge.model.records import (
    FOREVER,
    INTERNAL_BUFFERS,
    RECORD_BYTES_MAX_DEFAULT,
    SEGMENTS_MAX,
    CheckNode,
    Coordinator,
    CreateNode,
    DeleteNode,
    NodeOperation,
    Retention,
    SetNode,
    StreamConfig,
    TopicLimits,
    check_segments,
)
from rollbridge.model.requests import AdminRequest
from rollbridge.model.scaling import ScalingPolicy
from rollbridge_coordinator.procedures.refusals import hide_fault, refuse_lost, show_fault, unsealed_fault
from rollbridge_coordinator.state.effects import (
    DescribeTopics,
    EffectRefusedError,
    EnsureNodes,
    ReadCounter,
    ReadNodes,
    SetTopicConfig,
    Steps,
    TopicIds,
    TopicState,
    Write,
    read_children,
    read_node,
)
from rollbridge_coordinator.state.faults import StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.streams import LedStream

MARKER_BYTES: Final = 78
"""Size of Kafka's own transaction markers. On a topic that takes none, no native transaction can end, whoever has begun
it, and Kafka does not try again when the limit is raised: commits wait before they touch it."""
LOST_CHECK_MS: Final = 1_000
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
        raise ConflictError(
            f"topic {topic} is sealed, so it takes no records; nothing was written; if nobody keeps it closed on "
            f"purpose: kafka-configs --alter --topic {topic} --delete-config max.message.bytes,compression.type"
        )
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
) -> Steps[tuple[StreamConfig, EpochHistory]]:
    """Return settings and history of a stream over a topic as it is; ``base`` is where sequence ids begin.

    Partition numbers are those of Kafka, also where a former life of the stream has used them: they name the same
    partitions. The buffer has an internal name, unless a coordinator is there that would not lead the stream then.
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
    """Return whether all coordinators that are there know something; a newer one does."""
    nodes = yield from ReadNodes([paths.coordinator(name) for name in (yield from read_children(paths.COORDINATORS))])
    for raw in nodes.values():
        with suppress(NewerFormatError):
            if raw is not None and (not raw or what not in Coordinator.from_json(raw).knows):
                return False
    return True


def kept_ms(config: Mapping[str, str]) -> int:
    """Return for how many ms a topic keeps records: ``FOREVER`` if it deletes none by their age."""
    if "delete" not in config["cleanup.policy"].split(","):
        return FOREVER
    return max(int(config.get("retention.ms", FOREVER)), FOREVER)


def check_topic_retention(topic: str, retention: Retention) -> None:
    """Raise InvalidRequestError for limits of what an adopted topic keeps; groups for which truncation waits may be."""
    if retention.is_limited:
        raise InvalidRequestError(
            f"what topic {topic} keeps is its owner's to say, by the settings retention.ms and retention.bytes of the "
            "topic itself: a stream on it takes no limits of its own, only groups for which a truncation waits; "
            "nothing was changed"
        )


def check_topic_scaling(topic: str, policy: ScalingPolicy | None) -> None:
    """Raise InvalidRequestError for a policy: a scale would leave the adopted topic, which is only done if asked."""
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
    """Return the stream that a topic's node names; None if that has not adopted the topic."""
    try:
        name = StreamName.parse(raw.decode(errors="replace"))
    except InvalidNameError:
        return None
    known = yield from read_node(paths.stream(name))
    return name if known is not None and StreamConfig.from_json(known).topic == topic else None


def unclaim(config: StreamConfig) -> Steps[list[NodeOperation]]:
    """Return the write that gives a topic back; none if it is not, or no longer, the stream's."""
    if not config.topic:
        return []
    path = paths.adopted(config.topic)
    raw = yield from read_node(path)
    return [DeleteNode(path)] if raw == str(config.name).encode() else []


# Leaving a topic, and opening it again


def note_settings(group: GroupState, stream: LedStream, now_ms: int) -> Steps[StreamConfig]:
    """Return the stream's record with the settings that a seal of its topic changes; as it is if that is sealed.

    Partitions that were added are taken in before, so that what stands in them is not left behind.

    Raises:
        ConflictError: the topic is another one by now.
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
    """Return the record of a stream with the next epoch: topics of its own take what streams take."""
    config = stream.config
    if not stream.is_on_topic:
        return config
    bytes_max = max(config.record_bytes_max, RECORD_BYTES_MAX_DEFAULT)
    return replace(config, limits=None, record_bytes_max=bytes_max, revision=config.revision + 1)


def open_again(config: StreamConfig) -> Steps[None]:
    """Give an adopted topic its settings back, if it is sealed, and not another one by now.

    One that is open has what its owner has given it since then, or an earlier leader has opened it.
    """
    if not config.settings:
        return
    found = yield from DescribeTopics([config.topic])
    state = (found or {}).get(config.topic)
    if state is not None and state.topic_id == config.topic_id and state.is_sealed:
        yield from SetTopicConfig(config.topic, config.settings)


def is_its_topic(config: StreamConfig) -> Steps[bool]:
    """Return True if the topic that a stream has adopted is still there, and not another one of the same name."""
    ids = yield from TopicIds([config.topic])
    return ids.get(config.topic) == config.topic_id


# Watching


def watch_topics(group: GroupState, now_ms: int) -> Steps[None]:
    """Look at the adopted topics, at intervals, for what their owners have changed."""
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
    """Return what topics are, None for those that are gone; left out are those that brokers do not tell of now."""
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
    """Return how often to look; more often while a commit waits for a topic that is lost, which a look decides."""
    most = group.settings.topic_check_ms
    if group.faults and any(group.faults.is_lost(group.waits_for(item) or "") for item in group.fold.decided.values()):
        return min(LOST_CHECK_MS, most)
    return most


def _lift(group: GroupState, stream: LedStream) -> Steps[None]:
    """Lift what an earlier look at a stream's topic had found."""
    name = str(stream.config.name)
    known = group.faults.get(name)
    if known is None or known.code not in WATCHED or group.is_suspended(name):
        return
    group.faults.lift(name)
    group.faults.news.append(f"stream {name}: topic {stream.config.topic} holds up nothing any more")
    if stream.history.unsealed():
        fault = unsealed_fault(known.since_ms)
        group.faults.restore(name, fault)
        yield from show_fault(group, name, fault)
    else:
        yield from hide_fault(stream.config.name)


def _judge(group: GroupState, stream: LedStream, state: TopicState | None, now_ms: int) -> Steps[None]:
    name, config = str(stream.config.name), stream.config
    code = fault_code(config, state)
    known = group.faults.get(name)
    if code is None:
        yield from _lift(group, stream)
        return
    if group.is_suspended(name):
        return  # it waits anyway, half way to topics of its own
    reason = f"topic {config.topic} {_difference(config, state)}; {_remedy(code)}"
    if known is None or known.code != code:
        fault = StreamFault(reason, code, config.topic, now_ms)
        group.faults.restore(name, fault)
        group.faults.news.append(f"stream {name}: {reason}")
        group.counts["stream_faults"] += 1
        yield from show_fault(group, name, fault)
    if group.faults.is_lost(name):
        refuse_lost(group, name, reason, now_ms)


def fault_code(config: StreamConfig, state: TopicState | None) -> str | None:
    """Return the code of what is wrong with an adopted topic; None if it is what was adopted."""
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
        return "set it to what records need; what waits then goes on"
    return "release it and adopt it again"


def _difference(config: StreamConfig, state: TopicState | None) -> str:
    if state is None:
        return "was deleted"
    if state.topic_id != config.topic_id:
        return f"was deleted and created again (its id is {state.topic_id}, and was {config.topic_id})"
    room = _batch_bytes_max(state)
    return f"takes no transaction markers: max.message.bytes is {room}, and a marker has {MARKER_BYTES} bytes"


def _take_in(group: GroupState, stream: LedStream, state: TopicState, now_ms: int) -> Steps[None]:
    """Make an epoch with the partitions that the topic's owner has added; nothing is sealed, nobody waits for it."""
    config = stream.config
    if state.partitions <= config.partitions or group.is_half_done(str(config.name)):
        return
    if state.partitions > SEGMENTS_MAX:
        logger.error(
            "%s: topic %s has %d partitions, of which %d can be segments of a stream: what was added is not read",
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
        raise StaleStateError(f"epoch {record.epoch} of {config.name} was made by someone else, or the stream is gone")
    stream.history, stream.config = stream.history.with_records(record), grown
    group.counts["topic_changes"] += 1
    group.faults.news.append(
        f"stream {config.name}: topic {config.topic} has {state.partitions} partitions, and had {config.partitions}: "
        f"all are its segments from epoch {record.epoch} on"
    )


def _keep_limits(group: GroupState, stream: LedStream, state: TopicState) -> Steps[None]:
    try:
        limits = TopicLimits.of(state.config)
    except InvalidRequestError as fault:
        logger.warning("%s: %s", stream.config.name, fault)
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
        "%s: topic %s takes %s from now on, and keeps it for %d ms", config.name, config.topic, limits, config.kept_ms
    )


def _keep_claim(stream: LedStream) -> Steps[None]:
    """Write down again that the topic is the stream's; a ZooKeeper that was restored and repaired may not know it."""
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
