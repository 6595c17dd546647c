"""A stock Apache Spark that reads the stream with its own Kafka source: a pattern of topics and ``read_committed``.

Nothing of rollbridge runs inside Spark. Beside the counts it gives Spark's own ``xxhash64`` of every key, so that the
caller can check that Spark computes the position of a key in the key space as rollbridge does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_examples.demo.helper import serve
from spark_examples.demo.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CARRIER: Final = 10
"""Place of the carrier in a value, behind the row number."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A key, where Spark found its records, and Spark's hash of it (signed 64 bits)."""

    topic: str
    key: bytes
    hash: int


@dataclass(frozen=True, slots=True)
class SparkCount:
    """What Spark has counted."""

    flights: int
    different_rows: int
    small_records: int
    carriers: dict[str, int]
    keys: list[Routed]
    """Every pair of a topic and a key in it, records without a key left out."""


class StockSpark:
    """A local Spark session with the four jars of its Kafka source."""

    def __init__(self, java_home: str, jars: Sequence[Path], scratch: Path) -> None:
        self.session: SparkSession = local_session(java_home, jars, scratch, name="stock Kafka source")

    def count(self, bootstrap_servers: str, pattern: str) -> SparkCount:
        """Read everything that is committed now, and count it."""
        rows = self._rows(bootstrap_servers, pattern).cache()
        try:
            groups = rows.groupBy("topic", "key", "hash", "small", "carrier").count().collect()
            different = rows.where("not small").select("row").distinct().count()
        finally:
            rows.unpersist()
        carriers: Counter[str] = Counter()
        small = 0
        keys: set[Routed] = set()
        for group in groups:
            if group["small"]:
                small += group["count"]
            else:
                carriers[group["carrier"]] += group["count"]
            if group["key"] is not None:
                keys.add(Routed(group["topic"], bytes(group["key"]), group["hash"]))
        return SparkCount(carriers.total(), different, small, dict(sorted(carriers.items())), list(keys))

    def _rows(self, bootstrap_servers: str, pattern: str) -> DataFrame:
        """One row for each record."""
        records = (
            self.session.read.format("kafka")
            .option("kafka.bootstrap.servers", bootstrap_servers)
            .option("subscribePattern", pattern)
            .option("kafka.isolation.level", "read_committed")
            .option("startingOffsets", "earliest")
            .option("endingOffsets", "latest")
            .option("kafka.max.poll.records", "5000")
            .load()
        )
        return records.selectExpr(
            "topic", "key", "xxhash64(key) AS hash", "string(value) AS text", "split(string(value), ',') AS fields"
        ).selectExpr(
            "topic",
            "key",
            "hash",
            "startswith(text, '{') AS small",
            "CASE WHEN startswith(text, '{') THEN NULL ELSE fields[0] END AS row",
            f"CASE WHEN startswith(text, '{{') THEN NULL ELSE fields[{_CARRIER}] END AS carrier",
        )


def main(
    connection: Connection, java_home: str, jars: list[Path], scratch: Path, log: Path, servers: str, pattern: str
) -> None:
    """Spark as a helper process; it answers ``version`` and ``count``. What it says goes to a file."""
    _redirect_output(log)
    spark = StockSpark(java_home, jars, scratch)
    try:
        serve(connection, {"version": lambda: spark.session.version, "count": lambda: spark.count(servers, pattern)})
    finally:
        spark.session.stop()


def _redirect_output(log: Path) -> None:
    """Send what this process and its JVM print to a file."""
    with open(log, "ab") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
