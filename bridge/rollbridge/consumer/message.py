"""What :class:`rollbridge.Consumer` hands out: a message with confluent-kafka's methods."""

from __future__ import annotations

from confluent_kafka import KafkaError
from confluent_kafka import Message as KafkaMessage

from rollbridge.consumer.records import (
    OWN_HEADERS,
    Headers,
    Origin,
    Record,
    dlsn_of,
    headers_of,
    place_of,
    record_of,
    sn_of,
    source_of,
)
from rollbridge.errors import InvalidRequestError
from rollbridge.model.identifiers import SegmentId, TransactionId
from rollbridge.model.sequence import DLSN
from rollbridge.model.sn import SN


class Message:
    """A record as :class:`rollbridge.Consumer` hands it out, with confluent-kafka's methods and some attributes more.

    ``topic()`` is the stream's name and ``partition()`` what names the segment in it, for as long as the stream lives;
    the topic that holds it in Kafka is :attr:`segment_topic`.
    """

    __slots__ = ("_origin", "_raw")

    def __init__(self, raw: KafkaMessage, origin: Origin) -> None:
        self._raw = raw
        self._origin = origin

    def error(self) -> KafkaError | None:
        """What went wrong, if this is no record."""
        return self._raw.error()

    def topic(self) -> str | None:
        """``scope/stream``; for an error whatever Kafka names."""
        topic = self._raw.topic()
        try:
            return topic and str(place_of(topic)[0])
        except InvalidRequestError:
            return topic

    def partition(self) -> int | None:
        """The partition number of its segment: no other one of the stream ever has it, whatever is scaled or rolled."""
        try:
            return self._origin.partition(*place_of(self.segment_topic))
        except InvalidRequestError:
            return self._raw.partition()

    def offset(self) -> int | None:
        """Its offset in its segment."""
        return self._raw.offset()

    def key(self) -> bytes | None:
        """The key."""
        return self._raw.key()

    def value(self) -> bytes | None:
        """The value; None for a tombstone."""
        return self._raw.value()

    def headers(self) -> Headers | None:
        """The headers as the writer gave them; None if there are none.

        Raises:
            CorruptDataError: a stranger has written the record with a header whose name is not UTF-8.
        """
        return [item for item in headers_of(self._raw) if item[0] not in OWN_HEADERS] or None

    def timestamp(self) -> tuple[int, int]:
        """Kind of timestamp, and ms since 1970."""
        return self._raw.timestamp()

    def latency(self) -> float | None:
        """Nothing, as for any message that was read."""
        return self._raw.latency()

    def leader_epoch(self) -> int | None:
        """The partition leader's epoch, which is Kafka's; see :attr:`epoch` for the stream's."""
        return self._raw.leader_epoch()

    def __len__(self) -> int:
        return len(self._raw)

    def record(self) -> Record:
        """The same with attributes in place of methods."""
        return record_of(self._raw, self._origin)

    @property
    def segment_topic(self) -> str:
        """The Kafka topic of its segment."""
        return self._raw.topic() or ""

    @property
    def segment(self) -> SegmentId:
        """Its segment."""
        return place_of(self.segment_topic)[1]

    @property
    def epoch(self) -> int:
        """The epoch in which its segment began."""
        return self.segment.epoch

    @property
    def committed(self) -> bool:
        """Always True: a consumer in a group sees committed records only."""
        return True

    @property
    def transaction_id(self) -> TransactionId | None:
        """The transaction that wrote it; None for a plain or compare-and-set write."""
        return source_of(self._raw)[0]

    @property
    def local_sequence(self) -> int | None:
        """Its number in its transaction: part and count; None without a transaction."""
        return source_of(self._raw)[1]

    @property
    def dlsn(self) -> DLSN | None:
        """Where it stands."""
        return dlsn_of(self._raw)

    @property
    def sn(self) -> SN | None:
        """DLSN, sequence id and the transaction id that its writer gave it."""
        return sn_of(self._raw, self._origin)

    @property
    def commit_position(self) -> int | None:
        """Nothing: a consumer does not read the commit log; :meth:`rollbridge.Bridge.transactions` does."""
        return self._origin.commit_position

    def __repr__(self) -> str:
        if self._raw.error() is not None:
            return f"<Message {self._raw.error()}>"
        return f"<Message {self.topic()} {self.dlsn} key={self.key()!r} value of {len(self)} bytes>"
