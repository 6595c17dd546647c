"""Expiry of epochs: when a leader drops them, and what a transaction meets that begins against one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from coordinator.tests.makers import Bench, varied
from rollbridge.base.effects import AnyEffect, run
from rollbridge.base.ids import SegmentId
from rollbridge.metadata import paths
from rollbridge.metadata.changes import Roll
from rollbridge.metadata.records import CheckNode, CreateNode, DeleteNode, Mark, NodeOperation, SetNode, Truncation
from rollbridge.metadata.requests import AdminRequest, RequestKind
from rollbridge.stream.config import Retention
from rollbridge.stream.config import StreamState as Lifecycle
from rollbridge.stream.names import StreamName
from rollbridge_coordinator.commit.plan import Refusal, RollingRound, plan_round
from rollbridge_coordinator.commit.roll import _epochs
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.stream_state import LedStream
from rollbridge_coordinator.core.waits import StaleStateError
from rollbridge_coordinator.streams import retention
from rollbridge_coordinator.streams.create import drop_epochs

ORDERS = "sales/orders"
NAME = StreamName.parse(ORDERS)
DAY_MS = 24 * 3_600_000


def grown(scales: int) -> Bench:
    """A stream with one segment that was replaced so often, once each second; only the last two are left."""
    bench = Bench({ORDERS: 1})
    stream = bench.group.streams[ORDERS]
    for epoch in range(1, scales + 1):
        bench.clock_ms = epoch * 1_000
        bench.scale(ORDERS, [epoch - 1], [(0.0, 1.0)])
        stream.history = stream.history.with_sealed_ends(epoch, {SegmentId.of(epoch - 1, epoch - 1): 5})
    stream.history = stream.history.with_removed(SegmentId.of(item, item) for item in range(scales - 1))
    return bench


def housekeep(bench: Bench, now_ms: int, answers: Mapping[str, bytes] | None = None) -> list[tuple[NodeOperation, ...]]:
    """Let the leader drop what it may; gives what it wrote."""
    written: list[tuple[NodeOperation, ...]] = []

    def answer(effect: AnyEffect) -> Any:
        match effect:
            case fx.ReadNodes(names):
                return {path: (answers or {}).get(path) for path in names}
            case fx.Write(operations):
                written.append(tuple(operations))
                return True
        return None

    run(drop_epochs(bench.group, now_ms), answer)
    return written


def state(bench: Bench) -> LedStream:
    return bench.group.streams[ORDERS]


def test_epochs_are_dropped_a_day_after_clients_could_take_them_for_the_newest() -> None:
    bench = grown(9)
    assert housekeep(bench, DAY_MS) == []
    assert housekeep(bench, DAY_MS + 4_500) == [], "it is looked at once a minute"
    bench.group.housekeeping.done_ms.clear()
    [operations] = housekeep(bench, DAY_MS + 4_500)
    kept = state(bench).history
    assert kept.first == 4
    assert operations == (
        CheckNode(paths.stream(NAME)),
        CreateNode(paths.truncation(NAME), Truncation(kept.removed, frozenset(), kept.foundation).to_json()),
        *(DeleteNode(paths.epoch(NAME, epoch)) for epoch in range(4)),
    )
    bench.group.housekeeping.done_ms.clear()
    [operations] = housekeep(bench, 2 * DAY_MS, {paths.truncation(NAME): b"what stands there"})
    assert isinstance(operations[1], SetNode)
    assert state(bench).history.first == 7
    assert bench.group.counts["epochs_dropped"] == 7
    bench.group.housekeeping.done_ms.clear()
    assert housekeep(bench, 3 * DAY_MS) == [], "nothing is left to be dropped"


def test_an_open_transaction_keeps_its_epoch_until_its_outcome_is_settled() -> None:
    bench = grown(2)
    transaction = bench.begin(ORDERS)
    for epoch in range(3, 9):
        bench.scale(ORDERS, [epoch - 1], [(0.0, 1.0)])
        history = state(bench).history.with_sealed_ends(epoch, {SegmentId.of(epoch - 1, epoch - 1): 5})
        state(bench).history = history.with_removed([SegmentId.of(epoch - 2, epoch - 2)])
    housekeep(bench, 2 * DAY_MS)
    assert state(bench).history.first == 2
    bench.data(transaction, ORDERS, 2)
    bench.commit(transaction, {(0, 2): 1})
    assert isinstance(plan_round(bench.group), RollingRound)
    housekeep(bench, 3 * DAY_MS)
    assert state(bench).history.first == 2, "what is decided and not settled keeps it as well"
    bench.group.fold.settle(transaction.bytes)
    housekeep(bench, 4 * DAY_MS)
    assert state(bench).history.first == 6


@pytest.mark.parametrize(("now_ms", "outcome"), [(DAY_MS, RollingRound), (2 * DAY_MS, Refusal)])
def test_who_has_not_heard_of_a_scale_for_a_day_is_refused_and_not_before(now_ms: int, outcome: type) -> None:
    bench = grown(9)
    housekeep(bench, now_ms)
    epochs = {ORDERS: 3}
    transaction = bench.begin_against(epochs)
    bench.data(transaction, ORDERS, 3)
    bench.commit(transaction, {(0, 3): 1})
    planned = plan_round(bench.group)
    assert isinstance(planned, outcome)
    if isinstance(planned, Refusal):
        assert planned.reason == "epoch 3 of stream sales/orders was dropped before the transaction began in its buffer"


def test_marks_of_a_retention_keep_what_they_name_and_those_of_none_do_not() -> None:
    bench = grown(9)
    marks = [Mark(1, 10, {SegmentId.of(3, 3): 5}), Mark(2, 20, {SegmentId.of(9, 9): 0})]
    state(bench).marks = list(marks)
    state(bench).config = replace(state(bench).config, retention=Retention(ms=1_000))
    housekeep(bench, 2 * DAY_MS)
    assert state(bench).history.first == 3
    assert state(bench).marks == marks
    state(bench).config = replace(state(bench).config, retention=Retention())
    housekeep(bench, 3 * DAY_MS)
    assert state(bench).history.first == 7
    assert state(bench).marks == marks[1:], "nothing can be truncated where nothing is"


def test_a_topic_that_could_not_be_deleted_is_not_forgotten() -> None:
    bench = grown(9)
    state(bench).removing = frozenset({SegmentId.of(5, 5)})
    housekeep(bench, 2 * DAY_MS)
    assert state(bench).history.first == 4
    assert SegmentId.of(5, 5) in state(bench).history.removed


def test_a_truncation_that_removes_more_than_the_node_holds_goes_on_with_the_next() -> None:
    bench = grown(9)
    state(bench).history = replace(state(bench).history, removed=frozenset())
    usual = bench.group.settings
    request = AdminRequest(kind=RequestKind.TRUNCATE_STREAM, stream=ORDERS, cut={SegmentId.of(9, 9): 0}, created_ms=0)

    def truncate() -> set[str]:
        """Truncate and drop what goes with it; gives the topics whose records were deleted."""
        deleted: set[str] = set()
        kept = Truncation(state(bench).history.removed, frozenset(), state(bench).history.foundation).to_json()
        most = len(kept) + (3 - len(state(bench).history.removed)) * retention.REMOVED_BYTES
        bench.group.settings = varied(usual, write_bytes_max=most)

        def answer(effect: AnyEffect) -> Any:
            match effect:
                case fx.StableEnds(topics):
                    return dict.fromkeys(topics, 0)
                case fx.ReadNodes(names):
                    return dict.fromkeys(names)
                case fx.DeleteRecords(before):
                    deleted.update(topic for topic, _ in before)
                    return frozenset()
                case fx.Write():
                    return True
            return None

        run(retention.truncate_stream(bench.group, state(bench), "request-1", request, 0), answer)
        state(bench).removing = frozenset()
        bench.group.settings = usual
        bench.group.housekeeping.done_ms.clear()
        housekeep(bench, 2 * DAY_MS)
        return deleted

    assert truncate() == {NAME.segment_topic(SegmentId.of(item, item)) for item in range(3, 9)}
    assert state(bench).history.removed == {SegmentId.of(2, 2)}
    assert state(bench).history.first == 2
    truncate()
    truncate()
    truncate()
    assert state(bench).history.first == 8
    assert state(bench).history.removed == {SegmentId.of(8, 8)}


def test_a_stream_that_is_being_deleted_is_left_alone() -> None:
    bench = grown(9)
    state(bench).config = replace(state(bench).config, state=Lifecycle.DELETING)
    assert housekeep(bench, 2 * DAY_MS) == []


def test_a_leader_that_was_left_behind_drops_nothing() -> None:
    bench = grown(9)
    before = state(bench).history
    procedure = drop_epochs(bench.group, 2 * DAY_MS)
    next(procedure)
    procedure.send({paths.truncation(NAME): None})
    with pytest.raises(StaleStateError):
        procedure.send(False)
    assert state(bench).history == before


def test_many_epochs_are_dropped_in_steps_each_of_which_is_whole() -> None:
    bench = grown(1_200)
    written = housekeep(bench, 3 * DAY_MS)
    assert [sum(isinstance(item, DeleteNode) for item in operations) for operations in written] == [500, 500, 198]
    firsts = []
    for operations in written:
        node = operations[1]
        assert isinstance(node, CreateNode)
        foundation = Truncation.from_json(node.value).foundation
        assert foundation is not None
        assert foundation.bases == foundation.ends == (5 * foundation.first,)
        firsts.append(foundation.first)
    assert firsts == [500, 1000, 1198]


@pytest.mark.parametrize(("topic", "age_ms", "root"), [("", DAY_MS, 2), ("", DAY_MS - 1, 0), ("orders", DAY_MS, 0)])
def test_a_rolling_commit_makes_a_root_after_a_day_unless_a_segment_is_on_an_adopted_topic(
    topic: str, age_ms: int, root: int
) -> None:
    bench = Bench({ORDERS: 2})
    state(bench).config = replace(state(bench).config, topic=topic)
    prepared = SegmentId.of(state(bench).history.next_prepared(0), 0)
    roll = Roll(ORDERS, 0, 0, 1, 2, prepared={0: prepared})
    duplicate, again = _epochs(bench.group, roll, age_ms)
    assert (duplicate.reference_epoch, again.reference_epoch) == (0, root)
    assert _epochs(bench.group, roll, age_ms) == (duplicate, again), "the next leader plans the same"
    state(bench).history = state(bench).history.with_records(duplicate, again)
    assert _epochs(bench.group, roll, 2 * age_ms) == (duplicate, again), "what is published stays"
