"""What the doctor knows of a cluster, as values."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from kio.schema.describe_producers.v0 import DescribeProducersRequest, DescribeProducersResponse
from kio.schema.describe_producers.v0.request import TopicRequest
from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName
from kio.static.primitive import i32

from rollbridge.config import ConnectionSettings
from rollbridge.errors import CorruptDataError, InvalidRequestError, NotFoundError, RollbridgeError
from rollbridge.kafka.errors import NotAuthorizedError, refusal
from rollbridge.kafka.metadata import Broker, Cluster
from rollbridge.kafka.snapshots import BufferSnapshot, EndedSince, SnapshotReader, read_latest
from rollbridge.kafka.topics import RESOURCE_BROKER, TopicAdmin, ask_to_describe_configs
from rollbridge.kafka.views import view_cluster, view_topics
from rollbridge.model import paths
from rollbridge.model.changes import Committing, Scaling, StreamFault, works_of
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.journal import split
from rollbridge.model.late import LateNotes
from rollbridge.model.names import GroupName, is_compacted_topic
from rollbridge.model.outcomes import decode_terminated
from rollbridge.model.records import ControllerEpoch, Coordinator, Group, StreamConfig, StreamState, TransactionRecord
from rollbridge.zookeeper.access import open_nodes
from rollbridge.zookeeper.metadata import Metadata
from rollbridge.zookeeper.session import Node, ZooKeeperSession


class Severity(IntEnum):
    """How bad a finding is."""

    WARNING = 1
    """It works, but something is not as it should be."""
    PROBLEM = 2
    """Something does not work, or data is in danger."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        check: Stable name of the check.
        what: What was found.
        remedy: What to do.
    """

    severity: Severity
    check: str
    what: str
    remedy: str


def problem(check: str, what: str, remedy: str) -> Finding:
    """Something does not work."""
    return Finding(Severity.PROBLEM, check, what, remedy)


def warning(check: str, what: str, remedy: str) -> Finding:
    """Something is not as it should be."""
    return Finding(Severity.WARNING, check, what, remedy)


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """A broker; ``config`` are its settings, ``transaction_version`` is Kafka's feature level."""

    id: int
    transaction_version: int
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OpenNative:
    """A native transaction that is open on a topic."""

    topic: str
    producer_id: int
    start_offset: int
    age_s: float


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic of ours.

    Attributes:
        replicas: How many replicas its first partition should have.
        in_sync: How many of these are in sync.
        operations: What the doctor's principal may do with it; empty if the broker does not say.
    """

    name: str
    topic_id: str
    replicas: int
    in_sync: int
    config: Mapping[str, str]
    sealed: bool
    operations: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A transaction group.

    Attributes:
        committing_ms, scaling_ms: When what is under way was begun; None if nothing is.
        coordinator: What its leader says of itself.
        outcome_faults: What is wrong with records of terminated transactions.
        taking_over_ms: Since when its leader has been taking over; None if it serves.
        clock_ms: By how much its leader's clock was ahead of ZooKeeper's when it took over; below 0 if behind.
        outdated: What ZooKeeper has lost, as a leader has found; None if nothing.
    """

    record: Group
    leader: str | None
    committing_ms: int | None = None
    scaling_ms: int | None = None
    transactions: Sequence[TransactionRecord] = ()
    coordinator: Coordinator | None = None
    outcome_faults: Sequence[str] = ()
    taking_over_ms: int | None = None
    clock_ms: int = 0
    outdated: str | None = None

    @property
    def name(self) -> GroupName:
        """The group."""
        return self.record.name


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream; ``history`` is None if its epochs are gone or can not be read, and ``fault`` says why.

    ``late`` is what came in behind the ends of its sealed segments.
    ``error`` is what keeps its transactions from being merged, if it is in an error state.
    """

    config: StreamConfig
    history: EpochHistory | None
    fault: str = ""
    late: LateNotes = field(default_factory=LateNotes)
    error: StreamFault | None = None


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """The snapshot of a partition of a transaction buffer, and what came after it."""

    found: BufferSnapshot
    since: EndedSince


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Everything that was looked at.

    Attributes:
        kafka_cluster_id, recorded_cluster_id: What Kafka says, and what ZooKeeper has on record.
        topics: All topics whose names are ours, by name.
        operations: What the principal may do with the cluster.
        hidden: Topics that should be there, and that the principal may not look at.
        open_nodes: Nodes in ZooKeeper that everybody may change, although we have an identity there.
        now_ms: When it was looked at.
    """

    kafka_cluster_id: str
    recorded_cluster_id: str | None
    now_ms: int
    brokers: Sequence[BrokerFacts] = ()
    coordinators: Sequence[str] = ()
    groups: Sequence[GroupFacts] = ()
    streams: Sequence[StreamFacts] = ()
    topics: Mapping[str, TopicFacts] = field(default_factory=dict)
    open_natives: Sequence[OpenNative] = ()
    snapshots: Sequence[SnapshotFacts] = ()
    operations: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    open_nodes: Sequence[str] = ()


# --------------------------------------------------------------------------------------------------------------------
# Gathering facts: what Kafka and ZooKeeper say about a cluster. Reads only.


logger = logging.getLogger(__name__)

_OURS: Final = (".commit-log", ".transaction-buffer", ".segment-")
_ANSWER_S: Final = 30.0


def gather(settings: ConnectionSettings) -> ClusterFacts:
    """Look at a cluster.

    Raises:
        KafkaUnavailable, ZooKeeperUnavailable: nobody answers.
        NotAuthorizedError: it may not be looked at.
    """
    topics = TopicAdmin(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name)
    with (
        ZooKeeperSession(
            settings.zookeeper,
            root=settings.zookeeper_root,
            name=settings.client_name,
            security=settings.zookeeper_security,
        ) as session,
        Cluster(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name) as cluster,
    ):
        view = view_cluster(cluster, _ANSWER_S)
        metadata = Metadata(session)
        recorded = metadata.cluster()
        streams = [_stream(metadata, config) for config in metadata.streams()]
        names = _names(topics)
        found = _topics(topics, names)
        return ClusterFacts(
            kafka_cluster_id=view.cluster_id,
            recorded_cluster_id=None if recorded is None else recorded.kafka_cluster_id,
            now_ms=int(time.time() * 1000),
            brokers=[_broker(cluster, node, place) for node, place in view.brokers.items()],
            coordinators=metadata.coordinators(),
            groups=[_group(settings, metadata, name, found) for name in metadata.groups()],
            streams=streams,
            topics=found,
            snapshots=list(_snapshots(settings, streams)),
            open_natives=[item for name in found for item in _open_natives(cluster, name)],
            operations=view.operations,
            hidden=_hidden(cluster, _expected(metadata, streams) - set(names)) | set(names) - found.keys(),
            open_nodes=open_nodes(session),
        )


def _broker(cluster: Cluster, node: int, place: Broker) -> BrokerFacts:
    connection = cluster.broker_connection(node, place)
    answers, configs = ask_to_describe_configs(cluster, RESOURCE_BROKER, [str(node)], connection)
    code, detail = answers[str(node)]
    if code is ErrorCode.cluster_authorization_failed:
        logger.warning("the settings of broker %d can not be looked at: %s", node, detail or code.name)
    elif code is not ErrorCode.none:
        raise refusal(code, f"describe broker {node}", f"broker {node}", detail)
    return BrokerFacts(node, connection.transaction_version, configs[str(node)])


def _names(topics: TopicAdmin) -> list[str]:
    """The topics whose names are ours."""
    names = topics.list_topics()
    return sorted(name for name in names if any(part in name for part in _OURS) or is_compacted_topic(name))


def _expected(metadata: Metadata, streams: Iterable[StreamFacts]) -> set[str]:
    """The topics that should be there."""
    names = {name.commit_log_topic for name in metadata.groups()}
    for stream in streams:
        names.add(stream.config.buffer_topic)
        if stream.history is not None:
            kept = (segment for segment in stream.history.segments() if segment not in stream.history.removed)
            names |= {stream.config.name.segment_topic(segment) for segment in kept}
    return names


def _hidden(cluster: Cluster, names: Iterable[str]) -> frozenset[str]:
    """Those of some topics that may not be looked at. Kafka says so as well of topics that are not there."""
    hidden = set()
    for name in names:
        try:
            view_topics(cluster, [name], _ANSWER_S)
        except NotAuthorizedError:
            hidden.add(name)
    return frozenset(hidden)


def _topics(topics: TopicAdmin, names: Sequence[str]) -> dict[str, TopicFacts]:
    """Those that may be looked at, settings included."""
    try:
        described = topics.describe(names, with_operations=True)
    except NotAuthorizedError:
        described = {}
        for name in names:
            with suppress(NotAuthorizedError):
                described |= topics.describe([name], with_operations=True)
    return {
        name: TopicFacts(
            name=name,
            topic_id=str(known.topic_id),
            replicas=known.replication_factor,
            in_sync=known.in_sync,
            config=known.config,
            sealed=known.sealed,
            operations=known.operations,
        )
        for name, known in described.items()
    }


def _snapshots(settings: ConnectionSettings, streams: Sequence[StreamFacts]) -> Iterator[SnapshotFacts]:
    """The snapshots of all buffers that are there, as far as they may be read."""
    by_scope: dict[str, list[StreamConfig]] = {}
    for stream in streams:
        if stream.config.state is StreamState.ACTIVE:
            by_scope.setdefault(stream.config.name.scope, []).append(stream.config)
    for scope, configs in by_scope.items():
        try:
            reader = SnapshotReader(settings.bootstrap_servers, settings.kafka, scope)
            for config in configs:
                try:
                    found = list(reader.of(config))
                except NotFoundError:
                    continue  # its buffer or commit log is gone, which other checks tell
                yield from (SnapshotFacts(item, reader.ended_since(item)) for item in found)
        except NotAuthorizedError as fault:
            logger.warning("the snapshots of scope %s can not be looked at: %s", scope, fault)


def _outcome_faults(settings: ConnectionSettings, topic: str) -> list[str]:
    """What is wrong with records of terminated transactions."""
    faults: list[str] = []
    try:
        records = read_latest(settings.bootstrap_servers, settings.kafka, topic)
    except NotAuthorizedError as fault:
        logger.warning("outcomes that are remembered can not be looked at: %s", fault)
        return faults
    for key in split({key: item.value for key, item in records.items()})[0]:
        try:
            decode_terminated(records[key].value)
        except CorruptDataError as fault:
            faults.append(f"client {key.decode(errors='replace')}: {fault}")
    return faults


def _stream(metadata: Metadata, config: StreamConfig) -> StreamFacts:
    history: EpochHistory | None = None
    fault = "they are gone"
    try:
        history = metadata.history(config.name)
    except (RollbridgeError, ValueError) as exc:
        fault = str(exc)
    late = metadata.session.get(paths.late(config.name))
    notes = LateNotes() if late is None else LateNotes.from_json(late.value)
    return StreamFacts(config, history, fault, notes, metadata.stream_fault(config.name))


def _group(settings: ConnectionSettings, metadata: Metadata, name: GroupName, topics: Collection[str]) -> GroupFacts:
    record = metadata.group(name)
    if record is None:
        raise InvalidRequestError(f"group {name} was removed while it was looked at; look again")
    half_done = [f"{paths.suspended(name)}/{title}" for title in metadata.session.children(paths.suspended(name))]
    begun = [paths.committing(name), paths.scaling(name), *half_done]
    found = zip(begun, metadata.session.get_many(begun), strict=True)
    works = [work for _, work in works_of({path: node.value for path, node in found if node is not None}, name)]
    lead = metadata.lead(name)
    leader = None if lead is None else lead.name
    raised, outdated = metadata.session.get_many([paths.controller(name), paths.outdated(name)])
    return GroupFacts(
        record,
        leader,
        min((work.created_ms for work in works if isinstance(work, Committing)), default=None),
        min((work.created_ms for work in works if isinstance(work, Scaling)), default=None),
        metadata.transactions(name),
        None if leader is None else metadata.coordinator(leader),
        _outcome_faults(settings, name.terminated_topic) if name.terminated_topic in topics else (),
        None if lead is None or lead.is_serving else lead.since_ms,
        0 if not (raised and raised.value) else _clock_ms(raised),
        None if outdated is None else outdated.value.decode("utf-8", "replace"),
    )


def _clock_ms(raised: Node) -> int:
    known = ControllerEpoch.from_json(raised.value)
    return known.since_ms - raised.modified_ms if known.epoch else 0


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
