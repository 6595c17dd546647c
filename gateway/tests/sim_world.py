"""A model of what procedures act on: transactions, labels, savepoints, an entry; gateways that die at any effect.

Nothing here knows the procedures' order. Effects are volatile until a savepoint's ticket was waited for, and then
durable; of what is neither when a gateway dies, a random part is there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollbridge_gateway.entries import Entry
from rollbridge_gateway.procedures import (
    AbortLeft,
    AddOffsets,
    BeginTransaction,
    Carry,
    FencedByOthersError,
    FenceOthers,
    FindLabel,
    Finish,
    GatewayEffect,
    GroupCommit,
    Held,
    LostByOthersError,
    NothingWrittenError,
    Procedure,
    Resume,
    Save,
    WriteEntry,
)
from rollbridge_gateway.producers import KnownEnd

T = TypeVar("T")
STREAM = "sales/orders"


class Crash(Exception):
    """The gateway has died; its client gets no answer."""


@dataclass
class Txn:
    """A transaction: what counts is what is behind its last savepoint, and at a commit all that its owner has
    written."""

    label: str
    state: KnownEnd = KnownEnd.OPEN
    reason: str = ""
    is_durable: bool = False
    owner: int = 0
    saved: list[Any] = field(default_factory=list)
    notes: dict[str, bytes] = field(default_factory=dict)
    tail: list[Any] = field(default_factory=list)
    offsets: dict[str, GroupCommit] = field(default_factory=dict)
    saved_offsets: dict[str, GroupCommit] | None = None
    """Of its last savepoint; None if there is none."""


@dataclass
class Ticket:
    """A savepoint on its way."""

    txn: Txn | None
    records: list[Any]
    notes: Mapping[str, bytes]
    offsets: dict[str, GroupCommit] = field(default_factory=dict)


class World:
    """One transactional id in a cluster with several gateways.

    Attributes:
        txns: All transactions, by id, in the order of their begins.
        committed: What readers see.
        offsets: What the consumer groups have committed.
        expired: Whether a lease has run out of late.
        steps: How often each effect was carried out, and crashed.
    """

    def __init__(self, dice: random.Random, crash: float) -> None:
        self.dice = dice
        self.crash = crash
        self.entry: Entry | None = None
        self.txns: dict[str, Txn] = {}
        self.committed: list[Any] = []
        self.offsets: dict[tuple[str, tuple[str, int]], int] = {}
        self.holder: Gateway | None = None
        self.owners = 0
        self.expired = False
        self.steps: Counter[str] = Counter()

    def expire(self) -> None:
        """End an open transaction by its lease, as a leader does on its own."""
        for txn in self.txns.values():
            if txn.state is KnownEnd.OPEN and txn.is_durable:
                txn.state, txn.reason = KnownEnd.ABORTED, "expired"
                self.expired = True

    def labelled(self, label: str) -> tuple[str, Txn] | None:
        """The newest transaction with a label."""
        found = [(name, txn) for name, txn in self.txns.items() if txn.label == label]
        return found[-1] if found else None


class Gateway:
    """A gateway process as one transactional id sees it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held: Held | None = None
        self.txn: Txn | None = None
        self.owner = 0

    def drop(self) -> None:
        """Forget everything: it has died, or another gateway was asked."""
        txn, dice = self.txn, self.world.dice
        if txn is not None and not txn.is_durable:  # its BEGIN may have arrived, or not
            txn.is_durable = dice.random() < 0.5
            if not txn.is_durable:
                self.world.txns = {name: item for name, item in self.world.txns.items() if item is not txn}
        self.held = self.txn = None
        if self.world.holder is self:
            self.world.holder = None

    def run(self, make: Callable[[Held], Procedure[T]], *, wait: bool = True) -> T:
        """Carry a procedure out; raise Crash if the gateway dies meanwhile."""
        world = self.world
        if world.holder is not self:
            if world.holder is not None:
                world.holder.drop()
            world.holder, self.held = self, Held(world.entry)
        assert self.held is not None
        procedure = make(self.held)
        try:
            result = self._drive(procedure)
            ticket = getattr(result, "ticket", result)
            if wait and isinstance(ticket, Ticket):
                self.wait(ticket)
        except Crash:
            procedure.close()
            self.drop()
            raise
        return result

    def _drive(self, procedure: Procedure[T]) -> T:
        send: Callable[[Any], GatewayEffect] = procedure.send
        value: Any = None
        try:
            while True:
                effect = send(value)
                try:
                    value, send = self._carry_out(effect), procedure.send
                except (LostByOthersError, FencedByOthersError, NothingWrittenError) as fault:
                    value, send = fault, procedure.throw
        except StopIteration as stop:
            result: T = stop.value
            return result

    def wait(self, ticket: Ticket) -> None:
        """Wait until a savepoint has reached the brokers."""
        self._maybe_die("wait")
        self._arrive(ticket)
        self._maybe_die("waited")

    def _arrive(self, ticket: Ticket) -> None:
        txn = ticket.txn
        if txn is not None and txn.owner == self.owner:
            txn.is_durable = True
            txn.saved += ticket.records
            txn.notes = {**txn.notes, **ticket.notes}
            txn.saved_offsets = ticket.offsets

    def _maybe_die(self, where: str) -> None:
        if self.world.dice.random() < self.world.crash:
            self.world.steps[f"crash at {where}"] += 1
            raise Crash(where)

    def _carry_out(self, effect: GatewayEffect) -> Any:
        name = type(effect).__name__
        self._maybe_die(f"before {name}")
        self.world.steps[name] += 1
        result = self._effect(effect)
        self._maybe_die(f"behind {name}")
        return result

    def _effect(self, effect: GatewayEffect) -> Any:
        world = self.world
        match effect:
            case WriteEntry(entry):
                world.entry = Entry.decode(entry.encode())
            case FenceOthers():
                return [(name, txn.label) for name, txn in world.txns.items() if txn.state is KnownEnd.OPEN]
            case AbortLeft(transaction):
                txn = world.txns[transaction]
                if txn.state is KnownEnd.OPEN:
                    txn.state, txn.reason = KnownEnd.ABORTED, "fenced"
            case FindLabel(label):
                found = world.labelled(label)
                if found is None:
                    return KnownEnd.NONE, "", ""
                return found[1].state, found[1].reason, found[0]
            case Resume(transaction):
                txn = self.txn = world.txns[transaction]
                self._own(txn)
                txn.tail = []
                if txn.saved_offsets is None:
                    return None
                txn.offsets = dict(txn.saved_offsets)
                return dict(txn.notes)
            case BeginTransaction(stream, label, _):
                assert stream == STREAM
                txn = self.txn = Txn(label)
                self._own(txn)
                world.txns[f"t{len(world.txns)}-{world.owners}"] = txn
            case Carry(batch):
                assert self.txn is not None
                self.txn.tail += batch
            case AddOffsets(offsets):
                assert self.txn is not None
                known = self.txn.offsets.get(offsets.group)
                self.txn.offsets[offsets.group] = offsets if known is None else known.joined(offsets)
            case Save(notes):
                assert self.txn is not None
                ticket = Ticket(self.txn, self.txn.tail, notes, dict(self.txn.offsets))
                self.txn.tail = []
                if world.dice.random() < 0.2:
                    self._arrive(ticket)  # before its answer is waited for, and perhaps before a crash
                    return Ticket(None, [], {})
                return ticket
            case Finish(commit, reason):
                self._finish(commit, reason)
            case _:
                raise AssertionError(effect)
        return None

    def _own(self, txn: Txn) -> None:
        self.world.owners += 1
        txn.owner = self.owner = self.world.owners

    def _finish(self, commit: bool, reason: str) -> None:
        txn = self.txn
        assert txn is not None
        if txn.owner != self.owner:
            raise FencedByOthersError
        if txn.state is KnownEnd.OPEN:
            txn.is_durable = True
            if commit:
                txn.state = KnownEnd.COMMITTED
                self.world.committed += txn.saved + txn.tail
                for group in txn.offsets.values():
                    for where, offset in group.offsets.items():
                        self.world.offsets[group.group, where] = offset
            else:
                txn.state, txn.reason = KnownEnd.ABORTED, reason
        elif commit and txn.state is KnownEnd.ABORTED:
            raise LostByOthersError
        elif not commit and txn.state is KnownEnd.COMMITTED:
            raise AssertionError("an abort was asked for what is committed")
