"""``rollbridge.Consumer``: a member of a consumer group, with confluent-kafka's names, that keeps each key's order.

::

    consumer = rollbridge.Consumer({"bootstrap.servers": "...", "zookeeper": "...", "group.id": "billing"})
    consumer.subscribe(["sales/orders"])  # streams, adopted topics and plain ones
    while True:
        message = consumer.poll(1.0)

Members share the segments by Kafka's own group protocol. A segment is handed out only after the group has committed
its predecessors to their sealed ends, whichever member read them. An application that commits manually must therefore
commit everything it has read, not only every so many records: after a seal, nothing else may arrive until it does.

An adopted topic keeps its name, and its partitions are Kafka's. The group's offsets are the topic's own, so native
consumers continue where this one has stopped, and vice versa. A plain topic, which no stream has adopted, is read as
confluent-kafka does. If it is adopted or released meanwhile, reading continues where it was.

Errors are confluent-kafka's: ``KafkaException``, ``ValueError`` for arguments that cannot be, ``RuntimeError`` once it
is closed. An error of :mod:`rollbridge.errors` that a docstring names is the ``__cause__`` of a ``KafkaException``.

Wherever partitions are accepted, ``TopicPartition("sales/orders", 3)`` means the segment with that ``message.topic()``
and ``message.partition()``: partition numbers count the segments of a stream and keep their meaning for as long as it
lives. The topic of a segment is accepted as well. Partitions that are returned carry the topics of segments.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar
from weakref import finalize

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    OFFSET_STORED,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka import Message as KafkaMessage

from rollbridge.base.arguments import checked
from rollbridge.base.deadlines import BackgroundCall, Deadline, answers_within
from rollbridge.base.forks import check, hold, is_gone
from rollbridge.base.logs import limited
from rollbridge.base.options import keys_of, unknown, values_of
from rollbridge.base.security import PREFIXED_KEYS, SECURITY_KEYS, take_prefixed
from rollbridge.config import ConsumerOptions, ConsumerSettings, load_settings
from rollbridge.consumer.adopted import BREAKING, TopicGuard
from rollbridge.consumer.commits import COMMIT_TIMEOUT_S, Commits, PartitionNames, Rebalances, introduce
from rollbridge.consumer.group import Membership, Owned, Phase
from rollbridge.consumer.records import BatchFetcher, Message, Origin, Writers, last_offsets
from rollbridge.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    RollbridgeError,
    StreamNotFoundError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.clients import CONSUMER_KEYS, TICK_S, Config, consumer_config, open_consumer
from rollbridge.kafka.errors import AuthenticationError, NotAuthorizedError, translate
from rollbridge.kafka.metadata import Isolation
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.config import StreamConfig, StreamState
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.names import SegmentPlaces, StreamName, is_segment_topic, is_topic_name, show_partition
from rollbridge.stream.reading import Reset

# Streams and topics in the shape of confluent-kafka's ``ClusterMetadata``.


@dataclass(frozen=True, slots=True)
class PartitionView:
    """Active segment."""

    id: int
    """Partition number of the segment."""
    topic: str
    """Kafka topic that holds the segment."""
    error: None = None


@dataclass(frozen=True, slots=True)
class TopicView:
    """Stream with its active segments."""

    topic: str
    partitions: dict[int, PartitionView]
    error: None = None

    @classmethod
    def of(cls, config: StreamConfig, history: EpochHistory) -> TopicView:
        """Return the view of a stream."""
        numbers = history.graph.partitions
        segments = [(numbers[item.id], config.place(item.id)[0]) for item in history.active.segments]
        return cls(str(config.name), {number: PartitionView(number, topic) for number, topic in segments})


def list_all(
    client: Any,
    topic: str | None,
    timeout: float,
    streams: Callable[[], Iterable[StreamConfig]],
    history: Callable[[str], EpochHistory],
) -> Any:
    """Return Kafka's metadata, of all topics or of one, with the streams under their names in addition.

    Args:
        client: confluent-kafka's client that asks.
        topic: The only topic, or stream, that is wanted; None for all.
        timeout: Of the brokers, in s; negative for none.
        streams: Reads the configurations of all streams.
        history: Reads the epochs of one; raises StreamNotFoundError.

    Raises:
        StreamNotFoundError: No stream has this name.
        KafkaException: From confluent-kafka's client.
    """
    if topic is not None and "/" not in topic:
        return client.list_topics(topic, timeout=timeout)
    views: dict[str, TopicView] = {}
    for config in streams():
        name = str(config.name)
        if topic in (None, name):
            try:
                views[name] = TopicView.of(config, history(name))
            except StreamNotFoundError:
                continue  # deleted meanwhile
    if topic is not None and topic not in views:
        raise StreamNotFoundError(f"stream {topic} does not exist")
    metadata = client.list_topics(timeout=timeout)
    metadata.topics = views if topic is not None else {**metadata.topics, **views}
    return metadata


# What callers of confluent-kafka expect: its exceptions, and its answer of a closed consumer.
#
# Code that was written for it catches ``KafkaException``, and looks at ``args[0].code()``. So that is what
# :class:`rollbridge.Consumer` raises; rollbridge's own error is the ``__cause__``.


_CODES: Final[tuple[tuple[type[RollbridgeError], int], ...]] = (
    (NotAuthorizedError, KafkaError.TOPIC_AUTHORIZATION_FAILED),
    (AuthenticationError, KafkaError._AUTHENTICATION),
    (InvalidRequestError, KafkaError._INVALID_ARG),
    (TruncatedError, KafkaError._AUTO_OFFSET_RESET),
    (NotFoundError, KafkaError.UNKNOWN_TOPIC_OR_PART),
    (FencedError, KafkaError._FENCED),
    (ConflictError, KafkaError._CONFLICT),
    (OutcomeUnknownError, KafkaError._TIMED_OUT),
    (UnavailableError, KafkaError._TIMED_OUT),
)
"""Error codes; the first class that matches decides."""


def as_kafka_exception(fault: RollbridgeError) -> KafkaException:
    """Return an error as confluent-kafka would raise it; ``retriable()`` if the same call may succeed later."""
    code = next((code for kind, code in _CODES if isinstance(fault, kind)), KafkaError._FAIL)
    return KafkaException(KafkaError(code, str(fault), retriable=isinstance(fault, UnavailableError)))


class _Checked(Protocol):
    def check_usable(self) -> None: ...


P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=_Checked)


def as_theirs(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Have a method refuse a closed consumer, and raise rollbridge's errors as confluent-kafka's."""

    @wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            self.check_usable()
            return method(self, *args, **kwargs)
        except RollbridgeError as fault:
            raise as_kafka_exception(fault) from fault

    return call


logger = limited(logging.getLogger(__name__))

OnRebalance = Callable[["Consumer", list[TopicPartition]], None]

_MOST: Final = 1_000_000
_SLICE_S: Final = 0.1
_STEP_S: Final = 0.02
_CONNECT_S: Final = 10.0
_CLOSE_S: Final = 10.0
_RENEW_S: Final = 1.0
"""Seconds that ZooKeeper may take to say whether topics were adopted or released; asked again later."""
_FOREVER_S: Final = 10.0**9


@checked()
class Consumer:
    """Member of a consumer group over streams. Only one thread at a time may use it. Close it, or use ``with``."""

    _closed = _left = True  # until it is open: a subclass may leave out to call ``__init__``

    def __init__(self, config: Mapping[str, Any] | None = None, /, **settings: Any) -> None:
        """Connect; a subscription or an assignment comes next.

        Args:
            config: confluent-kafka's settings, as far as rollbridge allows them, and
                ``zookeeper`` (``host:port,...``) and ``zookeeper.root``. ``logger`` receives librdkafka's messages.
            settings: The same, with underscores for dots.

        Raises:
            ValueError: ``group.id`` is missing.
            KafkaException: Settings are unknown, not allowed or wrong; the error names all of them. Or no server of
                ZooKeeper answered.
        """
        whole = {**(config or {}), **dotted(settings)}
        if not whole:
            raise TypeError("expected configuration dict")
        if not whole.get("group.id"):
            raise ValueError("Failed to create consumer: group.id must be set")
        try:
            self._open(whole)
        except RollbridgeError as fault:
            raise as_kafka_exception(fault) from fault

    def _open(self, whole: dict[str, Any]) -> None:
        log = whole.pop("logger", logger)
        self._settings = checked = consumer_settings(whole)
        connection = checked.connection
        self._consumer = open_consumer({**checked.kafka, "on_commit": self._committed}, "start a consumer", log)
        kafka = self._kafka = KafkaClient.of(connection)
        self._offsets = kafka.offsets
        self._session = ZooKeeperSession.of(connection)
        try:
            self._session.start(_CONNECT_S)
        except BaseException:
            self._consumer.close()
            raise
        self._metadata = Metadata(self._session)
        self._guard = TopicGuard(self._metadata, kafka.topics)
        group = kafka.group(checked.group_id)
        self._fetcher = BatchFetcher(kafka.log)
        self._writers = Writers(self._fetcher)
        self._members = Membership(
            self._consumer,
            checked.group_id,
            checked.reset,
            group,
            self._offsets,
            self._load,
            self._places_of,
            auto_commit=checked.auto_commit,
        )
        members = self._members
        self._origin = Origin(
            lambda stream: members.known.get(stream), index=members.index, names=members.names, writers=self._writers
        )
        self._places = PartitionNames(self._consumer, members, self._offsets, self._load, self._find, checked)
        self._commits = Commits(self._consumer, group, self._members, self._places, checked)
        self._rebalances = Rebalances(self._members, self._commits, cooperative=checked.cooperative)
        self._dropped = finalize(self, _close_dropped, os.getpid(), self._session)
        self._dropped.atexit = False
        hold(self, "_consumer", "_members", "_commits", "_places", "_rebalances", "_session", "_offsets")
        self._topics: list[str] = []
        self._named: dict[str, SegmentPlaces | None] = {}
        self._renamed = threading.Event()  # set by ZooKeeper's watches: a topic was adopted or released
        self._subscribed: frozenset[str] = frozenset()
        self._to_subscribe: list[str] | None = None
        self._is_member = False
        self._manual = False
        self._is_interrupted = False
        """True while messages are fetched, and once that has raised: what librdkafka had given by then is gone."""
        self._closed = self._left = False
        self._step_at = 0.0

    # Subscription ----------------------------------------------------------------------------------------------

    @as_theirs
    def subscribe(
        self,
        topics: str | Iterable[str],
        on_assign: OnRebalance | None = None,
        on_revoke: OnRebalance | None = None,
        on_lost: OnRebalance | None = None,
    ) -> None:
        """Subscribe to streams: share their segments, those of later epochs included, with the group's other members.

        Args:
            topics: Streams, ``scope/stream``, of which all members of a group name the same ones; adopted topics; plain
                ones; and patterns of topics, ``^...``. What a pattern matches is read as native consumers read it, so
                name streams, and topics that may be scaled.
            on_assign: Called, while polling, with this consumer and newly assigned segments. The callback may call
                :meth:`assign` with other offsets, to begin there; a segment still waits for its predecessors.
            on_revoke: Called before segments are given up; the last chance to commit.
            on_lost: Called instead if they already belong to others.

        Raises:
            ConflictError: The group reads other streams, as its committed offsets show; or an adopted topic has more
                partitions than it had, or was deleted and created again.
            InvalidNameError, StreamNotFoundError, KafkaUnavailableError, ZooKeeperUnavailableError.
        """
        self._check_open()
        wanted = [topics] if isinstance(topics, str) else list(topics)
        if not wanted:
            raise InvalidRequestError("no stream to subscribe to was named")
        named = self._look_up(wanted)
        topics_of_segments = self._take_up(wanted, named)
        self._rebalances.tell = {
            event: partial(callback, self)
            for event, callback in (("assign", on_assign), ("revoke", on_revoke), ("lost", on_lost))
            if callback is not None
        }
        self._manual = False
        self._subscribed = frozenset()
        self._subscribe(topics_of_segments)

    @as_theirs
    def unsubscribe(self) -> None:
        """Leave the group's segments to its other members."""
        self._consumer.unsubscribe()
        self._to_subscribe, self._is_member = None, False
        self._topics, self._named = [], {}
        self._members.histories.clear()
        self._members.plain.clear()

    @as_theirs
    def assign(self, partitions: list[TopicPartition]) -> None:
        """Read exactly these segments, without a group; within ``on_assign``, set the offsets to begin at."""
        self._check_open()
        if self._rebalances.placing:
            self._choose_offsets(partitions)
            return
        chosen = self._resolved(partitions)
        self._consumer.assign(list(chosen.values()))
        self._members.revoked(list(self._members.owned))
        self._members.leave()
        self._own(chosen)

    @as_theirs
    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Read these segments, too, without a group; within ``on_assign``, set the offsets to begin at.

        Raises:
            KafkaException: Segments are shared with the group's other members, as was subscribed.
        """
        self._check_open()
        if self._rebalances.placing:
            self._choose_offsets(partitions)
            return
        self._check_manual()
        chosen = self._resolved(partitions)
        self._consumer.incremental_assign(list(chosen.values()))
        self._own(chosen)

    def _choose_offsets(self, partitions: Iterable[TopicPartition]) -> None:
        chosen: list[tuple[Owned, int]] = []
        for place in partitions:
            item = self._members.owned.get(self._places.find(place))
            if item is not None and place.offset not in (OFFSET_INVALID, OFFSET_STORED):
                chosen.append((item, self._places.absolute(item.place, place.offset)))
        for item, offset in chosen:
            item.override = offset

    def _resolved(self, partitions: Iterable[TopicPartition]) -> dict[Owned, TopicPartition]:
        """Return what segments that are to be assigned by hand are, and where reading begins; change nothing.

        Where that depends on what the group has committed, a poll finds out, as for what is shared out.
        """
        found: dict[Owned, TopicPartition] = {}
        for place in partitions:
            at = self._places.find(place)
            stream, segment = self._members.what(at)
            if stream is not None:
                self._places.learn(stream)
            item = Owned(at, stream, segment, Phase.OPEN, by_hand=True)
            if place.offset in (OFFSET_INVALID, OFFSET_STORED):
                item.phase = Phase.WAITING
                found[item] = TopicPartition(*at, 0)
                continue
            if place.offset >= 0:
                item.next = item.handled = item.sent = place.offset
            elif place.offset not in (OFFSET_BEGINNING, OFFSET_END):
                raise InvalidRequestError(f"{place.offset} is not an offset to begin at; nothing was assigned")
            else:
                item.override = place.offset
            found[item] = TopicPartition(*at, place.offset)
        return found

    def _own(self, chosen: Mapping[Owned, TopicPartition]) -> None:
        """Own segments that librdkafka has taken on by hand."""
        self._manual = True
        waiting = [place for item, place in chosen.items() if item.phase is Phase.WAITING]
        if waiting:
            self._consumer.pause(waiting)
        self._members.take(chosen)

    @as_theirs
    def unassign(self) -> None:
        """Stop reading all segments; within ``on_revoke``, that is done anyway."""
        if self._rebalances.revoking:
            return
        self._consumer.unassign()
        self._members.revoked(list(self._members.owned))

    @as_theirs
    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Stop reading these segments, which were assigned by hand; within ``on_revoke``, that is done anyway.

        Raises:
            KafkaException: Segments are shared with the group's other members, or one of these is not read.
        """
        self._check_open()
        if self._rebalances.revoking:
            return
        self._check_manual()
        places = [self._places.find(place) for place in partitions]
        self._consumer.incremental_unassign([TopicPartition(*place) for place in places])
        self._members.revoked(places)

    def _check_manual(self) -> None:
        if self._topics and not self._manual:
            why = "the group shares out what was subscribed to: offsets to begin at may be set in on_assign"
            raise KafkaException(KafkaError(KafkaError._STATE, why))

    @as_theirs
    def assignment(self) -> list[TopicPartition]:
        """Return the segments assigned to this member, including those that wait for their predecessors."""
        return [TopicPartition(*place) for place in sorted(self._members.owned)]

    # Reading ---------------------------------------------------------------------------------------------------

    @as_theirs
    def poll(self, timeout: float = -1) -> Message | None:
        """Return the next message or error; None if none arrives within ``timeout`` seconds (-1: no limit).

        Raises:
            StreamNotFoundError: A stream was deleted.
            StreamRecreatedError: A stream was deleted and created again. Nothing is handed out until :meth:`subscribe`
                is called again or a new consumer is made, which begins there as ``auto.offset.reset`` says. So it is
                where the topic of an adopted one was.
            ConflictError: The group reads other streams.
            TruncatedError: An adopted topic was deleted.
        """
        return next(iter(self._take(1, timeout)), None)

    @as_theirs
    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Return up to ``num_messages`` messages: those at hand, or the first that arrive within ``timeout`` seconds.

        Unlike confluent-kafka's method of this name, does not wait until that many messages have arrived.
        """
        if not 0 <= num_messages <= _MOST:
            raise ValueError("num_messages must be between 0 and 1000000 (1M)")
        return self._take(num_messages, timeout) if num_messages else []

    def _take(self, most: int, timeout: float) -> list[Message]:
        self._check_open()
        deadline = Deadline(timeout if timeout >= 0 else _FOREVER_S)
        self._commits.handed_out()
        while True:
            self._step()
            left_s = deadline.left()
            self._is_interrupted, was_interrupted = True, self._is_interrupted
            if was_interrupted:
                self._members.rewind()
            first = self._poll(min(left_s, _SLICE_S))
            rest = self._consumer.consume(most - 1, 0) if first is not None and most > 1 else []
            self._is_interrupted = False
            if first is not None:
                if found := self._accept([first, *rest]):
                    self._writers.handed_out([item.raw for item in found])
                    return found
            elif left_s < TICK_S:
                return []

    def _poll(self, seconds: float) -> KafkaMessage | None:
        try:
            return self._consumer.poll(seconds)
        except SystemError as lost:  # confluent-kafka 2.16 loses what a signal's handler raises within 200 ms
            raise KeyboardInterrupt from lost

    def _accept(self, messages: list[KafkaMessage]) -> list[Message]:
        owned = self._members.owned
        if not any(map(KafkaMessage.error, messages)):
            lasts = last_offsets(messages, self._members.shared)
            items = [owned.get(place) for place in lasts]
            late = any(self._members.is_late(place, last) for place, last in lasts.items())
            if not late and all(item is not None and item.phase is Phase.OPEN for item in items):
                for item, last in zip(items, lasts.values(), strict=True):
                    if item is not None:
                        self._commits.give(item, last)
                return [Message(message, self._origin) for message in messages]
        return [Message(message, self._origin) for message in messages if self._is_for_user(message)]

    def _is_for_user(self, message: KafkaMessage) -> bool:
        place = message.topic() or "", message.partition() or 0
        offset, error = message.offset(), message.error()
        item = self._members.owned.get(place)
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF and offset is not None:
                self._members.reached(place, offset)
                return self._settings.show_ends
            is_ours = not self._manual and place[0] not in self._members.plain
            if is_ours and isinstance(translate(error, "read"), NotFoundError):
                # Brokers learn of new topics one after the other; whether the stream itself is gone, its epochs tell.
                logger.info("consumer.retrying partition=%s: %s", show_partition(place), error)
                self._members.recheck(place[0])
                return False
            return True
        if item is None or offset is None:
            return False  # revoked between two messages
        if item.phase is not Phase.OPEN:
            where = show_partition(place)
            logger.warning("consumer.record_early partition=%s: its segment waits; reading it again", where)
            self._consumer.pause([TopicPartition(*place)])
            return False
        if self._members.is_late(place, offset):
            self._members.reached(place, offset)
            return False  # leaders write it to the successors of the segment
        self._commits.give(item, offset)
        return True

    def _step(self) -> None:
        """Do the periodic work between messages."""
        now = time.monotonic()
        if now < self._step_at:
            return
        self._step_at = 0.0  # an error raised here is raised again before anything is handed out
        if not self._manual:
            self._renew()
            self._refresh()
            self._pass_on()
        self._members.step()
        self._commits.commit_sometimes()
        self._step_at = now + _STEP_S

    def _refresh(self) -> None:
        try:
            changed = self._members.refresh()
        except (StreamNotFoundError, *BREAKING):
            self._renamed.set()
            if not self._renew():
                raise
        else:
            if changed:
                self._subscribe(self._members.topics())

    def _subscribe(self, topics: list[str]) -> None:
        if not set(topics) - self._subscribed:
            return  # dropping segments that were read is not worth a rebalance
        self._subscribed = frozenset(topics)
        self._to_subscribe = topics
        self._pass_on()

    def _pass_on(self) -> None:
        """Give librdkafka a subscription that has changed, as soon as that is allowed.

        Until a member that was put out of its group has another id, librdkafka does not notice that it is joining, and
        a change aborts the process (``rd_kafka_cgrp_modify_subscription``, assertion on the join state, 2.16).
        """
        topics = self._to_subscribe
        if topics is None or (self._is_member and not self._consumer.memberid()):
            return
        self._to_subscribe, self._is_member = None, True
        rebalances = self._rebalances
        self._consumer.subscribe(
            topics, on_assign=rebalances.assigned, on_revoke=rebalances.revoked, on_lost=rebalances.lost
        )

    # Topics that are adopted or released -------------------------------------------------------------------------

    def _take_up(self, topics: list[str], named: dict[str, SegmentPlaces | None], *, at_once: bool = True) -> list[str]:
        """Follow these streams and topics; return the topics to subscribe to. If it raises, nothing has changed."""
        adopted = {places.stream: topic for topic, places in named.items() if places is not None}
        streams = [StreamName.parse(topic) for topic in topics if topic not in named]
        plain = [topic for topic, places in named.items() if places is None]
        found = self._members.begin([*streams, *adopted], plain, at_once=at_once)
        self._topics, self._named = topics, named
        self._members.names.update(adopted)
        return found

    def _look_up(self, names: Iterable[str]) -> dict[str, SegmentPlaces | None]:
        """Return where the segments lie of the stream that has adopted each name without a scope.

        None for a plain topic, and for a pattern of topics.

        Raises:
            InvalidNameError: One is the name of no topic, or that of a segment.
            ZooKeeperUnavailableError.
        """
        found: dict[str, SegmentPlaces | None] = {}
        for name in names:
            if "/" in name:
                continue
            stream: StreamName | None = None
            if not name.startswith("^"):
                if not is_topic_name(name):
                    raise InvalidNameError(f"{name!r} is not the name of a topic, and a stream is named scope/stream")
                if is_segment_topic(name):
                    raise InvalidNameError(f"topic {name} is a segment of a stream: subscribe to the stream")
                stream = self._find(name, self._renamed.set)
            found[name] = None if stream is None else self._places_of(stream)
        return found

    def _renew(self) -> bool:
        """Read on otherwise if a topic was adopted or released meanwhile; return True if one was."""
        if not self._renamed.is_set():
            return False
        self._renamed.clear()
        try:
            with answers_within(_RENEW_S):
                named = self._look_up(self._named)
                if named == self._named:
                    return False
                logger.info("consumer.topics_changed group=%s: %s", self._settings.group_id, _changes(named))
                self._subscribe(self._take_up(self._topics, named, at_once=False))
        except UnavailableError as fault:
            logger.info("consumer.topics_unknown: retrying: %s", fault)
            self._renamed.set()
            return False
        except RollbridgeError:
            self._renamed.set()  # raised again by the next call
            raise
        return True

    # Offsets ---------------------------------------------------------------------------------------------------

    @as_theirs
    def commit(
        self,
        message: Message | KafkaMessage | None = None,
        offsets: list[TopicPartition] | None = None,
        asynchronous: bool = True,
    ) -> list[TopicPartition] | None:
        """Commit behind a message, or these offsets, or all that was handed out.

        If only markers are left of a sealed segment, its end is committed, which opens its successors. In a segment
        that was removed, or that any member has read to its end, nothing is committed any more: taking the offset back
        would keep its successors waiting.

        Raises:
            InvalidRequestError: An offset is beyond what this member was given, or in a segment that waits for others:
                both would count unread records as read. Nothing was committed.
            StreamRecreatedError: A segment is of a stream that was deleted and created again; nothing was committed.
            KafkaException: As from confluent-kafka's consumer, when not asynchronous; ``_TIMED_OUT`` after a
                minute, in which case the outcome is unknown.
        """
        try:
            places, over = self._commits.chosen(message, offsets)
        except KafkaException as fault:
            if asynchronous and fault.args[0].code() == KafkaError._NO_OFFSET:
                return None
            raise
        if asynchronous:
            if places:
                self._consumer.commit(offsets=places, asynchronous=True)
            return None
        try:
            done = self._commits.carry_out(places) if places else []
        except KafkaException as exc:
            if not isinstance(translate(exc, "commit"), NotFoundError):
                raise
            if self._members.reread():
                self._subscribe(self._members.topics())
            left = self._members.without_removed(places)
            if len(left) == len(places):
                raise
            done = self._commits.carry_out(left) if left else []
        self._members.noted(done)
        return done + over

    @as_theirs
    def store_offsets(
        self, message: Message | KafkaMessage | None = None, offsets: list[TopicPartition] | None = None
    ) -> None:
        """Mark offsets as processed for the automatic commit; needs ``enable.auto.offset.store=false``."""
        self._commits.store(message, offsets)

    @as_theirs
    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return the group's committed offsets of segments; ``OFFSET_INVALID`` where there is none."""
        return self._consumer.committed([TopicPartition(*self._places.find(item)) for item in partitions], timeout)

    @as_theirs
    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return the offset behind the last message handed out, by segment; ``OFFSET_INVALID`` before the first.

        For a segment of which nothing is left, that is the sealed end, behind any markers.
        """
        places = [self._places.find(item) for item in partitions]
        return [TopicPartition(*place, self._members.position(place)) for place in places]

    @as_theirs
    def seek(self, partition: TopicPartition) -> None:
        """Continue reading a segment from another offset.

        Raises:
            KafkaException: The segment is not assigned, or waits for its predecessors.
        """
        place = self._places.find(partition)
        item = self._members.owned.get(place)
        if item is None or item.phase is Phase.WAITING:
            why = f"Erroneous state: {show_partition(place)} is not being read by this member"
            raise KafkaException(KafkaError(KafkaError._STATE, why))
        offset = self._places.absolute(place, partition.offset)
        self._consumer.seek(TopicPartition(*place, offset))
        if item.phase is Phase.DONE and not item.paused:
            self._consumer.resume([TopicPartition(*place)])
        item.phase, item.next, item.handled, item.end = Phase.OPEN, offset, offset, -1

    @as_theirs
    def pause(self, partitions: list[TopicPartition]) -> None:
        """Hand out nothing of these segments until they are resumed."""
        self._set_paused(partitions, True)

    @as_theirs
    def resume(self, partitions: list[TopicPartition]) -> None:
        """Hand out records of these segments again; those that wait for their predecessors keep waiting."""
        self._set_paused(partitions, False)

    @as_theirs
    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        """Return the first offset of a segment and its end."""
        return self._consumer.get_watermark_offsets(
            TopicPartition(*self._places.find(partition)), timeout=timeout, cached=cached
        )

    @as_theirs
    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return the first offset with this time (given as offset, ms since 1970) or a later one.

        ``OFFSET_END`` where there is none. A segment holds part of its stream's time only.
        """
        places = [TopicPartition(*self._places.find(item), item.offset) for item in partitions]
        return self._consumer.offsets_for_times(places, timeout)

    @as_theirs
    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return confluent-kafka's ``ClusterMetadata`` with the streams as further topics, or of one of them.

        Raises:
            StreamNotFoundError, ZooKeeperUnavailableError.
            KafkaException: No broker answers.
        """
        self._check_open()
        with nullcontext() if timeout < 0 else answers_within(timeout):
            return list_all(self._consumer, topic, timeout, self._metadata.streams, self._history)

    def _history(self, name: str) -> EpochHistory:
        return self._read_history(StreamName.parse(name))

    @as_theirs
    def cluster_id(self, timeout: float = -1) -> str:
        """Return the id of the Kafka cluster."""
        self._check_open()
        return self._consumer.cluster_id(timeout)

    # The group -------------------------------------------------------------------------------------------------

    @as_theirs
    def consumer_group_metadata(self) -> Any:
        """Return the group metadata that ``send_offsets_to_transaction`` takes."""
        metadata = self._consumer.consumer_group_metadata()
        introduce(metadata, self._members)
        return metadata

    @as_theirs
    def memberid(self) -> str:
        """Return this member's id in the group."""
        return self._consumer.memberid()

    def close(self) -> None:
        """Commit what was handed out if commits are automatic, leave the group and disconnect.

        Takes little longer than 10 s even if no broker answers: the group's other members then resume from the offsets
        committed earlier, once this member's session has timed out.
        """
        if self._closed or is_gone(self._consumer):
            return
        self._closed = True
        self._dropped.detach()
        deadline = Deadline(_CLOSE_S)
        try:
            self._commits.handed_out()
            self._commits.commit(list(self._members.owned))
            self._give_up(deadline)
        finally:
            self._left = True
            try:
                self._leave(deadline)
            finally:
                self._session.close()
                self._fetcher.close()
                self._kafka.close()

    def _give_up(self, deadline: Deadline) -> None:
        """Give up all segments on the calling thread, so that ``on_revoke`` runs here and may commit a last time.

        A static member keeps its segments until its session times out.
        """
        if self._manual or self._settings.is_static:
            return
        with suppress(KafkaException):
            self._consumer.unsubscribe()
            while self._members.owned and not deadline.passed():
                self._poll(min(_SLICE_S, deadline.left()))

    def _leave(self, deadline: Deadline) -> None:
        """Leave the group within the deadline.

        librdkafka's ``close`` waits for minutes if the group coordinator is silent, so it runs on a thread of its own.
        """
        closing: BackgroundCall[None] = BackgroundCall("rollbridge-consumer-close")
        closing.begin(self._consumer.close)
        if closing.wait(deadline.left()):
            closing.take()  # raises what a callback has raised
        else:
            logger.warning(
                "consumer.close_timeout group=%s timeout_s=%g: the group may not know the last commits and that this "
                "member has left; it is told if a broker still answers",
                self._settings.group_id,
                _CLOSE_S,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc_value: object, exc_traceback: object) -> None:
        self.close()

    # Inside ----------------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise if it is closed, or was made by another process. Callbacks of its last moment may still commit."""
        if self._left:
            raise RuntimeError("Consumer closed")  # the error that confluent-kafka raises
        check(self._consumer)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Consumer closed")

    def _load(self, name: StreamName, changed: Callable[[], None], known: EpochHistory | None) -> EpochHistory:
        history = self._read_history(name, changed, known)
        self._guard.check(name, history, changed, look=known is None)
        return history

    def _read_history(
        self, name: StreamName, changed: Callable[[], None] | None = None, known: EpochHistory | None = None
    ) -> EpochHistory:
        history = self._metadata.history(name, changed, known)
        if history is None:
            raise StreamNotFoundError(f"stream {name} does not exist")
        return history

    def _find(self, topic: str, changed: Callable[[], None]) -> StreamName | None:
        try:
            stream = self._metadata.name_of(topic, changed)
        except (StreamNotFoundError, InvalidNameError):  # the latter for internal topics
            return None
        config = self._metadata.stream(stream)
        return None if config is None or config.state is StreamState.DELETING else stream

    def _places_of(self, name: StreamName) -> SegmentPlaces:
        config = self._metadata.stream(name)
        return SegmentPlaces(name) if config is None else config.places

    def _set_paused(self, partitions: list[TopicPartition], paused: bool) -> None:
        for place in map(self._places.find, partitions):
            item = self._members.owned.get(place)
            if item is None:
                why = f"{show_partition(place)} is not assigned"
                raise KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION, why))
            item.paused = paused
            if item.phase is Phase.OPEN:
                (self._consumer.pause if paused else self._consumer.resume)([TopicPartition(*place)])

    def _committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        if self._commits.confirmed(error, partitions) and self._settings.on_commit is not None:
            self._settings.on_commit(error, partitions)


def _close_dropped(process: int, session: ZooKeeperSession) -> None:
    """End the session of a dropped consumer; librdkafka ends its own threads."""
    if process == os.getpid():
        logger.warning("consumer.dropped client=%s: it was not closed; closing it now", session.name)
        threading.Thread(target=session.close, name="rollbridge-close", daemon=True).start()


def _changes(named: Mapping[str, SegmentPlaces | None]) -> str:
    return ", ".join(f"{topic} is {places.stream if places else 'a plain topic'}" for topic, places in named.items())


# Settings: confluent-kafka's names, checked against a list of those allowed. Those that load code
# (``plugin.library.paths``) or undo a guarantee are refused by name, all at once.


_CALLBACKS: Final = frozenset({"error_cb", "stats_cb", "throttle_cb"})
"""Functions that are passed on to librdkafka."""
_PLAIN_NAMES: Final = _CALLBACKS | {"on_commit", "on_delivery", "dr_cb", "logger"}
"""Settings whose names have no dots."""


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that were given as keyword arguments, by their names."""
    return {key if key in _PLAIN_NAMES else key.replace("_", "."): value for key, value in settings.items()}


def consumer_settings(config: Mapping[str, Any]) -> ConsumerSettings:
    """Check a configuration; missing addresses come from where :func:`rollbridge.connect` finds them.

    Raises:
        ConfigError: Settings are unknown, not allowed or wrong; the error names all of them.
    """
    faults = list(unknown(config, _ALLOWED, "may not be set here", _CONSTANTS))
    values = values_of(ConsumerOptions, config, faults)
    ConfigError.raise_for(faults)
    options = ConsumerOptions(**values)
    connection = load_settings(
        {
            "bootstrap_servers": options.bootstrap_servers,
            "zookeeper": options.zookeeper,
            "zookeeper_root": options.zookeeper_root,
            "client_name": options.client_id,
        }
    )
    connection = replace(
        connection,
        kafka={**connection.kafka, **{key: str(config[key]) for key in SECURITY_KEYS & set(config)}},
        zookeeper_security={**connection.zookeeper_security, **take_prefixed(config)},
    )
    kafka = consumer_config(
        connection.bootstrap_servers,
        isolation=Isolation.READ_COMMITTED,
        group_id=options.group_id,
        security=connection.kafka,
        client_id=connection.client_name,
        extra={**_DEFAULTS, **{key: config[key] for key in CONSUMER_KEYS & set(config)}},
    )
    kafka |= {
        "enable.partition.eof": True,
        "partition.assignment.strategy": options.assignor,
        # Start offsets are always explicit, so this setting only applies to deleted ones: reading continues at what
        # is left, whatever a new group begins with, since going to the end would skip records that are still there.
        "auto.offset.reset": "error" if options.reset is Reset.ERROR else "earliest",
        **{key: config[key] for key in _CALLBACKS & set(config)},
    }
    if options.instance_id is not None:
        kafka["group.instance.id"] = options.instance_id
    return ConsumerSettings(**values, connection=connection, kafka=kafka)


_DEFAULTS: Final[Config] = {"fetch.queue.backoff.ms": 5, "topic.metadata.refresh.interval.ms": 10_000}
"""Where they differ from the library's. Partitions that were added to a topic are shared out once they are seen."""
_CONSTANTS: Final = {"default.api.timeout.ms": round(COMMIT_TIMEOUT_S * 1000)}
"""Options of the last release that cannot be set any more."""
_ALLOWED: Final = keys_of(ConsumerOptions) | _CALLBACKS | SECURITY_KEYS | PREFIXED_KEYS | CONSUMER_KEYS
