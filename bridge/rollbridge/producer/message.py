"""What delivery callbacks are given: confluent-kafka's accessors, and the SN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError

from rollbridge.errors import RollbridgeError
from rollbridge.model.identifiers import SegmentId
from rollbridge.model.sn import SN

Headers = list[tuple[str, bytes | None]]

PartitionOf = Callable[[str, SegmentId], int]
"""The partition number of a segment of a stream; raises RollbridgeError where that is not known."""

_NOWHERE: Final = -1001


class ProducedMessage:
    """A record that was produced, with confluent-kafka's accessors.

    The topic is the stream, the partition what names the segment for as long as the stream lives, the offset that in
    the segment. Not known, as long as the record is not written, are -1 and -1001, as there.
    """

    __slots__ = ("_error", "_headers", "_key", "_partition_of", "_sn", "_timestamp_ms", "_topic", "_value")

    def __init__(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers | None,
        timestamp_ms: int,
        partition_of: PartitionOf,
    ) -> None:
        self._topic = topic
        self._key = key
        self._value = value
        self._headers = headers
        self._timestamp_ms = timestamp_ms
        self._partition_of = partition_of
        self._error: KafkaError | None = None
        self._sn: SN | None = None

    def placed(self, sn: SN) -> None:
        """It was written."""
        self._sn = sn

    def failed(self, error: KafkaError) -> None:
        """It was not written, or is not known to be."""
        self._error = error

    def error(self) -> KafkaError | None:
        """Why it was not written; None if it was."""
        return self._error

    def topic(self) -> str:
        """The stream."""
        return self._topic

    def partition(self) -> int:
        """Partition number of the segment; -1 also while that can not be looked up, or if it is gone."""
        dlsn = None if self._sn is None else self._sn.dlsn
        if dlsn is None:
            return -1
        try:
            return self._partition_of(self._topic, dlsn.segment)
        except RollbridgeError:
            return -1

    def offset(self) -> int:
        """Offset in the segment's topic."""
        dlsn = None if self._sn is None else self._sn.dlsn
        return _NOWHERE if dlsn is None else dlsn.offset

    def sn(self) -> SN | None:
        """Where it stands along the lineage of its key; not in confluent-kafka."""
        return self._sn

    def key(self) -> bytes | None:
        """The key."""
        return self._key

    def value(self) -> bytes | None:
        """The value."""
        return self._value

    def headers(self) -> Headers | None:
        """The headers; None if there are none."""
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        """Kind and milliseconds since 1970."""
        return TIMESTAMP_CREATE_TIME, self._timestamp_ms

    def __len__(self) -> int:
        return len(self._value or b"")

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<ProducedMessage in {self._topic}, {self._error or self._sn}>"
