"""Transactions as the application sees them: write, then commit or abort, and learn the outcome.

The commit is asked for in the buffer of the first stream, behind everything else that went there. Writes to the buffers
of other streams must be acknowledged before, since there is no order between two partitions. In any case the commit log
decides: commits and aborts wait for the control record.

What is behind them, with the locks, is in :mod:`rollbridge.client.writing`.

Tour of a commit, stop 1 of 8: see docs/tour.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import ClassVar, Final, Generic, TypeVar, cast

from confluent_kafka import TopicPartition

from rollbridge.base.arguments import NOT_BYTES, as_bytes, as_timestamp, checked, from_fault_on, not_text
from rollbridge.base.deadlines import Deadline, Duration, Timeout, answers_within, as_seconds, in_chunks
from rollbridge.base.ids import TransactionId
from rollbridge.base.logs import limited
from rollbridge.buffer.frames import encode_extend
from rollbridge.client.frame_writer import check_parts
from rollbridge.client.futures import Completion, Headers, OutcomeFuture, WriteFuture
from rollbridge.client.protocol import EndEvent
from rollbridge.client.results import CommitResult, PartHandle, Savepoint
from rollbridge.client.savepoints import SavepointFuture, check_notes
from rollbridge.client.writing import OffsetItem, OwnerWriting, Writing, extension_ms, new_condition
from rollbridge.consumer.commits import check_offsets
from rollbridge.errors import (
    ClientFencedError,
    OutcomeUnknownError,
    RollbridgeError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionRefusedError,
    UnavailableError,
)
from rollbridge.stream.conditions import Expected, Scope
from rollbridge.stream.group_offsets import NO_DETAILS, NO_EPOCH, OffsetDetails, parse_group_metadata

logger = logging.getLogger(__name__)
_waits = limited(logging.getLogger(f"{__name__}.waits"))

T = TypeVar("T")

Offsets = Mapping[tuple[str, int], int] | Iterable[TopicPartition]

ABORT_ON_ERROR_S: Final = 10.0
"""Seconds that a ``with`` block that ends by an exception waits for the abort to be logged."""


TELL_AFTER_S: Final = 2.0
"""Seconds of waiting for an outcome after which the log tells that there is no coordinator, if so."""
_ASK_AGAIN_S: Final = 0.05


W = TypeVar("W", bound=Writing)


@checked(but=("write",))
class RecordWriter(Generic[W]):
    """Writer of the records of one transaction. Safe to use from several threads."""

    __slots__ = ("_writing",)

    def __init__(self, writing: W) -> None:
        """Applications call :meth:`rollbridge.Bridge.begin`, ``resume`` or ``join``."""
        self._writing = writing

    @property
    def id(self) -> TransactionId:
        """Id of the transaction; pass it to ``join`` in another process."""
        return self._writing.id

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams that the transaction was begun for, and that had joined it as far as is known here."""
        return tuple(self._writing.plan.begin.streams)

    @property
    def records(self) -> int:
        """Number of records written through this object that count."""
        return self._writing.records

    @property
    def number(self) -> int:
        """Number of the part of the transaction that this object writes; 0 for its owner."""
        return self._writing.writer.part

    def write(
        self,
        stream: str,
        key: bytes | None = None,
        value: bytes | None = None,
        *,
        headers: Headers = (),
        timestamp: int | None = None,
    ) -> WriteFuture:
        """Write a record; the future returns its DLSN after the commit.

        Args:
            stream: ``scope/stream``, or an adopted topic. One that the transaction was not begun for joins it if it is
                of the same group, and this is the owner.
            key: Decides the segment; records with the same key stay in order. None: any segment.
            value: None is a tombstone.
            headers: Kept in their order; the name ``rollbridge`` is taken.
            timestamp: Milliseconds since 1970; None is now.

        Raises:
            RecordTooLargeError, TransactionTooLargeError, BackpressureError, InvalidRequestError: this record was not
                written, and the transaction stays usable.
            InvalidNameError, StreamNotFoundError, InvalidRequestError: likewise; the stream cannot
                join the transaction.
            ZooKeeperUnavailableError: likewise; a stream that is to join could not be looked up.
            TransactionClosedError: its end was asked for, or it has ended: aborted, expired or committed.
        """
        if key.__class__ is not bytes and key is not None:
            key = as_bytes("key", key)
        if value.__class__ is not bytes and value is not None:
            value = as_bytes("value", value)
        if timestamp is not None:
            timestamp = as_timestamp(timestamp)
        writing = self._writing
        writing.lock.acquire()  # written out, since a `with` here is a tenth of what writing a record costs
        try:
            if writing.finished or writing.completion.closed:
                raise writing.refusal()
            return writing.writer.write(stream, key, value, headers, timestamp)
        except (TypeError, AttributeError):
            if not isinstance(stream, str):
                raise not_text("stream", stream) from None
            raise
        finally:
            writing.lock.release()

    def write_all(self, stream: str, records: Iterable[tuple[bytes | None, bytes | None]]) -> int:
        """Write many records, given as key and value, and return their number; faster than one by one.

        Some hundreds of them are taken at a time; an iterator may take as long over them as it likes, and use this
        transaction and its connection.

        Raises:
            As :meth:`write`; the records before the one at fault were written. What the iterator raises; what it gave
                before was written.
        """

        def write(some: list[tuple[bytes | None, bytes | None]]) -> None:
            with self._writing.lock:
                self._writing.check_open()
                writer = self._writing.writer
                before = writer.count
                try:
                    writer.write_some(stream, some)
                except NOT_BYTES as fault:
                    for key, value in from_fault_on(some[writer.count - before :], fault):
                        writer.write(stream, key, value, (), None)

        return in_chunks(records, write)

    def flush(self, timeout: Timeout = None) -> None:
        """Wait until the brokers have acknowledged everything written so far.

        Raises:
            IncompleteError: they refused something; the transaction can only be aborted.
            UnavailableError: not acknowledged in time; it is still being sent.
        """
        self._writing.flush(self._seconds(timeout))

    def _seconds(self, timeout: Timeout) -> float:
        return as_seconds(timeout, self._writing.runtime.commit_timeout_s)


def writing_of(writer: RecordWriter[W]) -> W:
    """Return what a transaction or part is inside, for callers of rollbridge's own with ready-made batches."""
    return writer._writing


@checked(leave=("key", "sn"))
class Transaction(RecordWriter[OwnerWriting]):
    """Open transaction. Safe to use from several threads.

    Made by :meth:`rollbridge.Bridge.begin`. Nothing of it is visible before :meth:`commit`, and then all of it is.
    """

    __slots__ = ()

    @property
    def label(self) -> str | None:
        """Label given at its begin."""
        return self._writing.plan.begin.label

    def commit(self, parts: Sequence[PartHandle] = (), timeout: Timeout = None) -> CommitResult:
        """Make everything visible, all or nothing, and return the result.

        Asking again gives the same answer, or continues to wait; so does asking from another process, see
        :meth:`rollbridge.Bridge.resume` and :meth:`rollbridge.Bridge.outcome`. Transient faults are retried until the
        time is up.

        Args:
            parts: Handles of the parts that other processes have finished; parts that are not named leave nothing
                behind.
            timeout: How long to wait for the answer; None is the connection's ``commit_timeout``.

        Raises:
            TransactionRefusedError: a condition of the transaction does not hold; nothing of it is visible.
            TransactionAbortedError, IncompleteError: nothing of it is visible.
            ClientFencedError: a newer session of this client, or the process that resumed it, has taken it over.
            OutcomeUnknownError: no answer in time; ask again, here or with its id.
            InvalidRequestError: not parts of this transaction; nothing was asked for.
            TransactionTooLargeError: the parts name too many segments, or have too many frames; nothing was asked for,
                the transaction is open.
        """
        return self._ask(lambda: self.commit_async(parts), timeout, "commit")

    def commit_async(self, parts: Sequence[PartHandle] = ()) -> CommitFuture:
        """Ask for the commit; the future returns what :meth:`commit` returns."""
        self._writing.commit(parts)
        return CommitFuture(self._writing)

    def send_offsets(self, offsets: Offsets, group_metadata: object) -> None:
        """Commit a consumer group's offsets with this transaction: all of it happens, or nothing.

        The offsets are sent with the commit, and replace those given before for the same partition. If the group has
        rebalanced by the time of the commit, Kafka refuses them: the transaction ends as aborted, and the error names
        that reason.

        Args:
            offsets: confluent-kafka's ``TopicPartition`` objects, with their metadata and leader epochs, or (topic,
                partition) to the offset of the next record to read. The names in a :class:`rollbridge.Consumer`'s
                message are understood: a stream, and the partition number of a segment.
            group_metadata: Result of the consumer's ``consumer_group_metadata()``; or the name of a consumer group that
                has no members.

        Raises:
            InvalidRequestError: the metadata of one of them has more than 4,095 characters. Nothing was sent.
            InvalidRequestError: not such things, or too many; or, if the consumer is one of this process, offsets
                behind what it has handed out, or in a segment that waits for others. Nothing was sent.
            StreamNotFoundError, StreamRecreatedError, ZooKeeperUnavailableError: a stream whose partitions were named
                does not exist, is another one by now, or cannot be looked up; nothing was sent.
            TransactionTooLargeError: the offsets take more than is left of a commit's size, or their metadata more
                than 256 KiB; the others are committed.
            TransactionClosedError: its end was asked for.
        """
        member = parse_group_metadata(group_metadata)
        placed = self._writing.placed(_items(offsets))
        if placed:
            check_offsets(member, {where: offset for where, (offset, _) in placed.items()})
            self._writing.send_offsets(member, placed)

    def expect(
        self, stream: str, *, key: bytes | None = None, sn: Expected, scope: Scope | str = Scope.SEGMENT
    ) -> None:
        """Commit this transaction only if a stream still ends where ``sn`` says: compare-and-set for many records.

        The leader checks the condition when it merges the transaction: no other record can come between the check and
        the records of this transaction. Own records do not count. If the condition does not hold, the transaction ends
        as aborted, and the commit raises :class:`~rollbridge.errors.TransactionRefusedError` with the SN that is there.
        Several conditions must all hold.

        Args:
            stream: ``scope/stream`` of the transaction's group, or its adopted topic; it joins the transaction if it is
                not one of its streams, which need not write to it.
            key: Chooses the segment; may be left out for a stream of one segment.
            sn: SN or DLSN of the last record, as a conditional writer's ``tail`` or ``write`` returns it; ``EMPTY``:
                there is none.
            scope: ``segment``: the last record of the key's segment; ``key``: the last one with this key.

        Raises:
            InvalidRequestError: a condition that can never hold, or too many; the transaction stays usable.
            TransactionTooLargeError: the condition takes more than is left of a commit's size; the transaction stays
                usable.
            TransactionClosedError: its end was asked for.
            InvalidNameError, StreamNotFoundError, InvalidRequestError, ZooKeeperUnavailableError: as
                :meth:`write`; the transaction stays usable.
        """
        writing = self._writing
        known = writing.writer.part_streams.get(stream)
        name = stream if known is None else known.route.stream
        writing.expect(stream, new_condition(writing.runtime, name, key, sn, scope))

    def savepoint(self, notes: Mapping[str, bytes] | None = None, timeout: Timeout = None) -> Savepoint:
        """Make a savepoint: what was written, sent as offsets and expected so far can be gone back to.

        By :meth:`rollback_to`, here or in whatever process resumes the transaction, for as long as it is open. Records
        of parts that other processes write are not in it. One costs a message, so it may be made often.

        Args:
            notes: What to find again with the savepoint: names to bytes, up to 64 KiB. They are added to those of
                earlier savepoints, or replace them.
            timeout: How long to wait until the brokers have it; the connection's ``commit_timeout`` by default.

        Raises:
            InvalidRequestError: some coordinator does not know savepoints, or the notes are no such thing, or too many;
                no savepoint was made.
            TransactionTooLargeError: it would take more than a message may; no savepoint was made.
            BackpressureError, CoordinatorUnavailableError, ZooKeeperUnavailableError: no savepoint was made; try again.
            IncompleteError: the brokers refused something that it counts; the transaction can only be aborted.
            UnavailableError: not acknowledged in time; it is still being sent.
            TransactionClosedError: its end was asked for, or it has ended.
        """
        timeout_s = self._seconds(timeout)
        with answers_within(timeout_s):
            future = self.savepoint_async(notes)
        try:
            return future.result(timeout_s)
        except TimeoutError as fault:
            raise UnavailableError(str(fault)) from fault

    def savepoint_async(self, notes: Mapping[str, bytes] | None = None) -> SavepointFuture:
        """Make a savepoint without waiting for brokers; the future returns what :meth:`savepoint` returns.

        The first one of a connection looks in ZooKeeper whether all coordinators know savepoints.

        Raises as :meth:`savepoint` does where no savepoint was made.
        """
        fresh = check_notes(notes or {})
        self._writing.runtime.leaders.check_savepoints()
        return self._writing.save(fresh)

    def rollback_to(self, savepoint: Savepoint, timeout: Timeout = None) -> None:
        """Go back to a savepoint: what was written, sent as offsets or expected after it does not count.

        Futures of such records raise :class:`~rollbridge.errors.ConflictError`; those of earlier ones stay good. The
        transaction continues from there, with its present streams. Savepoints after this one are gone. Records that do
        not count still count towards the limits of a transaction, and it can be resumed and rolled back 1,000 times in
        all.

        Args:
            savepoint: One of this transaction that was made by this object, or the ``last_savepoint`` of a resumed one,
                or one that its former owner handed on.
            timeout: How long to wait until the brokers have all of it; the connection's ``commit_timeout`` by default.

        Raises:
            InvalidRequestError: not a savepoint of this transaction, or one that is gone; nothing was changed.
            BackpressureError, ZooKeeperUnavailableError, CoordinatorUnavailableError: nothing was changed; try again.
            IncompleteError: the brokers refused something; the transaction can only be aborted.
            UnavailableError: not acknowledged in time; it is rolled back here, and that is still being sent.
            TransactionClosedError: its end was asked for, or it has ended.
        """
        deadline, writing = Deadline(self._seconds(timeout)), self._writing
        writing.runtime.leaders.check_savepoints()
        future = writing.roll_back(savepoint, deadline)
        try:
            future.result(deadline.left())
        except TimeoutError as fault:
            raise UnavailableError(
                f"the brokers have not acknowledged that transaction {self.id} was rolled back to savepoint "
                f"{savepoint.number}; it is rolled back here, and that is still being sent"
            ) from fault
        writing.check_deliveries()

    def extend(self, lease: Duration, timeout: Timeout = None) -> datetime:
        """Extend the lease: the transaction may stay open until so long after now, never less than before.

        Leases need no renewal; this is for those that turn out too short. It takes a round trip to the leader.

        Args:
            lease: How long it may stay open from now on; at most the limit of the coordinators counts.
            timeout: How long to wait for the answer; the connection's ``commit_timeout`` by default.

        Returns:
            When its lease ends, as the leader has it: not later than before if another client has resumed the
            transaction.

        Raises:
            InvalidRequestError: longer than ``lease_max``, or not positive; nothing was changed.
            TransactionClosedError: its end was asked for, or it has ended; nothing was changed.
            OutcomeUnknownError: no answer in time; ask again.
        """
        timeout_s, writing = self._seconds(timeout), self._writing
        deadline = Deadline(timeout_s)
        writing.extend(encode_extend(extension_ms(lease, writing.runtime.lease_max)))
        try:
            writing.flush(deadline.left())
            with answers_within(deadline.left()):
                return writing.runtime.leaders.lease_end(writing.plan.group, self.id, deadline.left())
        except UnavailableError as fault:
            raise OutcomeUnknownError(
                f"whether the lease of transaction {self.id} was extended is not known: no answer within "
                f"{timeout_s:g} s ({fault}); ask again",
                transaction=str(self.id),
            ) from fault

    def abort(self, reason: str = "client", timeout: Timeout = None) -> None:
        """Abort the transaction, and return once that is decided: nothing of it will ever be visible.

        Asking again, from any process, gives the same answer.

        Raises:
            TransactionCommittedError: its commit was decided before.
            ClientFencedError: a newer session of this client, or the process that resumed it, has taken it over.
            OutcomeUnknownError: no answer in time; ask again, here or with its id.
        """
        self._ask(lambda: self.abort_async(reason), timeout, "abort")

    def abort_async(self, reason: str = "client") -> AbortFuture:
        """Ask for the abort; the future returns None."""
        self._writing.abort(reason)
        return AbortFuture(self._writing)

    def result(self) -> CommitResult:
        """Return the answer to the commit of a settled transaction, or raise its error."""
        return self._writing.result()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._writing.protocol.asked is not EndEvent.ABORT:
                self.commit()
            return
        try:
            patience = min(ABORT_ON_ERROR_S, self._writing.runtime.commit_timeout_s)
            self.abort(reason=f"{type(error).__name__}: {error}", timeout=patience)
        except RollbridgeError as second:
            logger.warning("transaction.abort_unseen txn=%s: %s", self.id, second)

    def __repr__(self) -> str:
        return f"<Transaction {self.id} of {', '.join(self.streams)}>"

    def _ask(self, ask: Callable[[], OutcomeFuture[T]], timeout: Timeout, requested_end: str) -> T:
        """Ask, retrying while that is not possible, and wait for the answer."""
        timeout_s = self._seconds(timeout)
        deadline = Deadline(timeout_s)
        future: OutcomeFuture[T] | None = None
        while future is None:
            try:
                future = ask()
            except UnavailableError as fault:
                if deadline.passed():
                    raise OutcomeUnknownError(
                        f"the {requested_end} of transaction {self.id} could not be asked for within {timeout_s:g} s "
                        f"({fault}); as far as is known here it is still open: ask again",
                        transaction=str(self.id),
                    ) from fault
                self._writing.runtime.sender.wait_until(lambda: False, _ASK_AGAIN_S)
        try:
            return future.result(deadline.left())
        except TransactionAbortedError as fault:
            if self._writing.protocol.asked is not EndEvent.ABORT and not isinstance(
                fault, TransactionRefusedError
            ):  # explains itself
                fault.tell(self._writing.runtime.leaders.explain(self._writing.plan.group, self.id).events)
            raise
        except TimeoutError:
            found = self._writing.runtime.leaders.explain(self._writing.plan.group, self.id)
        if future.done():  # decided while its leader was asked
            return self._ask(lambda: future, 0, requested_end)
        when = "that is over" if found.is_read else "its leader reads that"
        why = found.why or "its leader is at work"
        if (failure := self._writing.completion.failure) is not None:
            why = f"an abort is sent until a broker takes it, as this was refused: {failure}"
        unknown = OutcomeUnknownError(
            f"the {requested_end} of transaction {self.id} was asked for, but not answered within {timeout_s:g} s: "
            f"{why}; it is carried out once {when}, unless a newer session of this "
            "client begins before: ask again to learn the outcome",
            transaction=str(self.id),
        )
        unknown.tell(found.events)
        raise unknown


@checked()
class Part(RecordWriter[Writing]):
    """Part of a transaction that another process began. Made by :meth:`rollbridge.Bridge.join`.

    Nothing of a part counts unless the commit names its handle, so a process that dies or is retried leaves nothing
    behind.
    """

    __slots__ = ("_handle",)

    def __init__(self, writing: Writing) -> None:
        super().__init__(writing)
        self._handle: PartHandle | None = None

    def check_parts(self, parts: int, each: int | None = None) -> None:
        """Refuse a number of parts, this one included, if each writes to all segments, or to ``each`` at most.

        Raises:
            TransactionTooLargeError: they could not be committed together.
        """
        writer = self._writing.writer
        part_streams = writer.part_streams.values()
        segments = [(part_stream.place, number) for part_stream in part_streams for number in part_stream.route.numbers]
        check_parts(parts, segments, each, writer.room.limit)

    def finish(self, timeout: Timeout = None) -> PartHandle:
        """Wait until the brokers have everything; return the handle that the owner passes to ``commit(parts=[...])``.

        Nothing can be written afterwards. Asking again gives the same handle, or waits on.

        Raises:
            IncompleteError: the brokers refused something; let another part do the work again.
            UnavailableError: not acknowledged in time; finish again to wait on.
            TransactionClosedError: the transaction has ended meanwhile.
        """
        writing = self._writing
        with writing.lock:
            if not writing.finished and writing.completion.closed:
                raise writing.completion.refusal()
            writing.finished = True
        self.flush(timeout)
        if self._handle is None:
            writer = writing.writer
            self._handle = PartHandle(self.id, self.number, tuple(writer.pieces()), writer.frames)
        return self._handle


class EndFuture(OutcomeFuture[T]):
    """Answer to the request to end a transaction."""

    __slots__ = ("_writing",)

    _requested_end: ClassVar[str]

    def __init__(self, writing: OwnerWriting) -> None:
        self._writing = writing

    @property
    def _completion(self) -> Completion:
        return self._writing.completion

    def _wait(self, timeout: float | None) -> bool:
        """Wait for the outcome, and say in the log what it waits for; return False if it takes longer."""
        writing, completion = self._writing, self._completion
        deadline = None if timeout is None else Deadline(timeout)
        patience = TELL_AFTER_S
        while deadline is None or deadline.left() > patience:
            if completion.wait(patience):
                return True
            why = writing.runtime.leaders.explain(writing.plan.group, writing.id).why
            if why:
                # Without its id, so that those of one group are told of once a minute, however many they are.
                _waits.warning("transaction.waits end=%s: %s", self._requested_end, why)
                break
            patience *= 2  # a leader may be lost later, and many may be waiting
        return completion.wait(None if deadline is None else deadline.left())


class CommitFuture(EndFuture[CommitResult]):
    """Answer to a commit."""

    __slots__ = ()
    _requested_end = "commit"

    def _value(self) -> CommitResult:
        return self._writing.result()


class AbortFuture(EndFuture[None]):
    """Answer to an abort."""

    __slots__ = ()
    _requested_end = "abort"

    def _value(self) -> None:
        error = self._completion.error()
        if error is None:
            raise TransactionCommittedError(
                f"transaction {self._writing.id} is committed; it was not aborted",
                transaction=str(self._writing.id),
                reason="committed",
                code="already-committed",
            )
        if isinstance(error, OutcomeUnknownError | ClientFencedError):
            raise error


def _items(offsets: Offsets) -> Iterator[OffsetItem]:
    """Yield what is said of each, without those of which a consumer has no position yet."""
    if isinstance(offsets, Mapping):
        for (topic, partition), offset in offsets.items():
            yield topic, partition, offset, NO_DETAILS
    else:
        for item in offsets:
            if item.offset >= 0:
                yield item.topic, item.partition, item.offset, _details_of(item)


def _details_of(item: TopicPartition) -> OffsetDetails:
    epoch = cast("int | None", item.leader_epoch)  # None where there is none, whatever its stub says
    # With a zero at its end, as librdkafka commits it: where it reads one, it takes it for a C string.
    metadata = "" if item.metadata is None else item.metadata + "\0"
    return OffsetDetails(NO_EPOCH if epoch is None else epoch, metadata)
