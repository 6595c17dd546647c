"""Fetching a stretch of a partition over a plain connection: what is committed, and how far that can be told.

A consumer of librdkafka prefetches on a thread of its own and takes milliseconds to be moved; here one request brings
the batches after an offset, the aborted transactions among them, the last stable offset and the high watermark. With
``wait_ms`` the broker holds the answer back until something beyond the offset has been decided, so that waiting for
earlier transactions to end costs one request, and no polling.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.fetch.v12 import FetchRequest, FetchResponse
from kio.schema.fetch.v12.request import FetchPartition, FetchTopic
from kio.schema.fetch.v12.response import PartitionData
from kio.schema.types import TopicName
from kio.static.primitive import i8, i32, i32Timedelta, i64

from bridge.errors import CorruptDataError, KafkaUnavailable
from bridge.kafka.batches import Record
from bridge.kafka.committed import AbortedSpan, committed_records
from bridge.kafka.metadata import Cluster, CodeError, Isolation
from bridge.kafka.offsets import ask_first_offset, read_end_offset, read_patiently
from bridge.kafka.wire import Connection

logger = logging.getLogger(__name__)

FETCH_BYTES: Final = 1 << 20
"""Bytes asked for at once; the first batch comes whole even if it is larger."""


class Stretch(NamedTuple):
    """Part of a partition.

    Attributes:
        start: Where it begins; later than asked for if the log was truncated.
        end: Every offset in ``start..end-1`` is decided, and has been looked at.
        records: The committed records among them, in order.
        high_watermark: Where the partition ends.
        aborted: How many batches of aborted records are among it.
    """

    start: int
    end: int
    records: list[Record]
    high_watermark: int
    aborted: int = 0


class RawStretch(NamedTuple):
    """Part of a partition, as the broker gives it.

    Attributes:
        start: Where it begins; later than asked for if the log was truncated. The first batch may begin earlier.
        batches: Whole batches one after the other; the last may be cut short.
        aborted: The aborted transactions that reach into it.
        high_watermark: Where the partition ends.
    """

    start: int
    batches: bytes
    aborted: list[AbortedSpan]
    high_watermark: int


class LogReader:
    """Reads partitions through a :class:`Cluster` of its own; not thread-safe."""

    def __init__(
        self, cluster: Cluster, *, retry_timeout_s: float = 30.0, unknown_topic_timeout_s: float = 5.0
    ) -> None:
        self._cluster = cluster
        self._retry_timeout_s = retry_timeout_s
        self._unknown_topic_timeout_s = unknown_topic_timeout_s
        self._asked: tuple[tuple[str, int], Connection] | None = None

    def close(self) -> None:
        """Drop the connections."""
        self._cluster.close()

    def end(self, topic: str, *, partition: int = 0) -> int:
        """Where a partition ends; what is appended later stands there or behind.

        Raises:
            TopicNotFound, NotAuthorizedError, KafkaUnavailable
        """
        return read_end_offset(
            self._cluster,
            topic,
            partition,
            Isolation.READ_UNCOMMITTED,
            retry_timeout_s=self._retry_timeout_s,
            unknown_topic_timeout_s=self._unknown_topic_timeout_s,
        )

    def ask(self, topic: str, offset: int, *, wait_ms: int, max_bytes: int = FETCH_BYTES) -> None:
        """Send the request of a :meth:`fetch` that is to follow, so that the broker works on it meanwhile.

        If no fetch of this offset follows, the answer is lost, with its connection. Faults are left to the fetch, too.
        """
        try:
            connection = self._cluster.connection(self._cluster.leader(topic, 0))
            connection.send(_request(topic, 0, offset, wait_ms, Isolation.READ_COMMITTED, max_bytes))
        except (CodeError, KafkaUnavailable) as fault:
            logger.debug("topic %s is not asked in advance: %s", topic, fault)
        else:
            self._asked = (topic, offset), connection

    def unask(self) -> None:
        """Forget what was asked in advance: an answer that comes now would say what was, not what is."""
        self._asked = None

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
        raw = self.fetch_raw(
            topic, offset, wait_ms=wait_ms, partition=partition, isolation=isolation, max_bytes=max_bytes
        )
        committed = committed_records(raw.batches, raw.start, raw.aborted)
        return Stretch(raw.start, committed.end, committed.records, raw.high_watermark, committed.aborted)

    def fetch_raw(
        self,
        topic: str,
        offset: int,
        *,
        wait_ms: int = 0,
        partition: int = 0,
        isolation: Isolation = Isolation.READ_COMMITTED,
        max_bytes: int = FETCH_BYTES,
    ) -> RawStretch:
        """The same as :meth:`fetch`, not looked into."""
        return read_patiently(
            self._cluster,
            topic,
            lambda: self._fetch_once(topic, partition, offset, wait_ms, isolation, max_bytes),
            "topic",
            retry_timeout_s=self._retry_timeout_s,
            unknown_topic_timeout_s=self._unknown_topic_timeout_s,
        )

    def _fetch_once(
        self, topic: str, partition: int, offset: int, wait_ms: int, isolation: Isolation, max_bytes: int
    ) -> RawStretch:
        while True:
            try:
                asked, self._asked = self._asked, None
                if asked is not None and asked[0] == (topic, offset):
                    found = _answer(topic, asked[1])
                else:
                    found = ask_batches(self._cluster, topic, partition, offset, wait_ms, isolation, max_bytes)
            except CodeError as exc:
                if exc.code != ErrorCode.offset_out_of_range:
                    raise
                first = ask_first_offset(self._cluster, topic, partition)
                if offset >= first:
                    raise CorruptDataError(f"topic {topic} ends before offset {offset}, which was written") from exc
                offset = first
                continue
            spans = [AbortedSpan(item.producer_id, item.first_offset) for item in found.aborted_transactions or ()]
            return RawStretch(offset, found.records or b"", spans, found.high_watermark)


def ask_batches(
    cluster: Cluster,
    topic: str,
    partition: int,
    offset: int,
    wait_ms: int,
    isolation: Isolation,
    max_bytes: int = FETCH_BYTES,
) -> PartitionData:
    """The answer of the partition's leader to one Fetch request; see :meth:`LogReader.fetch` for the arguments.

    Raises:
        CodeError, ConnectionLostError
    """
    connection = cluster.connection(cluster.leader(topic, partition))
    connection.send(_request(topic, partition, offset, wait_ms, isolation, max_bytes))
    return _answer(topic, connection)


def _request(
    topic: str, partition: int, offset: int, wait_ms: int, isolation: Isolation, max_bytes: int
) -> FetchRequest:
    wanted = FetchPartition(partition=i32(partition), fetch_offset=i64(offset), partition_max_bytes=i32(max_bytes))
    return FetchRequest(
        max_wait=i32Timedelta.parse(timedelta(milliseconds=wait_ms)),
        min_bytes=i32(1),
        max_bytes=i32(max_bytes),
        isolation_level=i8(isolation.value),
        topics=(FetchTopic(topic=TopicName(topic), partitions=(wanted,)),),
        forgotten_topics_data=(),
    )


def _answer(topic: str, connection: Connection) -> PartitionData:
    answer = connection.receive(FetchResponse)
    found = answer.responses[0].partitions[0] if answer.responses else None
    code = answer.error_code if found is None else found.error_code
    if found is None or code != ErrorCode.none:
        raise CodeError(code, f"topic {topic}")
    return found
