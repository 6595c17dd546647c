"""Start, look at and stop an embedded cluster: bring what runs in line with what is wanted.

``up`` starts only what does not run, so it is also how a part that died comes back. Whoever changes a cluster holds
its lock, and the operating system is asked what runs (``rollbridge.embedded.processes``), so repeated, concurrent and
half-failed starts are no special cases.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psutil

from rollbridge.embedded import processes
from rollbridge.embedded.jars import JarCache
from rollbridge.embedded.java import keep_recordings, records_classes
from rollbridge.embedded.launch import Launcher, PortLost, Report
from rollbridge.embedded.plan import Wishes, decide, refuse_foreign_directory
from rollbridge.embedded.servers import COORDINATOR_PREFIX, COORDINATOR_PROGRAM, KAFKA, ZOOKEEPER
from rollbridge.embedded.state import Home, State
from rollbridge.errors import EnvironmentProblem, NotFoundError

_log = logging.getLogger(__name__)

STOP_SECONDS: Final = 30.0
"""How long a server may take to stop in good order before it is killed."""
_UNDO_SECONDS = 5.0
_PORT_ATTEMPTS = 3

Running = Mapping[str, list[psutil.Process]]
"""Live processes by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What ``up`` found and did."""

    state: State
    parts: tuple[str, ...]
    """What this call started, in this order; nothing when all was running."""


class Cluster:
    """The embedded cluster in one directory."""

    def __init__(self, home: Home, cache: JarCache | None = None, report: Report = lambda line: None) -> None:
        self.home = home
        self._cache = cache or JarCache.default()
        self._report = report

    def up(
        self,
        wishes: Wishes | None = None,
        *,
        only: Sequence[str] | None = None,
        coordinator_env: Mapping[str, str] | None = None,
        coordinator_program: Sequence[str] = COORDINATOR_PROGRAM,
    ) -> Started:
        """Promise that everything (or the parts in ``only``) runs and answers when this returns.

        If it fails, whatever it started is stopped again; what ran before goes on running.

        Raises:
            EnvironmentProblem: Java or the jars are missing, a port is in use, a server does not start.
        """
        wishes = wishes or Wishes()
        refuse_foreign_directory(self.home, wishes)
        with self._locked():
            for attempt in range(_PORT_ATTEMPTS):
                try:
                    return self._up(wishes, only, coordinator_env or {}, coordinator_program)
                except PortLost as exc:
                    # Only a port that nobody asked for may be another one next time.
                    asked = (wishes.kafka_port, wishes.zookeeper_port)
                    if attempt == _PORT_ATTEMPTS - 1 or any(asked):
                        raise
                    _log.info("trying other ports: %s", exc)
        raise AssertionError("the last attempt returns or raises")

    def _up(
        self, wishes: Wishes, only: Sequence[str] | None, env: Mapping[str, str], program: Sequence[str]
    ) -> Started:
        running = processes.find(self.home.path)
        before = self.home.load()
        state = decide(self.home, before, wishes, running)
        if before is not None and _addresses(before) != _addresses(state):
            # A server that died comes back elsewhere; coordinators that still run know only the old address.
            self._stop(running, coordinators_of(running), _UNDO_SECONDS)
            running = processes.find(self.home.path)
        if state != before:
            self.home.save(state)
        wanted = [ZOOKEEPER, KAFKA, *(f"{COORDINATOR_PREFIX}{n + 1}" for n in range(state.coordinators))]
        missing = [part for part in (wanted if only is None else only) if part not in running]
        launcher = Launcher(self.home, state, self._cache, self._report)
        try:
            launcher.start(missing, env, program)
            launcher.await_running({part: found for part, found in running.items() if only is None})
        except BaseException:
            self._stop(processes.find(self.home.path), launcher.started, _UNDO_SECONDS)
            if not running:
                self.home.save(state.stopped())
            raise
        return Started(state=state, parts=tuple(launcher.started))

    def down(self) -> tuple[str, ...]:
        """Promise that nothing of the cluster runs when this returns; names what it stopped.

        Raises:
            EnvironmentProblem: a process cannot be ended.
        """
        if not self.home.path.is_dir():
            return ()
        with self._locked():
            running = processes.find(self.home.path)
            state = self._load_if_readable()
            # An ephemeral cluster need not be left in order, unless its broker records classes for the next ones.
            hurry = state is not None and state.ephemeral and not any(map(_records, running.get(KAFKA, [])))
            self._stop(running, list(running), 0 if hurry else STOP_SECONDS)
            if left := processes.find(self.home.path):
                pids = ", ".join(f"{part} (process {p.pid})" for part, found in left.items() for p in found)
                raise EnvironmentProblem(f"still there even after SIGKILL: {pids}")
            shutil.rmtree(self.home.scratch, ignore_errors=True)
            if state is not None and state.ephemeral:
                shutil.rmtree(self.home.path)
            elif state is not None and state.running:
                self.home.save(state.stopped())
        return tuple(running)

    def stop_part(self, part: str, *, patience_seconds: float = STOP_SECONDS) -> bool:
        """Stop one part and leave the others; returns whether it ran."""
        running = processes.find(self.home.path)
        self._stop(running, [part], patience_seconds)
        return part in running

    def processes(self, part: str) -> list[psutil.Process]:
        """The live processes of one part, at least one.

        Raises:
            NotFoundError: it does not run.
        """
        found = processes.find(self.home.path).get(part)
        if not found:
            raise NotFoundError(f"{part} does not run in {self.home.path}")
        return found

    def _stop(self, running: Running, parts: Iterable[str], patience_seconds: float) -> None:
        """Stop parts so that none loses what it needs before itself: coordinators, Kafka, ZooKeeper."""
        named = set(parts) & set(running)
        for together in (named - {KAFKA, ZOOKEEPER}, named & {KAFKA}, named & {ZOOKEEPER}):
            members = [process for part in together for process in running[part]]
            recorded = any(map(_records, members))
            if processes.stop(members, patience_seconds) and recorded:
                keep_recordings(self.home.scratch, self._cache.directory)
            for part in sorted(together):
                self._report(f"{part} stopped")

    def _load_if_readable(self) -> State | None:
        try:
            return self.home.load()
        except EnvironmentProblem as exc:
            _log.warning("%s", exc)
            return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        waiting = f"waiting for another rollbridge command that is changing {self.home.path}"
        with self.home.locked(lambda: self._report(waiting)):
            yield


def _addresses(state: State) -> tuple[str, str]:
    return state.bootstrap_servers, state.zookeeper


def coordinators_of(running: Iterable[str]) -> list[str]:
    """The coordinators among some parts, in order."""
    return sorted(part for part in running if part.startswith(COORDINATOR_PREFIX))


def _records(process: psutil.Process) -> bool:
    try:
        return records_classes(process.cmdline())
    except psutil.Error:
        return False
