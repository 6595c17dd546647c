"""One connection: what it makes of peers that are silent, gone, or no brokers, and of a real one."""

from __future__ import annotations

import gc
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse

from integration_tests.backends.interface import AnyCluster
from integration_tests.faults import Api, FaultProxy, Point
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.errors import InvalidRequestError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.errors import ConnectionLostError, KafkaUnavailableError
from rollbridge.kafka.metadata import Cluster, CodeError, CoordinatorType, NodeId, parse_bootstrap
from rollbridge.kafka.topics import TopicSpec

EVERYTHING = MetadataRequest(topics=None, allow_auto_topic_creation=False, include_topic_authorized_operations=False)


def connect(address: str, **options: float) -> Connection:
    host, _, port = address.rpartition(":")
    return Connection(host, int(port), **options)  # type: ignore[arg-type]


@contextmanager
def stranger(behaviour: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that is no broker and treats its one visitor as told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            visitor, _ = listener.accept()
            with visitor:
                behaviour(visitor)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE_S)


def test_requests_are_answered_in_order(cluster: AnyCluster) -> None:
    connection = connect(cluster.bootstrap_servers)
    assert connection.transaction_version >= 2
    for _ in range(10):
        connection.send(EVERYTHING)
    assert connection.in_flight == 10
    assert not connection.usable()
    answers = {connection.receive(MetadataResponse).cluster_id for _ in range(10)}
    assert answers == {cluster.kafka_cluster_id}
    assert connection.usable()
    with pytest.raises(ValueError, match="no request"):
        connection.receive(MetadataResponse)
    connection.close()
    connection.close()
    assert not connection.usable()
    with pytest.raises(ConnectionLostError):
        connection.call(EVERYTHING, MetadataResponse)
    assert "closed" in repr(connection)


def test_a_version_the_broker_lacks_is_named(cluster: AnyCluster) -> None:
    connection = connect(cluster.bootstrap_servers)
    connection.require(0, 12, "Produce")
    with pytest.raises(InvalidRequestError, match="Produce version 99"):
        connection.require(0, 99, "Produce")
    connection.close()


def test_silence_is_not_waited_for_for_ever() -> None:
    done = threading.Event()
    with stranger(lambda visitor: (done.wait(PATIENCE_S), None)[1]) as address:
        with pytest.raises(KafkaUnavailableError, match="no answer in time"):
            connect(address, request_timeout_s=0.2)
        done.set()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not a Kafka broker"),
        (b"\0\0\0\x0c\0\0\0\x63" + bytes(8), "answer 99"),
        (b"\0\0\0\x08\0\0\0\1\xff\xff\xff\xff", "does not parse"),
        (b"\0\0\0\x01\0", "not a Kafka broker"),
        (b"\0\0\0\x40\0\0\0\1", "in the middle"),
    ],
)
def test_whoever_is_no_broker_is_recognised(reply: bytes, said: str) -> None:
    def answer(visitor: socket.socket) -> None:
        visitor.recv(1 << 16)
        visitor.sendall(reply)
        visitor.shutdown(socket.SHUT_WR)
        visitor.recv(1 << 16)

    with stranger(answer) as address, pytest.raises(KafkaUnavailableError, match=said):
        connect(address, request_timeout_s=10)


def test_a_connection_knows_that_the_other_side_has_gone(cluster: AnyCluster) -> None:
    with FaultProxy(cluster.bootstrap_servers) as proxy:
        connection = connect(f"127.0.0.1:{proxy.port}")
        assert connection.usable()
        proxy.cut_all()
        eventually(lambda: not connection.usable(), "the connection is found closed")
        with pytest.raises(ConnectionLostError):
            connection.call(EVERYTHING, MetadataResponse)


def test_look_ups_survive_lost_connections(
    cluster: AnyCluster, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = [f"{topic_prefix}-{n}" for n in range(4)]
    KafkaClient(cluster.bootstrap_servers).topics.create_topics(TopicSpec(name=name) for name in topics)
    with (
        FaultProxy(cluster.bootstrap_servers) as proxy,
        proxy.in_between(monkeypatch),
        Cluster(cluster.bootstrap_servers) as brokers,
    ):
        node = brokers.leader(topics[0], 0)
        proxy.strike(Api.METADATA, Point.BEFORE_ANSWER)
        assert brokers.leader(topics[1], 0) == node
        proxy.cut_all()
        assert brokers.leader(topics[2], 0) == node
        with pytest.raises(CodeError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            brokers.leader(topics[0], 1)
        with pytest.raises(CodeError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            brokers.leader(f"{topic_prefix}-missing", 0)
        asked = proxy.requests.count(Api.METADATA)
        brokers.leader(topics[0], 0)
        assert proxy.requests.count(Api.METADATA) == asked
        brokers.forget_leader(topics[0])
        brokers.leader(topics[0], 0)
        assert proxy.requests.count(Api.METADATA) == asked + 1


def test_coordinators_are_found_and_remembered(cluster: AnyCluster, topic_prefix: str) -> None:
    with Cluster(f"127.0.0.1:1,{cluster.bootstrap_servers}") as brokers:

        def found() -> bool:
            try:
                return brokers.coordinator(CoordinatorType.TRANSACTION, topic_prefix) >= 0
            except CodeError as exc:
                # The first question of all makes the broker create the topic behind it.
                assert "COORDINATOR_NOT_AVAILABLE" in str(exc)  # noqa: PT017  # other codes are the failure
                return False

        eventually(found, "the coordinator is there")
        node = brokers.coordinator(CoordinatorType.TRANSACTION, topic_prefix)
        assert brokers.connection(node) is brokers.connection(node)


@pytest.mark.parametrize("in_a_cycle", [False, True], ids=["alone", "in a cycle"])
def test_connections_that_nobody_closes_are_closed(cluster: AnyCluster, in_a_cycle: bool) -> None:
    brokers = Cluster(cluster.bootstrap_servers)
    brokers.metadata([])
    brokers.broker_connection(NodeId(0), parse_bootstrap(cluster.bootstrap_servers)[0])
    if in_a_cycle:
        brokers.itself = brokers  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        del brokers
        gc.collect()
    assert [str(item.message) for item in found] == []
