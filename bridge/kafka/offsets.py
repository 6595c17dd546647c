"""The end of a partition, read with one short round trip: ListOffsets over a connection that is already there."""

from __future__ import annotations

import logging
import time
from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v7 import ListOffsetsRequest, ListOffsetsResponse
from kio.schema.list_offsets.v7.request import ListOffsetsPartition, ListOffsetsTopic
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i8, i32, i64

from bridge.kafka import codes
from bridge.kafka.codes import Meaning
from bridge.kafka.errors import ConnectionLostError, KafkaUnavailable, NotAuthorizedError, TopicNotFound
from bridge.kafka.metadata import Cluster, CodeError, Isolation

logger = logging.getLogger(__name__)

_LATEST: Final = -1
_CLIENT_REPLICA: Final = -1
_BACKOFF_FIRST_S: Final = 0.002
_BACKOFF_MAX_S: Final = 0.1


def read_end_offset(
    cluster: Cluster,
    topic: str,
    partition: int,
    isolation: Isolation,
    *,
    retry_timeout_s: float,
    unknown_topic_timeout_s: float,
) -> int:
    """Offset that follows the last record (READ_UNCOMMITTED) or the last stable one (READ_COMMITTED).

    Raises:
        TopicNotFound: Still unknown after ``unknown_topic_timeout_s``, in which a new topic gets known everywhere.
        NotAuthorizedError: No permission to read the topic.
        KafkaUnavailable: No answer within ``retry_timeout_s``.
    """
    asked = ListOffsetsPartition(partition_index=i32(partition), timestamp=i64(_LATEST))
    request = ListOffsetsRequest(
        replica_id=BrokerId(_CLIENT_REPLICA),
        isolation_level=i8(isolation.value),
        topics=(ListOffsetsTopic(name=TopicName(topic), partitions=(asked,)),),
    )
    started = time.monotonic()
    backoff_s = 0.0
    while True:
        code: ErrorCode
        try:
            connection = cluster.connection(cluster.leader(topic, partition))
            found = connection.call(request, ListOffsetsResponse).topics[0].partitions[0]
            if found.error_code == ErrorCode.none:
                return found.offset
            code = found.error_code
        except CodeError as exc:
            code = exc.code
        except ConnectionLostError as exc:
            # A read may be repeated; only a broker that stays away is an error.
            logger.debug("asking for the end of %s again: %s", topic, exc)
            code = ErrorCode.network_exception
        _check_repeatable(topic, code, time.monotonic() - started, retry_timeout_s, unknown_topic_timeout_s)
        cluster.forget_leader(topic)
        time.sleep(backoff_s)
        backoff_s = min(_BACKOFF_MAX_S, backoff_s * 2 or _BACKOFF_FIRST_S)


def _check_repeatable(
    topic: str, code: ErrorCode, waited_s: float, retry_timeout_s: float, unknown_topic_timeout_s: float
) -> None:
    match codes.meaning(codes.READ, code):
        case Meaning.REFRESH | Meaning.RETRY:
            pass
        case Meaning.DENIED:
            raise NotAuthorizedError(f"not allowed to read topic {topic}", resource=f"topic {topic}")
        case _:
            raise KafkaUnavailable(f"cannot read the end of topic {topic}: {codes.name(code)}")
    if code == ErrorCode.unknown_topic_or_partition and waited_s >= unknown_topic_timeout_s:
        raise TopicNotFound(f"topic {topic} does not exist", topic=topic)
    if waited_s >= retry_timeout_s:
        raise KafkaUnavailable(f"cannot read the end of topic {topic}: {codes.name(code)} for {waited_s:.0f} s")
