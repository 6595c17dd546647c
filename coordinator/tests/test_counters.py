"""A group's counter: numbered once, believed within bounds, set right, and never a reason for a leader to give up."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.tests.refusals import raises_code
from coordinator.tests.makers import Bench
from coordinator.tests.sim_world import World
from rollbridge.base.effects import Steps, run
from rollbridge.base.ids import (
    COUNTER_MAX,
    JUMP,
    NOT_GIVEN_OUT,
    SHARED_MAX,
    STRIDE,
    CounterCheckpoint,
    TransactionId,
    counter_of,
)
from rollbridge.base.ids import ISSUED_MAX as COUNT_MAX
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind
from rollbridge.buffer.table import State
from rollbridge.errors import CorruptDataError
from rollbridge.metadata import paths
from rollbridge.metadata.records import Group
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.core.state import GroupState
from rollbridge_coordinator.core.waits import StaleStateError
from rollbridge_coordinator.history.counters import check_given, keep_counter, look_at_counter, open_counter
from rollbridge_coordinator.history.takeover import check_again

GROUP = GroupName("sales")
COUNTER, SHARED = paths.counter(GROUP), paths.TRANSACTION_COUNTER


class Scene:
    """A world with a group, whose leaders come and go."""

    def __init__(self, name: GroupName = GROUP, world: World | None = None) -> None:
        self.world = world or World()
        self.name = name
        self.world.ensure(paths.GROUPS)
        self.world.ensure(SHARED)
        self.world.nodes[SHARED] = b"5001"
        self.world.nodes[paths.group(name)] = Group(name, 0, "log").to_json()
        self.world.create(name.terminated_topic, 1)
        self.journal: dict[str, bytes] = {}
        self.lead()

    def lead(self) -> None:
        """A new leader takes over."""
        self.world.controller_epoch += 1
        self.world.identity = self.world.controller_epoch
        self.world.ensure(paths.counter(self.name))
        fold = BufferFold(BufferLimits(), lambda *_: None)
        self.group = GroupState(self.name, self.world.controller_epoch, fold)
        self.group.journal.nodes = dict(self.journal)
        self.run(open_counter(self.group))

    def run(self, procedure: Steps[Any]) -> None:
        """Carry a procedure out."""
        run(procedure, lambda effect: self.world.execute(effect, self.world.controller_epoch))
        self.journal = dict(self.group.journal.nodes)

    @property
    def record(self) -> Group:
        """What ZooKeeper holds of the group."""
        return Group.from_json(self.world.nodes[paths.group(self.name)])

    @property
    def count(self) -> int:
        """What the counter holds."""
        return int(self.world.nodes[paths.counter(self.name)])


def test_groups_get_numbers_that_no_other_has_and_keep_them() -> None:
    one = Scene()
    two = Scene(GroupName("sales", "bobs"), one.world)
    assert (one.record.number, two.record.number) == (1, 2)
    assert (one.count, two.count) == (1, 1)
    one.lead()
    assert one.record.number == 1
    assert one.record.former_numbers == ()
    assert int(one.world.nodes[paths.GROUP_NUMBERS]) == 3


def test_a_group_that_is_deleted_and_made_anew_gets_another_number() -> None:
    scene = Scene()
    for path in [path for path in scene.world.nodes if path.startswith(paths.group(GROUP))]:
        del scene.world.nodes[path]
    again = Scene(GROUP, scene.world)
    assert again.record.number == 2


def test_an_older_group_begins_beyond_what_the_shared_counter_gave_out() -> None:
    scene = Scene()
    scene.world.nodes[paths.group(GROUP)] = Group(GROUP, 0, "log").to_json()
    scene.journal = {SHARED: b"4000"}
    scene.lead()
    assert scene.record.number == 2
    assert scene.count == 5001 + JUMP
    scene.world.nodes[paths.group(GROUP)] = Group(GROUP, 0, "log").to_json()
    scene.world.nodes[SHARED] = b"9" * 10_000
    scene.journal = {SHARED: b"4000"}
    scene.lead()
    assert scene.record.number == 3, "whatever stands in the shared one"
    assert int(scene.world.nodes[SHARED]) == 4000 + JUMP


def test_numbers_that_can_not_be_given_are_told_with_what_to_do() -> None:
    scene = Scene()
    scene.world.nodes[paths.group(GROUP)] = Group(GROUP, 0, "log").to_json()
    scene.world.nodes[paths.GROUP_NUMBERS] = b"many"
    with pytest.raises(CorruptDataError, match=r"/counters/group holds b'many'.*set it to a number above"):
        scene.lead()


@pytest.mark.parametrize(
    "raw",
    [b"", b"x", b"-5", b"0", b"99", b"9" * 5_000, b"1" * 900_000, str(COUNT_MAX).encode(), str(1 << 96).encode()],
)
@pytest.mark.parametrize("when", ["in its term", "by the next one"])
def test_a_counter_that_says_what_can_not_be_is_set_right(raw: bytes, when: str) -> None:
    scene = Scene()
    scene.world.nodes[COUNTER] = b"100"
    scene.run(look_at_counter(scene.group))
    before = scene.record
    assert (before.counter_floor, before.number) == (100, 1)
    scene.world.nodes[COUNTER] = raw
    scene.run(keep_counter(scene.group, 1 << 40)) if when == "in its term" else scene.lead()
    assert scene.count == 100 + JUMP
    assert (scene.record.counter_floor, scene.record.counter_ceiling) == (scene.count, scene.count + STRIDE)
    assert scene.record.number == 1
    assert scene.group.counter.bound == counter_of(1, scene.count)
    assert paths.outdated(GROUP) not in scene.world.nodes


def test_a_counter_that_is_gone_gets_another_number() -> None:
    scene = Scene()
    del scene.world.nodes[COUNTER]
    scene.run(look_at_counter(scene.group))
    assert (scene.record.number, scene.record.former_numbers) == (2, (1,))
    assert scene.group.counter.is_given(TransactionId.of(0, counter_of(1, 55)).bytes), "an open one may have it"


def test_a_group_that_has_counted_to_the_end_gets_another_number() -> None:
    scene = Scene()
    scene.group.counter.note = CounterCheckpoint(1, COUNT_MAX - 5, 1)
    scene.world.nodes[COUNTER] = b"x"
    scene.run(look_at_counter(scene.group))
    assert scene.record.number == 2
    assert scene.count < COUNT_MAX // 2


def test_a_member_that_writes_again_and_again_does_not_hold_a_leader_up() -> None:
    scene = Scene()

    def spoil(operations: Any) -> Any:
        scene.world.nodes[COUNTER] = b"x"
        return operations

    scene.world.nodes[COUNTER] = b"x"
    scene.world.spoil_write = spoil
    scene.run(look_at_counter(scene.group))
    scene.world.spoil_write = list
    scene.run(look_at_counter(scene.group))
    assert scene.count == 1 + JUMP


def test_a_node_that_was_written_less_often_than_it_was_is_of_a_backup() -> None:
    scene = Scene()
    versions = dict(scene.world.nodes.versions)
    for count in (b"50", b"100"):
        scene.world.nodes[COUNTER] = count
    scene.run(look_at_counter(scene.group))
    scene.world.nodes[COUNTER] = b"1"
    scene.world.nodes.versions = versions
    with raises_code("zookeeper-outdated", match="was written 3 times, ZooKeeper knows of 1"):
        scene.lead()
    assert paths.outdated(GROUP) in scene.world.nodes


def test_who_leads_on_looks_at_the_counters_when_its_connection_has_come_back() -> None:
    scene = Scene()
    before, versions = dict(scene.world.nodes), dict(scene.world.nodes.versions)
    scene.world.nodes[COUNTER] = b"100"
    scene.run(look_at_counter(scene.group))
    scene.run(check_again(scene.group))
    scene.world.nodes[COUNTER], scene.world.nodes.versions = before[COUNTER], versions
    with raises_code("zookeeper-outdated", match="was written 2 times, ZooKeeper knows of 1"):
        scene.run(check_again(scene.group))
    assert paths.outdated(GROUP) in scene.world.nodes


def test_the_ceiling_goes_before_the_counter() -> None:
    scene = Scene()
    ceiling = scene.record.counter_ceiling
    scene.world.nodes[COUNTER] = b"%d" % (ceiling - 1)
    scene.run(look_at_counter(scene.group))
    assert scene.record.counter_ceiling == ceiling - 1 + STRIDE
    scene.world.nodes[COUNTER] = b"%d" % (scene.record.counter_ceiling + 1)
    scene.run(look_at_counter(scene.group))
    assert scene.count == ceiling - 1 + JUMP, "what was beyond it was given to nobody"


@pytest.mark.parametrize("raw", [b"", b"x", b"0", b"9" * 5_000, str(SHARED_MAX).encode(), str(1 << 96).encode()])
def test_the_shared_counter_is_set_right_and_keeps_nobody_from_leading(raw: bytes) -> None:
    scene = Scene()
    scene.world.nodes[SHARED] = raw
    scene.lead()
    assert int(scene.world.nodes[SHARED]) == 5001 + JUMP
    assert scene.record.number == 1


def begin(bench: Bench, counter: int) -> bytes:
    identifier = TransactionId.of(0, counter).bytes
    value = BeginFrame("c", 0, None, 60_000, {"sales/orders": 0}).encode()
    bench.feed("sales/orders", FrameHeader(FrameKind.BEGIN, identifier), value)
    return identifier


def forged(scene: Scene, counters: dict[str, int]) -> dict[str, State]:
    """What becomes of transactions with these counters."""
    bench = Bench({"sales/orders": 1})
    scene.group.fold = bench.group.fold
    ids = {name: begin(bench, counter) for name, counter in counters.items()}
    scene.run(check_given(scene.group, list(ids.values()), 5))
    found = scene.group.fold.open
    assert {item.reason for item in found.values() if item.state is State.ABORTING} <= {NOT_GIVEN_OUT}
    return {name: found[identifier].state for name, identifier in ids.items()}


def test_ids_that_nobody_gave_out_are_refused_one_by_one() -> None:
    scene = Scene()
    scene.world.nodes[COUNTER] = b"100"  # reserved since the last look
    states = forged(
        scene,
        {
            "new": counter_of(1, 99),
            "of an earlier version": 77,
            "will be given out": counter_of(1, 100),
            "later": counter_of(1, 105),
            "much later": counter_of(1, 100 + JUMP),
            "of another group": counter_of(2, 5),
            "largest": COUNTER_MAX,
        },
    )
    refused = {"will be given out", "later", "much later", "of another group", "largest"}
    assert states == {name: State.ABORTING if name in refused else State.OPEN for name in states}
    assert scene.count == 106, "what was guessed is given to nobody, and beyond that they raise nothing"
    assert scene.group.counter.bound == counter_of(1, 106)
    assert scene.group.counts["transactions_not_given_out"] == 5
    scene.lead()
    assert scene.group.counter.bound == counter_of(1, 106)


def test_what_is_believed_of_an_id_stands_in_the_journal_before() -> None:
    scene = Scene()
    scene.world.nodes[COUNTER] = b"100"
    forged(scene, {"new": counter_of(1, 99)})
    note = CounterCheckpoint.from_text(scene.journal[COUNTER])
    assert note is not None
    assert note[:3] == (1, 100, scene.world.nodes.versions[COUNTER])


def test_a_leader_of_a_group_that_is_gone_gives_up() -> None:
    scene = Scene()
    del scene.world.nodes[paths.group(GROUP)]
    with pytest.raises(StaleStateError):
        scene.run(look_at_counter(scene.group))
