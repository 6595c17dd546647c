"""Actors of the simulation of adopted topics: the topic's owner, native writers, ours, and who adopts and releases.

Defects for testing the checks, by their names in ``World.faults``: ``forgotten-index`` (that a topic is adopted is not
written down under its name), ``partial-seal`` (one partition of a topic is closed), ``deletes-adopted`` (the topic is
deleted with its stream), ``settings-lost`` (it does not get its settings back), ``configures`` (it gets others at
adoption), ``deaf-watch`` (what a look has found holds nothing up), ``silent-leave`` (a scale leaves the topic without
being asked to), ``name-is-identity`` (topics of one name are taken for one), ``sticky-stream`` (a release leaves the
stream's record), ``half-grown`` (partitions are taken in by an epoch, and the stream's record does not say so).
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.tests.sim_actors import Leader, scale_request, stream_config
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import Fenced, Record, Topic, World, shard
from rollbridge.base.effects import AnyEffect
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey, buffer_partition
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.metadata import paths
from rollbridge.metadata.changes import TOPIC_DELETED, TOPIC_RECREATED, StreamFault
from rollbridge.metadata.records import CreateNode, DeleteNode, NodeOperation, SetNode
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.stream.config import Retention, StreamConfig, StreamState
from rollbridge.stream.names import GroupName, StreamName
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import BlockedStreams

GROUP = GroupName("topics")
ORDERS, OTHER, SECOND = (StreamName("topics", name) for name in ("orders", "other", "second"))
TOPIC, PARTITIONS = "orders", 3
LEASE_MS = 4_000
FENCED = (fx.CreateTopics, fx.DeleteTopics, fx.Seal, fx.DeleteRecords, fx.SetTopicConfig, fx.MendTopics)
TURN_EFFECTS_MAX = 3_000
"""More than any turn of a leader takes; whoever needs more plans the same again and again."""


def config_of(world: World, stream: StreamName = ORDERS) -> StreamConfig | None:
    """A stream's record; None if it does not exist."""
    return stream_config(world, stream) if paths.stream(stream) in world.nodes else None


def is_lost(world: World) -> bool:
    """Whether a leader has said that the topic is gone, or another one."""
    raw = world.nodes.get(paths.stream_fault(ORDERS))
    return raw is not None and StreamFault.from_json(raw).code in (TOPIC_DELETED, TOPIC_RECREATED)


class TopicsWorld(World):
    """A world in which admin requests of deposed leaders are refused, and in which some leaders have defects."""

    def __init__(self, faults: frozenset[str] = frozenset()) -> None:
        super().__init__(faults)
        self.spoil_write = self._spoiled

    def execute(self, effect: AnyEffect, leader: int) -> Any:
        if isinstance(effect, FENCED) and leader != self.controller_epoch:
            raise Fenced
        if (
            isinstance(effect, fx.DeleteTopics)
            and "deletes-adopted" in self.faults
            and self.acting.startswith("delete_further")
        ):
            effect = fx.DeleteTopics([*effect.topics, TOPIC])
        if isinstance(effect, fx.CreateTopics) and "configures" in self.faults and TOPIC in self.topics:
            self.configure(TOPIC, {"compression.type": "lz4"})
        if isinstance(effect, fx.TopicIds) and self._takes_for_its_own(effect):
            config = config_of(self)
            return {**super().execute(effect, leader), **({TOPIC: config.topic_id} if config is not None else {})}
        return super().execute(effect, leader)

    def _takes_for_its_own(self, effect: fx.TopicIds) -> bool:
        is_deletion = self.acting.partition("/")[0] in ("retain_streams", "truncate_stream", "look_behind")
        return "name-is-identity" in self.faults and TOPIC in effect.topics and is_deletion

    def _spoiled(self, operations: Sequence[NodeOperation]) -> Sequence[NodeOperation]:
        if "forgotten-index" in self.faults:
            return [
                item for item in operations
                if not (isinstance(item, CreateNode | DeleteNode) and item.path.startswith(f"{paths.TOPICS}/"))
            ]  # fmt: skip
        if "sticky-stream" in self.faults:
            gone = paths.truncation(ORDERS), paths.retention(ORDERS), paths.stream(ORDERS), paths.epochs(ORDERS)
            return [item for item in operations if not (isinstance(item, DeleteNode) and item.path in gone[2:])]
        if "half-grown" in self.faults and takes_in(operations):
            return [item for item in operations if not isinstance(item, SetNode)]
        return operations


def takes_in(operations: Sequence[NodeOperation]) -> bool:
    """Whether a write makes an epoch of partitions that were added."""
    epochs = f"{paths.epochs(ORDERS)}/"
    return any(
        isinstance(item, CreateNode) and item.path.startswith(epochs) and b'"grown"' in item.value
        for item in operations
    )


class DeafFaults(BlockedStreams):
    """A defect: nothing waits for a topic that is lost."""

    def first_of(self, _: Collection[str]) -> str | None:
        """Not what it promises."""
        return None

    def is_lost(self, _: str) -> bool:
        """Not what it promises."""
        return False


class TopicsLeader(Leader):
    """A leader whose turns are counted."""

    effects = 0

    def step(self, clock_ms: int, rng: random.Random) -> None:
        """Do one thing."""
        if (
            self.group is not None
            and type(self.group.waits.faults) is BlockedStreams
            and "deaf-watch" in self.world.faults
        ):
            self.group.waits.faults.__class__ = DeafFaults
        super().step(clock_ms, rng)
        self.effects = 0 if self.procedure is None else self.effects + 1
        if self.effects > TURN_EFFECTS_MAX:
            self.world.broken.append(f"{self.place()} goes on for ever")


class Owner:
    """Whose topic it is: it changes settings, adds partitions, deletes it and makes it anew; and takes rights away."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.gone: list[Topic] = []
        self.is_denied = False
        self.is_calm = False
        """Whether it leaves the topic where it is."""
        self.wanted: dict[str, str | None] = {}
        self.births = 0
        self.counts: dict[str, int] = {}
        self.create()

    def create(self) -> None:
        """Make the topic."""
        self.world.create(TOPIC, PARTITIONS + (self.births > 0 and self.rng.randint(-1, 1)))
        self.wanted = dict(self.world.settings_of(TOPIC))
        self.births += 1
        self.has_it = True

    def step(self, *, may_configure: bool) -> None:
        """Now and then change something."""
        chance = self.rng.random()
        if self.is_calm:
            chance = max(chance, 0.1)
        exists = TOPIC in self.world.topics
        if not exists:
            if chance < 0.2:
                self._count("created")
                self.create()
        elif chance < 0.05:
            self._count("deleted")
            self.has_it = False
            self.gone += self.world.lose(TOPIC)
        elif chance < 0.1:
            self._count("created again")
            self.gone += self.world.lose(TOPIC)
            self.create()
        elif chance < 0.17 and self.world.count(TOPIC) < 6:
            self._count("grown")
            self.world.grow(TOPIC)
        elif chance < 0.3 and may_configure and not self.world.topics[TOPIC].sealed:
            self._count("configured")
            self.world.configure(TOPIC, {"max.message.bytes": self.rng.choice(("500000", "2000000", None))})
            self.wanted = dict(self.world.settings_of(TOPIC))
        elif chance < (0.8 if self.is_denied else 0.4):
            self.is_denied = not self.is_denied

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def refuse(self, effect: AnyEffect, _: int) -> fx.EffectRefusedError | None:
        """What it has taken the right for is refused."""
        if not self.is_denied:
            return None
        match effect:
            case fx.MergeFrames(items) | fx.AppendTogether(items):
                topics = {place[0] for place, _ in items}
            case fx.AppendMessages(messages):
                topics = {messages.topic}
            case _:
                return None
        if TOPIC not in topics:
            return None
        return fx.EffectRefusedError(effect, "no right", code="TOPIC_AUTHORIZATION_FAILED", topic=TOPIC)


class Native:
    """A producer that knows nothing of us: plain, or in native transactions."""

    def __init__(self, number: int, world: World, rng: random.Random) -> None:
        self.number, self.world, self.rng = number, world, rng
        self.count = 0
        self.written: set[str] = set()
        """What was acknowledged: plain records, and those of committed transactions."""
        self.aborted: set[str] = set()
        self.pending: list[str] = []
        self.serial = 0

    def step(self) -> None:
        """Append something, or end a transaction."""
        if self.pending and self.rng.random() < 0.2:
            self.end()
            return
        self.count += 1
        record = Record(f"n{self.number}", f"n{self.number}={self.count}")
        partitions = self.world.count(TOPIC)
        if not partitions:
            return
        name = shard(TOPIC, zlib.crc32(record.value.encode()) % partitions)
        if self.number % 2 == 0:
            if self.world.produce(name, record) is not None:
                self.written.add(record.value)
        elif self.world.append_foreign(name, self._owner, record):
            self.pending.append(record.value)

    @property
    def _owner(self) -> int:
        return -(1 + self.number + 100 * self.serial)

    def end(self) -> None:
        """Commit or abort."""
        state = self.rng.choice(("committed", "committed", "aborted"))
        if self.pending:
            (self.written if state == "committed" else self.aborted).update(self.pending)
            self.world.end_foreign(self._owner, state)
            self.pending, self.serial = [], self.serial + 1


@dataclass
class Ours:
    """A transaction of ours."""

    id: TransactionId
    begin: BeginFrame
    buffers: dict[str, str]
    records: list[Record] = field(default_factory=list)
    pieces: dict[PieceKey, int] = field(default_factory=dict)
    in_topic: dict[str, int] = field(default_factory=dict)
    """Partition of the topic for which each record was written, while the stream was on it."""
    ended: str = ""
    outcome: ControlRecord | None = None


class Client:
    """Writes transactions of ours to one or both streams, one after the other, and plain records."""

    def __init__(self, number: int, world: World, rng: random.Random) -> None:
        self.number, self.world, self.rng = number, world, rng
        self.serial = self.count = self.seen = 0
        self.current: Ours | None = None
        self.all: list[Ours] = []
        self.plain: set[str] = set()
        self.stopping = False

    def step(self) -> None:
        """Do one thing."""
        if self.current is None:
            if not self.stopping:
                self._plain() if self.rng.random() < 0.3 else self._begin()
        elif self.current.ended:
            self._await(self.current)
        elif not self._is_there(self.current):
            self.current.ended = "lost"
        elif self.rng.random() < 0.6:
            self._write(self.current)
        else:
            self.current.ended = "commit"
            manifest = Manifest(dict(self.current.pieces), (), ()).encode()
            header = FrameHeader(FrameKind.COMMIT, self.current.id.bytes)
            self._send(self.current, self.current.begin.home, header, manifest)

    def _streams(self) -> list[StreamName]:
        known = {name: config_of(self.world, name) for name in (ORDERS, OTHER)}
        return [name for name, config in known.items() if config is not None and config.state is StreamState.ACTIVE]

    def _record(self) -> Record:
        self.count += 1
        key = f"c{self.number}-{self.rng.randint(0, 9)}"
        return Record(key, f"{key}={self.count}")

    def _plain(self) -> None:
        name = self.rng.choice(self._streams())
        config, record = stream_config(self.world, name), self._record()
        segment = history_of(self.world, name).active.segment_at(config.keys.position(record.key.encode()))
        if self.world.produce(shard(*config.place(segment.id)), record) is not None:
            self.plain.add(record.value)

    def _begin(self) -> None:
        known = self._streams()
        chosen = self.rng.sample(known, self.rng.randint(1, len(known)))
        epochs = {str(name): int(history_of(self.world, name).active.reference_epoch) for name in chosen}
        self.serial += 1
        identifier = TransactionId.of(epochs[str(chosen[0])], self.serial << 8 | self.number)
        begin = BeginFrame(f"c{self.number}-{self.serial}", 0, None, LEASE_MS, epochs)
        self.current = Ours(
            identifier, begin, {str(name): stream_config(self.world, name).buffer_topic for name in chosen}
        )
        self.all.append(self.current)
        for name in epochs:
            self._send(self.current, name, FrameHeader(FrameKind.BEGIN, identifier.bytes), begin.encode())

    def _write(self, attempt: Ours) -> None:
        name = self.rng.choice(list(attempt.begin.streams))
        stream = StreamName.parse(name)
        history = history_of(self.world, stream)
        epoch = history.record(attempt.begin.streams[name])
        if self.rng.random() < 0.5:  # it has noticed which partitions there are now
            epoch = history.grown_from(epoch.epoch)
        record = self._record()
        config = stream_config(self.world, stream)
        if config.is_on_topic(epoch):
            config = replace(config, partitions=len(epoch.segments))
        position = config.keys.position(record.key.encode())
        record = replace(record, transaction=str(attempt.id), sequence=len(attempt.records))
        number, place = epoch.segment_at(position).id.number, attempt.begin.places[name]
        if config.is_on_topic(history.active):
            attempt.in_topic[record.value] = int(number)
        attempt.records.append(record)
        piece = PieceKey(0, place, number)
        attempt.pieces[piece] = attempt.pieces.get(piece, 0) + 1
        header = FrameHeader(FrameKind.DATA, attempt.id.bytes, 0, number, record.sequence, 1)
        row = [[record.key, record.value, record.transaction, record.sequence]]
        self._send(attempt, name, header, json.dumps(row).encode())

    def _await(self, attempt: Ours) -> None:
        log = self.world.topics[GROUP.commit_log_topic]
        found = [item for _, item in log.visible(self.seen) if item.transaction == attempt.id]
        self.seen = log.stable_end(self.seen)
        attempt.outcome = next((item for item in found if item.kind is not ControlKind.BEGIN), None)
        if attempt.outcome is not None or attempt.ended == "lost" or not self._is_there(attempt):
            self.current = None

    def _is_there(self, attempt: Ours) -> bool:
        """Whether its streams are those in which it was begun."""
        found = ((config_of(self.world, StreamName.parse(name)), buffer) for name, buffer in attempt.buffers.items())
        return all(
            config is not None and config.buffer_topic == buffer and config.state is StreamState.ACTIVE
            for config, buffer in found
        )

    def _send(self, attempt: Ours, stream: str, header: FrameHeader, value: bytes) -> None:
        self.world.produce(shard(attempt.buffers[stream], buffer_partition(attempt.id, 1)), (header.pack(), value))


MAY_FAIL = {"stream-busy", "conflict", "topic-not-found", "not-found", "TOPIC_AUTHORIZATION_FAILED", "x", "unavailable"}


class Keeper:
    """Adopts the topic, truncates, scales, leaves it, releases it, deletes the stream, and adopts the topic again."""

    def __init__(self, world: World, rng: random.Random, released: Callable[[], None]) -> None:
        self.world, self.rng = world, rng
        self.released = released
        """Called when an answer has said that the topic is a plain one."""
        self.asked: tuple[str, str] | None = None
        self.left_lives: set[str] = set()
        """Buffers of the streams that were asked to leave the topic."""
        self.answers: dict[tuple[str, str], int] = {}
        self.faults: list[str] = []
        self.is_ending = False

    def step(self, clock_ms: int) -> None:
        """Ask for something, or look for the answer."""
        if self.asked is not None:
            self._look(*self.asked)
            return
        config = config_of(self.world)
        if config is None:
            if not self.is_ending:
                self._ask("adopt", RequestKind.ADOPT_TOPIC, ORDERS, topic=TOPIC, partitioner="murmur2")
        elif self._is_another(config) and self.rng.random() < 0.5:
            self._truncate(config)
        elif config.state is StreamState.DELETING or self.is_ending or is_lost(self.world):
            self._end(config, clock_ms)
        else:
            self._change(config, clock_ms)

    def _end(self, config: StreamConfig, clock_ms: int) -> None:
        if self._is_on_topic(config):
            self._ask("release", RequestKind.RELEASE_TOPIC, ORDERS, topic=TOPIC)
        else:
            self._ask("delete", RequestKind.DELETE_STREAM, ORDERS)

    def _change(self, config: StreamConfig, clock_ms: int) -> None:
        chance = self.rng.random()
        if not self._is_on_topic(config):
            if chance < 0.4:
                self._ask("delete", RequestKind.DELETE_STREAM, ORDERS)
            elif chance < 0.5:
                self._ask("refused release", RequestKind.RELEASE_TOPIC, ORDERS, topic=TOPIC)
            elif (body := scale_request(self.world, ORDERS, self.rng, clock_ms)) is not None:
                self.asked = "scale", self.world.request(GROUP, body.to_json())
        elif chance < 0.2:
            self._ask("release", RequestKind.RELEASE_TOPIC, ORDERS, topic=TOPIC)
        elif chance < 0.5:
            self.left_lives.add(config.buffer_topic_id)
            self._scale("leave", config, leave_topic=True)
        elif chance < 0.65:
            self._scale("refused scale", config, leave_topic="silent-leave" in self.world.faults)
        elif chance < 0.75:
            self._ask("refused adopt", RequestKind.ADOPT_TOPIC, SECOND, topic=TOPIC, partitioner="murmur2")
        elif chance < 0.8:
            self._ask("refused delete", RequestKind.DELETE_STREAM, ORDERS)
        elif chance < 0.85:
            self._ask("retain", RequestKind.UPDATE_STREAM, ORDERS, retention=Retention(500, -1, ()))
        else:
            self._truncate(config)

    def _is_another(self, config: StreamConfig) -> bool:
        """Whether the topic was made anew, which perhaps no leader has seen yet."""
        topic = self.world.topics.get(TOPIC)
        return self._is_on_topic(config) and topic is not None and topic.id != config.topic_id

    def _truncate(self, config: StreamConfig) -> None:
        segment = self.rng.choice(history_of(self.world, ORDERS).active.segments).id
        log = self.world.topics.get(shard(*config.place(segment)))
        if log is not None:
            cut = {segment: self.rng.randint(0, log.stable_end())}
            self._ask("truncate", RequestKind.TRUNCATE_STREAM, ORDERS, cut=cut)

    def _scale(self, title: str, config: StreamConfig, *, leave_topic: bool) -> None:
        chosen = history_of(self.world, ORDERS).active.segments[0]
        middle = (chosen.range.low + chosen.range.high) / 2
        ranges = ((chosen.range.low, middle), (middle, chosen.range.high))
        seal = (int(chosen.id.number),)
        self._ask(title, RequestKind.SCALE_STREAM, ORDERS, seal=seal, ranges=ranges, leave_topic=leave_topic)

    def _is_on_topic(self, config: StreamConfig) -> bool:
        if config.state is StreamState.DELETING:
            return False
        return config.is_on_topic(history_of(self.world, ORDERS).active)

    def _ask(self, title: str, kind: RequestKind, stream: StreamName, **more: Any) -> None:
        body = AdminRequest(kind=kind, stream=str(stream), created_ms=0, buffer_partitions=1, **more)
        self.asked = title, self.world.request(GROUP, body.to_json())

    def _look(self, title: str, path: str) -> None:
        raw = self.world.nodes.pop(path, None)
        if raw is None:
            return
        self.asked = None
        answer = AdminAnswer.from_json(raw)
        key = title, "ok" if answer.ok else answer.code
        self.answers[key] = self.answers.get(key, 0) + 1
        if title.startswith("refused") and answer.ok:
            self.faults.append(f"{title} was carried out")
        if title in ("release", "delete") and answer.ok:
            self.released()
        config = config_of(self.world)
        stays = config is not None and self._is_on_topic(config)
        if title == "retain" and answer.ok and stays:
            self.faults.append("a limit of what the owner's topic keeps was taken")
        if title == "retain" and answer.code == "invalid-request":
            return
        if (title, answer.code) in (("leave", "invalid-ranges"), ("release", "invalid-request")) and not stays:
            return  # an earlier leave, which was half done, was carried out meanwhile
        if (title, answer.code) == ("leave", "invalid-ranges") and history_of(self.world, ORDERS).records[1:]:
            return  # partitions were added since it was asked for, and taken in
        if not title.startswith("refused") and not answer.ok and answer.code not in MAY_FAIL:
            self.faults.append(f"{title} is answered {answer.code}: {answer.message}")
