"""Seeded simulation of an adopted topic: its owner changes it, native producers write to it, leaders crash anywhere.

What must hold: nothing that anybody wrote is lost or doubled; the topic is never closed unless the stream was asked to
leave it, never deleted, never configured otherwise, and a plain topic again once it was released; what its owner does
ends no leader's term and holds up no other stream. ``run(seed)`` repeats a history exactly.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bridge.tests.sim_effects import Blocked
from coordinator.tests.sim_topics import (
    GROUP,
    ORDERS,
    OTHER,
    PARTITIONS,
    SECOND,
    TOPIC,
    Client,
    Keeper,
    Native,
    Owner,
    TopicsLeader,
    TopicsWorld,
    config_of,
    is_lost,
    takes_in,
)
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import Fenced, Gone, Record, Topic, shard
from rollbridge.commitlog.control import ControlKind
from rollbridge.errors import RollbridgeError
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.config import StreamState
from rollbridge.stream.epochs import EpochCause, check_chain
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import StaleStateError

STEPS = 4_000
DRAIN_STEPS = 12_000
FRAGILE = ("create_stream", "scale", "go_on_with_scale", "delete_stream", "delete_further", "truncate_stream")
FRAGILITY, UNSEEN_FRAGILITY = 0.01, 0.3
"""How often leaders crash before each effect of these, and before one that no run has crashed at yet; more often before
the rare one that gives settings back."""
EFFECTS_AT_ONCE = 6
"""Takeovers have dozens of them."""


class Run:
    """One simulated history."""

    def __init__(self, seed: int, defects: frozenset[str] = frozenset(), unseen: frozenset[str] = frozenset()) -> None:
        self.rng = random.Random(seed)
        self.unseen = unseen
        """Before which effects nobody has crashed in other runs yet."""
        self.world = TopicsWorld(defects)
        self.world.clock_ms = 10_000_000_000
        for path in (paths.GROUPS, paths.SCOPES, paths.requests(GROUP), paths.answers(GROUP)):
            self.world.ensure(path)
        self.world.nodes[paths.group(GROUP)] = Group(GROUP, 0).to_json()
        self.owner = Owner(self.world, self.rng)
        self.before = [f"before={number}" for number in range(9)]
        for number, value in enumerate(self.before):
            self.world.produce(shard(TOPIC, number % PARTITIONS), Record("before", value))
        self.natives = [Native(number, self.world, self.rng) for number in range(2)]
        self.clients = [Client(number, self.world, self.rng) for number in range(2)]
        self.keeper = Keeper(self.world, self.rng, self._check_plain)
        self.world.refuses = self.owner.refuse
        self.world.may_delete = self._check_deletion
        self.leaders: list[TopicsLeader] = [TopicsLeader(self.world, GROUP)]
        self.points: Counter[str] = Counter()
        self.is_waiting = False
        self.pending_changes = 0
        """How many scales have waited half done."""
        self.grown = 0
        """How often the stream was looked at when it had taken in partitions last."""
        self.lost_ends: tuple[str, int] | None = None
        body = AdminRequest(kind=RequestKind.CREATE_STREAM, stream=str(OTHER), segments=1, created_ms=0)
        self.world.request(GROUP, body.to_json())
        self._until(lambda: paths.stream(OTHER) in self.world.nodes)

    @property
    def broken(self) -> list[str]:
        """The promises that were broken so far."""
        return self.world.broken

    def go(self) -> list[str]:
        """Run with crashes, then let everything end; gives the broken promises."""
        for _ in range(STEPS):
            self.world.clock_ms += self.rng.randint(1, 20)
            chance = self.rng.random()
            if chance < 0.005:
                self._crash()
            elif chance < 0.007 and len(self.leaders) < 4:
                self.leaders.append(TopicsLeader(self.world, GROUP))
            elif chance < 0.018 and not self._deletes_records():
                self.owner.step(may_configure=self._may_configure())
            elif chance < 0.028:
                self.keeper.step(self.world.clock_ms)
            elif chance < 0.15:
                self.rng.choice(self.natives).step()
            elif chance < 0.3:
                self.rng.choice(self.clients).step()
            else:
                self._lead()
            if self.keeper.asked is not None:
                self.keeper.step(self.world.clock_ms)
            if is_lost(self.world):
                self._abort_waiting()
            self._look()
            if self.broken:
                return self.broken
        self._end()
        self._check_records()
        return self.broken + self.keeper.faults

    def _end(self) -> None:
        """Everybody stops, the topic is a plain one again, and then it is adopted once more."""
        self.owner.is_denied = False
        self._end_native()
        for client in self.clients:
            client.stopping = True
        self._until(self._is_quiet)
        self.keeper.is_ending = True
        self._until(lambda: config_of(self.world) is None and self.keeper.asked is None)
        if TOPIC not in self.world.topics:
            self.owner.create()
        self.keeper.is_ending = False
        self._until(lambda: (found := config_of(self.world)) is not None and found.state is StreamState.ACTIVE)
        self.clients[0].stopping = False
        count = len(self.clients[0].all)
        self._until(lambda: len(self.clients[0].all) > count)
        self.clients[0].stopping = True
        self._until(lambda: self.clients[0].current is None)
        self._end_native()

    def _end_native(self) -> None:
        """What is open hides the records behind it from readers, and holds up a seal."""
        for native in self.natives:
            native.end()

    def _is_quiet(self) -> bool:
        """Whether all transactions have ended; those that wait for long are aborted."""
        self._abort_waiting()
        return all(client.current is None for client in self.clients)

    def _abort_waiting(self) -> None:
        for client in self.clients:
            waiting = client.current
            if waiting is not None and waiting.ended == "commit" and self.rng.random() < 0.005:
                body = AdminRequest(kind=RequestKind.ABORT_TRANSACTION, transaction=str(waiting.id), created_ms=0)
                self.world.request(GROUP, body.to_json())

    def _until(self, condition: object) -> None:
        assert callable(condition)
        for _ in range(DRAIN_STEPS):
            if condition() or self.broken:
                return
            self.world.clock_ms += 10
            if paths.stream(OTHER) in self.world.nodes:
                for client in self.clients:
                    client.step()
                if self.keeper.asked is not None or self.rng.random() < 0.02:
                    self.keeper.step(self.world.clock_ms)
            self._lead()
            if self.rng.random() < 0.02:
                self._end_native()  # begun while a seal was on its way
            self._look()
        self.broken.append("the system does not come to rest")

    def _may_configure(self) -> bool:
        """Whether nobody notes at this moment what the settings are."""
        return self.keeper.asked is None or self.keeper.asked[0] not in ("leave", "refused scale")

    def _deletes_records(self) -> bool:
        """Whether a leader is about to; Kafka takes only a name for that, and is not told of which topic."""
        return any(isinstance(leader.effect, fx.DeleteRecords) for leader in self.leaders)

    # Leaders

    def _crash(self, leader: TopicsLeader | None = None) -> None:
        leader = leader or self.rng.choice(self.leaders)
        self.points[leader.place()] += 1
        leader.crash(self.rng.random())
        self._replace(leader)

    def _note_suspension(self) -> None:
        before, self.is_waiting = self.is_waiting, bool(self.world.children(paths.pending_changes(GROUP)))
        self.pending_changes += self.is_waiting and not before

    def _replace(self, leader: TopicsLeader) -> None:
        self.leaders.remove(leader)
        self.world.expire_native(leader.epoch)
        if not self.leaders or leader.epoch == self.world.controller_epoch:
            self.leaders.append(TopicsLeader(self.world, GROUP))

    def _lead(self) -> None:
        leader = self.rng.choice(self.leaders) if self.rng.random() < 0.1 else self.leaders[-1]
        try:
            for _ in range(EFFECTS_AT_ONCE):
                fragility = FRAGILITY * (20 if isinstance(leader.effect, fx.SetTopicConfig) else 1)
                if leader.place() in self.unseen - self.points.keys():
                    fragility = UNSEEN_FRAGILITY
                if isinstance(leader.effect, fx.Write) and takes_in(leader.effect.operations) and self.owner.is_calm:
                    fragility = UNSEEN_FRAGILITY
                elif leader.place().partition("/")[0] not in FRAGILE:
                    fragility = 0
                if fragility and self.rng.random() < fragility:
                    self._crash(leader)
                    return
                if isinstance(leader.effect, fx.Seal) and not self.natives[1].pending and self.rng.random() < 0.3:
                    self.natives[1].step()  # after it has been looked for such transactions
                leader.step(self.world.clock_ms, self.rng)
        except Fenced:
            self._replace(leader)
        except (Gone, Blocked, fx.EffectRefusedError, StaleStateError, RollbridgeError, KeyError) as fault:
            if leader.epoch == self.world.controller_epoch:
                self.broken.append(f"the term of a leader ends at {leader.place()}: {fault!r}")
            self._replace(leader)

    # Checks

    def _look(self) -> None:
        """What holds at any time."""
        self._note_suspension()
        config, exists = config_of(self.world), TOPIC in self.world.topics
        if self.owner.has_it and not exists:
            self.broken.append("the topic is gone, and its owner has not deleted it")
        if exists and self.world.topics[TOPIC].sealed:
            if config is None or config.buffer_topic_id not in self.keeper.left_lives:
                self.broken.append("the topic is closed, and nobody has asked for that")
        elif exists and self.world.settings_of(TOPIC) != self.owner.wanted:
            self.broken.append(f"the topic has the settings {self.world.settings_of(TOPIC)}")
        if config_of(self.world, SECOND) is not None and config is not None:
            self.broken.append("two streams have adopted one topic")
        if config is not None and config.state is StreamState.ACTIVE and self.rng.random() < 0.05:
            self._look_at_stream(exists)

    def _look_at_stream(self, exists: bool) -> None:
        config = config_of(self.world)
        assert config is not None
        if self.world.nodes.get(paths.adopted(TOPIC)) != str(ORDERS).encode():
            self.broken.append("the topic is adopted, and its node does not say so")
        if not exists or self.world.topics[TOPIC].id != config.topic_id:
            self._look_at_lost(exists)
            return
        self.lost_ends = None
        history = history_of(self.world, ORDERS)
        self.broken.extend(check_chain(history.records, history.first, history.born))
        if config.is_on_topic(history.active) and config.partitions != len(history.active.segments):
            self.broken.append(f"the stream has {config.partitions} partitions, and not {len(history.active.segments)}")
        self.grown += len(history.records) > 1 and history.records[-1].cause is EpochCause.GROWN
        for segment in history.segments():
            end = history.sealed_end(segment)
            if end is not None and config.places.is_adopted(segment):
                rows = self.world.topics[shard(TOPIC, segment.number)].visible()
                if any(offset >= end for offset, _ in rows):
                    self.broken.append(f"records stand behind the end of partition {segment.number}")

    def _look_at_lost(self, exists: bool) -> None:
        """Nothing of ours gets into a topic that a leader has said to be another one."""
        if not exists or not is_lost(self.world):
            return
        logs = [self.world.topics[shard(TOPIC, number)] for number in range(self.world.count(TOPIC))]
        ours = sum(  # an open native transaction may still hide some of them from readers
            isinstance(entry.item, Record) and entry.item.transaction is not None and entry.native.state == "committed"
            for log in logs for entry in log.entries if entry.native is not None
        )  # fmt: skip
        key = logs[0].id
        if self.lost_ends is not None and self.lost_ends[0] == key and ours > self.lost_ends[1]:
            self.broken.append("a transaction was committed to a topic that had been found to be another one")
        self.lost_ends = key, ours

    def _check_plain(self) -> None:
        """Nothing of ours is left but records."""
        world = self.world
        if (
            paths.stream(ORDERS) in world.nodes
            or paths.adopted(TOPIC) in world.nodes
            or world.children(paths.stream(ORDERS))
        ):
            self.broken.append("a released topic has left something in ZooKeeper")
        if left := [name for name in world.topics if name.startswith("topics.orders.")]:
            self.broken.append(f"a released topic has left {left}")
        if TOPIC in world.topics and (world.topics[TOPIC].sealed or world.settings_of(TOPIC) != self.owner.wanted):
            self.broken.append("a released topic is not as its owner wants it")

    def _check_deletion(self, topic: str, _: int) -> None:
        if topic.split("#")[0] != TOPIC:
            return
        config = config_of(self.world)
        if config is None or self.world.topics[topic].id != config.topic_id or "/DeleteTopics" in self.world.acting:
            self.broken.append("records of a topic are deleted that is not the stream's")

    def _check_records(self) -> None:
        if self.broken:
            return
        logs: list[Topic] = [*self.world.topics.values(), *self.owner.gone, *self.world.removed.values()]
        found = Counter(
            row.value for log in logs for _, row in log.visible() if isinstance(row, Record) and row.origin is None
        )
        expected = {*self.before, *(value for native in self.natives for value in native.written)}
        for client in self.clients:
            expected |= client.plain
            for attempt in client.all:
                if attempt.outcome is not None and attempt.outcome.kind is ControlKind.COMMIT:
                    expected.update(record.value for record in attempt.records)
        outcomes = [item for _, item in self.world.topics[GROUP.commit_log_topic].visible()]
        late = {str(item.transaction) for item in outcomes if item.kind is ControlKind.COMMIT}
        for client in self.clients:
            for attempt in client.all:  # its stream was released when it looked for the outcome
                if attempt.outcome is None and str(attempt.id) in late:
                    expected.update(record.value for record in attempt.records)
        for value in expected:
            if found[value] != 1:
                self.broken.append(f"{value} is visible {found[value]} times")
        for name, log in self.world.topics.items():
            topic, _, number = name.partition("#")
            for _, row in log.visible() if topic == TOPIC else ():
                for client in self.clients:
                    for attempt in client.all:
                        if attempt.in_topic.get(row.value, int(number or 0)) != int(number or 0):
                            self.broken.append(f"{row.value} stands in {name}")
        self.broken.extend(f"{value} is visible, and was never committed" for value in found.keys() - expected)


def run(seed: int, *defects: str) -> Run:
    """A history to its end."""
    history = Run(seed, frozenset(defects))
    history.go()
    return history


@pytest.mark.long_cases("0")
@pytest.mark.parametrize("block", range(2))
def test_an_adopted_topic_loses_nothing_whatever_crashes_where(block: int) -> None:
    for seed in range(block * 4, block * 4 + 4):
        history = Run(seed)
        broken = history.go()
        assert not broken, f"seed {seed}: {broken[:5]}"


@pytest.mark.parametrize("seed", [3, 5, 22, 36])
def test_added_partitions_are_taken_in_whatever_crashes_where(seed: int) -> None:
    history = Run(seed)
    history.owner.is_calm = True
    broken = history.go()
    assert not broken, broken[:5]
    assert history.grown > 0


def test_a_topic_that_is_created_again_while_it_is_closed_for_a_leave_is_open_again() -> None:
    assert not run(29).broken


@pytest.mark.long
def test_many_histories_of_an_adopted_topic_cover_what_they_are_for() -> None:
    counts: Counter[str] = Counter()
    points: Counter[str] = Counter()
    for seed in range(8, 58):
        history = Run(seed, unseen=CRASH_AT - points.keys())
        broken = history.go()
        assert not broken, f"seed {seed}: {broken[:5]}"
        points.update(history.points)
        counts.update(history.owner.counts)
        counts.update({f"{title} {code}": count for (title, code), count in history.keeper.answers.items()})
        counts["suspended"] += history.pending_changes
    assert not {name: counts[name] for name, least in LEAST.items() if counts[name] < least}, counts
    assert not CRASH_AT - points.keys(), sorted(CRASH_AT - points.keys())


LEAST = {
    "created again": 50,
    "deleted": 40,
    "grown": 60,
    "configured": 100,
    "adopt ok": 150,
    "adopt not-found": 50,
    "release ok": 70,
    "leave ok": 40,
    "leave conflict": 20,
    "delete ok": 40,
    "refused scale invalid-request": 30,
    "refused adopt conflict": 20,
    "refused delete invalid-request": 15,
    "retain invalid-request": 8,
    "truncate ok": 50,
    "truncate conflict": 30,
    "suspended": 10,
}
"""How often what has to happen in 50 histories for them to be worth something."""
CRASH_AT = frozenset(
    {
        *(f"create_stream/{name}" for name in ("DescribeTopics", "ReadCounter", "CreateTopics", "Write")),
        *(f"scale/{name}" for name in ("DescribeTopics", "Write", "CreateTopics", "Seal")),
        *(f"delete_further/{name}" for name in ("DescribeTopics", "DeleteTopics", "SetTopicConfig", "Write")),
        "delete_stream/Write",
    }
)


DEFECTS = (
    "forgotten-index",
    "partial-seal",
    "deletes-adopted",
    "settings-lost",
    "configures",
    "deaf-watch",
    "silent-leave",
    "name-is-identity",
    "sticky-stream",
    "half-grown",
)


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_checks_catch_a_defect(defect: str) -> None:
    for seed in range(40):
        try:
            history = Run(seed, frozenset({defect}))
            history.owner.is_calm = defect == "half-grown"
            broken = history.go()
        except Exception as fault:  # a defect may also surface as a crash of the leader itself
            broken = [str(fault)]
        if broken:
            return
    raise AssertionError(f"no run has noticed the defect {defect}")
