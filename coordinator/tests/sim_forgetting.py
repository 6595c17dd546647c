"""A simulated group whose clients come, end, are forgotten and come again, while some of them are paused anywhere.

Leaders run the real procedures on the real fold, and die, or are left behind and go on, between any two effects.
Clients do what :mod:`rollbridge.client.sessions` does, one effect at a time, by clocks that are wrong by a month; some
are of the release before, which neither looks at its record nor knows the floor, with clocks of another time zone.

Who is a zombie is decided by the order in which sessions were put on record. Defects of leaders and clients are named
in :data:`DEFECTS`.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bridge.tests.sim_effects import Driven, Turns
from coordinator.tests.makers import Bench
from coordinator.tests.sim_world import Fenced, World
from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.fold import BufferFold, BufferLimits
from rollbridge.buffer.frames import BeginFrame, FrameHeader, FrameKind, Manifest
from rollbridge.buffer.table import State
from rollbridge.commitlog.control import FENCED
from rollbridge.metadata import paths
from rollbridge.metadata.client_sessions import (
    DAY_MS,
    HOUR_MS,
    KEPT_OF_OTHERS_MS,
    RENEW_MS,
    ClientSession,
    floor_of,
    next_session,
)
from rollbridge.metadata.records import CheckNode, CreateNode, DeleteNode, SetNode
from rollbridge.stream.names import GroupName
from rollbridge_coordinator.core.effects import EndOffsets, ReadDated, Write
from rollbridge_coordinator.core.settings import LeaderSettings
from rollbridge_coordinator.core.state import GroupState, SearchStage
from rollbridge_coordinator.history.sessions import forget_sessions, load_sessions

GROUP: Final = GroupName("sales")
STREAM: Final = "sales/orders"
BUFFER: Final = ("sales.orders.transaction-buffer", 0)
NAMES: Final = ("a", "b", "c")
START_MS: Final = 400 * DAY_MS
SKEW_MS: Final = 14 * HOUR_MS
"""By how much the clock of a client of the release before may be wrong: a time zone."""
GRACE_MS: Final = 6 * HOUR_MS
"""So long after it has looked at its record, a client that was paused is still as good as any."""
DEFECTS: Final = {
    "floor-not-raised": "records go, and the floor on record stays where it was",
    "no-floor-in-memory": "the leader that removes records lets their sessions begin",
    "floor-not-loaded": "later leaders do",
    "blind-to-others": "the floor ends sessions on record that the leader has not heard of",
    "no-version": "records go that were written since they were looked at",
    "no-mark": "records go, and the floor keeps its version",
    "no-margin": "records go before their clients look at them again",
    "learns-at-once": "what was begun before a newer session is refused",
    "buffers-not-read": "records go of clients that have begun something which was not read yet",
    "busy-forgotten": "records go of clients that have something open",
    "floor-not-checked": "clients write what they have read long ago",
    "floor-read-last": "clients read the floor after the record",
    "floor-ignored": "clients trust their clocks",
    "never-renews": "clients do not look at their records",
}
"""What may be wrong with leaders and clients; each is found."""


@dataclass
class Wrong(Exception):
    """A promise was broken."""

    what: str


@dataclass(eq=False)
class Session:
    """A session on record: its place in the order of its client's, and what was seen of it."""

    client: str
    epoch: int
    order: int
    frames: int
    """So many frames were sent before it registered."""
    begun: bool = False


@dataclass(eq=False)
class Txn:
    """A transaction, and whether it is certain that its session was the newest and had been looked at."""

    id: TransactionId
    session: Session
    fresh: bool
    offset: int
    asked: bool = False
    ended: str = ""
    reason: str = ""


@dataclass
class Leader:
    """A leader, and what is left of the procedure that it carries out."""

    epoch: int
    group: GroupState
    turns: Turns[Any] | None = None
    folded: int = 0
    ready: bool = False
    is_slow: bool = False


@dataclass
class Process:
    """A process of a client; one of the release before does not look at its record."""

    client: str
    is_old: bool
    skew_ms: int
    session: Session | None = None
    looked_ms: int = 0
    paused_until_ms: int = 0
    doing: Generator[None, None, None] | None = None
    open: list[Txn] = field(default_factory=list)


class Group:
    """The simulated history of a seed."""

    def __init__(self, seed: int, defects: frozenset[str] = frozenset()) -> None:
        assert defects <= DEFECTS.keys()
        self.rng = random.Random(seed)
        self.defects = defects
        self.world = World()
        self.world.clock_ms = START_MS
        for path in (paths.sessions(GROUP), paths.requests(GROUP)):
            self.world.ensure(path)
        self.frames: list[tuple[int, bytes, bytes]] = []
        self.outcomes: dict[bytes, str] = {}
        self.sessions: dict[str, list[Session]] = {name: [] for name in NAMES}
        self.transactions: dict[bytes, Txn] = {}
        self.processes: list[Process] = []
        self.fences: dict[tuple[str, int], bool] = {}
        """Fences that were asked for, and whether they were answered."""
        self.leaders: list[Leader] = []
        self.removed = 0
        self._counter = 0
        self._elect()

    # Leaders --------------------------------------------------------------------------------------------------------

    @property
    def leader(self) -> Leader:
        return self.leaders[-1]

    def _elect(self) -> None:
        epoch = self.world.controller_epoch = self.world.identity = self.world.controller_epoch + 1
        fold = BufferFold(BufferLimits(lease_ms_max=10**15), lambda *_: None, set(self.outcomes))
        leader = Leader(epoch, GroupState(GROUP, epoch, fold, LeaderSettings()), is_slow=self.rng.random() < 0.3)
        leader.group.streams.update(Bench({STREAM: 1}).group.streams)
        self._set_out(leader, load_sessions(leader.group))
        self.leaders = [*self.leaders[-1:], leader]

    def lead(self, leader: Leader) -> None:
        """Do one effect, or one thing between two procedures."""
        if leader.turns is not None:
            try:
                next(leader.turns)
            except StopIteration:
                leader.turns = None
                if not leader.ready:
                    self._loaded(leader)
            return
        chance = self.rng.random()
        if chance < (0.02 if leader.is_slow else 0.3):
            self._fold(leader, self.rng.randint(1, 20))
        elif chance < 0.4:
            self._settle(leader)
        elif chance < 0.45:
            self._answer(leader)
        else:
            self._set_out(leader, forget_sessions(leader.group, self.world.clock_ms))

    def _set_out(self, leader: Leader, procedure: Steps[Any]) -> None:
        leader.turns = Driven(procedure).turns(lambda effect: self._carry_out(effect, leader))

    def _loaded(self, leader: Leader) -> None:
        if "floor-not-loaded" in self.defects:
            leader.group.fold.fences.floor = 0
        self._fold(leader, len(self.frames))
        leader.group.fold.fences.caught_up()
        leader.ready = True

    def _carry_out(self, effect: AnyEffect, leader: Leader) -> Any:
        search = leader.group.sessions
        if isinstance(effect, EndOffsets):
            return {} if "buffers-not-read" in self.defects else {BUFFER: len(self.frames)}
        if isinstance(effect, Write):
            operations = list(effect.operations)
            if isinstance(operations[-1], DeleteNode):
                if "no-version" in self.defects:
                    operations[1:] = [DeleteNode(item.path) for item in operations[1:]]
                if "no-mark" in self.defects:
                    del operations[0]
                if "floor-not-raised" in self.defects:
                    operations[0] = SetNode(operations[0].path, self.world.nodes[operations[0].path])
                self.removed += len(operations) - 1
            elif "floor-not-raised" in self.defects:
                return True
            effect = Write(operations)
        if "blind-to-others" in self.defects and search.stage is SearchStage.LEARN and isinstance(effect, ReadDated):
            return dict.fromkeys(effect.paths)
        if "no-floor-in-memory" in self.defects:
            search.floor = 0
        answer = self.world.execute(effect, leader.epoch)
        if "learns-at-once" in self.defects and isinstance(effect, ReadDated):
            for name, node in zip(effect.paths, answer.values(), strict=True):
                if node is not None:
                    epoch = ClientSession.from_json(node.value).epoch
                    leader.group.fold.fences.raise_to(name.rpartition("/")[2], epoch)
        return answer

    def _fold(self, leader: Leader, count: int) -> None:
        fold = leader.group.fold
        for offset in range(leader.folded, min(leader.folded + count, len(self.frames))):
            appended_ms, key, value = self.frames[offset]
            fold.fold(STREAM, BUFFER, offset, appended_ms, key, value)
        leader.folded = min(leader.folded + count, len(self.frames))

    def _settle(self, leader: Leader) -> None:
        """Log what is decided, which a leader that was deposed cannot."""
        if leader is not self.leader:
            raise Fenced
        for raw, item in list(leader.group.fold.decided.items()):
            committed = item.state is State.COMMITTING
            self.outcomes[raw] = "committed" if committed else "aborted"
            txn = self.transactions[raw]
            txn.ended, txn.reason = self.outcomes[raw], item.reason
            leader.group.fold.settle(raw)
            self._check_end(txn)

    def _answer(self, leader: Leader) -> None:
        if leader is not self.leader:
            raise Fenced
        self._fold(leader, len(self.frames))
        fold = leader.group.fold
        for (client, epoch), answered in self.fences.items():
            if answered:
                continue
            fold.fences.raise_to(client, epoch)
            if not any(item.ended_by[0] == client for item in (*fold.decided.values(), *fold.lines.held())):
                self.fences[client, epoch] = True

    def _check_end(self, txn: Txn) -> None:
        newer = [item for item in self.sessions[txn.session.client] if item.order > txn.session.order]
        if txn.ended == "committed":
            if any(item.begun for item in newer):
                raise Wrong(f"a zombie's commit counts: {txn}, newer {newer}")
        elif txn.reason == FENCED and txn.fresh and all(item.frames > txn.offset for item in newer):
            raise Wrong(f"somebody legitimate is refused: {txn}, newer {newer}")

    # Clients --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process of some client."""
        is_old = self.rng.random() < 0.25
        skew_ms = self.rng.choice([0, 0, self.rng.randint(-1, 1) * (SKEW_MS if is_old else 30 * DAY_MS)])
        process = Process(self.rng.choice(NAMES), is_old, skew_ms)
        process.doing = self._register(process)
        self.processes.append(process)

    def act(self, process: Process) -> None:
        """Do one thing of a process, unless it is paused."""
        if process.paused_until_ms > self.world.clock_ms:
            return
        if process.doing is None:
            if process.session is None:
                self.processes.remove(process)
                return
            asked = [item for item in process.open if not item.asked]
            if asked and self.rng.random() < 0.7:
                self._commit(self.rng.choice(asked))
                return
            process.doing = self._begin(process)
        try:
            next(process.doing)
        except StopIteration:
            process.doing = None

    def _register(self, process: Process) -> Generator[None]:
        parent, path = paths.sessions(GROUP), paths.session(GROUP, process.client)
        while True:
            looked_ms = self.world.clock_ms
            above = self.world.dated(parent)
            assert above is not None
            if "floor-read-last" not in self.defects:
                yield
            node = self.world.dated(path)
            if "floor-read-last" in self.defects:
                yield
                above = self.world.dated(parent)
                assert above is not None
            before = None if node is None else ClientSession.from_json(node.value)
            floor = 0 if process.is_old or "floor-ignored" in self.defects else floor_of(above.value)
            now_ms = self.world.clock_ms + process.skew_ms
            fresh = next_session(before, process.client, "", now_ms, floor)
            if process.is_old:
                fresh = replace(fresh, renews=False)
            yield
            if process.is_old and self.world.clock_ms > looked_ms:
                continue  # it was stopped between two requests, for a whole life of a record: not what is promised
            raw = fresh.to_json()
            put = CreateNode(path, raw) if node is None else SetNode(path, raw, node.version)
            check = [] if process.is_old or "floor-not-checked" in self.defects else [CheckNode(parent, above.version)]
            if not self.world.multi([*check, put]):
                continue
            known = self.sessions[process.client]
            session = Session(process.client, fresh.epoch, len(known), len(self.frames))
            if any(item.epoch >= session.epoch for item in known):
                raise Wrong(f"an epoch is not above those before: {session}, {known}")
            known.append(session)
            process.looked_ms = looked_ms
            if before is not None:
                self.fences[process.client, fresh.epoch] = False
                while not self.fences[process.client, fresh.epoch]:
                    yield
            session.begun = True
            process.session = session
            return

    def _begin(self, process: Process) -> Generator[None]:
        session, began_ms = process.session, self.world.clock_ms
        assert session is not None
        if (
            not process.is_old
            and self.world.clock_ms - process.looked_ms > RENEW_MS
            and "never-renews" not in self.defects
        ):
            path, looked_ms = paths.session(GROUP, process.client), self.world.clock_ms
            above = self.world.dated(paths.sessions(GROUP))
            assert above is not None
            yield
            node = self.world.dated(path)
            yield
            record = None if node is None else ClientSession.from_json(node.value)
            if node is None or record is None:
                process.session = None
                yield from self._register(process)
                return
            if record.epoch > session.epoch:
                process.session = None
                return
            renewed = replace(record, registered_ms=self.world.clock_ms + process.skew_ms)
            check = CheckNode(paths.sessions(GROUP), above.version)
            if not self.world.multi([check, SetNode(path, renewed.to_json(), node.version)]):
                return
            process.looked_ms = looked_ms
            yield
        self._counter += 1
        fresh = self.world.clock_ms - began_ms < GRACE_MS
        if process.is_old:
            fresh = fresh and self.world.clock_ms - process.looked_ms < KEPT_OF_OTHERS_MS - DAY_MS - SKEW_MS
        txn = Txn(TransactionId.of(0, self._counter), session, fresh, len(self.frames))
        self.transactions[txn.id.bytes] = txn
        process.open.append(txn)
        begin = BeginFrame(process.client, session.epoch, None, 10**13, {STREAM: 0})
        self._send(FrameHeader(FrameKind.BEGIN, txn.id.bytes), begin.encode())

    def _commit(self, txn: Txn) -> None:
        txn.asked = True
        self._send(FrameHeader(FrameKind.COMMIT, txn.id.bytes), Manifest({}).encode())

    def _send(self, header: FrameHeader, value: bytes) -> None:
        self.frames.append((self.world.clock_ms, header.pack(), value))

    # The history ----------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Go through a history, then let everything end."""
        for _ in range(steps):
            self._step()
        self._drain()

    def _step(self) -> None:
        rng = self.rng
        chance = rng.random()
        if chance < 0.02:
            self.world.clock_ms += rng.choice(
                [HOUR_MS, 5 * HOUR_MS, 13 * HOUR_MS, 2 * DAY_MS, 12 * DAY_MS, 130 * DAY_MS]
            )
        elif chance < 0.03:
            self._elect()
        elif chance < 0.06:
            if len(self.processes) < 8:
                self.start()
        elif chance < 0.09 and self.processes:
            paused = rng.choice(self.processes)
            paused.paused_until_ms = self.world.clock_ms + rng.choice([HOUR_MS, DAY_MS, 5 * DAY_MS, 40 * DAY_MS])
        elif chance < 0.4 and self.processes:
            self.act(rng.choice(self.processes))
        elif chance < 0.43 and len(self.leaders) > 1:
            self._go_on(self.leaders[0])
        else:
            self.world.clock_ms += rng.randint(1, 60_000)
            self._go_on(self.leader)

    def _go_on(self, leader: Leader) -> None:
        try:
            self.lead(leader)
        except Fenced:
            self.leaders.remove(leader)
            if not self.leaders:
                self._elect()

    def _drain(self) -> None:
        """Let paused processes end their work; then time passes, and nothing is left of those who can be forgotten."""
        for process in self.processes:
            process.paused_until_ms = 0
            for _ in range(400):
                if process not in self.processes:
                    break
                if process.doing is None:
                    for txn in process.open:
                        if not txn.asked:
                            self._commit(txn)
                    break
                self.act(process)
                for _ in range(3):
                    self._go_on(self.leader)
        for _ in range(300):
            self._go_on(self.leader)
        for txn in self.transactions.values():
            newer = any(item.order > txn.session.order for item in self.sessions[txn.session.client])
            if txn.asked and txn.fresh and not newer and txn.ended != "committed":
                raise Wrong(f"nothing came of a commit: {txn}")
        held = {item.begin.client_name for item in self.leader.group.fold.open.values()}
        self.world.clock_ms += KEPT_OF_OTHERS_MS + 60 * DAY_MS
        for _ in range(300):
            self._go_on(self.leader)
        left = set(self.world.children(paths.sessions(GROUP))) - held
        if left:
            raise Wrong(f"records stay: {left}")
