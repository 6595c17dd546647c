"""Acknowledged records around the ends of sealed segments: a disk that stands still, and what comes in behind."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message, Producer

import rollbridge
from integration_tests.adapter_tools import read_values
from integration_tests.backends.choice import demand
from integration_tests.backends.interface import Ability, AnyCluster
from integration_tests.backends.local import LocalCluster
from integration_tests.clients import Site, patient_client
from integration_tests.coordinators import Relay, until
from integration_tests.kafka_tools import producer_config
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.doctor.checks import find
from rollbridge.doctor.facts import gather
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.seal import SEALED
from rollbridge.kafka.topics import TopicSpec
from rollbridge.metadata import paths
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.stream.late import LATE_HEADER, LateNotes
from rollbridge.stream.names import StreamName

FROZEN_S = 0.5
ROUNDS = 4


@pytest.fixture
def stalling() -> Iterator[LocalCluster]:
    """Servers whose broker has its logs on a disk that can be made to stand still."""
    with LocalCluster(stalling=True) as own:
        demand(own, [Ability.DISK_STALL])
        yield own


_NUMBERS = count()


class Writer:
    """Writes without pause, as any Kafka user would, and notes what was acknowledged, until it is refused."""

    def __init__(self, servers: str, topic: str, codec: str = "none") -> None:
        self._producer = Producer(
            {
                **producer_config(servers),
                "delivery.report.only.error": False,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 0,
                "compression.type": codec,
            }
        )
        self._topic = topic
        self._name = f"{topic}/{next(_NUMBERS)}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.acknowledged: list[tuple[int, bytes]] = []
        self.refused = threading.Event()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set() and not self.refused.is_set():
            if len(self._producer) < 50:
                number += 1
                value = f"{self._name}/{number}".encode()
                self._producer.produce(self._topic, value.ljust(200), key=b"%d" % (number % 7), on_delivery=self._noted)
            self._producer.poll(0.0005)
        self._producer.flush(60)

    def _noted(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.acknowledged.append((message.offset() or 0, (message.value() or b"").strip()))
        elif error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            self.refused.set()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Write while this is entered."""
        self._thread.start()
        try:
            until(lambda: len(self.acknowledged) > 100)
            yield
            until(self.refused.is_set)
        finally:
            self._stop.set()
            self._thread.join(120)


def test_nothing_is_acknowledged_behind_the_end_of_a_topic_that_is_sealed_while_the_disk_stands_still(
    stalling: LocalCluster,
) -> None:
    """Appends that were past all checks hold the log's lock meanwhile, or wait for it."""
    servers = stalling.bootstrap_servers
    admin = KafkaClient(servers).topics
    warm = "warm"
    admin.create_topics([TopicSpec(name=warm)])
    admin.seal([warm])  # the transaction coordinator has made its topic
    for number in range(ROUNDS):
        topic = f"frozen-{number}"
        admin.create_topics([TopicSpec(name=topic)])
        writers = [Writer(servers, topic) for _ in range(3)]
        with ExitStack() as at_work:
            for writer in writers:
                at_work.enter_context(writer.at_work())
            with ThreadPoolExecutor(1) as pool:
                with stalling.frozen_disk():
                    sealing = pool.submit(admin.seal, [topic])
                    time.sleep(FROZEN_S)  # the length of the fault
                end = sealing.result(120)[topic]
        late = [offset for writer in writers for offset, _ in writer.acknowledged if offset >= end]
        assert late == [], f"{topic} is sealed at {end}"
        there = read_values(servers, topic)
        written = Counter((value or b"").strip() for value in there)
        acknowledged = [value for writer in writers for _, value in writer.acknowledged]
        assert [value for value in acknowledged if written[value] != 1] == []


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_what_is_acknowledged_while_a_stream_is_scaled_on_a_disk_that_stands_still_is_read_once(
    stalling: LocalCluster, tmp_path: Path, codec: str
) -> None:
    """A plain idempotent producer with acks=all, a disk that stands still for half a second, and a scale."""
    name = "frozen/orders"
    options = rollbridge.ClientOptions(admin_timeout_s=PATIENCE_S)
    with Site(stalling, "/frozen", tmp_path) as site, site.connect("app", options) as b:
        b.admin.create_stream(name)
        b.admin.scale(name, seal=[0], ranges=[(0.0, 1.0)])  # the transaction coordinator has made its topic
        acknowledged: list[bytes] = []
        for _ in range(ROUNDS):
            [segment] = b.admin.history(name).active.segments
            topic = StreamName.parse(name).segment_topic(segment.id)
            writers = [Writer(stalling.bootstrap_servers, topic, codec) for _ in range(3)]
            with ExitStack() as at_work:
                for writer in writers:
                    at_work.enter_context(writer.at_work())
                with ThreadPoolExecutor(1) as pool, stalling.frozen_disk():
                    scaling = pool.submit(b.admin.scale, name, seal=[segment.id.number], ranges=[(0.0, 1.0)])
                    time.sleep(FROZEN_S)  # the length of the fault
                scaling.result(PATIENCE_S)
            acknowledged += [value for writer in writers for _, value in writer.acknowledged]
            end = b.admin.history(name).sealed_end(segment.id)
            assert end is not None
            behind = [offset for writer in writers for offset, _ in writer.acknowledged if offset >= end]
            assert codec == "gzip" or behind == [], f"{topic} is sealed at {end}"
        counts: Counter[bytes] = Counter()

        def all_are_there() -> bool:
            counts.clear()
            with b.reader(name, follow=False) as reader:
                counts.update((record.value or b"").strip() for record in reader)
            return all(counts[value] for value in acknowledged)

        eventually(all_are_there, "everything that was acknowledged can be read")
        assert [value for value in acknowledged if counts[value] != 1] == []


POINTS = [
    "look_behind/AppendLate:after",  # what was begun is on record, and nothing was committed
    "look_behind/CommitRound:after",  # the copies are there, and nobody has noted that
]


def test_a_record_behind_a_sealed_end_is_read_once_whatever_crashes(
    cluster: AnyCluster, unique_name: Callable[[str], str], tmp_path: Path
) -> None:
    scope = unique_name("late")
    name = str(StreamName(scope, "orders"))
    with (
        Relay(cluster, f"/{scope}", tmp_path, POINTS) as relay,
        patient_client(cluster, f"/{scope}") as b,
    ):
        b.admin.create_stream(name)
        [segment] = b.admin.history(name).active.segments
        topic = StreamName(scope, "orders").segment_topic(segment.id)
        append(cluster.bootstrap_servers, topic, [b"1", b"2"])
        b.admin.scale(name, seal=[segment.id.number], ranges=[(0.0, 0.5), (0.5, 1.0)])
        end = b.admin.history(name).sealed_end(segment.id)
        assert end is not None
        # No append is held up in a broker on request, so what such an append leaves is made in another way.
        topics = KafkaClient(cluster.bootstrap_servers).topics
        topics.set_topic_config(topic, {"max.message.bytes": "1000000"})
        until(lambda: append(cluster.bootstrap_servers, topic, [b"late 1", b"late 2", b"late 3"]))
        topics.set_topic_config(topic, SEALED)
        until(lambda: relay.deaths == len(POINTS))
        with b.transaction(name) as txn:
            txn.write(name, key=b"key", value=b"after")

        expected = [b"1", b"2", b"after", b"late 1", b"late 2", b"late 3"]
        until(lambda: sorted(record.value or b"" for record in b.reader(name, follow=False)) == expected)
        with b.reader(name, follow=False) as reader:
            records = list(reader)
        copies = [record for record in records if (record.value or b"").startswith(b"late")]
        headers = [dict(record.headers or ())[LATE_HEADER] for record in copies]
        assert [record.value for record in copies] == [b"late 1", b"late 2", b"late 3"]
        assert headers == [f"{topic}@{end + place}".encode() for place in range(3)]
        with ZooKeeperSession(cluster.zookeeper, root=f"/{scope}") as session:
            node = session.get(paths.late(StreamName(scope, "orders")))
        assert node is not None
        notes = LateNotes.from_json(node.value)
        assert notes.forwarding is None
        assert notes.segments[segment.id].forwarded == 3
        findings = [item for item in find(gather(b.settings, b._kafka)) if item.check == "late-records"]
        assert [f"3 records came in behind the end of segment {segment.id} of {name}" in item.what for item in findings]


def append(servers: str, topic: str, values: list[bytes]) -> bool:
    """Write to a topic as any Kafka user would; whether it took all of it."""
    outcomes: list[KafkaError | None] = []
    producer = Producer({**producer_config(servers), "delivery.report.only.error": False})
    for value in values:
        producer.produce(topic, value, key=b"key", on_delivery=lambda error, _: outcomes.append(error))
    producer.flush(60)
    return outcomes == [None] * len(values)
