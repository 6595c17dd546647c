"""Header names that are not UTF-8 are read and written again byte for byte, all else as our usual reader reads it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.errors import CorruptDataError
from rollbridge.kafka.batches import HEADER_BYTES, BatchBuilder, Compression, LogRecord, parse_header, read_records
from rollbridge.kafka.committed import _parse, batch_of_one, committed_records, is_plain, iterate_any_records

contents = st.none() | st.binary(max_size=300)
names = st.text(max_size=8)
any_names = st.binary(max_size=8).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
times = st.integers(0, 1 << 42)


def records(
    of: st.SearchStrategy[str],
) -> st.SearchStrategy[list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]]]:
    headers = st.lists(st.tuples(of, contents), max_size=4)
    return st.lists(st.tuples(times, contents, contents, headers), min_size=1, max_size=5)


@given(records(names), st.sampled_from(Compression))
def test_a_batch_is_read_as_our_usual_reader_reads_it(
    given_records: list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]], codec: Compression
) -> None:
    builder = BatchBuilder(1 << 20, codec)
    for record in given_records:
        builder.append(*record)
    batch = builder.build()
    assert list(_parse(batch)) == list(read_records(batch)) == list(iterate_any_records(batch))


@given(times, contents, contents, st.lists(st.tuples(names, contents), max_size=4))
def test_a_batch_of_one_is_what_our_usual_builder_builds(
    timestamp: int, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    builder = BatchBuilder(1)
    builder.append(timestamp, key, value, headers)
    assert batch_of_one(timestamp, key, value, headers) == builder.build()


@given(times, contents, contents, st.lists(st.tuples(any_names, contents), max_size=4))
def test_any_names_are_written_and_read_again(
    timestamp: int, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    batch = batch_of_one(timestamp, key, value, headers)
    [record] = iterate_any_records(batch)
    assert record == LogRecord(0, timestamp, key, value, headers)
    assert batch_of_one(*record[1:]) == batch
    assert committed_records(batch, 0, []).records == [record]
    if not is_plain(headers):
        with pytest.raises(CorruptDataError, match="utf-8"):
            list(read_records(batch))


@given(st.data())
def test_what_is_cut_or_forged_is_corrupt_or_a_record_and_nothing_else(data: st.DataObject) -> None:
    batch = bytearray(batch_of_one(1, b"key", b"value", [("n\udcff", b"content")]))
    for _ in range(data.draw(st.integers(1, 3))):
        batch[data.draw(st.integers(HEADER_BYTES, len(batch) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptDataError):
        assert len(list(iterate_any_records(batch))) <= parse_header(batch).record_count
