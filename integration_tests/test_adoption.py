"""Streams over topics that exist: adopted, used beside native clients, changed under us, and released."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.adopted_topics import KEYS, PARTITIONS, create_anew, found, kafka, messages, native, site, topic
from integration_tests.clients import Site, adopt, consumer_of, consumer_raises
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import eventually
from rollbridge.errors import ConflictError, NotFoundError, StreamNotFoundError, StreamRecreatedError
from rollbridge.kafka.client import KafkaClient
from rollbridge.metadata import paths
from rollbridge.metadata.changes import TOPIC_RECREATED
from rollbridge.metadata.requests import AdminAnswer
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import StreamName

__all__ = ["kafka", "site", "topic"]


def test_a_topic_of_which_the_leader_has_not_heard_yet_is_adopted(
    site: Site, client: rollbridge.Bridge, unique_name: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, ask = unique_name("shop.new"), client.admin._ask
    refused: list[NotFoundError] = []

    def spied(*arguments: Any, **more: Any) -> AdminAnswer:
        try:
            return ask(*arguments, **more)
        except NotFoundError as fault:
            refused.append(fault)
            if len(refused) == 1:
                create_topic(site.cluster.bootstrap_servers, name, 2)
            raise

    monkeypatch.setattr(client.admin, "_ask", spied)
    assert adopt(client, name, partitioner="murmur2", check=False).config.partitions == 2
    assert f"topic {name} does not exist" in str(refused[0])


def _adopt_at_once(site: Site, name: str, gate: threading.Barrier, stream: str) -> ConflictError | None:
    with site.connect(stream.partition("/")[0]) as b:
        gate.wait(60)
        try:
            b.admin.adopt_topic(name, stream=stream, group="g", partitioner="murmur2")
        except ConflictError as fault:
            return fault
        return None


def _is_gone(kafka: AdminClient, topic: str) -> bool:
    return topic not in kafka.list_topics(timeout=60).topics


def test_of_two_groups_that_adopt_one_topic_at_once_one_is_refused_at_once_and_leaves_nothing(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, unique_name: Callable[[str], str]
) -> None:
    scopes = [unique_name("race-a"), unique_name("race-b")]
    for scope in scopes:
        client.admin.create_stream(f"{scope}/led", group="g")
    for turn in range(3):
        name = unique_name(f"contested-{turn}")
        create_topic(site.cluster.bootstrap_servers, name, 2)
        streams = [f"{scope}/t{turn}" for scope in scopes]
        with ThreadPoolExecutor(2) as pool:
            done = list(pool.map(partial(_adopt_at_once, site, name, threading.Barrier(2)), streams))
        [(place, refusal)] = [(place, fault) for place, fault in enumerate(done) if fault is not None]
        assert (refusal.code, f"adopted by stream {streams[1 - place]}" in str(refusal)) == ("conflict", True)
        loser = StreamName.parse(streams[place])
        buffer = loser.internal_buffer_topic(0)
        eventually(partial(_is_gone, kafka, buffer), "its buffer is deleted")
        assert loser not in [item.name for item in client.admin.list_streams()]


def test_a_consumer_by_a_pattern_gets_the_adopted_topic_and_no_frames(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    config = adopt(client, topic, partitioner="murmur2", check=False).config
    open_one = client.begin(topic)
    open_one.write(topic, KEYS[0], b"open")
    open_one.flush()
    with client.transaction(topic) as txn:
        txn.write(topic, KEYS[0], b"committed")
    assert any(KafkaClient(site.cluster.bootstrap_servers).offsets.end([config.buffer_topic]).values())
    consumer = Consumer(
        {
            "bootstrap.servers": site.cluster.bootstrap_servers,
            "group.id": topic,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    consumer.subscribe([f"^.*{topic}.*"])
    values: list[bytes | None] = []
    ended: set[int | None] = set()
    while len(ended) < PARTITIONS:
        message = consumer.poll(60)
        assert message is not None
        if message.error():
            ended.add(message.partition())
        else:
            values.append(message.value())
    assert {place.topic for place in consumer.assignment()} == {topic}
    assert values == [b"committed"]
    consumer.close()
    open_one.abort()


@pytest.mark.parametrize("by", ["librdkafka", "rollbridge"])
def test_a_consumer_that_stores_offsets_itself_commits_what_it_was_handed_and_no_more(
    site: Site, client: rollbridge.Bridge, topic: str, by: str
) -> None:
    # librdkafka's automatic storing goes past control records and what lies before them; rollbridge.Consumer's not.
    adopt(client, topic, partitioner="murmur2")
    for number in range(20):
        with client.transaction(topic) as txn:
            txn.write(topic, key=KEYS[0], value=b"%d" % number)
    [place] = {message.partition() for message in messages(site, topic)}
    native = {"bootstrap.servers": site.cluster.bootstrap_servers, "group.id": topic, "auto.offset.reset": "earliest"}
    for number in range(3):
        consumer: Any = (
            Consumer({**native, "enable.auto.offset.store": False})
            if by == "librdkafka"
            else rollbridge.Consumer({**native, "zookeeper": site.cluster.zookeeper, "zookeeper.root": site.root})
        )
        consumer.subscribe([topic])
        message = consumer.poll(60)
        assert message.value() == b"%d" % number
        if by == "librdkafka":
            consumer.store_offsets(message)
        consumer.close()
        [committed] = Consumer(native).committed([TopicPartition(topic, place or 0)], 60)
        assert committed.offset == message.offset() + 1


def test_a_topic_is_adopted_used_beside_native_producers_and_released(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    before = [b"before-%d" % number for number in range(200)]
    native(site, topic, before)
    admin = KafkaClient(site.cluster.bootstrap_servers).topics
    was = admin.describe([topic])[topic]
    adoption = adopt(client, topic)
    assert adoption.config.partitioner == "murmur2"
    assert adoption.fit is not None
    assert adoption.fit.keys == len(KEYS)
    assert adoption.config.partitions == PARTITIONS
    with client.transaction(topic) as transaction:
        for key in KEYS:
            transaction.write(topic, key, b"ours-" + key)
        native(site, topic, [b"beside-%d" % number for number in range(40)])
        assert not [value for value in found(site, topic) if value and value.startswith(b"ours-")]
    with client.writer(topic) as writer:
        writer.write(KEYS[0], b"plain").result()
    cas = client.cas_writer(topic)
    cas.write(KEYS[1], b"conditional", expected=cas.tail(KEYS[1]))
    values = found(site, topic)
    expected = {*before, *(b"ours-" + key for key in KEYS), *(b"beside-%d" % number for number in range(40))}
    assert sorted(filter(None, values)) == sorted([*expected, b"plain", b"conditional"])
    # Each key is in one partition, whoever has written it.
    places: dict[bytes, set[int]] = {}
    for message in messages(site, topic):
        places.setdefault(message.key() or b"", set()).add(message.partition() or 0)
    assert {len(item) for item in places.values()} == {1}
    reader = client.reader(topic, follow=False)
    assert sorted(record.value or b"" for record in reader) == sorted(filter(None, values))
    client.admin.release_topic(topic)
    assert admin.describe([topic])[topic] == was
    assert found(site, topic) == values
    with pytest.raises(StreamNotFoundError):
        client.begin(topic)
    with ZooKeeperSession(site.cluster.zookeeper, root=site.root) as session:
        assert session.get(paths.adopted(topic)) is None
    again = adopt(client, topic)
    with client.transaction(topic) as transaction:
        transaction.write(topic, KEYS[0], b"second life")
    assert again.config.first_epoch > adoption.config.first_epoch
    assert b"second life" in found(site, topic)


def test_a_topic_is_not_released_while_a_transaction_is_open_that_was_begun_just_before(
    client: rollbridge.Bridge, topic: str
) -> None:
    adopt(client, topic)
    for _ in range(30):
        txn = client.begin(topic)
        txn.write(topic, KEYS[0], b"1")
        txn.flush()
        with raises_code("stream-busy"):
            client.admin.release_topic(topic)
        txn.abort()
    client.admin.release_topic(topic)


def test_new_readers_see_what_the_owner_has_done_before_any_leader_does(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, topic: str
) -> None:
    native(site, topic, [b"before"])
    stream = str(adopt(client, topic, partitioner="murmur2").config.name)
    expected = StreamRecreatedError
    site.stop_coordinator()
    try:
        create_anew(site, kafka, topic)
        assert client.admin.describe(topic).fault is None, "nobody has looked"
        for name in (topic, stream):
            with site.connect("later") as later, pytest.raises(expected, match="release the topic and adopt it again"):
                later.reader(name)
            with consumer_raises(expected), consumer_of(site.cluster, site.root, f"later-{topic}", name) as consumer:
                consumer.poll(1.0)
    finally:
        site.start_coordinator()


def poll_on(consumer: rollbridge.Consumer) -> None:
    """Poll until an error is raised, which comes soon after the leader has noticed."""
    while True:
        consumer.poll(1.0)


@pytest.mark.parametrize("name", ["topic", "stream"])
def test_readers_say_what_the_owner_of_an_adopted_topic_has_done(
    site: Site, client: rollbridge.Bridge, kafka: AdminClient, topic: str, name: str
) -> None:
    native(site, topic, [b"before-%d" % number for number in range(80)])
    stream = str(adopt(client, topic).config.name)
    read = topic if name == "topic" else stream
    with client.transaction(topic) as transaction:
        for key in KEYS:
            transaction.write(topic, key, b"ours-" + key)
    group = f"group-{topic}"
    with (
        client.reader(read) as reader,
        consumer_of(site.cluster, site.root, group, read) as consumer,
        client.transactions(stream.split("/")[0]) as log,
    ):
        taken: list[bytes | None] = []
        while len(taken) < 120:
            taken += [record.value for record in reader.consume(1000, 1.0)]
        got: list[bytes | None] = []
        while len(got) < 120:
            got += [message.value() for message in consumer.consume(1000, 1.0) if message.error() is None]
        consumer.commit(asynchronous=False)
        ours = next(item for item in log if stream in item.counts())
        assert len(list(ours.records())) == len(KEYS)
        create_anew(site, kafka, topic)
        eventually(
            lambda: (fault := client.admin.describe(stream).fault) and fault.code == TOPIC_RECREATED,
            "the leader has noticed",
        )
        expected = StreamRecreatedError
        for _ in range(2):  # it does not go on after the error either
            with pytest.raises(expected, match="release the topic and adopt it again"):
                for _ in reader:
                    pass
            with consumer_raises(expected, match="release the topic and adopt it again"):
                poll_on(consumer)
        with pytest.raises(StreamRecreatedError):
            list(ours.records())
    with pytest.raises(expected, match="release the topic and adopt it again"):
        client.reader(read)
    with consumer_raises(expected), consumer_of(site.cluster, site.root, group, read) as consumer:
        consumer.poll(1.0)
    with client.transactions(stream.split("/")[0]) as log:
        ours = next(item for item in log if stream in item.counts())
        with pytest.raises(StreamRecreatedError):
            list(ours.records())
    client.admin.release_topic(topic)
    adopt(client, topic, partitioner="murmur2")
    assert sum(1 for _ in client.reader(read, follow=False)) == 400
