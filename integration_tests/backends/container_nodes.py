"""Nodes in containers, by testcontainers: brokers, ZooKeeper servers and coordinators from the images that users run.

A container keeps its name in the network, its published ports and, if it has data, a named volume: what is killed,
paused, cut off or made anew comes back with its data and under its address.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Self, cast

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from docker.errors import APIError
from docker.models.containers import Container
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from integration_tests.backends.engine import host, publishing_address, watch
from integration_tests.images import COORDINATOR, KAFKA, ZOOKEEPER, provide
from rollbridge.doctor import probes
from rollbridge.errors import LocalEnvironmentError, NotFoundError
from rollbridge_devcluster.nodes import NO_SYNC, STOP_S, ZOOKEEPER_SETTINGS, Node, broker_settings
from rollbridge_devcluster.state import free_port

INSIDE: Final = 19092
"""Port of a broker for the other containers."""
_OUTSIDE: Final = 9092
"""Port of a broker that is published."""
_LINKED: Final = 9192
"""Port of a listener that is added later."""
_CONTROLLER: Final = 9093
_ZOOKEEPER: Final = 2181
_SMALL_JVM: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss512k"
_PORT_TAKEN: Final = ("port is already allocated", "address already in use")
_PORT_ATTEMPTS: Final = 5
_STOP_S: Final = 20


@cache
def prepare() -> Mapping[str, str]:
    """Have a watcher stand by, and have current images; once.

    Returns:
        The ids of the images by name: what a name means may change while a cluster runs.

    Raises:
        LocalEnvironmentError: there is no engine, or an image can be neither had nor built.
    """
    watch()
    return {image.name: image.id for image in provide()}


class ContainerNode(Node):
    """A container of one part of a cluster, with a named volume if it has data, and with fixed ports.

    A port that the engine chooses would be another one after a restart, and the address that a broker advertises would
    lead nowhere.
    """

    data: str = ""
    """Directory of its volume."""

    def __init__(self, image: str, part: str, network: Network, labels: Mapping[str, str], **options: Any) -> None:
        """Only notes what is wanted; ``options`` are of the container, as Docker's library takes them."""
        super().__init__(part)
        self.environment: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        """Put into the container before it starts, by path; their directories are there."""
        self.command: list[str] | None = None
        self.entrypoint: list[str] | None = None
        self.published: dict[int, int] = {}
        """Port on the engine's machine, by port of the container."""
        self.volume: str | None = None
        """Name of the volume for ``data``; it stays when the container is made anew."""
        self._image = prepare()[image]
        self._network = network
        self._options = {"labels": dict(labels), **options}
        self._running: DockerContainer | None = None

    def publish(self, port: int) -> None:
        """Before the start: have a port of the container reachable from this machine."""
        self.published[port] = free_port(self.published.values())

    def configure(self) -> None:
        """Set what depends on published ports; called before each start of a container."""

    # -- life -------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Make the container if there is none, and start it."""
        if self._running is not None:
            self.container.start()
            return self
        for attempt in range(_PORT_ATTEMPTS):
            if attempt:
                self.published = {port: free_port(self.published.values()) for port in self.published}
            self.configure()
            self._running = self._described()
            try:
                self._running.start()
            except APIError as exc:
                self.discard()
                if not any(text in str(exc) for text in _PORT_TAKEN):
                    raise
            else:
                return self
        raise LocalEnvironmentError(f"no port is left to {self.part}")

    def _described(self) -> DockerContainer:
        described = DockerContainer(
            self._image, env=self.environment, network=self._network, network_aliases=[self.part], **self._options
        )
        # As Docker's library takes them: with an address of the engine's machine.
        ports = cast("dict[str, tuple[str, int]]", described.ports)
        ports |= {f"{inside}/tcp": (publishing_address(), outside) for inside, outside in self.published.items()}
        if self.volume is not None:
            described.with_volume_mapping(self.volume, self.data, "rw")
        if self.command is not None:
            described.with_command(self.command)
        if self.entrypoint is not None:
            described.with_kwargs(**self._options, entrypoint=self.entrypoint)
        for path, content in self.files.items():
            described.with_copy_into_container(content, path)
        return described

    def discard(self) -> None:
        """Remove the container, without its named volume."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def anew(self) -> None:
        """Replace the container by a new one on the same volume, as its settings are now."""
        self.discard()
        self.start()
        self.await_answer()

    # -- as the engine sees it --------------------------------------------------------------------------

    @property
    def container(self) -> Container:
        """The engine's own view.

        Raises:
            NotFoundError: there is no container.
        """
        if self._running is None:
            raise NotFoundError(f"{self.part} does not run")
        return self._running.get_wrapped_container()

    def status_now(self) -> str:
        """``running``, ``paused``, ``exited`` and so on."""
        if self._running is None:
            return "none"
        self._running.reload()
        return str(self._running.status)

    def runs(self) -> bool:
        return self.status_now() in ("running", "paused")

    def exit_code(self) -> int | None:
        if self.status_now() != "exited":
            return None
        code = int(self.container.attrs["State"]["ExitCode"])
        return 128 - code if code > 128 else code

    def said(self, lines: int | None = None) -> str:
        if self._running is None:
            return ""
        said: bytes = self.container.logs(tail="all" if lines is None else lines)
        return said.decode(errors="replace")

    def address_inside(self) -> str:
        """Its IP address in the network of the cluster."""
        self.container.reload()
        return str(self.container.attrs["NetworkSettings"]["Networks"][self._network.name]["IPAddress"])

    # -- faults -----------------------------------------------------------------------------------------

    def kill(self) -> None:
        self.must_run()
        self.container.kill(signal="SIGKILL")  # which a frozen one gets too
        self.container.wait(timeout=_STOP_S)

    def signal(self, number: signal.Signals) -> None:
        self.must_run()
        self.container.kill(signal=number.name)

    def stop(self, patience_s: float = STOP_S) -> bool:
        if self.runs():
            self.resume()
            self.container.stop(timeout=round(patience_s))
        return self.exit_code() != -signal.SIGKILL

    def pause(self) -> None:
        """Freeze it; the engine still accepts new connections."""
        self.must_run()
        self.container.pause()

    def resume(self) -> None:
        if self.status_now() == "paused":
            self.container.unpause()


class KafkaContainer(ContainerNode):
    """One of the brokers, controller as well (KRaft)."""

    data = "/var/lib/kafka/data"

    def __init__(
        self,
        number: int,
        parts: Sequence[str],
        network: Network,
        labels: Mapping[str, str],
        cluster_id: str,
        settings: Mapping[str, str],
    ) -> None:
        super().__init__(KAFKA, parts[number - 1], network, labels)
        self.number = number
        self.listeners = {"OUTSIDE": _OUTSIDE}
        """Ports by name, beside that for other containers and that for controllers."""
        self.advertised: dict[str, str] = {}
        """Where listeners say that they are, if not at the usual place."""
        self.protocols: dict[str, str] = {}
        """Of listeners that are not plain."""
        self.publish(_OUTSIDE)
        voters = [f"{part}:{_CONTROLLER}" for part in parts]
        for key, value in broker_settings(number, voters, f"{self.data}/log", settings).items():
            self.environment[variable_of(key)] = str(value)
        self.environment |= {
            variable_of("inter.broker.listener.name"): "INSIDE",
            "CLUSTER_ID": cluster_id,
            "KAFKA_HEAP_OPTS": "-Xmx512m",
            "KAFKA_JVM_PERFORMANCE_OPTS": _SMALL_JVM,
        }

    @property
    def address(self) -> str:
        """For clients on this machine."""
        return f"{host()}:{self.published[_OUTSIDE]}"

    @property
    def inside(self) -> str:
        """For the other containers."""
        return f"{self.part}:{INSIDE}"

    def configure(self) -> None:
        listeners = {"INSIDE": INSIDE, "CONTROLLER": _CONTROLLER, **self.listeners}
        advertised = {"INSIDE": self.inside, "OUTSIDE": self.address, **self.advertised}
        protocols = dict.fromkeys(listeners, "PLAINTEXT") | self.protocols
        self.environment |= {
            "KAFKA_LISTENERS": ",".join(f"{name}://:{port}" for name, port in listeners.items()),
            "KAFKA_ADVERTISED_LISTENERS": ",".join(f"{name}://{at}" for name, at in advertised.items()),
            "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": ",".join(f"{name}:{kind}" for name, kind in protocols.items()),
        }

    def add_listener(self, name: str, advertised: str) -> str:
        """One more, which says that it is at ``advertised``; returns where it really is. Makes the container anew."""
        self.listeners[name] = _LINKED
        self.advertised[name] = advertised
        self.publish(_LINKED)
        self.stop()
        self.anew()
        return f"{host()}:{self.published[_LINKED]}"

    def answers(self) -> bool:
        """Whether this broker is among those that it says are there: one that is still fenced is not."""
        if not probes.accepts(self.address):
            return False
        admin = AdminClient({"bootstrap.servers": self.address, "socket.timeout.ms": 2000, "log_level": 0})
        with contextlib.suppress(KafkaException):
            return self.number in admin.list_topics(timeout=2).brokers
        return False


class ZooKeeperContainer(ContainerNode):
    """One of the ZooKeeper servers."""

    data = "/data"

    def __init__(self, number: int, parts: Sequence[str], network: Network, labels: Mapping[str, str]) -> None:
        super().__init__(ZOOKEEPER, parts[number - 1], network, labels)
        self.publish(_ZOOKEEPER)
        hosts = {n: "0.0.0.0" if n == number else part for n, part in enumerate(parts, 1)}
        more = dict(ZOOKEEPER_SETTINGS)
        self.environment |= {
            "ZOO_MY_ID": str(number),
            "ZOO_SERVERS": " ".join(f"server.{n}={name}:2888:3888;{_ZOOKEEPER}" for n, name in hosts.items()),
            "ZOO_STANDALONE_ENABLED": "true",
            # Beside the snapshots, so that one volume holds everything.
            "ZOO_DATA_LOG_DIR": self.data,
            "ZOO_INIT_LIMIT": "20",
            "ZOO_SYNC_LIMIT": "10",
            # What the image has variables for, which it writes into the file before all others.
            "ZOO_TICK_TIME": str(more.pop("tickTime")),
            "ZOO_MAX_CLIENT_CNXNS": str(more.pop("maxClientCnxns")),
            "ZOO_ADMINSERVER_ENABLED": str(more.pop("admin.enableServer")),
            "ZOO_4LW_COMMANDS_WHITELIST": str(more.pop("4lw.commands.whitelist")),
            "ZOO_CFG_EXTRA": " ".join(f"{key}={value}" for key, value in more.items()),
            "JVMFLAGS": f"-Xmx128m {_SMALL_JVM} {NO_SYNC}",
            "ZK_SERVER_HEAP": "128",
        }

    @property
    def address(self) -> str:
        """For clients on this machine."""
        return f"{host()}:{self.published[_ZOOKEEPER]}"

    @property
    def inside(self) -> str:
        """For the other containers."""
        return f"{self.part}:{_ZOOKEEPER}"

    def answers(self) -> bool:
        """Whether it serves, which one of several does only with a majority."""
        return probes.zookeeper_mode(self.address) is not None


class CoordinatorContainer(ContainerNode):
    """A coordinator of the project's image; it keeps nothing, so it has no volume."""

    def __init__(
        self,
        part: str,
        name: str,
        network: Network,
        labels: Mapping[str, str],
        environment: Mapping[str, str],
        registered: Callable[[], frozenset[tuple[str, int]]],
    ) -> None:
        # With an init process, because the kernel spares a first process that kills itself, as crash points do.
        super().__init__(COORDINATOR, part, network, labels, init=True)
        self._registered = registered
        self._before: frozenset[tuple[str, int]] = frozenset()
        self._name = name
        self.environment = {**environment, "ROLLBRIDGE_COORDINATOR_NAME": name}

    @property
    def name(self) -> str:
        return self._name

    def start(self) -> Self:
        self._before = self._registered()
        return super().start()

    def answers(self) -> bool:
        """Whether it has registered in ZooKeeper since it was started."""
        return any(name == self._name for name, _ in self._registered() - self._before)


def variable_of(key: str) -> str:
    """The environment variable by which Kafka's image takes a setting.

    Source: Kafka's ``KafkaDockerWrapper``: ``_`` is for a dot, ``__`` for an underscore, ``___`` for a dash.
    """
    return "KAFKA_" + key.replace("_", "__").replace("-", "___").replace(".", "_").upper()
