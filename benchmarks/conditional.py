"""Compare-and-set: what a conditional write costs, beside a bare native transaction of one record."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import rollbridge
from benchmarks.harness import OURS, Better, Experiment, Measure, Measured, Row
from benchmarks.native import DEFAULTS, NO_LINGER, NativeProducer, commit_once
from benchmarks.site import Pair, Site, answers_of, await_start, records
from benchmarks.small import percentiles
from rollbridge.base.sn import EMPTY, SN
from rollbridge.cas.request import CasFuture
from rollbridge.cas.writer import CasWriter
from rollbridge.errors import CasWriteError
from rollbridge.stream.conditions import Scope

RUN: Final = 100
CONTENDERS: Final = 8
_ONE, _RUNS, _CHAIN, _CONTEND = OURS, f"runs of {RUN}", "a chain of futures", f"{CONTENDERS} contenders"
_CONTEND_APART: Final = f"{CONTENDERS} contenders, a process each"


def experiment(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """One segment, 100-byte values."""
    count = 200 if quick else 1_000
    pair = next(iter(records(1, b"one")))
    topic = site.make_topic("conditional")
    natives = {"native, defaults": DEFAULTS, "native, no linger": NO_LINGER}
    what = "conditional writes of one record, one at a time"

    def writer(name: str) -> CasWriter:
        return site.bridge.cas_writer(site.make_stream(f"conditional-{name}"))

    return Experiment(
        name="conditional",
        rounds=rounds,
        sides={
            _ONE: one_at_a_time(writer("one"), pair, count),
            _RUNS: _in_runs(writer("runs"), pair, count // 10),
            _CHAIN: pipelined(writer("chain"), [pair], count * 10, Scope.SEGMENT),
            _CONTEND: _contending(site, site.make_stream("conditional-contended"), pair, 1.0 if quick else 3.0),
            _CONTEND_APART: _contending_apart(site, site.make_stream("conditional-apart"), 1.0 if quick else 3.0),
            **{
                name: _native(NativeProducer(site.bootstrap_servers, settings), topic, pair, count // 2)
                for name, settings in natives.items()
            },
        },
        rows=[
            Row(
                name="conditional-p50",
                title=f"{what}: p50, against a native transaction of one record",
                metric="p50_ms",
                unit="ms",
                better=Better.LESS,
                bar=0.5,
                peers=tuple(natives),
            ),
            Row(
                name="conditional-p99",
                title="the same, p99",
                metric="p99_ms",
                unit="ms",
                better=Better.LESS,
                bar=0.15,
                peers=tuple(natives),
            ),
            Row(
                name="conditional-runs",
                title=f"records in runs of {RUN}, against one at a time",
                metric="per_s",
                unit="records/s",
                better=Better.MORE,
                bar=80.0,
                ours=_RUNS,
                peers=(_ONE,),
            ),
            Row(
                name="conditional-chain",
                title="each write expects the future of the one before, against one at a time",
                metric="per_s",
                unit="records/s",
                better=Better.MORE,
                ours=_CHAIN,
                peers=(_ONE,),
            ),
            Row(
                name="conditional-contended",
                title=f"{CONTENDERS} writers that contend for one segment: successful writes, against one writer",
                metric="per_s",
                unit="records/s",
                better=Better.MORE,
                bar=0.8,
                ours=_CONTEND,
                peers=(_ONE,),
            ),
            Row(
                name="conditional-contended-apart",
                title="the same, each of them in a process of its own",
                metric="per_s",
                unit="records/s",
                better=Better.MORE,
                bar=0.5,
                ours=_CONTEND_APART,
                peers=(_ONE,),
            ),
            Row(
                name="conditional-starved",
                title="the contender that won least, as a share of what would be even",
                metric="least_share",
                unit="share",
                better=Better.MORE,
                bar=0.01,
                ours=_CONTEND,
            ),
        ],
    )


def one_at_a_time(writer: CasWriter, pair: Pair, count: int) -> Measure:
    """Each write expects the one before, and waits for its answer."""
    key, value = pair

    def measure() -> Measured:
        sn = writer.tail(key)
        took = []
        for _ in range(count):
            start = time.perf_counter()
            sn = writer.write(key, value, expected=sn)
            took.append(time.perf_counter() - start)
        return {**percentiles(took), "per_s": count / sum(took)}

    return measure


def _in_runs(writer: CasWriter, pair: Pair, runs: int) -> Measure:
    def measure() -> Measured:
        sn = writer.tail()
        start = time.perf_counter()
        for _ in range(runs):
            sn = writer.write_all([pair] * RUN, expected=sn)[-1]
        return {"per_s": runs * RUN / (time.perf_counter() - start)}

    return measure


def pipelined(writer: CasWriter, pairs: Sequence[Pair], count: int, scope: Scope) -> Measure:
    """Writes that expect the one before, or with scope ``key`` the one before of their key, without waiting for it."""
    lasts: dict[bytes, SN] = {}

    def measure() -> Measured:
        before: dict[bytes, CasFuture] = {}
        futures = []
        start = time.perf_counter()
        for number in range(count):
            key, value = pairs[number % len(pairs)]
            expected = before.get(key) or lasts.get(key, EMPTY)
            before[key] = future = writer.write_async(key, value, expected=expected, scope=scope)
            futures.append(future)
        for future in futures:
            future.result(120)
        took = time.perf_counter() - start
        lasts.update((key, future.result()) for key, future in before.items())
        return {"per_s": count / took}

    return measure


def _contending(site: Site, stream: str, pair: Pair, seconds: float) -> Measure:
    writers = [site.bridge.cas_writer(stream) for _ in range(CONTENDERS)]

    def measure() -> Measured:
        begin = threading.Barrier(CONTENDERS)

        def contend(writer: CasWriter) -> int:
            begin.wait(60)
            return _contend(writer, pair, seconds)

        start = time.perf_counter()
        with ThreadPoolExecutor(CONTENDERS) as pool:
            wins = list(pool.map(contend, writers))
        took = time.perf_counter() - start
        return {"per_s": sum(wins) / took, "least_share": min(wins) * CONTENDERS / max(sum(wins), 1)}

    return measure


def _contending_apart(site: Site, stream: str, seconds: float) -> Measure:
    def measure() -> Measured:
        arguments = (site.bootstrap_servers, site.cluster.zookeeper, stream, str(seconds))
        return {"per_s": sum(answers_of("benchmarks.conditional", CONTENDERS, *arguments)) / seconds}

    return measure


def _contend(writer: CasWriter, pair: Pair, seconds: float) -> int:
    """Write until the time is over, with the SN that a refusal names; return how often that succeeded."""
    key, value = pair
    sn = writer.tail()
    wins = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        try:
            sn = writer.write(key, value, expected=sn)
            wins += 1
        except CasWriteError as refused:
            sn = refused.actual
    return wins


def _native(producer: NativeProducer, topic: str, pair: Pair, count: int) -> Measure:
    def measure() -> Measured:
        took = []
        for _ in range(count):
            start = time.perf_counter()
            commit_once(producer, topic, [pair])
            took.append(time.perf_counter() - start)
        return percentiles(took)

    return measure


def main(bootstrap_servers: str, zookeeper: str, stream: str, seconds: str) -> None:
    """Be one of the contenders, and print how many writes have succeeded."""
    [pair] = records(1, b"last")
    with rollbridge.connect(bootstrap_servers, zookeeper=zookeeper) as b:
        writer = b.cas_writer(stream)
        writer.tail()
        await_start()
        print(json.dumps(_contend(writer, pair, float(seconds))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
