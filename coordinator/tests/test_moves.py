"""Streams that move between two groups, while leaders of both crash or are left behind between any two effects."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from coordinator.tests.sim_actors import Leader
from coordinator.tests.sim_world import Fenced, Gone, World, shard
from rollbridge.errors import CorruptDataError, ZooKeeperOutdatedError
from rollbridge.model import paths
from rollbridge.model.control import ControlKind, ControlRecord
from rollbridge.model.frames import (
    BeginFrame,
    FrameHeader,
    FrameKind,
    Manifest,
    PieceKey,
    buffer_partition,
    encode_abort,
)
from rollbridge.model.ids import TransactionId
from rollbridge.model.journal import GroupEvidence, is_deleted, plan, streams_of
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.records import Group, Retention, SetNode, StreamConfig
from rollbridge.model.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge_coordinator.procedures import moves
from rollbridge_coordinator.state import effects as fx
from rollbridge_coordinator.state.effects import EffectRefusedError
from rollbridge_coordinator.state.faults import StaleStateError
from rollbridge_coordinator.state.group import GroupState

GROUPS = (GroupName("sales"), GroupName("sales", "audit"))
ORDERS = StreamName("sales", "orders")
LEASE_MS = 200
FRAGILITY = 0.05
"""How often a leader dies where it must."""
MUST_CRASH_AT = {
    f"{procedure}/{effect}"
    for procedure, effects in {
        "move_stream": ("ReadNodes", "EndOffsets", "Write"),
        "move_further": ("Seal", "CreateTopics", "AppendMessages", "CommitRound", "Write"),
        "take_stream": (
            "ReadNodes",
            "TopicIds",
            "EnsureNodes",
            "DeleteTopics",
            "ReadCompacted",
            "AppendMessages",
            "CommitRound",
            "Write",
        ),
    }.items()
    for effect in effects
}


class TwoGroups(World):
    """A world with a controller epoch, and transactional ids, for each of two groups; ``led`` is the one that acts."""

    def __init__(self) -> None:
        self.led = GROUPS[0]
        self.epochs: dict[GroupName, int] = dict.fromkeys(GROUPS, 0)
        self.identities: dict[GroupName, int] = dict.fromkeys(GROUPS, 0)
        self.raised = 0
        super().__init__()

    @property
    def controller_epoch(self) -> int:
        return self.epochs[self.led]

    @controller_epoch.setter
    def controller_epoch(self, value: int) -> None:
        self.raised += value > 0  # no two leaders have the same, of whatever groups
        self.epochs[self.led] = self.raised

    @property
    def identity(self) -> int:
        return self.identities[self.led]

    @identity.setter
    def identity(self, value: int) -> None:
        self.identities[self.led] = value


@dataclass
class Attempt:
    """A transaction of one record: the stream as its client knew it, and which of its frames brokers have taken."""

    id: TransactionId
    config: StreamConfig
    epoch: int
    taken: list[FrameKind] = field(default_factory=list)
    refused: bool = False

    @property
    def value(self) -> str:
        """Of its record."""
        return f"value-{self.id.counter}"


class Run:
    """One simulated history."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = world = TwoGroups()
        world.deletes = False
        world.clock_ms = 10_000_000_000
        for path in (paths.GROUPS, paths.SCOPES):
            world.ensure(path)
        for name in GROUPS:
            for path in (paths.requests(name), paths.answers(name)):
                world.ensure(path)
            world.nodes[paths.group(name)] = Group(name, 0).to_json()
        self.leaders: dict[GroupName, list[Leader]] = {}
        for name in GROUPS:
            self.leaders[name] = []
            self._raise(name)
        self.attempts: list[Attempt] = []
        self.asked: list[str] = []
        self.answered: dict[str, AdminAnswer] = {}
        self.answers: Counter[str] = Counter()
        self.points: Counter[str] = Counter()
        create = AdminRequest(
            kind=RequestKind.CREATE_STREAM, stream=str(ORDERS), segments=1, buffer_partitions=2, created_ms=0
        )
        world.request(GROUPS[0], create.to_json())
        self._until(lambda: paths.stream(ORDERS) in world.nodes)
        self.known = self.config()

    def config(self) -> StreamConfig:
        """The stream as ZooKeeper has it."""
        return StreamConfig.from_json(self.world.nodes[paths.stream(ORDERS)])

    def go(self) -> list[str]:
        """Run with crashes, then let everything end; gives the broken promises."""
        for step in range(2_000):
            self.world.clock_ms += self.rng.randint(1, 10)
            is_calm = step // 100 % 2  # otherwise something is always open
            chance = self.rng.random()
            if chance < 0.01:
                self._crash(self.rng.choice(GROUPS))
            elif chance < 0.015:
                self._raise(self.rng.choice(GROUPS))  # the one before is left behind, and goes on
            elif chance < 0.03 + 0.03 * is_calm:
                self._ask()
            elif chance < 0.07:
                self.known = self.config()  # what clients hear late
            elif chance < (0.1 if is_calm else 0.22):
                self._write()
            else:
                self._lead(self.rng.choice(GROUPS))
        self._until(self._is_quiet)
        return list(self._faults())

    def _raise(self, name: GroupName) -> None:
        self.world.led = name
        self.leaders[name].append(Leader(self.world, name))

    def _crash(self, name: GroupName) -> None:
        self.world.led = name
        leader = self.leaders[name].pop()
        self.points[leader.place()] += 1
        leader.crash(self.rng.random())
        self.world.expire_native(leader.epoch)
        self._raise(name)

    def _lead(self, name: GroupName, *, newest: bool = False) -> None:
        self.world.led = name
        self._note_answers()
        leader = self.leaders[name][-1] if newest else self.rng.choice(self.leaders[name])
        for _ in range(self.rng.randint(1, 12)):
            is_fragile = leader is self.leaders[name][-1] and leader.place() in MUST_CRASH_AT
            if is_fragile and self.rng.random() < FRAGILITY:
                self._crash(name)
                return
            try:
                leader.step(self.world.clock_ms, self.rng)
            except (Fenced, Gone, EffectRefusedError, StaleStateError):
                self.world.expire_native(leader.epoch)
                self.leaders[name].remove(leader)
                if leader.epoch == self.world.controller_epoch or not self.leaders[name]:
                    self._raise(name)
                return

    def _note_answers(self) -> None:
        """Take note of answers before they expire."""
        for path in self.asked:
            if path in self.world.nodes:
                self.answered[path] = AdminAnswer.from_json(self.world.nodes[path])

    def _ask(self) -> None:
        config = self.config()
        target = next(name for name in GROUPS if name != config.group)
        body = AdminRequest(kind=RequestKind.MOVE_STREAM, stream=str(ORDERS), group=target.group, created_ms=0)
        self.asked.append(self.world.request(config.group, body.to_json()))

    def _write(self) -> None:
        """A client begins, or goes on with what it has begun; some know the stream as it was a while ago."""
        going = [item for item in self.attempts[-3:] if not item.refused and len(item.taken) < 3]
        if not going or self.rng.random() < 0.3:
            config = self.known if self.rng.random() < 0.5 else self.config()
            self.attempts.append(Attempt(TransactionId.of(0, len(self.attempts) + 1), config, config.first_epoch))
            return
        item = self.rng.choice(going)
        begin = BeginFrame("c", 0, None, LEASE_MS, {str(ORDERS): item.epoch})
        batch = json.dumps([["k", item.value, str(item.id), 0]]).encode()
        kind = (FrameKind.BEGIN, FrameKind.DATA, FrameKind.COMMIT)[len(item.taken)]
        if kind is FrameKind.COMMIT and self.rng.random() < 0.3:
            kind = FrameKind.ABORT
        header = FrameHeader(kind, item.id.bytes, 0, 0, 0, 1 if kind is FrameKind.DATA else 0)
        value = {
            FrameKind.BEGIN: begin.encode(),
            FrameKind.DATA: batch,
            FrameKind.COMMIT: Manifest({PieceKey(0, 0, 0): 1}).encode(),
            FrameKind.ABORT: encode_abort("client"),
        }[kind]
        topic = shard(item.config.buffer_topic, buffer_partition(item.id, item.config.buffer_partitions))
        if self.world.produce(topic, (header.pack(), value)) is None:
            item.refused = True  # the client is told so
        else:
            item.taken.append(kind)

    def _until(self, done: object) -> None:
        assert callable(done)
        for turn in range(6_000):
            if done():
                return
            if turn and not turn % 1_000:
                for name in GROUPS:
                    self._raise(name)  # one whose clock is behind ends leases late, until brokers have shown theirs
            self.world.clock_ms += 20
            for name in GROUPS:
                self._lead(name, newest=True)
        raise AssertionError(f"it does not come to rest: {self._why_not()}")

    def _is_quiet(self) -> bool:
        return not self._why_not()

    def _why_not(self) -> str:
        for name in GROUPS:
            leader = self.leaders[name][-1]
            if self.world.children(paths.requests(name)):
                return f"requests of {name}: {self.world.children(paths.requests(name))}"
            if leader.group is None or leader.group.fold.open:
                return f"{name} has open transactions, or is taking over"
            journal = leader.group.journal.nodes
            has = any(not is_deleted(value) for value in streams_of(journal).values())
            if has != (name == self.config().group):
                return f"the journal of {name}"
        begun = {item.id.bytes for item in self.attempts if item.taken}
        if self.config().moving_to or begun - {key for name in GROUPS for key in self._outcomes(name)}:
            return "the stream is being moved, or some transaction has no outcome"
        return ""

    def _outcomes(self, name: GroupName) -> dict[bytes, list[ControlKind]]:
        found: dict[bytes, list[ControlKind]] = {}
        log = self.world.topics.get(name.commit_log_topic)
        for _, record in [] if log is None else log.visible():
            assert isinstance(record, ControlRecord)
            if record.kind is not ControlKind.BEGIN:
                found.setdefault(record.transaction.bytes, []).append(record.kind)
        return found

    def _faults(self) -> Iterator[str]:
        config = self.config()
        self._note_answers()
        yield from self.world.broken
        outcomes = {name: self._outcomes(name) for name in GROUPS}
        visible = Counter(record.value for _, record in self.world.topics[self._segment()].visible())
        for item in self.attempts:
            own = outcomes[item.config.group].get(item.id.bytes, [])
            for name in GROUPS:
                if name != item.config.group and item.id.bytes in outcomes[name]:
                    yield f"transaction {item.id} of {item.config.group} has an outcome in {name}"
            if len(own) != bool(item.taken):
                yield f"transaction {item.id}, of which brokers took {item.taken}, has outcomes {own}"
            committed = ControlKind.COMMIT in own
            if committed and FrameKind.COMMIT not in item.taken:
                yield f"nobody has asked for the commit of transaction {item.id}"
            if visible[item.value] != committed:
                yield f"the record of transaction {item.id} is visible {visible[item.value]} times, {own}"
        for topic, log in self.world.topics.items():
            is_buffer = topic.startswith("sales.orders.transaction-buffer")
            # A leader that stood still may have made the topic of a move that is long over; the next move removes it.
            if is_buffer and topic.split("#")[0] != config.buffer_topic and log.entries:
                yield f"{topic} is left, the stream has {config.buffer_topic}"
        for name in GROUPS:
            group = self.leaders[name][-1].group
            assert group is not None
            if (str(ORDERS) in group.streams) != (name == config.group):
                yield f"the stream is in {config.group}, the leader of {name} leads {list(group.streams)}"
        for path in self.asked:
            if path not in self.answered:
                yield f"request {path} has no answer"
                continue
            answer = self.answered[path]
            self.answers[answer.code or "ok"] += 1
            if answer.code not in ("", "stream-busy", "stream-not-found", "invalid-request"):
                yield f"a move was answered {answer.code}: {answer.message}"

    def _segment(self) -> str:
        [topic] = [name for name in self.world.topics if ".segment-" in name]
        return topic


def test_a_stream_is_always_led_by_one_group_and_no_transaction_is_lost_or_adopted() -> None:
    answers: Counter[str] = Counter()
    moved = 0
    points: Counter[str] = Counter()
    for seed in range(25):
        run = Run(seed)
        broken = run.go()
        assert not broken, f"seed {seed}: {broken[:5]}"
        answers.update(run.answers)
        points.update(run.points)
        moved += run.config().moves
    assert not MUST_CRASH_AT - points.keys()
    assert moved > 50, answers
    assert answers["stream-busy"] > 20


@pytest.mark.long
def test_nothing_is_lost_or_adopted_in_many_histories() -> None:
    for seed in range(25, 250):
        broken = Run(seed).go()
        assert not broken, f"seed {seed}: {broken[:5]}"


class Forgetful(Run):
    """A history in which both groups truncate their commit logs, and frames come again long after the outcomes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.world.deletes = True
        self.again = random.Random(seed)
        self.said = 0
        for name in GROUPS:
            body = AdminRequest(kind=RequestKind.UPDATE_GROUP, retention=Retention(500), created_ms=0)
            self.world.request(name, body.to_json())

    def _write(self) -> None:
        super()._write()
        ended = [item for item in self.attempts[:-10] if item.taken]
        if ended and self.again.random() < 0.3:
            item = self.again.choice(ended)
            header = FrameHeader(FrameKind.BEGIN, item.id.bytes, 0, 0, 0, 0)
            begin = BeginFrame("c", 0, None, LEASE_MS, {str(ORDERS): item.epoch})
            # Into the buffer that the stream has now: what the group that left it there knows must not be lost.
            topic = shard(self.config().buffer_topic, buffer_partition(item.id, self.config().buffer_partitions))
            if self.config().group == item.config.group:
                self.world.said_again.add(item.id.bytes)
                self.said += self.world.produce(topic, (header.pack(), begin.encode())) is not None


def test_what_has_ended_stays_ended_when_a_stream_comes_back_to_a_group_with_a_truncated_log() -> None:
    said, truncated = 0, 0
    for seed in range(8):
        run = Forgetful(seed)
        broken = run.go()
        assert not broken, f"seed {seed}: {broken[:5]}"
        said += run.said
        truncated += sum(run.world.topics[name.commit_log_topic].start for name in GROUPS)
    assert said > 50
    assert truncated > 100


@pytest.mark.parametrize("defect", ["unsealed", "hasty", "same-buffer", "blind"])
def test_the_checks_catch_a_defect(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match defect:
        case "unsealed":
            monkeypatch.setattr(moves, "Seal", fx.EndOffsets)
        case "hasty":  # nobody is asked whether something is open
            monkeypatch.setattr(moves, "_open", lambda _group, _stream: [])
        case "same-buffer":  # the new group goes on in the old one's
            monkeypatch.setattr(StreamConfig, "buffer_topic", property(lambda self: self.name.buffer_topic()))
            monkeypatch.setattr(StreamConfig, "former_buffer_topics", lambda _: [])
        case _:  # what came in before the seal is not looked at
            looked = GroupState.is_folded
            monkeypatch.setattr(
                GroupState,
                "is_folded",
                lambda group, ends: any(ends is item for item in group.sealed_buffers.values()) or looked(group, ends),
            )
    for seed in range(60):
        try:
            broken = Run(seed).go()
        except Exception as fault:  # a defect may also keep a run from coming to rest
            broken = [str(fault)]
        if broken:
            return
    raise AssertionError(f"no run has noticed the defect {defect}")


def test_a_zookeeper_that_was_set_back_to_before_a_move_is_noticed_by_both_groups() -> None:
    run = Run(1)
    before = run.world.nodes[paths.stream(ORDERS)]
    run._ask()
    run._until(lambda: run.config().group == GROUPS[1] and run._is_quiet())
    run.world.nodes[paths.stream(ORDERS)] = before
    for name, noticed in ((GROUPS[1], ZooKeeperOutdatedError), (GROUPS[0], CorruptDataError)):
        run.world.led = name
        leader = Leader(run.world, name)
        with pytest.raises(noticed):
            _take_over(run, leader)


def _take_over(run: Run, leader: Leader) -> None:
    for _ in range(1_000):
        leader.step(run.world.clock_ms, run.rng)


def test_a_repair_after_that_puts_the_stream_into_the_group_that_it_was_moved_into() -> None:
    run = Run(1)
    before = run.world.nodes[paths.stream(ORDERS)]
    run._ask()
    run._until(lambda: run.config().group == GROUPS[1] and run._is_quiet())
    moved = run.world.nodes[paths.stream(ORDERS)]
    nodes = {**run.world.nodes, paths.stream(ORDERS): before}
    groups = []
    for name in GROUPS:
        group = run.leaders[name][-1].group
        assert group is not None
        topics = {topic: log.id for topic, log in run.world.topics.items()}
        groups.append(GroupEvidence(name=name, journal=dict(group.journal.nodes), topics=topics))
    for order in (groups, groups[::-1]):
        steps = [item for step in plan(nodes, order, 0) for batch in step.batches for item in batch]
        written = [item for item in steps if item.path == paths.stream(ORDERS)]
        assert [item for item in written if isinstance(item, SetNode)] == [SetNode(paths.stream(ORDERS), moved)]
        assert len(written) == 1, "nobody deletes it"
