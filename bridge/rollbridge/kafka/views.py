"""Descriptions of topics and of the cluster, with the operations that the caller may perform.

Requested over our own connections: librdkafka's DescribeTopics and DescribeCluster end the process with a failed
assertion (``rko_result`` in rdkafka_admin.c, seen with 2.16) when a broker that has just started answers that it knows
no brokers and no topics yet.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from kio.schema.describe_cluster.v0 import DescribeClusterRequest, DescribeClusterResponse
from kio.schema.errors import ErrorCode
from kio.schema.metadata.v12 import MetadataResponse
from kio.schema.metadata.v12.response import MetadataResponseTopic

from rollbridge.calls import Backoff, Deadline, Patience
from rollbridge.kafka.errors import KafkaUnavailableError, is_definite, refusal
from rollbridge.kafka.metadata import Broker, Cluster, CodeError
from rollbridge.kafka.seal import SEALED

logger = logging.getLogger(__name__)

_NOT_SAID: Final = -(1 << 31)
"""Value of the operations if they were not requested."""
_OPERATIONS: Final = (
    *("UNKNOWN", "ANY", "ALL", "READ", "WRITE", "CREATE", "DELETE", "ALTER", "DESCRIBE", "CLUSTER_ACTION"),
    *("DESCRIBE_CONFIGS", "ALTER_CONFIGS", "IDEMPOTENT_WRITE", "CREATE_TOKENS", "DESCRIBE_TOKENS"),
)
"""Kafka's names of operations, by the number of their bit. Source: Kafka's AclOperation."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """Description of an existing topic.

    Attributes:
        replication_factor: Smallest number of replicas of any partition.
        in_sync: Smallest number of in-sync replicas of any partition.
        is_led: True if every partition has a leader.
        operations: Operations permitted to the caller's principal, by Kafka's names; empty unless requested.
        config: Settings, defaults included, if requested.
        own: Names of those settings that the topic has of its own.
    """

    name: str
    topic_id: uuid.UUID
    partitions: int
    replication_factor: int
    in_sync: int
    is_led: bool
    operations: frozenset[str]
    config: Mapping[str, str] = field(default_factory=dict)
    own: frozenset[str] = frozenset()

    @property
    def sealed(self) -> bool:
        """True if the topic is closed to new records."""
        return all(self.config.get(key) == value for key, value in SEALED.items())

    @property
    def sealing(self) -> dict[str, str | None]:
        """Settings that a seal changes; None where the topic has none of its own."""
        return {key: self.config.get(key) if key in self.own else None for key in SEALED}


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Description of a cluster: its identity, its brokers by id, and the caller's permitted operations."""

    cluster_id: str
    brokers: Mapping[int, Broker]
    operations: frozenset[str]


def view_topics(
    cluster: Cluster, names: Iterable[str], timeout_s: float, *, with_operations: bool = False
) -> dict[str, TopicDescription]:
    """Describe those of the topics that exist.

    Raises:
        KafkaUnavailableError: No broker that knows the cluster has answered in time.
        NotAuthorizedError, InvalidRequestError: A topic was refused.
    """

    def read(topic: MetadataResponseTopic) -> TopicDescription:
        _check(topic.error_code, f"topic {topic.name}")
        return _description(topic)

    return _view(cluster, names, timeout_s, read, with_operations=with_operations)


def view_each(cluster: Cluster, names: Iterable[str], timeout_s: float) -> dict[str, TopicDescription | ErrorCode]:
    """Describe those of the topics that exist, with the permitted operations; of a refused one, return why.

    Raises:
        KafkaUnavailableError: No broker that knows the cluster has answered in time.
    """

    def read(topic: MetadataResponseTopic) -> TopicDescription | ErrorCode:
        return _description(topic) if topic.error_code is ErrorCode.none else topic.error_code

    return _view(cluster, names, timeout_s, read, with_operations=True)


def _view(
    cluster: Cluster,
    names: Iterable[str],
    timeout_s: float,
    read: Callable[[MetadataResponseTopic], T],
    *,
    with_operations: bool,
) -> dict[str, T]:
    """Return what is read of those of the topics that exist.

    One that exists for none of two brokers does not: a broker that is cut off from the others does not know what was
    made since.
    """
    deadline = Deadline(timeout_s)
    found: dict[str, T] = {}

    def ask(wanted: Sequence[str]) -> list[str]:
        answer = _metadata(cluster, wanted, with_operations=with_operations)
        for item in answer.topics:
            if item.error_code is not ErrorCode.unknown_topic_or_partition:
                found[str(item.name)] = read(item)
        missing = [name for name in wanted if name not in found]
        if missing:
            cluster.doubt(answer)
        return missing

    missing = _patiently(partial(ask, tuple(names)), deadline.left(), "describe topics")
    if missing:
        _patiently(partial(ask, missing), deadline.left(), "describe topics")
    return found


def view_topic_names(cluster: Cluster, timeout_s: float) -> frozenset[str]:
    """Return the names of all topics that the caller may see.

    Raises:
        KafkaUnavailableError: No broker that knows the cluster has answered in time.
    """

    def ask() -> frozenset[str]:
        return frozenset(str(item.name) for item in _metadata(cluster, None).topics)

    return _patiently(ask, timeout_s, "list topics")


def view_cluster(cluster: Cluster, timeout_s: float) -> ClusterView:
    """Describe the cluster.

    Raises:
        KafkaUnavailableError: No broker that knows it has answered in time.
        NotAuthorizedError
    """
    request = DescribeClusterRequest(include_cluster_authorized_operations=True)

    def ask() -> ClusterView:
        answer = cluster.ask_any(request, DescribeClusterResponse)
        _check(answer.error_code, "the cluster")
        _check_knows_brokers(answer)
        brokers = {int(item.broker_id): Broker(item.host, item.port) for item in answer.brokers}
        return ClusterView(answer.cluster_id, brokers, _operations(answer.cluster_authorized_operations))

    return _patiently(ask, timeout_s, "describe the cluster")


def _patiently(ask: Callable[[], T], timeout_s: float, doing: str) -> T:
    """Retry with back-off while no broker answers, until the time-out."""
    deadline = Deadline(timeout_s)
    backoff, patience = Backoff(), Patience(logger)
    while True:
        try:
            return ask()
        except KafkaUnavailableError as fault:
            if deadline.passed():
                raise KafkaUnavailableError(
                    f"cannot {doing} within {timeout_s:g} s: {fault}; nothing was done"
                ) from fault
            patience.tell(doing, fault)
        except CodeError as fault:
            raise refusal(fault.code, doing, fault.subject) from fault
        backoff.sleep(deadline)


def _metadata(cluster: Cluster, topics: Iterable[str] | None, *, with_operations: bool = False) -> MetadataResponse:
    answer = cluster.metadata(topics, with_operations=with_operations)
    _check_knows_brokers(answer)
    return answer


def _check_knows_brokers(answer: MetadataResponse | DescribeClusterResponse) -> None:
    """Refuse the answer of a broker that has just started: the topics and brokers it leaves out may exist."""
    if not answer.brokers:
        raise KafkaUnavailableError("the broker that was asked knows of no brokers yet")


def _check(code: ErrorCode, subject: str) -> None:
    if code is ErrorCode.none:
        return
    if is_definite(code):
        raise CodeError(code, subject)
    raise KafkaUnavailableError(f"{subject}: {code.name.upper()}")


def _description(topic: MetadataResponseTopic) -> TopicDescription:
    partitions = topic.partitions
    return TopicDescription(
        str(topic.name),
        topic.topic_id or uuid.UUID(int=0),
        len(partitions),
        min((len(item.replica_nodes) for item in partitions), default=0),
        min((len(item.isr_nodes) for item in partitions), default=0),
        all(item.leader_id >= 0 for item in partitions),
        _operations(topic.topic_authorized_operations),
    )


def _operations(bits: int) -> frozenset[str]:
    if bits == _NOT_SAID:
        return frozenset()
    return frozenset(name for number, name in enumerate(_OPERATIONS) if bits >> number & 1)
