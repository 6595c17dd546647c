"""``rollbridge.Consumer`` on topics as they are: adopted ones, and plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic

import rollbridge
from integration_tests.clients import Site, adopt, consumer_raises, until
from rollbridge.errors import InvalidNameError

PARTITIONS = 4
KEYS = [b"key-%d" % number for number in range(40)]


class Place:
    """One site, as programs of clients see it."""

    def __init__(self, site: Site, unique_name: Callable[[str], str]) -> None:
        self.site = site
        self.unique_name = unique_name
        self.native: dict[str, Any] = {"bootstrap.servers": site.cluster.bootstrap_servers}
        self.ours: dict[str, Any] = {
            **self.native,
            "zookeeper": site.cluster.zookeeper,
            "zookeeper.root": site.root,
        }
        self.admin = AdminClient(self.native)

    def topic(self, stem: str = "shop.orders", partitions: int = PARTITIONS, **settings: str) -> str:
        """Make a topic."""
        name = self.unique_name(stem)
        new = NewTopic(name, partitions, 1, config={key.replace("_", "."): value for key, value in settings.items()})
        for made in self.admin.create_topics([new]).values():
            made.result()
        return name

    def write(self, topic: str, word: str) -> None:
        """Write a record for each key as a native producer does."""
        producer = confluent_kafka.Producer({**self.native, "partitioner": "murmur2_random"})
        for key in KEYS:
            producer.produce(topic, b"%s-%s" % (word.encode(), key), key)
        assert producer.flush(60) == 0

    def consumer_settings(self, group: str, **settings: Any) -> dict[str, Any]:
        return {
            "group.id": group,
            "auto.offset.reset": "earliest",
            "heartbeat.interval.ms": 200,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }

    @contextmanager
    def consumer(self, group: str, *topics: str, **settings: Any) -> Iterator[rollbridge.Consumer]:
        with rollbridge.Consumer({**self.ours, **self.consumer_settings(group, **settings)}) as consumer:
            if topics:
                consumer.subscribe(list(topics))
            yield consumer

    @contextmanager
    def native_consumer(self, group: str, *topics: str, **settings: Any) -> Iterator[confluent_kafka.Consumer]:
        consumer = confluent_kafka.Consumer({**self.native, **self.consumer_settings(group, **settings)})
        if topics:
            consumer.subscribe(list(topics))
        yield consumer
        consumer.close()


@pytest.fixture
def place(site: Site, unique_name: Callable[[str], str]) -> Place:
    return Place(site, unique_name)


@pytest.fixture
def topic(place: Place, client: rollbridge.Bridge) -> str:
    """An adopted topic, with a record of each key."""
    name = place.topic()
    place.write(name, "before")
    assert adopt(client, name).config.partitioner == "murmur2"
    return name


def take(consumer: rollbridge.Consumer | confluent_kafka.Consumer, count: int) -> list[Any]:
    """Read so many messages."""
    found: list[Any] = []

    def enough() -> bool:
        found.extend(consumer.consume(100, 0.5))
        return len(found) >= count

    until(enough)
    assert all(message.error() is None for message in found), [message.error() for message in found]
    assert len(found) == count
    return found


def nothing_comes(consumer: rollbridge.Consumer | confluent_kafka.Consumer) -> None:
    for _ in range(6):
        assert consumer.poll(0.25) is None


def words(messages: list[Any]) -> set[bytes]:
    return {message.value().partition(b"-")[0] for message in messages}


def places(messages: list[Any]) -> set[tuple[str, int, int]]:
    return {(message.topic(), message.partition(), message.offset()) for message in messages}


# Adopted topics: consumers


def test_native_consumers_and_ours_go_on_where_the_other_has_stopped(place: Place, topic: str) -> None:
    group = place.unique_name("group")
    with place.consumer(group, topic) as consumer:
        found = take(consumer, len(KEYS))
        assert {message.topic() for message in found} == {topic}
    with place.native_consumer(place.unique_name("group"), topic) as other:
        assert places(take(other, len(KEYS))) == places(found)
    place.write(topic, "second")
    with place.native_consumer(group, topic) as other:
        assert words(take(other, len(KEYS))) == {b"second"}
        nothing_comes(other)
    place.write(topic, "third")
    with place.consumer(group, topic) as consumer:
        assert words(take(consumer, len(KEYS))) == {b"third"}
        nothing_comes(consumer)


def test_the_calls_of_a_consumer_name_kafkas_partitions(place: Place, topic: str) -> None:
    group = place.unique_name("group")
    every = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    with (
        place.consumer(group, topic, enable_auto_commit=False) as ours,
        place.native_consumer(place.unique_name("group"), topic, enable_auto_commit=False) as native,
    ):
        found = take(ours, len(KEYS))
        take(native, len(KEYS))
        assert sorted(ours.assignment()) == sorted(native.assignment()) == every
        ends = [place.offset for place in native.position(every)]
        assert [place.offset for place in ours.position(every)] == ends
        for number in range(PARTITIONS):
            at = TopicPartition(topic, number)
            assert ours.get_watermark_offsets(at, 60) == native.get_watermark_offsets(at, 60)
        stamp = found[0].timestamp()[1]
        times = [TopicPartition(topic, number, stamp) for number in range(PARTITIONS)]
        assert ours.offsets_for_times(times, 60) == native.offsets_for_times(times, 60)
        later = [TopicPartition(topic, number, stamp + 10**9) for number in range(PARTITIONS)]
        assert {item.offset for item in ours.offsets_for_times(later, 60)} == {OFFSET_END}
        assert ours.cluster_id(60) == native.cluster_id(60)
        listed, theirs = ours.list_topics(topic, 60), native.list_topics(topic, 60)
        assert listed.topics.keys() == theirs.topics.keys() == {topic}
        assert listed.topics[topic].partitions.keys() == theirs.topics[topic].partitions.keys()
        ours.commit(offsets=[TopicPartition(topic, 2, 1, metadata="mine")], asynchronous=False)
        [committed] = ours.committed([TopicPartition(topic, 2)], 60)
        assert (committed.topic, committed.partition, committed.offset) == (topic, 2, 1)
        ours.pause([TopicPartition(topic, 1)])
        ours.seek(TopicPartition(topic, 2, 0))
        assert {message.partition() for message in take(ours, ends[2])} == {2}
        place.write(topic, "more")
        counts = [sum(message.partition() == number for message in found) for number in range(PARTITIONS)]
        assert {message.partition() for message in take(ours, len(KEYS) - counts[1])} == {0, 2, 3}
        ours.resume([TopicPartition(topic, 1)])
        assert {message.partition() for message in take(ours, counts[1])} == {1}
    with place.native_consumer(group) as native:
        [committed] = native.committed([TopicPartition(topic, 2)], 60)
        assert (committed.offset, committed.metadata) == (1, "mine")


def test_an_adopted_topic_is_assigned_by_hand_and_stored_offsets_are_committed(place: Place, topic: str) -> None:
    group = place.unique_name("group")
    with place.consumer(group, enable_auto_offset_store=False, auto_commit_interval_ms=100) as consumer:
        consumer.assign([TopicPartition(topic, 2, OFFSET_BEGINNING)])
        _, count = consumer.get_watermark_offsets(TopicPartition(topic, 2), 60)
        found = take(consumer, count)
        assert {message.partition() for message in found} == {2}
        consumer.store_offsets(message=found[0])
        until(lambda: consumer.poll(0.1) or consumer.committed([TopicPartition(topic, 2)], 60)[0].offset == 1)
        consumer.incremental_assign([TopicPartition(topic, 3, 0)])
        assert [(item.topic, item.partition) for item in consumer.assignment()] == [(topic, 2), (topic, 3)]
        assert {message.partition() for message in take(consumer, len(KEYS) and _end(consumer, topic, 3))} == {3}
        consumer.incremental_unassign([TopicPartition(topic, 2)])
        place.write(topic, "more")
        assert {message.partition() for message in take(consumer, _end(consumer, topic, 3) // 2)} == {3}
        consumer.unassign()
        assert consumer.assignment() == []
    with place.consumer(group) as consumer:
        consumer.assign([TopicPartition(topic, 2)])
        first = take(consumer, 2 * count - 1)[0]
        assert (first.partition(), first.offset()) == (2, 1)


def _end(consumer: rollbridge.Consumer, topic: str, partition: int) -> int:
    return consumer.get_watermark_offsets(TopicPartition(topic, partition), 60)[1]


def test_a_group_begins_with_what_a_topic_still_has(place: Place, client: rollbridge.Bridge, topic: str) -> None:
    for done in place.admin.delete_records([TopicPartition(topic, 0, 3)]).values():
        done.result()
    group = place.unique_name("group")
    with place.consumer(group, topic, enable_auto_commit=False) as consumer:
        take(consumer, len(KEYS) - 3)
        # A native consumer would begin at the end if an offset that is gone were committed.
        assert [item.offset for item in consumer.committed([TopicPartition(topic, 0)], 60)] == [3]


def test_a_scaled_topic_keeps_its_name_and_its_numbers(place: Place, client: rollbridge.Bridge, topic: str) -> None:
    group = place.unique_name("group")
    with place.consumer(group, topic, auto_commit_interval_ms=100) as consumer:
        take(consumer, len(KEYS))
        client.admin.scale(topic, seal=[0], ranges=[(0.0, 0.25)], leave_topic=True)
        with client.transaction(topic) as transaction:
            for key in KEYS:
                transaction.write(topic, key, b"after-" + key)
        found = take(consumer, len(KEYS))
        assert words(found) == {b"after"}
        assert {message.topic() for message in found} == {topic}
        assert min(message.partition() for message in found) == PARTITIONS
        last = found[-1]
        consumer.commit(last, asynchronous=False)
        [committed] = consumer.committed([TopicPartition(topic, last.partition())], 60)
        assert committed.offset == last.offset() + 1


# Plain topics: consumers


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_a_plain_topic_is_read_as_confluent_kafka_reads_it(place: Place, reset: str) -> None:
    topic, group = place.topic("plain"), place.unique_name("group")
    place.write(topic, "first")
    events: list[str] = []
    with (
        place.consumer(group, auto_offset_reset=reset) as ours,
        place.native_consumer(place.unique_name("group"), topic) as native,
    ):
        ours.subscribe(
            [topic],
            on_assign=lambda _, items: events.append(f"assigned {len(items)}"),
            on_revoke=lambda _, items: events.append(f"revoked {len(items)}"),
        )
        count = len(KEYS) * (1 if reset == "earliest" else 2)
        if reset == "latest":
            until(lambda: ours.poll(0.1) is None and _known(ours) == PARTITIONS)
            place.write(topic, "second")
        found = take(ours, len(KEYS))
        word = b"first" if reset == "earliest" else b"second"
        assert words(found) == {word}
        assert places(found) == places([item for item in take(native, count) if item.value().startswith(word)])
        message = found[0]
        assert (message.dlsn, message.sn, message.transaction_id) == (None, None, None)
        assert str(message.partition()) in repr(message)
        with pytest.raises(InvalidNameError):
            _ = message.segment
    assert events == [f"assigned {PARTITIONS}", f"revoked {PARTITIONS}"]
    place.write(topic, "third")
    with place.native_consumer(group, topic) as native:
        assert words(take(native, len(KEYS))) == {b"third"}


def test_an_event_that_is_no_record_is_not_committed(place: Place, topic: str) -> None:
    """The offset of an end is that of the next record: one behind it would skip that."""
    plain = place.topic("plain", 1)
    place.write(plain, "first")
    for name in (plain, topic):
        refusals = []
        for make in (place.consumer, place.native_consumer):
            group = place.unique_name("group")
            more = {"enable_partition_eof": True, "enable_auto_commit": False, "enable_auto_offset_store": False}
            with make(group, **more) as consumer:
                consumer.subscribe([name])
                ends: list[Any] = []

                def at_the_end(consumer: Any = consumer, ends: list[Any] = ends) -> bool:
                    ends.extend(item for item in consumer.consume(100, 0.5) if item.error() is not None)
                    return bool(ends)

                until(at_the_end)
                assert ends[0].error().code() == KafkaError._PARTITION_EOF
                for call in (consumer.commit, consumer.store_offsets):
                    with pytest.raises(KafkaException, match="for message with error") as refused:
                        call(message=ends[0])
                    refusals.append(refused.value.args[0].code())
                where = TopicPartition(ends[0].topic(), ends[0].partition())
                committed = consumer.committed([where], 60)[0].offset
                assert committed <= 0, "where it begins, or nothing"
        assert refusals == [KafkaError._INVALID_ARG] * 4


def _known(consumer: rollbridge.Consumer) -> int:
    """Number of partitions of which it is known where reading goes on."""
    return sum(item.offset != OFFSET_INVALID for item in consumer.position(consumer.assignment()))


def test_patterns_match_topics_that_are_made_later(place: Place) -> None:
    stem = place.unique_name("pattern")
    first = place.topic(stem)
    place.write(first, "first")
    with place.consumer(place.unique_name("group"), f"^{stem}.*", topic_metadata_refresh_interval_ms=500) as consumer:
        assert {message.topic() for message in take(consumer, len(KEYS))} == {first}
        second = place.topic(stem)
        place.write(second, "second")
        assert {message.topic() for message in take(consumer, len(KEYS))} == {second}


def test_names_that_are_no_topics_are_refused(place: Place, orders: str) -> None:
    with place.consumer(place.unique_name("group")) as consumer:
        with consumer_raises(InvalidNameError, match="no stream name"):
            consumer.subscribe(["no stream name"])
        segment = f"{orders.replace('/', '.')}.segment-0.epoch-0"
        with consumer_raises(InvalidNameError, match="subscribe to the stream"):
            consumer.subscribe([segment])


def test_streams_adopted_topics_and_plain_ones_are_read_together(
    place: Place, client: rollbridge.Bridge, topic: str, orders: str
) -> None:
    plain, group = place.topic("plain"), place.unique_name("group")
    place.write(plain, "plain")
    with client.transaction(orders) as transaction:
        for key in KEYS:
            transaction.write(orders, key, b"stream-" + key)
    with place.consumer(group, orders, topic, plain) as consumer:
        found = take(consumer, 3 * len(KEYS))
        assert {message.topic() for message in found} == {orders, topic, plain}
        consumer.commit(asynchronous=False)
        client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 1.0)])
        with client.transaction(orders) as transaction:
            transaction.write(orders, KEYS[0], b"later-")
        place.write(plain, "later")
        place.write(topic, "later")
        assert words(take(consumer, 2 * len(KEYS) + 1)) == {b"later"}


# Adopted and released under a consumer


@pytest.mark.parametrize("is_scaled", [False, True], ids=["as it was", "after a scale"])
def test_reading_goes_on_when_a_topic_is_adopted_and_given_back(
    place: Place, client: rollbridge.Bridge, is_scaled: bool
) -> None:
    topic = place.topic()
    place.write(topic, "plain")
    with place.consumer(place.unique_name("group"), topic, auto_commit_interval_ms=100) as consumer:
        take(consumer, len(KEYS))
        adopt(client, topic)
        with client.transaction(topic) as transaction:
            for key in KEYS:
                transaction.write(topic, key, b"adopted-" + key)
        assert words(take(consumer, len(KEYS))) == {b"adopted"}
        if is_scaled:
            client.admin.scale(topic, seal=[0], ranges=[(0.0, 0.25)], leave_topic=True)
            with client.writer(topic) as writer:
                for key in KEYS:
                    writer.write(key, b"scaled-" + key)
            assert words(take(consumer, len(KEYS))) == {b"scaled"}
            client.admin.delete_stream(str(client.admin.name_of(topic)))
        else:
            client.admin.release_topic(topic)
        place.write(topic, "plain")
        found = take(consumer, len(KEYS))
        assert words(found) == {b"plain"}
        assert {message.topic() for message in found} == {topic}
        adopt(client, topic)
        with client.transaction(topic) as transaction:
            for key in KEYS:
                transaction.write(topic, key, b"again-" + key)
        assert words(take(consumer, len(KEYS))) == {b"again"}
        nothing_comes(consumer)


# Transactions


def test_a_transaction_commits_offsets_of_adopted_and_plain_topics(
    place: Place, client: rollbridge.Bridge, topic: str
) -> None:
    plain, output, group = place.topic("plain"), place.topic("output"), place.unique_name("group")
    place.write(plain, "plain")
    adopt(client, output, partitioner="murmur2")
    client.admin.scale(topic, seal=[0], ranges=[(0.0, 0.25)], leave_topic=True)
    with client.writer(topic) as writer:
        for key in KEYS:
            writer.write(key, b"scaled-" + key)
    wanted, seen = 3 * len(KEYS), 0
    with place.consumer(group, topic, plain, enable_auto_commit=False) as consumer:

        def copy() -> bool:
            nonlocal seen
            found = consumer.consume(100, 0.5)
            if found:
                txn = client.begin(output)
                for message in found:
                    txn.write(output, message.key(), message.value())
                ends = {(item.topic() or "", item.partition() or 0): (item.offset() or 0) + 1 for item in found}
                offsets = [TopicPartition(*at, end) for at, end in ends.items()]
                offsets.append(TopicPartition(plain, 0))  # as `position` says before the first record
                txn.send_offsets(offsets, consumer.consumer_group_metadata())
                txn.commit(timeout=60)
            seen += len(found)
            return seen >= wanted

        until(copy)
    assert seen == wanted
    with place.native_consumer(place.unique_name("group"), output) as native:
        take(native, wanted)
        nothing_comes(native)
    with place.native_consumer(group, plain) as native:
        nothing_comes(native)
    with place.consumer(group, topic) as consumer:
        nothing_comes(consumer)
