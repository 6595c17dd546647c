"""Errors of the Kafka adapter, sorted by two questions: are the records in the log, and what to do now?

``Meaning`` and its tables interpret the codes in brokers' answers, :func:`translate` the errors of librdkafka. The
classes extend the tree of :mod:`rollbridge.errors`::

    RollbridgeError
    ├─ AppendRefusedError         definite: the broker refused; nothing of this transaction can be committed: abort
    ├─ AppendUnknownError         the connection or a deadline was lost: init() again, then read the log
    ├─ UnavailableError
    │  └─ KafkaUnavailableError   also: transactional-id-locked
    │     └─ ConnectionLostError  a request was under way; the broker may or may not have acted on it
    ├─ InvalidRequestError        also: unsupported-broker (too old, or transactions v2 switched off)
    │  └─ AuthenticationError     the broker refused our identity, or we refused the broker's
    └─ NotFoundError
       └─ TopicNotFoundError
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from confluent_kafka import KafkaError, KafkaException
from kio.schema.errors import ErrorCode

from rollbridge.errors import (
    AuthenticationError,
    ConfigError,
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    KafkaUnavailableError,
    NotAuthorizedError,
    NotFoundError,
    RollbridgeError,
)

__all__ = [
    "AppendRefusedError",
    "AppendUnknownError",
    "AuthenticationError",
    "ConnectionLostError",
    "KafkaUnavailableError",
    "NotAuthorizedError",
    "TopicNotFoundError",
]


class AppendRefusedError(RollbridgeError):
    """The broker refused, so nothing of this native transaction can be committed: abort it, then change the plan.

    Attributes:
        topic: Topic that was refused; None if the refusal concerns the transaction as a whole.
        kafka_error: Kafka's name of the error, such as ``MESSAGE_TOO_LARGE``.
        batch: Place of the refused batch among those given to ``append()``, if its content is the reason; else None.
    """

    code = "append-refused"
    exit_code = 5

    def __init__(self, message: str, *, topic: str | None, kafka_error: str, batch: int | None = None) -> None:
        super().__init__(message)
        self.topic = topic
        self.kafka_error = kafka_error
        self.batch = batch


class AppendUnknownError(RollbridgeError):
    """Unknown outcome: call ``init()``, which ends the open transaction or learns its end, then read the log.

    Attributes:
        transactional_id: Transactional id to init again.
        why: What has happened, without what to do.
        topic, batch: Topic of a batch that made a broker fail (``UNKNOWN_SERVER_ERROR``), as malformed compressed
            records do, and its place among those given to ``append()``. A topic without a batch had no broker for too
            long. Else None.
        kafka_error: Kafka's name of the error where ``topic`` is given.
    """

    code = "append-unknown"
    exit_code = 6

    def __init__(
        self,
        message: str,
        *,
        transactional_id: str,
        topic: str | None = None,
        batch: int | None = None,
        kafka_error: str = "",
        why: str = "",
    ) -> None:
        super().__init__(message)
        self.transactional_id = transactional_id
        self.why = why or message
        self.topic = topic
        self.batch = batch
        self.kafka_error = kafka_error


class ConnectionLostError(KafkaUnavailableError):
    """The connection broke or timed out with a request in flight; the broker may or may not have acted on it."""

    code = "connection-lost"


UNSUPPORTED_BROKER: Final = "unsupported-broker"
"""Code of an InvalidRequestError: the broker lacks a feature that this adapter needs (transactions v2, Kafka 4.0 or
later); nothing was written.
"""
ID_LOCKED: Final = "transactional-id-locked"
"""Code of a KafkaUnavailableError: nothing was sent with the transactional id, and it may be used again later.

A transaction that has ended locks its id until each of its partitions has taken a marker. One without a leader, or with
too few in-sync replicas, takes none.
"""


class TopicNotFoundError(NotFoundError):
    """The topic does not exist; nothing was written."""

    code = "topic-not-found"

    def __init__(self, message: str, *, topic: str) -> None:
        super().__init__(message)
        self.topic = topic
        self.resource = f"topic {topic}"


# Meanings of Kafka's error codes for a transactional appender, one table per request. A code in no table is UNKNOWN: a
# broker that gives an unforeseen answer may have done anything. Where a table does not follow Kafka's own flag
# (retriable or not, in Errors.java), a comment gives the reason.


class Meaning(Enum):
    """Meaning of a broker's answer: what to do next."""

    DONE = auto()
    RETRY = auto()
    """Not done, or done and safe to repeat: same request, same sequence numbers, same broker."""
    REFRESH = auto()
    """As RETRY, after a new lookup of the leader or coordinator."""
    FOLLOW_UP = auto()
    """Out of order: as RETRY if an earlier batch of the partition failed, else as REFUSED."""
    REFUSED = auto()
    """Definite: nothing was written and a retry cannot help; the transaction must be aborted."""
    DENIED = auto()
    """As REFUSED, for lack of a permission."""
    FENCED = auto()
    """A newer user of the transactional id, or the coordinator itself, has raised the epoch."""
    EXPIRED = auto()
    """The coordinator has forgotten this producer id (``transactional.id.expiration.ms``)."""
    UNKNOWN = auto()
    """Outcome unknown: init again and read the log."""


_SOMEWHERE_ELSE: Final[Mapping[ErrorCode, Meaning]] = {
    ErrorCode.none: Meaning.DONE,
    ErrorCode.leader_not_available: Meaning.REFRESH,
    ErrorCode.not_leader_or_follower: Meaning.REFRESH,
    # Not retriable for Kafka, whose brokers send it to each other; should one come, a look-up finds another broker.
    ErrorCode.broker_not_available: Meaning.REFRESH,
    ErrorCode.replica_not_available: Meaning.REFRESH,
    ErrorCode.network_exception: Meaning.REFRESH,
    ErrorCode.fenced_leader_epoch: Meaning.REFRESH,
    ErrorCode.unknown_leader_epoch: Meaning.REFRESH,
    ErrorCode.kafka_storage_error: Meaning.REFRESH,
    ErrorCode.coordinator_not_available: Meaning.REFRESH,
    ErrorCode.not_coordinator: Meaning.REFRESH,
    ErrorCode.coordinator_load_in_progress: Meaning.RETRY,
    ErrorCode.request_timed_out: Meaning.RETRY,
    ErrorCode.throttling_quota_exceeded: Meaning.RETRY,
    ErrorCode.topic_authorization_failed: Meaning.DENIED,
    ErrorCode.group_authorization_failed: Meaning.DENIED,
    ErrorCode.cluster_authorization_failed: Meaning.DENIED,
    ErrorCode.transactional_id_authorization_failed: Meaning.DENIED,
}

# A coordinator whose own log is not available, or lacks replicas, answers NOT_COORDINATOR or COORDINATOR_NOT_AVAILABLE,
# so no table for coordinators lists the retriable codes of topics and replicas.
_TRANSACTION: Final[Mapping[ErrorCode, Meaning]] = {
    **_SOMEWHERE_ELSE,
    # The markers of this id's previous transaction are still being written. The broker delays this answer by
    # add.partitions.to.txn.retry.backoff.ms, so an immediate retry is right.
    ErrorCode.concurrent_transactions: Meaning.RETRY,
    ErrorCode.invalid_producer_epoch: Meaning.FENCED,
    ErrorCode.producer_fenced: Meaning.FENCED,
    ErrorCode.invalid_producer_id_mapping: Meaning.EXPIRED,
}

PRODUCE: Final[Mapping[ErrorCode, Meaning]] = {
    **_TRANSACTION,
    # Possibly persisted; a retry with the same sequence number is recognised as a duplicate.
    ErrorCode.not_enough_replicas: Meaning.RETRY,
    ErrorCode.not_enough_replicas_after_append: Meaning.RETRY,
    # Not all brokers know a new topic yet; one that does not exist stays unknown.
    ErrorCode.unknown_topic_or_partition: Meaning.REFRESH,
    ErrorCode.unknown_topic_id: Meaning.REFRESH,
    ErrorCode.inconsistent_topic_id: Meaning.REFRESH,
    ErrorCode.out_of_order_sequence_number: Meaning.FOLLOW_UP,
    ErrorCode.unknown_producer_id: Meaning.REFUSED,
    # Retriable for Kafka, whose producer computes the checksums itself. Here callers bring finished batches: what is
    # wrong in one stays wrong.
    ErrorCode.corrupt_message: Meaning.REFUSED,
    ErrorCode.message_too_large: Meaning.REFUSED,
    ErrorCode.record_list_too_large: Meaning.REFUSED,
    ErrorCode.invalid_topic_exception: Meaning.REFUSED,
    ErrorCode.invalid_timestamp: Meaning.REFUSED,
    ErrorCode.invalid_record: Meaning.REFUSED,
    ErrorCode.unsupported_for_message_format: Meaning.REFUSED,
    ErrorCode.unsupported_compression_type: Meaning.REFUSED,
    ErrorCode.policy_violation: Meaning.REFUSED,
    ErrorCode.invalid_required_acks: Meaning.REFUSED,
    ErrorCode.invalid_request: Meaning.REFUSED,
    ErrorCode.unsupported_version: Meaning.REFUSED,
    ErrorCode.invalid_txn_state: Meaning.REFUSED,
    ErrorCode.transaction_abortable: Meaning.REFUSED,
}

TOO_LARGE: Final = frozenset({ErrorCode.message_too_large, ErrorCode.record_list_too_large})
"""Answers to Produce that a sealed topic gives; none of our batches exceeds the limit of an open one."""

POSSIBLY_PERSISTED: Final = frozenset(
    {
        ErrorCode.request_timed_out,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.network_exception,
        ErrorCode.kafka_storage_error,
    }
)
"""Produce errors after which the batch may be in the log."""

CONTENT: Final = frozenset(
    {
        ErrorCode.corrupt_message,
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_timestamp,
        ErrorCode.invalid_record,
        ErrorCode.unsupported_for_message_format,
        ErrorCode.unsupported_compression_type,
    }
)
"""Answers to Produce whose reason is the content of a batch."""

TOPIC: Final = frozenset(
    {
        ErrorCode.topic_authorization_failed,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unknown_topic_id,
        ErrorCode.invalid_topic_exception,
        ErrorCode.policy_violation,
    }
)
"""Answers to Produce whose reason is the topic; those in neither set concern the native transaction as a whole."""

AWAY: Final = frozenset(
    {ErrorCode.leader_not_available, ErrorCode.not_enough_replicas, ErrorCode.not_enough_replicas_after_append}
)
"""Answers for a topic that has too few brokers: none that leads it, or fewer in-sync replicas than it demands. In the
second case it is part of the native transaction, whose id Kafka locks until the topic has taken its marker.
"""

END: Final[Mapping[ErrorCode, Meaning]] = {
    **_TRANSACTION,
    # The transaction has ended already, the other way: by the coordinator's time-out, or by a lost earlier request.
    ErrorCode.invalid_txn_state: Meaning.REFUSED,
    ErrorCode.transaction_abortable: Meaning.REFUSED,
}

INIT: Final[Mapping[ErrorCode, Meaning]] = {
    **_TRANSACTION,
    ErrorCode.invalid_transaction_timeout: Meaning.REFUSED,
    ErrorCode.invalid_request: Meaning.REFUSED,
    ErrorCode.unsupported_version: Meaning.REFUSED,
}

OFFSETS: Final[Mapping[ErrorCode, Meaning]] = {
    **_TRANSACTION,
    # Retriable for Kafka. A caller that has read from the topic knows that it exists; for one that does not, retries
    # would never end.
    ErrorCode.unknown_topic_or_partition: Meaning.REFUSED,
    ErrorCode.offset_metadata_too_large: Meaning.REFUSED,
    ErrorCode.illegal_generation: Meaning.REFUSED,
    ErrorCode.stale_member_epoch: Meaning.REFUSED,
    ErrorCode.unknown_member_id: Meaning.REFUSED,
    ErrorCode.fenced_instance_id: Meaning.REFUSED,
    ErrorCode.rebalance_in_progress: Meaning.REFUSED,
    ErrorCode.invalid_group_id: Meaning.REFUSED,
    ErrorCode.group_id_not_found: Meaning.REFUSED,
    ErrorCode.invalid_commit_offset_size: Meaning.REFUSED,
    ErrorCode.invalid_txn_state: Meaning.REFUSED,
    ErrorCode.transaction_abortable: Meaning.REFUSED,
    ErrorCode.unsupported_version: Meaning.REFUSED,
}

# Not listed though Kafka's flag is retriable: CORRUPT_MESSAGE, as the log itself is damaged (Kafka's consumer raises,
# too), and the codes of topic ids and fetch sessions, as our requests use neither.
READ: Final[Mapping[ErrorCode, Meaning]] = {
    **_SOMEWHERE_ELSE,
    ErrorCode.offset_not_available: Meaning.RETRY,
    ErrorCode.unknown_topic_or_partition: Meaning.REFRESH,
    ErrorCode.invalid_topic_exception: Meaning.REFUSED,
}


def meaning(table: Mapping[ErrorCode, Meaning], code: ErrorCode) -> Meaning:
    """Look up ``code``; a code that the table lacks is UNKNOWN."""
    return table.get(code, Meaning.UNKNOWN)


def name(code: ErrorCode) -> str:
    """Return Kafka's spelling of a code, such as ``MESSAGE_TOO_LARGE``."""
    return code.name.upper()


# Translation of confluent-kafka's errors. Every code that the library knows is listed, so that a new one in a later
# version is a failing test, not a guess.

_UNAVAILABLE: Final = (
    "_ALL_BROKERS_DOWN _APPLICATION _CRIT_SYS_RESOURCE _DESTROY _DESTROY_BROKER _FAIL _FATAL _FS _INTR _IN_PROGRESS "
    "_ISR_INSUFF _MSG_TIMED_OUT _NODE_UPDATE _OUTDATED _PREV_IN_PROGRESS _PURGE_INFLIGHT _PURGE_QUEUE _QUEUE_FULL "
    "_RESOLVE _RETRY _TIMED_OUT _TIMED_OUT_QUEUE _TRANSPORT _WAIT_CACHE _WAIT_COORD _MAX_POLL_EXCEEDED "
    "_ASSIGNMENT_LOST _NOOP _PARTIAL _UNDERFLOW _UNKNOWN_BROKER "
    "UNKNOWN BROKER_NOT_AVAILABLE CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE "
    "ELIGIBLE_LEADERS_NOT_AVAILABLE FENCED_LEADER_EPOCH FETCH_SESSION_ID_NOT_FOUND KAFKA_STORAGE_ERROR "
    "LEADER_NOT_AVAILABLE LISTENER_NOT_FOUND NETWORK_EXCEPTION NOT_CONTROLLER NOT_COORDINATOR NOT_ENOUGH_REPLICAS "
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND NOT_LEADER_FOR_PARTITION OFFSET_NOT_AVAILABLE PREFERRED_LEADER_NOT_AVAILABLE "
    "REBALANCE_IN_PROGRESS REBOOTSTRAP_REQUIRED REPLICA_NOT_AVAILABLE REQUEST_TIMED_OUT STALE_BROKER_EPOCH "
    "STALE_CTRL_EPOCH THROTTLING_QUOTA_EXCEEDED TRANSACTION_COORDINATOR_FENCED UNKNOWN_LEADER_EPOCH "
    "UNSTABLE_OFFSET_COMMIT LOG_DIR_NOT_FOUND UNKNOWN_CONTROLLER_ID OPERATION_NOT_ATTEMPTED MEMBER_ID_REQUIRED "
    "UNRELEASED_INSTANCE_ID SHARE_SESSION_LIMIT_REACHED SHARE_SESSION_NOT_FOUND INCONSISTENT_VOTER_SET"
)
_NOT_FOUND: Final = (
    "UNKNOWN_TOPIC_OR_PART UNKNOWN_TOPIC_ID INCONSISTENT_TOPIC_ID GROUP_ID_NOT_FOUND RESOURCE_NOT_FOUND "
    "DELEGATION_TOKEN_NOT_FOUND VOTER_NOT_FOUND UNKNOWN_MEMBER_ID UNKNOWN_SUBSCRIPTION_ID _UNKNOWN_TOPIC "
    "_UNKNOWN_PARTITION _UNKNOWN_GROUP _NOENT"
)
_NOT_AUTHORIZED: Final = (
    "TOPIC_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED "
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED DELEGATION_TOKEN_AUTHORIZATION_FAILED DELEGATION_TOKEN_OWNER_MISMATCH "
    "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED"
)
_AUTHENTICATION: Final = (
    "_AUTHENTICATION _SSL SASL_AUTHENTICATION_FAILED UNSUPPORTED_SASL_MECHANISM ILLEGAL_SASL_STATE "
    "DELEGATION_TOKEN_AUTH_DISABLED DELEGATION_TOKEN_EXPIRED UNACCEPTABLE_CREDENTIAL PRINCIPAL_DESERIALIZATION_FAILURE"
)
_CONFLICT: Final = (
    "TOPIC_ALREADY_EXISTS REASSIGNMENT_IN_PROGRESS NO_REASSIGNMENT_IN_PROGRESS NON_EMPTY_GROUP GROUP_MAX_SIZE_REACHED "
    "GROUP_SUBSCRIBED_TO_TOPIC ELECTION_NOT_NEEDED DUPLICATE_RESOURCE DUPLICATE_VOTER FEATURE_UPDATE_FAILED "
    "DUPLICATE_SEQUENCE_NUMBER OUT_OF_ORDER_SEQUENCE_NUMBER UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING "
    "INVALID_TXN_STATE TRANSACTION_ABORTABLE ILLEGAL_GENERATION INCONSISTENT_GROUP_PROTOCOL STALE_MEMBER_EPOCH "
    "INVALID_SHARE_SESSION_EPOCH INVALID_RECORD_STATE STREAMS_INVALID_TOPOLOGY_EPOCH "
    "_STATE _CONFLICT _EXISTING_SUBSCRIPTION _GAPLESS_GUARANTEE _INCONSISTENT"
)
_FENCED: Final = (
    "_FENCED PRODUCER_FENCED INVALID_PRODUCER_EPOCH FENCED_INSTANCE_ID FENCED_MEMBER_EPOCH FENCED_STATE_EPOCH "
    "STREAMS_TOPOLOGY_FENCED"
)
_INVALID: Final = (
    "MSG_SIZE_TOO_LARGE RECORD_LIST_TOO_LARGE OFFSET_METADATA_TOO_LARGE TELEMETRY_TOO_LARGE TOPIC_EXCEPTION "
    "INVALID_CONFIG INVALID_PARTITIONS INVALID_REPLICATION_FACTOR INVALID_REQUEST INVALID_REQUIRED_ACKS "
    "INVALID_GROUP_ID INVALID_SESSION_TIMEOUT INVALID_TIMESTAMP INVALID_TRANSACTION_TIMEOUT INVALID_UPDATE_VERSION "
    "INVALID_COMMIT_OFFSET_SIZE INVALID_FETCH_SESSION_EPOCH INVALID_PRINCIPAL_TYPE INVALID_REPLICA_ASSIGNMENT "
    "INVALID_VOTER_KEY INVALID_MSG_SIZE INVALID_RECORD INVALID_REGISTRATION INVALID_REGULAR_EXPRESSION "
    "MISMATCHED_ENDPOINT_TYPE OFFSET_OUT_OF_RANGE POLICY_VIOLATION SECURITY_DISABLED STREAMS_INVALID_TOPOLOGY "
    "TOPIC_DELETION_DISABLED UNSUPPORTED_ASSIGNOR UNSUPPORTED_COMPRESSION_TYPE "
    "_INVALID_ARG _INVALID_TYPE _NOT_CONFIGURED _READ_ONLY _AUTO_OFFSET_RESET _NO_OFFSET "
    "_KEY_SERIALIZATION _VALUE_SERIALIZATION _INVALID_DIFFERENT_RECORD _UNKNOWN_PROTOCOL "
    "_ASSIGN_PARTITIONS _REVOKE_PARTITIONS _PARTITION_EOF"
)
_CORRUPT: Final = "INVALID_MSG _BAD_MSG _BAD_COMPRESSION _KEY_DESERIALIZATION _VALUE_DESERIALIZATION _LOG_TRUNCATION"
_UNSUPPORTED: Final = (
    "UNSUPPORTED_VERSION UNSUPPORTED_FOR_MESSAGE_FORMAT UNSUPPORTED_ENDPOINT_TYPE _UNSUPPORTED_FEATURE _NOT_IMPLEMENTED"
)

_CLASSES: Final[tuple[tuple[type[RollbridgeError], str], ...]] = (
    (KafkaUnavailableError, _UNAVAILABLE),
    (NotFoundError, _NOT_FOUND),
    (NotAuthorizedError, _NOT_AUTHORIZED),
    (AuthenticationError, _AUTHENTICATION),
    (ConflictError, _CONFLICT),
    (FencedError, _FENCED),
    (InvalidRequestError, f"{_INVALID} {_UNSUPPORTED}"),
    (CorruptDataError, _CORRUPT),
)

ERROR_CLASSES: Final[dict[int, type[RollbridgeError]]] = {
    # Older versions of the library lack the newest names.
    getattr(KafkaError, name): error_class
    for error_class, names in _CLASSES
    for name in names.split()
    if hasattr(KafkaError, name)
}


def kafka_error(exc: Exception) -> KafkaError | None:
    """Return the library's error inside one of its exceptions, if there is one."""
    inner = exc.args[0] if isinstance(exc, KafkaException) and exc.args else None
    return inner if isinstance(inner, KafkaError) else None


def translate(error: KafkaError | Exception, doing: str, resource: str = "") -> RollbridgeError:
    """Return our error for one of confluent-kafka's; raise it ``from`` the original.

    Args:
        error: Error that the library raised or passed to a callback; a ValueError or TypeError is a refused setting.
        doing: The attempt, such as ``create topic t``.
        resource: Resource that a missing permission would be on.
    """
    inner = error if isinstance(error, KafkaError) else kafka_error(error)
    if inner is None:
        if isinstance(error, ValueError | TypeError):
            return ConfigError(f"cannot {doing}: {error}")
        if isinstance(error, TimeoutError):
            return KafkaUnavailableError(f"cannot {doing}: no answer from Kafka in time")
        return KafkaUnavailableError(f"cannot {doing}: {error}")
    return _error(inner.code(), f"cannot {doing}: {inner.str()} ({inner.name()})", resource or doing)


def refusal(code: ErrorCode, doing: str, resource: str = "", detail: str | None = None) -> RollbridgeError:
    """Return our error for a broker's answer; KafkaUnavailableError if the answer is not definite.

    Args:
        code: Error code of the answer.
        doing: The attempt, such as ``create topic t``.
        resource: Resource that a missing permission would be on.
        detail: Message of the broker, if any.
    """
    said = detail or KafkaError(code.value).str()
    fault = _error(code.value, f"cannot {doing}: {said} ({KafkaError(code.value).name()})", resource or doing)
    if not isinstance(fault, NotAuthorizedError):
        fault.resource = resource
    return fault


def _error(code: int, message: str, resource: str) -> RollbridgeError:
    error_class = ERROR_CLASSES.get(code, KafkaUnavailableError)
    if error_class is NotAuthorizedError:
        return NotAuthorizedError(message, resource=resource)
    return error_class(message, code=UNSUPPORTED_BROKER if KafkaError(code).name() in _UNSUPPORTED.split() else "")


def is_definite(code: ErrorCode) -> bool:
    """Return whether a retry would get the same error: the broker has refused and done nothing.

    Kafka's own flag of these codes (retriable or not) differs. Of topics, it is retriable where not all brokers know a
    new one yet: callers that wait for that check for the code first. The same holds for codes that tell a client to
    send another request, as of a session's epoch. Codes that are neither definite nor retriable are temporary, are sent
    between brokers only, or leave the outcome open, as UNKNOWN_SERVER_ERROR does.
    """
    return ERROR_CLASSES.get(code.value, KafkaUnavailableError) is not KafkaUnavailableError
