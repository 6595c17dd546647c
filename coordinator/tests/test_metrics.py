"""Metrics of a coordinator: what there is, from the first scrape on, and what moves when something happens."""

from __future__ import annotations

import ast
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parsed

import rollbridge_coordinator
from coordinator.tests.makers import Bench, text_of, values_of, view_of
from coordinator.tests.metric_makers import commit
from rollbridge.base.metrics import Family, FamilyKind, Histogram, Sample, Spent
from rollbridge.buffer.frames import FrameHeader, FrameKind
from rollbridge.buffer.table import AbortCause, Rejection, State
from rollbridge.metadata.requests import RequestKind
from rollbridge.metrics import SampleCollector, exposed
from rollbridge_coordinator.core import metric_samples
from rollbridge_coordinator.core.metric_samples import COUNTS, FAMILIES, leader_samples, standby_samples
from rollbridge_coordinator.core.metrics import (
    Answered,
    BufferSizes,
    CommitPath,
    EffectTimes,
    Takeovers,
    Warmth,
    survey,
)
from rollbridge_coordinator.core.waits import PendingRoll, Wait
from rollbridge_coordinator.daemon.health import RequestTimes

ORDERS, AUDIT = "sales/orders", "sales/audit"
GROUP = "sales/default"
UNITS = ("seconds", "bytes", "messages", "info", "transactions", "total", "records")
"""What the names of metrics end with that measure something; the others are numbers of what they name."""
NUMBERS = (
    "coordinator_healthy", "coordinator_groups", "coordinator_groups_led", "zookeeper_connected", "waiting_changes",
    "merges_beside", "stream_topics", "stream_epochs", "streams_in_error", "stream_error", "adopted_topic",
    "controller_epoch", "clocks_differ", "sessions",
)  # fmt: skip


def test_each_family_has_a_name_of_its_own_with_a_unit_and_says_what_it_means() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert len({name.removesuffix("_total") for name in names}) == len(names), "OpenMetrics takes the end away"
    for family in FAMILIES:
        assert family.about.endswith("."), family
        assert family.name.startswith("rollbridge_")
        assert (family.kind is FamilyKind.COUNTER) == (
            family.name.endswith("_total") and family is not metric_samples.SEGMENTS
        ), f"{family.name}: PIP-196 calls a gauge so, nothing else is"
        short = family.name.removeprefix("rollbridge_")
        assert short.endswith(UNITS) or short in NUMBERS, family
    declared = {item for item in vars(metric_samples).values() if isinstance(item, Family)}
    assert declared <= set(FAMILIES), "each is served, and in a table of the docs"


def test_every_count_is_declared() -> None:
    """A counter that is not would never be shown."""
    found: set[str] = set()
    for path in Path(rollbridge_coordinator.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.AugAssign(
                    target=ast.Subscript(value=ast.Attribute(attr="counts"), slice=ast.Constant(value=str(name)))
                ):
                    found.add(name)
                case ast.Call(func=ast.Name(id="_delete"), args=[_, ast.Constant(value=str(name)), _]):
                    found.add(name)
    assert found == COUNTS.keys() | {"transactions_aborted"}


def test_counters_are_there_before_their_first_event() -> None:
    bench = Bench({ORDERS: 1, AUDIT: 1})
    values = values_of(leader_samples(bench.group, view_of(bench.group)))
    wanted = {
        *((f"{name}_total", GROUP) for name in COUNTS),
        *(("transactions_aborted_total", GROUP, cause) for cause in AbortCause),
        *((f"frames_{name}_total", GROUP, reason) for name in ("rejected", "dropped") for reason in Rejection),
        *(("admin_requests_total", GROUP, kind, result) for kind in RequestKind for result in Answered),
        *((f"stream_committed_{what}_total", GROUP, name) for what in ("records", "bytes") for name in (ORDERS, AUDIT)),
        *(
            (f"txn_tb_snapshot_{what}_op_total", GROUP, op)
            for what in ("segment", "index")
            for op in ("add", "del", "read")
        ),
    }
    assert {key: values[key] for key in wanted} == dict.fromkeys(wanted, 0)
    for path in CommitPath:
        assert values["commit_latency_seconds", GROUP, path].count == 0
    for effect in ("CommitRound", "Seal", "Write"):
        assert values["effect_duration_seconds", GROUP, effect] == Spent(0, 0)
    assert math.isnan(values["least_lease_left_seconds", GROUP])
    assert (
        "oldest_transaction_info" not in {key[0] for key in values},
        values["oldest_transaction_age_seconds", GROUP],
    ) == (
        True,
        0,
    )


def test_every_sample_of_a_leader_is_of_a_declared_family_with_its_labels() -> None:
    bench = Bench({ORDERS: 1})
    bench.begin(ORDERS)
    samples = list(leader_samples(bench.group, view_of(bench.group)))
    assert {sample.family for sample in samples} <= set(FAMILIES)
    assert all(len(sample.labels) == len(sample.family.labels) for sample in samples)
    seen = [(sample.family.name, sample.labels) for sample in samples]
    assert len(set(seen)) == len(seen)
    missing = {family.name for family in FAMILIES} - {sample.family.name for sample in samples}
    others = {
        *metric_samples.OF_COORDINATOR,
        *metric_samples.OF_STANDBY,
        metric_samples.ERROR,
        metric_samples.ADOPTED,
        metric_samples.READINGS_AGE,
    }
    assert missing == {family.name for family in others}


def test_what_clients_call_themselves_is_cut_and_can_be_left_out() -> None:
    bench = Bench({ORDERS: 1})
    first = bench.begin(ORDERS, client="c" * 100)
    samples = list(leader_samples(bench.group, view_of(bench.group)))
    assert values_of(samples)["oldest_transaction_info", GROUP, str(first), "c" * 63 + "…", ""] == 1
    left = list(metric_samples.without_texts(samples))
    assert values_of(left)["oldest_transaction_info", GROUP, str(first), "", ""] == 1
    assert len(left) == len(samples)


def test_what_is_open_is_told() -> None:
    bench = Bench({ORDERS: 1, AUDIT: 1})
    first = bench.begin(ORDERS, client="importer", lease_ms=9_000)
    bench.data(first, ORDERS, 0, size=300)
    bench.clock_ms = 4_000
    second = bench.begin(ORDERS, AUDIT, lease_ms=1_000)
    bench.data(second, AUDIT, 0, size=50)
    third = bench.begin(AUDIT)
    bench.commit(third, {})
    values = values_of(leader_samples(bench.group, view_of(bench.group, 4_500)))
    found = {state: values["open_transactions", GROUP, state] for state in ("open", "committing", "aborting")}
    assert found == {"open": 2, "committing": 1, "aborting": 0}
    assert values["open_transactions_bytes", GROUP] == 350
    assert values["oldest_transaction_age_seconds", GROUP] == 3.5
    assert values["oldest_transaction_info", GROUP, str(first), "importer", ""] == 1
    assert values["least_lease_left_seconds", GROUP] == 0.5
    assert [values["stream_open_transactions", GROUP, name] for name in (ORDERS, AUDIT)] == [2, 2]
    assert [values["stream_open_transactions_bytes", GROUP, name] for name in (ORDERS, AUDIT)] == [300, 50]
    assert values["transactions_held_bytes", GROUP] == bench.group.fold.held_bytes > 0
    assert values["transactions_cached_bytes", GROUP] == bench.group.fold.cached_bytes > 350


def test_a_commit_is_counted_with_its_latency_from_when_the_leader_had_it() -> None:
    bench = Bench({ORDERS: 2, AUDIT: 1})
    bench.group.metrics.since_ms = 1_500
    early = bench.one(ORDERS, 0)  # a standby has folded it, which has no clock that is of interest
    bench.group.fold.now_ms = 3_000
    both = bench.begin(ORDERS, AUDIT)
    bench.data(both, ORDERS, 1, records=3, size=30)
    bench.data(both, AUDIT, 0, records=4, size=40)
    two = bench.commit(both, {(0, 1): 3, (1, 0): 4})
    bench.group.fold.now_ms = 4_980
    aborted = bench.abort(bench.begin(ORDERS))
    assert "CommitRound" in commit(bench, early, two, bench.one(ORDERS, 0), bench.one(ORDERS, 1), aborted)
    metrics = bench.group.metrics
    latency = metrics.latencies[CommitPath.DIRECT]
    assert (latency.count, round(latency.total, 9)) == (4, 3.5 + 2.0 + 2 * 0.02)
    assert (metrics.records, metrics.bytes) == ({ORDERS: 6, AUDIT: 4}, {ORDERS: 330, AUDIT: 40})
    assert metrics.aborted == {AbortCause.CLIENT: 1}
    assert (metrics.round_transactions.count, metrics.round_transactions.total) == (1, 5)
    assert metrics.round_bytes.total == 370
    assert bench.group.counts["transactions_committed"] == 4


def test_a_clock_that_ran_back_makes_no_negative_latency() -> None:
    bench = Bench({ORDERS: 1})
    bench.group.fold.now_ms = 9_000
    commit(bench, bench.one(ORDERS, 0), committed_ms=5_000)
    latency = bench.group.metrics.latencies[CommitPath.DIRECT]
    assert (latency.count, latency.total) == (1, 0)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (lambda bench, one: bench.abort(one), AbortCause.CLIENT),
        (lambda bench, one: bench.group.fold.request_abort(one.bytes, "expired", 5), AbortCause.OPERATOR),
        (lambda bench, one: bench.group.fold.expire(one.bytes, 5), AbortCause.EXPIRED),
        (lambda bench, one: bench.group.fold.refuse(one.bytes, "fenced", 5), AbortCause.OTHER),
        (lambda bench, one: bench.feed(ORDERS, FrameHeader(FrameKind.COMMIT, one.bytes), b"?"), AbortCause.OTHER),
    ],
)
def test_an_abort_has_the_cause_that_it_had_whatever_its_reason_says(end: Any, cause: AbortCause) -> None:
    bench = Bench({ORDERS: 1})
    one = bench.begin(ORDERS)
    item = bench.group.fold.open[one.bytes]
    end(bench, one)
    assert item.state is State.ABORTING
    commit(bench, item)
    values = values_of(leader_samples(bench.group, view_of(bench.group)))
    assert values["transactions_aborted_total", GROUP, cause] == 1
    assert sum(values["transactions_aborted_total", GROUP, each] for each in AbortCause) == 1


def test_limits_are_a_cause_of_their_own() -> None:
    bench = Bench({ORDERS: 1})
    long = bench.begin(ORDERS, lease_ms=bench.group.fold.limits.lease_ms_max + 1)
    assert bench.group.fold.open[long.bytes].cause is AbortCause.LIMIT


def test_lag_is_told_in_messages_and_time() -> None:
    bench = Bench({ORDERS: 1, AUDIT: 1})
    bench.begin(ORDERS)
    places = {name: next(iter(bench.group.streams[name].partitions())) for name in (ORDERS, AUDIT)}
    ends = {places[ORDERS]: 8, places[AUDIT]: 0}
    view = view_of(bench.group, 6_000, ends=ends, appended_ms={places[ORDERS]: 4_500, places[AUDIT]: 1})
    values = values_of(leader_samples(bench.group, view))
    assert [values[f"stream_fold_lag_{unit}", GROUP, ORDERS] for unit in ("messages", "seconds")] == [7, 1.5]
    assert [values[f"stream_fold_lag_{unit}", GROUP, AUDIT] for unit in ("messages", "seconds")] == [0, 0]
    silent = {places[ORDERS]: 1_000, places[AUDIT]: 12_000}
    view = view_of(bench.group, 6_000, ends=ends, appended_ms={places[ORDERS]: 4_500}, unheard_ms=silent)
    values = values_of(leader_samples(bench.group, view))
    assert [values["stream_fold_lag_seconds", GROUP, name] for name in (ORDERS, AUDIT)] == [1.5, 12]
    assert values["stream_fold_lag_messages", GROUP, AUDIT] == 0, "nobody knows"


def test_what_changes_wait_for_is_told_but_not_what_gathers() -> None:
    bench = Bench({ORDERS: 1})
    obstacle: Any = object()
    bench.group.waits.held["request-1"] = Wait(3_000, 9_000, frozenset())
    bench.group.waits.held_rolls[(ORDERS,)] = PendingRoll(Wait(2_000, 9_000, frozenset({obstacle})))
    bench.group.waits.held_rolls[(AUDIT,)] = PendingRoll(Wait(1_000, 9_000, frozenset()))
    values = values_of(leader_samples(bench.group, view_of(bench.group, 5_000)))
    assert [values["waiting_changes", GROUP, kind] for kind in ("scale", "rolling-commit")] == [1, 1]
    assert values["longest_wait_seconds", GROUP] == 3


def test_what_the_shell_measures_is_told() -> None:
    bench = Bench({ORDERS: 1})
    bench.group.metrics.log_bytes = {(bench.group.commit_log, 0): 77, ("sales.orders.buffer", 5): 1}
    place = next(iter(bench.group.streams[ORDERS].partitions()))
    times, takeovers = EffectTimes(spent={"Seal": [2.0, 0.5]}), Takeovers()
    takeovers.note(Warmth.COLD, 12.0)
    view = view_of(bench.group, times=times, takeovers=takeovers, held_bytes={place: 123})
    values = values_of(leader_samples(bench.group, view))
    assert values["effect_duration_seconds", GROUP, "Seal"] == Spent(2, 0.5)
    assert (values["last_takeover_seconds", GROUP], values["stream_buffer_held_bytes", GROUP, ORDERS]) == (12, 123)
    assert values["takeover_duration_seconds", GROUP, "cold"].total == 12
    assert values["takeover_duration_seconds", GROUP, "warm"].count == 0
    assert values["commit_log_disk_bytes", GROUP] == 77
    assert math.isnan(values["stream_buffer_disk_bytes", GROUP, ORDERS]), "it was not measured"


def test_the_metrics_of_several_groups_and_standbys_are_one_family_each() -> None:
    bench = Bench({ORDERS: 1})
    led = list(leader_samples(bench.group, view_of(bench.group)))
    other = [Sample(item.family, ("sales/b", *item.labels[1:]), item.value) for item in led]
    merged = exposed([*led, *standby_samples("s/c", 1, 2), *other, *standby_samples("s/d", 3, 4)], FAMILIES)
    names = [metric.name for metric in merged]
    assert len(set(names)) == len(names)
    [scales] = [metric for metric in merged if metric.name == "rollbridge_scales"]
    assert [sample.labels["group"] for sample in scales.samples] == [GROUP, "sales/b"]
    assert [metric.name for metric in exposed((), FAMILIES)] == names, "they are there before there is a leader"
    text = "\n".join(text_of([*led, *other])) + "\n"
    heads = Counter(line for line in text.splitlines() if line.startswith("#"))
    assert max(heads.values()) == 1


def test_prometheus_reads_what_is_served() -> None:
    bench = Bench({ORDERS: 1})
    label = 'a "b"\\\n'
    samples = [*leader_samples(bench.group, view_of(bench.group)), Sample(metric_samples.INFO, (label, "1.0"), 1)]
    collector = SampleCollector(lambda: samples, FAMILIES)
    plain = {family.name: family for family in parsed("\n".join(text_of(samples)) + "\n")}
    written = openmetrics.generate_latest(collector).decode()  # type: ignore[no-untyped-call]
    read = openmetrics_parser.text_string_to_metric_families(written)  # type: ignore[no-untyped-call]
    modern = {family.name: family for family in read}
    assert plain.keys() <= modern.keys()
    for family in FAMILIES:
        name = family.name if family is metric_samples.SEGMENTS else family.name.removesuffix("_total")
        assert (modern[name].type, modern[name].documentation) == (family.kind.value, family.about)
    [about] = plain["rollbridge_coordinator_info"].samples
    assert about.labels["name"] == label
    [latency] = [
        item
        for item in plain["rollbridge_commit_latency_seconds"].samples
        if item.name.endswith("_bucket") and item.labels["path"] == "large" and item.labels["le"] == "+Inf"
    ]
    assert latency.value == 0


def test_a_value_of_the_wrong_kind_is_a_defect() -> None:
    with pytest.raises(TypeError, match="rollbridge_scales_total is a counter"):
        exposed([Sample(COUNTS["scales"], (GROUP,), Histogram((1,)))])


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9))), st.sets(st.floats(0, 100), min_size=1))
def test_a_histogram_counts_as_one_by_one(values: list[tuple[float, int]], bounds: set[float]) -> None:
    histogram = Histogram(sorted(bounds))
    for value, times in values:
        histogram.note(value, times)
    each = [value for value, times in values for _ in range(times)]
    assert dict(histogram.buckets()) == {
        bound: sum(value <= bound for value in each) for bound in (*sorted(bounds), math.inf)
    }
    assert histogram.count == len(each)
    assert histogram.total == pytest.approx(sum(each))
    copy = histogram.copy()
    histogram.note(1)
    assert copy.count == len(each)


def test_many_open_transactions_are_looked_at_less_often() -> None:
    bench = Bench({ORDERS: 1})
    assert survey((), {}, 500).due_ms == 500
    item = bench.one(ORDERS, 0)
    assert survey([item] * 30_000, {}, 500).due_ms == 3_500


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 900)), min_size=1, max_size=400), st.data())
def test_what_a_buffer_holds_behind_an_offset_is_about_what_was_read(
    reads: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Between two marks it is taken to be even; so it is right where marks are, as long as all are kept."""
    sizes, place = BufferSizes(), ("t", 0)
    offset = total = 0
    marks = [(0, 0)]
    sizes.note(place, 0, 0)
    for messages, size in reads:
        offset, total = offset + messages, total + size
        marks.append((offset, total))
        sizes.note(place, offset, total)
    asked, before = data.draw(st.sampled_from(marks))
    answer = sizes.behind(place, asked)
    assert 0 <= answer <= total
    if len(marks) <= 256:
        assert answer == total - before
    assert sizes.behind(place, offset) == 0
    sizes.keep([])
    assert sizes.behind(place, 0) == 0


def test_what_was_read_by_a_standby_is_taken_to_be_like_the_rest() -> None:
    sizes, place = BufferSizes(), ("t", 0)
    sizes.note(place, 1_000, 0)
    sizes.note(place, 1_010, 500)
    assert sizes.behind(place, 990) == 1_000


def test_requests_are_timed_by_operation() -> None:
    times = RequestTimes(["read", "write"])
    times.note("read", 0.25)
    assert {name: known.total for name, known in times.durations().items()} == {"read": 0.25, "write": 0}
    with pytest.raises(KeyError):
        times.note("other", 1)
