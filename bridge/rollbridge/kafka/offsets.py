"""First and end offset of a partition, read with one short round trip: ListOffsets over a connection that is there.

And how anything is read from a leader that may have moved: asked again until it answers, which a read may be.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v7 import ListOffsetsRequest, ListOffsetsResponse
from kio.schema.list_offsets.v7.request import ListOffsetsPartition, ListOffsetsTopic
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i8, i32, i64

from rollbridge.kafka import codes
from rollbridge.kafka.codes import Meaning
from rollbridge.kafka.errors import ConnectionLostError, KafkaUnavailable, NotAuthorizedError, TopicNotFound
from rollbridge.kafka.metadata import Cluster, CodeError, Isolation

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LATEST: Final = -1
_EARLIEST: Final = -2
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
    return read_patiently(
        cluster,
        topic,
        lambda: _ask(cluster, topic, partition, isolation, _LATEST),
        "the end of topic",
        retry_timeout_s=retry_timeout_s,
        unknown_topic_timeout_s=unknown_topic_timeout_s,
    )


def ask_first_offset(cluster: Cluster, topic: str, partition: int) -> int:
    """Offset of the first record that was not truncated; asked once, within :func:`read_patiently`.

    Raises:
        CodeError, ConnectionLostError
    """
    return _ask(cluster, topic, partition, Isolation.READ_UNCOMMITTED, _EARLIEST)


def read_patiently(
    cluster: Cluster,
    topic: str,
    ask: Callable[[], T],
    what: str,
    *,
    retry_timeout_s: float,
    unknown_topic_timeout_s: float,
) -> T:
    """What ``ask`` gives, once it does not raise a CodeError or ConnectionLostError that may pass.

    Args:
        cluster: Is told to look up the topic's leader anew before each repetition.
        topic: What is read from.
        ask: Asks the leader once. It may be asked again: only a broker that stays away is an error.
        what: Is read, for error messages; the name of the topic follows.
        retry_timeout_s: How long to ask.
        unknown_topic_timeout_s: In which a new topic gets known everywhere.

    Raises:
        TopicNotFound: Still unknown after ``unknown_topic_timeout_s``.
        NotAuthorizedError: No permission to read the topic.
        KafkaUnavailable: No answer within ``retry_timeout_s``.
    """
    started = time.monotonic()
    backoff_s = 0.0
    while True:
        code: ErrorCode
        try:
            return ask()
        except CodeError as exc:
            code = exc.code
        except ConnectionLostError as exc:
            logger.debug("reading %s %s again: %s", what, topic, exc)
            code = ErrorCode.network_exception
        _check_repeatable(topic, what, code, time.monotonic() - started, retry_timeout_s, unknown_topic_timeout_s)
        cluster.forget_leader(topic)
        time.sleep(backoff_s)
        backoff_s = min(_BACKOFF_MAX_S, backoff_s * 2 or _BACKOFF_FIRST_S)


def _ask(cluster: Cluster, topic: str, partition: int, isolation: Isolation, timestamp: int) -> int:
    asked = ListOffsetsPartition(partition_index=i32(partition), timestamp=i64(timestamp))
    request = ListOffsetsRequest(
        replica_id=BrokerId(_CLIENT_REPLICA),
        isolation_level=i8(isolation.value),
        topics=(ListOffsetsTopic(name=TopicName(topic), partitions=(asked,)),),
    )
    connection = cluster.connection(cluster.leader(topic, partition))
    found = connection.call(request, ListOffsetsResponse).topics[0].partitions[0]
    if found.error_code != ErrorCode.none:
        raise CodeError(found.error_code, f"topic {topic}")
    return found.offset


def _check_repeatable(
    topic: str, what: str, code: ErrorCode, waited_s: float, retry_timeout_s: float, unknown_topic_timeout_s: float
) -> None:
    match codes.meaning(codes.READ, code):
        case Meaning.REFRESH | Meaning.RETRY:
            pass
        case Meaning.DENIED:
            raise NotAuthorizedError(f"not allowed to read topic {topic}", resource=f"topic {topic}")
        case _:
            raise _unavailable(topic, f"cannot read {what} {topic}: {codes.name(code)}")
    if code == ErrorCode.unknown_topic_or_partition and waited_s >= unknown_topic_timeout_s:
        raise TopicNotFound(f"topic {topic} does not exist", topic=topic)
    if waited_s >= retry_timeout_s:
        raise _unavailable(topic, f"cannot read {what} {topic}: {codes.name(code)} for {waited_s:.0f} s")


def _unavailable(topic: str, message: str) -> KafkaUnavailable:
    fault = KafkaUnavailable(message)
    fault.resource = f"topic {topic}"
    return fault
