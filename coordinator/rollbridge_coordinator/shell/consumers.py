"""Consumers of a leader: the tail of the transaction buffers, frames read again, and the whole commit log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from bridge.errors import CorruptDataError, KafkaUnavailable
from bridge.kafka.clients import assign_more, library_logger
from bridge.kafka.compacted import is_end
from bridge.kafka.log_offsets import LogOffsets
from bridge.kafka.metadata import Isolation
from bridge.kafka.quiet import limited
from bridge.kafka.standstill import Lookout, places_of, positions_of
from bridge.model.buffered import FrameRef, Partition
from bridge.model.commit_order import LineKey
from bridge.model.control import ControlKind, decode_control, peek_kind
from coordinator.effects import LogSummary

logger = limited(logging.getLogger(__name__))

MESSAGES_AT_ONCE: Final = 2_000
READ_AHEAD_KBYTES: Final = 16 * 1024
TRANSACTION_ID_BYTES: Final = 16
IDLE_WAIT_MS: Final = 500
"""How long a broker holds back the answer that there is nothing new. What arrives is answered at once."""
FETCH_WAIT_MS: Final = 50
"""The same where offsets are sought, which waits for the fetch that is under way."""
SEEK_GAP: Final = 2_000
"""Frames of others that are skipped by reading rather than by seeking."""
PATIENCE_S: Final = 10.0
"""How long a frame that is read again may take to come before another consumer is asked."""
_GONE: Final = (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET)


def _consumer(brokers: str, security: Mapping[str, str], isolation: str, **more: object) -> Consumer:
    return Consumer(
        {
            **security,
            "bootstrap.servers": brokers,
            "group.id": "rollbridge-coordinator",  # required by the library; no offsets are ever committed
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "isolation.level": isolation,
            "check.crcs": True,
            "allow.auto.create.topics": False,
            "fetch.wait.max.ms": FETCH_WAIT_MS,
            "fetch.error.backoff.ms": 5,
            "fetch.message.max.bytes": 4 * 1024 * 1024,
            "queued.max.messages.kbytes": READ_AHEAD_KBYTES,
            # What has been taken from a full read-ahead is fetched again at once; the default waits for a second.
            "fetch.queue.backoff.ms": 5,
            "socket.nagle.disable": True,
            "topic.metadata.refresh.interval.ms": 5_000,
            **more,
        },
        logger=library_logger,
    )


class BufferTail:
    """Reads the buffers of a group from given offsets on, as they grow."""

    def __init__(self, brokers: str, security: Mapping[str, str]) -> None:
        """``brokers`` are the bootstrap servers."""
        self._open = partial(_consumer, brokers, security, "read_uncommitted", **{"fetch.wait.max.ms": IDLE_WAIT_MS})
        self._consumer = self._open()
        self._starts: dict[Partition, int] = {}
        self._arrived_at = 0.0
        self._lookout = Lookout(brokers, Isolation.READ_UNCOMMITTED, security=security)

    def assign(self, wanted: Mapping[Partition, int]) -> None:
        """Read exactly these partitions; a new one from its offset on, the others from where they are.

        Offsets are numbers: finding the "beginning" costs the library half a second, and a leader knows where a
        buffer begins.
        """
        gone = self._starts.keys() - wanted.keys()
        if gone:
            self._consumer.incremental_unassign([TopicPartition(*item) for item in sorted(gone)])
            for item in gone:
                del self._starts[item]
        fresh = {item: wanted[item] for item in sorted(wanted.keys() - self._starts.keys())}
        if not fresh:
            return
        if self._starts and time.monotonic() - self._arrived_at > IDLE_WAIT_MS / 1000:
            self._renew(fresh)  # they would wait for the fetch that is under way
        else:
            assign_more(self._consumer, places_of(fresh))
            self._starts |= fresh

    def poll(self, timeout_s: float) -> Iterator[Message]:
        """What has arrived; waits for the first message at most ``timeout_s``."""
        stuck = self._lookout.stuck(self._positions)
        if stuck:
            logger.warning("no frames come from %s although there are some; reading anew", sorted(stuck))
            self._renew()
        for message in _arrived(self._consumer, timeout_s):
            error = message.error()
            if error is None:
                self._arrived_at = time.monotonic()
                yield message
            elif (message.topic(), message.partition()) in self._starts:
                _report(error)

    def ends(self) -> dict[Partition, int]:
        """Where each buffer ended when it was read last, as far as that is known."""
        found = {}
        for item in self._starts:
            _, end = self._consumer.get_watermark_offsets(TopicPartition(*item), cached=True)
            if end >= 0:
                found[item] = end
        return found

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def _positions(self) -> dict[Partition, int]:
        return positions_of(self._consumer.position([TopicPartition(*item) for item in self._starts]), self._starts)

    def _renew(self, fresh: Mapping[Partition, int] | None = None) -> None:
        """Go on with another consumer where this one is; what it has fetched and not handed out comes again.

        ``fresh`` is read as well from now on.
        """
        before, self._starts = self._consumer, {**self._positions(), **(fresh or {})}
        self._consumer = self._open()
        assign_more(self._consumer, places_of(self._starts))
        before.close()


def _arrived(consumer: Consumer, timeout_s: float) -> Sequence[Message]:
    first = consumer.poll(timeout_s)
    return () if first is None else (first, *consumer.consume(MESSAGES_AT_ONCE, 0))


class LogTail:
    """Reads a commit log from an offset on, as it grows; committed records only."""

    def __init__(self, brokers: str, security: Mapping[str, str], topic: str, start: int) -> None:
        self._consumer = _consumer(brokers, security, "read_committed", **{"fetch.wait.max.ms": IDLE_WAIT_MS})
        self._consumer.assign([TopicPartition(topic, 0, start)])

    def poll(self, timeout_s: float) -> LogSummary | None:
        """What has arrived; waits for the first record at most ``timeout_s``.

        Raises:
            CorruptDataError: a message in it can not be a control record, or what comes next was deleted.
            KafkaUnavailable: no broker answers.
        """
        messages = []
        for message in _arrived(self._consumer, timeout_s):
            error = message.error()
            if error is None:
                messages.append(message)
            else:
                _report(error)
        return _summary(messages, 0) if messages else None

    def end(self) -> int | None:
        """Where the log ended when it was read last; None if that is not known yet."""
        (assigned,) = self._consumer.assignment()
        _, end = self._consumer.get_watermark_offsets(assigned, cached=True)
        return end if end >= 0 else None

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()


class FrameReader:
    """Reads single frames again, best in the order of their offsets."""

    def __init__(self, brokers: str, security: Mapping[str, str], timeout_s: float = 60.0) -> None:
        self._brokers = brokers
        self._security = security
        self._timeout_s = timeout_s
        self._consumer: Consumer | None = None
        self._at: tuple[Partition, int] | None = None
        self._ahead: dict[int, Message] = {}
        self._sought = 0

    def read(self, frame: FrameRef) -> bytes:
        """The record batch of a frame.

        Raises:
            CorruptDataError: the buffer no longer holds the frame.
            KafkaUnavailable: no broker answered in time.
        """
        if self._consumer is None:
            self._consumer = _consumer(self._brokers, self._security, "read_uncommitted")
        if self._at is None or self._at[0] != frame.partition or not 0 <= frame.offset - self._at[1] <= SEEK_GAP:
            self._seek(frame)
        self._at = (frame.partition, frame.offset)
        deadline = time.monotonic() + self._timeout_s
        while frame.offset not in self._ahead:
            self._fill(frame, deadline)
        for offset in [item for item in self._ahead if item < frame.offset]:
            del self._ahead[offset]
        value = self._ahead[frame.offset].value() or b""  # it stays: the next frame may be in the same bundle
        batch = value[frame.start : frame.start + frame.size]
        if len(batch) != frame.size or (frame.start == 0 and len(value) != frame.size):
            raise CorruptDataError(f"offset {frame.offset} of {frame.partition[0]} no longer holds its frame")
        return batch

    def close(self) -> None:
        """Stop reading and forget what was read ahead."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer, self._at = None, None
            self._ahead.clear()

    def _seek(self, frame: FrameRef) -> None:
        assert self._consumer is not None
        self._consumer.assign([TopicPartition(*frame.partition, frame.offset)])
        self._ahead.clear()
        self._sought = frame.offset

    def _fill(self, frame: FrameRef, deadline: float) -> None:
        assert self._consumer is not None
        first = self._consumer.poll(min(PATIENCE_S, self._timeout_s))
        if first is None:
            if time.monotonic() >= deadline:
                raise KafkaUnavailable(
                    f"no broker gave offset {frame.offset} of {frame.partition[0]} in {self._timeout_s:g} s"
                )
            self._consumer.close()  # another one looks for the leader anew, see bridge.kafka.standstill
            self._consumer = _consumer(self._brokers, self._security, "read_uncommitted")
            self._seek(frame)
            return
        for message in (first, *self._consumer.consume(64, 0)):
            error = message.error()
            if error is not None:
                if error.code() in _GONE and self._sought < frame.offset:
                    self._seek(frame)  # what lies between the frame before and this one was truncated meanwhile
                    return
                _report(error)
                continue
            offset = message.offset()
            if offset is not None and offset >= frame.offset:
                self._ahead[offset] = message
        if self._ahead and frame.offset not in self._ahead and min(self._ahead) > frame.offset:
            raise CorruptDataError(f"offset {frame.offset} of {frame.partition[0]} is gone: the buffer was truncated")


def read_commit_log(
    brokers: str, security: Mapping[str, str], topic: str, start: int = 0, timeout_s: float = 120.0
) -> LogSummary:
    """What a commit log says from an offset up to its end. There may be millions of records: none is read whole.

    Raises:
        CorruptDataError: a message in it can not be a control record.
        KafkaUnavailable: no broker answered in time.
    """
    return _summary(_read_committed(brokers, security, topic, start, timeout_s), start)


def read_orders(
    brokers: str, security: Mapping[str, str], topic: str, records: int, timeout_s: float = 120.0
) -> dict[LineKey, int]:
    """The highest number committed of each connection, by the last records of a commit log.

    Raises:
        CorruptDataError: a message in it can not be a control record.
        KafkaUnavailable: no broker answered in time.
    """
    numbers: dict[LineKey, int] = {}
    with closing(LogOffsets(brokers, security=security, timeout_s=timeout_s)) as offsets:
        first = offsets.first([topic])[topic]
        end = offsets.end([topic], Isolation.READ_COMMITTED)[topic]
    for message in _read_committed(brokers, security, topic, max(end - records, first), timeout_s):
        order = decode_control(message.key(), message.value()).order
        if order is not None:
            key, number = order
            numbers[key] = max(number, numbers.get(key, 0))
    return numbers


def _summary(messages: Iterable[Message], start: int) -> LogSummary:
    """What messages of a commit log say, the first of which stands at ``start`` or behind."""
    begun: set[bytes] = set()
    ended: dict[bytes, int] = {}
    aborted: set[bytes] = set()
    end = start
    for message in messages:
        offset = message.offset() or 0
        end = offset + 1
        transaction, kind = message.key() or b"", peek_kind(message.value())
        if kind is None or len(transaction) != TRANSACTION_ID_BYTES:
            kind = decode_control(message.key(), message.value()).kind  # says what is wrong with it
        if kind is ControlKind.BEGIN:
            begun.add(transaction)
            continue
        ended[transaction] = offset
        if kind is ControlKind.ABORT:
            aborted.add(transaction)
    return LogSummary(ended, frozenset(begun.difference(ended)), frozenset(aborted), end)


def _read_committed(
    brokers: str, security: Mapping[str, str], topic: str, start: int, timeout_s: float
) -> Iterator[Message]:
    """The committed messages of a topic of one partition from an offset up to its present end.

    The leader tells the end beforehand; see :mod:`bridge.kafka.compacted` for why a consumer can not.
    """
    with closing(LogOffsets(brokers, security=security, timeout_s=timeout_s)) as offsets:
        end = offsets.end([topic], Isolation.READ_COMMITTED)[topic]
    if start >= end:
        return
    consumer = _consumer(brokers, security, "read_committed", **{"enable.partition.eof": True})
    try:
        consumer.assign([TopicPartition(topic, 0, start)])
        while True:
            first = consumer.poll(timeout_s)
            if first is None:
                raise KafkaUnavailable(f"no broker gave topic {topic} up to offset {end} within {timeout_s:g} s")
            for message in (first, *consumer.consume(MESSAGES_AT_ONCE, 0)):
                error = message.error()
                if error is None:
                    yield message
                elif error.code() != KafkaError._PARTITION_EOF:
                    _report(error)
                if is_end(message, end):
                    return
    finally:
        consumer.close()


def _report(error: KafkaError) -> None:
    """Go on where the library goes on by itself; stop where it does not."""
    if error.fatal() or error.code() in _GONE:
        raise CorruptDataError(f"a buffer does not hold what it should: {error.str()}") from KafkaException(error)
    if error.code() == KafkaError._ALL_BROKERS_DOWN:
        raise KafkaUnavailable(f"no broker answers: {error.str()}") from KafkaException(error)
    logger.info("consumer goes on after: %s", error.str())
