"""Streams: create them; may be run again after a crash at any point. What deletes them is in ``deletion``.

One that is created under the name of a deleted stream goes on above the numbers that this has used
(:mod:`rollbridge.model.lives`), so no name of a topic is ever used by two streams.
"""

from __future__ import annotations

from dataclasses import replace

from rollbridge.errors import InvalidNameError, InvalidRequestError, StreamExists
from rollbridge.model import paths
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.keyspace import check_partition, even_ranges, ranges_of
from rollbridge.model.lives import former_among
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.nodes import CreateNode, DeleteNode
from rollbridge.model.records import (
    RECORD_BYTES_MAX_DEFAULT,
    Retention,
    StreamConfig,
    StreamState,
    Truncation,
    check_segments,
    epoch_to_json,
)
from rollbridge.model.requests import Answer, Request
from rollbridge_coordinator.state import streams
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.steps import (
    Steps,
    create_topics,
    end_offsets,
    ensure_nodes,
    read_children,
    read_node,
    topic_ids,
    write,
)
from rollbridge_coordinator.state.topics import buffer_topic_spec, segment_topic_spec

BUFFER_PARTITIONS_MAX = 256
RECORD_BYTES_LIMIT = 64 * 1024 * 1024


def create_stream(group: GroupState, name: str, request: Request, now_ms: int) -> Steps[None]:
    """Create a stream with its topics and its first epoch: 0, or above all that former lives of its name have used.

    Raises:
        InvalidRequestError: a bad name, range or number.
        StreamExists: it exists already, in whatever group.
        InvalidNameError: the name is taken by a group, or one of its topics by somebody else's records.
    """
    stream = StreamName.parse(request.stream)
    check_segments(stream, len(request.ranges) or request.segments)
    ranges = ranges_of(request.ranges) if request.ranges else even_ranges(request.segments or 1)
    check_partition(ranges)
    if not 1 <= request.buffer_partitions <= BUFFER_PARTITIONS_MAX:
        raise InvalidRequestError(
            f"{request.buffer_partitions} buffer partitions asked for; 1 to {BUFFER_PARTITIONS_MAX} are possible"
        )
    if not 0 <= request.record_bytes_max <= RECORD_BYTES_LIMIT:
        raise InvalidRequestError(
            f"records of {request.record_bytes_max} bytes asked for; at most {RECORD_BYTES_LIMIT}"
        )
    retention = request.retention or Retention()
    retention.check()
    yield from _check_name(stream, group.name)
    # Only now: what a deleted stream has used is written down before its name is free.
    former = former_among((yield from read_children(paths.formers(stream.scope))), stream)
    history = EpochHistory.create(ranges, now_ms, former.epoch, former.sequence, former.partition)
    config = StreamConfig(
        name=stream,
        group=group.name,
        buffer_partitions=request.buffer_partitions,
        replication_factor=request.replication_factor,
        record_bytes_max=request.record_bytes_max or RECORD_BYTES_MAX_DEFAULT,
        created_ms=now_ms,
        buffer_topic_id="",
        retention=retention,
        first_epoch=former.epoch,
    )
    wanted = [buffer_topic_spec(config), *(segment_topic_spec(config, item.id) for item in history.active.segments)]
    old = yield from topic_ids([item.name for item in wanted])
    ids = yield from create_topics(wanted)
    ends = yield from end_offsets(
        [(item.name, number) for item in wanted if item.name in old for number in range(item.partitions)]
    )
    used = sorted({topic for (topic, _), end in ends.items() if end > 0})
    if used:
        raise InvalidNameError(
            f"topic {used[0]} exists already and holds records of somebody else; stream {stream} was not created; "
            "delete the topic if nobody needs it, or choose another name"
        )
    config = replace(config, buffer_topic_id=ids[config.buffer_topic])
    lost = Truncation(foundation=history.foundation)
    # Slots as well: where ACLs are in force, conditional writers may not make their parent.
    yield from ensure_nodes([paths.streams(stream.scope), paths.cas_slots(stream)])
    created = yield from write(
        DeleteNode(f"{paths.requests(group.name)}/{name}"),
        CreateNode(paths.stream(stream), config.to_json()),
        CreateNode(paths.epochs(stream), b""),
        CreateNode(paths.epoch(stream, former.epoch), epoch_to_json(history.active)),
        *([CreateNode(paths.truncation(stream), lost.to_json())] if history.foundation is not None else []),
        CreateNode(
            f"{paths.answers(group.name)}/{name}", Answer(ok=True, answered_ms=now_ms, epoch=former.epoch).to_json()
        ),
    )
    if created:
        group.add_stream(streams.StreamState(config, history))


def _check_name(stream: StreamName, group: GroupName) -> Steps[None]:
    """Refuse a stream that exists, or whose topics another's or a group's would not be kept apart from."""
    raw = yield from read_node(paths.stream(stream))
    if raw is not None:
        if StreamConfig.from_json(raw).state is StreamState.DELETING:
            raise StreamExists(f"stream {stream} is still being deleted; nothing was written; ask again in a while")
        raise StreamExists(f"stream {stream} exists already; nothing was written")
    if (yield from read_node(paths.stream(StreamName(stream.scope, group.group)))) is not None:
        raise InvalidNameError(f"group {group} has the name of a stream of its scope; nothing was written")
    groups = yield from read_children(paths.GROUPS)
    if GroupName(stream.scope, stream.stream).node in groups:
        raise InvalidNameError(
            f"{stream} has the name of a transaction group; its topics would share a prefix with its commit log; "
            "nothing was written"
        )
    scopes = yield from read_children(paths.SCOPES)
    for scope in scopes:
        for other in (yield from read_children(paths.streams(scope))):
            if StreamName(scope, other).collision_key == stream.collision_key:
                raise InvalidNameError(
                    f"{stream} and {scope}/{other} collide: Kafka does not keep '.' and '_' apart in topic names; "
                    "nothing was written"
                )
