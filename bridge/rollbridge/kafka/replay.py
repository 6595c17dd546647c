"""Find where the reading of a stream's buffer begins, in the topics of snapshots, from their ends back.

A leader reads these topics once and to their beginning. A preview, which may be opened often, reads no further back
than it has to: the latest record of a key is the one that counts, so the first that is met going back is it. It stops
at a snapshot that leaves little to be read, and otherwise goes on, for a record of ongoing transactions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from rollbridge.errors import CorruptDataError, NotAuthorizedError, NotFoundError, RollbridgeError
from rollbridge.kafka.batches import LogRecord
from rollbridge.kafka.follower import Follower, read_up_to
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.ratelimit import limited
from rollbridge.kafka.snapshots import read_all, read_values
from rollbridge.model.ended import EndedIds, ended_key, parse_ended
from rollbridge.model.names import Partition, snapshot_indexes_topic, snapshot_segments_topic, snapshot_topic
from rollbridge.model.ongoing import choose_ongoing, ongoing_keys
from rollbridge.model.records import StreamConfig
from rollbridge.model.replay import BufferPlace, LookUp
from rollbridge.model.snapshots import Choice, SegmentCache, choose, index_keys, segment_of

logger = limited(logging.getLogger(__name__))

_STEP: Final = 32
"""Offsets of a topic of snapshots that are read at first; each further step back takes four times as many."""
_GROWTH: Final = 4
_LITTLE: Final = 1_000
"""Messages, of a buffer partition and of the commit log, that are rather read than looked for a record that spares
them."""
_TIMEOUT_S: Final = 10.0
_CACHE_BYTES: Final = 8 * 1024 * 1024
_BEYOND: Final = 2**63 - 1

Compacted = Mapping[bytes, LogRecord]
"""The latest records by key, tombstones included."""


class BufferSnapshots:
    """The snapshots of one stream's buffer, as far as they are needed. Not thread-safe.

    Whoever may not read them, or finds none, or only damaged ones, reads the whole buffer instead.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        security: Mapping[str, str],
        stream: StreamConfig,
        follower: Follower,
        offsets: LogOffsets,
    ) -> None:
        """Read the topics of snapshots, with a follower that follows nothing and is given back so."""
        self._servers = bootstrap_servers, security
        self._stream = stream
        self._follower = follower
        self._offsets = offsets
        self._partitions = [(stream.buffer_topic, number) for number in range(stream.buffer_partitions)]
        scope = stream.name.scope
        self._segments = snapshot_segments_topic(scope)
        self._cache = SegmentCache(_CACHE_BYTES)
        self._found: dict[str, Compacted] = {}
        self._chosen: dict[Partition, BufferPlace] = {}
        try:
            self._look_back(offsets.present([snapshot_indexes_topic(scope), snapshot_topic(scope)]))
        except RollbridgeError as fault:
            logger.info("the snapshots of %s cannot be read, so its whole buffer is: %s", stream.name, fault)
            self._found = {}
            self._chosen = {}

    def places(
        self, starts: Mapping[Partition, int], ends: Mapping[Partition, int], log_end: int
    ) -> dict[Partition, BufferPlace]:
        """Return what a takeover would begin with.

        Args:
            starts: First offset of each partition.
            ends: End of each, asked for after the snapshots were read and after that of the commit log.
            log_end: End of the commit log.
        """
        return {item: self._place(item, starts[item], ends[item], log_end) for item in self._partitions}

    def listed(self, found: LookUp) -> set[bytes]:
        """Return which of the transactions that are to be looked up the sealed segments list.

        Raises:
            CorruptDataError: a segment is damaged, or gone.
            KafkaUnavailableError, NotFoundError, NotAuthorizedError.
        """
        listed: set[bytes] = set()
        for partition, asked in found.segments.items():
            missing = [index for index in asked if self._cache.get(partition, index.sequence_id) is None]
            values = read_values(*self._servers, self._segments, [index.persistent_position for index in missing])
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

        Args:
            log_first: First offset of the commit log. What reaches less far leaves a gap, and is not used.

        Returns:
            None if there is no such record, it is damaged, or it may not be read.

        Raises:
            KafkaUnavailableError
        """
        group, scope = self._stream.group, self._stream.name.scope
        found: list[EndedIds] = []
        for topic in (snapshot_indexes_topic(scope), snapshot_topic(scope)):
            try:
                value = None
                for record in read_all(*self._servers, topic):
                    if record.key == ended_key(group):
                        value = record.value
                if value is not None and (said := parse_ended(value)).group == group:
                    found.append(EndedIds.of(said))
            except (CorruptDataError, NotFoundError, NotAuthorizedError) as fault:
                logger.info("which transactions of %s have ended cannot be read from %s: %s", group, topic, fault)
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
        choice = Choice(None)
        for some in (at[:1], at):
            values = [record.value for _, record in some]
            choice = choose(values, partition, stream.buffer_topic_id, end, log_end)
            if choice.snapshot is not None:
                break
        ongoing = None
        if choice.snapshot is not None:
            records = self._found[at[choice.place][0]]
            kept = [records[key].value for key in ongoing_keys(partition) if key in records]
            ongoing = choose_ongoing(kept, choice.snapshot).record
        return BufferPlace(stream.buffer_topic_id, str(stream.name), choice.snapshot, ongoing, start, end)

    def _look_back(self, topics: Iterable[str]) -> None:
        """Read the topics, in steps from their ends back, until little is left to be read of the buffer."""
        starts = self._offsets.first(topics, timeout_s=_TIMEOUT_S)
        lows = self._offsets.end(topics, Isolation.READ_COMMITTED, timeout_s=_TIMEOUT_S)
        firsts = self._offsets.first(self._partitions)
        ends = self._offsets.end(firsts, Isolation.READ_COMMITTED)
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
            step *= _GROWTH

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
            for _, record in read_up_to(self._follower, {(topic, 0): end}, _TIMEOUT_S):
                yield record
        finally:
            self._follower.leave((topic, 0))
