"""What a leader asks brokers for beside its rounds: each partition is answered, or refused, alone."""

from __future__ import annotations

from collections.abc import Callable

from integration_tests.backends.interface import AnyCluster
from integration_tests.kafka_tools import create_topic, produce
from rollbridge.kafka.client import KafkaClient
from rollbridge_coordinator.core.condition_reader import RetentionReader


def test_records_are_deleted_where_that_can_be_done_and_refused_for_every_other_partition(
    cluster: AnyCluster, unique_name: Callable[[str], str]
) -> None:
    servers = cluster.bootstrap_servers
    topic, short, missing = unique_name("topic"), unique_name("short"), unique_name("missing")
    for name in (topic, short):
        create_topic(servers, name)
        produce(servers, name, [b"1", b"2", b"3"])
    with KafkaClient(servers) as kafka:
        reader, admin = RetentionReader(kafka), kafka.topics
        assert reader.delete({(topic, 0): 2, (missing, 0): 1, (short, 0): 99}) == {(missing, 0), (short, 0)}
        assert admin.start_offsets([topic, short]) == {topic: 2, short: 0}
        assert reader.delete({(topic, 0): 1}) == frozenset(), "what is gone already needs no deletion"
