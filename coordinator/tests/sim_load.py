"""A stream under a recorded load, in virtual time, as a scaling policy sees it: measured, decided, cut, and audited.

Nothing here is real but the policy, its measurements and the stream's history. The load is a rate and the share of each
key, as functions of the time; what comes in between two looks is drawn around that, by a seed.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from rollbridge.base.ids import SegmentId
from rollbridge.stream.epochs import EpochHistory, EpochRecord
from rollbridge.stream.keyspace import KeyRange, even_ranges
from rollbridge.stream.scaling import ScalingPolicy
from rollbridge_coordinator.core.settings import ScalingSettings
from rollbridge_coordinator.streams import scaling_policy
from rollbridge_coordinator.streams.scaling_policy import WINDOWS, ScalingPlan, ScalingState, SegmentMerge, SegmentSplit

SAMPLED = 2_000
START_MS = 10_000_000


@dataclass(frozen=True)
class Keys:
    """Keys by position, ascending, with their shares of the load, which add up to 1."""

    positions: Sequence[float]
    shares: Sequence[float]
    sums: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", [0.0, *accumulate(self.shares)])

    @classmethod
    def of(cls, weights: Mapping[float, float]) -> Keys:
        """Make keys of weights in any order, which need not add up to 1."""
        total = sum(weights.values())
        places = sorted(weights)
        return cls(places, [weights[place] / total for place in places])

    def within(self, whole: KeyRange) -> slice:
        """Which of them lie in a range."""
        return slice(bisect_left(self.positions, whole.low), bisect_left(self.positions, whole.high))

    def share(self, whole: KeyRange) -> float:
        """The part of the load in a range."""
        found = self.within(whole)
        below: float = self.sums[found.stop]
        return below - float(self.sums[found.start])

    def hottest(self, whole: KeyRange) -> float:
        """The part of the load that the hottest key in a range makes."""
        shares: Sequence[float] = self.shares[self.within(whole)]
        return max(shares, default=0.0)


def many_keys(count: int, seed: int, low: float = 0.0, high: float = 1.0) -> dict[float, float]:
    """Keys of which some come more often than others, none often, spread over a part of the key space."""
    rng = random.Random(seed)
    return {low + (high - low) * rng.random(): rng.paretovariate(3) for _ in range(count)}


@dataclass(frozen=True)
class Load:
    """A recorded load.

    Attributes:
        rate: Records per second at a time, in s.
        keys: The keys at a time.
    """

    rate: Callable[[float], float]
    keys: Callable[[float], Keys]


class LoadRun:
    """A stream whose policy is followed for a while."""

    def __init__(
        self, policy: ScalingPolicy, load: Load, settings: ScalingSettings, *, segments: int = 1, seed: int = 0
    ) -> None:
        self.policy = policy
        self.load = load
        self.settings = settings
        self.rng = random.Random(seed)
        self.history = EpochHistory.create(even_ranges(segments), START_MS)
        self.state = ScalingState()
        self.ends: dict[SegmentId, int] = {}
        self.s = 0.0
        self.over_s: dict[int, float] = {}
        self.needless: list[str] = []
        """Splits of what is not above its rate by then."""
        self.longest_over_s = 0.0
        """For how long a segment has been above its rate, where more than one key makes that."""
        self.counts: list[int] = [segments]
        """Numbers of segments there have been."""
        self.waits: list[str] = []
        self.plans: list[ScalingPlan] = []

    @property
    def now_ms(self) -> int:
        return START_MS + round(self.s * 1000)

    @property
    def scales(self) -> list[EpochRecord]:
        """The epochs that the policy has made."""
        return [item for item in self.history.records if item.reason]

    def go(self, duration_s: float) -> LoadRun:
        """Follow the load for a while."""
        step_s = self.settings.scaling_check_ms / 1000
        end_s = self.s + duration_s
        while self.s < end_s:
            self._write(step_s)
            self.s += step_s
            self._look()
            self._audit(step_s)
        return self

    def forget(self) -> None:
        """Another leader takes over."""
        self.state = ScalingState()

    def roll(self) -> None:
        """A rolling commit gives every segment a new topic."""
        sealed = {item.id: self.ends.get(item.id, 0) for item in self.history.active.segments}
        again = self.history.plan_rolling
        epochs = [item.epoch for item in self.history.records if item.numbers != self.history.active.numbers]
        first, second = again(epochs[-1], self.now_ms)
        self.history = self.history.with_records(
            replace(first, sealed_ends=sealed), replace(second, sealed_ends=dict.fromkeys(first.segment_ids, 0))
        )

    def _write(self, step_s: float) -> None:
        rate, keys = self.load.rate(self.s), self.load.keys(self.s)
        for item in self.history.active.segments:
            expected = rate * step_s * keys.share(item.range)
            drawn = max(round(self.rng.gauss(expected, expected**0.5)), 0)
            self.ends[item.id] = self.ends.get(item.id, 0) + drawn

    def _look(self) -> None:
        settings, load = self.settings, self.state.load
        ends = {item.id: self.ends.get(item.id, 0) for item in self.history.active.segments}
        load.note(self.history, self.now_ms, self.policy.unit, ends, settings.scaling_window_ms * WINDOWS[-1])
        segments = scaling_policy.view(load, self.history, self.policy, settings)
        recent = scaling_policy.recent_scales(self.history, self.now_ms)
        decision = scaling_policy.decide(self.policy, segments, recent, self.state.lonely, settings, self.now_ms)
        match decision:
            case SegmentSplit():
                ranges = {item.number: item.range for item in segments}
                cuts = {
                    number: self._cut(ranges[number], parts, decision.is_needed)
                    for number, parts in decision.parts.items()
                }
                until_ms = self.now_ms + settings.scaling_cooldown_ms
                self._scale(scaling_policy.plan_split(self.state, decision, cuts, until_ms))
            case SegmentMerge():
                self._scale(scaling_policy.plan_merge(decision, segments))
            case scaling_policy.Deferred(_, why) if why not in self.waits:
                self.waits.append(why)

    def _cut(self, whole: KeyRange, parts: int, is_needed: bool) -> scaling_policy.RangeCut:
        keys = self.load.keys(self.s)
        if 1.1 * self.load.rate(self.s) * keys.share(whole) <= self.policy.target and not is_needed:
            self.needless.append(f"{whole} is split at {self.s:g} s")
        found = keys.within(whole)
        positions, shares = keys.positions[found], keys.shares[found]
        drawn = self.rng.choices(positions, shares, k=SAMPLED) if positions else []
        return scaling_policy.cut(whole, parts, [(item, 1.0) for item in drawn])

    def _scale(self, plan: ScalingPlan | None) -> None:
        if plan is None:
            return
        record = self.history.plan_scale(plan.seal, sorted(plan.ranges), self.now_ms, plan.reason)
        ended = self.history.ending_with(record)
        record = replace(record, sealed_ends={item.id: self.ends.get(item.id, 0) for item in ended})
        self.history = self.history.with_records(record)
        self.plans.append(plan)
        self.counts.append(len(record.segments))

    def _audit(self, step_s: float) -> None:
        rate, keys = self.load.rate(self.s), self.load.keys(self.s)
        active = {int(item.id.number): item.range for item in self.history.active.segments}
        self.over_s = {number: self.over_s.get(number, 0.0) for number in active}
        for number, whole in active.items():
            own = rate * keys.share(whole)
            is_lonely = keys.hottest(whole) * rate > scaling_policy.LONELY * own
            # What a rate is over a window differs from this one by chance: a tenth does not count.
            self.over_s[number] = self.over_s[number] + step_s if own > 1.1 * self.policy.target else 0.0
            if not is_lonely:
                self.longest_over_s = max(self.longest_over_s, self.over_s[number])

    def faults(self, *, scales_max: int, over_s_max: float) -> list[str]:
        """What the policy has done that it must not."""
        policy = self.policy
        found = list(self.needless)
        if len(self.scales) > scales_max:
            found.append(f"{len(self.scales)} scales, not {scales_max}")
        if self.longest_over_s > over_s_max:
            found.append(f"a segment was above its rate for {self.longest_over_s:g} s, not {over_s_max:g}")
        outside = [count for count in self.counts[1:] if not policy.min_segments <= count <= policy.max_segments]
        found += [f"{count} segments, not {policy.min_segments} to {policy.max_segments}" for count in outside]
        hour_ms, most = scaling_policy.HOUR_MS, self.settings.scaling_per_hour_max
        times = [item.created_ms for item in self.scales]
        if any(later - first < hour_ms for first, later in zip(times, times[most:], strict=False)):
            found.append(f"more than {most} scales in an hour")
        return found + self._flaps()

    def _flaps(self) -> list[str]:
        """Merges of what was split a short while ago, and the other way round."""
        found: list[str] = []
        made: dict[int, int] = {}
        records = self.history.records
        for record in records:
            began, ended = self.history.began_with(record.epoch), self.history.ended_with(record.epoch)
            for item in ended if record.reason and "min_segments" not in record.reason else ():
                age_ms = record.created_ms - made.get(int(item.id.number), 0)
                is_merged = not any(item.range.holds(one.range) for one in began)
                wait_ms = (
                    self.settings.scaling_window_ms * WINDOWS[-1] if is_merged else (self.settings.scaling_cooldown_ms)
                )
                if age_ms < wait_ms:
                    found.append(f"segment {item.id} was {'merged' if is_merged else 'split'} after {age_ms} ms")
            for item in record.segments:
                made.setdefault(int(item.id.number), record.created_ms)
        return found
