"""What the live page says, as pure functions: the last hour, what a leader shows, and the JSON of it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tests.makers import Bench, view_of
from coordinator.tests.metric_makers import commit
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.fold import STRANGER_BYTES
from rollbridge.metadata.changes import StreamFault
from rollbridge.metadata.gateways import FIRST_PRODUCER_ID, GatewayRecord, IdRecord
from rollbridge.metadata.picture import NO_LEADER, GroupPicture, StreamPicture
from rollbridge.metadata.records import Group, Lead, TransactionRecord
from rollbridge.metadata.requests import NAMED_MAX
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange, cut_evenly, even_ranges, ranges_of
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.picture import DrawnLoad, lineage_svg
from rollbridge_coordinator.core.metrics import ROUNDS_KEPT, CommitPath
from rollbridge_coordinator.core.waits import Wait
from rollbridge_coordinator.page import documents
from rollbridge_coordinator.page.documents import (
    DRAWN_MAX,
    EPOCHS_SHOWN,
    LeadView,
    Measure,
    Overview,
    ProducerOrigin,
    clients_at_gateways,
    gateway_entry,
    glance_document,
    last_hour_document,
    lead_document,
    led_group_document,
    measured_places,
    newest_epochs,
    offset_rate,
    other_group_document,
    stream_document,
    with_origins,
)
from rollbridge_coordinator.page.overview import (
    LISTED_MAX,
    STEP_MS,
    TALLIES_KEPT,
    CounterHistory,
    CounterSample,
    Listing,
    LiveGroup,
    between,
    live_group,
    quantile_of,
    tally_of,
)

ORDERS, AUDIT = "sales/orders", "sales/audit"
HOSTILE = '<script>alert("1")</script>\u202e\x00'


def led(leader: str | None = None, since_ms: int = 0, *, is_serving: bool = False, **more: Any) -> LeadView:
    lead = None if leader is None else Lead(leader, since_ms, is_serving=is_serving)
    return LeadView(picture=GroupPicture(Group(GroupName("sales"), 0), lead), **more)


LEAD = led("one", 5, is_serving=True, is_here=True)


def counter_sample(at_ms: int, committed: int = 0, term: int = 1, since_ms: int = 0, **more: Any) -> CounterSample:
    """A tally with so many commits, of one record of ten bytes each, which took between 1 and 2.5 ms."""
    latencies = (0, committed, *[0] * 16)
    given = {"aborted": 0, "records": committed, "bytes": 10 * committed, "latencies": latencies, **more}
    return CounterSample(at_ms=at_ms, term=term, since_ms=since_ms, committed=committed, **given)


# The last hour


def test_what_happened_between_two_tallies_is_their_difference() -> None:
    period = between(counter_sample(10_000, 5), counter_sample(20_000, 25))
    assert (period.ms, period.committed, period.records, period.bytes) == (10_000, 20, 20, 200)
    assert period.per_second(period.committed) == 2
    assert period.latency_ms(0.5) == pytest.approx(1.75)
    assert between(counter_sample(10_000, 5), counter_sample(20_000, 5)).latency_ms(0.5) is None


def test_a_term_counts_from_its_own_beginning() -> None:
    period = between(counter_sample(10_000, 500), counter_sample(24_000, 7, term=2, since_ms=20_000))
    assert (period.ms, period.committed) == (4_000, 7)
    assert between(None, counter_sample(5_000, 1, since_ms=9_000)).ms == 0, (
        "a clock that was set back makes no negative time"
    )


def test_an_hour_keeps_so_much_and_forgets_the_rest() -> None:
    hour = CounterHistory()
    last_ms = 3 * 3_600_000
    for at_ms in range(0, last_ms + 1, STEP_MS):
        hour.add(counter_sample(at_ms, at_ms // 1000))
    periods = list(hour.periods(last_ms))
    assert len(periods) == TALLIES_KEPT - 1
    assert {period.ms for period in periods} == {STEP_MS}
    assert periods[0].at_ms == last_ms - 3_600_000 + STEP_MS
    assert sum(period.committed for period in periods) == 3_600
    assert list(hour.periods(last_ms + 2 * 3_600_000)) == [], "a group that left long ago has no last hour here"


def test_a_clock_that_was_ahead_does_not_stop_the_hour() -> None:
    hour = CounterHistory()
    hour.add(counter_sample(10_000, 1))
    hour.add(counter_sample(90_000, 2))
    hour.add(counter_sample(20_000, 3, term=2, since_ms=15_000))
    hour.add(counter_sample(30_000, 5, term=2, since_ms=15_000))
    assert [period.at_ms for period in hour.periods(30_000)] == [10_000, 20_000, 30_000]


def test_the_last_minute_is_of_the_present_term() -> None:
    hour = CounterHistory()
    assert hour.last_minute(0) is None
    hour.add(counter_sample(5_000, 10))
    found = hour.last_minute(5_000)
    assert found is not None
    assert (found.ms, found.committed) == (5_000, 10)
    for at_ms in range(15_000, 200_000, STEP_MS):
        hour.add(counter_sample(at_ms, 10 + at_ms // 1000))
    found = hour.last_minute(195_000)
    assert found is not None
    assert (found.ms, found.committed) == (60_000, 60)
    assert hour.last_minute(300_000) is None, "it is led elsewhere by now"
    hour.add(counter_sample(310_000, 3, term=2, since_ms=308_000))
    found = hour.last_minute(310_000)
    assert found is not None
    assert (found.ms, found.committed) == (2_000, 3)


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_where_that_many_are(counts: list[int], quantile: float) -> None:
    bounds = (1.0, 2.0)
    found = quantile_of(counts, bounds, quantile)
    if not sum(counts):
        assert found is None
        return
    assert found is not None
    assert 0 <= found <= 2
    below = [sum(counts[: index + 1]) for index in range(3)]
    bucket = next(index for index, count in enumerate(below) if counts[index] and count >= quantile * sum(counts))
    assert (0 if bucket == 0 else min(bucket, 2)) <= found + 1e-9
    assert found <= min(bucket + 1, 2) + 1e-9


def test_a_leader_counts_what_it_commits() -> None:
    bench = Bench({ORDERS: 2})
    before = tally_of(bench.group, 1_000)
    assert (before.committed, before.aborted, sum(before.latencies)) == (0, 0, 0)
    commit(bench, bench.one(ORDERS, 0), bench.one(ORDERS, 1), bench.abort(bench.begin(ORDERS)))
    after = tally_of(bench.group, 2_000)
    assert (after.committed, after.aborted, after.records, after.bytes) == (2, 1, 2, 200)
    assert sum(after.latencies) == 2


def test_rounds_are_kept_and_only_so_many() -> None:
    bench = Bench({ORDERS: 1})
    bench.group.fold.now_ms = 4_000
    commit(bench, bench.one(ORDERS, 0), bench.abort(bench.begin(ORDERS)))
    [only] = bench.group.metrics.rounds
    assert (only.path, only.transactions, only.aborted, only.waited_ms) == (CommitPath.DIRECT, 2, 1, 1_000)
    assert {name: list(volume) for name, volume in only.volumes.items()} == {ORDERS: [1, 100]}
    for _ in range(ROUNDS_KEPT + 5):
        commit(bench, bench.abort(bench.begin(ORDERS)))
    assert len(bench.group.metrics.rounds) == ROUNDS_KEPT
    assert bench.group.metrics.rounds[-1].waited_ms == 0, "nobody has waited for a commit"


# What a leader shows


def shown(bench: Bench, now_ms: int = 5_000, known: LiveGroup | None = None, **more: Any) -> LiveGroup:
    """What the leader of a bench shows."""
    return live_group(bench.group, view_of(bench.group, now_ms, **more), known)


def test_the_oldest_and_the_largest_are_listed_and_the_rest_is_counted() -> None:
    bench = Bench({ORDERS: 1})
    ids: list[TransactionId] = []
    sizes: dict[TransactionId, int] = {}
    for number in range(3 * LISTED_MAX):
        bench.clock_ms = 1_000 + number
        ids.append(bench.begin(ORDERS))
        sizes[ids[-1]] = 1 + number * 7 % (3 * LISTED_MAX)
        bench.data(ids[-1], ORDERS, 0, size=sizes[ids[-1]])
    live = shown(bench)
    assert [item.id for item in live.listing.oldest] == [str(item) for item in ids[:LISTED_MAX]]
    largest = sorted(ids, key=lambda item: -sizes[item])[:LISTED_MAX]
    assert [item.id for item in live.listing.largest] == [str(item) for item in largest]
    found = led_group_document(LEAD, Overview(live=live), None)["transactions"]
    left = 3 * LISTED_MAX - len({*ids[:LISTED_MAX], *largest})
    assert (found["count"], found["not_listed"]) == (3 * LISTED_MAX, left)
    assert (len(found["oldest"]), len(found["largest"])) == (LISTED_MAX, LISTED_MAX)


def test_what_is_shown_does_not_change_when_the_leader_goes_on() -> None:
    bench = Bench({ORDERS: 1})
    one = bench.begin(ORDERS)
    live = shown(bench)
    before = json.dumps(led_group_document(LEAD, Overview(live=live), None))
    bench.data(one, ORDERS, 0)
    bench.begin(ORDERS)
    commit(bench, bench.one(ORDERS, 0))
    bench.scale(ORDERS, [0], [(0, 0.5), (0.5, 1)])
    assert json.dumps(led_group_document(LEAD, Overview(live=live), None)) == before


def test_very_many_transactions_are_listed_less_often() -> None:
    bench = Bench({ORDERS: 1})
    bench.begin(ORDERS)
    live = shown(bench, 5_000)
    assert live.listing.due_ms == 5_000
    many = Listing(5_000, 20_000, live.listing.oldest, live.listing.largest)
    assert many.due_ms == 9_000
    known = LiveGroup(**{name: getattr(live, name) for name in LiveGroup.__slots__} | {"listing": many})
    assert shown(bench, 8_999, known).listing is many
    assert shown(bench, 9_000, known).listing.count == 1


def test_what_clients_say_stays_text_and_is_bounded() -> None:
    bench = Bench({f"sales/s{number}": 1 for number in range(NAMED_MAX + 3)})
    bench.begin(*bench.group.streams, client="c")
    item = next(iter(bench.group.fold.open.values()))
    object.__setattr__(item.begin, "label", HOSTILE)
    [entry] = led_group_document(LEAD, Overview(live=shown(bench)), None)["transactions"]["oldest"]
    assert entry["label"] == HOSTILE
    assert (len(entry["streams"]), entry["more_streams"]) == (NAMED_MAX, 3)
    assert json.loads(json.dumps(entry)) == entry


def test_the_rates_of_a_stream_are_those_between_two_looks() -> None:
    bench = Bench({ORDERS: 1, AUDIT: 1})
    earlier = shown(bench, 5_000)
    commit(bench, bench.one(ORDERS, 0), bench.one(ORDERS, 0))
    later = shown(bench, 7_000)
    streams = {item["stream"]: item for item in led_group_document(LEAD, Overview(live=later), earlier)["streams"]}
    assert [streams[ORDERS][f"committed_{what}_per_s"] for what in ("records", "bytes")] == [1, 100]
    assert streams[AUDIT]["committed_records_per_s"] == 0
    unknown = led_group_document(LEAD, Overview(live=later), None)["streams"][0]
    assert unknown["committed_records_per_s"] is None
    bench.group.controller_epoch = 2
    assert documents.stream_rates(earlier, shown(bench, 9_000)) == {}, "another term counts anew"


def test_what_waits_and_what_is_in_error_is_shown() -> None:
    bench = Bench({ORDERS: 1, AUDIT: 1})
    bench.group.waits.held["request-1"] = Wait(3_000, 9_000, frozenset())
    bench.group.waits.faults._present[AUDIT] = StreamFault(
        "it may not be written", "TOPIC_AUTHORIZATION_FAILED", "t", 7
    )
    found = led_group_document(LEAD, Overview(live=shown(bench)), None)
    assert [(item["cause"], item["kind"], item["since_ms"], item["half_done"]) for item in found["waiting"]] == [
        ("error-state", "stream", 7, False),
        ("obstacles", "scale", 3_000, False),
    ]
    assert found["waiting_not_listed"] == 0
    faults = {item["stream"]: item["fault"] for item in found["streams"]}
    assert faults[ORDERS] is None
    assert faults[AUDIT]["code"] == "TOPIC_AUTHORIZATION_FAILED"
    assert (found["summary"]["streams_in_error"], found["summary"]["waiting_changes"]) == (1, 1)


def test_the_last_message_that_is_no_frame_is_shown_as_text() -> None:
    bench = Bench({ORDERS: 1})
    bench.begin(ORDERS)
    assert led_group_document(LEAD, Overview(live=shown(bench)), None)["foreign"] is None
    place = next(iter(bench.group.streams[ORDERS].partitions()))
    for offset, value in ((7, b"first"), (8, HOSTILE.encode() + b"\xff" + b"x" * 100)):
        bench.group.fold.fold(ORDERS, place, offset, 1_000 + offset, None, value)
    found = led_group_document(LEAD, Overview(live=shown(bench)), None)["foreign"]
    assert (found["messages"], found["topic"], found["partition"]) == (2, *place)
    assert (found["offset"], found["at_ms"], found["key"]) == (8, 1_008, None)
    assert found["value"].startswith(HOSTILE + "\N{REPLACEMENT CHARACTER}x")
    assert len(found["value"]) <= STRANGER_BYTES


def test_open_bytes_are_those_of_the_stream() -> None:
    bench = Bench({ORDERS: 1, AUDIT: 1})
    both = bench.begin(ORDERS, AUDIT)
    bench.data(both, ORDERS, 0, size=300)
    bench.data(both, AUDIT, 0, size=50)
    found = led_group_document(LEAD, Overview(live=shown(bench)), None)
    assert {item["stream"]: item["open_bytes"] for item in found["streams"]} == {ORDERS: 300, AUDIT: 50}


def test_the_picture_has_what_was_measured_of_active_segments() -> None:
    config = Bench({ORDERS: 2}).group.streams[ORDERS].config
    history = EpochHistory.create(even_ranges(2), 0)
    first, second = measured_places(config, history).items()
    before, last = Measure(1_000, {first[1]: 10}), Measure(3_000, {first[1]: 50, second[1]: 7}, {second[1]: 99})
    assert documents.segment_loads(config, history, (None, None)) == {}
    assert documents.segment_loads(config, history, (before, last)) == {
        first[0]: DrawnLoad(20.0, None),
        second[0]: DrawnLoad(None, 99),
    }


def test_lag_is_that_of_the_streams_that_there_are() -> None:
    bench = Bench({ORDERS: 1, AUDIT: 1})
    bench.begin(ORDERS)
    place = next(iter(bench.group.streams[ORDERS].partitions()))
    live = shown(bench, ends={place: 8, ("sales.gone.transaction-buffer", 0): 1_000})
    assert (live.lag, live.lag_ms) == (7, shown(bench).at_ms - bench.group.metrics.since_ms)
    silent = shown(bench, unheard_ms={place: 70_000})
    assert (silent.lag, silent.lag_ms, silent.streams[0].lag_ms) == (0, 70_000, 70_000)
    assert {
        item["stream"]: item["lag_messages"] for item in led_group_document(LEAD, Overview(live=live), None)["streams"]
    } == {
        ORDERS: 7,
        AUDIT: 0,
    }


def test_a_glance_has_the_same_fields_whether_or_not_anything_is_known() -> None:
    bench = Bench({ORDERS: 1})
    bench.begin(ORDERS, lease_ms=9_000)
    here = glance_document(Overview(live=shown(bench), minute=between(counter_sample(0), counter_sample(60_000, 60))))
    assert here.keys() == glance_document(None).keys()
    assert set(glance_document(None).values()) == {None}
    assert (here["open_transactions"], here["oldest_age_ms"], here["least_lease_left_ms"]) == (1, 4_000, 5_000)
    assert (here["commits_per_s"], here["bytes_per_s"]) == (1, 10)
    assert 1 < here["commit_latency_p50_ms"] < here["commit_latency_p99_ms"] < 2.5


def test_a_group_that_is_led_elsewhere_has_the_same_fields() -> None:
    bench = Bench({ORDERS: 1})
    bench.begin(ORDERS)
    here = led_group_document(LEAD, Overview(live=shown(bench)), None)
    record = TransactionRecord(
        id=TransactionId.of(0, 1),
        group=GroupName("sales"),
        state="open",
        client_name="c",
        label=HOSTILE,
        begun_ms=1_000,
        lease_ms=500,
        streams={ORDERS: 0},
        controller_epoch=1,
    )
    config = bench.group.streams[ORDERS].config
    elsewhere = led("two", page="http://two/")
    there = other_group_document(elsewhere, [StreamPicture(config)], 5, [record], 300, 2_000)
    assert there.keys() == here.keys()
    assert there["transactions"].keys() == here["transactions"].keys()
    assert there["streams"][0].keys() == here["streams"][0].keys()
    assert there["transactions"]["oldest"][0].keys() == here["transactions"]["oldest"][0].keys()
    assert (there["transactions"]["count"], there["transactions"]["not_listed"]) == (300, 299)
    assert there["transactions"]["oldest"][0]["lease_left_ms"] == -500
    assert (there["streams_not_listed"], there["page"]) == (4, "http://two/")


@pytest.mark.parametrize(
    ("lead", "fault"),
    [
        (led(), NO_LEADER),
        (led("two", 1_000), "coordinator two has been taking it over for 59 s"),
        (led("two", 55_000), None),
        (led("two", 1_000, is_serving=True), None),
    ],
)
def test_a_group_that_nobody_leads_is_in_error(lead: LeadView, fault: str | None) -> None:
    assert other_group_document(lead, [], 0, [], 0, 60_000)["fault"] == fault
    assert lead_document(lead, 60_000)["fault"] == fault


# Producers at gateways


AT_GATEWAY = f"{FIRST_PRODUCER_ID}.3"
"""Label of a transaction that a producer began through a gateway."""


def test_of_a_producer_at_a_gateway_its_transactional_id_is_told_and_who_serves_it() -> None:
    bench = Bench({ORDERS: 1})
    labels = {"flink@2f7": AT_GATEWAY, "lost": AT_GATEWAY, "importer": "nightly"}
    for client in labels:
        bench.begin(ORDERS, client=client)
    for item in bench.group.fold.open.values():
        object.__setattr__(item.begin, "label", labels[item.begin.client_name])
    plain = led_group_document(LEAD, Overview(live=shown(bench)), None)
    assert clients_at_gateways(plain) == ["flink@2f7", "lost"]
    found = with_origins(
        plain,
        {"flink@2f7": ProducerOrigin(HOSTILE, "gw-1"), "lost": ProducerOrigin(), "importer": ProducerOrigin("no")},
    )
    for name in ("oldest", "largest"):
        told = {
            item["client"]: (item["through_gateway"], item["transactional_id"], item["gateway"])
            for item in found["transactions"][name]
        }
        assert told == {
            "flink@2f7": (True, HOSTILE, "gw-1"),
            "lost": (True, None, ""),
            "importer": (False, None, None),
        }
    assert plain["transactions"]["oldest"][0]["transactional_id"] is None, "what is kept is not changed"
    assert json.loads(json.dumps(found)) == found


def test_what_is_told_of_a_gateway_is_bounded() -> None:
    said = GatewayRecord(name="gw", host="h" * 10_000, port=1, ports=((1, 2), (2, 3)), since_ms=7)
    shown_now = gateway_entry(GatewayRecord.from_json("gw", said.to_json()))
    assert len(json.dumps(shown_now)) < 1_000
    assert (shown_now["brokers"], shown_now["since_ms"], shown_now["release"]) == (2, 7, None)
    record = IdRecord.from_json(json.dumps({"id": "i" * 30_000, "timeout_ms": 1}).encode())
    assert len(record.transactional_id) < 300


def test_a_last_hour_is_json_without_what_is_no_number() -> None:
    found = last_hour_document(
        "sales/default", [between(counter_sample(0), counter_sample(10_000)), between(None, counter_sample(0))], 10_000
    )
    assert [point["at_ms"] for point in found["points"]] == [10_000], "a moment has no rate"
    assert found["points"][0]["commit_latency_p50_ms"] is None
    assert not any(isinstance(value, float) and math.isnan(value) for value in found["points"][0].values())


# A stream


def grown(epochs: int) -> tuple[StreamConfig, EpochHistory]:
    """A stream that was scaled so often: one segment becomes two, and two become one."""
    history = EpochHistory.create(even_ranges(1), 0)
    for number in range(epochs - 1):
        active = [item.id.number for item in history.active.segments]
        ranges = [(0.0, 0.5), (0.5, 1.0)] if number % 2 == 0 else [(0.0, 1.0)]
        history = history.with_records(history.plan_scale(active, ranges_of(ranges), 1_000 * number))
        history = history.with_sealed_ends(
            history.active.epoch, {item.id: 7 for item in history.ended_with(number + 1)}
        )
    return StreamConfig(
        name=StreamName.parse(ORDERS), group=GroupName("sales"), created_ms=0, buffer_topic_id=""
    ), history


def test_a_segment_has_the_rate_by_which_its_end_grows() -> None:
    config, history = grown(2)
    first, second = measured_places(config, history).values()
    before = Measure(1_000, {first: 10, second: 5}, {})
    last = Measure(3_000, {first: 30, second: 5}, {first: 4_096})
    found = stream_document(config, history, None, (before, last), 3_500)
    assert [item["offsets_per_s"] for item in found["segments"]] == [10, 0]
    assert [item["bytes"] for item in found["segments"]] == [4_096, None]
    assert [(item["low"], item["high"]) for item in found["segments"]] == [(0, 0.5), (0.5, 1)]
    assert (found["epoch"], found["measured_ms"], found["measure_fault"]) == (1, 3_000, None)
    assert [(item["epoch"], item["cause"]) for item in found["epochs"]] == [(1, "scale"), (0, "create")]
    assert offset_rate(None, last, first) is None
    assert offset_rate(last, last, first) is None
    assert offset_rate(before, Measure(4_000, {first: 2}), first) == 0, "a topic that was made anew begins at 0"
    assert offset_rate(before, Measure(4_000, {}), first) is None


def test_a_stream_that_was_not_measured_says_why() -> None:
    config, history = grown(1)
    found = stream_document(config, history, None, (None, Measure(5, fault="no broker answers")), 6)
    assert found["measure_fault"] == "no broker answers"
    assert [item["end_offset"] for item in found["segments"]] == [None]
    assert stream_document(config, history, None, (None, None), 6)["measured_ms"] is None


def test_of_many_epochs_the_newest_are_listed_and_drawn() -> None:
    config, history = grown(3 * EPOCHS_SHOWN)
    newest = newest_epochs(history)
    assert newest.records == history.records[-EPOCHS_SHOWN:]
    assert newest_epochs(newest).records == newest.records
    found = stream_document(config, history, None, (None, None), 6)
    assert len(found["epochs"]) == EPOCHS_SHOWN
    assert found["epochs_not_listed"] == 2 * EPOCHS_SHOWN
    drawn = lineage_svg(newest, ORDERS)
    assert drawn.count('class="box') == sum(len(newest.ended_with(item.epoch)) for item in newest.records) + len(
        newest.active.segments
    )


def test_wide_epochs_are_drawn_as_far_as_there_is_room() -> None:
    history = EpochHistory.create(even_ranges(600), 0)
    for number in range(3):
        active = [item.id.number for item in history.active.segments]
        history = history.with_records(history.plan_scale(active, even_ranges(600), number))
        history = history.with_sealed_ends(
            history.active.epoch, {item.id: 1 for item in history.ended_with(number + 1)}
        )
    assert len(newest_epochs(history).records) == 1
    assert len(newest_epochs(history).graph.nodes) <= DRAWN_MAX
    assert len(newest_epochs(EpochHistory.create(even_ranges(1_500), 0)).records) == 1


def test_ranges_are_cut_as_the_command_cuts_them() -> None:
    assert cut_evenly([KeyRange(0.5, 1), KeyRange(0, 0.5)], 4) == even_ranges(4)
    for ranges, count in (([], 2), ([KeyRange(0, 1)], 0), ([KeyRange(0, 0.25), KeyRange(0.5, 1)], 2)):
        with pytest.raises(Exception, match="nothing was written"):
            cut_evenly(ranges, count)
