"""Which partitions to ask whose leader for, and what each answer means: the core of a follower, without connections.

Each leader has at most one Fetch request under way, for all partitions that it leads; it holds the answer back until
there is something new in one of them. A partition that is refused, or whose leader is not there, pauses for itself and
is looked up anew, and the others go on.

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

from rollbridge.errors import CorruptDataError, KafkaUnavailable, RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.batches import BatchHeader, Record, check_crc, complete_batches, parse_header
from rollbridge.kafka.committed import AbortedSpan, Standing, iterate_any_records, judge
from rollbridge.kafka.errors import Meaning, NotAuthorizedError, TopicNotFound
from rollbridge.kafka.fetch import NO_EPOCH, LogDivergedError, Wanted
from rollbridge.kafka.metadata import NodeId
from rollbridge.kafka.retry import Backoff, limited

logger = limited(logging.getLogger(__name__))

Partition = tuple[str, int]

LOOK_UP_S: Final = 30.0
"""How often leaders are looked up although nobody complains: one that is cut off from the others may not know that it
leads no more."""
FRUITLESS_S: Final = 0.01
"""How often a leader is asked that answers at once that there is nothing: it does so behind a native transaction that
is open since an earlier file of the log."""
UNHEARD_OF_S: Final = 5.0
"""How long there may be no such topic before that is told: not all brokers hear at once of one that is new."""


class Fetched(NamedTuple):
    """What has come of one partition; the marker of a native transaction alone is possible.

    Attributes:
        partition: Which one.
        start: The offset that was asked for; the first batch may begin earlier.
        end: Every offset in ``start..end-1`` has been looked at.
        batches: With their headers, in order; their checksums are right.
        aborted: The aborted native transactions that reach into them, for ``READ_COMMITTED``.
        high_watermark: Where the partition ends.
        stable_end: Its last stable offset.
    """

    partition: Partition
    start: int
    end: int
    batches: list[tuple[BatchHeader, memoryview]]
    aborted: list[AbortedSpan]
    high_watermark: int
    stable_end: int

    def judged(self) -> Iterator[tuple[BatchHeader, memoryview, Standing]]:
        """The batches, and whether a reader sees them."""
        return judge(self.batches, self.aborted)

    def records(self) -> Iterator[Record]:
        """The records that a reader sees, one by one.

        Raises:
            CorruptDataError: While iterating: a batch does not decompress, or does not parse.
        """
        start = self.start
        for _, batch, standing in self.judged():
            if standing is Standing.COMMITTED:
                for record in iterate_any_records(batch):
                    if record.offset >= start:
                        yield record


class Trouble(NamedTuple):
    """A partition is not read on from where it is. It is asked for again by and by, unless it is left or moved.

    Attributes:
        partition: Which one.
        offset: Where it is.
        fault: TopicNotFound, NotAuthorizedError, CorruptDataError (a batch; or what comes next is gone),
            LogDivergedError (what came before is gone), or why its leader cannot be asked at all.
        resume: Where there is something to be read, if what was asked for is gone.
    """

    partition: Partition
    offset: int
    fault: RollbridgeError
    resume: int | None = None


class Range(NamedTuple):
    """The first offset of a partition, and its high watermark."""

    first: int
    end: int


@dataclass(slots=True)
class _Place:
    """Where a partition is."""

    offset: int
    epoch: int
    serial: int
    """Differs from one :meth:`FetchPlan.follow` to the next: an answer for what was before is no answer."""
    leader: NodeId | None = None
    asked: bool = False
    doubted: bool = False
    """There was nothing at its offset, which may be because it was truncated."""
    served: int = 0
    not_before: float = 0.0
    unheard_of_since: float | None = None
    backoff: Backoff = field(default_factory=Backoff)


class _Request(NamedTuple):
    """What is under way at a leader."""

    sent_at: float
    places: dict[Partition, tuple[int, int]]
    """Serials and offsets."""


class FetchPlan:
    """Where each partition is, who leads it, and what is under way. Not thread-safe.

    Args:
        check_epochs: Have leaders look whether what was read before is in the log still; see
            :mod:`rollbridge.kafka.fetch`.
    """

    def __init__(self, *, check_epochs: bool = False) -> None:
        self._check_epochs = check_epochs
        self._places: dict[Partition, _Place] = {}
        self._under_way: dict[NodeId, _Request] = {}
        self._serial = 0
        self._turn = 0
        self._look_up_at = 0.0

    def follow(self, partition: Partition, offset: int, epoch: int = NO_EPOCH) -> None:
        """Read a partition from an offset on; one that is followed already is moved there.

        ``epoch`` is the leader epoch of what was read before ``offset``, if that is to be in the log still.
        """
        self._serial += 1
        known = self._places.get(partition)
        place = self._places[partition] = _Place(offset, epoch, self._serial)
        if known is not None:
            place.leader, place.not_before, place.backoff = known.leader, known.not_before, known.backoff

    def leave(self, partition: Partition) -> None:
        """Do not read a partition any more."""
        self._places.pop(partition, None)

    def unknown(self, now: float) -> frozenset[str]:
        """Topics whose leaders are to be looked up now: those that are not known, and all of them now and then."""
        if now >= self._look_up_at:
            self._look_up_at = now + LOOK_UP_S
            return frozenset(topic for topic, _ in self._places)
        return frozenset(
            topic
            for (topic, _), place in self._places.items()
            if (place.leader is None or place.doubted) and place.not_before <= now
        )

    def doubted(self) -> frozenset[Partition]:
        """Partitions whose range is to be looked up with their leaders."""
        return frozenset(item for item, place in self._places.items() if place.doubted)

    def learn(
        self,
        topics: Collection[str],
        leaders: Mapping[Partition, NodeId],
        faults: Mapping[str, ErrorCode],
        now: float,
    ) -> list[Trouble]:
        """Take what a look-up has given: who leads the partitions of some topics, and what is wrong with others."""
        troubles: list[Trouble] = []
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

    def learn_ranges(self, ranges: Mapping[Partition, Range], now: float) -> list[Trouble]:
        """Take where partitions begin and end of which there was doubt."""
        troubles: list[Trouble] = []
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
                troubles.append(Trouble(partition, place.offset, fault, first))
            else:
                fault = LogDivergedError(f"{text}: the log has lost its end, and ends at {end}")
                troubles.append(Trouble(partition, place.offset, fault, end))
            self._pause(place, now)
        return troubles

    def not_learned(self, topics: Collection[str], fault: RollbridgeError, now: float) -> list[Trouble]:
        """Nobody could say who leads some topics; whose leader was known goes on."""
        lost = [
            (partition, place)
            for partition, place in self._places.items()
            if partition[0] in topics and (place.leader is None or place.doubted)
        ]
        return self._lost(lost, fault, now)

    def requests(self, now: float) -> dict[NodeId, list[Wanted]]:
        """What to ask leaders that have no request under way for; who has not been served for longest comes first."""
        wanted: dict[NodeId, list[Partition]] = {}
        for partition, place in self._places.items():
            if self._is_due(place, now) and place.leader is not None and place.leader not in self._under_way:
                wanted.setdefault(place.leader, []).append(partition)
        return {node: self._in_turn(partitions) for node, partitions in wanted.items()}

    def superseded(self, now: float) -> list[NodeId]:
        """Leaders that are asked without a partition that has just been added: it would wait until they answer."""
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
        """A request is under way."""
        request = self._under_way[node] = _Request(now, {})
        for item in wanted:
            partition = item.topic, item.partition
            place = self._places[partition]
            place.asked = True
            request.places[partition] = place.serial, item.offset

    def withdrawn(self, node: NodeId) -> None:
        """The request that was under way there is not waited for any more."""
        self._under_way.pop(node, None)

    def lost(self, node: NodeId, fault: RollbridgeError, now: float) -> list[Trouble]:
        """A leader does not answer, or cannot be reached: look up who leads its partitions, after a pause."""
        self.withdrawn(node)
        led = [(partition, place) for partition, place in self._places.items() if place.leader == node]
        for _, place in led:
            place.leader = None
        return self._lost(led, fault, now)

    def answered(self, node: NodeId, answer: FetchResponse, now: float) -> list[Fetched | Trouble]:
        """Take the answer to the request that is under way with a leader."""
        sent_at, asked = self._under_way.pop(node)
        found: list[Fetched | Trouble] = []
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
            found += self.lost(node, KafkaUnavailable(f"a fetch was answered {codes.name(answer.error_code)}"), now)
        elif not found and now - sent_at < FRUITLESS_S:
            for place in given:
                place.not_before = max(place.not_before, now + FRUITLESS_S)
        return found

    def next_due(self, now: float) -> float:
        """When there will be something to do that waits for nothing but time; infinity if there is nothing."""
        if not self._places:
            return float("inf")
        times = (self._look_up_at, *(place.not_before for place in self._places.values()))
        return min((item for item in times if item > now), default=float("inf"))

    def leads(self, node: NodeId) -> bool:
        """Whether a broker leads anything that is followed, as far as is known."""
        return any(place.leader == node for place in self._places.values())

    def _is_due(self, place: _Place, now: float) -> bool:
        return not place.doubted and place.not_before <= now

    def _in_turn(self, partitions: list[Partition]) -> list[Wanted]:
        places = self._places
        partitions.sort(key=lambda item: places[item].served)
        return [Wanted(*item, places[item].offset, places[item].epoch) for item in partitions]

    def _taken(
        self, partition: Partition, place: _Place, data: PartitionData, now: float
    ) -> Iterator[Fetched | Trouble]:
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
            yield Trouble(partition, start, fault, min(data.diverging_epoch.end_offset, start))
            return
        batches: list[tuple[BatchHeader, memoryview]] = []
        end, corrupt = start, None
        try:
            for batch in complete_batches(data.records or b""):
                header = parse_header(batch)
                check_crc(header, batch)
                batches.append((header, batch))
                end = max(end, header.base_offset + header.last_offset_delta + 1)
        except CorruptDataError as fault:
            corrupt = fault
        if end > start:
            self._turn += 1
            place.offset, place.served = end, self._turn
            if self._check_epochs:
                place.epoch = batches[-1][0].partition_leader_epoch
            aborted = [AbortedSpan(item.producer_id, item.first_offset) for item in data.aborted_transactions or ()]
            yield Fetched(partition, start, end, batches, aborted, data.high_watermark, data.last_stable_offset)
        if corrupt is None:
            place.unheard_of_since = None
            place.backoff.reset()
        elif end == start:  # else the next answer begins with it
            self._pause(place, now)
            yield Trouble(partition, start, corrupt)

    def _refused(self, partition: Partition, place: _Place, code: ErrorCode, now: float) -> Iterator[Trouble]:
        """A leader, or whoever was asked for it, has refused."""
        topic, number = partition
        place.leader = None
        self._pause(place, now)
        fault: RollbridgeError | None = None
        match codes.meaning(codes.READ, code):
            case Meaning.REFRESH | Meaning.RETRY:
                logger.info("partition %d of topic %s is asked for again soon: %s", number, topic, codes.name(code))
            case Meaning.DENIED:
                fault = NotAuthorizedError(f"not allowed to read topic {topic}", resource=f"topic {topic}")
            case _:
                fault = KafkaUnavailable(f"cannot read topic {topic}: {codes.name(code)}")
        if code != ErrorCode.unknown_topic_or_partition:
            place.unheard_of_since = None
        elif place.unheard_of_since is None:
            place.unheard_of_since = now
        elif now - place.unheard_of_since >= UNHEARD_OF_S:
            fault = TopicNotFound(f"topic {topic} does not exist, or has no partition {number}", topic=topic)
        if fault is not None:
            yield Trouble(partition, place.offset, fault)

    def _lost(self, places: Iterable[tuple[Partition, _Place]], fault: RollbridgeError, now: float) -> list[Trouble]:
        troubles: list[Trouble] = []
        for partition, place in places:
            self._pause(place, now)
            if isinstance(fault, KafkaUnavailable):
                logger.info("partition %d of topic %s is asked for again soon: %s", *reversed(partition), fault)
            else:
                troubles.append(Trouble(partition, place.offset, fault))
        return troubles

    def _pause(self, place: _Place, now: float) -> None:
        place.not_before = now + place.backoff.grow()
