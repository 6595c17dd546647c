"""Streams: create and delete them, and drop unreferenced epochs. Every step may be repeated after a crash.

A stream that is created under the name of a deleted one continues above the numbers that the former one has used
(:mod:`rollbridge.stream.positions`), so no topic name is ever used by two streams.

A deletion is marked first, and then carried out in bounded steps, while all other work continues: a ZooKeeper multi
holds 1 MiB, and a stream may have tens of thousands of epochs. The mark takes the request and keeps its name, so any
leader that finishes it can answer. From then on the stream no longer belongs to the group. The numbers it has used are
written first. Then its parts are deleted in an order in which the rest shows what is left to do: the buffer; from the
newest epoch to the oldest, the topics of the segments that began in it, and its node; with the oldest epoch everything
else in ZooKeeper, and the answers.

Epochs without remaining records are dropped from ZooKeeper, the oldest first. Their nodes and what is kept of them
change in one multi, so a reader of the history finds the epochs or what they left. Scales and rolling commits name
epochs as well, but none is in progress here: all run one after the other, and streams of a suspended one are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import SegmentId
from rollbridge.buffer.table import State
from rollbridge.errors import (
    ConflictError,
    CorruptDataError,
    InvalidNameError,
    InvalidRequestError,
    StreamExistsError,
)
from rollbridge.metadata import paths
from rollbridge.metadata.changes import FORMAT_NEWER, EpochTransition
from rollbridge.metadata.records import (
    CreateNode,
    DeleteNode,
    NodeOperation,
    SetNode,
    TopicNames,
    Truncation,
    bytes_of,
    check_segments,
    leading,
)
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind, refusing
from rollbridge.stream.config import (
    RECORD_BYTES_MAX_DEFAULT,
    HeaderForm,
    RecordTimes,
    Retention,
    StreamConfig,
    StreamState,
    header_form,
    record_times,
)
from rollbridge.stream.config import StreamState as Lifecycle
from rollbridge.stream.epochs import EpochCause, EpochHistory, EpochRecord, without_epochs
from rollbridge.stream.keyspace import check_partition, even_ranges, ranges_of
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.positions import fold, former_among, former_of
from rollbridge.stream.truncation import first_needed, step_towards
from rollbridge_coordinator.commit.large import give_up_stream
from rollbridge_coordinator.core import stream_state
from rollbridge_coordinator.core.bookkeeping import marks_within
from rollbridge_coordinator.core.effects import (
    CreateTopics,
    DeleteTopics,
    EffectRefusedError,
    EndOffsets,
    EnsureNodes,
    ReadNodes,
    TopicIds,
    Write,
    read_children,
    read_node,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import LedStream, buffer_topic_spec, load_stream, segment_topic_spec
from rollbridge_coordinator.core.waits import LostRaceError, StaleStateError
from rollbridge_coordinator.history.journal import note_deletion
from rollbridge_coordinator.history.snapshots import clear_snapshots
from rollbridge_coordinator.streams.adopt import (
    adopted_stream,
    check_topic_retention,
    check_topic_scaling,
    claim,
    look_at_topic,
    open_again,
    unclaim,
)
from rollbridge_coordinator.streams.pending_changes import take_out, without_stream
from rollbridge_coordinator.streams.retention import save
from rollbridge_coordinator.streams.unled import end_of_stream, mended_nodes

BUFFER_PARTITIONS_MAX = 256
REPLICAS_MAX = (1 << 15) - 1
"""Bound of Kafka's requests, which have 16 bits for it; Kafka checks the number of brokers."""
RECORD_BYTES_LIMIT = 64 * 1024 * 1024


def create_stream(group: GroupState, name: str, request: AdminRequest, now_ms: int) -> Steps[None]:
    """Create a stream with its topics and its first epoch: 0, or above all that former lives of its name have used.

    One that adopts a topic has the topic's partitions as segments, and only its buffer is created.

    Raises:
        InvalidRequestError: a bad name, range or number.
        NotFoundError, ConflictError: the topic to adopt does not exist, is sealed, or is another stream's.
        StreamExistsError: it exists already, in any group.
        InvalidNameError: the name is taken by a group, or one of its topics holds records of another owner, or Kafka's
            name of it, or of the topic to adopt, would be ambiguous.
        LostRaceError: another group's stream, or a release of the topic, came between.
    """
    stream = StreamName.parse(request.stream)
    topic = (yield from look_at_topic(request.topic)) if request.topic else None
    check_segments(stream, len(request.ranges) or request.segments)
    ranges = ranges_of(request.ranges) if request.ranges else even_ranges(request.segments or 1)
    check_partition(ranges)
    if not 1 <= request.buffer_partitions <= BUFFER_PARTITIONS_MAX:
        raise InvalidRequestError(
            f"{request.buffer_partitions} buffer partitions asked for; 1 to {BUFFER_PARTITIONS_MAX} are possible"
        )
    if request.replication_factor != -1 and not 1 <= request.replication_factor <= REPLICAS_MAX:
        raise InvalidRequestError(
            f"{request.replication_factor} replicas asked for; 1 to {REPLICAS_MAX} are possible, or -1 for as many as "
            "the brokers make by default"
        )
    if not 0 <= request.record_bytes_max <= RECORD_BYTES_LIMIT:
        raise InvalidRequestError(
            f"records of {request.record_bytes_max} bytes asked for; at most {RECORD_BYTES_LIMIT}"
        )
    retention = request.retention or Retention()
    retention.check()
    scaling = request.scaling
    if scaling is not None:
        scaling.check()
        if not scaling.is_fixed and len(ranges) > scaling.max_segments:
            raise InvalidRequestError(
                f"{len(ranges):,} segments asked for, which are more than max_segments, {scaling.max_segments:,}; "
                "nothing was created"
            )
    if request.topic:
        check_topic_retention(request.topic, retention)
        check_topic_scaling(request.topic, request.scaling)
    # The claim comes first: what is left of an attempt that lost its race for the topic hides no reason.
    claimed = (yield from claim(stream, request.topic)) if topic is not None else []
    yield from _check_name(stream, group.name)
    # Read this only now: the numbers of a deleted stream are written down before its name is free.
    former = former_among((yield from read_children(paths.deleted_streams(stream.scope))), stream)
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
        headers=header_form(request.headers) or HeaderForm.EACH,
        timestamps=record_times(request.timestamps) or RecordTimes.WRITER,
        scaling=None if scaling is None or scaling.is_fixed else scaling,
    )
    if topic is not None:
        config, history = yield from adopted_stream(config, request, topic, now_ms, former.sequence)
    yield from _check_topic_name(config)
    if topic is not None:
        wanted = [buffer_topic_spec(config)]
    else:
        wanted = [buffer_topic_spec(config), *(segment_topic_spec(config, item.id) for item in history.active.segments)]
    try:
        old = yield from TopicIds([item.name for item in wanted])
    except EffectRefusedError as refused:
        names = ", ".join(item.name for item in wanted)
        raise InvalidRequestError(
            f"stream {stream} was not created: the coordinator may not describe {names} ({refused.code}); nothing was "
            "written; `rollbridge access kafka-acls coordinator` prints the commands that grant its rights"
        ) from refused
    ids = yield from CreateTopics(wanted)
    ends = yield from EndOffsets(
        [(item.name, number) for item in wanted if item.name in old for number in range(item.partitions)]
    )
    used = sorted({topic for (topic, _), end in ends.items() if end > 0})
    if used:
        raise InvalidNameError(
            f"topic {used[0]} exists already and holds records of another owner; stream {stream} was not created; "
            "delete the topic if it is not needed, or choose another name"
        )
    config = replace(config, buffer_topic_id=ids[config.buffer_topic])
    # The parent of slots as well: where ACLs are in force, conditional writers may not create it.
    yield from EnsureNodes([paths.streams(stream.scope), paths.cas_slots(stream), *([paths.TOPICS] if claimed else [])])
    created = yield from Write(
        [
            DeleteNode(f"{paths.requests(group.name)}/{name}"),
            *_nodes_of(config, history),
            *claimed,
            CreateNode(
                f"{paths.answers(group.name)}/{name}",
                AdminAnswer(ok=True, answered_ms=now_ms, epoch=former.epoch).to_json(),
            ),
        ]
    )
    if not created:
        if topic is not None:
            yield from _forsake(group, replace(config, state=StreamState.DELETING), history)
        raise LostRaceError(f"stream {stream} is not created")
    group.metrics.note_answer(request.kind, ok=True)
    group.add_stream(LedStream(config, history))


def _nodes_of(config: StreamConfig, history: EpochHistory) -> list[NodeOperation]:
    """Return what creates the nodes of a stream that has one epoch."""
    name, first = config.name, history.active
    nodes: list[NodeOperation] = [
        CreateNode(paths.stream(name), config.to_json()),
        CreateNode(paths.epochs(name), b""),
        CreateNode(paths.epoch(name, first.epoch), first.to_json()),
    ]
    if history.foundation is not None:
        nodes.append(CreateNode(paths.truncation(name), Truncation(foundation=history.foundation).to_json()))
    return nodes


def _forsake(group: GroupState, doomed: StreamConfig, history: EpochHistory) -> Steps[None]:
    """Delete the buffer that was created for an adoption: another stream has the topic, or the request is gone.

    The stream is written as one whose deletion has begun: that applies only where no other has the name, and thus the
    buffer, and a leader that dies meanwhile leaves it to the next one.
    """
    if (yield from Write(_nodes_of(doomed, history))):
        group.doomed[str(doomed.name)] = stream_state.Doomed(doomed)


def _check_name(stream: StreamName, group: GroupName) -> Steps[None]:
    """Refuse a stream that exists, or whose topic names would collide with those of another stream or a group."""
    raw = yield from read_node(paths.stream(stream))
    if raw is not None:
        if StreamConfig.from_json(raw).state is StreamState.DELETING:
            raise StreamExistsError(f"stream {stream} is still being deleted; nothing was written; try again later")
        raise StreamExistsError(f"stream {stream} exists already; nothing was written")
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


def _check_topic_name(config: StreamConfig) -> Steps[None]:
    """Refuse a stream whose topic has the name of another stream, or whose name is that of a topic of the brokers."""
    if config.topic:
        streams, topics = [config], {config.topic: config.topic_id}
        named = StreamName.of_virtual_topic(config.topic)
        raw = None if named is None else (yield from read_node(paths.stream(named)))
        if raw is not None:
            streams.append(StreamConfig.from_json(raw))
    else:
        streams, topics = [config], dict((yield from TopicIds([config.name.virtual_topic])))
    for topic, stream in TopicNames.of(streams, topics).clashes.items():
        remedy = "choose another name" if stream is config else "delete that stream first, if it is not needed"
        raise InvalidNameError(
            f"the brokers have topic {topic}, and producers at gateways know stream {stream.name} by that name, "
            f"which is ambiguous; nothing was written; {remedy}"
        )


# Deletion


EPOCHS_AT_ONCE: Final = 200
"""Epoch nodes read, and removed, in one step."""
TOPICS_AT_ONCE: Final = 100
"""Topics deleted in one step, unless a single epoch has begun more; and in one request to Kafka."""
ASKED_MAX: Final = 100
"""Most requests that wait for the end of one deletion."""


def delete_stream(group: GroupState, name: str, stream: LedStream, now_ms: int) -> Steps[None]:
    """Accept a request to delete a stream, or to release its topic; :func:`delete_further` carries it out and answers.

    An adopted topic keeps its records, and gets its settings back if the stream has sealed it.

    A suspended scale of the stream is given up, and so is the stream's part of a suspended rolling commit.
    If its topic is gone or another one, its open transactions end as aborted: none can be committed, and while its
    producers begin others it would never be without any.

    Raises:
        ConflictError: transactions of it are open.
    """
    own, faults = str(stream.config.name), group.waits.faults
    busy = [item for item in group.fold.open.values() if own in item.all_streams()]
    lost = faults.get(own) if faults.is_lost(own) else None
    if busy and lost is None:
        raise ConflictError(
            f"stream {own} has {len(busy)} open transactions, the first is {busy[0].transaction_id}; "
            "commit or abort them first; nothing was deleted",
            code="stream-busy",
        )
    yield from _doom(group, name, stream.config, (), now_ms)
    reason = "" if lost is None else f"lost with stream {own}: {lost.reason}"
    for transaction in busy:
        if transaction.state is not State.ABORTING:
            yield from take_out(group, transaction)
            group.fold.refuse(transaction.id, reason, now_ms)
    for partition in stream.partitions():
        for transaction in busy:
            transaction.first_offsets.pop(partition, None)
        group.fold.positions.pop(partition, None)
        group.housekeeping.starts.pop(partition, None)
    group.snapshots.forget(stream.partitions())
    del group.streams[own]
    faults.forget(own)


def delete_unled(group: GroupState, name: str, unled: stream_state.Unled, now_ms: int) -> Steps[None]:
    """Accept a request to delete, or release, a stream that is not led; its transactions end as aborted.

    Raises:
        InvalidRequestError: a newer release has written its nodes.
    """
    own = str(unled.config.name)
    fault = group.waits.faults.get(own)
    if fault is not None and fault.code == FORMAT_NEWER:
        raise InvalidRequestError(f"stream {own} cannot be deleted now: {fault.reason}; nothing was deleted")
    mended = yield from mended_nodes(group, unled.config.name)
    yield from _doom(group, name, unled.config, mended, now_ms)
    yield from end_of_stream(group, own, now_ms)
    del group.unled[own]
    group.waits.faults.forget(own)


def _doom(
    group: GroupState, name: str, config: StreamConfig, more: Sequence[NodeOperation], now_ms: int
) -> Steps[None]:
    """Mark a stream for deletion and take it out of suspended changes."""
    own = str(config.name)
    dropping, left = without_stream(group, own, now_ms)
    marked = yield from _mark(group, name, config, [*more, *dropping])
    for node, work in left.items():
        if work is None:
            given_up = group.waits.pending_changes.pop(node).work
            if isinstance(given_up, EpochTransition) and given_up.request:
                group.metrics.note_answer(RequestKind.SCALE_STREAM, ok=False)
        else:
            group.waits.pending_changes[node].work = work
    group.doomed[own] = stream_state.Doomed(marked)


def delete_again(group: GroupState, name: str, doomed: stream_state.Doomed) -> Steps[None]:
    """Accept another request to delete a stream that is being deleted; the next step is tried at once.

    Raises:
        ConflictError: too many requests wait for it already.
    """
    if len(doomed.config.deletion_requests) >= ASKED_MAX:
        raise ConflictError(
            f"stream {doomed.config.name} is being deleted, and {ASKED_MAX} requests wait for that already; nothing "
            "was written",
            code="stream-busy",
        )
    doomed.config = yield from _mark(group, name, doomed.config)
    group.housekeeping.done_ms.pop(doomed.work, None)


def delete_further(group: GroupState, now_ms: int) -> Steps[bool]:
    """Do a step of each deletion in progress; return True if there are next steps that need not wait."""
    left = False
    for doomed in list(group.doomed.values()):
        if group.housekeeping.is_due(doomed.work, now_ms, group.settings.retention_check_ms):
            try:
                if (yield from _step(group, doomed, now_ms)):
                    group.housekeeping.done_ms.pop(doomed.work, None)
            except EffectRefusedError as refused:
                yield from _answer_refused(group, doomed, refused, now_ms)
            except CorruptDataError as fault:
                logger.warning("stream.deletion-delayed group=%s stream=%s: %s", group.name, doomed.config.name, fault)
            left = left or (doomed.work not in group.housekeeping.done_ms and str(doomed.config.name) in group.doomed)
    return left


def _answer_refused(
    group: GroupState, doomed: stream_state.Doomed, refused: EffectRefusedError, now_ms: int
) -> Steps[None]:
    """Answer the requests for a deletion that is refused now; it is retried at intervals."""
    name, waiting = doomed.config.name, doomed.config.deletion_requests
    if not waiting:
        return
    who = refused.by
    why = (
        f"{who} refuses to delete the rest of stream {name}: {refused.reason}; the stream cannot be used any more, "
        f"and the rest is deleted once {who} allows it; repeat the request to wait for that"
    )
    answer = refusing(refused.code, why, now_ms).to_json()
    config = replace(doomed.config, deletion_requests=())
    if not (
        yield from Write(
            [
                SetNode(paths.stream(name), config.to_json()),
                *(CreateNode(f"{paths.answers(group.name)}/{item}", answer) for item in waiting),
            ]
        )
    ):
        raise StaleStateError(f"stream {name} was changed while it was being deleted")
    doomed.config = config
    group.counts["requests_refused"] += 1
    for _ in waiting:
        group.metrics.note_answer(_deletion_of(config), ok=False)


def _mark(
    group: GroupState, name: str, config: StreamConfig, more: Sequence[NodeOperation] = ()
) -> Steps[StreamConfig]:
    """Mark a stream for deletion and take the request.

    Raises:
        LostRaceError: the request was withdrawn, or nodes of the stream were written by others.
    """
    marked = replace(config, state=StreamState.DELETING, deletion_requests=(*config.deletion_requests, name))
    taken = yield from Write(
        [
            DeleteNode(f"{paths.requests(group.name)}/{name}"),
            SetNode(paths.stream(config.name), marked.to_json()),
            *more,
        ]
    )
    if not taken:
        raise LostRaceError(f"the deletion of stream {config.name} is not begun")
    return marked


def _step(group: GroupState, doomed: stream_state.Doomed, now_ms: int) -> Steps[bool]:
    """Delete the next part of a stream; return False if Kafka does not do it now."""
    name = doomed.config.name
    if not doomed.has_begun:
        # An earlier leader may have removed the newest epochs; the rest is a valid history, too.
        stream = yield from load_stream(doomed.config)
        yield from _keep_numbers(stream)
        deleted_streams = yield from read_children(paths.deleted_streams(name.scope))
        yield from note_deletion(group, name, former_among(deleted_streams, name).node(name.stream))
        unused = yield from _unused(stream)
        prepared = yield from give_up_stream(group, name)
        there = yield from TopicIds([doomed.config.buffer_topic])
        if prepared is None or not (yield from DeleteTopics([*sorted(there), *unused, *prepared])):
            return False
        yield from clear_snapshots(group, doomed.partitions())
        doomed.has_begun = True
    numbers = yield from read_children(paths.epochs(name))
    taken, segments = yield from _newest(name, numbers, group.settings.write_bytes_max)
    more: Mapping[str, bytes | None] = {}
    if len(taken) == len(numbers):
        kept = (paths.truncation(name), paths.retention(name), paths.late(name), paths.stream_fault(name))
        more = yield from ReadNodes(kept)
        yield from open_again(doomed.config)
        raw = more[paths.truncation(name)]
        segments |= Truncation.from_json(raw).removing if raw is not None else frozenset()
    topics = doomed.config.places.own_topics(segments)
    for first in range(0, len(topics), TOPICS_AT_ONCE):
        if not (yield from DeleteTopics(topics[first : first + TOPICS_AT_ONCE])):
            return False
    group.forget_places(map(doomed.config.place, segments))
    gone = [DeleteNode(f"{paths.epochs(name)}/{number}") for number in taken]
    if len(taken) < len(numbers):
        applied = yield from Write(gone)
    else:
        answer = AdminAnswer(ok=True, answered_ms=now_ms).to_json()
        applied = yield from Write(
            [
                *gone,
                *(DeleteNode(path) for path, value in more.items() if value is not None),
                *(yield from unclaim(doomed.config)),
                DeleteNode(paths.epochs(name)),
                DeleteNode(paths.stream(name)),
                *(
                    CreateNode(f"{paths.answers(group.name)}/{item}", answer)
                    for item in doomed.config.deletion_requests
                ),
            ]
        )
    if not applied:
        raise StaleStateError(f"stream {name} was changed while it was being deleted")
    if len(taken) == len(numbers):
        for _ in doomed.config.deletion_requests:
            group.metrics.note_answer(_deletion_of(doomed.config), ok=True)
        del group.doomed[str(name)]
        # Does not apply while a writer holds a slot, or if the node was never created.
        yield from Write([DeleteNode(paths.cas_slots(name))])
    return True


def _deletion_of(config: StreamConfig) -> RequestKind:
    return RequestKind.RELEASE_TOPIC if config.topic else RequestKind.DELETE_STREAM


def _unused(stream: LedStream) -> Steps[list[str]]:
    """Return the topics created for a scale that was given up, or was suspended and never published.

    Their numbers follow the highest one, and they have the next epoch; or one that partitions were added with since.
    """
    history, found = stream.history, list[str]()
    begins = {history.next_epoch: 1 + max(item.number for item in history.graph.nodes if not item.is_prepared)}
    for before, record in pairwise(history.records):
        if record.cause is EpochCause.GROWN:
            begins[record.epoch] = len(before.segments)
    for epoch, begin in begins.items():
        for first in count(begin, TOPICS_AT_ONCE):
            segments = [SegmentId.of(first + number, epoch) for number in range(TOPICS_AT_ONCE)]
            there = yield from TopicIds([stream.config.place(item)[0] for item in segments])
            if not there:
                break
            found += sorted(there)
    return found


def _newest(name: StreamName, numbers: list[str], bytes_max: int) -> Steps[tuple[list[str], frozenset[SegmentId]]]:
    """Return the newest epochs that fit into one step, newest first, and the segments that began in them.

    The oldest epoch counts with all its segments: some may have begun in dropped epochs. Prepared ones are in one epoch
    only, which is not that of their ids.
    """
    newest = [f"{paths.epochs(name)}/{number}" for number in numbers[-EPOCHS_AT_ONCE:]]
    newest = newest[-leading([DeleteNode(path) for path in newest], bytes_max // 2) :]
    values = yield from ReadNodes(newest)
    taken: list[str] = []
    segments: set[SegmentId] = set()
    for path in reversed(newest):
        raw = values[path]
        if raw is None:
            raise StaleStateError(f"{path} was deleted by another leader")
        record = EpochRecord.from_json(raw)
        number = path.rpartition("/")[2]
        own = {
            item
            for item in record.segment_ids
            if item.epoch == record.epoch or item.is_prepared or number == numbers[0]
        }
        if taken and len(segments) + len(own) > TOPICS_AT_ONCE:
            break
        taken.append(number)
        segments |= own
    return taken, frozenset(segments)


def _keep_numbers(stream: LedStream) -> Steps[None]:
    """Write the numbers that a stream has used, before any part of it is deleted."""
    name, history = stream.config.name, stream.history
    kept = yield from read_children(paths.deleted_streams(name.scope))
    if former_among(kept, name).epoch >= history.next_epoch:
        return  # an earlier leader did that, and a stream that is being deleted gets no more epochs
    open_ones = {stream.place_of(item): item for item in history.segments() if history.sealed_end(item) is None}
    there = yield from TopicIds(sorted({topic for topic, _ in open_ones}))
    # A topic that was created again never belonged to the stream.
    other = {stream.config.topic} if there.get(stream.config.topic, "") != stream.config.topic_id else set()
    ends = yield from EndOffsets([place for place in sorted(open_ones) if place[0] in there.keys() - other])
    former = former_of(history, {open_ones[place]: end for place, end in ends.items()})
    yield from EnsureNodes([paths.deleted_streams(name.scope)])
    if not (yield from Write([CreateNode(f"{paths.deleted_streams(name.scope)}/{former.node(name.stream)}", b"")])):
        raise StaleStateError(f"the numbers of stream {name} were written by another leader")
    yield from _fold_formers(name.scope, [*kept, former.node(name.stream)])


def _fold_formers(scope: str, kept: Sequence[str]) -> Steps[None]:
    """Bound the number of nodes of deleted streams; does nothing if another group's leader does the same now."""
    floor, folded = fold(kept)
    if folded:
        parent = paths.deleted_streams(scope)
        added = [] if floor.node() in kept else [CreateNode(f"{parent}/{floor.node()}", b"")]
        yield from Write([*added, *(DeleteNode(f"{parent}/{node}") for node in folded)])


# Expiry of epochs


logger = logging.getLogger(__name__)


def drop_epochs(group: GroupState, now_ms: int) -> Steps[None]:
    """Drop unreferenced epochs, at intervals."""
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


def _drop_before(group: GroupState, stream: LedStream, first: int) -> Steps[bool]:
    """Drop epochs before ``first``, or some of them; return False if what is kept of them exceeds a node."""
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
            logger.warning("stream.epochs-kept stream=%s: the record of dropped epochs would be too large", name)
            return False
    yield from save(stream, paths.truncation(name), value, *gone)
    stream.history = kept
    stream.marks = marks_within(kept, stream.marks)
    group.counts["epochs_dropped"] += len(doomed)
    return True
