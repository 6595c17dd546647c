"""The sink where Spark runs a task twice at once, which takes executors on two hosts: here they have two addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rollbridge
from integration_tests.clients import Site
from integration_tests.patience import PATIENCE_S, await_exit, eventually
from integration_tests.spark_tools import options_of
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java
from rollbridge_devcluster.state import free_port
from spark_examples.demo.session import local_session

pyspark = pytest.importorskip("pyspark")

if TYPE_CHECKING:
    import pyarrow as pa

ROOT = Path(__file__).parents[1]
HOSTS = ("127.0.0.2", "127.0.0.3")
ROWS, TASKS, SLOW = 400, 4, 3
EAGER = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.executor.memory": "512m",
    "spark.cores.max": "2",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10",
}


@contextmanager
def running(name: str, folder: Path, *arguments: str) -> Iterator[None]:
    """One of Spark's own servers, as a process."""
    jars = Path(pyspark.__file__).parent / "jars"
    command = [find_java().executable, "-Xmx256m", "-cp", f"{jars}/*", f"org.apache.spark.deploy.{name}", *arguments]
    # Without its version of Scala, a worker looks for the folders of a build to find the jars of executors.
    environment = {**os.environ, "SPARK_HOME": str(jars.parent), "SPARK_SCALA_VERSION": "2.13"}
    with (folder / f"{name}-{len(list(folder.iterdir()))}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """A Spark of two workers, each with one slot and an address of its own."""
    port = str(free_port(()))
    address = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        begun = ("--host", "127.0.0.1", "--port", port, "--webui-port", "0")
        stack.enter_context(running("master.Master", tmp_path, *begun))
        for host in HOSTS:
            place = tmp_path / f"work-{host}"
            place.mkdir()
            arguments = ("--host", host, "--cores", "1", "--memory", "768m", "--work-dir", str(place))
            stack.enter_context(running("worker.Worker", tmp_path, *arguments, "--webui-port", "0", address))
        eventually(
            lambda: sum("registered with master" in log.read_text() for log in tmp_path.glob("worker*.log")) == 2,
            "both workers are there",
        )
        yield address


def write(arguments: dict[str, Any]) -> None:
    """The driver: a job of which one task stands still in the middle until another attempt has given all its rows."""
    marker, folder = Path(arguments["marker"]), Path(arguments["folder"])

    def straggle(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = pyspark.TaskContext.get()
        is_slow = context.partitionId() == SLOW
        for place, batch in enumerate(batches):
            if is_slow and context.attemptNumber() == 0 and place == 5:
                deadline = time.monotonic() + PATIENCE_S
                while not marker.exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
            yield batch
        if is_slow and context.attemptNumber() > 0:
            marker.touch()

    jars = JarCache.default().ensure("spark", quiet=True)
    settings = {**EAGER, "spark.executorEnv.PYTHONPATH": str(ROOT)}
    session = local_session(jars, folder, name="speculation", master=arguments["master"], settings=settings)
    rows = session.range(0, ROWS, 1, TASKS).selectExpr("string(id % 5) AS key", "string(id) AS value")
    rows.mapInArrow(straggle, rows.schema).write.format("rollbridge").options(**arguments["options"]).mode(
        "append"
    ).save()
    session.stop()


def test_rows_of_a_task_that_ran_twice_at_once_are_there_once(
    master: str, site: Site, client: rollbridge.Bridge, scope: str, tmp_path: Path
) -> None:
    stream = f"{scope}/orders"
    client.admin.create_stream(stream, segments=2)
    marker = tmp_path / "the other attempt has given its rows"
    arguments = {
        "master": master,
        "marker": str(marker),
        "folder": str(tmp_path / "driver"),
        "options": options_of(site, stream),
    }
    with (tmp_path / "driver.log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "integration_tests.test_spark_speculation", json.dumps(arguments)],
            stdout=log,
            stderr=log,
        )
    assert await_exit(driver, tmp_path / "driver.log", 4 * PATIENCE_S) == 0, (tmp_path / "driver.log").read_text()
    assert marker.exists(), "no task ran twice"
    assert sorted(int(message.value() or b"") for message in site.committed(stream)) == list(range(ROWS))


if __name__ == "__main__":
    write(json.loads(sys.argv[1]))
