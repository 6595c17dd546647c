"""Key space: hashes as Spark computes them, positions, ranges and what partitions the space."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.tests.strategies import cuts, partitions
from rollbridge.errors import InvalidRangesError
from rollbridge.model.keyspace import (
    SEGMENTS_MAX,
    KeyRange,
    check_partition,
    even_ranges,
    key_hash,
    position_of_hash,
    ranges_of,
)
from rollbridge.model.partitioners import KeySpace

# Computed once with pyspark 4.2.0, not with this package:
#   spark.sql("select xxhash64(unhex('616263'))")       (unhex gives a binary column; seed 42 is Spark's own)
# They cover every branch of XXH64: 0 to 3, 4 to 7, 8 to 31 and 32 or more bytes, and remainders of each kind.
SPARK_XXHASH64 = [
    (b"", -7444071767201028348),
    (b"a", -8582455328737087284),
    (b"\x00", -8959994473701255385),
    (b"UA", -536276471978638185),
    (b"abc", 1423657621850124518),
    (b"\xff\x00\xfe", 5999420298635320949),
    (b"Spark", -4294468057691064905),
    (b"1234567", -3188848029947885567),
    (b"12345678", 6863040065134489090),
    (b"123456789012", 1549582498302756521),
    ("Zürich/東京".encode(), 91872966571029313),
    (b"2013-01-01/EWR", 1738718309499918473),
    (bytes(range(31)), -8988936099728967847),
    (bytes(range(32)), -8644129751861931918),
    (bytes(range(33)), 2046936095001747419),
    (bytes(range(256)), -2156533592262354883),
    (b"x" * 1000, -8448076897081045321),
]


@pytest.mark.parametrize(("key", "signed"), SPARK_XXHASH64)
def test_hash_of_a_key_is_sparks_xxhash64(key: bytes, signed: int) -> None:
    assert key_hash(key) == signed % (1 << 64)


@pytest.mark.parametrize(("key", "signed"), SPARK_XXHASH64)
def test_position_of_a_key_is_the_hash_scaled_by_its_upper_53_bits(key: bytes, signed: int) -> None:
    exact = Fraction((signed % (1 << 64)) >> 11, 1 << 53)
    assert Fraction(KeySpace().position(key)) == exact
    assert KeySpace().position(key) == position_of_hash(signed % (1 << 64))


@given(st.integers(0, (1 << 64) - 1))
def test_positions_are_exact_and_below_one(value: int) -> None:
    position = position_of_hash(value)
    assert 0.0 <= position < 1.0
    assert Fraction(position) == Fraction(value >> 11, 1 << 53)


def test_the_largest_hash_lies_just_below_one() -> None:
    assert position_of_hash((1 << 64) - 1) == math.nextafter(1.0, 0.0)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.5, 0.5), (0.6, 0.5), (-0.1, 0.5), (0.5, 1.1), (math.nan, 0.5), (0.0, math.nan), (0.0, math.inf)],
)
def test_what_is_no_range_is_refused(low: float, high: float) -> None:
    with pytest.raises(InvalidRangesError, match="0 <= low < high <= 1 must hold; nothing was written"):
        KeyRange(low, high)


def test_a_range_holds_its_lower_end_and_not_its_upper() -> None:
    item = KeyRange(0.25, 0.5)
    assert [position in item for position in (0.2499, 0.25, 0.4999, 0.5)] == [False, True, True, False]


@given(partitions(), partitions(), st.floats(0.0, 1.0, exclude_max=True))
def test_ranges_overlap_exactly_if_a_position_lies_in_both(
    some: list[KeyRange], others: list[KeyRange], position: float
) -> None:
    for one in some:
        for other in others:
            inside = max(one.low, other.low)
            assert one.overlaps(other) == (inside in one and inside in other)
            assert one.overlaps(other) == other.overlaps(one)
            if position in one and position in other:
                assert one.overlaps(other)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 4096, SEGMENTS_MAX])
def test_even_ranges_partition_the_key_space(count: int) -> None:
    ranges = even_ranges(count)
    assert len(ranges) == count
    check_partition(ranges)


@pytest.mark.parametrize("count", [0, -1, SEGMENTS_MAX + 1])
def test_a_number_of_segments_out_of_bounds_is_refused(count: int) -> None:
    with pytest.raises(InvalidRangesError, match=f"1 to {SEGMENTS_MAX} are possible"):
        even_ranges(count)


@given(partitions())
def test_a_partition_is_accepted_and_one_without_a_range_is_not(ranges: list[KeyRange]) -> None:
    check_partition(ranges)
    for place in range(len(ranges)):
        with pytest.raises(InvalidRangesError):
            check_partition(ranges[:place] + ranges[place + 1 :])


@given(partitions(), cuts)
def test_a_partition_with_one_more_range_is_refused(ranges: list[KeyRange], cut: float) -> None:
    with pytest.raises(InvalidRangesError, match="overlap"):
        check_partition(sorted([*ranges, KeyRange(0.0, cut)]))


@pytest.mark.parametrize(
    ("pairs", "whole", "words"),
    [
        ([(0.0, 0.5), (0.4, 1.0)], None, r"ranges \[0, 0.5\) and \[0.4, 1\) overlap"),
        ([(0.0, 0.4), (0.5, 1.0)], None, r"cover \[0, 0.4\) and \[0.5, 1\) but must cover exactly \[0, 1\)"),
        ([(0.0, 0.5)], None, r"cover \[0, 0.5\) but must cover exactly \[0, 1\)"),
        ([(0.0, 0.5)], [(0.0, 0.25), (0.5, 1.0)], r"must cover exactly \[0, 0.25\) and \[0.5, 1\)"),
        ([], None, "no key range was given"),
        # Both ends print as 0.333333 with six digits; the message must show the gap.
        ([(0.0, 0.333333), (0.3333333, 1.0)], None, r"\[0, 0.333333\) and \[0.3333333, 1\)"),
    ],
)
def test_what_does_not_cover_exactly_the_whole_is_refused_and_named(
    pairs: list[tuple[float, float]], whole: list[tuple[float, float]] | None, words: str
) -> None:
    with pytest.raises(InvalidRangesError, match=words):
        check_partition(ranges_of(pairs), None if whole is None else ranges_of(whole))


def test_too_many_ranges_are_refused_before_they_are_looked_at() -> None:
    with pytest.raises(InvalidRangesError, match="at most"):
        check_partition([KeyRange(0.0, 1.0)] * (SEGMENTS_MAX + 1))


def test_ranges_are_taken_from_pairs_in_any_order() -> None:
    assert ranges_of([(0.5, 1), KeyRange(0.0, 0.5)]) == [KeyRange(0.0, 0.5), KeyRange(0.5, 1.0)]


@given(partitions())
def test_the_text_of_a_range_reads_back_as_the_same_numbers(ranges: list[KeyRange]) -> None:
    for item in ranges:
        low, high = str(item).strip("[)").split(", ")
        assert (float(low), float(high)) == (item.low, item.high)
