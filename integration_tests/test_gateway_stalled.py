"""A broker that takes nothing holds up who needs it, and never the gateway itself."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from integration_tests.gateway_clients import producer_of, topic_of, values
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.patience import PATIENCE_S
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api

ANSWER_S = 15.0
"""A broker that does not answer is given up after 30 s: an answer that waits for that is none."""
SMALL, LARGE = 3_000, 900_000
ROUNDS = 20


def answers(gateway: GatewayProcess) -> None:
    """Ask a gateway for what it knows by itself."""
    with socket.create_connection(("127.0.0.1", gateway.port), ANSWER_S) as connection:
        connection.sendall(wire.framed(wire.write_request(Api.API_VERSIONS, 3, 1, "another", {})))
        assert connection.recv(4)


def test_a_broker_that_takes_nothing_does_not_hold_the_gateway_up(
    own_cluster: AnyCluster, own_site: Site, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    """It serves what needs no broker; small batches are written on its loop's own thread, and large ones beside."""
    stream = unique_name("scope") + "/stalled"
    with own_site.connect() as client:
        client.admin.create_stream(stream, segments=2)
    servers = Servers(own_cluster.bootstrap_servers, own_cluster.zookeeper, own_site.root)
    wanted: Counter[bytes] = Counter()
    with GatewayProcess(servers, unique_name("gateway"), tmp_path) as gateway:
        producers = [producer_of(gateway, unique_name(f"stalled-{number}"), **{"linger.ms": 0}) for number in range(8)]

        def write(number: int, count: int) -> None:
            value = b"%d-%d-" % (number, count)
            value = value.ljust(LARGE if number % 2 else SMALL, b"x")
            wanted[value] += 1
            producers[number].produce(topic_of(stream), value, b"%d" % count)
            producers[number].poll(0)

        for number, producer in enumerate(producers):
            producer.init_transactions(PATIENCE_S)
            producer.begin_transaction()
            write(number, 0)
            assert producer.flush(PATIENCE_S) == 0
        with own_cluster.paused("kafka"):
            for count in range(1, ROUNDS + 1):
                for number in range(len(producers)):
                    write(number, count)
                answers(gateway)
        for producer in producers:
            producer.commit_transaction(PATIENCE_S)
    found = values(own_site.committed(stream))
    assert sorted((value[:9], many) for value, many in found.items()) == sorted(
        (value[:9], many) for value, many in wanted.items()
    )
