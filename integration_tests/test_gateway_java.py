"""Kafka's own Java producer, 4.2, at a gateway: transactions v2, a commit as Flink recovers, and several gateways."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from io import BufferedReader
from pathlib import Path
from typing import Any

import psutil
from kio.schema.errors import ErrorCode

from integration_tests.clients import Site
from integration_tests.foreign.java import JavaProducer
from integration_tests.gateway_clients import keys_in_order, topic_of, values
from integration_tests.gateways import GatewayProcess, Servers, client_of
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api


def pair_of(producer: JavaProducer) -> tuple[int, int]:
    """Producer id and epoch that a producer has now."""
    pid, epoch = producer.do("state").split()
    return int(pid), int(epoch)


def numbered(name: str, numbers: Iterable[int]) -> Counter[bytes]:
    """The values that a producer in Java writes under these numbers."""
    return Counter(f"{name}-{number}".encode() for number in numbers)


def test_each_transaction_has_an_epoch_of_its_own(
    site: Site, gateway: GatewayProcess, tmp_path: Path, orders: str
) -> None:
    topic, log, lz4 = topic_of(orders), tmp_path / "java.log", {"compression.type": "lz4"}
    seen: list[tuple[int, int]] = []
    with JavaProducer(gateway.address, "java v2", log, settings=lz4) as producer:
        producer.do("init")
        for number in range(3):
            producer.do("begin")
            seen.append(pair_of(producer))
            producer.write(topic, 500 * number, 500 * (number + 1))
            producer.do("commit")
            seen.append(pair_of(producer))
    assert len({pid for pid, _ in seen}) == 1
    assert [epoch for _, epoch in seen] == [0, 1, 1, 2, 2, 3], "each end was answered with the next pair"
    with JavaProducer(gateway.address, "java v2", log) as producer:
        producer.do("init")
        for number in range(2):
            producer.do("begin")
            producer.write(topic, 10_000 * (number + 1), 10_000 * (number + 1) + 500)
            producer.do("abort")
    assert values(site.committed(orders)) == numbered("java v2", range(1_500))


def test_a_commit_as_flink_recovers(
    site: Site, servers: Servers, tmp_path: Path, orders: str, unique_name: Callable[[str], str]
) -> None:
    """The producer is gone and so is its gateway; another process commits by producer id and epoch, twice."""
    name, log = unique_name("flink"), tmp_path / "java.log"
    with GatewayProcess(servers, unique_name("gateway"), tmp_path) as first:
        with JavaProducer(first.address, name, log) as producer:
            producer.do("init")
            producer.do("begin")
            producer.write(topic_of(orders), 0, 1_000)
            pair = pair_of(producer)
        first.kill()
    assert site.committed(orders) == []
    with GatewayProcess(servers, unique_name("gateway"), tmp_path) as second:
        for _ in range(2):
            with JavaProducer(second.address, name, log) as restored:
                restored.do("resume", *pair)
                restored.do("commit")
    assert values(site.committed(orders)) == numbered(name, range(1_000))


def test_a_producer_goes_on_through_another_gateway(
    site: Site,
    gateway: GatewayProcess,
    servers: Servers,
    tmp_path: Path,
    orders: str,
    unique_name: Callable[[str], str],
) -> None:
    """Whichever of two gateways serves it is killed while it writes; the counts are exact."""
    one = GatewayProcess(servers, unique_name("gateway"), tmp_path)
    other = GatewayProcess(servers, unique_name("gateway"), tmp_path)
    # Java's client.id, where none is given.
    name = client_of([one.name, other.name], [gateway.name], "producer-").removeprefix("producer-")
    topic = topic_of(orders)
    with (
        one,
        other,
        JavaProducer(f"{one.address},{other.address}", name, tmp_path / "java.log") as producer,
    ):
        producer.do("init")
        producer.do("begin")
        producer.write(topic, 0, 10_000)
        serving: list[GatewayProcess] = []

        def is_served() -> bool:
            serving[:] = [item for item in (one, other) if serves(item, producer.process.pid)]
            return len(serving) == 1

        eventually(is_served, "one of them serves it")
        producer.ask("send", topic, 10_000, 40_000)
        serving[0].kill()
        producer.answer()
        assert producer.do("await") == "30000"
        producer.do("commit")
    found = site.committed(orders)
    assert values(found) == numbered(name, range(40_000))
    assert keys_in_order(found)


def test_a_client_of_another_gateway_that_serves_its_id_is_refused_and_let_go(
    gateway: GatewayProcess, servers: Servers, tmp_path: Path, orders: str, unique_name: Callable[[str], str]
) -> None:
    """It is told so on what it has asked for already, and dials the address that Metadata names."""
    name, topic = unique_name("raw"), topic_of(orders)
    with GatewayProcess(servers, unique_name("mine"), tmp_path) as mine, ExitStack() as stack:
        client = client_of([mine.name], [gateway.name])
        at_mine, at_other = (
            stack.enter_context(socket.create_connection(("127.0.0.1", item.port + 1), PATIENCE_S))
            for item in (mine, gateway)
        )

        def request(api: Api, version: int, values: dict[str, object]) -> bytes:
            return wire.framed(wire.write_request(api, version, 1, client, values))

        def answer(said: BufferedReader, api: Api, version: int) -> Any:
            return wire.read_answer(said.read(int.from_bytes(said.read(4), "big")), api, version)

        said = stack.enter_context(at_mine.makefile("rb"))
        values = {"transactional_id": name, "transaction_timeout": timedelta(minutes=1)}
        at_mine.sendall(request(Api.INIT_PRODUCER_ID, 1, values))
        started = answer(said, Api.INIT_PRODUCER_ID, 1)
        assert started.error_code is ErrorCode.none
        values = {
            "v3_and_below_transactional_id": name,
            "v3_and_below_producer_id": started.producer_id,
            "v3_and_below_producer_epoch": started.producer_epoch,
            "v3_and_below_topics": [{"name": topic, "partitions": [0]}],
        }
        wanted, metadata = request(Api.ADD_PARTITIONS_TO_TXN, 3, values), request(Api.METADATA, 4, {"topics": []})
        refused = stack.enter_context(at_other.makefile("rb"))

        def is_known() -> bool:
            at_other.sendall(metadata)
            return bool(answer(refused, Api.METADATA, 4).brokers[0].port == mine.port + 1)

        eventually(is_known, "the other gateway knows where the client belongs")
        at_other.sendall(wanted + metadata)
        [result] = answer(refused, Api.ADD_PARTITIONS_TO_TXN, 3).results_by_topic_v3_and_below
        assert result.results_by_partition[0].partition_error_code is ErrorCode.coordinator_not_available
        assert answer(refused, Api.METADATA, 4).brokers[0].port == mine.port + 1
        assert refused.read() == b"", "the connection is closed behind its last answer"
        at_mine.sendall(wanted)
        [result] = answer(said, Api.ADD_PARTITIONS_TO_TXN, 3).results_by_topic_v3_and_below
        assert result.results_by_partition[0].partition_error_code is ErrorCode.none


def serves(gateway: GatewayProcess, pid: int) -> bool:
    """Return whether a process has a connection to the port of a gateway that stands for the broker."""
    return any(
        found.status == psutil.CONN_ESTABLISHED and found.raddr.port == gateway.port + 1
        for found in psutil.Process(pid).net_connections()
    )
