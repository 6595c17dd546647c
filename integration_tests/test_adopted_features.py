"""What streams of our own can do, on adopted topics: parts, leases, resume, previews, truncation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.clients import Site, read_committed, truncate_all
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec

PARTITIONS = 3
KEYS = [b"key-%d" % number for number in range(12)]


@pytest.fixture
def orders_topic(site: Site, client: rollbridge.Bridge, scope: str, unique_name: Callable[[str], str]) -> str:
    """An adopted topic in the scope of the test's streams, with a native record of each key."""
    return adopt(site, client, scope, unique_name("orders"))


def adopt(site: Site, client: rollbridge.Bridge, scope: str, topic: str) -> str:
    KafkaClient(site.cluster.bootstrap_servers).topics.create_topics([TopicSpec(name=topic, partitions=PARTITIONS)])
    native(site, topic, b"native")
    client.admin.adopt_topic(topic, stream=f"{scope}/{topic}")
    return topic


def native(site: Site, topic: str, value: bytes) -> None:
    """Write a record of each key as a Java producer would."""
    producer = Producer({"bootstrap.servers": site.cluster.bootstrap_servers, "partitioner": "murmur2_random"})
    for key in KEYS:
        producer.produce(topic, value, key)
    assert producer.flush(30) == 0


def records_of(client: rollbridge.Bridge, stream: str) -> list[bytes | None]:
    with client.reader(stream, follow=False) as reader:
        return [record.value for record in reader]


def values(site: Site, topic: str, partitions: int = PARTITIONS) -> list[bytes | None]:
    return [item.value() for item in read_committed(site.cluster.bootstrap_servers, [topic], partitions=partitions)]


def test_one_transaction_spans_adopted_topics_and_streams_of_a_group(
    site: Site, client: rollbridge.Bridge, scope: str, orders_topic: str, orders: str, unique_name: Callable[[str], str]
) -> None:
    payments = adopt(site, client, scope, unique_name("payments"))
    with client.transaction(orders_topic, payments, orders) as transaction:
        transaction.write(orders_topic, KEYS[0], b"order")
        transaction.write(payments, KEYS[1], b"payment")
        transaction.write(orders, KEYS[2], b"audit")
    assert values(site, orders_topic).count(b"order") == 1
    assert values(site, payments).count(b"payment") == 1
    assert records_of(client, orders) == [b"audit"]
    with client.transactions(scope, follow=False) as transactions:
        [found] = transactions
        assert {(record.stream, record.value) for record in found.records()} == {
            (f"{scope}/{orders_topic}", b"order"),
            (f"{scope}/{payments}", b"payment"),
            (orders, b"audit"),
        }


def test_parts_of_other_processes_and_a_resumed_transaction(
    site: Site, client: rollbridge.Bridge, orders_topic: str
) -> None:
    transaction = client.begin(orders_topic, label="resumed")
    transaction.write(orders_topic, KEYS[0], b"first")
    transaction.flush()
    with site.connect("helper") as helper:
        part = helper.join(transaction.id, 60)
        part.write(orders_topic, KEYS[1], b"second")
        handle = part.finish()
    transaction.commit(parts=[handle])
    assert sorted(filter(None, values(site, orders_topic)))[:2] == [b"first", b"native"]
    assert values(site, orders_topic).count(b"second") == 1
    assert client.outcome(transaction.id).state == "committed"
    site_client = site.connect("resumer")
    left = site_client.begin(orders_topic, label="left")
    left.write(orders_topic, KEYS[2], b"left")
    left.flush()
    site_client.close()
    with site.connect("resumer") as again:
        [unfinished] = again.unfinished()
        resumed = again.resume(unfinished.transaction)
        resumed.write(orders_topic, KEYS[3], b"and gone on")
        resumed.commit()
    assert {b"left", b"and gone on"} <= set(values(site, orders_topic))


def test_previews_show_what_is_open_and_readers_begin_where_they_left(
    client: rollbridge.Bridge, orders_topic: str
) -> None:
    with client.reader(orders_topic, follow=False) as reader:
        assert [record.value for record in reader] == [b"native"] * len(KEYS)
        position = reader.position
    transaction = client.begin(orders_topic)
    transaction.write(orders_topic, KEYS[0], b"open")
    transaction.flush()
    with client.reader(orders_topic, start=position, isolation="read_uncommitted", follow=False) as reader:
        assert [(record.value, record.committed) for record in reader] == [(b"open", False)]
    transaction.commit()
    with client.reader(orders_topic, start=str(position), follow=False) as reader:
        assert [record.value for record in reader] == [b"open"]


def test_a_truncation_is_asked_for_by_the_topics_name(site: Site, client: rollbridge.Bridge, orders_topic: str) -> None:
    truncate_all(client, orders_topic)
    with client.transaction(orders_topic) as transaction:
        transaction.write(orders_topic, KEYS[0], b"after")
    assert records_of(client, orders_topic) == [b"after"]
    starts = KafkaClient(site.cluster.bootstrap_servers).offsets.first(
        [(orders_topic, number) for number in range(PARTITIONS)]
    )
    assert any(starts.values())
