"""What is run as which server: configuration files, command lines, and when a server counts as up."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rollbridge.embedded import probes, processes
from rollbridge.embedded.java import ClassArchive, Jvm
from rollbridge.embedded.ports import LOOPBACK
from rollbridge.embedded.state import Home, State, write_privately
from rollbridge.errors import EnvironmentProblem

KAFKA: Final = "kafka"
ZOOKEEPER: Final = "zookeeper"
COORDINATOR_PREFIX: Final = "coordinator-"
COORDINATOR_PROGRAM: Final = ("-m", "rollbridge_coordinator")
"""What Python is to run."""

JAR_SETS: Final = (KAFKA, ZOOKEEPER)

_NODE_ID = 1
_FORMAT = "kafka-format"
_FORMAT_SECONDS = 60.0
_STACK_FRAME = re.compile(r"\s+at |\s+\.\.\. \d+ more")
_TROUBLE = re.compile(r"\bERROR\b|\bFATAL\b|Exception|[Ee]rror:|No module named")
_RESOURCES = Path(__file__).parent


SMALL_BROKER: Final[Mapping[str, object]] = {
    # A typing mistake in a topic name must be an error, not a new topic.
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": 0,
    # Instead of 50: few brokers have no use for more, and each costs time at the first start.
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
}
"""Settings of a broker that serves one machine, or tests."""


class Server(Protocol):
    """One daemon of the cluster."""

    @property
    def name(self) -> str:
        """``kafka``, ``zookeeper`` or ``coordinator-N``."""

    @property
    def log(self) -> Path:
        """Where it logs; what it prints goes to the same name with ``.out``."""

    def prepare(self) -> None:
        """Write what it reads at its start."""

    def command(self) -> list[str]:
        """The command line that runs it."""

    def answers(self) -> bool:
        """Whether a client could work with it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaServer:
    """One broker that is its own controller (KRaft)."""

    home: Home
    state: State
    jvm: Jvm
    archive: ClassArchive

    name: str = KAFKA

    @property
    def log(self) -> Path:
        return self.home.logs / "kafka.log"

    @property
    def data(self) -> Path:
        """Kafka's log directory."""
        return self.home.of(KAFKA) / "data"

    @property
    def _properties_file(self) -> Path:
        return self.home.of(KAFKA) / "server.properties"

    def prepare(self) -> None:
        self.home.of(KAFKA).mkdir(exist_ok=True)
        _write_properties(self._properties_file, self._properties(self.data))
        if not (self.data / "meta.properties").exists():
            self._format()

    def _format(self) -> None:
        """Format the storage with the latest feature levels, transactions v2 among them.

        Into a directory beside the real one, which takes its name when complete: a format that was killed half-way
        leaves nothing that looks formatted.
        """
        fresh = self.data.with_name("data.new")
        # Of a start that was killed.
        processes.kill(processes.find(self.home.path).get(_FORMAT, []))
        for leftover in (fresh, self.data):
            shutil.rmtree(leftover, ignore_errors=True)
        properties = self.home.of(KAFKA) / "format.properties"
        _write_properties(properties, self._properties(fresh))
        options = [*self._log_options(self.home.logs / f"{_FORMAT}.log"), *self.archive.use()]
        output = self.home.logs / f"{_FORMAT}.out"
        output.unlink(missing_ok=True)
        command = self.jvm.command(
            "kafka.tools.StorageTool",
            "format",
            "--cluster-id",
            self.state.kafka_cluster_id,
            "--config",
            str(properties),
            options=options,
        )
        code = processes.run(command, home=self.home.path, part=_FORMAT, output=output, timeout_seconds=_FORMAT_SECONDS)
        if code != 0:
            said = telling_line(output.read_text(encoding="utf-8", errors="replace").splitlines())
            raise EnvironmentProblem(f"kafka's storage at {fresh} cannot be formatted: {said}")
        properties.unlink()
        fresh.rename(self.data)

    def _properties(self, data: Path) -> dict[str, object]:
        ports = self.state.ports
        return {
            "process.roles": "broker,controller",
            "node.id": _NODE_ID,
            # Static voters: unlike dynamic ones they are read at each start, so the port may change.
            "controller.quorum.voters": f"{_NODE_ID}@{LOOPBACK}:{ports.kafka_controller}",
            "listeners": f"PLAINTEXT://{LOOPBACK}:{ports.kafka},CONTROLLER://{LOOPBACK}:{ports.kafka_controller}",
            "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{ports.kafka}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": data,
            **SMALL_BROKER,
            # A single broker cannot keep the three copies that these ask for by default.
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            **self.state.kafka_settings,
        }

    def _log_options(self, log: Path) -> list[str]:
        return [
            f"-Dlog4j2.configurationFile={_RESOURCES / 'log4j2.xml'}",
            f"-Drollbridge.log={log}",
        ]

    def command(self) -> list[str]:
        options = [*self._log_options(self.log), *self.archive.use_or_record()]
        return self.jvm.command("kafka.Kafka", str(self._properties_file), options=options)

    def answers(self) -> bool:
        return kafka_answers(self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperServer:
    """One ZooKeeper, alone."""

    home: Home
    state: State
    jvm: Jvm

    name: str = ZOOKEEPER

    @property
    def log(self) -> Path:
        return self.home.logs / "zookeeper.log"

    @property
    def _properties_file(self) -> Path:
        return self.home.of(ZOOKEEPER) / "zoo.cfg"

    def prepare(self) -> None:
        data = self.home.of(ZOOKEEPER) / "data"
        data.mkdir(parents=True, exist_ok=True)
        _write_properties(
            self._properties_file,
            {
                "dataDir": data,
                "clientPort": self.state.ports.zookeeper,
                "clientPortAddress": LOOPBACK,
                # Sessions may be as short as two ticks; with the default tick no takeover is faster than 4 s.
                "tickTime": 500,
                "maxSessionTimeout": 60_000,
                "maxClientCnxns": 0,
                "admin.enableServer": "false",
                "4lw.commands.whitelist": "srvr,ruok,mntr",
                "autopurge.snapRetainCount": 3,
                "autopurge.purgeInterval": 1,
                # Of each log file, in KiB; the default of 64 MiB is more than all the data here.
                "preAllocSize": 4096,
                **self.state.zookeeper_settings,
            },
        )

    def command(self) -> list[str]:
        options = [
            f"-Dlogback.configurationFile={_RESOURCES / 'logback.xml'}",
            f"-Drollbridge.log={self.log}",
        ]
        if self.state.ephemeral:
            # Survives a killed process as before, only not a power failure.
            options.append("-Dzookeeper.forceSync=no")
        return self.jvm.command(
            "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(self._properties_file), options=options
        )

    def answers(self) -> bool:
        return zookeeper_answers(self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorDaemon:
    """One coordinator; it is up when ``expected`` have registered in ZooKeeper that are not among ``before``."""

    home: Home
    state: State
    name: str
    before: frozenset[tuple[str, int]]
    expected: int = 1
    """How many are being started together; which of them has registered cannot be told from outside."""
    program: Sequence[str] = COORDINATOR_PROGRAM

    @property
    def log(self) -> Path:
        return self.home.logs / f"{self.name}.log"

    def prepare(self) -> None:
        """It reads nothing but its command line."""

    def command(self) -> list[str]:
        return [
            sys.executable,
            *self.program,
            "--bootstrap-servers",
            self.state.bootstrap_servers,
            "--zookeeper",
            self.state.zookeeper,
            "--zookeeper-root",
            probes.ZOOKEEPER_ROOT,
        ]

    def answers(self) -> bool:
        registered = probes.registered_coordinators(self.state.zookeeper)
        return registered is not None and len(registered - self.before) >= self.expected


def kafka_answers(state: State) -> bool:
    """Whether the broker of this cluster answers: another one may have come to listen on its port."""
    return probes.kafka_cluster_id(state.bootstrap_servers) == state.kafka_cluster_id


def zookeeper_answers(state: State) -> bool:
    """Whether ZooKeeper serves."""
    return probes.zookeeper_mode(state.zookeeper) is not None


def coordinators_answer(state: State, count: int) -> bool:
    """Whether at least as many coordinators are registered; which of them, only they know."""
    registered = probes.registered_coordinators(state.zookeeper)
    return registered is not None and len(registered) >= count


def telling_line(lines: Sequence[str]) -> str:
    """The line of a server's output that most likely says what is wrong: the last that names an error, or the last."""
    said = [line.strip() for line in lines if line.strip() and not _STACK_FRAME.match(line)]
    troubles = [line for line in said if _TROUBLE.search(line)]
    return (troubles or said or ["it says nothing"])[-1][:300]


def _write_properties(path: Path, properties: Mapping[str, object]) -> None:
    write_privately(path, "".join(f"{key}={value}\n" for key, value in properties.items()))
