"""Servers as containers that are killed, paused, cut off and restarted, and keep their data and their address."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from docker.errors import APIError
from docker.models.containers import Container
from docker.models.volumes import Volume
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from integration_tests import clocks
from integration_tests.backends.engine import host, prepare, publishing_address
from integration_tests.backends.interface import Unsupported
from integration_tests.crashing import PROGRAM, program
from integration_tests.patience import eventually
from rollbridge.embedded import probes
from rollbridge.embedded.ports import free_port
from rollbridge.embedded.servers import SMALL_BROKER
from rollbridge.errors import NotFoundError
from rollbridge.images.names import COORDINATOR, KAFKA, ZOOKEEPER

INSIDE: Final = 19092
"""Port of a broker for the other containers."""
_OUTSIDE: Final = 9092
"""Port of a broker that is published."""
_LINKED: Final = 9192
"""Port of a listener that is added later."""
_CONTROLLER: Final = 9093
_ZOOKEEPER: Final = 2181
_ANSWER_S: Final = 120.0
_STOP_S: Final = 20
_SMALL_JVM: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss512k"
_CRASHING: Final = "/tmp/crashing.py"
_FAKETIME: Final = "/tmp/libfaketimeMT.so.1"
"""Where it is in a container."""
_PORT_TAKEN: Final = ("port is already allocated", "address already in use")


class Node(DockerContainer):
    """A container of one part of a cluster, with a named volume if it has data, and with fixed ports.

    A port that the engine chooses would be another one after a restart, and the address that a broker advertises would
    lead nowhere.
    """

    data: str = ""
    """Directory of its volume."""

    def __init__(self, image: str, part: str, network: Network, labels: Mapping[str, str], **options: Any) -> None:
        super().__init__(prepare()[image])
        self.part = part
        self._labels = dict(labels)
        self._attached = network
        self.with_network(network).with_network_aliases(part)
        self.with_kwargs(labels=self._labels, detach=True, **options)
        self.published: dict[int, int] = {}
        """Port on the engine's machine, by port of the container."""

    def keep_data_in(self, volume: Volume) -> Self:
        """Have a volume for ``data``; it stays when the container is made anew."""
        return self.with_volume_mapping(volume.name, self.data, "rw")

    def publish(self, port: int) -> None:
        """Before the start: have a port of the container reachable from this machine."""
        self.published[port] = free_port(self.published.values())

    def configure(self) -> None:
        """Set what depends on published ports; called before each start of a container."""

    def answers(self) -> bool:
        """Whether a client could work with it now."""
        raise AssertionError("each kind of server says how it is asked")

    # -- life -------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Make the container and start it, without waiting until it answers."""
        for attempt in range(5):
            if attempt:
                self.published = {port: free_port(self.published.values()) for port in self.published}
            ports: dict[str, Any] = {
                f"{inside}/tcp": (publishing_address(), outside) for inside, outside in self.published.items()
            }
            self.ports = ports
            self.configure()
            try:
                return super().start()
            except APIError as exc:
                self.discard()
                if not any(text in str(exc) for text in _PORT_TAKEN):
                    raise
        raise TimeoutError(f"no port is left to {self.part}")

    def discard(self) -> None:
        """Remove the container, without its named volume."""
        if self._container is not None:
            self._container.remove(force=True, v=True)
            self._container = None

    def anew(self) -> None:
        """Replace the container by a new one on the same volume, as its settings are now."""
        self.discard()
        self.start()
        self.await_answer()

    def set_clock(self, offset_s: int) -> None:
        """Make it anew with a clock that is ahead of the true time by this much, or behind it; 0 is the true time.

        Raises:
            Unsupported: this machine has no libfaketime.
        """
        library = clocks.library()
        if library is None:
            raise Unsupported("clocks of servers are set by libfaketime, which is not installed (Debian: faketime)")
        self.stop_gracefully()
        wrong = clocks.variables(_FAKETIME, offset_s)
        self._transferable_specs = [spec for spec in self._transferable_specs if spec[1] != _FAKETIME]
        for name in wrong:
            self.env.pop(name, None)
        if offset_s:
            self.with_envs(**wrong).with_copy_into_container(library.read_bytes(), _FAKETIME)
        self.anew()

    def await_answer(self) -> None:
        """Return when a client can work with it; AssertionError with its last words if it ends or takes too long."""
        try:
            eventually(self._answers_or_is_gone, f"{self.part} answers", _ANSWER_S)
        except AssertionError as exc:
            exc.add_note(self.said())
            raise

    def _answers_or_is_gone(self) -> bool:
        if self.status_now() == "exited":
            raise AssertionError(f"{self.part} has ended")
        return self.answers()

    # -- as the engine sees it --------------------------------------------------------------------------

    @property
    def container(self) -> Container:
        """The engine's own view."""
        return self.get_wrapped_container()

    def status_now(self) -> str:
        """``running``, ``paused``, ``exited`` and so on."""
        self.container.reload()
        return str(self.container.status)

    def runs(self) -> bool:
        """Whether it has not ended; a frozen one has not."""
        return self.status_now() in ("running", "paused")

    def said(self, lines: int | Literal["all"] = 30) -> str:
        """What it has printed last."""
        return self.container.logs(tail=lines).decode(errors="replace") if self._container is not None else ""

    def address_inside(self) -> str:
        """Its IP address in the network of the cluster."""
        self.container.reload()
        return str(self.container.attrs["NetworkSettings"]["Networks"][self._attached.name]["IPAddress"])

    # -- faults -----------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL to the server, and return when it is gone: nothing is flushed and nothing is said to anybody."""
        self._must_run()
        self.container.kill(signal="SIGKILL")  # which a frozen one gets too
        self.container.wait(timeout=_STOP_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        self._must_run()
        self.container.kill(signal=number.name)

    def stop_gracefully(self) -> None:
        """SIGTERM, and SIGKILL if that is not enough; harmless if it has ended."""
        self.resume()
        self.container.stop(timeout=_STOP_S)

    def pause(self) -> None:
        """Freeze it: its connections stay open, and the engine still accepts new ones."""
        self._must_run()
        self.container.pause()

    def resume(self) -> None:
        """The end of a pause, if there is one."""
        if self.status_now() == "paused":
            self.container.unpause()

    def start_again(self) -> None:
        """Start the same container again, on its data and under its address."""
        self.container.start()
        self.await_answer()

    def _must_run(self) -> None:
        if not self.runs():
            raise NotFoundError(f"{self.part} does not run")


class Broker(Node):
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
        self._listeners = {"OUTSIDE": _OUTSIDE}
        self._advertised: dict[str, str] = {}
        self._protocols: dict[str, str] = {}
        self.publish(_OUTSIDE)
        copies = len(parts)
        enough = max(1, copies - 1)
        properties: dict[str, object] = {
            **SMALL_BROKER,
            "node.id": number,
            "process.roles": "broker,controller",
            "controller.quorum.voters": ",".join(f"{n}@{part}:{_CONTROLLER}" for n, part in enumerate(parts, 1)),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "INSIDE",
            "log.dirs": f"{self.data}/log",
            "default.replication.factor": copies,
            "min.insync.replicas": enough,
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": enough,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": enough,
            **settings,
        }
        for key, value in properties.items():
            self.with_env(variable_of(key), str(value))
        self.with_envs(CLUSTER_ID=cluster_id, KAFKA_HEAP_OPTS="-Xmx512m", KAFKA_JVM_PERFORMANCE_OPTS=_SMALL_JVM)

    @property
    def address(self) -> str:
        """For clients on this machine."""
        return f"{host()}:{self.published[_OUTSIDE]}"

    @property
    def inside(self) -> str:
        """For the other containers."""
        return f"{self.part}:{INSIDE}"

    def configure(self) -> None:
        listeners = {"INSIDE": INSIDE, "CONTROLLER": _CONTROLLER, **self._listeners}
        advertised = {"INSIDE": self.inside, "OUTSIDE": self.address, **self._advertised}
        self.with_env("KAFKA_LISTENERS", ",".join(f"{name}://:{port}" for name, port in listeners.items()))
        self.with_env("KAFKA_ADVERTISED_LISTENERS", ",".join(f"{name}://{at}" for name, at in advertised.items()))
        protocols = dict.fromkeys(listeners, "PLAINTEXT") | self._protocols
        self.with_env("KAFKA_LISTENER_SECURITY_PROTOCOL_MAP", ",".join(f"{a}:{b}" for a, b in protocols.items()))

    def add_listener(self, name: str, advertised: str) -> str:
        """One more, which says that it is at ``advertised``; returns where it really is. Makes the container anew."""
        self._listeners[name] = _LINKED
        self._advertised[name] = advertised
        self.publish(_LINKED)
        self.stop_gracefully()
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


class ZooKeeper(Node):
    """One of the ZooKeeper servers."""

    data = "/data"

    def __init__(self, number: int, parts: Sequence[str], network: Network, labels: Mapping[str, str]) -> None:
        super().__init__(ZOOKEEPER, parts[number - 1], network, labels)
        self.publish(_ZOOKEEPER)
        hosts = {n: "0.0.0.0" if n == number else part for n, part in enumerate(parts, 1)}
        self.with_envs(
            ZOO_MY_ID=str(number),
            ZOO_SERVERS=" ".join(f"server.{n}={name}:2888:3888;{_ZOOKEEPER}" for n, name in hosts.items()),
            ZOO_STANDALONE_ENABLED="true",
            # Beside the snapshots, so that one volume holds everything.
            ZOO_DATA_LOG_DIR=self.data,
            # As the embedded server has it: sessions may be as short as two ticks.
            ZOO_TICK_TIME="500",
            ZOO_INIT_LIMIT="20",
            ZOO_SYNC_LIMIT="10",
            ZOO_MAX_CLIENT_CNXNS="0",
            ZOO_ADMINSERVER_ENABLED="false",
            ZOO_4LW_COMMANDS_WHITELIST="srvr,ruok,mntr",
            ZOO_CFG_EXTRA="maxSessionTimeout=60000 preAllocSize=4096",
            # What was written survives a killed server as before, only not a power failure.
            JVMFLAGS=f"-Xmx128m {_SMALL_JVM} -Dzookeeper.forceSync=no",
            ZK_SERVER_HEAP="128",
        )

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


class CoordinatorNode(Node):
    """A coordinator of the project's image; it keeps nothing, so it has no volume.

    ``name`` is the one under which it registers.
    """

    def __init__(
        self,
        part: str,
        name: str,
        network: Network,
        labels: Mapping[str, str],
        environment: Mapping[str, str],
        registered: Callable[[], frozenset[tuple[str, int]]],
        **options: Any,
    ) -> None:
        # With an init process, because the kernel spares a first process that kills itself, as crash points do.
        super().__init__(COORDINATOR, part, network, labels, init=True, **options)
        self._registered = registered
        self._before: frozenset[tuple[str, int]] = frozenset()
        self.name: Final = name
        self.with_envs(**environment, ROLLBRIDGE_COORDINATOR_NAME=name)
        if program(environment) == [PROGRAM]:
            self.with_copy_into_container(Path(PROGRAM).read_bytes(), _CRASHING)
            self.with_kwargs(**self._kwargs, entrypoint=["python"]).with_command([_CRASHING])

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._container is not None and self.status_now() in ("running", "paused")

    def start(self) -> Self:
        self._before = self._registered()
        return super().start()

    def start_again(self) -> None:
        self._before = self._registered()
        super().start_again()

    def answers(self) -> bool:
        """Whether it has registered in ZooKeeper since it was started."""
        return any(name == self.name for name, _ in self._registered() - self._before)

    def wait_exit(self, timeout_seconds: float) -> int:
        """Wait until it has ended; its exit code, negative when a signal ended it."""
        deadline = time.monotonic() + timeout_seconds
        while self.status_now() != "exited":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.part} still runs after {timeout_seconds} s")
            time.sleep(0.02)
        code = int(self.container.attrs["State"]["ExitCode"])
        return 128 - code if code > 128 else code


def variable_of(key: str) -> str:
    """The environment variable by which Kafka's image takes a setting.

    Source: Kafka's ``KafkaDockerWrapper``: ``_`` is for a dot, ``__`` for an underscore, ``___`` for a dash.
    """
    return "KAFKA_" + key.replace("_", "__").replace("-", "___").replace(".", "_").upper()
