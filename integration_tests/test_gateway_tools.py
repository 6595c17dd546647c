"""Each of Kafka's own command-line tools, at a gateway and at a broker: both say the same, but of streams."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final, NamedTuple

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

import rollbridge
from integration_tests.clients import Site
from integration_tests.foreign.tools import KafkaTools
from integration_tests.gateway_clients import producer_of
from integration_tests.gateway_tools import CONFIGS, GROUPS, OFFSETS, TOOLS, TOPICS, TRANSACTIONS
from integration_tests.gateways import GatewayProcess
from integration_tests.kafka_tools import create_topic, produce
from integration_tests.patience import eventually
from rollbridge.metadata.gateways import GATEWAYS_FROM

PARTITIONS: Final = 8
"""Of a stream with key ranges, as a gateway tells of it by default."""


class Known(NamedTuple):
    """What there is: a topic with records, an adopted one, a stream by its topic, a group, an open transaction."""

    plain: str
    adopted: str
    virtual: str
    group: str
    open: str


@pytest.fixture(scope="module")
def known(site: Site, client: rollbridge.Bridge, gateway: GatewayProcess) -> Iterator[Known]:
    servers, prefix = site.cluster.bootstrap_servers, site.root.strip("/")
    found = Known(
        f"{prefix}.plain.all", f"{prefix}.adopted.all", f"{prefix}.orders", f"{prefix}-group", f"{prefix} left open"
    )
    create_topic(servers, found.plain, 2, {"max.message.bytes": "100000"})
    produce(servers, found.plain, [b"a", b"b", b"c"])
    create_topic(servers, found.adopted, 3)
    client.admin.adopt_topic(found.adopted, stream=f"{prefix}/adopted")
    client.admin.create_stream(found.virtual.replace(".", "/"), segments=2)
    with closing(Consumer({"bootstrap.servers": servers, "group.id": found.group})) as consumer:
        consumer.commit(offsets=[TopicPartition(found.plain, 0, 2)], asynchronous=False)
    admin = AdminClient({"bootstrap.servers": gateway.address})
    eventually(lambda: found.virtual in admin.list_topics(timeout=60).topics, "the gateway knows the stream")
    producer = producer_of(gateway, found.open)
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(found.virtual, b"1", b"1")
    producer.produce(found.adopted, b"1", b"1", 1)
    assert producer.flush(60) == 0
    yield found
    producer.abort_transaction(60)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaTools]:
    with KafkaTools(tmp_path_factory.mktemp("tools") / "tools.log") as tools:
        yield tools


Run = Callable[..., str]


@pytest.fixture
def at_gateway(tools: KafkaTools, gateway: GatewayProcess) -> Run:
    """Run a tool at the gateway, without an error, and return what it says."""

    def run(program: str, *arguments: str) -> str:
        code, said = tools.run(program, "--bootstrap-server", gateway.address, *arguments)
        assert code == 0, said
        return said

    return run


def lines_of(said: str) -> list[str]:
    """What a tool has printed, sorted, without addresses, times, and what is measured."""
    said = re.sub(r"[A-Za-z0-9.-]+:\d{4,5}\b", "HOST", said)
    said = re.sub(r"\d{4}-\d\d-\d\d[T ][0-9:.,Z]+", "TIME", said)
    said = re.sub(r'"(totalBytes|usableBytes)":\d+', "", said)
    return sorted(line.strip() for line in said.splitlines() if line.strip())


SAME: Final[dict[str, str]] = {
    "topics, one": f"{TOPICS} --describe --topic {{plain}}",
    "topics, an adopted one": f"{TOPICS} --describe --topic {{adopted}}",
    "topics, by a pattern": f"{TOPICS} --describe --topic {{plain}}|{{adopted}}",
    "topics, unavailable": f"{TOPICS} --describe --unavailable-partitions",
    "topics, under-replicated": f"{TOPICS} --describe --under-replicated-partitions",
    "topics, under min isr": f"{TOPICS} --describe --under-min-isr-partitions",
    "topics, not there": f"{TOPICS} --describe --topic nowhere.at.all",
    "configs of a topic": f"{CONFIGS} --describe --all --entity-type topics --entity-name {{plain}}",
    "configs of brokers": f"{CONFIGS} --describe --entity-type brokers",
    "configs of one broker": f"{CONFIGS} --describe --all --entity-type brokers --entity-name 1",
    "quotas": f"{CONFIGS} --describe --entity-type clients",
    "offsets": f"{OFFSETS} --topic {{plain}}",
    "offsets, earliest": f"{OFFSETS} --topic {{plain}} --time earliest",
    "offsets by time": f"{OFFSETS} --topic {{plain}} --time 1",
    "offsets, no topic": f"{OFFSETS} --topic nowhere.at.all",
    "log dirs": f"{TOOLS}.LogDirsCommand --describe --topic-list {{plain}}",
    "groups": f"{GROUPS} --describe --group {{group}}",
    "groups, members": f"{GROUPS} --describe --members --group {{group}}",
    "groups, reset": f"{GROUPS} --reset-offsets --to-earliest --dry-run --group {{group}} --topic {{plain}}",
    "groups of any kind": f"{TOOLS}.GroupsCommand --describe --group {{group}}",
    "producers": f"{TRANSACTIONS} describe-producers --topic {{plain}} --partition 0",
    "transactions, hanging": f"{TRANSACTIONS} find-hanging --topic {{plain}}",
    "reassignments": f"{TOOLS}.reassign.ReassignPartitionsCommand --list",
    "election": f"{TOOLS}.LeaderElectionCommand --election-type preferred --topic {{plain}} --partition 0",
    "acls": f"{TOOLS}.AclCommand --list",
    "tokens": f"{TOOLS}.DelegationTokenCommand --describe",
    "a topic that is there": f"{TOPICS} --create --topic {{plain}}",
    "a consumer": f"{TOOLS}.consumer.ConsoleConsumer --topic {{plain}} --from-beginning --max-messages 3",
}
"""Tools that say the same at both, whatever that is."""


@pytest.mark.parametrize("what", SAME)
def test_what_tools_say_of_topics_and_groups_of_the_brokers_is_the_same(
    site: Site, gateway: GatewayProcess, known: Known, tools: KafkaTools, what: str
) -> None:
    program, *arguments = SAME[what].format(**known._asdict()).split(" ")
    broker, other = (
        tools.run(program, "--bootstrap-server", address, *arguments)
        for address in (site.cluster.bootstrap_servers, gateway.address)
    )
    assert lines_of(broker.text) == lines_of(other.text)
    assert broker.code == other.code


def test_what_tools_say_of_all_topics_has_streams_as_well(
    site: Site, gateway: GatewayProcess, known: Known, tools: KafkaTools, at_gateway: Run
) -> None:
    """Other tests make topics meanwhile: those of this module are compared."""
    prefix = site.root.strip("/")
    for program, *arguments in ((TOPICS, "--list"), (TOPICS, "--describe"), (OFFSETS,)):
        at_broker = tools.run(program, "--bootstrap-server", site.cluster.bootstrap_servers, *arguments).text
        found = [line for line in lines_of(at_gateway(program, *arguments)) if prefix in line]
        ours = [line for line in found if re.search(rf"{re.escape(known.virtual)}(?![.a-z])", line)]
        assert [line for line in found if line not in ours] == [line for line in lines_of(at_broker) if prefix in line]
        assert len(ours) == {"--list": 1, "--describe": 1 + PARTITIONS}.get("".join(arguments), PARTITIONS)


def test_a_stream_is_described_as_an_empty_topic_with_the_settings_of_its_buffer(
    site: Site, known: Known, tools: KafkaTools, at_gateway: Run
) -> None:
    said = at_gateway(TOPICS, "--describe", "--topic", known.virtual)
    assert said.count("Partition: ") == PARTITIONS, said
    assert at_gateway(TOPICS, "--describe", "--at-min-isr-partitions", "--topic", known.virtual).count("Leader: ")
    for time, offset in (("latest", "0"), ("earliest", "0"), ("1", "")):
        said = at_gateway(OFFSETS, "--topic", known.virtual, "--time", time)
        wanted = [f"{known.virtual}:{number}:{offset}" for number in range(PARTITIONS)]
        assert said.split() == (wanted if offset else []), said
    [buffer] = [line for line in at_gateway(TOPICS, "--list").split() if line.startswith(f"{known.virtual}.trans")]
    configs = "--describe", "--all", "--entity-type", "topics", "--entity-name"
    at_broker = tools.run(CONFIGS, "--bootstrap-server", site.cluster.bootstrap_servers, *configs, buffer).text
    assert lines_of(at_gateway(CONFIGS, *configs, known.virtual)) == lines_of(at_broker.replace(buffer, known.virtual))


def test_internal_topics_are_left_out_where_consumers_leave_out_those_of_kafka(known: Known, at_gateway: Run) -> None:
    """As Java's consumers do with what a pattern matches, by what Metadata says; brokers do not know that of ours."""
    prefix = known.plain.partition(".")[0]
    ours = {topic for topic in at_gateway(TOPICS, "--list").split() if prefix in topic}
    shown = {topic for topic in at_gateway(TOPICS, "--list", "--exclude-internal").split() if prefix in topic}
    segments = {f"{known.virtual}.segment-{number}.epoch-0" for number in range(2)}
    assert shown == {known.plain, known.adopted, known.virtual} | segments
    assert len(ours - shown) >= 4, "two buffers, the commit log and what has ended"
    said = at_gateway(OFFSETS, "--exclude-internal-topics")
    assert {line.split(":")[0] for line in said.split() if prefix in line} == shown


@pytest.mark.parametrize(
    ("program", "arguments", "advice"),
    [
        (TOPICS, "--create --topic {virtual}", "already exists|choose another name"),
        (TOPICS, "--delete --topic {virtual}", "rollbridge stream delete"),
        (TOPICS, "--alter --partitions 20 --topic {virtual}", "rollbridge stream scale"),
        (CONFIGS, "--alter --add-config retention.ms=1 --entity-type topics --entity-name {virtual}", "stream update"),
    ],
)
def test_a_stream_is_not_created_or_changed_as_a_topic(
    gateway: GatewayProcess, known: Known, tools: KafkaTools, program: str, arguments: str, advice: str
) -> None:
    said = tools.run(program, "--bootstrap-server", gateway.address, *arguments.format(virtual=known.virtual).split())
    assert said.code == 1, said.text
    assert re.search(advice, said.text), said.text


def test_open_transactions_are_found_and_none_of_them_hangs(known: Known, tools: KafkaTools, at_gateway: Run) -> None:
    eventually(lambda: known.open in at_gateway(TRANSACTIONS, "list"), "the open transaction is listed")
    said = at_gateway(TRANSACTIONS, "describe", "--transactional-id", known.open)
    counts = {known.virtual: PARTITIONS, known.adopted: 3}
    places = {f"{topic}-{number}" for topic, count in counts.items() for number in range(count)}
    assert places <= set(re.split(r"[\s,]+", said)), said
    for topic in (known.virtual, known.adopted):
        said = at_gateway(TRANSACTIONS, "describe-producers", "--topic", topic, "--partition", "1")
        assert len(said.splitlines()) == 2, said
        said = at_gateway(TRANSACTIONS, "find-hanging", "--max-transaction-timeout", "0", "--topic", topic)
        assert len(said.splitlines()) == 1, said
    said = at_gateway(TRANSACTIONS, "find-hanging", "--max-transaction-timeout", "0", "--broker-id", "1")
    assert not re.search(rf"{re.escape(known.virtual)}|{re.escape(known.adopted)}", said), said


def test_an_id_of_a_producer_that_was_at_the_brokers_before_is_described(
    site: Site, gateway: GatewayProcess, known: Known, at_gateway: Run
) -> None:
    """Brokers say of what is not open that it has begun at -1, which is no time."""
    name = f"{known.group}-moved"
    for address in (site.cluster.bootstrap_servers, gateway.address):
        Producer({"bootstrap.servers": address, "transactional.id": name}).init_transactions(60)
    said = at_gateway(TRANSACTIONS, "describe", "--transactional-id", name)
    assert re.search(rf"{name}\s+\d+\s+0\s+Empty", said), said


def test_tools_that_ask_all_nodes_hear_of_each_thing_once(known: Known, at_gateway: Run) -> None:
    assert known.group in at_gateway(GROUPS, "--list").split()
    said = at_gateway(f"{TOOLS}.LogDirsCommand", "--describe")
    assert said.count(f'"partition":"{known.plain}-0"') == 1, said
    said = at_gateway(f"{TOOLS}.BrokerApiVersionsCommand")
    assert said.count("(id: 1 ") == 1, said


def test_gateways_have_no_settings_of_brokers(gateway: GatewayProcess) -> None:
    """Tools of others describe all nodes that Metadata names, and give up with the first error."""
    admin = AdminClient({"bootstrap.servers": gateway.address})
    nodes = sorted(admin.list_topics(timeout=60).brokers)
    assert [node >= GATEWAYS_FROM for node in nodes] == [False, True]
    asked = [admin.describe_configs([ConfigResource(ResourceType.BROKER, str(node))]) for node in nodes]
    assert [bool(future.result(60)) for found in asked for future in found.values()] == [True, False]
