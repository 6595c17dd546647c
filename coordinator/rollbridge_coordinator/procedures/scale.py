"""Scale: seal some active segments and replace them by new ones, without waiting for open transactions.

The order of the effects: ``scaling`` fixes the plan and takes the request; the new topics are created; the old segments
are sealed; the epoch record, with their ends, is published together with the answer. Writers that are refused in
between look for the successors until these are published, so no write to a new segment can come before one to the old.

Source: PDP-24, "Update scale workflow to not wait on transaction completion".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollbridge.errors import ConflictError, InvalidRangesError, StreamBusyError
from rollbridge.model import paths
from rollbridge.model.changes import EpochTransition
from rollbridge.model.conditions import name_some
from rollbridge.model.epochs import EpochCause, EpochHistory, EpochRecord
from rollbridge.model.ids import SegmentId
from rollbridge.model.keyspace import KeyRange, ranges_of
from rollbridge.model.names import Partition
from rollbridge.model.records import CreateNode, DeleteNode, SetNode, check_segments
from rollbridge.model.requests import AdminAnswer, AdminRequest, RequestKind, refusing
from rollbridge_coordinator.procedures.adoption import is_its_topic, leaving, left_topic, note_settings, refuse_to_leave
from rollbridge_coordinator.procedures.journal import keep_journal
from rollbridge_coordinator.procedures.suspended import (
    LOOK_AGAIN_MS,
    abort_lasting,
    end_suspension,
    find_closed,
    hold_request,
    look_again,
    postpone,
    put_aside,
    refuse_request,
    still_held,
    suspend,
    tell,
)
from rollbridge_coordinator.state.effects import CreateTopics, EffectRefusedError, Now, Seal, Steps, Write
from rollbridge_coordinator.state.faults import SEAL_TIMEOUT, StaleStateError
from rollbridge_coordinator.state.group import GroupState, Wait
from rollbridge_coordinator.state.streams import LedStream, segment_topic_spec


def scale(group: GroupState, stream: LedStream, name: str, request: AdminRequest, now_ms: int) -> Steps[None]:
    """Carry out a request to scale. An invalid one is refused before anything is written.

    Raises:
        InvalidRangesError: see :meth:`EpochHistory.plan_scale`.
        InvalidRequestError: the stream would have too many segments.
        StreamBusyError: native transactions of others have been open for too long on what is to be sealed.
    """
    config = stream.config
    if stream.is_on_topic:
        if not request.leave_topic:
            raise refuse_to_leave(stream)
        config = yield from note_settings(group, stream, now_ms)
        seal, wanted = leaving(stream, request.seal, request.ranges)
        request = replace(request, seal=seal, ranges=wanted)
    ranges = ranges_of(request.ranges)
    try:
        record, _, closed = _plan(stream, request.seal, ranges, now_ms)
    except InvalidRangesError as fault:
        if stream.history.active.cause is not EpochCause.GROWN:
            raise
        raise InvalidRangesError(
            f"{fault}; partitions were added to topic {config.topic}, and have been taken in: there are "
            f"{len(stream.history.active.segments)} segments now, with other ranges than before; repeat the request "
            "with those that `stream describe` shows; nothing was sealed"
        ) from fault
    check_segments(stream.config.name, len(record.segments), len(stream.history.active.segments))
    if (yield from _is_held(group, list(closed.values()), name, request, now_ms)):
        return
    scaling = EpochTransition(
        stream.config.name,
        name,
        record.epoch,
        request.seal,
        tuple(ranges),
        now_ms,
        group.controller_epoch,
        request.abort_foreign,
    )
    taken = yield from Write(
        [
            DeleteNode(f"{paths.requests(group.name)}/{name}"),
            CreateNode(paths.scaling(group.name), scaling.to_json()),
            *([] if config is stream.config else [SetNode(paths.stream(config.name), config.to_json())]),
        ]
    )
    if taken:
        if config is not stream.config:
            stream.config = config
            # How an adopted topic is opened again has to be known, whatever becomes of ZooKeeper, before it is sealed.
            yield from keep_journal(group)
        yield from finish_scale(group, scaling, paths.scaling(group.name))


def _is_held(group: GroupState, places: list[Partition], name: str, request: AdminRequest, now_ms: int) -> Steps[bool]:
    """Return True if the scale has to wait for native transactions of others, or for a suspended change of the stream.

    Nothing is closed yet, so nobody else waits. With ``abort_foreign`` the native transactions are aborted.

    Raises:
        StreamBusyError: the scale has waited too long, or not all of them could be aborted.
    """
    before = group.held.pop(name, None)
    why = yield from hold_request(group, request.stream, abort_foreign=request.abort_foreign)
    if why:
        # What was seen before that is no first look for the one after it: what both do not see may have come between.
        wait: Wait | None = Wait(now_ms if before is None else before.since_ms, now_ms + LOOK_AGAIN_MS, frozenset())
    else:
        wait = yield from look_again(places, before, now_ms)
    if wait is None:
        return False
    if request.abort_foreign:
        failed = yield from abort_lasting(group, wait.lasting)
        if failed is not None:
            raise StreamBusyError(
                "native transactions of others are open on what is to be sealed, and could not all be aborted: "
                f"{failed}; the stream was not changed"
            )
    if now_ms - wait.since_ms >= group.settings.scale_wait_ms:
        raise StreamBusyError(
            f"stream {request.stream} cannot be scaled: {why}; nothing was changed"
            if why
            else f"stream {request.stream} cannot be scaled: what is to be sealed has waited for "
            f"{group.settings.scale_wait_ms / 1000:g} s for {name_some(wait.lasting)}. Native transactions can be "
            "aborted (--abort-foreign, abort_foreign=True); nothing was changed"
        )
    group.held[name] = tell(group, f"the scale of {request.stream}", wait, now_ms)
    return True


def finish_scale(group: GroupState, scaling: EpochTransition, node: str) -> Steps[str]:
    """Carry out the rest of a scale that is recorded in ``node``, whatever part of it has been done.

    Returns:
        Why it was refused and given up, or will be tried again; empty if it was carried out, or waits.
    """
    stream = group.streams[str(scaling.stream)]
    if stream.history.active.epoch >= scaling.epoch:
        raise StaleStateError(f"epoch {scaling.epoch} of {scaling.stream} exists, but its scale is not finished")
    record, history, closed = _plan(stream, scaling.seal, scaling.ranges, scaling.created_ms, scaling.reason)
    places = list(closed.values())
    adopted = {stream.config.topic: stream.config.topic_id} if stream.is_on_topic else {}
    try:
        yield from CreateTopics(
            [segment_topic_spec(stream.config, item.id) for item in history.began_with(record.epoch)]
        )
        ends = yield from Seal(places, adopted)
    except EffectRefusedError as refused:
        if adopted and isinstance(refused.effect, Seal) and refused.code == ConflictError.code:
            return (yield from _drop(group, scaling, node))
        return (yield from _give_up(group, scaling, refused, node))
    if len(ends) < len(places):
        yield from suspend(group, node, scaling, [place for place in places if place not in ends])
        return ""
    group.forecast.forget(places)
    record = replace(record, sealed_ends={item: ends[place] for item, place in closed.items()})
    answer = AdminAnswer(ok=True, answered_ms=scaling.created_ms, epoch=record.epoch)
    config = left_topic(stream)
    published = yield from Write(
        [
            CreateNode(paths.epoch(scaling.stream, record.epoch), record.to_json()),
            *([] if config is stream.config else [SetNode(paths.stream(scaling.stream), config.to_json())]),
            DeleteNode(node),
            *_answering(group, scaling, answer),
        ]
    )
    if not published:
        raise StaleStateError(f"the scale of {scaling.stream} to epoch {record.epoch} was finished by someone else")
    stream.history, stream.config = stream.history.with_records(record), config
    group.counts["scales"] += 1
    if scaling.request:
        group.metrics.note_answer(RequestKind.SCALE_STREAM, ok=True)
    yield from end_suspension(group, node)
    return ""


def go_on_with_scale(group: GroupState, node: str, scaling: EpochTransition, now_ms: int) -> Steps[None]:
    """Finish a suspended scale, unless it must wait longer."""
    stream = group.streams[str(scaling.stream)]
    _, _, closed = _plan(stream, scaling.seal, scaling.ranges, scaling.created_ms)
    if stream.is_on_topic and not (yield from is_its_topic(stream.config)):
        yield from _drop(group, scaling, node)
    elif not (yield from still_held(group, node, list(closed.values()), now_ms)):
        yield from finish_scale(group, scaling, node)


def _plan(
    stream: LedStream, seal_numbers: Sequence[int], ranges: Sequence[KeyRange], created_ms: int, reason: str = ""
) -> tuple[EpochRecord, EpochHistory, dict[SegmentId, Partition]]:
    """Return the epoch that a scale makes, the history with it, and where the segments lie that it seals."""
    record = stream.history.plan_scale(seal_numbers, ranges, created_ms, reason)
    history = stream.history.with_records(record)
    return record, history, stream.places_of(history.ended_with(record.epoch))


def _answering(group: GroupState, scaling: EpochTransition, answer: AdminAnswer) -> list[CreateNode]:
    """Return the write that answers the request for a scale; none if it was answered before."""
    if not scaling.request:
        return []
    return [CreateNode(f"{paths.answers(group.name)}/{scaling.request}", answer.to_json())]


def _give_up(group: GroupState, scaling: EpochTransition, refused: EffectRefusedError, node: str) -> Steps[str]:
    """Answer that a scale is refused, and return why; the next one uses the topics that were created for it.

    A scale that has closed segments is suspended instead, or plain writers would look for successors for ever.
    """
    is_closed = node in group.suspended
    if not is_closed and isinstance(refused.effect, Seal):
        is_closed = bool((yield from find_closed(refused.effect.partitions)))
    state = "nothing was changed"
    if is_closed:
        state = "its segments are closed to writers; the scale is finished once that is possible"
    why = f"{refused.by} refuses to scale stream {scaling.stream}: {refused.reason}; {state}"
    answer = refusing(refused.code, why, scaling.created_ms)
    if is_closed:
        if node not in group.suspended:
            node = yield from put_aside(group, node, scaling)
        waited_ms = group.times.stamp((yield from Now())) - scaling.created_ms
        if refused.code != SEAL_TIMEOUT or waited_ms >= group.settings.scale_wait_ms:
            yield from refuse_request(group, node, scaling, answer)
        yield from postpone(group, node, refused.reason)
        return why
    yield from _end(group, scaling, node, answer)
    return why


def _drop(group: GroupState, scaling: EpochTransition, node: str) -> Steps[str]:
    """Give up a scale that leaves a topic which is gone; what has its name now is not the stream's to close."""
    topic = group.streams[str(scaling.stream)].config.topic
    why = (
        f"topic {topic} was deleted, or created again, while stream {scaling.stream} was leaving it; release it and "
        "adopt it again"
    )
    yield from _end(group, scaling, node, refusing(ConflictError.code, why, scaling.created_ms))
    return why


def _end(group: GroupState, scaling: EpochTransition, node: str, answer: AdminAnswer) -> Steps[None]:
    if not (yield from Write([DeleteNode(node), *_answering(group, scaling, answer)])):
        raise StaleStateError(f"the scale of {scaling.stream} was finished by someone else")
    yield from end_suspension(group, node)
    group.counts["requests_refused"] += 1
    if scaling.request:
        group.metrics.note_answer(RequestKind.SCALE_STREAM, ok=answer.ok)
