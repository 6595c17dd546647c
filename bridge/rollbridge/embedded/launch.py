"""Start the servers of an embedded cluster side by side, and wait until each answers or say why it does not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from rollbridge.embedded import probes, processes
from rollbridge.embedded.jars import JarCache
from rollbridge.embedded.java import ClassArchive, Java, Jvm, find_java, forget_recordings
from rollbridge.embedded.servers import (
    COORDINATOR_PREFIX,
    KAFKA,
    ZOOKEEPER,
    CoordinatorDaemon,
    KafkaServer,
    Server,
    ZooKeeperServer,
    coordinators_answer,
    kafka_answers,
    telling_line,
    zookeeper_answers,
)
from rollbridge.embedded.state import Home, State
from rollbridge.errors import EnvironmentProblem

START_SECONDS: Final = 90.0
"""How long a server may take until it answers; a broker that was killed reads its logs again first."""
_POLL_SECONDS = 0.03

_ADDRESS_IN_USE = re.compile(r"java\.net\.BindException|Address already in use")

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

    def start(
        self, parts: Sequence[str], coordinator_env: Mapping[str, str], coordinator_program: Sequence[str]
    ) -> None:
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
                    program=coordinator_program,
                )
                for name in coordinators
            ]
            self._start_together(daemons, coordinator_env)

    def await_running(self, processes_by_part: Mapping[str, Sequence[psutil.Process]]) -> None:
        """Return when parts that were started before answer as well: their start may not have been waited for.

        Raises:
            EnvironmentProblem: one does not.
        """
        coordinators = [part for part in processes_by_part if part.startswith(COORDINATOR_PREFIX)]
        for part, (process, *_) in processes_by_part.items():
            deadline = time.monotonic() + START_SECONDS
            while not self._answers(part, len(coordinators)):
                if not processes.is_alive(process) or time.monotonic() > deadline:
                    raise EnvironmentProblem(
                        f"{part} runs already (process {process.pid}), but does not answer; "
                        f"try `rollbridge restart {part}`; its log is in {self._home.logs}"
                    )
                time.sleep(_POLL_SECONDS)

    def _answers(self, part: str, coordinators: int) -> bool:
        if part == KAFKA:
            return kafka_answers(self._state)
        if part == ZOOKEEPER:
            return zookeeper_answers(self._state)
        return coordinators_answer(self._state, coordinators)

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
        launched = [self._launch(server, env) for server in servers]
        for each in launched:
            _wait(each)
            self._report(f"{each.server.name} answers after {time.monotonic() - each.began:.1f} s")

    def _launch(self, server: Server, env: Mapping[str, str] | None) -> _Launched:
        began = time.monotonic()
        server.prepare()
        logs = (server.log, server.log.with_suffix(".out"))
        read_from = {path: path.stat().st_size if path.exists() else 0 for path in logs}
        self.started.append(server.name)
        process = processes.spawn(server.command(), home=self._home.path, part=server.name, output=logs[1], env=env)
        return _Launched(server, process, began, read_from)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A server that was started; ``read_from`` is where its logs ended before."""

    server: Server
    process: psutil.Process
    began: float
    read_from: Mapping[Path, int]

    def said(self) -> list[str]:
        """The lines that it has logged and printed since."""
        lines: list[str] = []
        for path, start in self.read_from.items():
            if path.exists():
                with open(path, "rb") as file:
                    size = path.stat().st_size
                    # A log that has become shorter was begun anew; of a long one the end says enough.
                    file.seek(max(start if start <= size else 0, size - 100_000))
                    lines += file.read().decode(errors="replace").splitlines()
        return lines


def _wait(launched: _Launched) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        answers = launched.server.answers()
        if not processes.is_alive(launched.process):
            raise _failure(launched, "ended while it was starting")
        if answers:
            return
        if time.monotonic() > deadline:
            raise _failure(launched, f"does not answer after {START_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def _failure(launched: _Launched, what: str) -> EnvironmentProblem:
    """Name the server, its own words on the matter, and where the rest of them stand."""
    said = launched.said()
    error = PortLost if any(_ADDRESS_IN_USE.search(line) for line in said) else EnvironmentProblem
    server = launched.server
    return error(f"{server.name} {what}: {telling_line(said)}; more in {server.log.parent}")
