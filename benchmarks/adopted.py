"""Adopted topics: ours on a topic of four partitions beside a stream of four segments; natives on it; the adoption."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import Producer

from benchmarks.conditional import one_at_a_time
from benchmarks.harness import Better, Experiment, Measure, Measured, Row
from benchmarks.native import DEFAULTS, LARGE_BATCHES, NativeProducer, commit_once
from benchmarks.site import Places, Site, readable_per_s, records
from benchmarks.small import ours_in_flight, ours_one_at_a_time
from benchmarks.spark_jvm import options_of, spark_session

PARTITIONS: Final = 4
_OWN, _ADOPTED, _PLAIN = "stream of its own", "adopted topic", "plain topic"
_PATIENCE_S: Final = 300.0
_CHUNK: Final = 10_000
_numbers = itertools.count()
_made: dict[tuple[str, str], str] = {}


def bulk(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """One million records of 100 bytes in one transaction (a tenth of that if ``quick``)."""
    count = 100_000 if quick else 1_000_000
    what = f"{count:,} records of 100 bytes in one transaction, on an adopted topic of {PARTITIONS} partitions"
    rows = [
        _row("adopted-bulk", f"{what}: write rate, `write_all()`", "written_per_s", "records/s", Better.MORE),
        _row("adopted-bulk-visible", "the same, until all can be read", "visible_per_s", "records/s", Better.MORE),
    ]
    sides = _both(site, "bulk", lambda stream, places: _bulk(site, stream, places, count))
    return Experiment(name="adopted-bulk", rounds=rounds, sides=sides, rows=rows)


def small(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Ten records in a transaction: one at a time, and many at once."""
    count, seconds = (100, 1.0) if quick else (400, 3.0)
    pairs = list(records(10, b"ten"))
    what = f"10-record transactions on an adopted topic of {PARTITIONS} partitions"
    rows: list[Row] = []
    sides: dict[str, Measure] = {}
    for title, make, measures in (
        (
            "one at a time",
            lambda stream, _: ours_one_at_a_time(site, stream, pairs, count),
            (("p50", "p50_ms", "ms", Better.LESS), ("p99", "p99_ms", "ms", Better.LESS)),
        ),
        *(
            (
                f"{number} in flight",
                lambda stream, _, number=number: ours_in_flight(site, stream, pairs, number, seconds),
                (("", "per_s", "transactions/s", Better.MORE),),
            )
            for number in (64, 512)
        ),
    ):
        sides |= _both(site, "small", make, title)
        for suffix, metric, unit, better in measures:
            name = "-".join(filter(None, ("adopted", title.replace(" ", "-"), suffix)))
            rows.append(_row(name, f"{what}, {title} {suffix}".rstrip(), metric, unit, better, title))
    return Experiment(name="adopted-small", rounds=rounds, warm_ups=1 if quick else 3, sides=sides, rows=rows)


def conditional(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Conditional writes of one record, one at a time."""
    count = 200 if quick else 1_000
    pair = next(iter(records(1, b"one")))
    what = f"conditional writes of one record on an adopted topic of {PARTITIONS} partitions"

    def make(stream: str, _: object) -> Measure:
        return one_at_a_time(site.bridge.cas_writer(stream), pair, count)

    rows = [
        _row("adopted-conditional-p50", f"{what}, p50", "p50_ms", "ms", Better.LESS),
        _row("adopted-conditional-p99", "the same, p99", "p99_ms", "ms", Better.LESS),
    ]
    return Experiment(name="adopted-conditional", rounds=rounds, sides=_both(site, "conditional", make), rows=rows)


def natives(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Native writers on an adopted topic, beside those on a plain one."""
    count = 50_000 if quick else 1_000_000
    what = f"a native producer of {count:,} records of 100 bytes on an adopted topic"
    plain, adopted = site.make_topic("adopted-plain", PARTITIONS), _adopt(site, "natives")
    ten = list(records(10, b"ten"))
    rows = [
        _row("adopted-native", what, "records_per_s", "records/s", Better.MORE, peer=_PLAIN),
        _row(
            "adopted-native-transactions",
            "native transactions of 10 records on it",
            "per_s",
            "transactions/s",
            Better.MORE,
            peer=_PLAIN,
        ),
    ]
    sides = {
        side: _native(site, topic, count, ten, 100 if quick else 400)
        for side, topic in ((_PLAIN, plain), (_ADOPTED, adopted))
    }
    return Experiment(name="adopted-natives", rounds=rounds, sides=sides, rows=rows)


def spark(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """Spark's exactly-once sink: one million rows (a tenth of that if ``quick``) in a batch."""
    count = 100_000 if quick else 1_000_000
    rows = (
        spark_session(site)
        .range(0, count, 1, 2)
        .selectExpr("binary(concat('key-', id % 10000)) AS key", "binary(rpad(string(id), 100, 'x')) AS value")
        .cache()
    )
    rows.count()

    def make(stream: str, places: Places) -> Measure:
        options = options_of(site, stream)

        def write() -> None:
            rows.write.format("rollbridge").options(**options).mode("append").save()

        return lambda: {"rows_per_s": readable_per_s(site, places, count, write)}

    title = f"Spark writes {count:,} rows of 100 bytes to an adopted topic of {PARTITIONS} partitions"
    return Experiment(
        name="adopted-spark",
        rounds=rounds,
        warm_ups=2,
        sides=_both(site, "spark", make),
        rows=[_row("adopted-spark", title, "rows_per_s", "rows/s", Better.MORE)],
    )


def adoption(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """The adoption, and the release, of a topic of ten million records (a hundredth of that if ``quick``)."""
    count = 100_000 if quick else 10_000_000
    topic = site.make_topic("adopted-large", PARTITIONS)
    producer = _producer(site, LARGE_BATCHES)
    for first in range(0, count, _CHUNK):
        _produce(producer, topic, min(_CHUNK, count - first))
    producer.flush(_PATIENCE_S)

    def measure() -> Measured:
        started = time.perf_counter()
        site.bridge.admin.adopt_topic(topic, stream=f"{site.scope}/large", partitioner="murmur2")
        adopted = time.perf_counter()
        site.bridge.admin.release_topic(f"{site.scope}/large")
        return {"adopt_s": adopted - started, "release_s": time.perf_counter() - adopted}

    def row(name: str, title: str, metric: str, bar: float | None) -> Row:
        return Row(name=name, title=title, metric=metric, unit="s", better=Better.LESS, bar=bar, ours=_ADOPTED)

    return Experiment(
        name="adoption",
        rounds=rounds,
        sides={_ADOPTED: measure},
        rows=[
            row("adoption", f"adoption of a topic of {count:,} records, with the sample of its keys", "adopt_s", 2.0),
            row("release", "its release", "release_s", None),
        ],
    )


Make = Callable[[str, Places], Measure]


def _both(site: Site, name: str, make: Make, suffix: str = "") -> dict[str, Measure]:
    """The same on a stream of its own and on an adopted topic."""
    key = (site.scope, name)
    if key not in _made:
        _made[key] = site.make_stream(f"adopted-{name}-own", PARTITIONS)
    own, topic = _made[key], _adopt(site, name)
    partitions = [(topic, number) for number in range(PARTITIONS)]
    return {
        " ".join(filter(None, (_OWN, suffix))): make(own, lambda: site.stored(own)),
        " ".join(filter(None, (_ADOPTED, suffix))): make(topic, lambda: partitions),
    }


def _adopt(site: Site, name: str) -> str:
    topic = f"native.adopted-{name}"
    key = (site.scope, topic)
    if key not in _made:
        _made[key] = site.make_topic(f"adopted-{name}", PARTITIONS)
        site.bridge.admin.adopt_topic(topic, stream=f"{site.scope}/adopted-{name}", partitioner="murmur2")
    return _made[key]


def _row(name: str, title: str, metric: str, unit: str, better: Better, suffix: str = "", peer: str = _OWN) -> Row:
    """A row whose figure has to be within a tenth of that of the peer."""
    return Row(
        name=name,
        title=f"{title}, against {'a stream of as many segments' if peer == _OWN else 'a plain one'}",
        metric=metric,
        unit=unit,
        better=better,
        bar=0.9 if better is Better.MORE else 1.1,
        ours=" ".join(filter(None, (_ADOPTED, suffix))),
        peers=(" ".join(filter(None, (peer, suffix))),),
    )


def _bulk(site: Site, stream: str, places: Places, count: int) -> Measure:
    def measure() -> Measured:
        marks: dict[str, float] = {}

        def write() -> None:
            started = time.perf_counter()
            transaction = site.bridge.begin(stream)
            transaction.write_all(stream, records(count, b"last"))
            transaction.flush()
            marks["written_per_s"] = count / (time.perf_counter() - started)
            transaction.commit()

        return {"visible_per_s": readable_per_s(site, places, count, write), **marks}

    return measure


def _native(site: Site, topic: str, count: int, ten: list[tuple[bytes, bytes]], commits: int) -> Measure:
    transactional = NativeProducer(site.bootstrap_servers, DEFAULTS)

    def measure() -> Measured:
        producer = _producer(site, LARGE_BATCHES)
        started = time.perf_counter()
        for first in range(0, count, _CHUNK):
            _produce(producer, topic, min(_CHUNK, count - first))
        producer.flush(_PATIENCE_S)
        rate = count / (time.perf_counter() - started)
        started = time.perf_counter()
        for _ in range(commits):
            commit_once(transactional, topic, ten)
        return {"records_per_s": rate, "per_s": commits / (time.perf_counter() - started)}

    return measure


def _producer(site: Site, settings: Mapping[str, Any]) -> Producer:
    return Producer(
        {
            "bootstrap.servers": site.bootstrap_servers,
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "delivery.report.only.error": True,
            **settings,
        }
    )


def _produce(producer: Producer, topic: str, count: int) -> None:
    for key, value in records(count, b"last %d" % next(_numbers)):
        while True:
            try:
                producer.produce(topic, value, key)
                break
            except BufferError:
                producer.poll(0.01)
    producer.poll(0)
