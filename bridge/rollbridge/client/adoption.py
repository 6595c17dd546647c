"""Which partitioner a topic's producers use, as a sample of its records tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rollbridge.calls import Backoff, Deadline
from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConflictError, NotFoundError
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.metadata import Cluster, Isolation
from rollbridge.kafka.offsets import EARLIEST, LATEST, list_offsets
from rollbridge.kafka.views import view_topics
from rollbridge.model.partitioners import Fit, Partitioner, fit
from rollbridge.model.records import StreamConfig

SAMPLED_PARTITIONS: Final = 16
"""Most partitions that are looked at, spread over the topic: each takes a request."""
SAMPLED_RECORDS: Final = 500
"""Of the newest offsets of each, so many are looked at."""
SAMPLED_BYTES: Final = 256 * 1024
NEWS_S: Final = 5.0
"""Time in which all brokers learn of a topic that has just been created."""
DEFAULT: Final = Partitioner.MURMUR2
"""Of a topic that has no keys yet: the rule of Java's producers, and so of Connect, Streams and ksqlDB."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """A topic that has been adopted.

    Attributes:
        config: Settings of its stream.
        fit: What a sample of its keys said; None if none was read.
    """

    config: StreamConfig
    fit: Fit | None


def sample_topic(settings: ConnectionSettings, topic: str, timeout_s: float) -> Fit:
    """Read the newest committed records of a topic, and compare where their keys are with each partitioner.

    Raises:
        NotFoundError: There is no such topic.
        NotAuthorizedError, KafkaUnavailableError.
    """
    deadline = Deadline(timeout_s)
    with Cluster(settings.bootstrap_servers, security=settings.kafka, client_id=settings.client_name) as cluster:
        patience, backoff = Deadline(min(timeout_s, NEWS_S)), Backoff()
        while (known := view_topics(cluster, [topic], deadline.left()).get(topic)) is None:
            if patience.passed():
                raise NotFoundError(f"topic {topic} does not exist; nothing was written")
            backoff.sleep(patience)
        step = max(known.partitions // SAMPLED_PARTITIONS, 1)
        places = [(topic, number) for number in range(0, known.partitions, step)]
        starts = list_offsets(cluster, places, EARLIEST, Isolation.READ_UNCOMMITTED, "read the first offset", deadline)
        ends = list_offsets(cluster, places, LATEST, Isolation.READ_COMMITTED, "read the end", deadline)
        reader = LogReader(cluster, retry_timeout_s=deadline.left())

        def keys() -> Iterator[tuple[bytes, int]]:
            for place in places:
                start, (_, number) = max(starts[place], ends[place] - SAMPLED_RECORDS), place
                if start < ends[place]:
                    found = reader.fetch(topic, start, partition=number, max_bytes=SAMPLED_BYTES)
                    yield from ((record.key, number) for record in found.records if record.key)

        return fit(keys(), known.partitions)


def choose(topic: str, found: Fit, wanted: Partitioner | None) -> Partitioner:
    """Return the partitioner to adopt a topic with.

    Raises:
        ConflictError: the sample does not agree with the wanted one, or with none or several of them.
    """
    if wanted is not None:
        if found.matches[wanted] < found.keys:
            raise ConflictError(
                f"{wanted} does not put the keys of topic {topic} where they are: {found}; nothing was written; with "
                "partitions added since, or producers of several kinds, no rule does: choose that of the producers "
                "that you have now, and give --unchecked (check=False)"
            )
        return wanted
    if not found.keys:
        return DEFAULT
    if found.best is None:
        raise ConflictError(
            f"which partitioner the producers of topic {topic} use is not clear: {found}; nothing was written; name it "
            "with --partitioner (partitioner=...), and --unchecked (check=False) if none explains all keys"
        )
    return found.best
