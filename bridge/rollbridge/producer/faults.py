"""Our errors as confluent-kafka's, so that code which catches those goes on working."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from confluent_kafka import KafkaError, KafkaException

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
