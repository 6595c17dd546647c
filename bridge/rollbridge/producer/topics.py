"""Streams in the shape of confluent-kafka's metadata, for code that asks which topics there are."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollbridge.client.admin import Admin
from rollbridge.errors import StreamNotFound


@dataclass(frozen=True, slots=True)
class PartitionView:
    """An active segment."""

    id: int
    """Its partition number."""
    topic: str
    """The Kafka topic that holds it."""


@dataclass(frozen=True, slots=True)
class TopicView:
    """A stream."""

    topic: str
    partitions: dict[int, PartitionView]
    error: None = None


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All streams, or the one asked for."""

    topics: dict[str, TopicView] = field(default_factory=dict)


def describe_streams(admin: Admin, stream: str | None) -> ClusterView:
    """The streams with their active segments.

    Raises:
        StreamNotFound: there is none of this name.
    """
    names = [str(config.name) for config in admin.list_streams()] if stream is None else [stream]
    found = {}
    for name in names:
        try:
            description = admin.describe(name)
        except StreamNotFound:
            if stream is not None:
                raise
            continue  # deleted meanwhile
        config = description.config
        found[name] = TopicView(
            name,
            {
                description.partitions[item.id]: PartitionView(
                    description.partitions[item.id], config.name.segment_topic(item.id)
                )
                for item in description.active.segments
            },
        )
    return ClusterView(found)
