"""What time it is for sure, by several clocks."""

from __future__ import annotations

from itertools import product

from rollbridge_coordinator.state.succession import SPREAD_MAX_MS, Times

HOUR_MS = 3_600_000
NOW_MS = 1_000 * HOUR_MS
OFFSETS_MS = (-24 * HOUR_MS, -1_000, 0, 1_000, 24 * HOUR_MS)


def times_of(own_ms: int, zookeeper_ms: int, broker_ms: int | None = None) -> Times:
    times = Times()
    times.witness(own_ms - 2, zookeeper_ms, own_ms)
    if broker_ms is not None:
        times.witness_append(broker_ms, own_ms)
    return times


def test_between_two_terms_nothing_seems_older_than_by_the_clock_that_both_can_trust() -> None:
    for first, second, other, third in product(OFFSETS_MS, repeat=4):
        for own in ((first, 0), (second, 0)), ((0, other), (0, third)):
            (noting, noting_zookeeper), (deleting, deleting_zookeeper) = own
            noted_ms = times_of(NOW_MS + noting, NOW_MS + noting_zookeeper).latest(NOW_MS + noting)
            later_ms = NOW_MS + HOUR_MS
            judging = times_of(later_ms + deleting, later_ms + deleting_zookeeper)
            assert judging.earliest(later_ms + deleting) - noted_ms <= HOUR_MS


def test_a_lease_ends_in_time_if_one_clock_is_wrong_and_never_early() -> None:
    for wrong, place in product(OFFSETS_MS, range(3)):
        own, zookeeper, broker = (NOW_MS + (wrong if place == number else 0) for number in range(3))
        times = times_of(own, zookeeper, min(broker, NOW_MS))  # a frame that was just read is not from the future
        assert NOW_MS - 2 <= times.lease(own) <= NOW_MS


def test_clocks_that_differ_by_more_than_the_bound_are_not_believed() -> None:
    assert not times_of(NOW_MS, NOW_MS + SPREAD_MAX_MS // 2).differ
    assert times_of(NOW_MS, NOW_MS + SPREAD_MAX_MS + 1).differ
    assert times_of(NOW_MS, NOW_MS - SPREAD_MAX_MS - 1).differ
    assert times_of(NOW_MS, NOW_MS, NOW_MS + SPREAD_MAX_MS + 1).differ
    assert not times_of(NOW_MS, NOW_MS, NOW_MS - 24 * HOUR_MS).differ, "what is read may be old"
    stood_still = times_of(NOW_MS, NOW_MS)
    stood_still.witness_wall(NOW_MS + HOUR_MS, NOW_MS)
    assert stood_still.differ
    assert stood_still.latest(NOW_MS) == NOW_MS + HOUR_MS
