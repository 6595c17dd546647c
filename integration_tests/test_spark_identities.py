"""Several users in one Spark: the Python processes that it keeps for all their jobs act for each as that one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration_tests.backends.choice import Backend
from integration_tests.clients import until
from integration_tests.command_line import run_cli
from integration_tests.secured import Secured, kafka_security, password, secured_cluster, zookeeper_security
from integration_tests.spark_driver import await_batch, start_numbers
from rollbridge.metadata import paths
from rollbridge.metadata.access import coordinator, writer
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName, StreamName

pytest.importorskip("pyspark")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOADER = "loader"
"""The user of Kafka as which all jobs of this Spark come."""
OWNED = {"alice": ("sales/orders", GroupName("sales")), "bob": ("sales/ledger", GroupName("sales", "bobs"))}
"""Stream and group of each user of ZooKeeper."""


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    with ExitStack() as stack:
        cluster = stack.enter_context(secured_cluster(Backend.LOCAL, tmp_path))
        cluster.add_users("coordinator", LOADER, *OWNED)
        cluster.allow("coordinator", coordinator("sales"))
        stack.enter_context(cluster.coordinator("coordinator"))
        as_coordinator = zookeeper_security("coordinator")
        with ZooKeeperSession(cluster.zookeeper, root=cluster.root, security=as_coordinator) as session:
            until(lambda: session.children(paths.COORDINATORS))
        for user, (stream, group) in OWNED.items():
            for one in (user, LOADER):
                cluster.allow(one, writer(StreamName.parse(stream), group))
            made = run_cli(cluster.environment(user), "access", "identity", user, stdin=password(user).encode())
            done = run_cli(cluster.environment("coordinator"), "access", "grant", str(group), made.out.strip())
            assert done.code == 0, done
            with cluster.connect(user) as client:
                client.admin.create_stream(stream, segments=2, group=group.group)
        yield cluster


def options_of(secured: Secured, user: str, stream: str, kafka: str = LOADER, **digest: str) -> dict[str, str]:
    """As a user of ZooKeeper, and one of Kafka; ``digest`` is what else ZooKeeper is told."""
    zookeeper = {**zookeeper_security(user), **{f"digest.{key}": value for key, value in digest.items()}}
    return {
        "kafka.bootstrap.servers": secured.bootstrap_servers,
        "zookeeper": secured.zookeeper,
        "zookeeper.root": secured.root,
        "stream": stream,
        **{f"kafka.{key}": value for key, value in kafka_security(kafka).items()},
        **{f"zookeeper.{key}": value for key, value in zookeeper.items()},
    }


def write(spark: SparkSession, options: dict[str, str], first: int) -> None:
    """Ten numbers, in two tasks."""
    rows = spark.range(first, first + 10, 1, 2).selectExpr("string(id) AS key", "string(id) AS value")
    rows.write.format("rollbridge").options(**options).mode("append").save()


def read(spark: SparkSession, options: dict[str, str]) -> list[int]:
    rows = spark.read.format("rollbridge").options(**options).load()
    return sorted(int(row.value) for row in rows.collect())


def test_jobs_of_two_users_in_one_worker_are_each_their_own(
    spark: SparkSession, secured: Secured, tmp_path: Path
) -> None:
    (orders, _), (ledger, _) = OWNED.values()
    alice, bob = (options_of(secured, user, stream) for user, (stream, _) in OWNED.items())
    for first in (0, 10):
        write(spark, alice, first)
        write(spark, bob, 100 + first)
    write(spark, options_of(secured, "bob", ledger, kafka="bob"), 120)
    # Nobody gets in by a connection that is kept for somebody else.
    for wrong in (
        options_of(secured, "bob", orders),
        options_of(secured, "bob", orders, kafka="bob"),
        options_of(secured, "alice", orders, password="wrong"),
    ):
        with pytest.raises(Exception, match=r"NotAuthorized|ZooKeeperDeniedError"):
            write(spark, wrong, 50)
    assert read(spark, alice) == list(range(20))
    assert read(spark, bob) == list(range(100, 130))
    # Queries that run at the same time.
    running = [start_numbers(spark, options, str(tmp_path / options["stream"]), 5) for options in (alice, bob)]
    try:
        for query in running:
            await_batch(query, 1)
    finally:
        for query in running:
            query.stop()
    assert len(read(spark, alice)) >= 20 + 10
    assert len(read(spark, bob)) >= 30 + 10
