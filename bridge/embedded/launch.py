"""Start the servers of an embedded cluster side by side, and wait until each answers or say why it does not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from bridge.embedded import probes, processes
from bridge.embedded.jars import JarCache
from bridge.embedded.java import ClassArchive, Java, Jvm, find_java, forget_recordings
from bridge.embedded.servers import (
    COORDINATOR_PREFIX,
    KAFKA,
    ZOOKEEPER,
    CoordinatorDaemon,
    KafkaServer,
    Server,
    ZooKeeperServer,
)
from bridge.embedded.state import Home, State
from bridge.errors import EnvironmentProblem

START_SECONDS: Final = 90.0
"""How long a server may take until it answers; a broker that was killed reads its logs again first."""
_POLL_SECONDS = 0.03

_ADDRESS_IN_USE = re.compile(r"java\.net\.BindException|Address already in use")
_TROUBLE = re.compile(r"\bERROR\b|\bFATAL\b|Exception|[Ee]rror:|No module named")

Report = Callable[[str], object]
"""Is told, in a line each, what happens."""


class PortLost(EnvironmentProblem):
    """Somebody took a port between the moment it was found free and the server's start."""


class Launcher:
    """Starts parts of one cluster; ``started`` names those whose process was started, answering or not."""

    def __init__(self, home: Home, state: State, cache: JarCache, report: Report) -> None:
        self._home = home
        self._state = state
        self._cache = cache
        self._report = report
        self.started: list[str] = []

    def start(self, parts: Sequence[str], coordinator_env: Mapping[str, str]) -> None:
        """Start the named parts and return when all of them answer.

        Raises:
            PortLost: a server could not listen on its port.
            EnvironmentProblem: Java or the jars are missing, or a server does not start.
        """
        for directory in (self._home.logs, self._home.scratch):
            directory.mkdir(parents=True, exist_ok=True)
        # ZooKeeper first: it starts while Kafka's storage is still being formatted.
        servers = [part for part in (ZOOKEEPER, KAFKA) if part in parts]
        if servers:
            java = find_java()
            self._cache.ensure(ZOOKEEPER, KAFKA)
            self._start_together([self._java_server(part, java) for part in servers])
        coordinators = [part for part in parts if part.startswith(COORDINATOR_PREFIX)]
        if coordinators:
            before = probes.registered_coordinators(self._state.zookeeper) or frozenset()
            daemons = [
                CoordinatorDaemon(
                    home=self._home,
                    state=self._state,
                    name=name,
                    before=before,
                    expected=len(coordinators),
                )
                for name in coordinators
            ]
            self._start_together(daemons, coordinator_env)

    def _java_server(self, part: str, java: Java) -> Server:
        classpath = [self._cache.location(jar) for jar in self._cache.jars(part)]

        def jvm(heap: str) -> Jvm:
            return Jvm(
                java=java,
                classpath=classpath,
                heap=heap,
                short_lived=self._state.short_lived,
                scratch=self._home.scratch,
            )

        if part == ZOOKEEPER:
            return ZooKeeperServer(home=self._home, state=self._state, jvm=jvm("256m"))
        forget_recordings(self._home.scratch)
        return KafkaServer(
            home=self._home,
            state=self._state,
            jvm=jvm(self._state.kafka_heap),
            archive=ClassArchive.of(KAFKA, java, classpath, self._cache.directory, self._home.scratch),
        )

    def _start_together(self, servers: Sequence[Server], env: Mapping[str, str] | None = None) -> None:
        running: list[tuple[Server, psutil.Process, float]] = []
        for server in servers:
            began = time.monotonic()
            server.prepare()
            self.started.append(server.name)
            process = processes.spawn(
                server.command(),
                home=self._home.path,
                part=server.name,
                output=_output(server),
                env=env,
            )
            running.append((server, process, began))
        for server, process, began in running:
            self._wait(server, process)
            self._report(f"{server.name} answers after {time.monotonic() - began:.1f} s")

    def _wait(self, server: Server, process: psutil.Process) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not server.answers():
            if not processes.is_alive(process):
                raise _failure(server, "ended while it was starting")
            if time.monotonic() > deadline:
                raise _failure(server, f"does not answer after {START_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)


def _output(server: Server) -> Path:
    return server.log.with_suffix(".out")


def _failure(server: Server, what: str) -> EnvironmentProblem:
    """Name the server, its own words on the matter, and where the rest of them stand."""
    logs = [path for path in (server.log, _output(server)) if path.exists()]
    lines = [line for path in logs for line in _last_lines(path)]
    told = [line.strip() for line in lines if _TROUBLE.search(line)] or [line.strip() for line in lines if line.strip()]
    words = f": {told[-1][:300]}" if told else ""
    error = PortLost if any(_ADDRESS_IN_USE.search(line) for line in lines) else EnvironmentProblem
    return error(f"{server.name} {what}{words}; more in {server.log.parent}")


def _last_lines(path: Path, count: int = 60) -> list[str]:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 100_000))
        return file.read().decode(errors="replace").splitlines()[-count:]
