"""The exactly-once sink: what one micro-batch, or one batch job, writes is one rolling transaction.

The tasks agree on the transaction by the query's id and the number of the micro-batch, see
:meth:`bridge.SharedClient.joint`, write a part each, and send its handle to the driver, which commits the parts of
those attempts that Spark has chosen. So a task that is tried again leaves nothing behind, and a micro-batch that comes
again is found to be committed.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from bridge.client.introduction import own_name
from bridge.client.joint import JointTicket
from bridge.client.results import PartHandle
from bridge.client.shared import SharedClient
from bridge.connection import Bridge
from bridge.errors import GroupMismatchError, InvalidRequestError, RollbridgeError, RowRefused
from bridge.spark import sink_crash
from bridge.spark.garbage import keep_what_stays
from bridge.spark.prompt import promptly
from bridge.spark.settings import CLIENT_NAME, OptionReader, SparkSettings, read_settings
from bridge.spark.sink_columns import Columns
from bridge.spark.sink_connections import connection
from bridge.spark.sink_work import Work, work_of_job, work_of_query
from bridge.spark.sink_writer import PartitionWriter

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)

LABEL: Final = "label"
LEASE_HOURS: Final = "lease.hours"
COMMIT_SECONDS: Final = "commit.timeout.seconds"

RETAIN: Final = timedelta(days=30)
"""How long an outcome is remembered that the session's record does not tell: the driver died as it was decided."""
_ABORT_TIMEOUT: Final = timedelta(seconds=30)
"""How long a failure waits to be told; what could not be aborted by then is by the next run."""
_LEASE_HOURS_DEFAULT: Final = 24
_LEASE_HOURS_MAX: Final = 7 * 24
_COMMIT_SECONDS_DEFAULT: Final = 600


@dataclass(frozen=True, slots=True)
class Target:
    """Where a sink writes and how; the same for all of its tasks."""

    settings: SparkSettings
    columns: Columns
    lease: timedelta
    commit_timeout: timedelta

    def connect(self) -> Bridge:
        """The connection of this process."""
        return connection(self.settings.connected_as(own_name()), self.settings.options)

    def client(self, work: Work) -> SharedClient:
        """The client whose transaction is written, as this process uses it."""
        return self.connect().share(work.client_name, work.session)


@dataclass(frozen=True)
class PartitionWritten(WriterCommitMessage):  # type: ignore[misc]  # types are checked without PySpark
    """What a task tells the driver.

    ``ticket`` and ``handle`` are None if it had no rows; ``handle`` alone is if an earlier run has committed them.
    """

    work: Work | None = None
    ticket: JointTicket | None = None
    handle: PartHandle | None = None


def stream_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> StreamSink:
    """The sink of a streaming query; in complete mode it appends each result, as Spark's Kafka sink does.

    Raises:
        ConfigError: options are missing, wrong or unknown; all are named.
        InvalidRequestError: the columns are not those of a record.
    """
    del overwrite
    reader = OptionReader(options)
    return StreamSink(_target(reader, schema), str(uuid.uuid4()))


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchSink:
    """The sink of a batch job.

    Raises:
        ConfigError, InvalidRequestError: as :func:`stream_writer`; or records would have to be replaced.
    """
    if overwrite:
        raise InvalidRequestError("a stream is appended to, never overwritten; nothing was written: use mode('append')")
    reader = OptionReader(options)
    label = reader.text(LABEL)
    if label and not reader.has(CLIENT_NAME):
        reader.faults.append(f"{LABEL}: needs {CLIENT_NAME}: a label belongs to one client")
    target = _target(reader, schema)
    return BatchSink(target, work_of_job(target.settings.client_name, label))


class StreamSink(DataSourceStreamArrowWriter):  # type: ignore[misc]  # types are checked without PySpark
    """Writes each micro-batch as one transaction."""

    def __init__(self, target: Target, execution: str) -> None:
        """``execution`` names this execution of a micro-batch."""
        self._target = target
        self._execution = execution

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        """Write one partition, in a task."""

        def work() -> Work:
            context = TaskContext.get()
            return work_of_query(context.getLocalProperty, self._target.settings.client_name, self._execution)

        return _write(self._target, iterator, work)

    def commit(self, messages: list[PartitionWritten | None], batchId: int) -> None:
        """Commit what the tasks have written, on the driver."""
        _commit(self._target, messages)

    def abort(self, messages: list[PartitionWritten | None], batchId: int) -> None:
        """Abort it, unless it is committed or may be."""
        _abort(self._target, messages, f"micro-batch {batchId} has failed")


class BatchSink(DataSourceArrowWriter):  # type: ignore[misc]  # types are checked without PySpark
    """Writes a data frame as one transaction."""

    def __init__(self, target: Target, work: Work) -> None:
        """``work`` is what all tasks of the job write together."""
        self._target = target
        self._work = work

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        """Write one partition, in a task."""
        return _write(self._target, iterator, lambda: self._work)

    def commit(self, messages: list[PartitionWritten | None]) -> None:
        """Commit what the tasks have written, on the driver."""
        _commit(self._target, messages)

    def abort(self, messages: list[PartitionWritten | None]) -> None:
        """Abort it, unless it is committed or may be."""
        _abort(self._target, messages, "the job has failed")


def _target(reader: OptionReader, schema: StructType) -> Target:
    settings = read_settings(reader)
    lease = reader.number(LEASE_HOURS, _LEASE_HOURS_DEFAULT)
    if lease is not None and lease > _LEASE_HOURS_MAX:
        reader.faults.append(f"{LEASE_HOURS}: {lease} is more than {_LEASE_HOURS_MAX}")
    timeout = reader.number(COMMIT_SECONDS, _COMMIT_SECONDS_DEFAULT)
    reader.finish()
    assert settings is not None
    assert lease is not None
    assert timeout is not None
    keep_what_stays()
    columns = Columns.of(schema, settings.streams, include_headers=settings.include_headers is not False)
    return Target(settings, columns, timedelta(hours=lease), timedelta(seconds=timeout))


def _write(target: Target, iterator: Iterator[pa.RecordBatch], work_of: Any) -> PartitionWritten:
    """Write one partition; a partition without rows has no part in the transaction."""
    writer: PartitionWriter | None = None
    written = PartitionWritten()
    try:
        for batch in promptly(iterator):
            if not batch.num_rows:
                continue
            if writer is None:
                work: Work = work_of()
                _check_group(target)
                joint = target.client(work).joint(
                    *target.settings.streams,
                    series=work.series,
                    number=work.number,
                    lease=target.lease,
                    retain=RETAIN,
                    timeout=target.commit_timeout,
                )
                written = PartitionWritten(work, joint.ticket)
                if joint.committed:
                    logger.info("%s was committed as %s by an earlier run; nothing is written", work, joint.id)
                    return written
                writer = PartitionWriter(joint.part(), target.columns, target.settings.streams)
            writer.write(batch)
        if writer is None:
            return written
        return PartitionWritten(written.work, written.ticket, writer.finish())
    except RowRefused as fault:
        context = TaskContext.get()
        where = "" if context is None else f" of partition {context.partitionId()}"
        why = f"row {fault.row}{where} can not be written: {fault}; nothing of {written.work} becomes visible"
        raise RowRefused(why, row=fault.row) from fault
    finally:
        keep_what_stays()


def _commit(target: Target, messages: Sequence[PartitionWritten | None]) -> None:
    """Commit the parts that were written; there is nothing to do if there are none."""
    written = [message for message in messages if message is not None and message.handle is not None]
    if not written:
        return
    work, ticket = written[0].work, written[0].ticket
    assert work is not None
    assert ticket is not None
    client, parts = target.client(work), [message.handle for message in written if message.handle is not None]
    sink_crash.reach("before-commit", work.number)
    result = client.commit(ticket, parts, target.commit_timeout)
    sink_crash.reach("inside-commit", work.number)
    try:
        client.note_committed(ticket, last=work.once)
        keep_what_stays()
    except Exception:
        # The rows are visible: whoever is told that this has failed writes them again.
        logger.exception("%s is committed, what comes after that failed; the next run asks the leader", work)
    sink_crash.reach("after-commit", work.number)
    logger.info("%s is committed as %s: %d records", work, ticket.transaction, result.records)


def _abort(target: Target, messages: Sequence[PartitionWritten | None], reason: str) -> None:
    """Abort what some of the tasks have written; what none has told of is aborted by the next run, or its lease."""
    for message in messages:
        if message is None or message.work is None or message.ticket is None:
            continue
        try:
            if not target.client(message.work).abort(
                message.ticket, reason, min(target.commit_timeout, _ABORT_TIMEOUT), last=message.work.once
            ):
                logger.warning("%s is not aborted: it is committed, or may be", message.work)
        except RollbridgeError as fault:
            # The failure that led here is the one to be told; the transaction is invisible, and ends with its lease.
            logger.warning("%s could not be aborted: %s", message.work, fault)
        return


def _check_group(target: Target) -> None:
    """Raise GroupMismatchError if a stream is not of the group that was named."""
    settings = target.settings
    for stream in settings.streams if settings.group is not None else ():
        found = target.connect().admin.describe(stream).config.group
        if found != settings.group:
            raise GroupMismatchError(f"{stream} belongs to group {found}, not to {settings.group}; nothing was written")
