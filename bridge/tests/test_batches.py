"""Record batches: what goes in comes out, and damaged bytes are a clean error, never a wrong record or a crash."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import cramjam
import pytest
from google_crc32c import value as crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from bridge.tests.batch_makers import Input, build, codecs, inputs, runs
from rollbridge.errors import CorruptDataError
from rollbridge.kafka import batches
from rollbridge.kafka.batches import (
    HEADER_BYTES,
    BatchBuilder,
    Compression,
    LogRecord,
    RawBatch,
    check_crc,
    check_numbering,
    parse_header,
    read_records,
    rebatch,
    record_size_max,
    retimed,
    single_record,
    stamp,
    stamped_header,
    validate_frame,
)
from rollbridge.kafka.queues import SEQUENCE_MAX

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
    header = validate_frame(batch, len(records), deep=True)
    assert header.size == len(batch)
    assert header.compression == compression
    assert header.max_timestamp == max(timestamp for timestamp, *_ in records)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, -1)
    assert not header.is_transactional
    assert not header.is_control


def test_a_known_batch_parses_to_known_values() -> None:
    """Written out by hand after Kafka's documentation, so that reader and builder cannot be wrong together."""
    record = bytes([18, 0, 0, 0, 2]) + b"k" + bytes([4]) + b"vv" + bytes([0])
    record = bytes([len(record[1:]) * 2]) + record[1:]
    tail = struct.pack(">hiqqqhii", 0, 0, NOW, NOW, -1, -1, -1, 1) + record
    batch = struct.pack(">qiibI", 7, 4 + 1 + 4 + len(tail), 3, 2, crc32c(tail)) + tail
    header = validate_frame(batch, 1, deep=True)
    assert (header.base_offset, header.partition_leader_epoch, header.magic, header.record_count) == (7, 3, 2, 1)
    assert (header.last_offset_delta, header.base_timestamp, header.max_timestamp) == (0, NOW, NOW)
    assert list(read_records(batch)) == [LogRecord(7, NOW, b"k", b"vv", [])]
    assert build([(NOW, b"k", b"vv", [])])[HEADER_BYTES:] == record


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


@given(runs, codecs, st.data())
def test_damage_under_a_right_checksum_is_a_clean_error(
    records: list[Input], compression: Compression, data: st.DataObject
) -> None:
    """A client may send anything; whatever it is, the deep check ends with an answer and not with a crash."""
    batch = bytearray(build(records, compression))
    for _ in range(data.draw(st.integers(1, 4))):
        batch[data.draw(st.integers(57, len(batch) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del batch[data.draw(st.integers(HEADER_BYTES, len(batch))) :]
        struct.pack_into(">i", batch, 8, len(batch) - 12)
    damaged = with_checksum(batch)
    try:
        validate_frame(damaged, len(records), deep=True)
    except CorruptDataError:
        return
    assert len(contents(damaged)) == len(records)


@given(st.binary(max_size=200))
@example(b"")
@example(bytes(61))
@example(bytes(8) + struct.pack(">i", 49) + bytes(4) + b"\2" + bytes(44))
def test_foreign_bytes_are_corrupt(noise: bytes) -> None:
    with pytest.raises(CorruptDataError):
        validate_frame(noise, 1)


@pytest.mark.parametrize(
    ("attributes", "accepted"),
    [(0, True), (1, False), (0x08, False), (0x10, False), (0x20, False), (0x30, False), (0x40, False), (5, False)],
)
def test_only_plain_data_is_a_frame(attributes: int, accepted: bool) -> None:
    batch = bytearray(build([(NOW, None, b"v", [])]))
    struct.pack_into(">h", batch, 21, attributes)
    frame = with_checksum(batch)
    if accepted:
        validate_frame(frame, 1, deep=True)
    else:
        with pytest.raises(CorruptDataError):
            validate_frame(frame, 1, deep=True)


@pytest.mark.parametrize("count", [-1, 0, 2, 4])
def test_a_frame_holds_as_many_records_as_announced(count: int) -> None:
    with pytest.raises(CorruptDataError, match="3 records"):
        validate_frame(build([(NOW, None, b"v", [])] * 3), count)


@pytest.mark.parametrize(("position", "value"), [(57, 2), (57, 4), (57, -1), (23, 1), (23, 3), (23, -1)])
def test_counts_that_contradict_the_records_are_found(position: int, value: int) -> None:
    batch = bytearray(build([(NOW, None, b"v", [])] * 3))
    struct.pack_into(">i", batch, position, value)
    with pytest.raises(CorruptDataError):
        validate_frame(with_checksum(batch), 3, deep=True)
    if position == 57:
        with pytest.raises(CorruptDataError):
            list(read_records(bytes(batch)))


def test_records_numbered_wrong_inside_are_found_by_the_deep_check() -> None:
    batch = bytearray(build([(NOW, None, b"v", [])] * 2))
    second = HEADER_BYTES + (len(batch) - HEADER_BYTES) // 2
    assert batch[second + 3] == 2  # offset delta 1, as a varint
    batch[second + 3] = 0
    frame = with_checksum(batch)
    validate_frame(frame, 2)
    with pytest.raises(CorruptDataError, match="numbered 0"):
        validate_frame(frame, 2, deep=True)


def test_a_batch_that_is_handed_on_as_it_is_numbers_its_records_one_by_one() -> None:
    batch = bytearray(build([(NOW, None, b"v", [])] * 2))
    check_numbering(bytes(batch))
    rebatch([bytes(batch)], 1 << 20)
    batch[HEADER_BYTES + (len(batch) - HEADER_BYTES) // 2 + 3] = 0
    wrong = with_checksum(batch)
    with pytest.raises(CorruptDataError, match="not numbered one by one"):
        check_numbering(wrong)
    with pytest.raises(CorruptDataError, match="not numbered one by one"):
        rebatch([wrong], 1 << 20)
    joined = rebatch([wrong, wrong], 1 << 20).batches
    assert [record.offset for record in read_records(joined[0])] == [0, 1, 2, 3], "numbered anew"


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


def test_the_stamped_header_goes_before_the_untouched_rest() -> None:
    batch = build([(NOW, b"k", b"v", [])])
    header = stamped_header(batch, producer_id=9, producer_epoch=2, base_sequence=5)
    assert len(header) == HEADER_BYTES
    assert header + batch[HEADER_BYTES:] == stamp(batch, producer_id=9, producer_epoch=2, base_sequence=5)


@pytest.mark.parametrize("codec", [Compression.NONE, Compression.ZSTD])
def test_a_batch_gets_the_time_of_its_commit_without_a_look_at_its_records(codec: Compression) -> None:
    batch = build([(NOW - 50, b"a", b"1", []), (NOW, b"b", b"2", []), (NOW - 9_000, None, None, [])], codec)
    later = stamp(retimed(batch, NOW + 86_400_000), producer_id=1, producer_epoch=0, base_sequence=0)
    check_crc(parse_header(later), later)
    assert parse_header(later).max_timestamp == NOW + 86_400_000
    found = [(record.timestamp - NOW - 86_400_000, record.key, record.value) for record in read_records(later)]
    assert found == [(-50, b"a", b"1"), (0, b"b", b"2"), (-9_000, None, None)]
    assert later[HEADER_BYTES:] == batch[HEADER_BYTES:]


def test_markers_and_empty_batches_cannot_be_stamped() -> None:
    marker = bytearray(build([(NOW, None, b"v", [])]))
    struct.pack_into(">h", marker, 21, 0x30)
    empty = bytearray(build([(NOW, None, b"v", [])])[:HEADER_BYTES])
    struct.pack_into(">i", empty, 8, HEADER_BYTES - 12)
    struct.pack_into(">i", empty, 57, 0)
    for batch in (marker, empty):
        with pytest.raises(CorruptDataError):
            stamp(bytes(batch), producer_id=1, producer_epoch=0, base_sequence=0)


@given(key=st.binary(max_size=300), value=st.binary(max_size=300), timestamp_ms=st.integers(0, 1 << 42))
def test_a_batch_of_one_record_is_what_a_builder_makes(key: bytes, value: bytes, timestamp_ms: int) -> None:
    builder = BatchBuilder(1 << 20)
    builder.append(timestamp_ms, key, value)
    made = single_record(key, value, timestamp_ms)
    fields = {"producer_id": 7, "producer_epoch": 1, "base_sequence": 3, "transactional": False}
    assert stamp(made, **fields) == stamp(builder.build(), **fields)  # type: ignore[arg-type]


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


@given(st.lists(st.tuples(runs, codecs), max_size=10), st.integers(61, 3000), codecs)
def test_rebatching_keeps_every_record_in_order_and_says_where_it_went(
    pieces: list[tuple[list[Input], Compression]], max_bytes: int, compression: Compression
) -> None:
    originals = [build(records, codec) for records, codec in pieces]
    merged = rebatch(iter(originals), max_bytes, compression=compression)
    outputs = [contents(batch) for batch in merged.batches]
    assert [record for output in outputs for record in output] == [
        record for records, _ in pieces for record in records
    ]
    assert len(merged.places) == len(pieces)
    for (records, _), place in zip(pieces, merged.places, strict=True):
        assert outputs[place.batch][place.offset_delta : place.offset_delta + len(records)] == records
    inputs_of = [sum(1 for place in merged.places if place.batch == number) for number in range(len(merged.batches))]
    for batch, inputs_in_it in zip(merged.batches, inputs_of, strict=True):
        validate_frame(batch, parse_header(batch).record_count, deep=True)
        if inputs_in_it == 1:
            assert any(batch is original for original in originals)
        elif compression is Compression.NONE:
            assert len(batch) <= max_bytes


def test_rebatching_merges_small_neighbours_and_leaves_large_ones_alone() -> None:
    small = [build([(NOW + n, b"%d" % n, b"v" * 10, [])]) for n in range(5)]
    large = build([(NOW, None, bytes(5000), [])])
    merged = rebatch([small[0], small[1], large, small[2], small[3], small[4]], 2000)
    assert [tuple(place) for place in merged.places] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert merged.batches[1] is large
    assert rebatch([], 2000).batches == []


def test_rebatching_refuses_what_is_no_batch() -> None:
    with pytest.raises(CorruptDataError):
        rebatch([b"nonsense"], 1000)
    damaged = bytearray(build([(NOW, None, b"v", [])]))
    damaged[HEADER_BYTES] = 0x7E
    with pytest.raises(CorruptDataError):
        rebatch([bytes(damaged), build([(NOW, None, b"v", [])])], 1000)


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
    small = build_one()
    made: list[int] = []
    read = batches.read_records

    def counted(batch: batches.RawBatch, **options: int) -> Iterator[batches.LogRecord]:
        for record in read(batch, **options):
            made.append(record.offset)
            yield record

    monkeypatch.setattr(batches, "read_records", counted)
    result = rebatch([small, bomb, small, small], 512 * 1024)
    assert not made
    assert [bytes(item) for item in result.batches[:2]] == [small, bomb]
    assert [(place.batch, place.offset_delta) for place in result.places] == [(0, 0), (1, 0), (2, 0), (2, 1)]


def build_one() -> bytes:
    builder = BatchBuilder(1_000)
    builder.append(1, b"k", b"v")
    return builder.build()
