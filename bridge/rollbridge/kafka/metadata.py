"""Cluster metadata: brokers, partition leaders and coordinators, and one connection to each broker in use.

Answers are cached until a caller finds them wrong and says so (``forget_*``). Another broker is asked then, since one
that is cut off from the others continues to return its old view. Of two answers that differ, the one with the newer
leader epoch counts. Look-ups use a connection of their own, so that they never queue behind, or between, in-flight
requests. A :class:`Cluster` belongs to one thread at a time, except ``forget_*`` and ``known_leader``;
:class:`Clusters` lends them to several. :func:`ask_leaders` sends a repeatable question to many leaders at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import count, groupby
from operator import itemgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from kio.schema.errors import ErrorCode
from kio.schema.find_coordinator.v4 import FindCoordinatorRequest, FindCoordinatorResponse
from kio.schema.list_offsets.v7 import ListOffsetsRequest
from kio.schema.list_offsets.v7.request import ListOffsetsPartition, ListOffsetsTopic
from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse
from kio.schema.metadata.v12.request import MetadataRequestTopic
from kio.schema.metadata.v12.response import MetadataResponseTopic
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i8, i32, i64
from kio.static.protocol import Payload

from rollbridge.base.deadlines import Backoff, Closable, Deadline, Patience
from rollbridge.base.errors import PortableError
from rollbridge.base.forks import hold, is_gone
from rollbridge.base.security import Security
from rollbridge.errors import ConfigError, InvalidRequestError, KafkaUnavailableError, NotFoundError, RollbridgeError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.errors import ConnectionLostError, Meaning, is_definite, refusal
from rollbridge.stream.names import Partition

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Payload)
K = TypeVar("K")
NodeId = int

_DIAL_FIRST_S: Final = 0.02
_DIAL_MAX_S: Final = 1.0
_CACHED_MAX: Final = 100_000
_IDLE_S: Final = 10.0
"""Time after which connections that were not borrowed again are closed."""
_FAILED_S: Final = 60.0
_FAILED: Final[dict[Broker, float]] = {}
"""Time at which a broker could not be reached, or refused us, for all clusters of this process: each that is new would
ask it first, and one that is away is noticed by a time-out only."""
_SILENT: Final[dict[Broker, float]] = {}
"""The same of brokers that took a request, and gave no answer. They hang, or are cut off and have an old view."""


class Isolation(IntEnum):
    """Isolation level, which selects the end of a partition."""

    READ_UNCOMMITTED = 0
    """The high watermark: everything that is replicated."""
    READ_COMMITTED = 1
    """The last stable offset: everything before the first native transaction that is still open."""


LATEST: Final = -1
EARLIEST: Final = -2
CLIENT: Final = -1
"""Replica id of a client."""


class CoordinatorType(IntEnum):
    """Kind of a coordinator, numbered as in FindCoordinator."""

    GROUP = 0
    TRANSACTION = 1


class CodeError(PortableError):
    """A broker answered with an error code, whose meaning for the request the caller knows."""

    def __init__(self, code: ErrorCode, subject: str, detail: str | None = None) -> None:
        super().__init__(f"{subject}: {code.name.upper()}{f' ({detail})' if detail else ''}")
        self.code: Final = code
        self.subject: Final = subject


class Broker(NamedTuple):
    """Address of a broker."""

    host: str
    port: int


def parse_bootstrap(servers: str) -> list[Broker]:
    """Parse ``host:port,host:port`` (IPv6 addresses in brackets); raise ConfigError that names a wrong entry."""
    brokers = []
    for entry in filter(None, (part.strip() for part in servers.split(","))):
        host, separator, port = entry.rpartition(":")
        if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"bootstrap.servers: {entry!r} is not host:port")
        brokers.append(Broker(host.removeprefix("[").removesuffix("]"), int(port)))
    if not brokers:
        raise ConfigError("bootstrap.servers: no broker given")
    return brokers


@dataclass(slots=True)
class _Dialling:
    """Back-off of a broker that could not be reached last time."""

    backoff: Backoff = field(default_factory=lambda: Backoff(_DIAL_FIRST_S, _DIAL_MAX_S))
    not_before: float = 0.0
    fault: str = ""


class _Leader(NamedTuple):
    """Leader of a partition, as a broker has told."""

    node: NodeId
    epoch: int


class _Learned(NamedTuple, Generic[K]):
    """Answer of a broker; later ones have higher stamps."""

    stamp: int
    value: K


class MetadataCache:
    """Metadata of a cluster that brokers have told, shared by all connections under one identity.

    Safe to use from several threads: a value is replaced as a whole.

    Attributes:
        brokers: Addresses of brokers.
        leaders: Leaders of partitions by topic.
        doubted: Topics that have partitions without a leader that can be believed.
        partition_counts: Number of partitions of topics.
        coordinators: Coordinators of transactional ids and consumer groups.
    """

    def __init__(self) -> None:
        self.brokers: Mapping[NodeId, Broker] = {}
        self.leaders: dict[str, _Learned[Mapping[int, _Leader]]] = {}
        self.doubted: set[str] = set()
        self.partition_counts: dict[str, int] = {}
        self.coordinators: dict[tuple[CoordinatorType, str], _Learned[NodeId]] = {}
        self.stamps = count(1)
        self._seen: dict[str, tuple[object, dict[int, int]]] = {}

    def limit(self) -> None:
        """Drop everything once there is too much of it, as of topics and transactional ids that are gone."""
        if len(self._seen) + len(self.coordinators) > _CACHED_MAX:
            for known in (self.leaders, self.doubted, self.partition_counts, self.coordinators, self._seen):
                known.clear()

    def name(self, brokers: Mapping[NodeId, Broker]) -> None:
        """Take note of the addresses of brokers."""
        if not brokers.items() <= self.brokers.items():
            self.brokers = {**self.brokers, **brokers}

    def newest(self, topic: str, partition: int) -> int:
        """Return the newest leader epoch of a partition that was seen; -1 if none was."""
        found = self._seen.get(topic)
        return -1 if found is None else found[1].get(partition, -1)

    def take(self, topic: str, topic_id: object, partition: int, epoch: int) -> bool:
        """Take note of an epoch; return False if it is older than one that was seen, of the same topic."""
        found = self._seen.get(topic)
        if found is None or found[0] != topic_id:
            found = self._seen[topic] = topic_id, {}
        epochs = found[1]
        if epoch < epochs.get(partition, -1):
            return False
        epochs[partition] = epoch
        return True


class Cluster(Closable):
    """Brokers of one cluster as seen by one client. Not thread-safe.

    A broker that could not be reached is dialled again only after a back-off of up to a second; until then it counts as
    unreachable.

    Raises:
        KafkaUnavailableError: From any method that asks a broker: none could be reached.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        security: Mapping[str, str] | None = None,
        client_id: str = "rollbridge",
        request_timeout_s: float = 30.0,
        cache: MetadataCache | None = None,
    ) -> None:
        self._bootstrap = parse_bootstrap(bootstrap_servers)
        self._security = Security.from_config(security)
        self._client_id = client_id
        self.connect_timeout_s, self.request_timeout_s = 10.0, request_timeout_s
        self._cache = cache or MetadataCache()
        self._forgotten = 0
        """Stamp up to which what is cached is not believed here."""
        self._connections: dict[NodeId | None, Connection] = {}
        """By broker; under None the one to the broker that is asked what any of them knows."""
        # For instances that are never closed. In a reference cycle sockets may be finalized first and warn that they
        # were not closed; this finalizer runs before them.
        weakref.finalize(self, _close_all, self._connections).atexit = False
        self._informant: Broker | None = None
        """Broker that has answered last."""
        self._is_mistrusted = False
        """True once an answer of it has turned out to be wrong."""
        self._dialling: dict[Broker, _Dialling] = {}
        self.deadline: Deadline | None = None
        """Bound of all connecting and waiting at present; see :meth:`within`."""

    def lend(self, connect_timeout_s: float, request_timeout_s: float) -> None:
        """Begin with another user: a broker that the one before could not reach is dialled at once."""
        self.connect_timeout_s, self.request_timeout_s = connect_timeout_s, request_timeout_s
        self._dialling.clear()

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Bound all connecting and waiting in this context by a deadline."""
        before, self.deadline = self.deadline, deadline
        try:
            yield
        finally:
            self.deadline = before

    def bounded_s(self, most_s: float) -> float:
        """Return the time that something may take: ``most_s``, or what is left of the present deadline."""
        return most_s if self.deadline is None else min(most_s, self.deadline.left())

    def leader(self, topic: str, partition: int) -> NodeId:
        """Return the partition's leader; raise CodeError if the broker asked knows no such topic, or no leader."""
        known = self.known_leader(topic, partition)
        if known is not None:
            return known
        self._cache.doubted.add(topic)
        node = None
        for _ in range(2):  # another thread may have dropped what was learned just now
            fault = self.learn([topic]).get(topic)
            if fault is not None:
                raise CodeError(fault, f"topic {topic}")
            node = self.known_leader(topic, partition)
            if node is not None or self._leaders_of(topic):
                break
        if node is None:
            self._is_mistrusted = True
            missing = partition >= self._cache.partition_counts.get(topic, 0)
            code = ErrorCode.unknown_topic_or_partition if missing else ErrorCode.leader_not_available
            raise CodeError(code, f"partition {partition} of topic {topic}")
        return node

    def known_leader(self, topic: str, partition: int) -> NodeId | None:
        """Return the partition's leader from the cache; None if it is not known, or others know a newer one."""
        found = self._leaders_of(topic).get(partition)
        if found is None:
            return None
        if found.epoch < self._cache.newest(topic, partition):
            self._cache.doubted.add(topic)
            return None
        return found.node

    def leaders(self, topic: str) -> Mapping[int, NodeId]:
        """Return the leaders of a topic's partitions from the cache."""
        return {number: found.node for number, found in self._leaders_of(topic).items()}

    def _leaders_of(self, topic: str) -> Mapping[int, _Leader]:
        known = self._cache.leaders.get(topic)
        return {} if known is None or known.stamp <= self._forgotten else known.value

    def broker(self, node: NodeId) -> Broker:
        """Return the address of a broker that was named as a leader or coordinator."""
        return self._cache.brokers[node]

    def partition_count(self, topic: str) -> int:
        """Return the number of a topic's partitions at its last look-up."""
        return self._cache.partition_counts[topic]

    def forget_leader(self, topic: str, partition: int | None = None) -> None:
        """Drop the cached leaders of a topic, or one of them: a broker denied that it leads it, or does not answer.

        One that is not cached may be that of a partition which was added, and of which the broker asked has not heard.
        """
        if partition is None:
            self._is_mistrusted |= self._cache.leaders.pop(topic, None) is not None
        elif (known := self._cache.leaders.get(topic)) is not None:
            left = {number: found for number, found in known.value.items() if number != partition}
            self._cache.leaders[topic] = known._replace(value=left)
            self._is_mistrusted = True
            self._cache.doubted.add(topic)

    def coordinator(self, kind: CoordinatorType, key: str) -> NodeId:
        """Return the coordinator of a transactional id or consumer group; raise CodeError if none is known now."""
        known = self._cache.coordinators.get((kind, key))
        if known is not None and known.stamp > self._forgotten:
            return known.value
        self._cache.limit()
        request = FindCoordinatorRequest(key_type=i8(kind.value), coordinator_keys=(key,))
        found = self._ask(request, FindCoordinatorResponse).coordinators[0]
        if found.error_code != ErrorCode.none:
            self._is_mistrusted = True
            raise CodeError(found.error_code, f"coordinator of {key}", found.error_message)
        self._cache.name({found.node_id: Broker(found.host, found.port)})
        self._cache.coordinators[kind, key] = _Learned(next(self._cache.stamps), found.node_id)
        return found.node_id

    def expire(self, topics: Iterable[str]) -> None:
        """Have topics looked up again by the next :meth:`learn`, although they are cached."""
        self._cache.doubted.update(topics)

    def forget_coordinator(self, kind: CoordinatorType, key: str) -> None:
        """Drop a cached coordinator: the broker denied that it is the coordinator, or does not answer."""
        self._cache.coordinators.pop((kind, key), None)
        self._is_mistrusted = True

    def connection(self, node: NodeId) -> Connection:
        """Return the connection to a broker; open a new one unless the present one is usable."""
        existing = self._connections.pop(node, None)
        if existing is not None:
            if existing.usable():
                existing.deadline = self.deadline
                existing.request_timeout_s = self.request_timeout_s
                self._connections[node] = existing
                return existing
            existing.close()
            logger.debug("connection.reopened address=%s", existing.address)
        self._connections[node] = connection = self._connect(self._cache.brokers[node], self.deadline)
        return connection

    def broker_connection(self, node: NodeId, broker: Broker) -> Connection:
        """Return the connection to a broker whose address the caller knows; see :meth:`connection`."""
        self._cache.name({node: broker})
        return self.connection(node)

    def dial(self, broker: Broker) -> Connection:
        """Open a connection that the caller owns, without a deadline."""
        connection = self._connect(broker, self.deadline)
        connection.deadline = None
        return connection

    def ask_any(self, request: Payload, response_type: type[R]) -> R:
        """Ask any broker that answers. The request may be sent more than once, so it must be safe to repeat."""
        return self._ask(request, response_type)

    def require_transactions_v2(self) -> None:
        """Raise InvalidRequestError if the broker that was asked last says that the cluster has none."""
        known = self._connections.get(None)
        if known is not None:
            known.require_transactions_v2()

    def metadata(self, topics: Iterable[str] | None, *, with_operations: bool = False) -> MetadataResponse:
        """Return any broker's answer to a Metadata request; topics that do not exist are not created.

        Nothing is cached. A broker that has just started names no brokers and no topics yet.

        Args:
            topics: Names of the topics to describe, maybe none; None describes all.
            with_operations: True to be told the operations on each topic that are permitted to the principal.

        Raises:
            KafkaUnavailableError: No broker answers.
        """
        wanted = None
        if topics is not None:
            wanted = tuple(MetadataRequestTopic(topic_id=None, name=TopicName(name)) for name in topics)
        request = MetadataRequest(
            topics=wanted,
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=with_operations,
        )
        return self.ask_any(request, MetadataResponse)

    def doubt(self, answer: MetadataResponse) -> None:
        """Have another broker asked the next time, since this answer may be old."""
        self._cache.name({broker.node_id: Broker(broker.host, broker.port) for broker in answer.brokers})
        self._is_mistrusted = True

    def disconnect(self) -> None:
        """Close every connection; keep the cached look-ups."""
        _close_all(self._connections)
        self._connections.clear()

    def forget(self) -> None:
        """Close every connection, and look everything up again, here alone; what is in flight stays unknown."""
        self.disconnect()
        self._forgotten = next(self._cache.stamps)

    close = disconnect

    def learn(self, topics: Iterable[str]) -> dict[str, ErrorCode]:
        """Look up the leaders of topics not cached yet, with one request; return the topics with a fault."""
        unknown = sorted({topic for topic in topics if topic in self._cache.doubted or not self._leaders_of(topic)})
        if not unknown:
            return {}
        self._cache.limit()
        answer = self.metadata(unknown)
        if not answer.brokers:
            # A broker that has just started knows no brokers and no topics yet.
            self._is_mistrusted = True
            return dict.fromkeys(unknown, ErrorCode.leader_not_available)
        self._cache.name({broker.node_id: Broker(broker.host, broker.port) for broker in answer.brokers})
        faults: dict[str, ErrorCode] = {}
        for found in answer.topics:
            topic = str(found.name)
            if found.error_code != ErrorCode.none:
                faults[topic] = found.error_code
                continue
            self._cache.partition_counts[topic] = len(found.partitions)
            leaders = self._believed(topic, found)
            if len(leaders) < len(found.partitions):
                self._cache.doubted.add(topic)
            else:
                self._cache.doubted.discard(topic)
            if leaders:
                self._cache.leaders[topic] = _Learned(next(self._cache.stamps), leaders)
            else:
                self._cache.leaders.pop(topic, None)
                faults[topic] = ErrorCode.leader_not_available
        self._is_mistrusted |= bool(faults)
        return faults

    def _believed(self, topic: str, found: MetadataResponseTopic) -> dict[int, _Leader]:
        """Return the leaders of a topic, without those that are older than what was seen before."""
        leaders = {}
        for partition in found.partitions:
            number, node, epoch = map(int, (partition.partition_index, partition.leader_id, partition.leader_epoch))
            if not self._cache.take(topic, found.topic_id, number, epoch):
                logger.info("metadata.stale broker=%s topic=%s", self._informant, topic)
                self._is_mistrusted = True
            elif node >= 0 and node in self._cache.brokers:
                leaders[number] = _Leader(node, epoch)
        return leaders

    def _ask(self, request: Payload, response_type: type[R]) -> R:
        """Ask any broker; replace a connection that turns out dead, since look-ups can be repeated.

        The brokers asked in turn share the time up to the deadline, since a stopped one accepts connections and never
        answers. One that refuses us, with a certificate that has run out for example, keeps us from none of the others.
        """
        brokers = self._in_turn()
        is_away = _is_away(self._informant) and not _is_away(brokers[0])
        is_mistrusted = (self._is_mistrusted or is_away) and len(brokers) > 1
        self._is_mistrusted = False
        known = self._connections.get(None)
        if known is not None:
            try:
                if not is_mistrusted and known.usable():
                    known.deadline = self._share(len(brokers))
                    known.request_timeout_s = self.request_timeout_s
                    return known.call(request, response_type)
            except ConnectionLostError as exc:
                logger.debug("metadata.retried reason=%s", exc)
            self._connections.pop(None).close()
        failures: list[RollbridgeError] = []
        for number, broker in enumerate(brokers):
            share = self._share(len(brokers) - number)
            try:
                connection, self._informant = self._connect(broker, share), broker
                self._connections[None] = connection
                return connection.call(request, response_type)
            except (KafkaUnavailableError, InvalidRequestError) as exc:
                logger.debug("metadata.retried reason=%s", exc)
                failures.append(exc)
        for failure in failures:
            if not isinstance(failure, KafkaUnavailableError):
                raise failure
        raise KafkaUnavailableError(f"no Kafka broker answers: {'; '.join(map(str, failures))}")

    def _share(self, brokers: int) -> Deadline | None:
        return None if self.deadline is None else Deadline(self.deadline.left() / brokers)

    def _in_turn(self) -> list[Broker]:
        """Return all brokers in the order in which they are asked: the one asked last, and those away, at the end."""
        brokers = list(dict.fromkeys((*self._cache.brokers.values(), *self._bootstrap)))
        if self._informant in brokers:
            place = brokers.index(self._informant) + 1
            brokers = brokers[place:] + brokers[:place]
        return sorted(brokers, key=_is_away)

    def _connect(self, broker: Broker, deadline: Deadline | None) -> Connection:
        """Connect, unless the broker's back-off still lasts."""
        known = self._dialling.get(broker)
        if known is not None and time.monotonic() < known.not_before:
            raise KafkaUnavailableError(f"{known.fault} (not tried again at once)")
        most_s = min(self.connect_timeout_s, self.request_timeout_s)
        left_s = most_s if deadline is None else deadline.left()
        try:
            connection = Connection(
                broker.host,
                broker.port,
                security=self._security,
                client_id=self._client_id,
                connect_timeout_s=max(0.001, min(most_s, left_s)),
                request_timeout_s=self.request_timeout_s,
                on_silence=partial(_note_silence, broker),
            )
        except InvalidRequestError:
            _FAILED[broker] = time.monotonic()
            raise
        except KafkaUnavailableError as exc:
            known = self._dialling.setdefault(broker, known or _Dialling())
            known.fault = str(exc)
            _FAILED[broker] = now = time.monotonic()
            known.not_before = now + known.backoff.grow()
            raise
        self._dialling.pop(broker, None)
        _FAILED.pop(broker, None)
        connection.deadline = deadline
        return connection


def _close_all(connections: Mapping[NodeId | None, Connection]) -> None:
    for connection in connections.values():
        connection.close()


def _is_away(broker: Broker | None) -> bool:
    if broker is None:
        return False
    return time.monotonic() - max(_FAILED.get(broker, -math.inf), _SILENT.get(broker, -math.inf)) < _FAILED_S


def _note_silence(broker: Broker) -> None:
    _SILENT[broker] = time.monotonic()


class Clusters:
    """Pool of clusters for an object shared by threads: each borrows one, whose connections the next reuses.

    The lock guards only the list of idle clusters and is never held during a request.
    """

    def __init__(self, connect: Callable[[], Cluster]) -> None:
        self._open = connect
        # Report a fault in the settings here, not at the first request.
        self._idle: list[tuple[Cluster, float]] = [(connect(), time.monotonic())]
        """The least recently used one first, and since when it has not been used."""
        self._lent: WeakSet[Cluster] = WeakSet()
        self._lock = threading.Lock()
        hold(self, "_lock")

    @contextmanager
    def borrow(
        self, deadline: Deadline | None = None, *, connect_timeout_s: float = 10.0, request_timeout_s: float = 30.0
    ) -> Iterator[Cluster]:
        """Lend a cluster to this thread, with all waiting bounded by the time-outs and the deadline."""
        cluster = self.take(connect_timeout_s=connect_timeout_s, request_timeout_s=request_timeout_s)
        try:
            cluster.deadline = deadline
            yield cluster
        finally:
            self.give_back(cluster)

    def take(self, *, connect_timeout_s: float = 10.0, request_timeout_s: float = 30.0) -> Cluster:
        """Return a cluster, for this thread until it is given back."""
        with self._lock:
            cluster = self._idle.pop()[0] if self._idle else self._open()
            self._lent.add(cluster)
        cluster.lend(connect_timeout_s, request_timeout_s)
        return cluster

    def give_back(self, cluster: Cluster) -> None:
        """Take a cluster back: a connection on which an answer is awaited is used no more."""
        cluster.deadline = None
        if is_gone(self._lock):
            return
        with self._lock:
            if cluster in self._lent:
                self._lent.remove(cluster)
                self._idle.append((cluster, time.monotonic()))
            else:  # the pool was closed meanwhile
                cluster.close()
            is_spare = bool(self._idle) and time.monotonic() - self._idle[0][1] > _IDLE_S
        if is_spare:
            self.trim()

    def trim(self) -> None:
        """Close what is more than is used."""
        if is_gone(self._lock):
            return
        limit = time.monotonic() - _IDLE_S
        with self._lock:
            spare = [item for item in self._idle if item[1] <= limit]
            del self._idle[: len(spare)]
        for cluster, _ in spare:
            cluster.close()

    def close(self) -> None:
        """Close the idle connections; the next request opens others."""
        if is_gone(self._lock):
            return
        with self._lock:
            self._lent.clear()
            for cluster, _ in self._idle:
                cluster.disconnect()


# Questions to the leaders of partitions, retried until each has answered or the deadline has passed, so they must be
# safe to repeat. One look-up covers all topics; each leader gets one request, and all work on theirs at the same time.

T = TypeVar("T")

_UNHEARD_OF_S: Final = 1.0
"""Time for which brokers may deny that a topic exists: not all learn at once of a new one, busy ones last."""
_NOT_THERE_YET_S: Final = 5.0
"""The same for the leader itself, while others name it as the leader."""


class LeaderQuestion(NamedTuple, Generic[T]):
    """Question to a leader: builds the request for some of its partitions, and reads the answer."""

    request: Callable[[list[Partition]], Payload]
    response_type: type[Payload]
    answers: Callable[[Payload], Iterable[tuple[Partition, ErrorCode, T]]]


def of_partitions(value: Callable[[Any], T]) -> Callable[[Payload], Iterator[tuple[Partition, ErrorCode, T]]]:
    """Return the reader of an answer about partitions, by topics: of each its place, code and a value."""

    def read(answer: Any) -> Iterator[tuple[Partition, ErrorCode, T]]:
        for topic in answer.topics:
            for item in topic.partitions:
                yield (str(topic.name), int(item.partition_index)), item.error_code, value(item)

    return read


def by_topic(partitions: Iterable[Partition]) -> dict[TopicName, tuple[i32, ...]]:
    """Return the numbers of partitions by their topics, as requests name them."""
    found = groupby(sorted(partitions), itemgetter(0))
    return {TopicName(topic): tuple(i32(number) for _, number in items) for topic, items in found}


def offsets_request(
    timestamp: int, isolation: Isolation, places: Iterable[Partition], replica: int = CLIENT
) -> ListOffsetsRequest:
    """Return the request for the offset of a time, or of an end, in partitions of one leader."""
    at = i64(timestamp)
    return ListOffsetsRequest(
        replica_id=BrokerId(replica),
        isolation_level=i8(isolation.value),
        topics=tuple(
            ListOffsetsTopic(
                name=topic,
                partitions=tuple(ListOffsetsPartition(partition_index=item, timestamp=at) for item in items),
            )
            for topic, items in by_topic(places).items()
        ),
    )


class LeaderAnswers(NamedTuple, Generic[T]):
    """Result of asking once: values, refusals, and lost connections."""

    found: dict[Partition, T]
    refused: dict[Partition, tuple[ErrorCode, bool]]
    """Error code, and whether the leader itself gave it."""
    lost: dict[Partition, KafkaUnavailableError]


def ask_once(cluster: Cluster, places: Iterable[Partition], question: LeaderQuestion[T]) -> LeaderAnswers[T]:
    """Ask the leader of each place once; raise KafkaUnavailableError only if no broker answers the look-up."""
    result: LeaderAnswers[T] = LeaderAnswers({}, {}, {})
    by_leader: dict[NodeId, list[Partition]] = {}
    wanted = sorted(set(places))
    unknown = cluster.learn({topic for topic, _ in wanted})
    for place in wanted:
        try:
            if place[0] in unknown:
                raise CodeError(unknown[place[0]], f"topic {place[0]}")
            by_leader.setdefault(cluster.leader(*place), []).append(place)
        except CodeError as fault:
            result.refused[place] = fault.code, False
    asked: list[tuple[Connection, list[Partition]]] = []
    for node, led in by_leader.items():
        try:
            connection = cluster.connection(node)
            connection.send(question.request(led))
            asked.append((connection, led))
        except KafkaUnavailableError as fault:
            _lose(cluster, result, led, fault)
    for connection, led in asked:
        try:
            for place, code, value in question.answers(connection.receive(question.response_type)):
                if code is ErrorCode.none:
                    result.found[place] = value
                else:
                    cluster.forget_leader(place[0])
                    result.refused[place] = code, True
        except KafkaUnavailableError as fault:
            _lose(cluster, result, led, fault)
    return result


def _lose(
    cluster: Cluster, result: LeaderAnswers[T], places: Iterable[Partition], fault: KafkaUnavailableError
) -> None:
    for place in places:
        cluster.forget_leader(place[0])
        result.lost[place] = fault


def ask_leaders(
    cluster: Cluster, places: Iterable[Partition], question: LeaderQuestion[T], doing: str, deadline: Deadline
) -> dict[Partition, T]:
    """Return the answer of each place's leader.

    Waits for partitions that have no leader at the moment, or that not all brokers know yet.

    Args:
        doing: The attempt, for errors, such as ``read the end``; the name of the topic follows.

    Raises:
        NotFoundError, NotAuthorizedError, InvalidRequestError: A leader refused, and would refuse again.
        KafkaUnavailableError: Not all have answered before the deadline.
    """
    pending = set(places)
    found: dict[Partition, T] = {}
    backoff, patience = Backoff(), Patience(logger)
    started = time.monotonic()
    while pending:
        why: object = "no answer"
        try:
            result = ask_once(cluster, pending, question)
        except KafkaUnavailableError as fault:
            if deadline.passed():
                raise KafkaUnavailableError(f"cannot {doing} within {deadline.timeout_s:g} s: {fault}") from fault
            why = fault
        else:
            found |= result.found
            pending.difference_update(result.found)
            for (topic, partition), (code, by_leader) in result.refused.items():
                why = f"topic {topic}: {codes.name(code)}"
                asked_s = time.monotonic() - started
                _check_answer(code, by_leader, asked_s, f"{doing} of topic {topic}", f"topic {topic}", partition)
            why = next(iter(result.lost.values()), why)
            if pending and deadline.passed():
                raise KafkaUnavailableError(
                    f"cannot {doing} of topic {min(pending)[0]} within {deadline.timeout_s:g} s: {why}"
                )
        if pending:
            patience.tell(doing, why)
            backoff.sleep(deadline)
    return found


def _check_answer(code: ErrorCode, by_leader: bool, asked_s: float, doing: str, resource: str, partition: int) -> None:
    """Raise if a retry cannot help."""
    if code is ErrorCode.unknown_topic_or_partition:
        if asked_s >= (_NOT_THERE_YET_S if by_leader else _UNHEARD_OF_S):
            raise NotFoundError(f"cannot {doing}: there is no such topic, or it has no partition {partition}")
    elif codes.meaning(codes.READ, code) not in (Meaning.REFRESH, Meaning.RETRY) and (
        is_definite(code) or code is ErrorCode.unknown_server_error
    ):
        raise refusal(code, doing, resource)
