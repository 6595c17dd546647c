"""The warm tail: what a standby has read of a group's buffers and commit log, so that a takeover reads only the rest.

A takeover folds the buffers from the latest snapshots on, and leaves out what has an outcome. A standby does the same
all the time, only in another order: an outcome can be read after the frames, and then takes the transaction out again.
What comes of it is the same state, because both logs only grow and ``read_committed`` shows nothing that is taken back;
so whatever a leader appended in a round that it did not commit, a standby has never seen.

One thing is not in the logs in time: which sessions of clients there are. A leader that takes over knows them all
before it reads, and does not hear the ends that older ones asked for. A standby may have heard one. If such a
transaction has no outcome yet, the tail is not used. Neither is it if it does not reach back as far as the snapshots,
or forward to them, or has followed other topics; then the takeover reads everything, as without a standby.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import takewhile

from rollbridge.model.buffer import BufferFold
from rollbridge.model.fences import Fences
from rollbridge.model.names import Partition
from rollbridge.model.replay import BufferPlaces
from rollbridge_coordinator.state.effects import LogSummary


class WarmTail:
    """The state of one standby for one group. Not thread-safe.

    Attributes:
        fold: What the frames give that were read, without transactions whose outcome was read.
        log_end: The next offset of the commit log to read.
        epochs: Leader epochs of the last frames that were read, by buffer partition.
    """

    def __init__(self, fold: BufferFold, terminated: dict[bytes, int], places: BufferPlaces, start: int) -> None:
        """Begin where a takeover would.

        Args:
            fold: An empty fold that drops the frames of the transactions in ``terminated``.
            terminated: An empty dictionary.
            places: The group's buffer partitions.
            start: From where on the commit log will be followed, see
                :func:`rollbridge.model.replay.log_start`.
        """
        # How many are open at a time depends on how far the commit log was read; the leader's bound is looked at later.
        # So with the memory that all of them take; whoever follows gives up beyond the leader's bound.
        self._held_bytes_max = fold.limits.held_bytes_max
        fold.limits = replace(fold.limits, open_transactions_max=sys.maxsize, held_bytes_max=sys.maxsize)
        fold.late = {}
        fold.fences = Fences(replaying=True)
        fold.positions = {partition: place.floor for partition, place in places.items()}
        self.fold = fold
        self.log_end = start
        self.epochs: dict[Partition, int] = {}
        self._places = dict(places)
        self._floors = dict(fold.positions)
        self._log_start = start
        self._terminated = terminated
        self._aborted: set[bytes] = set()
        self._begun: set[bytes] = set()
        for partition, place in places.items():
            for item in place.ongoing.transactions if place.ongoing is not None else ():
                fold.restore(place.stream, partition, item)
                self._begun.add(item.id)  # only those are written down that have a BEGIN record

    @property
    def log_start(self) -> int:
        """Outcomes from this offset of the commit log on are held."""
        return self._log_start

    @property
    def partitions(self) -> Collection[Partition]:
        """What is followed."""
        return self._places.keys()

    @property
    def is_full(self) -> bool:
        """Whether what is held takes more memory than a leader may hold."""
        return self.fold.held_bytes + self.fold.late_bytes > self._held_bytes_max

    def __len__(self) -> int:
        """Return the number of transactions that are held."""
        return len(self._terminated) + len(self.fold.open)

    def follow(self, said: LogSummary) -> None:
        """Take what the commit log says next."""
        for transaction, offset in said.terminated.items():
            self._terminated[transaction] = offset
            self.fold.conclude(transaction)
        self._aborted |= said.aborted
        self._begun |= said.begun
        self._begun.difference_update(said.terminated)
        self.log_end = max(self.log_end, said.end)

    def trim(self, places: BufferPlaces, start: int) -> bool:
        """Forget what new snapshots say; False if the group has other buffers by now, so that a new tail is needed.

        Args:
            places: As they are found now.
            start: From where on the commit log would be followed now.
        """
        if {item: place.topic_id for item, place in places.items()} != self._topic_ids():
            return False
        if any(place.floor < self._floors[item] or place.floor > self._read_to(item) for item, place in places.items()):
            return False
        if start < self._log_start:
            return False
        self._floors = {item: place.floor for item, place in places.items()}
        self._log_start = start
        old = list(takewhile(lambda item: self._terminated[item] < start, self._terminated))
        for transaction in old:
            del self._terminated[transaction]
            self._aborted.discard(transaction)
            self.fold.forget_late(transaction)
        self.fold.ages.tidy()
        return True

    def fits(self, topic_ids: Mapping[Partition, str], needed: Mapping[Partition, int], start: int) -> bool:
        """Return True if a takeover can go on from here.

        Args:
            topic_ids: Kafka's id of the buffer of each partition of the group.
            needed: From where on the takeover would fold each.
            start: From where on the commit log says everything that the snapshots do not.
        """
        known = self._topic_ids()
        if any(topic_ids.get(item) != topic_id for item, topic_id in known.items()):
            return False
        if len(topic_ids) > len(known) and self._log_start > start:
            return False
        return all(self._floors[item] <= needed[item] <= self._read_to(item) for item in known)

    def contradicts(self, fences: Fences) -> bool:
        """Return True if an end without an outcome was heard that the clients' sessions, now known, rule out.

        So it is, too, if a rolling commit is under way: whose word counted is on record for it.
        """
        return bool(fences.decided_before) or any(
            fences.holds_off(item.ended_by) or self.fold.fences.holds_off(item.ended_by)
            for item in (*self.fold.decided.values(), *self.fold.lines.held())
        )

    def hand_over(self, cold: BufferFold, since: int) -> LogSummary:
        """Make :attr:`fold` what a leader goes on with in place of an empty one; gives what the commit log has said.

        Args:
            cold: The leader's fold, into which nothing has been folded; the tail does not contradict its fences.
            since: The commit log holds no outcome of any transaction that began after an open one before this offset.
        """
        fold = self.fold
        fold.limits = cold.limits
        cold.fences.learn(fold.fences)
        fold.fences = cold.fences
        fold.positions = {**cold.positions, **fold.positions}
        for item in fold.open.values():
            item.log_position = since
        fold.ages.tidy()
        return LogSummary(self._terminated, frozenset(self._begun), frozenset(self._aborted), self.log_end)

    def _topic_ids(self) -> dict[Partition, str]:
        return {item: place.topic_id for item, place in self._places.items()}

    def _read_to(self, partition: Partition) -> int:
        return self.fold.positions.get(partition, 0)
