"""Who stands for a lead and who gives way: the table, and schedules in which coordinators come and go."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import pytest

from rollbridge.stream.names import GroupName
from rollbridge_coordinator.daemon.succession import (
    REST_MAX_S,
    REST_S,
    SERVED_FACTOR,
    SERVED_MIN_S,
    SPREAD_MAX_MS,
    Candidates,
    Setbacks,
    Times,
    first_choice,
    gives_way_in_s,
    hands_over_to,
    stands_in_s,
)

GROUP = GroupName("sales")
NAMES = ("one", "two", "three")
FIRST, SECOND, THIRD = sorted(NAMES, key=lambda name: first_choice(GROUP, NAMES) != name)
PATIENCE_S = 3.0
TERM_S = 60.0
"""Length of a term that gets nowhere."""


def alive(*names: str, ready: tuple[str, ...] = ()) -> Candidates:
    return Candidates({name: (GROUP,) if name in ready else () for name in names})


@pytest.mark.parametrize(
    ("name", "candidates", "vacant_s", "left"),
    [
        (FIRST, alive(*NAMES), 0.0, 0.0),  # nobody knows anything: the first choice
        (SECOND, alive(*NAMES), 0.5, 2.5),
        (SECOND, alive(*NAMES), 4.0, 0.0),  # the first choice does nothing
        (SECOND, alive(*NAMES, ready=(SECOND,)), 0.0, 0.0),  # who is warm comes before who is preferred
        (FIRST, alive(*NAMES, ready=(SECOND,)), 0.0, PATIENCE_S),
        (FIRST, alive(*NAMES, ready=(FIRST, SECOND)), 0.0, 0.0),
        (SECOND, alive(*NAMES, ready=(FIRST, SECOND)), 0.0, PATIENCE_S),
        (SECOND, alive(SECOND), 0.0, 0.0),  # the first choice is the one that died
        (SECOND, alive(), 0.0, PATIENCE_S),  # it does not yet see itself on the roll
    ],
)
def test_a_vacant_lead_is_for_the_warm_then_for_the_first_choice_then_for_all(
    name: str, candidates: Candidates, vacant_s: float, left: float
) -> None:
    assert stands_in_s(GROUP, name, candidates, vacant_s, PATIENCE_S) == left


@pytest.mark.parametrize(
    ("name", "candidates", "vacant_s", "left"),
    [
        (FIRST, alive(*NAMES), 0.0, 2 * PATIENCE_S),
        (FIRST, alive(*NAMES), 4.0, 2.0),  # the others have had their turn by then
        (FIRST, alive(*NAMES), 6.0, 0.0),
        (SECOND, alive(*NAMES, ready=(SECOND,)), 0.0, 2 * PATIENCE_S),  # what is published may be old
        (FIRST, alive(FIRST), 0.0, 0.0),  # there is nobody else
        (FIRST, alive(), 0.0, PATIENCE_S),
    ],
)
def test_who_got_nowhere_stands_behind_all_others_if_there_are_any(
    name: str, candidates: Candidates, vacant_s: float, left: float
) -> None:
    assert stands_in_s(GROUP, name, candidates, vacant_s, PATIENCE_S, rests=True) == left


@pytest.mark.parametrize(
    ("name", "candidates", "heir"),
    [
        (FIRST, alive(*NAMES), None),  # nobody says that it hears more
        (FIRST, alive(*NAMES, ready=(SECOND,)), SECOND),
        (SECOND, alive(*NAMES, ready=(FIRST, THIRD)), FIRST),
        (SECOND, alive(*NAMES, ready=(SECOND,)), None),
        (SECOND, alive(), None),
    ],
)
def test_a_leader_that_hears_nothing_hands_over_to_one_that_is_warm(
    name: str, candidates: Candidates, heir: str | None
) -> None:
    assert hands_over_to(GROUP, name, candidates) == heir


def test_rests_grow_until_a_term_lasts() -> None:
    setbacks, now = Setbacks(), 100.0
    assert setbacks.left_s(now) == 0.0
    rests = []
    for _ in range(7):
        setbacks.note(now - 60.0, now)
        rests.append(setbacks.left_s(now))
        now += 60.0 + rests[-1]
        assert setbacks.left_s(now) == 0.0
    assert rests == [REST_S, 2 * REST_S, 4 * REST_S, 8 * REST_S, REST_MAX_S, REST_MAX_S, REST_MAX_S]
    setbacks.note(now - REST_MAX_S - 1.0, now)
    assert setbacks.left_s(now) == REST_S
    assert setbacks.count == 8


@pytest.mark.parametrize(
    ("name", "candidates", "served_s", "takeover_s", "left"),
    [
        (FIRST, alive(*NAMES, ready=(SECOND,)), 1e6, 0.1, None),  # it is its turn
        (SECOND, alive(*NAMES), 1e6, 0.1, None),  # the first choice would have to read everything
        (SECOND, alive(*NAMES, ready=(THIRD,)), 1e6, 0.1, None),
        (
            SECOND,
            alive(SECOND, THIRD, ready=(THIRD,)),
            1e6,
            0.1,
            None if first_choice(GROUP, [SECOND, THIRD]) == SECOND else 0.0,
        ),
        (SECOND, alive(*NAMES, ready=(FIRST,)), 1e6, 0.1, 0.0),
        (SECOND, alive(*NAMES, ready=(FIRST,)), 0.25, 0.01, SERVED_MIN_S - 0.25),
        (SECOND, alive(*NAMES, ready=(FIRST,)), 10.0, 36.0, SERVED_FACTOR * 36.0 - 10.0),
        (SECOND, alive(), 1e6, 0.1, None),  # the roll is not read yet
    ],
)
def test_a_leader_gives_way_to_a_warm_first_choice_only_and_not_soon(
    name: str, candidates: Candidates, served_s: float, takeover_s: float, left: float | None
) -> None:
    assert gives_way_in_s(GROUP, name, candidates, served_s, takeover_s) == left


def test_what_is_said_of_other_groups_counts_for_them_only() -> None:
    candidates = Candidates({FIRST: (GroupName("other"),), SECOND: (GROUP,)})
    assert candidates.next_in_line(GROUP) == SECOND
    assert gives_way_in_s(GROUP, SECOND, candidates, 1e6, 0.1) is None


# Schedules ------------------------------------------------------------------------------------------------------------

GiveWay = Callable[[GroupName, str, Candidates, float, float], float | None]


@dataclass
class World:
    """One group and some coordinators that come and go, on a clock of its own; times in s.

    A cold takeover takes long, a warm one does not; a standby needs as long to become warm as a cold takeover takes.
    """

    seed: int
    give_way: GiveWay
    mean_life_s: float
    lame: tuple[str, ...] = ()
    """Those that are cut off from a broker: they follow the group, but a term of theirs gets nowhere."""
    do_rest: bool = True
    duration_s: float = 800.0
    now: float = 0.0
    leader: str | None = None
    serves_since: float | None = None
    took_s: float = 0.0
    vacant_since: float = 0.0
    served_s: float = 0.0
    spent_s: float = 0.0
    wasted: list[tuple[float, float]] = field(default_factory=list)
    """Takeovers that were given up by choice too early: how long each took, and how long it served."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.cold_s = self.rng.choice([0.2, 5.0, 20.0])
        self.warm_at: dict[str, float] = {}
        self.setbacks = {name: Setbacks() for name in NAMES}
        self.moves: list[tuple[float, int, str]] = []
        self.order = itertools.count()
        self.leads_since = 0.0

    def run(self, settle_s: float = 0.0) -> None:
        """Let coordinators come and go, then let those that are there be alone for a while."""
        for name in NAMES:
            self._plan(self.rng.uniform(0.0, 5.0), name)
        self.run_alone(settle_s)

    def run_alone(self, settle_s: float = 0.0) -> None:
        """Let time pass."""
        while self.now < self.duration_s + settle_s:
            if self.now >= self.duration_s:
                self.moves = []
            while self.moves and self.moves[0][0] <= self.now:
                self._move(heapq.heappop(self.moves)[2])
            self._turn()
            self.now += 0.25
            if self.serves_since is not None and self.leader not in self.lame:
                self.served_s += 0.25

    def _plan(self, delay_s: float, name: str) -> None:
        heapq.heappush(self.moves, (self.now + delay_s, next(self.order), name))

    def _move(self, name: str) -> None:
        """One that is there goes, one that is not there comes."""
        if name in self.warm_at:
            del self.warm_at[name]
            if self.leader == name:
                self._vacate()
            self._plan(self.rng.expovariate(1 / 3.0), name)
        else:
            self.warm_at[name] = self.now + self.cold_s
            self._plan(self.rng.expovariate(1 / self.mean_life_s), name)

    def _vacate(self) -> None:
        self.leader, self.serves_since, self.vacant_since = None, None, self.now

    @property
    def candidates(self) -> Candidates:
        ready = {
            name
            for name, at in self.warm_at.items()
            if at <= self.now and name != self.leader and not self._rests(name)
        }
        return Candidates({name: (GROUP,) if name in ready else () for name in self.warm_at})

    def _rests(self, name: str) -> bool:
        return self.do_rest and self.setbacks[name].left_s(self.now) > 0.0

    def _turn(self) -> None:
        candidates = self.candidates
        if self.leader is None:
            for name in sorted(self.warm_at, key=lambda _: self.rng.random()):
                vacant_s = self.now - self.vacant_since
                if stands_in_s(GROUP, name, candidates, vacant_s, PATIENCE_S, rests=self._rests(name)) == 0.0:
                    self.leader, self.leads_since = name, self.now
                    self.took_s = 0.25 if candidates.is_ready(name, GROUP) else self.cold_s
                    self.spent_s = 0.0
                    return
        elif self.leader in self.lame and self.now - self.leads_since >= TERM_S:
            self.setbacks[self.leader].note(self.leads_since, self.now)
            self.warm_at[self.leader] = self.now + self.cold_s
            self._vacate()
        elif self.serves_since is None:
            self.spent_s += 0.25
            if self.spent_s >= self.took_s:
                self.serves_since = self.now
        else:
            served = self.now - self.serves_since
            if self.give_way(GROUP, self.leader, candidates, served, self.took_s) == 0.0:
                if served < SERVED_FACTOR * self.took_s or not candidates.is_ready(choice_of(candidates), GROUP):
                    self.wasted.append((self.took_s, served))
                self.warm_at[self.leader] = self.now + self.cold_s  # it has to follow anew
                self._vacate()


def choice_of(candidates: Candidates) -> str:
    return candidates.first_choice(GROUP) or ""


def whose_turn_it_is(
    group: GroupName, name: str, candidates: Candidates, served_s: float, takeover_s: float
) -> float | None:
    """The rule of before: whoever is not the first choice goes at once."""
    return 0.0 if candidates.first_choice(group) != name else None


def at_once(group: GroupName, name: str, candidates: Candidates, served_s: float, takeover_s: float) -> float | None:
    """A warm first choice is waited for, but what the takeover cost is not."""
    return gives_way_in_s(group, name, candidates, 1e9, 0.0)


def cold_too(group: GroupName, name: str, candidates: Candidates, served_s: float, takeover_s: float) -> float | None:
    """What the takeover cost is looked at, but not whether anybody is warm."""
    everybody = Candidates(dict.fromkeys(candidates.ready, (group,)))
    return gives_way_in_s(group, name, everybody, served_s, takeover_s)


SEEDS = range(12)


def test_no_takeover_is_thrown_away_and_the_group_is_led() -> None:
    for seed in SEEDS:
        world = World(seed, gives_way_in_s, mean_life_s=60.0)
        world.run(settle_s=300.0)
        assert not world.wasted, (seed, world.wasted)
        assert world.leader == world.candidates.first_choice(GROUP), (seed, "it does not end with the first choice")
        assert world.serves_since is not None, seed


@pytest.mark.parametrize("rule", [whose_turn_it_is, at_once, cold_too])
def test_the_schedules_catch_a_defect(rule: GiveWay) -> None:
    worlds = [World(seed, rule, mean_life_s=60.0) for seed in SEEDS]
    for world in worlds:
        world.run()
    assert any(world.wasted for world in worlds)


def test_a_group_is_led_for_most_of_the_time_while_coordinators_come_and_go() -> None:
    """More than with the rule of before, for the same comings and goings."""
    shares = {}
    for rule in (gives_way_in_s, whose_turn_it_is):
        worlds = [World(seed, rule, mean_life_s=100.0) for seed in SEEDS]
        for world in worlds:
            world.run()
        shares[rule] = sum(world.served_s for world in worlds) / sum(world.duration_s for world in worlds)
    assert shares[gives_way_in_s] > 0.8
    assert shares[gives_way_in_s] > shares[whose_turn_it_is]


@pytest.mark.parametrize("cold_s", [0.2, 5.0])
def test_a_first_choice_that_gets_nowhere_leads_ever_more_seldom(cold_s: float) -> None:
    """It would be given way to again and again, since it is warm; alone, it goes on trying."""

    def world(names: tuple[str, ...], *, do_rest: bool) -> World:
        made = World(0, gives_way_in_s, mean_life_s=1e9, lame=(FIRST,), do_rest=do_rest, duration_s=3_600.0)
        made.cold_s = cold_s
        made.warm_at = dict.fromkeys(names, 0.0)
        made.run_alone()
        return made

    resting, flapping = world(NAMES, do_rest=True), world(NAMES, do_rest=False)
    assert resting.served_s > 0.88 * resting.duration_s
    assert resting.setbacks[FIRST].count <= 7
    assert flapping.served_s < 0.6 * flapping.duration_s, "the schedule would not tell"
    assert world((FIRST,), do_rest=True).setbacks[FIRST].count > 50


# What time it is for sure, by several clocks.


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
