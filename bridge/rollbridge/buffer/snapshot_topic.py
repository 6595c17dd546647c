"""Read snapshots of transaction buffers from Kafka, for previews and the doctor, and verify them against the logs.

The functions for compacted topics return committed records only; an open native transaction of another producer bounds
what can be read for now. The end to read to is asked of the leader beforehand; :func:`.read_up_to` says why.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, NamedTuple

from rollbridge.base.deadlines import Backoff, Deadline
from rollbridge.base.logs import limited
from rollbridge.buffer.frames import FrameKind, is_foreign, unpack_bundle, unpack_header
from rollbridge.buffer.replay import BufferPlace, LookUp, OngoingTransactions, choose_ongoing, ongoing_keys
from rollbridge.buffer.snapshots import Choice, SegmentCache, Snapshot, choose, index_keys, segment_of
from rollbridge.commitlog.control import ControlKind, peek_kind
from rollbridge.commitlog.outcomes import EndedIds, ended_key, parse_ended
from rollbridge.errors import CorruptDataError, NotAuthorizedError, NotFoundError, RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.fetch_plan import FetchError
from rollbridge.kafka.follower import Follower, read_up_to
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.records import LogRecord
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import Partition, snapshot_indexes_topic, snapshot_segments_topic, snapshot_topic

logger = limited(logging.getLogger(__name__))

_BYTES: Final = 4 * 1024 * 1024
"""Bytes fetched at once."""
_BEYOND: Final = 2**63 - 1
_TIMEOUT_S: Final = 30.0
_BEHIND_OTHERS_S: Final = 5.0
_PAUSE_S: Final = 0.05


class LatestRecord(NamedTuple):
    """Latest record of a key."""

    offset: int
    value: bytes


def read_latest(kafka: KafkaClient, topic: str) -> dict[bytes, LatestRecord]:
    """Return the latest record of each key that has no tombstone, in the order of offsets.

    Raises:
        KafkaUnavailableError, NotFoundError, NotAuthorizedError
    """
    found: dict[bytes, LatestRecord] = {}
    for record in read_all(kafka, topic):
        key, value = record.key or b"", record.value
        found.pop(key, None)
        if value is not None:
            found[key] = LatestRecord(record.offset, value)
    return found


def read_values(kafka: KafkaClient, topic: str, offsets: Iterable[int]) -> dict[int, bytes | None]:
    """Return the values at some offsets; None where the record was deleted or compacted away.

    Waits for a while for records behind another producer's open native transaction.

    Raises:
        KafkaUnavailableError, NotFoundError, NotAuthorizedError
    """
    found: dict[int, bytes | None] = dict.fromkeys(offsets)
    if not found:
        return found
    end = _end(kafka, topic)
    deadline = Deadline(_BEHIND_OTHERS_S)
    backoff = Backoff(_PAUSE_S)
    while max(found) >= end and not deadline.passed():
        backoff.sleep(deadline)
        end = _end(kafka, topic)
    with closing(_follower(kafka)) as follower:
        for offset in sorted(item for item in found if item < end):
            follower.follow((topic, 0), offset)
            for _, record in read_up_to(follower, {(topic, 0): offset + 1}, _TIMEOUT_S, _skip):
                found[record.offset] = record.value
    return found


def read_all(kafka: KafkaClient, topic: str, partition: int = 0, start: int = 0) -> Iterator[LogRecord]:
    """Iterate over the committed records of a partition, from an offset or where it begins now to its present end.

    Raises:
        KafkaUnavailableError, NotFoundError, NotAuthorizedError
        CorruptDataError: While iterating: a batch does not decompress, or does not parse.
    """
    end = _end(kafka, topic, partition)
    start = max(start, kafka.offsets.first([(topic, partition)])[topic, partition])
    if start >= end:
        return
    with closing(_follower(kafka)) as follower:
        follower.follow((topic, partition), start)
        for _, record in read_up_to(follower, {(topic, partition): end}, _TIMEOUT_S, _skip):
            yield record


def _end(kafka: KafkaClient, topic: str, partition: int = 0) -> int:
    place = topic, partition
    return kafka.offsets.end([place], Isolation.READ_COMMITTED, timeout_s=_TIMEOUT_S)[place]


def _follower(kafka: KafkaClient, isolation: Isolation = Isolation.READ_COMMITTED) -> Follower:
    return kafka.follow(isolation, name="rollbridge-snapshots", max_bytes=_BYTES)


def _skip(trouble: FetchError) -> int:
    """End the reading of a partition whose next records were truncated."""
    logger.info("snapshot_read.ended_early reason=%s", trouble.fault)
    return _BEYOND


SEGMENTED: Final = "segmented"
SINGLE: Final = "single"
NO_FORMAT: Final = "none"
ENDS_LOOK_MAX: Final = 2_000
"""Messages of a buffer to search for ends that a snapshot does not cover yet."""
STRANGERS_LOOK: Final = 50
"""Newest messages of a buffer that are always checked for being frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    """Snapshot of one buffer partition.

    Attributes:
        stream: Configuration of the stream.
        partition: Topic and partition of the buffer.
        format: ``segmented``, ``single``, or ``none``.
        snapshot: Snapshot that a new leader would use; None if it would read the whole buffer.
        index_bytes: Size of its record.
        buffer_end: End offset of the buffer partition.
        ongoing: Open transactions that a new leader would not read again; None without a record that helps.
        faults: Faults of records that cannot be used.
        segments_exist: True if the topic of sealed segments exists.
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
        """Number of aborted transactions in the snapshot."""
        if self.snapshot is None:
            return 0
        return len(self.snapshot.aborts) + sum(item.aborts for item in self.snapshot.indexes)

    @property
    def has_all_segments(self) -> bool:
        """False if the snapshot names segments whose topic does not exist."""
        return self.segments_exist or self.snapshot is None or not self.snapshot.indexes

    @property
    def tail(self) -> int:
        """Number of messages of the buffer that a new leader would read."""
        if self.ongoing is not None:
            return self.buffer_end - self.ongoing.replay_position
        return self.buffer_end - (0 if self.snapshot is None else self.snapshot.max_read_position)


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of comparing a snapshot with the buffer and the commit log.

    Attributes:
        partition: Topic and partition of the buffer.
        aborted: Number of aborted transactions in the snapshot.
        checked: Number of transactions of the buffer that were compared.
        faults: Faults found; empty if there are none.
    """

    partition: Partition
    aborted: int
    checked: int
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndedSince:
    """Lower bound on the number of ended transactions, and the time of the first request, ms since 1970.

    ``foreign`` is the number of messages there, or among the newest, that are no frames; ``last_foreign`` the newest.
    """

    count: int
    first_ms: int
    foreign: int = 0
    last_foreign: LogRecord | None = None


class SnapshotReader:
    """Reader of the buffer snapshots of one scope; needs Read on its topics."""

    def __init__(self, kafka: KafkaClient, scope: str) -> None:
        """Read the indexes, once.

        Raises:
            KafkaUnavailableError, NotAuthorizedError
        """
        self._kafka = kafka
        self._segments = snapshot_segments_topic(scope)
        topics = {SEGMENTED: snapshot_indexes_topic(scope), SINGLE: snapshot_topic(scope)}
        self._known = kafka.topics.topic_ids([*topics.values(), self._segments])
        self._indexes: dict[str, Mapping[bytes, LatestRecord]] = {
            kind: read_latest(kafka, topic) if topic in self._known else {} for kind, topic in topics.items()
        }

    def of(self, stream: StreamConfig) -> Iterator[BufferSnapshot]:
        """Iterate over the snapshots of a stream, one for each partition of its buffer."""
        return self.of_all([stream])

    def of_all(self, streams: Sequence[StreamConfig]) -> Iterator[BufferSnapshot]:
        """Iterate over the snapshots of streams, whose buffers are asked for together."""
        buffers = {stream.name: list(_buffers(stream)) for stream in streams}
        logs = {(stream.group.commit_log_topic, 0) for stream in streams}
        ends = self._kafka.offsets.end([*chain.from_iterable(buffers.values()), *logs]) if streams else {}
        for stream in streams:
            yield from self._of(stream, buffers[stream.name], ends)

    def _of(
        self, stream: StreamConfig, partitions: Sequence[Partition], ends: Mapping[Partition, int]
    ) -> Iterator[BufferSnapshot]:
        log = stream.group.commit_log_topic, 0
        for partition in partitions:
            places = [(kind, key) for kind in self._indexes for key in index_keys(partition)]
            found = [self._indexes[kind].get(key) for kind, key in places]
            values = [None if item is None else item.value for item in found]
            choice = choose(values, partition, stream.buffer_topic_id, ends[partition], ends[log])
            used = choice.record is not None
            ongoing: Choice[OngoingTransactions] = Choice(None)
            if choice.record is not None:
                records = [self._indexes[places[choice.place][0]].get(key) for key in ongoing_keys(partition)]
                ongoing = choose_ongoing([item and item.value for item in records], choice.record)
            yield BufferSnapshot(
                stream=stream,
                partition=partition,
                format=places[choice.place][0] if used else NO_FORMAT,
                snapshot=choice.record,
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
            values = read_values(self._kafka, self._segments, offsets)
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

    def ended_since(self, found: Sequence[BufferSnapshot]) -> list[EndedSince]:
        """Count the transactions whose end was requested behind each snapshot, among the next messages of its buffer.

        All buffers are read together, none for more than a bounded number of messages.
        """
        if not found:
            return []
        counts = {item.partition: _Ends(0 if item.snapshot is None else item.snapshot.position) for item in found}
        first = self._kafka.offsets.first(counts)
        ranges = {}
        for item in found:
            start = max(first[item.partition], min(counts[item.partition].position, item.buffer_end - STRANGERS_LOOK))
            if start < item.buffer_end:
                ranges[item.partition] = start, min(item.buffer_end, start + ENDS_LOOK_MAX + STRANGERS_LOOK)
        with closing(_follower(self._kafka, Isolation.READ_UNCOMMITTED)) as follower:
            for partition, (start, _) in ranges.items():
                follower.follow(partition, start)
            ends = {partition: end for partition, (_, end) in ranges.items()}
            for partition, message in read_up_to(follower, ends, _TIMEOUT_S, _skip):
                counts[partition].note(message)
        return [counts[item.partition].told() for item in found]

    def _outcomes(self, topic: str, end: int) -> tuple[set[bytes], set[bytes]]:
        """Return the ids of the committed and of the aborted transactions in a commit log below an offset."""
        outcomes: dict[ControlKind | None, set[bytes]] = {kind: set() for kind in (*ControlKind, None)}
        [start] = self._kafka.offsets.first([topic]).values()
        for message in read_all(self._kafka, topic, start=start):
            if message.offset >= end:
                break
            outcomes[peek_kind(message.value)].add(message.key or b"")
        return outcomes[ControlKind.COMMIT], outcomes[ControlKind.ABORT]

    def _begun(self, partition: Partition) -> set[bytes]:
        """Return the ids of the transactions with a BEGIN frame in a buffer partition."""
        begun: set[bytes] = set()
        [start] = self._kafka.offsets.first([partition]).values()
        for message in read_all(self._kafka, *partition, start):
            transaction, kinds = _frames_of(message)
            if FrameKind.BEGIN in kinds:
                begun.add(transaction)
        return begun


class _Ends:
    """Counts of one buffer."""

    def __init__(self, position: int) -> None:
        self.position = position
        self._ended: dict[bytes, int] = {}
        self._foreign = 0
        self._last_foreign: LogRecord | None = None

    def note(self, message: LogRecord) -> None:
        transaction, kinds = _frames_of(message)
        if message.offset >= self.position and (FrameKind.COMMIT in kinds or FrameKind.ABORT in kinds):
            self._ended.setdefault(transaction, message.timestamp)
        if is_foreign(message.key, message.value):
            self._foreign, self._last_foreign = self._foreign + 1, message

    def told(self) -> EndedSince:
        return EndedSince(len(self._ended), min(self._ended.values(), default=0), self._foreign, self._last_foreign)


def _buffers(stream: StreamConfig) -> Iterator[Partition]:
    return ((stream.buffer_topic, number) for number in range(stream.buffer_partitions))


def _frames_of(message: LogRecord) -> tuple[bytes, Collection[FrameKind]]:
    """Return a buffer message's transaction and the kinds of its frames; no kinds if it cannot be parsed."""
    header = unpack_header(message.key)
    if header is None:
        return b"", ()
    if header.kind is not FrameKind.BUNDLE:
        return header.transaction, (header.kind,)
    try:
        return header.transaction, {inner.kind for inner, _, _ in unpack_bundle(header, message.value or b"")}
    except CorruptDataError:
        return header.transaction, ()


# Find where the reading of a stream's buffer begins, in the topics of snapshots, from their ends back.
#
# A leader reads these topics once and to their beginning. A preview, which may be opened often, reads no further back
# than it has to: the latest record of a key is the one that counts, so the first that is met going back is it. It stops
# at a snapshot that leaves little to be read, and otherwise continues, for a record of ongoing transactions.


_STEP: Final = 32
"""Offsets of a topic of snapshots that are read at first; each further step back takes four times as many."""
_LITTLE: Final = 1_000
"""Messages, of a buffer partition and of the commit log, that are rather read than looked for a record that spares
them."""
_STEP_S: Final = 10.0
_CACHE_BYTES: Final = 8 * 1024 * 1024


Compacted = Mapping[bytes, LogRecord]
"""The latest records by key, tombstones included."""


class BufferSnapshots:
    """Snapshots of one stream's buffer, as far as they are needed. Not thread-safe.

    Without the right to read them, without any, or with damaged ones only, the whole buffer is read instead.
    """

    def __init__(
        self,
        kafka: KafkaClient,
        stream: StreamConfig,
        follower: Follower,
    ) -> None:
        """Read the topics of snapshots, with a follower that follows nothing and is given back so."""
        self._kafka = kafka
        self._stream = stream
        self._follower = follower
        self._partitions = [(stream.buffer_topic, number) for number in range(stream.buffer_partitions)]
        scope = stream.name.scope
        self._segments = snapshot_segments_topic(scope)
        self._cache = SegmentCache(_CACHE_BYTES)
        self._found: dict[str, Compacted] = {}
        self._chosen: dict[Partition, BufferPlace] = {}
        try:
            self._look_back(kafka.offsets.present([snapshot_indexes_topic(scope), snapshot_topic(scope)]))
        except RollbridgeError as fault:
            logger.info("preview.no_snapshots stream=%s: reading the whole buffer: %s", stream.name, fault)
            self._found, self._chosen = {}, {}

    def places(
        self, starts: Mapping[Partition, int], ends: Mapping[Partition, int], log_end: int
    ) -> dict[Partition, BufferPlace]:
        """Return what a takeover would begin with.

        ``ends`` are asked for after the snapshots were read and after ``log_end``, that of the commit log.
        """
        return {item: self._place(item, starts[item], ends[item], log_end) for item in self._partitions}

    def listed(self, found: LookUp) -> set[bytes]:
        """Return the transactions to be looked up that the sealed segments list.

        Raises:
            CorruptDataError: a segment is damaged, or gone.
            KafkaUnavailableError, NotFoundError, NotAuthorizedError.
        """
        listed: set[bytes] = set()
        for partition, asked in found.segments.items():
            missing = [index for index in asked if self._cache.get(partition, index.sequence_id) is None]
            values = read_values(self._kafka, self._segments, [index.persistent_position for index in missing])
            for index, transactions in asked.items():
                ids = self._cache.get(partition, index.sequence_id)
                if ids is None:
                    value = values.get(index.persistent_position)
                    segment = segment_of(index, partition, self._stream.buffer_topic_id, value)
                    ids = self._cache.put(partition, index.sequence_id, segment.aborts)
                listed.update(ids.intersection(transactions))
        return listed

    def ended(self, log_first: int) -> EndedIds | None:
        """Return what is written down of the group's ended transactions, with their outcomes below some offset.

        A record that reaches less far than ``log_first``, the first offset of the commit log, leaves a gap, and is not
        used. None if there is no such record, it is damaged, or it may not be read.

        Raises:
            KafkaUnavailableError
        """
        group, scope = self._stream.group, self._stream.name.scope
        found: list[EndedIds] = []
        for topic in (snapshot_indexes_topic(scope), snapshot_topic(scope)):
            try:
                value = None
                for record in read_all(self._kafka, topic):
                    if record.key == ended_key(group):
                        value = record.value
                if value is not None and (said := parse_ended(value)).group == group:
                    found.append(EndedIds.of(said))
            except (CorruptDataError, NotFoundError, NotAuthorizedError) as fault:
                logger.info("preview.ended_unread group=%s topic=%s: %s", group, topic, fault)
        newest = max(found, key=lambda item: item.log_end, default=None)
        return newest if newest is not None and newest.log_end >= log_first else None

    def _place(self, partition: Partition, start: int, end: int, log_end: int) -> BufferPlace:
        chosen = self._chosen.get(partition)
        snapshot = None if chosen is None else chosen.snapshot
        if chosen is not None and (
            snapshot is None or (snapshot.position <= end and snapshot.commit_log_end <= log_end)
        ):
            return replace(chosen, start=start, end=end)
        return self._choose(partition, start, end, log_end)

    def _choose(self, partition: Partition, start: int, end: int, log_end: int) -> BufferPlace:
        stream = self._stream
        at = [
            (topic, records[key])
            for topic, records in self._found.items()
            for key in index_keys(partition)
            if key in records
        ]
        # The newest first: a large one takes a while to decode, and the others are not needed if it is usable.
        at.sort(key=lambda item: item[1].timestamp, reverse=True)
        choice: Choice[Snapshot] = Choice(None)
        for some in (at[:1], at):
            values = [record.value for _, record in some]
            choice = choose(values, partition, stream.buffer_topic_id, end, log_end)
            if choice.record is not None:
                break
        ongoing = None
        if choice.record is not None:
            records = self._found[at[choice.place][0]]
            kept = [records[key].value for key in ongoing_keys(partition) if key in records]
            ongoing = choose_ongoing(kept, choice.record).record
        return BufferPlace(stream.buffer_topic_id, str(stream.name), choice.record, ongoing, start, end)

    def _look_back(self, topics: Iterable[str]) -> None:
        """Read the topics, in steps from their ends back, until little is left to be read of the buffer."""
        starts = self._kafka.offsets.first(topics, timeout_s=_STEP_S)
        lows = self._kafka.offsets.end(topics, Isolation.READ_COMMITTED, timeout_s=_STEP_S)
        firsts = self._kafka.offsets.first(self._partitions)
        ends = self._kafka.offsets.end(firsts, Isolation.READ_COMMITTED)
        used = [item for item in firsts if firsts[item] < ends[item]]
        self._found = {topic: {} for topic in lows}
        step = _STEP
        while not self._is_enough(used) and any(starts[topic] < low for topic, low in lows.items()):
            for topic, low in lows.items():
                begin = max(low - step, starts[topic])
                newer = self._found[topic]
                older = {item.key or b"": item for item in self._read(topic, begin, low)}
                self._found[topic] = {**older, **newer}
                lows[topic] = begin
            step *= 4

    def _is_enough(self, used: Iterable[Partition]) -> bool:
        """Tell whether each partition has a snapshot, with which little was left to be read when it was taken."""
        self._chosen.clear()  # there may be others by now
        for partition in used:
            place = self._chosen[partition] = self._choose(partition, 0, _BEYOND, _BEYOND)
            snapshot = place.snapshot
            if snapshot is None:
                return False
            behind = snapshot.position - place.floor
            if behind > 0 or place.ongoing is not None:
                behind = max(behind, snapshot.commit_log_end - place.log_floor(_BEYOND))
            if behind > _LITTLE:
                return False
        return True

    def _read(self, topic: str, begin: int, end: int) -> Iterator[LogRecord]:
        if begin >= end:
            return
        self._follower.follow((topic, 0), begin)
        try:
            for _, record in read_up_to(self._follower, {(topic, 0): end}, _STEP_S):
                yield record
        finally:
            self._follower.leave((topic, 0))
