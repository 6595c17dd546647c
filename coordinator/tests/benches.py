"""Bench of one leader with snapshots of its buffers."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Self

from hypothesis import strategies as st

from coordinator.tests.sim_actors import Leader
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import World
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, encode_abort
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.names import (
    GroupName,
    StreamName,
    snapshot_indexes_topic,
    snapshot_segments_topic,
    snapshot_topic,
)
from rollbridge_coordinator.core.waits import StaleStateError

GROUP = GroupName("sales")


STREAMS = [StreamName("sales", "orders"), StreamName("sales", "payments")]


INDEXES, SEGMENTS, SINGLE = snapshot_indexes_topic("sales"), snapshot_segments_topic("sales"), snapshot_topic("sales")


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "data", "commit", "abort", "aborted", "late", "late", "lead", "rest"]),
        st.integers(0, 3),
        st.sampled_from(STREAMS),
    ),
    min_size=5,
    max_size=20,
)


class Bench:
    """A world with two streams, clients that may do anything with six transactions, and a leader."""

    def __init__(self, world: World, clock_ms: int = 0) -> None:
        self.world = world
        self.rng = random.Random(1)
        self.clock_ms = clock_ms
        self.counters = count(1)
        self.open: dict[int, tuple[TransactionId, BeginFrame]] = {}
        self.late: set[TransactionId] = set()
        self.leader = Leader(self.world, GROUP)

    @classmethod
    def fresh(cls, faults: frozenset[str] = frozenset()) -> Self:
        """With a world of its own."""
        world = World(faults)
        world.deletes = False  # what has been truncated needs no snapshot
        for path in (paths.GROUPS, paths.SCOPES, paths.requests(GROUP), paths.answers(GROUP)):
            world.ensure(path)
        world.nodes[paths.group(GROUP)] = Group(GROUP, 0).to_json()
        for stream in STREAMS:
            request = AdminRequest(kind=RequestKind.CREATE_STREAM, stream=str(stream), segments=1, created_ms=0)
            world.request(GROUP, request.to_json())
        bench = cls(world)
        bench.rest()
        return bench

    def rest(self) -> None:
        """Let the leader read and do everything that there is to do, snapshots included."""
        for _ in range(40):
            self.clock_ms += 100
            self.lead()

    def lead(self, effects: int = 30) -> None:
        """Let the leader read something of each buffer, and do something."""
        for _ in range(effects):
            self.leader.step(self.clock_ms, self.rng)
            if self.leader.procedure is None:
                break

    def take_over(self) -> None:
        """Another leader takes over and finishes what was left."""
        self.leader = Leader(self.world, GROUP)
        while not self.leader.pending_done:
            try:
                self.leader.step(self.clock_ms, self.rng)
            except StaleStateError:
                self.leader = Leader(self.world, GROUP)

    def do(self, operation: str, number: int, stream: StreamName) -> None:
        """What a client does, or the leader; what makes no sense does nothing."""
        self.clock_ms += 300
        if operation == "lead":
            self.lead()
        elif operation == "rest":
            self.rest()
        elif operation == "aborted":
            self.do("begin", number, stream)
            self.do("abort", number, stream)
        elif operation == "begin":
            epochs = {str(item): int(history_of(self.world, item).active.epoch) for item in (stream, *STREAMS)}
            begin = BeginFrame("c", 0, None, 1_000_000, epochs)
            self.open[number] = (TransactionId.of(0, next(self.counters)), begin)
            self.send(number, FrameKind.BEGIN, str(stream), begin.encode())
        elif number in self.open:
            identifier, begin = self.open[number]
            match operation:
                case "late" if identifier not in self.late:
                    self.late.add(identifier)
                    self.send(number, FrameKind.BEGIN, list(begin.streams)[1], begin.encode())
                case "data":
                    batch = json.dumps([["k", f"{self.clock_ms}", str(identifier), 0]]).encode()
                    header = FrameHeader(FrameKind.DATA, identifier.bytes, 0, 0, self.clock_ms, 1)
                    self.world.produce(StreamName.parse(begin.home).buffer_topic(), (header.pack(), batch))
                case "commit":
                    self.send(number, FrameKind.COMMIT, begin.home, Manifest({}).encode())
                case "abort":
                    self.send(number, FrameKind.ABORT, begin.home, encode_abort("no"))

    def send(self, number: int, kind: FrameKind, stream: str, value: bytes) -> None:
        """Write a frame to a stream's buffer."""
        header = FrameHeader(kind, self.open[number][0].bytes)
        self.world.produce(StreamName.parse(stream).buffer_topic(), (header.pack(), value))
