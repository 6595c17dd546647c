"""A rolling commit that is refused, in each of its effects: nothing is half visible, and all others go on.

Played in the simulated world with the real procedures. What must hold: the transaction at fault is aborted with Kafka's
reason, or its stream is in an error state that it leaves once nothing is refused any more; no term ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from coordinator.tests.scenes import (
    GROUP,
    ORDERS,
    OTHER,
    Scene,
    begin_both,
    commit_both,
    offsets,
    refused,
    scale_other,
    write_both,
)
from coordinator.tests.sim_truncation import history_of
from rollbridge.base.effects import AnyEffect
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey
from rollbridge.commitlog.control import ControlKind
from rollbridge.metadata import paths
from rollbridge.metadata.changes import StreamFault
from rollbridge.metadata.requests import AdminAnswer, RequestKind
from rollbridge.stream.config import Retention
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.commit import roll
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.waits import SEAL_TIMEOUT

DUPLICATE = ".epoch-2"
"""The transaction is of epoch 0, a scale makes epoch 1, and its rolling commit 2 and 3."""
ACTIVE = ".epoch-1"


Guilty = Callable[[AnyEffect], fx.EffectRefusedError | None]


def create(effect: AnyEffect) -> fx.EffectRefusedError | None:
    if isinstance(effect, fx.CreateTopics) and any(DUPLICATE in item.name for item in effect.topics):
        return refused(effect)
    return None


def merge(effect: AnyEffect) -> fx.EffectRefusedError | None:
    if isinstance(effect, fx.MergeFrames | fx.AppendTogether):
        return next((refused(effect, topic) for (topic, _), _ in effect.items if DUPLICATE in topic), None)
    return None


def content(effect: AnyEffect) -> fx.EffectRefusedError | None:
    found = merge(effect)
    if found is None:
        return None
    return fx.EffectRefusedError(effect, "no", code="INVALID_RECORD", topic=found.topic, places=(0,))


def seals(effect: AnyEffect, name: str) -> bool:
    """Whether an effect seals a topic with something in its name."""
    return isinstance(effect, fx.Seal) and any(name in topic for topic, _ in effect.partitions)


def seal_active(effect: AnyEffect) -> fx.EffectRefusedError | None:
    return refused(effect) if seals(effect, ACTIVE) else None


def seal_duplicate(effect: AnyEffect) -> fx.EffectRefusedError | None:
    return refused(effect) if seals(effect, DUPLICATE) else None


class RollOnly:
    """The round of the roll as a whole; what is in it is known from its frames."""

    def __init__(self, kind: type[AnyEffect]) -> None:
        self.kind, self.rolls = kind, False

    def __call__(self, effect: AnyEffect) -> fx.EffectRefusedError | None:
        if isinstance(effect, fx.MergeFrames):
            self.rolls = any(DUPLICATE in topic for (topic, _), _ in effect.items)
        if not self.rolls or not isinstance(effect, self.kind):
            return None
        self.rolls = False
        return refused(effect, code="INVALID_TXN_STATE")


def look(effect: AnyEffect) -> fx.EffectRefusedError | None:
    return refused(effect) if isinstance(effect, fx.Look) else None


WAITS: dict[str, Guilty] = {"CreateTopics": create, "MergeFrames of a topic": merge, "Seal": seal_active}
ABORTS: dict[str, tuple[Callable[[], Guilty], str]] = {
    "MergeFrames for what is in a frame": (lambda: content, ""),
    "CommitRound": (lambda: RollOnly(fx.CommitRound), ""),
    "SendOffsets": (lambda: offsets, "offsets"),
    "Look": (lambda: look, "conditions"),
    "MergeFrames behind sealed conditions": (lambda: merge, "conditions"),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_stream_waits_and_its_transaction_is_committed_once_nothing_is_refused(name: str) -> None:
    scene = Scene()
    scene.world.refuses = lambda effect, _: WAITS[name](effect)
    scene.commit(ORDERS, scene.old)
    scene.until(lambda: scene.fault is not None)
    scene.check()
    assert scene.outcome(scene.old) is None
    scene.others_go_on()
    assert paths.committing(GROUP) not in scene.world.nodes
    scene.world.refuses = lambda *_: None
    scene.until(lambda: scene.outcome(scene.old) is not None and scene.fault is None)
    scene.check()
    assert scene.visible(scene.old) == 1
    assert scene.terms_ended == 0


@pytest.mark.parametrize("name", ABORTS)
def test_the_transaction_is_aborted_with_the_reason(name: str) -> None:
    scene = Scene()
    make, how = ABORTS[name]
    guilty = make()
    scene.world.refuses = lambda effect, _: guilty(effect)
    scene.commit(ORDERS, scene.old, how=how)
    outcome = scene.ended(scene.old)
    assert outcome.kind is ControlKind.ABORT
    assert outcome.reason.endswith("no") or "no" in outcome.reason.split(": ")
    scene.check()
    scene.others_go_on()
    assert paths.committing(GROUP) not in scene.world.nodes
    fresh = scene.begin(ORDERS)
    scene.world.refuses = lambda *_: None
    scene.commit(ORDERS, fresh)
    scene.until(lambda: scene.visible(fresh) == 1)


@pytest.mark.parametrize("takes_over", [False, True])
def test_what_cannot_be_sealed_after_the_commit_is_sealed_later(takes_over: bool) -> None:
    """The transaction is committed by then; its stream waits, a new leader goes on with it, and others never notice.

    Nor does retention, which cannot tell what is older than a cut while it is not known where a segment ends.
    """
    scene = Scene()
    policy = Retention(ms=1)
    scene.ask(RequestKind.UPDATE_STREAM, ORDERS, retention=policy)
    scene.world.refuses = lambda effect, _: seal_duplicate(effect)
    scene.commit(ORDERS, scene.old)
    scene.until(lambda: scene.fault is not None)
    scene.check()
    assert scene.visible(scene.old) == 1
    scene.others_go_on()
    assert paths.committing(GROUP) not in scene.world.nodes, "others may roll"
    if takes_over:
        scene.take_over()
        scene.others_go_on()
    scene.steps()
    assert [item.epoch for item in history_of(scene.world, ORDERS).unsealed()] == [3]
    scene.world.refuses = lambda *_: None
    scene.until(lambda: scene.fault is None)
    assert not history_of(scene.world, ORDERS).unsealed()
    assert scene.terms_ended == 0


@pytest.mark.parametrize("guilty", [create, merge, content])
def test_a_new_leader_that_is_refused_behind_published_epochs_ends_its_roll(guilty: Guilty) -> None:
    """It cannot go back, since the epochs are known; so the transaction goes, and nobody after it tries again."""
    scene = Scene()
    scene.commit(ORDERS, scene.old)
    scene.until(lambda: history_of(scene.world, ORDERS).active.epoch == 3)
    assert scene.outcome(scene.old) is None
    scene.take_over()
    scene.world.refuses = lambda effect, _: guilty(effect)
    outcome = scene.ended(scene.old)
    scene.check()
    assert (outcome.kind is ControlKind.COMMIT) == (guilty is create), "its topics are there"
    scene.others_go_on()
    assert paths.committing(GROUP) not in scene.world.nodes


def test_a_roll_of_several_that_outlasts_its_native_transaction_again_and_again_gives_up_the_largest() -> None:
    scene = Scene()
    # A second transaction of the same epoch, which the same roll carries.
    other = TransactionId.of(0, 77)
    begin = BeginFrame("c77", 0, None, 10_000_000, {str(ORDERS): 0}).encode()
    scene._send(ORDERS, FrameHeader(FrameKind.BEGIN, other.bytes), begin)
    rows = [["k", f"w{number}", str(other), number] for number in range(2)]
    scene._send(ORDERS, FrameHeader(FrameKind.DATA, other.bytes, 0, 0, 0, 2), json.dumps(rows).encode())
    manifest = Manifest({PieceKey(0, 0, 0): 2})
    scene.commit(ORDERS, scene.old)
    scene._send(ORDERS, FrameHeader(FrameKind.COMMIT, other.bytes), manifest.encode())
    scene.until(lambda: history_of(scene.world, ORDERS).active.epoch == 3)
    scene.take_over()

    def slow(effect: AnyEffect, _: int) -> fx.EffectRefusedError | None:
        if isinstance(effect, fx.MergeFrames) and len(effect.items) > 1:
            return refused(effect, code="INVALID_TXN_STATE")
        return None

    scene.world.refuses = slow
    scene.ended(scene.old)
    assert "largest" in scene.ended(other).reason
    assert scene.visible(scene.old) == 1
    assert scene.visible(other) == 0
    scene.others_go_on()


def test_a_roll_of_two_streams_of_which_the_second_cannot_be_sealed_is_given_up_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one's epochs are published when that is refused; they stay, empty, and nobody tries again for ever."""
    monkeypatch.setattr(roll, "ROLL_BYTES_MAX", 1)  # so the epochs of both do not fit into one write
    scene = Scene()
    both = begin_both(scene)
    first, second = sorted((ORDERS, OTHER), key=str)
    scene.until(lambda: history_of(scene.world, first).active.epoch == 3)
    assert history_of(scene.world, second).active.epoch == 1, "one after the other"
    scene.take_over()

    def guilty(effect: AnyEffect, _: int) -> fx.EffectRefusedError | None:
        return refused(effect) if seals(effect, f".{second.stream}.") else None

    scene.world.refuses = guilty
    assert scene.ended(both).kind is ControlKind.ABORT
    scene.until(lambda: paths.committing(GROUP) not in scene.world.nodes)
    assert scene.visible(both) == 0
    assert not history_of(scene.world, first).unsealed()
    assert scene.terms_ended == 0
    scene.world.refuses = lambda *_: None
    # Its segments were sealed before; a scale gives it others.
    joined = ((0.0, 1.0),)
    scene.ask(RequestKind.SCALE_STREAM, second, seal=(1, 2), ranges=joined)
    scene.until(lambda: history_of(scene.world, second).active.epoch == 2)
    scene.until(lambda: paths.stream_fault(second) not in scene.world.nodes)


def suspend_roll(scene: Scene, both: TransactionId | None = None) -> None:
    """The rolling commit has closed the active segments, and meets a native transaction of somebody else there."""

    def foreign(effect: AnyEffect, _: int) -> fx.EffectRefusedError | None:
        if (
            isinstance(effect, fx.Seal)
            and not scene.world.children(paths.pending_changes(GROUP))
            and -1 not in scene.world.open
        ):
            scene.world.begin_foreign(next(item for item, _ in effect.partitions if ACTIVE in item), -1)
        return None

    scene.world.refuses = foreign
    if both is None:
        scene.commit(ORDERS, scene.old)
    else:
        commit_both(scene, both)
    scene.until(lambda: bool(scene.world.children(paths.pending_changes(GROUP))))
    assert paths.committing(GROUP) not in scene.world.nodes


@pytest.mark.parametrize("guilty", [create, merge, content, seal_active, seal_duplicate])
@pytest.mark.parametrize("dies", [False, True])
def test_what_a_suspended_roll_has_closed_gets_successors_even_if_it_is_refused(guilty: Guilty, *, dies: bool) -> None:
    scene = Scene()
    suspend_roll(scene)
    if dies:
        scene.take_over()
    scene.world.refuses = lambda effect, _: guilty(effect)
    scene.world.end_foreign(-1)
    for _ in range(300):
        scene.step()
        scene.check()
    scene.world.refuses = lambda *_: None
    scene.until(
        lambda: scene.outcome(scene.old) is not None and not scene.world.children(paths.pending_changes(GROUP)), 20_000
    )
    scene.until(lambda: history_of(scene.world, ORDERS).active.epoch >= 3)
    scene.until(lambda: not history_of(scene.world, ORDERS).unsealed(), 20_000)
    outcome = scene.outcome(scene.old)
    assert outcome is not None
    assert (outcome.kind is ControlKind.COMMIT) == (guilty is not content)
    scene.check()
    scene.until(lambda: scene.fault is None, 20_000)
    fresh = history_of(scene.world, ORDERS)
    assert not any(scene.world.topics[ORDERS.segment_topic(item.id)].sealed for item in fresh.active.segments)
    scene.others_go_on()
    assert scene.terms_ended == 0


def test_a_transaction_that_was_taken_out_of_a_suspended_roll_is_so_after_zookeeper_was_set_back() -> None:
    scene = Scene()
    suspend_roll(scene)
    [title] = scene.world.children(paths.pending_changes(GROUP))
    node = f"{paths.pending_changes(GROUP)}/{title}"
    before = scene.world.nodes[node]
    scene.ask(RequestKind.ABORT_TRANSACTION, transaction=str(scene.old))
    scene.until(lambda: scene.outcome(scene.old) is not None)
    assert scene.world.nodes[node] != before
    scene.world.nodes[node] = before
    scene.take_over()
    scene.world.end_foreign(-1)
    scene.until(lambda: node not in scene.world.nodes)
    assert history_of(scene.world, ORDERS).active.epoch == 3
    assert scene.visible(scene.old) == 0
    scene.others_go_on()


@pytest.mark.parametrize("was_suspended", [True, False])
def test_a_transaction_that_no_longer_fits_into_what_zookeeper_was_set_back_to_is_planned_anew(
    *, was_suspended: bool
) -> None:
    """Another of its streams was scaled while its roll waited, which then went on without it: in vain for ZooKeeper."""
    scene = Scene()
    both = write_both(scene)
    suspend_roll(scene, both)
    scene.world.refuses = lambda *_: None
    [title] = scene.world.children(paths.pending_changes(GROUP))
    node = f"{paths.pending_changes(GROUP)}/{title}"
    before = scene.world.nodes[node]
    scale_other(scene)
    active = history_of(scene.world, OTHER).active.segments[0].id
    scene.world.begin_foreign(OTHER.segment_topic(active), -2)  # it is not planned anew before that has ended
    scene.world.end_foreign(-1)
    scene.until(lambda: node not in scene.world.nodes)
    assert history_of(scene.world, ORDERS).active.epoch == 3
    assert scene.outcome(both) is None
    scene.world.nodes[node if was_suspended else paths.committing(GROUP)] = before
    scene.take_over()
    scene.until(lambda: not {node, paths.committing(GROUP)} & scene.world.nodes.keys())
    assert scene.outcome(both) is None
    scene.world.end_foreign(-2)
    scene.until(lambda: scene.outcome(both) is not None)
    assert scene.visible(both) == 2
    assert scene.terms_ended == 0


@pytest.mark.parametrize("kind", [fx.CreateTopics, fx.Seal])
def test_a_suspended_scale_that_is_refused_is_finished_once_that_is_over(kind: type[AnyEffect]) -> None:
    scene = Scene()

    def foreign(effect: AnyEffect, _: int) -> fx.EffectRefusedError | None:
        if isinstance(effect, fx.Seal) and not scene.world.children(paths.pending_changes(GROUP)):
            scene.world.begin_foreign(effect.partitions[0][0], -1)
        return None

    scene.world.refuses = foreign
    scene.ask(RequestKind.SCALE_STREAM, OTHER, seal=(0,), ranges=((0.0, 0.5), (0.5, 1.0)))
    scene.until(lambda: bool(scene.world.children(paths.pending_changes(GROUP))))
    scene.world.refuses = lambda effect, _: refused(effect) if isinstance(effect, kind) else None
    scene.world.end_foreign(-1)
    scene.steps(500)
    assert scene.world.children(paths.pending_changes(GROUP)), "it is closed, so it is not given up"
    scene.world.refuses = lambda *_: None
    scene.until(lambda: not scene.world.children(paths.pending_changes(GROUP)))
    assert history_of(scene.world, OTHER).active.epoch == 1
    assert scene.terms_ended == 0
    scene.others_go_on()


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("kind", [fx.CreateTopics, fx.Seal])
def test_of_a_roll_of_two_streams_only_that_waits_of_which_a_topic_is_refused(
    kind: type[AnyEffect], *, closes: bool
) -> None:
    scene = Scene()

    def guilty(effect: AnyEffect, _: int) -> fx.EffectRefusedError | None:
        names: list[str] = []
        match effect:
            case fx.CreateTopics(topics) if kind is fx.CreateTopics:
                names = [item.name for item in topics]
            case fx.Seal(places) if kind is fx.Seal:
                names = [topic for topic, _ in places]
        wrong = [item for item in names if f".{ORDERS.stream}." in item and "epoch-0" not in item]
        if not wrong:
            return None
        if closes and isinstance(effect, fx.Seal):
            scene.world.close([topic for topic, _ in effect.partitions])
        return refused(effect, wrong[0])

    both = begin_both(scene)
    scene.world.refuses = guilty
    scene.until(lambda: scene.fault is not None)
    scene.others_go_on()
    scene.steps()
    assert paths.stream_fault(OTHER) not in scene.world.nodes, "nothing of it is refused"
    scene.others_go_on()
    assert scene.outcome(both) is None
    active = history_of(scene.world, OTHER).active.segments
    assert not any(scene.world.topics[OTHER.segment_topic(item.id)].sealed for item in active)
    scene.world.refuses = lambda *_: None
    scene.until(lambda: scene.outcome(both) is not None, 60_000)
    assert scene.visible(both) == 2
    scene.until(lambda: scene.fault is None)
    assert scene.terms_ended == 0


def all_open(scene: Scene, stream: StreamName) -> bool:
    """Whether plain writers can write everywhere."""
    active = history_of(scene.world, stream).active.segments
    return not any(scene.world.topics[stream.segment_topic(item.id)].sealed for item in active)


def closing(
    scene: Scene, code: str = "TOPIC_AUTHORIZATION_FAILED"
) -> Callable[[AnyEffect, int], fx.EffectRefusedError | None]:
    """Every seal closes its topics and comes to nothing after that."""

    def guilty(effect: AnyEffect, _: int) -> fx.EffectRefusedError | None:
        if not isinstance(effect, fx.Seal):
            return None
        scene.world.close([topic for topic, _ in effect.partitions])
        return refused(effect, effect.partitions[0][0], code)

    return guilty


@pytest.mark.parametrize("dies", [False, True])
def test_what_a_refused_roll_has_closed_gets_successors_though_its_transaction_is_gone(*, dies: bool) -> None:
    scene = Scene()
    scene.world.refuses = closing(scene)
    scene.commit(ORDERS, scene.old)
    scene.until(lambda: scene.fault is not None)
    assert not all_open(scene, ORDERS)
    if dies:
        scene.take_over()
    scene.ask(RequestKind.ABORT_TRANSACTION, transaction=str(scene.old))
    scene.until(lambda: scene.outcome(scene.old) is not None)
    scene.world.refuses = lambda *_: None
    scene.until(lambda: all_open(scene, ORDERS), 60_000)
    scene.until(lambda: scene.fault is None)
    scene.commits(OTHER)
    assert scene.terms_ended == 0


def answers(scene: Scene) -> list[bytes]:
    """What those are told who have asked for something."""
    return [value for path, value in scene.world.nodes.items() if path.startswith(f"{paths.answers(GROUP)}/")]


def test_a_scale_that_has_closed_segments_and_is_refused_then_is_finished_though_nobody_asks_again() -> None:
    scene = Scene()
    scene.world.refuses = closing(scene)
    split = ((0.0, 0.5), (0.5, 1.0))
    scene.ask(RequestKind.SCALE_STREAM, OTHER, seal=(0,), ranges=split)
    scene.until(lambda: any(b"the scale is finished once that is possible" in item for item in answers(scene)))
    scene.world.refuses = lambda *_: None
    scene.until(lambda: history_of(scene.world, OTHER).active.epoch == 1, 60_000)
    assert all_open(scene, OTHER)
    scene.others_go_on()


@pytest.mark.parametrize("lasts", [False, True])
def test_a_scale_whose_seal_takes_too_long_is_answered_when_it_is_done_or_after_the_bound(*, lasts: bool) -> None:
    scene = Scene()
    scene.world.refuses = closing(scene, SEAL_TIMEOUT)
    split = ((0.0, 0.5), (0.5, 1.0))
    answer = scene.ask(RequestKind.SCALE_STREAM, OTHER, seal=(0,), ranges=split)
    scene.until(lambda: bool(scene.world.children(paths.pending_changes(GROUP))))
    assert answer not in scene.world.nodes
    if not lasts:
        scene.world.refuses = lambda *_: None
    scene.until(lambda: answer in scene.world.nodes, 60_000)
    assert AdminAnswer.from_json(scene.world.nodes[answer]).ok is not lasts
    scene.world.refuses = lambda *_: None
    scene.until(lambda: history_of(scene.world, OTHER).active.epoch == 1, 60_000)
    scene.others_go_on()


def test_a_new_leader_finds_what_was_closed_for_a_change_that_nobody_has_on_record() -> None:
    scene = Scene()
    active = [ORDERS.segment_topic(item.id) for item in history_of(scene.world, ORDERS).active.segments]
    scene.world.close(active[:1])
    scene.take_over()
    scene.until(lambda: all_open(scene, ORDERS), 60_000)
    assert len(history_of(scene.world, ORDERS).active.segments) == len(active)
    scene.others_go_on()


def write_large(scene: Scene) -> TransactionId:
    """A transaction of both streams that is merged beside the line, which takes a rolling commit of both."""
    large = TransactionId.of(0, 98)
    streams = {str(name): int(history_of(scene.world, name).active.epoch) for name in (OTHER, ORDERS)}
    begin = BeginFrame("c98", 0, None, 10_000_000, streams).encode()
    pieces = {}
    for place, stream in enumerate((OTHER, ORDERS)):
        segment = int(history_of(scene.world, stream).active.segments[0].id.number)
        scene._send(stream, FrameHeader(FrameKind.BEGIN, large.bytes), begin)
        rows = json.dumps([["k", "x" * 1_000, str(large), place]]).encode()
        scene._send(stream, FrameHeader(FrameKind.DATA, large.bytes, 0, segment, place, 1), rows)
        pieces[PieceKey(0, place, segment)] = 1
    scene._send(OTHER, FrameHeader(FrameKind.COMMIT, large.bytes), Manifest(pieces).encode())
    return large


@pytest.mark.parametrize("is_held", [False, True])
def test_a_half_published_roll_of_a_large_transaction_whose_rest_cannot_be_sealed_lets_the_group_be_led(
    monkeypatch: pytest.MonkeyPatch, *, is_held: bool
) -> None:
    """What was prepared for it died with its leader; what is published stands, and the transaction is merged anew."""
    monkeypatch.setattr(roll, "ROLL_BYTES_MAX", 1)
    scene = Scene()
    before = {name: history_of(scene.world, name).active.epoch for name in (ORDERS, OTHER)}
    large = write_large(scene)
    first, second = sorted((ORDERS, OTHER), key=str)
    scene.until(lambda: history_of(scene.world, first).active.epoch > before[first])
    assert history_of(scene.world, second).active.epoch == before[second], "one after the other"
    active = second.segment_topic(history_of(scene.world, second).active.segments[0].id)
    if is_held:
        scene.world.topics[active].sealed = False
        scene.world.begin_foreign(active, -1)
    else:
        scene.world.refuses = lambda effect, _: refused(effect) if seals(effect, f".{second.stream}.") else None
    scene.take_over()
    scene.until(lambda: scene.leader.pending_done, 2_000)
    scene.until(lambda: paths.committing(GROUP) not in scene.world.nodes, 2_000)
    assert scene.outcome(large) is None
    scene.world.refuses = lambda *_: None
    scene.world.end_foreign(-1)
    scene.until(lambda: scene.outcome(large) is not None, 60_000)
    assert scene.visible(large) == 2
    assert scene.terms_ended == 0
    scene.until(lambda: all_open(scene, ORDERS) and all_open(scene, OTHER), 60_000)
    scene.until(lambda: not {paths.stream_fault(ORDERS), paths.stream_fault(OTHER)} & scene.world.nodes.keys())


@pytest.mark.parametrize("name", [ACTIVE, DUPLICATE])
def test_what_a_takeover_has_no_answer_to_is_suspended_and_the_group_is_led(name: str) -> None:
    """A seal meets a native transaction of somebody else, and brokers refuse to say which it is."""
    scene = Scene()
    scene.commit(ORDERS, scene.old)
    scene.until(lambda: any(DUPLICATE in topic for topic in scene.world.topics))

    def guilty(effect: AnyEffect, _: int) -> fx.EffectRefusedError | None:
        if seals(effect, name) and -1 not in scene.world.open:
            topic = next(topic for topic, _ in effect.partitions if name in topic)  # type: ignore[attr-defined]
            scene.world.begin_foreign(topic, -1)
        return refused(effect) if isinstance(effect, fx.LookForObstacles) else None

    scene.world.refuses = guilty
    scene.take_over()
    scene.until(lambda: scene.leader.pending_done, 2_000)
    scene.others_go_on()
    assert -1 in scene.world.open
    assert paths.committing(GROUP) not in scene.world.nodes
    scene.steps(2_000)
    scene.others_go_on()
    assert scene.fault is not None
    assert "LookForObstacles" not in StreamFault.from_json(scene.fault).reason, "people do not know its name"
    scene.world.refuses = lambda *_: None
    scene.world.end_foreign(-1)
    scene.until(lambda: scene.outcome(scene.old) is not None, 60_000)
    scene.until(lambda: scene.fault is None, 60_000)
    assert scene.visible(scene.old) == 1
    assert scene.terms_ended == 0
