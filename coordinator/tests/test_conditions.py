"""Rounds of transactions with conditions: what is asked of the log, and what becomes of each answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import pytest

from coordinator.tests.makers import Bench
from rollbridge.base.effects import AnyEffect, run
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import ANY, DLSN, EMPTY, SN
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge.commitlog.control import ControlKind, ControlRecord
from rollbridge.metadata.changes import Roll
from rollbridge.stream.conditions import Condition, RefusedCondition, Scope, StreamCondition
from rollbridge_coordinator.commit.merge import TRIES, merge_direct
from rollbridge_coordinator.commit.plan import DirectRound, RollingRound, plan_round
from rollbridge_coordinator.core import effects as fx

ORDERS, PAYMENTS = "sales/orders", "sales/payments"
HALVES = [(0.0, 0.5), (0.5, 1.0)]


def at(offset: int) -> SN:
    return SN(DLSN.of(SegmentId.of(0, 0), offset), None, offset)


def expects(sn: SN, scope: Scope = Scope.SEGMENT, key: bytes | None = b"k", stream: int = 0) -> StreamCondition:
    return StreamCondition(stream, Condition(sn, scope, key))


Answers = Sequence[fx.Found | fx.Undecided]


class Carried:
    """What a round did."""

    def __init__(self, bench: Bench, item: BufferedTransaction, answer: Callable[[fx.Query], Answers]) -> None:
        self.looks: list[Sequence[fx.Query]] = []
        self.done: list[str] = []
        self.logged: list[ControlRecord] = []
        offsets = count(10, 10)

        def carried(effect: AnyEffect) -> object:
            self.done.append(type(effect).__name__)
            match effect:
                case fx.MergeFrames(items):
                    first = next(offsets)
                    return [first + place for place, _ in enumerate(items)]
                case fx.Look(queries):
                    self.looks.append(queries)
                    return [found for query in queries for found in answer(query)]
                case fx.AppendControl(_, records):
                    self.logged.extend(records)
                    return list(range(len(records)))
                case fx.AbortRound():
                    return None
                case fx.CommitRound():
                    return 1_000
                case _:
                    raise AssertionError(effect)

        run(merge_direct(bench.group, [item], bench.clock_ms), carried)


def test_a_transaction_with_conditions_has_a_round_of_its_own() -> None:
    bench = Bench({ORDERS: 1})
    before = bench.one(ORDERS, 0)
    alone = bench.one(ORDERS, 0, conditions=[expects(EMPTY)])
    bench.one(ORDERS, 0)
    assert plan_round(bench.group) == DirectRound((before,))
    bench.group.fold.settle(before.id)
    assert plan_round(bench.group) == DirectRound((alone,))


def test_a_transaction_with_conditions_is_rolled_alone() -> None:
    bench = Bench({ORDERS: 1})
    begun = [bench.begin(ORDERS, client=f"c{number}") for number in range(3)]
    bench.scale(ORDERS, [0], HALVES)
    items = []
    for identifier, conditions in zip(begun, ([expects(EMPTY)], [], [expects(EMPTY)]), strict=True):
        bench.data(identifier, ORDERS, 0)
        items.append(bench.commit(identifier, {(0, 0): 1}, conditions))
    assert plan_round(bench.group) == RollingRound((items[0],), (Roll(ORDERS, 0, 1, 2, 3, (0,)),))
    bench.group.fold.settle(items[0].id)
    assert plan_round(bench.group) == RollingRound((items[1],), (Roll(ORDERS, 0, 1, 2, 3, (0,)),))


def test_it_is_looked_at_below_the_own_records_and_committed_if_it_holds() -> None:
    bench = Bench({ORDERS: 1})
    item = bench.one(ORDERS, 0, conditions=[expects(at(7)), expects(at(3), Scope.KEY)])

    def answer(query: fx.Query) -> Answers:
        return [fx.Found(at(7) if query.condition.scope is Scope.SEGMENT else EMPTY, query.end or 0)]

    carried = Carried(bench, item, answer)
    assert carried.done == ["MergeFrames", "Look", "AppendControl", "CommitRound"]
    ((segment, key),) = carried.looks
    assert (segment.end, segment.since, segment.own) == (10, None, (fx.Span(10, 11),))
    assert (key.end, key.since, key.condition.key) == (10, 3, b"k")
    assert [record.kind for record in carried.logged] == [ControlKind.COMMIT]


def test_a_refused_one_leaves_its_abort_record_with_what_is_there() -> None:
    bench = Bench({ORDERS: 1})
    item = bench.one(ORDERS, 0, conditions=[expects(at(7))])
    carried = Carried(bench, item, lambda query: [fx.Found(at(8), query.end or 0)])
    assert carried.done == ["MergeFrames", "Look", "AbortRound", "AppendControl", "CommitRound"]
    (record,) = carried.logged
    assert record.kind is ControlKind.ABORT
    assert record.refused == RefusedCondition(ORDERS, b"k", at(7), at(8))
    assert record.reason.startswith("525: sales/orders with key b'k'")
    assert (record.records, record.placement) == (0, {})
    assert bench.group.counts["conditions_refused"] == 1
    assert item.state is State.ABORTED


def test_one_that_was_refused_before_its_round_is_logged_beside_others_and_holds_nobody_up() -> None:
    bench = Bench({ORDERS: 1})
    refused = bench.one(ORDERS, 0, conditions=[expects(at(7))])
    bench.group.fold.refuse(refused.id, "expired while stream sales/orders was in an error state", bench.clock_ms)
    innocent = bench.one(ORDERS, 0)
    planned = plan_round(bench.group)
    assert planned == DirectRound((refused, innocent))
    steps = merge_direct(bench.group, [refused, innocent], bench.clock_ms)
    assert isinstance(next(steps), fx.MergeFrames)
    appended = steps.send([10])
    assert isinstance(appended, fx.AppendControl)
    assert [record.kind for record in appended.records] == [ControlKind.ABORT, ControlKind.COMMIT]


def test_a_place_beyond_the_tail_is_refused_with_the_last_record_of_the_key() -> None:
    bench = Bench({ORDERS: 1})
    item = bench.one(ORDERS, 0, conditions=[expects(at(50), Scope.KEY)])

    def answer(query: fx.Query) -> Answers:
        return [fx.Found(EMPTY if query.since is not None else at(4), query.end or 0)]

    carried = Carried(bench, item, answer)
    assert carried.done.count("Look") == 2
    assert carried.logged[0].refused == RefusedCondition(ORDERS, b"k", at(50), at(4))


def test_a_round_that_others_wrote_into_is_done_again_behind_them() -> None:
    bench = Bench({ORDERS: 1})
    item = bench.one(ORDERS, 0, conditions=[expects(at(7))])
    carried = Carried(bench, item, lambda query: [fx.Found(at(7), query.end or 0, disturbed=query.end == 10)])
    assert carried.done == ["MergeFrames", "Look", "AbortRound", "MergeFrames", "Look", "AppendControl", "CommitRound"]
    assert [look[0].end for look in carried.looks] == [10, 20]
    assert carried.logged[0].kind is ControlKind.COMMIT


@pytest.mark.parametrize(
    ("found", "words", "looks"),
    [
        (fx.Undecided("somebody is slow"), "undecided: somebody is slow", 1),
        (fx.Found(at(7), 10, disturbed=True), "disturbed", TRIES),
    ],
)
def test_what_can_not_be_decided_ends_as_aborted_without_a_condition_to_blame(
    found: fx.Found | fx.Undecided, words: str, looks: int
) -> None:
    bench = Bench({ORDERS: 1})
    item = bench.one(ORDERS, 0, conditions=[expects(at(7))])
    carried = Carried(bench, item, lambda _: [found])
    assert len(carried.looks) == looks
    (record,) = carried.logged
    assert (record.kind, record.refused) == (ControlKind.ABORT, None)
    assert words in record.reason


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (expects(SN(dlsn=DLSN.of(SegmentId.of(5, 5), 1))), "cannot hold records of this key"),
        (expects(EMPTY, key=None), "needs a key"),
        (expects(EMPTY, stream=4), "no stream at place 4"),
    ],
)
def test_a_condition_that_can_never_hold_is_not_looked_at(condition: StreamCondition, words: str) -> None:
    bench = Bench({ORDERS: 2})
    item = bench.one(ORDERS, 0, conditions=[condition])
    carried = Carried(bench, item, lambda _: [])
    assert not carried.looks
    assert words in carried.logged[0].reason


def test_a_stream_that_is_not_written_is_looked_at_as_of_now() -> None:
    bench = Bench({ORDERS: 1, PAYMENTS: 2})
    identifier = bench.begin(ORDERS, PAYMENTS)
    bench.data(identifier, ORDERS, 0)
    item = bench.commit(identifier, {(0, 0): 1}, [expects(ANY, stream=1)])
    carried = Carried(bench, item, lambda query: [fx.Found(at(3), 4)])
    (query,) = carried.looks[0]
    assert (str(query.places.stream), query.end, query.own) == (PAYMENTS, None, ())
