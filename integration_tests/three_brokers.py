"""Three brokers as processes, each in a network namespace of its own, so that any can be cut off from any, or from us.

They hang on a bridge, and a cut is a neighbour's address that nobody has: what is sent is lost without a word, as with
a broken switch.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import rollbridge_devcluster
from integration_tests.backends.interface import Unsupported
from integration_tests.backends.local import LocalCluster
from integration_tests.patience import eventually
from rollbridge.doctor import probes
from rollbridge.errors import KafkaUnavailableError
from rollbridge.kafka.metadata import Cluster
from rollbridge_devcluster.cluster import DevCluster
from rollbridge_devcluster.jars import JarCache
from rollbridge_devcluster.java import ClassArchive, Jvm, find_java
from rollbridge_devcluster.nodes import broker_settings
from rollbridge_devcluster.state import KAFKA, ZOOKEEPER, ClusterState, Wishes

NODES: Final = (1, 2, 3)
US: Final = 254
"""This machine's number on the bridge."""
_NOBODY: Final = "02:00:00:00:00:01"
_PLAIN, _CONTROLLER = 9092, 9093


class ThreeBrokers(LocalCluster):
    """ZooKeeper on this machine, and three brokers in network namespaces.

    Raises:
        Unsupported: There can be no network namespaces here; from :meth:`start`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._net = f"10.99.{os.getpid() % 250}"
        self._name = f"rb{os.getpid() % 100_000}"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def bootstrap_servers(self) -> str:
        """All three brokers."""
        return ",".join(f"{self.address(node)}:{_PLAIN}" for node in NODES)

    def address(self, number: int) -> str:
        """Return the IP address of a broker, or of this machine."""
        return f"{self._net}.{number}"

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

    def stop(self) -> None:
        """Stop everything, and take the network away."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()
        super().stop()
        for node in NODES:
            _quietly("ip", "netns", "del", self._namespace(node))
        _quietly("ip", "netns", "del", self._switch)

    def _start_servers(self, cluster: DevCluster, wishes: Wishes) -> ClusterState:
        try:
            self._make_network()
        except (OSError, subprocess.CalledProcessError) as fault:
            raise Unsupported(f"network namespaces: {fault}") from fault
        state = cluster.up(wishes, only=[ZOOKEEPER]).state
        for node in NODES:
            self._start_broker(node, cluster, state)
        eventually(self._is_whole, "three brokers answer")
        return state

    def _is_whole(self) -> bool:
        for node, process in self._processes.items():
            assert process.poll() is None, (self._logs / f"broker-{node}.out").read_text(errors="replace")[-3000:]
        return all(probes.kafka_cluster_id(f"{self.address(node)}:{_PLAIN}") for node in NODES)

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

    def _start_broker(self, node: int, cluster: DevCluster, state: ClusterState) -> None:
        home, cache = cluster.home, JarCache.default()
        self._logs = home.logs
        java, classpath = find_java(), [cache.location(jar) for jar in cache.jars(KAFKA)]
        jvm = Jvm(java=java, classpath=classpath, heap="512m", short_lived=True, scratch=home.scratch)
        archive = ClassArchive.of(KAFKA, java, classpath, cache.directory, home.scratch)
        folder = home.of(f"broker-{node}")
        folder.mkdir(parents=True)
        voters = [f"{self.address(number)}:{_CONTROLLER}" for number in NODES]
        plain = f"PLAINTEXT://{self.address(node)}:{_PLAIN}"
        settings = {
            "listeners": f"{plain},CONTROLLER://{self.address(node)}:{_CONTROLLER}",
            "advertised.listeners": plain,
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            **broker_settings(node, voters, str(folder / "data"), state.kafka_settings),
        }
        properties = folder / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        log4j = Path(rollbridge_devcluster.__file__).parent / "log4j2.xml"
        options = [f"-Dlog4j2.configurationFile={log4j}", f"-Drollbridge.log={home.logs / f'broker-{node}.log'}"]
        options += archive.use()
        with (home.logs / f"broker-{node}.out").open("ab") as output:
            told = ["format", "--cluster-id", state.kafka_cluster_id, "--config", str(properties)]
            command = jvm.command("kafka.tools.StorageTool", *told, options=options)
            subprocess.run(command, check=True, stdout=output, stderr=output)
            inside = ["ip", "netns", "exec", self._namespace(node)]
            command = [*inside, *jvm.command("kafka.Kafka", str(properties), options=options)]
            self._processes[node] = subprocess.Popen(command, stdout=output, stderr=output)

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


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _quietly(*command: str) -> None:
    with suppress(OSError):
        subprocess.run(command, check=False, capture_output=True)
