"""The search for sessions that nobody needs: in small pieces, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.tests.makers import GROUP
from coordinator.tests.outcome_makers import ORDERS, House
from coordinator.tests.sim_forgetting import DEFECTS, Group, Wrong
from rollbridge.base.effects import AnyEffect, run
from rollbridge.base.ids import TransactionId
from rollbridge.commitlog.outcomes import Terminated
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import DAY_MS, HOUR_MS, KEPT_MS, ClientSession, highest_floor
from rollbridge.stream.config import MINUTE_MS
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.commit.outcome_store import OutcomeStore
from rollbridge_coordinator.core.effects import ReadDated, Write
from rollbridge_coordinator.core.state import READ_AT_ONCE, SearchStage
from rollbridge_coordinator.daemon.succession import SPREAD_MAX_MS
from rollbridge_coordinator.history import sessions
from rollbridge_coordinator.history.sessions import CHECK_MS, forget_sessions, load_sessions

NOW_MS = 20_000 * DAY_MS
PARENT = paths.sessions(GROUP)


@pytest.fixture
def house() -> House:
    found = House()
    found.do(load_sessions(found.group))
    found.group.fold.fences.caught_up()
    return found


def put(house: House, *names: str, age_ms: int = 2 * DAY_MS, **changes: object) -> None:
    house.world.clock_ms = NOW_MS - age_ms
    for name in names:
        record = ClientSession(name, house.world.clock_ms // MINUTE_MS, house.world.clock_ms, renews=True)
        path = paths.session(GROUP, name)
        house.world.ensure(path)
        house.world.nodes[path] = replace(record, **changes).to_json()  # type: ignore[arg-type]
    house.world.clock_ms = NOW_MS


def left(house: House) -> list[str]:
    return house.world.children(PARENT)


def test_what_is_used_up_goes_and_the_floor_says_how_far(house: House) -> None:
    put(house, "old", "older", age_ms=3 * DAY_MS)
    put(house, "young", age_ms=KEPT_MS - 1)
    house.search(NOW_MS)
    assert left(house) == ["young"]
    fences = house.group.fold.fences
    assert int(house.world.nodes[PARENT]) == fences.floor == (NOW_MS - 3 * DAY_MS) // MINUTE_MS
    assert fences.holds_off(("old", fences.floor))
    assert not fences.knows("old")
    assert fences.knows("young"), "whatever the floor will be"
    assert house.group.counts["sessions_forgotten"] == 2
    assert house.group.sessions.count == 1


def test_what_a_later_leader_has_not_heard_of_is_over_as_well(house: House) -> None:
    put(house, "old")
    house.search(NOW_MS)
    later = House()
    later.world = house.world
    later.do(load_sessions(later.group))
    assert later.group.fold.fences.holds_off(("old", (NOW_MS - 2 * DAY_MS) // MINUTE_MS))


def test_a_floor_that_is_damaged_is_the_highest_that_there_may_be(house: House) -> None:
    put(house, "known")
    house.world.nodes[PARENT] = b"garbage"
    house.do(load_sessions(house.group))
    fences = house.group.fold.fences
    assert fences.floor == highest_floor(NOW_MS)
    assert not fences.holds_off(("known", (NOW_MS - 2 * DAY_MS) // MINUTE_MS)), "it is on record"
    house.search(NOW_MS)
    assert int(house.world.nodes[PARENT]) == highest_floor(NOW_MS), "and it is set right"


def test_a_client_with_something_open_or_remembered_stays(house: House) -> None:
    put(house, "busy", "known", "done")
    house.bench.begin(ORDERS, client="busy")
    outcome_store = house.group.outcome_store = OutcomeStore(10, 72, 1_000)
    outcome_store.adopt(
        outcome_store.flush([("known", Terminated(TransactionId.of(0, 1), True, 0, 0, NOW_MS - DAY_MS))])
    )
    house.search(NOW_MS)
    assert left(house) == ["busy", "known"]
    draft = outcome_store.expire(NOW_MS + 72 * 3_600_000)
    assert draft is not None
    outcome_store.adopt(draft)
    house.search(NOW_MS + 4 * DAY_MS)
    assert left(house) == ["busy"]


def test_nothing_goes_before_the_buffers_are_read(house: House) -> None:
    put(house, "old")
    house.world.produce(StreamName.parse(ORDERS).buffer_topic(), None)
    for _ in range(10):
        house.do(forget_sessions(house.group, NOW_MS))
    assert left(house) == ["old"]
    assert house.group.sessions.stage is SearchStage.LEARN
    house.group.fold.positions[StreamName.parse(ORDERS).buffer_topic(), 0] = 1
    house.search(NOW_MS)
    assert left(house) == []


def test_nothing_goes_while_clocks_differ(house: House) -> None:
    put(house, "old")
    house.group.times.witness(0, SPREAD_MAX_MS + 1, 0)
    for _ in range(10):
        house.do(forget_sessions(house.group, NOW_MS))
    assert left(house) == ["old"]


@pytest.mark.parametrize("change", ["renewed", "taken over", "gone"])
def test_who_has_looked_at_a_record_in_between_keeps_it(house: House, change: str) -> None:
    put(house, "old", "other")
    path = paths.session(GROUP, "old")

    def in_between() -> None:
        if change == "gone":
            del house.world.nodes[path]
        else:
            record = ClientSession.from_json(house.world.nodes[path])
            epoch = record.epoch + (change == "taken over")
            house.world.nodes[path] = replace(record, epoch=epoch, registered_ms=NOW_MS).to_json()

    drive(house, in_between)
    assert left(house) == (["other"] if change == "gone" else ["old", "other"])
    house.search(NOW_MS + CHECK_MS)
    assert left(house) == ([] if change == "gone" else ["old"]), "the others go with the next search"


def drive(house: House, before_delete: Callable[[], None]) -> None:
    """Search, with something that happens after the records to be deleted were read for the last time."""

    def answer(effect: AnyEffect) -> object:
        if isinstance(effect, Write) and house.group.sessions.stage is SearchStage.DELETE:
            before_delete()
        return house.world.execute(effect, 1)

    run(forget_sessions(house.group, NOW_MS), answer)
    while house.group.sessions.stage is not SearchStage.REST:
        run(forget_sessions(house.group, NOW_MS), answer)


def test_each_turn_does_a_little_however_many_there_are(house: House) -> None:
    put(house, *(f"client-{number}" for number in range(10 * READ_AT_ONCE)))
    turns = reads = writes = 0

    def answer(effect: AnyEffect) -> object:
        nonlocal reads, writes
        reads += len(effect.paths) if isinstance(effect, ReadDated) else 0
        writes += len(effect.operations) if isinstance(effect, Write) else 0
        return house.world.execute(effect, 1)

    while left(house):
        reads = writes = 0
        run(forget_sessions(house.group, NOW_MS), answer)
        assert reads <= READ_AT_ONCE
        assert writes <= READ_AT_ONCE + 1
        turns += 1
    assert turns < 40


# Sessions that nobody needs are forgotten early, and neither let a zombie in nor keep anybody out.


SEEDS = 150
STEPS = 2_000
TRIES = 1_000
"""Seeds of which one finds a defect; mostly the first few do."""
FROM = {"blind-to-others": 240, "floor-read-last": 90, "no-mark": 165, "no-version": 70}
"""Seeds to begin with where it takes longer."""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whoever_is_forgotten_is_over_and_whoever_is_not_goes_on(seed: int) -> None:
    Group(seed).run(STEPS)


def test_the_histories_are_about_something() -> None:
    groups = [Group(seed) for seed in range(20)]
    for group in groups:
        group.run(STEPS)
    assert sum(group.removed for group in groups) > 30
    assert sum(len(found) for group in groups for found in group.sessions.values()) > 300
    ended = [item.ended for group in groups for item in group.transactions.values()]
    assert ended.count("committed") > 100
    assert ended.count("aborted") > 10


@pytest.mark.long_cases("floor-read-last", "no-version")
@pytest.mark.parametrize("defect", sorted(DEFECTS))
def test_the_histories_find_a_defect(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if defect == "busy-forgotten":
        monkeypatch.setattr(sessions, "_needed", lambda group: set())
    if defect == "no-margin":
        monkeypatch.setattr(sessions, "KEPT_MS", HOUR_MS)
    first = FROM.get(defect, 0)
    for seed in range(first, first + TRIES):
        try:
            Group(seed, frozenset({defect})).run(STEPS)
        except Wrong:
            return
    pytest.fail(f"nobody notices if {DEFECTS[defect]}")
