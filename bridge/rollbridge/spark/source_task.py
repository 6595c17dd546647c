"""Tasks of the source: fetch offset ranges, and yield Arrow record batches.

The next fetch is requested before the rows of the present one are yielded, so brokers and Spark work at the same time.
Spark reuses its worker processes, and the connections kept here outlive a task.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from rollbridge.config import ConnectionSettings
from rollbridge.consumer.preview import PreviewTail
from rollbridge.consumer.records import OWN_HEADERS, Preview
from rollbridge.errors import NotFoundError, TruncatedError, UnavailableError
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Cluster
from rollbridge.model.names import show_partition
from rollbridge.spark.columns import record_batch, timestamp_us
from rollbridge.spark.kept import Kept
from rollbridge.spark.planning import Portion, PreviewPortion, SegmentRange
from rollbridge.spark.source_records import Records, committed_end

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)

_FETCH_BYTES: Final = 2 << 20
_ROWS_MAX: Final = 16_384
"""Maximum rows of an Arrow batch: larger ones exceed the processor's cache, smaller ones cost overhead."""
_WAIT_MS: Final = 500
_STALLED_S: Final = 60.0
_PREVIEW_WAIT_S: Final = 0.1


def read_portion(
    connection: ConnectionSettings, portion: Portion, names: Sequence[str], schema: StructType, *, fail: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the committed records of a portion.

    Args:
        connection: Settings of the connection to Kafka.
        portion: Ranges to read.
        names: Columns, in the order of ``schema``.
        schema: Schema that Spark expects.
        fail: True if deleted records are an error.

    Raises:
        TruncatedError: records have been deleted, or what says who wrote one, and ``fail`` is set.
        UnavailableError: nothing became readable for a minute.
        CorruptDataError: a batch or record does not parse.
        NotAuthorizedError, KafkaUnavailableError.
    """
    arrow = to_arrow_schema(schema, timezone="UTC")
    reader = log_reader(connection)
    for piece in portion.pieces:
        try:
            for records in _records(reader, piece, fail=fail):
                for begin in range(0, len(records), _ROWS_MAX):
                    rows = records.where(slice(begin, begin + _ROWS_MAX))
                    yield record_batch(rows, piece.place, names, arrow, fail=fail)
        except TruncatedError:
            raise
        except NotFoundError as gone:
            _lost(piece, piece.start, piece.end, fail=fail, cause=gone)


def _records(reader: LogReader, piece: SegmentRange, *, fail: bool) -> Iterator[Records]:
    topic, number, offset = piece.place.topic, piece.place.partition, piece.start
    patience = ReadTimeout(show_partition((topic, number)))
    while offset < piece.end:
        found = reader.fetch_raw(topic, offset, wait_ms=_WAIT_MS, partition=number, max_bytes=_FETCH_BYTES)
        if found.start > offset:
            _lost(piece, offset, min(found.start, piece.end), fail=fail)
            offset = found.start
        records, reached = committed_end(found.batches, offset, found.aborted)
        patience.moved(offset, reached)
        offset = reached
        if offset < piece.end:
            reader.ask(topic, offset, wait_ms=_WAIT_MS, partition=number, max_bytes=_FETCH_BYTES)
        if len(records) and records.offset[-1] >= piece.end:
            records = records.where(records.offset < piece.end)
        if len(records):
            yield records


def _lost(piece: SegmentRange, start: int, end: int, *, fail: bool, cause: Exception | None = None) -> None:
    topic = show_partition((piece.place.topic, piece.place.partition))
    what = f"offsets {start} to {end - 1} of topic {topic} have been deleted before they were read"
    if fail:
        raise TruncatedError(f"{what}; with the option failOnDataLoss=false they are left out") from cause
    logger.warning("%s; they are left out", what)


class ReadTimeout:
    """Watchdog of a read that makes no progress."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._moved_at = time.monotonic()

    def moved(self, before: int, after: int) -> None:
        """Note the progress of one fetch.

        Raises:
            UnavailableError: no fetch has made any for a minute.
        """
        if after > before:
            self._moved_at = time.monotonic()
        elif time.monotonic() - self._moved_at > _STALLED_S:
            raise UnavailableError(
                f"offset {after} of topic {self._topic} is not readable for {_STALLED_S:g} s, although it was before: "
                "brokers have failed, and those that are left do not have it yet"
            )


_readers: Final[Kept[LogReader]] = Kept()
atexit.register(_readers.close)


def log_reader(connection: ConnectionSettings) -> LogReader:
    """Return this process's reader of a cluster, which is kept for later tasks."""

    def connect() -> LogReader:
        address, name = connection.bootstrap_servers, connection.client_name or "rollbridge"
        return LogReader(Cluster(address, security=connection.kafka, client_id=name))

    found = _readers.get(connection.identity(), connect)
    found.unask()
    return found


def read_previews(
    connection: ConnectionSettings, portion: PreviewPortion, names: Sequence[str], schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Yield the records of the transactions that are open when this begins.

    Raises:
        KafkaUnavailableError, NotFoundError, NotAuthorizedError.
    """
    arrow = to_arrow_schema(schema, timezone="UTC")
    tail = PreviewTail(connection, portion.config)
    try:
        while not tail.is_caught_up:
            rows = [_preview_row(item) for item in tail.take(_PREVIEW_WAIT_S)]
            if rows:
                columns = [
                    pa.array([row.get(name) for row in rows], arrow.field(n).type) for n, name in enumerate(names)
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=arrow)
    finally:
        tail.close()


def _preview_row(item: Preview) -> dict[str, Any]:
    headers = [{"key": name, "value": value} for name, value in item.headers() if name not in OWN_HEADERS]
    return {
        "key": item.key(),
        "value": item.value(),
        "topic": item.topic(),
        "partition": item.partition(),
        "timestamp": timestamp_us(item.timestamp()[1], f"record {item.local_sequence} of {item.transaction_id}"),
        "timestampType": 0,
        "headers": headers or None,
        "stream": str(item.stream),
        "segment": item.segment.number,
        "epoch": item.segment.epoch,
        "transactionId": str(item.transaction_id),
        "localSequence": item.local_sequence,
        "committed": False,
    }
