"""Sealing topics for every writer, native transactions, idempotent pipelines and plain producers alike.

A topic whose ``max.message.bytes`` is 78 takes no data but still the 78-byte control markers, so native transactions
that are open on it can end. Once its last stable offset has reached its end, the limit goes to 1, which nothing passes.
Going to 1 at once would refuse the markers as well, and then the last stable offset never moves again.

A changed setting reaches the leader some time after the controller has accepted it, so each step is confirmed by a
probe: a batch with a wrong checksum. The leader looks at the size first, so the answer is MESSAGE_TOO_LARGE as soon as
the limit is in force and CORRUPT_MESSAGE before; in neither case is anything written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v7 import ListOffsetsRequest, ListOffsetsResponse
from kio.schema.list_offsets.v7.request import ListOffsetsPartition, ListOffsetsTopic
from kio.schema.produce.v12 import ProduceRequest, ProduceResponse
from kio.schema.produce.v12.request import PartitionProduceData, TopicProduceData
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import Records, i8, i16, i32, i32Timedelta, i64

from bridge.errors import InvalidRequestError
from bridge.kafka import codes
from bridge.kafka.batches import BatchBuilder
from bridge.kafka.codes import Meaning
from bridge.kafka.errors import KafkaUnavailable, NotAuthorizedError, SealTimeoutError, TopicNotFound
from bridge.kafka.metadata import Cluster, CodeError, Isolation, NodeId
from bridge.kafka.wire import Connection

logger = logging.getLogger(__name__)

MARKERS_ONLY: Final = 78
NOTHING: Final = 1
LIMIT_SETTING: Final = "max.message.bytes"

_LATEST: Final = -1
_CONSUMER: Final = -1
# ListOffsets with the id of a debugging replica gives the log end offset, which can be ahead of the high watermark that
# consumers are told: what lies between will be readable as soon as all replicas have it.
_DEBUGGING_REPLICA: Final = -2
# A leader checks the size first and takes the partition's lock after. An append that was past the check when the limit
# came into force needs this long at most, scheduling included, to be in the log.
_SETTLED_S: Final = 0.025
_BACKOFF_FIRST_S: Final = 0.001
_BACKOFF_MAX_S: Final = 0.1
_UNKNOWN_TOPIC_S: Final = 5.0

Answers = Mapping[str, tuple[ErrorCode, int]]


def _probe(value_bytes: int) -> Records:
    builder = BatchBuilder(1 << 10)
    builder.append(0, None, bytes(value_bytes))
    batch = bytearray(builder.build())
    batch[17] ^= 0xFF  # first byte of the checksum
    return Records(bytes(batch))


_PROBES: Final[Mapping[int, Records]] = {MARKERS_ONLY: _probe(MARKERS_ONLY), NOTHING: _probe(0)}


class Sealer:
    """Seals topics of one partition each; used once."""

    def __init__(self, cluster: Cluster, set_limit: Callable[[Iterable[str], int], None], *, timeout_s: float) -> None:
        """``set_limit(topics, n)`` sets ``max.message.bytes`` and returns when the controller has accepted it."""
        self._cluster = cluster
        self._set_limit = set_limit
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self._waiting_for: dict[str, str] = {}

    def seal(self, topics: Iterable[str], sealed_before: Iterable[str] = ()) -> dict[str, int]:
        """Seal ``topics`` and return their end offsets, which stay what they are for ever.

        Args:
            topics: All topics; each must have exactly one partition.
            sealed_before: Those among them whose limit is at 1 already: an earlier call may have got that far.

        Raises:
            SealTimeoutError: Some topics could not be sealed in time; call again.
            TopicNotFound, NotAuthorizedError, InvalidRequestError, KafkaUnavailable
        """
        ends: dict[str, int] = {}
        remaining = list(dict.fromkeys(topics))
        at_nothing = set(sealed_before)
        while remaining:
            open_to_markers = [topic for topic in remaining if topic not in at_nothing]
            if open_to_markers:
                self._set_limit(open_to_markers, MARKERS_ONLY)
                self._confirm(open_to_markers, MARKERS_ONLY)
                self._await_stable(open_to_markers)
                self._set_limit(open_to_markers, NOTHING)
            self._confirm(remaining, NOTHING)
            settled = self._settled_ends(remaining)
            for topic, (stable, end) in settled.items():
                if stable == end:
                    ends[topic] = end
                    logger.info("topic %s is sealed at offset %d", topic, end)
                else:
                    # A record of at most 10 bytes in a native transaction came in between the two limits. Its marker
                    # must be let in before it is tried in vain.
                    logger.info("topic %s: a native transaction came in while sealing, going back", topic)
            remaining = [topic for topic in remaining if topic not in ends]
            at_nothing.clear()
        return ends

    def _confirm(self, topics: Iterable[str], limit: int) -> None:
        """Return once every leader refuses what exceeds ``limit``."""
        probe = _PROBES[limit]

        def ask(connection: Connection, names: list[str]) -> Answers:
            answer = connection.call(
                ProduceRequest(
                    transactional_id=None,
                    acks=i16(-1),
                    timeout=i32Timedelta.parse(timedelta(seconds=5)),
                    topic_data=tuple(
                        TopicProduceData(
                            name=TopicName(name),
                            partition_data=(PartitionProduceData(index=i32(0), records=probe),),
                        )
                        for name in names
                    ),
                ),
                ProduceResponse,
            )
            return {topic.name: (topic.partition_responses[0].error_code, 0) for topic in answer.responses}

        pending = set(topics)
        backoff_s = _BACKOFF_FIRST_S
        while pending:
            for topic, (code, _) in self._ask_leaders(pending, ask).items():
                match code:
                    case ErrorCode.message_too_large:
                        pending.discard(topic)
                    case ErrorCode.corrupt_message:
                        self._waiting_for[topic] = f"{LIMIT_SETTING}={limit} to reach its leader"
                    case ErrorCode.none:
                        raise KafkaUnavailable(f"the leader of topic {topic} accepted a batch with a wrong checksum")
                    case _:
                        self._note(topic, code)
            backoff_s = self._pause(pending, backoff_s)

    def _await_stable(self, topics: Iterable[str]) -> None:
        """Return once no native transaction is open: the last stable offset is the end."""
        pending = set(topics)
        backoff_s = _BACKOFF_FIRST_S
        while pending:
            for topic, (stable, end) in self._ends(pending).items():
                if stable == end:
                    pending.discard(topic)
                else:
                    self._waiting_for[topic] = (
                        f"a native transaction to end (last stable offset {stable}, end offset {end})"
                    )
            backoff_s = self._pause(pending, backoff_s)

    def _settled_ends(self, topics: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Last stable and end offsets, once they have not changed for a while."""
        pending = set(topics)
        settled: dict[str, tuple[int, int]] = {}
        last: dict[str, tuple[int, int]] = {}
        while pending:
            seen = self._ends(pending)
            for topic, ends in seen.items():
                if last.get(topic) == ends:
                    settled[topic] = ends
                else:
                    self._waiting_for[topic] = f"its end to stay at offset {ends[1]}"
            last.update(seen)
            pending.difference_update(settled)
            self._pause(pending, _SETTLED_S)
        return settled

    def _ends(self, topics: Iterable[str]) -> dict[str, tuple[int, int]]:
        """(last stable offset, log end offset) of each topic whose leader answered; the end is read last."""
        stable = self._list_offsets(topics, _CONSUMER, Isolation.READ_COMMITTED)
        ends = self._list_offsets(stable, _DEBUGGING_REPLICA, Isolation.READ_UNCOMMITTED)
        return {topic: (stable[topic], end) for topic, end in ends.items()}

    def _list_offsets(self, topics: Iterable[str], replica: int, isolation: Isolation) -> dict[str, int]:
        asked = ListOffsetsPartition(partition_index=i32(0), timestamp=i64(_LATEST))

        def ask(connection: Connection, names: list[str]) -> Answers:
            answer = connection.call(
                ListOffsetsRequest(
                    replica_id=BrokerId(replica),
                    isolation_level=i8(isolation.value),
                    topics=tuple(ListOffsetsTopic(name=TopicName(name), partitions=(asked,)) for name in names),
                ),
                ListOffsetsResponse,
            )
            return {topic.name: (topic.partitions[0].error_code, topic.partitions[0].offset) for topic in answer.topics}

        found = {}
        for topic, (code, offset) in self._ask_leaders(topics, ask).items():
            if code == ErrorCode.none:
                found[topic] = offset
            else:
                self._note(topic, code)
        return found

    def _ask_leaders(self, topics: Iterable[str], ask: Callable[[Connection, list[str]], Answers]) -> Answers:
        """One request to each leader; topics whose leader does not answer now are missing from the result."""
        by_leader: dict[NodeId, list[str]] = {}
        for topic in sorted(topics):
            try:
                by_leader.setdefault(self._cluster.leader(topic, 0), []).append(topic)
            except CodeError as exc:
                self._note(topic, exc.code)
                continue
            if self._cluster.partition_count(topic) != 1:
                raise InvalidRequestError(f"cannot seal topic {topic}: only topics of one partition can be sealed")
        answers: dict[str, tuple[ErrorCode, int]] = {}
        for node, names in by_leader.items():
            try:
                answers.update(ask(self._cluster.connection(node), names))
            except KafkaUnavailable as exc:
                for topic in names:
                    self._cluster.forget_leader(topic)
                    self._waiting_for[topic] = f"its leader to answer ({exc})"
        return answers

    def _note(self, topic: str, code: ErrorCode) -> None:
        """Remember why this topic waits; raise if waiting is no use."""
        if code == ErrorCode.unknown_topic_or_partition and time.monotonic() - self._started > _UNKNOWN_TOPIC_S:
            raise TopicNotFound(f"cannot seal topic {topic}: it does not exist", topic=topic)
        match codes.meaning(codes.PRODUCE, code):
            case Meaning.REFRESH | Meaning.RETRY:
                self._cluster.forget_leader(topic)
                self._waiting_for[topic] = f"its leader to recover from {codes.name(code)}"
            case Meaning.DENIED:
                raise NotAuthorizedError(
                    f"cannot seal topic {topic}: {codes.name(code)} (needed: Write and Describe)",
                    resource=f"topic {topic}",
                )
            case _:
                raise KafkaUnavailable(f"cannot seal topic {topic}: {codes.name(code)}")

    def _pause(self, pending: Iterable[str], seconds: float) -> float:
        """Wait before asking again, if there is anything to ask, and return the next wait."""
        left = {topic: self._waiting_for.get(topic, "its leader to answer") for topic in sorted(pending)}
        if not left:
            return seconds
        if time.monotonic() - self._started >= self._timeout_s:
            reasons = "; ".join(f"{topic} waits for {reason}" for topic, reason in left.items())
            raise SealTimeoutError(
                f"not sealed within {self._timeout_s:g} s: {reasons}. Nothing is lost: sealing again goes on from here",
                topics=left,
            )
        time.sleep(seconds)
        return min(_BACKOFF_MAX_S, seconds * 2)
