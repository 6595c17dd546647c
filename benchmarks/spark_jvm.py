"""One JVM with Spark in it for all experiments that need one; it is warm when it counts."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Final

from benchmarks.site import Site
from rollbridge_devcluster.jars import JarCache
from spark_examples.demo.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ALL_COMPILERS: Final = "-XX:+UseParallelGC"
"""Unlike tests, which are over before the second compiler pays off."""


def spark_session(site: Site) -> SparkSession:
    """The session of this run, started when it is first asked for, and stopped with the site."""
    found = _sessions.get(id(site))
    if found is None:
        scratch = Path(mkdtemp(prefix="rollbridge-spark-"))
        found = _sessions[id(site)] = local_session(
            JarCache.default().ensure("spark", quiet=True),
            scratch,
            name="rollbridge benchmarks",
            java_options=_ALL_COMPILERS,
            settings={"spark.sql.session.timeZone": "UTC", "spark.driver.memory": "2g"},
        )
        site.cleanup.callback(found.stop)
    return found


_sessions: dict[int, SparkSession] = {}


def options_of(site: Site, stream: str) -> dict[str, str]:
    """What every use of the format ``rollbridge`` needs."""
    return {
        "kafka.bootstrap.servers": site.bootstrap_servers,
        "zookeeper": site.cluster.zookeeper,
        "stream": stream,
    }
