"""librdkafka's transactional producer at a gateway: what it commits, aborts and loses, and a gateway that dies."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import rollbridge
from integration_tests.adapter_tools import stored_offsets
from integration_tests.clients import Site, adopt, read_committed
from integration_tests.gateway_clients import keys_in_order, producer_of, topic_of, values
from integration_tests.gateways import GatewayProcess, Servers, client_of
from integration_tests.patience import eventually
from rollbridge.metadata.gateways import GATEWAYS_FROM
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api
from rollbridge_gateway.server.cluster import Gateway, chosen


@pytest.fixture
def topic(site: Site, topic_prefix: str) -> str:
    """A topic of three partitions at the brokers."""
    return make_topic(site, f"{topic_prefix}.in.all", 3)


def make_topic(site: Site, name: str, partitions: int) -> str:
    """Make a topic, and return its name."""
    admin = AdminClient({"bootstrap.servers": site.cluster.bootstrap_servers})
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(60)
    return name


def has_committed(consumer: Consumer, places: list[TopicPartition], offsets: int) -> bool:
    """Whether the committed offsets of a consumer's group come to this sum."""
    return sum(max(item.offset, 0) for item in consumer.committed(places, 60)) == offsets


def test_what_is_committed_is_there_once_and_nothing_else(site: Site, gateway: GatewayProcess, orders: str) -> None:
    producer = producer_of(gateway, f"lib {orders}")
    producer.init_transactions(60)
    for number, ends in enumerate(
        (producer.commit_transaction, producer.abort_transaction, producer.commit_transaction)
    ):
        producer.begin_transaction()
        for i in range(1_000):
            producer.produce(topic_of(orders), key=f"key-{i % 10}", value=f"{number}-{i}", headers=[("source", b"lib")])
        assert producer.flush(60) == 0
        assert not any((item.value() or b"").startswith(f"{number}-".encode()) for item in site.committed(orders))
        ends(60)
    found = site.committed(orders)
    assert values(found) == Counter(f"{number}-{i}".encode() for number in (0, 2) for i in range(1_000))
    for prefix in (b"0-", b"2-"):
        assert keys_in_order([item for item in found if (item.value() or b"").startswith(prefix)])
    assert all(("source", b"lib") in (item.headers() or ()) for item in found)


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_on_an_adopted_topic_the_producers_partition_holds(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str, codec: str
) -> None:
    adopt(client, topic)
    producer = producer_of(gateway, f"lib-{topic}", **{"compression.codec": codec})
    producer.init_transactions(60)
    producer.begin_transaction()
    for i in range(600):
        producer.produce(topic, key=f"key-{i}", value=f"value-{i}" + "x" * 50, partition=i % 3, timestamp=1_000_000 + i)
    assert producer.flush(60) == 0
    assert read_committed(site.cluster.bootstrap_servers, [topic], partitions=3) == []
    producer.commit_transaction(60)
    found = read_committed(site.cluster.bootstrap_servers, [topic], partitions=3)
    assert len(found) == 600
    for message in found:
        number = int((message.key() or b"").decode().removeprefix("key-"))
        assert message.partition() == number % 3
        assert message.value() == f"value-{number}".encode() + b"x" * 50
        assert message.timestamp()[1] == 1_000_000 + number


def test_requests_of_all_sizes_are_taken_whole(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str
) -> None:
    """A gateway that took one for no request would close the connection, and the library would send it again."""
    adopt(client, topic)
    producer = producer_of(gateway, f"large-{topic}", **{"linger.ms": 20})
    producer.init_transactions(60)
    producer.begin_transaction()
    wanted = [
        bytes([number]) * size for number, size in enumerate((1, 10_000, 16_384, 20_000, 70_000, 300_000, 900_000))
    ]
    for value in wanted:
        producer.produce(topic, value, partition=0)
        assert producer.flush(60) == 0
    for value in wanted:
        producer.produce(topic, value, partition=1)
    producer.commit_transaction(60)
    found = read_committed(site.cluster.bootstrap_servers, [topic], partitions=3)
    assert [message.value() for message in found] == [*wanted, *wanted]
    assert "what is no request" not in gateway.log.read_text(errors="replace")


def test_the_newer_producer_of_an_id_fences_the_older(site: Site, gateway: GatewayProcess, ledger: str) -> None:
    old = producer_of(gateway, f"id-{ledger}")
    old.init_transactions(60)
    old.begin_transaction()
    old.produce(topic_of(ledger), key="a", value="old-1")
    assert old.flush(60) == 0
    fresh = producer_of(gateway, f"id-{ledger}")
    fresh.init_transactions(60)
    with pytest.raises(KafkaException) as refused:
        old.commit_transaction(60)
    assert refused.value.args[0].code() == KafkaError._FENCED
    fresh.begin_transaction()
    fresh.produce(topic_of(ledger), key="a", value="new-1")
    fresh.commit_transaction(60)
    assert values(site.committed(ledger)) == {b"new-1": 1}


def test_consume_transform_produce(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str, ledger: str
) -> None:
    """Consumer and producer have the gateway's address alone; offsets move with the commit."""
    source = Producer({"bootstrap.servers": gateway.address})
    for i in range(300):
        source.produce(topic, key=f"key-{i % 7}", value=f"v-{i}", partition=i % 3)
    assert source.flush(60) == 0
    consumer = Consumer(
        {
            "bootstrap.servers": gateway.address,
            "group.id": f"group-{topic}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    producer = producer_of(gateway, f"copy-{topic}")
    producer.init_transactions(60)
    try:
        consumer.subscribe([topic])
        places = [TopicPartition(topic, number) for number in range(3)]
        copied = 0
        for commit in (False, True):
            seen: list[Message] = []
            while len(seen) < 300:
                message = consumer.poll(60)
                assert message is not None
                assert message.error() is None
                seen.append(message)
            producer.begin_transaction()
            for message in seen:
                producer.produce(topic_of(ledger), key=message.key(), value=message.value())
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 60
            )
            if commit:
                producer.commit_transaction(60)
                copied = 300
            else:
                producer.abort_transaction(60)
                for place in places:
                    consumer.seek(TopicPartition(place.topic, place.partition, 0))
            eventually(partial(has_committed, consumer, places, copied), "offsets move with the commit alone")
    finally:
        consumer.close()
    assert values(site.committed(ledger)) == Counter(f"v-{i}".encode() for i in range(300))


def test_offsets_have_the_metadata_and_leader_epochs_that_kafka_would_have_stored(
    site: Site, tmp_path: Path, topic: str, ledger: str, unique_name: Callable[[str], str]
) -> None:
    """Beside a producer straight at the broker, and with a gateway that is killed before the commit."""
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    places = [
        TopicPartition(topic, 0, 10, metadata="größe 💡", leader_epoch=7),
        TopicPartition(topic, 1, 11, metadata="", leader_epoch=0),
        TopicPartition(topic, 2, 12),
    ]
    stored = []
    with GatewayProcess(servers, unique_name("details"), tmp_path) as gateway:
        for address in (site.cluster.bootstrap_servers, gateway.address):
            group = unique_name("group")
            consumer = Consumer({"bootstrap.servers": address, "group.id": group})
            producer = Producer({"bootstrap.servers": address, "transactional.id": unique_name("id")})
            producer.init_transactions(60)
            producer.begin_transaction()
            if address == gateway.address:
                producer.produce(topic_of(ledger), key="a", value="b")
                assert producer.flush(60) == 0
            producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), 60)
            if address == gateway.address:
                gateway.revive()
            producer.commit_transaction(60)
            stored.append(stored_offsets(site.cluster.bootstrap_servers, group, topic, 3))
            producer.begin_transaction()
            with pytest.raises(KafkaException) as refused:
                producer.send_offsets_to_transaction(
                    [TopicPartition(topic, 0, 20, metadata="x" * 4_096), *places[1:]],
                    consumer.consumer_group_metadata(),
                    60,
                )
            error = refused.value.args[0]
            assert (error.code(), error.txn_requires_abort()) == (KafkaError.OFFSET_METADATA_TOO_LARGE, True)
            producer.abort_transaction(60)
            assert stored_offsets(site.cluster.bootstrap_servers, group, topic, 3) == stored[-1]
            consumer.close()
    assert stored[0] == stored[1]
    assert stored[1][0] == (10, 7, "größe 💡\0")


def test_a_topic_without_a_stream_is_refused_at_once(gateway: GatewayProcess, topic: str) -> None:
    refuses(gateway, topic)


def test_a_topic_is_refused_where_there_is_no_stream_yet(
    site: Site, topic: str, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    with Site(site.cluster, f"/{unique_name('empty')}", tmp_path) as empty:
        servers = Servers(empty.cluster.bootstrap_servers, empty.cluster.zookeeper, empty.root)
        with GatewayProcess(servers, "first", tmp_path) as gateway:
            refuses(gateway, topic)


def refuses(gateway: GatewayProcess, topic: str) -> None:
    """Expect that a transaction's record is refused, and that the producer can go on."""
    faults: list[KafkaError] = []
    producer = producer_of(gateway, f"stray-{topic}")
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, value="x", on_delivery=lambda error, _: faults.append(error) if error else None)
    producer.flush(60)
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(60)
    assert raised.value.args[0].code() == KafkaError.TOPIC_EXCEPTION
    producer.abort_transaction(60)
    assert faults


def test_admins_see_the_cluster_through_it(site: Site, gateway: GatewayProcess, topic: str, orders: str) -> None:
    admin = AdminClient({"bootstrap.servers": gateway.address})
    eventually(lambda: topic_of(orders) in admin.list_topics(timeout=60).topics, "a fresh stream is listed")
    found = admin.list_topics(timeout=60)
    assert len(found.topics[topic].partitions) == 3
    assert len(found.topics[topic_of(orders)].partitions) == 8
    ports = {broker.port: broker.id >= GATEWAYS_FROM for broker in found.brokers.values()}
    assert ports == {gateway.port: True, gateway.port + 1: False}
    direct = AdminClient({"bootstrap.servers": site.cluster.bootstrap_servers}).list_topics(timeout=60)
    assert {node for node in found.brokers if node < GATEWAYS_FROM} == set(direct.brokers)
    assert found.cluster_id == direct.cluster_id
    assert topic_of(orders) not in direct.topics
    fresh = f"{topic}.fresh"
    admin.create_topics([NewTopic(fresh, 2, 1)])[fresh].result(60)
    eventually(lambda: fresh in admin.list_topics(timeout=60).topics, "a topic made through the gateway is there")


def produce(producer: Producer, topic: str, key: str, value: str, faults: list[KafkaError]) -> None:
    """Send a record, and note the error if it is not acknowledged."""
    producer.produce(topic, key=key, value=value, on_delivery=lambda error, _: faults.append(error) if error else None)


def test_a_gateway_that_is_killed_costs_no_record(
    site: Site, tmp_path: Path, orders: str, unique_name: Callable[[str], str]
) -> None:
    """Killed three times under load, and started again at the same address."""
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    with GatewayProcess(servers, unique_name("killed"), tmp_path) as gateway:
        faults: list[KafkaError] = []
        producer = producer_of(gateway, unique_name("id"), **{"message.timeout.ms": 300_000})
        producer.init_transactions(60)
        producer.begin_transaction()
        for batch in range(40):
            for i in range(batch * 500, batch * 500 + 500):
                produce(producer, topic_of(orders), f"key-{i % 10}", f"v-{i}", faults)
            producer.poll(0.05)
            if batch in (10, 20, 30):
                gateway.revive()
        assert producer.flush(300) == 0
        assert faults == []
        producer.commit_transaction(120)
    found = site.committed(orders)
    assert values(found) == Counter(f"v-{i}".encode() for i in range(20_000))
    assert keys_in_order(found)


@pytest.mark.long
def test_a_gateway_that_is_killed_in_a_later_transaction_of_a_producer_finds_that_one(
    site: Site, tmp_path: Path, orders: str, unique_name: Callable[[str], str]
) -> None:
    """With transactions v1 all of them have the producer's one pair: the newest counts, not one that has ended."""
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    with GatewayProcess(servers, unique_name("killed"), tmp_path) as gateway:
        faults: list[KafkaError] = []
        producer = producer_of(gateway, unique_name("id"), **{"message.timeout.ms": 300_000})
        producer.init_transactions(60)
        for number in range(6):
            producer.begin_transaction()
            for half in range(2):
                for i in range(50):
                    produce(producer, topic_of(orders), f"key-{i % 10}", f"v-{number}-{half}-{i}", faults)
                assert producer.flush(300) == 0
                if half == 0 and number in (2, 4):
                    gateway.revive()
            assert faults == []
            if number % 3 == 1:
                producer.abort_transaction(120)
            else:
                producer.commit_transaction(120)
    expected = (f"v-{number}-{half}-{i}" for number in (0, 2, 3, 5) for half in range(2) for i in range(50))
    assert values(site.committed(orders)) == Counter(value.encode() for value in expected)


@pytest.mark.long
def test_a_producer_that_writes_to_several_groups_is_found_where_it_wrote_last(
    site: Site, client: rollbridge.Bridge, tmp_path: Path, orders: str, scope: str, unique_name: Callable[[str], str]
) -> None:
    """With transactions v1 each group knows one of the producer's pair: who takes over asks all of them."""
    other = f"{scope}/other"
    client.admin.create_stream(other, group="others")
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    with GatewayProcess(servers, unique_name("killed"), tmp_path) as gateway:
        faults: list[KafkaError] = []
        producer = producer_of(gateway, unique_name("id"), **{"message.timeout.ms": 300_000})
        producer.init_transactions(60)
        for number, stream in enumerate((orders, other, orders, other)):
            producer.begin_transaction()
            for half in range(2):
                for i in range(20):
                    produce(producer, topic_of(stream), f"key-{i % 10}", f"v-{number}-{half}-{i}", faults)
                assert producer.flush(300) == 0
                if number:
                    gateway.revive()  # what is asked for next is a record, and then the commit
            assert faults == []
            producer.commit_transaction(120)
    for stream, numbers in ((orders, (0, 2)), (other, (1, 3))):
        expected = (f"v-{number}-{half}-{i}" for number in numbers for half in range(2) for i in range(20))
        assert values(site.committed(stream)) == Counter(value.encode() for value in expected)


@pytest.fixture
def strangers(client: rollbridge.Bridge, gateway: GatewayProcess, scope: str) -> str:
    """A stream of another transaction group than the ledger's, which the gateway knows."""
    name = f"{scope}/elsewhere"
    client.admin.create_stream(name, group="strangers")
    admin = AdminClient({"bootstrap.servers": gateway.address})
    eventually(lambda: topic_of(name) in admin.list_topics(timeout=60).topics, "the gateway knows it")
    return name


def begun(gateway: GatewayProcess, transactional_id: str, client_id: str) -> Producer:
    """A producer with a transaction open."""
    producer = producer_of(gateway, transactional_id, **{"client.id": client_id})
    producer.init_transactions(60)
    producer.begin_transaction()
    return producer


def write_elsewhere(gateway: GatewayProcess, stream: str, name: str) -> None:
    """Write a record with a client id that others have as well, as clients of one library do."""
    producer = begun(gateway, f"stranger-{name}", name)
    producer.produce(topic_of(stream), b"elsewhere")
    producer.commit_transaction(60)


@pytest.fixture
def offsets(topic: str, gateway: GatewayProcess) -> Iterator[Callable[[Producer], None]]:
    """Sends an offset of a group of consumers to a transaction."""
    consumer = Consumer({"bootstrap.servers": gateway.address, "group.id": topic})
    place = TopicPartition(topic, 0, 7)
    with closing(consumer):
        yield lambda to: to.send_offsets_to_transaction([place], consumer.consumer_group_metadata(), 60)


def test_offsets_do_not_lead_a_transaction_into_the_group_of_a_stranger(
    site: Site,
    gateway: GatewayProcess,
    ledger: str,
    strangers: str,
    offsets: Callable[[Producer], None],
    unique_name: Callable[[str], str],
) -> None:
    """The gateway may be asked to take offsets before it is asked to add the partitions that are written to."""
    shared = unique_name("library")
    for number in range(5):
        write_elsewhere(gateway, strangers, shared)
        producer = begun(gateway, unique_name("copy"), shared)
        producer.produce(topic_of(ledger), f"v-{number}".encode())
        offsets(producer)
        producer.commit_transaction(60)
    assert values(site.committed(ledger)) == Counter(f"v-{number}".encode() for number in range(5))


def test_a_transaction_that_is_led_there_is_begun_where_it_belongs_at_its_second_attempt(
    site: Site,
    gateway: GatewayProcess,
    ledger: str,
    strangers: str,
    offsets: Callable[[Producer], None],
    unique_name: Callable[[str], str],
) -> None:
    shared = unique_name("library")
    producer = begun(gateway, unique_name("copy"), shared)
    write_elsewhere(gateway, strangers, shared)
    offsets(producer)
    producer.produce(topic_of(ledger), b"refused")
    with pytest.raises(KafkaException) as refused:
        producer.commit_transaction(60)
    assert refused.value.args[0].txn_requires_abort()
    producer.abort_transaction(60)
    producer.begin_transaction()
    offsets(producer)
    producer.produce(topic_of(ledger), b"taken")
    producer.commit_transaction(60)
    assert values(site.committed(ledger)) == {b"taken": 1}


@contextmanager
def two_of_which_one_is_killed(
    site: Site, gateway: GatewayProcess, logs: Path, unique_name: Callable[[str], str], later: str = ""
) -> Iterator[tuple[GatewayProcess, GatewayProcess, str]]:
    """A gateway that stays, one that is to be killed, and a client id that belongs to that one.

    If a name is given, it belongs to a gateway of that name once there is one.

    A client that knows the address of the first one alone is connected to it, and hears from it about its coordinator
    before that one knows of the death. librdkafka keeps the address of a coordinator that is the broker that it was.
    """
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    soon = ["--session-timeout=4"]
    with (
        GatewayProcess(servers, unique_name("left"), logs, soon) as left,
        GatewayProcess(servers, unique_name("killed"), logs, soon) as killed,
    ):
        others = [left.name, gateway.name]
        name = client_of([killed.name], others)
        while later and chosen(name, [Gateway(each, "", 0) for each in (later, killed.name, *others)]).name != later:
            name = client_of([killed.name], others)
        yield left, killed, name


@pytest.mark.long
def test_a_producer_whose_coordinator_moves_finds_it(
    site: Site, gateway: GatewayProcess, tmp_path: Path, ledger: str, unique_name: Callable[[str], str]
) -> None:
    with two_of_which_one_is_killed(site, gateway, tmp_path, unique_name) as (left, killed, name):
        producer = producer_of(left, unique_name("moves"), **{"client.id": name})
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic_of(ledger), b"before")
        assert producer.flush(60) == 0
        killed.kill()
        producer.produce(topic_of(ledger), b"after")
        producer.commit_transaction(120)
    assert values(site.committed(ledger)) == {b"before": 1, b"after": 1}


@contextmanager
def member(gateway: GatewayProcess, topic: str, name: str, group: str, servers: str = "") -> Iterator[Consumer]:
    """A consumer that has partitions of a topic, with a client id."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers or gateway.address,
            "client.id": name,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    with closing(consumer):
        consumer.subscribe([topic])
        eventually(lambda: consumer.poll(0.1) is None and len(consumer.assignment()) == 3, "it is a member")
        yield consumer


def assert_it_commits(consumer: Consumer, topic: str) -> None:
    place = TopicPartition(topic, 0, 7)

    def has_committed() -> bool:
        consumer.poll(0)
        try:
            consumer.commit(offsets=[place], asynchronous=False)
        except KafkaException:
            return False
        return True

    eventually(has_committed, "its coordinator has taken an offset")
    assert consumer.committed([place], 60)[0].offset == 7


@pytest.mark.long
def test_a_consumer_whose_coordinator_moves_finds_it(
    site: Site, gateway: GatewayProcess, topic: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    with (
        two_of_which_one_is_killed(site, gateway, tmp_path, unique_name) as (left, killed, name),
        member(left, topic, name, unique_name("group")) as consumer,
    ):
        killed.kill()
        assert_it_commits(consumer, topic)


def test_a_consumer_that_knew_no_other_gateway_finds_its_coordinator(
    site: Site, gateway: GatewayProcess, topic: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    """The gateway that it belongs to says that it ends before it closes connections: who is left knows of it first."""
    with (
        two_of_which_one_is_killed(site, gateway, tmp_path, unique_name) as (left, ending, name),
        member(ending, topic, name, unique_name("group"), f"{ending.address},{left.address}") as consumer,
    ):
        ending.stop()
        assert_it_commits(consumer, topic)


@pytest.mark.long
def test_a_consumer_whose_coordinator_is_where_it_belonged_before_finds_it(
    site: Site, gateway: GatewayProcess, topic: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    """It belongs to a gateway that has joined since; nobody knows that it did not go there when that one joined."""
    later = unique_name("later")
    with two_of_which_one_is_killed(site, gateway, tmp_path, unique_name, later=later) as (left, killed, name):
        servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
        with member(left, topic, name, unique_name("group")) as consumer, GatewayProcess(servers, later, tmp_path):
            admin = AdminClient({"bootstrap.servers": left.address})
            eventually(lambda: gateways_at(admin) == 4, "all gateways know each other")
            killed.kill()
            eventually(lambda: gateways_at(admin) == 3, "it is gone")
            assert_it_commits(consumer, topic)


def leaders_told(connection: socket.socket, client_id: str, *topics: str) -> tuple[set[int], set[int]]:
    """The brokers of an answer to Metadata, gateways left out, and the leaders of these topics."""
    values = {"topics": [{"name": name} for name in topics]}
    connection.sendall(wire.framed(wire.write_request(Api.METADATA, 4, 7, client_id, values)))
    with connection.makefile("rb") as answers:
        answer = wire.read_answer(answers.read(int.from_bytes(answers.read(4), "big")), Api.METADATA, 4)
    leaders = {int(part.leader_id) for topic in answer.topics for part in topic.partitions}
    return {int(item.node_id) for item in answer.brokers if item.node_id < GATEWAYS_FROM}, leaders


@pytest.mark.long
def test_who_asks_for_brokers_alone_is_told_of_them_while_leaders_are_missed(
    site: Site, gateway: GatewayProcess, topic: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    """Admins ask all brokers then, and would take it for the truth that there are none."""
    with (
        two_of_which_one_is_killed(site, gateway, tmp_path, unique_name) as (left, killed, name),
        socket.create_connection(("127.0.0.1", left.port), 60) as connection,
    ):
        brokers, leaders = leaders_told(connection, name, topic)
        assert leaders == brokers == {1}
        killed.kill()
        witness = AdminClient({"bootstrap.servers": left.address})
        eventually(lambda: gateways_at(witness) == 2, "it is gone")
        assert leaders_told(connection, name) == ({1}, set())
        assert leaders_told(connection, name, topic) == (set(), {-1})
        assert leaders_told(connection, name, topic) == ({1}, {1})


def gateways_at(admin: AdminClient) -> int:
    try:
        brokers = admin.list_topics(timeout=10).brokers
    except KafkaException:  # librdkafka has asked one that died just then, and asks no other one for it
        return -1
    return sum(node >= GATEWAYS_FROM for node in brokers)
