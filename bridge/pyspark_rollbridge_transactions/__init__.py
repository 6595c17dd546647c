"""Spark looks for packages of such a name, and finds the format ``rollbridge-transactions`` in this one."""

from rollbridge.spark.datasource import RollbridgeTransactionsSource as DefaultSource

__all__ = ["DefaultSource"]
