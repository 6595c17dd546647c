"""Offsets of a consumer: which ones callers mean, when they are committed, and what a rebalance does to them.

:class:`PartitionNames` resolves partitions and special offsets, :class:`Commits` commits on request or at intervals,
and :class:`Rebalances` receives librdkafka's callbacks. All three run on the thread that polls and take no locks.

A transaction commits whatever offsets it is given and knows nothing of what a group has read. The consumer does, if it
lives in the same process. So ``consumer_group_metadata()`` registers it by group and member id (:func:`introduce`), and
:func:`check_offsets` consults it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, Protocol
from weakref import WeakValueDictionary

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Message as KafkaMessage

from rollbridge.base.logs import limited
from rollbridge.config import ConsumerSettings
from rollbridge.consumer.group import Membership, Owned, Phase, ReloadHistory
from rollbridge.consumer.records import Message
from rollbridge.errors import InvalidNameError, InvalidRequestError, KafkaUnavailableError, TruncatedError
from rollbridge.kafka.groups import CommittedOffset, GroupOffsetStore
from rollbridge.kafka.metadata import CodeError, Isolation
from rollbridge.kafka.offsets import LogOffsets
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.group_offsets import GroupMember, parse_group_metadata
from rollbridge.stream.names import Partition, StreamName, is_segment_topic, show_partition
from rollbridge.stream.routing import place_of_partition

# Segments and offsets that callers name


_TIMEOUT_S: Final = 30.0
COMMIT_TIMEOUT_S: Final = 60.0
"""Longest wait of a synchronous commit."""
_nobody: Callable[[], None] = lambda: None  # noqa: E731

FindStream = Callable[[str, Callable[[], None]], StreamName | None]
"""Finder of the stream that has adopted a topic, given a callback for when the answer may change; None for none."""


class PartitionNames:
    """Resolver of partitions, as applications name them, to segments, and of special offsets to numbers."""

    def __init__(
        self,
        consumer: KafkaConsumer,
        members: Membership,
        offsets: LogOffsets,
        load: ReloadHistory,
        find: FindStream,
        settings: ConsumerSettings,
    ) -> None:
        self._consumer = consumer
        self._members = members
        self._offsets = offsets
        self._load = load
        self._find = find
        self._reset = settings.reset

    def find(self, place: TopicPartition) -> Partition:
        """Return where the segment lies that ``place`` names, or the partition of a plain topic.

        Raises:
            InvalidRequestError: ``place`` names no segment.
            TruncatedError, StreamRecreatedError: The segment no longer exists.
            StreamNotFoundError, ZooKeeperUnavailableError.
        """
        topic, members = place.topic, self._members
        if topic in members.plain:
            return topic, place.partition
        if "/" not in topic and is_segment_topic(topic):
            return topic, 0
        try:
            name = self.stream(topic)
        except InvalidNameError as fault:
            raise InvalidRequestError(f"{topic!r} names no segment: {fault}") from None
        if name is None:
            members.shared.add(topic)
            return topic, place.partition
        history = self.learn(name)
        return place_of_partition(members.places(name), place.partition, history, lambda: self._read(name))

    def stream(self, name: str) -> StreamName | None:
        """Return the stream that a name means, or that has adopted a topic; None for a plain topic.

        Raises:
            InvalidNameError: It is the name of none of these.
            ZooKeeperUnavailableError.
        """
        if "/" in name:
            return StreamName.parse(name)
        known = self._members.index.adopted.get(name)
        stream = self._find(name, _nobody) if known is None else known.stream
        if stream is not None:
            self._members.names[stream] = name
        return stream

    def learn(self, stream: StreamName) -> EpochHistory:
        """Return the last known epochs of a stream; read them if there are none.

        Raises:
            StreamNotFoundError, ZooKeeperUnavailableError.
        """
        return self._members.known.get(stream) or self._read(stream)

    def _read(self, stream: StreamName) -> EpochHistory:
        self._members.learn_places(stream)
        history = self._members.known[stream] = self._load(stream, _nobody, None)
        return history

    def absolute(self, place: Partition, offset: int) -> int:
        """Return ``offset`` as a number, looking up the beginning or the end.

        Raises:
            InvalidRequestError: The offset is negative, and neither the beginning nor the end.
        """
        if offset == OFFSET_BEGINNING:
            return self._offsets.first([place])[place]
        if offset == OFFSET_END:
            return self._offsets.end([place], Isolation.READ_COMMITTED)[place]
        if offset < 0:
            name = show_partition(place)
            raise InvalidRequestError(f"{offset} is not an offset of {name} to continue at; nothing was committed")
        return offset


logger = limited(logging.getLogger(__name__))


class Commits:
    """Record of which offsets count as processed, and their commits if ``enable.auto.commit`` is set."""

    def __init__(
        self,
        consumer: KafkaConsumer,
        group: GroupOffsetStore,
        members: Membership,
        places: PartitionNames,
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
        """Record that a segment was handed out up to and including offset ``last``."""
        item.next = last + 1
        self._given.append(item)

    def handed_out(self) -> None:
        """Count everything handed out so far as processed: the application asks for more, or closes."""
        if self._settings.auto_store:
            for item in self._given:
                item.handled = item.next
        self._given.clear()

    def chosen(
        self, message: Message | KafkaMessage | None, offsets: list[TopicPartition] | None
    ) -> tuple[list[TopicPartition], list[TopicPartition]]:
        """Return the offsets that a call of ``commit`` asks for, rounded up, and those of finished segments.

        Offsets of finished segments are reported as committed but not sent.

        Raises:
            ValueError: Both a message and offsets were given.
            InvalidRequestError: An offset is invalid or was never handed out.
            StreamRecreatedError: A segment belongs to a former life of its stream.
            KafkaException: There is nothing to commit, or the message is an event and no record.
        """
        if message is not None and offsets is not None:
            raise ValueError("message and offsets are mutually exclusive; nothing was committed")
        wanted: dict[Partition, int] = {}
        notes: dict[Partition, str] = {}
        if message is not None:
            wanted[self._place(message)] = _behind(message)
        elif offsets is not None:
            for place in offsets:
                if place.offset == OFFSET_INVALID:
                    continue  # what `position` returns for a segment that was not begun
                if place.offset < 0:
                    raise InvalidRequestError(f"offset {place.offset} cannot be committed; nothing was committed")
                with suppress(TruncatedError):
                    at = self._places.find(place)
                    wanted[at], notes[at] = place.offset, place.metadata or ""
            if not wanted and any(place.offset != OFFSET_INVALID for place in offsets):
                return [], []  # all of them were removed
        else:
            for item in self._members.owned.values():
                offset = item.next if self._settings.auto_store else item.handled
                if item.phase is Phase.OPEN and offset >= 0:
                    wanted[item.place] = offset
        if not wanted:
            raise KafkaException(KafkaError(KafkaError._NO_OFFSET))
        over = {at for at in wanted if self._members.is_over(at)}
        for at in wanted.keys() - over:
            self._members.check_commit(at, wanted[at])
        return (
            [self._members.rounded(at, offset, notes.get(at, "")) for at, offset in wanted.items() if at not in over],
            [TopicPartition(*at, wanted[at]) for at in wanted if at in over],
        )

    def store(self, message: Message | KafkaMessage | None, offsets: list[TopicPartition] | None) -> None:
        """Record offsets that the application has processed.

        Raises:
            InvalidRequestError: ``enable.auto.offset.store`` is on; or as for :meth:`chosen`.
            KafkaException: A segment is not assigned, or the message is an event and no record.
        """
        if self._settings.auto_store:
            raise InvalidRequestError("store_offsets needs enable.auto.offset.store=false")
        if message is not None and offsets is not None:
            raise ValueError("message and offsets are mutually exclusive")
        if message is None and offsets is None:
            raise ValueError("expected either message or offsets")
        wanted = [] if message is None else [(self._place(message), _behind(message))]
        wanted += [(self._places.find(place), place.offset) for place in offsets or ()]
        for at, offset in wanted:
            item = self._members.owned.get(at)
            if item is None:
                why = f"{show_partition(at)} is not assigned"
                raise KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION, why))
            if not self._members.is_over(at):
                self._members.check_commit(at, offset)
        for at, offset in wanted:
            self._members.owned[at].handled = offset

    def _place(self, message: Message | KafkaMessage) -> Partition:
        """Return where a message lies, which may be one of confluent-kafka's own."""
        if isinstance(message, Message):
            return message.place
        return self._places.find(TopicPartition(message.topic() or "", message.partition() or 0))

    def commit_sometimes(self) -> None:
        """Commit once the interval has elapsed."""
        if time.monotonic() >= self._commit_at:
            self._commit_at = time.monotonic() + self._settings.interval_ms / 1000
            self.commit(list(self._members.owned))

    def commit(self, segments: Iterable[Partition]) -> None:
        """Commit processed offsets of these segments that were not committed yet; a later poll reports the outcome.

        Does not block, not even when segments are revoked: the commit travels to the broker on the connection on which
        this member afterwards gives up the segments or leaves, and brokers answer in that order. So the next owner
        finds the commit, and a silent broker delays no other member.
        """
        if not self._settings.auto_commit:
            return
        known = self._members.owned
        own = [known[at] for at in segments if at in known and self._members.fault_of(at) is None]
        due = {item.place: item.handled for item in own if item.phase is Phase.OPEN and item.handled > item.sent}
        if not due:
            return
        for at, offset in due.items():
            self._members.owned[at].sent = offset
        places = [self._members.rounded(at, offset) for at, offset in due.items()]
        try:
            self._consumer.commit(offsets=places, asynchronous=True)
        except KafkaException as exc:
            logger.info("consumer.commit_failed group=%s: %s", self._settings.group_id, exc)

    def carry_out(self, places: list[TopicPartition]) -> list[TopicPartition]:
        """Commit and wait for the answer; may be called within rebalance callbacks.

        Bypasses librdkafka, which waits without end if a broker goes away at the wrong moment. An automatic commit sent
        earlier, on another connection, can be applied later than this one only if a broker stalls in between.

        Raises:
            KafkaException: As from confluent-kafka's consumer; ``_TIMED_OUT`` if no answer arrived in time, in which
                case the outcome is unknown.
        """
        member = parse_group_metadata(self._consumer.consumer_group_metadata())
        commits = [CommittedOffset(item.topic, item.partition, item.offset, item.metadata or "") for item in places]
        group_id = self._settings.group_id
        try:
            self._group.write(member, commits, timeout_s=COMMIT_TIMEOUT_S)
        except CodeError as fault:
            why = f"a commit of group {group_id} is refused: {fault}"
            raise KafkaException(KafkaError(fault.code.value, why)) from fault
        except KafkaUnavailableError as fault:
            why = (
                f"group {group_id} has not answered a commit within {COMMIT_TIMEOUT_S:g} s; it is "
                f"not known whether it is carried out: commit again; {fault}"
            )
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, why, retriable=True)) from fault
        return [TopicPartition(item.topic, item.partition, item.offset) for item in places]

    def confirmed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> bool:
        """Process the outcome of a commit; return False if it only opens or closes segments: no callback."""
        own = self._members.sent(error, partitions)
        if error is None:
            self._members.noted(partitions)
        else:
            self._unsent(map(_place, partitions))
        return not own

    def _unsent(self, segments: Iterable[Partition]) -> None:
        """Mark commits of these segments as not sent, so that the next round repeats them."""
        for at in segments:
            if (item := self._members.owned.get(at)) is not None:
                item.sent = -1


def _behind(message: Message | KafkaMessage) -> int:
    """Return the offset behind a record.

    Raises:
        KafkaException: It is an event, such as the end of a partition, whose offset is that of the next record.
    """
    error, offset = message.error(), message.offset()
    if error is not None or offset is None or offset < 0:
        what = "without an offset" if error is None else f"with error: '{error.str()}'"
        why = f"Cannot commit or store offsets for message {what}; nothing was committed"
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, why))
    return offset + 1


def _place(item: TopicPartition) -> Partition:
    return item.topic, item.partition


class Rebalances:
    """Rebalance callbacks of the consumer; librdkafka calls them on the polling thread.

    Attributes:
        tell: Callbacks of the application, by event.
        placing: True during the ``on_assign`` callback, in which ``assign`` chooses start offsets.
        revoking: True during ``on_revoke`` and ``on_lost``, in which ``unassign`` has nothing to do.
    """

    def __init__(self, members: Membership, commits: Commits, *, cooperative: bool) -> None:
        self._members = members
        self._commits = commits
        self._cooperative = cooperative
        self.tell: dict[str, Callable[[list[TopicPartition]], None]] = {}
        self.placing = self.revoking = False

    def assigned(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Take over segments and pause them; :meth:`.Membership.step` resumes each once it may be read."""
        places = [TopicPartition(item.topic, item.partition, 0) for item in partitions]
        if self._cooperative:
            consumer.incremental_assign(places)
        else:
            self._members.revoked(list(self._members.owned))
            consumer.assign(places)
        if places:
            consumer.pause(places)
        self._members.assigned(map(_place, partitions))
        self.placing = True
        try:
            self._call("assign", partitions)
        finally:
            self.placing = False

    def revoked(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Commit and give up segments that this member still owns, whatever the application's callback raises."""
        try:
            self._commits.commit(map(_place, partitions))
            self._say_farewell("revoke", partitions)
        finally:
            self._give_up(consumer, partitions)

    def lost(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        """Give up segments that already belong to others: nothing can be committed in them any more."""
        try:
            self._say_farewell("lost" if "lost" in self.tell else "revoke", partitions)
        finally:
            self._give_up(consumer, partitions)

    def _say_farewell(self, event: str, partitions: list[TopicPartition]) -> None:
        self.revoking = True
        try:
            self._call(event, partitions)
        finally:
            self.revoking = False

    def _give_up(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> None:
        self._members.revoked(map(_place, partitions))
        if self._cooperative:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()

    def _call(self, event: str, partitions: list[TopicPartition]) -> None:
        callback = self.tell.get(event)
        if callback is not None:
            callback([TopicPartition(item.topic, item.partition, item.offset) for item in partitions])


# Registry of consumers, consulted when a transaction commits offsets for their group


class Judge(Protocol):
    """Knowledge that a member has of its group."""

    def is_over(self, place: Partition) -> bool:
        """Return True if the group has read a segment to its end."""

    def check_commit(self, place: Partition, offset: int) -> None:
        """Raise InvalidRequestError for an offset that no member can have read."""


_introduced: Final[WeakValueDictionary[tuple[str, str], Judge]] = WeakValueDictionary()


def introduce(metadata: object, judge: Judge) -> None:
    """Register ``judge`` for commits that carry these group metadata; the registry holds it weakly."""
    try:
        member = parse_group_metadata(metadata)
    except InvalidRequestError:
        return  # the call that receives the metadata raises for them
    if member.member_id:
        _introduced[member.group_id, member.member_id] = judge


def check_offsets(member: GroupMember, offsets: Mapping[Partition, int]) -> None:
    """Refuse offsets of segments that would count records as read that no member can have read.

    Raises:
        InvalidRequestError: A segment waits for its predecessors, or fewer records of it were handed out.
    """
    judge = _introduced.get((member.group_id, member.member_id))
    if judge is not None:
        for place, offset in offsets.items():
            if not judge.is_over(place):
                judge.check_commit(place, offset)
