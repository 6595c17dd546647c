"""Liveness: show other coordinators that this process lives, and notice at once when one of theirs ends.

When a process ends in any way, its kernel closes its connections at once and refuses new ones; ZooKeeper notices only
when the session has timed out. So each coordinator listens at its own port and greets with its name and life, and each
holds an idle connection to every other one. Only this counts as the end of a process:

1. there was a connection whose peer had greeted as this life of this coordinator;
2. the connection was closed or reset;
3. a new connection is *refused*, so no process listens there, or another life of the same coordinator answers.

A paused process, a lost machine and a cut network do not answer; then ZooKeeper's session time-out decides, as it does
if the port cannot be reached from elsewhere.

When a process has ended, :func:`remove_dead` removes its ephemeral nodes, so its groups are vacant without waiting for
the session time-out. Safety does not depend on this judgement: the controller epoch and Kafka's fencing decide who can
act, see ``docs/protocol.md``. A live coordinator that was declared dead finds its node deleted, gives up its groups and
registers again without an address, so it is never judged by a connection again.

Threads: one serves the port; each :class:`PeerWatch` has one that watches another coordinator;
:class:`CoordinatorRegistry` and :class:`PeerWatches` belong to the daemon's main thread, except where their docstrings
say otherwise."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import selectors
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Final, Self

from rollbridge.base.deadlines import Backoff
from rollbridge.base.logs import log_defect
from rollbridge.errors import CorruptDataError, InvalidRequestError, LocalEnvironmentError, RollbridgeError
from rollbridge.metadata import paths
from rollbridge.metadata.errors import NodeMissingError
from rollbridge.metadata.records import Coordinator, DeleteNode
from rollbridge.metadata.session import WatchedRead, Znode, ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.daemon.succession import Candidates

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 500
"""Most connections held at once; further ones are closed."""
DIAL_S: Final = 2.0
"""Time-out of a connection, and of each read of the greeting on it."""
AGAIN_FIRST_S: Final = 0.01
AGAIN_S: Final = 1.0
"""Largest back-off between inconclusive attempts, doubled from the first on. A dying process closes one socket after
the other: for a moment after its connections have ended, its port may still accept new ones.
"""
_GREETING_BYTES_MAX: Final = 1_000
_PREFIX: Final = "rollbridge coordinator"


def local_address(servers: str) -> str | None:
    """Return the address from which this machine reaches the first server that it has a route to; None without one.

    Args:
        servers: ``host:port,host:port``, with or without a path after it.
    """
    for server in servers.partition("/")[0].split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            found = socket.getaddrinfo((host or server).strip("[]"), int(port or 2181), type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except (OSError, ValueError):
            continue
    return None


class Liveness:
    """Listener that greets and keeps incoming connections while it is entered; served by one thread."""

    def __init__(self, name: str, host: str, port: int = 0) -> None:
        """Bind the address, or the same port of all addresses if this one is not local.

        Args:
            host: Address at which the others reach it.
            port: Port to listen on, 0 for a free one.

        Raises:
            LocalEnvironmentError: the port cannot be used.
        """
        self.life: Final = uuid.uuid4().hex
        """Random id of this process, a new one after each start."""
        self._greeting = greeting(name, self.life)
        try:
            self._server = _bound(host, port)
        except OSError as fault:
            raise LocalEnvironmentError(f"port {port} of {host} cannot be bound: {fault}") from fault
        self._server.setblocking(False)
        shown = f"[{host}]" if ":" in host else host
        self.address: Final = f"{shown}:{self._server.getsockname()[1]}"
        """Address that the others connect to, as ``host:port``."""
        self._ended = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="presence", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._wake.close()
        self._thread.join(DIAL_S)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._server, self._woken:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            held: set[socket.socket] = set()
            while not self._ended.is_set():
                for key, _ in selector.select():
                    if key.fileobj is self._server:
                        self._take(selector, held)
                    elif key.fileobj in held:  # the connection has ended, or its peer sends, which none should
                        assert isinstance(key.fileobj, socket.socket)
                        selector.unregister(key.fileobj)
                        held.discard(key.fileobj)
                        key.fileobj.close()
            for connection in held:
                connection.close()

    def _take(self, selector: selectors.BaseSelector, held: set[socket.socket]) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as fault:
            if fault.errno in (errno.EMFILE, errno.ENFILE):
                self._ended.wait(AGAIN_S)  # the connection stays in the backlog
            return
        try:
            if len(held) >= CONNECTIONS_MAX:
                connection.close()
                return
            connection.setblocking(False)
            connection.send(self._greeting)  # fits into any socket buffer, so the send is never partial
        except OSError:
            connection.close()
            return
        held.add(connection)
        selector.register(connection, selectors.EVENT_READ)


class PeerState(Enum):
    """Result of an attempt to connect."""

    THERE = "it answers"
    GONE = "its process has ended"
    UNKNOWN = "nothing can be said"


class PeerWatch(threading.Thread):
    """Thread that holds a connection to one life of another coordinator, and reports the end of its process."""

    def __init__(self, name: str, address: str, life: str, on_end: Callable[[], None]) -> None:
        """Prepare; :meth:`start` begins. ``on_end`` is called at most once, on this thread, which then ends."""
        super().__init__(name=f"vigil-{name}", daemon=True)
        self._host, _, port = address.rpartition(":")
        self._port = int(port) if port.isdecimal() else 0
        self._peer = name
        self._life = life
        self._on_end = on_end
        self.seen = threading.Event()
        """Set once the other coordinator has greeted; before that nothing counts as its end."""
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def run(self) -> None:
        """Watch until the other process has ended, or until :meth:`stop`."""
        pauses = Backoff(AGAIN_FIRST_S, AGAIN_S)
        while not self._stopping.is_set():
            sight = self._dial()
            if sight is PeerState.THERE:
                pauses.reset()
                self.seen.set()
                self._hold()
                continue  # the connection has ended: dial at once to see why
            if sight is PeerState.GONE and self.seen.is_set():
                if not self._stopping.is_set():
                    self._on_end()
                return
            self._stopping.wait(pauses.grow())

    def stop(self) -> None:
        """Stop watching; ``on_end`` is not called afterwards, unless a call is in progress."""
        self._stopping.set()
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _dial(self) -> PeerState:
        try:
            connection = socket.create_connection((self._host.strip("[]"), self._port), DIAL_S)
        except ConnectionRefusedError:
            return PeerState.GONE
        except (OSError, OverflowError):
            return PeerState.UNKNOWN
        said = _first_line(connection)
        if said != greeting(self._peer, self._life):
            connection.close()
            return PeerState.GONE if _is_life(said.removeprefix(greeting(self._peer))) else PeerState.UNKNOWN
        connection.settimeout(None)
        with self._lock:
            self._connection = connection
        if self._stopping.is_set():
            self.stop()
        return PeerState.THERE

    def _hold(self) -> None:
        connection = self._connection
        assert connection is not None
        with contextlib.suppress(OSError):
            while connection.recv(64):
                """Ignore anything after the greeting; nothing should come."""
        with self._lock:
            self._connection = None
        connection.close()


def greeting(name: str, life: str | None = None) -> bytes:
    return f"{_PREFIX} {name} ".encode() if life is None else f"{_PREFIX} {name} {life}\n".encode()


def _is_life(rest: bytes) -> bool:
    return re.fullmatch(rb"[0-9a-f]{32}\n", rest) is not None


def _first_line(connection: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(OSError):
        while b"\n" not in said and len(said) < _GREETING_BYTES_MAX:
            part = connection.recv(_GREETING_BYTES_MAX)
            if not part:
                break
            said += part
    return said


def _bound(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((host, port), family=family)
    except OSError as fault:
        if fault.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), family=family)


# Removal of dead coordinators


NODES_AT_ONCE: Final = 1_000


class PeerWatches:
    """PeerWatches over all other coordinators that publish an address; used by one thread."""

    def __init__(self, session: ZooKeeperSession, name: str) -> None:
        """Prepare; ``name`` is this coordinator's, which does not watch itself."""
        self._session = session
        self._name = name
        self._kept: dict[tuple[str, str, str, int | None], PeerWatch] = {}

    def keep(self, records: Mapping[str, tuple[Znode, Coordinator]]) -> None:
        """Watch exactly the coordinators of ``records``."""
        wanted = {
            (name, said.address, said.life, node.owner_session_id)
            for name, (node, said) in records.items()
            if said.address and said.life and name != self._name
        }
        for key in self._kept.keys() - wanted:
            self._kept.pop(key).stop()
        for key in wanted - self._kept.keys():
            name, address, life, owner = key
            peer_watch = PeerWatch(name, address, life, partial(self._ended, name, life, owner))
            peer_watch.start()
            self._kept[key] = peer_watch

    def stop(self) -> None:
        self.keep({})

    def _ended(self, name: str, life: str, owner: int | None) -> None:
        try:
            removed = remove_dead(self._session, name, life, owner)
        except RollbridgeError as fault:
            logger.warning('coordinator.removal-failed coordinator=%s reason="%s"', name, fault)
        except Exception:
            log_defect(logger, "coordinator.removal-failed coordinator=%s", name)
        else:
            if removed is not None:
                logger.warning("coordinator.removed coordinator=%s groups_led=%d", name, removed)


def remove_dead(session: ZooKeeperSession, name: str, life: str, owner: int | None) -> int | None:
    """Remove the ephemeral nodes of a coordinator whose process has ended.

    Its registration is removed in one step with the first of its leader nodes. So of all coordinators that notice the
    end only one does anything, and only while the registration exists.

    Returns:
        Number of groups that are vacant now; None if the nodes were deleted already, or another life's, and nothing was
        done.

    Raises:
        ZooKeeperDeniedError, ZooKeeperUnavailableError: nothing was removed, or not all.
    """
    metadata = Metadata(session)
    place = paths.coordinator(name)
    session.sync()
    node = session.get(place)
    if node is None or node.owner_session_id != owner or Coordinator.from_json(node.value).life != life:
        return None
    leads = [paths.leader(group) for group in metadata.groups()]
    own = [
        DeleteNode(path, found.version)
        for path, found in zip(leads, session.get_many(leads), strict=True)
        if found is not None and found.owner_session_id == owner
    ]
    operations = [DeleteNode(place, node.version), *own]
    try:
        for start in range(0, len(operations), NODES_AT_ONCE):
            session.multi(operations[start : start + NODES_AT_ONCE])
    except NodeMissingError:
        return None  # another coordinator was faster, or the session has just ended
    return len(own)


# The roll of coordinators


SILENT = Coordinator(0, 0)
"""Record of a coordinator of which only the name is known."""


class CoordinatorRegistry:
    """Live coordinators and their records in ZooKeeper.

    One thread reads. ``candidates`` and ``records`` are replaced as a whole, so any thread may use them.
    """

    def __init__(self, session: ZooKeeperSession, on_change: Callable[[], None]) -> None:
        """Prepare. ``on_change`` is called when :meth:`read` has something new to read, and must not block."""
        self._session = session
        self._on_change = on_change
        self._names = WatchedRead(partial(session.children, paths.COORDINATORS), on_change)
        self._nodes: dict[str, WatchedRead[Znode | None]] = {}
        self.candidates = Candidates()
        """Coordinators that are alive, and the groups that each is ready for."""
        self.records: Mapping[str, tuple[Znode, Coordinator]] = {}
        """Nodes of the coordinators with their records, by name."""

    def read(self) -> None:
        """Read the changes since the last call.

        Raises:
            ZooKeeperUnavailableError, ZooKeeperDeniedError: earlier results are kept.
        """
        for name in (names := self._names.get()):
            read = partial(self._session.get, paths.coordinator(name))
            self._nodes.setdefault(name, WatchedRead(read, self._on_change))
        self._nodes = {name: self._nodes[name] for name in names}
        found = {name: node for name, read in self._nodes.items() if (node := read.get()) is not None}
        known = self.records
        self.records = {
            name: known[name] if name in known and known[name][0] == node else (node, _parse(name, node.value))
            for name, node in found.items()
        }
        self.candidates = Candidates({name: frozenset(item.ready) for name, (_, item) in self.records.items()})


def within(bytes_max: int, groups: Iterable[GroupName]) -> tuple[GroupName, ...]:
    """Return as many of the groups, in the order of their names, as fit into ``bytes_max``."""
    found = []
    for group in sorted(groups, key=str):
        bytes_max -= len(str(group).encode()) + 4  # quotes, comma and blank
        if bytes_max < 0:
            break
        found.append(group)
    return tuple(found)


def _parse(name: str, value: bytes) -> Coordinator:
    try:
        return Coordinator.from_json(value) if value else SILENT
    except (CorruptDataError, InvalidRequestError) as fault:
        logger.warning('coordinator.description-unreadable coordinator=%s reason="%s"', name, fault)
        return SILENT
