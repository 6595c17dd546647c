"""Clusters of their own for a test run or a demo: real servers, gone without a trace afterwards.

::

    with ProcessCluster() as cluster:
        coordinator = cluster.start_coordinator()
        ... rollbridge.connect(cluster.bootstrap_servers, zookeeper=cluster.zookeeper) ...
        cluster.restart("kafka")
        cluster.kill_coordinator(coordinator)

Its nodes provide the same operations on each runtime.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollbridge.errors import LocalEnvironmentError, RollbridgeError
from rollbridge_devcluster.cluster import DevCluster
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.nodes import Node, ProcessNode
from rollbridge_devcluster.reaper import Reaper
from rollbridge_devcluster.services import COORDINATOR_PROGRAM
from rollbridge_devcluster.state import (
    COORDINATOR_PREFIX,
    KAFKA,
    LOOPBACK,
    ZOOKEEPER,
    ClusterState,
    Home,
    Wishes,
    free_port,
)


class EphemeralCluster(ABC):
    """Brokers and ZooKeeper servers, and coordinators on request.

    Nodes are known by the name of their part: ``kafka`` and ``zookeeper``, or ``kafka-1``, ``zookeeper-1`` and so on
    where there are several. The cluster cannot outlive this process. Usable as a context manager; not safe for use from
    several threads at once.
    """

    brokers: Sequence[str]
    """Names of the brokers' parts."""
    zookeepers: Sequence[str]
    """Names of the ZooKeeper servers' parts."""

    def __init__(self) -> None:
        self._coordinators = 0

    @abstractmethod
    def start(self) -> Self:
        """Start all servers and return when they answer.

        Raises:
            LocalEnvironmentError: something is missing on this machine, or a server does not start; nothing is left
                running, and notes of the error have the servers' output.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop everything and remove the data; harmless when nothing runs."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.stop()

    # -- where things are -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def bootstrap_servers(self) -> str:
        """Kafka's address for clients on this machine; stable over restarts."""

    @property
    @abstractmethod
    def zookeeper(self) -> str:
        """ZooKeeper's address for clients on this machine; stable over restarts."""

    @property
    @abstractmethod
    def kafka_cluster_id(self) -> str:
        """Kafka's own cluster id."""

    @abstractmethod
    def node(self, part: str) -> Node:
        """Return the node of a part.

        Raises:
            NotFoundError: there is none.
        """

    # -- faults -----------------------------------------------------------------------------------------

    def runs(self, part: str) -> bool:
        """Return True if a part runs."""
        return self.node(part).runs()

    def kill(self, part: str) -> None:
        """SIGKILL a part, and return when it is gone.

        Raises:
            NotFoundError: it does not run.
        """
        self.node(part).kill()

    def pause(self, part: str) -> None:
        """Pause a part: its connections stay open, and it does not answer.

        Raises:
            NotFoundError: it does not run.
        """
        self.node(part).pause()

    def resume(self, part: str) -> None:
        """Resume a paused part."""
        self.node(part).resume()

    @contextmanager
    def paused(self, part: str) -> Iterator[None]:
        """Pause a part for the length of a block."""
        with self.node(part).paused():
            yield

    def restart(self, part: str, *, gracefully: bool = True) -> None:
        """Restart a part on the same data and address, and return when it answers."""
        self.node(part).restart(gracefully=gracefully)

    @abstractmethod
    def add_listener(self, name: str, advertised: str) -> str:
        """Add a listener to the only broker, which advertises it as ``advertised``; restarts the broker.

        A client that connects through a proxy at ``advertised`` stays on that way.

        Args:
            name: Of the listener, in capital letters.
            advertised: ``host:port``.
        """

    # -- coordinators -----------------------------------------------------------------------------------

    @abstractmethod
    def start_coordinator(self, *, env: Mapping[str, str] | None = None) -> Node:
        """Start one more coordinator, with these environment variables, and return when it has registered."""

    def next_coordinator(self) -> str:
        """Return a name for one more coordinator."""
        self._coordinators += 1
        return f"{COORDINATOR_PREFIX}{self._coordinators}"

    def kill_coordinator(self, coordinator: Node) -> None:
        """SIGKILL a coordinator and return when it is gone; harmless when it is already."""
        if coordinator.alive:
            coordinator.kill()

    def stop_coordinator(self, coordinator: Node) -> None:
        """Stop a coordinator with SIGTERM, and return when it has ended."""
        coordinator.stop()


class ProcessCluster(EphemeralCluster):
    """One Kafka broker and one ZooKeeper as child processes, with data in a temporary directory."""

    brokers: Sequence[str] = (KAFKA,)
    zookeepers: Sequence[str] = (ZOOKEEPER,)

    def __init__(
        self,
        *,
        kafka_settings: Mapping[str, str] | None = None,
        kafka_heap: str = "512m",
        short_lived: bool = True,
        home: Path | None = None,
        cache: JarCache | None = None,
        **wishes: Any,
    ) -> None:
        """Record the request; ``start`` starts the cluster.

        Args:
            kafka_settings: Broker settings on top of our defaults.
            kafka_heap: As after ``-Xmx``.
            short_lived: False for measurements: the JVM compiles for speed, and starts more slowly.
            home: A directory that does not exist yet; a temporary one by default.
            cache: The servers' jars; those of ``rollbridge up`` by default.
            wishes: Other fields of :class:`~rollbridge_devcluster.state.Wishes`.
        """
        super().__init__()
        self._wishes = Wishes(
            ephemeral=True,
            short_lived=short_lived,
            kafka_heap=kafka_heap,
            kafka_settings=dict(kafka_settings or {}),
            **{"coordinators": 0, **wishes},
        )
        self._home = home
        self._cache = cache or JarCache.default()
        self._cluster: DevCluster | None = None
        self._state: ClusterState | None = None
        self._reaper: Reaper | None = None

    def start(self) -> Self:
        if self._cluster is not None:
            return self
        home = Home(self._home or Path(tempfile.mkdtemp(prefix="rollbridge-")))
        self._reaper = Reaper("rollbridge_devcluster", "reap", str(home.path))
        self._cluster = DevCluster(home, self._cache)
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

    def _start_servers(self, cluster: DevCluster, wishes: Wishes) -> ClusterState:
        return cluster.up(wishes).state

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.down()
        if self._reaper is not None:
            self._reaper.dismiss()
        self._cluster = self._state = self._reaper = None
        self._coordinators = 0

    @property
    def bootstrap_servers(self) -> str:
        return self._running()[1].bootstrap_servers

    @property
    def zookeeper(self) -> str:
        return self._running()[1].zookeeper

    @property
    def kafka_cluster_id(self) -> str:
        return self._running()[1].kafka_cluster_id

    @property
    def gateway(self) -> str:
        """The gateway's address, if one was wished for."""
        return self._running()[1].gateway

    @property
    def home(self) -> Path:
        """The temporary directory; with ``ROLLBRIDGE_HOME`` set to it, the command line finds this cluster."""
        return self._running()[0].home.path

    @property
    def logs(self) -> Path:
        """The directory with the servers' logs."""
        return self._running()[0].home.logs

    def node(self, part: str) -> ProcessNode:
        return self._running()[0].node(part)

    def add_listener(self, name: str, advertised: str) -> str:
        cluster, state = self._running()
        ports = state.ports
        address = f"{LOOPBACK}:{free_port()}"
        plain, controller = f"{LOOPBACK}:{ports.kafka}", f"{LOOPBACK}:{ports.kafka_controller}"
        settings = {
            **state.kafka_settings,
            "listeners": f"PLAINTEXT://{plain},CONTROLLER://{controller},{name}://{address}",
            "advertised.listeners": f"PLAINTEXT://{plain},{name}://{advertised}",
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,{name}:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }
        cluster.node(KAFKA).stop()
        # Asked for by number, so that a port that is lost is an error and not another address.
        wishes = Wishes(kafka_port=ports.kafka, zookeeper_port=ports.zookeeper, kafka_settings=settings)
        self._state = cluster.up(wishes, only=[KAFKA]).state
        return address

    def start_coordinator(
        self, *, env: Mapping[str, str] | None = None, program: Sequence[str] = COORDINATOR_PROGRAM
    ) -> ProcessNode:
        """Start one more coordinator; ``program`` is the program for Python."""
        cluster, _ = self._running()
        part = self.next_coordinator()
        cluster.up(only=[part], environment=env, program=program)
        return cluster.node(part)

    def _running(self) -> tuple[DevCluster, ClusterState]:
        if self._cluster is None or self._state is None:
            raise LocalEnvironmentError("the cluster of processes is not started")
        return self._cluster, self._state
