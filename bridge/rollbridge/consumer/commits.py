"""Commits of a consumer, asked for or at intervals, and what it does when segments come and go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Protocol
from weakref import WeakValueDictionary

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Consumer as KafkaConsumer

from rollbridge.consumer.group import LoadHistory, Membership, Owned, Phase
from rollbridge.consumer.records import Message
from rollbridge.consumer.settings import ConsumerSettings
from rollbridge.errors import InvalidNameError, InvalidRequestError, KafkaUnavailable, TruncatedError
from rollbridge.kafka.groups import Committed, GroupCommits
from rollbridge.kafka.metadata import CodeError, Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.kafka.retry import limited
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.group_offsets import GroupMember, parse_group_metadata
from rollbridge.model.lineage import topic_of_partition
from rollbridge.model.names import StreamName, parse_segment_topic
from rollbridge.model.reader_group import Reset

# --------------------------------------------------------------------------------------------------------------------
# Which segment, and which offset, the callers of a consumer mean.


_TIMEOUT_S: Final = 30.0
_nobody: Callable[[], None] = lambda: None  # noqa: E731


class Places:
    """Turns partitions as applications name them into segments, and special offsets into figures."""

    def __init__(
        self,
        consumer: KafkaConsumer,
        members: Membership,
        offsets: LogOffsets,
        load: LoadHistory,
        settings: ConsumerSettings,
    ) -> None:
        self._consumer = consumer
        self._members = members
        self._offsets = offsets
        self._load = load
        self._reset = settings.reset

    def topic(self, place: TopicPartition) -> str:
        """The topic of the segment that is meant.

        Raises:
            InvalidRequestError: none is.
            TruncatedError, StreamRecreated: one that is not there any more.
            StreamNotFound, ZooKeeperUnavailable.
        """
        try:
            if "/" not in place.topic:
                parse_segment_topic(place.topic)
                return place.topic
            name = StreamName.parse(place.topic)
        except InvalidNameError as fault:
            raise InvalidRequestError(f"{place.topic!r} names no segment: {fault}") from None
        return topic_of_partition(name, place.partition, self.learn(name), lambda: self._read(name))

    def learn(self, stream: StreamName) -> EpochHistory:
        """The epochs of a stream as they were last seen; read if they never were.

        Raises:
            StreamNotFound, ZooKeeperUnavailable.
        """
        return self._members.known.get(stream) or self._read(stream)

    def _read(self, stream: StreamName) -> EpochHistory:
        history = self._members.known[stream] = self._load(stream, _nobody, None)
        return history

    def absolute(self, topic: str, offset: int) -> int:
        """An offset in figures.

        Raises:
            InvalidRequestError: it is negative, and neither the beginning nor the end.
        """
        if offset == OFFSET_BEGINNING:
            return self._offsets.first([topic])[topic]
        if offset == OFFSET_END:
            return self._offsets.end([topic], Isolation.READ_COMMITTED)[topic]
        if offset < 0:
            raise InvalidRequestError(f"{offset} is no offset of {topic} to go on at")
        return offset

    def stored(self, topic: str) -> int:
        """Where a segment that is assigned by hand goes on."""
        [found] = self._consumer.committed([TopicPartition(topic, 0)], timeout=_TIMEOUT_S)
        if found.offset >= 0:
            return int(found.offset)
        return OFFSET_BEGINNING if self._reset is Reset.EARLIEST else OFFSET_END


logger = limited(logging.getLogger(__name__))


class Commits:
    """Knows what counts as processed, and commits it, if the settings say so."""

    def __init__(
        self,
        consumer: KafkaConsumer,
        group: GroupCommits,
        members: Membership,
        places: Places,
        settings: ConsumerSettings,
    ) -> None:
        self._consumer = consumer
        self._group = group
        self._members = members
        self._places = places
        self._settings = settings
        self._commit_at = time.monotonic() + settings.interval_ms / 1000
        self._given: list[Owned] = []

    def give(self, item: Owned, last: int) -> None:
        """Records of a segment are handed out, up to an offset."""
        item.next = last + 1
        self._given.append(item)

    def handed_out(self) -> None:
        """The application has asked for more, or is done: what it was given is processed."""
        if self._settings.auto_store:
            for item in self._given:
                item.handled = item.next
        self._given.clear()

    def chosen(
        self, message: Message | None, offsets: list[TopicPartition] | None
    ) -> tuple[list[TopicPartition], list[TopicPartition]]:
        """What a call of ``commit`` asks for, rounded up; and, apart, what it need not ask for: segments that are over.

        Raises:
            InvalidRequestError: it asks for two things, or for an offset that is none or can not be.
            StreamRecreated: for one of a former life of its stream.
            KafkaException: there is nothing to commit.
        """
        if message is not None and offsets is not None:
            raise InvalidRequestError("give a message or offsets, not both; nothing was committed")
        wanted: dict[str, int] = {}
        if message is not None:
            wanted[message.segment_topic] = (message.offset() or 0) + 1
        elif offsets is not None:
            for place in offsets:
                if place.offset == OFFSET_INVALID:
                    continue  # as `position` says of what has not been begun
                if place.offset < 0:
                    raise InvalidRequestError(f"offset {place.offset} can not be committed; nothing was committed")
                with suppress(TruncatedError):
                    wanted[self._places.topic(place)] = place.offset
            if not wanted and any(place.offset != OFFSET_INVALID for place in offsets):
                return [], []  # all of them were removed
        else:
            for item in self._members.owned.values():
                if item.phase is Phase.OPEN:
                    wanted[item.topic] = item.next if self._settings.auto_store else item.handled
        if not wanted:
            raise KafkaException(KafkaError(KafkaError._NO_OFFSET))
        over = {topic for topic in wanted if self._members.is_over(topic)}
        for topic in wanted.keys() - over:
            self._members.check_commit(topic, wanted[topic])
        return (
            [self._members.rounded(topic, offset) for topic, offset in wanted.items() if topic not in over],
            [TopicPartition(topic, 0, wanted[topic]) for topic in wanted if topic in over],
        )

    def store(self, message: Message | None, offsets: list[TopicPartition] | None) -> None:
        """Take the application's word for what is processed.

        Raises:
            InvalidRequestError: that is found out automatically; or as for :meth:`chosen`.
            KafkaException: a segment is not assigned.
        """
        if self._settings.auto_store:
            raise InvalidRequestError("store_offsets needs enable.auto.offset.store=false")
        wanted = [] if message is None else [(message.segment_topic, (message.offset() or 0) + 1)]
        wanted += [(self._places.topic(place), place.offset) for place in offsets or ()]
        for topic, offset in wanted:
            item = self._members.owned.get(topic)
            if item is None:
                raise KafkaException(KafkaError(KafkaError._STATE, f"{topic} is not assigned"))
            if not self._members.is_over(topic):
                self._members.check_commit(topic, offset)
        for topic, offset in wanted:
            self._members.owned[topic].handled = offset

    def commit_sometimes(self) -> None:
        """Commit when the interval is over."""
        if time.monotonic() >= self._commit_at:
            self._commit_at = time.monotonic() + self._settings.interval_ms / 1000
            self.commit(list(self._members.owned))

    def commit(self, topics: Iterable[str]) -> None:
        """Commit what is processed of these segments and was not committed yet; the outcome comes with a later poll.

        Nothing is waited for, also when segments are given up: the commit goes to the broker over the connection over
        which this member says afterwards that it has given them up, or leaves, and brokers answer in that order. So
        whoever gets them finds the commit, and a broker that is silent holds up nobody.
        """
        if not self._settings.auto_commit:
            return
        own = [self._members.owned[topic] for topic in topics if topic in self._members.owned]
        due = {item.topic: item.handled for item in own if item.phase is Phase.OPEN and item.handled > item.sent}
        if not due:
            return
        for topic, offset in due.items():
            self._members.owned[topic].sent = offset
        places = [self._members.rounded(topic, offset) for topic, offset in due.items()]
        try:
            self._consumer.commit(offsets=places, asynchronous=True)
        except KafkaException as exc:
            logger.info("an automatic commit of group %s failed: %s", self._settings.group_id, exc)

    def carry_out(self, places: list[TopicPartition]) -> list[TopicPartition]:
        """Commit, and wait for the answer; also within what the application is told of while it polls.

        The library is not asked: it waits without end if a broker goes in the wrong moment. An automatic commit that
        was sent before, over another connection, is carried out later only if a broker stands still in between.

        Raises:
            KafkaException: as from confluent-kafka's consumer; ``_TIMED_OUT`` if there is no answer in time, and it is
                not known then what was committed.
        """
        member = parse_group_metadata(self._consumer.consumer_group_metadata())
        commits = [Committed(item.topic, item.partition, item.offset, item.metadata or "") for item in places]
        group_id, timeout_s = self._settings.group_id, self._settings.api_timeout_ms / 1000
        try:
            self._group.write(member, commits, timeout_s=timeout_s)
        except CodeError as fault:
            why = f"a commit of group {group_id} is refused: {fault}"
            raise KafkaException(KafkaError(fault.code.value, why)) from fault
        except KafkaUnavailable as fault:
            why = (
                f"group {group_id} has not answered a commit within {timeout_s:g} s (default.api.timeout.ms); it is "
                f"not known whether it is carried out: commit again; {fault}"
            )
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, why, retriable=True)) from fault
        return [TopicPartition(item.topic, item.partition, item.offset) for item in places]

    def confirmed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> bool:
        """Take the outcome of a commit; False if the application has nothing to do with it."""
        own = self._members.sent(error, partitions)
        if error is None:
            self._members.noted(partitions)
        else:
            self._unsent(place.topic for place in partitions)
        return not own

    def _unsent(self, topics: Iterable[str]) -> None:
        """Send commits of these segments again with the next ones."""
        for topic in topics:
            if (item := self._members.owned.get(topic)) is not None:
                item.sent = -1


class Rebalances:
    """Called while polling when segments come and go.

    Attributes:
        tell: What the application wants to be told of, by event.
        placing: Whether the application is being told of new segments, and may say where they are to begin.
    """

    def __init__(self, members: Membership, commits: Commits, *, cooperative: bool) -> None:
        self._members = members
        self._commits = commits
        self._cooperative = cooperative
        self.tell: dict[str, Callable[[list[TopicPartition]], None]] = {}
        self.placing = False

    def assigned(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Take segments; they stay paused until they may be read."""
        places = [TopicPartition(item.topic, item.partition, 0) for item in partitions]
        if self._cooperative:
            consumer.incremental_assign(places)
        else:
            self._members.revoked(list(self._members.owned))
            consumer.assign(places)
        if places:
            consumer.pause(places)
        self._members.assigned(item.topic for item in partitions)
        self.placing = True
        try:
            self._call("assign", partitions)
        finally:
            self.placing = False

    def revoked(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Give segments up that are still this member's."""
        self._commits.commit([item.topic for item in partitions])
        self._call("revoke", partitions)
        self._give_up(consumer, partitions)

    def lost(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Give segments up that belong to others already: nothing can be committed in them any more."""
        self._call("lost" if "lost" in self.tell else "revoke", partitions)
        self._give_up(consumer, partitions)

    def _give_up(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        self._members.revoked(item.topic for item in partitions)
        if self._cooperative:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()

    def _call(self, event: str, partitions: list[TopicPartition]) -> None:
        callback = self.tell.get(event)
        if callback is not None:
            callback([TopicPartition(item.topic, item.partition, item.offset) for item in partitions])


# --------------------------------------------------------------------------------------------------------------------
# Members of consumer groups that were introduced to transactions: what they may have committed there.
# A transaction commits whatever offsets it is given, but knows nothing of what a group has read. The consumer does,
# if it is in the same process; so it is asked, by the group and the member that its ``consumer_group_metadata()``
# names.


class Judge(Protocol):
    """What a member knows of its group."""

    def is_over(self, topic: str) -> bool:
        """Whether the group has read a segment to its end."""

    def check_commit(self, topic: str, offset: int) -> None:
        """Raise InvalidRequestError for what nobody can have read."""


_introduced: Final[WeakValueDictionary[tuple[str, str], Judge]] = WeakValueDictionary()


def introduce(metadata: object, judge: Judge) -> None:
    """Have ``judge`` asked about what is committed with these metadata, as long as it lives."""
    try:
        member = parse_group_metadata(metadata)
    except InvalidRequestError:
        return  # whoever is given them says so
    if member.member_id:
        _introduced[member.group_id, member.member_id] = judge


def check_offsets(member: GroupMember, segments: Iterable[tuple[str, int]]) -> None:
    """Refuse to have offsets of segments, by topic, committed that count as read what nobody can have read.

    Raises:
        InvalidRequestError: a segment waits for what it continues, or less than that was handed out of it.
    """
    judge = _introduced.get((member.group_id, member.member_id))
    if judge is not None:
        for topic, offset in segments:
            if not judge.is_over(topic):
                judge.check_commit(topic, offset)
