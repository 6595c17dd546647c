"""What a leader asks brokers for beside its rounds: each partition is answered, or refused, alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from integration_tests.backends.interface import AnyCluster
from integration_tests.kafka_tools import create_topic, produce
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.config import ConnectionSettings
from rollbridge.errors import InvalidRequestError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.seal import SEALED
from rollbridge.lease import Lease
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.core import effects as fx
from rollbridge_coordinator.core.condition_reader import RetentionReader
from rollbridge_coordinator.core.interpreter import Interpreter


def test_records_are_deleted_where_that_can_be_done_and_refused_for_every_other_partition(
    cluster: AnyCluster, unique_name: Callable[[str], str]
) -> None:
    servers = cluster.bootstrap_servers
    topic, short, missing = unique_name("topic"), unique_name("short"), unique_name("missing")
    for name in (topic, short):
        create_topic(servers, name)
        produce(servers, name, [b"1", b"2", b"3"])
    with KafkaClient(servers) as kafka:
        reader = RetentionReader(kafka)
        assert reader.delete({(topic, 0): 2, (missing, 0): 1, (short, 0): 99}) == {(missing, 0), (short, 0)}
        assert kafka.offsets.first([topic, short]) == {topic: 2, short: 0}
        assert reader.delete({(topic, 0): 1}) == frozenset(), "what is gone already needs no deletion"


def test_a_topic_to_which_partitions_were_added_while_it_was_closed_is_opened_again(
    cluster: AnyCluster, unique_name: Callable[[str], str]
) -> None:
    """They are not among those that are sealed, so what brokers have taken there would end nowhere."""
    servers, topic, group = cluster.bootstrap_servers, unique_name("topic"), GroupName(unique_name("scope"))
    create_topic(servers, topic)
    settings = CoordinatorSettings(
        connection=ConnectionSettings(bootstrap_servers=servers, zookeeper=cluster.zookeeper)
    )
    with (
        ZooKeeperSession(cluster.zookeeper, root=f"/{group.scope}") as session,
        KafkaClient(servers) as kafka,
    ):
        session.ensure(paths.controller(group), b"")
        lead = Lease(session, paths.leader(group), paths.controller(group))
        assert lead.take(b"me") is None
        interpreter = Interpreter(settings, kafka, group, session, lead, lambda: 0)
        before = kafka.topics.describe([topic])
        effect = fx.Seal([(topic, 0)], {topic: str(before[topic].topic_id)})
        kafka.topics.set_topic_config(topic, SEALED)
        interpreter._open_again(effect, before)
        assert kafka.topics.describe([topic])[topic].sealed, "it is as it was"
        grown = AdminClient({"bootstrap.servers": servers})
        grown.create_partitions([NewPartitions(topic, 2)])[topic].result(PATIENCE_S)
        eventually(lambda: kafka.topics.look([topic])[topic].partitions == 2, "the broker knows it")
        with pytest.raises(InvalidRequestError, match="partitions were added"):
            interpreter._open_again(effect, before)
        eventually(lambda: not kafka.topics.describe([topic])[topic].sealed, "its writers go on")
        interpreter.close()
