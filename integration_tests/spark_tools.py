"""What the tests of the Spark formats share: one JVM for each test process, and options that lead to a site."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from integration_tests.clients import Site
from rollbridge_devcluster.jars import JarCache
from spark_examples.demo.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_STARTS: Final = 10


@contextmanager
def spark_session(scratch: Path) -> Iterator[SparkSession]:
    """A Spark of two threads, which tries each task twice."""
    session = local_session(
        JarCache.default().ensure("spark", quiet=True),
        scratch,
        name="rollbridge tests",
        master="local[2,2]",
        settings={"spark.sql.session.timeZone": "UTC"},
    )
    try:
        yield session
    finally:
        session.stop()


def run_to_end(start: Callable[[], StreamingQuery]) -> None:
    """Run a query to its end.

    Spark gives the Python process of a streaming source ten seconds to start, whatever it is set to, and fails the
    query before its first batch if a machine is busy for longer: then it is started again.
    """
    for attempt in range(_STARTS):
        try:
            start().awaitTermination()
        except Exception as fault:
            if "Python worker failed to connect back" not in str(fault) or attempt + 1 == _STARTS:
                raise
        else:
            return


def options_of(site: Site, stream: str, **more: str) -> dict[str, str]:
    """The options that every use of the formats needs; names in ``more`` have ``_`` for a dot."""
    return {
        "kafka.bootstrap.servers": site.cluster.bootstrap_servers,
        "zookeeper": site.cluster.zookeeper,
        "zookeeper.root": site.root,
        "stream": stream,
        **{name.replace("_", "."): value for name, value in more.items()},
    }
