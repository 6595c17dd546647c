"""The exactly-once sink: what one micro-batch, or one batch job, writes is one rolling transaction.

The tasks agree on the transaction by the query's id and the number of the micro-batch, see
:meth:`rollbridge.SharedClient.joint`, write a part each, and send its handle to the driver, which commits the parts of
those attempts that Spark has chosen. So a task that is tried again leaves nothing behind, and a micro-batch that comes
again is found to be committed.
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

from rollbridge.client.cooperative import JointTicket, SharedClient
from rollbridge.client.identity import own_name
from rollbridge.client.results import PartHandle
from rollbridge.client.writing import Part
from rollbridge.connection import Bridge
from rollbridge.errors import (
    ConflictError,
    GroupMismatchError,
    InvalidRequestError,
    ReplayDiffers,
    RollbridgeError,
    RowRefused,
    TransactionTooLargeError,
)
from rollbridge.model.cooperative import JointContent
from rollbridge.model.ids import TransactionId
from rollbridge.model.names import check_client_name
from rollbridge.model.options import option
from rollbridge.spark.settings import CLIENT_NAME, OptionReader, SparkSettings, read_settings
from rollbridge.spark.sink_records import Columns, PartitionReader
from rollbridge.spark.sink_task import PartitionWriter, connection
from rollbridge.spark.worker import keep_what_stays, promptly

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# --------------------------------------------------------------------------------------------------------------------
# Whose rows are written: the name, the session and the number by which all tasks of a job mean the same transaction.
# A task of a streaming query finds the query's id and the number of the micro-batch in its local properties, and
# there the id of the query's run, too, as the group of its jobs. A restarted driver has another run, and so another
# session.


QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
RUN_ID: Final = "spark.jobGroup.id"

LocalProperty = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Work:
    """What the tasks of one job write together.

    Attributes:
        client_name: Whose transaction it is.
        session: What all processes that work for one run of the client call it.
        series: What the number counts in.
        number: Of the transaction in the series.
        once: Whether nobody will ever come back to this client name.
        unique: Whether nobody will ever come back to this series.
    """

    client_name: str
    session: str
    series: str
    number: int
    once: bool = False
    unique: bool = False

    def __str__(self) -> str:
        return f"{self.series}/{self.number}"


def work_of_query(property_of: LocalProperty, client_name: str | None, stand_in: str) -> Work:
    """What a task of a streaming query writes.

    Args:
        property_of: The local properties of the task.
        client_name: If the user named one; made of the query's id otherwise.
        stand_in: The session where Spark does not say which run it is.

    Raises:
        InvalidRequestError: it is not a task of a streaming query.
    """
    query, batch = property_of(QUERY_ID), property_of(BATCH_ID)
    if not query or not batch:
        raise InvalidRequestError(
            f"Spark does not say for which query and micro-batch this task works ({QUERY_ID}: {query}, {BATCH_ID}: "
            f"{batch}); nothing was written"
        )
    return Work(client_name or f"spark-{query}", property_of(RUN_ID) or stand_in, query, int(batch))


def work_of_job(client_name: str | None, label: str, number: int = 0) -> Work:
    """What the tasks of a batch job write: something of its own, or what the label names, whichever job does it."""
    job = str(uuid.uuid4())
    name = client_name or f"spark-{job}"
    check_client_name(name)
    return Work(name, job, label or job, number, once=client_name is None, unique=not label)


logger = logging.getLogger(__name__)

LABEL: Final = "label"
LABEL_NUMBER: Final = "label.number"
SEGMENTS_PER_TASK: Final = "segments.per.task"
REPLAY: Final = "replay"
COMPARE, TRUST = "compare", "trust"

RETAIN: Final = timedelta(days=30)
"""How long an outcome is remembered that the session's record does not tell: the driver died as it was decided."""
_ABORT_TIMEOUT: Final = timedelta(seconds=30)
"""How long a failure waits to be told; what could not be aborted by then is by the next run."""
_LOOKED_MAX: Final = 100
_looked: Final[dict[str, str]] = {}
"""By client name the latest run that this process knows to be beyond what earlier runs may have committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Options of the sink beside those that all formats have."""

    replay: str = option(COMPARE, key=REPLAY, choices=(COMPARE, TRUST))
    """What comes again must have the rows that were committed; ``trust`` takes it for the same without a look."""
    segments_per_task: int | None = option(None, key=SEGMENTS_PER_TASK, low=1)
    """To how many segments the rows of a task go at most, where there are very many tasks, see docs/spark.md#limits."""
    lease_hours: int = option(24, key="lease.hours", high=7 * 24)
    """How long a transaction may stay open."""
    commit_seconds: int = option(600, key="commit.timeout.seconds", low=1)
    """How long the driver waits for the outcome of a commit; a merge takes about 3 s per GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of batch jobs."""

    label: str = option("", key=LABEL)
    """Batch only, needs ``client.name``: a job whose label was committed before writes nothing, see
    docs/spark.md#labels."""
    number: int = option(0, key=LABEL_NUMBER, low=0)
    """Which of the jobs of a label it is; these numbers never fall."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a sink writes and how; the same for all of its tasks."""

    settings: SparkSettings
    columns: Columns
    lease: timedelta
    commit_timeout: timedelta
    trusts_replays: bool = False
    """Whether what comes again is taken for what was committed, without a look."""
    segments_per_task: int | None = None
    """To how many segments the rows of a task go at most, if that is known."""

    def connect(self) -> Bridge:
        """The connection of this process."""
        return connection(self.settings.connected_as(own_name()), self.settings.options)

    def client(self, work: Work) -> SharedClient:
        """The client whose transaction is written, as this process uses it."""
        return self.connect().share(work.client_name, work.session)


@dataclass(frozen=True)
class PartitionWritten(WriterCommitMessage):  # type: ignore[misc]  # types are checked without PySpark
    """What a task tells the driver.

    ``ticket`` and ``handle`` are None if it had no rows; ``handle`` alone is if an earlier run has committed them. Then
    ``committed`` says what that has committed, all tasks together. ``content`` is that of this task's rows.
    """

    work: Work | None = None
    ticket: JointTicket | None = None
    handle: PartHandle | None = None
    content: JointContent = field(default_factory=JointContent)
    committed: JointContent | None = None


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
    if reader.has(LABEL) and not reader.has(CLIENT_NAME):
        reader.faults.append(f"{LABEL}: needs {CLIENT_NAME}: a label belongs to one client")
    if reader.has(LABEL_NUMBER) and not reader.has(LABEL):
        reader.faults.append(f"{LABEL_NUMBER}: needs {LABEL}: it counts the jobs of one label")
    job = JobOptions(**reader.read(JobOptions))
    target = _target(reader, schema)
    return BatchSink(target, work_of_job(target.settings.client_name, job.label, job.number))


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
    options = SinkOptions(**reader.read(SinkOptions))
    reader.finish()
    assert settings is not None
    keep_what_stays()
    columns = Columns.of(schema, settings.streams, include_headers=settings.include_headers is not False)
    return Target(
        settings,
        columns,
        timedelta(hours=options.lease_hours),
        timedelta(seconds=options.commit_seconds),
        options.replay == TRUST,
        options.segments_per_task,
    )


def _write(target: Target, iterator: Iterator[pa.RecordBatch], work_of: Callable[[], Work]) -> PartitionWritten:
    """Write one partition; a partition without rows has no part in the transaction."""
    written = PartitionWritten()
    reader = PartitionReader(target.columns, target.settings.streams)
    writer: PartitionWriter | None = None
    try:
        for batch in promptly(iterator) if target.settings.quick_ack else iterator:
            if not batch.num_rows:
                continue
            if written.ticket is None:
                work = work_of()
                _check_group(target)
                joint = target.client(work).joint(
                    *target.settings.streams,
                    series=work.series,
                    number=work.number,
                    lease=target.lease,
                    retain=RETAIN,
                    timeout=target.commit_timeout,
                    once=work.unique,
                )
                written = PartitionWritten(work, joint.ticket, committed=joint.content if joint.committed else None)
                if joint.committed:
                    logger.info("%s was committed as %s by an earlier run; nothing is written", work, joint.id)
                    if target.trusts_replays:
                        return written
                else:
                    part = joint.part()
                    _check_tasks(target, part, work)
                    writer = PartitionWriter(part, reader, target.settings.streams)
            if writer is None:
                reader.read(batch)
            else:
                writer.write(batch)
        if written.ticket is None:
            return PartitionWritten(work_of())
        return replace(written, handle=None if writer is None else writer.finish(), content=reader.content)
    except RowRefused as fault:
        context = TaskContext.get()
        where = "" if context is None else f" of partition {context.partitionId()}"
        why = f"row {fault.row}{where} can not be written: {fault}; nothing of {written.work} becomes visible"
        raise RowRefused(why, row=fault.row) from fault
    finally:
        keep_what_stays()


def _check_tasks(target: Target, part: Part, work: Work) -> None:
    """Refuse, before the first row of a task, so many tasks that their parts could not be committed together.

    Spark tells no task how many there are; that there are all those before this one is certain.
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


def _commit(target: Target, messages: Sequence[PartitionWritten | None]) -> None:
    """Commit the parts that were written; what was committed before is compared with what the tasks had now."""
    told = [message for message in messages if message is not None and message.work is not None]
    content = sum((message.content for message in told), JointContent())
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
    except Exception:
        # The rows are visible: whoever is told that this has failed writes them again.
        logger.exception("%s is committed, what comes after that failed; the next run asks the leader", work)
    logger.info("%s is committed as %s: %d records", work, ticket.transaction, result.records)


def _commit_nothing(target: Target, work: Work | None) -> None:
    """Nothing is written of what has no rows, but it must not have had any when it was committed.

    Only the first micro-batch of a run may have been: those that come after it are later ones.
    """
    if work is None or work.unique or target.trusts_replays or _looked.get(work.client_name) == work.session:
        return
    found = target.client(work).committed(
        *target.settings.streams, series=work.series, number=work.number, timeout=target.commit_timeout
    )
    if found is not None:
        _check_replay(target, work, found.id, found.content, JointContent())
    _note_beyond(work)


def _note_beyond(work: Work) -> None:
    """Know that whatever this run writes from now on, no earlier one has written."""
    while len(_looked) >= _LOOKED_MAX:
        _looked.pop(next(iter(_looked)))
    _looked[work.client_name] = work.session


def _check_replay(
    target: Target, work: Work, transaction: TransactionId, committed: JointContent | None, replayed: JointContent
) -> None:
    """Raise ReplayDiffers if what comes again is not what was committed."""
    if target.trusts_replays or committed == replayed:
        return
    if committed is None:
        logger.warning(
            "%s was committed as %s by an older version, which did not note what it held: whether these %d records "
            "are the same can not be told, and nothing is written",
            work,
            transaction,
            replayed.records,
        )
        return
    raise ReplayDiffers(
        f"{work} was committed by an earlier run as transaction {transaction} with {committed}, and comes again with "
        f"{replayed}; nothing was written. If the checkpoint was restored from a backup, or lost its newest files: the "
        "rows of that transaction are in the stream; go on under a new checkpoint that begins where its rows end. If "
        "the label was given to another job: choose another one. If the same input gives other rows each time: "
        f"{REPLAY}={TRUST} takes them for the same",
        transaction=str(transaction),
        committed=committed.records,
        replayed=replayed.records,
    )


def _abort(target: Target, messages: Sequence[PartitionWritten | None], reason: str) -> None:
    """Abort what some of the tasks have written; what none has told of is aborted by the next run, or its lease."""
    for message in messages:
        if message is None or message.work is None or message.ticket is None or message.handle is None:
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
