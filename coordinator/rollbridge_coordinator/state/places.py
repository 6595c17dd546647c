"""Places: where a takeover begins to read, by what is found of each buffer partition. Pure.

A new leader and a standby go by the same, so that what the one has followed is what the other needs.

Source: PIP-196 (recovery reads from the max read position of the snapshot on).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollbridge.model.buffered import Partition
from rollbridge.model.ongoing import OngoingTransactions
from rollbridge.model.snapshots import Snapshot


@dataclass(frozen=True, slots=True)
class Place:
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
        """What became of transactions with frames from there on stands from here on, in a log with this end.

        The end must have been asked for before that of the buffer.
        """
        if self.snapshot is not None and self.ongoing is not None:
            return min(self.ongoing.commit_log_position, self.snapshot.commit_log_end, log_end)
        if self.end <= self.floor:
            return log_end
        return 0 if self.snapshot is None else min(self.snapshot.commit_log_position, log_end)


Places = Mapping[Partition, Place]


def log_start(places: Places, log_end: int, again: int) -> int:
    """From where on the commit log has to be read."""
    return max(min((place.log_floor(log_end) for place in places.values()), default=log_end) - again, 0)
