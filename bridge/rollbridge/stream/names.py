"""Names of scopes, streams and groups; the topics and qualified names that are derived from them, in both directions.

==============================  ==============================================
what                            name
==============================  ==============================================
segment                         topic ``scope.stream.segment-N.epoch-E``
                                qualified ``scope/stream/N/#epoch.E``
segment of a transaction        qualified ``scope/stream/N/#epoch.E/#transaction.ID``
segment of an adopted topic     partition N of that topic, which keeps its name: see :class:`SegmentPlaces`
transaction buffer of a stream  topic ``scope.stream.transaction-buffer``; of one that was deleted and created again
                                ``scope.stream.transaction-buffer.epoch-E``, where E is its first epoch
of one that has adopted a topic ``__transaction_buffer_scope.DIGEST``, with ``.epoch-E`` likewise: see
                                :meth:`StreamName.internal_buffer_topic`
commit log of a group           topic ``scope.group.commit-log``
terminated transactions         topic ``__terminated_txn_state_scope.group``
snapshots of a scope's buffers  topics ``scope.__transaction_buffer_snapshot_indexes`` and ``..._segments``, or
                                ``scope.__transaction_buffer_snapshot`` for the format without segments
==============================  ==============================================

Everything that a client may write to starts with ``scope.stream.``, so a prefixed Kafka ACL gives a client one stream
and no more; of the topics that start with ``__`` it may write to the buffers of its streams, and the others are the
coordinators' alone. Neither part of a name may hold a dot, so what a topic is, its name tells.

Source: PDP-24, "Fully qualified segment name".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

from rollbridge.base.errors import InvalidNameError, InvalidRequestError
from rollbridge.base.ids import EPOCH_MAX, SEGMENT_NUMBER_MAX, SegmentId, TransactionId

DEFAULT_GROUP: Final = "default"
TOPICS_SCOPE: Final = "topics"
"""The scope of streams that have adopted a topic, unless another one is given."""
TOPIC_NAME_MAX: Final = 249
"""Kafka's limit for a topic name, which must hold after our affixes."""

Partition = tuple[str, int]
"""A place in Kafka: topic and partition. A plain tuple, because millions are made and compared, and so that it is not
taken for confluent-kafka's ``TopicPartition``, which has an offset as well."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TOPIC = re.compile(rf"[A-Za-z0-9._-]{{1,{TOPIC_NAME_MAX}}}")
_CLIENT_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_DOTS: Final = frozenset((".", ".."))
"""Names that no node of ZooKeeper may have."""
_TERMINATED: Final = "__terminated_txn_state_"
_COMMIT_LOG: Final = ".commit-log"
_BUFFER: Final = ".transaction-buffer"
_INTERNAL_BUFFER: Final = "__transaction_buffer_"
_SNAPSHOT: Final = ".__transaction_buffer_snapshot"
_NUMBER = r"(0|[1-9][0-9]{0,9})"
_SEGMENT_TOPIC = re.compile(rf"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.segment-{_NUMBER}\.epoch-{_NUMBER}")
_BUFFER_TOPIC = re.compile(
    rf"(?:[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+{re.escape(_BUFFER)}(?:\.epoch-{_NUMBER})?(?:\.move-{_NUMBER})?"
    rf"|{_INTERNAL_BUFFER}[A-Za-z0-9_-]+\.[0-9a-f]{{16}}(?:\.epoch-{_NUMBER})?)"
)
_QUALIFIED = re.compile(
    rf"([A-Za-z0-9_-]+)/([A-Za-z0-9_-]+)/{_NUMBER}/#epoch\.{_NUMBER}(?:/#transaction\.([0-9a-f]{{32}}))?"
)


def check_name(what: str, name: str) -> str:
    """Return ``name`` if it can be a scope, stream or group; ``what`` says which, for the message.

    Raises:
        InvalidNameError: empty, a character outside ``[A-Za-z0-9_-]``, or the prefix ``__`` of internal topics.
    """
    if not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"{name[:TOPIC_NAME_MAX]!r} is not a name for a {what}: one or more of A-Z a-z 0-9 _ - are allowed; "
            "nothing was written"
        )
    if name.startswith("__"):
        raise InvalidNameError(f"{name!r} is not a name for a {what}: the prefix __ is reserved; nothing was written")
    return name


def check_client_name(name: str) -> str:
    """Return ``name`` if it can be a client's name (1 to 128 of ``[A-Za-z0-9._:@-]``, and more than dots)."""
    if not _CLIENT_NAME.fullmatch(name) or name in _DOTS:
        raise InvalidNameError(
            f"{name[:TOPIC_NAME_MAX]!r} is not a client name: 1 to 128 of A-Z a-z 0-9 . _ : @ - are allowed, but not "
            ". or .. alone"
        )
    return name


@dataclass(frozen=True, slots=True, order=True)
class StreamName:
    """``scope/stream``, checked."""

    scope: str
    stream: str

    def __post_init__(self) -> None:
        check_name("scope", self.scope)
        check_name("stream", self.stream)
        longest = self.segment_topic(SegmentId.of(SEGMENT_NUMBER_MAX, EPOCH_MAX))
        if len(longest) > TOPIC_NAME_MAX:
            limit = TOPIC_NAME_MAX - (len(longest) - len(self.scope) - len(self.stream))
            raise InvalidNameError(
                f"scope and stream {str(self)[:60]!r}... have {len(self.scope) + len(self.stream)} characters; "
                f"at most {limit} fit into Kafka's limit of {TOPIC_NAME_MAX} for a topic name; nothing was written"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``scope/stream``.

        Raises:
            InvalidNameError: not two names with a slash between them.
        """
        parts = text.split("/")
        if len(parts) != 2:
            raise InvalidNameError(f"{text!r} is not a stream name: scope/stream is expected; nothing was written")
        return cls(*parts)

    @classmethod
    def of_topic(cls, topic: str, scope: str = TOPICS_SCOPE) -> Self:
        """Return the name of the stream that adopts a topic, unless another one is given.

        Two topics of one cluster never differ in ``.`` and ``_`` alone, so no two of them have the same name here.

        Raises:
            InvalidNameError: the topic's name is too long for that, or begins as those of internal topics do.
        """
        return cls(scope, topic.replace(".", "_"))

    def segment_topic(self, segment: SegmentId) -> str:
        """Return the Kafka topic of a segment."""
        return f"{self.scope}.{self.stream}.segment-{segment.number}.epoch-{segment.epoch}"

    def buffer_topic(self, first_epoch: int = 0, moves: int = 0) -> str:
        """Return the Kafka topic of the transaction buffer of the life of the stream that began with an epoch.

        ``moves`` is how often an earlier version has moved it into another transaction group since.
        """
        topic = f"{self.scope}.{self.stream}{_BUFFER}"
        life = f"{topic}.epoch-{first_epoch}" if first_epoch else topic
        return f"{life}.move-{moves}" if moves else life

    def internal_buffer_topic(self, first_epoch: int = 0) -> str:
        """Return the Kafka topic of the transaction buffer of a life that began with adopting a topic.

        Consumers subscribe to existing topics by patterns such as ``.*orders.*``, so the stream's name is not in it but
        the first 64 bits of its SHA-256; mirrors and inspectors of clusters leave out what begins with ``__``.
        """
        topic = f"{internal_buffers(self.scope)}{hashlib.sha256(self.stream.encode()).hexdigest()[:16]}"
        return f"{topic}.epoch-{first_epoch}" if first_epoch else topic

    def owns_buffer(self, topic: str) -> bool:
        """Return whether a topic has the name of a buffer of this stream, in whatever life."""
        bases = self.buffer_topic(), self.internal_buffer_topic()
        return is_buffer_topic(topic) and any(topic == base or topic.startswith(f"{base}.") for base in bases)

    def qualified(self, segment: SegmentId, transaction: TransactionId | None = None) -> str:
        """Return PDP-24's fully qualified name of a segment, or of a transaction's part of it."""
        name = f"{self.scope}/{self.stream}/{segment.number}/#epoch.{segment.epoch}"
        return name if transaction is None else f"{name}/#transaction.{transaction.value:032x}"

    @property
    def virtual_topic(self) -> str:
        """Topic by which producers at gateways know the stream, unless it has adopted one."""
        return f"{self.scope}.{self.stream}"

    @classmethod
    def of_virtual_topic(cls, topic: str) -> Self | None:
        """Return the stream whose virtual topic has this name; None if none can have it."""
        try:
            return cls(*topic.split(".")) if topic.count(".") == 1 else None
        except InvalidNameError:
            return None

    @property
    def collision_key(self) -> str:
        """Equal for two streams whose topics Kafka would not keep apart (it maps ``.`` to ``_`` in metric names)."""
        return self.virtual_topic.replace(".", "_")

    def __str__(self) -> str:
        return f"{self.scope}/{self.stream}"


@dataclass(frozen=True, slots=True)
class SegmentPlaces:
    """Where the segments of a stream lie in Kafka: each is one partition of a topic.

    A segment has a topic of its own, with that one partition, unless its id names the first epoch of a stream that has
    adopted a topic: then it is the partition of its number there, from the beginning or added later.

    Attributes:
        stream: The stream.
        topic: The adopted topic; empty if there is none.
        first_epoch: The epoch with which this life of the stream began.
    """

    stream: StreamName
    topic: str = ""
    first_epoch: int = 0

    def is_adopted(self, segment: SegmentId) -> bool:
        """Return whether a segment is a partition of the adopted topic."""
        return bool(self.topic) and segment.epoch == self.first_epoch

    def of(self, segment: SegmentId) -> Partition:
        """Return where a segment lies."""
        if self.is_adopted(segment):
            return self.topic, int(segment.number)
        return self.stream.segment_topic(segment), 0

    def own_topics(self, segments: Iterable[SegmentId]) -> list[str]:
        """Return the topics that are the stream's own to create and delete, among those of segments, in order."""
        return sorted(self.of(segment)[0] for segment in segments if not self.is_adopted(segment))

    def segment_at(self, partition: Partition) -> SegmentId | None:
        """Return the segment that lies, or would lie, in a partition; None if none of the stream's can."""
        topic, number = partition
        if self.topic and topic == self.topic:
            return SegmentId.of(number, self.first_epoch)
        try:
            stream, segment = parse_segment_topic(topic)
        except InvalidNameError:
            return None
        return segment if stream == self.stream and self.of(segment) == partition else None


class PlaceIndex:
    """Map from topics and partitions to streams; for adopted topics a name alone does not tell.

    Attributes:
        adopted: Segments of streams that have adopted a topic, by that topic.
    """

    __slots__ = ("adopted",)

    def __init__(self, streams: Iterable[SegmentPlaces] = ()) -> None:
        self.adopted: dict[str, SegmentPlaces] = {}
        for places in streams:
            self.add(places)

    def add(self, places: SegmentPlaces) -> None:
        """Take up a stream."""
        if places.topic:
            self.adopted[places.topic] = places

    def find(self, partition: Partition) -> tuple[StreamName, SegmentId]:
        """Return the stream and segment that a partition is.

        Raises:
            InvalidNameError: it is no segment.
        """
        topic, number = partition
        known = self.adopted.get(topic)
        if known is not None:
            return known.stream, SegmentId.of(number, known.first_epoch)
        return _own(topic)


def show_partition(partition: Partition) -> str:
    """Return a partition for messages: the first one of a topic by the topic's name alone."""
    topic, number = partition
    return f"{topic}, partition {number}" if number else topic


def snapshot_topic(scope: str) -> str:
    """Return the Kafka topic of a scope's single snapshots; no stream begins with ``__``, so no client writes to it."""
    return f"{scope}{_SNAPSHOT}"


def snapshot_segments_topic(scope: str) -> str:
    """Return the Kafka topic of a scope's sealed snapshot segments (PIP-196)."""
    return f"{snapshot_topic(scope)}_segments"


def snapshot_indexes_topic(scope: str) -> str:
    """Return the Kafka topic of a scope's snapshot indexes with the unsealed snapshots (PIP-196)."""
    return f"{snapshot_topic(scope)}_indexes"


def internal_buffers(scope: str) -> str:
    """Return the prefix of the buffers of a scope's streams that have adopted topics."""
    return f"{_INTERNAL_BUFFER}{scope}."


def terminated_topics(scope: str) -> str:
    """Return the prefix of the topics of terminated transactions of a scope's groups."""
    return f"{_TERMINATED}{scope}."


def scope_of(topic: str) -> str:
    """Return the scope that a topic of ours belongs to."""
    return topic.removeprefix(_TERMINATED).removeprefix(_INTERNAL_BUFFER).partition(".")[0]


def is_compacted_topic(topic: str) -> bool:
    """Return whether a Kafka topic holds a state by key, as those of snapshots and terminated transactions do."""
    return topic.startswith(_TERMINATED) or _SNAPSHOT in topic


def group_topics(group: GroupName) -> list[str]:
    """Return the topics, of one partition each, that a leader writes in its native transactions besides segments."""
    scope = group.scope
    snapshots = [snapshot_topic(scope), snapshot_segments_topic(scope), snapshot_indexes_topic(scope)]
    return [group.commit_log_topic, group.terminated_topic, *snapshots]


def is_group_topic(topic: str) -> bool:
    """Return whether a Kafka topic is shared by a whole group, which needs it for every decision.

    No stream's segments are in a topic with such a name, even if another program created it.
    """
    return topic.endswith(_COMMIT_LOG) or is_hidden(topic)


def is_hidden(topic: str) -> bool:
    """Return whether a topic is read by rollbridge only, by its name; commit logs have names that others use."""
    return is_compacted_topic(topic) or is_buffer_topic(topic)


def is_internal(topic: str) -> bool:
    """Return whether a topic is, by its name, an internal one of Kafka or of rollbridge."""
    return topic.startswith("__") or is_group_topic(topic) or is_segment_topic(topic)


def check_adoptable(topic: str) -> None:
    """Raise InvalidNameError unless a stream may adopt a topic of this name: internal topics are refused."""
    if is_internal(topic):
        raise InvalidNameError(
            f"topic {topic} cannot be adopted: by its name it is an internal topic of Kafka or of rollbridge; nothing "
            "was written"
        )
    if not is_topic_name(topic):
        raise InvalidNameError(f"{topic!r} is not the name of a topic; nothing was written")


def is_topic_name(text: str) -> bool:
    """Return whether a topic of Kafka can have this name."""
    return _TOPIC.fullmatch(text) is not None and text not in (".", "..")


def check_stream_or_topic(name: str) -> str:
    """Return ``name`` if it can be that of a stream, or of a topic that a stream has adopted.

    Raises:
        InvalidNameError: it is neither.
    """
    if "/" in name:
        StreamName.parse(name)
    else:
        check_adoptable(name)
    return name


@dataclass(frozen=True, slots=True, order=True)
class GroupName:
    """A transaction group inside a scope: the unit of coordination."""

    scope: str
    group: str = DEFAULT_GROUP

    def __post_init__(self) -> None:
        check_name("scope", self.scope)
        check_name("group", self.group)
        longest = max(self.commit_log_topic, self.terminated_topic, snapshot_segments_topic(self.scope), key=len)
        if len(longest) > TOPIC_NAME_MAX:
            raise InvalidNameError(f"{longest[:60]!r}... exceeds Kafka's {TOPIC_NAME_MAX} characters for a topic name")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``scope/group`` or ``scope.group``."""
        parts = re.split(r"[/.]", text)
        if len(parts) != 2:
            raise InvalidNameError(f"{text!r} is not a group name: scope/group is expected")
        return cls(*parts)

    @classmethod
    def of_any(cls, group: Self | str | None) -> Self | None:
        """Return a group that may be given as its text, or not at all."""
        return cls.parse(group) if isinstance(group, str) else group

    @property
    def commit_log_topic(self) -> str:
        """The Kafka topic of the commit log."""
        return f"{self.scope}.{self.group}{_COMMIT_LOG}"

    @property
    def terminated_topic(self) -> str:
        """The Kafka topic of terminated transactions. Source: PIP-255, ``__terminated_txn_state_${TCid}``."""
        return terminated_topics(self.scope) + self.group

    def transactional_id(self, index: int) -> str:
        """Return the ``index``-th of the fixed Kafka transactional ids that the group's leader uses in turn."""
        return f"rollbridge.{self.scope}.{self.group}.{index}"

    @property
    def sealing_id(self) -> str:
        """The Kafka transactional id with which the group's leader has markers written to what it seals."""
        return f"rollbridge.{self.scope}.{self.group}.seal"

    @property
    def node(self) -> str:
        """The name of the group's ZooKeeper node."""
        return f"{self.scope}.{self.group}"

    def __str__(self) -> str:
        return f"{self.scope}/{self.group}"


def parse_segment_topic(topic: str) -> tuple[StreamName, SegmentId]:
    """Take a segment's topic name apart; the inverse of :meth:`StreamName.segment_topic`.

    Raises:
        InvalidNameError: the topic is not a segment's.
    """
    match = _SEGMENT_TOPIC.fullmatch(topic)
    if not match:
        raise InvalidNameError(f"topic {topic!r} is not a segment: scope.stream.segment-N.epoch-E is expected")
    scope, stream, number, epoch = match.groups()
    try:
        return StreamName(scope, stream), SegmentId.of(int(number), int(epoch))
    except InvalidRequestError as fault:
        raise InvalidNameError(f"topic {topic!r} is not a segment: {fault}") from fault


_own = lru_cache(maxsize=4096)(parse_segment_topic)


def is_segment_topic(topic: str) -> bool:
    """Return whether a topic has the name of a segment's."""
    return _SEGMENT_TOPIC.fullmatch(topic) is not None


def is_buffer_topic(topic: str) -> bool:
    """Return whether a topic has the name of a transaction buffer."""
    return _BUFFER_TOPIC.fullmatch(topic) is not None


def parse_qualified(name: str) -> tuple[StreamName, SegmentId, TransactionId | None]:
    """Take a fully qualified segment name apart; the inverse of :meth:`StreamName.qualified`.

    Raises:
        InvalidNameError: the name does not follow PDP-24's scheme.
    """
    match = _QUALIFIED.fullmatch(name)
    if not match:
        raise InvalidNameError(
            f"{name!r} is not a qualified segment name: scope/stream/N/#epoch.E[/#transaction.ID] is expected"
        )
    scope, stream, number, epoch, transaction = match.groups()
    try:
        return (
            StreamName(scope, stream),
            SegmentId.of(int(number), int(epoch)),
            None if transaction is None else TransactionId.parse(transaction),
        )
    except InvalidRequestError as fault:
        raise InvalidNameError(f"{name!r} is not a qualified segment name: {fault}") from fault


def segment_topic_pattern(stream: StreamName) -> str:
    """Return a pattern for all segments of a stream, for ``subscribe("^...")`` and Spark's ``subscribePattern``."""
    return rf"{re.escape(stream.scope)}\.{re.escape(stream.stream)}\.segment-[0-9]+\.epoch-[0-9]+"


def group_named(text: str) -> GroupName:
    """Return the group that a user names: ``scope/group``, or the scope of its default group."""
    return GroupName.parse(text) if "/" in text else GroupName(text)


def group_of_terminated(topic: str) -> GroupName | None:
    """Return the group of a topic of terminated transactions; None for any other topic."""
    try:
        return GroupName.parse(topic.removeprefix(_TERMINATED)) if topic.startswith(_TERMINATED) else None
    except InvalidNameError:
        return None
