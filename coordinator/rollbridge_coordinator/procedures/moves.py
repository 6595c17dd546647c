"""Move a stream into another transaction group of its scope. Every step may be repeated after a crash.

The order of a group's commits is decided by one leader, and a stream belongs to one group, so that its order is. It is
handed over in one ZooKeeper multi; before it the leader of the old group is the only one who may write for the stream,
after it that of the new one. What must not be lost, or adopted, are transactions whose clients still believe in the old
group. Their frames are in the stream's buffer, so the buffer stays with the old group, and the stream gets a new one:

1. The request is refused while transactions of the stream are open, or something else of it is under way. Otherwise it
   is taken in hand with a mark in the stream's record; from then on the stream is closed for other requests.
2. The old buffer is sealed, so that it has an end. Whoever begins after that without knowing of the move is refused by
   the broker; who came in before is folded, and aborted, with the reason, unless it has asked for its commit already.
3. When nothing of the stream is open the topic of the new buffer is made, and the journal of the old group forgets the
   stream; then one multi changes the group in the stream's record, names the new buffer, answers, and asks the new
   group's leader to take the stream.
4. The leader of the new group takes the stream from its record, at a takeover or by that request, and deletes the old
   buffer with its snapshots.

No snapshot, position or outcome of the old group is used by the new one: its buffer is another topic, and is empty.

Source: DistributedLog, transaction groups. Differs: there a writer names its group, here it is the stream's.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from rollbridge.errors import InvalidNameError, InvalidRequestError, StreamBusyError
from rollbridge.model import paths
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.pieces import BufferedTransaction
from rollbridge.model.records import CreateNode, DeleteNode, NodeOperation, SetNode, StreamConfig, StreamState
from rollbridge.model.requests import AdminAnswer, AdminRequest, RequestKind, refusing
from rollbridge.model.transaction import State
from rollbridge_coordinator.procedures.journal import append_journal, keep_journal
from rollbridge_coordinator.procedures.retention import load_stream
from rollbridge_coordinator.procedures.snapshots import clear_snapshots
from rollbridge_coordinator.state.effects import (
    CreateTopics,
    DeleteTopics,
    EffectRefusedError,
    EndOffsets,
    EnsureNodes,
    Seal,
    Steps,
    TopicIds,
    Write,
    read_node,
)
from rollbridge_coordinator.state.faults import StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.streams import LedStream, buffer_topic_spec

logger = logging.getLogger(__name__)


def move_stream(group: GroupState, name: str, stream: LedStream, request: AdminRequest, now_ms: int) -> Steps[None]:
    """Take a request to move a stream; :func:`move_further` carries it out and answers.

    Raises:
        InvalidRequestError: there is no such group, or the stream is in it.
        InvalidNameError: a stream of the scope has the group's name.
        StreamBusyError: transactions of it are open, or something else of it is under way.
    """
    own = stream.config.name
    target = GroupName(own.scope, request.group)
    if target == group.name:
        raise InvalidRequestError(f"stream {own} is in group {target} already; nothing was done")
    if (yield from read_node(paths.group(target))) is None:
        raise InvalidRequestError(f"there is no group {target}; stream {own} was not moved")
    if (yield from read_node(paths.stream(StreamName(own.scope, target.group)))) is not None:
        raise InvalidNameError(f"group {target} has the name of a stream of its scope; nothing was done")
    why = yield from _obstacle(group, stream)
    if why:
        raise StreamBusyError(f"stream {own} cannot be moved now: {why}; nothing was done; ask again later")
    marked = replace(
        stream.config,
        moving_to=target.group,
        moving_request=name,
        revision=stream.config.revision + 1,
    )
    if (
        yield from Write(
            [DeleteNode(f"{paths.requests(group.name)}/{name}"), SetNode(paths.stream(own), marked.to_json())]
        )
    ):
        stream.config = marked


def _obstacle(group: GroupState, stream: LedStream) -> Steps[str]:
    """Return why a stream cannot be moved now; empty if it can."""
    own = str(stream.config.name)
    fault = group.faults.get(own)
    if fault is not None:
        return f"it is in an error state: {fault.reason}"
    if group.is_half_done(own):
        return "a scale or a rolling commit of it waits half done"
    if stream.removing:
        return "topics of segments that were removed are being deleted"
    ends = yield from EndOffsets(sorted(stream.partitions()))
    if not group.is_folded(ends):
        return "frames of transactions have just come in"
    busy = _open(group, own)
    return f"it has {len(busy)} open transactions, the first is {busy[0].transaction_id}" if busy else ""


def move_further(group: GroupState, now_ms: int) -> Steps[None]:
    """Do the next steps of each move that is under way."""
    for stream in [item for item in group.streams.values() if item.config.moving_to]:
        work = f"move {stream.config.name}"
        if group.housekeeping.is_resting(work, now_ms):
            continue
        try:
            yield from _step(group, stream, now_ms)
        except EffectRefusedError as refused:
            group.housekeeping.rest(work, now_ms)
            yield from _answer_refused(group, stream, refused, now_ms)
        else:
            group.housekeeping.rested(work)


def _step(group: GroupState, stream: LedStream, now_ms: int) -> Steps[None]:
    own, config = str(stream.config.name), stream.config
    moved = replace(
        config,
        group=GroupName(config.name.scope, config.moving_to),
        moves=config.moves + 1,
        moving_to="",
        moving_request="",
        life_id=config.identity,
        revision=config.revision + 1,
    )
    partitions = sorted(stream.partitions())
    if own not in group.sealed_buffers:
        ends = yield from Seal(partitions)
        if len(ends) < len(partitions):
            return  # a native transaction of somebody else is open there
        group.sealed_buffers[own] = ends  # to seal it again would move its end
    if not group.is_folded(group.sealed_buffers[own]):
        return
    for item in _open(group, own):
        if item.state is State.OPEN:
            where = f"stream {own} was moved into another group, {moved.group}"
            why = f"{where}, while the transaction began; begin it again"
            group.fold.refuse(item.id, why, now_ms)
    if _open(group, own):
        return  # their outcomes come first
    ids = yield from CreateTopics([buffer_topic_spec(moved)])
    moved = replace(moved, buffer_topic_id=ids[moved.buffer_topic])
    yield from keep_journal(group)
    # The journal must not know a stream that its leader no longer looks after, whatever happens to it from now on.
    below = [path for path in group.journal.nodes if path.startswith(f"{paths.stream(config.name)}/")]
    yield from append_journal(group, dict.fromkeys([*below, paths.stream(config.name)], None))
    if not (yield from Write(_hand_over(group.name, config, moved, now_ms))):
        raise StaleStateError(f"stream {own} was changed while it was being moved")
    for partition in partitions:
        group.fold.positions.pop(partition, None)
        group.housekeeping.starts.pop(partition, None)
    group.forget_places(map(config.place, stream.history.segments()))
    group.snapshots.forget(partitions)
    group.faults.forget(own)
    del group.sealed_buffers[own]
    del group.streams[own]
    group.counts["streams_moved"] += 1
    if config.moving_request:
        group.metrics.note_answer(RequestKind.MOVE_STREAM, ok=True)
    logger.info("%s: stream %s is in group %s now", group.name, own, moved.group)


def _hand_over(group: GroupName, config: StreamConfig, moved: StreamConfig, now_ms: int) -> list[NodeOperation]:
    """Return the multi after which the stream is the other group's."""
    title = f"take-{config.name.stream}.{moved.first_epoch}.{moved.moves}"
    told = AdminRequest(
        kind=RequestKind.TAKE_STREAM, stream=str(config.name), group=moved.group.group, created_ms=now_ms
    )
    answer = AdminAnswer(ok=True, answered_ms=now_ms)
    # Clients watch the epochs: a node that comes and goes has them look at the stream's record again.
    passing = f"{paths.epochs(config.name)}/moved"
    return [
        SetNode(paths.stream(config.name), moved.to_json()),
        CreateNode(f"{paths.requests(moved.group)}/{title}", told.to_json()),
        CreateNode(passing, b""),
        DeleteNode(passing),
        *(
            [CreateNode(f"{paths.answers(group)}/{config.moving_request}", answer.to_json())]
            if config.moving_request
            else []
        ),
    ]


def _answer_refused(group: GroupState, stream: LedStream, refused: EffectRefusedError, now_ms: int) -> Steps[None]:
    """Answer the request for a move that is refused now; it is tried again at intervals."""
    config, who = stream.config, refused.by
    if not config.moving_request:
        return
    why = (
        f"{who} refuses what moving stream {config.name} into group {config.moving_to} needs: {refused.reason}; the "
        f"stream takes no transactions until it is moved, which is tried again now and then: have {who} allow it"
    )
    unasked = replace(config, moving_request="", revision=config.revision + 1)
    answer = refusing(refused.code, why, now_ms).to_json()
    if not (
        yield from Write(
            [
                SetNode(paths.stream(config.name), unasked.to_json()),
                CreateNode(f"{paths.answers(group.name)}/{config.moving_request}", answer),
            ]
        )
    ):
        raise StaleStateError(f"stream {config.name} was changed while it was being moved")
    stream.config = unasked
    group.counts["requests_refused"] += 1
    group.metrics.note_answer(RequestKind.MOVE_STREAM, ok=False)


def take_stream(group: GroupState, name: str, request: AdminRequest) -> Steps[None]:
    """Take over a stream that another group's leader has handed over, and delete what that one used.

    It may have been taken by a takeover already, or be gone again.
    """
    stream = StreamName.parse(request.stream)
    raw = yield from read_node(paths.stream(stream))
    config = None if raw is None else StreamConfig.from_json(raw)
    if config is not None and config.group == group.name and config.state is StreamState.ACTIVE:
        if str(stream) not in group.streams:
            there = yield from TopicIds([config.buffer_topic])
            if there.get(config.buffer_topic) != config.buffer_topic_id:
                raise StaleStateError(f"the buffer of stream {stream}, which came into {group.name}, is another topic")
            led = yield from load_stream(config)
            yield from EnsureNodes([paths.cas_slots(stream)])
            group.add_stream(led)
        formers = config.former_buffer_topics()
        there = yield from TopicIds(formers)
        yield from DeleteTopics(sorted(there))
        gone = {*there, *formers[-1:]}
        yield from clear_snapshots(
            group, [(item, at) for item in sorted(gone) for at in range(config.buffer_partitions)]
        )
    yield from Write([DeleteNode(f"{paths.requests(group.name)}/{name}")])
    group.metrics.note_answer(request.kind, ok=True)


def _open(group: GroupState, stream: str) -> list[BufferedTransaction]:
    return [item for item in group.fold.open.values() if stream in item.all_streams()]
