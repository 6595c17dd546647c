"""rollbridge in Apache Spark: the formats ``rollbridge`` and ``rollbridge-transactions``, by PySpark's own means.

Spark finds both by itself wherever rollbridge is installed, because of the packages ``pyspark_rollbridge`` and
``pyspark_rollbridge_transactions``. Only where it does not look for such packages has :func:`register` to be called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollbridge.spark.datasource import RollbridgeSource, RollbridgeTransactionsSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["RollbridgeSource", "RollbridgeTransactionsSource", "register"]


def register(spark: SparkSession) -> None:
    """Make both formats known to a session that has not found them by itself; doing so again changes nothing."""
    spark.dataSource.register(RollbridgeSource)
    spark.dataSource.register(RollbridgeTransactionsSource)
