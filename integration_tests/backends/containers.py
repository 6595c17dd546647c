"""The backend on containers: clusters of nodes, and what tests do to them from side containers and on volumes."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from docker.errors import DockerException
from docker.models.volumes import Volume
from requests import RequestException
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network
from urllib3.exceptions import HTTPError

from integration_tests import clocks
from integration_tests.backends import engine as engines
from integration_tests.backends.container_nodes import (
    ContainerNode,
    CoordinatorContainer,
    KafkaContainer,
    ZooKeeperContainer,
    prepare,
)
from integration_tests.backends.disks import Disk
from integration_tests.backends.engine import engine, is_local
from integration_tests.backends.interface import Ability, AnyCluster, Clock, Unsupported
from integration_tests.clocks import OFFSET_VARIABLE, SITECUSTOMIZE
from integration_tests.coordinators import SESSION_TIMEOUT_S
from integration_tests.crashing import CRASH_AT, PROGRAM, is_crashing
from integration_tests.images import TOOLBOX
from rollbridge.doctor import probes
from rollbridge.errors import LocalEnvironmentError, NotFoundError
from rollbridge_devcluster.state import KAFKA, ZOOKEEPER, new_cluster_id

IMAGE_UID: Final = 1000
"""Who the servers run as in their images."""
_CLOCK: Final = "/tmp/clock"
_FAKETIME: Final = "/tmp/libfaketimeMT.so.1"
_CRASHING: Final = "/tmp/crashing.py"
_END_S: Final = 30.0
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


class ContainerCluster(AnyCluster):
    """One or three brokers and ZooKeeper servers in a network of their own."""

    broker_class: type[KafkaContainer] = KafkaContainer
    zookeeper_class: type[ZooKeeperContainer] = ZooKeeperContainer

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
            kafka_settings: Broker settings on top of our defaults.
            disk_mib: Size of the data directory of parts whose disk is to be filled; it is in memory.
            stalling: Have the logs of the brokers, but not those of the controllers, on disks that can be made to stand
                still, where this machine can do that and is the engine's own.
        """
        super().__init__()
        self.brokers = _names(KAFKA, brokers)
        self.zookeepers = _names(ZOOKEEPER, zookeepers)
        self.kafka_settings: Final = dict(kafka_settings or {})
        self.id: Final = uuid.uuid4().hex[:12]
        self._marks: Final = engines.marks(self.id)
        self._cluster_id = new_cluster_id()
        self._network: Network | None = None
        self._nodes: dict[str, ContainerNode] = {}
        self._disk_mib = dict(disk_mib or {})
        self._stalling = stalling
        self._disks: dict[str, Disk] = {}
        """Those that can be made to stand still, by part."""
        self._small_disks: dict[str, DockerContainer] = {}
        """Containers that have the disk of a part at ``/disk``."""

    def start(self) -> Self:
        prepare()
        try:
            self._network = network = Network(docker_network_kw={"labels": self._marks}).create()
            self.prepare_machine()
            servers: list[ContainerNode] = [
                self.zookeeper_class(number, self.zookeepers, network, self._marks)
                for number in range(1, len(self.zookeepers) + 1)
            ]
            servers += [
                self.broker_class(number, self.brokers, network, self._marks, self._cluster_id, self.kafka_settings)
                for number in range(1, len(self.brokers) + 1)
            ]
            for server in servers:
                server.volume = str(self.volume(server.part).name)
                self._nodes[server.part] = server
            self.start_together(servers)
        except BaseException as exc:
            for node in self._nodes.values():
                exc.add_note(f"--- {node.part}\n{node.said(30)}")
            self.stop()
            raise
        return self

    def start_together(self, nodes: Sequence[ContainerNode]) -> None:
        """Start nodes and return when all answer; a quorum needs all of them."""
        with ThreadPoolExecutor(len(nodes)) as together:
            list(together.map(ContainerNode.start, nodes))
            list(together.map(ContainerNode.await_answer, nodes))

    def stop(self) -> None:
        """Remove everything that it has made; harmless when there is nothing."""
        engines.remove(f"{engines.CLUSTER_LABEL}={self.id}")
        self._nodes.clear()
        self._network = None
        self._small_disks.clear()
        while self._disks:
            self._disks.popitem()[1].remove()

    # -- where things are -------------------------------------------------------------------------------

    @property
    def network(self) -> Network:
        """The network of all its containers.

        Raises:
            LocalEnvironmentError: the cluster is not started.
        """
        if self._network is None:
            raise LocalEnvironmentError("the cluster of containers is not started")
        return self._network

    @property
    def kafka_cluster_id(self) -> str:
        return self._cluster_id

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(node.address for node in self._nodes.values() if isinstance(node, KafkaContainer))

    @property
    def zookeeper(self) -> str:
        return ",".join(node.address for node in self._nodes.values() if isinstance(node, ZooKeeperContainer))

    @property
    def bootstrap_servers_inside(self) -> str:
        """Kafka's address for containers of its network."""
        return ",".join(node.inside for node in self._nodes.values() if isinstance(node, KafkaContainer))

    @property
    def zookeeper_inside(self) -> str:
        """ZooKeeper's address for containers of its network."""
        return ",".join(node.inside for node in self._nodes.values() if isinstance(node, ZooKeeperContainer))

    def node(self, part: str) -> ContainerNode:
        if part not in self._nodes:
            raise NotFoundError(f"{part} does not run")
        return self._nodes[part]

    def add_listener(self, name: str, advertised: str) -> str:
        (part,) = self.brokers
        broker = self.node(part)
        assert isinstance(broker, KafkaContainer)
        return broker.add_listener(name, advertised)

    @property
    def can(self) -> frozenset[Ability]:
        """What this backend can do with this engine and its kernel."""
        return self._can | ({Ability.DISK_STALL} if self._disks else set())

    @cached_property
    def _can(self) -> frozenset[Ability]:
        found = {Ability.CONTAINERS, Ability.CLOCK, Ability.DISK_FULL}
        if clocks.library() is not None:
            found.add(Ability.SERVER_CLOCK)
        script = "; ".join(f"{probe} 2>/dev/null && echo '{ability}'" for ability, probe in _PROBES.items())
        said = self.run(TOOLBOX, ["sh", "-c", f"{script}; true"], as_root=True)
        return frozenset(found | {Ability(line) for line in said.out.decode().splitlines()})

    # -- networks ---------------------------------------------------------------------------------------

    def beside(self, image: str, command: Sequence[str] | None = None, **options: Any) -> DockerContainer:
        """Describe a container in this network; ``options`` are of it, as Docker's library takes them."""
        described = DockerContainer(prepare()[image], network=self.network)
        if command is not None:
            described.with_command(list(command))
        return described.with_kwargs(labels=self._marks, **options)

    def run(
        self,
        image: str,
        command: Sequence[str],
        *,
        entrypoint: str | None = None,
        environment: Mapping[str, str] | None = None,
        beside: ContainerNode | None = None,
        volumes: Mapping[str, str] | None = None,
        as_root: bool = False,
    ) -> Said:
        """Run a program in a container of its own in this network, until it ends; the container is removed.

        Args:
            image: Its image.
            command: Its arguments, or all of it if the image has no entry point.
            entrypoint: In place of the image's own.
            environment: Variables of the container.
            beside: Run in the network namespace of this one.
            volumes: Where it has which volumes, by name.
            as_root: As root, who may change that network.
        """
        options: dict[str, Any] = {"user": "root", "cap_add": ["NET_ADMIN"]} if as_root else {}
        if entrypoint is not None:
            options["entrypoint"] = entrypoint
        if beside is not None:
            options |= {"network": f"container:{beside.container.id}", "networking_config": None}
        described = self.beside(image, command, **options).with_envs(**(environment or {}))
        for name, path in (volumes or {}).items():
            described.with_volume_mapping(name, path, "rw")
        with described as container:
            return Said(container.wait(), *container.get_logs())

    def in_network_of(self, part: str, script: str) -> str:
        """Run a script of the toolbox as root in the network namespace of a part; returns what it prints.

        Raises:
            Unsupported: it fails.
        """
        said = self.run(TOOLBOX, ["sh", "-ec", script], beside=self.node(part), as_root=True)
        if said.code:
            raise Unsupported(f"beside {part}, {script!r} fails: {said.err.decode().strip()}")
        return said.out.decode()

    def gateway(self) -> str:
        """The address from which clients on this machine come, in its network."""
        network = engine().networks.get(self.network.name)
        return str(network.attrs["IPAM"]["Config"][0]["Gateway"])

    # -- disks ------------------------------------------------------------------------------------------

    def prepare_machine(self) -> None:
        """Mount a disk for each broker, as far as that was asked for and this machine can do it."""
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
            self.kafka_settings.setdefault("metadata.log.dir", "/tmp/metadata")

    def volume(self, part: str) -> Volume:
        """Make the volume of a part: in memory where a size was named, so that it can be filled, or on a disk."""
        options: dict[str, str] = {}
        size_mib, disk = self._disk_mib.get(part), self._disks.get(part)
        if disk is not None:
            options = {"type": "none", "device": str(disk.path), "o": "bind"}
        if size_mib is not None:
            options = {"type": "tmpfs", "device": "tmpfs", "o": f"size={size_mib}m,uid=1000,gid=1000,mode=0755"}
        volume = engine().volumes.create(
            self.volume_name(part), driver="local", driver_opts=options, labels=engines.labels(self.id)
        )
        if size_mib is not None:
            # A file system in memory is gone when no container uses it any more, so one does all the time.
            keeper = self.beside(TOOLBOX, ["sleep", "infinity"], init=True)
            self._small_disks[part] = keeper.with_volume_mapping(str(volume.name), "/disk", "rw").start()
        return volume

    def volume_name(self, part: str) -> str:
        """Return what the volume of a part is called."""
        return f"rollbridge-test-{self.id}-{part}"

    def disk_of(self, part: str) -> DockerContainer:
        """A container that has the disk of a part at ``/disk``.

        Raises:
            Unsupported: that disk has no limit.
        """
        if part not in self._small_disks:
            raise Unsupported(f"the disk of {part} has no limit; name it in disk_mib")
        return self._small_disks[part]

    def stall_disk(self, part: str, seconds: float) -> None:
        """Let the logs of a broker stand still."""
        if part not in self._disks:
            raise Unsupported(f"the disk of {part} cannot be made to stand still")
        self._disks[part].stand_still(seconds)

    def back_up_zookeeper(self) -> None:
        """Copy the volumes of all servers to one of its own, while all stand still."""
        with ExitStack() as standing:
            for part in self.zookeepers:
                standing.enter_context(self.paused(part))
            self._copy_volumes("/data", "/backup")

    def restore_zookeeper(self) -> None:
        """Put the copies in place of what there is."""
        nodes = [self.node(part) for part in self.zookeepers]
        for node in nodes:
            node.kill()
        self._copy_volumes("/backup", "/data")
        self.start_together(nodes)

    def _copy_volumes(self, source: str, target: str) -> None:
        """Copy the volumes of the ZooKeeper servers, which are below ``/data``, to ``/backup``, or back from there."""
        steps = [
            f"mkdir -p {target}/{part} && find {target}/{part} -mindepth 1 -delete && "
            f"cp -a {source}/{part}/. {target}/{part}/"
            for part in self.zookeepers
        ]
        backup = self.volume("backup").name
        volumes = {self.volume_name(part): f"/data/{part}" for part in self.zookeepers} | {str(backup): "/backup"}
        said = self.run(TOOLBOX, ["sh", "-ec", " && ".join(steps)], volumes=volumes, as_root=True)
        if said.code:
            raise LocalEnvironmentError(f"volumes cannot be copied: {said.err.decode()}")

    # -- coordinators -----------------------------------------------------------------------------------

    def start_coordinator(
        self, *, env: Mapping[str, str] | None = None, crash_at: str | None = None, ahead_s: float = 0.0
    ) -> CoordinatorContainer:
        """A coordinator in a container, perhaps with a crash point and a clock of its own."""
        environment = {**(env or {}), **({CRASH_AT: crash_at} if crash_at else {})}
        part = self.next_coordinator()
        node = self.new_coordinator(part, part, probes.ZOOKEEPER_ROOT, environment)
        if ahead_s:
            _give_clock(node, ahead_s)
        return self.add_coordinator(node)

    def add_coordinator(self, node: CoordinatorContainer) -> CoordinatorContainer:
        """Start a new coordinator and return when it has registered."""
        self._nodes[node.part] = node
        node.start()
        node.await_answer()
        return node

    def new_coordinator(self, part: str, name: str, root: str, environment: Mapping[str, str]) -> CoordinatorContainer:
        """A coordinator that registers as ``name`` under a root path; not started yet.

        It runs what has the crash points, if the environment names one.
        """

        def registered() -> frozenset[tuple[str, int]]:
            return probes.registered_coordinators(self.zookeeper, root) or frozenset()

        inside = {**self.connection_inside(root), **environment}
        node = CoordinatorContainer(part, name, self.network, self._marks, inside, registered)
        if is_crashing(environment):
            node.files[_CRASHING] = Path(PROGRAM).read_bytes()
            node.entrypoint, node.command = ["python"], [_CRASHING]
        return node

    def connection_inside(self, root: str) -> dict[str, str]:
        """Return the environment of a program of ours in this network."""
        return {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": self.bootstrap_servers_inside,
            "ROLLBRIDGE_ZOOKEEPER": self.zookeeper_inside,
            "ROLLBRIDGE_ZOOKEEPER_ROOT": root,
        }

    def keep_logs(self, folder: Path) -> None:
        """What each container has printed."""
        folder.mkdir()
        for part, node in self._nodes.items():
            (folder / f"{part}.out").write_text(node.said())

    @contextmanager
    def coordinator(
        self, root: str, name: str, logs: Path, environment: Mapping[str, str]
    ) -> Iterator[CoordinatorContainer]:
        """A coordinator under any root path, started in the background, which logs to ``logs/NAME.log``."""
        session = {"ROLLBRIDGE_COORDINATOR_SESSION_TIMEOUT_S": str(SESSION_TIMEOUT_S)}
        node = self.new_coordinator(_part(root, name), name, root, {**session, **environment})
        with self.in_background(node, logs):
            yield node

    @contextmanager
    def clocked_coordinator(self, root: str, name: str, logs: Path) -> Iterator[Clock]:
        """The same with a clock that can be set."""
        node = self.new_coordinator(_part(root, name), name, root, {})
        _give_clock(node, 0.0)
        with self.in_background(node, logs):
            yield _ContainerClock(node)

    @contextmanager
    def in_background(self, node: CoordinatorContainer, logs: Path) -> Iterator[None]:
        """Start a coordinator without waiting for it, and remove it in the end."""
        self._nodes[node.part] = node
        try:
            node.start()
            with _logged(node, logs / f"{node.name}.log"):
                yield
                node.stop()
        finally:
            del self._nodes[node.part]
            node.discard()


def set_clock(node: ContainerNode, offset_s: int) -> None:
    """Make a server anew with a clock that is ahead of the true time by this much, or behind it; 0 is the true time.

    Raises:
        Unsupported: this machine has no libfaketime.
    """
    library = clocks.library()
    if library is None:
        raise Unsupported("clocks of servers are set by libfaketime, which is not installed (Debian: faketime)")
    node.stop()
    for name in clocks.variables(_FAKETIME, offset_s):
        node.environment.pop(name, None)
    node.files.pop(_FAKETIME, None)
    if offset_s:
        node.environment |= clocks.variables(_FAKETIME, offset_s)
        node.files[_FAKETIME] = library.read_bytes()
    node.anew()


def _give_clock(node: ContainerNode, ahead_s: float) -> None:
    """Before the start: have a Python program in a container read its clock from a file."""
    node.environment |= {"PYTHONPATH": _CLOCK, OFFSET_VARIABLE: f"{_CLOCK}/offset"}
    node.files[f"{_CLOCK}/sitecustomize.py"] = SITECUSTOMIZE.encode()
    node.files[f"{_CLOCK}/offset"] = str(ahead_s).encode()


class _ContainerClock:
    """The clock of a coordinator in a container."""

    def __init__(self, node: ContainerNode) -> None:
        self._node = node

    def set(self, offset_s: float) -> None:
        """From now on it is ahead of the true time by this much, or behind it."""
        script = (
            f"import os; open('{_CLOCK}/new', 'w').write('{offset_s}'); os.replace('{_CLOCK}/new', '{_CLOCK}/offset')"
        )
        said = self._node.container.exec_run(["python", "-S", "-c", script], user="root")
        assert said.exit_code == 0, said.output


@contextmanager
def _logged(node: ContainerNode, path: Path) -> Iterator[None]:
    """Append to a file what a container that has been started says, and remove the container in the end.

    What it says after it was started once more is there in the end, too, but not before.
    """
    with path.open("ab") as log:
        begin = log.tell()
    follower = threading.Thread(target=_follow, args=(node, path), name=f"log of {node.part}", daemon=True)
    follower.start()
    try:
        yield
    finally:
        said = node.said()
        node.discard()  # which ends the stream
        follower.join(_END_S)
        with path.open("r+b") as log:
            log.truncate(begin)
            log.seek(begin)
            log.write(said.encode())


def _follow(node: ContainerNode, path: Path) -> None:
    with path.open("ab") as log, suppress(DockerException, RequestException, HTTPError):
        for chunk in node.container.logs(stream=True, follow=True):
            log.write(chunk)
            log.flush()


def _part(root: str, name: str) -> str:
    """Coordinators of several root paths may have the same name."""
    return f"{root.strip('/').replace('/', '-')}-{name}"


def _names(stem: str, count: int) -> tuple[str, ...]:
    return (stem,) if count == 1 else tuple(f"{stem}-{number}" for number in range(1, count + 1))
