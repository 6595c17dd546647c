"""Start, inspect and stop a cluster of processes: make the running parts match the request.

``up`` starts only what does not run, so it also replaces a part that died. Each change of a cluster takes its lock, and
asks the operating system which parts run (:mod:`rollbridge_devcluster.processes`), so repeated, concurrent and
half-failed starts are no special cases.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import psutil

from rollbridge.doctor.probes import RUNNING, ClusterStatus, PartStatus
from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster import processes
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import find_java
from rollbridge_devcluster.nodes import STOP_S, KafkaProcess, ProcessNode
from rollbridge_devcluster.services import process_node, require_gateway, service_parts, services_of
from rollbridge_devcluster.state import (
    COORDINATOR_PREFIX,
    GATEWAY,
    KAFKA,
    ZOOKEEPER,
    ClusterState,
    Home,
    Ports,
    Wishes,
    decide,
    private_directory,
    refuse_foreign_directory,
)

_log = logging.getLogger(__name__)

_UNDO_S: Final = 5.0
_PORT_ATTEMPTS: Final = 3
_NOTHING: Final = ClusterState(
    kafka_cluster_id="", ports=Ports(kafka=0, kafka_controller=0, zookeeper=0), coordinators=0
)

Report = Callable[[str], object]
"""Callback for progress, one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Result of ``up``."""

    state: ClusterState
    parts: tuple[str, ...]
    """Parts that this call started, in this order; empty if all were running."""


class DevCluster:
    """The cluster in one directory."""

    def __init__(self, home: Home, cache: JarCache | None = None, report: Report = lambda line: None) -> None:
        self.home = home
        self._cache = cache or JarCache.default()
        self._report = report
        self._nodes: dict[str, ProcessNode] = {}

    def up(self, wishes: Wishes | None = None, *, only: Sequence[str] | None = None, **coordinator: Any) -> Started:
        """Promise that everything (or the parts in ``only``) runs and answers when this returns.

        On failure, everything it started is stopped again; other parts continue, and a gateway that failed to start is
        no longer part of the cluster.

        Args:
            coordinator: ``environment`` and ``program`` of coordinators, as
                :class:`~rollbridge_devcluster.services.CoordinatorProcess` takes them.

        Raises:
            LocalEnvironmentError: Java or the jars are missing, a port is in use, a server does not start.
        """
        wishes = wishes or Wishes()
        refuse_foreign_directory(self.home, wishes)
        with self._locked():
            for attempt in range(_PORT_ATTEMPTS):
                try:
                    return self._up(wishes, only, coordinator)
                except LocalEnvironmentError as exc:
                    # Another process may have taken a port; one that was not requested may be another one next time.
                    asked = (wishes.kafka_port, wishes.zookeeper_port, wishes.gateway_port)
                    if not vars(exc).get("has_lost_port") or attempt == _PORT_ATTEMPTS - 1 or any(asked):
                        raise
                    _log.info('ports.retry reason="%s"', exc)
        raise AssertionError("the last attempt returns or raises")

    def _up(self, wishes: Wishes, only: Sequence[str] | None, coordinator: Mapping[str, Any]) -> Started:
        running = set(processes.find(self.home.path))
        before = self.home.load()
        state = decide(self.home, before, wishes, running)
        if state.has_gateway:
            require_gateway()
        if only is None and (unwanted := set(services_of(running)) - set(service_parts(state))):
            self._stop(unwanted, STOP_S)
            running -= unwanted
        if before is not None and _addresses(before) != _addresses(state):
            # A server that died comes back elsewhere; services that still run know only the old address.
            self._stop(services_of(running), _UNDO_S)
            running = set(processes.find(self.home.path))
        if state != before:
            self.home.save(state)
        wanted = [ZOOKEEPER, KAFKA, *service_parts(state)]
        missing = [part for part in (wanted if only is None else only) if part not in running]
        started: list[str] = []
        try:
            self._start(missing, state, coordinator, started)
            if only is None:
                for part in (KAFKA, ZOOKEEPER, *services_of(running)):
                    if part in running:  # its start may not have been waited for
                        process_node(self.home, state, part, self._cache).await_answer()
        except BaseException:
            self._stop(started, _UNDO_S)
            if GATEWAY in started and not (before is not None and before.has_gateway):
                state = self.home.save(replace(state, has_gateway=False))
            if not running:
                self.home.save(state.stopped())
            raise
        return Started(state=state, parts=tuple(started))

    def _start(
        self, parts: Sequence[str], state: ClusterState, coordinator: Mapping[str, Any], started: list[str]
    ) -> None:
        """Start the named parts, independent ones together, and return when all of them answer."""
        for directory in (self.home.logs, self.home.scratch):
            private_directory(directory)
        # ZooKeeper first: it starts while Kafka's storage is still being formatted.
        servers = [part for part in (ZOOKEEPER, KAFKA) if part in parts]
        if servers:
            find_java()
            self._cache.ensure(ZOOKEEPER, KAFKA)
        services = services_of(parts)
        # A gateway looks for what a coordinator lays out in ZooKeeper.
        for together in (
            servers,
            [part for part in services if part != GATEWAY],
            [part for part in services if part == GATEWAY],
        ):
            began = time.monotonic()
            nodes = []
            for part in together:
                options = coordinator if part.startswith(COORDINATOR_PREFIX) else {}
                node = self._nodes[part] = process_node(self.home, state, part, self._cache, **options)
                started.append(part)
                nodes.append(node.start())
            for node in nodes:
                node.await_answer()
                self._report(f"{node.part} answers after {time.monotonic() - began:.1f} s")

    def node(self, part: str) -> ProcessNode:
        """Return the node of a part, running or not, started by any process."""
        if part not in self._nodes:
            self._nodes[part] = process_node(self.home, self.home.load() or _NOTHING, part, self._cache)
        return self._nodes[part]

    def down(self) -> tuple[str, ...]:
        """Promise that nothing of the cluster runs when this returns; return the stopped parts.

        Raises:
            LocalEnvironmentError: a process cannot be ended.
        """
        if not self.home.path.is_dir():
            return ()
        with self._locked():
            running = list(processes.find(self.home.path))
            state = self._load_if_readable()
            # An ephemeral cluster need not be left in order, unless its broker records classes for the next ones.
            broker = KafkaProcess(self.home, state or _NOTHING, self._cache)
            hurry = state is not None and state.ephemeral and not broker.is_recording
            self._stop(running, 0 if hurry else STOP_S)
            if left := processes.find(self.home.path):
                pids = ", ".join(f"{part} (process {p.pid})" for part, found in left.items() for p in found)
                raise LocalEnvironmentError(f"still there even after SIGKILL: {pids}")
            shutil.rmtree(self.home.scratch, ignore_errors=True)
            if state is not None and state.ephemeral:
                shutil.rmtree(self.home.path)
            elif state is not None and state.running:
                self.home.save(state.stopped())
        return tuple(running)

    def _stop(self, parts: Iterable[str], patience_s: float) -> None:
        """Stop parts in reverse order of dependency: gateway, coordinators, Kafka, ZooKeeper."""
        named = set(parts) & set(processes.find(self.home.path))
        state = self._load_if_readable() or _NOTHING
        others = sorted(named - {GATEWAY, KAFKA, ZOOKEEPER})
        for together in ([GATEWAY], others):  # coordinators together, since each may take a while
            found = processes.find(self.home.path)
            processes.stop(
                [process for part in together if part in named for process in found.get(part, ())], patience_s
            )
        for part in (KAFKA, ZOOKEEPER):
            if part in named:
                process_node(self.home, state, part, self._cache).stop(patience_s)
        for part in [part for part in (GATEWAY, *others, KAFKA, ZOOKEEPER) if part in named]:
            self._report(f"{part} stopped")

    def _load_if_readable(self) -> ClusterState | None:
        try:
            return self.home.load()
        except LocalEnvironmentError as exc:
            _log.warning("%s", exc)
            return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        waiting = f"waiting for another rollbridge command that is changing {self.home.path}"
        with self.home.locked(lambda: self._report(waiting)):
            yield

    # -- status ------------------------------------------------------------------------------------------

    def status(self) -> ClusterStatus:
        """Return the state of the cluster.

        Raises:
            LocalEnvironmentError: its state file is not readable.
        """
        state = self.home.load()
        if state is None:
            return ClusterStatus(bootstrap_servers=None, zookeeper=None, parts=(), home=str(self.home.path))
        running = processes.find(self.home.path)
        addresses = {KAFKA: state.bootstrap_servers, ZOOKEEPER: state.zookeeper, GATEWAY: state.gateway}

        def status_of(part: str) -> PartStatus:
            files = files_of(self.home, part)
            return PartStatus(
                part=part,
                state=self._state_of(part, running.get(part), state),
                pid=running[part][0].pid if part in running else None,
                address=addresses.get(part),
                log=files.get("log", files.get("output")),
                files=files,
            )

        names = dict.fromkeys([KAFKA, ZOOKEEPER, *service_parts(state), *services_of(running)])
        parts = [status_of(part) for part in names]
        return ClusterStatus(
            bootstrap_servers=state.bootstrap_servers,
            zookeeper=state.zookeeper,
            parts=tuple(parts),
            home=str(self.home.path),
            ephemeral=state.ephemeral,
        )

    def _state_of(self, part: str, found: Sequence[psutil.Process] | None, state: ClusterState) -> str:
        if not found:
            return "died" if state.running else "stopped"
        try:
            if found[0].status() == psutil.STATUS_STOPPED:
                return "paused"
        except psutil.NoSuchProcess:
            return "died"
        return RUNNING if process_node(self.home, state, part, self._cache).answers() else "not answering"


def files_of(home: Home, part: str) -> dict[str, str]:
    """Return a part's existing files, by their role."""
    kept = home.of(part)
    places = {
        "log": home.logs / f"{part}.log",
        "output": home.logs / f"{part}.out",
        "configuration": kept / ("zoo.cfg" if part == ZOOKEEPER else "server.properties"),
        "data": kept / "data",
    }
    # Omit empty files: they have no information.
    return {
        what: str(path) for what, path in places.items() if path.is_dir() or (path.is_file() and path.stat().st_size)
    }


def _addresses(state: ClusterState) -> tuple[str, str]:
    return state.bootstrap_servers, state.zookeeper
