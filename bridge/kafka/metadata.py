"""Who leads what: brokers, partition leaders and coordinators, and one connection to each broker in use.

Answers are cached until somebody learns that they are wrong and says so (``forget_*``). Look-ups go over a connection
of their own, so that they never stand behind, or between, requests that are under way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import IntEnum
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeVar

from kio.schema.errors import ErrorCode
from kio.schema.find_coordinator.v4 import FindCoordinatorRequest, FindCoordinatorResponse
from kio.schema.metadata.v12 import MetadataRequest, MetadataResponse
from kio.schema.metadata.v12.request import MetadataRequestTopic
from kio.schema.types import TopicName
from kio.static.primitive import i8
from kio.static.protocol import Payload

from bridge.errors import ConfigError
from bridge.kafka.errors import ConnectionLostError, KafkaUnavailable
from bridge.kafka.security import Security
from bridge.kafka.wire import Connection

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Payload)
NodeId = int


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


class Cluster:
    """The brokers of one cluster as seen by one client; not thread-safe.

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
        self._leaders: dict[tuple[str, int], NodeId] = {}
        self._partition_counts: dict[str, int] = {}
        self._coordinators: dict[tuple[CoordinatorType, str], NodeId] = {}
        self._connections: dict[NodeId, Connection] = {}
        self._control: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def leader(self, topic: str, partition: int) -> NodeId:
        """Broker that leads the partition; CodeError if the broker asked does not know (the topic, or a leader)."""
        node = self._leaders.get((topic, partition))
        if node is None:
            self._look_up(topic)
            node = self._leaders.get((topic, partition))
        if node is None:
            raise CodeError(ErrorCode.unknown_topic_or_partition, f"partition {partition} of topic {topic}")
        return node

    def partition_count(self, topic: str) -> int:
        """Partitions of a topic, as when ``leader`` last looked it up."""
        return self._partition_counts[topic]

    def forget_leader(self, topic: str) -> None:
        """Ask anew next time: a broker said that it does not lead this topic."""
        for key in [key for key in self._leaders if key[0] == topic]:
            del self._leaders[key]

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
                self._connections[node] = existing
                return existing
            existing.close()
            logger.debug("connection to %s had gone, opening another", existing.address)
        self._connections[node] = connection = self._connect(self._brokers[node])
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

    def _look_up(self, topic: str) -> None:
        request = MetadataRequest(
            topics=(MetadataRequestTopic(topic_id=None, name=TopicName(topic)),),
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )
        answer = self._ask(request, MetadataResponse)
        self._brokers.update({broker.node_id: Broker(broker.host, broker.port) for broker in answer.brokers})
        found = answer.topics[0]
        if found.error_code != ErrorCode.none:
            raise CodeError(found.error_code, f"topic {topic}")
        self._partition_counts[topic] = len(found.partitions)
        for partition in found.partitions:
            if partition.leader_id >= 0 and partition.leader_id in self._brokers:
                self._leaders[topic, partition.partition_index] = partition.leader_id
        if not any(key[0] == topic for key in self._leaders):
            raise CodeError(ErrorCode.leader_not_available, f"topic {topic}")

    def _ask(self, request: Payload, response_type: type[R]) -> R:
        """Ask any broker; a connection that turns out dead is replaced, since look-ups can be repeated."""
        if self._control is not None:
            try:
                if self._control.usable():
                    return self._control.call(request, response_type)
            except ConnectionLostError as exc:
                logger.debug("asking another broker: %s", exc)
            self._control.close()
            self._control = None
        failures = []
        for broker in dict.fromkeys((*self._brokers.values(), *self._bootstrap)):
            try:
                self._control = self._connect(broker)
                return self._control.call(request, response_type)
            except KafkaUnavailable as exc:
                failures.append(str(exc))
        raise KafkaUnavailable(f"no Kafka broker answers: {'; '.join(failures)}")

    def _connect(self, broker: Broker) -> Connection:
        return Connection(
            broker.host,
            broker.port,
            security=self._security,
            client_id=self._client_id,
            connect_timeout_s=self._connect_timeout_s,
            request_timeout_s=self._request_timeout_s,
        )
