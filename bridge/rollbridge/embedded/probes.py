"""Whether a server answers: the questions a client would ask, with short time-outs."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Mapping
from typing import Final

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from rollbridge.errors import RollbridgeError
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.patience import Deadline
from rollbridge.kafka.views import view_cluster
from rollbridge.security.zookeeper import ZooKeeperSecurity

_TIMEOUT_SECONDS = 2.0
ZOOKEEPER_ROOT: Final = "/rollbridge"
"""Where the coordinators of an embedded cluster register."""

_quiet = logging.getLogger("rollbridge.embedded.probes.quiet")
_quiet.disabled = True
"""That a server does not answer yet is an expected answer here, not news."""


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` in its two parts; the port of a host without one is 0, on which nothing answers."""
    host, _, port = address.strip().rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0


def accepts(address: str) -> bool:
    """Whether something accepts connections there; much cheaper to ask than any protocol."""
    try:
        socket.create_connection(split_address(address), timeout=1).close()
    except (OSError, OverflowError):
        return False
    return True


def kafka_cluster_id(
    bootstrap_servers: str, timeout_seconds: float = _TIMEOUT_SECONDS, *, security: Mapping[str, str] | None = None
) -> str | None:
    """The id of the cluster whose unfenced brokers answer there, ``None`` when none does."""
    if not any(accepts(address) for address in bootstrap_servers.split(",")):
        return None
    deadline = Deadline(timeout_seconds)
    with (
        contextlib.suppress(RollbridgeError),
        Cluster(bootstrap_servers, security=security) as cluster,
        cluster.within(deadline),
    ):
        return view_cluster(cluster, 0).cluster_id
    return None


def zookeeper_mode(address: str) -> str | None:
    """``standalone``, ``leader`` or ``follower``; ``None`` when the server does not serve."""
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
    """Names of the registered coordinators with their ZooKeeper sessions; ``None`` without an answer.

    A coordinator that was killed stays registered until its session runs out, and one that comes back under the same
    name has another session.
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
