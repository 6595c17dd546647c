"""Batches of plain writes: their futures, and what becomes of them when a batch is taken apart."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, cast

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.routing_makers import CONFIG
from rollbridge.base.ids import SegmentId
from rollbridge.base.sn import DLSN, SN
from rollbridge.config import WriterOptions
from rollbridge.errors import ConfigError, KafkaUnavailableError
from rollbridge.kafka.queues import Lane
from rollbridge.kafka.records import read_records
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.keyspace import KeyRange, KeySpace, even_ranges
from rollbridge.stream.routing import StreamView
from rollbridge.writer.accumulator import PlainFuture, ProducerBatch
from rollbridge.writer.segments import SegmentQueue, StreamQueues
from rollbridge.writer.sender import PlainSender


class Home:
    """What a batch needs of its channel."""

    def new_batch(self, opened_s: float, limit_bytes: int) -> ProducerBatch:
        return ProducerBatch(cast("Any", self), DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, limit_bytes), opened_s)

    def sequence_base(self, segment: SegmentId) -> int | None:
        return 1_000 * segment.epoch


def batch_of(rows: list[tuple[bytes | None, bytes]]) -> ProducerBatch:
    batch = Home().new_batch(0.0, 1 << 20)
    for key, value in rows:
        batch.append(batch.count, 1_700_000_000_000 + batch.count, key, value, [("h", b"x")])
        batch.count += 1
    batch.close()
    return batch


def queues(count: int) -> list[SegmentQueue[ProducerBatch]]:
    history = EpochHistory.create(even_ranges(count), 0)
    stream_queues: StreamQueues[ProducerBatch] = StreamQueues(
        history,
        lambda segment: (str(segment), 0),
        lambda _: Lane(),
        lambda batch, heirs: batch.take_apart(heirs, KeySpace(), 1 << 20),
    )
    return stream_queues.active


def future_of(batch: ProducerBatch, index: int) -> PlainFuture:
    future = PlainFuture()
    future.batch, future.index = batch, index
    return future


ROWS = st.lists(st.tuples(st.none() | st.binary(max_size=3), st.binary(max_size=20)), min_size=1, max_size=40)


@given(rows=ROWS, count=st.integers(1, 4), limit_bytes=st.integers(200, 2_000))
def test_taken_apart_every_record_goes_on_and_its_future_follows(
    rows: list[tuple[bytes | None, bytes]], count: int, limit_bytes: int
) -> None:
    batch = batch_of(rows)
    batch.ids = dict.fromkeys(range(0, len(rows), 3), 7)
    before = [(item.timestamp, item.key, item.value, item.headers) for item in read_records(batch.data)]
    made = list(batch.take_apart(queues(count), KeySpace(), limit_bytes))
    assert not batch.settled
    written: dict[DLSN, Any] = {}
    for number, (piece, queue) in enumerate(made):
        base = 10_000 * number
        for delta, item in enumerate(read_records(piece.data)):
            assert item.key is None or KeySpace().position(item.key) in queue.segment.range
            written[DLSN.of(queue.id, base + delta)] = (item.timestamp, item.key, item.value, item.headers)
        piece.written(queue, base)
    assert len(written) == len(rows)
    for index, row in enumerate(before):
        sn = future_of(batch, index).result(0)
        assert sn.dlsn is not None
        assert written[sn.dlsn] == row
        assert sn.transaction_id == (7 if index % 3 == 0 else None)
        assert sn.sequence_id == sn.dlsn.offset
    for queue in {queue for _, queue in made}:  # what goes to one queue keeps its order
        order = [
            index
            for piece, mine in made
            if mine is queue
            for index in range(len(rows))
            if batch.find(index)[0] is piece
        ]
        assert order == sorted(order)


def test_a_key_goes_to_the_first_lane_that_holds_it() -> None:
    """Of two queues in line the older one, which may be about to hand over what came later for the same key."""
    older, newer = queues(1)[0], queues(1)[0]
    [(piece, queue)] = batch_of([(b"a", b"1"), (b"b", b"2")]).take_apart([older, newer], KeySpace(), 1 << 20)
    assert (queue, piece.count) == (older, 2)
    assert KeyRange(0.0, 1.0).holds(KeyRange(0.25, 0.5))
    assert not KeyRange(0.25, 0.5).holds(KeyRange(0.25, 0.6))


def test_who_waits_is_woken_by_the_batch_that_holds_the_record_in_the_end() -> None:
    batch = batch_of([(b"a", b"1"), (b"b", b"2")])
    found: list[SN] = []
    thread = threading.Thread(target=lambda: found.append(future_of(batch, 1).result(30)))
    thread.start()
    seen: list[int] = []
    batch.watch(0, lambda held, index: seen.append(held.base_offset + index))
    [queue] = queues(1)
    for piece, _ in list(batch.take_apart([queue], KeySpace(), 1 << 20)):
        piece.written(queue, 40)
        piece.tell()
    thread.join(30)
    assert found == [SN(DLSN(0, 0, 41), None, 41)]
    assert seen == [40]


def test_a_callback_that_comes_late_is_called_at_once_and_one_that_fails_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = batch_of([(b"a", b"1")])
    [queue] = queues(1)
    batch.written(queue, 3)
    batch.tell()
    seen: list[PlainFuture] = []
    future = future_of(batch, 0)
    future.add_done_callback(seen.append)
    assert seen == [future]

    def fail(_: PlainFuture) -> None:
        raise ValueError("of the user")

    future.add_done_callback(fail)
    assert "callback.failed callback='a written record'" in caplog.text


def test_a_future_of_a_failed_batch_raises_a_new_error_each_time() -> None:
    batch = batch_of([(b"a", b"1")])
    future = future_of(batch, 0)
    with pytest.raises(TimeoutError):
        future.result(0)
    assert (future.done(), future.running(), future.cancel(), future.cancelled()) == (False, True, False, False)
    batch.failed(lambda: KafkaUnavailableError("no broker"))
    first, second = future.exception(), future.exception()
    assert isinstance(first, KafkaUnavailableError)
    assert first is not second


@pytest.mark.parametrize(
    "change",
    [
        {"linger_s": -1.0},
        {"batch_bytes": 100},
        {"batch_bytes": 2 << 20},
        {"buffer_bytes": 1},
        {"compression": "brotli"},
        {"block_s": 0.0},
        {"delivery_timeout_s": 0.0},
    ],
)
def test_options_that_can_not_be_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        WriterOptions(**change)


class _Catalog:
    """The views of a stream as a connection learns of them, before its housekeeping has looked at its writers."""

    def __init__(self, view: StreamView) -> None:
        self.now = view

    def view(self, stream: str) -> StreamView:
        assert stream == str(self.now.config.name)
        return self.now


def test_a_writer_of_another_life_of_a_stream_has_a_channel_of_its_own() -> None:
    name = str(CONFIG.name)
    history = EpochHistory.create(even_ranges(1), 0)
    catalog = _Catalog(StreamView.of(CONFIG, history))
    engine: Any = object.__new__(PlainSender)  # without brokers, which this asks nothing
    engine._catalog, engine._channels, engine.lock = catalog, {}, threading.RLock()
    engine._lanes, engine._former, engine.wake = {}, [], lambda: None
    engine.options = WriterOptions()
    first = engine.channel(name)
    catalog.now = StreamView.of(CONFIG, EpochHistory.create(even_ranges(2), 0))
    assert engine.channel(name) is first, "it was scaled"
    catalog.now = StreamView.of(replace(CONFIG, created_ms=CONFIG.created_ms + 1), history)
    second = engine.channel(name)
    assert second is not first
    assert second.view is catalog.now
    assert engine.channel(name) is second
