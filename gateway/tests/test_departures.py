"""Gateways that are gone: who is told, when, and that it is told once."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollbridge_gateway.server.cluster import KNOWN_S, MISSED_S, Departures, Gateway, ToldDepartures, chosen

GATEWAYS = tuple(Gateway(f"gateway-{number}", f"g{number}", 9192) for number in range(4))
NAMES = st.text(max_size=20)
SOME = st.sets(st.integers(0, 3), min_size=1)


def live(numbers: set[int]) -> tuple[Gateway, ...]:
    return tuple(GATEWAYS[number] for number in sorted(numbers))


@given(NAMES, st.lists(st.tuples(SOME, st.floats(0.1, MISSED_S)), min_size=1, max_size=8), st.integers(0, 8))
def test_brokers_are_hidden_once_from_whose_gateway_has_gone_since_it_connected(
    key: str, changes: list[tuple[set[int], float]], connects: int
) -> None:
    departures, now_s = Departures(), 0.0
    present = GATEWAYS
    told = ToldDepartures(0.0) if connects == 0 else None
    owed: list[tuple[float, Gateway]] = []
    for number, (numbers, after_s) in enumerate(changes, 1):
        now_s += after_s
        former, present = present, live(numbers)
        departures.changed(former, present, now_s)
        owed = [item for item in owed if item[1] not in present]
        if chosen(key, former) not in present and told is not None:
            owed.append((now_s, chosen(key, former)))
        if number == connects:
            told = ToldDepartures(now_s)
    if told is None:
        return
    expected = any(at_s > now_s - MISSED_S for at_s, _ in owed)
    assert told.hides_brokers(departures.recent(now_s), key, now_s) == expected
    assert not told.hides_brokers(departures.recent(now_s), key, now_s), "it is told once"


@given(NAMES, SOME, SOME)
def test_who_joins_or_stays_hides_nothing(key: str, before: set[int], joined: set[int]) -> None:
    departures, told = Departures(), ToldDepartures(0.0)
    told.hides_coordinator(departures.recent(0.5))
    departures.changed((), live(before), 1.0)
    departures.changed(live(before), live(before | joined), 2.0)
    departures.changed(live(before | joined), live(before | joined), 3.0)
    assert not told.hides_brokers(departures.recent(4.0), key, 4.0)
    assert not told.hides_coordinator(departures.recent(4.0))


@given(NAMES, SOME, st.floats(0, MISSED_S - 1))
def test_a_gateway_that_has_come_back_hides_no_brokers(key: str, others: set[int], after_s: float) -> None:
    """Its clients are connected to it again, and would close what they are using."""
    departures, told = Departures(), ToldDepartures(0.0)
    home = chosen(key, GATEWAYS)
    left = [item for item in live(others) if item != home]
    departures.changed(GATEWAYS, left, 1.0)
    departures.changed(left, [*left, home], 1.0 + after_s)
    assert not told.hides_brokers(departures.recent(2.0 + after_s), key, 2.0 + after_s)


def test_a_connection_from_before_hides_a_coordinator_once_after_each_departure() -> None:
    departures, before = Departures(), ToldDepartures(0.0)
    assert not before.hides_coordinator(departures.recent(1.0))
    departures.changed(live({0, 1, 2}), live({0, 1}), 2.0)
    back, later = ToldDepartures(2.0 + MISSED_S / 2), ToldDepartures(2.0 + MISSED_S)
    for now_s in (2.0 + MISSED_S, 1.0 + KNOWN_S):
        asked = [told.hides_coordinator(departures.recent(now_s)) for told in (before, back, later) for _ in range(3)]
        assert asked == [now_s < KNOWN_S, False, False] * 2 + [False] * 3
    departures.changed(live({0, 1}), live({0}), 2.0 + KNOWN_S)
    now_s = 2.5 + KNOWN_S
    assert all(told.hides_coordinator(departures.recent(now_s)) for told in (before, back, later))
    assert not any(told.hides_coordinator(departures.recent(now_s)) for told in (before, back, later))
    assert not ToldDepartures(0.0).hides_coordinator(departures.recent(3.0 + 2 * KNOWN_S)), "it is long forgotten"


def test_a_gateway_that_has_just_begun_hides_nothing() -> None:
    departures, told = Departures(), ToldDepartures(11.0)
    departures.changed((), live({0, 1}), 10.0)
    assert not told.hides_brokers(departures.recent(12.0), "anybody", 12.0)
    assert not told.hides_coordinator(departures.recent(12.0))


def test_a_gateway_at_another_address_is_gone() -> None:
    departures, moved = Departures(), replace(GATEWAYS[0], host="elsewhere")
    departures.changed(GATEWAYS[:1], [moved], 1.0)
    assert [item.has_left("anybody") for item in departures.recent(1.0)] == [True]
    assert not list(departures.recent(1.0 + KNOWN_S + 1))


def test_a_gateway_that_is_started_again_under_another_name_hides_nothing() -> None:
    """By default it is named after its process; who has come back to its address is connected to it."""
    departures, told = Departures(), ToldDepartures(0.0)
    again = replace(GATEWAYS[0], name="gateway-4711")
    departures.changed(GATEWAYS, [*GATEWAYS, again], 1.0)
    departures.changed([*GATEWAYS, again], [again, *GATEWAYS[1:]], 2.0)
    assert not any(told.hides_brokers(departures.recent(3.0), key, 3.0) for key in map(str, range(100)))
    assert not told.hides_coordinator(departures.recent(3.0))


def test_a_departure_that_was_told_is_not_told_with_the_next_one() -> None:
    """The next one is of a gateway to which the client did not belong."""
    key = next(name for name in map(str, range(1_000)) if chosen(name, GATEWAYS) == GATEWAYS[3])
    departures, told = Departures(), ToldDepartures(0.0)
    departures.changed(GATEWAYS, GATEWAYS[:3], 1.0)
    assert told.hides_brokers(departures.recent(2.0), key, 2.0)
    mine = chosen(key, GATEWAYS[:3])
    other = next(item for item in GATEWAYS[:3] if item != mine)
    departures.changed(GATEWAYS[:3], [item for item in GATEWAYS[:3] if item != other], 3.0)
    assert not told.hides_brokers(departures.recent(4.0), key, 4.0)


def test_what_nobody_asks_for_is_forgotten() -> None:
    departures = Departures()
    for number in range(1_000):
        departures.changed(live({0, 1}), live({0}), float(number))
        departures.changed(live({0}), live({0, 1}), float(number))
    assert len(departures._known) <= KNOWN_S + 2
