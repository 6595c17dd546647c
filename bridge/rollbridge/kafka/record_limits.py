"""Limits of the records and batches of one stream: by its own settings, those of a client, and its adopted topic's.

Records are checked when a batch is begun, which each one causes that is too large for the rest of a batch. That is
enough where the largest record is not smaller than a batch; elsewhere the batch's ``append`` checks each record, and
takes one at fault for one that does not fit, so that :meth:`RecordLimits.check` tells why it is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rollbridge.errors import InvalidRequestError, RecordTooLargeError
from rollbridge.kafka.records import Headers, RecordBuilder, record_size
from rollbridge.stream.config import KEYLESS, TopicLimits

AppendRecord = Callable[..., object]
"""A builder's ``append``, of offset, timestamp, key, value and headers; returns None if the record does not fit."""


class RecordLimits:
    """Limits of one stream's records, and the refusal of those beyond them.

    Attributes:
        stream: Name of the stream.
        topic: Topic that it has adopted, if any.
        adopted: What that topic takes; None if there is none.
        record_bytes_max: Largest record: key, value and headers.
        batch_bytes: Bytes of records at which a batch is closed.
        needs_key: True if records need a key, since the topic is compacted.
    """

    __slots__ = ("adopted", "batch_bytes", "needs_key", "record_bytes_max", "stream", "topic")

    def __init__(
        self,
        stream: str,
        topic: str | None,
        adopted: TopicLimits | None,
        *,
        record_bytes_max: int,
        batch_bytes: int,
    ) -> None:
        """Join the limits.

        Args:
            stream: Name of the stream.
            topic: Topic that it has adopted, if any.
            adopted: What that topic takes; None if there is none.
            record_bytes_max, batch_bytes: Limits without the topic's.
        """
        self.stream = stream
        self.topic = topic
        self.adopted = adopted
        self.record_bytes_max = record_bytes_max
        self.batch_bytes = batch_bytes
        self.needs_key = False
        if adopted is not None:
            self.record_bytes_max = min(record_bytes_max, adopted.record_room)
            self.batch_bytes = min(batch_bytes, adopted.batch_room)
            self.needs_key = adopted.is_compacted

    def check(self, key: bytes | None, value: bytes | None, headers: Headers) -> int:
        """Return the size of a record.

        Raises:
            InvalidRequestError, RecordTooLargeError: It is beyond the limits.
        """
        if key is None and self.needs_key:
            raise InvalidRequestError(f"{KEYLESS} such as {self.topic}; it was not written")
        size = record_size(key, value, headers)
        if size > self.record_bytes_max:
            raise RecordTooLargeError(
                f"a record of {size} bytes (key, value and headers, rollbridge's included) exceeds the limit of "
                f"{self.record_bytes_max} of stream {self.stream}; it was not written",
                size_bytes=size,
                limit_bytes=self.record_bytes_max,
            )
        return size

    def check_time(self, timestamp_ms: int) -> None:
        """Raise InvalidRequestError for a record of a time that the adopted topic does not take now."""
        fault = None if self.adopted is None else self.adopted.fault_of(timestamp_ms, int(time.time() * 1000))
        if fault is not None:
            raise InvalidRequestError(f"{fault}: {self.topic}; the record was not written")

    def append_of(self, builder: RecordBuilder) -> AppendRecord:
        """Return the ``append`` of a batch, which checks only what :meth:`check` cannot have checked at its begin."""
        append: AppendRecord = builder.append
        if self.batch_bytes > self.record_bytes_max:
            append = _measured(append, self.record_bytes_max)
        return _keyed(append) if self.needs_key else append


def _measured(append: AppendRecord, limit_bytes: int) -> AppendRecord:
    """Return an ``append`` that takes no record above a size."""

    def appended(
        offset: int, timestamp: int | None, key: bytes | None, value: bytes | None, headers: Headers
    ) -> object:
        if record_size(key, value, headers) > limit_bytes:
            return None
        return append(offset, timestamp, key, value, headers)

    return appended


def _keyed(append: AppendRecord) -> AppendRecord:
    """Return an ``append`` that takes no record without a key."""

    def appended(
        offset: int, timestamp: int | None, key: bytes | None, value: bytes | None, headers: Headers
    ) -> object:
        return None if key is None else append(offset, timestamp, key, value, headers)

    return appended
