"""Delivery reports with confluent-kafka's accessors, and rollbridge's errors as confluent-kafka's.

:class:`Reports` takes reports on whichever thread learns an outcome, under its condition, and calls the callbacks on
the thread that polls, without it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException

from rollbridge.errors import (
    BackpressureError,
    ConflictError,
    FencedError,
    IncompleteError,
    InvalidRequestError,
    NotFoundError,
    OffsetMetadataTooLargeError,
    OutcomeUnknownError,
    RecordTooLargeError,
    RollbridgeError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionPreserverClosedError,
    TransactionTooLargeError,
    UnavailableError,
)
from rollbridge.kafka.errors import AuthenticationError, NotAuthorizedError
from rollbridge.model.ids import SegmentId
from rollbridge.model.sn import SN

HeaderList = list[tuple[str, bytes | None]]

PartitionOf = Callable[[str, SegmentId], int]
"""Lookup of a segment's partition number in a stream; raises RollbridgeError where it is not known."""

_NOWHERE: Final = -1001


class ProducedMessage:
    """Record that was produced, with confluent-kafka's accessors.

    The topic is the stream, the partition the number of the segment for as long as the stream lives, and the offset the
    one in the segment. As in confluent-kafka, they are -1 and -1001 as long as the record is not written.
    """

    __slots__ = (
        "_error",
        "_headers",
        "_key",
        "_partition",
        "_partition_of",
        "_sn",
        "_timestamp_ms",
        "_topic",
        "_value",
    )

    def __init__(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: HeaderList | None,
        timestamp_ms: int,
        partition_of: PartitionOf,
    ) -> None:
        self._topic = topic
        self._key = key
        self._value = value
        self._headers = headers
        self._timestamp_ms = timestamp_ms
        self._partition = -1
        self._partition_of = partition_of
        self._error: KafkaError | None = None
        self._sn: SN | None = None

    def placed(self, sn: SN) -> None:
        """Mark as written."""
        self._sn = sn

    def failed(self, error: KafkaError) -> None:
        """Mark as not written, or as having an unknown outcome."""
        self._error = error

    def error(self) -> KafkaError | None:
        """Return the reason why it was not written; None if it was."""
        return self._error

    def topic(self) -> str:
        """Return the stream."""
        return self._topic

    def partition(self) -> int:
        """Return the partition number of the segment; -1 also while it cannot be looked up, or if it is gone."""
        dlsn = None if self._sn is None else self._sn.dlsn
        if self._partition < 0 and dlsn is not None:
            with suppress(RollbridgeError):
                self._partition = self._partition_of(self._topic, dlsn.segment)
        return self._partition

    def offset(self) -> int:
        """Return the offset in the segment's topic."""
        dlsn = None if self._sn is None else self._sn.dlsn
        return _NOWHERE if dlsn is None else dlsn.offset

    def sn(self) -> SN | None:
        """Return its place in the lineage of its key; not in confluent-kafka."""
        return self._sn

    def key(self) -> bytes | None:
        """Return the key."""
        return self._key

    def value(self) -> bytes | None:
        """Return the value."""
        return self._value

    def headers(self) -> HeaderList | None:
        """Return the headers; None if there are none."""
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        """Return the kind of timestamp, and milliseconds since 1970."""
        return TIMESTAMP_CREATE_TIME, self._timestamp_ms

    def __len__(self) -> int:
        return len(self._value or b"")

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<ProducedMessage in {self._topic}, {self._error or self._sn}>"


# Errors as confluent-kafka's, for code that catches those


_CODES: Final[tuple[tuple[type[RollbridgeError], int], ...]] = (
    (RecordTooLargeError, KafkaError.MSG_SIZE_TOO_LARGE),
    (OffsetMetadataTooLargeError, KafkaError.OFFSET_METADATA_TOO_LARGE),
    (NotAuthorizedError, KafkaError.TOPIC_AUTHORIZATION_FAILED),
    (AuthenticationError, KafkaError._AUTHENTICATION),
    (InvalidRequestError, KafkaError._INVALID_ARG),
    (NotFoundError, KafkaError.UNKNOWN_TOPIC_OR_PART),
    (BackpressureError, KafkaError._QUEUE_FULL),
    (OutcomeUnknownError, KafkaError._TIMED_OUT),
    (UnavailableError, KafkaError._TIMED_OUT),
    (FencedError, KafkaError._FENCED),
    (TransactionCommittedError, KafkaError.INVALID_TXN_STATE),
    (TransactionAbortedError, KafkaError.TRANSACTION_ABORTABLE),
    (IncompleteError, KafkaError.TRANSACTION_ABORTABLE),
    (ConflictError, KafkaError.INVALID_TXN_STATE),
    (TransactionPreserverClosedError, KafkaError.INVALID_TXN_STATE),
)
"""Error codes; the first class that matches decides."""
_RETRIABLE: Final = (UnavailableError, OutcomeUnknownError)
_ABORTABLE: Final = (
    TransactionAbortedError,
    IncompleteError,
    TransactionTooLargeError,
    OffsetMetadataTooLargeError,
)
_REFUSED_OFFSETS: Final = {
    "ILLEGAL_GENERATION": KafkaError.ILLEGAL_GENERATION,
    "UNKNOWN_MEMBER_ID": KafkaError.UNKNOWN_MEMBER_ID,
    "FENCED_INSTANCE_ID": KafkaError.FENCED_INSTANCE_ID,
    "REBALANCE_IN_PROGRESS": KafkaError.REBALANCE_IN_PROGRESS,
    "OFFSET_METADATA_TOO_LARGE": KafkaError.OFFSET_METADATA_TOO_LARGE,
}


def as_kafka_error(fault: RollbridgeError) -> KafkaError:
    """Return an error as confluent-kafka would report it.

    ``retriable()``: the same call may succeed later, or learn the outcome of the first one. ``txn_requires_abort()``:
    the transaction can only be aborted, and another one begun. ``fatal()``: a newer instance uses the same identity.
    """
    code = next((code for kind, code in _CODES if isinstance(fault, kind)), KafkaError._FAIL)
    if isinstance(fault, TransactionAbortedError):
        code = next((code for name, code in _REFUSED_OFFSETS.items() if name in fault.reason), code)
    return KafkaError(
        code,
        str(fault),
        fatal=isinstance(fault, FencedError),
        retriable=isinstance(fault, _RETRIABLE),
        txn_requires_abort=isinstance(fault, _ABORTABLE),
    )


def wrong_state(why: str) -> KafkaException:
    """Return the error of a call that does not fit the calls before."""
    return KafkaException(KafkaError(KafkaError._STATE, why))


@contextmanager
def kafka_exceptions() -> Iterator[None]:
    """Raise rollbridge's errors as confluent-kafka's, and a full queue as ``BufferError``."""
    try:
        yield
    except BackpressureError as fault:
        raise BufferError(str(fault)) from fault
    except RollbridgeError as fault:
        raise KafkaException(as_kafka_error(fault)) from fault


# Delivery reports


OnDelivery = Callable[[KafkaError | None, ProducedMessage], object]
Locate = Callable[[], SN]
"""Function that returns the SN of a settled record, or raises its error."""


class Reports:
    """Queue of delivery reports: filled on whichever thread learns an outcome, served on the thread that polls."""

    def __init__(self, *, only_errors: bool) -> None:
        self._only_errors = only_errors
        self._due: deque[tuple[OnDelivery, ProducedMessage]] = deque()
        self._changed = threading.Condition()
        self.pending = 0
        """Number of expected records without an outcome."""

    def __len__(self) -> int:
        return len(self._due)

    def expect(self) -> None:
        """Count a record with a callback that was accepted."""
        with self._changed:
            self.pending += 1

    def tell(self, report: OnDelivery, message: ProducedMessage, locate: Locate) -> None:
        """Complete ``message`` with the outcome of an expected record, and queue its report."""
        try:
            message.placed(locate())
        except RollbridgeError as fault:
            message.failed(as_kafka_error(fault))
        with self._changed:
            self.pending -= 1
            if message.error() is not None or not self._only_errors:
                self._due.append((report, message))
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return once a call is due, or the time has passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._due, timeout_s)

    def serve(self) -> int:
        """Make the calls that are due; return their number."""
        # Without the condition: a callback may produce, and so report, itself.
        served = 0
        while self._due:
            try:
                report, message = self._due.popleft()
            except IndexError:  # another thread was faster
                break
            served += 1
            message.partition()  # looked up now: an application may keep the message after its producer is closed
            report(message.error(), message)
        return served
