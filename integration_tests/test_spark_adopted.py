"""Spark on a topic that exists: our formats by its name, beside native producers, and Spark's own source all along."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

import rollbridge
from integration_tests.clients import Site, adopt, header_of, read_committed
from integration_tests.kafka_tools import create_topic
from integration_tests.patience import PATIENCE_S, eventually
from integration_tests.spark_crash import CRASH
from integration_tests.spark_driver import await_batch, start_numbers
from integration_tests.spark_rows import ROWS, driver
from integration_tests.spark_tools import options_of, run_to_end
from rollbridge.errors import InvalidRequestError
from rollbridge.kafka.client import KafkaClient
from rollbridge.spark import source
from rollbridge.stream.keyspace import Partitioner, native_partition

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 4
KEYS = [b"%d" % number for number in range(5)]


@pytest.fixture
def topic(site: Site, unique_name: Callable[[str], str]) -> str:
    """A topic that somebody else has made."""
    name = unique_name("shop.orders")
    create_topic(site.cluster.bootstrap_servers, name, PARTITIONS)
    return name


class Native:
    """A program that writes to a topic and knows nothing of rollbridge; in native transactions if it has an id."""

    def __init__(self, site: Site, topic: str, transactional_id: str | None = None) -> None:
        self.topic = topic
        self.written: list[bytes] = []
        settings: dict[str, Any] = {
            "bootstrap.servers": site.cluster.bootstrap_servers,
            "partitioner": "murmur2_random",
            **({} if transactional_id is None else {"transactional.id": transactional_id}),
        }
        self._producer = Producer(settings)
        self._is_transactional = transactional_id is not None
        if self._is_transactional:
            self._producer.init_transactions(60)

    def write(self, stem: str, *, abort: bool = False) -> None:
        """Write a value under each key."""
        if self._is_transactional:
            self._producer.begin_transaction()
        values = [b"%s-%s" % (stem.encode(), key) for key in KEYS]
        for key, value in zip(KEYS, values, strict=True):
            self._producer.produce(self.topic, value, key)
        assert self._producer.flush(60) == 0
        if abort:
            self._producer.abort_transaction(60)
            return
        if self._is_transactional:
            self._producer.commit_transaction(60)
        self.written += values


class StockQuery:
    """A query of Spark's own source over a topic, again and again from one checkpoint; it is never changed."""

    def __init__(self, spark: SparkSession, site: Site, topic: str, checkpoint: Path) -> None:
        self._frame = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", site.cluster.bootstrap_servers)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("kafka.isolation.level", "read_committed")
            .load()
        )
        self._checkpoint = str(checkpoint)
        self.values: Counter[bytes] = Counter()

    def run(self) -> Counter[bytes]:
        """Read on to the end; everything that was ever read, with how often."""

        def take(rows: DataFrame, _: int) -> None:
            self.values.update(bytes(row["value"]) for row in rows.collect())

        query = self._frame.writeStream.foreachBatch(take).option("checkpointLocation", self._checkpoint)
        run_to_end(query.trigger(availableNow=True).start)
        return self.values


@pytest.fixture
def stock(spark: SparkSession, site: Site, topic: str, tmp_path: Path) -> StockQuery:
    return StockQuery(spark, site, topic, tmp_path / "stock")


@pytest.fixture
def load(spark: SparkSession, site: Site) -> Callable[..., list[Any]]:
    """Reads an adopted topic in a batch, by its name."""

    def load(topic: str, form: str = "rollbridge", **options: str) -> list[Any]:
        given = {**options_of(site, "", **options), "topic": topic}
        rows: list[Any] = spark.read.format(form).options(**given).load().collect()
        return rows

    return load


def by_key(rows: Iterable[tuple[bytes, bytes]]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for key, value in rows:
        found.setdefault(key, []).append(value)
    return found


def test_each_row_once_beside_native_producers_while_sparks_own_source_reads_on_unchanged(
    spark: SparkSession,
    site: Site,
    client: rollbridge.Bridge,
    topic: str,
    stock: StockQuery,
    load: Callable[..., list[Any]],
    tmp_path: Path,
    unique_name: Callable[[str], str],
) -> None:
    plain, transactional = Native(site, topic), Native(site, topic, unique_name("native"))
    plain.write("before")
    assert stock.run() == Counter(plain.written)
    admin = KafkaClient(site.cluster.bootstrap_servers).topics
    was = admin.describe([topic])[topic]
    stream = str(adopt(client, topic).config.name)

    checkpoint = tmp_path / "checkpoint"
    done = -1
    with client.transaction(topic) as open_beside:
        for key in KEYS:
            open_beside.write(topic, key, b"open-" + key)
        # One name after the other: the same stream is meant, so what is done is not done again.
        for name in ({"topic": topic, "stream": ""}, {"stream": topic}, {"stream": stream}):
            query = start_numbers(spark, options_of(site, "") | name, str(checkpoint), ROWS)
            try:
                await_batch(query, done + 1)
                plain.write(f"plain-{done}")
                transactional.write(f"native-{done}")
                transactional.write(f"aborted-{done}", abort=True)
                await_batch(query, done + 2)
            finally:
                query.stop()
            # What a driver leaves that dies after the commit, before Spark has noted it.
            noted = max((checkpoint / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
            done = int(noted.name) - 1
            noted.unlink()
            noted.with_name(f".{noted.name}.crc").unlink(missing_ok=True)
        during = stock.run().copy()
        assert max(during.values()) == 1
        assert not [value for value in during if value.startswith((b"open-", b"aborted-"))]
    # A query that is stopped may leave a transaction open, which its next run ends; this run ends by itself.
    last = start_numbers(spark, options_of(site, topic), str(checkpoint), ROWS, availableNow=True)
    last.awaitTermination()
    numbers = [value for value in stock.run() if value.isdigit()]
    assert sorted(map(int, numbers)) == list(range(len(numbers)))
    assert len(numbers) >= (done + 2) * ROWS
    theirs = [*plain.written, *transactional.written, *(b"open-" + key for key in KEYS)]
    assert stock.values == Counter([*numbers, *theirs])

    messages = read_committed(site.cluster.bootstrap_servers, [topic], partitions=PARTITIONS)
    batches: dict[Any, list[int]] = {}
    for message in messages:
        if (value := message.value() or b"").isdigit():
            batches.setdefault(header_of(message)[0], []).append(int(value))
    assert {len(values) for values in batches.values()} == {ROWS}, "a micro-batch is one transaction"
    places = {(message.key(), message.partition()) for message in messages}
    assert len(places) == len(KEYS), "each key is in one partition, whoever has written it"

    rows = load(topic, includeTransaction="true", includeCommitPosition="true")
    assert {(row.topic, row.stream, row.segment) for row in rows} == {
        (topic, stream, message.partition()) for message in messages
    }
    assert sorted((row.partition, row.offset, bytes(row.key), bytes(row.value), row.transactionId) for row in rows) == [
        (
            message.partition(),
            message.offset(),
            message.key(),
            message.value(),
            str(header_of(message)[0]) if message.headers() else None,
        )
        for message in messages
    ]
    commits = {row.transactionId: row for row in load(topic, "rollbridge-transactions")}
    assert {row.transactionId for row in rows} - {None} == commits.keys()
    assert all(row.commitPosition == commits[row.transactionId].commitPosition for row in rows if row.transactionId)
    assert {tuple(row.streams) for row in commits.values()} == {(stream,)}

    client.admin.release_topic(topic)
    plain.write("after")
    assert stock.run() == Counter([*numbers, *theirs, *plain.written[-len(KEYS) :]])
    assert admin.describe([topic])[topic] == was
    with pytest.raises(PySparkException, match=f"no stream has adopted topic {topic}"):
        load(topic)


def test_a_query_reads_an_adopted_topic_on_from_its_checkpoint_and_one_job_writes_to_several(
    spark: SparkSession, site: Site, client: rollbridge.Bridge, topic: str, tmp_path: Path
) -> None:
    other = f"{topic}.returns"
    create_topic(site.cluster.bootstrap_servers, other, 1)
    native = Native(site, topic)
    native.write("a")
    stream = str(adopt(client, topic).config.name)
    adopt(client, other)
    read: list[tuple[bytes, bytes]] = []

    def run(name: str) -> None:
        frame = spark.readStream.format("rollbridge").options(**options_of(site, name, startingOffsets="earliest"))
        query = frame.option("maxRecordsPerTrigger", 3).load().writeStream
        take = query.foreachBatch(lambda rows, _: read.extend((row.key, row.value) for row in rows.collect()))
        run_to_end(take.option("checkpointLocation", str(tmp_path / "read")).trigger(availableNow=True).start)

    run(topic)
    assert sorted(bytes(value) for _, value in read) == sorted(native.written)
    rows = spark.createDataFrame(
        [(key.decode(), name, f"{stem}-{name}") for stem in ("x", "y") for key in KEYS for name in (topic, other)],
        "key string, topic string, value string",
    ).coalesce(1)
    options = options_of(site, "") | {"topic": f"{topic},{other}"}
    rows.write.format("rollbridge").options(**options).mode("append").save()
    native.write("b")
    run(stream)
    expected = {key: [b"a-" + key, f"x-{topic}".encode(), f"y-{topic}".encode(), b"b-" + key] for key in KEYS}
    assert by_key((bytes(key), bytes(value)) for key, value in read) == expected
    committed = read_committed(site.cluster.bootstrap_servers, [other])
    assert Counter(message.value() for message in committed) == {f"{stem}-{other}".encode(): 5 for stem in "xy"}


def test_rows_go_to_the_partition_that_they_name_as_with_sparks_own_sink(
    spark: SparkSession, site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    adopt(client, topic, partitioner="murmur2")
    rows = spark.createDataFrame(
        [(f"k{number}", f"v{number}", number % PARTITIONS) for number in range(30)],
        "key string, value string, partition int",
    )
    options = options_of(site, "") | {"topic": topic}
    rows.write.format("kafka").options(**options).mode("append").save()
    rows.write.format("rollbridge").options(**options).mode("append").save()
    found = Counter(
        (message.key(), message.partition())
        for message in read_committed(site.cluster.bootstrap_servers, [topic], partitions=PARTITIONS)
    )
    assert found == {(b"k%d" % number, number % PARTITIONS): 2 for number in range(30)}


def test_a_query_does_not_go_on_in_a_topic_that_was_created_anew(
    site: Site, client: rollbridge.Bridge, topic: str
) -> None:
    native = Native(site, topic)
    native.write("old")
    adopt(client, topic, partitioner="murmur2")
    options = {name.lower(): value for name, value in options_of(site, topic, startingOffsets="earliest").items()}
    reader = source.StreamReader(options, source.schema(options))
    try:
        begin = reader.initialOffset()
        end = reader.latestOffset(begin, reader.getDefaultReadLimit())
        kafka = AdminClient({"bootstrap.servers": site.cluster.bootstrap_servers})
        kafka.delete_topics([topic])[topic].result(120)
        topics = KafkaClient(site.cluster.bootstrap_servers).topics
        eventually(lambda: topic not in topics.list_topics(), "the topic is gone")
        create_topic(site.cluster.bootstrap_servers, topic, PARTITIONS)
        for stem in ("new", "newer"):  # more than what the query has read of the old one
            Native(site, topic).write(stem)
        for attempt in (
            lambda: reader.latestOffset(end, reader.getDefaultReadLimit()),
            lambda: reader.partitions(begin, end),
        ):
            with pytest.raises(InvalidRequestError, match=f"topic {topic} was deleted and created again.*nothing was"):
                attempt()
    finally:
        reader.stop()


def test_each_row_once_in_an_adopted_topic_wherever_the_driver_dies(
    spark: SparkSession, site: Site, client: rollbridge.Bridge, topic: str, stock: StockQuery, tmp_path: Path
) -> None:
    native = Native(site, topic)
    adopt(client, topic, partitioner="murmur2")
    options, checkpoint = options_of(site, "") | {"topic": topic, "stream": ""}, str(tmp_path / "checkpoint")
    for batch, point in enumerate(("before-commit", "inside-commit", "after-commit"), 1):
        with driver(options, checkpoint, tmp_path, **{CRASH: f"{point}:{batch}"}) as dying:
            assert dying.wait(PATIENCE_S) != 0, "it was to be killed"
        native.write(point)
        numbers = sorted(int(value) for value in stock.run() if value.isdigit())
        assert numbers == list(range(ROWS * (batch if point == "before-commit" else batch + 1)))
    last = start_numbers(spark, options, checkpoint, ROWS, availableNow=True)
    last.awaitTermination()
    numbers = sorted(int(value) for value in stock.run() if value.isdigit())
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= 4 * ROWS
    assert stock.values == Counter([*(b"%d" % number for number in numbers), *native.written])


def test_a_query_reads_added_partitions_from_their_beginning_and_a_sink_writes_to_them(
    site: Site,
    client: rollbridge.Bridge,
    spark: SparkSession,
    topic: str,
    load: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    adopt(client, topic, partitioner="murmur2")
    native = Native(site, topic)
    native.write("old")
    read: Counter[bytes] = Counter()

    def run() -> None:
        frame = spark.readStream.format("rollbridge").options(**options_of(site, topic, startingOffsets="earliest"))
        take = frame.load().writeStream.foreachBatch(
            lambda rows, _: read.update(bytes(row.value) for row in rows.collect())
        )
        run_to_end(take.option("checkpointLocation", str(tmp_path / "read")).trigger(availableNow=True).start)

    run()
    count = 3 * PARTITIONS
    kafka = AdminClient({"bootstrap.servers": site.cluster.bootstrap_servers})
    kafka.create_partitions([NewPartitions(topic, count)])[topic].result(120)
    later = Native(site, topic)
    later.write("new")
    eventually(lambda: client.admin.describe(topic).config.partitions == count, "the leader has taken them in")
    rows = spark.createDataFrame([(key, b"sunk-" + key) for key in KEYS], "key binary, value binary")
    rows.write.format("rollbridge").options(**options_of(site, topic)).mode("append").save()
    run()
    expected = Counter([*native.written, *later.written, *(b"sunk-" + key for key in KEYS)])
    assert read == expected
    assert Counter(bytes(row.value) for row in load(topic)) == expected
    found = read_committed(site.cluster.bootstrap_servers, [topic], partitions=count)
    places = {message.value(): message.partition() for message in found}
    for key in KEYS:
        assert places[b"sunk-" + key] == places[b"new-" + key] == native_partition(Partitioner.MURMUR2, key, count)
    assert max(places[b"sunk-" + key] or 0 for key in KEYS) >= PARTITIONS
