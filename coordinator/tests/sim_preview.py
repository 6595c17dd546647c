"""A preview in the simulation: what it shows when it begins at the snapshots, and when it reads everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coordinator.tests.sim_log import listed
from coordinator.tests.sim_world import World, shard
from rollbridge.buffer.preview import PreviewStart
from rollbridge.buffer.replay import BufferPlace, LookUp, choose_ongoing, ongoing_keys
from rollbridge.buffer.snapshots import choose, index_keys, segment_of
from rollbridge.commitlog.control import ControlKind
from rollbridge.commitlog.outcomes import EndedIds
from rollbridge.errors import CorruptDataError, TruncatedError
from rollbridge.metadata import paths
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import (
    GroupName,
    Partition,
    StreamName,
    snapshot_indexes_topic,
    snapshot_segments_topic,
    snapshot_topic,
)

PREVIEW_DEFECTS = ("no-look-up", "deaf", "no-records", "hasty-records", "sure", "no-list")
"""Aborted transactions are not looked up, nor in the list; the commit log is not read; recorded transactions are not
put back, or without asking whether they have ended; the commit log is not read further back, by the second one neither;
what is written down of ended transactions is not read."""

Seen = tuple[bytes, Partition, int, int]
"""A shown frame: its transaction, and where it stands; or that a transaction is taken for open."""
NOWHERE: Partition = ("", -1)


class Previewer:
    """Opens previews of one stream."""

    def __init__(self, world: World, group: GroupName, stream: StreamName, defect: str = "") -> None:
        """Of a stream of the group, as it is now."""
        self.world = world
        self.group = group
        self.defect = defect
        self.log = world.topics[group.commit_log_topic]
        self.config = StreamConfig.from_json(world.nodes[paths.stream(stream)])
        self.name = str(stream)

    def shown_from_everything(self) -> set[Seen]:
        """What is shown if there are no snapshots, and nothing of the commit log was ever truncated; the truth."""
        return self._show(self._places({}), len(self.log.entries), 0, log_first=0)

    def shown_without_snapshots(self) -> set[Seen]:
        """What is shown if there are none, with what is left of the commit log."""
        return self._show(self._places({}), len(self.log.entries), self.log.start, self.log.start)

    def shown_from_snapshots(self) -> set[Seen]:
        """What is shown if the snapshots are used that there are, and everything is read if one is damaged."""
        scope = self.config.name.scope
        topics = [snapshot_indexes_topic(scope), snapshot_topic(scope)]
        rows = {topic: self.world.latest(topic) for topic in topics if topic in self.world.topics}
        try:
            return self._show(self._places(rows), len(self.log.entries), log_first=self.log.start)
        except CorruptDataError:
            return self.shown_without_snapshots()

    def _places(self, rows: Mapping[str, Mapping[bytes, bytes]]) -> dict[Partition, BufferPlace]:
        places = {}
        for number in range(self.config.buffer_partitions):
            partition = (self.config.buffer_topic, number)
            log = self.world.topics[shard(*partition)]
            at = [(topic, key) for topic in rows for key in index_keys(partition)]
            values = [rows[topic].get(key) for topic, key in at]
            topic_id = self.config.buffer_topic_id
            choice = choose(values, partition, topic_id, len(log.entries), len(self.log.entries))
            ongoing = None
            if choice.record is not None:
                kept = rows[at[choice.place][0]]
                ongoing = choose_ongoing([kept.get(key) for key in ongoing_keys(partition)], choice.record).record
            place = BufferPlace(topic_id, self.name, choice.record, ongoing, log.start, len(log.entries))
            if self.defect == "deaf" and place.snapshot is not None:
                deaf = replace(place.snapshot, commit_log_position=len(self.log.entries))
                place = replace(place, snapshot=deaf, ongoing=None)
            places[partition] = place
        return places

    def _show(
        self, places: Mapping[Partition, BufferPlace], log_end: int, log_begin: int | None = None, log_first: int = 0
    ) -> set[Seen]:
        if log_begin is None and any(place.snapshot is None for place in places.values()):
            log_begin = log_first
        start = PreviewStart(self.name, places, log_end, log_begin, lambda *_: None)
        known_from = max(start.log_begin, log_first)
        self._hear(start, known_from, log_end)
        for partition, place in places.items():
            for offset, appended_ms, (key, value) in self._messages(partition, place.floor):
                start.rehearse(partition, offset, appended_ms, key, value)
        if self.defect != "no-look-up":
            start.exclude(self._listed(start.doubts()))
        ended = EndedIds() if self.defect in ("no-list", "no-look-up") else listed(self.world, self.group)
        is_cut = start.is_cut(log_first)
        if is_cut and not ended.log_end and not self.defect:
            raise TruncatedError
        if is_cut or (start.is_unsure() and self.defect not in ("sure", "deaf")):
            self._hear(start, max(min(ended.log_end, known_from), log_first), known_from)
            start.exclude_ended(ended)
        if self.defect == "hasty-records":
            start._ended = {}
        fold, recorded = start.make(lambda _: False)
        seen: set[Seen] = set()
        for partition, place in places.items():
            if self.defect != "no-records" and partition in recorded:
                for offset, _, (key, value) in self._messages(partition, place.start):
                    for item, frame, batch in recorded[partition].take(offset, key, value):
                        assert len(batch) == frame.size
                        seen.add((item.id, partition, offset, frame.start))
            for offset, appended_ms, (key, value) in self._messages(partition, place.floor):
                for item, frame, _ in fold.fold(self.name, partition, offset, appended_ms, key, value):
                    seen.add((item.id, partition, offset, frame.start))
        return seen | {(item, NOWHERE, -1, -1) for item in fold.open}

    def _hear(self, start: PreviewStart, begin: int, end: int) -> None:
        for offset, record in self.log.visible():
            if begin <= offset < end:
                start.hear(record.transaction.bytes, ControlKind(record.kind))

    def _messages(self, partition: Partition, begin: int) -> list[tuple[int, int, tuple[bytes | None, bytes | None]]]:
        entries = self.world.topics[shard(*partition)].entries
        found = [(at, entry.appended_ms, entry.item) for at, entry in enumerate(entries) if at >= begin]
        return [item for item in found if item[2] is not None]

    def _listed(self, found: LookUp) -> set[bytes]:
        listed: set[bytes] = set()
        for partition, asked in found.segments.items():
            entries = self.world.topics[snapshot_segments_topic(self.config.name.scope)].entries
            for index, transactions in asked.items():
                item = entries[index.persistent_position].item
                value = None if item is None else item[1]
                segment = segment_of(index, partition, self.config.buffer_topic_id, value)
                listed.update(set(segment.aborts).intersection(transactions))
        return listed
