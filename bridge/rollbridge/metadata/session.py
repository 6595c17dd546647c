"""ZooKeeper session: the few operations that rollbridge needs, typed, below one root path, with rollbridge's errors.

Additions to kazoo:

- Reads are retried until they are answered or the operation's time is up. Writes never are: after a lost connection
  a write may have happened. :class:`~rollbridge.errors.UnknownWriteError` says so, and the caller reads to find out.
- Every read can leave a watch on an absent node. It fires at most once, and also when the connection is lost:
  ZooKeeper's watches miss nodes that are created and deleted meanwhile, so watchers must read again anyway.
- A chroot in the address is created like the root path, not merely warned about.

Watches and state listeners run on kazoo's threads: they must neither block nor read.

A session says nothing about leadership. A leader must stop deciding at SUSPENDED, since the expiry of a session is only
learned after reconnecting, and must check a version in each of its writes.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar, assert_never

from kazoo.client import KazooClient, KazooState, TransactionRequest
from kazoo.exceptions import EXCEPTIONS, KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.interfaces import IAsyncResult
from kazoo.protocol.serialization import GetChildren, GetData, MultiHeader, read_buffer, read_string
from kazoo.protocol.states import WatchedEvent, ZnodeStat
from kazoo.retry import KazooRetry

from rollbridge.base.deadlines import Deadline, patience_s
from rollbridge.base.forks import hold
from rollbridge.base.security import ACL, Quieter, ZooKeeperSecurity
from rollbridge.errors import ConfigError, RollbridgeError, UnknownWriteError, ZooKeeperUnavailableError
from rollbridge.metadata.errors import (
    NodeConflictError,
    NodeMissingError,
    ZooKeeperDeniedError,
    ZooKeeperRefusedError,
    is_transient,
    translate,
    translate_multi,
)
from rollbridge.metadata.records import ROOT_CHARACTERS_MAX, CheckNode, CreateNode, DeleteNode, NodeOperation, SetNode

# Many reads in one request of ZooKeeper (its operation ``multiRead``, since 3.6), which kazoo does not have.
#
# One request for each node takes most of a millisecond of a client, whatever ZooKeeper needs. Each read of a request
# has an answer or an error of its own.


_INT = struct.Struct("!i")
_STAT = struct.Struct("!qqqqiiiqiiq")


@dataclass(frozen=True, slots=True)
class MultiRead:
    """Request for several nodes, or for the children of several."""

    reads: Sequence[GetData | GetChildren]
    type: ClassVar[int] = 22

    def serialize(self) -> bytearray:
        """Return the body."""
        body = bytearray()
        for read in self.reads:
            body += MultiHeader(read.type, False, -1).serialize() + read.serialize()
        return body + MultiHeader(-1, True, -1).serialize()

    def deserialize(self, data: bytes, offset: int) -> list[Any]:
        """Return an answer or an exception for each read."""
        found: list[Any] = []
        while True:
            header, offset = MultiHeader.deserialize(data, offset)
            if header.done:
                return found
            if header.type == GetData.type:
                value, offset = read_buffer(data, offset)
                found.append((value, ZnodeStat._make(_STAT.unpack_from(data, offset))))
                offset += _STAT.size
            elif header.type == GetChildren.type:
                (count,), offset = _INT.unpack_from(data, offset), offset + _INT.size
                names = []
                for _ in range(count):
                    name, offset = read_string(data, offset)
                    names.append(name)
                found.append(names)
            else:
                (code,), offset = _INT.unpack_from(data, offset), offset + _INT.size
                found.append(EXCEPTIONS[code]())


def read_together(client: KazooClient, reads: Sequence[GetData | GetChildren]) -> IAsyncResult:
    """Ask for all of them; the result is as :meth:`MultiRead.deserialize` returns it."""
    result: IAsyncResult = client.handler.async_result()
    client._call(MultiRead(reads), result)
    return result


# Values of a session


Watch = Callable[[], None]
T = TypeVar("T")

REQUEST_BYTES_MAX: Final = 1_000_000
"""Maximum bytes of a request; ZooKeeper drops the connection over more than 1 MiB, so larger ones are refused here."""


_TRIES: Final = 3


class SessionState(Enum):
    """State of the session, as far as known."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    """Connection lost; the session may or may not live on."""
    LOST = "lost"
    """Session ended and its ephemeral nodes gone; a new one begins by itself."""


STATES: Final = {
    KazooState.CONNECTED: SessionState.CONNECTED,
    KazooState.SUSPENDED: SessionState.SUSPENDED,
    KazooState.LOST: SessionState.LOST,
}


@dataclass(frozen=True, slots=True)
class Znode:
    """Node as it was read; ``owner_session_id`` is None unless it is ephemeral."""

    version: int
    created_ms: int
    modified_ms: int
    owner_session_id: int | None
    value: bytes


def node_of(answer: tuple[bytes, ZnodeStat]) -> Znode:
    """Convert a value and its stat, as kazoo returns them, into one value."""
    value, stat = answer
    return Znode(stat.version, stat.ctime, stat.mtime, stat.owner_session_id, value)


class Once:
    """Watch that calls at most once, however many reads carry it."""

    __slots__ = ("_watch",)

    def __init__(self, watch: Watch) -> None:
        self._watch: Watch | None = watch

    def __call__(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch()

    @classmethod
    def event(cls, watch: Watch) -> Callable[[WatchedEvent], None]:
        """Wrap a watch as a callback for kazoo, which passes an event."""
        once = watch if isinstance(watch, cls) else cls(watch)
        return lambda _: once()


class WatchedRead(Generic[T]):
    """Read that is repeated only after its watch has fired, or an error."""

    def __init__(self, read: Callable[[Watch], T], changed: Watch = lambda: None) -> None:
        """Begin without; ``changed`` is called when :meth:`get` has something new to read."""
        self._read = read
        self._changed = changed
        self._found: tuple[threading.Event, T] | None = None

    def get(self) -> T:
        """Return what was read."""
        found = self._found
        if found is None or found[0].is_set():
            moved = threading.Event()
            found = self._found = moved, self._read(lambda: self._move(moved))
        return found[1]

    def forget(self) -> None:
        """Have it read again."""
        self._found = None

    def _move(self, moved: threading.Event) -> None:
        moved.set()
        self._changed()


def join_root(chroot: str, root: str) -> str:
    """Join both into one path, without a slash at its end.

    Raises:
        ConfigError: not absolute and plain, or too long.
    """
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
    """Return the addresses repeated often enough for three tries within a session, as kazoo is to be given them.

    A handshake may take as long as a session, divided by the number of addresses, and a server that has just started
    may accept one and never answer (seen with ZooKeeper 3.9.5). A single address would wait until the session is over.
    """
    given = addresses.split(",")
    return ",".join(given * -(-_TRIES // len(given)))


def check_size(path: str, size: int) -> None:
    """Raise ZooKeeperRefusedError if a request is too large."""
    if size > REQUEST_BYTES_MAX:
        raise ZooKeeperRefusedError(
            f"a write of {size} bytes for {path} exceeds ZooKeeper's limit of 1 MiB; nothing was written"
        )


def add_operation(request: TransactionRequest, path: str, operation: NodeOperation) -> int:
    """Add an operation to a multi, with its full path; return about how many bytes it takes."""
    size = len(path) + 64  # and what surrounds it on the wire
    match operation:
        case CheckNode():
            request.check(path, operation.version)
        case CreateNode():
            size += len(operation.value)
            request.create(path, operation.value, ephemeral=operation.ephemeral, sequence=operation.sequential)
        case SetNode():
            size += len(operation.value)
            request.set_data(path, operation.value, operation.version)
        case DeleteNode():
            request.delete(path, operation.version)
        case _:
            assert_never(operation)
    return size


__all__ = ["REQUEST_BYTES_MAX", "SessionState", "Watch", "Znode", "ZooKeeperSession"]

logger = logging.getLogger(__name__)

RETRY_PAUSE_S: Final = 0.05
RECONNECT_PAUSE_MAX_S: Final = 1.0
CLOSE_S: Final = 20.0
"""Longest wait for kazoo to end a session."""
PIPELINE_DEPTH: Final = 500
"""Maximum number of pipelined multis in flight; ZooKeeper throttles beyond 1,000 requests."""
READ_TOGETHER: Final = 100
"""Nodes that are read with one request: an answer stays small if each is of some kilobytes."""
READS_UNDER_WAY: Final = 5
"""Such requests that are under way at a time."""


class EnsembleAddress(Protocol):
    """Address of ZooKeeper among the settings of a connection."""

    @property
    def zookeeper(self) -> str: ...

    @property
    def zookeeper_root(self) -> str: ...

    @property
    def zookeeper_security(self) -> Mapping[str, str]: ...

    @property
    def client_name(self) -> str: ...


class ZooKeeperSession:
    """ZooKeeper session. Safe to use from several threads. All paths are relative to the root path."""

    def __init__(
        self,
        hosts: str,
        *,
        root: str = "/rollbridge",
        session_timeout_s: float = 10.0,
        operation_timeout_s: float = 30.0,
        name: str = "",
        security: Mapping[str, str] | None = None,
        observe: Callable[[str, float], None] | None = None,
    ) -> None:
        """Prepare a session; :meth:`start` connects.

        Args:
            hosts: ``host:port,host:port/chroot``.
            root: Root path, below the chroot; created with the first node.
            session_timeout_s: Seconds without contact after which ZooKeeper ends the session.
            operation_timeout_s: Seconds that one operation waits for its answer, reconnecting included.
            name: Name of the session in log lines.
            security: See :mod:`rollbridge.base.security`.
            observe: Called with ``read``, ``write`` or ``multi``, and the seconds that it took, for each operation that
              was answered, from the calling thread. Reads that are sent together count as one.

        Raises:
            ConfigError: malformed addresses or root path, or security settings that cannot be used.
        """
        addresses, slash, chroot = hosts.partition("/")
        self._root = join_root(slash + chroot, root)
        self.address: Final = hosts
        self.name: Final = name
        self._operation_timeout_s = operation_timeout_s
        self._listeners: list[Callable[[SessionState], None]] = []
        self._interruptions = 0
        self._observe = observe
        check_addresses(addresses)
        self._servers = addresses
        self._security = ZooKeeperSecurity.from_config(security)
        self._client = KazooClient(
            hosts=with_tries(addresses),
            timeout=session_timeout_s,
            connection_retry=KazooRetry(max_tries=-1, delay=0.1, max_delay=RECONNECT_PAUSE_MAX_S),
            logger=Quieter(logging.getLogger("kazoo.client"), {}),
            **self._security.kazoo_options(),
        )
        self._client.add_listener(self._state_changed)
        self._closed = False
        self._alive: threading.Event | None = None
        hold(self, "_client")

    @classmethod
    def of(
        cls,
        settings: EnsembleAddress,
        *,
        name: str | None = None,
        session_timeout_s: float = 10.0,
        observe: Callable[[str, float], None] | None = None,
    ) -> Self:
        """Return a session for the settings of a connection, under its name unless another is given."""
        return cls(
            settings.zookeeper,
            root=settings.zookeeper_root,
            session_timeout_s=session_timeout_s,
            name=name or settings.client_name,
            security=settings.zookeeper_security,
            observe=observe,
        )

    def start(self, timeout_s: float = 15.0) -> None:
        """Connect.

        Raises:
            ZooKeeperUnavailableError: no server answered in time, or none that we trust. Nothing is left running, save
                that a thread waits a few seconds more, in the background, for a server that accepts connections and is
                silent.
        """
        if not self.await_start(timeout_s):
            self._closed = True
            threading.Thread(target=self._end, name="rollbridge-zookeeper-close", daemon=True).start()
            raise self.unanswered(timeout_s)

    def await_start(self, timeout_s: float) -> bool:
        """Connect; return False if no server has answered in time. Connecting continues, and this may be called again.

        Raises:
            ZooKeeperUnavailableError: no server is trusted; nothing is left running.
        """
        if why := self._security.tls_fault(self._servers):
            self.close()
            raise ZooKeeperUnavailableError(
                f"no ZooKeeper server can be used at {self.address}: {why}", code="zookeeper-untrusted"
            )
        if self._alive is None:
            # Not kazoo's own start(): where that gives up, it waits for its thread, up to ten seconds more.
            self._alive = self._client.start_async()
        self._alive.wait(timeout_s)
        return bool(self._client.connected)

    def unanswered(self, timeout_s: float) -> ZooKeeperUnavailableError:
        """Return the error for a session that no server has answered."""
        return ZooKeeperUnavailableError(
            f"no ZooKeeper server answered at {self.address} within {timeout_s:g} s: "
            "is it running, and is the address right?"
        )

    def close(self) -> None:
        """End the session; its ephemeral nodes go at once. Closing again does nothing.

        After 20 s it is left to its time-out, which is told in the log.
        """
        if self._closed:
            return
        self._closed = True
        # kazoo waits for its threads for ever if a line that is cut meanwhile takes the request to close with it
        # (python-zk/kazoo#582).
        closing = threading.Thread(target=self._end, name="rollbridge-zookeeper-close", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # while the interpreter ends, it starts no threads since Python 3.12
            self._end()
            return
        closing.join(CLOSE_S)
        if closing.is_alive():
            logger.warning("zookeeper_session.close_abandoned session=%s: it ends with its time-out", self.name)

    def _end(self) -> None:
        try:
            self._client.stop()
            self._client.close()
        except (KazooException, OSError) as fault:
            logger.info("zookeeper_session.close_failed session=%s reason=%s", self.name, fault)

    def __enter__(self) -> ZooKeeperSession:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """True once it was closed here."""
        return self._closed

    @property
    def root(self) -> str:
        """Root path, chroot included."""
        return self._root or "/"

    @property
    def has_identity(self) -> bool:
        """True if ZooKeeper knows who we are, so that what we create is ours."""
        return self._security.has_identity

    @property
    def session_id(self) -> int | None:
        """Id of the session while it is connected; another one after the session was lost."""
        identity = self._client.client_id
        return None if identity is None else identity[0]

    @property
    def is_connected(self) -> bool:
        """True if the session is known to live; False while the connection is suspended or the session lost."""
        return bool(self._client.connected) and self._client.state == KazooState.CONNECTED

    @property
    def interruptions(self) -> int:
        """Number of times that the connection has gone away."""
        return self._interruptions

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        """Register a listener of state changes, called on the connection's thread: it must not block or read."""
        self._listeners.append(listener)

    # Reads ------------------------------------------------------------------------------------------------------

    def get(self, path: str, watch: Watch | None = None) -> Znode | None:
        """Return the node, or None. ``watch`` fires once: it changes, appears or goes, or the connection is lost."""
        try:
            return node_of(self._read(path, self._client.get_async, watch))
        except NodeMissingError:
            if watch is None or self.exists(path, watch) is None:
                return None
            return self.get(path)  # it appeared between the two reads; the watch is set

    def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """Return the sorted names of the node's children; empty if the node is absent.

        ``watch`` fires once when a child appears or goes, the node itself does, or the connection is lost.
        """
        try:
            names: list[str] = self._read(path, self._client.get_children_async, watch)
        except NodeMissingError:
            if watch is None:
                return []
            once = Once(watch)
            if self.exists(path, once) is None:
                return []
            return self.children(path, once)
        return sorted(names)

    def exists(self, path: str, watch: Watch | None = None) -> Znode | None:
        """Return the node without its value, or None. ``watch`` as in :meth:`get`."""
        stat: ZnodeStat | None = self._read(path, self._client.exists_async, watch)
        return None if stat is None else node_of((b"", stat))

    def get_many(self, paths: Sequence[str]) -> list[Znode | None]:
        """Return several nodes, asked for together; None for an absent one."""
        return self._many(paths, GetData, node_of, lambda: None, self.get)

    def children_many(self, paths: Sequence[str]) -> list[list[str]]:
        """Return the children of several nodes, asked for together; an empty list for an absent one."""
        return self._many(paths, GetChildren, sorted, list, self.children)

    def sync(self) -> None:
        """Make the next reads see every write that was acknowledged to anybody before."""
        self._read("/", self._client.sync_async, None)

    # Writes -----------------------------------------------------------------------------------------------------

    def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, sequential: bool = False, parents: bool = False
    ) -> str:
        """Create a node and return its path (with the number that a sequential one got).

        Raises:
            NodeConflictError: the node is there already.
            NodeMissingError: its parent is not there and ``parents`` is false.
            UnknownWriteError: the connection was lost meanwhile.
        """
        check_size(path, len(value))
        created: str = self._write(
            path,
            lambda: self._client.create_async(
                self._full(path), value, ephemeral=ephemeral, sequence=sequential, makepath=parents
            ),
        )
        return created[len(self._root) :] or "/"

    def ensure(self, path: str, value: bytes = b"") -> bool:
        """Create a persistent node with its parents unless it exists; return True if it was created here.

        True also after a write of unknown outcome if the node is there afterwards.
        """
        while True:
            try:
                self.create(path, value, parents=True)
            except NodeConflictError:
                return False
            except ZooKeeperDeniedError:
                if self.exists(path) is None:
                    raise
                return False  # ZooKeeper checks rights before it checks whether there is anything to do
            except UnknownWriteError:
                if self.exists(path) is not None:
                    return True
            else:
                return True

    def set(self, path: str, value: bytes, version: int = -1) -> int:
        """Replace a node's value if it has this version (any for -1); return the new version.

        Raises:
            NodeMissingError, NodeConflictError: nothing was written.
            UnknownWriteError: the connection was lost meanwhile.
        """
        check_size(path, len(value))
        stat: ZnodeStat = self._write(path, lambda: self._client.set_async(self._full(path), value, version))
        return stat.version

    def delete(self, path: str, version: int = -1) -> bool:
        """Delete a node if it has this version (any for -1); return False if it was absent.

        Raises:
            NodeConflictError: nothing was deleted.
            UnknownWriteError: the connection was lost meanwhile.
        """
        try:
            self._write(path, lambda: self._client.delete_async(self._full(path), version))
        except NodeMissingError:
            return False
        return True

    def acl(self, path: str) -> list[ACL]:
        """Return the ACL of a node; ZooKeeper hides the secrets of others unless we may change it.

        Raises:
            NodeMissingError, ZooKeeperDeniedError.
        """
        found: list[ACL] = self._read(path, self._client.get_acls_async, None)[0]
        return found

    def set_acl(self, path: str, acl: Sequence[ACL]) -> None:
        """Replace the ACL of a node.

        Raises:
            NodeMissingError, ZooKeeperDeniedError: nothing was changed.
            UnknownWriteError: the connection was lost meanwhile.
        """
        self._write(path, lambda: self._client.set_acls_async(self._full(path), acl))

    def delete_soon(self, path: str) -> None:
        """Ask for a node to be deleted, and wait for nothing: it may be absent, or stay."""
        with suppress(KazooException):
            self._client.delete_async(self._full(path))

    def multi(self, operations: Sequence[NodeOperation]) -> list[str]:
        """Carry out all operations, or none; return the paths of the nodes that were created.

        Raises:
            NodeConflictError, NodeMissingError: names the node; nothing was written.
            UnknownWriteError: the connection was lost meanwhile; all or none were carried out.
        """
        if not operations:
            return []
        began_s = time.perf_counter()
        result = self._begin_multi(operations)
        fault = self._finish_multi(operations, result)
        self._answered("multi", began_s)
        if fault is not None:
            raise fault
        return [item[len(self._root) :] for item in result.get() if isinstance(item, str)]

    def multi_pipelined(self, batches: Iterable[Sequence[NodeOperation]]) -> list[RollbridgeError | None]:
        """Carry out many independent multis, sent without waiting in between; return each one's error, or None."""
        outcomes: list[RollbridgeError | None] = []
        waiting: list[tuple[Sequence[NodeOperation], IAsyncResult]] = []
        for operations in batches:
            waiting.append((operations, self._begin_multi(operations)))
            if len(waiting) >= PIPELINE_DEPTH:
                outcomes.extend(self._finish_multi(*item) for item in waiting)
                waiting.clear()
        outcomes.extend(self._finish_multi(*item) for item in waiting)
        return outcomes

    # Inside -----------------------------------------------------------------------------------------------------

    def _full(self, path: str) -> str:
        return self._root + path if path != "/" else self._root or "/"

    def _read(self, path: str, send: Callable[..., IAsyncResult], watch: Watch | None) -> Any:
        """Retry a read until it is answered or the time is up."""
        deadline = Deadline(patience_s(self._operation_timeout_s))
        arguments = (self._full(path),) if watch is None else (self._full(path), Once.event(watch))
        while True:
            left_s = deadline.left()
            began_s = time.perf_counter()
            try:
                answer = send(*arguments).get(timeout=left_s)
            except (KazooException, KazooTimeoutError) as fault:
                if self._closed or left_s <= RETRY_PAUSE_S or not is_transient(fault):
                    raise self._fault(fault, path, writes=False) from fault
            else:
                self._answered("read", began_s)
                return answer
            time.sleep(RETRY_PAUSE_S)

    def _many(
        self,
        paths: Sequence[str],
        kind: type[GetData] | type[GetChildren],
        convert: Callable[[Any], T],
        absent: Callable[[], T],
        one: Callable[[str], T],
    ) -> list[T]:
        """Read many nodes with few requests, several of which are under way at a time."""
        found: list[T] = []
        chunks = [paths[start : start + READ_TOGETHER] for start in range(0, len(paths), READ_TOGETHER)]
        for start in range(0, len(chunks), READS_UNDER_WAY):
            began_s = time.perf_counter()
            asked = [(chunk, self._ask_together(chunk, kind)) for chunk in chunks[start : start + READS_UNDER_WAY]]
            for chunk, result in asked:
                try:
                    answers = result.get(timeout=patience_s(self._operation_timeout_s))
                except (KazooException, KazooTimeoutError):
                    answers = self._read(chunk[0], lambda _, chunk=chunk: self._ask_together(chunk, kind), None)
                for path, answer in zip(chunk, answers, strict=True):
                    if isinstance(answer, NoNodeError):
                        found.append(absent())
                    elif isinstance(answer, KazooException):
                        found.append(one(path))  # which says what it is
                    else:
                        found.append(convert(answer))
            self._answered("read", began_s)
        return found

    def _ask_together(self, paths: Sequence[str], kind: type[GetData] | type[GetChildren]) -> IAsyncResult:
        return read_together(self._client, [kind(self._full(path), None) for path in paths])

    def _write(self, path: str, send: Callable[[], IAsyncResult]) -> Any:
        began_s = time.perf_counter()
        try:
            answer = send().get(timeout=patience_s(self._operation_timeout_s))
        except (KazooException, KazooTimeoutError) as fault:
            raise self._fault(fault, path, writes=True) from fault
        self._answered("write", began_s)
        return answer

    def _answered(self, operation: str, began_s: float) -> None:
        if self._observe is not None:
            self._observe(operation, time.perf_counter() - began_s)

    def _begin_multi(self, operations: Sequence[NodeOperation]) -> IAsyncResult:
        request = self._client.transaction()
        size = sum(add_operation(request, self._full(operation.path), operation) for operation in operations)
        check_size(operations[0].path if operations else "/", size)
        return request.commit_async()

    def _finish_multi(self, operations: Sequence[NodeOperation], result: IAsyncResult) -> RollbridgeError | None:
        try:
            return translate_multi(
                result.get(timeout=patience_s(self._operation_timeout_s)), operations, who=self._security.identity
            )
        except (KazooException, KazooTimeoutError) as fault:
            error = self._fault(fault, operations[0].path, writes=True)
            error.__cause__ = fault
            return error

    def _fault(self, fault: Exception, path: str, *, writes: bool) -> RollbridgeError:
        return translate(fault, path, writes=writes, who=self._security.identity)

    def _state_changed(self, state: str) -> None:
        translated = STATES[state]
        self._interruptions += translated is SessionState.SUSPENDED
        if not self._closed:
            name = self.name or hex(self.session_id or 0)
            logger.info("zookeeper_session.state session=%s state=%s", name, translated.value)
        for listener in self._listeners:
            listener(translated)
