"""What each of Kafka's error codes means to a transactional appender, as one table per request.

A code that is in no table is UNKNOWN: a broker that answers with something unforeseen may have done anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from kio.schema.errors import ErrorCode


class Meaning(Enum):
    """What to do after an answer."""

    DONE = auto()
    RETRY = auto()
    """Not done, or done and safe to ask for again: same request, same sequence numbers, same broker."""
    REFRESH = auto()
    """As RETRY, after asking anew who the leader or coordinator is."""
    FOLLOW_UP = auto()
    """Refused because a batch before it was; as RETRY if one was, else as REFUSED."""
    REFUSED = auto()
    """Definite: nothing was written and repeating will not help; the transaction must be aborted."""
    DENIED = auto()
    """As REFUSED, for want of a permission."""
    FENCED = auto()
    """A newer user of the transactional id, or the coordinator itself, has raised the epoch."""
    EXPIRED = auto()
    """The coordinator has forgotten this producer id (``transactional.id.expiration.ms``)."""
    UNKNOWN = auto()
    """No telling; init again and read the log."""


_SOMEWHERE_ELSE: Final[Mapping[ErrorCode, Meaning]] = {
    ErrorCode.none: Meaning.DONE,
    ErrorCode.leader_not_available: Meaning.REFRESH,
    ErrorCode.not_leader_or_follower: Meaning.REFRESH,
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

_TRANSACTION: Final[Mapping[ErrorCode, Meaning]] = {
    **_SOMEWHERE_ELSE,
    # The markers of this id's transaction before are still being written. The broker holds this answer back for
    # add.partitions.to.txn.retry.backoff.ms, so asking again at once is right.
    ErrorCode.concurrent_transactions: Meaning.RETRY,
    ErrorCode.invalid_producer_epoch: Meaning.FENCED,
    ErrorCode.producer_fenced: Meaning.FENCED,
    ErrorCode.invalid_producer_id_mapping: Meaning.EXPIRED,
}

PRODUCE: Final[Mapping[ErrorCode, Meaning]] = {
    **_TRANSACTION,
    # Possibly in the log already; sent again with the same sequence number it is recognised and not doubled.
    ErrorCode.not_enough_replicas: Meaning.RETRY,
    ErrorCode.not_enough_replicas_after_append: Meaning.RETRY,
    # A topic that was made a moment ago is not known everywhere yet; one that does not exist stays unknown.
    ErrorCode.unknown_topic_or_partition: Meaning.REFRESH,
    ErrorCode.unknown_topic_id: Meaning.REFRESH,
    ErrorCode.inconsistent_topic_id: Meaning.REFRESH,
    ErrorCode.out_of_order_sequence_number: Meaning.FOLLOW_UP,
    ErrorCode.unknown_producer_id: Meaning.REFUSED,
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
"""Answers to Produce whose reason is what is in a batch."""

TOPIC: Final = frozenset(
    {
        ErrorCode.topic_authorization_failed,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unknown_topic_id,
        ErrorCode.invalid_topic_exception,
        ErrorCode.policy_violation,
    }
)
"""Answers to Produce whose reason is the topic; those in neither set are about the native transaction as a whole."""

AWAY: Final = frozenset({ErrorCode.leader_not_available})
"""Of a topic none of whose brokers is there. Nothing was sent to it, so it is no part of the native transaction, which
can be ended without it; one that is, because its brokers answer that replicas are missing, is waited for."""

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
    # Whoever has read from a topic knows that it exists; one that does not exist would be asked about for ever.
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

READ: Final[Mapping[ErrorCode, Meaning]] = {
    **_SOMEWHERE_ELSE,
    ErrorCode.offset_not_available: Meaning.RETRY,
    ErrorCode.unknown_topic_or_partition: Meaning.REFRESH,
    ErrorCode.invalid_topic_exception: Meaning.REFUSED,
}


def meaning(table: Mapping[ErrorCode, Meaning], code: ErrorCode) -> Meaning:
    """Look ``code`` up; what the table does not foresee is UNKNOWN."""
    return table.get(code, Meaning.UNKNOWN)


def name(code: ErrorCode) -> str:
    """Kafka's own spelling, such as ``MESSAGE_TOO_LARGE``."""
    return code.name.upper()
