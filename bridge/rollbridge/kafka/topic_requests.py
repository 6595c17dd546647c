"""The requests of administration: how each is written, and how its answer is read. Asked once; see ``topics``.

Any broker takes them and hands on to the controller what is the controller's. Source: KIP-500, KIP-516, KIP-599.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, NamedTuple, cast

from kio.schema.create_topics.v7 import CreateTopicsRequest, CreateTopicsResponse
from kio.schema.create_topics.v7.request import CreatableTopic, CreatableTopicConfig
from kio.schema.delete_records.v2 import DeleteRecordsRequest, DeleteRecordsResponse
from kio.schema.delete_records.v2.request import DeleteRecordsPartition, DeleteRecordsTopic
from kio.schema.delete_topics.v6 import DeleteTopicsRequest, DeleteTopicsResponse
from kio.schema.delete_topics.v6.request import DeleteTopicState
from kio.schema.describe_configs.v4 import DescribeConfigsRequest, DescribeConfigsResponse
from kio.schema.describe_configs.v4.request import DescribeConfigsResource
from kio.schema.errors import ErrorCode
from kio.schema.incremental_alter_configs.v1 import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse
from kio.schema.incremental_alter_configs.v1.request import AlterableConfig, AlterConfigsResource
from kio.schema.types import TopicName
from kio.static.primitive import i8, i16, i32, i32Timedelta, i64
from kio.static.protocol import Payload

from rollbridge.kafka.leaders import Place, Question
from rollbridge.kafka.metadata import Cluster
from rollbridge.kafka.patience import Deadline
from rollbridge.kafka.wire import Connection

RESOURCE_TOPIC: Final = 2
RESOURCE_BROKER: Final = 4
_SET: Final = 0
_BROKER_DEFAULT: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """A topic as it should be."""

    name: str
    partitions: int = 1
    replication_factor: int = _BROKER_DEFAULT
    """-1: the broker's ``default.replication.factor``. Not compared with an existing topic's."""
    config: Mapping[str, str] = field(default_factory=dict)


class Answer(NamedTuple):
    """What a broker says for one item, and what it says of that."""

    code: ErrorCode
    detail: str | None


def ask_to_create(
    cluster: Cluster, specs: Iterable[TopicSpec], deadline: Deadline, only_validate: bool = False
) -> dict[str, Answer]:
    """Ask for topics, or whether they could be created; raises KafkaUnavailable if there is no answer."""
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
    return {str(item.name): Answer(item.error_code, item.error_message) for item in answer.topics}


def ask_to_delete(
    cluster: Cluster, topics: Iterable[str | uuid.UUID], deadline: Deadline
) -> dict[str | uuid.UUID, Answer]:
    """Ask to delete topics by name or by id; raises KafkaUnavailable if there is no answer."""
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
    found: dict[str | uuid.UUID, Answer] = {}
    for item in answer.responses:
        said = Answer(item.error_code, item.error_message)
        # With a name the answer has an id too, and the other way round, where the caller may know it.
        for key in (item.topic_id, None if item.name is None else str(item.name)):
            if key is not None and key in wanted:
                found[key] = said
    return found


def ask_to_configure(cluster: Cluster, topics: Iterable[str], config: Mapping[str, str]) -> dict[str, Answer]:
    """Ask to set settings of topics; raises KafkaUnavailable if there is no answer."""
    configs = tuple(AlterableConfig(name=key, config_operation=i8(_SET), value=value) for key, value in config.items())
    request = IncrementalAlterConfigsRequest(
        resources=tuple(
            AlterConfigsResource(resource_type=i8(RESOURCE_TOPIC), resource_name=name, configs=configs)
            for name in topics
        ),
        validate_only=False,
    )
    answer = cluster.ask_any(request, IncrementalAlterConfigsResponse)
    return {item.resource_name: Answer(item.error_code, item.error_message) for item in answer.responses}


def ask_to_describe_configs(
    cluster: Cluster, kind: int, names: Iterable[str], connection: Connection | None = None
) -> tuple[dict[str, Answer], dict[str, dict[str, str]]]:
    """Ask for all settings of topics, or of the broker at the other end of a connection.

    Raises:
        KafkaUnavailable: There is no answer.
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
    answers, configs = {}, {}
    for item in answer.results:
        answers[item.resource_name] = Answer(item.error_code, item.error_message)
        configs[item.resource_name] = {entry.name: entry.value for entry in item.configs if entry.value is not None}
    return answers, configs


def delete_records_question(before: Mapping[Place, int], deadline: Deadline) -> Question:
    """The question to leaders to delete what is below some offsets; its answers are the new first offsets."""

    def request(places: list[Place]) -> DeleteRecordsRequest:
        by_topic: dict[str, list[DeleteRecordsPartition]] = {}
        for topic, partition in places:
            asked = DeleteRecordsPartition(partition_index=i32(partition), offset=i64(before[topic, partition]))
            by_topic.setdefault(topic, []).append(asked)
        topics = (
            DeleteRecordsTopic(name=TopicName(topic), partitions=tuple(asked)) for topic, asked in by_topic.items()
        )
        return DeleteRecordsRequest(topics=tuple(topics), timeout=_left(deadline))

    def answers(answer: Payload) -> Iterable[tuple[Place, ErrorCode, int]]:
        for topic in cast(DeleteRecordsResponse, answer).topics:
            for partition in topic.partitions:
                place = str(topic.name), int(partition.partition_index)
                yield place, partition.error_code, int(partition.low_watermark)

    return Question(request, DeleteRecordsResponse, answers)


def _left(deadline: Deadline) -> i32Timedelta:
    """How long the broker may take: it answers before we give up waiting for it."""
    return i32Timedelta.parse(timedelta(milliseconds=max(1, int(deadline.left() * 900))))
