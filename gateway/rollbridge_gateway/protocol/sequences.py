"""Kafka's rules of duplicates and gaps, per topic and partition of one producer, and how they survive a gateway.

A producer numbers its records per partition, from 0 in each epoch. A batch is new if it begins where the last one
ended; it is a duplicate if it is exactly one of the last five that were taken; anything else is a gap. Another epoch
than before begins again, with 0. Unlike a broker, a gateway that takes a producer over knows nothing of a partition to
which its open transaction has not written. There 0 comes first with transactions v2, of which each has an epoch of its
own; with v1 any number may, as a producer keeps its epoch and its numbering from one transaction to the next.

Taken batches are recorded in the notes of savepoints: a note per partition, of a few bytes, in the transaction that has
written to it. So notes are bounded by the partitions of a transaction, not by those of a producer's life. A takeover
continues from the last savepoint, with exactly these numbers, so what a producer sends again is recognised if it
counts, and written again if it does not.

::

    note  "s" topic "/" partition  ->  epoch 2, then for each of the last batches: first 4, last 4   (big-endian)

Source: Kafka's ``ProducerStateEntry`` and ``ProducerAppendInfo``, which keep five batches for five requests in flight.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

KEPT: Final = 5
"""Batches of a partition that are recognised when they come again: as many as a client has in flight."""
SEQUENCE_MAX: Final = (1 << 31) - 1
NOTE: Final = "s"
_EPOCH: Final = struct.Struct(">h")
_BATCH: Final = struct.Struct(">ii")

TopicPartition = tuple[str, int]


class SequenceVerdict(Enum):
    """Verdict on a batch."""

    NEW = "new"
    DUPLICATE = "duplicate"
    """It was taken before; it is answered as it was then."""
    GAP = "gap"
    """Something is missing before it: OUT_OF_ORDER_SEQUENCE_NUMBER; nothing is written."""


class Taken(NamedTuple):
    """Sequence numbers of a batch that was taken, the last one included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SeenBatches:
    """Taken batches of one partition.

    Attributes:
        epoch: Producer epoch of the batches.
        batches: The last ones that were taken, oldest first.
    """

    epoch: int
    batches: tuple[Taken, ...] = ()

    def with_batch(self, batch: Taken) -> SeenBatches:
        return SeenBatches(self.epoch, (*self.batches, batch)[-KEPT:])


def last_of(first: int, records: int) -> int:
    """Return the sequence number of a batch's last record; 0 follows 2^31 - 1."""
    return first + records - 1 & SEQUENCE_MAX


def following(sequence: int) -> int:
    """Return the sequence number after one."""
    return sequence + 1 & SEQUENCE_MAX


def judge(seen: SeenBatches | None, epoch: int, first: int, records: int, *, v2: bool) -> SequenceVerdict:
    """Decide whether a batch is new, a duplicate, or behind a gap.

    Args:
        seen: Taken batches of its partition; None if there are none.
        epoch: Its producer epoch, which is not below that of the producer.
        first: Its first sequence number.
        records: Number of its records, 1 or more.
        v2: True if each transaction has an epoch of its own.
    """
    if seen is None or not seen.batches:
        return SequenceVerdict.NEW if first == 0 or not v2 else SequenceVerdict.GAP
    if epoch != seen.epoch:
        return SequenceVerdict.NEW if first == 0 else SequenceVerdict.GAP
    batch = Taken(first, last_of(first, records))
    if batch in seen.batches:
        return SequenceVerdict.DUPLICATE
    return SequenceVerdict.NEW if first == following(seen.batches[-1].last) else SequenceVerdict.GAP


def encode(seen: SeenBatches) -> bytes:
    """Return the value of a note."""
    return _EPOCH.pack(seen.epoch) + b"".join(_BATCH.pack(*batch) for batch in seen.batches)


def decode(value: bytes) -> SeenBatches:
    """Return the content of a note.

    Raises:
        ValueError: it is none.
    """
    if len(value) < _EPOCH.size or (len(value) - _EPOCH.size) % _BATCH.size:
        raise ValueError(f"a note of {len(value)} bytes is not one of sequence numbers")
    batches = tuple(Taken(*item) for item in _BATCH.iter_unpack(value[_EPOCH.size :]))
    if len(batches) > KEPT or any(min(batch) < 0 for batch in batches):
        raise ValueError(f"a note of {len(batches)} batches, or of negative numbers, is not one of sequence numbers")
    return SeenBatches(_EPOCH.unpack_from(value)[0], batches)


@dataclass(slots=True)
class Sequences:
    """Sequence numbers of one producer, of all partitions that it has written to. Not thread-safe.

    Attributes:
        seen: By topic and partition.
        fresh: Partitions that have changed since notes were last taken.
    """

    seen: dict[TopicPartition, SeenBatches] = field(default_factory=dict)
    fresh: set[TopicPartition] = field(default_factory=set)

    def judge(self, where: TopicPartition, epoch: int, first: int, records: int, *, v2: bool) -> SequenceVerdict:
        """Judge a batch; see :func:`judge`."""
        return judge(self.seen.get(where), epoch, first, records, v2=v2)

    def take(self, where: TopicPartition, epoch: int, first: int, records: int) -> None:
        """Note a new batch, which was written."""
        seen = self.seen.get(where)
        if seen is None or seen.epoch != epoch:
            seen = SeenBatches(epoch)
        self.seen[where] = seen.with_batch(Taken(first, last_of(first, records)))
        self.fresh.add(where)

    def notes(self) -> dict[str, bytes]:
        """Return the notes of what has changed since the last ones."""
        found = {note_of(where): encode(self.seen[where]) for where in sorted(self.fresh)}
        self.fresh.clear()
        return found

    @classmethod
    def restored(cls, notes: Mapping[str, bytes]) -> Sequences:
        """Return what the notes of a savepoint say; others than ours are skipped.

        Raises:
            ValueError: one of ours is none.
        """
        found = cls()
        for where, value in _ours(notes.items()):
            found.seen[where] = decode(value)
        return found


def note_of(where: TopicPartition) -> str:
    """Return the name of a partition's note."""
    return f"{NOTE}{where[0]}/{where[1]}"


def _ours(notes: Iterable[tuple[str, bytes]]) -> Iterable[tuple[TopicPartition, bytes]]:
    for name, value in notes:
        topic, slash, partition = name[len(NOTE) :].rpartition("/")
        if name.startswith(NOTE) and slash and partition.isdecimal():
            yield (topic, int(partition)), value
