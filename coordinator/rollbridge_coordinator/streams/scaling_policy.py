"""Scaling by load: which segments of a stream to split or merge, where, and why not now. Pure.

**Split.** A segment is *hot* if its rate over the shortest window, of 2 minutes, is above the target, and that

- of 2 minutes is above 5 times the target, or
- of 5 minutes above twice the target, or
- of 10 or 20 minutes above the target.

The first condition is ours: a load that has passed leaves the longer windows high, and a split would come too late.
Pravega has no 20 minutes here; with them, a load that comes and goes within ten is seen. A hot segment is split into as
many parts as its rate of 2 minutes requires, each at three quarters of the target, at quantiles of its latest keys, not
into ranges of the same width.

Where one key alone makes the load, a split gains nothing: if the best cut would leave nine tenths of it in one part,
the segment is skipped for the cool-down, and then checked again.

**Merge.** Neighbours are *cold* if together they stay below half the target over all four windows, and together never
had more than the target in any 2 minutes of the last 20. The result of a merge is far from a split, and vice versa. As
many neighbours as satisfy this become one segment.

**Not too often.** A segment is skipped for a cool-down after the scale that made it, and by merges until the longest
window has been measured. The number of scales of a stream in an hour is bounded, and half of them may be merges. All
hot segments are split in one scale, with those that are nearly hot, and likewise merged, so that a scale makes one
epoch for all of them. All of that follows from epoch records, so that a new leader respects it as well.

Source: Pravega's ``AutoScaleProcessor`` (the rule, the cool-down) and ``AutoScaleTask`` (merges of cold neighbours).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import Final, NamedTuple

from rollbridge.base.ids import SegmentId
from rollbridge.stream.conditions import Obstacle
from rollbridge.stream.epochs import EpochCause, EpochHistory
from rollbridge.stream.keyspace import KeyRange
from rollbridge.stream.scaling import ScalingPolicy, ScalingWait
from rollbridge_coordinator.core.settings import ScalingSettings

# Load of segments: how much was written to each, as a leader measures it, and rates over windows of time. Pure.
#
# A leader reads the ends, or sizes, of active segments at intervals. Results are kept by the *number* of a segment. It
# names one key range for good: a rolling commit puts another topic under the number, and the rate continues.
#
# All records in the segments count, of all writers. Markers of native transactions take an offset each and count
# as records: one a round and segment. Records that a rolling commit puts into segments of their own, large transactions
# among them, are not counted, as they never come to the segments that could be split.
#
# A window is *full* once the leader has measured for as long as it is; before, it has no rate. A new leader begins
# without any.
#
# Source: Pravega's ``AutoScaleProcessor``, which gets rates of 2, 5, 10 and 20 minutes of each segment.


WINDOWS: Final = (1.0, 2.5, 5.0, 10.0)
"""Lengths of the windows, as multiples of the shortest: 2, 5, 10 and 20 minutes."""
_FINENESS: Final = 16
"""Distance of samples, as a part of their age, so that some sixty are enough for all windows."""
_LENGTH_MAX: Final = 1.5
"""Largest length of a window between two samples, as a multiple; beyond it too little was measured."""


class LoadSample(NamedTuple):
    """Amount written to a segment by a time, ms by the leader's clock, since it was first seen."""

    ms: int
    written: int


@dataclass(slots=True)
class SegmentLoad:
    """Measurements of one segment number.

    Attributes:
        value: Its end, or its size, at the last measurement.
        samples: Oldest first.
    """

    segment: SegmentId
    value: int
    samples: list[LoadSample]

    def rate(self, window_ms: float, spacing_ms: int) -> float | None:
        """Return the rate per second over a window that ends with the last measurement; None if it is not full.

        Args:
            spacing_ms: Time between two measurements.
        """
        newest = self.samples[-1]
        older = next((item for item in reversed(self.samples) if newest.ms - item.ms >= window_ms), None)
        if older is None or newest.ms - older.ms > _LENGTH_MAX * window_ms + 2 * spacing_ms:
            return None
        return _rate(older, newest)

    def peak(self, stretch_ms: float, window_ms: float) -> float:
        """Return the highest rate of any stretch of time, of at least this length, in a window that ends now."""
        since_ms = self.samples[-1].ms - window_ms
        highest, start = 0.0, 0
        for place, newer in enumerate(self.samples):
            while start + 1 < place and newer.ms - self.samples[start + 1].ms >= stretch_ms:
                start += 1
            if newer.ms > since_ms and newer.ms - self.samples[start].ms >= stretch_ms:
                highest = max(highest, _rate(self.samples[start], newer))
        return highest

    def add(self, sample: LoadSample, longest_ms: float) -> None:
        """Add a sample, and drop those that no window needs."""
        kept: list[LoadSample] = []
        for item in self.samples:
            if len(kept) > 1 and item.ms - kept[-2].ms < (sample.ms - item.ms) / _FINENESS:
                kept[-1] = item  # the one between these two is not needed at this age
            else:
                kept.append(item)
        kept.append(sample)
        beyond = sum(sample.ms - item.ms >= longest_ms for item in kept)
        self.samples = kept[max(beyond - 1, 0) :]


def _rate(older: LoadSample, newer: LoadSample) -> float:
    return (newer.written - older.written) * 1000 / (newer.ms - older.ms)


@dataclass(slots=True)
class StreamLoad:
    """Measurements of one stream in a leader's term.

    Attributes:
        unit: Unit of the counts.
        looked_ms: Time of the last measurement.
        segments: Active segments, by number.
        made_ms: Creation of each active number, by its epoch record; that outlives leaders.
        epoch: Newest known epoch.
    """

    unit: str = ""
    looked_ms: int = 0
    segments: dict[int, SegmentLoad] = field(default_factory=dict)
    made_ms: dict[int, int] = field(default_factory=dict)
    epoch: int = -1

    def note(
        self, history: EpochHistory, now_ms: int, unit: str, values: Mapping[SegmentId, int], longest_ms: float
    ) -> None:
        """Record a measurement of the active segments.

        Args:
            unit: Unit of ``values``: ``events`` for ends, ``bytes`` for sizes. A change of unit resets everything.
            values: By segment; missing ones are unknown now.
        """
        if unit != self.unit or now_ms < self.looked_ms:
            self.unit, self.segments = unit, {}
        self._learn(history)
        self.looked_ms = now_ms
        for item in history.active.segments:
            value = values.get(item.id)
            if value is None:
                continue
            known = self.segments.get(int(item.id.number))
            if known is None:
                self.segments[int(item.id.number)] = SegmentLoad(item.id, value, [LoadSample(now_ms, 0)])
                continue
            if now_ms == known.samples[-1].ms:
                continue
            written = known.samples[-1].written + self._since(known, item.id, value, history)
            known.segment, known.value = item.id, value
            known.add(LoadSample(now_ms, written), longest_ms)

    def _since(self, known: SegmentLoad, segment: SegmentId, value: int, history: EpochHistory) -> int:
        """Return the amount written since the last measurement; a smaller size, after retention, counts as 0."""
        if segment == known.segment:
            return max(value - known.value, 0)
        node = history.graph.nodes.get(known.segment)
        end = None if node is None or self.unit != "events" else node.sealed_end
        return value + (0 if end is None else max(end - known.value, 0))

    def _learn(self, history: EpochHistory) -> None:
        numbers = {int(item) for item in history.active.numbers}
        if history.active.epoch == self.epoch:
            return
        for record in history.records[max(self.epoch + 1 - history.first, 0) :]:
            for item in record.segments:
                self.made_ms.setdefault(int(item.id.number), record.created_ms)
        self.made_ms = {number: ms for number, ms in self.made_ms.items() if number in numbers}
        self.segments = {number: item for number, item in self.segments.items() if number in numbers}
        self.epoch = history.active.epoch

    def rates(self, number: int, window_ms: int, spacing_ms: int) -> tuple[float | None, ...]:
        """Return the rates of a segment over all windows, the shortest first; None for those that are not full.

        Args:
            spacing_ms: Time between two measurements.
        """
        known = self.segments.get(number)
        if known is None or known.samples[-1].ms != self.looked_ms:
            return (None,) * len(WINDOWS)
        return tuple(known.rate(window_ms * factor, spacing_ms) for factor in WINDOWS)

    def peak(self, number: int, window_ms: int) -> float:
        """Return the highest rate of a segment over the shortest window within the longest; see :meth:`rates`."""
        known = self.segments.get(number)
        return 0.0 if known is None else known.peak(window_ms, window_ms * WINDOWS[-1])


HOT: Final = (5.0, 2.0, 1.0, 1.0)
"""Multiples of the target above which a segment is hot, by window."""
NEAR: Final = 0.9
"""Part of the target above which, over 2, 5 and 10 minutes, a segment is split along with a hot one."""
COLD: Final = 0.5
"""Part of the target below which neighbours together are cold, over each window."""
FILLED: Final = 0.75
"""Part of the target that each part of a split should have."""
LONELY: Final = 0.9
"""Share of the load in one part above which a cut is useless."""
KEYS_MIN: Final = 50
"""Records with a key in a sample below which it does not determine a cut."""
MERGES_SHARE: Final = 0.5
"""Share of the scales of an hour that may be merges, so that merges never delay splits."""
SPLITS_MAX: Final = 8
"""Most segments that one scale splits: the keys of each are read first, and all other work waits meanwhile."""
HOUR_MS: Final = 60 * 60 * 1000
REASON_CHARACTERS_MAX: Final = 300
"""Limit of the reason in an epoch record."""


@dataclass(frozen=True, slots=True)
class ActiveSegment:
    """An active segment as the policy sees it.

    Attributes:
        range: Its keys.
        rates: Per second over each window, the shortest first; None for one that is not full.
        peak: Highest rate over the shortest window within the longest; infinite if not needed.
        made_ms: Time at which the scale that made it was planned.
    """

    number: int
    range: KeyRange
    rates: tuple[float | None, ...]
    peak: float
    made_ms: int

    @property
    def rate(self) -> float | None:
        return self.rates[0]


@dataclass(frozen=True, slots=True)
class SegmentSplit:
    """Segments to split, by number into how many parts, the hottest first.

    Attributes:
        is_needed: True if it is done even without a gain.
    """

    parts: Mapping[int, int]
    why: str
    is_needed: bool = False


@dataclass(frozen=True, slots=True)
class SegmentMerge:
    """Runs of neighbours, by their numbers, each of which becomes one segment."""

    runs: tuple[tuple[int, ...], ...]
    why: str


class DeferReason(StrEnum):
    """Kind of reason that keeps a stream from being scaled."""

    COOLS_DOWN = "cools-down"
    ONE_KEY = "one-key"
    NO_ROOM = "no-room"
    HOUR = "hour"
    """Too many scales in the last hour."""
    CLOCKS = "clocks"
    CHANGING = "changing"
    """Another change of the stream is under way."""
    OPEN_TRANSACTIONS = "open-transactions"
    NATIVE = "native"
    """Native transactions of others."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Deferred:
    """Reason why a pending scale is not done now."""

    kind: DeferReason
    why: str


Decision = SegmentSplit | SegmentMerge | Deferred | None


@dataclass(slots=True)
class ScalingState:
    """State of one stream's scaling by load in a leader's term.

    Attributes:
        load: Its measurements.
        lonely: Segments, by number, in which one key makes the load: time until which they are skipped, and reason.
        obstacles: Native transactions of others found by the last check before a scale; None without one.
        wait: Reason why the stream is not scaled although its policy requires it; None if it does not.
        wait_kind: The kind of the last such reason.
        told_ms: Time of the last log line of each kind.
        refused: Reason why the last scale was refused.
    """

    load: StreamLoad = field(default_factory=StreamLoad)
    lonely: dict[int, tuple[int, str]] = field(default_factory=dict)
    obstacles: frozenset[Obstacle] | None = None
    wait: ScalingWait | None = None
    wait_kind: DeferReason | None = None
    told_ms: dict[DeferReason, int] = field(default_factory=dict)
    refused: str = ""

    def keep_only(self, numbers: Collection[int]) -> None:
        self.lonely = {number: item for number, item in self.lonely.items() if number in numbers}


@dataclass(frozen=True, slots=True)
class Recent:
    """Scales by load of the last hour: number of all, and of merges."""

    scales: int = 0
    merges: int = 0


def recent_scales(history: EpochHistory, now_ms: int) -> Recent:
    """Return the scales by load in the hour before ``now_ms``, from epoch records, by clocks that may differ."""
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
    """Return the active segments, in order of their ranges, with their measurements."""
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
    """Return the decision of a policy on a stream's load.

    Args:
        segments: All active ones, in order of their ranges.
        recent: Scales by load in the last hour.
        lonely: Segments by number in which one key makes the load, with the time until which they are skipped, and why.
        now_ms: The time by which epochs are stamped.
    """
    if len(segments) < policy.min_segments:
        return _bounded(_grow(policy, segments, settings), recent, settings)
    hot = sorted((item for item in segments if _heat(policy, item) is not None), key=lambda item: -(item.rate or 0.0))
    held: list[Deferred] = []
    parts: dict[int, int] = {}
    room = policy.max_segments - len(segments)
    for item in hot:
        if len(parts) == SPLITS_MAX:
            break
        hold = _why_left(policy, item, lonely, settings, now_ms)
        wanted = min(_parts_wanted(policy, item), settings.scaling_parts_max, room + 1)
        if hold is None and wanted < 2:
            why = f"{_about(policy, item, settings)}, and the stream has max_segments, {policy.max_segments:,}, already"
            hold = Deferred(DeferReason.NO_ROOM, why)
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
        return Deferred(DeferReason.HOUR, why)
    if isinstance(decision, SegmentMerge) and recent.merges >= ceil(MERGES_SHARE * most):
        why = f"{decision.why}; {recent.merges} scales by load have merged segments in an hour already"
        return Deferred(DeferReason.HOUR, why)
    return decision


def _grow(policy: ScalingPolicy, segments: Sequence[ActiveSegment], settings: ScalingSettings) -> SegmentSplit:
    """Return the split of the segment with the most load, or else the widest, that leads up to ``min_segments``."""
    chosen = max(segments, key=lambda item: (item.rate or 0.0, item.range.high - item.range.low))
    parts = min(policy.min_segments - len(segments) + 1, settings.scaling_parts_max)
    why = f"{len(segments):,} segments are fewer than min_segments, {policy.min_segments:,}"
    return SegmentSplit({chosen.number: parts}, why, is_needed=True)


def _heat(policy: ScalingPolicy, item: ActiveSegment) -> int | None:
    if item.rate is None or item.rate <= policy.target:
        return None
    for place, (rate, factor) in enumerate(zip(item.rates, HOT, strict=True)):
        if rate is not None and rate > factor * policy.target:
            return place
    return None


def _is_near(policy: ScalingPolicy, item: ActiveSegment) -> bool:
    return all(rate is not None and rate > NEAR * policy.target for rate in item.rates[:3])


def _parts_wanted(policy: ScalingPolicy, item: ActiveSegment) -> int:
    return max(2, ceil((item.rate or 0.0) / (FILLED * policy.target)))


def _why_left(
    policy: ScalingPolicy,
    item: ActiveSegment,
    lonely: Mapping[int, tuple[int, str]],
    settings: ScalingSettings,
    now_ms: int,
) -> Deferred | None:
    """Return why a hot segment is skipped; None if it is not."""
    until_ms, why = lonely.get(item.number, (0, ""))
    if now_ms < until_ms:
        return Deferred(DeferReason.ONE_KEY, why)
    if _cools_down(item, settings, now_ms):
        return Deferred(
            DeferReason.COOLS_DOWN, f"{_about(policy, item, settings)}, and it cools down since it was made"
        )
    return None


def _cools_down(item: ActiveSegment, settings: ScalingSettings, now_ms: int) -> bool:
    return abs(now_ms - item.made_ms) < settings.scaling_cooldown_ms


def _about(policy: ScalingPolicy, item: ActiveSegment, settings: ScalingSettings) -> str:
    place = _heat(policy, item)
    assert place is not None
    times = f"{HOT[place]:g} times the target" if HOT[place] != 1 else "the target"
    return (
        f"segment {item.number}: {item.rates[place]:,.0f} {policy.unit}/s over {window_name(place, settings)}, above "
        f"{times} of {policy.target:,}"
    )


def window_name(place: int, settings: ScalingSettings) -> str:
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
    """Return runs of neighbours that are cold together, from left to right, each as long as possible."""
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
    """A scale: the numbers of the sealed segments, the ranges of their successors, and the reason."""

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
    """Return the scale that splits segments; None if none of the cuts gains anything.

    Args:
        state: Records the segments in which one key makes the load.
        until_ms: Time until which those segments are skipped.
    """
    useful: dict[int, RangeCut] = {}
    for number, found in cuts.items():
        if not found.is_useless or (decision.is_needed and len(found.ranges) > 1):
            useful[number] = found
            continue
        why = f"segment {number} is too hot, and one key makes {found.largest:.0%} of its load, so a split is useless"
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
    """Cut of a range.

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
        """True if one part keeps nearly all of the load."""
        return len(self.ranges) < 2 or self.largest > LONELY


def cut(whole: KeyRange, parts: int, sample: Sequence[tuple[float, float]], keyless: float = 0.0) -> RangeCut:
    """Cut a range into parts of the same load, unless one key has more.

    Args:
        parts: Number of parts; fewer result where a key has more than one part's share.
        sample: Position and weight of each record in a sample, in any order; positions outside the range are ignored.
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
