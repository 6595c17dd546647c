"""The backend on containers: brokers, ZooKeeper servers and coordinators from the images that users run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Self

from integration_tests.backends.disks import Disk
from integration_tests.backends.engine import is_local, prepare
from integration_tests.backends.interface import Ability, Clock, Coordinator, Unsupported
from integration_tests.backends.logs import logged
from integration_tests.backends.nodes import Broker, CoordinatorNode, Node, ZooKeeper
from integration_tests.backends.surroundings import Surroundings
from integration_tests.clocks import OFFSET_VARIABLE, SITECUSTOMIZE
from integration_tests.coordinators import SESSION_TIMEOUT_S
from integration_tests.crashing import CRASH_AT
from rollbridge.embedded import probes
from rollbridge.embedded.plan import new_cluster_id
from rollbridge.embedded.servers import COORDINATOR_PREFIX, KAFKA, ZOOKEEPER
from rollbridge.errors import NotFoundError

_CLOCK: Final = "/tmp/clock"
IMAGE_UID: Final = 1000
"""Who the servers run as in their images."""


class ContainerCluster:
    """One or three brokers and ZooKeeper servers in a network of their own. Use it in a ``with`` block."""

    broker_class: type[Broker] = Broker
    zookeeper_class: type[ZooKeeper] = ZooKeeper

    def __init__(
        self,
        *,
        brokers: int = 1,
        zookeepers: int = 1,
        kafka_settings: Mapping[str, str] | None = None,
        disk_mib: Mapping[str, int] | None = None,
        stalling: bool = False,
    ) -> None:
        """Only notes what is wanted; ``start`` starts it.

        Args:
            brokers: How many; topics have as many replicas, of which all but one must be in sync.
            zookeepers: How many.
            kafka_settings: Broker settings on top of those of the embedded cluster.
            disk_mib: Size of the data directory of parts whose disk is to be filled; it is in memory.
            stalling: Have the logs of the brokers, but not those of the controllers, on disks that can be made to stand
                still, where this machine can do that and is the engine's own.
        """
        self.brokers: Final = _names(KAFKA, brokers)
        self.zookeepers: Final = _names(ZOOKEEPER, zookeepers)
        self.kafka_cluster_id: Final = new_cluster_id()
        self._kafka_settings = dict(kafka_settings or {})
        self._disk_mib = dict(disk_mib or {})
        self._stalling = stalling
        self._disks: dict[str, Disk] = {}
        self.surroundings: Final = Surroundings()
        self.labels: Final = self.surroundings.labels
        """On everything that it makes."""
        self.run: Final = self.surroundings.run
        """Runs a program in a container of its own in this network."""
        self._nodes: dict[str, Node] = {}

    # -- life -------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start all servers and return when they answer.

        Raises:
            Unsupported: there is no engine, or an image cannot be had.
        """
        prepare()
        try:
            network, labels = self.surroundings.make(), self.labels
            self._mount_disks()
            servers: list[Node] = [
                self.zookeeper_class(number, self.zookeepers, network, labels)
                for number in range(1, len(self.zookeepers) + 1)
            ]
            for number in range(1, len(self.brokers) + 1):
                settings = self._kafka_settings
                servers.append(
                    self.broker_class(number, self.brokers, network, labels, self.kafka_cluster_id, settings)
                )
            for server in servers:
                disk = self._disks.get(server.part)
                self._nodes[server.part] = server.keep_data_in(
                    self.surroundings.volume(
                        server.part, self._disk_mib.get(server.part), None if disk is None else disk.path
                    )
                )
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
        self.surroundings.remove()
        for node in self._nodes.values():
            node.get_docker_client().client.close()
        self._nodes.clear()
        while self._disks:
            self._disks.popitem()[1].remove()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

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

    @property
    def can(self) -> frozenset[Ability]:
        """What this backend can do with this engine and its kernel."""
        return self.surroundings.can | ({Ability.DISK_STALL} if self._disks else set())

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
        elif node.runs():
            node.kill()
        node.start_again()

    def add_listener(self, name: str, advertised: str) -> str:
        """Have the only broker listen at one more address, where it says that it is at ``advertised``; restarts it."""
        (part,) = self.brokers
        broker = self.node(part)
        assert isinstance(broker, Broker)
        return broker.add_listener(name, advertised)

    def stall_disk(self, part: str, seconds: float) -> None:
        """Let the logs of a broker stand still.

        Raises:
            Unsupported: it has no such disk.
        """
        if part not in self._disks:
            raise Unsupported(f"the disk of {part} cannot be made to stand still")
        self._disks[part].stand_still(seconds)

    def log_ends(self, topic: str) -> list[int]:
        raise Unsupported(f"where the log of {topic} can be cut is not looked for in containers")

    def cut_log(self, topic: str, end: int) -> None:
        """Logs are inside of the containers.

        Raises:
            Unsupported: always.
        """
        raise Unsupported(f"the log of {topic} cannot be cut at {end} inside of a container")

    def _mount_disks(self) -> None:
        """A disk for each broker, as far as that was asked for and this machine can do it."""
        if not self._stalling or not is_local():
            return
        try:
            for part in self.brokers:
                self._disks[part] = Disk.mounted()
                os.chown(self._disks[part].path, IMAGE_UID, IMAGE_UID)
        except Unsupported:
            while self._disks:
                self._disks.popitem()[1].remove()
        else:
            # Controllers go on: new settings reach a broker while its logs stand still.
            self._kafka_settings.setdefault("metadata.log.dir", "/tmp/metadata")

    def back_up_zookeeper(self) -> None:
        """Copy the volumes of all servers to one of its own, while all stand still."""
        with ExitStack() as standing:
            for part in self.zookeepers:
                standing.enter_context(self.paused(part))
            self.surroundings.copy_volumes(self.zookeepers, restore=False)

    def restore_zookeeper(self) -> None:
        """Put the copies in place of what there is."""
        nodes = [self.node(part) for part in self.zookeepers]
        for node in nodes:
            node.kill()
        self.surroundings.copy_volumes(self.zookeepers, restore=True)
        with ThreadPoolExecutor(len(nodes)) as together:  # a quorum needs all of them
            list(together.map(Node.start_again, nodes))

    def in_network_of(self, part: str, script: str) -> str:
        """Run a script of the toolbox as root in the network namespace of a part; returns what it prints.

        Raises:
            Unsupported: it fails.
        """
        return self.surroundings.beside(self.node(part).container, script)

    # -- coordinators -------------------------------------------------------------------------------------

    def start_coordinator(
        self, *, env: Mapping[str, str] | None = None, crash_at: str | None = None, ahead_s: float = 0.0
    ) -> Coordinator:
        """Start one more coordinator and return when it has registered.

        Args:
            env: Environment variables of the container.
            crash_at: The point at which it kills itself, as ``integration_tests.crashing`` writes it.
            ahead_s: By how much its clock is ahead of the true time, or behind it.
        """
        number = sum(part.startswith(COORDINATOR_PREFIX) for part in self._nodes) + 1
        environment = {**(env or {}), **({CRASH_AT: crash_at} if crash_at else {})}
        name = f"{COORDINATOR_PREFIX}{number}"
        node = self._coordinator(name, name, probes.ZOOKEEPER_ROOT, environment)
        if ahead_s:
            _give_clock(node, ahead_s)
        self._nodes[node.part] = node
        node.start()
        node.await_answer()
        return node

    def keep_logs(self, folder: Path) -> None:
        """What each container has printed."""
        folder.mkdir()
        for part, node in self._nodes.items():
            (folder / f"{part}.out").write_text(node.said("all"))

    def runs(self, part: str) -> bool:
        """Whether the part's container runs."""
        return self.node(part).runs()

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
        """A coordinator under any root path, started in the background, which logs to ``logs/NAME.log``."""
        session = {"ROLLBRIDGE_COORDINATOR_SESSION_TIMEOUT_S": str(SESSION_TIMEOUT_S)}
        node = self._coordinator(_part(root, name), name, root, {**session, **environment})
        with self._in_background(node, logs):
            yield node

    @contextmanager
    def clocked_coordinator(self, root: str, name: str, logs: Path) -> Iterator[Clock]:
        """The same with a clock that can be set."""
        node = self._coordinator(_part(root, name), name, root, {})
        _give_clock(node, 0.0)
        with self._in_background(node, logs):
            yield _ContainerClock(node)

    @contextmanager
    def _in_background(self, node: CoordinatorNode, logs: Path) -> Iterator[None]:
        self._nodes[node.part] = node
        try:
            node.start()
            with logged(node, logs / f"{node.name}.log"):
                yield
                node.stop_gracefully()
        finally:
            del self._nodes[node.part]
            node.discard()
            node.get_docker_client().client.close()

    def _coordinator(self, part: str, name: str, root: str, environment: Mapping[str, str]) -> CoordinatorNode:
        where = {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": self.bootstrap_servers_inside,
            "ROLLBRIDGE_ZOOKEEPER": self.zookeeper_inside,
            "ROLLBRIDGE_ZOOKEEPER_ROOT": root,
        }

        def registered() -> frozenset[tuple[str, int]]:
            return probes.registered_coordinators(self.zookeeper, root) or frozenset()

        return CoordinatorNode(
            part, name, self.surroundings.network, self.surroundings.labels, {**where, **environment}, registered
        )


def _give_clock(node: Node, ahead_s: float) -> None:
    """Before the start: have a Python program in a container read its clock from a file."""
    node.with_envs(**{"PYTHONPATH": _CLOCK, OFFSET_VARIABLE: f"{_CLOCK}/offset"})
    node.with_copy_into_container(SITECUSTOMIZE.encode(), f"{_CLOCK}/sitecustomize.py")
    node.with_copy_into_container(str(ahead_s).encode(), f"{_CLOCK}/offset")


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


def _part(root: str, name: str) -> str:
    """Coordinators of several root paths may have the same name."""
    return f"{root.strip('/').replace('/', '-')}-{name}"


def _names(stem: str, count: int) -> tuple[str, ...]:
    return (stem,) if count == 1 else tuple(f"{stem}-{number}" for number in range(1, count + 1))
