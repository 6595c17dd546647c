"""What should not be in a buffer: bytes of strangers are skipped, and told of once."""

from __future__ import annotations

import random
from pathlib import Path

from confluent_kafka import KafkaError, Producer

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import FrameHeader, FrameKind
from rollbridge.stream.names import StreamName


def test_foreign_bytes_are_skipped_and_logged_once(cluster: AnyCluster, scope: str, tmp_path: Path) -> None:
    stream = StreamName(scope, "s")
    name, rng = str(stream), random.Random(1)
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})

    def inject(key: bytes | None, value: bytes | None) -> None:
        """Write a message into the buffer and wait until it is there."""
        failures: list[KafkaError] = []
        producer.produce(
            stream.buffer_topic(),
            value,
            key=key,
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
        assert producer.flush(120) == 0
        assert not failures

    with Site(cluster, f"/{scope}", tmp_path) as site, site.connect() as client:
        client.admin.create_stream(name)
        txn = client.begin(name)
        txn.write(name, key=b"k", value=b"first")
        txn.flush()
        for size in (0, 1, 43, 44, 45, 1000):
            inject(rng.randbytes(size), rng.randbytes(size))
        inject(None, b"value without a key")
        inject(txn.id.bytes, None)
        stranger = TransactionId.of(0, 1 << 90).bytes
        for kind in FrameKind:
            inject(FrameHeader(kind, stranger).pack(), rng.randbytes(40))
        txn.write(name, key=b"k", value=b"second")
        assert txn.commit().records == 2
        assert [message.value() for message in site.committed(name)] == [b"first", b"second"]
    assert (tmp_path / "coordinator-1.log").read_text().count("frames.foreign ") == 1
