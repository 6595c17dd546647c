"""Kafka's error codes: what our tables make of them, beside Kafka's own flag (retriable or not)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from kio.schema.errors import ErrorCode

from rollbridge.errors import ConflictError, InvalidRequestError, KafkaUnavailableError, NotFoundError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.errors import Meaning, NotAuthorizedError, is_definite, refusal

E = ErrorCode
TABLES: Mapping[str, Mapping[ErrorCode, Meaning]] = {
    "PRODUCE": codes.PRODUCE,
    "END": codes.END,
    "INIT": codes.INIT,
    "OFFSETS": codes.OFFSETS,
    "READ": codes.READ,
}
RETRIED = {Meaning.RETRY, Meaning.REFRESH}

RETRIED_HERE_ALONE = {E.broker_not_available}
"""Between brokers; a look-up finds another one."""
RETRIED_BY_KAFKA_ALONE = {
    ("PRODUCE", E.corrupt_message),  # callers bring finished batches
    ("OFFSETS", E.unknown_topic_or_partition),  # the caller has read from the topic
}
OF_OTHER_REQUESTS = {
    E.not_controller,
    E.listener_not_found,
    E.preferred_leader_not_available,
    E.eligible_leaders_not_available,
    E.election_not_needed,
    E.unstable_offset_commit,
    E.fetch_session_id_not_found,
    E.fetch_session_topic_id_error,
    E.invalid_fetch_session_epoch,
    E.share_session_not_found,
    E.share_session_limit_reached,
    E.invalid_share_session_epoch,
}
"""Retriable codes of requests that no table is for."""
OF_TOPIC_IDS = {E.unknown_topic_id, E.inconsistent_topic_id}
OF_REPLICAS = {E.not_enough_replicas, E.not_enough_replicas_after_append}
OF_LOGS = {E.corrupt_message, E.unknown_topic_or_partition, E.offset_not_available} | OF_TOPIC_IDS | OF_REPLICAS
"""Retriable codes that a coordinator replaces by its own."""
UNKNOWN = {
    "PRODUCE": {E.offset_not_available},
    "END": OF_LOGS,
    "INIT": OF_LOGS,
    "OFFSETS": OF_LOGS - {E.unknown_topic_or_partition},
    "READ": {E.corrupt_message, E.concurrent_transactions} | OF_TOPIC_IDS | OF_REPLICAS,
}
"""Retriable codes of which a table knows nothing, as its requests are not answered with them, or a retry is no use."""

DEFINITE_THOUGH_RETRIABLE = {
    E.unknown_topic_or_partition,  # not all brokers know a new topic yet: whoever waits for that asks for it before
    E.unknown_topic_id,
    E.inconsistent_topic_id,
    E.corrupt_message,
    E.election_not_needed,  # there is nothing to do
    E.invalid_fetch_session_epoch,  # another request is needed
    E.invalid_share_session_epoch,
}
NEITHER_DEFINITE_NOR_RETRIABLE = {
    E.unknown_server_error,  # anything may have been done
    E.operation_not_attempted,  # nothing, because of another one in the same request
    E.rebalance_in_progress,  # these pass
    E.member_id_required,
    E.unreleased_instance_id,
    E.log_dir_not_found,
    E.broker_not_available,
    E.rebootstrap_required,
    E.stale_controller_epoch,  # these are sent between brokers and controllers
    E.stale_broker_epoch,
    E.unknown_controller_id,
    E.transaction_coordinator_fenced,
    E.inconsistent_voter_set,
    E.inconsistent_cluster_id,
    E.snapshot_not_found,
    E.position_out_of_range,
    E.duplicate_broker_registration,
    E.broker_id_not_registered,
    E.ineligible_replica,
    E.new_leader_elected,
    E.offset_moved_to_tiered_storage,
    E.transactional_id_not_found,  # librdkafka has no name for it
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_retries_what_kafka_calls_retriable(name: str) -> None:
    table = TABLES[name]
    assert {code for code, meaning in table.items() if meaning in RETRIED and not code.retriable} == RETRIED_HERE_ALONE
    refused = {(name, code) for code, meaning in table.items() if meaning not in RETRIED and code.retriable}
    assert refused == {item for item in RETRIED_BY_KAFKA_ALONE if item[0] == name}


@pytest.mark.parametrize("name", TABLES)
def test_a_retriable_code_that_a_table_lacks_is_never_its_answer(name: str) -> None:
    missing = {code for code in ErrorCode if code.retriable and code not in TABLES[name]}
    assert missing == OF_OTHER_REQUESTS | UNKNOWN[name]


def test_tables_agree_on_every_code_but_one() -> None:
    meanings: dict[ErrorCode, set[Meaning]] = {}
    for table in TABLES.values():
        for code, meaning in table.items():
            meanings.setdefault(code, set()).add(meaning)
    assert {code for code, found in meanings.items() if len(found) > 1} == {E.unknown_topic_or_partition}


def test_the_content_of_a_batch_and_its_topic_are_reasons_that_a_retry_does_not_change() -> None:
    assert {codes.PRODUCE[code] for code in codes.CONTENT} == {Meaning.REFUSED}
    assert not codes.CONTENT & codes.TOPIC
    assert {code for code in codes.TOPIC if codes.PRODUCE[code] in RETRIED} == {
        E.unknown_topic_or_partition,  # still so after some time: then it is the reason
        E.unknown_topic_id,
    }
    assert {codes.PRODUCE[code] for code in codes.AWAY} == {Meaning.REFRESH, Meaning.RETRY}


def test_an_answer_is_definite_where_kafka_would_not_retry() -> None:
    assert {code for code in ErrorCode if is_definite(code) and code.retriable} == DEFINITE_THOUGH_RETRIABLE
    open_ones = {code for code in ErrorCode if not is_definite(code) and not code.retriable}
    assert open_ones - {E.none} == NEITHER_DEFINITE_NOR_RETRIABLE


# Which answers of a broker are definite, and what the others are.


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


def test_every_code_of_kafka_has_a_name_and_all_that_are_not_definite_leave_open_what_happened() -> None:
    for code in ErrorCode:
        if code is not ErrorCode.none:
            refused = refusal(code, "create topic t")
            assert str(refused)
            assert isinstance(refused, KafkaUnavailableError) is not is_definite(code)
