"""A plain reader beside a transaction that stays open: how long does it wait for what others write?

A plain producer appends one record every 10 ms, which carries the time it was sent; a plain ``read_committed`` consumer
in a process of its own takes the difference. Meanwhile a transaction writes to the same topic, or stream, and commits
in the end. Two things are told: the longest wait of what was sent while the transaction was open, and of what was sent
from the request to commit on, which has to wait for all of the transaction's records to be merged, and to be read.
"""

from __future__ import annotations

import multiprocessing as mp
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Final

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.native import LARGE_BATCHES, NativeProducer
from benchmarks.site import Site, reader_settings, records

_PING: Final = b"ping"
_STAMP: Final = struct.Struct(">4sq")
_EVERY_S: Final = 0.01
_SLICES_PER_S: Final = 10
_RECORDS_PER_SLICE: Final = 500
_GRACE_NS: Final = 20_000_000


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """A transaction that is open for 20 s (4 s if ``quick``)."""
    seconds = 4 if quick else 20
    return Experiment(
        name="reader",
        rounds=rounds,
        warm_ups=0,
        sides={OURS: lambda: _ours(site, seconds), "native": lambda: _native(site, seconds)},
        rows=[
            Row(
                name="reader-wait",
                title=f"longest wait of a plain reader while a transaction is open for {seconds} s",
                metric="longest_ms",
                unit="ms",
                better=Better.LESS,
                bar=100.0,
                beside=("native",),
            ),
            Row(
                name="reader-wait-commit",
                title=f"the same, of what comes while its {seconds * _SLICES_PER_S * _RECORDS_PER_SLICE:,} records "
                "commit",
                metric="commit_ms",
                unit="ms",
                better=Better.LESS,
                beside=("native",),
            ),
        ],
    )


def _ours(site: Site, seconds: int) -> Measured:
    stream = site.make_stream(f"reader-{time.monotonic_ns()}")
    [segment] = site.segment_topics(stream)

    def hold(write_until: Callable[[Callable[[], object]], int]) -> int:
        transaction = site.bridge.begin(stream)
        asked_ns = write_until(lambda: transaction.write_all(stream, records(_RECORDS_PER_SLICE, b"open")))
        transaction.commit()
        return asked_ns

    return _observe(site, segment, seconds, hold)


def _native(site: Site, seconds: int) -> Measured:
    topic = site.make_topic(f"reader-{time.monotonic_ns()}")
    producer = NativeProducer(site.bootstrap_servers, LARGE_BATCHES)

    def hold(write_until: Callable[[Callable[[], object]], int]) -> int:
        producer.begin()
        asked_ns = write_until(lambda: producer.write(topic, records(_RECORDS_PER_SLICE, b"open")))
        producer.commit()
        return asked_ns

    try:
        return _observe(site, topic, seconds, hold)
    finally:
        producer.close()


Hold = Callable[[Callable[[Callable[[], object]], int]], int]
"""Holds a transaction open: is given what writes until time is up, and gives when the commit was asked for, in ns."""


def _observe(site: Site, topic: str, seconds: int, hold: Hold) -> Measured:
    context = mp.get_context("spawn")
    ready, done = context.Event(), context.Event()
    waits: mp.queues.Queue[list[tuple[int, int]]] = context.Queue()
    child = context.Process(target=_read, args=(site.bootstrap_servers, topic, ready, done, waits))
    child.start()
    pinger = _Pinger(site.bootstrap_servers, topic)
    pinger.start()
    try:
        if not ready.wait(60):
            raise TimeoutError("the reader did not come up")

        def write_until(write: Callable[[], object]) -> int:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                write()
                time.sleep(min(1 / _SLICES_PER_S, left))
            return time.monotonic_ns()

        asked_ns = hold(write_until)
        time.sleep(1.0)  # the reader takes what was sent during the commit
    finally:
        pinger.stop()
        done.set()
    seen = waits.get(timeout=60)
    child.join()
    # What was sent just before the request may be overtaken by the merge: it counts as during the commit.
    open_ns = [wait for sent, wait in seen if sent + _GRACE_NS < asked_ns]
    commit_ns = [wait for sent, wait in seen if sent + _GRACE_NS >= asked_ns]
    return {"longest_ms": max(open_ns) / 1e6, "commit_ms": max(commit_ns) / 1e6}


class _Pinger(threading.Thread):
    """Appends a record with the time now and then, as any plain producer does."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        super().__init__(name="pinger", daemon=True)
        self._topic = topic
        self._stopping = threading.Event()
        self._refused: KafkaError | None = None
        self._producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "linger.ms": 0})

    def run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self._producer.produce(
                self._topic, _STAMP.pack(_PING, time.monotonic_ns()), partition=0, on_delivery=self._delivered
            )
            self._producer.poll(0)

    def stop(self) -> None:
        """End, with everything delivered."""
        self._stopping.set()
        self.join()
        if self._producer.flush(60) or self._refused is not None:
            raise AssertionError(f"pings were not delivered: {self._refused}")

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._refused = error


def _read(
    bootstrap_servers: str, topic: str, ready: Event, done: Event, waits: mp.queues.Queue[list[tuple[int, int]]]
) -> None:
    """The reader's process: the monotonic clock is the same one in all processes of a machine."""
    consumer = Consumer(reader_settings(bootstrap_servers))
    consumer.assign([TopicPartition(topic, 0, 0)])
    seen: list[tuple[int, int]] = []
    ready_ns = 0
    quiet = 0
    while quiet < 20:
        message = consumer.poll(0.1)
        now = time.monotonic_ns()
        if message is None:
            quiet += done.is_set()
            continue
        quiet = 0
        for item in (message, *consumer.consume(1000, 0)):
            value = item.value()
            if item.error() is None and value is not None and value.startswith(_PING) and len(value) == _STAMP.size:
                _, sent = _STAMP.unpack(value)
                if not ready_ns:
                    ready_ns = now
                    ready.set()
                elif sent > ready_ns:  # the others waited for the reader's start
                    seen.append((sent, now - sent))
    consumer.close()
    waits.put(seen)
