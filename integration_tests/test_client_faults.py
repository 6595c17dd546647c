"""Servers that are away, at the start and in the middle: the client waits and recovers, or says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site, header_of, until
from rollbridge.errors import (
    BackpressureError,
    KafkaUnavailableError,
    OutcomeUnknownError,
    UnavailableError,
    ZooKeeperUnavailableError,
)
from rollbridge_devcluster.state import free_port

QUICK = rollbridge.ClientOptions(connect_timeout_s=2.0)


@pytest.fixture
def stream(own_site: Site, unique_name: Callable[[str], str]) -> str:
    """A stream in which a transaction was committed already."""
    name = unique_name("scope") + "/orders"
    with own_site.connect() as client:
        client.admin.create_stream(name, segments=2)
        client.begin(name).commit()
    return name


def test_no_kafka_at_the_start_is_said_clearly(own_cluster: AnyCluster) -> None:
    address = f"127.0.0.1:{free_port()}"
    before = threading.active_count()
    with pytest.raises(KafkaUnavailableError, match=address):
        rollbridge.connect(address, zookeeper=own_cluster.zookeeper, zookeeper_root="/nobody", options=QUICK)
    until(lambda: threading.active_count() <= before)


def test_no_zookeeper_at_the_start_is_said_clearly(own_cluster: AnyCluster) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ZooKeeperUnavailableError, match=address):
        rollbridge.connect(own_cluster.bootstrap_servers, zookeeper=address, options=QUICK)


def test_a_transaction_survives_a_broker_that_is_killed_in_the_middle(
    own_cluster: AnyCluster, own_site: Site, stream: str
) -> None:
    with own_site.connect() as client:
        transaction = client.begin(stream)
        for number in range(1_000):
            transaction.write(stream, key=b"%d" % (number % 50), value=b"before-%d" % number)
        transaction.flush()
        own_cluster.kill("kafka")
        for number in range(1_000):
            transaction.write(stream, key=b"%d" % (number % 50), value=b"while-%d" % number)
        with pytest.raises(UnavailableError, match="still being sent"):
            transaction.flush(timeout=0.5)
        with pytest.raises(OutcomeUnknownError):
            transaction.commit(timeout=0.5)
        own_cluster.restart("kafka")
        assert transaction.commit(timeout=90).records == 2_000
        with client.transaction(stream) as after:
            after.write(stream, key=b"k", value=b"after")
    values = [message.value() for message in own_site.committed(stream)]
    assert len(values) == len(set(values)) == 2_001


def test_a_transaction_survives_a_zookeeper_that_is_killed_in_the_middle(
    own_cluster: AnyCluster, own_site: Site, stream: str
) -> None:
    with own_site.connect() as client:
        transaction = client.begin(stream)
        transaction.write(stream, key=b"k", value=b"before")
        own_cluster.kill("zookeeper")
        transaction.write(stream, key=b"k", value=b"while")
        other = client.begin(stream)
        other.write(stream, key=b"k", value=b"begun meanwhile")
        own_cluster.restart("zookeeper")
        assert transaction.commit(timeout=90).records == 2
        assert other.commit(timeout=90).records == 1
        scaled = client.admin.scale(stream, seal=[0, 1], ranges=[(0.0, 1.0)], timeout_s=90)
        until(lambda: client.begin(stream).id.epoch == scaled.epoch)
    assert [message.value() for message in own_site.committed(stream)] == [b"before", b"while", b"begun meanwhile"]


def test_writers_wait_while_the_buffer_is_full_and_are_told_in_the_end(
    own_cluster: AnyCluster, own_site: Site, stream: str
) -> None:
    options = rollbridge.ClientOptions(buffer_bytes=4 * 1024 * 1024, backpressure_timeout_s=4.0)
    record = b"x" * 100_000
    with own_site.connect(options=options) as client:
        transaction = client.begin(stream)
        transaction.flush()
        with own_cluster.paused("kafka"):
            refused = 0
            while not refused:
                assert transaction.records < 200, "the buffer has a bound"
                try:
                    transaction.write(stream, key=b"%d" % transaction.records, value=record)
                except BackpressureError:
                    refused += 1
            with pytest.raises(BackpressureError):
                transaction.write(stream, key=b"again", value=record)
            written = transaction.records
            assert 20 < written < 60

        def goes_on() -> bool:
            try:
                transaction.write(stream, key=b"%d" % transaction.records, value=record)
            except BackpressureError:  # the broker is slow to wake
                return False
            return True

        for _ in range(100):  # more than the buffer holds: writers wait for room, and get it
            until(goes_on)
        assert transaction.commit(timeout=90).records == written + 100
    counts = sorted(header_of(message)[1] for message in own_site.committed(stream))
    assert counts == list(range(written + 100)), "what was refused is not there, all the rest is, once"


def test_another_thread_may_write_while_one_waits(own_cluster: AnyCluster, own_site: Site, stream: str) -> None:
    options = rollbridge.ClientOptions(buffer_bytes=4 * 1024 * 1024, backpressure_timeout_s=60.0)
    with own_site.connect(options=options) as client:
        transactions = [client.begin(stream) for _ in range(3)]

        def fill(transaction: rollbridge.Transaction) -> None:
            for number in range(60):
                transaction.write(stream, key=b"%d" % number, value=b"x" * 100_000)

        threads = [threading.Thread(target=fill, args=(transaction,)) for transaction in transactions]
        with own_cluster.paused("kafka"):
            for thread in threads:
                thread.start()
            until(lambda: sum(transaction.records for transaction in transactions) > 20)
        for thread in threads:
            thread.join(90)
        assert [transaction.commit(timeout=90).records for transaction in transactions] == [60] * 3


def test_plain_writes_survive_a_broker_that_is_killed_in_the_middle(
    own_cluster: AnyCluster, own_site: Site, stream: str
) -> None:
    with own_site.connect() as client:
        writer = client.writer(stream)
        futures = [writer.write(b"%d" % (number % 50), b"before-%d" % number) for number in range(1_000)]
        futures[-1].result(60)
        own_cluster.kill("kafka")
        futures += [writer.write(b"%d" % (number % 50), b"while-%d" % number) for number in range(1_000)]
        with pytest.raises(UnavailableError, match="still being sent"):
            writer.flush(timeout=0.5)
        own_cluster.restart("kafka")
        writer.flush(timeout=90)
        places = [future.result(0).dlsn for future in futures]
    assert len(set(places)) == 2_000
    by_key: dict[bytes | None, list[bytes | None]] = {}
    for message in own_site.committed(stream):
        by_key.setdefault(message.key(), []).append(message.value())
    for number in range(50):
        rest = range(number, 1_000, 50)
        assert by_key[b"%d" % number] == [b"before-%d" % place for place in rest] + [
            b"while-%d" % place for place in rest
        ]
