"""Topics: create, describe, configure, truncate, seal and delete them, each call safe to repeat.

A thin layer over confluent-kafka's AdminClient, where its errors become ours.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from bridge.kafka.clients import admin_config
from bridge.kafka.errors import KafkaUnavailable, TopicMismatchError
from bridge.kafka.log_offsets import list_offsets
from bridge.kafka.metadata import Cluster, Isolation
from bridge.kafka.seal import SEALED, Sealer
from bridge.kafka.translate import kafka_error, translate
from bridge.kafka.views import TopicDescription, view_cluster, view_topics

logger = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K")

# A topic or, where it has several partitions, one of them; a bare name means partition 0.
Partition = str | tuple[str, int]

_BROKER_DEFAULT: Final = -1
_POLL_S: Final = 0.02
_CONNECT_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """A topic as it should be."""

    name: str
    partitions: int = 1
    replication_factor: int = _BROKER_DEFAULT
    """-1: the broker's ``default.replication.factor``. Not compared with an existing topic's."""
    config: Mapping[str, str] = field(default_factory=dict)


class TopicAdmin:
    """Administers topics; one object may be used from several threads.

    Args:
        security: ``security.protocol``, ``ssl.*`` and ``sasl.*`` as for confluent-kafka.
        timeout_s: Longest wait for any one answer.

    Raises, from every method:
        KafkaUnavailable: No answer in time. What was asked for may have happened; every method may be called again.
        NotAuthorizedError: A permission is missing.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        security: Mapping[str, str] | None = None,
        client_id: str = "rollbridge",
        timeout_s: float = 30.0,
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._security = dict(security or {})
        self._client_id = client_id
        self._timeout_s = timeout_s
        try:
            # With a logger, what librdkafka has to say goes there and not to standard error.
            self._admin = AdminClient(
                admin_config(bootstrap_servers, security=self._security, client_id=client_id), logger=logger
            )
        except Exception as exc:
            raise translate(exc, f"connect to {bootstrap_servers}") from exc

    def __repr__(self) -> str:
        return f"<TopicAdmin of {self._bootstrap_servers}>"

    def close(self) -> None:
        """Nothing is held that outlives the object; present so that all adapters are closed the same way."""

    def cluster_id(self) -> str:
        """Identity of the Kafka cluster, which its brokers keep for ever."""
        with self._cluster() as cluster:
            return view_cluster(cluster, self._timeout_s).cluster_id

    def create_topics(self, specs: Iterable[TopicSpec]) -> frozenset[str]:
        """Create topics and wait until brokers know them; returns the names of those that were not there before.

        One that exists with these partitions and settings is left alone, also when it has been sealed since.

        Raises:
            TopicMismatchError: It exists, but differs; nothing was changed.
            InvalidRequestError: The broker does not accept the name or a setting.
        """
        wanted = {spec.name: spec for spec in specs}
        if not wanted:
            return frozenset()
        new = [
            NewTopic(
                spec.name,
                num_partitions=spec.partitions,
                replication_factor=spec.replication_factor,
                config=dict(spec.config),
            )
            for spec in wanted.values()
        ]
        futures = self._call(
            lambda: self._admin.create_topics(new, request_timeout=self._timeout_s, operation_timeout=self._timeout_s),
            "create topics",
        )
        existing = self._each(futures, "create topic {}", ignoring=KafkaError.TOPIC_ALREADY_EXISTS)
        described = self._await_described(wanted)
        for name in existing:
            self._compare(wanted[name], described[name])
        created = frozenset(wanted) - existing
        if created:
            logger.info("created topics %s", ", ".join(sorted(created)))
        return created

    def delete_topics(self, names: Iterable[str]) -> frozenset[str]:
        """Delete topics and wait until brokers have forgotten them; returns the names of those that were there."""
        doomed = sorted(set(names))
        if not doomed:
            return frozenset()
        futures = self._call(
            lambda: self._admin.delete_topics(
                doomed, request_timeout=self._timeout_s, operation_timeout=self._timeout_s
            ),
            "delete topics",
        )
        missing = self._each(futures, "delete topic {}", ignoring=KafkaError.UNKNOWN_TOPIC_OR_PART)
        deleted = frozenset(doomed) - missing
        self._await_gone(doomed)
        if deleted:
            logger.info("deleted topics %s", ", ".join(sorted(deleted)))
        return deleted

    def topic_ids(self, names: Iterable[str]) -> dict[str, uuid.UUID]:
        """Ids of the topics that exist; a topic that was deleted and made anew has another id."""
        with self._cluster() as cluster:
            return {name: topic.topic_id for name, topic in self._describe_topics(cluster, names).items()}

    def describe(self, names: Iterable[str], *, with_operations: bool = False) -> dict[str, TopicDescription]:
        """Describe the topics that exist, with all their settings, defaults included."""
        with self._cluster() as cluster:
            return self._describe(cluster, names, with_operations=with_operations)

    def _describe(
        self, cluster: Cluster, names: Iterable[str], *, with_operations: bool = False
    ) -> dict[str, TopicDescription]:
        topics = self._describe_topics(cluster, names, with_operations=with_operations)
        if not topics:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        futures = self._call(
            lambda: self._admin.describe_configs(resources, request_timeout=self._timeout_s), "describe topics"
        )
        described = {}
        for resource, future in futures.items():
            try:
                entries = self._result(
                    future,
                    f"describe topic {resource.name}",
                    f"topic {resource.name}",
                    ignoring=KafkaError.UNKNOWN_TOPIC_OR_PART,
                )
            except _Ignored:
                continue  # deleted between the two questions
            config = {name: str(entry.value) for name, entry in entries.items() if entry.value is not None}
            described[resource.name] = replace(topics[resource.name], config=config)
        return described

    def set_topic_config(self, names: str | Iterable[str], config: Mapping[str, str]) -> None:
        """Set the given settings, leaving all others alone; returns when the controller has accepted them.

        Brokers apply them a little later.
        """
        topics = [names] if isinstance(names, str) else sorted(set(names))
        if not topics or not config:
            return
        resources = [
            ConfigResource(
                ResourceType.TOPIC,
                name,
                incremental_configs=[
                    ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
                    for key, value in config.items()
                ],
            )
            for name in topics
        ]
        futures = self._call(
            lambda: self._admin.incremental_alter_configs(resources, request_timeout=self._timeout_s),
            "configure topics",
        )
        for resource, future in futures.items():
            self._result(future, f"configure topic {resource.name}", f"topic {resource.name}")

    def end_offsets(
        self, topics: Iterable[Partition], isolation: Isolation = Isolation.READ_UNCOMMITTED
    ) -> dict[Partition, int]:
        """High watermark of each partition, or its last stable offset for ``READ_COMMITTED``.

        Raises:
            NotFoundError: A topic does not exist.
        """
        keys = {_address(partition): partition for partition in topics}
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # its only untyped method of those we use
        found = list_offsets(self._admin, keys, latest, isolation, "end", self._timeout_s)
        return {keys[place]: end for place, end in found.items()}

    def start_offsets(self, topics: Iterable[Partition]) -> dict[Partition, int]:
        """Offset of the first record of each partition that has not been deleted.

        Raises:
            NotFoundError: A topic does not exist.
        """
        keys = {_address(partition): partition for partition in topics}
        earliest = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
        found = list_offsets(self._admin, keys, earliest, Isolation.READ_UNCOMMITTED, "first offset", self._timeout_s)
        return {keys[place]: start for place, start in found.items()}

    def delete_records(self, before: Mapping[Partition, int]) -> dict[Partition, int]:
        """Delete the records below the given offsets; returns the new first offsets (not less than asked for).

        Raises:
            NotFoundError: A topic does not exist.
            InvalidRequestError: An offset beyond the high watermark.
        """
        keys = {_address(partition): partition for partition in before}
        if not keys:
            return {}
        request = [TopicPartition(topic, index, before[key]) for (topic, index), key in keys.items()]
        futures = self._call(
            lambda: self._admin.delete_records(
                request, request_timeout=self._timeout_s, operation_timeout=self._timeout_s
            ),
            "delete records",
        )
        first = {}
        for place, future in futures.items():
            deleted = self._result(future, f"delete records of topic {place.topic}", f"topic {place.topic}")
            first[keys[place.topic, place.partition]] = int(deleted.low_watermark)
        return first

    def seal(self, topics: Iterable[str], *, timeout_s: float = 60.0) -> dict[str, int]:
        """Close topics to every writer for good and return their end offsets; see :mod:`bridge.kafka.seal`.

        No record will ever be at or after its topic's end offset; markers of native transactions may, so that sealing
        again can give a later one. There is no way back. May be called again at any point.

        Raises:
            SealTimeoutError: Some topics could not be sealed in time, with what each waits for. Those are closed to
                new records already. Call again.
            TopicNotFound: A topic does not exist.
            InvalidRequestError: A topic has more than one partition; nothing was sealed.
        """
        names = list(dict.fromkeys(topics))
        if not names:
            return {}
        with self._cluster() as cluster:
            return Sealer(cluster, self.set_topic_config, timeout_s=timeout_s).seal(names)

    def _describe_topics(
        self, cluster: Cluster, names: Iterable[str], *, with_operations: bool = False
    ) -> dict[str, TopicDescription]:
        wanted = sorted(set(names))
        return view_topics(cluster, wanted, self._timeout_s, with_operations=with_operations) if wanted else {}

    def _cluster(self) -> Cluster:
        return Cluster(
            self._bootstrap_servers,
            security=self._security,
            client_id=self._client_id,
            connect_timeout_s=min(self._timeout_s, _CONNECT_TIMEOUT_S),
            request_timeout_s=self._timeout_s,
        )

    def _await_described(self, wanted: Mapping[str, TopicSpec]) -> dict[str, TopicDescription]:
        """The controller has the topics; wait until the brokers have heard of them."""
        deadline = time.monotonic() + self._timeout_s
        with self._cluster() as cluster:
            while True:
                described = self._describe(cluster, wanted)
                missing = sorted(set(wanted) - set(described))
                if not missing:
                    return described
                if time.monotonic() >= deadline:
                    raise KafkaUnavailable(
                        f"topics {', '.join(missing)} were created, but no broker knows them after "
                        f"{self._timeout_s:g} s"
                    )
                time.sleep(_POLL_S)

    def _await_gone(self, names: list[str]) -> None:
        """The controller has deleted the topics; wait until the brokers have heard of it."""
        deadline = time.monotonic() + self._timeout_s
        with self._cluster() as cluster:
            while left := self._describe_topics(cluster, names):
                if time.monotonic() >= deadline:
                    raise KafkaUnavailable(
                        f"topics {', '.join(sorted(left))} were deleted, but brokers still know them after "
                        f"{self._timeout_s:g} s"
                    )
                time.sleep(_POLL_S)

    @staticmethod
    def _compare(spec: TopicSpec, actual: TopicDescription) -> None:
        differences = {
            key: (value, actual.config.get(key, ""))
            for key, value in spec.config.items()
            if actual.config.get(key) != value and not (actual.sealed and key in SEALED)
        }
        if spec.partitions != actual.partitions:
            differences["partitions"] = (str(spec.partitions), str(actual.partitions))
        if differences:
            listed = ", ".join(f"{key} is {has}, not {want}" for key, (want, has) in sorted(differences.items()))
            raise TopicMismatchError(
                f"topic {spec.name} exists and is not as it should be: {listed}; it was left as it is",
                topic=spec.name,
                differences=differences,
            )

    def _call(self, ask: Callable[[], T], doing: str) -> T:
        """The library raises what it can tell without a broker at once."""
        try:
            return ask()
        except Exception as exc:
            raise translate(exc, doing) from exc

    def _each(self, futures: Mapping[str, Future[Any]], doing: str, *, ignoring: int) -> frozenset[str]:
        """Await all; returns the names whose error was the one to ignore, raises the first other one at the end."""
        ignored = set()
        failure: Exception | None = None
        for name, future in futures.items():
            try:
                self._result(future, doing.format(name), f"topic {name}", ignoring=ignoring)
            except _Ignored:
                ignored.add(name)
            except Exception as exc:
                failure = failure or exc
        if failure is not None:
            raise failure
        return frozenset(ignored)

    def _result(self, future: Future[T], doing: str, resource: str = "", *, ignoring: int | None = None) -> T:
        try:
            # The library enforces its own time-out; this one is for the case that it does not.
            return future.result(self._timeout_s * 2)
        except Exception as exc:
            error = kafka_error(exc)
            if error is not None and error.code() == ignoring:
                raise _Ignored from exc
            raise translate(exc, doing, resource) from exc


class _Ignored(Exception):
    """The one error that the caller expects."""


def _address(partition: Partition) -> tuple[str, int]:
    return (partition, 0) if isinstance(partition, str) else partition
