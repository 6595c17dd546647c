"""A local Spark, what the demo, the examples, tests and benchmarks run on, and options that lead to a stream.

The environment may name another cluster than that of ``make up`` (``ROLLBRIDGE_BOOTSTRAP_SERVERS`` and
``ROLLBRIDGE_ZOOKEEPER``).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from rollbridge.config import load_settings
from rollbridge_devcluster.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HASTE: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The first compiler only: what is over soon ends before the second one has paid off."""
_LOGGING: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


def local_session(
    jars: Sequence[Path],
    scratch: Path,
    *,
    name: str,
    master: str = "local[2]",
    java_options: str = HASTE,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start a JVM with a session in it, or give the one of this process; it logs errors only, to standard error.

    Args:
        jars: The Kafka connector.
        scratch: Directory for what Spark puts down.
        name: What the application is called.
        master: How many tasks at once, and how many attempts for each: ``local[THREADS,ATTEMPTS]``.
        java_options: For the JVM.
        settings: More of Spark's settings.
    """
    from pyspark.sql import SparkSession

    os.environ.update(
        JAVA_HOME=str(find_java().home), PYSPARK_PYTHON=sys.executable, PYSPARK_DRIVER_PYTHON=sys.executable
    )
    scratch.mkdir(parents=True, exist_ok=True)
    logging = scratch / "log4j2.properties"
    logging.write_text(_LOGGING)
    builder = (
        SparkSession.builder.master(master)
        .appName(name)
        .config("spark.jars", ",".join(map(str, jars)))
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={logging} {java_options}")
        .config("spark.local.dir", str(scratch))
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
    )
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    return session


@contextmanager
def open_spark(name: str) -> Iterator[SparkSession]:
    """Yield a Spark of two threads in this process; rollbridge's formats need no jars."""
    with tempfile.TemporaryDirectory(prefix="rollbridge-spark-") as scratch:
        session = local_session([], Path(scratch), name=name)
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
    """Return what ``format("rollbridge")`` needs to find a stream, and more options."""
    settings = load_settings({})
    return {
        "kafka.bootstrap.servers": settings.bootstrap_servers,
        **{f"kafka.{name}": value for name, value in settings.kafka.items()},
        "zookeeper": settings.zookeeper,
        "zookeeper.root": settings.zookeeper_root,
        "stream": stream,
        **more,
    }
