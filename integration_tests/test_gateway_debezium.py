"""Debezium at a gateway: the initial snapshot of a database is one rolling transaction, whatever becomes of it."""

from __future__ import annotations

from pathlib import Path

import rollbridge
from integration_tests.clients import Site, adopt, open_values, read_committed, stream_of
from integration_tests.foreign.connect import adopt_topics_of_worker
from integration_tests.foreign.debezium import OrdersTable, play
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.kafka_tools import create_topic, produce
from integration_tests.postgres import Postgres

DAYS_7_MS = 7 * 24 * 3_600 * 1_000


def test_a_snapshot_is_one_transaction_that_holds_nobody_up_and_changes_follow_once(
    site: Site, client: rollbridge.Bridge, topic_prefix: str, tmp_path: Path
) -> None:
    """The worker is killed, the database breaks the connection, and the gateway dies in the snapshot and behind it."""
    servers, topic = site.cluster.bootstrap_servers, f"{topic_prefix}.public.orders"
    create_topic(servers, topic)
    adopt(client, topic)
    adopt_topics_of_worker(client, topic_prefix)
    written: list[bytes] = []

    def committed() -> list[bytes]:
        return [message.value() or b"" for message in read_committed(servers, [topic])]

    def write() -> None:
        """Others write, with and without a rolling transaction, and a reader finds that and nothing of the snapshot."""
        written.extend(b"other-%d" % (len(written) + number) for number in range(2))
        produce(servers, topic, written[-2:-1])
        with client.begin(stream_of(client, topic)) as transaction:
            transaction.write(stream_of(client, topic), key=b"others", value=written[-1])
        assert committed() == written

    with (
        Postgres() as database,
        GatewayProcess(Servers(servers, site.cluster.zookeeper, site.root), "gateway-debezium", tmp_path) as gateway,
    ):
        orders = OrdersTable(database, gateway.address, topic_prefix, tmp_path / "orders", DAYS_7_MS)
        play(orders, committed, lambda: open_values(client, topic), write, gateway.revive)
    assert committed()[: len(written)] == written
