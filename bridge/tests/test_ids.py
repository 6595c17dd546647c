"""Ids: bit layouts of the proposals, round trips, order, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import segment_ids, transaction_ids
from rollbridge.base.ids import (
    COUNT_MAX,
    COUNTER_MAX,
    EPOCH_MAX,
    PART_MAX,
    SEGMENT_NUMBER_MAX,
    SegmentId,
    TransactionId,
    local_sequence,
    split_local_sequence,
)
from rollbridge.errors import InvalidRequestError


@given(segment_ids)
def test_segment_id_round_trips_through_64_bits(segment: SegmentId) -> None:
    assert SegmentId.from_int(int(segment)) == segment
    assert 0 <= int(segment) < 1 << 63, "it must fit into a signed 64-bit number"


@given(segment_ids, segment_ids)
def test_segment_ids_sort_by_epoch_then_number(one: SegmentId, other: SegmentId) -> None:
    assert (one < other) == ((one.epoch, one.number) < (other.epoch, other.number))
    assert (one >= other) == ((one.epoch, one.number) >= (other.epoch, other.number))


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (
            SegmentId.of,
            [(-1, 0), (0, -1), (SEGMENT_NUMBER_MAX + 1, 0), (0, EPOCH_MAX + 1), (1 << 40, 1 << 40)],
            r"is not in 0\.\.2147483647",
        ),
        (SegmentId.from_int, [(-1,), (1 << 63,), (0x8000_0000,)], None),
        (TransactionId.from_bytes, [(b"",), (bytes(15),), (bytes(17),)], "16 bytes, not (0|15|17)"),
        (TransactionId.of, [(0, -1), (0, COUNTER_MAX + 1)], "96 bits"),
        (TransactionId, [(-1,), (1 << 128,)], "128 bits"),
        (TransactionId.parse, [("6ba7b810-9dad-11d1-80b4-00c04fd430c8",)], "bits 16 to 31 of one are zero"),
        (local_sequence, [(-1, 0), (PART_MAX + 1, 0), (0, -1), (0, COUNT_MAX + 1)], r"is not in 0\.\."),
    ],
)
def test_what_is_out_of_bounds_is_refused(
    make: Callable[..., object], arguments: Sequence[tuple[object, ...]], words: str | None
) -> None:
    for given_ones in arguments:
        with pytest.raises(InvalidRequestError, match=words):
            make(*given_ones)


def test_an_epoch_beyond_16_bits_keeps_its_low_16_bits() -> None:
    assert TransactionId.of(epoch=65_537, counter=7) == TransactionId.of(epoch=1, counter=7)


@given(transaction_ids)
def test_transaction_id_round_trips(transaction: TransactionId) -> None:
    assert TransactionId.from_bytes(transaction.bytes) == transaction
    assert TransactionId.parse(str(transaction)) == transaction
    assert TransactionId.parse(str(transaction).replace("-", "").upper()) == transaction
    assert TransactionId.of(transaction.epoch, transaction.counter) == transaction


@given(st.integers(0, 0xFFFF), st.lists(st.integers(0, COUNTER_MAX), unique=True, min_size=2))
def test_ids_of_an_epoch_sort_by_counter_in_every_form(epoch: int, counters: list[int]) -> None:
    ids = [TransactionId.of(epoch, counter) for counter in sorted(counters)]
    for before, after in pairwise(ids):
        assert before < after
        assert before.bytes < after.bytes
        assert str(before) < str(after)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "00010000-0000-0000-0000-00000000002",
        "00010000-0000-0000-0000-00000000002g",
        "00010000-0000-0000-0000-0000000000_2",
        "{00010000-0000-0000-0000-00000000002a}",
        "urn:uuid:00010000-0000-0000-0000-00000000002a",
        "0-0010000000000000000000000000002a",
        "00010000-0000-0000-0000-00000000002a\n",
        "00010000-0000-0000-0000-0000000000\u0662\u0662",
    ],
)
def test_text_that_is_no_transaction_id_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="a UUID such as 00010000-0000-0000-0000-00000000002a"):
        TransactionId.parse(text)


@given(st.integers(0, PART_MAX), st.integers(0, COUNT_MAX))
def test_local_sequence_round_trips_and_fits_63_bits(part: int, count: int) -> None:
    value = local_sequence(part, count)
    assert split_local_sequence(value) == (part, count)
    assert 0 <= value < 1 << 63
