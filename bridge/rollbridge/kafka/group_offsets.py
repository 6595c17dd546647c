"""Consumer group offsets inside a native transaction: they count if, and only if, it is committed.

With transactions v2 the group coordinator adds its partition to the transaction by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from kio.schema.errors import ErrorCode
from kio.schema.txn_offset_commit.v5 import TxnOffsetCommitRequest, TxnOffsetCommitResponse
from kio.schema.txn_offset_commit.v5.request import TxnOffsetCommitRequestPartition, TxnOffsetCommitRequestTopic
from kio.schema.types import GroupId, ProducerId, TopicName, TransactionalId
from kio.static.primitive import i16, i32, i64

from rollbridge.kafka import codes
from rollbridge.kafka.coordination import ask_coordinator
from rollbridge.kafka.metadata import Cluster, CoordinatorType
from rollbridge.kafka.pipeline import Producer, Session, TopicPartition
from rollbridge.kafka.wire import Connection
from rollbridge.model.group_offsets import GroupMember

_DONE = (ErrorCode.none, None)


def send_group_offsets(
    cluster: Cluster,
    session: Session,
    producer: Producer,
    member: GroupMember,
    offsets: Mapping[TopicPartition, int],
    *,
    retry_timeout_s: float,
) -> None:
    """Add offsets (of the next record to read) to the open transaction.

    Raises:
        RequestRefused, KafkaUnavailable: As from any coordinator.
    """
    topics: dict[str, list[TxnOffsetCommitRequestPartition]] = {}
    for (topic, partition), offset in offsets.items():
        topics.setdefault(topic, []).append(
            TxnOffsetCommitRequestPartition(
                partition_index=i32(partition), committed_offset=i64(offset), committed_metadata=""
            )
        )
    request = TxnOffsetCommitRequest(
        transactional_id=TransactionalId(producer.transactional_id),
        group_id=GroupId(member.group_id),
        producer_id=ProducerId(producer.producer_id),
        producer_epoch=i16(producer.epoch),
        generation_id=i32(member.generation),
        member_id=member.member_id,
        group_instance_id=member.instance_id,
        topics=tuple(
            TxnOffsetCommitRequestTopic(name=TopicName(topic), partitions=tuple(partitions))
            for topic, partitions in topics.items()
        ),
    )

    def attempt(connection: Connection) -> tuple[ErrorCode, None]:
        answer = connection.call(request, TxnOffsetCommitResponse)
        failures = (
            partition.error_code
            for topic in answer.topics
            for partition in topic.partitions
            if partition.error_code != ErrorCode.none
        )
        return next(((code, None) for code in failures), _DONE)

    ask_coordinator(
        cluster,
        CoordinatorType.GROUP,
        member.group_id,
        f"offsets of group {member.group_id}",
        codes.OFFSETS,
        attempt,
        session,
        retry_timeout_s=retry_timeout_s,
    )
