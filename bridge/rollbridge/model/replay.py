"""Where the reading of a transaction buffer begins: what the snapshots spare, and what has to be looked up in them.

A new leader, a standby and a preview work this out the same way. A buffer is folded from the max read position of its
snapshot on, or from the replay position of its record of ongoing transactions; the commit log is read from where the
outcomes of what is folded can stand. What seems open then may have been aborted long before: it is looked up in the
aborted transactions of the snapshot.

Source: PIP-196 (recovery reads from the max read position of the snapshot on; "check whether a transaction message is
sent by an aborted transaction").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollbridge.model.names import Partition
from rollbridge.model.ongoing import OngoingTransactions
from rollbridge.model.pieces import BufferedTransaction
from rollbridge.model.snapshots import SegmentIndex, Snapshot


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """A buffer partition as it is found: what a takeover would begin with.

    Attributes:
        topic_id: Kafka's id of the buffer.
        stream: ``scope/stream`` whose buffer it is.
        snapshot: The snapshot that would be used.
        ongoing: The record of open transactions that would be used with it.
        start, end: Its first offset, and the one after its last message.
    """

    topic_id: str
    stream: str
    snapshot: Snapshot | None
    ongoing: OngoingTransactions | None
    start: int
    end: int

    @property
    def floor(self) -> int:
        """Where reading begins."""
        if self.ongoing is not None:
            return max(self.ongoing.replay_position, self.start)
        return self.start if self.snapshot is None else max(self.snapshot.max_read_position, self.start)

    def log_floor(self, log_end: int) -> int:
        """Return the offset, in a log with this end, from which on the outcomes of later frames stand.

        The end must have been asked for before that of the buffer.
        """
        if self.snapshot is not None and self.ongoing is not None:
            return min(self.ongoing.commit_log_position, self.snapshot.commit_log_end, log_end)
        if self.end <= self.floor:
            return log_end
        return 0 if self.snapshot is None else min(self.snapshot.commit_log_position, log_end)


BufferPlaces = Mapping[Partition, BufferPlace]


def log_start(places: BufferPlaces, log_end: int, again: int) -> int:
    """Return the offset from which on the commit log has to be read."""
    return max(min((place.log_floor(log_end) for place in places.values()), default=log_end) - again, 0)


# Look-up of aborted transactions


class Aborted(Protocol):
    """Aborted transactions of one buffer partition: ids at hand, and which sealed segments can know others."""

    def lists(self, transaction: bytes) -> bool:
        """Return True if the unsealed snapshot lists a transaction."""

    def candidates(self, transaction: bytes, position: int | None = None) -> list[SegmentIndex]:
        """Return sealed segments that can know a transaction, of which a frame stands at ``position``, if given."""


@dataclass(slots=True)
class LookUp:
    """What is known at once of transactions that seem open, and what has to be loaded for the others.

    Attributes:
        aborted: Ids of those that the unsealed snapshots list.
        segments: For each buffer partition, the sealed segments to load, and whom each may list.
    """

    aborted: set[bytes] = field(default_factory=set)
    segments: dict[Partition, dict[SegmentIndex, list[bytes]]] = field(default_factory=dict)


def look_up(aborted: Mapping[Partition, Aborted], transactions: Iterable[BufferedTransaction]) -> LookUp:
    """Return where open transactions are to be looked up that may have been aborted before they were folded.

    A BEGIN frame in the buffer of another stream can come that late, and the commit log is not read so far back.
    """
    found = LookUp()
    for transaction in transactions:
        asked: list[tuple[Partition, SegmentIndex]] = []
        for partition, offset in transaction.first_offsets.items():
            known = aborted.get(partition)
            if known is None:
                continue
            if known.lists(transaction.id):
                found.aborted.add(transaction.id)
                break
            asked += [(partition, index) for index in known.candidates(transaction.id, offset)]
        else:
            for partition, index in asked:
                found.segments.setdefault(partition, {}).setdefault(index, []).append(transaction.id)
    return found
