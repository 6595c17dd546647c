"""When all of a log up to an end that its leader has told has been read."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, Message

from rollbridge.kafka.snapshots import is_end


def record(offset: int) -> Message:
    return Message(topic="t", partition=0, offset=offset)


def news_of_an_end(offset: int) -> Message:
    return Message(topic="t", partition=0, offset=offset, error=KafkaError(KafkaError._PARTITION_EOF))


def test_the_end_that_a_new_leader_tells_before_it_has_caught_up_is_none() -> None:
    """Its high watermark is 5 for a moment, although its predecessor had acknowledged everything up to 9."""
    read = [record(3), record(4), news_of_an_end(5), record(5), record(6), news_of_an_end(9)]
    assert [is_end(message, 9) for message in read] == [False] * 5 + [True]


def test_the_last_record_is_the_end_where_no_marker_follows() -> None:
    assert [is_end(record(offset), 9) for offset in (7, 8, 9)] == [False, True, True]


def test_markers_at_the_end_are_told_only_by_news_of_it() -> None:
    assert [is_end(message, 9) for message in (record(6), news_of_an_end(9))] == [False, True]


@pytest.mark.parametrize("code", [KafkaError._ALL_BROKERS_DOWN, KafkaError.NOT_LEADER_FOR_PARTITION])
def test_other_errors_are_no_end(code: int) -> None:
    assert not is_end(Message(topic="t", partition=0, offset=9, error=KafkaError(code)), 9)
