"""The sink on a real Spark: every row is in the stream exactly once, whatever is killed; bad input writes nothing."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rollbridge
from integration_tests.adapter_tools import read_values
from integration_tests.clients import Site, header_of, headers_of
from integration_tests.coordinators import coordinator
from integration_tests.patience import PATIENCE_S, eventually
from integration_tests.spark_crash import CRASH, PAUSE, PAUSED
from integration_tests.spark_driver import await_batch, start_numbers
from integration_tests.spark_rows import ROWS, driver
from integration_tests.spark_tools import options_of
from rollbridge.base.ids import TransactionId
from rollbridge.kafka.client import KafkaClient
from rollbridge.kafka.topics import TopicSpec

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def numbers_in(site: Site, stream: str) -> list[int]:
    return sorted(int(message.value() or b"") for message in site.committed(stream))


def transactions_in(site: Site, stream: str) -> dict[TransactionId, list[int]]:
    """What each transaction holds, in the order in which a segment first shows them."""
    found: dict[TransactionId, list[int]] = {}
    for message in site.committed(stream):
        found.setdefault(header_of(message)[0], []).append(int(message.value() or b""))
    return found


def check_whole_batches(site: Site, stream: str, batches: int) -> None:
    """Each micro-batch is one transaction, and nothing is missing or there twice."""
    numbers = numbers_in(site, stream)
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= batches * ROWS
    for members in transactions_in(site, stream).values():
        assert sorted(members) == list(range(min(members), min(members) + ROWS))


def test_a_batch_job_is_one_transaction_of_several_streams(
    spark: SparkSession, site: Site, orders: str, payments: str
) -> None:
    rows = spark.range(0, 1000, 1, 4).selectExpr(
        "CASE WHEN id % 4 > 0 THEN concat('k', id % 10) END AS key",
        "CASE WHEN id = 6 THEN NULL ELSE binary(string(id)) END AS value",
        "timestamp_millis(1700000000000 + id) AS timestamp",
        "array(named_struct('key', 'n', 'value', binary(string(id)))) AS headers",
        f"IF(id % 2 = 0, '{orders}', '{payments}') AS topic",
        "id AS offset",
    )
    options = options_of(
        site, f"{orders}, {payments}", compression="lz4", client_name=f"job-{orders.replace('/', '-')}"
    )
    for _ in range(2):  # the second time its label says that it is done
        rows.write.format("rollbridge").options(**options, label="once").mode("append").save()
    even, odd = site.committed(orders), site.committed(payments)
    assert len({header_of(message)[0] for message in [*even, *odd]}) == 1
    found = {int(headers_of(message)[0][1] or b""): message for message in [*even, *odd]}
    assert set(found) == set(range(1000))
    assert len(even) == len(odd) == 500
    for number, message in found.items():
        assert message.value() == (None if number == 6 else b"%d" % number)
        assert message.key() == (b"k%d" % (number % 10) if number % 4 else None)
        assert message.timestamp()[1] == 1_700_000_000_000 + number


def test_every_row_once_wherever_the_driver_stands_still_or_dies(
    spark: SparkSession, site: Site, client: rollbridge.Bridge, orders: str, tmp_path: Path
) -> None:
    options, checkpoint = options_of(site, orders), str(tmp_path / "checkpoint")

    def go_on(last: int) -> None:
        query = start_numbers(spark, options, checkpoint, ROWS)
        try:
            await_batch(query, last)
        finally:
            query.stop()

    # It stands still before the commit of its second micro-batch while another driver takes its query over.
    paused = tmp_path / "paused"
    with driver(options, checkpoint, tmp_path, **{PAUSE: "before-commit:1", PAUSED: str(paused)}) as older:
        eventually(lambda: paused.exists() and bool(paused.read_text()), "the driver stands still")
        assert numbers_in(site, orders) == list(range(ROWS))
        client.admin.scale(orders, seal=[0], ranges=[(0.0, 0.25), (0.25, 0.5)])
        go_on(2)
        done, rest = divmod(len(numbers_in(site, orders)), ROWS)
        assert not rest
        os.kill(int(paused.read_text()), signal.SIGCONT)
        assert older.wait(PATIENCE_S) != 0, "it was to be refused"
    assert "newer session" in (tmp_path / "driver.log").read_text()
    assert len(numbers_in(site, orders)) == done * ROWS

    with driver(options, checkpoint, tmp_path, **{CRASH: f"inside-commit:{done + 1}"}) as dying:
        assert dying.wait(PATIENCE_S) != 0, "it was to be killed"
    assert len(numbers_in(site, orders)) == (done + 2) * ROWS, (tmp_path / "driver.log").read_text()[-2000:]

    for last in (done + 3, done + 5):
        go_on(last)
        # What a driver leaves that dies after the commit, before Spark has noted it.
        noted = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
        noted.unlink()
        noted.with_name(f".{noted.name}.crc").unlink(missing_ok=True)
    check_whole_batches(site, orders, done + 6)


def test_every_row_once_while_the_stream_is_scaled_and_the_coordinator_is_killed(
    spark: SparkSession, site: Site, client: rollbridge.Bridge, orders: str, tmp_path: Path
) -> None:
    query = start_numbers(spark, options_of(site, orders), str(tmp_path / "checkpoint"), ROWS)
    try:
        await_batch(query, 0)
        for _ in range(2):
            active = [segment.id.number for segment in client.admin.history(orders).active.segments]
            client.admin.scale(orders, seal=active, ranges=[(0.0, 1.0)])
            await_batch(query, (query.lastProgress or {})["batchId"] + 2)
        site.stop_coordinator()
        with coordinator(site.cluster, site.root, "victim", tmp_path) as victim:
            await_batch(query, (query.lastProgress or {})["batchId"] + 2)
            victim.kill()
            victim.wait(PATIENCE_S)
            site.start_coordinator()
            await_batch(query, (query.lastProgress or {})["batchId"] + 2)
    finally:
        query.stop()
    check_whole_batches(site, orders, 8)
    assert client.admin.history(orders).active.epoch >= 2


def test_a_task_that_is_killed_in_the_middle_leaves_nothing_behind(
    spark: SparkSession, site: Site, orders: str, tmp_path: Path, topic_prefix: str
) -> None:
    topic = f"{topic_prefix}.stock"
    KafkaClient(site.cluster.bootstrap_servers).topics.create_topics([TopicSpec(name=topic)])
    stock = {"kafka.bootstrap.servers": site.cluster.bootstrap_servers, "topic": topic}
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
    try:
        for form, options in (("rollbridge", options_of(site, orders)), ("kafka", stock)):
            rows = dying_once(spark, tmp_path / f"{form}-died")
            rows.write.format(form).options(**options).mode("append").save()
            assert (tmp_path / f"{form}-died").exists()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert numbers_in(site, orders) == list(range(1000))
    assert len(read_values(site.cluster.bootstrap_servers, topic)) > 1000, "at least once"


def dying_once(spark: SparkSession, mark: Path) -> DataFrame:
    """A thousand rows in two partitions; the process that makes those of the second one dies once, at row 900."""

    def through(batches):  # type: ignore[no-untyped-def]  # pickled by value: it must not need this module
        import os
        import signal

        for batch in batches:
            if 900 in batch.column(0).to_pylist() and not os.path.exists(place):
                open(place, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            # Padded, so that what comes before the death does not wait in a buffer of the process that dies.
            yield batch.append_column("pad", ["x" * 2_000] * batch.num_rows)

    place = str(mark)
    rows = spark.range(0, 1000, 1, 2).mapInArrow(through, "id long, pad string")
    return rows.selectExpr("string(id % 7) AS key", "string(id) AS value")


def test_of_two_queries_with_one_client_name_the_older_one_ends(
    spark: SparkSession, site: Site, orders: str, payments: str, tmp_path: Path, unique_name: Callable[[str], str]
) -> None:
    name = unique_name("client")
    older = start_numbers(spark, options_of(site, orders, client_name=name), str(tmp_path / "older"), ROWS)
    await_batch(older, 1)
    newer = start_numbers(spark, options_of(site, payments, client_name=name), str(tmp_path / "newer"), ROWS)
    try:
        await_batch(newer, 1)
        eventually(lambda: not older.isActive, "the older query ends")
        assert "newer session" in str(older.exception())
        await_batch(newer, 2)
    finally:
        newer.stop()
        older.stop()
    check_whole_batches(site, orders, 1)
    check_whole_batches(site, payments, 2)


def copy_files(spark: SparkSession, options: Mapping[str, str], source: Path, checkpoint: Path, tasks: int = 1) -> None:
    """Write the lines of all files that have come since the last time as one micro-batch; lines of one letter go."""
    query = (
        spark.readStream.text(str(source))
        .where("length(value) > 1")
        .repartition(tasks)
        .writeStream.format("rollbridge")
        .options(**options)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(PATIENCE_S), query.status


def put_numbers(source: Path, numbers: range) -> None:
    source.mkdir(exist_ok=True)
    lines = "".join(f"{number}\n" for number in numbers)
    (source / f"{numbers.start}-{numbers.stop}.txt").write_text(lines)


def tear(checkpoint: Path, *logs: str) -> None:
    """Delete the newest file of logs of a checkpoint."""
    for log in logs:
        newest = max((checkpoint / log).glob("[0-9]*"), key=lambda file: int(file.name))
        newest.unlink()
        newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)


@pytest.mark.parametrize("way", ["restored", "torn"])
def test_a_replay_with_other_rows_ends_the_query_and_writes_nothing(
    spark: SparkSession, site: Site, orders: str, tmp_path: Path, way: str
) -> None:
    options, source, checkpoint = options_of(site, orders), tmp_path / "source", tmp_path / "checkpoint"
    put_numbers(source, range(10, 20))
    copy_files(spark, options, source, checkpoint)
    shutil.copytree(checkpoint, tmp_path / "backup")
    put_numbers(source, range(20, 30))
    copy_files(spark, options, source, checkpoint)
    written = numbers_in(site, orders)
    assert written == list(range(10, 30))

    if way == "restored":
        shutil.rmtree(checkpoint)
        shutil.copytree(tmp_path / "backup", checkpoint)
    else:
        tear(checkpoint, "offsets", "commits")
    put_numbers(source, range(30, 40))  # comes into the micro-batch whose number is taken
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match=r"with 10 records .* comes again with 20 records"):
            copy_files(spark, options, source, checkpoint, tasks=3)
    assert numbers_in(site, orders) == written
    # The way out that the error names.
    for known in ("10-20", "20-30"):
        (source / f"{known}.txt").unlink()
    copy_files(spark, options, source, tmp_path / "another checkpoint")
    assert numbers_in(site, orders) == list(range(10, 40))


def test_a_replay_of_the_same_rows_in_another_order_and_partitioning_goes_on(
    spark: SparkSession, site: Site, orders: str, tmp_path: Path
) -> None:
    options, source, checkpoint = options_of(site, orders), tmp_path / "source", tmp_path / "checkpoint"
    put_numbers(source, range(10, 20))
    put_numbers(source, range(20, 30))
    copy_files(spark, options, source, checkpoint)
    for tasks in (3, 2):
        tear(checkpoint, "offsets", "commits")
        copy_files(spark, options, source, checkpoint, tasks)
        assert numbers_in(site, orders) == list(range(10, 30))
    put_numbers(source, range(30, 40))
    copy_files(spark, options, source, checkpoint)
    assert numbers_in(site, orders) == list(range(10, 40))


def test_a_replay_that_has_no_rows_any_more_is_another_one_and_may_be_trusted(
    spark: SparkSession, site: Site, orders: str, tmp_path: Path
) -> None:
    options, source, checkpoint = options_of(site, orders), tmp_path / "source", tmp_path / "checkpoint"
    put_numbers(source, range(10, 20))
    copy_files(spark, options, source, checkpoint)
    tear(checkpoint, "offsets", "commits")
    put_numbers(source, range(10))  # of which nothing is left
    (source / "10-20.txt").unlink()
    shutil.rmtree(checkpoint / "sources")  # the source forgets its file as well
    with pytest.raises(StreamingQueryException, match="comes again with 0 records"):
        copy_files(spark, options, source, checkpoint)
    copy_files(spark, options | {"replay": "trust"}, source, checkpoint)
    put_numbers(source, range(20, 30))
    copy_files(spark, options, source, checkpoint)
    assert numbers_in(site, orders) == list(range(10, 30))


def test_a_replay_is_compared_wherever_the_driver_has_died(
    spark: SparkSession, site: Site, orders: str, tmp_path: Path
) -> None:
    options, checkpoint = options_of(site, orders), tmp_path / "checkpoint"
    with driver(options, str(checkpoint), tmp_path, **{CRASH: "inside-commit:1"}) as dying:
        assert dying.wait(PATIENCE_S) != 0, "it was to be killed"
    written = numbers_in(site, orders)
    assert written == list(range(2 * ROWS)), (tmp_path / "driver.log").read_text()[-2000:]
    shutil.copytree(checkpoint, tmp_path / "as it was")
    tear(checkpoint, "offsets")
    query = start_numbers(spark, options, str(checkpoint), ROWS + 10)
    eventually(lambda: not query.isActive, "the query ends")
    assert f"with {ROWS} records" in str(query.exception())
    assert numbers_in(site, orders) == written
    query = start_numbers(spark, options, str(tmp_path / "as it was"), ROWS)
    try:
        await_batch(query, 2)
    finally:
        query.stop()
    check_whole_batches(site, orders, 3)


def test_more_tasks_than_a_commit_can_name_are_refused_before_they_write(
    spark: SparkSession, site: Site, client: rollbridge.Bridge, scope: str
) -> None:
    stream, segments, tasks = f"{scope}/wide", 400, 500
    client.admin.create_stream(stream, segments=segments)
    rows = spark.range(0, tasks, 1, tasks).where(f"id IN (0, {tasks - 1})").selectExpr("string(id) AS value")
    writer = rows.write.format("rollbridge").options(**options_of(site, stream)).mode("append")
    with pytest.raises(Exception, match=rf"{tasks} parts with {segments} segments each are 200000 names"):
        writer.save()
    assert site.committed(stream) == []
    writer.option("segments.per.task", "1").save()
    assert numbers_in(site, stream) == [0, tasks - 1]


def _named(name: str, *values: object) -> object:
    return pytest.param(*values, id=name)


@pytest.mark.parametrize(
    ("rows", "more", "complaint"),
    [
        _named("unknown stream", "string(id) AS value", {"stream": "nobody/nothing"}, "no scope nobody"),
        _named("another group", "string(id) AS value", {"group": "other/group"}, "belongs to group"),
        pytest.param(
            "repeat('x', IF(id = 7, 2000000, 1)) AS value",
            {},
            r"row 2 of partition 1 cannot be written: it takes 2000",
            id="too large",
        ),
        _named(
            "null stream",
            "string(id) AS value, IF(id = 3, NULL, '{stream}') AS topic",
            {"stream": "{stream},{other}"},
            "topic is null",
        ),
        _named("wrong type", "id AS value", {}, "column value is bigint"),
        pytest.param(
            "string(id) AS value",
            {"strem": "x", "zookeeper": ""},
            "zookeeper: is missing; strem: is unknown; did you",
            id="options",
        ),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    spark: SparkSession, site: Site, orders: str, ledger: str, rows: str, more: dict[str, str], complaint: str
) -> None:
    names = {"stream": orders, "other": ledger}
    options = options_of(site, orders) | {key: value.format(**names) for key, value in more.items()}
    frame = spark.range(0, 10, 1, 2).selectExpr(*rows.format(**names).split(", ", 1 if "topic" in rows else 0))
    with pytest.raises(Exception, match=complaint):
        frame.write.format("rollbridge").options(**options).mode("append").save()
    assert site.committed(orders) == site.committed(ledger) == []


def test_without_a_coordinator_the_commit_is_not_known_and_the_next_run_finds_out(
    spark: SparkSession, site: Site, orders: str, unique_name: Callable[[str], str]
) -> None:
    options = options_of(site, orders, client_name=unique_name("client")) | {"label": "load"}
    rows = spark.range(0, 10, 1, 2).selectExpr("string(id) AS value")
    site.stop_coordinator()
    try:
        with pytest.raises(Exception, match=r"was asked for, but not answered within 10 s"):
            rows.write.format("rollbridge").options(**options).option("commit.timeout.seconds", "10").mode(
                "append"
            ).save()
    finally:
        site.start_coordinator()
    rows.write.format("rollbridge").options(**options).mode("append").save()
    assert numbers_in(site, orders) == list(range(10))
