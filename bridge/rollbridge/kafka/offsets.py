"""Offsets and sizes of partitions: ListOffsets and DescribeLogDirs over our own connections.

:func:`read_end_offset` costs one short round trip over a connection that is open already. :func:`read_patiently`
retries any read while leaders move. :class:`LogOffsets` may be shared by threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar, cast

from kio.schema.describe_log_dirs.v4 import DescribeLogDirsRequest, DescribeLogDirsResponse
from kio.schema.describe_log_dirs.v4.request import DescribableLogDirTopic
from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v7 import ListOffsetsResponse
from kio.static.protocol import Payload

from rollbridge.base.deadlines import Backoff, Deadline, Patience, patience_s
from rollbridge.errors import KafkaUnavailableError
from rollbridge.kafka import errors as codes
from rollbridge.kafka.errors import ConnectionLostError, Meaning, NotAuthorizedError, TopicNotFoundError
from rollbridge.kafka.metadata import (
    EARLIEST,
    LATEST,
    Cluster,
    Clusters,
    CodeError,
    Isolation,
    LeaderQuestion,
    ask_leaders,
    ask_once,
    by_topic,
    of_partitions,
    offsets_request,
)
from rollbridge.stream.names import Partition

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
    """Return a partition's high watermark (READ_UNCOMMITTED) or last stable offset (READ_COMMITTED).

    Raises:
        TopicNotFoundError: Still unknown after ``unknown_topic_timeout_s``, in which all brokers learn of a new topic.
        NotAuthorizedError: No permission to read the topic.
        KafkaUnavailableError: No answer within ``retry_timeout_s``.
    """
    return read_patiently(
        cluster,
        topic,
        lambda: _ask(cluster, topic, partition, isolation, LATEST),
        "the end of topic",
        retry_timeout_s=retry_timeout_s,
        unknown_topic_timeout_s=unknown_topic_timeout_s,
    )


def ask_first_offset(cluster: Cluster, topic: str, partition: int) -> int:
    """Return the first offset of a partition, without retries; for use within :func:`read_patiently`.

    Raises:
        CodeError, ConnectionLostError
    """
    return _ask(cluster, topic, partition, Isolation.READ_UNCOMMITTED, EARLIEST)


def read_patiently(
    cluster: Cluster,
    topic: str,
    ask: Callable[[], T],
    what: str,
    *,
    retry_timeout_s: float,
    unknown_topic_timeout_s: float,
) -> T:
    """Call ``ask`` until it returns without a retriable CodeError or ConnectionLostError.

    Args:
        cluster: Cluster whose cached leader of the topic is dropped before each retry.
        topic: Topic to read from.
        ask: Asks the leader once; must be safe to repeat.
        what: Object of the read, for error messages; the name of the topic follows.
        retry_timeout_s: Time for which to retry.
        unknown_topic_timeout_s: Time in which all brokers learn of a new topic.

    Raises:
        TopicNotFoundError: Still unknown after ``unknown_topic_timeout_s``.
        NotAuthorizedError: No permission to read the topic.
        KafkaUnavailableError: No answer within ``retry_timeout_s``.
    """
    started = time.monotonic()
    retry_timeout_s = cluster.bounded_s(retry_timeout_s)
    backoff, patience = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S), Patience(logger)
    while True:
        code: ErrorCode
        why: object
        try:
            return ask()
        except CodeError as exc:
            code, why = exc.code, codes.name(exc.code)
        except ConnectionLostError as exc:
            code, why = ErrorCode.network_exception, exc
        _check_repeatable(topic, what, code, time.monotonic() - started, retry_timeout_s, unknown_topic_timeout_s)
        patience.tell(f"read {what} {topic}", why)
        cluster.forget_leader(topic)
        time.sleep(backoff.grow())


def _ask(cluster: Cluster, topic: str, partition: int, isolation: Isolation, timestamp: int) -> int:
    request = offsets_request(timestamp, isolation, [(topic, partition)])
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
        raise TopicNotFoundError(f"topic {topic} does not exist", topic=topic)
    if waited_s >= retry_timeout_s:
        raise _unavailable(topic, f"cannot read {what} {topic}: {codes.name(code)} for {waited_s:.0f} s")


def _unavailable(topic: str, message: str) -> KafkaUnavailableError:
    fault = KafkaUnavailableError(message)
    fault.resource = f"topic {topic}"
    return fault


# Offsets of many partitions; a topic's name means its first one.

_NONE: Final = -1

P = TypeVar("P", str, Partition)
"""Partition, or in its place a topic, which means partition 0; one call takes the one or the other."""


class Asker:
    """Base of what is asked over the connections of a client, with a time-out of its own."""

    def __init__(self, clusters: Clusters, timeout_s: float) -> None:
        self._clusters = clusters
        self._timeout_s = timeout_s

    @contextmanager
    def _asking(self, timeout_s: float | None = None) -> Iterator[tuple[Cluster, Deadline]]:
        """Lend a cluster until a deadline: the default one, or that of the caller if it has less."""
        deadline = Deadline(patience_s(self._timeout_s if timeout_s is None else timeout_s))
        with self._clusters.borrow(deadline) as cluster:
            yield cluster, deadline


class LogOffsets(Asker):
    """Offsets of partitions; a topic's name means its first one. Thread-safe.

    Args:
        timeout_s: Default time-out of the methods, in seconds.

    Raises, from every method:
        KafkaUnavailableError, NotFoundError (a topic does not exist), NotAuthorizedError.
    """

    def present(self, topics: Iterable[str]) -> list[str]:
        """Return those of the topics that exist and may be described, by what one broker knows at the moment."""
        wanted = list(topics)
        with self._asking() as (cluster, _):
            cluster.expire(wanted)
            faults = cluster.learn(wanted)
        return [topic for topic in wanted if topic not in faults]

    def first(self, places: Iterable[P], *, timeout_s: float | None = None) -> dict[P, int]:
        """Return the offset of the first record that was not deleted."""
        return self._ask(places, EARLIEST, Isolation.READ_UNCOMMITTED, "read the first offset", timeout_s)

    def end(
        self, places: Iterable[P], isolation: Isolation = Isolation.READ_UNCOMMITTED, *, timeout_s: float | None = None
    ) -> dict[P, int]:
        """Return the high watermark, or the last stable offset for ``READ_COMMITTED``."""
        return self._ask(places, LATEST, isolation, "read the end", timeout_s)

    def since_or_end(self, places: Iterable[P], ms: int) -> dict[P, int]:
        """Return the offset of the first record with this timestamp or a later one, else the last stable offset.

        The ends are read first: a record written in between would otherwise lie below the returned end although its
        timestamp is later than ``ms``.
        """
        wanted = list(places)
        ends = self.end(wanted, Isolation.READ_COMMITTED)
        found = self.since(wanted, ms)
        return {place: ends[place] if (offset := found[place]) is None else offset for place in wanted}

    def since(self, places: Iterable[P], ms: int) -> dict[P, int | None]:
        """Return the offset of the first record with this timestamp or a later one; None if there is none.

        Such a record may be written before a later request for the end.
        """
        found = self._ask(places, ms, Isolation.READ_COMMITTED, "read the offset of a time", None)
        return {place: None if offset == _NONE else offset for place, offset in found.items()}

    def _ask(
        self, places: Iterable[P], timestamp: int, isolation: Isolation, doing: str, timeout_s: float | None
    ) -> dict[P, int]:
        keys = {address_of(place): place for place in places}
        with self._asking(timeout_s) as (cluster, deadline):
            found = list_offsets(cluster, keys, timestamp, isolation, doing, deadline)
        return {keys[partition]: offset for partition, offset in found.items()}


def address_of(place: str | Partition) -> Partition:
    """Return the topic and partition that are meant."""
    return (place, 0) if isinstance(place, str) else place


def list_offsets(
    cluster: Cluster, places: Iterable[Partition], timestamp: int, isolation: Isolation, doing: str, deadline: Deadline
) -> dict[Partition, int]:
    """Return the offset of a time (in ms), of ``LATEST`` or of ``EARLIEST`` in each topic and partition.

    Waits for partitions that have no leader at the moment, or that not all brokers know yet.

    Raises:
        KafkaUnavailableError, NotFoundError (a topic does not exist), NotAuthorizedError.
    """
    return ask_leaders(cluster, places, offsets_question(timestamp, isolation), doing, deadline)


_OFFSET: Final = of_partitions(lambda item: int(item.offset))


def offsets_question(timestamp: int, isolation: Isolation) -> LeaderQuestion[int]:
    """Return the question for the offset of a time; see :func:`list_offsets`."""
    return LeaderQuestion(partial(offsets_request, timestamp, isolation), ListOffsetsResponse, _OFFSET)


# Disk usage: DescribeLogDirs, which librdkafka lacks.


def leader_bytes(cluster: Cluster, partitions: Iterable[Partition]) -> dict[Partition, int]:
    """Return the bytes on disk of each partition at its leader, leaving out those that do not exist.

    Log files count as a whole, truncated records included.

    Raises:
        KafkaUnavailableError: The sizes cannot be read now.
        NotAuthorizedError: Describe on the cluster is missing.
    """
    answers = ask_once(cluster, partitions, LeaderQuestion(_log_dirs_request, DescribeLogDirsResponse, _log_bytes))
    for fault in answers.lost.values():
        cluster.forget()
        raise KafkaUnavailableError(f"the sizes of topics cannot be read now: {fault}")
    for code, _ in answers.refused.values():
        if code is not ErrorCode.unknown_topic_or_partition:
            _check(code)
    return answers.found


def _log_dirs_request(places: Iterable[Partition]) -> DescribeLogDirsRequest:
    topics = (DescribableLogDirTopic(topic=topic, partitions=items) for topic, items in by_topic(places).items())
    return DescribeLogDirsRequest(topics=tuple(topics))


def _log_bytes(answer: Payload) -> Iterable[tuple[Partition, ErrorCode, int]]:
    answer = cast(DescribeLogDirsResponse, answer)
    for code in (answer.error_code, *(directory.error_code for directory in answer.results)):
        _check(code)
    for directory in answer.results:
        for found in directory.topics:
            for item in found.partitions:
                if not item.is_future_key:
                    yield (str(found.name), int(item.partition_index)), ErrorCode.none, int(item.partition_size)


def _check(code: ErrorCode) -> None:
    if code == ErrorCode.cluster_authorization_failed:
        raise NotAuthorizedError("not allowed to describe the log directories", resource="cluster")
    if code != ErrorCode.none:
        raise KafkaUnavailableError(f"the sizes of topics cannot be read now: {codes.name(code)}")
