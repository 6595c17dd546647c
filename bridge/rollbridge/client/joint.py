"""Joint transactions as their processes see them: agree on one, write parts of it, and end it, each in any process.

Which transaction it is stands in the record of the client's session, see :mod:`rollbridge.client.shared`. Everybody who
writes a part sends the BEGIN frames before it, so that nobody has to wait for whoever came first; the leader takes the
first ones, and drops those that come when the transaction has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollbridge.client.futures import Completion
from rollbridge.client.runtime import Plan, Runtime
from rollbridge.client.transaction import Transaction
from rollbridge.client.writing import Part
from rollbridge.errors import TransactionClosed
from rollbridge.model.frames import FrameHeader, FrameKind
from rollbridge.model.identifiers import OWNER_PART, TransactionId
from rollbridge.model.joint import JointWork, label_of
from rollbridge.model.names import GroupName


@dataclass(frozen=True, slots=True)
class JointTicket:
    """Names a joint transaction for other processes of the session; it can be pickled."""

    group: GroupName
    series: str
    number: int
    transaction: TransactionId


class JointTransaction:
    """A transaction that several processes write; for several threads, too. Made by
    :meth:`rollbridge.SharedClient.joint`.

    Attributes:
        ticket: What another process needs to end it.
        committed: Whether an earlier session has committed it: then there is nothing left to do.
        content: What that has committed; None if it was not said, as by older versions.
    """

    def __init__(self, group: GroupName, work: JointWork, new_part: Callable[[], Part], *, committed: bool) -> None:
        """See :meth:`rollbridge.SharedClient.joint`; ``new_part`` makes a part with a number of its own."""
        self._new_part = new_part
        self.ticket = JointTicket(group, work.series, work.number, work.transaction)
        self.committed = committed
        self.content = work.content

    @property
    def id(self) -> TransactionId:
        """The id of the transaction."""
        return self.ticket.transaction

    def part(self) -> Part:
        """Write a part of it; it counts if its handle is among those that the commit is given.

        Raises:
            TransactionClosed: an earlier session has committed it.
            ZooKeeperUnavailable: the part could not be given a number.
        """
        if self.committed:
            raise TransactionClosed(
                f"{label_of(self.ticket.series, self.ticket.number)} has been committed as transaction {self.id}; "
                "nothing was written",
                transaction=str(self.id),
            )
        return self._new_part()


class JointPart(Part):
    """A part of a joint transaction: it sends the BEGIN frames itself, in front of what is written."""

    __slots__ = ()

    def __init__(self, runtime: Runtime, plan: Plan, completion: Completion, part: int) -> None:
        super().__init__(runtime, plan, completion, part)
        header = FrameHeader(FrameKind.BEGIN, completion.key, OWNER_PART, client_epoch=plan.begin.client_epoch).pack()
        with self._lock:
            for place in range(len(self._buffers)):
                self._emit(place, header, plan.begin_value)


class JointEnding(Transaction):
    """The transaction as the process sees it that ends it: all of it was written by parts, and so was its begin."""

    __slots__ = ()

    def __init__(self, runtime: Runtime, plan: Plan, transaction: TransactionId) -> None:
        completion = runtime.outcomes.completion(transaction, plan.begin.client_epoch)
        self._prepare(runtime, plan, completion, transaction.counter, OWNER_PART)
        self._sent = self._acked = 1
