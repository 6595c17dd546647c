"""Transactional ids and live gateways in ZooKeeper: registered gateways, holders of ids, and entries of ids.

::

    /gateways/live/NAME        ephemeral: host and ports of a gateway
    /gateways/leases/LIFE      ephemeral: written again and again by a gateway, see rollbridge_gateway.producer.ids
    /gateways/ids/B/CLIENT     entry of a transactional id, by its client name; B is a bucket
    /gateways/held/B/CLIENT    ephemeral: the gateway that serves the id now, and its life

An id is served by the one gateway that holds it. Another one that is asked for it writes its own name into the holder's
node, which the holder watches; the holder lets go, answers nothing more for what it has under way, and deletes the
node. So no gateway acknowledges what another one has already left out.

A holder that has died or stalled does not let go. Its lease proves that its life is over: every other gateway watches
it all the time; the one with the proof deletes the lease, and the ids are free. A gateway that continues after that has
lost all of its ids, and begins another life.

That alone would not do for a gateway that stalls in the middle of something, and continues when another one has long
served the id. So the new holder writes the entry again in the same step, and the version of the entry tells holders
apart: an entry is written, and a session of the client name begun, only at the version that the holder knows
(:meth:`Register.guard`).

Threads: one confirms and watches others (:meth:`Register.turn`); any number hold, write and release; ZooKeeper's
threads tell of changes.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from rollbridge.errors import RollbridgeError, UnknownWriteError, ZooKeeperUnavailableError
from rollbridge.metadata import paths
from rollbridge.metadata.errors import NodeConflictError, NodeMissingError
from rollbridge.metadata.gateway_store import registered
from rollbridge.metadata.gateways import GatewayRecord, Holder
from rollbridge.metadata.records import CheckNode, CreateNode, DeleteNode, NodeOperation, SetNode
from rollbridge.metadata.session import SessionState, Znode, ZooKeeperSession
from rollbridge_gateway.producer.expiration import forget
from rollbridge_gateway.producer.table import Entry
from rollbridge_gateway.server.cluster import Gateway
from rollbridge_gateway.server.metrics import HANDOVERS

# When a gateway may continue, and when another one may take its ids: lives, and the proof that one is over. Pure.
#
# A gateway writes into a node of its own again and again (``/gateways/leases/LIFE``), and is *sure* of what it holds
# for a while after it began to write, if that write succeeded. Another gateway that has seen the node unchanged for
# longer than that deletes it, on the condition that it is still unchanged. Then the first one is not sure any more, and
# never will be under that life: its last write that succeeded was begun before it was seen, and another one can not
# succeed.
#
# ::
#
#     holder   write v ........ sure ........|
#     other         sees v ..... still v, for longer than anyone is sure ...| deletes v
#     holder                                      (paused)                          write fails: another life
#
# No clocks are compared; they only have to run at about the same rate (:data:`MARGIN`). Where the
# node is gone the life is over, too, however it went: by such a deletion, with the holder's session, of which the
# time-out is twice as long, or because the holder has ended.
#
# So it is with the nodes of ids, since they belong to the session that writes the lease. They would not do in another
# one: ZooKeeper may have ended that, and removed its nodes, while a server without a leader answers its pings on.


SURE_SHARE: Final = 0.5
"""Share of its session's time-out for which a gateway is sure. ZooKeeper's leader hears of a follower's sessions as
late as after a quarter of the shortest time-out that is possible, so a session outlives this."""
MARGIN: Final = 0.1
"""Share by which others wait longer: the possible difference of clock rates, and more."""
WRITES: Final = 4
"""Writes of a gateway within the time for which it is sure."""


class Life:
    """A gateway's side: until when it is sure."""

    def __init__(self, sure_s: float) -> None:
        self._sure_s = sure_s
        self._until_s = float("-inf")

    def written(self, begun_s: float) -> None:
        """Note that a write has succeeded which was begun at this time, in monotonic seconds."""
        self._until_s = max(self._until_s, begun_s + self._sure_s)

    def is_sure(self, now_s: float) -> bool:
        """Return True if no proof can exist that it is over."""
        return now_s < self._until_s


class Witness:
    """Another gateway's side: for how long it has seen the node of a life unchanged."""

    def __init__(self, sure_s: float) -> None:
        self._wait_s = sure_s * (1 + MARGIN)
        self._version: int | None = None
        self._since_s = 0.0

    def is_over(self, version: int, now_s: float) -> bool:
        """Note the version that was read, after which ``now_s`` was; return whether that proves the life to be over.

        What is done then has to depend on the version, as a deletion on its condition does.
        """
        if version != self._version:
            self._version, self._since_s = version, now_s
        return now_s - self._since_s > self._wait_s


logger = logging.getLogger(__name__)

LIVE: Final = paths.GATEWAYS_LIVE
LEASES: Final = paths.GATEWAY_LEASES
HANDOVER_S: Final = 15.0
"""Longest wait for another gateway to let go of an id."""
_LIFE: Final = re.compile(r"[0-9a-f]{32}")
"""Form of lives' names; a gateway with another name has no life."""
LOOKS: Final = 2
"""Reads of the other leases for each write of the own one."""
_LOOK_S: Final = 0.2
"""Seconds between reads of the lease of a gateway that does not let go."""


class NotHeldError(ZooKeeperUnavailableError):
    """Another gateway serves the id, or may: nothing was written; ask again."""

    is_elsewhere = False
    """True if the client belongs to another gateway: it is to look again where that is."""


class Register:
    """One gateway's side of the register. Safe to use from several threads; methods wait."""

    def __init__(
        self,
        session: ZooKeeperSession,
        lease: ZooKeeperSession,
        name: str,
        session_timeout_s: float,
        lost: Callable[[str], None],
    ):
        """Start with nothing held, and not alive before the first :meth:`turn`.

        Args:
            session: A session for entries and lists, of any length.
            lease: Another one, with a short time-out, for the lease and what ends with it: the nodes of the gateway and
                of the ids that it holds. So the lease never waits behind sweeps and lists.
            name: Name of the gateway.
            session_timeout_s: Time-out of that.
            lost: Called with a client name that another gateway asks for, or that is held no more; from any thread.
                Answer with :meth:`release`.
        """
        self._session = session
        self._lease = lease
        self._name = name
        self._sure_s = session_timeout_s * SURE_SHARE
        self.turn_s = self._sure_s / (WRITES * LOOKS)
        """Seconds after which :meth:`turn` is due."""
        self._lost = lost
        self._me: GatewayRecord | None = None
        self._turning = threading.Lock()  # over what writes the lease
        self._announcing = threading.Lock()  # over the gateway's own node, which a new life and the loop both write
        self._turns = 0
        self._id, self._life = "", Life(self._sure_s)
        self._versions: dict[str, int | None] = {}
        self._lives: dict[str, str] = {}
        """Under which life an id was taken."""
        self._witnesses: dict[str, Witness] = {}
        self._began_s = self._written_s = float("nan")
        self.lives_lost = 0
        self.handovers = dict.fromkeys(HANDOVERS, 0)
        lease.on_state(self._state_changed)

    # Gateways

    def announce(self, gateway: GatewayRecord) -> None:
        """Tell the others that this gateway is there, and where; again after a new session, or in another life."""
        with self._announcing:
            self._me = gateway
            path, value = paths.gateway(gateway.name), replace(gateway, life=self._id).to_json()
            found = self._lease.get(path)
            if found is not None and found.owner_session_id == self._lease.session_id:
                if found.value != value:
                    self._lease.set(path, value)
                return
            if found is not None:
                self._lease.delete(path)  # of an earlier session
            self._lease.create(path, value, ephemeral=True, parents=True)

    def withdraw(self, name: str) -> None:
        """Tell the others that this gateway goes."""
        self._me = None
        self._lease.delete(paths.gateway(name))

    def gateways(self, changed: Callable[[], None] | None = None) -> list[Gateway]:
        """Return the live gateways; ``changed`` is called once, when that may have changed."""
        found = registered(self._session, self._session.children(LIVE, changed))
        return [Gateway(said.name, said.host, said.port, said.ports) for _, said in found]

    # Lives

    def turn(self) -> None:
        """Stay alive, and declare dead lives over; due every :attr:`turn_s` seconds."""
        if self._turns % LOOKS == 0 or not self.is_alive():
            self.confirm()
        self._turns += 1
        self._look_at_others()

    def confirm(self) -> None:
        """Write the lease, which makes this gateway sure for a while; where it is gone, begin another life.

        What was held before is lost then.
        """
        with self._turning:
            begun_s, life = time.monotonic(), self._life
            if self._id:
                try:
                    self._lease.set(f"{LEASES}/{self._id}", self._name.encode())
                except NodeMissingError:
                    self._end_life()
                else:
                    self._written_s = begun_s
                    life.written(begun_s)  # under which it was begun: there may be another one since
                    return
            self._begin_life()

    def is_alive(self) -> bool:
        """Return whether ids can be held: no proof can exist that this life is over."""
        return self._life.is_sure(time.monotonic())

    def is_sure(self, name: str) -> bool:
        """Return whether an id that was held is held: no other gateway can have taken it."""
        life, number = self._life, self._id
        return self._lives.get(name) == number and life.is_sure(time.monotonic())

    @property
    def life_s(self) -> float:
        """Age of its life in seconds; not a number before the first."""
        return time.monotonic() - self._began_s

    @property
    def unwritten_s(self) -> float:
        """Seconds since the lease was last written; not a number before it ever was."""
        return time.monotonic() - self._written_s

    def _begin_life(self) -> None:
        begun_s, number, life = time.monotonic(), uuid.uuid4().hex, Life(self._sure_s)
        self._lease.create(f"{LEASES}/{number}", self._name.encode(), ephemeral=True, parents=True)
        life.written(begun_s)
        self._id, self._life = number, life
        self._began_s = self._written_s = begun_s
        if self._me is not None:
            self.announce(self._me)

    def _end_life(self) -> None:
        """Lose all ids."""
        if self._id and self._me is not None:
            logger.warning(
                "lease.lost gateway=%s: it was taken for dead, or its ZooKeeper session has ended; beginning another "
                "life",
                self._name,
            )
        self.lives_lost += bool(self._id)
        self._id, self._life = "", Life(self._sure_s)
        for name in list(self._versions):
            self._lost(name)

    def _look_at_others(self) -> None:
        lives = [life for life in self._lease.children(LEASES) if life != self._id]
        self._witnesses = {life: self._witnesses.get(life) or Witness(self._sure_s) for life in lives}
        nodes = self._lease.get_many([f"{LEASES}/{life}" for life in lives])
        now_s = time.monotonic()
        for life, node in zip(lives, nodes, strict=True):
            if node is not None and self._witnesses[life].is_over(node.version, now_s):
                self._declare_over(life, node)

    def _declare_over(self, life: str, node: Znode) -> None:
        """Delete the lease of a life, and where its gateway was, if it is as it was seen."""
        try:
            if not self._lease.delete(f"{LEASES}/{life}", node.version):
                return
        except NodeConflictError:
            return
        gateway = node.value.decode(errors="replace")
        logger.warning("lease.expired gateway=%s: it has stalled or died; its ids are free", gateway)
        # The contents of a lease are for people: any client may have written it.
        for found, said in registered(self._lease, self._lease.children(LIVE)):
            if said.life == life:
                with suppress(NodeConflictError):  # it has begun another life
                    self._lease.delete(paths.gateway(said.name), found.version)

    def _state_changed(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._end_life()

    # Ids

    def hold(self, name: str, *, takes_over: bool = True) -> Entry | None:
        """Become the gateway that serves an id; return what is on record of it, None if that is nothing.

        Args:
            name: Client name of the id.
            takes_over: True if another gateway that holds it is asked to let go.

        Raises:
            NotHeldError: another gateway does not let go in time, or is not asked to.
            ZooKeeperUnavailableError, UnknownWriteError: likewise.
        """
        path, deadline_s, is_taken = paths.gateway_holder(name), time.monotonic() + HANDOVER_S, False
        while True:
            if not self.is_alive():
                self.confirm()
            number = self._id
            mine = Holder(self._name, number).encode()
            node, found = self._lease.get_many([paths.gateway_id(name), path])
            if found is None or found.owner_session_id == self._lease.session_id:
                taken = [] if found is None else [DeleteNode(path, found.version)]
                if self._take(name, mine, node, taken):
                    break
                continue
            is_taken = True
            self._make_room(name, found, asks=takes_over)
            if time.monotonic() > deadline_s:
                self.handovers["refused"] += 1
                raise NotHeldError(f"another gateway has not let go of {name} within {HANDOVER_S:g} s; ask again")
        self.handovers["taken"] += is_taken
        self._versions[name], self._lives[name] = None if node is None else node.version + 1, number
        self._watch(name, mine)
        return None if node is None else Entry.decode(node.value)

    def _take(self, name: str, mine: bytes, node: Znode | None, before: Sequence[NodeOperation]) -> bool:
        """Create the holder's node and write the entry again, in one step; return False if something has changed."""
        path = paths.gateway_holder(name)
        entry = [] if node is None else [SetNode(paths.gateway_id(name), node.value, node.version)]
        try:
            self._lease.multi([*before, CreateNode(path, mine, ephemeral=True), *entry])
        except NodeMissingError:
            self._lease.ensure(path.rpartition("/")[0])
        except NodeConflictError:
            pass
        else:
            return True
        return False

    def guard(self, name: str) -> CheckNode:
        """Return what is so only while this gateway holds an id, in the same step with something else.

        Raises:
            NotHeldError: it does not hold it, or nothing is on record of it yet.
        """
        version = self._versions.get(name)
        if version is None:
            raise NotHeldError(f"{name} is not held by this gateway any more; nothing was written")
        return CheckNode(paths.gateway_id(name), version)

    def check(self, name: str) -> None:
        """Make sure that until now no other gateway has held an id since this one does.

        Raises:
            NotHeldError: another one does.
            ZooKeeperUnavailableError, UnknownWriteError: that cannot be said now.
        """
        try:
            self._session.multi([self.guard(name)])
        except (NodeMissingError, NodeConflictError) as fault:
            raise NotHeldError(f"another gateway holds {name} by now; ask again") from fault

    def _make_room(self, name: str, found: Znode, *, asks: bool) -> None:
        """Delete the node of a holder whose life is over; ask one that lives to let go, and wait for that a little.

        Raises:
            NotHeldError: it lives, and is not to be asked.
        """
        path, holder = paths.gateway_holder(name), Holder.decode(found.value)
        try:
            if not _LIFE.fullmatch(holder.life) or self._lease.exists(f"{LEASES}/{holder.life}") is None:
                self._lease.delete(path, found.version)
                return
            if not asks:
                raise NotHeldError(
                    f"another gateway serves {name}, and this client is not one of ours; look again", is_elsewhere=True
                )
            if not holder.wanted_by:
                self._lease.set(path, holder._replace(wanted_by=self._name).encode(), found.version)
        except (NodeMissingError, NodeConflictError):
            return
        gone = threading.Event()
        if self._lease.exists(path, gone.set) is not None:
            gone.wait(_LOOK_S)

    def write(self, name: str, entry: Entry) -> None:
        """Replace the entry of an id that is held.

        Raises:
            NotHeldError: another gateway has written it.
            ZooKeeperUnavailableError, UnknownWriteError.
        """
        path, version = paths.gateway_id(name), self._versions.get(name)
        if not self.is_sure(name):
            raise NotHeldError(f"whether {name} is still held by this gateway is not sure; nothing was written")
        try:
            if version is None:
                self._session.create(path, entry.encode(self._name), parents=True)
                self._versions[name] = 0
            else:
                self._versions[name] = self._session.set(path, entry.encode(self._name), version)
        except (NodeConflictError, NodeMissingError) as fault:
            raise NotHeldError(f"another gateway has written the entry of {name}; nothing was written") from fault

    def release(self, name: str) -> None:
        """Let go of an id."""
        if name not in self._versions:
            return
        del self._versions[name]
        self._lives.pop(name, None)
        path = paths.gateway_holder(name)
        try:
            found = self._lease.get(path)
            if found is not None and found.owner_session_id == self._lease.session_id:
                self._lease.delete(path)
        except (RollbridgeError, UnknownWriteError) as fault:
            logger.info("id.release_failed client=%s: %s", name, fault)

    def forget(self, bucket: str, expiration_ms: int) -> int:
        """Remove the entries of a bucket that were unused for so long; return how many.

        Raises:
            ZooKeeperUnavailableError, UnknownWriteError: see :func:`rollbridge_gateway.producer.expiration.forget`.
        """
        return forget(self._session, bucket, expiration_ms)

    def entries(self, names: list[str]) -> list[Entry | None]:
        """Return what is on record of several ids, held or not."""
        nodes = self._session.get_many([paths.gateway_id(name) for name in names])
        return [None if node is None else Entry.decode(node.value) for node in nodes]

    def _watch(self, name: str, mine: bytes) -> None:
        number = self._lives[name]
        found = self._lease.get(paths.gateway_holder(name), lambda: self._changed(name, number))
        if found is None or found.owner_session_id != self._lease.session_id or found.value != mine:
            raise NotHeldError(f"another gateway wants {name}; ask again")

    def _changed(self, name: str, number: str) -> None:
        if self._lives.get(name) == number:
            self.handovers["given"] += 1
            self._lost(name)
