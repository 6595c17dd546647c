"""A simulated ZooKeeper, and holders of one lease that are paused, cut off, killed, and whose clocks run differently.

Holders are threads of which one runs at a time: each request hands over to whoever is due next. A request may be
carried out and its answer lost. ZooKeeper may be set back to what it was, with the sessions of that time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from rollbridge.errors import UnknownWriteError
from rollbridge.lease import Lease, Witness
from rollbridge.metadata.errors import NodeConflictError, NodeMissingError
from rollbridge.metadata.records import CheckNode, CreateNode, DeleteNode, NodeOperation, SetNode
from rollbridge.metadata.session import Znode

SURE_S: Final = 3.0
SESSION_S: Final = 2 * SURE_S
RATES: Final = (0.955, 1.0, 1.045)
"""Rates of clocks: less than a tenth apart."""
LIVES, HELD, TOKEN, WORK = "/lives", "/held/id", "/ids/id", "/work"
END_S: Final = 40.0
PAUSES_S, HALTS_S = (0.001, 0.01, 0.05), (0.3, 0.7, 3.5, 4.0, 4.5, 5.5, 7.0)


class Killed(BaseException):
    """A holder's process has ended."""


class ZooKeeper:
    """Nodes and sessions, and what holders must not do to each other."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.now_s = 0.0
        self.nodes: dict[str, Znode] = {WORK: Znode(0, 0, 0, None, b"")}
        self.sessions: dict[int, float] = {}
        self.taker = ""
        """Who has taken the lease last, in which life of its process."""
        self.back_s = 0.0
        self.setbacks = 0
        self.halts = dice.choice((0.01, 0.04, 0.08))
        """Probability that a holder stands still for long before a write, and before its answer."""
        self.gives_up, self.asks = dice.choice((0.03, 0.15, 0.4)), dice.choice((0.05, 0.3, 1.0))
        self.sets_back = dice.choice((0.0, 0.0005, 0.003))
        self.baton = threading.Semaphore(0)
        self.faults: list[str] = []
        self.counts = dict.fromkeys(("takes", "works", "replaced", "unknown", "refused", "kills"), 0)
        self._kept: list[Any] = []
        self._last_session = 0

    def run(self, holders: Sequence[Holder]) -> None:
        for holder in holders:
            holder.start()
            self.baton.acquire()
        while self.now_s < END_S and not self.faults:
            holder = min(holders, key=lambda item: item.due_s)
            self.now_s = max(self.now_s, holder.due_s)
            self._expire()
            self._be_set_back()
            holder.go.release()
            self.baton.acquire()
            sure = [item.name for item in holders if item.is_sure]
            if len(sure) > 1:
                self.faults.append(f"{sure} are sure of the same lease at {self.now_s:.3f}")
        for holder in holders:
            holder.is_over = True
            holder.go.release()
            holder.join()

    def begin_session(self) -> int:
        self._last_session += 1
        self.sessions[self._last_session] = self.now_s + SESSION_S
        return self._last_session

    def multi(self, who: Holder, operations: Sequence[NodeOperation], since: int) -> None:
        nodes = dict(self.nodes)
        for item in operations:
            known = nodes.get(item.path)
            if isinstance(item, CreateNode):
                if known is not None:
                    raise NodeConflictError("", path=item.path)
                owner = who.session.connection[0] if item.ephemeral else None
                nodes[item.path] = Znode(0, 0, 0, owner, item.value)
                continue
            if known is None:
                raise NodeMissingError("", path=item.path)
            if item.version not in (-1, known.version):
                raise NodeConflictError("", path=item.path)
            if isinstance(item, SetNode):
                nodes[item.path] = Znode(known.version + 1, 0, 0, known.owner_session_id, item.value)
            elif isinstance(item, DeleteNode):
                del nodes[item.path]
        self._judge(who, operations, nodes, since)
        self.nodes = nodes

    def _judge(self, who: Holder, operations: Sequence[NodeOperation], nodes: dict[str, Znode], since: int) -> None:
        me = who.life
        changed = {item.path for item in operations if not isinstance(item, CheckNode)}
        before, after = self.nodes.get(HELD), nodes.get(HELD)
        owner = None if before is None else before.owner_session_id
        if HELD in changed and (after is None or after.owner_session_id != owner):
            self.faults += [
                f"{me} has removed the node of {item.life}, which may act"
                for item in who.others
                if item.session.connection[0] == owner and (item.is_sure or not item.is_timed)
            ]
        if HELD in changed and after is not None and after.owner_session_id in self.sessions and after.version == 0:
            self.taker = me
            self.counts["takes"] += 1
            self.counts["replaced"] += before is not None
        elif changed & {WORK, TOKEN} and since == self.setbacks:
            self.counts["works"] += 1
            if self.taker != me:
                self.faults.append(f"{me} has written {changed} after {self.taker} has taken the lease")

    def _expire(self) -> None:
        for session, until_s in list(self.sessions.items()):
            if until_s < self.now_s:
                self.end_session(session)

    def end_session(self, session: int) -> None:
        self.sessions.pop(session, None)
        self.nodes = {path: node for path, node in self.nodes.items() if node.owner_session_id != session}

    def _be_set_back(self) -> None:
        draw = self.dice.random()
        if draw < 0.02:
            self._kept.append((self.nodes, dict(self.sessions), self.taker))
        elif draw < 0.02 + self.sets_back and self._kept and self.now_s > self.back_s:
            self.nodes, sessions, self.taker = self.dice.choice(self._kept)
            self.back_s = self.now_s + SURE_S * self.dice.uniform(1.1, 2.0)
            self.sessions = dict.fromkeys(sessions, self.back_s + SESSION_S)
            self.setbacks += 1


class SimSession:
    """A holder's session; its connection notices what has become of it when its process runs."""

    def __init__(self, zookeeper: ZooKeeper, holder: Holder) -> None:
        self._zookeeper = zookeeper
        self._holder = holder
        self.interruptions = 0
        self.connection: tuple[int, int] = zookeeper.begin_session(), zookeeper.setbacks
        self._away_until_s = 0.0
        self._watches: list[tuple[str, Znode | None, Callable[[], None]]] = []

    @property
    def session_id(self) -> int | None:
        return None if self._is_away else self.connection[0]

    @property
    def _is_away(self) -> bool:
        return self._away_until_s > 0.0

    def notice(self) -> None:
        """Learn of what was lost, connect again, be heard of, and hear of changes."""
        zookeeper = self._zookeeper
        session, setbacks = self.connection
        if setbacks != zookeeper.setbacks and not self._is_away:
            self.lose(zookeeper.back_s - zookeeper.now_s)
        if self._is_away and zookeeper.now_s >= max(self._away_until_s, zookeeper.back_s):
            self._away_until_s = 0.0
            self.connection = (
                session if session in zookeeper.sessions else zookeeper.begin_session(),
                zookeeper.setbacks,
            )
        if not self._is_away and session not in zookeeper.sessions and session == self.connection[0]:
            self.lose(0.1)
        if not self._is_away:
            zookeeper.sessions[self.connection[0]] = zookeeper.now_s + SESSION_S
        due = [item for item in self._watches if self._is_away or zookeeper.nodes.get(item[0]) != item[1]]
        self._watches = [item for item in self._watches if item not in due]
        for _, _, watch in due:
            watch()

    def lose(self, for_s: float) -> None:
        self.interruptions += 1
        self._away_until_s = self._zookeeper.now_s + max(for_s, 0.0) + 0.001

    def get_many(self, paths: Sequence[str]) -> list[Znode | None]:
        self._connected()
        found: list[Znode | None] = []
        for path in paths:
            found.append(self._zookeeper.nodes.get(path))
            self._holder.step()
        return found

    def get(self, path: str, watch: Callable[[], None] | None = None) -> Znode | None:
        self._connected()
        found = self._zookeeper.nodes.get(path)
        if watch is not None:
            self._watches.append((path, found, watch))
        self._holder.step()
        return found

    def ensure(self, path: str) -> None:
        """Parents are always there."""

    def multi(self, operations: Sequence[NodeOperation]) -> None:
        zookeeper, since = self._zookeeper, self.connection[1]
        self._holder.step(halts=zookeeper.halts)
        if self._is_away or zookeeper.dice.random() < 0.01:
            raise self._unknown()
        try:
            zookeeper.multi(self._holder, operations, since)
        except (NodeConflictError, NodeMissingError):
            zookeeper.counts["refused"] += 1
            raise
        self._holder.step(halts=zookeeper.halts)
        if self.session_id is None or zookeeper.dice.random() < 0.015:
            raise self._unknown()

    def _unknown(self) -> UnknownWriteError:
        self._zookeeper.counts["unknown"] += 1
        if not self._is_away:
            self.lose(self._zookeeper.dice.choice((0.0, 0.1, 0.5, 2.0)))
        return UnknownWriteError("")

    def _connected(self) -> None:
        self._holder.step()
        while self._is_away:
            self._holder.step(0.1)


class Holder(threading.Thread):
    """A process that wants the lease again and again, under a life of its own that it renews."""

    lease_type: type[Lease] = Lease
    witness_type: type[Witness] = Witness
    forgets = True
    """Witnesses begin again after an interruption."""

    def __init__(self, zookeeper: ZooKeeper, name: str, *, is_timed: bool) -> None:
        super().__init__(name=name, daemon=True)
        self.zookeeper = zookeeper
        self.dice = zookeeper.dice
        self.is_timed = is_timed
        self.rate = self.dice.choice(RATES)
        self.go = threading.Semaphore(0)
        self.due_s = 0.0
        self.is_over = False
        self.others: list[Holder] = []
        self.number = 0
        self._forget()

    def _forget(self) -> None:
        self.number += 1
        self.ahead_s = self.dice.uniform(-1_000.0, 1_000.0)
        self.session = SimSession(self.zookeeper, self)
        self.own: Lease | None = None
        self.lease: Lease | None = None
        self.under: Lease | None = None
        self.interruptions = 0
        self.witnesses: dict[str, Witness] = {}

    @property
    def life(self) -> str:
        return f"{self.name}.{self.number}"

    @property
    def is_sure(self) -> bool:
        """True if it would acknowledge something now without a write, for which its token has to be on record."""
        return self.is_timed and self.may_act and self.lease is not None and bool(self.lease.guard())

    @property
    def may_act(self) -> bool:
        lease, under = self.lease, self.under
        return lease is not None and under is not None and lease.is_held and (under.is_sure or not self.is_timed)

    def clock(self) -> float:
        return self.zookeeper.now_s * self.rate + self.ahead_s

    def run(self) -> None:
        while not self.is_over:
            try:
                self.step(0.0)
                self._live()
            except Killed:
                self.zookeeper.counts["kills"] += not self.is_over
                if self.dice.random() < 0.3:  # its connection was closed in order
                    self.zookeeper.end_session(self.session.connection[0])
                self._forget()
            except Exception as fault:
                self.zookeeper.faults.append(repr(fault))
                self.is_over = True
        self.zookeeper.baton.release()

    def step(self, pause_s: float | None = None, *, halts: float = 0.003) -> None:
        """Let others run; with a probability of ``halts`` the process stands still for long."""
        dice = self.dice
        drawn_s = (
            dice.choice((0.3, 0.7, 3.5, 4.0, 4.5, 5.5, 7.0))
            if dice.random() < halts
            else dice.choice((0.001, 0.01, 0.05))
        )
        self.due_s = self.zookeeper.now_s + (drawn_s if pause_s is None else pause_s)
        self.zookeeper.baton.release()
        self.go.acquire()
        if self.is_over or (pause_s is None and dice.random() < 0.003):
            raise Killed
        self.session.notice()

    def _live(self) -> None:
        while True:
            with suppress(UnknownWriteError):
                self._turn()
            self.step(self.dice.choice((0.1, 0.3)))

    def _turn(self) -> None:
        if self.own is None or not (self.own.is_kept and self.own.renew(b"")):
            self.number += 1
            self.lease = self.under = None
            own = self._make(f"{LIVES}/{self.life}", sure_s=SURE_S)
            own.take(b"")
            self.own = own
        if self.forgets and self.interruptions != self.session.interruptions:
            self.interruptions, self.witnesses = self.session.interruptions, {}
        for path in [path for path in self.zookeeper.nodes if path.startswith(LIVES) and path != self.own.path]:
            (node,) = self.session.get_many([path])
            witness = self.witnesses.setdefault(path, self.witness_type(SURE_S))
            if node is not None and witness.is_over(node.version, self.clock()):
                self.remove(path, node)
        if self.lease is None:
            self._take(self.own)
            return
        lease, draw = self.lease, self.dice.random()
        if not self.is_timed:
            lease.look()
        if not self.may_act or draw < self.zookeeper.gives_up:
            lease.give_up()
            self.lease = self.under = None
        elif not lease.guard() or self.dice.random() < 0.2:
            lease.write(b"written")
        else:
            try:
                self.session.multi([*lease.guard(), SetNode(WORK, b"")])
            except NodeConflictError:
                self.lease = self.under = None

    def _take(self, own: Lease) -> None:
        lease, over, mine = self._make(HELD, TOKEN), None, own.path.encode()
        rises = not self.is_timed
        for _ in range(3):
            found = lease.take(mine, (lambda _: b"raised") if rises else lambda token: token, over)
            if found is None:
                self.lease, self.under = lease, own
                return
            life = found.value.decode().removesuffix(" wanted")
            (there,) = self.session.get_many([life])
            is_own = found.owner_session_id == self.session.connection[0]
            over = found if is_own or (self.is_timed and there is None) else None
            if over is None and self.dice.random() < self.zookeeper.asks:
                lease.ask(found, f"{life} wanted".encode())

    def remove(self, path: str, node: Znode) -> None:
        """Remove the lease of a life that is over."""
        try:
            self.session.multi([DeleteNode(path, node.version)])
        except (NodeMissingError, NodeConflictError):
            return

    def _make(self, path: str, token: str = "", sure_s: float = 0.0) -> Lease:
        return self.lease_type(self.session, path, token, sure_s=sure_s, clock=self.clock)  # type: ignore[arg-type]


def simulate(seed: int, kind: type[Holder] = Holder) -> ZooKeeper:
    """Run three holders; leaders in one half of the seeds, which act by their token only, otherwise gateways."""
    dice = random.Random(seed)
    zookeeper = ZooKeeper(dice)
    if seed % 2 == 0:
        zookeeper.nodes[TOKEN] = Znode(0, 0, 0, None, b"of an id that was used before")
    holders = [kind(zookeeper, name, is_timed=seed % 2 == 0) for name in "abc"]
    for holder in holders:
        holder.others = [item for item in holders if item is not holder]
    zookeeper.run(holders)
    return zookeeper
