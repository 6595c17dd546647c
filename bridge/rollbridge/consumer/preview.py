"""Preview of open transactions: their records, read from a stream's buffer before the outcome is known.

It begins where a takeover would: the part of the buffer in its snapshots is not read. Of the rest, first the outcomes
in the commit log and then the buffer itself are read, so that transactions that have ended by then are not shown. Then
follow the frames of the open ones: those that a record of ongoing transactions lists, at their places; then the buffer
from there on, which is followed. Without snapshots, or without the right to read them, the whole buffer is read, and
the commit log since the time of its oldest frame. Where the commit log has been truncated above that, the leader's list
of ended transactions, stored with the snapshots, says what is missing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from typing import Final

from rollbridge.base.attribution import own_header, unpack_record_header
from rollbridge.base.deadlines import patience_s
from rollbridge.base.forks import hold
from rollbridge.base.ids import SegmentId, local_sequence
from rollbridge.base.logs import limited
from rollbridge.buffer.preview import FAR, PreviewStart, Shown
from rollbridge.buffer.replay import BufferPlaces
from rollbridge.buffer.snapshot_topic import BufferSnapshots
from rollbridge.buffer.state import BufferedTransaction, FrameRef
from rollbridge.commitlog.control import ControlKind, peek_kind
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.consumer.records import Preview
from rollbridge.errors import (
    CorruptDataError,
    InvalidRequestError,
    KafkaUnavailableError,
    NotAuthorizedError,
    NotFoundError,
    TruncatedError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.committed import attributed
from rollbridge.kafka.fetch import LogDivergedError
from rollbridge.kafka.fetch_plan import Fetched, FetchError
from rollbridge.kafka.follower import Follower, read_up_to
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.records import LogRecord, read_records, validate_frame
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import Partition

logger = limited(logging.getLogger(__name__))


_FRAMES_MAX: Final = 50
"""Maximum number of frames taken at a time; each has up to a quarter of a megabyte."""
_SILENT_S: Final = 30.0
_CLOCKS_DIFFER_MS: Final = 10 * 60 * 1000
"""Allowed difference between the clocks of brokers and leaders; with a larger one an outcome may be missed."""


class PreviewTail:
    """Follower of a stream's buffer. Not thread-safe."""

    def __init__(self, kafka: KafkaClient, stream: StreamConfig) -> None:
        """Read which transactions have ended; see the module.

        Raises:
            KafkaUnavailableError, NotFoundError, NotAuthorizedError (previews need the right to read the buffer).
            TruncatedError: the commit log is truncated, and which transactions have ended may not be read elsewhere.
        """
        self._stream = stream.name
        self._group = stream.group
        self._places = stream.places
        self._log = stream.group.commit_log_topic
        partitions = [(stream.buffer_topic, number) for number in range(stream.buffer_partitions)]
        self._arrived: deque[Fetched] = deque()
        self._open: Fetched | None = None
        self._records: Iterator[LogRecord] = iter(())
        self._kafka = kafka
        self._listed: EndedIds | None = None
        self._follower = self._follow()
        hold(self, "_follower")
        try:
            offsets = kafka.offsets
            self._snapshots = BufferSnapshots(kafka, stream, self._follower)
            # The log's end is taken before those of the buffer: outcomes from there on are followed.
            log_end = offsets.end([self._log], Isolation.READ_COMMITTED)[self._log]
            self._unread = offsets.end(partitions, Isolation.READ_COMMITTED)
            starts = offsets.first(partitions)
            found = self._snapshots.places(starts, self._unread, log_end)
            try:
                self._learn(offsets, found, log_end)
            # Without the right to read them, or with a damaged one, the buffer itself is read.
            except (CorruptDataError, NotFoundError, NotAuthorizedError) as fault:
                logger.warning("preview.snapshot_unusable stream=%s: %s", self._stream, fault)
                bare = {item: replace(place, snapshot=None, ongoing=None) for item, place in found.items()}
                self._learn(offsets, bare, log_end)
        except BaseException:
            self._follower.close()
            raise
        self._floors = self._start.floors
        begins = dict(self._floors)
        for item, recorded in self._recorded.items():
            begins[item] = begins[item] if recorded.offset is None else recorded.offset
        self._unread = {item: end for item, end in self._unread.items() if begins[item] < end}
        for partition, begin in {(self._log, 0): log_end, **begins}.items():
            self._follower.follow(partition, begin)

    @property
    def is_caught_up(self) -> bool:
        """True once everything that was in the buffer at the start has been taken."""
        return not self._unread

    def take(self, wait_s: float = 0.0) -> Iterator[Preview]:
        """Yield records of open transactions not given yet, in the order of the buffer.

        Waits for the first message for ``wait_s`` at most; but once, when a transaction begins that the logs read so
        far do not rule out to have ended long ago, for the commit log to be read further back.

        Raises:
            TruncatedError: the commit log has been truncated behind what was read of it: open another preview.
        """
        taken = 0
        while taken < _FRAMES_MAX:
            if self._open is None and not self._begin(0.0 if taken else wait_s):
                return
            fetched = self._open
            assert fetched is not None
            done = fetched.end
            for record in islice(self._records, _FRAMES_MAX - taken):
                taken += 1
                if fetched.partition[0] != self._log:
                    yield from self._show(fetched.partition, record)
                    if self._next_needed(fetched.partition, record.offset) > record.offset + FAR:
                        done, taken = record.offset + 1, min(taken, _FRAMES_MAX - 1)
                        break
                elif _is_outcome(record):
                    self._fold.end(record.key or b"", record.timestamp)
            if taken < _FRAMES_MAX:
                self._open = None
                self._pass(fetched.partition, done)

    def close(self) -> None:
        """Disconnect."""
        self._follower.close()

    def _begin(self, wait_s: float) -> bool:
        """Open the next stretch that has arrived, or does in time; return False if there is none."""
        if not self._arrived:
            for item in self._follower.poll(wait_s):
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

    def _next_needed(self, partition: Partition, offset: int) -> int:
        """Return the offset of the next message that may be needed, behind one that has been taken."""
        recorded = self._recorded.get(partition)
        if recorded is None:
            return offset + 1
        begin = recorded.offset
        return self._floors[partition] if begin is None else begin

    def _pass(self, partition: Partition, end: int) -> None:
        """Continue behind what was taken of a partition, or further on if nothing in between is needed."""
        recorded = self._recorded.get(partition)
        if recorded is None:
            self._reach(partition, end)
            return
        begin = self._next_needed(partition, end - 1)
        if recorded.offset is None:
            del self._recorded[partition]
        if begin - end > FAR:
            self._arrived = deque(item for item in self._arrived if item.partition != partition)
            self._follower.follow(partition, begin)
            end = begin
        if partition not in self._recorded:
            self._reach(partition, end)

    def _reach(self, partition: Partition, offset: int) -> None:
        if offset >= self._unread.get(partition, offset + 1):
            del self._unread[partition]

    def _show(self, partition: Partition, record: LogRecord) -> Iterator[Preview]:
        recorded = self._recorded.get(partition)
        shown: Iterator[Shown] = iter(())
        if recorded is not None:
            shown = recorded.take(record.offset, record.key, record.value)
        if record.offset >= self._floors[partition]:
            folded = self._fold.fold(
                str(self._stream), partition, record.offset, record.timestamp, record.key, record.value
            )
            shown = chain(shown, folded)
        for transaction, frame, batch in shown:
            yield from self._previews(transaction, frame, batch)

    def _previews(self, transaction: BufferedTransaction, frame: FrameRef, batch: bytes) -> Iterator[Preview]:
        segment = SegmentId.of(frame.piece.segment, transaction.begin.streams[str(self._stream)])
        try:
            for record in attributed(read_records(batch)):
                local = local_sequence(frame.piece.part, frame.first_count)
                value = own_header(record.headers)
                if value is not None:
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
            logger.warning("preview.frame_skipped txn=%s: %s", transaction, fault)

    def _learn(self, offsets: LogOffsets, found: BufferPlaces, log_end: int) -> None:
        """Find out which transactions have ended."""
        begin = self._log_begin(offsets, found, log_end)
        self._start = start = PreviewStart(str(self._stream), found, log_end, begin, _check_batch)
        self._log_start = offsets.first([self._log])[self._log]
        self._log_known_from = max(start.log_begin, self._log_start)
        self._is_read_back = False
        for said in self._read_log(self._log_known_from, log_end, self._follower):
            start.hear(*said)
        for partition, message in self._read(start.floors, self._unread, self._follower):
            start.rehearse(partition, message.offset, message.timestamp, message.key, message.value)
        start.exclude(self._snapshots.listed(start.doubts()))
        if start.is_cut(self._log_start):
            if self._read_list() is None:
                raise TruncatedError(
                    f"the commit log of {self._group} is truncated, so it does not say which transactions in the "
                    f"buffer of {self._stream} have ended; that is stored with the snapshots of scope "
                    f"{self._stream.scope}: a preview needs Read on these topics"
                )
        elif start.is_unsure():
            for said in self._read_further_back(self._follower):
                start.hear(*said)
        if self._listed is not None:
            start.exclude_ended(self._listed)
        self._fold, self._recorded = start.make(self._is_over)

    def _log_begin(self, offsets: LogOffsets, found: BufferPlaces, log_end: int) -> int | None:
        """Return where the outcomes begin of what is in the partitions without a snapshot; None if nothing is."""
        oldest_ms: int | None = None
        for partition, place in found.items():
            if place.snapshot is None and place.start < place.end:
                found_here = self._read({partition: place.start}, {partition: place.end}, self._follower)
                first = next((item for _, item in found_here), None)
                self._follower.leave(partition)
                if first is not None:
                    oldest_ms = first.timestamp if oldest_ms is None else min(oldest_ms, first.timestamp)
        if oldest_ms is None:
            return None
        begin = offsets.since([self._log], max(oldest_ms - _CLOCKS_DIFFER_MS, 0))[self._log]
        return log_end if begin is None else begin

    def _is_over(self, transaction: BufferedTransaction) -> bool:
        """Tell of a transaction that has just begun, by what is read, whether it had ended before."""
        try:
            return self._had_ended(transaction)
        except KafkaUnavailableError as fault:
            logger.warning("preview.outcome_unknown txn=%s: showing it anyway: %s", transaction, fault)
            return False

    def _had_ended(self, transaction: BufferedTransaction) -> bool:
        doubt = self._start.asks(transaction)
        try:
            if doubt.aborted or self._snapshots.listed(doubt):
                return True
        except (CorruptDataError, NotFoundError, NotAuthorizedError) as fault:
            logger.warning("preview.log_reread stream=%s: %s", self._stream, fault)
            self._read_list()
            with closing(self._follow()) as follower:
                return self._is_listed(transaction) or any(
                    item == transaction.id and kind is not ControlKind.BEGIN
                    for item, kind in self._read_log(self._log_start, self._log_known_from, follower)
                )
        if self._start.has_snapshots and not self._is_read_back:
            # This follower is in the middle of the buffer, so another one reads.
            with closing(self._follow()) as follower:
                self._fold.learn(
                    item for item, kind in self._read_further_back(follower) if kind is not ControlKind.BEGIN
                )
        return transaction.id in self._fold.ended or self._is_listed(transaction)

    def _read_further_back(self, follower: Follower) -> Iterator[tuple[bytes, ControlKind]]:
        """Read which transactions have ended, and the commit log from there to what has been read of it, once.

        A writer may have doubled a BEGIN frame long after its transaction has ended. Without the list, as in a new
        group, all that is left of the log is read.
        """
        self._is_read_back = True
        known_from, ended = self._log_known_from, self._read_list()
        begin = 0 if ended is None else min(ended.log_end, known_from)
        return self._read_log(max(begin, self._log_start), known_from, follower)

    def _read_list(self) -> EndedIds | None:
        """Read what is written down of ended transactions, once if there is something."""
        if self._listed is None:
            self._listed = self._snapshots.ended(self._log_start)
        return self._listed

    def _is_listed(self, transaction: BufferedTransaction) -> bool:
        ended = self._listed
        return ended is not None and (transaction.id in ended or ended.is_lost(transaction.id, transaction.begun_ms))

    def _read_log(self, begin: int, end: int, follower: Follower) -> Iterator[tuple[bytes, ControlKind]]:
        """Iterate over a part of the commit log: transactions, and what became of them."""
        log = (self._log, 0)
        for _, record in self._read({log: begin}, {log: end}, follower):
            kind = peek_kind(record.value)
            if kind is not None:
                yield record.key or b"", kind

    def _read(
        self, starts: Mapping[Partition, int], ends: Mapping[Partition, int], follower: Follower
    ) -> Iterator[tuple[Partition, LogRecord]]:
        """Iterate over the records of partitions up to the ends that their leaders reported."""
        unread = {item: ends[item] for item, start in starts.items() if start < ends[item]}
        for item in unread:
            follower.follow(item, starts[item])
        yield from read_up_to(follower, unread, patience_s(_SILENT_S), self._go_on)

    def _follow(self) -> Follower:
        return self._kafka.follow(Isolation.READ_COMMITTED, name="rollbridge-preview")

    def _go_on(self, trouble: FetchError) -> int:
        """Return the offset at which to continue; raise unless the follower recovers from a fault by itself."""
        fault = trouble.fault
        if trouble.resume is not None and not isinstance(fault, LogDivergedError):
            if trouble.partition[0] == self._log:
                raise TruncatedError(
                    f"the commit log of {self._group} has lost outcomes that were still to be read ({fault}), so what "
                    f"is open in {self._stream} is not known; open another preview"
                ) from fault
            # The buffer was truncated, which only takes transactions that have ended.
            logger.info("preview.truncated stream=%s: continuing at the first offset left", self._stream)
            return trouble.resume
        if not isinstance(fault, KafkaUnavailableError):
            raise fault
        logger.info("preview.retrying stream=%s: %s", self._stream, fault)
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
