"""Transactional ids and live gateways in ZooKeeper: who is there, who holds an id, and what is on record of it.

::

    /gateways/live/NAME        ephemeral: host and ports of a gateway
    /gateways/ids/B/CLIENT     entry of a transactional id, by its client name; B is a bucket
    /gateways/held/B/CLIENT    ephemeral: name of the gateway that serves the id now

An id is served by the one gateway that holds it. Another one that is asked for it writes its own name into the holder's
node, which the holder watches; the holder lets go, answers nothing more for what it has under way, and deletes the
node. So nothing is acknowledged by one gateway that another one has already left out. A holder that dies loses its node
with its session.

A gateway cannot know at once that its session has expired, while it stood still for example. So it knows until when it
is sure: for a part of the session's time-out from when it asked ZooKeeper for something that was answered. Beyond that,
it acknowledges nothing and serves nothing of what it held.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections.abc import Callable
from typing import Final

from rollbridge.errors import RollbridgeError, UnknownWriteError, ZooKeeperUnavailableError
from rollbridge.model import paths
from rollbridge.zookeeper.errors import NodeExistsError, NodeMissingError, NodeVersionMismatchError
from rollbridge.zookeeper.session import SessionState, ZooKeeperSession
from rollbridge_gateway.cluster import Gateway
from rollbridge_gateway.entries import BUCKETS, Entry

logger = logging.getLogger(__name__)

LIVE: Final = paths.GATEWAYS_LIVE
SURE_SHARE: Final = 0.6
"""Part of the session's time-out for which a gateway is sure of its session after an answer."""
_WANTED: Final = b"wanted by "
HANDOVER_S: Final = 15.0
"""Longest wait for another gateway to let go of an id."""


class NotHeldError(ZooKeeperUnavailableError):
    """Another gateway serves the id, or may: nothing was written; ask again."""


def bucket(name: str) -> str:
    """Return the bucket of a client name."""
    return f"{zlib.crc32(name.encode()) % BUCKETS:02x}"


def entry_path(name: str) -> str:
    """Return the node of an id's entry."""
    return f"{paths.GATEWAY_IDS}/{bucket(name)}/{name}"


def holder_path(name: str) -> str:
    """Return the node of an id's holder."""
    return f"{paths.GATEWAY_HOLDERS}/{bucket(name)}/{name}"


class Register:
    """One gateway's side of the register. Safe to use from several threads; methods wait."""

    def __init__(self, session: ZooKeeperSession, name: str, session_timeout_s: float, lost: Callable[[str], None]):
        """Start with nothing held.

        Args:
            session: A session of the gateway's own, with a short time-out.
            name: Name of the gateway.
            session_timeout_s: Time-out of the session.
            lost: Called with a client name that another gateway asks for, or that may be held by another one; from a
                thread of ZooKeeper's. Answer with :meth:`release`.
        """
        self._session = session
        self._name = name
        self._sure_s = session_timeout_s * SURE_SHARE
        self._confirmed_s = float("-inf")
        self._lost = lost
        self._versions: dict[str, int | None] = {}
        session.on_state(self._state_changed)

    # Gateways

    def announce(self, gateway: Gateway) -> None:
        """Tell the others that this gateway is there, and where; again after a new session."""
        path = f"{LIVE}/{gateway.name}"
        document = {"host": gateway.host, "port": gateway.port, "ports": gateway.ports}
        value = json.dumps(document).encode()
        found = self._session.get(path)
        if found is not None and found.owner_session_id == self._session.session_id:
            if found.value != value:
                self._session.set(path, value)
            return
        if found is not None:
            self._session.delete(path)  # of an earlier life
        self._session.create(path, value, ephemeral=True, parents=True)

    def withdraw(self, name: str) -> None:
        """Tell the others that this gateway goes."""
        self._session.delete(f"{LIVE}/{name}")

    def gateways(self, changed: Callable[[], None] | None = None) -> list[Gateway]:
        """Return the live gateways; ``changed`` is called once, when that may have changed."""
        names = self._session.children(LIVE, changed)
        found = []
        for name, node in zip(names, self._session.get_many([f"{LIVE}/{name}" for name in names]), strict=True):
            if node is None:
                continue
            try:
                said = json.loads(node.value)
                ports = tuple((int(broker), int(port)) for broker, port in said["ports"])
                found.append(Gateway(name, str(said["host"]), int(said["port"]), ports))
            except (ValueError, KeyError, TypeError) as fault:
                logger.warning("the node of gateway %s cannot be read: %r", name, fault)
        return found

    # Certainty

    def confirm(self) -> None:
        """Ask ZooKeeper whether the session lives; its answer makes this gateway sure for a while."""
        asked_s, session = time.monotonic(), self._session.session_id
        self._session.exists(LIVE)
        if session is not None and session == self._session.session_id and self._session.is_connected:
            self._confirmed_s = asked_s

    def is_sure(self) -> bool:
        """Return whether what was held is held: no other gateway can have taken it."""
        return time.monotonic() < self._confirmed_s + self._sure_s

    def _state_changed(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._confirmed_s = float("-inf")
            for name in list(self._versions):
                self._lost(name)

    # Ids

    def hold(self, name: str) -> Entry | None:
        """Become the gateway that serves an id; return what is on record of it, None if that is nothing.

        Raises:
            NotHeldError: another gateway does not let go in time.
            ZooKeeperUnavailableError, UnknownWriteError: likewise.
        """
        path, deadline_s = holder_path(name), time.monotonic() + HANDOVER_S
        while True:
            gone = threading.Event()
            try:
                self._session.create(path, self._name.encode(), ephemeral=True, parents=True)
                break
            except NodeExistsError:
                found = self._session.get(path)
                if found is None:
                    continue
                if found.owner_session_id == self._session.session_id:
                    self._session.set(path, self._name.encode())
                    break
                if not found.value.startswith(_WANTED):
                    try:
                        self._session.set(path, _WANTED + self._name.encode())
                    except NodeMissingError:
                        continue
                if self._session.exists(path, gone.set) is None:
                    continue
            if not gone.wait(deadline_s - time.monotonic()):
                raise NotHeldError(f"another gateway has not let go of {name} within {HANDOVER_S:g} s; ask again")
        self.confirm()
        self._versions[name] = None
        self._watch(name)
        node = self._session.get(entry_path(name))
        if node is None:
            return None
        self._versions[name] = node.version
        return Entry.decode(node.value)

    def write(self, name: str, entry: Entry) -> None:
        """Replace the entry of an id that is held.

        Raises:
            NotHeldError: another gateway has written it.
            ZooKeeperUnavailableError, UnknownWriteError.
        """
        path, version = entry_path(name), self._versions.get(name)
        if not self.is_sure():
            raise NotHeldError(f"whether {name} is still held by this gateway is not sure; nothing was written")
        try:
            if version is None:
                self._session.create(path, entry.encode(), parents=True)
                self._versions[name] = 0
            else:
                self._versions[name] = self._session.set(path, entry.encode(), version)
        except (NodeExistsError, NodeMissingError, NodeVersionMismatchError) as fault:
            raise NotHeldError(f"another gateway has written the entry of {name}; nothing was written") from fault

    def release(self, name: str) -> None:
        """Let go of an id."""
        if name not in self._versions:
            return
        del self._versions[name]
        path = holder_path(name)
        try:
            found = self._session.get(path)
            if found is not None and found.owner_session_id == self._session.session_id:
                self._session.delete(path)
        except (RollbridgeError, UnknownWriteError) as fault:
            logger.info("the holder's node of %s could not be deleted: %s", name, fault)

    def held(self) -> int:
        """Return how many ids are held."""
        return len(self._versions)

    def entries(self, names: list[str]) -> list[Entry | None]:
        """Return what is on record of several ids, held or not."""
        nodes = self._session.get_many([entry_path(name) for name in names])
        return [None if node is None else Entry.decode(node.value) for node in nodes]

    def _watch(self, name: str) -> None:
        found = self._session.get(holder_path(name), lambda: self._changed(name))
        if found is None or found.owner_session_id != self._session.session_id or found.value != self._name.encode():
            raise NotHeldError(f"another gateway wants {name}; ask again")

    def _changed(self, name: str) -> None:
        if name in self._versions:
            self._lost(name)
