"""Which answers of a broker are definite, and what the others are."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from rollbridge.errors import ConflictError, InvalidRequestError, KafkaUnavailableError, NotFoundError
from rollbridge.kafka.errors import NotAuthorizedError, is_definite, refusal


@pytest.mark.parametrize(
    ("code", "error_class"),
    [
        (ErrorCode.policy_violation, InvalidRequestError),
        (ErrorCode.invalid_replication_factor, InvalidRequestError),
        (ErrorCode.invalid_config, InvalidRequestError),
        (ErrorCode.invalid_topic_exception, InvalidRequestError),
        (ErrorCode.topic_deletion_disabled, InvalidRequestError),
        (ErrorCode.offset_out_of_range, InvalidRequestError),
        (ErrorCode.topic_authorization_failed, NotAuthorizedError),
        (ErrorCode.unknown_topic_or_partition, NotFoundError),
        (ErrorCode.unknown_topic_id, NotFoundError),
        (ErrorCode.topic_already_exists, ConflictError),
    ],
)
def test_a_definite_refusal_has_a_class_of_its_own(code: ErrorCode, error_class: type[Exception]) -> None:
    assert is_definite(code)
    refused = refusal(code, "create topic t", "topic t", "the policy says no")
    assert isinstance(refused, error_class)
    assert not isinstance(refused, KafkaUnavailableError)
    assert "cannot create topic t: the policy says no (" in str(refused)


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.request_timed_out,
        ErrorCode.not_controller,
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.replica_not_available,
        ErrorCode.kafka_storage_error,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_leader_epoch,
        ErrorCode.offset_not_available,
        ErrorCode.throttling_quota_exceeded,
        ErrorCode.coordinator_not_available,
        ErrorCode.unstable_offset_commit,
        ErrorCode.unknown_server_error,
    ],
)
def test_everything_else_leaves_open_what_happened(code: ErrorCode) -> None:
    assert not is_definite(code)
    assert isinstance(refusal(code, "create topic t"), KafkaUnavailableError)


def test_every_code_of_kafka_has_a_name() -> None:
    for code in ErrorCode:
        if code is not ErrorCode.none:
            assert str(refusal(code, "do it"))
