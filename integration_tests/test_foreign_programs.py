"""The programs of :mod:`integration_tests.foreign` straight at a broker: what is compared with the gateway is sound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import read_committed
from integration_tests.foreign.bounded import BoundedSource, play
from integration_tests.foreign.connect import BOUNDARIES_OF_WORKERS, ConnectWorker
from integration_tests.foreign.debezium import OrdersTable
from integration_tests.foreign.debezium import play as play_table
from integration_tests.foreign.java import CLIENTS, JavaError, JavaProducer
from integration_tests.foreign.others import OTHERS, run
from integration_tests.kafka_tools import create_topic, produce, read_all
from integration_tests.patience import PATIENCE_S, eventually
from integration_tests.postgres import Postgres
from spark_examples.demo.flink_job import STRATEGIES, FlinkJob

BROKERS_MOST_MS = 900_000
"""The longest that a broker lets a transaction be open, unless it is told otherwise."""


@pytest.fixture
def topic(cluster: AnyCluster, topic_prefix: str) -> str:
    create_topic(cluster.bootstrap_servers, topic_prefix)
    return topic_prefix


def values_of(servers: str, topic: str, partitions: int = 1) -> list[str]:
    found = (value for number in range(partitions) for value in read_all(servers, TopicPartition(topic, number)))
    return [(value or b"").decode() for value in found]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_producer_in_java_does_what_it_is_told(cluster: AnyCluster, topic: str, tmp_path: Path, client: str) -> None:
    servers = cluster.bootstrap_servers
    with JavaProducer(servers, topic, tmp_path / "java.log", client=client) as java:
        with pytest.raises(JavaError) as raised:
            java.do("begin")
        assert raised.value.kind == "IllegalStateException"
        java.do("init")
        java.do("begin")
        java.write(topic, 0, 10)
        java.do("copy", topic, topic, 0, 5, "note")
        java.do("commit")
        java.do("begin")
        java.write(topic, 10, 20)
        java.do("abort")
        assert java.do("committed", topic, topic, 0) == "5 note"
        java.do("begin")
        copied = int(java.do("consume", f"{topic}-copier", topic, topic))
        java.do("commit")
        assert java.do("committed", f"{topic}-copier", topic, 0).endswith(" note 0"), (
            "with the leader epoch of the record"
        )
    written = [f"{topic}-{number}" for number in range(10)]
    assert values_of(servers, topic) == [*written, *written[:copied]]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_in_flink_goes_on_from_its_checkpoint(
    cluster: AnyCluster, topic: str, tmp_path: Path, strategy: str
) -> None:
    servers, records = cluster.bootstrap_servers, 5_000
    create_topic(servers, f"{topic}-out", 2)
    given = {
        "bootstrap": servers,
        "topic": f"{topic}-out",
        "prefix": topic,
        "records": records,
        "rate": 1_000,
        "strategy": strategy,
        "interval_ms": 500,
    }
    with FlinkJob(tmp_path / "flink", **given) as job:
        eventually(lambda: job.checkpoints >= 2 or not job.alive, "two checkpoints")
    with FlinkJob(tmp_path / "flink", **given, **{"from": job.latest_checkpoint()}) as again:
        again.finish(PATIENCE_S)
    found = values_of(servers, f"{topic}-out", 2)
    assert sorted(found) == sorted(f"{topic}-{number}" for number in range(records))


@pytest.mark.parametrize("program", OTHERS)
def test_programs_in_other_languages_commit_and_abort(
    cluster: AnyCluster, topic: str, program: Callable[[], list[str]]
) -> None:
    run(program(), cluster.bootstrap_servers, topic, topic, 100, "commit", "abort", "commit")
    expected = [number for number in range(300) if not 100 <= number < 200]
    assert values_of(cluster.bootstrap_servers, topic) == [f"{topic}-{number}" for number in expected]


@pytest.mark.long
@pytest.mark.parametrize("boundary", BOUNDARIES_OF_WORKERS)
def test_a_worker_of_connect_that_is_killed_copies_each_line_once(
    cluster: AnyCluster, topic: str, tmp_path: Path, boundary: str
) -> None:
    lines = [f"line-{number}" for number in range(2_000)]
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"{line}\n" for line in lines[:1_000]))
    settings = {"transaction_boundary": boundary, "batch_size": 100, "transaction_boundary_interval_ms": 200}
    with ConnectWorker(cluster.bootstrap_servers, topic, tmp_path / "connect") as worker:
        worker.source("copy", file, topic, **settings)
        eventually(lambda: len(values_of(cluster.bootstrap_servers, topic)) >= 300, "some lines are copied")
    with file.open("a") as more:
        more.write("".join(f"{line}\n" for line in lines[1_000:]))
    with ConnectWorker(cluster.bootstrap_servers, topic, tmp_path / "connect"):
        eventually(lambda: len(values_of(cluster.bootstrap_servers, topic)) >= len(lines), "all lines are copied")
    assert values_of(cluster.bootstrap_servers, topic) == lines


@pytest.mark.long
def test_a_connector_that_says_where_its_transactions_end_commits_whole_ones(
    cluster: AnyCluster, topic: str, tmp_path: Path
) -> None:
    servers = cluster.bootstrap_servers

    def arrived() -> list[str]:
        found = read_committed(servers, [topic], isolation="read_uncommitted")
        return [(message.value() or b"").decode() for message in found]

    play(BoundedSource(servers, topic, 1, tmp_path), lambda: values_of(servers, topic), arrived, lambda: None)


@pytest.mark.long
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
        play_table(orders, committed, arrived, write, lambda: None)
    assert set(written) <= set(committed())
