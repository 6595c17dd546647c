"""A member of the group that means harm, in the simulation: whatever it writes, no leader stumbles over it.

What its frames and requests may do to others of the same group is another matter; here only a term that ends with an
exception which is no refusal counts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from coordinator.tests.scenes import ORDERS, Scene
from coordinator.tests.sim_run import BUFFER_PARTITIONS, GROUP, STREAMS, Run
from coordinator.tests.sim_world import shard
from integration_tests.hostile_content import Content
from rollbridge.buffer.frames import FrameHeader, FrameKind, Manifest
from rollbridge.metadata import paths
from rollbridge_coordinator.commit import plan


class Deaf(list[str]):
    """Nobody counts broken promises: the transactions of others in the group can be changed by its frames."""

    def append(self, _: str) -> None:
        """Forget it."""

    def extend(self, _: Iterable[str]) -> None:
        """Forget them."""


class HostileRun(Run):
    """A simulated history in which somebody writes frames, requests and counters of any content."""

    def __init__(self, seed: int) -> None:
        self.content: Content | None = None
        super().__init__(seed)
        self.world.broken = Deaf()
        right = self.world.records_of
        # Batches of hers, which brokers would refuse, or take: they are no records of this world.
        self.world.records_of = lambda batch: right(batch) if batch.startswith(b"[[") else ()
        self.choice = random.Random(f"hostile {seed}")
        streams = [str(item) for item in STREAMS]
        self.content = Content(self.choice, streams[0], streams[1:], ["c0", "c1"], ["group-0"], invents=seed % 2 == 0)

    def _lead(self) -> None:
        if self.content is not None:
            self._attack(self.content)
        super()._lead()

    def _attack(self, content: Content) -> None:
        content.ids += [
            client.current.id.bytes
            for client in self.clients[:3]
            if client.current is not None and client.current.id.bytes not in content.ids
        ]
        if self.choice.random() < 0.05:
            topic = STREAMS[0].buffer_topic(0)
            for _ in range(self.choice.choice((1, 3))):
                number = self.choice.randrange(BUFFER_PARTITIONS[STREAMS[0]])
                self.world.produce(shard(topic, number), content.frame())
        for _ in range(self.choice.choice((1, 3, 10)) if self.choice.random() < 0.02 else 0):
            self.world.request(GROUP, content.request([str(item) for item in STREAMS]))
        if self.choice.random() < 0.002:
            self.world.nodes[paths.counter(GROUP)] = self.choice.choice((b"x", b"", b"-5", b"9" * 40, b"1" * 5_000))

    def _check_deletion(self, topic: str, before: int) -> None:
        """Frames that mean nothing are deleted at any time."""

    def _check_removal(self, path: str, segments: object) -> None:
        """Likewise."""

    def _check_drop(self, path: str, value: bytes) -> None:
        """Likewise."""


@pytest.mark.parametrize("seed", range(2))
def test_no_leader_stumbles_over_what_a_member_writes(seed: int) -> None:
    HostileRun(seed).run_on()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_no_leader_stumbles_over_what_many_members_write(seed: int) -> None:
    HostileRun(seed).run_on()


def call_empty_ones_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has sent many bytes is merged beside the line, though its commit names none of them."""
    right = plan.is_large
    monkeypatch.setattr(plan, "is_large", lambda group, item: right(group, item) or not item.written_segments())


def commit_nothing_of_much(scene: Scene) -> None:
    """Send more bytes than what is merged beside the line has, and commit none of them."""
    found = scene.begin(ORDERS)
    rows = [["k", "v" * 1_000, str(found), 1]]
    header = FrameHeader(FrameKind.DATA, found.bytes, 1, 0, 1, 1)
    scene.world.produce(ORDERS.buffer_topic(), (header.pack(), json.dumps(rows).encode()))
    commit = FrameHeader(FrameKind.COMMIT, found.bytes)
    scene.world.produce(ORDERS.buffer_topic(), (commit.pack(), Manifest({}).encode()))
    scene.until(lambda: scene.outcome(found) is not None)
    assert scene.visible(found) == 0
    scene.others_go_on()


def test_a_commit_that_names_none_of_many_bytes_is_not_large(monkeypatch: pytest.MonkeyPatch) -> None:
    commit_nothing_of_much(Scene())
    call_empty_ones_large(monkeypatch)
    with pytest.raises(ValueError, match=r"min\(\)|empty"):
        commit_nothing_of_much(Scene())
