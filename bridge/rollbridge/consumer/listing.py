"""Streams and topics in the shape of confluent-kafka's ``ClusterMetadata``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rollbridge.errors import StreamNotFoundError
from rollbridge.model.epochs import EpochHistory
from rollbridge.model.records import StreamConfig


@dataclass(frozen=True, slots=True)
class PartitionView:
    """Active segment."""

    id: int
    """Partition number of the segment."""
    topic: str
    """Kafka topic that holds the segment."""
    error: None = None


@dataclass(frozen=True, slots=True)
class TopicView:
    """Stream with its active segments."""

    topic: str
    partitions: dict[int, PartitionView]
    error: None = None

    @classmethod
    def of(cls, config: StreamConfig, history: EpochHistory) -> TopicView:
        """Return the view of a stream."""
        numbers = history.graph.partitions
        segments = [(numbers[item.id], config.place(item.id)[0]) for item in history.active.segments]
        return cls(str(config.name), {number: PartitionView(number, topic) for number, topic in segments})


def list_all(
    client: Any,
    topic: str | None,
    timeout: float,
    streams: Callable[[], Iterable[StreamConfig]],
    history: Callable[[str], EpochHistory],
) -> Any:
    """Return Kafka's metadata, of all topics or of one, with the streams under their names beside the topics.

    Args:
        client: confluent-kafka's client that asks.
        topic: The only topic, or stream, that is wanted; None for all.
        timeout: Of the brokers, in s; negative for none.
        streams: Reads the configurations of all streams.
        history: Reads the epochs of one; raises StreamNotFoundError.

    Raises:
        StreamNotFoundError: No stream has this name.
        KafkaException: From confluent-kafka's client.
    """
    if topic is not None and "/" not in topic:
        return client.list_topics(topic, timeout=timeout)
    views: dict[str, TopicView] = {}
    for config in streams():
        name = str(config.name)
        if topic in (None, name):
            try:
                views[name] = TopicView.of(config, history(name))
            except StreamNotFoundError:
                continue  # deleted meanwhile
    if topic is not None and topic not in views:
        raise StreamNotFoundError(f"stream {topic} does not exist")
    metadata = client.list_topics(timeout=timeout)
    metadata.topics = views if topic is not None else {**metadata.topics, **views}
    return metadata
