"""Native transactions of other producers: find those that are open on partitions, and abort them.

A transaction that its coordinator knows is aborted by taking over its transactional id: it ends as a whole, and its
owner is fenced at its next request. A transaction that no coordinator knows hangs; its marker is written past the
coordinator, as ``kafka-transactions.sh abort`` does. Never write a marker for a known one: its owner could commit it
afterwards and would believe that everything was committed.

Source: KIP-664 (DescribeProducers, ListTransactions, aborts of hanging transactions).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from kio.schema.describe_producers.v0 import DescribeProducersRequest, DescribeProducersResponse
from kio.schema.describe_producers.v0.request import TopicRequest
from kio.schema.describe_transactions.v0 import DescribeTransactionsRequest
from kio.schema.errors import ErrorCode
from kio.schema.list_transactions.v1 import ListTransactionsRequest, ListTransactionsResponse
from kio.schema.types import ProducerId, TopicName
from kio.schema.write_txn_markers.v1 import WriteTxnMarkersRequest, WriteTxnMarkersResponse
from kio.schema.write_txn_markers.v1.request import WritableTxnMarker, WritableTxnMarkerTopic
from kio.static.primitive import i16, i32

from rollbridge.kafka import errors as codes
from rollbridge.kafka.describe import DescribeTransactionsResponse
from rollbridge.kafka.errors import KafkaUnavailableError, Meaning, NotAuthorizedError
from rollbridge.kafka.metadata import (
    Cluster,
    CodeError,
    LeaderAnswers,
    LeaderQuestion,
    ask_once,
    by_topic,
    of_partitions,
)
from rollbridge.kafka.topics import view_cluster
from rollbridge.kafka.transactions import Coordination, RequestRefusedError
from rollbridge.stream.conditions import ForeignTransaction, Leaderless, Obstacle
from rollbridge.stream.names import Partition, show_partition

logger = logging.getLogger(__name__)

_ANSWER_S: Final = 5.0
_END_S: Final = 10.0
_UNDER_WAY: Final = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
_TRANSACTION_TIMEOUT_MS: Final = 60_000


def obstacles(cluster: Cluster, partitions: Iterable[Partition]) -> list[Obstacle]:
    """Return the obstacles to sealing partitions now.

    These are the native transactions open there, with their transactional ids, and unreachable leaders. Those that do
    not exist, or whose producers brokers do not tell us, are left out.
    """
    away: list[Leaderless] = []

    def note(partition: Partition, fault: KafkaUnavailableError | ErrorCode) -> None:
        cluster.forget_leader(partition[0])
        code = fault if isinstance(fault, ErrorCode) else None
        is_away = code is None or codes.meaning(codes.READ, code) in (Meaning.REFRESH, Meaning.RETRY)
        if is_away and code is not ErrorCode.unknown_topic_or_partition:
            away.append(Leaderless(*partition))
        # The caller that waits for an unavailable leader logs it, once a minute.
        level = logging.DEBUG if is_away else logging.INFO
        name, why = show_partition(partition), fault if code is None else code.name
        logger.log(level, "producers.unavailable topic=%s reason=%s", name, why)

    wanted = list(partitions)
    try:
        answers = ask_once(cluster, wanted, _PRODUCERS)
    except KafkaUnavailableError as fault:
        answers = LeaderAnswers({}, {}, dict.fromkeys(wanted, fault))
    for place, why in ({place: code for place, (code, _) in answers.refused.items()} | answers.lost).items():
        note(place, why)
    found = [
        ForeignTransaction(
            topic,
            producer.producer_id,
            producer.producer_epoch,
            producer.current_txn_start_offset,
            producer.coordinator_epoch,
            partition=number,
        )
        for (topic, number), producers in answers.found.items()
        for producer in producers
        if producer.current_txn_start_offset >= 0
    ]
    if not found:
        return [*away]
    names = _names(cluster, {item.producer_id for item in found})
    return [*away, *(replace(item, transactional_id=names.get(item.producer_id, "")) for item in found)]


def _producers_request(places: Iterable[Partition]) -> DescribeProducersRequest:
    topics = (TopicRequest(name=topic, partition_indexes=items) for topic, items in by_topic(places).items())
    return DescribeProducersRequest(topics=tuple(topics))


_PRODUCERS: Final = LeaderQuestion(
    _producers_request, DescribeProducersResponse, of_partitions(lambda item: item.active_producers)
)


def end_transactions(cluster: Cluster, found: Sequence[ForeignTransaction]) -> None:
    """Abort native transactions of other producers.

    Raises:
        NotAuthorizedError: Write on a transactional id is missing, or ClusterAction for a hanging transaction.
        KafkaUnavailableError: The transactions may or may not have ended; look again.
    """
    for name in sorted({item.transactional_id for item in found if item.transactional_id}):
        coordination = Coordination(
            cluster, name, transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS, retry_timeout_s=_END_S
        )
        try:
            coordination.take_over()
        except RequestRefusedError as fault:
            if fault.meaning is Meaning.DENIED:
                raise NotAuthorizedError(
                    f"not allowed to end the native transaction of transactional id {name}: {codes.name(fault.error)} "
                    "(needed: Write on it)",
                    resource=f"transactional id {name}",
                ) from fault
            raise KafkaUnavailableError(f"the native transaction of {name} could not be ended: {fault}") from fault
        logger.warning("foreign_transaction.aborted transactional_id=%s", name)
    for item in found:
        if not item.transactional_id:
            _write_marker(cluster, item)


def _write_marker(cluster: Cluster, item: ForeignTransaction) -> None:
    topic = WritableTxnMarkerTopic(name=TopicName(item.topic), partition_indexes=(i32(item.partition),))
    marker = WritableTxnMarker(
        producer_id=ProducerId(item.producer_id),
        producer_epoch=i16(item.producer_epoch),
        transaction_result=False,
        topics=(topic,),
        coordinator_epoch=i32(max(item.coordinator_epoch, 0)),
    )
    try:
        connection = cluster.connection(cluster.leader(item.topic, item.partition))
    except CodeError as fault:
        raise KafkaUnavailableError(f"the native transaction of {item} could not be ended: {fault}") from fault
    answer = connection.call(WriteTxnMarkersRequest(markers=(marker,)), WriteTxnMarkersResponse)
    code = answer.markers[0].topics[0].partitions[0].error_code
    if code == ErrorCode.cluster_authorization_failed:
        raise NotAuthorizedError(
            f"not allowed to end the native transaction of {item}: {codes.name(code)} (needed: ClusterAction on the "
            "cluster)",
            resource="cluster",
        )
    if code != ErrorCode.none:
        raise KafkaUnavailableError(f"the native transaction of {item} could not be ended: {codes.name(code)}")
    logger.warning("hanging_transaction.aborted transaction=%r", str(item))


def partitions_under_way(cluster: Cluster, producers: Iterable[int]) -> dict[int, set[Partition]]:
    """Return, by producer id, the partitions of the native transactions that coordinators know as ongoing.

    A transaction that is open on a partition, and not among them, hangs: no coordinator will end it. Lost markers cause
    that, as in an unclean election.

    Raises:
        KafkaUnavailableError: Not all coordinators answer.
    """
    request = ListTransactionsRequest(
        state_filters=_UNDER_WAY, producer_id_filters=tuple(ProducerId(item) for item in sorted(set(producers)))
    )
    found: dict[int, set[Partition]] = {}
    for node, broker in view_cluster(cluster, _ANSWER_S).brokers.items():
        connection = cluster.broker_connection(node, broker)
        listed = connection.call(request, ListTransactionsResponse)
        if listed.error_code != ErrorCode.none:
            raise KafkaUnavailableError(f"broker {node} does not list transactions: {codes.name(listed.error_code)}")
        if names := tuple(item.transactional_id for item in listed.transaction_states):
            told = connection.call(DescribeTransactionsRequest(transactional_ids=names), DescribeTransactionsResponse)
            for state in told.transaction_states:
                places = ((str(item.topic), int(number)) for item in state.topics for number in item.partitions)
                found.setdefault(state.producer_id, set()).update(places)
    return found


def _names(cluster: Cluster, producers: Iterable[int]) -> dict[int, str]:
    """Return transactional ids by producer id, as far as coordinators know them and may tell us."""
    request = ListTransactionsRequest(
        state_filters=(), producer_id_filters=tuple(ProducerId(item) for item in sorted(producers))
    )
    names: dict[int, str] = {}
    try:
        for node, broker in view_cluster(cluster, _ANSWER_S).brokers.items():
            answer = cluster.broker_connection(node, broker).call(request, ListTransactionsResponse)
            names.update({item.producer_id: item.transactional_id for item in answer.transaction_states})
    except (KafkaUnavailableError, NotAuthorizedError) as fault:
        logger.info("transactional_ids.incomplete reason=%s", fault)
    return names
