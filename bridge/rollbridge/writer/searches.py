"""Searches: sealed logs are read for what became of doubtful batches, beside the thread that serves all writers.

A broker may be silent for as long as a request may take, and a log may be long. So each search has a thread and a
connection of its own; a few go on at a time, and those that found nobody come after the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from rollbridge.errors import KafkaUnavailable, RollbridgeError
from rollbridge.kafka.errands import Errand
from rollbridge.kafka.idempotent import OwnBatches
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.patience import Backoff
from rollbridge.writer.accumulator import Batch, Channel
from rollbridge.writer.lanes import Lane

logger = logging.getLogger(__name__)

_SEARCHES_MAX: Final = 8
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0


class Search:
    """What is looked up of one lane; goes on where it was after a broker was away.

    Attributes:
        channel: The lane's stream.
        lane: Whose doubtful batches are looked for.
        log: What was found.
        not_before: When it may go on, by ``time.monotonic()``.
    """

    def __init__(self, channel: Channel, lane: Lane[Batch], end: int, producer_id: int) -> None:
        self.channel = channel
        self.lane = lane
        self.log = OwnBatches(lane.topic, lane.last_offset + 1, end, producer_id, lane.epoch)
        self.not_before = 0.0
        self._backoff = Backoff(_PAUSE_FIRST_S, _PAUSE_MAX_S)
        self._errand: Errand[None] = Errand("rollbridge-writer-search")

    @property
    def under_way(self) -> bool:
        """Whether a thread is at it."""
        return self._errand.under_way

    def go_on(
        self, new_cluster: Callable[[], Cluster], is_wanted: Callable[[], bool], done: Callable[[], object]
    ) -> None:
        """Read to the end on a thread, or until it is not wanted any more; ``done`` is called after it."""

        def read() -> None:
            with new_cluster() as cluster:
                while is_wanted() and not self.log.read_on(cluster):
                    self._backoff.reset()

        self._errand.begin(read, done)

    def has_ended(self) -> bool:
        """Whether the thread has come to the end; False also if it has to go on later.

        Raises:
            RollbridgeError: it can not be found out.
        """
        if not self._errand.done:
            return False
        try:
            self._errand.take()
        except KafkaUnavailable as fault:
            logger.info("segment %s must be read to go on, which is tried again: %s", self.lane.topic, fault)
            self.not_before = time.monotonic() + self._backoff.grow()
            return False
        return True


class Searches:
    """The searches of one connection; used by one thread."""

    def __init__(self, new_cluster: Callable[[], Cluster], done: Callable[[], object]) -> None:
        """``done`` is called on another thread when one of them has something to say."""
        self._new_cluster = new_cluster
        self._done = done
        self._searches: dict[Lane[Batch], Search] = {}
        self._closed = False

    def turn(
        self, wanted: Iterable[tuple[Channel, Lane[Batch]]], producer_id: int
    ) -> Iterator[tuple[Search, RollbridgeError | None]]:
        """Begin what is to be found out and forget what is not any more; gives what has ended, perhaps with a fault."""
        lanes = {lane: channel for channel, lane in wanted}
        for lane in [lane for lane in self._searches if lane not in lanes]:
            del self._searches[lane]
        for lane, channel in lanes.items():
            if lane not in self._searches and lane.sealed_end is not None:
                self._searches[lane] = Search(channel, lane, lane.sealed_end, producer_id)
        for lane, search in list(self._searches.items()):
            try:
                if not search.has_ended():
                    continue
                fault = None
            except RollbridgeError as why:
                fault = why
            del self._searches[lane]
            yield search, fault
        self._begin()

    def close(self) -> None:
        """Ask for nothing any more; threads end when a broker has answered, or has not in time."""
        self._closed = True
        self._searches.clear()

    def _begin(self) -> None:
        now = time.monotonic()
        waiting = [item for item in self._searches.values() if not item.under_way and item.not_before <= now]
        room = _SEARCHES_MAX - sum(item.under_way for item in self._searches.values())
        for search in sorted(waiting, key=lambda item: item.not_before)[: max(room, 0)]:
            search.go_on(self._new_cluster, lambda search=search: self._is_wanted(search), self._done)  # type: ignore[misc]

    def _is_wanted(self, search: Search) -> bool:
        return self._searches.get(search.lane) is search
