"""Seeded simulation of members that mean harm: they damage the counter of ids, and forge transactions with others.

Histories are those of :mod:`coordinator.tests.test_simulation`, without administrators. Clients take their ids from the
group's counter, into which an outsider writes whatever he likes below what clients were told is used, or beyond what
they may use; and he begins transactions with ids that nobody gave out. No promise may be broken by that, no id given
out twice, and honest clients go on. ``run(seed)`` repeats a history exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from coordinator.tests.sim_counting import CountingClient
from coordinator.tests.sim_run import BUFFER_PARTITIONS, GROUP, STREAMS, Run
from coordinator.tests.sim_truncation import history_of
from coordinator.tests.sim_world import shard
from rollbridge.base.effects import Steps
from rollbridge.base.ids import COUNTER_MAX, NOT_GIVEN_OUT, CounterCheckpoint, TransactionId, counter_of, parse_number
from rollbridge.base.ids import ISSUED_MAX as COUNT_MAX
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, buffer_partition
from rollbridge.commitlog.control import EXPIRED, ControlKind, ControlRecord
from rollbridge.commitlog.outcomes import decode_terminated
from rollbridge.errors import CorruptDataError
from rollbridge.metadata import paths
from rollbridge.metadata.journal import split
from rollbridge.metadata.records import Group, SetNode
from rollbridge_coordinator.core import loop as agenda
from rollbridge_coordinator.core.effects import ReadCounter, Write, read_node
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.history import counters

UNDONE = 211
"""A history in which a leader dies after it has undone a rolling commit that had closed active segments."""
STEPS_APART = 0.01
"""How often the outsider acts."""


class DamagedRun(Run):
    """One simulated history, with an outsider."""

    is_hostile = False

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.administrators = []
        self.clients = [CountingClient(f"d{number}", self.world, STREAMS, self.rng) for number in range(4)]
        self.refusals.end()
        self.damaged = 0
        self.forged: set[TransactionId] = set()
        self.guessed: set[TransactionId] = set()
        """Those of them that would have been given out; a leader that comes later takes them for given."""
        self.is_hostile = True

    def _lead(self) -> None:
        if self.is_hostile and self.rng.random() < STEPS_APART and not self.clients[0].stopping:
            self._damage() if self.rng.random() < 0.5 else self._forge()
        super()._lead()

    def _damage(self) -> None:
        known = self._known()
        below = [b"%d" % self.rng.randrange(known.counter_floor)] if known.counter_floor else []
        above = [b"%d" % (known.counter_ceiling + self.rng.randrange(1, 1 << 90))]
        rubbish = [b"", b"-1", b"1e9", b"\xff", b" 7", b"9" * 5_000, str(1 << 96).encode()]
        path = self.rng.choice([paths.counter(GROUP), paths.counter(GROUP), paths.TRANSACTION_COUNTER])
        if path in self.world.nodes:
            self.world.nodes[path] = self.rng.choice([*rubbish, *below * 4, *above * 3])
            self.damaged += 1

    def _forge(self) -> None:
        """Begin a transaction with an id that was not given out, in one buffer or in all."""
        known = self._known()
        raw = self.world.nodes.get(paths.counter(GROUP))
        free = parse_number(raw, known.counter_ceiling, known.counter_floor)
        if not known.number or free is None:
            return
        serial = len(self.forged)
        far = self.rng.choice([1 << 40, 1 << 50, COUNT_MAX])
        other = self.rng.choice([known.number + 1, (1 << 32) - 1])
        soon = free + 200 + serial  # later than what clients reserve before a leader looks
        choices = [counter_of(known.number, free + far + serial), counter_of(other, serial), COUNTER_MAX - serial]
        identifier = TransactionId.of(0, self.rng.choice([*choices, counter_of(known.number, soon)]))
        if identifier.counter == counter_of(known.number, soon):
            self.guessed.add(identifier)
        epochs = {str(item): int(history_of(self.world, item).active.reference_epoch) for item in STREAMS}
        begin = BeginFrame("mallory", 0, None, self.clients[0].lease_ms, epochs)
        for stream in STREAMS:
            topic = shard(stream.buffer_topic(), buffer_partition(identifier, BUFFER_PARTITIONS[stream]))
            self.world.produce(topic, (FrameHeader(FrameKind.BEGIN, identifier.bytes).pack(), begin.encode()))
        self.forged.add(identifier)

    def _known(self) -> Group:
        return Group.from_json(self.world.nodes[paths.group(GROUP)])

    def go(self) -> list[str]:
        broken = super().go()
        again = {f"transaction {identifier} has two outcomes" for identifier in self.forged}
        broken = [item for item in broken if item not in again]
        used = [attempt.id for client in self.clients for attempt in client.attempts]
        if len(used) != len(set(used)):
            broken.append("an id was given out twice")
        log = [record for _, record in self.world.topics[GROUP.commit_log_topic].visible()]
        for identifier in self.forged:
            broken += forged_faults(identifier, log, may_expire=identifier in self.guessed)
        highest = counter_of(self._known().number, self._known().counter_ceiling)
        for key, value in split(self.world.latest(GROUP.terminated_topic))[0].items():
            _, horizon = decode_terminated(value)
            if horizon > highest:
                broken.append(f"the horizon of {key!r} is {horizon:#x}, above all ids")
        if not all(client.attempts for client in self.clients):
            broken.append("a client could begin nothing")
        return broken


def forged_faults(identifier: TransactionId, log: list[ControlRecord], *, may_expire: bool) -> list[str]:
    """What is wrong with what became of a forged transaction; a leader that meets it again refuses it again."""
    ends = [record for record in log if record.transaction == identifier and record.kind is not ControlKind.BEGIN]
    reasons = (NOT_GIVEN_OUT, EXPIRED) if may_expire else (NOT_GIVEN_OUT,)
    if ends and all(item.kind is ControlKind.ABORT and item.reason in reasons for item in ends):
        return []
    return [f"forged {identifier} ended as {[(item.kind.name, item.reason) for item in ends]}"]


def check(seeds: Iterable[int]) -> tuple[int, int]:
    """Run histories, none of which may break a promise; gives how often something was damaged, and forged."""
    damaged = forged = 0
    for seed in seeds:
        run = DamagedRun(seed)
        broken = run.go()
        assert not broken, f"seed {seed}: {broken[:5]}"
        damaged += run.damaged
        forged += len(run.forged)
    return damaged, forged


def test_no_id_is_given_out_twice_whatever_is_written_to_the_counter() -> None:
    damaged, forged = check([0, 1, 2, UNDONE])
    assert damaged >= 10, damaged
    assert forged >= 10, forged


@pytest.mark.long
def test_no_id_is_given_out_twice_in_many_histories() -> None:
    damaged, forged = check(range(3, 53))
    assert damaged >= 100, damaged
    assert forged >= 100, forged


def trust_the_counter(group: GroupState) -> Steps[None]:
    """Believe what the node holds, and let clients do so too."""
    path = paths.counter(GROUP)
    found = yield from ReadCounter(path)
    record = Group.from_json((yield from read_node(paths.group(GROUP))) or b"")
    assert found is not None
    value = parse_number(found[0], COUNT_MAX, 1)
    trusting = replace(record, counter_floor=0, counter_ceiling=COUNT_MAX)
    yield from Write([SetNode(paths.group(GROUP), trusting.to_json()), SetNode(path, b"%d" % (value or 1))])
    group.counter.note = CounterCheckpoint(record.number, value or 1, found[1] + 1)


def believe_ids(*_: object) -> Steps[None]:
    """Take every id for one that was given out."""
    yield from ()


def raise_horizons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have forged ids raise what is said to be forgotten."""
    monkeypatch.setattr("rollbridge_coordinator.commit.outcome_store.OutcomeStore.believe", lambda *_: None)


DEFECTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "trusts-the-counter": lambda patch: patch.setattr(counters, "look_at_counter", trust_the_counter),
    "believes-ids": lambda patch: patch.setattr(agenda, "check_given", believe_ids),
    "raises-horizons": raise_horizons,
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_checks_catch_a_defect(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DEFECTS[defect](monkeypatch)
    for seed in range(20):
        try:
            if DamagedRun(seed).go():
                return
        except (AssertionError, CorruptDataError):  # nothing comes to rest any more, or counts are beyond all bounds
            return
    raise AssertionError(f"no run has noticed the defect {defect}")
