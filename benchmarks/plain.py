"""Plain writes beside confluent-kafka's idempotent producer, and how long a writer stands still across a scale.

Both sides write the same records with the same linger (5 ms, the default of both), idempotent and acknowledged by all
replicas; what counts is the time until the last one is acknowledged. The native side is measured with a callback for
failures only, which it must have, and with one for each record, which is what a future tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, Message, Producer

from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.native import DEFAULTS, LARGE_BATCHES
from benchmarks.site import Pair, Site, records
from rollbridge.writer import PlainFuture, WriterOptions

_BULK: Final = "write_all"
_PEERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "native, defaults": DEFAULTS,
    "native, large batches": {**LARGE_BATCHES, "linger.ms": 5},
}
_TOLD: Final = "native, told of each"
_EVERY_S: Final = 0.002
_QUIET_S: Final = 1.0


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """A million records (50,000 if ``quick``)."""
    count = 50_000 if quick else 1_000_000
    native = {
        name: lambda settings=settings: _native(site, count, settings, each=False) for name, settings in _PEERS.items()
    }
    title = f"{count:,} plain records of 100 bytes, until the last is acknowledged"
    return Experiment(
        name="plain",
        rounds=rounds,
        sides={
            OURS: lambda: _ours(site, count),
            _BULK: lambda: _ours_bulk(site, count),
            **native,
            _TOLD: lambda: _native(site, count, DEFAULTS, each=True),
        },
        rows=[
            Row(
                name="plain-write",
                title=f"{title}: `write()` with a future for each, against confluent-kafka's idempotent producer",
                metric="records_per_s",
                unit="records/s",
                better=Better.MORE,
                bar=1.1,
                peers=tuple(_PEERS),
            ),
            Row(
                name="plain-write-all",
                title="the same, `write_all()`",
                metric="records_per_s",
                unit="records/s",
                better=Better.MORE,
                bar=2.5,
                ours=_BULK,
                peers=tuple(_PEERS),
            ),
            Row(
                name="plain-write-told",
                title="the same, `write()` against a callback for each record",
                metric="records_per_s",
                unit="records/s",
                better=Better.MORE,
                peers=(_TOLD,),
            ),
        ],
    )


def pause(site: Site, *, rounds: int) -> Experiment:
    """A record every 2 ms while the stream is split, joined, and rolled for an old transaction."""
    return Experiment(
        name="pause",
        rounds=rounds,
        warm_ups=0,
        sides={OURS: lambda: _pause(site)},
        rows=[
            Row(name=f"pause-{metric}", title=title, metric=f"{metric}_ms", unit="ms", better=Better.LESS)
            for metric, title in (
                ("quiet", "plain writer, one record every 2 ms: longest wait for an acknowledgement, nothing going on"),
                ("split", "the same, across a scale from one segment to two"),
                ("join", "the same, across a scale from two segments to one"),
                ("roll", "the same, across the rolling commit of a transaction of 1,000 records"),
            )
        ],
    )


def _ours(site: Site, count: int) -> Measured:
    with site.bridge.writer(site.make_stream(f"plain-{time.monotonic_ns()}")) as writer:
        write = writer.write
        futures: list[PlainFuture] = []
        started = time.perf_counter()
        for key, value in records(count, b"last"):
            futures.append(write(key, value))
        writer.flush()
        seconds = time.perf_counter() - started
    if len(futures) != count or futures[-1].result().dlsn is None:
        raise AssertionError("the last record has no place")
    return {"records_per_s": count / seconds}


def _ours_bulk(site: Site, count: int) -> Measured:
    with site.bridge.writer(site.make_stream(f"plain-{time.monotonic_ns()}")) as writer:
        started = time.perf_counter()
        writer.write_all(records(count, b"last"))
        writer.flush()
        return {"records_per_s": count / (time.perf_counter() - started)}


def _native(site: Site, count: int, settings: Mapping[str, Any], *, each: bool) -> Measured:
    topic = site.make_topic(f"plain-{time.monotonic_ns()}")
    places: list[int | None] = []
    refused: list[KafkaError] = []

    def told(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            refused.append(error)
        elif each:
            places.append(message.offset())

    producer = Producer(
        {
            "bootstrap.servers": site.bootstrap_servers,
            "enable.idempotence": True,
            "acks": "all",
            "delivery.report.only.error": not each,
            "on_delivery": told,
            **settings,
        }
    )
    started = time.perf_counter()
    _produce(producer, topic, records(count, b"last"))
    left = producer.flush(300)
    seconds = time.perf_counter() - started
    if left or refused or (each and len(places) != count):
        raise AssertionError(f"records were not delivered: {refused or left}")
    return {"records_per_s": count / seconds}


def _produce(producer: Producer, topic: str, pairs: Iterable[Pair]) -> None:
    produce, poll = producer.produce, producer.poll
    for number, (key, value) in enumerate(pairs):
        while True:
            try:
                produce(topic, value, key)
                break
            except BufferError:
                poll(0.01)
        if not number % 1_000:
            poll(0)


class _Steady(threading.Thread):
    """Writes a record now and then, and notes how long each waits for its acknowledgement."""

    def __init__(self, site: Site, stream: str) -> None:
        super().__init__(name="steady", daemon=True)
        self._writer = site.bridge.writer(stream, options=WriterOptions(linger_s=0.0))
        self._stopping = threading.Event()
        self._waits: list[float] = []

    def run(self) -> None:
        number = 0
        while not self._stopping.wait(_EVERY_S):
            number += 1
            self._write(b"key-%d" % (number % 100), time.monotonic())

    def _write(self, key: bytes, asked_s: float) -> None:
        self._writer.write(key, b"x" * 100).add_done_callback(
            lambda _future: self._waits.append(time.monotonic() - asked_s)
        )

    def longest_ms(self) -> float:
        """The longest wait since this was asked last, once everything written so far has been acknowledged."""
        self._writer.flush(60)
        waits, self._waits = self._waits, []
        return max(waits) * 1000

    def stop(self) -> None:
        """End, with everything acknowledged."""
        self._stopping.set()
        self.join()
        self._writer.close()


def _pause(site: Site) -> Measured:
    stream = site.make_stream(f"pause-{time.monotonic_ns()}")
    admin = site.bridge.admin
    old = site.bridge.begin(stream)
    old.write_all(stream, records(1_000, b"last"))
    old.flush()
    steady = _Steady(site, stream)
    steady.start()
    try:
        time.sleep(_QUIET_S)
        steady.longest_ms()  # the first records paid for the start
        time.sleep(_QUIET_S)
        found = {"quiet_ms": steady.longest_ms()}
        admin.scale(stream, seal=[0], ranges=[(0.0, 0.5), (0.5, 1.0)])
        found["split_ms"] = steady.longest_ms()
        admin.scale(stream, seal=[1, 2], ranges=[(0.0, 1.0)])
        found["join_ms"] = steady.longest_ms()
        old.commit()
        found["roll_ms"] = steady.longest_ms()
    finally:
        steady.stop()
    return found
