"""Preview of open transactions: their records, read from a stream's buffer before the outcome is known.

At the start the buffer is read once for its ABORT frames, and the commit log for the outcomes since the oldest frame,
so that transactions that have ended by then are not shown. Then the buffer is read again from its beginning and
followed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import islice
from typing import Final

from rollbridge.config import ConnectionSettings
from rollbridge.consumer.records import Preview
from rollbridge.errors import CorruptDataError, InvalidRequestError, KafkaUnavailableError
from rollbridge.forks import hold
from rollbridge.kafka.batches import LogRecord, read_records, validate_frame
from rollbridge.kafka.fetch import LogDivergedError
from rollbridge.kafka.fetch_plan import Fetched, Trouble
from rollbridge.kafka.follower import Follower, read_up_to
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.ratelimit import limited
from rollbridge.model.control import ControlKind, peek_kind
from rollbridge.model.ids import SegmentId, local_sequence
from rollbridge.model.names import Partition
from rollbridge.model.pieces import BufferedTransaction, FrameRef
from rollbridge.model.reading import PreviewFold, aborted_in
from rollbridge.model.records import StreamConfig
from rollbridge.model.sn import RECORD_HEADER, unpack_record_header

logger = limited(logging.getLogger(__name__))

_FRAMES_MAX: Final = 50
"""Maximum number of frames taken at a time; each has up to a quarter of a megabyte."""
_SILENT_S: Final = 30.0
_CLOCKS_DIFFER_MS: Final = 10 * 60 * 1000
"""Allowed difference between the clocks of brokers and leaders; with a larger one an outcome may be missed."""


class PreviewTail:
    """Follower of a stream's buffer. Not thread-safe."""

    def __init__(self, settings: ConnectionSettings, stream: StreamConfig) -> None:
        """Read which transactions have ended; see the module.

        Raises:
            KafkaUnavailableError, NotFoundError, NotAuthorizedError (previews need the right to read the buffer).
        """
        self._stream = stream.name
        self._places = stream.places
        self._topic = topic = stream.buffer_topic
        self._log = stream.group.commit_log_topic
        partitions = stream.buffer_partitions
        address = settings.bootstrap_servers
        self._arrived: deque[Fetched] = deque()
        self._open: Fetched | None = None
        self._records: Iterator[LogRecord] = iter(())
        self._follower = Follower(
            address,
            Isolation.READ_COMMITTED,
            name="rollbridge-preview",
            security=settings.kafka,
            client_id=settings.client_name,
        )
        hold(self, "_follower")
        try:
            with closing(LogOffsets(address, security=settings.kafka, client_id=settings.client_name)) as offsets:
                starts = offsets.first([(topic, number) for number in range(partitions)])
                # Take the log's end before reading the buffer: outcomes from there on are followed.
                log_end = offsets.end([self._log], Isolation.READ_COMMITTED)[self._log]
                self._unread = offsets.end(starts, Isolation.READ_COMMITTED)
                self._fold = PreviewFold(_check_batch, self._learn(offsets, starts, log_end))
        except BaseException:
            self._follower.close()
            raise
        self._unread = {item: end for item, end in self._unread.items() if starts[item] < end}
        for partition, start in {(self._log, 0): log_end, **starts}.items():
            self._follower.follow(partition, start)

    @property
    def is_caught_up(self) -> bool:
        """True once everything that was in the buffer at the start has been taken."""
        return not self._unread

    def take(self) -> Iterator[Preview]:
        """Yield records of open transactions not given yet, in the order of the buffer. Does not wait."""
        taken = 0
        while taken < _FRAMES_MAX:
            if self._open is None and not self._begin():
                return
            fetched = self._open
            assert fetched is not None
            for record in islice(self._records, _FRAMES_MAX - taken):
                taken += 1
                if fetched.partition[0] != self._log:
                    yield from self._show(fetched.partition, record)
                elif _is_outcome(record):
                    self._fold.end(record.key or b"", record.timestamp)
            if taken < _FRAMES_MAX:
                self._open = None
                self._reach(fetched.partition, fetched.end)

    def close(self) -> None:
        """Disconnect."""
        self._follower.close()

    def _begin(self) -> bool:
        """Open the next stretch that has arrived; return False if there is none."""
        if not self._arrived:
            for item in self._follower.poll(0.0):
                if isinstance(item, Fetched):
                    self._arrived.append(item)
                else:
                    offset = self._go_on(item)
                    if offset != item.offset:
                        self._follower.follow(item.partition, offset)
                    self._reach(item.partition, offset)
        if self._arrived:
            self._open = self._arrived.popleft()
            self._records = self._open.records()
        return self._open is not None

    def _reach(self, partition: Partition, offset: int) -> None:
        if offset >= self._unread.get(partition, offset + 1):
            del self._unread[partition]

    def _show(self, partition: Partition, record: LogRecord) -> Iterator[Preview]:
        for transaction, frame, batch in self._fold.fold(
            str(self._stream), partition, record.offset, record.timestamp, record.key, record.value
        ):
            yield from self._previews(transaction, frame, batch)

    def _previews(self, transaction: BufferedTransaction, frame: FrameRef, batch: bytes) -> Iterator[Preview]:
        segment = SegmentId.of(frame.piece.segment, transaction.begin.streams[str(self._stream)])
        try:
            for record in read_records(batch):
                local = local_sequence(frame.piece.part, frame.first_count)
                for name, value in record.headers:
                    if name == RECORD_HEADER and value is not None:
                        local = unpack_record_header(value)[1]
                yield Preview(
                    self._places,
                    segment,
                    transaction.transaction_id,
                    local,
                    (record.timestamp, record.key, record.value, record.headers),
                )
        except (CorruptDataError, InvalidRequestError) as fault:
            # The leader refuses the transaction when it reaches that frame; a preview only leaves it out.
            logger.warning("a frame of transaction %s cannot be shown: %s", transaction, fault)

    def _learn(self, offsets: LogOffsets, starts: Mapping[Partition, int], log_end: int) -> set[bytes]:
        """Return the ids of the transactions that have ended."""
        ended: set[bytes] = set()
        oldest_ms: int | None = None
        for record in self._read(starts, self._unread):
            oldest_ms = record.timestamp if oldest_ms is None else min(oldest_ms, record.timestamp)
            aborted = aborted_in(record.key, record.value)
            if aborted is not None:
                ended.add(aborted)
        if oldest_ms is not None:
            begin = offsets.since([self._log], max(oldest_ms - _CLOCKS_DIFFER_MS, 0))[self._log]
            if begin is not None:
                log = (self._log, 0)
                ended.update(
                    record.key or b"" for record in self._read({log: begin}, {log: log_end}) if _is_outcome(record)
                )
        return ended

    def _read(self, starts: Mapping[Partition, int], ends: Mapping[Partition, int]) -> Iterator[LogRecord]:
        """Iterate over the records of partitions up to the ends that their leaders reported."""
        unread = {item: ends[item] for item, start in starts.items() if start < ends[item]}
        for item in unread:
            self._follower.follow(item, starts[item])
        for _, record in read_up_to(self._follower, unread, _SILENT_S, self._go_on):
            yield record

    def _go_on(self, trouble: Trouble) -> int:
        """Return the offset at which to go on; raise unless the follower recovers from a fault by itself."""
        fault = trouble.fault
        if trouble.resume is not None and not isinstance(fault, LogDivergedError):
            # The buffer was truncated, which only takes transactions that have ended.
            logger.info("the buffer of %s was truncated; going on at what is left", self._stream)
            return trouble.resume
        if not isinstance(fault, KafkaUnavailableError):
            raise fault
        logger.info("previewing %s: %s", self._stream, fault)
        return trouble.offset


def _is_outcome(record: LogRecord) -> bool:
    kind = peek_kind(record.value)
    return kind is not None and kind is not ControlKind.BEGIN


def _check_batch(batch: bytes, records: int) -> str | None:
    try:
        validate_frame(batch, records)
    except CorruptDataError as fault:
        return str(fault)
    return None
