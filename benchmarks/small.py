"""Many small transactions: how long one takes, and how many go through at once."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.harness import OURS, Better, Experiment, Measure, Measured, Row
from benchmarks.native import DEFAULTS, NO_LINGER, NativeProducer, commit_once, commits_per_second
from benchmarks.site import Pair, Site, records
from rollbridge.client.transaction import CommitFuture

RECORDS: Final = 10
PRODUCERS: Final = 16


def latency(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Ten records, one transaction at a time: from begin to the answer."""
    count = 100 if quick else 400
    pairs = list(records(RECORDS, b"ten"))
    stream = site.make_stream("latency")
    topic = site.make_topic("latency")
    natives = {"native, defaults": DEFAULTS, "native, no linger": NO_LINGER}
    what = f"{RECORDS}-record transactions, one at a time: latency from begin to the answer"
    return Experiment(
        name="latency",
        rounds=rounds,
        sides={
            OURS: ours_one_at_a_time(site, stream, pairs, count),
            **{name: _native_one_at_a_time(site, topic, pairs, count, settings) for name, settings in natives.items()},
        },
        rows=[
            Row(
                name="latency-p50",
                title=f"{what}, p50",
                metric="p50_ms",
                unit="ms",
                better=Better.LESS,
                bar=0.9,
                peers=tuple(natives),
            ),
            Row(
                name="latency-p99",
                title="the same, p99",
                metric="p99_ms",
                unit="ms",
                better=Better.LESS,
                bar=0.25,
                peers=tuple(natives),
            ),
        ],
    )


def throughput(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Ten records, many transactions at once from one process."""
    seconds = 1.0 if quick else 3.0
    pairs = list(records(RECORDS, b"ten"))
    stream = site.make_stream("throughput")
    topic = site.make_topic("throughput")
    natives = {
        f"native, {PRODUCERS} threads": (1, PRODUCERS),
        f"native, 4 processes of {PRODUCERS // 4}": (4, PRODUCERS // 4),
    }
    return Experiment(
        name="throughput",
        rounds=rounds,
        warm_ups=1 if quick else 4,
        sides={
            "64 in flight": ours_in_flight(site, stream, pairs, 64, seconds),
            "512 in flight": ours_in_flight(site, stream, pairs, 512, seconds),
            **{
                name: _native_together(site, topic, pairs, seconds, processes=processes, threads=threads)
                for name, (processes, threads) in natives.items()
            },
        },
        rows=[
            Row(
                name=f"in-flight-{number}",
                title=f"{RECORDS}-record transactions, {number} in flight from one process, against native with "
                f"{PRODUCERS} producers",
                metric="per_s",
                unit="transactions/s",
                better=Better.MORE,
                bar=bar,
                ours=f"{number} in flight",
                peers=tuple(natives),
            )
            for number, bar in ((64, 6.0), (512, 12.0))
        ],
    )


def ours_one_at_a_time(site: Site, stream: str, pairs: list[Pair], count: int) -> Measure:
    """``count`` transactions, each begun when the one before is answered."""

    def measure() -> Measured:
        took = []
        for _ in range(count):
            start = time.perf_counter()
            transaction = site.bridge.begin(stream)
            for key, value in pairs:
                transaction.write(stream, key=key, value=value)
            transaction.commit()
            took.append(time.perf_counter() - start)
        return {**percentiles(took), "per_s": count / sum(took)}

    return measure


def _native_one_at_a_time(
    site: Site, topic: str, pairs: list[Pair], count: int, settings: Mapping[str, Any]
) -> Measure:
    producer = NativeProducer(site.bootstrap_servers, settings)

    def measure() -> Measured:
        took = []
        for _ in range(count):
            start = time.perf_counter()
            commit_once(producer, topic, pairs)
            took.append(time.perf_counter() - start)
        return percentiles(took)

    return measure


def percentiles(took_s: list[float]) -> Measured:
    """p50 and p99 in ms."""
    cuts = statistics.quantiles(took_s, n=100, method="inclusive")
    return {"p50_ms": cuts[49] * 1000, "p99_ms": cuts[98] * 1000}


def ours_in_flight(site: Site, stream: str, pairs: list[Pair], in_flight: int, seconds: float) -> Measure:
    """As many transactions as go through in a time, ``in_flight`` of them at once."""

    def measure() -> Measured:
        waiting: deque[CommitFuture] = deque()
        begin = site.bridge.begin
        count = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            while len(waiting) < in_flight:
                transaction = begin(stream)
                write = transaction.write
                for key, value in pairs:
                    write(stream, key=key, value=value)
                waiting.append(transaction.commit_async())
            waiting.popleft().result(60)
            count += 1
            while waiting and waiting[0].done():
                waiting.popleft().result()
                count += 1
        for future in waiting:
            future.result(60)
            count += 1
        return {"per_s": count / (time.perf_counter() - start)}

    return measure


def _native_together(
    site: Site, topic: str, pairs: list[Pair], seconds: float, *, processes: int, threads: int
) -> Measure:
    def measure() -> Measured:
        return {
            "per_s": commits_per_second(
                site.bootstrap_servers,
                topic,
                pairs,
                NO_LINGER,
                processes=processes,
                threads=threads,
                seconds=seconds,
            )
        }

    return measure
