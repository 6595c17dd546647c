"""Follow partitions as they grow, on connections of our own; :mod:`rollbridge.kafka.fetch_plan` has the rules.

    other threads --follow, leave, stop--> orders --+
                                                    v
    background: look-ups, dials --news--> [ the polling thread: plan, connections ] --> Fetched, Trouble

The polling thread owns the plan and the connections, and waits only for their answers. Look-ups and dials, which may
take long while a broker is away, run on short-lived background threads that report back through a queue. Orders of
other threads wait in a queue, too, until the polling thread, woken through a pipe, takes them. The lock guards only the
pipe's descriptors and the moment of closing; no network call happens under it.

Tour of a read, stop 3 of 3: see docs/tour.md.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.fetch.v12 import FetchResponse

from rollbridge.base.deadlines import Deadline
from rollbridge.base.forks import hold, is_gone
from rollbridge.base.logs import limited, log_defect
from rollbridge.errors import KafkaUnavailableError, RollbridgeError
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.fetch import FETCH_BYTES, LogDivergedError, Wanted, send_fetch
from rollbridge.kafka.fetch_plan import Fetched, FetchError, FetchPlan, Range
from rollbridge.kafka.metadata import EARLIEST, LATEST, Broker, Clusters, Isolation, NodeId, ask_once
from rollbridge.kafka.offsets import offsets_question
from rollbridge.kafka.records import LogRecord
from rollbridge.stream.group_offsets import NO_EPOCH
from rollbridge.stream.names import Partition

logger = limited(logging.getLogger(__name__))

IDLE_WAIT_MS: Final = 500
"""Longest delay of an empty answer at the broker. New records are answered at once."""
_LOOK_UP_S: Final = 5.0
_DIAL_S: Final = 3.0
_REQUEST_S: Final = 10.0
_LOOK_S: Final = 1.0
"""Interval between checks for overdue answers."""


@dataclass(slots=True)
class _Line:
    """Connection to a leader, and the time of its last answer."""

    connection: Connection
    heard_at: float

    def usable(self, now: float) -> bool:
        """Return whether to send on the connection; the system call is skipped if it has just answered."""
        return self.connection.usable() if now - self.heard_at > _LOOK_S else not self.connection.expired()


@dataclass(slots=True)
class _News:
    """Result of a background look-up or dial."""

    topics: Collection[str] = ()
    leaders: Mapping[Partition, NodeId] = field(default_factory=dict)
    brokers: Mapping[NodeId, Broker] = field(default_factory=dict)
    faults: Mapping[str, ErrorCode] = field(default_factory=dict)
    ranges: Mapping[Partition, Range] = field(default_factory=dict)
    node: NodeId | None = None
    connection: Connection | None = None
    fault: RollbridgeError | None = None


class Follower:
    """Reader of partitions from given offsets on. One thread polls; others may call follow, leave and stop.

    Args:
        name: Name of the background threads.
        wait_ms: Longest delay of an empty answer at the broker.
        max_bytes: Bytes requested at once of one partition, and of all partitions of one leader.
        check_epochs: Have brokers check that the log still holds what was read: after an unclean election or a power
            failure it may not.
    """

    def __init__(
        self,
        clusters: Clusters,
        isolation: Isolation,
        *,
        name: str,
        wait_ms: int = IDLE_WAIT_MS,
        max_bytes: int = FETCH_BYTES,
        check_epochs: bool = False,
    ) -> None:
        self._isolation = isolation
        self._name = name
        self._wait_ms = wait_ms
        self._max_bytes = max_bytes
        self._clusters = clusters
        # Owned by the polling thread.
        self._plan = FetchPlan(check_epochs=check_epochs)
        self._brokers: dict[NodeId, Broker] = {}
        self._connections: dict[NodeId, _Line] = {}
        self._asked: dict[NodeId, _Line] = {}
        self._dialling: set[NodeId] = set()
        self._looking_up = False
        # Shared: any thread appends, the polling thread pops.
        self._orders: deque[Callable[[], None]] = deque()
        self._news: deque[_News] = deque()
        self._lock = threading.Lock()  # guards the pipe, and news that arrive while closing
        self._stopped = self._interrupted = False
        self._closed = False
        self._waker, self._wakes = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._wakes, False)
        # For readers that are never closed, as in a loop over all of a stream.
        self._abandoned = weakref.finalize(self, _close_all, self._connections, self._news, (self._waker, self._wakes))
        self._abandoned.atexit = False
        hold(self, "_clusters", "_lock")

    def follow(self, partition: Partition, offset: int, epoch: int = NO_EPOCH) -> None:
        """Follow a partition from an offset on, or move one that is followed already. May be called from any thread.

        ``epoch`` is the leader epoch of the record read before ``offset``, to check that the log still holds it.
        """
        self._order(partial(self._plan.follow, partition, offset, epoch))

    def leave(self, partition: Partition) -> None:
        """Stop following a partition. May be called from any thread; what has arrived may still be polled."""
        self._order(partial(self._plan.leave, partition))

    def end(self, partition: Partition) -> int | None:
        """Return the high watermark of a followed partition at its last fetch; None if it is not known yet.

        For the polling thread.
        """
        return self._plan.end(partition)

    def unheard_s(self, partition: Partition) -> float:
        """Return for how long nothing has been heard of a followed partition, not even that it has nothing new.

        For the polling thread. Leaders with nothing new say so after ``wait_ms``.
        """
        return self._plan.unheard_s(partition, time.monotonic())

    @property
    def stopped(self) -> bool:
        """True once stopped: nothing arrives any more."""
        return self._stopped

    def poll(self, timeout_s: float) -> list[Fetched | FetchError]:
        """Return what has arrived; wait at most ``timeout_s``, and not at all once stopped, or if interrupted."""
        deadline = Deadline(timeout_s)
        while not self._stopped:
            found = self._learn()
            if not found:
                self.ask()
                found = self._hear(self._wait(deadline))
            if found or self._interrupted or deadline.passed():
                self._interrupted = False
                return found
        return []

    def interrupt(self) -> None:
        """Make the :meth:`poll` that waits, or else the next one, wait no longer. May be called from any thread."""
        self._interrupted = True
        self._wake()

    def ask(self) -> None:
        """Send the next requests, so that leaders work on them meanwhile; :meth:`poll` does so by itself."""
        now = time.monotonic()
        while self._orders:
            self._orders.popleft()()
        for node in self._plan.superseded(now):
            self._plan.withdrawn(node)
            self._drop(node)
        topics = frozenset[str]() if self._looking_up else self._plan.unknown(now)
        if topics:
            self._looking_up = True
            self._begin(partial(self._look_up, topics, self._plan.doubted()))
        for node, wanted in self._plan.requests(now).items():
            if node not in self._dialling:
                self._send(node, wanted, now)

    def stop(self) -> None:
        """Make :meth:`poll` return at once from now on. May be called from any thread."""
        self._stopped = True
        self._wake()

    def close(self) -> None:
        """Close the connections. Call from the polling thread, or after its last poll."""
        if is_gone(self._lock):
            return
        self._stopped = True
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._abandoned()
        self._connections.clear()
        self._asked.clear()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if not self._closed:
                with suppress(BlockingIOError):  # a full pipe wakes the poller anyway
                    os.write(self._wakes, b"x")

    def _learn(self) -> list[Fetched | FetchError]:
        """Apply the results of the background threads."""
        found: list[Fetched | FetchError] = []
        while self._news:
            now = time.monotonic()
            news = self._news.popleft()
            found += self._learn_leaders(news, now) if news.node is None else self._learn_connection(news, now)
        return found

    def _learn_leaders(self, news: _News, now: float) -> list[FetchError]:
        self._looking_up = False
        if news.fault is not None:
            return self._plan.not_learned(news.topics, news.fault, now)
        for node, broker in news.brokers.items():
            if self._brokers.get(node, broker) != broker:
                self._drop(node)  # it listens elsewhere now
                self._plan.withdrawn(node)
            self._brokers[node] = broker
        troubles = self._plan.learn(news.topics, news.leaders, news.faults, now)
        troubles += self._plan.learn_ranges(news.ranges, now)
        for node in self._connections.keys() - self._asked.keys():
            if not self._plan.leads(node):
                self._drop(node)
        return troubles

    def _learn_connection(self, news: _News, now: float) -> list[FetchError]:
        node = news.node
        assert node is not None
        self._dialling.discard(node)
        if news.connection is None:
            return self._plan.lost(node, news.fault or KafkaUnavailableError("it cannot be reached"), now)
        self._connections[node] = _Line(news.connection, now)
        return []

    def _hear(self, ready: Collection[int]) -> list[Fetched | FetchError]:
        """Receive the answers on the connections with these descriptors; drop overdue ones."""
        found: list[Fetched | FetchError] = []
        now = time.monotonic()
        for node, line in list(self._asked.items()):
            connection = line.connection
            try:
                if connection.fileno() in ready and connection.has_answer():
                    del self._asked[node]
                    answer = connection.receive(FetchResponse)
                    line.heard_at = now
                    found += self._plan.answered(node, answer, now)
                elif connection.overdue():
                    raise KafkaUnavailableError(f"{connection.address} does not answer")
            except KafkaUnavailableError as fault:
                self._drop(node)
                found += self._plan.lost(node, fault, now)
        return found

    def _send(self, node: NodeId, wanted: list[Wanted], now: float) -> None:
        line = self._connections.get(node)
        if line is None or not line.usable(now):
            self._drop(node)
            self._dialling.add(node)
            self._begin(partial(self._dial, node, self._brokers[node]))
            return
        try:
            send_fetch(line.connection, wanted, self._wait_ms, self._isolation, self._max_bytes)
        except KafkaUnavailableError as fault:
            self._drop(node)
            self._plan.lost(node, fault, now)
        else:
            self._plan.sent(node, wanted, now)
            self._asked[node] = line

    def _drop(self, node: NodeId) -> None:
        self._asked.pop(node, None)
        line = self._connections.pop(node, None)
        if line is not None:
            line.connection.close()

    def _wait(self, deadline: Deadline) -> Collection[int]:
        """Wait for answers, orders or a timed action; return the descriptors that are readable."""
        poller = select.poll()
        poller.register(self._waker, select.POLLIN)
        for line in self._asked.values():
            poller.register(line.connection.fileno(), select.POLLIN)
        now = time.monotonic()
        left_s = min(deadline.left(), self._plan.next_due(now) - now, _LOOK_S)
        ready = {descriptor for descriptor, _ in poller.poll(math.ceil(1000 * left_s))}
        if self._waker in ready:
            with suppress(BlockingIOError):
                while os.read(self._waker, 512):
                    pass
        return ready

    def _begin(self, find_out: Callable[[], _News]) -> None:
        threading.Thread(target=self._find_out, args=(find_out,), name=self._name, daemon=True).start()

    def _find_out(self, find_out: Callable[[], _News]) -> None:
        news = find_out()
        with self._lock:
            taken = not self._closed
            if taken:
                self._news.append(news)
        if taken:
            self._wake()
            return
        if news.connection is not None:
            news.connection.close()

    def _look_up(self, topics: Collection[str], doubted: Collection[Partition]) -> _News:
        """Look up the leaders of topics and the ranges of doubted partitions. Runs on a background thread."""
        try:
            with self._clusters.borrow(Deadline(_LOOK_UP_S)) as cluster:
                for topic in topics:
                    cluster.forget_leader(topic)
                faults = cluster.learn(topics)
                leaders = {(topic, number): node for topic in topics for number, node in cluster.leaders(topic).items()}
                brokers = {node: cluster.broker(node) for node in leaders.values()}
                ranges: dict[Partition, Range] = {}
                if doubted:
                    first = ask_once(cluster, doubted, offsets_question(EARLIEST, Isolation.READ_UNCOMMITTED)).found
                    end = ask_once(cluster, doubted, offsets_question(LATEST, Isolation.READ_UNCOMMITTED)).found
                    ranges = {item: Range(first[item], end[item]) for item in first.keys() & end.keys()}
        except Exception as fault:
            return _News(topics=topics, fault=_known(fault, f"look up who leads {', '.join(sorted(topics))}"))
        return _News(topics, leaders, brokers, faults, ranges)

    def _dial(self, node: NodeId, broker: Broker) -> _News:
        try:
            with self._clusters.borrow(Deadline(_DIAL_S)) as cluster:
                connection = cluster.dial(broker)
            connection.request_timeout_s = _REQUEST_S
            return _News(node=node, connection=connection)
        except Exception as fault:
            return _News(node=node, fault=_known(fault, f"reach {broker.host}:{broker.port}"))


def _close_all(lines: Mapping[NodeId, _Line], news: Collection[_News], descriptors: Collection[int]) -> None:
    for line in lines.values():
        line.connection.close()
    for item in news:
        if item.connection is not None:
            item.connection.close()
    for descriptor in descriptors:
        os.close(descriptor)


def refuse(trouble: FetchError) -> int:
    """Raise the fault of a partition; a resume rule for :func:`read_up_to`."""
    raise trouble.fault


def read_up_to(
    follower: Follower,
    ends: Mapping[Partition, int],
    timeout_s: float,
    resume: Callable[[FetchError], int] = refuse,
) -> Iterator[tuple[Partition, LogRecord]]:
    """Iterate over the records of followed partitions below ends that their leaders have reported.

    Each partition is left at its end. Take the ends from ListOffsets: right after an election the high watermark in a
    fetch may be behind what the former leader has acknowledged; ListOffsets is not answered until the new leader has
    caught up (KIP-207).

    Args:
        follower: Follower of the partitions from offsets below their ends; polled by this iterator only.
        ends: End of each partition, of the follower's isolation.
        timeout_s: Longest wait for anything to arrive, in seconds; the caller's own time does not count.
        resume: Returns the offset at which to continue where the next records were truncated, or raises.

    Raises:
        KafkaUnavailableError: Nothing arrived in time.
        LogDivergedError: A log has lost its end, below the end that its leader had reported.
        TopicNotFoundError, NotAuthorizedError, CorruptDataError.
    """
    unread = dict(ends)
    deadline = Deadline(timeout_s)
    while unread:
        found = follower.poll(deadline.left())
        if not found and (deadline.passed() or follower.stopped):
            topics = ", ".join(f"partition {item[1]} of topic {item[0]} up to offset {unread[item]}" for item in unread)
            raise KafkaUnavailableError(f"no broker gave {topics} within {timeout_s:g} s")
        ended: dict[Partition, int] = {}
        for item in found:
            end = unread.get(item.partition)
            if end is None:
                continue
            if isinstance(item, Fetched):
                reached = item.end
            elif item.resume is not None and not isinstance(item.fault, LogDivergedError):
                reached = resume(item)
                if reached < end:
                    follower.follow(item.partition, reached)
            elif isinstance(item.fault, KafkaUnavailableError):
                logger.info("reading.resumed reason=%s", item.fault)
                continue
            else:
                raise item.fault
            if reached >= end:
                follower.leave(item.partition)
                ended[item.partition] = unread.pop(item.partition)
        follower.ask()  # leaders work on the next answers while the caller works on these
        for item in found:
            end = ended.get(item.partition, unread.get(item.partition))
            if isinstance(item, Fetched) and end is not None:
                for record in item.records():
                    if record.offset < end:
                        yield item.partition, record
                deadline = Deadline(timeout_s)


def _known(fault: Exception, doing: str) -> RollbridgeError:
    """Return the fault, or KafkaUnavailableError for a defect, so that the polling thread always gets a result."""
    if isinstance(fault, RollbridgeError):
        return fault
    log_defect(logger, "reading.retried action=%r", doing, fault=fault)
    return KafkaUnavailableError(f"cannot {doing}: {fault}")
