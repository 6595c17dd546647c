"""Which answers to a question for offsets are asked again."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from bridge.kafka.log_offsets import will_pass


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("LEADER_NOT_AVAILABLE", True),
        ("NOT_LEADER_FOR_PARTITION", True),
        ("REPLICA_NOT_AVAILABLE", True),
        ("KAFKA_STORAGE_ERROR", True),
        ("FENCED_LEADER_EPOCH", True),
        ("UNKNOWN_LEADER_EPOCH", True),
        ("OFFSET_NOT_AVAILABLE", True),
        ("UNKNOWN_TOPIC_OR_PART", False),
        ("TOPIC_AUTHORIZATION_FAILED", False),
        ("UNSUPPORTED_VERSION", False),
        ("_TIMED_OUT", False),
        ("_ALL_BROKERS_DOWN", False),
    ],
)
def test_what_a_change_of_leaders_explains_is_asked_again(name: str, passes: bool) -> None:
    error = KafkaError(getattr(KafkaError, name))
    assert will_pass(error) is passes
    assert will_pass(KafkaException(error)) is passes


def test_what_is_no_error_of_kafka_is_not_asked_again() -> None:
    assert not will_pass(ValueError("x"))
