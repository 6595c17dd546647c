"""Reading a stream from its beginning to its end: ``b.reader`` beside a confluent-kafka consumer.

Both take the key and the value of every record. The consumer reads the very same topic, assigned by hand; what it does
not do is to look for epochs, keep a position that can be saved, and tell where a record stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from confluent_kafka import TopicPartition

from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.site import Site, records, where_merged

_BATCHES: Final = (500, 5_000)
_IN_BATCHES: Final = "rollbridge, batches()"


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """One million records of 100 bytes (a tenth of that if ``quick``)."""
    count = 100_000 if quick else 1_000_000
    stream = site.make_stream("reading")
    with site.bridge.transaction(stream) as txn:
        txn.write_all(stream, records(count, b"last"))
    topic, _ = where_merged(site, stream, 0)  # a segment of its own, as it is large
    names = {f"consume({size})": size for size in _BATCHES}
    return Experiment(
        name="reading",
        rounds=rounds,
        sides={
            OURS: lambda: _timed(count, lambda: _ours(site, stream)),
            _IN_BATCHES: lambda: _timed(count, lambda: _in_batches(site, stream)),
            "poll()": lambda: _timed(count, lambda: _polled(site, topic, count)),
            **{name: consumed(site, topic, count, size) for name, size in names.items()},
        },
        rows=[
            Row(
                name="reading",
                title=f"reading {count:,} records of 100 bytes, keys and values, against a confluent-kafka consumer",
                metric="read_per_s",
                unit="records/s",
                better=Better.MORE,
                bar=1.0,
                peers=("poll()", *names),
            ),
            Row(
                name="reading-batches",
                title="the same, keys and values of whole batches (`reader.batches()`)",
                metric="read_per_s",
                unit="records/s",
                better=Better.MORE,
                bar=1.5,
                ours=_IN_BATCHES,
                peers=("poll()", *names),
            ),
            Row(
                name="reading-singly",
                title="the same, record by record, against `poll()` alone",
                metric="read_per_s",
                unit="records/s",
                better=Better.MORE,
                peers=("poll()",),
            ),
        ],
    )


def _timed(count: int, read: Callable[[], Iterator[int]]) -> Measured:
    """From the first batch on, so that connecting is left out."""
    sizes = read()
    total = next(sizes)
    started = time.perf_counter()
    first = total
    total += sum(sizes)
    elapsed_s = time.perf_counter() - started
    if first < 1 or total < count * 100:
        raise AssertionError(f"{total} bytes were read of {count} records")
    return {"read_per_s": count / elapsed_s}


def _ours(site: Site, stream: str) -> Iterator[int]:
    with site.bridge.reader(stream, follow=False) as reader:
        total = 0
        first = True
        for record in reader:
            total += len(record.key or b"") + len(record.value or b"")
            if first:
                yield total
                total, first = 0, False
        yield total


def _in_batches(site: Site, stream: str) -> Iterator[int]:
    with site.bridge.reader(stream, follow=False) as reader:
        total = 0
        first = True
        for batch in reader.batches():
            total += sum(map(len, filter(None, batch.keys()))) + sum(map(len, filter(None, batch.values())))
            if first:
                yield total
                total, first = 0, False
        yield total


def _polled(site: Site, topic: str, count: int) -> Iterator[int]:
    consumer = site.reader(**{"fetch.queue.backoff.ms": 5})
    consumer.assign([TopicPartition(topic, 0, 0)])
    total = seen = 0
    while seen < count:
        message = consumer.poll(1.0)
        if message is None or message.error() is not None:
            continue
        total += len(message.key() or b"") + len(message.value() or b"")
        seen += 1
        if seen == 1:
            yield total
            total = 0
    consumer.close()
    yield total


def consumed(site: Site, topic: str, count: int, size: int) -> Callable[[], Measured]:
    def read() -> Iterator[int]:
        consumer = site.reader(**{"fetch.queue.backoff.ms": 5})
        consumer.assign([TopicPartition(topic, 0, 0)])
        total = seen = 0
        first = True
        while seen < count:
            # consume(n, t) waits for n messages or t; this is the way to have what is there.
            one = consumer.poll(1.0)
            for message in () if one is None else (one, *consumer.consume(size, 0)):
                if message.error() is None:
                    total += len(message.key() or b"") + len(message.value() or b"")
                    seen += 1
                    if first:
                        yield total
                        total, first = 0, False
        consumer.close()
        yield total

    return lambda: _timed(count, read)
