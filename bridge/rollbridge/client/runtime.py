"""Shared parts of one connection: options, plans from which transactions begin, conditions, and housekeeping."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

from rollbridge.arguments import check_fields
from rollbridge.calls import Duration, Timeout, as_timedelta
from rollbridge.client.futures import FrameLimits
from rollbridge.client.identity import CommitNumbers
from rollbridge.client.outcomes import OutcomeTail
from rollbridge.client.sender import FrameSender
from rollbridge.client.sessions import ClientSessions
from rollbridge.defects import log_defect
from rollbridge.errors import (
    ConfigError,
    GroupMismatchError,
    InvalidRequestError,
    InvalidTimeoutError,
    RollbridgeError,
    UnavailableError,
)
from rollbridge.kafka.batches import BUFFER_BYTES_MIN, Compression
from rollbridge.kafka.ratelimit import limited
from rollbridge.model.cas import Condition, Expected, Scope, as_scope, as_sn, place_of
from rollbridge.model.changes import moved_fault
from rollbridge.model.client_metrics import TransactionCounts
from rollbridge.model.conditions import CONDITIONS_MAX, KEY_BYTES_MAX, StreamCondition
from rollbridge.model.frames import FRAME_BYTES_DEFAULT, LABEL_CHARACTERS_MAX, STREAMS_MAX, BeginFrame
from rollbridge.model.ids import TransactionId
from rollbridge.model.lineage import KeyLineage
from rollbridge.model.names import GroupName
from rollbridge.model.options import GIB, KIB, MIB, faults_of, option
from rollbridge.model.outcomes import RETAIN_DEFAULT
from rollbridge.model.records import FOREVER, StreamConfig
from rollbridge.model.routing import Route, StreamView
from rollbridge.tracing import find_tracer
from rollbridge.zookeeper.catalog import Catalog

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_leases: Final = limited(logging.getLogger(f"{__name__}.leases"))


class Explained(NamedTuple):
    """Why a transaction has no outcome yet.

    Attributes:
        why: Who does not answer, or what its leader waits for, in half a sentence; empty if for nothing.
        events: Its last events that its leader saw, one line each.
        is_read: Whether the leader has read that its end was asked for.
    """

    why: str
    events: Sequence[str] = ()
    is_read: bool = False


@dataclass(frozen=True, slots=True)
class Runtime:
    """Machinery of one connection."""

    sender: FrameSender
    catalog: Catalog
    outcomes: OutcomeTail
    limits: FrameLimits
    commit_timeout_s: float
    commits: CommitNumbers
    lease_max: timedelta
    lease_end: Callable[[GroupName, TransactionId, float], datetime]
    """Returns when the lease of an open transaction ends, as its leader says once it has read all that was written
    before; raises TransactionClosedError if it has ended. Takes a time-out in seconds."""
    explain: Callable[[GroupName, TransactionId], Explained]
    """Says why a transaction has no outcome yet, and what its leader saw, if that answers within a moment."""
    counts: TransactionCounts = field(default_factory=TransactionCounts)
    tracer: Tracer | None = field(default_factory=find_tracer)
    """Records spans; None without OpenTelemetry."""
    check_savepoints: Callable[[], None] = lambda: None
    """Raises if some coordinator that may lead does not know savepoints."""
    claim_part: Callable[[GroupName, TransactionId, float], int] = lambda *_: 1
    """Returns a part number of an open transaction that nobody has had, once it is on record. Takes a time-out in
    seconds."""


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


# Options


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options of a connection; checked on construction.

    Raises:
        ConfigError: one or several are wrong; all are named.
    """

    compression: str = option("none", check=Compression.named)
    """Codec of the frames, which records keep all the way to the segment: none, gzip, snappy, lz4 or zstd."""
    frame_bytes: int = option(FRAME_BYTES_DEFAULT, low=16 * KIB, high=MIB)
    """Bytes of a frame before compression; larger frames cost less per record, and more memory."""
    linger_s: float = 1.0
    """Maximum seconds for which records of an idle open transaction wait in this process before they are sent."""
    buffer_bytes: int = option(64 * MIB, low=BUFFER_BYTES_MIN)
    """Maximum bytes that wait for the brokers in this process; beyond it writers wait."""
    backpressure_timeout_s: float = 60.0
    """Seconds that a writer waits for room before it gets a ``BackpressureError``."""
    connect_timeout_s: float = 15.0
    """Maximum seconds for connecting."""
    commit_timeout_s: float = 120.0
    """Seconds that a commit, an abort or a flush waits unless told otherwise. A merge takes about 3 s per GB."""
    admin_timeout_s: float = 30.0
    """Seconds that an admin request waits for its answer."""
    session_timeout_s: float = 10.0
    """ZooKeeper session time-out in seconds; leases of conditional writers and pending requests end with it."""
    lease: timedelta = option(timedelta(hours=24))
    """Default time for which a transaction may stay open; at most ``lease_max``. No pings are needed."""
    lease_max: timedelta = option(timedelta(days=7))
    """Longest lease that may be asked for; coordinators have a limit of their own, with the same default."""
    transaction_bytes_max: int = 16 * GIB
    """Largest transaction that is written; coordinators abort larger ones."""
    open_transactions_max: int = 100_000
    """Maximum number of transactions that this connection keeps open at once."""
    client_names_max: int = 100_000
    """Maximum number of other client names that this connection serves at once, a few kilobytes each."""

    def __post_init__(self) -> None:
        check_fields(self)
        faults = list(faults_of(self))
        if not timedelta(0) < self.lease <= self.lease_max:
            faults.append(f"lease: {self.lease} is not positive, or longer than lease_max, {self.lease_max}")
        ConfigError.raise_for(faults)

    @property
    def codec(self) -> Compression:
        """Number of the codec."""
        return Compression.named(self.compression)


def extension_ms(lease: Duration, lease_max: timedelta) -> int:
    """Return for how long a lease is to be extended, ms.

    Raises:
        InvalidTimeoutError: not positive, or longer than a lease may be; nothing was changed.
    """
    lease = as_timedelta(lease)
    if not timedelta(milliseconds=1) <= lease <= lease_max:
        raise InvalidTimeoutError(
            f"a lease may be extended by up to {lease_max} from now on, not by {lease}; nothing was changed"
        )
    return lease // timedelta(milliseconds=1)


# Plans


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
            raise InvalidTimeoutError(
                f"a transaction may stay open for up to {self._options.lease_max}, not for {lease}; nothing was written"
            )
        if kept is not None and kept < timedelta(0):
            raise InvalidTimeoutError(f"an outcome cannot be remembered for {kept}; nothing was written")
        generation = self._catalog.generation
        views = [self._catalog.view(stream) for stream in streams]
        group = views[0].config.group
        for view in views:
            check_not_moved(view.config)
            if view.config.group != group:
                raise GroupMismatchError(
                    f"{streams[0]} belongs to group {group} and {view.config.name} to group {view.config.group}; "
                    "a transaction spans streams of one group only; nothing was written"
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
            raise InvalidTimeoutError(
                f"coordinator {leader} lets a transaction of group {group} stay open for up to {limit} (its setting "
                f"lease_ms_max), not for {lease}; nothing was written"
            )


def _warn_of_retention(routes: Iterable[Route], lease: timedelta) -> None:
    for route in routes:
        if FOREVER < route.kept_ms < lease // timedelta(milliseconds=1):
            _leases.warning(
                "topic %s keeps records for %s (retention.ms), and a transaction that writes to it may stay open for "
                "%s: what is older at its commit may be deleted by the brokers soon after; give a shorter lease or a "
                "longer retention.ms, or let it count from the commit: rollbridge stream update %s --timestamps commit",
                route.topic,
                timedelta(milliseconds=route.kept_ms),
                lease,
                route.topic,
            )


# Conditions of a transaction


def new_condition(runtime: Runtime, stream: str, key: bytes | None, sn: Expected, scope: Scope | str) -> Condition:
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
        course = KeyLineage.of(view.config, view.history, condition.key)
    except UnavailableError:
        return  # a scale is in progress; the leader will check
    place_of(condition.expected, course)


# Housekeeping


logger = logging.getLogger(__name__)


class Housekeeper:
    """Thread that runs chores every ``interval_s`` seconds, and soon after :meth:`poke`.

    Chores are what must not be done on the way of a record. They run one after the other on one thread, so a slow
    one delays the others.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._chores: list[Callable[[], None]] = []
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollbridge-housekeeping", daemon=True)

    def start(self, *chores: Callable[[], None]) -> None:
        """Start the thread; a chore that raises is logged and tried again next time."""
        self._chores.extend(chores)
        self._thread.start()

    def poke(self) -> None:
        """Run the chores soon. May be called from anywhere."""
        self._wake.set()

    def close(self) -> None:
        """Stop after the chore that is running."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._interval_s)
            self._wake.clear()
            for chore in self._chores:
                if self._stopping.is_set():
                    return
                try:
                    chore()
                except RollbridgeError as fault:  # such as a node that holds garbage
                    logger.warning("housekeeping failed and will be tried again: %s", fault)
                except Exception:
                    log_defect(logger, "housekeeping failed and will be tried again")
