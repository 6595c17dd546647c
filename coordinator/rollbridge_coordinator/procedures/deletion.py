"""Deletion of streams: marked first, then carried out bit by bit, by whoever leads, while everything else goes on.

The mark takes the request and keeps its name, so that the answer says what was done whoever ends it. From then on the
stream is none of the group's any more. First of all is written down which numbers it has used: one that is created
under its name goes on above them (:mod:`rollbridge.model.lives`). What it had goes in this order, so that what is left
always says what is left to do: the buffer; then, from the newest epoch to the oldest, the topics of the segments that
began in it and its node; with the oldest of them everything else in ZooKeeper, and the answers. Each step is bounded,
because a ZooKeeper multi holds 1 MiB and a stream may have tens of thousands of epochs, and each can be done again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from rollbridge.errors import StreamBusy
from rollbridge.model import paths
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.lives import fold, former_among, former_of
from rollbridge.model.names import StreamName
from rollbridge.model.nodes import CreateNode, DeleteNode, NodeOperation, SetNode, leading
from rollbridge.model.records import StreamConfig, StreamState, Truncation, epoch_from_json
from rollbridge.model.requests import Answer, refusing
from rollbridge_coordinator.procedures.journal import note_deletion
from rollbridge_coordinator.procedures.retention import load_stream
from rollbridge_coordinator.procedures.snapshots import clear_snapshots
from rollbridge_coordinator.procedures.suspended import without_stream
from rollbridge_coordinator.state import streams
from rollbridge_coordinator.state.effects import Refused
from rollbridge_coordinator.state.errors import StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.steps import (
    Steps,
    end_offsets,
    ensure_nodes,
    read_children,
    read_nodes,
    topic_ids,
    try_to_delete_topics,
    write,
)

EPOCHS_AT_ONCE: Final = 200
"""Epoch nodes that are looked at, and removed, in one step."""
TOPICS_AT_ONCE: Final = 100
"""Topics that are deleted in one step, unless a single epoch has begun more; and in one request to Kafka."""
ASKED_MAX: Final = 100
"""Requests for one deletion that wait for its end."""


def delete_stream(group: GroupState, name: str, stream: streams.StreamState, now_ms: int) -> Steps[None]:
    """Take a request to delete a stream; :func:`delete_further` carries it out and answers.

    A scale of it that waits half done is given up; of a rolling commit what is about this stream.

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
    dropping, left = without_stream(group, own, now_ms)
    marked = yield from _mark(group, name, stream.config, dropping)
    if marked is not None:
        for node, work in left.items():
            if work is None:
                del group.suspended[node]
            else:
                group.suspended[node].work = work
        for partition in stream.partitions():
            group.fold.positions.pop(partition, None)
            group.housekeeping.starts.pop(partition, None)
        group.snapshots.forget(stream.partitions())
        del group.streams[own]
        group.faults.forget(own)
        group.doomed[own] = streams.Doomed(marked)


def delete_again(group: GroupState, name: str, doomed: streams.Doomed) -> Steps[None]:
    """Take another request to delete a stream that is being deleted, which is tried again at once.

    Raises:
        StreamBusy: too many wait for it already.
    """
    if len(doomed.config.deletion_requests) >= ASKED_MAX:
        raise StreamBusy(
            f"stream {doomed.config.name} is being deleted, and {ASKED_MAX} requests wait for the end of it already"
        )
    marked = yield from _mark(group, name, doomed.config)
    if marked is not None:
        doomed.config = marked
        group.housekeeping.done_ms.pop(doomed.work, None)


def delete_further(group: GroupState, now_ms: int) -> Steps[bool]:
    """Do a step of each deletion that is under way; True if the next steps need not wait."""
    left = False
    for doomed in list(group.doomed.values()):
        if group.housekeeping.is_due(doomed.work, now_ms, group.settings.retention_check_ms):
            try:
                if (yield from _step(group, doomed, now_ms)):
                    group.housekeeping.done_ms.pop(doomed.work, None)
            except Refused as refused:
                yield from _answer_refused(group, doomed, refused, now_ms)
            left = left or (doomed.work not in group.housekeeping.done_ms and str(doomed.config.name) in group.doomed)
    return left


def _answer_refused(group: GroupState, doomed: streams.Doomed, refused: Refused, now_ms: int) -> Steps[None]:
    """Answer that a deletion cannot go on now; it is tried again now and then."""
    name, waiting = doomed.config.name, doomed.config.deletion_requests
    if not waiting:
        return
    who = refused.by
    why = (
        f"{who} refuses to delete what there is of stream {name}: {refused.reason}; the stream can not be used any "
        f"more, and what is left of it is deleted once {who} allows it; ask again to wait for that"
    )
    answer = refusing(refused.code, why, now_ms).to_json()
    config = replace(doomed.config, deletion_requests=())
    if not (
        yield from write(
            SetNode(paths.stream(name), config.to_json()),
            *(CreateNode(f"{paths.answers(group.name)}/{item}", answer) for item in waiting),
        )
    ):
        raise StaleStateError(f"stream {name} was changed while it was being deleted")
    doomed.config = config
    group.counts["requests_refused"] += 1


def _mark(
    group: GroupState, name: str, config: StreamConfig, more: Sequence[NodeOperation] = ()
) -> Steps[StreamConfig | None]:
    """Note that a stream is to be deleted, and who asked; None if whoever asked has withdrawn it."""
    marked = replace(config, state=StreamState.DELETING, deletion_requests=(*config.deletion_requests, name))
    taken = yield from write(
        DeleteNode(f"{paths.requests(group.name)}/{name}"), SetNode(paths.stream(config.name), marked.to_json()), *more
    )
    return marked if taken else None


def _step(group: GroupState, doomed: streams.Doomed, now_ms: int) -> Steps[bool]:
    """Delete the next bit of a stream; False if Kafka does not do it now."""
    name = doomed.config.name
    if not doomed.has_begun:
        # What an earlier leader has removed of it are its newest epochs, so what is left is a history, too.
        yield from _keep_numbers((yield from load_stream(doomed.config)))
        formers = yield from read_children(paths.formers(name.scope))
        yield from note_deletion(group, name, former_among(formers, name).node(name.stream))
        if not (yield from try_to_delete_topics([doomed.config.buffer_topic])):
            return False
        yield from clear_snapshots(group, doomed.partitions())
        doomed.has_begun = True
    numbers = yield from read_children(paths.epochs(name))
    taken, segments = yield from _newest(name, numbers, group.settings.write_bytes_max)
    more: Mapping[str, bytes | None] = {}
    if len(taken) == len(numbers):
        kept = (paths.truncation(name), paths.retention(name), paths.late(name), paths.stream_fault(name))
        more = yield from read_nodes(kept)
        raw = more[paths.truncation(name)]
        segments |= Truncation.from_json(raw).removing if raw is not None else frozenset()
    topics = sorted(map(name.segment_topic, segments))
    for first in range(0, len(topics), TOPICS_AT_ONCE):
        if not (yield from try_to_delete_topics(topics[first : first + TOPICS_AT_ONCE])):
            return False
    group.forecast.forget(topics)
    for topic in topics:
        group.housekeeping.starts.pop((topic, 0), None)
    gone = [DeleteNode(f"{paths.epochs(name)}/{number}") for number in taken]
    if len(taken) < len(numbers):
        applied = yield from write(*gone)
    else:
        answer = Answer(ok=True, answered_ms=now_ms).to_json()
        applied = yield from write(
            *gone,
            *(DeleteNode(path) for path, value in more.items() if value is not None),
            DeleteNode(paths.epochs(name)),
            DeleteNode(paths.stream(name)),
            *(CreateNode(f"{paths.answers(group.name)}/{item}", answer) for item in doomed.config.deletion_requests),
        )
    if not applied:
        raise StaleStateError(f"stream {name} was changed while it was being deleted")
    if len(taken) == len(numbers):
        del group.doomed[str(name)]
        yield from write(DeleteNode(paths.cas_slots(name)))  # does not apply while a writer holds a slot, or never did
    return True


def _newest(name: StreamName, numbers: list[str], bytes_max: int) -> Steps[tuple[list[str], frozenset[SegmentId]]]:
    """The newest epochs that can be deleted at once, newest first, and the segments that began in them.

    What is active in the oldest of all may have begun in epochs that have been dropped.
    """
    newest = [f"{paths.epochs(name)}/{number}" for number in numbers[-EPOCHS_AT_ONCE:]]
    newest = newest[-leading([DeleteNode(path) for path in newest], bytes_max // 2) :]
    values = yield from read_nodes(newest)
    taken: list[str] = []
    segments: set[SegmentId] = set()
    for path in reversed(newest):
        raw = values[path]
        if raw is None:
            raise StaleStateError(f"{path} was deleted by someone else")
        record = epoch_from_json(raw)
        number = path.rpartition("/")[2]
        own = {item for item in record.segment_ids if item.epoch == record.epoch or number == numbers[0]}
        if taken and len(segments) + len(own) > TOPICS_AT_ONCE:
            break
        taken.append(number)
        segments |= own
    return taken, frozenset(segments)


def _keep_numbers(stream: streams.StreamState) -> Steps[None]:
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
