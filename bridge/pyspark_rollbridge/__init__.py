"""Spark looks for packages of such a name, and finds the format ``rollbridge`` in this one."""

from rollbridge.spark.datasource import RollbridgeSource as DefaultSource

__all__ = ["DefaultSource"]
