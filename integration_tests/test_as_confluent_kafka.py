"""``rollbridge.Consumer`` where confluent-kafka's own tests look: no brokers, no topic, closed, unassigned, misused.

Each case is played with both, and what they answer is compared.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

import rollbridge
from integration_tests.clients import Site, until
from integration_tests.kafka_tools import create_topic, produce
from rollbridge_devcluster.state import free_port

Make = Callable[..., Any]


@pytest.fixture(params=["ours", "native"])
def make(request: pytest.FixtureRequest, site: Site, unique_name: Callable[[str], str]) -> Iterator[Make]:
    """Makes consumers of either kind, and closes them."""
    made: list[Any] = []

    def consumer(**settings: Any) -> Any:
        config = {
            "bootstrap.servers": site.cluster.bootstrap_servers,
            "group.id": unique_name("group"),
            "auto.offset.reset": "earliest",
            **{name if name == "error_cb" else name.replace("_", "."): value for name, value in settings.items()},
        }
        if request.param == "ours":
            config |= {"zookeeper": site.cluster.zookeeper, "zookeeper.root": site.root}
            made.append(rollbridge.Consumer(config))
        else:
            made.append(confluent_kafka.Consumer(config))
        return made[-1]

    yield consumer
    for item in made:
        with suppress(ValueError, RuntimeError, KafkaException):  # what a callback raises
            item.close()


def code_of(call: Callable[[], object]) -> int:
    with pytest.raises(KafkaException) as raised:
        call()
    code: int = raised.value.args[0].code()
    return code


def values(consumer: Any, count: int) -> list[bytes]:
    found: list[bytes] = []

    def enough() -> bool:
        found.extend(item.value() for item in consumer.consume(100, 0.5) if item.error() is None)
        return len(found) >= count

    until(enough)
    return found


def nowhere() -> str:
    return f"127.0.0.1:{free_port()}"


def test_a_consumer_needs_a_configuration_with_a_group() -> None:
    for kind in (rollbridge.Consumer, confluent_kafka.Consumer):
        with pytest.raises(TypeError, match="expected configuration dict"):
            kind()
        with pytest.raises(ValueError, match=r"group\.id must be set"):
            kind({"bootstrap.servers": nowhere()})


def test_settings_that_there_are_not_are_kafka_exceptions(make: Make) -> None:
    assert code_of(lambda: make(no_such_setting=1)) == KafkaError._INVALID_ARG


def test_brokers_that_are_not_there_keep_nobody_from_subscribing_and_polling(make: Make) -> None:
    consumer = make(bootstrap_servers=nowhere(), socket_timeout_ms=100, session_timeout_ms=1_000)
    consumer.subscribe(["test"])
    assert consumer.poll(0.1) is None
    assert consumer.consume(10, 0.1) == []
    consumer.unsubscribe()
    places = [TopicPartition("test", number) for number in range(0, 10, 3)]
    consumer.assign(places)
    assert [(item.topic, item.partition) for item in consumer.assignment()] == [
        ("test", item.partition) for item in places
    ]
    assert code_of(lambda: consumer.seek(TopicPartition("test", 1, 123))) in (
        KafkaError._STATE,
        KafkaError._UNKNOWN_PARTITION,
    )
    consumer.pause(places)
    consumer.resume(places)
    assert consumer.get_watermark_offsets(places[0], cached=True) == (OFFSET_INVALID, OFFSET_INVALID)
    assert {item.offset for item in consumer.position(places)} == {OFFSET_INVALID}
    consumer.unassign()
    assert consumer.assignment() == []
    assert consumer.commit(asynchronous=True) is None
    assert code_of(lambda: consumer.commit(asynchronous=False)) == KafkaError._NO_OFFSET
    assert code_of(lambda: consumer.committed(places, timeout=0.001)) in (KafkaError._TIMED_OUT, KafkaError._WAIT_COORD)
    assert code_of(lambda: consumer.list_topics(timeout=0.2)) in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)
    assert code_of(lambda: consumer.list_topics("hi", timeout=0.1)) in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)


def test_a_topic_that_is_made_later_is_read_then(make: Make, site: Site, unique_name: Callable[[str], str]) -> None:
    topic = unique_name("later")
    consumer = make(topic_metadata_refresh_interval_ms=500)
    consumer.subscribe([topic])
    seen: list[int] = []

    def is_told() -> bool:
        message = consumer.poll(0.5)
        if message is not None:
            seen.append(message.error().code())
        return bool(seen)

    until(is_told)
    assert set(seen) == {KafkaError.UNKNOWN_TOPIC_OR_PART}
    create_topic(site.cluster.bootstrap_servers, topic)
    produce(site.cluster.bootstrap_servers, topic, [b"1", b"2"])
    assert values(consumer, 2) == [b"1", b"2"]


def test_a_topic_is_assigned_by_hand_before_it_is_made(
    make: Make, site: Site, unique_name: Callable[[str], str]
) -> None:
    topic = unique_name("later")
    by_commit, from_the_start = make(), make()
    by_commit.assign([TopicPartition(topic, 0)])
    from_the_start.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    for consumer in (by_commit, from_the_start):
        consumer.poll(0.2)
    create_topic(site.cluster.bootstrap_servers, topic)
    produce(site.cluster.bootstrap_servers, topic, [b"1", b"2"])
    for consumer in (by_commit, from_the_start):
        assert values(consumer, 2) == [b"1", b"2"]


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_what_is_assigned_by_hand_begins_where_the_group_is(
    make: Make, site: Site, unique_name: Callable[[str], str], reset: str
) -> None:
    topic, servers = unique_name("assigned"), site.cluster.bootstrap_servers
    create_topic(servers, topic)
    produce(servers, topic, [b"%d" % number for number in range(5)])
    group = unique_name("group")
    first = make(group_id=group, auto_offset_reset=reset, enable_auto_commit=False)
    first.assign([TopicPartition(topic, 0)])
    if reset == "earliest":
        assert values(first, 5) == [b"0", b"1", b"2", b"3", b"4"]
    else:
        until(lambda: first.poll(0.2) is None and _is_begun(first, topic, 5))
        produce(servers, topic, [b"5"])
        assert values(first, 1) == [b"5"]
    first.commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
    second = make(group_id=group, auto_offset_reset=reset)
    second.assign([TopicPartition(topic, 0)])
    assert values(second, 2)[:2] == [b"3", b"4"]


def _is_begun(consumer: Any, topic: str, end: int) -> bool:
    """Whether reading has begun at the end: librdkafka does not say so by ``position``, but by its watermarks."""
    place = TopicPartition(topic, 0)
    at_end: bool = consumer.position([place])[0].offset == end
    return at_end or bool(consumer.get_watermark_offsets(place, cached=True)[1] == end)


def test_calls_that_cannot_be_are_refused_alike(make: Make, site: Site, unique_name: Callable[[str], str]) -> None:
    topic = unique_name("topic")
    create_topic(site.cluster.bootstrap_servers, topic)
    produce(site.cluster.bootstrap_servers, topic, [b"1"])
    consumer = make(enable_auto_offset_store=False, enable_auto_commit=False)
    for number in (-100, 1_000_001):
        with pytest.raises(ValueError, match=r"num_messages must be between 0 and 1000000 \(1M\)"):
            consumer.consume(number)
    assert consumer.consume(0, 0.1) == []
    consumer.assign([TopicPartition(topic, 0, 0)])
    message = None
    while message is None:
        message = consumer.poll(1.0)
    with pytest.raises(ValueError, match="mutually exclusive"):
        consumer.commit(message=message, offsets=[])
    with pytest.raises(ValueError, match="mutually exclusive"):
        consumer.store_offsets(message=message, offsets=[TopicPartition(topic, 0, 1)])
    for nothing in ({}, {"message": None}, {"offsets": None}):
        with pytest.raises(ValueError, match="expected either message or offsets"):
            consumer.store_offsets(**nothing)
    consumer.store_offsets(message=message)
    assert consumer.commit(asynchronous=False)[0].offset == 1
    assert code_of(lambda: consumer.seek(TopicPartition(f"{topic}-other", 0, 0))) in (
        KafkaError._STATE,
        KafkaError._UNKNOWN_PARTITION,
    )


def test_a_closed_consumer_says_so_whatever_is_called(make: Make) -> None:
    consumer = make()
    consumer.subscribe(["test"])
    consumer.unsubscribe()
    consumer.close()
    consumer.close()
    place = TopicPartition("test", 0, 0)
    calls: dict[str, Callable[[], object]] = {
        "subscribe": lambda: consumer.subscribe(["test"]),
        "unsubscribe": lambda: consumer.unsubscribe(),
        "poll": lambda: consumer.poll(0.1),
        "consume": lambda: consumer.consume(1, 0.1),
        "assign": lambda: consumer.assign([place]),
        "incremental_assign": lambda: consumer.incremental_assign([place]),
        "unassign": lambda: consumer.unassign(),
        "incremental_unassign": lambda: consumer.incremental_unassign([place]),
        "assignment": lambda: consumer.assignment(),
        "commit": lambda: consumer.commit(),
        "committed": lambda: consumer.committed([place]),
        "position": lambda: consumer.position([place]),
        "seek": lambda: consumer.seek(place),
        "get_watermark_offsets": lambda: consumer.get_watermark_offsets(place),
        "store_offsets": lambda: consumer.store_offsets(offsets=[place]),
        "offsets_for_times": lambda: consumer.offsets_for_times([place]),
        "consumer_group_metadata": lambda: consumer.consumer_group_metadata(),
        "memberid": lambda: consumer.memberid(),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=r"[Cc]losed"):
            pytest.fail(f"{name}: {call()}")
    assert consumer.__enter__() is consumer
    assert consumer.__exit__(None, None, None) is None


def test_one_that_was_never_initialized_is_closed() -> None:
    for base in (rollbridge.Consumer, confluent_kafka.Consumer):
        kind: Any = type("Uninitialized", (base,), {"__init__": lambda self: None})
        consumer = kind()
        calls: list[Callable[[], object]] = [
            consumer.poll,
            consumer.assignment,
            consumer.memberid,
            consumer.unsubscribe,
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="Consumer closed"):
                call()
        consumer.close()


def test_a_signal_ends_a_poll(make: Make) -> None:
    """confluent-kafka loses what a handler raises during a poll of less than 200 ms, as ours are made of."""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        polls: list[Callable[[Any], object]] = [lambda it: it.poll(60), lambda it: it.consume(1, 60)]
        for poll in polls:
            consumer = make(bootstrap_servers=nowhere(), socket_timeout_ms=100)
            consumer.subscribe(["test"])
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                poll(consumer)
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_messages_of_confluent_kafka_are_taken_where_offsets_are_stored(make: Make) -> None:
    consumer = make(bootstrap_servers=nowhere(), enable_auto_offset_store=False)
    for given in ({"message": confluent_kafka.Message(topic="test", partition=0, offset=7)}, {"offsets": [_AT]}):
        assert code_of(lambda given=given: consumer.store_offsets(**given)) == KafkaError._UNKNOWN_PARTITION  # type: ignore[misc]
    consumer.assign([TopicPartition("test", 0, 7)])
    consumer.store_offsets(offsets=[TopicPartition("test", 0, 7)])


_AT = TopicPartition("test", 0, 7)


@pytest.mark.parametrize("kind", [KafkaException, ValueError, RuntimeError])
def test_what_a_callback_raises_is_raised_by_the_poll(make: Make, kind: type[Exception]) -> None:
    def fail(error: KafkaError) -> None:
        raise kind(error)

    consumer = make(bootstrap_servers=nowhere(), socket_timeout_ms=100, error_cb=fail)
    with pytest.raises(kind):
        until(lambda: consumer.poll(0.5))
