"""Leases that are extended: what a leader has looked up for the former deadline counts no more."""

from __future__ import annotations

import pytest

from coordinator.tests.makers import Bench, run
from rollbridge.model.frames import FrameHeader, FrameKind, encode_extend
from rollbridge.model.ids import TransactionId
from rollbridge.model.records import SetNode, TransactionRecord
from rollbridge.model.transaction import State
from rollbridge_coordinator.procedures.upkeep import await_frames, expire_overdue, record_extended
from rollbridge_coordinator.state.effects import EndOffsets, Write

ORDERS, PAYMENTS = "sales/orders", "sales/payments"


def extend(bench: Bench, transaction: TransactionId, lease_ms: int) -> None:
    bench.feed(ORDERS, FrameHeader(FrameKind.EXTEND, transaction.bytes), encode_extend(lease_ms))


def test_the_ends_of_buffers_are_looked_up_again_for_the_new_deadline() -> None:
    bench = Bench({ORDERS: 1})
    transaction = bench.begin(ORDERS, lease_ms=1_000)
    item = bench.group.fold.open[transaction.bytes]
    assert [type(effect) for effect in run(bench, expire_overdue(bench.group, 2_001), unread=1)] == [EndOffsets]
    bench.clock_ms = 1_900
    extend(bench, transaction, 1_000)  # what was unread
    run(bench, expire_overdue(bench.group, 2_002))
    assert item.state is State.OPEN
    # Another frame is on its way when the new deadline is over: the commit, in time.
    assert [type(effect) for effect in run(bench, expire_overdue(bench.group, 2_901), unread=1)] == [EndOffsets]
    assert item.state is State.OPEN
    bench.clock_ms = 2_899
    bench.commit(transaction, {})
    run(bench, expire_overdue(bench.group, 2_902))
    assert bench.group.fold.open[transaction.bytes].state is State.COMMITTING


@pytest.mark.parametrize("is_extended", [False, True])
def test_a_commit_waits_for_its_frames_and_not_for_what_its_lease_had_waited_for(is_extended: bool) -> None:
    bench = Bench({ORDERS: 1, PAYMENTS: 1})
    transaction = bench.begin(ORDERS, PAYMENTS, lease_ms=1_000)
    run(bench, expire_overdue(bench.group, 2_001), unread=1)  # of each buffer one frame is unread
    bench.clock_ms = 1_900
    if is_extended:
        extend(bench, transaction, 1_000)
    else:
        bench.data(transaction, ORDERS, 0)
    bench.data(transaction, PAYMENTS, 0)
    item = bench.commit(transaction, {(1, 0): 2} if is_extended else {(0, 0): 1, (1, 0): 2})  # one is still unread
    assert not item.is_complete()
    assert [type(effect) for effect in run(bench, await_frames(bench.group, [item], 2_002), unread=1)] == [EndOffsets]
    assert item.state is State.COMMITTING, item.reason
    bench.data(transaction, PAYMENTS, 0)
    assert item.is_complete()


def test_the_record_of_the_transaction_says_the_new_lease() -> None:
    bench = Bench({ORDERS: 1})
    known, young = bench.begin(ORDERS), bench.begin(ORDERS)
    bench.group.recorded.add(known.bytes)
    for transaction in (known, young):
        extend(bench, transaction, 200_000)
    [written] = run(bench, record_extended(bench.group, 0))
    assert isinstance(written, Write)
    [node] = written.operations
    assert isinstance(node, SetNode)
    record = TransactionRecord.from_json(node.value)
    assert (record.id, record.lease_ms) == (known, 200_000)
    assert not bench.group.fold.extended
    assert run(bench, record_extended(bench.group, 0)) == []
