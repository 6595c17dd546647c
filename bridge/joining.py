"""What a connection offers to processes that write one transaction together without a common parent to begin it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from bridge.client.joint import JointDesk, JointTicket, JointTransaction
from bridge.client.results import CommitResult, PartHandle
from bridge.timeouts import Timeout


class Joining(ABC):
    """What a connection offers for joint transactions."""

    @abstractmethod
    def _desk_if_open(self) -> JointDesk:
        """Who does it; raises InvalidRequestError once the connection is closed."""

    def joint(
        self,
        *streams: str,
        series: str,
        number: int,
        lease: timedelta | None = None,
        retain: timedelta | None = None,
        timeout: Timeout = None,
    ) -> JointTransaction:
        """A transaction that several processes of one session write: whoever asks first begins it, the others join.

        All of them name the same streams, series and number. The numbers of a series never fall, and one that was
        committed is never written again: not by this session, and not by a later one, which is told that there is
        nothing left to do. What an earlier session has left open is aborted first, and written anew.

        Args:
            streams: ``scope/stream``, one or more of one transaction group.
            series: What the number counts in.
            number: Which transaction of the series.
            lease, retain: As ``timeout`` and ``retain`` of :meth:`bridge.Bridge.begin`.
            timeout: How long to wait for the leader, if an earlier session has left something behind.

        Raises:
            Fenced: a newer session of this client name has begun; nothing was written.
            TransactionClosed: this session has ended that number.
            ConflictError: a later number has been begun.
            OutcomeExpired: an earlier session has left that number behind so long ago that nobody knows its outcome.
            InvalidRequestError: this connection has no client name of its own that it could share.
            And as :meth:`bridge.Bridge.begin`.
        """
        return self._desk_if_open().agree(streams, series, number, lease, retain, timeout)

    def commit_joint(
        self, ticket: JointTicket, parts: Sequence[PartHandle], timeout: Timeout = None, *, last: bool = False
    ) -> CommitResult:
        """Commit a joint transaction, in whichever process of the session; as :meth:`bridge.Transaction.commit`.

        ``last`` says that nobody will come back to this client name: its session is forgotten then.

        Raises:
            TransactionClosed: it is not the one on record for its number.
            And as :meth:`bridge.Transaction.commit`.
        """
        return self._desk_if_open().commit(ticket, parts, timeout, last=last)

    def abort_joint(
        self, ticket: JointTicket, reason: str = "client", timeout: Timeout = None, *, last: bool = False
    ) -> bool:
        """Abort a joint transaction, unless it is committed or may be: False then, and nothing was asked for.

        Raises:
            As :meth:`bridge.Transaction.abort`, but for AlreadyCommitted.
        """
        return self._desk_if_open().abort(ticket, reason, timeout, last=last)
