"""Consumer group offsets that commit with a transaction: consume, transform and produce, exactly once, whoever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import rollbridge
from integration_tests.adapter_tools import stored_offsets
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, until
from integration_tests.coordinators import Relay
from integration_tests.kafka_tools import create_topic, produce
from rollbridge.errors import InvalidRequestError, TransactionAbortedError, TransactionClosedError


@pytest.fixture
def source(site: Site, unique_name: Callable[[str], str]) -> str:
    """A Kafka topic with 40 records."""
    topic = unique_name("source")
    create_topic(site.cluster.bootstrap_servers, topic)
    produce(site.cluster.bootstrap_servers, topic, [b"%d" % number for number in range(40)])
    return topic


def consumer_of(servers: str, group: str, topic: str) -> Consumer:
    """A member of a group, which has been given the topic's partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "session.timeout.ms": 6000,
        }
    )
    consumer.subscribe([topic])
    return consumer


def take(consumer: Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []

    def enough() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            found.append(message.value() or b"")
        return len(found) >= count

    until(enough)
    return found


@pytest.fixture
def committed(site: Site, source: str) -> Iterator[Callable[[str], int]]:
    """From where a group would go on."""
    looks: list[Consumer] = []

    def look(group: str) -> int:
        consumer = Consumer({"bootstrap.servers": site.cluster.bootstrap_servers, "group.id": group})
        looks.append(consumer)
        [place] = consumer.committed([TopicPartition(source, 0)], timeout=120)
        return place.offset

    yield look
    for consumer in looks:
        consumer.close()


def test_offsets_are_committed_with_the_transaction_and_not_without_it(
    site: Site,
    client: rollbridge.Bridge,
    orders: str,
    source: str,
    committed: Callable[[str], int],
    unique_name: Callable[[str], str],
) -> None:
    group = unique_name("group")
    consumer = consumer_of(site.cluster.bootstrap_servers, group, source)
    assert len(take(consumer, 10)) == 10
    given_up = client.begin(orders)
    given_up.send_offsets(consumer.position(consumer.assignment()), consumer.consumer_group_metadata())
    given_up.abort()
    assert committed(group) < 0
    transaction = client.begin(orders)
    transaction.write(orders, key=b"k", value=b"ten")
    transaction.send_offsets(
        [TopicPartition(source, 0, 4), TopicPartition(source, 1)], consumer.consumer_group_metadata()
    )
    transaction.send_offsets(consumer.position(consumer.assignment()), consumer.consumer_group_metadata())
    assert committed(group) < 0
    transaction.commit()
    until(lambda: committed(group) == 10)
    only_offsets = client.begin(orders)
    only_offsets.send_offsets({(source, 0): 12}, consumer.consumer_group_metadata())
    assert only_offsets.commit().records == 0
    until(lambda: committed(group) == 12)
    consumer.close()
    assert [message.value() for message in site.committed(orders)] == [b"ten"]


def test_offsets_of_an_expired_generation_refuse_their_transaction_and_no_other(
    site: Site,
    client: rollbridge.Bridge,
    orders: str,
    source: str,
    committed: Callable[[str], int],
    unique_name: Callable[[str], str],
) -> None:
    group, healthy = unique_name("group"), unique_name("healthy")
    old = consumer_of(site.cluster.bootstrap_servers, group, source)
    take(old, 5)
    stale = old.consumer_group_metadata()
    old.close()  # the group goes on without it
    site.stop_coordinator()  # so that all of them are in one round
    transactions = []
    for number in range(6):
        transaction = client.begin(orders)
        transaction.write(orders, key=b"k", value=b"%d" % number)
        if number == 2:
            transaction.send_offsets({(source, 0): 5}, stale)
        if number in (1, 4):
            transaction.send_offsets({(source, 0): number}, healthy)
        transactions.append((transaction, transaction.commit_async()))
    site.start_coordinator()
    for number, (transaction, future) in enumerate(transactions):
        if number == 2:
            with pytest.raises(
                TransactionAbortedError, match=rf"offsets of consumer group {group} were refused"
            ) as refused:
                future.result(60)
            assert "UNKNOWN_MEMBER_ID" in refused.value.reason or "ILLEGAL_GENERATION" in refused.value.reason
            with pytest.raises(TransactionClosedError):
                transaction.send_offsets({(source, 0): 6}, healthy)
        else:
            assert future.result(60).records == 1
    assert [message.value() for message in site.committed(orders)] == [b"0", b"1", b"3", b"4", b"5"]
    assert committed(group) < 0
    until(lambda: committed(healthy) == 4)


def test_offsets_of_a_topic_that_does_not_exist_hold_nobody_up(
    client: rollbridge.Bridge, orders: str, scope: str
) -> None:
    transaction = client.begin(orders)
    transaction.send_offsets({(f"{scope}.nothing", 0): 5}, f"{scope}-group")
    with pytest.raises(TransactionAbortedError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        transaction.commit(timeout=120)
    client.begin(orders).commit(timeout=120)


@pytest.mark.parametrize(
    ("offsets", "metadata"),
    [({("t", 0): -1}, "g"), ({("t", -1): 1}, "g"), ({("t", 0): 1}, ""), ({("t", 0): 1}, 17), ({("t", 0): 1}, b"x")],
)
def test_offsets_that_are_none_are_refused(
    client: rollbridge.Bridge, orders: str, offsets: dict[tuple[str, int], int], metadata: object
) -> None:
    with client.transaction(orders) as transaction:
        with pytest.raises(InvalidRequestError, match="nothing was sent"):
            transaction.send_offsets(offsets, metadata)
        transaction.send_offsets({}, "g")


def places_with_details(topic: str, first: int) -> list[TopicPartition]:
    """Every way to give an offset and what belongs to it, each for a partition of its own."""
    given: list[dict[str, Any]] = [
        {},
        {"metadata": ""},
        {"metadata": "note"},
        {"leader_epoch": 0},
        {"metadata": "größe 💡", "leader_epoch": 7},
        {"metadata": "x" * 4_095, "leader_epoch": (1 << 31) - 1},
    ]
    return [TopicPartition(topic, number, first + number, **item) for number, item in enumerate(given)]


def test_offsets_have_the_metadata_and_leader_epochs_that_a_transaction_of_kafkas_own_gives_them(
    site: Site, client: rollbridge.Bridge, orders: str, unique_name: Callable[[str], str]
) -> None:
    servers, source = site.cluster.bootstrap_servers, unique_name("source")
    create_topic(servers, source, 6)
    first, second = places_with_details(source, 100), places_with_details(source, 200)
    native, rolling = unique_name("group"), unique_name("group")
    producer = Producer({"bootstrap.servers": servers, "transactional.id": unique_name("native")})
    producer.init_transactions()
    with closing(Consumer({"bootstrap.servers": servers, "group.id": native})) as consumer:
        for places, end in ((first, producer.abort_transaction), (second, producer.commit_transaction)):
            producer.begin_transaction()
            producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata())
            end(60)
    with closing(Consumer({"bootstrap.servers": servers, "group.id": rolling})) as consumer:
        given_up = client.begin(orders)
        given_up.send_offsets(first, consumer.consumer_group_metadata())
        given_up.abort()
        with client.transaction(orders) as txn:
            txn.send_offsets(first, consumer.consumer_group_metadata())
            txn.write(orders, key=b"key", value=b"value")
            txn.send_offsets(second, consumer.consumer_group_metadata())
    stored = stored_offsets(servers, rolling, source, 6)
    assert stored == stored_offsets(servers, native, source, 6)
    assert stored[0] == (200, -1, "")
    assert stored[4] == (204, 7, "größe 💡\0")


WORKER = """
import sys
from confluent_kafka import Consumer, TopicPartition
import rollbridge
from rollbridge.errors import OutcomeUnknownError, TransactionAbortedError, UnavailableError
servers, zookeeper, root, source, stream, group, name, count = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest",
    "enable.auto.commit": False, "isolation.level": "read_committed", "session.timeout.ms": 6000})
consumer.subscribe([source])
client = rollbridge.connect(servers, zookeeper=zookeeper, zookeeper_root=root, client_name=name)
done = 0
while done < int(count):
    messages = [m for m in consumer.consume(5, 1.0) if m.error() is None]
    if not messages:
        [place] = consumer.committed([TopicPartition(source, 0)])
        if place.offset >= int(count):
            break
        continue
    txn = client.begin(stream)
    for message in messages:
        txn.write(stream, message.value(), b"out-" + message.value())
    txn.send_offsets(consumer.position(consumer.assignment()), consumer.consumer_group_metadata())
    while True:
        try:
            txn.commit(timeout=60)
            break
        except (OutcomeUnknownError, UnavailableError):
            continue
        except TransactionAbortedError:
            sys.exit(3)
    done = consumer.position(consumer.assignment())[0].offset
    print(done, flush=True)
client.close()
consumer.close()
"""


def test_consume_transform_produce_is_exactly_once_whoever_dies(
    cluster: AnyCluster, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    """Workers are killed without warning, and so are coordinators, where offsets are sent and committed."""
    count = 120
    source, group, root = unique_name("source"), unique_name("group"), "/" + unique_name("root")
    stream = unique_name("scope") + "/results"
    create_topic(cluster.bootstrap_servers, source)
    produce(cluster.bootstrap_servers, source, [b"%d" % number for number in range(count)])
    points = [
        "merge_direct/SendOffsets:after:3",
        "merge_direct/CommitRound:before:4",
        "merge_direct/CommitRound:after:3",
    ]
    with (
        Relay(cluster, root, tmp_path, points) as relay,
        rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper, zookeeper_root=root) as client,
    ):
        client.admin.create_stream(stream, segments=2, timeout_s=60)
        kills, starts = 0, 0
        while True:
            starts += 1
            assert starts < 30, "the workers do not come to an end"
            arguments = [cluster.bootstrap_servers, cluster.zookeeper, root, source, stream, group]
            with subprocess.Popen(
                [sys.executable, "-c", WORKER, *arguments, unique_name("worker"), str(count)],
                stdout=subprocess.PIPE,
                text=True,
            ) as worker:
                assert worker.stdout is not None
                if kills < 3:
                    for _ in range(3):
                        worker.stdout.readline()
                    os.kill(worker.pid, signal.SIGKILL)
                    kills += 1
                worker.communicate(timeout=120)
            if worker.returncode == 0:
                break
        assert relay.deaths == len(points)
        site = Site(cluster, root, tmp_path)
        values = sorted(int((message.value() or b"")[4:]) for message in site.committed(stream))
    assert values == list(range(count))
    assert kills == 3
