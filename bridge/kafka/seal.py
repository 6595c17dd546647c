"""Sealing topics for every writer, native transactions, idempotent pipelines and plain producers alike.

Two settings together close a topic to data and leave it open to the 78-byte markers that end native transactions:

- ``max.message.bytes=78`` refuses every batch that is larger, that is, all but the tiniest;
- ``compression.type=gzip`` makes the broker compress the tiniest, whatever they came as, and look at the size again;
  gzip alone adds 18 bytes, so that none is left below 79. Markers are never compressed.

A lower limit would refuse markers as well. Then a transaction that is open on the topic never ends, and neither does
one that merely tried to write to it: its partition joined before its batch was refused, so its transactional id waits
for a marker that cannot be written until the topic is deleted.

A changed setting reaches the leader some time after the controller has accepted it, so it is confirmed by a probe: a
batch with a wrong checksum. The leader looks at the size first, so the answer is MESSAGE_TOO_LARGE as soon as the limit
is in force and CORRUPT_MESSAGE before; in neither case is anything written. The controller writes both settings as one
unit, so one probe stands for both.
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

# Bytes of a batch with a commit or abort marker.
_MARKER_BYTES: Final = 78
SEALED: Final[Mapping[str, str]] = {"compression.type": "gzip", "max.message.bytes": str(_MARKER_BYTES)}
"""Settings that a sealed topic has and keeps."""

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


def _probe() -> Records:
    builder = BatchBuilder(1 << 10)
    builder.append(0, None, bytes(_MARKER_BYTES))
    batch = bytearray(builder.build())
    batch[17] ^= 0xFF  # first byte of the checksum
    return Records(bytes(batch))


_PROBE: Final = _probe()


class Sealer:
    """Seals topics of one partition each; used once."""

    def __init__(
        self, cluster: Cluster, configure: Callable[[Iterable[str], Mapping[str, str]], None], *, timeout_s: float
    ) -> None:
        """``configure(topics, settings)`` changes settings and returns when the controller has accepted them."""
        self._cluster = cluster
        self._configure = configure
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self._waiting_for: dict[str, str] = {}

    def seal(self, topics: Iterable[str]) -> dict[str, int]:
        """Seal ``topics`` and return their end offsets: no record will ever be at or after them, only markers.

        Each must have exactly one partition.

        Raises:
            SealTimeoutError: Some topics could not be sealed in time; call again.
            TopicNotFound, NotAuthorizedError, InvalidRequestError, KafkaUnavailable
        """
        names = list(dict.fromkeys(topics))
        self._require_single_partitions(names)
        self._configure(names, SEALED)
        self._await_in_force(names)
        ends = self._await_ends(names)
        for topic, end in ends.items():
            logger.info("topic %s is sealed at offset %d", topic, end)
        return ends

    def _require_single_partitions(self, topics: Iterable[str]) -> None:
        """Before anything is changed: of several partitions some would be sealed at other times."""
        pending = set(topics)
        backoff_s = _BACKOFF_FIRST_S
        while pending:
            for topic in sorted(pending):
                try:
                    self._cluster.leader(topic, 0)
                except CodeError as exc:
                    self._note(topic, exc.code)
                    continue
                if self._cluster.partition_count(topic) != 1:
                    raise InvalidRequestError(f"cannot seal topic {topic}: it has more than one partition")
                pending.discard(topic)
            backoff_s = self._pause(pending, backoff_s)

    def _await_in_force(self, topics: Iterable[str]) -> None:
        """Return once every leader refuses what is larger than a marker."""

        def ask(connection: Connection, names: list[str]) -> Answers:
            answer = connection.call(
                ProduceRequest(
                    transactional_id=None,
                    acks=i16(-1),
                    timeout=i32Timedelta.parse(timedelta(seconds=5)),
                    topic_data=tuple(
                        TopicProduceData(
                            name=TopicName(name),
                            partition_data=(PartitionProduceData(index=i32(0), records=_PROBE),),
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
                        self._waiting_for[topic] = "its new settings to reach its leader"
                    case ErrorCode.none:
                        raise KafkaUnavailable(f"the leader of topic {topic} accepted a batch with a wrong checksum")
                    case _:
                        self._note(topic, code)
            backoff_s = self._pause(pending, backoff_s)

    def _await_ends(self, topics: Iterable[str]) -> dict[str, int]:
        """End offsets, once no native transaction is open and nothing has come in for a while."""
        pending = set(topics)
        settled: dict[str, int] = {}
        before: dict[str, int] = {}
        while pending:
            for topic, (stable, end) in self._ends(pending).items():
                if stable != end:
                    self._waiting_for[topic] = (
                        f"a native transaction to end (last stable offset {stable}, end offset {end})"
                    )
                elif before.get(topic) != end:
                    self._waiting_for[topic] = f"its end to stay at offset {end}"
                else:
                    settled[topic] = end
                before[topic] = end
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
