"""Spark reads streams: in batches and as queries, across scales, restarts and truncation; and with its own source."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rollbridge
from bridge.tests.refusals import raises_code
from integration_tests.clients import Site
from integration_tests.grown_streams import KEYS, grow, grow_narrowly, write
from integration_tests.kafka_tools import produce
from integration_tests.patience import eventually
from integration_tests.spark_tools import options_of, run_to_end
from rollbridge.base.ids import SegmentId
from rollbridge.config import ClientOptions
from rollbridge.errors import (
    InvalidRequestError,
    KafkaUnavailableError,
    RollbridgeError,
    TruncatedError,
)
from rollbridge.spark import source, transactions
from rollbridge.spark.settings import read_source
from rollbridge.spark.source import DriverConnection
from rollbridge.stream.names import StreamName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming import StreamingQuery

Load = Callable[..., "DataFrame"]


@pytest.fixture
def load(spark: SparkSession, site: Site) -> Load:
    """Loads a stream in a batch; options have ``_`` for a dot, a ``schema`` is Spark's."""

    def load(stream: str, schema: str | None = None, **options: str) -> DataFrame:
        reader = spark.read.format("rollbridge").options(**options_of(site, stream, **options))
        return (reader if schema is None else reader.schema(schema)).load()

    return load


class Here:
    """The source in this process: what Spark's driver and tasks would do, on real servers, without a JVM."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def rows(self, stream: str, **options: str) -> list[dict[str, Any]]:
        """What a batch reads."""
        given = lowered(options_of(self.site, stream, **options))
        reader = source.BatchReader(given, source.schema(given))
        return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]

    def values(self, stream: str, **options: str) -> dict[bytes, list[bytes]]:
        """What a batch reads under each key, in order."""
        return by_key(self.rows(stream, **options))

    def batches(self, stream: str, start: dict[str, Any] | None = None, **options: str) -> Iterator[Step]:
        """The micro-batches of a query that reads what is there, each with the offset behind it."""
        given = lowered(options_of(self.site, stream, **{"startingOffsets": "earliest", **options}))
        reader = source.StreamReader(given, source.schema(given))
        try:
            begin = reader.initialOffset() if start is None else start
            reader.prepareForTriggerAvailableNow()
            while (end := reader.latestOffset(begin, reader.getDefaultReadLimit())) != begin:
                parts = pickle.loads(pickle.dumps(reader.partitions(begin, end)))
                rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
                reader.commit(end)
                yield rows, end
                begin = json.loads(json.dumps(end))
        finally:
            reader.stop()


def lowered(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


Step = tuple[list[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def here(site: Site) -> Here:
    return Here(site)


class Query:
    """Runs a query over a stream, again and again from one checkpoint, and keeps the rows of each micro-batch."""

    def __init__(self, spark: SparkSession, site: Site, checkpoint: Path) -> None:
        self._spark, self._site, self.checkpoint = spark, site, checkpoint
        self.batches: list[list[Row]] = []

    def start(self, stream: str, trigger: Mapping[str, Any], **options: str) -> StreamingQuery:
        options = {"startingOffsets": "earliest", **options}
        frame = self._spark.readStream.format("rollbridge").options(**options_of(self._site, stream, **options)).load()
        return (
            frame.writeStream.foreachBatch(lambda rows, _: self.batches.append(rows.collect()))
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(**trigger)
            .start()
        )

    def run(self, stream: str, **options: str) -> list[list[Row]]:
        """Read what is there; the rows of each of the new micro-batches."""
        before = len(self.batches)
        run_to_end(lambda: self.start(stream, {"availableNow": True}, **options))
        return [batch for batch in self.batches[before:] if batch]

    def values(self) -> dict[bytes, list[bytes]]:
        """What was read under each key, in order."""
        return by_key(row for batch in self.batches for row in batch)

    def offset(self) -> dict[str, Any]:
        """The last offset in the checkpoint."""
        newest = max((self.checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
        found: dict[str, Any] = json.loads(newest.read_text().splitlines()[-1])
        return found


@pytest.fixture
def query(spark: SparkSession, site: Site, tmp_path: Path) -> Query:
    return Query(spark, site, tmp_path / "checkpoint")


def by_key(rows: Iterable[Any]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for row in rows:
        found[bytes(row["key"])].append(bytes(row["value"]))
    return dict(found)


def each(*values: bytes) -> dict[bytes, list[bytes]]:
    """The same values under each key."""
    return {key: list(values) for key in KEYS}


def topic_of(stream: str, number: int, epoch: int) -> str:
    return StreamName.parse(stream).segment_topic(SegmentId.of(number, epoch))


def test_columns_are_those_of_the_library_and_of_sparks_own_source(
    client: rollbridge.Bridge, orders: str, load: Load, spark: SparkSession, site: Site
) -> None:
    grow(client, orders)
    with client.transaction(orders) as txn:
        txn.write(orders, key=b"k", value=None, headers=[("a", b"1"), ("b", None)])
    with client.writer(orders) as writer:
        writer.write(key=b"k", value=b"", headers=[("c", b"2")], transaction_id=7)
    produce(site.cluster.bootstrap_servers, topic_of(orders, 5, 5), [b"plain"])
    client.begin(orders).abort()
    rows = load(orders, includeHeaders="true", includeTransaction="true", includeCommitPosition="true").collect()
    with client.transactions(StreamName.parse(orders).scope, follow=False) as reader:
        positions = {str(item.id): item.order for item in reader}
    with client.reader(orders, follow=False) as records:
        wanted = {(item.topic, item.offset): item for item in records}
    assert {(row.topic, row.offset) for row in rows} == wanted.keys()
    for row in rows:
        record = wanted[row.topic, row.offset]
        assert (row.key, row.value) == (record.key, record.value)
        assert (row.stream, row.segment, row.epoch) == (orders, record.segment.number, record.segment.epoch)
        assert [(item.key, item.value) for item in row.headers or []] == record.headers
        assert row.sequenceId == (record.sn.sequence_id if record.sn else None)
        identity = None if record.transaction_id is None else str(record.transaction_id)
        assert (row.transactionId, row.localSequence) == (identity, record.local_sequence)
        assert row.commitPosition == (None if identity is None else positions[identity])
    own = spark.read.format("kafka").options(
        **{
            "kafka.bootstrap.servers": site.cluster.bootstrap_servers,
            "subscribePattern": re.escape(orders.replace("/", ".")) + r"\.segment-.*",
            "kafka.isolation.level": "read_committed",
        }
    )
    stock = own.load()
    shared = load(orders, schema=", ".join(f"{field.name} {field.dataType.simpleString()}" for field in stock.schema))
    assert shared.schema == stock.schema
    assert sorted(map(str, shared.collect())) == sorted(map(str, stock.collect()))


def test_a_batch_begins_and_ends_where_it_is_told_to(client: rollbridge.Bridge, orders: str, here: Here) -> None:
    write(client, orders, b"first")
    with client.reader(orders, follow=False) as reader:
        list(reader)
        middle = str(reader.position)
    client.admin.scale(orders, seal=[0, 1], ranges=[(0.0, 1.0)])
    write(client, orders, b"second")
    assert here.values(orders) == here.values(orders, minPartitions="8") == each(b"first", b"second")
    assert here.values(orders, endingOffsets=middle) == each(b"first")
    assert here.values(orders, startingOffsets=middle) == each(b"second")
    with client.reader(orders, follow=False) as reader:
        later = next(item for item in reader if item.value == b"second")
    assert here.values(orders, startingOffsets=str(later.dlsn)) == each(b"second")
    assert here.values(orders, startingOffsets=str(later.sn)) == each(b"second")
    assert here.values(orders, startingOffsets=str(later.timestamp_ms)) == each(b"second")
    assert here.rows(orders, startingOffsets="latest") == []
    given = lowered(options_of(here.site, orders, minPartitions="8"))
    assert len(source.BatchReader(given, source.schema(given)).partitions()) > 3


def test_a_query_keeps_the_order_of_every_key_across_scales_restarts_and_limits(
    client: rollbridge.Bridge, orders: str, query: Query, here: Here
) -> None:
    write(client, orders, b"early")
    assert sum(map(len, query.run(orders, maxRecordsPerTrigger="3"))) == len(KEYS)
    steps = grow(client, orders)
    batches = query.run(orders, maxRecordsPerTrigger="7", includeCommitPosition="true")
    assert all(len(batch) <= 7 for batch in batches)
    assert query.values() == each(b"early", *steps)
    for batch in batches:
        for row in batch:
            assert row.commitPosition is not None
    offset = query.offset()
    assert offset["position"].startswith(f"{orders}@5-5:")
    # What the checkpoint says is a position that everything else understands.
    write(client, orders, b"late")
    assert here.values(orders, startingOffsets=offset["position"]) == each(b"late")
    with client.reader(orders, start=offset["position"], follow=False) as reader:
        assert [record.value for record in reader] == [b"late"] * len(KEYS)
    assert [len(rows) for rows, _ in here.batches(orders, offset)] == [len(KEYS)]


def test_late_commits_that_roll_a_part_of_a_stream_keep_the_order_of_every_key(
    client: rollbridge.Bridge, orders: str, here: Here
) -> None:
    expected = dict.fromkeys(KEYS, grow_narrowly(client, orders))
    assert here.values(orders) == expected
    rows = [row for step, _ in here.batches(orders, maxRecordsPerTrigger="5") for row in step]
    assert by_key(rows) == expected


def test_running_queries_see_what_is_committed_and_new_epochs_ours_and_sparks_own(
    client: rollbridge.Bridge, orders: str, query: Query, spark: SparkSession, site: Site, tmp_path: Path
) -> None:
    stock: list[Row] = []
    pattern = re.escape(orders.replace("/", ".")) + r"\.segment-.*"
    own = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", site.cluster.bootstrap_servers)
        .option("subscribePattern", pattern)
        .option("startingOffsets", "earliest")
        .option("kafka.isolation.level", "read_committed")
        .option("kafka.metadata.max.age.ms", "500")
        .load()
        .writeStream.foreachBatch(lambda rows, _: stock.extend(rows.collect()))
        .option("checkpointLocation", str(tmp_path / "stock"))
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    ours = query.start(orders, {"processingTime": "100 milliseconds"}, includeTransaction="true")
    try:
        aborted, left_open = client.begin(orders), client.begin(orders)
        aborted.write_all(orders, ((key, b"aborted") for key in KEYS))
        left_open.write_all(orders, ((key, b"open") for key in KEYS))
        aborted.flush()
        left_open.flush()
        aborted.abort()
        steps = grow(client, orders)
        wanted = each(*steps)
        eventually(lambda: query.values() == wanted, "our query has read everything, in order")
        eventually(lambda: len(stock) >= len(steps) * len(KEYS), "Spark's own has read as much")
        assert {key: sorted(values) for key, values in by_key(stock).items()} == {
            key: sorted(values) for key, values in wanted.items()
        }
        left_open.commit()
        wanted = each(*steps, b"open")
        eventually(lambda: query.values() == wanted, "what was open is read once it is committed")
        eventually(lambda: sum(bytes(row["value"]) == b"open" for row in stock) == len(KEYS), "by Spark's own as well")
        assert query.values() == wanted
    finally:
        ours.stop()
        own.stop()
    assert (ours.exception(), own.exception()) == (None, None)


def test_transactions_are_rows_in_the_order_of_commits(
    client: rollbridge.Bridge, orders: str, payments: str, spark: SparkSession, site: Site, here: Here, tmp_path: Path
) -> None:
    scope = StreamName.parse(orders).scope
    with client.transaction(orders, payments, label="both") as txn:
        txn.write(orders, key=b"a", value=b"1")
        txn.write(payments, key=b"a", value=b"2")
    client.begin(orders).abort()
    grow(client, orders)
    options = {**options_of(site, "", group=f"{scope}/default")}
    del options["stream"]
    found = spark.read.format("rollbridge-transactions").options(**options).load().collect()
    with client.transactions(scope, follow=False) as reader:
        wanted = list(reader)
    assert [row.transactionId for row in found] == [str(item.id) for item in wanted]
    assert [row.commitPosition for row in found] == [item.order for item in wanted]
    assert [(row.label, row.client, row.streams, row.records) for row in found] == [
        (item.label, item.client_name, item.counts(), item.count) for item in wanted
    ]
    assert all(row.begun.timestamp() <= row.committed.timestamp() and row.bytes > 0 for row in found)
    given = lowered(options_of(site, payments))
    reader = transactions.TransactionsBatchReader(given, transactions.schema(given))
    labels = [row["label"] for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert labels == ["both"]
    counts = Counter(row["commitPosition"] for row in here.rows(orders, includeCommitPosition="true"))
    assert counts == {row.commitPosition: row.streams[orders] for row in found}
    batches: list[list[Row]] = []
    for _ in range(2):
        writer = (
            spark.readStream.format("rollbridge-transactions")
            .options(**options, startingOffsets="earliest", maxRecordsPerTrigger="3")
            .load()
            .writeStream.foreachBatch(lambda rows, _: batches.append(rows.collect()))
            .option("checkpointLocation", str(tmp_path / "log"))
            .trigger(availableNow=True)
        )
        run_to_end(writer.start)
    assert [row for batch in batches for row in batch] == found
    assert len(batches) > 1


def test_a_batch_previews_what_is_open(client: rollbridge.Bridge, orders: str, here: Here) -> None:
    write(client, orders, b"committed")
    open_one, aborted = client.begin(orders), client.begin(orders)
    for txn, value in ((open_one, b"open"), (aborted, b"aborted")):
        txn.write(orders, key=b"k0", value=value, headers=[("h", b"x")])
        txn.flush()
    aborted.abort()
    rows = here.rows(orders, isolation="read_uncommitted", includeTransaction="true", includeHeaders="true")
    [preview] = [row for row in rows if not row["committed"]]
    assert (preview["value"], preview["transactionId"], preview["offset"]) == (b"open", str(open_one.id), None)
    assert preview["headers"] == [{"key": "h", "value": b"x"}]
    assert by_key([row for row in rows if row["committed"]]) == here.values(orders) == each(b"committed")
    open_one.abort()


def test_the_place_in_the_commit_log_is_kept_from_batch_to_batch(
    client: rollbridge.Bridge, orders: str, payments: str, here: Here
) -> None:
    for number in range(6):
        with client.transaction(orders if number % 2 else payments, label=str(number)) as txn:
            txn.write_all(txn.streams[0], ((key, b"%d" % number) for key in KEYS))
    with client.transactions(StreamName.parse(orders).scope, follow=False) as reader:
        wanted = {item.label: item.order for item in reader}
    options: dict[str, Any] = {"includeCommitPosition": "true", "maxRecordsPerTrigger": "5"}
    steps = list(here.batches(orders, **options))
    hints = [end["commitLog"] for _, end in steps]
    assert hints == sorted(hints)
    assert hints[0] < wanted["5"] < hints[-1]
    place = len(steps) // 2
    again = list(here.batches(orders, steps[place][1], **options))
    assert [rows for rows, _ in again] == [rows for rows, _ in steps[place + 1 :]]
    for rows, _ in steps:
        assert all(row["commitPosition"] == wanted[row["value"].decode()] for row in rows)
    assert sum(len(rows) for rows, _ in steps) == 3 * len(KEYS)


def test_what_can_not_be_read_is_refused_and_says_why(
    client: rollbridge.Bridge, orders: str, payments: str, load: Load, here: Here, site: Site
) -> None:
    from pyspark.errors import PySparkException

    write(client, orders, b"before")
    with pytest.raises(PySparkException, match=r"(?s)stream: is missing.*startingofset: is unknown"):
        load("", startingofset="x")
    with pytest.raises(PySparkException, match=f"stream {orders}-not does not exist"):
        load(orders + "-not").collect()
    with raises_code("group-mismatch", match=r"belongs to group .*, not to other/default"):
        here.rows(orders, group="other/default")
    with pytest.raises(InvalidRequestError, match="has no segment"):
        here.rows(orders, startingOffsets="7-7:3:0")
    *_, (_, offset) = here.batches(orders)
    with pytest.raises(InvalidRequestError, match=f"the checkpoint belongs to stream {orders}, not to {payments}"):
        list(here.batches(payments, offset))
    with pytest.raises(InvalidRequestError, match="the checkpoint belongs to Kafka cluster another, but"):
        list(here.batches(orders, {**offset, "cluster": "another"}))
    client.admin.delete_stream(orders)
    client.admin.create_stream(orders, segments=2)
    with pytest.raises(InvalidRequestError, match="was deleted and created again since the checkpoint was written"):
        list(here.batches(orders, offset))
    settings = read_source(options_of(site, orders), "batch").shared
    nobody = replace(
        settings,
        connection=replace(settings.connection, bootstrap_servers="127.0.0.1:1"),
        options=ClientOptions(connect_timeout_s=1.0),
    )
    with pytest.raises(KafkaUnavailableError, match=r"no Kafka broker answered at 127\.0\.0\.1:1"):
        DriverConnection(nobody)


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_running_query_reads_nothing_of_a_stream_that_was_created_again(
    client: rollbridge.Bridge, orders: str, here: Here, fail: str
) -> None:
    given = lowered(options_of(here.site, orders, startingOffsets="earliest", failOnDataLoss=fail))
    write(client, orders, b"former")
    reader = source.StreamReader(given, source.schema(given))
    try:
        begin = reader.initialOffset()
        end = reader.latestOffset(begin, reader.getDefaultReadLimit())
        assert reader.partitions(begin, end)
        client.admin.delete_stream(orders)
        client.admin.create_stream(orders, segments=2)
        write(client, orders, b"fresh")

        def is_refused() -> bool:
            try:
                assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
            except RollbridgeError as fault:  # or that its topics are gone, as long as it has not heard of the new ones
                return "was deleted and created again since the checkpoint was written" in str(fault)
            return False

        eventually(is_refused, "the checkpoint is refused")
        with pytest.raises(InvalidRequestError, match="was deleted and created again"):
            reader.partitions(begin, end)
    finally:
        reader.stop()
    assert here.values(orders) == each(b"fresh")


def test_what_was_truncated_below_the_checkpoint_is_an_error_or_left_out(
    client: rollbridge.Bridge, orders: str, here: Here
) -> None:
    write(client, orders, b"read")
    *_, (_, offset) = here.batches(orders)
    write(client, orders, b"lost")
    client.admin.scale(orders, seal=[0], ranges=[(0.0, 0.5)])
    write(client, orders, b"kept")
    with client.reader(orders, follow=False) as reader:
        kept = next(record for record in reader if record.segment.epoch == 1)
    assert kept.dlsn is not None
    client.admin.truncate(orders, kept.dlsn)
    with pytest.raises(TruncatedError, match=r"have been deleted.*failOnDataLoss=false"):
        list(here.batches(orders, offset))
    found = by_key([row for rows, _ in here.batches(orders, offset, failOnDataLoss="false") for row in rows])
    in_what_was_kept = {row["key"] for row in here.rows(orders) if row["epoch"] == 1}
    assert in_what_was_kept
    assert found == {key: [b"kept"] if key in in_what_was_kept else [b"lost", b"kept"] for key in KEYS}


def test_a_task_that_finds_records_deleted_says_so_or_leaves_them_out(
    client: rollbridge.Bridge, ledger: str, here: Here
) -> None:
    write(client, ledger, b"lost")
    with client.reader(ledger, follow=False) as reader:
        list(reader)
        middle = reader.position
    write(client, ledger, b"kept")
    planned = {}
    for fail in ("true", "false"):
        given = lowered(options_of(here.site, ledger, failOnDataLoss=fail))
        reader_of = source.BatchReader(given, source.schema(given))
        planned[fail] = reader_of, reader_of.partitions()
    client.admin.truncate(ledger, middle)
    for fail, (batch_reader, parts) in planned.items():
        if fail == "true":
            with pytest.raises(TruncatedError, match="have been deleted before they were read"):
                list(batch_reader.read(parts[0]))
        else:
            rows = [row for part in parts for batch in batch_reader.read(part) for row in batch.to_pylist()]
            assert by_key(rows) == each(b"kept")


def test_reading_needs_no_coordinator(client: rollbridge.Bridge, orders: str, here: Here, site: Site) -> None:
    write(client, orders, b"there")
    site.stop_coordinator()
    try:
        assert here.values(orders) == each(b"there")
    finally:
        site.start_coordinator()
