"""Which segment, and which offset, the callers of a consumer mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, TopicPartition
from confluent_kafka import Consumer as KafkaConsumer

from rollbridge.consumer.group import LoadHistory, Membership
from rollbridge.consumer.settings import ConsumerSettings
from rollbridge.errors import InvalidNameError, InvalidRequestError
from rollbridge.kafka.log_offsets import LogOffsets
from rollbridge.kafka.metadata import Isolation
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.lineage import topic_of_partition
from rollbridge.model.names import StreamName, parse_segment_topic
from rollbridge.model.sharing import Reset

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
