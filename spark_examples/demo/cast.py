"""Everybody in the demo's story: servers and helper processes, started together and stopped together.

:func:`assemble` starts them; :class:`Cast` asks them, with types.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

import rollbridge
from rollbridge.errors import RollbridgeError
from rollbridge.stream.names import StreamName, segment_topic_pattern
from rollbridge_devcluster.ephemeral import ProcessCluster
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java
from rollbridge_devcluster.nodes import ProcessNode
from spark_examples.demo import native_rival, plain_reader, small_writer, stock_spark
from spark_examples.demo.helper import Helper
from spark_examples.demo.measure import PeakMemory
from spark_examples.demo.native_rival import RivalReport
from spark_examples.demo.plain_reader import Counts, Seen
from spark_examples.demo.small_writer import RECORDS, Commit
from spark_examples.demo.stock_spark import SparkCount

NATIVE_TOPIC: Final = "native-flights"
PATIENCE_SECONDS: Final = 60.0
"""How long the story waits for something that should come at once or, after the kill, within ten seconds."""
_POLL_SECONDS: Final = 0.02


class DemoFailedError(RollbridgeError):
    """Something that the demo waited for did not happen."""

    code = "demo-failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who plays. Questions wait for their answers."""

    cluster: ProcessCluster
    bridge: rollbridge.Bridge
    """The loader's connection."""
    stream: StreamName
    leader: ProcessNode
    """It leads the stream's group at the beginning."""
    second: ProcessNode
    memory: PeakMemory
    reader: Helper
    writer: Helper
    rival: Helper
    spark: Helper

    def leads(self, handle: ProcessNode) -> bool:
        """Whether a coordinator leads the stream's group now."""
        return _leads(self.bridge, self.stream, handle)

    def counts(self) -> Counts:
        """How far the plain reader has come."""
        counts: Counts = self.reader.ask("counts")
        return counts

    def seen(self) -> Seen:
        """Everything that the plain reader has noted."""
        seen: Seen = self.reader.ask("seen")
        return seen

    def commits(self) -> list[Commit]:
        """The small transactions, in order."""
        commits: list[Commit] = self.writer.ask("commits")
        return commits

    def last_commit(self) -> Commit | None:
        """The small transaction that was committed last."""
        last: Commit | None = self.writer.ask("progress")
        return last

    def committed(self) -> int:
        """How many small transactions were committed."""
        last = self.last_commit()
        return 0 if last is None else last.number + 1

    def resume_writer(self) -> None:
        """Let the writer of small transactions go on."""
        self.writer.ask("resume")

    def pause_writer(self) -> int:
        """Pause it and let the plain reader catch up; returns how many small records there are."""
        small = int(self.writer.ask("pause")) * RECORDS
        # If the reader does not get there, whoever compares the counts will see.
        happens(lambda: self.counts().small_records >= small)
        return small

    def rival_begins(self) -> None:
        """Open the native transaction and write the flights to it."""
        self.rival.ask("begin")

    def rival_commits(self) -> RivalReport:
        """Commit the native transaction."""
        report: RivalReport = self.rival.ask("commit")
        return report

    def spark_version(self) -> str:
        """Which Spark it is, once it is up."""
        return str(self.spark.ask("version"))

    def spark_counts(self) -> SparkCount:
        """What a stock Spark reads at this moment."""
        count: SparkCount = self.spark.ask("count")
        return count


def assemble(stack: ExitStack, out: Path, stream: StreamName, aircraft: Sequence[bytes]) -> Cast:
    """Start servers, create the stream with two segments, and start everybody; the stack stops all of them.

    Args:
        stack: Takes what has to be stopped, in order.
        out: Directory for logs.
        stream: The stream's name.
        aircraft: Keys for the small transactions.

    Raises:
        LocalEnvironmentError: a server does not start.
        HelperFailedError, DemoFailedError: somebody else does not.
    """
    # First, so that what is missing is said before anything is started.
    jars = JarCache.default().ensure("spark")
    java_home = find_java().home
    pattern = segment_topic_pattern(stream)
    cluster = stack.enter_context(ProcessCluster())
    stack.callback(lambda: shutil.copytree(cluster.logs, out / "logs", dirs_exist_ok=True))
    memory = stack.enter_context(PeakMemory())
    handles = [cluster.start_coordinator() for _ in range(2)]
    for handle in handles:
        memory.watch(psutil.Process(handle.pid))
    servers, zookeeper = cluster.bootstrap_servers, cluster.zookeeper
    connection = stack.enter_context(rollbridge.connect(servers, zookeeper=zookeeper, client_name="loader"))
    connection.admin.create_stream(str(stream), segments=2)
    leader, second = sorted(handles, key=lambda handle: not _leads(connection, stream, handle))

    def start(name: str, main: Callable[..., None], *arguments: object) -> Helper:
        return stack.enter_context(Helper(name, out / "demo.log", main, *arguments))

    cast = Cast(
        cluster=cluster,
        bridge=connection,
        stream=stream,
        leader=leader,
        second=second,
        memory=memory,
        reader=start("plain reader", plain_reader.main, servers, pattern, "plain-reader"),
        writer=start("small writer", small_writer.main, servers, zookeeper, "tower", str(stream), list(aircraft)),
        rival=start("native rival", native_rival.main, servers, NATIVE_TOPIC),
        spark=start(
            "Spark", stock_spark.main, str(java_home), jars, cluster.home / "spark", out / "spark.log", servers, pattern
        ),
    )
    cast.resume_writer()
    cast.rival.ask("ready")
    require(lambda: cast.counts().small_records > 0, "the plain reader gets nothing of the small transactions")
    return cast


def happens(condition: Callable[[], bool], timeout_s: float = PATIENCE_SECONDS) -> bool:
    """Wait until a condition comes true; returns whether it did in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def require(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait until a condition comes true.

    Raises:
        DemoFailedError: it does not in time; ``otherwise`` says what is wrong then.
    """
    if not happens(condition):
        raise DemoFailedError(f"{otherwise} ({PATIENCE_SECONDS:g} s waited)")


def _leads(connection: rollbridge.Bridge, stream: StreamName, handle: ProcessNode) -> bool:
    leader = connection.admin.describe(str(stream)).leader
    # A coordinator's name is made of its host's and its process id.
    return leader is not None and leader.endswith(f"-{handle.pid}")
