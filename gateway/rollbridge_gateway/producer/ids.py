"""Transactional ids and live gateways in ZooKeeper: see :mod:`rollbridge.metadata.paths`.

An id is served by the one gateway that holds it. Another one that is asked for it writes its own name into the holder's
node, which the holder watches; the holder lets go, answers nothing more for what it has under way, and deletes the
node. So no gateway acknowledges what another one has already left out.

A holder that has died or stalled does not let go. Every other gateway witnesses its lease all the time; one with the
proof that it is over deletes it, and the ids are free. A gateway that continues after that has lost all of its ids, and
begins another life. Its ids belong to the session that writes its lease. They would not do in another one: ZooKeeper
may have ended that, and removed its nodes, while a server without a leader answers its pings on.

Each id is a lease, too, whose token is its entry: that is written, and a session of the client name begun, only at the
version that the holder knows (:meth:`Register.guard`).

Threads: one confirms and watches others (:meth:`Register.turn`); any number hold, write and release; ZooKeeper's
threads tell of changes.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from rollbridge.errors import ZooKeeperUnavailableError
from rollbridge.lease import Lease, Witness
from rollbridge.metadata import paths
from rollbridge.metadata.errors import NodeConflictError, NodeMissingError
from rollbridge.metadata.gateway_store import registered
from rollbridge.metadata.gateways import GatewayRecord, Holder
from rollbridge.metadata.records import CheckNode
from rollbridge.metadata.session import SessionState, Znode, ZooKeeperSession
from rollbridge_gateway.producer.expiration import forget
from rollbridge_gateway.producer.table import Entry
from rollbridge_gateway.server.cluster import Gateway
from rollbridge_gateway.server.metrics import HANDOVERS

SURE_SHARE: Final = 0.5
"""Share of its session's time-out for which a gateway is sure. ZooKeeper's leader hears of a follower's sessions as
late as after a quarter of the shortest time-out that is possible, so a session outlives this."""
WRITES: Final = 4
"""Writes of a gateway within the time for which it is sure."""


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


NOT_HELD: Final = "not-held"
"""Code of an error: another gateway serves the id, or may; nothing was written; ask again."""
IS_ELSEWHERE: Final = "is-elsewhere"
"""Likewise, and the client belongs to another gateway: it is to look again where that is."""


def _not_held(why: str) -> ZooKeeperUnavailableError:
    return ZooKeeperUnavailableError(why, code=NOT_HELD)


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
        self._id, self._own = "", Lease(lease, LEASES)
        self._place = Lease(lease, paths.gateway(name))
        self.namesake = ""
        """Address of another live gateway that is registered under this one's name, if there is one."""
        self._held: dict[str, tuple[Lease, Lease]] = {}
        """Leases of ids, each with the gateway's own under which it was taken."""
        self._interruptions, self._witnesses = 0, dict[str, Witness]()
        self._began_s = float("nan")
        self.lives_lost = 0
        self.handovers = dict.fromkeys(HANDOVERS, 0)
        lease.on_state(self._state_changed)

    # Gateways

    def announce(self, gateway: GatewayRecord) -> None:
        """Tell the others that this gateway is there, and where; again after a new session, or in another life.

        Nothing is told while a live gateway at another address has its name: that is the :attr:`namesake`.
        """
        with self._announcing:
            self._me = gateway
            place, value, over = self._place, replace(gateway, life=self._id).to_json(), None
            found = place.look()
            if place.is_held and found is not None and (found.value == value or place.renew(value)):
                return
            while (found := place.take(value, over=over)) is not None:
                if namesake := self._namesake(found, gateway):
                    if namesake != self.namesake:
                        logger.error(
                            "gateway.name-taken gateway=%s by=%s: no client is sent here before that one ends; give "
                            "each gateway a name of its own",
                            self._name,
                            namesake,
                        )
                    self.namesake = namesake
                    return
                over = found
            self.namesake = ""

    def _namesake(self, found: Znode, me: GatewayRecord) -> str:
        """Return the address of the live gateway whose node it is, unless that is this one, or was in an earlier life.

        An address is one process's, so a gateway that starts again need not wait for the end of its former lease.
        """
        try:
            said = GatewayRecord.from_json(self._name, found.value)
        except ValueError:
            return ""
        is_former = said.address == me.address or self._place.is_own(found)
        return "" if is_former or not self._lives(said.life) else said.address

    def withdraw(self) -> None:
        """Tell the others that this gateway goes."""
        self._me = None
        self._place.give_up()

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
            if self._id and self._own.renew(self._name.encode()):
                return
            self._end_life()
            self._begin_life()

    def is_alive(self) -> bool:
        """Return whether ids can be held: no proof can exist that this life is over."""
        return self._own.is_sure

    def is_sure(self, name: str) -> bool:
        """Return whether an id that was held is held: no other gateway can have taken it."""
        held = self._held.get(name)
        return held is not None and held[0].is_held and held[1].is_sure

    @property
    def life_s(self) -> float:
        """Age of its life in seconds; not a number before the first."""
        return time.monotonic() - self._began_s

    @property
    def unwritten_s(self) -> float:
        """Seconds since the lease was last written; not a number before it ever was."""
        return time.monotonic() - self._own.renewed_s

    def _begin_life(self) -> None:
        self._began_s, number = time.monotonic(), uuid.uuid4().hex
        own = Lease(self._lease, f"{LEASES}/{number}", sure_s=self._sure_s)
        own.take(self._name.encode())
        self._id, self._own = number, own
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
        self._id = ""
        for name in list(self._held):
            self._lost(name)

    def _look_at_others(self) -> None:
        if self._interruptions != self._lease.interruptions:  # versions that were seen before may come again
            self._interruptions, self._witnesses = self._lease.interruptions, {}
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
            ZooKeeperUnavailableError: ``NOT_HELD``: another gateway does not let go in time.
            ZooKeeperUnavailableError: ``IS_ELSEWHERE``: it is not asked to.
            ZooKeeperUnavailableError, UnknownWriteError: likewise.
        """
        lease = Lease(
            self._lease, paths.gateway_holder(name), paths.gateway_id(name), changed=lambda: self._changed(name, lease)
        )
        over, is_taken, deadline_s = None, False, time.monotonic() + HANDOVER_S
        while True:
            if not self.is_alive():
                self.confirm()
            own = self._own
            mine = Holder(self._name, own.name).encode()
            if (found := lease.take(mine, over=over)) is None:
                break
            is_own = found.owner_session_id == self._lease.session_id
            is_taken = is_taken or not is_own
            over = found if is_own or self._is_over(found) else None
            if over is None:
                self._ask(lease, found, asks=takes_over)
            if time.monotonic() > deadline_s:
                self.handovers["refused"] += 1
                raise _not_held(f"another gateway has not let go of {name} within {HANDOVER_S:g} s; ask again")
        self.handovers["taken"] += is_taken
        self._held[name] = lease, own
        entry, found = lease.tenure.token, lease.look()
        if not lease.is_held or found is None or found.value != mine:
            raise _not_held(f"another gateway wants {name}; ask again")
        return None if entry is None else Entry.decode(entry.value)

    def guard(self, name: str) -> CheckNode:
        """Return what is so only while this gateway holds an id, in the same step with something else.

        Raises:
            ZooKeeperUnavailableError: ``NOT_HELD``: it does not hold it, or nothing is on record of it yet.
        """
        held = self._held.get(name)
        checks = [] if held is None else held[0].guard()
        if not checks:
            raise _not_held(f"{name} is not held by this gateway any more; nothing was written")
        return checks[0]

    def check(self, name: str) -> None:
        """Make sure that until now no other gateway has held an id since this one does.

        Raises:
            ZooKeeperUnavailableError: ``NOT_HELD``: another one does.
            ZooKeeperUnavailableError, UnknownWriteError: that cannot be said now.
        """
        try:
            self._session.multi([self.guard(name)])
        except (NodeMissingError, NodeConflictError) as fault:
            raise _not_held(f"another gateway holds {name} by now; ask again") from fault

    def _is_over(self, found: Znode) -> bool:
        return not self._lives(Holder.decode(found.value).life)

    def _lives(self, life: str) -> bool:
        return _LIFE.fullmatch(life) is not None and self._lease.exists(f"{LEASES}/{life}") is not None

    def _ask(self, lease: Lease, found: Znode, *, asks: bool) -> None:
        holder, gone = Holder.decode(found.value), threading.Event()
        if not asks:
            why = f"{holder.gateway} serves {lease.name}, and this client is not one of ours; look again"
            raise ZooKeeperUnavailableError(why, code=IS_ELSEWHERE)
        if not holder.wanted_by:
            lease.ask(found, holder._replace(wanted_by=self._name).encode())
        if self._lease.exists(lease.path, gone.set) is not None:
            gone.wait(_LOOK_S)

    def write(self, name: str, entry: Entry) -> None:
        """Replace the entry of an id that is held.

        Raises:
            ZooKeeperUnavailableError: ``NOT_HELD``: another gateway has written it.
            ZooKeeperUnavailableError, UnknownWriteError.
        """
        held = self._held.get(name)
        if held is None or not self.is_sure(name):
            raise _not_held(f"whether {name} is still held by this gateway is not sure; nothing was written")
        if not held[0].write(entry.encode(self._name)):
            raise _not_held(f"another gateway has written the entry of {name}; nothing was written")

    def release(self, name: str) -> None:
        """Let go of an id."""
        held = self._held.pop(name, None)
        if held is not None:
            held[0].give_up()

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

    def _changed(self, name: str, lease: Lease) -> None:
        if self._held.get(name, (None,))[0] is lease:
            self.handovers["given"] += 1
            self._lost(name)
