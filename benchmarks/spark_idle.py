"""A sink in Python that does nothing: what PySpark itself takes for each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage


class IdleWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]  # types are checked without PySpark
    """Takes rows and does nothing with them."""

    def write(self, iterator: Iterator[object]) -> WriterCommitMessage:
        """Look at every batch."""
        for _ in iterator:
            pass
        return WriterCommitMessage()


class IdleSource(DataSource):  # type: ignore[misc]  # types are checked without PySpark
    """A sink in Python that does nothing."""

    @classmethod
    def name(cls) -> str:
        """Its format."""
        return "idle"

    def streamWriter(self, schema: object, overwrite: bool) -> IdleWriter:
        """Its writer."""
        return IdleWriter()
