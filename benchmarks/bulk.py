"""One large transaction: how fast it is written, and how soon a reader could have the last record."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Better, Experiment, Measure, Measured, Row
from benchmarks.native import DEFAULTS, LARGE_BATCHES, NativeProducer
from benchmarks.site import Site, records, stable_end, wait_readable, where_merged

_numbers = itertools.count()


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """One million records of 100 bytes (a tenth of that if ``quick``)."""
    count = 100_000 if quick else 1_000_000
    what = f"{count:,} records of 100 bytes in one transaction"
    stream = site.make_stream("bulk")
    topic = site.make_topic("bulk")
    singly = ("native, defaults", "native, large batches")
    together = (*singly, "native, produce_batch()")
    return Experiment(
        name="bulk",
        rounds=rounds,
        sides={
            "write()": _ours(site, stream, count, singly=True),
            "write_all()": _ours(site, stream, count, singly=False),
            "native, defaults": _native(site, topic, count, DEFAULTS, singly=True),
            "native, large batches": _native(site, topic, count, LARGE_BATCHES, singly=True),
            "native, produce_batch()": _native(site, topic, count, LARGE_BATCHES, singly=False),
        },
        rows=[
            Row(
                name="bulk-write-all",
                title=f"{what}: client write rate, `write_all()`",
                metric="written_per_s",
                unit="records/s",
                better=Better.MORE,
                bar=2.0,
                ours="write_all()",
                peers=singly,
            ),
            Row(
                name="bulk-write",
                title="the same, `write()` with a future for each record",
                metric="written_per_s",
                unit="records/s",
                better=Better.MORE,
                bar=1.2,
                ours="write()",
                peers=singly,
            ),
            Row(
                name="bulk-write-batch",
                title="the same, `write_all()` against the faster of `produce()` and `produce_batch()` (no headers)",
                metric="written_per_s",
                unit="records/s",
                better=Better.MORE,
                ours="write_all()",
                peers=together,
            ),
            Row(
                name="bulk-visible",
                title="the same, `write_all()`, from first write until a `read_committed` consumer could read the last",
                metric="visible_per_s",
                unit="records/s",
                better=Better.MORE,
                bar=1.1,
                ours="write_all()",
                peers=singly,
            ),
            Row(
                name="bulk-visible-write",
                title="the same, `write()`",
                metric="visible_per_s",
                unit="records/s",
                better=Better.MORE,
                ours="write()",
                peers=singly,
            ),
        ],
    )


def _ours(site: Site, stream: str, count: int, *, singly: bool) -> Measure:
    def measure() -> Measured:
        reader = site.reader()
        [segment] = site.segment_topics(stream)
        base = stable_end(reader, segment)
        last = b"last %d" % next(_numbers)
        pairs = records(count, last)
        start = time.perf_counter()
        transaction = site.bridge.begin(stream)
        if singly:
            write = transaction.write
            for key, value in pairs:
                write(stream, key=key, value=value)
        else:
            transaction.write_all(stream, pairs)
        transaction.flush()
        written = time.perf_counter()
        transaction.commit()
        wait_readable(reader, *where_merged(site, stream, base), count, last)
        visible = time.perf_counter()
        reader.close()
        return _rates(count, start, written, visible)

    return measure


def _native(site: Site, topic: str, count: int, settings: Mapping[str, Any], *, singly: bool) -> Measure:
    producer = NativeProducer(site.bootstrap_servers, settings)

    def measure() -> Measured:
        reader = site.reader()
        base = stable_end(reader, topic)
        last = b"last %d" % next(_numbers)
        pairs = records(count, last)
        start = time.perf_counter()
        producer.begin()
        if singly:
            producer.write(topic, pairs)
        else:
            producer.write_batches(topic, pairs)
        producer.flush()
        written = time.perf_counter()
        producer.commit()
        wait_readable(reader, topic, base, count, last)
        visible = time.perf_counter()
        reader.close()
        return _rates(count, start, written, visible)

    return measure


def _rates(count: int, start: float, written: float, visible: float) -> Measured:
    return {"written_per_s": count / (written - start), "visible_per_s": count / (visible - start)}
