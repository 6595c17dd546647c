"""Reader of whole transactions in commit order: a group's commit log and the records to which its COMMITs point.

Like Debezium's transaction topic for change data capture: each transaction once, in one order over all streams of the
group, and each of its records with its number in it.

Records are read on request. A reader holds a few hundred of each segment, however large a transaction is: the order of
a commit log is the order in each segment, so a consumer passes through every segment once.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Self

from confluent_kafka import KafkaError, Message, TopicPartition

from rollbridge.config import ConnectionSettings
from rollbridge.consumer.records import Origin, Record, record_of
from rollbridge.errors import (
    CorruptDataError,
    InvalidRequestError,
    KafkaUnavailable,
    NotFoundError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.forks import hold
from rollbridge.kafka.clients import Config, assign_more, consumer_config, open_consumer
from rollbridge.kafka.errors import translate
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.retry import limited
from rollbridge.model.control import ControlKind, ControlRecord, Run, decode_control
from rollbridge.model.ids import TransactionId
from rollbridge.model.names import GroupName, StreamName
from rollbridge.model.position import Latest, LogPosition, Since, parse_log_start

logger = limited(logging.getLogger(__name__))

LogStart = str | LogPosition | int | datetime
"""Start: ``"earliest"``, ``"latest"``, a position, a time (ms since 1970 if it is an int), or the text of these."""

_POLL_S: Final = 0.1
_BATCH: Final = 500
_HELD_MAX: Final = 1_000
"""Records held of a segment before it is paused."""
_DOUBT_S: Final = 1.0
"""Seconds without a record after which the reader checks that the segment still exists."""
_SEEK_BEYOND: Final = 10_000
"""Distance in offsets beyond which the reader seeks instead of reading through."""
_SEGMENTS_MAX: Final = 256
"""Segments read at a time; the least recently used one makes room."""


@dataclass(frozen=True, slots=True)
class CommittedTransaction:
    """Committed transaction and its records.

    Attributes:
        control: Its record on the commit log.
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
        """Number of its records."""
        return self.control.records

    @property
    def held(self) -> int:
        """Number of records that its reader holds in memory now, of this transaction and later ones."""
        return self._segments.held

    def counts(self) -> dict[str, int]:
        """Return the number of its records in each stream."""
        return self.control.counts()

    def records(self) -> Iterator[Record]:
        """Yield its records of all streams by local sequence, reading them from Kafka on request.

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
            self._segments.records(StreamName.parse(stream).segment_topic(segment), runs, origin)
            for stream, segment, runs in self.control.segments()
        ]
        return columns[0] if len(columns) == 1 else heapq.merge(*columns, key=lambda record: record.local_sequence or 0)


class TransactionReader:
    """Reader of a group's committed transactions in their order; ``b.transactions(...)``. Not thread-safe."""

    def __init__(
        self,
        settings: ConnectionSettings,
        group: GroupName,
        origin: Origin,
        *,
        start: LogStart = "earliest",
        follow: bool = True,
        stalled_s: float = 30.0,
    ) -> None:
        """Open the commit log; see :meth:`rollbridge.Bridge.transactions`.

        Raises:
            InvalidRequestError, TruncatedError: Reading cannot begin there.
            NotFoundError: The group does not exist.
            KafkaUnavailable: No broker answered.
        """
        self._group = group
        self._follow = follow
        self._stalled_s = stalled_s
        topic = group.commit_log_topic
        offsets = LogOffsets(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name)
        begin = log_offset(offsets, group, start)
        self._next = begin
        self._fetched: deque[Message] = deque()
        self._goal = None if follow else offsets.end([topic], Isolation.READ_UNCOMMITTED)[topic]
        config = consumer_config(
            settings.bootstrap_servers,
            isolation=Isolation.READ_COMMITTED,
            security=settings.kafka,
            client_id=settings.client_name,
            extra={"fetch.queue.backoff.ms": 5},
        )
        config |= {"enable.partition.eof": True, "error_cb": lambda error: logger.info("transactions: %s", error)}
        self._consumer = open_consumer(config, f"read the commit log of {group}", logger)
        self._consumer.assign([TopicPartition(topic, 0, begin)])
        hold(self, "_consumer", "_segments")
        self._segments = Segments({**config, "queued.max.messages.kbytes": 16 * 1024}, origin, offsets, stalled_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. The position remains available."""
        self._consumer.close()
        self._segments.close()

    @property
    def position(self) -> LogPosition:
        """Position behind the transactions handed out; pass it, or its text, as ``start``."""
        return LogPosition(self._group, self._next)

    def __iter__(self) -> Iterator[CommittedTransaction]:
        """Yield transactions as they are committed; end where the log ended at the start, or never with ``follow``.

        Iteration may be left and entered again: it goes on with the transaction after the last one.

        Raises:
            TruncatedError: The log was truncated where it was to be read.
            CorruptDataError: A message of the log is no control record.
            UnavailableError: Nothing could be read for ``stalled_s``, although there is more.
        """
        moved_at = time.monotonic()
        while self._goal is None or self._next < self._goal:
            if self._fetched:
                found = self._take(self._fetched[0])
                if found is not None:
                    yield found
                    moved_at = time.monotonic()  # time spent by the caller does not count as a stall
                continue
            first = self._consumer.poll(_POLL_S)
            if first is None:
                if not self._follow and time.monotonic() - moved_at > self._stalled_s:
                    raise UnavailableError(
                        f"nothing became readable for {self._stalled_s:g} s on the commit log of {self._group}, "
                        f"although it goes on to {self._goal}; it was read up to {self._next}"
                    )
                continue
            moved_at = time.monotonic()
            self._fetched.extend((first, *self._consumer.consume(_BATCH, 0)))

    def _take(self, message: Message) -> CommittedTransaction | None:
        """Take the first fetched message; one that cannot be decoded stays first."""
        error, offset = message.error(), message.offset()
        if error is not None or offset is None:
            self._fetched.popleft()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                self._next = max(self._next, offset or 0)
            elif error is not None:
                _judge(error, f"the commit log of {self._group}")
            return None
        control = decode_control(message.key(), message.value())
        self._fetched.popleft()
        self._next = offset + 1
        if control.kind is not ControlKind.COMMIT:
            return None
        return CommittedTransaction(control, LogPosition(self._group, offset + 1), self._segments)


class Segments:
    """Reader of runs of records in many segments, each from front to back, holding few records of each."""

    def __init__(self, config: Config, origin: Origin, offsets: LogOffsets, stalled_s: float) -> None:
        self.origin = origin
        self._offsets = offsets
        self._stalled_s = stalled_s
        self._consumer = open_consumer({**config, "enable.partition.eof": False}, "read segments", logger)
        self._cursors: dict[str, _Cursor] = {}
        hold(self, "_consumer")

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    @property
    def held(self) -> int:
        """Number of records held now."""
        return sum(len(cursor.held) for cursor in self._cursors.values())

    def records(self, topic: str, runs: Sequence[Run], origin: Origin) -> Iterator[Record]:
        """Yield the records of runs, which are in order of offset."""
        for run in runs:
            for offset in range(run.base_offset, run.base_offset + run.count):
                message = self._at(topic, offset)
                yield record_of(message, origin)

    def _at(self, topic: str, offset: int) -> Message:
        """Return the record at an offset, waiting up to ``stalled_s`` for it."""
        cursor = self._cursor(topic, offset)
        held = cursor.held
        deadline = doubt_at = 0.0
        while True:
            while held:
                message = held.popleft()
                found = message.offset() or 0
                if found > offset:
                    raise CorruptDataError(f"topic {topic} holds no record at {offset}, where the commit log has one")
                cursor.next = found + 1
                if found == offset:
                    return message
            now = time.monotonic()
            deadline = deadline or now + self._stalled_s
            doubt_at = doubt_at or now + _DOUBT_S
            if now > doubt_at:
                self._check_stored(topic)
                doubt_at = now + _DOUBT_S
            if now > deadline:
                raise UnavailableError(
                    f"offset {offset} of topic {topic} did not become readable within {self._stalled_s:g} s, although "
                    "its transaction is committed"
                )
            self._read_some(cursor)

    def _check_stored(self, topic: str) -> None:
        """Raise TruncatedError if a segment was removed; librdkafka waits half a minute for a topic to appear."""
        try:
            self._offsets.first([topic])
        except NotFoundError:
            raise TruncatedError(
                f"topic {topic} has been removed with the records that were still to be read: they were truncated, or "
                "their stream was deleted"
            ) from None

    def _cursor(self, topic: str, offset: int) -> _Cursor:
        """Return the cursor of a topic, at this offset or shortly before it."""
        cursor = self._cursors.pop(topic, None)
        if cursor is not None and not cursor.next <= offset <= cursor.next + _SEEK_BEYOND:
            self._consumer.incremental_unassign([TopicPartition(topic, 0)])
            self._consumer.incremental_assign([TopicPartition(topic, 0, offset)])
            cursor = _Cursor(topic, offset)
        if cursor is None:
            while len(self._cursors) >= _SEGMENTS_MAX:
                self._drop(next(iter(self._cursors)))
            cursor = _Cursor(topic, offset)
            assign_more(self._consumer, [TopicPartition(topic, 0, offset)])
        self._cursors[topic] = cursor  # last, as the most recently used
        return cursor

    def _drop(self, topic: str) -> None:
        del self._cursors[topic]
        self._consumer.incremental_unassign([TopicPartition(topic, 0)])

    def _read_some(self, wanted: _Cursor) -> None:
        if wanted.paused:
            self._consumer.resume([TopicPartition(wanted.topic, 0)])
            wanted.paused = False
        first = self._consumer.poll(_POLL_S)
        for message in () if first is None else (first, *self._consumer.consume(_BATCH, 0)):
            error, topic = message.error(), message.topic() or ""
            cursor = self._cursors.get(topic)
            if error is not None and topic not in ("", wanted.topic):
                if cursor is not None:
                    self._drop(topic)  # an error of another topic is raised for the caller that asks for that topic
            elif error is not None:
                _judge(error, f"topic {topic}")
            elif cursor is not None and (message.offset() or 0) >= cursor.fetched:
                cursor.held.append(message)
                cursor.fetched = (message.offset() or 0) + 1
        for cursor in self._cursors.values():
            if cursor is not wanted and len(cursor.held) > _HELD_MAX and not cursor.paused:
                self._consumer.pause([TopicPartition(cursor.topic, 0)])
                cursor.paused = True


class _Cursor:
    """Reading position in a topic, and the records held of it."""

    __slots__ = ("fetched", "held", "next", "paused", "topic")

    def __init__(self, topic: str, offset: int) -> None:
        self.topic = topic
        self.next = self.fetched = offset
        self.held: deque[Message] = deque()
        self.paused = False


def log_offset(offsets: LogOffsets, group: GroupName, start: LogStart) -> int:
    """Return the offset of the commit log at which to begin.

    Raises:
        InvalidRequestError, TruncatedError: Reading cannot begin there.
        KafkaUnavailable, NotFoundError.
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


def _judge(error: KafkaError, what: str) -> None:
    """Raise unless the consumer recovers from an error by itself."""
    if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        raise TruncatedError(f"{what} has lost records that were still to be read: {error.str()}")
    fault = translate(error, f"read {what}", what)
    if isinstance(fault, NotFoundError):
        raise TruncatedError(f"{what} has been removed with the records that were still to be read")
    if not isinstance(fault, KafkaUnavailable):
        raise fault
    logger.info("reading %s: %s", what, fault)
