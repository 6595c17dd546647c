"""Bytes that are no requests: they get an error or a closed connection, and a gateway that serves all others."""

from __future__ import annotations

import logging
import os
import random
import secrets
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient
from kio.schema.errors import ErrorCode

import rollbridge
from gateway.tests.mutations import captures, mutated
from integration_tests.bystanders import HOSTILE, Beside, gateway
from integration_tests.clients import Site
from integration_tests.foreign.java import CLIENTS, JavaProducer
from integration_tests.foreign.others import kafkajs, run
from integration_tests.gateway_clients import producer_of, topic_of, values
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.hasty_gateway import CONSTANTS
from integration_tests.patience import eventually
from integration_tests.recording import HOST, Recorder
from rollbridge.stream.names import StreamName
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api
from rollbridge_gateway.server.cluster import Gateway, chosen
from rollbridge_gateway.server.handlers import LISTING_BYTES_MAX
from rollbridge_gateway.server.listing import IDS_MAX

__all__ = ["gateway"]

logger = logging.getLogger(__name__)

CERTIFICATES = Path(__file__).parent / "certificates"
MUTANTS = int(os.environ.get("EXAMPLES", "400"))
MANY = int(os.environ.get("EXAMPLES", "30000"))
RSS_MAX = 1 << 30
"""256 MiB of requests, as much of answers, and the process."""
ANSWER_S = 30.0


def exchange(gateway: GatewayProcess, data: bytes) -> bytes:
    """Send bytes, and nothing more; return what comes until the gateway closes the connection."""
    with socket.create_connection(("127.0.0.1", gateway.port + 1), timeout=ANSWER_S) as connection:
        found = bytearray()
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65_536):
                found += more
        except ConnectionError:
            pass
        return bytes(found)


def check_alive(site: Site, gateway: GatewayProcess, stream: str, transactional_id: str) -> None:
    """The gateway carries a transaction, and has logged no stack."""
    producer = producer_of(gateway, transactional_id)
    producer.init_transactions(60)
    producer.begin_transaction()
    for i in range(100):
        producer.produce(topic_of(stream), key=f"{i}", value=f"{i}")
    producer.commit_transaction(60)
    assert values(site.committed(stream)) == Counter(f"{i}".encode() for i in range(100))
    log = gateway.log.read_text(errors="replace")
    assert "Traceback" not in log, log[-6_000:]


def test_mutated_requests(
    site: Site, gateway: GatewayProcess, ledger: str, orders: str, unique_name: Callable[[str], str]
) -> None:
    known = captures(topic_of(orders))
    dice = random.Random(20)
    for data in known:
        assert exchange(gateway, data), "a sound request is answered"
    for _ in range(MUTANTS):
        exchange(gateway, mutated(dice.choice(known), dice))
    check_alive(site, gateway, ledger, unique_name("after"))


@pytest.fixture(scope="module")
def recorded(site: Site, client: rollbridge.Bridge, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What librdkafka, Java's clients, kafkajs and a consumer send to a gateway, as far as they are installed."""
    folder = tmp_path_factory.mktemp("recorded")
    stream = f"recorded-{secrets.token_hex(4)}/ledger"
    client.admin.create_stream(stream)
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    with ExitStack() as stack:
        gateway = stack.enter_context(GatewayProcess(servers, "recorded", folder, [f"--advertise={HOST}"]))
        recorder = stack.enter_context(Recorder([gateway.port, gateway.port + 1]))
        both = Gateway("recorded", "", 0), Gateway(HOSTILE, "", 0)
        mine = next(name for name in map(str, range(1_000)) if chosen(name, both) is both[0])
        address, topic = f"{HOST}:{gateway.port}", topic_of(stream)
        for compression in ("none", "lz4"):
            producer = producer_of(
                gateway, f"recorded-{compression}", **{"bootstrap.servers": address, "compression.type": compression}
            )
            producer.init_transactions(60)
            for number in range(20):
                producer.begin_transaction()
                producer.produce(topic, key=f"{number}", value=f"{number}", headers={"h": b"x"})
                if number % 2:
                    producer.commit_transaction(60)
                else:
                    producer.abort_transaction(60)
        settings = {"bootstrap.servers": address, "client.id": mine, "auto.offset.reset": "earliest"}
        consumer = Consumer({**settings, "group.id": "recorded"})
        with closing(consumer):
            consumer.subscribe([StreamName.parse(stream).segment_topic(rollbridge.SegmentId.of(0, 0))])
            assert consumer.poll(60) is not None
            consumer.commit(asynchronous=False)
        for version in CLIENTS:
            settings, log = {"client.id": mine}, folder / "java.log"
            with JavaProducer(address, f"recorded-{version}", log, client=version, settings=settings) as java:
                java.do("init")
                for number, end in enumerate(("commit", "abort") * 5):
                    java.do("begin")
                    java.do("send", topic, number * 10, number * 10 + 10)
                    java.do(end)
        if shutil.which("npm"):
            run(kafkajs(), address, topic, "recorded-js", 10, "commit", "abort")
    found = recorder.requests()
    seen = {int.from_bytes(data[4:6], "big") for data in found}
    assert seen >= {Api.PRODUCE, Api.END_TXN, Api.ADD_PARTITIONS_TO_TXN, Api.METADATA, Api.FETCH}
    return found


def test_many_mutated_requests(
    site: Site,
    gateway: GatewayProcess,
    recorded: list[bytes],
    ledger: str,
    orders: str,
    unique_name: Callable[[str], str],
) -> None:
    """Of all APIs and versions, and as real clients send them, while somebody else goes on; memory stays bounded."""
    seed = int(os.environ.get("SEED", "21"))
    known, dice = [captures(topic_of(orders)), recorded], random.Random(seed)
    process, highest = psutil.Process(gateway.pid), 0
    with Beside(gateway, ledger, unique_name("beside")) as beside:
        for number in range(MANY):
            exchange(gateway, mutated(dice.choice(known[number % 2]), dice))
            if number % 1_000 == 0:
                beside.await_more()
                highest = max(highest, process.memory_info().rss)
                logger.info("%d requests, %d transactions beside, %d MiB", number, beside.committed, highest >> 20)
    assert highest < RSS_MAX
    assert values(site.committed(ledger)) == Counter(f"{number}".encode() for number in range(beside.committed))
    check_alive(site, gateway, orders, unique_name("after"))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"\x7f\xff\xff\xff",
        b"\xff\xff\xff\xff",
        b"\0\0\0\x04\0\x03\0\0",
        b"\0\0\0\x0a\0\x1b\0\x01\0\0\0\x01\xff\xff",  # WriteTxnMarkers, which no client may send
        b"\0\0\0\x0a\x03\xe7\0\0\0\0\0\x01\xff\xff",
    ],
)
def test_what_is_not_kafka_is_closed(gateway: GatewayProcess, data: bytes) -> None:
    assert exchange(gateway, data) == b""


def test_an_api_versions_of_the_future_is_answered(gateway: GatewayProcess) -> None:
    answer = exchange(gateway, b"\0\0\0\x0c\0\x12\0\x63\0\0\0\x05\xff\xff\x07\x07")
    assert answer[4:10] == b"\0\0\0\x05\0\x23"  # UNSUPPORTED_VERSION, in version 0


# -- clients that hold others up ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose limits of time are a second, and that has little room for what is under way."""
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    limits = ["--connections-max=40", "--connections-per-ip-max=35"]
    times = dict.fromkeys(CONSTANTS, "1")
    with GatewayProcess(servers, "gateway-strict", tmp_path_factory.mktemp("gateways"), limits, times) as process:
        yield process


def await_end(connection: socket.socket, send: Callable[[], None] = lambda: None) -> None:
    """Wait until the gateway closes a connection, while something goes on being sent."""
    connection.settimeout(0.1)

    def is_closed() -> bool:
        try:
            send()
            return connection.recv(65_536) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    eventually(is_closed, "the gateway closes a connection that holds it up")


def send_for_ever(connection: socket.socket, data: bytes) -> None:
    """Send, and take no answers."""
    while True:
        connection.sendall(data)


def test_clients_that_hold_the_gateway_up_are_closed_and_others_go_on(
    site: Site, strict: GatewayProcess, ledger: str, unique_name: Callable[[str], str]
) -> None:
    versions = wire.framed(wire.write_request(Api.API_VERSIONS, 0, 1, "slow", {}))

    def opened() -> socket.socket:
        return stack.enter_context(socket.create_connection(("127.0.0.1", strict.port), ANSWER_S))

    with ExitStack() as stack, Beside(strict, ledger, unique_name("beside")) as beside:
        for _ in range(3):  # more than there is room for
            half = [opened() for _ in range(10)]
            for number, connection in enumerate(half):
                connection.sendall((90 << 20).to_bytes(4, "big") + bytes(number))
            idle = [opened() for _ in range(10)]
            for connection in idle[5:]:
                connection.sendall(versions)
            for connection in half[5:]:
                await_end(connection, lambda connection=connection: connection.sendall(b"x"))  # type: ignore[misc]
            for connection in (*half[:5], *idle):
                await_end(connection)
            beside.await_more()
        deaf = opened()
        with pytest.raises(ConnectionError):
            send_for_ever(deaf, versions)
        beside.await_more()
    assert values(site.committed(ledger)) == Counter(f"{number}".encode() for number in range(beside.committed))


def test_many_large_listings_hold_up_nobody_and_end_with_their_clients(
    site: Site, servers: Servers, orders: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    """The ids of 70 requests are those of 1.4 million; what producers do needs the same few threads and ZooKeeper."""
    names = [f"nobody-has-used-this-{number}" for number in range(20_000)]
    request = wire.framed(wire.write_request(Api.DESCRIBE_TRANSACTIONS, 0, 1, "lister", {"transactional_ids": names}))
    with GatewayProcess(servers, unique_name("listing"), tmp_path, ["--workers=4"]) as listing, ExitStack() as stack:
        for _ in range(70):
            connection = socket.create_connection(("127.0.0.1", listing.port), ANSWER_S)
            stack.enter_context(connection).sendall(request)
        check_alive(site, listing, orders, unique_name("beside"))
        assert psutil.Process(listing.pid).memory_info().rss < RSS_MAX
        stack.close()
        [answer] = answers(listing, request, 1)
        codes = [item.error_code for item in wire.read_answer(answer, Api.DESCRIBE_TRANSACTIONS, 0).transaction_states]
        assert Counter(codes) == {
            ErrorCode.transactional_id_not_found: IDS_MAX,
            ErrorCode.coordinator_load_in_progress: len(names) - IDS_MAX,
        }, "the rest is to be asked for again, as Java's admin client does"
        assert "taken for dead" not in listing.log.read_text(errors="replace")


def answers(gateway: GatewayProcess, data: bytes, count: int) -> list[bytes]:
    """Send requests, and return so many answers without their lengths."""
    with socket.create_connection(("127.0.0.1", gateway.port), ANSWER_S) as connection:
        connection.sendall(data)
        with connection.makefile("rb") as said:
            return [said.read(int.from_bytes(said.read(4), "big")) for _ in range(count)]


def test_a_listing_that_is_too_large_closes_its_connection(gateway: GatewayProcess) -> None:
    values = {"transactional_ids": ["x" * 1_000] * (LISTING_BYTES_MAX // 1_000 + 1)}
    assert exchange(gateway, wire.framed(wire.write_request(Api.DESCRIBE_TRANSACTIONS, 0, 1, "lister", values))) == b""


def test_one_address_cannot_fill_a_gateway_and_who_says_nothing_leaves_soon(
    site: Site, strict: GatewayProcess, orders: str, unique_name: Callable[[str], str]
) -> None:
    with ExitStack() as stack:
        silent = [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", strict.port), ANSWER_S, source_address=("127.0.0.2", 0))
            )
            for _ in range(50)
        ]
        check_alive(site, strict, orders, unique_name("beside"))  # of another address
        for connection in silent:
            await_end(connection)
    assert "network=127.0.0.2 of_network=35 network_limit=35" in strict.log.read_text()


def test_who_never_begins_its_tls_handshake_counts_and_leaves_soon(
    site: Site, orders: str, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    name = unique_name("gateway")
    limits = [f"--certificate={CERTIFICATES / 'server.pem'}", "--connections-max=40", "--connections-per-ip-max=35"]
    with GatewayProcess(servers, name, tmp_path, limits) as gateway, ExitStack() as stack:
        silent = [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", gateway.port), ANSWER_S, source_address=("127.0.0.2", 0))
            )
            for _ in range(50)
        ]
        for connection in silent[35:]:
            await_end(connection)  # refused at once: there is no room for it
        tls = {"security.protocol": "SSL", "ssl.ca.location": str(CERTIFICATES / "ca.pem")}
        # No transaction: its coordinator may be another gateway of this site, which has no TLS.
        found = AdminClient({"bootstrap.servers": gateway.address, **tls}).list_topics(topic_of(orders), timeout=60)
        assert found.topics[topic_of(orders)].error is None
        for connection in silent:
            await_end(connection)
        log = gateway.log.read_text()
    assert "Traceback" not in log
    assert "network=127.0.0.2 of_network=35 network_limit=35" in log
