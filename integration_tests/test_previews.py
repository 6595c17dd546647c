"""Previews on real servers begin at the snapshots, and show the same whatever these hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import patient_client
from integration_tests.coordinators import coordinator
from integration_tests.kafka_tools import producer_config
from integration_tests.patience import eventually
from integration_tests.snapshot_tools import OFTEN, SINGLE, abort_many, found, garble
from rollbridge.buffer import snapshot_topic
from rollbridge.buffer.snapshot_topic import read_all
from rollbridge.buffer.snapshots import index_keys
from rollbridge.client.transaction import Transaction
from rollbridge.consumer.preview import PreviewTail
from rollbridge.consumer.reader import Reader
from rollbridge.kafka.client import KafkaClient
from rollbridge.stream.names import StreamName, snapshot_indexes_topic, snapshot_segments_topic

ENDED = 300


@pytest.fixture(autouse=True)
def _look_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hundred messages are worth looking for a record that spares them."""
    monkeypatch.setattr(snapshot_topic, "_LITTLE", 50)


@pytest.fixture
def stream(unique_name: Callable[[str], str]) -> str:
    """The name of a stream in a scope of its own."""
    return f"{unique_name('previews')}/orders"


def shown(b: rollbridge.Bridge, stream: str) -> list[bytes | None]:
    """The values that a reader previews, which ends when it has read everything."""
    with b.reader(stream, start="latest", isolation="read_uncommitted", follow=False) as reader:
        return [record.value for record in reader if not record.committed]


def skipped(b: rollbridge.Bridge, stream: str) -> int:
    """How many messages of the buffer a preview does not read but for the records that it shows."""
    tail = PreviewTail(KafkaClient.of(b.settings), b.admin.describe(stream).config)
    tail.close()
    return sum(tail._floors.values())


def take(reader: Reader, count: int) -> list[bytes | None]:
    """The values of the next records."""
    values: list[bytes | None] = []
    while len(values) < count:
        values.extend(record.value for record in reader.consume(count - len(values), 60))
    return values


def write_on(transaction: Transaction, stream: str, value: bytes) -> None:
    """Write a record, and wait until it is in the buffer."""
    transaction.write(stream, key=b"k", value=value)
    transaction.flush()


@pytest.mark.parametrize("options", [OFTEN, SINGLE], ids=["segmented", "single"])
def test_a_preview_begins_at_the_snapshots_and_shows_all_that_is_open_and_nothing_else(
    cluster: AnyCluster, root: str, stream: str, tmp_path: Path, options: dict[str, str]
) -> None:
    with patient_client(cluster, root) as b, coordinator(cluster, root, "leader", tmp_path, **options):
        b.admin.create_stream(stream)
        first, doomed, done = b.begin(stream), b.begin(stream), b.begin(stream)
        for transaction in (first, doomed, done):
            write_on(transaction, stream, b"early")
        abort_many(b, stream, ENDED)
        write_on(first, stream, b"in between")
        eventually(lambda: found(b, stream).ongoing is not None, "open transactions are written down")
        doomed.abort()
        done.commit()
        abort_many(b, stream, ENDED)
        last = b.begin(stream)
        write_on(last, stream, b"late")
        write_on(first, stream, b"at last")
        eventually(lambda: skipped(b, stream) > ENDED, "what a preview need not read is in a snapshot")
        everything = [b"early", b"in between", b"late", b"at last"]
        assert shown(b, stream) == everything
        with b.reader(stream, start="latest", isolation="read_uncommitted") as reader:
            followed: list[tuple[bytes | None, bool]] = []

            def take(count: int) -> None:
                while len(followed) < count:
                    followed.extend((item.value, item.committed) for item in reader.consume(100, 60))

            take(len(everything))
            fresh = b.begin(stream)
            write_on(fresh, stream, b"fresh")
            take(len(everything) + 1)
            last.abort()
            first.commit()
            take(len(everything) + 4)
        assert followed == [
            *((value, False) for value in everything),
            (b"fresh", False),
            *((value, True) for value in (b"early", b"in between", b"at last")),
        ]
        assert shown(b, stream) == [b"fresh"]
        fresh.abort()
        assert shown(b, stream) == []


@pytest.mark.parametrize("damaged", ["nothing", "indexes", "segments"])
def test_what_was_aborted_stays_hidden_when_it_is_sent_again_and_damaged_snapshots_cost_time_only(
    cluster: AnyCluster, root: str, stream: str, tmp_path: Path, damaged: str
) -> None:
    name = StreamName.parse(stream)
    partition = (name.buffer_topic(), 0)
    with patient_client(cluster, root) as b:
        with coordinator(cluster, root, "leader", tmp_path, **OFTEN):
            b.admin.create_stream(stream)
            old = b.begin(stream)
            write_on(old, stream, b"aborted")
            sent = list(read_all(KafkaClient(cluster.bootstrap_servers), *partition))
            old.abort()
            first = b.begin(stream)
            write_on(first, stream, b"early")
            abort_many(b, stream, ENDED)
            eventually(lambda: found(b, stream).ongoing is not None, "what is open is written down")
            abort_many(b, stream, ENDED)
            eventually(lambda: found(b, stream).aborted == 2 * ENDED + 1, "all that were aborted are in snapshots")
            write_on(first, stream, b"late")
        # Nobody leads, so nobody mends anything.
        assert skipped(b, stream) > 0
        admin = KafkaClient(cluster.bootstrap_servers).topics
        if damaged == "indexes":
            garble(cluster, snapshot_indexes_topic(name.scope), index_keys(partition))
            assert skipped(b, stream) == 0
        elif damaged == "segments":
            admin.delete_topics([snapshot_segments_topic(name.scope)])
        with b.reader(stream, start="latest", isolation="read_uncommitted") as following:
            assert take(following, 2) == [b"early", b"late"]
            producer = Producer(producer_config(cluster.bootstrap_servers))
            for message in sent:
                producer.produce(partition[0], key=message.key, value=message.value, partition=0)
            assert producer.flush(120) == 0
            write_on(first, stream, b"last")
            assert take(following, 1) == [b"last"]
        assert shown(b, stream) == [b"early", b"late", b"last"]
        first.abort_async()
