"""Scaling by load under recorded loads, in virtual time: few scales, no segment above its rate for long, no flapping.

An oracle looks at each run (:meth:`LoadRun.faults`); policies with a defect do not pass it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tests.makers import varied
from coordinator.tests.sim_load import Keys, Load, LoadRun, many_keys
from rollbridge.base.ids import Epoch, SegmentId
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange, check_partition, even_ranges
from rollbridge.stream.scaling import ScalingPolicy
from rollbridge_coordinator.core.settings import ScalingSettings
from rollbridge_coordinator.streams import scaling_policy
from rollbridge_coordinator.streams import scaling_policy as load_module
from rollbridge_coordinator.streams.scaling_policy import WINDOWS, StreamLoad

MINUTE = 60.0
HOUR = 60 * MINUTE
WINDOW_S = 20 * MINUTE
"""The longest window."""
LOOK_S = 15
SETTINGS = varied(ScalingSettings(), scaling_checks=120 // LOOK_S)
POLICY = ScalingPolicy(events_per_second=100, max_segments=32)
EVEN = Keys.of(many_keys(3_000, 1))


def one_hot(share: float) -> Keys:
    """One key makes a share of the load, many others the rest."""
    others = many_keys(3_000, 2)
    return Keys.of({**others, 0.37: share / (1 - share) * sum(others.values())})


HOT_KEY = one_hot(0.6)
LONE_KEY = one_hot(0.97)
TWO_RANGES = Keys.of({**many_keys(500, 3), **many_keys(2_000, 4, 0.10, 0.12), **many_keys(2_000, 5, 0.80, 0.805)})


def daily(s: float) -> float:
    """From 20 records/s at night to 1,000 by day."""
    return 510 - 490 * math.cos(2 * math.pi * s / (24 * HOUR))


def crowd(s: float) -> float:
    """Thirty times the load, all at once, for an hour."""
    return 1_500 if HOUR <= s < 2 * HOUR else 50


def brief(s: float) -> float:
    """Above twice the target for three minutes, each half hour: over before a split could help."""
    return 250 if s % (30 * MINUTE) < 3 * MINUTE else 20


def passed_by(s: float) -> float:
    """Nearly twice the target at first, and over before ten minutes have been measured."""
    return 190 if s < 7 * MINUTE else 10


def sawtooth(s: float) -> float:
    """Up to 1.8 times the target and down to nothing, every 16 minutes."""
    return 180 * (s % (16 * MINUTE)) / (16 * MINUTE)


@dataclass(frozen=True)
class Recorded:
    """A load, and what is allowed under it.

    Attributes:
        scales_max: Scales at most.
        over_s_max: Longest time for which a segment may be above its rate, unless one key alone makes that.
        segments: Numbers of segments at the end.
    """

    load: Load
    duration_s: float
    scales_max: int
    over_s_max: float
    segments: range
    policy: ScalingPolicy = POLICY
    begin: int = 1


AT_LEAST_TWO = replace(POLICY, min_segments=2)
RECORDED: Mapping[str, Recorded] = {
    "constant, low": Recorded(Load(lambda _: 60, lambda _: EVEN), 3 * HOUR, 0, 0, range(1, 2)),
    "constant, high": Recorded(Load(lambda _: 700, lambda _: EVEN), 3 * HOUR, 2, WINDOW_S, range(8, 15)),
    "daily curve": Recorded(Load(daily, lambda _: EVEN), 48 * HOUR, 44, WINDOW_S, range(1, 4)),
    "flash crowd": Recorded(Load(crowd, lambda _: EVEN), 4 * HOUR, 6, WINDOW_S, range(1, 3)),
    "brief bursts": Recorded(Load(brief, lambda _: EVEN), 6 * HOUR, 0, 5 * MINUTE, range(1, 2)),
    "passed by": Recorded(Load(passed_by, lambda _: EVEN), HOUR, 0, 8 * MINUTE, range(1, 2)),
    "one hot key": Recorded(Load(lambda _: 600, lambda _: HOT_KEY), 6 * HOUR, 2, WINDOW_S, range(3, 8)),
    "one key alone": Recorded(Load(lambda _: 600, lambda _: LONE_KEY), 6 * HOUR, 0, WINDOW_S, range(1, 2)),
    "sawtooth": Recorded(Load(sawtooth, lambda _: EVEN), 6 * HOUR, 2, WINDOW_S, range(2, 5)),
    "two hot ranges": Recorded(Load(lambda _: 800, lambda _: TWO_RANGES), 4 * HOUR, 5, WINDOW_S, range(9, 17)),
    "silence": Recorded(Load(lambda _: 0, lambda _: EVEN), 3 * HOUR, 1, 0, range(2, 3), AT_LEAST_TWO, 16),
    "too few": Recorded(Load(lambda _: 0, lambda _: EVEN), HOUR, 1, 0, range(4, 5), replace(POLICY, min_segments=4)),
    "no room": Recorded(
        Load(lambda _: 900, lambda _: EVEN), 3 * HOUR, 1, math.inf, range(3, 4), replace(POLICY, max_segments=3)
    ),
}


def faults_of(name: str, seed: int = 0) -> tuple[LoadRun, list[str]]:
    said = RECORDED[name]
    run = LoadRun(said.policy, said.load, SETTINGS, segments=said.begin, seed=seed).go(said.duration_s)
    found = run.faults(scales_max=said.scales_max, over_s_max=said.over_s_max)
    if len(run.history.active.segments) not in said.segments:
        found.append(f"{len(run.history.active.segments)} segments at the end, not {said.segments}")
    return run, found


@pytest.mark.long_cases("daily curve")
@pytest.mark.parametrize("name", RECORDED)
def test_a_policy_follows_a_load(name: str) -> None:
    run, found = faults_of(name)
    assert not found, (found, run.counts, [item.reason for item in run.scales])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", ["constant, high", "flash crowd", "one hot key", "sawtooth", "two hot ranges"])
def test_and_so_it_does_with_other_noise(name: str, seed: int) -> None:
    run, found = faults_of(name, seed)
    assert not found, (found, run.counts)


# Policies with a defect


def merges_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is merged would be split again at once: no hysteresis, no look back, no cool-down."""
    monkeypatch.setattr(scaling_policy, "COLD", 1.5)
    monkeypatch.setattr(
        scaling_policy, "_are_cold", lambda policy, run: sum(item.rate for item in run) < 1.5 * policy.target
    )
    monkeypatch.setattr(scaling_policy, "_is_quiet", lambda item, *_: item.rate is not None)


def cuts_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are cut evenly, as Pravega does, however the keys lie."""
    monkeypatch.setattr(scaling_policy, "KEYS_MIN", 10**9)


def splits_two_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """However hot, a segment is cut in two."""
    monkeypatch.setattr(scaling_policy, "_parts_wanted", lambda *_: 2)


def believes_partial_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is not full counts as if it was."""
    right = load_module.SegmentLoad.rate

    def wrong(self: load_module.SegmentLoad, window_ms: float, spacing_ms: int) -> float | None:
        found = right(self, window_ms, spacing_ms)
        first, last = self.samples[0], self.samples[-1]
        return load_module._rate(first, last) if found is None and first != last else found

    monkeypatch.setattr(load_module.SegmentLoad, "rate", wrong)
    monkeypatch.setattr(scaling_policy, "_why_left", lambda *_: None)


def is_hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest window decides alone."""
    monkeypatch.setattr(scaling_policy, "HOT", (1.0, 1.0, 1.0, 1.0))


def looks_back_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the load has passed by does not count."""
    monkeypatch.setattr(
        scaling_policy,
        "_heat",
        lambda policy, item: next(
            (
                place
                for place, (rate, factor) in enumerate(zip(item.rates, scaling_policy.HOT, strict=True))
                if rate is not None and rate > factor * policy.target
            ),
            None,
        ),
    )


def splits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment is cut however little is gained by it."""
    monkeypatch.setattr(scaling_policy.RangeCut, "is_useless", property(lambda self: False))
    cuts_in_half(monkeypatch)


def forgets_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many segments there may be is not asked."""
    right = scaling_policy.decide
    monkeypatch.setattr(
        scaling_policy,
        "decide",
        lambda policy, *others: right(replace(policy, min_segments=1, max_segments=100), *others),
    )


def never_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cold stays as it is."""
    monkeypatch.setattr(scaling_policy, "_cold_runs", lambda *_: ())


def never_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is hot stays as it is."""
    monkeypatch.setattr(scaling_policy, "_heat", lambda *_: None)


def is_tireless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither cool-down nor what was done in the last hour counts."""
    monkeypatch.setattr(scaling_policy, "_bounded", lambda decision, *_: decision)
    is_hasty(monkeypatch)
    merges_early(monkeypatch)


DEFECTS = [
    merges_early,
    cuts_in_half,
    splits_two_at_most,
    believes_partial_windows,
    is_hasty,
    looks_back_only,
    splits_for_nothing,
    forgets_the_limits,
    never_merges,
    never_splits,
    is_tireless,
]


@pytest.mark.long_cases("splits_for_nothing", "forgets_the_limits", "cuts_in_half")
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_policy_with_a_defect_is_found_out(
    defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    assert any(faults_of(name)[1] for name in RECORDED if name != "daily curve")


# Leaders, rolling commits and limits


def test_a_new_leader_waits_for_its_windows_and_keeps_to_the_cool_down() -> None:
    """What is measured is lost with a leader; when segments were made, and how often a stream was scaled, is not."""
    policy = replace(POLICY, max_segments=200)
    run = LoadRun(policy, Load(lambda _: 700, lambda _: EVEN), SETTINGS).go(10.5 * MINUTE)
    assert len(run.scales) == 1, "700 is above five times the target, and the first cool-down is over"
    run.load = Load(lambda _: 14_000, lambda _: EVEN)
    while run.s < 30 * MINUTE:
        run.forget()
        run.go(90)
    assert len(run.scales) == 1, "no window was ever full"
    run.go(3 * MINUTE)
    assert len(run.scales) == 2
    run.forget()
    assert scaling_policy.recent_scales(run.history, run.now_ms) == scaling_policy.Recent(2, 0)
    made_ms = run.scales[-1].created_ms
    run.go(12 * MINUTE)
    assert run.scales[-1].created_ms > made_ms + SETTINGS.scaling_cooldown_ms, "the new leader knows of them"


def test_a_rolling_commit_does_not_change_what_is_known_of_a_segment() -> None:
    """It puts other topics under the same numbers, which begin with nothing."""
    run = LoadRun(POLICY, Load(lambda _: 90, lambda _: EVEN), SETTINGS)
    record = run.history.plan_scale([0], [KeyRange(0.0, 0.5), KeyRange(0.5, 1.0)], run.now_ms)
    run.history = run.history.with_records(replace(record, sealed_ends={}))
    for _ in range(20):
        run.go(2 * MINUTE)
        run.roll()
    run.go(LOOK_S)
    for item in scaling_policy.view(run.state.load, run.history, POLICY, SETTINGS):
        assert all(rate is not None and 30 < rate < 60 for rate in item.rates), item
    assert not run.scales, "45 each and 90 together are neither hot nor cold"


def test_scales_by_load_of_an_hour_are_bounded_and_merges_have_half_of_them() -> None:
    settings = replace(SETTINGS, scaling_per_hour_max=4)
    hot = scaling_policy.ActiveSegment(0, KeyRange(0.0, 0.5), (900.0,) * 4, math.inf, 0)
    cold = [scaling_policy.ActiveSegment(n, KeyRange(0.5 + n / 10, 0.6 + n / 10), (1.0,) * 4, 1.0, 0) for n in (1, 2)]
    late_ms = 10 * settings.scaling_cooldown_ms

    def decide(*segments: scaling_policy.ActiveSegment, scales: int, merges: int = 0) -> scaling_policy.Decision:
        return scaling_policy.decide(POLICY, segments, scaling_policy.Recent(scales, merges), {}, settings, late_ms)

    assert isinstance(decide(hot, scales=3), scaling_policy.SegmentSplit)
    assert "4 times in an hour" in str(decide(hot, scales=4))
    assert isinstance(decide(*cold, scales=3, merges=1), scaling_policy.SegmentMerge)
    assert "2 scales by load have merged" in str(decide(*cold, scales=2, merges=2))


def test_why_a_hot_segment_is_left_alone_is_said() -> None:
    run, _ = faults_of("one key alone")
    assert any("one key makes" in why for why in run.waits), run.waits
    run, _ = faults_of("no room")
    assert any("max_segments, 3, already" in why for why in run.waits), run.waits
    run, _ = faults_of("constant, high")
    assert any("cools down" in why for why in run.waits), run.waits
    assert all(len(item.reason) <= scaling_policy.REASON_CHARACTERS_MAX for item in run.scales)


# Cuts

POSITIONS = st.floats(0, 1, exclude_max=True)


@given(
    whole=st.tuples(POSITIONS, POSITIONS).filter(lambda two: two[0] < two[1]).map(lambda two: KeyRange(*two)),
    parts=st.integers(2, 9),
    few=st.lists(POSITIONS, min_size=1, max_size=8),
    many=st.lists(st.tuples(POSITIONS, st.floats(0.5, 9)), max_size=300),
    keyless=st.floats(0, 50),
)
def test_a_cut_covers_its_range_and_leaves_no_part_more_than_its_share_but_for_one_key(
    whole: KeyRange, parts: int, few: list[float], many: list[tuple[float, float]], keyless: float
) -> None:
    """Some keys come often, some once; some lie outside."""
    sample = [*many, *((position, 1.0) for position in few for _ in range(20))]
    found = scaling_policy.cut(whole, parts, sample, keyless)
    check_partition(list(found.ranges), [whole])
    assert 1 <= len(found.ranges) <= parts
    assert all(before.high == after.low for before, after in pairwise(found.ranges))
    inside = [(position, weight) for position, weight in sample if position in whole]
    if not found.keys:
        assert len(inside) < scaling_policy.KEYS_MIN
        return
    total = sum(weight for _, weight in inside)
    heaviest = max(sum(weight for at, weight in inside if at == position) for position, _ in inside)
    for part in found.ranges:
        own = sum(weight for position, weight in inside if position in part)
        assert own <= total / parts + 2 * heaviest + 1e-6
    largest = max(sum(weight for position, weight in inside if position in part) for part in found.ranges)
    assert found.largest == pytest.approx((largest + keyless / len(found.ranges)) / (total + keyless))


def test_one_key_cannot_be_cut() -> None:
    found = scaling_policy.cut(KeyRange(0.0, 1.0), 4, [(0.3, 1.0)] * 1_000)
    assert found.ranges == (KeyRange(0.0, 1.0),)
    assert found.is_useless


def test_two_keys_side_by_side_are_cut_between_them() -> None:
    """However close: the second one begins the second part."""
    left = 0.3
    right = math.nextafter(left, 1)
    found = scaling_policy.cut(KeyRange(0.0, 1.0), 2, [(left, 1.0), (right, 1.0)] * 100)
    assert found.ranges == (KeyRange(0.0, right), KeyRange(right, 1.0))
    assert found.largest == pytest.approx(0.5)


def test_without_keys_a_range_is_cut_evenly() -> None:
    found = scaling_policy.cut(KeyRange(0.5, 1.0), 2, [], keyless=2_000)
    assert found.ranges == (KeyRange(0.5, 0.75), KeyRange(0.75, 1.0))
    narrow = KeyRange(0.3, math.nextafter(0.3, 1))
    assert scaling_policy.cut(narrow, 8, []).is_useless, "there is nothing between its ends"


def test_many_hot_segments_that_cannot_be_split_keep_no_other_from_it() -> None:
    """However many have one hot key each, the one that has not is split."""
    segments = [
        scaling_policy.ActiveSegment(number, item, (900.0 - number,) * 4, math.inf, 0)
        for number, item in enumerate(even_ranges(20))
    ]
    late_ms = 10 * SETTINGS.scaling_cooldown_ms
    lonely = dict.fromkeys(range(19), (late_ms + 1, "one key"))
    found = scaling_policy.decide(POLICY, segments, scaling_policy.Recent(), lonely, SETTINGS, late_ms)
    assert isinstance(found, scaling_policy.SegmentSplit)
    assert list(found.parts) == [19]
    found = scaling_policy.decide(
        replace(POLICY, max_segments=1_000), segments, scaling_policy.Recent(), {}, SETTINGS, late_ms
    )
    assert isinstance(found, scaling_policy.SegmentSplit)
    assert list(found.parts) == list(range(scaling_policy.SPLITS_MAX)), "the hottest first, some at a time"
    assert "likewise segments 1, 2, 3, 4, 5 and 2 more" in found.why


def test_clocks_that_were_ahead_do_not_lift_the_bounds() -> None:
    """An epoch may be stamped a little later than it is now."""
    run = LoadRun(POLICY, Load(lambda _: 700, lambda _: EVEN), SETTINGS).go(11 * MINUTE)
    made_ms = run.scales[0].created_ms
    assert scaling_policy.recent_scales(run.history, made_ms - 30_000).scales == 1
    assert scaling_policy.recent_scales(run.history, made_ms + scaling_policy.HOUR_MS).scales == 0
    young = scaling_policy.ActiveSegment(0, KeyRange(0.0, 1.0), (900.0,) * 4, math.inf, made_ms)
    assert isinstance(
        scaling_policy.decide(POLICY, [young], scaling_policy.Recent(), {}, SETTINGS, made_ms - 30_000),
        scaling_policy.Deferred,
    )


def test_what_is_nearly_hot_is_split_along_with_what_is() -> None:
    """One epoch for both; by itself it is left alone, and so it is where there is no room."""
    hot, near, cool = (
        scaling_policy.ActiveSegment(number, item, (rate,) * 4, math.inf, 0)
        for number, (item, rate) in enumerate(zip(even_ranges(3), (120.0, 95.0, 80.0), strict=True))
    )
    late_ms = 10 * SETTINGS.scaling_cooldown_ms

    def parts(
        *segments: scaling_policy.ActiveSegment, most: int = 32, lonely: Mapping[int, tuple[int, str]] | None = None
    ) -> Mapping[int, int]:
        policy = replace(POLICY, max_segments=most)
        found = scaling_policy.decide(policy, segments, scaling_policy.Recent(), lonely or {}, SETTINGS, late_ms)
        return found.parts if isinstance(found, scaling_policy.SegmentSplit) else {}

    assert parts(hot, near, cool) == {0: 2, 1: 2}
    assert not parts(near, cool)
    assert parts(hot, near, cool, most=4) == {0: 2}
    assert parts(hot, replace(near, made_ms=late_ms), cool) == {0: 2}, "it cools down"
    assert parts(hot, near, cool, lonely={1: (late_ms + 1, "one key")}) == {0: 2}


RATES = st.none() | st.floats(0, 2_000)
SEEN = st.tuples(st.tuples(RATES, RATES, RATES, RATES), st.floats(0, 500) | st.just(math.inf), st.integers(0, 10**7))


@given(
    seen=st.lists(SEEN, min_size=1, max_size=24),
    limits=st.tuples(st.integers(1, 30), st.integers(1, 30)).map(sorted),
    recent=st.tuples(st.integers(0, 14), st.integers(0, 8)),
    lonely=st.dictionaries(st.integers(0, 23), st.tuples(st.integers(0, 10**7), st.just("one key"))),
    now_ms=st.integers(0, 10**7),
)
def test_whatever_is_measured_a_decision_keeps_to_the_limits(
    seen: list[tuple[tuple[float | None, ...], float, int]],
    limits: list[int],
    recent: tuple[int, int],
    lonely: dict[int, tuple[int, str]],
    now_ms: int,
) -> None:
    policy = replace(POLICY, min_segments=limits[0], max_segments=limits[1])
    segments = [
        scaling_policy.ActiveSegment(number, item, *one)
        for number, (item, one) in enumerate(zip(even_ranges(len(seen)), seen, strict=True))
    ]
    decision = scaling_policy.decide(policy, segments, scaling_policy.Recent(*recent), lonely, SETTINGS, now_ms)
    match decision:
        case scaling_policy.SegmentSplit():
            assert recent[0] < SETTINGS.scaling_per_hour_max
            after = len(segments) + sum(parts - 1 for parts in decision.parts.values())
            assert all(2 <= parts <= SETTINGS.scaling_parts_max for parts in decision.parts.values())
            assert after <= policy.max_segments
            for number in () if decision.is_needed else decision.parts:
                assert abs(now_ms - segments[number].made_ms) >= SETTINGS.scaling_cooldown_ms
                assert now_ms >= lonely.get(number, (0, ""))[0]
                assert (segments[number].rate or 0) > scaling_policy.NEAR * policy.target
        case scaling_policy.SegmentMerge():
            plan = scaling_policy.plan_merge(decision, segments)
            assert len(set(plan.seal)) == len(plan.seal)
            assert all(list(run) == list(range(run[0], run[-1] + 1)) and len(run) > 1 for run in decision.runs)
            assert len(segments) - len(plan.seal) + len(plan.ranges) >= policy.min_segments
            check_partition(list(plan.ranges), [segments[number].range for number in plan.seal])
            for run in decision.runs:
                joint = [segments[number].rates for number in run]
                assert all(sum(rate or 0 for rate in window) < policy.target / 2 for window in zip(*joint, strict=True))
        case scaling_policy.Deferred(_, why):
            assert why
        case None:
            assert len(segments) >= policy.min_segments


# What a leader measures of a stream's load: full windows, brokers that do not answer, rolling commits, clocks.


WINDOW_MS, SPACING_MS = 120_000, 5_000
LONGEST_MS = WINDOW_MS * WINDOWS[-1]
ONE = EpochHistory.create(even_ranges(1), 0)
(SEGMENT,) = ONE.active.segment_ids


class Meter:
    """A stream whose segments grow as they are told to."""

    def __init__(self, history: EpochHistory = ONE) -> None:
        self.load = StreamLoad()
        self.history = history
        self.now_ms = 1_000_000

    def look(self, values: Mapping[SegmentId, int], after_ms: int = SPACING_MS, unit: str = "events") -> None:
        self.now_ms += after_ms
        self.load.note(self.history, self.now_ms, unit, values, LONGEST_MS)

    def rates(self, number: int = 0) -> tuple[float | None, ...]:
        return self.load.rates(number, WINDOW_MS, SPACING_MS)

    def grow(self, looks: int, each: int, start: int = 0) -> int:
        for _ in range(looks):
            start += each
            self.look({SEGMENT: start})
        return start


def test_a_window_has_a_rate_once_it_is_full() -> None:
    meter = Meter()
    end = meter.grow(24, 50)
    assert meter.rates() == (None,) * 4, "24 looks are 23 intervals"
    end = meter.grow(1, 50, end)
    assert meter.rates() == (10.0, None, None, None)
    end = meter.grow(36, 50, end)
    assert meter.rates() == (10.0, 10.0, None, None)
    meter.grow(180, 50, end)
    assert meter.rates() == (10.0,) * 4


def test_what_was_there_before_the_first_look_does_not_count() -> None:
    meter = Meter()
    meter.grow(30, 50, start=1_000_000)
    assert meter.rates()[0] == 10.0


def test_longer_windows_remember_what_has_passed_by_and_the_peak_as_well() -> None:
    meter = Meter()
    end = meter.grow(240, 50)
    end = meter.grow(30, 500, end)
    meter.grow(70, 50, end)
    rates = meter.rates()
    assert rates[0] == rates[1] == 10.0
    assert rates[2] == pytest.approx(10 + 90 * 150 / 600, rel=0.2), "some six minutes ago, within ten"
    assert rates[3] == pytest.approx(10 + 90 * 150 / 1200, rel=0.2)
    assert meter.load.peak(0, WINDOW_MS) == pytest.approx(100.0, rel=0.2)


def test_a_segment_of_which_brokers_did_not_tell_now_has_no_rates_until_they_do() -> None:
    meter = Meter()
    end = meter.grow(60, 50)
    meter.look({})
    assert meter.rates() == (None,) * 4
    meter.look({SEGMENT: end + 100})
    assert meter.rates()[:2] == (10.0, 10.0), "nothing was missed meanwhile"


def test_after_a_long_pause_windows_fill_anew() -> None:
    """Nobody knows how what was written is spread over the pause."""
    meter = Meter()
    end = meter.grow(30, 50)
    meter.look({SEGMENT: end + 100_000}, after_ms=400_000)
    assert meter.rates()[0] is None
    meter.grow(24, 50, end + 100_000)
    assert meter.rates()[0] == 10.0


@pytest.mark.parametrize("unit", ["events", "bytes"])
def test_under_a_rolled_segments_number_another_one_goes_on(unit: str) -> None:
    """Of the old one, its sealed end tells what came after the last look; its size is not known any more."""
    meter = Meter()
    end = 0
    for _ in range(30):
        end += 50
        meter.look({SEGMENT: end}, unit=unit)
    rolled = SegmentId.of(0, 1)
    first = replace(
        ONE.active,
        epoch=Epoch(1),
        segments=(replace(ONE.active.segments[0], id=rolled),),
        sealed_ends={SEGMENT: end + 30},
    )
    meter.history = ONE.with_records(first)
    meter.look({rolled: 20}, unit=unit)
    written = meter.load.segments[0].samples
    assert written[-1].written - written[-2].written == (50 if unit == "events" else 20)
    assert meter.load.segments[0].segment == rolled
    assert meter.rates()[0] is not None


def test_sizes_that_retention_makes_smaller_count_as_nothing() -> None:
    meter = Meter()
    for size in [*range(0, 3_000, 100), 500, *range(600, 3_600, 100)]:
        meter.look({SEGMENT: size}, unit="bytes")
    assert all(rate is None or 0 < rate <= 20 for rate in meter.rates())


def test_another_unit_or_a_clock_that_was_set_back_begins_anew() -> None:
    meter = Meter()
    end = meter.grow(30, 50)
    meter.look({SEGMENT: 10}, unit="bytes")
    assert meter.rates() == (None,) * 4
    meter = Meter()
    end = meter.grow(30, 50)
    meter.look({SEGMENT: end}, after_ms=-60_000)
    assert meter.rates() == (None,) * 4
    meter.grow(24, 50, end)
    assert meter.rates()[0] == 10.0


def test_segments_that_are_not_active_any_more_are_forgotten_and_new_ones_know_when_they_were_made() -> None:
    meter = Meter()
    end = meter.grow(30, 50)
    planned = ONE.plan_scale([0], even_ranges(2), 777)
    meter.history = ONE.with_records(replace(planned, sealed_ends={SEGMENT: end}))
    meter.look(dict.fromkeys(planned.segment_ids, 0))
    assert meter.load.segments.keys() == meter.load.made_ms.keys() == {1, 2}
    assert set(meter.load.made_ms.values()) == {777}
    assert meter.rates(0) == meter.rates(1) == (None,) * 4


@given(st.lists(st.tuples(st.integers(1_000, 9_000), st.integers(0, 500)), min_size=300, max_size=500))
def test_rates_are_those_of_what_was_written_and_few_samples_are_kept(steps: list[tuple[int, int]]) -> None:
    """However irregular the looks: a window is at most a quarter longer than it is called, and its rate exact."""
    meter = Meter()
    end = 0
    seen: dict[int, int] = {}
    for after_ms, more in steps:
        end += more
        meter.look({SEGMENT: end}, after_ms)
        seen[meter.now_ms] = end
    samples = meter.load.segments[0].samples
    assert len(samples) < 150
    assert all(seen[item.ms] - seen[samples[0].ms] == item.written - samples[0].written for item in samples)
    for factor, rate in zip(WINDOWS, meter.rates(), strict=True):
        window_ms = WINDOW_MS * factor
        if meter.now_ms - min(seen) < window_ms:
            assert rate is None
            continue
        begun_ms = max(item.ms for item in samples if item.ms <= meter.now_ms - window_ms)
        assert meter.now_ms - begun_ms <= 1.25 * window_ms
        assert rate == pytest.approx((end - seen[begun_ms]) * 1000 / (meter.now_ms - begun_ms))
