"""A stream that exists is what was asked for, or the error names each difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollbridge.client.admin import _obeyed
from rollbridge.errors import InvalidRequestError
from rollbridge.model.keyspace import even_ranges
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.records import FOREVER, HeaderForm, RecordTimes, Retention, StreamConfig
from rollbridge.model.scaling import ScalingPolicy
from rollbridge.model.wanted import WantedStream

KNOWN = StreamConfig(
    name=StreamName("sales", "orders"),
    group=GroupName("sales", "eu"),
    buffer_partitions=2,
    replication_factor=3,
    record_bytes_max=5_000,
    created_ms=0,
    buffer_topic_id="b",
    retention=Retention(1_000, 2_000, ("audit", "billing")),
    headers=HeaderForm.EACH,
    partitioner="murmur2",
)
FIRST = tuple(even_ranges(2))
SAME = WantedStream(
    group="eu",
    ranges=FIRST,
    buffer_partitions=2,
    replication_factor=3,
    record_bytes_max=5_000,
    headers=HeaderForm.EACH,
    retention=Retention(1_000, 2_000, ("billing", "audit")),
    partitioner="murmur2",
)


def test_what_is_the_same_or_not_said_is_no_difference() -> None:
    assert SAME.differences(KNOWN, FIRST) == []
    assert WantedStream().differences(KNOWN, FIRST) == []
    assert replace(SAME, ranges=tuple(even_ranges(7))).differences(KNOWN, None) == [], "its first epoch is forgotten"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"group": "us"}, "group: it is eu, and us was asked for"),
        ({"buffer_partitions": 1}, "buffer partitions: it is 2, and 1 was asked for"),
        ({"replication_factor": -1}, "replication factor: it is 3, and the broker's default was asked for"),
        ({"record_bytes_max": 7}, "largest record: it is 5000, and 7 was asked for"),
        ({"headers": HeaderForm.FIRST}, "headers: it is each, and first was asked for"),
        ({"timestamps": RecordTimes.COMMIT}, "timestamps: it is writer, and commit was asked for"),
        ({"partitioner": "fnv1a"}, "partitioner: it is murmur2, and fnv1a was asked for"),
        (
            {"scaling": ScalingPolicy(events_per_second=100)},
            "scaling: it is by request only, and at 100 events/s a segment, from 1 to 32 segments was asked for",
        ),
        ({"retention": Retention(5)}, "retention time: it is 1000 ms, and 5 ms was asked for"),
        ({"retention": Retention(FOREVER, 5)}, "retention size: it is 2000 bytes, and 5 bytes was asked for"),
        (
            {"retention": Retention(groups=("audit",))},
            "retention groups: they are audit, billing, and audit was asked for",
        ),
        (
            {"ranges": tuple(even_ranges(1))},
            "segments: it began with 2 ([0, 0.5), [0.5, 1)), and 1 ([0, 1)) were asked for",
        ),
    ],
)
def test_each_difference_is_named(other: dict[str, object], said: str) -> None:
    assert replace(SAME, **other).differences(KNOWN, FIRST) == [said]  # type: ignore[arg-type]


def test_what_an_earlier_coordinator_has_passed_over_is_an_error() -> None:
    policy = ScalingPolicy(events_per_second=100)
    for asked, config in (
        ((None, None), KNOWN),
        ((None, "writer"), KNOWN),
        ((policy, RecordTimes.COMMIT), replace(KNOWN, scaling=policy, timestamps=RecordTimes.COMMIT)),
    ):
        assert _obeyed(config, *asked) is config
    with pytest.raises(InvalidRequestError, match=r"does not know --timestamps commit: .*upgrade the coordinators"):
        _obeyed(KNOWN, None, "commit")
    with pytest.raises(InvalidRequestError, match="does not scale by load and does not know --timestamps commit"):
        _obeyed(KNOWN, policy, "commit")


def test_all_differences_are_named_at_once() -> None:
    other = replace(SAME, group="us", headers=HeaderForm.FIRST, ranges=tuple(even_ranges(9)))
    assert len(other.differences(KNOWN, FIRST)) == 3
