"""Who leads what: brokers, partition leaders and coordinators, and one connection to each broker in use.

Answers are cached until somebody learns that they are wrong and says so (``forget_*``). Look-ups go over a connection
of their own, so that they never stand behind, or between, requests that are under way.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeVar

from kio.schema.errors import ErrorCode
from kio.schema.find_coordinator.v4 import FindCoordinatorRequest, FindCoordinatorResponse
from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse
from kio.schema.metadata.v12.request import MetadataRequestTopic
from kio.schema.types import TopicName
from kio.static.primitive import i8
from kio.static.protocol import Payload

from rollbridge.errors import ConfigError, KafkaUnavailable, NotFoundError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.errors import ConnectionLostError, Meaning, is_definite, refusal
from rollbridge.kafka.retry import Backoff, Deadline
from rollbridge.security.kafka import Security

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Payload)
NodeId = int

_DIAL_FIRST_S: Final = 0.02
_DIAL_MAX_S: Final = 1.0
_IDLE_MAX: Final = 2


class Isolation(IntEnum):
    """Which end of a partition is meant."""

    READ_UNCOMMITTED = 0
    """The high watermark: everything that is replicated."""
    READ_COMMITTED = 1
    """The last stable offset: everything before the first native transaction that is still open."""


class CoordinatorType(IntEnum):
    """Kinds of coordinators, numbered as in FindCoordinator."""

    GROUP = 0
    TRANSACTION = 1


class CodeError(Exception):
    """A broker answered with an error code; the caller knows what that means for its request."""

    def __init__(self, code: ErrorCode, subject: str, detail: str | None = None) -> None:
        super().__init__(f"{subject}: {code.name.upper()}{f' ({detail})' if detail else ''}")
        self.code: Final = code
        self.subject: Final = subject


class Broker(NamedTuple):
    """Where a broker listens."""

    host: str
    port: int


def parse_bootstrap(servers: str) -> list[Broker]:
    """Read ``host:port,host:port`` (IPv6 addresses in brackets); ConfigError names the entry that is wrong."""
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
    """What is known of a broker that could not be reached the last time."""

    backoff: Backoff = field(default_factory=lambda: Backoff(_DIAL_FIRST_S, _DIAL_MAX_S))
    not_before: float = 0.0
    fault: str = ""


class Cluster:
    """The brokers of one cluster as seen by one client; not thread-safe.

    A broker that cannot be reached is not dialled again before a pause is over, which grows up to a second; until then
    it counts as unreachable.

    Raises:
        KafkaUnavailable: From any method that asks a broker: none could be reached.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        security: Mapping[str, str] | None = None,
        client_id: str = "rollbridge",
        connect_timeout_s: float = 10.0,
        request_timeout_s: float = 30.0,
    ) -> None:
        self._bootstrap = parse_bootstrap(bootstrap_servers)
        self._security = Security.from_config(security)
        self._client_id = client_id
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._brokers: dict[NodeId, Broker] = {}
        self._leaders: dict[str, dict[int, NodeId]] = {}
        self._partition_counts: dict[str, int] = {}
        self._coordinators: dict[tuple[CoordinatorType, str], NodeId] = {}
        self._connections: dict[NodeId, Connection] = {}
        self._control: Connection | None = None
        self._dialling: dict[Broker, _Dialling] = {}
        self._deadline: Deadline | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """No connection made, and no answer awaited, in this context takes longer than until the deadline."""
        before, self._deadline = self._deadline, deadline
        try:
            yield
        finally:
            self._deadline = before

    def leader(self, topic: str, partition: int) -> NodeId:
        """Broker that leads the partition; CodeError if the broker asked does not know (the topic, or a leader)."""
        leaders = self._leaders.get(topic, {})
        if partition in leaders:
            return leaders[partition]
        self.forget_leader(topic)
        fault = self.learn([topic]).get(topic)
        if fault is not None:
            raise CodeError(fault, f"topic {topic}")
        node = self._leaders.get(topic, {}).get(partition)
        if node is None:
            missing = partition >= self._partition_counts.get(topic, 0)
            code = ErrorCode.unknown_topic_or_partition if missing else ErrorCode.leader_not_available
            raise CodeError(code, f"partition {partition} of topic {topic}")
        return node

    def known_leader(self, topic: str, partition: int) -> NodeId | None:
        """The same without asking anybody; None if it is not known."""
        return self._leaders.get(topic, {}).get(partition)

    def leaders(self, topic: str) -> Mapping[int, NodeId]:
        """Brokers that lead the partitions of a topic, as far as is known, without asking anybody."""
        return dict(self._leaders.get(topic, {}))

    def broker(self, node: NodeId) -> Broker:
        """Where a broker listens that was named as a leader or coordinator."""
        return self._brokers[node]

    def partition_count(self, topic: str) -> int:
        """Partitions of a topic, as when ``leader`` last looked it up."""
        return self._partition_counts[topic]

    def forget_leader(self, topic: str) -> None:
        """Ask anew next time: a broker said that it does not lead this topic."""
        self._leaders.pop(topic, None)

    def coordinator(self, kind: CoordinatorType, key: str) -> NodeId:
        """Broker that coordinates this transactional id or consumer group; CodeError if it cannot be told now."""
        node = self._coordinators.get((kind, key))
        if node is not None:
            return node
        request = FindCoordinatorRequest(key_type=i8(kind.value), coordinator_keys=(key,))
        found = self._ask(request, FindCoordinatorResponse).coordinators[0]
        if found.error_code != ErrorCode.none:
            raise CodeError(found.error_code, f"coordinator of {key}", found.error_message)
        self._brokers[found.node_id] = Broker(found.host, found.port)
        self._coordinators[kind, key] = found.node_id
        return found.node_id

    def forget_coordinator(self, kind: CoordinatorType, key: str) -> None:
        """Ask anew next time: a broker said that it is not the coordinator, or does not answer."""
        self._coordinators.pop((kind, key), None)

    def connection(self, node: NodeId) -> Connection:
        """Connection to a broker: the one at hand if it is usable, else a new one."""
        existing = self._connections.pop(node, None)
        if existing is not None:
            if existing.usable():
                existing.deadline = self._deadline
                self._connections[node] = existing
                return existing
            existing.close()
            logger.debug("connection to %s had gone, opening another", existing.address)
        self._connections[node] = connection = self._connect(self._brokers[node], self._deadline)
        return connection

    def ready_connection(self, node: NodeId) -> Connection | None:
        """The connection to a broker that is at hand, without dialling; None if there is none that is usable."""
        existing = self._connections.get(node)
        return existing if existing is not None and existing.usable() else None

    def broker_connection(self, node: NodeId, broker: Broker) -> Connection:
        """As :meth:`connection`, to a broker of which the caller knows where it listens."""
        self._brokers[node] = broker
        return self.connection(node)

    def dial(self, broker: Broker) -> Connection:
        """A connection of the caller's own, without a deadline."""
        connection = self._connect(broker, self._deadline)
        connection.deadline = None
        return connection

    def ask_any(self, request: Payload, response_type: type[R]) -> R:
        """Ask whichever broker answers; the request may be repeated, so only for what can be."""
        return self._ask(request, response_type)

    def disconnect(self) -> None:
        """Drop every connection; look-ups are kept."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._control is not None:
            self._control.close()
            self._control = None

    def forget(self) -> None:
        """Drop every connection and every look-up; what was under way stays unknown."""
        self.disconnect()
        self._leaders.clear()
        self._coordinators.clear()

    close = forget

    def learn(self, topics: Iterable[str]) -> dict[str, ErrorCode]:
        """Look up who leads topics, those that are not known yet, with one request; returns those with a fault."""
        unknown = sorted({topic for topic in topics if topic not in self._leaders})
        if not unknown:
            return {}
        request = MetadataRequest(
            topics=tuple(MetadataRequestTopic(topic_id=None, name=TopicName(topic)) for topic in unknown),
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )
        answer = self._ask(request, MetadataResponse)
        if not answer.brokers:
            # A broker that has just been started knows of no brokers and no topics yet.
            return dict.fromkeys(unknown, ErrorCode.leader_not_available)
        self._brokers.update({broker.node_id: Broker(broker.host, broker.port) for broker in answer.brokers})
        faults: dict[str, ErrorCode] = {}
        for found in answer.topics:
            topic = str(found.name)
            if found.error_code != ErrorCode.none:
                faults[topic] = found.error_code
                continue
            leaders = {
                int(partition.partition_index): int(partition.leader_id)
                for partition in found.partitions
                if partition.leader_id >= 0 and partition.leader_id in self._brokers
            }
            self._partition_counts[topic] = len(found.partitions)
            if leaders:
                self._leaders[topic] = leaders
            else:
                faults[topic] = ErrorCode.leader_not_available
        return faults

    def _ask(self, request: Payload, response_type: type[R]) -> R:
        """Ask any broker; a connection that turns out dead is replaced, since look-ups can be repeated.

        The time up to the deadline is shared among those that are asked one after the other, since one that is stopped
        takes connections and answers nothing.
        """
        # What nobody has complained about before what could not be reached.
        brokers = sorted(dict.fromkeys((*self._brokers.values(), *self._bootstrap)), key=self._reluctance)
        if self._control is not None:
            try:
                if self._control.usable():
                    self._control.deadline = self._share(len(brokers))
                    return self._control.call(request, response_type)
            except ConnectionLostError as exc:
                logger.debug("asking another broker: %s", exc)
            self._control.close()
            self._control = None
        failures = []
        for number, broker in enumerate(brokers):
            share = self._share(len(brokers) - number)
            try:
                self._control = self._connect(broker, share)
                return self._control.call(request, response_type)
            except KafkaUnavailable as exc:
                failures.append(str(exc))
        raise KafkaUnavailable(f"no Kafka broker answers: {'; '.join(failures)}")

    def _share(self, brokers: int) -> Deadline | None:
        """The deadline of the next one of some brokers that are asked one after the other."""
        return None if self._deadline is None else Deadline(self._deadline.left() / brokers)

    def _reluctance(self, broker: Broker) -> float:
        known = self._dialling.get(broker)
        return 0.0 if known is None else known.not_before

    def _connect(self, broker: Broker, deadline: Deadline | None) -> Connection:
        """Connect, unless that has just failed."""
        known = self._dialling.get(broker)
        if known is not None and time.monotonic() < known.not_before:
            raise KafkaUnavailable(f"{known.fault} (not tried again at once)")
        left_s = self._connect_timeout_s if deadline is None else deadline.left()
        try:
            connection = Connection(
                broker.host,
                broker.port,
                security=self._security,
                client_id=self._client_id,
                connect_timeout_s=max(0.001, min(self._connect_timeout_s, left_s)),
                request_timeout_s=self._request_timeout_s,
            )
        except KafkaUnavailable as exc:
            known = self._dialling.setdefault(broker, known or _Dialling())
            known.fault = str(exc)
            known.not_before = time.monotonic() + known.backoff.grow()
            raise
        self._dialling.pop(broker, None)
        connection.deadline = deadline
        return connection


class Clusters:
    """Clusters for an object that several threads may use: each borrows one, whose connections are kept for the next.

    Args:
        timeout_s: Longest wait for a broker where the deadline is later.
    """

    def __init__(
        self, bootstrap_servers: str, *, security: Mapping[str, str] | None, client_id: str, timeout_s: float = 30.0
    ) -> None:
        self._open = partial(
            Cluster,
            bootstrap_servers,
            security=dict(security or {}),
            client_id=client_id,
            connect_timeout_s=min(timeout_s, 10.0),
            request_timeout_s=timeout_s,
        )
        # A fault in the settings is told here, not with the first question.
        self._idle: list[Cluster] = [self._open()]
        self._lock = threading.Lock()
        # Of objects that refer to each other, sockets may be finalized first, and complain that they were not closed;
        # this is called before any of that.
        weakref.finalize(self, _close_all, self._idle)

    @contextmanager
    def borrow(self, deadline: Deadline) -> Iterator[Cluster]:
        """A cluster for this thread alone, none of whose answers is waited for longer than until the deadline."""
        with self._lock:
            cluster = self._idle.pop() if self._idle else self._open()
        try:
            with cluster.within(deadline):
                yield cluster
        finally:
            with self._lock:
                keep = len(self._idle) < _IDLE_MAX
                if keep:
                    self._idle.append(cluster)
            if not keep:
                cluster.close()

    def close(self) -> None:
        """Drop the connections that nobody uses; the next question opens others."""
        with self._lock:
            for cluster in self._idle:
                cluster.disconnect()


def _close_all(clusters: list[Cluster]) -> None:
    for cluster in clusters:
        cluster.close()


# --------------------------------------------------------------------------------------------------------------------
# Questions to the leaders of partitions, asked again until each has answered or the deadline has passed.
# Used for what may be asked any number of times. Who leads what is looked up for all topics at once; each leader gets
# one request, and all of them work on theirs at the same time.


T = TypeVar("T")
Place = tuple[str, int]
"""A topic and the number of a partition."""

_UNHEARD_OF_S: Final = 0.2
"""How long brokers may say that there is no such topic: not all hear at once of one that has just been made."""
_NOT_THERE_YET_S: Final = 5.0
"""How long the leader itself may do so, while others name it as the leader."""


class Question(NamedTuple):
    """What is asked of a leader: the request for some of its partitions, and how its answer is read."""

    request: Callable[[list[Place]], Payload]
    response_type: type[Payload]
    answers: Callable[[Payload], Iterable[tuple[Place, ErrorCode, int]]]


class Round(NamedTuple):
    """What came of asking once: answers, Kafka's codes, and faults of connections."""

    found: dict[Place, int]
    refused: dict[Place, tuple[ErrorCode, bool]]
    """The code, and whether it is the leader's own."""
    lost: dict[Place, KafkaUnavailable]


def ask_once(cluster: Cluster, places: Iterable[Place], question: Question) -> Round:
    """Ask the leader of each place once; raises KafkaUnavailable only if nobody can say who leads."""
    result = Round({}, {}, {})
    by_leader: dict[NodeId, list[Place]] = {}
    wanted = sorted(set(places))
    unknown = cluster.learn({topic for topic, _ in wanted})
    for place in wanted:
        try:
            if place[0] in unknown:
                raise CodeError(unknown[place[0]], f"topic {place[0]}")
            by_leader.setdefault(cluster.leader(*place), []).append(place)
        except CodeError as fault:
            result.refused[place] = fault.code, False
    asked: list[tuple[Connection, list[Place]]] = []
    for node, led in by_leader.items():
        try:
            connection = cluster.connection(node)
            connection.send(question.request(led))
            asked.append((connection, led))
        except KafkaUnavailable as fault:
            _lose(cluster, result, led, fault)
    for connection, led in asked:
        try:
            for place, code, value in question.answers(connection.receive(question.response_type)):
                if code is ErrorCode.none:
                    result.found[place] = value
                else:
                    cluster.forget_leader(place[0])
                    result.refused[place] = code, True
        except KafkaUnavailable as fault:
            _lose(cluster, result, led, fault)
    return result


def _lose(cluster: Cluster, result: Round, places: Iterable[Place], fault: KafkaUnavailable) -> None:
    for place in places:
        cluster.forget_leader(place[0])
        result.lost[place] = fault


def ask_leaders(
    cluster: Cluster, places: Iterable[Place], question: Question, doing: str, deadline: Deadline
) -> dict[Place, int]:
    """The answer of each place's leader.

    A partition that has no leader at the moment, or that not all brokers know of yet, is waited for.

    Args:
        doing: What is asked, for errors, such as ``read the end``; the name of the topic follows.

    Raises:
        NotFoundError, NotAuthorizedError, InvalidRequestError: A leader refused, for good.
        KafkaUnavailable: Not all have answered before the deadline.
    """
    pending = set(places)
    found: dict[Place, int] = {}
    backoff = Backoff()
    started = time.monotonic()
    while pending:
        why: object = "no answer"
        try:
            result = ask_once(cluster, pending, question)
        except KafkaUnavailable as fault:
            if deadline.passed():
                raise KafkaUnavailable(f"cannot {doing} within {deadline.timeout_s:g} s: {fault}") from fault
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
                raise KafkaUnavailable(
                    f"cannot {doing} of topic {min(pending)[0]} within {deadline.timeout_s:g} s: {why}"
                )
        if pending:
            logger.debug("asking again to %s: %s", doing, why)
            backoff.sleep(deadline)
    return found


def _check_answer(code: ErrorCode, by_leader: bool, asked_s: float, doing: str, resource: str, partition: int) -> None:
    """Raise if asking again is no use."""
    if code is ErrorCode.unknown_topic_or_partition:
        if asked_s >= (_NOT_THERE_YET_S if by_leader else _UNHEARD_OF_S):
            raise NotFoundError(f"cannot {doing}: there is no such topic, or it has no partition {partition}")
    elif codes.meaning(codes.READ, code) not in (Meaning.REFRESH, Meaning.RETRY) and (
        is_definite(code) or code is ErrorCode.unknown_server_error
    ):
        raise refusal(code, doing, resource)
