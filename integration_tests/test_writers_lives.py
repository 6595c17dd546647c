"""Whatever is acknowledged is in the log, through all lives of a stream, by writers whose connections stay open.

A broker knows a batch by its producer id, the name of its partition and its number, whatever becomes of the stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewPartitions
from kio.schema.errors import ErrorCode

import rollbridge
from integration_tests.clients import Site, adopt, read_committed
from integration_tests.faults import Api, FaultProxy, Point
from integration_tests.gateways import GatewayProcess
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import PATIENCE_S, eventually
from integration_tests.plain_faults import ONE, exposed, nobody_reached
from integration_tests.plain_tools import Load
from integration_tests.spark_tools import options_of
from rollbridge import Synchronizer
from rollbridge.errors import OutcomeUnknownError, StreamNotFoundError
from rollbridge.writer import PlainFuture, StreamWriter, WriterOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["exposed"]

LIVES: Final = 4
PARTITIONS: Final = 2
"""Of a topic in its first life; each next one has one more."""
BURSTS: Final = (1, 3, 40)
"""Records that are written, and acknowledged, one burst after the other in each life."""
Row = tuple[bytes, bytes]


class Kind(ABC):
    """A way to write, through one connection for all lives."""

    def __init__(self, client: rollbridge.Bridge, request: pytest.FixtureRequest) -> None:
        self.client = client
        self.request = request

    @abstractmethod
    def live(self, stream: str) -> Callable[[list[Row]], None]:
        """Return what writes to this life of a stream, or of a topic's stream, and returns once all is acknowledged."""


class Plain(Kind):
    """Plain writes, in batches of their own."""

    options: WriterOptions | None = ONE

    def live(self, stream: str) -> Callable[[list[Row]], None]:
        writer = self.client.writer(stream, options=self.options)

        def write(rows: list[Row]) -> None:
            for future in [writer.write(key, value) for key, value in rows]:
                future.result(60)

        return write


class PlainShared(Plain):
    """Plain writes as most programs make them, with the options of the connection, and several to a batch."""

    options = None


class Transactions(Kind):
    """Frames in buffers, which the leader appends."""

    def live(self, stream: str) -> Callable[[list[Row]], None]:
        def write(rows: list[Row]) -> None:
            with self.client.transaction(stream) as transaction:
                for key, value in rows:
                    transaction.write(stream, key, value)

        return write


class Conditional(Kind):
    """Compare-and-set."""

    def live(self, stream: str) -> Callable[[list[Row]], None]:
        writer = self.client.cas_writer(stream)

        def write(rows: list[Row]) -> None:
            for key, value in rows:
                writer.write(key, value, expected=writer.tail(key))

        return write


def add(state: bytes, update: bytes) -> bytes:
    return state + update


class Shared(Kind):
    """Updates of a state that processes share; it names places, which are of one life, so each life has its own."""

    lives = 0

    def live(self, stream: str) -> Callable[[list[Row]], None]:
        self.lives += 1
        key = b"state-%d" % self.lives
        shared: Synchronizer[bytes, bytes] = self.client.synchronizer(stream, key, b"", add)

        def write(rows: list[Row]) -> None:
            shared.update(lambda _: [value for _, value in rows])

        return write


class SparkSink(Kind):
    """Batches of Spark's format, whose Python workers stay."""

    def live(self, stream: str) -> Callable[[list[Row]], None]:
        pytest.importorskip("pyspark")
        spark: SparkSession = self.request.getfixturevalue("spark")
        options = options_of(self.request.getfixturevalue("site"), stream)

        def write(rows: list[Row]) -> None:
            frame = spark.createDataFrame(rows, "key binary, value binary").coalesce(1)
            frame.write.format("rollbridge").options(**options).mode("append").save()

        return write


class Foreign(Kind):
    """A producer of somebody else's that stays connected."""

    def __init__(self, client: rollbridge.Bridge, request: pytest.FixtureRequest) -> None:
        super().__init__(client, request)
        self.refused: list[KafkaError] = []
        self.producer = self.connect()

    @abstractmethod
    def connect(self) -> Producer:
        """Return the producer."""

    def send(self, topic: str, rows: Iterable[Row]) -> None:
        for key, value in rows:
            self.producer.produce(topic, value, key, on_delivery=self._told)
        assert self.producer.flush(60) == 0
        assert not self.refused

    @property
    def gateway(self) -> str:
        """Address of the module's gateway."""
        process: GatewayProcess = self.request.getfixturevalue("gateway")
        return process.address

    def live(self, stream: str) -> Callable[[list[Row]], None]:
        return lambda rows: self.send(stream.replace("/", "."), rows)

    def _told(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self.refused.append(error)


FRESH: Final = {"partitioner": "murmur2_random", "topic.metadata.refresh.interval.ms": 500, "linger.ms": 0}


class Native(Foreign):
    """An idempotent producer at the brokers."""

    def connect(self) -> Producer:
        return Producer(
            {"bootstrap.servers": self.client.settings.bootstrap_servers, "enable.idempotence": True, **FRESH}
        )


class ThroughGateway(Foreign):
    """An idempotent producer at a gateway."""

    def connect(self) -> Producer:
        return Producer({"bootstrap.servers": self.gateway, "enable.idempotence": True, **FRESH})


class RollingThroughGateway(Foreign):
    """A transactional producer at a gateway, whose batches are passed on an adopted topic and routed elsewhere."""

    def connect(self) -> Producer:
        producer = Producer({"bootstrap.servers": self.gateway, "transactional.id": f"lives-{id(self):x}", **FRESH})
        producer.init_transactions(60)
        return producer

    def send(self, topic: str, rows: Iterable[Row]) -> None:
        self.producer.begin_transaction()
        super().send(topic, rows)
        self.producer.commit_transaction(60)


OWN: Final = (Plain, PlainShared, Transactions, Conditional, Shared, SparkSink, RollingThroughGateway)
NATIVE: Final = (Native, ThroughGateway)


def bursts(life: int) -> Iterator[list[Row]]:
    """Yield what is written in one life, under keys of all partitions."""
    for burst, size in enumerate(BURSTS):
        yield [(b"key-%d" % number, b"%d-%d-%d" % (life, burst, number)) for number in range(size)]


@pytest.mark.parametrize("kind", [*OWN, *NATIVE], ids=lambda item: item.__name__)
def test_an_adopted_topic_has_what_was_acknowledged_in_all_lives_of_its_stream(
    site: Site,
    client: rollbridge.Bridge,
    unique_name: Callable[[str], str],
    request: pytest.FixtureRequest,
    kind: type[Kind],
) -> None:
    topic, servers = unique_name("shop.orders"), site.cluster.bootstrap_servers
    kafka, writes = AdminClient({"bootstrap.servers": servers}), kind(client, request)
    create_topic(servers, topic, PARTITIONS)
    acknowledged: Counter[bytes] = Counter()
    for life in range(LIVES):
        adopt(client, topic, partitioner="murmur2", check=False)
        write = writes.live(topic)
        for rows in bursts(life):
            write(rows)
            acknowledged.update(value for _, value in rows)
        client.admin.release_topic(topic)
        kafka.create_partitions([NewPartitions(topic, PARTITIONS + life + 1)])[topic].result(60)
    assert found_in(servers, topic, PARTITIONS + LIVES) == acknowledged


@pytest.mark.parametrize("kind", OWN, ids=lambda item: item.__name__)
def test_a_stream_has_what_was_acknowledged_in_each_of_its_lives(
    site: Site, client: rollbridge.Bridge, scope: str, request: pytest.FixtureRequest, kind: type[Kind]
) -> None:
    stream, writes = f"{scope}/orders", kind(client, request)
    for life in range(LIVES):
        client.admin.create_stream(stream, segments=2)
        write = writes.live(stream)
        acknowledged: Counter[bytes] = Counter()
        for rows in bursts(life):
            write(rows)
            acknowledged.update(value for _, value in rows)
        found = Counter(message.value() or b"" for message in site.committed(stream))
        assert wanted(found) == acknowledged
        client.admin.delete_stream(stream)


def found_in(servers: str, topic: str, partitions: int) -> Counter[bytes]:
    """Return how often each value is in a topic."""
    return wanted(
        Counter(message.value() or b"" for message in read_committed(servers, [topic], partitions=partitions))
    )


def wanted(found: Counter[bytes]) -> Counter[bytes]:
    """Return the values that writers have written: no probes of leaders, and no state that others are made of."""
    return Counter({value: count for value, count in found.items() if value})


# A release while a writer is at work


@pytest.fixture
def topic(site: Site, unique_name: Callable[[str], str]) -> str:
    """A topic of one partition."""
    name = unique_name("shop.orders")
    create_topic(site.cluster.bootstrap_servers, name)
    return name


def log(site: Site, topic: str) -> list[bytes | None]:
    return [item.value() for item in read_committed(site.cluster.bootstrap_servers, [topic])]


def begin(client: rollbridge.Bridge, exposed: rollbridge.Bridge, topic: str) -> StreamWriter:
    """Adopt a topic, and return a writer that has written to it."""
    adopt(client, topic, partitioner="murmur2")
    writer = exposed.writer(topic, options=ONE)
    writer.write(b"k", b"first").result(PATIENCE_S)
    return writer


def release(client: rollbridge.Bridge, topic: str, writer: StreamWriter) -> None:
    """Release a topic, and return when its writer has noticed."""
    client.admin.release_topic(topic)

    def is_refused() -> bool:
        try:
            writer.write_all([])
        except StreamNotFoundError as refusal:
            return "has released topic" in str(refusal)
        return False

    eventually(is_refused, "the writer has noticed")


def test_an_answer_that_comes_after_the_release_counts_and_the_next_life_waits_for_it(
    site: Site, client: rollbridge.Bridge, exposed: rollbridge.Bridge, proxy: FaultProxy, topic: str
) -> None:
    writer = begin(client, exposed, topic)
    proxy.strike(Api.PRODUCE, Point.LATE, error=ErrorCode.none)
    under_way = [writer.write(b"k", b"under way %d" % number) for number in range(3)]
    proxy.await_strike()
    release(client, topic, writer)
    adopt(client, topic, partitioner="murmur2")
    later = exposed.writer(topic, options=ONE).write(b"k", b"next life")
    assert not any(future.done() for future in (*under_way, later))
    for _ in range(10):
        proxy.let_answer()
    assert [future.exception(PATIENCE_S) for future in (*under_way, later)] == [None] * 4
    assert [future.result(0).dlsn.offset for future in (*under_way, later)] == [1, 2, 3, 4]  # type: ignore[union-attr]
    assert log(site, topic) == [b"first", b"under way 0", b"under way 1", b"under way 2", b"next life"]


@pytest.mark.parametrize("point", [Point.BEFORE_REQUEST, Point.BEFORE_ANSWER, Point.HELD])
def test_what_may_be_in_a_released_topic_is_unknown_and_what_was_not_sent_is_not_there(
    site: Site, client: rollbridge.Bridge, exposed: rollbridge.Bridge, proxy: FaultProxy, topic: str, point: Point
) -> None:
    writer = begin(client, exposed, topic)
    proxy.strike(Api.PRODUCE, point)
    with nobody_reached():
        doubtful = writer.write(b"k", b"doubtful")
        proxy.await_strike()
        behind = writer.write(b"k", b"behind it")
        release(client, topic, writer)
        assert isinstance(doubtful.exception(PATIENCE_S), OutcomeUnknownError)
        assert "was not written" in str(behind.exception(PATIENCE_S))
    adopt(client, topic, partitioner="murmur2")
    later = exposed.writer(topic, options=ONE)
    place = later.write(b"k", b"next life").result(PATIENCE_S).dlsn
    if point is Point.HELD:
        proxy.release()
    later.write(b"k", b"last").result(PATIENCE_S)
    found = log(site, topic)
    assert place is not None
    assert found[place.offset] == b"next life"
    written = [b"doubtful"] if point is Point.BEFORE_ANSWER else []
    assert found == [b"first", *written, b"next life", b"last"]


def test_releases_while_writers_are_at_work_tell_each_record_what_is_true(
    site: Site, client: rollbridge.Bridge, unique_name: Callable[[str], str]
) -> None:
    topic, servers = unique_name("shop.orders"), site.cluster.bootstrap_servers
    create_topic(servers, topic, PARTITIONS)
    futures: dict[bytes, PlainFuture] = {}
    for life in range(LIVES):
        adopt(client, topic, partitioner="murmur2")
        writer = client.writer(topic, options=ONE)

        def write(key: bytes, value: bytes, life: int = life, writer: StreamWriter = writer) -> PlainFuture:
            value = b"%d:%s" % (life, value)
            futures[value] = future = writer.write(key, value)
            return future

        with Load(write, 2, StreamNotFoundError, OutcomeUnknownError) as load:
            load.grow(300)
            client.admin.release_topic(topic)
    found = found_in(servers, topic, PARTITIONS)
    told = {value: future.exception(PATIENCE_S) for value, future in futures.items()}
    assert not [value for value, count in found.items() if count > 1]
    assert not [value for value, fault in told.items() if fault is None and value not in found]
    assert not [value for value, fault in told.items() if isinstance(fault, StreamNotFoundError) and value in found]
    assert {type(fault) for fault in told.values()} <= {type(None), StreamNotFoundError, OutcomeUnknownError}
