"""What a leader does to small batches in less time: the same as the general functions do, or it leaves it to them."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bridge.tests.batch_makers import build, codecs, runs
from rollbridge.errors import CorruptDataError
from rollbridge.kafka.batches import (
    HEADER_BYTES,
    PLAIN_RECORDS_MAX,
    BatchBuilder,
    Compression,
    is_frame,
    join_bound,
    joined,
    plain_records,
    read_records,
    rebatch,
    stamp,
    validate_frame,
)

ROOM = 1 << 20


def is_valid(batch: bytes, count: int) -> bool:
    try:
        validate_frame(batch, count)
    except CorruptDataError:
        return False
    return True


@given(runs, codecs, st.integers(-1, 1), st.data())
def test_a_frame_is_taken_if_and_only_if_it_is_valid(
    records: list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]],
    codec: Compression,
    off: int,
    data: st.DataObject,
) -> None:
    batch = build(records, codec)
    assert is_frame(batch, len(records))
    assert is_frame(batch, len(records) + off) == is_valid(batch, len(records) + off)
    place = data.draw(st.integers(0, len(batch) - 1))
    damaged = batch[:place] + bytes([batch[place] ^ data.draw(st.integers(1, 255))]) + batch[place + 1 :]
    assert is_frame(damaged, len(records)) == is_valid(damaged, len(records))
    assert not is_frame(batch[:place], len(records))
    assert not is_frame(batch + b"x", len(records))


def test_a_batch_of_a_native_transaction_is_no_frame() -> None:
    batch = build([(1, b"k", b"v", [])])
    native = stamp(batch, producer_id=1, producer_epoch=0, base_sequence=0)
    assert is_frame(batch, 1)
    assert not is_frame(native, 1)
    assert not is_frame(batch, 0)


@given(st.lists(runs, min_size=2, max_size=6))
def test_batches_are_joined_as_the_general_way_does_it(
    parts: list[list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]]],
) -> None:
    batches = [build(part) for part in parts]
    ends = list(accumulate(map(len, parts)))
    bound = HEADER_BYTES + sum(join_bound(len(batch), len(part)) for batch, part in zip(batches, parts, strict=True))
    assert joined(batches, ends, bound) == rebatch(batches, bound).batches[0]
    assert joined(batches, ends, bound - 1) is None, "it might not fit"


@given(st.lists(st.tuples(runs, codecs), min_size=2, max_size=4))
def test_compressed_batches_are_left_to_the_general_way(
    parts: list[tuple[list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]], Compression]],
) -> None:
    assume(any(codec is not Compression.NONE for _, codec in parts))
    ends = list(accumulate(len(part) for part, _ in parts))
    assert joined([build(part, codec) for part, codec in parts], ends, ROOM) is None


def test_what_is_no_batch_is_left_to_the_general_way_and_a_wrong_count_is_an_error() -> None:
    batch = build([(1, b"k", b"v", [])])
    for wrong in (b"", batch[:30], batch + b"x", batch[:16] + b"\1" + batch[17:]):
        assert joined([batch, wrong], [1, 2], ROOM) is None
    with pytest.raises(CorruptDataError, match="number of records"):
        joined([batch, batch], [1, 3], ROOM)


@given(runs, codecs)
def test_records_are_read_at_once_only_where_they_are_few_and_as_one_by_one(
    records: list[tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]], codec: Compression
) -> None:
    batch = build(records, codec)
    found = plain_records(batch)
    if codec is not Compression.NONE:
        assert found is None
        return
    assert found is not None
    one_by_one = [(item.offset, item.timestamp, item.key, item.value) for item in read_records(batch)]
    assert [(item.offset, item.timestamp, item.key, item.value) for item in found] == one_by_one


def test_many_records_and_such_as_do_not_parse_are_not_read_at_once() -> None:
    builder = BatchBuilder(ROOM)
    for _ in range(PLAIN_RECORDS_MAX + 1):
        assert builder.append(1, None, b"", [])
    assert plain_records(builder.build()) is None
    batch = build([(1, b"k", b"v", [])])
    assert plain_records(batch[:HEADER_BYTES] + b"\xff" * (len(batch) - HEADER_BYTES)) is None
    assert plain_records(batch[:-1]) is None
