"""Apache Spark: the formats ``rollbridge`` and ``rollbridge-transactions``, as Python data sources of PySpark.

Spark finds both by itself wherever rollbridge is installed, through the packages ``pyspark_rollbridge`` and
``pyspark_rollbridge_transactions``. Where Spark does not look for such packages, call :func:`register`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbridge.spark.datasource import RollbridgeSource, RollbridgeTransactionsSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["RollbridgeSource", "RollbridgeTransactionsSource", "register"]


def register(spark: SparkSession) -> None:
    """Register both formats with a session that has not found them by itself; a repeated call changes nothing."""
    spark.dataSource.register(RollbridgeSource)
    spark.dataSource.register(RollbridgeTransactionsSource)
