"""The exactly-once sink: write each micro-batch, or each batch job, as one rolling transaction.

The tasks agree on the transaction by the query's id and the number of the micro-batch, see
:meth:`rollbridge.SharedClient.cooperative`. Each task writes a part and sends its handle to the driver, which commits
the parts of those attempts that Spark has chosen. So a retried task leaves nothing behind, and a repeated micro-batch
is found to be committed.

A task of a streaming query finds the query's id and the number of the micro-batch in its local properties, and the id
of the query's run as the group of its jobs. A restarted driver has another run, and so another session.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from rollbridge.base.ids import TransactionId
from rollbridge.base.logs import log_defect
from rollbridge.client.connection import Bridge
from rollbridge.client.cooperative import CooperativeTicket, SharedClient
from rollbridge.client.identity import own_name
from rollbridge.client.results import PartHandle
from rollbridge.client.transaction import Part
from rollbridge.errors import (
    ConflictError,
    InvalidRequestError,
    RollbridgeError,
    TransactionTooLargeError,
)
from rollbridge.metadata.client_sessions import CooperativeContent
from rollbridge.spark.settings import (
    CLIENT_NAME,
    LABEL,
    LABEL_NUMBER,
    REPLAY,
    SEGMENTS_PER_TASK,
    TRUST,
    JobOptions,
    OptionReader,
    SinkOptions,
    SparkSettings,
    read_settings,
)
from rollbridge.spark.sink_records import ROW_REFUSED, Columns, PartitionReader, row_refused
from rollbridge.spark.sink_task import PartitionWriter, connection
from rollbridge.spark.worker import keep_what_stays, promptly
from rollbridge.stream.names import check_client_name

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# Identity of the transaction


QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
RUN_ID: Final = "spark.jobGroup.id"

LocalProperty = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class SinkJob:
    """Identity of the transaction that the tasks of one job write together.

    Attributes:
        client_name: Client of the transaction.
        session: Name of the client's run, the same in all processes that work for it.
        series: Series in which the number counts: a query's id, or a label.
        number: Number of the transaction in the series.
        once: True if the client name is never used again.
        unique: True if the series is never used again.
    """

    client_name: str
    session: str
    series: str
    number: int
    once: bool = False
    unique: bool = False

    def __str__(self) -> str:
        return f"{self.series}/{self.number}"


def work_of_query(property_of: LocalProperty, client_name: str | None, stand_in: str) -> SinkJob:
    """Return the identity of the transaction of a streaming query's task.

    Args:
        client_name: Name given by the user; None for one made of the query's id.
        stand_in: Session to use where Spark does not name the run.

    Raises:
        InvalidRequestError: the task is not one of a streaming query.
    """
    query, batch = property_of(QUERY_ID), property_of(BATCH_ID)
    if not query or not batch:
        raise InvalidRequestError(
            f"Spark does not say for which query and micro-batch this task works ({QUERY_ID}: {query}, {BATCH_ID}: "
            f"{batch}); nothing was written"
        )
    return SinkJob(client_name or f"spark-{query}", property_of(RUN_ID) or stand_in, query, int(batch))


def work_of_job(client_name: str | None, label: str, number: int = 0) -> SinkJob:
    """Return the identity of a batch job's transaction: by its label if it has one, unique otherwise."""
    job = str(uuid.uuid4())
    name = client_name or f"spark-{job}"
    check_client_name(name)
    return SinkJob(name, job, label or job, number, once=client_name is None, unique=not label)


logger = logging.getLogger(__name__)


RETAIN: Final = timedelta(days=30)
"""Retention of outcomes, for those that the session's record lacks because the driver died as they were decided."""
_ABORT_TIMEOUT: Final = timedelta(seconds=30)
"""Longest time of an abort, which delays the report of a failure; after it the next run aborts."""
_LOOKED_MAX: Final = 100
_looked: Final[dict[str, str]] = {}
"""By client name, the latest run whose next micro-batches are known to be beyond those of all earlier runs."""


@dataclass(frozen=True, slots=True)
class SinkTarget:
    """Destination and settings of a sink; the same for all of its tasks."""

    settings: SparkSettings
    columns: Columns
    lease: timedelta
    commit_timeout: timedelta
    trusts_replays: bool = False
    """True if a replay is taken for what was committed, without a comparison."""
    segments_per_task: int | None = None
    """Maximum number of segments to which the rows of a task go; None if unknown."""

    def connect(self) -> Bridge:
        return connection(self.settings.connected_as(own_name()), self.settings.options)

    def client(self, work: SinkJob) -> SharedClient:
        """Return this process's share of the client that writes the transaction."""
        return self.connect().share(work.client_name, work.session)


@dataclass(frozen=True)
class PartitionWritten(WriterCommitMessage):  # type: ignore[misc]  # types are checked without PySpark
    """Message of a task to the driver.

    Attributes:
        work: Identity of the transaction.
        ticket: Ticket of the cooperative transaction; None if the task had no rows.
        handle: Handle of the part that the task wrote; None without rows, or if an earlier run has committed them.
        content: Count and digest of this task's rows.
        committed: Content that an earlier run has committed, all tasks together; None if no run has, or if an older
            version did not record it.
    """

    work: SinkJob | None = None
    ticket: CooperativeTicket | None = None
    handle: PartHandle | None = None
    content: CooperativeContent = field(default_factory=CooperativeContent)
    committed: CooperativeContent | None = None


def stream_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> StreamSink:
    """Return the sink of a streaming query; in complete mode it appends each result, as Spark's Kafka sink does.

    Raises:
        ConfigError: options are missing, wrong or unknown; all of them are named.
        InvalidRequestError: the columns are not those of a record.
    """
    del overwrite
    reader = OptionReader(options)
    return StreamSink(_target(reader, schema), str(uuid.uuid4()))


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchSink:
    """Return the sink of a batch job.

    Raises:
        ConfigError, InvalidRequestError: as :func:`stream_writer`; or ``overwrite`` is set.
    """
    if overwrite:
        raise InvalidRequestError("a stream is appended to, never overwritten; nothing was written: use mode('append')")
    reader = OptionReader(options)
    if reader.has(LABEL) and not reader.has(CLIENT_NAME):
        reader.faults.append(f"{LABEL}: needs {CLIENT_NAME}: a label belongs to one client")
    if reader.has(LABEL_NUMBER) and not reader.has(LABEL):
        reader.faults.append(f"{LABEL_NUMBER}: needs {LABEL}: it counts the jobs of one label")
    job = JobOptions(**reader.read(JobOptions))
    target = _target(reader, schema)
    return BatchSink(target, work_of_job(target.settings.client_name, job.label, job.number))


class StreamSink(DataSourceStreamArrowWriter):  # type: ignore[misc]  # types are checked without PySpark
    """Sink of a streaming query, which writes each micro-batch as one transaction."""

    def __init__(self, target: SinkTarget, execution: str) -> None:
        """Prepare; ``execution`` names this execution of a micro-batch."""
        self._target = target
        self._execution = execution

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        """Write one partition, in a task."""

        def work() -> SinkJob:
            context = TaskContext.get()
            return work_of_query(context.getLocalProperty, self._target.settings.client_name, self._execution)

        return _write(self._target, iterator, work)

    def commit(self, messages: list[PartitionWritten | None], batchId: int) -> None:
        """Commit what the tasks have written, on the driver."""
        _commit(self._target, messages)

    def abort(self, messages: list[PartitionWritten | None], batchId: int) -> None:
        """Abort what the tasks have written, unless it is committed or may be."""
        _abort(self._target, messages, f"micro-batch {batchId} has failed")


class BatchSink(DataSourceArrowWriter):  # type: ignore[misc]  # types are checked without PySpark
    """Sink of a batch job, which writes a data frame as one transaction."""

    def __init__(self, target: SinkTarget, work: SinkJob) -> None:
        """Prepare; ``work`` identifies the transaction that all tasks of the job write."""
        self._target = target
        self._work = work

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        """Write one partition, in a task."""
        return _write(self._target, iterator, lambda: self._work)

    def commit(self, messages: list[PartitionWritten | None]) -> None:
        """Commit what the tasks have written, on the driver."""
        _commit(self._target, messages)

    def abort(self, messages: list[PartitionWritten | None]) -> None:
        """Abort what the tasks have written, unless it is committed or may be."""
        _abort(self._target, messages, "the job has failed")


def _target(reader: OptionReader, schema: StructType) -> SinkTarget:
    settings = read_settings(reader)
    options = SinkOptions(**reader.read(SinkOptions))
    reader.finish()
    assert settings is not None
    keep_what_stays()
    columns = Columns.of(schema, settings.names, include_headers=settings.include_headers is not False)
    return SinkTarget(
        settings,
        columns,
        timedelta(hours=options.lease_hours),
        timedelta(seconds=options.commit_seconds),
        options.replay == TRUST,
        options.segments_per_task,
    )


def _write(target: SinkTarget, iterator: Iterator[pa.RecordBatch], work_of: Callable[[], SinkJob]) -> PartitionWritten:
    """Write one partition; a partition without rows has no part in the transaction."""
    written = PartitionWritten()
    names = target.settings.names
    reader: PartitionReader | None = None
    writer: PartitionWriter | None = None
    try:
        for batch in promptly(iterator):
            if not batch.num_rows:
                continue
            if written.ticket is None or reader is None:
                work = work_of()
                _check_group(target)
                streams = _streams(target)
                reader = PartitionReader(target.columns, names, streams)
                cooperative = target.client(work).cooperative(
                    *streams,
                    series=work.series,
                    number=work.number,
                    lease=target.lease,
                    retain=RETAIN,
                    timeout=target.commit_timeout,
                    once=work.unique,
                )
                written = PartitionWritten(
                    work, cooperative.ticket, committed=cooperative.content if cooperative.committed else None
                )
                if cooperative.committed:
                    logger.info("sink.repeated work=[%s] txn=%s: an earlier run committed it", work, cooperative.id)
                    if target.trusts_replays:
                        return written
                else:
                    part = cooperative.part()
                    _check_tasks(target, part, work)
                    writer = PartitionWriter(part, reader, streams)
            if writer is None:
                reader.read(batch)
            else:
                writer.write(batch)
        if written.ticket is None or reader is None:
            return PartitionWritten(work_of())
        return replace(written, handle=None if writer is None else writer.finish(), content=reader.content)
    except InvalidRequestError as fault:
        if fault.code != ROW_REFUSED:
            raise
        context, row = TaskContext.get(), vars(fault)["row"]
        where = "" if context is None else f" of partition {context.partitionId()}"
        why = f"row {row}{where} cannot be written: {fault}; nothing of {written.work} becomes visible"
        raise row_refused(why, row=row) from fault
    finally:
        keep_what_stays()


def _streams(target: SinkTarget) -> list[str]:
    """Return the names of the streams; of adopted topics, those of the streams that have adopted them.

    Raises:
        StreamNotFoundError: no stream has adopted one of the topics.
    """
    admin = target.connect().admin
    return [name if "/" in name else str(admin.name_of(name)) for name in target.settings.names]


def _check_tasks(target: SinkTarget, part: Part, work: SinkJob) -> None:
    """Refuse, before the first row of a task, a job with more tasks than one commit has room for.

    Spark does not tell a task how many there are, but the task's number implies all those before it.

    Raises:
        TransactionTooLargeError: there are too many.
    """
    context = TaskContext.get()
    if context is None:
        return
    try:
        part.check_parts(context.partitionId() + 1, target.segments_per_task)
    except TransactionTooLargeError as fault:
        raise TransactionTooLargeError(
            f"partition {context.partitionId()} of {work} was not written, and nothing of the others becomes visible: "
            f"{fault}. Let fewer tasks write (coalesce), to fewer segments, or in several micro-batches or jobs; if "
            f"the rows of each task go to few segments, {SEGMENTS_PER_TASK} says to how many at most",
            limit_bytes=fault.limit_bytes,
        ) from fault


def _commit(target: SinkTarget, messages: Sequence[PartitionWritten | None]) -> None:
    """Commit the parts that were written; compare the rows with what an earlier run has committed, if it has."""
    told = [message for message in messages if message is not None and message.work is not None]
    content = sum((message.content for message in told), CooperativeContent())
    handles = [message.handle for message in told if message.handle is not None]
    first = next((message for message in told if message.ticket is not None), None)
    if first is None:
        if told:
            _commit_nothing(target, told[0].work)
        return
    work, ticket = first.work, first.ticket
    assert work is not None
    assert ticket is not None
    if len(handles) < sum(message.ticket is not None for message in told):
        if handles:
            raise ConflictError(
                f"some tasks found {work} to be committed, and others wrote it; what they wrote was not committed"
            )
        _check_replay(target, work, ticket.transaction, first.committed, content)
        return
    client = target.client(work)
    result = client.commit(ticket, handles, target.commit_timeout, content=content)
    try:
        client.note_committed(ticket, last=work.once)
        _note_beyond(work)
        keep_what_stays()
    # The rows are visible: a reported failure would make Spark write them again.
    except RollbridgeError as fault:
        logger.warning("sink.note_failed work=[%s]: it is committed; the next run asks the leader: %s", work, fault)
    except Exception:
        log_defect(logger, "sink.note_failed work=[%s]: it is committed; the next run asks the leader", work)
    logger.info("sink.committed work=[%s] txn=%s records=%d", work, ticket.transaction, result.records)


def _commit_nothing(target: SinkTarget, work: SinkJob | None) -> None:
    """Check that a micro-batch or job without rows had none either when an earlier run committed it.

    Only the first micro-batch of a run can have been committed before: those that follow are new.
    """
    if work is None or work.unique or target.trusts_replays or _looked.get(work.client_name) == work.session:
        return
    found = target.client(work).committed(
        *target.settings.names, series=work.series, number=work.number, timeout=target.commit_timeout
    )
    if found is not None:
        _check_replay(target, work, found.id, found.content, CooperativeContent())
    _note_beyond(work)


def _note_beyond(work: SinkJob) -> None:
    """Note that no earlier run has written the micro-batches that follow in this run."""
    while len(_looked) >= _LOOKED_MAX:
        _looked.pop(next(iter(_looked)))
    _looked[work.client_name] = work.session


def _check_replay(
    target: SinkTarget,
    work: SinkJob,
    transaction: TransactionId,
    committed: CooperativeContent | None,
    replayed: CooperativeContent,
) -> None:
    """Compare a replay with what was committed.

    Raises:
        ConflictError: they differ.
    """
    if target.trusts_replays or committed == replayed:
        return
    if committed is None:
        logger.warning(
            "sink.not_compared work=[%s] txn=%s records=%d: it was committed by an older version, without a digest; "
            "nothing is written",
            work,
            transaction,
            replayed.records,
        )
        return
    raise ConflictError(
        f"{work} was committed by an earlier run as transaction {transaction} with {committed}, and comes again with "
        f"{replayed}; nothing was written. If the checkpoint was restored from a backup, or lost its newest files: the "
        "rows of that transaction are in the stream; use a new checkpoint that begins where its rows end. If "
        "the label was given to another job: choose another one. If the same input gives other rows each time: "
        f"{REPLAY}={TRUST} takes them for the same",
        transaction=str(transaction),
        committed=committed.records,
        replayed=replayed.records,
        code="replay-differs",
    )


def _abort(target: SinkTarget, messages: Sequence[PartitionWritten | None], reason: str) -> None:
    """Abort the transaction if a task has reported a part; otherwise the next run aborts it, or its lease ends it."""
    for message in messages:
        if message is None or message.work is None or message.ticket is None or message.handle is None:
            continue
        try:
            if not target.client(message.work).abort(
                message.ticket, reason, min(target.commit_timeout, _ABORT_TIMEOUT), last=message.work.once
            ):
                logger.warning("sink.not_aborted work=[%s]: it is committed, or may be", message.work)
        except RollbridgeError as fault:
            # Spark reports the failure that led here; the transaction is invisible, and ends with its lease.
            logger.warning("sink.abort_failed work=[%s]: %s", message.work, fault)
        return


def _check_group(target: SinkTarget) -> None:
    """Check that all streams belong to the group of the options, if one is given.

    Raises:
        InvalidRequestError: one does not.
    """
    settings = target.settings
    for stream in settings.names if settings.group is not None else ():
        found = target.connect().admin.describe(stream).config.group
        if found != settings.group:
            raise InvalidRequestError(
                f"{stream} belongs to group {found}, not to {settings.group}; nothing was written",
                code="group-mismatch",
            )
