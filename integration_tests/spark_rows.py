"""Rows for Spark's sink, and its driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from integration_tests.patience import PATIENCE_S
from spark_examples.demo.session import kill_driver

ROWS = 50


@contextmanager
def driver(options: Mapping[str, str], checkpoint: str, logs: Path, **points: str) -> Iterator[subprocess.Popen[bytes]]:
    """A driver in a process of its own with crash points, which logs to ``driver.log``."""
    arguments = {"options": {**options, **points}, "checkpoint": checkpoint, "rows": ROWS, "batches": 1_000}
    with (logs / "driver.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "integration_tests.spark_driver", json.dumps(arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_driver(process.pid)
            process.wait(PATIENCE_S)
