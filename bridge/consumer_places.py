"""Which segment, and which offset, the callers of a consumer mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, TopicPartition
from confluent_kafka import Consumer as KafkaConsumer

from bridge.consumer_settings import ConsumerSettings
from bridge.errors import InvalidNameError, InvalidRequestError
from bridge.kafka.log_offsets import LogOffsets
from bridge.kafka.metadata import Isolation
from bridge.membership import LoadHistory, Membership, Phase
from bridge.model.names import StreamName, parse_segment_topic
from bridge.model.sharing import Reset

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

    def topic(self, place: TopicPartition, *, manual: bool = False) -> str:
        """The topic of the segment that is meant; ``manual``: the newest one of a number, whether assigned or not.

        Raises:
            InvalidRequestError: none is.
        """
        try:
            if "/" in place.topic:
                return self._numbered(StreamName.parse(place.topic), place.partition, manual)
            parse_segment_topic(place.topic)
        except InvalidNameError as fault:
            raise InvalidRequestError(f"{place.topic!r} names no segment: {fault}") from None
        return place.topic

    def _numbered(self, name: StreamName, number: int, manual: bool) -> str:
        """The segment of a number that is being read: there is one at most, as later ones wait for it."""
        own = [item for item in self._members.owned.values() if (item.stream, item.segment.number) == (name, number)]
        if own and not manual:
            order = (Phase.OPEN, Phase.WAITING, Phase.DONE)
            return min(own, key=lambda item: (order.index(item.phase), item.segment)).topic
        history = self._members.histories.get(name) or self._load(name, _nobody, None)
        found = [segment for segment in history.segments() if segment.number == number]
        if not found:
            raise InvalidRequestError(f"{name} never had a segment numbered {number}")
        return name.segment_topic(max(found))

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
