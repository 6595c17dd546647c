"""What the tests of the Kafka adapter share: batches to append, and a plain client's view of what is in a topic."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from confluent_kafka import Message
from kio.schema.errors import ErrorCode
from kio.schema.offset_fetch.v9 import OffsetFetchRequest, OffsetFetchResponse
from kio.schema.offset_fetch.v9.request import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from kio.schema.types import GroupId, TopicName
from kio.static.primitive import i32

from integration_tests.kafka_tools import read_places
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.base.deadlines import Deadline
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.metadata import CoordinatorType, Isolation
from rollbridge.kafka.offsets import P
from rollbridge.kafka.records import BatchBuilder, Compression

# Of today: brokers delete what is older than a week by its own timestamp.
TIMESTAMP = int(time.time() * 1000)


def batch_of(values: Iterable[bytes], compression: Compression = Compression.NONE) -> bytes:
    """A record batch of these values, without keys."""
    builder = BatchBuilder(1 << 24, compression)
    for value in values:
        assert builder.append(TIMESTAMP, None, value)
    return builder.build()


class StoredOffset(NamedTuple):
    """An offset as a group coordinator has it."""

    offset: int
    leader_epoch: int
    metadata: str | None


def stored_offsets(bootstrap_servers: str, group: str, topic: str, partitions: int) -> dict[int, StoredOffset]:
    """What a group has committed in a topic, by partition, once no transaction is undecided there.

    librdkafka cannot tell: what it has read, it takes for a C string.
    """
    wanted = OffsetFetchRequestTopics(name=TopicName(topic), partition_indexes=tuple(map(i32, range(partitions))))
    request = OffsetFetchRequest(
        groups=(OffsetFetchRequestGroup(group_id=GroupId(group), topics=(wanted,)),), require_stable=True
    )

    def ask() -> dict[int, StoredOffset] | None:
        with clusters.borrow(Deadline(PATIENCE_S)) as cluster:
            cluster.forget_coordinator(CoordinatorType.GROUP, group)
            node = cluster.coordinator(CoordinatorType.GROUP, group)
            [found] = cluster.connection(node).call(request, OffsetFetchResponse).groups
        places = [place for found_topic in found.topics for place in found_topic.partitions]
        if found.error_code is not ErrorCode.none or any(place.error_code is not ErrorCode.none for place in places):
            return None
        return {
            int(place.partition_index): StoredOffset(
                int(place.committed_offset), int(place.committed_leader_epoch), place.metadata
            )
            for place in places
            if place.committed_offset >= 0
        }

    answers: list[dict[int, StoredOffset]] = []

    def answered() -> bool:
        answers.extend(answer for answer in (ask(),) if answer is not None)
        return bool(answers)

    with KafkaClient(bootstrap_servers, client_id="stored-offsets") as clusters:
        eventually(answered, f"the group coordinator tells the offsets of {group}")
    return answers[-1]


def read_messages(
    bootstrap_servers: str,
    topic: str,
    *,
    partition: int = 0,
    isolation: Isolation = Isolation.READ_COMMITTED,
    settled: bool = True,
    first: int = 0,
) -> list[Message]:
    """All records of a partition from offset ``first`` to its end, read by librdkafka with checksums checked.

    ``settled`` waits first until no native transaction is open: a commit is answered before its markers are written.
    """
    if settled:
        await_settled(bootstrap_servers, [(topic, partition)])
    [found] = read_places(
        bootstrap_servers, [(topic, partition)], isolation=isolation.name.lower(), first=first
    ).values()
    return found


def read_values(
    bootstrap_servers: str,
    topic: str,
    *,
    partition: int = 0,
    isolation: Isolation = Isolation.READ_COMMITTED,
    settled: bool = True,
    first: int = 0,
) -> list[bytes | None]:
    """Values of :func:`read_messages`."""
    messages = read_messages(
        bootstrap_servers, topic, partition=partition, isolation=isolation, settled=settled, first=first
    )
    return [message.value() for message in messages]


def await_settled(bootstrap_servers: str, partitions: Iterable[P], *, timeout_s: float = PATIENCE_S) -> None:
    """Return once no native transaction is open on any of the partitions."""
    places = list(partitions)
    offsets = KafkaClient(bootstrap_servers).offsets

    def settled() -> bool:
        return offsets.end(places, Isolation.READ_COMMITTED) == offsets.end(places)

    eventually(settled, f"no open transaction on {places}", timeout_s)
