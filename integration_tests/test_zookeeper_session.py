"""The contract of the ZooKeeper session, on a real ZooKeeper."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kazoo.protocol.serialization import CloseInstance

import rollbridge.metadata.session
from bridge.tests.refusals import raises_code
from integration_tests.backends.choice import new_cluster
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import expire, until
from integration_tests.links import Link
from integration_tests.patience import PATIENCE_S
from rollbridge.errors import RollbridgeError, UnknownWriteError, ZooKeeperUnavailableError
from rollbridge.metadata.errors import (
    NodeConflictError,
    NodeMissingError,
    ZooKeeperRefusedError,
)
from rollbridge.metadata.records import (
    ROOT_CHARACTERS_MAX,
    CheckNode,
    CreateNode,
    DeleteNode,
    NodeOperation,
    SetNode,
    bytes_of,
)
from rollbridge.metadata.session import REQUEST_BYTES_MAX, SessionState, ZooKeeperSession
from rollbridge_coordinator.commit.plan import ROLL_BYTES_MAX
from rollbridge_devcluster.state import free_port


@pytest.fixture
def session(cluster: AnyCluster, root: str) -> Iterator[ZooKeeperSession]:
    with ZooKeeperSession(cluster.zookeeper, root=root, session_timeout_s=4.0, name="test") as session:
        yield session


class Relay(Link):
    """A link to a ZooKeeper server; the next connections may be accepted and never answered."""

    silent = 0

    def _connect(self, near: socket.socket) -> None:
        if not self.silent:
            super()._connect(near)
            return
        self.silent -= 1
        with self._lock:
            self._open.add(near)


class Lossy(deque[tuple[Any, Any]]):
    """Requests of a kazoo client, of which the one to close is lost, as with a line that is cut at that moment."""

    def append(self, item: tuple[Any, Any]) -> None:
        if item[0] is not CloseInstance:
            super().append(item)


def test_a_session_that_can_not_be_closed_is_left_to_its_time_out(
    session: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollbridge.metadata.session, "CLOSE_S", 0.2)
    client = session._client
    client._queue = Lossy()
    session.close()
    session.close()
    assert "zookeeper_session.close_abandoned session=test: it ends with its time-out" in caplog.text
    assert session.is_closed
    deque.append(client._queue, (CloseInstance, None))
    client._connection._write_sock.send(b"\0")  # wakes kazoo's thread
    assert client._connection.connection_stopped.wait(PATIENCE_S)


class Watch:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._called = threading.Event()

    def __call__(self) -> None:
        self.calls += 1
        self._called.set()

    def await_call(self) -> None:
        assert self._called.wait(PATIENCE_S), "the watch was not called"


def test_what_is_created_can_be_read_changed_and_deleted(session: ZooKeeperSession) -> None:
    assert session.get("/a/b") is None
    assert session.create("/a/b", b"1", parents=True) == "/a/b"
    node = session.get("/a/b")
    assert node is not None
    assert (node.value, node.version, node.owner_session_id) == (b"1", 0, None)
    assert abs(node.created_ms - time.time() * 1000) < 60_000
    assert session.set("/a/b", b"2", 0) == 1
    assert session.children("/a") == ["b"]
    stat = session.exists("/a/b")
    assert stat is not None
    assert stat.version == 1
    assert session.delete("/a/b", 1)
    assert not session.delete("/a/b")
    assert session.exists("/a/b") is None
    assert session.children("/nowhere") == []


def test_everything_stands_below_chroot_and_root(cluster: AnyCluster, root: str) -> None:
    with ZooKeeperSession(cluster.zookeeper + root + "/chroot", root="/inner") as session:
        session.create("/", b"here", parents=True)
        session.create("/leaf", b"there")
        assert session.root == f"{root}/chroot/inner"
    with ZooKeeperSession(cluster.zookeeper, root=root) as outside:
        node = outside.get("/chroot/inner")
        assert node is not None
        assert node.value == b"here"
        assert outside.children("/chroot/inner") == ["leaf"]


def test_refusals_say_that_nothing_was_written(session: ZooKeeperSession) -> None:
    session.create("/a", b"", parents=True)
    session.create("/a/b")
    with raises_code("node-exists"):
        session.create("/a/b")
    with pytest.raises(NodeMissingError):
        session.create("/x/y")
    with pytest.raises(NodeMissingError):
        session.set("/x", b"")
    with raises_code("node-version-mismatch"):
        session.set("/a", b"", 5)
    with raises_code("node-version-mismatch"):
        session.delete("/a/b", 5)
    with raises_code("node-not-empty"):
        session.delete("/a")


def test_many_reads_at_once_keep_their_order(session: ZooKeeperSession) -> None:
    session.ensure("/many")
    outcomes = session.multi_pipelined(
        [CreateNode(f"/many/{number:04d}", str(number).encode())] for number in range(1200)
    )
    assert outcomes == [None] * 1200
    before = session._client._connection._xid
    nodes = session.get_many([f"/many/{number:04d}" for number in range(1201)])
    assert session._client._connection._xid - before <= 15, "with few requests, also where one is absent"
    assert [node.value if node else None for node in nodes] == [*(str(number).encode() for number in range(1200)), None]
    assert session.children_many(["/many/0000", "/many", "/nowhere"]) == [[], session.children("/many"), []]


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (CheckNode("/a", 7), NodeConflictError),
        (CheckNode("/nowhere"), NodeMissingError),
        (CreateNode("/a", b""), NodeConflictError),
        (CreateNode("/nowhere/x", b""), NodeMissingError),
        (SetNode("/a", b"", 7), NodeConflictError),
        (SetNode("/nowhere", b""), NodeMissingError),
        (DeleteNode("/a", 7), NodeConflictError),
        (DeleteNode("/nowhere"), NodeMissingError),
        (DeleteNode("/parent"), NodeConflictError),
    ],
)
def test_a_multi_is_all_or_nothing_and_names_what_was_refused(
    session: ZooKeeperSession, refused: NodeOperation, error: type[RollbridgeError]
) -> None:
    session.ensure("/a", b"old")
    session.ensure("/parent/child")
    with pytest.raises(error, match=refused.path):
        session.multi([SetNode("/parent", b"x"), CreateNode("/fresh", b""), refused, CreateNode("/late", b"")])
    assert session.children("/") == ["a", "parent"]
    parent = session.get("/parent")
    assert parent is not None
    assert parent.value == b""


@pytest.mark.parametrize("size", [0, 900, 440_000], ids=["thousands", "hundreds", "two"])
def test_as_much_as_leaders_write_at_once_fits_and_more_is_refused_before_it_is_sent(
    cluster: AnyCluster, unique_name: Callable[[str], str], size: int
) -> None:
    """One that did not fit would cost the connection, and nobody would know what became of it."""
    longest = "/" + unique_name("room").ljust(ROOT_CHARACTERS_MAX - 1, "r")
    with ZooKeeperSession(cluster.zookeeper, root=longest, name="test") as session:
        session.ensure("/a")
        nodes = (CreateNode(f"/a/{number:060}", b"x" * size) for number in range(10_000))
        many = [next(nodes)]
        while sum(map(bytes_of, many)) <= ROLL_BYTES_MAX:
            many.append(next(nodes))
        largest, one_more = many[:-1], many[-1]
        before = session.session_id
        session.multi(largest)
        assert len(session.children("/a")) == len(largest)
        assert session.session_id == before
        session.multi([DeleteNode(item.path) for item in largest])
        beyond = CreateNode(one_more.path, b"x" * (REQUEST_BYTES_MAX + 1))
        with pytest.raises(ZooKeeperRefusedError, match="nothing was written"):
            session.multi([*largest, beyond])
        assert session.children("/a") == []


def test_pipelined_multis_are_independent(session: ZooKeeperSession) -> None:
    session.ensure("/a")
    outcomes = session.multi_pipelined(
        [[CreateNode("/b", b"")], [CreateNode("/a", b"")], [CheckNode("/a"), CreateNode("/c", b"")]]
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], NodeConflictError)
    assert outcomes[2] is None
    assert session.children("/") == ["a", "b", "c"]


@pytest.mark.parametrize("present", [True, False])
def test_a_watch_is_called_once(session: ZooKeeperSession, present: bool) -> None:
    session.ensure("/")
    if present:
        session.create("/n")
    watches = {"get": Watch(), "children": Watch(), "exists": Watch()}
    session.get("/n", watches["get"])
    session.children("/n", watches["children"])
    session.exists("/n", watches["exists"])
    session.ensure("/n")
    session.set("/n", b"changed")
    session.create("/n/child")
    for watch in watches.values():
        watch.await_call()
    session.set("/n", b"changed again")
    session.delete("/n/child")
    session.delete("/n")
    session.sync()
    assert {name: watch.calls for name, watch in watches.items()} == {"get": 1, "children": 1, "exists": 1}


@pytest.fixture
def relayed(cluster: AnyCluster, root: str) -> Iterator[tuple[Relay, ZooKeeperSession, list[SessionState]]]:
    """A session by way of a relay, with two nodes of which one is ephemeral; and the states that it goes through."""
    with (
        Relay(cluster.zookeeper) as relay,
        ZooKeeperSession(relay.address, root=root, session_timeout_s=6.0) as session,
    ):
        session.ensure("/n")
        session.create("/me", ephemeral=True)
        states: list[SessionState] = []
        session.on_state(states.append)
        yield relay, session, states


def test_an_expired_session_is_told_lost_and_a_new_one_begins(
    cluster: AnyCluster, relayed: tuple[Relay, ZooKeeperSession, list[SessionState]]
) -> None:
    relay, session, states = relayed
    lost = Watch()
    session.get("/n", lost)
    before = session.session_id
    relay.silent = 100
    expire(cluster, session)
    relay.silent = 0
    relay.reset()
    until(lambda: SessionState.LOST in states and session.is_connected)
    lost.await_call()
    assert session.session_id != before
    assert session.get("/me") is None
    assert session.get("/n") is not None
    assert states[-1] is SessionState.CONNECTED


def test_a_handshake_that_is_never_answered_does_not_take_the_session(
    relayed: tuple[Relay, ZooKeeperSession, list[SessionState]],
) -> None:
    relay, session, states = relayed
    before = session.session_id
    relay.silent = 1
    relay.reset()
    until(lambda: SessionState.SUSPENDED in states and session.is_connected)
    assert (session.session_id, relay.silent) == (before, 0)
    assert states[:2] == [SessionState.SUSPENDED, SessionState.CONNECTED]
    assert SessionState.LOST not in states
    assert session.get("/me") is not None


def test_while_the_server_is_away_reads_wait_and_writes_are_unknown(root: str) -> None:
    with new_cluster() as own, ZooKeeperSession(own.zookeeper, root=root, session_timeout_s=20.0) as session:
        session.ensure("/n", b"kept")
        states: list[SessionState] = []
        session.on_state(states.append)
        watch = Watch()
        session.get("/n", watch)
        faults: list[Exception] = []

        def write() -> None:
            try:
                session.set("/n", b"written meanwhile")
            except UnknownWriteError as fault:
                faults.append(fault)

        own.pause("zookeeper")
        writer = threading.Thread(target=write)
        writer.start()
        until(lambda: bool(session._client._pending))  # sent, and the server will not answer
        own.kill("zookeeper")
        writer.join(PATIENCE_S)
        assert len(faults) == 1
        until(lambda: not session.is_connected)
        watch.await_call()
        assert states[-1] is SessionState.SUSPENDED
        read: list[bytes | None] = []
        reader = threading.Thread(target=lambda: read.append(getattr(session.get("/n"), "value", None)))
        reader.start()
        own.restart("zookeeper")
        reader.join(PATIENCE_S)
        assert read == [b"kept"]
        until(lambda: session.is_connected)
        assert session.ensure("/after")


def test_an_operation_gives_up_after_its_time(root: str) -> None:
    with new_cluster() as own, ZooKeeperSession(own.zookeeper, root=root, operation_timeout_s=3.0) as session:
        session.ensure("/n")
        own.kill("zookeeper")
        until(lambda: not session.is_connected)
        with pytest.raises(ZooKeeperUnavailableError):
            session.get("/n")
        with pytest.raises(UnknownWriteError):
            session.set("/n", b"x")
        outcomes = session.multi_pipelined([[SetNode("/n", b"x")], [SetNode("/n", b"y")]])
        assert [type(outcome) for outcome in outcomes] == [UnknownWriteError] * 2


def test_nobody_there_is_said_clearly_and_leaves_nothing_running() -> None:
    address = f"127.0.0.1:{free_port()}"
    before = threading.active_count()
    session = ZooKeeperSession(address)
    with pytest.raises(ZooKeeperUnavailableError, match=address):
        session.start(timeout_s=0.5)
    assert not session.is_connected
    assert session.session_id is None
    until(lambda: threading.active_count() <= before)
