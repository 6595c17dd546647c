"""What the client's tests share: a rollbridge of their own on the shared servers, and a plain client's view of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from confluent_kafka import KafkaException, Message
from kazoo.client import KazooClient

import rollbridge
from integration_tests.backends.interface import AnyCluster
from integration_tests.coordinators import until
from integration_tests.kafka_tools import read_places
from rollbridge.base.attribution import HEADER_VALUE, RECORD_HEADER, unpack_record_header, unpack_run
from rollbridge.base.ids import TransactionId
from rollbridge.base.sn import DLSN
from rollbridge.client.admin import Adoption
from rollbridge.consumer.records import BatchFetcher
from rollbridge.errors import InvalidRequestError, RollbridgeError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.clients import get_headers
from rollbridge.kafka.metadata import Isolation
from rollbridge.metadata.session import ZooKeeperSession
from rollbridge.metadata.store import Metadata
from rollbridge.stream.names import TOPICS_SCOPE, StreamName, parse_segment_topic
from rollbridge.stream.positions import ReadPosition

__all__ = [
    "Site",
    "adopt",
    "consumer_of",
    "consumer_raises",
    "header_of",
    "headers_of",
    "open_values",
    "place_of",
    "read_and_commit",
    "read_committed",
    "until",
]

PATIENCE_S = 120.0
MARKERS_S = 20.0
"""Longest wait for the markers of native transactions that have ended."""


class Site:
    """A ZooKeeper root path of its own with a coordinator that can be stopped and started.

    ``environment`` are settings of the coordinator.
    """

    def __init__(self, cluster: AnyCluster, root: str, logs: Path, **environment: str) -> None:
        self.cluster = cluster
        self._environment = environment
        self.root = root
        self._logs = logs
        self._coordinators = ExitStack()
        self._started = 0

    def __enter__(self) -> Self:
        self.start_coordinator()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_coordinator()

    def environment(self) -> dict[str, str]:
        """For examples in this site; topics are the cluster's, so their scope is no other site's."""
        return {
            "ROLLBRIDGE_BOOTSTRAP_SERVERS": self.cluster.bootstrap_servers,
            "ROLLBRIDGE_ZOOKEEPER": self.cluster.zookeeper,
            "ROLLBRIDGE_ZOOKEEPER_ROOT": self.root,
            "ROLLBRIDGE_EXAMPLES_SCOPE": f"examples{self.root.replace('/', '-')}",
        }

    def start_coordinator(self) -> None:
        """Start a coordinator, in the background."""
        self._started += 1
        self._coordinators.enter_context(
            self.cluster.coordinator(self.root, f"coordinator-{self._started}", self._logs, self._environment)
        )

    def stop_coordinator(self) -> None:
        """Stop it, and return when it is gone."""
        self._coordinators.close()

    def lost_its_session(self) -> bool:
        """Whether a coordinator was too slow for its ZooKeeper session at some time, on a machine with much to do."""
        return "state=suspended" in self.said()

    def said(self) -> str:
        """All that coordinators have logged."""
        return "".join(log.read_text(errors="replace") for log in sorted(self._logs.glob("*.log")))

    def connect(
        self,
        name: str | None = None,
        options: rollbridge.ClientOptions | None = None,
        bootstrap_servers: str | None = None,
    ) -> rollbridge.Bridge:
        """A client."""
        return rollbridge.connect(
            bootstrap_servers or self.cluster.bootstrap_servers,
            zookeeper=self.cluster.zookeeper,
            zookeeper_root=self.root,
            client_name=name,
            options=options,
        )

    def committed(self, stream: str) -> list[Message]:
        """What a plain ``read_committed`` consumer finds in a stream's segments, in order of their epochs."""
        name = StreamName.parse(stream)
        with ZooKeeperSession(self.cluster.zookeeper, root=self.root) as session:
            history = Metadata(session).history(name)
        assert history is not None
        return read_committed(
            self.cluster.bootstrap_servers, [name.segment_topic(segment) for segment in history.segments()]
        )


def patient_client(cluster: AnyCluster, root: str, name: str | None = None) -> rollbridge.Bridge:
    """A connection whose admin requests wait for as long as a failover takes."""
    return rollbridge.connect(
        cluster.bootstrap_servers,
        zookeeper=cluster.zookeeper,
        zookeeper_root=root,
        client_name=name,
        options=rollbridge.ClientOptions(admin_timeout_s=60),
    )


def expire(cluster: AnyCluster, session: ZooKeeperSession) -> None:
    """End a session as ZooKeeper would: by another connection that takes it over and closes it.

    Its own client must not be faster to take it back.
    """
    client = KazooClient(cluster.zookeeper, client_id=session._client.client_id)
    client.start()
    client.stop()
    client.close()


def adopt(client: rollbridge.Bridge, topic: str, **options: Any) -> Adoption:
    """Adopt a topic, in the scope of topics of this site."""
    return client.admin.adopt_topic(topic, stream=stream_of(client, topic), **options)


def stream_of(client: rollbridge.Bridge, topic: str) -> str:
    """The stream that adopts a topic here: no other site on the same servers uses its scope."""
    return str(StreamName.of_topic(topic, client.settings.zookeeper_root.strip("/").replace("/", "-") or TOPICS_SCOPE))


def open_values(client: rollbridge.Bridge, topic: str) -> list[bytes]:
    """What the open transactions have written to an adopted topic."""
    with client.reader(stream_of(client, topic), start="latest", isolation="read_uncommitted", follow=False) as reader:
        return [record.value or b"" for record in reader if not record.committed]


def read_committed(
    bootstrap_servers: str, topics: Sequence[str], *, isolation: str = "read_committed", partitions: int = 1
) -> list[Message]:
    """The committed records of topics, partition by partition, or all records if those are asked for.

    The markers of a native transaction come a little later than its outcome, and not in all partitions at once: they
    are waited for.
    Each record of a transaction has a header of its own, whether it was written with it or stands in a run.
    """
    places = [(topic, number) for topic in topics for number in range(partitions)]
    if isolation == "read_committed":
        await_markers(bootstrap_servers, places)
    found = read_places(bootstrap_servers, places, isolation=isolation)
    for place in places:
        give_headers(bootstrap_servers, place, found[place])
    return [message for place in places for message in found[place]]


def await_markers(bootstrap_servers: str, places: Sequence[tuple[str, int]]) -> None:
    """Return when all that is there now is stable, or not soon: some tests want somebody's transaction to stay open."""
    deadline = time.monotonic() + MARKERS_S
    with KafkaClient(bootstrap_servers) as kafka:
        ends = kafka.offsets.end(places)
        while time.monotonic() < deadline:
            stable = kafka.offsets.end(places, Isolation.READ_COMMITTED)
            if all(stable[place] >= end for place, end in ends.items()):
                return


def truncate_all(client: rollbridge.Bridge, stream: str) -> ReadPosition:
    """Truncate before all whose writers have their answer; what can be read ends before a marker that is to come."""
    places = client.admin.places(stream)
    active = client.admin.history(stream).active.segment_ids
    await_markers(client.settings.bootstrap_servers, [places.of(segment) for segment in active])
    return client.admin.truncate(stream, "latest")


@contextmanager
def consumer_raises(*kinds: type[RollbridgeError], match: str | None = None) -> Iterator[None]:
    """Expect a KafkaException of ``rollbridge.Consumer`` whose cause is such an error."""
    with pytest.raises(KafkaException, match=match) as raised:
        yield
    assert isinstance(raised.value.__cause__, kinds)


def give_headers(bootstrap_servers: str, place: tuple[str, int], messages: Sequence[Message]) -> None:
    """Give each record of a run a header of its own; the messages are all that can be read of a partition.

    If the log begins in the middle of a run, its batch is looked at as a whole.
    """
    first = next((message.offset() or 0 for message in messages), 0)
    begin, run = first, b""
    if first and not own_headers(messages[0]):
        with closing(BatchFetcher(KafkaClient(bootstrap_servers).log)) as fetch:
            found = [(offset, value) for offset, value, _ in fetch(place, first).heads]
        begin, run = max(((offset, value) for offset, value in found if offset < first), default=(first, b""))
    transaction, sequences = parsed_run(run)
    for message in messages:
        offset = message.offset() or 0
        if own := own_headers(message):
            begin = offset
            transaction, sequences = parsed_run(own[0])
        if offset - begin < len(sequences):
            header = HEADER_VALUE.pack(transaction, sequences[offset - begin])
            others = [item for item in get_headers(message) or [] if item[0] != RECORD_HEADER]
            message.set_headers([*others, (RECORD_HEADER, header)])


def parsed_run(value: bytes) -> tuple[bytes, Sequence[int]]:
    """The transaction and the local sequences of a run; none of a header that is not ours."""
    try:
        run = unpack_run(value)
    except InvalidRequestError:
        return b"", ()
    return run.transaction, run.sequences()


def own_headers(message: Message) -> list[bytes]:
    """The values of a record's headers of our name."""
    return [value for name, value in get_headers(message) or [] if name == RECORD_HEADER and isinstance(value, bytes)]


def consumer_of(cluster: AnyCluster, root: str, group: str, stream: str) -> rollbridge.Consumer:
    """A member of a consumer group that begins at the earliest record and commits by itself."""
    consumer = rollbridge.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "zookeeper": cluster.zookeeper,
            "zookeeper.root": root,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([stream])
    return consumer


def read_and_commit(consumer: rollbridge.Consumer, last: bytes) -> list[bytes | None]:
    """The values up to ``last``, each of which is committed."""
    found: list[bytes | None] = []
    deadline = time.monotonic() + 2 * PATIENCE_S
    while last not in found:
        assert time.monotonic() < deadline, found
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            found.append(message.value())
            consumer.commit(message, asynchronous=False)
    return found


def place_of(message: Message) -> DLSN:
    """Where a record stands, by what Kafka and its header say."""
    topic, offset = message.topic(), message.offset()
    assert topic is not None
    assert offset is not None
    return DLSN.of(parse_segment_topic(topic)[1], offset, header_of(message)[1])


def headers_of(message: Message) -> list[tuple[str, str | bytes | None]]:
    """All headers of a record, in order."""
    headers = message.headers()
    assert isinstance(headers, list)
    return headers


def header_of(message: Message) -> tuple[TransactionId, int]:
    """Our header, which stands last."""
    name, raw = headers_of(message)[-1]
    assert name == RECORD_HEADER
    assert isinstance(raw, bytes)
    return unpack_record_header(raw)
