"""From the bytes of a fetch to Arrow columns: the same as the slow way, record by record."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from rollbridge.base.attribution import RECORD_HEADER, pack_record_header, unpack_record_header
from rollbridge.base.ids import SegmentId, TransactionId
from rollbridge.base.sn import TRANSACTION_ID_HEADER, pack_transaction_id
from rollbridge.consumer.records import OWN_HEADERS
from rollbridge.errors import ConfigError, InvalidRequestError
from rollbridge.kafka.columns import committed_columns, parse
from rollbridge.kafka.committed import AbortedSpan
from rollbridge.kafka.records import BatchBuilder, Compression, read_records, stamp
from rollbridge.spark.planning import Runs, SegmentPlace
from rollbridge.spark.settings import COMMIT_POSITION, HEADERS, TRANSACTION, check_schema, schema_of
from rollbridge.spark.source_task import TIMESTAMP_MS_MAX, record_batch

TRANSACTIONAL, LOG_APPEND_TIME = 0x10, 0x08
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

own_headers = st.builds(
    lambda epoch, counter, local: (RECORD_HEADER, pack_record_header(TransactionId.of(epoch, counter), local)),
    st.integers(0, 9),
    st.integers(0, 3),
    st.integers(0, (1 << 63) - 1),
)
headers = st.lists(
    st.tuples(st.text(max_size=5) | st.just(RECORD_HEADER), st.none() | st.binary(max_size=30))
    | own_headers
    | st.just((TRANSACTION_ID_HEADER, pack_transaction_id(7))),
    max_size=4,
)
fields = st.none() | st.binary(max_size=200)
rows = st.tuples(st.integers(0, 1 << 45), fields, fields, headers)


@dataclass(frozen=True)
class Fetch:
    raw: bytes
    batches: list[bytes]
    start: int
    aborted: list[AbortedSpan]
    visible: list[bytes]
    end: int


def finished(batch: bytes, base: int, *, attributes: int = 0, max_timestamp: int | None = None) -> bytes:
    """A batch as it stands in a log, with a right checksum."""
    raw = bytearray(batch)
    if max_timestamp is not None:
        struct.pack_into(">q", raw, 35, max_timestamp)
    struct.pack_into(">h", raw, 21, attributes | struct.unpack_from(">h", raw, 21)[0])
    transactional = bool(attributes & TRANSACTIONAL)
    raw = bytearray(stamp(raw, producer_id=5, producer_epoch=0, base_sequence=0, transactional=transactional))
    struct.pack_into(">q", raw, 0, base)
    return bytes(raw)


@st.composite
def fetches(draw: st.DrawFn) -> Fetch:
    base = draw(st.integers(0, 1 << 40))
    begin = base
    batches: list[bytes] = []
    visible: list[bytes] = []
    aborted: list[AbortedSpan] = []
    for records in draw(st.lists(st.lists(rows, min_size=1, max_size=6), max_size=4)):
        builder = BatchBuilder(1 << 20, draw(st.sampled_from([Compression.NONE, Compression.NONE, Compression.ZSTD])))
        for timestamp, key, value, given_headers in records:
            builder.append(timestamp, key, value, given_headers)
        attributes = draw(st.sampled_from([0, LOG_APPEND_TIME, 0]))
        gone = draw(st.booleans()) and not aborted
        if gone or aborted:
            attributes |= TRANSACTIONAL
            aborted = aborted or [AbortedSpan(5, base)]
        batch = finished(
            builder.build(), base, attributes=attributes, max_timestamp=99 if attributes & LOG_APPEND_TIME else None
        )
        batches.append(batch)
        if not attributes & TRANSACTIONAL:
            visible.append(batch)
        base += len(records) + draw(st.integers(0, 2))
    return Fetch(b"".join(batches), batches, draw(st.integers(begin, base)), aborted, visible, base)


@given(fetches(), st.integers(0, 40))
def test_columns_are_what_the_records_say(fetch: Fetch, cut: int) -> None:
    wanted = [record for batch in fetch.visible for record in read_records(batch) if record.offset >= fetch.start]
    records, end = committed_columns(
        fetch.raw + (fetch.batches[0][:cut] if fetch.batches else b""), fetch.start, fetch.aborted
    )
    assert end <= max(fetch.end, fetch.start)
    schema = schema_of([*HEADERS, *TRANSACTION, *COMMIT_POSITION])
    middle = fetch.start + 2
    runs = Runs(np.array([middle]), np.array([middle + 3]), np.array([77]))
    place = SegmentPlace("s/t", "s.t.segment-3.epoch-2", SegmentId.of(3, 2), 1000, runs)
    batch = record_batch(records, place, check_schema(schema), to_arrow_schema(schema, timezone="UTC"), fail=True)
    batch.validate(full=True)
    found = batch.to_pylist()
    assert len(found) == len(wanted)
    for row, record in zip(found, wanted, strict=True):
        append_time = row["timestampType"] == 1
        source = next((value for name, value in record.headers if name == RECORD_HEADER and value is not None), None)
        identity = None if source is None else _unpacked(source)
        assert row == {
            "key": record.key,
            "value": record.value,
            "topic": "s.t.segment-3.epoch-2",
            "partition": 0,
            "offset": record.offset,
            "timestamp": EPOCH + timedelta(milliseconds=99 if append_time else record.timestamp),
            "timestampType": row["timestampType"],
            "headers": [{"key": n, "value": v} for n, v in record.headers if n not in OWN_HEADERS] or None,
            "stream": "s/t",
            "segment": 3,
            "epoch": 2,
            "sequenceId": 1000 + record.offset,
            "transactionId": None if identity is None else str(identity[0]),
            "localSequence": None if identity is None else identity[1],
            "commitPosition": 77 if middle <= record.offset < middle + 3 else None,
        }


def _unpacked(value: bytes) -> tuple[TransactionId, int] | None:
    try:
        return unpack_record_header(value)
    except InvalidRequestError:
        return None


@pytest.mark.parametrize("far", [1_790_000_000_000_000_000, (1 << 63) - 1, TIMESTAMP_MS_MAX + 1, -TIMESTAMP_MS_MAX - 1])
def test_a_time_that_sparks_type_does_not_hold_is_an_error_that_names_the_record(far: int) -> None:
    def columns(far: int, *names: str) -> Any:
        builder = BatchBuilder(1 << 20)
        for time in (5, far):
            builder.append(time, b"key", b"value", ())
        records, _ = committed_columns(finished(builder.build(), 40), 40, [])
        schema = StructType([field for field in schema_of(()) if field.name in names])
        place = SegmentPlace("s/t", "orders", SegmentId.of(0, 0), None, None)
        return record_batch(records, place, names, to_arrow_schema(schema, timezone="UTC"), fail=True)

    with pytest.raises(InvalidRequestError, match=rf"offset 41 of topic orders.*time {far} ms"):
        columns(far, "value", "timestamp")
    assert columns(far, "value").num_rows == 2, "the remedy: a schema without the column"
    latest = TIMESTAMP_MS_MAX if far > 0 else -TIMESTAMP_MS_MAX
    assert columns(latest, "timestamp").column(0).cast(pa.int64()).to_pylist() == [5_000, latest * 1_000]


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60)), max_size=8))
def test_runs_of_records_of_one_length_are_found_as_they_are(runs: list[tuple[int, int]]) -> None:
    builder = BatchBuilder(1 << 20)
    sizes = [size for size, count in runs for _ in range(count)]
    for number, size in enumerate(sizes):
        builder.append(0, b"%d" % (number % 10), bytes(size))
    if not sizes:
        return
    raw = finished(builder.build(), 7)
    records, _ = committed_columns(raw, 0, [])
    assert (records.value.end - records.value.start).tolist() == sizes
    assert records.offset.tolist() == list(range(7, 7 + len(sizes)))


def test_nothing_makes_no_rows() -> None:
    schema = schema_of([*HEADERS, *TRANSACTION, *COMMIT_POSITION])
    place = SegmentPlace("s/t", "topic", SegmentId.of(0, 0), None)
    found = record_batch(
        parse(b"", []), place, check_schema(schema), to_arrow_schema(schema, timezone="UTC"), fail=True
    )
    assert found.num_rows == 0


def test_a_schema_of_the_user_names_columns_that_there_are_as_what_they_are() -> None:
    wanted = StructType([StructField("VALUE", schema_of([])["value"].dataType), StructField("offset", LongType())])
    assert check_schema(wanted) == ["value", "offset"]
    with pytest.raises(ConfigError) as caught:
        check_schema(StructType([StructField("value", StringType()), StructField("price", LongType())]))
    assert "column value is of type binary, not string" in str(caught.value)
    assert "there is no column price" in str(caught.value)
