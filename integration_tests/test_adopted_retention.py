"""Transactions that are open for longer than their topic keeps records: who says so, and times that count anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import rollbridge
from integration_tests.backends.local import LocalCluster
from integration_tests.clients import Site, adopt, read_committed, until
from integration_tests.command_line import Cli
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.kafka.client import KafkaClient

FAST = {
    "log.retention.check.interval.ms": "200",
    "log.initial.task.delay.ms": "200",
    "log.segment.delete.delay.ms": "0",
}
KEPT_MS = 1
"""Brokers look every five minutes, so that records stay for as long as a test needs them."""


@pytest.fixture
def topic(site: Site, unique_name: Callable[[str], str]) -> str:
    name = unique_name("shop.orders")
    new = NewTopic(name, 1, 1, config={"retention.ms": str(KEPT_MS)})
    admin = AdminClient({"bootstrap.servers": site.cluster.bootstrap_servers})
    admin.create_topics([new])[name].result(60)
    return name


def later() -> int:
    """Wait until what is written now is older than the topic keeps it; return the time of then in ms."""
    begun_ms = int(time.time() * 1000)
    until(lambda: int(time.time() * 1000) > begun_ms + 2 * KEPT_MS)
    return int(time.time() * 1000)


def test_begin_commit_and_describe_say_what_the_topic_will_not_keep(
    site: Site, client: rollbridge.Bridge, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    adopt(client, topic, partitioner="murmur2")
    with client.transaction(topic, timeout=timedelta(hours=1)) as txn:
        txn.write(topic, key=b"k", value=b"v")
        txn.flush()
        [begun] = [record.getMessage() for record in caplog.records if "retention.ms" in record.getMessage()]
        assert f"lease.beyond_retention topic={topic} retention=0:00:00.001000 lease=1:00:00: " in begun
        assert f"rollbridge stream update {topic} --timestamps commit" in begun
        later()
        until(lambda: any(item.id == txn.id for item in client.admin.transactions()))
        [old] = Cli(site.cluster, site.root).json("txn", "describe", str(txn.id))["older_than_kept"]
        assert f"what it wrote to topic {topic} before " in old
    [committed] = [record.getMessage() for record in caplog.records if "is committed, and" in record.getMessage()]
    assert f"what it wrote to topic {topic} before " in committed
    caplog.clear()
    with client.transaction(topic, timeout=timedelta(milliseconds=KEPT_MS)):
        pass
    assert not [record for record in caplog.records if "retention.ms" in record.getMessage()]


def test_records_have_the_time_of_their_commit_where_that_was_asked_for(
    site: Site, client: rollbridge.Bridge, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    adopted = adopt(client, topic, partitioner="murmur2", timestamps="commit")
    assert adopted.config.timestamps == "commit"
    with client.transaction(topic, timeout=timedelta(hours=1)) as txn:
        for value in (b"small", b"L" * 100_000):
            txn.write(topic, key=b"k", value=value)
        txn.flush()
        written_ms = later()
    with client.writer(topic) as writer:
        writer.write(b"k", b"plain").result(60)
    messages = read_committed(site.cluster.bootstrap_servers, [topic])
    assert [len(message.value() or b"") for message in messages] == [5, 100_000, 5]
    assert all(message.timestamp()[1] >= written_ms for message in messages)
    assert not [record for record in caplog.records if "retention.ms" in record.getMessage()]

    assert client.admin.update_stream(topic, timestamps="writer").timestamps == "writer"
    with client.transaction(topic, timeout=timedelta(milliseconds=KEPT_MS * 1_000)) as txn:
        txn.write(topic, key=b"k", value=b"as written")
        txn.flush()
        written_ms = later()
    last = read_committed(site.cluster.bootstrap_servers, [topic])[-1]
    assert last.value() == b"as written"
    assert last.timestamp()[1] < written_ms


def test_a_gateway_says_what_the_topic_will_not_keep(
    site: Site, client: rollbridge.Bridge, topic: str, tmp_path: Path
) -> None:
    adopt(client, topic, partitioner="murmur2")
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    with GatewayProcess(servers, "gateway-1", tmp_path) as gateway:
        gateway.await_ready()
        producer = Producer({"bootstrap.servers": gateway.address, "transactional.id": "loader-1"})
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        producer.produce(topic, b"v", b"k")
        producer.commit_transaction(PATIENCE_S)
        said = gateway.log.read_text()
    assert f"lease.beyond_retention topic={topic} retention=0:00:00.001000 " in said
    assert f"what it wrote to topic {topic} before " in said


def test_what_a_day_ago_was_written_stays_where_retention_counts_from_the_commit(tmp_path: Path) -> None:
    names = ("kept", "swept")
    with LocalCluster(kafka_settings=FAST) as cluster, Site(cluster, "/retention", tmp_path) as site:
        kafka = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
        # A file of the log is closed behind records whose times are so far from what follows, such as a marker.
        hour = {"retention.ms": str(3_600_000), "segment.ms": str(60_000)}
        for made in kafka.create_topics([NewTopic(name, 1, 1, config=hour) for name in names]).values():
            made.result(60)
        yesterday_ms = int(time.time() * 1000) - 24 * 3_600_000
        with site.connect("loader", rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S)) as client:
            for name in names:
                adopt(client, name, partitioner="murmur2", timestamps="commit" if name == "kept" else "writer")
            with client.transaction(*names) as txn:
                for name in names:
                    for number in range(10):
                        txn.write(name, key=b"k", value=b"%d" % number, timestamp=yesterday_ms + number)
        offsets, places = KafkaClient(cluster.bootstrap_servers).offsets, [(name, 0) for name in names]
        eventually(lambda: offsets.first(places)["swept", 0] >= 10, "Kafka has swept")
        assert offsets.first(places)["kept", 0] == 0
        times = [message.timestamp()[1] for message in read_committed(cluster.bootstrap_servers, ["kept"])]
    assert [later - times[0] for later in times] == list(range(10)), "as far from each other as they were"
    assert times[-1] > yesterday_ms + 23 * 3_600_000
