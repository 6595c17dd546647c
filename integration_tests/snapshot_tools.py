"""What leaves snapshots behind, and damages them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.kafka_tools import producer_config
from rollbridge.buffer.snapshot_topic import BufferSnapshot, SnapshotReader
from rollbridge.config import ConnectionSettings
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.names import StreamName

OFTEN = {
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_SEGMENT_SIZE": "1024",
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MAX_TRANSACTION_COUNT": "50",
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_MIN_TIME_IN_MILLIS": "200",
    "CONSTANT_TRANSACTION_BUFFER_SNAPSHOT_REPLAY_MAX": "100",
    # Snapshots are about what stands in the buffers, which these tests therefore keep.
    "CONSTANT_TRUNCATE_BUFFERS_MS": str(24 * 3600 * 1000),
}


SINGLE = {**OFTEN, "ROLLBRIDGE_COORDINATOR_TRANSACTION_BUFFER_SEGMENTED_SNAPSHOT_ENABLED": "false"}


@pytest.fixture
def stream(unique_name: Callable[[str], str]) -> str:
    """The name of a stream in a scope of its own."""
    return f"{unique_name('snapshots')}/orders"


def abort_many(b: rollbridge.Bridge, stream: str, count: int) -> None:
    """Abort transactions, and return when all of them have ended."""
    for number in range(count):
        txn = b.begin(stream)
        txn.write(stream, key=b"%d" % number, value=b"never seen")
        txn.abort()


def found(b: rollbridge.Bridge, stream: str) -> BufferSnapshot:
    """The snapshot of a stream's only buffer partition."""
    settings: ConnectionSettings = b.settings
    [only] = SnapshotReader(KafkaClient.of(settings), StreamName.parse(stream).scope).of(
        b.admin.describe(stream).config
    )
    return only


def garble(cluster: AnyCluster, topic: str, keys: tuple[bytes, ...]) -> None:
    """Write what is no snapshot under some keys, as nobody should."""
    lost: list[object] = []
    producer = Producer(producer_config(cluster.bootstrap_servers))
    for key in keys:
        producer.produce(
            topic, key=key, value=b"\1garbage", on_delivery=lambda error, _: lost.append(error) if error else None
        )
    assert producer.flush(120) == 0
    assert not lost
