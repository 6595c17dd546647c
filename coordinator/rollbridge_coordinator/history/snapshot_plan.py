"""Snapshots of a leader's buffers: when one is due, and its content. Pure.

:mod:`rollbridge.buffer.replay` says where a takeover begins to read.

Source: PIP-196 (an index is updated after a number of transactions, or a time in which something changed).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from rollbridge.buffer.replay import OngoingTransactions, ongoing_name
from rollbridge.buffer.snapshots import (
    AbortedTransactions,
    Cut,
    SegmentCache,
    SegmentIndex,
    Snapshot,
    SnapshotSegment,
    partition_name,
)
from rollbridge.stream.names import Partition, snapshot_indexes_topic, snapshot_segments_topic, snapshot_topic
from rollbridge_coordinator.core.effects import LogSummary
from rollbridge_coordinator.core.metrics import SnapshotMetrics
from rollbridge_coordinator.core.settings import SnapshotSettings

RECORD_OVERHEAD_BYTES: Final = 256
"""Size of a segment without its ids and the name of its topic."""
SINGLE_BYTES_MAX: Final = 15 * 1024 * 1024
"""Most bytes of ids that a single snapshot takes: they must fit into one record."""

LOOK_MS: Final = 50
"""Interval between checks for due snapshots."""


class Needed(NamedTuple):
    """Offsets from which on a buffer and the commit log are needed."""

    position: int
    log_position: int


_WHOLE: Final = Needed(0, 0)


@dataclass(slots=True)
class PartitionSnapshots:
    """The snapshots of one buffer partition.

    Attributes:
        topic_id: Kafka's id of the buffer.
        generation: Generation of the last index written.
        log_end: Offset of the commit log below which aborts are in ``aborted``.
        log_start: First offset of the buffer.
        taken_ms: Time of the last one.
        changes: Its transactions that ended since.
        remains: Records that the next snapshot replaces, by topic and key: damaged ones, and those of the other format.
        is_other_format: True if the snapshot found is in the other format.
        is_restored: True if the takeover found a snapshot.
        needed: Offsets from which a new leader would read, by the last snapshot.
        spared: The same by the record of ongoing transactions; None without one, or if it saves nothing.
        ongoing_place: Place of the next such record, one of two keys.
        tried: Positions of buffer and commit log when one was last considered.
        frames: Messages that such a record must save to be worth it.
    """

    topic_id: str
    aborted: AbortedTransactions = field(default_factory=AbortedTransactions)
    generation: int = 0
    log_end: int = 0
    log_start: int = 0
    taken_ms: int = 0
    changes: int = 0
    remains: tuple[tuple[str, bytes], ...] = ()
    is_other_format: bool = False
    is_restored: bool = False
    needed: Needed = _WHOLE
    spared: Needed | None = None
    ongoing_place: int = 0
    tried: Needed = _WHOLE
    frames: int = 0

    def lag(self, position: int, log_position: int) -> int:
        """Return how much a new leader would read again, or has come since the lag could last not be reduced."""
        needed = self.spared or self.needed
        if self.spared is None and position <= needed.position:
            return 0  # no transaction is open whose outcome the commit log could hold
        tried = self.tried
        return max(
            position - max(needed.position, tried.position),
            log_position - max(needed.log_position, tried.log_position),
        )


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """A planned snapshot: first the segments, then the index that names them, then the deletions."""

    partition: Partition
    cuts: tuple[Cut, ...]
    segments: tuple[SnapshotSegment, ...]
    expired: tuple[SegmentIndex, ...]
    draft: Snapshot
    ids: bytes
    """Encoded ids of the unsealed snapshot."""

    def snapshot(self, offsets: Sequence[int]) -> Snapshot:
        """Return the index once the offsets of the segments are known."""
        added = tuple(item.index(offset) for item, offset in zip(self.segments, offsets, strict=True))
        kept = tuple(item for item in self.draft.indexes if item not in self.expired)
        return replace(self.draft, sequence_id=self.draft.sequence_id + len(self.segments), indexes=kept + added)


@dataclass(frozen=True, slots=True)
class Marks:
    """Positions up to which a partition and the commit log are covered; see ``snapshot_indexes.avsc``."""

    position: int
    max_read_position: int
    commit_log_position: int
    commit_log_end: int


class Snapshots:
    """The snapshots of a group's buffers."""

    def __init__(self, scope: str, settings: SnapshotSettings) -> None:
        self.settings: Final = settings
        self.segmented: Final = settings.transaction_buffer_segmented_snapshot_enabled
        self.replication_factor = -1
        self.indexes_topic: Final = snapshot_indexes_topic(scope)
        self.segments_topic: Final = snapshot_segments_topic(scope)
        self.single_topic: Final = snapshot_topic(scope)
        self.partitions: dict[Partition, PartitionSnapshots] = {}
        self.ongoing: list[OngoingTransactions] = []
        self.cache = SegmentCache(settings.transaction_buffer_snapshot_cache_bytes_max)
        self.topics: set[str] = set()
        self.summary = LogSummary({}, frozenset())
        self.warnings: list[str] = []
        self._next_look_ms = 0
        self.metrics = SnapshotMetrics()

    @property
    def index_topic(self) -> str:
        """Topic that is read first."""
        return self.indexes_topic if self.segmented else self.single_topic

    def of(self, partition: Partition, topic_id: str) -> PartitionSnapshots:
        """Return the snapshots of a partition."""
        known = self.partitions.get(partition)
        if known is None:
            known = self.partitions[partition] = PartitionSnapshots(topic_id)
        return known

    def due(self, now_ms: int, positions: Mapping[Partition, int], log_position: int) -> list[Partition]:
        """Return the partitions that are due for a snapshot.

        A partition is due at most ten times in the interval, however many transactions end: a takeover then has little
        to read again, while each snapshot lists all unsealed ones.

        Args:
            positions: Positions up to which the partitions have been folded.
            log_position: A recent position of the commit log.
        """
        if now_ms < self._next_look_ms:
            return []
        self._next_look_ms = now_ms + LOOK_MS
        transactions_max = self.settings.transaction_buffer_snapshot_max_transaction_count
        interval_ms = self.settings.transaction_buffer_snapshot_min_time_in_millis
        replay_max = self.settings.transaction_buffer_snapshot_replay_max
        due: list[Partition] = []
        for partition, known in self.partitions.items():
            elapsed_ms = now_ms - known.taken_ms
            if elapsed_ms < interval_ms // 10:
                continue
            if known.changes >= (1 if elapsed_ms >= interval_ms else transactions_max) or (
                known.lag(positions.get(partition, 0), log_position) > max(replay_max, known.frames)
            ):
                due.append(partition)
        return due

    def plan(self, partition: Partition, marks: Marks, controller_epoch: int, now_ms: int) -> SnapshotPlan | None:
        """Plan the snapshot of a partition; None if a single snapshot cannot hold it."""
        known = self.partitions[partition]
        aborted = known.aborted
        cuts: list[Cut] = []
        if self.segmented:
            size = self.settings.transaction_buffer_snapshot_segment_size
            room = max(size - RECORD_OVERHEAD_BYTES - len(partition[0]), 1)
            cuts = aborted.seal_all(room) if known.is_other_format else aborted.cuts(room)
        elif aborted.encoded.size > SINGLE_BYTES_MAX:
            self.warn(
                f"a single snapshot cannot hold the {len(aborted)} aborted transactions of "
                f"{partition_name(partition)}; none is written until segmented snapshots are enabled"
            )
            known.changes = 0
            return None
        segments = tuple(
            SnapshotSegment(
                partition,
                known.topic_id,
                aborted.sequence_id + place,
                controller_epoch,
                cut.first_position,
                cut.max_read_position,
                cut.aborts,
            )
            for place, cut in enumerate(cuts)
        )
        rest = aborted.without(cuts)
        draft = Snapshot(
            partition=partition,
            topic_id=known.topic_id,
            generation=known.generation + 1,
            controller_epoch=controller_epoch,
            taken_ms=now_ms,
            position=marks.position,
            max_read_position=marks.max_read_position,
            commit_log_position=marks.commit_log_position,
            commit_log_end=marks.commit_log_end,
            sequence_id=aborted.sequence_id,
            indexes=tuple(aborted.indexes),
            first_position=rest.first_position,
            aborts=tuple(rest.unsealed),
        )
        return SnapshotPlan(
            partition, tuple(cuts), segments, tuple(aborted.expired(known.log_start)), draft, rest.encoded.encode()
        )

    def taken(self, plan: SnapshotPlan, snapshot: Snapshot) -> None:
        """Note that a planned snapshot has become durable."""
        known = self.partitions[plan.partition]
        sealed = [item for item in snapshot.indexes if item.sequence_id >= plan.draft.sequence_id]
        known.aborted = known.aborted.without(plan.cuts, sealed)
        known.aborted.expire(plan.expired)
        for item in plan.expired:
            self.cache.drop(plan.partition, item.sequence_id)
        known.generation = snapshot.generation
        known.needed = Needed(snapshot.max_read_position, snapshot.commit_log_position)
        known.log_end = snapshot.commit_log_end
        known.taken_ms = snapshot.taken_ms
        known.changes = 0
        known.remains = ()
        known.is_other_format = False

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self.partitions.pop(partition, None)

    def is_of(self, key: bytes, partition: Partition) -> bool:
        """Return True if a record with this key, in any topic of snapshots, belongs to a partition."""
        number, _, name = key.partition(b"-")
        names = partition_name(partition), ongoing_name(partition)
        return number.isdigit() and name in (item.encode() for item in names)

    def warn(self, text: str) -> None:
        self.metrics.faults += 1
        self.warnings.append(text)
