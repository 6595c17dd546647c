"""Members that commit offsets in transactions."""

from __future__ import annotations

from datetime import timedelta

import pytest
from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v5.request import InitProducerIdRequest
from kio.schema.init_producer_id.v5.response import InitProducerIdResponse
from kio.schema.txn_offset_commit.v5.request import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from kio.schema.txn_offset_commit.v5.response import TxnOffsetCommitResponse
from kio.schema.types import GroupId, ProducerId, TopicName, TransactionalId
from kio.static.primitive import i16, i32, i32Timedelta, i64

from integration_tests.clients import Site, until
from integration_tests.kafka_tools import create_topic
from rollbridge.kafka.connection import Connection
from rollbridge.stream.group_offsets import GroupMember


class Committer:
    """A transactional producer that sends offsets, and nothing else, by hand."""

    def __init__(self, address: tuple[str, int], transactional_id: str) -> None:
        self.connection = Connection(*address)
        self._id = TransactionalId(transactional_id)
        request = InitProducerIdRequest(
            transactional_id=self._id,
            transaction_timeout=i32Timedelta.parse(timedelta(minutes=10)),
            producer_id=ProducerId(-1),
            producer_epoch=i16(-1),
        )

        def is_started() -> bool:
            self.started = self.connection.call(request, InitProducerIdResponse)
            return self.started.error_code is ErrorCode.none

        until(is_started)

    def send(self, member: GroupMember, topic: str, *places: tuple[int, int, str]) -> list[ErrorCode]:
        """Send the offset and the metadata of partitions; return the code of each."""
        request = TxnOffsetCommitRequest(
            transactional_id=self._id,
            group_id=GroupId(member.group_id),
            producer_id=self.started.producer_id,
            producer_epoch=self.started.producer_epoch,
            generation_id=i32(member.generation),
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            topics=(
                TxnOffsetCommitRequestTopic(
                    name=TopicName(topic),
                    partitions=tuple(
                        TxnOffsetCommitRequestPartition(
                            partition_index=i32(partition),
                            committed_offset=i64(offset),
                            committed_leader_epoch=i32(-1),
                            committed_metadata=metadata,
                        )
                        for partition, offset, metadata in places
                    ),
                ),
            ),
        )
        passing = {ErrorCode.coordinator_load_in_progress, ErrorCode.concurrent_transactions}

        found: dict[int, ErrorCode] = {}

        def is_answered() -> bool:
            answer = self.connection.call(request, TxnOffsetCommitResponse)
            found.update({item.partition_index: item.error_code for item in answer.topics[0].partitions})
            return not passing & set(found.values())

        until(is_answered)
        return [found[partition] for partition, _, _ in places]


@pytest.fixture
def topic(site: Site, topic_prefix: str) -> str:
    """A topic that consumers read."""
    create_topic(site.cluster.bootstrap_servers, topic_prefix, 2)
    return topic_prefix
