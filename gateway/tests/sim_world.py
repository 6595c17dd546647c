"""A model of what procedures act on: transactions, labels, savepoints, an entry; gateways that die at any effect.

Nothing here knows the procedures' order. Effects are volatile until a savepoint's ticket was waited for, and then
durable; of what is neither when a gateway dies, a random part is there.

A gateway may also stand still at any effect, and in the middle of some, and go on later with what it knew then. Its
session in ZooKeeper is over meanwhile, so that another one holds the id: what that has changed since decides what still
comes into effect, the version of the entry and the session of the client name. What brokers take they acknowledge,
whether it counts or not.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bridge.tests.sim_effects import Driven, Turns
from rollbridge.base.effects import AnyEffect, Steps
from rollbridge.buffer.savepoints import notes_bytes, notes_fault
from rollbridge.errors import InvalidRequestError
from rollbridge_gateway.producer.expiration import (
    BucketMark,
    Dated,
    FindHeld,
    FindOld,
    FindSessions,
    MarkBucket,
    ReadEntries,
    RemoveEntries,
    sweep,
)
from rollbridge_gateway.producer.procedures import (
    AbortLeft,
    AddOffsets,
    BeginTransaction,
    Carry,
    FenceOthers,
    FindLabel,
    Finish,
    GroupCommit,
    IdState,
    LostTransactionError,
    NothingWrittenError,
    OffsetToCommit,
    RefusedError,
    Resume,
    Save,
    WriteEntry,
    settle,
)
from rollbridge_gateway.producer.table import Entry, KnownEnd, Step

T = TypeVar("T")
STREAMS = ("sales/orders", "stock/moves")
"""Each of a transaction group of its own."""


class Batch(list[Any]):
    """Records for a stream."""

    def __init__(self, records: list[Any], stream: str) -> None:
        super().__init__(records)
        self.stream = stream


"""Of two transaction groups."""
NAME = "id"
DAY_MS = 86_400_000
EXPIRATION_MS = 7 * DAY_MS
REMEMBERED_MS = 3 * DAY_MS
SESSION_MS = DAY_MS
LATEST_WRITE_MS = DAY_MS
"""So long after its last write an entry may be in use without another one."""


class Crash(Exception):
    """The gateway has died; its client gets no answer."""


class StandsStill(Exception):
    """The gateway stands still, and its client waits in vain."""


class AskAgain(Exception):
    """Another gateway holds the id, or may: the client is told to ask again."""


@dataclass
class Txn:
    """A transaction: what counts is what is behind its last savepoint, and at a commit all that its owner has
    written."""

    label: str
    stream: str
    state: KnownEnd = KnownEnd.OPEN
    reason: str = ""
    is_durable: bool = False
    session: int = 0
    """Of the client name, in which its owner has begun it or taken it over."""
    owner: int = 0
    saved: list[Any] = field(default_factory=list)
    notes: dict[str, bytes] = field(default_factory=dict)
    strays: list[Any] = field(default_factory=list)
    """Written by whomever, and behind no savepoint."""
    saved_offsets: dict[str, GroupCommit] | None = None
    """Of its last savepoint; None if there is none."""
    ended_ms: int = 0


@dataclass
class Ticket:
    """A savepoint on its way."""

    txn: Txn | None
    records: list[Any]
    notes: Mapping[str, bytes]
    offsets: dict[str, GroupCommit] = field(default_factory=dict)


@dataclass
class Hold:
    """What a gateway knows from when it became the holder until it is not any more.

    Attributes:
        version: Of the entry, which each holder raises; None if there was none.
        session: Of the client name; 0 if it has begun none.
        tail, offsets: What it has written to the transaction behind the last savepoint, and what that commits.
    """

    held: IdState
    version: int | None
    session: int = 0
    txn: Txn | None = None
    owner: int = 0
    tail: list[Any] = field(default_factory=list)
    offsets: dict[str, GroupCommit] = field(default_factory=dict)


class World:
    """One transactional id in a cluster with several gateways.

    Attributes:
        txns: All transactions, by id, in the order of their begins.
        committed: What readers see.
        offsets: What the consumer groups have committed.
        expired: Whether a lease has run out of late.
        steps: How often each effect was carried out, and crashed.
        version, written_ms, bucket: Version of the entry's node, None if there is none, its date, and the version of
            its bucket.
        session: Newest one of the client name; nothing of older ones counts.
        guarded: Whether only the holder can begin a session. Without, whoever has once been one can.
        takes_up: Whether who becomes the holder writes the entry anew.
        fresh_ms: Age of the entry from which on the use of its id shows in it.
        now_ms: The time.
        zookeeper_skew_ms: By how much ZooKeeper's clock is wrong.
        clock_ms: What the clock of the gateway shows that carries out a procedure.
        wrote_ms: When the id was last used, as its entry says, by the right time.
        session_ms: When the client last looked at its session's record; None if there is none.
        used_ms: When a producer last got an answer.
        is_swept: Whether gateways sweep.
        has_jumps: Whether the clock of a gateway jumps.
    """

    def __init__(self, dice: random.Random, crash: float, stall: float = 0.0) -> None:
        self.dice = dice
        self.crash = crash
        self.stall = stall
        self.version: int | None = None
        self.session = 0
        self.guarded = self.takes_up = True
        self.entry: Entry | None = None
        self.txns: dict[str, Txn] = {}
        self.committed: list[Any] = []
        self.offsets: dict[tuple[str, tuple[str, int]], OffsetToCommit] = {}
        self.holder: Gateway | None = None
        self.owners = 0
        self.expired = False
        self.steps: Counter[str] = Counter()
        self.fresh_ms = DAY_MS
        self.now_ms = 1_000 * DAY_MS
        self.zookeeper_skew_ms = 0
        self.clock_ms = 0
        self.bucket = 0
        self.written_ms = self.wrote_ms = 0
        self.session_ms: int | None = None
        self.used_ms = self.now_ms
        self.is_swept = False
        self.has_jumps = False
        self.sweepers: list[Turns[int]] = []

    def expire(self) -> None:
        """End an open transaction by its lease, as a leader does on its own."""
        for txn in self.txns.values():
            if txn.state is KnownEnd.OPEN and txn.is_durable:
                txn.state, txn.reason, txn.ended_ms = KnownEnd.ABORTED, "expired", self.now_ms
                self.expired = True

    def labelled(self, label: str) -> tuple[str, Txn] | None:
        """The newest transaction with a label, in whichever group, if it is open or remembered."""
        found = [(name, txn) for name, txn in self.txns.items() if txn.label == label and self.is_known(txn)]
        return found[-1] if found else None

    def is_known(self, txn: Txn) -> bool:
        """Whether a transaction is open, or its outcome is remembered."""
        return txn.state is KnownEnd.OPEN or self.now_ms - txn.ended_ms < REMEMBERED_MS

    # Time

    def sleep(self, duration_ms: int) -> None:
        """Let time pass, in which leaders forget what they may."""
        self.now_ms += duration_ms
        is_needed = any(map(self.is_known, self.txns.values()))
        if self.session_ms is not None and not is_needed and self.now_ms - self.session_ms > SESSION_MS:
            self.session_ms = None

    def end_orphans(self) -> None:
        """Let the leases run out of what gateways have begun that stood still, and that nobody knows of."""
        for txn in self.txns.values():
            if txn.state is KnownEnd.OPEN and txn.is_durable:
                txn.state, txn.reason, txn.ended_ms = KnownEnd.ABORTED, "expired", 0

    @property
    def has_open(self) -> bool:
        """Whether something is open."""
        return any(txn.state is KnownEnd.OPEN and txn.is_durable for txn in self.txns.values())

    def write(self, entry: Entry | None) -> None:
        """Have an entry in the node, or no node."""
        before = self.entry
        if entry is not None and (before is None or entry.written_ms != before.written_ms):
            self.wrote_ms = self.now_ms  # who lets go of an id writes its entry and keeps its date: that is no use
        self.version = None if entry is None else 0 if self.version is None else self.version + 1
        self.entry = entry
        self.written_ms = self.now_ms + self.zookeeper_skew_ms

    # Sweeps

    def stir(self) -> None:
        """Let a gateway that sweeps go on by a step, or another one begin, now and then."""
        if self.is_swept and self.dice.random() < 0.3:
            if len(self.sweepers) < 3 and self.dice.random() < 0.3:
                own_ms = self.now_ms + self.dice.choice((0, self.clock_ms - self.now_ms))
                self.sweepers.append(Driven(sweep(EXPIRATION_MS, own_ms)).turns(self.swept))
            elif self.sweepers:
                sweeper = self.dice.choice(self.sweepers)
                if next(sweeper, self) is self:
                    self.sweepers.remove(sweeper)

    def swept(self, effect: AnyEffect) -> Any:
        """Carry out a step of a sweep."""
        self.steps[type(effect).__name__] += 1
        match effect:
            case FindOld(before_ms):
                return [NAME] if self.entry is not None and self.written_ms <= before_ms else []
            case MarkBucket():
                self.bucket += 1
                return BucketMark(self.bucket, self.now_ms + self.zookeeper_skew_ms)
            case ReadEntries():
                if self.entry is None or self.version is None:
                    return {}
                return {NAME: Dated(self.entry, self.version, self.written_ms)}
            case FindHeld():
                return [] if self.holder is None else [NAME]
            case FindSessions():
                return [] if self.session_ms is None else [NAME]
            case RemoveEntries(bucket_version, versions):
                if bucket_version != self.bucket or self.entry is None or versions[NAME] != self.version:
                    return None
                self.check_removal()
                self.write(None)
                self.bucket += 1
                self.steps["removed"] += 1
                return self.bucket
            case _:
                raise AssertionError(effect)

    def check_removal(self) -> None:
        """Nothing is lost with an entry that goes."""
        assert not any(txn.is_durable and self.is_known(txn) for txn in self.txns.values()), "it was needed"
        self.check_age()

    def check_age(self) -> None:
        """Nobody has used its id for long."""
        assert self.now_ms - self.wrote_ms >= EXPIRATION_MS, "it was written of late"
        # A gateway whose clock jumps may take an entry for a new one, and not write it again.
        unused_ms = self.now_ms - self.used_ms
        assert self.has_jumps or unused_ms >= EXPIRATION_MS - LATEST_WRITE_MS, f"unused for {unused_ms / DAY_MS} days"


class Gateway:
    """A gateway process as one transactional id sees it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hold: Hold | None = None
        self.still: Turns[Any] | None = None
        """What it goes on with, if it stands still."""
        self.skew_ms = 0

    def drop(self) -> None:
        """Forget everything: it has died, or another gateway was asked."""
        if self.hold is not None and self.hold.txn is not None:
            txn, dice = self.hold.txn, self.world.dice
            if not txn.is_durable and txn.session == self.world.session:  # its BEGIN may have arrived, or not
                txn.is_durable = dice.random() < 0.5
            if not txn.is_durable:
                self.world.txns = {name: item for name, item in self.world.txns.items() if item is not txn}
        self.hold = None
        if self.world.holder is self:
            self.world.holder = None

    def run(self, make: Callable[[IdState], Steps[T]], *, wait: bool = True) -> T:
        """Carry a procedure out.

        Raises:
            Crash: the gateway dies meanwhile.
            StandsStill: it stands still meanwhile, and goes on with :meth:`go_on`.
            AskAgain: another one holds the id.
        """
        assert self.still is None
        world = self.world
        if world.holder is not self:
            if world.holder is not None and world.holder.still is None:
                world.holder.drop()
            if world.entry is not None and world.takes_up:
                world.write(world.entry)
            world.holder, self.hold = self, Hold(IdState(world.entry, fresh_ms=world.fresh_ms), world.version)
        assert self.hold is not None
        world.clock_ms = world.now_ms + self.skew_ms
        steps = self._steps(make(self.hold.held), self.hold, wait=wait)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                result: T = stop.value
                return result
            except (Crash, AskAgain):
                self.drop()
                raise
            if world.dice.random() < world.stall:
                world.steps["stood still"] += 1
                if self.hold.txn is not None:
                    self.hold.txn.is_durable = True  # the brokers have long got its BEGIN
                self.still = steps
                raise StandsStill

    def let_go(self) -> None:
        """Let go of the id, which nobody has used for long."""
        if self.hold is not None and (self.hold.txn is None or self.hold.txn.state is not KnownEnd.OPEN):
            with suppress(Crash, StandsStill, AskAgain):
                self.run(lambda held: settle(held))
            if self.still is None:
                self.drop()

    def end(self) -> None:
        """Die, whatever it is about to do."""
        self.still = None
        self.drop()

    def go_on(self) -> Any:
        """Go on after standing still, to the end; return what comes of it. It holds nothing any more then."""
        steps, self.still = self.still, None
        assert steps is not None
        self.world.steps["went on"] += 1
        try:
            while True:
                next(steps)
        except StopIteration as stop:
            return stop.value
        finally:
            self.drop()

    def _steps(self, procedure: Steps[T], hold: Hold, *, wait: bool) -> Turns[T]:
        """Carry a procedure out; yields wherever the gateway may stand still."""
        try:
            result = yield from Driven(procedure).turns(
                lambda effect: self._effect(effect, hold),
                refusals=(LostTransactionError, NothingWrittenError, RefusedError),
                live_on=self._live_on,
            )
            ticket = getattr(result, "ticket", result)
            yield
            if wait and isinstance(ticket, Ticket):
                self._live_on("before the wait")
                self._arrive(ticket, hold)
                self._live_on("after the wait")
                if self.world.holder is not self:
                    raise AskAgain  # it is not sure of its session
            return result
        finally:
            procedure.close()

    def _arrive(self, ticket: Ticket, hold: Hold) -> None:
        txn = ticket.txn
        if txn is not None and txn.owner == hold.owner and txn.session == self.world.session:
            txn.is_durable = True
            txn.saved += ticket.records
            txn.notes = {**txn.notes, **ticket.notes}
            txn.saved_offsets = ticket.offsets

    def _live_on(self, where: str) -> None:
        self.world.stir()
        if self.world.dice.random() < self.world.crash:
            self.world.steps[f"crash {where}"] += 1
            raise Crash(where)

    def _begin_session(self, hold: Hold, *, anew: bool = False) -> None:
        """Begin a session of the client name, if none was begun by this holder; nothing of older ones counts then."""
        world = self.world
        if hold.session and not anew:
            return
        if world.guarded and (hold.version is None or hold.version != world.version):
            raise AskAgain
        world.session_ms = world.now_ms
        world.session += 1
        hold.session = world.session

    def _effect(self, effect: AnyEffect, hold: Hold) -> Turns[Any]:
        world = self.world
        world.steps[type(effect).__name__] += 1
        match effect:
            case WriteEntry(entry):
                if hold.version != world.version:
                    raise AskAgain
                world.write(Entry.decode(entry.encode()))
                hold.version = world.version
            case FenceOthers():
                self._begin_session(hold, anew=True)
                yield
                left = [(name, txn.label) for name, txn in self._open() if txn.state is KnownEnd.OPEN]
                yield
                if left and hold.version != world.version:
                    raise AskAgain
                return left
            case AbortLeft(transaction):
                txn = world.txns[transaction]
                if txn.state is KnownEnd.OPEN:
                    txn.state, txn.reason, txn.ended_ms = KnownEnd.ABORTED, "fenced", world.now_ms
            case FindLabel(label):
                found = world.labelled(label)
                if found is None:
                    return KnownEnd.NONE, "", ""
                return found[1].state, found[1].reason, found[0]
            case Resume(transaction):
                txn = world.txns[transaction]
                self._begin_session(hold)
                yield
                self._own(txn, hold)
                txn.strays = []
                if txn.saved_offsets is None or txn.state is not KnownEnd.OPEN:
                    return None
                hold.offsets = dict(txn.saved_offsets)
                return dict(txn.notes)
            case BeginTransaction(stream, label, _):
                assert stream in STREAMS
                self._begin_session(hold)
                world.session_ms = world.now_ms  # its client looks at its record, if that was long ago
                yield
                txn = Txn(label, stream)
                self._own(txn, hold)
                world.txns[f"t{len(world.txns)}-{world.owners}"] = txn
            case Carry(batch):
                assert hold.txn is not None
                if isinstance(batch, Batch) and batch.stream != hold.txn.stream:
                    raise NothingWrittenError("a stream of another group") from InvalidRequestError(
                        batch.stream, code="group-mismatch"
                    )
                hold.tail += batch
                hold.txn.strays += batch
            case AddOffsets(offsets):
                assert hold.txn is not None
                known = hold.offsets.get(offsets.group)
                hold.offsets[offsets.group] = offsets if known is None else known.joined(offsets)
            case Save(notes):
                assert hold.txn is not None
                in_force = {**hold.txn.notes, **notes}
                if why := notes_fault(notes, len(in_force), notes_bytes(in_force)):
                    raise InvalidRequestError(why)
                ticket = Ticket(hold.txn, hold.tail, notes, dict(hold.offsets))
                hold.tail, hold.txn.strays = [], []
                if world.dice.random() < 0.2:
                    self._arrive(ticket, hold)  # before its answer is waited for, and perhaps before a crash
                    return Ticket(None, [], {})
                return ticket
            case Finish(commit, reason):
                self._finish(commit, reason, hold)
            case _:
                raise AssertionError(effect)
        return None

    def _open(self) -> list[tuple[str, Txn]]:
        return list(self.world.txns.items())

    def _own(self, txn: Txn, hold: Hold) -> None:
        """Become the owner, unless a newer session of the client name is not heard of here yet."""
        if hold.session != self.world.session:
            raise AskAgain
        self.world.owners += 1
        hold.txn, hold.tail, hold.offsets = txn, [], {}
        txn.session, txn.owner = hold.session, self.world.owners
        hold.owner = self.world.owners

    def _finish(self, commit: bool, reason: str, hold: Hold) -> None:
        txn = hold.txn
        assert txn is not None
        if txn.owner != hold.owner or txn.session != self.world.session:
            raise AskAgain
        if txn.state is KnownEnd.OPEN:
            txn.is_durable, txn.ended_ms = True, self.world.now_ms
            if commit:
                txn.state = KnownEnd.COMMITTED
                self.world.committed += txn.saved + hold.tail
                for group in hold.offsets.values():
                    for where, offset in group.offsets.items():
                        self.world.offsets[group.group, where] = offset
            else:
                txn.state, txn.reason = KnownEnd.ABORTED, reason
        elif commit and txn.state is KnownEnd.ABORTED:
            raise LostTransactionError("aborted by others", by_others=True)
        elif not commit and txn.state is KnownEnd.COMMITTED:
            raise RefusedError(Step.INVALID, "an abort was asked for what is committed")
