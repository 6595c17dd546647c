"""Streams: create and delete them. Both may be run again after a crash at any point."""

from __future__ import annotations

from dataclasses import replace

from bridge.errors import InvalidNameError, InvalidRequestError, StreamBusy, StreamExists
from bridge.model import paths
from bridge.model.epochs import EpochHistory
from bridge.model.keyspace import check_partition, even_ranges, ranges_of
from bridge.model.names import GroupName, StreamName
from bridge.model.nodes import CheckNode, CreateNode, DeleteNode, SetNode
from bridge.model.records import RECORD_BYTES_MAX_DEFAULT, Retention, StreamConfig, StreamState, epoch_to_json
from bridge.model.requests import Answer, Request
from coordinator import group as state
from coordinator.errors import StaleStateError
from coordinator.procedures.snapshots import clear_snapshots
from coordinator.steps import (
    Steps,
    create_topics,
    delete_topics,
    end_offsets,
    ensure_nodes,
    read_children,
    read_node,
    read_nodes,
    topic_ids,
    write,
)
from coordinator.topics import buffer_topic_spec, segment_topic_spec

BUFFER_PARTITIONS_MAX = 256
RECORD_BYTES_LIMIT = 64 * 1024 * 1024


def create_stream(group: state.GroupState, name: str, request: Request, now_ms: int) -> Steps[None]:
    """Create a stream with its topics and epoch 0.

    Raises:
        InvalidRequestError: a bad name, range or number.
        StreamExists: it exists already, in whatever group.
        InvalidNameError: the name is taken by a group, or one of its topics by somebody else's records.
    """
    stream = StreamName.parse(request.stream)
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
    config = StreamConfig(
        name=stream,
        group=group.name,
        buffer_partitions=request.buffer_partitions,
        replication_factor=request.replication_factor,
        record_bytes_max=request.record_bytes_max or RECORD_BYTES_MAX_DEFAULT,
        created_ms=now_ms,
        buffer_topic_id="",
        retention=retention,
    )
    history = EpochHistory.create(ranges, now_ms)
    wanted = [buffer_topic_spec(config), *(segment_topic_spec(config, item.id) for item in history.active.segments)]
    # What is in a topic that is new comes from a late writer to a deleted stream of this name; it does no harm.
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
    config = replace(config, buffer_topic_id=ids[stream.buffer_topic])
    # Slots as well: where ACLs are in force, conditional writers may not make their parent.
    yield from ensure_nodes([paths.streams(stream.scope), paths.cas_slots(stream)])
    created = yield from write(
        DeleteNode(f"{paths.requests(group.name)}/{name}"),
        CreateNode(paths.stream(stream), config.to_json()),
        CreateNode(paths.epochs(stream), b""),
        CreateNode(paths.epoch(stream, 0), epoch_to_json(history.active)),
        CreateNode(f"{paths.answers(group.name)}/{name}", Answer(ok=True, answered_ms=now_ms, epoch=0).to_json()),
    )
    if created:
        group.add_stream(state.StreamState(config, history))


def delete_stream(group: state.GroupState, name: str, stream: state.StreamState, now_ms: int) -> Steps[None]:
    """Delete a stream with all its topics.

    Raises:
        StreamBusy: transactions of it are open.
    """
    own = str(stream.config.name)
    busy = [item for item in group.fold.open.values() if own in item.begin.streams]
    if busy:
        raise StreamBusy(
            f"stream {own} has {len(busy)} open transactions, the first is {busy[0].transaction_id}; "
            "commit or abort them first; nothing was deleted"
        )
    config = replace(stream.config, state=StreamState.DELETING)
    marked = yield from write(
        CheckNode(f"{paths.requests(group.name)}/{name}"), SetNode(paths.stream(config.name), config.to_json())
    )
    if marked:
        stream.config = config
        yield from finish_delete(group, stream)
        yield from write(
            DeleteNode(f"{paths.requests(group.name)}/{name}"),
            CreateNode(f"{paths.answers(group.name)}/{name}", Answer(ok=True, answered_ms=now_ms).to_json()),
        )


def finish_delete(group: state.GroupState, stream: state.StreamState) -> Steps[None]:
    """Carry out the rest of a deletion that has been marked."""
    name = stream.config.name
    segments = [stream.topic_of(item) for item in (*stream.history.stored(), *stream.removing)]
    yield from delete_topics([name.buffer_topic, *segments])
    yield from clear_snapshots(group, stream.partitions())
    epochs = yield from read_children(paths.epochs(name))
    more = yield from read_nodes([paths.truncation(name), paths.retention(name)])
    gone = yield from write(
        *(DeleteNode(path) for path, value in more.items() if value is not None),
        *(DeleteNode(f"{paths.epochs(name)}/{item}") for item in epochs),
        DeleteNode(paths.epochs(name)),
        DeleteNode(paths.stream(name)),
    )
    if not gone:
        raise StaleStateError(f"stream {name} was changed while it was being deleted")
    yield from write(
        DeleteNode(paths.cas_slots(name))
    )  # does not apply while a writer still holds a slot, or never did
    for partition in stream.partitions():
        group.fold.positions.pop(partition, None)
        group.housekeeping.starts.pop(partition, None)
    group.streams.pop(str(name), None)


def _check_name(stream: StreamName, group: GroupName) -> Steps[None]:
    """Refuse a stream that exists, or whose topics another's or a group's would not be kept apart from."""
    if (yield from read_node(paths.stream(stream))) is not None:
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
