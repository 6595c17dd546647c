"""Frames read again from buffers, the commit log, and the record batches that a leader appends.

:class:`Tail` reads the tail of the buffers. :class:`LogTail` and :func:`read_commit_log` summarize a commit log.
:class:`FrameReader` reads single frames whose batches were not cached.

:class:`FrameFeed` turns the frames of a round into the batches to append: large frames as they are, small ones joined
with their neighbours of the same partition. Within a partition the order is that of the items; partitions are
independent. The functions at the end encode control records, and the messages sent with them.

Each object belongs to one thread: the leader's, or the standby's.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from functools import partial
from itertools import accumulate, islice
from time import time as wall_time
from typing import Final, NamedTuple

from rollbridge.base.logs import limited
from rollbridge.buffer.frames import FRAME_BYTES_DEFAULT
from rollbridge.buffer.state import FrameRef
from rollbridge.commitlog.commit_order import LineKey
from rollbridge.commitlog.control import ControlKind, ControlRecord, decode_control, peek_kind
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.errors import CorruptDataError, NewerFormatError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.fetch_plan import Fetched, FetchError
from rollbridge.kafka.follower import Follower, read_up_to
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.records import (
    HEADER_BYTES,
    BatchBuilder,
    BatchHeader,
    FetchedBatches,
    LogRecord,
    ParsedRecord,
    batch_of_one,
    check_crc,
    check_numbering,
    is_plain,
    join_bound,
    joined,
    read_parsed,
    rebatch,
    retimed,
)
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.late import LATE_HEADER, LateRecord, origin
from rollbridge.stream.names import Partition
from rollbridge_coordinator.core.effects import Items, LogSummary, Messages

# Follow partitions that untrusted clients write to, with bounds that a consumer lacks.
#
# Any writer of a buffer chooses the compression of its batches. librdkafka allocates whatever gzip claims (a batch of
# 0.9 MB took 900 MB), and fetches a zstd batch of more than 100 MB again without end: no group could be led behind one.
# Here a batch is decompressed up to a bound. One that exceeds it, does not parse, or does not number its records one by
# one is skipped, and handed out as a single message without key and value.
#
# The reading thread does everything. While it is behind the end of a partition, the next request is sent as soon as the
# answer before it is in, so that the broker works meanwhile. At the end it is sent only when the reader asks for more:
# what comes while the reader is busy then arrives as one answer, and not as many small ones.


logger = limited(logging.getLogger(__name__))

INFLATED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Limit on a batch's decompressed bytes. Our clients compress only the batches within their messages, so this is far
above the size of any batch that they write to a buffer."""
AT_ONCE: Final = 2_000
"""Messages handed out at once."""
FETCH_BYTES: Final = 4 * 1024 * 1024
"""Bytes requested at once of a partition, and of all of a broker; the first batch comes whole even if larger."""


class TailMessage(NamedTuple):
    """Message of a partition; one with neither key nor value represents all unreadable ones up to it."""

    partition: Partition
    offset: int
    appended_ms: int
    key: bytes | None
    value: bytes | None


class Tail:
    """Reader of partitions from given offsets on, ``READ_UNCOMMITTED``. Not thread-safe.

    Attributes:
        skipped: Number of unreadable batches.
        epochs: Leader epoch of the last message of each partition.
        appended_ms: Latest append time of a batch, where the broker gives that.
        read_bytes: Bytes of the batches of each partition handed out, the current one included.
        failed: Partition of the latest CorruptDataError.
    """

    def __init__(
        self,
        kafka: KafkaClient,
        *,
        inflated_bytes_max: int = INFLATED_BYTES_MAX,
    ) -> None:
        """Prepare the reader; no request is sent before the first :meth:`poll`."""
        self.skipped = 0
        self.epochs: dict[Partition, int] = {}
        self.appended_ms: dict[Partition, int] = {}
        self.read_bytes: dict[Partition, int] = {}
        self.failed: Partition | None = None
        self._inflated_bytes_max = inflated_bytes_max
        self._follower = kafka.follow(
            Isolation.READ_UNCOMMITTED, name="rollbridge-tail-errand", max_bytes=FETCH_BYTES, check_epochs=True
        )
        self._assigned: frozenset[Partition] = frozenset()
        self._arrived: deque[Fetched | FetchError] = deque()
        self._opened: Iterator[TailMessage] = iter(())
        self._opened_of: Partition | None = None

    def assign(self, wanted: Mapping[Partition, int], epochs: Mapping[Partition, int] | None = None) -> None:
        """Read exactly these partitions: new ones from their offsets on, the others from their present positions.

        Args:
            wanted: Next offset of each partition.
            epochs: Leader epochs of the messages before these offsets, where known; they show that a log has lost these
                messages, even if it has grown again.
        """
        if self._assigned == wanted.keys():
            return
        for partition in self._assigned - wanted.keys():
            self._follower.leave(partition)
        for partition in wanted.keys() - self._assigned:
            self._follower.follow(partition, wanted[partition], (epochs or {}).get(partition, NO_EPOCH))
        # What has arrived of a partition that is left is not handed out: it may come back with another offset.
        self._arrived = deque(item for item in self._arrived if item.partition in wanted)
        if self._opened_of not in wanted:
            self._opened = iter(())
        self._assigned = frozenset(wanted)

    def poll(self, timeout_s: float) -> Iterator[TailMessage]:
        """Iterate over the messages that have arrived, at most :data:`AT_ONCE`; wait ``timeout_s`` for the first.

        Raises:
            CorruptDataError: The next records were deleted, or have a wrong checksum.
            LogDivergedError: The log has lost records handed out before, and has grown again.
        """
        count = 0
        while count < AT_ONCE:
            for message in islice(self._opened, AT_ONCE - count):
                count += 1
                yield message
            if count < AT_ONCE and not self._open_next(0.0 if count else timeout_s):
                return

    def ends(self) -> dict[Partition, int]:
        """Return the end of each partition at its last fetch, as far as known."""
        ends = ((partition, self._follower.end(partition)) for partition in self._assigned)
        return {partition: end for partition, end in ends if end is not None}

    def interrupt(self) -> None:
        self._follower.interrupt()

    def unheard_s(self) -> dict[Partition, float]:
        """Return the time since each partition's broker last answered, even without new records."""
        return {partition: self._follower.unheard_s(partition) for partition in self._assigned}

    def close(self) -> None:
        self._follower.close()

    def _open_next(self, timeout_s: float) -> bool:
        """Open the next batch; wait ``timeout_s`` for it, and return False without one."""
        if not self._arrived:
            self._arrived.extend(self._follower.poll(timeout_s))
            if any(isinstance(item, Fetched) and item.end < item.high_watermark for item in self._arrived):
                self._follower.ask()
        if not self._arrived:
            return False
        found = self._arrived.popleft()
        if isinstance(found, Fetched):
            self._opened, self._opened_of = self._open(found), found.partition
        elif isinstance(found.fault, CorruptDataError):
            self.failed = found.partition
            raise found.fault
        else:
            logger.info('buffer.read-failed topic=%s reason="%s"', found.partition[0], found.fault)
        return True

    def _open(self, fetched: Fetched) -> Iterator[TailMessage]:
        partition, position = fetched.partition, fetched.start
        for header, batch in fetched.batches:
            end = header.base_offset + header.last_offset_delta + 1
            if end <= position:
                continue
            self.epochs[partition] = header.partition_leader_epoch
            self.appended_ms[partition] = header.max_timestamp
            self.read_bytes[partition] = self.read_bytes.get(partition, 0) + len(batch)
            if not header.is_control:
                try:
                    for record in read_parsed(batch, header, limit_bytes=self._inflated_bytes_max):
                        if record.offset >= position:
                            position = record.offset + 1
                            yield _message((partition, position - 1, record.timestamp, record.key, record.value))
                except CorruptDataError as fault:
                    self.skipped += 1
                    logger.warning(
                        'buffer.batch-skipped offset=%d partition=%d topic=%s reason="%s"',
                        end - 1,
                        partition[1],
                        partition[0],
                        fault,
                    )
            if position < end:
                position = end
                yield TailMessage(partition, end - 1, max(header.max_timestamp, 0), None, None)


_message: Final[Callable[[tuple[Partition, int, int, bytes | None, bytes | None]], TailMessage]] = partial(
    tuple.__new__, TailMessage
)
"""Equivalent of ``TailMessage(*fields)`` in half the time."""


TRANSACTION_ID_BYTES: Final = 16
FRAMES_S: Final = 60.0
"""Time for which the reading of frames is retried."""
READ_BYTES: Final = 4 * 1024 * 1024
"""Size of a fetch of frames or logs."""


class LogTail:
    """Follower of a commit log from an offset on; committed records only."""

    def __init__(self, kafka: KafkaClient, topic: str, start: int) -> None:
        self._partition = topic, 0
        self._follower = _follower(kafka, topic, start)

    def poll(self, timeout_s: float) -> LogSummary | None:
        """Return a summary of the records that have arrived, None if none; wait at most ``timeout_s`` for the first.

        Raises:
            CorruptDataError: a message is no control record, or the next offset was deleted.
        """
        records: list[LogRecord] = []
        for item in self._follower.poll(timeout_s):
            if isinstance(item, Fetched):
                records.extend(item.records())
            elif isinstance(item.fault, CorruptDataError):
                raise item.fault
            else:
                logger.info('commit-log.read-retry topic=%s reason="%s"', item.partition[0], item.fault)
        return _summary(records, 0) if records else None

    def end(self) -> int | None:
        """Return the end offset of the log at the last fetch; None if not known yet."""
        return self._follower.end(self._partition)

    def unheard_s(self) -> float:
        """Return the time since the log's broker last answered, even without new records."""
        return self._follower.unheard_s(self._partition)

    def close(self) -> None:
        self._follower.close()


class FrameReader:
    """Reader of single frames, fastest in the order of their offsets.

    Only batches that hold a requested frame are decompressed, one at a time: other batches of a buffer may be of any
    size after decompression.
    """

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._partition: Partition | None = None
        self._batches: Sequence[_Batch] = ()
        self._opened: _Batch | None = None
        self._records: Iterator[ParsedRecord] = iter(())
        self._record: ParsedRecord | None = None

    def read(self, frame: FrameRef) -> bytes:
        """Return the record batch of a frame.

        Raises:
            CorruptDataError: the buffer no longer holds the frame.
            KafkaUnavailableError: no broker answered in time.
        """
        value = self._value(frame)
        batch = value[frame.start : frame.start + frame.size]
        if len(batch) != frame.size or (frame.start == 0 and len(value) != frame.size):
            raise CorruptDataError(f"offset {frame.offset} of {frame.partition[0]} no longer holds its frame")
        return batch

    def _value(self, frame: FrameRef) -> bytes:
        record = self._record
        if self._opened is None or self._partition != frame.partition or frame.offset not in self._opened.offsets:
            self._open(frame)
        elif record is not None and record.offset == frame.offset:
            return record.value or b""  # the next frame may be in the same bundle
        elif record is not None and record.offset > frame.offset:
            self._begin(self._opened)
        for record in self._records:
            if record.offset == frame.offset:
                self._record = record
                return record.value or b""
        self._opened = None
        raise CorruptDataError(f"offset {frame.offset} of {frame.partition[0]} no longer holds its frame")

    def _open(self, frame: FrameRef) -> None:
        """Find the batch that holds a frame, fetching if needed, and begin to read its records."""
        if self._partition != frame.partition:
            self._partition, self._batches = frame.partition, ()
        found = self._find(frame.offset)
        if found is None:
            self._batches, self._opened, self._record = (), None, None
            topic, number = frame.partition
            raw = self._log.fetch_raw(
                topic, frame.offset, partition=number, isolation=Isolation.READ_UNCOMMITTED, max_bytes=READ_BYTES
            )
            if raw.start <= frame.offset:
                self._batches = [_Batch(header, batch) for header, batch in FetchedBatches(raw.batches)]
            found = self._find(frame.offset)
        if found is None:
            raise CorruptDataError(f"offset {frame.offset} of {frame.partition[0]} is gone: the buffer was truncated")
        self._begin(found)

    def _find(self, offset: int) -> _Batch | None:
        place = bisect_right(self._batches, offset, key=lambda batch: batch.offsets.start) - 1
        return self._batches[place] if place >= 0 and offset in self._batches[place].offsets else None

    def _begin(self, batch: _Batch) -> None:
        check_crc(batch.header, batch.batch)
        self._opened, self._record = batch, None
        self._records = read_parsed(batch.batch, batch.header, limit_bytes=INFLATED_BYTES_MAX)


class _Batch(NamedTuple):
    """A fetched batch."""

    header: BatchHeader
    batch: memoryview

    @property
    def offsets(self) -> range:
        """Offsets in it."""
        return range(self.header.base_offset, self.header.base_offset + self.header.last_offset_delta + 1)


def read_commit_log(kafka: KafkaClient, topic: str, start: int = 0, timeout_s: float = 120.0) -> LogSummary:
    """Summarize a commit log from an offset to its end. Records are not fully decoded: there may be millions.

    Raises:
        CorruptDataError: a message is no control record.
        KafkaUnavailableError: no broker answered in time.
    """
    return _summary(_read_committed(kafka, topic, start, timeout_s), start)


def read_ended(kafka: KafkaClient, topic: str, start: int, end: int, timeout_s: float = 120.0) -> EndedIds:
    """Return which transactions have ended in a commit log between two offsets.

    Raises:
        CorruptDataError: a message is no control record.
        KafkaUnavailableError: no broker answered in time.
    """
    ended = EndedIds()
    for offset, _, key, value, _ in _read_committed(kafka, topic, start, timeout_s):
        if offset >= end:
            break
        transaction, kind = key or b"", peek_kind(value)
        if kind is None or len(transaction) != TRANSACTION_ID_BYTES:
            kind = decode_control(key, value).kind  # raises, and says what is wrong
        if kind is not ControlKind.BEGIN:
            ended.add(transaction)
    return ended


def read_orders(kafka: KafkaClient, topic: str, records: int, timeout_s: float = 120.0) -> dict[LineKey, int]:
    """Return the highest committed number of each connection in the last records of a commit log.

    Raises:
        CorruptDataError: a message is no control record.
        KafkaUnavailableError: no broker answered in time.
    """
    first = kafka.offsets.first([topic], timeout_s=timeout_s)[topic]
    end = kafka.offsets.end([topic], Isolation.READ_COMMITTED, timeout_s=timeout_s)[topic]
    return highest_orders(_read_committed(kafka, topic, max(end - records, first), timeout_s))


def highest_orders(records: Iterable[LogRecord]) -> dict[LineKey, int]:
    """Return the highest committed number of each connection; unreadable records of a newer release have none.

    Raises:
        CorruptDataError: a message is no control record.
    """
    numbers: dict[LineKey, int] = {}
    for record in records:
        try:
            order = decode_control(record.key, record.value).order
        except NewerFormatError:
            continue  # their connection sends commits after it again, with nothing to wait for
        if order is not None:
            key, number = order
            numbers[key] = max(number, numbers.get(key, 0))
    return numbers


def _summary(records: Iterable[LogRecord], start: int) -> LogSummary:
    """Summarize records of a commit log, the first of which is at or after ``start``."""
    begun: set[bytes] = set()
    ended: dict[bytes, int] = {}
    aborted: set[bytes] = set()
    end = start
    for offset, _, key, value, _ in records:
        end = offset + 1
        transaction, kind = key or b"", peek_kind(value)
        if kind is None or len(transaction) != TRANSACTION_ID_BYTES:
            kind = decode_control(key, value).kind  # raises, and says what is wrong
        if kind is ControlKind.BEGIN:
            begun.add(transaction)
            continue
        ended[transaction] = offset
        if kind is ControlKind.ABORT:
            aborted.add(transaction)
    return LogSummary(ended, frozenset(begun.difference(ended)), frozenset(aborted), end)


def _follower(kafka: KafkaClient, topic: str, start: int) -> Follower:
    follower = kafka.follow(Isolation.READ_COMMITTED, name="rollbridge-coordinator-log", max_bytes=READ_BYTES)
    follower.follow((topic, 0), start)
    return follower


def _read_committed(kafka: KafkaClient, topic: str, start: int, timeout_s: float) -> Iterator[LogRecord]:
    """Yield the committed records of a topic of one partition from an offset to its present end."""
    end = kafka.offsets.end([topic], Isolation.READ_COMMITTED, timeout_s=timeout_s)[topic]
    if start >= end:
        return
    with closing(_follower(kafka, topic, start)) as follower:
        for _, record in read_up_to(follower, {(topic, 0): end}, timeout_s):
            yield record


# Batches of a round


SMALL_BYTES: Final = 32 * 1024
"""Size below which frames are joined with their neighbours; larger ones are cheaper to forward as they are."""
JOINED_BYTES_MAX: Final = FRAME_BYTES_DEFAULT
"""Size up to which they are joined: a native transaction takes one batch of a partition in each request, so each
further batch costs broker and leader one more request.
"""


class FrameFeed:
    """Lazy batches of (partition, frame) items, and the mapping of their base offsets to those of the items."""

    def __init__(
        self,
        items: Items,
        read: Callable[[FrameRef], bytes],
        rooms: Mapping[str, int] | None = None,
        stamped: Set[str] = frozenset(),
    ) -> None:
        """Prepare the feed.

        Args:
            items: Frames with their partitions, in order.
            read: Returns the batch of a frame whose batch is not cached.
            rooms: Largest batch of a topic in bytes, where smaller than usual.
            stamped: Topics in which the latest record of each batch gets the time of the append.
        """
        self._items = items
        self._read = read
        self._rooms = rooms or {}
        self._stamped = stamped
        # For each item, the batch that holds it and the offset of its first record there, as arrays of 8 bytes an item
        # and not as objects: there may be a million items.
        self._batches = array("q", [-1]) * len(items)
        self._deltas = array("q", [0]) * len(items)
        self._made = 0
        self.at: tuple[int, ...] = ()
        """Places of the items of the latest batch; they name the frame at fault if it fails."""

    def batches(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield the batches to append, in order; a frame that is not cached is read when its batch is due.

        Each call begins again, as where none of them was sent.
        """
        self._made = 0
        waiting: dict[Partition, list[int]] = {}
        rooms: dict[Partition, int] = {}  # what is left in the batch into which the waiting frames are joined
        for index, (target, frame) in enumerate(self._items):
            if frame.size < SMALL_BYTES:
                grows = join_bound(frame.size, frame.records)
                queue = waiting.get(target)
                if queue is None:
                    queue = waiting[target] = []
                    rooms[target] = self._room(target) - HEADER_BYTES
                elif grows > rooms[target]:
                    yield from self._join(target, queue)
                    queue = waiting[target] = []
                    rooms[target] = self._room(target) - HEADER_BYTES
                queue.append(index)
                rooms[target] -= grows
                continue
            if target in waiting:
                yield from self._join(target, waiting.pop(target))
            self.at = (index,)
            self._batches[index] = self._made
            self._made += 1
            batch = self._batch(frame)
            check_numbering(batch)
            yield self._addressed(target, batch)
        for target, indexes in waiting.items():
            yield from self._join(target, indexes)

    def offsets(self, bases: Sequence[int]) -> list[int]:
        """Return the offset of each item's first record, given the base offsets of the batches."""
        return [bases[batch] + delta for batch, delta in zip(self._batches, self._deltas, strict=True)]

    def items_of(self, batch: int) -> tuple[int, ...]:
        """Return the places of the items whose records are in a batch; none if it holds no frames."""
        made = [place for place, number in enumerate(self._batches) if number == batch]
        return tuple(made) if batch < self._made else ()

    def _join(self, target: Partition, indexes: Sequence[int]) -> Iterator[tuple[str, int, bytes]]:
        self.at = tuple(indexes)
        frames = [self._items[index][1] for index in indexes]
        found = [self._batch(frame) for frame in frames]
        ends = list(accumulate(frame.records for frame in frames))
        whole = joined(found, ends, self._room(target)) if len(found) > 1 else None
        if whole is not None:
            for index, end, frame in zip(indexes, ends, frames, strict=True):
                self._batches[index] = self._made
                self._deltas[index] = end - frame.records
            self._made += 1
            yield self._addressed(target, whole)
            return
        merged = rebatch(found, self._room(target))
        for index, place in zip(indexes, merged.places, strict=True):
            self._batches[index] = self._made + place.batch
            self._deltas[index] = place.offset_delta
        self._made += len(merged.batches)
        for batch in merged.batches:
            yield self._addressed(target, bytes(batch))

    def _addressed(self, target: Partition, batch: bytes) -> tuple[str, int, bytes]:
        if target[0] in self._stamped:
            batch = retimed(batch, int(wall_time() * 1000))
        return *target, batch

    def _room(self, target: Partition) -> int:
        return min(JOINED_BYTES_MAX, self._rooms.get(target[0], JOINED_BYTES_MAX))

    def _batch(self, frame: FrameRef) -> bytes:
        return frame.batch if frame.batch is not None else self._read(frame)


# Batches of control records and messages


BATCH_BYTES_MAX: Final = 512 * 1024

_NO_HEADERS: Final[list[tuple[str, bytes | None]]] = []

Batches = tuple[list[bytes], list[tuple[int, int]]]
"""Batches that hold records in order, and for each record the index of its batch and its offset in it."""


def control_batches(records: Sequence[ControlRecord]) -> Batches:
    """Encode control records, stamped with the time of their decision."""
    return record_batches((record.decided_ms, record.transaction.bytes, record.encode_value()) for record in records)


def record_batches(rows: Iterable[tuple[int, bytes, bytes | None]]) -> Batches:
    """Encode rows of (time in ms, key, value); a record above :data:`BATCH_BYTES_MAX` gets a batch of its own."""
    batches: list[bytes] = []
    places: list[tuple[int, int]] = []
    builder = BatchBuilder(BATCH_BYTES_MAX)
    append = builder.append
    count = 0
    for timestamp, key, value in rows:
        if not append(timestamp, key, value, _NO_HEADERS):
            batches.append(builder.build())
            append(timestamp, key, value, _NO_HEADERS)
            count = 0
        places.append((len(batches), count))
        count += 1
    if builder.count:
        batches.append(builder.build())
    return batches, places


def message_batches(messages: Messages) -> Batches:
    """Encode messages, stamped with the present time."""
    now_ms = int(wall_time() * 1000)
    return record_batches((now_ms, key, value) for key, value in messages.items)


def beside_batches(messages: Messages | None) -> list[tuple[str, bytes]]:
    """Encode the messages sent with control records, if any; each batch comes with its topic."""
    return [] if messages is None else [(messages.topic, batch) for batch in message_batches(messages)[0]]


def late_copies(source: Partition, items: Sequence[tuple[Partition, LateRecord]]) -> Iterator[tuple[str, int, bytes]]:
    """Yield batches of the copies, each with its topic and partition; records of one partition keep their order."""
    builders: dict[Partition, BatchBuilder] = {}
    for place, record in items:
        builder = builders.setdefault(place, BatchBuilder(BATCH_BYTES_MAX))
        headers = [*record.headers, (LATE_HEADER, origin(source, record.offset))]
        if not is_plain(headers):
            if builder.count:
                yield *place, builder.build()
            yield *place, batch_of_one(record.timestamp_ms, record.key, record.value, headers)
            continue
        if not builder.append(record.timestamp_ms, record.key, record.value, headers):
            yield *place, builder.build()
            builder.append(record.timestamp_ms, record.key, record.value, headers)
    for place, builder in builders.items():
        if builder.count:
            yield *place, builder.build()
