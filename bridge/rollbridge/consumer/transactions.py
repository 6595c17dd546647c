"""Reader of whole transactions in commit order: a group's commit log and the records to which its COMMITs point.

Like Debezium's transaction topic for change data capture: each transaction once, in one order over all streams of the
group, and each of its records with its number in it.

Records are read on request. A reader holds one batch or a quarter of a megabyte of each segment, however large a
transaction is: the order of a commit log is the order in each segment, so it passes through every segment once.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Final

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Message

from rollbridge.base.arguments import checked
from rollbridge.base.deadlines import Backoff, Closable, Deadline
from rollbridge.base.forks import hold
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.base.logs import limited
from rollbridge.commitlog.control import ControlKind, ControlRecord, Run, decode_control
from rollbridge.consumer.records import Origin, PlacesOf, Record, message_of, record_of
from rollbridge.errors import (
    CorruptDataError,
    InvalidRequestError,
    KafkaUnavailableError,
    NotFoundError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.committed import BatchStanding, attributed, judge
from rollbridge.kafka.fetch import LogDivergedError, LogReader
from rollbridge.kafka.fetch_plan import Fetched, FetchError
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.records import BatchHeader, FetchedBatches, LogRecord, check_crc, read_records
from rollbridge.metadata.session import WatchedRead
from rollbridge.stream.names import GroupName, Partition, SegmentPlaces, StreamName, show_partition
from rollbridge.stream.positions import Latest, LogPosition, Since, parse_log_start

logger = limited(logging.getLogger(__name__))

LogStart = str | LogPosition | int | datetime
"""Start: ``"earliest"``, ``"latest"``, a position, a time (ms since 1970 if it is an int), or the text of these."""

CheckTopic = Callable[[StreamName, Callable[[], None]], None]
"""Raises if the topic that a stream has adopted is not the one that it was; calls its argument when that may change."""

_POLL_S: Final = 0.1
_WAIT_MS: Final = 500
"""Longest delay of an empty answer at the broker. New records are answered at once."""
_BYTES: Final = 256 * 1024
"""Bytes fetched at once of a segment; the first batch comes whole even if it is larger."""
_PARSED_MAX: Final = 500
"""Records of a segment that are parsed at once."""
_SEGMENTS_MAX: Final = 256
"""Segments read at a time; the least recently used one makes room."""


@dataclass(frozen=True, slots=True)
class CommittedTransaction:
    """Committed transaction and its records.

    Attributes:
        position: Position behind it; pass it, or its text, as ``start``.
    """

    control: ControlRecord
    position: LogPosition
    _segments: Segments = field(repr=False)

    @property
    def id(self) -> TransactionId:
        """Id of the transaction."""
        return self.control.transaction

    @property
    def order(self) -> int:
        """Its place in the total order of the group's transactions: grows with every commit, with gaps."""
        return self.position.offset - 1

    @property
    def label(self) -> str | None:
        """Label that its client gave it."""
        return self.control.label

    @property
    def client_name(self) -> str:
        """Name of the client that began it."""
        return self.control.client_name

    @property
    def count(self) -> int:
        """Number of its records when it was committed."""
        return self.control.records

    @property
    def held(self) -> int:
        """Number of records that its reader has parsed and not handed out, of this transaction and later ones."""
        return self._segments.held

    def counts(self) -> dict[str, int]:
        """Return the number of its records in each stream."""
        return self.control.counts()

    def records(self) -> Iterator[Record]:
        """Yield its records of all streams by local sequence, reading them from Kafka on request.

        What compaction has left of them, where they are in an adopted topic.

        Records that one process wrote come in the order in which it wrote them, over all streams and segments. Among
        several parts, the order within each segment is kept. Take the records of one transaction before those of the
        next; going back works, but costs a seek.

        Raises:
            TruncatedError: Some of the records have been deleted.
            UnavailableError: The records cannot be read now.
            CorruptDataError: The records are not where the commit log says.
        """
        origin = self._segments.origin.at(self.order)
        columns = [
            self._segments.records(self._segments.place_of(stream, segment), runs, origin)
            for stream, segment, runs in self.control.segments()
        ]
        return columns[0] if len(columns) == 1 else heapq.merge(*columns, key=lambda record: record.local_sequence or 0)


@checked()
class TransactionReader(Closable):
    """Reader of a group's committed transactions in their order; ``b.transactions(...)``. Not thread-safe."""

    def __init__(
        self,
        kafka: KafkaClient,
        group: GroupName,
        origin: Origin,
        places_of: PlacesOf,
        check_topic: CheckTopic,
        *,
        start: LogStart = "earliest",
        follow: bool = True,
        stalled_s: float = 30.0,
    ) -> None:
        """Open the commit log; see :meth:`rollbridge.Bridge.transactions`.

        Raises:
            InvalidRequestError, TruncatedError: Reading cannot begin there.
            NotFoundError: The group does not exist.
            KafkaUnavailableError: No broker answered.
        """
        self._group = group
        self._follow = follow
        self._stalled_s = stalled_s
        topic = group.commit_log_topic
        begin = log_offset(kafka.offsets, group, start)
        self._goal = None if follow else kafka.offsets.end([topic], Isolation.READ_UNCOMMITTED)[topic]
        self._next = begin
        self._arrived: deque[Fetched] = deque()
        self._records: deque[LogRecord | int] = deque()  # and behind those of a stretch, where it ends
        self._segments = Segments(kafka.log(retry_timeout_s=stalled_s), origin, places_of, check_topic, stalled_s)
        self._follower = kafka.follow(Isolation.READ_COMMITTED, name="rollbridge-transactions", check_epochs=True)
        self._follower.follow((topic, 0), begin)
        hold(self, "_follower", "_segments")

    def close(self) -> None:
        """Disconnect. The position remains available."""
        self._follower.close()
        self._segments.close()

    def stop(self) -> None:
        """Raise InvalidRequestError once what was fetched has been handed out. May be called from any thread."""
        self._follower.stop()

    @property
    def position(self) -> LogPosition:
        """Position behind the transactions handed out; pass it, or its text, as ``start``."""
        return LogPosition(self._group, self._next)

    def __iter__(self) -> Iterator[CommittedTransaction]:
        """Yield transactions as they are committed; end where the log ended at the start, or never with ``follow``.

        Iteration may be left and entered again: it continues with the transaction after the last one.

        Raises:
            InvalidRequestError: The reader was closed.
            TruncatedError: The log was truncated where it was to be read.
            CorruptDataError: A message of the log is no control record.
            UnavailableError: Nothing could be read for ``stalled_s``, although there is more.
        """
        moved_at = time.monotonic()
        while self._goal is None or self._next < self._goal:
            if self._records:
                found = self._take(self._records[0])
                if found is not None:
                    yield found
                    moved_at = time.monotonic()  # time spent by the caller does not count as a stall
                continue
            if self._arrived:
                # One that does not parse stays first, for the next loop.
                self._records.extend([*self._arrived[0].records(), self._arrived[0].end])
                self._arrived.popleft()
                continue
            for item in self._follower.poll(_POLL_S):
                if isinstance(item, Fetched):
                    self._arrived.append(item)
                    moved_at = time.monotonic()
                else:
                    self._judge(item)
            if self._follower.stopped:
                raise InvalidRequestError(
                    "this reader of transactions, or its connection, was closed; open another one at its position"
                )
            if not self._follow and time.monotonic() - moved_at > self._stalled_s:
                raise UnavailableError(
                    f"nothing became readable for {self._stalled_s:g} s on the commit log of {self._group}, "
                    f"although its end is {self._goal}; it was read up to {self._next}"
                )

    def _take(self, record: LogRecord | int) -> CommittedTransaction | None:
        """Take the first record or end; a record that cannot be decoded stays first."""
        if isinstance(record, int):
            self._records.popleft()
            self._next = record
            return None
        control = decode_control(record.key, record.value)
        self._records.popleft()
        self._next = record.offset + 1
        if control.kind is not ControlKind.COMMIT:
            return None
        return CommittedTransaction(control, LogPosition(self._group, self._next), self._segments)

    def _judge(self, trouble: FetchError) -> None:
        """Raise unless the follower recovers from a fault by itself."""
        what, fault = f"the commit log of {self._group}", trouble.fault
        if trouble.resume is not None and not isinstance(fault, LogDivergedError):
            raise TruncatedError(f"{what} has lost records that were still to be read: {fault}") from fault
        if isinstance(fault, NotFoundError):
            raise TruncatedError(f"{what} has been removed with the records that were still to be read") from fault
        if not isinstance(fault, KafkaUnavailableError):
            raise fault
        logger.info("transactions.retrying log=%r: %s", what, fault)


class Segments:
    """Reader of runs of records in many segments, each from front to back, holding few records of each."""

    def __init__(
        self, log: LogReader, origin: Origin, places_of: PlacesOf, check_topic: CheckTopic, stalled_s: float
    ) -> None:
        self.origin = origin
        self._places_of = places_of
        self._check_topic = check_topic
        self._checked: dict[str, WatchedRead[None]] = {}
        """By adopted topic, which is checked again after ZooKeeper's watch has fired."""
        self._known: dict[str, tuple[SegmentPlaces, int]] = {}
        self._log = log
        self._stalled_s = stalled_s
        self._cursors: dict[Partition, _Cursor] = {}
        hold(self, "_log")

    def close(self) -> None:
        """Disconnect."""
        self._log.close()

    @property
    def held(self) -> int:
        """Number of records that are parsed and not handed out."""
        return sum(len(cursor.parsed) for cursor in self._cursors.values())

    def place_of(self, stream: str, segment: SegmentId) -> Partition:
        """Return where a segment lies.

        A stream is looked up once, and again for a later epoch, with which another life of it may have begun.

        Raises:
            StreamRecreatedError, TruncatedError: The adopted topic in which it lies was created again, or deleted.
        """
        places, epoch = self._known.get(stream, (None, -1))
        if places is None or segment.epoch > epoch:
            places = self._places_of(StreamName.parse(stream))
            self._known[stream] = places, segment.epoch
            self.origin.index.add(places)
        if places.is_adopted(segment):
            self._checked.setdefault(places.topic, WatchedRead(partial(self._check_topic, places.stream))).get()
        return places.of(segment)

    def records(self, place: Partition, runs: Sequence[Run], origin: Origin) -> Iterator[Record]:
        """Yield the records of runs, which are in order of offset; those that are left, in an adopted topic.

        Its owner may have it compacted.
        """
        adopted = place[0] in self.origin.index.adopted
        for run in runs:
            for offset in range(run.base_offset, run.base_offset + run.count):
                found = self._at(place, offset, adopted=adopted)
                if found is not None:
                    yield record_of(found, origin)

    def _at(self, place: Partition, offset: int, *, adopted: bool) -> Message | None:
        """Return the record at an offset, waiting up to ``stalled_s`` for it; None if an adopted topic has lost it."""
        cursor = self._cursor(place, offset)
        deadline = Deadline(self._stalled_s)
        backoff = Backoff()
        while True:
            while (record := cursor.take()) is not None and record.offset < offset:
                pass
            if record is not None and record.offset == offset:
                return message_of(place, record, cursor.timestamp_kind, cursor.epoch)
            # Offsets up to the last examined one hold markers, or records that were aborted.
            topic = show_partition(place)
            if record is not None or cursor.fetched > offset:
                if record is not None:
                    cursor.put_back(record)
                if adopted:
                    return None
                raise CorruptDataError(f"topic {topic} holds no record at {offset}, where the commit log has one")
            if deadline.passed():
                raise UnavailableError(
                    f"offset {offset} of topic {topic} did not become readable within {self._stalled_s:g} s, although "
                    "its transaction is committed"
                )
            try:
                self._fetch(place, cursor, min(_WAIT_MS, int(1000 * deadline.left())))
            except KafkaUnavailableError as fault:
                if deadline.passed():
                    raise
                logger.info("transactions.retrying topic=%s: %s", topic, fault)
                backoff.sleep(deadline)

    def _fetch(self, place: Partition, cursor: _Cursor, wait_ms: int) -> None:
        """Fetch the next records of a segment.

        Raises:
            TruncatedError: They have been deleted, or the segment was removed.
        """
        name, number = place
        topic = show_partition(place)
        try:
            raw = self._log.fetch_raw(name, cursor.fetched, wait_ms=wait_ms, partition=number, max_bytes=_BYTES)
        except NotFoundError as fault:
            raise TruncatedError(
                f"topic {topic} has been removed with the records that were still to be read: they were truncated, or "
                "their stream was deleted"
            ) from fault
        if raw.start > cursor.fetched:
            raise TruncatedError(f"topic {topic} has lost records that were still to be read: it begins at {raw.start}")
        for header, batch, standing in judge(FetchedBatches(raw.batches), raw.aborted):
            check_crc(header, batch)
            if standing is BatchStanding.COMMITTED:
                cursor.batches.append((header, batch))
            cursor.fetched = max(cursor.fetched, header.base_offset + header.last_offset_delta + 1)

    def _cursor(self, place: Partition, offset: int) -> _Cursor:
        """Return the cursor of a partition, at this offset or shortly before it."""
        cursor = self._cursors.pop(place, None)
        if cursor is None or not cursor.next <= offset <= cursor.fetched:
            while len(self._cursors) >= _SEGMENTS_MAX:
                del self._cursors[next(iter(self._cursors))]
            cursor = _Cursor(offset)
        self._cursors[place] = cursor  # last, as the most recently used
        return cursor


class _Cursor:
    """Reading position in a partition, and the batches held of it, of which one is open.

    Attributes:
        next: Offset of the next record to hand out, or an earlier one.
        fetched: Offset behind the last batch held.
        parsed: Next records of the open batch.
        batches: Batches behind the open one.
    """

    __slots__ = ("_open", "batches", "epoch", "fetched", "next", "parsed", "timestamp_kind")

    def __init__(self, offset: int) -> None:
        self.next = self.fetched = offset
        self.parsed: deque[LogRecord] = deque()
        self.batches: deque[tuple[BatchHeader, memoryview]] = deque()
        self.timestamp_kind = self.epoch = 0
        self._open: Iterator[LogRecord] = iter(())

    def take(self) -> LogRecord | None:
        """Return the next record held, and drop it; None if there is none."""
        while not self.parsed:
            self.parsed.extend(islice(self._open, _PARSED_MAX))  # a batch may hold millions
            if self.parsed:
                break
            if not self.batches:
                return None
            header, batch = self.batches.popleft()
            self.timestamp_kind = TIMESTAMP_LOG_APPEND_TIME if header.is_append_time else TIMESTAMP_CREATE_TIME
            self.epoch = header.partition_leader_epoch
            self._open = attributed(read_records(batch, header))
        record = self.parsed.popleft()
        self.next = record.offset + 1
        return record

    def put_back(self, record: LogRecord) -> None:
        """Hold the record again that was taken last."""
        self.parsed.appendleft(record)
        self.next = record.offset


def log_offset(offsets: LogOffsets, group: GroupName, start: LogStart) -> int:
    """Return the offset of the commit log at which to begin.

    Raises:
        InvalidRequestError, TruncatedError: Reading cannot begin there.
        KafkaUnavailableError, NotFoundError.
    """
    topic = group.commit_log_topic
    place = parse_log_start(start) if isinstance(start, str) else start
    if isinstance(place, Latest):
        return offsets.end([topic], Isolation.READ_COMMITTED)[topic]
    first = offsets.first([topic])[topic]
    match place:
        case LogPosition():
            if place.group != group:
                raise InvalidRequestError(f"the position {place} belongs to group {place.group}, not to {group}")
            end = offsets.end([topic], Isolation.READ_UNCOMMITTED)[topic]
            if place.offset > end:
                raise InvalidRequestError(
                    f"the position {place} is beyond the end of the commit log, which is at {end}"
                )
            if place.offset < first:
                raise TruncatedError(f"the commit log of {group} begins at {first} now, so {place} cannot be begun at")
            return place.offset
        case Since() | datetime() | int():
            ms = _milliseconds(place)
            if ms < 0:
                raise InvalidRequestError(f"a time to begin at is not negative: {ms}")
            return offsets.since_or_end([topic], ms)[topic]
        case _:
            return first


def _milliseconds(time: Since | datetime | int) -> int:
    match time:
        case Since(ms):
            return ms
        case datetime():
            return int(time.timestamp() * 1000)
        case _:
            return time
