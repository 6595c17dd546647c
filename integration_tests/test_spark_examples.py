"""The examples with Spark, as whoever has typed ``make up`` runs them, on fewer flights."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from integration_tests.clients import Site

ROWS = 12_000


@pytest.mark.parametrize(("example", "checks"), [("spark_flights", 3), ("spark_backfill", 3)])
def test_an_example_does_what_it_says(site: Site, example: str, checks: int) -> None:
    environment = {
        "ROLLBRIDGE_BOOTSTRAP_SERVERS": site.cluster.bootstrap_servers,
        "ROLLBRIDGE_ZOOKEEPER": site.cluster.zookeeper,
        "ROLLBRIDGE_ZOOKEEPER_ROOT": site.root,
    }
    done = subprocess.run(
        [sys.executable, "-m", f"spark_examples.{example}", f"--rows={ROWS}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok: ") == checks, done.stdout
    assert "WRONG" not in done.stdout
