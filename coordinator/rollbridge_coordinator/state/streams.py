"""Streams as their leader knows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollbridge.model.buffered import BufferedTransaction, Partition
from rollbridge.model.epochs import EpochHistory, EpochRecord
from rollbridge.model.frames import buffer_partition
from rollbridge.model.identifiers import SegmentId, TransactionId
from rollbridge.model.late import LateNotes
from rollbridge.model.records import Mark, StreamConfig
from rollbridge_coordinator.state.retention import ByteCounter


@dataclass(slots=True)
class StreamState:
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

    def partitions(self) -> Iterator[Partition]:
        """The partitions of its buffer."""
        for number in range(self.config.buffer_partitions):
            yield self.config.buffer_topic, number

    def partition_of(self, transaction: BufferedTransaction) -> Partition:
        """The partition of its buffer that holds a transaction's frames."""
        return self.partition_for(transaction.transaction_id)

    def partition_for(self, identifier: TransactionId) -> Partition:
        """The same for a transaction's id."""
        return self.config.buffer_topic, buffer_partition(identifier, self.config.buffer_partitions)

    def topic_of(self, segment: SegmentId) -> str:
        """The topic of a segment."""
        return self.config.name.segment_topic(segment)

    def topics_of(self, record: EpochRecord) -> dict[int, str]:
        """The topic of each segment of an epoch, by segment number."""
        return {item.id.number: self.config.name.segment_topic(item.id) for item in record.segments}


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
        """The partitions that its buffer had."""
        for number in range(self.config.buffer_partitions):
            yield self.config.buffer_topic, number
