"""A transaction that was aborted before its producer asked for the commit: the producer aborts, and begins again."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import KafkaException

import rollbridge
from integration_tests.clients import Site, adopt, read_committed, stream_of
from integration_tests.foreign.java import CLIENTS, JavaError, JavaProducer
from integration_tests.foreign.others import franz
from integration_tests.gateway_clients import producer_of, values
from integration_tests.gateways import GatewayProcess
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.base.ids import TransactionId
from rollbridge.kafka.client import KafkaClient
from rollbridge_gateway.producer.table import Pair, client_name


def open_ones(client: rollbridge.Bridge, topic: str) -> list[TransactionId]:
    return [item.id for item in client.admin.transactions() if stream_of(client, topic) in item.streams]


def abort_by_hand(client: rollbridge.Bridge, topic: str) -> None:
    eventually(lambda: open_ones(client, topic), "the transaction is open")
    client.admin.abort_transaction(*open_ones(client, topic))


def committed(site: Site, topic: str) -> Counter[bytes]:
    return values(read_committed(site.cluster.bootstrap_servers, [topic]))


@pytest.mark.parametrize("version", CLIENTS)
def test_a_producer_in_java_goes_on_after_its_lease_has_run_out(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str, tmp_path: Path, version: str
) -> None:
    lease, same_id = {"transaction.timeout.ms": 1_000}, client.client(client_name(topic))
    with JavaProducer(gateway.address, topic, tmp_path / "java.log", client=version, settings=lease) as java:
        java.do("init")
        for number, then in enumerate(("commit", f"send {topic} 2 9", "commit")):
            java.do("begin")
            java.write(topic, number, number + 1)
            label = Pair(*map(int, java.do("state").split())).label
            eventually(lambda label=label: same_id.outcome(label=label).aborted, "its lease has run out")  # type: ignore[misc]
            with pytest.raises(JavaError) as refused:  # noqa: PT012 - what is sent is answered later
                java.do(then)
                java.do("await")
                java.do("commit")  # the gateway may not have heard of the end when the record came
            kinds = {"TransactionAbortableException", "KafkaException", "InvalidPidMappingException"}
            assert refused.value.kind in kinds
            java.do("abort")
        java.do("begin")
        java.write(topic, 10, 11)
        java.do("commit")
    assert committed(site, topic) == {f"{topic}-10".encode(): 1}


def test_a_commit_as_flink_recovers_is_told_that_it_is_lost(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str, tmp_path: Path
) -> None:
    """Flink would ask again for ever if it was told to abort."""
    log = tmp_path / "java.log"
    with JavaProducer(gateway.address, topic, log) as java:
        java.do("init")
        java.do("begin")
        java.write(topic, 0, 10)
        pair = java.do("state").split()
    abort_by_hand(client, topic)
    for _ in range(2):
        with JavaProducer(gateway.address, topic, log) as restored:
            restored.do("resume", *pair)
            with pytest.raises(JavaError) as refused:
                restored.do("commit")
            assert refused.value.kind == "InvalidTxnStateException"


def test_librdkafka_goes_on(site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str) -> None:
    producer = producer_of(gateway, topic)
    producer.init_transactions(60)
    for number in range(2):
        producer.begin_transaction()
        producer.produce(topic, f"lost-{number}")
        assert producer.flush(60) == 0
        abort_by_hand(client, topic)
        with pytest.raises(KafkaException) as refused:
            producer.commit_transaction(60)
        error = refused.value.args[0]
        assert error.txn_requires_abort(), error
        assert not error.fatal()
        producer.abort_transaction(60)
    producer.begin_transaction()
    producer.produce(topic, "kept")
    producer.commit_transaction(60)
    assert committed(site, topic) == {b"kept": 1}


def test_a_topic_that_is_deleted_costs_its_transaction_and_not_its_producer(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str
) -> None:
    other = f"{topic}-other"
    create_topic(site.cluster.bootstrap_servers, other)
    adopt(client, other)
    producer = producer_of(gateway, topic)
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, "lost")
    producer.produce(other, "lost with it")
    assert producer.flush(60) == 0
    KafkaClient(site.cluster.bootstrap_servers).topics.delete_topics([topic])
    with pytest.raises(KafkaException) as refused:
        producer.commit_transaction(PATIENCE_S)
    error = refused.value.args[0]
    assert error.txn_requires_abort(), error
    producer.abort_transaction(60)
    producer.begin_transaction()
    producer.produce(other, "kept")
    producer.commit_transaction(60)
    assert committed(site, other) == {b"kept": 1}


def test_franz_go_goes_on(site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str) -> None:
    command = [*franz(), gateway.address, topic, topic, "3", "lost", "lost", "commit"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "written\n"
            abort_by_hand(client, topic)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "lost\n"
        assert process.stdout.readline() == "commit\n"
    assert process.returncode == 0
    assert committed(site, topic) == {f"{topic}-{number}".encode(): 1 for number in (6, 7, 8)}
