"""Sweeps of entries: every order of the steps of two sweeps and of what producers and gateways do meanwhile."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bridge.tests.sim_effects import Driven, Turns
from gateway.tests.sim_world import DAY_MS, EXPIRATION_MS, NAME, STREAMS, AskAgain, Gateway, World
from rollbridge.base.effects import AnyEffect, run
from rollbridge_gateway.producer import expiration, procedures
from rollbridge_gateway.producer.expiration import (
    ALL_BUCKETS,
    AT_ONCE,
    BucketMark,
    Dated,
    FindHeld,
    FindOld,
    FindSessions,
    MarkBucket,
    ReadEntries,
    RemoveEntries,
    is_due,
    sweep,
)
from rollbridge_gateway.producer.procedures import IdState, Incoming, RefusedError
from rollbridge_gateway.producer.table import NOBODY, Entry, KafkaFault, Pair

STEPS = 6
"""Effects of a sweep that finds an entry to remove."""


class Play:
    """An id that nobody has used for ten days, two gateways, and a sweep that stands still between its steps."""

    def __init__(self, *, is_held: bool) -> None:
        self.world = World(random.Random(0), 0)
        self.gateways = [Gateway(self.world), Gateway(self.world)]
        self.world.fresh_ms = 1 << 60  # whether a transaction shows in the entry's age is left out
        self.pair = NOBODY
        self.start()
        self.write()
        self.end()
        if not is_held:
            self.die()
        self.world.sleep(10 * DAY_MS)
        assert self.world.session_ms is None
        self.sweeper = self.new_sweep()

    def new_sweep(self) -> Turns[int]:
        sweeper = Driven(sweep(EXPIRATION_MS, self.world.now_ms)).turns(self.world.swept)
        next(sweeper)
        return sweeper

    def step(self) -> None:
        """Go on with the sweep."""
        next(self.sweeper, None)

    def whole_sweep(self) -> None:
        """Another one, without a pause."""
        for _ in self.new_sweep():
            pass

    def die(self) -> None:
        """The gateway that holds the id dies."""
        if self.world.holder is not None:
            self.world.holder.drop()

    def run(self, make: Callable[[IdState], Any]) -> Any:
        gateway = self.world.holder or self.gateways[1]
        return gateway.run(make)

    def start(self) -> None:
        """A producer starts."""
        now_ms = self.world.now_ms
        self.pair = self.run(lambda held: procedures.start(held, NAME, 60_000, 5, now_ms)).pair

    def write(self) -> None:
        """It writes a record with the pair that it has; if it is not known, it starts anew."""
        item = Incoming(("t", 0), STREAMS[0], self.pair, 0, 1, [1])
        now_ms = self.world.now_ms
        try:
            self.run(lambda held: procedures.write(held, self.pair, [item], now_ms, v2=True))
        except RefusedError as fault:
            if fault.fault is not KafkaFault.UNKNOWN_PRODUCER:
                raise
            self.start()
        self.world.used_ms = now_ms

    def end(self) -> None:
        now_ms = self.world.now_ms
        self.pair = self.run(lambda held: procedures.end(held, self.pair, 5, now_ms, commit=True, v2=True))


SCRIPTS: dict[str, Sequence[str]] = {
    "the one that holds it begins a transaction and dies": ("write", "die"),
    "another sweep, and a producer starts": ("whole_sweep", "start", "die"),
    "another sweep, a producer starts and writes": ("whole_sweep", "start", "write", "die"),
    "it is taken up": ("die", "write", "die"),
}


def play(script: Sequence[str], *, is_held: bool) -> int:
    """Play a script between the steps of a sweep, in every order; return in how many the entry was removed."""
    removed = 0
    for places in itertools.combinations(range(STEPS + 1 + len(script)), len(script)):
        found, actions = Play(is_held=is_held), iter(script)
        for at in range(STEPS + 1 + len(script)):
            if at in places:
                try:
                    getattr(found, next(actions))()
                except AskAgain:  # its entry was removed
                    found.die()
            else:
                found.step()
        removed += found.world.steps["removed"]
    return removed


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "not held"])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_nothing_is_lost_in_any_order(script: Sequence[str], is_held: bool) -> None:
    removed = play(script, is_held=is_held)
    assert removed or is_held, "nothing was played"


def _sessions_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiration, "LOOKS", (FindSessions, FindHeld))


def _buckets_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = World.swept

    def swept(self: World, effect: AnyEffect) -> Any:
        if isinstance(effect, RemoveEntries):
            effect = RemoveEntries(self.bucket, effect.versions)
        return real(self, effect)

    monkeypatch.setattr(World, "swept", swept)


def _versions_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = World.swept

    def swept(self: World, effect: AnyEffect) -> Any:
        if isinstance(effect, RemoveEntries):
            effect = RemoveEntries(effect.bucket_version, dict.fromkeys(effect.versions, self.version or 0))
        return real(self, effect)

    monkeypatch.setattr(World, "swept", swept)


@pytest.mark.parametrize("mutant", [_sessions_first, _buckets_overlooked, _versions_overlooked])
def test_a_fault_is_found(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)

    def play_all() -> None:
        for script, is_held in itertools.product(SCRIPTS.values(), (True, False)):
            play(script, is_held=is_held)

    with pytest.raises(AssertionError, match="it was"):
        play_all()


# One sweep


def entry(name: str, written_ms: int) -> Entry:
    return Entry(name, Pair(1 << 62, 0), 1_000, written_ms=written_ms)


def test_an_entry_is_due_when_both_clocks_say_so() -> None:
    for by_zookeeper, by_gateway in itertools.product((0, 6, 7), repeat=2):
        dated = Dated(entry("a", (10 - by_gateway) * DAY_MS), 0, (20 - by_zookeeper) * DAY_MS)
        due = is_due(dated, 7 * DAY_MS, 20 * DAY_MS, 10 * DAY_MS)
        assert due is (by_zookeeper == by_gateway == 7)


class Bucket:
    """A bucket of many entries; what is in ``held`` and ``known`` stays."""

    def __init__(self, names: Sequence[str], held: Sequence[str] = (), known: Sequence[str] = ()) -> None:
        self.found = {name: Dated(entry(name, 0), number, 0) for number, name in enumerate(names)}
        self.held, self.known = held, known
        self.version = 3
        self.refuses = False
        self.sizes: list[int] = []

    def sweep(self) -> int:
        return run(sweep(EXPIRATION_MS, EXPIRATION_MS), self.carry_out)

    def carry_out(self, effect: AnyEffect) -> Any:
        match effect:
            case FindOld():
                return sorted(self.found)
            case MarkBucket():
                self.version += 1
                return BucketMark(self.version, EXPIRATION_MS)
            case ReadEntries(names):
                self.sizes.append(len(names))
                return {name: self.found[name] for name in names}
            case FindHeld(names):
                return set(names) & set(self.held)
            case FindSessions(names):
                return set(names) & set(self.known)
            case RemoveEntries(version, versions):
                assert version == self.version
                if self.refuses:
                    return None
                for name, of in versions.items():
                    assert self.found.pop(name).version == of
                self.version += 1
                return self.version
        raise AssertionError(effect)


def test_a_bucket_is_swept_in_pieces_and_what_is_needed_stays() -> None:
    names = [f"n{number:04d}" for number in range(3 * AT_ONCE + 7)]
    bucket = Bucket(names, held=names[:2], known=names[1:4])
    assert bucket.sweep() == len(names) - 4
    assert sorted(bucket.found) == names[:4]
    assert bucket.sizes == [AT_ONCE, AT_ONCE, AT_ONCE, 7]


def test_a_sweep_that_was_overtaken_ends() -> None:
    bucket = Bucket([f"n{number:04d}" for number in range(2 * AT_ONCE)])
    bucket.refuses = True
    assert bucket.sweep() == 0
    assert bucket.sizes == [AT_ONCE]


def test_an_empty_bucket_is_not_written() -> None:
    bucket = Bucket([])
    assert (bucket.sweep(), bucket.version) == (0, 3)
    assert len(set(ALL_BUCKETS)) == 256
