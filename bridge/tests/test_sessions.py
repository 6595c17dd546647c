"""When the record of a session may go, which epochs follow it, and what is over without a record."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.base.ids import TransactionId
from rollbridge.buffer.owners import CLIENTS_MAX, Fences
from rollbridge.errors import CorruptDataError
from rollbridge.metadata.client_sessions import (
    _PLAIN,
    DAY_MS,
    HOUR_MS,
    KEPT_MS,
    KEPT_OF_OTHERS_MS,
    RENEW_MS,
    ClientSession,
    CooperativeState,
    CooperativeWork,
    SharedSession,
    floor_of,
    highest_floor,
    is_damaged,
    may_go,
    next_session,
    read_session,
)
from rollbridge.stream.config import MINUTE_MS

NOW_MS = 20_000 * DAY_MS
OWN = ClientSession("c", (NOW_MS - 2 * DAY_MS) // MINUTE_MS, NOW_MS - 2 * DAY_MS, renews=True)
OTHER = replace(OWN, renews=False)
WORK = CooperativeWork(
    series="q", number=1, transaction=TransactionId.of(0, 1), epoch=7, streams={"s/t": 0}, lease_ms=1
)
JOINT = replace(OWN, renews=False, shared=SharedSession("run", (), WORK))
LOADER = JOINT.with_work(replace(WORK, series="day-1", state=CooperativeState.COMMITTED), OWN.registered_ms)
SERIES = LOADER.with_work(replace(WORK, series="day-2"), OWN.registered_ms)
OLD_MS = NOW_MS - KEPT_OF_OTHERS_MS - 1


@pytest.mark.parametrize(
    ("session", "written_ms", "goes"),
    [
        (OWN, OWN.registered_ms, True),
        (OWN, NOW_MS - KEPT_MS, False),
        (OWN, NOW_MS - KEPT_MS - 1, True),
        (replace(OWN, registered_ms=NOW_MS - HOUR_MS), OWN.registered_ms, False),
        (replace(OWN, epoch=(NOW_MS - KEPT_MS) // MINUTE_MS), OWN.registered_ms, True),
        (replace(OWN, epoch=(NOW_MS - KEPT_MS) // MINUTE_MS + 1), OWN.registered_ms, False),
        (OTHER, 0, False),
        (replace(OTHER, registered_ms=NOW_MS - KEPT_OF_OTHERS_MS), 0, False),
        (replace(OTHER, registered_ms=NOW_MS - KEPT_OF_OTHERS_MS - 1), NOW_MS, True),
        (replace(OWN, shared=SharedSession("")), OWN.registered_ms, False),
        (JOINT, OWN.registered_ms, False),
        (replace(JOINT, registered_ms=NOW_MS - KEPT_OF_OTHERS_MS), 0, False),
        (replace(JOINT, registered_ms=OLD_MS), 0, True),
        (replace(SERIES, registered_ms=0), 0, False),
    ],
)
def test_a_record_goes_when_nobody_can_need_it(session: ClientSession, written_ms: int, goes: bool) -> None:
    assert may_go(session, written_ms, NOW_MS) is goes


@given(
    st.from_regex(r"[A-Za-z0-9._:@-]{1,128}", fullmatch=True),
    st.integers(0, (1 << 31) - 1),
    st.integers(0, 1 << 50),
    st.booleans(),
    st.sampled_from([None, SharedSession("run"), JOINT.shared]),
)
def test_a_record_is_read_as_the_mapper_reads_it(
    name: str, epoch: int, registered_ms: int, renews: bool, shared: SharedSession | None
) -> None:
    session = ClientSession(name, epoch, registered_ms, shared, renews)
    assert read_session(session.to_json()) == session


def test_the_usual_record_is_read_without_the_mapper() -> None:
    assert _PLAIN.fullmatch(OWN.to_json())
    assert _PLAIN.fullmatch(OTHER.to_json())
    assert not _PLAIN.fullmatch(JOINT.to_json())


@pytest.mark.parametrize("raw", [b"{", b"{}", OWN.to_json()[:-1], OWN.to_json() + b"x", b""])
def test_a_damaged_record_is_an_error(raw: bytes) -> None:
    with pytest.raises(CorruptDataError):
        read_session(raw)


def test_a_client_looks_at_its_record_long_before_that_may_go() -> None:
    assert RENEW_MS * 2 <= KEPT_MS


@given(
    st.integers(0, 1 << 31),
    st.integers(0, (1 << 31) - 2),
    st.none() | st.integers(0, (1 << 31) - 2),
    st.booleans(),
)
def test_an_epoch_is_above_the_floor_and_the_one_before_whatever_the_clock_says(
    minutes: int, floor: int, before: int | None, shared: bool
) -> None:
    known = None if before is None else ClientSession("c", before, 0)
    found = next_session(known, "c", "run" if shared else "", minutes * MINUTE_MS, floor)
    assert found.epoch > floor
    assert before is None or found.epoch > before
    assert found.epoch >= minutes
    assert found.renews is not shared


@given(st.integers(0, 1 << 45), st.integers(-14, 14))
def test_releases_that_do_not_know_the_floor_begin_above_it_with_a_clock_of_another_time_zone(
    now_ms: int, hours: int
) -> None:
    theirs = next_session(None, "c", "", max(now_ms + hours * HOUR_MS, 0), 0)
    assert theirs.epoch > highest_floor(now_ms) or now_ms < 2 * DAY_MS


@pytest.mark.parametrize(
    ("raw", "floor", "damaged"),
    [(b"", 0, False), (b"0", 0, False), (b"29400000", 29_400_000, False), (b"-1", 0, True), (b"x", 0, True)],
)
def test_a_floor_that_cannot_be_read_is_none(raw: bytes, floor: int, damaged: bool) -> None:
    assert (floor_of(raw), is_damaged(raw)) == (floor, damaged)


@pytest.mark.parametrize(
    ("known", "floor", "epoch", "over"),
    [
        (None, 0, 5, False),
        (None, 4, 5, False),
        (None, 5, 5, True),
        (None, 9, 0, False),  # no name was given
        (5, 9, 5, False),  # on record
        (5, 0, 4, True),
        (5, 9, 6, False),
    ],
)
def test_below_the_floor_a_session_counts_only_if_it_is_known(
    known: int | None, floor: int, epoch: int, over: bool
) -> None:
    fences = Fences()
    if known is not None:
        fences.raise_to("c", known)
    fences.raise_floor(floor)
    assert fences.holds_off(("c", epoch)) is over
    assert fences.refuses(("c", epoch)) is over
    fences.replaying = True
    assert not fences.refuses(("c", epoch)), "it may have been begun before"
    fences.hear_of(("c", epoch))
    assert fences.holds_off(("c", epoch)) is over, "what it says of itself makes it no better"


def test_what_a_standby_has_heard_of_is_over_if_the_leader_says_so() -> None:
    tail, leader = Fences(), Fences()
    for client, epoch in (("gone", 5), ("newer", 7), ("known", 5)):
        tail.hear_of((client, epoch))
    leader.raise_to("known", 6)
    leader.raise_floor(6)
    leader.learn(tail)
    assert leader.holds_off(("gone", 5))
    assert not leader.holds_off(("newer", 7))
    assert leader.holds_off(("known", 5))


def test_only_those_are_counted_that_nobody_has_put_on_record() -> None:
    fences = Fences()
    for number in range(CLIENTS_MAX):
        fences.hear_of((f"c{number}", 3))
    assert not fences.has_room_for("another")
    assert fences.has_room_for("c0")
    strangers = fences.strangers(f"c{number}" for number in range(10))
    assert len(strangers) == CLIENTS_MAX - 10
    assert fences.has_room_for("another")
    fences.hear_of(("late", 3))
    fences.raise_to("c11", 3)
    fences.raise_floor(3)
    fences.forget_strangers(strangers, {"c10"})
    assert [fences.knows(name) for name in ("c0", "c10", "c11", "c12", "late")] == [True, True, True, False, True]
    assert fences.holds_off(("c12", 3))
    assert not fences.holds_off(("late", 3)), "it may be on record by now"
