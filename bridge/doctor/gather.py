"""Gathering facts: what Kafka and ZooKeeper say about a cluster. Reads only."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from kio.schema.describe_producers.v0 import DescribeProducersRequest, DescribeProducersResponse
from kio.schema.describe_producers.v0.request import TopicRequest
from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName
from kio.static.primitive import i32

from bridge.config import ConnectionSettings
from bridge.doctor.facts import BrokerFacts, ClusterFacts, GroupFacts, OpenNative, StreamFacts, TopicFacts
from bridge.errors import InvalidRequestError, RollbridgeError
from bridge.kafka.clients import admin_config
from bridge.kafka.metadata import Cluster
from bridge.kafka.security import Security
from bridge.kafka.topics import TopicAdmin, TopicDescription
from bridge.kafka.translate import translate
from bridge.kafka.wire import Connection
from bridge.model import paths
from bridge.model.epochs import EpochHistory
from bridge.model.names import GroupName
from bridge.model.records import StreamConfig
from bridge.model.under_way import Committing, Scaling
from bridge.zookeeper.metadata import Metadata
from bridge.zookeeper.session import ZooKeeperSession

logger = logging.getLogger(__name__)

_OURS: Final = (".commit-log", ".transaction-buffer")
_ANSWER_S: Final = 30.0


def gather(settings: ConnectionSettings) -> ClusterFacts:
    """Look at a cluster.

    Raises:
        KafkaUnavailable, ZooKeeperUnavailable: nobody answers.
        NotAuthorizedError: it may not be looked at.
    """
    topics = TopicAdmin(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name)
    config = admin_config(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name)
    admin = AdminClient(config, logger=logger)
    description = _wait(admin.describe_cluster(include_authorized_operations=True), "describe the cluster")
    with (
        ZooKeeperSession(settings.zookeeper, root=settings.zookeeper_root, name=settings.client_name) as session,
        Cluster(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name) as cluster,
    ):
        metadata = Metadata(session)
        recorded = metadata.cluster()
        streams = [_stream(metadata, config) for config in metadata.streams()]
        found = dict(_topics(admin, topics, _names(admin)))
        return ClusterFacts(
            kafka_cluster_id=str(description.cluster_id),
            recorded_cluster_id=None if recorded is None else recorded.kafka_cluster_id,
            now_ms=int(time.time() * 1000),
            brokers=[_broker(admin, settings, node) for node in description.nodes],
            coordinators=metadata.coordinators(),
            groups=[_group(metadata, session, name) for name in metadata.groups()],
            streams=streams,
            topics=found,
            open_natives=[item for name in found for item in _open_natives(cluster, name)],
            operations=_operations(description.authorized_operations),
        )


def _wait(future: Any, doing: str, resource: str = "") -> Any:
    try:
        return future.result(_ANSWER_S)
    except Exception as fault:
        raise translate(fault, doing, resource) from fault


def _operations(operations: Iterable[Any] | None) -> frozenset[str]:
    return frozenset(operation.name for operation in operations or ())


def _broker(admin: AdminClient, settings: ConnectionSettings, node: Any) -> BrokerFacts:
    resource = ConfigResource(ResourceType.BROKER, str(node.id))
    entries = _wait(admin.describe_configs([resource])[resource], f"describe broker {node.id}")
    config = {name: str(entry.value) for name, entry in entries.items() if entry.value is not None}
    security = Security.from_config(settings.kafka)
    connection = Connection(node.host, node.port, security=security, client_id=settings.client_name)
    try:
        return BrokerFacts(node.id, connection.transaction_version, config)
    finally:
        connection.close()


def _names(admin: AdminClient) -> list[str]:
    """The topics whose names are ours."""
    try:
        names = admin.list_topics(timeout=_ANSWER_S).topics
    except Exception as fault:
        raise translate(fault, "list topics") from fault
    return sorted(name for name in names if name.endswith(_OURS) or ".segment-" in name)


def _topics(admin: AdminClient, topics: TopicAdmin, names: Sequence[str]) -> Iterator[tuple[str, TopicFacts]]:
    if not names:
        return
    described = topics.describe(names)
    asked = admin.describe_topics(TopicCollection(list(described)), include_authorized_operations=True)
    for name, future in asked.items():
        yield name, _topic(described[name], _wait(future, f"describe topic {name}", f"topic {name}"))


def _topic(known: TopicDescription, described: Any) -> TopicFacts:
    first = described.partitions[0]
    return TopicFacts(
        name=known.name,
        topic_id=str(known.topic_id),
        replicas=len(first.replicas),
        in_sync=len(first.isr),
        config=known.config,
        sealed=known.sealed,
        operations=_operations(described.authorized_operations),
    )


def _stream(metadata: Metadata, config: StreamConfig) -> StreamFacts:
    history: EpochHistory | None = None
    fault = "they are gone"
    try:
        history = metadata.history(config.name)
    except (RollbridgeError, ValueError) as exc:
        fault = str(exc)
    return StreamFacts(config, history, fault)


def _group(metadata: Metadata, session: ZooKeeperSession, name: GroupName) -> GroupFacts:
    record = metadata.group(name)
    if record is None:
        raise InvalidRequestError(f"group {name} was removed while it was looked at; look again")
    committing, scaling = session.get_many([paths.committing(name), paths.scaling(name)])
    return GroupFacts(
        record,
        metadata.leader(name),
        None if committing is None else Committing.from_json(committing.value).created_ms,
        None if scaling is None else Scaling.from_json(scaling.value).created_ms,
        metadata.transactions(name),
    )


def _open_natives(cluster: Cluster, topic: str) -> Iterator[OpenNative]:
    """Native transactions that are open on a topic's first partition, as its leader knows them."""
    request = DescribeProducersRequest(topics=(TopicRequest(name=TopicName(topic), partition_indexes=(i32(0),)),))
    answer = cluster.connection(cluster.leader(topic, 0)).call(request, DescribeProducersResponse)
    for partition in answer.topics[0].partitions:
        if partition.error_code != ErrorCode.none:
            logger.warning("the producers of %s can not be looked at: %s", topic, partition.error_code.name)
            continue
        for producer in partition.active_producers:
            if producer.current_txn_start_offset >= 0:
                age_s = max(time.time() - producer.last_timestamp / 1000, 0.0)
                yield OpenNative(topic, producer.producer_id, producer.current_txn_start_offset, age_s)
