"""The same requests at a broker and at a gateway: answers differ where a table allows it, and nowhere else.

Sessions of clients are recorded before a gateway, and then played at both; requests that no client sends are made by
hand. All of a broker's topics are plain, and those that are written to in transactions are adopted at the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

import rollbridge
from integration_tests.clients import Site, adopt, read_committed, stream_of
from integration_tests.differences import BY_HAND, PAGE, SHARED, Difference, compared, judge, with_table
from integration_tests.foreign.java import NEWEST, OLDER, JavaError, JavaProducer
from integration_tests.foreign.others import franz, kafkajs, run
from integration_tests.foreign.tools import KafkaTools
from integration_tests.gateway_tools import CONFIGS, GROUPS, OFFSETS, TOPICS, TRANSACTIONS
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.kafka_tools import create_topic, produce
from integration_tests.patience import eventually
from integration_tests.recording import HOST, Recorder
from integration_tests.replaying import Line, Replay, Said
from integration_tests.wrong_requests import KINDS, Dialogue, ask_wrongly
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api

PARTITIONS: Final = 2


@pytest.fixture(scope="module")
def gateway(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway that tells its clients to come to where they are recorded."""
    folder = tmp_path_factory.mktemp("gateways")
    with GatewayProcess(servers, "gateway-differential", folder, [f"--advertise={HOST}"]) as process:
        yield process


def address_of(servers: str) -> tuple[str, int]:
    host, _, port = servers.split(",")[0].rpartition(":")
    return host, int(port)


Names = tuple[Mapping[str, str], Mapping[str, str]]


def differences(session: str, broker: Sequence[Said], here: Sequence[Said], names: Names) -> list[Difference]:
    found: list[Difference] = []
    for theirs, ours in zip(broker, here, strict=True):
        found += compared(session, theirs.what, theirs.api, theirs.answer, ours.answer, names)
    return found


def test_requests_that_no_client_sends_are_answered_as_by_a_broker(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, unique_name: Callable[[str], str]
) -> None:
    servers, prefix = site.cluster.bootstrap_servers, unique_name("hand")
    at_broker = {kind: f"{prefix}-b.{kind}" for kind in KINDS}
    at_gateway = {kind: f"{prefix}-g.{kind}" for kind in KINDS}
    at_gateway["ranges"] = stream_of(client, prefix).partition("/")[0] + f".{prefix}-ranges"
    for topics in (at_broker, at_gateway):
        for kind, (partitions, settings) in KINDS.items():
            if topics is at_gateway and kind == "ranges":
                client.admin.create_stream(topics[kind].replace(".", "/"), segments=2)
                continue
            create_topic(servers, topics[kind], partitions, settings)
            if topics is at_gateway:
                adopt(client, topics[kind])
    broker = Dialogue(address_of(servers), f"{prefix}-b", at_broker)
    here = Dialogue(("127.0.0.1", gateway.port + 1), f"{prefix}-g", at_gateway)
    for dialogue in (broker, here):
        with closing(dialogue.line):
            ask_wrongly(dialogue)
    names = [
        {**{name: f"{SHARED}.{kind}" for kind, name in side.topics.items()}, side.prefix: SHARED}
        for side in (broker, here)
    ]
    faults = judge(BY_HAND, differences(BY_HAND, broker.said, here.said, (names[0], names[1])))
    assert not faults, "\n".join(faults)


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "it is stale: run `python -m integration_tests.differences`"


# Sessions of clients


def librdkafka(address: str, prefix: str, folder: Path) -> None:
    source, target, name = f"{prefix}.source", f"{prefix}.target", f"{prefix}.id"
    admin = AdminClient({"bootstrap.servers": address})
    assert target in admin.list_topics(timeout=60).topics
    [described] = admin.describe_configs([ConfigResource(ResourceType.TOPIC, target)]).values()
    described.result(60)
    settings: dict[str, Any] = {"bootstrap.servers": address, "transactional.id": name, "linger.ms": 5}
    older, newer = Producer(settings), Producer(settings)
    reading = {"bootstrap.servers": address, "group.id": f"{prefix}.group", "enable.auto.commit": False}
    with closing(Consumer({**reading, "auto.offset.reset": "earliest"})) as consumer:
        consumer.subscribe([source])
        assert consumer.poll(60) is not None
        assert consumer.get_watermark_offsets(TopicPartition(source, 0), 60) == (0, 3)
        older.init_transactions(60)
        older.begin_transaction()
        for number in range(20):
            older.produce(target, key=f"key-{number}", value=f"{name}-{number}")
        place = TopicPartition(source, 0, 1)
        older.send_offsets_to_transaction([place], consumer.consumer_group_metadata(), 60)
        older.commit_transaction(60)
        assert consumer.committed([place], 60)[0].offset == 1
        older.begin_transaction()
        older.produce(target, key="k", value="aborted")
        older.flush(60)
        older.abort_transaction(60)
        older.begin_transaction()
        older.produce(target, key="k", value="fenced")
        older.flush(60)
    newer.init_transactions(60)
    with pytest.raises(KafkaException, match="fence"):
        older.commit_transaction(60)
    plain = Producer({"bootstrap.servers": address, "enable.idempotence": True})
    plain.produce(source, b"plain")
    assert plain.flush(60) == 0
    with closing(Consumer({**reading, "group.id": f"{prefix}.reader", "auto.offset.reset": "earliest"})) as consumer:
        consumer.assign([TopicPartition(target, number) for number in range(PARTITIONS)])
        assert consumer.poll(60) is not None


def java(version: str) -> Callable[[str, str, Path], None]:
    def session(address: str, prefix: str, folder: Path) -> None:
        source, target, name = f"{prefix}.source", f"{prefix}.target", f"{prefix}.id"
        with JavaProducer(address, name, folder / "java.log", client=version) as older:
            older.do("init")
            older.do("begin")
            older.write(target, 0, 20)
            older.do("copy", f"{prefix}.group", source, 0, 1, "note")
            older.do("commit")
            older.do("begin")
            older.write(target, 20, 30)
            older.do("abort")
            older.do("begin")
            assert older.do("consume", f"{prefix}.group", source, target) == "2"
            older.do("await")
            older.do("abort")
            assert older.do("committed", f"{prefix}.group", source, 0) == "1 note"
            older.do("begin")
            older.write(target, 30, 40)
            with JavaProducer(address, name, folder / "newer.log", client=version) as newer:
                newer.do("init")
                with pytest.raises(JavaError, match=r"Fenced|Epoch"):
                    older.do("commit")

    session.__name__ = f"java {version}"
    return session


def await_listed(address: str, transactional_id: str) -> None:
    """Wait until a gateway lists what is open, which it does a moment after it has begun; nobody records that."""
    request = wire.write_request(Api.LIST_TRANSACTIONS, 0, 1, None, {})

    def is_listed() -> bool:
        states = line.ask(Api.LIST_TRANSACTIONS, 0, request).transaction_states
        return any(item.transactional_id == transactional_id for item in states)

    with closing(Line(("127.0.0.1", int(address.rpartition(":")[2]) + 1))) as line:
        eventually(is_listed, f"{transactional_id} is listed")


def tools(address: str, prefix: str, folder: Path) -> None:
    source, target, group = f"{prefix}.source", f"{prefix}.target", f"{prefix}.group"
    with (
        JavaProducer(address, f"{prefix}.id", folder / "java.log") as producer,
        KafkaTools(folder / "tools.log") as tools,
    ):
        producer.do("init")
        producer.do("begin")
        producer.write(target, 0, 5, 0)
        producer.do("copy", group, source, 0, 1, "note")
        await_listed(address, f"{prefix}.id")
        for program, *arguments in (
            (TOPICS, "--describe", "--topic", target),
            (CONFIGS, "--describe", "--all", "--entity-type", "topics", "--entity-name", target),
            (OFFSETS, "--topic", source),
            (TRANSACTIONS, "list"),
            (TRANSACTIONS, "describe", "--transactional-id", f"{prefix}.id"),
            (TRANSACTIONS, "describe", "--transactional-id", f"{prefix}.nobody"),
            (TRANSACTIONS, "describe-producers", "--topic", target, "--partition", "0"),
            (TRANSACTIONS, "find-hanging", "--broker-id", "1", "--max-transaction-timeout", "0"),
        ):
            tools.run(program, "--bootstrap-server", address, *arguments)
        producer.do("commit")
        tools.run(GROUPS, "--bootstrap-server", address, "--describe", "--group", group)
        tools.run(GROUPS, "--bootstrap-server", address, "--describe", "--group", f"{prefix}.nobody")
        offsets = ("--reset-offsets", "--group", group, "--topic", source, "--to-latest", "--execute")
        tools.run(GROUPS, "--bootstrap-server", address, *offsets)


def program(command: Callable[[], list[str]]) -> Callable[[str, str, Path], None]:
    def session(address: str, prefix: str, folder: Path) -> None:
        run(command(), address, f"{prefix}.target", f"{prefix}.id", 20, "commit", "abort", "commit")

    session.__name__ = command.__name__
    return session


SESSIONS: Final = (
    librdkafka,
    java(NEWEST),
    java(OLDER),
    tools,
    program(kafkajs),
    program(franz),
)


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.__name__)
def test_sessions_of_clients_are_answered_as_by_a_broker(
    site: Site,
    client: rollbridge.Bridge,
    gateway: GatewayProcess,
    unique_name: Callable[[str], str],
    tmp_path: Path,
    session: Callable[[str, str, Path], None],
) -> None:
    servers, name = site.cluster.bootstrap_servers, unique_name("play")
    recorded, broker, here = (f"{name}-{where}" for where in "rbg")

    def prepare(prefix: str) -> None:
        create_topic(servers, f"{prefix}.source")
        produce(servers, f"{prefix}.source", [b"1", b"2", b"3"])
        create_topic(servers, f"{prefix}.target", PARTITIONS)
        if prefix != broker:
            adopt(client, f"{prefix}.target")

    prepare(recorded)
    with Recorder([gateway.port, gateway.port + 1]) as recorder:
        session(f"{HOST}:{gateway.port}", recorded, tmp_path)
    exchanges = recorder.exchanges()
    # Not before: tools ask about all the topics that there are, in pieces, and would ask about these in others.
    prepare(broker)
    prepare(here)
    at_broker = Replay(lambda _: address_of(servers), recorded, broker).play(exchanges)
    at_gateway = Replay(lambda port: ("127.0.0.1", port), recorded, here).play(exchanges)
    names = {broker: SHARED}, {here: SHARED}
    faults = judge(session.__name__, differences(session.__name__, at_broker, at_gateway, names))
    values = [
        sorted(
            (item.value() or b"").replace(prefix.encode(), b"")
            for item in read_committed(servers, [f"{prefix}.target"], partitions=PARTITIONS)
        )
        for prefix in (recorded, broker, here)
    ]
    assert values[0]
    assert values[0] == values[1] == values[2]
    assert not faults, "\n".join(faults)
