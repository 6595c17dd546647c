"""Three brokers as processes, each in a network namespace of its own, so that any can be cut off from any, or from us.

They hang on a bridge, and a cut is a neighbour's address that nobody has: what is sent is lost without a word, as with
a broken switch.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import rollbridge_devcluster
from integration_tests.backends.interface import Ability, Unsupported
from integration_tests.backends.local import LocalCluster
from integration_tests.defects import WATCH
from integration_tests.patience import eventually
from rollbridge.doctor import probes
from rollbridge.errors import KafkaUnavailableError
from rollbridge.kafka.metadata import Cluster
from rollbridge_devcluster import processes
from rollbridge_devcluster.cluster import DevCluster
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import ClassArchive, Jvm, find_java
from rollbridge_devcluster.nodes import JavaProcess, ProcessNode, broker_settings
from rollbridge_devcluster.state import KAFKA, ZOOKEEPER, ClusterState, Home, Wishes

NODES: Final = (1, 2, 3)
US: Final = 254
"""This machine's number on the bridge."""
_NOBODY: Final = "02:00:00:00:00:01"
_PLAIN, _CONTROLLER = 9092, 9093
_NUMBERS: Final = itertools.count(os.getpid())
"""None has the addresses of one before, which somebody may still be trying to reach."""


class ThreeBrokers(LocalCluster):
    """ZooKeeper on this machine, and three brokers in network namespaces.

    Raises:
        Unsupported: There can be no network namespaces here; from :meth:`start`.
    """

    brokers: Sequence[str] = tuple(f"{KAFKA}-{node}" for node in NODES)

    def __init__(self, **wishes: Any) -> None:
        super().__init__(**wishes)
        number = next(_NUMBERS)
        self._net = f"10.99.{number % 250}"
        self._name = f"rb{number % 100_000}"
        self._nodes: dict[str, _Broker] = {}

    @property
    def can(self) -> frozenset[Ability]:
        """Brokers are cut off from each other, and from this machine."""
        return frozenset({Ability.CLOCK, Ability.PARTITION})

    @property
    def bootstrap_servers(self) -> str:
        """All three brokers."""
        return ",".join(f"{self.address(node)}:{_PLAIN}" for node in NODES)

    def address(self, number: int) -> str:
        """Return the IP address of a broker, or of this machine."""
        return f"{self._net}.{number}"

    def number(self, part: str) -> int:
        """Return the number of a broker, or of this machine if it is none."""
        return int(part.removeprefix(f"{KAFKA}-")) if part in self.brokers else US

    @contextmanager
    def cut(self, node: int, others: Collection[int]) -> Iterator[None]:
        """Lose all that a broker and others, or this machine, send to each other, for the length of a block."""
        pairs = [pair for other in others for pair in ((node, other), (other, node))]
        for one, other in pairs:
            self._neighbour(one, "replace", other, "lladdr", _NOBODY, "nud", "permanent")
        try:
            yield
        finally:
            for one, other in pairs:
                self._neighbour(one, "del", other)

    @contextmanager
    def cut_from_processes(self, node: int, unix_group: str) -> Iterator[None]:
        """Lose what processes of a Unix group send to a broker, for the length of a block; all others reach it.

        Raises:
            Unsupported: There are no packet filters by owner here.
        """
        rule = ["OUTPUT", "-d", self.address(node), "-m", "owner", "--gid-owner", unix_group, "-j", "DROP"]
        try:
            _run("iptables", "-w", "-I", *rule)
        except (OSError, subprocess.CalledProcessError) as fault:
            raise Unsupported(f"packet filters: {fault}") from fault
        try:
            yield
        finally:
            _run("iptables", "-w", "-D", *rule)

    def await_one_view(self) -> None:
        """Return when all brokers name the same partition leaders.

        One that was cut off believes for a while that it leads what it did, and gives readers that ask it an old end.
        """
        eventually(lambda: len({self._view(node) for node in NODES}) == 1, "all brokers name the same leaders")

    def node(self, part: str) -> ProcessNode:
        return self._nodes.get(part) or super().node(part)

    def start_coordinator(  # type: ignore[override]  # as of any local cluster
        self, *, env: Mapping[str, str] | None = None, crash_at: str | None = None, ahead_s: float = 0.0
    ) -> ProcessNode:
        """A coordinator on this machine that is told of all three."""
        env = {**(env or {}), "ROLLBRIDGE_BOOTSTRAP_SERVERS": self.bootstrap_servers}
        return super().start_coordinator(env=env, crash_at=crash_at, ahead_s=ahead_s)

    def stop(self) -> None:
        """Stop everything, and take the network away."""
        self._nodes.clear()
        super().stop()
        for node in NODES:
            _quietly("ip", "netns", "del", self._namespace(node))
        _quietly("ip", "netns", "del", self._switch)

    def _start_servers(self, cluster: DevCluster, wishes: Wishes) -> ClusterState:
        try:
            self._make_network()
        except (OSError, subprocess.CalledProcessError) as fault:
            raise Unsupported(f"network namespaces: {fault}") from fault
        WATCH.add(cluster.home.logs)
        state = cluster.up(wishes, only=[ZOOKEEPER]).state
        addresses = [self.address(node) for node in NODES]
        for node, part in zip(NODES, self.brokers, strict=True):
            self._nodes[part] = _Broker(cluster.home, state, part, self._namespace(node), node, addresses)
            self._nodes[part].start()
        for broker in self._nodes.values():
            broker.await_answer()
        return state

    def _view(self, node: int) -> frozenset[tuple[object, ...]]:
        """Return the partition leaders that a broker names; an error is a view of its own."""
        with Cluster(f"{self.address(node)}:{_PLAIN}") as cluster:
            try:
                topics = cluster.metadata(None).topics
            except KafkaUnavailableError:
                return frozenset({(node,)})
        return frozenset(
            (topic.name, item.partition_index, item.leader_id, item.leader_epoch)
            for topic in topics
            for item in topic.partitions
        )

    def _make_network(self) -> None:
        # The bridge has a namespace of its own: in ours, the filters of a Docker engine would drop what crosses it.
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        self._plug(US)
        for node in NODES:
            _run("ip", "netns", "add", self._namespace(node))
            self._plug(node)

    def _plug(self, number: int) -> None:
        inside, device, port = self._at(number), self._device(number), f"port{number}"
        _run("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", self._name)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
        target = "1" if number == US else self._namespace(number)
        _run("ip", "-n", self._switch, "link", "set", self._name, "name", device, "netns", target)
        _run(*inside, "addr", "add", f"{self.address(number)}/24", "dev", device)
        _run(*inside, "link", "set", device, "up")
        _run(*inside, "link", "set", "lo", "up")

    @property
    def _switch(self) -> str:
        return f"{self._name}s"

    def _at(self, number: int) -> list[str]:
        return ["ip"] if number == US else ["ip", "-n", self._namespace(number)]

    def _device(self, number: int) -> str:
        return self._name if number == US else "eth0"

    def _namespace(self, node: int) -> str:
        return f"{self._name}n{node}"

    def _neighbour(self, at: int, what: str, other: int, *more: str) -> None:
        _run(*self._at(at), "neigh", what, self.address(other), *more, "dev", self._device(at))


class _Broker(JavaProcess):
    """One of them, which is a controller as well."""

    heap = "512m"

    def __init__(
        self, home: Home, state: ClusterState, part: str, namespace: str, number: int, addresses: Collection[str]
    ) -> None:
        super().__init__(home, state, part, JarCache.default())
        self._namespace, self._number, self._addresses = namespace, number, list(addresses)
        self._folder = home.of(part)

    @cached_property
    def jvm(self) -> Jvm:
        classpath = [self._cache.location(jar) for jar in self._cache.jars(KAFKA)]
        return Jvm(
            java=find_java(),
            classpath=classpath,
            heap=self.heap,
            short_lived=self.state.short_lived,
            scratch=self.home.scratch,
        )

    def prepare(self) -> None:
        voters = [f"{address}:{_CONTROLLER}" for address in self._addresses]
        data = str(self._folder / "data")
        settings = {
            "listeners": f"PLAINTEXT://{self._address},CONTROLLER://{voters[self._number - 1]}",
            "advertised.listeners": f"PLAINTEXT://{self._address}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            **broker_settings(self._number, voters, data, self.state.kafka_settings),
        }
        self.write_properties(self._properties, settings)
        if not (self._folder / "data" / "meta.properties").exists():
            told = ["format", "--cluster-id", self.state.kafka_cluster_id, "--config", str(self._properties)]
            command = self.jvm.command("kafka.tools.StorageTool", *told, options=self._options())
            processes.run(command, home=self.home.path, part="format", output=self.output, timeout_seconds=60)

    def command(self) -> list[str]:
        # One process: who enters the namespace becomes the broker.
        inside = ["ip", "netns", "exec", self._namespace]
        return [*inside, *self.jvm.command("kafka.Kafka", str(self._properties), options=self._options())]

    def answers(self) -> bool:
        """Whether it answers this machine."""
        return probes.kafka_cluster_id(self._address) == self.state.kafka_cluster_id

    @property
    def _address(self) -> str:
        return f"{self._addresses[self._number - 1]}:{_PLAIN}"

    @property
    def _properties(self) -> Path:
        return self._folder / "server.properties"

    def _options(self) -> list[str]:
        log4j = Path(rollbridge_devcluster.__file__).parent / "log4j2.xml"
        archive = ClassArchive.of(KAFKA, self.jvm.java, self.jvm.classpath, self._cache.directory, self.home.scratch)
        return [f"-Dlog4j2.configurationFile={log4j}", f"-Drollbridge.log={self.log}", *archive.use()]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _quietly(*command: str) -> None:
    with suppress(OSError):
        subprocess.run(command, check=False, capture_output=True)
