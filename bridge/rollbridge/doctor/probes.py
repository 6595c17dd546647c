"""Probes of servers: requests of a client, with short timeouts, and the status of a cluster made of their answers."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from rollbridge.base.deadlines import Deadline
from rollbridge.base.security import ZooKeeperSecurity
from rollbridge.errors import RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import view_cluster

_TIMEOUT_SECONDS: Final = 2.0
ZOOKEEPER_ROOT: Final = "/rollbridge"
"""Path under which coordinators register by default."""

_quiet = logging.getLogger("rollbridge.doctor.probes.quiet")
_quiet.disabled = True
"""A server that does not answer yet is an expected answer here, not news."""


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``; without a port the port is 0, on which nothing answers."""
    host, _, port = address.strip().rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0


def accepts(address: str) -> bool:
    """Return True if something accepts connections there; much cheaper than any protocol."""
    try:
        socket.create_connection(split_address(address), timeout=1).close()
    except (OSError, OverflowError, ValueError):  # a name that is none is a ValueError
        return False
    return True


def kafka_cluster_id(
    bootstrap_servers: str, timeout_seconds: float = _TIMEOUT_SECONDS, *, security: Mapping[str, str] | None = None
) -> str | None:
    """Return the id of the cluster whose unfenced brokers answer there; None if none does."""
    if not any(accepts(address) for address in bootstrap_servers.split(",")):
        return None
    deadline = Deadline(timeout_seconds)
    with (
        contextlib.suppress(RollbridgeError),
        KafkaClient(bootstrap_servers, security=security).cluster() as cluster,
        cluster.within(deadline),
    ):
        return view_cluster(cluster, 0).cluster_id
    return None


def zookeeper_mode(address: str) -> str | None:
    """Return ``standalone``, ``leader`` or ``follower``; None if the server does not serve."""
    answer = bytearray()
    with contextlib.suppress(OSError, OverflowError):
        with socket.create_connection(split_address(address), timeout=_TIMEOUT_SECONDS) as connection:
            connection.sendall(b"srvr")
            while chunk := connection.recv(4096):
                answer += chunk
        for line in answer.decode(errors="replace").splitlines():
            if line.startswith("Mode: "):
                return line.removeprefix("Mode: ").strip()
    return None


def registered_coordinators(
    zookeeper: str,
    root: str = ZOOKEEPER_ROOT,
    timeout_seconds: float = _TIMEOUT_SECONDS,
    *,
    security: Mapping[str, str] | None = None,
) -> frozenset[tuple[str, int]] | None:
    """Return the names of registered coordinators with their ZooKeeper sessions; None without an answer.

    A killed coordinator stays registered until its session expires; one that comes back under the same name has another
    session.
    """
    options = ZooKeeperSecurity.from_config(security).kazoo_options()
    client = KazooClient(zookeeper, timeout=timeout_seconds, logger=_quiet, read_only=True, **options)
    try:
        client.start(timeout=timeout_seconds)
        found: set[tuple[str, int]] = set()
        with contextlib.suppress(NoNodeError):
            for name in client.get_children(f"{root}/coordinators"):
                if stat := client.exists(f"{root}/coordinators/{name}"):
                    found.add((name, stat.ephemeralOwner))
        return frozenset(found)
    except (KazooException, KazooTimeoutError):
        return None
    finally:
        client.stop()
        client.close()


RUNNING: Final = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """Current status of one part of a cluster."""

    part: str
    state: str
    """``running``, ``paused``, ``not answering``, ``died`` (it should run), ``stopped`` (it should not), or a fault."""
    pid: int | None = None
    address: str | None = None
    log: str | None = None
    """Path of its log, if there is one."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Paths of what is there of it: ``log``, ``output``, ``configuration``, ``data``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """Current status of a whole cluster."""

    bootstrap_servers: str | None
    zookeeper: str | None
    parts: tuple[PartStatus, ...]
    """Parts of the cluster; empty if there never was a cluster here."""
    home: str | None = None
    """Directory of an embedded cluster."""
    ephemeral: bool = False

    @property
    def ok(self) -> bool:
        """True if all parts run and answer."""
        return bool(self.parts) and all(part.state == RUNNING for part in self.parts)
