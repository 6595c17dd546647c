"""A program of :mod:`integration_tests.foreign` straight at a broker: what a gateway spares those beside it."""

from __future__ import annotations

from pathlib import Path

from confluent_kafka import TopicPartition

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import read_committed
from integration_tests.foreign.debezium import OrdersTable, play
from integration_tests.kafka_tools import create_topic, produce, read_all
from integration_tests.postgres import Postgres

BROKERS_MOST_MS = 900_000
"""The longest that a broker lets a transaction be open, unless it is told otherwise."""


def test_a_snapshot_of_debezium_is_one_transaction_which_holds_others_up(
    cluster: AnyCluster, topic_prefix: str, tmp_path: Path
) -> None:
    servers, topic = cluster.bootstrap_servers, f"{topic_prefix}.public.orders"
    create_topic(servers, topic)
    written: list[bytes] = []

    def committed() -> list[bytes]:
        return [value or b"" for value in read_all(servers, TopicPartition(topic, 0))]

    def arrived() -> list[bytes]:
        return [message.value() or b"" for message in read_committed(servers, [topic], isolation="read_uncommitted")]

    def write() -> None:
        written.append(b"other-%d" % len(written))
        produce(servers, topic, written[-1:])
        assert written[-1] not in committed()

    with Postgres() as database:
        orders = OrdersTable(database, servers, topic_prefix, tmp_path / "orders", BROKERS_MOST_MS)
        play(orders, committed, arrived, write, lambda: None)
    assert set(written) <= set(committed())
