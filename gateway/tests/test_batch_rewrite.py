"""Batches become frames whose records are the same, in the same order, where they belong; or nothing at all."""

from __future__ import annotations

import time
import tracemalloc
from bisect import bisect_right
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from bridge.tests import batch_makers
from bridge.tests.batch_makers import LIES
from gateway.tests import claims
from rollbridge.base.attribution import RECORD_HEADER, pack_run, unpack_run
from rollbridge.base.ids import TransactionId
from rollbridge.errors import CorruptDataError, InvalidRequestError, RecordTooLargeError
from rollbridge.kafka.record_limits import RecordLimits
from rollbridge.kafka.records import (
    BatchBuilder,
    Compression,
    is_frame,
    parse_header,
    read_records,
    stamp,
    validate_frame,
)
from rollbridge.stream.config import TopicLimits
from rollbridge.stream.keyspace import HASH_SEED
from rollbridge_gateway.producer.table import KafkaFault, Pair
from rollbridge_gateway.protocol.batch_rewrite import (
    BatchAuthor,
    Target,
    carry,
    check_batch,
)
from rollbridge_gateway.protocol.errors import fault_of

TXN = TransactionId.of(3, 5)
NOW_MS = int(time.time() * 1000)
BOUNDS = (1 << 62, 1 << 63)
Record = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]


def target(
    *, passed: bool = False, each: bool = False, record: int = 1_000_000, batch: int = 900_000, **limits: Any
) -> Target:
    adopted = TopicLimits(1_048_588, **limits) if passed else None
    bounds = RecordLimits("sales/orders", "orders", adopted, record_bytes_max=record, batch_bytes=batch)
    return Target(bounds, 3, BOUNDS, xxh64_intdigest, each, passed)


def batch_of(records: list[Record], codec: Compression = Compression.NONE) -> bytes:
    builder = BatchBuilder(64 << 20, codec)
    for record in records:
        assert builder.append(*record)
    return stamp(builder.build(), producer_id=1 << 62, producer_epoch=4, base_sequence=17)


RECORDS = st.lists(
    st.tuples(
        st.integers(NOW_MS - 1000, NOW_MS),
        st.none() | st.binary(max_size=12),
        st.none() | st.binary(max_size=200),
        st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=9)), max_size=3),
    ),
    min_size=1,
    max_size=20,
)
CODECS = st.sampled_from(list(Compression))


def unpacked(frames: list[Any]) -> list[tuple[int, int, Record]]:
    """Of each record: its count, the place of its segment, and what it is without our header."""
    found: list[tuple[int, int, Record]] = []
    for frame in frames:
        validate_frame(frame.batch, frame.records)
        assert is_frame(frame.batch, frame.records)
        numbers: list[int] = []
        for record in read_records(frame.batch):
            own = [value for name, value in record.headers if name == RECORD_HEADER]
            given = [item for item in record.headers if item[0] != RECORD_HEADER]
            if own:
                assert own[0] is not None
                run = unpack_run(own[0])
                assert run.transaction == TXN.bytes
                numbers += run.sequences()
            found.append((0, frame.at, (record.timestamp, record.key, record.value, given)))
        assert len(numbers) == frame.records
        assert (numbers[0], numbers[-1]) == (1_000 + frame.first, 1_000 + frame.last)
        for at, number in enumerate(numbers):
            place = len(found) - frame.records + at
            found[place] = (number - 1_000, *found[place][1:])
    return sorted(found, key=lambda item: item[0])


@given(RECORDS, CODECS, st.booleans(), st.integers(0, 50))
def test_records_are_routed_by_their_keys(records: list[Record], codec: Compression, each: bool, count: int) -> None:
    batch = batch_of(records, codec)
    check_batch(batch)
    frames = carry(batch, 1, target(each=each), BatchAuthor(TXN.bytes, 1_000, count))
    found = unpacked(frames)
    assert [item[0] for item in found] == list(range(count, count + len(records)))
    assert [item[2] for item in found] == records
    for _, at, (_, key, _, _) in found:
        assert at == (1 if key is None else bisect_right(BOUNDS, xxh64_intdigest(key, HASH_SEED)))


@given(RECORDS, CODECS, st.integers(0, 2), st.integers(0, 50))
def test_records_of_an_adopted_topic_are_passed(
    records: list[Record], codec: Compression, partition: int, count: int
) -> None:
    frames = carry(batch_of(records, codec), partition, target(passed=True), BatchAuthor(TXN.bytes, 1_000, count))
    assert [(frame.at, frame.first, frame.records) for frame in frames] == [(partition, count, len(records))]
    assert [item[2] for item in unpacked(frames)] == records


def test_what_is_too_long_for_a_frame_becomes_several_of_its_partition() -> None:
    records: list[Record] = [(NOW_MS, b"k", bytes(900), []) for _ in range(40)]
    frames = carry(batch_of(records), 2, target(passed=True, batch=10_000), BatchAuthor(TXN.bytes, 1_000, 0))
    assert len(frames) > 3
    assert {frame.at for frame in frames} == {2}
    assert [item[2] for item in unpacked(frames)] == records


@pytest.mark.parametrize("passed", [True, False])
def test_a_record_that_is_too_large_leaves_nothing(passed: bool) -> None:
    records: list[Record] = [(NOW_MS, b"k", bytes(size), []) for size in (1, 1, 5_000)]
    with pytest.raises(RecordTooLargeError):
        carry(batch_of(records), 0, target(passed=passed, record=2_000, batch=4_000), BatchAuthor(TXN.bytes, 0, 0))


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("passed", [True, False])
@given(records=RECORDS, codec=CODECS, data=st.data())
def test_headers_of_other_transactions_are_not_handed_on(
    records: list[Record], codec: Compression, passed: bool, each: bool, data: st.DataObject
) -> None:
    """A program that has read a stream with a plain consumer may hand on all headers that it finds."""
    marks = st.lists(st.binary(max_size=40) | st.just(pack_run(TransactionId.of(9, 9).bytes, 7, 101, b"")), max_size=2)
    copied: list[Record] = []
    for timestamp, key, value, theirs in records:
        at, found = data.draw(st.integers(0, len(theirs))), [(RECORD_HEADER, mark) for mark in data.draw(marks)]
        copied.append((timestamp, key, value, [*theirs[:at], *found, *theirs[at:]]))
    batch = batch_of(copied, codec)
    check_batch(batch)
    frames = carry(batch, 1, target(passed=passed, each=each), BatchAuthor(TXN.bytes, 1_000, 5))
    found_records = unpacked(frames)
    assert [item[2] for item in found_records] == records
    assert [item[0] for item in found_records] == list(range(5, 5 + len(records)))


def test_what_an_adopted_topic_takes() -> None:
    keyless: list[Record] = [(NOW_MS, b"k", b"v", []), (NOW_MS, None, b"v", [])]
    with pytest.raises(InvalidRequestError, match="key"):
        carry(batch_of(keyless), 0, target(passed=True, is_compacted=True), BatchAuthor(TXN.bytes, 0, 0))
    old: list[Record] = [(NOW_MS - 10_000_000, b"k", b"v", [])]
    with pytest.raises(InvalidRequestError, match="past"):
        carry(batch_of(old), 0, target(passed=True, before_ms=1_000), BatchAuthor(TXN.bytes, 0, 0))
    with pytest.raises(InvalidRequestError, match="no partition 3 among 3 so far") as missing:
        carry(batch_of(old), 3, target(passed=True), BatchAuthor(TXN.bytes, 0, 0))
    assert fault_of(missing.value) is KafkaFault.NO_TOPIC


def carried(batch: bytes, *, passed: bool = True) -> list[Any]:
    check_batch(batch)
    return carry(batch, 1, target(passed=passed), BatchAuthor(TXN.bytes, 1_000, 0))


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("codec", [Compression.NONE, Compression.ZSTD])
@pytest.mark.parametrize("lie", LIES)
def test_batches_that_lie_are_refused(lie: str, codec: Compression, passed: bool) -> None:
    wrong = claims.lying(Pair(1 << 62, 4), LIES[lie], codec)
    tracemalloc.start()
    try:
        with pytest.raises((CorruptDataError, InvalidRequestError)):
            carried(wrong, passed=passed)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20 or "compress" in lie
    finally:
        tracemalloc.stop()


@given(RECORDS, CODECS, st.booleans(), st.data())
def test_bytes_that_were_changed_are_refused(
    records: list[Record], codec: Compression, passed: bool, data: st.DataObject
) -> None:
    batch = bytearray(batch_of(records, codec))
    at = data.draw(st.integers(16, len(batch) - 1))  # the leader epoch before it is nobody's
    batch[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((CorruptDataError, InvalidRequestError)):
        check_batch(bytes(batch))


@given(RECORDS, CODECS, st.booleans(), st.data())
def test_records_under_a_right_checksum_do_no_harm(
    records: list[Record], codec: Compression, passed: bool, data: st.DataObject
) -> None:
    """A producer may send anything under a right checksum: it is carried, or refused with an error of ours."""
    batch = bytearray(batch_of(records, codec))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(61, len(batch) - 1))
        batch[at] = data.draw(st.integers(0, 255))
    wrong = stamp(bytes(batch), producer_id=1 << 62, producer_epoch=4, base_sequence=17)
    check_batch(wrong)
    try:
        frames = carry(wrong, 1, target(passed=passed), BatchAuthor(TXN.bytes, 1_000, 0))
    except (CorruptDataError, InvalidRequestError):
        return
    assert sum(frame.records for frame in frames) == len(records)


@pytest.mark.parametrize("transactional", [False, True])
def test_other_batches_are_not_taken(transactional: bool) -> None:
    builder = BatchBuilder(10_000)
    builder.append(NOW_MS, None, b"v")
    batch = stamp(
        builder.build(), producer_id=-1 if transactional else 7, producer_epoch=0, base_sequence=0,
        transactional=transactional,
    )  # fmt: skip
    with pytest.raises(InvalidRequestError):
        check_batch(batch)


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("codec", [0, 1, 3, 4])
def test_the_time_of_each_record_counts_and_not_the_headers(codec: int, each: bool) -> None:
    hour_ms = 3_600_000
    taking, author = (
        target(passed=True, each=each, before_ms=hour_ms, after_ms=hour_ms),
        BatchAuthor(TXN.bytes, 1_000, 0),
    )

    def made(after_ms: int, told_ms: int) -> bytes:
        records = b"".join(batch_makers.record(number, after_ms=after_ms * (number == 1)) for number in range(3))
        return claims.batch(Pair(1 << 62, 4), records, 3, codec=codec, times=(NOW_MS, NOW_MS + told_ms))

    for after_ms in (2 * hour_ms, -2 * hour_ms):
        with pytest.raises(InvalidRequestError, check=lambda fault: fault_of(fault) is KafkaFault.TIMESTAMP):
            carry(made(after_ms, 0), 0, taking, author)
    for told_ms in (2 * hour_ms, -2 * hour_ms):
        [frame] = carry(made(5, told_ms), 0, taking, author)
        assert parse_header(frame.batch).max_timestamp == NOW_MS + 5
