"""The transactional appender against a real broker: what is appended, committed, aborted, refused and fenced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from bridge.tests.refusals import raises_code
from integration_tests.adapter_tools import await_settled, batch_of, read_messages, read_values, stored_offsets
from integration_tests.backends.interface import AnyCluster
from integration_tests.patience import PATIENCE_S
from rollbridge.errors import ConfigError, CorruptDataError, FencedError
from rollbridge.kafka.appender import AppenderState, TransactionalAppender
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import AppendRefusedError, TopicNotFoundError
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.topics import TopicSpec
from rollbridge.stream.group_offsets import METADATA_CHARACTERS_MAX, OffsetDetails, is_too_large

Opener = Callable[..., TransactionalAppender]


@pytest.fixture
def servers(cluster: AnyCluster) -> str:
    return cluster.bootstrap_servers


@pytest.fixture
def kafka(servers: str) -> KafkaClient:
    return KafkaClient(servers)


@pytest.fixture
def topic(kafka: KafkaClient, topic_prefix: str) -> str:
    kafka.topics.create_topics([TopicSpec(name=topic_prefix)])
    return topic_prefix


@pytest.fixture
def opener(servers: str, topic_prefix: str) -> Iterator[Opener]:
    """Makes initialised appenders, by default all with the same transactional id."""
    opened = []

    def make(suffix: str = "", *, init: bool = True, **options: int) -> TransactionalAppender:
        appender = KafkaClient(servers).appender(f"{topic_prefix}{suffix}", **options)  # type: ignore[arg-type]
        opened.append(appender)
        if init:
            appender.init()
        return appender

    yield make
    for appender in opened:
        appender.close()


@pytest.fixture
def appender(opener: Opener) -> TransactionalAppender:
    return opener()


def test_an_open_transaction_is_invisible_and_ends_with_its_appender(opener: Opener, servers: str, topic: str) -> None:
    appender = opener()
    appender.append([(topic, batch_of([b"open"]))])
    assert read_values(servers, topic, settled=False) == []
    assert appender.end_offset(topic) == 1
    assert appender.end_offset(topic, Isolation.READ_COMMITTED) == 0
    appender.close()
    await_settled(servers, [topic])
    assert read_values(servers, topic) == []


def test_nothing_appended_is_committed_and_aborted_without_a_trace(
    appender: TransactionalAppender, kafka: KafkaClient, topic: str
) -> None:
    assert appender.append([]) == []
    appender.commit()
    appender.abort()
    appender.commit()
    assert appender.state is AppenderState.READY
    assert kafka.offsets.end([topic]) == {topic: 0}


def test_batches_are_taken_lazily(appender: TransactionalAppender, kafka: KafkaClient, topic: str) -> None:
    filler = bytes(300_000)
    ends = []

    def batches() -> Iterator[tuple[str, bytes]]:
        for n in range(40):
            if n % 10 == 9:
                ends.append(kafka.offsets.end([topic])[topic])
            yield topic, batch_of([filler])

    appender.append(batches())
    # By the time the later batches are asked for, earlier ones are in the log: at most the pipeline is held back.
    assert all(end >= asked - 7 for end, asked in zip(ends, range(10, 41, 10), strict=True))
    assert ends[-1] < 40


def test_an_iterator_that_fails_leaves_a_transaction_to_abort(
    appender: TransactionalAppender, servers: str, topic: str
) -> None:
    def batches() -> Iterator[tuple[str, bytes]]:
        for _ in range(3):
            yield topic, batch_of([b"no"])
        raise LookupError("the source ran dry")

    with pytest.raises(LookupError, match="ran dry"):
        appender.append(batches())
    assert appender.state is AppenderState.MUST_ABORT
    with raises_code("invalid-state", match="must abort"):
        appender.commit()
    with raises_code("invalid-state", match="must abort"):
        appender.append([(topic, batch_of([b"no"]))])
    appender.abort()
    appender.append([(topic, batch_of([b"yes"]))])
    appender.commit()
    assert read_values(servers, topic) == [b"yes"]


def test_what_is_no_batch_is_refused_before_it_is_sent(
    appender: TransactionalAppender, servers: str, topic: str
) -> None:
    with pytest.raises(CorruptDataError):
        appender.append([(topic, b"not a batch")])
    # Nothing has happened, so there is nothing to end.
    appender.commit()
    appender.append([(topic, batch_of([b"no"]))])
    with pytest.raises(CorruptDataError):
        appender.append([(topic, batch_of([b"no"])[:-1])])
    assert appender.state is AppenderState.MUST_ABORT
    appender.abort()
    appender.append([(topic, batch_of([b"yes"]))])
    appender.commit()
    assert read_values(servers, topic) == [b"yes"]


def test_a_batch_the_broker_finds_wrong_is_a_refusal(appender: TransactionalAppender, servers: str, topic: str) -> None:
    damaged = bytearray(batch_of([b"a", b"b"]))
    damaged[61] ^= 0x40  # length of the first record: stamping renews the checksum, but the record does not parse
    with pytest.raises(AppendRefusedError) as refused:
        appender.append([(topic, damaged)])
    assert refused.value.topic == topic
    assert refused.value.kafka_error in ("INVALID_RECORD", "CORRUPT_MESSAGE")
    appender.abort()
    appender.append([(topic, batch_of([b"yes"]))])
    appender.commit()
    assert read_values(servers, topic) == [b"yes"]


def test_a_sealed_topic_refuses_and_the_transaction_can_be_aborted(
    opener: Opener, servers: str, kafka: KafkaClient, topic: str, topic_prefix: str
) -> None:
    sealed = f"{topic_prefix}-sealed"
    kafka.topics.create_topics([TopicSpec(name=sealed)])
    before = opener("-before")
    before.append([(sealed, batch_of([b"in time"]))])
    before.commit()
    end = kafka.topics.seal([sealed])[sealed]
    appender = opener()
    with pytest.raises(AppendRefusedError) as refused:
        appender.append([(topic, batch_of([b"no"])), (sealed, batch_of([b"late"]))])
    assert (refused.value.topic, refused.value.kafka_error) == (sealed, "MESSAGE_TOO_LARGE")
    appender.abort()
    appender.append([(topic, batch_of([b"yes"]))])
    appender.commit()
    assert read_values(servers, topic) == [b"yes"]
    # The abort has left its marker, and no record.
    for isolation in Isolation:
        read = read_messages(servers, sealed, isolation=isolation)
        assert [(message.offset(), message.value()) for message in read] == [(0, b"in time")]
    assert end == 3  # behind the record, the marker of its commit and that of the barrier


def test_an_unknown_topic_is_a_refusal_and_a_new_one_is_waited_for(
    opener: Opener, servers: str, kafka: KafkaClient, topic_prefix: str
) -> None:
    hasty = opener("-hasty", unknown_topic_timeout_ms=200)
    with pytest.raises(AppendRefusedError) as refused:
        hasty.append([(topic_prefix, batch_of([b"no"]))])
    assert (refused.value.topic, refused.value.kafka_error) == (topic_prefix, "UNKNOWN_TOPIC_OR_PARTITION")
    hasty.abort()
    with pytest.raises(TopicNotFoundError):
        hasty.end_offset(topic_prefix)
    patient = opener("-patient", unknown_topic_timeout_ms=60_000)
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.extend(patient.append([(topic_prefix, batch_of([b"yes"]))])))
    thread.start()
    kafka.topics.create_topics([TopicSpec(name=topic_prefix)])
    thread.join(PATIENCE_S)
    assert result == [0]
    patient.commit()
    assert read_values(servers, topic_prefix) == [b"yes"]


def test_a_newer_user_fences_the_older_one(opener: Opener, servers: str, topic: str) -> None:
    old, idle = opener(), opener("-idle")
    old.append([(topic, batch_of([b"old"]))])
    new, newer_idle = opener(), opener("-idle")
    with pytest.raises(FencedError) as fenced:
        old.commit()
    assert vars(fenced.value)["transactional_id"] == old.transactional_id
    assert old.state is AppenderState.FENCED
    with pytest.raises(FencedError):
        idle.append([(topic, batch_of([b"idle"]))])
    for attempt in (old.init, old.commit, old.abort, lambda: old.append([]), idle.init):
        with pytest.raises(FencedError):
            attempt()
    new.append([(topic, batch_of([b"new"]))])
    new.commit()
    newer_idle.append([(topic, batch_of([b"newer"]))])
    newer_idle.commit()
    assert read_values(servers, topic) == [b"new", b"newer"]


def test_operations_out_of_turn_are_refused(opener: Opener, topic: str) -> None:
    fresh = opener(init=False)
    for attempt in (fresh.commit, fresh.abort, lambda: fresh.append([])):
        with raises_code("invalid-state", match="it is new"):
            attempt()
    fresh.init()
    fresh.close()
    fresh.close()
    for attempt in (fresh.init, fresh.commit, fresh.abort, lambda: fresh.append([])):
        with raises_code("invalid-state", match="it is closed"):
            attempt()
    with raises_code("invalid-state", match="it is closed"):
        fresh.end_offset(topic)
    assert fresh.transactional_id in repr(fresh)


@pytest.mark.parametrize(
    ("given", "options", "named"),
    [
        ({}, {"transactional_id": ""}, "transactional.id"),
        ({}, {"transaction_timeout_ms": 0}, "transaction_timeout_ms"),
        ({"bootstrap_servers": "nowhere"}, {}, "bootstrap.servers"),
        ({"bootstrap_servers": " , "}, {}, "bootstrap.servers"),
        ({"security": {"plugin.library.paths": "x"}}, {}, "plugin.library.paths"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, object], options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        KafkaClient(**{"bootstrap_servers": "localhost:9092", **given}).appender(  # type: ignore[arg-type]
            **{"transactional_id": "t", **options}  # type: ignore[arg-type]
        )


def test_a_transaction_timeout_over_the_brokers_limit_is_a_setting(opener: Opener) -> None:
    with pytest.raises(ConfigError, match=r"900001 ms are more than its transaction\.max\.timeout\.ms"):
        opener(transaction_timeout_ms=900_001)


def test_offsets_alone_make_a_transaction(appender: TransactionalAppender, servers: str, topic: str) -> None:
    for offset in range(3):
        appender.send_offsets(topic, {(topic, 0): offset})
        assert appender.state is AppenderState.IN_TRANSACTION
        appender.commit()
        # The same transactional id again at once: it has to wait for its own markers.
        appender.send_offsets(topic, {(topic, 0): offset + 100})
        appender.abort()
    assert stored_offsets(servers, topic, topic, 1)[0].offset == 2


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
    fitting = OffsetDetails(metadata=text[1:] if text[0] == "x" else text[:-1])
    assert not is_too_large(fitting.metadata)
    appender.send_offsets(topic, {(topic, 0): 1}, {(topic, 0): fitting})
    appender.commit()
    assert stored_offsets(servers, topic, topic, 1)[0].metadata == fitting.metadata
