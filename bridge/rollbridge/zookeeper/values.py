"""Values that a ZooKeeper session takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, assert_never

from kazoo.client import KazooState, TransactionRequest
from kazoo.protocol.states import WatchedEvent, ZnodeStat

from rollbridge.errors import ConfigError
from rollbridge.model.nodes import ROOT_CHARACTERS_MAX, CheckNode, CreateNode, DeleteNode, NodeOperation, SetNode
from rollbridge.zookeeper.errors import ZooKeeperRefused

Watch = Callable[[], None]

REQUEST_BYTES_MAX: Final = 1_000_000
"""ZooKeeper drops the connection over a request of more than 1 MiB, so larger ones are refused before they are sent."""


_TRIES: Final = 3


class SessionState(Enum):
    """What is known of the session."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    """The connection is gone; the session may or may not live on."""
    LOST = "lost"
    """The session has ended and its ephemeral nodes are gone; a new one begins by itself."""


STATES: Final = {
    KazooState.CONNECTED: SessionState.CONNECTED,
    KazooState.SUSPENDED: SessionState.SUSPENDED,
    KazooState.LOST: SessionState.LOST,
}


@dataclass(frozen=True, slots=True)
class NodeStat:
    """What ZooKeeper knows of a node beside its value; ``owner_session_id`` is None unless it is ephemeral."""

    version: int
    created_ms: int
    modified_ms: int
    owner_session_id: int | None


@dataclass(frozen=True, slots=True)
class Node(NodeStat):
    """A node as it was read."""

    value: bytes


def stat_of(stat: ZnodeStat) -> NodeStat:
    """What kazoo reports, as a value."""
    return NodeStat(stat.version, stat.ctime, stat.mtime, stat.owner_session_id)


def node_of(answer: tuple[bytes, ZnodeStat]) -> Node:
    """A value and its stat as kazoo returns them, as one value."""
    value, stat = answer
    return Node(stat.version, stat.ctime, stat.mtime, stat.owner_session_id, value)


class Once:
    """A watch that calls at most once, however many reads carry it."""

    __slots__ = ("_watch",)

    def __init__(self, watch: Watch) -> None:
        self._watch: Watch | None = watch

    def __call__(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch()

    @classmethod
    def event(cls, watch: Watch) -> Callable[[WatchedEvent], None]:
        """The same as a callback for kazoo, which passes an event."""
        once = watch if isinstance(watch, cls) else cls(watch)
        return lambda _: once()


def join_root(chroot: str, root: str) -> str:
    """One path from both, without a slash at its end."""
    whole = "/".join(part for part in f"{chroot}/{root}".split("/") if part)
    if any(part in (".", "..") for part in whole.split("/")):
        raise ConfigError(f"ZooKeeper root path {root!r} is not absolute and plain")
    if len(whole) >= ROOT_CHARACTERS_MAX:
        raise ConfigError(
            f"ZooKeeper root path /{whole:.40}... has {len(whole) + 1} characters; with the chroot in the addresses "
            f"{ROOT_CHARACTERS_MAX} are possible"
        )
    return f"/{whole}" if whole else ""


def check_addresses(addresses: str) -> None:
    """Raise ConfigError unless these are ``host:port``, several with commas between."""
    for address in addresses.split(","):
        host, colon, port = address.strip().rpartition(":")
        if not colon:
            host, port = address.strip(), "2181"
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{addresses!r} is not a list of ZooKeeper addresses: host:port,host:port is expected")


def with_tries(addresses: str) -> str:
    """The addresses as kazoo is to be given them: often enough for three tries within a session.

    A handshake may take as long as a session, divided by the number of addresses, and a server that has just started
    may accept one and never answer (seen of ZooKeeper 3.9.5). A single address would wait until the session is over.
    """
    given = addresses.split(",")
    return ",".join(given * -(-_TRIES // len(given)))


def check_size(path: str, size: int) -> None:
    """Raise ZooKeeperRefused if a request is too large."""
    if size > REQUEST_BYTES_MAX:
        raise ZooKeeperRefused(
            f"a write of {size} bytes for {path} exceeds ZooKeeper's limit of 1 MiB; nothing was written"
        )


def add_operation(request: TransactionRequest, path: str, operation: NodeOperation) -> int:
    """Put an operation into a multi, with its full path; returns about how many bytes it takes."""
    size = len(path) + 64  # and what surrounds it on the wire
    match operation:
        case CheckNode():
            request.check(path, operation.version)
        case CreateNode():
            size += len(operation.value)
            request.create(path, operation.value)
        case SetNode():
            size += len(operation.value)
            request.set_data(path, operation.value, operation.version)
        case DeleteNode():
            request.delete(path, operation.version)
        case _:
            assert_never(operation)
    return size
