"""The formats as Spark sees them: names, schemas, readers and writers.

Imports are inside the methods, so that a job loads only the side, source or sink, that it uses.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pyspark
from pyspark.sql.datasource import DataSource

from rollbridge.errors import LocalEnvironmentError

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


OLDEST: Final = (4, 2)
"""Oldest release of PySpark whose data sources can do what is needed here."""


def _check_pyspark() -> None:
    """Refuse a release of PySpark that lacks what the modules import, before they do.

    Raises:
        LocalEnvironmentError: it is too old.
    """
    found = tuple(map(int, re.findall(r"\d+", pyspark.__version__)[:2]))
    if found < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise LocalEnvironmentError(
            f"the formats rollbridge and rollbridge-transactions need PySpark {needed} or later, and this is "
            f"{pyspark.__version__}, whose data sources lack what they use; nothing was read or written; install "
            "rollbridge[spark], on the driver and on all workers"
        )


class RollbridgeSource(DataSource):  # type: ignore[misc]  # types are checked without PySpark
    """``format("rollbridge")``: streams to read and to write, in batches and as streaming queries."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "rollbridge"

    def schema(self) -> StructType:
        """Return the columns that the options ask for, when the format is read."""
        _check_pyspark()
        from rollbridge.spark import source

        return source.schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        _check_pyspark()
        from rollbridge.spark import source

        return source.BatchReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming query."""
        _check_pyspark()
        from rollbridge.spark import source

        return source.StreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a data frame, which writes it as one transaction."""
        _check_pyspark()
        from rollbridge.spark import sink

        return sink.batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the writer of a streaming query, which writes each micro-batch as one transaction."""
        _check_pyspark()
        from rollbridge.spark import sink

        return sink.stream_writer(self.options, schema, overwrite=overwrite)


class RollbridgeTransactionsSource(DataSource):  # type: ignore[misc]  # types are checked without PySpark
    """``format("rollbridge-transactions")``: one row for each committed transaction of a group."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "rollbridge-transactions"

    def schema(self) -> StructType:
        """Return the columns of a transaction."""
        _check_pyspark()
        from rollbridge.spark import transactions

        return transactions.schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        _check_pyspark()
        from rollbridge.spark import transactions

        return transactions.TransactionsBatchReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming query."""
        _check_pyspark()
        from rollbridge.spark import transactions

        return transactions.TransactionsStreamReader(self.options, schema)
