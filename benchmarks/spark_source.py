"""Spark reads a stream: ``format("rollbridge")`` beside Spark's own Kafka source, which reads the very same topics.

Both give the columns of Spark's own source, and an aggregate looks at key, value and offset of each row. Spark's own
source is measured at its defaults, and with ten times as many records for each poll, which makes it faster.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Final

from benchmarks.harness import OURS, Better, Experiment, Measured, Row
from benchmarks.site import Site, records
from benchmarks.spark_jvm import options_of, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DEFAULTS: Final = "Spark's source"
_TUNED: Final = "Spark's source, max.poll.records=5000"
_STOCK: Final[Mapping[str, Mapping[str, str]]] = {_DEFAULTS: {}, _TUNED: {"kafka.max.poll.records": "5000"}}
_TRANSACTIONS: Final = "rollbridge, transaction columns"
_COLUMNS: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
)
_LOOK: Final = ("length(key) AS k", "length(value) AS v", "offset")


def batch(site: Site, segments: int, *, rounds: int, quick: bool) -> Experiment:
    """Two million records of 100 bytes (a tenth of that if ``quick``) in a batch."""
    count, stream, topics = _filled(site, segments, quick=quick)
    spark = spark_session(site)

    def ours(columns: str) -> Callable[[], Measured]:
        options = options_of(site, stream)
        return lambda: _batch(count, lambda: spark.read.format("rollbridge").options(**options).schema(columns).load())

    def stock(settings: Mapping[str, str]) -> Callable[[], Measured]:
        options = _stock_options(site, topics, settings)
        return lambda: _batch(count, lambda: spark.read.format("kafka").options(**options).load())

    name = f"spark-batch-{segments}"
    what = f"Spark reads {count:,} rows of 100 bytes in a batch, {segments} segment{'s'[: segments > 1]}"
    return Experiment(
        name=name,
        rounds=rounds,
        warm_ups=2,
        sides={
            OURS: ours(_COLUMNS),
            _TRANSACTIONS: ours(f"{_COLUMNS}, transactionId string, localSequence bigint"),
            **{side: stock(settings) for side, settings in _STOCK.items()},
        },
        rows=[
            Row(
                name=name,
                title=f"{what}, against its own Kafka source",
                metric="rows_per_s",
                unit="rows/s",
                better=Better.MORE,
                bar=1.0,
                peers=tuple(_STOCK),
            ),
            Row(
                name=f"{name}-transactions",
                title="the same, with the columns `transactionId` and `localSequence`",
                metric="rows_per_s",
                unit="rows/s",
                better=Better.MORE,
                bar=0.7,
                ours=_TRANSACTIONS,
                peers=tuple(_STOCK),
            ),
        ],
    )


def streaming(site: Site, *, rounds: int, quick: bool) -> Experiment:
    """The same number of records, in a query with ``trigger(availableNow=True)``, from start to end of the query."""
    count, stream, topics = _filled(site, 1, quick=quick)
    spark = spark_session(site)
    ours = {**options_of(site, stream), "startingOffsets": "earliest"}

    def stock(settings: Mapping[str, str]) -> Callable[[], Measured]:
        options = {**_stock_options(site, topics, settings), "startingOffsets": "earliest"}
        return lambda: _streamed(count, lambda: spark.readStream.format("kafka").options(**options).load())

    return Experiment(
        name="spark-streaming",
        rounds=rounds,
        warm_ups=2,
        sides={
            OURS: lambda: _streamed(
                count, lambda: spark.readStream.format("rollbridge").options(**ours).schema(_COLUMNS).load()
            ),
            **{side: stock(settings) for side, settings in _STOCK.items()},
        },
        rows=[
            Row(
                name="spark-streaming",
                title=f"Spark reads {count:,} rows of 100 bytes in a query that ends (AvailableNow), against its own "
                "Kafka source",
                metric="rows_per_s",
                unit="rows/s",
                better=Better.MORE,
                bar=0.9,
                peers=(_DEFAULTS,),
            ),
            Row(
                name="spark-streaming-tuned",
                title="the same, against its own Kafka source with `max.poll.records=5000`",
                metric="rows_per_s",
                unit="rows/s",
                better=Better.MORE,
                bar=1.0,
                peers=(_TUNED,),
            ),
        ],
    )


def _filled(site: Site, segments: int, *, quick: bool) -> tuple[int, str, list[str]]:
    """A stream with records in it, made once for each number of segments."""
    count = 200_000 if quick else 2_000_000
    stream = f"{site.scope}/spark-{segments}"
    if stream not in {str(config.name) for config in site.bridge.admin.list_streams(site.scope)}:
        site.make_stream(f"spark-{segments}", segments)
        with site.bridge.transaction(stream) as txn:
            txn.write_all(stream, records(count, b"last"))
    # A large transaction is merged beside the line, into a segment that is not active any more.
    return count, stream, [topic for topic, _ in site.stored(stream)]


def _stock_options(site: Site, topics: list[str], settings: Mapping[str, str]) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": site.bootstrap_servers,
        "subscribe": ",".join(topics),
        "kafka.isolation.level": "read_committed",
        **settings,
    }


def _batch(count: int, load: Callable[[], DataFrame]) -> Measured:
    started = time.perf_counter()
    [row] = load().selectExpr(*_LOOK).selectExpr("count(*)", "sum(k + v)", "max(offset)").collect()
    elapsed_s = time.perf_counter() - started
    if row[0] != count:
        raise AssertionError(f"{row[0]} rows were read of {count}")
    return {"rows_per_s": count / elapsed_s}


def _streamed(count: int, load: Callable[[], DataFrame]) -> Measured:
    checkpoint = mkdtemp(prefix="rollbridge-checkpoint-")
    started = time.perf_counter()
    query = (
        load()
        .selectExpr(*_LOOK)
        .writeStream.format("noop")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    elapsed_s = time.perf_counter() - started
    rows = sum(progress["numInputRows"] for progress in query.recentProgress)
    shutil.rmtree(checkpoint, ignore_errors=True)
    if rows != count:
        raise AssertionError(f"{rows} rows were read of {count}")
    return {"rows_per_s": count / elapsed_s}
