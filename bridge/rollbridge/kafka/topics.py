"""Topics: create, describe, configure, truncate, seal and delete them, each call safe to repeat.

Requests go over our own connections, within the caller's deadline. A request whose answer was lost is sent again: a
topic that the first one created exists, and is compared; one that it deleted is gone. A definite refusal is an error of
its own (InvalidRequestError, NotAuthorizedError, NotFoundError, ConflictError), never KafkaUnavailableError, which
means that no broker has answered yes or no.

The ``ask_to_*`` functions each send one administration request to any broker, which forwards it to the controller if
need be; :class:`TopicAdmin` retries them and may be shared by threads.

Source: KIP-500, KIP-516, KIP-599.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kio.schema.create_topics.v7 import CreateTopicsRequest, CreateTopicsResponse
from kio.schema.create_topics.v7.request import CreatableTopic, CreatableTopicConfig
from kio.schema.delete_records.v2 import DeleteRecordsRequest, DeleteRecordsResponse
from kio.schema.delete_records.v2.request import DeleteRecordsPartition, DeleteRecordsTopic
from kio.schema.delete_topics.v6 import DeleteTopicsRequest, DeleteTopicsResponse
from kio.schema.delete_topics.v6.request import DeleteTopicState
from kio.schema.describe_cluster.v0 import DescribeClusterRequest, DescribeClusterResponse
from kio.schema.describe_configs.v4 import DescribeConfigsRequest, DescribeConfigsResponse
from kio.schema.describe_configs.v4.request import DescribeConfigsResource
from kio.schema.errors import ErrorCode
from kio.schema.incremental_alter_configs.v1 import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse
from kio.schema.incremental_alter_configs.v1.request import AlterableConfig, AlterConfigsResource
from kio.schema.metadata.v12 import MetadataResponse
from kio.schema.metadata.v12.response import MetadataResponseTopic
from kio.schema.types import TopicName
from kio.static.primitive import i8, i16, i32, i32Timedelta, i64

from rollbridge.base.deadlines import Backoff, Deadline, Patience
from rollbridge.errors import ConflictError, KafkaUnavailableError, RollbridgeError
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.errors import is_definite, refusal
from rollbridge.kafka.metadata import Broker, Cluster, CodeError, LeaderQuestion, ask_leaders, of_partitions
from rollbridge.kafka.offsets import Asker, P, address_of
from rollbridge.kafka.seal import SEALED, SEALING_ID, Sealer
from rollbridge.stream.names import Partition

# Descriptions of topics and of the cluster, with the operations that the caller may perform.
#
# Requested over our own connections: librdkafka's DescribeTopics and DescribeCluster end the process with a failed
# assertion (``rko_result`` in rdkafka_admin.c, seen with 2.16) when a broker that has just started answers that it
# knows no brokers and no topics yet.


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


# Administration requests, sent once.

RESOURCE_TOPIC: Final = 2
RESOURCE_BROKER: Final = 4
_TOPIC_CONFIG: Final = 1
"""Source of a setting that a topic has of its own. Source: Kafka's DescribeConfigsResponse.ConfigSource."""
_SET: Final = 0
_DELETE: Final = 1
_BROKER_DEFAULT: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """Specification of a topic."""

    name: str
    partitions: int = 1
    replication_factor: int = _BROKER_DEFAULT
    """-1: the broker's ``default.replication.factor``. Not compared with an existing topic's."""
    config: Mapping[str, str] = field(default_factory=dict)


class ItemResult(NamedTuple):
    """Broker's answer for one item: its error code and message."""

    code: ErrorCode
    detail: str | None


def ask_to_create(
    cluster: Cluster, specs: Iterable[TopicSpec], deadline: Deadline, only_validate: bool = False
) -> dict[str, ItemResult]:
    """Ask to create topics, or only to validate that; raise KafkaUnavailableError if no answer comes."""
    request = CreateTopicsRequest(
        topics=tuple(
            CreatableTopic(
                name=TopicName(spec.name),
                num_partitions=i32(spec.partitions),
                replication_factor=i16(spec.replication_factor),
                assignments=(),
                configs=tuple(CreatableTopicConfig(name=key, value=value) for key, value in spec.config.items()),
            )
            for spec in specs
        ),
        timeout=_left(deadline),
        validate_only=only_validate,
    )
    answer = cluster.ask_any(request, CreateTopicsResponse)
    return {str(item.name): ItemResult(item.error_code, item.error_message) for item in answer.topics}


def ask_to_delete(
    cluster: Cluster, topics: Iterable[str | uuid.UUID], deadline: Deadline
) -> dict[str | uuid.UUID, ItemResult]:
    """Ask to delete topics by name or by id; raise KafkaUnavailableError if no answer comes."""
    wanted = list(topics)
    request = DeleteTopicsRequest(
        topics=tuple(
            DeleteTopicState(name=None, topic_id=item)
            if isinstance(item, uuid.UUID)
            else DeleteTopicState(name=TopicName(item), topic_id=None)
            for item in wanted
        ),
        timeout=_left(deadline),
    )
    answer = cluster.ask_any(request, DeleteTopicsResponse)
    found: dict[str | uuid.UUID, ItemResult] = {}
    for item in answer.responses:
        said = ItemResult(item.error_code, item.error_message)
        # An answer to a name carries the id as well, and the other way round, if the caller may see it.
        for key in (item.topic_id, None if item.name is None else str(item.name)):
            if key is not None and key in wanted:
                found[key] = said
    return found


def ask_to_configure(
    cluster: Cluster, topics: Iterable[str], config: Mapping[str, str | None]
) -> dict[str, ItemResult]:
    """Ask to change settings of topics; raise KafkaUnavailableError if no answer comes. None takes a setting back."""
    configs = tuple(
        AlterableConfig(name=key, config_operation=i8(_DELETE if value is None else _SET), value=value)
        for key, value in config.items()
    )
    request = IncrementalAlterConfigsRequest(
        resources=tuple(
            AlterConfigsResource(resource_type=i8(RESOURCE_TOPIC), resource_name=name, configs=configs)
            for name in topics
        ),
        validate_only=False,
    )
    answer = cluster.ask_any(request, IncrementalAlterConfigsResponse)
    return {item.resource_name: ItemResult(item.error_code, item.error_message) for item in answer.responses}


def ask_to_describe_configs(
    cluster: Cluster, kind: int, names: Iterable[str], connection: Connection | None = None
) -> tuple[dict[str, ItemResult], dict[str, dict[str, str]], dict[str, frozenset[str]]]:
    """Ask for all settings of topics, or of the broker at the other end of a connection.

    Returns:
        By name the answer, the settings with their defaults, and which of them a topic has of its own.

    Raises:
        KafkaUnavailableError: No answer came.
    """
    request = DescribeConfigsRequest(
        resources=tuple(
            DescribeConfigsResource(resource_type=i8(kind), resource_name=name, configuration_keys=None)
            for name in names
        )
    )
    if connection is None:
        answer = cluster.ask_any(request, DescribeConfigsResponse)
    else:
        answer = connection.call(request, DescribeConfigsResponse)
    answers, configs, own = {}, {}, {}
    for item in answer.results:
        answers[item.resource_name] = ItemResult(item.error_code, item.error_message)
        configs[item.resource_name] = {entry.name: entry.value for entry in item.configs if entry.value is not None}
        own[item.resource_name] = frozenset(
            entry.name for entry in item.configs if entry.config_source == _TOPIC_CONFIG
        )
    return answers, configs, own


def delete_records_question(before: Mapping[Partition, int], deadline: Deadline) -> LeaderQuestion[int]:
    """Return the question to delete records below given offsets; its answers are the new first offsets."""

    def request(places: list[Partition]) -> DeleteRecordsRequest:
        by_topic: dict[str, list[DeleteRecordsPartition]] = {}
        for topic, partition in places:
            asked = DeleteRecordsPartition(partition_index=i32(partition), offset=i64(before[topic, partition]))
            by_topic.setdefault(topic, []).append(asked)
        topics = (
            DeleteRecordsTopic(name=TopicName(topic), partitions=tuple(asked)) for topic, asked in by_topic.items()
        )
        return DeleteRecordsRequest(topics=tuple(topics), timeout=_left(deadline))

    return LeaderQuestion(request, DeleteRecordsResponse, of_partitions(lambda item: int(item.low_watermark)))


def _left(deadline: Deadline) -> i32Timedelta:
    return i32Timedelta.parse(timedelta(milliseconds=max(1, int(deadline.left() * 900))))


K = TypeVar("K")

_POLL_FIRST_S: Final = 0.01
_POLL_MAX_S: Final = 0.1
MENDABLE: Final = frozenset({"message.timestamp.before.max.ms", "message.timestamp.after.max.ms"})
"""Settings in which a topic may differ from its specification, because earlier versions did not set them."""


class TopicAdmin(Asker):
    """Administration of topics; see :class:`~rollbridge.kafka.client.KafkaClient`. Thread-safe.

    Args:
        timeout_s: Time-out of every method, in seconds.

    Raises, from every method:
        KafkaUnavailableError: No answer in time. The request may have been carried out; every method may be repeated.
        NotAuthorizedError: A permission is missing.
    """

    def within(self, timeout_s: float) -> TopicAdmin:
        """Return the same with another time-out."""
        return TopicAdmin(self._clusters, timeout_s)

    def cluster_id(self) -> str:
        """Return the identity of the Kafka cluster, which never changes.

        Raises:
            InvalidRequestError: The cluster has no transactions v2.
        """
        with self._asking() as (cluster, deadline):
            found = view_cluster(cluster, deadline.left()).cluster_id
            cluster.require_transactions_v2()
            return found

    def create_topics(self, specs: Iterable[TopicSpec]) -> frozenset[str]:
        """Create topics and wait until brokers know them; return the names of those that did not exist before.

        An existing topic with the same partitions and settings is left alone, even if it was sealed since.

        Raises:
            ConflictError: A topic exists, but differs; none was changed, and none created.
            InvalidRequestError: A name, number of replicas or setting is not accepted; no topic was created.
        """
        wanted = {spec.name: spec for spec in specs}
        if not wanted:
            return frozenset()
        with self._asking() as (cluster, deadline):

            def ask(only_validate: bool) -> frozenset[str]:
                return _until_answered(
                    wanted.keys(),
                    lambda names: ask_to_create(cluster, [wanted[name] for name in names], deadline, only_validate),
                    "create topic {}",
                    deadline,
                    ignoring=ErrorCode.topic_already_exists,
                )

            if len(wanted) > 1:  # what is refused of some, or differs, is found before any is made
                there = {name: wanted[name] for name in ask(only_validate=True)}
                _compare(there, self._await_described(cluster, there, deadline))
            existing = ask(only_validate=False)
            described = self._await_described(cluster, wanted, deadline)
        _compare({name: wanted[name] for name in existing}, described)
        created = frozenset(wanted) - existing
        if created:
            logger.info("topics.created topics=%s", ",".join(sorted(created)))
        return created

    def delete_topics(self, topics: Iterable[str] | Mapping[str, uuid.UUID]) -> frozenset[str]:
        """Delete topics and wait until brokers have forgotten them; return the names of those that existed.

        Args:
            topics: Names; or names and ids, to delete only topics of these very ids. A process that resumes after a
                pause then cannot delete a topic that was created under the same name since.
        """
        ids = {str(name): topics[name] for name in topics} if isinstance(topics, Mapping) else {}
        doomed: list[str | uuid.UUID] = [*ids.values()] if ids else list(dict.fromkeys(topics))
        if not doomed:
            return frozenset()
        names = {identity: name for name, identity in ids.items()}
        with self._asking() as (cluster, deadline):
            missing = _until_answered(
                doomed,
                lambda items: ask_to_delete(cluster, items, deadline),
                "delete topic {}",
                deadline,
                ignoring=ErrorCode.unknown_topic_id if ids else ErrorCode.unknown_topic_or_partition,
                called=lambda item: names.get(item, str(item)) if isinstance(item, uuid.UUID) else item,
            )
            gone = {item for item in doomed if item not in missing}
            deleted = frozenset(names[item] if isinstance(item, uuid.UUID) else item for item in gone)
            self._await_gone(cluster, ids or dict.fromkeys(map(str, doomed)), deadline)
        if deleted:
            logger.info("topics.deleted topics=%s", ",".join(sorted(deleted)))
        return deleted

    def list_topics(self) -> frozenset[str]:
        """Return the names of all topics that the caller may see."""
        with self._asking() as (cluster, deadline):
            return view_topic_names(cluster, deadline.left())

    def topic_ids(self, names: Iterable[str]) -> dict[str, uuid.UUID]:
        """Return the ids of the topics that exist; a topic that was deleted and recreated has another id."""
        return {name: topic.topic_id for name, topic in self.look(names).items()}

    def look_at_each(self, names: Iterable[str]) -> dict[str, TopicDescription | ErrorCode]:
        """Describe the topics that exist; of one that is refused, return why.

        A topic without a partition leader, or that may not be read, is described like any other. Settings are left
        out, except of topics that lack in-sync replicas, as far as they may be read.
        """
        wanted = sorted(set(names))
        with self._asking() as (cluster, deadline):
            looks = view_each(cluster, wanted, deadline.left()) if wanted else {}
            described = {name: item for name, item in looks.items() if isinstance(item, TopicDescription)}
            short = {name: item for name, item in described.items() if item.in_sync < item.replication_factor}
            _, configs, _ = ask_to_describe_configs(cluster, RESOURCE_TOPIC, short) if short else ({}, {}, {})
            return looks | {name: replace(item, config=configs.get(name, {})) for name, item in short.items()}

    def look(self, names: Iterable[str]) -> dict[str, TopicDescription]:
        """Describe the topics that exist, without their settings, for which the right to read them is enough."""
        with self._asking() as (cluster, deadline):
            return _described(cluster, names, deadline)

    def describe(self, names: Iterable[str], *, with_operations: bool = False) -> dict[str, TopicDescription]:
        """Describe the topics that exist, with all their settings, defaults included."""
        with self._asking() as (cluster, deadline):
            return self._describe(cluster, names, deadline, with_operations=with_operations)

    def _describe(
        self, cluster: Cluster, names: Iterable[str], deadline: Deadline, *, with_operations: bool = False
    ) -> dict[str, TopicDescription]:
        topics = _described(cluster, names, deadline, with_operations=with_operations)
        configs: dict[str, dict[str, str]] = {}
        own: dict[str, frozenset[str]] = {}

        def ask(wanted: Iterable[str]) -> Mapping[str, ItemResult]:
            answers, found, set_here = ask_to_describe_configs(cluster, RESOURCE_TOPIC, wanted)
            configs.update(found)
            own.update(set_here)
            return answers

        # One that was deleted between the two questions is left out.
        missing = _until_answered(
            topics, ask, "describe topic {}", deadline, ignoring=ErrorCode.unknown_topic_or_partition
        )
        return {
            name: replace(topic, config=configs.get(name, {}), own=own.get(name, frozenset()))
            for name, topic in topics.items()
            if name not in missing
        }

    def set_topic_config(self, names: str | Iterable[str], config: Mapping[str, str | None]) -> None:
        """Change the given settings and no others; return when the controller has accepted them.

        None takes back a setting that a topic has of its own. Brokers apply all that a little later.
        """
        topics = [names] if isinstance(names, str) else sorted(set(names))
        if not topics or not config:
            return
        with self._asking() as (cluster, deadline):
            _until_answered(
                topics, lambda items: ask_to_configure(cluster, items, config), "configure topic {}", deadline
            )

    def mend(self, specs: Iterable[TopicSpec]) -> dict[str, str]:
        """Compare topics with their specifications, repair ``MENDABLE`` settings, and return the differences as text.

        A topic without a leader counts as different; topics as specified, or that do not exist, are left out. Only
        topics created by an older version have other limits on timestamps.
        """
        wanted = {spec.name: spec for spec in specs}
        found = {}
        for name, actual in self.describe(wanted).items():
            differences = _differences(wanted[name], actual)
            old = {key: want for key, (want, _) in differences.items() if key in MENDABLE}
            if old:
                self.set_topic_config(name, old)
                logger.info("topic.configured topic=%s was=%r", name, _listed({key: differences[key] for key in old}))
            if differences or not actual.is_led:
                found[name] = _listed(differences) if differences else "none of its brokers is there"
        return found

    def delete_records(self, before: Mapping[P, int]) -> dict[P, int]:
        """Delete the records below the given offsets; return the new first offsets, at least those asked for.

        Raises:
            NotFoundError: A topic does not exist.
            InvalidRequestError: An offset is beyond the high watermark.
        """
        keys: dict[Partition, P] = {address_of(partition): partition for partition in before}
        if not keys:
            return {}
        with self._asking() as (cluster, deadline):
            question = delete_records_question({place: before[key] for place, key in keys.items()}, deadline)
            first = ask_leaders(cluster, keys, question, "delete records", deadline)
        return {keys[place]: offset for place, offset in first.items()}

    def seal(
        self,
        topics: Iterable[P],
        *,
        timeout_s: float = 60.0,
        transactional_id: str = SEALING_ID,
        foreign_s: float | None = None,
        closed: Callable[[], None] = lambda: None,
    ) -> dict[P, int]:
        """Close topics to every writer and return the ends of their partitions; see :mod:`rollbridge.kafka.seal`.

        No record will be at or after its partition's end offset; markers of native transactions may, so that sealing
        again returns a later one. May be called again at any point.

        Args:
            topics: Topics of one partition each, or all partitions of larger ones.
            timeout_s: Time-out in seconds.
            transactional_id: Transactional id for the markers that define the ends.
            foreign_s: Time for which to wait for other producers' open native transactions, once topics are closed;
                partitions on which some stay open are left out. None waits until the time-out.
            closed: Called once the topics are closed, before their ends are determined; its exceptions end the seal.

        Raises:
            UnavailableError: Some topics could not be sealed in time; carries what each waits for. They are closed to
                new records already. Call again.
            TopicNotFoundError: A topic does not exist.
            InvalidRequestError: A topic has more partitions than were given; nothing was sealed.
        """
        keys = {address_of(partition): partition for partition in topics}
        if not keys:
            return {}

        def close(names: Iterable[str], settings: Mapping[str, str | None]) -> None:
            self.set_topic_config(names, settings)
            closed()

        with self._clusters.borrow(Deadline(timeout_s)) as cluster:
            sealer = Sealer(cluster, close, transactional_id=transactional_id, timeout_s=timeout_s)
            return {keys[place]: end for place, end in sealer.seal(keys, foreign_s).items()}

    def closed(self, topics: Iterable[str]) -> frozenset[str]:
        """Return the existing topics that are closed to writers, which is the first step of sealing."""
        described = self.describe(topics)
        return frozenset(name for name, topic in described.items() if SEALED.items() <= topic.config.items())

    def _await_described(
        self, cluster: Cluster, wanted: Mapping[str, TopicSpec], deadline: Deadline
    ) -> dict[str, TopicDescription]:
        """Wait until the brokers know topics that the controller has created."""
        backoff = Backoff(_POLL_FIRST_S, _POLL_MAX_S)
        while True:
            described = self._describe(cluster, wanted, deadline)
            missing = sorted(set(wanted) - set(described))
            if not missing:
                return described
            if deadline.passed():
                raise KafkaUnavailableError(
                    f"topics {', '.join(missing)} were created, but no broker knows them after {deadline.timeout_s:g} s"
                )
            backoff.sleep(deadline)

    @staticmethod
    def _await_gone(cluster: Cluster, topics: Mapping[str, uuid.UUID | None], deadline: Deadline) -> None:
        """Wait until the brokers have forgotten topics that the controller has deleted."""
        backoff = Backoff(_POLL_FIRST_S, _POLL_MAX_S)
        while True:
            known = _described(cluster, topics, deadline)
            left = sorted(name for name, topic in known.items() if topics[name] in (None, topic.topic_id))
            for name in topics:
                cluster.forget_leader(name)
            if not left:
                return
            if deadline.passed():
                raise KafkaUnavailableError(
                    f"topics {', '.join(left)} were deleted, but brokers still know them after {deadline.timeout_s:g} s"
                )
            backoff.sleep(deadline)


def _compare(wanted: Mapping[str, TopicSpec], described: Mapping[str, TopicDescription]) -> None:
    for name, spec in wanted.items():
        actual = described[name]
        settings = {
            key: value
            for key, value in spec.config.items()
            if key not in MENDABLE and not (actual.sealed and key in SEALED)
        }
        differences = _differences(replace(spec, config=settings), actual)
        if differences:
            listed = _listed(differences)
            raise ConflictError(
                f"topic {name} exists and is not as it should be: {listed}; it was left as it is",
                resource=f"topic {name}",
                differences=differences,
                code="topic-mismatch",
            )


def _described(
    cluster: Cluster, names: Iterable[str], deadline: Deadline, *, with_operations: bool = False
) -> dict[str, TopicDescription]:
    wanted = sorted(set(names))
    return view_topics(cluster, wanted, deadline.left(), with_operations=with_operations) if wanted else {}


def _until_answered(
    items: Iterable[K],
    ask: Callable[[list[K]], Mapping[K, ItemResult]],
    doing: str,
    deadline: Deadline,
    *,
    ignoring: ErrorCode | None = None,
    called: Callable[[K], str] = str,
) -> frozenset[K]:
    """Ask until each item has a definite answer; raise a definite refusal once the others are answered.

    Args:
        ask: Asks for some items; safe to repeat, raises KafkaUnavailableError if no answer comes.
        doing: The attempt, with a place for the name.
        ignoring: Expected error.
        called: Returns the name of an item for messages.

    Returns:
        The items answered with the expected error.
    """
    pending = list(dict.fromkeys(items))
    ignored: set[K] = set()
    failure: RollbridgeError | None = None
    backoff = Backoff()
    while pending:
        why: RollbridgeError | None = None
        try:
            answers = ask(pending)
        except KafkaUnavailableError as fault:
            answers, why = {}, fault
        again = []
        for item in pending:
            code, detail = answers.get(item, (ErrorCode.request_timed_out, None))
            if code is ErrorCode.none:
                continue
            if code is ignoring:
                ignored.add(item)
                continue
            refused = refusal(code, doing.format(called(item)), f"topic {called(item)}", detail)
            if is_definite(code) or code is ErrorCode.unknown_server_error:
                failure = failure or refused
            else:
                again.append(item)
                why = why or refused
        pending = again
        if pending and deadline.passed():
            names = ", ".join(sorted(map(called, pending)))
            raise KafkaUnavailableError(f"cannot {doing.format(names)} within {deadline.timeout_s:g} s: {why}") from why
        if pending:
            logger.debug("request.retried action=%r reason=%s", doing.format(called(pending[0])), why)
            backoff.sleep(deadline)
    if failure is not None:
        raise failure
    return frozenset(ignored)


def _differences(spec: TopicSpec, actual: TopicDescription) -> dict[str, tuple[str, str]]:
    """Return the settings (and ``partitions``) that differ, with their specified and actual values."""
    differences = {
        key: (value, actual.config.get(key, ""))
        for key, value in spec.config.items()
        if actual.config.get(key) != value
    }
    if spec.partitions != actual.partitions:
        differences["partitions"] = (str(spec.partitions), str(actual.partitions))
    return differences


def _listed(differences: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"{key} is {has}, not {want}" for key, (want, has) in sorted(differences.items()))
