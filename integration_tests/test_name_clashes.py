"""A name that could mean a topic of the brokers and a stream: both orders, at coordinators, gateways and the doctor."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient

import rollbridge
from integration_tests.clients import Site, adopt, read_committed
from integration_tests.command_line import Cli
from integration_tests.gateways import GatewayProcess
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import eventually
from rollbridge.errors import InvalidNameError

PARTITIONS, VIRTUAL = 3, 8
KEYS = [b"key-%d" % number for number in range(60)]


def write_plainly(bootstrap: str, topic: str) -> dict[bytes, int]:
    """Write a record of each key as a plain producer does; return where each stands."""
    places: dict[bytes, int] = {}
    refused: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            places[message.key() or b""] = message.partition() or 0
        else:
            refused.append(error)

    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "partitioner": "murmur2_random"})
    for key in KEYS:
        producer.produce(topic, b"v", key, on_delivery=delivered)
    assert producer.flush(60) == 0
    assert not refused
    return places


def partitions_at(bootstrap: str, topic: str) -> int:
    """Return how many partitions a client is told of."""
    return len(AdminClient({"bootstrap.servers": bootstrap}).list_topics(topic, 60).topics[topic].partitions)


def commit(gateway: GatewayProcess, topic: str) -> None:
    """Commit a record in a transaction through the gateway."""
    producer = Producer({"bootstrap.servers": gateway.address, "transactional.id": topic})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, b"rolling", b"k")
    producer.commit_transaction(60)


def count_of(site: Site, topic: str) -> int:
    return len(read_committed(site.cluster.bootstrap_servers, [topic], partitions=PARTITIONS))


def test_a_stream_is_refused_whose_name_the_brokers_have_and_the_topic_stays_what_it_was(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, scope: str
) -> None:
    topic, servers = f"{scope}.orders", site.cluster.bootstrap_servers
    create_topic(servers, topic, PARTITIONS)
    before = write_plainly(servers, topic)
    with pytest.raises(InvalidNameError, match="by that name, which is ambiguous"):
        client.admin.create_stream(f"{scope}/orders")
    assert partitions_at(gateway.address, topic) == PARTITIONS
    assert write_plainly(gateway.address, topic) == before
    assert count_of(site, topic) == 2 * len(KEYS)


def test_a_topic_that_is_made_later_wins_and_the_doctor_says_so_until_it_is_gone(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, scope: str, cli: Cli
) -> None:
    stream, topic, servers = f"{scope}/orders", f"{scope}.orders", site.cluster.bootstrap_servers
    client.admin.create_stream(stream)
    commit(gateway, topic)
    assert partitions_at(gateway.address, topic) == VIRTUAL
    create_topic(servers, topic, PARTITIONS)
    eventually(lambda: partitions_at(servers, topic) == PARTITIONS, "the broker knows of it")
    assert partitions_at(gateway.address, topic) == PARTITIONS, "at once, however long ago the gateway has looked"
    places = write_plainly(gateway.address, topic)
    assert places == write_plainly(servers, topic)
    assert len(Counter(places.values())) == PARTITIONS
    with pytest.raises(KafkaException) as refusal:
        commit(gateway, topic)
    assert refusal.value.args[0].code() == KafkaError.TOPIC_EXCEPTION or not refusal.value.args[0].retriable()
    with pytest.raises(InvalidNameError, match="delete that stream first"):
        adopt(client, topic)
    assert count_of(site, topic) == 2 * len(KEYS)
    assert [message.value() for message in site.committed(stream)] == [b"rolling"]

    def finding() -> dict[str, str] | None:
        found = json.loads(cli("doctor", "--json").out)["findings"]
        return next((item for item in found if item["check"] == "name-clash" and topic in item["what"]), None)

    known = finding()
    assert known is not None
    assert known["severity"] == "problem"
    assert f"--delete --topic {topic}" in known["remedy"]
    kafka = AdminClient({"bootstrap.servers": servers})
    kafka.delete_topics([topic])[topic].result(60)
    eventually(lambda: partitions_at(gateway.address, topic) == VIRTUAL, "it means the stream again")
    commit(gateway, topic)
    assert [message.value() for message in site.committed(stream)] == [b"rolling"] * 2
    assert finding() is None
