"""What a leader measures of a stream's load: full windows, brokers that do not answer, rolling commits, clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.ids import Epoch, SegmentId
from rollbridge.model.keyspace import even_ranges
from rollbridge_coordinator.state.load import WINDOWS, StreamLoad

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
