"""Transactions as the application sees them: write, then commit or abort, and learn the outcome.

The commit is asked for in the buffer of the first stream, behind everything else that went there. Writes to the buffers
of other streams must be acknowledged before, since there is no order between two partitions. In any case the commit log
decides: commits and aborts wait for the control record.

What is sent when is decided by :mod:`rollbridge.client.protocol`; here are the locks around it. Callers hold ``_lock``
while they write or ask for an end, also while they wait for room; ``_turn`` is held for a step of the protocol and what
it sends, by them and by delivery callbacks, which must not wait: see :mod:`rollbridge.client.sender`.

Tour of a commit, stop 1 of 8: see docs/tour.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar, cast

from confluent_kafka import TopicPartition

from rollbridge.base.arguments import checked
from rollbridge.base.deadlines import Deadline, Duration, Timeout, answers_within
from rollbridge.base.ids import OWNER_PART
from rollbridge.base.logs import limited
from rollbridge.base.metrics import Unfinished
from rollbridge.buffer.frames import (
    HEADER,
    MAGIC,
    REASON_CHARACTERS_MAX,
    SAVEPOINT_VERSION,
    STREAMS_MAX,
    VERSION,
    FrameKind,
    Manifest,
    PieceKey,
    encode_abort,
    encode_extend,
)
from rollbridge.client.frame_writer import Join, ManifestRoom, PartWriter, condition_bytes, offsets_bytes, piece_bytes
from rollbridge.client.futures import Completion, OutcomeFuture, PartStream, TransactionSpan
from rollbridge.client.protocol import EndAction, EndEvent
from rollbridge.client.results import CommitResult, Ends, PartHandle, Piece, Savepoint, find_ends
from rollbridge.client.savepoints import (
    SavepointFuture,
    SavepointLog,
    check_notes,
    pieces_of,
    records_by_stream,
)
from rollbridge.client.sender import Undelivered
from rollbridge.client.sessions import AskedCommit
from rollbridge.client.writing import (
    BeginPlan,
    TransactionContext,
    Writing,
    check_not_moved,
    extension_ms,
    new_condition,
    with_condition,
)
from rollbridge.commitlog.commit_order import CommitOrder
from rollbridge.commitlog.control import CONTROL_RECORD_BYTES_MAX, is_too_scattered, scattered_reason
from rollbridge.consumer.commits import check_offsets
from rollbridge.errors import (
    ClientFencedError,
    InvalidRequestError,
    OutcomeUnknownError,
    RollbridgeError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionRefusedError,
    TransactionTooLargeError,
    TruncatedError,
    UnavailableError,
)
from rollbridge.stream.conditions import Expected, Scope, StreamCondition
from rollbridge.stream.config import outlived
from rollbridge.stream.group_offsets import (
    METADATA_BYTES_MAX,
    NO_DETAILS,
    NO_EPOCH,
    PARTITIONS_MAX,
    GroupMember,
    GroupOffsets,
    OffsetDetails,
    metadata_bytes,
    parse_group_metadata,
)
from rollbridge.stream.names import is_internal

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)
_waits = limited(logging.getLogger(f"{__name__}.waits"))

T = TypeVar("T")

Offsets = Mapping[tuple[str, int], int] | Iterable[TopicPartition]
_Item = tuple[str, int, int, OffsetDetails]
"""Topic, partition, offset and its details."""

ABORT_ON_ERROR_S: Final = 10.0
"""Seconds that a ``with`` block that ends by an exception waits for the abort to be logged."""


TELL_AFTER_S: Final = 2.0
"""Seconds of waiting for an outcome after which the log tells that there is no coordinator, if so."""
_ASK_AGAIN_S: Final = 0.05


@checked(but=("wait_and_tell", "ask_again"), leave=("key", "sn"))
class Transaction(Writing):
    """Open transaction. Safe to use from several threads.

    Made by :meth:`rollbridge.Bridge.begin`. Nothing of it is visible before :meth:`commit`, and then all of it is.
    """

    __slots__ = (
        "_asked",
        "_before",
        "_conditions",
        "_former",
        "_offsets",
        "_pieces",
        "_result",
        "_savepoints",
        "_span",
    )

    def __init__(self, runtime: TransactionContext, plan: BeginPlan, counter: int) -> None:
        """Begin without waiting: the BEGIN frames go to all streams now, or to a single one with what comes next."""
        key = (plan.id_prefix | counter).to_bytes(16, "big")
        completion = Completion(key, plan.begin.client_name, plan.begin.client_epoch)
        self._prepare(runtime, plan, completion, counter, OWNER_PART)
        completion.counts = runtime.counts
        runtime.outcomes.waiting[key] = completion
        if runtime.tracer is not None:
            self._trace(runtime.tracer)
        header = self._key_of(FrameKind.BEGIN)
        if self._outbox is not None:
            self._outbox.add(header, plan.begin_value)
            return
        try:
            runtime.sender.send(*self._buffers[0], header, plan.begin_value, self._first_delivered)
            self._protocol.sent[0] = 1
            for place in range(1, len(self._buffers)):
                self._emit(place, header, plan.begin_value)
        except RollbridgeError as fault:
            runtime.outcomes.waiting.pop(key, None)  # the first of them may have been refused meanwhile
            if self._span is not None:
                self._span.fail(fault)
            completion.count_unfinished(Unfinished.INCOMPLETE)
            if self._protocol.sent[0]:
                self._send_abort_soon("its begin could not be sent to every stream")
            raise

    def _prepare(
        self, runtime: TransactionContext, plan: BeginPlan, completion: Completion, counter: int, part: int
    ) -> None:
        """Set up everything but the begin."""
        super().__init__(runtime, plan, completion, counter, part)
        completion.ends_here = True
        self._pieces: list[Piece] = []
        self._before: list[Piece] = []  # of parts before the present one, and in force
        self._former: list[PartWriter] = []  # that wrote here before the transaction was rolled back
        self._savepoints: SavepointLog | None = None
        self._offsets: dict[str, GroupOffsets] = {}
        self._conditions: tuple[StreamCondition, ...] = ()
        self._result: CommitResult | None = None
        self._asked: AskedCommit | None = None
        self._span: TransactionSpan | None = None

    def _joining(self) -> Join | None:
        return self._join

    def _join(self, name: str) -> PartStream:
        """Have a stream join the transaction; called under the lock. If this raises, nothing has changed."""
        known, plan = self._writer.part_streams, self._plan
        view = self._runtime.catalog.view(name)
        route = view.route
        if route.stream in known:
            return known[route.stream]
        check_not_moved(view.config)
        if view.config.group != plan.group:
            raise InvalidRequestError(
                f"{route.stream} belongs to group {view.config.group} and transaction {self.id} to group {plan.group}; "
                "a transaction spans streams of one group only; nothing was written",
                code="group-mismatch",
            )
        if len(plan.routes) >= STREAMS_MAX:
            raise InvalidRequestError(
                f"a transaction spans at most {STREAMS_MAX} streams; {route.stream} did not join {self.id}, and "
                "nothing was written"
            )
        self._send_outbox()
        place = len(plan.routes)
        streams = {**plan.begin.streams, route.stream: route.epoch}
        grown = replace(plan, begin=replace(plan.begin, streams=streams), routes=(*plan.routes, route))
        topic, partitions = grown.buffers[place]
        buffer = topic, self._completion.transaction.counter % partitions
        header = self._key_of(FrameKind.BEGIN, known=place)
        with self._turn:
            self._protocol.add_place()
        try:
            self._runtime.sender.send(*buffer, header, grown.begin_value, partial(self._delivered_at, place))
        except BaseException:
            with self._turn:
                self._protocol.drop_places(place)
            raise
        self._outbox = None  # from now on ends wait for acknowledgements, and nothing is gained by holding frames back
        self._buffers.append(buffer)
        self._plan = grown
        return self._writer.add(route)

    def _trace(self, tracer: Tracer) -> None:
        """Begin the span of the transaction, which ends with its outcome."""
        begin = self._plan.begin
        self._span = TransactionSpan(tracer, str(self.id), begin.client_name, tuple(begin.streams), begin.label)
        self._span.end_with(self._completion)

    @property
    def label(self) -> str | None:
        """Label given at its begin."""
        return self._plan.begin.label

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
        with self._lock:
            if self._protocol.asked is None and not self._completion.closed:
                others: list[Piece] = []
                if parts:
                    others = self._check_parts(parts)
                    self._check_size(others)
                    self._check_frames(parts)
                if self._completion.failure is None:
                    self._writer.cut_all()
                    self._pieces = [*self._own_pieces(), *others]
                    self._ask_for_commit()
                else:
                    with self._turn:
                        self._protocol.commit((b"", b""), failed=True)
                    self._give_up()
        return CommitFuture(self)

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
        self._send_offsets(parse_group_metadata(group_metadata), _items(offsets))

    def send_group_offsets(self, given: GroupOffsets) -> None:
        """Do what :meth:`send_offsets` does, for a caller who has read all of it from a request.

        Raises as :meth:`send_offsets` does.
        """
        self._send_offsets(
            given.member,
            ((*where, offset, given.details.get(where, NO_DETAILS)) for where, offset in given.offsets.items()),
        )

    def _send_offsets(self, member: GroupMember, items: Iterable[_Item]) -> None:
        placed = {where: (offset, beside) for where, offset, beside in self._placed(items)}
        if not placed:
            return
        wanted = {where: offset for where, (offset, _) in placed.items()}
        check_offsets(member, wanted)
        group = member.group_id
        fresh = GroupOffsets(group, wanted, *member[1:], {where: beside for where, (_, beside) in placed.items()})
        with self._lock:
            if self._finished or self._completion.closed:
                raise self._refusal()
            known = self._offsets.get(group)
            joined = fresh if known is None else known.joined(fresh)
            others = sum(len(item.offsets) for name, item in self._offsets.items() if name != group)
            if others + len(joined.offsets) > PARTITIONS_MAX:
                raise InvalidRequestError(
                    f"a transaction commits at most {PARTITIONS_MAX} offsets; these were not taken, the others were"
                )
            if fresh.details:
                self._check_metadata([joined, *(item for name, item in self._offsets.items() if name != group)])
            self._writer.room.take(
                offsets_bytes(joined) - (0 if known is None else offsets_bytes(known)),
                self.id,
                "these offsets were not taken, the others were",
            )
            self._offsets[group] = joined

    def _check_metadata(self, groups: Sequence[GroupOffsets]) -> None:
        size = metadata_bytes(groups)
        if size > METADATA_BYTES_MAX:
            raise TransactionTooLargeError(
                f"the offsets that transaction {self.id} commits would have {size} bytes of metadata, and "
                f"{METADATA_BYTES_MAX} are possible; these offsets were not taken, the others were",
                limit_bytes=METADATA_BYTES_MAX,
            )

    def _placed(self, items: Iterable[_Item]) -> Iterator[tuple[tuple[str, int], int, OffsetDetails]]:
        """Yield offsets by Kafka's topics and partitions, without those of removed segments, which have no readers."""
        for topic, partition, offset, beside in items:
            # Also of an adopted topic: its partitions are segments, but what follows a scale lies elsewhere.
            stream = None if "/" not in topic and is_internal(topic) else self._runtime.catalog.find(topic)
            if stream is None:
                yield (topic, partition), offset, beside
                continue
            with suppress(TruncatedError):
                yield self._runtime.catalog.place_of_partition(stream, partition), offset, beside

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
        part_stream = self._writer.part_streams.get(stream)
        wanted = new_condition(
            self._runtime, stream if part_stream is None else part_stream.route.stream, key, sn, scope
        )
        with self._lock:
            if self._finished or self._completion.closed:
                raise self._refusal()
            condition = StreamCondition(self._writer.part_stream_of(stream).place, wanted)
            conditions = with_condition(self._conditions, condition)
            self._writer.room.take(condition_bytes(condition), self.id, "this condition was not taken, the others were")
            self._conditions = conditions

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
        self._runtime.leaders.check_savepoints()
        with self._lock:
            if self._finished or self._completion.closed:
                raise self._refusal()
            self._check_deliveries()
            self._writer.cut_all()
            return self._save(self._own_pieces(), fresh)

    def _save(self, pieces: Sequence[Piece], notes: Mapping[str, bytes]) -> SavepointFuture:
        """Send a savepoint, or have it wait for other buffers; called under the lock, with all batches cut."""
        log = self._log()
        manifest = Manifest(pieces_of(pieces), tuple(self._offsets.values()), self._conditions)
        frame = log.make(manifest, notes, self.id)
        names = self.streams
        savepoint = Savepoint(
            self.id,
            frame.number,
            {**log.notes, **notes},
            records_by_stream(names, pieces),
            tuple(pieces),
            manifest.offsets,
            manifest.conditions,
        )
        sender = self._runtime.sender
        future = SavepointFuture(savepoint, self._completion, sender.wait_until)
        key, value = self._key_of(FrameKind.SAVEPOINT), frame.encode()
        if self._outbox is None:
            with self._turn:
                self._protocol.hold(future, (key, value))
        else:
            if not self._outbox.has_room(value):
                self._send_outbox()
            is_first = not self._protocol.sent[0]
            self._send_with_outbox(key, value, partial(self._savepoint_delivered, future, is_first))
            self._protocol.sent[0] += 1
        log.made(manifest, frame, notes)
        if self._protocol.holds:
            self._send_due()
        return future

    def _log(self) -> SavepointLog:
        if self._savepoints is None:
            self._savepoints = SavepointLog()
        return self._savepoints

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
        deadline = Deadline(self._seconds(timeout))
        self._runtime.leaders.check_savepoints()
        with self._lock:
            if self._finished or self._completion.closed:
                raise self._refusal()
            self._check_deliveries()
            log = self._log()
            log.check(savepoint, self.id)
            own = {piece.key: piece.records for piece in self._writer.pieces()}
            if own != {piece.key: piece.records for piece in savepoint.pieces if piece.part == self._writer.part}:
                with answers_within(deadline.left()):
                    part = self._runtime.leaders.claim_part(self._plan.group, self.id, deadline.left())
                self._go_on_as(part)
            self._before = [piece for piece in savepoint.pieces if piece.part != self._writer.part]
            kept = pieces_of(savepoint.pieces)
            for part_segment in [part_segment for writer in self._former for part_segment in writer.slots()]:
                part_segment.kept = kept.get(PieceKey(part_segment.part, part_segment.place, part_segment.number), 0)
            self._offsets = {item.group_id: item for item in savepoint.offsets}
            self._conditions = savepoint.conditions
            self._writer.room.bytes = self._room_of(savepoint)
            log.undone.append(range(savepoint.number + 1, log.number + 1))
            log.begin_anew(savepoint.notes)
            future = self._save(self._own_pieces(), {})
        try:
            future.result(deadline.left())
        except TimeoutError as fault:
            raise UnavailableError(
                f"the brokers have not acknowledged that transaction {self.id} was rolled back to savepoint "
                f"{savepoint.number}; it is rolled back here, and that is still being sent"
            ) from fault
        self._check_deliveries()

    def _go_on_as(self, part: int) -> None:
        """Continue under another part number, so that writes since the savepoint do not count any more.

        BEGIN frames say so in all buffers, as at a resume. They count only while no other client has resumed it.
        """
        old = self._writer
        header = self._key_of(FrameKind.BEGIN, part=part, former=old.part)
        if self._outbox is not None:
            self._outbox.clear()  # only what was written after the savepoint
        for place, buffer in enumerate(self._buffers):
            delivered = partial(self._delivered_at, place) if place else self._delivered
            self._runtime.sender.send_soon(*buffer, header, self._plan.begin_value, delivered)
            self._protocol.sent[place] += 1
        self._former.append(old)
        self._writer = PartWriter(
            self._completion,
            part,
            self._plan.routes,
            self._runtime.limits,
            self._emit,
            sticky=self._completion.transaction.counter,
            client_epoch=self._plan.begin.client_epoch,
            room=old.room,
            join=self._joining(),
        )
        self._writer.frames, self._writer.bytes = old.frames, old.bytes
        self._looked_at = -1
        old.release()

    def _room_of(self, savepoint: Savepoint) -> int:
        """Return the bytes of a manifest that names what a savepoint names, at most."""
        return ManifestRoom(0).bytes + (
            sum(piece_bytes(piece.key) for piece in savepoint.pieces)
            + sum(map(offsets_bytes, savepoint.offsets))
            + sum(map(condition_bytes, savepoint.conditions))
        )

    @property
    def records(self) -> int:
        """Number of records written through this object that count."""
        former = {writer.part for writer in self._former}
        return self._writer.count + sum(piece.records for piece in self._before if piece.part in former)

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
        timeout_s = self._seconds(timeout)
        deadline = Deadline(timeout_s)
        value = encode_extend(extension_ms(lease, self._runtime.lease_max))
        with self._lock:
            if self._finished or self._completion.closed:
                raise self._refusal()
            self._emit(0, self._key_of(FrameKind.EXTEND), value)
        try:
            self.flush(deadline.left())
            with answers_within(deadline.left()):
                return self._runtime.leaders.lease_end(self._plan.group, self.id, deadline.left())
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
        with self._lock:
            if self._protocol.asked is None and not self._completion.closed:
                key, value = self._key_of(FrameKind.ABORT), encode_abort(reason[:REASON_CHARACTERS_MAX])
                with self._turn:
                    self._protocol.abort()
                try:
                    if self._outbox is None:
                        self._emit(0, key, value)
                    else:
                        delivered = self._delivered if self._protocol.sent[0] else self._first_delivered
                        self._send_with_outbox(key, value, delivered, data=False)
                except BaseException:
                    self._take_back()
                    raise
                self._completion.closed = True
                self._runtime.commits.abort(self)
                if self._span is not None:
                    self._span.ask("abort", self._writer.count, self._writer.bytes)
        return AbortFuture(self)

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._protocol.asked is not EndEvent.ABORT:
                self.commit()
            return
        try:
            patience = min(ABORT_ON_ERROR_S, self._runtime.commit_timeout_s)
            self.abort(reason=f"{type(error).__name__}: {error}", timeout=patience)
        except RollbridgeError as second:
            logger.warning("transaction.abort_unseen txn=%s: %s", self.id, second)

    def __repr__(self) -> str:
        return f"<Transaction {self.id} of {', '.join(self.streams)}>"

    def result(self) -> CommitResult:
        """Return the answer to the commit of a settled transaction, or raise its error."""
        error = self._completion.error()
        if error is not None:
            if error.code == TransactionAbortedError.code and self._protocol.asked is not EndEvent.COMMIT:
                error.code = "already-aborted"
            raise error
        if not self._is_mine():
            raise self._completion.fenced_error()
        if self._result is None:
            # The result does not refer to the transaction, which refers to it: each would be garbage in a cycle.
            find = partial(_ends_of, self._completion, self._plan.begin.places, self._merged_pieces())
            self._result = CommitResult(self.id, self._records_committed(), self._completion.offset, find)
            self._tell_what_is_old()
        return self._result

    def _tell_what_is_old(self) -> None:
        record = self._completion.record
        if record is None:
            return
        for place in sorted({piece.stream for piece in self._pieces}):
            route = self._plan.routes[place]
            old = outlived(route.topic, route.kept_ms, record.begun_ms, record.decided_ms)
            if old is not None:
                logger.warning("transaction.past_retention txn=%s: it is committed, and %s", self.id, old)

    def wait_and_tell(self, timeout: float | None, requested_end: str) -> bool:
        """Wait for the outcome, and say in the log what it waits for; return False if it takes longer."""
        deadline = None if timeout is None else Deadline(timeout)
        patience = TELL_AFTER_S
        while deadline is None or deadline.left() > patience:
            if self._completion.wait(patience):
                return True
            why = self._runtime.leaders.explain(self._plan.group, self.id).why
            if why:
                # Without its id, so that those of one group are told of once a minute, however many they are.
                _waits.warning("transaction.waits end=%s: %s", requested_end, why)
                break
            patience *= 2  # a leader may be lost later, and many may be waiting
        return self._completion.wait(None if deadline is None else deadline.left())

    def _is_mine(self) -> bool:
        """Return True if a known commit is the one that was asked for here, and not that of a later owner."""
        return self._completion.owner == self._writer.part

    def _records_committed(self) -> int:
        return sum(piece.records for piece in self._pieces)  # exactly what the manifest names is merged

    def _own_pieces(self) -> list[Piece]:
        """Return the pieces that the manifest names in addition to the parts of other processes."""
        pieces = self._writer.pieces()
        return [*self._before, *pieces] if self._before else pieces

    def _merged_pieces(self) -> Sequence[Piece]:
        """Return the pieces that contain the first and the last committed record."""
        return self._pieces

    def check_aborted(self) -> None:
        """Return if the settled transaction is aborted; raise otherwise."""
        error = self._completion.error()
        if error is None:
            raise TransactionCommittedError(
                f"transaction {self.id} is committed; it was not aborted",
                transaction=str(self.id),
                reason="committed",
                code="already-committed",
            )
        if isinstance(error, OutcomeUnknownError | ClientFencedError):
            raise error

    def _check_parts(self, parts: Sequence[PartHandle]) -> list[Piece]:
        """Return the pieces of the named parts."""
        seen: set[int] = {piece.part for piece in self._own_pieces()} | {self._writer.part}
        for handle in parts:
            if handle.transaction != self.id:
                raise InvalidRequestError(
                    f"part {handle.part} is one of transaction {handle.transaction}, not of {self.id}; "
                    "nothing was asked for"
                )
            if handle.part in seen:
                raise InvalidRequestError(f"part {handle.part} of {self.id} is named twice; nothing was asked for")
            seen.add(handle.part)
        return [piece for handle in parts for piece in handle.pieces]

    def _check_size(self, others: Sequence[Piece]) -> None:
        """Refuse parts of others that would make the manifest too large, before anything is asked for."""
        if not others or self._writer.room.has(sum(piece_bytes(piece.key) for piece in others)):
            return
        limit = self._writer.room.limit
        size = len(self._encode_manifest([*self._own_pieces(), *others]))  # what is counted is a little more
        if size > limit:
            raise TransactionTooLargeError(
                f"the commit of transaction {self.id} would be a message of {size} bytes, and {limit} are possible: "
                f"its parts have written to {len(others)} segments together; nothing was asked for, the transaction is "
                "open: commit fewer parts and the others in another transaction, or abort",
                limit_bytes=limit,
            )

    def _check_frames(self, parts: Sequence[PartHandle]) -> None:
        """Refuse parts of others that could make the commit record too large, before anything is asked for."""
        own = len(self._own_pieces())  # each may have an open batch, which becomes a frame
        frames = self._writer.frames + own + sum(handle.frames for handle in parts)
        if is_too_scattered(frames, own + sum(len(handle.pieces) for handle in parts)):
            raise TransactionTooLargeError(
                f"transaction {self.id} cannot be committed with all of its {len(parts)} parts: "
                f"{scattered_reason(frames)}; nothing was asked for, the transaction is open: commit fewer parts and "
                "the others in another transaction, or abort",
                limit_bytes=CONTROL_RECORD_BYTES_MAX,
            )

    def ask_again(self, order: CommitOrder) -> bool:
        """Send the COMMIT frame once more, which only updates what the leader knows of the commit order.

        Return False if the first one is held, so that this one would come too soon, or was taken back.
        """
        with self._lock:
            with self._turn:
                if self._protocol.step(EndEvent.MISSED) is not EndAction.COMMIT:
                    return False
            key = self._key_of(FrameKind.COMMIT, order)
            self._runtime.sender.send_soon(*self._buffers[0], key, self._encode_manifest(self._pieces), _ignore)
            self._completion.is_missing = False
        return True

    def abort_again(self) -> None:
        """Send the ABORT frame once more."""
        self._completion.is_missing = False
        self._send_abort_soon("client")

    def doubt(self) -> None:
        """Have the leader asked what has become of its end, unless it cannot have heard of it: that is still sent."""
        if self._protocol.answered[0]:
            self._runtime.outcomes.doubt(self._plan.group, self._completion)

    def is_stranded(self) -> bool:
        """Return True if the buffer with its COMMIT frame has gone with its stream; its leader is asked about it."""
        route = self._plan.routes[0]
        if not self._runtime.catalog.has_lost(route):
            return False
        why = f"stream {route.stream}, or its transaction buffer, was deleted before its commit was read"
        self._runtime.outcomes.strand(self._plan.group, self._completion, why)
        return True

    def _encode_manifest(self, pieces: Iterable[Piece]) -> bytes:
        entries = tuple((*piece.key, piece.records) for piece in pieces)
        if self._offsets or self._conditions:
            return _manifest_with(entries, tuple(self._offsets.values()), self._conditions)
        return _manifest(entries)

    def _ask_for_commit(self) -> None:
        """Send the COMMIT frame, or leave that to the last answer for another buffer."""
        manifest = self._encode_manifest(self._pieces)
        if self._outbox is not None and not self._outbox.has_room(manifest):
            self._send_outbox()
        asked = self._runtime.commits.of(self._plan.group, self._plan.begin.client_epoch).ask(self)
        self._asked = asked
        pieces = self._pieces
        records = pieces[0].records if len(pieces) == 1 else sum([piece.records for piece in pieces])
        self._completion.asked = (time.monotonic(), records, self._writer.bytes)
        if self._span is not None:
            self._span.ask("commit", records, self._writer.bytes)
        frame = self._key_of(FrameKind.COMMIT, asked.order), manifest
        with self._turn:
            action = self._protocol.commit(frame, failed=self._completion.failure is not None)
        try:
            if action is EndAction.FAIL:
                self._give_up()
            elif self._outbox is not None:
                delivered = self._commit_delivered if self._protocol.sent[0] else self._whole_delivered
                self._send_with_outbox(*frame, delivered)
            elif action is EndAction.COMMIT:
                self._runtime.sender.send(*self._buffers[0], *frame, self._commit_delivered)
        except BaseException:
            asked.is_void = True  # a repetition gets another number
            self._take_back()
            raise
        self._completion.closed = True

    def _take_back(self) -> None:
        with self._turn:
            self._protocol.unsent()

    def _give_up(self) -> None:
        """Abort after a send that failed before the commit was asked for, and tell everybody at once."""
        self._send_abort_soon(f"incomplete: {self._completion.failure}")
        self._completion.fail()

    def _send_abort_soon(self, reason: str) -> None:
        """Queue an ABORT frame; it takes back a commit that was asked for, and releases later ones that wait for it."""
        value = encode_abort(reason[:REASON_CHARACTERS_MAX])
        key = self._key_of(FrameKind.ABORT, None if self._asked is None else self._asked.order)
        self._runtime.sender.send_soon(*self._buffers[0], key, value, self._abort_delivered)

    def _key_of(
        self, kind: FrameKind, order: CommitOrder | None = None, *, part: int = -1, known: int = 0, former: int = -1
    ) -> bytes:
        """Return the header of a frame.

        Args:
            kind: Its kind.
            order: Position of an end among those of the connection.
            part: Whose frame it is; by default the present part's.
            known: Of a BEGIN frame with which a stream joins: how many there were before.
            former: Of a BEGIN frame with which this owner goes on under another part number: the one before.
        """
        epoch = self._plan.begin.client_epoch
        fields = (known, former + 1, 0) if order is None else order.fields()
        version = SAVEPOINT_VERSION if kind is FrameKind.SAVEPOINT else VERSION
        whose = self._writer.part if part < 0 else part
        return HEADER.pack(MAGIC, version, kind, self._completion.key, whose, *fields, epoch)

    def _send_due(self) -> None:
        """Send what has been held and is due, on whichever thread this is."""
        unsent: list[SavepointFuture] = []
        with self._turn:
            for savepoint, frame in self._protocol.due(failed=self._completion.failure is not None):
                if frame is not None:
                    delivered = (
                        self._commit_delivered
                        if savepoint is None
                        else partial(self._savepoint_delivered, savepoint, False)
                    )
                    self._runtime.sender.send_soon(*self._buffers[0], *frame, delivered)
                elif savepoint is not None:
                    unsent.append(savepoint)
                else:
                    self._send_abort_soon(f"incomplete: {self._completion.failure}")
        for future in unsent:
            future.settle(self._completion.failure)

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
                self._runtime.sender.wait_until(lambda: False, _ASK_AGAIN_S)
        try:
            return future.result(deadline.left())
        except TransactionAbortedError as fault:
            if self._protocol.asked is not EndEvent.ABORT and not isinstance(
                fault, TransactionRefusedError
            ):  # explains itself
                fault.tell(self._runtime.leaders.explain(self._plan.group, self.id).events)
            raise
        except TimeoutError:
            found = self._runtime.leaders.explain(self._plan.group, self.id)
        if future.done():  # decided while its leader was asked
            return self._ask(lambda: future, 0, requested_end)
        when = "that is over" if found.is_read else "its leader reads that"
        unknown = OutcomeUnknownError(
            f"the {requested_end} of transaction {self.id} was asked for, but not answered within {timeout_s:g} s: "
            f"{found.why or 'its leader is at work'}; it is carried out once {when}, unless a newer session of this "
            "client begins before: ask again to learn the outcome",
            transaction=str(self.id),
        )
        unknown.tell(found.events)
        raise unknown

    # On the delivery thread: these take no lock that a sending thread may hold, see rollbridge.client.sender.

    def _first_delivered(self, fault: Undelivered | None) -> None:
        self._delivered(fault)
        if fault is not None and fault.is_refusal:
            # The broker itself refused it, so no leader will ever hear of this transaction, or report on it.
            self._runtime.outcomes.waiting.pop(self._completion.key, None)
            self._completion.fail()

    def _whole_delivered(self, fault: Undelivered | None) -> None:
        """Handle the delivery report of a message that was the whole transaction, from its BEGIN to its COMMIT."""
        self._first_delivered(fault)
        if fault is not None:
            self._commit_delivered(fault)

    def _savepoint_delivered(self, future: SavepointFuture, is_first: bool, fault: Undelivered | None) -> None:
        (self._first_delivered if is_first else self._delivered)(fault)
        future.settle(self._completion.failure)

    def _commit_delivered(self, fault: Undelivered | None) -> None:
        if fault is not None:
            self._fail(fault)
            with self._turn:
                if self._protocol.step(EndEvent.REFUSED) is EndAction.ABORT:
                    self._send_abort_soon(f"its commit was refused: {fault}")

    def _abort_delivered(self, fault: Undelivered | None) -> None:
        _ignore(fault)
        if fault is not None and self._asked is not None:
            self._asked.is_void = True


class CommitFuture(OutcomeFuture[CommitResult]):
    """Answer to a commit."""

    __slots__ = ("_transaction",)

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    @property
    def _completion(self) -> Completion:
        return self._transaction.completion

    def _wait(self, timeout: float | None) -> bool:
        return self._transaction.wait_and_tell(timeout, "commit")

    def _value(self) -> CommitResult:
        return self._transaction.result()


class AbortFuture(OutcomeFuture[None]):
    """Answer to an abort."""

    __slots__ = ("_transaction",)

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    @property
    def _completion(self) -> Completion:
        return self._transaction.completion

    def _wait(self, timeout: float | None) -> bool:
        return self._transaction.wait_and_tell(timeout, "abort")

    def _value(self) -> None:
        self._transaction.check_aborted()


def _ends_of(completion: Completion, places: Mapping[str, int], pieces: Sequence[Piece]) -> Ends:
    record = completion.record
    return (None, None) if record is None else find_ends(record, places, pieces)


@lru_cache(maxsize=4096)
def _manifest(entries: tuple[tuple[int, int, int, int], ...]) -> bytes:
    """Return the value of a COMMIT frame. Small transactions mostly have one of a few shapes, hence the cache."""
    return _manifest_with(entries, (), ())


def _manifest_with(
    entries: tuple[tuple[int, int, int, int], ...],
    offsets: tuple[GroupOffsets, ...],
    conditions: tuple[StreamCondition, ...],
) -> bytes:
    return Manifest({PieceKey(*entry[:3]): entry[3] for entry in entries}, offsets, conditions).encode()


def _items(offsets: Offsets) -> Iterator[_Item]:
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


def _ignore(fault: Undelivered | None) -> None:
    """Log an end that could not be delivered: an abort that does not arrive becomes one by expiry in the end."""
    if fault is not None:
        logger.warning("end.undelivered: %s", fault)
