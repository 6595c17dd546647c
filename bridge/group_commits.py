"""The committed offsets of a consumer group, as its coordinator has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from bridge.kafka.clients import admin_config, library_logger
from bridge.kafka.translate import kafka_error, translate

_TIMEOUT_S: Final = 30.0


class GroupCommits:
    """Reads what one group has committed; each answer is a list of partitions with offset and metadata."""

    def __init__(
        self, bootstrap_servers: str, group_id: str, *, security: Mapping[str, str] | None, client_id: str
    ) -> None:
        self._group_id = group_id
        try:
            self._admin = AdminClient(
                admin_config(bootstrap_servers, security=security, client_id=client_id), logger=library_logger
            )
        except Exception as exc:
            raise translate(exc, f"connect to {bootstrap_servers}") from exc

    def read(self, topics: Iterable[str] | None = None, *, timeout_s: float = _TIMEOUT_S) -> list[TopicPartition]:
        """Commits in partition 0 of these topics, or of all.

        Offsets in a native transaction that is not decided yet are waited for: they may become commits.

        Raises:
            KafkaUnavailable: no answer, or not decided in time; ask again.
            NotAuthorizedError: the group may not be described.
        """
        wanted = None if topics is None else [TopicPartition(topic, 0) for topic in topics]
        if wanted == []:
            return []
        doing = f"read the commits of group {self._group_id}"
        try:
            asked = ConsumerGroupTopicPartitions(self._group_id, wanted)
            [future] = self._admin.list_consumer_group_offsets(
                [asked], require_stable=True, request_timeout=timeout_s
            ).values()
            answer: Any = future.result(timeout_s * 2)
        except Exception as exc:
            error = kafka_error(exc) if isinstance(exc, KafkaException) else None
            if error is not None and error.code() == KafkaError.GROUP_ID_NOT_FOUND:
                return []
            raise translate(exc, doing, f"group {self._group_id}") from exc
        found: list[TopicPartition] = answer.topic_partitions or []
        for place in found:
            if place.error is not None:
                raise translate(place.error, f"{doing} in topic {place.topic}", f"topic {place.topic}")
        return [place for place in found if place.offset >= 0]
