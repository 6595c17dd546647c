"""The transaction of one transactional id, on rollbridge's public client: the only module that knows its calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rollbridge.calls import Deadline
from rollbridge.client.client import Client
from rollbridge.client.futures import PartStream
from rollbridge.client.savepoints import SavepointFuture
from rollbridge.client.transaction import Transaction
from rollbridge.errors import (
    AlreadyAbortedError,
    AlreadyCommittedError,
    BackpressureError,
    CorruptDataError,
    InvalidRequestError,
    OutcomeExpiredError,
    OutcomeUnknownError,
    TransactionAbortedError,
    TransactionNotFoundError,
    TransactionTooLargeError,
    UnavailableError,
)
from rollbridge.model.group_offsets import GroupOffsets, OffsetDetails
from rollbridge.model.ids import local_sequence
from rollbridge.model.routing import Route
from rollbridge_gateway.carrying import BatchAuthor, CarriedFrame, Target, carry
from rollbridge_gateway.procedures import (
    GroupCommit,
    LostByOthersError,
    NothingWrittenError,
    OutcomeLostError,
    RefusedError,
)
from rollbridge_gateway.producers import KnownEnd, Step

logger = logging.getLogger(__name__)


class Rolling:
    """Client and open transaction of one transactional id. One thread at a time uses it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._txn: Transaction | None = None
        self._targets: dict[str, tuple[Route, Target]] = {}
        self._rest: tuple[Any, list[CarriedFrame]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open here."""
        return self._txn is not None

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
        """Begin a transaction."""
        self._txn = self._client.begin(stream, timeout=lease, label=label)

    def resume(self, transaction: str) -> dict[str, bytes] | None:
        """Take over an open transaction at its last savepoint; return its notes, None if there is no savepoint."""
        self._txn = resumed = self._client.resume(transaction)
        last = resumed.last_savepoint
        logger.info(
            "transaction %s of %s goes on here from %s",
            transaction,
            self._client.client_name,
            "its begin: nothing was acknowledged" if last is None else f"savepoint {last.number}",
        )
        if last is None:
            return None
        resumed.rollback_to(last)
        return dict(last.notes)

    def is_prompt(self, stream: str | None = None) -> bool:
        """Return whether a savepoint, and a batch for a stream, are taken without asking anybody else."""
        return self._txn is not None and self._txn.is_prompt(stream)

    def carry(self, parcel: Any) -> None:
        """Write a batch, all of it or nothing; one that is half written goes on.

        Raises:
            NothingWrittenError: its cause says why.
            BackpressureError: there was no room for the rest of it, see :meth:`is_half_carried`.
        """
        txn = self._open()
        if self.is_half_carried(parcel):
            assert self._rest is not None
            self._put(txn, parcel, self._rest[1], is_begun=True)
            return
        try:
            lane = txn.lane(parcel.stream)
            target = self._target_of(lane)
            author = BatchAuthor(txn.completion.key, local_sequence(txn.number, 0), txn.records)
            frames = carry(parcel.batch, parcel.partition, target, author)
        except (InvalidRequestError, CorruptDataError) as fault:
            raise NothingWrittenError(str(fault)) from fault
        self._put(txn, parcel, frames)

    def is_half_carried(self, parcel: Any) -> bool:
        """Return whether some frames of a batch were written, and the others were not for lack of room."""
        return self._rest is not None and self._rest[0] is parcel

    def _target_of(self, lane: PartStream) -> Target:
        """Return what a batch has to know of a stream; it is the same until partitions are added."""
        route = lane.route
        known = self._targets.get(route.stream)
        if known is not None and known[0] is route:
            return known[1]
        found = Target(lane.layout, len(route.numbers), lane.bounds, lane.hash_of, lane.each, route.limits is not None)
        self._targets[route.stream] = route, found
        return found

    def _put(self, txn: Transaction, parcel: Any, frames: list[CarriedFrame], *, is_begun: bool = False) -> None:
        self._rest = None
        for number, frame in enumerate(frames):
            try:
                txn.put_batch(parcel.stream, frame.at, frame.batch, frame.first, frame.last, frame.records)
            except (TransactionTooLargeError, BackpressureError) as fault:
                if not is_begun:
                    raise NothingWrittenError(str(fault)) from fault
                if isinstance(fault, BackpressureError):
                    self._rest = parcel, frames[number:]
                raise  # unless it goes on, the id is dropped, and served again from its last savepoint
            is_begun = True

    def send_offsets(self, offsets: GroupCommit) -> None:
        """Add a consumer group's offsets."""
        self._open().send_group_offsets(
            GroupOffsets(
                offsets.group,
                {where: item.offset for where, item in offsets.offsets.items()},
                offsets.generation,
                offsets.member,
                offsets.instance,
                {where: OffsetDetails(*item[1:]) for where, item in offsets.offsets.items()},
            )
        )

    def save(self, notes: Mapping[str, bytes]) -> SavepointFuture:
        """Put a savepoint behind what was written.

        Raises:
            BackpressureError: none was made.
        """
        return self._open().savepoint_async(notes=notes)

    def finish(self, *, commit: bool, reason: str, timeout_s: float) -> None:
        """Commit or abort, and wait until that is decided.

        Raises:
            LostByOthers: it is aborted, and a commit was asked for.
            ClientFencedError: another gateway has it by now.
            Refused: it is committed, and an abort was asked for.
            OutcomeLost: nobody will ever tell.
            OutcomeUnknownError: not decided in time; to be asked for again, of this very transaction.
        """
        txn, deadline = self._open(), Deadline(timeout_s)
        try:
            if commit:
                txn.commit(timeout=deadline.left())
            else:
                txn.abort(reason, timeout=deadline.left())
        except AlreadyAbortedError as fault:
            if commit:
                raise LostByOthersError(str(fault)) from fault
        except TransactionAbortedError as fault:
            if commit:
                raise LostByOthersError(str(fault)) from fault
        except AlreadyCommittedError as fault:
            raise RefusedError(Step.INVALID, str(fault)) from fault
        except OutcomeUnknownError as fault:
            completion = txn.completion
            # One that was decided right after its time was over is asked for again.
            if completion.settled and isinstance(completion.error(), OutcomeUnknownError):
                raise OutcomeLostError(str(fault)) from fault
            raise
        self.drop()

    def _open(self) -> Transaction:
        if self._txn is None:
            raise UnavailableError("the transaction is not open at this gateway any more; ask again")
        return self._txn
