"""What a read_committed reader sees in raw batches: against a slow model, and in the corners of the format."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.errors import CorruptDataError
from rollbridge.kafka.batches import HEADER_BYTES, BatchBuilder, Compression, LogRecord, parse_header, read_records
from rollbridge.kafka.committed import (
    AbortedSpan,
    _parse,
    batch_of_one,
    committed_records,
    is_plain,
    iterate_any_records,
)

TRANSACTIONAL, CONTROL = 0x10, 0x20
ABORT, COMMIT = 0, 1


def batch(base: int, keys: list[bytes], *, producer: int = -1, attributes: int = 0) -> bytes:
    """A batch as it stands in a log; its checksum is not renewed, as nobody looks at it."""
    builder = BatchBuilder(1 << 20)
    for key in keys:
        builder.append(0, key, b"value")
    raw = bytearray(builder.build())
    struct.pack_into(">q", raw, 0, base)
    struct.pack_into(">h", raw, 21, attributes)
    struct.pack_into(">q", raw, 43, producer)
    return bytes(raw)


def marker(base: int, producer: int, kind: int) -> bytes:
    return batch(base, [struct.pack(">hh", 0, kind)], producer=producer, attributes=TRANSACTIONAL | CONTROL)


@dataclass(frozen=True)
class Log:
    """A log in which everything is decided, with what a reader must see."""

    raw: bytes
    visible: dict[int, bytes]
    aborted: list[tuple[AbortedSpan, int]]
    """And the offset of the marker."""
    end: int


@st.composite
def logs(draw: st.DrawFn) -> Log:
    raw = b""
    visible: dict[int, bytes] = {}
    aborted: list[tuple[AbortedSpan, int]] = []
    open_records: dict[int, dict[int, bytes]] = {}
    offset = 0
    for _ in range(draw(st.integers(0, 12))):
        producer = draw(st.integers(0, 1))
        if producer in open_records and draw(st.booleans()):
            kind = draw(st.sampled_from([ABORT, COMMIT]))
            raw += marker(offset, producer, kind)
            records = open_records.pop(producer)
            if kind == COMMIT:
                visible |= records
            else:
                aborted.append((AbortedSpan(producer, min(records)), offset))
            offset += 1
            continue
        keys = [b"%d" % (offset + place) for place in range(draw(st.integers(1, 3)))]
        placed = {offset + place: key for place, key in enumerate(keys)}
        if draw(st.booleans()):
            raw += batch(offset, keys, producer=producer, attributes=TRANSACTIONAL)
            open_records.setdefault(producer, {}).update(placed)
        else:
            raw += batch(offset, keys)
            visible |= placed
        offset += len(keys)
    for producer, records in open_records.items():
        raw += marker(offset, producer, ABORT)
        aborted.append((AbortedSpan(producer, min(records)), offset))
        offset += 1
    return Log(raw, visible, aborted, offset)


def batches_from(log: Log, start: int) -> tuple[bytes, list[AbortedSpan]]:
    """What a broker answers to a fetch from ``start``: whole batches, and the aborted transactions that reach there."""
    position = 0
    while position < len(log.raw):
        base, length = struct.unpack_from(">qi", log.raw, position)
        last = base + struct.unpack_from(">i", log.raw, position + 23)[0]
        if last >= start:
            break
        position += length + 12
    return log.raw[position:], [span for span, end in log.aborted if end >= start]


@given(logs(), st.data())
def test_exactly_what_was_committed_is_seen_from_any_offset_on(log: Log, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, log.end))
    raw, spans = batches_from(log, start)
    found = committed_records(raw, start, spans)
    assert {record.offset: record.key for record in found.records} == {
        offset: key for offset, key in log.visible.items() if offset >= start
    }
    assert found.end == log.end


def test_what_a_producer_commits_after_it_has_aborted_is_seen() -> None:
    parts = [
        batch(0, [b"gone"], producer=1, attributes=TRANSACTIONAL),
        batch(1, [b"other"], producer=2, attributes=TRANSACTIONAL),
        marker(2, 1, ABORT),
        batch(3, [b"kept"], producer=1, attributes=TRANSACTIONAL),
        marker(4, 2, COMMIT),
        marker(5, 1, COMMIT),
    ]
    found = committed_records(b"".join(parts), 0, [AbortedSpan(1, 0)])
    assert [record.key for record in found.records] == [b"other", b"kept"]


@given(logs(), st.data())
def test_a_batch_that_is_cut_short_is_left_for_the_next_fetch(log: Log, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(log.raw)))
    spans = [span for span, _ in log.aborted]
    found = committed_records(log.raw[:cut], 0, spans)
    assert {record.offset: record.key for record in found.records} == {
        offset: key for offset, key in log.visible.items() if offset < found.end
    }
    raw, spans = batches_from(log, found.end)
    assert committed_records(raw, found.end, spans).end == log.end


def test_a_batch_that_claims_less_than_its_header_is_refused() -> None:
    with pytest.raises(CorruptDataError, match="claims 12 bytes"):
        committed_records(bytes(100), 0, [])


def test_a_marker_without_its_key_is_refused() -> None:
    with pytest.raises(CorruptDataError, match="control key"):
        committed_records(batch(0, [b""], producer=1, attributes=TRANSACTIONAL | CONTROL), 0, [])


# Header names that are not UTF-8 are read and written again byte for byte, all else as our usual reader reads it.


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
