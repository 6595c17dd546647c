"""Consumer group offsets in native transactions against a real broker: with the records, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, TopicPartition

from bridge.tests.refusals import raises_code
from integration_tests.adapter_tools import batch_of, read_values, stored_offsets
from integration_tests.backends.interface import AnyCluster
from integration_tests.patience import eventually
from rollbridge.errors import FencedError
from rollbridge.kafka.appender import AppenderState, TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.clients import consumer_config
from rollbridge.kafka.errors import AppendRefusedError
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.group_offsets import METADATA_CHARACTERS_MAX, OffsetDetails, is_too_large


@pytest.fixture
def servers(cluster: AnyCluster) -> str:
    return cluster.bootstrap_servers


@pytest.fixture
def topic(servers: str, topic_prefix: str) -> str:
    KafkaClient(servers).topics.create_topics([TopicSpec(name=topic_prefix, partitions=2)])
    return topic_prefix


@pytest.fixture
def appender(servers: str, topic_prefix: str) -> Iterator[TransactionalAppender]:
    with KafkaClient(servers).appender(topic_prefix) as appender:
        appender.init()
        yield appender


@pytest.fixture
def committed(servers: str, topic: str) -> Iterator[Callable[[], list[int]]]:
    """What the group named like the topic would start from, per partition; -1001 for nothing."""
    consumer = Consumer(consumer_config(servers, isolation=Isolation.READ_COMMITTED, group_id=topic))

    def look() -> list[int]:
        found = consumer.committed([TopicPartition(topic, 0), TopicPartition(topic, 1)], timeout=120)
        return [place.offset for place in found]

    yield look
    consumer.close()


def test_offsets_are_committed_with_the_records(
    appender: TransactionalAppender, servers: str, topic: str, committed: Callable[[], list[int]]
) -> None:
    appender.append([(topic, batch_of([b"a", b"b"]))])
    appender.send_offsets(topic, {(topic, 0): 7, (topic, 1): 9})
    appender.commit()
    eventually(lambda: committed() == [7, 9], "the offsets are committed")
    assert read_values(servers, topic) == [b"a", b"b"]


def test_offsets_alone_make_a_transaction(
    appender: TransactionalAppender, topic: str, committed: Callable[[], list[int]]
) -> None:
    for offset in range(3):
        appender.send_offsets(topic, {(topic, 1): offset})
        assert appender.state is AppenderState.IN_TRANSACTION
        appender.commit()
        # The same transactional id again at once: it has to wait for its own markers.
        appender.send_offsets(topic, {(topic, 1): offset + 100})
        appender.abort()
    eventually(lambda: committed()[1] == 2, "the last offset is committed")


def test_offsets_of_an_aborted_transaction_never_count(
    appender: TransactionalAppender, topic: str, committed: Callable[[], list[int]]
) -> None:
    appender.send_offsets(topic, {(topic, 0): 1})
    appender.commit()
    appender.send_offsets(topic, {(topic, 0): 50})
    appender.append([(topic, batch_of([b"no"]))])
    appender.abort()
    appender.send_offsets(topic, {(topic, 1): 2})
    appender.commit()
    eventually(lambda: committed() == [1, 2], "the committed offsets, and no other")


def test_no_offsets_are_no_transaction(appender: TransactionalAppender, topic: str) -> None:
    appender.send_offsets(topic, {})
    assert appender.state is AppenderState.READY
    appender.close()
    with raises_code("invalid-state"):
        appender.send_offsets(topic, {(topic, 0): 1})


@pytest.mark.parametrize("text", ["x" * (METADATA_CHARACTERS_MAX + 1), "💡" * (METADATA_CHARACTERS_MAX // 2) + "x"])
def test_metadata_is_as_long_as_brokers_take_at_most(
    appender: TransactionalAppender, servers: str, topic: str, text: str
) -> None:
    assert is_too_large(text)
    with pytest.raises(AppendRefusedError) as refused:
        appender.send_offsets(topic, {(topic, 0): 1}, {(topic, 0): OffsetDetails(metadata=text)})
    assert refused.value.kafka_error == "OFFSET_METADATA_TOO_LARGE"
    appender.abort()
    assert not is_too_large(text[1:] if text[0] == "x" else text[:-1])
    fitting = OffsetDetails(metadata=text[1:] if text[0] == "x" else text[:-1])
    appender.send_offsets(topic, {(topic, 0): 1}, {(topic, 0): fitting})
    appender.commit()
    assert stored_offsets(servers, topic, topic, 1)[0].metadata == fitting.metadata


def test_a_fenced_user_commits_no_offsets(
    appender: TransactionalAppender, servers: str, topic: str, topic_prefix: str, committed: Callable[[], list[int]]
) -> None:
    appender.send_offsets(topic, {(topic, 0): 1})
    with KafkaClient(servers).appender(topic_prefix) as newer:
        newer.init()
        with pytest.raises(FencedError):
            appender.send_offsets(topic, {(topic, 0): 2})
        newer.send_offsets(topic, {(topic, 1): 5})
        newer.commit()
    eventually(lambda: committed() == [-1001, 5], "the newer user's offset alone")
