"""The producer with confluent-kafka's names, used as code that was written for confluent-kafka uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException, Message, TopicPartition

import rollbridge
from integration_tests.clients import Site, headers_of, until
from rollbridge.model.sn import DLSN
from rollbridge.model.transaction import State

Reports = list[tuple[KafkaError | None, rollbridge.ProducedMessage]]


@pytest.fixture
def settings(site: Site) -> dict[str, Any]:
    """What connects a producer."""
    return {
        "bootstrap.servers": site.cluster.bootstrap_servers,
        "zookeeper": site.cluster.zookeeper,
        "zookeeper.root": site.root,
        "linger.ms": 1,
    }


@pytest.fixture
def producer(settings: dict[str, Any], unique_name: Callable[[str], str]) -> Iterator[rollbridge.Producer]:
    """One that may begin transactions, and has been initialised."""
    with rollbridge.Producer({**settings, "transactional.id": unique_name("producer")}) as producer:
        producer.init_transactions()
        yield producer


def code_of(fault: KafkaException) -> int:
    inner = fault.args[0]
    assert isinstance(inner, KafkaError)
    return inner.code()


def values(found: list[Message]) -> list[bytes | None]:
    return [message.value() for message in found]


def test_the_ordinary_loop_of_a_confluent_kafka_producer(site: Site, settings: dict[str, Any], orders: str) -> None:
    reports: Reports = []
    producer = rollbridge.Producer(settings)
    assert bool(producer)
    for number in range(100):
        producer.produce(orders, f"v{number}", "k", on_delivery=lambda error, message: reports.append((error, message)))
        producer.poll(0)
    producer.produce(orders, value=b"w", key=None, headers={"h": "1"}, timestamp=1_700_000_000_123)
    assert producer.flush(120) == 0
    assert len(producer) == 0
    assert [error for error, _ in reports] == [None] * 100
    message = reports[-1][1]
    assert (message.topic(), message.key(), message.value(), message.error()) == (orders, b"k", b"v99", None)
    assert message.headers() is None
    assert message.timestamp()[0] == TIMESTAMP_CREATE_TIME
    assert len(message) == 3
    sn = message.sn()
    assert sn is not None
    assert sn.dlsn == DLSN(0, message.partition(), message.offset())
    found = site.committed(orders)
    assert sorted(filter(None, values(found))) == sorted([b"w", *(b"v%d" % number for number in range(100))])
    full = next(item for item in found if item.value() == b"w")
    assert (headers_of(full), full.timestamp()[1]) == ([("h", b"1")], 1_700_000_000_123)
    producer.close()


def test_callbacks_follow_a_scale(settings: dict[str, Any], client: rollbridge.Bridge, orders: str) -> None:
    reports: Reports = []
    with rollbridge.Producer(settings, on_delivery=lambda error, message: reports.append((error, message))) as producer:
        producer.produce(orders, b"before", b"k")
        assert producer.flush(120) == 0
        client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 1.0)])
        producer.produce(orders, b"after", b"k")
        assert producer.flush(120) == 0
    places = [message.sn() for _, message in reports]
    assert [item.dlsn.epoch for item in places if item is not None and item.dlsn is not None] == [0, 1]


def test_a_transaction_is_visible_with_its_commit_and_told_then(
    site: Site, producer: rollbridge.Producer, orders: str, payments: str
) -> None:
    reports: Reports = []
    producer.begin_transaction()
    for stream in (orders, payments):
        producer.produce(stream, b"in", b"k", on_delivery=lambda error, message: reports.append((error, message)))
    assert producer.flush(120) == 0
    assert reports == []
    assert len(producer) == 2
    assert site.committed(orders) == site.committed(payments) == []
    producer.commit_transaction(30)
    until(lambda: producer.poll(0.1) or len(reports) == 2)
    assert [(error, message.topic()) for error, message in reports] == [(None, orders), (None, payments)]
    assert all(message.offset() >= 0 for _, message in reports)
    assert len(producer) == 0
    assert values(site.committed(orders)) == values(site.committed(payments)) == [b"in"]


def test_an_aborted_transaction_leaves_nothing_and_its_callbacks_say_so(
    site: Site, producer: rollbridge.Producer, orders: str
) -> None:
    reports: Reports = []
    producer.begin_transaction()
    producer.produce(orders, b"no", b"k", on_delivery=lambda error, message: reports.append((error, message)))
    producer.abort_transaction(30)
    until(lambda: producer.poll(0.1) or reports)
    error, message = reports[0]
    assert error is not None
    assert error.txn_requires_abort()
    assert (message.offset(), message.partition()) == (-1001, -1)
    producer.begin_transaction()
    producer.produce(orders, b"yes", b"k")
    producer.commit_transaction(30)
    assert values(site.committed(orders)) == [b"yes"]


def test_empty_transactions_end_as_well(producer: rollbridge.Producer) -> None:
    producer.begin_transaction()
    producer.commit_transaction()
    producer.begin_transaction()
    producer.abort_transaction()


def test_what_a_dead_process_left_open_is_aborted_by_its_successor(
    settings: dict[str, Any], client: rollbridge.Bridge, orders: str, unique_name: Callable[[str], str]
) -> None:
    name = unique_name("producer")
    with client_named(settings, name) as first:
        first.init_transactions()
        first.begin_transaction()
        first.produce(orders, b"left", b"k")
        first.flush(120)
        until(lambda: [item for item in client.admin.transactions() if item.client_name == name])
        with client_named(settings, name) as second:
            second.init_transactions()
            listed = client.admin.transactions()
            assert not [item for item in listed if item.client_name == name and item.state == State.OPEN.value]
        for end in (first.commit_transaction, first.abort_transaction):
            with pytest.raises(KafkaException) as refused:
                end(30)
            assert refused.value.args[0].fatal()  # as in confluent-kafka: it is fenced


def client_named(settings: dict[str, Any], name: str) -> rollbridge.Producer:
    return rollbridge.Producer({**settings, "transactional.id": name})


def test_calls_in_the_wrong_order_are_refused(settings: dict[str, Any], producer: rollbridge.Producer) -> None:
    with pytest.raises(KafkaException) as refused:
        producer.commit_transaction()
    assert code_of(refused.value) == KafkaError._STATE
    with pytest.raises(KafkaException) as refused:
        producer.abort_transaction()
    assert code_of(refused.value) == KafkaError._STATE
    with pytest.raises(KafkaException) as refused:
        producer.send_offsets_to_transaction([TopicPartition("t", 0, 1)], "g")
    assert code_of(refused.value) == KafkaError._STATE
    producer.begin_transaction()
    with pytest.raises(KafkaException) as refused:
        producer.begin_transaction()
    assert code_of(refused.value) == KafkaError._STATE
    producer.abort_transaction()
    with rollbridge.Producer(settings) as plain:
        for plain_call in (plain.init_transactions, plain.begin_transaction):
            with pytest.raises(KafkaException) as refused:
                plain_call()
            assert code_of(refused.value) == KafkaError._STATE


def test_records_that_can_not_be_written_are_refused_at_once(
    settings: dict[str, Any], producer: rollbridge.Producer, scope: str, orders: str
) -> None:
    for arguments, expected in (
        ((f"{scope}/nothing", b"v"), KafkaError.UNKNOWN_TOPIC_OR_PART),
        (("no stream name", b"v"), KafkaError._INVALID_ARG),
        ((orders, b"v" * 1_100_000), KafkaError.MSG_SIZE_TOO_LARGE),
        ((orders, b"v", b"k", 3), KafkaError._INVALID_ARG),
    ):
        with pytest.raises(KafkaException) as refused:
            producer.produce(*arguments)
        assert code_of(refused.value) == expected
    with pytest.raises(TypeError, match="bytes, text or None"):
        producer.produce(orders, 17)  # type: ignore[arg-type]
    assert producer.flush(120) == 0


def test_a_full_queue_is_a_buffer_error(settings: dict[str, Any], orders: str) -> None:
    with rollbridge.Producer({**settings, "linger.ms": 60_000, "queue.buffering.max.kbytes": 4096}) as producer:

        def fill() -> None:
            for _ in range(100_000):
                producer.produce(orders, b"v" * 500_000, b"k")

        with pytest.raises(BufferError):
            fill()
        assert producer.flush(60) == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("plugin.library.paths", "/tmp/evil.so"),
        ("enable.idempotence", False),
        ("acks", 1),
        ("allow.auto.create.topics", True),
        ("linger.ms", "soon"),
        ("linger.ms", -1),
        ("group.id", "g"),
        ("compression.type", "brotli"),
        ("on_delivery", 17),
    ],
)
def test_settings_that_are_not_taken_are_named(settings: dict[str, Any], setting: str, value: object) -> None:
    with pytest.raises(KafkaException, match=setting.split(".")[0]) as refused:
        rollbridge.Producer({**settings, setting: value})
    assert code_of(refused.value) == KafkaError._INVALID_ARG


def test_streams_are_listed_as_topics(settings: dict[str, Any], orders: str, payments: str, scope: str) -> None:
    with rollbridge.Producer(settings) as producer:
        assert {orders, payments} <= producer.list_topics().topics.keys()
        [(name, view)] = producer.list_topics(payments).topics.items()
        assert (name, sorted(view.partitions)) == (payments, [0, 1, 2])
        with pytest.raises(KafkaException) as refused:
            producer.list_topics(f"{scope}/nothing")
        assert code_of(refused.value) == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_a_transaction_takes_the_streams_that_were_named_and_no_other(
    settings: dict[str, Any], orders: str, payments: str, unique_name: Callable[[str], str]
) -> None:
    named = {**settings, "transactional.id": unique_name("producer"), "transaction.streams": orders}
    with rollbridge.Producer(named) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        with pytest.raises(KafkaException) as refused:
            producer.produce(payments, b"v", b"k")
        assert code_of(refused.value) == KafkaError._INVALID_ARG
        producer.produce(orders, b"v", b"k")
        with pytest.raises(KafkaException) as refused:
            producer.produce(payments, b"v", b"k")
        assert code_of(refused.value) == KafkaError._INVALID_ARG
        producer.commit_transaction(30)


def test_a_closed_producer_takes_nothing(settings: dict[str, Any], orders: str) -> None:
    producer = rollbridge.Producer(settings)
    producer.close()
    producer.close()
    with pytest.raises(KafkaException) as refused:
        producer.produce(orders, b"v")
    assert code_of(refused.value) == KafkaError._STATE
