"""What the examples on Spark share: a local Spark, and options that lead to the cluster that ``make up`` has started.

The environment may name another cluster (``ROLLBRIDGE_BOOTSTRAP_SERVERS`` and ``ROLLBRIDGE_ZOOKEEPER``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rollbridge.config import load_settings
from rollbridge_devcluster.java import find_java
from spark_examples.demo.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def open_spark(name: str) -> Iterator[SparkSession]:
    """A Spark of two threads in this process; rollbridge's formats need no jars."""
    with tempfile.TemporaryDirectory(prefix="rollbridge-spark-") as scratch:
        session = local_session(str(find_java().home), [], Path(scratch), name=name)
        try:
            yield session
        finally:
            session.stop()


def kill_driver(pid: int) -> None:
    """SIGKILL a driver with its JVM and its workers."""
    process = psutil.Process(pid)
    for one in [*process.children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def options_of(stream: str, **more: str) -> dict[str, str]:
    """What ``format("rollbridge")`` needs to find a stream, and more options."""
    settings = load_settings({})
    return {
        "kafka.bootstrap.servers": settings.bootstrap_servers,
        **{f"kafka.{name}": value for name, value in settings.kafka.items()},
        "zookeeper": settings.zookeeper,
        "zookeeper.root": settings.zookeeper_root,
        "stream": stream,
        **more,
    }
