"""Committed offsets of a consumer group: OffsetFetch, OffsetCommit and TxnOffsetCommit over connections of our own.

librdkafka's synchronous commit has no time-out, and blocks every other call on its consumer meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Final, NamedTuple, TypeVar

from kio.schema.errors import ErrorCode
from kio.schema.offset_commit.v9 import OffsetCommitRequest, OffsetCommitResponse
from kio.schema.offset_commit.v9.request import OffsetCommitRequestPartition, OffsetCommitRequestTopic
from kio.schema.offset_fetch.v9 import OffsetFetchRequest, OffsetFetchResponse
from kio.schema.offset_fetch.v9.request import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from kio.schema.txn_offset_commit.v5 import TxnOffsetCommitRequest, TxnOffsetCommitResponse
from kio.schema.txn_offset_commit.v5.request import TxnOffsetCommitRequestPartition, TxnOffsetCommitRequestTopic
from kio.schema.types import GroupId, ProducerId, TopicName, TransactionalId
from kio.static.primitive import i16, i32, i64

from rollbridge.base.deadlines import Backoff, Deadline
from rollbridge.errors import KafkaUnavailableError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.connection import Connection
from rollbridge.kafka.errors import is_definite, refusal
from rollbridge.kafka.metadata import Cluster, Clusters, CodeError, CoordinatorType, by_topic
from rollbridge.kafka.transactions import ProducerFields, ProduceSession, ask_coordinator
from rollbridge.stream.group_offsets import NO_DETAILS, GroupMember, OffsetDetails
from rollbridge.stream.names import Partition

T = TypeVar("T")

_TIMEOUT_S: Final = 30.0
_PASSING: Final = frozenset(
    {
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.request_timed_out,
    }
)
"""Codes of commits that were not carried out, but may succeed on a retry or with another broker."""


class CommittedOffset(NamedTuple):
    """Offset that a group has committed in a partition, with its metadata."""

    topic: str
    partition: int
    offset: int
    metadata: str


class GroupOffsetStore:
    """Committed offsets of one group. Thread-safe."""

    def __init__(self, clusters: Clusters, group_id: str) -> None:
        self._clusters = clusters
        self._group_id = group_id

    def read(
        self, places: Iterable[Partition] | None = None, *, timeout_s: float = _TIMEOUT_S
    ) -> list[CommittedOffset]:
        """Return the commits in these partitions, or in all if None, in any order.

        Waits for offsets in an undecided native transaction: they may become commits.

        Raises:
            KafkaUnavailableError: No answer, or no decision, within ``timeout_s`` seconds; ask again.
            NotAuthorizedError: Describe on the group is missing.
        """
        wanted = None if places is None else sorted(set(places))
        if wanted == []:
            return []
        doing = f"read the commits of group {self._group_id}"
        try:
            return self._until_answered(lambda cluster: self._ask(cluster, wanted), doing, timeout_s)
        except CodeError as fault:
            raise refusal(fault.code, doing, fault.subject) from fault

    def write(self, member: GroupMember, commits: Iterable[CommittedOffset], *, timeout_s: float) -> None:
        """Commit offsets; retry if the answer is lost, since the same commit again changes nothing.

        Raises:
            KafkaUnavailableError: No answer within ``timeout_s`` seconds: the offsets may or may not be committed.
            CodeError: The group coordinator refuses one of the offsets; others may be committed.
        """
        topics: dict[str, list[OffsetCommitRequestPartition]] = {}
        for item in commits:
            topics.setdefault(item.topic, []).append(
                OffsetCommitRequestPartition(
                    partition_index=i32(item.partition),
                    committed_offset=i64(item.offset),
                    # librdkafka takes it for a C string when it reads it, and shows what comes behind.
                    committed_metadata=item.metadata and item.metadata + "\0",
                )
            )
        request = OffsetCommitRequest(
            group_id=GroupId(self._group_id),
            generation_id_or_member_epoch=i32(member.generation),
            member_id=member.member_id,
            group_instance_id=member.instance_id,
            topics=tuple(
                OffsetCommitRequestTopic(name=TopicName(topic), partitions=tuple(places))
                for topic, places in topics.items()
            ),
        )

        def commit(cluster: Cluster) -> None:
            node = cluster.coordinator(CoordinatorType.GROUP, self._group_id)
            for topic in cluster.connection(node).call(request, OffsetCommitResponse).topics:
                for place in topic.partitions:
                    _check(place.error_code, f"topic {topic.name}")

        doing = f"commit offsets of group {self._group_id}"
        self._until_answered(commit, doing, timeout_s, lambda code: code not in _PASSING)

    def _until_answered(
        self,
        ask: Callable[[Cluster], T],
        doing: str,
        timeout_s: float,
        is_final: Callable[[ErrorCode], bool] = is_definite,
    ) -> T:
        """Return the answer of the group coordinator, looked up again before each retry.

        Raises:
            CodeError: The answer is a final refusal.
            KafkaUnavailableError: No final answer came within ``timeout_s`` seconds.
        """
        deadline = Deadline(timeout_s)
        backoff = Backoff()
        with self._clusters.borrow(deadline) as cluster:
            while True:
                why: Exception
                try:
                    return ask(cluster)
                except KafkaUnavailableError as fault:
                    why = fault
                except CodeError as fault:
                    if is_final(fault.code):
                        raise
                    why = fault
                # Another broker may coordinate the group by now.
                cluster.forget_coordinator(CoordinatorType.GROUP, self._group_id)
                if deadline.passed():
                    raise KafkaUnavailableError(f"cannot {doing} within {timeout_s:g} s: {why}") from why
                backoff.sleep(deadline)

    def _ask(self, cluster: Cluster, places: list[Partition] | None) -> list[CommittedOffset]:
        """Ask the coordinator once; raises CodeError, KafkaUnavailableError."""
        request = OffsetFetchRequest(
            groups=(
                OffsetFetchRequestGroup(
                    group_id=GroupId(self._group_id),
                    topics=None
                    if places is None
                    else tuple(
                        OffsetFetchRequestTopics(name=topic, partition_indexes=items)
                        for topic, items in by_topic(places).items()
                    ),
                ),
            ),
            require_stable=True,
        )
        node = cluster.coordinator(CoordinatorType.GROUP, self._group_id)
        [group] = cluster.connection(node).call(request, OffsetFetchResponse).groups
        if group.error_code is ErrorCode.group_id_not_found:
            return []
        _check(group.error_code, f"group {self._group_id}")
        found = []
        for topic in group.topics:
            for place in topic.partitions:
                _check(place.error_code, f"topic {topic.name}")
                if place.committed_offset >= 0:
                    found.append(
                        CommittedOffset(
                            str(topic.name),
                            int(place.partition_index),
                            int(place.committed_offset),
                            # librdkafka sends the terminating zero as well.
                            (place.metadata or "").partition("\0")[0],
                        )
                    )
        return found


def _check(code: ErrorCode, subject: str) -> None:
    if code is not ErrorCode.none:
        raise CodeError(code, subject)


# Offsets inside a native transaction take effect if and only if it commits. With transactions v2 the group coordinator
# adds its partition to the transaction by itself.

_DONE = (ErrorCode.none, None)


def send_group_offsets(
    cluster: Cluster,
    session: ProduceSession,
    producer: ProducerFields,
    member: GroupMember,
    offsets: Mapping[Partition, int],
    details: Mapping[Partition, OffsetDetails],
    *,
    retry_timeout_s: float,
    locked_timeout_s: float = inf,
) -> None:
    """Add offsets (of the next record to read), with their details, to the open native transaction.

    Raises:
        RequestRefusedError, KafkaUnavailableError: See :func:`ask_coordinator`.
    """
    topics: dict[str, list[TxnOffsetCommitRequestPartition]] = {}
    for where, offset in offsets.items():
        (topic, partition), beside = where, details.get(where, NO_DETAILS)
        topics.setdefault(topic, []).append(
            TxnOffsetCommitRequestPartition(
                partition_index=i32(partition),
                committed_offset=i64(offset),
                committed_leader_epoch=i32(beside.leader_epoch),
                committed_metadata=beside.metadata,
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
        locked_timeout_s=inf if session.joined else locked_timeout_s,
    )
