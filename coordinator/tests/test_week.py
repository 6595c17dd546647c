"""A week of simulated life leaves bounded state in Kafka and ZooKeeper."""

from __future__ import annotations

import pytest

from coordinator.tests.sim_actors import scale_request
from coordinator.tests.sim_checks import faults
from coordinator.tests.sim_truncation import audit, history_of
from coordinator.tests.test_simulation import GROUP, STREAMS, Run
from rollbridge.model import paths
from rollbridge.model.ids import TransactionId
from rollbridge.model.records import Retention, Truncation
from rollbridge.model.requests import AdminRequest, RequestKind

HOUR_MS = 3_600_000
SHIFT_MS = 4 * HOUR_MS
SHIFTS_A_DAY = 6
STEPS = 80


class Week(Run):
    """Every four hours some work; leaders crash, and clients die without taking their answers."""

    shift_ms = SHIFT_MS

    def keep_streams(self, kept_ms: int) -> None:
        """Keep the records of all streams for so long, and until the auditor has read them."""
        for stream in STREAMS:
            policy = AdminRequest(
                kind=RequestKind.UPDATE_STREAM,
                stream=str(stream),
                retention=Retention(kept_ms, -1, ("auditor",)),
                created_ms=0,
            )
            self.world.request(GROUP, policy.to_json())

    def live(self) -> dict[str, int]:
        """How much there is in Kafka and ZooKeeper, without the commit log, see docs/operations.md."""
        topics = {name: log for name, log in self.world.topics.items() if name != GROUP.commit_log_topic}
        data = [log for name, log in topics.items() if ".segment-" in name or ".transaction-buffer" in name]
        compacted = [name for name, log in topics.items() if log not in data]
        nodes = self.world.nodes
        lost = [Truncation.from_json(nodes[path]) for item in STREAMS if (path := paths.truncation(item)) in nodes]
        return {
            "records": sum(len(log.entries) - log.start for log in data),
            "keys": sum(len(self.world.latest(name)) for name in compacted),
            "topics": len(topics),
            "answers": len(self.world.children(paths.answers(GROUP))),
            "parts": len(self.world.children(f"{paths.group(GROUP)}/parts")),
            "epochs": sum(len(self.world.children(paths.epochs(item))) for item in STREAMS),
            "removed": sum(len(item.removed) for item in lost),
            "nodes": len(nodes),
            "bytes": sum(len(path) + len(value) for path, value in nodes.items()),
        }

    def shift(self, number: int) -> None:
        """A burst of work, rest, and the time until the next."""
        for client in self.clients:
            client.stopping = False
        if number % 2 == 0:
            body = scale_request(self.world, STREAMS[number // 2 % 2], self.rng, self.clock_ms)
            if body is not None:
                self.world.request(GROUP, body.to_json())
        orphan = TransactionId.of(0, 1 << 40 | number)
        self.world.ensure(paths.parts(GROUP, orphan))
        for _ in range(STEPS):
            self.clock_ms += self.rng.randint(1, 20)
            chance = self.rng.random()
            if chance < 0.01:
                self._crash()
            elif chance < 0.1:
                audit(self.world, self.rng.choice(STREAMS), self.rng)
            elif chance < 0.5:
                self.rng.choice(self.clients).step(self.clock_ms, GROUP.commit_log_topic)
            else:
                self._lead()
        for client in self.clients:
            client.stopping = True
        self._until(self._quiet)
        self.clock_ms += self.shift_ms
        for _ in range(20):  # in that time the auditor reads everything
            for stream in STREAMS:
                audit(self.world, stream, self.rng)


@pytest.mark.long
def test_a_week_leaves_bounded_state() -> None:
    run = Week(7)
    run.keep_streams(12 * HOUR_MS)
    seen = []
    for number in range(7 * SHIFTS_A_DAY):
        run.shift(number)
        seen.append(run.live())
    assert faults(run.world, GROUP, STREAMS, run.clients, run.refusals) == []
    assert len(run.world.removed) > 20
    assert min(history_of(run.world, item).first for item in STREAMS) > 5
    early, late = seen[SHIFTS_A_DAY : 3 * SHIFTS_A_DAY], seen[-2 * SHIFTS_A_DAY :]
    for what in seen[0]:
        # What waits for a crash to be mended, or for a segment before it, comes and goes; what leaks only comes.
        before, last = min(item[what] for item in early), min(item[what] for item in late)
        assert last <= 2 * before + 2, f"{what} grow: {before} on the second and third day, {last} on the last two"
