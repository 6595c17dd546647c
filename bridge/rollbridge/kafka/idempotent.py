"""What a producer needs that is idempotent and has no transactions: an id, requests, and what stands in a sealed log.

Source: KIP-98. A producer without transactional id gets a new producer id each time it asks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum, auto
from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v5 import InitProducerIdRequest, InitProducerIdResponse
from kio.schema.types import ProducerId
from kio.static.primitive import i16, i32Timedelta

from bridge.kafka import codes
from bridge.kafka.batches import complete_batches, parse_header
from bridge.kafka.codes import Meaning
from bridge.kafka.errors import KafkaUnavailable, NotAuthorizedError, TopicNotFound
from bridge.kafka.fetch import ask_batches
from bridge.kafka.metadata import Cluster, CodeError, Isolation

_FETCH_BYTES: Final = 4 << 20
_WAIT_MS: Final = 500


class Verdict(Enum):
    """What an answer to a Produce request means for one batch."""

    WRITTEN = auto()
    SEALED = auto()
    """Refused because of its size, and no batch of ours is too large for a segment that is open."""
    RETRY = auto()
    """Not written; send it again."""
    MOVED = auto()
    """Not written; ask who leads the partition and send it again."""
    DOUBTFUL = auto()
    """Perhaps written; send it again with the same sequence number."""
    MISPLACED = auto()
    """Not written, because one before it was not."""
    EXPIRED = auto()
    """Not written: the broker does not accept the producer id any more."""
    REFUSED = auto()
    """Not written, and sending it again would not help."""
    DENIED = auto()
    """The same, for want of a permission."""
    UNKNOWN = auto()
    """No telling."""


_MEANINGS: Final[Mapping[Meaning, Verdict]] = {
    Meaning.DONE: Verdict.WRITTEN,
    Meaning.RETRY: Verdict.RETRY,
    Meaning.REFRESH: Verdict.MOVED,
    Meaning.FOLLOW_UP: Verdict.MISPLACED,
    Meaning.REFUSED: Verdict.REFUSED,
    Meaning.DENIED: Verdict.DENIED,
    Meaning.FENCED: Verdict.EXPIRED,
    Meaning.EXPIRED: Verdict.EXPIRED,
    Meaning.UNKNOWN: Verdict.UNKNOWN,
}
_PAUSE_S: Final = 0.05
_OWN: Final[Mapping[ErrorCode, Verdict]] = {
    ErrorCode.message_too_large: Verdict.SEALED,
    ErrorCode.record_list_too_large: Verdict.SEALED,
    ErrorCode.unknown_producer_id: Verdict.EXPIRED,
    ErrorCode.request_timed_out: Verdict.DOUBTFUL,
    ErrorCode.not_enough_replicas_after_append: Verdict.DOUBTFUL,
    ErrorCode.network_exception: Verdict.DOUBTFUL,
    ErrorCode.kafka_storage_error: Verdict.DOUBTFUL,
}


def verdict(code: ErrorCode) -> Verdict:
    """What an error code of a Produce answer means for a batch of a plain writer."""
    own = _OWN.get(code)
    return _MEANINGS[codes.meaning(codes.PRODUCE, code)] if own is None else own


def new_producer_id(cluster: Cluster, timeout_s: float = 30.0) -> tuple[int, int]:
    """A producer id that nobody has used, and its epoch.

    A broker that has just started may have none yet, and says so for a moment.

    Raises:
        KafkaUnavailable: no broker gave one within ``timeout_s``; ask again.
        NotAuthorizedError: this principal may write to no topic.
    """
    request = InitProducerIdRequest(
        transactional_id=None,
        transaction_timeout=i32Timedelta.parse(timedelta(milliseconds=0)),
        producer_id=ProducerId(-1),
        producer_epoch=i16(-1),
    )
    deadline = time.monotonic() + timeout_s
    while True:
        answer = cluster.ask_any(request, InitProducerIdResponse)
        if answer.error_code == ErrorCode.none:
            return answer.producer_id, answer.producer_epoch
        meaning = codes.meaning(codes.INIT, answer.error_code)
        if meaning is Meaning.DENIED:
            raise NotAuthorizedError(
                f"not allowed to write idempotently: {codes.name(answer.error_code)}", resource="cluster"
            )
        if meaning not in (Meaning.RETRY, Meaning.REFRESH) or time.monotonic() >= deadline:
            raise KafkaUnavailable(f"no broker gave a producer id: {codes.name(answer.error_code)}")
        time.sleep(_PAUSE_S)


def own_batches(cluster: Cluster, topic: str, start: int, end: int, producer_id: int) -> dict[int, int]:
    """Where the batches of a producer stand in a topic of one partition: base offset by base sequence.

    Args:
        cluster: Used for nothing else meanwhile.
        topic: It has one partition, and nothing is appended below ``end`` any more.
        start: First offset to look at.
        end: Offset before which to stop.
        producer_id: Whose batches are looked for.

    Raises:
        KafkaUnavailable: no answer, or not now; ask again.
        TopicNotFound, NotAuthorizedError
    """
    found: dict[int, int] = {}
    while start < end:
        after = start
        for batch in complete_batches(_fetch(cluster, topic, start)):
            header = parse_header(batch)
            after = max(after, header.base_offset + header.last_offset_delta + 1)
            if header.producer_id == producer_id and header.base_offset < end:
                found[header.base_sequence] = header.base_offset
        if after == start:
            raise KafkaUnavailable(f"offset {start} of {topic} could not be read")
        start = after
    return found


def _fetch(cluster: Cluster, topic: str, start: int) -> bytes:
    try:
        found = ask_batches(cluster, topic, 0, start, _WAIT_MS, Isolation.READ_UNCOMMITTED, _FETCH_BYTES)
    except CodeError as exc:
        cluster.forget_leader(topic)
        raise _read_error(topic, exc.code) from exc
    return found.records or b""


def _read_error(topic: str, code: ErrorCode) -> Exception:
    if code in (ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id):
        return TopicNotFound(f"topic {topic} does not exist", topic=topic)
    if codes.meaning(codes.READ, code) is Meaning.DENIED:
        return NotAuthorizedError(f"not allowed to read topic {topic}: {codes.name(code)}", resource=f"topic {topic}")
    return KafkaUnavailable(f"topic {topic} cannot be read now: {codes.name(code)}")
