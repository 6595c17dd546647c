"""How much disk topics take: DescribeLogDirs, which librdkafka lacks."""

from __future__ import annotations

from collections.abc import Iterable

from kio.schema.describe_log_dirs.v4 import DescribeLogDirsRequest, DescribeLogDirsResponse
from kio.schema.describe_log_dirs.v4.request import DescribableLogDirTopic
from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName
from kio.static.primitive import i32

from rollbridge.kafka import codes
from rollbridge.kafka.errors import ConnectionLostError, KafkaUnavailable, NotAuthorizedError
from rollbridge.kafka.metadata import Cluster, CodeError


def leader_bytes(cluster: Cluster, topics: Iterable[str]) -> dict[str, int]:
    """Bytes on the disk of the leader of partition 0 of each topic; one that does not exist is left out.

    Files count as a whole, also what of them was truncated.

    Raises:
        KafkaUnavailable: not now.
        NotAuthorizedError: it takes Describe on the cluster.
    """
    by_leader: dict[int, list[str]] = {}
    sizes: dict[str, int] = {}
    try:
        for topic in topics:
            try:
                by_leader.setdefault(cluster.leader(topic, 0), []).append(topic)
            except CodeError as exc:
                if exc.code != ErrorCode.unknown_topic_or_partition:
                    raise
        for node, names in by_leader.items():
            asked = tuple(DescribableLogDirTopic(topic=TopicName(name), partitions=(i32(0),)) for name in names)
            answer = cluster.connection(node).call(DescribeLogDirsRequest(topics=asked), DescribeLogDirsResponse)
            _check(answer.error_code)
            for directory in answer.results:
                _check(directory.error_code)
                for found in directory.topics:
                    current = [item.partition_size for item in found.partitions if not item.is_future_key]
                    sizes[found.name] = sizes.get(found.name, 0) + sum(current)
    except (CodeError, ConnectionLostError) as exc:
        cluster.forget()
        raise KafkaUnavailable(f"the sizes of topics can not be read now: {exc}") from exc
    return sizes


def _check(code: ErrorCode) -> None:
    if code == ErrorCode.cluster_authorization_failed:
        raise NotAuthorizedError("not allowed to describe the log directories", resource="cluster")
    if code != ErrorCode.none:
        raise KafkaUnavailable(f"the sizes of topics can not be read now: {codes.name(code)}")
