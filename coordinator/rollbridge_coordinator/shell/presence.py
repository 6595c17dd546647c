"""Presence: a port that shows others that this process lives, and a look at those of others.

When a process ends, however it ends, its kernel closes its connections at once and refuses new ones; ZooKeeper learns
of it only when the session has timed out. So each coordinator listens at a port of its own and says there who it is,
and each holds an idle connection to every other one. Only this is taken for the end of a process:

1. there was a connection, and whoever was at its end had said that it is this life of this coordinator;
2. the connection was closed or reset;
3. a new one is *refused*, so nobody listens there any more, or another life of the same coordinator answers.

A process that stands still, a machine that is gone and a network that is cut answer nothing at all; then ZooKeeper's
session time-out decides, as it does if the port can not be reached from elsewhere. Nothing rests on this being right:
a leader that was taken for dead is fenced as any other, see ``docs/protocol.md``.
"""

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

from rollbridge.errors import CorruptDataError, EnvironmentProblem, InvalidRequestError, RollbridgeError
from rollbridge.kafka.retry import Backoff
from rollbridge.model import paths
from rollbridge.model.names import GroupName
from rollbridge.model.records import Coordinator, DeleteNode
from rollbridge.zookeeper.errors import NodeMissing
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import Node, ZooKeeperSession
from rollbridge_coordinator.state.succession import Candidates

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 500
"""Whoever comes when there are so many is sent away."""
DIAL_S: Final = 2.0
"""How long a connection, and the greeting on it, may take to come."""
AGAIN_FIRST_S: Final = 0.01
AGAIN_S: Final = 1.0
"""Pauses after attempts that said nothing, from the first on doubled up to this. A process that dies closes one socket
after the other: for a moment after its connections have ended, its port may still take new ones."""
_GREETING_BYTES_MAX: Final = 1_000
_PREFIX: Final = "rollbridge coordinator"


def local_address(servers: str) -> str | None:
    """The address of this machine from which it would reach the first of some servers that has one; None if none has.

    Args:
        servers: ``host:port,host:port``, with a path behind it or not.
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


class Presence:
    """Listens while it is entered, and keeps the connections that come."""

    def __init__(self, name: str, host: str, port: int = 0) -> None:
        """Bind the address, or the same port of all addresses if this one is not the machine's own.

        Args:
            name: Of this coordinator.
            host: Address at which the others reach it.
            port: 0 for a free one.

        Raises:
            EnvironmentProblem: the port can not be used.
        """
        self.life: Final = uuid.uuid4().hex
        """Another one after each start."""
        self._greeting = greeting(name, self.life)
        try:
            self._server = _bound(host, port)
        except OSError as fault:
            raise EnvironmentProblem(f"port {port} of {host} can not be listened at: {fault}") from fault
        self._server.setblocking(False)
        shown = f"[{host}]" if ":" in host else host
        self.address: Final = f"{shown}:{self._server.getsockname()[1]}"
        """Where the others are to connect."""
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
                    elif key.fileobj in held:  # it has ended, or says something, which nobody should
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
                self._ended.wait(AGAIN_S)  # it stays in the queue
            return
        try:
            if len(held) >= CONNECTIONS_MAX:
                connection.close()
                return
            connection.setblocking(False)
            connection.send(self._greeting)  # it fits into any buffer
        except OSError:
            connection.close()
            return
        held.add(connection)
        selector.register(connection, selectors.EVENT_READ)


class Sight(Enum):
    """What an attempt to connect shows."""

    THERE = "it answers"
    GONE = "its process has ended"
    UNKNOWN = "nothing can be said"


class Vigil(threading.Thread):
    """Holds a connection to one life of another coordinator, and tells when its process has ended."""

    def __init__(self, name: str, address: str, life: str, on_end: Callable[[], None]) -> None:
        """Prepare; :meth:`start` begins. ``on_end`` is called at most once, from this thread, which then ends."""
        super().__init__(name=f"vigil-{name}", daemon=True)
        self._host, _, port = address.rpartition(":")
        self._port = int(port) if port.isdecimal() else 0
        self._peer = name
        self._life = life
        self._on_end = on_end
        self.seen = threading.Event()
        """Set once the other one has answered; before that nothing is taken for its end."""
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def run(self) -> None:
        """Watch until it has ended, or :meth:`stop`."""
        pauses = Backoff(AGAIN_FIRST_S, AGAIN_S)
        while not self._stopping.is_set():
            sight = self._dial()
            if sight is Sight.THERE:
                pauses.reset()
                self.seen.set()
                self._hold()
                continue  # look at once what has become of it
            if sight is Sight.GONE and self.seen.is_set():
                if not self._stopping.is_set():
                    self._on_end()
                return
            self._stopping.wait(pauses.grow())

    def stop(self) -> None:
        """Let go of the other one; nothing is told any more, unless that is under way."""
        self._stopping.set()
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _dial(self) -> Sight:
        try:
            connection = socket.create_connection((self._host.strip("[]"), self._port), DIAL_S)
        except ConnectionRefusedError:
            return Sight.GONE
        except (OSError, OverflowError):
            return Sight.UNKNOWN
        said = _first_line(connection)
        if said != greeting(self._peer, self._life):
            connection.close()
            return Sight.GONE if _is_life(said.removeprefix(greeting(self._peer))) else Sight.UNKNOWN
        connection.settimeout(None)
        with self._lock:
            self._connection = connection
        if self._stopping.is_set():
            self.stop()
        return Sight.THERE

    def _hold(self) -> None:
        """Wait until the connection ends."""
        connection = self._connection
        assert connection is not None
        with contextlib.suppress(OSError):
            while connection.recv(64):
                """Nobody says anything more; if somebody did, it would not matter."""
        with self._lock:
            self._connection = None
        connection.close()


def greeting(name: str, life: str | None = None) -> bytes:
    """What a coordinator says to whoever connects; the beginning of it, without its life."""
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


# --------------------------------------------------------------------------------------------------------------------
# Vigils over all other coordinators, and what follows from the end of one: its ephemeral nodes go at once.
# So its groups are vacant without waiting for ZooKeeper's session time-out. That is allowed because nothing rests on
# the session: who can act is decided by the controller epoch and by Kafka's fencing. A coordinator that was taken for
# dead, though it lives, finds its node gone, gives up what it leads, registers anew without an address, and so is
# never judged by a connection again; see :mod:`rollbridge_coordinator.shell.presence`.


NODES_AT_ONCE: Final = 1_000


class Vigils:
    """One for each other coordinator that says where it is; used by one thread."""

    def __init__(self, session: ZooKeeperSession, name: str) -> None:
        """Prepare; ``name`` is that of this coordinator, which need not watch itself."""
        self._session = session
        self._name = name
        self._kept: dict[tuple[str, str, str, int | None], Vigil] = {}

    def keep(self, records: Mapping[str, tuple[Node, Coordinator]]) -> None:
        """Watch exactly these."""
        wanted = {
            (name, said.address, said.life, node.owner_session_id)
            for name, (node, said) in records.items()
            if said.address and said.life and name != self._name
        }
        for key in self._kept.keys() - wanted:
            self._kept.pop(key).stop()
        for key in wanted - self._kept.keys():
            name, address, life, owner = key
            vigil = Vigil(name, address, life, partial(self._ended, name, life, owner))
            vigil.start()
            self._kept[key] = vigil

    def stop(self) -> None:
        """Let go of all."""
        self.keep({})

    def _ended(self, name: str, life: str, owner: int | None) -> None:
        try:
            removed = remove_dead(self._session, name, life, owner)
        except RollbridgeError as fault:
            logger.warning("coordinator %s has ended; its session time-out is waited for: %s", name, fault)
        except Exception:
            logger.exception("a defect kept the nodes of coordinator %s, which has ended", name)
        else:
            if removed is not None:
                logger.warning("coordinator %s has ended: removed it, and its lead of %d groups", name, removed)


def remove_dead(session: ZooKeeperSession, name: str, life: str, owner: int | None) -> int | None:
    """Remove the ephemeral nodes of a coordinator whose process has ended.

    The node that registers it goes with the first of its leads, in one step, so that only one of those who see the end
    does anything, and that one only while the node is there.

    Returns:
        How many groups are vacant now; None if its nodes were gone, or are another life's, and nothing was done.

    Raises:
        ZooKeeperDenied, ZooKeeperUnavailable: nothing was removed, or not all.
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
    try:
        session.multi([DeleteNode(place, node.version), *own[: NODES_AT_ONCE - 1]])
        for start in range(NODES_AT_ONCE - 1, len(own), NODES_AT_ONCE):
            session.multi(own[start : start + NODES_AT_ONCE])
    except NodeMissing:
        return None  # somebody else was faster, or the session has just ended
    return len(own)


# --------------------------------------------------------------------------------------------------------------------
# The roll of coordinators: who is alive, and what each says of itself, as it stands in ZooKeeper.


SILENT = Coordinator(0, 0)
"""A coordinator of which nothing is known but its name."""


class Roll:
    """Read by one thread; what was read may be asked for from any."""

    def __init__(self, session: ZooKeeperSession, on_change: Callable[[], None]) -> None:
        """Prepare. ``on_change`` is called when :meth:`read` has something new to read, and must not block."""
        self._session = session
        self._on_change = on_change
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}
        self._is_read = False
        self._names: list[str] = []
        self.candidates = Candidates()
        """Who is alive, and ready for what."""
        self.records: Mapping[str, tuple[Node, Coordinator]] = {}
        """Their nodes, and what these say, by name."""

    def read(self) -> None:
        """Read what has changed since; raises as ZooKeeper's session does."""
        if not self._is_read:
            self._is_read = True
            try:
                self._names = self._session.children(paths.COORDINATORS, self._members_changed)
            except BaseException:
                self._is_read = False
                raise
        found: dict[str, Node] = {}
        for name in self._names:
            node = self._nodes.get(name)
            if node is None:
                moved = threading.Event()
                node = self._session.get(paths.coordinator(name), partial(self._record_changed, name, moved))
                if node is None:
                    continue
                with self._lock:
                    if not moved.is_set():
                        self._nodes[name] = node
            found[name] = node
        with self._lock:
            for name in self._nodes.keys() - found.keys():
                del self._nodes[name]
        known = self.records
        self.records = {
            name: known[name] if name in known and known[name][0] == node else (node, _parse(name, node.value))
            for name, node in found.items()
        }
        self.candidates = Candidates({name: frozenset(item.ready) for name, (_, item) in self.records.items()})

    def _members_changed(self) -> None:
        self._is_read = False
        self._on_change()

    def _record_changed(self, name: str, moved: threading.Event) -> None:
        with self._lock:
            moved.set()
            self._nodes.pop(name, None)
        self._on_change()


def within(bytes_max: int, groups: Iterable[GroupName]) -> tuple[GroupName, ...]:
    """As many of the groups, in the order of their names, as fit into so many bytes."""
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
        logger.warning("what coordinator %s says of itself can not be read: %s", name, fault)
        return SILENT
