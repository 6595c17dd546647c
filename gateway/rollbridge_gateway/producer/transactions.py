"""The transaction of one transactional id, on rollbridge's public client: the only module that knows its calls.

Tour of a gateway request, stop 5 of 5: see docs/tour.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta

from rollbridge.base.deadlines import Deadline
from rollbridge.base.ids import local_sequence
from rollbridge.client.client import Client
from rollbridge.client.futures import Completion, PartStream
from rollbridge.client.savepoints import SavepointFuture
from rollbridge.client.transaction import Transaction, writing_of
from rollbridge.client.writing import OwnerWriting
from rollbridge.errors import (
    BackpressureError,
    CorruptDataError,
    InvalidRequestError,
    OutcomeExpiredError,
    OutcomeUnknownError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionNotFoundError,
    TransactionTooLargeError,
    UnavailableError,
)
from rollbridge.stream.group_offsets import GroupMember, OffsetDetails
from rollbridge.stream.routing import Route
from rollbridge_gateway.producer.procedures import (
    GroupCommit,
    LostTransactionError,
    NothingWrittenError,
    RefusedError,
)
from rollbridge_gateway.producer.table import KnownEnd, Step
from rollbridge_gateway.protocol.batch_rewrite import BatchAuthor, CarriedFrame, ProducedBatch, Target, carry

logger = logging.getLogger(__name__)


class TransactionClient:
    """Client and open transaction of one transactional id. One thread at a time uses it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._txn: Transaction | None = None
        self._targets: dict[str, tuple[Route, Target]] = {}
        self._rest: tuple[ProducedBatch, list[CarriedFrame]] | None = None

    @property
    def is_open(self) -> bool:
        """True if a transaction is open here, or its outcome is lost, which only this client can tell."""
        if self._txn is None:
            return False
        completion = writing_of(self._txn).completion
        return not completion.settled or _is_lost(completion)

    def drop(self) -> None:
        """Forget the open transaction, which stays open."""
        self._txn = self._rest = None
        self._targets.clear()

    def close(self) -> None:
        """Forget the client as well."""
        self._txn = None
        self._client.close()

    def fence_others(self) -> list[tuple[str, str]]:
        """Begin a session in the groups that have one; return what is open of earlier ones, as ids and labels.

        Raises:
            CoordinatorUnavailableError, UnknownWriteError: one of these groups did not answer. Others are not asked:
                this id has nothing there.
        """
        self._txn = None
        self._client.new_session()
        left = self._client.unfinished()
        for fault in left.unanswered.values():
            raise fault
        return [(str(item.transaction), item.label or "") for item in left]

    def find(self, label: str) -> tuple[KnownEnd, str, str]:
        """Return what became of the newest transaction with a label: how, why, and its id."""
        try:
            found = self._client.outcome(label=label)
        except (TransactionNotFoundError, OutcomeExpiredError):
            return KnownEnd.NONE, "", ""
        if found.committed:
            return KnownEnd.COMMITTED, "", str(found.transaction)
        if found.aborted:
            return KnownEnd.ABORTED, found.reason, str(found.transaction)
        return KnownEnd.OPEN, "", str(found.transaction)

    def begin(self, stream: str, label: str, lease: timedelta) -> None:
        self._txn = self._client.begin(stream, timeout=lease, label=label)

    def resume(self, transaction: str) -> dict[str, bytes] | None:
        """Take over an open transaction at its last savepoint; return its notes, None if there is no savepoint."""
        self._txn = resumed = self._client.resume(transaction)
        last = resumed.last_savepoint
        logger.info(
            "transaction.taken_over txn=%s client=%s from=%r",
            transaction,
            self._client.client_name,
            "its begin: nothing was acknowledged" if last is None else f"savepoint {last.number}",
        )
        if last is None:
            return None
        resumed.rollback_to(last)
        return dict(last.notes)

    def can_write_now(self, stream: str | None = None) -> bool:
        """Return whether a savepoint, and a batch for a stream, are taken without a round trip."""
        return self._txn is not None and writing_of(self._txn).can_write_now(stream)

    def carry(self, produced: ProducedBatch) -> None:
        """Write a batch, all of it or nothing; one that is half written is continued.

        Raises:
            NothingWrittenError: its cause says why.
            BackpressureError: there was no room for the rest of it, see :meth:`is_half_carried`.
        """
        writing = writing_of(self._open())
        if self.is_half_carried(produced):
            assert self._rest is not None
            self._put(writing, produced, self._rest[1], is_begun=True)
            return
        try:
            part_stream = writing.part_stream(produced.stream)
            target = self._target_of(part_stream)
            author = BatchAuthor(writing.completion.key, local_sequence(writing.writer.part, 0), writing.records)
            frames = carry(produced.batch, produced.partition, target, author)
        except (InvalidRequestError, CorruptDataError) as fault:
            raise NothingWrittenError(str(fault)) from fault
        self._put(writing, produced, frames)

    def is_half_carried(self, produced: ProducedBatch) -> bool:
        """Return whether some frames of a batch were written, and the others were not for lack of room."""
        return self._rest is not None and self._rest[0] is produced

    def _target_of(self, part_stream: PartStream) -> Target:
        """Return what a batch has to know of a stream; it is the same until partitions are added."""
        route = part_stream.route
        known = self._targets.get(route.stream)
        if known is not None and known[0] is route:
            return known[1]
        found = Target(
            part_stream.layout,
            len(route.numbers),
            part_stream.bounds,
            part_stream.hash_of,
            part_stream.each,
            route.limits is not None,
        )
        self._targets[route.stream] = route, found
        return found

    def _put(
        self, writing: OwnerWriting, produced: ProducedBatch, frames: list[CarriedFrame], *, is_begun: bool = False
    ) -> None:
        self._rest = None
        for number, frame in enumerate(frames):
            try:
                writing.put_batch(produced.stream, frame.at, frame.batch, frame.first, frame.last, frame.records)
            except (TransactionTooLargeError, BackpressureError) as fault:
                if not is_begun:
                    raise NothingWrittenError(str(fault)) from fault
                if isinstance(fault, BackpressureError):
                    self._rest = produced, frames[number:]
                raise  # unless it is continued, the id is dropped, and served again from its last savepoint
            is_begun = True

    def send_offsets(self, offsets: GroupCommit) -> None:
        """Add a consumer group's offsets."""
        writing = writing_of(self._open())
        placed = writing.placed(
            (*where, item.offset, OffsetDetails(*item[1:])) for where, item in offsets.offsets.items()
        )
        if placed:
            member = GroupMember(offsets.group, offsets.generation, offsets.member, offsets.instance)
            writing.send_offsets(member, placed)

    def save(self, notes: Mapping[str, bytes]) -> SavepointFuture:
        """Put a savepoint behind what was written.

        Raises:
            BackpressureError: none was made.
        """
        return self._open().savepoint_async(notes=notes)

    def finish(self, *, commit: bool, reason: str, timeout_s: float) -> None:
        """Commit or abort, and wait until that is decided.

        Raises:
            LostTransactionError: it is aborted, and a commit was asked for; or its outcome will never be known.
            ClientFencedError: another gateway has it by now.
            Refused: it is committed, and an abort was asked for.
            OutcomeUnknownError: not decided in time; to be asked for again, of this very transaction.
        """
        txn, deadline = self._open(), Deadline(timeout_s)
        try:
            if commit:
                txn.commit(timeout=deadline.left())
            else:
                txn.abort(reason, timeout=deadline.left())
        except TransactionAbortedError as fault:
            if commit:
                raise LostTransactionError(str(fault), by_others=True) from fault
        except TransactionCommittedError as fault:
            raise RefusedError(Step.INVALID, str(fault)) from fault
        except OutcomeUnknownError as fault:
            # One that was decided right after its time was over is asked for again.
            if not _is_lost(writing_of(txn).completion):
                raise
            self.drop()
            raise LostTransactionError(str(fault)) from fault
        self.drop()

    def _open(self) -> Transaction:
        if self._txn is None:
            raise UnavailableError("the transaction is not open at this gateway any more; ask again")
        return self._txn


def _is_lost(completion: Completion) -> bool:
    """Return whether the outcome of a transaction will never be known here."""
    return completion.settled and isinstance(completion.error(), OutcomeUnknownError)
