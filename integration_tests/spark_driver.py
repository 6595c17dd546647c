"""A driver of its own for tests that kill it: ``python -m integration_tests.spark_driver JSON``.

It writes numbers, ``rows`` in each micro-batch, with the sink's ``options`` and those of its crash points
(``integration_tests.spark_crash``), and stops after ``batches``. What it wrote
and where it stands is in ``checkpoint``; started again, it goes on from there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration_tests.patience import PATIENCE_S
from integration_tests.spark_crash import FORMAT, CrashingSource
from integration_tests.spark_tools import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


def start_numbers(
    spark: SparkSession,
    options: Mapping[str, str],
    checkpoint: str,
    rows: int,
    form: str = "rollbridge",
    **trigger: Any,
) -> StreamingQuery:
    """Begin to write numbers, or go on; with a ``trigger``, as Spark takes it."""
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).load()
    writer = (
        numbers.selectExpr("string(value % 5) AS key", "string(value) AS value")
        .writeStream.format(form)
        .options(**options)
        .option("checkpointLocation", checkpoint)
    )
    return (writer.trigger(**trigger) if trigger else writer).start()


def await_batch(query: StreamingQuery, batch: int) -> None:
    """Return once a micro-batch is done; raises what the query has met instead."""
    deadline = time.monotonic() + PATIENCE_S
    while (query.lastProgress or {"batchId": -1})["batchId"] < batch:
        failure = query.exception()
        if failure is not None:
            raise failure
        assert time.monotonic() < deadline, f"micro-batch {batch} was not done: {query.status}"
        time.sleep(0.02)


def main(arguments: Mapping[str, Any]) -> None:
    """Write until that many micro-batches are done, or until something kills this."""
    with spark_session(Path(tempfile.mkdtemp(prefix="spark-driver-"))) as spark:
        spark.dataSource.register(CrashingSource)
        query = start_numbers(spark, arguments["options"], arguments["checkpoint"], arguments["rows"], FORMAT)
        await_batch(query, arguments["batches"] - 1)
        query.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
