"""Frames that a broker acknowledges without an offset: nobody knows what became of them, so they are sent again."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.schema.produce.v12.response import PartitionProduceResponse
from kio.static.primitive import i32, i64

import rollbridge
from integration_tests.clients import Site
from rollbridge.client.sender import FrameBatch
from rollbridge.client.transaction import CommitFuture
from rollbridge.kafka.dispatch import Dispatcher
from rollbridge.kafka.queues import PartitionQueue

TRANSACTIONS = 40


@pytest.mark.parametrize("written", [True, False], ids=["it was written", "it was lost"])
def test_a_frame_that_is_acknowledged_without_an_offset_is_sent_again(
    site: Site, orders: str, payments: str, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    judge, send = Dispatcher._judge, Dispatcher._send
    doubted: list[FrameBatch] = []

    def judge_without_offset(
        dispatcher: Any,
        queue: PartitionQueue[FrameBatch],
        batch: FrameBatch,
        answer: PartitionProduceResponse,
        sent_at: float,
    ) -> None:
        if written and batch not in doubted:
            doubted.append(batch)
            answer = replace(answer, base_offset=i64(-1))
        judge(dispatcher, queue, batch, answer, sent_at)

    def lose(dispatcher: Any, node: int, request: Any) -> None:
        """Answer for each batch without sending it, the first time."""
        for target, (queue, batch) in list(request.items.items()) if not written else ():
            if batch not in doubted:
                doubted.append(batch)
                del request.items[target]
                judge(dispatcher, queue, batch, unheard(target[1]), time.monotonic())
        if request.items:
            send(dispatcher, node, request)

    monkeypatch.setattr(Dispatcher, "_judge", judge_without_offset)
    monkeypatch.setattr(Dispatcher, "_send", lose)
    with site.connect() as client:
        futures = [write(client, number, orders, payments) for number in range(TRANSACTIONS)]
        positions = [future.result(60).position for future in futures]
    assert positions == sorted(positions)
    expected = sorted(b"%d" % number for number in range(TRANSACTIONS))
    assert sorted(message.value() or b"" for message in site.committed(orders)) == expected
    assert sorted(message.value() or b"" for message in site.committed(payments)) == sorted(
        b"%d" % number for number in range(0, TRANSACTIONS, 3)
    )
    assert sum(batch.count for batch in doubted) >= TRANSACTIONS


def unheard(partition: int) -> PartitionProduceResponse:
    """An acknowledgement without an offset."""
    return PartitionProduceResponse(
        index=i32(partition), error_code=ErrorCode.none, base_offset=i64(-1), record_errors=()
    )


def write(client: rollbridge.Bridge, number: int, orders: str, payments: str) -> CommitFuture:
    """A transaction over one stream, or, each third, over both."""
    streams = (orders,) if number % 3 else (payments, orders)
    transaction = client.begin(*streams)
    for stream in streams:
        transaction.write(stream, key=b"k%d" % number, value=b"%d" % number)
    return transaction.commit_async()
