"""The backend on containers: brokers, ZooKeeper servers and coordinators from the images that users run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Self

from docker.errors import ImageNotFound
from docker.models.containers import Container
from docker.models.volumes import Volume
from testcontainers.core.network import Network

from bridge.embedded import CRASH_VARIABLE, probes
from bridge.embedded.plan import new_cluster_id
from bridge.embedded.servers import COORDINATOR_PREFIX, KAFKA, ZOOKEEPER
from bridge.errors import EnvironmentProblem, NotFoundError
from bridge.images.names import TOOLBOX
from integration_tests.backends import reaper
from integration_tests.backends.engine import SESSION, engine, prepare
from integration_tests.backends.interface import Ability, Clock, Coordinator, Unsupported
from integration_tests.backends.nodes import Broker, CoordinatorNode, Node, ZooKeeper, new_volume
from integration_tests.clocks import OFFSET_VARIABLE, SITECUSTOMIZE
from integration_tests.coordinators import SESSION_TIMEOUT_S

_CLOCK: Final = "/tmp/clock"
_PROBES: Final = {
    Ability.PARTITION: "iptables -w -A OUTPUT -d 192.0.2.1 -j DROP",
    Ability.LOSS: "iptables -w -A OUTPUT -d 192.0.2.1 -m statistic --mode random --probability 0.5 -j DROP",
    Ability.BANDWIDTH: "tc qdisc add dev eth0 root tbf rate 1mbit burst 4kb latency 1s",
}
"""What the toolbox must be able to do for each fault; the kernel decides."""


@dataclass(frozen=True, slots=True)
class Said:
    """How a container has ended."""

    code: int
    out: bytes
    err: bytes


class ContainerCluster:
    """One or three brokers and ZooKeeper servers in a network of their own. Use it in a ``with`` block."""

    def __init__(
        self,
        *,
        brokers: int = 1,
        zookeepers: int = 1,
        kafka_settings: Mapping[str, str] | None = None,
        kafka_heap: str = "512m",
        disk_mib: Mapping[str, int] | None = None,
    ) -> None:
        """Only notes what is wanted; ``start`` starts it.

        Args:
            brokers: How many; topics have as many replicas, of which all but one must be in sync.
            zookeepers: How many.
            kafka_settings: Broker settings on top of those of the embedded cluster.
            kafka_heap: As after ``-Xmx``.
            disk_mib: Size of the data directory of parts whose disk is to be filled; it is in memory.
        """
        self.brokers: Final = _names(KAFKA, brokers)
        self.zookeepers: Final = _names(ZOOKEEPER, zookeepers)
        self.kafka_cluster_id: Final = new_cluster_id()
        self._kafka_settings = dict(kafka_settings or {})
        self._kafka_heap = kafka_heap
        self._disk_mib = dict(disk_mib or {})
        self._id = uuid.uuid4().hex[:12]
        self.labels: Final = reaper.labels(SESSION, self._id)
        self._network: Network | None = None
        self._nodes: dict[str, Node] = {}
        self._disks: dict[str, Container] = {}

    # -- life -------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start all servers and return when they answer.

        Raises:
            Unsupported: there is no engine, or an image cannot be had.
        """
        prepare()
        try:
            self._network = network = Network(docker_network_kw={"labels": self.labels}).create()
            servers: list[Node] = [
                ZooKeeper(number, self.zookeepers, network, self.labels)
                for number in range(1, len(self.zookeepers) + 1)
            ]
            for number in range(1, len(self.brokers) + 1):
                settings, heap = self._kafka_settings, self._kafka_heap
                servers.append(
                    Broker(number, self.brokers, network, self.labels, self.kafka_cluster_id, settings, heap)
                )
            for server in servers:
                self._nodes[server.part] = server.keep_data_in(self._volume(server.part))
            with ThreadPoolExecutor(len(servers)) as together:  # a quorum needs all of them
                list(together.map(Node.start, servers))
                list(together.map(Node.await_answer, servers))
        except BaseException as exc:
            for node in self._nodes.values():
                exc.add_note(f"--- {node.part}\n{node.said()}")
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Remove everything that it has made; harmless when there is nothing."""
        reaper.remove(f"{reaper.CLUSTER_LABEL}={self._id}")
        for node in self._nodes.values():
            node.get_docker_client().client.close()
        if self._network is not None:
            self._network._docker.client.close()
            self._network = None
        self._nodes.clear()
        self._disks.clear()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _volume(self, part: str) -> Volume:
        size = self._disk_mib.get(part)
        volume = new_volume(f"rollbridge-test-{self._id}-{part}", self.labels, size)
        if size is not None:
            # A file system in memory is gone when no container uses it any more, so one does all the time.
            self._disks[part] = engine().containers.run(
                TOOLBOX,
                ["sleep", "infinity"],
                detach=True,
                init=True,
                volumes={volume.name: {"bind": "/disk", "mode": "rw"}},
                network_mode="none",
                labels=self.labels,
            )
        return volume

    # -- where things are -------------------------------------------------------------------------------

    @property
    def bootstrap_servers(self) -> str:
        """Kafka's address for clients on this machine; it stays the same over restarts."""
        return ",".join(node.address for node in self._nodes.values() if isinstance(node, Broker))

    @property
    def zookeeper(self) -> str:
        """ZooKeeper's address for clients on this machine; it stays the same over restarts."""
        return ",".join(node.address for node in self._nodes.values() if isinstance(node, ZooKeeper))

    @property
    def bootstrap_servers_inside(self) -> str:
        """Kafka's address for containers of its network."""
        return ",".join(node.inside for node in self._nodes.values() if isinstance(node, Broker))

    @property
    def zookeeper_inside(self) -> str:
        """ZooKeeper's address for containers of its network."""
        return ",".join(node.inside for node in self._nodes.values() if isinstance(node, ZooKeeper))

    @cached_property
    def can(self) -> frozenset[Ability]:
        """What this backend can do with this engine and its kernel."""
        found = {Ability.CONTAINERS, Ability.SEVERAL_SERVERS, Ability.CLOCK, Ability.DISK_FULL}
        script = "; ".join(f"{probe} 2>/dev/null && echo '{ability}'" for ability, probe in _PROBES.items())
        try:
            said = self.run(TOOLBOX, ["sh", "-c", f"{script}; true"], as_root=True)
        except ImageNotFound:
            return frozenset(found - {Ability.DISK_FULL})
        return frozenset(found | {Ability(line) for line in said.out.decode().splitlines()})

    def node(self, part: str) -> Node:
        """The container of a part.

        Raises:
            NotFoundError: there is none.
        """
        if part not in self._nodes:
            raise NotFoundError(f"{part} does not run")
        return self._nodes[part]

    # -- faults of single parts; those between parts are in ``faults`` ------------------------------------

    def kill(self, part: str) -> None:
        """SIGKILL a part, and return when it is gone.

        Raises:
            NotFoundError: it does not run.
        """
        self.node(part).kill()

    def pause(self, part: str) -> None:
        """Freeze a part: its connections stay open and nothing answers.

        Raises:
            NotFoundError: it does not run.
        """
        self.node(part).pause()

    def resume(self, part: str) -> None:
        """The end of a pause."""
        self.node(part).resume()

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
        node = self.node(part)
        if gracefully:
            node.stop_gracefully()
        elif node.status_now() in ("running", "paused"):
            node.kill()
        node.start_again()

    def add_listener(self, name: str, advertised: str) -> str:
        """Have the only broker listen at one more address, where it says that it is at ``advertised``; restarts it."""
        (part,) = self.brokers
        broker = self.node(part)
        assert isinstance(broker, Broker)
        return broker.add_listener(name, advertised)

    def in_network_of(self, part: str, script: str) -> str:
        """Run a script of the toolbox as root in the network namespace of a part; returns what it prints.

        Raises:
            Unsupported: it fails.
        """
        container = self.node(part).container
        said = self.run(TOOLBOX, ["sh", "-ec", script], beside=container, as_root=True)
        if said.code:
            raise Unsupported(f"in the network of {part}, {script!r} fails: {said.err.decode().strip()}")
        return said.out.decode()

    def gateway(self) -> str:
        """The address from which clients on this machine come, in its network."""
        network = engine().networks.get(self._started().name)
        return str(network.attrs["IPAM"]["Config"][0]["Gateway"])

    def disk_of(self, part: str) -> Container:
        """A container that has the disk of a part at ``/disk``.

        Raises:
            Unsupported: that disk has no limit.
        """
        if part not in self._disks:
            raise Unsupported(f"the disk of {part} has no limit; name it in disk_mib")
        return self._disks[part]

    def run(
        self,
        image: str,
        command: Sequence[str],
        *,
        entrypoint: str | None = None,
        environment: Mapping[str, str] | None = None,
        beside: Container | None = None,
        as_root: bool = False,
        timeout_s: int = 120,
    ) -> Said:
        """Run a program in a container of its own in this network, until it ends; the container is removed.

        Args:
            image: Its image.
            command: Its arguments, or all of it if the image has no entry point.
            entrypoint: In place of the image's own.
            environment: Variables of the container.
            beside: Run in the network namespace of this container.
            as_root: As root, who may change that network.
            timeout_s: How long it may take.
        """
        network = f"container:{beside.id}" if beside is not None else self._started().name
        container = engine().containers.create(
            image,
            list(command),
            entrypoint=entrypoint,
            environment=dict(environment or {}),
            network=network,
            labels=self.labels,
            user="root" if as_root else None,
            cap_add=["NET_ADMIN"] if as_root else None,
        )
        try:
            container.start()
            code = container.wait(timeout=timeout_s)["StatusCode"]
            return Said(code, container.logs(stderr=False), container.logs(stdout=False))
        finally:
            container.remove(force=True, v=True)

    # -- coordinators -------------------------------------------------------------------------------------

    def start_coordinator(self, *, env: Mapping[str, str] | None = None, crash_at: str | None = None) -> Coordinator:
        """Start one more coordinator and return when it has registered.

        Args:
            env: Environment variables of the container.
            crash_at: The point at which it kills itself, as ``coordinator.shell.crash`` writes it.
        """
        number = sum(isinstance(node, CoordinatorNode) for node in self._nodes.values()) + 1
        environment = {**(env or {}), **({CRASH_VARIABLE: crash_at} if crash_at else {})}
        node = self._coordinator(f"{COORDINATOR_PREFIX}{number}", probes.ZOOKEEPER_ROOT, environment)
        self._nodes[node.part] = node
        node.start()
        node.await_answer()
        return node

    def kill_coordinator(self, handle: Coordinator) -> None:
        """SIGKILL a coordinator; harmless when it is gone already."""
        if handle.alive:
            self.kill(handle.name)

    def stop_coordinator(self, handle: Coordinator) -> None:
        """Ask a coordinator to end, and return when it has."""
        self.node(handle.name).stop_gracefully()

    @contextmanager
    def coordinator(
        self, root: str, name: str, logs: Path, environment: Mapping[str, str]
    ) -> Iterator[CoordinatorNode]:
        """A coordinator under any root path, started in the background; what it said is in ``logs/NAME.log`` after."""
        session = {"ROLLBRIDGE_COORDINATOR_SESSION_TIMEOUT_S": str(SESSION_TIMEOUT_S)}
        node = self._coordinator(name, root, {**session, **environment})
        with self._in_background(node, logs):
            yield node

    @contextmanager
    def clocked_coordinator(self, root: str, name: str, logs: Path) -> Iterator[Clock]:
        """The same with a clock that can be set."""
        environment = {"PYTHONPATH": _CLOCK, OFFSET_VARIABLE: f"{_CLOCK}/offset"}
        node = self._coordinator(name, root, environment)
        node.with_copy_into_container(SITECUSTOMIZE.encode(), f"{_CLOCK}/sitecustomize.py")
        node.with_copy_into_container(b"0", f"{_CLOCK}/offset")
        with self._in_background(node, logs):
            yield _ContainerClock(node)

    @contextmanager
    def _in_background(self, node: CoordinatorNode, logs: Path) -> Iterator[None]:
        try:
            node.start()
            yield
            node.stop_gracefully()
        finally:
            with (logs / f"{node.part}.log").open("a") as log:
                log.write(node.said("all"))
            node.discard()
            node.get_docker_client().client.close()

    def _coordinator(self, part: str, root: str, environment: Mapping[str, str]) -> CoordinatorNode:
        where = {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": self.bootstrap_servers_inside,
            "ROLLBRIDGE_ZOOKEEPER": self.zookeeper_inside,
            "ROLLBRIDGE_ZOOKEEPER_ROOT": root,
        }

        def registered() -> frozenset[tuple[str, int]]:
            return probes.registered_coordinators(self.zookeeper, root) or frozenset()

        return CoordinatorNode(part, self._started(), self.labels, {**where, **environment}, registered)

    def _started(self) -> Network:
        if self._network is None:
            raise EnvironmentProblem("the cluster of containers is not started")
        return self._network


class _ContainerClock:
    """The clock of a coordinator in a container."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def set(self, offset_s: float) -> None:
        """From now on it is ahead of the true time by this much, or behind it."""
        script = (
            f"import os; open('{_CLOCK}/new', 'w').write('{offset_s}'); os.replace('{_CLOCK}/new', '{_CLOCK}/offset')"
        )
        said = self._node.container.exec_run(["python", "-S", "-c", script], user="root")
        assert said.exit_code == 0, said.output


def _names(stem: str, count: int) -> tuple[str, ...]:
    return (stem,) if count == 1 else tuple(f"{stem}-{number}" for number in range(1, count + 1))
