"""The sink without Spark: options, columns, names of the work, and the way of rows to their segments."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from xxhash import xxh64_intdigest

from bridge.tests.refusals import raises_code
from rollbridge.base.ids import TransactionId
from rollbridge.buffer.frames import FrameHeader, unpack_header
from rollbridge.client.frame_writer import PartWriter
from rollbridge.client.futures import Completion, FrameLimits, PartStream
from rollbridge.client.results import PartHandle
from rollbridge.config import ConnectionSettings
from rollbridge.errors import ConfigError, InvalidNameError, InvalidRequestError, LocalEnvironmentError
from rollbridge.kafka.records import Compression, read_records
from rollbridge.metadata.client_sessions import CooperativeContent
from rollbridge.metadata.errors import ZooKeeperDeniedError
from rollbridge.stream.config import TopicLimits
from rollbridge.stream.keyspace import HASH_SEED, KeySpace
from rollbridge.stream.names import GroupName
from rollbridge.stream.routing import Route, hash_bounds

pa = pytest.importorskip("pyarrow")
types = pytest.importorskip("pyspark.sql.types")

from rollbridge.spark.datasource import (  # noqa: E402
    RollbridgeSource,
    RollbridgeTransactionsSource,
)
from rollbridge.spark.settings import (  # noqa: E402
    OptionReader,
    SparkSettings,
    read_settings,
)
from rollbridge.spark.sink import (  # noqa: E402
    BATCH_ID,
    QUERY_ID,
    RUN_ID,
    PartitionWritten,
    SinkJob,
    _commit,
    batch_writer,
    stream_writer,
    work_of_job,
    work_of_query,
)
from rollbridge.spark.sink_records import (  # noqa: E402
    Columns,
    PartitionReader,
)
from rollbridge.spark.sink_task import PartitionWriter  # noqa: E402
from rollbridge.spark.worker import Kept  # noqa: E402

NEEDED = {"kafka.bootstrap.servers": "k:9092", "zookeeper": "z:2181", "stream": "sales/orders"}
STREAMS = ("sales/orders", "sales/items")
HEADERS = "array<struct<key:string,value:binary>>"


TYPES = {
    "string": types.StringType(),
    "binary": types.BinaryType(),
    "varchar(9)": types.VarcharType(9),
    "int": types.IntegerType(),
    "double": types.DoubleType(),
    "date": types.DateType(),
    "timestamp": types.TimestampType(),
    "map<string,string>": types.MapType(types.StringType(), types.StringType()),
    HEADERS: types.ArrayType(types.StructType().add("key", types.StringType()).add("value", types.BinaryType())),
}


def schema(**columns: str) -> Any:
    return types.StructType([types.StructField(name, TYPES[kind]) for name, kind in columns.items()])


def settings(**more: str) -> SparkSettings:
    reader = OptionReader({**NEEDED, **{name.replace("_", "."): value for name, value in more.items()}})
    found = read_settings(reader)
    reader.finish()
    assert found is not None
    return found


@pytest.mark.parametrize("release", ["4.0.2", "4.1.1", "3.5.7", "4.1.0.dev0"])
@pytest.mark.parametrize("ask", ["schema", "reader", "streamReader", "writer", "streamWriter"])
def test_a_pyspark_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, release: str, ask: str) -> None:
    monkeypatch.setattr("pyspark.__version__", release)
    columns = schema(value="string")
    arguments = {"schema": (), "reader": (columns,), "streamReader": (columns,)}.get(ask, (columns, False))
    for form in (RollbridgeSource, RollbridgeTransactionsSource):
        if form is RollbridgeSource or "riter" not in ask:
            with pytest.raises(
                LocalEnvironmentError, match=rf"need PySpark 4\.2 or later, and this is {release}.*nothing"
            ):
                getattr(form(NEEDED), ask)(*arguments)


@pytest.mark.parametrize("release", ["4.2.0", "4.3.0", "5.0.0", "4.10.1"])
def test_a_pyspark_that_is_new_enough_is_taken(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr("pyspark.__version__", release)
    assert RollbridgeSource(NEEDED).writer(schema(value="string"), False) is not None


def test_connections_are_shared_by_those_who_connect_to_the_same_as_the_same(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("one")
    plain = partial(ConnectionSettings, bootstrap_servers="k:9092", zookeeper="z:2181")
    tls = {"security.protocol": "SSL", "ssl.ca.location": str(ca)}
    alice, bob = ({"digest.username": name, "digest.password": "hush"} for name in ("alice", "bob"))
    connections = [
        plain(),
        plain(kafka=tls),
        plain(zookeeper_security=alice),
        plain(zookeeper_security=bob),
        plain(zookeeper_security={**bob, "digest.password": "rotated"}),
        plain(zookeeper_root="/other"),
    ]
    known = [item.identity() for item in connections]
    assert len(set(known)) == len(known)
    assert plain(client_name="other").identity() == known[0], "names are given to each work"
    ca.write_text("two")
    assert [item.identity() for item in connections] == [known[0], connections[1].identity(), *known[2:]]
    assert connections[1].identity() != known[1], "somebody goes on with a certificate that was replaced"


def test_of_what_is_kept_the_least_used_is_closed_and_nobody_is_given_what_is_another_one_s() -> None:
    closed: list[str] = []

    class Connection:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    kept: Kept[Connection] = Kept()
    for name in ("a", "b", "c", "d", "a", "e", "f"):
        assert kept.get(name, lambda name=name: Connection(name)).name == name  # type: ignore[misc]
    assert closed == ["b", "c"]
    kept.close()
    assert sorted(closed) == ["a", "b", "c", "d", "e", "f"]


def test_what_fails_after_the_commit_does_not_fail_the_job(caplog: pytest.LogCaptureFixture) -> None:
    class Denied:
        asked = 0

        def client(self, _: SinkJob) -> Denied:
            return self

        commit_timeout = None

        def commit(self, *_: object, **__: object) -> Any:
            return SimpleNamespace(records=1)

        def note_committed(self, *_: object, **__: object) -> None:
            self.asked += 1
            raise ZooKeeperDeniedError("the node is another one's", path="/a", identity="bob")

    target = Denied()
    ticket: Any = SimpleNamespace(transaction="t")
    handle: Any = SimpleNamespace()
    _commit(cast("Any", target), [PartitionWritten(SinkJob("c", "s", "q", 3), ticket, handle)])
    assert target.asked == 1
    assert "sink.note_failed work=[" in caplog.text


def test_everything_that_is_wrong_with_the_options_is_named_at_once() -> None:
    options = {
        "stream": "sales/orders,sales/orders,..",
        "group": "no group",
        "client.name": "spaces in it",
        "compression": "zip",
        "includeheaders": "maybe",
        "lease.hours": "1000",
        "commit.timeout.seconds": "soon",
        "kafka.plugin.library.paths": "/tmp/x.so",
        "zookeper.root": "/x",
        "checkpointlocation": "/fine",
    }
    with pytest.raises(ConfigError) as refused:
        stream_writer(options, schema(value="string"), overwrite=False)
    for fault in (
        "kafka.bootstrap.servers: is missing",
        "zookeeper: is missing",
        "stream: ",
        "is named twice",
        "group: ",
        "client.name: ",
        "compression: unknown compression 'zip'",
        "includeHeaders: 'maybe' is not one of true, false",
        "lease.hours: 1000 is more than 168",
        "commit.timeout.seconds: 'soon' is not a whole number",
        "kafka.plugin.library.paths: is not a security setting",
        "zookeper.root: is unknown; did you mean zookeeper.root?",
    ):
        assert fault in str(refused.value)
    assert "checkpointlocation" not in str(refused.value)


def test_settings_are_read_and_secrets_are_not_shown() -> None:
    found = settings(
        stream="sales/orders, sales/items",
        group="sales/default",
        client_name="loader",
        compression="ZSTD",
        includeHeaders="False",
        kafka_security_protocol="SASL_PLAINTEXT",
        kafka_sasl_mechanism="PLAIN",
        kafka_sasl_username="me",
        kafka_sasl_password="hunter2",
    )
    assert found.streams == STREAMS
    assert found.group == GroupName("sales", "default")
    assert (found.client_name, found.include_headers) == ("loader", False)
    assert found.options.codec is Compression.ZSTD
    assert found.connected_as("other").client_name == "other"
    assert found.connection.kafka["sasl.password"] == "hunter2"
    assert "hunter2" not in repr(found)
    assert settings().include_headers is None


def test_a_batch_is_appended_and_its_label_is_one_of_a_client() -> None:
    with pytest.raises(InvalidRequestError, match="never overwritten"):
        batch_writer(NEEDED, schema(value="string"), overwrite=True)
    with pytest.raises(ConfigError, match=r"label: needs client\.name"):
        batch_writer({**NEEDED, "label": "x"}, schema(value="string"), overwrite=False)
    with pytest.raises(ConfigError, match="label: is unknown"):
        stream_writer({**NEEDED, "label": "x", "client.name": "c"}, schema(value="string"), overwrite=False)


@pytest.mark.parametrize(
    ("columns", "streams", "complaint"),
    [
        ({"key": "string"}, 1, "column value is missing; there are key"),
        ({"value": "int", "key": "double"}, 1, "column value is int.*column key is double, but string or binary"),
        ({"value": "string", "headers": "map<string,string>"}, 1, "column headers is map<string,string>, but array"),
        ({"value": "string", "timestamp": "date"}, 1, "column timestamp is date, but timestamp is"),
        ({"value": "string", "VALUE": "string"}, 1, "column value is there twice"),
        ({"value": "string"}, 2, "column topic is missing, which says for each row to which of sales/orders, sales/it"),
        ({"value": "string", "topic": "binary"}, 2, "column topic is binary"),
        ({"value": "string", "partition": "string"}, 1, "column partition is string, but int is expected"),
    ],
)
def test_columns_of_other_types_are_refused(columns: dict[str, str], streams: int, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        Columns.of(schema(**columns), STREAMS[:streams], include_headers=True)


def test_columns_are_found_whatever_else_there_is() -> None:
    whole = schema(offset="int", Key="binary", value="varchar(9)", headers=HEADERS, timestamp="timestamp", topic="int")
    assert Columns.of(whole, STREAMS[:1], include_headers=True) == Columns(2, 1, 3, 4, None)
    assert Columns.of(schema(value="string", Partition="int"), STREAMS[:1], include_headers=True).partition == 1
    assert Columns.of(whole, STREAMS[:1], include_headers=False).headers is None


def test_a_query_is_known_by_its_id_its_run_and_its_batch() -> None:
    properties = {QUERY_ID: "q-1", BATCH_ID: "17", RUN_ID: "run-9"}
    assert work_of_query(properties.get, None, "x") == SinkJob("spark-q-1", "run-9", "q-1", 17)
    assert work_of_query(properties.get, "mine", "x").client_name == "mine"
    del properties[RUN_ID]
    assert work_of_query(properties.get, None, "stand-in").session == "stand-in"
    with pytest.raises(InvalidRequestError, match="Spark does not say"):
        work_of_query(lambda _: None, None, "x")


def test_a_job_is_something_of_its_own_unless_it_has_a_label() -> None:
    one, other = work_of_job(None, ""), work_of_job(None, "")
    assert one.once
    assert len({one.client_name, other.client_name, one.series, other.series}) == 4
    first, again = work_of_job("loader", "2013"), work_of_job("loader", "2013")
    assert (first.client_name, first.series, first.number, first.once) == ("loader", "2013", 0, False)
    assert first.session != again.session, "the later of two jobs with one name fences the other"
    with pytest.raises(InvalidNameError):
        work_of_job("no name", "")


class HeldPart:
    """A part whose frames are kept here instead of being sent."""

    def __init__(
        self,
        segments: int,
        *,
        record_bytes_max: int = 100_000,
        frame_bytes: int = 20_000,
        limits: TopicLimits | None = None,
    ) -> None:
        self.frames: list[tuple[int, FrameHeader, bytes]] = []
        self.id, self.number = TransactionId.of(0, 99), 3
        self._writing, self.completion = self, Completion(self.id.bytes)
        self.runtime = SimpleNamespace(limits=FrameLimits(frame_bytes=frame_bytes))
        cuts = [place / segments for place in range(segments)]
        routes = [
            Route(
                stream,
                0,
                GroupName("sales", "default"),
                tuple(range(segments)),
                hash_bounds(cuts),
                "b",
                1,
                record_bytes_max,
                KeySpace(),
                topic="orders" if limits is not None else "",
                limits=limits,
            )
            for stream in STREAMS
        ]
        self.writer = PartWriter(self.completion, self.number, routes, self.runtime.limits, self.emit)

    def emit(self, place: int, key: bytes, value: bytes) -> None:
        header = unpack_header(key)
        assert header is not None
        self.frames.append((place, header, value))

    def part_stream(self, stream: str) -> PartStream:
        return self.writer.part_streams[stream]

    def put_batch(self, *arguments: Any) -> None:
        self.writer.put_batch(*arguments)

    def finish(self) -> PartHandle:
        return PartHandle(self.id, self.number, tuple(self.writer.pieces()))

    def found(self) -> dict[tuple[int, int], list[tuple[bytes | None, bytes | None]]]:
        """Key and value of each record, by stream and segment, in order."""
        found: dict[tuple[int, int], list[tuple[bytes | None, bytes | None]]] = {}
        for place, header, value in self.frames:
            records = [(record.key, record.value) for record in read_records(value)]
            assert len(records) == header.records
            found.setdefault((place, header.segment), []).extend(records)
        return found


def batch(count: int, first: int = 0, **more: Any) -> Any:
    rows = range(first, first + count)
    return pa.RecordBatch.from_pydict(
        {"key": [f"k{row % 13}" for row in rows], "value": [b"%d" % row for row in rows], **more}
    )


def writer(part: Any, *, streams: int = 1) -> PartitionWriter:
    columns = Columns(1, 0, None, None, 2 if streams > 1 else None)
    return PartitionWriter(part, PartitionReader(columns, STREAMS[:streams]), STREAMS[:streams])


@pytest.mark.parametrize("segments", [1, 3])
def test_rows_reach_the_segments_that_the_client_would_choose(segments: int) -> None:
    ours, usual = HeldPart(segments), HeldPart(segments)
    sink = writer(ours)
    for first in range(0, 2_000, 500):
        rows = batch(500, first)
        sink.write(rows)
        for key, value in zip(rows.column(0).to_pylist(), rows.column(1).to_pylist(), strict=True):
            usual.writer.write(STREAMS[0], key.encode(), value, (), None)
    handle = sink.finish()
    usual.writer.cut_all()
    assert ours.found() == usual.found()
    assert handle.pieces == usual.finish().pieces
    assert max(len(value) for _, _, value in ours.frames) <= 20_000


def test_rows_that_an_adopted_topic_does_not_take_are_named() -> None:
    part: Any = HeldPart(2, limits=TopicLimits(5_000, is_compacted=True, before_ms=1_000))
    sink = writer(part)
    sink.write(batch(500))
    with raises_code("row-refused", match="without a key") as refused:
        sink.write(pa.RecordBatch.from_pydict({"key": ["a", "b", None], "value": [b"1", b"2", b"3"]}))
    assert vars(refused.value)["row"] == 502
    old = pa.array([datetime(2026, 1, 1, tzinfo=UTC)], pa.timestamp("us", tz="UTC"))
    timed = PartitionWriter(part, PartitionReader(Columns(1, 0, None, 2, None), STREAMS[:1]), STREAMS[:1])
    with raises_code("row-refused", match=r"before\.max\.ms"):
        timed.write(pa.RecordBatch.from_pydict({"key": ["a"], "value": [b"1"], "timestamp": old}))
    sink.finish()
    assert max(len(value) for _, _, value in part.frames) <= 5_000
    assert sum(map(len, part.found().values())) == 500


def test_a_row_of_an_adopted_topic_goes_to_the_partition_that_it_names() -> None:
    part: Any = HeldPart(3, limits=TopicLimits(5_000))
    columns = Columns(1, 0, None, None, None, 2)
    sink = PartitionWriter(part, PartitionReader(columns, STREAMS[:1]), STREAMS[:1])
    named = [None if row % 4 == 3 else row % 4 for row in range(100)]
    sink.write(batch(100, partition=pa.array(named, pa.int32())))
    for at, wrong in enumerate((3, -1)):
        with raises_code("row-refused", match=f"its partition is {wrong}, but topic orders has 3") as refused:
            sink.write(batch(2, partition=pa.array([None, wrong], pa.int32())))
        assert vars(refused.value)["row"] == 101 + 2 * at
    usual = HeldPart(3)
    for row in range(3, 100, 4):
        usual.writer.write(STREAMS[0], b"k%d" % (row % 13), b"%d" % row, (), None)
    usual.writer.cut_all()
    sink.finish()
    wanted = {place: {value for _, value in records} for place, records in usual.found().items()}
    for row, partition in enumerate(named):
        if partition is not None:
            wanted.setdefault((0, partition), set()).add(b"%d" % row)
    assert {place: {value for _, value in records} for place, records in part.found().items()} == wanted


@pytest.mark.parametrize("segments", [1, 3])
def test_a_partition_is_refused_where_no_topic_is_adopted(segments: int) -> None:
    part: Any = HeldPart(segments)
    columns = Columns(1, 0, None, None, None, 2)
    sink = PartitionWriter(part, PartitionReader(columns, STREAMS[:1]), STREAMS[:1])
    sink.write(batch(2, partition=pa.nulls(2, pa.int32())))
    with raises_code("row-refused", match=r"its partition is 0, but sales/orders .*drop\('partition'\)") as refused:
        sink.write(batch(2, 2, partition=pa.array([None, 0], pa.int32())))
    assert vars(refused.value)["row"] == 3


def test_every_row_goes_to_the_stream_that_it_names() -> None:
    part = HeldPart(2)
    sink = writer(part, streams=2)
    sink.write(batch(100, topic=[STREAMS[row % 2] for row in range(100)]))
    sink.finish()
    found = part.found()
    for stream in (0, 1):
        values = {value for place, records in found.items() if place[0] == stream for _, value in records}
        assert values == {b"%d" % row for row in range(stream, 100, 2)}
    for name, what in ((None, "null"), ("sales/others", "'sales/others'")):
        with raises_code("row-refused", match=f"its topic is {what}") as refused:
            sink.write(batch(2, topic=[STREAMS[0], name]))
        assert vars(refused.value)["row"] == 101


def test_rows_without_a_key_are_spread_and_large_ones_get_frames_of_their_own() -> None:
    part = HeldPart(2)
    sink = writer(part)
    for _ in range(4):
        sink.write(pa.RecordBatch.from_pydict({"key": pa.nulls(10, pa.string()), "value": [b"x" * 15_000] * 10}))
    sink.finish()
    assert {place: len(records) for place, records in part.found().items()} == {(0, 0): 20, (0, 1): 20}
    assert all(header.records == 1 for _, header, _ in part.frames)


LOW = (1 << 64) - 1


def content(*batches: Any, columns: Columns | None = None, streams: int = 1) -> CooperativeContent:
    reader = PartitionReader(columns or Columns(1, 0, None, None, None), STREAMS[:streams])
    for rows in batches:
        reader.read(rows)
    return reader.content


def test_the_digest_of_rows_is_what_it_always_was() -> None:
    # What an older version has put on record is compared with what a newer one reads.
    def mixed(number: int) -> int:
        number = number + 0x9E3779B97F4A7C15 & LOW
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & LOW
        number = (number ^ number >> 27) * 0x94D049BB133111EB & LOW
        return number ^ number >> 31

    def slow(key: bytes, value: bytes) -> int:
        stream, of_key, of_value = (xxh64_intdigest(item, HASH_SEED) for item in (STREAMS[0].encode(), key, value))
        return mixed(mixed(mixed(of_key ^ stream) ^ of_value))

    digest = sum(slow(b"k%d" % (row % 13), b"%d" % row) for row in range(20)) & LOW
    assert content(batch(20)) == CooperativeContent(20, digest)
    assert digest == 0x6BB63003000FA8FE


def test_the_digest_of_rows_depends_on_them_only() -> None:
    whole = content(batch(100))
    backwards = pa.RecordBatch.from_pydict({n: batch(100).column(n)[::-1] for n in ("key", "value")})
    assert content(backwards) == content(batch(30), batch(70, 30)) == whole
    assert content(batch(60, 40)) + content(batch(40)) == whole
    as_text = pa.RecordBatch.from_pydict(
        {"key": batch(100).column(0).cast(pa.large_binary()), "value": batch(100).column(1).cast(pa.string())}
    )
    assert content(as_text) == whole
    named = pa.nulls(100, HEADER_COLUMN)
    assert content(batch(100, headers=named), columns=Columns(1, 0, 2, None, None)) == whole, "no headers are none"


HEADER_COLUMN = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
ONE = {"key": ["k"], "value": [b"v"]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"value": [b"w"]}),
        ({}, {"key": ["l"]}),
        ({}, {"key": ["v"], "value": [b"k"]}),
        ({"key": ["kv"], "value": [b""]}, {"key": ["k"], "value": [b"v"]}),
        ({"value": [b""]}, {"value": [None]}),
        ({"key": [""]}, {"key": [None]}),
        ({"key": ["a", "b"], "value": [b"1", b"2"]}, {"key": ["a", "b"], "value": [b"2", b"1"]}),
        ({"key": ["a"], "value": [b"1"]}, {"key": ["a", "a"], "value": [b"1", b"1"]}),
        ({"key": ["a", "a", "b"], "value": [b"1"] * 3}, {"key": ["a", "b", "b"], "value": [b"1"] * 3}),
        ({"key": ["a", ""], "value": [b"1"] * 2}, {"key": ["a", None], "value": [b"1"] * 2}),
        ({}, {"headers": [[{"key": "h", "value": b"1"}]]}),
        ({"headers": [[{"key": "h", "value": b"1"}]]}, {"headers": [[{"key": "h", "value": b"2"}]]}),
        ({"timestamp": [1_000]}, {"timestamp": [2_000]}),
        ({"timestamp": [None]}, {"timestamp": [2_000]}),
        ({"topic": [STREAMS[0]]}, {"topic": [STREAMS[1]]}),
    ],
)
def test_rows_that_differ_in_anything_that_is_written_have_another_digest(one: Any, other: Any) -> None:
    def of(change: dict[str, Any]) -> CooperativeContent:
        values = {**ONE, **change}
        rows = len(values["key"])
        values = {"headers": [None] * rows, "timestamp": [1_000] * rows, "topic": [STREAMS[0]] * rows} | values
        kinds = {"headers": HEADER_COLUMN, "timestamp": pa.timestamp("us", "UTC"), "value": pa.binary()}
        made = {name: pa.array(values[name], kinds.get(name, pa.string())) for name in values}
        order = ("key", "value", "headers", "timestamp", "topic")
        return content(
            pa.RecordBatch.from_pydict({name: made[name] for name in order}), columns=Columns(1, 0, 2, 3, 4), streams=2
        )

    assert of(one) != of(other)
    assert of(one) == of(dict(reversed(one.items())))


def test_a_time_that_is_not_named_is_no_part_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.RecordBatch.from_pydict({"key": ["k"], "value": [b"v"], "timestamp": pa.nulls(1, pa.timestamp("us"))})
    found = set()
    for now_s in (1_000.0, 2_000.0):
        monkeypatch.setattr("rollbridge.spark.sink_records.wall_ms", lambda now_s=now_s: round(now_s * 1000))
        found |= {content(rows, columns=Columns(1, 0, None, 2, None)), content(rows)}
    assert len(found) == 2, "one for each of both shapes"


def test_a_row_over_the_limit_is_named() -> None:
    sink = writer(HeldPart(1, record_bytes_max=1_000))
    sink.write(batch(10))
    with raises_code("row-refused", match=r"it takes 10\d\d bytes .* limit of 1000 of stream sales/orders") as refused:
        sink.write(pa.RecordBatch.from_pydict({"key": ["k", "k"], "value": [b"", b"x" * 1_000]}))
    assert vars(refused.value)["row"] == 11


def test_headers_and_times_that_can_not_be_are_refused() -> None:
    columns = Columns(0, None, 1, 2, None)
    kinds = [
        ("value", pa.large_string()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
    shape = pa.schema([*kinds, ("timestamp", pa.timestamp("us", "UTC"))])

    def rows(headers: Any, time_us: int | None) -> Any:
        whole = pa.RecordBatch.from_pydict({"value": ["v"], "headers": [headers], "timestamp": [time_us]}, shape)
        return columns.rows(whole, 5, 777)

    fine = rows([{"key": "h", "value": None}], None)
    assert (fine.timestamps.tolist(), fine.header_counts.tolist(), fine.values.to_pylist()) == ([777], [1], [b"v"])
    assert rows(None, 5_000).timestamps.tolist() == [5]
    for headers, time_us, complaint in (
        ([{"key": None, "value": b""}], 0, "has no name"),
        ([{"key": "h", "value": b""}, None], 0, "one of its headers is null"),
        ([{"key": "rollbridge", "value": b""}], 0, "rollbridge's own"),
        ([], -1_000_000, "lies before 1970"),
    ):
        with raises_code("row-refused", match=complaint) as refused:
            rows(headers, time_us)
        assert vars(refused.value)["row"] == 5
