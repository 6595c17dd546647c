"""Search of sealed logs for batches of which no answer says whether they were written.

If an answer was lost and the segment is sealed, the segment's log is read to find out which possibly persisted batches
it holds. A broker may be silent for a whole request timeout, and a log may be long. So each :class:`Search` has a
thread and a connection of its own; ``_SEARCHES_MAX`` run at a time, and those that met no broker go last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kio.schema.errors import ErrorCode

from rollbridge.calls import Backoff, Errand
from rollbridge.errors import CorruptDataError, KafkaUnavailableError, RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.batches import complete_batches, parse_header
from rollbridge.kafka.errors import Meaning, NotAuthorizedError, TopicNotFoundError
from rollbridge.kafka.fetch import NO_EPOCH, Wanted, ask_batches
from rollbridge.kafka.metadata import Cluster, CodeError, Isolation
from rollbridge.kafka.offsets import ask_first_offset
from rollbridge.model.names import Partition, show_partition
from rollbridge.writer.accumulator import ProducerBatch, StreamAccumulator
from rollbridge.writer.segments import SegmentQueue

logger = logging.getLogger(__name__)

_WAIT_MS: Final = 500


class OwnBatches:
    """Search for the batches of one producer in a sealed log of one partition, part by part.

    The log may have lost its beginning, which leaves a gap, or its end: if it has diverged, the search resumes where it
    did.

    Attributes:
        found: Base offset by base sequence, as far as the log was read.
        gap: First deleted offset that was to be read, and the one behind the last; None if there are none. The
            batches that stood there are unknown.
    """

    def __init__(
        self, partition: Partition, start: int, end: int, producer: tuple[int, int], epoch: int = NO_EPOCH
    ) -> None:
        """Prepare the search, reading nothing yet.

        Args:
            partition: Where they stand; nothing is appended below ``end`` any more.
            start: First offset to read.
            end: Offset before which to stop.
            producer: Producer id and epoch of the wanted batches: in each epoch sequence numbers begin at 0.
            epoch: Leader epoch of a record known to stand below ``start``.
        """
        self.found: dict[int, int] = {}
        self.gap: tuple[int, int] | None = None
        self._partition = partition
        self._next = start
        self._end = end
        self._producer = producer
        self._epoch = epoch

    def read_on(self, cluster: Cluster) -> bool:
        """Read one part, about a megabyte at most; return whether the end was reached. May be repeated after an error.

        Args:
            cluster: Cluster that no other thread uses meanwhile.

        Raises:
            KafkaUnavailableError: No answer, or none now; ask again.
            CorruptDataError: The log ends before ``end``.
            TopicNotFoundError, NotAuthorizedError
        """
        if self._next >= self._end:
            return True
        raw = self._fetch(cluster)
        if raw is None:
            return self._next >= self._end
        after = self._next
        for batch in complete_batches(raw):
            header = parse_header(batch)
            after = max(after, header.base_offset + header.last_offset_delta + 1)
            producer = header.producer_id, header.producer_epoch
            if producer == self._producer and header.base_offset < self._end:
                self.found[header.base_sequence] = header.base_offset
        if after == self._next:
            raise KafkaUnavailableError(f"offset {self._next} of {show_partition(self._partition)} could not be read")
        self._next = after
        return after >= self._end

    def _fetch(self, cluster: Cluster) -> bytes | None:
        """Fetch from the next offset; return None if that offset has changed instead."""
        (topic, number), start, epoch = self._partition, self._next, self._epoch
        try:
            try:
                answer = ask_batches(cluster, Wanted(topic, number, start, epoch), _WAIT_MS, Isolation.READ_UNCOMMITTED)
            except CodeError as exc:
                if exc.code is not ErrorCode.offset_out_of_range:
                    raise
                self._skip_to(ask_first_offset(cluster, topic, number))
                return None
        except CodeError as exc:
            cluster.forget_leader(topic)
            raise _read_error(topic, exc.code) from exc
        if answer.diverging_epoch.end_offset >= 0:
            # The log lost its end and has grown since: the wanted batches may stand in the new part.
            self._next, self._epoch = min(start, answer.diverging_epoch.end_offset), NO_EPOCH
            return None
        self._epoch = NO_EPOCH
        return answer.records or b""

    def _skip_to(self, first: int) -> None:
        """Continue at the first offset of a log that lacks the next one, and note the gap."""
        if first > self._next:
            low, high = self.gap or (self._next, first)
            self.gap = min(low, self._next), max(high, first)
        elif self._epoch == NO_EPOCH:
            name = show_partition(self._partition)
            raise CorruptDataError(f"topic {name} ends before offset {self._next}, and was sealed at {self._end}")
        self._next, self._epoch = first, NO_EPOCH


def _read_error(topic: str, code: ErrorCode) -> Exception:
    if code in (ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id):
        return TopicNotFoundError(f"topic {topic} does not exist", topic=topic)
    if codes.meaning(codes.READ, code) is Meaning.DENIED:
        return NotAuthorizedError(f"not allowed to read topic {topic}: {codes.name(code)}", resource=f"topic {topic}")
    return KafkaUnavailableError(f"topic {topic} cannot be read now: {codes.name(code)}")


_SEARCHES_MAX: Final = 8
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 1.0


class Search:
    """Search for the possibly persisted batches of one queue; resumes where it stopped after a broker was away.

    Attributes:
        channel: Channel of the queue's stream.
        queue: Lane whose batches are searched.
        log: Batches found so far.
        not_before: Time before which it does not resume (``time.monotonic()``).
    """

    def __init__(
        self, channel: StreamAccumulator, queue: SegmentQueue[ProducerBatch], end: int, producer: tuple[int, int]
    ) -> None:
        self.channel = channel
        self.queue = queue
        self.log = OwnBatches(queue.target, queue.last_offset + 1, end, producer, queue.epoch)
        self.not_before = 0.0
        self._backoff = Backoff(_PAUSE_FIRST_S, _PAUSE_MAX_S)
        self._errand: Errand[None] = Errand("rollbridge-writer-search")

    @property
    def under_way(self) -> bool:
        """True while its thread runs."""
        return self._errand.under_way

    def go_on(
        self, new_cluster: Callable[[], Cluster], is_wanted: Callable[[], bool], done: Callable[[], object]
    ) -> None:
        """Read to the end on a thread, or until it is not wanted any more; that thread calls ``done`` afterwards."""

        def read() -> None:
            with new_cluster() as cluster:
                while is_wanted() and not self.log.read_on(cluster):
                    self._backoff.reset()

        self._errand.begin(read, done)

    def has_ended(self) -> bool:
        """Return True once the log was read to the end; False also while a retry is due.

        Raises:
            RollbridgeError: The search cannot succeed.
        """
        if not self._errand.done:
            return False
        try:
            self._errand.take()
        except KafkaUnavailableError as fault:
            logger.info("segment %s must be read to go on, which is tried again: %s", self.queue.topic, fault)
            self.not_before = time.monotonic() + self._backoff.grow()
            return False
        return True


class Searches:
    """Searches of one connection; used by the engine's thread only."""

    def __init__(self, new_cluster: Callable[[], Cluster], done: Callable[[], object]) -> None:
        """Create without searches; ``done`` is called on a search's thread when that thread ends."""
        self._new_cluster = new_cluster
        self._done = done
        self._searches: dict[SegmentQueue[ProducerBatch], Search] = {}
        self._closed = False

    def turn(
        self, wanted: Iterable[tuple[StreamAccumulator, SegmentQueue[ProducerBatch]]], producer: tuple[int, int]
    ) -> Iterator[tuple[Search, RollbridgeError | None]]:
        """Start wanted searches, forget unwanted ones; yield those that have ended, with the fault if there is one."""
        queues = {queue: channel for channel, queue in wanted}
        for queue in [queue for queue in self._searches if queue not in queues]:
            del self._searches[queue]
        for queue, channel in queues.items():
            if queue not in self._searches and queue.sealed_end is not None:
                self._searches[queue] = Search(channel, queue, queue.sealed_end, producer)
        for queue, search in list(self._searches.items()):
            try:
                if not search.has_ended():
                    continue
                fault = None
            except RollbridgeError as why:
                fault = why
            del self._searches[queue]
            yield search, fault
        self._begin()

    def close(self) -> None:
        """Stop all searches; their threads end when a broker has answered or timed out."""
        self._closed = True
        self._searches.clear()

    def _begin(self) -> None:
        now = time.monotonic()
        waiting = [item for item in self._searches.values() if not item.under_way and item.not_before <= now]
        room = _SEARCHES_MAX - sum(item.under_way for item in self._searches.values())
        for search in sorted(waiting, key=lambda item: item.not_before)[: max(room, 0)]:
            search.go_on(self._new_cluster, lambda search=search: self._is_wanted(search), self._done)  # type: ignore[misc]

    def _is_wanted(self, search: Search) -> bool:
        return self._searches.get(search.queue) is search
