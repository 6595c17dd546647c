"""Coordinator processes for tests that kill them: each test has a ZooKeeper root path of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from integration_tests.crashing import CRASH_AT, program
from integration_tests.patience import PATIENCE_S, end, eventually
from rollbridge.metadata import paths
from rollbridge.metadata.records import ControllerEpoch
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.names import GroupName

SESSION_TIMEOUT_S = 1.0
VALIDATING = {"ROLLBRIDGE_COORDINATOR_VALIDATE": "true"}
"""For the environment of coordinators that check their state after each step."""
TERM_ENDS = ("lead.lost ", "lead.given-up ")
"""How a leader says that its term has ended: what tells it first, Kafka's fence or its session, is a matter of luck."""


def has_lost_the_lead(log: str) -> bool:
    """Whether a coordinator's log says so."""
    return any(words in log for words in TERM_ENDS)


class Servers(Protocol):
    """Where Kafka and ZooKeeper are."""

    @property
    def bootstrap_servers(self) -> str:
        """Kafka's address."""

    @property
    def zookeeper(self) -> str:
        """ZooKeeper's address."""


def command(
    cluster: Servers,
    root: str,
    name: str,
    environment: Mapping[str, str],
    *,
    kafka: str | None = None,
    zookeeper: str | None = None,
) -> list[str]:
    """Return the command line of a coordinator, which may have its own way to the servers."""
    return [
        sys.executable,
        *program(environment),
        f"--bootstrap-servers={kafka or cluster.bootstrap_servers}",
        f"--zookeeper={zookeeper or cluster.zookeeper}",
        f"--zookeeper-root={root}",
        f"--session-timeout={SESSION_TIMEOUT_S}",
        f"--name={name}",
    ]


@contextmanager
def coordinator(
    cluster: Servers,
    root: str,
    name: str,
    logs: Path,
    *,
    kafka: str | None = None,
    zookeeper: str | None = None,
    arguments: Sequence[str] = (),
    unix_group: str | None = None,
    **environment: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator process with a short session, which may be killed or paused; it logs to ``logs/NAME.log``."""
    with (logs / f"{name}.log").open("ab") as output:
        process = subprocess.Popen(
            [*command(cluster, root, name, environment, kafka=kafka, zookeeper=zookeeper), *arguments],
            stdout=output,
            stderr=output,
            env={**os.environ, **VALIDATING, **environment},
            group=None if unix_group is None else int(unix_group),
        )
    try:
        yield process
    finally:
        end(process, logs / f"{name}.log")


def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait for a condition."""
    eventually(condition, "the state that was waited for did not come", timeout_s)


def controller_epoch(session: ZooKeeperSession, group: GroupName) -> int:
    """How many terms a group has had: each one begins by raising it."""
    node = session.get(paths.controller(group))
    return 0 if node is None else ControllerEpoch.from_json(node.value).epoch


class Relay:
    """Coordinators one after the other: when one dies, the next is started, each with its own crash point.

    The last one has no crash point. ``deaths`` counts those that killed themselves as asked.
    """

    def __init__(
        self,
        cluster: Servers,
        root: str,
        logs: Path,
        crash_points: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = {**os.environ, **VALIDATING, **(environment or {})}
        self._cluster = cluster
        self._root = root
        self._logs = logs
        self._points: list[str | None] = [*crash_points, None]
        self._lock = threading.Lock()
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self.deaths = 0
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._stopping = True
            if self._process is not None:
                self._process.terminate()
        self._thread.join(PATIENCE_S)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
        if error is not None:
            for log in sorted(self._logs.glob("coordinator-*.log")):
                error.add_note(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")

    def _run(self) -> None:
        for number, point in enumerate(self._points):
            environment = {**self._environment, **({CRASH_AT: point} if point else {})}
            with self._lock, (self._logs / f"coordinator-{number}.log").open("wb") as log:
                if self._stopping:
                    return
                self._process = subprocess.Popen(
                    command(self._cluster, self._root, f"coordinator-{number}", environment),
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
            if self._process.wait() == -signal.SIGKILL and point:
                self.deaths += 1
