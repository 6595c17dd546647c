"""Plans from which transactions begin, their conditions, and the base of a transaction and its parts.

Records go in, frames go out, deliveries are counted.

Callers hold ``_lock``, also while :meth:`~rollbridge.client.sender.FrameSender.send` waits for room. Delivery callbacks
run on the sender's thread and must not take it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

from rollbridge.base.arguments import NOT_BYTES, as_bytes, as_timestamp, checked, from_fault_on, not_text
from rollbridge.base.deadlines import Duration, Timeout, as_seconds, as_timedelta, in_chunks
from rollbridge.base.forks import GONE
from rollbridge.base.ids import TransactionId
from rollbridge.base.logs import limited
from rollbridge.base.metrics import TransactionCounts
from rollbridge.base.tracing import find_tracer
from rollbridge.buffer.frames import LABEL_CHARACTERS_MAX, STREAMS_MAX, BeginFrame
from rollbridge.client.frame_writer import HOLD_S, Join, Outbox, PartWriter, check_parts
from rollbridge.client.futures import Completion, FrameLimits, Headers, PartStream, WriteFuture
from rollbridge.client.outcomes import OutcomeClient, OutcomeTail
from rollbridge.client.protocol import EndEvent, TransactionProtocol
from rollbridge.client.results import PartHandle
from rollbridge.client.savepoints import SavepointFuture
from rollbridge.client.sender import Delivered, FrameSender, Undelivered
from rollbridge.client.sessions import ClientSessions, CommitNumbers
from rollbridge.commitlog.outcomes import RETAIN_DEFAULT
from rollbridge.config import ClientOptions
from rollbridge.errors import (
    IncompleteError,
    InvalidRequestError,
    TransactionClosedError,
    UnavailableError,
)
from rollbridge.kafka.records import Compression
from rollbridge.metadata.catalog import Catalog
from rollbridge.metadata.changes import moved_fault
from rollbridge.stream.conditions import (
    CONDITIONS_MAX,
    KEY_BYTES_MAX,
    Condition,
    Expected,
    Scope,
    StreamCondition,
    as_scope,
    as_sn,
    place_of,
)
from rollbridge.stream.config import FOREVER, StreamConfig
from rollbridge.stream.names import GroupName
from rollbridge.stream.reading import KeyLineage
from rollbridge.stream.routing import Route, StreamView

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_leases: Final = limited(logging.getLogger(f"{__name__}.leases"))


@dataclass(frozen=True, slots=True)
class TransactionContext:
    """ClientContext of one connection."""

    sender: FrameSender
    catalog: Catalog
    outcomes: OutcomeTail
    limits: FrameLimits
    commit_timeout_s: float
    commits: CommitNumbers
    lease_max: timedelta
    leaders: OutcomeClient
    connection: object = None
    """Stays open for as long as there is something that it has made."""
    counts: TransactionCounts = field(default_factory=TransactionCounts)
    tracer: Tracer | None = field(default_factory=find_tracer)
    """Records spans; None without OpenTelemetry."""


def check_not_moved(config: StreamConfig) -> None:
    """Raise InvalidRequestError if no leader takes transactions of a stream: an earlier version has moved it."""
    if config.was_moved:
        raise InvalidRequestError(f"{moved_fault(config.name).reason}; nothing was written")


@dataclass(frozen=True)
class BeginPlan:
    """Common part of all transactions that begin alike."""

    group: GroupName
    begin: BeginFrame
    routes: tuple[Route, ...]
    generation: int
    """Generation of the catalog when this was derived."""
    begin_value: bytes = field(init=False)
    buffers: tuple[tuple[str, int], ...] = field(init=False)
    """Topic and number of partitions of each stream's buffer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "begin_value", self.begin.encode())
        object.__setattr__(
            self, "buffers", tuple((route.buffer_topic, route.buffer_partitions) for route in self.routes)
        )

    @cached_property
    def id_prefix(self) -> int:
        """Upper bits of the ids: the reference epoch of the first stream."""
        return TransactionId.of(self.routes[0].epoch, 0).value


def extension_ms(lease: Duration, lease_max: timedelta) -> int:
    """Return for how long a lease is to be extended, ms.

    Raises:
        InvalidRequestError: not positive, or longer than a lease may be; nothing was changed.
    """
    lease = as_timedelta(lease)
    if not timedelta(milliseconds=1) <= lease <= lease_max:
        raise InvalidRequestError(
            f"a lease may be extended by up to {lease_max} from now on, not by {lease}; nothing was changed",
            code="invalid-timeout",
        )
    return lease // timedelta(milliseconds=1)


_PLANS_MAX: Final = 1_000
_Wanted = tuple[tuple[str, ...], Timeout, str | None, Timeout]
"""Arguments of a begin: streams, lease, label and time to remember the outcome."""


class Planner:
    """Maker of the plans of one client's transactions, kept until a stream or the client's session changes."""

    __slots__ = (
        "_catalog",
        "_client_name",
        "_lease_limit",
        "_lease_limits",
        "_options",
        "_outcomes",
        "_plans",
        "_plans_max",
        "_session",
        "_sessions",
    )

    def __init__(
        self,
        client_name: str,
        options: ClientOptions,
        catalog: Catalog,
        outcomes: OutcomeTail,
        sessions: ClientSessions,
        lease_limit: Callable[[GroupName], tuple[str, timedelta] | None],
        plans_max: int = _PLANS_MAX,
    ) -> None:
        """Start without plans, of which so many are kept.

        ``lease_limit`` looks up a group's leader and the longest lease it grants, if known.
        """
        self._client_name = client_name
        self._options = options
        self._catalog = catalog
        self._outcomes = outcomes
        self._sessions = sessions
        self._lease_limit = lease_limit
        self._lease_limits: dict[GroupName, timedelta] = {}
        self._plans: dict[_Wanted, BeginPlan] = {}
        self._plans_max = plans_max
        self._session = sessions.changes

    def plan(self, streams: tuple[str, ...], timeout: Timeout, label: str | None, retain: Timeout) -> BeginPlan:
        """Return the plan of a transaction; raise as :meth:`rollbridge.Bridge.begin` does."""
        wanted = (streams, timeout, label, retain)
        if self._session != self._sessions.changes:
            self._session = self._sessions.changes
            self._plans.clear()
        plan = self._plans.get(wanted)
        if plan is None or plan.generation != self._catalog.generation:
            plan = self._make(*wanted)
            if len(self._plans) >= self._plans_max:
                self._plans.clear()
            self._plans[wanted] = plan
        return plan

    def _make(self, streams: tuple[str, ...], timeout: Timeout, label: str | None, retain: Timeout) -> BeginPlan:
        if not streams:
            raise InvalidRequestError("a transaction needs at least one stream; nothing was written")
        if len(streams) > STREAMS_MAX:
            raise InvalidRequestError(
                f"a transaction spans at most {STREAMS_MAX} streams, not {len(streams)}; nothing was written"
            )
        if len(set(streams)) < len(streams):
            raise InvalidRequestError(f"a stream is named twice: {', '.join(streams)}; nothing was written")
        if label is not None and len(label) > LABEL_CHARACTERS_MAX:
            raise InvalidRequestError(
                f"a label has at most {LABEL_CHARACTERS_MAX} characters, not {len(label)}; nothing was written"
            )
        lease = self._options.lease if timeout is None else as_timedelta(timeout)
        kept = None if retain is None else as_timedelta(retain)
        if not timedelta(milliseconds=1) <= lease <= self._options.lease_max:
            raise InvalidRequestError(
                f"a transaction may stay open for up to {self._options.lease_max}, not for {lease}; "
                "nothing was written",
                code="invalid-timeout",
            )
        if kept is not None and kept < timedelta(0):
            raise InvalidRequestError(
                f"an outcome cannot be remembered for {kept}; nothing was written", code="invalid-timeout"
            )
        generation = self._catalog.generation
        views = [self._catalog.view(stream) for stream in streams]
        group = views[0].config.group
        for view in views:
            check_not_moved(view.config)
            if view.config.group != group:
                raise InvalidRequestError(
                    f"{streams[0]} belongs to group {group} and {view.config.name} to group {view.config.group}; "
                    "a transaction spans streams of one group only; nothing was written",
                    code="group-mismatch",
                )
        self._check_lease(group, lease)
        self._outcomes.follow(group, self._options.connect_timeout_s)
        routes = tuple(view.route for view in views)
        _warn_of_retention(routes, lease)
        begin = BeginFrame(
            self._client_name,
            self._sessions.epoch(group, self._options.admin_timeout_s),
            label,
            lease // timedelta(milliseconds=1),
            {route.stream: route.epoch for route in routes},
            RETAIN_DEFAULT if kept is None else kept // timedelta(milliseconds=1),
        )
        return BeginPlan(group, begin, routes, generation)

    def _check_lease(self, group: GroupName, lease: timedelta) -> None:
        """Refuse a lease over the limit of the group's leader if that is known; the leader refuses it anyway.

        A limit learnt before is enough to let a lease pass; it is looked up again before one is refused.
        """
        if lease <= self._lease_limits.get(group, timedelta(0)):
            return
        try:
            found = self._lease_limit(group)
        except UnavailableError:
            return
        if found is None:
            return
        leader, limit = found
        self._lease_limits[group] = limit
        if lease > limit:
            raise InvalidRequestError(
                f"coordinator {leader} lets a transaction of group {group} stay open for up to {limit} (its setting "
                f"lease_ms_max), not for {lease}; nothing was written",
                code="invalid-timeout",
            )


def _warn_of_retention(routes: Iterable[Route], lease: timedelta) -> None:
    for route in routes:
        if FOREVER < route.kept_ms < lease // timedelta(milliseconds=1):
            _leases.warning(
                "lease.beyond_retention topic=%s retention=%s lease=%s: records older than retention.ms at the "
                "commit may be deleted soon after; give a shorter lease, a longer retention.ms, or count from the "
                "commit: rollbridge stream update %s --timestamps commit",
                route.topic,
                timedelta(milliseconds=route.kept_ms),
                lease,
                route.topic,
            )


def new_condition(
    runtime: TransactionContext, stream: str, key: bytes | None, sn: Expected, scope: Scope | str
) -> Condition:
    """Return the condition that a user states about a stream.

    Raises:
        InvalidRequestError: no record of this key can have that SN.
    """
    if not isinstance(key, bytes | None):
        raise InvalidRequestError(f"a key is bytes, not {type(key).__name__}; nothing was sent")
    condition = Condition(as_sn(sn), as_scope(scope), key)
    try:
        _check_place(runtime.catalog.view(stream), stream, condition)
    except InvalidRequestError:
        # The SN may come from an epoch that is not cached here yet.
        _check_place(runtime.catalog.read(stream), stream, condition)
    return condition


def with_condition(known: tuple[StreamCondition, ...], condition: StreamCondition) -> tuple[StreamCondition, ...]:
    """Return the conditions of a transaction with one more.

    Raises:
        InvalidRequestError: too many, or their keys are too large.
    """
    whole = sum(len(item.condition.key or b"") for item in (*known, condition))
    if len(known) >= CONDITIONS_MAX or whole > KEY_BYTES_MAX:
        raise InvalidRequestError(
            f"a transaction has at most {CONDITIONS_MAX} conditions, and {KEY_BYTES_MAX} bytes of keys in them; this "
            "one was not taken, the others were"
        )
    return (*known, condition)


def _check_place(view: StreamView, stream: str, condition: Condition) -> None:
    if condition.key is None and len(view.history.active.segments) > 1:
        raise InvalidRequestError(
            f"{stream} has several segments: a condition needs a key to choose one; nothing was sent"
        )
    try:
        lineage = KeyLineage.of(view.config, view.history, condition.key)
    except UnavailableError:
        return  # a scale is in progress; the leader will check
    place_of(condition.expected, lineage)


logger = logging.getLogger(__name__)


@checked(but=("write", "put_batch", "lane", "is_prompt", "cut_older", "leave", "release"))
class Writing:
    """Writer of the records of one transaction. Safe to use from several threads."""

    __slots__ = (
        "_buffers",
        "_completion",
        "_finished",
        "_lock",
        "_looked_at",
        "_outbox",
        "_plan",
        "_protocol",
        "_runtime",
        "_turn",
        "_writer",
    )

    def __init__(
        self, runtime: TransactionContext, plan: BeginPlan, completion: Completion, counter: int, part: int
    ) -> None:
        self._runtime = runtime
        self._plan = plan
        self._completion = completion
        self._finished = False
        self._looked_at = -1  # generation of the catalog
        self._lock = threading.Lock()
        self._buffers = [(topic, counter % partitions) for topic, partitions in plan.buffers]
        # With several streams the commit waits for acknowledgements, so nothing is gained by holding frames back.
        self._outbox = Outbox() if len(self._buffers) == 1 else None
        self._protocol: TransactionProtocol[SavepointFuture] = TransactionProtocol(len(self._buffers))
        self._turn = threading.Lock()  # for steps of the protocol, and what they send: a holder never waits for room
        self._writer = PartWriter(
            completion,
            part,
            plan.routes,
            runtime.limits,
            self._emit,
            sticky=counter,
            client_epoch=plan.begin.client_epoch,
            join=self._joining(),
        )
        completion.group = plan.group
        completion.writers = (*completion.writers, self)

    def _joining(self) -> Join | None:
        """Return what has another stream join the transaction; None if that is not for this writer to do."""
        return None

    @property
    def id(self) -> TransactionId:
        """Id of the transaction; pass it to ``join`` in another process."""
        return self._completion.transaction

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams that the transaction was begun for, and that had joined it as far as is known here."""
        return tuple(self._plan.begin.streams)

    @property
    def completion(self) -> Completion:
        """Outcome that this writer shares with its futures."""
        return self._completion

    @property
    def records(self) -> int:
        """Number of records written through this object."""
        return self._writer.count

    @property
    def number(self) -> int:
        """Number of the part of the transaction that this object writes; 0 for its owner."""
        return self._writer.part

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
        self._lock.acquire()  # written out, since a `with` here is a tenth of what writing a record costs
        try:
            if self._finished or self._completion.closed:
                raise self._refusal()
            return self._writer.write(stream, key, value, headers, timestamp)
        except (TypeError, AttributeError):
            if not isinstance(stream, str):
                raise not_text("stream", stream) from None
            raise
        finally:
            self._lock.release()

    def write_all(self, stream: str, records: Iterable[tuple[bytes | None, bytes | None]]) -> int:
        """Write many records, given as key and value, and return their number; faster than one by one.

        Some hundreds of them are taken at a time; an iterator may take as long over them as it likes, and use this
        transaction and its connection.

        Raises:
            As :meth:`write`; the records before the one at fault were written. What the iterator raises; what it gave
                before was written.
        """

        def write(some: list[tuple[bytes | None, bytes | None]]) -> None:
            with self._lock:
                if self._finished or self._completion.closed:
                    raise self._refusal()
                before = self._writer.count
                try:
                    self._writer.write_some(stream, some)
                except NOT_BYTES as fault:
                    for key, value in from_fault_on(some[self._writer.count - before :], fault):
                        self._writer.write(stream, key, value, (), None)

        return in_chunks(records, write)

    @property
    def compression(self) -> Compression:
        """Codec of its frames."""
        return Compression(self._runtime.limits.compression)

    def part_stream(self, stream: str) -> PartStream:
        """Return a stream as this writer writes to it, with its segments and limits; for :meth:`put_batch`.

        Raises as :meth:`write` does for a stream that is none of the transaction's.
        """
        with self._lock:
            if self._finished or self._completion.closed:
                raise self._refusal()
            self._grow()
            return self._writer.part_stream_of(stream)

    def _grow(self) -> None:
        """Write to partitions that were added to adopted topics since the begin, as far as they are known here."""
        generation = self._runtime.catalog.generation
        if generation == self._looked_at:
            return
        self._looked_at = generation
        for part_stream in self._writer.part_streams.values():
            route = self._runtime.catalog.grown(part_stream.route)
            if route is not part_stream.route:
                part_stream.grow(route)

    def can_write_now(self, stream: str | None = None) -> bool:
        """Return True if a savepoint, and a batch for a stream, are handed over without waiting for anything else.

        So it is where everything goes to one buffer partition, and the stream has joined, unless another thread, which
        may wait for room, is writing. A prompt thread may hand them over then, see :mod:`rollbridge.client.sender`.
        """
        if self._outbox is None or self._lock.locked():
            return False
        return stream is None or stream in self._writer.part_streams

    def put_batch(self, stream: str, at: int, batch: bytes, first: int, last: int, records: int) -> None:
        """Write a ready-made record batch; see ``PartWriter.put_batch``.

        Raises:
            TransactionTooLargeError, BackpressureError: these records were not written.
            TransactionClosedError: the transaction has ended, or the part is finished.
        """
        with self._lock:
            if self._finished or self._completion.closed:
                raise self._refusal()
            self._writer.put_batch(stream, at, batch, first, last, records)

    def flush(self, timeout: Timeout = None) -> None:
        """Wait until the brokers have acknowledged everything written so far.

        Raises:
            IncompleteError: they refused something; the transaction can only be aborted.
            UnavailableError: not acknowledged in time; it is still being sent.
        """
        with self._lock:
            if not self._completion.closed:
                self._writer.cut_all()
                self._send_outbox()
            sent = sum(self._protocol.sent)
        timeout_s = self._seconds(timeout)
        if not self._runtime.sender.wait_until(lambda: self._protocol.answers >= sent, timeout_s):
            raise UnavailableError(
                f"the brokers have not acknowledged everything of transaction {self.id} within {timeout_s:g} s; "
                "it is still being sent"
            )
        self._check_deliveries()

    def leave(self) -> None:
        """Refuse everything from now on: the transaction belongs to the process that forked this one."""
        self._lock = GONE

    def cut_older(self, than_s: float) -> None:
        """Send the batches started before ``than_s`` (monotonic seconds), unless another thread is writing now.

        Frames that have waited in the outbox for a moment go, too. Called on the housekeeping thread, which must not
        wait for a writer's lock.
        """
        if self._lock.acquire(blocking=False):
            try:
                if not self._completion.closed:
                    self._grow()
                    self._writer.cut_older(than_s)
                    if self._outbox and self._outbox.since_s <= time.monotonic() - HOLD_S:
                        self._send_outbox()
            finally:
                self._lock.release()

    def release(self) -> None:
        """Release what only an open transaction needs; without it each would be garbage in a cycle."""
        self._writer.release()
        with self._turn:
            self._protocol.step(EndEvent.SETTLED)

    def _seconds(self, timeout: Timeout) -> float:
        return as_seconds(timeout, self._runtime.commit_timeout_s)

    def _refusal(self) -> Exception:
        if self._finished and not self._completion.settled:
            return TransactionClosedError(
                f"part {self._writer.part} of transaction {self.id} is finished; this record was not written",
                transaction=str(self.id),
            )
        return self._completion.refusal()

    def _check_deliveries(self) -> None:
        fault = self._completion.failure
        if fault is not None:
            raise IncompleteError(
                f"a record of transaction {self.id} could not be sent ({fault}); the transaction can only be aborted",
            ) from fault

    def _emit(self, place: int, key: bytes, value: bytes) -> None:
        """Take a finished frame; if this raises, it was not taken."""
        topic, partition = self._buffers[place]
        outbox = self._outbox
        if place:
            delivered = partial(self._delivered_at, place)
            self._runtime.sender.send(topic, partition, key, value, delivered)
            self._protocol.sent[place] += 1
        elif outbox is None:
            self._runtime.sender.send(topic, partition, key, value, self._delivered)
            self._protocol.sent[0] += 1
        else:
            if not outbox.has_room(value):
                self._send_outbox()
            if outbox.has_room(value):
                outbox.add(key, value)
            else:
                self._runtime.sender.send(topic, partition, key, value, self._delivered)
                self._protocol.sent[0] += 1

    def _send_outbox(self) -> None:
        """Send what waits in the outbox; if this raises, it still waits there."""
        if self._outbox:
            delivered = self._delivered if self._protocol.sent[0] else self._first_delivered
            self._runtime.sender.send(*self._buffers[0], *self._outbox.packed(), delivered)
            self._protocol.sent[0] += 1
            self._outbox.clear()

    def _send_with_outbox(self, key: bytes, value: bytes, delivered: Delivered, *, data: bool = True) -> None:
        """Send what waits in the outbox and a frame that ends the transaction; if this raises, nothing has changed."""
        assert self._outbox is not None
        whole = self._outbox.packed((key, value), data=data)
        self._runtime.sender.send(*self._buffers[0], *whole, delivered)
        self._outbox.clear()

    # On the delivery thread: these take no lock that a sending thread may hold, see rollbridge.client.sender.

    def _delivered(self, fault: Undelivered | None) -> None:
        if fault is not None:
            self._fail(fault)
        self._protocol.answered[0] += 1

    def _first_delivered(self, fault: Undelivered | None) -> None:
        self._delivered(fault)

    def _delivered_at(self, place: int, fault: Undelivered | None) -> None:
        if fault is not None:
            self._fail(fault)
        protocol = self._protocol
        with self._turn:
            protocol.answered[place] += 1
        if protocol.holds:
            self._send_due()

    def _send_due(self) -> None:
        """Send what has been held and is due; parts hold nothing."""

    def _fail(self, fault: Undelivered) -> None:
        if self._completion.failure is None:
            logger.warning("frame.undelivered txn=%s: %s", self.id, fault)
            what = f" ({fault.closed})" if fault.closed else ""
            self._completion.failure = fault.error(f"send a frame{what}")


@checked()
class Part(Writing):
    """Part of a transaction that another process began. Made by :meth:`rollbridge.Bridge.join`.

    Nothing of a part counts unless the commit names its handle, so a process that dies or is retried leaves nothing
    behind.
    """

    __slots__ = ("_handle",)

    def __init__(self, runtime: TransactionContext, plan: BeginPlan, completion: Completion, part: int) -> None:
        super().__init__(runtime, plan, completion, completion.transaction.counter, part)
        self._handle: PartHandle | None = None

    def check_parts(self, parts: int, each: int | None = None) -> None:
        """Refuse a number of parts, this one included, if each writes to all segments, or to ``each`` at most.

        Raises:
            TransactionTooLargeError: they could not be committed together.
        """
        part_streams = self._writer.part_streams.values()
        segments = [(part_stream.place, number) for part_stream in part_streams for number in part_stream.route.numbers]
        check_parts(parts, segments, each, self._writer.room.limit)

    def finish(self, timeout: Timeout = None) -> PartHandle:
        """Wait until the brokers have everything; return the handle that the owner passes to ``commit(parts=[...])``.

        Nothing can be written afterwards. Asking again gives the same handle, or waits on.

        Raises:
            IncompleteError: the brokers refused something; let another part do the work again.
            UnavailableError: not acknowledged in time; finish again to wait on.
            TransactionClosedError: the transaction has ended meanwhile.
        """
        with self._lock:
            if not self._finished and self._completion.closed:
                raise self._completion.refusal()
            self._finished = True
        self.flush(timeout)
        if self._handle is None:
            self._handle = PartHandle(self.id, self.number, tuple(self._writer.pieces()), self._writer.frames)
        return self._handle
