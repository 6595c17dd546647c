"""Scaling by load: measure the streams that have a policy, decide, sample the cuts, and scale. A chore of leaders.

Order of the effects: ends and sizes of active segments are read, for all streams together; for one stream with a split
or merge to do, native transactions of others are checked, and keys are sampled; the scale is recorded, and from then on
is one as any other, which the next leader finishes. A crash before that has done nothing; one after it is that of a
scale.

A scale by load never delays other work for long: it waits, and publishes why, while another change of the stream is
under way; while many old transactions are open, each of which would be merged by a rolling commit with two epochs
later; and while clocks differ so much that the time of the last scale is uncertain.

Source: Pravega's ``AutoScaleProcessor``; state and rules are in :mod:`rollbridge_coordinator.streams.scaling_policy`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.errors import INVALID_RANGES
from rollbridge.base.ids import SegmentId
from rollbridge.errors import ConflictError, CorruptDataError, InvalidRequestError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import EpochTransition
from rollbridge.metadata.records import CreateNode, DeleteNode, NodeOperation, SetNode, check_segments
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind, refusing
from rollbridge.stream.conditions import name_some
from rollbridge.stream.config import StreamState as Lifecycle
from rollbridge.stream.epochs import EpochCause, EpochHistory, EpochRecord
from rollbridge.stream.keyspace import KeyRange, ranges_of, wrong_ranges
from rollbridge.stream.names import Partition, StreamName
from rollbridge.stream.scaling import ScalingPolicy, ScalingWait, ScalingWaits
from rollbridge_coordinator.core.effects import (
    CreateTopics,
    DiskBytes,
    EffectRefusedError,
    LogEnds,
    LookForObstacles,
    Now,
    SampleKeys,
    Seal,
    Write,
    read_node,
)
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.stream_state import LedStream, segment_topic_spec
from rollbridge_coordinator.core.waits import SEAL_TIMEOUT, LostRaceError, StaleStateError, Wait
from rollbridge_coordinator.history.journal import keep_journal
from rollbridge_coordinator.streams.adopt import is_its_topic, leaving, left_topic, note_settings, refuse_to_leave
from rollbridge_coordinator.streams.pending_changes import (
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
from rollbridge_coordinator.streams.scaling_policy import (
    WINDOWS,
    ActiveSegment,
    DeferReason,
    Deferred,
    ScalingPlan,
    SegmentMerge,
    SegmentSplit,
    cut,
    decide,
    plan_merge,
    plan_split,
    recent_scales,
    view,
)

# Scale: seal some active segments and replace them by new ones, without waiting for open transactions.
#
# The order of the effects: ``scaling`` fixes the plan and takes the request; the new topics are created; the old
# segments are sealed; the epoch record, with their ends, is published together with the answer. Writers that are
# refused in between look for the successors until these are published, so no write to a new segment can come before one
# to the old.
#
# Source: PDP-24, "Update scale workflow to not wait on transaction completion".


def scale(group: GroupState, stream: LedStream, name: str, request: AdminRequest, now_ms: int) -> Steps[None]:
    """Carry out a request to scale. An invalid one is refused before anything is written.

    Raises:
        InvalidRequestError: see :meth:`EpochHistory.plan_scale`.
        InvalidRequestError: the stream would have too many segments.
        ConflictError: native transactions of others have been open for too long on segments to be sealed.
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
    except InvalidRequestError as fault:
        if fault.code != INVALID_RANGES or stream.history.active.cause is not EpochCause.GROWN:
            raise
        raise wrong_ranges(
            f"{fault}; partitions were added to topic {config.topic}, and were included: there are "
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
    if not taken:
        raise LostRaceError(f"the scale of stream {stream.config.name} is not begun")
    if config is not stream.config:
        stream.config = config
        # Record the settings to open an adopted topic again before it is sealed: ZooKeeper may be lost.
        yield from keep_journal(group)
    yield from finish_scale(group, scaling, paths.scaling(group.name))


def _is_held(group: GroupState, places: list[Partition], name: str, request: AdminRequest, now_ms: int) -> Steps[bool]:
    """Return True if the scale has to wait for native transactions of others, or for a suspended change of the stream.

    Nothing is closed yet, so no other work waits. With ``abort_foreign`` the native transactions are aborted.

    Raises:
        ConflictError: the scale has waited too long, or not all of them could be aborted.
    """
    before = group.waits.held.pop(name, None)
    why = yield from hold_request(group, request.stream, abort_foreign=request.abort_foreign)
    if why:
        # An earlier check is no first check for the one after this: something may have begun between both.
        wait: Wait | None = Wait(now_ms if before is None else before.since_ms, now_ms + LOOK_AGAIN_MS, frozenset())
    else:
        wait = yield from look_again(places, before, now_ms)
    if wait is None:
        return False
    if request.abort_foreign:
        failed = yield from abort_lasting(group, wait.lasting)
        if failed is not None:
            raise ConflictError(
                "native transactions of others are open on what is to be sealed, and could not all be aborted: "
                f"{failed}; the stream was not changed",
                code="stream-busy",
            )
    if now_ms - wait.since_ms >= group.settings.scale_wait_ms:
        raise ConflictError(
            f"stream {request.stream} cannot be scaled: {why}; nothing was changed"
            if why
            else f"stream {request.stream} cannot be scaled: what is to be sealed has waited for "
            f"{group.settings.scale_wait_ms / 1000:g} s for {name_some(wait.lasting)}. "
            + (
                "Native transactions were aborted meanwhile, and others were begun; the stream was not changed"
                if request.abort_foreign
                else "Native transactions can be aborted (--abort-foreign, abort_foreign=True); nothing was changed"
            ),
            code="stream-busy",
        )
    wait = tell(group, f"the scale of {request.stream}", wait, now_ms)
    group.waits.held[name] = replace(wait, streams=(request.stream,))
    return True


def finish_scale(group: GroupState, scaling: EpochTransition, node: str) -> Steps[str]:
    """Carry out the rest of a scale that is recorded in ``node``, from any state of it.

    Returns:
        Reason why it was refused and given up, or will be retried; empty if it was carried out, or waits.
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
    group.predictor.forget(places)
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
        raise StaleStateError(f"the scale of {scaling.stream} to epoch {record.epoch} was finished by another leader")
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
    """Return the epoch that a scale makes, the history with it, and the places of the segments that it seals."""
    record = stream.history.plan_scale(seal_numbers, ranges, created_ms, reason)
    history = stream.history.with_records(record)
    return record, history, stream.places_of(history.ended_with(record.epoch))


def _answering(group: GroupState, scaling: EpochTransition, answer: AdminAnswer) -> list[CreateNode]:
    if not scaling.request:
        return []
    return [CreateNode(f"{paths.answers(group.name)}/{scaling.request}", answer.to_json())]


def _give_up(group: GroupState, scaling: EpochTransition, refused: EffectRefusedError, node: str) -> Steps[str]:
    """Answer that a scale is refused, and return why; the next one uses the topics that were created for it.

    A scale that has closed segments is suspended instead, or plain writers would search for successors forever.
    """
    is_closed = node in group.waits.pending_changes
    if not is_closed and isinstance(refused.effect, Seal):
        is_closed = bool((yield from find_closed(refused.effect.partitions)))
    state = "nothing was changed"
    if is_closed:
        state = "its segments are closed to writers; the scale is finished once that is possible"
    why = f"{refused.by} refuses to scale stream {scaling.stream}: {refused.reason}; {state}"
    answer = refusing(refused.code, why, scaling.created_ms)
    if is_closed:
        if node not in group.waits.pending_changes:
            node = yield from put_aside(group, node, scaling)
        waited_ms = group.times.stamp((yield from Now())) - scaling.created_ms
        if refused.code != SEAL_TIMEOUT or waited_ms >= group.settings.scale_wait_ms:
            yield from refuse_request(group, node, scaling, answer)
        yield from postpone(group, node, refused.reason)
        return why
    yield from _end(group, scaling, node, answer)
    return why


def _drop(group: GroupState, scaling: EpochTransition, node: str) -> Steps[str]:
    """Give up a scale that leaves a deleted topic; the topic of its name is not the stream's to close."""
    topic = group.streams[str(scaling.stream)].config.topic
    why = (
        f"topic {topic} was deleted, or created again, while stream {scaling.stream} was leaving it; release it and "
        "adopt it again"
    )
    yield from _end(group, scaling, node, refusing(ConflictError.code, why, scaling.created_ms))
    return why


def _end(group: GroupState, scaling: EpochTransition, node: str, answer: AdminAnswer) -> Steps[None]:
    if not (yield from Write([DeleteNode(node), *_answering(group, scaling, answer)])):
        raise StaleStateError(f"the scale of {scaling.stream} was finished by another leader")
    yield from end_suspension(group, node)
    group.counts["requests_refused"] += 1
    if scaling.request:
        group.metrics.note_answer(RequestKind.SCALE_STREAM, ok=answer.ok)


logger = logging.getLogger(__name__)

WORK: Final = "scaling"
SAMPLED_RECORDS: Final = 4_000
"""Latest records of a hot segment among which keys are sampled."""
SAMPLED_BYTES: Final = 1 << 20
"""Most bytes that are read of them."""
TELL_AGAIN_MS: Final = 600_000
"""Time after which the wait of a stream is logged again, if it was scaled or cold in between."""
WAITS_BYTES_MAX: Final = 500_000
"""Most bytes of the node that lists waiting streams of a group; the rest is only logged."""
WAIT_BYTES: Final = 80
"""Upper bound of one entry there, without its reason and the name of the stream."""


def follow_load(group: GroupState, now_ms: int) -> Steps[None]:
    """Measure the streams that have a scaling policy, at intervals, and scale one if its load requires it."""
    if not group.housekeeping.is_due(WORK, now_ms, group.settings.scaling.scaling_check_ms):
        return
    followed = {
        name: stream
        for name, stream in group.streams.items()
        if stream.config.scaling is not None and stream.config.state is Lifecycle.ACTIVE and not stream.is_on_topic
    }
    if not followed and not group.waits.scaling:
        return
    yield from _measure(group, followed)
    for name, stream in followed.items():
        before = stream.history.active.epoch, group.is_half_done(name)
        hold = yield from _follow(group, name, stream)
        _note_wait(group, name, stream, hold)
        if (stream.history.active.epoch, group.is_half_done(name)) != before:
            group.housekeeping.done_ms.pop(WORK, None)  # the others come in the next turn, after what waits meanwhile
            break
    yield from _show_waits(group, followed)


def _measure(group: GroupState, followed: Mapping[str, LedStream]) -> Steps[None]:
    """Record the growth of the active segments; those that brokers do not report now are left out."""
    by_unit: dict[str, list[Partition]] = {"events": [], "bytes": []}
    for stream in followed.values():
        by_unit[_policy(stream).unit] += stream.places_of(stream.history.active.segments).values()
    found: dict[Partition, int] = {}
    if by_unit["events"]:
        found |= yield from LogEnds(by_unit["events"])
    if by_unit["bytes"]:
        found |= yield from DiskBytes(by_unit["bytes"])
    noted_ms = yield from Now()
    longest_ms = group.settings.scaling.scaling_window_ms * WINDOWS[-1]
    for stream in followed.values():
        places = stream.places_of(stream.history.active.segments)
        values = {item: found[place] for item, place in places.items() if place in found}
        stream.scaling.load.note(stream.history, noted_ms, _policy(stream).unit, values, longest_ms)


def _policy(stream: LedStream) -> ScalingPolicy:
    assert stream.config.scaling is not None
    return stream.config.scaling


def _follow(group: GroupState, name: str, stream: LedStream) -> Steps[Deferred | None]:
    """Scale a stream if its load requires it; return why it is not, None if there is no reason to."""
    settings, state, policy = group.settings.scaling, stream.scaling, _policy(stream)
    now_ms = yield from Now()
    stamp_ms = group.times.stamp(now_ms)
    state.keep_only({int(number) for number in stream.history.active.numbers})
    segments = view(state.load, stream.history, policy, settings)
    decision = decide(policy, segments, recent_scales(stream.history, stamp_ms), state.lonely, settings, stamp_ms)
    if decision is None or isinstance(decision, Deferred):
        return decision
    busy = next(_obstacles(group, name, stream, now_ms), None)
    if busy is not None:
        return Deferred(busy[0], f"{decision.why}; waits: {busy[1]}")
    # Before the keys are read, which costs more and would be repeated at each check.
    foreign = yield from _look_for_foreign(stream, decision)
    if foreign is not None:
        return Deferred(DeferReason.NATIVE, f"{decision.why}; waits: {foreign}" if foreign else "")
    plan = yield from _planned(stream, decision, segments, stamp_ms + settings.scaling_cooldown_ms)
    if plan is None:
        return Deferred(
            DeferReason.ONE_KEY, state.lonely[max(state.lonely, key=lambda number: state.lonely[number][0])][1]
        )
    return (yield from _scale(group, name, stream, plan, now_ms))


def _obstacles(group: GroupState, name: str, stream: LedStream, now_ms: int) -> Iterator[tuple[DeferReason, str]]:
    """Yield why a stream is not to be scaled now, whatever its load."""
    if group.times.differ:
        yield DeferReason.CLOCKS, "clocks differ too much to know when it was scaled last"
    if group.waits.faults.get(name) is not None or group.is_half_done(name):
        yield DeferReason.CHANGING, "the stream is in an error state, or half done"
    if group.waits.held or any(name in streams for streams in group.waits.held_rolls):
        yield DeferReason.CHANGING, "a scale by request or a rolling commit is to come first"
    if any(part.stream == name for item in group.large.preparations.values() for part in item.record.streams):
        yield DeferReason.CHANGING, "a large transaction is being merged"
    if group.housekeeping.is_resting(_rest(name), now_ms):
        yield DeferReason.REFUSED, f"the last try was refused: {stream.scaling.refused}"
    settings = group.settings.scaling
    before_ms = group.times.lease(now_ms) - settings.scaling_open_ms
    old = sum(name in item.begin.streams and item.begun_ms < before_ms for item in group.fold.open.values())
    if old > settings.scaling_open_max:
        age = f"{settings.scaling_open_ms / 1000:g} s"
        why = f"{old:,} transactions are open for more than {age}, and each would take a rolling commit with two epochs"
        yield DeferReason.OPEN_TRANSACTIONS, why


def _rest(name: str) -> str:
    return f"{WORK} {name}"


def _planned(
    stream: LedStream, decision: SegmentSplit | SegmentMerge, segments: list[ActiveSegment], until_ms: int
) -> Steps[ScalingPlan | None]:
    """Return the scale to do; None if it gains nothing, as one key makes the load."""
    if isinstance(decision, SegmentMerge):
        return plan_merge(decision, segments)
    is_by_bytes = _policy(stream).unit == "bytes"
    position = stream.config.keys.position
    cuts = {}
    for number, parts in decision.parts.items():
        segment = stream.history.active.segment_numbered(number)
        found = yield from SampleKeys(stream.place_of(segment.id), SAMPLED_RECORDS, SAMPLED_BYTES)
        weighed = [(key, float(size) if is_by_bytes else 1.0) for key, size in found]
        sample = [(position(key), weight) for key, weight in weighed if key is not None]
        cuts[number] = cut(segment.range, parts, sample, sum(weight for key, weight in weighed if key is None))
    return plan_split(stream.scaling, decision, cuts, until_ms)


def _look_for_foreign(stream: LedStream, decision: SegmentSplit | SegmentMerge) -> Steps[str | None]:
    """Return the native transactions of others that a scale has to wait for; None if there are none.

    Those seen at one check only, for which the answer is empty, are checked again: most end within milliseconds.
    """
    if isinstance(decision, SegmentSplit):
        numbers = list(decision.parts)
    else:
        numbers = [number for run in decision.runs for number in run]
    sealed = [stream.history.active.segment_numbered(number) for number in numbers]
    found = frozenset((yield from LookForObstacles(list(stream.places_of(sealed).values()))))
    before, stream.scaling.obstacles = stream.scaling.obstacles, found or None
    if not found or (before is not None and not found & before):
        return None
    return "" if before is None else name_some(found & before)


def _scale(group: GroupState, name: str, stream: LedStream, plan: ScalingPlan, now_ms: int) -> Steps[Deferred | None]:
    """Record a scale and carry it out; return the reason of a refusal, if any."""
    stream.scaling.obstacles = None
    created_ms = group.times.stamp(now_ms)
    record = stream.history.plan_scale(plan.seal, plan.ranges, created_ms, plan.reason)
    try:
        check_segments(stream.config.name, len(record.segments), len(stream.history.active.segments))
    except InvalidRequestError as fault:
        return Deferred(DeferReason.NO_ROOM, f"{plan.reason}; waits: {fault}")
    scaling = EpochTransition(
        stream.config.name,
        "",
        int(record.epoch),
        plan.seal,
        plan.ranges,
        created_ms,
        group.controller_epoch,
        reason=plan.reason,
    )
    node = paths.scaling(group.name)
    if not (yield from Write([CreateNode(node, scaling.to_json())])):
        raise StaleStateError(f"stream {name} is scaled by another leader")
    logger.info('scale.begun group=%s stream=%s epoch=%d reason="%s"', group.name, name, record.epoch, plan.reason)
    refused = yield from finish_scale(group, scaling, node)
    if refused:
        stream.scaling.refused = refused
        pause_ms = group.housekeeping.rest(_rest(name), now_ms)
        logger.warning('scale.retry group=%s pause_s=%.0f reason="%s"', group.name, pause_ms / 1000, refused)
        return Deferred(DeferReason.REFUSED, f"{plan.reason}; waits: the last try was refused: {refused}")
    group.housekeeping.rested(_rest(name))
    group.counts["scales_by_load"] += 1
    return None


# What streams wait for


def _note_wait(group: GroupState, name: str, stream: LedStream, hold: Deferred | None) -> None:
    """Record why a stream waits; it is logged once for each kind of reason, and kept as first recorded."""
    state, looked_ms = stream.scaling, stream.scaling.load.looked_ms
    if hold is None or not hold.why:
        state.wait = None
        return
    if state.wait is not None and state.wait_kind is hold.kind:
        return
    state.wait_kind = hold.kind
    state.wait = ScalingWait(stream.config.name, hold.why, group.times.stamp(looked_ms))
    told_ms = state.told_ms.get(hold.kind)
    if told_ms is None or not 0 <= looked_ms - told_ms < TELL_AGAIN_MS:
        state.told_ms[hold.kind] = looked_ms
        logger.info('scale.waiting group=%s stream=%s reason="%s"', group.name, name, hold.why)


def _show_waits(group: GroupState, followed: Mapping[str, LedStream]) -> Steps[None]:
    """Publish in ZooKeeper which streams wait, if that has changed."""
    node = paths.scaling_waits(group.name)
    if group.waits.scaling is None:
        raw = yield from read_node(node)
        # Overwrite an unreadable node: nothing depends on it.
        group.waits.scaling = () if raw is None else _known(raw)
        group.waits.has_scaling_node = raw is not None
    room = WAITS_BYTES_MAX
    waits: list[ScalingWait] = []
    for stream in sorted(followed.values(), key=lambda item: str(item.config.name)):
        wait = stream.scaling.wait
        if wait is not None:
            room -= len(wait.reason.encode()) + len(str(wait.stream)) + WAIT_BYTES
            if room >= 0:
                waits.append(wait)
    if tuple(waits) == group.waits.scaling:
        return
    value = ScalingWaits(tuple(waits)).to_json()
    operation: NodeOperation = SetNode(node, value) if group.waits.has_scaling_node else CreateNode(node, value)
    if not (yield from Write([operation])):
        raise StaleStateError(f"{node} was written by another leader")
    group.waits.scaling, group.waits.has_scaling_node = tuple(waits), True


def _known(raw: bytes) -> tuple[ScalingWait, ...]:
    try:
        return ScalingWaits.from_json(raw).waits
    except CorruptDataError:
        return (ScalingWait(StreamName("unknown", "unknown"), "", 0),)
