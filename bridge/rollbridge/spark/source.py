"""``format("rollbridge")`` to be read: a stream in a batch, or as a streaming query.

The driver plans (:mod:`rollbridge.spark.planning`) with what it knows of the stream
(:mod:`rollbridge.spark.source_driver`); the tasks read (:mod:`rollbridge.spark.source_task`). Readers are pickled on
their way to the tasks, so what is connected is opened when it is needed, and stays behind. So is what only tasks
import: Spark starts a process to plan each query, and imports are most of its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from rollbridge.model.epochs import EpochHistory
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.sn import sequence_bases
from rollbridge.spark.columns import COMMIT_POSITION, check_schema, schema_of
from rollbridge.spark.offsets import StreamOffset
from rollbridge.spark.planning import Front, OffsetRange, advance, between, chains, covered, split
from rollbridge.spark.portions import Piece, Place, Portion, PreviewPortion
from rollbridge.spark.prompt import Prompt
from rollbridge.spark.source_driver import DriverConnection, StreamDriver
from rollbridge.spark.source_options import SourceSettings, read_source

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from rollbridge.spark.source_commits import CommitRuns


def schema(options: Mapping[str, str]) -> StructType:
    """The columns that the options ask for; ConfigError names everything that is wrong with them."""
    return schema_of(read_source(options, "schema").columns)


def batch_reader(options: Mapping[str, str], schema: StructType) -> BatchReader:
    """Reads what is between two offsets; ConfigError names everything that is wrong."""
    return BatchReader(read_source(options, "batch"), schema)


def stream_reader(options: Mapping[str, str], schema: StructType) -> StreamReader:
    """Reads what comes; ConfigError names everything that is wrong."""
    return StreamReader(read_source(options, "streaming"), schema)


class _Reading(Prompt):
    """What both readers do: connect when it is needed, make portions of ranges, and read them in tasks."""

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        self._settings = settings
        self._schema = schema
        self._names = check_schema(schema)
        self._connection: DriverConnection | None = None
        self._known: StreamDriver | None = None
        self._runs: CommitRuns | None = None
        self._bases: tuple[EpochHistory, Mapping[SegmentId, int]] | None = None

    @property
    def is_prompt(self) -> bool:
        return self._settings.shared.quick_ack

    @property
    def _driver(self) -> StreamDriver:
        """The stream, connected to."""
        if self._known is None:
            self._connection = DriverConnection(self._settings.shared)
            self._known = StreamDriver(self._connection, self._settings.shared, self._settings.stream)
        return self._known

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._known = self._runs = None

    @property
    def _wants_positions(self) -> bool:
        return COMMIT_POSITION[0] in self._names

    def _commit_runs(self, start: int | None) -> CommitRuns:
        """What the commit log says by now."""
        driver = self._driver
        assert self._connection is not None  # the driver has just used it
        if self._runs is None:
            from rollbridge.spark.source_commits import CommitRuns
            from rollbridge.spark.source_task import log_reader

            self._runs = CommitRuns(
                log_reader(self._connection.connection),
                self._connection.offsets,
                self._settings.stream,
                driver.view().config.group,
            )
        self._runs.read(start)
        return self._runs

    def _portions(self, tasks: Sequence[Sequence[OffsetRange]], runs: CommitRuns | None) -> list[InputPartition]:
        """Tasks, cut into more of them if the option ``minPartitions`` asks for that."""
        least = self._settings.min_partitions or 0
        if len(tasks) < least:
            total = sum(item.size for task in tasks for item in task)
            tasks = [
                piece
                for task in tasks
                for piece in split(task, max(1, round(least * sum(item.size for item in task) / total)))
            ]
        history = self._driver.view().history
        if self._bases is None or self._bases[0] is not history:
            self._bases = history, sequence_bases(history)
        bases = self._bases[1]
        return [Portion([self._piece(item, bases, runs) for item in task]) for task in tasks]

    def _piece(self, item: OffsetRange, bases: Mapping[SegmentId, int], runs: CommitRuns | None) -> Piece:
        stream = self._settings.stream
        place = Place(
            str(stream),
            stream.segment_topic(item.segment),
            item.segment,
            bases.get(item.segment),
            None if runs is None else runs.of(item.segment, item.start, item.end),
        )
        return Piece(place, item.start, item.end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """What a task reads."""
        from rollbridge.spark.source_task import read_portion, read_previews

        connection = self._settings.shared.connection
        match partition:
            case Portion():
                return read_portion(
                    connection, partition, self._names, self._schema, fail=self._settings.fail_on_data_loss
                )
            case PreviewPortion():
                return read_previews(connection, partition, self._names, self._schema)
            case _:
                return iter(())  # Spark's own, in place of none


class BatchReader(_Reading, DataSourceReader):  # type: ignore[misc]  # types are checked without PySpark
    """Reads what is there, each segment in a task of its own; partitions come in the order of the lineage."""

    def partitions(self) -> list[InputPartition]:
        """Plan to read from one front to the other.

        Raises:
            StreamNotFound, KafkaUnavailable, ZooKeeperUnavailable, WrongClusterError.
            InvalidRequestError, TruncatedError: it can not begin or end there.
        """
        settings = self._settings
        try:
            driver = self._driver
            start = driver.start(settings.start)
            if settings.end == "latest":
                history, ends = driver.look()
                end: Front = advance(history, start, ends, chain_max=None)
            else:
                end = driver.start(settings.end)
                history = driver.view().history
            ranges = driver.stored(between(history, start, end), fail=settings.fail_on_data_loss)
            runs = self._commit_runs(None) if self._wants_positions else None
            portions = self._portions([[item] for item in ranges], runs)
            if settings.preview:
                config = driver.view().config
                portions.append(PreviewPortion(config))
            return portions
        finally:
            self._close()


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]  # as above
    """Reads what comes, in micro-batches that keep the order of every key's records across epochs.

    Raises, from what the driver calls:
        StreamNotFound, KafkaUnavailable, ZooKeeperUnavailable, WrongClusterError.
        InvalidRequestError: the checkpoint belongs to another stream or cluster.
        TruncatedError: records that were to be read have been deleted.
    """

    def __init__(self, settings: SourceSettings, schema: StructType) -> None:
        super().__init__(settings, schema)
        self._target: tuple[EpochHistory, Mapping[SegmentId, int]] | None = None
        self._readable: StreamOffset | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        front = self._driver.start(self._settings.start)
        return self._offset(front, None).as_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """The option ``maxRecordsPerTrigger``."""
        limit = self._settings.max_records
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """Note where the stream ends now: neither later records nor later epochs are read."""
        self._target = self._driver.look()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next micro-batch ends."""
        before = self._checked(start)
        driver, fail = self._driver, self._settings.fail_on_data_loss
        front = driver.known(before.position.offsets, fail=fail)
        history, ends = self._target or driver.look()
        front = driver.within(front, ends, fail=fail)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = advance(history, front, ends, limit=most)
        everything = end if most is None else advance(history, front, ends, chain_max=None)
        # It may have become another one between two looks.
        before.check_same(driver.offset(before.position.offsets))
        self._readable = driver.offset(everything)
        if end == front:
            return start if front == before.position.offsets else driver.offset(front, before.commit_log).as_json()
        return self._offset(end, before.commit_log).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Up to where the stream could be read when it was last looked at."""
        return None if self._readable is None else self._readable.as_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch; the same for the same offsets, whatever has happened since."""
        before, after = self._checked(start), self._checked(end)
        driver = self._driver
        history = driver.view().history
        fail = self._settings.fail_on_data_loss
        front = driver.known(before.position.offsets, fail=fail)
        ranges = driver.stored(between(history, front, driver.known(after.position.offsets, fail=fail)), fail=fail)
        runs = self._commit_runs(before.commit_log) if self._wants_positions and ranges else None
        return self._portions(chains(history, front, ranges), runs)

    def commit(self, end: dict[str, Any]) -> None:
        """Forget what will not be asked for again."""
        if self._runs is not None:
            front = StreamOffset.of_json(end).position.offsets
            self._runs.forget(covered(self._driver.view().history, front))

    def stop(self) -> None:
        """Disconnect."""
        self._close()

    def _checked(self, found: dict[str, Any]) -> StreamOffset:
        """An offset of Spark's checkpoint, which must be of this stream."""
        offset = StreamOffset.of_json(found)
        offset.check_same(self._driver.offset(offset.position.offsets))
        return offset

    def _offset(self, end: Front, commit_log: int | None) -> StreamOffset:
        """The offset of a front; with the place in the commit log, if that is going to be needed."""
        if not self._wants_positions:
            return self._driver.offset(end)
        runs = self._commit_runs(commit_log)
        return self._driver.offset(end, runs.begin_behind(covered(self._driver.view().history, end)))
