"""Streams as their leader knows them, what their group's journal does not have yet, and their Kafka topics. Pure.

:mod:`rollbridge.model.journal` describes the journal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from rollbridge.model import paths
from rollbridge.model.changes import StreamFault
from rollbridge.model.control import CONTROL_RECORD_BYTES_MAX
from rollbridge.model.epochs import EpochHistory, EpochRecord
from rollbridge.model.frames import BUFFER_OVERHEAD_BYTES, buffer_partition
from rollbridge.model.ids import SegmentId, TransactionId
from rollbridge.model.journal import DELETED, is_deleted, streams_of
from rollbridge.model.late import LateNotes
from rollbridge.model.names import GroupName, Partition, StreamName
from rollbridge.model.records import RECORD_BYTES_MAX_DEFAULT, Mark, StreamConfig, Truncation
from rollbridge.model.records import StreamState as Lifecycle
from rollbridge.model.segment_graph import Segment
from rollbridge_coordinator.state.effects import TopicCreation
from rollbridge_coordinator.state.scaling import ScalingState
from rollbridge_coordinator.state.upkeep import ByteCounter


@dataclass(slots=True)
class LedStream:
    """A stream as its leader knows it."""

    config: StreamConfig
    history: EpochHistory
    removing: frozenset[SegmentId] = frozenset()
    """Segments that were removed and whose topics may still be there."""
    marks: list[Mark] = field(default_factory=list)
    """Where it may be truncated, oldest first."""
    late: LateNotes = field(default_factory=LateNotes)
    """What came in behind the ends of its sealed segments."""
    counter: ByteCounter = field(default_factory=ByteCounter)
    scaling: ScalingState = field(default_factory=ScalingState)
    """What is known of its load, if it is scaled by that."""

    @property
    def is_on_topic(self) -> bool:
        """True if its active segments are the partitions of a topic that it has adopted."""
        return self.config.is_on_topic(self.history.active)

    @property
    def topics(self) -> int:
        """How many topics its segments have, without one that it has adopted."""
        is_adopted = self.config.places.is_adopted
        return len(self.removing) + sum(not is_adopted(item) for item in self.history.stored())

    def partitions(self) -> Iterator[Partition]:
        """Return the partitions of its buffer."""
        for number in range(self.config.buffer_partitions):
            yield self.config.buffer_topic, number

    def partition_for(self, identifier: TransactionId) -> Partition:
        """Return the partition of its buffer for a transaction's id."""
        return self.config.buffer_topic, buffer_partition(identifier, self.config.buffer_partitions)

    def place_of(self, segment: SegmentId) -> Partition:
        """Return the partition that a segment is."""
        return self.config.place(segment)

    def places_of(self, segments: Iterable[Segment]) -> dict[SegmentId, Partition]:
        """Return the partition that each segment is."""
        of = self.config.places.of
        return {item.id: of(item.id) for item in segments}


@dataclass(slots=True)
class Doomed:
    """A stream that is being deleted."""

    config: StreamConfig
    has_begun: bool = False
    """Whether this leader has seen to it that its buffer is gone."""

    @property
    def work(self) -> str:
        """What its deletion is called in the housekeeping."""
        return f"deletion {self.config.name}"

    def partitions(self) -> Iterator[Partition]:
        """Return the partitions that its buffer had."""
        for number in range(self.config.buffer_partitions):
            yield self.config.buffer_topic, number


@dataclass(slots=True)
class Unled:
    """A stream that is not led, because its leader cannot read what it is, or what is in its buffer."""

    config: StreamConfig
    """Its settings; as the journal has them, if they cannot be read in ZooKeeper."""
    is_lost: bool = False
    """Whether its buffer is gone for certain, so that nothing of its open transactions can ever be committed."""
    is_watched: bool = True
    """Whether a look can tell that it is well again; if not, only the next leader tries to read it."""


# Journal


@dataclass(slots=True)
class JournalState:
    """The journal as it stands in Kafka, and what of a leader's state is known to stand there.

    States and records are never changed but replaced, so each is compared by identity: looking costs next to nothing.
    """

    nodes: dict[str, bytes] = field(default_factory=dict)
    _seen: dict[str, tuple[object, ...]] = field(default_factory=dict)
    _epochs: dict[str, EpochRecord] = field(default_factory=dict)

    def changes(
        self, streams: Mapping[str, LedStream], faults: Mapping[str, StreamFault], unled: Collection[str]
    ) -> dict[str, bytes | None]:
        """Return what to write so that the journal says what these streams are; None is a node that is gone.

        What it says of streams that are not led stays.
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
        """Note that all of what :meth:`changes` has said of these is durable."""
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
    """Return all that the journal says of a stream, as values that are replaced and never changed."""
    return stream.config, stream.history, stream.removing, stream.late, fault


# Topics


BATCH_OVERHEAD_BYTES: Final = 48_588
"""How much larger a segment's message limit is than its records: batch header, record framing and our header."""
BUFFER_FILE_BYTES: Final = 256 * 1024 * 1024
"""Kafka frees the disk of what was truncated file by file, and never the file that it writes to."""
COMPACTED_SEGMENT_BYTES: Final = 16 * 1024 * 1024
COMPACTED_SEGMENT_MS: Final = 10 * 60 * 1000
"""What is in the newest segment of a compacted topic is not compacted."""

ANY_TIME: Final = {
    "message.timestamp.before.max.ms": str(2**63 - 1),
    "message.timestamp.after.max.ms": str(2**63 - 1),
}
"""Users give event times, of the past and of the future. Kafka's default takes none that is over an hour ahead."""

_KEEP: Final = {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "delete"}


def segment_bytes_max(config: StreamConfig) -> int:
    """Return ``max.message.bytes`` of a stream's segments: a batch with one record of the largest size fits.

    However small the records are, it is not less than the broker's default: the limit holds for a whole batch, and
    both clients and leaders put many records into one.
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


def terminated_topic_spec(group: GroupName, replication_factor: int) -> TopicCreation:
    """Return the topic of terminated transactions."""
    return _compacted_topic_spec(group.terminated_topic, replication_factor)


def snapshot_topic_spec(name: str, replication_factor: int) -> TopicCreation:
    """Return a topic of snapshots."""
    return _compacted_topic_spec(name, replication_factor)


def _compacted_topic_spec(name: str, replication_factor: int) -> TopicCreation:
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
