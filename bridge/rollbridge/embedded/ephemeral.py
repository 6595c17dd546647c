"""A cluster of its own for a test run: real servers, gone without a trace afterwards.

::

    with EmbeddedCluster() as cluster:
        coordinator = cluster.start_coordinator()
        ... rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper) ...
        cluster.restart("kafka")
        cluster.kill_coordinator(coordinator)
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from rollbridge.embedded import processes
from rollbridge.embedded.cluster import STOP_SECONDS, Cluster
from rollbridge.embedded.jars import JarCache
from rollbridge.embedded.plan import Wishes
from rollbridge.embedded.ports import LOOPBACK, free_port
from rollbridge.embedded.reaper import Reaper
from rollbridge.embedded.servers import COORDINATOR_PREFIX, COORDINATOR_PROGRAM, KAFKA
from rollbridge.embedded.state import Home, State
from rollbridge.errors import EnvironmentProblem, RollbridgeError

_POLL_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorHandle:
    """A coordinator that a test has started."""

    name: str
    """The part's name, for ``kill``, ``pause``, ``resume`` and ``restart``."""
    pid: int
    log: Path
    """What it has logged and printed."""
    process: psutil.Process

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return processes.is_alive(self.process)

    def wait_exit(self, timeout_seconds: float) -> int:
        """Wait until it has ended; returns its exit code, negative when a signal ended it.

        Raises:
            TimeoutError: it still runs.
        """
        deadline = time.monotonic() + timeout_seconds
        while (code := processes.exit_code(self.pid)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} (process {self.pid}) still runs after {timeout_seconds} s")
            time.sleep(_POLL_SECONDS)
        return code


class EmbeddedCluster:
    """One Kafka broker and one ZooKeeper as child processes, with data in a temporary directory.

    They cannot outlive this process, however it ends. Usable as a context manager. Not safe for use from several
    threads at once.
    """

    def __init__(
        self,
        *,
        kafka_settings: Mapping[str, str] | None = None,
        kafka_heap: str = "512m",
        short_lived: bool = True,
        cache: JarCache | None = None,
    ) -> None:
        """Only notes what is wanted; ``start`` starts it.

        Args:
            kafka_settings: Broker settings on top of the defaults of the embedded cluster.
            kafka_heap: As after ``-Xmx``.
            short_lived: False for measurements: the JVM compiles for speed, and starts more slowly.
            cache: Where the jars are; the user's cache by default.
        """
        self._wishes = Wishes(
            ephemeral=True,
            coordinators=0,
            short_lived=short_lived,
            kafka_heap=kafka_heap,
            kafka_settings=dict(kafka_settings or {}),
        )
        self._cache = cache
        self._cluster: Cluster | None = None
        self._state: State | None = None
        self._reaper: Reaper | None = None
        self._coordinators: dict[str, tuple[Mapping[str, str], Sequence[str]]] = {}

    # -- life ---------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start both servers and return when they answer.

        Raises:
            EnvironmentProblem: Java or the jars are missing, or a server does not start; nothing is left behind.
        """
        if self._cluster is not None:
            return self
        home = Home(Path(tempfile.mkdtemp(prefix="rollbridge-")))
        self._reaper = Reaper(home.path)
        self._cluster = Cluster(home, self._cache)
        try:
            self._state = self._start_servers(self._cluster, self._wishes)
        except BaseException as exc:
            if isinstance(exc, RollbridgeError):
                # The logs are about to go.
                for log in sorted(home.logs.glob("*")):
                    exc.add_note(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop everything and remove the data; harmless when nothing runs."""
        if self._cluster is not None:
            self._cluster.down()
        if self._reaper is not None:
            self._reaper.dismiss()
        self._cluster = self._state = self._reaper = None
        self._coordinators.clear()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- where things are -----------------------------------------------------------------------------

    @property
    def bootstrap_servers(self) -> str:
        """Kafka's address; it stays the same over restarts."""
        return self._running()[1].bootstrap_servers

    @property
    def zookeeper(self) -> str:
        """ZooKeeper's address; it stays the same over restarts."""
        return self._running()[1].zookeeper

    @property
    def kafka_cluster_id(self) -> str:
        """The id that Kafka gives for itself."""
        return self._running()[1].kafka_cluster_id

    @property
    def home(self) -> Path:
        """The temporary directory; with ``ROLLBRIDGE_HOME`` set to it, the command line finds this cluster."""
        return self._running()[0].home.path

    @property
    def logs(self) -> Path:
        """The directory with what the servers say."""
        return self._running()[0].home.logs

    # -- faults -----------------------------------------------------------------------------------------

    def kill(self, part: str) -> None:
        """SIGKILL ``kafka``, ``zookeeper`` or a coordinator, and return when it is gone.

        Raises:
            NotFoundError: it does not run.
        """
        processes.kill(self._running()[0].processes(part))

    def pause(self, part: str) -> None:
        """SIGSTOP a part: its connections stay open and nothing answers.

        Raises:
            NotFoundError: it does not run.
        """
        for process in self._running()[0].processes(part):
            processes.pause(process)

    def resume(self, part: str) -> None:
        """SIGCONT a paused part.

        Raises:
            NotFoundError: it does not run.
        """
        for process in self._running()[0].processes(part):
            processes.send(process, signal.SIGCONT)

    @contextmanager
    def paused(self, part: str) -> Iterator[None]:
        """Pause a part for the length of a block."""
        self.pause(part)
        try:
            yield
        finally:
            self.resume(part)

    def restart(self, part: str, *, gracefully: bool = True) -> None:
        """Stop a part if it runs, start it again on the same data and address, and return when it answers."""
        cluster, state = self._running()
        cluster.stop_part(part, patience_seconds=STOP_SECONDS if gracefully else 0)
        # Asked for by number, so that a port that is lost is an error and not another address.
        same = Wishes(kafka_port=state.ports.kafka, zookeeper_port=state.ports.zookeeper)
        env, program = self._coordinators.get(part, ({}, COORDINATOR_PROGRAM))
        cluster.up(same, only=[part], coordinator_env=env, coordinator_program=program)

    def add_listener(self, name: str, advertised: str) -> str:
        """Have the broker listen at one more address, where it says that it is at ``advertised``; restarts it.

        Whoever connects there through a proxy at ``advertised`` stays on that way.

        Args:
            name: Of the listener, in capital letters.
            advertised: ``host:port``.
        """
        cluster, state = self._running()
        ports = state.ports
        address = f"{LOOPBACK}:{free_port(set())}"
        plain, controller = f"{LOOPBACK}:{ports.kafka}", f"{LOOPBACK}:{ports.kafka_controller}"
        settings = {
            **state.kafka_settings,
            "listeners": f"PLAINTEXT://{plain},CONTROLLER://{controller},{name}://{address}",
            "advertised.listeners": f"PLAINTEXT://{plain},{name}://{advertised}",
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,{name}:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }
        cluster.stop_part(KAFKA)
        wishes = Wishes(kafka_port=ports.kafka, zookeeper_port=ports.zookeeper, kafka_settings=settings)
        self._state = cluster.up(wishes, only=[KAFKA]).state
        return address

    # -- coordinators -------------------------------------------------------------------------------------

    def start_coordinator(
        self, *, env: Mapping[str, str] | None = None, program: Sequence[str] = COORDINATOR_PROGRAM
    ) -> CoordinatorHandle:
        """Start one more coordinator and return when it has registered.

        Args:
            env: Environment variables on top of this process's.
            program: What Python is to run as a coordinator.
        """
        cluster, _ = self._running()
        name = f"{COORDINATOR_PREFIX}{len(self._coordinators) + 1}"
        self._coordinators[name] = env or {}, program
        cluster.up(only=[name], coordinator_env=env, coordinator_program=program)
        return self._handle(name)

    def kill_coordinator(self, handle: CoordinatorHandle) -> None:
        """SIGKILL a coordinator and return when it is gone; harmless when it is already."""
        if handle.alive:
            processes.kill([handle.process])

    def stop_coordinator(self, handle: CoordinatorHandle) -> None:
        """Ask a coordinator to end, and return when it has."""
        self._running()[0].stop_part(handle.name)

    def _handle(self, name: str) -> CoordinatorHandle:
        cluster, _ = self._running()
        process = cluster.processes(name)[0]
        return CoordinatorHandle(name=name, pid=process.pid, log=cluster.home.logs / f"{name}.out", process=process)

    def _start_servers(self, cluster: Cluster, wishes: Wishes) -> State:
        """Start both servers; returns when they answer."""
        return cluster.up(wishes).state

    def _running(self) -> tuple[Cluster, State]:
        if self._cluster is None or self._state is None:
            raise EnvironmentProblem("the embedded cluster is not started")
        return self._cluster, self._state
