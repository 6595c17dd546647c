"""Administration in the simulation: streams are created and deleted, across takeovers, and the answers are held to it.

Names are used again, and no two lives of a stream share an epoch. Streams that exist from the beginning have so many
epochs that their nodes do not fit into one multi of this world's ZooKeeper.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import BROKERS, World
from rollbridge.metadata import paths
from rollbridge.metadata.records import NodeOperation, SetNode
from rollbridge.metadata.requests import AdminAnswer, AdminRequest, RequestKind
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import even_ranges
from rollbridge.stream.names import GroupName, StreamName

ADMIN_DEFECTS = ("denying-successor", "unbounded-multi", "stubborn-request")
OLD_EPOCHS = 60


def make_old_stream(world: World, group: GroupName, name: StreamName) -> None:
    """A stream with more epochs than one multi can delete, with its topics."""
    history = EpochHistory.create(even_ranges(1), 0)
    for epoch in range(1, OLD_EPOCHS):
        sealed = dict.fromkeys(history.active.segment_ids, 0)
        record = history.plan_scale([int(item.id.number) for item in history.active.segments], even_ranges(1), epoch)
        history = history.with_records(replace(record, sealed_ends=sealed))
    world.ensure(paths.epochs(name))
    config = StreamConfig(name=name, group=group, created_ms=0, buffer_topic_id=world.create(name.buffer_topic()))
    world.nodes[paths.stream(name)] = config.to_json()
    for record in history.records:
        world.nodes[paths.epoch(name, record.epoch)] = record.to_json()
        for item in record.segment_ids:
            world.create(name.segment_topic(item))


class Administrator:
    """Asks for one stream after the other to be created and deleted; now and then it goes without an answer."""

    def __init__(self, name: str, world: World, group: GroupName, old: Sequence[StreamName], seed: int) -> None:
        self.name = name
        self.world = world
        self.group = group
        self.rng = random.Random(f"{name}{seed}")
        self.names = list(old)
        self.serial = 0
        self.is_possible = True
        """Whether Kafka can do what was asked for last."""
        self.is_patient = False
        """Whether it waits for each answer; in the end it does, so one that is never given is noticed."""
        self.asked: tuple[RequestKind, StreamName, str] | None = None
        self.answered: list[tuple[RequestKind, AdminAnswer]] = []
        self.ended: dict[StreamName, int] = {}
        """By name, the last epoch of the stream that was deleted last."""
        self.free: list[StreamName] = []
        """Names of streams that were deleted."""
        self.faults: list[str] = []

    @property
    def idle(self) -> bool:
        """Whether it waits for nothing."""
        return self.asked is None

    def step(self, clock_ms: int) -> None:
        """Ask for something, or look for the answer."""
        if self.asked is not None:
            self._look(*self.asked)
        elif self.names and self.rng.random() < 0.5:
            self._ask(RequestKind.DELETE_STREAM, self.names.pop(), clock_ms)
        else:
            self.serial += 1
            name = StreamName(self.group.scope, f"scratch-{self.name}{self.serial}")
            if self.free and self.rng.random() < 0.5:
                name = self.free.pop()
            self._ask(RequestKind.CREATE_STREAM, name, clock_ms)

    def _ask(self, kind: RequestKind, name: StreamName, clock_ms: int) -> None:
        self.is_possible = kind is RequestKind.DELETE_STREAM or self.rng.random() < 0.7
        factor = -1 if self.is_possible else BROKERS + 2
        if kind is RequestKind.DELETE_STREAM:
            self.ended[name] = history_of(self.world, name).active.epoch
        body = AdminRequest(kind=kind, stream=str(name), segments=2, created_ms=clock_ms, replication_factor=factor)
        self.asked = kind, name, self.world.request(self.group, body.to_json())

    def _look(self, kind: RequestKind, name: StreamName, path: str) -> None:
        request = path.replace(paths.answers(self.group), paths.requests(self.group))
        raw = self.world.nodes.pop(path, None)
        if raw is None:
            if request in self.world.nodes and not self.is_patient and self.rng.random() < 0.002:
                del self.world.nodes[request]  # its process has died, and its session ended; nobody looks any more
                self.asked = None
            return
        answer = AdminAnswer.from_json(raw)
        self.answered.append((kind, answer))
        self.asked = None
        exists = paths.stream(name) in self.world.nodes
        if not self.is_possible:
            if answer.ok or exists or str(BROKERS) not in answer.message:
                self.faults.append(f"{kind} of {name}, which Kafka refuses, was answered {answer}")
        elif not answer.ok:
            self.faults.append(f"{kind} of {name}, which nobody else has touched, is denied: {answer.message}")
        elif exists is not (kind is RequestKind.CREATE_STREAM):
            self.faults.append(f"{kind} of {name} was answered, and the stream {'exists' if exists else 'is missing'}")
        elif exists:
            self.names.append(name)
            born = history_of(self.world, name).born
            if born <= self.ended.get(name, -1):
                self.faults.append(f"{name} begins with epoch {born} again, which its former life has used")
        elif name.buffer_topic() in self.world.topics:
            self.faults.append(f"{name} was deleted, but not its buffer")
        else:
            self.free.append(name)


def denying(world: World, operations: Sequence[NodeOperation]) -> Sequence[NodeOperation]:
    """A defect: the mark of a deletion does not know who asked, so another leader that ends it cannot answer."""
    if "denying-successor" not in world.faults:
        return operations
    return [
        SetNode(item.path, replace(StreamConfig.from_json(item.value), deletion_requests=()).to_json())
        if isinstance(item, SetNode) and b'"DELETING"' in item.value
        else item
        for item in operations
    ]
