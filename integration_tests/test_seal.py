"""Sealing against a real broker: whoever writes, and however, nothing comes after the end that was returned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from integration_tests.adapter_tools import await_settled, batch_of, read_messages, read_values
from integration_tests.backends.interface import AnyCluster
from integration_tests.kafka_tools import producer_config
from integration_tests.patience import PATIENCE_S, eventually
from rollbridge.errors import InvalidRequestError, UnavailableError
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.errors import AppendRefusedError, TopicNotFoundError
from rollbridge.kafka.metadata import Isolation
from rollbridge.kafka.records import Compression
from rollbridge.kafka.topics import TopicSpec


@pytest.fixture
def servers(cluster: AnyCluster) -> str:
    return cluster.bootstrap_servers


@pytest.fixture
def kafka(servers: str) -> KafkaClient:
    return KafkaClient(servers)


@pytest.fixture
def topic(kafka: KafkaClient, topic_prefix: str) -> str:
    kafka.topics.create_topics([TopicSpec(name=topic_prefix)])
    return topic_prefix


class Hammer:
    """Writes to a topic without pause, from a thread of its own, and notes which offsets were acknowledged."""

    def __init__(self, servers: str, topic: str, value: bytes, **settings: object) -> None:
        # As any Kafka user would configure it, so that successes are reported, too.
        self._producer = Producer({**producer_config(servers), "delivery.report.only.error": False, **settings})
        self._topic = topic
        self._value = value
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.written: list[int] = []
        self.refused: list[int | None] = []

    def _run(self) -> None:
        while not self._stop.is_set():
            # Enough under way to keep the broker busy, and no more than it can answer soon.
            while len(self._producer) < 20:
                self._producer.produce(self._topic, self._value, on_delivery=self._delivered)
            self._producer.poll(0.005)
        self._producer.flush(60)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            offset = message.offset()
            assert offset is not None
            self.written.append(offset)
        else:
            self.refused.append(error.code())

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            eventually(lambda: len(self.written) > 20, "the hammer is at work")
            yield
            eventually(lambda: len(self.refused) > 20, "the hammer is refused")
        finally:
            self._stop.set()
            self._thread.join(PATIENCE_S)


class TransactionHammer:
    """Commits small native transactions to two topics, one of which is going to be sealed."""

    def __init__(self, servers: str, topic: str, other: str) -> None:
        self._appender = KafkaClient(servers).appender(f"{topic}-hammer")
        self._topics = (topic, other)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.committed: list[bytes] = []
        self.refused = 0

    def _run(self) -> None:
        self._appender.init()
        with self._appender:
            n = 0
            while not self._stop.is_set():
                n += 1
                value = b"%d" % n
                try:
                    self._appender.append((topic, batch_of([value])) for topic in self._topics)
                except AppendRefusedError:
                    self.refused += 1
                    self._appender.abort()
                    continue
                self._appender.commit()
                self.committed.append(value)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            eventually(lambda: len(self.committed) > 5, "transactions are committed")
            yield
            # More than one: the first refusal did not break the transactional id.
            eventually(lambda: self.refused > 5, "transactions are refused")
        finally:
            self._stop.set()
            self._thread.join(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", [*range(6), *(pytest.param(item, marks=pytest.mark.long) for item in range(6, 20))])
def test_nothing_is_written_at_or_after_the_sealed_end(
    servers: str, kafka: KafkaClient, topic: str, attempt: int
) -> None:
    """Idempotent and plain producers, large records and the tiniest, and native transactions, all at once."""
    other = f"{topic}-other"
    kafka.topics.create_topics([TopicSpec(name=other)])
    hammers = [
        Hammer(servers, topic, b"x" * 100),
        Hammer(servers, topic, b"y" * 100, **{"enable.idempotence": False, "acks": "1"}),
        Hammer(servers, topic, b"z", **{"enable.idempotence": False, "acks": "1", "batch.num.messages": 1}),
    ]
    transactions = TransactionHammer(servers, topic, other)
    with hammers[0].at_work(), hammers[1].at_work(), hammers[2].at_work(), transactions.at_work():
        end = kafka.topics.seal([topic])[topic]
    everything = read_messages(servers, topic, isolation=Isolation.READ_UNCOMMITTED)
    assert max(message.offset() or 0 for message in everything) < end
    for hammer in hammers:
        # Nothing that was acknowledged is beyond, and all of it is there.
        assert max(hammer.written) < end
        assert set(hammer.written) <= {message.offset() for message in everything}
        assert set(hammer.refused) == {KafkaError.MSG_SIZE_TOO_LARGE}
    committed = [value for value in read_values(servers, topic) if value is not None and value.isdigit()]
    assert committed == transactions.committed == read_values(servers, other)


def test_an_idempotent_pipeline_is_cut_once_and_stays_usable(servers: str, kafka: KafkaClient, topic: str) -> None:
    """What lets a client re-route to the successors, order kept: all before the cut, none after."""
    outcomes: list[tuple[int, int | None]] = []
    producer = Producer({**producer_config(servers), "delivery.report.only.error": False})

    def note(n: int) -> Callable[[KafkaError | None, Message], None]:
        return lambda error, message: outcomes.append((n, None if error is None else error.code()))

    def refused() -> bool:
        for _ in range(20):
            producer.produce(topic, b"v" * 50, on_delivery=note(len(sent)))
            sent.append(None)
        producer.poll(0.001)
        return outcomes[-1:] != [] and outcomes[-1][1] is not None

    sent: list[None] = []
    sealing = threading.Thread(target=lambda: kafka.topics.seal([topic]))
    refused()
    sealing.start()
    eventually(refused, "the pipeline is cut")
    sealing.join(PATIENCE_S)
    producer.flush(60)
    codes = [code for _, code in outcomes]
    cut = codes.index(KafkaError.MSG_SIZE_TOO_LARGE)
    assert [n for n, _ in outcomes] == list(range(len(sent)))
    assert set(codes[:cut]) <= {None}
    assert set(codes[cut:]) == {KafkaError.MSG_SIZE_TOO_LARGE}
    successor = f"{topic}-successor"
    kafka.topics.create_topics([TopicSpec(name=successor)])
    producer.produce(successor, b"re-routed", on_delivery=note(-1))
    producer.flush(60)
    assert outcomes[-1] == (-1, None)


@pytest.mark.parametrize("compression", list(Compression))
def test_the_smallest_batch_of_every_codec_is_refused(
    servers: str, kafka: KafkaClient, topic: str, compression: Compression
) -> None:
    end = kafka.topics.seal([topic])[topic]
    producer = Producer(
        {**producer_config(servers), "compression.type": compression.name.lower(), "batch.num.messages": 1}
    )
    refused: list[int | None] = []
    for value in (None, b"", b"0123456789"):
        producer.produce(topic, value, on_delivery=lambda error, _: refused.append(error.code() if error else None))
    producer.flush(60)
    assert refused == [KafkaError.MSG_SIZE_TOO_LARGE] * 3
    with KafkaClient(servers).appender(topic) as appender:
        appender.init()
        with pytest.raises(AppendRefusedError):
            appender.append([(topic, batch_of([b""], compression))])
    assert read_messages(servers, topic, isolation=Isolation.READ_UNCOMMITTED) == []
    assert end == 1  # the marker of the barrier


def test_a_native_transaction_that_is_open_is_waited_for(servers: str, kafka: KafkaClient, topic: str) -> None:
    with KafkaClient(servers).appender(topic) as appender:
        appender.init()
        appender.append([(topic, batch_of([b"in time"]))])
        with pytest.raises(UnavailableError, match="native transaction") as hangs:
            kafka.topics.seal([topic], timeout_s=5)
        assert vars(hangs.value)["topics"].keys() == {topic}
        # It can still be committed, but not go on.
        appender.commit()
        assert kafka.topics.seal([topic]) == {topic: 4}  # two markers of barriers, and one of the transaction
        with pytest.raises(AppendRefusedError):
            appender.append([(topic, batch_of([b"late"]))])
        appender.abort()
    assert read_values(servers, topic) == [b"in time"]


def test_a_librdkafka_transaction_that_meets_the_seal_can_abort_and_go_on(
    servers: str, kafka: KafkaClient, topic: str, topic_prefix: str
) -> None:
    """Transactions version 1, as most clients speak: they, too, must not be stuck with a marker nobody takes."""
    other = f"{topic_prefix}-other"
    kafka.topics.create_topics([TopicSpec(name=other)])
    kafka.topics.seal([topic])
    producer = Producer({"bootstrap.servers": servers, "transactional.id": f"{topic}-rdkafka"})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, b"late")
    with pytest.raises(KafkaException):
        producer.commit_transaction(60)
    producer.abort_transaction(60)
    producer.begin_transaction()
    producer.produce(other, b"on time")
    producer.commit_transaction(60)
    await_settled(servers, [topic, other])
    assert read_values(servers, other) == [b"on time"]
    assert read_values(servers, topic) == []


def test_sealing_can_be_repeated_at_any_point(servers: str, kafka: KafkaClient, topic: str) -> None:
    with KafkaClient(servers).appender(topic) as appender:
        appender.init()
        appender.append([(topic, batch_of([b"a", b"b"]))])
        appender.commit()
    assert kafka.topics.seal([topic, topic]) == {topic: 4}
    assert kafka.topics.seal([topic]) == {topic: 5}
    assert kafka.topics.seal([]) == {}


def test_many_topics_are_sealed_at_once(servers: str, kafka: KafkaClient, topic_prefix: str) -> None:
    topics = [f"{topic_prefix}-{n}" for n in range(40)]
    kafka.topics.create_topics(TopicSpec(name=name) for name in topics)
    with KafkaClient(servers).appender(topic_prefix) as appender:
        appender.init()
        appender.append((name, batch_of([b"v"] * n)) for n, name in enumerate(topics) if n)
        appender.commit()
    assert kafka.topics.seal(topics) == {name: n + 2 if n else 1 for n, name in enumerate(topics)}
    assert all(description.sealed for description in kafka.topics.describe(topics).values())


def test_what_cannot_be_sealed_is_said_before_anything_changes(
    kafka: KafkaClient, topic: str, topic_prefix: str
) -> None:
    wide = f"{topic_prefix}-wide"
    kafka.topics.create_topics([TopicSpec(name=wide, partitions=2)])
    with pytest.raises(InvalidRequestError, match="more than one partition"):
        kafka.topics.seal([topic, wide])
    with pytest.raises(TopicNotFoundError):
        kafka.topics.seal([topic, f"{topic_prefix}-missing"])
    assert not kafka.topics.describe([topic])[topic].sealed


def test_a_partition_that_was_added_is_not_closed_unnoticed(
    cluster: AnyCluster, kafka: KafkaClient, topic_prefix: str
) -> None:
    """Whoever seals has asked for the topic's ends before, and so knows its leaders."""
    kafka.topics.create_topics([TopicSpec(name=topic_prefix, partitions=2)])
    places = [(topic_prefix, 0), (topic_prefix, 1)]
    assert set(kafka.offsets.end(places)) == set(places)
    grown = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    grown.create_partitions([NewPartitions(topic_prefix, 3)])[topic_prefix].result(PATIENCE_S)
    with pytest.raises(InvalidRequestError, match="more than the 2 partitions"):
        kafka.topics.seal(places)
    assert not kafka.topics.describe([topic_prefix])[topic_prefix].sealed
