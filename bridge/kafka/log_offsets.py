"""Offsets of topics: first, last stable, last, and first of a time; of one partition, which is 0 unless said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from bridge.kafka.clients import admin_config, library_logger
from bridge.kafka.metadata import Isolation
from bridge.kafka.translate import kafka_error, translate

_TIMEOUT_S: Final = 30.0
_NONE: Final = -1

_ACQUAINTED_S: Final = 1.0

_acquainted: Final[WeakSet[AdminClient]] = WeakSet()
"""Clients that know a broker. One that is asked for offsets before that may answer only after one to three seconds."""


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

    Raises:
        KafkaUnavailable, NotFoundError (a topic does not exist), NotAuthorizedError.
    """
    request = {TopicPartition(*place): spec for place in places}
    if not request:
        return {}
    if admin not in _acquainted:
        with suppress(KafkaException):  # whatever it is, the request itself says it
            admin.list_topics(next(iter(request)).topic, timeout=min(timeout_s, _ACQUAINTED_S))
            _acquainted.add(admin)
    try:
        futures: Mapping[TopicPartition, Future[Any]] = admin.list_offsets(
            request, isolation_level=IsolationLevel[isolation.name], request_timeout=timeout_s
        )
    except Exception as exc:  # what the library can tell without a broker
        raise translate(exc, f"read the {what} of topics") from exc
    found: dict[tuple[str, int], int] = {}
    for place, future in futures.items():
        try:
            # The library enforces its own time-out; this one is for the case that it does not.
            found[place.topic, place.partition] = int(future.result(timeout_s * 2).offset)
        except Exception as exc:
            topic, fault = _told_apart(admin, place.topic, [item.topic for item in request], exc, timeout_s)
            raise translate(fault, f"read the {what} of topic {topic}", f"topic {topic}") from exc
    return found


def _told_apart(
    admin: AdminClient, topic: str, topics: Iterable[str], exc: Exception, timeout_s: float
) -> tuple[str, Exception | KafkaError]:
    """Which topic is at fault, and how: the library says of each that it has no leader, also if it is denied to us."""
    error = kafka_error(exc)
    if error is not None and error.code() == KafkaError._NOENT:
        for name in dict.fromkeys(topics):
            with suppress(KafkaException):
                known = admin.list_topics(name, timeout=timeout_s).topics.get(name)
                if known is not None and known.error is not None:
                    return name, known.error
    return topic, exc
