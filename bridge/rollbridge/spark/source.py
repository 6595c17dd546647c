"""The source of ``format("rollbridge")``: read a stream in a batch, or as a streaming query.

The driver plans (:mod:`rollbridge.spark.planning`) with the epochs and ends that :class:`StreamDriver` looks up; the
tasks read (:mod:`rollbridge.spark.source_task`). Readers are pickled on their way to the tasks, so connections are
opened when needed, and stay behind. Imports that only tasks or some queries need are deferred as well: Spark starts a
process to plan each query, and imports are most of its time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from rollbridge.base.ids import SegmentId
from rollbridge.client.identity import own_name
from rollbridge.config import ConnectionSettings
from rollbridge.consumer.reader import beginning, locate, readable_ends, since
from rollbridge.errors import InvalidRequestError, NotFoundError, TruncatedError
from rollbridge.kafka.metadata import Isolation
from rollbridge.metadata.catalog import Catalog
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.spark.planning import (
    Front,
    OffsetRange,
    Portion,
    PreviewPortion,
    SegmentPlace,
    SegmentRange,
    StreamOffset,
    advance,
    between,
    chains,
    covered,
    split,
    unsealed,
    without_beyond,
    without_lost,
    without_unknown,
)
from rollbridge.spark.settings import (
    COMMIT_POSITION,
    FAIL_ON_DATA_LOSS,
    Kind,
    LogSettings,
    SourceSettings,
    SparkSettings,
    check_schema,
    read_source,
    schema_of,
)
from rollbridge.spark.worker import Prompt, kafka_client
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.positions import At, Latest, ReadPosition, Since, parse_start
from rollbridge.stream.routing import StreamView
from rollbridge.stream.truncation import consistent, frontier

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from rollbridge.spark.source_task import CommitRuns


S = TypeVar("S", "SourceSettings", "LogSettings")

# The driver's view of a stream


logger = logging.getLogger(__name__)


class DriverConnection:
    """Connections of a source's driver to ZooKeeper and Kafka, through which nothing is ever written.

    Raises:
        KafkaUnavailableError, ZooKeeperUnavailableError: no server answered in time.
        InvalidRequestError: the ZooKeeper path belongs to another Kafka cluster.
    """

    def __init__(self, settings: SparkSettings) -> None:
        self.connection: ConnectionSettings = settings.connected_as(settings.client_name or own_name())
        options = settings.options
        self._session = ZooKeeperSession.of(self.connection, session_timeout_s=options.session_timeout_s)
        self._session.start(options.connect_timeout_s)
        self.kafka = kafka_client(self.connection)
        try:
            self.cluster_id = self.kafka.cluster_id(options.connect_timeout_s)
            self.metadata = Metadata(self._session)
            if self.metadata.cluster() is not None:  # check a path in use; leave an unused one as it is
                self.metadata.claim_cluster(self.cluster_id)
            self._session.sync()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.kafka.close()
        self._session.close()


class StreamDriver:
    """Driver's view of one stream: its epochs, how far it can be read, what was deleted; not for several threads."""

    def __init__(self, connection: DriverConnection, settings: SparkSettings, name: str) -> None:
        """Look a stream up, or the one that has adopted a topic.

        Raises:
            StreamNotFoundError, InvalidRequestError, ZooKeeperUnavailableError.
        """
        self.stream: Final = connection.metadata.name_of(name)
        self._connection = connection
        self._catalog = Catalog(connection.metadata, lambda: None)
        self._reached: dict[SegmentId, int] = {}
        """Highest offsets that the logs of segments have been seen to reach."""
        group = self.view().config.group
        if settings.group is not None and settings.group != group:
            raise InvalidRequestError(
                f"stream {self.stream} belongs to group {group}, not to {settings.group}", code="group-mismatch"
            )

    def view(self) -> StreamView:
        """Return the stream as it is, or was a moment ago.

        Raises:
            StreamNotFoundError: the stream is gone.
        """
        self._catalog.refresh()
        return self._catalog.view(str(self.stream))

    def offset(self, front: Front, commit_log: int | None = None) -> StreamOffset:
        """Return a front as a checkpoint's offset."""
        return StreamOffset(
            self._connection.cluster_id,
            self.view().config.identity,
            ReadPosition(self.stream, front),
            commit_log,
        )

    def start(self, text: str) -> Front:
        """Return the front that the option ``startingOffsets`` means now.

        Raises:
            InvalidRequestError, TruncatedError: the read cannot begin there.
            KafkaUnavailableError, NotFoundError.
        """
        view, offsets = self.view(), self._connection.kafka.offsets
        history, places = view.history, view.config.places
        match parse_start(self.stream, text):
            case Latest():
                return readable_ends(offsets, places, history, Isolation.READ_COMMITTED)
            case Since(ms):
                stored = {places.of(segment): segment for segment in history.stored()}
                return frontier(history, consistent(history, since(offsets, stored, ms)))
            case At() as at:
                return locate(offsets, places, history, at).start or at.offsets
            case _:
                return beginning(offsets, places, history).offsets

    def look(self) -> tuple[EpochHistory, dict[SegmentId, int]]:
        """Return the epochs, and for their unsealed segments the offsets up to which they can be read.

        Raises:
            KafkaUnavailableError, NotFoundError.
            InvalidRequestError: the topic that the stream has adopted is another one by now.
        """
        self._check_topic()
        history = self.view().history
        try:
            return history, self._ends(unsealed(history), Isolation.READ_COMMITTED)
        except NotFoundError:
            history = self._read_again()
            return history, self._ends(unsealed(history), Isolation.READ_COMMITTED)

    def _check_topic(self) -> None:
        """Raise InvalidRequestError if the adopted topic was created again: its offsets are those of other records."""
        view = self.view()
        config = view.config
        if not any(map(config.places.is_adopted, view.history.stored())):
            return
        found = self._connection.kafka.topics.topic_ids([config.topic]).get(config.topic)
        if found is not None and str(found) != config.topic_id:
            raise InvalidRequestError(
                f"topic {config.topic} was deleted and created again since stream {self.stream} has adopted it, so its "
                "offsets mean nothing any more; nothing was read: release the topic and adopt it again (rollbridge "
                "stream release, adopt), and use another checkpointLocation"
            )

    def _ends(self, segments: Iterable[SegmentId], isolation: Isolation) -> dict[SegmentId, int]:
        places = self.view().config.places
        placed = {places.of(segment): segment for segment in segments}
        found = self._connection.kafka.offsets.end(placed, isolation) if placed else {}
        ends = {placed[place]: offset for place, offset in found.items()}
        self._reached |= {segment: max(end, self._reached.get(segment, 0)) for segment, end in ends.items()}
        return ends

    def _read_again(self) -> EpochHistory:
        """Read the epochs again, after a topic was missing: a segment was removed.

        Raises:
            StreamNotFoundError: the stream is gone.
        """
        self._catalog.read(str(self.stream))
        return self.view().history

    def known(self, front: Front, *, fail: bool) -> Front:
        """Return the front; or where to continue, if it names segments that the history no longer knows.

        Raises:
            TruncatedError: it does, and ``fail`` is set.
        """
        found, lost = without_unknown(self.view().history, front)
        self._judge(lost, fail=fail)
        return found

    def within(self, front: Front, ends: Mapping[SegmentId, int], *, fail: bool) -> Front:
        """Return the front, cut to the ends of logs that end before it.

        Raises:
            TruncatedError: one does, and ``fail`` is set.
        """
        beyond = {segment for segment, offset in front.items() if offset > ends.get(segment, offset)}
        if not beyond:
            return front
        # An open transaction holds the last stable offset back, so a front may be beyond it without any loss.
        found, lost = without_beyond(front, self._ends(beyond, Isolation.READ_UNCOMMITTED))
        self._judge(lost, fail=fail)
        return found

    def stored(self, ranges: list[OffsetRange], *, fail: bool) -> list[OffsetRange]:
        """Return what is left of ranges.

        Raises:
            TruncatedError: records are missing, and ``fail`` is set.
            KafkaUnavailableError.
            InvalidRequestError: the topic that the stream has adopted is another one by now.
        """
        self._check_topic()
        try:
            first = self._first(ranges)
        except NotFoundError:
            self._read_again()
            first = self._first(ranges)
        # Only ranges that an earlier run has planned may lie beyond what this run has seen.
        doubtful = {item.segment for item in ranges if item.end > self._reached.get(item.segment, 0)}
        self._ends(doubtful & first.keys(), Isolation.READ_UNCOMMITTED)
        left, lost = without_lost(ranges, first, self.view().history.removed, self._reached)
        self._judge(lost, fail=fail)
        return left

    def _first(self, ranges: Iterable[OffsetRange]) -> Mapping[SegmentId, int]:
        view = self.view()
        removed, places = view.history.removed, view.config.places
        placed = {places.of(item.segment): item.segment for item in ranges if item.segment not in removed}
        return {placed[place]: offset for place, offset in self._connection.kafka.offsets.first(placed).items()}

    def _judge(self, lost: list[str], *, fail: bool) -> None:
        if lost:
            judge_loss(f"records of {self.stream} that were still to be read are lost: {'; '.join(lost)}", fail=fail)


def judge_loss(what: str, *, fail: bool) -> None:
    """Log what was lost.

    Raises:
        TruncatedError: ``fail`` is set.
    """
    if fail:
        raise TruncatedError(
            f"{what}; nothing was read: with the option {FAIL_ON_DATA_LOSS}=false the query continues at what is left"
        )
    logger.warning("source.data_lost: %s; continuing at what is left, because of %s=false", what, FAIL_ON_DATA_LOSS)


def schema(options: Mapping[str, str]) -> StructType:
    """Return the columns that the options ask for.

    Raises:
        ConfigError: options are missing, wrong or unknown; all of them are named.
    """
    return schema_of(read_source(options, "schema").columns)


class SourceReader(Prompt, Generic[S]):
    """Common part of all readers: its driver connects when needed."""

    def __init__(self, settings: S, schema: StructType) -> None:
        self._settings: S = settings
        self._schema = schema
        self._connection: DriverConnection | None = None

    def _connected(self) -> DriverConnection:
        if self._connection is None:
            self._connection = DriverConnection(self._settings.shared)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit that the option ``maxRecordsPerTrigger`` sets."""
        limit = self._settings.max_records
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def stop(self) -> None:
        """Disconnect."""
        self._close()


class _StreamReading(SourceReader[SourceSettings]):
    """Common part of the readers of a stream: make portions of ranges, and read these in tasks."""

    kind: Kind

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """Prepare.

        Raises:
            ConfigError: options or columns are wrong; all of them are named.
        """
        super().__init__(read_source(options, self.kind), schema)
        self._names = check_schema(schema)
        self._known: StreamDriver | None = None
        self._runs: CommitRuns | None = None

    @property
    def _driver(self) -> StreamDriver:
        """The driver's view of the stream; the first use connects."""
        if self._known is None:
            self._known = StreamDriver(self._connected(), self._settings.shared, self._settings.stream)
        return self._known

    def _close(self) -> None:
        super()._close()
        self._known = self._runs = None

    @property
    def _wants_positions(self) -> bool:
        return COMMIT_POSITION[0] in self._names

    def _commit_runs(self, start: int | None) -> CommitRuns:
        """Return the runs, read on to the present end of the commit log."""
        driver = self._driver
        if self._runs is None:
            from rollbridge.spark.source_task import CommitRuns

            kafka = self._connected().kafka
            self._runs = CommitRuns(kafka.log(), kafka.offsets, driver.stream, driver.view().config.group)
        self._runs.read(start)
        return self._runs

    def _portions(self, tasks: Sequence[Sequence[OffsetRange]], runs: CommitRuns | None) -> list[InputPartition]:
        """Return input partitions of tasks, which are cut into more if the option ``minPartitions`` asks for that."""
        least = self._settings.min_partitions or 0
        if len(tasks) < least:
            total = sum(item.size for task in tasks for item in task)
            tasks = [
                piece
                for task in tasks
                for piece in split(task, max(1, round(least * sum(item.size for item in task) / total)))
            ]
        bases = self._driver.view().history.graph.sequence_bases
        return [Portion([self._piece(item, bases, runs) for item in task]) for task in tasks]

    def _piece(self, item: OffsetRange, bases: Mapping[SegmentId, int], runs: CommitRuns | None) -> SegmentRange:
        topic, partition = self._driver.view().config.place(item.segment)
        place = SegmentPlace(
            str(self._driver.stream),
            topic,
            item.segment,
            bases.get(item.segment),
            None if runs is None else runs.of(item.segment, item.start, item.end),
            partition,
        )
        return SegmentRange(place, item.start, item.end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the ranges of a task, in the task."""
        from rollbridge.spark.source_task import read_portion, read_previews

        settings = self._settings
        wanted = settings.shared.connection, partition, self._names, self._schema
        if isinstance(partition, Portion):
            return read_portion(*wanted, fail=settings.fail_on_data_loss)
        # Else Spark's placeholder for no partition.
        return read_previews(*wanted) if isinstance(partition, PreviewPortion) else iter(())


class BatchReader(_StreamReading, DataSourceReader):  # type: ignore[misc]  # types are checked without PySpark
    """Reader of a batch, each segment in a task of its own; partitions are in the order of the lineage."""

    kind = "batch"

    def partitions(self) -> list[InputPartition]:
        """Plan to read from one front to the other.

        Raises:
            StreamNotFoundError, KafkaUnavailableError, ZooKeeperUnavailableError, InvalidRequestError.
            InvalidRequestError, TruncatedError: the read cannot begin or end there.
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


class StreamReader(_StreamReading, DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]  # as above
    """Reader of a streaming query, in micro-batches that keep the order of every key's records across epochs.

    Raises, from methods that the driver calls:
        StreamNotFoundError, KafkaUnavailableError, ZooKeeperUnavailableError, InvalidRequestError.
        InvalidRequestError: the checkpoint belongs to another stream or cluster.
        TruncatedError: records that were to be read have been deleted.
    """

    kind = "streaming"

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: tuple[EpochHistory, Mapping[SegmentId, int]] | None = None
        self._readable: StreamOffset | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset at which a query without a checkpoint begins."""
        front = self._driver.start(self._settings.start)
        return self._offset(front, None).as_json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Note the present end of the stream: neither later records nor later epochs are read."""
        self._target = self._driver.look()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the offset at which the next micro-batch ends."""
        before = self._checked(start)
        driver, fail = self._driver, self._settings.fail_on_data_loss
        front = driver.known(before.position.offsets, fail=fail)
        history, ends = self._target or driver.look()
        front = driver.within(front, ends, fail=fail)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = advance(history, front, ends, limit=most)
        everything = end if most is None else advance(history, front, ends, chain_max=None)
        # The stream may have been deleted and created again between two looks.
        before.check_same(driver.offset(before.position.offsets))
        self._readable = driver.offset(everything)
        if end == front:
            return start if front == before.position.offsets else driver.offset(front, before.commit_log).as_json()
        return self._offset(end, before.commit_log).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the offset up to which the stream could be read at the last look."""
        return None if self._readable is None else self._readable.as_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan the tasks of a micro-batch; the same for the same offsets, whatever has happened since."""
        before, after = self._checked(start), self._checked(end)
        driver = self._driver
        history = driver.view().history
        fail = self._settings.fail_on_data_loss
        front = driver.known(before.position.offsets, fail=fail)
        ranges = driver.stored(between(history, front, driver.known(after.position.offsets, fail=fail)), fail=fail)
        runs = self._commit_runs(before.commit_log) if self._wants_positions and ranges else None
        return self._portions(chains(history, front, ranges), runs)

    def commit(self, end: dict[str, Any]) -> None:
        """Drop the runs that no later micro-batch needs."""
        if self._runs is not None:
            front = StreamOffset.of_json(end).position.offsets
            self._runs.forget(covered(self._driver.view().history, front))

    def _checked(self, found: dict[str, Any]) -> StreamOffset:
        """Parse an offset of Spark's checkpoint, and check that it is of this stream."""
        offset = StreamOffset.of_json(found)
        offset.check_same(self._driver.offset(offset.position.offsets))
        return offset

    def _offset(self, end: Front, commit_log: int | None) -> StreamOffset:
        """Return the offset of a front, with the place in the commit log if commit positions are read."""
        if not self._wants_positions:
            return self._driver.offset(end)
        runs = self._commit_runs(commit_log)
        return self._driver.offset(end, runs.begin_behind(covered(self._driver.view().history, end)))
