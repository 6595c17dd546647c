"""Streams: create and delete them. Both may be run again after a crash at any point.

A deleted stream leaves behind which numbers it has used, before anything of it is gone; one that is created under its
name goes on above them (:mod:`bridge.model.lives`), so no name of a topic is ever used by two streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bridge.errors import InvalidNameError, InvalidRequestError, StreamBusy, StreamExists
from bridge.model import paths
from bridge.model.epochs import EpochHistory
from bridge.model.keyspace import check_partition, even_ranges, ranges_of
from bridge.model.lives import fold, former_among, former_of
from bridge.model.names import GroupName, StreamName
from bridge.model.nodes import CheckNode, CreateNode, DeleteNode, SetNode
from bridge.model.records import (
    RECORD_BYTES_MAX_DEFAULT,
    Retention,
    StreamConfig,
    StreamState,
    Truncation,
    epoch_to_json,
)
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
    """Create a stream with its topics and its first epoch: 0, or above all that former lives of its name have used.

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
    # Only now: what a deleted stream has used is written down before its name is free.
    former = former_among((yield from read_children(paths.formers(stream.scope))), stream)
    history = EpochHistory.create(ranges, now_ms, former.epoch, former.sequence)
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
    yield from _keep_numbers(stream)
    segments = [stream.topic_of(item) for item in (*stream.history.stored(), *stream.removing)]
    yield from delete_topics([stream.config.buffer_topic, *segments])
    yield from clear_snapshots(group, stream.partitions())
    epochs = yield from read_children(paths.epochs(name))
    more = yield from read_nodes([paths.truncation(name), paths.retention(name), paths.late(name)])
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


def _keep_numbers(stream: state.StreamState) -> Steps[None]:
    """Write down which numbers a stream has used, before anything of it is deleted."""
    name, history = stream.config.name, stream.history
    kept = yield from read_children(paths.formers(name.scope))
    if former_among(kept, name).epoch >= history.next_epoch:
        return  # a leader before this one did, and epochs are not added to a stream that is being deleted
    open_ones = {stream.topic_of(item): item for item in history.segments() if history.sealed_end(item) is None}
    there = yield from topic_ids(sorted(open_ones))
    ends = yield from end_offsets([(topic, 0) for topic in sorted(there)])
    former = former_of(history, {open_ones[topic]: end for (topic, _), end in ends.items()})
    yield from ensure_nodes([paths.formers(name.scope)])
    if not (yield from write(CreateNode(f"{paths.formers(name.scope)}/{former.node(name.stream)}", b""))):
        raise StaleStateError(f"the numbers of stream {name} were written down by someone else")
    yield from _fold_formers(name.scope, [*kept, former.node(name.stream)])


def _fold_formers(scope: str, kept: Sequence[str]) -> Steps[None]:
    """Keep the number of nodes of deleted streams bounded; left out if another group's leader does the same now."""
    floor, folded = fold(kept)
    if folded:
        parent = paths.formers(scope)
        added = [] if floor.node() in kept else [CreateNode(f"{parent}/{floor.node()}", b"")]
        yield from write(*added, *(DeleteNode(f"{parent}/{node}") for node in folded))


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
