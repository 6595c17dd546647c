"""Directory, settings and state file of a cluster; every command finds it by this file.

The state file holds the settings (addresses, identity, number of coordinators), not the running parts: the operating
system is asked for these each time (:mod:`rollbridge_devcluster.processes`), so a stale file does no harm.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import random
import re
import socket
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from rollbridge.config import ADDRESSES_FILE, ADDRESSES_FORMAT
from rollbridge.errors import InvalidRequestError, LocalEnvironmentError

KAFKA: Final = "kafka"
ZOOKEEPER: Final = "zookeeper"
COORDINATOR_PREFIX: Final = "coordinator-"
GATEWAY: Final = "gateway"
GATEWAY_PORTS: Final = 2
"""Ports of a gateway: its own, and the next one, which represents the only broker."""

_HEAP: Final = re.compile(r"[1-9][0-9]*[kKmMgG]")

# -- ports ---------------------------------------------------------------------------------------------------

LOOPBACK: Final = "127.0.0.1"
"""Only address of the servers, because they have no authentication."""

_RANGE: Final = range(20_000, 32_768)
"""Below the range that Linux takes for outgoing connections: while a broker is down, its clients try to connect to its
port, and one of those connections could otherwise get that port itself and block the broker.
"""

_rng: Final = random.SystemRandom()


def is_free(port: int) -> bool:
    """Return True if a server could listen on this loopback port now."""
    with socket.socket() as probe:
        # As the servers do: a connection that lingers in TIME_WAIT is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            # Binding alone succeeds despite a listener on all addresses.
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(taken: Iterable[int] = (), count: int = 1) -> int:
    """Return the first of so many free loopback ports in a row that are not among ``taken``."""
    others = set(taken)
    for first in _rng.sample(_RANGE, 500):
        if all(port not in others and is_free(port) for port in range(first, first + count)):
            return first
    raise LocalEnvironmentError(
        f"none of 500 ports tried between {_RANGE.start} and {_RANGE.stop - 1} is free on {LOOPBACK}"
    )


def demand_port(port: int, purpose: str) -> int:
    """Promise that a requested port is free.

    Raises:
        LocalEnvironmentError: the port is in use.
    """
    if not is_free(port):
        raise LocalEnvironmentError(
            f"port {port} for {purpose} is in use; stop its process, or omit the port to get a free one"
        )
    return port


# -- what is decided -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The loopback ports of the servers."""

    kafka: int
    kafka_controller: int
    zookeeper: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """Settings of a development cluster."""

    kafka_cluster_id: str
    """22 characters, as Kafka formats ids."""
    ports: Ports
    coordinators: int
    """Number of coordinators of the cluster."""
    has_gateway: bool = False
    """True if it has a gateway."""
    gateway_port: int = 0
    """The first of the gateway's ports; 0 if there never was one."""
    ephemeral: bool = False
    """Remove the whole directory when the cluster stops."""
    short_lived: bool = False
    """Start the servers faster and with less memory, but slower in the long run."""
    kafka_heap: str = "1g"
    """As after ``-Xmx``."""
    kafka_settings: Mapping[str, str] = field(default_factory=dict)
    """Broker settings on top of ours."""
    zookeeper_settings: Mapping[str, str] = field(default_factory=dict)
    """ZooKeeper's settings on top of ours."""
    running: bool = False
    """True after a start until a stop; a part may have died nevertheless."""

    @property
    def bootstrap_servers(self) -> str:
        """Kafka's address."""
        return f"{LOOPBACK}:{self.ports.kafka}"

    @property
    def zookeeper(self) -> str:
        """ZooKeeper's address."""
        return f"{LOOPBACK}:{self.ports.zookeeper}"

    @property
    def gateway(self) -> str:
        """The gateway's address, if there is one."""
        return f"{LOOPBACK}:{self.gateway_port}"

    def stopped(self) -> Self:
        """Return the same cluster after a stop."""
        return replace(self, running=False)

    def to_json(self) -> str:
        """Return the content of the state file; it has the addresses for programs in other languages."""
        document = {
            "format": ADDRESSES_FORMAT,
            "bootstrap_servers": self.bootstrap_servers,
            "zookeeper": self.zookeeper,
            "gateway": self.gateway if self.has_gateway else None,
            **asdict(self),
        }
        return json.dumps(document, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the result of ``to_json``.

        Raises:
            ValueError: it is not one.
        """
        document: Any = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != ADDRESSES_FORMAT:
            raise ValueError(f"it does not say that its format is {ADDRESSES_FORMAT}")
        known = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        try:
            return cls(**{**known, "ports": Ports(**known["ports"])})
        except (KeyError, TypeError) as exc:
            raise ValueError(f"a field is missing or unknown: {exc}") from exc


def private_directory(path: Path) -> Path:
    """Make a directory of a cluster's home, closed to all others: it holds records, logs and passwords."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def write_privately(path: Path, text: str) -> None:
    """Write a file that others cannot read, since settings of servers may hold passwords."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Home:
    """The directory of one cluster."""

    path: Path

    @property
    def state_file(self) -> Path:
        """The state file."""
        return self.path / ADDRESSES_FILE

    @property
    def logs(self) -> Path:
        """The servers' logs."""
        return self.path / "logs"

    @property
    def scratch(self) -> Path:
        """Temporary files of the servers."""
        return self.path / "tmp"

    def of(self, server: str) -> Path:
        """Return the directory of one server's configuration and data."""
        return self.path / server

    def load(self) -> ClusterState | None:
        """Read the state file; ``None`` if there never was a cluster here.

        Raises:
            LocalEnvironmentError: the file cannot be read or is no state file.
        """
        try:
            return ClusterState.from_json(self.state_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            raise LocalEnvironmentError(
                f"{self.state_file} is not readable as the state of an embedded cluster: {exc}; "
                f"move {self.path} away to start afresh"
            ) from exc

    def save(self, state: ClusterState) -> ClusterState:
        """Replace the state file atomically."""
        part = self.state_file.with_suffix(f".{os.getpid()}")
        write_privately(part, state.to_json())
        os.replace(part, self.state_file)
        return state

    @contextmanager
    def locked(self, waiting: Callable[[], object]) -> Iterator[None]:
        """Let one command at a time change this cluster; calls ``waiting`` once if it has to wait.

        Raises:
            LocalEnvironmentError: the directory cannot be written.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # one that was there may serve others, too
            lock = open(self.path / "lock", "w", encoding="utf-8")  # noqa: SIM115 - closed below
        except OSError as exc:
            raise LocalEnvironmentError(f"{self.path} cannot be written: {exc}; choose another --home") from exc
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


# -- what a cluster should be: what is asked for now, on top of what was decided before ----------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Requested settings; ``None`` keeps the cluster's, or the default for a new one."""

    kafka_port: int | None = None
    """Default: its earlier one if that is still free, else any free one. So for the others."""
    zookeeper_port: int | None = None
    gateway_port: int | None = None
    """The first of the gateway's."""
    coordinators: int | None = None
    """Default 1."""
    has_gateway: bool | None = None
    """Default no."""
    ephemeral: bool | None = None
    """Remove everything when the cluster stops. Default no."""
    short_lived: bool | None = None
    """Servers that start faster and need less memory, but are slower in the long run. Default as ``ephemeral``."""
    kafka_heap: str | None = None
    """As after ``-Xmx``. Default 1g."""
    kafka_settings: Mapping[str, str] | None = None
    """Broker settings on top of ours. Default none."""
    zookeeper_settings: Mapping[str, str] | None = None
    """ZooKeeper's settings on top of ours. Default none."""


def refuse_foreign_directory(home: Home, wishes: Wishes) -> None:
    """Refuse an ephemeral cluster in a directory with other files, because it removes the directory in the end.

    Raises:
        LocalEnvironmentError: there are other files in the directory.
    """
    if not wishes.ephemeral or not home.path.is_dir():
        return
    state = home.load()
    # A start that runs at the same time has at least its lock there, and perhaps a state file half-written.
    strangers = [path for path in home.path.iterdir() if path.stem not in ("lock", home.state_file.stem)]
    if state is None and strangers:
        raise LocalEnvironmentError(
            f"{home.path} is not empty, and an ephemeral cluster removes its directory when it stops; "
            "name one that does not exist yet"
        )
    if state is not None and not state.ephemeral:
        raise LocalEnvironmentError(
            f"{home.path} holds a cluster whose data is kept; leave --ephemeral out or name another --home"
        )


def decide(home: Home, before: ClusterState | None, wishes: Wishes, running: Collection[str]) -> ClusterState:
    """Return the settings that the cluster should have from now on.

    Raises:
        InvalidRequestError: the heap is no size.
        LocalEnvironmentError: a requested port is in use, or cannot be changed because its server runs.
    """
    if wishes.kafka_heap is not None and not _HEAP.fullmatch(wishes.kafka_heap):
        raise InvalidRequestError(
            f"{wishes.kafka_heap!r} is not a heap size: a number with k, m or g is expected, such as 512m"
        )
    state = before or ClusterState(
        kafka_cluster_id=_stored_cluster_id(home) or new_cluster_id(),
        ports=Ports(kafka=0, kafka_controller=0, zookeeper=0),
        coordinators=1,
        ephemeral=bool(wishes.ephemeral),
        short_lived=bool(wishes.ephemeral),
    )
    changes = {
        name: value
        for name in ("coordinators", "has_gateway", "short_lived", "kafka_heap", "kafka_settings", "zookeeper_settings")
        if (value := getattr(wishes, name)) is not None
    }
    return _with_ports(replace(state, running=True, **changes), wishes, running)


def _with_ports(state: ClusterState, wishes: Wishes, running: Collection[str]) -> ClusterState:
    """Choose ports: a running server keeps its own; a requested one must be free; others stay if still free."""
    taken = {port for port in (wishes.kafka_port, wishes.zookeeper_port) if port is not None}
    if wishes.gateway_port is not None:
        taken |= {*range(wishes.gateway_port, wishes.gateway_port + GATEWAY_PORTS)}

    def choose(server: str, purpose: str, port: int, asked: int | None, count: int = 1) -> int:
        if server in running:
            if asked not in (None, port):
                raise LocalEnvironmentError(
                    f"{purpose} runs on port {port} already; stop the cluster with `rollbridge down` first "
                    f"to have it on port {asked}"
                )
            chosen = port
        elif asked is not None:
            chosen = asked
            for one in range(asked, asked + count):
                demand_port(one, purpose)
        elif port and all(one not in taken and is_free(one) for one in range(port, port + count)):
            chosen = port
        else:
            chosen = free_port(taken, count)
        taken.update(range(chosen, chosen + count))
        return chosen

    before = state.ports
    ports = Ports(
        kafka=choose(KAFKA, "Kafka", before.kafka, wishes.kafka_port),
        kafka_controller=choose(KAFKA, "Kafka's controller", before.kafka_controller, None),
        zookeeper=choose(ZOOKEEPER, "ZooKeeper", before.zookeeper, wishes.zookeeper_port),
    )
    if not state.has_gateway:
        return replace(state, ports=ports)
    gateway_port = choose(GATEWAY, "the gateway", state.gateway_port, wishes.gateway_port, GATEWAY_PORTS)
    return replace(state, ports=ports, gateway_port=gateway_port)


def _stored_cluster_id(home: Home) -> str | None:
    """Return the id in Kafka's data, for a lost state file."""
    meta = home.of(KAFKA) / "data" / "meta.properties"
    if not meta.exists():
        return None
    found = re.search(r"^cluster\.id=(\S+)$", meta.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def new_cluster_id() -> str:
    """Return a random id as Kafka writes them: 16 bytes in URL-safe base64, not starting like an option."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        if not text.startswith("-"):
            return text
