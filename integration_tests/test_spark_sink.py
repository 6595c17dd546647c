"""The sink on a real Spark: every row is in the stream exactly once, whatever is killed; bad input writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import bridge
from integration_tests.clients import Site
from integration_tests.spark_tools import options_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_batch_job_is_one_transaction(spark: SparkSession, site: Site, client: bridge.Bridge, orders: str) -> None:
    rows = spark.range(0, 1000, 1, 4).selectExpr("concat('k', id % 10) AS key", "string(id) AS value")
    rows.write.format("rollbridge").options(**options_of(site, orders)).mode("append").save()
    messages = site.committed(orders)
    assert sorted(int(message.value() or b"") for message in messages) == list(range(1000))


def test_each_micro_batch_is_one_transaction(
    spark: SparkSession, site: Site, orders: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 50).load()
    query = (
        rows.selectExpr("string(value % 7) AS key", "string(value) AS value")
        .writeStream.format("rollbridge")
        .options(**options_of(site, orders))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        while (query.lastProgress or {"batchId": 0})["batchId"] < 3:
            assert query.isActive, query.exception()
    finally:
        query.stop()
    values = sorted(int(message.value() or b"") for message in site.committed(orders))
    assert values == list(range(len(values)))
    assert len(values) >= 150
