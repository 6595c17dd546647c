"""Late records as Kafka has them: read behind sealed ends, copied, and found again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rollbridge.kafka.batches import BatchBuilder
from rollbridge.kafka.fetch import LogReader
from rollbridge.kafka.foreign_names import batch_of_one, is_plain
from rollbridge.kafka.metadata import Cluster
from rollbridge.model.late import LATE_HEADER, LateRecord
from rollbridge_coordinator.config import CoordinatorSettings
from rollbridge_coordinator.shell.control_batch import BATCH_BYTES_MAX
from rollbridge_coordinator.state.faults import LEADERLESS_S


class LateRecords:
    """Reads them; used by one thread.

    Raises:
        TopicNotFound, NotAuthorizedError, KafkaUnavailable, CorruptDataError: from any method.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        cluster = Cluster(settings.bootstrap_servers, security=settings.security)
        self._reader = LogReader(cluster, retry_timeout_s=LEADERLESS_S)

    def close(self) -> None:
        """Drop the connections."""
        self._reader.close()

    def read(self, topic: str, start: int, end: int, records_max: int) -> tuple[list[LateRecord], int]:
        """See :class:`rollbridge_coordinator.state.effects.ReadLate`."""
        found: list[LateRecord] = []
        place = start
        while place < end:
            part = self._reader.fetch(topic, place)
            for record in part.records:
                if record.offset >= end:
                    break
                found.append(
                    LateRecord(record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
                )
                if len(found) == records_max:
                    return found, record.offset + 1
            if part.end <= place:
                break
            place = part.end
        return found, min(place, end)

    def find(self, source: str, offset: int, targets: Mapping[str, int]) -> bool | None:
        """See :class:`rollbridge_coordinator.state.effects.FindLate`.

        What was deleted from a target since counts as found: it can have been deleted only after it was there.
        """
        wanted = LATE_HEADER, origin(source, offset)
        for topic, start in targets.items():
            place, end = start, self._reader.end(topic)
            while place < end:
                part = self._reader.fetch(topic, place)
                if part.start > place or any(wanted in record.headers for record in part.records):
                    return True
                if part.end <= place:
                    return None
                place = part.end
        return False


def origin(topic: str, offset: int) -> bytes:
    """The value of a copy's header: where it comes from."""
    return f"{topic}@{offset}".encode()


def late_batches(source: str, items: Sequence[tuple[str, LateRecord]]) -> Iterator[tuple[str, bytes]]:
    """Batches with the copies, each with its topic; records of one topic keep their order."""
    builders: dict[str, BatchBuilder] = {}
    for topic, record in items:
        builder = builders.setdefault(topic, BatchBuilder(BATCH_BYTES_MAX))
        headers = [*record.headers, (LATE_HEADER, origin(source, record.offset))]
        if not is_plain(headers):
            if builder.count:
                yield topic, builder.build()
            yield topic, batch_of_one(record.timestamp_ms, record.key, record.value, headers)
            continue
        if not builder.append(record.timestamp_ms, record.key, record.value, headers):
            yield topic, builder.build()
            builder.append(record.timestamp_ms, record.key, record.value, headers)
    for topic, builder in builders.items():
        if builder.count:
            yield topic, builder.build()
