"""What clients are told of the cluster: addresses of one gateway, the others beside it, and virtual topics."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from rollbridge.metadata.gateways import GATEWAYS_FROM
from rollbridge.stream.names import StreamName
from rollbridge_gateway.protocol import wire
from rollbridge_gateway.protocol.versions import Api
from rollbridge_gateway.server.cluster import Gateway, View, chosen, chosen_broker, topic_id

GATEWAYS = tuple(
    Gateway(f"gateway-{number}", f"g{number}", 9192, ((1, 9193), (2, 9194), (3, 9195))) for number in range(4)
)
NAMES = st.text(max_size=20)


@given(NAMES, st.sets(st.integers(0, 3), min_size=2))
def test_all_gateways_agree_and_only_clients_of_the_dead_move(key: str, numbers: set[int]) -> None:
    alive = [GATEWAYS[number] for number in numbers]
    first = chosen(key, alive)
    assert chosen(key, reversed(alive)) == first
    for gone in alive:
        left = [item for item in alive if item != gone]
        assert (chosen(key, left) == first) == (gone != first)


def test_clients_are_spread() -> None:
    counts = Counter(chosen(f"producer-{number}", GATEWAYS).name for number in range(4_000))
    assert all(800 < count < 1_200 for count in counts.values())
    assert {chosen_broker(f"id-{number}", (1, 2, 3)) for number in range(50)} == {1, 2, 3}


def test_node_ids_are_not_brokers_and_stay() -> None:
    ids = [item.node_id for item in GATEWAYS]
    assert len(set(ids)) == 4
    assert all(GATEWAYS_FROM <= node < 1 << 31 for node in ids)
    assert replace(GATEWAYS[0], ports=()).node_id == ids[0]


@given(st.sampled_from(GATEWAYS), NAMES, st.integers(1, 65_535))
def test_a_coordinator_at_another_address_is_another_one(gateway: Gateway, host: str, port: int) -> None:
    """So that librdkafka does not go on with the address that it has, see ``rollbridge_gateway.server.cluster``."""
    moved = replace(gateway, host=host, port=port)
    assert (moved.node_id == gateway.node_id) == ((host, port) == (gateway.host, gateway.port))
    assert View((moved,), {}).coordinator("me") == (moved.node_id, host, port)


@given(NAMES, st.sets(st.sampled_from(GATEWAYS), min_size=1))
def test_a_coordinator_is_listed_by_each_gateway(key: str, live: set[Gateway]) -> None:
    """librdkafka takes none that Metadata has not told it of, and Java's admin waits until it has."""
    view = View(tuple(live), {})
    for asks in (key, None, "another client"):
        found = view.metadata(answer(Api.METADATA, 12, {"brokers": BROKERS}), asks, None)
        assert view.coordinator(key) in {(int(item.node_id), item.host, int(item.port)) for item in found.brokers}


def answer(key: int, version: int, values: dict[str, Any]) -> Any:
    return wire.build(wire.schema(key, version, EntityType.response), values)


BROKERS = [{"node_id": node, "broker_id": node, "host": f"broker-{node}", "port": 9092} for node in (1, 2, 3)]
TOPIC = {
    "name": "plain",
    "topic_id": topic_id("plain"),
    "partitions": [{"partition_index": 0, "leader_id": 2, "replica_nodes": [2], "isr_nodes": [2]}],
}


@pytest.mark.parametrize(
    ("key", "version"), [(Api.METADATA, 1), (Api.METADATA, 13), (Api.DESCRIBE_TOPIC_PARTITIONS, 0)]
)
def test_topics_of_ours_are_internal_and_those_of_others_are_not(key: Api, version: int) -> None:
    ours = [
        "topics.orders.transaction-buffer",
        "topics.orders.transaction-buffer.epoch-3",
        StreamName.of_topic("orders").internal_buffer_topic(3),
        "topics.default.commit-log",
        "topics.__transaction_buffer_snapshot_indexes",
        "__terminated_txn_state_topics.default",
    ]
    others = ["orders", "payments.all.commit-log", "topics.orders.segment-0.epoch-1", "orders.transaction-buffer"]
    found = answer(key, version, {"topics": [{**TOPIC, "name": name} for name in (*ours, *others)]})
    view = View(GATEWAYS, {}, frozenset(("topics.default.commit-log",)))
    told = view.metadata(found, "me", None) if key == Api.METADATA else view.describe_topics(found, (1,), ())
    assert [str(item.name) for item in told.topics if item.is_internal] == ours


@pytest.mark.parametrize("version", range(14))
def test_metadata(version: int) -> None:
    view = View(GATEWAYS, {"sales.orders": 8})
    found = view.metadata(answer(Api.METADATA, version, {"brokers": BROKERS, "topics": [TOPIC]}), "me", None)
    mine = chosen("me", GATEWAYS)
    listed = {int(item.node_id): (item.host, int(item.port)) for item in found.brokers}
    for node in (1, 2, 3):
        assert listed.pop(node) == (mine.host, mine.port_of(node))
    assert listed == {item.node_id: (item.host, item.port) for item in GATEWAYS}
    topics = {item.name: item for item in found.topics}
    assert topics["plain"] == answer(Api.METADATA, version, {"topics": [TOPIC]}).topics[0]
    virtual = topics["sales.orders"]
    assert [int(part.partition_index) for part in virtual.partitions] == list(range(8))
    assert len({part.leader_id for part in virtual.partitions} - {1, 2, 3}) == 0
    wire.read_answer(wire.write_entity(found, 7), Api.METADATA, version)


@pytest.mark.parametrize("version", range(14))
def test_metadata_of_a_cluster_that_elects_leaders(version: int) -> None:
    view = View(GATEWAYS, {"sales.orders": 8})
    values = {"brokers": BROKERS, "topics": [TOPIC]}
    found = view.metadata(answer(Api.METADATA, version, values), "me", None, hides_brokers=True)
    assert {int(item.node_id) for item in found.brokers} == {item.node_id for item in GATEWAYS}
    partitions = [part for topic in found.topics for part in topic.partitions]
    assert len(partitions) == 9
    assert {(int(part.leader_id), part.error_code) for part in partitions} == {(-1, ErrorCode.leader_not_available)}
    wire.read_answer(wire.write_entity(found, 7), Api.METADATA, version)


@pytest.mark.parametrize("version", range(14))
def test_metadata_has_of_virtual_topics_what_was_asked_for(version: int) -> None:
    kind = wire.schema(Api.METADATA, version, EntityType.request)
    asked = wire.build(kind, {"topics": [{"name": "sales.orders"}, {"name": "no.such"}]}).topics
    view = View(GATEWAYS[:1], {"sales.orders": 2, "sales.other": 2})
    found = view.metadata(answer(Api.METADATA, version, {"brokers": BROKERS, "topics": []}), None, asked)
    assert [item.name for item in found.topics] == ["sales.orders"]


@pytest.mark.parametrize("version", range(3))
def test_describe_cluster(version: int) -> None:
    found = View(GATEWAYS, {}).describe_cluster(answer(Api.DESCRIBE_CLUSTER, version, {"brokers": BROKERS}), "x")
    assert {item.host for item in found.brokers} == {chosen("x", GATEWAYS).host}


@pytest.mark.parametrize("version", range(7))
def test_find_coordinator(version: int) -> None:
    one = {"node_id": 2, "host": "broker-2", "port": 9092}
    gone = {"node_id": -1, "host": "", "port": -1}
    values: dict[str, Any] = one if version < 4 else {"coordinators": [one, gone]}
    found = View(GATEWAYS, {}).find_coordinator(answer(Api.FIND_COORDINATOR, version, values), "x")
    mine = chosen("x", GATEWAYS)
    told = found if version < 4 else found.coordinators[0]
    assert (told.host, int(told.port)) == (mine.host, mine.port_of(2))
    if version >= 4:
        assert found.coordinators[1].host == ""


def test_a_broker_without_a_port_is_reached_by_the_first_one() -> None:
    assert GATEWAYS[0].port_of(9) == 9192


@pytest.mark.parametrize("code", [ErrorCode.topic_authorization_failed, ErrorCode.unknown_topic_or_partition])
def test_a_virtual_topic_that_a_client_is_not_told_of_has_the_reason(code: ErrorCode) -> None:
    view = View(GATEWAYS, {"sales.orders": 8})
    asked = wire.build(wire.schema(Api.METADATA, 12, EntityType.request), {"topics": [{"name": "sales.orders"}]}).topics
    known = answer(Api.METADATA, 12, {"brokers": BROKERS, "topics": []})
    [told] = view.metadata(known, "me", asked, {"sales.orders": code}).topics
    assert (told.name, told.error_code, told.partitions) == ("sales.orders", code, ())
