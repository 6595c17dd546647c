"""A transaction that another process began, or this one in an earlier life, and that is gone on with here.

What counts of what was written before: everything that the leader had from the transaction's owners when it was asked,
which is everything that they had flushed, and may be more. New records are a part of their own; the commit's manifest
names both. From the BEGIN frames on with which this owner takes over, which the brokers have acknowledged before the
object is handed out, former owners can neither write nor end the transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rollbridge.client.futures import Completion
from rollbridge.client.manifest_room import piece_bytes
from rollbridge.client.results import Ends, Piece, find_ends
from rollbridge.client.runtime import Plan, Runtime
from rollbridge.client.transaction import Transaction
from rollbridge.model.control import FENCED, ControlKind, ControlRecord
from rollbridge.model.frames import FrameKind
from rollbridge.model.known import KnownTransaction
from rollbridge.model.transaction import State

_OF_A_FENCED_SESSION: Final = "its session was fenced by a newer one"
"""Only that session itself is told that it is fenced."""


class ResumedTransaction(Transaction):
    """A transaction to go on with, and to commit or abort. Made by :meth:`rollbridge.Bridge.resume`.

    If it has ended before, its commit and its abort give the same answer as the first time.
    """

    __slots__ = ("_earlier", "_known")

    def __init__(
        self, runtime: Runtime, plan: Plan, completion: Completion, part: int, known: KnownTransaction
    ) -> None:
        """Take over a transaction of which the leader said what is ``known``; returns once the brokers have that."""
        self._known = known
        self._earlier = [Piece(*key, records, 0, 0) for key, records in known.pieces.items()]
        self._prepare(runtime, plan, completion, known.id.counter, part)
        self._writer.room.bytes += sum(piece_bytes(key) for key in known.pieces)
        if known.state is State.OPEN:
            header = self._key_of(FrameKind.BEGIN)
            runtime.sender.send(*self._buffers[0], header, plan.begin_value, self._first_delivered)
            self._sent = 1
            for place in range(1, len(self._buffers)):
                self._emit(place, header, plan.begin_value)
            self.flush()

    @property
    def label(self) -> str | None:
        """The label given at its begin."""
        return self._known.label

    @property
    def earlier_records(self) -> Mapping[str, int]:
        """How many records of its earlier owners count, by stream; empty if it had ended before."""
        found = dict.fromkeys(self.streams, 0)
        for piece in self._earlier:
            found[self.streams[piece.stream]] += piece.records
        return found

    def _own_pieces(self) -> list[Piece]:
        return [*self._earlier, *super()._own_pieces()]

    def _is_mine(self) -> bool:
        return self._known.state is not State.OPEN or super()._is_mine()

    def _records_committed(self) -> int:
        return self._known.records if self._known.state is State.COMMITTED else super()._records_committed()

    def _ends(self) -> Ends:
        """Of what was written here: the local sequence numbers of earlier records are known to the segments only."""
        record = self._completion.record
        return (None, None) if record is None else find_ends(record, self._plan.begin.places, self._writer.pieces())


def settled(known: KnownTransaction) -> Completion:
    """The completion of a transaction that has ended, for somebody who was not its owner then."""
    record = ControlRecord(
        transaction=known.id,
        kind=ControlKind.COMMIT if known.state is State.COMMITTED else ControlKind.ABORT,
        client_name=known.client_name,
        begun_ms=known.decided_ms,
        decided_ms=known.decided_ms,
        controller_epoch=0,
        label=known.label,
        reason=_OF_A_FENCED_SESSION if known.reason == FENCED else known.reason,
        records=known.records,
    )
    completion = Completion(known.id.bytes)
    completion.settle(record.encode_value(), known.position)
    return completion
