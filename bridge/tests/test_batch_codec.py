"""Record batches: what goes in comes out, and damaged bytes are a clean error, never a wrong record or a crash."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import cramjam
import pytest
from google_crc32c import value as crc32c
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.batch_makers import Input, build, codecs, forged, inputs, record, runs
from rollbridge.errors import CorruptDataError
from rollbridge.kafka import records as codec_module
from rollbridge.kafka.columns import committed_columns, headers_of
from rollbridge.kafka.queues import SEQUENCE_MAX
from rollbridge.kafka.records import (
    HEADER_BYTES,
    BatchBuilder,
    Compression,
    LogRecord,
    RawBatch,
    batch_of_one,
    check_crc,
    check_numbering,
    is_frame,
    is_plain,
    join_bound,
    joined,
    parse_header,
    read_records,
    rebatch,
    record_size_max,
    retimed,
    stamp,
    validate_frame,
)

NOW = 1_700_000_000_000


def contents(batch: RawBatch) -> list[Input]:
    return [(r.timestamp, r.key, r.value, r.headers) for r in read_records(batch)]


def with_checksum(batch: bytearray) -> bytes:
    struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
    return bytes(batch)


@given(runs, codecs)
def test_records_come_back_as_they_went_in(records: list[Input], compression: Compression) -> None:
    batch = build(records, compression)
    assert contents(batch) == records
    assert [r.offset for r in read_records(batch)] == list(range(len(records)))
    header = validate_frame(batch, len(records))
    assert header.size == len(batch)
    assert header.compression == compression
    assert header.max_timestamp == max(timestamp for timestamp, *_ in records)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, -1)
    assert not header.is_transactional
    assert not header.is_control


def test_a_known_batch_parses_to_known_values() -> None:
    batch = forged(record(0, b"vv", key=b"k"), 1, base_offset=7, times=(NOW, NOW))
    header = validate_frame(batch, 1)
    assert (header.base_offset, header.partition_leader_epoch, header.magic, header.record_count) == (7, -1, 2, 1)
    assert (header.last_offset_delta, header.base_timestamp, header.max_timestamp) == (0, NOW, NOW)
    assert list(read_records(batch)) == [LogRecord(7, NOW, b"k", b"vv", [])]
    assert build([(NOW, b"k", b"vv", [])])[8:] == batch[8:]
    assert batch[HEADER_BYTES:] == b"\x12\0\0\0\2k\4vv\0"


@given(runs, codecs, st.data())
def test_a_truncated_batch_is_corrupt(records: list[Input], compression: Compression, data: st.DataObject) -> None:
    batch = build(records, compression)
    cut = batch[: data.draw(st.integers(0, len(batch) - 1))]
    for check in (parse_header, lambda b: validate_frame(b, len(records)), lambda b: list(read_records(b))):
        with pytest.raises(CorruptDataError):
            check(cut)
    with pytest.raises(CorruptDataError):
        parse_header(batch + b"\0")


@given(runs, codecs, st.data())
def test_a_changed_byte_is_found(records: list[Input], compression: Compression, data: st.DataObject) -> None:
    batch = bytearray(build(records, compression))
    # Base offset and leader epoch are the broker's to set, and not under the checksum.
    place = data.draw(st.integers(8, len(batch) - 1).filter(lambda n: not 12 <= n < 16))
    batch[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptDataError):
        validate_frame(bytes(batch), len(records))


ODD: Final = batch_of_one(1, b"key", b"value", [("n\udcff", b"content"), ("m", None)])


def from_columns(batch: bytes) -> list[LogRecord]:
    found, _ = committed_columns(batch, 0, [])
    headers: list[list[tuple[str, bytes | None]]] = [[] for _ in range(len(found))]

    def taken(start: int, end: int) -> bytes | None:
        return found.buffer[start:end] if end >= start else None

    for some in headers_of(found):
        for place, *ends in zip(*map(list, (some.record, *some.name, *some.value)), strict=True):
            name = taken(*ends[:2]) or b""
            headers[place].append((name.decode("utf-8", "surrogateescape"), taken(*ends[2:])))
    keys, values = ([*map(taken, *field)] for field in (found.key, found.value))
    return [*map(LogRecord, found.offset.tolist(), found.timestamp_ms.tolist(), keys, values, headers)]


@given(st.builds(build, runs, codecs) | st.just(ODD), st.data())
def test_damage_under_a_right_checksum_is_refused_or_read_alike(made: bytes, data: st.DataObject) -> None:
    """A client may send anything; whatever it is, it ends with an answer and not with a crash."""
    batch = bytearray(made)
    for _ in range(data.draw(st.integers(0, 4))):
        batch[data.draw(st.integers(57, len(batch) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del batch[data.draw(st.integers(HEADER_BYTES, len(batch))) :]
        struct.pack_into(">i", batch, 8, len(batch) - 12)
    damaged = with_checksum(batch)
    found: list[list[LogRecord] | None] = []
    for read in (read_records, from_columns):
        try:
            found.append(list(read(damaged)))
        except CorruptDataError:
            found.append(None)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("attributes", "accepted"),
    [(0, True), (0x08, False), (0x10, False), (0x20, False), (0x30, False), (0x40, False), (5, False)],
)
def test_only_plain_data_is_a_frame(attributes: int, accepted: bool) -> None:
    batch = bytearray(build([(NOW, None, b"v", [])]))
    struct.pack_into(">h", batch, 21, attributes)
    frame = with_checksum(batch)
    assert is_frame(frame, 1) is is_valid(frame, 1) is accepted


@given(
    runs,
    codecs,
    st.integers(0, (1 << 63) - 1),
    st.integers(0, (1 << 15) - 1),
    st.integers(0, SEQUENCE_MAX),
    st.booleans(),
)
def test_stamping_changes_the_producer_and_nothing_else(
    records: list[Input], compression: Compression, producer_id: int, epoch: int, sequence: int, transactional: bool
) -> None:
    batch = build(records, compression)
    foreign = bytearray(batch)
    struct.pack_into(">q", foreign, 0, 77)
    struct.pack_into(">i", foreign, 12, 5)
    stamped = stamp(
        foreign, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, transactional=transactional
    )
    header = parse_header(stamped)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (producer_id, epoch, sequence)
    assert (header.base_offset, header.partition_leader_epoch) == (0, -1)
    assert header.is_transactional is transactional
    assert header.crc == crc32c(stamped[21:])
    assert header.compression == compression
    assert stamped[HEADER_BYTES:] == batch[HEADER_BYTES:]
    assert contents(stamped) == records
    again = stamp(stamped, producer_id=-1, producer_epoch=-1, base_sequence=-1, transactional=False)
    assert again[12:16] == b"\xff" * 4
    assert again[16:] == batch[16:]


@pytest.mark.parametrize("codec", [Compression.NONE, Compression.ZSTD])
def test_a_batch_gets_the_time_of_its_commit_without_a_look_at_its_records(codec: Compression) -> None:
    batch = build([(NOW - 50, b"a", b"1", []), (NOW, b"b", b"2", []), (NOW - 9_000, None, None, [])], codec)
    later = stamp(retimed(batch, NOW + 86_400_000), producer_id=1, producer_epoch=0, base_sequence=0)
    check_crc(parse_header(later), later)
    assert parse_header(later).max_timestamp == NOW + 86_400_000
    found = [(record.timestamp - NOW - 86_400_000, record.key, record.value) for record in read_records(later)]
    assert found == [(-50, b"a", b"1"), (0, b"b", b"2"), (-9_000, None, None)]
    assert later[HEADER_BYTES:] == batch[HEADER_BYTES:]


def test_markers_and_batches_that_lack_records_cannot_be_stamped() -> None:
    marker, thinned = forged(record(0), 1, attributes=0x30), forged(record(0), 1, last=2)
    for batch in (marker, thinned, forged(b"", 0), forged(b"", 0, last=2)):
        with pytest.raises(CorruptDataError):
            stamp(batch, producer_id=1, producer_epoch=0, base_sequence=0)


def test_a_builder_stops_at_its_limit_but_always_takes_one() -> None:
    builder = BatchBuilder(200)
    assert builder.append(NOW, None, bytes(500))
    assert not builder.append(NOW, None, b"")
    assert builder.count == 1
    assert builder.size > 500
    builder.build()
    taken = 0
    while builder.append(NOW, None, bytes(20)):
        taken += 1
        assert builder.size <= 200
    assert taken == 5
    assert len(builder.build()) <= 200


def test_a_builder_starts_over_and_builds_nothing_from_nothing() -> None:
    builder = BatchBuilder(1000, Compression.LZ4)
    with pytest.raises(ValueError, match="at least one record"):
        builder.build()
    builder.append(NOW, None, b"1", (("h", b"x"),))
    first = builder.build()
    assert builder.count == 0
    builder.append(NOW, None, b"2")
    assert [value for _, _, value, _ in contents(first)] == [b"1"]
    assert [value for _, _, value, _ in contents(builder.build())] == [b"2"]
    with pytest.raises(ValueError, match="at least one record"):
        builder.build()


@given(inputs)
def test_the_size_of_a_record_is_bounded(record: Input) -> None:
    _, key, value, headers = record
    assert len(build([record])) <= record_size_max(key, value, headers)


def test_codecs_are_found_by_kafkas_names() -> None:
    assert [Compression.named(name) for name in ("none", "gzip", "snappy", "lz4", "zstd")] == list(Compression)
    with pytest.raises(ValueError, match=r"lzma.*none, gzip, snappy, lz4, zstd"):
        Compression.named("lzma")


@given(st.lists(st.tuples(runs, codecs), max_size=10), st.integers(61, 3000))
def test_rebatching_keeps_every_record_in_order_and_says_where_it_went(
    pieces: list[tuple[list[Input], Compression]], max_bytes: int
) -> None:
    originals = [build(records, codec) for records, codec in pieces]
    merged = rebatch(iter(originals), max_bytes)
    outputs = [contents(batch) for batch in merged.batches]
    assert [record for output in outputs for record in output] == [
        record for records, _ in pieces for record in records
    ]
    assert len(merged.places) == len(pieces)
    for (records, _), place in zip(pieces, merged.places, strict=True):
        assert outputs[place.batch][place.offset_delta : place.offset_delta + len(records)] == records
    inputs_of = [sum(1 for place in merged.places if place.batch == number) for number in range(len(merged.batches))]
    for batch, inputs_in_it in zip(merged.batches, inputs_of, strict=True):
        validate_frame(batch, parse_header(batch).record_count)
        if inputs_in_it == 1:
            assert any(batch is original for original in originals)
        else:
            assert len(batch) <= max_bytes


def test_rebatching_merges_small_neighbours_and_leaves_large_ones_alone() -> None:
    small = [build([(NOW + n, b"%d" % n, b"v" * 10, [])]) for n in range(5)]
    large = build([(NOW, None, bytes(5000), [])])
    merged = rebatch([small[0], small[1], large, small[2], small[3], small[4]], 2000)
    assert [tuple(place) for place in merged.places] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert merged.batches[1] is large
    assert rebatch([], 2000).batches == []


@pytest.mark.parametrize("compression", [item for item in Compression if item is not Compression.NONE])
def test_a_batch_that_inflates_beyond_the_limit_is_corrupt(compression: Compression) -> None:
    bomb = build([(NOW, None, bytes(1 << 20), [])], compression)
    assert len(bomb) < 1 << 17
    assert len(contents(bomb)) == 1
    assert len(list(read_records(bomb, limit_bytes=(1 << 20) + 100))) == 1
    with pytest.raises(CorruptDataError, match=r"1000000|more than"):
        list(read_records(bomb, limit_bytes=1_000_000))


def test_snappy_without_framing_is_read_too() -> None:
    plain = build([(NOW, b"k", b"v" * 100, [])])
    batch = bytearray(plain[:HEADER_BYTES]) + bytes(cramjam.snappy.compress_raw(plain[HEADER_BYTES:]))
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">h", batch, 21, Compression.SNAPPY)
    assert contents(bytes(batch)) == [(NOW, b"k", b"v" * 100, [])]


@pytest.mark.parametrize("size", [-1, -4, 0, 1 << 30])
def test_snappy_blocks_of_impossible_sizes_end_the_reading(size: int) -> None:
    batch = bytearray(build([(NOW, None, b"v" * 100, [])], Compression.SNAPPY))
    struct.pack_into(">i", batch, HEADER_BYTES + 16, size)
    with pytest.raises(CorruptDataError, match="snappy block"):
        list(read_records(bytes(batch)))


def test_a_small_batch_that_decompresses_to_very_much_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold up a leader for as long as it has records; brokers look into it, without making any."""
    builder = BatchBuilder(1 << 25, Compression.ZSTD)
    for _ in range(50_000):
        builder.append(1, None, b"x" * 100)
    bomb = builder.build()
    assert len(bomb) < 200_000
    small = build([(1, b"k", b"v", [])])
    made: list[int] = []
    read = codec_module.read_records

    def counted(batch: RawBatch) -> Iterator[LogRecord]:
        for item in read(batch):
            made.append(item.offset)
            yield item

    monkeypatch.setattr(codec_module, "read_records", counted)
    result = rebatch([small, bomb, small, small], 512 * 1024)
    assert not made
    assert [bytes(item) for item in result.batches[:2]] == [small, bomb]
    assert [(place.batch, place.offset_delta) for place in result.places] == [(0, 0), (1, 0), (2, 0), (2, 1)]


# What a leader does to small batches in less time: the same as the general functions do, or it leaves it to them.


ROOM = 1 << 20


def is_valid(batch: bytes, count: int) -> bool:
    try:
        validate_frame(batch, count)
    except CorruptDataError:
        return False
    return True


@given(runs, codecs, st.integers(-1, 1), st.data())
def test_a_frame_is_taken_if_and_only_if_it_is_valid(
    records: list[Input], codec: Compression, off: int, data: st.DataObject
) -> None:
    batch = build(records, codec)
    assert is_frame(batch, len(records))
    assert is_frame(batch, len(records) + off) == is_valid(batch, len(records) + off) == (not off)
    place = data.draw(st.integers(0, len(batch) - 1))
    damaged = batch[:place] + bytes([batch[place] ^ data.draw(st.integers(1, 255))]) + batch[place + 1 :]
    assert is_frame(damaged, len(records)) == is_valid(damaged, len(records))
    assert not is_frame(batch[:place], len(records))
    assert not is_frame(batch + b"x", len(records))


@given(st.lists(runs, min_size=2, max_size=6))
def test_batches_are_joined_as_the_general_way_does_it(parts: list[list[Input]]) -> None:
    batches = [build(part) for part in parts]
    ends = list(accumulate(map(len, parts)))
    bound = HEADER_BYTES + sum(join_bound(len(batch), len(part)) for batch, part in zip(batches, parts, strict=True))
    assert joined(batches, ends, bound) == rebatch(batches, bound).batches[0]
    assert joined(batches, ends, bound - 1) is None, "it might not fit"
    assert joined([*batches[1:], build(parts[0], Compression.ZSTD)], ends, bound) is None


def test_what_is_no_batch_is_left_to_the_general_way_and_a_wrong_count_is_an_error() -> None:
    batch = build([(1, b"k", b"v", [])])
    for wrong in (b"", batch[:30], batch + b"x", batch[:16] + b"\1" + batch[17:]):
        assert joined([batch, wrong], [1, 2], ROOM) is None
    with pytest.raises(CorruptDataError, match="number of records"):
        joined([batch, batch], [1, 3], ROOM)


odd_names = st.binary(max_size=8).map(lambda raw: raw.decode("utf-8", "surrogateescape"))


@given(inputs, st.lists(st.tuples(odd_names, st.none() | st.binary(max_size=300)), max_size=4))
def test_a_batch_of_one_takes_any_names_and_else_is_what_our_usual_builder_builds(
    given_record: Input, headers: list[tuple[str, bytes | None]]
) -> None:
    assert batch_of_one(*given_record) == build([given_record])
    batch = batch_of_one(*given_record[:3], headers)
    assert list(read_records(batch)) == [LogRecord(0, *given_record[:3], headers)]
    if not is_plain(headers):
        with pytest.raises(CorruptDataError, match="utf-8"):
            check_numbering(batch)
