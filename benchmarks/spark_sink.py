"""Spark writes: ``format("rollbridge")``, exactly once, beside Spark's own Kafka sink, at least once.

A batch of rows is in Spark's memory before it counts, so that both sides do nothing but write, and it counts until the
last row could be read. Micro-batches come from Spark's own rate source, one after the other.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Final

from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.site import Site, readable_per_s
from benchmarks.spark_jvm import options_of, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DEFAULTS: Final = "Spark's sink, defaults"
_TUNED: Final = "Spark's sink, linger.ms=20, batch.size=512k"
_STOCK: Final[Mapping[str, Mapping[str, str]]] = {
    _DEFAULTS: {},
    _TUNED: {"kafka.linger.ms": "20", "kafka.batch.size": str(512 * 1024)},
}
_IDLE: Final = "a sink in Python, idle"
_PARTITIONS: Final = 2
_PATIENCE_S: Final = 120.0
_numbers = itertools.count()


def batch(site: Site, segments: int, *, rounds: int, quick: bool) -> Experiment:
    """One million rows with values of 100 bytes (a tenth of that if ``quick``) in a batch."""
    count = 100_000 if quick else 1_000_000
    spark = spark_session(site)
    rows = (
        spark.range(0, count, 1, _PARTITIONS)
        .selectExpr("binary(concat('key-', id % 10000)) AS key", "binary(rpad(string(id), 100, 'x')) AS value")
        .cache()
    )
    rows.count()
    stream = site.make_stream(f"spark-sink-{segments}", segments)
    topic = site.make_topic(f"spark-sink-{segments}", segments)
    ours = options_of(site, stream)
    name = f"spark-sink-{segments}"
    what = f"Spark writes {count:,} rows of 100 bytes, {segments} segment{'s'[: segments > 1]}, until they can be read"

    def stock(settings: Mapping[str, str]) -> Callable[[], Measured]:
        options = {"kafka.bootstrap.servers": site.bootstrap_servers, "topic": topic, **settings}
        places = [(topic, partition) for partition in range(segments)]

        def write() -> None:
            rows.write.format("kafka").options(**options).mode("append").save()

        return lambda: {"rows_per_s": readable_per_s(site, lambda: places, count, write, _PATIENCE_S)}

    def measure() -> Measured:
        def write() -> None:
            rows.write.format("rollbridge").options(**ours).mode("append").save()

        return {"rows_per_s": readable_per_s(site, lambda: site.stored(stream), count, write, _PATIENCE_S)}

    def row(suffix: str, peer: str, bar: float) -> Row:
        return Row(
            name=f"{name}-{suffix}",
            title=f"{what}, against its own Kafka sink ({peer.partition(', ')[2]})",
            metric="rows_per_s",
            unit="rows/s",
            better=Better.MORE,
            bar=bar,
            peers=(peer,),
        )

    return Experiment(
        name=name,
        rounds=rounds,
        warm_ups=2,
        sides={OURS: measure, **{side: stock(settings) for side, settings in _STOCK.items()}},
        rows=[row("defaults", _DEFAULTS, 1.2), row("tuned", _TUNED, 0.8)],
    )


def micro_batches(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """The time of a micro-batch that has few rows, or none."""
    from benchmarks.spark_idle import IdleSource  # PySpark may be absent where nobody measures it

    batches = 10 if quick else 25
    stream, topic = site.make_stream("spark-small"), site.make_topic("spark-small")
    ours = options_of(site, stream)
    stock = {"kafka.bootstrap.servers": site.bootstrap_servers, "topic": topic}
    shapes = {"small": "true", "empty": "value < 0"}
    sides: dict[str, Callable[[], Measured]] = {}
    for shape, condition in shapes.items():
        sides[f"rollbridge, {shape}"] = lambda condition=condition: _small(  # type: ignore[misc]  # bound now
            site, "rollbridge", ours, condition, batches
        )
        sides[f"Spark's sink, {shape}"] = lambda condition=condition: _small(  # type: ignore[misc]  # bound now
            site, "kafka", stock, condition, batches
        )
    spark_session(site).dataSource.register(IdleSource)
    sides[_IDLE] = lambda: _small(site, IdleSource.name(), {}, "true", batches)
    titles = {
        "small": "time of a micro-batch of 20 rows in Spark, against its own Kafka sink",
        "empty": "the same of a micro-batch of which no row is left to be written",
    }
    return Experiment(
        name="spark-micro-batches",
        rounds=rounds,
        sides=sides,
        rows=[
            Row(
                name=f"spark-micro-batch-{shape}",
                title=titles[shape],
                metric="batch_ms",
                unit="ms",
                better=Better.LESS,
                bar=1.5,
                ours=f"rollbridge, {shape}",
                peers=(f"Spark's sink, {shape}",),
            )
            for shape in shapes
        ]
        + [
            Row(
                name="spark-micro-batch-idle",
                title="the same of 20 rows in a sink in Python that does nothing at all: what PySpark itself takes",
                metric="batch_ms",
                unit="ms",
                better=Better.LESS,
                ours=_IDLE,
                peers=("Spark's sink, small",),
            )
        ],
    )


def _small(site: Site, form: str, options: Mapping[str, str], condition: str, batches: int) -> Measured:
    """The median time of the micro-batches of a query, but for the first ones."""
    checkpoint = mkdtemp(prefix="rollbridge-checkpoint-")
    rows: DataFrame = (
        spark_session(site).readStream.format("rate-micro-batch").option("rowsPerBatch", 20).load().where(condition)
    )
    query = (
        rows.selectExpr("string(value) AS key", "string(value) AS value")
        .writeStream.format(form)
        .options(**options)
        .option("checkpointLocation", checkpoint)
        .queryName(f"small-{next(_numbers)}")
        .start()
    )
    deadline = time.monotonic() + _PATIENCE_S
    while (progress := query.lastProgress) is None or progress["batchId"] < batches:
        if time.monotonic() > deadline or not query.isActive:
            raise TimeoutError(f"{batches} micro-batches were not done: {query.exception()}")
        time.sleep(0.01)
    query.stop()
    times = [item["durationMs"]["triggerExecution"] for item in query.recentProgress if item["batchId"] > batches // 3]
    shutil.rmtree(checkpoint, ignore_errors=True)
    return {"batch_ms": statistics.median(times)}
