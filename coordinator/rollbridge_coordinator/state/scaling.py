"""Scaling by load: which segments of a stream are to be split or merged, where, and why not now. Pure.

**Split.** A segment is *hot* if its rate over the shortest window, of 2 minutes, is above the target, and that

- of 2 minutes is above 5 times the target, or
- of 5 minutes above twice the target, or
- of 10 or 20 minutes above the target.

The first condition is ours: a load that has passed by leaves the longer windows high, and a split would come too late.
Pravega has no 20 minutes here; with them, a load that comes and goes within ten is seen. A hot segment is cut into as
many parts as its rate of 2 minutes asks for, each at three quarters of the target, at quantiles of the keys that were
written to it lately, not into ranges of the same width.

Where one key alone makes the load, nothing is gained: if the best cut would leave nine tenths of it in one part, the
segment is left alone for the cool-down, and then looked at again.

**Merge.** Neighbours are *cold* if together they stay below half the target over all four windows, and together never
had more than the target in any 2 minutes of the last 20. What a merge makes is far from a split, and the other way
round. As many neighbours as that is true of become one segment.

**Not too often.** A segment is left alone for a cool-down after the scale that made it, and by merges until the longest
window has been measured. In an hour there are at most so many scales of a stream, half of them merges. All segments
that are hot are split in one scale, with those that are nearly so, and likewise merged, so that a scale makes one epoch
for all of them. All of that is told from epoch records, so that a new leader keeps to it as well.

Source: Pravega's ``AutoScaleProcessor`` (the rule, the cool-down) and ``AutoScaleTask`` (merges of cold neighbours).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import Final

from rollbridge.model.conditions import Obstacle
from rollbridge.model.epochs import EpochCause, EpochHistory
from rollbridge.model.keyspace import KeyRange
from rollbridge.model.options import option
from rollbridge.model.scaling import ScalingPolicy, ScalingWait
from rollbridge_coordinator.state.load import WINDOWS, StreamLoad

HOT: Final = (5.0, 2.0, 1.0, 1.0)
"""Multiples of the target above which a segment is hot, by window."""
NEAR: Final = 0.9
"""Part of the target above which, over 2, 5 and 10 minutes, a segment is split along with a hot one."""
COLD: Final = 0.5
"""Part of the target below which neighbours together are cold, over each window."""
FILLED: Final = 0.75
"""Part of the target that each part of a split is meant to take."""
LONELY: Final = 0.9
"""Share of the load that a cut leaves in one part, above which it is of no use."""
KEYS_MIN: Final = 50
"""Records with a key in a sample below which it says nothing about where to cut."""
MERGES_SHARE: Final = 0.5
"""Part of the scales of an hour that may be merges, so that splits are never kept waiting by them."""
SPLITS_MAX: Final = 8
"""Most segments that one scale splits: the keys of each are looked at first, and everything else waits meanwhile."""
HOUR_MS: Final = 60 * 60 * 1000
REASON_CHARACTERS_MAX: Final = 300
"""Of the reason in an epoch record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """When and how far leaders scale streams by their load."""

    scaling_check_ms: int = option(5_000, low=1)
    """Interval between measurements of the streams that have a scaling policy."""
    scaling_window_ms: int = option(120_000, low=1)
    """Shortest of the four windows over which rates are measured; the others are 2.5, 5 and 10 times as long. Keep it
    several times ``SCALING_CHECK_MS``."""
    scaling_cooldown_ms: int = option(600_000, low=0)
    """How long a segment is left alone after the scale that has made it. Pravega's ``autoScale.cooldown.time``."""
    scaling_per_hour_max: int = option(12, low=1)
    """Most scales by load of one stream in an hour; merges may be half of them."""
    scaling_parts_max: int = option(8, low=2)
    """Most parts into which one segment is split, and most neighbours that are merged, in one scale."""
    scaling_open_ms: int = option(10_000, low=0)
    """Age from which an open transaction keeps a scale waiting: its commit, later, takes a rolling commit with two
    epochs."""
    scaling_open_max: int = option(10, low=0)
    """Most open transactions of that age with which a stream is scaled by load; with more it waits."""


@dataclass(frozen=True, slots=True)
class ActiveSegment:
    """An active segment as the policy sees it.

    Attributes:
        number: Its number.
        range: Its keys.
        rates: Per second over each window, the shortest first; None for one that is not full.
        peak: Highest rate over the shortest window within the longest; infinite if that is of no interest.
        made_ms: When the scale was planned that has made it.
    """

    number: int
    range: KeyRange
    rates: tuple[float | None, ...]
    peak: float
    made_ms: int

    @property
    def rate(self) -> float | None:
        """Its rate over the shortest window."""
        return self.rates[0]


@dataclass(frozen=True, slots=True)
class SegmentSplit:
    """Segments to split, by number into how many parts, the hottest first.

    Attributes:
        is_needed: Whether it is done although nothing may be gained by it.
    """

    parts: Mapping[int, int]
    why: str
    is_needed: bool = False


@dataclass(frozen=True, slots=True)
class SegmentMerge:
    """Runs of neighbours, by their numbers, each of which becomes one segment."""

    runs: tuple[tuple[int, ...], ...]
    why: str


class WaitKind(StrEnum):
    """What kind of reason keeps a stream from being scaled."""

    COOLS_DOWN = "cools-down"
    ONE_KEY = "one-key"
    NO_ROOM = "no-room"
    HOUR = "hour"
    """Too many scales in the last hour."""
    CLOCKS = "clocks"
    CHANGING = "changing"
    """Something else of the stream is under way."""
    OPEN_TRANSACTIONS = "open-transactions"
    NATIVE = "native"
    """Native transactions of others."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Hold:
    """Something is to be done, and this is why it is not done now."""

    kind: WaitKind
    why: str


Decision = SegmentSplit | SegmentMerge | Hold | None


@dataclass(slots=True)
class ScalingState:
    """What a leader knows of one stream's scaling by load in its term.

    Attributes:
        load: What it has measured.
        lonely: Segments, by number, in which one key makes the load: until when they are left alone, and why.
        obstacles: Native transactions of others that the last look before a scale has found; None without one.
        wait: Why the stream is not scaled although its policy asks for it; None if it does not.
        wait_kind: The kind of the last such reason.
        told_ms: When each kind was logged last.
        refused: Why the last scale was refused.
    """

    load: StreamLoad = field(default_factory=StreamLoad)
    lonely: dict[int, tuple[int, str]] = field(default_factory=dict)
    obstacles: frozenset[Obstacle] | None = None
    wait: ScalingWait | None = None
    wait_kind: WaitKind | None = None
    told_ms: dict[WaitKind, int] = field(default_factory=dict)
    refused: str = ""

    def keep_only(self, numbers: Collection[int]) -> None:
        """Forget segments that are not active any more."""
        self.lonely = {number: item for number, item in self.lonely.items() if number in numbers}


@dataclass(frozen=True, slots=True)
class Recent:
    """Scales by load of the last hour: how many, and how many of them were merges."""

    scales: int = 0
    merges: int = 0


def recent_scales(history: EpochHistory, now_ms: int) -> Recent:
    """Return what the epoch records say of scales by load in the hour before ``now_ms``, by clocks that may differ."""
    found = [
        item
        for item in history.records
        if item.cause is EpochCause.SCALE and item.reason and abs(now_ms - item.created_ms) < HOUR_MS
    ]
    merges = sum(len(history.began_with(item.epoch)) < len(history.ended_with(item.epoch)) for item in found)
    return Recent(len(found), merges)


def view(
    load: StreamLoad, history: EpochHistory, policy: ScalingPolicy, settings: ScalingSettings
) -> list[ActiveSegment]:
    """Return the active segments, in order of their ranges, with what was measured of them."""
    found: list[ActiveSegment] = []
    for item in history.active.segments:
        number = int(item.id.number)
        rates = load.rates(number, settings.scaling_window_ms, settings.scaling_check_ms)
        may_be_cold = all(rate is not None and rate < COLD * policy.target for rate in rates)
        peak = load.peak(number, settings.scaling_window_ms) if may_be_cold else inf
        found.append(ActiveSegment(number, item.range, rates, peak, load.made_ms.get(number, 0)))
    return found


def decide(
    policy: ScalingPolicy,
    segments: Sequence[ActiveSegment],
    recent: Recent,
    lonely: Mapping[int, tuple[int, str]],
    settings: ScalingSettings,
    now_ms: int,
) -> Decision:
    """Return what a policy makes of a stream's load.

    Args:
        policy: With a rate.
        segments: All active ones, in order of their ranges.
        recent: What was done by load in the last hour.
        lonely: Segments by number of which one key makes the load, until when they are left alone, and why.
        settings: The leader's.
        now_ms: The time by which epochs are stamped.
    """
    if len(segments) < policy.min_segments:
        return _bounded(_grow(policy, segments, settings), recent, settings)
    hot = sorted((item for item in segments if _heat(policy, item) is not None), key=lambda item: -(item.rate or 0.0))
    held: list[Hold] = []
    parts: dict[int, int] = {}
    room = policy.max_segments - len(segments)
    for item in hot:
        if len(parts) == SPLITS_MAX:
            break
        hold = _why_left(policy, item, lonely, settings, now_ms)
        wanted = min(_parts_wanted(policy, item), settings.scaling_parts_max, room + 1)
        if hold is None and wanted < 2:
            why = f"{_about(policy, item, settings)}, and the stream has max_segments, {policy.max_segments:,}, already"
            hold = Hold(WaitKind.NO_ROOM, why)
        if hold is not None:
            held.append(hold)
        else:
            parts[item.number] = wanted
            room -= wanted - 1
    if parts:
        left = {number for number, (until_ms, _) in lonely.items() if now_ms < until_ms} | parts.keys()
        near = [item for item in segments if _is_near(policy, item) and not _cools_down(item, settings, now_ms)]
        near = [item for item in near if item.number not in left][: max(min(SPLITS_MAX - len(parts), room), 0)]
        parts |= {item.number: 2 for item in near}
        first = next(item for item in hot if item.number in parts)
        about = _with_others(_about(policy, first, settings), list(parts)[1:])
        return _bounded(SegmentSplit(parts, about), recent, settings)
    merged = _cold_runs(policy, segments, settings, now_ms) if not hot or held else ()
    if merged:
        return _bounded(_merge(policy, segments, merged, settings), recent, settings)
    return held[0] if held else None


def _bounded(decision: SegmentSplit | SegmentMerge, recent: Recent, settings: ScalingSettings) -> Decision:
    most = settings.scaling_per_hour_max
    if recent.scales >= most:
        why = f"{decision.why}; the stream was scaled by load {recent.scales} times in an hour already"
        return Hold(WaitKind.HOUR, why)
    if isinstance(decision, SegmentMerge) and recent.merges >= ceil(MERGES_SHARE * most):
        why = f"{decision.why}; {recent.merges} scales by load have merged segments in an hour already"
        return Hold(WaitKind.HOUR, why)
    return decision


def _grow(policy: ScalingPolicy, segments: Sequence[ActiveSegment], settings: ScalingSettings) -> SegmentSplit:
    """Return the split of the segment with the most load, or else the widest, that leads up to ``min_segments``."""
    chosen = max(segments, key=lambda item: (item.rate or 0.0, item.range.high - item.range.low))
    parts = min(policy.min_segments - len(segments) + 1, settings.scaling_parts_max)
    why = f"{len(segments):,} segments are fewer than min_segments, {policy.min_segments:,}"
    return SegmentSplit({chosen.number: parts}, why, is_needed=True)


def _heat(policy: ScalingPolicy, item: ActiveSegment) -> int | None:
    """Return the place of the window that makes a segment hot; None if it is not."""
    if item.rate is None or item.rate <= policy.target:
        return None
    for place, (rate, factor) in enumerate(zip(item.rates, HOT, strict=True)):
        if rate is not None and rate > factor * policy.target:
            return place
    return None


def _is_near(policy: ScalingPolicy, item: ActiveSegment) -> bool:
    """Return True if a segment will soon be hot, so that it is split along with one that is."""
    return all(rate is not None and rate > NEAR * policy.target for rate in item.rates[:3])


def _parts_wanted(policy: ScalingPolicy, item: ActiveSegment) -> int:
    return max(2, ceil((item.rate or 0.0) / (FILLED * policy.target)))


def _why_left(
    policy: ScalingPolicy,
    item: ActiveSegment,
    lonely: Mapping[int, tuple[int, str]],
    settings: ScalingSettings,
    now_ms: int,
) -> Hold | None:
    """Return why a hot segment is left alone; None if it is not."""
    until_ms, why = lonely.get(item.number, (0, ""))
    if now_ms < until_ms:
        return Hold(WaitKind.ONE_KEY, why)
    if _cools_down(item, settings, now_ms):
        return Hold(WaitKind.COOLS_DOWN, f"{_about(policy, item, settings)}, and it cools down since it was made")
    return None


def _cools_down(item: ActiveSegment, settings: ScalingSettings, now_ms: int) -> bool:
    return abs(now_ms - item.made_ms) < settings.scaling_cooldown_ms


def _about(policy: ScalingPolicy, item: ActiveSegment, settings: ScalingSettings) -> str:
    """Say what makes a segment hot."""
    place = _heat(policy, item)
    assert place is not None
    times = f"{HOT[place]:g} times the target" if HOT[place] != 1 else "the target"
    return (
        f"segment {item.number}: {item.rates[place]:,.0f} {policy.unit}/s over {window_name(place, settings)}, above "
        f"{times} of {policy.target:,}"
    )


def window_name(place: int, settings: ScalingSettings) -> str:
    """Return the length of a window, as messages say it."""
    seconds = settings.scaling_window_ms * WINDOWS[place] / 1000
    return f"{seconds / 60:g} min" if seconds % 60 == 0 else f"{seconds:g} s"


def _with_others(about: str, others: Sequence[int]) -> str:
    if not others:
        return about
    shown = ", ".join(map(str, others[:5])) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
    return f"{about}; likewise segment {shown}" if len(others) == 1 else f"{about}; likewise segments {shown}"


# Merges


def _cold_runs(
    policy: ScalingPolicy, segments: Sequence[ActiveSegment], settings: ScalingSettings, now_ms: int
) -> tuple[tuple[int, ...], ...]:
    """Return runs of neighbours that are cold together, from left to right, each as long as it can be."""
    spare = len(segments) - policy.min_segments
    runs: list[tuple[int, ...]] = []
    run: list[ActiveSegment] = []
    for item in [*segments, None]:
        room = min(settings.scaling_parts_max - 1, spare)
        fits = item is not None and _is_quiet(item, settings, now_ms) and len(run) <= room
        if item is not None and fits and _are_cold(policy, [*run, item]):
            run.append(item)
            continue
        if len(run) > 1:
            runs.append(tuple(one.number for one in run))
            spare -= len(run) - 1
        begins = item is not None and _is_quiet(item, settings, now_ms) and spare > 0
        run = [item] if item is not None and begins and _are_cold(policy, [item]) else []
    return tuple(runs)


def _is_quiet(item: ActiveSegment, settings: ScalingSettings, now_ms: int) -> bool:
    """Return True if a segment has been measured for long enough, and was not made lately."""
    return None not in item.rates and not _cools_down(item, settings, now_ms)


def _are_cold(policy: ScalingPolicy, run: Sequence[ActiveSegment]) -> bool:
    joint = [sum(item.rates[place] or 0.0 for item in run) for place in range(len(WINDOWS))]
    return max(joint) < COLD * policy.target and sum(item.peak for item in run) <= policy.target


def _merge(
    policy: ScalingPolicy,
    segments: Sequence[ActiveSegment],
    runs: tuple[tuple[int, ...], ...],
    settings: ScalingSettings,
) -> SegmentMerge:
    first = [item for item in segments if item.number in runs[0]]
    joint = sum(item.rates[-1] or 0.0 for item in first)
    names = ", ".join(str(item.number) for item in first)
    more = f"; likewise {len(runs) - 1} more" if len(runs) > 1 else ""
    over = window_name(len(WINDOWS) - 1, settings)
    return SegmentMerge(
        runs,
        f"segments {names}: together {joint:,.0f} {policy.unit}/s over {over}, below half the target of "
        f"{policy.target:,}{more}",
    )


# Plans


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """A scale: the numbers of the segments that are sealed, the ranges of those that replace them, and why."""

    seal: tuple[int, ...]
    ranges: tuple[KeyRange, ...]
    reason: str


def plan_merge(decision: SegmentMerge, segments: Sequence[ActiveSegment]) -> ScalingPlan:
    """Return the scale that merges runs of neighbours."""
    ranges = {item.number: item.range for item in segments}
    joined = tuple(KeyRange(ranges[run[0]].low, ranges[run[-1]].high) for run in decision.runs)
    return ScalingPlan(
        tuple(number for run in decision.runs for number in run), joined, decision.why[:REASON_CHARACTERS_MAX]
    )


def plan_split(
    state: ScalingState, decision: SegmentSplit, cuts: Mapping[int, RangeCut], until_ms: int
) -> ScalingPlan | None:
    """Return the scale that cuts segments; None if nothing is gained by any of the cuts.

    Args:
        state: Takes note of the segments in which one key makes the load.
        decision: The segments.
        cuts: Where each of them is cut.
        until_ms: Until when those are left alone.
    """
    useful: dict[int, RangeCut] = {}
    for number, found in cuts.items():
        if not found.is_useless or (decision.is_needed and len(found.ranges) > 1):
            useful[number] = found
            continue
        why = f"segment {number} is too hot, and one key makes {found.largest:.0%} of its load, so a split is of no use"
        state.lonely[number] = until_ms, why
    if not useful:
        return None
    keys = sum(item.keys for item in useful.values())
    how = f"cut at quantiles of {keys:,} recent keys" if keys else "cut evenly, too few keys are known"
    return ScalingPlan(
        tuple(useful),
        tuple(item for found in useful.values() for item in found.ranges),
        f"{decision.why[: REASON_CHARACTERS_MAX - len(how) - 2]}; {how}",
    )


# Where to cut


@dataclass(frozen=True, slots=True)
class RangeCut:
    """Where a range is cut.

    Attributes:
        ranges: The parts, in order.
        keys: Number of sampled records by whose keys it was cut; 0 if it was cut evenly.
        largest: Share of the load in the part with the most.
    """

    ranges: tuple[KeyRange, ...]
    keys: int
    largest: float

    @property
    def is_useless(self) -> bool:
        """Whether one part keeps nearly all of the load."""
        return len(self.ranges) < 2 or self.largest > LONELY


def cut(whole: KeyRange, parts: int, sample: Sequence[tuple[float, float]], keyless: float = 0.0) -> RangeCut:
    """Cut a range into parts that have the same load, as far as one key is not more than that.

    Args:
        whole: The range.
        parts: Number of parts that are wanted; fewer come out where a key has more than one part's share.
        sample: Position and weight of each record in a sample, in any order; positions outside the range are left out.
        keyless: Weight of the sampled records without a key, which go anywhere.
    """
    inside = sorted((position, weight) for position, weight in sample if position in whole and weight > 0)
    if len(inside) < KEYS_MIN:
        ranges = _even(whole, parts)
        return RangeCut(ranges, 0, 1 / len(ranges))
    weights: dict[float, float] = {}
    for position, weight in inside:
        weights[position] = weights.get(position, 0.0) + weight
    positions = list(weights)
    sums = list(accumulate(weights.values()))
    total = sums[-1]
    bounds: set[int] = set()
    for place in range(1, parts):
        wanted = total * place / parts
        # The boundary behind the position at this index; behind the last one there is none.
        nearest = min(range(len(sums) - 1), key=lambda index: abs(sums[index] - wanted), default=None)
        if nearest is not None:
            bounds.add(nearest)
    ends = sorted(bounds)
    cuts = [_between(positions[index], positions[index + 1]) for index in ends]
    ranges = tuple(KeyRange(low, high) for low, high in pairwise([whole.low, *cuts, whole.high]))
    shares = [after - before for before, after in pairwise([0.0, *(sums[index] for index in ends), total])]
    largest = (max(shares) + keyless / len(ranges)) / (total + keyless)
    return RangeCut(ranges, len(inside), largest)


def _between(left: float, right: float) -> float:
    """Return a position above ``left`` and not above ``right``, in the middle if there is room."""
    middle = (left + right) / 2
    return middle if left < middle < right else right


def _even(whole: KeyRange, parts: int) -> tuple[KeyRange, ...]:
    width = whole.high - whole.low
    inner = [whole.low + width * place / parts for place in range(1, parts)]
    return tuple(KeyRange(low, high) for low, high in pairwise(_rising([whole.low, *inner, whole.high])))


def _rising(bounds: Sequence[float]) -> Iterator[float]:
    """Yield the bounds without those that rounding has made equal to the one before, or to the last."""
    last = -1.0
    for place, bound in enumerate(bounds):
        if bound > last and (place == len(bounds) - 1 or bound < bounds[-1]):
            yield bound
            last = bound
