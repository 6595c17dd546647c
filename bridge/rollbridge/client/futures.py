"""Cheap futures: thousands of writes share the one outcome of their transaction.

Each transaction has one :class:`Completion`, settled by the commit log. A
:class:`~rollbridge.client.futures.WriteFuture` is three references; its DLSN is computed from the commit record on
demand. All futures of a transaction resolve, or fail, at the same instant. A :class:`PartSegment` is one segment as one
part writes to it; it finds the records again after the commit.

Threads: ``settle`` runs on the thread that tails the commit logs, ``fail`` on the delivery thread or that of a caller.
Done callbacks run there, too, so they must not block. One module lock, held for a few instructions, guards events and
callback lists; callbacks run without it.

Source: DistributedLog transactions, "all the write futures will be satisfied with their written DLSNs […] failed
together. there is no partial failure state".
"""

from __future__ import annotations

import logging
import sys
import threading
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from rollbridge.base.arguments import checked
from rollbridge.base.attribution import append_step
from rollbridge.base.avro import encode_text
from rollbridge.base.deadlines import LightFuture, call_back
from rollbridge.base.forks import module_lock
from rollbridge.base.ids import OWNER_PART, SegmentId, TransactionId, local_sequence
from rollbridge.base.metrics import CommitAsked, TransactionCounts, Unfinished
from rollbridge.base.sn import DLSN
from rollbridge.buffer.frames import FRAME_BYTES_DEFAULT
from rollbridge.commitlog.control import (
    EXPIRED,
    FENCED,
    ControlKind,
    ControlRecord,
    decode_control,
    has_reason,
    owner_of,
    peek_kind,
)
from rollbridge.errors import (
    ClientFencedError,
    ConflictError,
    CorruptDataError,
    IncompleteError,
    InvalidRequestError,
    OutcomeUnknownError,
    RollbridgeError,
    TransactionAbortedError,
    TransactionClosedError,
    TransactionCommittedError,
    TransactionRefusedError,
)
from rollbridge.kafka.record_limits import AppendRecord, RecordLimits
from rollbridge.kafka.records import RecordBuilder
from rollbridge.stream.config import RECORD_BYTES_MAX_DEFAULT, HeaderForm
from rollbridge.stream.names import GroupName
from rollbridge.stream.routing import Route

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ONE: Final = b"\1"
_ALL: Final = sys.maxsize
_NAME_AT = 3
"""Offset of the client name in a control record without a reason: behind version, kind and an empty text."""
_STEPS_BYTES_MAX: Final = 36 * 1024
"""Bytes that the steps of a batch's records take at which it is cut."""
_RUN_BYTES: Final = 64
"""Maximum bytes of a run's header without the steps."""
_STEP_BYTES_MAX: Final = 6
"""Bytes of one step: counts have 40 bits."""
_creation: Final = module_lock()
"""Lock for the creation of events and callback lists, which most transactions never need."""


class TransactionWriter(Protocol):
    """Writer of a transaction in this process."""

    def cut_older(self, than_s: float) -> None:
        """Send the batches that were started before ``than_s``, in monotonic seconds."""

    def leave(self) -> None:
        """Refuse all further use, in a forked process."""

    def release(self) -> None:
        """Release what only an open transaction needs: the outcome is known."""


_UNFINISHED: Final = {
    "transaction-expired": Unfinished.EXPIRED,
    TransactionRefusedError.code: Unfinished.REFUSED,
    IncompleteError.code: Unfinished.INCOMPLETE,
    ClientFencedError.code: Unfinished.FENCED,
    OutcomeUnknownError.code: Unfinished.UNKNOWN,
}
"""Ends of transactions by the code of their error."""


class Completion:
    """Outcome of one transaction, shared by all who write it or wait for it in this process.

    Attributes:
        closed: True if nothing may be written any more: its end was asked for here, or is known.
        ends_here: True if its end is asked for in this process, through a :class:`rollbridge.Transaction`.
        settled: True if the outcome is known, or will not be learned here.
        stranded: Why no leader can read its commit; empty if that is not so.
        is_missing: True if its leader did not know it when it was asked, and has not been told again.
        failure: First send that failed, if one did.
        writers: Writers of the transaction in this process, until it is settled.
        client_name: Client that has begun it; None if not known here.
        held_by: Client that writes it here, who may have resumed it; None if that is not known.
        epoch: Epoch of the session in which it is written here; 0 if it is none.
        group: Group whose commit log will tell its outcome; None if nothing is written here.
        asked: Its commit, once that was asked for here.
        counts: Where its end is counted; None if it was not begun here.
    """

    __slots__ = (
        "_callbacks",
        "_event",
        "_fenced",
        "_record",
        "_unknown",
        "_value",
        "asked",
        "client_name",
        "closed",
        "counts",
        "ends_here",
        "epoch",
        "failure",
        "group",
        "held_by",
        "is_missing",
        "key",
        "offset",
        "settled",
        "stranded",
        "writers",
    )

    def __init__(self, key: bytes, client_name: str | None = None, epoch: int = 0, owner: str | None = None) -> None:
        self.key = key
        self.client_name = client_name
        self.held_by = client_name if owner is None else owner
        self.epoch = epoch
        self.group: GroupName | None = None
        self.closed = False
        self.ends_here = False
        self.settled = False
        self.stranded = ""
        self.is_missing = False
        self.failure: Exception | None = None
        self.writers: tuple[TransactionWriter, ...] = ()
        self.offset = -1
        self.asked: CommitAsked | None = None
        self.counts: TransactionCounts | None = None
        self._value: bytes | None = None
        self._record: ControlRecord | None = None
        self._unknown: str | None = None
        self._fenced = False
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[], object]] | None = None

    @property
    def transaction(self) -> TransactionId:
        """Id of the transaction."""
        return TransactionId.from_bytes(self.key)

    def is_of_another(self, value: bytes) -> bool:
        """Return True if a control record with this id ends a transaction of another client.

        Ids are given out again by a ZooKeeper that was set back and has not been repaired.
        """
        name = self.client_name
        if name is None or value.startswith(encode_text(name), _NAME_AT):
            return False  # the usual case: no reason is given, and nothing is decoded
        try:
            return decode_control(self.key, value).client_name != name
        except CorruptDataError:
            return False

    def settle(self, value: bytes, offset: int) -> None:
        """Settle with the control record from the commit log; the record is decoded on demand."""
        self._value = value
        self.offset = offset
        self._finish()

    def give_up(self, why: str) -> None:
        """Release all waiters with an unknown outcome: this process will not learn it."""
        if not self.settled:
            self._unknown = why
            self._finish()
            self.count_unfinished(Unfinished.UNKNOWN)

    def leave(self, why: str) -> None:
        """Give up in a forked process: it has no waiters to wake, and its locks cannot be trusted."""
        for writer in self.writers:
            writer.leave()
        self._unknown = why
        self._event, self._callbacks, self.writers = None, None, ()
        self.closed = self.settled = True

    def fence(self) -> None:
        """Stop waiting: a newer session or owner has taken the transaction over."""
        if not self.settled:
            self._fenced = True
            self._finish()
            self.count_unfinished(Unfinished.FENCED)

    def fail(self) -> None:
        """Settle as incomplete: a send failed before the commit was asked for, so only an abort is possible."""
        self._finish()
        self.count_unfinished(Unfinished.INCOMPLETE)

    def count_unfinished(self, how: Unfinished | None = None) -> None:
        """Count the end of a settled transaction that is not committed, once; by its error unless said."""
        with _creation:
            counts, self.counts = self.counts, None
        if counts is not None:
            code = getattr(self.error(), "code", "")
            counts.note_unfinished(how or _UNFINISHED.get(code, Unfinished.ABORTED))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the outcome; return False if it is not known in time."""
        with _creation:
            if self.settled:
                return True
            event = self._event
            if event is None:
                event = self._event = threading.Event()
        return event.wait(timeout_s)

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once the outcome is known: now, or on the thread that tails the commit log."""
        with _creation:
            if not self.settled:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        call_back(callback, logger, "a transaction")

    @property
    def record(self) -> ControlRecord | None:
        """Control record of the transaction; None while the outcome is not known here, or if it never will be."""
        if self._record is None and self._value is not None:
            self._record = decode_control(self.key, self._value)
        return self._record

    def error(self) -> RollbridgeError | None:
        """Return why a settled transaction is not committed; None if it is. A new object each time, to be raised."""
        if peek_kind(self._value) is ControlKind.COMMIT:
            return None  # the usual case, for which nothing has to be decoded
        record = self.record
        name = str(self.transaction)
        if self._fenced or (record is not None and record.reason == FENCED):
            return self.fenced_error()
        if record is None:
            if self._unknown is not None:
                return OutcomeUnknownError(
                    f"the outcome of transaction {name} is not known: {self._unknown}", transaction=name
                )
            return self._incomplete(name)
        if record.reason == EXPIRED:
            return TransactionAbortedError(
                f"the lease of transaction {name} ran out before a commit was asked for; nothing of it is visible",
                transaction=name,
                reason=record.reason,
                code="transaction-expired",
            )
        if self.failure is not None:
            return self._incomplete(name)
        if record.refused is not None:
            return TransactionRefusedError(
                f"{record.reason or record.refused}; transaction {name} is aborted, nothing of it is visible",
                transaction=name,
                stream=record.refused.stream,
                key=record.refused.key,
                expected=record.refused.expected,
                actual=record.refused.actual,
            )
        return TransactionAbortedError(
            f"transaction {name} is aborted ({record.reason}); nothing of it is visible",
            transaction=name,
            reason=record.reason,
        )

    def refusal(self) -> RollbridgeError:
        """Return the error of a write that comes after the end."""
        name = str(self.transaction)
        if not self.settled:
            return TransactionClosedError(
                f"the end of transaction {name} was asked for; this record was not written", transaction=name
            )
        return self.error() or self.committed_error()

    def committed_error(self) -> TransactionCommittedError:
        """Return the refusal of a request that a committed transaction cannot meet."""
        name = str(self.transaction)
        return TransactionCommittedError(
            f"transaction {name} is committed; this request changed nothing", transaction=name, reason="committed"
        )

    def fenced_error(self) -> ClientFencedError:
        """Return the error for an owner that has been replaced."""
        return ClientFencedError(
            f"transaction {self.transaction} belongs to a newer session of its client, or to the process that resumed "
            "it; this request changed nothing: ask for the outcome by the id"
        )

    @property
    def owner(self) -> int:
        """Part number of the owner that asked for the commit of a committed transaction: 0 unless it was resumed."""
        record = self.record if self._value is not None and has_reason(self._value) else None
        return OWNER_PART if record is None else owner_of(record.reason)

    def _incomplete(self, name: str) -> IncompleteError:
        error = IncompleteError(
            f"a record of transaction {name} could not be sent ({self.failure}), so the transaction is aborted; "
            "nothing of it is visible",
        )
        error.__cause__ = self.failure
        return error

    def _finish(self) -> None:
        with _creation:
            self.closed = True
            self.settled = True
            event, callbacks, self._callbacks = self._event, self._callbacks, None
            writers, self.writers = self.writers, ()
        if event is not None:
            event.set()
        for callback in callbacks or ():
            call_back(callback, logger, "a transaction")
        for writer in writers:
            writer.release()


@checked()
class OutcomeFuture(LightFuture[T]):
    """Future of something that ends with its transaction."""

    __slots__ = ()

    @property
    @abstractmethod
    def _completion(self) -> Completion:
        """Completion whose outcome decides."""

    @abstractmethod
    def _value(self) -> T:
        """Return the result, once the outcome is known, or raise the error."""

    def result(self, timeout: float | None = None) -> T:
        """Wait for the outcome of the transaction.

        Args:
            timeout: Seconds; None waits without end.

        Raises:
            InvalidRequestError: no timeout is given, and neither commit nor abort was asked for; the transaction is
                as it was.
            TimeoutError: not known in time; ask again.
            TransactionAbortedError, IncompleteError: nothing of the transaction is visible.
            OutcomeUnknownError: this process will not learn it.
        """
        self._check_end(timeout)
        completion = self._completion
        if not completion.settled and not self._wait(timeout):
            left = "" if completion.closed or not completion.ends_here else "; its commit has not been asked for"
            raise TimeoutError(
                f"the outcome of transaction {completion.transaction} is not known after {timeout} s{left}"
            )
        return self._value()

    def _wait(self, timeout: float | None) -> bool:
        return self._completion.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, then return what :meth:`result` would raise of the outcome; None if the transaction is committed.

        Raises:
            InvalidRequestError, TimeoutError: as :meth:`result`.
        """
        self._check_end(timeout)
        return super().exception(timeout)

    def _check_end(self, timeout: float | None) -> None:
        """Raise InvalidRequestError for a wait without time-out on a transaction whose end was not asked for."""
        completion = self._completion
        if timeout is None and completion.ends_here and not completion.closed:
            raise InvalidRequestError(
                f"the outcome of transaction {completion.transaction} is waited for before its commit was asked for, "
                "so this would wait for ever. Call commit() first; flush() waits until what was written has reached "
                "the brokers; with a timeout, this waits for another thread's commit. Nothing was changed"
            )

    def done(self) -> bool:
        """Return True if the outcome is known."""
        return self._completion.settled

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback`` with this future once the outcome is known.

        The callback runs on the thread that tails the commit log and must not block; its exceptions are logged.
        """
        self._completion.when_settled(lambda: callback(self))


# Slots


Headers = Sequence[tuple[str, bytes | None]]
HeaderList = list[tuple[str, bytes | None]]

FRAME_BYTES_MIN: Final = 16 * 1024
"""Minimum bytes of a frame: below, overhead outweighs records. Segments take batches this much larger than a record."""


class FrameLimits:
    """Bounds of frames and of a transaction's part, in bytes; the codec is a number as in a batch's attributes."""

    __slots__ = ("_layouts", "compression", "frame_bytes", "record_bytes", "transaction_bytes")

    def __init__(
        self,
        *,
        frame_bytes: int = FRAME_BYTES_DEFAULT,
        transaction_bytes: int = 16 * 1024**3,
        record_bytes: int = 64 * 1024**2,
        compression: int = 0,
    ) -> None:
        self.frame_bytes = frame_bytes
        self.transaction_bytes = transaction_bytes
        self.record_bytes = record_bytes
        self.compression = compression
        self._layouts: dict[int, FrameLayout] = {}

    def layout(self, route: Route) -> FrameLayout:
        """Return how the records of a route are put into frames; computed once for each route."""
        found = self._layouts.get(id(route))
        if found is None or found.route is not route:
            if len(self._layouts) >= _LAYOUTS_MAX:
                self._layouts.clear()
            found = self._layouts[id(route)] = FrameLayout(route, self)
        return found


def no_batch(offset: int, timestamp: int | None, key: bytes | None, value: bytes | None, headers: Headers) -> None:
    """Take nothing: replaces a batch's ``append`` while no batch is open."""


class PartSegment:
    """Segment as one part writes to it: the open batch, and what has been written so far."""

    __slots__ = (
        "_ends",
        "_runs",
        "append",
        "before",
        "builder",
        "completion",
        "first",
        "first_in_batch",
        "in_batch",
        "is_each",
        "kept",
        "last",
        "number",
        "opened_s",
        "part",
        "place",
        "ready",
        "segment",
        "steps",
        "stream",
    )

    def __init__(
        self, completion: Completion, part: int, stream: str, place: int, number: int, *, is_each: bool = False
    ) -> None:
        self.completion = completion
        self.part = part
        self.stream = stream
        self.place = place
        self.number = number
        self.append: AppendRecord = no_batch
        self.builder: RecordBuilder | None = None
        self.in_batch = 0
        self.first_in_batch = 0
        self.opened_s = 0.0
        self.ready: tuple[bytes, bytes] | None = None
        self.before = 0
        self.first = 0
        self.last = 0
        self.segment: SegmentId | None = None
        self.kept = _ALL
        """Number of records that count: all, until the transaction is rolled back to a savepoint."""
        self.is_each = is_each
        """True if each record carries rollbridge's header, not only the first of a batch."""
        self.steps = bytearray()
        """Increase of each record's count over that of the one before, for the open batch, but for its first."""
        # Found on demand: lists that are not made need not be collected.
        self._runs: Sequence[int] = ()
        self._ends: Sequence[int] = ()

    def add_steps(self, count: int, records: int) -> None:
        """Note that the last records were appended one after the other, the last of them with the count before this."""
        if records:
            append_step(self.steps, count - records - self.last)
            self.steps += _ONE * (records - 1)
            self.last = count - 1

    @property
    def records(self) -> int:
        """Number of records written to the segment: in batches that were cut, and in the open one."""
        return self.before + self.in_batch

    def local_sequence(self, count: int) -> int:
        """Return the local sequence number of this part's ``count``-th record."""
        return local_sequence(self.part, count)

    def locate(self, index: int, count: int) -> DLSN:
        """Return the DLSN of the part's ``index``-th record in this segment; raise the transaction's error."""
        if index >= self.kept:
            raise ConflictError(
                f"transaction {self.completion.transaction} was rolled back to a savepoint before this record: it does "
                "not count, and is visible nowhere",
                code="rolled-back",
            )
        error = self.completion.error()
        if error is not None:
            raise error
        if not self._ends:
            self._find_runs()
        if index >= self._ends[-1]:
            raise self.completion.committed_error()  # without this part, or without this record of it
        run = bisect_right(self._ends, index)
        before = self._ends[run - 1] if run else 0
        assert self.segment is not None
        return DLSN.of(self.segment, self._runs[run] + index - before, local_sequence(self.part, count))

    def _find_runs(self) -> None:
        """Find this part's records of the segment in the commit record."""
        record = self.completion.record
        assert record is not None  # the transaction is committed
        found: list[int] = []
        ends: list[int] = []
        total = 0
        for segment, runs in record.placement.get(self.stream, {}).items():
            if record.written_number(self.stream, segment) == self.number:
                self.segment = segment
                for run in runs:
                    if run.part == self.part:
                        total += run.count
                        found.append(run.base_offset)
                        ends.append(total)
        self._runs, self._ends = found, ends or (0,)


def room_for_steps(batch_bytes: int) -> tuple[int, int, int]:
    """Share the bytes of the largest batch between records and what the first header says of others.

    Returns:
        Bytes of steps from which on a batch is cut; the number of records between two looks at that, in which they may
        grow as much again; the bytes that are left for the records.
    """
    steps_max = min(_STEPS_BYTES_MAX, batch_bytes // 16)
    return steps_max, max(steps_max // _STEP_BYTES_MAX, 1), batch_bytes - 2 * steps_max - _RUN_BYTES


_OWN_ROOM: Final = room_for_steps(RECORD_BYTES_MAX_DEFAULT)
_LAYOUTS_MAX: Final = 1_000


class FrameLayout(RecordLimits):
    """Limits of the records of one stream and sizes of their frames, as its route and the limits of a client give them.

    Attributes:
        each: True if each record carries rollbridge's header, not only the first of a frame.
        steps_max: Bytes of steps from which on a frame is cut.
        chunk: Number of records between two looks at that.
    """

    __slots__ = ("chunk", "each", "route", "steps_max")

    def __init__(self, route: Route, limits: FrameLimits) -> None:
        record_bytes_max = min(route.record_bytes_max, limits.record_bytes)
        super().__init__(
            route.stream,
            route.topic,
            route.limits,
            record_bytes_max=record_bytes_max,
            batch_bytes=min(limits.frame_bytes, max(record_bytes_max, FRAME_BYTES_MIN)),
        )
        self.route = route
        # Compaction may take the first record of a batch, and with it what it says of the others.
        self.each = route.headers is HeaderForm.EACH or self.needs_key
        # Our own topics take batches of a megabyte at least.
        if route.limits is not None:
            room_of = room_for_steps(route.limits.batch_room)
        elif route.record_bytes_max > RECORD_BYTES_MAX_DEFAULT:
            room_of = room_for_steps(route.record_bytes_max)
        else:
            room_of = _OWN_ROOM
        self.steps_max, self.chunk, room = room_of
        if self.batch_bytes > room and not self.each:
            self.batch_bytes = room


class PartStream:
    """Stream as one part writes to it."""

    __slots__ = (
        "bounds",
        "each",
        "hash_of",
        "layout",
        "place",
        "route",
        "slots",
        "steps_max",
        "sticky",
    )

    def __init__(self, route: Route, place: int, limits: FrameLimits, sticky: int) -> None:
        layout = limits.layout(route)
        self.route = route
        self.layout = layout
        self.place = place
        self.bounds = route.bounds
        self.hash_of = route.hash_of
        self.each = layout.each
        self.steps_max = layout.steps_max
        count = len(route.numbers)
        self.slots: list[PartSegment | None] = [None] * count
        self.sticky = sticky % count

    def grow(self, route: Route) -> None:
        """Replace the route by one that has grown from it: its first segments are the same."""
        self.route, self.bounds, self.hash_of = route, route.bounds, route.hash_of
        self.slots += [None] * (len(route.numbers) - len(self.slots))


@checked()
class WriteFuture(OutcomeFuture[DLSN]):
    """Future DLSN of one record; resolves after the commit, fails after the abort."""

    # The frame writer sets the fields, without an __init__: this object is made a million times a second.
    __slots__ = ("count", "index", "part_segment")

    part_segment: PartSegment
    """Slot of the segment that holds the record."""
    index: int
    """Number of the record among those of its part in the segment, from 0."""
    count: int
    """Number of the record among all those of its part, from 0."""

    @property
    def local_sequence(self) -> int:
        """Local sequence number of the record in its transaction, known at once."""
        return self.part_segment.local_sequence(self.count)

    @property
    def _completion(self) -> Completion:
        return self.part_segment.completion

    def result(self, timeout: float | None = None) -> DLSN:
        """Wait for the outcome of the transaction; return the record's DLSN.

        Args:
            timeout: Seconds; None waits without end.

        Raises:
            ConflictError: the record does not count, as the transaction was rolled back to a savepoint before it.

        Raises also what the future of a commit does.
        """
        if self.index >= self.part_segment.kept:
            return self._value()  # which raises
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, then return what :meth:`result` would raise; None if it would not."""
        if self.index >= self.part_segment.kept:
            timeout = 0.0
        return super().exception(timeout)

    def done(self) -> bool:
        """Return True if :meth:`result` would not wait."""
        return self.index >= self.part_segment.kept or super().done()

    def _value(self) -> DLSN:
        return self.part_segment.locate(self.index, self.count)


TRANSACTION: Final = "rollbridge transaction"


class TransactionSpan:
    """Span of one transaction, which ends with its outcome."""

    __slots__ = ("_span",)

    def __init__(
        self, tracer: Tracer, identifier: str, client: str, streams: tuple[str, ...], label: str | None
    ) -> None:
        """Begin the span now, as a child of the current one."""
        self._span = tracer.start_span(
            TRANSACTION,
            attributes={
                "messaging.system": "rollbridge",
                "messaging.client.id": client,
                "rollbridge.transaction": identifier,
                "rollbridge.streams": list(streams),
                **({} if label is None else {"rollbridge.label": label}),
            },
        )

    def ask(self, wish: str, records: int, size: int) -> None:
        """Record that its end was asked for, with the records and bytes that were written."""
        self._span.set_attributes({"messaging.batch.message_count": records, "rollbridge.bytes": size})
        self._span.add_event(wish)

    def end_with(self, completion: Completion) -> None:
        """End the span once the outcome is known."""
        completion.when_settled(lambda: self._end(completion.error()))

    def fail(self, error: Exception) -> None:
        """End the span of a transaction that could not begin."""
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._span.set_attribute("rollbridge.outcome", "committed" if error is None else "not committed")
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.record_exception(error)
        self._span.end()
