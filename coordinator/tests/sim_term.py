"""A simulated world with one group and a leader that is at work in it, for tests that play a scene step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from coordinator.tests.sim_actors import Leader
from coordinator.tests.sim_world import World
from rollbridge.base.ids import TransactionId
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import StaleStateError


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

    def steps(self, count: int = 1_000) -> None:
        for _ in range(count):
            self.step()

    def ask(self, kind: RequestKind, stream: StreamName | None = None, **more: Any) -> str:
        """Ask for something; gives the path of the answer."""
        request = AdminRequest(kind=kind, stream="" if stream is None else str(stream), created_ms=0, **more)
        return self.world.request(self.group, request.to_json())

    def answered(self, path: str) -> AdminAnswer:
        """The answer of that path, once it is there."""
        self.until(lambda: path in self.world.nodes)
        return AdminAnswer.from_json(self.world.nodes[path])

    def answer(self, kind: RequestKind, stream: StreamName | None = None, **more: Any) -> AdminAnswer:
        return self.answered(self.ask(kind, stream, **more))

    def outcome(self, transaction: TransactionId) -> ControlRecord | None:
        found = [
            record
            for _, record in self.world.topics[self.group.commit_log_topic].visible()
            if record.transaction == transaction and record.kind is not ControlKind.BEGIN
        ]
        assert len(found) < 2
        return found[0] if found else None

    def ended(self, transaction: TransactionId) -> ControlRecord:
        """The outcome of a transaction, once it has one."""
        self.until(lambda: self.outcome(transaction) is not None)
        found = self.outcome(transaction)
        assert found is not None
        return found


def assert_noticed(go: Callable[[int], object], seeds: Iterable[int]) -> None:
    """Raise AssertionError unless a run of one of the seeds stops; whatever stops it is a finding."""
    for seed in seeds:
        try:
            go(seed)
        except Exception:
            return
    raise AssertionError("nothing was found")
