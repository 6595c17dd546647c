"""Nodes on any runtime: a broker, a ZooKeeper server or a coordinator that is started, stopped and paused.

This module has the operations of all nodes, the settings of brokers and ZooKeeper servers on all runtimes, and the
runtime "processes": daemons of this machine in the directory of a cluster, of which those of rollbridge itself are in
``rollbridge_devcluster.services``. Tests have a runtime of their own, containers.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import psutil

from rollbridge.doctor import probes
from rollbridge.errors import LocalEnvironmentError, NotFoundError
from rollbridge_devcluster import processes
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import ClassArchive, Jvm, find_java, forget_recordings, keep_recordings, records_classes
from rollbridge_devcluster.state import (
    KAFKA,
    LOOPBACK,
    ZOOKEEPER,
    ClusterState,
    Home,
    private_directory,
    write_privately,
)

STOP_S: Final = 30.0
"""Longest orderly stop of a server before it is killed."""
START_S: Final = 90.0
"""Longest time in which a server neither answers nor says anything; a broker that was killed reads its logs first."""
_STARTS_S: Final = 900.0
"""Longest time until a server answers."""
_POLL_S: Final = 0.03
_STACK_FRAME: Final = re.compile(r"\s+at |\s+\.\.\. \d+ more")
_TROUBLE: Final = re.compile(r"\bERROR\b|\bFATAL\b|Exception|[Ee]rror:|No module named")


class Node(ABC):
    """One server or coordinator. It keeps its data and its address over restarts."""

    def __init__(self, part: str) -> None:
        self.part: Final = part
        """Its name in the cluster: ``kafka``, ``zookeeper-2``, ``coordinator-1``."""

    @property
    def name(self) -> str:
        """The same; of a coordinator in a container, as which it registers."""
        return self.part

    # -- each runtime -----------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> Self:
        """Start it, without waiting until it answers."""

    @abstractmethod
    def answers(self) -> bool:
        """Return True if a client could work with it now."""

    @abstractmethod
    def runs(self) -> bool:
        """Return True if it has not ended; a paused one has not."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """Return its exit code (negative: the signal), ``None`` while it runs."""

    @abstractmethod
    def said(self, lines: int | None = None) -> str:
        """Return what it has printed and logged since its start, or the last lines."""

    @abstractmethod
    def stop(self, patience_s: float = STOP_S) -> bool:
        """Stop it with SIGTERM, then SIGKILL; return True if it ended without that. Harmless if it has ended."""

    @abstractmethod
    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it.

        Raises:
            NotFoundError: it does not run.
        """

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL it, and return when it is gone: nothing is flushed or sent.

        Raises:
            NotFoundError: it does not run.
        """

    @abstractmethod
    def pause(self) -> None:
        """Pause it: its connections stay open, and it does not answer.

        Raises:
            NotFoundError: it does not run.
        """

    @abstractmethod
    def resume(self) -> None:
        """Resume it, if it is paused."""

    # -- all of them ------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """True if it runs."""
        return self.runs()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause it for the length of a block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def restart(self, *, gracefully: bool = True) -> None:
        """Restart it on the same data and address, and return when it answers."""
        self.stop(STOP_S if gracefully else 0)
        self.start()
        self.await_answer()

    def await_answer(self) -> None:
        """Return when a client can work with it.

        Raises:
            LocalEnvironmentError: it has ended, or takes too long; the message quotes its output.
        """
        began = time.monotonic()
        deadline, said = began + START_S, ""
        while True:
            answers = self.answers()
            if not self.runs():  # even if its port answers: another server may listen there
                raise self.failure("ended while it was starting")
            if answers:
                return
            if (now := time.monotonic()) > deadline:
                before, said = said, self.said(20)
                if said == before or now - began > _STARTS_S:
                    raise self.failure(f"does not answer after {now - began:.0f} s")
                deadline = now + START_S
            time.sleep(_POLL_S)

    def wait_exit(self, timeout_s: float) -> int:
        """Wait until it has ended; return its exit code, negative when a signal ended it.

        Raises:
            TimeoutError: it still runs.
        """
        deadline = time.monotonic() + timeout_s
        while (code := self.exit_code()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.part} still runs after {timeout_s} s")
            time.sleep(_POLL_S)
        return code

    def failure(self, what: str) -> LocalEnvironmentError:
        """Return an error that names the node and has the most informative line of its output."""
        return LocalEnvironmentError(f"{self.part} {what}: {telling_line(self.said().splitlines())}")

    def must_run(self) -> None:
        """Raise NotFoundError if it does not."""
        if not self.runs():
            raise NotFoundError(f"{self.part} does not run")


def telling_line(lines: Sequence[str]) -> str:
    """Return the most informative line of a server's output: the last that names an error, or the last."""
    said = [line.strip() for line in lines if line.strip() and not _STACK_FRAME.match(line)]
    troubles = [line for line in said if _TROUBLE.search(line)]
    return (troubles or said or ["it says nothing"])[-1][:300]


# -- what servers are told, whatever they run on ------------------------------------------------------------


def broker_settings(number: int, voters: Sequence[str], logs: str, settings: Mapping[str, str]) -> dict[str, object]:
    """Return the settings of a broker without its listeners; each broker is a controller as well (KRaft).

    Args:
        number: Of the broker, from 1 on.
        voters: Addresses of all controllers, in their order.
        logs: The broker's log directory.
        settings: On top of ours.
    """
    copies, enough = len(voters), max(1, len(voters) - 1)
    return {
        "process.roles": "broker,controller",
        "node.id": number,
        # Static voters: unlike dynamic ones they are read at each start, so a port may change.
        "controller.quorum.voters": ",".join(f"{n}@{address}" for n, address in enumerate(voters, 1)),
        "controller.listener.names": "CONTROLLER",
        "log.dirs": logs,
        # A typing mistake in a topic name must be an error, not a new topic.
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": 0,
        # Instead of 50: few brokers need no more, and each costs time at the first start.
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.num.partitions": 8,
        # Instead of 10 s: what a killed conditional writer left open holds readers up until the broker looks.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000,
        # A broker that was killed may register again only when its old session has run out (default 9 s).
        "broker.session.timeout.ms": 3000,
        "broker.heartbeat.interval.ms": 500,
        # Reserved in full at the start; the default of 128 MiB is an eighth of the heap.
        "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
        # For topics that do not set it themselves; segments are small enough for it to take effect.
        "log.retention.hours": 168,
        "log.segment.bytes": 256 * 1024 * 1024,
        # Fewer brokers than three cannot keep the copies that these ask for by default.
        "default.replication.factor": copies,
        "min.insync.replicas": enough,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": enough,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": enough,
        **settings,
    }


ZOOKEEPER_SETTINGS: Final[Mapping[str, object]] = {
    # Sessions may be as short as two ticks; with the default tick no takeover is faster than 4 s.
    "tickTime": 500,
    "maxSessionTimeout": 60_000,
    "maxClientCnxns": 0,
    "admin.enableServer": "false",
    "4lw.commands.whitelist": "srvr,ruok,mntr",
    # Of each log file, in KiB; the default of 64 MiB is more than all the data here.
    "preAllocSize": 4096,
}
"""Of every ZooKeeper server."""
NO_SYNC: Final = "-Dzookeeper.forceSync=no"
"""Option of a ZooKeeper's JVM: writes still survive a killed server, but not a power failure."""


# -- processes ----------------------------------------------------------------------------------------------

_RESOURCES: Final = Path(__file__).parent
_ADDRESS_IN_USE: Final = re.compile(r"java\.net\.BindException|[Aa]ddress already in use")
_FORMAT: Final = "kafka-format"
_FORMAT_S: Final = 60.0


class ProcessNode(Node):
    """A daemon of this machine; it is found by its mark, started by any process."""

    def __init__(self, home: Home, state: ClusterState, part: str) -> None:
        super().__init__(part)
        self.home: Final = home
        self.state: Final = state
        self._known: psutil.Process | None = None
        self._environment: Mapping[str, str] = {}
        self._read_from: dict[Path, int] = {}
        """Ends of its logs at its start."""

    @property
    def log(self) -> Path:
        """Path of its log; its output goes to ``output``."""
        return self.home.logs / f"{self.part}.log"

    @property
    def output(self) -> Path:
        """Path of its output."""
        return self.log.with_suffix(".out")

    @property
    def pid(self) -> int:
        """Id of its process, or of its last known one."""
        found = self._found() or self._known
        return self._process().pid if found is None else found.pid

    def prepare(self) -> None:
        """Write the files that it reads at its start."""

    def command(self) -> list[str]:
        """Return the command line that runs it."""
        raise NotImplementedError

    def start(self) -> Self:
        self.prepare()
        self._read_from = {path: path.stat().st_size if path.exists() else 0 for path in (self.log, self.output)}
        self._known = processes.spawn(
            self.command(), home=self.home.path, part=self.part, output=self.output, env=self._environment
        )
        return self

    def runs(self) -> bool:
        return self._found() is not None

    def exit_code(self) -> int | None:
        return None if self._known is None else processes.exit_code(self._known.pid)

    def said(self, lines: int | None = None) -> str:
        said = ""
        for path in (self.log, self.output):
            if path.exists():
                start, size = self._read_from.get(path, 0), path.stat().st_size
                with path.open("rb") as file:
                    # A shorter log was started again; of a long one the end is enough.
                    file.seek(max(start if start <= size else 0, size - 100_000))
                    said += file.read().decode(errors="replace")
        return said if lines is None else "\n".join(said.splitlines()[-lines:])

    def stop(self, patience_s: float = STOP_S) -> bool:
        return processes.stop(self._all(), patience_s)

    def signal(self, number: signal.Signals) -> None:
        processes.send(self._process(), number)

    def kill(self) -> None:
        self._process()
        processes.kill(self._all())

    def pause(self) -> None:
        processes.pause(self._process())

    def resume(self) -> None:
        if (found := self._found()) is not None:
            processes.send(found, signal.SIGCONT)

    def failure(self, what: str) -> LocalEnvironmentError:
        if not self._read_from:
            return LocalEnvironmentError(
                f"{self.part} runs already, but does not answer; try `rollbridge restart {self.part}`; its log is in "
                f"{self.home.logs}"
            )
        said = self.said().splitlines()
        return LocalEnvironmentError(
            f"{self.part} {what}: {telling_line(said)}; more in {self.home.logs}",
            has_lost_port=any(_ADDRESS_IN_USE.search(line) for line in said),
        )

    def _all(self) -> list[psutil.Process]:
        return processes.find(self.home.path).get(self.part, [])

    def _found(self) -> psutil.Process | None:
        if self._known is None or not processes.is_alive(self._known):
            self._known = next(iter(self._all()), self._known)
        return self._known if self._known is not None and processes.is_alive(self._known) else None

    def _process(self) -> psutil.Process:
        found = self._found()
        if found is None:
            raise NotFoundError(f"{self.part} does not run in {self.home.path}")
        return found


class JavaProcess(ProcessNode):
    """A server in a JVM of its own."""

    heap: str

    def __init__(self, home: Home, state: ClusterState, part: str, cache: JarCache) -> None:
        super().__init__(home, state, part)
        self._cache = cache

    @cached_property
    def jvm(self) -> Jvm:
        """Return the settings of its JVM."""
        return Jvm(
            java=find_java(),
            classpath=[self._cache.location(jar) for jar in self._cache.jars(self.part)],
            heap=self.heap,
            short_lived=self.state.short_lived,
            scratch=self.home.scratch,
        )

    def write_properties(self, path: Path, properties: Mapping[str, object]) -> Path:
        """Write a file of settings."""
        private_directory(path.parent)
        write_privately(path, "".join(f"{key}={value}\n" for key, value in properties.items()))
        return path


class KafkaProcess(JavaProcess):
    """The only broker of a cluster of processes."""

    def __init__(self, home: Home, state: ClusterState, cache: JarCache) -> None:
        super().__init__(home, state, KAFKA, cache)
        self.heap = state.kafka_heap
        self._data = home.of(KAFKA) / "data"
        self._properties_file = home.of(KAFKA) / "server.properties"

    @cached_property
    def _archive(self) -> ClassArchive:
        jvm = self.jvm
        return ClassArchive.of(KAFKA, jvm.java, jvm.classpath, self._cache.directory, self.home.scratch)

    def prepare(self) -> None:
        forget_recordings(self.home.scratch)
        self.write_properties(self._properties_file, self._settings(self._data))
        if not (self._data / "meta.properties").exists():
            self._format()

    def _format(self) -> None:
        """Format the storage with the latest feature levels, transactions v2 among them.

        It is formatted in another directory, which is renamed when complete: a killed format leaves nothing that looks
        formatted.
        """
        fresh = self._data.with_name("data.new")
        # Of a start that was killed.
        processes.kill(processes.find(self.home.path).get(_FORMAT, []))
        for leftover in (fresh, self._data):
            shutil.rmtree(leftover, ignore_errors=True)
        properties = self.write_properties(self.home.of(KAFKA) / "format.properties", self._settings(fresh))
        options = [*self._log_options(self.home.logs / f"{_FORMAT}.log"), *self._archive.use()]
        output = self.home.logs / f"{_FORMAT}.out"
        output.unlink(missing_ok=True)
        arguments = ["format", "--cluster-id", self.state.kafka_cluster_id, "--config", str(properties)]
        command = self.jvm.command("kafka.tools.StorageTool", *arguments, options=options)
        code = processes.run(command, home=self.home.path, part=_FORMAT, output=output, timeout_seconds=_FORMAT_S)
        if code != 0:
            said = telling_line(output.read_text(encoding="utf-8", errors="replace").splitlines())
            raise LocalEnvironmentError(f"kafka's storage at {fresh} cannot be formatted: {said}")
        properties.unlink()
        fresh.rename(self._data)

    def _settings(self, data: Path) -> dict[str, object]:
        plain, controller = self.state.bootstrap_servers, f"{LOOPBACK}:{self.state.ports.kafka_controller}"
        return {
            "listeners": f"PLAINTEXT://{plain},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{plain}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            **broker_settings(1, [controller], str(data), self.state.kafka_settings),
        }

    def _log_options(self, log: Path) -> list[str]:
        return [f"-Dlog4j2.configurationFile={_RESOURCES / 'log4j2.xml'}", f"-Drollbridge.log={log}"]

    def command(self) -> list[str]:
        options = [*self._log_options(self.log), *self._archive.use_or_record()]
        return self.jvm.command("kafka.Kafka", str(self._properties_file), options=options)

    def answers(self) -> bool:
        """Return True if the broker of this cluster answers: another one may listen on its port."""
        return probes.kafka_cluster_id(self.state.bootstrap_servers) == self.state.kafka_cluster_id

    @property
    def is_recording(self) -> bool:
        """Return True if it records its classes for later brokers when it ends in good order."""
        found = self._found()
        try:
            return found is not None and records_classes(found.cmdline())
        except psutil.Error:
            return False

    def stop(self, patience_s: float = STOP_S) -> bool:
        recorded = self.is_recording
        by_itself = super().stop(patience_s)
        if by_itself and recorded:
            keep_recordings(self.home.scratch, self._cache.directory)
        return by_itself


class ZooKeeperProcess(JavaProcess):
    """The only ZooKeeper of a cluster of processes."""

    heap = "256m"

    def __init__(self, home: Home, state: ClusterState, cache: JarCache) -> None:
        super().__init__(home, state, ZOOKEEPER, cache)
        self._properties_file = home.of(ZOOKEEPER) / "zoo.cfg"

    def prepare(self) -> None:
        data = private_directory(self.home.of(ZOOKEEPER)) / "data"
        data.mkdir(exist_ok=True)
        self.write_properties(
            self._properties_file,
            {
                "dataDir": data,
                "clientPort": self.state.ports.zookeeper,
                "clientPortAddress": LOOPBACK,
                "autopurge.snapRetainCount": 3,
                "autopurge.purgeInterval": 1,
                **ZOOKEEPER_SETTINGS,
                **self.state.zookeeper_settings,
            },
        )

    def command(self) -> list[str]:
        options = [f"-Dlogback.configurationFile={_RESOURCES / 'logback.xml'}", f"-Drollbridge.log={self.log}"]
        options += [NO_SYNC] if self.state.ephemeral else []
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return self.jvm.command(main, str(self._properties_file), options=options)

    def answers(self) -> bool:
        """Return True if it serves."""
        return probes.zookeeper_mode(self.state.zookeeper) is not None
