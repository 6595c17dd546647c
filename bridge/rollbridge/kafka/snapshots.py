"""Snapshots of transaction buffers as they stand in Kafka: what there is, and whether it says what the logs say."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from rollbridge.errors import CorruptDataError, KafkaUnavailable
from rollbridge.kafka.clients import consumer_config, open_consumer
from rollbridge.kafka.errors import translate
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.retry import Backoff, Deadline, limited
from rollbridge.kafka.topics import TopicAdmin
from rollbridge.model.control import ControlKind, peek_kind
from rollbridge.model.frames import FrameKind, unpack_bundle, unpack_header
from rollbridge.model.names import snapshot_indexes_topic, snapshot_segments_topic, snapshot_topic
from rollbridge.model.ongoing import Ongoing, OngoingTransactions, choose_ongoing, ongoing_keys
from rollbridge.model.pieces import Partition
from rollbridge.model.records import StreamConfig
from rollbridge.model.snapshots import Choice, Snapshot, choose, index_keys, segment_of

# --------------------------------------------------------------------------------------------------------------------
# Compacted topics of one partition: the latest value of each key, and values at given offsets.
# Only what is committed counts. A native transaction of somebody else that is still open ends what can be read for
# now.
# Where that end is, the leader is asked beforehand. That a consumer has come to an end says less: right after an
# election the new leader's high watermark may be behind what its predecessor has acknowledged, and consumers are told
# that end; ListOffsets is not answered until the new leader has caught up (KIP-207).


logger = limited(logging.getLogger(__name__))

_AT_ONCE: Final = 500
_TIMEOUT_S: Final = 30.0
_BEHIND_OTHERS_S: Final = 5.0
_PAUSE_S: Final = 0.05
_OUT_OF_RANGE: Final = (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET)


class Latest(NamedTuple):
    """The latest record of a key."""

    offset: int
    value: bytes


def read_latest(bootstrap_servers: str, security: Mapping[str, str], topic: str) -> dict[bytes, Latest]:
    """The latest record of each key that has not been deleted.

    Raises:
        KafkaUnavailable, NotFoundError, NotAuthorizedError
    """
    found: dict[bytes, Latest] = {}
    for message in read_all(bootstrap_servers, security, topic):
        key, value = message.key() or b"", message.value()
        if value is None:
            found.pop(key, None)
        else:
            found[key] = Latest(message.offset() or 0, value)
    return found


def read_values(
    bootstrap_servers: str, security: Mapping[str, str], topic: str, offsets: Iterable[int]
) -> dict[int, bytes | None]:
    """The values at some offsets; None where there is no record, because it was deleted or replaced.

    One that stands behind a native transaction of somebody else that is still open is waited for, for a while.

    Raises:
        KafkaUnavailable, NotFoundError, NotAuthorizedError
    """
    found: dict[int, bytes | None] = dict.fromkeys(offsets)
    if not found:
        return found
    ends = LogOffsets(bootstrap_servers, security=security)
    with closing(ends), _reading(bootstrap_servers, security, topic) as consumer:
        end = _end(ends, topic)
        deadline = Deadline(_BEHIND_OTHERS_S)
        backoff = Backoff(_PAUSE_S)
        while max(found) >= end and not deadline.passed():
            backoff.sleep(deadline)
            end = _end(ends, topic)
        for offset in sorted(item for item in found if item < end):
            consumer.assign([TopicPartition(topic, 0, offset)])
            message = next(_until(consumer, topic, end), None)
            if message is not None and message.offset() == offset:
                found[offset] = message.value()
    return found


def read_all(
    bootstrap_servers: str, security: Mapping[str, str], topic: str, partition: int = 0, start: int = 0
) -> Iterator[Message]:
    """The committed records of any topic's partition, from an offset that it holds to its present end.

    Raises:
        KafkaUnavailable, NotFoundError, NotAuthorizedError
    """
    with closing(LogOffsets(bootstrap_servers, security=security)) as ends:
        end = _end(ends, topic, partition)
    if start >= end:
        return
    with _reading(bootstrap_servers, security, topic) as consumer:
        consumer.assign([TopicPartition(topic, partition, start)])
        yield from _until(consumer, topic, end)


def is_end(message: Message, end: int) -> bool:
    """Whether nothing below an offset comes after this, a message of a consumer or its news of an end.

    The last offsets of a log may be markers, which are not handed out, so that only the news of an end tells; and news
    of an earlier end tells of a leader that has just been elected.
    """
    offset = message.offset()
    if offset is None:
        return False
    error = message.error()
    if error is None:
        return offset + 1 >= end
    return error.code() == KafkaError._PARTITION_EOF and offset >= end


def _end(offsets: LogOffsets, topic: str, partition: int = 0) -> int:
    return offsets.end([topic], Isolation.READ_COMMITTED, partition, timeout_s=_TIMEOUT_S)[topic]


@contextmanager
def _reading(bootstrap_servers: str, security: Mapping[str, str], topic: str) -> Iterator[Consumer]:
    config = consumer_config(bootstrap_servers, isolation=Isolation.READ_COMMITTED, security=security)
    consumer = open_consumer({**config, "enable.partition.eof": True}, f"read topic {topic}", logger)
    try:
        yield consumer
    finally:
        consumer.close()


def _until(consumer: Consumer, topic: str, end: int) -> Iterator[Message]:
    """The records from where the consumer is to an end that the leader has told."""
    deadline = Deadline(_TIMEOUT_S)
    while True:
        first = consumer.poll(deadline.left())
        if first is None:
            raise KafkaUnavailable(f"no broker gave topic {topic} up to offset {end} within {_TIMEOUT_S:g} s")
        for message in (first, *consumer.consume(_AT_ONCE, 0)):
            error = message.error()
            if error is None:
                deadline = Deadline(_TIMEOUT_S)
                yield message
            elif error.code() in _OUT_OF_RANGE:
                return
            elif error.code() == KafkaError._PARTITION_EOF:
                logger.debug("%s: the end was told at %s, wanted is %d", topic, message.offset(), end)
            else:
                fault = translate(error, f"read topic {topic}", f"topic {topic}")
                if not isinstance(fault, KafkaUnavailable):
                    raise fault
                logger.info("reading %s goes on: %s", topic, fault)
            if is_end(message, end):
                return


SEGMENTED: Final = "segmented"
SINGLE: Final = "single"
NO_FORMAT: Final = "none"
ENDS_LOOK_MAX: Final = 2_000
"""Messages of a buffer in which is looked for what a snapshot does not cover yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    """The snapshot of one buffer partition.

    Attributes:
        stream: Configuration of the stream.
        partition: Topic and partition of the buffer.
        format: ``segmented``, ``single``, or ``none``.
        snapshot: What a new leader would use; None if it would read the whole buffer.
        index_bytes: Size of its record.
        buffer_end: End offset of the buffer partition.
        ongoing: The open transactions that a new leader would not read again; None if no record spares anything.
        faults: What is wrong with records that can not be used.
        segments_exist: Whether the topic of sealed segments is there.
    """

    stream: StreamConfig
    partition: Partition
    format: str
    snapshot: Snapshot | None
    index_bytes: int
    buffer_end: int
    ongoing: OngoingTransactions | None = None
    faults: tuple[str, ...] = ()
    segments_exist: bool = True

    @property
    def aborted(self) -> int:
        """How many aborted transactions it lists."""
        if self.snapshot is None:
            return 0
        return len(self.snapshot.aborts) + sum(item.aborts for item in self.snapshot.indexes)

    @property
    def has_all_segments(self) -> bool:
        """Whether there is a topic for the segments that it names."""
        return self.segments_exist or self.snapshot is None or not self.snapshot.indexes

    @property
    def tail(self) -> int:
        """How many messages of the buffer a new leader would read."""
        if self.ongoing is not None:
            return self.buffer_end - self.ongoing.replay_position
        return self.buffer_end - (0 if self.snapshot is None else self.snapshot.max_read_position)


@dataclass(frozen=True, slots=True)
class Verification:
    """What comparing a snapshot with the buffer and the commit log has found.

    Attributes:
        partition: Topic and partition of the buffer.
        aborted: How many aborted transactions the snapshot lists.
        checked: How many transactions of the buffer were looked up.
        faults: What is wrong; empty if nothing is.
    """

    partition: Partition
    aborted: int
    checked: int
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndedSince:
    """How many transactions have ended at least, and when the first of them was asked to, ms since 1970."""

    count: int
    first_ms: int


class SnapshotReader:
    """Reads the snapshots of the buffers of one scope; needs the right to read its topics."""

    def __init__(self, bootstrap_servers: str, security: Mapping[str, str], scope: str) -> None:
        """Read the indexes; they are not looked at again.

        Raises:
            KafkaUnavailable, NotAuthorizedError
        """
        self._servers = bootstrap_servers, security
        self._admin = TopicAdmin(bootstrap_servers, security=security)
        self._segments = snapshot_segments_topic(scope)
        topics = {SEGMENTED: snapshot_indexes_topic(scope), SINGLE: snapshot_topic(scope)}
        self._known = self._admin.topic_ids([*topics.values(), self._segments])
        self._indexes: dict[str, Mapping[bytes, Latest]] = {
            kind: read_latest(*self._servers, topic) if topic in self._known else {} for kind, topic in topics.items()
        }

    def of(self, stream: StreamConfig) -> Iterator[BufferSnapshot]:
        """The snapshots of a stream, one for each partition of its buffer."""
        partitions = [(stream.buffer_topic, number) for number in range(stream.buffer_partitions)]
        log = stream.group.commit_log_topic
        ends = self._admin.end_offsets([*partitions, log])
        for partition in partitions:
            places = [(kind, key) for kind in self._indexes for key in index_keys(partition)]
            found = [self._indexes[kind].get(key) for kind, key in places]
            values = [None if item is None else item.value for item in found]
            choice: Choice = choose(values, partition, stream.buffer_topic_id, ends[partition], ends[log])
            used = choice.snapshot is not None
            ongoing = Ongoing(None)
            if choice.snapshot is not None:
                records = [self._indexes[places[choice.place][0]].get(key) for key in ongoing_keys(partition)]
                ongoing = choose_ongoing([item and item.value for item in records], choice.snapshot)
            yield BufferSnapshot(
                stream=stream,
                partition=partition,
                format=places[choice.place][0] if used else NO_FORMAT,
                snapshot=choice.snapshot,
                index_bytes=len(values[choice.place] or b"") if used else 0,
                buffer_end=ends[partition],
                ongoing=ongoing.record,
                faults=(*choice.faults.values(), *ongoing.faults.values()),
                segments_exist=self._segments in self._known,
            )

    def verify(self, found: BufferSnapshot) -> Verification:
        """Compare a snapshot with the whole buffer and the whole commit log, and read every segment."""
        faults = list(found.faults)
        snapshot = found.snapshot
        if snapshot is None:
            return Verification(found.partition, 0, 0, [*faults, "there is no snapshot"])
        listed = set(snapshot.aborts)
        offsets = [index.persistent_position for index in snapshot.indexes]
        values: Mapping[int, bytes | None] = {}
        if self._segments in self._known:
            values = read_values(*self._servers, self._segments, offsets)
        for index in snapshot.indexes:
            try:
                value = values.get(index.persistent_position)
                listed.update(segment_of(index, found.partition, found.stream.buffer_topic_id, value).aborts)
            except CorruptDataError as fault:
                faults.append(f"segment {index.sequence_id}: {fault}")
        committed, aborted = self._outcomes(found.stream.group.commit_log_topic, snapshot.commit_log_end)
        begun = self._begun(found.partition)
        missing = (begun & aborted) - listed
        if missing:
            faults.append(f"{len(missing)} aborted transactions are not listed, one is {min(missing).hex()}")
        if listed & committed:
            wrong = listed & committed
            faults.append(f"{len(wrong)} committed transactions are listed as aborted, one is {min(wrong).hex()}")
        return Verification(found.partition, len(listed), len(begun), faults)

    def ended_since(self, found: BufferSnapshot) -> EndedSince:
        """The transactions whose end was asked for behind a snapshot, among the next messages of the buffer."""
        position = 0 if found.snapshot is None else found.snapshot.position
        if position >= found.buffer_end:
            return EndedSince(0, 0)
        [start] = self._admin.start_offsets([found.partition]).values()
        ended: dict[bytes, int] = {}
        for message in islice(read_all(*self._servers, *found.partition, max(start, position)), ENDS_LOOK_MAX):
            transaction, kinds = _frames_of(message)
            if FrameKind.COMMIT in kinds or FrameKind.ABORT in kinds:
                ended.setdefault(transaction, message.timestamp()[1])
        return EndedSince(len(ended), min(ended.values(), default=0))

    def _outcomes(self, topic: str, end: int) -> tuple[set[bytes], set[bytes]]:
        """Ids of the committed and the aborted transactions that a commit log tells of below an offset."""
        outcomes: dict[ControlKind | None, set[bytes]] = {kind: set() for kind in (*ControlKind, None)}
        [start] = self._admin.start_offsets([topic]).values()
        for message in read_all(*self._servers, topic, start=start):
            if (message.offset() or 0) >= end:
                break
            outcomes[peek_kind(message.value())].add(message.key() or b"")
        return outcomes[ControlKind.COMMIT], outcomes[ControlKind.ABORT]

    def _begun(self, partition: Partition) -> set[bytes]:
        """Ids of the transactions whose BEGIN frames stand in a buffer partition."""
        begun: set[bytes] = set()
        [start] = self._admin.start_offsets([partition]).values()
        for message in read_all(*self._servers, *partition, start):
            transaction, kinds = _frames_of(message)
            if FrameKind.BEGIN in kinds:
                begun.add(transaction)
        return begun


def _frames_of(message: Message) -> tuple[bytes, Collection[FrameKind]]:
    """The transaction that a message of a buffer is of, and the kinds of its frames; none if it can not be read."""
    header = unpack_header(message.key())
    if header is None:
        return b"", ()
    if header.kind is not FrameKind.BUNDLE:
        return header.transaction, (header.kind,)
    try:
        return header.transaction, {inner.kind for inner, _, _ in unpack_bundle(header, message.value() or b"")}
    except CorruptDataError:
        return header.transaction, ()
