"""Core of a follower: plans Fetch requests by leader and interprets their answers. No I/O.

Each leader has at most one Fetch request in flight, for all partitions that it leads, and delays the answer until one
of them has something new. A partition that is refused, or whose leader is unavailable, backs off by itself and is
looked up again; the others continue.

Time comes in as an argument, in monotonic seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.fetch.v12 import FetchResponse
from kio.schema.fetch.v12.response import PartitionData

from rollbridge.base.deadlines import Backoff
from rollbridge.base.logs import limited
from rollbridge.errors import CorruptDataError, KafkaUnavailableError, RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.committed import AbortedSpan, BatchStanding, judge
from rollbridge.kafka.errors import Meaning, NotAuthorizedError, TopicNotFoundError
from rollbridge.kafka.fetch import LogDivergedError, Wanted
from rollbridge.kafka.metadata import NodeId
from rollbridge.kafka.records import BatchHeader, FetchedBatches, LogRecord, read_records
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.names import Partition

logger = limited(logging.getLogger(__name__))

LOOK_UP_S: Final = 30.0
"""Interval between leader look-ups without a complaint: a leader cut off from the others may not know that it was
replaced."""
FRUITLESS_S: Final = 0.01
"""Pause after an empty answer that came at once, as leaders give behind a native transaction that was opened in an
earlier log file."""
UNHEARD_OF_S: Final = 5.0
"""Time for which a topic may be unknown before that is reported: not all brokers learn at once of a new one."""


class Fetched(NamedTuple):
    """Fetched stretch of one partition; may hold nothing but a marker.

    Attributes:
        partition: Topic and number.
        start: Requested offset; the first batch may begin earlier.
        end: Every offset in ``start..end-1`` was examined.
        batches: Headers and batches, in order; their checksums are right.
        aborted: Aborted native transactions that reach into them, for ``READ_COMMITTED``.
        high_watermark: End of the partition.
        stable_end: Last stable offset.
    """

    partition: Partition
    start: int
    end: int
    batches: Iterable[tuple[BatchHeader, memoryview]]
    aborted: list[AbortedSpan]
    high_watermark: int
    stable_end: int

    def judged(self) -> Iterator[tuple[BatchHeader, memoryview, BatchStanding]]:
        """Iterate over the batches with their standing for a reader."""
        return judge(self.batches, self.aborted)

    def records(self) -> Iterator[LogRecord]:
        """Iterate over the records that a reader sees.

        Raises:
            CorruptDataError: While iterating: a batch does not decompress, or does not parse.
        """
        start = self.start
        for header, batch, standing in self.judged():
            if standing is BatchStanding.COMMITTED:
                for record in read_records(batch, header):
                    if record.offset >= start:
                        yield record


class FetchError(NamedTuple):
    """Fault that stops a partition at its offset; it is retried with back-off unless the caller leaves or moves it.

    Attributes:
        partition: Topic and number.
        offset: Next offset to read.
        fault: TopicNotFoundError, NotAuthorizedError, CorruptDataError (a corrupt batch, or the next records are gone),
            LogDivergedError (earlier records are gone), or the reason why its leader cannot be asked at all.
        resume: Readable offset, if the requested one is gone.
    """

    partition: Partition
    offset: int
    fault: RollbridgeError
    resume: int | None = None


class Range(NamedTuple):
    """First offset of a partition and its high watermark."""

    first: int
    end: int


@dataclass(slots=True)
class _Place:
    """Reading position of a partition."""

    offset: int
    epoch: int
    serial: int
    """Number of the :meth:`FetchPlan.follow` call; an answer with an older one is stale."""
    leader: NodeId | None = None
    asked: bool = False
    doubted: bool = False
    """True after OFFSET_OUT_OF_RANGE, until the partition's range has been looked up."""
    served: int = 0
    high_watermark: int | None = None
    """End of the partition at its last answer, an empty one included."""
    heard_at: float | None = None
    """When that was; when it was asked for first, before that. A broker that slows us down answers without it."""
    not_before: float = 0.0
    unheard_of_since: float | None = None
    backoff: Backoff = field(default_factory=Backoff)


class _Request(NamedTuple):
    """In-flight request of a leader."""

    sent_at: float
    places: dict[Partition, tuple[int, int]]
    """Serial and offset of each partition in the request."""


class FetchPlan:
    """Positions and leaders of partitions, and the requests in flight. Not thread-safe.

    Args:
        check_epochs: Have leaders check that the log still holds what was read; see :mod:`rollbridge.kafka.fetch`.
    """

    def __init__(self, *, check_epochs: bool = False) -> None:
        self._check_epochs = check_epochs
        self._places: dict[Partition, _Place] = {}
        self._under_way: dict[NodeId, _Request] = {}
        self._serial = 0
        self._turn = 0
        self._look_up_at = 0.0

    def follow(self, partition: Partition, offset: int, epoch: int = NO_EPOCH) -> None:
        """Follow a partition from an offset on, or move one that is followed already.

        ``epoch`` is the leader epoch of the record read before ``offset``, to check that the log still holds it.
        """
        self._serial += 1
        known = self._places.get(partition)
        place = self._places[partition] = _Place(offset, epoch, self._serial)
        if known is not None:
            place.leader, place.not_before, place.backoff = known.leader, known.not_before, known.backoff
            place.heard_at = known.heard_at

    def leave(self, partition: Partition) -> None:
        """Stop following a partition."""
        self._places.pop(partition, None)

    def unknown(self, now: float) -> frozenset[str]:
        """Return the topics to look up now: those with an unknown leader, and all every ``LOOK_UP_S``."""
        if now >= self._look_up_at:
            self._look_up_at = now + LOOK_UP_S
            return frozenset(topic for topic, _ in self._places)
        return frozenset(
            topic
            for (topic, _), place in self._places.items()
            if (place.leader is None or place.doubted) and place.not_before <= now
        )

    def doubted(self) -> frozenset[Partition]:
        """Return the partitions whose range must be asked for along with their leaders."""
        return frozenset(item for item, place in self._places.items() if place.doubted)

    def learn(
        self,
        topics: Collection[str],
        leaders: Mapping[Partition, NodeId],
        faults: Mapping[str, ErrorCode],
        now: float,
    ) -> list[FetchError]:
        """Apply the result of a look-up: the leaders of some topics' partitions, and the faults of others."""
        troubles: list[FetchError] = []
        for partition, place in self._places.items():
            if partition[0] not in topics:
                continue
            leader = leaders.get(partition)
            if leader is not None:
                place.leader = leader
                continue
            place.leader = None
            if place.not_before <= now:
                troubles += self._refused(
                    partition, place, faults.get(partition[0], ErrorCode.leader_not_available), now
                )
        return troubles

    def learn_ranges(self, ranges: Mapping[Partition, Range], now: float) -> list[FetchError]:
        """Apply the ranges of doubted partitions."""
        troubles: list[FetchError] = []
        for partition, (first, end) in ranges.items():
            place = self._places.get(partition)
            if place is None or not place.doubted:
                continue
            place.doubted = False
            if first <= place.offset <= end:
                continue
            text = f"offset {place.offset} of partition {partition[1]} of topic {partition[0]} is gone"
            if place.offset < first:
                fault = CorruptDataError(f"{text}: the log was truncated, and begins at {first}")
                troubles.append(FetchError(partition, place.offset, fault, first))
            else:
                fault = LogDivergedError(f"{text}: the log has lost its end, and ends at {end}")
                troubles.append(FetchError(partition, place.offset, fault, end))
            self._pause(place, now)
        return troubles

    def not_learned(self, topics: Collection[str], fault: RollbridgeError, now: float) -> list[FetchError]:
        """Apply a failed look-up: partitions without a known leader back off, the others continue."""
        lost = [
            (partition, place)
            for partition, place in self._places.items()
            if partition[0] in topics and (place.leader is None or place.doubted)
        ]
        return self._lost(lost, fault, now)

    def requests(self, now: float) -> dict[NodeId, list[Wanted]]:
        """Return the requests to send to leaders with none in flight; the partition served longest ago comes first."""
        wanted: dict[NodeId, list[Partition]] = {}
        for partition, place in self._places.items():
            if self._is_due(place, now) and place.leader is not None and place.leader not in self._under_way:
                wanted.setdefault(place.leader, []).append(partition)
        return {node: self._in_turn(partitions) for node, partitions in wanted.items()}

    def superseded(self, now: float) -> list[NodeId]:
        """Return leaders whose in-flight request lacks a newly added partition, which would have to wait for it."""
        return [
            node
            for node, request in self._under_way.items()
            if any(
                place.leader == node
                and not place.asked
                and self._is_due(place, now)
                and request.places.get(partition, (None,))[0] != place.serial
                for partition, place in self._places.items()
            )
        ]

    def sent(self, node: NodeId, wanted: Iterable[Wanted], now: float) -> None:
        """Record that a request was sent."""
        request = self._under_way[node] = _Request(now, {})
        for item in wanted:
            partition = item.topic, item.partition
            place = self._places[partition]
            place.asked = True
            if place.heard_at is None:
                place.heard_at = now
            request.places[partition] = place.serial, item.offset

    def withdrawn(self, node: NodeId) -> None:
        """Record that the leader's in-flight request was given up."""
        self._under_way.pop(node, None)

    def lost(self, node: NodeId, fault: RollbridgeError, now: float) -> list[FetchError]:
        """Record that a leader is unreachable: look up its partitions' leaders again after a back-off."""
        self.withdrawn(node)
        led = [(partition, place) for partition, place in self._places.items() if place.leader == node]
        for _, place in led:
            place.leader = None
        return self._lost(led, fault, now)

    def answered(self, node: NodeId, answer: FetchResponse, now: float) -> list[Fetched | FetchError]:
        """Apply the answer to a leader's in-flight request."""
        sent_at, asked = self._under_way.pop(node)
        found: list[Fetched | FetchError] = []
        given: list[_Place] = []
        for topic in answer.responses:
            for data in topic.partitions:
                partition = str(topic.topic), int(data.partition_index)
                serial, start = asked.get(partition, (None, 0))
                place = self._places.get(partition)
                if place is not None and place.serial == serial and place.offset == start:
                    found += self._taken(partition, place, data, now)
                    given.append(place)
        if answer.error_code != ErrorCode.none:
            found += self.lost(
                node, KafkaUnavailableError(f"a fetch was answered {codes.name(answer.error_code)}"), now
            )
        elif not found and now - sent_at < FRUITLESS_S:
            for place in given:
                place.not_before = max(place.not_before, now + FRUITLESS_S)
        return found

    def next_due(self, now: float) -> float:
        """Return the time of the next timed action; infinity if there is none."""
        if not self._places:
            return float("inf")
        times = (self._look_up_at, *(place.not_before for place in self._places.values()))
        return min((item for item in times if item > now), default=float("inf"))

    def end(self, partition: Partition) -> int | None:
        """Return the end of a followed partition at its last answer; None if there was none."""
        place = self._places.get(partition)
        return None if place is None else place.high_watermark

    def unheard_s(self, partition: Partition, now: float) -> float:
        """Return for how long nothing has been heard of a followed partition, not even that it has nothing new."""
        place = self._places.get(partition)
        return 0.0 if place is None or place.heard_at is None else max(now - place.heard_at, 0.0)

    def leads(self, node: NodeId) -> bool:
        """Return whether a broker leads any followed partition, as far as is known."""
        return any(place.leader == node for place in self._places.values())

    def _is_due(self, place: _Place, now: float) -> bool:
        return not place.doubted and place.not_before <= now

    def _in_turn(self, partitions: list[Partition]) -> list[Wanted]:
        places = self._places
        partitions.sort(key=lambda item: places[item].served)
        return [Wanted(*item, places[item].offset, places[item].epoch) for item in partitions]

    def _taken(
        self, partition: Partition, place: _Place, data: PartitionData, now: float
    ) -> Iterator[Fetched | FetchError]:
        start = place.offset
        if data.error_code == ErrorCode.offset_out_of_range:
            place.doubted = True
            self._pause(place, now)
            return
        if data.error_code != ErrorCode.none:
            yield from self._refused(partition, place, data.error_code, now)
            return
        if data.diverging_epoch.end_offset >= 0:
            fault = LogDivergedError(f"topic {partition[0]} has lost what was read of it before offset {start}")
            self._pause(place, now)
            yield FetchError(partition, start, fault, min(data.diverging_epoch.end_offset, start))
            return
        place.high_watermark, place.heard_at = data.high_watermark, now
        batches = FetchedBatches(data.records or b"")
        corrupt = None
        try:
            batches.check()
        except CorruptDataError as fault:
            corrupt = fault
        last = batches.last  # offsets grow
        end = start if last is None else max(start, last.base_offset + last.last_offset_delta + 1)
        if last is not None and end > start:
            self._turn += 1
            place.offset, place.served = end, self._turn
            if self._check_epochs:
                place.epoch = last.partition_leader_epoch
            aborted = [AbortedSpan(item.producer_id, item.first_offset) for item in data.aborted_transactions or ()]
            yield Fetched(partition, start, end, batches, aborted, data.high_watermark, data.last_stable_offset)
        if corrupt is None:
            place.unheard_of_since = None
            place.backoff.reset()
        elif end == start:  # else the next answer begins with it
            self._pause(place, now)
            yield FetchError(partition, start, corrupt)

    def _refused(self, partition: Partition, place: _Place, code: ErrorCode, now: float) -> Iterator[FetchError]:
        """Apply the refusal of a leader, or of the broker asked for it."""
        topic, number = partition
        place.leader = None
        self._pause(place, now)
        fault: RollbridgeError | None = None
        match codes.meaning(codes.READ, code):
            case Meaning.REFRESH | Meaning.RETRY:
                logger.info("fetch.retried topic=%s partition=%d error=%s", topic, number, codes.name(code))
            case Meaning.DENIED:
                fault = NotAuthorizedError(f"not allowed to read topic {topic}", resource=f"topic {topic}")
            case _:
                fault = KafkaUnavailableError(f"cannot read topic {topic}: {codes.name(code)}")
        if code != ErrorCode.unknown_topic_or_partition:
            place.unheard_of_since = None
        elif place.unheard_of_since is None:
            place.unheard_of_since = now
        elif now - place.unheard_of_since >= UNHEARD_OF_S:
            fault = TopicNotFoundError(f"topic {topic} does not exist, or has no partition {number}", topic=topic)
        if fault is not None:
            yield FetchError(partition, place.offset, fault)

    def _lost(self, places: Iterable[tuple[Partition, _Place]], fault: RollbridgeError, now: float) -> list[FetchError]:
        troubles: list[FetchError] = []
        for partition, place in places:
            self._pause(place, now)
            if isinstance(fault, KafkaUnavailableError):
                logger.info("fetch.retried topic=%s partition=%d reason=%s", *partition, fault)
            else:
                troubles.append(FetchError(partition, place.offset, fault))
        return troubles

    def _pause(self, place: _Place, now: float) -> None:
        place.not_before = now + place.backoff.grow()
        if place.heard_at is None:
            place.heard_at = now  # its leader could not even be asked
