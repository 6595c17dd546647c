"""What a read_committed reader sees in raw batches: against a slow model, and in the corners of the format."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbridge.errors import CorruptDataError
from rollbridge.kafka.committed import (
    AbortedSpan,
    committed_records,
)
from rollbridge.kafka.records import BatchBuilder

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


def test_a_marker_without_its_key_is_refused() -> None:
    with pytest.raises(CorruptDataError, match="control key"):
        committed_records(batch(0, [b""], producer=1, attributes=TRANSACTIONAL | CONTROL), 0, [])
