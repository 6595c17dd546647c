"""What delivery callbacks are given: confluent-kafka's accessors, and the SN."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException

from rollbridge.errors import (
    BackpressureError,
    ConflictError,
    FencedError,
    IncompleteError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknown,
    RecordTooLargeError,
    RollbridgeError,
    TransactionAborted,
    TransactionCommitted,
    TransactionPreserverClosed,
    TransactionTooLargeError,
    UnavailableError,
)
from rollbridge.kafka.errors import AuthenticationError, NotAuthorizedError
from rollbridge.model.ids import SegmentId
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


# --------------------------------------------------------------------------------------------------------------------
# Our errors as confluent-kafka's, so that code which catches those goes on working.


_CODES: Final[tuple[tuple[type[RollbridgeError], int], ...]] = (
    (RecordTooLargeError, KafkaError.MSG_SIZE_TOO_LARGE),
    (NotAuthorizedError, KafkaError.TOPIC_AUTHORIZATION_FAILED),
    (AuthenticationError, KafkaError._AUTHENTICATION),
    (InvalidRequestError, KafkaError._INVALID_ARG),
    (NotFoundError, KafkaError.UNKNOWN_TOPIC_OR_PART),
    (BackpressureError, KafkaError._QUEUE_FULL),
    (OutcomeUnknown, KafkaError._TIMED_OUT),
    (UnavailableError, KafkaError._TIMED_OUT),
    (FencedError, KafkaError._FENCED),
    (TransactionCommitted, KafkaError.INVALID_TXN_STATE),
    (TransactionAborted, KafkaError.TRANSACTION_ABORTABLE),
    (IncompleteError, KafkaError.TRANSACTION_ABORTABLE),
    (ConflictError, KafkaError.INVALID_TXN_STATE),
    (TransactionPreserverClosed, KafkaError.INVALID_TXN_STATE),
)
"""The first class that fits decides."""
_RETRIABLE: Final = (UnavailableError, OutcomeUnknown)
_ABORTABLE: Final = (TransactionAborted, IncompleteError, TransactionTooLargeError)
_REFUSED_OFFSETS: Final = {
    "ILLEGAL_GENERATION": KafkaError.ILLEGAL_GENERATION,
    "UNKNOWN_MEMBER_ID": KafkaError.UNKNOWN_MEMBER_ID,
    "FENCED_INSTANCE_ID": KafkaError.FENCED_INSTANCE_ID,
    "REBALANCE_IN_PROGRESS": KafkaError.REBALANCE_IN_PROGRESS,
}


def as_kafka_error(fault: RollbridgeError) -> KafkaError:
    """One of our errors as confluent-kafka would give it.

    ``retriable()``: the same call may succeed later, or learn what became of the first one. ``txn_requires_abort()``:
    the transaction can only be aborted, and another one begun. ``fatal()``: somebody newer uses the same identity.
    """
    code = next((code for kind, code in _CODES if isinstance(fault, kind)), KafkaError._FAIL)
    if isinstance(fault, TransactionAborted):
        code = next((code for name, code in _REFUSED_OFFSETS.items() if name in fault.reason), code)
    return KafkaError(
        code,
        str(fault),
        fatal=isinstance(fault, FencedError),
        retriable=isinstance(fault, _RETRIABLE),
        txn_requires_abort=isinstance(fault, _ABORTABLE),
    )


def wrong_state(why: str) -> KafkaException:
    """The error of a call that does not fit what was called before."""
    return KafkaException(KafkaError(KafkaError._STATE, why))


@contextmanager
def kafka_exceptions() -> Iterator[None]:
    """Raise our errors as confluent-kafka's; a full queue as its ``BufferError``."""
    try:
        yield
    except BackpressureError as fault:
        raise BufferError(str(fault)) from fault
    except RollbridgeError as fault:
        raise KafkaException(as_kafka_error(fault)) from fault


# --------------------------------------------------------------------------------------------------------------------
# Delivery reports: what callbacks are still to hear, and the calls that are due.


OnDelivery = Callable[[KafkaError | None, ProducedMessage], object]
Locate = Callable[[], SN]
"""Gives the SN of a record whose fate is known, or raises its error."""


class Reports:
    """Collects what callbacks are to be told, on whichever thread learns it, and tells it where the user polls."""

    def __init__(self, *, only_errors: bool) -> None:
        self._only_errors = only_errors
        self._due: deque[tuple[OnDelivery, ProducedMessage]] = deque()
        self._changed = threading.Condition()
        self.pending = 0
        """Records whose fate is not known and will be told."""

    def __len__(self) -> int:
        return len(self._due)

    def expect(self) -> None:
        """A record with a callback was taken."""
        with self._changed:
            self.pending += 1

    def tell(self, report: OnDelivery, message: ProducedMessage, locate: Locate) -> None:
        """The fate of an expected record is known; ``message`` is completed with it."""
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
        """Return once a call is due, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._due, timeout_s)

    def serve(self) -> int:
        """Make the calls that are due; how many there were."""
        served = 0
        while self._due:
            try:
                report, message = self._due.popleft()
            except IndexError:  # another thread was faster
                break
            served += 1
            report(message.error(), message)
        return served
