"""Plans from which transactions begin, their conditions, and what transactions and their parts are inside.

Records go in, frames go out, deliveries are counted.

What is sent when is decided by :mod:`rollbridge.client.protocol`; here are the locks around it. Callers hold ``lock``
while they write or ask for an end, also while :meth:`~rollbridge.client.sender.FrameSender.send` waits for room;
``turn`` is held for a step of the protocol and what it sends, by them and by delivery callbacks, which run on the
sender's thread and must not wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Final, Self

from rollbridge.base.deadlines import Deadline, Duration, Timeout, answers_within, as_timedelta
from rollbridge.base.forks import GONE
from rollbridge.base.ids import OWNER_PART, TransactionId
from rollbridge.base.logs import limited
from rollbridge.base.metrics import TransactionCounts, Unfinished
from rollbridge.base.tracing import find_tracer
from rollbridge.buffer.frames import (
    HEADER,
    LABEL_CHARACTERS_MAX,
    MAGIC,
    REASON_CHARACTERS_MAX,
    SAVEPOINT_VERSION,
    STREAMS_MAX,
    VERSION,
    BeginFrame,
    FrameKind,
    Manifest,
    PieceKey,
    encode_abort,
)
from rollbridge.client.frame_writer import (
    HOLD_S,
    Join,
    ManifestRoom,
    Outbox,
    PartWriter,
    condition_bytes,
    offsets_bytes,
    piece_bytes,
)
from rollbridge.client.futures import Completion, FrameLimits, PartStream, TransactionSpan
from rollbridge.client.outcomes import OutcomeClient, OutcomeTail
from rollbridge.client.protocol import EndAction, EndEvent, TransactionProtocol
from rollbridge.client.results import CommitResult, Ends, PartHandle, Piece, Savepoint, find_ends
from rollbridge.client.savepoints import SavepointFuture, SavepointLog, pieces_of, records_by_stream
from rollbridge.client.sender import Delivered, FrameSender, Undelivered
from rollbridge.client.sessions import AskedCommit, ClientSessions, CommitNumbers
from rollbridge.commitlog.commit_order import CommitOrder
from rollbridge.commitlog.control import CONTROL_RECORD_BYTES_MAX, is_too_scattered, scattered_reason
from rollbridge.commitlog.outcomes import RETAIN_DEFAULT
from rollbridge.config import ClientOptions
from rollbridge.errors import (
    IncompleteError,
    InvalidRequestError,
    RollbridgeError,
    TransactionAbortedError,
    TransactionClosedError,
    TransactionTooLargeError,
    TruncatedError,
    UnavailableError,
)
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
from rollbridge.stream.config import FOREVER, StreamConfig, outlived
from rollbridge.stream.group_offsets import (
    METADATA_BYTES_MAX,
    PARTITIONS_MAX,
    GroupMember,
    GroupOffsets,
    OffsetDetails,
    metadata_bytes,
)
from rollbridge.stream.names import GroupName, Partition, is_internal
from rollbridge.stream.reading import KeyLineage
from rollbridge.stream.routing import Route, StreamView

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_leases: Final = limited(logging.getLogger(f"{__name__}.leases"))


@dataclass(frozen=True, slots=True)
class TransactionContext:
    """Parts of a connection that its transactions use."""

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

    @classmethod
    def of(cls, group: GroupName, begin: BeginFrame, catalog: Catalog) -> Self:
        """Return the plan as it was when a transaction began, even if its streams have been scaled since."""
        routes = tuple(catalog.route(name, epoch) for name, epoch in begin.streams.items())
        return cls(group, begin, routes, catalog.generation)

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


class Writing:
    """Writer of the records of one part of a transaction: what a transaction or a part is inside.

    Safe to use from several threads.
    """

    __slots__ = (
        "_looked_at",
        "buffers",
        "completion",
        "finished",
        "lock",
        "outbox",
        "plan",
        "protocol",
        "runtime",
        "turn",
        "writer",
    )

    def __init__(
        self,
        runtime: TransactionContext,
        plan: BeginPlan,
        completion: Completion,
        part: int,
        join: Join | None = None,
    ) -> None:
        """Start with nothing sent; ``join`` has another stream join, where that is for this writer to do."""
        counter = completion.transaction.counter
        self.runtime = runtime
        self.plan = plan
        self.completion = completion
        self.finished = False
        self._looked_at = -1  # generation of the catalog
        self.lock = threading.Lock()
        self.buffers = [(topic, counter % partitions) for topic, partitions in plan.buffers]
        # With several streams the commit waits for acknowledgements, so nothing is gained by holding frames back.
        self.outbox = Outbox() if len(self.buffers) == 1 else None
        self.protocol: TransactionProtocol[SavepointFuture] = TransactionProtocol(len(self.buffers))
        self.turn = threading.Lock()  # for steps of the protocol, and what they send: a holder never waits for room
        self.writer = PartWriter(
            completion,
            part,
            plan.routes,
            runtime.limits,
            self.emit,
            sticky=counter,
            client_epoch=plan.begin.client_epoch,
            join=join,
        )
        completion.group = plan.group
        completion.writers = (*completion.writers, self)

    @property
    def id(self) -> TransactionId:
        """Id of the transaction."""
        return self.completion.transaction

    @property
    def records(self) -> int:
        """Number of records written here that count."""
        return self.writer.count

    def part_stream(self, stream: str) -> PartStream:
        """Return a stream as this writer writes to it, with its segments and limits; for :meth:`put_batch`.

        Raises as :meth:`rollbridge.Transaction.write` does for a stream that is none of the transaction's.
        """
        with self.lock:
            self.check_open()
            self._grow()
            return self.writer.part_stream_of(stream)

    def _grow(self) -> None:
        """Write to partitions that were added to adopted topics since the begin, as far as they are known here."""
        generation = self.runtime.catalog.generation
        if generation == self._looked_at:
            return
        self._looked_at = generation
        for part_stream in self.writer.part_streams.values():
            route = self.runtime.catalog.grown(part_stream.route)
            if route is not part_stream.route:
                part_stream.grow(route)

    def can_write_now(self, stream: str | None = None) -> bool:
        """Return True if a savepoint, and a batch for a stream, are handed over without waiting for anything else.

        So it is where everything goes to one buffer partition, and the stream has joined, unless another thread, which
        may wait for room, is writing. A prompt thread may hand them over then, see :mod:`rollbridge.client.sender`.
        """
        if self.outbox is None or self.lock.locked():
            return False
        return stream is None or stream in self.writer.part_streams

    def put_batch(self, stream: str, at: int, batch: bytes, first: int, last: int, records: int) -> None:
        """Write a ready-made record batch; see ``PartWriter.put_batch``.

        Raises:
            TransactionTooLargeError, BackpressureError: these records were not written.
            TransactionClosedError: the transaction has ended, or the part is finished.
        """
        with self.lock:
            self.check_open()
            self.writer.put_batch(stream, at, batch, first, last, records)

    def flush(self, timeout_s: float) -> None:
        """Wait until the brokers have acknowledged everything written so far.

        Raises as :meth:`rollbridge.Transaction.flush` does.
        """
        with self.lock:
            if not self.completion.closed:
                self.writer.cut_all()
                self._send_outbox()
            sent = sum(self.protocol.sent)
        if not self.runtime.sender.wait_until(lambda: self.protocol.answers >= sent, timeout_s):
            raise UnavailableError(
                f"the brokers have not acknowledged everything of transaction {self.id} within "
                f"{timeout_s:g} s; it is still being sent"
            )
        self.check_deliveries()

    def leave(self) -> None:
        """Refuse everything from now on: the transaction belongs to the process that forked this one."""
        self.lock = GONE

    def cut_older(self, than_s: float) -> None:
        """Send the batches started before ``than_s`` (monotonic seconds), unless another thread is writing now.

        Frames that have waited in the outbox for a moment go, too. Called on the housekeeping thread, which must not
        wait for a writer's lock.
        """
        if self.lock.acquire(blocking=False):
            try:
                if not self.completion.closed:
                    self._grow()
                    self.writer.cut_older(than_s)
                    if self.outbox and self.outbox.since_s <= time.monotonic() - HOLD_S:
                        self._send_outbox()
            finally:
                self.lock.release()

    def release(self) -> None:
        """Release what only an open transaction needs; without it each would be garbage in a cycle."""
        self.writer.release()
        with self.turn:
            self.protocol.step(EndEvent.SETTLED)

    def check_open(self) -> None:
        """Raise the refusal of a write that comes after the end."""
        if self.finished or self.completion.closed:
            raise self.refusal()

    def refusal(self) -> Exception:
        """Return the error of a write that comes after the end."""
        if self.finished and not self.completion.settled:
            return TransactionClosedError(
                f"part {self.writer.part} of transaction {self.id} is finished; this record was not written",
                transaction=str(self.id),
            )
        return self.completion.refusal()

    def check_deliveries(self) -> None:
        fault = self.completion.failure
        if fault is not None:
            raise IncompleteError(
                f"a record of transaction {self.id} could not be sent ({fault}); the transaction can only be aborted",
            ) from fault

    def emit(self, place: int, key: bytes, value: bytes) -> None:
        """Take a finished frame; if this raises, it was not taken."""
        topic, partition = self.buffers[place]
        outbox = self.outbox
        if place:
            delivered = partial(self._delivered_at, place)
            self.runtime.sender.send(topic, partition, key, value, delivered)
            self.protocol.sent[place] += 1
        elif outbox is None:
            self.runtime.sender.send(topic, partition, key, value, self._delivered)
            self.protocol.sent[0] += 1
        else:
            if not outbox.has_room(value):
                self._send_outbox()
            if outbox.has_room(value):
                outbox.add(key, value)
            else:
                self.runtime.sender.send(topic, partition, key, value, self._delivered)
                self.protocol.sent[0] += 1

    def _send_outbox(self) -> None:
        """Send what waits in the outbox; if this raises, it still waits there."""
        if self.outbox:
            delivered = self._delivered if self.protocol.sent[0] else self._first_delivered
            self.runtime.sender.send(*self.buffers[0], *self.outbox.packed(), delivered)
            self.protocol.sent[0] += 1
            self.outbox.clear()

    def _send_with_outbox(self, key: bytes, value: bytes, delivered: Delivered, *, data: bool = True) -> None:
        """Send what waits in the outbox and a frame that ends the transaction; if this raises, nothing has changed."""
        assert self.outbox is not None
        whole = self.outbox.packed((key, value), data=data)
        self.runtime.sender.send(*self.buffers[0], *whole, delivered)
        self.outbox.clear()

    # On the delivery thread: these take no lock that a sending thread may hold, see rollbridge.client.sender.

    def _delivered(self, fault: Undelivered | None) -> None:
        if fault is not None:
            self._fail(fault)
        self.protocol.answered[0] += 1

    def _first_delivered(self, fault: Undelivered | None) -> None:
        self._delivered(fault)

    def _delivered_at(self, place: int, fault: Undelivered | None) -> None:
        if fault is not None:
            self._fail(fault)
        protocol = self.protocol
        with self.turn:
            protocol.answered[place] += 1
        if protocol.holds:
            self._send_due()

    def _send_due(self) -> None:
        """Send what has been held and is due; parts hold nothing."""

    def _fail(self, fault: Undelivered) -> None:
        if self.completion.failure is None:
            logger.warning("frame.undelivered txn=%s: %s", self.id, fault)
            what = f" ({fault.closed})" if fault.closed else ""
            self.completion.failure = fault.error(f"send a frame{what}")


OffsetItem = tuple[str, int, int, OffsetDetails]
"""Topic or stream, partition, offset and its details."""


class OwnerWriting(Writing):
    """Writing of the owner of a transaction, who ends it: what a :class:`rollbridge.Transaction` is inside.

    Attributes:
        before: Pieces of parts before the present one that are in force.
    """

    __slots__ = (
        "_asked",
        "_former",
        "_result",
        "before",
        "conditions",
        "offsets",
        "pieces",
        "savepoints",
        "span",
    )

    def __init__(
        self,
        runtime: TransactionContext,
        plan: BeginPlan,
        completion: Completion,
        part: int,
        *,
        joins: bool = True,
    ) -> None:
        """Set up everything but the begin; with ``joins``, other streams may join."""
        super().__init__(runtime, plan, completion, part, self._join if joins else None)
        completion.ends_here = True
        self.pieces: list[Piece] = []
        self.before: list[Piece] = []
        self._former: list[PartWriter] = []  # that wrote here before the transaction was rolled back
        self.savepoints: SavepointLog | None = None
        self.offsets: dict[str, GroupOffsets] = {}
        self.conditions: tuple[StreamCondition, ...] = ()
        self._result: CommitResult | None = None
        self._asked: AskedCommit | None = None
        self.span: TransactionSpan | None = None

    @classmethod
    def begun(cls, runtime: TransactionContext, plan: BeginPlan, counter: int) -> OwnerWriting:
        """Begin without waiting: the BEGIN frames go to all streams now, or to a single one with what comes next."""
        begin = plan.begin
        key = (plan.id_prefix | counter).to_bytes(16, "big")
        completion = Completion(key, begin.client_name, begin.client_epoch)
        self = cls(runtime, plan, completion, OWNER_PART)
        completion.counts = runtime.counts
        runtime.outcomes.waiting[key] = completion
        if runtime.tracer is not None:
            self.span = TransactionSpan(
                runtime.tracer, str(self.id), begin.client_name, tuple(begin.streams), begin.label
            )
            self.span.end_with(completion)
        if self.outbox is not None:
            self.outbox.add(self._key_of(FrameKind.BEGIN), plan.begin_value)
            return self
        try:
            self.send_begin()
        except RollbridgeError as fault:
            runtime.outcomes.waiting.pop(key, None)  # the first of them may have been refused meanwhile
            if self.span is not None:
                self.span.fail(fault)
            completion.count_unfinished(Unfinished.INCOMPLETE)
            if self.protocol.sent[0]:
                self._send_abort_soon("its begin could not be sent to every stream")
            raise
        return self

    def send_begin(self) -> None:
        """Send the BEGIN frames to all buffers."""
        header = self._key_of(FrameKind.BEGIN)
        self.runtime.sender.send(*self.buffers[0], header, self.plan.begin_value, self._first_delivered)
        self.protocol.sent[0] = 1
        for place in range(1, len(self.buffers)):
            self.emit(place, header, self.plan.begin_value)

    def _join(self, name: str) -> PartStream:
        """Have a stream join the transaction; called under the lock. If this raises, nothing has changed."""
        known, plan = self.writer.part_streams, self.plan
        view = self.runtime.catalog.view(name)
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
        buffer = topic, self.id.counter % partitions
        header = self._key_of(FrameKind.BEGIN, known=place)
        with self.turn:
            self.protocol.add_place()
        try:
            self.runtime.sender.send(*buffer, header, grown.begin_value, partial(self._delivered_at, place))
        except BaseException:
            with self.turn:
                self.protocol.drop_places(place)
            raise
        self.outbox = None  # from now on ends wait for acknowledgements, and nothing is gained by holding frames back
        self.buffers.append(buffer)
        self.plan = grown
        return self.writer.add(route)

    def send_offsets(self, member: GroupMember, placed: Mapping[Partition, tuple[int, OffsetDetails]]) -> None:
        """Commit a consumer group's offsets, by Kafka's topics and partitions, with the transaction."""
        wanted = {where: offset for where, (offset, _) in placed.items()}
        group = member.group_id
        fresh = GroupOffsets(group, wanted, *member[1:], {where: beside for where, (_, beside) in placed.items()})
        with self.lock:
            self.check_open()
            known = self.offsets.get(group)
            joined = fresh if known is None else known.joined(fresh)
            others = sum(len(item.offsets) for name, item in self.offsets.items() if name != group)
            if others + len(joined.offsets) > PARTITIONS_MAX:
                raise InvalidRequestError(
                    f"a transaction commits at most {PARTITIONS_MAX} offsets; these were not taken, the others were"
                )
            if fresh.details:
                self._check_metadata([joined, *(item for name, item in self.offsets.items() if name != group)])
            self.writer.room.take(
                offsets_bytes(joined) - (0 if known is None else offsets_bytes(known)),
                self.id,
                "these offsets were not taken, the others were",
            )
            self.offsets[group] = joined

    def _check_metadata(self, groups: Sequence[GroupOffsets]) -> None:
        size = metadata_bytes(groups)
        if size > METADATA_BYTES_MAX:
            raise TransactionTooLargeError(
                f"the offsets that transaction {self.id} commits would have {size} bytes of metadata, and "
                f"{METADATA_BYTES_MAX} are possible; these offsets were not taken, the others were",
                limit_bytes=METADATA_BYTES_MAX,
            )

    def placed(self, items: Iterable[OffsetItem]) -> dict[Partition, tuple[int, OffsetDetails]]:
        """Return offsets by Kafka's topics and partitions, without those of removed segments, which have no readers."""
        found: dict[Partition, tuple[int, OffsetDetails]] = {}
        for topic, partition, offset, beside in items:
            # Also of an adopted topic: its partitions are segments, but what follows a scale lies elsewhere.
            stream = None if "/" not in topic and is_internal(topic) else self.runtime.catalog.find(topic)
            with suppress(TruncatedError):
                where = (
                    (topic, partition) if stream is None else self.runtime.catalog.place_of_partition(stream, partition)
                )
                found[where] = offset, beside
        return found

    def expect(self, stream: str, wanted: Condition) -> None:
        """Add a condition, which is sent with the commit."""
        with self.lock:
            self.check_open()
            condition = StreamCondition(self.writer.part_stream_of(stream).place, wanted)
            conditions = with_condition(self.conditions, condition)
            self.writer.room.take(condition_bytes(condition), self.id, "this condition was not taken, the others were")
            self.conditions = conditions

    def save(self, notes: Mapping[str, bytes]) -> SavepointFuture:
        """Make a savepoint of all that was written so far, and of the notes that are added."""
        with self.lock:
            self.check_open()
            self.check_deliveries()
            self.writer.cut_all()
            return self._save(notes)

    def _save(self, notes: Mapping[str, bytes]) -> SavepointFuture:
        """Send a savepoint, or have it wait for other buffers; called under the lock, with all batches cut."""
        log = self.savepoints = self.savepoints or SavepointLog()
        pieces = self._own_pieces()
        manifest = Manifest(pieces_of(pieces), tuple(self.offsets.values()), self.conditions)
        frame = log.make(manifest, notes, self.id)
        savepoint = Savepoint(
            self.id,
            frame.number,
            {**log.notes, **notes},
            records_by_stream(tuple(self.plan.begin.streams), pieces),
            tuple(pieces),
            manifest.offsets,
            manifest.conditions,
        )
        sender = self.runtime.sender
        future = SavepointFuture(savepoint, self.completion, sender.wait_until)
        key, value = self._key_of(FrameKind.SAVEPOINT), frame.encode()
        if self.outbox is None:
            with self.turn:
                self.protocol.hold(future, (key, value))
        else:
            if not self.outbox.has_room(value):
                self._send_outbox()
            is_first = not self.protocol.sent[0]
            self._send_with_outbox(key, value, partial(self._savepoint_delivered, future, is_first))
            self.protocol.sent[0] += 1
        log.made(manifest, frame, notes)
        if self.protocol.holds:
            self._send_due()
        return future

    def roll_back(self, savepoint: Savepoint, deadline: Deadline) -> SavepointFuture:
        """Go back to a savepoint, and send one that says so."""
        with self.lock:
            self.check_open()
            self.check_deliveries()
            log = self.savepoints = self.savepoints or SavepointLog()
            log.check(savepoint, self.id)
            own = {piece.key: piece.records for piece in self.writer.pieces()}
            if own != {piece.key: piece.records for piece in savepoint.pieces if piece.part == self.writer.part}:
                with answers_within(deadline.left()):
                    part = self.runtime.leaders.claim_part(self.plan.group, self.id, deadline.left())
                self._go_on_as(part)
            self.before = [piece for piece in savepoint.pieces if piece.part != self.writer.part]
            kept = pieces_of(savepoint.pieces)
            for part_segment in [part_segment for writer in self._former for part_segment in writer.slots()]:
                part_segment.kept = kept.get(PieceKey(part_segment.part, part_segment.place, part_segment.number), 0)
            self.continue_from(savepoint)
            self.writer.room.bytes = room_of((piece.key for piece in savepoint.pieces), savepoint)
            log.undone.append(range(savepoint.number + 1, log.number + 1))
            log.begin_anew(savepoint.notes)
            return self._save({})

    def continue_from(self, savepoint: Savepoint) -> None:
        """Send with the commit what was to be sent with it at a savepoint."""
        self.offsets = {item.group_id: item for item in savepoint.offsets}
        self.conditions = savepoint.conditions

    def _go_on_as(self, part: int) -> None:
        """Continue under another part number, so that writes since the savepoint do not count any more.

        BEGIN frames say so in all buffers, as at a resume. They count only while no other client has resumed it.
        """
        old = self.writer
        header = self._key_of(FrameKind.BEGIN, part=part, former=old.part)
        if self.outbox is not None:
            self.outbox.clear()  # only what was written after the savepoint
        for place, buffer in enumerate(self.buffers):
            delivered = partial(self._delivered_at, place) if place else self._delivered
            self.runtime.sender.send_soon(*buffer, header, self.plan.begin_value, delivered)
            self.protocol.sent[place] += 1
        self._former.append(old)
        self.writer = PartWriter(
            self.completion,
            part,
            self.plan.routes,
            self.runtime.limits,
            self.emit,
            sticky=self.id.counter,
            client_epoch=self.plan.begin.client_epoch,
            room=old.room,
            join=self._join,
        )
        self.writer.frames, self.writer.bytes = old.frames, old.bytes
        self._looked_at = -1
        old.release()

    @property
    def records(self) -> int:
        """Number of records written here that count, also before it was rolled back."""
        former = {writer.part for writer in self._former}
        return self.writer.count + sum(piece.records for piece in self.before if piece.part in former)

    def result(self) -> CommitResult:
        """Return the answer to the commit of a settled transaction, or raise its error."""
        error = self.completion.error()
        if error is not None:
            if error.code == TransactionAbortedError.code and self.protocol.asked is not EndEvent.COMMIT:
                error.code = "already-aborted"
            raise error
        if not self._is_mine():
            raise self.completion.fenced_error()
        if self._result is None:
            # The result does not refer to the transaction, which refers to it: each would be garbage in a cycle.
            find = partial(_ends_of, self.completion, self.plan.begin.places, self._merged_pieces())
            self._result = CommitResult(self.id, self._records_committed(), self.completion.offset, find)
            self._tell_what_is_old()
        return self._result

    def _tell_what_is_old(self) -> None:
        record = self.completion.record
        if record is None:
            return
        for place in sorted({piece.stream for piece in self.pieces}):
            route = self.plan.routes[place]
            old = outlived(route.topic, route.kept_ms, record.begun_ms, record.decided_ms)
            if old is not None:
                logger.warning("transaction.past_retention txn=%s: it is committed, and %s", self.id, old)

    def _is_mine(self) -> bool:
        """Return True if a known commit is the one that was asked for here, and not that of a later owner."""
        return self.completion.owner == self.writer.part

    def _records_committed(self) -> int:
        return sum(piece.records for piece in self.pieces)  # exactly what the manifest names is merged

    def _own_pieces(self) -> list[Piece]:
        """Return the pieces that the manifest names in addition to the parts of other processes."""
        pieces = self.writer.pieces()
        return [*self.before, *pieces] if self.before else pieces

    def _merged_pieces(self) -> Sequence[Piece]:
        """Return the pieces that contain the first and the last committed record."""
        return self.pieces

    def _check_parts(self, parts: Sequence[PartHandle]) -> list[Piece]:
        """Return the pieces of the named parts."""
        seen: set[int] = {piece.part for piece in self._own_pieces()} | {self.writer.part}
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
        if not others or self.writer.room.has(sum(piece_bytes(piece.key) for piece in others)):
            return
        limit = self.writer.room.limit
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
        frames = self.writer.frames + own + sum(handle.frames for handle in parts)
        if is_too_scattered(frames, own + sum(len(handle.pieces) for handle in parts)):
            raise TransactionTooLargeError(
                f"transaction {self.id} cannot be committed with all of its {len(parts)} parts: "
                f"{scattered_reason(frames)}; nothing was asked for, the transaction is open: commit fewer parts and "
                "the others in another transaction, or abort",
                limit_bytes=CONTROL_RECORD_BYTES_MAX,
            )

    def ask_again(self, order: CommitOrder) -> bool:
        """Send the frame of the end once more; a COMMIT only updates what the leader knows of the commit order.

        Return False if the first one is held, so that this one would come too soon.
        """
        with self.lock:
            with self.turn:
                action = self.protocol.step(EndEvent.MISSED)
            if action is EndAction.ABORT:
                self.abort_again()
            if action is not EndAction.COMMIT:
                return action is EndAction.ABORT
            key = self._key_of(FrameKind.COMMIT, order)
            self.runtime.sender.send_soon(*self.buffers[0], key, self._encode_manifest(self.pieces), _ignore)
            self.completion.is_missing = False
        return True

    def abort_again(self) -> None:
        """Send the ABORT frame once more, unless the outcome is known."""
        completion = self.completion
        completion.is_missing = False
        if completion.key in self.runtime.outcomes.waiting and not self.is_stranded():
            is_asked = completion.failure is None or self.protocol.asked is EndEvent.ABORT
            self._send_abort_soon("client" if is_asked else f"incomplete: {completion.failure}")

    def doubt(self) -> None:
        """Have the leader asked what has become of its end, unless it cannot have heard of it: that is still sent."""
        if self.protocol.answered[0]:
            self.runtime.outcomes.doubt(self.plan.group, self.completion)

    def is_stranded(self) -> bool:
        """Return True if the buffer with its COMMIT frame has gone with its stream; its leader is asked about it."""
        route = self.plan.routes[0]
        if not self.runtime.catalog.has_lost(route):
            return False
        why = f"stream {route.stream}, or its transaction buffer, was deleted before its commit was read"
        self.runtime.outcomes.strand(self.plan.group, self.completion, why)
        return True

    def _encode_manifest(self, pieces: Iterable[Piece]) -> bytes:
        entries = tuple((*piece.key, piece.records) for piece in pieces)
        if self.offsets or self.conditions:
            return _manifest_with(entries, tuple(self.offsets.values()), self.conditions)
        return _manifest(entries)

    def commit(self, parts: Sequence[PartHandle]) -> None:
        """Ask for the commit, unless an end was asked for."""
        with self.lock:
            if self.protocol.asked is not None or self.completion.closed:
                return
            others: list[Piece] = []
            if parts:
                others = self._check_parts(parts)
                self._check_size(others)
                self._check_frames(parts)
            if self.completion.failure is None:
                self.writer.cut_all()
                self.pieces = [*self._own_pieces(), *others]
                self._ask_for_commit()
            else:
                with self.turn:
                    self.protocol.commit((b"", b""), failed=True)
                self._give_up()

    def abort(self, reason: str) -> None:
        """Ask for the abort, unless an end was asked for."""
        with self.lock:
            if self.protocol.asked is not None or self.completion.closed:
                return
            key, value = self._key_of(FrameKind.ABORT), encode_abort(reason[:REASON_CHARACTERS_MAX])
            with self.turn:
                self.protocol.abort()
            try:
                delivered = partial(self._asked_abort_delivered, not self.protocol.sent[0])
                if self.outbox is None:
                    self.runtime.sender.send(*self.buffers[0], key, value, delivered)
                    self.protocol.sent[0] += 1
                else:
                    self._send_with_outbox(key, value, delivered, data=False)
            except BaseException:
                self._take_back()
                raise
            self.completion.closed = True
            self.runtime.commits.abort(self)
            if self.span is not None:
                self.span.ask("abort", self.writer.count, self.writer.bytes)

    def extend(self, extension: bytes) -> None:
        """Send an EXTEND frame."""
        with self.lock:
            self.check_open()
            self.emit(0, self._key_of(FrameKind.EXTEND), extension)

    def _ask_for_commit(self) -> None:
        """Send the COMMIT frame, or leave that to the last answer for another buffer."""
        manifest = self._encode_manifest(self.pieces)
        if self.outbox is not None and not self.outbox.has_room(manifest):
            self._send_outbox()
        asked = self.runtime.commits.of(self.plan.group, self.plan.begin.client_epoch).ask(self)
        self._asked = asked
        pieces = self.pieces
        records = pieces[0].records if len(pieces) == 1 else sum([piece.records for piece in pieces])
        self.completion.asked = (time.monotonic(), records, self.writer.bytes)
        if self.span is not None:
            self.span.ask("commit", records, self.writer.bytes)
        frame = self._key_of(FrameKind.COMMIT, asked.order), manifest
        with self.turn:
            action = self.protocol.commit(frame, failed=self.completion.failure is not None)
        try:
            if action is EndAction.FAIL:
                self._give_up()
            elif self.outbox is not None:
                delivered = self._commit_delivered if self.protocol.sent[0] else self._whole_delivered
                self._send_with_outbox(*frame, delivered)
            elif action is EndAction.COMMIT:
                self.runtime.sender.send(*self.buffers[0], *frame, self._commit_delivered)
        except BaseException:
            asked.is_void = True  # a repetition gets another number
            self._take_back()
            raise
        self.completion.closed = True

    def _take_back(self) -> None:
        with self.turn:
            self.protocol.unsent()

    def _give_up(self) -> None:
        """Abort after a send that failed before the commit was asked for, and tell everybody at once."""
        self._send_abort_soon(f"incomplete: {self.completion.failure}")
        self.completion.fail()

    def _send_abort_soon(self, reason: str) -> None:
        """Queue an ABORT frame; it takes back a commit that was asked for, and releases later ones that wait for it."""
        value = encode_abort(reason[:REASON_CHARACTERS_MAX])
        asked = self._asked
        key = self._key_of(FrameKind.ABORT, None if asked is None or asked.is_void else asked.order)
        self.runtime.sender.send_soon(*self.buffers[0], key, value, self._abort_delivered)

    def _key_of(
        self, kind: FrameKind, order: CommitOrder | None = None, *, part: int = -1, known: int = 0, former: int = -1
    ) -> bytes:
        """Return the header of a frame.

        Args:
            kind: Its kind.
            order: Position of an end among those of the connection.
            part: Whose frame it is; by default the present part's.
            known: Of a BEGIN frame with which a stream joins: how many there were before.
            former: Of a BEGIN frame with which this owner continues under another part number: the one before.
        """
        epoch = self.plan.begin.client_epoch
        fields = (known, former + 1, 0) if order is None else order.fields()
        version = SAVEPOINT_VERSION if kind is FrameKind.SAVEPOINT else VERSION
        whose = self.writer.part if part < 0 else part
        return HEADER.pack(MAGIC, version, kind, self.completion.key, whose, *fields, epoch)

    def _send_due(self) -> None:
        """Send what has been held and is due, on whichever thread this is."""
        unsent: list[SavepointFuture] = []
        with self.turn:
            for savepoint, frame in self.protocol.due(failed=self.completion.failure is not None):
                if frame is not None:
                    delivered = (
                        self._commit_delivered
                        if savepoint is None
                        else partial(self._savepoint_delivered, savepoint, False)
                    )
                    self.runtime.sender.send_soon(*self.buffers[0], *frame, delivered)
                elif savepoint is not None:
                    unsent.append(savepoint)
                else:
                    self._send_abort_soon(f"incomplete: {self.completion.failure}")
        for future in unsent:
            future.settle(self.completion.failure)

    # On the delivery thread: these take no lock that a sending thread may hold, see rollbridge.client.sender.

    def _first_delivered(self, fault: Undelivered | None) -> None:
        self._delivered(fault)
        if fault is not None and fault.is_refusal:
            # The broker itself refused it, so no leader will ever hear of this transaction, or report on it.
            self.runtime.outcomes.waiting.pop(self.completion.key, None)
            self.completion.fail()

    def _whole_delivered(self, fault: Undelivered | None) -> None:
        """Handle the delivery report of a message that was the whole transaction, from its BEGIN to its COMMIT."""
        self._first_delivered(fault)
        if fault is not None:
            self._commit_delivered(fault)

    def _savepoint_delivered(self, future: SavepointFuture, is_first: bool, fault: Undelivered | None) -> None:
        (self._first_delivered if is_first else self._delivered)(fault)
        future.settle(self.completion.failure)

    def _commit_delivered(self, fault: Undelivered | None) -> None:
        if fault is not None:
            self._fail(fault)
            with self.turn:
                if self.protocol.step(EndEvent.REFUSED) is EndAction.ABORT:
                    self._send_abort_soon(f"its commit was refused: {fault}")

    def _asked_abort_delivered(self, is_first: bool, fault: Undelivered | None) -> None:
        (self._first_delivered if is_first else self._delivered)(fault)
        self._abort_delivered(fault)

    def _abort_delivered(self, fault: Undelivered | None) -> None:
        """Have an abort that could not be delivered sent again: without it the transaction is open until its lease."""
        if fault is None:
            return
        _ignore(fault)
        if self._asked is not None:
            self._asked.is_void = True
        self.completion.is_missing = True
        self.runtime.commits.abort(self)


def room_of(keys: Iterable[PieceKey], savepoint: Savepoint | None) -> int:
    """Return the bytes of a manifest that names such pieces, and what a savepoint names besides, at most."""
    size = ManifestRoom(0).bytes + sum(map(piece_bytes, keys))
    if savepoint is None:
        return size
    return size + sum(map(offsets_bytes, savepoint.offsets)) + sum(map(condition_bytes, savepoint.conditions))


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


def _ignore(fault: Undelivered | None) -> None:
    """Log an end that could not be delivered: an abort that does not arrive becomes one by expiry in the end."""
    if fault is not None:
        logger.warning("end.undelivered: %s", fault)
