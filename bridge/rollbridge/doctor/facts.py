"""Facts of the doctor about a cluster, as values, and :func:`gather`, which reads them from Kafka and ZooKeeper."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import filterfalse
from typing import Final

from kio.schema.describe_client_quotas.v1 import DescribeClientQuotasRequest, DescribeClientQuotasResponse
from kio.schema.describe_producers.v0 import DescribeProducersRequest, DescribeProducersResponse
from kio.schema.describe_producers.v0.request import TopicRequest
from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName
from kio.static.primitive import i32

from rollbridge.base.deadlines import Deadline, wall_ms
from rollbridge.buffer.snapshot_topic import BufferSnapshot, EndedSince, SnapshotReader, read_latest
from rollbridge.commitlog.outcomes import decode_terminated
from rollbridge.config import ConnectionSettings
from rollbridge.doctor.gateway_facts import GatewayFacts, IdFacts, gather_gateways
from rollbridge.errors import CorruptDataError, NotFoundError, RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import KafkaUnavailableError, NotAuthorizedError, refusal
from rollbridge.kafka.foreign import partitions_under_way
from rollbridge.kafka.metadata import Broker, Cluster
from rollbridge.kafka.topics import (
    RESOURCE_BROKER,
    TopicAdmin,
    TopicDescription,
    ask_to_describe_configs,
    view_cluster,
    view_topics,
)
from rollbridge.metadata import paths
from rollbridge.metadata.acls import open_nodes
from rollbridge.metadata.changes import Merging
from rollbridge.metadata.gateways import is_gateway_label
from rollbridge.metadata.journal import split
from rollbridge.metadata.picture import ClusterPicture, GroupPicture, StreamPicture
from rollbridge.metadata.records import Coordinator, TransactionRecord
from rollbridge.metadata.session import Znode, ZooKeeperSession
from rollbridge.metadata.store import Metadata, look_at_cluster, look_at_streams
from rollbridge.stream.config import StreamConfig, StreamState
from rollbridge.stream.epochs import EpochHistory
from rollbridge.stream.late import LateNotes
from rollbridge.stream.names import (
    StreamName,
    is_compacted_topic,
    is_group_topic,
    is_segment_topic,
    show_partition,
)
from rollbridge.stream.scaling import ScalingWait


class Severity(IntEnum):
    """Severity of a finding."""

    WARNING = 1
    """Everything works, but something is not as it should be."""
    PROBLEM = 2
    """Something does not work, or data is in danger."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Deviation from the expected state.

    Attributes:
        check: Stable name of the check.
        what: Description.
        remedy: What to do.
    """

    severity: Severity
    check: str
    what: str
    remedy: str


def problem(check: str, what: str, remedy: str) -> Finding:
    """Return a finding about something that does not work."""
    return Finding(Severity.PROBLEM, check, what, remedy)


def warning(check: str, what: str, remedy: str) -> Finding:
    """Return a finding about something that is not as it should be."""
    return Finding(Severity.WARNING, check, what, remedy)


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """Broker; ``config`` holds its settings, ``transaction_version`` is Kafka's feature level."""

    id: int
    transaction_version: int
    config: Mapping[str, str]
    knows_transactions_v2: bool = True


@dataclass(frozen=True, slots=True)
class OpenNative:
    """Open native transaction on a partition of a topic."""

    topic: str
    producer_id: int
    start_offset: int
    age_s: float
    partition: int = 0
    hangs: bool = False
    """True if no coordinator has it under way, so that it never ends."""


@dataclass(frozen=True, slots=True)
class QuotaFacts:
    """Quota of Kafka that may slow coordinators down.

    Attributes:
        user, client_id: Whom it is for; ``<default>`` for all without one of their own, None where it says nothing.
        limits: What it allows, by Kafka's names.
    """

    user: str | None
    client_id: str | None
    limits: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GroupFacts(GroupPicture):
    """Transaction group.

    Attributes:
        coordinator: Record that its leader published about itself.
        outcome_faults: Faults of the records of terminated transactions.
        scaling_waits: Its streams that wait to be scaled by their load.
    """

    transactions: Sequence[TransactionRecord] = ()
    coordinator: Coordinator | None = None
    outcome_faults: Sequence[str] = ()
    scaling_waits: Sequence[ScalingWait] = ()


@dataclass(frozen=True, slots=True)
class StreamFacts(StreamPicture):
    """Stream; ``history`` is None if its epochs are gone or cannot be read, and ``unread`` is the reason.

    ``late`` describes records that arrived behind the ends of its sealed segments.
    """

    history: EpochHistory | None
    unread: str = ""
    late: LateNotes = field(default_factory=LateNotes)


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """Snapshot of a partition of a transaction buffer, and the transactions that ended after it."""

    found: BufferSnapshot
    since: EndedSince


@dataclass(frozen=True, slots=True)
class ClusterFacts(ClusterPicture):
    """All facts about a cluster.

    Attributes:
        kafka_cluster_id, recorded_cluster_id: Id of the Kafka cluster, and the one recorded in ZooKeeper.
        topics: All topics with names of rollbridge, by name.
        adopted: Those of the topics that streams have adopted which exist, by name.
        claims: Name of the stream that has adopted a topic, by topic, as the index of topics in ZooKeeper says.
        named: Topics at the brokers that have the names of streams' virtual topics.
        operations: Operations on the cluster allowed to the principal.
        hidden: Expected topics that the principal may not describe.
        open_nodes: Znodes that everybody may change.
        is_guarded: True if the doctor has credentials or encryption anywhere: nothing else is meant to be open.
        upcoming: Topics that records name which were read after the topics were listed: prepared segments of large
            transactions, and what streams have got meanwhile.
        quotas: Quotas of clients, as far as they may be looked at.
        unreached: Brokers that the doctor does not reach, with the reason.
        bootstrap_servers: Where Kafka was reached, for commands that an operator is told to run.
        gateways: Gateways that are registered, with what they have answered.
        ids: Transactional ids of producers at gateways.
    """

    kafka_cluster_id: str
    recorded_cluster_id: str | None
    brokers: Sequence[BrokerFacts] = ()
    groups: Sequence[GroupFacts] = field(default=(), kw_only=True)
    streams: Sequence[StreamFacts] = field(default=(), kw_only=True)
    topics: Mapping[str, TopicDescription] = field(default_factory=dict)
    adopted: Mapping[str, TopicDescription] = field(default_factory=dict)
    claims: Mapping[str, str] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    open_natives: Sequence[OpenNative] = ()
    snapshots: Sequence[SnapshotFacts] = ()
    operations: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    open_nodes: Sequence[str] = ()
    is_guarded: bool = True
    upcoming: frozenset[str] = frozenset()
    quotas: Sequence[QuotaFacts] = ()
    unreached: Mapping[int, str] = field(default_factory=dict)
    bootstrap_servers: str = "..."
    gateways: Sequence[GatewayFacts] = ()
    ids: IdFacts = field(default_factory=IdFacts)

    @property
    def releases(self) -> dict[str, str]:
        """Release of each coordinator; those whose record cannot be read are left out."""
        return {name: record.release for name, record in self.records.items()}

    @property
    def is_busy(self) -> bool:
        """True while epochs are being made somewhere."""
        return any(group.committing_ms is not None or group.scaling_ms is not None for group in self.groups)


def wrong_seal(topic: TopicDescription, *, active: bool) -> Finding:
    """Return the finding about a topic that is sealed and ``active``, or open and not."""
    state = "is sealed, but active" if active else "takes records, but should be sealed"
    return problem(
        "seal",
        f"topic {topic.name} {state}",
        "restart the coordinator that leads its group: a takeover finishes what was begun",
    )


# Gathering facts; reads only


logger = logging.getLogger(__name__)

_LONG_S: Final = 60.0
"""Age from which on it is asked whether a native transaction hangs."""
_ANSWER_S: Final = 30.0
_BROKER_S: Final = 5.0
"""Longest wait for a broker to say how it is set up."""
DOCTORS_ID: Final = "rollbridge-doctor"
"""As brokers know the doctor when it reads: a quota of coordinators does not hold it up."""


def gather(settings: ConnectionSettings, client: KafkaClient) -> ClusterFacts:
    """Gather the facts about a cluster; ``client`` is one of its Kafka's.

    Raises:
        KafkaUnavailableError, ZooKeeperUnavailableError: No server answers.
        NotAuthorizedError: The principal may not look at the cluster.
    """
    kafka = client.named(DOCTORS_ID)
    with ZooKeeperSession.of(settings) as session, kafka.cluster() as cluster:
        cluster.forget()  # what the client knows may be of before a broker was lost
        topics = kafka.topics
        view = view_cluster(cluster, _ANSWER_S)
        metadata = Metadata(session)
        recorded = metadata.cluster()
        picture = look_at_cluster(metadata)
        streams = _streams(metadata, picture.streams)
        existing = topics.list_topics()
        # Whatever an adopted topic is called, it is its owner's.
        adopted = {stream.config.topic for stream in streams if stream.config.topic}
        names = sorted(name for name in existing if is_ours(name) and name not in adopted)
        found = _topics(topics, names)
        theirs = _topics(topics, sorted(adopted & set(existing)))
        known = found.keys() | theirs.keys()
        away = {item.name for item in found.values() if not item.is_led}
        brokers, unreached = _brokers(cluster, view.brokers)
        groups = [_group(kafka, metadata, picture, item, found) for item in picture.groups]
        gateways, ids = gather_gateways(session, settings.kafka, _at_gateways(groups))
        return ClusterFacts(
            kafka_cluster_id=view.cluster_id,
            recorded_cluster_id=None if recorded is None else recorded.kafka_cluster_id,
            now_ms=wall_ms(),
            brokers=brokers,
            unreached=unreached,
            coordinators=picture.coordinators,
            records=picture.records,
            groups=groups,
            streams=streams,
            unreadable=picture.unreadable,
            topics=found,
            adopted=theirs,
            claims=_claims(session),
            named=existing & {stream.config.name.virtual_topic for stream in streams},
            snapshots=list(_snapshots(kafka, streams, existing - away)),
            open_natives=_all_natives(cluster, [*found.values(), *theirs.values()], unreached),
            operations=view.operations,
            hidden=_hidden(cluster, _expected(metadata, streams) - set(existing))
            | {*names, *(adopted & set(existing))} - known,
            open_nodes=open_nodes(session),
            is_guarded=bool(settings.kafka or settings.zookeeper_security),
            upcoming=_upcoming(metadata, filterfalse(is_compacted_topic, found.keys() - _expected(metadata, streams))),
            quotas=list(_quotas(cluster)),
            bootstrap_servers=settings.bootstrap_servers,
            gateways=gateways,
            ids=ids,
        )


def _at_gateways(groups: Iterable[GroupFacts]) -> set[str]:
    return {item.client_name for group in groups for item in group.transactions if is_gateway_label(item.label)}


def _brokers(cluster: Cluster, known: Mapping[int, Broker]) -> tuple[list[BrokerFacts], dict[int, str]]:
    """Return the brokers that answer, and why others do not."""
    found, unreached = [], {}
    for node, place in known.items():
        try:
            with cluster.within(Deadline(_BROKER_S)):
                found.append(_broker(cluster, node, place))
        except KafkaUnavailableError as fault:
            unreached[node] = str(fault)
    return found, unreached


def _broker(cluster: Cluster, node: int, place: Broker) -> BrokerFacts:
    connection = cluster.broker_connection(node, place)
    answers, configs, _ = ask_to_describe_configs(cluster, RESOURCE_BROKER, [str(node)], connection)
    code, detail = answers[str(node)]
    if code is ErrorCode.cluster_authorization_failed:
        logger.warning("doctor.settings_unread broker=%d: %s", node, detail or code.name)
    elif code is not ErrorCode.none:
        raise refusal(code, f"describe broker {node}", f"broker {node}", detail)
    return BrokerFacts(node, connection.transaction_version, configs[str(node)], connection.knows_transactions_v2)


DEFAULT_ENTITY: Final = "<default>"
"""Name of the default entity of a quota in Kafka's tools."""


def _quotas(cluster: Cluster) -> Iterator[QuotaFacts]:
    """Yield all quotas of users and clients; none without the right to read them."""
    answer = cluster.ask_any(DescribeClientQuotasRequest(components=(), strict=False), DescribeClientQuotasResponse)
    if answer.error_code is not ErrorCode.none:
        logger.warning("doctor.quotas_unread: %s", answer.error_message or answer.error_code.name)
        return
    for entry in answer.entries or ():
        whom = {
            item.entity_type: DEFAULT_ENTITY if item.entity_name is None else item.entity_name for item in entry.entity
        }
        limits = {item.key: float(item.value) for item in entry.values}
        if whom.keys() <= {"user", "client-id"}:
            yield QuotaFacts(whom.get("user"), whom.get("client-id"), limits)


def is_ours(topic: str) -> bool:
    """Return whether a topic has a name that rollbridge gives: of a segment, buffer, log, or state by key."""
    return is_segment_topic(topic) or is_group_topic(topic)


def _claims(session: ZooKeeperSession) -> dict[str, str]:
    topics = session.children(paths.TOPICS)
    found = zip(topics, session.get_many([paths.adopted(topic) for topic in topics]), strict=True)
    return {topic: node.value.decode(errors="replace") for topic, node in found if node is not None}


def _expected(metadata: Metadata, streams: Iterable[StreamFacts]) -> set[str]:
    """Return the topics that should exist."""
    names = {name.commit_log_topic for name in metadata.groups()}
    for stream in streams:
        names.add(stream.config.buffer_topic)
        if stream.history is not None:
            kept = (segment for segment in stream.history.segments() if segment not in stream.history.removed)
            names |= {stream.config.place(segment)[0] for segment in kept}
    return names


def _upcoming(metadata: Metadata, unexpected: Iterable[str]) -> frozenset[str]:
    """Return which of the topics that no stream has had are prepared, or have been put into a history meanwhile.

    A prepared segment has a record before its topic exists, and keeps it until it is part of a history, or gone. So
    these records are read first.
    """
    wanted = frozenset(unexpected)
    if not wanted:
        return wanted
    named: set[str] = set()
    for group in metadata.groups():
        parent = paths.merging(group)
        nodes = [f"{parent}/{name}" for name in metadata.session.children(parent)]
        for node in metadata.session.get_many(nodes):
            for item in () if node is None else Merging.from_json(node.value).streams:
                named |= set(map(StreamName.parse(item.stream).segment_topic, item.segments.values()))
    return wanted & (named | _expected(metadata, _streams(metadata, look_at_streams(metadata)[0])))


def _hidden(cluster: Cluster, names: Iterable[str]) -> frozenset[str]:
    """Return the topics that may not be described. Kafka answers so for missing topics as well."""
    hidden = set()
    for name in names:
        try:
            view_topics(cluster, [name], _ANSWER_S)
        except NotAuthorizedError:
            hidden.add(name)
    return frozenset(hidden)


def _topics(topics: TopicAdmin, names: Sequence[str]) -> dict[str, TopicDescription]:
    """Return the topics that may be described, with their settings."""
    try:
        return topics.describe(names, with_operations=True)
    except NotAuthorizedError:
        described: dict[str, TopicDescription] = {}
        for name in names:
            with suppress(NotAuthorizedError):
                described |= topics.describe([name], with_operations=True)
        return described


def _snapshots(
    kafka: KafkaClient, streams: Sequence[StreamFacts], existing: Collection[str]
) -> Iterator[SnapshotFacts]:
    """Yield the snapshots of all existing buffers, as far as they may be read; that of others is not is reported."""
    by_scope: dict[str, list[StreamConfig]] = {}
    for stream in streams:
        config = stream.config
        if config.state is StreamState.ACTIVE and {config.buffer_topic, config.group.commit_log_topic} <= set(existing):
            by_scope.setdefault(config.name.scope, []).append(config)
    for scope, configs in by_scope.items():
        try:
            reader = SnapshotReader(kafka, scope)
            found = list(reader.of_all(configs))
            yield from map(SnapshotFacts, found, reader.ended_since(found))
        except (NotAuthorizedError, NotFoundError, KafkaUnavailableError) as fault:
            logger.warning("doctor.snapshots_unread scope=%s: %s", scope, fault)


def _outcome_faults(kafka: KafkaClient, topic: str) -> list[str]:
    """Return the faults of records of terminated transactions."""
    faults: list[str] = []
    try:
        records = read_latest(kafka, topic)
    except NotAuthorizedError as fault:
        logger.warning("doctor.outcomes_unread topic=%s: %s", topic, fault)
        return faults
    for key in split({key: item.value for key, item in records.items()})[0]:
        try:
            decode_terminated(records[key].value)
        except CorruptDataError as fault:
            faults.append(f"client {key.decode(errors='replace')}: {fault}")
    return faults


def _streams(metadata: Metadata, known: Sequence[StreamPicture]) -> list[StreamFacts]:
    """Return more about streams, with few requests however many there are."""
    names = [item.config.name for item in known]
    notes = metadata.get_each([paths.late(name) for name in names])
    found = []
    for item, late, history in zip(known, notes, metadata.histories(names), strict=True):
        is_read = isinstance(history, EpochHistory)
        found.append(
            StreamFacts(
                item.config,
                history if isinstance(history, EpochHistory) else None,
                "" if is_read else str(history or "they are gone"),
                _late_notes(late),
                error=item.error,
            )
        )
    return found


def _late_notes(node: Znode | RollbridgeError | None) -> LateNotes:
    """Return what a node says; nothing if it cannot be read, which the stream's leader says, too."""
    try:
        return LateNotes() if node is None or isinstance(node, RollbridgeError) else LateNotes.from_json(node.value)
    except CorruptDataError:
        return LateNotes()


def _group(
    kafka: KafkaClient, metadata: Metadata, picture: ClusterPicture, known: GroupPicture, topics: Collection[str]
) -> GroupFacts:
    name = known.name
    return GroupFacts(
        **{item.name: getattr(known, item.name) for item in fields(known)},
        transactions=metadata.transactions(name),
        coordinator=picture.records.get(known.leader or ""),
        outcome_faults=_outcome_faults(kafka, name.terminated_topic) if name.terminated_topic in topics else (),
        scaling_waits=metadata.scaling_waits(name).waits,
    )


def _all_natives(cluster: Cluster, topics: Sequence[TopicDescription], unreached: Collection[int]) -> list[OpenNative]:
    """Return the native transactions open on topics; of those that are open for long, whether they hang."""
    found = list(_open_natives(cluster, topics, unreached))
    old = {item.producer_id for item in found if item.age_s >= _LONG_S}
    if not old:
        return found
    try:
        known = partitions_under_way(cluster, old)
    except KafkaUnavailableError as fault:
        logger.warning("doctor.hanging_unknown: %s", fault)
        return found

    def hangs(item: OpenNative) -> bool:
        return item.producer_id in old and (item.topic, item.partition) not in known.get(item.producer_id, ())

    return [replace(item, hangs=hangs(item)) for item in found]


def _open_natives(
    cluster: Cluster, topics: Sequence[TopicDescription], unreached: Collection[int]
) -> Iterator[OpenNative]:
    """Yield the native transactions open on topics, as the leaders of their partitions know them: one request each."""
    cluster.learn(topic.name for topic in topics)
    by_leader: dict[int, dict[str, list[int]]] = {}
    for topic in topics:
        for number, leader in cluster.leaders(topic.name).items():
            if number < topic.partitions and leader not in unreached:
                by_leader.setdefault(leader, {}).setdefault(topic.name, []).append(number)
    for leader, led in by_leader.items():
        wanted = (TopicRequest(name=TopicName(name), partition_indexes=tuple(map(i32, led[name]))) for name in led)
        answer = cluster.connection(leader).call(
            DescribeProducersRequest(topics=tuple(wanted)), DescribeProducersResponse
        )
        for known in answer.topics:
            for partition in known.partitions:
                if partition.error_code != ErrorCode.none:
                    where = show_partition((str(known.name), partition.partition_index))
                    logger.warning("doctor.producers_unread partition=%s: %s", where, partition.error_code.name)
                    continue
                for producer in partition.active_producers:
                    start = producer.current_txn_start_offset
                    if start >= 0:
                        age_s = max(time.time() - producer.last_timestamp / 1000, 0.0)
                        yield OpenNative(str(known.name), producer.producer_id, start, age_s, partition.partition_index)
