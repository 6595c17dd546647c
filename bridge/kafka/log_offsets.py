"""Offsets of topics: first, last stable, last, and first of a time; of one partition, which is 0 unless said."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby
from typing import Any, Final
from weakref import WeakSet

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from bridge.kafka.clients import admin_config, library_logger
from bridge.kafka.metadata import Isolation
from bridge.kafka.translate import kafka_error, translate

_TIMEOUT_S: Final = 30.0
_NONE: Final = -1
_PAUSE_S: Final = 0.1
"""Before a partition without a leader is asked for again."""
_ACQUAINTED_S: Final = 1.0
_PASSING: Final = frozenset(
    {
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,  # of a topic that has just been made: its broker does not know that yet
        KafkaError.OFFSET_NOT_AVAILABLE,
    }
)
"""The library itself does not ask again after these."""

_acquainted: Final[WeakSet[AdminClient]] = WeakSet()
"""Clients that know who leads what. One that is asked for offsets before that may answer after one to three seconds."""


class LogOffsets:
    """Asks brokers for offsets of one partition of each topic; safe to use from several threads.

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
        try:
            self._admin = AdminClient(
                admin_config(bootstrap_servers, security=security, client_id=client_id), logger=library_logger
            )
        except Exception as exc:
            raise translate(exc, f"connect to {bootstrap_servers}") from exc

    def first(self, topics: Iterable[str], partition: int = 0) -> dict[str, int]:
        """Offset of the first record that is still there."""
        earliest = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        return self._ask(topics, partition, earliest, Isolation.READ_UNCOMMITTED, "first offset")

    def end(self, topics: Iterable[str], isolation: Isolation, partition: int = 0) -> dict[str, int]:
        """High watermark, or last stable offset for ``READ_COMMITTED``."""
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        return self._ask(topics, partition, latest, isolation, "end")

    def since(self, topics: Iterable[str], ms: int) -> dict[str, int | None]:
        """Offset of the first record with this timestamp or a later one; None if there is none."""
        found = self._ask(topics, 0, OffsetSpec.for_timestamp(ms), Isolation.READ_COMMITTED, "offset of a time")
        return {topic: None if offset == _NONE else offset for topic, offset in found.items()}

    def _ask(
        self, topics: Iterable[str], partition: int, spec: OffsetSpec, isolation: Isolation, what: str
    ) -> dict[str, int]:
        places = [(topic, partition) for topic in topics]
        found = list_offsets(self._admin, places, spec, isolation, what, self._timeout_s)
        return {topic: offset for (topic, _), offset in found.items()}


def list_offsets(
    admin: AdminClient,
    places: Iterable[tuple[str, int]],
    spec: OffsetSpec,
    isolation: Isolation,
    what: str,
    timeout_s: float,
) -> dict[tuple[str, int], int]:
    """The offset that ``spec`` asks for, of each topic and partition; ``what`` names it in errors.

    A partition that has no leader at the moment, or one that not all brokers know of yet, is waited for.

    Raises:
        KafkaUnavailable, NotFoundError (a topic does not exist), NotAuthorizedError.
    """
    request = {TopicPartition(*place): spec for place in places}
    if not request:
        return {}
    topic = next(iter(request)).topic
    deadline = time.monotonic() + timeout_s
    while True:
        if admin not in _acquainted:
            with suppress(KafkaException):  # whatever it is, the request itself says it
                admin.list_topics(topic, timeout=min(timeout_s, _ACQUAINTED_S))
                _acquainted.add(admin)
        try:
            return _listed(admin, request, isolation, timeout_s)
        except _Failed as failed:
            topic, fault = _told_apart(admin, request, failed, timeout_s)
            if not will_pass(fault) or time.monotonic() > deadline:
                raise translate(fault, f"read the {what} of topic {topic}", f"topic {topic}") from failed.cause
            time.sleep(_PAUSE_S)
            _acquainted.discard(admin)  # who leads it now has to be learnt anew


def will_pass(fault: Exception | KafkaError) -> bool:
    """Whether what the library says comes from a leader that is about to change, or has just done so."""
    error = fault if isinstance(fault, KafkaError) else kafka_error(fault)
    return error is not None and error.code() in _PASSING


class _Failed(Exception):
    """What the library says of one of the topics."""

    def __init__(self, topic: str, cause: Exception) -> None:
        self.topic = topic
        self.cause = cause


def _listed(
    admin: AdminClient, request: Mapping[TopicPartition, OffsetSpec], isolation: Isolation, timeout_s: float
) -> dict[tuple[str, int], int]:
    """Ask once; raises _Failed."""
    try:
        futures: Mapping[TopicPartition, Future[Any]] = admin.list_offsets(
            dict(request), isolation_level=IsolationLevel[isolation.name], request_timeout=timeout_s
        )
    except Exception as exc:  # what the library can tell without a broker
        raise _Failed(next(iter(request)).topic, exc) from exc
    found: dict[tuple[str, int], int] = {}
    for place, future in futures.items():
        try:
            # The library enforces its own time-out; this one is for the case that it does not.
            found[place.topic, place.partition] = int(future.result(timeout_s * 2).offset)
        except Exception as exc:
            raise _Failed(place.topic, exc) from exc
    return found


def _told_apart(
    admin: AdminClient, request: Iterable[TopicPartition], failed: _Failed, timeout_s: float
) -> tuple[str, Exception | KafkaError]:
    """Which topic is at fault, and how.

    The library says of each that it has no leader: if the topic is not there, if it is denied to us, and if a partition
    really has none at the moment, as while its broker is away.
    """
    error = kafka_error(failed.cause)
    if error is None or error.code() != KafkaError._NOENT:
        return failed.topic, failed.cause
    for name, places in groupby(sorted(request, key=_place), key=lambda place: place.topic):
        with suppress(KafkaException):
            known = admin.list_topics(name, timeout=timeout_s).topics.get(name)
            if known is not None and known.error is not None:
                return name, known.error
            if known is not None and any(place.partition not in known.partitions for place in places):
                return name, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    return failed.topic, KafkaError(KafkaError.LEADER_NOT_AVAILABLE)


def _place(place: TopicPartition) -> tuple[str, int]:
    return place.topic, place.partition
