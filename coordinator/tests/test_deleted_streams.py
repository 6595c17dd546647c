"""Deletions of streams whose buffers are not read to their ends, and commits that name a stream which is gone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.tests.scenes import ORDERS, OTHER, Scene
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest, PieceKey
from rollbridge.commitlog.control import ControlKind
from rollbridge.metadata import paths
from rollbridge.metadata.requests import RequestKind
from rollbridge.stream.names import StreamName

THIRD = StreamName("sales", "third")


class UnreadScene(Scene):
    """Three streams, whose leader does not come to read some of the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.ask(RequestKind.CREATE_STREAM, THIRD, segments=1)
        self.until(lambda: str(THIRD) in self.state.streams)
        self.commit(ORDERS, self.old)
        self.ended(self.old)

    @property
    def state(self) -> Any:
        """What the leader knows."""
        return self.leader.group

    def unread(self, *streams: StreamName) -> None:
        """From now on the leader reads all buffers but these."""
        self.world.unread = {name.buffer_topic() for name in streams}

    def join(self, transaction: TransactionId, stream: StreamName, home: StreamName = ORDERS) -> None:
        """Have a stream join a transaction, and write a record to it."""
        begin = BeginFrame(f"c{self.counter}", 0, None, 10_000_000, {str(home): transaction.epoch, str(stream): 0})
        self._send(stream, FrameHeader(FrameKind.BEGIN, transaction.bytes, 0, 1), begin.encode())
        batch = json.dumps([["k", "joined", str(transaction), 1]]).encode()
        self._send(stream, FrameHeader(FrameKind.DATA, transaction.bytes, 0, 0, 1, 1), batch)

    def commit_both(self, transaction: TransactionId) -> None:
        """Ask for the commit of a transaction that a second stream has joined."""
        segment = self._segment(ORDERS, transaction.epoch)
        manifest = Manifest({PieceKey(0, 0, segment): 1, PieceKey(0, 1, 0): 1})
        self._send(ORDERS, FrameHeader(FrameKind.COMMIT, transaction.bytes), manifest.encode())


def test_a_stream_that_has_joined_a_transaction_is_not_deleted_however_far_its_leader_lags() -> None:
    scene = UnreadScene()
    scene.unread(OTHER)
    transaction = scene.begin(ORDERS)
    scene.join(transaction, OTHER)
    asked = scene.ask(RequestKind.DELETE_STREAM, OTHER)
    scene.steps(200)
    scene.unread()
    answer = scene.answered(asked)
    assert (answer.ok, answer.code) == (False, "stream-busy"), answer
    scene.commit_both(transaction)
    assert scene.ended(transaction).kind is ControlKind.COMMIT
    assert scene.answer(RequestKind.DELETE_STREAM, OTHER).ok


def commit_in_the_middle_of_a_deletion(scene: UnreadScene) -> TransactionId:
    """Commit a transaction that a stream joins which is being deleted, in the moment in which that is decided."""
    scene.unread(OTHER, THIRD)
    scene.begin(THIRD)  # the deletion waits for it to be read
    asked = scene.ask(RequestKind.DELETE_STREAM, OTHER)
    scene.until(lambda: scene.state.waits.questions)
    transaction = scene.begin(ORDERS)
    scene.join(transaction, OTHER)
    scene.commit_both(transaction)
    scene.until(lambda: (item := scene.state.fold.open.get(transaction.bytes)) is not None and bool(item.barrier))
    assert asked not in scene.world.nodes
    return transaction


def test_a_commit_that_names_a_stream_deleted_in_that_moment_is_aborted() -> None:
    scene = UnreadScene()
    transaction = commit_in_the_middle_of_a_deletion(scene)
    scene.unread(OTHER)
    scene.until(lambda: paths.stream(OTHER) not in scene.world.nodes)
    outcome = scene.ended(transaction)
    assert (outcome.kind, "a stream that had joined was deleted" in outcome.reason) == (ControlKind.ABORT, True)
    scene.commits(ORDERS)
    assert scene.terms_ended == 0


def test_a_commit_that_waits_for_frames_can_be_aborted() -> None:
    scene = UnreadScene()
    transaction = commit_in_the_middle_of_a_deletion(scene)
    answer = scene.answer(RequestKind.ABORT_TRANSACTION, transaction=str(transaction), reason="now")
    assert answer.ok, answer
    outcome = scene.outcome(transaction)
    assert outcome is not None
    assert (outcome.kind, outcome.reason[:4]) == (ControlKind.ABORT, "now;")


@pytest.mark.parametrize("kind", [RequestKind.LOOK_UP, RequestKind.FENCE])
def test_a_question_does_not_wait_for_a_stream_that_is_gone(kind: RequestKind) -> None:
    scene = UnreadScene()
    scene.unread(OTHER, THIRD)
    scene.begin(THIRD)
    scene.ask(RequestKind.DELETE_STREAM, OTHER)
    scene.until(lambda: scene.state.waits.questions)
    scene.begin(OTHER)
    asked = scene.ask(kind, owner="somebody", owner_epoch=1)
    scene.until(lambda: len(scene.state.waits.questions) == 2)
    scene.unread(OTHER)
    assert scene.answered(asked).ok


def test_a_question_that_was_withdrawn_is_forgotten() -> None:
    """Its client may ask again, and again, for as long as nobody can answer."""
    scene = UnreadScene()
    scene.unread(OTHER)
    scene.begin(OTHER)
    for _ in range(3):
        asked = scene.ask(RequestKind.LOOK_UP, owner="somebody", owner_epoch=1)
        scene.until(lambda asked=asked: asked.rpartition("/")[2] in scene.state.waits.questions)  # type: ignore[misc]
        assert len(scene.state.waits.questions) == 1
        del scene.world.nodes[asked.replace("/answers/", "/requests/")]  # as its session ends


def test_nothing_waits_for_the_buffer_of_a_former_life() -> None:
    scene = UnreadScene()
    now, former = OTHER.buffer_topic(), OTHER.buffer_topic(7)
    assert [scene.state.is_folded({(topic, 0): 1_000}) for topic in (now, former)] == [False, True]
