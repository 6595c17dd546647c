"""Batches that are built from columns are, byte for byte, what the builder of single records makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import example, given
from hypothesis import strategies as st

from rollbridge.base.attribution import RECORD_HEADER, pack_record_header, pack_run
from rollbridge.base.ids import PART_MAX, TransactionId
from rollbridge.kafka.committed import attributed
from rollbridge.kafka.records import BatchBuilder, Compression, parse_header, read_records

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")

from rollbridge.kafka.columns import (  # noqa: E402
    Rows,
    batch_bytes,
    encode_batch,
    encode_headers,
    record_bytes,
)

TRANSACTION = TransactionId.of(3, 1 << 70)
NOW_MS = 1_790_000_000_000
_bytes = st.none() | st.binary(max_size=200)
_headers = st.lists(st.tuples(st.text(max_size=5).filter(lambda name: name != RECORD_HEADER), _bytes), max_size=3)
_times = st.integers(0, 1 << 41) | st.just(NOW_MS)
Record = tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]


def rows_of(records: list[Record], first: int, *, headers: bool = True) -> Rows:
    return Rows.of(
        pa.array([record[0] for record in records], pa.binary()),
        pa.array([record[1] for record in records], pa.binary()),
        np.arange(first, first + len(records), dtype=np.int64),
        np.array([record[2] for record in records], np.int64),
        encode_headers([record[3] for record in records]) if headers else None,
    )


def built(records: list[Record], first: int, part: int, *, each: bool = False) -> bytes:
    builder = BatchBuilder(1 << 30)
    for count, (key, value, timestamp, headers) in enumerate(records, first):
        own = [(RECORD_HEADER, pack_record_header(TRANSACTION, part << 40 | count))]
        if not each:
            run = pack_run(TRANSACTION.bytes, part << 40 | first, len(records), b"\1" * (len(records) - 1))
            own = [(RECORD_HEADER, run)] if count == first else []
        assert builder.append(timestamp, key, value, [*headers, *own])
    return builder.build()


@given(
    st.lists(st.tuples(_bytes, _bytes, _times, _headers), min_size=1, max_size=30),
    st.integers(0, 1 << 39),
    st.integers(0, PART_MAX),
    st.booleans(),
)
@example([(b"k", b"v" * 5_000, NOW_MS, [])] * 200, 0, 1, True)  # offset deltas and lengths of different sizes
@example([(b"k", b"v" * 5_000, NOW_MS, [])] * 200, 0, 1, False)
@example([(b"k" * size, None, NOW_MS + size, []) for size in (0, 63, 64, 8191, 8192)], 1, PART_MAX, False)
@example([(b"k", b"v", NOW_MS, [("h", b"")] * count) for count in (63, 64, 63, 64)], 0, 0, False)
def test_a_batch_is_what_the_builder_makes(records: list[Record], first: int, part: int, each: bool) -> None:
    rows = rows_of(records, first)
    batch = encode_batch(rows, TRANSACTION.bytes, part, Compression.NONE, each=each)
    assert batch == built(records, first, part, each=each)
    assert len(batch) - 61 <= int(batch_bytes(rows, each=each).sum()) + (0 if each else OWN_MAX)
    assert [record_size_of(record) for record in records] == record_bytes(rows).tolist()


@given(st.lists(st.tuples(_bytes, _bytes, _times, st.just([])), min_size=1, max_size=30))
def test_rows_without_headers_take_a_shorter_way_to_the_same(records: list[Record]) -> None:
    batch = encode_batch(rows_of(records, 5, headers=False), TRANSACTION.bytes, 2, Compression.NONE)
    assert batch == built(records, 5, 2)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 66, 8_192, 8_193, 9_000])
@pytest.mark.parametrize("even", [True, False])
def test_offset_deltas_of_every_size_have_their_place(count: int, even: bool) -> None:
    def record(number: int) -> Record:
        if even:
            return b"key-%04d" % number, b"v" * 100, NOW_MS, []
        key = None if number % 7 == 3 else b"k" * (number % 90)
        value = None if number % 11 == 5 else b"v" * (number % 150)
        return key, value, NOW_MS + number % 200 - 100, []

    records = [record(number) for number in range(count)]
    batch = encode_batch(rows_of(records, 5, headers=False), TRANSACTION.bytes, 2, Compression.NONE)
    assert batch == built(records, 5, 2)


def record_size_of(record: Record) -> int:
    """What the limits of streams count: key, value and headers, ours included."""
    key, value, _, headers = record
    own = (RECORD_HEADER, pack_record_header(TRANSACTION, 0))
    return int(DefaultRecordBatchBuilder.size_of(key, value, [*headers, own]))


OWN_MAX = 64
"""What the first header of a batch takes at most, if all local sequence numbers follow each other."""


@given(st.lists(st.integers(1, 1 << 20), max_size=40), st.integers(0, PART_MAX))
def test_local_sequence_numbers_may_have_gaps(steps: list[int], part: int) -> None:
    counts = np.cumsum([7, *steps])
    rows = rows_of([(b"k", b"v", NOW_MS, [])] * len(counts), 0, headers=False)
    batch = encode_batch(replace(rows, counts=counts), TRANSACTION.bytes, part, Compression.NONE)
    found = [dict(record.headers)[RECORD_HEADER] for record in attributed(read_records(batch))]
    assert found == [pack_record_header(TRANSACTION, part << 40 | count) for count in counts.tolist()]


@pytest.mark.parametrize("codec", list(Compression))
def test_every_codec_reads_back(codec: Compression) -> None:
    records: list[Record] = [(b"key-%d" % n, b"value" * n, NOW_MS + n, []) for n in range(300)]
    batch = encode_batch(rows_of(records, 0, headers=False), TRANSACTION.bytes, 1, codec)
    assert parse_header(batch).compression == codec
    found = [(record.key, record.value, record.timestamp) for record in read_records(batch)]
    assert found == [record[:3] for record in records]


def test_rows_are_taken_sliced_and_joined_with_all_their_columns() -> None:
    records: list[Record] = [(b"%d" % n, b"v", NOW_MS + n, [("h", b"%d" % n)] * (n % 3)) for n in range(20)]
    rows = rows_of(records, 100)
    odd, even = rows.take(np.arange(1, 20, 2)), rows.take(np.arange(0, 20, 2))
    again = Rows.together([odd.slice(0, 4), odd.slice(4, 10), even])
    order = [*range(1, 20, 2), *range(0, 20, 2)]
    assert again.counts.tolist() == [100 + place for place in order]
    assert again.sizes.tolist() == rows.sizes[order].tolist()
    found = list(read_records(encode_batch(again, TRANSACTION.bytes, 1, Compression.NONE, each=True)))
    assert [(record.key, record.headers[:-1]) for record in found] == [
        (records[place][0], records[place][3]) for place in order
    ]
