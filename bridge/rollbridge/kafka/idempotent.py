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

from rollbridge.errors import CorruptDataError
from rollbridge.kafka import codes
from rollbridge.kafka.batches import complete_batches, parse_header
from rollbridge.kafka.codes import Meaning
from rollbridge.kafka.errors import KafkaUnavailable, NotAuthorizedError, TopicNotFound
from rollbridge.kafka.fetch import NO_EPOCH, Wanted, ask_batches
from rollbridge.kafka.metadata import Cluster, CodeError, Isolation
from rollbridge.kafka.offsets import ask_first_offset

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


class OwnBatches:
    """Looks up where the batches of a producer stand in a sealed log of one partition, part by part.

    The log may have lost its beginning, which is a gap, or its end: where it does not go on as it was known, it is read
    from where it differs.

    Attributes:
        found: Base offset by base sequence, as far as was looked.
        gap: The offsets that were to be read and are deleted, from the first one to the last one and 1; what stood
            there nobody can tell. None if there are none.
    """

    def __init__(self, topic: str, start: int, end: int, producer_id: int, epoch: int = NO_EPOCH) -> None:
        """Nothing is read yet.

        Args:
            topic: It has one partition, and nothing is appended below ``end`` any more.
            start: First offset to look at.
            end: Offset before which to stop.
            producer_id: Whose batches are looked for.
            epoch: Leader epoch under which something below ``start`` was known to stand.
        """
        self.found: dict[int, int] = {}
        self.gap: tuple[int, int] | None = None
        self._topic = topic
        self._next = start
        self._end = end
        self._producer_id = producer_id
        self._epoch = epoch

    def read_on(self, cluster: Cluster) -> bool:
        """Read one part, about a megabyte at most; whether the end was reached. After an error, it can be called again.

        Args:
            cluster: Used for nothing else meanwhile.

        Raises:
            KafkaUnavailable: no answer, or not now; ask again.
            CorruptDataError: the log ends before ``end``.
            TopicNotFound, NotAuthorizedError
        """
        if self._next >= self._end:
            return True
        raw = self._fetch(cluster)
        if raw is None:
            return self._next >= self._end
        after = self._next
        for batch in complete_batches(raw):
            header = parse_header(batch)
            after = max(after, header.base_offset + header.last_offset_delta + 1)
            if header.producer_id == self._producer_id and header.base_offset < self._end:
                self.found[header.base_sequence] = header.base_offset
        if after == self._next:
            raise KafkaUnavailable(f"offset {self._next} of {self._topic} could not be read")
        self._next = after
        return after >= self._end

    def _fetch(self, cluster: Cluster) -> bytes | None:
        """What stands at the next offset; None if it is another one now."""
        topic, start, epoch = self._topic, self._next, self._epoch
        try:
            try:
                answer = ask_batches(cluster, Wanted(topic, 0, start, epoch), _WAIT_MS, Isolation.READ_UNCOMMITTED)
            except CodeError as exc:
                if exc.code is not ErrorCode.offset_out_of_range:
                    raise
                self._skip_to(ask_first_offset(cluster, topic, 0))
                return None
        except CodeError as exc:
            cluster.forget_leader(topic)
            raise _read_error(topic, exc.code) from exc
        if answer.diverging_epoch.end_offset >= 0:
            # It has lost what was known, and others have written since: what is looked for may stand among that.
            self._next, self._epoch = min(start, answer.diverging_epoch.end_offset), NO_EPOCH
            return None
        self._epoch = NO_EPOCH
        return answer.records or b""

    def _skip_to(self, first: int) -> None:
        """Go on at the first offset of a log that has not the next one."""
        if first > self._next:
            low, high = self.gap or (self._next, first)
            self.gap = min(low, self._next), max(high, first)
        elif self._epoch == NO_EPOCH:
            raise CorruptDataError(
                f"topic {self._topic} ends before offset {self._next}, and was sealed at {self._end}"
            )
        self._next, self._epoch = first, NO_EPOCH


def _read_error(topic: str, code: ErrorCode) -> Exception:
    if code in (ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id):
        return TopicNotFound(f"topic {topic} does not exist", topic=topic)
    if codes.meaning(codes.READ, code) is Meaning.DENIED:
        return NotAuthorizedError(f"not allowed to read topic {topic}: {codes.name(code)}", resource=f"topic {topic}")
    return KafkaUnavailable(f"topic {topic} cannot be read now: {codes.name(code)}")
