"""Commits that name streams of which nothing was read yet wait for the buffers of all streams, then are refused."""

from __future__ import annotations

import pytest

from coordinator.tests.makers import Bench, run
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import FrameHeader, FrameKind, encode_extend
from rollbridge.buffer.state import BufferedTransaction
from rollbridge.buffer.table import State
from rollbridge_coordinator.commit.expiry import await_frames
from rollbridge_coordinator.core.effects import EndOffsets

ORDERS, OTHERS, BYSTANDERS = "sales/orders", "sales/others", "sales/bystanders"
STREAMS = (ORDERS, OTHERS, BYSTANDERS)


def wait_for_frames(bench: Bench, item: BufferedTransaction, unread: int) -> list[EndOffsets]:
    """Look once whether what a commit names has come; buffers end ``unread`` messages behind what was folded."""
    effects = run(bench, await_frames(bench.group, [item], bench.clock_ms), unread)
    asked = [effect for effect in effects if isinstance(effect, EndOffsets)]
    assert len(asked) == len(effects)
    return asked


def arrive(bench: Bench, stream: str) -> None:
    """A message that changes nothing."""
    bench.feed(stream, FrameHeader(FrameKind.EXTEND, TransactionId.of(0, 99).bytes), encode_extend(1))


@pytest.fixture
def bench() -> Bench:
    return Bench(dict.fromkeys(STREAMS, 1))


def test_a_commit_that_names_a_stream_that_has_joined_waits_for_the_buffers_of_all(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    bench.commit(transaction, {(1, 0): 1})  # of which stream that is stands in a buffer that was not read
    item = bench.group.fold.open[transaction.bytes]
    [asked] = wait_for_frames(bench, item, unread=1)
    assert {place[0] for place in asked.partitions} == {
        bench.group.streams[name].config.buffer_topic for name in STREAMS
    }
    arrive(bench, ORDERS)
    arrive(bench, BYSTANDERS)
    assert wait_for_frames(bench, item, unread=0) == []
    assert [item.state] == [State.COMMITTING], "the buffer of the stream that has joined was not read to its end"
    arrive(bench, OTHERS)
    wait_for_frames(bench, item, unread=0)
    assert [item.state] == [State.ABORTING]


def test_a_commit_of_known_streams_waits_for_their_buffers_alone(bench: Bench) -> None:
    transaction = bench.begin(ORDERS)
    bench.commit(transaction, {(0, 0): 1})
    item = bench.group.fold.open[transaction.bytes]
    [asked] = wait_for_frames(bench, item, unread=1)
    assert [place[0] for place in asked.partitions] == [bench.group.streams[ORDERS].config.buffer_topic]
