"""A stock Apache Spark that reads the stream with its own Kafka source: a pattern of topics and ``read_committed``.

Nothing of rollbridge runs inside Spark. Beside the counts it gives Spark's own ``xxhash64`` of every key, so that the
caller can check that Spark computes the position of a key in the key space as rollbridge does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from spark_examples.demo.session import local_session

_CARRIER: Final = 10
"""Place of the carrier in a value, behind the row number."""


class Routed(NamedTuple):
    """A key, where Spark found its records, and Spark's hash of it (signed 64 bits)."""

    topic: str
    key: bytes
    hash: int


@dataclass(frozen=True, slots=True)
class SparkCount:
    """What Spark has counted."""

    different_rows: int
    small_records: int
    carriers: Counter[str]
    keys: set[Routed]
    """Every pair of a topic and a key in it, records without a key left out."""


class StockSpark:
    """A local Spark session with the four jars of its Kafka source."""

    def __init__(self, jars: Sequence[Path], scratch: Path, bootstrap_servers: str, pattern: str) -> None:
        self._session = local_session(jars, scratch, name="stock Kafka source")
        self._servers, self._pattern = bootstrap_servers, pattern

    def version(self) -> str:
        """Return which Spark it is."""
        return str(self._session.version)

    def count(self) -> SparkCount:
        """Read everything that is committed now, and count it."""
        records = (
            self._session.read.format("kafka")
            .option("kafka.bootstrap.servers", self._servers)
            .option("subscribePattern", self._pattern)
            .option("kafka.isolation.level", "read_committed")
            .option("startingOffsets", "earliest")
            .option("endingOffsets", "latest")
            .option("kafka.max.poll.records", "5000")
            .load()
        )
        small = "startswith(string(value), '{')"
        fields = "split(string(value), ',')"
        rows = records.selectExpr(
            "topic",
            "key",
            "xxhash64(key) AS hash",
            f"{small} AS small",
            f"CASE WHEN {small} THEN NULL ELSE {fields}[0] END AS row",
            f"CASE WHEN {small} THEN NULL ELSE {fields}[{_CARRIER}] END AS carrier",
        ).cache()
        try:
            groups = rows.groupBy("topic", "key", "hash", "small", "carrier").count().collect()
            different = rows.where("not small").select("row").distinct().count()
        finally:
            rows.unpersist()
        carriers: Counter[str] = Counter()
        for group in groups:
            if not group["small"]:
                carriers[group["carrier"]] += group["count"]
        return SparkCount(
            different,
            sum(group["count"] for group in groups if group["small"]),
            carriers,
            {Routed(each["topic"], bytes(each["key"]), each["hash"]) for each in groups if each["key"] is not None},
        )
