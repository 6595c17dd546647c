"""Scaling by load: measure the streams that have a policy, decide, look where to cut, and scale. A chore of leaders.

Order of the effects: ends and sizes of active segments are read, for all streams together; for one stream of which
something is to be split or merged, it is looked for native transactions of others, and keys are sampled; the scale is
recorded, and from then on is one as any other (:mod:`rollbridge_coordinator.procedures.scale`), which the next leader
finishes. A crash before that has done nothing; one after it is that of a scale.

A scale by load never holds anybody up for long: it waits, and says for what, while something else of the stream is
under way, while many old transactions are open, each of which would be merged by a rolling commit with two epochs
later, and while clocks differ so much that nobody knows how long ago the last scale was.

Source: Pravega's ``AutoScaleProcessor``; state and rules are in :mod:`rollbridge_coordinator.state.scaling`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Final

from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.model import paths
from rollbridge.model.changes import EpochTransition
from rollbridge.model.conditions import name_some
from rollbridge.model.names import Partition, StreamName
from rollbridge.model.records import CreateNode, NodeOperation, SetNode, check_segments
from rollbridge.model.records import StreamState as Lifecycle
from rollbridge.model.scaling import ScalingPolicy, ScalingWait, ScalingWaits
from rollbridge_coordinator.procedures.scale import finish_scale
from rollbridge_coordinator.state.effects import (
    DiskBytes,
    LogEnds,
    LookForObstacles,
    Now,
    SampleKeys,
    Steps,
    Write,
    read_node,
)
from rollbridge_coordinator.state.faults import StaleStateError
from rollbridge_coordinator.state.group import GroupState
from rollbridge_coordinator.state.load import WINDOWS
from rollbridge_coordinator.state.scaling import (
    ActiveSegment,
    Hold,
    ScalingPlan,
    SegmentMerge,
    SegmentSplit,
    WaitKind,
    cut,
    decide,
    plan_merge,
    plan_split,
    recent_scales,
    view,
)
from rollbridge_coordinator.state.streams import LedStream

logger = logging.getLogger(__name__)

WORK: Final = "scaling"
SAMPLED_RECORDS: Final = 4_000
"""Latest records of a hot segment among which keys are sampled."""
SAMPLED_BYTES: Final = 1 << 20
"""Most bytes that are read of them."""
TELL_AGAIN_MS: Final = 600_000
"""Time after which it is logged again what a stream waits for, if it was scaled or cold in between."""
WAITS_BYTES_MAX: Final = 500_000
"""Most bytes of the node that says what streams of a group wait for; what does not fit is only logged."""
WAIT_BYTES: Final = 80
"""Upper bound on one of them there, without its reason and the name of the stream."""


def follow_load(group: GroupState, now_ms: int) -> Steps[None]:
    """Measure the streams that have a scaling policy, at intervals, and scale one whose load asks for it."""
    if not group.housekeeping.is_due(WORK, now_ms, group.settings.scaling.scaling_check_ms):
        return
    followed = {
        name: stream
        for name, stream in group.streams.items()
        if stream.config.scaling is not None and stream.config.state is Lifecycle.ACTIVE and not stream.is_on_topic
    }
    if not followed and not group.scaling_waits:
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
    """Take note of what was written to the active segments; of what brokers do not tell now, nothing is noted."""
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


def _follow(group: GroupState, name: str, stream: LedStream) -> Steps[Hold | None]:
    """Scale a stream if its load asks for it; return why it is not, None if there is no reason to."""
    settings, state, policy = group.settings.scaling, stream.scaling, _policy(stream)
    now_ms = yield from Now()
    stamp_ms = group.times.stamp(now_ms)
    state.keep_only({int(number) for number in stream.history.active.numbers})
    segments = view(state.load, stream.history, policy, settings)
    decision = decide(policy, segments, recent_scales(stream.history, stamp_ms), state.lonely, settings, stamp_ms)
    if decision is None or isinstance(decision, Hold):
        return decision
    busy = next(_obstacles(group, name, stream, now_ms), None)
    if busy is not None:
        return Hold(busy[0], f"{decision.why}; waits: {busy[1]}")
    # Before the keys are read, which is dearer and would be done at each look.
    foreign = yield from _look_for_foreign(stream, decision)
    if foreign is not None:
        return Hold(WaitKind.NATIVE, f"{decision.why}; waits: {foreign}" if foreign else "")
    plan = yield from _plan(stream, decision, segments, stamp_ms + settings.scaling_cooldown_ms)
    if plan is None:
        return Hold(WaitKind.ONE_KEY, state.lonely[max(state.lonely, key=lambda number: state.lonely[number][0])][1])
    return (yield from _scale(group, name, stream, plan, now_ms))


def _obstacles(group: GroupState, name: str, stream: LedStream, now_ms: int) -> Iterator[tuple[WaitKind, str]]:
    """Yield why a stream is not to be scaled now, whatever its load."""
    if group.times.differ:
        yield WaitKind.CLOCKS, "clocks differ too much to tell when it was scaled last"
    if group.faults.get(name) is not None or group.is_half_done(name):
        yield WaitKind.CHANGING, "the stream is in an error state, or half done"
    if group.held or any(name in streams for streams in group.held_rolls):
        yield WaitKind.CHANGING, "a scale by request or a rolling commit is to come first"
    if any(part.stream == name for item in group.preparations.values() for part in item.record.streams):
        yield WaitKind.CHANGING, "a large transaction is being merged"
    if group.housekeeping.is_resting(_rest(name), now_ms):
        yield WaitKind.REFUSED, f"the last try was refused: {stream.scaling.refused}"
    settings = group.settings.scaling
    before_ms = group.times.lease(now_ms) - settings.scaling_open_ms
    old = sum(name in item.begin.streams and item.begun_ms < before_ms for item in group.fold.open.values())
    if old > settings.scaling_open_max:
        age = f"{settings.scaling_open_ms / 1000:g} s"
        why = f"{old:,} transactions are open for more than {age}, and each would take a rolling commit with two epochs"
        yield WaitKind.OPEN_TRANSACTIONS, why


def _rest(name: str) -> str:
    return f"{WORK} {name}"


def _plan(
    stream: LedStream, decision: SegmentSplit | SegmentMerge, segments: list[ActiveSegment], until_ms: int
) -> Steps[ScalingPlan | None]:
    """Return what to do; None if nothing is gained, as one key makes the load."""
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
    """Return for which native transactions of others a scale has to wait; None if for none.

    What is there at one look only, for which the answer is empty, is looked for again: most end within milliseconds.
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


def _scale(group: GroupState, name: str, stream: LedStream, plan: ScalingPlan, now_ms: int) -> Steps[Hold | None]:
    """Record a scale and carry it out; return why it was refused, if it was."""
    stream.scaling.obstacles = None
    created_ms = group.times.stamp(now_ms)
    record = stream.history.plan_scale(plan.seal, plan.ranges, created_ms, plan.reason)
    try:
        check_segments(stream.config.name, len(record.segments), len(stream.history.active.segments))
    except InvalidRequestError as fault:
        return Hold(WaitKind.NO_ROOM, f"{plan.reason}; waits: {fault}")
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
        raise StaleStateError(f"stream {name} is scaled by someone else")
    logger.info("%s: stream %s is scaled by its load to epoch %d: %s", group.name, name, record.epoch, plan.reason)
    refused = yield from finish_scale(group, scaling, node)
    if refused:
        stream.scaling.refused = refused
        pause_ms = group.housekeeping.rest(_rest(name), now_ms)
        logger.warning("%s: tried again in %.0f s: %s", group.name, pause_ms / 1000, refused)
        return Hold(WaitKind.REFUSED, f"{plan.reason}; waits: the last try was refused: {refused}")
    group.housekeeping.rested(_rest(name))
    group.counts["scales_by_load"] += 1
    return None


# What streams wait for


def _note_wait(group: GroupState, name: str, stream: LedStream, hold: Hold | None) -> None:
    """Take note of why a stream waits; it is logged once for each kind of reason, and kept as it was first said."""
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
        logger.info("%s: stream %s waits to be scaled by its load: %s", group.name, name, hold.why)


def _show_waits(group: GroupState, followed: Mapping[str, LedStream]) -> Steps[None]:
    """Say in ZooKeeper which streams wait, if that has changed."""
    node = paths.scaling_waits(group.name)
    if group.scaling_waits is None:
        raw = yield from read_node(node)
        # What cannot be read is written anew: nothing depends on it.
        group.scaling_waits = () if raw is None else _known(raw)
        group.has_scaling_waits = raw is not None
    room = WAITS_BYTES_MAX
    waits: list[ScalingWait] = []
    for stream in sorted(followed.values(), key=lambda item: str(item.config.name)):
        wait = stream.scaling.wait
        if wait is not None:
            room -= len(wait.reason.encode()) + len(str(wait.stream)) + WAIT_BYTES
            if room >= 0:
                waits.append(wait)
    if tuple(waits) == group.scaling_waits:
        return
    value = ScalingWaits(tuple(waits)).to_json()
    operation: NodeOperation = SetNode(node, value) if group.has_scaling_waits else CreateNode(node, value)
    if not (yield from Write([operation])):
        raise StaleStateError(f"{node} was written by someone else")
    group.scaling_waits, group.has_scaling_waits = tuple(waits), True


def _known(raw: bytes) -> tuple[ScalingWait, ...]:
    try:
        return ScalingWaits.from_json(raw).waits
    except CorruptDataError:
        return (ScalingWait(StreamName("unknown", "unknown"), "", 0),)
