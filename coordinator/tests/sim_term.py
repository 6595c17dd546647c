"""A simulated world with one group and a leader that is at work in it, for tests that play a scene step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from coordinator.tests.sim_actors import Leader
from coordinator.tests.sim_world import World
from rollbridge.model import paths
from rollbridge.model.names import GroupName
from rollbridge.model.records import Group
from rollbridge_coordinator.state import effects as fx
from rollbridge_coordinator.state.faults import StaleStateError


class LedWorld:
    """A world, its only group, and the leader of that, which has a successor when it gives up."""

    step_ms = 10

    def __init__(self, group: GroupName) -> None:
        self.group = group
        self.world, self.rng, self.clock_ms = World(), random.Random(0), 1_000_000
        for path in (paths.GROUPS, paths.SCOPES, paths.requests(group), paths.answers(group)):
            self.world.ensure(path)
        self.world.nodes[paths.group(group)] = Group(group, 0).to_json()
        self.counter, self.terms_ended = 0, 0
        self.leader = Leader(self.world, group)

    def step(self) -> None:
        """The leader goes on; one that gives up has a successor."""
        self.clock_ms += self.step_ms
        self.world.clock_ms = self.clock_ms
        self.befall()
        try:
            self.leader.step(self.clock_ms, self.rng)
        except (fx.EffectRefusedError, StaleStateError):
            self.terms_ended += 1
            self.take_over()

    def befall(self) -> None:
        """What others do before the leader does something."""

    def take_over(self) -> None:
        self.world.expire_native(self.leader.epoch)
        self.leader = Leader(self.world, self.group)

    def until(self, condition: Callable[[], object], steps: int = 6_000) -> None:
        for _ in range(steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"not within {steps} steps")


def assert_noticed(go: Callable[[int], object], seeds: Iterable[int]) -> None:
    """Raise AssertionError unless a run of one of the seeds stops; whatever stops it is a finding."""
    for seed in seeds:
        try:
            go(seed)
        except Exception:
            return
    raise AssertionError("nothing was found")
