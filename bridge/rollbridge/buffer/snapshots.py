"""Snapshot records of transaction buffers: sealed segments, and the index with the unsealed snapshot.

A record's Kafka value is one byte with the version of its format, the CRC-32 of what follows, and Avro. A record of
another version, or one that fails a check, is not used; readers fall back to an earlier record or to the buffer itself.

:class:`AbortedTransactions` holds a partition's aborted transactions: sealed segments, and one unsealed snapshot. A
segment is cut off when the unsealed snapshot has outgrown it, and never changes again. Memory holds only the unsealed
snapshot; sealed segments are loaded on demand into a bounded cache. A transaction may write long before it is aborted,
so the position of a frame is a lower bound only; the positions and ids that a segment covers tell which ones can know a
transaction.

Source: PIP-196. Differs: the two latest indexes of a partition are kept, under keys that take turns; a position is an
offset; an index entry says which transaction ids its segment can hold; Pulsar's
``SnapshotSegmentAbortedTxnProcessorImpl`` holds all ids in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Final, Generic

import rollbridge_schemas
from rollbridge.base.avro import encode_long
from rollbridge.base.errors import CorruptDataError, InvalidRequestError
from rollbridge.base.mapper import Mapper, Record, StoredAs, _sealed, unseal
from rollbridge.stream.names import Partition
from rollbridge_schemas import Datum

COUNTER_SHOWN_MAX: Final = (1 << 63) - 1
_LOW_BITS: Final = 64
_LOW_MASK: Final = (1 << _LOW_BITS) - 1
_LOW_HALF: Final = 1 << (_LOW_BITS - 1)
Age = tuple[int, int]


_NO_IDS: Final[Mapping[str, list[int]]] = {"epochs": [], "counters_high": [], "counters_low": []}
"""Takes a byte for each array."""


def _ids_of(datum: Datum) -> tuple[bytes, ...]:
    """Return the ids in a record."""
    ids: list[bytes] = []
    low = 0
    try:
        for epoch, high, difference in zip(*(datum[name] for name in _NO_IDS), strict=True):
            low = low + difference & _LOW_MASK
            ids.append((epoch << 112 | high << _LOW_BITS | low).to_bytes(16, "big"))
    except (ValueError, OverflowError) as fault:
        raise InvalidRequestError(f"it lists something other than a transaction id: {fault}") from fault
    return tuple(ids)


_IDS: Final = StoredAs(write=lambda _: dict(_NO_IDS), read=_ids_of)
"""Their place is kept; :func:`_pack` fills it in."""
_TOPIC_PARTITION: Final = StoredAs(fields=("topic", "partition"))


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """Index entry of a sealed segment: see ``schemas/rollbridge_schemas/snapshot_indexes.avsc``."""

    sequence_id: int
    persistent_position: int
    first_position: int
    max_read_position: int
    aborts: int
    lowest_counter: int
    highest_counter: int


@dataclass(frozen=True, slots=True)
class SnapshotSegment:
    """A sealed segment: ids of aborted transactions, 16 bytes each, in the order in which they were aborted."""

    partition: Annotated[Partition, _TOPIC_PARTITION]
    topic_id: str
    sequence_id: int
    controller_epoch: int
    first_position: int
    max_read_position: int
    aborts: Annotated[tuple[bytes, ...], _IDS]

    @property
    def key(self) -> bytes:
        return segment_key(self.partition, self.sequence_id)

    def index(self, persistent_position: int) -> SegmentIndex:
        """Return its entry in the index once its offset is known."""
        shown = [shown_counter(item) for item in self.aborts]
        return SegmentIndex(
            self.sequence_id,
            persistent_position,
            self.first_position,
            self.max_read_position,
            len(self.aborts),
            min(shown),
            max(shown),
        )

    def encode(self) -> bytes:
        """Return its Kafka value."""
        return _pack(_SEGMENTS, self, EncodedIds(self.aborts).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a buffer partition; see ``schemas/rollbridge_schemas/snapshot_indexes.avsc``."""

    partition: Annotated[Partition, _TOPIC_PARTITION]
    topic_id: str
    generation: int
    controller_epoch: int
    taken_ms: int
    position: int
    max_read_position: int
    commit_log_position: int
    commit_log_end: int
    sequence_id: int
    indexes: tuple[SegmentIndex, ...]
    first_position: int
    aborts: Annotated[tuple[bytes, ...], _IDS]

    @property
    def key(self) -> bytes:
        """Its Kafka key, which the generation after the next takes over."""
        return index_keys(self.partition)[self.generation % 2]

    @property
    def age(self) -> Age:
        """Sort key of snapshots, newest first."""
        return age_of(self.controller_epoch, self.generation)

    def encode(self, ids: bytes | None = None) -> bytes:
        """Return its Kafka value; ``ids`` are the aborted transactions as :class:`EncodedIds` gives them."""
        return _pack(_INDEXES, self, EncodedIds(self.aborts).encode() if ids is None else ids)


_SEGMENTS: Final = Mapper(SnapshotSegment, "snapshot_segment")
_INDEXES: Final = Mapper(Snapshot, "snapshot_indexes")


def age_of(controller_epoch: int, generation: int) -> Age:
    """Return a sort key for records, newest first. A later leader may have restarted the generations."""
    return -controller_epoch, -generation


def partition_name(partition: Partition) -> str:
    """Return ``topicName`` of a key: topic and partition of a buffer."""
    return f"{partition[0]}-partition-{partition[1]}"


def segment_key(partition: Partition, sequence_id: int) -> bytes:
    """Return the Kafka key of a sealed segment."""
    return f"{sequence_id}-{partition_name(partition)}".encode()


def index_keys(partition: Partition) -> tuple[bytes, bytes]:
    """Return the two Kafka keys of a partition's indexes, of even and of odd generations."""
    name = partition_name(partition)
    return f"0-{name}".encode(), f"1-{name}".encode()


def decode_segment(value: bytes | None) -> SnapshotSegment:
    """Return the sealed segment in a record.

    Raises:
        CorruptDataError: there is none, or of a version that is not known here, or it is damaged.
    """
    return unseal(_SEGMENTS, value)


def decode_snapshot(value: bytes | None) -> Snapshot:
    """Return the snapshot in a record.

    Raises:
        CorruptDataError: there is none, or of a version that is not known here, or it is damaged.
    """
    found = unseal(_INDEXES, value)
    sequence = [item.sequence_id for item in found.indexes]
    in_order = sequence == sorted({item for item in sequence if item < found.sequence_id})
    if found.max_read_position > found.position or not in_order:
        raise CorruptDataError("a snapshot contradicts itself: its positions or sequence ids are out of order")
    return found


def segment_of(index: SegmentIndex, partition: Partition, topic_id: str, value: bytes | None) -> SnapshotSegment:
    """Return the segment that an index entry means, from the record at its position.

    Raises:
        CorruptDataError: missing, damaged, or another segment.
    """
    segment = decode_segment(value)
    if (
        segment.partition != partition
        or segment.topic_id != topic_id
        or segment.index(index.persistent_position) != (index)
    ):
        raise CorruptDataError(
            f"the record at offset {index.persistent_position} is segment {segment.sequence_id} of "
            f"{partition_name(segment.partition)}, not segment {index.sequence_id} of {partition_name(partition)}"
        )
    return segment


@dataclass(frozen=True, slots=True)
class Choice(Generic[Record]):
    """Chosen record of a partition, its place, and the faults of unusable ones by place."""

    record: Record | None
    place: int = -1
    faults: Mapping[int, str] = field(default_factory=dict)


def choose(
    found: Iterable[bytes | None], partition: Partition, topic_id: str, buffer_end: int, commit_log_end: int
) -> Choice[Snapshot]:
    """Return the newest usable one of a partition's snapshots, in either format.

    A later leader's is newer than an earlier one's, whatever their generations, which it may have restarted.

    Args:
        found: Values of the records with the partition's keys; None where there is none.
        partition: Topic and partition of the buffer.
        topic_id: Kafka's id of that topic.
        buffer_end: Its end offset: a snapshot beyond it is of another buffer.
        commit_log_end: The end offset of the commit log.
    """
    best: Snapshot | None = None
    used = -1
    snapshots, faults = decode_all(found, decode_snapshot)
    for place, snapshot in snapshots.items():
        if snapshot.partition != partition or snapshot.topic_id != topic_id:
            faults[place] = f"it is of another topic, with id {snapshot.topic_id}"
        elif snapshot.position > buffer_end or snapshot.commit_log_end > commit_log_end:
            faults[place] = "it knows more than the buffer and the commit log hold"
        elif best is None or snapshot.age < best.age:
            best, used = snapshot, place
    return Choice(best, used, faults)


def decode_all(
    found: Iterable[bytes | None], decode: Callable[[bytes], Record]
) -> tuple[dict[int, Record], dict[int, str]]:
    """Return the records in some values by place, and what is wrong with those that hold none; None is left out."""
    records: dict[int, Record] = {}
    faults: dict[int, str] = {}
    for place, value in enumerate(found):
        if value is not None:
            try:
                records[place] = decode(value)
            except CorruptDataError as fault:
                faults[place] = str(fault)
    return records, faults


def shown_counter(transaction: bytes) -> int:
    """Return what an index shows of an id: its count, without the number that all ids of a group have."""
    return min(int.from_bytes(transaction[8:], "big"), COUNTER_SHOWN_MAX)


class EncodedIds:
    """Ids of transactions as a record holds them: three Avro arrays, each of which grows at its end.

    The unsealed snapshot is written again and again with a few more ids; so only these have to be encoded.
    """

    __slots__ = ("_count", "_epochs", "_high", "_low", "_low_before")

    def __init__(self, transactions: Iterable[bytes] = ()) -> None:
        self._count = 0
        self._epochs, self._high, self._low = bytearray(), bytearray(), bytearray()
        self._low_before = 0
        for transaction in transactions:
            self.append(transaction)

    def append(self, transaction: bytes) -> None:
        """Add an id."""
        low = int.from_bytes(transaction[8:], "big")
        self._epochs += encode_long(int.from_bytes(transaction[:2], "big"))
        self._high += encode_long(int.from_bytes(transaction[4:8], "big"))
        # Modulo 2^64, as a signed number.
        self._low += encode_long((low - self._low_before + _LOW_HALF & _LOW_MASK) - _LOW_HALF)
        self._low_before = low
        self._count += 1

    @property
    def size(self) -> int:
        """Bytes that the ids take in a record."""
        return len(self._epochs) + len(self._high) + len(self._low)

    def encode(self) -> bytes:
        """Return the three arrays."""
        end = encode_long(0)
        count = encode_long(self._count) if self._count else b""
        return b"".join(part for items in (self._epochs, self._high, self._low) for part in (count, items, end))


def _pack(mapper: Mapper[Record], record: Record, ids: bytes) -> bytes:
    return _sealed(rollbridge_schemas.codec(mapper.schema).encode(mapper.to_datum(record))[: -len(_NO_IDS)] + ids)


# Aborted transactions of a buffer partition.

ID_BYTES_IN_MEMORY: Final = 100
"""About what an id takes in a set."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Ids that become a sealed segment, with what they cover."""

    aborts: tuple[bytes, ...]
    first_position: int
    max_read_position: int


@dataclass(slots=True)
class AbortedTransactions:
    """Aborted transactions of one partition; shrinks only by :meth:`expire`.

    Attributes:
        indexes: Sealed segments by sequence id.
        sequence_id: Of the next segment.
        unsealed: Ids that are in no sealed segment, in order, with the first and last position of their frames.
    """

    indexes: list[SegmentIndex] = field(default_factory=list)
    sequence_id: int = 0
    unsealed: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    encoded: EncodedIds = field(default_factory=EncodedIds)
    """The ids of ``unsealed`` as they are written."""
    first_position: int = 0
    """Lower bound of the offsets of their transactions' frames."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> AbortedTransactions:
        """Return what a snapshot says."""
        found = cls(list(snapshot.indexes), snapshot.sequence_id)
        for transaction in snapshot.aborts:
            found.add(transaction, snapshot.first_position, snapshot.position)
        return found

    def __len__(self) -> int:
        return len(self.unsealed) + sum(item.aborts for item in self.indexes)

    def add(self, transaction: bytes, first_position: int, position: int) -> None:
        """Add an aborted transaction whose frames are in ``first_position..position-1``."""
        if transaction not in self.unsealed:
            self.first_position = min(self.first_position, first_position) if self.unsealed else first_position
            self.encoded.append(transaction)
            self.unsealed[transaction] = (first_position, position)

    def cuts(self, segment_bytes: int) -> list[Cut]:
        """Return what is to be sealed: full segments from the oldest id on, while more is left than fits into one."""
        if self.encoded.size <= segment_bytes:
            return []
        cuts: list[Cut] = []
        ids: list[bytes] = []
        taken = EncodedIds()
        for transaction in self.unsealed:
            taken.append(transaction)
            if ids and taken.size > segment_bytes:
                cuts.append(self._cut(ids))
                ids, taken = [], EncodedIds([transaction])
            ids.append(transaction)
        return cuts

    def seal_all(self, segment_bytes: int) -> list[Cut]:
        """Return the same for everything: how a single snapshot becomes the first segment, or segments."""
        cuts = self.cuts(segment_bytes)
        rest = list(self.unsealed)[sum(len(item.aborts) for item in cuts) :]
        return [*cuts, self._cut(rest)] if rest else cuts

    def without(self, cuts: Sequence[Cut], indexes: Sequence[SegmentIndex] = ()) -> AbortedTransactions:
        """Return what is left when the cuts, the oldest ids, have become the segments that the entries describe."""
        if not cuts:
            return self
        sequence_id = max([self.sequence_id, *(item.sequence_id + 1 for item in indexes)])
        left = AbortedTransactions([*self.indexes, *indexes], sequence_id)
        gone = sum(len(item.aborts) for item in cuts)
        for transaction, (first, last) in islice(self.unsealed.items(), gone, None):
            left.add(transaction, first, last)
        return left

    def expired(self, log_start: int) -> list[SegmentIndex]:
        """Return sealed segments none of whose transactions has a frame left in a buffer that begins at ``log_start``.

        One whose last position is just ``log_start`` may still get a late BEGIN frame there, and stays.
        """
        return [item for item in self.indexes if item.max_read_position < log_start]

    def expire(self, gone: Iterable[SegmentIndex]) -> None:
        """Forget segments that have been deleted."""
        dead = set(gone)
        self.indexes = [item for item in self.indexes if item not in dead]

    def candidates(self, transaction: bytes, position: int | None = None) -> list[SegmentIndex]:
        """Return sealed segments that may list a transaction that has a frame at ``position``, if given."""
        counter = shown_counter(transaction)
        return [
            item
            for item in self.indexes
            if item.lowest_counter <= counter <= item.highest_counter
            and (position is None or item.first_position <= position)
        ]

    def _cut(self, ids: Sequence[bytes]) -> Cut:
        spans = [self.unsealed[item] for item in ids]
        return Cut(tuple(ids), min(first for first, _ in spans), max(last for _, last in spans))


class SegmentCache:
    """LRU cache of sealed segments, bounded in memory; shared by all partitions of a group."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._sets: OrderedDict[tuple[Partition, int], frozenset[bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, partition: Partition, sequence_id: int) -> frozenset[bytes] | None:
        """Return the ids of a segment if they are here."""
        found = self._sets.get((partition, sequence_id))
        if found is not None:
            self._sets.move_to_end((partition, sequence_id))
        return found

    def put(self, partition: Partition, sequence_id: int, aborts: Iterable[bytes]) -> frozenset[bytes]:
        """Keep the ids of a segment, drop the least recently used ones, and return the ids as a set."""
        ids = frozenset(aborts)
        self.drop(partition, sequence_id)
        self._sets[partition, sequence_id] = ids
        self._bytes += len(ids) * ID_BYTES_IN_MEMORY
        while self._bytes > self._bytes_max and len(self._sets) > 1:
            self.drop(*next(iter(self._sets)))
        return ids

    def drop(self, partition: Partition, sequence_id: int) -> None:
        self._bytes -= len(self._sets.pop((partition, sequence_id), ())) * ID_BYTES_IN_MEMORY
