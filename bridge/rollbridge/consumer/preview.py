"""Preview of open transactions: their records, read from a stream's buffer before the outcome is known.

At the start the buffer is read once for its ABORT frames, and the commit log for the outcomes since the oldest frame,
so that transactions that have ended by then are not shown. Then the buffer is read again from its beginning and
followed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from confluent_kafka import KafkaError, Message, TopicPartition

from rollbridge.config import ConnectionSettings
from rollbridge.consumer.records import Preview
from rollbridge.errors import CorruptDataError, InvalidRequestError, KafkaUnavailable
from rollbridge.forks import hold
from rollbridge.kafka.batches import read_records, validate_frame
from rollbridge.kafka.clients import assign_more, consumer_config, open_consumer
from rollbridge.kafka.errors import translate
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.retry import limited
from rollbridge.kafka.snapshots import is_end
from rollbridge.model.control import ControlKind, peek_kind
from rollbridge.model.ids import SegmentId, local_sequence
from rollbridge.model.pieces import BufferedTransaction, FrameRef
from rollbridge.model.reading import PreviewFold, aborted_in
from rollbridge.model.records import StreamConfig
from rollbridge.model.sn import RECORD_HEADER, unpack_record_header

logger = limited(logging.getLogger(__name__))

_BATCH: Final = 50
"""Frames per call of ``consume``; each may have a quarter of a megabyte."""
_POLL_S: Final = 1.0
_SILENT_POLLS_MAX: Final = 30
_CLOCKS_DIFFER_MS: Final = 10 * 60 * 1000
"""Allowed difference between the clocks of brokers and leaders; with a larger one an outcome may be missed."""


class PreviewTail:
    """Follower of a stream's buffer. Not thread-safe."""

    def __init__(self, settings: ConnectionSettings, stream: StreamConfig) -> None:
        """Read which transactions have ended; see the module.

        Raises:
            KafkaUnavailable, NotFoundError, NotAuthorizedError (previews need the right to read the buffer).
        """
        self._stream = stream.name
        self._topic = topic = stream.buffer_topic
        self._log = stream.group.commit_log_topic
        partitions = stream.buffer_partitions
        offsets = LogOffsets(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name)
        self._buffer = [
            TopicPartition(topic, number, offsets.first([topic], number)[topic]) for number in range(partitions)
        ]
        self._unread: dict[int, int] = {}
        config = consumer_config(
            settings.bootstrap_servers,
            isolation=Isolation.READ_COMMITTED,
            security=settings.kafka,
            client_id=settings.client_name,
            extra={"fetch.queue.backoff.ms": 5},
        )
        config |= {"enable.partition.eof": True, "error_cb": lambda error: logger.info("previews: %s", error)}
        self._consumer = open_consumer(config, f"preview {stream.name}", logger)
        hold(self, "_consumer")
        try:
            self._fold = PreviewFold(_check_batch, self._learn(offsets))
        except BaseException:
            self._consumer.close()
            raise
        self._consumer.incremental_assign(self._buffer)

    @property
    def is_caught_up(self) -> bool:
        """True once everything that was in the buffer at the start has been taken."""
        return not self._unread

    def take(self) -> Iterator[Preview]:
        """Yield records of open transactions not given yet, in the order of the buffer. Does not wait."""
        for message in self._consumer.consume(_BATCH, 0):
            error = message.error()
            if error is not None:
                self._judge(error, message)
            elif message.topic() == self._log:
                if _is_outcome(message):
                    self._fold.end(message.key() or b"", message.timestamp()[1])
            else:
                place = (message.topic() or "", message.partition() or 0)
                for transaction, frame, batch in self._fold.fold(
                    str(self._stream),
                    place,
                    message.offset() or 0,
                    message.timestamp()[1],
                    message.key(),
                    message.value(),
                ):
                    yield from self._records(transaction, frame, batch)

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def _records(self, transaction: BufferedTransaction, frame: FrameRef, batch: bytes) -> Iterator[Preview]:
        segment = SegmentId.of(frame.piece.segment, transaction.begin.streams[str(self._stream)])
        try:
            for record in read_records(batch):
                local = local_sequence(frame.piece.part, frame.first_count)
                for name, value in record.headers:
                    if name == RECORD_HEADER and value is not None:
                        local = unpack_record_header(value)[1]
                yield Preview(
                    self._stream,
                    segment,
                    transaction.transaction_id,
                    local,
                    (record.timestamp, record.key, record.value, record.headers),
                )
        except (CorruptDataError, InvalidRequestError) as fault:
            # The leader refuses the transaction when it reaches that frame; a preview only leaves it out.
            logger.warning("a frame of transaction %s cannot be shown: %s", transaction, fault)

    def _learn(self, offsets: LogOffsets) -> set[bytes]:
        """Return the ids of the transactions that have ended."""
        ended: set[bytes] = set()
        oldest_ms: list[int] = []

        def aborts(message: Message) -> None:
            if not oldest_ms or message.timestamp()[1] < oldest_ms[0]:
                oldest_ms[:] = [message.timestamp()[1]]
            aborted = aborted_in(message.key(), message.value())
            if aborted is not None:
                ended.add(aborted)

        def outcomes(message: Message) -> None:
            if _is_outcome(message):
                ended.add(message.key() or b"")

        # Take the log's end before reading the buffer: outcomes from there on are followed.
        log_end = offsets.end([self._log], Isolation.READ_COMMITTED)[self._log]
        topic = self._topic
        ends = {
            (topic, item.partition): offsets.end([topic], Isolation.READ_COMMITTED, item.partition)[topic]
            for item in self._buffer
        }
        self._unread = {number: end for (_, number), end in ends.items()}
        self._read_to_end(self._buffer, ends, aborts)
        if oldest_ms:
            begin = offsets.since([self._log], max(oldest_ms[0] - _CLOCKS_DIFFER_MS, 0))[self._log]
            if begin is not None and begin < log_end:
                self._read_to_end([TopicPartition(self._log, 0, begin)], {(self._log, 0): log_end}, outcomes)
        assign_more(self._consumer, [TopicPartition(self._log, 0, log_end)])
        return ended

    def _read_to_end(
        self,
        partitions: list[TopicPartition],
        ends: Mapping[tuple[str, int], int],
        take: Callable[[Message], None],
    ) -> None:
        """Read partitions up to the ends that their leaders reported; see :mod:`rollbridge.kafka.snapshots`."""
        partitions = [item for item in partitions if item.offset < ends[item.topic, item.partition]]
        if not partitions:
            return
        assign_more(self._consumer, partitions)
        unread = {(item.topic, item.partition) for item in partitions}
        silent = 0
        while unread:
            first = self._consumer.poll(_POLL_S)
            silent = silent + 1 if first is None else 0
            if silent > _SILENT_POLLS_MAX:
                raise KafkaUnavailable(f"the buffer of {self._stream} cannot be read: no broker answers")
            for message in () if first is None else (first, *self._consumer.consume(_BATCH, 0)):
                error = message.error()
                if error is None:
                    take(message)
                elif error.code() != KafkaError._PARTITION_EOF:
                    self._judge(error, message)
                place = (message.topic() or "", message.partition() or 0)
                if place in unread and is_end(message, ends[place]):
                    unread.discard(place)
        self._consumer.incremental_unassign(partitions)

    def _judge(self, error: KafkaError, message: Message) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            number = message.partition() or 0
            # A newly elected leader may report an end that is too early, see rollbridge.kafka.snapshots.
            if message.topic() == self._topic and is_end(message, self._unread.get(number, 0)):
                self._unread.pop(number, None)
            return
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            # The buffer was truncated, which only takes transactions that have ended.
            topic, number = message.topic() or "", message.partition() or 0
            logger.info("the buffer of %s was truncated; going on at what is left", self._stream)
            low = self._consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=_SILENT_POLLS_MAX)[0]
            self._consumer.incremental_unassign([TopicPartition(topic, number)])
            self._consumer.incremental_assign([TopicPartition(topic, number, low)])
            return
        fault = translate(error, f"preview {self._stream}", f"topic {message.topic()}")
        if not isinstance(fault, KafkaUnavailable):
            raise fault
        logger.info("previewing %s: %s", self._stream, fault)


def _is_outcome(message: Message) -> bool:
    kind = peek_kind(message.value())
    return kind is not None and kind is not ControlKind.BEGIN


def _check_batch(batch: bytes, records: int) -> str | None:
    try:
        validate_frame(batch, records)
    except CorruptDataError as fault:
        return str(fault)
    return None
