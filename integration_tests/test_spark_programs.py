"""The small programs on Spark, as a newcomer runs them: each twice, and in both orders, each with a JVM of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollbridge
from integration_tests.backends.choice import new_cluster
from integration_tests.examples import ON_SPARK, run_all
from rollbridge_devcluster.java import find_java


@pytest.mark.long
def test_programs_on_spark_run_twice_in_any_order(tmp_path: Path) -> None:
    with new_cluster() as cluster:
        coordinator = cluster.start_coordinator()
        environment = {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": cluster.bootstrap_servers,
            "ROLLBRIDGE_ZOOKEEPER": cluster.zookeeper,
            "JAVA_HOME": str(find_java().home),
        }
        for programs in (ON_SPARK, ON_SPARK[::-1]):
            said = run_all(programs, environment, tmp_path)
            assert "|key|count|" in said["spark_read.py"].replace(" ", "")
        with (
            rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper) as b,
            b.reader("sales/events", follow=False) as reader,
        ):
            values = [record.value or b"" for record in reader]
        assert sum(value.startswith(b'{"timestamp"') for value in values) > 0  # of spark_write
        assert sum(value.isdigit() for value in values) == 200  # of spark_read, twice
        cluster.stop_coordinator(coordinator)
