"""``format("rollbridge-transactions")``: one row for each committed transaction of a group, in the order of commits.

The rows come from the commit log, for audits and for joins with the data: ``transactionId`` and ``commitPosition`` are
the same as in ``format("rollbridge")``. One task reads one range of the log, so the order of rows is that of commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from rollbridge.commitlog.control import ControlKind, ControlRecord, decode_control, peek_kind
from rollbridge.consumer.transactions import log_offset
from rollbridge.errors import ConfigError, InvalidRequestError, NotFoundError
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Isolation
from rollbridge.spark.planning import LogOffset
from rollbridge.spark.settings import STREAM, Kind, LogSettings, read_log_settings
from rollbridge.spark.source import SourceReader, judge_loss
from rollbridge.spark.source_task import ReadTimeout
from rollbridge.spark.worker import kafka_client
from rollbridge.stream.names import GroupName, StreamName
from rollbridge.stream.positions import LogPosition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_SCHEMA: Final = T.StructType(
    [
        T.StructField("transactionId", T.StringType()),
        T.StructField("commitPosition", T.LongType()),
        T.StructField("label", T.StringType()),
        T.StructField("client", T.StringType()),
        T.StructField("streams", T.MapType(T.StringType(), T.LongType())),
        T.StructField("records", T.LongType()),
        T.StructField("bytes", T.LongType()),
        T.StructField("begun", T.TimestampType()),
        T.StructField("committed", T.TimestampType()),
    ]
)
_WAIT_MS: Final = 500


def schema(options: Mapping[str, str]) -> StructType:
    """Return the columns, after a check of the options.

    Raises:
        ConfigError: options are missing, wrong or unknown; all of them are named.
    """
    read_log_settings(options, "schema")
    return _SCHEMA


class LogPortion(InputPartition):  # type: ignore[misc]  # types are checked without PySpark
    """Offsets ``start..end-1`` of a commit log; transactions without records in ``streams`` are left out, if any."""

    def __init__(self, topic: str, start: int, end: int, streams: frozenset[str]) -> None:
        super().__init__(None)
        self.topic = topic
        self.start = start
        self.end = end
        self.streams = streams


class _TransactionsReading(SourceReader[LogSettings]):
    """Common part of both readers: plan the task, and read in it."""

    kind: Kind

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """Prepare.

        Raises:
            ConfigError: options or columns are wrong; all of them are named.
        """
        super().__init__(read_log_settings(options, self.kind), schema)
        faults = [name for name in schema.fieldNames() if name not in _SCHEMA.fieldNames()]
        if faults:
            raise ConfigError(
                f"schema: there is no column {', '.join(faults)}; the columns are {_SCHEMA.simpleString()}"
            )
        self._identity: LogOffset | None = None
        self._reached = 0
        """Highest offset that the log has been seen to reach."""

    def _here(self, offset: int) -> LogOffset:
        """Return an offset of the log with the identity of the log.

        Raises:
            NotFoundError: there is no such group or log.
        """
        if self._identity is None:
            connection = self._connected()
            group = self._group()
            if group not in connection.metadata.groups():
                raise NotFoundError(f"there is no transaction group {group}: no stream was ever created in it")
            topic = group.commit_log_topic
            self._identity = LogOffset(
                connection.cluster_id, str(connection.kafka.topics.topic_ids([topic])[topic]), LogPosition(group, 0)
            )
        return replace(self._identity, position=replace(self._identity.position, offset=offset))

    def _group(self) -> GroupName:
        if self._settings.group is not None:
            return self._settings.group
        found = {}
        for name in self._streams():
            config = self._connected().metadata.stream(name)
            if config is None:
                raise NotFoundError(f"stream {name} does not exist; nothing was read")
            found[str(name)] = config.group
        if len(set(found.values())) > 1:
            raise InvalidRequestError(f"{STREAM}: {found} are of several groups; each has a commit log of its own")
        return next(iter(found.values()))

    def _streams(self) -> list[StreamName]:
        return [self._connected().metadata.name_of(name) for name in self._settings.shared.names]

    @property
    def _topic(self) -> str:
        return self._here(0).position.group.commit_log_topic

    def _at(self, text: str) -> int:
        group = self._here(0).position.group
        return log_offset(self._connected().kafka.offsets, group, text)

    def _portions(self, start: int, end: int) -> list[InputPartition]:
        """Plan one task, or none for an empty range.

        Raises:
            TruncatedError: records to be read have been deleted, and ``failOnDataLoss`` is set.
        """
        first = self._connected().kafka.offsets.first([self._topic])[self._topic]
        if start < min(first, end):
            self._judge(f"offsets {start} to {min(first, end) - 1} of the commit log {self._topic} have been deleted")
        begin = max(start, first)
        if begin >= end:
            return []
        streams = frozenset(map(str, self._streams()))
        return [LogPortion(self._topic, begin, self._present(end), streams)]

    def _present(self, offset: int) -> int:
        """Return an offset up to which the log was read, or is to be read; its end if the log ends before.

        Raises:
            TruncatedError: the log ends before, and ``failOnDataLoss`` is set.
        """
        if offset > self._reached:
            self._reached = self._connected().kafka.offsets.end([self._topic], Isolation.READ_UNCOMMITTED)[self._topic]
        if offset > self._reached:
            self._judge(
                f"the commit log {self._topic} has become shorter: it ends at {self._reached}, and was read or to be "
                f"read up to {offset}"
            )
        return min(offset, self._reached)

    def _judge(self, lost: str) -> None:
        judge_loss(lost, fail=self._settings.fail_on_data_loss)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a task's range of the log, in the task."""
        if not isinstance(partition, LogPortion):
            return iter(())  # Spark's placeholder for no partition
        reader = kafka_client(self._settings.shared.connection).log()
        return _read(reader, partition, self._schema)

    def _close(self) -> None:
        super()._close()
        self._identity = None


class TransactionsBatchReader(_TransactionsReading, DataSourceReader):  # type: ignore[misc]  # types are checked without PySpark
    """Reader of the transactions between two places of the commit log."""

    kind = "batch"

    def partitions(self) -> list[InputPartition]:
        """Plan the one task, if there is anything to read.

        Raises:
            NotFoundError, KafkaUnavailableError, ZooKeeperUnavailableError, InvalidRequestError.
            InvalidRequestError, TruncatedError: the read cannot begin or end there.
        """
        try:
            return self._portions(self._at(self._settings.start), self._at(self._settings.end))
        finally:
            self._close()


class TransactionsStreamReader(_TransactionsReading, DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reader of new transactions, in micro-batches.

    Raises, from methods that the driver calls:
        NotFoundError, KafkaUnavailableError, ZooKeeperUnavailableError, InvalidRequestError.
        InvalidRequestError: the checkpoint belongs to another group or cluster.
        TruncatedError: the log has been truncated where it was to be read.
    """

    kind = "streaming"

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset at which a query without a checkpoint begins."""
        return self._here(self._at(self._settings.start)).as_json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Note the present end of the log, at which the query ends."""
        self._target = self._end()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the offset at which the next micro-batch ends."""
        begin = self._checked(start)
        end = self._end() if self._target is None else self._target
        if end < begin:
            self._reached = end
            begin = self._present(begin)
        if isinstance(limit, ReadMaxRows):
            end = min(end, begin + limit.max_rows)
        return self._here(max(end, begin)).as_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan the task of a micro-batch."""
        return self._portions(self._checked(start), self._checked(end))

    def _end(self) -> int:
        return self._connected().kafka.offsets.end([self._topic], Isolation.READ_COMMITTED)[self._topic]

    def _checked(self, found: dict[str, Any]) -> int:
        offset = LogOffset.of_json(found)
        offset.check_same(self._here(offset.position.offset))
        return offset.position.offset


def _read(reader: LogReader, portion: LogPortion, schema: StructType) -> Iterator[pa.RecordBatch]:
    arrow = to_arrow_schema(schema, timezone="UTC")
    offset = portion.start
    patience = ReadTimeout(portion.topic)
    while offset < portion.end:
        found = reader.fetch(portion.topic, offset, wait_ms=_WAIT_MS)
        patience.moved(offset, found.end)
        offset = found.end
        if offset < portion.end:
            reader.ask(portion.topic, offset, wait_ms=_WAIT_MS)
        rows = [
            _row(record.offset, decode_control(record.key, record.value))
            for record in found.records
            if record.offset < portion.end and peek_kind(record.value) is ControlKind.COMMIT
        ]
        if portion.streams:
            rows = [row for row in rows if not portion.streams.isdisjoint(dict(row["streams"]))]
        if rows:
            columns = [pa.array([row[field.name] for row in rows], field.type) for field in arrow]
            yield pa.RecordBatch.from_arrays(columns, schema=arrow)


def _row(offset: int, control: ControlRecord) -> dict[str, Any]:
    return {
        "transactionId": str(control.transaction),
        "commitPosition": offset,
        "label": control.label,
        "client": control.client_name,
        "streams": list(control.counts().items()),
        "records": control.records,
        "bytes": control.size_bytes,
        "begun": control.begun_ms * 1000,
        "committed": control.decided_ms * 1000,
    }
