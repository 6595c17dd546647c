"""Routes agree with the model's slow and obvious way from a key to its segment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridge.tests.routing_makers import CONFIG
from rollbridge.base.ids import Epoch, SegmentId
from rollbridge.client.writing import check_not_moved
from rollbridge.errors import InvalidRequestError
from rollbridge.stream.epochs import EpochCause, EpochHistory, EpochRecord
from rollbridge.stream.keyspace import KeyRange, even_ranges, key_hash, position_of_hash
from rollbridge.stream.names import GroupName
from rollbridge.stream.routing import Route, StreamView, hash_bounds
from rollbridge.stream.segment_graph import Segment

inner = st.floats(min_value=0.0, max_value=1.0, exclude_min=True, exclude_max=True)


def record_of(cuts: list[float]) -> EpochRecord:
    """An epoch with cuts at these positions; segment numbers do not follow the order of the ranges."""
    ends = [0.0, *sorted(set(cuts)), 1.0]
    ranges = [KeyRange(low, high) for low, high in pairwise(ends)]
    segments = tuple(Segment(SegmentId.of(len(ranges) - place, 0), item) for place, item in enumerate(ranges))
    return EpochRecord(Epoch(0), Epoch(0), segments, EpochCause.CREATE, 0)


@given(st.lists(inner, max_size=8), st.integers(0, (1 << 64) - 1))
@example([0.5], 1 << 63)
@example([0.5], (1 << 63) - 1)
@example([5e-324], 0)
@example([5e-324], 1 << 11)
@example([1 - 2**-53], (1 << 64) - 1)
@example([1 - 2**-53], ((1 << 53) - 1) << 11)
@example([1 - 2**-53], (((1 << 53) - 1) << 11) - 1)
def test_a_hash_finds_the_segment_that_the_model_finds(cuts: list[float], value: int) -> None:
    record = record_of(cuts)
    route = Route.of(CONFIG, record)
    number = route.numbers[bisect_right(route.bounds, value)]
    assert number == record.segment_at(position_of_hash(value)).id.number


@given(st.integers(1, 40), st.binary(max_size=20))
def test_a_key_finds_its_segment_in_a_new_stream(count: int, key: bytes) -> None:
    history = EpochHistory.create(even_ranges(count), 0)
    route = StreamView.of(CONFIG, history).route
    number = route.numbers[bisect_right(route.bounds, key_hash(key))]
    assert number == history.active.segment_at(position_of_hash(key_hash(key))).id.number


def test_one_segment_needs_no_bounds() -> None:
    assert hash_bounds([0.0]) == ()


def test_the_route_goes_through_the_reference_epoch_of_the_active_one() -> None:
    created = EpochHistory.create(even_ranges(2), 0)
    scaled = created.with_records(created.plan_scale([0], [KeyRange(0.0, 0.25), KeyRange(0.25, 0.5)], 1))
    rolled = scaled.with_records(*scaled.plan_rolling(0, 2))
    assert StreamView.of(CONFIG, created).route.epoch == 0
    assert StreamView.of(CONFIG, scaled).route.epoch == 1
    assert StreamView.of(CONFIG, rolled).route.epoch == 1


def test_a_route_carries_what_a_writer_needs() -> None:
    route = Route.of(CONFIG, EpochHistory.create(even_ranges(2), 0).active)
    assert (route.stream, route.group, route.buffer_topic) == (
        "sales/orders",
        GroupName("sales", "g"),
        "sales.orders.transaction-buffer",
    )
    assert (route.buffer_partitions, route.record_bytes_max, route.numbers) == (3, 777, (0, 1))


@pytest.mark.parametrize("left", [{"moves": 1}, {"moving_to": "audit"}])
def test_a_stream_that_was_moved_takes_no_transactions(left: Mapping[str, Any]) -> None:
    check_not_moved(CONFIG)
    with pytest.raises(InvalidRequestError, match=r"stream sales/orders was moved .* nothing was written"):
        check_not_moved(replace(CONFIG, **left))
