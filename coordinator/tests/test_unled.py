"""Streams that cannot be read: a takeover leads their group without them, and says what is lost with them.

Played in the simulated world with the real procedures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bridge.tests.refusals import raises_code
from coordinator.tests.scenes import GROUP, ORDERS, OTHER, Scene, begin_both, commit_both, write_both
from coordinator.tests.sim_world import World
from rollbridge.base.effects import AnyEffect
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import FrameHeader
from rollbridge.commitlog.control import ControlKind
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.errors import CoordinatorUnavailableError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import BUFFER_LOST, BUFFER_UNREADABLE, FORMAT_NEWER, METADATA_UNREADABLE, StreamFault
from rollbridge.metadata.journal import is_deleted
from rollbridge.metadata.requests import RequestKind
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.commit import roll
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import StaleStateError
from rollbridge_coordinator.streams.pending_changes import read_change

BUFFER = ORDERS.buffer_topic()
THIRD = StreamName("sales", "third")

Spoil = Callable[[World], None]


def delete(world: World) -> None:
    world.lost_buffers = True
    world.lose(BUFFER)


def replace(world: World) -> None:
    delete(world)
    world.create(BUFFER)


def empty(world: World) -> None:
    world.lost_buffers = True
    log = world.topics[BUFFER]
    log.start = len(log.entries)


def deny(world: World) -> None:
    world.unreadable[BUFFER] = "TOPIC_AUTHORIZATION_FAILED"


def write(path: str, value: bytes) -> Spoil:
    return lambda world: world.nodes.__setitem__(path, value)


def newer(path: str) -> Spoil:
    def spoil(world: World) -> None:
        datum = json.loads(world.nodes[path])
        world.nodes[path] = json.dumps({**datum, "version": 1_000}).encode()

    return spoil


EPOCH = paths.epoch(ORDERS, 1)
POISONS: dict[str, tuple[Spoil, str]] = {
    "buffer deleted": (delete, BUFFER_LOST),
    "buffer replaced": (replace, BUFFER_LOST),
    "buffer without rights": (deny, BUFFER_UNREADABLE),
    "settings garbage": (write(paths.stream(ORDERS), b"garbage"), METADATA_UNREADABLE),
    "settings empty": (write(paths.stream(ORDERS), b""), METADATA_UNREADABLE),
    "settings of another stream": (
        lambda world: world.nodes.__setitem__(paths.stream(ORDERS), world.nodes[paths.stream(OTHER)]),
        METADATA_UNREADABLE,
    ),
    "epoch garbage": (write(EPOCH, b"garbage"), METADATA_UNREADABLE),
    "epoch of another number": (
        lambda world: world.nodes.__setitem__(EPOCH, world.nodes[paths.epoch(ORDERS, 0)]),
        METADATA_UNREADABLE,
    ),
    "settings newer": (newer(paths.stream(ORDERS)), FORMAT_NEWER),
    "epoch newer": (newer(EPOCH), FORMAT_NEWER),
    "truncation garbage": (write(paths.truncation(ORDERS), b"garbage"), METADATA_UNREADABLE),
    "late notes garbage": (write(paths.late(ORDERS), b"garbage"), METADATA_UNREADABLE),
}


class Place(Scene):
    """A scene whose streams may have several lives, each with its own buffer."""

    def _send(self, stream: StreamName, header: FrameHeader, value: bytes) -> None:
        config = StreamConfig.from_json(self.world.nodes[paths.stream(stream)])
        assert self.world.produce(config.buffer_topic, (header.pack(), value)) is not None


def fault_of(scene: Scene, stream: StreamName = ORDERS) -> str:
    raw = scene.world.nodes.get(paths.stream_fault(stream))
    return "" if raw is None else StreamFault.from_json(raw).code


def led(scene: Scene) -> bool:
    return scene.leader.pending_done


def spoil_and_take_over(scene: Scene, spoil: Spoil) -> None:
    spoil(scene.world)
    scene.take_over()
    scene.until(lambda: led(scene))


def open_for_long(scene: Scene, stream: StreamName) -> TransactionId:
    """A transaction that is on record."""
    found = scene.begin(stream)
    scene.until(lambda: paths.transaction(GROUP, found) in scene.world.nodes)
    return found


@pytest.mark.parametrize(("spoil", "said"), [(delete, f"topic {BUFFER}, does not exist"), (replace, "has id")])
def test_of_a_lost_buffer_it_is_said_whether_another_has_its_name(spoil: Spoil, said: str) -> None:
    scene = Scene()
    spoil_and_take_over(scene, spoil)
    scene.until(lambda: fault_of(scene) == BUFFER_LOST)
    assert said in StreamFault.from_json(scene.world.nodes[paths.stream_fault(ORDERS)]).reason


@pytest.mark.parametrize("name", POISONS)
def test_the_group_is_led_without_a_stream_that_cannot_be_read(name: str) -> None:
    spoil, code = POISONS[name]
    scene = Scene()
    scene.others_go_on()
    spoil_and_take_over(scene, spoil)
    scene.until(lambda: fault_of(scene) == code)
    scene.others_go_on()
    scene.steps(2_000)
    assert fault_of(scene) == code
    assert scene.terms_ended == 0, "nobody tries again by taking over"
    scene.others_go_on()
    assert not scene.world.broken


@pytest.mark.parametrize("name", [name for name, (_, code) in POISONS.items() if code != FORMAT_NEWER])
def test_a_stream_that_cannot_be_read_can_be_deleted_and_its_name_used_again(name: str) -> None:
    spoil, code = POISONS[name]
    scene = Place()
    recorded = open_for_long(scene, ORDERS)
    spoil_and_take_over(scene, spoil)
    scene.until(lambda: fault_of(scene) == code)
    answer = scene.answer(RequestKind.DELETE_STREAM, ORDERS)
    assert answer.ok, answer
    assert paths.stream(ORDERS) not in scene.world.nodes
    assert not [topic for topic in scene.world.topics if topic.startswith("sales.orders.segment")]
    scene.ended(recorded)
    scene.create(ORDERS)
    scene.commits(ORDERS)
    scene.take_over()
    scene.others_go_on()


def test_a_stream_without_a_topic_of_its_owners_is_not_released_though_it_is_not_led() -> None:
    """Its records would go with it."""
    scene = Scene()
    spoil_and_take_over(scene, deny)
    scene.until(lambda: fault_of(scene) == BUFFER_UNREADABLE)
    assert scene.answer(RequestKind.RELEASE_TOPIC, ORDERS).code == "invalid-request"
    assert paths.stream(ORDERS) in scene.world.nodes


def test_a_deletion_that_is_withdrawn_costs_the_stream_nothing() -> None:
    scene = Scene()
    recorded = open_for_long(scene, ORDERS)
    spoil_and_take_over(scene, deny)
    scene.until(lambda: fault_of(scene) == BUFFER_UNREADABLE)
    asked = paths.requests(GROUP)

    def withdraw(effect: AnyEffect, _: object) -> None:
        if isinstance(effect, fx.Write) and any(item.path.startswith(asked) for item in effect.operations):
            for name in scene.world.children(asked):
                del scene.world.nodes[f"{asked}/{name}"]

    scene.world.refuses = withdraw
    scene.ask(RequestKind.DELETE_STREAM, ORDERS)
    scene.until(lambda: not scene.world.children(asked))
    scene.steps()
    assert scene.outcome(recorded) is None
    scene.world.unreadable.clear()
    scene.commit(ORDERS, recorded)
    scene.until(lambda: scene.outcome(recorded) is not None)
    assert scene.visible(recorded) == 1


@pytest.mark.parametrize("name", ["buffer without rights", "settings garbage", "epoch garbage", "late notes garbage"])
def test_a_stream_that_can_be_read_again_is_led_again_with_all_that_was_open(name: str) -> None:
    spoil, code = POISONS[name]
    scene = Scene()
    old, recorded = scene.old, open_for_long(scene, ORDERS)
    before = dict(scene.world.nodes)
    scene.commit(ORDERS, old)
    scene.take_over()  # before anybody has read that
    spoil_and_take_over(scene, spoil)
    scene.until(lambda: fault_of(scene) == code)
    scene.steps(2_000)
    assert scene.outcome(old) is None
    assert scene.outcome(recorded) is None
    scene.world.unreadable.clear()
    for path in (paths.stream(ORDERS), EPOCH):
        scene.world.nodes[path] = before[path]
    scene.world.nodes.pop(paths.late(ORDERS), None)
    scene.until(lambda: scene.outcome(old) is not None)
    scene.commit(ORDERS, recorded)
    scene.until(lambda: scene.outcome(recorded) is not None and not fault_of(scene))
    assert scene.visible(old) == scene.visible(recorded) == 1


@pytest.mark.parametrize("spoil", [delete, replace])
def test_what_is_known_to_be_lost_with_a_buffer_is_aborted_with_the_reason(spoil: Spoil) -> None:
    scene = Scene()
    recorded, both, elsewhere = open_for_long(scene, ORDERS), write_both(scene), scene.begin(OTHER)
    scene.until(lambda: paths.transaction(GROUP, both) in scene.world.nodes)
    spoil_and_take_over(scene, spoil)
    commit_both(scene, both)
    scene.commit(OTHER, elsewhere)
    for item in (recorded, both):
        outcome = scene.ended(item)
        assert outcome.kind is ControlKind.ABORT
        assert "lost with stream sales/orders" in outcome.reason
        assert scene.visible(item) == 0
    scene.ended(elsewhere)
    assert scene.visible(elsewhere) == 1
    scene.until(lambda: paths.transaction(GROUP, recorded) not in scene.world.nodes)
    for _ in range(3):
        scene.take_over()
        scene.others_go_on()
    assert scene.outcome(recorded) is not None, "once"


def test_a_buffer_that_one_broker_does_not_know_yet_costs_nothing() -> None:
    """Whether it is gone is decided at the second look."""
    scene = Scene()
    recorded = open_for_long(scene, ORDERS)
    kept = scene.world.topics[BUFFER]
    spoil_and_take_over(scene, delete)
    scene.until(lambda: fault_of(scene) == BUFFER_LOST)
    scene.world.topics[BUFFER] = kept
    scene.commit(ORDERS, recorded)
    scene.until(lambda: scene.outcome(recorded) is not None)
    assert scene.visible(recorded) == 1
    scene.until(lambda: not fault_of(scene))


def test_a_buffer_that_is_deleted_while_somebody_leads_is_noticed() -> None:
    scene = Scene()
    scene.others_go_on()
    recorded = open_for_long(scene, ORDERS)
    delete(scene.world)
    scene.until(lambda: fault_of(scene) == BUFFER_LOST)
    scene.until(lambda: scene.outcome(recorded) is not None)
    scene.terms_ended = 0
    scene.others_go_on()


def test_a_zookeeper_that_names_the_buffer_of_a_former_life_was_set_back() -> None:
    """Nothing is lost: the buffer of the present life is there, with a commit that nobody has read yet."""
    scene = Place()
    scene.commit(ORDERS, scene.old)
    scene.until(lambda: scene.outcome(scene.old) is not None)
    backup = {path: value for path, value in scene.world.nodes.items() if path.startswith(paths.stream(ORDERS))}
    scene.ask(RequestKind.DELETE_STREAM, ORDERS)
    scene.until(lambda: paths.stream(ORDERS) not in scene.world.nodes)
    scene.create(ORDERS)
    scene.commit(ORDERS, open_for_long(scene, ORDERS))
    for path in [path for path in scene.world.nodes if path.startswith(paths.stream(ORDERS))]:
        del scene.world.nodes[path]
    for path, value in backup.items():
        scene.world.nodes[path] = value
    scene.take_over()
    with raises_code("zookeeper-outdated", match="it was created again"):
        scene.until(lambda: led(scene))


def test_a_stream_that_somebody_has_deleted_in_zookeeper_is_given_back_with_what_was_open() -> None:
    scene = Place()
    begun = open_for_long(scene, ORDERS)
    spoil_and_take_over(scene, lambda _: None)
    kept = tree(scene)
    scene.take_over()
    for path in kept:
        del scene.world.nodes[path]
    scene.until(lambda: led(scene) and tree(scene) == kept)
    assert scene.terms_ended == 1, "the first takeover gives it back, the second one leads it"
    scene.terms_ended = 0
    scene.commit(ORDERS, begun)
    assert scene.ended(begun).kind is ControlKind.COMMIT
    scene.others_go_on()
    assert not scene.world.broken


def test_a_stream_that_a_backup_may_have_lacked_is_not_given_back() -> None:
    scene = Place()
    scene.ask(RequestKind.CREATE_STREAM, THIRD, segments=1)
    scene.until(lambda: paths.epoch(THIRD, 0) in scene.leader.group.journal.nodes)  # type: ignore[union-attr]
    for path in tree(scene, THIRD):
        del scene.world.nodes[path]
    scene.take_over()
    with raises_code("zookeeper-outdated", match="does not know stream sales/third"):
        scene.until(lambda: led(scene))


def tree(scene: Scene, stream: StreamName = ORDERS) -> dict[str, bytes]:
    """The nodes of a stream that its journal has, and their parents."""
    own = paths.stream(stream)
    places = (own, paths.epochs(stream), paths.truncation(stream), paths.late(stream))
    return {
        path: value for path, value in scene.world.nodes.items() if path.startswith(f"{own}/epochs/") or path in places
    }


def test_what_somebody_has_emptied_is_aborted_if_a_record_tells_of_it() -> None:
    scene = Scene()
    recorded = open_for_long(scene, ORDERS)
    spoil_and_take_over(scene, empty)
    outcome = scene.ended(recorded)
    assert (outcome.kind, "emptied" in outcome.reason) == (ControlKind.ABORT, True)
    assert not fault_of(scene)
    scene.commits(ORDERS)


@pytest.mark.parametrize("is_garbled", [False, True], ids=["outcome forgotten", "record garbled"])
def test_what_may_have_been_committed_is_not_aborted_for_a_record_of_it(
    monkeypatch: pytest.MonkeyPatch, *, is_garbled: bool
) -> None:
    scene = Scene()
    recorded = open_for_long(scene, ORDERS)
    if is_garbled:
        scene.world.nodes[paths.transaction(GROUP, recorded)] = b"garbage"
    else:
        monkeypatch.setattr(EndedIds, "is_lost", lambda _, item, __: item == recorded.bytes)
    spoil_and_take_over(scene, empty)
    scene.until(lambda: paths.transaction(GROUP, recorded) not in scene.world.nodes)
    scene.others_go_on()
    assert scene.outcome(recorded) is None


def test_a_roll_of_a_stream_that_is_lost_meanwhile_goes_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.create(THIRD)
    monkeypatch.setattr(roll, "ROLL_BYTES_MAX", 1)
    both = begin_both(scene)
    scene.until(lambda: paths.committing(GROUP) in scene.world.nodes)
    spoil_and_take_over(scene, delete)
    assert paths.committing(GROUP) not in scene.world.nodes
    assert scene.world.children(paths.pending_changes(GROUP))
    scene.commits(THIRD)
    assert scene.ended(both).kind is ControlKind.ABORT
    scene.until(lambda: not fault_of(scene, OTHER), 60_000)
    scene.others_go_on()
    assert scene.world.children(paths.pending_changes(GROUP)), "what is half done of the lost stream"
    scene.ask(RequestKind.DELETE_STREAM, ORDERS)
    scene.until(lambda: not scene.world.children(paths.pending_changes(GROUP)), 60_000)
    scene.others_go_on()


NOT_READ = ("garbage", b"garbage"), ("empty", b""), ("newer", b'{"version": 1000}')


@pytest.mark.parametrize("steps", range(0, 14, 2))
@pytest.mark.parametrize("value", [value for _, value in NOT_READ], ids=[name for name, _ in NOT_READ])
@pytest.mark.parametrize("is_aside", [False, True], ids=["in progress", "suspended"])
@pytest.mark.parametrize("kind", ["roll", "scale"])
def test_a_change_that_cannot_be_read_is_put_aside_wherever_it_was(
    kind: str, is_aside: bool, value: bytes, steps: int
) -> None:
    scene = Scene()
    node = paths.committing(GROUP)
    if kind == "roll":
        scene.commit(ORDERS, scene.old)
    else:
        node = paths.scaling(GROUP)
        halves = ((0.0, 0.25), (0.25, 0.5))
        scene.ask(RequestKind.SCALE_STREAM, ORDERS, seal=(1,), ranges=halves)
    scene.until(lambda: node in scene.world.nodes)
    for _ in range(steps):
        if node in scene.world.nodes:
            scene.step()
    if scene.world.nodes.pop(node, None) is not None or not steps:
        title = "roll-orders-2" if kind == "roll" else "scale-orders-2"
        scene.world.nodes[f"{paths.pending_changes(GROUP)}/{title}" if is_aside else node] = value
        scene.take_over()
        scene.until(lambda: led(scene))
        assert [scene.world.nodes[f"{paths.unreadable(GROUP)}/{item}"] for item in aside(scene)] == [value]
    scene.others_go_on()
    if kind == "scale":
        scene.commit(ORDERS, scene.old)
    scene.until(lambda: scene.visible(scene.old) == 1, 20_000)
    outcome = scene.outcome(scene.old)
    assert outcome is not None
    assert outcome.kind is ControlKind.COMMIT
    mine = scene.begin(ORDERS)
    scene.commit(ORDERS, mine)
    scene.until(lambda: scene.visible(mine) == 1, 20_000)
    scene.until(lambda: not fault_of(scene), 20_000)
    assert scene.terms_ended == 0
    assert not scene.world.broken


def aside(scene: Scene) -> list[str]:
    return scene.world.children(paths.unreadable(GROUP))


def test_what_another_leader_has_changed_meanwhile_is_not_put_aside() -> None:
    group = Scene().leader.group
    assert group is not None
    steps = read_change(group, paths.scaling(GROUP), b"garbage")
    assert isinstance(next(steps), fx.EnsureNodes)
    assert isinstance(steps.send(None), fx.Write)
    with pytest.raises(StaleStateError):
        steps.send(False)


def test_what_was_prepared_of_a_stream_that_is_not_led_is_left_alone() -> None:
    scene = Scene()
    topics = set(scene.world.topics)
    spoil_and_take_over(scene, write(paths.stream(ORDERS), b"garbage"))
    scene.others_go_on()
    scene.steps(2_000)
    assert topics <= set(scene.world.topics)
    assert paths.stream(ORDERS) in scene.leader.group.journal.nodes  # type: ignore[union-attr]


def test_the_journal_drops_what_is_deleted_while_another_stream_is_not_led() -> None:
    scene = Scene()
    scene.create(THIRD)
    spoil_and_take_over(scene, deny)
    journal = scene.leader.group.journal.nodes  # type: ignore[union-attr]
    assert paths.epoch(OTHER, 0) in journal
    scene.answer(RequestKind.DELETE_STREAM, OTHER)
    scene.until(lambda: not [path for path in journal if path.startswith(f"{paths.stream(OTHER)}/")])
    assert is_deleted(journal[paths.stream(OTHER)])
    assert paths.epoch(ORDERS, 0) in journal


def test_what_may_be_in_a_buffer_that_cannot_be_read_is_not_denied() -> None:
    """A job that is told that nothing with its label is there does its work a second time."""
    scene = Scene()

    def ask(**named: Any) -> str:
        return scene.answer(client_name="c", **named).code

    old, ended = str(scene.old), scene.begin(OTHER)
    questions: list[dict[str, Any]] = [
        {"kind": RequestKind.LOOK_UP, "transaction": old},
        {"kind": RequestKind.LOOK_UP, "owner": "c1", "label": "night"},
        {"kind": RequestKind.DESCRIBE, "transaction": old},
        {"kind": RequestKind.ABORT_TRANSACTION, "transaction": old},
    ]
    scene.commit(OTHER, ended)
    scene.until(lambda: scene.outcome(ended) is not None)
    scene.commit(ORDERS, scene.old)
    scene.take_over()
    spoil_and_take_over(scene, deny)
    assert [ask(**item) for item in questions] == [CoordinatorUnavailableError.code] * 4
    assert ask(kind=RequestKind.LOOK_UP, transaction=str(ended)) != CoordinatorUnavailableError.code, "it has ended"
    scene.world.unreadable.clear()
    scene.world.lose(BUFFER)
    scene.until(lambda: fault_of(scene) == BUFFER_LOST)
    scene.until(lambda: CoordinatorUnavailableError.code not in [ask(**item) for item in questions])
