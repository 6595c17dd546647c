"""Truncation of streams, by request and by retention, and of their buffers. Nothing undecided is ever deleted.

Order of the effects for a stream: fully truncated segments are marked as removed, so that readers begin after them;
records are deleted; the request is answered; the topics of the marked segments are deleted, some at a time. Each effect
may be repeated. A deposed leader may delete records late: its decision rests on ends which do not change, and on
commits of groups, which do not go back.

A buffer is truncated below the low-water mark of each partition: every transaction below it is decided and merged, and
its outcome is in the commit log. That stays true under any leader, so a late truncation by a deposed leader is
harmless.

Source: Pravega's ``TruncateStreamTask`` and stream retention; PIP-196, the max read position; DESIGN of the buffer in
docs/protocol.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import SegmentId
from rollbridge.errors import ConflictError, InvalidRequestError, UnavailableError
from rollbridge.metadata import paths
from rollbridge.metadata.records import (
    CheckNode,
    CreateNode,
    DeleteNode,
    Mark,
    NodeOperation,
    RetentionMarks,
    SetNode,
    Truncation,
)
from rollbridge.metadata.requests import AdminAnswer, AdminRequest
from rollbridge.stream.config import FOREVER, Retention, header_form, record_times
from rollbridge.stream.config import StreamState as Lifecycle
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import Partition
from rollbridge.stream.truncation import Floors, consistent, floors_of, lower, read_by_group, removable
from rollbridge_coordinator.commit.refusals import apart
from rollbridge_coordinator.core.bookkeeping import is_mark_due, marks_that_fit, place_to_truncate
from rollbridge_coordinator.core.effects import (
    DeleteRecords,
    DeleteTopics,
    DiskBytes,
    EffectRefusedError,
    GroupCommits,
    Now,
    StableEnds,
    StartOffsets,
    TopicIds,
    Write,
    read_node,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import LedStream
from rollbridge_coordinator.core.waits import LostRaceError, StaleStateError
from rollbridge_coordinator.streams.adopt import check_topic_retention, check_topic_scaling, is_its_topic

logger = logging.getLogger(__name__)

TOPICS_AT_ONCE: Final = 50
"""Topics of removed segments deleted in one turn, before other work."""
REMOVED_BYTES: Final = 42
"""Most bytes of a removed segment in the truncation node of a stream, named twice until its topic is gone."""


def truncate_stream(group: GroupState, stream: LedStream, name: str, request: AdminRequest, now_ms: int) -> Steps[None]:
    """Truncate a stream at the cut of a request. A cut may name segments deleted already.

    Raises:
        InvalidRequestError: see :func:`floors_of`; or an offset beyond the last stable offset.
        ConflictError: a consumer group that the stream waits for has not read what would be deleted, or the stream's
            adopted topic was deleted.
        UnavailableError: Kafka does not delete the records, or the commits of a group cannot be read now.
    """
    history = stream.history
    floors = floors_of(history, request.cut)
    if stream.late.forwarding is not None:
        raise UnavailableError(
            f"late records of {stream.config.name} are being copied; nothing was deleted; try again in a moment"
        )
    if stream.is_on_topic and not (yield from is_its_topic(stream.config)):
        raise ConflictError(
            f"topic {stream.config.topic} was deleted or replaced after stream {stream.config.name} had adopted it; "
            "nothing was deleted"
        )
    active = [item for item in floors if item in history.active.segment_ids]
    ends = yield from StableEnds([stream.place_of(item) for item in active])
    for segment in active:
        end = ends.get(stream.place_of(segment))
        if end is None:
            raise UnavailableError(f"the end of segment {segment} is unknown now; nothing was deleted; try again")
        if floors[segment] > end:
            raise InvalidRequestError(
                f"offset {floors[segment]} of segment {segment} is beyond its last stable offset, which is at {end}; "
                "nothing was deleted"
            )
    floors = consistent(history, floors)
    for reader, spared in (yield from _read_by_groups(group, stream)).items():
        if spared is None:
            raise UnavailableError(f"the position of group {reader} is unknown now; nothing was deleted; try again")
        _check_read(stream, floors, reader, spared)
    if not (yield from _delete_below(group, stream, floors)):
        raise UnavailableError(
            f"Kafka did not delete all records of {stream.config.name} that were to be deleted; see the "
            "coordinator's log, then repeat the request"
        )
    answered = yield from Write(
        [
            DeleteNode(f"{paths.requests(group.name)}/{name}"),
            CreateNode(f"{paths.answers(group.name)}/{name}", AdminAnswer(ok=True, answered_ms=now_ms).to_json()),
        ]
    )
    if not answered:
        raise LostRaceError(f"the truncation of stream {stream.config.name} is not answered")
    group.metrics.note_answer(request.kind, ok=True)


def update_stream(group: GroupState, stream: LedStream, name: str, request: AdminRequest, now_ms: int) -> Steps[None]:
    """Change the retention of a stream, headers and times of later transactions' records, and its scaling by load.

    Raises:
        InvalidRequestError: the retention is invalid, or limits an adopted topic, which its owner does. Or there are no
            such headers or times, or the scaling policy is invalid, or the topic is adopted.
    """
    policy, scaling = request.retention or Retention(), stream.config.scaling
    policy.check()
    if request.scaling is not None:
        request.scaling.check()
        scaling = None if request.scaling.is_fixed else request.scaling
    if stream.is_on_topic:
        check_topic_retention(stream.config.topic, policy)
        check_topic_scaling(stream.config.topic, scaling)
    config = replace(
        stream.config,
        retention=policy,
        headers=header_form(request.headers) or stream.config.headers,
        timestamps=record_times(request.timestamps) or stream.config.timestamps,
        scaling=scaling,
        revision=stream.config.revision + 1,
    )
    written = yield from Write(
        [
            DeleteNode(f"{paths.requests(group.name)}/{name}"),
            SetNode(paths.stream(config.name), config.to_json()),
            CreateNode(f"{paths.answers(group.name)}/{name}", AdminAnswer(ok=True, answered_ms=now_ms).to_json()),
        ]
    )
    if not written:
        raise LostRaceError(f"stream {config.name} is not updated")
    group.metrics.note_answer(request.kind, ok=True)
    stream.config = config


def retain_streams(group: GroupState, now_ms: int) -> Steps[None]:
    """Delete expired records of streams, at intervals, and the topics of removed segments."""
    for stream in [item for item in group.streams.values() if item.removing]:
        yield from _delete_topics(group, stream, now_ms)
    if not group.housekeeping.is_due("retention", now_ms, group.settings.retention_check_ms):
        return
    limited = [
        item
        for item in group.streams.values()
        if item.config.retention.is_limited
        and item.config.state is Lifecycle.ACTIVE
        and not item.is_on_topic  # an earlier version has taken limits there
        and not group.is_half_done(str(item.config.name))
        and item.late.forwarding is None  # whether the copies are there is judged by what has not been deleted
        and not (group.times.differ and item.config.retention.ms != FOREVER)
    ]
    if not limited:
        return
    ends = yield from StableEnds(
        [stream.place_of(item) for stream in limited for item in stream.history.active.segment_ids]
    )
    noted_ms = group.times.stamp(max(now_ms, (yield from Now())))
    by_size = [stream for stream in limited if stream.config.retention.bytes != FOREVER]
    sizes: Mapping[Partition, int] = {}
    if by_size:
        wanted = [stream.place_of(item) for stream in by_size for item in stream.counter.wanted(stream.history)]
        sizes = yield from DiskBytes(wanted)
    for stream in limited:
        part = _retain(group, stream, ends, sizes, now_ms, noted_ms)
        yield from apart(group, str(stream.config.name), "retention", part)


def remove_emptied(group: GroupState, now_ms: int) -> Steps[None]:
    """Remove sealed segments that Kafka itself has emptied, at intervals; the stream needs no retention.

    Their topics have a retention in Kafka, as an adopted topic may have that the stream has left, or their records were
    deleted by others. Only segments without remaining predecessors are checked. A segment that never held a record is
    kept: a reader may be positioned in it, and would take its removal for a loss.
    """
    if not group.housekeeping.is_due("emptied segments", now_ms, group.settings.bookkeeping_ms):
        return
    for name, stream in list(group.streams.items()):
        if stream.config.state is not Lifecycle.ACTIVE or stream.is_on_topic or group.is_half_done(name):
            continue
        if stream.late.forwarding is None:
            yield from apart(group, name, "emptied segments", _remove_emptied(group, stream))


def _remove_emptied(group: GroupState, stream: LedStream) -> Steps[None]:
    history = stream.history
    front = [
        segment
        for segment, node in history.graph.nodes.items()
        if node.sealed_end is not None
        and segment not in history.removed
        and history.removed.issuperset(node.predecessors)
    ]
    there = yield from TopicIds(sorted({stream.place_of(item)[0] for item in front}))
    if stream.config.topic and there.get(stream.config.topic) != stream.config.topic_id:
        there = {name: identity for name, identity in there.items() if name != stream.config.topic}
    places = {item: place for item in front if (place := stream.place_of(item))[0] in there}
    if not places:
        return
    starts = yield from StartOffsets(sorted(places.values()), is_patient=False)
    floors = {item: start for item, place in places.items() if (start := starts.get(place, 0)) > 0}
    for spared in (yield from _read_by_groups(group, stream)).values():
        floors = lower(floors, spared or {})
    floors = {item: floor for item, floor in floors.items() if floor >= (history.sealed_end(item) or floor + 1)}
    if floors:
        yield from _delete_below(group, stream, consistent(history, floors))
        group.counts["segments_emptied"] += len(floors)


LOOKS: Final = 2
"""Looks in vain, one after the other, after which a topic is gone; a broker may not know it for a moment."""


def remove_lost(group: GroupState, now_ms: int) -> Steps[None]:
    """Remove the segments in a topic that its owner has deleted after the stream had left it, at intervals.

    Nothing brings them back: a topic of that name has another id. Readers would wait for them otherwise.
    """
    if not group.housekeeping.is_due("left topics", now_ms, group.settings.topic_check_ms):
        return
    for name, stream in list(group.streams.items()):
        if stream.config.state is not Lifecycle.ACTIVE or stream.is_on_topic or group.is_half_done(name):
            continue
        lost = {
            item: end
            for item in stream.history.stored()
            if stream.config.places.is_adopted(item) and (end := stream.history.sealed_end(item)) is not None
        }
        if lost and stream.late.forwarding is None:
            yield from apart(group, name, "segments of a topic that is gone", _remove_lost(group, stream, lost))


def _remove_lost(group: GroupState, stream: LedStream, lost: Floors) -> Steps[None]:
    stream.looks_in_vain = 0 if (yield from is_its_topic(stream.config)) else stream.looks_in_vain + 1
    if stream.looks_in_vain < LOOKS:
        return
    floors = consistent(stream.history, lost)
    topic, name = stream.config.topic, stream.config.name
    logger.warning(
        "retention.topic-gone stream=%s topic=%s segments=%d: their records are lost", name, topic, len(floors)
    )
    yield from _delete_below(group, stream, floors)


def _retain(
    group: GroupState,
    stream: LedStream,
    ends: Mapping[Partition, int],
    sizes: Mapping[Partition, int],
    now_ms: int,
    noted_ms: int,
) -> Steps[None]:
    """Delete records expired at ``now_ms`` by a stream's retention; ``ends`` were reached by ``noted_ms``."""
    policy, history = stream.config.retention, stream.history
    wanted = {item: stream.place_of(item) for item in stream.counter.wanted(history)}
    found = {item: sizes[place] for item, place in wanted.items() if place in sizes}
    written = stream.counter.count(history, found, stream.marks)
    cut = {item: ends.get(stream.place_of(item), -1) for item in history.active.segment_ids}
    if min(cut.values()) < 0:
        return
    changed = is_mark_due(stream.marks, noted_ms, written, cut, policy)
    if changed:
        stream.marks.append(Mark(noted_ms, written, cut))
    place = place_to_truncate(stream.marks, group.times.earliest(now_ms), written, policy)
    if place is not None:
        floors = consistent(history, floors_of(history, stream.marks[place].cut))
        for spared in (yield from _read_by_groups(group, stream)).values():
            floors = consistent(history, lower(floors, spared or {}))
        yield from _delete_below(group, stream, floors)
        # Earlier marks are covered by this one, which stays for as long as a group has not read up to it.
        changed = changed or place > 0
        del stream.marks[:place]
    if changed:
        stream.marks = marks_that_fit(stream.marks, group.settings.write_bytes_max)
        yield from save(stream, paths.retention(stream.config.name), RetentionMarks(tuple(stream.marks)).to_json())


def _read_by_groups(group: GroupState, stream: LedStream) -> Steps[dict[str, Floors | None]]:
    """Return the floors below which each group of the retention has read; None for a group unknown now."""
    readers = stream.config.retention.groups
    if not readers:
        return {}
    found = yield from GroupCommits(readers)
    return {
        reader: read_by_group(stream.history, dict(_of_stream(stream, found[reader]))) if reader in found else None
        for reader in readers
    }


def _of_stream(stream: LedStream, commits: Mapping[Partition, int]) -> Iterable[tuple[SegmentId, int]]:
    for place, offset in commits.items():
        segment = stream.config.places.segment_at(place)
        if segment is not None:
            yield segment, offset


def _check_read(stream: LedStream, floors: Floors, reader: str, spared: Floors) -> None:
    for segment, floor in sorted(floors.items()):
        read = spared.get(segment, 0)
        if segment not in stream.history.removed and read < floor:
            raise ConflictError(
                f"stream {stream.config.name} waits for consumer group {reader}, which has read segment {segment} up "
                f"to offset {read} and not up to {floor}; nothing was deleted"
            )


def _delete_below(group: GroupState, stream: LedStream, floors: Floors) -> Steps[bool]:
    """Delete everything below consistent floors; return False if Kafka did not delete all of it.

    As many segments are marked as removed as the truncation node has room for. Of the others the records are deleted;
    they are marked when the first ones were dropped with their epochs.
    """
    taken = len(_truncation(stream.history, stream.removing))
    room = max(group.settings.write_bytes_max - taken, 0) // REMOVED_BYTES
    doomed = removable(stream.history, floors)[:room]  # predecessors come first
    if doomed:
        history, removing = stream.history.with_removed(doomed), stream.removing | frozenset(doomed)
        yield from _save_truncation(stream, history, removing)
        stream.history, stream.removing = history, removing
        group.counts["segments_removed"] += len(doomed)
    starts = group.housekeeping.starts
    before = {
        stream.place_of(segment): floor
        for segment, floor in floors.items()
        if segment not in stream.history.removed and floor > starts.get(stream.place_of(segment), 0)
    }
    topic = stream.config.topic
    if any(place[0] == topic for place in before) and not (yield from is_its_topic(stream.config)):
        before = {place: floor for place, floor in before.items() if place[0] != topic}  # nothing is left of it
    if not before:
        return True
    refused = yield from DeleteRecords(before)
    starts.update((place, floor) for place, floor in before.items() if place not in refused)
    group.counts["stream_truncations"] += len(before) - len(refused)
    group.counts["truncations_refused"] += len(refused)
    return not refused


def _delete_topics(group: GroupState, stream: LedStream, now_ms: int) -> Steps[None]:
    """Delete topics of removed segments; after a failure the next attempt waits for the retention interval."""
    work = f"removal {stream.config.name}"
    if not group.housekeeping.is_due(work, now_ms, group.settings.retention_check_ms):
        return
    doomed = frozenset(islice(sorted(stream.removing), TOPICS_AT_ONCE))
    try:
        if not (yield from DeleteTopics(stream.config.places.own_topics(doomed))):
            return
    except EffectRefusedError as refused:
        logger.warning('retention.topics-kept stream=%s reason="%s"', stream.config.name, refused.reason)
        return
    group.forget_places(map(stream.place_of, doomed))
    yield from _save_truncation(stream, stream.history, stream.removing - doomed)
    stream.removing -= doomed
    del group.housekeeping.done_ms[work]


def _save_truncation(stream: LedStream, history: EpochHistory, removing: frozenset[SegmentId]) -> Steps[None]:
    yield from save(stream, paths.truncation(stream.config.name), _truncation(history, removing))


def _truncation(history: EpochHistory, removing: frozenset[SegmentId]) -> bytes:
    return Truncation(history.removed, removing, history.foundation).to_json()


def save(stream: LedStream, path: str, value: bytes, *beside: NodeOperation) -> Steps[None]:
    """Write a node that belongs to a stream in one multi with other operations, if the stream still exists.

    Raises:
        StaleStateError: the multi did not apply: another leader has written.
    """
    known = yield from read_node(path)
    operation: NodeOperation = CreateNode(path, value) if known is None else SetNode(path, value)
    if not (yield from Write([CheckNode(paths.stream(stream.config.name)), operation, *beside])):
        raise StaleStateError(f"{path} was written by another leader")


# Truncation of buffers


def needed_from(group: GroupState) -> Mapping[Partition, int]:
    """Return per buffer partition the offset below which neither this leader nor a later one needs anything.

    A change that makes a new leader read from further back has to lower the offset here.
    """
    return group.fold.low_water()


def truncate_buffers(group: GroupState, now_ms: int) -> Steps[None]:
    """Delete unneeded frames from the buffers, at intervals."""
    work = group.housekeeping
    if not work.is_due("truncate_buffers", now_ms, group.settings.truncate_buffers_ms, at_once=False):
        return
    present = group.partitions()
    before = {
        partition: offset
        for partition, offset in needed_from(group).items()
        if partition in present and offset > work.starts.get(partition, 0)
    }
    if not before:
        return
    refused = yield from DeleteRecords(before)
    for partition, offset in before.items():
        if partition not in refused:
            work.starts[partition] = offset
            group.counts["buffer_truncations"] += 1
            known = group.snapshots.partitions.get(partition)
            if known is not None:
                known.log_start = offset  # snapshot segments about offsets below have expired
    group.counts["truncations_refused"] += len(refused)
