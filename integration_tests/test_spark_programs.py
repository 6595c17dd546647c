"""The small programs on Spark, as a newcomer runs them: each twice, and in both orders, each with a JVM of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.choice import new_cluster
from integration_tests.examples import ON_SPARK, run_program
from rollbridge_devcluster.java import find_java

WORKER_LATE = "Python worker failed to connect back"
"""Spark gives a Python process ten seconds to start, which no setting changes; a machine with much to do needs more."""


def run_in_time(path: Path, environment: dict[str, str], folder: Path) -> str:
    """Run a program, and again while Spark found its Python process too slow; return what it said."""
    for _ in range(4):
        try:
            return run_program(path, environment, folder)
        except AssertionError as failure:
            if WORKER_LATE not in str(failure):
                raise
    return run_program(path, environment, folder)


@pytest.mark.timeout(2400)  # four JVMs, on a machine with much to do
def test_programs_on_spark_run_twice_in_any_order(tmp_path: Path) -> None:
    with new_cluster() as cluster:
        coordinator = cluster.start_coordinator()
        environment = {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": cluster.bootstrap_servers,
            "ROLLBRIDGE_ZOOKEEPER": cluster.zookeeper,
            "JAVA_HOME": str(find_java().home),
        }
        for programs in (ON_SPARK, ON_SPARK[::-1]):
            said = {path.name: run_in_time(path, environment, tmp_path) for path in programs}
            assert "|key|count|" in said["spark_read.py"].replace(" ", "")
        with (
            rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper) as b,
            b.reader("sales/events", follow=False) as reader,
        ):
            values = [record.value or b"" for record in reader]
        assert sum(value.startswith(b'{"timestamp"') for value in values) > 0  # of spark_write
        assert sum(value.isdigit() for value in values) in range(200, 1000, 100)  # of spark_read, 100 for each run
        cluster.stop_coordinator(coordinator)
