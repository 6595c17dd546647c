"""confluent-kafka's errors, turned into ours, once.

Every code that the library knows is named here, so that a new one in a later version is a failing test, not a guess.
"""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError, KafkaException
from kio.schema.errors import ErrorCode

from rollbridge.errors import (
    ConfigError,
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    KafkaUnavailable,
    NotFoundError,
    RollbridgeError,
)
from rollbridge.kafka.errors import AuthenticationError, NotAuthorizedError, UnsupportedBrokerError

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
    (KafkaUnavailable, _UNAVAILABLE),
    (NotFoundError, _NOT_FOUND),
    (NotAuthorizedError, _NOT_AUTHORIZED),
    (AuthenticationError, _AUTHENTICATION),
    (ConflictError, _CONFLICT),
    (FencedError, _FENCED),
    (InvalidRequestError, _INVALID),
    (CorruptDataError, _CORRUPT),
    (UnsupportedBrokerError, _UNSUPPORTED),
)

ERROR_CLASSES: Final[dict[int, type[RollbridgeError]]] = {
    # Older versions of the library lack the newest names.
    getattr(KafkaError, name): error_class
    for error_class, names in _CLASSES
    for name in names.split()
    if hasattr(KafkaError, name)
}


def kafka_error(exc: Exception) -> KafkaError | None:
    """The library's error inside an exception of its, if there is one."""
    inner = exc.args[0] if isinstance(exc, KafkaException) and exc.args else None
    return inner if isinstance(inner, KafkaError) else None


def translate(error: KafkaError | Exception, doing: str, resource: str = "") -> RollbridgeError:
    """Our error for one of confluent-kafka's; raise it ``from`` the original.

    Args:
        error: What the library raised or handed to a callback; a ValueError or TypeError is a setting it refused.
        doing: What was attempted, such as ``create topic t``.
        resource: What a missing permission would be on.
    """
    inner = error if isinstance(error, KafkaError) else kafka_error(error)
    if inner is None:
        if isinstance(error, ValueError | TypeError):
            return ConfigError(f"cannot {doing}: {error}")
        if isinstance(error, TimeoutError):
            return KafkaUnavailable(f"cannot {doing}: no answer from Kafka in time")
        return KafkaUnavailable(f"cannot {doing}: {error}")
    message = f"cannot {doing}: {inner.str()} ({inner.name()})"
    error_class = ERROR_CLASSES.get(inner.code(), KafkaUnavailable)
    if error_class is NotAuthorizedError:
        return NotAuthorizedError(message, resource=resource or doing)
    return error_class(message)


def refusal(code: ErrorCode, doing: str, resource: str = "", detail: str | None = None) -> RollbridgeError:
    """Return our error for a broker's answer; KafkaUnavailable where that is not definite.

    Args:
        code: What the broker answered.
        doing: What was attempted, such as ``create topic t``.
        resource: What a missing permission would be on.
        detail: What the broker says of it, if it does.
    """
    said = detail or KafkaError(code.value).str()
    error_class = ERROR_CLASSES.get(code.value, KafkaUnavailable)
    message = f"cannot {doing}: {said} ({KafkaError(code.value).name()})"
    if error_class is NotAuthorizedError:
        return NotAuthorizedError(message, resource=resource or doing)
    fault = error_class(message)
    fault.resource = resource
    return fault


def is_definite(code: ErrorCode) -> bool:
    """Whether asking again would be answered the same: the broker has refused, and has done nothing."""
    return ERROR_CLASSES.get(code.value, KafkaUnavailable) is not KafkaUnavailable
