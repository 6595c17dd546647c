"""Fetching a stretch of a partition over a plain connection: what is committed, and how far that can be told.

A consumer of librdkafka prefetches on a thread of its own and takes milliseconds to be moved; here one request brings
the batches after an offset, the aborted transactions among them, the last stable offset and the high watermark. With
``wait_ms`` the broker holds the answer back until something beyond the offset has been decided, so that waiting for
earlier transactions to end costs one request, and no polling.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.fetch.v12 import FetchRequest, FetchResponse
from kio.schema.fetch.v12.request import FetchPartition, FetchTopic
from kio.schema.list_offsets.v7 import ListOffsetsRequest, ListOffsetsResponse
from kio.schema.list_offsets.v7.request import ListOffsetsPartition, ListOffsetsTopic
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i8, i32, i32Timedelta, i64

from bridge.errors import CorruptDataError
from bridge.kafka import codes
from bridge.kafka.batches import Record
from bridge.kafka.codes import Meaning
from bridge.kafka.committed import AbortedSpan, committed_records
from bridge.kafka.errors import ConnectionLostError, KafkaUnavailable, NotAuthorizedError, TopicNotFound
from bridge.kafka.metadata import Cluster, CodeError, Isolation

logger = logging.getLogger(__name__)

FETCH_BYTES: Final = 1 << 20
"""Bytes asked for at once; the first batch comes whole even if it is larger."""
_EARLIEST: Final = -2
_CONSUMER: Final = BrokerId(-1)
_BACKOFF_FIRST_S: Final = 0.002
_BACKOFF_MAX_S: Final = 0.1


class Stretch(NamedTuple):
    """Part of a partition.

    Attributes:
        start: Where it begins; later than asked for if the log was truncated.
        end: Every offset in ``start..end-1`` is decided, and has been looked at.
        records: The committed records among them, in order.
        high_watermark: Where the partition ends.
    """

    start: int
    end: int
    records: list[Record]
    high_watermark: int


class LogReader:
    """Reads partitions through a :class:`Cluster` of its own; not thread-safe."""

    def __init__(
        self, cluster: Cluster, *, retry_timeout_s: float = 30.0, unknown_topic_timeout_s: float = 5.0
    ) -> None:
        self._cluster = cluster
        self._retry_timeout_s = retry_timeout_s
        self._unknown_topic_timeout_s = unknown_topic_timeout_s

    def close(self) -> None:
        """Drop the connections."""
        self._cluster.close()

    def fetch(
        self,
        topic: str,
        offset: int,
        *,
        wait_ms: int = 0,
        partition: int = 0,
        isolation: Isolation = Isolation.READ_COMMITTED,
        max_bytes: int = FETCH_BYTES,
    ) -> Stretch:
        """What is there from ``offset`` on, up to the last stable offset, at most about ``max_bytes``.

        With nothing there, an empty stretch after ``wait_ms``.

        Raises:
            TopicNotFound, NotAuthorizedError, KafkaUnavailable
            CorruptDataError: The log ends before ``offset``, or does not parse.
        """
        started = time.monotonic()
        backoff_s = 0.0
        while True:
            code: ErrorCode
            try:
                answer = self._ask(topic, partition, offset, wait_ms, isolation, max_bytes)
                found = answer.responses[0].partitions[0] if answer.responses else None
                code = answer.error_code if found is None else found.error_code
                if code == ErrorCode.none and found is not None:
                    aborted = found.aborted_transactions or ()
                    spans = [AbortedSpan(item.producer_id, item.first_offset) for item in aborted]
                    records, end = committed_records(found.records or b"", offset, spans)
                    return Stretch(offset, end, records, found.high_watermark)
                if code == ErrorCode.offset_out_of_range:
                    first = self._earliest(topic, partition)
                    if offset >= first:
                        raise CorruptDataError(f"topic {topic} ends before offset {offset}, which was written")
                    offset = first
                    continue
            except CodeError as exc:
                code = exc.code
            except ConnectionLostError as exc:
                logger.debug("fetching from %s again: %s", topic, exc)
                code = ErrorCode.network_exception
            self._check_repeatable(topic, code, time.monotonic() - started)
            self._cluster.forget_leader(topic)
            time.sleep(backoff_s)
            backoff_s = min(_BACKOFF_MAX_S, backoff_s * 2 or _BACKOFF_FIRST_S)

    def _ask(
        self, topic: str, partition: int, offset: int, wait_ms: int, isolation: Isolation, max_bytes: int
    ) -> FetchResponse:
        request = FetchRequest(
            max_wait=i32Timedelta.parse(timedelta(milliseconds=wait_ms)),
            min_bytes=i32(1),
            max_bytes=i32(max_bytes),
            isolation_level=i8(isolation.value),
            topics=(
                FetchTopic(
                    topic=TopicName(topic),
                    partitions=(
                        FetchPartition(
                            partition=i32(partition), fetch_offset=i64(offset), partition_max_bytes=i32(max_bytes)
                        ),
                    ),
                ),
            ),
            forgotten_topics_data=(),
        )
        connection = self._cluster.connection(self._cluster.leader(topic, partition))
        return connection.call(request, FetchResponse)

    def _earliest(self, topic: str, partition: int) -> int:
        """Offset of the first record that was not truncated."""
        request = ListOffsetsRequest(
            replica_id=_CONSUMER,
            isolation_level=i8(Isolation.READ_UNCOMMITTED.value),
            topics=(
                ListOffsetsTopic(
                    name=TopicName(topic),
                    partitions=(ListOffsetsPartition(partition_index=i32(partition), timestamp=i64(_EARLIEST)),),
                ),
            ),
        )
        connection = self._cluster.connection(self._cluster.leader(topic, partition))
        found = connection.call(request, ListOffsetsResponse).topics[0].partitions[0]
        if found.error_code != ErrorCode.none:
            raise CodeError(found.error_code, f"topic {topic}")
        return found.offset

    def _check_repeatable(self, topic: str, code: ErrorCode, waited_s: float) -> None:
        match codes.meaning(codes.READ, code):
            case Meaning.REFRESH | Meaning.RETRY:
                pass
            case Meaning.DENIED:
                raise NotAuthorizedError(f"not allowed to read topic {topic}", resource=f"topic {topic}")
            case _:
                raise KafkaUnavailable(f"cannot read topic {topic}: {codes.name(code)}")
        if code == ErrorCode.unknown_topic_or_partition and waited_s >= self._unknown_topic_timeout_s:
            raise TopicNotFound(f"topic {topic} does not exist", topic=topic)
        if waited_s >= self._retry_timeout_s:
            raise KafkaUnavailable(f"cannot read topic {topic}: {codes.name(code)} for {waited_s:.0f} s")
