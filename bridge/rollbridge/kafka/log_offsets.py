"""Offsets of topics: first, last stable, last, and first of a time; of one partition, which is 0 unless said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final, cast

from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v7 import ListOffsetsRequest, ListOffsetsResponse
from kio.schema.list_offsets.v7.request import ListOffsetsPartition, ListOffsetsTopic
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i8, i32, i64
from kio.static.protocol import Payload

from rollbridge.calls.within import patience_s
from rollbridge.kafka.leaders import Place, Question, ask_leaders
from rollbridge.kafka.metadata import Cluster, Clusters, Isolation
from rollbridge.kafka.patience import Deadline

LATEST: Final = -1
EARLIEST: Final = -2
_CLIENT: Final = -1
_NONE: Final = -1
_TIMEOUT_S: Final = 30.0


class LogOffsets:
    """Asks brokers for offsets of one partition of each topic; safe to use from several threads.

    Args:
        timeout_s: How long to ask, where a method is not given a time-out of its own; in seconds.

    Raises, from every method:
        KafkaUnavailable, NotFoundError (a topic does not exist), NotAuthorizedError.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        security: Mapping[str, str] | None = None,
        client_id: str = "rollbridge",
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._clusters = Clusters(bootstrap_servers, security=security, client_id=client_id)

    def close(self) -> None:
        """Drop the connections; another question opens them again."""
        self._clusters.close()

    def first(self, topics: Iterable[str], partition: int = 0, *, timeout_s: float | None = None) -> dict[str, int]:
        """Offset of the first record that is still there."""
        return self._ask(topics, partition, EARLIEST, Isolation.READ_UNCOMMITTED, "read the first offset", timeout_s)

    def end(
        self, topics: Iterable[str], isolation: Isolation, partition: int = 0, *, timeout_s: float | None = None
    ) -> dict[str, int]:
        """High watermark, or last stable offset for ``READ_COMMITTED``."""
        return self._ask(topics, partition, LATEST, isolation, "read the end", timeout_s)

    def since_or_end(self, topics: Iterable[str], ms: int) -> dict[str, int]:
        """Offset of the first record with this timestamp or a later one; the last stable offset if there is none.

        Ends are asked for first: a record that is written in between is younger than what was asked for, and would
        else lie before the end that is told.
        """
        wanted = list(topics)
        ends = self.end(wanted, Isolation.READ_COMMITTED)
        found = self.since(wanted, ms)
        return {topic: ends[topic] if (offset := found[topic]) is None else offset for topic in wanted}

    def since(self, topics: Iterable[str], ms: int, *, timeout_s: float | None = None) -> dict[str, int | None]:
        """Offset of the first record with this timestamp or a later one; None if there is none.

        That there was none says nothing about what is written by the time at which an end is asked for.
        """
        found = self._ask(topics, 0, ms, Isolation.READ_COMMITTED, "read the offset of a time", timeout_s)
        return {topic: None if offset == _NONE else offset for topic, offset in found.items()}

    def _ask(
        self,
        topics: Iterable[str],
        partition: int,
        timestamp: int,
        isolation: Isolation,
        doing: str,
        timeout_s: float | None,
    ) -> dict[str, int]:
        places = [(topic, partition) for topic in topics]
        deadline = Deadline(patience_s(self._timeout_s if timeout_s is None else timeout_s))
        with self._clusters.borrow(deadline) as cluster:
            found = list_offsets(cluster, places, timestamp, isolation, doing, deadline)
        return {topic: offset for (topic, _), offset in found.items()}


def list_offsets(
    cluster: Cluster, places: Iterable[Place], timestamp: int, isolation: Isolation, doing: str, deadline: Deadline
) -> dict[Place, int]:
    """The offset of a time (in ms), of ``LATEST`` or of ``EARLIEST`` in each topic and partition.

    A partition that has no leader at the moment, or one that not all brokers know of yet, is waited for.

    Raises:
        KafkaUnavailable, NotFoundError (a topic does not exist), NotAuthorizedError.
    """
    return ask_leaders(cluster, places, offsets_question(timestamp, isolation), doing, deadline)


def offsets_question(timestamp: int, isolation: Isolation) -> Question:
    """The question for the offset of a time; see :func:`list_offsets`."""
    return Question(partial(offsets_request, timestamp, isolation), ListOffsetsResponse, _answers)


def offsets_request(timestamp: int, isolation: Isolation, places: Iterable[Place]) -> ListOffsetsRequest:
    """The request for the offset of a time, or of an end, in partitions of one leader."""
    by_topic: dict[str, list[ListOffsetsPartition]] = {}
    for topic, partition in places:
        asked = ListOffsetsPartition(partition_index=i32(partition), timestamp=i64(timestamp))
        by_topic.setdefault(topic, []).append(asked)
    return ListOffsetsRequest(
        replica_id=BrokerId(_CLIENT),
        isolation_level=i8(isolation.value),
        topics=tuple(
            ListOffsetsTopic(name=TopicName(topic), partitions=tuple(asked)) for topic, asked in by_topic.items()
        ),
    )


def _answers(answer: Payload) -> Iterable[tuple[Place, ErrorCode, int]]:
    for topic in cast(ListOffsetsResponse, answer).topics:
        for partition in topic.partitions:
            yield (str(topic.name), int(partition.partition_index)), partition.error_code, int(partition.offset)
