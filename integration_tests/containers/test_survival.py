"""The product from its image, whole, while a broker dies: the quick test of what runs on containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from confluent_kafka import Producer
from testcontainers.core.wait_strategies import HealthcheckWaitStrategy

import rollbridge
from integration_tests.backends import faults
from integration_tests.backends.containers import ContainerCluster
from integration_tests.backends.engine import host, publishing_address
from integration_tests.clients import read_committed
from integration_tests.containers.partitions import in_sync
from integration_tests.images import COORDINATOR
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.stream.names import StreamName
from rollbridge_devcluster.state import free_port

HEALTH = {"test": ["CMD", "python", "-m", "rollbridge.observe.healthcheck", "gateway"], "interval": 500_000_000}


@contextmanager
def gateway(cluster: ContainerCluster, root: str) -> Iterator[str]:
    """A healthy gateway in a container, by its address; it has a port of its own and one for each broker."""
    first = free_port(count=len(cluster.brokers) + 1)
    told = {"ROLLBRIDGE_GATEWAY_LISTEN": f"0.0.0.0:{first}", "ROLLBRIDGE_GATEWAY_ADVERTISE": host()}
    described = cluster.beside(COORDINATOR, ["gateway"], healthcheck=HEALTH)
    ports = cast("dict[str, tuple[str, int]]", described.ports)
    ports |= {f"{first + step}/tcp": (publishing_address(), first + step) for step in range(len(cluster.brokers) + 1)}
    healthy = HealthcheckWaitStrategy().with_startup_timeout(int(PATIENCE_S)).with_poll_interval(0.1)
    with described.with_envs(**cluster.connection_inside(root), **told).waiting_for(healthy):
        yield f"{host()}:{first}"


@pytest.mark.containers
def test_each_record_is_there_once_although_a_broker_was_killed(
    ensemble: ContainerCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    root, stream = f"/{unique_name('survival')}", StreamName(unique_name("survival"), "orders")
    servers = ensemble.bootstrap_servers
    with (
        ensemble.coordinator(root, "leader", tmp_path, {}),
        rollbridge.connect(servers, zookeeper=ensemble.zookeeper, zookeeper_root=root) as client,
        gateway(ensemble, root) as address,
    ):
        client.admin.create_stream(str(stream), segments=2, timeout_s=PATIENCE_S)
        topics = [stream.segment_topic(segment) for segment in client.admin.history(str(stream)).segments()]
        producer = Producer(
            {"bootstrap.servers": address, "transactional.id": str(stream), "transaction.timeout.ms": 900_000}
        )
        producer.init_transactions(PATIENCE_S)
        expected: list[bytes] = []

        def begin(name: str) -> rollbridge.Transaction:
            """A transaction of a client of ours, and one at the gateway, of ten records each."""
            transaction = client.begin(str(stream))
            producer.begin_transaction()
            for number in range(10):
                transaction.write(str(stream), key=b"%d" % number, value=f"client {name} {number}".encode())
                producer.produce(f"{stream.scope}.{stream.stream}", key=str(number), value=f"gateway {name} {number}")
            transaction.flush()
            assert producer.flush(PATIENCE_S) == 0
            return transaction

        def commit(transaction: rollbridge.Transaction, name: str) -> None:
            transaction.commit()
            producer.commit_transaction(PATIENCE_S)
            expected.extend(f"{who} {name} {n}".encode() for who in ("client", "gateway") for n in range(10))

        def found() -> list[bytes]:
            """What a reader of ours gives, which is what a stock consumer sees."""
            with client.reader(str(stream), follow=False) as reader:
                ours = sorted(record.value or b"" for record in reader)
            assert sorted(message.value() or b"" for message in read_committed(servers, topics)) == ours
            return ours

        commit(begin("before"), "before")
        dropped = begin("aborted")
        dropped.abort()
        producer.abort_transaction(PATIENCE_S)
        across = begin("across")
        with faults.killed(ensemble, ensemble.brokers[0]):
            commit(across, "across")
            commit(begin("after"), "after")
            assert found() == sorted(expected)
        eventually(lambda: all(in_sync(ensemble, topic) for topic in topics), "all replicas are there")
        assert found() == sorted(expected)
