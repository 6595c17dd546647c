"""Bytes that are no requests: they get an error or a closed connection, and a gateway that serves all others."""

from __future__ import annotations

import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from integration_tests.clients import Site
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.test_gateway_librdkafka import producer_of, topic_of, values
from rollbridge.kafka.batches import BatchBuilder, stamp
from rollbridge_gateway import wire
from rollbridge_gateway.versions import TABLE, Api, Handling

MUTANTS = int(os.environ.get("EXAMPLES", "400"))
ANSWER_S = 30.0


@pytest.fixture(scope="module")
def gateway(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway for the tests of this module."""
    servers = Servers(site.cluster.bootstrap_servers, site.cluster.zookeeper, site.root)
    with GatewayProcess(servers, "gateway-hostile", tmp_path_factory.mktemp("gateways")) as process:
        yield process


def captures(topic: str) -> list[bytes]:
    """Sound requests of all APIs that a gateway decodes, in all versions, with their lengths."""
    builder = BatchBuilder(10_000)
    for number in range(3):
        builder.append(number, b"key", b"value", [("h", b"x")])
    batch = stamp(builder.build(), producer_id=(1 << 62) + 5, producer_epoch=1, base_sequence=0)
    fields = {
        "transactional_id": "hostile",
        "v3_and_below_transactional_id": "hostile",
        "producer_id": (1 << 62) + 5,
        "v3_and_below_producer_id": (1 << 62) + 5,
        "producer_epoch": 1,
        "v3_and_below_producer_epoch": 1,
        "acks": -1,
        "group_id": "hostile-group",
        "key": "hostile",
        "key_type": 1,
        "coordinator_keys": ["hostile", "more"],
        "client_software_name": "hostile",
        "client_software_version": "1",
        "topic_data": [{"name": topic, "partition_data": [{"index": 0, "records": batch}]}],
        "v3_and_below_topics": [{"name": topic, "partitions": [0, 1]}],
        "transactional_ids": ["hostile"],
    }
    topics = {
        Api.METADATA: [{"name": topic}],
        Api.TXN_OFFSET_COMMIT: [
            {"name": topic, "partitions": [{"partition_index": 0, "committed_offset": 4, "committed_metadata": "m"}]}
        ],
        Api.DESCRIBE_PRODUCERS: [{"name": topic, "partition_indexes": [0]}],
    }
    found = []
    for key, served in TABLE.items():
        if served.room is Handling.RELAYED:
            continue
        for version in range(served.low, served.high + 1):
            if key == Api.PRODUCE and version < 3:
                continue
            values = {**fields, "topics": topics.get(Api(key), [])}
            found.append(wire.framed(wire.write_request(key, version, 7, "hostile", values)))
    return found


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Another version of a request, most of them broken."""
    made = bytearray(data)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(made))
        match dice.randrange(6):
            case 0:
                made[at] ^= 1 << dice.randrange(8)
            case 1:
                made[at] = dice.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del made[at : at + dice.randrange(1, 9)]
            case 3:
                made[at:at] = dice.randbytes(dice.randrange(1, 9))
            case 4:
                made[at : at + 4] = dice.choice((b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\0\0\0\0"))
            case _:
                made[at:at] = made[at : at + dice.randrange(1, 30)]
        if not made:
            return b"\0"
    if dice.random() < 0.8 and len(made) > 4:  # with its own length, so that what is inside is looked at
        made[:4] = (len(made) - 4).to_bytes(4, "big")
    return bytes(made)


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
    """The gateway carries a transaction, and has met nothing that nobody foresaw."""
    producer = producer_of(gateway, transactional_id)
    producer.init_transactions(60)
    producer.begin_transaction()
    for i in range(100):
        producer.produce(topic_of(stream), key=f"{i}", value=f"{i}")
    producer.commit_transaction(60)
    assert values(site.committed(stream)) == Counter(f"{i}".encode() for i in range(100))
    log = gateway.log.read_text(errors="replace")
    assert "nobody foresaw" not in log, log[-6_000:]
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


@pytest.mark.long
def test_many_mutated_requests(
    site: Site, gateway: GatewayProcess, ledger: str, orders: str, unique_name: Callable[[str], str]
) -> None:
    known = captures(topic_of(orders))
    dice = random.Random(21)
    for _ in range(100_000):
        exchange(gateway, mutated(dice.choice(known), dice))
    check_alive(site, gateway, ledger, unique_name("after"))


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
