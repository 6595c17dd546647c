"""Offsets sent to a transaction are judged by their consumer group at once, at a gateway as at a broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final, NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from integration_tests.clients import Site, until
from integration_tests.gateway_clients import producer_of, topic_of, values
from integration_tests.gateways import GatewayProcess
from integration_tests.group_committers import Committer, topic
from rollbridge.stream.group_offsets import GroupMember, parse_group_metadata

__all__ = ["topic"]

PROTOCOLS: Final = ("classic", "consumer")


class Both(NamedTuple):
    """The same producer at a broker and at a gateway."""

    broker: Committer
    gateway: Committer

    def send(self, member: GroupMember, topic: str, *places: tuple[int, int, str]) -> list[str]:
        """Send the same to both; return the codes, which have to be the same."""
        found = [code.name for code in self.broker.send(member, topic, *places)]
        assert [code.name for code in self.gateway.send(member, topic, *places)] == found
        return found


@pytest.fixture
def both(site: Site, gateway: GatewayProcess, orders: str, unique_name: Callable[[str], str]) -> Iterator[Both]:
    host, port = site.cluster.bootstrap_servers.split(",")[0].rsplit(":", 1)
    name = unique_name("committer")
    found = Both(Committer((host, int(port)), name), Committer(("127.0.0.1", gateway.port + 1), name))
    yield found
    for committer in found:
        committer.connection.close()


def joined(stack: ExitStack, servers: str, group: str, topic: str, *before: Consumer, **settings: object) -> Consumer:
    """A member of a group, which has got partitions; so have those before it."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "enable.auto.commit": False, **settings})
    stack.callback(consumer.close)
    consumer.subscribe([topic])
    members = (*before, consumer)

    def is_shared() -> bool:
        for member in members:
            member.poll(0.1)
        return all(0 < len(member.assignment()) <= 2 // len(members) for member in members)

    until(is_shared)
    return consumer


def member_of(consumer: Consumer) -> GroupMember:
    return parse_group_metadata(consumer.consumer_group_metadata())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_and_generations_are_judged_as_by_a_broker(
    site: Site, both: Both, topic: str, unique_name: Callable[[str], str], protocol: str
) -> None:
    servers, group = site.cluster.bootstrap_servers, unique_name("group")
    place = (0, 5, "")
    with ExitStack() as stack:
        first = joined(stack, servers, group, topic, **{"group.protocol": protocol})
        before = member_of(first)
        assert both.send(before, topic, place) == ["none"]
        assert both.send(before._replace(generation=before.generation + 1), topic, place) == ["illegal_generation"]
        assert both.send(before._replace(member_id="ghost"), topic, place) == ["unknown_member_id"]
        assert both.send(before._replace(member_id=""), topic, place) == ["unknown_member_id"]
        assert both.send(GroupMember(group), topic, place) == ["none"]
        joined(stack, servers, group, topic, first, **{"group.protocol": protocol})
        after = member_of(first)
        assert after.generation > before.generation
        assert both.send(before, topic, place) == ["illegal_generation"]
        assert both.send(after, topic, place) == ["none"]
    assert both.send(after, topic, place) in (["unknown_member_id"], ["illegal_generation"])
    assert both.send(GroupMember(group), topic, place) == ["none"]


def test_a_static_member_that_was_replaced_is_fenced(
    site: Site, both: Both, topic: str, unique_name: Callable[[str], str]
) -> None:
    servers, group = site.cluster.bootstrap_servers, unique_name("group")
    with ExitStack() as stack:
        static = {"group.instance.id": "one"}
        member = member_of(joined(stack, servers, group, topic, **static))
        assert both.send(member, topic, (0, 5, "")) == ["none"]
        replaced = member_of(joined(stack, servers, group, topic, **static))
        assert both.send(replaced, topic, (0, 5, "")) == ["none"]
        assert both.send(member, topic, (0, 5, "")) == ["fenced_instance_id"]
        assert both.send(replaced._replace(instance_id="two"), topic, (0, 5, "")) == ["unknown_member_id"]


def test_other_mistakes_have_the_codes_of_a_broker(both: Both, topic: str, unique_name: Callable[[str], str]) -> None:
    nobody = GroupMember(unique_name("group"))
    assert both.send(nobody._replace(generation=3, member_id="ghost"), topic, (0, 1, "")) == ["illegal_generation"]
    assert both.send(nobody, topic, (0, 1, ""), (99, 1, ""), (1, 1, "x" * 5_000)) == [
        "none", "unknown_topic_or_partition", "offset_metadata_too_large"
    ]  # fmt: skip
    assert both.send(nobody, f"{topic}.none", (0, 1, "")) == ["unknown_topic_or_partition"]
    assert both.send(GroupMember(""), topic, (0, 1, "")) == ["invalid_group_id"]


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_a_rebalance_costs_a_producer_its_transaction_and_nothing_else(
    site: Site, gateway: GatewayProcess, orders: str, topic: str, unique_name: Callable[[str], str], is_before: bool
) -> None:
    """A second member joins before or after offsets are sent; nothing is read and written twice."""
    servers, group = site.cluster.bootstrap_servers, unique_name("group")
    place = TopicPartition(topic, 0, 5)
    producer = producer_of(gateway, unique_name("producer"))
    producer.init_transactions(60)
    with ExitStack() as stack:
        first = joined(stack, servers, group, topic)
        producer.begin_transaction()
        producer.produce(topic_of(orders), "lost")
        stale = first.consumer_group_metadata()
        if is_before:
            joined(stack, servers, group, topic, first)
        with pytest.raises(KafkaException) as refused:  # noqa: PT012 - which of them depends on the case
            producer.send_offsets_to_transaction([place], stale, 60)
            assert not is_before
            joined(stack, servers, group, topic, first)
            producer.commit_transaction(60)
        error = refused.value.args[0]
        assert error.txn_requires_abort(), error
        assert not error.fatal()
        producer.abort_transaction(60)
        assert first.committed([place], 60)[0].offset < 0
        producer.begin_transaction()
        producer.produce(topic_of(orders), "kept")
        producer.send_offsets_to_transaction([place], first.consumer_group_metadata(), 60)
        producer.commit_transaction(60)
        until(lambda: first.committed([place], 60)[0].offset == 5)
    assert values(site.committed(orders)) == {b"kept": 1}
