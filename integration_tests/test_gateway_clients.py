"""Clients of Kafka that know nothing of it, at a gateway: Flink, Kafka Connect, and Java, JavaScript and Go by hand.

What they commit is counted by a plain consumer at the brokers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import rollbridge
from integration_tests.clients import Site, adopt, open_values, read_committed, stream_of
from integration_tests.foreign.bounded import LENGTH, BoundedSource, play
from integration_tests.foreign.connect import BOUNDARIES_OF_WORKERS, ConnectWorker, adopt_topics_of_worker
from integration_tests.foreign.java import CLIENTS, JavaError, JavaProducer
from integration_tests.foreign.others import OTHERS, run
from integration_tests.gateways import GatewayProcess, Servers
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.base.ids import TransactionId
from spark_examples.demo.flink_job import STRATEGIES, FlinkJob, latest_checkpoint

RECORDS = 5_000


@pytest.fixture
def topic(site: Site, client: rollbridge.Bridge, topic_prefix: str) -> str:
    """An adopted topic of two partitions."""
    create_topic(site.cluster.bootstrap_servers, topic_prefix, 2)
    adopt(client, topic_prefix)
    return topic_prefix


def values_of(site: Site, topic: str, partitions: int = 2) -> list[str]:
    found = read_committed(site.cluster.bootstrap_servers, [topic], partitions=partitions)
    return [(message.value() or b"").decode() for message in found]


def numbered(name: str, records: int) -> list[str]:
    return sorted(f"{name}-{number}" for number in range(records))


def job_of(gateway: GatewayProcess, topic: str, **given: object) -> dict[str, object]:
    return {
        "bootstrap": gateway.address,
        "topic": topic,
        "prefix": topic,
        "records": RECORDS,
        "rate": 1_000,
        "interval_ms": 500,
        **given,
    }


@pytest.mark.parametrize("program", OTHERS)
def test_programs_in_other_languages_commit_and_abort(
    site: Site, gateway: GatewayProcess, topic: str, program: Callable[[], list[str]]
) -> None:
    run(program(), gateway.address, topic, topic, 100, "commit", "abort", "commit")
    expected = [number for number in range(300) if not 100 <= number < 200]
    assert sorted(values_of(site, topic)) == sorted(f"{topic}-{number}" for number in expected)


@pytest.mark.parametrize("client_version", CLIENTS)
def test_a_producer_in_java_of_either_version(
    site: Site, gateway: GatewayProcess, topic: str, tmp_path: Path, client_version: str
) -> None:
    with JavaProducer(gateway.address, topic, tmp_path / "java.log", client=client_version) as java:
        java.do("init")
        java.do("begin")
        java.write(topic, 0, 100)
        java.do("copy", topic, topic, 0, 5, "note")
        assert java.do("committed", topic, topic, 0) == "none"
        assert values_of(site, topic) == []
        java.do("commit")
        assert java.do("committed", topic, topic, 0) == "5 note"
        java.do("begin")
        java.do("copy", topic, topic, 0, 6, "lost", 1)
        java.do("abort")
        assert java.do("committed", topic, topic, 0) == "5 note"
        java.do("begin")
        java.do("copy", topic, topic, 0, 7, "größe", 2)
        java.do("copy", topic, topic, 1, 8, "", 0)
        java.do("commit")
        assert java.do("committed", topic, topic, 0) == "7 größe 2"
        assert java.do("committed", topic, topic, 1) == "8  0"
        java.do("begin")
        java.write(topic, 100, 200)
        java.do("abort")
        java.do("begin")
        java.write(topic, 200, 210)
        with JavaProducer(gateway.address, topic, tmp_path / "newer.log", client=client_version) as newer:
            newer.do("init")
            with pytest.raises(JavaError) as refused:
                java.do("commit")
            assert refused.value.kind in ("ProducerFencedException", "InvalidProducerEpochException")
            newer.do("begin")
            newer.write(topic, 300, 310)
            newer.do("commit")
    written = [*range(100), *range(300, 310)]
    assert sorted(values_of(site, topic)) == sorted(f"{topic}-{number}" for number in written)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_in_flink_that_throws_writes_each_number_once(
    site: Site, gateway: GatewayProcess, topic: str, tmp_path: Path, strategy: str
) -> None:
    given = job_of(gateway, topic, strategy=strategy, parallelism=2, fail_at=RECORDS // 2)
    with FlinkJob(tmp_path / "flink", **given) as job:
        job.finish(PATIENCE_S)
        assert job.failed
    assert sorted(values_of(site, topic)) == numbered(topic, RECORDS)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("parallelism", [(1, 1), (2, 1)], ids=["as before", "less parallelism"])
def test_a_job_in_flink_that_was_killed_goes_on_from_its_checkpoint_through_a_gateway_that_was_killed_too(
    site: Site, servers: Servers, topic: str, tmp_path: Path, strategy: str, parallelism: tuple[int, int]
) -> None:
    before, after = parallelism
    with GatewayProcess(servers, "gateway-killed", tmp_path) as gateway:
        given = job_of(gateway, topic, strategy=strategy)
        with FlinkJob(tmp_path / "flink", **given, parallelism=before) as job:
            eventually(lambda: job.checkpoints >= 2 or not job.alive, "two checkpoints")
        gateway.revive()
        origin = {"from": latest_checkpoint(tmp_path / "flink")}
        with FlinkJob(tmp_path / "flink", **given, **origin, parallelism=after) as again:
            again.finish(PATIENCE_S)
    assert sorted(values_of(site, topic)) == numbered(topic, RECORDS)


def test_a_job_in_flink_does_not_notice_that_its_gateway_dies(
    site: Site, servers: Servers, topic: str, tmp_path: Path
) -> None:
    with (
        GatewayProcess(servers, "gateway-mortal", tmp_path) as gateway,
        FlinkJob(tmp_path / "flink", **job_of(gateway, topic)) as job,
    ):
        for count in (1, 3):
            eventually(lambda count=count: job.checkpoints >= count or not job.alive, "checkpoints")  # type: ignore[misc]
            gateway.revive()
        job.finish(PATIENCE_S)
    assert sorted(values_of(site, topic)) == numbered(topic, RECORDS)


def test_the_same_checkpoint_is_committed_twice_without_harm(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str, tmp_path: Path
) -> None:
    """Two jobs go on from one checkpoint, one after the other: its transactions are committed once."""

    def open_ones() -> set[str]:
        stream = stream_of(client, topic)
        return {str(item.id) for item in client.admin.transactions() if stream in item.streams}

    given = job_of(gateway, topic)
    with FlinkJob(tmp_path / "flink", **given) as job:
        eventually(lambda: job.checkpoints >= 2 or not job.alive, "two checkpoints")
    origin = {"from": latest_checkpoint(tmp_path / "flink")}
    left = open_ones()
    # What it writes beyond the checkpoint is never committed.
    with FlinkJob(tmp_path / "flink", **{**given, **origin, "interval_ms": 600_000}) as first:
        eventually(lambda: open_ones() - left or not first.alive, "it has recovered, and writes")
    with FlinkJob(tmp_path / "flink", **given, **origin) as second:
        second.finish(PATIENCE_S)
    assert sorted(values_of(site, topic)) == numbered(topic, RECORDS)


@pytest.mark.parametrize("boundary", BOUNDARIES_OF_WORKERS)
def test_a_worker_of_connect_that_is_killed_copies_each_line_once(
    site: Site,
    client: rollbridge.Bridge,
    gateway: GatewayProcess,
    topic_prefix: str,
    tmp_path: Path,
    boundary: str,
) -> None:
    lines = [f"line-{number}" for number in range(2_000)]
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"{line}\n" for line in lines[:1_000]))
    create_topic(site.cluster.bootstrap_servers, topic_prefix)
    adopt(client, topic_prefix)
    adopt_topics_of_worker(client, topic_prefix)
    settings = {"transaction_boundary": boundary, "batch_size": 100, "transaction_boundary_interval_ms": 200}
    with ConnectWorker(gateway.address, topic_prefix, tmp_path / "connect") as worker:
        worker.source("copy", file, topic_prefix, **settings)
        eventually(lambda: len(values_of(site, topic_prefix, 1)) >= 300, "some lines are copied")
    with file.open("a") as more:
        more.write("".join(f"{line}\n" for line in lines[1_000:]))
    with ConnectWorker(gateway.address, topic_prefix, tmp_path / "connect"):
        eventually(lambda: len(values_of(site, topic_prefix, 1)) >= len(lines), "all lines are copied")
    assert values_of(site, topic_prefix, 1) == lines


def test_a_connector_that_says_where_its_transactions_end_commits_whole_ones(
    site: Site, client: rollbridge.Bridge, servers: Servers, topic: str, tmp_path: Path
) -> None:
    """Its worker is killed in the middle of two transactions, and the gateway in the middle of another one."""
    adopt_topics_of_worker(client, topic)

    def arrived() -> list[str]:
        return [value.decode() for value in open_values(client, topic)]

    with GatewayProcess(servers, "gateway-of-bounded", tmp_path) as gateway:
        source = BoundedSource(gateway.address, topic, 2, tmp_path / "source")
        play(source, lambda: values_of(site, topic), arrived, gateway.revive)


def test_a_task_of_connect_whose_transaction_is_aborted_by_hand_fails_and_begins_it_again(
    site: Site, client: rollbridge.Bridge, gateway: GatewayProcess, topic: str, tmp_path: Path
) -> None:
    adopt_topics_of_worker(client, topic)
    source = BoundedSource(gateway.address, topic, 2, tmp_path / "source")

    def listed() -> list[TransactionId]:
        return [item.id for item in client.admin.transactions() if stream_of(client, topic) in item.streams]

    with source.worker() as worker:
        source.begin(worker)
        source.allow(LENGTH // 2)
        eventually(lambda: len(open_values(client, topic)) == LENGTH // 2 and listed(), "half of it is written")
        client.admin.abort_transaction(*listed())
        source.allow(LENGTH)
        eventually(lambda: worker.failure(topic), "the task has failed")
        assert "is aborted (admin); nothing of it is visible" in worker.failure(topic)
        assert values_of(site, topic) == []
        worker.restart(topic)
        eventually(lambda: len(values_of(site, topic)) >= LENGTH, "it is written again")
    assert sorted(values_of(site, topic)) == source.kept(LENGTH)
