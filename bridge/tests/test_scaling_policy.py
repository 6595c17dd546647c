"""Scaling policies: what makes sense, how they are stored, given on the command line, shown, and what doctor says."""

from __future__ import annotations

from dataclasses import replace

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.doctor_makers import GOOD
from rollbridge.base.errors import InvalidRequestError
from rollbridge.cli.stream import description_text, history_table, scaling_document, scaling_text, take_policy
from rollbridge.client.admin import StreamDescription
from rollbridge.doctor.checks import find
from rollbridge.metadata.requests import WaitCause, WaitKind, WaitRow
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.scaling import FIXED, ScalingPolicy, ScalingWait

ORDERS = StreamName("sales", "orders")
POLICY = ScalingPolicy(events_per_second=200, min_segments=2, max_segments=8)
CONFIG = StreamConfig(name=ORDERS, group=GroupName("sales"), created_ms=0, buffer_topic_id="x")
REASON = "segment 0: 1,240 events/s over 2 min, above 5 times the target of 200"


@pytest.mark.parametrize("policy", [FIXED, POLICY, ScalingPolicy(bytes_per_second=1), replace(POLICY, max_segments=2)])
def test_what_makes_sense(policy: ScalingPolicy) -> None:
    policy.check()


@pytest.mark.parametrize(
    ("policy", "faults"),
    [
        (ScalingPolicy(min_segments=2), ["give one of"]),
        (ScalingPolicy(events_per_second=1, bytes_per_second=1), ["give one of"]),
        (ScalingPolicy(events_per_second=-1), ["events_per_second is from 1"]),
        (ScalingPolicy(bytes_per_second=10**13), ["bytes_per_second is from 1"]),
        (ScalingPolicy(events_per_second=1, min_segments=0), ["min_segments is from 1"]),
        (ScalingPolicy(events_per_second=1, max_segments=10_001), ["max_segments is from 1"]),
        (ScalingPolicy(events_per_second=1, min_segments=9, max_segments=3), ["min_segments, 9, is above"]),
        (
            ScalingPolicy(events_per_second=-1, bytes_per_second=-1, min_segments=-1, max_segments=-2),
            [
                "events_per_second is",
                "bytes_per_second is",
                "give one",
                "min_segments is",
                "max_segments is",
                "is above",
            ],
        ),
    ],
)
def test_all_faults_of_what_makes_none_are_named(policy: ScalingPolicy, faults: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as told:
        policy.check()
    assert all(fault in str(told.value) for fault in faults), told.value
    assert str(told.value).endswith("; nothing was written")


@given(st.integers(1, 10**12), st.booleans(), st.integers(1, 100), st.integers(0, 100))
def test_a_policy_is_stored_with_its_stream(rate: int, by_bytes: bool, least: int, more: int) -> None:
    name = "bytes_per_second" if by_bytes else "events_per_second"
    policy = ScalingPolicy(**{name: rate}, min_segments=least, max_segments=least + more)
    policy.check()
    config = replace(CONFIG, scaling=policy)
    assert StreamConfig.from_json(config.to_json()) == config
    assert (policy.target, policy.unit) == (rate, name.partition("_")[0])


def test_a_stream_without_a_policy_is_stored_as_before() -> None:
    assert b"scaling" not in CONFIG.to_json()


def test_options_change_what_they_name() -> None:
    assert take_policy({}, POLICY) is None
    assert take_policy({"max_segments": 9}, POLICY) == replace(POLICY, max_segments=9)
    assert take_policy({"scale_events_per_second": 300}, POLICY) == replace(POLICY, events_per_second=300)
    by_bytes = take_policy({"scale_bytes_per_second": 5_000}, POLICY)
    assert by_bytes == replace(POLICY, events_per_second=0, bytes_per_second=5_000)
    assert take_policy({"scale_events_per_second": 7, "min_segments": 2}) == ScalingPolicy(
        events_per_second=7, min_segments=2
    )
    with pytest.raises(click.UsageError, match="go with a rate"):
        take_policy({"min_segments": 1})
    both = take_policy({"scale_events_per_second": 7, "scale_bytes_per_second": 7})
    assert both is not None
    with pytest.raises(InvalidRequestError, match="give one of"):
        both.check()


def test_a_policy_and_what_it_waits_for_are_shown() -> None:
    assert scaling_text(POLICY) == "at 200 events/s a segment, from 2 to 8 segments"
    assert scaling_text(None) == scaling_text(FIXED) == "by request only"
    assert scaling_document(None) is None
    assert scaling_document(POLICY) == {
        "events_per_second": 200,
        "bytes_per_second": None,
        "min_segments": 2,
        "max_segments": 8,
    }
    history = EpochHistory.create(even_ranges(1), 0)
    found = StreamDescription(
        config=replace(CONFIG, scaling=POLICY),
        active=history.active,
        reference_epoch=0,
        epochs=1,
        first_epoch=0,
        leader="one",
        open_transactions=(),
    )
    why = f"{REASON}; waits: clocks differ"
    row = WaitRow(WaitCause.SCALING, WaitKind.STREAM, str(ORDERS), (str(ORDERS),), 1, 0, (why,))
    text = description_text(found, [row])
    assert "scaled   at 200 events/s a segment" in text
    assert f"WAITS    since 1970-01-01 00:00:00Z stream {ORDERS} (scaling): {why}" in text


def test_the_history_says_why_a_stream_was_scaled_by_its_load() -> None:
    history = EpochHistory.create(even_ranges(1), 0)
    history = history.with_records(history.plan_scale([0], even_ranges(2), 0))
    assert "load" not in history_table(history)
    history = history.with_records(history.plan_scale([1, 2], even_ranges(1), 0, REASON))
    text = history_table(history)
    assert "scale, by load" in text
    assert text.endswith(f"Scaled by load:\nepoch 2: {REASON}")


def test_doctor_names_streams_that_wait_for_long_and_still_have_a_policy() -> None:
    stream = GOOD.streams[0]
    name = stream.config.name
    waits = (ScalingWait(name, REASON, GOOD.now_ms - 3_600_000),)

    def found(wait: tuple[ScalingWait, ...], policy: ScalingPolicy | None) -> list[str]:
        followed = replace(stream, config=replace(stream.config, scaling=policy))
        facts = replace(
            GOOD,
            groups=[replace(GOOD.groups[0], scaling_waits=wait)],
            streams=[followed, *GOOD.streams[1:]],
        )
        return [item.what for item in find(facts) if item.check == "scaling-waits"]

    assert found(waits, POLICY) == [f"stream {name} waits to be scaled by its load since 60 min: {REASON}"]
    assert not found(waits, None)
    assert not found((replace(waits[0], since_ms=GOOD.now_ms - 60_000),), POLICY)
