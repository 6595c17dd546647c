"""A standby in the simulation: it follows the logs at its own pace, and whoever takes over next goes on from there."""

from __future__ import annotations

import random
from collections.abc import Callable

from coordinator.tests.sim_world import World, shard
from rollbridge.buffer.fold import BufferFold
from rollbridge.buffer.owners import Fences
from rollbridge.buffer.replay import BufferPlace, choose_ongoing, log_start, ongoing_keys
from rollbridge.buffer.snapshots import choose, index_keys
from rollbridge.commitlog.control import ControlKind
from rollbridge.metadata import paths
from rollbridge.stream.config import StreamConfig
from rollbridge.stream.names import GroupName, StreamName, snapshot_indexes_topic, snapshot_topic
from rollbridge_coordinator.core.effects import LogSummary
from rollbridge_coordinator.history.takeover import WarmTail

STANDBY_DEFECTS = ("dirty-standby", "deaf-standby", "credulous-standby")
"""It follows rounds that were not committed; misses that transactions were aborted; hears whoever asks for an end."""
AGAIN = 20
"""So many outcomes before the snapshots are read, of some hundred: a transaction may have ended before its BEGIN was
read in all of its buffers, and it may be sent twice."""


class CredulousTail(WarmTail):
    """A defect: an end counts, whatever sessions there are by now."""

    def contradicts(self, fences: Fences) -> bool:
        """Not what it promises."""
        return False


class Standby:
    """Follows the logs of a group; now and then it loses everything, or looks at the snapshots again."""

    def __init__(
        self, world: World, name: GroupName, streams: list[StreamName], fold: Callable[[dict[bytes, int]], BufferFold]
    ) -> None:
        self.world = world
        self.name = name
        self.streams = streams
        self.fold = fold
        self.tail: WarmTail | None = None

    def step(self, clock_ms: int, rng: random.Random) -> None:
        """Read on a little, in one of the logs."""
        chance = rng.random()
        if chance < 0.01:
            self.tail = None
        elif chance < 0.04 or (self.tail is None and chance < 0.2):
            self._look()
        elif chance < 0.6:
            self._read_buffers(clock_ms, rng)
        else:
            self._read_log(rng)

    def take(self) -> WarmTail | None:
        """What a new leader goes on with; the standby begins anew."""
        tail, self.tail = self.tail, None
        return tail

    def _look(self) -> None:
        """Begin where the snapshots end, or forget what they say."""
        log_end = len(self.world.topics[self.name.commit_log_topic].entries)
        scope = self.name.scope
        topics = [snapshot_indexes_topic(scope), snapshot_topic(scope)]
        indexes = [self.world.latest(item) for item in topics if item in self.world.topics]
        places = {}
        for name in self.streams:
            raw = self.world.nodes.get(paths.stream(name))
            if raw is None or name.buffer_topic() not in self.world.topics:
                return
            config = StreamConfig.from_json(raw)
            for number in range(config.buffer_partitions):
                log, partition = self.world.topics[shard(name.buffer_topic(), number)], (name.buffer_topic(), number)
                end = len(log.entries)
                values = [rows.get(key) for rows in indexes for key in index_keys(partition)]
                choice = choose(values, partition, config.buffer_topic_id, end, log_end)
                ongoing = None
                if choice.record is not None:
                    rows = indexes[choice.place // 2]
                    ongoing = choose_ongoing([rows.get(key) for key in ongoing_keys(partition)], choice.record).record
                places[partition] = BufferPlace(
                    config.buffer_topic_id, str(name), choice.record, ongoing, log.start, end
                )
        start = max(log_start(places, log_end, AGAIN), self.world.topics[self.name.commit_log_topic].start)
        if self.tail is None or not self.tail.trim(places, start):
            terminated: dict[bytes, int] = {}
            kind = CredulousTail if "credulous-standby" in self.world.faults else WarmTail
            self.tail = kind(self.fold(terminated), terminated, places, start)

    def _read_buffers(self, clock_ms: int, rng: random.Random) -> None:
        if self.tail is None:
            return
        for (topic, number), start in list(self.tail.fold.positions.items()):
            log = self.world.topics[shard(topic, number)]
            if start < log.start:
                self.tail = None
                return
            for offset, entry in enumerate(log.entries[start : start + rng.randint(0, 150)], start):
                stream = str(StreamName.parse(topic.removesuffix(".transaction-buffer").replace(".", "/")))
                self.tail.fold.fold(stream, (topic, number), offset, entry.appended_ms, *entry.item)

    def _read_log(self, rng: random.Random) -> None:
        if self.tail is None:
            return
        log = self.world.topics[self.name.commit_log_topic]
        if self.tail.log_end < log.start:
            self.tail = None
            return
        rows = log.visible(self.tail.log_end)
        if "dirty-standby" in self.world.faults:
            entries = enumerate(log.entries[self.tail.log_end :], self.tail.log_end)
            rows = [(offset, entry.item) for offset, entry in entries if entry.item is not None]
        begun: set[bytes] = set()
        ended: dict[bytes, int] = {}
        aborted: set[bytes] = set()
        end = self.tail.log_end
        for offset, record in rows[: rng.randint(0, 150)]:
            end = offset + 1
            if record.kind is ControlKind.BEGIN:
                begun.add(record.transaction.bytes)
                continue
            if record.kind is ControlKind.ABORT:
                if "deaf-standby" in self.world.faults:
                    continue
                aborted.add(record.transaction.bytes)
            ended[record.transaction.bytes] = offset
        self.tail.follow(LogSummary(ended, frozenset(begun.difference(ended)), frozenset(aborted), end))
