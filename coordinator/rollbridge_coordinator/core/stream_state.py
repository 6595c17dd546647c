"""Streams as their leader knows them, the changes that their group's journal lacks, and their Kafka topics. Pure.

:mod:`rollbridge.metadata.journal` describes the journal.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from rollbridge.base.effects import Steps
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.buffer.frames import BUFFER_OVERHEAD_BYTES, buffer_partition
from rollbridge.commitlog.control import CONTROL_RECORD_BYTES_MAX
from rollbridge.errors import CorruptDataError, InvalidRequestError
from rollbridge.metadata import paths
from rollbridge.metadata.changes import StreamFault
from rollbridge.metadata.journal import DELETED, is_deleted, streams_of
from rollbridge.metadata.records import Mark, RetentionMarks, Truncation
from rollbridge.stream.config import RECORD_BYTES_MAX_DEFAULT, StreamConfig
from rollbridge.stream.config import StreamState as Lifecycle
from rollbridge.stream.epochs import EpochHistory, EpochRecord
from rollbridge.stream.late import LateNotes
from rollbridge.stream.names import GroupName, Partition, StreamName
from rollbridge.stream.segment_graph import Segment
from rollbridge_coordinator.core.bookkeeping import ByteCounter, marks_within
from rollbridge_coordinator.core.effects import ReadNodes, TopicCreation, read_children
from rollbridge_coordinator.streams.scaling_policy import ScalingState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LedStream:
    """A stream as its leader knows it."""

    config: StreamConfig
    history: EpochHistory
    removing: frozenset[SegmentId] = frozenset()
    """Removed segments whose topics may still exist."""
    marks: list[Mark] = field(default_factory=list)
    """Positions at which it may be truncated, oldest first."""
    late: LateNotes = field(default_factory=LateNotes)
    """Records behind the ends of its sealed segments."""
    counter: ByteCounter = field(default_factory=ByteCounter)
    scaling: ScalingState = field(default_factory=ScalingState)
    """State of scaling by load, if enabled."""
    looks_in_vain: int = 0
    """Looks at the topic that it has left, one after the other, that have not found it."""

    @property
    def is_on_topic(self) -> bool:
        """True if its active segments are the partitions of a topic that it has adopted."""
        return self.config.is_on_topic(self.history.active)

    @property
    def topics(self) -> int:
        """Number of topics of its segments, without an adopted one."""
        is_adopted = self.config.places.is_adopted
        return len(self.removing) + sum(not is_adopted(item) for item in self.history.stored())

    def partitions(self) -> Iterator[Partition]:
        for number in range(self.config.buffer_partitions):
            yield self.config.buffer_topic, number

    def partition_for(self, identifier: TransactionId) -> Partition:
        return self.config.buffer_topic, buffer_partition(identifier, self.config.buffer_partitions)

    def place_of(self, segment: SegmentId) -> Partition:
        return self.config.place(segment)

    def places_of(self, segments: Iterable[Segment]) -> dict[SegmentId, Partition]:
        of = self.config.places.of
        return {item.id: of(item.id) for item in segments}


@dataclass(slots=True)
class Doomed:
    """A stream that is being deleted."""

    config: StreamConfig
    has_begun: bool = False
    """True if this leader has deleted its buffer."""

    @property
    def work(self) -> str:
        return f"deletion {self.config.name}"

    def partitions(self) -> Iterator[Partition]:
        for number in range(self.config.buffer_partitions):
            yield self.config.buffer_topic, number


@dataclass(slots=True)
class Unled:
    """Stream that is not led, because its description or its buffer cannot be read."""

    config: StreamConfig
    """Its settings; from the journal, if unreadable in ZooKeeper."""
    is_lost: bool = False
    """True if its buffer is definitely lost, so that its open transactions can never be committed."""
    is_watched: bool = True
    """True if a check can show that it works again; otherwise only the next leader tries to read it."""


def load_stream(config: StreamConfig) -> Steps[LedStream]:
    """Read the state of a stream from ZooKeeper.

    Raises:
        CorruptDataError: the epochs of the stream are missing, or a node is damaged.
    """
    name = config.name
    numbers = yield from read_children(paths.epochs(name))
    records = yield from ReadNodes([f"{paths.epochs(name)}/{number}" for number in numbers])
    nodes = yield from ReadNodes([paths.truncation(name), paths.retention(name), paths.late(name)])
    raw, marks = nodes[paths.truncation(name)], nodes[paths.retention(name)]
    truncation = Truncation() if raw is None else Truncation.from_json(raw)
    epochs = {path: EpochRecord.from_json(value) for path, value in records.items() if value is not None}
    for path, record in epochs.items():
        if path != paths.epoch(name, record.epoch):
            raise CorruptDataError(f"{path} holds epoch {record.epoch}")
    try:
        history = truncation.history_of(epochs.values())
    except InvalidRequestError as fault:
        raise CorruptDataError(f"the epochs of stream {name} do not belong together: {fault}") from fault
    if history is None:
        raise CorruptDataError(f"the epochs of stream {name} are not in ZooKeeper: restore it from a backup")
    late = nodes[paths.late(name)]
    notes = LateNotes() if late is None else LateNotes.from_json(late)
    stream = LedStream(config, history, truncation.removing, late=notes)
    try:
        if marks is not None:
            stream.marks = marks_within(history, list(RetentionMarks.from_json(marks).marks))
    except CorruptDataError as fault:  # they are reset, and more is kept for a while
        logger.warning('retention.marks-damaged node=%s reason="%s"', paths.retention(name), fault)
    return stream


# Journal


@dataclass(slots=True)
class JournalState:
    """The journal in Kafka, and the parts of a leader's state known to be in it.

    States and records are replaced, never changed, so each is compared by identity, at almost no cost.
    """

    nodes: dict[str, bytes] = field(default_factory=dict)
    _seen: dict[str, tuple[object, ...]] = field(default_factory=dict)
    _epochs: dict[str, EpochRecord] = field(default_factory=dict)

    def changes(
        self, streams: Mapping[str, LedStream], faults: Mapping[str, StreamFault], unled: Collection[str]
    ) -> dict[str, bytes | None]:
        """Return the messages that bring the journal up to date with these streams; None is a deleted node.

        Its entries for streams that are not led are kept.
        """
        found: dict[str, bytes | None] = {}
        for name, stream in streams.items():
            fault = faults.get(name)
            state = _state_of(stream, fault)
            known = self._seen.get(name)
            if stream.config.state is Lifecycle.ACTIVE and (
                known is None or any(one is not other for one, other in zip(known, state, strict=True))
            ):
                found |= self._of(stream, fault)
        alive = {item.config.name for item in streams.values() if item.config.state is Lifecycle.ACTIVE}
        if len(alive) < len(self._seen) or not self._seen:
            for gone in streams_of(self.nodes).keys() - alive - set(map(StreamName.parse, unled)):
                found |= dict.fromkeys(self._below(gone), None)
                if not is_deleted(self.nodes[paths.stream(gone)]):
                    found[paths.stream(gone)] = DELETED
        return found

    def adopt(self, changes: Mapping[str, bytes | None]) -> None:
        """Note that the changes are durable."""
        for path, value in changes.items():
            if value is None:
                self.nodes.pop(path, None)
                self._epochs.pop(path, None)
            else:
                self.nodes[path] = value

    def saw(self, streams: Mapping[str, LedStream], faults: Mapping[str, StreamFault]) -> None:
        """Note that all of :meth:`changes` for these is durable."""
        active = {name: item for name, item in streams.items() if item.config.state is Lifecycle.ACTIVE}
        self._seen = {name: _state_of(item, faults.get(name)) for name, item in active.items()}
        for item in active.values():
            self._epochs |= {paths.epoch(item.config.name, record.epoch): record for record in item.history.records}

    def _of(self, stream: LedStream, fault: StreamFault | None) -> dict[str, bytes | None]:
        name, history = stream.config.name, stream.history
        wanted: dict[str, bytes | None] = {paths.stream(name): stream.config.to_json()}
        kept = {paths.epoch(name, record.epoch): record for record in history.records}
        for path, record in kept.items():
            if self._epochs.get(path) is not record:
                wanted[path] = record.to_json()
        if history.removed or history.foundation is not None:
            wanted[paths.truncation(name)] = Truncation(history.removed, stream.removing, history.foundation).to_json()
        if stream.late.segments or stream.late.revision:
            wanted[paths.late(name)] = stream.late.to_json()
        if fault is not None:
            wanted[paths.stream_fault(name)] = fault.to_json()
        old = [path for path in self._below(name) if path not in wanted and path not in kept]
        fresh = {path: value for path, value in wanted.items() if self.nodes.get(path) != value}
        return fresh | dict.fromkeys(old, None)

    def _below(self, name: StreamName) -> list[str]:
        return [path for path in self.nodes if path.startswith(f"{paths.stream(name)}/")]


def _state_of(stream: LedStream, fault: StreamFault | None) -> tuple[object, ...]:
    """Return the journal's content for a stream, as values that are replaced and never changed."""
    return stream.config, stream.history, stream.removing, stream.late, fault


# Topics


BATCH_OVERHEAD_BYTES: Final = 48_588
"""Difference between a segment's message limit and its record limit: batch header, record framing and our header."""
BUFFER_FILE_BYTES: Final = 256 * 1024 * 1024
"""Size of a log file: Kafka deletes truncated data by whole files, and never the file that it writes to."""
COMPACTED_SEGMENT_BYTES: Final = 16 * 1024 * 1024
COMPACTED_SEGMENT_MS: Final = 10 * 60 * 1000
"""Age of a segment after which it is closed: the newest segment of a compacted topic is not compacted."""

ANY_TIME: Final = {
    "message.timestamp.before.max.ms": str(2**63 - 1),
    "message.timestamp.after.max.ms": str(2**63 - 1),
}
"""Limits for event times, of the past and of the future. Kafka's default rejects times over an hour ahead."""

_KEEP: Final = {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "delete"}


def segment_bytes_max(config: StreamConfig) -> int:
    """Return ``max.message.bytes`` of a stream's segments: a batch with one record of the largest size fits.

    It is at least the broker's default: the limit holds for a whole batch, and both clients and leaders put many
    records into one.
    """
    return max(config.record_bytes_max, RECORD_BYTES_MAX_DEFAULT) + BATCH_OVERHEAD_BYTES


def segment_topic_spec(config: StreamConfig, segment: SegmentId) -> TopicCreation:
    """Return the topic of a segment: records keep their writers' timestamps, and the stream does the retention."""
    return TopicCreation(
        config.place(segment)[0],
        replication_factor=config.replication_factor,
        config={
            **_KEEP,
            **ANY_TIME,
            "max.message.bytes": str(segment_bytes_max(config)),
            "message.timestamp.type": "CreateTime",
        },
    )


def buffer_topic_spec(config: StreamConfig) -> TopicCreation:
    """Return the transaction buffer: leases run on the append time, which no client chooses; only we truncate it."""
    return TopicCreation(
        config.buffer_topic,
        partitions=config.buffer_partitions,
        replication_factor=config.replication_factor,
        config={
            **_KEEP,
            "max.message.bytes": str(segment_bytes_max(config) + BUFFER_OVERHEAD_BYTES),
            "message.timestamp.type": "LogAppendTime",
            "segment.bytes": str(BUFFER_FILE_BYTES),
        },
    )


def commit_log_topic_spec(group: GroupName, replication_factor: int) -> TopicCreation:
    """Return the commit log: never compacted, because its order is the commit order."""
    return TopicCreation(
        group.commit_log_topic,
        replication_factor=replication_factor,
        config={
            **_KEEP,
            "max.message.bytes": str(CONTROL_RECORD_BYTES_MAX),
            "message.timestamp.type": "LogAppendTime",
            "segment.bytes": str(BUFFER_FILE_BYTES),
        },
    )


def compacted_topic_spec(name: str, replication_factor: int) -> TopicCreation:
    """Return a topic that is compacted often, so that what a new leader reads of it stays small."""
    return TopicCreation(
        name,
        replication_factor=replication_factor,
        config={
            "cleanup.policy": "compact",
            "segment.bytes": str(COMPACTED_SEGMENT_BYTES),
            "segment.ms": str(COMPACTED_SEGMENT_MS),
            "min.cleanable.dirty.ratio": "0.1",
            "max.message.bytes": str(CONTROL_RECORD_BYTES_MAX),
            "message.timestamp.type": "LogAppendTime",
        },
    )
